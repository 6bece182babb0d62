"""The YAML subset: text to values, with the position of each key."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.start.constants import TEXT_LIMIT_BYTES
from fleet.start.errors import FleetError
from fleet.start.gate import LatePattern
from fleet.text.phrases import show_value
from fleet.text.width import width_of
from fleet.text.yaml_scalars import YAML_CLASH, resolve_scalar

if TYPE_CHECKING:
    from typing import Any, NoReturn


# document = [BOM] ["---"] [node]             comments and blank lines between all tokens
# node     = mapping | sequence | inline      indented deeper than its parent
# mapping  = (key ":" [node])+                all in one column, no key twice
# sequence = ("-" [node])+                    may stand in the column of its own key
# inline   = plain | "'" text "'" | '"' text '"' | ("|" | ">") ["+" | "-"] lines | flow
# flow     = "[" [item ("," item)* [","]] "]" | "{" [key [":" item] ("," ...)* [","]] "}"
#
# The rule: return what PyYAML's safe_load returns, or raise an error.
# A key is a scalar with a colon behind it, on one line; after each value the next token is
# deeper (an error), in the same column (a neighbor) or less deep (the container is over).
# Where PyYAML is laxer than YAML (columns inside quotes and brackets), so is this reader.
# JSON is read as flow style. Unsupported, because:
#   anchors, aliases, merge keys  a value would hide in another place
#   tags, directives              they exist to change what plain text means
#   `?` keys, pairs as [a: b]     few people read them right
#   several documents, `...`      one file, one fleet
#   yes, 012, 1:30, 2001-01-01    YAML 1.1 and 1.2 disagree on what they are
#   0x1f, .nan, `|2`, `--- x`     nobody writes them by hand
#   tabs before a token           no two programs agree on their width
#   odd blanks around plain text  U+00A0 looks like a space and is read as a letter
#   escaped surrogates (\ud83d)   PyYAML makes two broken characters of a pair

DEPTH_LIMIT = 64
KEY_LIMIT = 1024  # from the start of a key to its colon: YAML's own limit
PLACES_LIMIT = 100_000  # values whose position is kept: 350 bytes each

# Surrogates, controls, and the line breaks and byte order marks that programs disagree on.
_ODD = LatePattern("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
# Characters that look like a space or like nothing, but are letters to YAML.
_ODD_BLANKS = ("\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008"
               "\u2009\u200a\u200b\u202f\u205f\u2060\u3000")
_BLANKS = LatePattern(r"[ \n]*")
_GAP = LatePattern(r"(?:[ \n]+|#[^\n]*)*")  # blanks and comments
_MARKER = LatePattern(r"(?m)^(?:---|\.\.\.)(?=[ \t\n]|\Z)")
# The lines of a git conflict. They may be text only inside quotes.
_CONFLICT = LatePattern(r"(?m)^(?:<{7}|\|{7}|>{7})(?: .*)?$|^={7}$")
_OPENS_TEXT = LatePattern(r": +[|>][+-]? *(#.*)?\n*\Z")
_DASH = LatePattern(r"-(?=[ \t\n]|\Z)")
_COLON = LatePattern(r" *:(?=[ \t\n]|\Z)")
# How plain text begins and ends, in block style and between brackets.
_START = r"[^ \t\n\-?:,\[\]{}#&*!|>'\"%@`]|-(?![ \t\n]|\Z)"
_BLOCK = LatePattern(_START + r"|[?:](?![ \t\n]|\Z)"), LatePattern(r":(?=[ \t\n]|\Z)| #|\t|\n")
_FLOW = LatePattern(_START), LatePattern(r":(?=[ \t\n,\[\]{}]|\Z)| #|[\t\n,?\[\]{}]")
# Characters with a meaning inside quotes, and the closing quote. A run of blanks is matched as a
# whole, which keeps this linear.
_QUOTED = {
    "'": LatePattern(r"''?|[ \t]*\n[ \t\n]*|[ \t]{2,}"),
    '"': LatePattern(r'"|\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|\n[ \t\n]*|[^\n])'
                  r"|[ \t]*\n[ \t\n]*|[ \t]{2,}")}
_ESCAPES = {
    "0": "\0", "a": "\a", "b": "\b", "t": "\t", "\t": "\t", "n": "\n", "v": "\v", "f": "\f",
    "r": "\r", "e": "\x1b", " ": " ", '"': '"', "/": "/", "\\": "\\",
    "N": "\x85", "_": "\xa0", "L": "\u2028", "P": "\u2029"}
_LINES = LatePattern(r"[|>]([-+]?)(?: *| +#[^\n]*)(?:\n|\Z)")
# Two lines of a `>` scalar that are joined: neither begins with a blank.
_FOLDED = LatePattern(r"(?m)^([^ \t\n][^\n]*)\n(\n*)(?=[^ \t\n])")
BARE_WORD = LatePattern(r"(?a)(?!//)[A-Za-z_/][\w./@%+=();-]*(?:[ :][\w./@%+=();-]+)*")
# Characters that cannot begin a value: slug, message, fix.
_HINTS = {
    "&": ("unsupported", "anchors (`&`)",
          "repeat the value where it is used, or quote it"),
    "*": ("unsupported", "aliases (`*`)", "repeat the value, or quote it"),
    "!": ("unsupported", "tags (`!`)", "remove the tag, or quote the text"),
    "?": ("unsupported", "`?` keys", "write `key: value`, or quote the text"),
    "%": ("unsupported", "directives (`%`)", "remove the line, or quote the text"),
    "@": ("syntax", "plain text cannot begin with `@`", "quote it"),
    "`": ("syntax", "plain text cannot begin with a backtick",
          "remove the line of a Markdown fence, or quote the text"),
    "\t": ("tab", "this is a tab, but YAML accepts only spaces",
           "replace the tab with spaces"),
    "-": ("syntax", "a list cannot begin here", "start the list on the line below its key"),
    ":": ("syntax", "a colon without a key", "write a key before it, or quote the text"),
    **dict.fromkeys("|>", ("syntax", "only `+` or `-` may follow this on its line",
                           "put the text on the lines below, or quote it")),
    **dict.fromkeys(_ODD_BLANKS,
                    ("character", "this is not a plain space",
                     "write a plain space or nothing instead, or quote the text"))}


def parse_yaml(text: str, source: str = "<text>") -> object:
    """Return the plain value of a YAML or JSON text: what PyYAML's safe_load returns."""
    return Document(text, source).value


