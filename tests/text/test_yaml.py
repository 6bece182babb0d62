"""The YAML subset: equal to PyYAML's safe_load, or a FleetError, for every text."""
import hashlib
import itertools
import json
import math
import os
import pathlib
import re

import pytest

import subagent_fleet as sf
from tools import grows_linearly

try:
    import yaml
except ImportError:  # the stored expectations came from it, so nothing is skipped without it
    yaml = None

CASES = pathlib.Path(__file__).resolve().parents[1] / "cases" / "yaml"
VALID = sorted(CASES.glob("valid/*.yaml"))
INVALID = sorted(CASES.glob("invalid/*.yaml"))
STORED = CASES / "random.json"
ACCEPT = bool(os.environ.get("SUBAGENT_FLEET_ACCEPT"))
HOW_TO_ACCEPT = "to accept: SUBAGENT_FLEET_ACCEPT=1 python3 -m pytest tests/text/test_yaml.py"


def text_of(path):
    return path.read_bytes().decode("utf-8")


def same(one, other):
    """Equal in value, type, order and sign."""
    return repr(one) == repr(other)


def read(text):
    """The value and True, or the error and False; anything else that is raised fails the test."""
    try:
        return sf.parse_yaml(text, "x.yaml"), True
    except sf.FleetError as error:
        return error, False


def oracle(text):
    try:
        return repr(yaml.safe_load(text))
    except Exception as error:  # PyYAML also raises ValueError, OverflowError and others
        return f"refused: {type(error).__name__}"


def message(error):
    lines = [error.slug, f"{error.where}: {error.what}", error.excerpt]
    return "\n".join(lines + ([f"  fix: {error.fix}"] if error.fix else [])) + "\n"


# -- cases --

def test_cases_are_there():
    assert len(VALID) + len(INVALID) >= 250
    assert {path.stem for path in VALID} == {path.stem for path in CASES.glob("valid/*.json")}
    assert {path.stem for path in INVALID} == {path.stem for path in CASES.glob("invalid/*.err")}


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
def test_valid_case_reads_as_expected(path):
    text = text_of(path)
    wanted = json.loads(text_of(path.with_suffix(".json")))
    if yaml:
        assert same(yaml.safe_load(text), wanted)
    assert same(sf.parse_yaml(text), wanted)


@pytest.mark.parametrize("path", INVALID, ids=lambda path: path.stem)
def test_invalid_case_says_exactly(path):
    with pytest.raises(sf.FleetError) as caught:
        sf.parse_yaml(text_of(path), path.name)
    stored = path.with_suffix(".err")
    if ACCEPT:
        stored.write_bytes(message(caught.value).encode())
    assert message(caught.value) == text_of(stored), HOW_TO_ACCEPT


ODD_BLANKS = " \t\xa0\u2003\u3000\u200b"


def put(new, size=0):
    return lambda row, at, match: row[:at] + new + row[at + size:]


def quote(row, at, match):
    """Put the quoted text where the same text stands without quotes."""
    return row.replace(json.loads(match["text"].replace("\\x2d", "-")), match["text"], 1)


# What a person types who follows a fix: its words, and how they change the line of the error.
FIXES = [(re.compile(words), fix) for words, fix in (
    (r"begin its line with (?:\d+ or )?(?P<depth>\d+) spaces"
     r"(, or quote the whole text|, or line \d+ with \d+)?",
     lambda row, at, match: " " * int(match["depth"]) + row.lstrip(" ")),
    (r"write a plain space or nothing instead, or quote the text",
     lambda row, at, match: re.sub(f"[{ODD_BLANKS[1:]}]", " ", row).rstrip()),
    (r"begin it with `- `", put("- ")),
    (r"remove it, or quote the text", lambda row, at, match: row[:at] + (row[at + 1:] if row[at] in ",]}" else "")),
    (r"put `: ` after the key, `#` before a comment, .*", put("# ")),
    (r"keep one document per file: remove this line", lambda row, at, match: ""),
    (r"(.*, or )?quote (it|the text): (?P<text>\".*\")", quote),
)]


