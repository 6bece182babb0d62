"""The rule for each value of a fleet file, common mistakes and their fixes."""
from __future__ import annotations

import contextlib
import difflib
import json
import re
from typing import TYPE_CHECKING

from fleet.config.address import HOST, full_endpoint, split_endpoint
from fleet.config.node import NODE_KINDS
from fleet.start.errors import FleetError
from fleet.start.gate import LatePattern
from fleet.start.record import REQUIRED, Field, Record, replace
from fleet.text.phrases import find_nearest, some_of
from fleet.text.yaml_dump import dump_yaml, quote_yaml

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any


# -- Patterns, each of which means the same in Python and in JSON Schema (JavaScript) --

# Curly quotes of word processors: to YAML they are letters.
_CURLY = ("\u201c\u201d\u201e\u201f\u2018\u2019\u201a\u201b\u00ab\u00bb\u2039\u203a"
          "\u00b4\u2032\u2033")
CONTROLS = r"\u0000-\u0008\u000b-\u001f\u007f-\u009f\ud800-\udfff"
_ONE_LINE = "^(?![" + _CURLY + "])[^\\u000a\\u2028\\u2029" + CONTROLS + "\\u0009]{1,%d}$"
_TEXT = f"^[^{CONTROLS}]*$"
PARAGRAPH = f"^(?!\\s*$|[\\s\\S]*\\n\\s*\\n)[^{CONTROLS}]*$"  # neither empty nor two of them
_TOOL = "^[A-Za-z_*][A-Za-z0-9_*:.-]*([(][^()\\u000a\\u0009" + CONTROLS + "]*[)])?$"
_NAME = "^[A-Za-z0-9._-]{1,64}$"
_AGENT_NAME = "^[a-z0-9][a-z0-9_-]{0,63}$"
_URL = "^[Hh][Tt][Tt][Pp][Ss]?://[^\\s@?#]+$"  # no credentials, query or fragment
# LiteLLM reads `os.environ/NAME` as that variable's value, everywhere.
_ALIAS = "^(?!os[.]environ/)[A-Za-z0-9._:/@-]{1,128}$"
_DURATION = "^-?([0-9]{1,4}h|[0-9]{1,6}[ms])+$"
# The ending keeps a foreign fleet file from sending other secrets of the environment as the key.
# The excluded names are used by shells, loaders and the generated file.
_VARIABLE = ("^(?!(BASH|ZSH|PYTHON)|"
             "(ANTHROPIC|CLAUDE|API|NO|LC|LD|DYLD|FISH|NODE|LITELLM_LOCAL)_)"
             "[A-Za-z_][A-Za-z0-9_]{0,115}_(MASTER|GATEWAY)_KEY$")
# The ending keeps a fleet file from sending any other secret to a node.
_KEY_VARIABLE = "^[A-Za-z_][A-Za-z0-9_]{0,115}_API_(KEY|TOKEN)$"

# -- Normal forms of values that fit their rules --

UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def normal_keep_alive(duration: int | str) -> int:
    """Return a duration in seconds: `1h30m` is 5400; -1 means forever."""
    if isinstance(duration, int):
        return duration
    if duration.startswith("-"):
        return -1

    parts = re.findall("([0-9]+)([hms])", duration)
    return sum(int(number) * UNIT_SECONDS[unit] for number, unit in parts)


# -- Rules: which values are valid, and what is meant by mistakes --

_QUOTES = f"{_CURLY}'\"` "
DURATION_SECONDS = {**UNIT_SECONDS, "ms": 0.001}  # by a unit's first letter, or the whole of it
# `65,536`, `64 K`, `45 min`, `4000.0`, and a comment as other languages have them.
_AMOUNT = LatePattern(r"(-?\d{1,3}(?:,\d{3})+|-?\d{1,12}(?:\.\d{1,6})?) ?([a-z]*)(?: *//.*)?")


class Rule(Record):
    """Which values are valid, as a fragment of JSON Schema and in words."""

    schema: dict[str, Any]
    words: str
    example: Any = None  # what a person may write
    normal: Callable[[Any], object] | None = None  # returns the normal form of a valid value
    slips: Callable[[str], Sequence[Any]] | None = None  # guesses the meaning of other text
    item: Rule | None = None  # of a list: the rule of its items

    def fits(self, value: object) -> bool:
        """Tell whether a value obeys this rule."""
        return _fits_schema(value, self.schema)

    def read(self, value: Any) -> Any:
        """Return the normal form of a valid value."""
        return self.normal(value) if self.normal else value


def text_rule(pattern: str, words: str = "", example: str | None = None, **more: Any) -> Rule:
    return Rule({"type": "string", "pattern": pattern}, words, example, **more)