class Document:
    """A parsed YAML or JSON text: its `value`, and the position of everything in it.

    Every reading method starts at `self.at`. Those of block style stop at the next token and
    leave its column in `self.column`: -1 at the end of the document.
    """

    def __init__(self, text: str, source: str) -> None:
        if len(text) > TEXT_LIMIT_BYTES:
            raise FleetError("yaml-limit", f"the text has {len(text):,} characters, more "
                             f"than {TEXT_LIMIT_BYTES:,}", where=source)
        self.text = text.removeprefix("\ufeff").replace("\r\n", "\n")
        self.source = source
        self.at = 0
        self.column = -1
        self.path: list = []  # of the value that is being read
        # By path: start and end of its key, start and end of its value.
        self.places: dict[tuple, tuple] = {}
        self.span: tuple[int, int] | None = None  # of the value read last, if it has one

        # Compiling the pattern takes longer than all else here; few texts need it.
        is_plain = self.text.replace("\n", "").replace("\t", "").isprintable()
        odd = None if is_plain else _ODD.search(self.text)
        if odd:
            self.fail(f"U+{ord(odd[0]):04X} does not belong in YAML text",
                      "remove it, or escape it inside double quotes",
                      at=odd.start(), slug="character")
        self.value: Any = self.read_document()

    # -- places --

    def locate(self, path: tuple, *, key: bool = False) -> tuple[str, str]:
        """Return (`source:line:column`, excerpt) of a value, or of the nearest key above."""
        while path not in self.places:
            path = path[:-1]
            key = True
        spans = self.places[path]
        return self.show(*(spans[:2] if key else spans[2:]))

    def show(self, start: int, end: int) -> tuple[str, str]:
        """Return `source:line:column` of a span, and its line with the span underlined."""
        line_start = self.line_start(start)
        line_end = self.line_end(start)
        # A long line is cut so that the span is seen in 60 columns.
        left = max(line_start, start - 42)
        right = min(line_end, left + 90)
        end = start + len(self.text[start:min(end, right)].rstrip(" \n"))

        before = "…" * (left > line_start) + visible(self.text[left:start])
        token = visible(self.text[start:end])
        after = visible(self.text[end:right]) + "…" * (right < line_end)
        caret = " " * width_of(before) + "^" * max(1, width_of(token))
        line = self.line_of(start)
        return (f"{self.source}:{line}:{start - line_start + 1}",
                f"{line:>5} | {before}{token}{after}\n{'':>5} | {caret}")

    def line_of(self, at: int) -> int:
        return self.text.count("\n", 0, at) + 1

    def line_start(self, at: int) -> int:
        return self.text.rfind("\n", 0, at) + 1

    def line_end(self, at: int) -> int:
        end = self.text.find("\n", at)
        return len(self.text) if end < 0 else end

    def open(self) -> None:
        """Begin a container: the last step of the path is the entry that is being read."""
        self.path.append(None)
        if len(self.path) > DEPTH_LIMIT:
            self.fail(f"more than {DEPTH_LIMIT} levels deep", slug="limit")

    def mark(self, start: int, end: int) -> None:
        """Keep the positions of an entry's key and value."""
        # An empty value, or one that begins below its key, has the position of its key.
        if len(self.places) < PLACES_LIMIT:
            self.places[tuple(self.path)] = (start, end, *(self.span or (start, end)))

    def close(self) -> None:
        self.path.pop()
        self.span = None

    def check_twin(self, mapping: dict, key: object, start: int) -> None:
        """Refuse a key that a mapping already has; to Python, `true` and `1` are one, too."""
        if key not in mapping:
            return
        first = self.places.get((*self.path[:-1], key))
        line = f"on line {self.line_of(first[0])}" if first else "above"
        what = f"the key `{visible(str(key))}` is already {line}"
        fix = "remove or rename one of them"
        twin = next(other for other in mapping if other == key)
        if type(twin) is not type(key):
            shown = show_value(key)
            what = f"the keys {show_value(twin)} and {shown} are the same without quotes"
            fix = f'write `"{shown[1:-1]}":`'
        self.fail(what, fix, at=start, size=len(str(key)), slug="duplicate")

    # -- what is wrong --

    def fail(self, what: str = "", fix: str = "", *, at: int | None = None, size: int = 1,
             slug: str = "syntax") -> NoReturn:
        """Refuse the token at a position, by default because it is unexpected there."""
        at = self.at if at is None else at
        conflict = _CONFLICT.search(self.text)
        if conflict:
            at, size, slug = conflict.start(), len(conflict[0]), "conflict"
            what = "this is a git conflict"
            fix = "choose a side: keep one version, and remove the lines of git's marks"
        elif not what:
            char = self.text[at:at + 1]
            usual = ("syntax", f"`{visible(char)}` cannot be here",
                     "remove it, or quote the text")
            slug, what, fix = _HINTS.get(char, usual)
            if slug == "unsupported":
                what += " are outside the YAML subset"
        where, excerpt = self.show(at, at + size)
        raise FleetError(f"yaml-{slug}", what, where=where, excerpt=excerpt, fix=fix)

    def fail_line(self, start: int) -> NoReturn:
        """Refuse the line at `start`, which is not a key with a value."""
        above = self.text[:self.text.rfind("\n", 0, start)]
        if _OPENS_TEXT.search(above):
            self.fail("the text below `|` or `>` is not indented",
                      "put more spaces before it than before the key above",
                      at=start, size=self.line_end(start) - start)
        self.fail("expected `key: value`",
                  "put `: ` after the key, `#` before a comment, spaces before text of `|`",
                  at=start, size=self.line_end(start) - start)

    # -- from token to token --

    def next_token(self) -> bool:
        """Move to the next token; return whether it is on the same line."""
        start = self.at
        self.at = _GAP.match(self.text, start).end()
        self.column = self.at - self.line_start(self.at)
        if self.at == len(self.text) or (
                self.column == 0 and _MARKER.match(self.text, self.at)):
            self.column = -1
            return False
        return "\n" not in self.text[start:self.at]

    def end_line(self, start: int, indent: int) -> None:
        """Skip the rest of a line, which must be empty, and move to the next token.

        The value that began at `start` ends here; its parent is in column `indent`.
        """
        end = self.at
        if not self.next_token():
            return
        first, line = self.line_of(start), self.line_of(end)
        char, quote = self.text[self.at], self.text[start]
        is_quoted = quote in "\"'"
        if is_quoted and line > first:
            self.fail(f"this `{quote}` is closed only on line {line}, and more text follows",
                      f"close it on line {first}", at=start)
        if is_quoted and char not in ":\t":
            inside = "`''` for an apostrophe" if quote == "'" else '`\\"` for a quote'
            self.fail(f"text after the closing `{quote}`",
                      f"write {inside} inside the text, or remove what follows it")
        if char != ":":
            self.fail()
        if not self.text[self.line_start(start):start].strip(" -"):  # the value begins here
            self.fail_line(start)
        fix = "quote the whole text, or remove the space"
        if line > first:
            fix = f"begin its line with {indent} spaces, or quote the whole text"
        self.fail("`: ` inside a value", fix)

    # -- block style --

    def read_document(self) -> object:
        """Read the value of the whole text."""
        self.next_token()
        if self.column < 0 and self.text.startswith("---", self.at):
            self.at += 3
            if self.next_token():
                self.fail("a value on the same line as `---`", "put it on the next line")
        self.places[()] = (self.at, self.at + 1) * 2

        value = self.read_block(-1) if self.column >= 0 else None
        if self.column >= 0:
            self.fail_line(self.at)
        if self.at < len(self.text):
            self.fail("several documents (`---`, `...`) are outside the YAML subset",
                      "keep one document per file: remove this line",
                      size=3, slug="unsupported")
        return value

    def read_block(self, indent: int, *, may_nest: bool = True) -> object:
        """Read the value here; its parent is in column `indent`.

        On the line of a key, a block list or mapping may not begin (`may_nest` is false).
        """
        start = self.at
        column = self.column
        value: Any
        if may_nest and _DASH.match(self.text, start):
            value = self.read_sequence(column)
        elif self.text[start] in "|>":
            return self.read_lines(indent)
        else:
            value = self.read_token(_BLOCK, indent)
            is_key = may_nest and self.text[start] not in "[{" and self.read_colon(start)
            if not is_key:
                self.end_line(start, indent)
                return value
            value = self.read_mapping(column, start, value)

        if self.column <= indent:
            return value
        line = self.line_of(start)
        if self.column == column:
            self.fail(f"this is not an item of the list that begins on line {line}",
                      "begin it with `- `", slug="indent")
        fix = f"begin its line with {column} spaces"
        if indent >= 0 and self.column < column:
            fix = (f"begin its line with {indent} or {column} spaces, or line {line} with "
                   f"{self.column}")
        self.fail(f"wrong indentation: column {self.column + 1}, but line {line} uses "
                  f"column {column + 1}", fix, slug="indent")

    def read_colon(self, start: int) -> bool:
        """Skip the colon that makes the text since `start` a key."""
        colon = _COLON.match(self.text, self.at)
        if not colon or "\n" in self.text[start:self.at]:
            return False
        if colon.end() - start > KEY_LIMIT + 1:
            self.fail(f"a key of over {KEY_LIMIT:,} characters", "shorten it",
                      at=start, slug="limit")
        self.key_end = self.at
        self.at = colon.end()
        return True

    def read_sequence(self, column: int) -> list:
        items: list = []
        self.open()
        while self.column == column and _DASH.match(self.text, self.at):
            dash = self.at
            self.at += 1
            self.path[-1] = len(items)
            items.append(self.read_value(column, is_item=True))
            self.mark(dash, dash + 1)
        self.close()
        return items

    def read_mapping(self, column: int, start: int, key: object) -> dict:
        """Read a mapping; its first key and colon have been read."""
        mapping: dict = {}
        self.open()
        while True:
            end = self.key_end
            self.check_twin(mapping, key, start)
            self.path[-1] = key
            mapping[key] = self.read_value(column)
            self.mark(start, end)
            if self.column != column:
                break
            start = self.at
            if _DASH.match(self.text, start):
                self.fail("a list item among keys",
                          "indent the list below its key, or remove the dash")
            key = self.read_scalar(_BLOCK, column)
            if not self.read_colon(start):
                self.fail_line(start)
        self.close()
        return mapping

    def read_value(self, column: int, *, is_item: bool = False) -> object:
        """Read the value after a key or a dash, if there is one."""
        self.span = None
        if self.next_token() and not is_item:
            return self.read_block(column, may_nest=False)
        # A key's list may be in the column of the key.
        may_align = self.column == column and not is_item and _DASH.match(self.text, self.at)
        if self.column > column or may_align:
            return self.read_block(column)
        return None

    def read_lines(self, indent: int) -> str:
        """Read a `|` or `>` scalar; its parent is in column `indent`."""
        text = self.text
        start = self.at
        header = _LINES.match(text, start)
        if not header:
            self.fail()

        # The first line with text sets the indentation of all of them.
        gap = _BLANKS.match(text, header.end())
        widths = [len(row) for row in gap[0].split("\n")]
        if indent < widths[-1] < max(widths):
            self.fail("a blank line above is indented deeper than this line",
                      "remove the spaces of the blank line", at=gap.end(), slug="indent")
        width = max(indent + 1, 1, *widths)

        rows = []
        at = header.end()
        while at < len(text):
            end = self.line_end(at)
            row = text[at:min(end, at + width)]
            if row.strip(" ") or (end == len(text) and end - at <= width):
                break
            rows.append(text[at + len(row):end + 1])
            at = end + 1
        self.span = start, start + 1
        self.at = min(at, len(text))
        self.next_token()

        body = "".join(rows)
        kept = body.rstrip("\n")
        breaks = body[len(kept):]
        if header[1] == "-" or not (header[1] or kept):
            breaks = ""
        elif not header[1]:
            breaks = breaks[:1]
        if text[start] == ">":
            kept = _FOLDED.sub(lambda match: match[1] + (match[2] or " "), kept)
        return kept + breaks

    # -- scalars --

    def read_scalar(self, style: tuple, indent: int) -> object:
        """Read plain or quoted text, which continues on lines deeper than `indent`."""
        start = self.at
        char = self.text[start]
        if char in _QUOTED:
            return self.read_quoted(char)
        starts, stops = style
        is_marker = char in "-." and _MARKER.match(self.text, start)
        if is_marker or not starts.match(self.text, start):
            self.fail()

        word = self.read_plain(stops, indent)
        value = resolve_scalar(word)
        if value is YAML_CLASH:
            self.fail_clash(word, start)
        if word[0] in _ODD_BLANKS:
            self.fail(at=start)
        if word[-1] in _ODD_BLANKS:
            self.fail(at=self.at - 1)
        return value

    def read_plain(self, stops: LatePattern, indent: int) -> str:
        """Return the text of a plain scalar, its lines folded."""
        text = self.text
        at = self.at
        parts = []
        while True:
            stop = stops.search(text, at)
            end = stop.start() if stop else len(text)
            parts.append(text[at:end].rstrip(" "))
            self.at = at + len(parts[-1])
            if text[end:end + 1] != "\n":
                break

            # The text continues below, unless a line is not deeper or cannot begin text.
            gap = _BLANKS.match(text, end)[0]
            at = end + len(gap)
            column = len(gap) - gap.rfind("\n") - 1
            if column <= indent or text[at:at + 1] in ("", "#"):
                break
            if stops.match(text, at) or _MARKER.match(text, at):
                break
            parts.append("\n" * (gap.count("\n") - 1) or " ")
        return "".join(parts)

    def read_quoted(self, quote: str) -> str:
        """Return the text between quotes, its lines folded."""
        text = self.text
        at = self.at + 1
        parts = []
        for match in _QUOTED[quote].finditer(text, at):
            parts.append(text[at:match.start()])
            at = match.end()
            if match[0] == quote:
                self.at = at
                return "".join(parts)
            parts.append(self.unquote(match[0], match.start()))
            if text[at - 1] == "\n" and _MARKER.match(text, at):
                self.fail(f"`{text[at:at + 3]}` ends the document inside quotes",
                          "indent the line", at=at, size=3)
        self.fail(f"this `{quote}` is never closed", f"write `{quote}` where the text ends")

    def unquote(self, token: str, at: int) -> str:
        """Return the text for an escape, two apostrophes or a line break inside quotes."""
        if "\n" in token:
            # One break is a space, or nothing when escaped; the others are kept.
            more = "\n" * (token.count("\n") - 1)
            return more or ("" if token[0] == "\\" else " ")
        if token == "''":
            return "'"
        if token[0] != "\\":
            return token
        if token[1] in _ESCAPES and len(token) == 2:
            return _ESCAPES[token[1]]

        number = int(token[2:] or "d800", 16)
        if 0xD800 <= number <= 0xDFFF or number > 0x10FFFF:
            self.fail(f"`{visible(token)}` is not a valid escape",
                      "double the backslash, or write the character itself",
                      at=at, size=len(token), slug="escape")
        return chr(number)

    def fail_clash(self, word: str, at: int) -> NoReturn:
        """Refuse a word that programs read differently, and say how to write it."""
        fix = f'quote it: "{word}"' if len(word) <= 80 else "quote it"
        plain = {"yes": "true", "on": "true", "no": "false", "off": "false",
                 "<<": "the values that it stands for"}.get(word.lower())
        digits = word.replace("_", "")
        if digits.isdigit() and len(digits) < 20:
            plain = str(int(digits))
        if plain:
            fix = f"write {plain}, or {fix}"
        self.fail(f"programs may read `{word[:80]}` differently", fix,
                  at=at, size=len(word), slug="ambiguous")

    # -- flow style --

    def read_token(self, style: tuple = _FLOW, indent: int = -1) -> object:
        """Read a scalar, or a list or mapping in brackets or braces, over any number of lines."""
        start = self.at
        is_flow = self.text[start] in "[{"
        value = self.read_flow() if is_flow else self.read_scalar(style, indent)
        self.span = start, self.at
        return value

    def read_flow(self) -> list | dict:
        opener = self.at
        is_list = self.text[opener] == "["
        closer = "]" if is_list else "}"
        items: dict = {}  # of a list by number
        self.open()
        self.at += 1
        while self.peek(opener) != closer:
            start = self.at
            key: Any = len(items)
            if not is_list:
                if self.text[start] in "[{":
                    self.fail("a key must be text")
                key = self.read_scalar(_FLOW, -1)
                self.check_twin(items, key, start)
            end = self.at
            self.path[-1] = key
            self.span = items[key] = None
            if is_list or self.pass_colon(opener, start):
                items[key] = self.read_token()
            self.mark(start, end)
            if self.peek(opener) == ",":
                self.at += 1
            elif self.text[self.at] != closer:
                self.fail(f"expected `,` or the `{closer}` of line {self.line_of(opener)}",
                          "look for a missing comma, bracket or quote before this")
        self.at += 1
        self.close()
        return [*items.values()] if is_list else items

    def pass_colon(self, opener: int, start: int) -> bool:
        """Return whether a value follows the key that began at `start`, and skip its colon."""
        is_key = self.peek(opener) == ":" and self.at - start <= KEY_LIMIT
        if not is_key or "\n" in self.text[start:self.at]:
            return False
        self.at += 1
        return self.peek(opener) not in ",}"

    def peek(self, opener: int) -> str:
        """Move to the next token inside brackets and return its first character."""
        self.at = _GAP.match(self.text, self.at).end()
        if self.at == len(self.text):
            self.fail(f"this `{self.text[opener]}` is never closed",
                      "write its other half where it ends", at=opener)
        return self.text[self.at]


def visible(text: str) -> str:
    """Escape characters that a terminal would obey or hide."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