def fixed(text, error):
    """The text of a person who typed the fix of an error, or None where the fix needs thought."""
    lines = text.split("\n")
    line, column = map(int, error.where.split(":")[1:])
    for words, fix in FIXES:
        match = words.fullmatch(error.fix)
        if match:
            lines[line - 1] = fix(lines[line - 1], column - 1, match)
            return "\n".join(lines)
    return None


# Two mistakes in one file, or the first of many lines: the first fix leads to the next.
MENDED_IN_STEPS = {
    "blank-indentation-below-quoted", "blank-indentation-folded", "date-time-folded",
    "indent-first-item-deeper", "indent-first-key-deeper", "indent-first-shallower",
    "indent-item-between", "indent-literal-between", "indent-text-after-comment",
    "indent-two-deeper", "key-without-space-shallow", "number-hex-list", "two-document-ends"}


def test_fix_of_an_invalid_case_works_when_typed():
    tried, left = 0, set()
    for path in INVALID:
        text = text_of(path).replace("\r\n", "\n")
        error, _ = read(text)
        fixed_text = fixed(text, error)
        if fixed_text is None:
            continue
        tried += 1
        value, fine = read(fixed_text)
        if not fine:
            left.add(path.stem)
            has_moved = (value.what, value.where) != (error.what, error.where)
            assert has_moved or path.stem == "date-time-folded"
    assert tried > 120
    assert left == MENDED_IN_STEPS


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
def test_valid_case_survives_the_writer(path):
    value = sf.parse_yaml(text_of(path))
    text = sf.dump_yaml(value)
    assert same(sf.parse_yaml(text), value)
    if yaml:
        assert same(yaml.safe_load(text), value)


# -- what JSON cannot express --

@pytest.mark.parametrize("text, wanted", [
    ("1: a\n-2: b\n1.5: c\n", {1: "a", -2: "b", 1.5: "c"}),
    ("true: a\nnull: b\n", {True: "a", None: "b"}),
    ("~: a\n", {None: "a"}),
    ("{1: 2, -16: x}", {1: 2, -16: "x"}),
    ("[.inf, -.INF, +.Inf]", [math.inf, -math.inf, math.inf]),
    ("-0.0", -0.0),
    ("9" * 1000, int("9" * 1000)),
])
def test_value_outside_json_is_read(text, wanted):
    assert same(sf.parse_yaml(text), wanted)
    if yaml:
        assert same(yaml.safe_load(text), wanted)


def test_text_over_the_limit_is_refused():
    limit = sf.TEXT_LIMIT_BYTES
    assert sf.parse_yaml("#" * limit) is None
    with pytest.raises(sf.FleetError) as caught:
        sf.parse_yaml("#" * (limit + 1))
    assert caught.value.slug == "yaml-limit" and "4,194,305" in caught.value.what


def test_surrogate_in_text_is_refused():
    error, accepted = read("a: \ud83d\n")
    assert not accepted and error.slug == "yaml-character"
    assert error.excerpt.isascii() and "\\ud83d" in error.excerpt


def test_json_is_read_as_json_reads_it():
    texts = [text_of(path) for path in VALID if path.stem.startswith("json-")]
    assert len(texts) > 10
    for text in texts:
        if "+5" not in text:
            assert same(sf.parse_yaml(text), json.loads(text.lstrip("\ufeff")))


# -- the rule, on documents nobody wrote --

class Dice:
    """Random numbers that are the same in every Python version."""

    def __init__(self, seed):
        self.state = seed * 2862933555777941757 + 3037000493

    def roll(self, sides):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2 ** 64
        return (self.state >> 33) % sides

    def pick(self, things):
        return things[self.roll(len(things))]