def number_rule(least: int, most: int, words: str, example: int,
                 units: Mapping[str, float] = {}) -> Rule:
    return Rule({"type": "integer", "minimum": least, "maximum": most}, words, example,
                slips=lambda text: amount_slips(text, units))


def _gigabytes_rule(least: float, example: float) -> Rule:
    return Rule({"type": "number", "minimum": least, "maximum": 65536},
                "a number of GB", example,
                slips=lambda text: amount_slips(text, {"g": 1, "m": 1 / 1024, "t": 1024}))


def choice_rule(*choices: str) -> Rule:
    words = " or ".join(f"`{choice}`" for choice in choices)
    return Rule({"enum": list(choices)}, words, choices[0],
                slips=lambda text: [find_nearest(text.lower(), choices)])


def list_rule(item: str) -> Rule:
    """Return the rule of a list whose items obey another rule."""
    rule = RULES[item]
    schema = {"type": "array", "items": rule.schema}
    example = None if rule.example is None else [rule.example]
    return Rule(schema, f"a list, each item {rule.words}", example, item=rule)


def name_slips(text: str) -> list[str]:
    """Return text without characters that a name cannot have."""
    return [re.sub("[^a-z0-9_-]+", "-", text.lower()).strip("-")]


def amount_slips(text: str, units: Mapping[str, float]) -> list[float]:
    """Return the number of an amount with separators, a unit or a comment."""
    amount = _AMOUNT.fullmatch(text.lower())
    if not amount:
        return []
    word = amount[2]
    factor = units.get(word, units.get(word[:1], not word))
    number = float(amount[1].replace(",", "")) * factor
    slips = [int(number) if number == int(number) else number]
    if "k" in units:
        slips.append(int(number * 1024))  # of tokens, 64 alone means thousands
    return slips


def _address_slips(text: str) -> list[str]:
    """Return URLs and hosts that an address with a wrong scheme or port may mean."""
    scheme = "https" if text.lower().startswith("https") else "http"
    text = re.sub(r"^\w*[:;]?/+\s*|\s+(?=[:/])|[,?#].*|[^/]*@", "", text)
    slips = []
    # With and without its port.
    for address in (text, re.sub(r"(?<=[\w\]]):[^/]*", "", text)):
        with contextlib.suppress(FleetError):
            endpoint = full_endpoint(f"{scheme}://{address}")
            slips += [endpoint.url, endpoint.host]
    return slips


PROVIDERS = ("builtin", "litellm")
TARGET_NAMES = (  # the rows of TARGETS
    "litellm", "claude", "env", "opencode", "codex", "aider", "qwen")
USUAL_TARGETS = TARGET_NAMES[:3]
CLAUDE = "claude"  # the coder that can be asked, steered and resumed
# codex 0.169.0, opencode 1.18.33, aider 0.86.2, qwen-code 0.24.4. They read the prompt on
# stdin, write files and end. With these arguments they may write without asking, and aider
# keeps no files of its own, which would count as work. A row of HARNESSES connects a coder to
# the fleet; without a fleet it uses its own login.
CODERS = {
    "codex": ("exec", "-s", "danger-full-access", "-"),
    "opencode": ("run",),
    "aider": ("--yes-always", "--no-auto-commits", "--no-gitignore", "--no-check-update",
              "--no-stream", "--map-tokens", "0", "--chat-history-file", "/dev/null",
              "--input-history-file", "/dev/null", "--message-file", "/dev/stdin"),
    "qwen": ("--approval-mode", "yolo")}
_WRITABLE = "^(/|~/)?(?![/~-]|([^\\u0000]*/)?[.][.]?(/|$))[^\\u000a" + CONTROLS \
    + "\\u0009]{1,1024}$"  # neither all of a disk nor of a home
