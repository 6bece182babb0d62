"""What the sections of subagent_fleet.py weigh, as the table of CONTRIBUTING.

python3 tests/weigh.py            print it
python3 tests/weigh.py --write    put it into .github/CONTRIBUTING.md

A code token is one that Python reads: no comment, no docstring, no line's end, no indent. No
packing and no shorter name can lower it.
"""
import io
import pathlib
import re
import sys
import tokenize

ROOT = pathlib.Path(__file__).resolve().parent.parent
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
    """Return the table: a row a section, then the whole file."""
    text = (ROOT / "subagent_fleet.py").read_text(encoding="utf-8")
    lines = text.splitlines()
    sections, at = [], [0] * (len(lines) + 1)
    for number, line in enumerate(lines, 1):
        heading = re.fullmatch(r"# == (\d+)\. (.+?) =+", line)
        if heading:
            sections.append([f"{heading[1]}. {heading[2]}", number, 0])
        at[number] = len(sections)
    for line in weigh(text):
        sections[max(at[line] - 1, 0)][2] += 1
    ends = [number for _, number, _ in sections[1:]] + [len(lines) + 1]
    rows = ["| Section | Lines | Code tokens |", "|---|---:|---:|"]
    rows += [f"| {name} | {end - begin:,} | {tokens:,} |"
             for (name, begin, tokens), end in zip(sections, ends)]
    total = sum(tokens for _, _, tokens in sections)
    return "\n".join([*rows, f"| **the whole file** | {len(lines):,} | {total:,} |"]) + "\n"


if __name__ == "__main__":
    table = render_table()
    print(table, end="")
    if "--write" in sys.argv:
        path = ROOT / ".github" / "CONTRIBUTING.md"
        begin, end = "<!-- python3 tests/weigh.py --write -->\n", "<!-- end -->\n"
        text = path.read_text(encoding="utf-8")
        before, after = text.split(begin)[0], text.split(end)[1]
        path.write_text(before + begin + table + end + after, encoding="utf-8")