ALPHABET = "a -:,[]{}\"'#\n|>&*!%?01.~\t"
TOKENS = list(ALPHABET) + [
    "b", "key", "\n", "\n", "\n  ", "\n    ", "  ", "- ", ": ", "'x'", '"x"', ", ", "#c", " #c\n",
    "|-", ">+", ">-\n", ">2", "|\n", "|2\n  ", "---", "...", "\n---\n", "\\", "\\n", "\\u00e9",
    "true", "null", "no", "a: ", "a: b\n", "- a", "\n- ", "\n  - ", "''", "'\n", "\"\n", "? ", "<<",
    "1.5", "1e5", "0x1f", "\r\n", "é", "@", "`", "=", "\\\n", "   \n"]


def token_soup(dice):
    return "".join(dice.pick(TOKENS) for _ in range(1 + dice.roll(14)))


def mutation(dice, seeds):
    text = dice.pick(seeds)
    for _ in range(1 + dice.roll(3)):
        lines, place = text.split("\n"), dice.roll(len(text) + 1)
        line, kind = dice.roll(len(lines)), dice.roll(6)
        if kind == 0:
            text = text[:place] + dice.pick(TOKENS) + text[place:]
        elif kind == 1:
            text = text[:place] + text[place + 1 + dice.roll(6):]
        elif kind == 2:
            text = text[:place] + dice.pick(ALPHABET) + text[place + 1:]
        else:
            if kind == 3:
                lines[line] = " " * dice.roll(7) + lines[line].lstrip(" ")
            elif kind == 4:
                lines.insert(dice.roll(len(lines)), lines[line])
            else:
                del lines[line]
            text = "\n".join(lines)
    return text


def random_documents(count=6000):
    seeds = [text for text in map(text_of, VALID) if 10 < len(text) < 900]
    assert len(seeds) > 80
    for number in range(count):
        dice = Dice(number)
        yield token_soup(dice) if number % 3 == 0 else mutation(dice, seeds)


def short_documents(longest=3):
    for length in range(longest + 1):
        for letters in itertools.product(ALPHABET, repeat=length):
            yield "".join(letters)


def digest(text, size):
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:size]


@pytest.mark.slow
def test_random_documents_keep_the_rule():
    """Stored: four hex digits of what PyYAML returns for each document, one string for all."""
    documents = list(random_documents())
    if ACCEPT and yaml:
        stored = json.loads(STORED.read_text()) if STORED.exists() else {}
        stored["random"] = "".join(digest(oracle(text), 4) for text in documents)
        STORED.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    wanted = json.loads(STORED.read_text())["random"]
    assert len(wanted) == 4 * len(documents), HOW_TO_ACCEPT
    accepted = 0
    for number, text in enumerate(documents):
        value, fine = read(text)
        if fine:
            accepted += 1
            assert digest(repr(value), 4) == wanted[4 * number:4 * number + 4], text
            if yaml:
                assert repr(value) == oracle(text), text
    assert 2000 < accepted < 5000


def test_short_documents_keep_the_rule():
    """Stored: a digest of all that is accepted among all texts of up to three characters."""
    accepted = [(text, repr(value)) for text in short_documents()
                for value, fine in [read(text)] if fine]
    if yaml:
        for text, value in accepted:
            assert value == oracle(text), text
    found = digest(repr(accepted), 64)
    if ACCEPT and yaml:
        stored = json.loads(STORED.read_text()) if STORED.exists() else {}
        stored["short"] = found
        STORED.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    assert len(accepted) > 5000
    assert found == json.loads(STORED.read_text())["short"], HOW_TO_ACCEPT


# -- values written in every style, read back --

HOSTILE = ["", " ", "yes", "no", "null", "~", "1", "1.5", "0x1", "1e5", "2001-01-01", "<<", "=",
           "a: b", "- x", "? x", "true", "y", "a #b", "a:b", "...", "---", "http://x:1/?q", ".nan",
           "1_0", "a  b", "-", "x:", "%a", "@", "`", "'", '"', "\\", "a\nb", "\n", " a", "a ", "\t",
           "\x00", "\x1b[0m", "\x7f", "\x85", "\xa0", "\u2028", "\ufeff", "é", "🙂", "\u202e", "|",
           ">", "[", "{", "}", "]", ",", "#", "&a", "*a", "!a", "a\n\n b\n", "\ue000", "\uffff"]