# A part of a branch and of a path; `run/landed` is what has landed.
TASK_NAME = "^(?![Ll][Aa][Nn][Dd][Ee][Dd]$)[A-Za-z0-9][A-Za-z0-9_-]{0,59}$"
_SPAN = "^([0-9]{1,4}h|[0-9]{1,6}[ms])+$"
_GLOB = "^(?![/~!]|([^\\u0000]*/)?[.][.](/|$))[^\\u000a" + CONTROLS + "\\u0009]{1,256}$"
REVISION = "^(?!-)[^\\u0000-\\u0020\\u007f~^:?*\\u005c\\u005b]{1,200}([~^][0-9]{0,4})*$"
def _normal_list(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


_COMMAND_LIST = {"type": "array", "items": {"type": "string"}}
RULES = {
    "name": text_rule(_NAME, "text of letters, digits, `.`, `_` and `-`, at most 64", "mini",
                       slips=name_slips),
    "agent name": text_rule(
        _AGENT_NAME,
        "lower case letters, digits, `-` and `_`, at most 64, a letter or digit first",
        "planner", slips=name_slips),
    "line": text_rule(_ONE_LINE % 256, "text, 1 to 256 printable characters", "local-dev"),
    "model name": text_rule(
        _ONE_LINE % 256, "text, 1 to 256 printable characters", "qwen3:8b"),
    "text": text_rule(_TEXT, "text without control characters", "You write code."),
    "paragraph": text_rule(
        PARAGRAPH, "one paragraph that says when to use the agent, without blank lines",
        "Use for planning.",
        normal=lambda text: " ".join(map(str.strip, text.strip().splitlines()))),
    "tag": text_rule(_ONE_LINE % 64, "text, 1 to 64 printable characters", "fast"),
    "tool": text_rule(_TOOL, "a name such as `Read` or `\"Bash(git *)\"`", "Read"),
    "alias": text_rule(
        _ALIAS, "text of letters, digits and `. _ : / @ -`, at most 128",
        "claude-sonnet-local", slips=name_slips),
    "variable": text_rule(
        _VARIABLE, "a variable name that ends in _MASTER_KEY or _GATEWAY_KEY, so that no other "
        "secret is ever sent as the gateway's key",
        "FLEET_GATEWAY_KEY"),
    "endpoint": text_rule(
        _URL, "an address that begins with http:// or https://", "http://192.168.1.50:11434",
        slips=_address_slips,
        # As it is: the missing port is known only with the whole node.
        normal=lambda text: split_endpoint(text) and text),
    "host": text_rule(
        f"^{HOST}$", "an address or host name", "127.0.0.1",
        slips=_address_slips, normal=str.lower),
    "port": number_rule(1, 65535, "a whole number, 1 to 65535", 4000),
    "parallel": number_rule(1, 64, "a whole number, 1 to 64", 2),
    "tokens": number_rule(
        256, 16777216, "256 to 16777216 tokens", 65536,
        {"k": 1024, "m": 1024 * 1024, "t": 1}),
    "seconds": number_rule(1, 86400, "whole seconds, 1 to 86400", 300, DURATION_SECONDS),
    "mac": text_rule(
        "^[0-9A-Fa-f]{2}([:-][0-9A-Fa-f]{2}){5}$", "a hardware address, in quotes",
        "a4:83:e7:01:02:03", normal=lambda text: text.lower().replace("-", ":")),
    "gigabytes": _gigabytes_rule(0.5, 64),
    "cache": _gigabytes_rule(0, 8.6),
    "keep alive": Rule(
        {"anyOf": [{"type": "integer", "minimum": -1, "maximum": 31536000},
                   {"type": "string", "pattern": _DURATION}]},
        "seconds, a duration such as `24h`, or -1 to never unload", -1,
        normal=normal_keep_alive, slips=lambda text: amount_slips(text, DURATION_SECONDS)),
    "provider": choice_rule(*PROVIDERS),
    "node provider": choice_rule(*NODE_KINDS),
    "auth": choice_rule("client"),
    "key variable": text_rule(
        _KEY_VARIABLE, "a variable name that ends in _API_KEY or _API_TOKEN", "NODE_API_KEY"),
    "boolean": Rule(
        {"type": "boolean"}, "`true` or `false`", True, slips=lambda text: {
            "true": [True], "yes": [True], "false": [False], "no": [False],
        }.get(text.lower(), [])),
    "target": choice_rule(*TARGET_NAMES),
    "frontmatter": Rule({"type": "object"}, "keys and values", {"maxTurns": 20}),
    # What a reference refers to is checked when everything is read.
    "reference": text_rule(_NAME, "the name of a node or a model", None),
    # of a task file
    "task name": text_rule(
        TASK_NAME, "letters, digits, `-` and `_`, at most 60, a letter or digit first, not "
        "`landed`",
        "parser", slips=name_slips),
    "command": text_rule(PARAGRAPH, "a shell command", "make test"),
    "check": text_rule(PARAGRAPH, "a shell command, or `none`", "make test",
                        normal=lambda text: None if text == "none" else text),
    "glob": text_rule(
        _GLOB, "a pattern of paths in the repository, such as `src/**`", "src/**"),
    "revision": text_rule(REVISION, "a branch, tag or commit, or `after`", "main"),
    "coder": Rule(
        {"anyOf": [{"enum": [CLAUDE, *CODERS]}, _COMMAND_LIST]},
        some_of([f"`{name}`" for name in (CLAUDE, *CODERS)]) + ", or a command as a list",
        CLAUDE, _normal_list, slips=lambda text: [
            *difflib.get_close_matches(text, (CLAUDE, *CODERS)),
            ["sh", "-c", text] if re.search("['\"|&;<>$`]", text)
            else re.split("[ ,]+", text.strip("[]"))]),
    "notice": Rule(
        {"anyOf": [{"type": "string", "pattern": PARAGRAPH}, _COMMAND_LIST]},
        "a command, as text or as a list", ["notify-send"], _normal_list),
    "span": Rule(
        {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 604800},
                   {"type": "string", "pattern": _SPAN}]},
        "seconds, or a duration such as `45m`", "45m", normal_keep_alive,
        lambda text: amount_slips(text, DURATION_SECONDS)),
    "changes": choice_rule("required", "none"),
    "check place": choice_rule("own", "same"),
    "permission": choice_rule("default", "bypass"),
    "sandbox": choice_rule("auto", "required", "off"),
    "writable": text_rule(_WRITABLE, "a path from `/`, from `~/`, or from the checkout",
                          "~/.gradle"),
    "tries": number_rule(1, 20, "a whole number, 1 to 20", 3),
    "rounds": number_rule(0, 20, "a whole number, 0 to 20", 3),
    "priority": number_rule(-1000, 1000, "a whole number, -1000 to 1000", 10),
    "cloud limit": number_rule(0, 1000, "a whole number, 0 to 1000", 3),
}
RULES["references"] = list_rule("reference")
RULES["tags"] = list_rule("tag")
RULES["tools"] = list_rule("tool")
RULES["targets"] = list_rule("target")
RULES["task names"] = list_rule("task name")
RULES["commands"] = list_rule("command")
RULES["globs"] = list_rule("glob")
RULES["rungs"] = list_rule("alias")
_TIMES = number_rule(1, 26, "", 2)
RULES["times"] = replace(
    _TIMES, schema={"anyOf": [_TIMES.schema, {**RULES["rungs"].schema, "maxItems": 26}]},
    words="a whole number, 1 to 26, or a list of models", normal=_normal_list)
