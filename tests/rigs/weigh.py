"""What the rooms of src/fleet weigh, as the table of CONTRIBUTING.

python3 tests/rigs/weigh.py            print it
python3 tests/rigs/weigh.py --write    put it into .github/CONTRIBUTING.md

A code token is one that Python reads: no comment, no docstring, no line's end, no indent. No
packing and no shorter name can lower it.
"""
import io
import pathlib
import re
import sys
import tokenize

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
          tokenize.ENCODING, tokenize.ENDMARKER}


def weigh(text):
    """Yield the number of the line of each code token."""
    begins = True  # a text that begins a statement is a docstring
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT and not (begins and token.type == tokenize.STRING):
            yield token.start[0]
        if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            begins = True
        elif token.type not in (tokenize.NL, tokenize.COMMENT, tokenize.ENCODING):
            begins = False


def render_table():
    """Return the table: a row a room, then the whole file."""
    text = (ROOT / "subagent_fleet.py").read_text(encoding="utf-8")
    lines = text.splitlines()
    rooms, at = {"start": [0, 0, 0]}, []  # room: parts, lines, tokens
    room = "start"
    for line in lines:
        banner = re.fullmatch(r"# == (\w+)/\w+\.py, from line \d+ =+", line)
        if banner:
            room = banner[1]
            rooms.setdefault(room, [0, 0, 0])[0] += 1
        rooms[room][1] += 1
        at.append(room)
    rooms["start"][0] += 1  # the gate has no banner
    for number in weigh(text):
        rooms[at[number - 1]][2] += 1
    rows = ["| Room | Parts | Lines | Code tokens |", "|---|---:|---:|---:|"]
    rows += [f"| {name} | {parts} | {size:,} | {tokens:,} |"
             for name, (parts, size, tokens) in rooms.items()]
    parts, _, total = (sum(column) for column in zip(*rooms.values()))
    return "\n".join([*rows, f"| **the whole file** | {parts} | {len(lines):,} | {total:,} |"]) + "\n"


if __name__ == "__main__":
    table = render_table()
    print(table, end="")
    if "--write" in sys.argv:
        path = ROOT / ".github" / "CONTRIBUTING.md"
        begin, end = "<!-- python3 tests/rigs/weigh.py --write -->\n", "<!-- end -->\n"
        text = path.read_text(encoding="utf-8")
        before, after = text.split(begin)[0], text.split(end)[1]
        path.write_text(before + begin + table + end + after, encoding="utf-8")