def random_text(dice):
    if dice.roll(2):
        return dice.pick(HOSTILE)
    return "".join(dice.pick("ab -:,[]{}\"'#\n|>?01.~\\é") for _ in range(dice.roll(9)))


def random_value(dice, depth=0):
    kind = dice.roll(6 if depth > 3 else 11)
    if kind < 3:
        return random_text(dice)
    if kind == 3:
        return dice.pick([None, True, False, [], {}])
    if kind == 4:
        return dice.pick([0, -1, 7, 10 ** 20, 4000])
    if kind == 5:
        return dice.pick([0.0, -0.0, 1.5, 1e16, 1e-7, -2.5e300, math.inf, -math.inf])
    if kind < 9:
        return {random_text(dice): random_value(dice, depth + 1) for _ in range(dice.roll(5))}
    return [random_value(dice, depth + 1) for _ in range(dice.roll(5))]


class Scribe:
    """Write a value in a random mixture of styles; knows nothing of the product."""

    def __init__(self, dice):
        self.dice = dice

    def scalar(self, value):
        if isinstance(value, str):
            plain = value.isalpha() and value.isascii() and len(value) > 4
            if plain and self.dice.roll(3):
                return value
            if value.isprintable() and self.dice.roll(2):
                return "'" + value.replace("'", "''") + "'"
            return json.dumps(value).replace("\\ud83d\\ude42", "🙂").replace("\x7f", "\\x7f")
        if isinstance(value, float):
            text = repr(value)
            if "n" in text:
                return text.replace("inf", ".inf")
            return text if "." in text else text.replace("e", ".0e")
        return {None: "null", True: "true", False: "false"}.get(value, str(value)) \
            if not isinstance(value, int) or isinstance(value, bool) else str(value)

    def flow(self, value):
        gap = self.dice.pick(["", " ", "\n   ", " # c\n "])
        if isinstance(value, dict):
            return "{" + gap + ("," + gap).join(
                f"{self.scalar(key)}: {self.flow(child)}"
                for key, child in value.items()) + gap + "}"
        if isinstance(value, list):
            return "[" + gap + ("," + gap).join(map(self.flow, value)) + gap + "]"
        return self.scalar(value)

    def block(self, value, indent):
        """The lines of a value, ending in a line feed, its first line without indentation."""
        margin, step = " " * indent, 1 + self.dice.roll(4)
        comment = self.dice.pick(["", "", "", "  # c", "\n\n", "\n" + margin + "# c"])
        if not value or not isinstance(value, (dict, list)) or not self.dice.roll(5):
            is_plain = isinstance(value, str) and value.isprintable() and value.strip() == value != ""
            if is_plain and indent and not self.dice.roll(4):
                return f"|-{comment.split(chr(10))[0]}\n{margin} {value}\n"
            return self.flow(value) + comment + "\n"
        lines = []
        if isinstance(value, dict):
            for key, child in value.items():
                nested = isinstance(child, (dict, list)) and child and self.dice.roll(2)
                gap = f"{comment}\n{margin}{' ' * step}" if nested else " "
                text = self.block(child, indent + step) if nested else self.inline(child, indent)
                lines.append(self.scalar(key) + ":" + gap + text)
        else:
            for child in value:
                lines.append("-" + " " * step + self.block(child, indent + 1 + step))
        return margin.join(lines)

    def inline(self, value, indent):
        return self.flow(value) + self.dice.pick(["", "  ", " # c"]) + "\n"


def test_every_style_of_a_value_is_read_back():
    for number in range(1500):
        dice = Dice(number + 10 ** 6)
        value = random_value(dice)
        text = Scribe(dice).block(value, 0)
        assert same(sf.parse_yaml(text), value), text