RULES["writables"] = list_rule("writable")

_SCHEMA_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "array": (list,), "object": (dict,)}


def obeys(value: object, rule: str) -> bool:
    """Tell whether a value obeys a rule of RULES."""
    return RULES[rule].fits(value)


def key(rule: str | Rule = "", words: str = "", default: Any = REQUIRED, *, name: str = "",
        others: str = "") -> Any:
    """Declare a field that is read: its rule, its purpose for people, its default.

    A section has no rule: its type, a record, has those of its keys. Its `name` in files is
    the field's own, unless given; behind a blank stands a second one that is read, too.
    `others` are the words of other programs for it, which people write by mistake.
    """
    name, _, also = name.partition(" ")
    return Field(default, RULES.get(rule) if isinstance(rule, str) else rule, words, name,
                 also, others)


def _fits_schema(value: Any, schema: dict[str, Any]) -> bool:
    if "anyOf" in schema:
        return any(_fits_schema(value, part) for part in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]

    if type(value) not in _SCHEMA_TYPES[schema["type"]]:  # to Python, True is an integer
        return False
    if "pattern" in schema:
        return re.fullmatch(schema["pattern"].strip("^$"), value) is not None
    if "minimum" in schema:
        return schema["minimum"] <= value <= schema["maximum"]
    if "items" in schema:
        return all(_fits_schema(item, schema["items"]) for item in value)
    return True


def fix_value(value: Any, rule: Rule) -> Any:
    """Return the valid value that was probably meant, or None."""
    if isinstance(value, (list, dict)) and len(value) == 1 and not rule.item:
        value = next(iter(value))  # one thing, written as a list or with a colon
    kinds = ((str, int) if "pattern" in rule.schema
             else (str, int, float))  # 1.10 is 1.1 to YAML
    if type(value) not in kinds or len(str(value)) > 200:
        return None
    text = str(value).strip(_QUOTES)
    if set(_QUOTES) & set(text) - {" "}:  # what is left of them belongs to a part of it
        text = str(value)
    guesses = [text, *(rule.slips(text) if rule.slips else ())]
    if rule.item:
        guesses += [[item.strip(_QUOTES) for item in text.strip("[]").split(",")], [text],
                    text.split()]
    for guess in guesses:
        if rule.fits(guess):
            with contextlib.suppress(FleetError):
                rule.read(guess)
                return guess
    return None


def show_entry(name: str, value: Any) -> str:
    """Return a key with its value, or an item of a list, which has no name, as typed."""
    if isinstance(value, (list, tuple)):
        text = f"[{', '.join(map(quote_yaml, value))}]"
    else:
        text = json.dumps(value) if isinstance(value, dict) else dump_yaml(value).rstrip("\n")
    return f"{name}: {text}" if name else text