def test_written_value_is_read_back():
    for number in range(1500):
        value = random_value(Dice(number))
        text = sf.dump_yaml(value)
        assert same(sf.parse_yaml(text), value), text
        if yaml and number % 3 == 0:
            assert same(yaml.safe_load(text), value), text


# -- the writer --

def test_dump_writes_what_a_person_would():
    value = {"project": {"name": "local-dev", "port": 4000, "tags": [], "claude": {}},
             "agents": [{"name": "a", "tools": ["Read", "Edit"]}, "plain words", ["x", None], True],
             "prompt": "one\ntwo", "yes": "no", "ratio": 1e20}
    assert sf.dump_yaml(value) == (
        "project:\n  name: local-dev\n  port: 4000\n  tags: []\n  claude: {}\n"
        "agents:\n  - name: a\n    tools:\n      - Read\n      - Edit\n  - plain words\n"
        "  - - x\n    - null\n  - true\n"
        'prompt: "one\\ntwo"\n"yes": "no"\nratio: 1.0e+20\n')


@pytest.mark.parametrize("value", ["", {}, [], None, 0, "x", (1, (2,)), {1: {None: {True: 1.5}}}])
def test_dump_of_any_root_is_read_back(value):
    wanted = json.loads(json.dumps(value)) if isinstance(value, tuple) else value
    assert same(sf.parse_yaml(sf.dump_yaml(value)), wanted)


def nested(levels):
    value = []
    for _ in range(levels - 1):
        value = [value]
    return value


def looped():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize("value", [
    object(), {1, 2}, b"x", {"a": 1j}, {(1, 2): 3}, "\ud800", {"a": ["\udfff"]}, "k" * 3 + "\ud83d",
    {"k" * 1025: 1}, 10 ** 1001, nested(65), looped(),
], ids=range(12))
def test_dump_of_what_yaml_cannot_hold_is_refused(value):
    with pytest.raises(sf.FleetError) as caught:
        sf.dump_yaml(value)
    assert caught.value.slug == "yaml-dump" and caught.value.what


def test_dump_reaches_the_limits_of_the_reader():
    for value in (nested(64), {"k" * 1024: 1}, 10 ** 900):
        assert sf.parse_yaml(sf.dump_yaml(value)) == value


@pytest.mark.parametrize("text", [
    "local-dev", "http://studio.local:11434", "qwen3-coder:30b", "Plans the work.", "a_b/c.d", "/x",
    "C++", "x=1", "e5", "None", "nan"])
def test_quote_keeps_simple_text_plain(text):
    assert sf.quote_yaml(text) == text


@pytest.mark.parametrize("text, wanted", [
    ("", '""'), ("yes", '"yes"'), ("Y", '"Y"'), ("NULL", '"NULL"'), ("1", '"1"'),
    ("n", '"n"'), ("1:30", '"1:30"'), ("a---b", '"a-\\x2d\\x2db"'), ("a: b", '"a: b"'),
    ("a #b", '"a #b"'), (" a", '" a"'), ("a ", '"a "'), ("a:", '"a:"'),
    ("a, b", '"a, b"'), ("-x", '"-x"'), ('say "hi"', '"say \\"hi\\""'), ("a\\b", '"a\\\\b"'),
    ("a\nb\tc", '"a\\nb\\tc"'), ("\x1b", '"\\x1b"'), ("\ufeff", '"\\ufeff"'), ("é", '"é"'),
    ("//", '"//"'), ("//a", '"//a"'),
    ("\U000e0001", '"\\U000e0001"'), ("- ---- -", '"- -\\x2d\\x2d- -"')])
def test_quote_quotes_what_another_yaml_might_misread(text, wanted):
    assert sf.quote_yaml(text) == wanted


def test_quoted_text_is_read_back_everywhere():
    for number in range(1500):
        text = random_text(Dice(number + 7))
        quoted = sf.quote_yaml(text)
        assert "\n" not in quoted
        document = f"- {quoted}\n- {quoted}: {quoted} # c\n- [{quoted}, {{{quoted}: {quoted}}}]\n"
        wanted = [text, {text: text}, [text, {text: text}]]
        assert sf.parse_yaml(document) == wanted, document
        if yaml and number % 5 == 0:
            assert yaml.safe_load(document) == wanted, document


# -- positions --

PLACES = """\
# fleet
project:
  name: local-dev  # c
  "quoted key" : 'a value'
nodes:
- first
-   endpoint: http://a:1
    tags: [one, {two: 3}, "four"]
models:
  heavy: {node: studio, context: , deep: [1,
    2]}
  folded: one
    two
prompt: |
  You plan.
empty:
"""


@pytest.mark.parametrize("path, key, where, marked", [
    ((), False, "2:1", "p"), (("project",), False, "2:1", "project"),
    (("project", "name"), False, "3:9", "local-dev"), (("project", "name"), True, "3:3", "name"),
    (("project", "quoted key"), False, "4:18", "'a value'"),
    (("project", "quoted key"), True, "4:3", '"quoted key"'),
    (("nodes",), False, "5:1", "nodes"), (("nodes", 0), False, "6:3", "first"),
    (("nodes", 0), True, "6:1", "-"), (("nodes", 1), False, "7:1", "-"),
    (("nodes", 1, "endpoint"), False, "7:15", "http://a:1"),
    (("nodes", 1, "tags"), False, "8:11", '[one, {two: 3}, "four"]'),
    (("nodes", 1, "tags", 1, "two"), False, "8:23", "3"),
    (("nodes", 1, "tags", 1, "two"), True, "8:18", "two"),
    (("nodes", 1, "tags", 2), False, "8:27", '"four"'),
    (("models", "heavy", "context"), False, "10:25", "context"),
    (("models", "heavy", "deep"), False, "10:42", "[1,"),
    (("models", "heavy", "deep", 1), False, "11:5", "2"),
    (("models", "folded"), False, "12:11", "one"), (("prompt",), False, "14:9", "|"),
    (("empty",), False, "16:1", "empty"),
    (("project", "missing"), False, "2:1", "project"), (("missing", 3), False, "2:1", "p"),
    (("project", "name", "deeper"), False, "3:3", "name"), (("nodes", 7), True, "5:1", "nodes"),
    (("models", "heavy", "missing"), False, "10:3", "heavy"),
])
def test_locate_points_at_the_token(path, key, where, marked):
    place, excerpt = sf.Document(PLACES, "fleet.yaml").locate(path, key=key)
    line, column = map(int, where.split(":"))
    assert place == f"fleet.yaml:{where}"
    assert excerpt == "{:>5} | {}\n      | {}{}".format(
        line, PLACES.splitlines()[line - 1], " " * (column - 1), "^" * len(marked))
    assert PLACES.splitlines()[line - 1][column - 1:].startswith(marked)


def test_locate_in_a_scalar_document():
    document = sf.Document("\n\n  just text\n", "f")
    assert document.value == "just text" and document.locate(("a",))[0] == "f:3:3"
    assert sf.Document("", "f").locate(())[0] == "f:1:1"


def paths_of(value, path=()):
    yield path
    pairs = value.items() if isinstance(value, dict) else (
        enumerate(value) if isinstance(value, list) else ())
    for key, child in pairs:
        yield from paths_of(child, path + (key,))


def test_locate_finds_every_key_of_every_case():
    checked = 0
    for case in VALID:
        document = sf.Document(text_of(case), "f")
        lines = document.text.split("\n")
        for path in paths_of(document.value):
            line, column = map(int, document.locate(path, key=True)[0].split(":")[1:])
            rest = lines[line - 1][column - 1:]
            if path and isinstance(path[-1], str) and path[-1].isalnum():
                checked += 1
                assert rest.lstrip("\"'").startswith(path[-1]), (case, path)
    assert checked > 400


def test_places_are_kept_of_so_many_values_at_most(monkeypatch):
    monkeypatch.setattr(sf, "PLACES_LIMIT", 4)
    document = sf.Document("a: [1, 2, 3, 4]\nb: 5\n", "f")
    assert document.value == {"a": [1, 2, 3, 4], "b": 5}
    assert document.locate(("a", 2))[0] == "f:1:11"
    assert document.locate(("a", 3))[0] == document.locate(("b",))[0] == "f:1:1"
    error, _ = read("a: [1, 2, 3, 4]\nb: 5\nb: 6\n")
    assert error.where == "x.yaml:3:1" and error.what == "the key `b` is already above"


def test_locate_drops_the_byte_order_mark_and_the_carriage_return():
    document = sf.Document("\ufeffa: 1\r\nb: 2\r\n", "f")
    assert document.locate(("b",)) == ("f:2:4", "    2 | b: 2\n      |    ^")
    assert document.locate(("a",), key=True)[0] == "f:1:1"


def test_excerpt_of_a_long_line_is_a_window():
    document = sf.Document("[" + "a, " * 300 + "target" + ", b" * 300 + "]", "f")
    where, excerpt = document.locate((300,))
    first, second = excerpt.split("\n")
    assert where == "f:1:902" and len(first) < 150 and first.count("…") == 2
    assert first[second.index("^"):second.rindex("^") + 1] == "target"


def locate_each(count):
    """Find something on each of so many lines."""
    text = "".join(f"key{number}: {{a: 1, b: [x, y]}}\n" for number in range(count))
    document = sf.Document(text, "f")
    for number in range(count):
        assert document.locate((f"key{number}", "b", 1))[0].startswith(f"f:{number + 1}:")


def test_thousand_problems_are_located_in_linear_time():
    assert grows_linearly(locate_each, 1250, 5000)


# -- texts made to hurt --

def hurtful(size):
    """Texts of about that many characters."""
    return {
        "plain": "a: " + "x" * size, "spaces": "a:" + " " * size + "b", "only spaces": " " * size,
        "brackets": "[" * size, "a million brackets": "[" * size * 10, "braces": "{" * size,
        "quotes": '"' * (size + 1), "apostrophes": "'" * (size + 1), "hashes": " #" * size,
        "colons": "a" + ":" * size, "keys on a line": "a: " * size, "dashes": "- " * size,
        "backslashes": '"' + "\\" * size + '"', "unclosed backslashes": '"' + "\\" * size,
        "escaped quotes": '"' + '\\"' * size, "breaks in quotes": '"a' + "\n" * size + 'b"',
        "spaces in quotes": '"a' + " " * size + 'b"', "padded breaks": '"a' + "      \n" * size + '"',
        "escaped breaks": '"' + "\\\n" * size + '"', "breaks": "a" + "\n" * size + "b",
        "deep block": "\n".join(" " * level + "a:" for level in range(math.isqrt(size * 10))),
        "deep dashes": "- " * (size // 10) + "a", "flow list": "[" + "a," * size + "]",
        "unclosed list": "[a" + ",a" * size, "flow breaks": "[" + "\n" * size + "]",
        "flow comments": "[" + "#\n" * size + "]", "flow words": "[" + "a " * size + "]",
        "flow lines": "[" + "a\n" * size + "]", "literal blanks": "a: |\n" + "\n" * size,
        "literal spaces": "a: |\n" + (" " * 30 + "\n") * (size // 11) + " b",
        "literals": "- |\n" * (size // 5),
        "plain lines": "a:\n" + "  x\n" * size, "comments": "a: b\n" + " #\n" * size + "  c",
        "digits": "a: " + "1" * size, "underscores": "a: " + "1_" * size,
        "sixties": "a: 1" + ":1" * size, "sixties and x": "a: 1" + ":1" * size + "z",
        "dots": "a: " + "." * size,
        "long key": "a" * size + ": b", "long quoted key": '"' + "a" * size + '": b',
        "key of colons": "a" + ":a" * size + ": b", "key of hashes": "a" + "#a" * size + ": b",
        "many keys": "".join(f"k{number}:\n" for number in range(size // 5)) + "k5:\n",
        "markers": "---\n" * size, "markers in quotes": '"' + "\n--" * size + '"',
        "tabs": "a:" + "\t" * size,
        "no-break spaces": "a: " + "\xa0" * size, "inner no-break": "a: b" + "\xa0" * size + "c",
        "slashes": "a: b: " + "// " * size, "slash lines": "a: b\n" + "  /x\n" * size + "  c: d",
        "quote starts": "a: b: " + ' "' * size, "quotes inside": "a: " + '"b" ' * size,
        "conflicts": "<<<<<<<\n" * size + ": x", "folded word": "[" + "a\n" * size + ": b]",
        "too deep": "a:\n" + "".join(f"   k{number}: 1\n" for number in range(size // 5))
                    + "  z: 1\n",
        "too shallow": "a:\n   b: 1\n" + "".join(
            f"  k{number}: 1\n" for number in range(size // 5)),
        "tab below": "a: 1\n" + "# c\n" * size + "\tb: 1", "question": "[" + "a " * size + "?]",
        "never closed": 'a: "' + "b\n" * size, "comma missing": '["a"' + "\n" * size + '"b"]',
        "carriage returns": "\r" * size, "last is odd": "a" * size + "\0",
        "json": "[" + ",".join(['{"a": "b\\n", "c": [1, 2.5, true]}'] * (size // 25)) + "]",
    }


SMALL, HURTFUL = hurtful(25_000), hurtful(100_000)


@pytest.mark.parametrize("name", HURTFUL)
def test_hurtful_text_is_read_or_refused_in_linear_time(name):
    assert grows_linearly(read, SMALL[name], HURTFUL[name])
    value, fine = read(HURTFUL[name])
    if not fine:
        assert value.where.startswith("x.yaml:") and len(value.excerpt) < 1000


def test_depth_is_an_error_before_it_is_a_recursion():
    for text in ("[" * 10_000 + "]" * 10_000, "{a: " * 10_000 + "}" * 10_000, "- " * 10_000,
                 "".join(" " * level + "a:\n" for level in range(2000))):
        error, fine = read(text)
        assert not fine and error.slug == "yaml-limit" and "64 levels" in error.what


# -- what git leaves --

CONFLICT = """\
project: {name: p}
models:
<<<<<<< HEAD
  m: {node: a}
||||||| base
  m: {node: c}
=======
  m: {node: b}
>>>>>>> branch
text: |
  Title
  =======
"""


@pytest.mark.parametrize("line, left", [
    (3, CONFLICT), (3, CONFLICT.replace("||||||| base\n  m: {node: c}\n", "")), (3, CONFLICT.replace("\n", "\r\n")),
    (2, '{"a": {\n<<<<<<< ours\n  "b": 1\n=======\n  "b": 2\n>>>>>>> theirs\n}}\n'),
    (3, "a: [1,\n  2,\n||||||| base\n  3]\n"), (1, "<<<<<<<\na: 1\n"), (2, "a: 'x\n>>>>>>> b\n")])
def test_a_git_conflict_is_called_one_and_nothing_else(line, left):
    with pytest.raises(sf.FleetError) as caught:
        sf.parse_yaml(left, "fleet.yaml")
    found = caught.value.finding
    assert (found.slug, found.what) == ("yaml-conflict", "this is a git conflict")
    assert found.where == f"fleet.yaml:{line}:1" and "choose a side" in found.fix


@pytest.mark.parametrize("text", [
    "a: |\n  <<<<<<< x\n  =======\n", "a: '======='\n", "a: <<<<<<<\n", "# <<<<<<< HEAD\na: 1\n", "========: 1\n"])
def test_what_only_looks_like_a_conflict_is_read(text):
    assert isinstance(sf.parse_yaml(text), dict)
