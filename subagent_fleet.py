#!/usr/bin/env python3
# /// script
# requires-python = ">=3.9"
# dependencies = []
# ///
# SPDX-License-Identifier: MIT
"""Run Claude Code-style subagents across your local model fleet.

One fleet.yaml says which role runs on which model on which machine; this file finds what the
machines have, writes what LiteLLM and Claude Code read, warms the models, serves the fleet and
says truthfully whether it will work. Everything it does to the world is in section 13.

A section uses only what stands above it; parts A to D touch nothing but their arguments.

Contents
  A. Foundations
     1. Start and constants   what is loaded when, literals, limits
     2. Errors and records    what can go wrong, and what is passed around
     3. YAML subset           text to values, and back
  B. What a fleet is (pure)
     4. Fleet file            what a fleet.yaml may say
     5. Planning              decisions: routes, tiers, fallbacks, environment
     6. Findings              what is worth telling a person, and what mends it
  C. Words (pure)
     7. Generated files       what LiteLLM, Claude Code and shells read, as text
     8. Terminal text         tables and messages, as text
  D. Speech (pure)
     9. Talk                  what a client asks and a model answers, in nobody's dialect
    10. Backends              what a node speaks
    11. Dialects              what a client speaks
  E. World
    12. HTTP                  requests and answers on a connection
    13. World                 disk, network, programs, clock, terminal: the only door
  F. The fleet at work
    14. Nodes                 what is asked of a machine
    15. Trials                what a model really can
    16. Gateway               the fleet behind one address
    17. Traces                which machine served which agent
    18. Dashboard             the fleet on a page
    19. Tasks                 what shall be done, and what was (pure)
    20. Supervisor            agents at work, each in a worktree of its own
    21. Demo                  the whole thing with nothing installed
  G. Commands
    22. Workspace             config, key, generated files, settings: as they lie on the disk
    23. Commands              what each command does
    24. Command line          flags, help, main
    25. Assets                texts that are handed out whole
"""
from __future__ import annotations

import sys

if sys.version_info < (3, 9):  # noqa: UP036 - this is what an older Python reaches
    # Python 2 and 3.5 read no f-string, and show the first line that they cannot read: this one.
    sys.exit(f"subagent-fleet needs Python 3.9 or newer; this is {sys.version.split()[0]}")


def _end_quietly(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Let Ctrl-C end a start without a traceback; `main` does so from then on."""
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, error, trace)


if __name__ == "__main__":
    sys.excepthook = _end_quietly

from abc import ABC, abstractmethod  # noqa: E402 - an older Python ends above
from dataclasses import dataclass, field, fields, replace  # noqa: E402
from functools import lru_cache, partial  # noqa: E402


class _Late:
    """Stands for a module until it is first used; `--version` uses none of these."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, key: str) -> Any:
        module = __import__(self.name)
        globals()[self.name] = module
        return getattr(module, key)


TYPE_CHECKING = False
if TYPE_CHECKING:  # what checkers and editors read; the names are those below
    import argparse
    import array
    import base64
    import datetime
    import difflib
    import hashlib
    import ipaddress
    import json
    import re
    import string
    import threading
    import unicodedata
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
    from typing import Any, NoReturn, TypeVar, Union

    _Container = TypeVar("_Container", "dict[Any, Any]", "list[Any]")
    _Named = TypeVar("_Named", "NodeModel", "LoadedModel")
    _Warn = Callable[..., "Finding"]  # see lint_fleet
    _Rule = Callable[["Fleet", _Warn], Iterator["Finding"]]
    Event = Union["RequestBegun", "SlotGot", "FirstToken", "TokensSoFar", "Receipt", "NodeRests",
                  "NodeReturns"]
else:
    (argparse, array, base64, datetime, difflib, hashlib, ipaddress, json, re, string, threading,
     unicodedata) = map(_Late, (
         "argparse array base64 datetime difflib hashlib ipaddress json re string threading "
         "unicodedata").split())


class _Pattern:
    """A regular expression that is compiled when it is first used."""

    def __init__(self, pattern: str | bytes) -> None:
        self.pattern: Any = pattern

    def __getattr__(self, name: str) -> Any:
        method = getattr(re.compile(self.pattern), name)
        self.__dict__[name] = method  # the next look finds it here
        return method


__version__ = "1.0.0"


# =============================================================================
# A. Foundations
# =============================================================================

# == 1. Start and constants ===================================================

EXIT_OK = 0
EXIT_PROBLEM = 1
EXIT_USAGE = 2
EXIT_REFUSED = 3
EXIT_INTERRUPTED = 130

# Files, by the names people know.
CONFIG_NAMES = ("fleet.yaml", "fleet.yml", "fleet.json")
CONFIG_VARIABLE = "SUBAGENT_FLEET_CONFIG"
STATE_DIRECTORY = ".subagent-fleet"
MANIFEST_FILE = f"{STATE_DIRECTORY}/manifest.json"
LITELLM_FILE = "litellm_config.yaml"
LITELLM_LOG_FILE = f"{STATE_DIRECTORY}/litellm.log"
ENVIRONMENT_FILE = ".env.subagent-fleet"
TEXT_LIMIT_BYTES = 4 * 1024 * 1024
RECEIPTS_LIMIT_BYTES = 10 * 1024 * 1024

# How long is waited.
PROBE_TIMEOUT_SECONDS = 5.0
INIT_TIMEOUT_SECONDS = 2.0
CONNECT_SECONDS = 3.0  # a sleeping laptop costs this, not the whole deadline
SEND_SECONDS = 60.0
LEAVE_SECONDS = 0.02  # for a byte to arrive before the connection closes
PROBE_GRACE_SECONDS = 0.2  # for what a node said in time to reach the main thread
PULL_STALL_SECONDS = 120.0
TICK_SECONDS = 0.2

# How much is read.
ANSWER_LIMIT_BYTES = 8 * 1024 * 1024
PROBE_LIMIT_BYTES = 1024 * 1024  # 2,400 models; as text and values it takes five times that
FREE_ANSWER_BYTES = 256 * 1024  # larger answers are read one at a time
HEADER_LIMIT_BYTES = 64 * 1024
SHOW_LIMIT = 64  # models of one node that are asked for their capabilities

HOME_URL = "https://github.com/adityak74/subagent-fleet"
OTHER_PORT = "stop it, or write another `port:` under project.gateway"
OLLAMA_PORT = 11434
OLLAMA_ENDPOINT = "http://localhost:11434"
# Where the roads out of a machine lead: anywhere, the private networks, Tailscale's own address.
ROUTE_TARGETS = ("192.0.2.1", "10.0.0.1", "172.16.0.1", "192.168.0.1", "100.100.100.100")
TIERS = ("main", "opus", "sonnet", "haiku", "fable")


# == 2. Errors and records ====================================================

class FleetError(Exception):
    """An expected failure: what, where and what to type. Only `main` prints it."""

    def __init__(self, slug: str, what: str, *, where: str = "", fix: str = "", excerpt: str = "",
                 status: int = EXIT_PROBLEM, findings: Iterable[Finding] = ()) -> None:
        super().__init__(what)
        self.slug = slug
        self.what, self.where = what, where
        self.fix, self.excerpt = fix, excerpt
        self.status = status
        self.findings = tuple(findings)  # one error may carry every problem of a config
        self.report: dict[str, Any] = {}  # what `--json` shows beside it

    @property
    def finding(self) -> Finding:
        return Finding(self.slug, "error", self.what, self.where, self.excerpt, self.fix)


class NodeFailure(FleetError):
    """Why a node could not be used: a reason class (refused, timeout, …) and the detail."""

    def __init__(self, reason: str, detail: str, *, fix: str = "") -> None:
        super().__init__("node-failure", f"{reason}: {detail}" if detail else reason, fix=fix)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Try:
    """A node that was asked in vain."""

    node: str
    why: str  # a class of reasons


@dataclass(frozen=True)
class Passed:
    """A candidate that was not asked: the request needs what it cannot do."""

    model: str
    why: str  # images, context or tools


TOTALS = ("requests", "input_tokens", "output_tokens", "waited_seconds", "failures")


@dataclass(frozen=True)
class Receipt:
    """What one request came to: nothing of the prompt or the answer."""

    time: float
    id: str
    session: str
    agent: str
    alias: str
    model: str | None  # who answered; None: nobody was asked
    node: str | None
    context: int | None
    tries: tuple[Try, ...]
    waited: float | None  # seconds for a slot
    first_byte: float | None
    total: float
    input_tokens: int
    output_tokens: int
    outcome: str  # ok, left, stopped, prompt_too_long, or the kind of the error
    sent: int = 0  # tokens that the prompt was thought to have; 0: not known
    cloud: bool = False  # it left the house
    passed_over: tuple[Passed, ...] = ()
    said: str = ""  # who failed and in which words, as far as those are no prompt's or answer's


# What happens on the way to a receipt, as it happens: the time is seconds since 1970.

@dataclass(frozen=True)
class RequestBegun:
    """A request waits for a slot."""

    time: float
    id: str
    session: str
    agent: str
    alias: str


@dataclass(frozen=True)
class SlotGot:
    """A model is asked: the first time, or another one after a failure."""

    time: float
    id: str
    model: str
    node: str


@dataclass(frozen=True)
class FirstToken:
    """The model has read the prompt and begins to answer."""

    time: float
    id: str


@dataclass(frozen=True)
class TokensSoFar:
    """How far an answer is, once a second; the node's own count is in the receipt."""

    time: float
    id: str
    output_tokens: int


@dataclass(frozen=True)
class NodeRests:
    """A node, or one model on it, has failed and is left alone for a while."""

    time: float
    id: str  # of the request that found out, which goes on elsewhere where it can
    node: str
    model: str  # empty: all of them
    seconds: float
    why: str  # a class of reasons


@dataclass(frozen=True)
class NodeReturns:
    """A node that rested has answered."""

    time: float
    id: str
    node: str


@dataclass(frozen=True)
class Rejection:
    """A request that was refused before it was anybody's."""

    http: int
    what: str


@dataclass(frozen=True)
class Reply:
    """A whole HTTP answer of a node."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes | bytearray


@dataclass(frozen=True)
class Ask:
    """One request to a node, and how its answer is read; only who makes an Ask knows a path."""

    path: str
    extract: Callable[[Reply], Any]  # raises NodeFailure where the answer is none
    payload: object = None  # sent as JSON; None: a GET
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """One thing that is true of a config, a node or a file, and what mends it."""

    slug: str
    level: str  # error, warning, info or ok
    what: str
    where: str = ""
    excerpt: str = ""
    fix: str = ""


@dataclass(frozen=True)
class NodeModel:
    """A model that a node has on disk (`/api/tags`, `/api/show`)."""

    name: str
    size: int = 0
    parameters: str = ""
    quantization: str = ""
    capabilities: tuple[str, ...] | None = None  # None: not known
    trained_context: int | None = None
    remote: str = ""
    token_bytes: int | None = None  # of memory for one token of context; None: not known


@dataclass(frozen=True)
class LoadedModel:
    """A model that a node holds in memory now (`/api/ps`)."""

    name: str
    context: int
    gpu_percent: int | None  # None: the node does not say
    size: int
    expires: str


@dataclass(frozen=True)
class NodeKind:
    """What is known of a kind of server without asking it."""

    title: str  # as people call it
    port: int  # where it usually answers; 0: nowhere of its own
    obtain: str  # how a model comes there; {} stands for its name
    can_pull: bool = False  # it can be told from here to download one


NODE_KINDS = {  # a row of BACKENDS each
    "ollama": NodeKind("Ollama", 11434, "`ollama pull {}`", can_pull=True),
    "llamacpp": NodeKind("llama.cpp", 8080, "start llama-server with `--alias {}`"),
    "lmstudio": NodeKind("LM Studio", 1234, "`lms get {}`"),
    "vllm": NodeKind("vLLM", 8000, "start vLLM with `--served-model-name {}`"),
    "openai": NodeKind("OpenAI-compatible", 0, "offer `{}`"),
}


def kind_title(provider: str) -> str:
    """Return what people call what a node runs."""
    kind = NODE_KINDS.get(provider)
    return kind.title if kind else provider


def obtain_model(provider: str, model_name: str) -> str:
    """Return how a model comes to a node, in words that ` on NODE` or ` there` follows."""
    kind = NODE_KINDS.get(provider)
    return kind.obtain.replace("{}", model_name) if kind else f"offer `{model_name}`"


# What mends it that a node was of no use, by the class of reasons; {} stands for what it runs.
REASON_FIXES = {
    "refused": "start {} there; `subagent-fleet worker`, typed there, says how to open it",
    "timeout": "wake the machine, and check its firewall",
    "dns": "check the name, or write the address of the machine",
    "unreachable": "join its network; on a Mac see also Privacy & Security > Local Network",
    "tls": "write http:// in its endpoint, or give it a certificate this machine trusts",
    "http 401": "write `api_key_env:` with the variable that holds its key",
    "http 503": "wait until it has loaded its model",
    "no key": "export the variable, where the command runs",
    "not trusted": "`subagent-fleet trust`",
    "not it": "correct its endpoint or its `provider:`, or start {} there",
    "bad answer": "check what listens there; restart {}"}


def mend_reason(reason: str, provider: str) -> str:
    """Return what mends it that a node was of no use, or nothing where nobody knows."""
    if reason == f"not {provider}":
        reason = "not it"
    return REASON_FIXES.get(reason, "").replace("{}", kind_title(provider))


@dataclass(frozen=True)
class NodeState:
    """What one node answered, or why it did not."""

    name: str
    endpoint: str
    reason: str = ""  # "" is online, else a class: refused, timeout, dns, …
    detail: str = ""
    version: str = ""
    latency_ms: float | None = None
    models: tuple[NodeModel, ...] = ()
    loaded: tuple[LoadedModel, ...] = ()
    provider: str = "ollama"

    @property
    def online(self) -> bool:
        return not self.reason

    @property
    def why(self) -> str:
        return f"{self.reason}: {self.detail}".rstrip(": ")

    @property
    def mend(self) -> str:
        fix = mend_reason(self.reason, self.provider)
        return fix or mend_reason("bad answer", self.provider)

    @property
    def runs(self) -> str:
        """What answers there, as people call it."""
        return f"{kind_title(self.provider)} {self.version}".rstrip()


def nearest(word: object, choices: Iterable[object]) -> str:
    """Return ``did you mean `x`?`` for the closest choice, or an empty string."""
    spelled = {str(choice).lower(): choice for choice in list(choices)[:100]}  # 3 ms
    matches = difflib.get_close_matches(str(word)[:64].lower(), spelled, 1, 0.6)
    return f"did you mean `{spelled[matches[0]]}`?" if matches else ""


def some_of(names: Collection[object], limit: int = 12) -> str:
    """Return `a, b and 3 more`."""
    shown = ", ".join(map(str, list(names)[:limit]))
    if len(names) > limit:
        shown += f" and {len(names) - limit:,} more"
    return shown


def count_of(things: Sized, noun: str) -> str:
    """Return `1 warning`, `2 warnings`."""
    return f"{len(things)} {noun}" if len(things) == 1 else f"{len(things)} {noun}s"


def show_value(value: object) -> str:
    """Return a value as it may stand in a message: short, in backticks."""
    words = {type(None): "nothing", dict: "a mapping", list: "a list"}
    if type(value) in words:
        return words[type(value)]
    text = str(value)
    if isinstance(value, bool):
        text = text.lower()
    return f"`{text[:60]}…`" if len(text) > 60 else f"`{text}`"


# == 3. YAML subset ===========================================================
#
# document = [BOM] ["---"] [node] ["..."]    comments and blank lines between all tokens
# node     = mapping | sequence | inline     set deeper than what it belongs to
# mapping  = (key ":" [node])+               all at one column, no key twice
# sequence = ("-" [node])+                   may stand at the column of its own key
# inline   = plain | "'" text "'" | '"' text '"' | ("|" | ">") lines | flow
# flow     = "[" [item ("," item)* [","]] "]" | "{" [key [":" item] ("," ...)* [","]] "}"
#
# The rule: what is returned is what PyYAML's safe_load returns; everything else is an error.
# Where PyYAML is laxer than YAML (columns inside quotes and brackets), so is this reader.
# JSON is read as flow style. Unsupported, because:
#   anchors, aliases, merge keys  a value would hide in another place
#   tags, directives              they exist to change what plain text means
#   `?` keys, pairs as [a: b]     few people read them right
#   several documents             one file, one fleet
#   yes, 012, 1:30, 2001-01-01    YAML 1.1 and 1.2 disagree on what they are
#   tabs before a token           no two programs agree on their width
#   odd blanks around plain text  U+00A0 looks like a space and is read as a letter
#   escaped surrogates (\ud83d)   PyYAML makes two broken characters of a pair
#   plain text after `// `        it is meant as a comment

DEPTH_LIMIT = 64
KEY_LIMIT = 1024  # from the start of a key to its colon: YAML's own limit

_CLASH = object()  # the meaning of a word that programs read differently


def _word_meanings() -> dict[str, object]:
    """Return what each plain word that is no text means, in the spellings that YAML knows."""
    meanings = {
        "null": None,
        "true": True,
        "false": False,
        ".inf": float("inf"),
        "+.inf": float("inf"),
        "-.inf": float("-inf"),
        "yes": _CLASH,
        "no": _CLASH,
        "on": _CLASH,
        "off": _CLASH,
    }
    words: dict[str, object] = {"": None, "~": None, "=": _CLASH, "<<": _CLASH}
    for word, meaning in meanings.items():
        words[word] = meaning
        words[word.title()] = meaning
        words[word.upper()] = meaning

    for word in (".nan", ".NaN", ".NAN"):
        words[word] = float("nan")
    return words


_WORDS = _word_meanings()
# The first group is an integer of every YAML, the second a float. Then comes what is a number
# or a date in 1.1 or in 1.2 only. Python 3.11 refuses integers of more than 4,300 digits.
_NUMBER = _Pattern(
    r"([-+]?(?:0|[1-9][0-9]{0,999})|0x[0-9a-fA-F]{1,999})"
    r"|([-+]?[0-9]+\.[0-9]*(?:[eE][-+][0-9]+)?|\.[0-9]+(?:[eE][-+][0-9]+)?)"
    r"|[-+]?0b[01_]+|[-+]?0x[0-9a-fA-F_]+|0o[0-7]+"
    r"|[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9][0-9_]*(?::[0-5]?[0-9]){1,99}(?:\.[0-9_]*)?|[-+]?[0-9][0-9_:.]{200,}"
    r"|[0-9]{4}-[0-9][0-9]?-[0-9][0-9]?(?:(?:[Tt]|[ \t]+)[0-9][0-9]?:[0-9][0-9]:[0-9][0-9]"
    r"(?:\.[0-9]*)?(?:[ \t]*(?:Z|[-+][0-9][0-9]?(?::[0-9][0-9])?))?)?")
_NUMBER_START = "+-.0123456789"

# Surrogates, controls, and the line breaks and byte order marks that programs disagree on.
_ODD = _Pattern("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
# What plain text cannot begin with because it means more in YAML, and what to do instead.
_OUTSIDE = {
    "&": ("anchors", "remove it, and repeat the value where it is used"),
    "*": ("aliases", "repeat the value"),
    "!": ("tags", "remove the tag"),
    "%": ("directives", "remove the line"),
}
# What to do about other characters that begin neither a value nor a key.
_MISPLACED = {
    ",": "remove it, or quote the text",
    "]": "remove it, or quote the text",
    "}": "remove it, or quote the text",
    "-": "remove it, or quote the text",
    ":": "write a key before it, or quote the text",
    "[": "write a key that is text",
    "{": "write a key that is text",
}
_ESCAPES = {
    "0": "\0", "a": "\a", "b": "\b", "t": "\t", "\t": "\t", "n": "\n", "v": "\v", "f": "\f",
    "r": "\r", "e": "\x1b", " ": " ", '"': '"', "/": "/", "\\": "\\",
    "N": "\x85", "_": "\xa0", "L": "\u2028", "P": "\u2029",
}
# What ends or changes quoted text. A run of blanks is passed whole, which keeps this linear.
_BREAK = r"|[ \t]*\n[ \t\n]*|[ \t]{2,}"
_ESCAPE = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|\n[ \t\n]*|[^\n])"
_QUOTED = {
    "'": _Pattern("''?" + _BREAK),
    '"': _Pattern('"|' + _ESCAPE + _BREAK),
}

_SPACES = _Pattern(" *")
_LINE = _Pattern("[^\n]*")
_BLANKS = _Pattern("[ \n]*")
_MARKER = _Pattern(r"(?m)^(?:---|\.\.\.)(?=[ \t\n]|\Z)")
_DASH = _Pattern(r"-(?=[ \t\n]|\Z)")
# How plain text begins, and what may end it, in block style and between brackets.
_SAFE_START = r"[^ \t\n\-?:,\[\]{}#&*!|>'\"%@`]"
_BLOCK_START = _Pattern(rf"{_SAFE_START}|[-?:](?![ \t\n]|\Z)")
_BLOCK_STOP = _Pattern(r":(?=[ \t\n]|\Z)| #|\t|\n")
_FLOW_START = _Pattern(rf"{_SAFE_START}|-(?![ \t\n]|\Z)")
_FLOW_STOP = _Pattern(r":(?=[ \t\n,\[\]{}]|\Z)| #|\t|\n|,|\?|\[|\]|\{|\}")
# A key with its colon. Each repeated part begins with a character that cannot end the part
# before it, so that a line without a key is given up in linear time.
_KEY = _Pattern(
    r"(\"[^\"\\\n]*(?:\\.[^\"\\\n]*)*\" *|'[^'\n]*(?:''[^'\n]*)*' *"
    rf"|(?:{_BLOCK_START.pattern})[^\t\n:#]*(?:(?::(?![ \t\n]|\Z)|(?<! )#)[^\t\n:#]*)*)"
    r":(?=[ \t\n]|\Z)")
# The sign and the digit of `|` and `>` come in either order.
_BLOCK_HEADER = _Pattern(r"[|>](?:([-+])([1-9])?|([1-9])([-+])?)?(?: *| +#[^\n]*)(?:\n|\Z)")
# Blanks that look like a space or like nothing; YAML takes them for letters.
_ODD_BLANKS = {
    "\xa0": "no-break space",
    "\u1680": "ogham space mark",
    "\u2000": "en quad",
    "\u2001": "em quad",
    "\u2002": "en space",
    "\u2003": "em space",
    "\u2004": "three-per-em space",
    "\u2005": "four-per-em space",
    "\u2006": "six-per-em space",
    "\u2007": "figure space",
    "\u2008": "punctuation space",
    "\u2009": "thin space",
    "\u200a": "hair space",
    "\u200b": "zero width space",
    "\u202f": "narrow no-break space",
    "\u205f": "medium mathematical space",
    "\u2060": "word joiner",
    "\u3000": "ideographic space",
}
_NO_WIDTH = "\u200b\u2060"
_BLANK_RUN = _Pattern("\t+|[" + "".join(_ODD_BLANKS) + "]+")
# Where such a blank hides before text, behind a dash or behind the colon of a key.
_BLANK_BEFORE = _Pattern("(-?|[\\w.-]+:)[" + "".join(_ODD_BLANKS) + "]")
# What is meant as plain text between brackets.
_FLOW_WORD = _Pattern(r"(?:[^\t\n,\[\]{}\"'#:]|:(?![ \n,\[\]{}])){1,99}")
# The spaces and dashes before what a line holds.
_NESTING = _Pattern("( *)(?:- +)*")
# The spaces before what a line holds, unless that is a remark.
_INDENTATION = _Pattern(r"(?m)^( *)[^ \n#]")
# A key whose value follows its colon without a space; `http://` is no key.
_GLUED_KEY = _Pattern(r"""(?:"[^"\n]*"|'[^'\n]*'|[\w.-]+):(?=[^ \n])(?!//)""")
# A key that misses the quote at its end.
_OPEN_KEY = _Pattern(r"[\w.-]+(?=:(?:[ \n]|\Z))")
# What other formats begin a comment with, where a token may begin; the value `//server` is none.
# Quotes and comments are passed.
_SLASHES = _Pattern(
    r"""(?<![^ ,\[\]{}"'\n])(?:"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|#[^\n]*"""
    r"|((?<![:-] )//|//(?= )|/\*))")
_SLASHES_LINE = _Pattern(r"(?m)^ *(//|/\*)")
# What git writes around the two sides of a conflict; the last two nobody else writes.
_CONFLICT = _Pattern(r"(?:<{7}|={7}|>{7}|\|{7})(?= |\n|\Z)")
_CONFLICT_EDGE = _Pattern(r"(?m)^(?:<{7}|>{7})(?= )")
# Two lines of a `>` scalar that are joined: neither begins with a blank.
_FOLDED = _Pattern(r"(?m)^([^ \t\n][^\n]*)\n(\n*)(?=[^ \t\n])")
# Text that is written without quotes; what begins with `//` is taken for a comment.
_BARE = _Pattern(r"(?a)(?!//)[A-Za-z_/][\w./@%+=();-]*(?:[ :][\w./@%+=();-]+)*")


def parse_yaml(text: str, source: str = "<text>") -> object:
    """Return the plain value of a YAML or JSON text, as PyYAML's safe_load does, or refuse."""
    return Document(text, source).value


class Document:
    """A YAML or JSON text that was read: its `value`, and the position of everything in it.

    Every method that reads starts at `self.at`. Those of block style stop at the next token, its
    column in `self.column`: -1 when the document is over. `marks` holds for each container, by
    id, four offsets an entry: start and end of the key, start and end of the value.
    """

    def __init__(self, text: str, source: str) -> None:
        if not isinstance(text, str):
            raise FleetError("yaml-input", f"not text, but {type(text).__name__}", where=source)
        if len(text) > TEXT_LIMIT_BYTES:
            raise FleetError("yaml-limit", f"the text has {len(text):,} characters, more than "
                             f"{TEXT_LIMIT_BYTES:,}", where=source)
        if text.startswith("\ufeff"):
            text = text[1:]

        self.text = text.replace("\r\n", "\n")
        self.source = source
        self.marks: dict[int | None, array.array] = {}

        # Where the reader stands, and what it is inside of.
        self.at = 0
        self.column = -1
        self.span: tuple[int, int] | None = None  # of the value read last, if it has its own
        self.open: list[array.array] = []  # the marks of the containers that are not over
        self.opener = -1  # the innermost bracket; -1: none is open

        # What `locate` remembers, so that many problems are located in linear time.
        self.last_line = (0, 1)
        self.orders: dict[int, dict] = {}

        self.check_characters()
        self.value = self.read_document()

    # -- positions --

    def locate(self, path: tuple, *, key: bool = False) -> tuple[str, str]:
        """Return (`source:line:column`, excerpt) of a value, or of the nearest key above it."""
        node: Any = self.value
        spans = self.marks[None] * 2
        for step in path:
            place = self.place_of(step, node)
            if place is None:
                key = True
                break
            spans = self.marks[id(node)][4 * place:4 * place + 4]
            node = node[step]

        if key:
            return self.show(spans[0], spans[1])
        return self.show(spans[2], spans[3])

    def has(self, path: tuple) -> bool:
        """Tell whether something is written at a path."""
        node: Any = self.value
        for step in path:
            if self.place_of(step, node) is None:
                return False
            node = node[step]
        return True

    def place_of(self, step: object, node: object) -> int | None:
        """Return the place of a key or an index among those of a container, if it is there."""
        if not isinstance(node, (dict, list)):
            return None

        order = self.orders.get(id(node))
        if order is None:
            steps = node if isinstance(node, dict) else range(len(node))
            order = {own: place for place, own in enumerate(steps)}
            self.orders[id(node)] = order
        return order.get(step)

    def show(self, start: int, end: int) -> tuple[str, str]:
        """Return `source:line:column` of a span, and its line with the span underlined."""
        line = self.line_of(start)
        line_start = self.line_start(start)
        line_end = self.line_end(start)

        # A long line is cut to what stands around the span.
        left = max(line_start, start - 60)
        right = min(line_end, start + 60)
        end = start + len(self.text[start:min(end, right)].rstrip(" \n"))

        before = _visible(self.text[left:start])
        if left > line_start:
            before = "…" + before
        token = _visible(self.text[start:end])
        after = _visible(self.text[end:right])
        if right < line_end:
            after += "…"

        caret = " " * len(before) + "^" * max(1, len(token))
        where = f"{self.source}:{line}:{start - line_start + 1}"
        return where, f"{line:>5} | {before}{token}{after}\n{'':>5} | {caret}"

    def line_of(self, at: int) -> int:
        """Return the number of a line."""
        # Counting from the last one keeps the finding of many problems linear.
        offset, line = self.last_line
        line += self.text.count("\n", offset, at)
        line -= self.text.count("\n", at, offset)
        self.last_line = at, line
        return line

    def line_start(self, at: int) -> int:
        return self.text.rfind("\n", 0, at) + 1

    def line_end(self, at: int) -> int:
        return _LINE.match(self.text, at).end()

    def mark(self, start: int, end: int) -> None:
        """Keep where the key and the value of an entry stand."""
        # An empty value stands where its key does, and so does one that begins below its key.
        self.open[-1].extend((start, end))
        self.open[-1].extend(self.span or (start, end))

    # -- from token to token --

    def skip(self, at: int) -> int:
        """Return where the first token at or behind `at` begins."""
        at = _BLANKS.match(self.text, at).end()
        while self.text[at:at + 1] == "#":
            at = _BLANKS.match(self.text, _LINE.match(self.text, at).end()).end()
        return at

    def seek(self, at: int) -> bool:
        """Go to the first token at or behind `at`; tell whether it is on the same line."""
        text = self.text
        self.at = self.skip(at)
        self.column = self.at - text.rfind("\n", 0, self.at) - 1
        if self.at == len(text) or (self.column == 0 and _MARKER.match(text, self.at)):
            self.column = -1
            return False
        return "\n" not in text[at:self.at]

    def end_line(self, column: int = -1) -> None:
        """Pass the rest of a line that must be empty, and go to the next token.

        What stood on the line belongs to what is at `column`.
        """
        if not self.seek(self.at):
            return
        if self.text[self.at] == ":" and self.span:
            self.fail_colon(self.span[0], column)
        self.fail_unexpected("the end of the line", fix="quote the whole value")

    def enter(self) -> None:
        """Begin the marks of a container."""
        self.open.append(array.array("I"))  # 16 bytes an entry; tuples take 30 times the text
        if len(self.open) > DEPTH_LIMIT:
            self.fail("yaml-limit", f"more than {DEPTH_LIMIT} levels deep")

    def leave(self, container: _Container) -> _Container:
        """Keep the marks of a container that is over, and return it."""
        marks = self.open.pop()
        if marks:
            self.marks[id(container)] = marks
        self.span = None
        return container

    # -- block style --

    def read_document(self) -> object:
        """Read the value of the whole text, with the marks of a document around it."""
        self.seek(0)
        self.marks[None] = array.array("I", (self.at, self.at + 1))
        has_marker = self.column < 0 and self.text.startswith("---", self.at)
        is_empty = self.column < 0 and not has_marker
        if has_marker:
            self.at += 3

        value = self.read_value(-1, may_nest=not has_marker)
        if self.column >= 0:
            self.fail("yaml-indent", "this line belongs to nothing above it",
                      fix="remove it, or begin it with `#`")

        if not is_empty and self.text.startswith("...", self.at):
            self.at += 3
            self.end_line()
        if self.at < len(self.text):
            self.fail_outside("several documents", "keep one document per file", at=self.at,
                              size=3)
        return value

    def read_value(self, column: int, *, may_nest: bool = False) -> object:
        """Read what follows a key, a dash or `---` at `column`: nothing, or a value.

        On the same line, a list or a mapping `may_nest` behind a dash only.
        """
        self.span = None
        is_same_line = self.seek(self.at)
        if is_same_line and not may_nest:
            return self.read_inline(column)
        if self.column > column:
            return self.read_block(column)
        # The list of a key may stand at the column of that key.
        if self.column == column and not may_nest and _DASH.match(self.text, self.at):
            return self.read_block(column)
        return None

    def read_block(self, indent: int) -> object:
        """Read the value at `self.column`; what it belongs to is at column `indent`."""
        if _DASH.match(self.text, self.at):
            return self.read_sequence(indent)
        first_key = self.match_key()
        if first_key:
            return self.read_mapping(indent, first_key)
        return self.read_inline(indent)

    def read_sequence(self, indent: int) -> list:
        column = self.column
        items: list = []
        self.enter()
        while self.column == column and _DASH.match(self.text, self.at):
            dash = self.at
            self.at += 1
            items.append(self.read_value(column, may_nest=True))
            self.mark(dash, dash + 1)
        if self.column > indent:
            self.fail_neighbour(column, indent)
        return self.leave(items)

    def read_mapping(self, indent: int, match: re.Match | None) -> dict:
        """Read a mapping whose first key is matched."""
        column = self.column
        mapping: dict = {}
        self.enter()
        while self.column == column:
            if mapping:
                match = self.match_key()
            if not match:
                self.fail_key(self.at)

            start = self.at
            key = self.read_key(match)
            if key in mapping:
                self.fail_duplicate(mapping, key, start)

            self.at = match.end()
            mapping[key] = self.read_value(column)
            self.mark(start, match.end() - 1)
        if self.column > indent:
            self.fail_neighbour(column, indent)
        return self.leave(mapping)

    def match_key(self) -> re.Match | None:
        """Match the key that begins here, with its colon."""
        end = self.at + KEY_LIMIT + 2
        match = _KEY.match(self.text, self.at, end)
        # A colon at the very end is too far away: what follows it was not looked at.
        if match and match.end() < end:
            return match
        return None

    def read_key(self, match: re.Match) -> object:
        if self.text[self.at] in "\"'":
            return self.read_quoted()
        return self.resolve(match[1].rstrip(" "), self.at)

    def read_inline(self, indent: int) -> object:
        """Read a scalar or flow style, and the end of its line."""
        if self.text[self.at] in "|>":
            return self.read_lines(indent)
        value = self.read_token(indent, _BLOCK_START, _BLOCK_STOP)
        self.end_line(indent)
        return value

    # -- scalars --

    def read_token(self, indent: int, starts: _Pattern, stops: _Pattern) -> object:
        """Read what is in brackets or in quotes, or plain text as it `starts` and `stops` here."""
        text = self.text
        start = self.at
        char = text[start]
        value: Any
        if char in "[{":
            value = self.read_flow()
        elif char in "\"'":
            value = self.read_quoted()
        elif not starts.match(text, start) or (char in "-." and _MARKER.match(text, start)):
            self.fail_unexpected("a value")
        else:
            value = self.resolve(self.read_plain(indent, stops), start)
        self.span = start, self.at
        return value

    def read_plain(self, indent: int, stops: _Pattern) -> str:
        """Return the text of a plain scalar, its lines folded."""
        text = self.text
        at = self.at
        parts = []
        while True:
            stop = stops.search(text, at)
            self.at = stop.start() if stop else len(text)
            parts.append(text[at:self.at].rstrip(" "))
            if text[self.at:self.at + 1] != "\n":
                break

            # The text goes on below, unless a line is not deeper, or begins as text does not.
            gap = _BLANKS.match(text, self.at).group()
            at = self.at + len(gap)
            column = len(gap) - gap.rfind("\n") - 1
            if column <= indent or text[at:at + 1] in ("", "#"):
                break
            if stops.match(text, at) or _MARKER.match(text, at):
                break
            parts.append("\n" * (gap.count("\n") - 1) or " ")
        return "".join(parts)

    def resolve(self, text: str, at: int) -> object:
        """Return what the plain text at `at` means."""
        value = _WORDS.get(text, text)
        if value is _CLASH:
            self.fail_clash(text, at)
        if value is not text:
            return value

        if not text.isascii():
            self.check_edges(text, at)
        if text[0] in _NUMBER_START:
            value = _resolve_number(text)
            if value is _CLASH:
                self.fail_clash(text, at)
        elif text[0] == "/":
            self.check_remark(text, at)
        return value

    def read_quoted(self) -> str:
        """Return the text between quotes."""
        text = self.text
        start = self.at
        quote = text[start]
        parts = []
        at = start + 1
        for token in _QUOTED[quote].finditer(text, at):
            parts.append(text[at:token.start()])
            at = token.end()
            if token.group() == quote:
                self.at = at
                return "".join(parts)

            parts.append(self.unquote(token.group(), token.start()))
            if text[at - 1] == "\n" and _MARKER.match(text, at):
                marker = text[at:at + 3]
                self.fail("yaml-syntax", f"`{marker}` ends the document inside quotes", at=at,
                          size=3, fix="indent the line")
        self.fail("yaml-syntax", f"this `{quote}` is never closed", at=start,
                  fix=self.closing_fix(start))

    def unquote(self, token: str, at: int) -> str:
        """Return what an escape, two apostrophes or a break stands for inside quotes."""
        if "\n" in token:
            # One break is a space, or nothing when escaped; the others are kept.
            more = "\n" * (token.count("\n") - 1)
            if more or token[0] == "\\":
                return more
            return " "
        if token == "''":
            return "'"
        if token[0] != "\\":
            return token

        code = token[1:]
        if len(code) == 1:
            if code not in _ESCAPES:
                self.fail_escape(token, at, "double the backslash")
            return _ESCAPES[code]

        number = int(code[1:], 16)
        if 0xD800 <= number <= 0xDFFF or number > 0x10FFFF:
            self.fail_escape(token, at, "write the character itself, or \\U and its 8 digits")
        return chr(number)

    def read_lines(self, indent: int) -> str:
        """Read a `|` or `>` scalar; `indent` is the column of what it belongs to."""
        text = self.text
        start = self.at
        header = _BLOCK_HEADER.match(text, start)
        if not header:
            self.fail("yaml-syntax",
                      f"`{text[start]}` takes `+`, `-` and a digit from 1 to 9, then the line "
                      "must end", fix="put the text on the lines below")

        chomping = header[1] or header[4]
        digit = header[2] or header[3]
        if digit:
            width = max(indent, 0) + int(digit)
        else:
            width = self.measure_lines(header.end(), indent)

        # The lines that are indented as deep, or hold nothing at all.
        lines = []
        line = header.end()
        while line < len(text):
            inner = _SPACES.match(text, line, line + width).end()
            end = _LINE.match(text, inner).end()
            is_shallow = inner - line < width and inner < end
            if is_shallow or inner == len(text):
                break
            lines.append(text[inner:end + 1])
            line = end + 1
        self.span = start, start + 1
        self.seek(line)

        body = _chomp("".join(lines), chomping)
        if text[start] == ">":
            body = _fold(body)
        return body

    def measure_lines(self, at: int, indent: int) -> int:
        """Return how deep the first line of a `|` or `>` scalar is that holds text."""
        blank = _BLANKS.match(self.text, at)
        widths = [len(row) for row in blank.group().split("\n")]
        if indent < widths[-1] < max(widths):
            self.fail("yaml-indent", "a blank line above is indented deeper than this line",
                      at=blank.end(), fix="remove the spaces of the blank line")
        return max(indent + 1, 1, *widths)

    # -- flow style --

    def read_flow(self) -> dict | list:
        """Read what stands in brackets or braces, over any number of lines."""
        outer = self.opener
        self.opener = self.at
        self.enter()
        self.at += 1

        container: Any
        if self.text[self.opener] == "[":
            container = self.read_flow_list()
        else:
            container = self.read_flow_mapping()

        self.at += 1
        self.opener = outer
        return self.leave(container)

    def read_flow_list(self) -> list:
        items: list = []
        while self.peek() != "]":
            start = self.at
            items.append(self.read_token(-1, _FLOW_START, _FLOW_STOP))
            self.mark(start, self.at)
            self.end_item("]")
        return items

    def read_flow_mapping(self) -> dict:
        mapping: dict = {}
        while self.peek() != "}":
            start = self.at
            if self.text[start] in "[{":
                self.fail_unexpected("a key")
            if self.text.startswith("//", start):
                self.refuse_slashes(start)
            key = self.read_token(-1, _FLOW_START, _FLOW_STOP)
            end = self.at
            if key in mapping:
                self.fail_duplicate(mapping, key, start)

            mapping[key] = self.read_flow_value(start)
            self.mark(start, end)
            self.end_item("}")
        return mapping

    def read_flow_value(self, start: int) -> object:
        """Read a colon and a value, if they follow the key that began at `start`."""
        self.span = None
        if self.peek() != ":":
            return None
        if "\n" in self.text[start:self.at] or self.at - start > KEY_LIMIT:
            self.fail_colon(start)

        self.at += 1
        if self.peek() in ",}":
            return None
        return self.read_token(-1, _FLOW_START, _FLOW_STOP)

    def peek(self) -> str:
        """Go to the next token inside brackets and return its first character."""
        self.at = self.skip(self.at)
        if self.at == len(self.text):
            opener = self.text[self.opener]
            closer = "]" if opener == "[" else "}"
            self.fail("yaml-syntax", f"this `{opener}` is never closed", at=self.opener,
                      fix=f"write `{closer}` where it ends")
        return self.text[self.at]

    def end_item(self, closer: str) -> None:
        """Pass the comma behind an item; the last item needs none."""
        char = self.peek()
        if char == ",":
            self.at += 1
        elif char != closer:
            self.fail_item(closer)

    # -- what is wrong --

    def fail(self, slug: str, what: str, *, at: int | None = None, size: int = 1,
             fix: str = "") -> NoReturn:
        """Refuse the text for what stands `at` a place, or for what explains it better."""
        if at is None:
            at = self.at
        self.check_conflict(at)
        self.check_blank(at)
        self.refuse(slug, what, at, size=size, fix=fix)

    def refuse(self, slug: str, what: str, at: int, *, size: int = 1, fix: str = "") -> NoReturn:
        """Refuse the text for exactly this."""
        where, excerpt = self.show(at, at + size)
        raise FleetError(slug, what, where=where, excerpt=excerpt, fix=fix)

    def place(self, at: int) -> str:
        return f"on line {self.line_of(at)}, in column {at - self.line_start(at) + 1}"

    def rest_of_line(self, at: int) -> str:
        """Return the text from `at` to the end of its line, without a remark."""
        return self.text[at:self.line_end(at)].split(" #")[0].rstrip(" ")

    def check_characters(self) -> None:
        odd = _ODD.search(self.text)
        if not odd:
            return
        fix = "remove it, or escape it inside double quotes"
        if odd.group() == "\r":
            fix = "end lines with LF or CRLF"
        self.fail("yaml-character", f"U+{ord(odd.group()):04X} does not belong in YAML text",
                  at=odd.start(), fix=fix)

    def check_conflict(self, at: int) -> None:
        """Refuse the marks of a merge, on the line that cannot be read or anywhere."""
        marker = _CONFLICT.match(self.text, self.line_start(at))
        if not marker:
            marker = _CONFLICT_EDGE.search(self.text)
        if not marker:
            return
        self.refuse("yaml-syntax", f"git left a merge conflict here (`{marker.group()}`)",
                    marker.start(), size=7,
                    fix="keep one of the two sides, and remove the lines that begin with "
                    "`<<<<<<<`, `=======` and `>>>>>>>`")

    # -- what is wrong: comments --

    def check_remark(self, text: str, at: int) -> None:
        """Refuse plain text that is meant as a comment: nobody reads it as YAML does."""
        is_line = not self.text[self.line_start(at):at].strip(" ")
        if text[:2] in ("//", "/*") and (is_line or text[2:3] == " "):
            self.refuse_slashes(at, fix="begin a comment with `#`, or quote the text")

    def check_slashes(self, at: int) -> None:
        """Refuse the line of `at` when it has a comment as JavaScript knows them."""
        start = self.line_start(at)
        end = min(self.line_end(at), start + KEY_LIMIT)
        for token in _SLASHES.finditer(self.text, start, end):
            if token[1]:
                self.refuse_slashes(token.start(1))

    def refuse_slashes(self, at: int, *, fix: str = "begin a comment with `#`") -> None:
        slashes = self.text[at:at + 2]
        if slashes == "/*":
            fix = "begin each line of a comment with `#`"
        self.refuse("yaml-syntax", f"`{slashes}` begins no comment", at, size=2, fix=fix)

    # -- what is wrong: blanks --

    def check_edges(self, text: str, at: int) -> None:
        """Refuse plain text with an odd blank around it: nobody sees that it belongs to it."""
        before = _BLANK_BEFORE.match(text)
        if before:
            is_line = not self.text[self.line_start(at):at].strip(" -")
            if is_line or ":" not in before[1]:
                self.check_blank(at + before.end(1))

        kept = text.rstrip("".join(_ODD_BLANKS))
        if kept != text:
            run = text[len(kept):]
            # The place of a key is where the reader stands; other text ends there.
            end = max(self.at, at + len(text))
            self.check_blank(self.text.rfind(run, at, end))

    def check_blank(self, at: int) -> None:
        """Refuse a blank that is no space, and say what to write for it."""
        run = _BLANK_RUN.match(self.text, at)
        if not run:
            return
        char = run.group()[0]
        slug = "yaml-tab"
        name = "a tab"
        if char != "\t":
            slug = "yaml-character"
            name = f"{_ODD_BLANKS[char]} (U+{ord(char):04X})"
        self.refuse(slug, f"{name} where YAML takes only spaces", at, size=len(run.group()),
                    fix=self.blank_fix(at, run.end()))

    def blank_fix(self, at: int, end: int) -> str:
        """Say what to write for the tabs or odd blanks between two places."""
        odd = "\t" + "".join(_ODD_BLANKS)
        is_tab = self.text[at] == "\t"
        line_start = self.line_start(at)
        line = self.text[line_start:self.line_end(at)]
        content = line.lstrip(" " + odd)
        if not self.text[end:line_start + len(line)].strip(" " + odd):
            return "remove it"

        if line[:at - line_start].strip(" "):
            fix = "write a space instead"
            if self.text[at] in _NO_WIDTH:
                fix = "remove it"
            return fix if is_tab else f"{fix}, or quote the text"

        # Nobody knows how wide a tab is: its line becomes as deep as those above it.
        blanks = line[:len(line) - len(content)]
        width = sum(blank not in _NO_WIDTH for blank in blanks)
        if "\t" in blanks:
            width = self.depth_above(line_start, content)
        return f"begin its line with {_spaces(width)}" if width else "remove it"

    def depth_above(self, line_start: int, content: str) -> int:
        """Return how deep the next line is to be, after what the lines above it hold."""
        for line in reversed(self.text[:line_start].split("\n")):
            line = line.split(" #")[0].rstrip(" ")
            if not line or line.lstrip(" ").startswith("#"):
                continue
            nesting = _NESTING.match(line)
            depth = len(nesting[1] if content.startswith("- ") else nesting.group())
            if line.endswith((":", "{", "[")):
                depth += 2
            return depth
        return 0

    # -- what is wrong: characters that mean more --

    def fail_unexpected(self, expected: str, *, fix: str = "") -> NoReturn:
        """Say why the character here cannot stand here."""
        char = self.text[self.at]
        self.check_blank(self.at)
        if self.span:
            self.check_quote(*self.span)
        self.check_slashes(self.at)
        if not fix:
            self.check_indicator()

        if not fix or _DASH.match(self.text, self.at):
            fix = self.misplaced_fix(char)
        self.fail("yaml-syntax", f"expected {expected}, found `{_visible(char)}`", fix=fix)

    def check_indicator(self) -> None:
        """Refuse a value or a key that begins as plain text cannot, and show it."""
        char = self.text[self.at]
        if char == "?":
            self.fail_outside("`?` keys", "write `key: value`, or quote the text", at=self.at,
                              size=1)
        if char not in "&*!%@`":
            return

        text = self.plain_text(self.at)
        word = text.split(" ")[0][:40]
        shown = f"`{_visible(word)}`"
        quoted = self.quote_fix(text)

        line_start = self.line_start(self.at)
        is_first = not self.text[line_start:self.at].strip(" ")
        if is_first and text.startswith("* "):
            self.fail("yaml-syntax", "`*` begins no item of a list", fix="write `-` instead")
        if char == "`":
            self.fail("yaml-syntax", "plain text cannot begin with a backtick",
                      size=len(word), fix=quoted)
        if char == "@" or (char == "%" and self.at > line_start):
            self.fail("yaml-syntax", f"plain text cannot begin with `{char}`: {shown}",
                      size=len(word), fix=quoted)

        feature, fix = _OUTSIDE[char]
        # A directive, and an anchor whose value stands below, are no text.
        if char != "%" and (char != "&" or text != word):
            fix += f", or {quoted}"
        self.fail_outside(f"{feature} ({shown})", fix, at=self.at, size=len(word))

    def fail_outside(self, feature: str, fix: str, *, at: int, size: int) -> NoReturn:
        self.fail("yaml-unsupported", f"{feature} are outside the YAML subset", at=at,
                  size=size, fix=fix)

    def misplaced_fix(self, char: str) -> str:
        """Say what to do about a character that begins neither a value nor a key."""
        if _DASH.match(self.text, self.at) and self.opener < 0:
            return "start the list on the line below its key"
        if _MARKER.match(self.text, self.at):
            return "close the brackets above it, or indent the line"
        if char in "|>":
            return self.quote_fix(self.plain_text(self.at))
        return _MISPLACED.get(char, "")

    def quote_fix(self, text: str) -> str:
        """Return the words that say to quote a text, with the quoted text if it is short."""
        if len(text) > 60 or '"' in text:
            return "quote the text"
        return f"quote the text: {quote_yaml(text)}"

    def plain_text(self, at: int) -> str:
        """Return what would be plain text from `at` on, if it began with a letter."""
        stops = _BLOCK_STOP if self.opener < 0 else _FLOW_STOP
        stop = stops.search(self.text, at + 1)
        end = stop.start() if stop else len(self.text)
        return self.text[at:end].rstrip(" ")

    # -- what is wrong: keys --

    def fail_key(self, at: int) -> NoReturn:
        """Say why what stands here, at the column of a mapping, is no key."""
        self.at = at
        char = self.text[at]
        if char not in "\"'" and not _BLOCK_START.match(self.text, at):
            self.fail_unexpected("a key")
        self.check_slashes(at)
        self.check_space(at)
        self.fail("yaml-syntax", "expected `key: value`", size=self.line_end(at) - at,
                  fix="put `: ` after the key, or `#` before it")

    def check_space(self, at: int) -> None:
        """Refuse a key `at` a place with its value right behind its colon."""
        key = _GLUED_KEY.match(self.text, at)
        if not key:
            return
        self.check_blank(key.end())
        fix = "put a space after the colon"
        value = self.rest_of_line(key.end())
        if len(value) <= 60:
            fix += f": `{key.group()} {value}`"
        self.fail("yaml-syntax", "no space after the colon", at=key.end() - 1, fix=fix)

    def fail_colon(self, start: int, column: int = -1) -> NoReturn:
        """Say why the colon here does not make a key of the text from `start`.

        The text is the value of what stands at `column`.
        """
        key = self.text[start:self.at].rstrip(" \n")
        end = start + len(key)
        if "\n" in self.text[end:self.at]:
            self.fail("yaml-syntax", "a colon below its key",
                      fix=f"write it {self.place(end)}")
        if "\n" in key and key[0] not in "[{":
            self.fail_folded_key(start, column)
        self.check_slashes(start)
        if len(key) > KEY_LIMIT:
            self.fail("yaml-limit", f"a key of over {KEY_LIMIT:,} characters",
                      fix="shorten it")
        if key[0] in "[{":
            self.fail_unexpected("the end of the line", fix="write `key: value`, one a line")
        if key[0] in "\"'":
            self.check_space(start)
            self.fail_unexpected("the end of the line", fix="write `key: value`, one a line")

        value = self.rest_of_line(start)
        fix = f"quote it: {quote_yaml(value)}"
        if len(value) > 60:
            fix = "quote the whole value"
        self.fail("yaml-syntax", "`: ` inside plain text", fix=fix)

    def fail_folded_key(self, start: int, column: int) -> NoReturn:
        """Say why the text from `start` has its colon on another line than its beginning."""
        text = self.text
        self.check_quote(start, self.at)
        remark = _SLASHES_LINE.search(text, self.line_start(start), self.at)
        if remark:
            self.refuse_slashes(remark.start(1))
        self.check_slashes(start)

        begin = self.skip(self.line_start(self.at))
        self.check_blank(begin)
        # A word where a key may stand is a key without a colon, or without a space behind it.
        is_value = text[self.line_start(start):start].strip(" -")
        if not is_value and " " not in self.rest_of_line(start):
            self.fail_key(start)

        # A word right below a value is a key in the wrong column; further below, it is text.
        is_word = " " not in text[begin:self.at].strip(" ")
        is_next = text.count("\n", start, begin) == 1
        if is_word and is_next and is_value and column >= 0:
            self.fail_alignment(column, self.line_start(start) + column, begin)
        fix = "quote the whole text, or put the missing `: ` after a key above"
        if self.opener >= 0:
            fix = "look for a missing comma or colon above"
        line = self.line_of(start)
        self.fail("yaml-syntax", f"`: ` inside the text that begins on line {line}", fix=fix)

    def fail_duplicate(self, mapping: dict, key: object, at: int) -> NoReturn:
        place = list(mapping).index(key)
        line = self.line_of(self.open[-1][4 * place])
        name = str(key)
        self.fail("yaml-duplicate", f"the key `{_visible(name)}` is already on line {line}",
                  at=at, size=len(name), fix="remove or rename one of them")

    # -- what is wrong: columns --

    def fail_neighbour(self, column: int, indent: int) -> NoReturn:
        """Say why the line here does not follow the entries at `column`.

        What they belong to is at `indent`, and the line is deeper.
        """
        self.check_blank(self.at)
        self.check_slashes(self.at)
        last = self.open[-1][-4]
        is_dash = bool(_DASH.match(self.text, self.at))
        if not is_dash and not self.match_key():
            self.check_indicator()
            self.check_space(self.at)
            self.check_lines(self.open[-1][-2])
            self.fail("yaml-indent", "this line belongs to nothing above it",
                      fix="put `: ` after the key, or `#` before it")

        is_list = bool(_DASH.match(self.text, last))
        if self.column == column:
            fix = "begin it with `- `"
            if indent >= 0:
                fix += f", or move it to column {indent + 1}"
            self.fail("yaml-indent", "this is no item of the list that begins on line "
                      f"{self.line_of(self.open[-1][0])}", fix=fix)
        if indent >= 0 and (is_dash != is_list or self.is_like_parent()):
            self.refuse_column(self.at, indent)
        self.fail_alignment(column, last, self.at)

    def check_lines(self, start: int) -> None:
        """Refuse the line here when it is not as deep as the `|` or `>` scalar above it."""
        if self.text[start] not in "|>":
            return
        first = _BLANKS.match(self.text, self.line_end(start)).end()
        column = first - self.line_start(first)
        self.fail("yaml-indent", f"less deep than the text that begins on line "
                  f"{self.line_of(first)}", fix=f"begin its line with {_spaces(column)}")

    def is_like_parent(self) -> bool:
        """Tell whether more follows below the line here, but not below the entry above it."""
        key_start, key_end, value_start, value_end = self.open[-1][-4:]
        has_line = (key_start, key_end) != (value_start, value_end)
        return has_line and self.rest_of_line(self.at).endswith(":")

    def fail_alignment(self, column: int, last: int, at: int) -> NoReturn:
        """Say which is in a wrong column: the entries up to `last`, or what is `at` a place."""
        self.check_blank(at)
        starts = [start for start in self.open[-1][::4] if start < last]
        starts.append(last)
        own = at - self.line_start(at)
        if self.is_above_wrong(column, own, len(starts), at):
            self.refuse_column(starts[0], own, neighbour=at)
        self.refuse_column(at, column, neighbour=last)

    def is_above_wrong(self, column: int, own: int, count: int, at: int) -> bool:
        """Tell whether the `count` entries at `column` are wrong, or what is `at` its `own`.

        The larger number is right; of the same numbers, an even column.
        """
        below = self.count_lines(at, own)
        if own == 0:
            return below >= count
        if own > column:
            if column == 0 or own > column + 1:
                return False
            count += self.count_lines(at, column)
        if below != count:
            return below > count
        return column % 2 == 1 and own % 2 == 0

    def count_lines(self, at: int, column: int) -> int:
        """Count the lines that begin at `column`, from that of `at` to one less deep."""
        count = 0
        for line in _INDENTATION.finditer(self.text, self.line_start(at)):
            width = len(line[1])
            if width < column:
                break
            if width == column:
                count += 1
        return count

    def refuse_column(self, at: int, column: int, *, neighbour: int | None = None) -> NoReturn:
        """Refuse what is `at` a place, because its neighbours stand at `column`."""
        line_start = self.line_start(at)
        neighbours = "its neighbours"
        if neighbour is not None:
            neighbours += f" (line {self.line_of(neighbour)})"
        fix = f"move it to column {column + 1}"
        if not self.text[line_start:at].strip(" ") and column > 0:
            fix = f"begin its line with {_spaces(column)}"
        self.refuse("yaml-indent", f"this stands in column {at - line_start + 1}, "
                    f"{neighbours} in column {column + 1}", at, fix=fix)

    # -- what is wrong: quotes and brackets --

    def check_quote(self, start: int, end: int) -> None:
        """Refuse quoted text that ended in the wrong place: more stands right behind it."""
        quote = self.text[start]
        if quote not in "\"'" or self.text[end:self.at].strip(" "):
            return
        if "\n" in self.text[start:end]:
            line = self.line_of(end)
            self.fail("yaml-syntax",
                      f"this `{quote}` is closed on line {line} only, where more follows it",
                      at=start, fix=self.closing_fix(start))

        if end < self.at or self.text[end] in ":,]}":
            return
        inside = 'write `\\"` for a quote'
        if quote == "'":
            inside = "write `''` for an apostrophe"
        self.fail("yaml-syntax", f"this `{quote}` ends the text, and more follows it",
                  at=end - 1, fix=f"{inside} inside the text, or close the text before it")

    def closing_fix(self, start: int) -> str:
        """Say where on its line the quote at `start` was most likely meant to be closed."""
        text = self.text
        line_start = self.line_start(start)
        before = text[:start].rstrip(" \n")[-1:]
        is_key = not text[line_start:start].strip(" -")
        if self.opener >= 0:
            is_key = text[self.opener] == "{" and before in "{,"

        key = _OPEN_KEY.match(text, start + 1)
        if key and is_key:
            end = key.end()
        else:
            line = text[start + 1:self.line_end(start)].split(" #")[0]
            # What is closed or separated behind the quote is no part of the text.
            line = line.rstrip(" " if self.opener < 0 else " ,]}")
            end = start + 1 + len(line)
        return f"write `{text[start]}` {self.place(end)}"

    def fail_item(self, closer: str) -> NoReturn:
        """Say why neither a comma nor the end of the brackets follows an item."""
        text = self.text
        start, end = self.open[-1][-2:]
        self.check_blank(self.at)
        self.check_quote(start, end)

        # Where what comes next begins: of a key, the colon is met last.
        begin = self.at
        if text[begin] == ":":
            self.check_slashes(start)
            begin = max(start, self.skip(self.line_start(begin)))
        if text[begin] == "?":
            self.check_question(start)
        line_start = self.line_start(begin)
        if not text[line_start:begin].strip(" "):
            above = text[:line_start].rstrip(" \n")
            self.check_closed(begin - line_start, len(above), closer)
            end = min(end, len(above))
            if begin > start:
                self.fail("yaml-syntax", "no `,` between this item and the next", at=end - 1,
                          fix=f"write `,` {self.place(end)}")
        self.fail_unexpected(f"`,` or the `{closer}` of line {self.line_of(self.opener)}",
                             fix="look for a missing comma or bracket")

    def check_question(self, start: int) -> None:
        """Refuse the `?` in the plain text from `start` on, which it ends inside brackets."""
        word = _FLOW_WORD.match(self.text, start)
        if word and word.end() > self.at:
            self.fail("yaml-syntax", "`?` inside plain text in brackets",
                      fix=f"quote it: {quote_yaml(word.group().rstrip(' '))}")

    def check_closed(self, column: int, end: int, closer: str) -> None:
        """Refuse brackets behind a key when a line in them is no deeper than that key."""
        line_start = self.line_start(self.opener)
        before = self.text[line_start:self.opener].lstrip(" ")
        own = self.opener - line_start - len(before)
        if before.rstrip(" ").endswith(":") and column <= own:
            self.fail("yaml-syntax", f"this `{self.text[self.opener]}` is not closed",
                      at=self.opener, fix=f"write `{closer}` {self.place(end)}")

    # -- what is wrong: scalars --

    def fail_clash(self, text: str, at: int) -> NoReturn:
        """Say how to write what programs read differently."""
        if text == "<<":
            self.fail_outside("merge keys (`<<`)", "repeat the values", at=at, size=2)
        fix = f'quote it: "{text}"'
        if len(text) > 80:
            fix = "quote it"
        is_date = text[4:5] == "-"
        if text != "=" and not is_date:
            words = {"yes": "true", "on": "true", "no": "false", "off": "false"}
            plain = words.get(text.lower(), "a plain decimal number")
            fix = f"write {plain}, or {fix}"
        self.fail("yaml-ambiguous", f"YAML programs disagree about `{text[:80]}`", at=at,
                  size=len(text), fix=fix)

    def fail_escape(self, token: str, at: int, fix: str) -> NoReturn:
        self.fail("yaml-escape", f"`{_visible(token)}` is no character", at=at,
                  size=len(token), fix=fix)


def _spaces(count: int) -> str:
    return "1 space" if count == 1 else f"{count} spaces"


def _resolve_number(text: str) -> object:
    """Return the number that a plain text is, the text where it is none, or _CLASH."""
    match = _NUMBER.fullmatch(text)
    if not match:
        return text
    if match[1]:
        return int(text, 16 if "x" in text else 10)
    if match[2]:
        number = float(text)
        if abs(number) < float("inf"):
            return number
    return _CLASH


def _chomp(body: str, chomping: str | None) -> str:
    """Return the lines of a `|` or `>` scalar with the breaks at their end that it keeps."""
    kept = body.rstrip("\n")
    if chomping == "+":
        return body
    if chomping == "-" or not kept:
        return kept
    return body[:len(kept) + 1]


def _fold(body: str) -> str:
    """Join the lines of a `>` scalar; the breaks at its end stay."""
    kept = body.rstrip("\n")
    return _FOLDED.sub(_join_lines, kept) + body[len(kept):]


def _join_lines(match: re.Match) -> str:
    """Join two lines: one break is a space, the others are kept."""
    return match[1] + (match[2] or " ")


def _visible(text: str) -> str:
    """Escape what a terminal would obey or hide."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def quote_yaml(text: str) -> str:
    """Return `text` as a scalar of one line, plain where every YAML reads it as that text."""
    word = text.lower()
    is_word = word in _WORDS or word in ("y", "n")
    if _BARE.fullmatch(text) and not is_word and "---" not in text:
        return text
    if re.search("[\ud800-\udfff]", text):
        raise FleetError("yaml-dump", f"no file can hold the half character in {text[:60]!a}")

    escaped = _visible(re.sub(r'(["\\])', r"\\\1", text))
    # Claude Code ends an agent's frontmatter at any `---`, even a quoted one (2.1.197, 2.1.326).
    escaped = escaped.replace("---", "-\\x2d\\x2d")
    return f'"{escaped}"'


def dump_yaml(value: object) -> str:
    """Return block style text that parse_yaml and PyYAML's safe_load read as `value`."""
    return "".join(f"{line}\n" for line in _dump_lines(value, 0))


def _dump_lines(value: object, depth: int) -> Iterator[str]:
    """Yield the lines of a value that is nested in `depth` others."""
    if not isinstance(value, (dict, list, tuple)):
        yield _dump_scalar(value)
        return

    if depth == DEPTH_LIMIT:
        raise FleetError("yaml-dump", f"the value is more than {DEPTH_LIMIT} levels deep")
    if isinstance(value, dict):
        yield from _dump_mapping(value, depth)
    else:
        yield from _dump_sequence(value, depth)


def _dump_mapping(mapping: dict, depth: int) -> Iterator[str]:
    if not mapping:
        yield "{}"
    for key, child in mapping.items():
        label = _dump_scalar(key) + ":"
        if len(label) > KEY_LIMIT + 1:
            raise FleetError("yaml-dump", f"a key has more than {KEY_LIMIT:,} characters")

        lines = _dump_lines(child, depth + 1)
        if isinstance(child, (dict, list, tuple)) and child:
            yield label
            for line in lines:
                yield f"  {line}"
        else:
            yield f"{label} {next(lines)}"


def _dump_sequence(items: list | tuple, depth: int) -> Iterator[str]:
    if not items:
        yield "[]"
    for child in items:
        margin = "- "
        for line in _dump_lines(child, depth + 1):
            yield margin + line
            margin = "  "


def _dump_scalar(value: object) -> str:
    if isinstance(value, str):
        return quote_yaml(value)
    if isinstance(value, float):
        text = float.__repr__(value).replace("inf", ".inf").replace("nan", ".nan")
        if "." not in text:
            text = text.replace("e", ".0e")
        return text

    is_short = isinstance(value, int) and value.bit_length() < 3000  # the reader's limit
    if value is None or is_short:
        return json.dumps(value)
    raise FleetError("yaml-dump", f"no YAML for a value of type {type(value).__name__}")


# -- JSON, which programs send --

NUMBER_LIMIT_DIGITS = 100  # int() of millions of digits takes minutes (Python before 3.10.7)


def parse_json(text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text from outside; ValueError says why it is none.

    NaN, infinities and endless numbers are refused as well: no other program takes them back.
    """
    try:
        if not isinstance(text, str):
            text = text.decode("utf-8")
        return _json_decoder().decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


@lru_cache(maxsize=1)
def _json_decoder() -> json.JSONDecoder:
    return json.JSONDecoder(parse_int=_bounded_int, parse_float=_finite_float,
                            parse_constant=_no_constant)


def _bounded_int(digits: str) -> int:
    if len(digits) > NUMBER_LIMIT_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _finite_float(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise ValueError("a number that no program can hold")
    return number


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


def parse_object(text: str | bytes | bytearray) -> dict[str, Any] | None:
    """Return the JSON object in a text, None where there is none."""
    try:
        value = parse_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def count_marks(body: bytes | bytearray) -> int:
    """Return how many values a JSON text may hold, at the most; 8 MiB of `[],` become 180 MB."""
    return sum(map(body.count, (b"[", b"{", b":", b",")))


def render_json(value: object) -> bytes:
    """Return compact ASCII JSON, in which lone surrogates survive; ValueError where it is none."""
    try:
        return _json_encoder().encode(value).encode("ascii")
    except RecursionError:
        raise ValueError("nested too deeply") from None


@lru_cache(maxsize=1)
def _json_encoder() -> json.JSONEncoder:
    return json.JSONEncoder(separators=(",", ":"), allow_nan=False)


# =============================================================================
# B. What a fleet is (pure)
# =============================================================================

# == 4. Fleet file ============================================================
#
# Takes a Document (section 3), gives a Fleet, or a Finding for everything that is wrong.
# What a file may say is declared once: each `key(...)` of the records below names the rule of
# its value, what it is for, and what its absence means. Checking, `schema`, the comments of
# `init` and README's table are all made of that. A mistake is said once, with what to type.

# -- Patterns, each of which means the same in Python and in JSON Schema (JavaScript) --

_CONTROL = r"\u0000-\u0008\u000b-\u001f\u007f-\u009f\ud800-\udfff"
_ONE_LINE = "^[^\\u000a\\u2028\\u2029" + _CONTROL + "\\u0009]{1,%d}$"
_TEXT = f"^[^{_CONTROL}]*$"
_PARAGRAPH = f"^(?!\\s*$|[\\s\\S]*\\n\\s*\\n)[^{_CONTROL}]*$"  # neither empty nor two of them
_TOOL = "^[A-Za-z_*][A-Za-z0-9_*:.-]*([(][^()\\u000a\\u0009" + _CONTROL + "]*[)])?$"
_NAME = "^[A-Za-z0-9._-]{1,64}$"
_AGENT_NAME = "^[a-z0-9][a-z0-9_-]{0,63}$"
_URL = "^[Hh][Tt][Tt][Pp][Ss]?://[^\\s@?#]+$"  # no credentials, query or fragment
# LiteLLM reads `os.environ/NAME` as that variable's value, wherever it stands.
_ALIAS = "^(?!os[.]environ/)[A-Za-z0-9._:/@-]{1,128}$"
_DURATION = "^-?([0-9]{1,4}h|[0-9]{1,6}[ms])+$"
# The ending keeps a fleet file that somebody else wrote from handing out other secrets of the
# environment; of what is left, not what shells, loaders and the generated file itself use.
_VARIABLE = ("^(?!(BASH|ZSH|PYTHON)|"
             "(ANTHROPIC|CLAUDE|API|NO|LC|LD|DYLD|FISH|NODE|LITELLM_LOCAL)_)"
             "[A-Za-z_][A-Za-z0-9_]{0,115}_(MASTER|GATEWAY)_KEY$")
# So that a fleet file cannot send just any secret of the environment to a node.
_KEY_VARIABLE = "^[A-Za-z_][A-Za-z0-9_]{0,115}_API_(KEY|TOKEN)$"
_OCTET = "(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"  # a number of an IPv4 address
_LABEL = "[A-Za-z0-9_]+"  # a part of a host name
# An IPv4 address, or labels that are more than digits: those alone are a broken address.
_HOST = f"({_OCTET}([.]{_OCTET}){{3}}|(?!.{{254}}|[0-9._]+$){_LABEL}((-+|[.]){_LABEL})*[.]?)"
_HEX = "[0-9A-Fa-f]{1,4}"  # a group of an IPv6 address
_IPV6 = f"(({_HEX}:){{7}}{_HEX}|(?!([^:]*:){{8}})({_HEX}(:{_HEX})*)?::({_HEX}(:{_HEX})*)?)"


# -- Endpoints --

@dataclass(frozen=True)
class Endpoint:
    """Where something answers, taken apart: a URL in normal form."""

    scheme: str  # http or https
    host: str  # in lower case, IPv6 without its brackets
    port: int
    path: str  # without its last slash

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


def split_endpoint(endpoint: str) -> Endpoint:
    """Take an endpoint apart, or raise a FleetError that says what is wrong with it."""
    host_pattern = r"\[[^\]/]*\]|[^/:\[\]]*"
    match = re.fullmatch(rf"(?i)(https?)://({host_pattern})(?::([^/:]*))?(/\S*)?", endpoint)
    if not match:
        raise _bad_endpoint("not of the form scheme://host:port")
    scheme, host, port, path = match.groups()

    if not host:
        raise _bad_endpoint("the host is missing")
    if not re.fullmatch(rf"{_HOST}|\[{_IPV6}(%.+)?\]", host):
        raise _bad_endpoint(f"`{host}` is not a host name or address")

    scheme = scheme.lower()
    if port is None:
        number = {"http": 80, "https": 443}[scheme]
    elif re.fullmatch("[0-9]{1,5}", port) and 1 <= int(port) <= 65535:
        number = int(port)
    else:
        raise _bad_endpoint(f"`{port}` is not a port (1 to 65535)")

    path = (path or "").rstrip("/")
    return Endpoint(scheme, host.strip("[]").lower(), number, path)


def _bad_endpoint(what: str) -> FleetError:
    return FleetError("bad-endpoint", what, fix="write it as `http://192.168.1.50:11434`")


def full_endpoint(address: str) -> str:
    """Return an address with http and Ollama's port where it lacks them."""
    url = address if "://" in address else f"http://{address}"
    lacks_port = re.fullmatch(r"http://(\[[^\]/]*\]|[^/:\[\]]+)/?", url)
    return f"{url.rstrip('/')}:{OLLAMA_PORT}" if lacks_port else url


# -- Normal forms: what a value becomes once it fits its rule --

UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _normal_endpoint(endpoint: str) -> str:
    return split_endpoint(endpoint).url


def _normal_keep_alive(duration: int | str) -> int:
    """Return it as seconds: numbers stay, `1h30m` is added up, negative is for ever."""
    if isinstance(duration, int):
        return duration
    if duration.startswith("-"):
        return -1

    parts = re.findall("([0-9]+)([hms])", duration)
    return sum(int(number) * UNIT_SECONDS[unit] for number, unit in parts)


def _normal_paragraph(text: str) -> str:
    """Return it on one line."""
    lines = [line.strip() for line in re.split("[\n\u2028\u2029]", text)]
    return " ".join(line for line in lines if line)


# -- What people mean by a value that its rule refuses: what it may stand for, likeliest first --

# Double, single, French, and what keyboards offer for them.
_QUOTES = ("\u201c\u201d\u201e\u201f\u2018\u2019\u201a\u201b\u00ab\u00bb\u2039\u203a"
           "\u00b4\u2032\u2033")
_PORT = r"^(\[[^\]]*\]|[^/:]*):[^/]*"  # a host and what stands for its port
# A scheme, perhaps misspelled or another's, with some of its `://`.
_SCHEME = _Pattern(
    r"(?i)(?:(?:(https)|https?|h?t+p|htpp|ftp|wss?|tcp|ollama)(?:[:;][/\\]*|[/\\]+)|[/\\]+)(.*)")


def _typed(value: object) -> str:
    """Return a value as it was written in the file, or nearly so."""
    return value if isinstance(value, str) else json.dumps(value)


def _plain(text: str) -> str:
    """Return text without the quotes of word processors around it."""
    return text.strip(_QUOTES + "'\"` ")


def _is_curly(text: str) -> bool:
    """Tell whether text stands between quotes that YAML does not know."""
    return len(text) > 1 and text[0] in _QUOTES and text[-1] in _QUOTES


def _meant_text(value: object) -> list[object]:
    """Return the text that YAML took for something else, or that stands in it."""
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return ["\n".join(value)]
    if isinstance(value, str):
        return [re.sub(f"[{_CONTROL}]", "", value), " ".join(value.split())]
    if isinstance(value, int):
        return [_typed(value)]
    return []


def _meant_name(value: object) -> list[object]:
    """Return text without the characters that names do not have."""
    # `[1m]` is how Claude Code asks for a window, `os.environ/` how LiteLLM names a variable.
    text = re.sub(r"\[1m\]$|^os[.]environ/", "", _typed(value))
    as_alias = re.sub("[^A-Za-z0-9._:/@-]+", "-", text).strip("-")
    as_name = re.sub("[^A-Za-z0-9._-]+", "-", text).strip("-")
    return [*_meant_text(value), as_alias, as_name]


def _meant_agent_name(value: object) -> list[object]:
    text = re.sub("[^a-z0-9_-]+", "-", _typed(value).lower())
    return [text.strip("-_")]


def _meant_address(value: object) -> list[object]:
    """Return the endpoint and the host of an address with a wrong scheme, port or rest."""
    text = re.sub(r"\s+(?=[:/])|(?<=[:/])\s+|[,;]$", "", _typed(value))
    scheme = "http"
    match = _SCHEME.fullmatch(text)
    if match:
        scheme, text = (match[1] or "http").lower(), match[2]
    text = re.split("[?#]", text)[0].rpartition("@")[2]  # no query, fragment, credentials
    if re.fullmatch(_IPV6, text):
        text = f"[{text}]"

    with_port = re.sub(_PORT, rf"\1:{OLLAMA_PORT}", text)
    for address in (text, with_port):
        try:
            endpoint = split_endpoint(full_endpoint(f"{scheme}://{address}"))
            return [endpoint.url, endpoint.host]
        except FleetError:
            continue
    return []


def _meant_mac(value: object) -> list[object]:
    """Return the hardware address in a text that writes it in another way."""
    digits = re.sub("[^0-9a-f]", "", _typed(value).lower())
    if len(digits) != 12:
        return []
    return [":".join(digits[place:place + 2] for place in range(0, 12, 2))]


def _meant_variable(value: object) -> list[object]:
    """Return a name with the ending it needs: of what stands there, or of the fleet."""
    written = re.sub("^(sk-.*|os[.]environ/)", "", _typed(value).strip("${}[]"))
    name = re.sub("[^A-Za-z0-9_]", "_", written).upper()
    stem = re.sub("_?(MASTER|GATEWAY|API|AUTH)?_?(KEY|TOKEN|SECRET|PASSWORD)$", "", name)
    return [name, f"{stem}_GATEWAY_KEY", "FLEET_GATEWAY_KEY"]


def _meant_key_variable(value: object) -> list[object]:
    """Return a variable's name with the ending it needs."""
    written = re.sub("^(os[.]environ/)", "", _typed(value).strip("${}[]"))
    name = re.sub("[^A-Za-z0-9_]", "_", written).upper()
    stem = re.sub("_?(API)?_?(KEY|TOKEN|SECRET|PASSWORD)$", "", name)
    return [name, f"{stem}_API_KEY", "NODE_API_KEY"]


def _meant_provider(value: object) -> list[object]:
    return list(difflib.get_close_matches(_typed(value)[:64].lower(), PROVIDERS))


def _meant_node_provider(value: object) -> list[object]:
    word = re.sub("[^a-z]", "", _typed(value)[:64].lower())
    return [*difflib.get_close_matches(word, NODE_KINDS)]


def _meant_tool(value: object) -> list[object]:
    text = _typed(value)
    return [text.replace(" (", "("), re.sub("^[^A-Za-z_*]+|[^A-Za-z0-9_*:.-]", "", text)]


def _meant_list(value: object) -> list[object]:
    """Return the lists that something else may be: with commas, of one item, with blanks."""
    if value is True:  # nobody knows which
        return []
    if value is False:
        return [[]]
    if isinstance(value, dict):
        return [list(value)]
    if not isinstance(value, (str, int)):
        return []
    text = _typed(value)
    with_commas = [_plain(item) for item in text.strip("[] ").split(",")]
    return [with_commas, [text], text.split()]


_TRUE_WORDS = ("true", "yes", "on", "1", "y", "enabled", "low", "medium", "high")
_FALSE_WORDS = ("false", "no", "off", "0", "n", "disabled", "none")
_ALWAYS_WORDS = (
    "forever", "always", "infinite", "infinity", "permanent", "unlimited", "true")


def _meant_boolean(value: object) -> list[object]:
    word = _typed(value).lower()
    if word in _TRUE_WORDS:
        return [True]
    if word in _FALSE_WORDS:
        return [False]
    return []


# `65,536`, `64 K`, `1.5h`, `4000.0`, and a comment as other languages have them.
_AMOUNT = _Pattern(r"(-?\d{1,3}(?:,\d{3})+|-?\d{1,12}(?:\.\d{1,6})?) ?([a-z]*)(?: *//.*)?")
_UNIT_WORDS = {
    "ms": "ms msec millis milliseconds",
    "s": "s sec secs second seconds",
    "m": "m min mins minute minutes mb mib",  # minutes or millions: its rule knows
    "h": "h hr hrs hour hours",
    "d": "d day days",
    "k": "k kb kib",
    "g": "g gb gib",
    "t": "t tb tib",
    "": "token tokens",
}


@dataclass(frozen=True)
class _Amount:
    """A number and its unit: a key of _UNIT_WORDS."""

    number: float
    unit: str


def _read_amount(value: object) -> _Amount | None:
    match = _AMOUNT.fullmatch(_typed(value).lower())
    if not match:
        return None
    number = float(match[1].replace(",", ""))
    if not match[2]:
        return _Amount(number, "")
    for unit, words in _UNIT_WORDS.items():
        if match[2] in words.split():
            return _Amount(number, unit)
    return None


def _meant_number(value: object, units: Mapping[str, float]) -> list[Any]:
    """Return the number of an amount in a unit that has a factor, whole where it is."""
    amount = _read_amount(value)
    if not amount:
        return []
    factor = {"": 1, **units}.get(amount.unit)
    if not factor:
        return []

    number = amount.number * factor
    if number == int(number):
        return [int(number)]
    return [number]


def _meant_count(value: object) -> list[object]:
    return _meant_number(value, {})


def _meant_tokens(value: object) -> list[object]:
    """Return tokens: 64 alone means thousands."""
    amounts = _meant_number(value, {"k": 1024, "m": 1024 * 1024})
    return amounts + [int(amount * 1024) for amount in amounts if 1 <= amount < 256]


def _meant_seconds(value: object) -> list[object]:
    """Return seconds; other programs count milliseconds, and call -1 never."""
    if _typed(value).lower() in ("-1", *_ALWAYS_WORDS):
        return [RULES["seconds"].schema["maximum"]]
    amounts = _meant_number(value, {**UNIT_SECONDS, "ms": 0.001})
    return amounts + [int(amount // 1000) for amount in amounts
                      if amount >= 1000 and amount % 1000 == 0]


def _meant_gigabytes(value: object) -> list[object]:
    return _meant_number(value, {"g": 1, "m": 1 / 1024, "t": 1024})


def _meant_keep_alive(value: object) -> list[object]:
    word = _typed(value).lower()
    if word in _ALWAYS_WORDS:
        return [-1]
    if word in _FALSE_WORDS:
        return [0]
    amount = _read_amount(value)
    if not amount:
        return []
    if not amount.unit:
        return [int(amount.number)]

    seconds = amount.number * UNIT_SECONDS.get(amount.unit, 0)
    for unit in "hms":
        if seconds and seconds % UNIT_SECONDS[unit] == 0:
            return [f"{seconds // UNIT_SECONDS[unit]:.0f}{unit}"]
    return []


# -- Rules: what a value may be --

@dataclass(frozen=True)
class Rule:
    """What a value may be, as a fragment of JSON Schema and in words."""

    schema: dict[str, Any]
    words: str
    meant: Callable[[object], list[object]] = _meant_text
    normal: Callable[[Any], object] | None = None  # what becomes of a value that fits
    item: str = ""  # of a list: the rule of its items
    example: str = ""  # what to write where nothing can be guessed


def _text_rule(pattern: str, words: str, **more: Any) -> Rule:
    return Rule({"type": "string", "pattern": pattern}, words, **more)


def _number_rule(least: float, most: float, words: str, meant: Any, *,
                 kind: str = "integer") -> Rule:
    return Rule({"type": kind, "minimum": least, "maximum": most}, words, meant)


def _list_rule(item: str) -> Rule:
    """Return the rule of a list whose items obey a rule above."""
    schema = {"type": "array", "items": RULES[item].schema}
    return Rule(schema, f"a list, each item {RULES[item].words}", _meant_list, item=item)


PROVIDERS = ("builtin", "litellm")
TARGET_NAMES = (  # the rows of TARGETS
    "litellm", "claude", "env", "opencode", "codex", "aider", "qwen", "pi", "cn")
USUAL_TARGETS = TARGET_NAMES[:3]
RULES = {
    "name": _text_rule(
        _NAME, "text of letters, digits, `.`, `_` and `-`, at most 64", meant=_meant_name),
    "agent name": _text_rule(
        _AGENT_NAME,
        "lower case letters, digits, `-` and `_`, at most 64, a letter or digit first",
        meant=_meant_agent_name),
    "line": _text_rule(_ONE_LINE % 256, "text, 1 to 256 printable characters"),
    "text": _text_rule(_TEXT, "text without control characters"),
    "paragraph": _text_rule(
        _PARAGRAPH, "one paragraph that says when to use the agent, without blank lines",
        normal=_normal_paragraph),
    "tag": _text_rule(_ONE_LINE % 64, "text, 1 to 64 printable characters"),
    "tool": _text_rule(_TOOL, "a name such as `Read` or `\"Bash(git *)\"`",
                       meant=_meant_tool),
    "alias": _text_rule(
        _ALIAS, "text of letters, digits and `. _ : / @ -`, at most 128", meant=_meant_name),
    "variable": _text_rule(
        _VARIABLE, "a variable name that ends in _MASTER_KEY or _GATEWAY_KEY",
        meant=_meant_variable),
    "endpoint": _text_rule(
        _URL, "an address such as `http://192.168.1.50:11434`",
        meant=_meant_address, normal=_normal_endpoint, example="http://192.168.1.50:11434"),
    "host": _text_rule(
        f"^({_HOST}|{_IPV6})$", "an address or host name",
        meant=_meant_address, normal=str.lower),
    "port": _number_rule(1, 65535, "a whole number, 1 to 65535", _meant_count),
    "parallel": _number_rule(1, 64, "a whole number, 1 to 64", _meant_count),
    "tokens": _number_rule(256, 16777216, "256 to 16777216 tokens", _meant_tokens),
    "seconds": _number_rule(1, 86400, "whole seconds, 1 to 86400", _meant_seconds),
    "mac": _text_rule(
        "^[0-9A-Fa-f]{2}([:-][0-9A-Fa-f]{2}){5}$",
        "a hardware address such as `\"a4:83:e7:01:02:03\"`, in quotes", meant=_meant_mac,
        normal=lambda text: text.lower().replace("-", ":")),
    "gigabytes": _number_rule(0.5, 65536, "a number of GB", _meant_gigabytes, kind="number"),
    "keep alive": Rule(
        {"anyOf": [{"type": "integer", "minimum": -1, "maximum": 31536000},
                   {"type": "string", "pattern": _DURATION}]},
        "seconds, a duration such as `24h`, or -1 for ever",
        _meant_keep_alive, _normal_keep_alive),
    "provider": Rule({"enum": list(PROVIDERS)}, "`builtin` or `litellm`", _meant_provider),
    "node provider": Rule(
        {"enum": list(NODE_KINDS)}, some_of([f"`{name}`" for name in NODE_KINDS]),
        _meant_node_provider),
    "key variable": _text_rule(
        _KEY_VARIABLE, "a variable name that ends in _API_KEY or _API_TOKEN",
        meant=_meant_key_variable),
    "boolean": Rule({"type": "boolean"}, "`true` or `false`", _meant_boolean),
    "target": Rule({"enum": list(TARGET_NAMES)},
                   some_of([f"`{name}`" for name in TARGET_NAMES]), _meant_name),
    "frontmatter": Rule({"type": "object"}, "keys and values"),
}
# A reference says what is wrong with it by what it refers to.
RULES["reference"] = RULES["name"]
RULES["references"] = _list_rule("reference")
RULES["tags"] = _list_rule("tag")
RULES["tools"] = _list_rule("tool")
RULES["targets"] = _list_rule("target")

_SCHEMA_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "array": (list,), "object": (dict,)}


def obeys(value: object, rule: str) -> bool:
    """Tell whether a value obeys a rule of RULES."""
    return _fits_schema(value, RULES[rule].schema)


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


# -- Records: what a file may say --

REQUIRED = object()


def key(rule: str, words: str, default: Any = REQUIRED, *, name: str = "",
        also: str = "") -> Any:
    """Declare a key: its rule or its own section, what it is for, what its absence means.

    Its `name` in the file is the field's own, unless given; `also` is a second spelling of it.
    """
    metadata = {"rule": rule, "words": words, "default": default, "name": name, "also": also}
    if default is REQUIRED:
        return field(metadata=metadata)
    if default == {}:
        return field(metadata=metadata, default_factory=dict)
    return field(metadata=metadata, default=default)


@dataclass(frozen=True)
class Gateway:
    """Where Claude Code finds the fleet, and who serves it there."""

    provider: str = key("provider", "who serves: this program or LiteLLM", "builtin")
    host: str = key("host", "address the gateway listens on", "127.0.0.1")
    port: int = key("port", "port the gateway listens on", 4000)
    master_key_env: str = key(
        "variable", "variable with the key; ends in _MASTER_KEY or _GATEWAY_KEY",
        "LITELLM_MASTER_KEY")


@dataclass(frozen=True)
class Tiers:
    """Which model answers for each of Claude Code's tiers; None: planned."""

    main: str | None = key("reference", "model of the main session", None)
    opus: str | None = key("reference", "model behind `opus`", None)
    sonnet: str | None = key("reference", "model behind `sonnet`", None)
    haiku: str | None = key("reference", "model behind `haiku`", None)
    fable: str | None = key("reference", "model behind `fable`", None)
    lean: bool | None = key(
        "boolean", "start Claude Code with few tools; absent: up to 131072 tokens of context",
        None)


@dataclass(frozen=True)
class Project:
    """What holds for the whole fleet."""

    name: str = key("line", "shown in tables")
    gateway: Gateway = key("gateway", "where Claude Code finds the fleet", Gateway())
    claude: Tiers = key("claude", "which model answers for each of Claude Code's tiers", Tiers())
    targets: tuple[str, ...] = key(
        "targets", "for whom `generate` writes files", USUAL_TARGETS)


@dataclass(frozen=True)
class Node:
    """A machine that runs models."""

    name: str
    endpoint: str = key("endpoint", "where its Ollama answers")
    tags: tuple[str, ...] = key("tags", "your own words for it", ())
    memory_gb: float | None = key("gigabytes", "memory for models; lets `validate` warn", None)
    mac: str | None = key("mac", "its hardware address, for `wake`", None)
    provider: str = key("node provider", "what it runs", "ollama")
    api_key_env: str | None = key(
        "key variable", "variable with its key; ends in _API_KEY or _API_TOKEN", None)
    auth: str = ""  # client: the login that the client sends is handed on


@dataclass(frozen=True)
class Model:
    """A model on a node, under the alias that Claude Code asks for."""

    name: str
    node: str = key("reference", "the node it runs on")
    ollama_model: str = key("line", "its name on the node, as in `ollama list`", also="model")
    alias: str = key(
        "alias", "the name Claude Code asks for", name="litellm_alias", also="alias")
    context: int = key("tokens", "context window in tokens", 8192)
    timeout: int = key("seconds", "seconds to wait for its first token", 300)
    max_parallel: int = key("parallel", "requests at the same time", 1)
    keep_alive: int = key("keep alive", "how long it stays loaded", -1)
    thinking: bool = key("boolean", "let a model that can think do so", False)
    max_output: int = key("tokens", "longest answer in tokens", 8192)
    fallback: tuple[str, ...] = key("references", "models that answer when this one cannot", ())
    cloud: bool = key("boolean", "allow a name that Ollama sends to ollama.com", False)
    name_key: str = "ollama_model"  # as the file spells the key of its name


@dataclass(frozen=True)
class Agent:
    """A subagent of Claude Code and the model it uses."""

    name: str
    model: str = key("reference", "the one of `models` that it uses")
    description: str = key("paragraph", "when Claude Code calls it; one paragraph")
    tools: tuple[str, ...] | None = key("tools", "tools it may use; absent: all, []: none", None)
    prompt: str | None = key("text", "its system prompt; absent: the role's default", None)
    frontmatter: dict[str, object] = key(
        "frontmatter", "further keys for Claude Code, such as maxTurns", {})


@dataclass(frozen=True)
class FleetFile:
    """What stands at the left margin of a fleet file."""

    project: Project = key("project", "the fleet's name, its gateway, Claude Code's tiers")
    nodes: dict[str, Node] = key("node", "machines that run Ollama")
    models: dict[str, Model] = key("model", "which model runs on which node, under which alias")
    agents: dict[str, Agent] = key("agent", "Claude Code subagents and the model each one uses")


@dataclass(frozen=True)
class Fleet:
    """A checked fleet file."""

    name: str
    gateway: Gateway
    claude: dict[str, str]  # tier -> model name, only those given
    nodes: dict[str, Node]
    models: dict[str, Model]
    agents: dict[str, Agent]
    document: Document
    targets: tuple[str, ...] = USUAL_TARGETS  # for whom `generate` writes; always the key's file
    lean: bool | None = None  # None: by the main session's context


@dataclass(frozen=True)
class FileKey:
    """One key of a section, as `key` declared it."""

    name: str  # as the file spells it
    attribute: str  # of the record
    rule: str  # in RULES, or else in SECTIONS
    words: str
    default: Any  # REQUIRED, or what its absence means
    also: str = ""  # a second spelling of its name


def _keys_of(record: Any) -> dict[str, FileKey]:
    keys = {}
    for declared in fields(record):
        if declared.metadata:  # a `name` has none: it stands above the section
            words = dict(declared.metadata)
            name = words.pop("name") or declared.name
            keys[name] = FileKey(name, declared.name, **words)
    return keys


# Each section by its kind; of those that have names, many stand under one key of the file.
SECTIONS: dict[str, Any] = {
    "": FleetFile, "project": Project, "gateway": Gateway, "claude": Tiers,
    "node": Node, "model": Model, "agent": Agent}
NAME_RULES = {"node": "name", "model": "name", "agent": "agent name"}
FILE_KEYS = {kind: _keys_of(record) for kind, record in SECTIONS.items()}
# What people write for a key, coming from other programs; each only where that key is absent.
KEY_WORDS = {
    "name": "title label",
    "provider": "engine type",
    "host": "address bind listen",
    "master_key_env": "key master_key api_key api_key_env key_env",
    "endpoint": "url uri api_base base_url host hostname address ip server ollama_host",
    "tags": "labels",
    "mac": "mac_address hardware_address ether lladdr",
    "memory_gb": "memory ram vram ram_gb vram_gb",
    "node": "machine host server runs_on",
    "ollama_model": "model_name ollama name",
    "litellm_alias": "model_alias",
    "api_key_env": "api_key key key_env token",
    "context": "num_ctx ctx context_length context_window context_size max_context",
    "max_parallel": "parallel num_parallel concurrency",
    "thinking": "think reasoning",
    "max_output": "max_tokens num_predict output",
    "fallback": "backup",
    "model": "llm uses runs_on",
    "description": "desc when use_for about",
    "tools": "allowed_tools",
    "prompt": "system system_prompt instructions",
}
# The key that is meant by a value in the place of a whole section.
MAIN_KEYS = {
    "project": "name", "gateway": "provider", "claude": "main",
    "node": "endpoint", "model": "ollama_model", "agent": "model"}
# Where a key belongs that stands elsewhere.
PLACES = {
    "project": "under `project:`",
    "gateway": "under `gateway:` in `project:`",
    "claude": "under `claude:` in `project:`",
    "node": "to a node, under `nodes:`",
    "model": "to a model, under `models:`",
    "agent": "to an agent, under `agents:`"}
# Words that people write everywhere, for many things.
HOMELESS_KEYS = ("name", "model", "host")


# -- Checking --

# Claude Code resolves these words itself, so an alias must not be one (2.1.326).
CLAUDE_WORDS = ("sonnet", "opus", "haiku", "fable", "best", "inherit", "default", "opusplan")
AGENT_OWN_KEYS = ("name", "description", "model", "tools")  # never in `frontmatter`
FINDINGS_LIMIT = 100  # a file with more of them is no fleet file
SUGGESTION_CHARACTERS = 200  # longer values get no suggestion
PROSE_RULES = ("text", "paragraph")  # in which quotes of every kind may stand
_UNREAD = object()  # the value of a key that is there, but cannot be told from it


def put_space(text: object, keys: Iterable[str]) -> str:
    """Return what mends a key and a value without a blank between, or an empty string."""
    name, _, value = str(text).partition(":")
    if name not in keys or not value.strip():
        return ""
    return f"put a space after the colon: `{name}: {value.strip()}`"


def suggest_value(key: FileKey, value: object) -> str:
    """Return what to write instead of a value that its rule refuses, or an empty string."""
    if value in (None, ""):
        if key.default is REQUIRED:
            return f"write a value ({key.words})"
        return f"write a value, or remove the line `{key.name}:`"

    typed = _typed(value)
    if key.rule == "tool" and typed.count("(") != typed.count(")"):  # a comma cut it in two
        return "quote the whole tool, up to its `)`"
    if isinstance(value, float) and obeys(typed, key.rule):
        return "put it in quotes"  # it is not known what stood there: of 1.10 YAML kept 1.1

    rule = RULES[key.rule]
    meant = _likeliest(value, key.rule)
    if meant is not None:
        return f"write `{_show_entry(key.name, meant)}`"
    if rule.example:
        return f"write it as `{rule.example}`"
    if key.default is REQUIRED:
        return f"write one text after `{key.name}:`" if key.name else ""
    if key.default in (None, ()):
        return f"write {rule.words}, or remove the line `{key.name}:`"
    return f"write `{_show_entry(key.name, key.default)}`, the default"


def _likeliest(value: Any, rule: str) -> object:
    """Return what obeys a rule and is meant by a value, as far as one can tell, or None."""
    if value is None or len(_typed(value)) >= SUGGESTION_CHARACTERS:
        return None
    if isinstance(value, (list, dict)) and len(value) == 1 and not RULES[rule].item:
        value = next(iter(value))  # one thing, written as a list or with a colon
    if isinstance(value, str):
        value = _plain(value)

    for meant in (value, *RULES[rule].meant(value)):
        if _is_right(meant, rule):
            return meant
    return None


def _is_right(value: object, rule: str) -> bool:
    """Tell whether a value obeys a rule and has a normal form."""
    if not obeys(value, rule):
        return False
    normal = RULES[rule].normal
    try:
        return normal is None or normal(value) is not None
    except FleetError:
        return False


def _show_entry(name: str, value: Any) -> str:
    """Return a key with its value, or an item of a list, which has no name, as typed."""
    if isinstance(value, list):
        text = f"[{', '.join(map(quote_yaml, value))}]"
    else:
        text = dump_yaml(value).rstrip("\n")
    return f"{name}: {text}" if name else text


def _meant_key(name: object, absent: Iterable[str]) -> str:
    """Return which of the absent keys is meant by another name, or an empty string."""
    absent = sorted(absent)
    words = re.sub("(?<=[a-z])(?=[A-Z])", "_", _plain(str(name)))  # camelCase
    text = re.sub("[- .]+", "_", words).lower()
    for key in absent:
        if text == key or text in KEY_WORDS.get(key, "").split():
            return key

    closest = difflib.get_close_matches(text[:64], absent, 1)
    return closest[0] if closest else ""


def _home_of(name: object, kind: str) -> str:
    """Return where a key belongs that a kind of section does not have, or an empty string."""
    if name == "name" and kind in NAME_RULES:
        return f"remove it: the {kind}'s name is the key above"
    if kind and name in HOMELESS_KEYS:
        return ""
    for home, place in PLACES.items():
        if home != kind and name in FILE_KEYS[home]:
            return f"`{name}:` belongs {place}"
    return ""


def _kind_of(section: object) -> str:
    """Return whose keys a section has: a node's, a model's, an agent's, or nobody's ("")."""
    if isinstance(section, dict):
        for kind in NAME_RULES:
            needed = {key.name for key in FILE_KEYS[kind].values() if key.default is REQUIRED}
            if needed & section.keys():
                return kind
    return ""


def _find_section(tree: dict, name: str, path: tuple = ()) -> tuple:
    """Return the path of a section of the file that stands inside another one, or ()."""
    for step, part in tree.items():
        if not isinstance(part, dict):
            continue
        if path and step == name and _is_section(name, part):
            return (*path, step)
        if len(path) < 3:  # no deeper than the keys of a node, a model, an agent
            deeper = _find_section(part, name, (*path, step))
            if deeper:
                return deeper
    return ()


def _is_section(name: str, part: dict) -> bool:
    """Tell a section of the file from a node, a model or an agent that has the same name."""
    if name == "project":
        return "name" in part
    return bool(part) and all(isinstance(inner, dict) for inner in part.values())


class _Checker:
    """Collects the `findings` about one `document` while its sections are read.

    What is wrong is None in the records that are made, or absent from a mapping of names.
    What stands in the wrong place, or under a wrong key, is reported once and then read as if
    it were right: its path is the right one, and `moved` holds where it really stands.
    """

    def __init__(self, document: Document) -> None:
        self.document = document
        self.findings: list[Finding] = []
        self.tree: dict[str, Any] = {}  # the whole file, its sections where they belong
        self.moved: dict[tuple, tuple] = {}  # the right path: the path in the document
        self.passed: set[tuple] = set()  # paths in the document that were moved away
        self.unreadable: set[str] = set()  # kinds whose names are not known
        self.spellings: dict[str, set[str]] = {}  # by kind: its names, as text
        self.meanings: dict[str, dict[str, str]] = {}  # by kind: see _meanings_of

    def error(self, slug: str, path: tuple, what: str, *, fix: str = "",
              key: bool = False) -> None:
        """Report what is wrong with a value (`what` goes on after its path), or with a `key`."""
        if len(self.findings) == FINDINGS_LIMIT:
            raise FleetError("too-many", "and more; mend these first")
        if not key:
            what = f"{_dotted(path)} {what}"
        where, excerpt = self.document.locate(self.real(path), key=key)
        self.findings.append(Finding(slug, "error", what, where, excerpt, fix))

    def real(self, path: tuple) -> tuple:
        """Return where in the document that stands which should be at a path."""
        for size in range(len(path), 0, -1):
            if path[:size] in self.moved:
                return self.moved[path[:size]] + path[size:]
        return path

    def move(self, path: tuple, real: tuple) -> None:
        """Note that what should be at a path stands elsewhere."""
        self.moved[path] = real
        self.passed.add(real)

    def file(self, tree: Any) -> FleetFile:
        """Check the whole file."""
        if isinstance(tree, dict):
            self.tree = tree = self.gather_names(self.gather_sections(tree))
        return self.section("", (), tree)

    def gather_sections(self, tree: dict) -> dict:
        """Return the file with its sections, also those that were indented too far."""
        whole = dict(tree)
        for name in FILE_KEYS[""]:
            if name in tree:
                continue
            path = _find_section(tree, name)
            if path:
                self.error("misplaced-section", path, key=True,
                           what=f"`{name}:` stands inside {_dotted(path[:-1])}",
                           fix=f"`{name}:` belongs to column 1")
                self.move((name,), path)
                section: Any = tree
                for step in path:
                    section = section[step]
                whole[name] = section
        return whole

    def gather_names(self, tree: dict) -> dict:
        """Return the file with its nodes, models and agents, also those not indented."""
        whole = dict(tree)
        for name, section in tree.items():
            kind = _kind_of(section)
            home = f"{kind}s"
            if not kind or name in FILE_KEYS[""] or home not in tree:
                continue
            neighbours = whole[home] or {}
            if not isinstance(neighbours, dict) or name in neighbours:
                continue

            self.error("misplaced-section", (name,), key=True,
                       what=f"`{_typed(name)}:` stands beside `{home}:`, not in it",
                       fix=f"indent it under `{home}:`")
            self.move((home, name), (name,))
            whole[home] = {**neighbours, name: section}
            del whole[name]
        return whole

    def section(self, kind: str, path: tuple, value: object) -> Any:
        """Check a mapping of known keys; return its record."""
        keys = FILE_KEYS[kind]
        if isinstance(value, dict):
            keys = self.spelled_keys(kind, path, value)
            entries = self.entries(kind, path, value, keys)
            values = {key.attribute: self.entry(key, path, entries) for key in keys.values()
                      if key.name in entries or key.default is REQUIRED}
        else:
            self.error("not-mapping", path, f"must hold keys, not {show_value(value)}",
                       fix=_suggest_section(kind, path, value))
            values = dict.fromkeys(key.attribute for key in keys.values())

        if kind in NAME_RULES:
            values["name"] = path[-1]
        if kind == "model":
            values["name_key"] = next(key.name for key in keys.values()
                                      if key.attribute == "ollama_model")
        return SECTIONS[kind](**values)

    def spelled_keys(self, kind: str, path: tuple, section: dict) -> dict[str, FileKey]:
        """Return the keys of a section, each with the name by which it stands there."""
        keys = {}
        for key in FILE_KEYS[kind].values():
            if key.also and key.also in section:
                if key.name in section:
                    self.error("two-spellings", path + (key.also,), key=True,
                               what=f"{_dotted(path)} has `{key.name}` and `{key.also}`, which "
                                    "are two spellings of one key",
                               fix=f"remove `{key.also}:`, or `{key.name}:`")
                    self.passed.add(self.real(path) + (key.also,))
                else:
                    key = replace(key, name=key.also)
            keys[key.name] = key
        return keys

    def entries(self, kind: str, path: tuple, section: dict,
                keys: dict[str, FileKey]) -> dict[str, Any]:
        """Return {key: value}; an unknown key is reported, and read as the one it means."""
        entries = {name: section[name] for name in keys if name in section}
        for name, value in section.items():
            real = self.real(path) + (name,)
            if name in keys or real in self.passed:
                continue

            fix = put_space(name, keys)
            if fix:
                meant, value = str(name).partition(":")[0], _UNREAD
            else:
                meant = _meant_key(name, keys.keys() - entries.keys())
            if meant and not fix:
                fix = f"did you mean `{meant}`?"
            fix = fix or _home_of(name, kind) or _known_keys(kind, path)
            self.error("unknown-key", path + (name,), key=True,
                       what=f"unknown key {show_value(name)} in {_dotted(path)}", fix=fix)

            if meant and meant not in entries:
                entries[meant] = value
                self.move(path + (meant,), real)
        return entries

    def entry(self, key: FileKey, path: tuple, entries: dict) -> Any:
        """Check what a section says under a key; return it as it stands in the record."""
        path = path + (key.name,)
        value = entries.get(key.name, _UNREAD)
        if key.name not in entries:
            self.error("missing-key", path, "is missing",
                       fix=f"add `{key.name}:` ({key.words})")
        if value is _UNREAD:
            self.unreadable.add(key.rule)
            return None
        if key.rule in NAME_RULES:
            return self.named(key.rule, path, value)
        if key.rule in SECTIONS:
            return self.section(key.rule, path, value)
        return self.value(key, path, value)

    def value(self, key: FileKey, path: tuple, value: Any) -> Any:
        """Check a value; return it in normal form."""
        rule = RULES[key.rule]
        if rule.item and isinstance(value, list):
            item = FileKey("", "", rule.item, key.words, REQUIRED)
            return tuple(self.value(item, path + (index,), each)
                         for index, each in enumerate(value))

        is_curly = isinstance(value, str) and _is_curly(value)
        if is_curly and key.rule not in PROSE_RULES:
            # Word processors make them, and a model of that name would never be found.
            self.refuse("curly-quotes", key, path, value,
                        ": to YAML, such quotes are a part of the value")
            if key.rule == "reference":
                return None
            return _likeliest(value, key.rule)
        if key.rule == "reference" and isinstance(value, str) and value:
            return value  # `reference` will say more about it than a rule can
        if not obeys(value, key.rule):
            self.refuse("bad-value", key, path, value, f"; accepted: {rule.words}")
            return None

        if not rule.normal:
            return value
        try:
            return rule.normal(value)
        except FleetError as error:
            self.refuse(error.slug, key, path, value, f": {error.what}")
            return None

    def refuse(self, slug: str, key: FileKey, path: tuple, value: object, why: str) -> None:
        """Report a value that is wrong; `why` goes on after it."""
        shown = show_value(value)
        if isinstance(value, str) and RULES[key.rule].schema.get("type") != "string":
            shown = f'`"{value[:60]}"`'  # the quotes are what is wrong
        self.error(slug, path, f"is {shown}{why}", fix=self.suggest(key, value))

    def suggest(self, key: FileKey, value: object) -> str:
        """Return what to write instead of a wrong value: for a name, one that there is."""
        if key.rule not in ("reference", "references") or value in (None, ""):
            return suggest_value(key, value)
        kind = "node" if key.name == "node" else "model"
        sections = self.tree.get(f"{kind}s")
        if not isinstance(sections, dict):
            return suggest_value(key, value)

        names = _likeliest(value, key.rule)
        if not isinstance(names, list):
            names = [names]
        if all(name in sections for name in names):
            return suggest_value(key, value)
        return f"write one of these: {some_of(sections)}"

    def named(self, kind: str, path: tuple, value: Any) -> dict[str, Any]:
        """Check a mapping of names to sections; return {name: record}."""
        if not isinstance(value, dict) or not value and kind != "agent":
            sections = self.list_of_sections(kind, path, value)
            if not any(sections.values()):
                self.unreadable.add(kind)
                return {}
            value = sections

        records: dict[str, Any] = {}
        twins: dict[str, str] = {}  # by a name in lower case
        for name, section in value.items():
            if self.real(path) + (name,) in self.passed:
                continue
            is_name = self.check_name(kind, path, name)
            if is_name or isinstance(section, dict):
                records[name] = self.section(kind, path + (name,), section)
            if is_name and twins.setdefault(name.lower(), name) != name:
                self.error("bad-name", path + (name,), key=True, fix="rename one of them",
                           what=f"{path[0]}: `{name}` and `{twins[name.lower()]}` differ in "
                                "nothing but their case")
        return records

    def list_of_sections(self, kind: str, path: tuple, value: object) -> dict[str, dict]:
        """Report what is no mapping of names; return what a list of mappings would be as one."""
        shown = show_value(value)
        items = []
        if isinstance(value, list):
            items = value
        elif value == {}:
            shown = "an empty mapping"

        sections = {}
        example = ""
        for index, item in enumerate(items):
            section = {"name": item}
            if isinstance(item, dict):
                section = dict(item)
            name = section.pop("name", None)
            if isinstance(name, str):
                example = example or name
                sections[name] = section
                self.moved[path + (name,)] = self.real(path) + (index,)

        fix = f"write `{path[0]}:`, below it a name, below that its keys"
        if example:
            fix = (f"write `{example[:64]}:` on a line of its own, below it its keys, "
                   "without dashes")
        self.error("not-mapping", path, f"must hold {kind}s by name, not {shown}", fix=fix)
        return sections

    def check_name(self, kind: str, path: tuple, name: object) -> bool:
        """Tell whether something is a name for a section; report what is none."""
        if obeys(name, NAME_RULES[kind]):
            return True

        fix = "rename it"
        if not isinstance(name, str):
            fix = f'quote it: `"{_typed(name)}":`'
        else:
            meant = _likeliest(name, NAME_RULES[kind])
            if meant:
                fix = f"write `{meant}:`"
        accepted = RULES[NAME_RULES[kind]].words
        self.error("bad-name", path + (name,), key=True, fix=fix,
                   what=f"{path[0]}: {show_value(name)} is not a name for one; "
                        f"accepted: {accepted}")
        return False

    def reference(self, path: tuple, name: str | None, records: dict, kind: str) -> None:
        """Report a name that no section of that kind has."""
        if name is None or name in records or kind in self.unreadable:
            return
        if kind not in self.spellings:
            self.spellings[kind] = set(map(str, records))
            self.meanings[kind] = _meanings_of(records)
        if name in self.spellings[kind]:  # a name that is a number: that was said
            return

        meaning = self.meanings[kind].get(name.lower())
        choices = list(records)
        if path[0] == "models" and kind == "model":  # nobody falls back on itself
            choices.remove(path[1])
        fix = nearest(name, choices) or f"known {kind}s: {some_of(records) or 'none'}"
        if meaning:
            fix = f"did you mean {meaning}?"
        if len(name) > 60:
            name = f"{name[:60]}…"
        self.error(f"unknown-{kind}", path, f"references unknown {kind}: {name}", fix=fix)


def _dotted(path: tuple) -> str:
    return ".".join(map(str, path)) or "the file"


def _known_keys(kind: str, path: tuple) -> str:
    """Return what a section may hold, where nothing better can be said."""
    keys = FILE_KEYS[kind]
    if kind in NAME_RULES and path[-1] in keys:  # it may be a name, but then it holds keys
        return f"indent `{path[-1]}:` deeper, under its {kind}"
    known = "known keys: " + ", ".join(keys)
    if kind == "agent":
        known += "; Claude Code's others go under `frontmatter:`"
    return known


def _suggest_section(kind: str, path: tuple, value: object) -> str:
    """Return what to write where something else than keys stands."""
    keys = FILE_KEYS[kind]
    if kind in NAME_RULES and path[-1] in keys:
        return _known_keys(kind, path)
    fix = put_space(value, keys)
    if fix or kind not in MAIN_KEYS:
        return fix or _known_keys(kind, path)

    main = keys[MAIN_KEYS[kind]]
    meant = _likeliest(value, main.rule)
    if meant is None:
        return _known_keys(kind, path)
    return f"write it on a line of its own, below: `{_show_entry(main.name, meant)}`"


def _meanings_of(records: dict[str, Any]) -> dict[str, str]:
    """Return {word in lower case: "`name`, which is …"} for what is written for a name."""
    sure: dict[str, str] = {}
    likely: dict[str, str] = {}
    for name, record in records.items():
        if isinstance(record, Node):
            for address in _addresses(record.endpoint):
                sure.setdefault(address, f"`{name}`, which is {record.endpoint}")
            continue

        model = (record.ollama_model or "").lower()
        alias = (record.alias or "").lower()
        for spelling in (model, full_model_name(model), alias):
            sure.setdefault(spelling, f"`{name}`, which is {record.ollama_model}")
        for word in re.split("[^a-z0-9]+", alias):
            likely.setdefault(word, f"`{name}`, whose alias is {alias}")
        if record.node:
            likely.setdefault(record.node.lower(), f"`{name}`, which runs on {record.node}")
    return {**likely, **sure}


def _addresses(endpoint: str | None) -> set[str]:
    """Return how people may write the address of a node."""
    if not endpoint:
        return set()
    parts = split_endpoint(endpoint)
    addresses = {endpoint, parts.host, f"{parts.host}:{parts.port}", f"http://{parts.host}"}
    if not parts.host[:1].isdigit():
        addresses.add(parts.host.split(".")[0])
    return addresses


def check_fleet(document: Document) -> tuple[Fleet | None, list[Finding]]:
    """Return (Fleet, []) for a file that was read, or (None, everything that is wrong)."""
    if document.value is None:
        return None, [_empty_file(document)]
    check = _Checker(document)
    last = []
    try:
        file = check.file(document.value)
        project = file.project or Project("")
        tiers = _chosen_tiers(project.claude)
        models = file.models or {}

        for tier, name in tiers.items():
            check.reference(("project", "claude", tier), name, models, "model")
        for agent in (file.agents or {}).values():
            _check_agent(check, agent, models)
        for model in models.values():
            _check_model(check, model, models, file.nodes or {})
        _check_fallbacks(check, models)
    except FleetError as error:  # too many
        last = [error.finding]

    if check.findings:
        return None, sorted(check.findings, key=_place_of) + last
    targets = tuple(name for name in TARGET_NAMES if name in (*project.targets, "env"))
    fleet = Fleet(
        name=project.name, gateway=project.gateway, claude=tiers, targets=targets,
        nodes=file.nodes, models=file.models, agents=file.agents, document=document,
        lean=project.claude.lean if project.claude else None)
    return fleet, []


def _empty_file(document: Document) -> Finding:
    where, excerpt = document.locate(())
    what = ("the file is empty; it needs `project:` with a `name:`, "
            "`nodes:`, `models:`, `agents:`")
    fix = "subagent-fleet init --force"  # a file is there, so `init` alone would refuse
    source = document.source
    if source != CONFIG_NAMES[0] and re.fullmatch("[A-Za-z0-9._/-]+", source):
        fix += f" --output {source}"
    return Finding("empty-file", "error", what, where, excerpt, fix)


def _chosen_tiers(claude: Tiers | None) -> dict[str, str]:
    """Return {tier: model} of those that the file names."""
    chosen = {tier: getattr(claude, tier, None) for tier in TIERS}
    return {tier: name for tier, name in chosen.items() if name}


def _place_of(finding: Finding) -> list[int]:
    """Return line and column, by which findings are sorted."""
    return [int(number) for number in finding.where.split(":")[-2:]]


def _check_agent(check: _Checker, agent: Agent, models: dict[str, Model]) -> None:
    """Report what an agent refers to, and keys that Claude Code would read twice."""
    path = ("agents", agent.name)
    check.reference((*path, "model"), agent.model, models, "model")
    for key in agent.frontmatter or {}:
        if key in AGENT_OWN_KEYS:
            fix = f"write `{key}:` one level up"
        elif not re.fullmatch("[A-Za-z][A-Za-z0-9_-]{0,63}", str(key)):
            fix = "rename it"
        else:
            continue
        at = (*path, "frontmatter")
        check.error("bad-frontmatter", (*at, key), key=True, fix=fix,
                    what=f"{_dotted(at)} cannot hold the key {show_value(key)}")


def _check_model(check: _Checker, model: Model, models: dict[str, Model],
                 nodes: dict[str, Node]) -> None:
    """Report what a model refers to, and names that mean something else to other programs."""
    path = ("models", model.name)
    check.reference((*path, "node"), model.node, nodes, "node")
    for index, other in enumerate(model.fallback or ()):
        check.reference((*path, "fallback", index), other, models, "model")

    alias = model.alias or ""
    if alias.lower() in CLAUDE_WORDS:
        check.error("reserved-alias", as_spelled(check.tree, (*path, "litellm_alias")),
                    f"is `{alias}`: Claude Code reads `{alias}` as a word of its own",
                    fix=f"write `claude-{alias.lower()}-local`")
    if leaves_house(model.ollama_model or "") and not model.cloud:
        check.error("cloud-model", (*path, model.name_key),
                    f"is `{model.ollama_model}`: Ollama sends this to ollama.com; "
                    "it does not run on your machine",
                    fix="choose a local model, or add `cloud: true`")


def _check_fallbacks(check: _Checker, models: dict[str, Model]) -> None:
    """Report a model that falls back on itself.

    Two that fall back on each other are right: of a chain only the first step is taken, and
    LiteLLM takes no more than five (1.106.2: `a` and `b` both dead answered in 0.06 s).
    """
    for name, model in models.items():
        for index, fallback in enumerate(model.fallback or ()):
            if fallback == name:
                check.error("fallback-cycle", ("models", name, "fallback", index),
                            "is the model itself", fix=f"remove `{name}` from it")


def as_spelled(tree: object, path: tuple) -> tuple:
    """Return the path of a key as the file spells it."""
    section = tree
    for step in path[:-1]:
        section = section.get(step) if isinstance(section, dict) else None
    for key in FILE_KEYS["model"].values():
        if key.also and path[-1] == key.name and isinstance(section, dict) \
                and key.also in section:
            return (*path[:-1], key.also)
    return path


# -- Names of models --

def leaves_house(ollama_model: str) -> bool:
    """Tell whether Ollama sends requests for this name to ollama.com."""
    return ollama_model.lower().endswith((":cloud", "-cloud"))


def full_model_name(name: str) -> str:
    """Return a name as Ollama compares it: tag, library and registry have defaults."""
    name = name.lower().removeprefix("registry.ollama.ai/").removeprefix("library/")
    has_tag = ":" in name.rsplit("/", 1)[-1]
    return name if has_tag else name + ":latest"


# -- Schema --

def render_schema() -> dict[str, Any]:
    """Return the JSON Schema of the fleet file, from the records that check it."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "subagent-fleet",
        **_section_schema("")}


def _section_schema(kind: str) -> dict[str, Any]:
    keys = FILE_KEYS[kind].values()
    properties = {}
    choices = []  # one of two spellings, never both
    for key in keys:
        properties[key.name] = {"description": key.words, **_key_schema(key)}
        if key.also:
            properties[key.also] = {"description": f"the same as {key.name}", **_key_schema(key)}
            choices.append({"oneOf": [{"required": [key.name]}, {"required": [key.also]}]})

    schema = {"type": "object", "additionalProperties": False, "properties": properties,
              "required": [key.name for key in keys
                           if key.default is REQUIRED and not key.also]}
    if choices:
        schema["allOf"] = choices
    return schema


def _key_schema(key: FileKey) -> dict[str, Any]:
    if key.rule in NAME_RULES:
        return {"type": "object", "propertyNames": RULES[NAME_RULES[key.rule]].schema,
                "additionalProperties": _section_schema(key.rule),
                "minProperties": int(key.rule != "agent")}
    if key.rule in SECTIONS:
        return _section_schema(key.rule)
    if key.default is REQUIRED or key.default is None:
        return dict(RULES[key.rule].schema)
    return {**RULES[key.rule].schema, "default": key.default}


# == 5. Planning ==============================================================
#
# Takes a Fleet and, where they were asked, what its nodes answered. Gives decisions: which
# model stands for which tier, what is true of a route, what Claude Code's environment holds,
# what happens to a file, what `init` and `worker` propose. Sections 7 and 8 put it in words.

MAIN_CONTEXT_TOKENS = 32768  # Claude Code's own prompt is 10-18k tokens, before any work
SMALL_CONTEXT_TOKENS = 8192
LEAN_CONTEXT_TOKENS = 65536  # up to here Claude Code is asked for its shorter prompt
LEAST_CONTEXT_TOKENS = 256  # a fleet file accepts no less
LOOPBACK = _Pattern(r"(?i)localhost[.]?|127([.][0-9]{1,3}){3}|::1")
GONE_TOOLS = {"MultiEdit": "Edit", "LS": "", "TodoWrite": "", "NotebookRead": ""}


@dataclass(frozen=True)
class Role:
    """What an agent of a well-known name is, where the fleet file does not say."""

    size: str  # of its model: small or heavy
    description: str
    tools: tuple[str, ...]
    prompt: str


ROLES = {
    "planner": Role(
        size="small",
        description="Use for planning, file discovery and task decomposition.",
        tools=("Read", "Grep", "Glob"),
        prompt="""\
You are a fast local planning agent.
Do not edit files.

Return a concise response with:
- plan
- relevant files
- risks
- next recommended agent
"""),
    "implementer": Role(
        size="heavy",
        description="Use for implementation, bug fixes, refactors and patch creation.",
        tools=("Read", "Grep", "Glob", "Edit", "Write", "Bash"),
        prompt="""\
You are a senior implementation agent.
Make minimal, correct changes. Prefer small patches.
Run relevant checks when possible.
Explain what changed and why.
"""),
    "reviewer": Role(
        size="heavy",
        description="Use after implementation to review diffs, tests and regressions.",
        tools=("Read", "Grep", "Glob", "Bash"),
        prompt="""\
You are a strict code reviewer.
Focus on correctness, regressions, missing tests, security issues,
over-engineering, and maintainability.
Review the diff and test output.
Return only actionable issues.
"""),
    "summarizer": Role(
        size="small",
        description="Use to summarize files, logs and long outputs.",
        tools=("Read",),
        prompt="""\
You are a fast summarizing agent.
Do not edit files.
Read what you are pointed at and return its essence:
facts, names, numbers and open questions. Invent nothing.
"""),
}
OTHER_PROMPT = """\
You are a local subagent with one task at a time.
Do exactly what you are asked, with the tools you have.
Return a short report: what you found, what you changed, what is left.
"""


def plan_prompt(agent: Agent) -> str:
    """Return an agent's system prompt: its own, else its role's, never an empty one."""
    if agent.prompt and agent.prompt.strip():
        return agent.prompt
    role = ROLES.get(agent.name)
    return role.prompt if role else OTHER_PROMPT


def plan_tools(tools: Iterable[str]) -> tuple[str, ...]:
    """Return the tools that Claude Code still has, gone ones replaced, none twice."""
    kept: list[str] = []
    for tool in tools:
        present = GONE_TOOLS.get(tool.split("(")[0], tool)
        if present and present not in kept:
            kept.append(present)
    return tuple(kept)


# -- which models will do --

def billions(ollama_model: str) -> float:
    """Return the parameters in billions that a model's name tells, else 0."""
    sizes = re.findall(r"(?:(\d+)x)?(\d+(?:\.\d+)?)b(?![a-z])", ollama_model.lower())
    return max((float(times or 1) * float(size) for times, size in sizes), default=0)


@dataclass(frozen=True)
class Rating:
    """How well a model serves Claude Code, and what it lacks."""

    score: int  # 0: not at all
    flaw: str = ""


ABLE = 4  # the score of a model that calls tools and holds Claude Code's own prompt


def rate_model(model: NodeModel, calls_tools: bool | None = None) -> Rating:
    """Return how well a model serves Claude Code, and what it lacks.

    Whether it `calls_tools` is believed where it was measured; None: as the node says.
    """
    name = model.name.lower()
    if model.remote or leaves_house(name):
        return Rating(0, "does not run there")
    if not can_chat(model):
        return Rating(0, "cannot chat")

    capabilities = model.capabilities or ()  # empty: an Ollama that does not say
    context = model.trained_context or MAIN_CONTEXT_TOKENS
    is_measured = calls_tools is not None
    if not is_measured:
        calls_tools = "tools" in capabilities and not prints_calls(name)
    holds_prompt = context >= MAIN_CONTEXT_TOKENS

    score = 1
    if calls_tools:
        score += 2  # an agent that cannot act is worse than one that compacts early
    if holds_prompt:
        score += 1

    if not calls_tools and is_measured:
        return Rating(score, "did not call tools when `bench` tried")
    if not calls_tools and prints_calls(name):
        return Rating(score, "prints tool calls as text")
    if capabilities and not calls_tools:
        return Rating(score, "cannot call tools")
    if not holds_prompt:
        flaw = f"holds {context} tokens; Claude Code's own prompt takes 10,000 to 18,000"
        return Rating(score, flaw)
    return Rating(score)


def prints_calls(ollama_model: str) -> bool:
    """Tell whether a model is known to write its tool calls down instead of making them."""
    return "qwen2.5-coder" in ollama_model.lower()


def can_chat(model: NodeModel) -> bool:
    """Tell whether a model answers, and by a name that a fleet file accepts."""
    if not obeys(model.name, "line"):
        return False
    if model.capabilities is None:
        return not re.search("embed|minilm|bge-", model.name.lower())
    return "completion" in model.capabilities


def find_models(models: Iterable[_Named], ollama_model: str) -> list[_Named]:
    """Return those of a node's models, on its disk or in its memory, that have this name."""
    full_name = full_model_name(ollama_model)
    return [model for model in models if full_model_name(model.name) == full_name]


def near_model(models: Iterable[NodeModel], ollama_model: str) -> NodeModel | None:
    """Return the model of a node that may have been meant by a name it does not have."""
    usable = [model for model in models if rate_model(model).score]
    family = [model for model in usable if _family(model.name) == _family(ollama_model)]
    size = billions(ollama_model)
    if family and size:
        return min(family, key=lambda model: abs(billions(model.name) - size))
    if family:
        return max(family, key=lambda model: model.size)

    names = {model.name.lower()[:64]: model for model in usable[:100]}  # 3 ms
    matches = difflib.get_close_matches(ollama_model.lower()[:64], names, 1, 0.8)
    return names[matches[0]] if matches else None


def _family(ollama_model: str) -> str:
    """Return a model's name without its tag."""
    return full_model_name(ollama_model).rpartition(":")[0]


def plan_correction(model: Model, state: NodeState) -> str:
    """Return what to write where a name is nearly that of a model there, or nothing."""
    near = near_model(state.models, model.ollama_model)
    if near is None:
        return ""
    return f"write `{model.name_key}: {quote_yaml(near.name)}` in models.{model.name}"


# -- what was measured --
#
# `bench` keeps what it measured in BENCH_FILE. The file may lie in anybody's directory: it is read
# as data, bounded in everything, and a measurement speaks of no machine but that of its endpoint.

BENCH_FILE = f"{STATE_DIRECTORY}/bench.json"
BENCH_SCHEMA = "subagent-fleet/bench/1"
MEASUREMENTS_LIMIT = 1_000
MEASURED_TEXT_LIMIT = 4_000  # characters of an answer that is kept for reading
MEASURED_NUMBER_LIMIT = 1e9
FAILED_ANSWERS_LIMIT = 64  # of one model


@dataclass(frozen=True)
class Score:
    """How many of so many trials a model passed, and what it did instead where it failed."""

    passed: int
    asked: int
    instead: str = ""

    @property
    def is_full(self) -> bool:
        return self.passed == self.asked

    @property
    def share(self) -> float:
        return self.passed / self.asked if self.asked else 0.0


@dataclass(frozen=True)
class FailedAnswer:
    """An answer that did not pass its trial, kept for a person to read."""

    trial: str
    why: str
    answer: str


@dataclass(frozen=True)
class Measurement:
    """What `bench` measured of a model on a machine; None: not measured, or not told."""

    node: str
    endpoint: str
    model: str  # as the node calls it
    date: str = ""  # of the day and hour, UTC: 2026-11-18T14:05:02Z
    tokens: int = 0  # the context it was asked with
    load_seconds: float | None = None  # 0.0: it was loaded
    prompt_rate: float | None = None  # tokens a second, of a prompt of 1,000
    long_prompt_rate: float | None = None  # of one that fills half the context
    answer_rate: float | None = None
    first_token_seconds: float | None = None  # when warm, the beginning of the prompt cached
    is_counted: bool = True  # the rates are from the node's own counters; else by the clock
    tools: Score | None = None
    context: Score | None = None
    claims: dict[str, Score] = field(default_factory=dict)  # thinking, images: where it says so
    quality: dict[str, Score] = field(default_factory=dict)  # by role
    failed: tuple[FailedAnswer, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)  # of the node's server, of this program
    failure: str = ""  # why it is not all there: the node's own words

    @property
    def calls_tools(self) -> bool:
        """Tell whether it called tools rightly, mostly at least."""
        return self.tools is not None and self.tools.share > 0.5

    @property
    def is_worth_keeping(self) -> bool:
        """Tell whether anything was measured."""
        return self.load_seconds is not None


def parse_measurements(content: bytes | None) -> tuple[Measurement, ...]:
    """Return the measurements that a bench file holds; what is foreign in it is passed over."""
    tree = parse_object(content or b"")
    entries = tree.get("measurements") if tree else None
    if not isinstance(entries, list):
        return ()
    return tuple(filter(None, map(_parse_measurement, entries[:MEASUREMENTS_LIMIT])))


def find_measurement(measured: Iterable[Measurement], endpoint: str,
                     ollama_model: str) -> Measurement | None:
    """Return the latest measurement of a model at an endpoint."""
    full_name = full_model_name(ollama_model)
    matches = [measurement for measurement in measured if measurement.endpoint == endpoint
               and full_model_name(measurement.model) == full_name]
    return max(matches, key=lambda measurement: measurement.date, default=None)


def merge_measurements(kept: Iterable[Measurement],
                       new: Iterable[Measurement]) -> tuple[Measurement, ...]:
    """Return what is known now: what was not measured anew stays while versions are the same."""
    merged = {_subject_of(measurement): measurement for measurement in kept}
    for measurement in new:
        old = merged.get(_subject_of(measurement))
        if old:
            measurement = _merge(old, measurement)
        if measurement.is_worth_keeping:
            merged[_subject_of(measurement)] = measurement
    places = sorted(merged.values(), key=lambda known: (known.node, known.model, known.tokens))
    return tuple(places[:MEASUREMENTS_LIMIT])


def _subject_of(measurement: Measurement) -> tuple[str, str, int]:
    return measurement.endpoint, full_model_name(measurement.model), measurement.tokens


def _merge(old: Measurement, new: Measurement) -> Measurement:
    """Return a new measurement with what only the old one has."""
    if not new.is_worth_keeping:
        return old
    if old.versions != new.versions:
        return new

    filled = {name: value for name, value in vars(old).items()
              if getattr(new, name) is None and value is not None}
    topics = {name for name in ("tools", "context") if getattr(new, name)}
    topics |= {*new.claims, *new.quality, "speed"}
    failed = [answer for answer in old.failed if answer.trial.partition(":")[0] not in topics]
    return replace(new, **filled, claims={**old.claims, **new.claims},
                   quality={**old.quality, **new.quality}, failed=(*new.failed, *failed))


def _parse_measurement(entry: object) -> Measurement | None:
    """Return one entry of a bench file; a field of the wrong type counts as absent."""
    if not isinstance(entry, dict) or not all(
            obeys(entry.get(name), "line") for name in ("node", "endpoint", "model")):
        return None

    values: dict[str, Any] = {name: entry[name] for name in ("node", "endpoint", "model")}
    for name in ("load_seconds", "prompt_rate", "long_prompt_rate", "answer_rate",
                 "first_token_seconds"):
        values[name] = _measured_number(entry.get(name))
    for name in ("date", "failure"):
        values[name] = _measured_text(entry.get(name), 256)
    for name in ("tools", "context"):
        values[name] = _parse_score(entry.get(name))
    for name in ("claims", "quality"):
        values[name] = _measured_table(entry.get(name), _parse_score)
    values["versions"] = _measured_table(
        entry.get("versions"), lambda version: _measured_text(version, 64) or None)
    values["tokens"] = int(_measured_number(entry.get("tokens")) or 0)
    values["is_counted"] = entry.get("is_counted") is not False
    values["failed"] = _parse_failed(entry.get("failed"))
    return Measurement(**values)


def _measured_number(value: object) -> float | None:
    """Return a number that can have been measured."""
    if isinstance(value, (int, float)) and type(value) is not bool \
            and 0 <= value <= MEASURED_NUMBER_LIMIT:
        return value
    return None


def _measured_text(value: object, limit: int) -> str:
    return value[:limit] if isinstance(value, str) else ""


def _measured_table(value: object, parse: Callable[[object], Any]) -> dict[str, Any]:
    """Return the entries of a table that can be read, a few at the most."""
    if not isinstance(value, dict):
        return {}
    parsed = {name: parse(entry) for name, entry in list(value.items())[:16]
              if obeys(name, "line")}
    return {name: entry for name, entry in parsed.items() if entry is not None}


def _parse_score(value: object) -> Score | None:
    if not isinstance(value, dict):
        return None
    passed, asked = (_measured_number(value.get(name)) for name in ("passed", "asked"))
    if passed is None or not asked or passed > asked:
        return None
    return Score(int(passed), int(asked), _measured_text(value.get("instead"), 256))


def _parse_failed(value: object) -> tuple[FailedAnswer, ...]:
    failed = []
    for entry in value[:FAILED_ANSWERS_LIMIT] if isinstance(value, list) else ():
        if isinstance(entry, dict) and obeys(entry.get("trial"), "line"):
            failed.append(FailedAnswer(entry["trial"], _measured_text(entry.get("why"), 256),
                                       _measured_text(entry.get("answer"), MEASURED_TEXT_LIMIT)))
    return tuple(failed)


# -- what fits a machine --

ROUGH_TOKEN_BYTES = 12_000  # of a token of context, for each billion parameters
LARGEST_MODEL_BYTES = 1 << 50  # what says it is larger says nothing
_PARAMETERS = _Pattern(r"(\d{1,6}(?:\.\d{1,6})?)([MBT])")
_PARAMETER_UNITS = {"M": 0.001, "B": 1.0, "T": 1000.0}


def plan_token_bytes(known: Mapping[str, Any]) -> int | None:
    """Return what one token of context takes of memory, by `model_info` of `/api/show`."""
    def number(key: str) -> int:
        value = known.get(f"{architecture}.{key}")
        return value if type(value) is int and 0 < value < 1_000_000 else 0

    architecture = known.get("general.architecture")
    layers = number("block_count")
    width = number("attention.key_length") + number("attention.value_length")
    if not width and number("attention.head_count"):  # then the heads share the embedding
        width = 2 * number("embedding_length") // number("attention.head_count")

    # Not every layer keeps the whole context: of those with a window every other one at most
    # (gpt-oss; gemma has fewer), of hybrids (qwen3-next) one in so many.
    if number("attention.sliding_window"):
        layers = (layers + 1) // 2
    elif number("full_attention_interval"):
        layers = max(layers // number("full_attention_interval"), 1) if layers else 0
    return 2 * layers * number("attention.head_count_kv") * width or None  # 16 bits a value


def plan_gigabytes(model: NodeModel, context: int) -> float:
    """Return about how much memory a model takes: its weights, room to work, its context."""
    return (_weight_bytes(model) + _token_bytes(model) * context) / 1e9


def plan_fitting_context(model: NodeModel, gigabytes: float) -> int:
    """Return the context that so much memory has room for, in whole 1,024; 0 for none."""
    room = gigabytes * 1e9 - _weight_bytes(model)
    each = _token_bytes(model)
    return max(int(room / each) // 1024 * 1024, 0) if each else 0


def _weight_bytes(model: NodeModel) -> float:
    return min(model.size, LARGEST_MODEL_BYTES) * 1.1


def parameters_of(model: NodeModel) -> float:
    """Return a model's parameters in billions, as its node or else its name tells; 0: unknown."""
    match = _PARAMETERS.fullmatch(model.parameters)
    if match:
        return min(float(match[1]) * _PARAMETER_UNITS[match[2]], 1_000_000)
    return min(billions(model.name), 1_000_000)


def _token_bytes(model: NodeModel) -> float:
    """Return what a token takes as the node told, else by the number of parameters."""
    if model.token_bytes:
        return model.token_bytes
    return ROUGH_TOKEN_BYTES * parameters_of(model)


# -- routes --

def plan_routes(fleet: Fleet) -> dict[str, Model]:
    """Return {agent name: its Model}, which knows its alias and its node."""
    return {agent.name: fleet.models[agent.model] for agent in fleet.agents.values()}


def agents_by_alias(fleet: Fleet) -> dict[str, list[str]]:
    """Return {alias: the agents whose model has it}."""
    agents: dict[str, list[str]] = {}
    for agent, model in plan_routes(fleet).items():
        agents.setdefault(model.alias, []).append(agent)
    return agents


def plan_tiers(fleet: Fleet) -> dict[str, str]:
    """Return {tier: model name} for the main session and Claude Code's four tiers.

    What the file gives, else the largest model whose alias names the tier, else the model of
    the tier's role (haiku: planner, summarizer; others: implementer, reviewer), else by size.
    """
    by_size = sorted(fleet.models.values(),
                     key=lambda model: (billions(model.ollama_model), model.context))
    return {tier: fleet.claude.get(tier) or _plan_tier(fleet, tier, by_size)
            for tier in TIERS}


def _plan_tier(fleet: Fleet, tier: str, by_size: Sequence[Model]) -> str:
    """Return the model of a tier that the file does not give."""
    namesakes = [model for model in by_size
                 if tier in re.split("[^a-z]+", model.alias.lower())]
    if namesakes:
        return namesakes[-1].name

    size = "small" if tier == "haiku" else "heavy"
    for name, role in ROLES.items():
        if role.size == size and name in fleet.agents:
            return fleet.agents[name].model

    sized = by_size[0] if size == "small" else by_size[-1]
    return sized.name


def plan_used_models(fleet: Fleet) -> set[str]:
    """Return the models that can get work: of agents and tiers, their fallbacks and twins."""
    twins: dict[str, list[str]] = {}
    for model in fleet.models.values():
        twins.setdefault(model.alias, []).append(model.name)

    used: set[str] = set()
    pending = [agent.model for agent in fleet.agents.values()]
    pending += plan_tiers(fleet).values()
    while pending:
        name = pending.pop()
        if name not in used:
            used.add(name)
            pending += fleet.models[name].fallback
            pending += twins.pop(fleet.models[name].alias, ())
    return used


def plan_main_fallbacks(fleet: Fleet) -> list[Model]:
    """Return the models that could answer for the main session's, the strongest first."""
    main = plan_tiers(fleet)["main"]
    able = [model for model in fleet.models.values()
            if model.name != main and model.context >= MAIN_CONTEXT_TOKENS
            and not model.cloud and not prints_calls(model.ollama_model)]
    return sorted(able, key=lambda model: (-billions(model.ollama_model), model.name))


def plan_fallbacks(fleet: Fleet) -> dict[str, list[str]]:
    """Return {alias: [aliases to try next]}; one alias never falls back on itself."""
    chains: dict[str, list[str]] = {}
    for model in fleet.models.values():
        for name in model.fallback:
            alias = fleet.models[name].alias
            chain = chains.setdefault(model.alias, [])
            if alias != model.alias and alias not in chain:
                chain.append(alias)
    return {alias: chain for alias, chain in chains.items() if chain}


ROUTE_STATES = ("node offline", "model missing", "cold", "ready")  # the worst first


@dataclass(frozen=True)
class RouteState:
    """What is true of a model's route now, and who answers instead while it is not ready."""

    state: str  # one of ROUTE_STATES
    loaded: LoadedModel | None = None
    fallback: str | None = None  # a model's name


def plan_route_state(fleet: Fleet, states: Mapping[str, NodeState],
                     model: Model) -> RouteState:
    """Return the RouteState of a model; ready means that no request will load it."""
    node = states[model.node]
    if not _can_answer(states, model):
        state = "model missing" if node.online else "node offline"
        return RouteState(state, fallback=_plan_substitute(fleet, states, model))

    loaded = find_models(node.loaded, model.ollama_model)
    for resident in loaded:
        if fits_context(node.provider, resident.context, model.context):
            return RouteState("ready", resident)

    state = "ready" if model.cloud else "cold"
    return RouteState(state, loaded[0] if loaded else None)


def fits_context(provider: str, loaded: int, wanted: int) -> bool:
    """Tell whether a model that is loaded with a context serves a route that wants another."""
    if provider == "ollama":  # which loads it again for any other
        return loaded in (0, wanted)  # 0: before Ollama 0.10
    return loaded == 0 or loaded >= wanted


def _can_answer(states: Mapping[str, NodeState], model: Model) -> bool:
    """Tell whether a model's node is there and has it."""
    node = states[model.node]
    return node.online and (model.cloud or bool(find_models(node.models, model.ollama_model)))


def _plan_substitute(fleet: Fleet, states: Mapping[str, NodeState],
                     model: Model) -> str | None:
    """Return the name of the first that answers instead: a fallback, or one of its alias."""
    others = [fleet.models[name] for name in model.fallback]
    others += [twin for twin in fleet.models.values() if twin.alias == model.alias]
    for other in others:
        if other is not model and _can_answer(states, other):
            return other.name
    return None


def plan_next_step(fleet: Fleet, states: Mapping[str, NodeState],
                   routes: Mapping[str, RouteState]) -> str:
    """Return the sentence a person wants: ready, or the one next thing to type."""
    def urgency(name: str) -> tuple[bool, int]:
        route = routes[name]
        return route.fallback is not None, ROUTE_STATES.index(route.state)

    waiting = [name for name, route in routes.items() if route.state != "ready"]
    if not waiting:
        return "Ready: every model is loaded as its route wants it."

    name = min(waiting, key=urgency)
    model = fleet.models[name]
    node = states[model.node]
    if routes[name].state == "node offline":
        return f"Next: {node.name} ({node.endpoint}) is offline, {node.reason}: {node.mend}."
    if routes[name].state == "model missing":
        pull = f"{obtain_model(node.provider, model.ollama_model)} on {node.name}"
        if NODE_KINDS[node.provider].can_pull:
            pull += ", or from here `subagent-fleet warmup --pull`"
        pull += "."
        correction = plan_correction(model, node)
        if correction:
            return f"Next: {correction}, which {node.name} has, or {pull}"
        return f"Next: {pull}"
    return "Next: `subagent-fleet warmup`"


# -- addresses --

# What a person would rather be reached at; an address of no kind is this machine's own.
ADDRESS_KINDS = ("LAN", "Tailscale", "public", "")


def address_kind(host: str) -> str:
    """Return what an address is good for, one of ADDRESS_KINDS."""
    # Loading ipaddress takes as long as reading a fleet file, so the usual hosts go without.
    if re.fullmatch(r"(?:10\.\d{1,3}|192\.168)(?:\.\d{1,3}){2}", host):
        return "LAN"
    if re.fullmatch("[A-Za-z_][^:]*", host):
        return ""

    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return ""
    if address.is_loopback or address.is_link_local:
        return ""
    if address.is_global:
        return "public"
    # Tailscale's 100.64/10 is neither private nor global.
    return "LAN" if address.is_private else "Tailscale"


def show_host(host: str) -> str:
    """Return a host as it stands in an address."""
    return f"[{host}]" if ":" in host else host


def plain_address(host: str) -> str:
    """Return a host as it compares: an IPv4 address within an IPv6 one is that, without a zone."""
    host = host.strip("[]").partition("%")[0].lower()
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        return host
    return str(address.ipv4_mapped or address)


def is_loopback(host: str) -> bool:
    """Tell whether a host is this machine to itself, however that is spelled."""
    return bool(LOOPBACK.fullmatch(plain_address(host)))


PRIVATE_NETWORKS = ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16",
                    "169.254.0.0/16", "100.64.0.0/10", "::1/128", "fc00::/7", "fe80::/10")
# A name of one word, or one that no public name server may know.
_PRIVATE_NAME = _Pattern(r"[^.]+|.+[.](local|lan|home|internal|home[.]arpa|localdomain)[.]?")


def is_private(host: str) -> bool:
    """Tell whether a host can only be at home: in private networks, Tailscale's among them."""
    host = plain_address(host)
    if is_loopback(host):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        # What looks like a number is one to the system: 0x08080808 is 8.8.8.8.
        last = host.rstrip(".").rpartition(".")[2]
        is_number = re.fullmatch("0x[0-9a-f]*|[0-9]+", last)
        return bool(_PRIVATE_NAME.fullmatch(host)) and not is_number
    return any(address in ipaddress.ip_network(network) for network in PRIVATE_NETWORKS)


# -- what a fleet file could do with what is a person's --

@dataclass(frozen=True)
class Stake:
    """Something of a person's that would go where no fleet file may send it unasked."""

    fact: str  # what is accepted, to the letter
    what: str  # as a person reads it


def plan_stakes(fleet: Fleet, own_hosts: Collection[str] = ()) -> list[Stake]:
    """Return what is at stake when a fleet is used.

    `own_hosts` are those of its hosts that turned out to be this machine's, or to be at home.
    """
    gateway = fleet.gateway
    stakes = []
    if not is_loopback(gateway.host) and gateway.host not in own_hosts:
        url = gateway_url(gateway)
        stakes.append(Stake(f"gateway {url}", f"the gateway's key and all prompts go to {url}"))
    return [*stakes, *plan_node_stakes(fleet.nodes.values(), own_hosts)]


def plan_node_stakes(nodes: Iterable[Node], own_hosts: Collection[str] = ()) -> list[Stake]:
    """Return what is at stake when these nodes are asked."""
    stakes = []
    for node in nodes:
        host = _host_of(node.endpoint)
        if host not in own_hosts and not is_private(host):
            stakes.append(Stake(f"node {node.endpoint}", "prompts, and what agents read, go to "
                                f"{node.endpoint} (node {node.name})"))
        if node.api_key_env:
            stakes.append(plan_key_stake(node))
    return stakes


def plan_key_stake(node: Node) -> Stake:
    """Return what is at stake when a node is sent the key that it wants."""
    return Stake(f"key {node.api_key_env} {node.endpoint}",
                 f"the key in {node.api_key_env} goes to {node.endpoint} (node {node.name})")


# -- the gateway --

def gateway_url(gateway: Gateway) -> str:
    """Return the address at which a program on this machine reaches the gateway."""
    reached = {"0.0.0.0": "127.0.0.1", "localhost": "127.0.0.1", "::": "::1"}
    return f"http://{show_host(reached.get(gateway.host, gateway.host))}:{gateway.port}"


def _host_of(endpoint: str) -> str:
    """Return the host of a checked endpoint, an IPv6 address without its brackets."""
    return split_endpoint(endpoint).host


def is_gateway_address(gateway: Gateway, endpoint: str) -> bool:
    """Tell whether an endpoint is where the gateway listens, as seen from this machine."""
    host = _host_of(endpoint)
    if host != gateway.host:
        listens_here = gateway.host in ("0.0.0.0", "::") or is_loopback(gateway.host)
        if not (listens_here and is_loopback(host)):
            return False
    return split_endpoint(endpoint).port == gateway.port


# -- Claude Code's environment --

ADDRESSES = ("ANTHROPIC_BASE_URL",)
CLOUDS = ("BEDROCK", "VERTEX", "FOUNDRY", "MANTLE", "ANTHROPIC_AWS", "ANTHROPIC_GOOGLE_CLOUD")


@dataclass(frozen=True)
class Variable:
    """One variable of the environment: what becomes of it, and why.

    The gateway's key is in no plan, so that every plan can be shown: `holds_key` says where
    it goes, and the value is empty.
    """

    name: str
    value: str
    why: str
    holds_key: bool = False
    is_unset: bool = False
    is_added: bool = False  # to what the variable holds already


def plan_environment(fleet: Fleet) -> list[Variable]:
    """Return what Claude Code and LiteLLM are started with, in the order it is written."""
    tiers = plan_tiers(fleet)
    session = fleet.models[tiers["main"]]
    return [
        *_gateway_variables(fleet.gateway),
        *_rival_variables(),
        *_proxy_variables(fleet),
        *_tier_variables(fleet, tiers),
        *_window_variables(session),
        *_cache_variables(),
        *_patience_variables(fleet),
        *_thrift_variables(fleet, session),
        *_litellm_variables()]


def _gateway_variables(gateway: Gateway) -> Iterator[Variable]:
    """Yield where the gateway is and how Claude Code shows its key."""
    yield Variable(gateway.master_key_env, "", holds_key=True,
                   why="the gateway's key; one that is set already is kept")
    yield Variable("ANTHROPIC_BASE_URL", gateway_url(gateway),
                   "the gateway, which stands for Claude")
    yield Variable("ANTHROPIC_AUTH_TOKEN", "", holds_key=True,
                   why="how Claude Code shows the key")


def _rival_variables() -> Iterator[Variable]:
    """Yield what would lead Claude Code past the gateway, or past an agent's model."""
    # 2.1.197 lets the variable beat an agent's model; 2.1.326 only together with _FORCE.
    yield Variable("ANTHROPIC_API_KEY", "", is_unset=True, why="would be shown as well")
    yield Variable("CLAUDE_CODE_SUBAGENT_MODEL", "", is_unset=True,
                   why="would beat the model of every agent")
    for cloud in CLOUDS:
        yield Variable(f"CLAUDE_CODE_USE_{cloud}", "", is_unset=True,
                       why="would ask a cloud instead")


def _proxy_variables(fleet: Fleet) -> Iterator[Variable]:
    """Yield the hosts that are asked without a proxy, in both spellings that are read."""
    urls = [node.endpoint for node in fleet.nodes.values()]
    urls += [gateway_url(fleet.gateway), OLLAMA_ENDPOINT]  # which LiteLLM asks, too (1.106.2)
    hosts: list[str] = []
    for url in urls:
        host = _host_of(url)
        if host not in hosts:
            hosts.append(host)
    for name in ("NO_PROXY", "no_proxy"):
        yield Variable(name, ",".join(hosts), "no proxy sees the key and the prompts",
                       is_added=True)


def _tier_variables(fleet: Fleet, tiers: Mapping[str, str]) -> Iterator[Variable]:
    """Yield which alias answers for the main session and for each tier."""
    # All of them, always: a main model that calls an agent with `model: "sonnet"` beats the
    # agent's own model, and an unset tier means one of Anthropic's (2.1.326).
    yield Variable("ANTHROPIC_MODEL", fleet.models[tiers["main"]].alias, "the main session")
    for tier in TIERS[1:]:
        alias = fleet.models[tiers[tier]].alias
        yield Variable(f"ANTHROPIC_DEFAULT_{tier.upper()}_MODEL", alias, f"what `{tier}` means")


def _window_variables(session: Model) -> Iterator[Variable]:
    """Yield what the main session's model holds."""
    # Claude Code compacts at the window less the answer less 13,000 tokens (2.1.326).
    yield Variable("CLAUDE_CODE_MAX_CONTEXT_TOKENS", str(session.context),
                   "the main model's window; Claude Code would take it for 1,000,000")
    yield Variable("CLAUDE_CODE_MAX_OUTPUT_TOKENS",
                   str(min(session.max_output, session.context // 2)),
                   "longest answer; Claude Code keeps this much of the window free for it")


def _cache_variables() -> Iterator[Variable]:
    """Yield what keeps a prompt's beginning the same, and Claude Code's calls at home."""
    # Otherwise the system prompt differs in each conversation from its 47th character on, and
    # a node reads 10,000 tokens anew (2.1.326).
    yield Variable("CLAUDE_CODE_ATTRIBUTION_HEADER", "0",
                   "else nothing of a prompt is found in the cache")
    yield Variable("CLAUDE_CODE_TOTAL_TOKENS_REMINDER", "off", "the same")
    yield Variable("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1",
                   "no calls but to the gateway")


def _patience_variables(fleet: Fleet) -> Iterator[Variable]:
    """Yield how long Claude Code waits.

    A request waits for its turn, then for a first token, then for the next candidate's.
    """
    # Left alone, 2.1.326 gives up after 300 to 360 s of silence and asks again, up to 11 times;
    # each time the node reads the prompt from its beginning.
    slowest = max(model.timeout for model in fleet.models.values()) * 1000
    yield Variable("API_FORCE_IDLE_TIMEOUT", "0",
                   "a local model may need minutes for its first token")
    yield Variable("CLAUDE_STREAM_IDLE_TIMEOUT_MS", str(slowest * 3),
                   "thrice the slowest timeout")
    yield Variable("API_TIMEOUT_MS", str(slowest * 5), "five times, for a whole answer")


def _thrift_variables(fleet: Fleet, session: Model) -> Iterator[Variable]:
    """Yield what spares a small window and a single machine."""
    if session.context <= LEAN_CONTEXT_TOKENS:
        yield Variable("CLAUDE_CODE_SIMPLE_SYSTEM_PROMPT", "1",
                       "a shorter prompt, small window")
    if len({model.node for model in fleet.models.values()}) == 1:
        yield Variable("CLAUDE_CODE_DISABLE_BACKGROUND_TASKS", "1",
                       "one machine: an agent and its caller would compete for it")


def _litellm_variables() -> Iterator[Variable]:
    """Yield what LiteLLM reads when it starts."""
    yield Variable("LITELLM_LOCAL_MODEL_COST_MAP", "True", "LiteLLM asks nobody at its start")
    for name in ("NO_DOCS", "NO_REDOC", "NO_OPENAPI"):
        yield Variable(name, "True", "LiteLLM shows no pages without a key")


def merge_environment(environ: Mapping[str, str], fleet: Fleet, key: str) -> dict[str, str]:
    """Return an environment with the fleet's variables set, and those unset that disturb."""
    merged = dict(environ)
    for variable in plan_environment(fleet):
        name = variable.name
        if variable.is_unset:
            merged.pop(name, None)
        elif variable.holds_key:
            merged[name] = key
        elif variable.is_added and environ.get(name):
            merged[name] = f"{environ[name]},{variable.value}"
        else:
            merged[name] = variable.value
    return merged


def harness_environment(environ: Mapping[str, str], fleet: Fleet, key: str) -> dict[str, str]:
    """Return what any other program is started with: the key, and no proxy before the gateway."""
    merged = {**environ, fleet.gateway.master_key_env: key}
    for variable in _proxy_variables(fleet):
        own = environ.get(variable.name)
        merged[variable.name] = f"{own},{variable.value}" if own else variable.value
    return merged


def litellm_environment(environ: Mapping[str, str], fleet: Fleet, key: str) -> dict[str, str]:
    """Return what LiteLLM is started with: nothing in it names code or settings of a project."""
    kept = {}
    for name, value in environ.items():
        if not re.match("PYTHON|LITELLM_|(CONFIG_FILE_PATH|WORKER_CONFIG)$", name):
            kept[name] = value
    kept["LITELLM_MODE"] = "PRODUCTION"  # else it reads a file .env (1.106.2)
    return merge_environment(kept, fleet, key)


# What a local model does not use of Claude Code's tools: with the short prompt and without them
# the first request is a third as long (2.1.327).
LEAN_LIMIT_TOKENS = 131072  # with more context there is room for all
SPARE_TOOLS = """
    Workflow ScheduleWakeup ListAgents ReportFindings CronCreate CronDelete CronList EnterWorktree
    ExitWorktree Monitor NotebookEdit SendMessage TaskStop WebFetch WebSearch TaskCreate TaskGet
    TaskList TaskOutput TaskUpdate Skill ToolSearch
""".split()
_TOOL_FLAGS = ("--allowedTools", "--allowed-tools", "--tools")


def is_lean(fleet: Fleet) -> bool:
    """Tell whether Claude Code is started with few tools: as the file says, else by the window."""
    if fleet.lean is not None:
        return fleet.lean
    return fleet.models[plan_tiers(fleet)["main"]].context <= LEAN_LIMIT_TOKENS


def plan_denied_tools(fleet: Fleet, own: Mapping[str, Any], words: Sequence[str]
                      ) -> tuple[str, ...]:
    """Return the tools that are off in a session, beside a person's own settings and words.

    Those that an agent of the fleet, their `allow` or their command line names stay; where they
    have a `deny` of their own, that one holds alone.
    """
    permissions = own.get("permissions", {})
    if not is_lean(fleet) or "deny" in permissions:
        return ()

    wanted = [rule for kind in ("allow", "ask") for rule in permissions.get(kind) or ()]
    for agent in fleet.agents.values():
        wanted += agent.tools or ()
        if agent.frontmatter.get("skills"):
            wanted.append("Skill")
    names = {str(rule).split("(")[0] for rule in wanted} | _typed_tools(words)
    return tuple(tool for tool in SPARE_TOOLS if tool not in names)


def _typed_tools(words: Sequence[str]) -> set[str]:
    """Return the tools that are named on Claude Code's command line."""
    names: set[str] = set()
    is_list = False
    for word in words:
        if word == "--":
            break
        flag, _, value = word.partition("=")
        if word.startswith("-"):
            is_list = flag in _TOOL_FLAGS
            word = value
        if is_list:
            names.update(re.findall("[A-Za-z]+", re.sub(r"\([^)]*\)", " ", word)))
    return names


def plan_settings(fleet: Fleet, environ: Mapping[str, str], own: Mapping[str, Any],
                  words: Sequence[str] = ()) -> dict[str, Any]:
    """Return the settings of a session: a person's own, and what leads it to the fleet.

    Those that Claude Code is started with beat a project's and a person's usual ones (2.1.327
    and 2.1.197). An empty word there counts as unset, and nothing else unsets what a project sets.
    """
    wanted: dict[str, Any] = {}
    leading: dict[str, str] = {}  # addresses and keys
    for variable in plan_environment(fleet):
        name = variable.name
        if name == fleet.gateway.master_key_env:
            continue
        value = environ.get(name, "")
        wanted[name] = value
        if variable.is_unset or variable.holds_key or variable.is_added or name in ADDRESSES:
            leading[name] = value

    if is_lean(fleet):
        wanted["CLAUDE_CODE_SIMPLE_SYSTEM_PROMPT"] = "1"

    # Auto mode asks a server of Anthropic before every action, which no gateway has (2.1.326).
    permissions: dict[str, Any] = {"disableAutoMode": "disable"}
    denied = plan_denied_tools(fleet, own, words)
    if denied:
        permissions["deny"] = list(denied)
    permissions.update(own.get("permissions", {}))
    return {**own, "env": {**wanted, **own.get("env", {}), **leading}, "permissions": permissions}


@dataclass(frozen=True)
class Window:
    """How many tokens fit into an alias, and into an answer of it."""

    context: int
    output: int


def plan_windows(fleet: Fleet) -> dict[str, Window]:
    """Return {alias: Window}: of models that share an alias, the smallest of each."""
    windows: dict[str, Window] = {}
    for model in fleet.models.values():
        window = Window(model.context, min(model.max_output, model.context // 2))
        known = windows.get(model.alias, window)
        windows[model.alias] = Window(min(window.context, known.context),
                                      min(window.output, known.output))
    return windows


def plan_tier_alias(fleet: Fleet, tier: str) -> str:
    """Return the alias that answers for a tier."""
    return fleet.models[plan_tiers(fleet)[tier]].alias


# -- machines that sleep --

WAKE_SECONDS = 120.0  # a Mac takes 5 to 15, a PC that was off a minute
WAKE_PORT = 9  # discard: nobody needs to listen


def plan_magic_packet(mac: str) -> bytes:
    """Return the 102 bytes on which a network card starts its machine."""
    return b"\xff" * 6 + bytes.fromhex(mac.replace(":", "")) * 16


def plan_mac_hint(node: Node) -> str:
    """Return how a person finds the hardware address of a node."""
    host = _host_of(node.endpoint)
    return (f"while it is awake, `arp -n {host}` here, or there `ifconfig en0` (a Mac) or "
            f"`ip link` (Linux); then write it as `mac: \"…\"` under nodes.{node.name}")


# -- files, and what tells two configs apart --

def digest(content: bytes | None) -> str:
    """Return the SHA-256 of a file's bytes."""
    return hashlib.sha256(content or b"").hexdigest()


@dataclass(frozen=True)
class Change:
    """What there is at a path and what shall be there, as bytes; None is no file."""

    path: str
    found: bytes | None
    wanted: bytes | None
    ours: bool  # what is there is what was last written

    @property
    def action(self) -> str:
        """One word: created, updated, removed, unchanged, or edited, which is the user's."""
        if self.found == self.wanted:
            return "unchanged"
        if self.found is None:
            return "created"
        if not self.ours:
            return "edited"
        return "removed" if self.wanted is None else "updated"


def fleet_digest(fleet: Fleet) -> str:
    """Return what tells two configs apart whose models are not served alike."""
    # All of a node counts but what is only said to people, so that a new key counts unasked.
    nodes = [replace(node, tags=(), memory_gb=None, mac=None) for node in fleet.nodes.values()]
    return digest(repr([*nodes, *fleet.models.values()]).encode("utf-8"))[:16]


# -- who does what where --
#
# `init`, the first `up`, `worker`, `add` and `recommend` ask `plan_assignment`. In its order, each
# rule is a function with its reason: what fits a role, what fits a machine, who is the strongest,
# who does what, who stands in. Ties break by name: the same machines give the same file.

# What is to be done, and the least context for it: `main` and Claude Code's tiers read its own
# prompt, other agents do not.
JOBS = {"main session": MAIN_CONTEXT_TOKENS, "implementer": MAIN_CONTEXT_TOKENS,
        "reviewer": MAIN_CONTEXT_TOKENS, "planner": SMALL_CONTEXT_TOKENS,
        "summarizer": SMALL_CONTEXT_TOKENS}
MAIN_JOB = "main session"
PLANNING_BILLIONS = 7.0  # a smaller model plans and sums up only where no other is free
CODER_FACTOR = 1.25  # a coder comes before a general model of its size
THINKER_FACTOR = 0.9  # and one that thinks comes after it: here it is asked not to
BYTES_A_BILLION = 6e8  # at four bits a weight, where neither name nor node tell the parameters
_CODER = _Pattern("cod(?:er|e[^a-z]|estral)|devstral")
_ACTIVE = _Pattern(r"a(\d+(?:\.\d+)?)b(?![a-z])")
_MAKER = _Pattern("(?:.*/)?([a-z]+)")
_MAKERS = {"devstral": "mistral", "codestral": "mistral", "magistral": "mistral",
           "mixtral": "mistral", "ministral": "mistral", "codellama": "llama",
           "codegemma": "gemma", "qwq": "qwen"}


@dataclass(frozen=True)
class Candidate:
    """A model on a node that could do something, and how well."""

    node: str
    model: NodeModel
    strength: float  # about its parameters in billions
    rating: Rating
    context: int  # it was trained for, or held when it was measured; 0: not told
    measurement: Measurement | None = None

    @property
    def place(self) -> tuple[str, str]:
        return self.node, full_model_name(self.model.name)

    @property
    def calls_tools(self) -> bool:
        return self.rating.score >= ABLE - 1

    def holds(self, tokens: int) -> bool:
        """Tell whether it was trained for so much context; what is not told counts as yes."""
        return not self.context or self.context >= tokens

    def quality(self, job: str) -> float | None:
        """Return which share of a job's trials it passed, where that was measured."""
        score = self.score(job)
        return score.share if score else None

    def score(self, job: str) -> Score | None:
        """Return how it did in a job's trials."""
        role = "implementer" if job == MAIN_JOB else job
        return self.measurement.quality.get(role) if self.measurement else None


def plan_candidate(node: str, model: NodeModel, measurement: Measurement | None = None
                   ) -> Candidate:
    """Return a model with what is known and what was measured of it."""
    measured_tools = None
    context = model.trained_context or 0
    if measurement and measurement.tools:
        measured_tools = measurement.calls_tools
    if measurement and measurement.context and not measurement.context.is_full:
        # What it was asked with was cut or refused, so it holds less, whatever it was trained for.
        context = min(context or measurement.tokens, measurement.tokens) // 2
        rating = rate_model(replace(model, trained_context=context), measured_tools)
    else:
        rating = rate_model(model, measured_tools)
    strength = plan_strength(model, plan_size(model))
    return Candidate(node, model, strength, rating, context, measurement)


def plan_size(model: NodeModel) -> float:
    """Return about how many billions of parameters a model has."""
    return parameters_of(model) or min(model.size, LARGEST_MODEL_BYTES) / BYTES_A_BILLION


def plan_strength(model: NodeModel, size: float) -> float:
    """Return what a model of this size is worth before it was measured."""
    if _CODER.search(model.name.lower()):
        size *= CODER_FACTOR
    if "thinking" in (model.capabilities or ()):
        size *= THINKER_FACTOR
    return size


def _plan_slowness(model: NodeModel, size: float) -> float:
    """Return how much of a model is at work for a token, in billions of parameters."""
    match = _ACTIVE.search(model.name.lower())  # of a mixture
    return float(match[1]) if match else size


def rank_models(states: Iterable[NodeState]) -> list[Candidate]:
    """Return the models of the best kind, the strongest first: calls tools, holds the prompt."""
    candidates = [plan_candidate(state.name, model) for state in states for model in state.models]
    best = max((one.rating.score for one in candidates), default=0)
    ranked = [one for one in candidates if one.rating.score == best > 0]
    return sorted(ranked, key=lambda one: (-one.strength, one.node, one.model.name))


def _maker_of(model: NodeModel) -> str:
    """Return who made a model, as far as its name tells: two of one maker err alike."""
    match = _MAKER.match(model.name.lower())
    word = match[1] if match else model.name
    return _MAKERS.get(word, word)


def _is_grown(candidate: Candidate) -> bool:
    return plan_size(candidate.model) >= PLANNING_BILLIONS


@dataclass(frozen=True)
class Seat:
    """A model that shall run on a node, with this context."""

    candidate: Candidate
    context: int


class Pool:
    """All models of all machines, in their orders; each is rated when it is first looked at.

    Ten thousand take longer to rate than `init` may, and nearly all are never looked at.
    """

    def __init__(self, states: Sequence[NodeState], measured: Iterable[Measurement]) -> None:
        self._measured: dict[tuple[str, str], Measurement] = {}
        for measurement in sorted(measured, key=lambda one: one.date):
            place = (measurement.endpoint, full_model_name(measurement.model))
            self._measured[place] = measurement
        self._endpoints = {state.name: state.endpoint for state in states}
        self._candidates: dict[tuple[str, str], Candidate] = {}
        self._orders: dict[str, list[Candidate]] = {}
        self._served: dict[str, bool] = {}
        self._best_score = -1

        self._rows: list[tuple[float, str, str, NodeModel]] = []
        self._fast_rows: list[tuple[float, str, str, NodeModel]] = []
        for state in states:
            for model in state.models if state.online else ():
                size = plan_size(model)
                rest = (state.name, model.name, model)
                self._rows.append((-plan_strength(model, size), *rest))
                self._fast_rows.append((_plan_slowness(model, size), *rest))
        self._rows.sort(key=_row_order)
        self._fast_rows.sort(key=_row_order)
        self._by_node: dict[str, list[tuple[float, str, str, NodeModel]]] = {}
        for row in self._rows:
            self._by_node.setdefault(row[1], []).append(row)

    def _rate(self, row: tuple[float, str, str, NodeModel]) -> Candidate:
        _, node, name, model = row
        if (node, name) not in self._candidates:
            place = (self._endpoints[node], full_model_name(name))
            candidate = plan_candidate(node, model, self._measured.get(place))
            self._candidates[node, name] = candidate
        return self._candidates[node, name]

    def has_any(self) -> bool:
        """Tell whether any model answers at all."""
        return any(self._rate(row).rating.score for row in self._rows)

    def can(self, candidate: Candidate, job: str) -> bool:
        """Tell whether a candidate can do a job; where nobody can, whether it comes nearest."""
        if job not in self._served:
            self._served[job] = any(_fits_job(self._rate(row), job) for row in self._rows)
        if self._served[job]:
            return _fits_job(candidate, job)
        if self._best_score < 0:
            self._best_score = max((self._rate(row).rating.score for row in self._rows), default=0)
        return candidate.rating.score == self._best_score > 0

    def strongest(self, job: str) -> Iterable[Candidate]:
        """Return who can do a job, the strongest first."""
        if self._is_measured(job):
            return self._orders[job]
        return (one for one in map(self._rate, self._rows) if self.can(one, job))

    def strength(self, candidate: Candidate, job: str) -> float:
        """Return how well a candidate does a job: as measured, else by its size."""
        quality = candidate.quality(job) if self._is_measured(job) else None
        return candidate.strength if quality is None else quality

    def _is_measured(self, job: str) -> bool:
        """Tell whether all who can do a job were measured in it: one scale for all."""
        if not self._measured:
            return False
        if job not in self._orders:
            able = [one for one in map(self._rate, self._rows) if self.can(one, job)]
            if any(one.quality(job) is None for one in able):
                able = []
            able.sort(key=lambda one: -(one.quality(job) or 0.0))
            self._orders[job] = able
        return bool(self._orders[job])

    def fastest(self, job: str, jobs_at: Callable[[str], Sized]) -> Iterable[Candidate]:
        """Return who can do a job, the fastest first; of equals, whose machine has less to do."""
        if self._measured:
            able = [one for one in map(self._rate, self._rows) if self.can(one, job)]
            rates = {one.place: one.measurement.answer_rate or 0.0 for one in able
                     if one.measurement}
            if len(rates) == len(able) and all(rates.values()):
                return sorted(able, key=lambda one: (
                    -rates[one.place], len(jobs_at(one.node)), one.place))
        return self._fastest_by_size(job, jobs_at)

    def _fastest_by_size(self, job: str, jobs_at: Callable[[str], Sized]) -> Iterator[Candidate]:
        equals: list[Candidate] = []
        slowness = 0.0
        for row in self._fast_rows:
            candidate = self._rate(row)
            if not self.can(candidate, job):
                continue
            if row[0] != slowness:
                yield from sorted(equals, key=lambda one: len(jobs_at(one.node)))
                slowness = row[0]
                equals = []
            equals.append(candidate)
        yield from sorted(equals, key=lambda one: len(jobs_at(one.node)))

    def at(self, node: str, job: str) -> Iterator[Candidate]:
        """Yield who can do a job on a node, the strongest first."""
        rows = self._by_node.get(node, ())
        if self._is_measured(job):
            rows = sorted(rows, key=lambda row: -self.strength(self._rate(row), job))
        return (one for one in map(self._rate, rows) if self.can(one, job))

    def having(self, node: str, full_names: Collection[str]) -> list[Candidate]:
        """Return those of a node's models that have one of these names, the strongest first."""
        return [self._rate(row) for row in self._by_node.get(node, ())
                if full_model_name(row[2]) in full_names]

    def all_at(self, node: str) -> list[Candidate]:
        """Return every model of a node that answers."""
        return [one for one in map(self._rate, self._by_node.get(node, ())) if one.rating.score]


def _row_order(row: tuple[float, str, str, NodeModel]) -> tuple[float, int, str, str]:
    rank, node, name, model = row
    return rank, -model.size, node, name


def _fits_job(candidate: Candidate, job: str) -> bool:
    return candidate.calls_tools and candidate.holds(JOBS[job])


class Seating:
    """An assignment in the making: what runs where, who does what, and why."""

    def __init__(self, states: Sequence[NodeState], measured: Iterable[Measurement],
                 memory: Mapping[str, float]) -> None:
        self.nodes = [state.name for state in states if state.online]
        self.pool = Pool(states, measured)
        self.seats: dict[tuple[str, str], Seat] = {}
        self.doing: dict[str, Seat] = {}  # by job
        self.why: dict[str, str] = {}
        self._memory = memory
        self._seen = {state.name: sum(loaded.size for loaded in state.loaded) / 1e9
                      for state in states}

    # -- what fits a machine --

    def room_for(self, candidate: Candidate, job: str, wanted: int) -> int:
        """Return the context at which a model fits its node beside what runs there, or 0."""
        least = JOBS[job]
        if not candidate.holds(least):  # the nearest, where nobody can do the job
            least = LEAST_CONTEXT_TOKENS
        seat = self.seats.get(candidate.place)
        if seat:
            return seat.context if seat.context >= least else 0

        most = max(min(candidate.context or wanted, wanted), LEAST_CONTEXT_TOKENS)
        others = [other for place, other in self.seats.items() if place[0] == candidate.node]
        for context in (most, MAIN_CONTEXT_TOKENS, 2 * SMALL_CONTEXT_TOKENS, SMALL_CONTEXT_TOKENS):
            if least <= context <= most and self._fits([*others, Seat(candidate, context)]):
                return context
        return 0

    def _fits(self, seats: Sequence[Seat]) -> bool:
        """Tell whether these run on their node together.

        In its memory, else in what was seen loaded together, else one model alone.
        """
        node = seats[0].candidate.node
        memory = self._memory.get(node)
        if memory is None and len(seats) == 1:
            return True
        need = sum(plan_gigabytes(seat.candidate.model, seat.context) for seat in seats)
        return need <= (self._seen[node] if memory is None else memory)

    # -- who does what --

    def seat(self, candidate: Candidate, job: str, context: int, why: str) -> None:
        """Let a model do a job; where it does not run yet, it shall."""
        old = self.doing.get(job)
        self.doing[job] = self.seats.setdefault(candidate.place, Seat(candidate, context))
        self.why[job] = why
        if old and old not in self.doing.values():
            del self.seats[old.candidate.place]

    def take_first(self, job: str, candidates: Iterable[Candidate], why: str) -> bool:
        """Let the first that finds room do a job; tell whether there was one."""
        size = "heavy" if JOBS[job] == MAIN_CONTEXT_TOKENS else "small"
        for candidate in candidates:
            context = self.room_for(candidate, job, STARTER_MODELS[size].context)
            if context:
                self.seat(candidate, job, context, why)
                return True
        return False

    def jobs_at(self, node: str) -> list[str]:
        """Return what is done on a node."""
        return [job for job, seat in self.doing.items() if seat.candidate.node == node]

    def is_near(self, candidate: Candidate, job: str, other: Candidate) -> bool:
        """Tell whether less than half the strength of another is lost with a candidate."""
        return self.pool.strength(candidate, job) * 2 > self.pool.strength(other, job)

    def near(self, job: str, other: Candidate, node: str = "") -> Iterator[Candidate]:
        """Yield who can do a job, on one node or any, at less than half another's strength lost."""
        for candidate in self.pool.at(node, job) if node else self.pool.strongest(job):
            if not self.is_near(candidate, job, other):
                return  # the others are weaker still
            yield candidate

    def by_strength(self) -> list[Seat]:
        """Return what runs, the strongest first."""
        return sorted(self.seats.values(),
                      key=lambda seat: (-seat.candidate.strength, *seat.candidate.place))

    def idle_nodes(self) -> list[str]:
        """Return the nodes on which nothing runs, by name."""
        busy = {node for node, _ in self.seats}
        return sorted(node for node in self.nodes if node not in busy)


def _assign_main(seating: Seating) -> None:
    """The main session and the implementer get the strongest model that fits its machine."""
    for job in (MAIN_JOB, "implementer"):
        if seating.take_first(job, seating.pool.strongest(job), "the strongest"):
            seating.why[job] = f"the strongest: {_show_strength(seating, job)}"


def _assign_reviewer(seating: Seating) -> None:
    """A second pair of eyes, at work at the same time: another machine's, of another maker."""
    main = seating.doing[MAIN_JOB].candidate
    maker = _maker_of(main.model)

    def near(*, elsewhere: bool, strange: bool) -> Iterator[Candidate]:
        for one in seating.near("reviewer", main):
            is_strange = _maker_of(one.model) != maker
            if (one.node != main.node) is elsewhere and (is_strange or not strange):
                yield one

    for candidates, why in (
            (near(elsewhere=True, strange=True),
             "the strongest on another machine, of another family"),
            (near(elsewhere=True, strange=False), "the strongest on another machine"),
            (near(elsewhere=False, strange=True),
             "of another family than the main session's, beside it"),
            ([main], "nothing else is half as strong")):
        if seating.take_first("reviewer", candidates, why):
            return


def _assign_planner(seating: Seating) -> None:
    """Plans are made by the fastest model that is not small, else by the strongest left."""
    grown = filter(_is_grown, seating.pool.fastest("planner", seating.jobs_at))
    left = (one for one in seating.pool.strongest("planner") if not seating.jobs_at(one.node))
    for candidates, why in (
            (grown, f"the fastest of at least {PLANNING_BILLIONS:g} B"),
            (left, "the strongest left"),
            ([seating.doing[MAIN_JOB].candidate], "nothing else fits")):
        if seating.take_first("planner", candidates, why):
            return


def _assign_summarizer(seating: Seating) -> None:
    """The fastest sums up, on another machine than the main session's where there is one.

    A small model only where no other is free.
    """
    main = seating.doing[MAIN_JOB].candidate

    def away() -> Iterator[Candidate]:
        fastest = seating.pool.fastest("summarizer", seating.jobs_at)
        return (one for one in fastest if one.node != main.node)

    for candidates, why in (
            (filter(_is_grown, away()), "the fastest that is free"),
            (away(), "the fastest; nothing larger is free"),
            (seating.pool.fastest("summarizer", seating.jobs_at), "the fastest"),
            ([main], "nothing else fits")):
        if seating.take_first("summarizer", candidates, why):
            return


def _seat_twins(seating: Seating) -> None:
    """A machine that idles and has a model that works elsewhere shares its work."""
    contexts: dict[str, int] = {}
    for seat in seating.by_strength():
        contexts.setdefault(seat.candidate.place[1], seat.context)
    for node in seating.idle_nodes():
        for candidate in seating.pool.having(node, contexts):
            wanted = contexts[candidate.place[1]]
            if seating.pool.can(candidate, "summarizer") \
                    and seating.room_for(candidate, "summarizer", wanted) == wanted:
                seating.seats[candidate.place] = Seat(candidate, wanted)
                break


def _move_to_idle(seating: Seating) -> None:
    """No machine idles while a job could move to it at less than half its strength lost."""
    for node in seating.idle_nodes():
        for job in ("summarizer", "planner", "reviewer", "implementer"):
            now = seating.doing[job].candidate
            if len(seating.jobs_at(now.node)) < 2:  # that machine would idle then
                continue
            why = f"{node} would idle; more than half as strong"
            if seating.take_first(job, seating.near(job, now, node), why):
                break


def _seat_spares(seating: Seating) -> None:
    """A machine that still idles stands in for the others with its strongest model."""
    for node in seating.idle_nodes():
        for candidate in seating.pool.at(node, MAIN_JOB):
            context = seating.room_for(candidate, MAIN_JOB, MAIN_CONTEXT_TOKENS)
            if context >= MAIN_CONTEXT_TOKENS:
                seating.seats[candidate.place] = Seat(candidate, context)
                break


ASSIGNMENT_RULES = (_assign_main, _assign_reviewer, _assign_planner, _assign_summarizer,
                    _seat_twins, _move_to_idle, _seat_spares)
SEAT_NAMES = {"main session": "heavy-coder", "implementer": "builder", "reviewer": "second-coder",
              "planner": "small-coder", "summarizer": "reader"}
SEAT_ALIASES = {"main session": "claude-sonnet-local", "reviewer": "claude-opus-local",
                "planner": "claude-haiku-local"}
FALLBACKS = 2  # of a model other than the main session's, which all can stand in for


@dataclass(frozen=True)
class Placement:
    """One entry of `models`, as an assignment would write it."""

    name: str
    node: str
    model: NodeModel
    alias: str
    context: int
    fallback: tuple[str, ...]
    jobs: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Assignment:
    """Who does what where, and why."""

    placements: tuple[Placement, ...] = ()
    jobs: dict[str, str] = field(default_factory=dict)  # job -> the name of its placement
    why: dict[str, str] = field(default_factory=dict)  # by job
    idle: dict[str, str] = field(default_factory=dict)  # node -> why nothing runs there
    flaw: str = ""  # what the main session's model lacks, or why none will do

    def placement(self, job: str) -> Placement:
        """Return where a job is done."""
        return next(one for one in self.placements if one.name == self.jobs[job])


def plan_assignment(states: Sequence[NodeState], measured: Iterable[Measurement] = (),
                    memory: Mapping[str, float] | None = None) -> Assignment:
    """Return who does what where: of what the nodes have, what was measured, their GB."""
    seating = Seating(states, measured, memory or {})
    for rule in ASSIGNMENT_RULES:
        if rule is _assign_main or MAIN_JOB in seating.doing:
            rule(seating)

    placements = _plan_placements(seating)
    by_place = {(one.node, full_model_name(one.model.name)): one.name for one in placements}
    return Assignment(
        placements,
        jobs={job: by_place[seating.doing[job].candidate.place]
              for job in JOBS if job in seating.doing},
        why={job: seating.why[job] for job in JOBS if job in seating.doing},
        idle=_explain_idle(seating, states),
        flaw=_plan_flaw(seating, states))


def _plan_placements(seating: Seating) -> tuple[Placement, ...]:
    """Return the models to write: those with jobs in the jobs' order, then twins and spares."""
    jobs: dict[tuple[str, str], list[str]] = {place: [] for place in seating.seats}
    for job in JOBS:
        if job in seating.doing:
            jobs[seating.doing[job].candidate.place].append(job)

    strongest = seating.by_strength()
    order = [seating.doing[job] for job in JOBS if job in seating.doing]
    seats = list({seat.candidate.place: seat for seat in [*order, *strongest]}.values())
    labels = _label_seats(seats, jobs)

    placements = []
    for seat in seats:
        place = seat.candidate.place
        label = labels[place]
        limit = len(seats) if MAIN_JOB in jobs[place] else FALLBACKS
        heirs = _plan_heirs(seat, strongest, labels, limit=limit)
        why = "; ".join(dict.fromkeys(seating.why[job] for job in jobs[place]))
        if not why and label.twin:
            why = f"the same model as {label.twin}: they share its work"
        placements.append(Placement(
            label.name, place[0], seat.candidate.model, label.alias, seat.context,
            tuple(labels[heir.candidate.place].name for heir in heirs), tuple(jobs[place]),
            why or "stands in for the others"))
    return tuple(placements)


@dataclass(frozen=True)
class Label:
    """What a seat is called in the file."""

    name: str
    alias: str
    twin: str  # the one before it that has its alias


def _label_seats(seats: Sequence[Seat], jobs: Mapping[tuple[str, str], Sequence[str]]
                 ) -> dict[tuple[str, str], Label]:
    """Return what the seats are called: one model with one context has one alias everywhere."""
    labels: dict[tuple[str, str], Label] = {}
    firsts: dict[tuple[str, int], Label] = {}
    for seat in seats:
        place = seat.candidate.place
        same = firsts.get((place[1], seat.context))
        names = {label.name for label in labels.values()}
        name = _seat_name(jobs[place], place[0], same.name if same else "", names)
        if same:
            labels[place] = Label(name, same.alias, same.name)
            continue
        aliases = {label.alias for label in labels.values()}
        labels[place] = Label(name, _seat_alias(jobs[place], seat, aliases), "")
        firsts[place[1], seat.context] = labels[place]
    return labels


def _seat_name(jobs: Sequence[str], node: str, twin: str, taken: set[str]) -> str:
    """Return the name of a model by what it does; a twin has its node's behind it."""
    node = _make_name(node, "node")
    name = f"{twin or 'spare'}-{node}"
    if jobs and not twin:
        name = SEAT_NAMES[jobs[0]]
    return _free_name(name[:64], node, taken=taken)


def _seat_alias(jobs: Sequence[str], seat: Seat, taken: set[str]) -> str:
    """Return the alias of a model: Claude Code's tier where its job is one's, else its name."""
    for job in jobs:
        if job in SEAT_ALIASES:
            return SEAT_ALIASES[job]
    alias = _make_name(re.sub(":latest$", "", seat.candidate.model.name), "model")
    if set(re.split("[^a-z]+", alias)) & set(CLAUDE_WORDS):  # would be taken for a tier's
        alias = "local"
    return _free_name(alias, _make_name(seat.candidate.node, "node"), taken=taken)


def _plan_heirs(seat: Seat, strongest: Sequence[Seat], labels: Mapping[tuple[str, str], Label],
                *, limit: int) -> list[Seat]:
    """Return who stands in for a model: the strongest of the other machines, no alias twice."""
    least = min(seat.context, MAIN_CONTEXT_TOKENS)
    known = {labels[seat.candidate.place].alias}
    heirs: list[Seat] = []
    for other in strongest:
        alias = labels[other.candidate.place].alias
        if len(heirs) == limit:
            break
        if other.candidate.node == seat.candidate.node or alias in known or other.context < least:
            continue
        known.add(alias)
        heirs.append(other)
    return heirs


def _show_strength(seating: Seating, job: str) -> str:
    """Return what made a model the strongest for a job."""
    candidate = seating.doing[job].candidate
    role = "implementer" if job == MAIN_JOB else job
    score = candidate.score(job)
    if score and seating.pool.strength(candidate, job) == score.share:
        return f"{score.passed} of {score.asked} trials of an {role}"
    words = f"{parameters_of(candidate.model):g} B"
    if not parameters_of(candidate.model):
        words = f"{candidate.model.size / 1e9:.1f} GB"
    return f"{words}, a coder" if _CODER.search(candidate.model.name.lower()) else words


def _explain_idle(seating: Seating, states: Sequence[NodeState]) -> dict[str, str]:
    """Return {node: why nothing runs there} of the nodes that answered."""
    busy = {node for node, _ in seating.seats}
    idle: dict[str, str] = {}
    for state in states:
        if not state.online or state.name in busy:
            continue
        mine = seating.pool.all_at(state.name)
        if not state.models:
            idle[state.name] = "it has no model"
        elif not mine:
            idle[state.name] = "none of its models can chat there"
        elif not any(one.calls_tools for one in mine):
            idle[state.name] = "none of its models is known to call tools"
        elif not any(_fits_job(one, MAIN_JOB) for one in mine):
            idle[state.name] = "its models hold too little"
        else:
            idle[state.name] = "its models do not fit its memory"
    return idle


def _plan_flaw(seating: Seating, states: Sequence[NodeState]) -> str:
    """Return what the main session's model lacks, or why the first that is there will not do."""
    if MAIN_JOB in seating.doing:
        candidate = seating.doing[MAIN_JOB].candidate
        flaw = candidate.rating.flaw
        return f"{candidate.model.name} {flaw}" if flaw else ""
    for state in states:
        for model in state.models:
            flaw = rate_model(model).flaw
            if flaw:
                return f"{model.name} {flaw}"
    return "no model fits the memory of its machine" if seating.pool.has_any() else ""


# -- machines that nobody named --

SCAN_PORTS = (OLLAMA_PORT, 1234, 8080, 8000)  # Ollama, LM Studio, llama.cpp, vLLM: as they come
SCAN_PREFIX = 22  # of the largest network that is scanned: 1,022 addresses
PEERS_LIMIT = 256
NET_EXAMPLE = "192.168.1.0/24"
# What Tailscale's peers run that serves no models.
_PEER_PHONES = ("ios", "android", "tvos")


@dataclass(frozen=True)
class Peer:
    """A machine that Tailscale knows."""

    name: str
    address: str  # in the tailnet
    others: tuple[str, ...] = ()  # where else it was seen, as on the LAN


def parse_network(text: str, command: str) -> str:
    """Return a network that may be scanned: private, IPv4, not too large."""
    def refuse(why: str, status: int = EXIT_USAGE) -> NoReturn:
        raise FleetError("scan-network", f"{command}: `{clean_name(text)}` {why}", status=status,
                         fix=f"subagent-fleet {command} --scan {NET_EXAMPLE}")

    try:
        network = ipaddress.IPv4Network(text if "/" in text else f"{text}/24", strict=False)
    except ValueError:
        refuse(f"is no network of IPv4 such as {NET_EXAMPLE}")
    if not any(network.subnet_of(ipaddress.IPv4Network(private))
               for private in PRIVATE_NETWORKS if ":" not in private):
        refuse("is not a private network; others are never scanned", EXIT_REFUSED)
    if network.prefixlen < SCAN_PREFIX:
        refuse(f"is too large; at most a /{SCAN_PREFIX} is scanned")
    return str(network)


def clean_name(text: str) -> str:
    """Return what was typed for a name, short and on one line."""
    return re.sub("[^ -~]", "?", text)[:64]


def plan_networks(addresses: Iterable[str]) -> list[str]:
    """Return the /24 of each private network that a machine with these addresses is in."""
    networks = []
    for address in addresses:
        # Tailscale's is no neighbourhood: it says itself who is there.
        if address_kind(address) == "LAN" and is_private(address) and ":" not in address:
            network = str(ipaddress.IPv4Network(f"{address}/24", strict=False))
            if network not in networks:
                networks.append(network)
    return networks


def plan_places(networks: Iterable[str], peers: Iterable[Peer]) -> list[tuple[str, int]]:
    """Return each (address, port) that a scan knocks at, Ollama's port of all addresses first."""
    addresses = [peer.address for peer in peers]
    for network in networks:
        addresses += map(str, ipaddress.IPv4Network(network).hosts())
    unique = dict.fromkeys(addresses)
    return [(address, port) for port in SCAN_PORTS for address in unique]


def parse_peers(text: str) -> list[Peer] | None:
    """Return the machines in the answer of `tailscale status --json`; None: it is not running.

    Without peers, `Peer` is null. Phones, machines of others and those that are off are left out.
    """
    status = parse_object(text) or {}
    if status.get("BackendState") != "Running":
        return None
    entries = status.get("Peer")
    if isinstance(entries, dict):
        entries = list(entries.values())

    peers = []
    for entry in entries[:PEERS_LIMIT] if isinstance(entries, list) else ():
        peer = _parse_peer(entry)
        if peer:
            peers.append(peer)
    return sorted(peers, key=lambda peer: (peer.name, peer.address))


def _parse_peer(entry: object) -> Peer | None:
    """Return a peer that could serve models, else None."""
    if not isinstance(entry, dict) or entry.get("Online") is not True:
        return None
    foreign = any(entry.get(key) for key in ("Expired", "ShareeNode", "Location"))
    if foreign or str(entry.get("OS")).lower() in _PEER_PHONES:
        return None

    addresses = entry.get("TailscaleIPs")
    inside = [address for address in addresses if _is_tailnet_address(address)] \
        if isinstance(addresses, list) else []
    if not inside:
        return None
    seen = entry.get("Addrs")
    places = [*(seen if isinstance(seen, list) else ()), entry.get("CurAddr")]
    others = [place.rpartition(":")[0] for place in places if isinstance(place, str)]
    name = str(entry.get("DNSName") or entry.get("HostName") or inside[0]).partition(".")[0]
    return Peer(_make_name(name, "peer"), inside[0], tuple(filter(None, others)))


def _is_tailnet_address(address: object) -> bool:
    """Tell whether this is an IPv4 address as only Tailscale gives it."""
    return isinstance(address, str) and bool(re.fullmatch(r"100(\.\d{1,3}){3}", address)) \
        and address_kind(address) == "Tailscale"


@dataclass(frozen=True)
class Found:
    """A machine that a scan found, and what it said."""

    node: Node
    state: NodeState
    runs: str  # in words


@dataclass(frozen=True)
class Scan:
    """What a scan came to."""

    networks: tuple[str, ...]
    peers: tuple[Peer, ...]
    counts: dict[str, int]  # of addresses: open, refused, silent, unreachable
    found: tuple[Found, ...]
    others: tuple[tuple[str, str], ...]  # (address:port, why) of what answers and is something else
    notes: tuple[str, ...]  # what could not be looked at


def name_place(address: str, port: int, peers: Iterable[Peer], taken: set[str]) -> str:
    """Return a name for a machine that was found: Tailscale's, else by its address."""
    name = "lan-" + address.rpartition(".")[2]
    for peer in peers:
        if address == peer.address or address in peer.others:
            name = peer.name
    return _free_name(name, str(port), taken=taken)


# -- what `init` proposes --

def _context_for(model: NodeModel, wanted: int) -> int:
    """Return a context for a model: the wanted one, or what it was trained for."""
    return max(LEAST_CONTEXT_TOKENS, min(model.trained_context or wanted, wanted))


PLACEHOLDERS = ("qwen3:8b", "qwen3-coder:30b")  # small, heavy


@dataclass(frozen=True)
class StarterModel:
    """How `init` serves a model of one size."""

    alias: str
    context: int
    timeout: int


STARTER_MODELS = {
    # 2.1.326 compacts 32768 before its first turn.
    "heavy": StarterModel("claude-sonnet-local", context=65536, timeout=600),
    "small": StarterModel("claude-haiku-local", context=MAIN_CONTEXT_TOKENS, timeout=300)}


@dataclass(frozen=True)
class Starter:
    """What `init` writes."""

    tree: dict[str, dict[str, dict[str, Any]]]  # `nodes`, `models` and `agents` by name
    assignment: Assignment  # without placements, the models are placeholders

    @property
    def has_models(self) -> bool:
        return bool(self.assignment.placements)

    @property
    def flaw(self) -> str:
        return self.assignment.flaw

    @property
    def notes(self) -> dict[str, str]:
        """What the file says above each model."""
        return {placement.name: describe_placement(placement)
                for placement in self.assignment.placements}


def describe_placement(placement: Placement) -> str:
    """Return in a line for whom a model is there, and why."""
    if not placement.jobs:
        return f"For whoever waits: {placement.why}."
    return f"For {join_words(placement.jobs)}: {placement.why}."


def join_words(words: Sequence[str]) -> str:
    """Return `a, b and c`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def plan_starter(states: Sequence[NodeState], measured: Iterable[Measurement] = (),
                 memory: Mapping[str, float] | None = None) -> Starter:
    """Return the fleet of what was found, as it is assigned."""
    assignment = plan_assignment(states, measured, memory)
    nodes = _starter_nodes(states)
    models = {placement.name: _starter_model(placement) for placement in assignment.placements}
    models = models or _placeholder_models(list(nodes))

    agents = {}
    for name, role in ROLES.items():
        model = assignment.jobs.get(name) or f"{role.size}-coder"
        agents[name] = {"model": model, "description": role.description,
                        "tools": list(role.tools)}
    return Starter({"nodes": nodes, "models": models, "agents": agents}, assignment)


def plan_provider(state: NodeState) -> dict[str, str]:
    """Return the key that says what a machine runs, where that is not Ollama."""
    return {} if state.provider == "ollama" else {"provider": state.provider}


def _starter_nodes(states: Sequence[NodeState]) -> dict[str, dict[str, Any]]:
    """Return the nodes to write: all but this machine where only others answered."""
    anybody = any(state.online for state in states)
    nodes = {}
    for state in states:
        is_unasked = (state.name, state.endpoint) == ("local", OLLAMA_ENDPOINT)
        if state.online or not anybody or not is_unasked:
            nodes[state.name] = {"endpoint": state.endpoint, **plan_provider(state), "tags": []}
    return nodes


def _starter_model(placement: Placement) -> dict[str, Any]:
    """Return a model's keys in the fleet file."""
    size = "heavy" if placement.context > MAIN_CONTEXT_TOKENS else "small"
    if MAIN_JOB in placement.jobs:
        size = "heavy"
    model: dict[str, Any] = {
        "node": placement.node,
        "ollama_model": placement.model.name,
        "litellm_alias": placement.alias,
        "timeout": STARTER_MODELS[size].timeout,
        "context": placement.context,
        "max_parallel": 1}
    if placement.fallback:
        model["fallback"] = list(placement.fallback)
    return model


def _placeholder_models(nodes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the models to write where none was found."""
    models = {}
    for size, node, name in (("heavy", nodes[-1], PLACEHOLDERS[1]),
                             ("small", nodes[0], PLACEHOLDERS[0])):
        usual = STARTER_MODELS[size]
        models[f"{size}-coder"] = {
            "node": node, "ollama_model": name, "litellm_alias": usual.alias,
            "timeout": usual.timeout, "context": usual.context, "max_parallel": 1}
    if nodes[0] != nodes[-1]:
        models["heavy-coder"]["fallback"] = ["small-coder"]
        models["small-coder"]["fallback"] = ["heavy-coder"]
    return models


# -- what `worker` proposes --

def plan_worker_block(name: str, state: NodeState,
                      reached: Iterable[NodeState]) -> dict[str, dict[str, Any]]:
    """Return the `nodes:` and `models:` to paste of a worker, `reached` at its addresses."""
    node = _make_name(name.split(".")[0], "worker")
    models: dict[str, dict[str, Any]] = {}
    for placement in plan_assignment([state]).placements:
        model = _make_name(re.sub(":latest$", "", placement.model.name), "model")
        models[_free_name(model, node, taken=set(models))] = {
            "node": node, "ollama_model": placement.model.name,
            "litellm_alias": f"{model}-local" if model in CLAUDE_WORDS else model,
            "context": _context_for(placement.model, MAIN_CONTEXT_TOKENS)}
    endpoint = _best_endpoint(name, state, reached)
    return {"nodes": {node: {"endpoint": endpoint, **plan_provider(state)}}, "models": models}


def _best_endpoint(name: str, state: NodeState, reached: Iterable[NodeState]) -> str:
    """Return the address to write: one that answers, of the kind that is preferred."""
    def preference(place: NodeState) -> tuple[bool, int, str]:
        return not place.online, ADDRESS_KINDS.index(address_kind(place.name)), place.endpoint

    places = sorted(reached, key=preference)
    return places[0].endpoint if places else state.endpoint.replace("127.0.0.1", name)


def _make_name(text: str, otherwise: str) -> str:
    """Return text as a name that a fleet file accepts."""
    return re.sub("[^A-Za-z0-9._]+", "-", text).strip("-._")[:64].lower() or otherwise


# -- what `add` proposes --

def plan_addition(fleet: Fleet, state: NodeState,
                  models: Iterable[NodeModel]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the `nodes:` and `models:` to add: what the fleet serves already shares its alias."""
    added: dict[str, dict[str, Any]] = {}
    aliases = {model.alias for model in fleet.models.values()}
    for model in models:
        name = _free_name(_make_name(re.sub(":latest$", "", model.name), "model"), state.name,
                          taken={*fleet.models, *added})
        twins = [other for other in fleet.models.values()
                 if full_model_name(other.ollama_model) == full_model_name(model.name)]
        if twins:
            added[name] = {"node": state.name, "ollama_model": model.name,
                           "litellm_alias": twins[0].alias, "context": twins[0].context,
                           "timeout": twins[0].timeout}
        else:
            alias = f"{name}-local" if name in CLAUDE_WORDS else name
            added[name] = {"node": state.name, "ollama_model": model.name,
                           "litellm_alias": _free_name(alias, state.name, taken=aliases),
                           "context": _context_for(model, MAIN_CONTEXT_TOKENS)}
        aliases.add(added[name]["litellm_alias"])
    added_node = {"endpoint": state.endpoint, **plan_provider(state)}
    return {"nodes": {state.name: added_node}, "models": added}


def _free_name(name: str, more: str, *, taken: set[str]) -> str:
    """Return a name that is not taken: with the node's behind it, then with a number."""
    number = 1
    free = name
    while free in taken:
        behind = f"-{more}" if number == 1 else f"-{more}-{number}"
        free = name[:64 - len(behind)] + behind if len(behind) < 64 else f"{name[:50]}-{number}"
        number += 1
    return free


def plan_added_models(fleet: Fleet, state: NodeState) -> list[NodeModel]:
    """Return what `add` takes of a machine unasked: what the fleet has, and its strongest."""
    known = {full_model_name(model.ollama_model) for model in fleet.models.values()}
    ranked = [candidate.model for candidate in rank_models([state])]
    chosen = [model for model in ranked if full_model_name(model.name) in known]
    return chosen + [model for model in ranked[:1] if model not in chosen]


# == 6. Findings ==============================================================
#
# Takes a Fleet and the Facts that were gathered; gives Findings: what is so, what mends it.
# `validate` runs LINTS, which know the file alone; `doctor` runs CHECKS, which know what was
# seen as well. A new finding is a function with its row, `@lint` or `@check`, above it.

LITELLM_INSTALL = ("uv tool install --python 3.12 'litellm[proxy]==1.106.2' "
                   "(or pipx install …)")
CLAUDE_INSTALL = "npm install -g @anthropic-ai/claude-code@latest"
OUR_GATEWAY = "this fleet's gateway"
OLD_GATEWAY = "a gateway with an older config"
FAR_GATEWAY = "a gateway elsewhere"
TOOL_CALLER = "qwen3-coder:30b"  # a model that calls tools, to name where one does not
EDIT_TOOLS = {"Edit", "Write", "NotebookEdit"}
KNOWN_TOOLS = """
    Agent AskUserQuestion Bash BashOutput CronCreate CronDelete CronList Edit EnterPlanMode
    EnterWorktree ExitPlanMode ExitWorktree Glob Grep KillShell LSP ListAgents
    ListMcpResourcesTool Monitor NotebookEdit PowerShell PushNotification Read
    ReadMcpResourceTool ReportFindings ScheduleWakeup SendMessage Skill Task TaskCreate
    TaskGet TaskList TaskOutput TaskStop TaskUpdate ToolSearch WebFetch WebSearch Workflow
    Write
""".split()
KNOWN_FRONTMATTER = """
    color maxTurns effort permissionMode disallowedTools skills memory isolation background
    omitClaudeMd mcpServers hooks initialPrompt autoCompactWindow observer observerMessage
    observeSubagents experimental
""".split()


# -- warnings: what the file alone shows --

LINTS: list[_Rule] = []


def lint(rule: _Rule) -> _Rule:
    """Add a row to LINTS: a rule that yields what `warn` makes of its words."""
    LINTS.append(rule)
    return rule


def lint_fleet(fleet: Fleet) -> Iterator[Finding]:
    """Yield a warning for each thing that is allowed and will disappoint."""
    def warn(slug: str, path: tuple[str | int, ...], *, what: str, fix: str,
             key: bool = False) -> Finding:
        path = as_spelled(fleet.document.value, path)
        dotted = ".".join(step for step in path if isinstance(step, str))
        where, excerpt = fleet.document.locate(path, key=key)
        return Finding(slug, "warning", f"{dotted}: {what}", where, excerpt, fix)

    for rule in LINTS:
        yield from rule(fleet, warn)


@lint
def _lint_gateway_host(fleet: Fleet, warn: _Warn) -> Iterator[Finding]:
    """Warn of a gateway that others can reach."""
    host = fleet.gateway.host
    if not is_loopback(host):
        yield warn("exposed-gateway", ("project", "gateway", "host"),
                   what=f"`{host}` offers your models to the network; only the key protects "
                        "them",
                   fix="write `host: 127.0.0.1`, or keep it on a private network with a "
                       "strong key")


@lint
def _lint_public_endpoints(fleet: Fleet, warn: _Warn) -> Iterator[Finding]:
    """Warn of prompts that cross the internet in clear."""
    for name, node in fleet.nodes.items():
        host = _host_of(node.endpoint)
        if node.endpoint.startswith("http:") and address_kind(host) == "public":
            yield warn("public-endpoint", ("nodes", name, "endpoint"),
                       what=f"{host} is a public address and http sends every prompt in "
                            "clear",
                       fix="use a LAN, Tailscale or WireGuard address, or https")


@lint
def _lint_endpoint_paths(fleet: Fleet, warn: _Warn) -> Iterator[Finding]:
    """Warn of the address at which Ollama speaks another dialect."""
    for name, node in fleet.nodes.items():
        if node.endpoint.endswith("/v1"):
            yield warn("endpoint-v1", ("nodes", name, "endpoint"),
                       what="`/v1` is where Ollama speaks to other programs",
                       fix=f"write `endpoint: {node.endpoint[:-len('/v1')]}`")


@lint
def _lint_endpoints_of_ours(fleet: Fleet, warn: _Warn) -> Iterator[Finding]:
    """Warn of a gateway that would ask itself."""
    for name, node in fleet.nodes.items():
        if is_gateway_address(fleet.gateway, node.endpoint):
            fix = f"write `endpoint: {OLLAMA_ENDPOINT}`"
            if fleet.gateway.port == OLLAMA_PORT:
                fix = "write `port: 4000` in project.gateway"
            yield warn("endpoint-gateway", ("nodes", name, "endpoint"), fix=fix,
                       what=f"{node.endpoint} is this fleet's own gateway, not an Ollama")


@lint
def _lint_idle_nodes(fleet: Fleet, warn: _Warn) -> Iterator[Finding]:
    """Warn of machines that get no work."""
    busy = {model.node for model in fleet.models.values()}
    for name in fleet.nodes:
        if name not in busy:
            yield warn("unused-node", ("nodes", name), key=True, what="no model runs on it",
                       fix=f"write `node: {quote_yaml(name)}` in one of models "
                           "(`subagent-fleet discover` shows what it has), or remove it")


def _guess_gigabytes(ollama_model: str) -> float:
    """Return about how many GB a model takes by its name, at four bits a weight; 0: unknown."""
    size = billions(ollama_model)
    return size * 0.6 + 1 if size else 0


def _guess_loads(fleet: Fleet) -> dict[str, dict[str, float]]:
    """Return {node: {full name: about how much memory it takes}} of the models of each."""
    loads: dict[str, dict[str, float]] = {name: {} for name in fleet.nodes}
    for model in fleet.models.values():
        if not model.cloud:
            need = _guess_gigabytes(model.ollama_model)
            loads[model.node][full_model_name(model.ollama_model)] = need
    return loads


def _guess_rooms(fleet: Fleet) -> dict[str, float]:
    """Return {node: the GB left beside its models, by their names} where it is known."""
    loads = _guess_loads(fleet)
    return {name: node.memory_gb - sum(loads[name].values())
            for name, node in fleet.nodes.items() if node.memory_gb}


def _plan_move(rooms: Mapping[str, float], needs: Iterable[tuple[Model, float]]) -> str:
    """Return what to write so that one of these runs where there is room, or nothing."""
    for model, need in needs:
        for name, room in rooms.items():
            if name != model.node and need <= room:
                return f"write `node: {quote_yaml(name)}` in models.{model.name}"
    return ""


PART_THEM = "move one to another node, or choose a smaller one"


@lint
def _lint_large_models(fleet: Fleet, warn: _Warn) -> Iterator[Finding]:
    """Warn of a model that is larger than its node."""
    rooms = _guess_rooms(fleet)
    for name, model in fleet.models.items():
        memory = fleet.nodes[model.node].memory_gb
        need = _guess_gigabytes(model.ollama_model)
        if memory and need > memory and not model.cloud:
            fix = _plan_move(rooms, [(model, need)])
            most = (memory - 1) / 0.6  # as _guess_gigabytes has it
            if not fix and most >= 1:
                fix = f"choose one of at most {int(most)}b, or correct `memory_gb`"
            yield warn("model-too-large", ("models", name, "ollama_model"),
                       what=f"by its name, {model.ollama_model} needs about {need:.0f} GB; "
                            f"{model.node} has {memory:g}",
                       fix=fix or "choose a larger node, or correct `memory_gb`")


@lint
def _lint_memory(fleet: Fleet, warn: _Warn) -> Iterator[Finding]:
    """Warn of models that push each other out of their node."""
    rooms = _guess_rooms(fleet)
    for name, needs in _guess_loads(fleet).items():
        memory = fleet.nodes[name].memory_gb
        if not memory:
            continue
        fitting = [need for need in needs.values() if need <= memory]
        total = sum(fitting)  # what does not fit alone is said alone
        if len(fitting) > 1 and total > memory:
            residents = [(model, _guess_gigabytes(model.ollama_model))
                         for model in fleet.models.values()
                         if model.node == name and not model.cloud]
            yield warn("memory-short", ("nodes", name, "memory_gb"),
                       what=f"by their names, its models need about {total:.0f} GB and "
                            "evict each other",
                       fix=_plan_move(rooms, residents) or PART_THEM)


@lint
def _lint_aliases(fleet: Fleet, warn: _Warn) -> Iterator[Finding]:
    """Warn of one alias that is now this model, now that one."""
    owners: dict[str, Model] = {}
    for name, model in fleet.models.items():
        owner = owners.setdefault(model.alias, model)
        if full_model_name(owner.ollama_model) != full_model_name(model.ollama_model):
            yield warn("alias-collision", ("models", name, "litellm_alias"),
                       what=f"`{model.alias}` is also the alias of {owner.name}, a different "
                            f"model: {owner.ollama_model}, {model.ollama_model}",
                       fix="give each its own alias")


@lint
def _lint_contexts(fleet: Fleet, warn: _Warn) -> Iterator[Finding]:
    """Warn of one model that is loaded anew with each change of its context."""
    firsts: dict[tuple[str, str], Model] = {}
    for name, model in fleet.models.items():
        twin = firsts.setdefault((model.node, full_model_name(model.ollama_model)), model)
        if twin.context != model.context:
            yield warn("context-thrash", ("models", name, "context"),
                       what=f"{model.context}, but {twin.context} in models.{twin.name}, "
                            "the same model: each switch reloads it",
                       fix=f"write `{max(twin.context, model.context)}` for both")


def _plan_prompts(fleet: Fleet) -> dict[str, list[str]]:
    """Return {model: the tiers in which it reads Claude Code's own prompt}."""
    served: dict[str, list[str]] = {name: [] for name in fleet.models}
    for tier, name in plan_tiers(fleet).items():
        # A haiku that was only planned never reads it.
        if tier != "haiku" or tier in fleet.claude:
            served[name].append(tier)
    return served


@lint
def _lint_small_contexts(fleet: Fleet, warn: _Warn) -> Iterator[Finding]:
    """Warn of a context that Claude Code's own prompt fills."""
    served = _plan_prompts(fleet)
    for name, model in fleet.models.items():
        least = SMALL_CONTEXT_TOKENS
        why = "a subagent's first request alone takes 2,000 tokens"
        if served[name]:
            least = MAIN_CONTEXT_TOKENS
            why = (f"it serves {', '.join(served[name])}, and Claude Code's own prompt takes "
                   "10,000 to 18,000 tokens")
        if model.context < least:
            yield warn("small-context", ("models", name, "context"),
                       what=f"{model.context}; {why}", fix=f"write `context: {least}` or more")


@lint
def _lint_outputs(fleet: Fleet, warn: _Warn) -> Iterator[Finding]:
    """Warn of an answer that is longer than all that the model can hold."""
    for name, model in fleet.models.items():
        # The default is nobody's wish: of a context below it `small-context` says enough.
        if model.max_output > model.context and model.max_output != Model.max_output:
            most = max(model.context // 2, LEAST_CONTEXT_TOKENS)
            yield warn("output-above-context", ("models", name, "max_output"),
                       what=f"{model.max_output}, but its context of {model.context} holds "
                            "the prompt and the answer together",
                       fix=f"write `max_output: {most}` or less")


@lint
def _lint_main_fallback(fleet: Fleet, warn: _Warn) -> Iterator[Finding]:
    """Warn of a main session that ends with one machine, where another could go on."""
    main = fleet.models[plan_tiers(fleet)["main"]]
    helpers = [fleet.models[name] for name in main.fallback]
    helpers += [model for model in fleet.models.values() if model.alias == main.alias]
    if any(helper.node != main.node for helper in helpers):
        return

    heirs = [model.name for model in plan_main_fallbacks(fleet) if model.node != main.node]
    if heirs:
        yield warn("no-fallback", ("models", main.name), key=True,
                   what=f"it serves the main session, which ends when {main.node} sleeps",
                   fix=f"write `{_show_fallback(main, heirs[0])}`")


def _show_fallback(model: Model, more: str) -> str:
    """Return a model's fallbacks and one more as the file holds them."""
    return f"fallback: [{', '.join(map(quote_yaml, [*model.fallback, more]))}]"


@lint
def _lint_unused_models(fleet: Fleet, warn: _Warn) -> Iterator[Finding]:
    """Warn of models that get no work."""
    used = plan_used_models(fleet)
    main = fleet.models[plan_tiers(fleet)["main"]]
    heirs = {model.name for model in plan_main_fallbacks(fleet)}
    for name in fleet.models:
        if name not in used:
            fix = f"write `model: {quote_yaml(name)}` in one of agents, or remove it"
            if name in heirs:
                line = _show_fallback(main, name)
                fix = f"write `{line}` in models.{main.name}, or remove it"
            yield warn("unused-model", ("models", name), key=True,
                       what="no agent, tier or fallback uses it", fix=fix)


@lint
def _lint_tools(fleet: Fleet, warn: _Warn) -> Iterator[Finding]:
    """Warn of tools that Claude Code does not have."""
    for name, agent in fleet.agents.items():
        for index, tool in enumerate(agent.tools or ()):
            path = ("agents", name, "tools", index)
            bare = tool.split("(")[0]
            if bare in GONE_TOOLS:
                heir = GONE_TOOLS[bare]
                yield warn("tool-gone", path,
                           what=f"Claude Code dropped `{bare}`; generate mends it",
                           fix=f"write `{heir}`" if heir else "remove it")
            elif _looks_mistyped(bare):
                yield warn("tool-unknown", path,
                           what=f"Claude Code is not known to have `{bare}`",
                           fix=nearest(bare, KNOWN_TOOLS) or f"known: {some_of(KNOWN_TOOLS)}")


def _looks_mistyped(tool: str) -> bool:
    """Tell whether a tool is meant to be one of Claude Code's own, and is none."""
    if tool in KNOWN_TOOLS or "__" in tool:  # `mcp__server__tool`
        return False
    return tool[0].islower() or bool(nearest(tool, KNOWN_TOOLS))


@lint
def _lint_frontmatter(fleet: Fleet, warn: _Warn) -> Iterator[Finding]:
    """Warn of keys that Claude Code passes over."""
    for name, agent in fleet.agents.items():
        for key in agent.frontmatter:
            if key not in KNOWN_FRONTMATTER:
                fix = nearest(key, KNOWN_FRONTMATTER) or f"known: {some_of(KNOWN_FRONTMATTER)}"
                yield warn("unknown-frontmatter", ("agents", name, "frontmatter", key),
                           what="Claude Code is not known to read it", fix=fix, key=True)


@lint
def _lint_editors(fleet: Fleet, warn: _Warn) -> Iterator[Finding]:
    """Warn of agents that shall edit on a model which only says that it does."""
    for name, agent in fleet.agents.items():
        model = fleet.models[agent.model].ollama_model
        edits = agent.tools is None or EDIT_TOOLS & set(plan_tools(agent.tools))
        if edits and prints_calls(model):
            yield warn("prints-tool-calls", ("agents", name, "model"),
                       what=f"it may edit, but {model} is known to print tool calls as text "
                            "instead of making them",
                       fix=f"choose a model that calls tools, such as {TOOL_CALLER}")


def lint_key(fleet: Fleet, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield that the environment holds a weak key, which beats the one generated."""
    variable = fleet.gateway.master_key_env
    key = environ.get(variable)
    is_exposed = not is_loopback(fleet.gateway.host)
    if key is None or (len(key) >= 16 and len(set(key)) >= 8):  # not sk-local-dev and the like
        return

    why = "it has fewer than 16 characters" if len(key) < 16 else "it is easy to guess"
    if is_exposed:
        why += ", and the gateway listens beyond this machine"
    yield Finding("weak-key", "error" if is_exposed else "warning",
                  f"the key in ${variable} is weak: {why}",
                  fix=f"unset {variable}; rm -f {ENVIRONMENT_FILE}; subagent-fleet generate")


# -- doctor: what was seen --

@dataclass(frozen=True)
class Exposure:
    """Who can reach a node beside the fleet."""

    addresses: tuple[str, ...] = ()  # of its host
    answers_any_page: bool = False  # of any site that a browser near it opens


@dataclass(frozen=True)
class Facts:
    """What doctor saw, gathered once: its checks look at nothing else."""

    # The config's own findings.
    problems: Sequence[Finding] = ()
    # By node: what it answered, and who else can reach it.
    states: dict[str, NodeState] = field(default_factory=dict)
    looks: dict[str, Exposure] = field(default_factory=dict)
    # Who holds the gateway's port; see check_gateway.
    holder: str = ""
    # The versions of the programs, None where they were not found; LiteLLM's also tells
    # whether a litellm_init.pth lies beside it.
    claude: str | None = None
    litellm: str | None = None
    # By name: the other programs that files were generated for.
    programs: dict[str, SeenProgram] = field(default_factory=dict)
    # By path: what that settings file puts into the environment.
    settings: dict[str, dict[str, object]] = field(default_factory=dict)
    # By path: the text of an agent, None where it cannot be read.
    agents: dict[str, str | None] = field(default_factory=dict)
    # What `generate` would do, or why that is not known.
    changes: Sequence[Change] = ()
    file_problems: Sequence[Finding] = ()
    # The environment file, and the ids of what is wrong with it.
    env_path: str = ""
    leaks: Sequence[str] = ()


@dataclass(frozen=True)
class SeenProgram:
    """What doctor saw of a program of HARNESSES that is to run on the fleet."""

    version: str = ""  # "": it is not on the PATH
    has_key: bool = True  # the variable with the key is set here
    listed: str | None = None  # which models it knows, where it can say so without asking anybody


@dataclass(frozen=True)
class Check:
    """A row of CHECKS: the heading that its findings stand under, and who finds them."""

    topic: str
    find: Callable[[Any, Facts], Iterator[Finding]]  # the first is the Fleet, or None
    needs_fleet: bool


CHECKS: list[Check] = []


def check(topic: str, *, needs_fleet: bool = False) -> Callable[..., Any]:
    """Return what adds a function to CHECKS, under a topic."""
    def add(find: Callable[..., Iterator[Finding]]) -> Callable[..., Iterator[Finding]]:
        CHECKS.append(Check(topic, find, needs_fleet))
        return find

    return add


def plan_doctor(fleet: Fleet | None, facts: Facts, *,
                topics: Sequence[str] = ()) -> list[tuple[str, Finding]]:
    """Return (topic, Finding) for all that the checks, or those of some topics, have to say."""
    findings = []
    for row in CHECKS:
        is_asked = not topics or row.topic in topics
        is_able = fleet is not None or not row.needs_fleet
        if is_asked and is_able:
            findings += [(row.topic, finding) for finding in row.find(fleet, facts)]
    return findings


def plan_verdict(findings: Sequence[Finding]) -> str:
    """Return the one sentence a person wants, and what to type first."""
    errors = [finding for finding in findings if finding.level == "error"]
    warnings = [finding for finding in findings if finding.level == "warning"]
    counts = ", ".join(count_of(group, noun) for group, noun in (
        (errors, "error"), (warnings, "warning")) if group)
    if not counts:
        return "Ready: everything is in order."
    if not errors:
        return f"Ready, with {counts}."

    for finding in errors:
        if finding.fix:
            place = f"{finding.where}: " if finding.where else ""
            return f"Not ready: {counts}. Begin with: {place}{finding.fix}"
    return f"Not ready: {counts}."


def is_older(version: str, than: str) -> bool:
    """Tell whether a version is known (0.0.0 is none) and older."""
    numbers, limit = _version_numbers(version), _version_numbers(than)
    return any(numbers) and numbers < limit


def _version_numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d{1,6}", version)[:3]]


def quote_shell(text: str) -> str:
    """Return text as one word of every shell; of fish only without quotes and backslashes."""
    is_bare = re.fullmatch("(?a)[\\w./:-]+", text)
    return text if is_bare else "'" + text.replace("'", "'\\''") + "'"


def _locate(fleet: Fleet, *path: str) -> str:
    """Return where a key of the fleet file stands."""
    return fleet.document.locate(as_spelled(fleet.document.value, path))[0]


# -- This machine --

@check("This machine")
def _check_python(fleet: Fleet | None, facts: Facts) -> Iterator[Finding]:
    """Name the Python that runs this."""
    yield Finding("python", "ok", f"Python {sys.version.split()[0]}")


@check("This machine")
def _check_claude(fleet: Fleet | None, facts: Facts) -> Iterator[Finding]:
    """Find a Claude Code that takes an alias for what the environment says of it."""
    version = facts.claude
    if not version:
        yield Finding("claude-missing", "warning", "Claude Code is not on the PATH",
                      fix=CLAUDE_INSTALL)
    elif is_older(version, "2.1.198"):
        yield Finding("claude-old", "warning",
                      f"Claude Code {version} (npm's choice on Node below 22) takes every "
                      "`claude-…` alias for a window of 200,000 tokens", fix=CLAUDE_INSTALL)
    else:
        yield Finding("claude", "ok", f"Claude Code {version}")


@check("This machine")
def _check_litellm(fleet: Fleet | None, facts: Facts) -> Iterator[Finding]:
    """Find a LiteLLM that does no harm, where it is there or needed."""
    version = facts.litellm
    is_needed = fleet is not None and fleet.gateway.provider == "litellm"
    if not version:
        if is_needed:
            yield Finding("litellm-missing", "error",
                          "LiteLLM (Python 3.10+) is not on the PATH", fix=LITELLM_INSTALL)
    elif re.match(r"1\.82\.[78]$|.*litellm_init\.pth", version):
        yield Finding("litellm-poisoned", "error",
                      f"LiteLLM {version} steals credentials (OSV MAL-2026-2144)",
                      fix=f"remove it, change every secret of this machine, {LITELLM_INSTALL}")
    elif is_older(version, "1.104.0"):
        yield Finding("litellm-old", "error" if is_needed else "warning",
                      f"LiteLLM {version} without its key is an open proxy",
                      fix=LITELLM_INSTALL)
    else:
        yield Finding("litellm", "ok", f"LiteLLM {version}")


# -- Config --

@check("Config")
def _check_config(fleet: Fleet | None, facts: Facts) -> Iterator[Finding]:
    """Hand on what is wrong with the config, or disappoints in it."""
    if fleet is not None:
        yield Finding("config", "ok", f"{fleet.document.source} is valid")
    yield from facts.problems


# -- Nodes --

@check("Nodes", needs_fleet=True)
def _check_nodes_answer(fleet: Fleet, facts: Facts) -> Iterator[Finding]:
    """Say of each node what it answered, or why it did not and who then answers for it."""
    for state in facts.states.values():
        if state.online:
            yield Finding("node-online", "ok", f"{state.name}: {state.runs} at "
                          f"{state.endpoint}, {count_of(state.models, 'model')}")
            continue

        models = [model for model in fleet.models.values() if model.node == state.name]
        alone = [model.name for model in models
                 if not plan_route_state(fleet, facts.states, model).fallback]
        what = f"node `{state.name}`: {state.why} ({state.endpoint})"
        if alone:
            what += f"; nobody else answers for {', '.join(alone)}"
        yield Finding("node-offline", "error" if alone else "warning", what, fix=state.mend)


@dataclass(frozen=True)
class Hole:
    """What an Ollama does that is older than the version which mended it."""

    mended_in: str
    level: str
    harm: str


OLLAMA_HOLES = (  # the worst first (golang/vulndb, its history)
    Hole("0.1.34", "error", "lets whoever reaches it run code on it (CVE-2024-37032)"),
    Hole("0.17.1", "error", "lets whoever reaches it read its memory (CVE-2026-7482)"),
    Hole("0.31.2", "warning", "takes harmful model files without checking them"))


@check("Nodes", needs_fleet=True)
def _check_ollama_versions(fleet: Fleet, facts: Facts) -> Iterator[Finding]:
    """Name the nodes whose Ollama has a known hole."""
    for state in facts.states.values():
        yield from _ollama_holes(state, f"node `{state.name}`")


def _ollama_holes(state: NodeState, who: str) -> Iterator[Finding]:
    """Yield the worst that is known of an Ollama's version."""
    for hole in OLLAMA_HOLES if state.provider == "ollama" else ():
        if is_older(state.version, hole.mended_in):
            what = f"{who}: Ollama {state.version} {hole.harm}; mended in {hole.mended_in}"
            yield Finding("ollama-old", hole.level, what, fix="update it: ollama.com/download")
            return


@check("Nodes", needs_fleet=True)
def _check_exposure(fleet: Fleet, facts: Facts) -> Iterator[Finding]:
    """Name the nodes that web pages or the internet may use."""
    for name, look in facts.looks.items():
        if look.answers_any_page:
            fix = f"remove OLLAMA_ORIGINS on `{name}`, then restart Ollama"
            if fleet.nodes[name].provider != "ollama":
                fix = (f"give {kind_title(fleet.nodes[name].provider)} on `{name}` a key, and "
                       "write `api_key_env:`")
            yield Finding("open-origin", "warning", f"node `{name}` answers every web page "
                          "that a browser near it opens", fix=fix)
        for address in look.addresses:
            is_named = address in fleet.nodes[name].endpoint  # then it is a warning of the config
            if address_kind(address) == "public" and not is_named:
                yield _public_address(f"node `{name}`", address, "warning")


def _public_address(who: str, address: str, level: str) -> Finding:
    """Return the Finding on a machine that the internet may reach."""
    return Finding("public-address", level, f"{who}: the internet may reach it at {address}",
                   fix="close its port to the internet; use a LAN, Tailscale or WireGuard "
                       "address")


def _held_model(model: Model, state: NodeState) -> NodeModel:
    """Return a model as its node has it; where it does not, one of which nothing is known."""
    matches = find_models(state.models, model.ollama_model)
    return matches[0] if matches else NodeModel("")


@dataclass(frozen=True)
class Resident:
    """A model that its node has, as it will stand in memory there."""

    model: Model  # of those that use it, the one with the longest context
    held: NodeModel
    gigabytes: float


def _plan_residents(fleet: Fleet, state: NodeState) -> list[Resident]:
    """Return what a node will hold: one Ollama model once, with its longest context."""
    residents: dict[str, Resident] = {}
    for model in fleet.models.values():
        if model.node != state.name or model.cloud:
            continue
        held = _held_model(model, state)
        if not held.name or held.remote:
            continue
        context = min(model.context, held.trained_context or model.context)
        resident = Resident(model, held, plan_gigabytes(held, context))
        twin = residents.setdefault(held.name, resident)
        if twin.gigabytes < resident.gigabytes:
            residents[held.name] = resident
    return list(residents.values())


@check("Nodes", needs_fleet=True)
def _check_large_models(fleet: Fleet, facts: Facts) -> Iterator[Finding]:
    """Name the models that are larger than their node, with the context they will have."""
    guessed = {finding.what.partition(": ")[0] for finding in facts.problems
               if finding.slug == "model-too-large"}
    rooms = _guess_rooms(fleet)
    served = _plan_prompts(fleet)
    for name, state in facts.states.items():
        memory = fleet.nodes[name].memory_gb
        for resident in _plan_residents(fleet, state):
            model = resident.model
            is_said = f"models.{model.name}.{model.name_key}" in guessed
            if memory and resident.gigabytes > memory and not is_said:
                least = MAIN_CONTEXT_TOKENS if served[model.name] else SMALL_CONTEXT_TOKENS
                fix = (_plan_less_context(resident, memory, least)
                       or _plan_move(rooms, [(model, resident.gigabytes)])
                       or _plan_smaller_model(state, resident, memory)
                       or "choose a smaller model, or correct `memory_gb`")
                yield Finding("model-too-large", "warning",
                              f"models.{model.name}: {model.ollama_model} takes about "
                              f"{resident.gigabytes:.0f} GB with its context of "
                              f"{model.context}; `{name}` has {memory:g}",
                              _locate(fleet, "models", model.name, "context"), fix=fix)


def _plan_less_context(resident: Resident, memory: float, least: int) -> str:
    """Return the context to write with which a model fits, or nothing."""
    context = plan_fitting_context(resident.held, memory)
    return f"write `context: {context}`" if context >= least else ""


def _plan_smaller_model(state: NodeState, resident: Resident, memory: float) -> str:
    """Return what to write where a node has another model that fits, or nothing."""
    model = resident.model
    for placed in rank_models([state]):
        if plan_gigabytes(placed.model, model.context) <= memory:
            shown = quote_yaml(placed.model.name)
            return f"write `{model.name_key}: {shown}` in models.{model.name}"
    return ""


@check("Nodes", needs_fleet=True)
def _check_evictions(fleet: Fleet, facts: Facts) -> Iterator[Finding]:
    """Name the models that push each other out of their node."""
    guessed = {finding.what.partition(": ")[0] for finding in facts.problems
               if finding.slug == "memory-short"}
    rooms = _guess_rooms(fleet)
    for name, state in facts.states.items():
        memory = fleet.nodes[name].memory_gb
        residents = [resident for resident in _plan_residents(fleet, state)
                     if not memory or resident.gigabytes <= memory]  # else it is said alone
        if len(residents) < 2 or f"nodes.{name}.memory_gb" in guessed:
            continue

        need = sum(resident.gigabytes for resident in residents)
        is_short = memory is not None and need > memory
        if is_short or _spills(state):
            names = ", ".join(resident.held.name for resident in residents)
            moves = [(resident.model, resident.gigabytes) for resident in residents]
            yield Finding("evicts", "warning",
                          f"node `{name}`: {names} take about {need:.0f} GB with their "
                          "contexts, and evict each other", _locate(fleet, "nodes", name),
                          fix=_plan_move(rooms, moves) or PART_THEM)


def _spills(state: NodeState) -> bool:
    """Tell whether a node holds a model partly outside of its GPU."""
    return any(0 < (loaded.gpu_percent or 0) < 100 for loaded in state.loaded)


# -- Routes --

@check("Routes", needs_fleet=True)
def _check_routes(fleet: Fleet, facts: Facts) -> Iterator[Finding]:
    """Say of each model that its node serves it as it is asked, or what is in the way."""
    users = _tool_users(fleet)
    for model in fleet.models.values():
        state = facts.states[model.node]
        if not state.online:
            continue  # said of the node
        flaws = [*_presence_flaws(fleet, model, state),
                 *_ability_flaws(fleet, model, state, users=users[model.name]),
                 *_context_flaws(fleet, model, state)]
        yield from flaws
        if not flaws:
            yield Finding("route", "ok",
                          f"models.{model.name}: {model.ollama_model} on {model.node}")


def _tool_users(fleet: Fleet) -> dict[str, list[str]]:
    """Return {model: the agents and tiers that will ask it to call tools}."""
    users: dict[str, list[str]] = {name: [] for name in fleet.models}
    for agent in fleet.agents.values():
        if agent.tools != ():
            users[agent.model].append(agent.name)
    for tier, name in plan_tiers(fleet).items():
        users[name].append(tier)
    return users


def _presence_flaws(fleet: Fleet, model: Model, state: NodeState) -> Iterator[Finding]:
    """Yield that a model is not there, or only stands there for one at ollama.com."""
    if model.cloud:
        return
    held = _held_model(model, state)
    where = _locate(fleet, "models", model.name, "ollama_model")
    if not held.name:
        what = f"models.{model.name}: {model.ollama_model} is not on `{model.node}`"
        fix = f"subagent-fleet warmup --pull --model {model.name}"
        if not NODE_KINDS[state.provider].can_pull:
            fix = f"{obtain_model(state.provider, model.ollama_model)} on {model.node}"
        near = near_model(state.models, model.ollama_model)
        if near:  # a pull takes an hour, a typing mistake a second
            what += f", which has {near.name}"
            fix = f"{plan_correction(model, state)}, or: {fix}"
        yield Finding("model-missing", "error", what, where, fix=fix)
    elif held.remote:
        yield Finding("cloud-stub", "error", f"models.{model.name}: {model.ollama_model} is "
                      f"sent by `{model.node}` to {held.remote}", where,
                      fix="choose a local model, or add `cloud: true`")


def _ability_flaws(fleet: Fleet, model: Model, state: NodeState, *,
                   users: Sequence[str]) -> Iterator[Finding]:
    """Yield what will be asked of a model that it cannot do."""
    capabilities = _held_model(model, state).capabilities
    if capabilities is None:
        return  # an Ollama that does not say
    what = f"models.{model.name}: {model.ollama_model}"
    if users and "tools" not in capabilities:
        yield Finding("no-tools", "error",
                      f"{what} cannot call tools, which {', '.join(users)} will ask of it",
                      _locate(fleet, "models", model.name, "ollama_model"),
                      fix=f"choose a model that can, such as {TOOL_CALLER}")
    if model.thinking and "thinking" not in capabilities:
        title = kind_title(state.provider)
        yield Finding("no-thinking", "error", f"{what} cannot think; {title} refuses it",
                      _locate(fleet, "models", model.name, "thinking"),
                      fix="write `thinking: false`")


def _context_flaws(fleet: Fleet, model: Model, state: NodeState) -> Iterator[Finding]:
    """Yield that a context is more than the model was made for, or than it is loaded with."""
    what = f"models.{model.name}: {model.ollama_model}"
    where = _locate(fleet, "models", model.name, "context")
    trained = _held_model(model, state).trained_context
    wanted = min(model.context, trained or model.context)
    if wanted < model.context:
        yield Finding("context-untrained", "warning", f"{what} was made for {wanted}", where,
                      fix=f"write `context: {wanted}`")

    loaded = plan_route_state(fleet, {state.name: state}, model).loaded
    if loaded and 0 < loaded.context < wanted:
        yield Finding("context-short", "warning",
                      f"{what} is loaded with context {loaded.context}, not {wanted}", where,
                      fix=f"subagent-fleet warmup --model {model.name}")


# -- Gateway --

@check("Gateway", needs_fleet=True)
def _check_gateway_port(fleet: Fleet, facts: Facts) -> Iterator[Finding]:
    """Say who holds the gateway's port."""
    yield check_gateway(fleet, facts.holder)


def check_gateway(fleet: Fleet, holder: str) -> Finding:
    """Return the Finding on who holds the gateway's port: OUR_GATEWAY, a name, or nobody."""
    url = gateway_url(fleet.gateway)
    where = _locate(fleet, "project", "gateway", "port")
    if not holder and fleet.gateway.provider == "litellm":
        return Finding("litellm-down", "info", f"no gateway runs at {url}", where,
                       fix="`subagent-fleet up` starts LiteLLM; `subagent-fleet generate` says how "
                           "to start it in another terminal")
    if not holder:
        return Finding("port-free", "info", f"no gateway runs at {url}", where,
                       fix="`subagent-fleet serve` in another terminal, or `subagent-fleet up`")
    if holder == OUR_GATEWAY:
        return Finding("gateway-up", "ok", f"{holder} answers at {url}")
    if holder == OLD_GATEWAY:
        return Finding("gateway-old", "error",
                       f"the gateway at {url} serves this fleet as it was before a change",
                       where, fix="stop it and start it anew")
    if holder == FAR_GATEWAY:
        return Finding("gateway-elsewhere", "error",
                       f"{url} is not on this machine; it is not shown the key before you say so",
                       _locate(fleet, "project", "gateway", "host"), fix="subagent-fleet trust")
    if holder == "another program":
        what = f"another program answers at {url}"
        if fleet.gateway.provider == "litellm":
            what += "; LiteLLM would take another port"
        return Finding("port-taken", "error", what, where, fix=OTHER_PORT)
    return Finding("gateway-other", "error", f"another fleet's gateway ({holder}) answers at "
                   f"{url}, or this one's, which has an older key or lacks aliases", where,
                   fix=OTHER_PORT)


# -- Claude Code --

@check("Claude Code")
def _check_settings(fleet: Fleet | None, facts: Facts) -> Iterator[Finding]:
    """Name the settings files that beat the fleet's environment; their values are secrets."""
    for path, environment in facts.settings.items():
        names = overridden_names(fleet, environment) if fleet else []
        if names:
            listed = ", ".join(names)
            level = "error" if any(map(leads_away, names)) else "warning"
            yield Finding("settings-override", level,
                          f"{path} sets {listed} under `env`, which beats the fleet's "
                          "environment", fix=f"remove them from {path}")


def overridden_names(fleet: Fleet, environment: Mapping[str, object]) -> list[str]:
    """Return the fleet's variables that the `env` of a settings file sets otherwise."""
    return [variable.name for variable in plan_environment(fleet)
            if variable.name in environment
            and not _agrees(variable, environment[variable.name])]


def leads_away(name: str) -> bool:
    """Tell whether a variable can lead prompts or the key elsewhere."""
    return bool(re.match("ANTHROPIC_(BASE_URL|AUTH|API_)|CLAUDE_CODE_USE", name))


def _agrees(variable: Variable, value: object) -> bool:
    """Tell whether a value is the one that the fleet sets."""
    if variable.holds_key or variable.is_unset:
        return False
    return str(value) == variable.value


@check("Claude Code")
def _check_agents(fleet: Fleet | None, facts: Facts) -> Iterator[Finding]:
    """Name the agent files that Claude Code does not run."""
    for path, text in facts.agents.items():
        defect = "it cannot be read" if text is None else read_agent(text).defect
        if defect:
            yield Finding("agent-unloadable", "warning",
                          f"{path}: {defect}; newer Claude Code will not run it",
                          fix="begin with `---`, `name:`, `description:`, "
                              "`tools: Read, Grep`, `---`")


@check("Claude Code")
def _check_twin_agents(fleet: Fleet | None, facts: Facts) -> Iterator[Finding]:
    """Name the agent files that carry the name of another."""
    paths: dict[str, str] = {}
    for path, text in facts.agents.items():
        agent = read_agent(text or "")
        if agent.defect:
            continue  # Claude Code runs neither it nor its name
        if agent.name in paths:  # 2.1.326 says so in its debug log alone
            what = (f"{path} and {paths[agent.name]} are both `{agent.name}`; the last one "
                    "read wins")
            yield Finding("agent-duplicate", "warning", what, fix="rename one, or remove it")
        paths[agent.name] = path


@dataclass(frozen=True)
class AgentFile:
    """An agent as Claude Code reads its file."""

    name: str
    defect: str = ""  # why it is not used
    model: str = ""
    tools: tuple[str, ...] | None = None  # None: all; (): none


def read_agent(text: str) -> AgentFile:
    """Return an agent's name, and why Claude Code will not use it.

    As 2.1.197 and 2.1.327 list them: YAML whose `name` and `description` are texts, odd
    values are texts too, and of two equal keys one goes. With none of its tools known it is
    refused.
    """
    head = re.match(r"\ufeff?---[ \t]*\r?\n(.*?\n?)---", text, re.DOTALL)
    if not head:
        return AgentFile("", _why_headless(text))
    values = _read_frontmatter(head[1])
    if not values:
        return AgentFile("", "its frontmatter is not YAML")

    name = values.get("name")
    if not name:
        return AgentFile("", "it has no name")
    if not isinstance(name, str) or not re.fullmatch("[^:-][^:]*", name):
        return AgentFile("", f"its name is {show_value(name)}")

    description = values.get("description")
    if not isinstance(description, str) or not description.strip():
        return AgentFile(name, "its description is no text")

    tools = re.findall(r"([A-Za-z_*][\w*-]*)(?:\([^)]*\))?", str(values.get("tools") or ""))
    if tools and not any(_may_exist(tool) for tool in tools):
        return AgentFile(name, f"none of its tools is known here ({', '.join(tools)})")
    takes_all = values.get("tools", "*") in (None, "*")
    return AgentFile(name, model=str(values.get("model") or ""),
                     tools=None if takes_all else tuple(tools))


def _why_headless(text: str) -> str:
    """Return why a text has no frontmatter."""
    if text.startswith("---"):
        return "its frontmatter is not closed"
    if "\n---" in text:
        return "something stands before the first `---`"
    return "it has no frontmatter"


def _may_exist(tool: str) -> bool:
    """Tell whether Claude Code, or a server that it asks, may have a tool."""
    return tool in KNOWN_TOOLS or tool.startswith(("*", "mcp__"))


def _read_frontmatter(head: str) -> dict[Any, Any]:
    """Return the keys and values of a frontmatter, read as leniently as Claude Code does."""
    quoted = _quote_odd_values(head)
    for text in (head, quoted, _drop_repeated_keys(quoted)):
        try:
            values = parse_yaml(text)
        except FleetError:
            continue  # that is a finding, not an error
        if values and isinstance(values, dict):
            return values
    return {}


def _quote_odd_values(head: str) -> str:
    """Return YAML with quotes around the plain values that are texts only to Claude Code."""
    odd_line = r"(?m)^([A-Za-z_-]+:[ \t]+)(?=.*(?:[{}\[\]*&#!|>%@`]|: ))([^\s\"'|>].*)$"
    return re.sub(odd_line, lambda match: match[1] + quote_yaml(match[2]), head)


def _drop_repeated_keys(head: str) -> str:
    """Return YAML with the last of the lines that begin with the same key."""
    lines = {}
    for line in head.splitlines():
        lines[line.partition(":")[0]] = line
    return "\n".join(lines.values())


# -- Files --

@check("Files")
def _check_files(fleet: Fleet | None, facts: Facts) -> Iterator[Finding]:
    """Say of the generated files whether they are what the config makes of them."""
    yield from facts.file_problems
    groups: dict[str, list[str]] = {}
    for change in facts.changes:
        groups.setdefault(change.action, []).append(change.path)

    if "unchanged" in groups:
        count = count_of(groups["unchanged"], "generated file")
        yield Finding("files-unchanged", "ok", f"{count} up to date")
    if "created" in groups:
        fix = "subagent-fleet generate"
        if "edited" in groups:  # then it writes nothing at all
            fix = "subagent-fleet doctor --fix"
        yield Finding("files-created", "warning",
                      f"{some_of(groups['created'], 5)}: not generated yet", fix=fix)
    if "updated" in groups:
        yield Finding("files-updated", "warning",
                      f"{some_of(groups['updated'], 5)}: behind the config",
                      fix="subagent-fleet doctor --fix")
    if "removed" in groups:
        yield Finding("files-removed", "warning",
                      f"{some_of(groups['removed'], 5)}: of agents that are gone",
                      fix="subagent-fleet doctor --fix")
    for change in facts.changes:
        if change.action == "edited":
            yield _edited_file(fleet, change)


def _edited_file(fleet: Fleet | None, change: Change) -> Finding:
    """Return the Finding on a file that is the user's; an agent's text has a better place."""
    what = f"{change.path}: changed by hand; kept"
    name = change.path.rpartition("/")[2].removesuffix(".md")
    prompt = read_new_prompt(change)
    if fleet is None or name not in fleet.agents or not prompt:
        return Finding("files-edited", "info", what, fix="subagent-fleet generate --diff")

    source = fleet.document.source
    place = f"agents.{name} of {source}"
    if fleet.agents[name].prompt is not None:
        place += " in place of its `prompt:`"
    command = "subagent-fleet generate"
    if render_prompt(change, prompt) != change.found:  # other blanks at its end, say
        command += " --force"
    is_json = source.lower().endswith(".json")
    return Finding("files-edited", "info", what, excerpt=show_prompt(prompt, is_json=is_json),
                   fix=f"write these lines into {place}, then `{command}`; or drop them: "
                       "`subagent-fleet generate --force`")


def read_new_prompt(change: Change) -> str:
    """Return the prompt that a person wrote into an agent's file, if that is all they did."""
    try:
        text = (change.found or b"").decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return ""
    head = _frontmatter_of(change.wanted or b"")
    if not text.startswith(head):
        return ""

    prompt = text[len(head):].strip("\n").rstrip()
    if not prompt or not obeys(prompt, "text"):
        return ""
    return prompt + "\n"


def _frontmatter_of(content: bytes) -> str:
    """Return a generated agent's frontmatter, to the line that closes it."""
    head, closing, _ = content.decode("utf-8").partition("\n---\n")
    return head + closing


def render_prompt(change: Change, prompt: str) -> bytes:
    """Return the file that `generate` will make of a prompt."""
    return f"{_frontmatter_of(change.wanted or b'')}\n{prompt}".encode()


def show_prompt(prompt: str, *, is_json: bool) -> str:
    """Return a prompt as it is written into an agent of a fleet file."""
    if is_json:
        return f'      "prompt": {json.dumps(prompt, ensure_ascii=False)}'
    block = "    prompt: |\n" + "".join(
        f"      {line}".rstrip() + "\n" for line in prompt.split("\n")[:-1])
    try:
        if parse_yaml(block) == {"prompt": prompt} and "\t" not in prompt:
            return block
    except FleetError:
        pass  # blanks at its beginning, say
    return "    " + dump_yaml({"prompt": prompt})


@check("Files")
def _check_secret(fleet: Fleet | None, facts: Facts) -> Iterator[Finding]:
    """Say who else may get the key."""
    path = quote_shell(facts.env_path)
    if "env-readable" in facts.leaks:
        yield Finding("env-readable", "error", f"others may read the key in {path}",
                      fix="subagent-fleet doctor --fix")
    if "env-foreign" in facts.leaks:
        yield Finding("env-foreign", "error", f"{path} and the key in it are somebody else's",
                      fix=f"rm {path}; subagent-fleet generate")
    if "env-tracked" in facts.leaks:
        yield Finding("env-tracked", "error", f"the key in {path} is in git",
                      fix=f"git rm -f --cached {path}; rm {path}; subagent-fleet generate")
    if "env-unignored" in facts.leaks:
        ignore = quote_shell(facts.env_path.replace(ENVIRONMENT_FILE, ".gitignore"))
        # The bare name: `./` or `../` before it would ignore nothing.
        yield Finding("env-unignored", "warning", f"git would take the key in {path}",
                      fix=f"printf '\\n{ENVIRONMENT_FILE}\\n' >> {ignore}")


# -- worker --

def check_worker(program: str, state: NodeState,
                 reached: Iterable[NodeState]) -> list[Finding]:
    """Return what keeps this machine from being a node, and what mends it."""
    if not state.online:
        return [_check_stopped_ollama(program, state)]

    findings = list(_ollama_holes(state, "this machine"))
    if not rank_models([state]):
        findings.append(Finding("no-model", "warning", "no model here can answer an agent",
                                fix=f"ollama pull {PLACEHOLDERS[0]}"))
    places = [place.name for place in reached if place.online and address_kind(place.name)]
    if not places:
        findings.append(Finding("closed-node", "warning", "Ollama answers this machine only",
                                fix="open it as shown below"))
    public = [place for place in places if address_kind(place) == "public"]
    if public:
        findings.append(_public_address("this machine", public[-1], "error"))
    return findings


def _check_stopped_ollama(program: str, state: NodeState) -> Finding:
    """Return the Finding on an Ollama that does not answer."""
    if not program:
        return Finding("ollama-absent", "error", "Ollama is not installed",
                       fix="install it from ollama.com/download")
    return Finding("ollama-stopped", "error",
                   f"Ollama is at {program}, but: {state.reason} ({state.endpoint})",
                   fix="start its app or its service, or: ollama serve")


# =============================================================================
# C. Words (pure)
# =============================================================================

# == 7. Generated files =======================================================
#
# Takes a checked Fleet and what was planned for it; gives the text of every file that LiteLLM,
# Claude Code and shells read. A kind of file is a Target, a row below the function that renders
# it: who may read such a file, and which paths are ours, is asked of the rows. Every value goes
# through its format's one quoting function (`quote_yaml`, `dump_yaml`, `quote_shell`).

_HEADLINE = (
    "# Generated by subagent-fleet from the fleet file: change that, then\n"
    "# `subagent-fleet generate`.\n")


@dataclass(frozen=True)
class Target:
    """A kind of generated file: its paths, who may read it, and what writes it."""

    name: str  # as --target has it
    pattern: str  # its paths, and none that could be anybody else's: what matches may be removed
    mode: int
    render: Callable[[Fleet, str], dict[str, str]]  # of a fleet and its key: {path: text}
    purpose: str


def render_litellm(fleet: Fleet) -> str:
    """Return the config of the LiteLLM proxy (facts seen with 1.106.2 and 1.109.1)."""
    fallbacks = plan_fallbacks(fleet)
    sharing: dict[str, list[Model]] = {}  # by alias
    for model in fleet.models.values():
        sharing.setdefault(model.alias, []).append(model)

    deployments: dict[str, object] = {}
    for model in fleet.models.values():
        name = f"{model.node}--{model.name}"
        while name in deployments:  # node `a` and model `b--c`, node `a--b` and model `c`
            name += "+"
        has_others = len(sharing[model.alias]) > 1 or model.alias in fallbacks
        deployments[name] = _litellm_deployment(name, model, fleet.nodes[model.node],
                                                has_others=has_others)

    sections = (
        ("Entries with one model_name share its requests.",
         {"model_list": list(deployments.values())}),
        ("What Ollama does not know is left out.",
         {"litellm_settings": {"drop_params": True}}),
        ("Anywhere else the key is ignored and the proxy is open.",
         {"general_settings": {"master_key": f"os.environ/{fleet.gateway.master_key_env}"}}),
        ("A node that fails is passed over at once.",
         {"router_settings": _litellm_router(sharing, fallbacks)}))
    return _HEADLINE + "".join(f"\n# {why}\n{dump_yaml(section)}" for why, section in sections)


@dataclass(frozen=True)
class LiteLLMEngine:
    """How LiteLLM reaches one kind of node."""

    prefix: str  # of the model's name: which of its providers
    path: str = ""  # behind the endpoint
    needs_key: bool = False


LITELLM_ENGINES = {
    "ollama": LiteLLMEngine("ollama_chat"),
    "llamacpp": LiteLLMEngine("openai", "/v1", needs_key=True),
    "lmstudio": LiteLLMEngine("lm_studio", "/v1", needs_key=True),
    "vllm": LiteLLMEngine("hosted_vllm", "/v1"),
    "openai": LiteLLMEngine("openai", "/v1", needs_key=True),
}


def _litellm_deployment(name: str, model: Model, node: Node, *,
                        has_others: bool) -> dict[str, object]:
    """Return the entry of one model; `has_others` may answer for its alias, too."""
    engine = LITELLM_ENGINES[node.provider]
    params: dict[str, object] = {
        "model": f"{engine.prefix}/{model.ollama_model}",
        "api_base": node.endpoint + engine.path,
    }
    if node.provider == "ollama":
        params.update(num_ctx=model.context, keep_alive=model.keep_alive)
    params["timeout"] = model.timeout
    if node.provider == "ollama":
        params["extra_body"] = {"truncate": False}  # else Ollama cuts the prompt in silence
        if not model.thinking:
            params["think"] = False  # Claude Code always asks for it; most models answer 400
    if node.api_key_env:
        params["api_key"] = f"os.environ/{node.api_key_env}"
    elif engine.needs_key:
        params["api_key"] = "none"  # without one it refuses to ask
    if has_others:
        params["max_parallel_requests"] = model.max_parallel  # beyond it 429: no queue

    # Without provider and mode, every request logs a traceback.
    return {
        "model_name": model.alias,
        "litellm_params": params,
        "model_info": {
            "id": name,
            "litellm_provider": engine.prefix,
            "mode": "chat",
            "max_input_tokens": model.context,
            "supports_function_calling": True,
        },
    }


def _litellm_router(sharing: dict[str, list[Model]],
                    fallbacks: dict[str, list[str]]) -> dict[str, object]:
    """Return how LiteLLM chooses among deployments, and who comes after them."""
    router: dict[str, object] = {
        "routing_strategy": "simple-shuffle",
        "enable_weighted_failover": True,
        "num_retries": 0,
        "allowed_fails": 0,
        "cooldown_time": 30,
    }
    # Only where it can choose: it refuses on an estimate of a prompt's length.
    if any(len({model.context for model in models}) > 1 for models in sharing.values()):
        router["enable_pre_call_checks"] = True
    if fallbacks:
        router["fallbacks"] = [{alias: chain} for alias, chain in fallbacks.items()]
    return router


LITELLM_TARGET = Target(
    "litellm", r"litellm_config\.yaml", 0o644,
    lambda fleet, key: {LITELLM_FILE: render_litellm(fleet)},
    "LiteLLM: which alias is answered by which model on which node")


def render_agent(agent: Agent, alias: str) -> str:
    """Return a Claude Code agent; `---` must be its first bytes, or it is ignored in silence."""
    head = {"name": agent.name, "description": agent.description, "model": alias}
    if agent.tools is not None:
        head["tools"] = ", ".join(plan_tools(agent.tools))
    lines = [f"{key}: {_quote_words(text)}" for key, text in head.items()]
    for key, value in agent.frontmatter.items():
        lines.append(dump_yaml({key: value}).rstrip("\n"))

    return f"---\n{_HEADLINE}" + "\n".join(lines) + f"\n---\n\n{plan_prompt(agent).rstrip()}\n"


def _quote_words(text: str) -> str:
    """Return text as a YAML scalar, plain where it is words and commas; none is an empty list."""
    if not text:
        return "[]"  # no tools: without the key, Claude Code gives an agent all of them
    if all(quote_yaml(part) == part for part in text.split(", ")):
        return text
    return quote_yaml(text)


def _render_agents(fleet: Fleet, key: str) -> dict[str, str]:
    """Return {path: text} of every agent of a fleet."""
    return {f".claude/agents/{name}.md": render_agent(fleet.agents[name], model.alias)
            for name, model in plan_routes(fleet).items()}


CLAUDE_TARGET = Target(
    "claude", r"\.claude/agents/[a-z0-9][a-z0-9_-]{0,63}\.md", 0o644, _render_agents,
    "Claude Code: its subagents")


@dataclass(frozen=True)
class Shell:
    """How a shell writes what the environment file says; a name and a quoted word go in."""

    set: str
    unset: str
    add: str  # the word to a list that may hold others
    key: str  # the word where the variable is not set; `kept_key` reads it back


SHELLS = {
    "sh": Shell(
        set="export {name}={word}",
        unset="unset {name}",
        add='export {name}="${{{name}:+${name},}}"{word}',
        key='export {name}="${{{name}:-{word}}}"'),
    "fish": Shell(
        set="set -gx {name} {word}",
        unset="set -e {name}",
        add="set -gx {name} (string join , ${name} {word})",
        key='test -n "${name}"; or set -g {name} \'{word}\'\nset -gx {name} "${name}"'),
}


def render_environment(fleet: Fleet, key: str | None, shell: str = "sh") -> str:
    """Return the environment as a script; a key of None is not shown."""
    words = SHELLS[shell]
    key_variable = fleet.gateway.master_key_env
    lines = [f"{_HEADLINE}# Holds the gateway's key: keep it out of git.\n"]
    last_reason = ""

    for variable in plan_environment(fleet):
        name = variable.name
        if variable.why != last_reason:
            lines.append(f"# {variable.why}")
            last_reason = variable.why

        if name == key_variable and key is None:
            lines.append(f"# {name} is not shown on a terminal; --show-key shows it")
        elif name == key_variable:
            lines.append(words.key.format(name=name, word=key))
        elif variable.is_unset:
            lines.append(words.unset.format(name=name))
        else:
            word = quote_shell(variable.value)
            if variable.holds_key:
                word = f'"${key_variable}"'
            form = words.add if variable.is_added else words.set
            lines.append(form.format(name=name, word=word))
    return "\n".join(lines) + "\n"


ENVIRONMENT_TARGET = Target(
    "env", r"\.env\.subagent-fleet", 0o600,
    lambda fleet, key: {ENVIRONMENT_FILE: render_environment(fleet, key)},
    "your shell: the gateway's key and Claude Code's settings")

# -- other programs --
#
# Each gets one directory of ours below .subagent-fleet, and a row of HARNESSES that says how
# `launch` leads it there: nothing of a person's own files is read for the fleet's sake or written,
# and what the project says does not beat it. The key comes by the environment. Facts: opencode
# 1.18.33, codex 0.169.0, aider 0.86.2, qwen-code 0.24.4, pi 0.73.1, cn 1.5.47.

@dataclass(frozen=True)
class Start:
    """With which words and variables a program is started on the fleet."""

    words: tuple[str, ...]
    environment: dict[str, str]


@dataclass(frozen=True)
class Harness:
    """A program that runs on the fleet as Claude Code does."""

    name: str  # as `launch` and --target have it
    title: str
    program: str
    install: str
    least_context: int  # tokens; below it the first prompt leaves no room to work
    agent_file: str  # the pattern of its agents' files, "" where it has none of ours
    files: tuple[str, ...]
    render: Callable[[Fleet], dict[str, str]]  # {path in its directory: text}
    start: Callable[[Fleet, str, str], Start]  # of a fleet, its directory and the key
    limits_agents: bool = False  # it keeps an agent to its tools
    has_agents: bool = True
    taken_names: tuple[str, ...] = ()  # agents of its own, which ours would replace
    # Words that make it list the aliases it knows, without asking anybody.
    lists_models: tuple[str, ...] = ()
    swallows_key: bool = False  # started by hand without the key, it sends an empty one
    rivals: tuple[str, ...] = ()  # files of a project that lead it elsewhere all the same

    def directory(self) -> str:
        return f"{STATE_DIRECTORY}/{self.name}"


def _render_json_file(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def quote_toml(text: str) -> str:
    """Return text as a basic string of TOML."""
    quoted = json.dumps(text, ensure_ascii=False)
    return quoted.replace("\x7f", "\\u007f")


def _tools_there(agent: Agent, names: Mapping[str, str]) -> list[str] | None:
    """Return the tools of an agent as another program names them; None: all of them.

    A tool that is limited, as `Bash(git *)`, is none there: the limit could not be kept.
    """
    if agent.tools is None:
        return None
    wanted = plan_tools(agent.tools)
    return list(dict.fromkeys(names[tool] for tool in wanted if tool in names))


_OPENCODE_TOOLS = {
    "Read": "read", "Grep": "grep", "Glob": "glob", "Edit": "edit", "Write": "write",
    "Bash": "bash", "WebFetch": "webfetch", "Agent": "task", "Task": "task", "Skill": "skill"}


def _render_opencode(fleet: Fleet) -> dict[str, str]:
    """Return opencode's config; without a limit it would never compact."""
    models = {}
    for alias, window in plan_windows(fleet).items():
        models[alias] = {"limit": {"context": window.context, "output": window.output}}
    provider = {
        "npm": "@ai-sdk/anthropic", "name": f"subagent-fleet: {fleet.name}",
        "options": {"baseURL": f"{gateway_url(fleet.gateway)}/v1",
                    "apiKey": f"{{env:{fleet.gateway.master_key_env}}}"},
        "models": models}

    agents: dict[str, dict[str, Any]] = {}
    for name, model in plan_routes(fleet).items():
        if name in HARNESSES["opencode"].taken_names:
            continue
        agent = fleet.agents[name]
        agents[name] = {"description": agent.description, "mode": "subagent",
                        "model": f"fleet/{model.alias}", "prompt": plan_prompt(agent)}
        tools = _tools_there(agent, _OPENCODE_TOOLS)
        if tools is not None:
            agents[name]["tools"] = {"*": False, **dict.fromkeys(tools, True)}
    text = _render_json_file({
        "autoupdate": False, "share": "disabled",
        "enabled_providers": ["fleet"], "provider": {"fleet": provider},
        "model": f"fleet/{plan_tier_alias(fleet, 'main')}",
        "small_model": f"fleet/{plan_tier_alias(fleet, 'haiku')}", "agent": agents})

    # It puts variables and files in wherever its text names one, in a prompt as well.
    for opening in ("{env:", "{file:"):
        text = text.replace(opening, opening.replace("{", "\\u007b"))
    own = f'"apiKey": "{{env:{fleet.gateway.master_key_env}}}"'
    return {"opencode.json": text.replace(own.replace("{", "\\u007b"), own)}


def _start_opencode(fleet: Fleet, directory: str, key: str) -> Start:
    # A project's opencode.json beats a file that is named to it, but not this variable.
    return Start((), {"OPENCODE_CONFIG_CONTENT": _render_opencode(fleet)["opencode.json"],
                      "OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"})


def _render_codex(fleet: Fleet) -> dict[str, str]:
    """Return a home of codex: its config, what each alias holds, and a role an agent.

    Without the list of models it takes each for one of 272,000 tokens.
    """
    windows = plan_windows(fleet)
    main = plan_tier_alias(fleet, "main")
    config = string.Template(_CODEX_CONFIG).substitute(
        headline=_HEADLINE, main=quote_toml(main), context=windows[main].context,
        compact=windows[main].context * 8 // 10, name=quote_toml(fleet.name),
        url=quote_toml(f"{gateway_url(fleet.gateway)}/v1"),
        variable=quote_toml(fleet.gateway.master_key_env),
        patience=max(model.timeout for model in fleet.models.values()) * 3000)
    models = [_codex_model(alias, window) for alias, window in windows.items()]
    files = {"config.toml": config, "models.json": _render_json_file({"models": models})}
    for name, model in plan_routes(fleet).items():
        agent = fleet.agents[name]
        head = {"name": name, "description": agent.description, "model": model.alias,
                "developer_instructions": plan_prompt(agent)}
        lines = [f"{word} = {quote_toml(text)}\n" for word, text in head.items()]
        window = f"model_context_window = {windows[model.alias].context}\n"
        files[f"agents/{name}.toml"] = _HEADLINE + "".join(lines) + window
    return files


_CODEX_CONFIG = """\
${headline}model = $main
model_provider = "fleet"
model_context_window = $context
model_auto_compact_token_limit = $compact
model_catalog_json = "models.json"
web_search = "disabled"
check_for_update_on_startup = false

[analytics]
enabled = false

[feedback]
enabled = false

# Apps and plugins ask addresses of their own; goals are three tools more.
[features]
apps = false
plugins = false
goals = false

[model_providers.fleet]
name = $name
base_url = $url
env_key = $variable
wire_api = "responses"
request_max_retries = 4
stream_max_retries = 4
stream_idle_timeout_ms = $patience
"""


def _codex_model(alias: str, window: Window) -> dict[str, Any]:
    # With a word for apply_patch, a model must write a grammar that local ones do not know.
    return {
        "slug": alias, "display_name": alias, "description": "a model of the fleet",
        "supported_reasoning_levels": [], "shell_type": "shell_command", "visibility": "list",
        "supported_in_api": True, "priority": 1, "availability_nux": None, "upgrade": None,
        "support_verbosity": False, "default_verbosity": None, "apply_patch_tool_type": None,
        "truncation_policy": {"mode": "bytes", "limit": 10_000},
        "context_window": window.context, "max_context_window": window.context,
        "experimental_supported_tools": [], "supports_reasoning_summary_parameter": False,
        "base_instructions": "You are a coding agent. You work in the directory that you were "
                             "started in, by the tools that you have, until the task is done."}


def _start_codex(fleet: Fleet, directory: str, key: str) -> Start:
    return Start((), {"CODEX_HOME": directory})


def _render_aider(fleet: Fleet) -> dict[str, str]:
    """Return aider's config, its settings of each alias and what each one holds."""
    main, small = (f"openai/{plan_tier_alias(fleet, tier)}" for tier in ("main", "haiku"))
    editor = main
    if "implementer" in fleet.agents:
        editor = f"openai/{plan_routes(fleet)['implementer'].alias}"
    config = {
        "model": main, "weak-model": small, "editor-model": editor,
        "openai-api-base": f"{gateway_url(fleet.gateway)}/v1", "check-update": False,
        "analytics": False, "show-model-warnings": False, "show-release-notes": False,
        "gitignore": False}

    sizes = {model.alias: billions(model.ollama_model) for model in fleet.models.values()}
    settings, metadata = [], {}
    for alias, window in plan_windows(fleet).items():
        is_small = 0 < sizes[alias] < SMALL_BILLIONS
        settings.append({
            "name": f"openai/{alias}", "edit_format": "whole" if is_small else "diff",
            "use_repo_map": True, "use_temperature": False,
            "extra_params": {"max_tokens": window.output}})
        metadata[f"openai/{alias}"] = {
            "max_input_tokens": window.context, "max_output_tokens": window.output,
            "max_tokens": window.output, "input_cost_per_token": 0, "output_cost_per_token": 0,
            "litellm_provider": "openai", "mode": "chat"}
    return {"aider.conf.yml": _HEADLINE + dump_yaml(config),
            "model.settings.yml": _HEADLINE + dump_yaml(settings),
            "model.metadata.json": _render_json_file(metadata)}


SMALL_BILLIONS = 8  # below it a model seldom writes a patch that applies


def _start_aider(fleet: Fleet, directory: str, key: str) -> Start:
    # As flags and under its own prefix, as a project's .env beats every other variable.
    words = ("--config", f"{directory}/aider.conf.yml",
             "--model-settings-file", f"{directory}/model.settings.yml",
             "--model-metadata-file", f"{directory}/model.metadata.json",
             "--openai-api-base", f"{gateway_url(fleet.gateway)}/v1")
    return Start(words, {"AIDER_OPENAI_API_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"})


_QWEN_TOOLS = {
    "Read": "read_file", "Grep": "grep_search", "Glob": "glob", "Edit": "edit",
    "Write": "write_file", "Bash": "run_shell_command", "WebFetch": "web_fetch",
    "Skill": "skill"}


def _render_qwen(fleet: Fleet) -> dict[str, str]:
    """Return a home of qwen-code: its settings, and a file an agent."""
    patience = max(model.timeout for model in fleet.models.values()) * 5000
    models = []
    for alias, window in plan_windows(fleet).items():
        models.append({
            "id": alias, "name": alias, "baseUrl": gateway_url(fleet.gateway),
            "envKey": fleet.gateway.master_key_env, "generationConfig": {
                "contextWindowSize": window.context, "timeout": patience, "maxRetries": 1,
                "samplingParams": {"max_tokens": window.output}}})
    files = {"settings.json": _render_json_file({
        "security": {"auth": {"selectedType": "anthropic"}},
        "model": {"name": plan_tier_alias(fleet, "main")}, "general": {"disableAutoUpdate": True},
        "privacy": {"usageStatisticsEnabled": False}, "telemetry": {"enabled": False},
        "modelProviders": {"anthropic": models}})}
    for name, model in plan_routes(fleet).items():
        agent = fleet.agents[name]
        head: dict[str, object] = {"name": name, "description": agent.description,
                                   "model": model.alias}
        tools = _tools_there(agent, _QWEN_TOOLS)
        if tools is not None:
            head["tools"] = tools
        # What it takes for a place to fill in, and does not know, ends the agent at once.
        prompt = re.sub(r"\$\{(\w+)\}", r"$\1", plan_prompt(agent)).rstrip()
        files[f"agents/{name}.md"] = f"---\n{_HEADLINE}{dump_yaml(head)}---\n\n{prompt}\n"
    return files


def _start_qwen(fleet: Fleet, directory: str, key: str) -> Start:
    # As a system's settings they beat those of a project.
    return Start((), {"QWEN_HOME": directory,
                      "QWEN_CODE_SYSTEM_SETTINGS_PATH": f"{directory}/settings.json",
                      "QWEN_STREAM_MAX_LIFETIME_MS": str(24 * 3600 * 1000)})


def _render_pi(fleet: Fleet) -> dict[str, str]:
    """Return pi's models; its key is the name of a variable."""
    free = {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}
    models = [{"id": alias, "reasoning": False, "input": ["text"], "contextWindow": window.context,
               "maxTokens": window.output, "cost": free}
              for alias, window in plan_windows(fleet).items()]
    return {"models.json": _render_json_file({"providers": {"fleet": {
        "baseUrl": gateway_url(fleet.gateway), "api": "anthropic-messages",
        "apiKey": fleet.gateway.master_key_env, "models": models}}})}


def _start_pi(fleet: Fleet, directory: str, key: str) -> Start:
    words = ("--provider", "fleet", "--model", plan_tier_alias(fleet, "main"))
    return Start(words, {"PI_CODING_AGENT_DIR": directory, "PI_OFFLINE": "1", "PI_TELEMETRY": "0"})


def _render_cn(fleet: Fleet) -> dict[str, str]:
    """Return the config of Continue's cn, which takes the first model."""
    main = plan_tier_alias(fleet, "main")
    models = []
    for alias, window in sorted(plan_windows(fleet).items(), key=lambda pair: pair[0] != main):
        models.append({
            "name": alias, "provider": "anthropic", "model": alias,
            "apiBase": f"{gateway_url(fleet.gateway)}/v1/",
            "apiKey": f"${{{{ secrets.{fleet.gateway.master_key_env} }}}}", "roles": ["chat"],
            "capabilities": ["tool_use"], "defaultCompletionOptions": {
                "contextLength": window.context, "maxTokens": window.output}})
    return {"config.yaml": _HEADLINE + dump_yaml({
        "name": fleet.name, "version": "1.0.0", "schema": "v1", "models": models})}


def _start_cn(fleet: Fleet, directory: str, key: str) -> Start:
    return Start(("--config", f"{directory}/config.yaml"), {"CONTINUE_TELEMETRY_ENABLED": "0"})


_HARNESS_ROWS = (
    Harness("opencode", "opencode", "opencode", "npm install -g opencode-ai", 16_384, "",
            ("opencode.json",), _render_opencode, _start_opencode, limits_agents=True,
            taken_names=("build", "plan", "general", "explore", "title", "compaction", "summary"),
            lists_models=("models",), swallows_key=True),
    Harness("codex", "codex", "codex", "npm install -g @openai/codex", 24_576, "agents/%s.toml",
            ("config.toml", "models.json"), _render_codex, _start_codex),
    Harness("aider", "aider", "aider", "pip install aider-chat", 8_192, "",
            ("aider.conf.yml", "model.settings.yml", "model.metadata.json"), _render_aider,
            _start_aider, has_agents=False, rivals=(".aider.model.settings.yml",)),
    Harness("qwen", "qwen-code", "qwen", "npm install -g @qwen-code/qwen-code (Node 22)", 32_768,
            "agents/%s.md", ("settings.json",), _render_qwen, _start_qwen, limits_agents=True),
    Harness("pi", "pi", "pi", "npm install -g @mariozechner/pi-coding-agent", 8_192, "",
            ("models.json",), _render_pi, _start_pi, has_agents=False, swallows_key=True),
    Harness("cn", "Continue's cn", "cn", "npm install -g @continuedev/cli", 8_192, "",
            ("config.yaml",), _render_cn, _start_cn, has_agents=False))
HARNESSES: dict[str, Harness] = {harness.name: harness for harness in _HARNESS_ROWS}


def _harness_target(harness: Harness) -> Target:
    """Return the row of a program's files."""
    def render(fleet: Fleet, key: str) -> dict[str, str]:
        return {f"{harness.directory()}/{path}": text
                for path, text in harness.render(fleet).items()}

    paths = [re.escape(path) for path in harness.files]
    if harness.agent_file:
        paths.append(re.escape(harness.agent_file) % "[a-z0-9][a-z0-9_-]{0,63}")
    pattern = rf"{re.escape(harness.directory())}/(?:{'|'.join(paths)})"
    return Target(harness.name, pattern, 0o644, render, f"{harness.title}, by `launch`")


def plan_losses(fleet: Fleet, names: Iterable[str]) -> Iterator[Finding]:
    """Find what of a fleet the programs of these targets cannot keep."""
    for name in names:
        if name in HARNESSES:
            yield from _harness_losses(fleet, HARNESSES[name])


def _harness_losses(fleet: Fleet, harness: Harness) -> Iterator[Finding]:
    title = harness.title
    main = plan_tier_alias(fleet, "main")
    context = plan_windows(fleet)[main].context
    if context < harness.least_context:
        yield Finding("target-context", "warning",
                      f"{title}: `{main}` holds {context:,} tokens, of which its first prompt "
                      "leaves too few", fix=f"context: {harness.least_context} or more")
    if not harness.has_agents:
        yield Finding("target-agents", "info", f"{title} has no agents: it runs on `{main}`"
                      + (" and the small model" if harness.name == "aider" else ""))
        return

    limited = [agent.name for agent in fleet.agents.values() if agent.tools is not None]
    if limited and not harness.limits_agents:
        yield Finding("target-tools", "info", f"{title} cannot limit the tools of a role: "
                      f"{some_of(limited, 5)} may do there what the main session may")
    lost = [agent for agent in limited if harness.limits_agents and _loses_tools(
        fleet.agents[agent], harness)]
    if lost:
        yield Finding("target-tools", "info", f"{title} has not all the tools of "
                      f"{some_of(lost, 5)}: those it has not are left out")
    taken = [agent for agent in fleet.agents if agent in harness.taken_names]
    if taken:
        yield Finding("target-names", "warning", f"{title} has agents of its own named "
                      f"{some_of(taken, 5)}: those of the fleet are left out",
                      fix="other names for these agents")
    odd = [alias for alias in plan_windows(fleet) if re.match(r"gpt-|codex-|o\d", alias)]
    if odd and harness.name == "codex":
        yield Finding("target-alias", "warning", f"{title} takes {some_of(odd, 5)} for OpenAI's "
                      "and speaks to it otherwise", fix="another litellm_alias")


def _loses_tools(agent: Agent, harness: Harness) -> bool:
    names = _OPENCODE_TOOLS if harness.name == "opencode" else _QWEN_TOOLS
    return any(tool not in names for tool in plan_tools(agent.tools or ()))


@check("Other programs", needs_fleet=True)
def _check_programs(fleet: Fleet, facts: Facts) -> Iterator[Finding]:
    """Find what keeps a program from the fleet, of those that files were generated for."""
    for name, seen in facts.programs.items():
        harness = HARNESSES[name]
        if not seen.version:
            yield Finding("program-missing", "warning", f"{harness.title} is not on the PATH",
                          fix=harness.install)
            continue
        yield Finding("program", "ok", f"{harness.title} {seen.version}")
        yield from _harness_losses(fleet, harness)
        if harness.swallows_key and not seen.has_key:
            yield Finding("program-key", "info", f"{harness.title} sends an empty key where "
                          f"{fleet.gateway.master_key_env} is not set, as here: start it by",
                          fix=f"subagent-fleet launch {name}")
        unknown = [alias for alias in plan_windows(fleet) if alias not in (seen.listed or alias)]
        if unknown:
            yield Finding("program-models", "warning", f"{harness.title} does not know "
                          f"{some_of(unknown, 5)}", fix=f"{harness.program} "
                          + " ".join(harness.lists_models))


TARGETS = (LITELLM_TARGET, CLAUDE_TARGET, ENVIRONMENT_TARGET,
           *map(_harness_target, _HARNESS_ROWS))


def target_of(path: str) -> Target | None:
    """Return whose a generated path is; None for all that is never removed, manifest or not."""
    for target in TARGETS:
        if re.fullmatch(target.pattern, path):
            return target
    return None


def render_files(fleet: Fleet, key: str, names: Collection[str] = USUAL_TARGETS
                 ) -> dict[str, bytes]:
    """Return {path: bytes} of everything that is generated for these targets."""
    files = {}
    for target in TARGETS:
        if target.name not in names:
            continue
        for path, text in target.render(fleet, key).items():
            files[path] = text.encode("utf-8")
    return files


def render_manifest(hashes: dict[str, str]) -> bytes:
    """Return the manifest: the hash of each written file; two while a run may yet be cut off."""
    value = {"schema": "subagent-fleet/manifest/1", "files": hashes}
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode("utf-8")


def parse_manifest(content: bytes | None) -> dict[str, str] | None:
    """Return {path: hashes}; none where no manifest is, None when it cannot be read."""
    if content is None:
        return {}
    try:
        files = json.loads(content)["files"]
        return {path: hashes.strip() for path, hashes in files.items() if target_of(path)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


_STARTER = """\
# Which role runs on which model on which machine. After a change:
# `subagent-fleet validate`, then `subagent-fleet generate`.

project:
  name: $name
  gateway:
    provider: builtin       # builtin: this program serves the fleet; litellm: LiteLLM does
    host: 127.0.0.1         # only this machine; 0.0.0.0 offers your models to the whole network
    port: $port
    master_key_env: LITELLM_MASTER_KEY  # variable that holds the key; `generate` makes the key
  # claude: {haiku: heavy-coder}  # which model answers for each of Claude Code's tiers

# Machines that run Ollama. `subagent-fleet worker`, run on another machine, prints its lines.
nodes:
$nodes  # mini: {endpoint: http://192.168.1.50:11434}

# What runs where. Two models with one litellm_alias share the load. `# key:` shows a default.
${mark}models:
$models
# Claude Code's subagents.
agents:
$agents"""
_STARTER_NOTE_COLUMN = 44


def render_starter(tree: dict[str, dict[str, dict[str, object]]], has_models: bool,
                   name: str = "local-dev", notes: Mapping[str, str] | None = None, *,
                   port: int = Gateway.port) -> str:
    """Return a fleet.yaml that teaches by its comments.

    They tell why each model is there (`notes`), or that the models were not found.
    """
    blocks = {kind: _starter_block(kind, sections, notes or {}) for kind, sections in tree.items()}
    blocks["name"] = quote_yaml(name)
    blocks["port"] = str(port)
    blocks["mark"] = ""
    if not has_models:
        blocks["mark"] = "# Placeholders: write in what `ollama list` shows.\n"
    return string.Template(_STARTER).substitute(blocks)


def _starter_block(kind: str, sections: dict[str, dict[str, object]],
                   notes: Mapping[str, str]) -> str:
    """Return the sections of one kind; the first one shows every key, and what it is for."""
    lines: list[str] = []
    for name, values in sections.items():
        is_first = not lines
        if kind == "models" and name in notes:
            lines += [f"  # {line}" for line in _wrap_note(notes[name])]
        lines.append(f"  {quote_yaml(name)}:")
        for key, declared in FILE_KEYS[kind[:-1]].items():
            if key in values:
                line = f"    {key}: {_starter_value(values[key])}".rstrip()
            elif is_first:
                line = f"    # {key}: {_starter_value(declared.default)}".rstrip()
            else:
                continue

            # An agent's description fills its line, and a note behind it the next.
            fits = kind != "agents" or len(line) < _STARTER_NOTE_COLUMN
            if is_first and fits:
                line = f"{line:{_STARTER_NOTE_COLUMN}} # {declared.words}"
            lines.append(line)
    return "\n".join(lines) + "\n"


def _wrap_note(note: str, width: int = 90) -> list[str]:
    """Return a note in lines; what a node said in it can end no comment."""
    lines = [""]
    for word in re.sub(r"[^ -~\xa0-\u1fff]", "?", note).split(" "):
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines


def _starter_value(value: object) -> str:
    """Return a value of a fleet file on one line."""
    if value is None:
        return ""
    if isinstance(value, list):
        return f"[{', '.join(value)}]"
    return dump_yaml(value).rstrip("\n")


# -- what `add` puts into a fleet file --

def insert_sections(document: Document, added: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a fleet file with more sections under `nodes:` and `models:`; the rest is untouched.

    They go behind the last one of their kind, as it is indented, and before what stands below.
    """
    if document.text.lstrip().startswith("{"):
        return _insert_into_json(document, added)

    tree: Any = document.value
    lines = document.text.split("\n")
    insertions = []
    for kind, sections in added.items():
        if sections:
            last = next(reversed(tree[kind]))
            row, column = _start_of_section(document, kind, last)
            margin = lines[row][:column]
            if margin.strip():  # in braces, on the line of another key
                raise _cannot_insert(document, sections, f"behind `{last}` under `{kind}:`")
            new = [margin + line for line in dump_yaml(dict(sections)).splitlines()]
            insertions.append((_end_of_section(lines, row, column), new))

    for end, new in sorted(insertions, reverse=True):  # from below: rows above stay as they are
        lines[end:end] = new
    return "\n".join(lines)


def _start_of_section(document: Document, kind: str, name: str) -> tuple[int, int]:
    """Return the row and the column, from 0, of a section's name."""
    place, _ = document.locate((kind, name), key=True)
    _, line, column = place.rsplit(":", 2)
    return int(line) - 1, int(column) - 1


def _end_of_section(lines: Sequence[str], row: int, column: int) -> int:
    """Return the row behind a section: behind the last line that is indented deeper than it."""
    end = row + 1
    for number in range(row + 1, len(lines)):
        words = lines[number].lstrip(" ")
        is_deeper = len(lines[number]) - len(words) > column
        if words.strip() and is_deeper:
            end = number + 1
        elif words.strip() and not words.startswith("#"):
            break
    return end


def _insert_into_json(document: Document, added: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a JSON file with more sections, indented as its second line is."""
    try:
        value = json.loads(document.text)
    except ValueError:  # YAML in braces
        raise _cannot_insert(document, added, "into it") from None
    for kind, sections in added.items():
        value[kind].update(sections)
    margin = re.match(r"\{\s*\n([ \t]+)", document.text)
    return json.dumps(value, indent=margin[1] if margin else 2, ensure_ascii=False) + "\n"


def _cannot_insert(document: Document, sections: Mapping[str, Any], where: str) -> FleetError:
    """Return the error for a file that is written so that nothing can be put in."""
    return FleetError("cannot-add", f"{document.source} is written in braces; put these lines in "
                      "by hand", excerpt=dump_yaml(dict(sections)), fix=f"write them {where}")


# == 8. Terminal text =========================================================
#
# Takes what is known and a Look; gives what a person reads, and the JSON that a program reads.
# Whatever came from a node, a file or a log passes `clean_line` or `clean_text` here: nothing
# else stands between it and the terminal. With the Look of a pipe, text is as it ever was: no
# escape, no mark, no line broken. On a terminal, text is wrapped first and painted last.

# -- commands, as they were typed --

@dataclass(frozen=True)
class Typing:
    """How this program was called, so that messages name commands as they can be typed again."""

    program: str = "subagent-fleet"
    # By command: the flags that name the places which were typed, such as ` --out build`.
    places: dict[str, str] = field(default_factory=dict)


AS_USUAL = Typing()


def as_typed(text: str, typing: Typing) -> str:
    """Return a message with its commands as they were typed.

    Messages are written with `subagent-fleet COMMAND`. The program becomes what was typed for it,
    and a command gets the places that were typed, unless the message names one itself.
    """
    def retype(call: re.Match[str]) -> str:
        words = call["words"]
        rest = text[call.end():]
        if rest.startswith((" --config", " --out")):
            return f"{typing.program} {words}"
        return f"{typing.program} {words}{typing.places.get(call['name'], '')}"

    names = "|".join(typing.places)
    return re.sub(rf"(?<![\w./-])subagent-fleet (?P<words>(?P<name>{names}|--help)( claude)?)\b"
                  r"(?! claude)", retype, text)


# -- what a terminal can show --

def clean_text(text: str) -> str:
    """Return text with everything that could steer a terminal shown as an escape."""
    # Controls, bidirectional marks and line separators: text from a node or a file could use them
    # to rewrite the terminal or to look like something else.
    unsafe = (
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e"
        "\u2066-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]")
    return re.sub(unsafe, lambda match: ascii(match[0])[1:-1], text)


def clean_line(text: str) -> str:
    """Return clean text on one line."""
    text = clean_text(text)
    return text.replace("\n", "\\n").replace("\t", " ")


@dataclass(frozen=True)
class Look:
    """How text may look where it is read; the default is a pipe, a file or a program."""

    colour: bool = False
    marks: bool = False
    columns: int = 0  # to wrap at; 0: nothing is wrapped


PLAIN = Look()
LEAST_COLUMNS = 20  # a narrower terminal breaks lines by itself


def plan_look(environ: Mapping[str, str], is_terminal: bool, *,
              encoding: str, columns: int) -> Look:
    """Return the Look of a stream, from what it is and what its reader asked for."""
    is_dumb = environ.get("TERM") == "dumb"

    # In the order of Python 3.13: who wants no colour is heard before who wants it anywhere.
    if environ.get("NO_COLOR"):
        colour = False
    elif environ.get("FORCE_COLOR"):
        colour = True
    else:
        colour = is_terminal and not is_dumb and not _is_old_console(environ)

    # Colour that is forced into a pipe wraps nothing there: the reader behind it has a width of
    # its own, and a program does not know our marks.
    if not is_terminal:
        return Look(colour)
    marks = not is_dumb and _can_encode(encoding, "".join(MARKS.values()))
    return Look(colour, marks, max(columns, LEAST_COLUMNS))


def _is_old_console(environ: Mapping[str, str]) -> bool:
    """Tell whether this is a Windows console that shows escapes instead of obeying them."""
    if environ.get("OS") != "Windows_NT":
        return False
    newer = ("WT_SESSION", "TERM", "ANSICON", "ConEmuANSI")
    return not any(environ.get(name) for name in newer)


def _can_encode(encoding: str, text: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


# A role says what a text means. Its colour and its mark only underline the words, which say it
# as well: one is not seen by everybody, the other not shown everywhere.
MARKS = {"ok": "✓", "warn": "!", "bad": "✗"}
COLOURS = {"ok": "32", "warn": "33", "bad": "31", "dim": "2", "bold": "1"}


# The machines of a fleet: five of Okabe and Ito's colours, which stay apart for colour-blind eyes
# on black and on white; for a page, and the nearest of a terminal's 256.
MACHINE_COLOURS = (("#0072b2", 32), ("#d55e00", 166), ("#009e73", 36), ("#cc79a7", 175),
                   ("#e69f00", 172))
COLOURS.update({f"machine {index}": f"38;5;{number}"
                for index, (_, number) in enumerate(MACHINE_COLOURS)})


def plan_machine_colours(nodes: Iterable[str]) -> dict[str, int]:
    """Return {node: which of MACHINE_COLOURS is its own}, in the order of the fleet file."""
    return {node: index % len(MACHINE_COLOURS) for index, node in enumerate(nodes)}


def paint(text: str, role: str, look: Look) -> str:
    """Return text in the colour of its role: ok, warn, bad, dim, bold or `machine N`."""
    if not look.colour or not text or role not in COLOURS:
        return text
    return f"\x1b[{COLOURS[role]}m{text}\x1b[0m"


@dataclass(frozen=True)
class Styled:
    """Text and its role: measured and wrapped as text, and painted last, line by line."""

    text: str
    role: str = ""
    whole: bool = False  # never broken: a command that is to be copied


def mark(word: str, role: str, look: Look) -> Styled:
    """Return a word with the mark of its role before it, where marks can be shown."""
    if look.marks and role in MARKS:
        word = f"{MARKS[role]} {word}"
    return Styled(word, role)


# -- measuring --
#
# Most text is ASCII and never asks for the tables of Unicode, which take a while to load.

def width_of(text: str) -> int:
    """Return how many columns a terminal gives to a text; in doubt, the most it may."""
    if text.isascii():
        return len(text)
    return sum(_width_of_char(char) for char in text)


def _width_of_char(char: str) -> int:
    if char < "\u0300":  # what western text is made of, and the soft hyphen, which may be shown
        return 1
    if unicodedata.east_asian_width(char) in "WF":
        return 2
    if char == "\ufe0f":  # which may make the sign before it wide
        return 1
    return 0 if unicodedata.category(char) in ("Mn", "Me", "Cf") else 1


def _cut(text: str, width: int) -> tuple[str, str]:
    """Return the beginning of a text that fits, one character at least, and the rest."""
    used = 0
    for end, char in enumerate(text):
        used += width_of(char)
        if used > width and end > 0:
            return text[:end], text[end:]
    return text, ""


def crop(text: str, width: int) -> str:
    """Return text that fits, with an ellipsis where something is missing."""
    if width_of(text) <= width:
        return text
    start, _ = _cut(text, width - 1)
    return f"{start}…"


# -- wrapping --
#
# textwrap counts characters where a terminal counts columns, and breaks commands like sentences.

# Programs that a person is told to run. A command is in backticks, or ends the text behind `: `.
_PROGRAMS = (
    r"\.|subagent-fleet|python3|[^\s`]*subagent_fleet\.py|ollama|litellm|npm|uv|pipx|git|unset"
    r"|printf|sudo|launchctl|lsof|cd|ls|rm")
_COMMAND = _Pattern(
    rf"(?<!\S)[^\s`]*`(?:{_PROGRAMS}) [^`]*`[^\s`]*"
    rf"|(?<=: )(?:{_PROGRAMS}) .*$")
_LEADING_COMMAND = _Pattern(rf"(?:{_PROGRAMS}) ")


def find_commands(text: str, role: str = "", *, may_lead: bool = False) -> list[Styled]:
    """Return the parts of a text, its commands apart and whole; it may be one from its start."""
    if may_lead and _LEADING_COMMAND.match(text):
        return [Styled(text, role, whole=True)]

    parts = []
    end = 0
    for match in _COMMAND.finditer(text):
        parts.append(Styled(text[end:match.start()].strip(), role))
        parts.append(Styled(match.group(), role, whole=True))
        end = match.end()
    parts.append(Styled(text[end:].strip(), role))
    return [part for part in parts if part.text]


def format_words(parts: Sequence[Styled], look: Look, *,
                 margin: str = "", indent: str = "") -> str:
    """Return parts with a space between them, on as many lines as they need.

    The margin stands before every line, the indent also before all but the first. A part that is
    whole has a line of its own if none is wide enough for it, which the terminal breaks.
    """
    parts = [replace(part, text=clean_line(part.text)) for part in parts if part.text]
    text = " ".join(part.text for part in parts)
    if not text:
        return ""
    if not look.columns or width_of(margin + text) <= look.columns:
        return f"{margin}{_paint_words(parts, look)}\n"

    room = look.columns - len(margin)
    lines = _wrap_words(parts, room, room - len(indent))
    painted = [_paint_words(line, look) for line in lines]
    return margin + f"\n{margin}{indent}".join(painted) + "\n"


def _wrap_words(parts: Iterable[Styled], first_room: int, room: int) -> list[list[Styled]]:
    """Return the words of some parts by line; the first line has a room of its own."""
    lines: list[list[Styled]] = [[]]
    used = 0
    for word in _split_words(parts, max(min(first_room, room), 1)):
        line_room = first_room if len(lines) == 1 else room
        width = width_of(word.text)

        if lines[-1] and used + 1 + width > line_room:
            lines.append([word])
            used = width
        elif lines[-1]:
            lines[-1].append(word)
            used += 1 + width
        else:
            lines[-1].append(word)
            used = width
    return lines


def _split_words(parts: Iterable[Styled], room: int) -> Iterator[Styled]:
    """Yield what wrapping may not break: words no wider than the room, and whole commands."""
    # A word is cut only here, where nothing else fits it; a path cut so can still be read.
    for part in parts:
        if part.whole:
            yield part
            continue
        for word in part.text.split():
            for piece in _break_word(word, room):
                yield Styled(piece, part.role)


def _break_word(word: str, room: int) -> Iterator[str]:
    """Yield a word in pieces that fit, in one pass: a node may send one of a million letters."""
    start = used = 0
    for end, char in enumerate(word):
        width = width_of(char)
        if used + width > room and end > start:
            yield word[start:end]
            start = end
            used = 0
        used += width
    yield word[start:]


def _paint_words(words: Sequence[Styled], look: Look) -> str:
    """Return words as one line, neighbours of one role painted together."""
    runs: list[Styled] = []
    for word in words:
        if runs and runs[-1].role == word.role:
            last = runs.pop()
            word = Styled(f"{last.text} {word.text}", word.role)
        runs.append(word)
    return " ".join(paint(run.text, run.role, look) for run in runs)


def wrap_text(text: str, columns: int, *, indent: str = "") -> str:
    """Return text whose lines are not wider than columns; 0 columns wrap nothing.

    A wrapped line goes on at its own margin, and the indent behind that. Commands are kept whole:
    in backticks, behind a colon, or all of a line that has a margin.
    """
    look = Look(columns=columns)
    lines = []
    for line in text.split("\n"):
        line = clean_line(line)
        words = line.lstrip(" ")
        margin = line[:len(line) - len(words)]
        if columns and width_of(line) > columns:
            parts = find_commands(words, may_lead=bool(margin))
            line = format_words(parts, look, margin=margin, indent=indent).rstrip("\n")
        lines.append(line)
    return "\n".join(lines)


# -- findings --

def format_finding(finding: Finding, *, indent: str = "", look: Look = PLAIN) -> str:
    """Return a finding as lines: what, where, the line with a caret, what to type."""
    if indent:  # in a list of errors, below the file's name
        text = format_words([Styled(finding.what)], look, margin=indent, indent="  ")
        if finding.where:
            parts = [Styled("at"), Styled(finding.where, "dim")]
            text += format_words(parts, look, margin=f"{indent}  ")
    else:
        text = format_words(_head_words(finding), look, indent="  ")

    text += _format_excerpt(finding.excerpt, look, margin=indent)
    return text + format_fix(finding.fix, look, margin=f"{indent}  ")


_LEVEL_ROLES = {"error": "bad", "warning": "warn", "info": "", "ok": "ok"}


def _head_words(finding: Finding) -> list[Styled]:
    """Return `level: where: what` of a finding, without what it lacks."""
    parts = [Styled(finding.level, _LEVEL_ROLES.get(finding.level, ""))]
    if finding.where:
        parts.append(Styled(finding.where, "dim"))
    if finding.what:
        parts.append(Styled(finding.what))
    last = parts.pop()
    return [replace(part, text=f"{part.text}:") for part in parts] + [last]


def format_fix(fix: str, look: Look, *, margin: str = "  ") -> str:
    """Return what to type; a command that does not fit beside `fix:` stands below it, whole."""
    if not fix:
        return ""
    # What fits stays as it is written: parts would be joined by single spaces.
    fix = clean_line(fix)
    label = Styled("fix:", "dim")
    if not look.columns or width_of(f"{margin}fix: {fix}") <= look.columns:
        return format_words([label, Styled(fix)], look, margin=margin)
    parts = find_commands(fix, may_lead=True)
    return format_words([label, *parts], look, margin=margin, indent="  ")


def _format_excerpt(excerpt: str, look: Look, *, margin: str) -> str:
    """Return a line of a file and the one with its caret; what does not fit is left out."""
    lines = [clean_line(line) for line in excerpt.splitlines() if line]
    room = look.columns - len(margin)
    if look.columns and any(width_of(line) > room for line in lines):
        lines = _crop_excerpt(lines, room)
    return "".join(f"{margin}{line}\n" for line in lines)


def _crop_excerpt(lines: list[str], room: int) -> list[str]:
    """Return what is near the caret, which stands in the last line."""
    # Both lines lose the same part, so that the caret stays below what it points at.
    start = lines[0].find("| ") + 2  # behind the line's number
    caret = lines[-1].find("^")
    hidden = max(caret - room * 2 // 3, 0)
    lines = [line[:start] + line[start + hidden:] for line in lines]

    first, *others = lines
    if hidden:
        first = f"{first[:start]}…{first[start + 1:]}"
    return [crop(first, room), *(_cut(line, room)[0] for line in others)]


_LEVEL_NOUNS = {  # the worst first: of one, of many
    "error": ("error", "errors"),
    "warning": ("warning", "warnings"),
    "info": ("note", "notes"),
    "ok": ("ok", "ok"),
}


def format_topic(topic: str, findings: Sequence[Finding], look: Look, *,
                 verbose: bool = False) -> str:
    """Return what doctor says on a topic; on a terminal, what is right is only counted."""
    text = f"{topic}\n"
    if look.columns:
        text = _format_counts(topic, [finding.level for finding in findings], look)
    for finding in findings:
        if verbose or not look.columns or finding.level != "ok":
            text += format_finding(finding, look=look)
    return text


def _format_counts(topic: str, levels: Sequence[str], look: Look) -> str:
    """Return `topic: 1 error, 2 ok`, marked as its worst finding is."""
    role = "ok"
    counts = []
    for level, (one, many) in _LEVEL_NOUNS.items():
        count = levels.count(level)
        if count:
            counts.append(f"{count} {one if count == 1 else many}")
        if count and level in ("error", "warning") and role == "ok":
            role = _LEVEL_ROLES[level]
    heading = mark(f"{topic}:", role, look)
    return format_words([heading, Styled(", ".join(counts))], look, indent="  ")


# -- tables --

LEAST_CELL = 20  # columns of the last cell of a row, which does not wrap to less


def format_table(headers: Sequence[str], rows: Iterable[Sequence[object]], *,
                 look: Look = PLAIN, right: Sequence[str] = ()) -> str:
    """Return an aligned table; a cell is Styled, or anything else as its text.

    On a terminal, the columns of `right` hold numbers, the last column wraps and one other may,
    and a table that is still too wide is told row by row. No word is cut that fits a line.
    """
    # Widths are those of the text: a cell is painted when its line is put together.
    cells = [[_as_cell(value) for value in row] for row in rows]
    widths = [width_of(header) for header in headers]
    for row in cells:
        widths = [max(width, width_of(cell.text)) for width, cell in zip(widths, row)]
    if not look.columns:
        return _format_plain_table(headers, cells, widths, look)

    needed = _least_widths(headers, cells, look.columns)
    room = look.columns - 2 * (len(headers) - 1)
    if not _shrink(widths, needed, room):
        return _format_blocks(headers, cells, look)

    aligned = [header in right for header in headers]
    head = [Styled(header, "bold") for header in headers]
    lines = []
    for row in [head, *cells]:
        lines += _format_row(row, widths, aligned, look)
    return "\n".join(lines) + "\n"


def _as_cell(value: object) -> Styled:
    """Return a value as a clean cell of a table."""
    if not isinstance(value, Styled):
        value = Styled(str(value))
    return replace(value, text=clean_line(value.text))


def _format_plain_table(headers: Sequence[str], cells: Sequence[Sequence[Styled]],
                        widths: Sequence[int], look: Look) -> str:
    """Return a table as pipes have always got it, with a ruler."""
    # Scripts read it by its columns; numbers that move to the right would be news to them.
    left = [False] * len(headers)
    lines = _format_row([Styled(header) for header in headers], widths, left, look)
    lines.append("-" * (sum(widths) + 2 * (len(widths) - 1)))
    for row in cells:
        lines += _format_row(row, widths, left, look)
    return "\n".join(lines) + "\n"


def _least_widths(headers: Sequence[str], cells: Sequence[Sequence[Styled]],
                  columns: int) -> list[int]:
    """Return the widths at which no word is cut that fits a line."""
    widths = [width_of(header) for header in headers]
    for row in cells:
        for index, cell in enumerate(row):
            for word in _split_words(find_commands(cell.text), columns):
                widths[index] = max(widths[index], width_of(word.text))
    return widths


def _shrink(widths: list[int], needed: Sequence[int], room: int) -> bool:
    """Make widths fit the room: the last gives first, then that other one which gives the most."""
    last = len(widths) - 1
    least = max(needed[last], min(widths[last], LEAST_CELL))
    _narrow(widths, last, least, room)

    # Two columns that wrap can still be read beside each other; of three, nobody finds the row.
    if last > 0:
        other = max(range(last), key=lambda index: widths[index] - needed[index])
        _narrow(widths, other, needed[other], room)
    return sum(widths) <= room


def _narrow(widths: list[int], index: int, least: int, room: int) -> None:
    """Make one column narrower until all of them fit, or it has its least width."""
    excess = sum(widths) - room
    if excess > 0:
        widths[index] = max(widths[index] - excess, least)


def _format_row(row: Sequence[Styled], widths: Sequence[int], right: Sequence[bool],
                look: Look) -> list[str]:
    """Return the lines of a row of a table."""
    columns = []
    for cell, width, is_right in zip(row, widths, right):
        column = []
        for piece in _wrap_cell(cell, width):
            blank = " " * (width - width_of(piece))
            shown = paint(piece, cell.role, look)
            column.append(blank + shown if is_right else shown + blank)
        columns.append(column)

    lines = []
    for number in range(max(len(column) for column in columns)):
        parts = []
        for column, width in zip(columns, widths):
            parts.append(column[number] if number < len(column) else " " * width)
        lines.append("  ".join(parts).rstrip())
    return lines


def _wrap_cell(cell: Styled, width: int) -> list[str]:
    """Return the pieces of a cell that stand below each other; what is too long is broken."""
    if width_of(cell.text) <= width:
        return [cell.text]

    parts = []
    for part in find_commands(cell.text):
        fits = width_of(part.text) <= width
        parts.append(replace(part, whole=part.whole and fits))
    lines = _wrap_words(parts, width, width)
    return [" ".join(word.text for word in line) for line in lines]


def _format_blocks(headers: Sequence[str], cells: Sequence[Sequence[Styled]],
                   look: Look) -> str:
    """Return a table row by row, a line a cell; a row that goes on with the last has no name."""
    width = max(width_of(header) for header in headers)
    room = max(look.columns - width - 2, 1)
    text = ""
    for row in cells:
        if text and row[0].text:
            text += "\n"
        for header, cell in zip(headers, row):
            if cell.text in ("", "-"):
                continue
            label = header
            for piece in _wrap_cell(cell, room):
                blank = " " * (width - width_of(label))
                shown = paint(piece, cell.role, look)
                text += f"{paint(label, 'dim', look)}{blank}  {shown}\n"
                label = ""
    return text


def format_route_state(route: RouteState) -> str:
    """Return what is true of a route, and who answers while it is not ready."""
    text = route.state
    if route.loaded and route.state == "cold":
        text += f" (loaded with context {route.loaded.context})"
    if route.fallback:
        text += f" \u2192 fallback {route.fallback}"
    return text


def format_pairs(rows: Sequence[tuple[str, str]], look: Look = PLAIN) -> str:
    """Return one line a pair, in two columns; the right one wraps, or stands below the left."""
    width = max((width_of(left) for left, _ in rows), default=0)
    room = look.columns - width - 4
    text = ""
    for left, right in rows:
        blank = " " * (width - width_of(left))
        if not look.columns:
            text += f"  {left}{blank}  {right}\n"
        elif room < LEAST_CELL:
            text += format_words([Styled(left)], look, margin="  ", indent="  ")
            text += format_words([Styled(right)], look, margin="      ")
        else:
            first, *others = _wrap_cell(Styled(right), room)
            text += f"  {left}{blank}  {first}\n"
            text += "".join(f"  {' ' * width}  {piece}\n" for piece in others)
    return text


# -- what commands say --

def format_route(agent: str, model: Model) -> str:
    """Return a route in one line: agent, node, model, alias."""
    return clean_line(f"{agent} -> {model.node} -> {model.ollama_model} -> {model.alias}")


def format_diff(changes: Iterable[Change], fleet: Fleet, look: Look = PLAIN) -> str:
    """Return what would change as a unified diff; keys are never shown."""
    # Only the environment file holds secrets of ours; what a person wrote into it may hold more.
    secret = _secret_pattern(fleet.gateway.master_key_env)
    lines: list[str] = []
    for change in changes:
        if change.found == change.wanted:
            continue

        before = (change.found or b"").decode("utf-8", "backslashreplace")
        after = (change.wanted or b"").decode("utf-8", "backslashreplace")
        if change.path == ENVIRONMENT_FILE:
            before = _hide_secrets(before, secret)
            after = _hide_secrets(after, secret)

        differences = difflib.unified_diff(
            before.splitlines(), after.splitlines(),
            fromfile=change.path, tofile=change.path,
            fromfiledate=change.action, tofiledate="generated",
            lineterm="")
        shown = list(differences)
        if not shown:
            shown = [f"--- {change.path}: only hidden values differ"]
        lines += shown
    return "".join(_paint_difference(clean_text(line), look) + "\n" for line in lines)


def _secret_pattern(key_variable: str) -> re.Pattern[str]:
    """Return what matches a value that must not be shown, after the name that says so."""
    # A blank parts a name from its value in fish alone; in a comment it parts words.
    names = rf"KEY|TOKEN|SECRET|PASS(?:W(?:OR)?D)?|\b{key_variable}"
    return re.compile(rf"((?:{names})(?::?=|:-)).+|(\bset\b.*(?:{names}) ).+|sk-\S+",
                      re.IGNORECASE)


def _hide_secrets(text: str, secret: re.Pattern[str]) -> str:
    return secret.sub(lambda match: (match[1] or match[2] or "") + "(hidden)", text)


_DIFFERENCE_ROLES = {"---": "bold", "+++": "bold", "@@": "dim", "+": "ok", "-": "bad"}


def _paint_difference(line: str, look: Look) -> str:
    """Return a line of a diff; none is wrapped, so that it can be applied."""
    for start, role in _DIFFERENCE_ROLES.items():
        if line.startswith(start):
            return paint(line, role, look)
    return line


@dataclass(frozen=True)
class WorkerSetup:
    """How a system is told Ollama's settings: what to do, one line a setting, what ends it."""

    before: str
    line: str
    after: str = ""


WORKER_SETTINGS = {
    "OLLAMA_HOST": "0.0.0.0:{port}",
    "OLLAMA_CONTEXT_LENGTH": str(MAIN_CONTEXT_TOKENS),
    "OLLAMA_KEEP_ALIVE": "-1",
    "OLLAMA_NUM_PARALLEL": "1",
    "OLLAMA_NO_CLOUD": "1",
    "OLLAMA_MAX_LOADED_MODELS": "{models}",
}
WORKER_SETUPS = {
    "darwin": WorkerSetup(
        before="""\
In the Ollama app: Settings > Expose Ollama to the network. Or in Terminal on the Mac itself,
lost at every restart of the Mac:

""",
        line='  launchctl setenv {name} "{value}"\n',
        after="  killall Ollama; open -a Ollama\n"),
    "systemd": WorkerSetup(
        before="""\
Type `sudo systemctl edit ollama` and put this where it says so:

  [Service]
""",
        line='  Environment="{name}={value}"\n',
        after="\nThen: sudo systemctl restart ollama\n"),
    "windows": WorkerSetup(
        before="""\
In a Command Prompt; then quit Ollama in the tray and start it anew:

""",
        line='  setx {name} "{value}"\n'),
    "docker": WorkerSetup(
        before="""\
Stop the container that runs; add `--gpus=all` where there is one:

  docker run -d --name ollama --restart unless-stopped -v ollama:/ollama \\
    -e OLLAMA_MODELS=/ollama/models \\
""",
        line="    -e {name}={value} \\\n",
        after="    -p {address}:{port}:{port} ollama/ollama\n"),
    "shell": WorkerSetup(
        before="""\
Stop Ollama, and start it so:

""",
        line="  {name}={value} \\\n",
        after="  ollama serve\n"),
}
SECURITY_WARNING = """\
Ollama has no login: whoever reaches it can use, change and delete its models.
Do not expose Ollama or LiteLLM to the public internet. Use LAN, firewall, Tailscale, or WireGuard.
"""


def format_setup(system: str, state: NodeState, reached: Sequence[NodeState]) -> str:
    """Return what to type on this system to open its Ollama to the fleet."""
    port = split_endpoint(state.endpoint).port
    words = {
        "port": port,
        "models": len(rank_models([state])) or 1,
        "address": reached[0].name if reached else "0.0.0.0",
    }
    setup = WORKER_SETUPS[system]
    text = setup.before
    for name, value in WORKER_SETTINGS.items():
        text += setup.line.format(name=name, value=value.format(**words))
    return text + setup.after.format(**words)


def format_worker(report: Mapping[str, Any], look: Look = PLAIN) -> str:
    """Return everything `worker` has to say, the part to paste last."""
    paragraphs = []
    state = report["ollama"]
    if state.online:
        names = ", ".join(model.name for model in state.models) or "no model"
        sentence = Styled(f"Ollama {state.version} runs here with {names}")
        paragraphs.append(format_words([sentence], look, indent="  "))

    rows = []
    for address in report["addresses"]:
        answers = mark("no", "bad", look)
        if address["open"]:
            answers = mark("yes", "ok", look)
        rows.append((address["address"], address["kind"], answers))
    headers = ("Address", "Kind", "Ollama answers there")
    paragraphs.append(format_table(headers, rows, look=look))
    for finding in report["findings"]:
        paragraphs.append(format_finding(finding, look=look))

    paragraphs.append("The settings of a good node, open to the fleet:\n")
    paragraphs.append(_wrap_sentences(report["setup"], look.columns))
    paragraphs.append(wrap_text(SECURITY_WARNING, look.columns))
    where = "On the machine that has the fleet, put these lines under the `nodes:` and `models:` " \
            "of its fleet.yaml:\n"
    paragraphs.append(wrap_text(where, look.columns))
    block = {key: value for key, value in report["fleet"].items() if value}
    paragraphs.append(dump_yaml(block))
    return "\n".join(paragraphs)


def _wrap_sentences(text: str, columns: int) -> str:
    """Return text whose sentences are wrapped; what is indented is to be typed, and stays."""
    lines = []
    for line in text.split("\n"):
        if not line.startswith(" "):
            line = wrap_text(line, columns)
        lines.append(line)
    return "\n".join(lines)


def format_share(loaded: LoadedModel) -> str:
    """Return which part of a loaded model is on the GPU."""
    if loaded.gpu_percent is None:
        return ""
    if loaded.gpu_percent == 0:
        return "on CPU"
    return f"{loaded.gpu_percent} % on GPU"


def format_expiry(expires: str, now: float) -> str:
    """Return when a model leaves memory, from what `/api/ps` says."""
    text = re.sub(r"\.\d+", "", expires).replace("Z", "+00:00")  # 3.9 reads neither
    try:
        left_seconds = datetime.datetime.fromisoformat(text).timestamp() - now
    except (ValueError, OverflowError):
        return "?"

    if left_seconds < 0:
        return "leaving, or busy"
    if left_seconds < 2 * 3600:
        return f"{left_seconds / 60:.0f} min"
    if left_seconds < 366 * 86400:
        return f"{left_seconds / 3600:.0f} h"
    return "stays"  # keep_alive: -1 is a date in the year 2318


def format_nodes(fleet: Fleet, states: Mapping[str, NodeState], headers: Sequence[str],
                 look: Look = PLAIN) -> str:
    """Return the name of a fleet and a table of its nodes: models, or why there are none."""
    rows = []
    for state in states.values():
        status = mark("offline", "bad", look)
        if state.online:
            status = mark("online", "ok", look)
        names = ", ".join(model.name for model in state.models)
        cells = {
            "Node": state.name,
            "Status": status,
            "Endpoint": state.endpoint,
            "Models": names or f"({state.reason or 'none'})",
        }
        rows.append([cells[header] for header in headers])

    title = format_words([Styled("Fleet:"), Styled(fleet.name, "bold")], look)
    return f"{title}\n" + format_table(headers, rows, look=look)


_PRESENCE_ROLES = {"present": "ok", "missing": "bad", "unknown": "warn"}


def format_presence(models: Iterable[Mapping[str, str]], look: Look = PLAIN) -> str:
    """Return a table of a fleet's models: present, unknown, or missing and what mends that."""
    rows = []
    for model in models:
        state = model["state"]
        words = state
        if state == "missing":
            words = f"missing: {model['fix']}"
        presence = mark(words, _PRESENCE_ROLES[state], look)
        rows.append((model["name"], model["node"], model["ollama_model"], presence))
    return format_table(("Model", "Node", "Ollama model", "Found"), rows, look=look)


def format_details(states: Mapping[str, NodeState], look: Look = PLAIN,
                   typing: Typing = AS_USUAL) -> str:
    """Return what each node said of itself and its models, or why it said nothing."""
    text = ""
    for state in states.values():
        says = state.why
        if state.online:
            says = f"{state.runs}, {state.latency_ms} ms"
        heading = Styled(f"{state.name} ({state.endpoint}):", "bold")
        text += "\n" + format_words([heading, Styled(says)], look, indent="  ")

        if not state.online:
            text += format_fix(as_typed(state.mend, typing), look)
        for model in state.models:
            parts = [Styled(f"{model.name}:"), Styled(_describe_model(model))]
            text += format_words(parts, look, margin="  ", indent="  ")
    return text


def _describe_model(model: NodeModel) -> str:
    """Return what is known of a model: how large, what it was trained for, what it can do."""
    parts = [f"{model.size / 1e9:.1f} GB", model.parameters, model.quantization]
    if model.trained_context:
        parts.append(f"trained for {model.trained_context}")
    parts += model.capabilities or ()
    if model.remote:
        parts.append(f"at {model.remote}")
    return ", ".join(part for part in parts if part)


# -- status --

@dataclass(frozen=True)
class SlotUse:
    """What a gateway says of a model's place on its node."""

    running: int
    slots: int
    rests_seconds: float = 0


@dataclass(frozen=True)
class StatusPage:
    """What `status` shows: everything that is known of a fleet at one moment."""

    fleet: Fleet
    states: Mapping[str, NodeState]
    routes: Mapping[str, RouteState]  # by model
    following: str  # the sentence of plan_next_step
    now: float  # seconds since 1970
    # What the fleet's gateway says, where it was asked and answers.
    places: Mapping[str, SlotUse] = field(default_factory=dict)  # by model
    waiting: int = 0
    gateway_at: str = ""
    is_served: bool = True
    measured: Sequence[Measurement] = ()  # by `bench`

    def find_measured(self, node: str, ollama_model: str) -> Measurement | None:
        """Return what was measured of a model on a node."""
        return find_measurement(self.measured, self.states[node].endpoint, ollama_model)


def format_status(page: StatusPage, look: Look = PLAIN) -> str:
    """Return whether a fleet is ready, what its machines hold, who answers for each agent."""
    if not look.columns:
        return _format_plain_status(page)
    text = _format_verdict(page, look)
    text += "\n" + _format_machines(page, look)

    offline = [state for state in page.states.values() if not state.online]
    if offline:
        text += "\n"
    for state in offline:
        place = Styled(f"{state.name} ({state.endpoint}):", "dim")
        text += format_words([place, Styled(state.why)], look, indent="  ")

    if page.fleet.agents:
        headers = ("Agent", "Model", "Machine", "Alias", "State")
        rows = [_agent_row(page, agent, look) for agent in page.fleet.agents.values()]
        text += "\n" + format_table(headers, rows, look=look)
    return text


def _format_plain_status(page: StatusPage) -> str:
    """Return the status as pipes have always got it."""
    text = format_nodes(page.fleet, page.states, ("Node", "Status", "Endpoint", "Models"))

    rows = []
    for state in page.states.values():
        for loaded in state.loaded:
            share = format_share(loaded)
            expiry = format_expiry(loaded.expires, page.now)
            rows.append((state.name, loaded.name, loaded.context or "?", share, expiry))
    if rows:
        headers = ("Node", "Loaded", "Context", "Where", "Until")
        text += "\n" + format_table(headers, rows)

    text += "\nAgent routing:\n"
    for agent, model in plan_routes(page.fleet).items():
        state_now = clean_line(format_route_state(page.routes[model.name]))
        text += f"{format_route(agent, model)}: {state_now}\n"
    return f"{text}\n{clean_line(page.following)}\n"


def _format_verdict(page: StatusPage, look: Look) -> str:
    """Return the sentence that says whether the fleet is ready, and what to type if not."""
    states = [page.routes[name].state for name in page.fleet.models]
    ready = states.count("ready")
    is_ready = ready == len(states) and page.is_served

    verdict = Styled(f"{ready} of {count_of(states, 'model')} ready.", "warn")
    if is_ready:
        verdict = Styled("ready.", "ok")
    parts = [Styled(f"{page.fleet.name}:", "bold"), verdict]

    if page.gateway_at:
        at_work = sum(place.running for place in page.places.values())
        traffic = f"{at_work} at work, {page.waiting} waiting"
        parts.append(Styled(f"Gateway at {page.gateway_at}: {traffic}."))
    if not is_ready:
        parts += find_commands(clean_line(page.following))
    return format_words(parts, look, indent="  ")


def _format_machines(page: StatusPage, look: Look) -> str:
    """Return a table of the machines and what they hold; what nobody told has no column."""
    headers = ["Machine", "State", "Runs", "Loaded", "Context", "On GPU", "Slots", "tok/s",
               "Stays"]
    if not page.places:
        headers.remove("Slots")
    if not any(page.find_measured(state.name, loaded.name)
               for state in page.states.values() for loaded in state.loaded):
        headers.remove("tok/s")

    rows = []
    for state in page.states.values():
        machine = _describe_machine(page, state, look)
        for loaded in state.loaded or (None,):
            cells = {**machine, **_describe_loaded(page, state, loaded)}
            rows.append([cells.get(header, "") for header in headers])
            machine = {}  # its name stands in the first of its rows only
    return format_table(headers, rows, look=look, right=("Context", "On GPU", "Slots", "tok/s"))


def _describe_machine(page: StatusPage, state: NodeState, look: Look) -> dict[str, object]:
    """Return the cells that say what a machine is and whether it answers."""
    places = [place for name, place in page.places.items()
              if page.fleet.models[name].node == state.name]
    if not state.online:
        now = mark("offline", "bad", look)
    elif any(place.rests_seconds for place in places):
        now = mark("resting", "warn", look)
    else:
        now = mark("online", "ok", look)

    runs = state.runs if state.online else "-"
    return {"Machine": state.name, "State": now, "Runs": runs}


def _describe_loaded(page: StatusPage, state: NodeState,
                     loaded: LoadedModel | None) -> dict[str, object]:
    """Return the cells that say what a model in memory takes and how long it stays."""
    if loaded is None:
        return dict.fromkeys(("Loaded", "Context", "On GPU", "Slots", "tok/s", "Stays"), "-")

    context = "?"
    if loaded.context:
        context = f"{loaded.context:,}"
    share = "-"
    if loaded.gpu_percent is not None:
        share = f"{loaded.gpu_percent} %"
    stays = format_expiry(loaded.expires, page.now)
    if stays == "stays":
        stays = "for ever"

    slots = "-"
    for name, place in page.places.items():
        model = page.fleet.models[name]
        if model.node == state.name and find_models([loaded], model.ollama_model):
            slots = f"{place.running} / {place.slots}"
    measured = page.find_measured(state.name, loaded.name)
    return {
        "Loaded": loaded.name,
        "Context": context,
        "On GPU": share,
        "Slots": slots,
        "tok/s": _show_number(measured.answer_rate) if measured else "-",
        "Stays": stays,
    }


def _agent_row(page: StatusPage, agent: Agent, look: Look) -> Sequence[object]:
    """Return who answers for an agent, and who does so instead."""
    model = page.fleet.models[agent.model]
    route = page.routes[model.name]
    place = page.places.get(model.name, SlotUse(0, 0))

    words = format_route_state(replace(route, fallback=None))
    role = "ok"
    if route.state == "cold" or route.fallback:
        role = "warn"
    elif route.state != "ready":
        role = "bad"
    elif place.rests_seconds:
        words, role = "resting", "warn"
    elif place.running:
        words += f", {place.running} at work"

    if route.fallback:
        other = page.fleet.models[route.fallback]
        words += f" → {other.ollama_model} on {other.node}"

    measured = page.find_measured(model.node, model.ollama_model)
    if measured and measured.tools and not measured.calls_tools and agent.tools != ():
        words += f"; in `bench` it {measured.tools.instead}"
        role = "bad" if role == "bad" else "warn"
    return agent.name, model.ollama_model, model.node, model.alias, mark(words, role, look)


# -- warm-up, what was served, JSON --

def format_warmth(warmth: Warmth, *, before: str = "", look: Look = PLAIN) -> str:
    """Return how it ended, behind what stands before it on its line, and what mends it.

    Of one that waits for others, it says for whom.
    """
    if warmth.stage == "busy":
        outcome = mark("busy:", "warn", look)
        said = f"{warmth.wait}; waiting"
        fix = ""
    elif warmth.ok:
        details = []
        if warmth.loaded:
            details.append(f"context {warmth.loaded.context or '?'}")
            details.append(format_share(warmth.loaded))
        details += [f"{warmth.seconds:.1f} s", warmth.detail]
        outcome = mark("ok", "ok", look)
        said = f" ({', '.join(detail for detail in details if detail)})"
        fix = ""
    else:
        role = "warn" if warmth.state == "busy" else "bad"
        outcome = mark(f"{warmth.state}:", role, look)
        said = warmth.detail
        fix = format_fix(warmth.fix, look, margin="    ")

    before = clean_line(before)
    parts = [outcome, Styled(said)]
    line = f"{before}  {outcome.text} {clean_line(said)}"
    if look.columns and width_of(line) > look.columns:
        heading = format_words([Styled(before.strip())], look, margin="  ", indent="  ")
        return heading + format_words(parts, look, margin="    ", indent="  ") + fix
    unbroken = replace(look, columns=0)
    return format_words(parts, unbroken, margin=f"{before}  ") + fix


def format_progress(groups: Mapping[str, Mapping[Any, Warmth]], now: float,
                    columns: int) -> str:
    """Return one line about what is going on, for a terminal."""
    parts = []
    for group in groups.values():
        for warmth in group.values():
            if warmth.stage in ("waiting", "done"):
                continue
            amount = ""
            if warmth.stage == "pulling" and warmth.size:
                percent = 100 * warmth.pulled // warmth.size
                amount = f"{percent} % of {warmth.size / 1e9:.1f} GB, "
            seconds = now - warmth.began
            stage = warmth.stage
            if stage == "busy":
                stage = f"waits for {some_of(warmth.rivals, 1)}"
            parts.append(f"{warmth.model.name} {stage} {amount}{seconds:.0f} s")

    # It is cut, not wrapped: only one line can be redrawn. And one column shorter than the
    # terminal, because a line that reaches the last one leaves a second line behind.
    line = clean_line("  " + " | ".join(parts))
    return crop(line, (columns or 80) - 1)


LEAST_BAR_COLUMNS = 110  # of a terminal that has room for bars
UNITS_COLUMNS = 100  # of one that has room for units
BAR_CHARACTERS = 8


def format_measurements(measured: Sequence[Measurement], look: Look = PLAIN) -> str:
    """Return a table of what models can, and below it what they did instead."""
    roles = [role for role in ROLES if any(role in known.quality for known in measured)]
    numbers = ("Load s", "Prompt tok/s", "Answer tok/s", "First s")
    is_narrow = 0 < look.columns < UNITS_COLUMNS
    if is_narrow:
        numbers = ("Load", "Prompt", "Answer", "First")
    headers = ["Model", "Machine", *numbers, "Tools", "Context",
               *(role.capitalize() for role in roles)]
    fastest = max((known.answer_rate or 0 for known in measured), default=0)
    rows = []
    for known in measured:
        scores = [known.tools, known.context, *map(known.quality.get, roles)]
        rows.append([known.model, known.node, _show_number(known.load_seconds),
                     _show_prompt_rates(known), _show_rate(known.answer_rate, fastest, look),
                     _show_number(known.first_token_seconds, digits=2),
                     *(_score_cell(score, look) for score in scores)])

    text = format_table(headers, rows, look=look, right=numbers)
    if is_narrow:
        units = "Prompt and Answer in tokens a second, Load and First in seconds."
        text += format_words([Styled(units, "dim")], look)
    notes = [(known, note) for known in measured for note in _measured_notes(known)]
    if notes:
        text += "\n"
    for known, note in notes:
        who = Styled(f"{known.model} on {known.node}:", "dim")
        text += format_words([who, *find_commands(clean_line(note))], look, indent="  ")
    return text


def _show_number(number: float | None, *, digits: int = 1) -> str:
    return "-" if number is None else f"{number:,.{digits}f}"


def _show_prompt_rates(known: Measurement) -> str:
    """Return how fast prompts are read: one of 1,000 tokens, and one of half the context."""
    rates = [known.prompt_rate]
    if known.long_prompt_rate is not None:
        rates.append(known.long_prompt_rate)
    return "/".join(_show_number(rate, digits=0) for rate in rates)


def _show_rate(rate: float | None, fastest: float, look: Look) -> str:
    """Return a rate, with a bar as long as it is against the fastest where there is room."""
    text = _show_number(rate)
    if not (rate and fastest and look.marks and look.columns >= LEAST_BAR_COLUMNS):
        return text
    bar = "█" * max(1, round(BAR_CHARACTERS * rate / fastest))
    return f"{text} {bar:{BAR_CHARACTERS}}"


def _score_cell(score: Score | None, look: Look) -> Styled:
    if score is None:
        return Styled("-")
    role = "bad"
    if score.is_full:
        role = "ok"
    elif score.passed:
        role = "warn"
    return mark(f"{score.passed}/{score.asked}", role, look)


def _measured_notes(known: Measurement) -> Iterator[str]:
    """Yield what a model did instead of what it was asked, and why it was asked no further."""
    topics = {"tools": known.tools, "context": known.context, **known.claims, **known.quality}
    for topic, score in topics.items():
        if score and not score.is_full:
            yield f"{topic}: {score.instead}"
    if known.failure:
        yield f"not measured further: {known.failure}"
    elif known.load_seconds is not None and not known.is_counted:
        yield "its speeds are by this machine's clock; its server does not count them"


def format_courses(courses: Sequence[Course], seconds_left: float, columns: int) -> str:
    """Return one line about what is being measured, for a terminal."""
    parts = [f"{course.node.name}: {course.model.ollama_model}, {course.stage}"
             for course in courses]
    line = clean_line("  " + " | ".join([f"about {format_span(seconds_left)} left", *parts]))
    return crop(line, (columns or 80) - 1)


def format_span(seconds: float) -> str:
    """Return how long something takes, as people say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def format_served(rows: Sequence[Sequence[object]], look: Look = PLAIN) -> str:
    """Return what each node has served: its name, then its totals."""
    if not rows:  # LiteLLM has no such page
        return "\nThe gateway does not tell which node served what.\n"
    headers = ("Node", "Requests", "Tokens in", "Tokens out", "Seconds waited", "Failures")
    shown = []
    for name, *totals in rows:
        cells = [f"{total:,}" if look.columns else str(total) for total in totals]
        waited = TOTALS.index("waited_seconds")
        cells[waited] = f"{totals[waited]:,.1f}"
        shown.append([name, *cells])
    return "\nServed:\n" + format_table(headers, shown, look=look, right=headers[1:])


def show_record(record: Any) -> dict[str, Any]:
    """Return a record as JSON has it: a finding without the drawn excerpt."""
    if isinstance(record, Finding):
        return {
            "id": record.slug,
            "level": record.level,
            "what": record.what,
            "where": record.where,
            "fix": record.fix,
        }
    fields = dict(vars(record))
    if isinstance(record, NodeState):
        fields["online"] = record.online
    return fields


def render_report(command: str, fields: Mapping[str, object]) -> str:
    """Return the JSON object of a command: plain ASCII, whatever a node calls its models."""
    report = {"schema": f"subagent-fleet/{command}/1", **fields}
    return json.dumps(report, indent=2, default=show_record) + "\n"


# -- help --

def format_overview(typing: Typing, groups: Mapping[str, Sequence[tuple[str, str]]],
                    look: Look) -> str:
    """Return what there is to type: every command in its group, in the order of use."""
    width = max(len(name) for rows in groups.values() for name, _ in rows)
    text = wrap_text(
        f"subagent-fleet {__version__}: run Claude Code-style subagents across your local model "
        f"fleet.\n\nStart:\n  {typing.program} up\n\nCommands:\n", look.columns)
    for heading, rows in groups.items():
        padded = [(name.ljust(width), summary) for name, summary in rows]
        text += f"\n{heading}\n{format_pairs(padded, look)}"
    return text + wrap_text(
        f"\n{typing.program} COMMAND --help says more. Exit codes: 0 done, 1 a problem was found,\n"
        "2 usage, 3 refused (--force overrides), 130 interrupted.\n", look.columns)


def format_usage(title: str, examples: Sequence[str], rows: Sequence[tuple[str, str]],
                 look: Look) -> str:
    """Return the help of one command: examples first, then what each word does."""
    text = wrap_text(f"{title}.\n\nExamples:\n", look.columns)
    text += "".join(f"  {line}\n" for line in examples)
    if rows:
        text += "\nOptions:\n" + format_pairs(rows, look)
    return text


# -- what ends a command --

def format_next_steps(fleet: Fleet, out: str) -> str:
    """Return where each agent's work will go, and what a person types next."""
    width = max(map(len, fleet.agents), default=0)
    text = "\nAgent routing:\n"
    for agent, model in plan_routes(fleet).items():
        text += f"  {format_route(agent.ljust(width), model)}\n"

    here = out if out.startswith(("/", ".")) else f"./{out}"
    environment = quote_shell(f"{here}/{ENVIRONMENT_FILE}")
    serve = "  subagent-fleet serve\n"
    gateway = fleet.gateway
    if gateway.provider == "litellm":
        config = quote_shell(f"{here}/{LITELLM_FILE}")
        serve = (f"  . {environment}\n  litellm --config {config} --host {gateway.host} "
                 f"--port {gateway.port}\n")
    return (f"{text}\nNext, load the models, serve them and start Claude Code, all in one:\n"
            f"  subagent-fleet up\n\nOr the gateway in a terminal of its own:\n{serve}"
            "and Claude Code in another:\n  subagent-fleet launch claude\n"
            f"(or: . {environment}; claude)\n")


def add_gateway(sentence: str, finding: Finding) -> str:
    """Return a sentence that says how ready a fleet is; without its gateway it is not."""
    if finding.level == "ok":
        return sentence
    if sentence.startswith("Ready"):
        start = sentence.partition(":")[0].rstrip(".")
        return f"{start}, but {finding.what}: {finding.fix}."
    return f"{sentence} ({finding.what})"


def format_doctor(findings: Sequence[tuple[str, Finding]], verdict: str, look: Look, *,
                  mended: Sequence[str], verbose: bool) -> str:
    """Return doctor's report: what was mended, a block for each topic, the verdict last."""
    blocks = []
    if mended:
        blocks.append("".join(f"mended: {clean_line(text)}\n" for text in mended))
    topics: dict[str, list[Finding]] = {}
    for topic, finding in findings:
        topics.setdefault(topic, []).append(finding)
    for topic, listed in topics.items():
        blocks.append(format_topic(topic, listed, look, verbose=verbose))
    blocks.append(wrap_text(f"{clean_line(verdict)}\n", look.columns, indent="  "))
    return "\n".join(blocks)


# -- logs --

def pad_row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return cells as one line, each as wide as it shall be."""
    padded = []
    for cell, width in zip(cells, widths):
        cell = clean_line(cell)
        padded.append(cell + " " * (width - width_of(cell)))
    return "  ".join(padded)


LOG_HEADERS = ("Time", "Agent", "Model", "Machine", "Seconds", "Outcome")
LOG_INDENT = "          "  # what goes on below a line of a log stands behind its time


def log_widths(rows: Iterable[Mapping[str, str]]) -> list[int]:
    """Return how wide the columns of a log are; lines that come later have to do with them."""
    widths = [10, 10, 10]
    for row in rows:
        names = [row.get(key, "") for key in ("name", "model", "node")]
        widths = [max(width, width_of(clean_line(name))) for width, name in zip(widths, names)]
    return [8, *widths, 7]


def format_log_head(widths: Sequence[int], look: Look = PLAIN) -> str:
    """Return the line above a log, where there is room for columns."""
    line = f"{pad_row(LOG_HEADERS, widths)}  {LOG_HEADERS[-1]}"
    if look.columns and width_of(line) + LEAST_CELL > look.columns:
        return ""
    return f"{paint(line, 'bold', look)}\n"


def format_log_line(request: Mapping[str, Any], widths: Sequence[int], now: float,
                    look: Look, *, more: bool = False) -> str:
    """Return a request in one line: when, who, which model where, how long, how it ended."""
    role = "ok" if request["outcome"] == "ok" else "bad"
    if request["failures"] and role == "ok":
        role = "warn"
    outcome = mark(_describe_outcome(request), role, look)
    seconds = "-" if request["total"] is None else f"{request['total']:.1f}"
    cells = [format_clock(request["time"], now), request["name"], request["model"] or "-",
             request["node"] or "-", seconds.rjust(widths[-1])]
    parts = [outcome]
    if more:
        parts.append(Styled(_describe_request(request), "dim"))

    line = pad_row(cells, widths)
    if not look.columns:
        return format_words(parts, look, margin=f"{line}  ")
    room = look.columns - width_of(line) - 2
    if room < LEAST_CELL:  # no columns then
        cells[-1] = f"{seconds} s"
        return format_words([Styled("  ".join(cells[:1])), *map(Styled, cells[1:]), *parts], look,
                            indent=LOG_INDENT)

    first, *others = _wrap_words(parts, room, look.columns - len(LOG_INDENT))
    text = f"{line}  {_paint_words(first, look)}\n"
    return text + "".join(f"{LOG_INDENT}{_paint_words(words, look)}\n" for words in others)


def _describe_outcome(request: Mapping[str, Any]) -> str:
    """Return how a request ended, and who failed on the way: in words, else by class."""
    tries = [f"{failure['node']}: {failure['why']}" for failure in request["failures"]]
    said = request["said"] or ", ".join(tries)
    if not said:
        return clean_line(request["outcome"])
    joint = " after" if tries else ":"
    return clean_line(f"{request['outcome']}{joint} {said}")


def _describe_request(request: Mapping[str, Any]) -> str:
    """Return what else is known of a request: its waits and its tokens."""
    waits = [f"{word} {request[key]:.1f} s" for word, key in (
        ("waited", "waited"), ("first token after", "first_byte")) if request[key] is not None]
    tokens = f"{request['input_tokens'] or 0:,} tokens in, {request['output_tokens'] or 0:,} out"
    return f"({', '.join([*waits, tokens])})"


def format_failures(requests: Sequence[Mapping[str, Any]], look: Look = PLAIN) -> str:
    """Return who failed how often, and in which words, the most frequent first."""
    counts: dict[str, int] = {}
    for request in requests:
        if request["failures"] or request["outcome"] not in ("ok", "left", "stopped"):
            words = _describe_outcome(request)
            counts[words] = counts.get(words, 0) + 1
    if not counts:
        return ""

    text = "\nFailures:\n"
    for words, count in sorted(counts.items(), key=lambda item: -item[1])[:FAILURES_SHOWN]:
        role = "warn" if words.startswith("ok") else "bad"
        text += format_words([Styled(f"{count} ×"), mark(words, role, look)], look,
                             margin="  ", indent="    ")
    return f"{text}`subagent-fleet logs --failed` says when and for whom.\n"


FAILURES_SHOWN = 5


def format_clock(seconds: float, now: float) -> str:
    """Return the local time of day; of another day its date."""
    try:
        then = datetime.datetime.fromtimestamp(seconds)
    except (ValueError, OverflowError, OSError):
        return "?"
    if then.date() == datetime.datetime.fromtimestamp(now).date():
        return then.strftime("%H:%M:%S")
    return then.strftime("%m-%d %Hh")


def format_answers(states: Sequence[NodeState]) -> str:
    """Return which machines were asked for models, and what each said."""
    text = ""
    for state in states:
        answer = state.reason or count_of(state.models, "model")
        text += f"  {clean_line(f'{state.name} ({state.endpoint}): {answer}')}\n"
    return text


def format_starter(starter: Starter, states: Sequence[NodeState], look: Look = PLAIN) -> str:
    """Return who was asked for models, and who does what where with one reason each."""
    text = format_answers(states)
    if starter.has_models:
        text += "\n" + format_assignment(starter.assignment, look)
    else:
        who = "No model that can be used was found"
        if all(state.reason == "not asked" for state in states):
            who = "Nobody was asked"
        text += f"{who}: the models in it are placeholders.\n"
    if starter.flaw:
        mend = f"`ollama pull {PLACEHOLDERS[0]}`, `subagent-fleet init --force`"
        parts = [Styled(f"{starter.flaw}:"), *find_commands(mend)]
        text += format_words(parts, look)
    return text


def format_assignment(assignment: Assignment, look: Look = PLAIN) -> str:
    """Return a table of who does what where and why, then who stands in and who idles."""
    rows = []
    for job in assignment.jobs:
        placement = assignment.placement(job)
        rows.append((job, placement.model.name, placement.node, assignment.why[job]))
    for placement in assignment.placements:
        if not placement.jobs:
            rows.append(("-", placement.model.name, placement.node, placement.why))
    text = format_table(("Role", "Model", "Machine", "Why"), rows, look=look)

    heirs = [f"{placement.name} by {join_words(placement.fallback)}"
             for placement in assignment.placements if placement.fallback]
    if heirs:
        text += format_words([Styled(f"Stood in for: {'; '.join(heirs)}.")], look)
    for node, why in assignment.idle.items():
        text += format_words([Styled(f"{clean_line(node)} idles: {why}.")], look)
    return text


# -- traces --

_PLANNED_WORDS = {"yes": ("yes", "ok"), "fallback": ("fallback", "warn"), "no": ("no", "bad"),
                  "left": ("no", "bad"), "unknown": ("not known", "warn")}
_TRACE_HEADERS = ("Agent", "Model", "Machine", "Requests", "Waited", "First token", "tok/s", "In",
                  "Out", "As planned")
_TRACE_NUMBERS = _TRACE_HEADERS[3:-1]
# What a narrow terminal does without, the first to go first.
_TRACE_SPARES = ("First token", "In", "Waited", "Out", "Requests", "tok/s")


def format_trace(report: SessionReport, look: Look = PLAIN, *, prompts: bool = False) -> str:
    """Return a session as a tree: each agent, and which model on which machine served it."""
    fleet = report.facts.fleet
    colours = plan_machine_colours(fleet.nodes if fleet else ())
    depths = [each.depth for each in report.agents]
    rows = []
    for index, each in enumerate(report.agents):
        branch, stem = _draw_branch(depths, index, look)
        name = f"{branch}{each.agent.kind}"
        for served in each.served or (None,):
            rows.append(_trace_row(name, served, each.state, report.facts.now, look))
            colour = colours.get(served.node) if served else None
            if served and colour is not None:
                rows[-1]["Machine"] = Styled(served.node, f"machine {colour}")
            name = stem

    text = format_words([Styled(_tell_session(report))], look, indent="  ") + "\n"
    headers = _fit_headers(rows, look)
    cells = [[row.get(header, "") for header in headers] for row in rows]
    text += format_table(headers, cells, look=look, right=_TRACE_NUMBERS)
    for place in report.session.torn[:3]:
        text += format_words([Styled("warning:", "warn"), Styled(f"{place} cannot be read; it is "
                              "cut, or no JSON")], look, indent="  ")
    if prompts:
        text += _format_prompts(report, look)
    return text


def _draw_branch(depths: Sequence[int], index: int, look: Look) -> tuple[str, str]:
    """Return what stands before an agent's name in a tree, and on its further lines."""
    branch = stem = ""
    gap = "" if look.columns < 80 else " "  # a name that breaks behind it is worse
    for depth in range(1, depths[index] + 1):
        later = next((each for each in depths[index + 1:] if each <= depth), 0)
        has_sibling = later == depth
        if not look.marks:
            branch += "  "
        elif depth == depths[index]:
            branch += ("├" if has_sibling else "└") + gap
        else:
            branch += "│ " if has_sibling else "  "
        stem += "│ " if has_sibling and look.marks else "  "
    return branch, stem.rstrip()


def _trace_row(name: str, served: Served | None, state: str, now: float,
               look: Look) -> dict[str, object]:
    """Return the cells of one model on one machine that served an agent."""
    row: dict[str, object] = dict.fromkeys(_TRACE_HEADERS, "-")
    row["Agent"] = name
    if served is None:
        row["As planned"] = Styled(state or "nothing was asked", "dim")
        return row

    word, role = _PLANNED_WORDS[served.planned]
    if served.planned == "fallback":
        word = f"→ fallback: {served.why} at {format_moment(served.at, now)}"
        planned = Styled(word if look.columns else word[2:], role)
    else:
        planned = mark(f"{word}: {served.why}" if served.why else word, role, look)
    if name and state not in ("done", ""):
        planned = replace(planned, text=f"{planned.text}; {state}")
    row.update({
        "Model": served.model, "Machine": served.node or "?", "Requests": str(served.requests),
        "Waited": _format_span(served.waited), "First token": _format_span(served.first_token),
        "tok/s": f"{served.rate:.0f}" if served.rate else "-",
        "In": format_amount(served.input_tokens), "Out": format_amount(served.output_tokens),
        "As planned": planned})
    return row


def _fit_headers(rows: Sequence[Mapping[str, object]], look: Look) -> list[str]:
    """Return the columns that fit beside each other, the last with room for some words."""
    headers = list(_TRACE_HEADERS)
    for spare in _TRACE_SPARES:
        widths = [max(width_of(header), *(width_of(_as_cell(row[header]).text) for row in rows))
                  for header in headers]
        widths[-1] = min(widths[-1], LEAST_CELL)
        if not look.columns or sum(widths) + 2 * (len(widths) - 1) <= look.columns:
            break
        headers.remove(spare)
    return headers


def _tell_session(report: SessionReport) -> str:
    """Return a session in a sentence: what, when, how much, and whether anything left."""
    prompt = crop(clean_line(first_line(report.session.prompt)), 60)
    title = f'"{prompt}"' if prompt else f"Session {report.session.id}"
    began, ended = (format_moment(seconds, report.facts.now)
                    for seconds in (report.began, report.ended))
    served = [row for each in report.agents for row in each.served]
    requests = sum(row.requests for row in served)
    left = sum(row.requests for row in served if row.planned == "left")
    unknown = sum(row.requests for row in served if row.planned == "unknown" and not row.node)

    house = "nothing left the house"
    if left:
        house = f"{left:,} of them left the house" if left < requests else "all left the house"
    elif unknown == requests:
        house = "nothing says where they went"
    elif unknown:
        house = f"nothing says where {unknown:,} of them went"
    return (f"{title}, {began} to {ended[-8:]} ({format_duration(report.ended - report.began)}): "
            f"{count_of(report.agents, 'agent')}, {requests:,} "
            f"{'request' if requests == 1 else 'requests'}, {house}.")


def _format_prompts(report: SessionReport, look: Look) -> str:
    """Return what each agent was asked, whole."""
    text = ""
    for each in report.agents:
        prompt = each.agent.transcript.prompt if each.agent.transcript else ""
        text += "\n" + format_words([Styled(each.agent.kind, "bold")], look)
        lines = clean_text(prompt).splitlines() or ["(Claude Code kept no prompt)"]
        text += "".join(f"{wrap_text(f'  {line}', look.columns)}\n" for line in lines)
    return text


_ANSWERS = {"yes": ("yes", "ok"), "no": ("no", "bad"), "unknown": ("not known", "warn")}


def format_audit(report: SessionReport, look: Look = PLAIN) -> str:
    """Return the five questions and their answers, and the evidence of what is not yes."""
    agents = [each for each in report.agents if each.verdicts]
    if not agents:
        return "\nThere is no subagent to audit.\n"
    answers = [verdict.answer for each in agents for verdict in each.verdicts]
    counts = ", ".join(f"{answers.count(answer)} {word}" for answer, (word, _) in _ANSWERS.items()
                       if answer in answers)
    text = f"\nAudit of {count_of(agents, 'subagent')}: {counts}.\n"

    headers = ["Agent", *(verdict.question for verdict in agents[0].verdicts)]
    rows = [[each.agent.kind, *(mark(*_ANSWERS[verdict.answer], look)
                                for verdict in each.verdicts)] for each in agents]
    text += format_table(headers, rows, look=look)
    for each in agents:
        text += _format_verdicts(each, look)
    return text


def _format_verdicts(each: AgentReport, look: Look) -> str:
    """Return what is to be said of an agent, each thing once with all it answers."""
    said: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for verdict in each.verdicts:
        if verdict.what:
            said.setdefault((verdict.answer, verdict.what, verdict.evidence), []).append(
                verdict.question.lower())

    text = ""
    for (answer, what, evidence), questions in said.items():
        word, role = _ANSWERS[answer]
        label = mark(word, role, look)
        text += format_words(
            [replace(label, text=f"{label.text}:"), Styled(f"{each.agent.kind},", "bold"),
             Styled(f"{', '.join(questions)}: {what}")], look, indent="  ")
        parts = [Styled(f"request {each}" if each.startswith("req_") else each, "dim")
                 for each in evidence]
        text += format_words([Styled("at"), *parts] if parts else [], look, margin="    ")
    return text


def format_sessions(rows: Sequence[Sequence[object]], look: Look = PLAIN) -> str:
    """Return sessions as a list: id, when, how many agents and requests, the first prompt."""
    headers = ("Session", "Last at work", "Agents", "Requests", "First prompt")
    return format_table(headers, rows, look=look, right=("Agents", "Requests"))


def format_moment(seconds: float, now: float) -> str:
    """Return the local time of day, of another day with its date."""
    try:
        then = datetime.datetime.fromtimestamp(seconds)
    except (ValueError, OverflowError, OSError):
        return "?"
    is_today = then.date() == datetime.datetime.fromtimestamp(now).date()
    return then.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S")


def format_duration(seconds: float) -> str:
    """Return a time as `4 min 39 s`."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _format_span(seconds: float | None) -> str:
    """Return seconds with a unit; what nobody would notice is a dash."""
    if seconds is None or seconds < 0.05:
        return "-"
    return f"{seconds:.1f} s" if seconds < 60 else format_duration(seconds)


def first_line(text: str) -> str:
    """Return the first line of a text that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def format_amount(count: int) -> str:
    """Return a number of tokens in four characters: 999, 9.1k, 412k, 1.2M."""
    for unit, size in (("M", 1_000_000), ("k", 1_000)):
        if count >= size * 0.9995:
            amount = count / size
            return f"{amount:.1f}{unit}" if amount < 9.95 else f"{amount:.0f}{unit}"
    return str(count)


def format_after_init(starter: Starter, states: Sequence[NodeState], look: Look = PLAIN) -> str:
    """Return what to type next, as fits what was found."""
    if not starter.has_models:
        return ("Edit it with your Ollama node endpoints, then run:\n"
                "  subagent-fleet discover\n  subagent-fleet generate\n")

    text = ""
    silent = [state.name for state in states if not state.online]
    if silent:
        said = (f"{some_of(silent, 5)}: not reached; `subagent-fleet discover` says what mends "
                "that.\n")
        text = wrap_text(said, look.columns, indent="  ")
    said = "Look it over, then do all the rest at once, or begin with the files:\n"
    return (f"{text}{wrap_text(said, look.columns)}"
            "  subagent-fleet up\n  subagent-fleet generate\n")
def format_lean(denied: Sequence[str], look: Look = PLAIN) -> str:
    """Return which of Claude Code's tools are off, and how they come back."""
    sentence = (f"Lean start: {len(denied)} of Claude Code's tools are off "
                f"({some_of(denied, 3)}) so that the first word comes sooner; `lean: false` under "
                "project.claude brings them back.")
    return format_words([Styled(sentence)], look, indent="  ")


def format_waking(name: str, state: str, seconds: float, look: Look = PLAIN) -> str:
    """Return how a machine was woken."""
    role, words = {
        "awake": ("ok", "answers already"),
        "stopped": ("bad", "is awake, but nothing listens there: start Ollama"),
        "woken": ("ok", f"answered after {seconds:.0f} s"),
        "silent": ("bad", f"has not answered within {seconds:.0f} s: is its network card set to "
                          "wake it, and its mac right?")}[state]
    return format_words([mark(name, role, look), Styled(words)], look, indent="  ")


def format_scan(scan: Scan, look: Look = PLAIN) -> str:
    """Return where a scan looked, what answered, and what was skipped."""
    text = ""
    if scan.networks:
        counts = scan.counts
        sentence = (f"Looked at {', '.join(scan.networks)}: {counts['open']} of "
                    f"{sum(counts.values())} addresses answer, {counts['refused']} refuse, "
                    f"{counts['silent'] + counts['unreachable']} are silent.")
        text += format_words([Styled(sentence)], look)
    if scan.peers:
        text += format_words([Styled(f"Tailscale: {some_of([peer.name for peer in scan.peers])}.")],
                             look)
    for note in scan.notes:
        text += format_words(find_commands(note), look)
    if scan.others:
        skipped = [f"{address} ({why})" for address, why in scan.others]
        text += format_words([Styled(f"Skipped: {some_of(skipped, 8)}.")], look)
    if not scan.found:
        text += "No machine was found.\n"
    return text


def format_found(scan: Scan, known: Mapping[str, str], look: Look = PLAIN) -> str:
    """Return a table of the machines that a scan found, and what takes each into the fleet."""
    rows = []
    for one in scan.found:
        name = known.get(one.node.endpoint, "")
        step = mark(f"is {name}", "ok", look)
        if not name:
            step = Styled(f"`subagent-fleet add {one.node.name}={one.node.endpoint}`")
        rows.append((one.node.name, one.runs, len(one.state.models), step))
    return format_table(("Machine", "Runs", "Models", "In the fleet"), rows, look=look)


# -- trust --

def format_stakes(source: str, stakes: Sequence[tuple[Stake, bool]], look: Look = PLAIN) -> str:
    """Return what would go where with a fleet file, and what of that was accepted."""
    name = clean_line(source)
    if not stakes:
        return f"{name} sends nothing beyond your machines and private networks.\n"
    rows = []
    for stake, accepted in stakes:
        rows.append(("accepted" if accepted else "new", clean_line(stake.what)))
    return f"With {name}:\n{format_pairs(rows, look)}"


# =============================================================================
# D. Speech (pure)
# =============================================================================

# == 9. Talk ==================================================================
#
# What a client asks and a model answers, in nobody's dialect. A Dialect makes a Talk of a request
# and bytes of Deltas; a Backend makes an Ask of a Talk and Deltas of what a node says. So there
# are as many translations as there are dialects and backends, never one for each pair.

IMAGE_WEIGHT = 4_000  # bytes of JSON that take as many tokens as an image
BYTES_A_TOKEN = 4.0  # of JSON; learned per model from its first answer on
REFUSAL_KINDS = {400: "invalid_request_error", 401: "authentication_error",
                 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
                 413: "request_too_large", 529: "overloaded_error"}
RETRY_STATUSES, RETRY_SECONDS = (429, 503, 529), 2
NO_IMAGE = "(an image was left out: this model takes none)"
STOPS_LIMIT = 64  # more stop sequences, or longer ones than this, no client sends
STOP_LIMIT_CHARACTERS = 1_000


class Refusal(FleetError):
    """Why a request is not answered. Each dialect says it in its own shape and words."""

    def __init__(self, http: int, what: str, *, retry_seconds: int = 0) -> None:
        super().__init__("api-error", what)
        self.http = http
        self.kind = REFUSAL_KINDS.get(http, "api_error")  # in the words of the Messages API
        # Above 0: when the client should come back. codex 0.169 asks 30 times in 25 s if not told.
        self.retry_seconds = retry_seconds
        if http in RETRY_STATUSES and not retry_seconds:
            self.retry_seconds = RETRY_SECONDS


class PromptTooLong(Refusal):
    """A prompt of more tokens than the model's context holds, as its node counted or we did."""

    def __init__(self, tokens: int, maximum: int) -> None:
        # Claude Code 2.1.326 compacts on exactly these words.
        super().__init__(400, f"prompt is too long: {tokens} tokens > {maximum} maximum")
        self.tokens, self.maximum = tokens, maximum


class NoImages(Refusal):
    """The model takes no images, which the request holds."""


class NoField(Refusal):
    """The server does not know a field of the request, which it can do without."""

    def __init__(self, what: str, name: str) -> None:
        super().__init__(400, what)
        self.name = name


@dataclass(frozen=True)
class Call:
    """A tool call that a model made."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Result:
    """What came of a call."""

    call_id: str
    text: str
    images: tuple[str, ...] = ()


@dataclass(frozen=True)
class Turn:
    """What one side said in its turn, sorted by kind. Images are base64 text."""

    role: str  # user or assistant
    reminders: tuple[str, ...] = ()  # of the client's program, not the person's own words
    texts: tuple[str, ...] = ()
    thoughts: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()
    results: tuple[Result, ...] = ()


@dataclass(frozen=True)
class Tool:
    """A tool that the model may call; its schema is as the client sent it."""

    name: str
    description: str
    schema: object
    # How the client knows it, where that is more than a name: a call of it is given back so.
    namespace: str = ""
    own_name: str = ""  # within its namespace
    is_custom: bool = False  # it takes one text, which the model gives as `input`


@dataclass(frozen=True)
class Talk:
    """A request: what was said so far, in turns that alternate, and how to go on."""

    alias: str
    turns: tuple[Turn, ...]
    system: tuple[str, ...] = ()
    tools: tuple[Tool, ...] = ()
    choice: str = "auto"  # any: some tool must be called; tool: this one; none
    chosen_tool: str = ""
    one_call: bool = False
    max_tokens: int | None = None
    sampling: dict[str, float] = field(default_factory=dict)  # temperature, top_p, top_k
    stops: tuple[str, ...] = ()
    answer_format: object = None  # "json", or the JSON Schema of what the answer must be
    is_stream: bool = False
    thread: str = ""  # what the client calls the conversation, where its body says so
    original: Mapping[str, Any] | None = None  # the Messages request that it was read from

    def images(self) -> list[str]:
        """Return every image in it."""
        images: list[str] = []
        for turn in self.turns:
            images += turn.images
            for result in turn.results:
                images += result.images
        return images

    def without_images(self) -> Talk:
        """Return the talk with a note where images were."""
        return replace(self, turns=tuple(map(_without_images, self.turns)), original=None)


def _without_images(turn: Turn) -> Turn:
    results = []
    for result in turn.results:
        if result.images:
            result = Result(result.call_id, join_texts([result.text, NO_IMAGE]))
        results.append(result)

    texts = (*turn.texts, NO_IMAGE) if turn.images else turn.texts
    return replace(turn, texts=texts, images=(), results=tuple(results))


def join_texts(texts: Iterable[str]) -> str:
    """Return blocks of text as one; glued together, the last word of one runs into the next."""
    pieces: list[str] = []
    for text in filter(None, texts):
        if pieces and not pieces[-1].endswith("\n") and not text.startswith("\n"):
            pieces.append("\n\n")
        pieces.append(text)
    return "".join(pieces)


def weigh(body: bytes, talk: Talk) -> int:
    """Return the bytes of a rendered request that tell how many tokens it has."""
    images = talk.images()
    return len(body) - sum(map(len, images)) + len(images) * IMAGE_WEIGHT


# -- the answer --

@dataclass(frozen=True)
class End:
    """How an answer ended, and what it took."""

    reason: str  # end_turn, max_tokens, stop_sequence or tool_use
    stop: str = ""  # the stop sequence it ended at
    input_tokens: int = 0
    output_tokens: int = 0
    # By the node's own clock, where it tells; what of the prompt was cached is not in it.
    load_seconds: float | None = None
    prompt_seconds: float | None = None
    answer_seconds: float | None = None
    cache_read: int = 0  # of the input tokens: what the node had read before
    cache_written: int = 0  # and what it keeps


@dataclass(frozen=True)
class Delta:
    """One step of an answer: thinking or text that grows, a call, or the end.

    A `signature` of the thinking before it and a `block` of any other kind only come from nodes
    of Anthropic's own, and go only to writers that `keeps_blocks`.
    """

    kind: str  # thinking, text, call or end; signature, block
    text: str = ""
    call: Call | None = None
    end: End | None = None
    block: dict[str, Any] | None = None


class Sieve:
    """Tells thinking from text in what a model prints, and ends the text at a stop sequence.

    Text that may yet grow to a mark is held back until more comes. A <think> section counts only
    at the very beginning.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stop = ""  # the stop sequence that ended the text
        self._stops = [stop for stop in stops if stop]
        self._phase, self._held = "start", ""

    def skip_thinking(self) -> None:
        """Note that the model tells its thinking apart: what it prints is text."""
        self._phase = "text"

    def feed(self, text: str, *, last: bool = False) -> list[Delta]:
        """Return what can be told now; with `last`, nothing is held back."""
        text, self._held = self._held + text, ""
        if self._phase == "start":
            text = self._begin(text, last)

        deltas = []
        if self._phase == "think":
            thought, mark, text = self._part(text, ["</think>"], last)
            deltas.append(Delta("thinking", thought))
            self._phase = "after" if mark else "think"
        if self._phase == "after":
            text = text.lstrip()
            self._phase = "text" if text else "after"
        if self._stops and self._phase == "text":
            text, self.stop, _ = self._part(text, self._stops, last)

        deltas.append(Delta("text", text))
        return [delta for delta in deltas if delta.text]

    def _begin(self, text: str, last: bool) -> str:
        """Choose the first phase once enough was printed; return what belongs to it."""
        bare = text.lstrip()
        if bare.startswith("<think>"):
            self._phase = "think"
            return bare[len("<think>"):]

        if "<think>".startswith(bare) and not last:
            self._held = text
            return ""

        self._phase = "text"
        return text

    def _part(self, text: str, marks: list[str], last: bool) -> tuple[str, str, str]:
        """Return what stands before the first mark, the mark, and what stands behind it."""
        places = [(text.index(mark), mark) for mark in marks if mark in text]
        if places:
            at, mark = min(places)
            return text[:at], mark, text[at + len(mark):]

        if not last:
            at = len(text) - max(_growing_tail(text, mark) for mark in marks)
            self._held = text[at:]
            text = text[:at]
        return text, "", ""


def _growing_tail(text: str, mark: str) -> int:
    """Return the length of the longest end of a text that may yet grow to the mark."""
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0 and not mark.startswith(text[at:]):
        at = text.find(mark[0], at + 1)
    return len(text) - at if at >= 0 else 0


# == 10. Backends =============================================================
#
# What a node speaks. A Backend makes Asks and reads Replies; it knows no socket and no clock. What
# a node says is not trusted: a field of the wrong type counts as absent, only an answer without
# its list makes the node `bad answer`, and what is wrong in an answer is the node's fault.

ANSWER_MARKS = 100_000  # values in one answer of a node; see count_marks
TOKENS_LIMIT = 10 ** 9  # a higher count is none
LONGEST_SECONDS = 10 ** 6  # nor did anything take longer
ARGUMENTS_DEPTH_LIMIT = 64
# Words for a prompt that the context does not hold: Ollama 0.32.15 and llama.cpp, LM Studio,
# Anthropic, vLLM, OpenAI and OpenRouter. What counts the tokens is `n`, what they may be `most`.
_TOO_LONG = tuple(map(_Pattern, (
    r"(?:\((?P<n>\d{1,9}) tokens\) )?exceeds the available context size"
    r" \((?P<most>\d{1,9}) tokens\)",
    r"input (?:length|after truncation) exceeds|longer than the context",
    r"keep the first (?P<n>\d{1,9}) tokens.{0,99}context length of only (?P<most>\d{1,9})",
    r"tokens to keep from the initial prompt is greater than the context",
    r"prompt is too long: (?P<n>\d{1,9}) tokens > (?P<most>\d{1,9})",
    r"maximum (?:context|model) length (?:is|of) (?P<most>\d{1,9})(?: tokens)?"
    r"(?:\D{1,99}(?P<n>\d{1,9}))?")))
_NO_IMAGES = _Pattern(r"does not support (?:vision|image)|image input|not a multimodal model")
_NOT_THERE = _Pattern(r"model '[^']{1,256}' not found|does not exist")
_NOT_ABLE = _Pattern(r"does not support|image input")


class Backend(ABC):
    """What one kind of node speaks: what to ask of it, and how to read what it says.

    An Ask that a server has nothing for is one that it answers all the same: its version page.
    """

    name = ""  # as `provider:` and a node's reason have it
    log = ""  # where it says more, in words
    loads_twice = False  # a second load of a model gives a second instance of it
    loads_as_asked = False  # a question loads the model, with the context of its route

    @property
    def title(self) -> str:
        """As people call it."""
        return kind_title(self.name)

    def key_headers(self, key: str) -> dict[str, str]:
        """Return the headers that show a node the key it wants."""
        return {"Authorization": f"Bearer {key}"}

    def _ask(self, path: str, parse: Callable[[Any], Any], payload: object = None) -> Ask:
        """Return an Ask whose refusal is a NodeFailure and whose JSON is read by `parse`."""
        def extract(reply: Reply) -> Any:
            if reply.status != 200:
                words = error_words(reply)
                if reply.status == 404 and "model" not in words.lower():
                    raise NodeFailure(f"not {self.name}", f"it does not know {path}")
                raise NodeFailure(f"http {reply.status}", words)
            return parse(parse_answer(reply.body, self))

        return Ask(path, extract, payload)

    def _no_pull(self, model: Model) -> Ask:
        """Return an Ask that says that models come there in another way."""
        def extract(reply: Reply) -> Any:
            raise NodeFailure("no downloads", f"{self.title} takes no downloads from here",
                              fix=f"{obtain_model(self.name, model.ollama_model)} there")
        return Ask(self.identify().path, extract)

    @abstractmethod
    def identify(self) -> Ask:
        """Ask for its version; the quickest thing that only this kind answers."""

    @abstractmethod
    def list_models(self) -> Ask:
        """Ask for the NodeModels on its disk."""

    @abstractmethod
    def list_loaded(self) -> Ask:
        """Ask for the LoadedModels in its memory; context 0: the server does not say which."""

    @abstractmethod
    def describe(self, model_name: str) -> Ask:
        """Ask for what a NodeModel's list entry does not tell, as a dict of its fields."""

    @abstractmethod
    def load(self, model: Model, *, unload: bool = False, words: str = "") -> Ask:
        """Ask to load a model as its route will use it, or to unload it.

        `http 404` of its answer means that the model is not there, and may be pulled; `http 400`
        that it wants `words` to answer to. What it extracts, if anything, is said to people.
        """

    @abstractmethod
    def pull(self, model: Model) -> Ask:
        """Ask to download a model; each line of the answer is read as a PullStep."""

    def check_loading(self, model: Model) -> Ask | None:
        """Ask whether a load that goes on after its answer has ended: a boolean; None: none does.

        NodeFailure where it has failed.
        """
        return None

    @abstractmethod
    def chat(self, talk: Talk, model: Model) -> Ask:
        """Ask a model to go on with a talk; `extract` reads the words of a refusal."""

    @abstractmethod
    def reader(self, talk: Talk, model: Model, estimate: int) -> Reader:
        """Return what reads the answer to `chat`; `estimate` is what the prompt may take."""


class Reader(ABC):
    """Reads one answer of a model, line by line."""

    has_begun = True  # the model has said something; False while only its server has

    @abstractmethod
    def feed(self, line: bytes | bytearray) -> list[Delta]:
        """Return what a line says; NodeFailure or Refusal where it is no answer.

        The last Delta of an answer is its end; without one the node has failed. A Sieve tells
        thinking from text and ends at the talk's stop sequences, where the server does not say
        so. Tokens it does not count are the estimate, and the number of lines.
        """

    def close(self) -> list[Delta]:
        """Return what is said by the node's closing, where it names no end."""
        return []

    @abstractmethod
    def refusal(self, status: int, words: str) -> Refusal:
        """Return what the client is told when the node refuses, in the words it acts on."""


@dataclass(frozen=True)
class PullStep:
    """One line of a download: how far a layer is, and whether all is done."""

    layer: str = ""
    completed: int = 0
    total: int = 0
    is_done: bool = False


# -- reading what a node says --

def read_field(value: object, key: str, kind: type[Any] = str) -> Any:
    """Return a field of an answer; absent, of another type or below 0 it is empty."""
    field_value: Any = value.get(key) if isinstance(value, dict) else None
    if type(field_value) is not kind or (kind is int and field_value < 0):
        return kind()
    return field_value


def error_text(error: object) -> str:
    """Return a node's own words, out of the JSON that its engine wraps them in."""
    while True:
        if isinstance(error, dict):
            wrapped: dict[str, Any] | None = error
        else:
            wrapped = parse_object(str(error)[:HEADER_LIMIT_BYTES])
        if not wrapped:
            return str(error)[:500]
        error = wrapped.get("error", wrapped.get("message", "an error without words"))


# The words in which Ollama and its engine say why they fail (0.32.15, llama.cpp b10488).
_PLAIN_WORDS = """
    a abort aborted again allocate an and any are at available be because been body buffer busy by
    call canceled cannot chat check closed completion connect connection content context could cpu
    crashed cuda cudamalloc deadline decode details device disk does due during embed encountered
    end entity eof error exceed exceeded exceeds exit failed fault file find first for forbidden
    found free from gateway generate gib gpu gpus had has have image images in increase input
    insufficient internal interrupted invalid is it its killed large layers length less limit
    limitations limits llama load loaded loading log logs long lost many maximum may memory message
    messages metal mib missing model more must needs no not null of ollama on open or out overloaded
    parse parsing peer pending please process progress pulling ram refused request requests
    requires reset resource retry rocm runner running segmentation segv server service shutting
    signal sigkill size space start started starting status stopped supported support system
    template terminated than the thinking this timed timeout to token tokens too tool tools try
    unable unauthorized unavailable unexpected unknown unsupported use vram vulkan waiting was while
    with without
""".split()
PLAIN_WORDS_LIMIT = 160


def plain_words(text: str, names: Collection[str] = ()) -> str:
    """Return why a node failed in its own words, as far as they may be kept.

    Its message may quote the prompt or the answer (Ollama's `error parsing tool call: raw=…`
    does): of what is no word of an error, no small number and none of `names`, a dash is left.
    """
    kept: list[str] = []
    for word in text[:HEADER_LIMIT_BYTES].split():
        bare = word.strip("\"'`.,:;()[]{}").lower()
        is_number = re.fullmatch(r"\d{1,5}(\.\d{1,3})?", bare)
        if is_number or bare in _PLAIN_WORDS or bare in names:
            kept.append(word)
        elif bare and kept[-1:] != ["…"]:
            kept.append("…")
    words = " ".join(kept)
    return words[:PLAIN_WORDS_LIMIT].rstrip()


def error_words(reply: Reply) -> str:
    """Return what a node says about a request it refused, in its own words."""
    if 300 <= reply.status < 400:
        return f"it redirects to {reply.headers.get('location', 'elsewhere')}; not followed"
    if reply.status == 400 and b" HTTPS " in reply.body:  # what Go and nginx say on a TLS port
        raise NodeFailure("tls", "it speaks TLS; write https://")
    return error_text(reply.body.decode("utf-8", "replace").strip()).split("\n")[0]


def parse_answer(body: bytes | bytearray, backend: Backend) -> Any:
    """Return the JSON value of an answer; refuse what would grow in memory or take long."""
    if count_marks(body) > ANSWER_MARKS:
        raise NodeFailure("bad answer", f"far more in it than any {backend.title} answers")
    try:
        return parse_json(body)
    except ValueError:
        pass  # its own exception would hold the whole text
    if re.match(rb"\s*[\[{]", body):
        raise NodeFailure("bad answer", "its JSON is broken")
    raise NodeFailure(f"not {backend.name}", "it does not answer with JSON")


def refuse_error(value: Any) -> Any:
    """Return an answer; refuse an error, which Ollama also sends under HTTP 200."""
    if isinstance(value, dict) and "error" in value:
        raise NodeFailure("error", error_text(value["error"]))
    return value


# -- Ollama --
#
# Facts: Ollama 0.32.15. Its own /v1/messages cannot carry num_ctx, keep_alive, think or truncate:
# every request there would reload the model or lose its beginning.

# What Ollama or its engine takes of a tool's schema; one other word can fail the whole request.
SCHEMA_TYPES: dict[str, Any] = {
    "type": (str, list), "description": str, "enum": list, "required": list, "anyOf": list,
    "allOf": list, "properties": dict, "$defs": dict, "$ref": str, "items": object,
    "const": object, "default": object, "format": str, "additionalProperties": bool}
SCHEMA_SYNONYMS = {"oneOf": "anyOf", "definitions": "$defs"}
SCHEMA_KEPT_BYTES = 32 * 1024
JSON_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")


class Ollama(Backend):
    """Ollama's own API, translated."""

    name = "ollama"
    loads_as_asked = True
    log = ("journalctl -u ollama (Linux), ~/.ollama/logs/server.log (macOS), "
           "%LOCALAPPDATA%\\Ollama\\server.log (Windows) or docker logs ollama")

    def identify(self) -> Ask:
        return self._ask("/api/version", self._parse_version)

    def list_models(self) -> Ask:
        return self._ask("/api/tags", self._parse_tags)

    def list_loaded(self) -> Ask:
        return self._ask("/api/ps", self._parse_loaded)

    def describe(self, model_name: str) -> Ask:
        return self._ask("/api/show", self._parse_show, {"model": model_name})

    def load(self, model: Model, *, unload: bool = False, words: str = "") -> Ask:
        # With another num_ctx than the route's, the route's first request would load it again.
        options: dict[str, object] = {"num_ctx": model.context}
        messages = []
        if words:
            messages.append({"role": "user", "content": words})
            options["num_predict"] = 16
        return self._ask("/api/chat", self._parse_loading, {
            "model": model.ollama_model, "messages": messages, "stream": False,
            "think": model.thinking, "keep_alive": 0 if unload else model.keep_alive,
            "options": options})

    def pull(self, model: Model) -> Ask:
        return self._ask("/api/pull", self._parse_pull, {"model": model.ollama_model})

    def chat(self, talk: Talk, model: Model) -> Ask:
        messages = _chat_messages(_wished_turns(talk), model.thinking)
        if not messages:  # which Ollama would take for "load the model" and answer nothing
            raise Refusal(400, "messages: at least one message with content is required")
        if talk.system:
            messages.insert(0, {"role": "system", "content": join_texts(talk.system)})

        # num_ctx must be what warm-up sent, else Ollama loads the model again.
        most = min(talk.max_tokens or model.max_output, model.max_output)
        options = {"num_ctx": model.context, "num_predict": most, **talk.sampling}
        payload = {"model": model.ollama_model, "stream": True, "truncate": False,
                   "think": model.thinking, "keep_alive": model.keep_alive,
                   "options": options, "messages": messages}
        tools = _chat_tools(talk)
        if tools:
            payload["tools"] = tools
        if talk.answer_format:
            payload["format"] = talk.answer_format
        return Ask("/api/chat", error_words, payload)

    def reader(self, talk: Talk, model: Model, estimate: int) -> Reader:
        return OllamaReader(talk, model, estimate)

    def _parse_version(self, value: Any) -> str:
        version: str = read_field(value, "version")
        if not version:
            raise NodeFailure(f"not {self.name}", "/api/version does not answer as Ollama does")
        return version

    def _entries(self, value: Any, path: str) -> list[dict[str, Any]]:
        """Return the entries of a `models` list, each with its name; null is an empty list."""
        entries = value.get("models", "") if isinstance(value, dict) else ""
        entries = [] if entries is None else entries
        if not isinstance(entries, list) or not all(read_field(entry, "name") for entry in entries):
            raise NodeFailure("bad answer", f"{path} holds no list of models")
        return sorted(entries, key=lambda entry: entry["name"])  # Ollama's own order changes by ask

    def _parse_tags(self, value: Any) -> tuple[NodeModel, ...]:
        models = []
        for entry in self._entries(value, "/api/tags"):
            details = read_field(entry, "details", dict)
            # Only /api/show knows what a model can do; but these can do nothing else.
            is_embedding = "bert" in read_field(details, "family")
            models.append(NodeModel(
                name=entry["name"],
                size=read_field(entry, "size", int),
                parameters=read_field(details, "parameter_size"),
                quantization=read_field(details, "quantization_level"),
                capabilities=("embedding",) if is_embedding else None,
                trained_context=read_field(details, "context_length", int) or None,
                remote=read_field(entry, "remote_host") or read_field(entry, "remote_model")))
        return tuple(models)

    def _parse_show(self, value: Any) -> dict[str, object]:
        """Return what /api/show adds to a model: what it can do and what it was trained for."""
        info = read_field(value, "model_info", dict)
        length_key = read_field(info, "general.architecture") + ".context_length"
        words = read_field(value, "capabilities", list)
        facts = {"capabilities": tuple(word for word in words if isinstance(word, str)),
                 "trained_context": read_field(info, length_key, int),
                 "token_bytes": plan_token_bytes(info)}
        return {key: fact for key, fact in facts.items() if fact}

    def _parse_loaded(self, value: Any) -> tuple[LoadedModel, ...]:
        loaded = []
        for entry in self._entries(value, "/api/ps"):
            size = read_field(entry, "size", int)
            percent = None
            if size and "size_vram" in entry:
                percent = min(100, round(100 * read_field(entry, "size_vram", int) / size))
            loaded.append(LoadedModel(
                name=entry["name"], context=read_field(entry, "context_length", int),
                gpu_percent=percent, size=size, expires=read_field(entry, "expires_at")))
        return tuple(loaded)

    def _parse_loading(self, value: Any) -> None:
        if not read_field(refuse_error(value), "done", bool):
            raise NodeFailure("bad answer", "its answer to a load is not Ollama's")

    def _parse_pull(self, value: Any) -> PullStep:
        step = refuse_error(value)
        return PullStep(
            layer=read_field(step, "digest"), completed=read_field(step, "completed", int),
            total=read_field(step, "total", int),
            is_done=read_field(step, "status") == "success")  # errors come under 200, too


def _wished_turns(talk: Talk) -> tuple[Turn, ...]:
    """Return the turns, with the client's choice of tools as words in the last one."""
    # Ollama ignores tool_choice: showing fewer tools and a word in the last turn is all there is.
    wishes = {"any": "Answer by calling one of your tools.",
              "tool": f"Answer by calling the tool `{talk.chosen_tool}`."}
    wish = wishes.get(talk.choice)
    if not wish:
        return talk.turns

    last = talk.turns[-1] if talk.turns else None
    if last is None or last.role != "user":
        return (*talk.turns, Turn("user", reminders=(wish,)))
    return (*talk.turns[:-1], replace(last, reminders=(*last.reminders, wish)))


def _chat_messages(turns: Iterable[Turn], thinking: bool) -> list[dict[str, Any]]:
    """Return chat messages in which every call has an id of its own and one result."""
    messages: list[dict[str, Any]] = []
    ids = _CallIds()
    calls: list[tuple[str, Call]] = []  # of the turn before, each with its own id
    for turn in turns:
        if turn.role == "assistant":
            calls = [(ids.take(call.id), call) for call in turn.calls]
            messages.append(_assistant_message(turn, calls, thinking))
        else:
            messages += _user_messages(turn, calls)
            calls = []

    kept = []
    for message in messages:
        message = {name: value for name, value in message.items() if value or name == "content"}
        if message["content"] or len(message) > 2:
            kept.append(message)
    return kept


class _CallIds:
    """Makes every id of a call its own, in linear time."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._repeats: dict[str, int] = {}

    def take(self, wanted: str) -> str:
        unique = wanted or f"call_{len(self._taken)}"
        while unique in self._taken:
            self._repeats[wanted] = self._repeats.get(wanted, 0) + 1
            unique = f"{wanted or 'call'}_{self._repeats[wanted]}"
        self._taken.add(unique)
        return unique


def _assistant_message(turn: Turn, calls: list[tuple[str, Call]],
                       thinking: bool) -> dict[str, Any]:
    return {"role": "assistant", "content": join_texts(turn.texts),
            "thinking": join_texts(turn.thoughts) if thinking else "",
            "tool_calls": [{"id": own_id, "function": {
                "name": call.name, "arguments": call.arguments}} for own_id, call in calls]}


def _user_messages(turn: Turn, calls: list[tuple[str, Call]]) -> list[dict[str, Any]]:
    """Return the results of the calls before this turn, then what the user says."""
    waiting: dict[str, list[Result]] = {}  # by the id of their call, the first one last
    for result in reversed(turn.results):
        waiting.setdefault(result.call_id, []).append(result)

    messages: list[dict[str, Any]] = []
    for own_id, call in calls:  # its own result, or one without an id
        results = waiting.get(call.id) or waiting.get("")
        result = results.pop() if results else Result(call.id, "(no result)")
        messages.append({"role": "tool", "tool_call_id": own_id, "tool_name": call.name,
                         "content": result.text, "images": list(result.images)})

    left = {id(result) for results in waiting.values() for result in results}
    orphans = [result for result in turn.results if id(result) in left]
    words = [f"[result of an earlier call]\n{orphan.text}" for orphan in orphans]
    words += turn.texts
    images = [image for orphan in orphans for image in orphan.images] + list(turn.images)
    reminders = [f"<system-reminder>\n{text}\n</system-reminder>" for text in turn.reminders]

    if messages and not words and not images:
        # A message after the results would read as the user's next question.
        messages[-1]["content"] = join_texts([messages[-1]["content"], *reminders])
    else:
        content = join_texts([*reminders, *words])
        messages.append({"role": "user", "content": content, "images": images})
    return messages


def _chat_tools(talk: Talk) -> list[dict[str, Any]]:
    if talk.choice == "none":
        return []
    tools = []
    for tool in talk.tools:
        if talk.choice == "tool" and tool.name != talk.chosen_tool:
            continue
        tools.append({"type": "function", "function": {
            "name": tool.name, "description": tool.description,
            "parameters": mend_schema(tool.schema)}})
    return tools


def mend_schema(schema: object) -> dict[str, Any]:
    """Return a tool's schema as llama.cpp takes it; a client sends the same ones every time."""
    if not isinstance(schema, dict):
        return _mend_root({})
    text = render_json(schema)
    if len(text) > SCHEMA_KEPT_BYTES:
        return _mend_root(schema)
    return _mend_kept(text)


@lru_cache(maxsize=256)
def _mend_kept(text: bytes) -> dict[str, Any]:
    return _mend_root(parse_json(text))


def _mend_root(schema: dict[str, Any]) -> dict[str, Any]:
    # One tool whose schema is not called an object and Ollama refuses the whole request.
    root = {SCHEMA_SYNONYMS.get(word, word): value for word, value in schema.items()}
    root["type"] = "object"
    return {"properties": {}, **_mend_schema(root, root)}


def _mend_schema(schema: object, root: dict[str, Any]) -> dict[str, Any]:
    """Return what is left of a schema when nothing in it can fail the request."""
    words = _known_words(schema) if isinstance(schema, dict) else {}

    if "type" in words:
        words["type"] = _known_types(words["type"])
    if "required" in words:
        words["required"] = [name for name in words["required"] if isinstance(name, str)]
    if "$ref" in words:
        words["$ref"] = _known_reference(words["$ref"], root)

    if "items" in words:
        words["items"] = _mend_schema(words["items"], root)
    for word in ("anyOf", "allOf"):
        if word in words:
            words[word] = [_mend_schema(part, root) for part in words[word]]
    for word in ("properties", "$defs"):
        if word in words:
            words[word] = {name: _mend_schema(part, root) for name, part in words[word].items()
                           if name != "$ref"}  # which the engine would follow

    words = {word: value for word, value in words.items() if value not in ([], "")}
    return words or {"description": "anything"}  # an empty one would be an object


def _known_words(schema: dict[str, Any]) -> dict[str, Any]:
    words = {}
    for name, value in schema.items():
        word = SCHEMA_SYNONYMS.get(name, name)
        if isinstance(value, SCHEMA_TYPES.get(word, ())):
            words[word] = value
    return words


def _known_types(types: str | list[Any]) -> str | list[str]:
    names: Sequence[Any] = [types] if isinstance(types, str) else types
    known = [name for name in names if name in JSON_TYPES]
    return known[0] if len(known) == 1 else known


def _known_reference(reference: str, root: dict[str, Any]) -> str:
    """Return a reference to a definition that is there, else an empty text."""
    reference = reference.replace("#/definitions/", "#/$defs/")
    match = re.fullmatch(r"#/(\$defs|properties)/([^/]+)", reference)
    if not match:
        return ""
    place = root.get(match[1])
    return reference if isinstance(place, dict) and match[2] in place else ""


def read_refusal(provider: str, model: Model, estimate: int, status: int, words: str) -> Refusal:
    """Return what a client is told of a node that refused, in the words it acts on."""
    for pattern in _TOO_LONG:
        match = pattern.search(words)
        if match:
            counts = match.groupdict()
            maximum = int(counts.get("most") or model.context)
            tokens = int(counts.get("n") or estimate)
            return PromptTooLong(max(tokens, maximum + 1), maximum)

    who = f"node {model.node}, model {model.ollama_model}"
    words = words or f"it answered {status}"
    if _NO_IMAGES.search(words):
        return NoImages(400, f"{who}: {words}")
    if status == 404 or _NOT_THERE.search(words):
        obtain = obtain_model(provider, model.ollama_model)
        if obtain.startswith("`"):
            obtain = f"type {obtain}"
        return Refusal(404, f"{who}: {words}; {obtain} there")
    if status in (400, 422) or _NOT_ABLE.search(words):
        return Refusal(400, f"{who}: {words}")
    if status in (429, 503, 529):
        return Refusal(529, f"{who}: {words}")
    return Refusal(500, f"{who}: {words}; {kind_title(provider)}'s log there says more")


class OllamaReader(Reader):
    """Reads the lines of /api/chat."""

    def __init__(self, talk: Talk, model: Model, estimate: int) -> None:
        self._model, self._estimate = model, estimate
        self._one_call, self._calls, self._lines = talk.one_call, 0, 0
        self._sieve = Sieve(talk.stops)
        self._kind = ""  # of the Delta before

    def feed(self, line: bytes | bytearray) -> list[Delta]:
        part = parse_object(line)
        if part is None:
            raise NodeFailure("bad answer", "it sent something that is not an answer")
        if "error" in part:
            status = part["status"] if type(part.get("status")) is int else 500
            raise self.refusal(status, error_text(part["error"]))
        self._lines += 1

        message = read_field(part, "message", dict)
        deltas = self._growth(message)
        if self._sieve.stop:
            return [*deltas, self._end("stop_sequence", self._estimate, self._lines)]
        for call in read_field(message, "tool_calls", list):
            deltas += self._call(call)
        if part.get("done") is True:
            deltas += self._last(part)
        return deltas

    def _growth(self, message: dict[str, Any]) -> list[Delta]:
        """Return the thinking and the text of a line; blank thinking begins no thought."""
        deltas = []
        thinking: str = read_field(message, "thinking")
        if thinking:
            self._sieve.skip_thinking()
            deltas.append(Delta("thinking", thinking))
        text: str = read_field(message, "content")
        if text:
            deltas += self._sieve.feed(text)
        return self._without_blank_thoughts(deltas)

    def _without_blank_thoughts(self, deltas: list[Delta]) -> list[Delta]:
        kept = []
        for delta in deltas:
            begins = delta.kind == "thinking" and self._kind != "thinking"
            if begins and not delta.text.strip():
                continue
            self._kind = delta.kind
            kept.append(delta)
        return kept

    def _call(self, value: object) -> list[Delta]:
        function = read_field(value, "function", dict)
        name: str = read_field(function, "name")
        if not name or (self._one_call and self._calls):
            return []
        self._calls += 1

        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = parse_object(arguments)
        if not isinstance(arguments, dict):
            arguments = {}
        if is_deeper(arguments, ARGUMENTS_DEPTH_LIMIT):
            raise NodeFailure("bad answer", "the arguments of a call are nested too deeply")

        deltas = self._without_blank_thoughts(self._sieve.feed("", last=True))
        self._kind = "call"
        return [*deltas, Delta("call", call=Call(read_field(value, "id"), name, arguments))]

    def _last(self, part: dict[str, Any]) -> list[Delta]:
        deltas = self._without_blank_thoughts(self._sieve.feed("", last=True))
        reason = "end_turn"
        if self._sieve.stop:
            reason = "stop_sequence"
        elif self._calls:
            reason = "tool_use"
        elif part.get("done_reason") == "length":
            reason = "max_tokens"
        counts = [read_field(part, name, int) for name in ("prompt_eval_count", "eval_count")]
        names = ("load_duration", "prompt_eval_duration", "eval_duration")
        times = [_seconds_of(read_field(part, name, int)) for name in names]
        return [*deltas, self._end(reason, *counts, times=times)]

    def _end(self, reason: str, tokens_in: int, tokens_out: int, *,
             times: Iterable[float | None] = ()) -> Delta:
        counts = [count if count < TOKENS_LIMIT else 0 for count in (tokens_in, tokens_out)]
        return Delta("end", end=End(reason, self._sieve.stop, *counts, *times))

    def refusal(self, status: int, words: str) -> Refusal:
        return read_refusal(Ollama.name, self._model, self._estimate, status, words)



def _seconds_of(nanoseconds: int) -> float | None:
    """Return a time that a node told, None where it told none, or one that no request takes."""
    seconds = nanoseconds / 1e9
    return seconds if 0 < seconds < LONGEST_SECONDS else None


def is_deeper(value: object, limit: int) -> bool:
    """Tell whether a JSON value has more levels than the limit."""
    level = [value]
    for _ in range(limit + 1):
        if not level:
            return False
        inner = [child for child in level if isinstance(child, (dict, list))]
        level = [item for child in inner
                 for item in (child.values() if isinstance(child, dict) else child)]
    return bool(level)


# -- servers that speak Messages themselves --
#
# A local one gets the fields of the request as they came, and the conversation in plain blocks:
# most templates want the system first and turns in alternation, few know tool references.

OPTIONAL_FIELDS = ("metadata", "context_management", "output_config", "thinking", "tool_choice",
                   "temperature", "top_k", "top_p", "service_tier", "container", "mcp_servers",
                   "chat_template_kwargs", "stream_options", "parallel_tool_calls",
                   "response_format", "max_tokens")
_PIXELS = {"/9j/": "image/jpeg", "R0lG": "image/gif", "UklG": "image/webp"}  # else PNG
ERROR_STATUSES = {kind: status for status, kind in REFUSAL_KINDS.items()}


def render_messages(talk: Talk, *, thinking: bool, mends: bool = False) -> dict[str, Any]:
    """Return a talk as a Messages request; `mends`: schemas as llama.cpp takes them."""
    request: dict[str, Any] = {}
    if talk.system:
        request["system"] = join_texts(talk.system)
    messages: list[dict[str, Any]] = []
    for message in _chat_messages(talk.turns, thinking):
        role, blocks = _message_blocks(message)
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += blocks
        else:
            messages.append({"role": role, "content": blocks})
    if not messages:
        raise Refusal(400, "messages: at least one message with content is required")
    request["messages"] = messages

    if talk.tools:
        chosen: dict[str, Any] | None = {"any": {"type": "any"}, "none": {"type": "none"},
                  "tool": {"type": "tool", "name": talk.chosen_tool}}.get(
                      talk.choice)
        if talk.one_call:
            chosen = {**(chosen or {"type": "auto"}), "disable_parallel_tool_use": True}
        if chosen:
            request["tool_choice"] = chosen
        request["tools"] = [{"name": tool.name, "description": tool.description,
                             "input_schema": _object_schema(tool, mends=mends)}
                            for tool in talk.tools]
    request.update(talk.sampling)
    if talk.stops:
        request["stop_sequences"] = list(talk.stops)
    return request


def _object_schema(tool: Tool, *, mends: bool) -> dict[str, Any]:
    """Return a tool's schema, which must be that of an object."""
    if mends:
        return mend_schema(tool.schema)
    schema = tool.schema if isinstance(tool.schema, dict) else {}
    return {"properties": {}, **schema, "type": "object"}


def _message_blocks(message: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Return whose turn a chat message is, and its blocks."""
    text = [{"type": "text", "text": message["content"]}] if message["content"] else []
    images = [{"type": "image", "source": {
        "type": "base64", "media_type": _PIXELS.get(image[:4], "image/png"), "data": image}}
        for image in message.get("images", ())]
    if message["role"] == "tool":
        return "user", [{"type": "tool_result", "tool_use_id": message["tool_call_id"],
                         "content": [*text, *images]}]
    if message["role"] == "user":
        return "user", [*images, *text]

    blocks = text
    if message.get("thinking"):
        blocks = [{"type": "thinking", "thinking": message["thinking"], "signature": ""}, *text]
    for call in message.get("tool_calls", ()):
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"],
                       "input": call["function"]["arguments"]})
    return "assistant", blocks


class MessagesServer(Backend):
    """A local server that speaks Anthropic's Messages API itself."""

    mends_schemas = False
    extra_fields: dict[str, Any] = {}  # by which thinking is told; see `chat`

    def pull(self, model: Model) -> Ask:
        return self._no_pull(model)

    def chat(self, talk: Talk, model: Model) -> Ask:
        rendered = render_messages(talk, thinking=model.thinking, mends=self.mends_schemas)
        kept = {name: value for name, value in (talk.original or {}).items()
                if name not in ("messages", "system", "tools", "tool_choice")}
        payload = {**kept, **rendered, "model": model.ollama_model, "stream": True,
                   "max_tokens": min(talk.max_tokens or model.max_output, model.max_output)}
        if not model.thinking:
            payload.pop("thinking", None)  # which Claude Code always asks for
        for name, value in self.extra_fields.items():
            payload[name] = {**value, "enable_thinking": model.thinking}
        return Ask("/v1/messages", error_words, payload, {"anthropic-version": "2023-06-01"})

    def reader(self, talk: Talk, model: Model, estimate: int) -> Reader:
        return MessagesReader(self.name, talk, model, estimate)


def named_field(words: str) -> str:
    """Return which optional field of a request a server says it cannot take, or nothing."""
    for name in OPTIONAL_FIELDS:
        if re.search(rf"(?<![\w.]){name}(?!\w)", words):
            return name
    return ""


class StreamReader(Reader):
    """Reads the `data:` lines of a stream; what else there is are names and comments."""

    has_begun = False

    def __init__(self, provider: str, talk: Talk, model: Model, estimate: int) -> None:
        self._provider, self._model, self._estimate = provider, model, estimate
        self._one_call, self._calls, self._lines = talk.one_call, 0, 0
        self._sieve = Sieve(())
        self._kind = ""  # of the Delta before

    def feed(self, line: bytes | bytearray) -> list[Delta]:
        if not line.startswith(b"data:"):
            if line.startswith(b"{"):  # an error without the form of a stream
                self._refuse_error(parse_object(line) or {})
            return []
        if line[5:].strip() == b"[DONE]":
            return self.close()
        part = parse_object(line[5:])
        if part is None:
            raise NodeFailure("bad answer", "it sent something that is not an answer")
        return self.read(part)

    @abstractmethod
    def read(self, part: dict[str, Any]) -> list[Delta]:
        """Return what one object of the stream says."""

    def _refuse_error(self, part: dict[str, Any]) -> None:
        """Raise what an object says that is an error."""
        error = part.get("error")
        if not error:
            return
        status = read_field(error, "code", int) or read_field(error, "status", int)
        status = status or ERROR_STATUSES.get(read_field(error, "type"), 500)
        raise self.refusal(status, error_text(error))

    def _text(self, text: str) -> list[Delta]:
        """Return the text of a line; what a model prints of its thinking is told apart."""
        self.has_begun = True
        return self._told(self._sieve.feed(text))

    def _thought(self, text: str) -> list[Delta]:
        self.has_begun = True
        self._sieve.skip_thinking()
        return self._told([Delta("thinking", text)])

    def _told(self, deltas: list[Delta]) -> list[Delta]:
        """Return Deltas without blank thinking that begins no thought."""
        kept = []
        for delta in deltas:
            begins = delta.kind == "thinking" and self._kind != "thinking"
            if not delta.text or (begins and not delta.text.strip()):
                continue
            self._kind = delta.kind
            self._lines += 1
            kept.append(delta)
        return kept

    def _call(self, call_id: str, name: str, arguments: str) -> list[Delta]:
        """Return a call whose arguments have all come."""
        if not name or (self._one_call and self._calls):
            return []
        self._calls += 1
        values = parse_object(arguments) or {}
        if is_deeper(values, ARGUMENTS_DEPTH_LIMIT):
            raise NodeFailure("bad answer", "the arguments of a call are nested too deeply")
        deltas = self._told(self._sieve.feed("", last=True))
        self._kind = "call"
        return [*deltas, Delta("call", call=Call(call_id, name, values))]

    def _end(self, reason: str, stop: str, usage: Mapping[str, int]) -> list[Delta]:
        """Return what was held back, and the end; `usage` has the fields of an End."""
        deltas = self._told(self._sieve.feed("", last=True))
        counts = {name: count for name, count in usage.items() if 0 < count < TOKENS_LIMIT}
        counts.setdefault("input_tokens", self._estimate)
        counts.setdefault("output_tokens", self._lines + self._calls)
        return [*deltas, Delta("end", end=End(reason, stop, **counts))]

    def refusal(self, status: int, words: str) -> Refusal:
        refusal = read_refusal(self._provider, self._model, self._estimate, status, words)
        name = named_field(words) if type(refusal) is Refusal and refusal.http == 400 else ""
        return NoField(refusal.what, name) if name else refusal


class MessagesReader(StreamReader):
    """Reads the events of a Message. Blocks may overlap (llama.cpp ends thinking after text)."""

    reasons = ("end_turn", "max_tokens", "stop_sequence", "tool_use")

    def __init__(self, provider: str, talk: Talk, model: Model, estimate: int) -> None:
        super().__init__(provider, talk, model, estimate)
        self._usage: dict[str, int] = {}
        self._blocks: dict[int, dict[str, Any]] = {}  # that are not text or thinking
        self._pieces: dict[int, list[str]] = {}  # of their JSON
        self._reason = self._stop = ""

    def read(self, part: dict[str, Any]) -> list[Delta]:
        kind = part.get("type")
        if kind == "content_block_delta":
            return self._grow(part)
        if kind == "content_block_start":
            return self._start(part)
        if kind == "content_block_stop":
            return self._close_block(read_field(part, "index", int))
        if kind == "message_stop":
            return self.close()

        self._refuse_error(part)
        if kind in ("message_start", "message_delta"):
            message = read_field(part, "message", dict) or part
            usage = read_field(message, "usage", dict)
            self._usage.update({name: usage[name] for name in usage
                                if read_field(usage, name, int)})
            delta = read_field(part, "delta", dict)
            self._reason = read_field(delta, "stop_reason") or self._reason
            self._stop = read_field(delta, "stop_sequence") or self._stop
        return []

    def _start(self, part: dict[str, Any]) -> list[Delta]:
        """Note a block that must be whole before it is said; say what others begin with."""
        self.has_begun = True
        index, block = read_field(part, "index", int), read_field(part, "content_block", dict)
        kind = block.get("type")
        if kind == "text":
            return self._text(read_field(block, "text"))
        if kind == "thinking":
            return self._thought(read_field(block, "thinking"))
        self._blocks[index] = block
        self._pieces[index] = []
        return []

    def _grow(self, part: dict[str, Any]) -> list[Delta]:
        delta = read_field(part, "delta", dict)
        kind = delta.get("type")
        if kind == "text_delta":
            return self._text(read_field(delta, "text"))
        if kind == "thinking_delta":
            return self._thought(read_field(delta, "thinking"))
        if kind == "input_json_delta":
            index = read_field(part, "index", int)
            if index in self._pieces:
                self._pieces[index].append(read_field(delta, "partial_json"))
        if kind == "signature_delta" and read_field(delta, "signature"):
            return [Delta("signature", read_field(delta, "signature"))]
        return []

    def _close_block(self, index: int) -> list[Delta]:
        block = self._blocks.pop(index, None)
        if block is None:
            return []
        pieces = "".join(self._pieces.pop(index))
        if block.get("type") == "tool_use":
            arguments = pieces or render_json(read_field(block, "input", dict)).decode("ascii")
            return self._call(read_field(block, "id"), read_field(block, "name"), arguments)
        if pieces:
            block = {**block, "input": parse_object(pieces) or {}}
        return self._told(self._sieve.feed("", last=True)) + [Delta("block", block=block)]

    def close(self) -> list[Delta]:
        if not self._reason:
            return []
        deltas = []
        for index in list(self._blocks):
            deltas += self._close_block(index)

        reason = self._reason if self._reason in self.reasons else "end_turn"
        if self._stop:  # llama.cpp names it beside `end_turn`
            reason = "stop_sequence"
        elif self._calls and reason == "end_turn":
            reason = "tool_use"
        usage = self._usage
        read, written = (usage.get(f"cache_{kind}_input_tokens", 0)
                         for kind in ("read", "creation"))
        counts = {"input_tokens": usage.get("input_tokens", 0) + read + written,
                  "output_tokens": usage.get("output_tokens", 0),
                  "cache_read": read, "cache_written": written}
        return deltas + self._end(reason, self._stop, counts)


# -- llama.cpp --
#
# Facts: llama-server b10488, with one model and as a router (`--models-dir`); at least b7188.

class LlamaCpp(MessagesServer):
    """llama-server: one model that is always loaded, or a router that loads on demand."""

    name = "llamacpp"
    mends_schemas = True
    extra_fields: dict[str, Any] = {"chat_template_kwargs": {}}

    def identify(self) -> Ask:
        def extract(reply: Reply) -> str:
            if "llama.cpp" not in reply.headers.get("server", ""):
                raise NodeFailure(f"not {self.name}", "its answer is not llama-server's")
            if reply.status != 200:
                raise NodeFailure(f"http {reply.status}", error_words(reply))
            build: str = read_field(parse_answer(reply.body, self), "build_info")
            number = build.partition("-")[0]
            return "" if number == "b0" else number  # b0: built without knowing it
        return Ask("/props", extract)

    def list_models(self) -> Ask:
        return self._ask("/v1/models", lambda value: tuple(
            _listed_model(entry) for entry in _listed(value, "/v1/models")))

    def list_loaded(self) -> Ask:
        def parse(value: Any) -> tuple[LoadedModel, ...]:
            entries = [entry for entry in _listed(value, "/v1/models")
                       if _load_state(entry) in ("loaded", "sleeping")]
            return tuple(LoadedModel(entry["id"], _listed_context(entry), None,
                                     read_field(read_field(entry, "meta", dict), "size", int), "")
                         for entry in entries)
        return self._ask("/v1/models", parse)

    def describe(self, model_name: str) -> Ask:
        def parse(value: Any) -> dict[str, object]:
            abilities = read_field(value, "chat_template_caps", dict)
            if not abilities:  # a router does not know its models
                return {}
            words = ["completion", "thinking"]  # it refuses no wish to think
            if abilities.get("supports_tools") is True:
                words.append("tools")
            if read_field(value, "modalities", dict).get("vision") is True:
                words.append("vision")
            return {"capabilities": tuple(words)}
        return self._ask("/props", parse)

    def load(self, model: Model, *, unload: bool = False, words: str = "") -> Ask:
        def extract(reply: Reply) -> str:
            said = error_words(reply)
            if reply.status == 404 and unload:
                return "stays: llama-server keeps its one model"
            # Where there is one model there is nothing at this path; the rest is no wish to load.
            if reply.status in (200, 404) or "running" in said:
                return ""
            raise NodeFailure(f"http {reply.status}", said)
        verb = "unload" if unload else "load"
        return Ask(f"/models/{verb}", extract, {"model": model.ollama_model})

    def check_loading(self, model: Model) -> Ask | None:
        def parse(value: Any) -> bool:
            entries = _listed(value, "/v1/models")
            for entry in entries:
                if full_model_name(entry["id"]) != full_model_name(model.ollama_model):
                    continue
                status = read_field(entry, "status", dict)
                if status.get("failed") is True:
                    code = read_field(status, "exit_code", int)
                    raise NodeFailure("error", f"llama-server could not load it (exit code {code})")
                return _load_state(entry) == "loaded"
            known = some_of([f"`{entry['id']}`" for entry in entries], 5)
            raise NodeFailure("http 404", f"it has no model `{model.ollama_model}`; it has {known}")
        return self._ask("/v1/models", parse)


def _listed(value: Any, path: str) -> list[dict[str, Any]]:
    """Return the entries of an OpenAI-shaped list of models, each with its id."""
    entries = value.get("data", "") if isinstance(value, dict) else ""
    entries = [] if entries is None else entries
    if not isinstance(entries, list) or not all(read_field(entry, "id") for entry in entries):
        raise NodeFailure("bad answer", f"{path} holds no list of models")
    return sorted(entries, key=lambda entry: entry["id"])


def _load_state(entry: dict[str, Any]) -> str:
    """Return whether a listed model is loaded; one that stands alone always is."""
    return read_field(read_field(entry, "status", dict), "value") or "loaded"


def _listed_context(entry: dict[str, Any]) -> int:
    """Return the context of a listed model, 0 where its server does not say."""
    meta = read_field(entry, "meta", dict)
    counts = [read_field(meta, "n_ctx", int)]
    counts += [read_field(entry, name, int)
               for name in ("max_model_len", "context_length", "context_window")]
    return next((count for count in counts if 0 < count < TOKENS_LIMIT), 0)


def _listed_model(entry: dict[str, Any]) -> NodeModel:
    """Return what a list says of a model."""
    meta, status = read_field(entry, "meta", dict), read_field(entry, "status", dict)
    parameters = read_field(meta, "n_params", int)
    architecture = read_field(entry, "architecture", dict)
    sees = "image" in read_field(architecture, "input_modalities", list)
    shown = f"{parameters / 1e9:.1f}B" if parameters >= 5e7 else ""
    return NodeModel(
        name=entry["id"], size=read_field(meta, "size", int), parameters=shown,
        quantization=read_field(meta, "ftype"),
        capabilities=("completion", "tools", "thinking", "vision") if sees else None,
        trained_context=read_field(meta, "n_ctx_train", int)
        or (None if status else _listed_context(entry) or None))


# -- LM Studio --
#
# Facts: its documentation of the v1 REST API (0.4.1 and later); it was not run here.

class LMStudio(MessagesServer):
    """LM Studio's server: models are loaded with a context of one's own."""

    name = "lmstudio"
    loads_twice = True

    def identify(self) -> Ask:
        return self._ask("/api/v1/models", lambda value: self._entries(value) and "")

    def list_models(self) -> Ask:
        return self._ask("/api/v1/models", lambda value: tuple(
            self._model(entry) for entry in self._entries(value)))

    def list_loaded(self) -> Ask:
        def parse(value: Any) -> tuple[LoadedModel, ...]:
            loaded = []
            for entry in self._entries(value):
                for instance in read_field(entry, "loaded_instances", list):
                    context = read_field(read_field(instance, "config", dict), "context_length",
                                         int)
                    size = read_field(entry, "size_bytes", int)
                    loaded.append(LoadedModel(entry["key"], context, None, size, ""))
            return tuple(loaded)
        return self._ask("/api/v1/models", parse)

    def describe(self, model_name: str) -> Ask:
        return self._ask("/api/v1/models", lambda value: {})  # the list has said all

    def load(self, model: Model, *, unload: bool = False, words: str = "") -> Ask:
        if unload:
            return self._ask("/api/v1/models/unload", lambda value: "",
                             {"instance_id": model.ollama_model})
        return self._ask("/api/v1/models/load", lambda value: "", {
            "model": model.ollama_model, "context_length": model.context})

    def _entries(self, value: Any) -> list[dict[str, Any]]:
        entries = value.get("models") if isinstance(value, dict) else None
        if not isinstance(entries, list) or not all(read_field(entry, "key") for entry in entries):
            raise NodeFailure(f"not {self.name}",
                              "/api/v1/models does not answer as LM Studio does")
        return sorted(entries, key=lambda entry: entry["key"])

    def _model(self, entry: dict[str, Any]) -> NodeModel:
        can = read_field(entry, "capabilities", dict)
        words = ["completion"]
        for ability, word in (("trained_for_tool_use", "tools"), ("vision", "vision")):
            if can.get(ability) is True:
                words.append(word)
        if can.get("reasoning"):
            words.append("thinking")
        if entry.get("type") == "embedding":
            words = ["embedding"]
        return NodeModel(
            name=entry["key"], size=read_field(entry, "size_bytes", int),
            parameters=read_field(entry, "params_string"),
            quantization=read_field(read_field(entry, "quantization", dict), "name"),
            capabilities=tuple(words) if can or entry.get("type") == "embedding" else None,
            trained_context=read_field(entry, "max_context_length", int) or None)


# -- servers whose models are always there --

class ListedServer(Backend):
    """A server that lists its models at /v1/models; all it lists are ready."""

    def list_models(self) -> Ask:
        return self._ask("/v1/models", lambda value: tuple(
            _listed_model(entry) for entry in _listed(value, "/v1/models")))

    def list_loaded(self) -> Ask:
        return self._ask("/v1/models", lambda value: tuple(
            LoadedModel(entry["id"], _listed_context(entry), None, 0, "")
            for entry in _listed(value, "/v1/models")))

    def describe(self, model_name: str) -> Ask:
        return self._ask("/v1/models", lambda value: {})  # the list has said all

    def load(self, model: Model, *, unload: bool = False, words: str = "") -> Ask:
        said = f"stays: {self.title} keeps what it serves" if unload else ""
        return self._ask("/v1/models", lambda value: said)

    def pull(self, model: Model) -> Ask:
        return self._no_pull(model)


# -- vLLM --
#
# Facts: its source (0.28); it was not run here. At least 0.11.1; tools want
# --enable-auto-tool-choice and a --tool-call-parser.

class VLLM(ListedServer, MessagesServer):
    """vLLM: one model, always loaded."""

    name = "vllm"
    extra_fields: dict[str, Any] = {"chat_template_kwargs": {}}

    def identify(self) -> Ask:
        def parse(value: Any) -> str:
            version: str = read_field(value, "version")
            if not version:
                raise NodeFailure(f"not {self.name}", "/version does not answer as vLLM does")
            return version
        return self._ask("/version", parse)


# -- what speaks Chat Completions --
#
# MLX's servers, LocalAI, TabbyAPI, OpenRouter, llama.cpp before b7188.

class OpenAI(ListedServer):
    """Whatever speaks OpenAI's Chat Completions, translated."""

    name = "openai"

    def identify(self) -> Ask:
        return self._ask("/v1/models", lambda value: _listed(value, "/v1/models") and "")

    def chat(self, talk: Talk, model: Model) -> Ask:
        messages = []
        for message in _chat_messages(talk.turns, model.thinking):
            messages += _open_messages(message)
        if not messages:
            raise Refusal(400, "messages: at least one message with content is required")
        if talk.system:
            messages.insert(0, {"role": "system", "content": join_texts(talk.system)})

        payload: dict[str, Any] = {
            "model": model.ollama_model, "messages": messages, "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": min(talk.max_tokens or model.max_output, model.max_output),
            **talk.sampling}
        if talk.tools:
            payload["tools"] = [{"type": "function", "function": {
                "name": tool.name, "description": tool.description,
                "parameters": _object_schema(tool, mends=False)}} for tool in talk.tools]
            payload["tool_choice"] = _open_choice(talk)
            if talk.one_call:
                payload["parallel_tool_calls"] = False
        if isinstance(talk.answer_format, dict):
            payload["response_format"] = {"type": "json_schema", "json_schema": {
                "name": "answer", "schema": talk.answer_format}}
        elif talk.answer_format:
            payload["response_format"] = {"type": "json_object"}
        return Ask("/v1/chat/completions", error_words, payload)

    def reader(self, talk: Talk, model: Model, estimate: int) -> Reader:
        return ChatReader(self.name, talk, model, estimate)


def _open_choice(talk: Talk) -> object:
    if talk.choice == "tool":
        return {"type": "function", "function": {"name": talk.chosen_tool}}
    return {"any": "required", "none": "none"}.get(talk.choice, "auto")


def _open_messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a chat message as Chat Completions have it: images are parts, calls have text."""
    images = [{"type": "image_url", "image_url": {
        "url": f"data:{_PIXELS.get(image[:4], 'image/png')};base64,{image}"}}
        for image in message.get("images", ())]
    plain = {"role": message["role"], "content": message["content"]}
    if message["role"] == "tool":
        plain["tool_call_id"] = message["tool_call_id"]
        if not images:
            return [plain]
        return [plain, {"role": "user", "content": images}]  # a result there is only text
    if images:
        text = [{"type": "text", "text": message["content"]}] if message["content"] else []
        return [{"role": message["role"], "content": [*images, *text]}]

    if message.get("tool_calls"):
        plain["tool_calls"] = [{"id": call["id"], "type": "function", "function": {
            "name": call["function"]["name"],
            "arguments": render_json(call["function"]["arguments"]).decode("ascii")}}
            for call in message["tool_calls"]]
    return [plain]


class ChatReader(StreamReader):
    """Reads the chunks of a Chat Completion."""

    def __init__(self, provider: str, talk: Talk, model: Model, estimate: int) -> None:
        super().__init__(provider, talk, model, estimate)
        # Which stop sequence it was no server tells, so they are looked for here.
        self._sieve = Sieve(talk.stops)
        self._reason = ""
        self._usage: dict[str, int] = {}
        self._drafts: dict[int, dict[str, Any]] = {}  # calls that grow

    def read(self, part: dict[str, Any]) -> list[Delta]:
        self._refuse_error(part)
        usage = read_field(part, "usage", dict)
        if usage:
            details = read_field(usage, "prompt_tokens_details", dict)
            self._usage = {"input_tokens": read_field(usage, "prompt_tokens", int),
                           "output_tokens": read_field(usage, "completion_tokens", int),
                           "cache_read": read_field(details, "cached_tokens", int)}
        choices = read_field(part, "choices", list)
        choice: dict[str, Any] = choices[0] if choices and isinstance(choices[0], dict) else {}

        deltas = self._growth(read_field(choice, "delta", dict))
        if self._sieve.stop:
            return [*deltas, *self._end("stop_sequence", self._sieve.stop, self._usage)]
        self._reason = read_field(choice, "finish_reason") or self._reason
        return deltas

    def _growth(self, delta: dict[str, Any]) -> list[Delta]:
        deltas = []
        thought = read_field(delta, "reasoning_content") or read_field(delta, "reasoning")
        if thought:
            deltas += self._thought(thought)
        text = read_field(delta, "content")
        if text:
            deltas += self._text(text)
        for number, value in enumerate(read_field(delta, "tool_calls", list)):
            self.has_begun = True
            index = read_field(value, "index", int) if "index" in value else number
            draft = self._drafts.setdefault(index, {"id": "", "name": "", "pieces": []})
            function = read_field(value, "function", dict)
            draft["id"] = draft["id"] or read_field(value, "id")
            draft["name"] = draft["name"] or read_field(function, "name")
            arguments = function.get("arguments")
            if isinstance(arguments, dict):
                arguments = render_json(arguments).decode("ascii")
            draft["pieces"].append(arguments if isinstance(arguments, str) else "")
        return deltas

    def close(self) -> list[Delta]:
        if not self._reason:
            return []
        deltas = []
        for draft in self._drafts.values():
            deltas += self._call(draft["id"], draft["name"], "".join(draft["pieces"]))
        self._drafts = {}

        reason = "end_turn"
        if self._reason == "length":
            reason = "max_tokens"
        elif self._calls:
            reason = "tool_use"
        return deltas + self._end(reason, "", self._usage)


BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (
    Ollama(), LlamaCpp(), LMStudio(), VLLM(), OpenAI())}


def backend_of(node: Node) -> Backend:
    """Return what a node speaks."""
    return BACKENDS[node.provider]


# == 11. Dialects =============================================================
#
# What a client speaks. A Dialect makes a Talk of a request; its Writers make bytes of Deltas.

PROMPT_MARKS = 500_000  # values in one request; see count_marks


# Headers in which a client names its session, and the agent in it. The first pair counts of which
# the session was sent: Claude Code, opencode's subagents, opencode, codex, pi.
CONVERSATION_HEADERS = (
    ("x-claude-code-session-id", "x-claude-code-agent-id"), ("x-parent-session-id", "x-session-id"),
    ("x-session-id", ""), ("session-id", "thread-id"), ("session_id", ""))


@dataclass(frozen=True)
class Conversation:
    """Whose request it is: what one session and agent say belongs together."""

    session: str = ""
    agent: str = ""
    opening: str = ""  # a hash of how it began, where the client names no session; kept nowhere


class Dialect(ABC):
    """What one kind of client speaks: its requests, and how it is answered."""

    path = ""  # where its requests go
    count_path = ""  # where it asks how many tokens a request has; "" where it never does

    @abstractmethod
    def parse(self, body: bytes | bytearray) -> Talk:
        """Return the Talk of a request, or raise a Refusal."""

    def conversation(self, headers: Mapping[str, str], talk: Talk) -> Conversation:
        """Return whose request it is, as its headers (names in lower case) or it itself tell."""
        for session_header, agent_header in CONVERSATION_HEADERS:
            session = _read_id(headers.get(session_header, ""))
            if session:
                agent = _read_id(headers.get(agent_header, ""))
                return Conversation(session, agent if agent != session else "")

        thread = _read_id(talk.thread)
        if thread:
            return Conversation(thread)
        return Conversation(opening=_hash_opening(talk))

    @abstractmethod
    def writer(self, talk: Talk, answer_id: str) -> Writer:
        """Return what writes the answer; its `is_stream` tells whether as it comes."""

    @abstractmethod
    def refuse(self, refusal: Refusal) -> bytes:
        """Return the whole body of an answer that refuses."""

    def count(self, tokens: int) -> bytes:
        """Return the whole body of an answer to how many tokens a request has."""
        raise Refusal(404, "there is nothing at this path")


def _read_id(text: str) -> str:
    return text if re.fullmatch("[A-Za-z0-9_.-]{1,64}", text) else ""


def _hash_opening(talk: Talk) -> str:
    """Return what tells apart conversations that have no name: how the first turn begins."""
    if not talk.turns:
        return ""
    words = "\0".join(talk.turns[0].texts)
    return hashlib.sha256(words.encode("utf-8", "surrogatepass")).hexdigest()


class Writer(ABC):
    """Writes one answer. Where it `is_stream`, each method returns what is sent now."""

    is_stream = True
    keeps_blocks = False  # it writes signatures and blocks of Anthropic's own, too

    @abstractmethod
    def begin(self) -> bytes:
        """Return what opens the stream.

        It may be sent long before the first Delta, and asked for after some that wait to be sent.
        """

    @abstractmethod
    def write(self, delta: Delta) -> bytes:
        """Return what says a Delta that is not the end."""

    @abstractmethod
    def ping(self) -> bytes:
        """Return what keeps the client waiting."""

    @abstractmethod
    def fail(self, refusal: Refusal) -> bytes:
        """Return what ends the stream with an error."""

    @abstractmethod
    def end(self, end: End) -> bytes:
        """Return what ends the answer; of a Writer that is no stream, the whole body."""


# -- reading what clients send, whatever they speak --

class JsonDialect(Dialect):
    """A dialect whose requests are JSON objects; `fields` names those that translation reads."""

    fields: Mapping[str, str] = {}  # name: what is expected, a word of _FIELD_KINDS

    def parse(self, body: bytes | bytearray) -> Talk:
        if len(body) > PROMPT_MARKS and count_marks(body) > PROMPT_MARKS:
            raise Refusal(413, "body: far more in it than any prompt has")
        request = parse_object(body)
        if request is None:
            raise Refusal(400, "body: expected a JSON object, its numbers no larger than JSON's")
        self._check_fields(request)
        return self.talk_of(request)

    def _check_fields(self, request: dict[str, Any]) -> None:
        """Refuse a request whose fields have not the types that translation relies on."""
        for name, kind in self.fields.items():
            value: Any = request.get(name)
            if value is None and name not in REQUIRED_FIELDS:
                continue
            words, fits = _FIELD_KINDS[kind]
            if not fits(value):
                raise Refusal(400, f"{name}: expected {words}")
            if name in TOKEN_FIELDS and value < 1:
                raise Refusal(400, f"{name}: must be at least 1")

    def talk_of(self, request: dict[str, Any]) -> Talk:
        """Return the Talk of a request whose fields have their types."""
        try:
            return self._read(request)
        except RecursionError:
            raise Refusal(400, "body: nested too deeply") from None

    @abstractmethod
    def _read(self, request: dict[str, Any]) -> Talk:
        """Return the Talk, however deep what was sent is nested."""


REQUIRED_FIELDS = ("model", "messages", "input")
TOKEN_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e9


# What is expected of a field: how it is said, and how it is checked.
_FIELD_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "text": ("text", lambda value: isinstance(value, str)),
    "list": ("a list", lambda value: isinstance(value, list)),
    "object": ("an object", lambda value: isinstance(value, dict)),
    "boolean": ("true or false", lambda value: isinstance(value, bool)),
    "whole": ("a whole number", lambda value: type(value) is int and _is_number(value)),
    "number": ("a number", _is_number),
    "text or list": ("text or a list", lambda value: isinstance(value, (str, list))),
    "text or object": ("text or an object", lambda value: isinstance(value, (str, dict)))}


def _read_stops(value: object, name: str) -> tuple[str, ...]:
    """Return the texts at which an answer ends."""
    stops = [value] if isinstance(value, str) else value or ()
    if not isinstance(stops, (list, tuple)) or not all(isinstance(stop, str) for stop in stops):
        raise Refusal(400, f"{name}: expected a list of texts")
    if len(stops) > STOPS_LIMIT or any(len(stop) > STOP_LIMIT_CHARACTERS for stop in stops):
        raise Refusal(400, f"{name}: at most {STOPS_LIMIT}, each of at most "
                      f"{STOP_LIMIT_CHARACTERS:,} characters")
    return tuple(filter(None, stops))


def _read_sampling(request: dict[str, Any]) -> dict[str, float]:
    return {name: request[name] for name in ("temperature", "top_p", "top_k")
            if request.get(name) is not None}


@dataclass(frozen=True)
class _Part:
    """One thing that was said: which field of a Turn it belongs to (or `found`), and what."""

    kind: str
    value: Any


class _Draft:
    """A Turn that grows."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.parts: dict[str, list[Any]] = {}

    def add(self, part: _Part) -> None:
        self.parts.setdefault(part.kind, []).append(part.value)

    def turn(self) -> Turn:
        lists = {kind: tuple(values) for kind, values in self.parts.items() if kind != "found"}
        return Turn(self.role, **lists)


class _History:
    """The turns of a request in strict alternation, however the client cut them."""

    def __init__(self) -> None:
        self._drafts: list[_Draft] = []
        self.system: list[str] = []  # what belongs at the front, wherever it stood

    def add(self, role: str, parts: list[_Part]) -> None:
        """Add what a side said to its turn; to say nothing is no turn."""
        if role == "system":
            self.system += _texts_of(parts)
            return
        for part in parts:
            if not self._drafts or self._drafts[-1].role != role:
                self._drafts.append(_Draft(role))
            self._drafts[-1].add(part)

    def turns(self) -> tuple[Turn, ...]:
        return tuple(draft.turn() for draft in self._drafts)


def _part(kind: str, value: object) -> list[_Part]:
    """Return what was said as one part; to say nothing is none."""
    return [_Part(kind, value)] if value else []


def _texts_of(parts: Iterable[_Part]) -> list[str]:
    return [part.value for part in parts if part.kind == "texts"]


def _block_text(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise Refusal(400, f"{where}: `{name}` of a block must be text")
    return value


def _blocks_of(content: object, where: str) -> list[dict[str, Any]]:
    """Return the blocks of a content; null is none, and text is one."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    blocks = content or []
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise Refusal(400, f"{where}: expected text or a list of content blocks")
    return blocks


def _read_pixels(text: str, where: str) -> list[_Part]:
    try:  # one character that a node cannot decode costs the whole request
        pixels = base64.b64decode("".join(text.split()), validate=True)
    except ValueError:
        raise Refusal(400, f"{where}: the image is not valid base64") from None
    return _part("images", base64.b64encode(pixels).decode("ascii"))


class _CallNames:
    """Gives each call of an answer an id that the whole talk has once."""

    # Some templates number their calls from zero in every answer; the client joins by id.
    def __init__(self, talk: Talk, prefix: str) -> None:
        self._taken = {call.id for turn in talk.turns for call in turn.calls}
        self._prefix, self._count = prefix, 0

    def name(self, call: Call) -> str:
        self._count += 1
        own_id = call.id
        if not own_id or own_id in self._taken:
            own_id = f"{self._prefix}_{self._count}"
        self._taken.add(own_id)
        return own_id


def render_event(event: dict[str, Any]) -> bytes:
    """Return an event as it goes down a stream whose events are named."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode("ascii"), render_json(event))


# -- Messages: Claude Code, and whoever uses Anthropic's SDK --
#
# What no local model can take (the bytes of a PDF, server tools, citations, cache marks) is left
# out: a history that was refused stays refused.

class Messages(JsonDialect):
    """Anthropic's Messages API."""

    path = "/v1/messages"
    count_path = "/v1/messages/count_tokens"
    fields = {
        "model": "text", "messages": "list", "tools": "list", "stop_sequences": "list",
        "tool_choice": "object", "stream": "boolean", "max_tokens": "whole", "top_k": "whole",
        "temperature": "number", "top_p": "number"}

    def _read(self, request: dict[str, Any]) -> Talk:
        history, usable_tools = _read_turns(request["messages"])
        choice = request.get("tool_choice") or {}
        kind = choice.get("type")
        return Talk(
            alias=request["model"],
            turns=history.turns(),
            system=_read_system(request.get("system")),
            tools=_read_tools(request.get("tools") or (), usable_tools),
            choice=kind if kind in ("any", "tool", "none") else "auto",
            chosen_tool=str(choice.get("name") or ""),
            one_call=choice.get("disable_parallel_tool_use") is True,
            max_tokens=request.get("max_tokens"),
            sampling=_read_sampling(request),
            stops=_read_stops(request.get("stop_sequences"), "stop_sequences"),
            is_stream=request.get("stream") is True,
            original=request)

    def writer(self, talk: Talk, answer_id: str) -> Writer:
        if talk.is_stream:
            return MessagesStream(talk, answer_id)
        return MessagesBody(talk, answer_id)

    def refuse(self, refusal: Refusal) -> bytes:
        return render_json(_error_event(refusal))

    def count(self, tokens: int) -> bytes:
        return render_json({"input_tokens": tokens})


def _read_turns(messages: list[Any]) -> tuple[_History, frozenset[str]]:
    """Return what was said, and the names of the deferred tools that may be used."""
    history = _History()
    usable = set()
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            raise Refusal(400, f"messages.{number}: expected the role user, assistant or system")

        parts = _read_content(message.get("content"), f"messages.{number}")
        if role == "system":  # which many templates take only at the very beginning
            role = "user"
            parts = [_Part("reminders", text) for text in _texts_of(parts)]
        history.add(role, parts)
        for part in parts:
            if part.kind == "found":
                usable.add(part.value)
            elif part.kind == "calls":
                usable.add(part.value.name)
    return history, frozenset(usable)


def _read_system(content: object) -> tuple[str, ...]:
    texts = _texts_of(_read_content(content, "system"))
    # Claude Code's billing line always differs and would spoil the prompt cache.
    return tuple(text for text in texts if not text.startswith("x-anthropic-billing-header:"))


def _read_content(content: object, where: str) -> list[_Part]:
    """Return all of a content that a local model can be shown."""
    parts: list[_Part] = []
    for block in _blocks_of(content, where):
        kind = block.get("type")
        read = _BLOCK_READERS.get(kind) if isinstance(kind, str) else None
        if read:
            parts += read(block, where)
    return parts


def _read_text(block: dict[str, Any], where: str) -> list[_Part]:
    return _part("texts", _block_text(block, "text", where))


def _read_thinking(block: dict[str, Any], where: str) -> list[_Part]:
    return _part("thoughts", _block_text(block, "thinking", where))


def _read_image(block: dict[str, Any], where: str) -> list[_Part]:
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") != "base64":
        raise Refusal(400, f"{where}: a local model can only be shown base64 images, not URLs")
    return _read_pixels(_block_text(source, "data", where), where)


def _read_document(block: dict[str, Any], where: str) -> list[_Part]:
    source = block.get("source")
    if not isinstance(source, dict):
        source = {}
    inside = source.get("data" if source.get("type") == "text" else "content")
    return _read_found_text(block, inside, where)


def _read_search_result(block: dict[str, Any], where: str) -> list[_Part]:
    return _read_found_text(block, block.get("content"), where)


def _read_found_text(block: dict[str, Any], inside: object, where: str) -> list[_Part]:
    title = _part("texts", _block_text(block, "title", where))
    bytes_only = _part("texts", "(a document of which only the bytes were sent was left out)")
    return title + (_read_content(inside, where) or bytes_only)


def _read_tool_reference(block: dict[str, Any], where: str) -> list[_Part]:
    name = _block_text(block, "tool_name", where)
    return _part("found", name) + _part("texts", f"The tool `{name}` can be called now.")


def _read_tool_use(block: dict[str, Any], where: str) -> list[_Part]:
    arguments = block.get("input") or {}
    if not isinstance(arguments, dict):  # Ollama answers 400 to any other
        arguments = {"input": arguments}
    name = _block_text(block, "name", where) or "unknown"
    return [_Part("calls", Call(_block_text(block, "id", where), name, arguments))]


def _read_tool_result(block: dict[str, Any], where: str) -> list[_Part]:
    inside = _read_content(block.get("content"), where)
    text = join_texts(_texts_of(inside))
    if block.get("is_error") is True and not text.startswith(("Error", "<tool_use_error>")):
        text = f"Error: {text}"
    images = tuple(part.value for part in inside if part.kind == "images")
    result = Result(_block_text(block, "tool_use_id", where), text, images)
    return [_Part("results", result), *(part for part in inside if part.kind == "found")]


# Blocks of any other type are left out.
_BLOCK_READERS: dict[str, Callable[[dict[str, Any], str], list[_Part]]] = {
    "text": _read_text, "thinking": _read_thinking, "image": _read_image,
    "document": _read_document, "search_result": _read_search_result,
    "tool_reference": _read_tool_reference, "tool_use": _read_tool_use,
    "tool_result": _read_tool_result}


def _read_tools(tools: Iterable[Any], usable: frozenset[str]) -> tuple[Tool, ...]:
    """Return the client's own tools; deferred ones once they were found or called."""
    shown: dict[str, Tool] = {}
    for tool in tools:
        if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
            continue  # any other type is a tool that Anthropic's servers run or describe
        name, description = tool.get("name"), tool.get("description")
        if not isinstance(name, str) or not name:
            continue
        if tool.get("defer_loading") is True and name not in usable:
            continue
        if not isinstance(description, str):
            description = ""
        shown.setdefault(name, Tool(name, description, tool.get("input_schema")))
    return tuple(shown.values())


def _error_event(refusal: Refusal) -> dict[str, Any]:
    """Return both a body and an event of a stream."""
    return {"type": "error", "error": {"type": refusal.kind, "message": refusal.what}}


def _empty_message(talk: Talk, answer_id: str) -> dict[str, Any]:
    """Return the Message as it begins; its tokens are known only at the end."""
    return {"id": f"msg_{answer_id}", "type": "message", "role": "assistant",
            "model": talk.alias, "content": [], "stop_reason": None, "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0, "cache_creation_input_tokens": 0,
                      "cache_read_input_tokens": 0}}


class MessagesStream(Writer):
    """Writes the events of a Message."""

    keeps_blocks = True

    def __init__(self, talk: Talk, answer_id: str) -> None:
        self._message = _empty_message(talk, answer_id)
        self._names = _CallNames(talk, f"toolu_{answer_id}")
        self._index = -1  # of the block that was opened last
        self._open = ""  # its kind while it grows

    def begin(self) -> bytes:
        return render_event({"type": "message_start", "message": self._message})

    def write(self, delta: Delta) -> bytes:
        if delta.call:
            return self._close() + self._call(delta.call)
        if delta.block:
            return self._close() + self._start(delta.block) + render_event(
                {"type": "content_block_stop", "index": self._index})
        if delta.kind == "signature":
            return self._sign(delta.text)

        opening = b""
        if self._open != delta.kind:
            block = {"type": delta.kind, delta.kind: ""}
            if delta.kind == "thinking":
                block["signature"] = ""
            opening = self._close() + self._start(block)
            self._open = delta.kind
        # Once a token: a template costs a third of rendering the event.
        words = json.encoder.encode_basestring_ascii(delta.text)
        growth = (f'event: content_block_delta\ndata: {{"type":"content_block_delta","index":'
                  f'{self._index},"delta":{{"type":"{delta.kind}_delta","{delta.kind}":{words}}}}}'
                  "\n\n")
        return opening + growth.encode("ascii")

    def _sign(self, signature: str) -> bytes:
        """Sign the thinking that is open; what is not shown of it is signed, too."""
        opening = b""
        if self._open != "thinking":
            opening = self._close() + self._start(
                {"type": "thinking", "thinking": "", "signature": ""})
            self._open = "thinking"
        return opening + render_event({
            "type": "content_block_delta", "index": self._index,
            "delta": {"type": "signature_delta", "signature": signature}})

    def _start(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        return render_event({"type": "content_block_start", "index": self._index,
                             "content_block": block})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        return render_event({"type": "content_block_stop", "index": self._index})

    def _call(self, call: Call) -> bytes:
        block = {"type": "tool_use", "id": self._names.name(call), "name": call.name, "input": {}}
        arguments = render_json(call.arguments).decode("ascii")
        return self._start(block) + render_event({
            "type": "content_block_delta", "index": self._index,
            "delta": {"type": "input_json_delta", "partial_json": arguments},
        }) + render_event({"type": "content_block_stop", "index": self._index})

    def ping(self) -> bytes:
        return render_event({"type": "ping"})

    def fail(self, refusal: Refusal) -> bytes:
        return render_event(_error_event(refusal))

    def end(self, end: End) -> bytes:
        delta = {"stop_reason": end.reason, "stop_sequence": end.stop or None}
        return self._close() + render_event({
            "type": "message_delta", "delta": delta, "usage": _usage_of(end),
        }) + render_event({"type": "message_stop"})


def _usage_of(end: End) -> dict[str, int]:
    """Return the tokens of an answer; what was cached is counted by itself, where there is any."""
    usage = {"input_tokens": end.input_tokens, "output_tokens": end.output_tokens}
    if end.cache_read or end.cache_written:
        usage["input_tokens"] = max(end.input_tokens - end.cache_read - end.cache_written, 0)
        usage["cache_read_input_tokens"] = end.cache_read
        usage["cache_creation_input_tokens"] = end.cache_written
    return usage


class MessagesBody(Writer):
    """Gathers a whole Message."""

    is_stream = False
    keeps_blocks = True

    def __init__(self, talk: Talk, answer_id: str) -> None:
        self._message = _empty_message(talk, answer_id)
        self._names = _CallNames(talk, f"toolu_{answer_id}")
        self._pieces: list[str] = []  # of the block that grows

    def begin(self) -> bytes:
        return b""

    def write(self, delta: Delta) -> bytes:
        blocks = self._message["content"]
        if delta.call:
            self._close()
            blocks.append({"type": "tool_use", "id": self._names.name(delta.call),
                           "name": delta.call.name, "input": delta.call.arguments})
            return b""
        if delta.block:
            self._close()
            blocks.append(delta.block)
            return b""
        if delta.kind == "signature":
            if not blocks or blocks[-1]["type"] != "thinking":
                self._close()
                blocks.append({"type": "thinking", "thinking": ""})
            blocks[-1]["signature"] = delta.text
            return b""

        if not self._pieces or blocks[-1]["type"] != delta.kind:
            self._close()
            block = {"type": delta.kind, delta.kind: ""}
            if delta.kind == "thinking":
                block["signature"] = ""
            blocks.append(block)
        self._pieces.append(delta.text)
        return b""

    def _close(self) -> None:
        if self._pieces:
            block = self._message["content"][-1]
            block[block["type"]] = "".join(self._pieces)
            self._pieces = []

    def ping(self) -> bytes:
        return b""

    def fail(self, refusal: Refusal) -> bytes:
        return render_json(_error_event(refusal))

    def end(self, end: End) -> bytes:
        self._close()
        self._message["stop_reason"], self._message["stop_sequence"] = end.reason, end.stop or None
        self._message["usage"].update(_usage_of(end))
        return render_json(self._message)


# -- what Chat Completions and Responses share --
#
# Facts of the real clients (opencode 1.18, codex 0.169, aider 0.86, qwen-code 0.24, pi 0.73,
# cn 1.5): system and developer messages may come twice and in the middle, and are joined at the
# front; a content is null, text or parts, that of a tool result, too. What no local model has a
# word for (reasoning effort, encrypted reasoning, stores, seeds, service tiers) is left out; what
# would change the answer's shape is refused.

_DATA_URL = _Pattern(r"data:[^,]{0,200};base64,")
# Fields that ask for what no node has, and the values that do not.
_UNKEPT_FIELDS: dict[str, tuple[object, ...]] = {
    "n": (None, 1), "logprobs": (None, False), "previous_response_id": (None, ""),
    "conversation": (None,), "background": (None, False)}


def _refuse_unkept(request: dict[str, Any]) -> None:
    for name, harmless in _UNKEPT_FIELDS.items():
        if request.get(name) not in harmless:
            raise Refusal(400, f"{name}: this gateway has no such thing; leave it out")


def _read_open_content(content: object, where: str) -> list[_Part]:
    """Return the texts and images of a content; parts of other types are left out."""
    parts: list[_Part] = []
    for block in _blocks_of(content, where):
        kind = block.get("type")
        if kind in ("text", "input_text", "output_text"):
            parts += _part("texts", _block_text(block, "text", where))
        elif kind == "refusal":
            parts += _part("texts", _block_text(block, "refusal", where))
        elif kind in ("image_url", "input_image"):
            parts += _read_image_url(block, where)
        elif kind in ("file", "input_file", "input_audio"):
            parts += _part("texts", "(a file of which only the bytes were sent was left out)")
    return parts


def _read_image_url(block: dict[str, Any], where: str) -> list[_Part]:
    url = block.get("image_url")
    if isinstance(url, dict):
        url = url.get("url")
    match = _DATA_URL.match(url) if isinstance(url, str) else None
    if not match or not isinstance(url, str):
        raise Refusal(400, f"{where}: a local model can only be shown images as data: URLs with "
                      "base64")
    return _read_pixels(url[match.end():], where)


def _read_result(call_id: str, content: object, where: str) -> list[_Part]:
    """Return what came of a call; one that came to nothing is a result, too."""
    inside = _read_open_content(content, where)
    images = tuple(part.value for part in inside if part.kind == "images")
    return [_Part("results", Result(call_id, join_texts(_texts_of(inside)), images))]


def _read_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call; Ollama answers 400 to what is no object."""
    if not text.strip():
        return {}
    sent = text.encode("utf-8", "surrogatepass")
    is_bounded = len(sent) < PROMPT_MARKS or count_marks(sent) < PROMPT_MARKS
    arguments = parse_object(text) if is_bounded else None
    return {"input": text} if arguments is None else arguments


class _OpenTools:
    """The tools of a request, each under a name that only it has."""

    def __init__(self, tools: Iterable[Any]) -> None:
        self._by_name: dict[str, Tool] = {}
        self._names: dict[tuple[str, str], str] = {}
        for tool in tools:
            self._add(tool, "")

    def _add(self, tool: Any, namespace: str) -> None:
        """Add a tool; of any other type it is one that OpenAI's servers run."""
        kind = read_field(tool, "type")
        if kind == "namespace" and not namespace:
            for inner in read_field(tool, "tools", list):
                self._add(inner, read_field(tool, "name"))
        elif kind == "function":
            words = tool.get("function", tool)  # which Chat Completions wraps
            self._keep(words, namespace, read_field(words, "parameters", dict))
        elif kind == "custom":
            words = tool.get("custom", tool)
            self._keep(words, namespace, _custom_schema(words), is_custom=True)

    def _keep(self, words: object, namespace: str, schema: dict[str, Any], *,
              is_custom: bool = False) -> None:
        own_name: str = read_field(words, "name")
        if not own_name or (namespace, own_name) in self._names:
            return
        name = own_name
        if name in self._by_name:
            name = f"{namespace}__{own_name}"
        self._names[namespace, own_name] = name
        self._by_name[name] = Tool(name, read_field(words, "description"), schema, namespace,
                                   own_name, is_custom)

    def name_of(self, namespace: str, own_name: str) -> str:
        """Return the name under which the model knows a tool, which may be gone."""
        return self._names.get((namespace, own_name), own_name) or "unknown"

    def tools(self) -> tuple[Tool, ...]:
        return tuple(self._by_name.values())


def _custom_schema(words: object) -> dict[str, Any]:
    """Return the schema of a tool that takes one text; its grammar is told in words."""
    form = read_field(words, "format", dict)
    told = "The whole text."
    if read_field(form, "definition"):
        syntax = read_field(form, "syntax") or "a"
        told = f"The whole text, in this {syntax} grammar:\n{read_field(form, 'definition')}"
    return {"type": "object", "properties": {"input": {"type": "string", "description": told}},
            "required": ["input"]}


@dataclass(frozen=True)
class _Choice:
    """Which tools the client wants called."""

    kind: str
    tool: str = ""


def _read_choice(choice: object, tools: _OpenTools) -> _Choice:
    if choice == "required":
        return _Choice("any")
    if choice == "none":
        return _Choice("none")
    if read_field(choice, "type") in ("function", "custom"):
        inner = read_field(choice, "function", dict) or read_field(choice, "custom", dict)
        name = read_field(inner or choice, "name")
        return _Choice("tool", tools.name_of(read_field(choice, "namespace"), name))
    return _Choice("auto")


def _read_format(form: object) -> object:
    """Return what an answer must be: "json", a schema, or None for anything."""
    kind = read_field(form, "type")
    if kind == "json_object":
        return "json"
    if kind == "json_schema":
        return read_field(read_field(form, "json_schema", dict) or form, "schema", dict) or "json"
    return None


def _least(*counts: int | None) -> int | None:
    """Return the smallest of several limits, of which some may not be there."""
    return min((count for count in counts if count is not None), default=None)


def _open_error(refusal: Refusal, field_name: str) -> dict[str, Any]:
    """Return an error as OpenAI's API has it, in the words on which clients act.

    On these words and this code for a prompt that is too long opencode, pi and qwen-code compact,
    codex stops and says so, and aider gives its help.
    """
    if isinstance(refusal, PromptTooLong):
        words = (f"This model's maximum context length is {refusal.maximum} tokens. However, your "
                 f"messages resulted in {refusal.tokens} tokens ({refusal.what}).")
        return {"message": words, "type": refusal.kind, "param": field_name,
                "code": "context_length_exceeded"}
    codes = {401: "invalid_api_key", 404: "not_found"}
    return {"message": refusal.what, "type": refusal.kind, "param": None,
            "code": codes.get(refusal.http)}


def _given_input(call: Call) -> str:
    """Return the one text that a custom tool is called with."""
    text = call.arguments.get("input")
    return text if isinstance(text, str) else render_json(call.arguments).decode("ascii")


# -- Chat Completions: the rest of the world --

class ChatCompletions(JsonDialect):
    """OpenAI's Chat Completions API."""

    path = "/v1/chat/completions"
    fields = {
        "model": "text", "messages": "list", "tools": "list", "tool_choice": "text or object",
        "stream": "boolean", "max_tokens": "whole", "max_completion_tokens": "whole",
        "temperature": "number", "top_p": "number", "top_k": "whole", "stop": "text or list",
        "response_format": "object", "parallel_tool_calls": "boolean"}

    def _read(self, request: dict[str, Any]) -> Talk:
        _refuse_unkept(request)
        tools = _OpenTools(request.get("tools") or ())
        choice = _read_choice(request.get("tool_choice"), tools)
        history = _History()
        for number, message in enumerate(request["messages"]):
            history.add(*_read_message(message, f"messages.{number}", tools))
        return Talk(
            alias=request["model"],
            turns=history.turns(),
            system=tuple(history.system),
            tools=tools.tools(),
            choice=choice.kind,
            chosen_tool=choice.tool,
            one_call=request.get("parallel_tool_calls") is False,
            max_tokens=_least(request.get("max_tokens"), request.get("max_completion_tokens")),
            sampling=_read_sampling(request),
            stops=_read_stops(request.get("stop"), "stop"),
            answer_format=_read_format(request.get("response_format")),
            is_stream=request.get("stream") is True,
            thread=read_field(request, "prompt_cache_key"))

    def writer(self, talk: Talk, answer_id: str) -> Writer:
        if talk.is_stream:
            return ChatStream(talk, answer_id)
        return ChatBody(talk, answer_id)

    def refuse(self, refusal: Refusal) -> bytes:
        return render_json({"error": _open_error(refusal, "messages")})


def _read_message(message: Any, where: str, tools: _OpenTools) -> tuple[str, list[_Part]]:
    """Return who said a message, and what."""
    role = read_field(message, "role")
    if role in ("system", "developer"):
        return "system", _read_open_content(message.get("content"), where)
    if role == "user":
        return "user", _read_open_content(message.get("content"), where)
    if role == "assistant":
        return "assistant", _read_chat_answer(message, where, tools)
    if role == "tool":
        call_id = _block_text(message, "tool_call_id", where)
        return "user", _read_result(call_id, message.get("content"), where)
    raise Refusal(400, f"{where}: expected the role system, developer, user, assistant or tool")


def _read_chat_answer(message: dict[str, Any], where: str, tools: _OpenTools) -> list[_Part]:
    """Return what the model said, thought and called in an earlier answer."""
    thought = read_field(message, "reasoning_content") or read_field(message, "reasoning")
    parts = _part("thoughts", thought) + _read_open_content(message.get("content"), where)
    for call in read_field(message, "tool_calls", list):
        custom = read_field(call, "custom", dict)
        words = custom or read_field(call, "function", dict)
        if custom:
            arguments = {"input": _block_text(custom, "input", where)}
        else:
            arguments = _read_arguments(_block_text(words, "arguments", where))
        name = tools.name_of("", _block_text(words, "name", where))
        parts.append(_Part("calls", Call(read_field(call, "id"), name, arguments)))
    return parts


def _chat_usage(end: End) -> dict[str, int]:
    return {"prompt_tokens": end.input_tokens, "completion_tokens": end.output_tokens,
            "total_tokens": end.input_tokens + end.output_tokens}


_CHAT_REASONS = {"max_tokens": "length", "tool_use": "tool_calls"}  # any other is `stop`
_CHAT_FIELDS = {"text": "content", "thinking": "reasoning_content"}


class _ChatCalls:
    """Makes the calls of an answer what Chat Completions has for them."""

    def __init__(self, talk: Talk, answer_id: str) -> None:
        self._names = _CallNames(talk, f"call_{answer_id}")
        self._tools = {tool.name: tool for tool in talk.tools}

    def render(self, call: Call) -> dict[str, Any]:
        own_id = self._names.name(call)
        tool = self._tools.get(call.name)
        if tool and tool.is_custom:
            return {"id": own_id, "type": "custom",
                    "custom": {"name": call.name, "input": _given_input(call)}}
        arguments = render_json(call.arguments).decode("ascii")
        return {"id": own_id, "type": "function",
                "function": {"name": call.name, "arguments": arguments}}


class ChatStream(Writer):
    """Writes the chunks of a completion.

    Without a `finish_reason` opencode asks again for ever: only `end` writes the last event.
    """

    def __init__(self, talk: Talk, answer_id: str) -> None:
        self._head = {"id": f"chatcmpl-{answer_id}", "object": "chat.completion.chunk",
                      "created": 0, "model": talk.alias}
        self._before = render_json(self._head)[:-1].decode("ascii")
        self._calls, self._count = _ChatCalls(talk, answer_id), 0

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> bytes:
        return self._event({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})

    def _event(self, fields: dict[str, Any]) -> bytes:
        return b"data: %b\n\n" % render_json({**self._head, **fields})

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def write(self, delta: Delta) -> bytes:
        if delta.call:
            call = {"index": self._count, **self._calls.render(delta.call)}
            self._count += 1
            return self._chunk({"tool_calls": [call]})
        # Once a token: a template costs a third of rendering the event.
        words = json.encoder.encode_basestring_ascii(delta.text)
        return (f'data: {self._before},"choices":[{{"index":0,"delta":'
                f'{{"{_CHAT_FIELDS[delta.kind]}":{words}}},"finish_reason":null}}]}}\n\n'
                ).encode("ascii")

    def ping(self) -> bytes:
        return b": ping\n\n"

    def fail(self, refusal: Refusal) -> bytes:
        return b"data: %b\n\n" % render_json({"error": _open_error(refusal, "messages")})

    def end(self, end: End) -> bytes:
        last = self._chunk({}, _CHAT_REASONS.get(end.reason, "stop"))
        usage = self._event({"choices": [], "usage": _chat_usage(end)})
        return last + usage + b"data: [DONE]\n\n"


class ChatBody(Writer):
    """Gathers a whole completion."""

    is_stream = False

    def __init__(self, talk: Talk, answer_id: str) -> None:
        self._head = {"id": f"chatcmpl-{answer_id}", "object": "chat.completion", "created": 0,
                      "model": talk.alias}
        self._calls = _ChatCalls(talk, answer_id)
        self._pieces: dict[str, list[str]] = {"text": [], "thinking": []}
        self._made: list[dict[str, Any]] = []

    def begin(self) -> bytes:
        return b""

    def write(self, delta: Delta) -> bytes:
        if delta.call:
            self._made.append(self._calls.render(delta.call))
        else:
            self._pieces[delta.kind].append(delta.text)
        return b""

    def ping(self) -> bytes:
        return b""

    def fail(self, refusal: Refusal) -> bytes:
        return render_json({"error": _open_error(refusal, "messages")})

    def end(self, end: End) -> bytes:
        message: dict[str, Any] = {"role": "assistant",
                                   "content": "".join(self._pieces["text"]) or None}
        if self._pieces["thinking"]:
            message["reasoning_content"] = "".join(self._pieces["thinking"])
        if self._made:
            message["tool_calls"] = self._made
        choice = {"index": 0, "message": message, "logprobs": None,
                  "finish_reason": _CHAT_REASONS.get(end.reason, "stop")}
        return render_json({**self._head, "choices": [choice], "usage": _chat_usage(end)})


# -- Responses: codex, which speaks nothing else --

class Responses(JsonDialect):
    """OpenAI's Responses API, as far as a server that stores nothing can have it."""

    path = "/v1/responses"
    fields = {
        "model": "text", "input": "text or list", "instructions": "text", "tools": "list",
        "tool_choice": "text or object", "stream": "boolean", "max_output_tokens": "whole",
        "temperature": "number", "top_p": "number", "top_k": "whole", "text": "object",
        "parallel_tool_calls": "boolean"}

    def _read(self, request: dict[str, Any]) -> Talk:
        _refuse_unkept(request)
        tools = _OpenTools(request.get("tools") or ())
        choice = _read_choice(request.get("tool_choice"), tools)
        history = _History()
        history.add("system", _part("texts", request.get("instructions")))
        items = request["input"]
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        for number, item in enumerate(items):
            if not isinstance(item, dict):
                raise Refusal(400, f"input.{number}: expected an object")
            history.add(*_read_item(item, f"input.{number}", tools))
        return Talk(
            alias=request["model"],
            turns=history.turns(),
            system=tuple(history.system),
            tools=tools.tools(),
            choice=choice.kind,
            chosen_tool=choice.tool,
            one_call=request.get("parallel_tool_calls") is False,
            max_tokens=request.get("max_output_tokens"),
            sampling=_read_sampling(request),
            answer_format=_read_format(read_field(request.get("text"), "format", dict)),
            is_stream=request.get("stream") is True,
            thread=read_field(request, "prompt_cache_key"))

    def writer(self, talk: Talk, answer_id: str) -> Writer:
        if talk.is_stream:
            return ResponsesStream(talk, answer_id)
        return ResponsesBody(talk, answer_id)

    def refuse(self, refusal: Refusal) -> bytes:
        return render_json({"error": _open_error(refusal, "input")})


def _read_item(item: dict[str, Any], where: str, tools: _OpenTools) -> tuple[str, list[_Part]]:
    """Return who said an item of the input, and what; of an unknown type it says nothing."""
    kind = item.get("type", "message")
    if kind == "message":
        role = read_field(item, "role")
        if role not in ("user", "assistant", "system", "developer"):
            raise Refusal(400, f"{where}: expected the role system, developer, user or assistant")
        parts = _read_open_content(item.get("content"), where)
        return "system" if role == "developer" else role, parts

    if kind in ("function_call", "custom_tool_call"):
        return "assistant", [_Part("calls", _read_item_call(item, where, tools))]
    if kind in ("function_call_output", "custom_tool_call_output"):
        return "user", _read_result(read_field(item, "call_id"), item.get("output"), where)
    if kind == "reasoning":
        blocks = read_field(item, "summary", list) or read_field(item, "content", list)
        thought = join_texts(read_field(block, "text") for block in blocks)
        return "assistant", _part("thoughts", thought)
    if kind == "item_reference":
        raise Refusal(400, f"{where}: this gateway stores no items; send the item itself")
    return "user", []


def _read_item_call(item: dict[str, Any], where: str, tools: _OpenTools) -> Call:
    name = tools.name_of(read_field(item, "namespace"), _block_text(item, "name", where))
    if item["type"] == "custom_tool_call":
        arguments = {"input": _block_text(item, "input", where)}
    else:
        arguments = _read_arguments(_block_text(item, "arguments", where))
    return Call(read_field(item, "call_id"), name, arguments)


@dataclass(frozen=True)
class _ItemKind:
    """How an item of a response grows: its names in Responses' words."""

    type: str
    id_prefix: str
    parts: str  # the field that holds its only part
    part: dict[str, Any]
    index: str  # the field of an event that says which part
    part_event: str
    text_event: str


_ITEM_KINDS = {
    "text": _ItemKind("message", "msg", "content",
                      {"type": "output_text", "annotations": [], "logprobs": []},
                      "content_index", "response.content_part", "response.output_text"),
    "thinking": _ItemKind("reasoning", "rs", "summary", {"type": "summary_text"}, "summary_index",
                          "response.reasoning_summary_part", "response.reasoning_summary_text")}


class ResponsesStream(Writer):
    """Writes the events of a response.

    Clients act on `output_item.done` and `response.completed`; on `response.incomplete` codex
    drops the turn, so that an answer cut at its length is completed, and says so inside. Comments
    do not keep codex waiting, a `response.in_progress` does.
    """

    def __init__(self, talk: Talk, answer_id: str) -> None:
        self._id, self._sequence = answer_id, 1  # 0 and 1 are those of `begin`
        self._response: dict[str, Any] = {
            "id": f"resp_{answer_id}", "object": "response", "created_at": 0,
            "status": "in_progress", "model": talk.alias, "output": [], "error": None,
            "incomplete_details": None, "instructions": None, "metadata": {}, "tools": [],
            "tool_choice": "auto", "parallel_tool_calls": not talk.one_call, "usage": None}
        self._names = _CallNames(talk, f"call_{answer_id}")
        self._tools = {tool.name: tool for tool in talk.tools}
        self._open = ""  # the kind of the item that grows
        self._item: dict[str, Any] = {}
        self._pieces: list[str] = []
        self._place = ""  # where it grows, as rendered fields of an event

    def _event(self, kind: str, **more: Any) -> bytes:
        self._sequence += 1
        return render_event({"type": kind, "sequence_number": self._sequence, **more})

    def begin(self) -> bytes:
        return b"".join(
            render_event({"type": kind, "sequence_number": number, "response": self._begun()})
            for number, kind in enumerate(("response.created", "response.in_progress")))

    def _begun(self) -> dict[str, Any]:
        """Return the response as it began; items may have been written since, and not sent."""
        return {**self._response, "output": []}

    def ping(self) -> bytes:
        return self._event("response.in_progress", response=self._begun())

    def write(self, delta: Delta) -> bytes:
        if delta.call:
            return self._close() + self._call(delta.call)

        opening = b""
        if self._open != delta.kind:
            opening = self._close() + self._start(delta.kind)
        self._pieces.append(delta.text)
        # Once a token: a template costs a third of rendering the event.
        self._sequence += 1
        name = f"{_ITEM_KINDS[delta.kind].text_event}.delta"
        words = json.encoder.encode_basestring_ascii(delta.text)
        growth = (f'event: {name}\ndata: {{"type":"{name}","sequence_number":{self._sequence},'
                  f'{self._place},"delta":{words}}}\n\n')
        return opening + growth.encode("ascii")

    def _start(self, kind: str) -> bytes:
        names = _ITEM_KINDS[kind]
        output = self._response["output"]
        self._open = kind
        self._item = {"id": f"{names.id_prefix}_{self._id}_{len(output)}", "type": names.type,
                      names.parts: []}
        if kind == "text":
            self._item.update(status="in_progress", role="assistant")
        place = {"item_id": self._item["id"], "output_index": len(output), names.index: 0}
        self._place = render_json(place)[1:-1].decode("ascii")
        opening = self._event("response.output_item.added", output_index=len(output),
                              item=self._item)
        part = {**names.part, "text": ""}
        return opening + self._event(f"{names.part_event}.added", **place, part=part)

    def _close(self) -> bytes:
        """End the item that grows."""
        if not self._open:
            return b""
        names, text = _ITEM_KINDS[self._open], "".join(self._pieces)
        place = {"item_id": self._item["id"], "output_index": len(self._response["output"]),
                 names.index: 0}
        part = {**names.part, "text": text}
        item = {**self._item, names.parts: [part]}
        if "status" in item:
            item["status"] = "completed"
        self._open, self._pieces = "", []
        return (self._event(f"{names.text_event}.done", **place, text=text)
                + self._event(f"{names.part_event}.done", **place, part=part)
                + self._finish(item))

    def _finish(self, item: dict[str, Any]) -> bytes:
        """Put a whole item into the response."""
        output = self._response["output"]
        output.append(item)
        return self._event("response.output_item.done", output_index=len(output) - 1, item=item)

    def _call(self, call: Call) -> bytes:
        """Write a call as the tool was given: within its namespace, or with its one text."""
        tool = self._tools.get(call.name) or Tool(call.name, "", {})
        number = len(self._response["output"])
        head: dict[str, Any] = {"call_id": self._names.name(call),
                                "name": tool.own_name or tool.name, "status": "in_progress"}
        if tool.namespace:
            head["namespace"] = tool.namespace
        if tool.is_custom:
            head.update(id=f"ctc_{self._id}_{number}", type="custom_tool_call")
            growing, text, name = "input", _given_input(call), "response.custom_tool_call_input"
        else:
            head.update(id=f"fc_{self._id}_{number}", type="function_call")
            growing, text = "arguments", render_json(call.arguments).decode("ascii")
            name = "response.function_call_arguments"

        place = {"item_id": head["id"], "output_index": number}
        opening = self._event("response.output_item.added", output_index=number,
                              item={**head, growing: ""})
        growth = self._event(f"{name}.delta", **place, delta=text)
        growth += self._event(f"{name}.done", **place, **{growing: text})
        return opening + growth + self._finish({**head, "status": "completed", growing: text})

    def fail(self, refusal: Refusal) -> bytes:
        """Return both events that end a response: the AI SDK acts on the first, codex the other."""
        error = _open_error(refusal, "input")
        error["code"] = error["code"] or "server_error"
        if refusal.retry_seconds:  # on this code and these words codex comes back, and only then
            error["code"] = "rate_limit_exceeded"
            error["message"] += f". Please try again in {refusal.retry_seconds}s."
        told = {"code": error["code"], "message": error["message"]}
        response = {**self._response, "status": "failed", "error": told}
        return (self._event("error", **told, param=error["param"], error=error)
                + self._event("response.failed", response=response))

    def end(self, end: End) -> bytes:
        closing = self._close()
        return closing + self._event("response.completed", response=self.response(end))

    def response(self, end: End) -> dict[str, Any]:
        """Return the whole response."""
        usage = {"input_tokens": end.input_tokens, "input_tokens_details": {"cached_tokens": 0},
                 "output_tokens": end.output_tokens,
                 "output_tokens_details": {"reasoning_tokens": 0},
                 "total_tokens": end.input_tokens + end.output_tokens}
        how: dict[str, Any] = {"status": "completed"}
        if end.reason == "max_tokens":
            how = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return {**self._response, **how, "usage": usage}


class ResponsesBody(Writer):
    """Gathers a whole response: what the last event of its stream would hold."""

    is_stream = False

    def __init__(self, talk: Talk, answer_id: str) -> None:
        self._stream = ResponsesStream(talk, answer_id)

    def begin(self) -> bytes:
        return b""

    def write(self, delta: Delta) -> bytes:
        self._stream.write(delta)
        return b""

    def ping(self) -> bytes:
        return b""

    def fail(self, refusal: Refusal) -> bytes:
        return render_json({"error": _open_error(refusal, "input")})

    def end(self, end: End) -> bytes:
        self._stream.end(end)
        return render_json(self._stream.response(end))


DIALECTS: dict[str, Dialect] = {dialect.path: dialect for dialect in (
    Messages(), ChatCompletions(), Responses())}


def dialect_of(path: str) -> Dialect | None:
    """Return what is spoken at a path; None where nothing is."""
    for dialect in DIALECTS.values():
        if path and path in (dialect.path, dialect.count_path):
            return dialect
    return None


# =============================================================================
# E. World
# =============================================================================

# == 12. HTTP =================================================================
#
# Connections and HTTP/1.1 on them, from both sides: an Exchange asks a node, a Visitor is a client
# that asks us. No wait is longer than its deadline. It is transport and knows no product: what a
# node does wrong is a NodeFailure, what a client does wrong a BadRequest, both in words of HTTP.
# It may use sockets and the clock; only section 13 opens connections.
#
# It reads as strictly as RFC 9112 lets a server be. Where two readers of the same bytes could see
# two requests (both lengths, two codings, odd blanks, folded or broken fields), it sees none. A
# node has one connection for one answer, so LF for CRLF, or both lengths, confuse nobody there.

if TYPE_CHECKING:
    import _thread
    import contextlib
    import errno
    import fcntl
    import glob
    import hmac
    import os
    import queue
    import resource
    import select
    import selectors
    import shlex
    import shutil
    import signal
    import socket
    import ssl
    import stat
    import subprocess
    import time
    import traceback
    from typing import IO
    from urllib.parse import SplitResult
else:
    (_thread, contextlib, errno, fcntl, glob, hmac, os, queue, resource, select, selectors, shlex,
     shutil, signal, socket, ssl, stat, subprocess, time, traceback) = map(_Late, (
         "_thread contextlib errno fcntl glob hmac os queue resource select selectors shlex "
         "shutil signal socket ssl stat subprocess time traceback").split())

_STATUS_LINE = _Pattern(r"HTTP/1\.[01] +([1-5][0-9][0-9])( .*)?")
_REQUEST_LINE = _Pattern(r"([A-Z]{1,16}) ([!-~]{1,4096}) HTTP/1\.([01])")
_FIELD_LINE = _Pattern(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t\x20-\x7e\x80-\xff]*)")
_CHUNK_LINE = _Pattern(r"0*([0-9A-Fa-f]{1,8})[ \t]*(;[\t\x20-\x7e\x80-\xff]*)?")
_PLAIN_CHUNK = _Pattern(rb"([1-9A-Fa-f][0-9A-Fa-f]{0,5})\r\n")
SINGLE_FIELDS = ("host", "content-length", "transfer-encoding")
# With what every answer, and every chunk, begins or may begin: it can go ahead, byte by byte.
ANSWER_START = b"HTTP/1.1 "
CHUNK_START = b"0000000"
LOOK_SECONDS, LOOK_LIMIT_SECONDS = 0.02, 60.0


class BadRequest(FleetError):
    """What a client sent cannot be served; `status` is the HTTP status of the refusal."""

    def __init__(self, status: int, what: str) -> None:
        super().__init__("bad-request", what, status=status)


class ClientGone(BaseException):
    """The client has closed its connection: no failure, but nobody waits any more."""


def _name_failure(error: Exception) -> NodeFailure:
    """Return what a failed call on a socket says about who is at its other end."""
    if isinstance(error, socket.timeout):
        return NodeFailure("timeout", "no answer in time")
    if isinstance(error, ConnectionRefusedError):
        return NodeFailure("refused", "nothing listens there")

    words = getattr(error, "strerror", None) or str(error)
    if type(error).__name__.startswith("SSL"):  # ssl is not imported to name it
        words = getattr(error, "verify_message", "") or getattr(error, "reason", None) or words
        if re.search("WRONG_VERSION|HTTP_REQUEST|RECORD_LAYER", words):
            words = "it does not speak TLS; write http://"
        return NodeFailure("tls", words)

    far = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
    if getattr(error, "errno", 0) in far:
        return NodeFailure("unreachable", words)
    return NodeFailure("bad answer", words)


class Wire:
    """One connection: bytes come and go, and no wait is longer than `deadline`.

    The deadline may be set anew; `cut` from any thread aborts whatever waits.
    http.client has no such end: a byte a second in its headers holds it for ever.
    """

    speech = "answer"  # what the other side sends
    is_strict = False  # a line may end in LF alone
    before_read: Callable[[], object] | None = None  # when all that came was taken; may raise

    def __init__(self, connection: socket.socket, deadline: float,
                 clock: Callable[[], float]) -> None:
        self.deadline = deadline
        self.headers: dict[str, str] = {}  # names in lower case
        self._socket = connection
        self._clock = clock
        self._buffer = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, for `_readable`, which does not see what is buffered here."""
        return self._socket.fileno()

    def cut(self) -> None:
        """End the connection, from any thread: whoever waits for it or reads finds its end."""
        with contextlib.suppress(OSError):  # nobody is connected any more
            # The base class's shutdown wakes a reader in another thread, with TLS too.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and give its descriptor back."""
        self.cut()
        self._socket.close()

    def send(self, message: bytes) -> None:
        """Send all of these bytes."""
        self._within_time(self._socket.sendall, message)

    def _within_time(self, call: Callable[..., Any], argument: object) -> Any:
        """Make one socket call that ends at the deadline; name its failure."""
        left = self.deadline - self._clock()
        if left <= 0:
            raise NodeFailure("timeout", "no answer in time")

        try:
            self._socket.settimeout(left)
            return call(argument)
        except (OSError, ValueError) as error:  # ValueError: TLS on a socket just closed
            raise _name_failure(error) from None

    def _fill(self) -> bool:
        """Add what comes next to the buffer; False when the other side has closed."""
        has_more = getattr(self._socket, "pending", int)  # TLS has read ahead
        if self.before_read and not has_more():
            self.before_read()

        piece = self._within_time(self._socket.recv, 32768)
        self._buffer += piece
        return bool(piece)

    def _read_line(self) -> str:
        """Return the next line of the head, without its end."""
        while b"\n" not in self._buffer:
            if len(self._buffer) > HEADER_LIMIT_BYTES:
                raise NodeFailure("bad answer", f"a line of its {self.speech} does not end")
            if not self._fill():
                raise NodeFailure("bad answer", f"it closed the connection in mid {self.speech}")

        end = self._buffer.index(b"\n")
        line = bytes(self._buffer[:end])
        del self._buffer[:end + 1]  # partition would copy all the rest
        if line.endswith(b"\r"):
            line = line[:-1]
        elif self.is_strict:
            raise NodeFailure("bad answer", f"a line of its {self.speech} ends without CR")
        return line.decode("latin-1")

    def _read_fields(self) -> dict[str, str]:
        """Return the header fields up to the empty line, names in lower case."""
        fields: dict[str, list[str]] = {}
        size = 0
        for line in iter(self._read_line, ""):
            size += len(line)
            if size > HEADER_LIMIT_BYTES:
                raise NodeFailure("bad answer", "its headers do not end")
            match = _FIELD_LINE.fullmatch(line)
            if not match:
                raise NodeFailure("bad answer", "a line of its headers is not `Name: value`")
            # str.strip() would take more than RFC 9112 calls a blank: `\x0bchunked`, `chunked\xa0`.
            fields.setdefault(match[1].lower(), []).append(match[2].strip(" \t"))

        for name in SINGLE_FIELDS:
            if len(fields.get(name, ())) > 1:
                raise NodeFailure("bad answer", f"more than one `{name}` in its headers")
        return {name: ", ".join(values) for name, values in fields.items()}

    def _read_chunk_size(self) -> int:
        """Return how many bytes the next chunk has; 0 ends the body."""
        match = _CHUNK_LINE.fullmatch(self._read_line())
        if not match:
            raise NodeFailure("bad answer", "its chunks have no readable size")
        return int(match[1], 16)

    def _take_chunk(self, size: int) -> Iterator[bytes]:
        """Yield the bytes of one chunk and pass its end."""
        yield from self._take(size)
        if self._read_line():
            raise NodeFailure("bad answer", "a chunk is longer than it said")

    def _take(self, count: int) -> Iterator[bytes]:
        """Yield `count` bytes as they come."""
        while count > 0:
            if not self._buffer and not self._fill():
                raise NodeFailure("bad answer", f"it closed the connection {count} bytes early")
            piece = bytes(self._buffer[:count])
            del self._buffer[:count]
            count -= len(piece)
            yield piece

    def _take_rest(self) -> Iterator[bytes]:
        """Yield what comes until the other side closes."""
        while self._buffer or self._fill():
            piece = bytes(self._buffer)
            self._buffer.clear()
            yield piece


class Exchange(Wire):
    """One request to a node on a connection of its own, and its answer as it arrives."""

    status = 0  # until `read_head`

    def find_peer(self) -> tuple[str, int]:
        """Return the address and the port at the other end."""
        try:
            address, port = self._socket.getpeername()[:2]
        except (OSError, ValueError):  # a reset came
            raise NodeFailure("bad answer", "it closed the connection") from None
        return address, port

    def read_head(self) -> None:
        """Wait for the answer's status line and headers; sets `status` and `headers`."""
        for _ in range(8):  # a few below 200 may come before the real one
            status = self._read_status()
            headers = self._read_fields()
            if status >= 200:
                self.status = status
                self.headers = headers
                return
        raise NodeFailure("not http", "it does not speak HTTP/1.1")

    def _read_status(self) -> int:
        """Return the number in the status line; name those who speak something else."""
        while len(self._buffer) < 5 and self._fill():
            pass
        start = bytes(self._buffer[:5])
        if start.startswith(b"\x15\x03"):  # a TLS alert
            raise NodeFailure("tls", "it speaks TLS; write https://")

        # Who speaks something else may never end a line, so none is awaited.
        match = None
        if b"HTTP/".startswith(start):
            match = _STATUS_LINE.fullmatch(self._read_line())
        if not match:
            raise NodeFailure("not http", "it does not speak HTTP/1.1")
        return int(match[1])

    def pieces(self) -> Iterator[bytes]:
        """Yield the body as it comes; one that ends early is a failure, trailers are left."""
        if not self.status:
            self.read_head()  # nobody has waited for it yet
        coding = self.headers.get("transfer-encoding", "identity").lower()
        length = self.headers.get("content-length")
        is_length = length is None or re.fullmatch("[0-9]{1,18}", length)
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            raise NodeFailure("bad answer", "it compressed what was asked for in clear")

        if coding == "chunked":
            yield from self._take_chunks()
        elif coding != "identity" or not is_length:
            raise NodeFailure("bad answer", "nothing tells how long its answer is")
        elif self.status in (204, 304):
            return
        elif length is None:
            yield from self._take_rest()
        else:
            yield from self._take(int(length))

    def _take_chunks(self) -> Iterator[bytes]:
        """Yield what the chunks of the body hold, up to the last."""
        while True:
            if not self._buffer:
                self._fill()  # where nothing comes any more, reading the size says so
            piece = self._take_whole_chunks()
            if piece:
                yield piece
                continue

            size = self._read_chunk_size()
            if not size:
                return
            yield from self._take_chunk(size)

    def _take_whole_chunks(self) -> bytes:
        """Return what the chunks hold that lie whole in the buffer; what is odd is left there.

        A model's answer has a chunk for each word, and one by one they cost twice as much.
        """
        pieces = []
        at = 0
        match = _PLAIN_CHUNK.match(self._buffer)
        while match:
            begin = match.end()
            end = begin + int(match[1], 16)
            if self._buffer[end:end + 2] != b"\r\n":
                break
            pieces.append(self._buffer[begin:end])
            at = end + 2
            match = _PLAIN_CHUNK.match(self._buffer, at)

        match = None  # it holds the buffer, which then cannot shrink
        del self._buffer[:at]
        return b"".join(pieces)

    def read_all(self, limit: int = ANSWER_LIMIT_BYTES) -> bytearray:
        """Return the whole body; more than `limit` bytes are a failure."""
        body = bytearray()
        for piece in self.pieces():
            body += piece
            if len(body) > limit:
                raise NodeFailure("bad answer", f"its answer is longer than {limit} bytes")
        return body

    def lines(self) -> Iterator[bytes | bytearray]:
        """Yield the lines of the body as they come, without their ends; empty ones are left."""
        rest = bytearray()
        for piece in self.pieces():
            rest += piece
            if b"\n" in piece:
                *whole, rest = rest.split(b"\n")
                yield from filter(None, whole)
            if len(rest) > ANSWER_LIMIT_BYTES:
                raise NodeFailure("bad answer", "a line of its answer does not end")
        if rest:
            yield rest

    def leave(self) -> None:
        """Close in mid answer, so that the node does not notice at the wrong moment.

        One (Ollama 0.32.15, its issue 17131) never frees the slot of a model whose client it sees
        go while a token waits to be sent. A byte ahead keeps it from looking: a write that fails
        then tells it, which is safe. Where nothing comes, no token waits.
        """
        self.before_read = None
        self.deadline = self._clock() + 1.0
        with contextlib.suppress(NodeFailure):
            if self.fileno() >= 0 and _readable([self], LEAVE_SECONDS):
                self.send(b"\n")
                self._swallow(LEAVE_SECONDS)
        self.close()

    def _swallow(self, seconds: float) -> None:
        """Read what comes within the time, and forget it."""
        until = self._clock() + seconds
        while self._clock() < until and _readable([self], until - self._clock()):
            if not self._fill():
                return
            self._buffer.clear()


class Visitor(Wire):
    """A client's connection: its requests one after the other, and whether it is still there.

    A client that has closed and one that only sends no more (`shutdown`, as `nc` does) look the
    same: both sent their FIN. But who has closed answers any byte with a reset. So bytes with which
    the answer will begin anyway go ahead, at growing intervals: nothing comes back from who still
    reads, and who has gone is known after one round trip. Not in the middle of a stream to
    HTTP/1.0, where no byte is free: there the FIN alone counts as gone.
    """

    speech = "request"
    is_strict = True
    stays = True  # whether another request may follow on this connection
    _speaks_1_1 = True  # else it knows no chunks
    _wants_body = True  # HEAD asks for the head of an answer only
    _length: int | None = None  # of the request's body; None: it comes in chunks

    def __init__(self, connection: socket.socket, clock: Callable[[], float]) -> None:
        super().__init__(connection, clock(), clock)
        self.reached: tuple[str, int] = connection.getsockname()[:2]  # which address of ours
        self._is_streaming = False
        self._bytes_ahead = 0  # of the next answer or chunk
        self._look_at: float | None = None  # once the client sends no more: is it still there?
        self._look_seconds = LOOK_SECONDS

    def read_request(self, seconds: float, *,
                     first_byte_seconds: float) -> tuple[str, str, dict[str, str]] | None:
        """Return (method, target, headers), or None when the client has nothing more to say."""
        self.deadline = self._clock() + first_byte_seconds
        with contextlib.suppress(NodeFailure):  # nothing was asked yet
            if not self._buffer:
                self._fill()
        if not self._buffer:
            return None

        self.deadline = self._clock() + seconds
        try:
            return self._read_head()
        except NodeFailure as failure:
            raise _refusal(failure) from None

    def _read_head(self) -> tuple[str, str, dict[str, str]]:
        match = _REQUEST_LINE.fullmatch(self._read_line())
        if not match:
            raise BadRequest(400, "not an HTTP/1.1 request")
        method, target, minor = match.groups()

        self.headers = self._read_fields()
        self._speaks_1_1 = minor == "1"
        self._wants_body = method != "HEAD"
        options = self.headers.get("connection", "").lower().split(",")
        closes = "close" in [option.strip(" \t") for option in options]
        self.stays = self._speaks_1_1 and not closes
        self._length = self._find_length()
        return method, target, self.headers

    def _find_length(self) -> int | None:
        """Return how long the request's body is, None for chunks; refuse what says it twice."""
        coding = self.headers.get("transfer-encoding")
        length = self.headers.get("content-length")
        if coding is not None:
            if length is not None:
                raise BadRequest(400, "request: both Content-Length and Transfer-Encoding")
            if not self._speaks_1_1:
                raise BadRequest(400, "request: HTTP/1.0 knows no Transfer-Encoding")
            if coding.lower() != "chunked":
                raise BadRequest(400, "request: no Transfer-Encoding but chunked is known")
            return None

        if length is None:
            return 0
        if not re.fullmatch("[0-9]+", length):
            raise BadRequest(400, "request: its Content-Length is no number")
        digits = length.lstrip("0")[:19] or "0"  # 19 are too many anyway, 4,301 no int() takes
        return int(digits)

    def read_body(self, limit: int, seconds: float) -> bytearray:
        """Return the body of the request just read; refuse more than `limit` bytes."""
        if self._length == 0:
            return bytearray()
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            raise BadRequest(400, "request: its body is compressed; send it in clear")
        self._check_size(self._length or 0, limit)

        if self._speaks_1_1 and self.headers.get("expect", "").lower() == "100-continue":
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.deadline = self._clock() + seconds
        try:
            if self._length is None:
                return self._read_chunks(limit)
            body = bytearray()
            for piece in self._take(self._length):
                body += piece
            return body
        except NodeFailure as failure:
            raise _refusal(failure) from None

    def _check_size(self, size: int, limit: int) -> None:
        if size > limit:
            raise BadRequest(413, f"body: longer than {limit} bytes")

    def _read_chunks(self, limit: int) -> bytearray:
        """Return a body that comes in chunks; one that would be too long is not awaited."""
        body = bytearray()
        size = self._read_chunk_size()
        while size:
            self._check_size(len(body) + size, limit)
            for piece in self._take_chunk(size):
                body += piece
            size = self._read_chunk_size()
        self._read_fields()  # the trailers, or the next request would begin with them
        return body

    def reply(self, status: int, body: bytes, *, head: str = "",
              kind: str = "application/json") -> None:
        """Send a whole answer, JSON where no `kind` is named; `head` holds further header lines."""
        reason = "OK" if status == 200 else "Refused"
        if not self.stays:
            head += "Connection: close\r\n"
        lines = (f"HTTP/1.1 {status} {reason}\r\n{head}Content-Type: {kind}\r\n"
                 f"Content-Length: {len(body)}\r\n\r\n")
        answer = lines.encode("ascii")
        if self._wants_body:
            answer += body
        self._send_rest(answer)

    def stream(self, piece: bytes, *, head: str = "", last: bool = False) -> None:
        """Send a piece of an answer whose length nobody knows: `head` begins it, `last` ends it.

        HTTP/1.0 knows no chunks: there the end of the connection is the end of the answer.
        """
        answer = b""
        # The length of an answer that begins is told by chunks, or by the end of the connection.
        if head:
            framing = "Transfer-Encoding: chunked\r\n" if self._speaks_1_1 else ""
            if not self.stays:
                framing += "Connection: close\r\n"
            answer = f"HTTP/1.1 200 OK\r\n{head}{framing}\r\n".encode("ascii")
        if not self._speaks_1_1:
            answer += piece
        elif piece:
            answer += b"%x\r\n%b\r\n" % (len(piece), piece)
        if last and self._speaks_1_1:
            answer += b"0\r\n\r\n"

        if self._is_streaming:
            self._bytes_ahead = 0  # zeros before the size of a chunk change nothing
        self._is_streaming = not last
        self._send_rest(answer)

    def _send_rest(self, answer: bytes) -> None:
        """Send what has not gone ahead."""
        rest = answer[self._bytes_ahead:]
        self._bytes_ahead = 0
        self.send(rest)

    def send(self, message: bytes) -> None:
        """Send bytes; a client that takes none of them for a minute has left."""
        self.deadline = self._clock() + SEND_SECONDS
        try:
            super().send(message)
        except NodeFailure:
            raise ClientGone() from None

    def wait(self, other: Wire | Signal, seconds: float) -> bool:
        """Tell whether `other` becomes readable in time; raise ClientGone when the client goes."""
        until = self._clock() + seconds
        while True:
            wake_at = until
            watched: list[Wire | Signal] = [other]
            if self._look_at is not None:
                wake_at = min(until, self._look(self._look_at))
            elif len(self._buffer) <= HEADER_LIMIT_BYTES:
                # What a client sends ahead waits here; what is more is left in its socket, unseen.
                watched.append(self)

            ready = _readable(watched, wake_at - self._clock())
            if self in ready:
                self._take_what_came()
            if other in ready:
                return True
            if self._clock() >= until:
                return False

    def _take_what_came(self) -> None:
        """Keep what the client sent ahead of its answer; from its end on, look whether it stays."""
        self.deadline = self._clock() + 1.0
        try:
            if self._fill():
                return
        except NodeFailure:  # a reset
            raise ClientGone() from None

        if self._is_streaming and not self._speaks_1_1:
            raise ClientGone()
        self._look_at = self._clock()

    def _look(self, look_at: float) -> float:
        """Raise ClientGone when a byte was answered by a reset, send another; return when next."""
        if self._clock() < look_at:
            return look_at

        # Not by reading: after a FIN, Linux goes on saying that nothing comes.
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise ClientGone()

        start = CHUNK_START if self._is_streaming else ANSWER_START
        if self._bytes_ahead < len(start):
            self.send(start[self._bytes_ahead:self._bytes_ahead + 1])
            self._bytes_ahead += 1
        self._look_at = self._clock() + self._look_seconds
        self._look_seconds = min(3 * self._look_seconds, LOOK_LIMIT_SECONDS)
        return self._look_at

    def part(self) -> None:
        """Close so that the last answer still arrives: unread bytes would make it a reset."""
        with contextlib.suppress(OSError):  # it has gone, or sends for ever
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(0.25)
            for _ in range(16):
                if not self._socket.recv(65536):
                    break
        self.close()


def _refusal(failure: NodeFailure) -> BadRequest:
    """Return a failure on a client's connection as the refusal of its request."""
    status = 408 if failure.reason == "timeout" else 400
    return BadRequest(status, f"request: too slow, too long or broken ({failure.detail})")


class Listener:
    """A port at which clients call."""

    def __init__(self, listening: socket.socket, clock: Callable[[], float]) -> None:
        self._socket = listening
        self._clock = clock
        self.host: str = listening.getsockname()[0]
        self.port: int = listening.getsockname()[1]

    def accept(self, wake: Signal, seconds: float) -> Visitor | None:
        """Return the next client; None when `wake` was raised or the time is up."""
        try:
            if self._socket not in _readable([self._socket, wake], seconds):
                return None
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return None  # it has gone already
        except OSError:
            time.sleep(0.05)  # out of files: what is being served will give some back
            return None

        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return Visitor(connection, self._clock)
        except OSError:  # it has gone already
            connection.close()
            return None

    def close(self) -> None:
        """Take no more clients."""
        self._socket.close()


class Signal:
    """A flag that any thread raises and another waits for beside its sockets."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self._far.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable, for `_readable`."""
        return self._near.fileno()

    def set(self) -> None:
        """Raise it; from a signal handler too, and after `close`."""
        with contextlib.suppress(OSError):  # full is as good as set; closed: nobody waits
            self._far.send(b"!")

    def clear(self) -> None:
        """Lower it, where it is up."""
        if _readable([self], 0):
            self._near.recv(4096)

    def close(self) -> None:
        """Give its descriptors back."""
        self._near.close()
        self._far.close()


def _readable(things: Sequence[Any], seconds: float) -> list[Any]:
    """Return those of `things`, which have a `fileno`, that can be read within the time."""
    seconds = max(seconds, 0)
    if not hasattr(select, "poll"):  # Windows
        return select.select(things, [], [], seconds)[0]

    poll = select.poll()  # select.select fails on descriptors above 1023
    for thing in things:
        poll.register(thing, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
    return [thing for thing in things if thing.fileno() in ready]


# == 13. World ================================================================
#
# The only door: terminal, disk, programs, signals, network and what this machine is called. It
# gives out text, bytes and objects of its own or of section 12, never a socket, a process or a
# descriptor. What the system refuses becomes a FleetError in plain words.

# A directory can be a repository of its own making, whose settings name programs: to watch files,
# to fetch what is missing (a lazy fetch, seen with 2.39.5), to run before or after this and that.
# Git before 2.38 knows no safe.bareRepository, before 2.44 no GIT_NO_LAZY_FETCH; of every version
# GIT_ALLOW_PROTOCOL lets none reach another repository, not even one on the disk.
GIT_SETTINGS = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "safe.bareRepository=explicit")
GIT_ENVIRONMENT = {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1",
                   "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
STEP_LIMIT = 256  # names and links on the way to one file
TREE_FILES_LIMIT, TREE_DEPTH_LIMIT = 2000, 16
TREE_FILE_LIMIT_BYTES = 256 * 1024
TREE_LIMIT_BYTES = 16 * 1024 * 1024
OUTSIDE = "lies outside, behind a symbolic link"


def run_together(world: World, jobs: Mapping[Any, Callable[[], Any]], *,
                 until: float = float("inf"), threads: int = 512) -> Iterator[tuple[Any, Any]]:
    """Yield (key, value or NodeFailure) of each job as it ends, (None, None) while none does.

    Nobody waits for its threads past `until`. concurrent.futures joins its threads at exit, so one
    silent node would hold the process.
    """
    threads = min(len(jobs), threads)
    todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for job in jobs.items():
        todo.put(job)
    for _ in range(threads):
        todo.put(None)  # one worker's end
        threading.Thread(target=_work, args=(todo, done), daemon=True).start()

    left = len(jobs)
    while left and world.clock() < until:
        pause = min(TICK_SECONDS, until - world.clock())
        try:
            key, outcome = done.get(timeout=max(0, pause))
        except queue.Empty:
            yield None, None
            continue

        left -= 1
        if isinstance(outcome, NodeFailure):
            outcome.with_traceback(None)  # its frames hold what was read
        elif isinstance(outcome, Exception):
            raise outcome  # a bug is told, not taken for a dead node
        yield key, outcome


def _work(todo: queue.SimpleQueue[Any], done: queue.SimpleQueue[Any]) -> None:
    """Do jobs until there is a None."""
    for key, job in iter(todo.get, None):
        try:
            done.put((key, job()))
        except Exception as error:
            done.put((key, error))


class Trying:
    """Around what the system may refuse: says in plain words what could not be done, and why."""

    def __init__(self, verb: str, path: str, *, slug: str = "unwritable") -> None:
        self._verb = verb
        self._path = path or "''"
        self._slug = slug

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, _: object) -> None:
        if not isinstance(error, (OSError, ValueError)):  # ValueError: a NUL in the path
            return
        reason = getattr(error, "strerror", None) or error
        raise FleetError(self._slug, f"cannot {self._verb} {self._path}: {reason}",
                         fix=self._fix()) from None

    def _fix(self) -> str:
        """Return what to type to see why."""
        if self._path == "-":
            return "name a file instead of `-`"
        for path in (self._path, os.path.dirname(self._path)):
            if os.path.lexists(path):
                return f"check it: `ls -la {shlex.quote(path)}`"
        return "check it: `ls -la .`"


class Place(str):
    """A path below a directory, its `root`, which no link may lead it out of."""

    root: str
    inner: str  # how it goes on from the root

    def __new__(cls, root: str, inner: str) -> Place:
        place = super().__new__(cls, os.path.join(root, inner))
        place.root = root or "."
        place.inner = inner
        return place

    @property
    def name(self) -> str:
        """The last name of the path."""
        return os.path.basename(self.inner)

    @property
    def new_name(self) -> str:
        """What its next content is called until it is whole."""
        return f".{self.name}.new"

    @property
    def above(self) -> str:
        """How its directory is reached from the root."""
        return os.path.dirname(self.inner)


def _as_place(path: str) -> Place:
    """Return a path as a Place; a plain one is believed up to its last name."""
    if isinstance(path, Place):
        return path
    return Place(*os.path.split(path))


def _in_the_way(place: str, what: str, *, fix: str = "move it away") -> FleetError:
    """Return the refusal to write at a place."""
    return FleetError("in-the-way", f"{place} {what}; nothing is written there",
                      fix=f"{fix}: `ls -ld {shlex.quote(place)}`", status=EXIT_REFUSED)


class Descent:
    """The way from a root down to a directory, each step by the descriptor of the one before.

    Links are read here, never followed by the system: one that is put there at any moment, even
    between two steps, is seen. One that stays below the root is gone along, others are refused.
    """

    def __init__(self, place: Place, inner: str, *, makes: bool) -> None:
        self._place = place
        self._makes = makes
        self._steps: list[str] = []  # what is still to go, the next one last
        self._trail = [os.open(place.root, os.O_RDONLY | os.O_DIRECTORY)]
        self._add_steps(inner)

    def go(self) -> int:
        """Return a descriptor of the directory at the end."""
        try:
            for _ in range(STEP_LIMIT):
                if not self._steps:
                    return self._trail.pop()
                self._take(self._steps.pop())
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        finally:
            for descriptor in self._trail:
                os.close(descriptor)

    def _add_steps(self, path: str) -> None:
        names = [name for name in path.split("/") if name not in ("", ".")]
        self._steps += reversed(names)

    def _take(self, step: str) -> None:
        """Go one step down, or up again as far as the root."""
        if step == "..":
            if len(self._trail) == 1:
                raise _in_the_way(self._place, OUTSIDE)
            os.close(self._trail.pop())
            return

        # O_NOFOLLOW makes a link an error: ENOTDIR on Linux, ELOOP on macOS. Whatever it is called,
        # `readlink` then knows better than a look before could.
        here = self._trail[-1]
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        try:
            self._trail.append(os.open(step, flags, dir_fd=here))
        except FileNotFoundError:
            if not self._makes:
                raise
            with contextlib.suppress(FileExistsError):  # somebody else was faster
                os.mkdir(step, dir_fd=here)
            self._steps.append(step)
        except OSError as error:
            self._go_along(step, error)

    def _go_along(self, step: str, error: OSError) -> None:
        """Put the steps of a link in the place of its name; what is no link is the error."""
        try:
            target = os.readlink(step, dir_fd=self._trail[-1])
        except OSError:
            raise error from None

        # A link from the root of the disk may still end below ours.
        if os.path.isabs(target):
            target = self._inside(target)
            while len(self._trail) > 1:
                os.close(self._trail.pop())
        self._add_steps(target)

    def _inside(self, target: str) -> str:
        """Return how an absolute path goes on from the root."""
        for root in (os.path.realpath(self._place.root), os.path.abspath(self._place.root)):
            start = root.rstrip("/") + "/"
            if f"{target}/".startswith(start):
                return target[len(start):]
        raise _in_the_way(self._place, OUTSIDE)


class Directory:
    """A directory below a root, held open: what is done in it is done there, wherever links lead.

    Where a system has no descriptors of directories (Windows), its path is looked at and used.
    """

    def __init__(self, place: Place, inner: str, *, makes: bool = False) -> None:
        self._path = os.path.join(place.root, inner)
        self._descriptor: int | None = None
        if makes:
            os.makedirs(place.root, exist_ok=True)
        if os.name == "posix":
            self._descriptor = Descent(place, inner, makes=makes).go()
            return

        if not _is_below(self._path, place.root):
            raise _in_the_way(place, OUTSIDE)
        if makes:
            os.makedirs(self._path, exist_ok=True)

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _reach(self, name: str) -> str:
        """Return a name as the calls below take it."""
        return os.path.join(self._path, name) if self._descriptor is None else name

    def open(self, name: str, flags: int, mode: int = 0o600) -> int:
        """Return a descriptor of a file here; links are not followed, pipes not awaited."""
        # A FIFO without O_NONBLOCK holds the thread until somebody reads it: for ever.
        for more in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):
            flags |= getattr(os, more, 0)
        return os.open(self._reach(name), flags, mode, dir_fd=self._descriptor)

    def size_of(self, name: str) -> int:
        """Return how many bytes a file here has; 0 where none is."""
        try:
            state = os.stat(self._reach(name), dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return 0
        return state.st_size if stat.S_ISREG(state.st_mode) else 0

    def open_to_append(self, name: str) -> int:
        """Return a descriptor of a regular file that only its owner can read, at its end."""
        descriptor = self.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            # Asked of what is open, not of the path, which may be something else by now.
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise OSError(errno.ENXIO, "it is a device or pipe, not a file")
            if os.name == "posix" and mode & 0o077:
                os.fchmod(descriptor, 0o600)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def write_new(self, name: str, content: bytes, mode: int) -> None:
        """Write a file that was not there; what is left of a run that was cut off goes."""
        with contextlib.suppress(FileNotFoundError):
            self.unlink(name)
        descriptor = self.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as stream:
            stream.write(content)

    def replace(self, old: str, new: str) -> None:
        """Give a file here another name; what had that name is gone."""
        os.replace(self._reach(old), self._reach(new), src_dir_fd=self._descriptor,
                   dst_dir_fd=self._descriptor)

    def unlink(self, name: str) -> None:
        """Remove a file, or a link itself."""
        os.unlink(self._reach(name), dir_fd=self._descriptor)

    def rmdir(self, name: str) -> None:
        """Remove an empty directory."""
        os.rmdir(self._reach(name), dir_fd=self._descriptor)


def _is_below(path: str, root: str) -> bool:
    """Tell whether a path, its links followed, lies in a directory."""
    try:
        real = os.path.realpath(root)
        return os.path.commonpath([real, os.path.realpath(path)]) == real
    except ValueError:  # another drive
        return False
    except OSError:  # a link was taken away while it was followed (3.12.1 raises that)
        return False


def _open_to_read(path: str) -> IO[bytes]:
    """Return a regular file to read, or standard input for `-`; a pipe in its place blocks not."""
    if path == "-":
        return open(0, "rb", closefd=False)
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.ENXIO, "it is no file any more")
        return open(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def _files_in(directory: str, ending: str) -> Iterator[str]:
    """Yield the first files in a tree whose names end so, not below links, not too deep."""
    count = 0
    for place, directories, names in os.walk(directory):
        directories.sort()
        if place.count(os.sep) - directory.count(os.sep) >= TREE_DEPTH_LIMIT:
            directories.clear()
        for name in sorted(names):
            if name.endswith(ending):
                count += 1
                if count > TREE_FILES_LIMIT:
                    return
                yield os.path.join(place, name)


def _append(descriptor: int, line: bytes) -> None:
    """Add a whole line to a file; where the disk is full, nothing of it."""
    size = os.fstat(descriptor).st_size
    written = 0
    try:
        while written < len(line):
            written += os.write(descriptor, line[written:])
    except OSError:
        if os.fstat(descriptor).st_size == size + written:  # else another has written behind it
            os.ftruncate(descriptor, size)
        raise


class Child:
    """A program that runs in the background."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def ended(self) -> bool:
        """Tell whether it has ended by itself."""
        return self._process.poll() is not None

    def stop(self) -> None:
        """End it at once: it keeps nothing that a softer end would save."""
        self._process.kill()
        self._process.wait()


def _render_request(parts: SplitResult, body: bytes | None, headers: Mapping[str, str]) -> bytes:
    """Return a GET, or a POST of `body`, as it goes over the wire."""
    from urllib.parse import quote
    fields: dict[str, object] = {
        "Host": re.sub(r"%[^]]*", "", parts.netloc),  # an IPv6 zone means nothing there
        "User-Agent": f"subagent-fleet/{__version__}",
        "Connection": "close"}
    method = "GET"
    if body is not None:
        method = "POST"
        fields["Content-Type"] = "application/json"
        fields["Content-Length"] = len(body)
    fields.update(headers)

    target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=")
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + (body or b"")


def _look_up(host: str, port: int, flags: int = 0) -> list[Any]:
    """Return the addresses of a name as the system has them."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise NodeFailure("dns", f"{host}: {reason}") from None


def _refused_port(host: str, port: int, error: OSError) -> FleetError:
    """Return why a port could not be listened at."""
    reason, _, _ = str(error.strerror or error).partition(" (while ")  # the address again
    what = f"cannot listen on {host}:{port}: {reason}"
    if error.errno == errno.EADDRINUSE:
        return FleetError("port-taken", what, fix=f"{OTHER_PORT} "
                          f"(lsof -nP -iTCP:{port} -sTCP:LISTEN shows it)")
    return FleetError("cannot-listen", what, fix="choose another with --host or --port")


def _owners_in_table(table: Iterable[str], port: int) -> set[int]:
    """Return the users that listen on a port by a table of Linux (/proc/net/tcp)."""
    owners = set()
    for line in table:
        fields = line.split()
        if fields[1].endswith(f":{port:04X}") and fields[3] == "0A":  # LISTEN
            owners.add(int(fields[7]))
    return owners


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """End a program and what it has started, however it tries to stay."""
    with contextlib.suppress(OSError):  # it has ended
        if os.name == "posix":
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    child.wait()


class PrivateDirectory:
    """A directory outside of any project that only its owner can enter, until it is left."""

    def __enter__(self) -> str:
        from tempfile import mkdtemp
        with Trying("make", "a temporary directory"):
            self._path = mkdtemp(prefix="subagent-fleet-")  # 0700
        return self._path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


@dataclass(frozen=True)
class Ended:
    """How a program ended, and what it said last."""

    code: int | None  # None: it was stopped, its time was over
    output: str


# What runs a program without a network, the best first: in a space of its own every process of
# it ends with the first. macOS calls its own deprecated and uses it everywhere.
CAGES = (("unshare", "-rnpf", "--kill-child"), ("unshare", "-npf", "--kill-child"),
         ("unshare", "-rn"), ("unshare", "-n"),
         ("sandbox-exec", "-p", "(version 1)(allow default)(deny network*)"))
# Two gigabytes, files of four megabytes; macOS knows no limit of memory, and says so.
CAGE_LIMITS = "ulimit -t {}; ulimit -f 8192; ulimit -v 2000000 2>/dev/null; exec \"$@\""
CAGED_OUTPUT_BYTES = 64 * 1024


@dataclass(frozen=True)
class PortHolder:
    """A process that listens on a port of this machine."""

    process_id: int
    program: str
    directory: str


KNOCKS_AT_ONCE = 500  # Windows can wait for 512 connections together
KNOCK_OUTCOMES = {"": "open", "ECONNREFUSED": "refused", "ETIMEDOUT": "silent"}


class World:
    """The disk, the network, the environment, the clock and the terminal."""

    def __init__(self) -> None:
        self.environ = dict(os.environ)
        self.clock: Callable[[], float] = time.monotonic
        self.now: Callable[[], float] = time.time
        self.sleep: Callable[[float], None] = time.sleep
        self.connect_seconds = CONNECT_SECONDS
        self.node_keys: dict[tuple[str, str], str] = {}  # what may go to (endpoint, variable)
        self._large = _thread.allocate_lock()  # who reads a large answer
        self._parsing = _thread.allocate_lock()  # who makes values of an answer
        self._tls: ssl.SSLContext | None = None
        self._alive: dict[str, object] = {}  # the address that answered last, by host and port
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # a C locale shows the rest
                stream.reconfigure(errors="backslashreplace")

    # -- terminal --

    def out(self, text: str) -> None:
        """Write what was asked for; a full disk is an error, a reader that has gone is not."""
        try:
            if sys.stdout is not None:  # None: closed before the start
                sys.stdout.write(text)
                sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            self.discard_output()
            raise FleetError("output", f"cannot write the output: {error.strerror}") from None

    def err(self, text: str) -> None:
        """Write talk: errors, hints, progress."""
        if sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()

    def is_terminal(self, stream: str = "stdout") -> bool:
        """Tell whether a person reads what goes to this stream."""
        found = getattr(sys, stream)
        return found is not None and not found.closed and found.isatty()

    @property
    def columns(self) -> int:
        """Width of the terminal, or of the one that most have where it does not say."""
        return shutil.get_terminal_size().columns or 80

    def encoding_of(self, stream: str) -> str:
        """Return how a stream writes text, as far as it says."""
        return getattr(getattr(sys, stream), "encoding", None) or ""

    def discard_output(self) -> None:
        """Send what is still to be written nowhere: the reader has gone."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def confirm(self, question: str) -> bool:
        """Return a person's yes; off a terminal nobody is asked, and the answer is yes."""
        if not (sys.stdin and sys.stdin.isatty() and self.is_terminal("stderr")):
            return True
        self.err(f"{question} [y/N] ")
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    # -- disk: paths --

    @property
    def directory(self) -> str:
        """The working directory."""
        try:
            return os.getcwd()
        except OSError:
            raise FleetError("no-directory", "the working directory no longer exists",
                             fix="cd to one that does") from None

    @contextlib.contextmanager
    def visit(self, directory: str) -> Iterator[None]:
        """Work in a directory until it is left; SIGTERM ends that as Ctrl-C does."""
        before = self.directory
        with Trying("enter", directory, slug="unreadable"):
            os.chdir(directory)
        with self._take_signals({signal.SIGTERM: signal.default_int_handler}):
            try:
                yield
            finally:
                os.chdir(before)

    def path(self, *parts: str) -> str:
        """Return the parts as one path."""
        return os.path.join(*parts)

    def split(self, path: str) -> tuple[str, str]:
        """Return the directory and the name of a path."""
        return os.path.split(path)

    def parent(self, path: str) -> str:
        """Return the directory of a path."""
        return os.path.dirname(path) or "."

    def real_path(self, path: str) -> str:
        """Return where a path really leads, from the root."""
        return os.path.realpath(path)

    def kind_of(self, path: str, *, follow: bool = True) -> str:
        """Return file, directory, symlink, device or pipe, or absent."""
        look = os.stat if follow else os.lstat
        with Trying("read", path, slug="unreadable"):
            try:
                mode = look(path).st_mode
            except (FileNotFoundError, NotADirectoryError):
                return "absent"
        kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}
        return kinds.get(stat.S_IFMT(mode), "device or pipe")

    def others_may_read(self, path: str) -> bool:
        """Tell whether a file is there that not only its owner can read."""
        if os.name != "posix":  # Windows keeps its rights elsewhere
            return False

        try:
            mode = os.stat(path).st_mode
        except (OSError, ValueError):  # it has just gone
            return False
        return stat.S_ISREG(mode) and bool(mode & 0o077)

    def belongs_to_other(self, path: str) -> bool:
        """Tell whether a file is there that is another user's."""
        if os.name != "posix":
            return False
        try:
            return os.stat(path).st_uid != os.getuid()
        except (OSError, ValueError):  # it has just gone
            return False

    def below(self, root: str, path: str) -> Place:
        """Return root/path as a Place: what is written there is not led out of root by a link."""
        return Place(root, path)

    def enter(self, root: str, path: str) -> Place:
        """Return root/path as a Place; refuse where a link leads out or no file can be."""
        place = self.below(root, path)
        kind = self.kind_of(place, follow=False)
        if not _is_below(self.parent(place), root):
            raise _in_the_way(place, OUTSIDE)
        if kind == "symlink":
            raise _in_the_way(place, "is a symlink", fix="name its target")
        if kind not in ("file", "absent"):
            raise _in_the_way(place, f"is a {kind}")
        return place

    # -- disk: reading --

    def read_bytes(self, path: str, *, limit: int = TEXT_LIMIT_BYTES) -> bytes:
        """Read a regular file, or standard input for `-`; refuse what is larger than the limit."""
        kind = "file" if path == "-" else self.kind_of(path)
        if kind not in ("file", "absent"):
            raise FleetError("not-file", f"{path} is a {kind}, not a file",
                             fix="name a file, or `-` for standard input")
        with Trying("read", path, slug="unreadable"), _open_to_read(path) as stream:
            content = stream.read(limit + 1)
        if len(content) > limit:
            raise FleetError("too-large", fix="name the right file",
                             what=f"{path} is larger than {limit // 1048576} MiB")
        return content

    def size_of(self, path: str) -> int:
        """Return the size of a regular file in bytes; 0 where there is none."""
        if self.kind_of(path) != "file":
            return 0
        with Trying("read", path, slug="unreadable"):
            return os.path.getsize(path)

    def changed_at(self, path: str) -> float:
        """Return when a file was last changed, in seconds since 1970; 0 where there is none."""
        try:
            return os.stat(path).st_mtime
        except (OSError, ValueError):
            return 0.0

    def read_part(self, path: str, start: int, limit: int) -> bytes:
        """Return up to `limit` bytes of a regular file from an offset; nothing where it is none."""
        if self.kind_of(path) != "file":
            return b""
        with Trying("read", path, slug="unreadable"), open(path, "rb") as stream:
            stream.seek(start)
            return stream.read(limit)

    def read_tree(self, directory: str, ending: str) -> dict[str, str | None]:
        """Return {path: text, None: not read} of the files in a tree whose names end so.

        The tree may be anybody's: what lies outside the working directory is not read, and no
        more than so many files, bytes and levels are.
        """
        if self.kind_of(directory) != "absent" and not _is_below(directory, "."):
            return {directory: None}
        texts: dict[str, str | None] = {}
        left = TREE_LIMIT_BYTES
        for path in _files_in(directory, ending):
            texts[path] = None
            if _is_below(path, "."):
                with contextlib.suppress(FleetError):
                    content = self.read_bytes(path, limit=min(TREE_FILE_LIMIT_BYTES, left))
                    left -= len(content)
                    texts[path] = content.decode("utf-8", "replace")
        return dict(sorted(texts.items()))

    def names_near(self, program: str, pattern: str) -> list[str]:
        """Return the names that match a pattern, seen from where a program really lies."""
        place = glob.escape(self.parent(os.path.realpath(program)))
        return [os.path.basename(path) for path in glob.glob(self.path(place, pattern))]

    def paths_below(self, directory: str, pattern: str) -> list[str]:
        """Return the paths in a directory that match a pattern."""
        return sorted(glob.glob(self.path(glob.escape(directory), pattern)))

    # -- disk: writing --

    def make_directory(self, path: str) -> None:
        """Make a directory and those above it, where they are absent."""
        place = _as_place(path)
        with Trying("make", place), Directory(place, place.inner, makes=True):
            pass

    def replace_files(self, files: Sequence[tuple[str, bytes, int]]) -> None:
        """Replace (path, bytes, mode) files in their order; at any moment each is old or new."""
        staged: list[tuple[Directory, Place]] = []
        held: dict[tuple[str, str], Directory] = {}  # by root and path: 200 agents share one
        with contextlib.ExitStack() as holding:
            try:
                # All are written beside their places first, so that a full disk changes nothing.
                for path, content, mode in files:
                    place = _as_place(path)
                    key = (place.root, place.above)
                    with Trying("write", place):
                        if key not in held:
                            directory = Directory(place, place.above, makes=True)
                            held[key] = holding.enter_context(directory)
                        staged.append((held[key], place))
                        held[key].write_new(place.new_name, content, mode)

                for directory, place in staged:
                    with Trying("write", place):
                        directory.replace(place.new_name, place.name)
            except FleetError:
                for directory, place in staged:
                    with contextlib.suppress(OSError):
                        directory.unlink(place.new_name)
                raise

    def append_line(self, path: str, line: bytes) -> None:
        """Add a line to a file only its owner can read; past the limit it turns over to `.1`."""
        place = _as_place(path)
        with Trying("write", place), Directory(place, place.above) as directory:
            if directory.size_of(place.name) > RECEIPTS_LIMIT_BYTES:
                directory.replace(place.name, f"{place.name}.1")
            descriptor = directory.open_to_append(place.name)
            try:
                _append(descriptor, line)
            finally:
                os.close(descriptor)

    def make_private(self, path: str) -> None:
        """Let nobody but the owner read a file."""
        place = _as_place(path)
        if not self.others_may_read(place):
            return
        with Trying("protect", place), Directory(place, place.above) as directory:
            descriptor = directory.open(place.name, os.O_RDONLY)
            try:
                os.fchmod(descriptor, 0o600)
            finally:
                os.close(descriptor)

    def remove(self, path: str) -> None:
        """Remove a file, where there is one."""
        place = _as_place(path)
        with Trying("remove", place), contextlib.suppress(FileNotFoundError), \
                Directory(place, place.above) as directory:
            directory.unlink(place.name)

    def remove_empty(self, path: str) -> None:
        """Remove a directory in which nothing is left."""
        place = _as_place(path)
        # it is used, was never there, or lies behind a link
        with contextlib.suppress(OSError, FleetError), \
                Directory(place, place.above) as directory:
            directory.rmdir(place.name)

    # -- programs --

    def which(self, name: str) -> str | None:
        """Return where a program lies on the PATH, or that a path is one.

        What the PATH holds relative to the working directory (on Windows always first) is not
        looked at: a program there is whoever's that directory is.
        """
        places = self.environ.get("PATH", os.defpath).split(os.pathsep)
        program = shutil.which(name, path=os.pathsep.join(filter(os.path.isabs, places)))
        if program and not os.path.dirname(name) and not os.path.isabs(program):
            return None
        return program

    def read_program(self, words: Sequence[str], until: float,
                     environ: Mapping[str, str] | None = None) -> str | None:
        """Return what a program prints; None when it is absent, fails or takes too long."""
        return self._read_program(words, environ or self.environ, until)

    def read_git(self, words: Sequence[str], directory: str, until: float) -> str | None:
        """Return what git prints in a directory that may be anybody's: nothing it names is run."""
        # The machine's own settings stay in force (no GIT_CONFIG_NOSYSTEM): they are its owner's.
        argv = ["git", "-C", directory]
        for setting in GIT_SETTINGS:
            argv += ["-c", setting]
        return self._read_program([*argv, *words], {**self.environ, **GIT_ENVIRONMENT}, until)

    def _read_program(self, words: Sequence[str], environ: Mapping[str, str],
                      until: float) -> str | None:
        program = self.which(words[0])
        if not program:
            return None
        seconds = max(0.1, until - self.clock())
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            done = subprocess.run([program, *words[1:]], check=True, timeout=seconds, env=environ,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.DEVNULL)
            return done.stdout.decode("utf-8", "replace")
        return None

    def find_cage(self) -> tuple[str, ...]:
        """Return what runs a program without a network here; empty where nothing does."""
        for cage in CAGES:
            program = self.which(cage[0])
            if program and self.read_program([*cage, "true"], self.clock() + 5.0) is not None:
                return (program, *cage[1:])
        return ()

    def run_caged(self, argv: Sequence[str], files: Mapping[str, str], *, cage: Sequence[str],
                  seconds: int) -> Ended:
        """Run a program among these files, in a directory that goes with it, for so long."""
        from tempfile import TemporaryFile
        limits = [*cage, "/bin/sh", "-c", CAGE_LIMITS.format(seconds), "sh"]
        with PrivateDirectory() as directory, TemporaryFile() as output:
            self.replace_files([(self.below(directory, name), text.encode("utf-8", "replace"),
                                 0o600) for name, text in files.items()])
            environ = {"HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8",
                       "PATH": os.defpath}
            with Trying("run", argv[0], slug="cannot-run"):
                child = subprocess.Popen(
                    [*(limits if os.name == "posix" else []), *argv], cwd=directory, env=environ,
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    start_new_session=True)
            try:
                code: int | None = child.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _kill_group(child)
            output.seek(max(0, os.fstat(output.fileno()).st_size - CAGED_OUTPUT_BYTES))
            return Ended(code, output.read(CAGED_OUTPUT_BYTES).decode("utf-8", "replace"))

    def run(self, argv: Sequence[str], environ: Mapping[str, str]) -> int:
        """Run a program on this terminal to its end; return its exit code as a shell has it."""
        children: list[subprocess.Popen[bytes]] = []
        requests_to_end = []

        def hand_on(*_: object) -> None:
            requests_to_end.append(True)  # it may come before there is a child
            for started in children:
                started.terminate()

        # Functions, not SIG_IGN, which the child would inherit. Ctrl-C reaches it anyway. A
        # terminal that closes (SIGHUP) must not leave behind what is removed at the end.
        handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: hand_on}
        if hasattr(signal, "SIGHUP"):
            handlers[signal.SIGHUP] = hand_on
        with self._take_signals(handlers):
            with Trying("run", argv[0], slug="cannot-run"):
                child = subprocess.Popen(argv, env=environ)
            children.append(child)
            if requests_to_end:
                child.terminate()
            code = child.wait()
        return code if code >= 0 else 128 - code

    def start(self, argv: Sequence[str], *, environ: Mapping[str, str], log: str,
              directory: str) -> Child:
        """Start a program in the background, in a directory, its output in a file."""
        self._end_by_interrupt()
        came: list[int] = []

        def note(number: int, _: object) -> None:
            came.append(number)  # raised in the middle of Popen it would lose the child

        with self._take_signals({signal.SIGINT: note, signal.SIGTERM: note}), \
                self._open_log(log) as stream, Trying("run", argv[0], slug="cannot-run"):
            child = Child(subprocess.Popen(argv, env=environ, cwd=directory,
                                           stdin=subprocess.DEVNULL, stdout=stream,
                                           stderr=stream))
        if came:
            child.stop()
            raise KeyboardInterrupt
        return child

    def _open_log(self, path: str) -> IO[bytes]:
        """Return a file that a child's output is added to; only its owner can read it."""
        place = _as_place(path)
        with Trying("write", place), Directory(place, place.above, makes=True) as directory:
            return open(directory.open_to_append(place.name), "ab", buffering=0)

    def open_page(self, url: str) -> bool:
        """Show a page in the browser of who sits here; False where nobody does."""
        has_screen = sys.platform in ("darwin", "win32") or any(
            self.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
        if not has_screen or self.environ.get("SSH_CONNECTION"):
            return False
        if sys.platform == "win32":
            os.startfile(url)
            return True

        # webbrowser would start a browser for terminals where there is no other.
        program = self.which("open" if sys.platform == "darwin" else "xdg-open")
        if program:
            subprocess.Popen([program, url], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL, start_new_session=True)
        return bool(program)

    # -- network --

    def open_exchange(self, url: str, *, body: bytes | None = None,
                      headers: Mapping[str, str] | None = None, deadline: float) -> Exchange:
        """Send a GET, or a POST of `body`; return the Exchange that reads its answer.

        No proxies are used and no redirects followed: a node is where the fleet file says.
        """
        from urllib.parse import urlsplit
        parts = urlsplit(url)
        until = min(deadline, self.clock() + self.connect_seconds)
        connection = self._connect(parts, until)

        exchange = Exchange(connection, deadline, self.clock)
        try:
            exchange.send(_render_request(parts, body, headers or {}))
        except BaseException:
            exchange.close()
            raise
        return exchange

    def ask(self, endpoint: str, ask: Ask, *, deadline: float) -> Any:
        """Return what an Ask makes of a node's whole answer; its body is gone afterwards.

        Hostile answers fill no memory together: large ones are read one at a time, and only one
        is made into values at a time.
        """
        payload = None if ask.payload is None else json.dumps(ask.payload).encode("utf-8")
        body = bytearray()
        with contextlib.ExitStack() as ending:
            ending.callback(body.clear)  # a failure's traceback would keep it
            exchange = self.open_exchange(endpoint + ask.path, body=payload, headers=ask.headers,
                                          deadline=deadline)
            ending.callback(exchange.close)
            exchange.read_head()
            self._read_into(body, exchange, ending)

            # One at a time: values take many times the memory of their text.
            with self._parsing:
                return ask.extract(Reply(exchange.status, exchange.headers, body))

    def ask_lines(self, endpoint: str, ask: Ask, *, stall_seconds: float) -> Iterator[Any]:
        """Yield what an Ask makes of each line of an answer, none awaited for longer than that."""
        payload = None if ask.payload is None else json.dumps(ask.payload).encode("utf-8")
        exchange = self.open_exchange(endpoint + ask.path, body=payload, headers=ask.headers,
                                      deadline=self.clock() + stall_seconds)
        with contextlib.closing(exchange):
            exchange.read_head()
            for line in exchange.lines():
                yield ask.extract(Reply(exchange.status, exchange.headers, line))
                exchange.deadline = self.clock() + stall_seconds

    def _read_into(self, body: bytearray, exchange: Exchange, ending: contextlib.ExitStack) -> None:
        """Read an answer's body; from a size on, alone until `ending` ends."""
        is_alone = False
        for piece in exchange.pieces():
            body += piece
            if len(body) > PROBE_LIMIT_BYTES:
                raise NodeFailure("bad answer",
                                  f"its answer is longer than {PROBE_LIMIT_BYTES} bytes")
            if len(body) > FREE_ANSWER_BYTES and not is_alone:
                left = max(0, exchange.deadline - self.clock())
                is_alone = self._large.acquire(timeout=left)
                if not is_alone:
                    raise NodeFailure("timeout", "no answer in time")
                ending.callback(self._large.release)

    def _connect(self, parts: SplitResult, until: float) -> socket.socket:
        """Return a socket to the endpoint: every address of the name gets its share of the time."""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        addresses = self.resolve(parts.hostname or "", port, until)
        # They are of two families and one may be dead; what answered last goes first.
        addresses.sort(key=lambda entry: entry[4] != self._alive.get(parts.netloc))

        failures = []
        for index, (family, kind, protocol, _, address) in enumerate(addresses):
            connection = None
            left = max(until - self.clock(), 0.01)
            try:
                connection = socket.socket(family, kind, protocol)
                connection.settimeout(left / (len(addresses) - index))
                connection.connect(address)
                self._alive[parts.netloc] = address

                # What is small is not held back for more to come.
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if parts.scheme == "https":
                    connection = self._wrap_tls(connection, parts, until)
                return connection
            except OSError as error:
                if connection:
                    connection.close()
                failures.append(_name_failure(error))

        raise failures.pop()  # a name for it would keep its frame, and all in it, in a cycle

    def _wrap_tls(self, connection: socket.socket, parts: SplitResult,
                  until: float) -> ssl.SSLSocket:
        """Return the connection behind TLS, with the certificates this machine trusts."""
        with self._parsing:
            self._tls = self._tls or ssl.create_default_context()  # 7 MB: one for all
        connection.settimeout(max(until - self.clock(), 0.01))
        name = (parts.hostname or "").split("%")[0]
        return self._tls.wrap_socket(connection, server_hostname=name)

    def resolve(self, host: str, port: int, until: float) -> list[Any]:
        """Return the addresses of a name, looked up in a thread: nothing can interrupt it."""
        with contextlib.suppress(NodeFailure):  # an address needs no thread
            return _look_up(host, port, socket.AI_NUMERICHOST)

        job = {host: lambda: _look_up(host, port)}
        late = NodeFailure("dns", f"{host}: nobody could tell its address in time")
        answer = dict(run_together(self, job, until=until)).get(host, late)
        if isinstance(answer, NodeFailure):
            raise answer
        return answer

    def knock(self, places: Sequence[tuple[str, int]], seconds: float
              ) -> Iterator[tuple[tuple[str, int], str]]:
        """Connect to each (IPv4 address, port); yield it with what came of that.

        That is open, refused, silent or unreachable. So many at once that silence costs its time
        once for all of them; nothing is sent.
        """
        self.allow_files(KNOCKS_AT_ONCE + 256)
        waves = -(-len(places) // KNOCKS_AT_ONCE)
        for start in range(0, len(places), KNOCKS_AT_ONCE):
            wave = places[start:start + KNOCKS_AT_ONCE]
            yield from self._knock_together(wave, self.clock() + seconds / waves)

    def _knock_together(self, places: Sequence[tuple[str, int]], until: float
                        ) -> Iterator[tuple[tuple[str, int], str]]:
        with contextlib.ExitStack() as closing:
            selector = closing.enter_context(selectors.DefaultSelector())
            waiting = set()
            sockets = {}
            for place in places:
                connection = closing.enter_context(
                    socket.socket(socket.AF_INET, socket.SOCK_STREAM))
                sockets[place] = connection
                connection.setblocking(False)
                code = connection.connect_ex(place)
                if code in (errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EAGAIN):
                    selector.register(connection, selectors.EVENT_WRITE, place)
                    waiting.add(place)
                else:
                    yield place, KNOCK_OUTCOMES.get(errno.errorcode.get(code, ""), "unreachable")

            while waiting and self.clock() < until:
                for entry, _ in selector.select(max(until - self.clock(), 0)):
                    code = sockets[entry.data].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    selector.unregister(entry.fileobj)
                    waiting.discard(entry.data)
                    name = errno.errorcode.get(code, "")
                    yield entry.data, KNOCK_OUTCOMES.get(name, "unreachable")
            for place in waiting:
                yield place, "silent"

    def broadcast_addresses(self) -> list[str]:
        """Return the IPv4 broadcast addresses of this machine's networks, else the one of all."""
        addresses: list[str] = []
        request = {"linux": 0x8919, "darwin": 0xC0206923}.get(sys.platform)  # SIOCGIFBRDADDR
        with contextlib.suppress(OSError), \
                socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
            for _, name in socket.if_nameindex() if request else ():
                with contextlib.suppress(OSError):  # it has none
                    wanted = name.encode()[:15].ljust(40, b"\0")
                    told = fcntl.ioctl(asker.fileno(), request or 0, wanted)
                    address = socket.inet_ntoa(told[20:24])
                    if address not in ("0.0.0.0", *addresses):
                        addresses.append(address)
        return addresses or ["255.255.255.255"]

    def send_datagram(self, host: str, port: int, content: bytes) -> None:
        """Send one UDP datagram, to a broadcast address, too."""
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
                sender.sendto(content, (host, port))
        except OSError as error:
            raise NodeFailure("unreachable", f"{host}: {error.strerror or error}") from None

    def listen(self, host: str, port: int) -> Listener:
        """Return the Listener of a port; port 0 is any that is free."""
        self.allow_files(2048)
        try:
            # `localhost` may be ::1 first, and the environment names 127.0.0.1
            host = "127.0.0.1" if host == "localhost" else host
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            # `::` shall take who comes by IPv4 as well.
            both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            listening = socket.create_server((host, port), family=family, backlog=512,
                                             dualstack_ipv6=both)
            listening.setblocking(False)
            return Listener(listening, self.clock)
        except OSError as error:
            raise _refused_port(host, port, error) from None

    def allow_files(self, count: int) -> None:
        """Let the process open so many files, where the system lets it: macOS begins with 256."""
        with contextlib.suppress(ImportError):  # Windows has no such limit
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
            if soft != resource.RLIM_INFINITY and soft < wanted:
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

    # -- this machine --

    def token(self, size: int) -> str:
        """Return so many random bytes, in hexadecimal."""
        return os.urandom(size).hex()

    def own_names(self) -> tuple[str, tuple[str, ...]]:
        """Return this machine's name and the IPv4 addresses it would call from. Nothing is sent."""
        addresses = []
        for target in ROUTE_TARGETS:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as caller, \
                    contextlib.suppress(OSError):  # no route leads there
                caller.connect((target, 9))
                address = caller.getsockname()[0]
                if address not in addresses:
                    addresses.append(address)
        return socket.gethostname(), tuple(addresses)

    def is_own_address(self, address: str) -> bool:
        """Tell whether an address is one of this machine's: no other can be bound."""
        with contextlib.suppress(NodeFailure, OSError):
            for family, kind, _, _, place in _look_up(address, 0, socket.AI_NUMERICHOST):
                with socket.socket(family, kind) as probe:
                    probe.bind(place)
                    return True
        return False

    def is_port_ours(self, port: int) -> bool:
        """Tell whether nobody but this user and root listens on a port.

        False as well where the system does not say: that is Windows, and a port nobody has.
        """
        if os.name != "posix":
            return False
        owners: set[int] = set()
        if self.kind_of("/proc/net/tcp") == "file":
            for table in ("/proc/net/tcp", "/proc/net/tcp6"):
                with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
                    owners |= _owners_in_table(lines, port)
        else:
            words = ["lsof", "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-Fu"]
            listed = self.read_program(words, self.clock() + 2.0)
            owners = {int(owner) for owner in re.findall(r"(?m)^u(\d+)$", listed or "")}
        return bool(owners) and owners <= {0, os.getuid()}

    def find_holder(self, port: int) -> PortHolder | None:
        """Return who listens on a port, where the system tells: mostly of one's own processes."""
        if self.kind_of("/proc/net/tcp") == "file":
            return self._find_holder_in_proc(port)
        return self._find_holder_with_lsof(port)

    def _find_holder_in_proc(self, port: int) -> PortHolder | None:
        """Search Linux's tables: a listening socket has a number, a process has it open."""
        sockets = set()
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
                for line in lines:
                    fields = line.split()
                    if fields[1].endswith(f":{port:04X}") and fields[3] == "0A":  # LISTEN
                        sockets.add(f"socket:[{fields[9]}]")

        for pid in filter(str.isdigit, os.listdir("/proc") if sockets else ()):
            place = f"/proc/{pid}"
            with contextlib.suppress(OSError):  # it has ended, or is somebody else's
                if sockets & self._open_sockets(f"{place}/fd"):
                    program = self.read_part(f"{place}/comm", 0, 64).decode("utf-8", "replace")
                    return PortHolder(int(pid), program.strip(), os.readlink(f"{place}/cwd"))
        return None

    def _open_sockets(self, directory: str) -> set[str]:
        """Return what a process has open, as Linux names it."""
        names = set()
        for name in os.listdir(directory):
            with contextlib.suppress(OSError):  # closed since, as what listed this directory is
                names.add(os.readlink(f"{directory}/{name}"))
        return names

    def _find_holder_with_lsof(self, port: int) -> PortHolder | None:
        """Ask lsof, which macOS and the BSDs have; `-F` prints a field a line."""
        until = self.clock() + 2.0
        listed = self.read_program(["lsof", "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-Fpc"], until)
        match = re.match(r"p(\d+)\nc(.*)", listed or "")
        if not match:
            return None

        pid, program = match.groups()
        placed = self.read_program(["lsof", "-a", "-p", pid, "-d", "cwd", "-Fn"], until)
        directory = re.search(r"(?m)^n(.*)", placed or "")
        return PortHolder(int(pid), program, directory[1] if directory else "?")

    def find_free_port(self, host: str, above: int) -> int:
        """Return the next port on which nobody listens; 0 where a hundred are taken."""
        for port in range(above + 1, min(above + 101, 65536)):
            with contextlib.suppress(FleetError):
                self.listen(host, port).close()
                return port
        return 0

    # -- signals: only the main thread may take them --

    def on_stop(self, callback: Callable[[str], object]) -> None:
        """Call back with the name of Ctrl-C or SIGTERM when one comes."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: callback(signal.Signals(number).name))

    def _end_by_interrupt(self) -> None:
        """Let SIGTERM end us as Ctrl-C does: with every child that was started."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)

    def _take_signals(self, handlers: Mapping[signal.Signals, Callable[..., object]]
                      ) -> contextlib.ExitStack:
        """Handle these signals until the returned stack is left."""
        restoring = contextlib.ExitStack()
        for number, handler in handlers.items():
            restoring.callback(signal.signal, number, signal.signal(number, handler))
        return restoring


# =============================================================================
# F. The fleet at work
# =============================================================================

# == 14. Nodes ================================================================
#
# What is asked of machines: all at once, each with a deadline that holds whatever they do.

def probe_nodes(world: World, nodes: Mapping[str, Node], seconds: float,
                models: Mapping[str, Model] | None = None) -> dict[str, NodeState]:
    """Return {name: NodeState}: every node asked at once, no answer awaited past `seconds`.

    The capabilities of the fleet's `models` are asked for; without any, those of all there are.
    """
    deadline = world.clock() + seconds
    wanted = {full_model_name(model.ollama_model) for model in (models or {}).values()}
    world.allow_files(4 * len(nodes) + 256)
    jobs = {}
    for name, node in nodes.items():
        probe = Probe(world, node, deadline)
        jobs[name] = lambda probe=probe: probe.run(wanted)

    states = dict(run_together(world, jobs, until=deadline + PROBE_GRACE_SECONDS))
    late = f"no answer within {seconds:g} s"
    return {name: states.get(name)
            or NodeState(name, node.endpoint, "timeout", late, provider=node.provider)
            for name, node in nodes.items()}


def sign(world: World, node: Node, ask: Ask) -> Ask:
    """Return an Ask with the key that its node wants; only keys that may go there are sent."""
    variable = node.api_key_env
    if not variable:
        return ask

    key = world.node_keys.get((node.endpoint, variable))
    if key is None and world.environ.get(variable):
        raise NodeFailure("not trusted", f"its key, {variable}, may not go there yet")
    if not key:
        raise NodeFailure("no key", f"it wants a key, and {variable} is not set")
    if not re.fullmatch("[!-~]{1,4096}", key):
        raise NodeFailure("no key", f"{variable} holds what is no key")
    return replace(ask, headers={**ask.headers, **backend_of(node).key_headers(key)})


def ask_node(world: World, node: Node, ask: Ask, *, deadline: float) -> Any:
    """Return what an Ask makes of a node's answer."""
    return world.ask(node.endpoint, sign(world, node, ask), deadline=deadline)


def recognise_node(world: World, node: Node, until: float) -> Node:
    """Return a node with the provider that answers at its endpoint; unchanged where none does.

    Who only says that it wants a key is known by what else it says, else it is left as it was.
    """
    kinds = {name: replace(node, provider=name) for name in BACKENDS}
    jobs = {name: lambda kind=kind: ask_node(world, kind, backend_of(kind).identify(),
                                             deadline=until)
            for name, kind in kinds.items()}
    answers = dict(run_together(world, jobs, until=until + PROBE_GRACE_SECONDS))
    for name, kind in kinds.items():
        if name in answers and not isinstance(answers[name], NodeFailure):
            return kind

    refused = {name for name, answer in answers.items()
               if isinstance(answer, NodeFailure) and answer.reason in ("http 401", "http 403")}
    for name in ("llamacpp", "openai"):  # the one by its `Server:`, the other by being the rest
        if name in refused:
            return kinds[name]
    return node


def probe_unknown(world: World, nodes: Mapping[str, Node], seconds: float) -> dict[str, NodeState]:
    """Return the states of nodes of which nobody has said what they run."""
    states = probe_nodes(world, nodes, seconds)
    # Who is not there is asked once; what answers, but not as Ollama does, once more.
    until = world.clock() + seconds
    jobs = {name: lambda node=nodes[name]: recognise_node(world, node, until)
            for name, state in states.items()
            if state.reason.startswith(("not ", "http ", "bad answer"))}
    known = dict(run_together(world, jobs, until=until + PROBE_GRACE_SECONDS))
    found = {name: node for name, node in known.items()
             if isinstance(node, Node) and node.provider != "ollama"}
    return {**states, **probe_nodes(world, found, seconds)} if found else states


class Probe:
    """Asks one node who it is, what it has, then all the rest at once."""

    def __init__(self, world: World, node: Node, deadline: float) -> None:
        self._world, self._node, self._deadline = world, node, deadline
        self._backend = backend_of(node)

    def run(self, wanted: set[str]) -> NodeState:
        """Return what the node answered, with what its `wanted` models (none: all) can do."""
        node, backend = self._node, self._backend
        began = self._world.clock()
        try:
            version = self._ask(backend.identify())
            latency = round((self._world.clock() - began) * 1000, 1)
            models = self._ask(backend.list_models())
        except NodeFailure as failure:
            failure = explain_failure(failure, backend)
            return NodeState(node.name, node.endpoint, failure.reason, failure.detail,
                             provider=node.provider)

        names = [model.name for model in models
                 if not wanted or full_model_name(model.name) in wanted]
        details = self._ask_details(names[:SHOW_LIMIT])
        described = tuple(replace(model, **details.get(model.name, {})) for model in models)
        return NodeState(node.name, node.endpoint, version=version, latency_ms=latency,
                         models=described, loaded=details.get("", ()), provider=node.provider)

    def _ask(self, ask: Ask) -> Any:
        return ask_node(self._world, self._node, ask, deadline=self._deadline)

    def _ask_details(self, names: Iterable[str]) -> dict[str, Any]:
        """Return {model: what describes it, "": what is loaded}, without what was not told."""
        asks = {"": self._backend.list_loaded()}
        asks.update((name, self._backend.describe(name)) for name in names)
        jobs = {key: lambda ask=ask: self._ask(ask) for key, ask in asks.items()}
        answers = run_together(self._world, jobs, threads=8,
                               until=self._deadline + PROBE_GRACE_SECONDS)
        return {key: answer for key, answer in answers if not isinstance(answer, NodeFailure)}


def explain_failure(failure: NodeFailure, backend: Backend) -> NodeFailure:
    """Return a failure of the connection in the words of who should have answered."""
    if failure.reason == "not http":
        return NodeFailure(f"not {backend.name}", failure.detail)
    if failure.reason == "refused":
        return NodeFailure("refused", f"{failure.detail}; is {backend.title} running?")
    return failure


# -- machines that nobody named --

SCAN_SECONDS = 3.0  # for all of a scan
KNOCK_SECONDS = 1.2  # of these for connections
PEERS_SECONDS = 0.8  # of these for `tailscale`
TAILSCALE_PROGRAMS = ("tailscale", "/Applications/Tailscale.app/Contents/MacOS/Tailscale")
UNASKED_BACKENDS = ("anthropic",)  # nobody serves it at home


def scan_machines(world: World, networks: Sequence[str], taken: Iterable[str],
                  watch: Callable[[str], None] = lambda text: None) -> Scan:
    """Ask every address of these networks, and Tailscale's peers, on the usual ports."""
    deadline = world.clock() + SCAN_SECONDS
    notes = []
    if not networks:
        notes.append("This machine is in no private network; name one: "
                     f"`--scan {NET_EXAMPLE}`.")
    peers = find_peers(world, world.clock() + PEERS_SECONDS)
    if isinstance(peers, str):
        notes.append(peers)
        peers = []

    places = plan_places(networks, peers)
    outcomes: dict[tuple[str, int], str] = {}
    for place, outcome in world.knock(places, KNOCK_SECONDS):
        outcomes[place] = outcome
        if len(outcomes) % 64 == 0:
            watch(f"{len(outcomes):,} of {len(places):,} places asked")
    counts = _count_addresses(outcomes)
    if networks and counts["unreachable"] == sum(counts.values()):
        notes.append(f"No way leads to {', '.join(networks)}.")

    doors = [place for place in places if outcomes.get(place) == "open"]
    watch(f"{count_of(doors, 'open port')} found, asking who is there")
    found, others = _identify_doors(world, doors, peers, set(taken), deadline)
    return Scan(tuple(networks), tuple(peers), counts, found, others, tuple(notes))


def find_peers(world: World, until: float) -> list[Peer] | str:
    """Return the machines that Tailscale knows, or why there are none to know."""
    program = next(filter(world.which, TAILSCALE_PROGRAMS), None)
    if not program:
        return "No `tailscale` here: its machines were not asked for."
    text = world.read_program([program, "status", "--json"], until)
    peers = parse_peers(text or "")
    if peers is None:
        return "Tailscale does not run here: its machines were not asked for."
    return peers


def _count_addresses(outcomes: Mapping[tuple[str, int], str]) -> dict[str, int]:
    """Return how many addresses took a connection, refused all, were silent, led nowhere."""
    order = ("open", "refused", "silent", "unreachable")
    best: dict[str, int] = {}
    for (address, _), outcome in outcomes.items():
        best[address] = min(best.get(address, len(order)), order.index(outcome))
    return {word: sum(rank == index for rank in best.values())
            for index, word in enumerate(order)}


def _identify_doors(world: World, doors: Sequence[tuple[str, int]], peers: Sequence[Peer],
                    taken: set[str], deadline: float
                    ) -> tuple[tuple[Found, ...], tuple[tuple[str, str], ...]]:
    """Ask who listens; return the machines of ours, and what answers and is something else."""
    jobs = {door: lambda door=door: _identify_door(world, door, deadline) for door in doors}
    answers = dict(run_together(world, jobs, until=deadline + PROBE_GRACE_SECONDS))
    lan = {address for address, _ in doors if address_kind(address) != "Tailscale"}
    twice = {peer.address for peer in peers if lan & set(peer.others)}  # seen on the LAN already

    found, others = [], []
    for address, port in doors:
        one = answers.get((address, port))
        if not isinstance(one, Found):
            others.append((f"{address}:{port}", "it says nothing"))
        elif not one.state.online:
            others.append((f"{address}:{port}", _why_other(port, one.state)))
        elif address not in twice:
            name = name_place(address, port, peers, taken)
            taken.add(name)
            found.append(replace(one, node=replace(one.node, name=name),
                                 state=replace(one.state, name=name)))
    return tuple(found), tuple(others)


def _why_other(port: int, state: NodeState) -> str:
    """Return why something that answers is no node."""
    if state.reason == "timeout":
        return "it says nothing"
    if port == OLLAMA_PORT:
        return "it is not Ollama"
    return "it is something else"


def _identify_door(world: World, door: tuple[str, int], deadline: float) -> Found:
    """Ask as each kind of node is asked; return the first that answers so, else the last."""
    address, port = door
    endpoint = f"http://{address}:{port}"
    found = Found(Node(address, endpoint), NodeState(address, endpoint, "timeout"), "")
    for backend in BACKENDS.values():
        if backend.name in UNASKED_BACKENDS:
            continue
        node = Node(address, endpoint, provider=backend.name)
        state = Probe(world, node, deadline).run(set())
        found = Found(node, state, f"{backend.title} {state.version}".strip())
        if state.online or state.reason in ("timeout", "unreachable"):
            break
    return found


# -- machines that sleep --

SLEEP_TEST_SECONDS = 2.0  # who does not answer by then may sleep
WAKE_PAUSE_SECONDS = 0.5
WAKE_AGAIN_SECONDS = 5.0  # a packet may be lost


@dataclass(frozen=True)
class Waking:
    """How a machine was woken."""

    node: str
    state: str  # awake: it was; stopped: nothing listens there; woken, or silent
    seconds: float = 0.0


def answers(world: World, node: Node, seconds: float) -> NodeFailure | None:
    """Return why a node does not answer; None where it does, were it with an error."""
    try:
        ask_node(world, node, backend_of(node).identify(), deadline=world.clock() + seconds)
    except NodeFailure as failure:
        if failure.reason in ("timeout", "unreachable", "dns", "refused"):
            return failure
    return None


def wake_nodes(world: World, nodes: Iterable[Node], seconds: float, via: Sequence[tuple[str, int]]
               ) -> Iterator[Waking | None]:
    """Wake those of these nodes that sleep, all at once; yield each as it ends, None meanwhile."""
    jobs = {node.name: lambda node=node: _wake(world, node, seconds, via) for node in nodes}
    for _, waking in run_together(world, jobs):
        if isinstance(waking, NodeFailure):
            raise waking
        yield waking


def _wake(world: World, node: Node, seconds: float, via: Sequence[tuple[str, int]]) -> Waking:
    """Send the packet until a node answers, or the time is over."""
    failure = answers(world, node, SLEEP_TEST_SECONDS)
    if failure is None:
        return Waking(node.name, "awake")
    if failure.reason == "refused":  # a machine that sleeps refuses nobody
        return Waking(node.name, "stopped")

    packet = plan_magic_packet(node.mac or "")
    began = world.clock()
    sent = began - WAKE_AGAIN_SECONDS
    while world.clock() < began + seconds:
        if world.clock() >= sent + WAKE_AGAIN_SECONDS:
            sent = world.clock()
            _send_everywhere(world, packet, via)
        left = began + seconds - world.clock()
        if answers(world, node, max(min(SLEEP_TEST_SECONDS, left), 0.1)) is None:
            return Waking(node.name, "woken", world.clock() - began)
        world.sleep(min(WAKE_PAUSE_SECONDS, max(left, 0)))
    return Waking(node.name, "silent", world.clock() - began)


def _send_everywhere(world: World, packet: bytes, via: Sequence[tuple[str, int]]) -> None:
    """Send a packet to each of these; it is enough that one network takes it."""
    failures = []
    for host, port in via:
        try:
            world.send_datagram(host, port, packet)
        except NodeFailure as failure:
            failures.append(failure)
    if len(failures) == len(via):
        raise failures.pop()


# -- warm-up --

# A load says nothing until it ends, so a long one is looked at: what does its machine hold now?
LOAD_LOOK_SECONDS = 2.0
BUSY_SECONDS = 6.0  # another model leaves, or the new one is listed, within this
HUNG_SECONDS = 15.0  # a machine that answers nothing for so long is left


class Warmth:
    """One `model` on one `node`: what is done with it now, and how that ended."""

    def __init__(self, node: Node, model: Model) -> None:
        self.node, self.model = node, model
        self.stage = "waiting"  # asking, loading, busy, not answering, unloading, pulling, done
        self.began = self.seconds = 0.0
        self.pulled = self.size = 0  # bytes of a download
        self.ok, self.reason, self.detail, self.fix = True, "", "", ""
        self.loaded: LoadedModel | None = None
        self.rivals: tuple[str, ...] = ()  # what its machine holds instead, while it is busy

    @property
    def state(self) -> str:
        """What became of it: ok, not answering, busy or failed; its stage while it is not over."""
        if self.stage != "done" or self.ok:
            return "ok" if self.stage == "done" else self.stage
        if self.reason in ("timeout", "unreachable"):
            return "not answering"
        return "busy" if self.reason == "busy" else "failed"

    @property
    def wait(self) -> str:
        """For whom it waits on a busy machine."""
        return f"{some_of(self.rivals, 3)} is in use there, it seems"

    def fail(self, failure: NodeFailure) -> None:
        """Note what went wrong and what mends it."""
        self.ok = False
        self.reason = failure.reason
        self.detail = failure.detail or failure.reason
        self.fix = failure.fix or mend_reason(failure.reason, self.node.provider)


@dataclass(frozen=True)
class WarmUp:
    """How models are warmed: for how long each may take, and what is done instead."""

    seconds: float | None = None  # None: the model's own timeout
    busy_seconds: float = float("inf")  # how long others may keep a machine from loading
    pull: bool = False
    unload: bool = False


def warm_nodes(world: World, groups: Mapping[str, Sequence[Warmth]],
               how: WarmUp) -> Iterator[tuple[Any, Any]]:
    """Run the Warmths of each node, nodes in parallel; yield as `run_together` does."""
    def warm(warmths: Sequence[Warmth]) -> None:
        # Whoever does not answer this has taken five seconds, not the minutes of a load.
        _time_step(_ask_first, warmths[0], world, how)
        for warmth in warmths[1:]:
            warmth.ok, warmth.reason = warmths[0].ok, warmths[0].reason
            warmth.detail, warmth.fix = warmths[0].detail, warmths[0].fix

        for warmth in warmths:
            for step in (_load, _see_loaded):
                if warmth.ok:
                    _time_step(step, warmth, world, how)
            warmth.stage = "done"
        # What is in memory together shows only when all are loaded.
        for warmth in warmths[:-1]:
            if warmth.ok:
                _time_step(_see_loaded, warmth, world, how)

    jobs = {name: lambda warmths=warmths: warm(warmths) for name, warmths in groups.items()}
    return run_together(world, jobs)


def _time_step(step: Callable[[Warmth, World, WarmUp], None], warmth: Warmth, world: World,
               how: WarmUp) -> None:
    warmth.began = world.clock()
    try:
        step(warmth, world, how)
    except NodeFailure as failure:
        warmth.fail(explain_failure(failure, backend_of(warmth.node)))
    warmth.seconds += world.clock() - warmth.began


def _ask_first(warmth: Warmth, world: World, how: WarmUp) -> None:
    """Ask a machine whether it is there, before anything is asked of it that takes long."""
    warmth.stage = "asking"
    seconds = min(PROBE_TIMEOUT_SECONDS, how.seconds or PROBE_TIMEOUT_SECONDS)
    until = world.clock() + seconds
    try:
        ask_node(world, warmth.node, backend_of(warmth.node).identify(), deadline=until)
    except NodeFailure as failure:
        if failure.reason != "timeout":
            raise
        raise NodeFailure("timeout", f"no answer within {seconds:g} s") from None


def _load(warmth: Warmth, world: World, how: WarmUp) -> None:
    """Load or unload a model; one that its node lacks is downloaded first, where that is wished."""
    if warmth.model.cloud:
        warmth.detail = "runs at ollama.com, nothing to load"
        return

    try:
        _ask_to_load(warmth, world, how)
    except NodeFailure as failure:
        if failure.reason != "http 404":
            raise
        if how.unload:
            warmth.detail = "not there"
            return
        if not how.pull:
            fix = _pull_fix(warmth, world)
            raise NodeFailure(failure.reason, failure.detail, fix=fix) from None
        _pull(warmth, world)
        _ask_to_load(warmth, world, how)


def _pull_fix(warmth: Warmth, world: World) -> str:
    """Return what mends that a model is not there: a name that is, else a download."""
    node = warmth.node
    pull = f"{obtain_model(node.provider, warmth.model.ollama_model)} on {node.name}"
    if NODE_KINDS[node.provider].can_pull:
        pull += ", or `subagent-fleet warmup --pull`"
    until = world.clock() + PROBE_TIMEOUT_SECONDS
    try:
        models = ask_node(world, node, backend_of(node).list_models(), deadline=until)
    except NodeFailure:
        return pull
    state = NodeState(node.name, node.endpoint, models=tuple(models), provider=node.provider)
    correction = plan_correction(warmth.model, state)
    if find_models(models, warmth.model.ollama_model):  # listed, and yet not found
        return pull
    return f"{correction}, which {node.name} has; or {pull}" if correction else pull


def _ask_to_load(warmth: Warmth, world: World, how: WarmUp) -> None:
    """Load by an empty chat; where that is refused, with three words."""
    seconds = how.seconds or warmth.model.timeout
    backend = backend_of(warmth.node)
    warmth.stage = "unloading" if how.unload else "loading"

    try:
        if backend.loads_twice and not _makes_room(warmth, world, how):
            return
        try:
            _send_load(warmth, world, how, "")
        except NodeFailure as failure:
            if failure.reason != "http 400":
                raise
            _send_load(warmth, world, how, "Reply with ok.")
        if not how.unload:
            _await_load(warmth, world, seconds)
    except NodeFailure as failure:
        if failure.reason != "timeout" or warmth.stage == "not answering":
            raise
        if warmth.stage == "busy":
            raise NodeFailure("busy", warmth.wait, fix=BUSY_FIX) from None
        verb = "unloaded" if how.unload else "loaded"
        fix = f"look at {backend.title}'s log there, or give it longer: --timeout 900"
        raise NodeFailure("slow", f"not {verb} within {seconds:g} s", fix=fix) from None


def _makes_room(warmth: Warmth, world: World, how: WarmUp) -> bool:
    """Tell whether there is something to ask for; unload a model whose context does not fit."""
    model, backend = warmth.model, backend_of(warmth.node)
    until = world.clock() + PROBE_TIMEOUT_SECONDS
    loaded = find_models(ask_node(world, warmth.node, backend.list_loaded(), deadline=until),
                         model.ollama_model)
    if how.unload:
        return bool(loaded)
    for instance in loaded:
        if fits_context(warmth.node.provider, instance.context, model.context):
            return False
    if loaded:
        _send_load(warmth, world, replace(how, unload=True), "")
    return True


def _send_load(warmth: Warmth, world: World, how: WarmUp, words: str) -> None:
    """Ask to load a model, and watch what its machine does meanwhile."""
    request = backend_of(warmth.node).load(warmth.model, unload=how.unload, words=words)
    until = world.clock() + (how.seconds or warmth.model.timeout)
    jobs = {"load": lambda: ask_node(world, warmth.node, request, deadline=until)}
    watch = LoadWatch(warmth, world, how)
    for key, outcome in run_together(world, jobs):
        if isinstance(outcome, NodeFailure):
            raise outcome
        if key is None:
            # When this gives up, the request goes on: the model is loaded when its turn comes.
            watch.look()
        elif outcome:
            warmth.detail = outcome


def _await_load(warmth: Warmth, world: World, seconds: float) -> None:
    """Wait for a load that goes on after its answer."""
    ask = backend_of(warmth.node).check_loading(warmth.model)
    until = world.clock() + seconds
    while ask:
        now = world.clock()
        if ask_node(world, warmth.node, ask, deadline=now + PROBE_TIMEOUT_SECONDS):
            return
        if now >= until:
            raise NodeFailure("timeout", "")
        world.sleep(TICK_SECONDS)


BUSY_FIX = "wait until that ends, or give the model a machine of its own"


class LoadWatch:
    """Tells loading from waiting for others and from a machine that hangs, by what it holds."""

    def __init__(self, warmth: Warmth, world: World, how: WarmUp) -> None:
        self._warmth, self._world, self._how = warmth, world, how
        self._stage = warmth.stage  # loading or unloading
        self._backend = backend_of(warmth.node)
        self._began = self._answered = world.clock()
        self._look_at = self._began + LOAD_LOOK_SECONDS

    def look(self) -> None:
        """Look from time to time; raise when there is nothing left to wait for."""
        began = self._world.clock()
        if began < self._look_at:
            return
        try:
            loaded = ask_node(self._world, self._warmth.node, self._backend.list_loaded(),
                              deadline=began + PROBE_TIMEOUT_SECONDS)
        except NodeFailure as failure:
            if failure.reason in ("timeout", "unreachable"):
                self._note_silence()
        else:
            self._answered = self._world.clock()
            self._note_loaded(loaded)
        self._look_at = self._world.clock() + LOAD_LOOK_SECONDS

    def _note_silence(self) -> None:
        self._warmth.stage = "not answering"
        seconds = self._world.clock() - self._answered
        if seconds >= HUNG_SECONDS:
            what = f"it took the request, and answers nothing since {seconds:.0f} s"
            raise NodeFailure("timeout", what)

    def _note_loaded(self, loaded: Sequence[LoadedModel]) -> None:
        """Ollama says nothing of its queue: who waits there holds nothing, and others do."""
        model = self._warmth.model
        mine = find_models(loaded, model.ollama_model)
        is_mine = any(match.context in (0, model.context) for match in mine)
        waited = self._world.clock() - self._began
        if is_mine or not loaded or waited < BUSY_SECONDS or self._how.unload:
            self._warmth.stage = self._stage
            return

        self._warmth.rivals = tuple(other.name for other in loaded)
        self._warmth.stage = "busy"
        if waited >= self._how.busy_seconds:
            raise NodeFailure("busy", self._warmth.wait, fix=BUSY_FIX)


def _pull(warmth: Warmth, world: World) -> None:
    """Have the node download the model."""
    warmth.stage = "pulling"
    ask = sign(world, warmth.node, backend_of(warmth.node).pull(warmth.model))
    layers: dict[str, PullStep] = {}
    step = PullStep()
    try:
        for step in world.ask_lines(warmth.node.endpoint, ask, stall_seconds=PULL_STALL_SECONDS):
            if step.total:
                layers[step.layer] = step
                warmth.pulled = sum(layer.completed for layer in layers.values())
                warmth.size = sum(layer.total for layer in layers.values())
    except NodeFailure as failure:
        if failure.reason != "timeout":
            raise
        what = f"the download stood still for {PULL_STALL_SECONDS:g} s"
        raise NodeFailure("slow", what, fix="look at its network, and pull again") from None
    if not step.is_done:
        raise NodeFailure("bad answer", "the download ended without `success`")


def _see_loaded(warmth: Warmth, world: World, how: WarmUp) -> None:
    """Hold what the node says is loaded against what was wanted."""
    model = warmth.model
    if model.cloud or how.unload or model.keep_alive == 0:
        return

    backend = backend_of(warmth.node)
    ask = backend.list_loaded()
    loaded = ask_node(world, warmth.node, ask, deadline=world.clock() + PROBE_TIMEOUT_SECONDS)
    matches = find_models(loaded, model.ollama_model)
    if not matches:
        shown = some_of([other.name for other in loaded], 5) or "an empty list"
        raise NodeFailure("not loaded", f"{backend.title} loaded it, but "
                          f"{ask.path} shows only {shown}",
                          fix="move it to another node, or write a smaller `context:`")

    warmth.loaded = min(matches, key=lambda match: match.context != model.context)
    context = warmth.loaded.context
    if not fits_context(warmth.node.provider, context, model.context):
        raise NodeFailure("context", f"loaded with context {context}, not {model.context}",
                          fix=f"write `context: {context}` in models.{model.name}")


# == 15. Trials ===============================================================
#
# Takes a model on its node, asks it what it can do, and judges each answer by a value that can be
# checked. A trial is a row: what is asked, and pure judges. Each goes the way of a request: Talk,
# Backend, Reader, Deltas. Speeds are the node's own counters, where it has some.

SPEED_TOKENS = 1000  # of the prompt by which models are compared
FILLER_LINES_LIMIT = 400_000  # 25 MB, whatever a node counts
COUNT_TOLERANCE = 0.02  # between what a node counts and what its earlier counts let expect
QUICK_SECONDS = 15.0  # a long prompt may take, with --quick
ANSWER_TOKENS = 512
THINKING_TOKENS = 2048  # for who thinks before it answers


@dataclass(frozen=True)
class Question:
    """What a trial asks of a model, and what is expected of a prompt that is to be counted."""

    talk: Talk
    lines: int = 0  # of filler in it
    tokens: int = 0  # it should have by the node's earlier counts
    context: int = 0  # of the route
    loaded: int = 0  # the context the node says it holds; 0: it does not say
    word: str = ""  # that stands at the very beginning


@dataclass(frozen=True)
class Answer:
    """What a model answered to a question, and when; or why it did not."""

    question: Question
    text: str = ""
    thoughts: str = ""
    calls: tuple[Call, ...] = ()
    end: End = End("")
    first_seconds: float = 0.0  # to its first word, by our clock
    seconds: float = 0.0
    refusal: Refusal | None = None
    failure: str = ""  # of the node, which lives on

    @property
    def missing(self) -> str:
        """Why there is none, or an empty string."""
        if self.refusal:
            words = re.sub(r"^node \S+, model \S+: ", "", self.refusal.what)
            return f"refused: {words}"
        return self.failure


@dataclass(frozen=True)
class Subject:
    """A model under trial, and what is known of it by now."""

    model: Model
    seed: str = ""  # makes prompts new to the node, whatever it has cached
    claims: tuple[str, ...] = ()  # its capabilities, as its node has them
    is_quick: bool = False
    loaded: int = 0
    prompt_rate: float | None = None
    fills: tuple[tuple[int, int], ...] = ()  # (lines of filler, tokens the node counted)

    @property
    def room(self) -> int:
        """The tokens that a prompt which fills the context leaves to the answer."""
        thoughts = THINKING_TOKENS if self.model.thinking else 0
        return min(64 + thoughts, self.model.context // 4) + self.model.context // 50

    def count_lines(self, tokens: int) -> int:
        """Return how many lines of filler make a prompt of so many tokens, in whole rounds."""
        base, each = self._count()
        rounds = int((tokens - base) / each) // len(FILLER)
        return min(max(rounds, 1) * len(FILLER), FILLER_LINES_LIMIT)

    def count_tokens(self, lines: int) -> int:
        """Return the tokens of a prompt with so many lines, as the node's counts let expect."""
        base, each = self._count()
        return round(base + each * lines)

    def _count(self) -> tuple[float, float]:
        """Return the tokens of a prompt without filler, and those of one line."""
        if not self.fills:
            return FILLER_BASE_TOKENS, FILLER_LINE_TOKENS

        lines, tokens = self.fills[-1]
        first_lines, first_tokens = self.fills[0]
        if lines == first_lines:
            return FILLER_BASE_TOKENS, max((tokens - FILLER_BASE_TOKENS) / lines, 4.0)
        each = max((tokens - first_tokens) / (lines - first_lines), 4.0)
        return tokens - each * lines, each


@dataclass(frozen=True)
class Trial:
    """A row: what is asked of a model, what is measured at the answer, who judges it."""

    topic: str  # speed, tools, context, thinking, images, or a role
    name: str
    ask: Callable[[Subject], Question | None]  # None: this model is not asked
    judges: tuple[Callable[[Answer], str], ...] = ()  # "": right, else what it is instead
    measure: Callable[[Answer], dict[str, Any]] | None = None  # fields of a Measurement
    thinks: bool = False  # the model is asked to
    program: Callable[[Answer], dict[str, str]] | None = None  # files to run, where judges agree

    @property
    def title(self) -> str:
        return f"{self.topic}: {self.name}"


def _say(subject: Subject, text: str, **more: Any) -> Question:
    """Return a question in one turn."""
    return _ask_talk(subject, (Turn("user", texts=(text,)),), **more)


def _ask_talk(subject: Subject, turns: tuple[Turn, ...], **more: Any) -> Question:
    """Return a question of these turns; the same has the same answer, as far as models go."""
    thoughts = THINKING_TOKENS if subject.model.thinking else 0
    tokens = more.pop("tokens", ANSWER_TOKENS)
    talk = Talk(subject.model.alias, turns, max_tokens=tokens + thoughts,
                sampling={"temperature": 0.0}, is_stream=True, **more)
    return Question(talk, context=subject.model.context, loaded=subject.loaded)


# -- speed --

FILLER_BASE_TOKENS = 60.0  # of a prompt without filler, until the node has counted some
FILLER_LINE_TOKENS = 20.0


def _fill(subject: Subject, lines: int, number: int, *, extra: int = 0,
          wish: str = "Answer with that word alone.") -> Question:
    """Return a question about a word at the very beginning, so many lines before.

    The word stands in a turn of its own: who cuts a talk drops its first turns.
    """
    word = CODE_WORDS[number % len(CODE_WORDS)]
    text = "\n".join(FILLER * (lines // len(FILLER))) + " x" * extra
    question = _ask_talk(subject, (
        Turn("user", texts=(f"Run {subject.seed}-{number}. The code word is {word}.",)),
        Turn("assistant", texts=("Noted.",)),
        Turn("user", texts=(f"{text}\n\nWhat is the code word? {wish}",))), tokens=48)
    return replace(question, lines=lines, word=word, tokens=subject.count_tokens(lines) + extra)


def _ask_load(subject: Subject) -> Question:
    return _fill(subject, len(FILLER), 0)


def _ask_prompt(subject: Subject) -> Question:
    tokens = min(SPEED_TOKENS, subject.model.context // 2)
    return _fill(subject, subject.count_lines(tokens), 1)


def _ask_again(subject: Subject) -> Question:
    """Ask about the prompt of the question before, which the node has cached."""
    tokens = min(SPEED_TOKENS, subject.model.context // 2)
    return _fill(subject, subject.count_lines(tokens), 1, wish="Say it once more.")


def _ask_long_prompt(subject: Subject) -> Question | None:
    half = subject.model.context // 2
    if subject.is_quick or half < 2 * SPEED_TOKENS:
        return None
    return _fill(subject, subject.count_lines(half), 2)


def _ask_much(subject: Subject) -> Question:
    text = "Write the numbers from 1 to 200, one a line, and nothing else."
    return _say(subject, text, tokens=128)


def _measure_load(answer: Answer) -> dict[str, Any]:
    seconds = answer.end.load_seconds
    return {} if seconds is None else {"load_seconds": round(seconds, 2)}


def _measure_prompt(answer: Answer) -> dict[str, Any]:
    return {"prompt_rate": _prompt_rate(answer),
            "is_counted": answer.end.prompt_seconds is not None}


def _measure_long_prompt(answer: Answer) -> dict[str, Any]:
    return {"long_prompt_rate": _prompt_rate(answer)}


def _prompt_rate(answer: Answer) -> float | None:
    """Return the tokens a second at which a new prompt was read."""
    seconds = answer.end.prompt_seconds or answer.first_seconds
    tokens = answer.end.input_tokens
    return round(tokens / seconds, 1) if tokens and seconds else None


def _measure_answer(answer: Answer) -> dict[str, Any]:
    """Return the tokens a second at which an answer was written."""
    tokens, seconds = answer.end.output_tokens, answer.end.answer_seconds
    if seconds is None:  # by our clock, which starts at the first of them
        tokens, seconds = tokens - 1, answer.seconds - answer.first_seconds
    return {"answer_rate": round(tokens / seconds, 1) if tokens > 0 and seconds > 0 else None}


def _measure_first_token(answer: Answer) -> dict[str, Any]:
    """Return how long a warm model takes to its first word."""
    end = answer.end
    seconds = answer.first_seconds
    if end.answer_seconds is not None:  # the node counts: what it does not tell took no time
        seconds = (end.load_seconds or 0) + (end.prompt_seconds or 0)
    return {"first_token_seconds": round(seconds, 3)}


SPEED_TRIALS = (
    Trial("speed", "load", _ask_load, measure=_measure_load),
    Trial("speed", "prompt", _ask_prompt, measure=_measure_prompt),
    Trial("speed", "first token", _ask_again, measure=_measure_first_token),
    Trial("speed", "answer", _ask_much, measure=_measure_answer),
    Trial("speed", "long prompt", _ask_long_prompt, measure=_measure_long_prompt))


# -- tools --

def _tool(name: str, description: str, **properties: Any) -> Tool:
    return Tool(name, description, {"type": "object", "properties": properties,
                                    "required": list(properties)})


TEXT = {"type": "string"}
TEXTS = {"type": "array", "items": TEXT}
TRIAL_TOOLS = (
    _tool("set-log-level", "Set how much a service logs.", service=TEXT,
          level={"type": "string", "enum": ["debug", "info", "warning", "error"]}),
    _tool("open_ticket", "Open a ticket in the tracker.", title=TEXT,
          owner={"type": "object", "properties": {"name": TEXT, "team": TEXT},
                 "required": ["name", "team"]}),
    _tool("run_tests", "Run tests.", paths=TEXTS, stop_early={"type": "boolean"}),
    _tool("get_setting", "Look up a setting by its key.", key=TEXT),
    _tool("send_mail", "Send a mail.", receivers=TEXTS, text=TEXT))
PRINTED_CALL = "printed the call as text"
_PRINTED_CALL = _Pattern(
    r"<tool_call>|<function=|\[TOOL_CALLS\]|\"(?:name|function|tool)\"\s*:\s*\"(?:{0})\""
    r"|\b(?:{0})\s*\(".format("|".join(re.escape(tool.name) for tool in TRIAL_TOOLS)))


def _offer(text: str) -> Callable[[Subject], Question]:
    """Return what asks something of a model that has the five tools."""
    return lambda subject: _say(subject, text, tools=TRIAL_TOOLS)


def _offer_result(subject: Subject) -> Question:
    call = Call("call_1", "get_setting", {"key": "retry_limit"})
    return _ask_talk(subject, (
        Turn("user", texts=("What is the value of the setting retry_limit?",)),
        Turn("assistant", calls=(call,)),
        Turn("user", results=(Result("call_1", "retry_limit = 7391"),))), tools=TRIAL_TOOLS)


def calls_rightly(*wanted: tuple[str, dict[str, Any]]) -> Callable[[Answer], str]:
    """Return the judge of an answer that shall be these calls, in any order."""
    def judge(answer: Answer) -> str:
        if answer.missing:
            return answer.missing
        if not answer.calls:
            return PRINTED_CALL if _PRINTED_CALL.search(answer.text) else "called no tool"
        if len(answer.calls) != len(wanted):
            return f"made {count_of(answer.calls, 'call')}, not {len(wanted)}"

        left = list(wanted)
        for call in answer.calls:
            matches = [want for want in left if _flaw_of(call, want) == ""]
            if not matches:
                return _flaw_of(call, next((want for want in left if want[0] == call.name),
                                           left[0]))
            left.remove(matches[0])
        return ""
    return judge


def _flaw_of(call: Call, wanted: tuple[str, dict[str, Any]]) -> str:
    """Return what is wrong with a call."""
    name, arguments = wanted
    if call.name != name:
        return f"called `{call.name[:64]}` instead of `{name}`"
    for key, value in arguments.items():
        if not _is_same(call.arguments.get(key), value):
            return f"called `{name}` with a wrong `{key}`"
    extra = [key for key, value in call.arguments.items() if key not in arguments and value]
    return f"called `{name}` with an unknown `{extra[0][:64]}`" if extra else ""


def _is_same(value: object, wanted: object) -> bool:
    """Tell whether an argument is what was asked for; case and blanks around it are no matter."""
    if isinstance(wanted, str):
        return isinstance(value, str) and value.strip().lower() == wanted.lower()
    if isinstance(wanted, list):
        return isinstance(value, list) and len(value) == len(wanted) \
            and all(map(_is_same, value, wanted))
    if isinstance(wanted, dict):
        return isinstance(value, dict) and value.keys() == wanted.keys() \
            and all(_is_same(value[key], wanted[key]) for key in wanted)
    return type(value) is type(wanted) and value == wanted


def says_without_calls(word: str) -> Callable[[Answer], str]:
    """Return the judge of an answer that shall be text with a word in it, and no call."""
    def judge(answer: Answer) -> str:
        if answer.missing:
            return answer.missing
        if answer.calls:
            return f"called `{answer.calls[0].name[:64]}` where no tool was needed"
        if _PRINTED_CALL.search(answer.text):
            return PRINTED_CALL
        return "" if word in answer.text.replace(",", "") else f"did not answer {word}"
    return judge


TOOL_TRIALS = (
    Trial("tools", "an enum, a name with a dash",
          _offer("Set the log level of the service billing to debug."),
          (calls_rightly(("set-log-level", {"service": "billing", "level": "debug"})),)),
    Trial("tools", "a nested object",
          _offer('Open a ticket with the title "Login fails". Its owner is Ada, team web.'),
          (calls_rightly(("open_ticket", {"title": "Login fails",
                                          "owner": {"name": "Ada", "team": "web"}})),)),
    Trial("tools", "an array",
          _offer("Run the tests in tests/api and tests/web, in this order; stop early."),
          (calls_rightly(("run_tests", {"paths": ["tests/api", "tests/web"],
                                        "stop_early": True})),)),
    Trial("tools", "none where none fits",
          _offer("How much is 17 plus 25? Answer with the number alone."),
          (says_without_calls("42"),)),
    Trial("tools", "two calls in one turn",
          _offer("Set the log level of the service billing to error and that of the service "
                 "search to info. Make both calls now, in this turn."),
          (calls_rightly(("set-log-level", {"service": "billing", "level": "error"}),
                         ("set-log-level", {"service": "search", "level": "info"})),)),
    Trial("tools", "an answer after the result", _offer_result, (says_without_calls("7391"),)))


# -- context --

def _ask_full(subject: Subject) -> Question:
    """Ask with the context full; with --quick only as far as can be read in a while."""
    tokens = subject.model.context - subject.room
    if subject.is_quick:
        tokens = min(tokens, max(SPEED_TOKENS, int((subject.prompt_rate or 0) * QUICK_SECONDS)))
    return _fill(subject, subject.count_lines(tokens), 3)


def _ask_too_much(subject: Subject) -> Question:
    """Ask with one token more than the context holds, as far as the node's counts tell."""
    tokens = subject.model.context + 1
    lines = subject.count_lines(tokens)
    missing = max(tokens - subject.count_tokens(lines), 0)
    return _fill(subject, lines, 4, extra=min(missing, FILLER_LINES_LIMIT))


def holds_context(answer: Answer) -> str:
    """Judge whether the whole context is there."""
    refusal, question = answer.refusal, answer.question
    if isinstance(refusal, PromptTooLong) and refusal.maximum < question.context:
        return f"holds {refusal.maximum:,} tokens, not {question.context:,}"
    if 0 < question.loaded < question.context:
        return f"is loaded with {question.loaded:,} tokens, not {question.context:,}"
    return answer.missing


def knows_beginning(answer: Answer) -> str:
    """Judge whether the word at the very beginning is still known."""
    if answer.missing:
        return holds_context(answer)
    if answer.question.word.lower() in answer.text.lower():
        return holds_context(answer)
    return f"lost the beginning of a prompt of {answer.question.tokens:,} tokens"


def counts_rightly(answer: Answer) -> str:
    """Judge whether the node read all that was sent."""
    if answer.missing:
        return holds_context(answer)
    expected, counted = answer.question.tokens, answer.end.input_tokens
    if abs(counted - expected) <= 16 + COUNT_TOLERANCE * expected:
        return ""
    return f"counted {counted:,} tokens of about {expected:,}"


def refuses_too_much(answer: Answer) -> str:
    """Judge whether a prompt that is too long is refused, in words a client acts on."""
    if isinstance(answer.refusal, PromptTooLong):
        return ""
    if answer.missing:
        return f"too long a prompt: {answer.missing}"
    # It may hold more than the fleet file says: what matters is that nothing was lost.
    if knows_beginning(answer) or counts_rightly(answer):
        return "cuts a prompt that is too long instead of refusing it"
    return ""


CONTEXT_TRIALS = (
    Trial("context", "full", _ask_full, (knows_beginning, counts_rightly)),
    Trial("context", "one token more", _ask_too_much, (refuses_too_much,)))


# -- what it claims --

def _ask_thought(subject: Subject) -> Question | None:
    if "thinking" not in subject.claims:
        return None
    text = "A bat and a ball cost 1.10 together; the bat costs 1.00 more. What does the ball cost?"
    return _say(subject, text, tokens=THINKING_TOKENS)


def _ask_image(subject: Subject) -> Question | None:
    if "vision" not in subject.claims:
        return None
    turn = Turn("user", texts=("Which colour is this? One word.",), images=(RED_SQUARE,))
    return _ask_talk(subject, (turn,))


def thinks_and_answers(answer: Answer) -> str:
    """Judge whether there are thoughts, and an answer behind them."""
    if answer.missing:
        return answer.missing
    if not answer.thoughts.strip():
        return "did not think"
    if answer.end.reason == "max_tokens" and not answer.text.strip():
        return f"was still thinking after {answer.end.output_tokens:,} tokens"
    return "" if answer.text.strip() else "thought and did not answer"


def sees_red(answer: Answer) -> str:
    """Judge whether the red square was seen."""
    if answer.missing:
        return answer.missing
    return "" if re.search(r"\bred\b", answer.text.lower()) else "did not see a red square"


CLAIM_TRIALS = (Trial("thinking", "thinks", _ask_thought, (thinks_and_answers,), thinks=True),
                Trial("images", "sees", _ask_image, (sees_red,)))
TRIALS = (*SPEED_TRIALS, *TOOL_TRIALS, *CONTEXT_TRIALS, *CLAIM_TRIALS)


# -- quality: tasks of the four roles --

TASK_SECONDS = 10  # for a program with a model's code in it
SUMMARY_WORDS = 80
LONGEST_SUMMARY_WORDS = 120  # a model counts badly
FILES_HEADING = "Files to change:"
NO_BUGS = "NO BUGS"
CHECK_FILE = "check.py"
CODE_TOOLS = (
    _tool("Edit", "Replace a text in a file; it must occur there exactly once.",
          file_path=TEXT, old_string=TEXT, new_string=TEXT),
    _tool("Write", "Write a whole file.", file_path=TEXT, content=TEXT))


@dataclass(frozen=True)
class Task:
    """A small task of a role, and what its answer must hold; see the assets."""

    role: str
    name: str
    ask: str
    # planner: the files there are, those that must be named, those that may be
    tree: Sequence[str] = ()
    right: Sequence[str] = ()
    fine: Sequence[str] = ()
    # implementer: files to change, and the program that checks them
    files: dict[str, str] = field(default_factory=dict)
    check: str = ""
    # reviewer: the code, and the first and last line of each bug in it
    code: str = ""
    bugs: Sequence[Sequence[int]] = ()
    # summarizer: the text, patterns of what must be said and of what must not
    text: str = ""
    facts: Sequence[str] = ()
    absent: Sequence[str] = ()


def read_tasks() -> list[Task]:
    """Return the tasks of all roles."""
    texts = {"planner": PLAN_TASKS, "implementer": PATCH_TASKS, "reviewer": REVIEW_TASKS,
             "summarizer": SUMMARY_TASKS}
    tasks = []
    for role, text in texts.items():
        trees: Any = parse_yaml(text, f"{role} tasks")
        tasks += [Task(role=role, **tree) for tree in trees]
    return tasks


def plan_quality_trials() -> tuple[Trial, ...]:
    """Return a trial for each task."""
    makers = {"planner": _plan_trial, "implementer": _patch_trial, "reviewer": _review_trial,
              "summarizer": _summary_trial}
    return tuple(makers[task.role](task) for task in read_tasks())


def _task_trial(task: Task, text: str, judge: Callable[[Answer, Task], str], *,
                tools: tuple[Tool, ...] = (), program: Any = None) -> Trial:
    """Return the trial of a task, asked as the agent of its role is."""
    def ask(subject: Subject) -> Question:
        return _say(subject, text, system=(ROLES[task.role].prompt,), tools=tools, tokens=1024)

    def judge_answer(answer: Answer) -> str:
        return answer.missing or judge(answer, task)

    return Trial(task.role, task.name, ask, (judge_answer,), program=program)


def _plan_trial(task: Task) -> Trial:
    text = (f"{task.ask}\nThe files:\n\n" + "\n".join(task.tree)
            + f"\n\nPlan the change. End with a line `{FILES_HEADING}` and below it, one a line, "
              "the files that must be changed or made, and no others.")
    return _task_trial(task, text, names_right_files)


def names_right_files(answer: Answer, task: Task) -> str:
    """Judge which files a plan names behind its heading."""
    _, _, listed = answer.text.rpartition(FILES_HEADING)
    words = {re.sub(r"^\./|\.$", "", word) for word in re.findall(r"[\w./-]+", listed)}
    missing = [path for path in task.right if path not in words]
    if missing:
        return f"did not name {missing[0]}"
    extra = [path for path in task.tree if path in words
             and path not in task.right and path not in task.fine]
    extra += sorted(word for word in words - {*task.tree}
                    if re.fullmatch(r"[\w.-]+(/[\w.-]+)+\.\w+", word))
    return f"named {extra[0]}, which is not to be changed" if extra else ""


def _patch_trial(task: Task) -> Trial:
    shown = "".join(f"\n{name}:\n```python\n{text}```\n" for name, text in task.files.items())
    text = f"{task.ask}\n{shown}\nMake the change now, with Edit or Write, in one turn."
    return _task_trial(task, text, lambda answer, task: apply_edits(answer, task).flaw,
                       tools=CODE_TOOLS, program=lambda answer: apply_edits(answer, task).files)


@dataclass(frozen=True)
class Patched:
    """The files of a task after a model's edits, or why those do not apply."""

    files: dict[str, str]
    flaw: str = ""


def apply_edits(answer: Answer, task: Task) -> Patched:
    """Return the files after all edits of an answer, with the program that checks them."""
    files = dict(task.files)
    if not answer.calls:
        return Patched(files, PRINTED_CALL if _PRINTED_EDIT.search(answer.text)
                       else "edited nothing")
    for call in answer.calls:
        name = read_field(call.arguments, "file_path").replace("\\", "/").rpartition("/")[2]
        if name not in files:
            return Patched(files, f"edited `{name[:64]}`, which is not there")
        if call.name == "Write":
            files[name] = read_field(call.arguments, "content")
            continue

        old, new = (read_field(call.arguments, key) for key in ("old_string", "new_string"))
        count = files[name].count(old) if old else 0
        if count != 1:
            return Patched(files, f"edited a text that occurs {count} times in {name}")
        files[name] = files[name].replace(old, new)
    return Patched({**files, CHECK_FILE: f"{task.check}print('all of it holds')\n"})


_PRINTED_EDIT = _Pattern(r"<tool_call>|<function=|\"(?:old_string|file_path)\"\s*:")


def judge_run(ended: Ended) -> str:
    """Judge how the program that checks an edit ended."""
    if ended.code is None:
        return f"its code still ran after {TASK_SECONDS} s"
    lines = ended.output.strip().splitlines() or ["it says nothing"]
    if ended.code == 0 and lines[-1] == "all of it holds":
        return ""
    return f"its code fails: {lines[-1][:160]}"


def _review_trial(task: Task) -> Trial:
    lines = enumerate(task.code.splitlines(), 1)
    shown = "\n".join(f"{number:3}  {line}" for number, line in lines)
    text = (f"{task.ask}\n\n{shown}\n\nFor each bug answer with a line `BUG LINE: why`, LINE being "
            f"the number of its line. If there is none, answer `{NO_BUGS}`. Style is no bug.")
    return _task_trial(task, text, finds_bugs)


def finds_bugs(answer: Answer, task: Task) -> str:
    """Judge which lines a review calls wrong."""
    named = [int(number) for number in re.findall(r"(?i)\bBUG\W{0,4}(?:LINE\W{0,3})?(\d{1,4})\b",
                                                  answer.text)]
    missed = [bug for bug in task.bugs if not any(bug[0] <= line <= bug[1] for line in named)]
    if missed:
        return f"did not find the bug in line {missed[0][-1]}"
    invented = [line for line in named
                if not any(bug[0] <= line <= bug[1] for bug in task.bugs)]
    if invented:
        return f"invented a bug in line {invented[0]}"
    if not task.bugs and NO_BUGS not in answer.text.upper():
        return f"did not say {NO_BUGS}"
    return ""


def _summary_trial(task: Task) -> Trial:
    text = (f"{task.ask} At most {SUMMARY_WORDS} words, and nothing that is not there.\n\n"
            + task.text)
    return _task_trial(task, text, holds_facts)


def holds_facts(answer: Answer, task: Task) -> str:
    """Judge whether a summary says what must be said, nothing else, and is one."""
    count = len(answer.text.split())
    if count > LONGEST_SUMMARY_WORDS:
        return f"took {count} words, not {SUMMARY_WORDS}"
    for fact in task.facts:
        if not re.search(fact, answer.text, re.IGNORECASE):
            return f"did not say `{fact}`"
    for claim in task.absent:
        if re.search(claim, answer.text, re.IGNORECASE):
            return f"said `{claim}`, which is not so"
    return ""


# -- one model under trial --

PROMPT_RATE_GUESS, ANSWER_RATE_GUESS = 200.0, 20.0  # until something is known
LOAD_SECONDS_GUESS = 15.0
UNLOAD_SECONDS = 20.0


class Course:
    """One model on its node on its way through the trials; one thread moves it, others look."""

    def __init__(self, node: Node, subject: Subject, trials: Sequence[Trial],
                 known: Measurement | None = None) -> None:
        self.node, self.model, self.trials = node, subject.model, trials
        self.measurement = Measurement(node.name, node.endpoint, subject.model.ollama_model,
                                       tokens=subject.model.context)
        self.at, self.is_done = 0, False
        self.cage: Sequence[str] = ()  # runs a program without a network
        self._subject = subject
        self._known = known  # what an earlier run measured
        self._flaws: dict[str, list[str]] = {}  # by topic, "" where an answer was right
        self._costs: list[tuple[int, int]] = []
        self._guess_costs()

    @property
    def stage(self) -> str:
        """What it is asked now, of how many in its topic."""
        if self.at >= len(self.trials):
            return "done"
        topic = self.trials[self.at].topic
        names = [trial.topic for trial in self.trials]
        return f"{topic} {self.at - names.index(topic) + 1} of {names.count(topic)}"

    def seconds_left(self, other: Measurement | None = None) -> float:
        """Return how long the trials to come may take, by what is known of its speed.

        Nothing is known before its first run; then it may be as fast as another there.
        """
        if self.is_done:
            return 0.0
        rates = []
        for name, guess in (("prompt_rate", PROMPT_RATE_GUESS),
                            ("answer_rate", ANSWER_RATE_GUESS)):
            known = [getattr(measurement, name, None)
                     for measurement in (self.measurement, self._known, other)]
            rates.append(next(filter(None, known), guess))
        costs = self._costs[self.at:]
        seconds = sum(cost[0] for cost in costs) / rates[0]
        seconds += sum(cost[1] for cost in costs) / rates[1]
        return seconds if self.at else seconds + LOAD_SECONDS_GUESS

    def run(self, world: World) -> None:
        """Ask everything, one after the other; a node that dies ends it."""
        backend = backend_of(self.node)
        try:
            self._load_anew(world)
            for trial in self.trials:
                question = trial.ask(self._subject)
                if question:
                    answer = self._ask(world, trial, question)
                    self.take(trial, answer, self._try_out(world, trial, answer))
                if trial is SPEED_TRIALS[0]:
                    self._subject = replace(self._subject, loaded=self._see_loaded(world))
                self.at += 1
        except NodeFailure as failure:
            self.fail(explain_failure(failure, backend).what)
        self.is_done = True

    def _load_anew(self, world: World) -> None:
        """Unload the model; load it, where a question does not do that as its route does."""
        unloading = Warmth(self.node, self.model)
        how = WarmUp(UNLOAD_SECONDS, busy_seconds=UNLOAD_SECONDS, unload=True)
        _time_step(_load, unloading, world, how)
        if backend_of(self.node).loads_as_asked:
            return  # the first answer tells how long that took
        if unloading.detail.startswith("stays") or not unloading.ok:
            self.note(load_seconds=0.0)
            return

        loading = Warmth(self.node, self.model)
        _time_step(_load, loading, world, WarmUp())
        if not loading.ok:
            raise NodeFailure(loading.reason, loading.detail)
        self.note(load_seconds=round(loading.seconds, 2))

    def _try_out(self, world: World, trial: Trial, answer: Answer) -> str:
        """Run the program that an answer makes, if it is one; return what is wrong with it."""
        if not trial.program or any(judge(answer) for judge in trial.judges):
            return ""
        ended = world.run_caged([sys.executable, "-S", "-E", "-s", "-B", CHECK_FILE],
                                trial.program(answer), cage=self.cage, seconds=TASK_SECONDS)
        return judge_run(ended)

    def take(self, trial: Trial, answer: Answer, flaw: str = "") -> None:
        """Note what an answer shows, and what was wrong with the program it made.

        Without the first answer there will be no other.
        """
        if trial is SPEED_TRIALS[0] and answer.missing:
            raise NodeFailure("not loaded", answer.missing)
        if trial.measure and not answer.missing:
            self.note(**trial.measure(answer))
        if self.measurement.load_seconds is None:  # a server that loads as asked and counts not
            self.note(load_seconds=round(answer.first_seconds, 2))
        self._learn(answer)

        flaws = [judge(answer) or flaw for judge in trial.judges]
        self._flaws.setdefault(trial.topic, []).extend(flaws)
        if flaws:
            self._score(trial.topic)
        for flaw in dict.fromkeys(filter(None, flaws)):
            failed = FailedAnswer(trial.title, flaw[:256], show_answer(answer))
            self.note(failed=(*self.measurement.failed, failed))

    def note(self, **fields: Any) -> None:
        """Note what was measured; who looks meanwhile sees all of the old or of the new."""
        self.measurement = replace(self.measurement, **fields)

    def fail(self, why: str) -> None:
        """Note why it goes no further."""
        self.note(failure=why[:256])

    def _score(self, topic: str) -> None:
        flaws = self._flaws[topic]
        score = Score(flaws.count(""), len(flaws), main_flaw(flaws))
        if topic in ("tools", "context"):
            self.note(**{topic: score})
        elif topic in ROLES:
            self.note(quality={**self.measurement.quality, topic: score})
        else:
            self.note(claims={**self.measurement.claims, topic: score})

    def _learn(self, answer: Answer) -> None:
        """Learn how many tokens a line has, and how fast prompts are read."""
        lines, tokens = answer.question.lines, answer.end.input_tokens
        fills = self._subject.fills
        if lines and tokens and not answer.missing:
            fills = (*fills, (lines, tokens))
        self._subject = replace(self._subject, fills=fills,
                                prompt_rate=self.measurement.prompt_rate)
        if lines:
            self._guess_costs()

    def _guess_costs(self) -> None:
        """Guess the tokens in and out of each trial."""
        self._costs = [guess_cost(trial.ask(self._subject)) for trial in self.trials]

    def _ask(self, world: World, trial: Trial, question: Question) -> Answer:
        """Return the answer; a node that fails and still lives gave none."""
        model = replace(self.model, thinking=True) if trial.thinks else self.model
        try:
            return ask_model(world, self.node, model, question)
        except NodeFailure as failure:
            backend = backend_of(self.node)
            deadline = world.clock() + PROBE_TIMEOUT_SECONDS
            ask_node(world, self.node, backend.identify(), deadline=deadline)
            return Answer(question, failure=explain_failure(failure, backend).what)

    def _see_loaded(self, world: World) -> int:
        """Return the context with which the node says it holds the model."""
        deadline = world.clock() + PROBE_TIMEOUT_SECONDS
        loaded = ask_node(world, self.node, backend_of(self.node).list_loaded(),
                          deadline=deadline)
        return max((match.context for match in find_models(loaded, self.model.ollama_model)),
                   default=0)


def main_flaw(flaws: Sequence[str]) -> str:
    """Return what was wrong most often; of two, what came first."""
    wrong = list(filter(None, flaws))
    return max(wrong, key=wrong.count, default="")[:256]


def guess_cost(question: Question | None) -> tuple[int, int]:
    """Return about how many tokens a question has, and its answer will."""
    if question is None:
        return 0, 0
    talk = question.talk
    size = sum(len(text) for turn in talk.turns for text in turn.texts)
    return size // 4 + 100 * len(talk.tools), min(talk.max_tokens or ANSWER_TOKENS, 128)


def show_answer(answer: Answer) -> str:
    """Return an answer as it is kept for reading: its text, then its calls."""
    calls = [f"{call.name} {json.dumps(call.arguments)}" for call in answer.calls]
    return "\n".join(filter(None, [answer.text, *calls]))[:MEASURED_TEXT_LIMIT]


def ask_model(world: World, node: Node, model: Model, question: Question) -> Answer:
    """Ask a model as its route does; a refusal is an answer, too."""
    unknown: set[str] = set()  # fields that the server does not take
    while True:
        try:
            return _take_answer(world, node, model, question, unknown=unknown)
        except NoField as refusal:
            if refusal.name in unknown:
                return Answer(question, refusal=refusal)
            unknown.add(refusal.name)
        except Refusal as refusal:
            return Answer(question, refusal=refusal)


def _take_answer(world: World, node: Node, model: Model, question: Question, *,
                 unknown: Collection[str]) -> Answer:
    """Return what a model says to a question."""
    began = world.clock()
    first_seconds = 0.0
    end = End("")
    calls: list[Call] = []
    texts: dict[str, list[str]] = {"text": [], "thinking": []}
    for delta in _hear(world, node, model, question.talk, unknown=unknown):
        first_seconds = first_seconds or world.clock() - began
        if delta.call:
            calls.append(delta.call)
        end = delta.end or end
        texts.setdefault(delta.kind, []).append(delta.text)
    return Answer(question, "".join(texts["text"]), "".join(texts["thinking"]), tuple(calls), end,
                  first_seconds, world.clock() - began)


def _hear(world: World, node: Node, model: Model, talk: Talk, *,
          unknown: Collection[str]) -> Iterator[Delta]:
    """Yield what a model says, up to its end; Refusal or NodeFailure where it does not."""
    backend = backend_of(node)
    ask = sign(world, node, backend.chat(talk, model))
    payload: Any = ask.payload
    body = render_json({name: payload[name] for name in payload if name not in unknown})
    reader = backend.reader(talk, model, round(weigh(body, talk) / BYTES_A_TOKEN))
    exchange = world.open_exchange(node.endpoint + ask.path, body=body, headers=ask.headers,
                                   deadline=world.clock() + model.timeout)
    with contextlib.closing(exchange):
        exchange.read_head()
        if exchange.status != 200:
            reply = Reply(exchange.status, exchange.headers, exchange.read_all())
            raise reader.refusal(exchange.status, ask.extract(reply))

        size = 0
        for line in exchange.lines():
            size += len(line)
            if size > 1_000_000 + 1_000 * model.max_output:
                raise NodeFailure("bad answer", "it does not end")
            for delta in reader.feed(line):
                yield delta
                if delta.end:
                    return
            if reader.has_begun:
                exchange.deadline = world.clock() + model.timeout
        closing = reader.close()
    yield from closing
    if not any(delta.end for delta in closing):
        raise NodeFailure("bad answer", "it ended before it was done")


# == 16. Gateway ==============================================================
#
# The fleet behind one address. One thread a client connection. Who waits for a node waits for its
# client's end of the connection, too: a client that leaves takes its request off the node at once.

QUIET_SECONDS = 10.0  # a stream that waited so long gets its headers, then a ping as often
SILENCE_SECONDS = 10.0  # a node that says nothing for so long is asked whether it still answers
REST_SECONDS, REST_LIMIT_SECONDS = 2.0, 60.0
REQUEST_SECONDS = 10.0  # for the headers; also how long an idle connection is kept
FIRST_BYTE_SECONDS = 2.0  # of a new connection
BODY_SECONDS = 120.0
BODY_LIMIT_BYTES = 64 * 1024 * 1024
BODIES_LIMIT_BYTES = 512 * 1024 * 1024  # of all requests that are held at once
CONNECTION_LIMIT = 256
CONVERSATION_LIMIT = 4096
FOLLOWER_LIMIT = 64
EVENTS_BEHIND_LIMIT = 4096  # who is further behind is dropped
EVENTS_PAUSE_SECONDS = 0.1  # they go out in batches: a burst costs one write
PROGRESS_SECONDS = 1.0
RECEIPTS_SHOWN = 200
SAID_LIMIT = 400  # characters of the words of who failed
GRACE_SECONDS = 10.0
LITELLM_START_SECONDS = 90.0
OPEN_PAGES = ("/", "/health/liveliness")  # they say who answers, to anybody
EVENTS_PATH = "/events"
EVENTS_HEAD = "Content-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-store\r\n"
PROOF_PATH = "/prove/"  # a nonce follows: 32 bytes in hexadecimal


# -- who may ask which node when --

class Rest:
    """A node, or one model on it, is left alone after a failure; one request may end it."""

    def __init__(self, until: float = 0.0, seconds: float = 0.0) -> None:
        self.until, self.seconds = until, seconds
        self.probe: Ticket | None = None


class Capacity:
    """What a model has on its node: slots, and a rest that other models there may share."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.slots, self.running = 1, 0
        self.last_number = 0  # of the request that came last
        self.rest = Rest()


class Ticket:
    """A request in the queue; once it holds a slot it has a `model`."""

    def __init__(self, number: int, alias: str, conversation: Conversation) -> None:
        self.number, self.alias, self.conversation = number, alias, conversation
        self.candidates: list[list[Model]] = []  # who can still be asked: the alias, its fallbacks
        self.model: Model | None = None
        self.is_closed = False  # the gateway stops, there will be no slot
        self.wake: Callable[[], None] = lambda: None


class Scheduler:
    """Slots, the queue, rests. Pure but for a lock and a clock; any thread may call."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._lock, self._clock = threading.RLock(), clock
        self.candidates = _plan_candidates(fleet)
        self.places = _plan_capacities(fleet)
        self._busy = dict.fromkeys(fleet.nodes, 0)  # slots in use, by node
        self._queue: dict[int, Ticket] = {}
        self._number = 0
        self._is_closed = False
        # Which model served a conversation last, the one asked longest ago first.
        self._served: dict[tuple[Conversation, str], str] = {}

    def enter(self, alias: str, conversation: Conversation) -> Ticket:
        """Return a ticket in the queue of an alias; it may hold a slot at once."""
        with self._lock:
            self._number += 1
            ticket = Ticket(self._number, alias, conversation)
            ticket.candidates = self.candidates[alias]
            ticket.is_closed = self._is_closed
            self._queue[ticket.number] = ticket
            self.serve_queue()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Give up the wait or the slot; nothing is said about the node."""
        with self._lock:
            self._queue.pop(ticket.number, None)
            self._release(ticket)
            self.serve_queue()

    def close(self) -> None:
        """Let who waits wait no longer."""
        with self._lock:
            self._is_closed = True
            for ticket in self._queue.values():
                ticket.is_closed = True
                ticket.wake()

    def succeed(self, ticket: Ticket) -> bool:
        """Note that the node answered: its rest ends and the conversation will prefer it.

        Tell whether it had rested.
        """
        assert ticket.model
        with self._lock:
            rest = self.places[ticket.model.name].rest
            had_rested = rest.until > 0
            rest.until, rest.probe = 0, None

            key = (ticket.conversation, ticket.alias)
            self._served.pop(key, None)
            self._served[key] = ticket.model.name
            if len(self._served) > CONVERSATION_LIMIT:
                del self._served[next(iter(self._served))]
            self.serve_queue()
        return had_rested

    def fail(self, ticket: Ticket, *, is_missing: bool = False) -> float:
        """Let the node, or only the model that it lacks, rest; queue for another.

        Return for how many seconds.
        """
        assert ticket.model
        with self._lock:
            failed = self.places[ticket.model.name]
            seconds = REST_SECONDS
            if failed.rest.probe is ticket:
                seconds = min(failed.rest.seconds * 2, REST_LIMIT_SECONDS)
            rest = Rest(self._clock() + seconds, seconds)
            for place in self.places.values():
                if place is failed or (place.node == failed.node and not is_missing):
                    place.rest = rest

            ticket.candidates = [[model for model in group if model is not ticket.model]
                                 for group in ticket.candidates]
            self._release(ticket)
            if any(ticket.candidates):
                ticket.is_closed = self._is_closed
                self._queue[ticket.number] = ticket
            self.serve_queue()
        return seconds

    def show(self) -> tuple[dict[str, dict[str, Any]], int]:
        """Return what is true of each model's place, and how many wait."""
        with self._lock:
            now = self._clock()
            places = {}
            for name, place in self.places.items():
                rests = round(max(place.rest.until - now, 0), 1)
                places[name] = {"running": place.running, "slots": place.slots,
                                "rests_seconds": rests}
            return places, len(self._queue)

    def rest_seconds(self, alias: str) -> int:
        """Return after how many whole seconds the first candidate has rested enough."""
        with self._lock:
            ends = [self.places[model.name].rest.until
                    for group in self.candidates[alias] for model in group]
            return max(int(min(ends) - self._clock()) + 1, 1)

    def serve_queue(self) -> None:
        """Give what is free to who waits, in order; a rest may have ended by itself."""
        with self._lock:
            now = self._clock()  # one for all: a rest that ends meanwhile is not for who came last
            for ticket in sorted(self._queue.values(), key=lambda ticket: ticket.number):
                model = self._choose(ticket, now)
                if model:
                    self._grant(ticket, model)

    def _grant(self, ticket: Ticket, model: Model) -> None:
        del self._queue[ticket.number]
        place = self.places[model.name]
        place.running += 1
        place.last_number = ticket.number
        self._busy[place.node] += 1
        if place.rest.until:
            place.rest.probe = ticket
        ticket.model = model
        ticket.wake()

    def _release(self, ticket: Ticket) -> None:
        if not ticket.model:
            return
        place = self.places[ticket.model.name]
        place.running -= 1
        self._busy[place.node] -= 1
        if place.rest.probe is ticket:
            place.rest.probe = None
        ticket.model = None

    def _choose(self, ticket: Ticket, now: float) -> Model | None:
        """Return the model to ask, None to wait."""
        resting: list[Model] = []
        for group in ticket.candidates:
            awake = [model for model in group if self._is_awake(model, now)]
            if awake:
                free = [model for model in awake if self._has_room(model)]
                return min(free, default=None, key=lambda model: self._rank(model, ticket))
            resting += group

        # Everyone rests: to try is better than to refuse, one request at a time.
        free = [model for model in resting
                if self._has_room(model) and not self.places[model.name].rest.probe]
        return min(free, default=None, key=lambda model: self.places[model.name].rest.until)

    def _rank(self, model: Model, ticket: Ticket) -> tuple[int, bool, int]:
        """Order who may answer: the least busy node, who knows the prompt, the longest idle."""
        knows = self._served.get((ticket.conversation, ticket.alias))
        return self._busy[model.node], model.name != knows, self.places[model.name].last_number

    def _is_awake(self, model: Model, now: float) -> bool:
        rest = self.places[model.name].rest
        return rest.until <= now and not rest.probe

    def _has_room(self, model: Model) -> bool:
        place = self.places[model.name]
        return place.running < place.slots


def _plan_candidates(fleet: Fleet) -> dict[str, list[list[Model]]]:
    """Return {alias: groups of models}: its own, then those of each alias it falls back on."""
    by_alias: dict[str, list[Model]] = {}
    for model in fleet.models.values():
        by_alias.setdefault(model.alias, []).append(model)
    chains = plan_fallbacks(fleet)
    return {alias: [by_alias[name] for name in (alias, *chains.get(alias, ()))]
            for alias in by_alias}


def _plan_capacities(fleet: Fleet) -> dict[str, Capacity]:
    """Return each model's Capacity; two that are one model on a node share it."""
    places: dict[str, Capacity] = {}
    shared: dict[tuple[str, str], Capacity] = {}
    for model in fleet.models.values():
        key = (model.node, full_model_name(model.ollama_model))
        place = shared.setdefault(key, Capacity(model.node))
        place.slots = max(place.slots, model.max_parallel)
        places[model.name] = place
    return places


# -- one request --

@dataclass(frozen=True)
class Translation:
    """A talk as one candidate is asked it."""

    model: Model
    talk: Talk
    ask: Ask
    body: bytes
    weight: int
    estimate: int  # of its tokens
    fields: tuple[str, ...]  # of its payload


class Service:
    """Answers one request, from its Talk to the last byte."""

    def __init__(self, server: Server, visitor: Visitor, dialect: Dialect, talk: Talk,
                 conversation: Conversation) -> None:
        self._server, self._world, self._visitor = server, server.world, visitor
        self._dialect, self._talk, self._conversation = dialect, talk, conversation
        self._id, self._began = self._world.token(12), self._world.clock()
        self._id_header = f"request-id: req_{self._id}\r\n"
        self._translations: dict[str, Translation] = {}  # by model

        self._writer = dialect.writer(talk, self._id)
        self._out = bytearray()  # what was written and not yet sent
        self._ping_at = self._began + QUIET_SECONDS if self._writer.is_stream else float("inf")
        # What the client has: the headers, and some of an answer that cannot be taken back.
        self._has_headers = self._has_content = False
        self._holds_content = False  # in _out

        self._model: Model | None = None  # who was asked last
        self._sent = 0  # tokens of what it was asked, as far as is known
        self._is_silent = True  # it has not said a word yet
        self._tries: list[Try] = []
        self._said: list[str] = []  # by those who failed
        self._marks: dict[str, float] = {}  # seconds from the beginning
        self._spoken, self._tell_at = 0, 0.0  # how far the answer is, when that is told next
        self._end = End("")
        self._outcome = "error"

    def run(self) -> None:
        """Answer the request; the receipt is filed however it ends."""
        scheduler, alias = self._server.scheduler, self._talk.alias
        self._translate(scheduler.candidates[alias][0][0])  # refused before it waits
        self._tell(RequestBegun, session=self._conversation.session,
                   agent=self._conversation.agent, alias=alias)
        ticket = scheduler.enter(alias, self._conversation)
        try:
            self._answer(ticket)
            self._outcome = "ok"
        except ClientGone:
            self._outcome = "stopped" if self._server.stops else "left"
            raise
        except Refusal as refusal:
            self._outcome = "stopped" if ticket.is_closed else refusal.kind
            if isinstance(refusal, PromptTooLong):
                self._outcome = "prompt_too_long"
            self._refuse(refusal)
        finally:
            scheduler.leave(ticket)
            self._mark("total")
            self._server.hub.publish(self._receipt())

    def _answer(self, ticket: Ticket) -> None:
        """Ask one candidate after the other until one has answered; send what is left to send."""
        while True:
            model = self._await_slot(ticket)
            try:
                self._ask(ticket, self._translate(model))
                break
            except (NoImages, NoField) as refusal:
                self._adapt(model, refusal)  # it is asked again
            except Refusal as refusal:
                if refusal.http == 400:
                    self._note(model, refusal)
                    raise
                self._note(model, refusal)
                self._go_on(ticket, refusal.kind, refusal)
            except NodeFailure as failure:
                node = self._server.fleet.nodes[model.node]
                why = explain_failure(failure, backend_of(node)).reason
                self._said.append(f"{node.name}: {failure.detail or why}")
                problem = Refusal(529, f"node {node.name}: {why}; no other is left")
                if self._has_content:
                    problem = Refusal(500, f"node {node.name}: {why}, in mid answer")
                self._go_on(ticket, why, problem)
            self._discard()

        if self._writer.is_stream:
            self._flush(last=True)
        else:
            self._visitor.reply(200, bytes(self._out), head=self._id_header)

    def _note(self, model: Model, refusal: Refusal) -> None:
        """Keep the words of a node that refused; those of ours are without it."""
        who = f"node {model.node}, model {model.ollama_model}: "
        words = refusal.what
        if words.startswith(who):
            names = (model.ollama_model.lower(), full_model_name(model.ollama_model))
            words = plain_words(words[len(who):].partition("; ")[0], names)
        self._said.append(f"{model.node}: {words or refusal.kind}")

    def _adapt(self, model: Model, refusal: NoImages | NoField) -> None:
        """Note what a model's node does not take; raise that where it was not in the request."""
        # What was sent, not what is known: another request may have learned it since then.
        sent = self._translations.pop(model.name)
        if isinstance(refusal, NoField):
            known = self._server.unknown_fields.setdefault(model.name, set())
            was_sent = refusal.name in sent.fields
            known.add(refusal.name)
        else:
            was_sent = bool(sent.talk.images())
            if was_sent:
                self._server.blind.add(model.name)
        if self._has_content or not was_sent:
            raise refusal

    def _go_on(self, ticket: Ticket, why: str, refusal: Refusal) -> None:
        """Leave a model that failed for the next; where none is left, refuse."""
        assert ticket.model
        model, is_missing = ticket.model, refusal.http == 404
        self._tries.append(Try(model.node, why))
        seconds = self._server.scheduler.fail(ticket, is_missing=is_missing)
        self._tell(NodeRests, node=model.node, model=model.name if is_missing else "",
                   seconds=seconds, why=why)
        if not self._has_content and any(ticket.candidates):
            return
        if refusal.http in RETRY_STATUSES:
            seconds = self._server.scheduler.rest_seconds(ticket.alias)
            raise Refusal(refusal.http, refusal.what, retry_seconds=seconds)
        raise refusal

    def _discard(self) -> None:
        """Forget what of a failed answer was not sent."""
        self._out, self._holds_content = bytearray(), False

    def _translate(self, model: Model) -> Translation:
        """Return the talk as this model is asked it; made once for each candidate."""
        if model.name not in self._translations:
            self._translations[model.name] = self._server.translate(self._talk, model)
        return self._translations[model.name]

    def _await_slot(self, ticket: Ticket) -> Model:
        """Wait in the queue; return the model that may be asked."""
        while not ticket.model:
            if ticket.is_closed:
                raise Refusal(529, "the gateway is stopping")
            with contextlib.closing(Signal()) as granted:
                ticket.wake = granted.set  # and only then, whether it came before
                if ticket.model or ticket.is_closed:
                    continue
                if not self._wait(granted, self._world.clock() + REST_SECONDS):
                    self._server.scheduler.serve_queue()
        self._mark("waited")
        self._tell(SlotGot, model=ticket.model.name, node=ticket.model.node)
        return ticket.model

    def _ask(self, ticket: Ticket, translation: Translation) -> None:
        """Send the request to the model's node, and its answer to the client."""
        model, ask = translation.model, translation.ask
        self._model, self._is_silent = model, True
        self._sent = translation.estimate
        self._spoken = 0
        self._tell_at = self._world.clock() + PROGRESS_SECONDS
        self._writer = self._dialect.writer(self._talk, self._id)
        if self._has_headers:
            self._writer.begin()  # which the client has
        node = self._server.fleet.nodes[model.node]
        reader = backend_of(node).reader(translation.talk, model, translation.estimate)
        exchange = self._world.open_exchange(
            node.endpoint + ask.path, body=translation.body,
            headers=sign(self._world, node, ask).headers,
            deadline=self._world.clock() + model.timeout)
        try:
            exchange.before_read = lambda: self._await_node(exchange, node)
            exchange.read_head()
            if exchange.status != 200:
                body = exchange.read_all()
                words = ask.extract(Reply(exchange.status, exchange.headers, body))
                raise reader.refusal(exchange.status, words)
            self._relay(exchange, reader, ticket, translation)
        finally:
            exchange.leave()

    def _relay(self, exchange: Exchange, reader: Reader, ticket: Ticket,
               translation: Translation) -> None:
        """Take the node's lines until the answer ends; write them for the client."""
        model, size = translation.model, 0
        for line in exchange.lines():
            deltas = reader.feed(line)
            if self._is_silent and reader.has_begun:
                self._is_silent = False
                self._mark("first_byte")
                self._tell(FirstToken)
            end = self._write(deltas)
            if not size and self._server.scheduler.succeed(ticket):
                self._tell(NodeReturns, node=model.node)  # now: the last word may be minutes away

            size += len(line)
            if size > 1_000_000 + 1_000 * model.max_output:
                raise NodeFailure("bad answer", "it does not end")
            if end:
                if not end.stop:
                    exchange.close()  # the node has said all
                self._learn(translation, end)
                return
            now = self._world.clock()
            if not self._is_silent:
                exchange.deadline = now + model.timeout
            self._count(deltas, now)
        end = self._write(reader.close())
        if not end:
            raise NodeFailure("bad answer", "it ended before it was done")
        self._learn(translation, end)

    def _count(self, deltas: list[Delta], now: float) -> None:
        """Count what was said as tokens, and tell it once a second."""
        self._spoken += len(deltas)
        if now >= self._tell_at:
            self._tell_at = now + PROGRESS_SECONDS
            self._tell(TokensSoFar, output_tokens=self._spoken)

    def _write(self, deltas: list[Delta]) -> End | None:
        """Write what was said; return the End when that was it."""
        for delta in deltas:
            if delta.end:
                self._end = delta.end
                self._out += self._writer.end(delta.end)
                return delta.end
            if delta.kind not in ("signature", "block") or self._writer.keeps_blocks:
                self._out += self._writer.write(delta)
                self._holds_content = True
        if len(self._out) > HEADER_LIMIT_BYTES:
            self._flush()
        return None

    def _learn(self, translation: Translation, end: End) -> None:
        """Learn how many bytes a token has; who counts only uncached tokens teaches nothing."""
        tokens = end.input_tokens
        if tokens and not end.stop and 0.5 <= translation.weight / tokens <= 16:
            self._server.ratios[translation.model.name] = translation.weight / tokens

    def _flush(self, *, last: bool = False) -> None:
        """Send what was written; the first time with the headers and what opens the stream."""
        chunk, head = bytes(self._out), ""
        self._has_content = self._has_content or self._holds_content
        self._discard()
        if not self._has_headers:
            self._has_headers = True
            head = ("Content-Type: text/event-stream; charset=utf-8\r\n"
                    f"Cache-Control: no-cache\r\n{self._id_header}")
            chunk = self._writer.begin() + chunk
        self._visitor.stream(chunk, head=head, last=last)
        self._ping_at = self._world.clock() + QUIET_SECONDS

    def _refuse(self, refusal: Refusal) -> None:
        if self._has_headers:  # there is no HTTP status left to give
            self._out += self._writer.fail(refusal)
            self._flush(last=True)
        else:
            head = self._id_header + retry_header(refusal)
            self._visitor.reply(refusal.http, self._dialect.refuse(refusal), head=head)

    def _await_node(self, exchange: Exchange, node: Node) -> None:
        """Wait for more from a node; one that is silent is asked whether it answers at all.

        A slow model is waited for, a hung machine is not.
        """
        while self._is_silent:
            look_at = self._world.clock() + SILENCE_SECONDS
            if look_at >= exchange.deadline:
                break
            if self._wait(exchange, look_at):
                return
            self._check_alive(node)
        self._wait(exchange, exchange.deadline)

    def _check_alive(self, node: Node) -> None:
        until = self._world.clock() + PROBE_TIMEOUT_SECONDS
        try:
            ask_node(self._world, node, backend_of(node).identify(), deadline=until)
        except NodeFailure as failure:
            # `refused` may be a program that stops once it has answered what it took.
            if failure.reason in ("timeout", "unreachable"):
                raise NodeFailure("timeout", "it took the request and answers nothing") from None

    def _wait(self, readable: Exchange | Signal, until: float) -> bool:
        """Wait while the client stays; pings keep it from giving up."""
        if self._out:
            self._flush()
        while not self._visitor.wait(readable, min(until, self._ping_at) - self._world.clock()):
            if self._world.clock() >= until:
                return False
            self._out += self._writer.ping()
            self._flush()
        return True

    def _mark(self, name: str) -> None:
        """Note when something happened for the first time."""
        if name not in self._marks:
            self._marks[name] = round(self._world.clock() - self._began, 3)

    def _tell(self, kind: Callable[..., Event], **fields: Any) -> None:
        """Publish what has just happened to this request."""
        now = round(self._world.now(), 3)
        self._server.hub.publish(kind(time=now, id=f"req_{self._id}", **fields))

    def _receipt(self) -> Receipt:
        model = self._model
        return Receipt(
            time=round(self._world.now(), 3), id=f"req_{self._id}",
            session=self._conversation.session, agent=self._conversation.agent,
            alias=self._talk.alias,
            model=model.name if model else None,
            node=model.node if model else None,
            context=model.context if model else None,
            tries=tuple(self._tries),
            waited=self._marks.get("waited"), first_byte=self._marks.get("first_byte"),
            total=self._marks["total"],
            input_tokens=self._end.input_tokens, output_tokens=self._end.output_tokens,
            outcome=self._outcome,
            sent=self._sent, said=clean_line("; ".join(self._said))[:SAID_LIMIT])


def retry_header(refusal: Refusal) -> str:
    """Return the header line that says when to come back, where that helps."""
    if not refusal.retry_seconds:
        return ""
    return f"Retry-After: {refusal.retry_seconds}\r\n"


# -- what becomes of events --

EVENT_KINDS: dict[str, type[Event]] = {
    "begun": RequestBegun, "slot": SlotGot, "first": FirstToken, "tokens": TokensSoFar,
    "ended": Receipt, "rests": NodeRests, "returns": NodeReturns}


@lru_cache(maxsize=256)  # a receipt goes to the file and to each who follows
def render_record(event: Event) -> bytes:
    """Return an event as a JSON object."""
    if not isinstance(event, Receipt):
        return render_json(vars(event))
    return render_json({**vars(event), "tries": [vars(each) for each in event.tries],
                        "passed_over": [vars(each) for each in event.passed_over]})


def render_frame(event: Event) -> bytes:
    """Return an event as those who follow `/events` get it."""
    kind = next(word for word, made in EVENT_KINDS.items() if made is type(event))
    return b'data: {"kind":"%b",%b\n\n' % (kind.encode("ascii"), render_record(event)[1:])


FIELD_TYPES: dict[str, Any] = {
    "str": str, "int": int, "float": (int, float), "bool": bool,
    "str | None": (str, type(None)), "int | None": (int, type(None)),
    "float | None": (int, float, type(None))}


def parse_event(value: Mapping[str, Any]) -> Event | None:
    """Return the event that an object of `/events` or of a receipts file is, None for others.

    What a newer gateway adds is left; what an older one does not say has its default.
    """
    kind: Any = EVENT_KINDS.get(str(value.get("kind", "ended")))
    if not kind:
        return None
    words = {}
    for row in fields(kind):
        if row.name not in value:
            continue
        part = value[row.name]
        if not isinstance(part, FIELD_TYPES.get(str(row.type), object)):
            return None
        words[row.name] = tuple(part) if isinstance(part, list) else part

    with contextlib.suppress(TypeError, KeyError):  # of an event that has not all it needs
        if kind is Receipt:
            tries = [Try(str(each["node"]), str(each["why"])) for each in words["tries"]]
            words["tries"] = tuple(tries)
            words["passed_over"] = tuple(Passed(str(each["model"]), str(each["why"]))
                                         for each in words.get("passed_over", ()))
        return kind(**words)
    return None


class Board:
    """What a listener that comes late must know: who works, who rests, the latest receipts."""

    def __init__(self) -> None:
        self._working: dict[str, list[Event]] = {}  # by the request
        self._rests: dict[tuple[str, str], NodeRests] = {}  # by node and model
        self._receipts: dict[str, Receipt] = {}  # the oldest first

    def take(self, event: Event) -> None:
        if isinstance(event, Receipt):
            self._working.pop(event.id, None)
            self._receipts[event.id] = event
            if len(self._receipts) > RECEIPTS_SHOWN:
                del self._receipts[next(iter(self._receipts))]
            return

        if isinstance(event, NodeRests):
            self._rests[event.node, event.model] = event
        elif isinstance(event, NodeReturns):
            for place in [place for place in self._rests if place[0] == event.node]:
                del self._rests[place]
        told = self._working.setdefault(event.id, [])
        if told and type(told[-1]) is TokensSoFar is type(event):
            told.pop()
        told.append(event)

    def forget(self) -> None:
        """Forget who works and who rests: who told it has gone."""
        self._working.clear()
        self._rests.clear()

    def events(self) -> list[Event]:
        """Return the events that lead to what is so now."""
        working = [event for told in self._working.values() for event in told]
        rests = [rest for rest in self._rests.values() if rest.id not in self._working]
        return [*self._receipts.values(), *rests, *working]


class Hub:
    """Hands each event to all who subscribed, in the order it came."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Callable[[Any], None]] = []
        self.board = Board()

    def subscribe(self, listener: Callable[[Any], None], *, catches_up: bool = False) -> None:
        """Call `listener` with each event from now on; it must neither wait nor raise.

        Who catches up is first told what leads to what is so now.
        """
        with self._lock:
            for event in self.board.events() if catches_up else ():
                listener(event)
            self._listeners.append(listener)

    def forget(self) -> None:
        """Let nobody who comes from now on hear of what was under way."""
        with self._lock:
            self.board.forget()

    def requests(self) -> list[Event]:
        """Return what is known of the requests, the oldest first."""
        with self._lock:
            return self.board.events()

    def unsubscribe(self, listener: Callable[[Any], None]) -> None:
        with self._lock:
            self._listeners.remove(listener)

    def publish(self, event: Event | Rejection) -> None:
        """Hand an event to everyone; events of several threads come one after the other."""
        with self._lock:
            if not isinstance(event, Rejection):
                self.board.take(event)
            for listener in self._listeners:
                listener(event)


class Follower:
    """A client that reads the events as they come: any thread puts in, its own takes out.

    Nobody waits for it: who is too far behind is dropped, and finds out what it missed when it
    comes back. What came and went between two looks is told by its end alone.
    """

    def __init__(self, latest: Callable[[], bytes] = bytes) -> None:
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._latest, self._seen = latest, b""  # of a frame that replaces the one before
        self.signal = Signal()
        self.is_late = self.is_closed = False

    def take(self, event: Event | Rejection) -> None:
        if isinstance(event, Rejection) or self.is_late:
            return
        self.is_late = self._queue.qsize() >= EVENTS_BEHIND_LIMIT
        self._queue.put(event)
        if self._queue.qsize() == 1:  # else it is taking, and goes on until there is nothing
            self.signal.set()

    def close(self) -> None:
        """Let it have what has come, and nothing more."""
        self.is_closed = True
        self.signal.set()

    def drain(self) -> bytes:
        """Return what has come since the last time, as frames."""
        self.signal.clear()  # first: what comes from here on raises it again
        events = []
        with contextlib.suppress(queue.Empty):
            while True:
                events.append(self._queue.get_nowait())
        ended = {event.id for event in events if isinstance(event, Receipt)}
        steps = (RequestBegun, SlotGot, FirstToken, TokensSoFar)
        frames = [render_frame(event) for event in events
                  if not (isinstance(event, steps) and event.id in ended)]

        latest = self._latest()
        if latest is not self._seen:
            self._seen = latest
            frames.insert(0, latest)
        return b"".join(frames)


class Ledger:
    """Adds up what each node has served."""

    def __init__(self, nodes: Iterable[str]) -> None:
        self.totals: dict[str, dict[str, Any]] = {
            name: dict.fromkeys(TOTALS, 0) for name in nodes}

    def take(self, event: Event | Rejection) -> None:
        if not isinstance(event, Receipt):
            return
        for attempt in event.tries:
            self.totals[attempt.node]["failures"] += 1
        if event.node is None:
            return
        total = self.totals[event.node]
        total["requests"] += 1
        total["input_tokens"] += event.input_tokens
        total["output_tokens"] += event.output_tokens
        total["waited_seconds"] = round(total["waited_seconds"] + (event.waited or 0.0), 3)


class ReceiptFile:
    """Keeps receipts as lines of JSON; while it cannot, it has said so once."""

    def __init__(self, world: World, path: str) -> None:
        self._world, self._path = world, path
        self._is_broken = False

    def take(self, event: Event | Rejection) -> None:
        if not isinstance(event, Receipt):
            return
        try:
            self._world.append_line(self._path, render_record(event) + b"\n")
            self._is_broken = False
        except FleetError as error:
            if not self._is_broken:
                self._world.err(f"warning: no receipts for now: {error.what}\n")
            self._is_broken = True


# -- who knows the key --

def prove_key(key: str, nonce: str, address: str, port: int) -> str:
    """Return what only who knows the key can say to a nonce, in hexadecimal.

    It names where the gateway was reached. Who holds another port and hands the nonce on to a
    gateway that knows the key gets a proof for that one's port, which is none for its own.
    """
    place = f"{show_host(plain_address(address))}:{port}"
    message = f"subagent-fleet{nonce}{place}".encode("ascii")
    return hmac.new(key.encode("utf-8"), message, hashlib.sha256).hexdigest()


def proves_key(proof: object, wanted: str) -> bool:
    """Tell whether a proof is the wanted one, in a time that tells nothing."""
    return hmac.compare_digest(str(proof).encode("utf-8"), wanted.encode("utf-8"))


# -- connections --

class Allowance:
    """Bounds the sum of what is held at once."""

    def __init__(self, limit: int) -> None:
        self._lock, self._left = threading.Lock(), limit

    def take(self, size: int) -> bool:
        """Tell whether so much more may be held, and count it."""
        with self._lock:
            if size > self._left:
                return False
            self._left -= size
            return True

    def give_back(self, size: int) -> None:
        with self._lock:
            self._left += size


class Reception(ABC):
    """Takes connections and their requests, follows who listens to a hub, ends them all."""

    def __init__(self, world: World, names: Iterable[str]) -> None:
        self.world, self.hub = world, Hub()
        self.stops: list[str] = []
        self._wake = Signal()
        self._followers: list[Follower] = []
        # By what they do: silent, asking, following, idle or cut; the oldest first.
        self._visitors: dict[Visitor, str] = {}
        self._names = {name.lower() for name in names}

    @abstractmethod
    def _respond(self, visitor: Visitor, method: str, target: str,
                 headers: dict[str, str]) -> None:
        """Answer one request, or raise what it is refused with."""

    @abstractmethod
    def _refuse(self, visitor: Visitor, refusal: Refusal, path: str) -> None:
        """Send a refusal in the words of who asked."""

    @abstractmethod
    def _hello(self) -> dict[str, Any]:
        """Return what is said first to who follows."""

    def _latest(self) -> bytes:
        """Return the frame of which only the latest counts, beside the events."""
        return b""

    def stop(self, name: str) -> None:
        """Take nothing new; a second time, end at once. Safe in a signal handler."""
        self.stops.append(name)
        self._wake.set()

    def serve(self, listener: Listener) -> None:
        """Serve until `stop`, then let what is being answered end."""
        while not self.stops:
            self._accept(listener)
        listener.close()

    def _accept(self, listener: Listener) -> None:
        """Take the next connection; where there are too many, the oldest silent one makes room."""
        states = list(self._visitors.values())
        is_full = len(states) - states.count("cut") >= CONNECTION_LIMIT
        if is_full and "silent" not in states and "idle" not in states:
            self.world.sleep(TICK_SECONDS)  # who comes now waits to be accepted
            return

        visitor = listener.accept(self._wake, 1.0)
        if not visitor:
            return
        if is_full:
            self._make_room()
        self._visitors[visitor] = "silent"
        threading.Thread(target=self._serve, args=(visitor,), daemon=True).start()

    def _make_room(self) -> None:
        """Close the connection that said nothing for longest, else one that is idle."""
        visitors = self._visitors.copy()
        for wanted in ("silent", "idle"):
            for visitor, state in visitors.items():
                if state == wanted:
                    self._visitors[visitor] = "cut"
                    visitor.cut()
                    return

    def _end_visits(self) -> None:
        """Let what is being answered end."""
        until = self.world.clock() + GRACE_SECONDS
        while self._visitors and self.world.clock() < until + 0.5:
            if len(self.stops) > 1:
                until = min(until, self.world.clock())
            if "asking" not in self._visitors.copy().values():
                for follower in self._followers.copy():
                    follower.close()  # it has been told how the last one ended
            for visitor, state in self._visitors.copy().items():
                is_at_work = state in ("asking", "following")
                if not is_at_work or self.world.clock() >= until:
                    visitor.cut()  # its thread leaves the node and files the receipt
            self.world.sleep(0.02)

    def _serve(self, visitor: Visitor) -> None:
        """Answer one request after the other on a connection."""
        try:
            self._serve_requests(visitor)
        except ClientGone:
            pass
        finally:
            visitor.part()
            del self._visitors[visitor]

    def _serve_requests(self, visitor: Visitor) -> None:
        target, seconds = "", FIRST_BYTE_SECONDS
        try:
            while visitor.stays and not self.stops:
                request = visitor.read_request(REQUEST_SECONDS, first_byte_seconds=seconds)
                if request is None:
                    break
                method, target, headers = request
                self._visitors[visitor] = "asking"
                self._respond(visitor, method, target, headers)
                self._visitors[visitor] = "idle"
                seconds = REQUEST_SECONDS
        except Exception as error:
            # The body may not have been read, so the connection ends with it.
            refusal = self._refusal_of(error)
            self.hub.publish(Rejection(refusal.http, refusal.what))
            visitor.stays = False
            self._refuse(visitor, refusal, target.partition("?")[0])

    def _refusal_of(self, error: Exception) -> Refusal:
        """Return what a client is told of an error; a bug is reported here, too."""
        if isinstance(error, Refusal):
            return error
        if isinstance(error, BadRequest):
            return Refusal(error.status, error.what)
        # A bug; its message may quote a prompt, its place does not.
        place = traceback.extract_tb(error.__traceback__)[-1]
        self.world.err(f"error: {type(error).__name__} in {place.name}, line {place.lineno}"
                       f"; this is a bug, please report it at {HOME_URL}/issues\n")
        return Refusal(500, "a bug in subagent-fleet")

    def _follow(self, visitor: Visitor) -> None:
        """Tell a client what happens until it leaves, is too far behind, or the gateway stops."""
        follower = Follower(self._latest)
        if len(self._followers) >= FOLLOWER_LIMIT:
            raise Refusal(503, "as many follow the events as may", retry_seconds=5)
        self._followers.append(follower)
        self._visitors[visitor] = "following"
        visitor.stays = False
        self.hub.subscribe(follower.take, catches_up=True)
        try:
            hello = {"kind": "hello", "schema": "subagent-fleet/events/1", **self._hello(),
                     "time": round(self.world.now(), 3)}
            frame = b"retry: 1000\ndata: %b\n\n" % render_json(hello)  # ms: a browser comes back
            visitor.stream(frame + follower.drain(), head=EVENTS_HEAD)
            while not (follower.is_late or follower.is_closed):
                comes = visitor.wait(follower.signal, QUIET_SECONDS)
                if comes and not follower.is_closed:
                    self.world.sleep(EVENTS_PAUSE_SECONDS)  # for others that come at once
                visitor.stream(follower.drain() or b": nothing happens\n\n")
            visitor.stream(follower.drain(), last=True)
        finally:
            self._followers.remove(follower)
            self.hub.unsubscribe(follower.take)
            follower.signal.close()

    def _check_host(self, visitor: Visitor, headers: Mapping[str, str]) -> None:
        """Refuse who a web page may have sent.

        A page can make a name of its own point here, so only names of this machine count.
        """
        # IPv4 on a socket of both families, and an IPv6 zone, are not part of an address.
        address, port = visitor.reached
        own = show_host(re.sub(r"^::ffff:(?=.*\.)|%.*", "", address))
        host = headers.get("host", "").lower()
        names = {f"{name}:{port}" for name in {*self._names, own}}
        if not names & {host, f"{host}:80"} or "origin" in headers:
            raise Refusal(403, "only who names this server's own address is served: "
                          f"http://{own}:{port}")


class Server(Reception):
    """The gateway: the closed door, routes."""

    def __init__(self, fleet: Fleet, key: str, world: World, *, receipts: str = "") -> None:
        name, _ = world.own_names()
        super().__init__(world, (show_host(fleet.gateway.host), "localhost", "127.0.0.1", "[::1]",
                                 name, f"{name}.local"))
        self.fleet, self._key = fleet, key
        self.scheduler = Scheduler(fleet, world.clock)
        self.ledger = Ledger(fleet.nodes)
        self.hub.subscribe(self.ledger.take)
        if receipts:
            self.hub.subscribe(ReceiptFile(world, receipts).take)

        # Learned: bytes a token, who takes no images, who does not know which field.
        self.ratios = dict.fromkeys(fleet.models, BYTES_A_TOKEN)
        self.blind: set[str] = set()
        self.unknown_fields: dict[str, set[str]] = {}  # of requests, by the model

        self._bodies = Allowance(BODIES_LIMIT_BYTES)
        self._pages = self._plan_pages()

    def _plan_pages(self) -> dict[str, object]:
        """Return the pages that never change, by path."""
        # In Anthropic's words and in OpenAI's at once; nobody knows when a model was made.
        models = [{"type": "model", "id": alias, "display_name": alias,
                   "created_at": "1970-01-01T00:00:00Z", "object": "model", "created": 0,
                   "owned_by": "subagent-fleet"} for alias in self.scheduler.candidates]
        pages: dict[str, object] = {
            "/": {"name": "subagent-fleet", "version": __version__},
            "/health/liveliness": "I'm alive!",
            "/v1/models": {"object": "list", "data": models, "has_more": False,
                           "first_id": models[0]["id"], "last_id": models[-1]["id"]}}
        pages.update((f"/v1/models/{model['id']}", model) for model in models)
        return pages

    def run(self, listener: Listener | None) -> None:
        """Serve until `stop`, then let what is being answered end; None waits for the port."""
        while not listener and not self.stops:  # it is another `up`'s, which may end before this
            self.world.sleep(TICK_SECONDS)
            with contextlib.suppress(FleetError):
                listener = self.world.listen(self.fleet.gateway.host, self.fleet.gateway.port)
        if listener:
            self.serve(listener)
        self.scheduler.close()  # who waits in the queue is refused at once
        self._end_visits()
        self._wake.close()

    def _hello(self) -> dict[str, Any]:
        return {"fleet": self.fleet.name, "config": fleet_digest(self.fleet)}

    def _refuse(self, visitor: Visitor, refusal: Refusal, path: str) -> None:
        dialect = dialect_of(path) or DIALECTS[Messages.path]
        visitor.reply(refusal.http, dialect.refuse(refusal), head=retry_header(refusal))

    def _respond(self, visitor: Visitor, method: str, target: str,
                 headers: dict[str, str]) -> None:
        from urllib.parse import unquote
        path = target.partition("?")[0]
        self._check_door(visitor, headers, path)
        dialect = dialect_of(path)
        if method == "POST" and dialect:
            self._respond_to_talk(visitor, headers, path, dialect)
            return

        if method == "GET" and path == EVENTS_PATH:
            visitor.read_body(HEADER_LIMIT_BYTES, REQUEST_SECONDS)
            self._follow(visitor)
            return

        page = self._page_at(unquote(path), visitor)
        if page is None or method not in ("GET", "HEAD"):
            raise Refusal(404, "there is nothing at this path")
        visitor.read_body(HEADER_LIMIT_BYTES, REQUEST_SECONDS)
        visitor.reply(200, render_json(page))

    def _page_at(self, path: str, visitor: Visitor) -> object:
        """Return the page at a path, None where there is none."""
        if path == "/fleet":
            return self.show()
        match = re.fullmatch(f"{PROOF_PATH}([0-9a-f]{{64}})", path)
        if match:
            return {"proof": prove_key(self._key, match[1], *visitor.reached)}
        return self._pages.get(path)

    def _respond_to_talk(self, visitor: Visitor, headers: dict[str, str], path: str,
                         dialect: Dialect) -> None:
        """Answer a request for an answer, or for how many tokens it would take."""
        size = self._body_size(headers)
        if not self._bodies.take(size):
            raise Refusal(503, "too much is being asked at once", retry_seconds=2)
        try:
            talk = dialect.parse(visitor.read_body(BODY_LIMIT_BYTES, BODY_SECONDS))
            self._check_alias(talk.alias)
            if path == dialect.count_path:
                visitor.reply(200, dialect.count(self._estimate(talk)))
                return
            Service(self, visitor, dialect, talk, dialect.conversation(headers, talk)).run()
        finally:
            self._bodies.give_back(size)

    def _body_size(self, headers: dict[str, str]) -> int:
        """Return how much memory a body may take; one that does not say may take all."""
        length = headers.get("content-length", "")
        if re.fullmatch("[0-9]{1,18}", length):
            return min(int(length), BODY_LIMIT_BYTES)
        return BODY_LIMIT_BYTES if "transfer-encoding" in headers else 0

    def _check_alias(self, alias: str) -> None:
        if alias in self.scheduler.candidates:
            return
        shown = re.sub(r"(?s).*[^\w.:/@[\]-].*", "…", alias[:128])  # it is logged
        known = ", ".join(f"`{name}`" for name in self.scheduler.candidates)
        raise Refusal(404, f"model: this fleet has no `{shown}`; it has {known}")

    def _estimate(self, talk: Talk) -> int:
        """Return how many tokens a talk may take, from what the model's last answers taught."""
        return self.translate(talk, self.scheduler.candidates[talk.alias][0][0]).estimate

    def translate(self, talk: Talk, model: Model) -> Translation:
        """Return a talk as a model is asked it, as far as is known what the model takes."""
        if model.name in self.blind:
            talk = talk.without_images()
        try:
            ask = backend_of(self.fleet.nodes[model.node]).chat(talk, model)
            payload: Any = ask.payload
            for name in self.unknown_fields.get(model.name, ()):
                payload.pop(name, None)
            body = render_json(payload)
        except (RecursionError, ValueError):  # from 3.12 on, more can be parsed than be followed
            raise Refusal(400, "body: nested too deeply") from None
        weight = weigh(body, talk)
        estimate = round(weight / self.ratios[model.name])
        return Translation(model, talk, ask, body, weight, estimate, tuple(payload))

    def _check_door(self, visitor: Visitor, headers: dict[str, str], path: str) -> None:
        """Refuse who has no key, and who is not meant; both take the same time."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        keys = [headers.get("x-api-key", "")]
        if scheme.lower() == "bearer":
            keys.append(token.strip())
        wanted = self._key.encode("utf-8")
        fits = [hmac.compare_digest(key.encode("latin-1"), wanted) for key in keys]
        self._check_host(visitor, headers)

        is_open = path in OPEN_PAGES or path.startswith(PROOF_PATH)
        if not any(fits) and not is_open:
            raise Refusal(401, "the key is missing or wrong; send it as `Authorization: Bearer "
                          "KEY` or `x-api-key: KEY`")

    def show(self) -> dict[str, Any]:
        """Return nodes, slots, the queue and totals as plain values."""
        places, waiting = self.scheduler.show()
        models = [{"name": model.name, "node": model.node, "alias": model.alias,
                   "ollama_model": model.ollama_model, "context": model.context,
                   **places[model.name]} for model in self.fleet.models.values()]
        nodes = [{"name": node.name, "endpoint": node.endpoint, **self.ledger.totals[node.name]}
                 for node in self.fleet.nodes.values()]
        return {"schema": "subagent-fleet/fleet/1", "fleet": self.fleet.name, "waiting": waiting,
                "config": fleet_digest(self.fleet), "nodes": nodes, "models": models}


# == 17. Traces ===============================================================
#
# Takes what the gateway wrote (receipts) and what Claude Code wrote (transcripts); gives which
# model on which machine served which agent, and whether that is what was planned. Pure: they are
# read in section 22. The two are joined by session, agent and request id. Both are anybody's text:
# a value of another type counts as absent, a line that is torn is passed over and named.
#
# Facts: Claude Code 2.1.197 and 2.1.326. What an agent is called is only in its transcript and
# beside it; of an answer, `requestId` is the gateway's own header, `message.model` what the server
# called itself, `requestedModel` what was asked (326). One answer is several lines, one a block.

PROMPT_LIMIT = 20_000  # characters of a prompt that are kept
REPORT_LIMIT = 4_000  # of an agent's last words
ERROR_LIMIT = 160
IDLE_SECONDS = 600.0  # no tool of Claude Code runs longer without a line
CUT_RATIO = 2.0  # a prompt thought to be so many times what the node counted was cut
GENERATING_SECONDS = 0.05  # less time than this tells no rate
CHANGING_TOOLS = ("Edit", "Write", "MultiEdit", "NotebookEdit", "Bash", "*")

# -- transcripts --

@dataclass(frozen=True)
class SessionAnswer:
    """One answer as a transcript has it, its lines together."""

    id: str  # the gateway's request id; of a server that gives none, the message's own
    line: int  # the last of its lines
    time: float
    asked: str  # the alias; 2.1.197 does not keep it: what answered
    input_tokens: int
    output_tokens: int
    calls: int
    stop: str  # end_turn, tool_use, max_tokens, …; "" where the client did not keep it
    error: str = ""  # the words of an API error, which stands in the place of an answer


@dataclass(frozen=True)
class Dispatch:
    """A call of the tool that starts a subagent."""

    line: int
    kind: str  # the agent's name
    model: str  # which the call itself names: it beats the agent's file
    prompt: str


@dataclass(frozen=True)
class Report:
    """What came back of a subagent to who started it."""

    line: int
    call: str  # the Dispatch that it answers
    status: str
    kind: str


class Transcript:
    """What one transcript says: fed line by line, it keeps only what a trace needs."""

    def __init__(self, path: str, agent: str = "") -> None:
        self.path = path  # as it is shown
        self.agent = agent  # its id; "" is the main session
        self.lines = 0
        self.torn: list[int] = []  # lines that are cut, or no JSON
        self.prompt = self.version = self.kind = self.words = ""
        self.began = self.ended = 0.0
        self.changed = 0.0  # when its file was: a tool that runs for long writes no answer
        self.answers: dict[str, SessionAnswer] = {}
        self.dispatches: dict[str, Dispatch] = {}  # by the call's id
        self.reports: dict[str, Report] = {}  # by the agent's id

    def feed(self, line: bytes) -> None:
        """Take the next line; what cannot matter is not parsed."""
        self.lines += 1
        line = line.rstrip()
        if not line:
            return
        matters = b'"assistant"' in line or (b'"toolUseResult"' in line and b'"agentId"' in line)
        if not self.prompt:
            matters = matters or b'"user"' in line
        is_whole = line.endswith(b"}")
        if is_whole and not matters:
            return

        value = parse_object(line) if is_whole else None
        if value is None:
            self.torn.append(self.lines)
        elif self.agent or value.get("isSidechain") is not True:
            self._take(value)

    def _take(self, value: dict[str, Any]) -> None:
        kind = read_field(value, "type")
        if kind not in ("user", "assistant"):
            return
        time = parse_time(read_field(value, "timestamp"))
        self.began = self.began or time
        self.ended = time or self.ended
        self.version = self.version or clean_line(read_field(value, "version"))
        self.kind = self.kind or read_field(value, "attributionAgent")
        if kind == "assistant":
            self._take_answer(value, time)
            return
        if not self.prompt and value.get("isMeta") is not True:
            self.prompt = _prompt_of(read_field(value, "message", dict).get("content"))
        self._take_report(value)

    def _take_answer(self, value: dict[str, Any], time: float) -> None:
        message = read_field(value, "message", dict)
        usage = read_field(message, "usage", dict)
        words, calls = "", 0
        for block in read_field(message, "content", list):
            if read_field(block, "type") == "text":
                words += read_field(block, "text")[:REPORT_LIMIT]
            elif read_field(block, "type") == "tool_use":
                calls += 1
                self._take_dispatch(block)

        error = ""
        if value.get("isApiErrorMessage") is True or message.get("model") == "<synthetic>":
            error = crop(words, ERROR_LIMIT) or "an error without words"
        spent = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        answer = SessionAnswer(
            id=(read_field(value, "requestId") or read_field(message, "id")
                or f"line {self.lines}"),
            line=self.lines, time=time,
            asked=read_field(value, "requestedModel") or read_field(message, "model"),
            input_tokens=sum(read_field(usage, name, int) for name in spent),
            output_tokens=read_field(usage, "output_tokens", int),
            calls=calls, stop=read_field(message, "stop_reason"), error=error)
        self._add(answer, words)

    def _add(self, answer: SessionAnswer, words: str) -> None:
        """Keep an answer, or the next block of one; a retry's error is not a block of it."""
        earlier = self.answers.get(answer.id)
        if earlier and not answer.error:
            answer = replace(
                answer, calls=earlier.calls + answer.calls, stop=answer.stop or earlier.stop,
                output_tokens=max(earlier.output_tokens, answer.output_tokens))
            self.words = (self.words + words)[:REPORT_LIMIT]
        else:
            self.words = words[:REPORT_LIMIT]
        self.answers[answer.id] = answer

    def _take_dispatch(self, block: dict[str, Any]) -> None:
        if read_field(block, "name") in ("Agent", "Task"):
            call = read_field(block, "input", dict)
            self.dispatches[read_field(block, "id")] = Dispatch(
                self.lines, read_field(call, "subagent_type"), read_field(call, "model"),
                read_field(call, "prompt")[:PROMPT_LIMIT])

    def _take_report(self, value: dict[str, Any]) -> None:
        result = read_field(value, "toolUseResult", dict)
        agent = read_field(result, "agentId")
        if not agent:
            return
        blocks = read_field(read_field(value, "message", dict), "content", list)
        calls = [read_field(block, "tool_use_id") for block in blocks]
        self.reports[agent] = Report(self.lines, "".join(calls[:1]), read_field(result, "status"),
                                     read_field(result, "agentType"))

    @property
    def last(self) -> SessionAnswer | None:
        """The answer that came last."""
        return next(reversed(self.answers.values()), None)

    @property
    def calls(self) -> int:
        """How many tools were called."""
        return sum(answer.calls for answer in self.answers.values())

    def place(self, line: int) -> str:
        """Return where a line stands, as evidence."""
        return f"{self.path}:{line}"


def parse_time(text: str) -> float:
    """Return the seconds since 1970 of a timestamp (`2026-11-18T06:37:54.354Z`), 0 of none."""
    if not text.endswith("Z"):
        return 0.0
    with contextlib.suppress(ValueError, OverflowError):  # 3.9 reads no Z
        return datetime.datetime.fromisoformat(f"{text[:-1]}+00:00").timestamp()
    return 0.0


def _prompt_of(content: object) -> str:
    """Return what a person typed, of a message's content; a command is its name."""
    texts = [content]
    if isinstance(content, list):
        texts = [read_field(block, "text") for block in content]
    text = "\n".join(str(each) for each in texts if isinstance(each, str) and each)
    typed = re.search("<command-name>(.{1,80}?)</command-name>", text)
    return typed[1] if typed else text[:PROMPT_LIMIT]


# -- the tree --

@dataclass(frozen=True)
class AgentLabel:
    """What lies beside a subagent's transcript (`agent-ID.meta.json`)."""

    kind: str = ""
    call: str = ""  # the Dispatch that started it
    is_built_in: bool = False


@dataclass(frozen=True)
class AgentTrace:
    """One agent of a session: the main one, whose id is "", or a subagent."""

    id: str
    kind: str  # its name; "" where nothing tells it
    parent: str  # the id of who started it
    transcript: Transcript | None
    receipts: tuple[Receipt, ...]
    dispatch: str = ""  # where that stands
    call: Dispatch | None = None
    report: Report | None = None
    is_built_in: bool = False

    @property
    def began(self) -> float:
        """When it was first heard of."""
        times = [receipt.time - receipt.total for receipt in self.receipts[:1]]
        if self.transcript and self.transcript.began:
            times.append(self.transcript.began)
        return min(times, default=0.0)

    @property
    def ended(self) -> float:
        """When it was last heard of."""
        times = [receipt.time for receipt in self.receipts[-1:]]
        if self.transcript:
            times.append(self.transcript.ended)
        return max(times, default=0.0)

    @property
    def unclaimed(self) -> list[SessionAnswer]:
        """The answers of its transcript that no receipt is for."""
        if not self.transcript:
            return []
        known = {receipt.id for receipt in self.receipts}
        return [answer for answer in self.transcript.answers.values()
                if answer.id not in known and not answer.error]


@dataclass(frozen=True)
class SessionTrace:
    """A session: its agents, each behind who started it."""

    id: str
    agents: tuple[AgentTrace, ...]
    # What is true of a transcript that a gateway did not write: which lines could not be read.
    torn: tuple[str, ...] = ()

    @property
    def main(self) -> AgentTrace:
        """The agent that a person talks to."""
        return self.agents[0]

    @property
    def prompt(self) -> str:
        """What it began with."""
        return self.main.transcript.prompt if self.main.transcript else ""

    def depth(self, agent: AgentTrace) -> int:
        """Return how many agents stand above one."""
        parents = {each.id: each.parent for each in self.agents}
        depth, place = 0, agent.id
        while place and depth < len(self.agents):
            place = parents.get(place, "")
            depth += 1
        return depth


def trace_session(session: str, transcripts: Iterable[Transcript],
                  labels: Mapping[str, AgentLabel], receipts: Iterable[Receipt]) -> SessionTrace:
    """Join what is known of a session."""
    by_agent = {transcript.agent: transcript for transcript in transcripts}
    served: dict[str, list[Receipt]] = {"": []}
    for receipt in receipts:
        served.setdefault(receipt.agent, []).append(receipt)

    agents = []
    for agent in dict.fromkeys([*by_agent, *served]):
        label = labels.get(agent, AgentLabel())
        agents.append(_trace_agent(agent, label, by_agent, tuple(served.get(agent, ()))))
    torn = tuple(transcript.place(line) for transcript in by_agent.values()
                 for line in transcript.torn)
    return SessionTrace(session, tuple(_in_order(agents)), torn)


def _trace_agent(agent: str, label: AgentLabel, transcripts: Mapping[str, Transcript],
                 receipts: tuple[Receipt, ...]) -> AgentTrace:
    """Return what is known of one agent: who started it is who has its call or its report."""
    own = transcripts.get(agent)
    trace = AgentTrace(agent, label.kind, "", own, receipts, is_built_in=label.is_built_in)
    if own:
        trace = replace(trace, kind=trace.kind or own.kind)
    if not agent:
        return replace(trace, kind="main")
    for parent, transcript in transcripts.items():
        report = transcript.reports.get(agent)
        call = transcript.dispatches.get(label.call or (report.call if report else ""))
        if call and parent != agent:
            trace = replace(trace, parent=parent, call=call, kind=trace.kind or call.kind,
                            dispatch=transcript.place(call.line))
        if report and parent != agent:
            trace = replace(trace, parent=parent, report=report, kind=trace.kind or report.kind)
    return trace


def _in_order(agents: Sequence[AgentTrace]) -> Iterator[AgentTrace]:
    """Yield agents as a tree is read: each behind who started it, in the order they began."""
    left = sorted(agents, key=lambda agent: (agent.id != "", agent.began))
    pending = left[:1]
    while left:
        agent = pending.pop() if pending else left[0]  # who is its own ancestor has no parent here
        if agent not in left:
            continue
        left.remove(agent)
        yield agent
        pending += reversed([each for each in left if each.parent == agent.id])


# -- what served an agent --

@dataclass(frozen=True)
class AgentSource:
    """An agent's file as it lies there now."""

    path: str
    line: int  # of its `model:`
    model: str  # what that names; "": its session's
    has_tools: bool
    may_change: bool  # it has a tool that writes, edits or runs
    changed: float


@dataclass(frozen=True)
class TraceFacts:
    """What an audit compares a session with."""

    fleet: Fleet | None
    now: float
    fleet_path: str = "fleet.yaml"
    fleet_changed: float = 0.0
    files: Mapping[str, AgentSource] = field(default_factory=dict)  # by agent

    @property
    def is_litellm(self) -> bool:
        """Tell whether LiteLLM serves, which says of no request where it went."""
        return self.fleet is not None and self.fleet.gateway.provider == "litellm"


@dataclass(frozen=True)
class Served:
    """What one model on one machine did for an agent."""

    model: str
    node: str  # "": not known
    planned: str  # yes, fallback, no, left or unknown
    why: str = ""
    at: float = 0.0  # when the first of them began
    requests: int = 0
    waited: float | None = None  # seconds in the queue, all together
    first_token: float | None = None  # the median, from the slot on
    rate: float | None = None  # tokens a second
    input_tokens: int = 0
    output_tokens: int = 0


def plan_served(agent: AgentTrace, facts: TraceFacts) -> list[Served]:
    """Return who served an agent, in the order they began."""
    groups: dict[tuple[str, str], list[Receipt]] = {}
    for receipt in agent.receipts:
        groups.setdefault((receipt.model or "", receipt.node or ""), []).append(receipt)
    rows = [_sum_up(group, facts) for group in groups.values()]

    others: dict[tuple[str, str], list[SessionAnswer]] = {}
    for answer in agent.unclaimed:
        others.setdefault((answer.asked, _origin_of(answer, facts)), []).append(answer)
    for (asked, origin), answers in others.items():
        rows.append(Served(
            asked, "", "left" if origin == "foreign" else "unknown", _ORIGINS[origin],
            answers[0].time, len(answers),
            input_tokens=sum(answer.input_tokens for answer in answers),
            output_tokens=sum(answer.output_tokens for answer in answers)))
    return rows


# Where an answer came from that no receipt is for.
_ORIGINS = {
    "foreign": "not by this gateway",
    "litellm": "LiteLLM does not say",
    "lost": "its receipt is gone",
    "unknown": "nobody wrote down where"}


def _origin_of(answer: SessionAnswer, facts: TraceFacts) -> str:
    """Return what is known of an answer without a receipt, by its id: ours have their own form."""
    if re.fullmatch("req_[0-9a-f]{24}", answer.id):
        return "lost"
    if facts.fleet is None or not answer.id.startswith("req_"):
        return "litellm" if facts.is_litellm else "unknown"
    # LiteLLM hands on no id of this form, so this one is its upstream's, or somebody else's.
    aliases = {model.alias for model in facts.fleet.models.values()}
    if facts.is_litellm and answer.asked in aliases:
        return "litellm"
    return "foreign"


def _sum_up(receipts: Sequence[Receipt], facts: TraceFacts) -> Served:
    """Return what the receipts of one model on one machine come to."""
    first = receipts[0]
    answered = [receipt for receipt in receipts if receipt.first_byte is not None]
    firsts = sorted(max((receipt.first_byte or 0) - (receipt.waited or 0), 0)
                    for receipt in answered)
    spans = [(receipt.output_tokens, receipt.total - (receipt.first_byte or 0))
             for receipt in answered]
    spans = [(tokens, span) for tokens, span in spans if tokens and span > GENERATING_SECONDS]
    seconds = sum(span for _, span in spans)
    planned, why = _judge_places(receipts, facts)

    model = first.model or first.alias
    if facts.fleet and first.model in facts.fleet.models:
        model = facts.fleet.models[first.model].ollama_model
    return Served(
        model, first.node or "", planned, why, first.time - first.total, len(receipts),
        waited=sum(receipt.waited or 0 for receipt in receipts),
        first_token=firsts[len(firsts) // 2] if firsts else None,
        rate=sum(tokens for tokens, _ in spans) / seconds if seconds else None,
        input_tokens=sum(receipt.input_tokens for receipt in receipts),
        output_tokens=sum(receipt.output_tokens for receipt in receipts))


_PLACE_ORDER = ("no", "unknown", "fallback", "yes")  # the worst first


def _judge_places(receipts: Sequence[Receipt], facts: TraceFacts) -> tuple[str, str]:
    """Return whether a model on a machine is what was planned for all of these, and why not."""
    if any(left_house(receipt, facts) for receipt in receipts):
        return "left", "left the house"
    verdicts = {_judge_place(receipt, facts): receipt for receipt in reversed(receipts)}
    planned = min(verdicts, key=_PLACE_ORDER.index)
    receipt = verdicts[planned]
    if receipt.node is None:
        return planned, f"nobody answered: {receipt.outcome}"
    if planned == "no":
        return planned, "not declared"
    if planned == "unknown":
        return planned, "the fleet file is another now" if facts.fleet else "no fleet file"
    failed = [each for each in receipts if each.outcome not in ("ok", "left", "stopped")]
    if planned == "fallback":
        return planned, _tell_tries(receipt)
    if failed:
        return planned, f"{len(failed)} failed: {failed[0].outcome}"
    return planned, ""


def _tell_tries(receipt: Receipt) -> str:
    """Return who failed before a request was answered; who failed just before is not asked."""
    tries = ", ".join(f"{tried.node}: {tried.why}" for tried in receipt.tries)
    return tries or "the first choice rested"


def _judge_place(receipt: Receipt, facts: TraceFacts) -> str:
    """Return whether a request went to a planned machine: yes, fallback, no or unknown."""
    if receipt.node is None:
        return "yes"  # nobody was asked
    if facts.fleet is None:
        return "unknown"
    model = facts.fleet.models.get(receipt.model or "")
    chain = (receipt.alias, *plan_fallbacks(facts.fleet).get(receipt.alias, ()))
    if model and model.node == receipt.node and model.alias in chain:
        return "yes" if model.alias == receipt.alias else "fallback"
    return "unknown" if facts.fleet_changed > receipt.time else "no"


def left_house(receipt: Receipt, facts: TraceFacts) -> bool:
    """Tell whether a request was answered beyond the person's own machines and networks."""
    if receipt.node is None:
        return False
    if receipt.cloud:
        return True
    if facts.fleet is None or receipt.node not in facts.fleet.nodes:
        return False
    model = facts.fleet.models.get(receipt.model or "")
    is_remote = bool(model and (model.cloud or leaves_house(model.ollama_model)))
    return is_remote or bool(plan_node_stakes([facts.fleet.nodes[receipt.node]]))


def plan_state(agent: AgentTrace, now: float) -> str:
    """Return what an agent is doing: done, failed, cut off or at work; "" where nothing tells."""
    transcript = agent.transcript
    if not transcript:
        return "at work" if now - agent.ended < 5 else ""
    last = transcript.last
    if last and last.error:
        return "failed"
    if last and _has_ended(agent, last):
        return "done"
    is_over = agent.report is not None and agent.report.status != "async_launched"
    if is_over or now - max(agent.ended, transcript.changed) > IDLE_SECONDS:
        return "cut off"
    return "at work"


def _has_ended(agent: AgentTrace, last: SessionAnswer) -> bool:
    """Tell whether an agent's last answer was meant to be its last."""
    if last.stop in ("end_turn", "stop_sequence"):
        return True
    is_reported = agent.report is not None and agent.report.status == "completed"
    return is_reported and not last.stop and not last.calls


# -- the audit --

@dataclass(frozen=True)
class Verdict:
    """The answer to one question about one subagent."""

    question: str
    answer: str  # yes, no or unknown
    what: str = ""
    evidence: tuple[str, ...] = ()  # FILE:LINE, or the id of a request


# The name of each question, and what is asked; the functions stand below.
QUESTIONS = {
    "Model": "served by the model its file names",
    "Machine": "on a planned machine or a declared fallback",
    "House": "nothing left the house",
    "Context": "its context was never cut",
    "End": "ended by itself, and called tools for what it reports"}


def audit_agent(agent: AgentTrace, session: SessionTrace, facts: TraceFacts) -> tuple[Verdict, ...]:
    """SessionAnswer the five questions about a subagent."""
    answers = (_audit_model(agent, session, facts), _audit_machine(agent, facts),
               _audit_house(agent, facts), _audit_context(agent, facts), _audit_end(agent, facts))
    return tuple(replace(answer, question=question)
                 for question, answer in zip(QUESTIONS, answers))


def _yes(what: str = "") -> Verdict:
    return Verdict("", "yes", what)


def _no(what: str, *evidence: str) -> Verdict:
    return Verdict("", "no", what, tuple(each for each in evidence if each))


def _unknown(what: str, *evidence: str) -> Verdict:
    return Verdict("", "unknown", what, tuple(each for each in evidence if each))


def _evidence(agent: AgentTrace, request: str) -> tuple[str, ...]:
    """Return a request's id, and where its answer stands."""
    answer = agent.transcript.answers.get(request) if agent.transcript else None
    if answer and agent.transcript:
        return (agent.transcript.place(answer.line), request)
    return (request,)


def _asked(agent: AgentTrace) -> dict[str, str]:
    """Return {alias an agent asked: its first request for that}; all that is known of it."""
    asked: dict[str, str] = {}
    for receipt in agent.receipts:
        asked.setdefault(receipt.alias, receipt.id)
    for answer in agent.unclaimed:
        asked.setdefault(answer.asked, answer.id)
    return asked


def _audit_model(agent: AgentTrace, session: SessionTrace, facts: TraceFacts) -> Verdict:
    """Was it served by the model its file names?"""
    asked = _asked(agent)
    if not asked:
        return _unknown("no request of it was written down")
    source = facts.files.get(agent.kind.lower())
    if not source and agent.is_built_in:
        return _yes("built into Claude Code, it has no file")
    if not source:
        return _unknown(f"no file names an agent `{agent.kind or agent.id}`", agent.dispatch)

    wanted = _resolve_model(source.model, agent, session, facts)
    others = [alias for alias in asked if alias != wanted]
    if not wanted:
        return _unknown(f"what `{source.model or 'inherit'}` stood for is not known",
                        f"{source.path}:{source.line}")
    if not others:
        return _yes()
    place, request = f"{source.path}:{source.line}", asked[others[0]]
    if agent.call and agent.call.model:
        return _no(f"its call named the model `{agent.call.model}`, which beats its file: asked "
                   f"was `{others[0]}`, not `{wanted}`", agent.dispatch, place, request)
    if source.changed > agent.began:
        return _unknown(f"its file was edited since: it asked `{others[0]}` and names `{wanted}` "
                        "now", place, *_evidence(agent, request))
    return _no(f"its file names `{wanted}`, it asked `{others[0]}`", place,
               *_evidence(agent, request))


def _resolve_model(model: str, agent: AgentTrace, session: SessionTrace,
                   facts: TraceFacts) -> str:
    """Return the alias that Claude Code makes of a `model:`; "" where that cannot be known."""
    name = re.sub(r"\[\w+\]$", "", model)
    if name.lower() in ("", "inherit"):
        parents = [each for each in session.agents if each.id == agent.parent]
        return next(iter(_asked(parents[0])), "") if parents else ""
    tier = {"best": "opus"}.get(name.lower(), name.lower())
    if tier in TIERS and tier != "main":
        return facts.fleet.models[plan_tiers(facts.fleet)[tier]].alias if facts.fleet else ""
    return name


def _audit_machine(agent: AgentTrace, facts: TraceFacts) -> Verdict:
    """Did planned machines or declared fallbacks serve it?"""
    places = {receipt.id: _judge_place(receipt, facts) for receipt in agent.receipts}
    for receipt in agent.receipts:
        if places[receipt.id] == "no":
            return _no(f"`{receipt.model}` on `{receipt.node}` answered, which is neither "
                       f"`{receipt.alias}` nor a fallback of it in {facts.fleet_path}",
                       *_evidence(agent, receipt.id))
    for receipt in agent.receipts:
        if places[receipt.id] == "unknown":
            why = "there is no fleet file"
            if facts.fleet:
                why = f"{facts.fleet_path} was edited since"
            return _unknown(f"{why}: `{receipt.model}` on `{receipt.node}` answered",
                            *_evidence(agent, receipt.id))
    for answer in agent.unclaimed:
        if _origin_of(answer, facts) == "foreign":
            return _no(f"`{answer.asked}` was answered, and not by this gateway",
                       *_evidence(agent, answer.id))
    missing = _missing(agent, facts)
    if missing:
        return missing

    fallbacks = [receipt for receipt in agent.receipts if places[receipt.id] == "fallback"]
    if fallbacks:
        first = fallbacks[0]
        return Verdict("", "yes", f"{len(fallbacks)} by a declared fallback, `{first.model}` on "
                       f"`{first.node}` ({_tell_tries(first)})", (first.id,))
    return _yes()


def _missing(agent: AgentTrace, facts: TraceFacts) -> Verdict | None:
    """Return why it cannot be known where some answers came from, None where it can."""
    for answer in agent.unclaimed:
        origin = _origin_of(answer, facts)
        what = {"foreign": f"`{answer.asked}` was not asked through this gateway",
                "litellm": "LiteLLM does not say which machine answered",
                "lost": "the receipt is gone: the file has turned over twice",
                "unknown": "no receipt says who answered"}[origin]
        return _unknown(what, *_evidence(agent, answer.id))
    if not agent.receipts:
        return _unknown("no request of it was written down")
    return None


def _audit_house(agent: AgentTrace, facts: TraceFacts) -> Verdict:
    """Did nothing leave the house?"""
    for receipt in agent.receipts:
        if left_house(receipt, facts):
            return _no(f"`{receipt.model}` on `{receipt.node}` is beyond your machines and "
                       "networks", *_evidence(agent, receipt.id))
    for answer in agent.unclaimed:
        if _origin_of(answer, facts) == "foreign":
            return _no(f"`{answer.asked}` was answered, and not by this gateway",
                       *_evidence(agent, answer.id))
    missing = _missing(agent, facts)
    if missing:
        return missing
    if facts.fleet is None:
        return _unknown("there is no fleet file, which says where its machines are")
    return _yes()


def _audit_context(agent: AgentTrace, facts: TraceFacts) -> Verdict:
    """Was its context never cut, and none of its prompts refused?"""
    latest: dict[tuple[str, str | None], Receipt] = {}
    for receipt in agent.receipts:
        if receipt.outcome == "prompt_too_long":
            return _no(f"a prompt was refused: longer than the {receipt.context or 0:,} tokens of "
                       f"`{receipt.model}`", *_evidence(agent, receipt.id))
        earlier = latest.get((receipt.alias, receipt.model))
        if _was_cut(receipt, earlier):
            return _no(f"`{receipt.node}` counted {receipt.input_tokens:,} tokens of a prompt of "
                       f"about {receipt.sent:,}", *_evidence(agent, receipt.id))
        if receipt.input_tokens:
            latest[receipt.alias, receipt.model] = receipt

    if agent.transcript:
        for answer in agent.transcript.answers.values():
            if "prompt is too long" in answer.error.lower():
                return _no("a prompt was refused as too long", agent.transcript.place(answer.line))
    missing = _missing(agent, facts)
    if missing:
        return missing
    if not any(receipt.sent for receipt in agent.receipts):
        return _unknown("these receipts, of an older version, do not say what was sent",
                        agent.receipts[0].id)
    return _yes()


def _was_cut(receipt: Receipt, earlier: Receipt | None) -> bool:
    """Tell whether a node saw less of a prompt than it was sent."""
    counted, sent = receipt.input_tokens, receipt.sent
    if receipt.outcome != "ok" or not counted or not sent:
        return False
    if sent > CUT_RATIO * counted:
        return True
    # A prompt that grew and is counted as no more is as good: what is sent is only an estimate,
    # but the same one both times.
    return (earlier is not None and earlier.sent > 0 and sent > 1.1 * earlier.sent
            and counted <= earlier.input_tokens)


# Words by which a report says that something was done, or that something was looked at.
_CLAIMS = _Pattern(
    r"(?i)\b(?:i(?:'ve| have)?|we(?:'ve| have)?|was|were|been|all|now) (?:\w+ )?(?:read|looked|"
    r"searched|checked|reviewed|inspected|examined|ran|run|tested|wrote|written|created|added|"
    r"edited|updated|changed|fixed|implemented|refactored|removed|verified|pass(?:es|ed)?)\b"
    r"|\btests? pass|\b[\w/-]+\.(?:py|js|ts|tsx|go|rs|java|rb|c|h|cpp|css|html|md|json|ya?ml|sh)\b")


def _audit_end(agent: AgentTrace, facts: TraceFacts) -> Verdict:
    """Did it end by itself, and call at least one tool where it claims work?"""
    transcript = agent.transcript
    if not transcript or not transcript.last:
        return _unknown("Claude Code kept no transcript of it", agent.dispatch)
    last = transcript.last
    place, state = transcript.place(last.line), plan_state(agent, facts.now)
    if state == "failed":
        return _no(f"it ended by an error: {last.error}", place)
    if last.stop == "max_tokens":
        return _no("its last answer was cut at its longest", place, last.id)
    if state == "at work":
        return _unknown("it is still at work", place)
    if state == "cut off":
        return _no("it did not end: its transcript stops in the middle", place, last.id)

    source = facts.files.get(agent.kind.lower())
    if transcript.calls or (source and not source.has_tools):
        return _yes()
    may_change = source is None or source.may_change
    if transcript.words.strip() and (may_change or _CLAIMS.search(transcript.words)):
        return _no("it reports, and called no tool at all", place, last.id)
    return _yes("it called no tool, and claims nothing that needs one")


# -- what is told of a session --

@dataclass(frozen=True)
class AgentReport:
    """What is told of one agent."""

    agent: AgentTrace
    depth: int
    state: str
    served: tuple[Served, ...]
    verdicts: tuple[Verdict, ...] = ()


@dataclass(frozen=True)
class SessionReport:
    """What is told of a session."""

    session: SessionTrace
    facts: TraceFacts
    agents: tuple[AgentReport, ...]

    @property
    def began(self) -> float:
        """When its first agent was first heard of."""
        return min((each.agent.began for each in self.agents if each.agent.began), default=0.0)

    @property
    def ended(self) -> float:
        """When one of its agents was last heard of."""
        return max(each.agent.ended for each in self.agents)

    @property
    def refused(self) -> list[Verdict]:
        """What was answered with no."""
        return [verdict for each in self.agents for verdict in each.verdicts
                if verdict.answer == "no"]


def report_session(session: SessionTrace, facts: TraceFacts, *, audits: bool) -> SessionReport:
    """Return what is told of a session; the audit is of its subagents."""
    agents = []
    for agent in session.agents:
        verdicts: tuple[Verdict, ...] = ()
        if audits and agent.id:
            verdicts = audit_agent(agent, session, facts)
        agents.append(AgentReport(agent, session.depth(agent), plan_state(agent, facts.now),
                                  tuple(plan_served(agent, facts)), verdicts))
    return SessionReport(session, facts, tuple(agents))


def name_agents(session: SessionTrace, fleet: Fleet | None) -> SessionTrace:
    """Name the agents that nothing names, by their alias: `planner?` where only one has it."""
    owners = agents_by_alias(fleet) if fleet else {}
    agents = []
    for agent in session.agents:
        names = owners.get(next(iter(_asked(agent)), ""), [])
        kind = agent.kind
        if not kind:
            kind = f"{names[0]}?" if len(names) == 1 else agent.id
        agents.append(replace(agent, kind=kind))
    return replace(session, agents=tuple(agents))


def show_session(report: SessionReport, *, prompts: bool) -> dict[str, Any]:
    """Return what `--json` says of a session; of a prompt only its first line, unless asked."""
    session = report.session
    agents = []
    for each in report.agents:
        agent = each.agent
        shown: dict[str, Any] = {
            "agent": agent.id, "name": agent.kind, "parent": agent.parent if agent.id else None,
            "state": each.state, "began": agent.began, "ended": agent.ended,
            "transcript": agent.transcript.path if agent.transcript else None,
            "served": list(each.served), "audit": list(each.verdicts)}
        if prompts:
            shown["prompt"] = agent.transcript.prompt if agent.transcript else None
        agents.append(shown)
    return {"session": session.id, "prompt": crop(clean_line(first_line(session.prompt)), 80),
            "began": report.began, "ended": report.ended, "torn": list(session.torn),
            "agents": agents}



# == 18. Dashboard ============================================================
#
# The fleet on one page, for a browser on this machine. It can only be looked at: what is known of
# the fleet (a picture, sent anew when it changes) and what happens go to it as JSON, nothing comes
# back. A random token in the address becomes a cookie; without it there is nothing to see.

PAGE_PORT = 8080
PICTURE_SECONDS = 2.0  # how often machines are asked while somebody looks
FINDINGS_SECONDS = 60.0
LISTEN_AGAIN_SECONDS = 0.5
LOG_LINES = 100
LOG_PART_BYTES = 32 * 1024
# Nothing but what the page itself brings, and nobody may frame it or learn where it lies.
PAGE_HEAD = ("Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
             "Referrer-Policy: no-referrer\r\nCross-Origin-Resource-Policy: same-origin\r\n"
             "Cross-Origin-Opener-Policy: same-origin\r\nContent-Security-Policy: "
             "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
             "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n")


class Dashboard(Reception):
    """Serves the page, and what it shows, to who has the token."""

    def __init__(self, world: World) -> None:
        super().__init__(world, ("127.0.0.1", "localhost", "[::1]"))
        self.token = world.token(32)
        self._tickets: list[str] = []  # each opens the page once
        self._picture = b""

    @property
    def is_watched(self) -> bool:
        return bool(self._followers)

    def run(self, listener: Listener) -> None:
        """Serve until `stop`."""
        self.serve(listener)
        self._end_visits()
        self._wake.close()

    def ticket(self) -> str:
        """Return what opens the page once: the arguments of a browser can be read by others."""
        self._tickets.append(self.world.token(32))
        return self._tickets[-1]

    def show(self, picture: Mapping[str, Any]) -> None:
        """Send what is known of the fleet to all who look, where it has changed."""
        frame = b"data: %b\n\n" % render_json({"kind": "picture", **picture})
        if frame != self._picture:
            self._picture = frame
            self._wake_followers()

    def begin_anew(self) -> None:
        """Forget what was under way; who looks comes back and is told what is so."""
        self.hub.forget()
        for follower in self._followers.copy():
            follower.close()

    def _wake_followers(self) -> None:
        for follower in self._followers.copy():
            follower.signal.set()

    def _latest(self) -> bytes:
        return self._picture

    def _hello(self) -> dict[str, Any]:
        return {"version": __version__}

    def _respond(self, visitor: Visitor, method: str, target: str,
                 headers: dict[str, str]) -> None:
        self._check_host(visitor, headers)
        visitor.read_body(HEADER_LIMIT_BYTES, REQUEST_SECONDS)
        path, _, query = target.partition("?")
        if method not in ("GET", "HEAD"):
            raise Refusal(405, "this page can only be looked at")

        cookie = f"subagent_fleet_{visitor.reached[1]}"
        if path == "/" and query.startswith("token="):
            self._check_token(query[len("token="):])
            head = (f"Set-Cookie: {cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/\r\n")
            self._send_page(visitor, DOOR_PAGE, head)
            return

        cookies = dict(part.strip().partition("=")[::2]
                       for part in headers.get("cookie", "").split(";"))
        self._check_token(cookies.get(cookie, ""))
        if path == EVENTS_PATH and method == "GET":
            self._follow(visitor)
        elif path == "/":
            self._send_page(visitor, DASHBOARD_PAGE)
        else:
            raise Refusal(404, "there is nothing at this path")

    def _check_token(self, typed: str) -> None:
        """Refuse whoever has not the token; how long that takes tells nothing."""
        if proves_key(typed, self.token):
            return
        used = [ticket for ticket in self._tickets if proves_key(typed, ticket)]
        if used:
            self._tickets.remove(used[0])
            return
        raise Refusal(401, "open the whole address that `subagent-fleet ui` printed: it ends in "
                      "a token that is missing or wrong here")

    def _send_page(self, visitor: Visitor, page: str, head: str = "") -> None:
        """Send a page whose own script and style, and no others, may be used."""
        nonce = self.world.token(16)
        content = page.replace("NONCE", nonce).encode("utf-8")
        head += PAGE_HEAD.format(nonce=nonce)
        visitor.reply(200, content, head=head, kind="text/html; charset=utf-8")

    def _refuse(self, visitor: Visitor, refusal: Refusal, path: str) -> None:
        head = PAGE_HEAD.format(nonce="none")
        visitor.reply(refusal.http, f"{refusal.what}\n".encode(), head=head,
                      kind="text/plain; charset=utf-8")


# -- what is known of a fleet, as plain values --

@dataclass(frozen=True)
class Sight:
    """What is seen of a fleet at one moment."""

    fleet: Fleet
    states: Mapping[str, NodeState]
    gateway: Finding
    now: float
    typing: Typing
    is_followed: bool = False  # the gateway tells what happens
    findings: Sequence[Finding] = ()
    warmup: Sequence[Mapping[str, Any]] = ()
    tasks: Sequence[Mapping[str, Any]] = ()
    names: Sequence[Mapping[str, str]] = ()  # {session, agent, name} of who asked
    log: str = ""  # of LiteLLM, its end


def plan_picture(sight: Sight) -> dict[str, Any]:
    """Return what the page shows of a fleet, apart from what happens."""
    fleet, states = sight.fleet, sight.states
    routes = {name: plan_route_state(fleet, states, model)
              for name, model in fleet.models.items()}
    sentence = add_gateway(plan_next_step(fleet, states, routes), sight.gateway)
    places = _plan_capacities(fleet)
    models = []
    for name, model in fleet.models.items():
        models.append({"name": name, "node": model.node, "runs": model.ollama_model,
                       "alias": model.alias, "context": model.context,
                       "slots": places[name].slots, "fallback": list(model.fallback),
                       **_picture_route(routes[name])})

    agents = [{"name": "main", "model": plan_tiers(fleet)["main"]}]
    agents += [{"name": agent.name, "model": agent.model} for agent in fleet.agents.values()]
    return {
        "fleet": fleet.name,
        "ready": sentence.startswith("Ready:"),
        "sentence": as_typed(sentence, sight.typing),
        "hint": as_typed("subagent-fleet launch claude", sight.typing),
        "gateway": {"url": gateway_url(fleet.gateway), "says": sight.gateway.what,
                    "provider": fleet.gateway.provider, "followed": sight.is_followed},
        "machines": [_picture_machine(sight, node) for node in fleet.nodes.values()],
        "models": models,
        "agents": agents,
        "findings": [show_record(finding) for finding in sight.findings
                     if finding.level in ("error", "warning")],
        "warmup": list(sight.warmup),
        "tasks": list(sight.tasks),
        "names": list(sight.names),
        "log": parse_log(sight.log),
    }


def _picture_route(route: RouteState) -> dict[str, Any]:
    return {"state": route.state, "instead": route.fallback}


def _picture_machine(sight: Sight, node: Node) -> dict[str, Any]:
    """Return what the card of a machine shows."""
    state = sight.states[node.name]
    loaded = []
    for model in state.loaded:
        stays = format_expiry(model.expires, sight.now)
        loaded.append({"name": model.name, "bytes": model.size, "context": model.context,
                       "gpu": model.gpu_percent, "stays": stays})
    memory = None
    if node.memory_gb:
        memory = node.memory_gb * 1e9
    return {"name": node.name, "endpoint": node.endpoint,
            "colour": plan_machine_colours(sight.fleet.nodes)[node.name],
            "runs": f"{backend_of(node).title} {state.version}".strip(),
            "online": state.online, "why": state.reason,
            "mend": as_typed(state.mend, sight.typing) if state.reason else "",
            "latency": state.latency_ms, "memory": memory, "loaded": loaded}


_SECRET = _Pattern(r"sk-[\w-]{4,}|(?i:bearer) \S+")
_SEVERITIES = (("error", _Pattern(r"ERROR|CRITICAL|Traceback|Exception|Error:")),
               ("warning", _Pattern(r"WARN")))


def parse_log(text: str) -> list[dict[str, str]]:
    """Return the last lines of a program's log with how severe they are; no key is in them."""
    lines = []
    for line in text.splitlines()[-LOG_LINES:]:
        shown = _SECRET.sub("(a key)", clean_line(line))[:500]
        level = next((name for name, pattern in _SEVERITIES if pattern.search(shown)), "info")
        if shown.strip():
            lines.append({"level": level, "line": shown})
    return lines


# == 19. Tasks ================================================================

# Takes a task file and a journal; gives the state of every task and the next step. Pure.


# == 20. Supervisor ===========================================================

# Takes tasks; runs an agent in a worktree for each, and keeps the journal.


# == 21. Demo =================================================================
#
# A fleet with nothing installed: machines that are simulated, and a client that plays a session of
# Claude Code's on them. The simulated node is the server side of section 10's Ollama: the tests
# know no other. The commands between are the real ones; `demo` types them (section 24).

# -- a simulated node --

FOR_EVER = "2318-12-01T10:00:00.123456789+01:00"  # as Ollama says when a model is to stay


@dataclass(frozen=True)
class Pace:
    """How fast a simulated machine is; 0: it takes no time."""

    load_seconds: float = 0.0
    prompt_rate: float = 0.0  # tokens a second
    answer_rate: float = 0.0


@dataclass(frozen=True)
class NodeAnswer:
    """What a simulated node says: one value, or lines as they come."""

    status: int
    value: Any  # a list is sent as lines, bytes as they are


class SimulatedNode(Reception):
    """Answers as Ollama 0.32.15 does, for models that are made up.

    `models` says of each by its name what Ollama would: size, parameters, quantization, family,
    capabilities, context, remote. `loaded` is {name: context}; `reply` makes the pieces of a
    model's answer of what it is asked.
    """

    def __init__(self, world: World, models: Mapping[str, Mapping[str, Any]], *,
                 host: str = "127.0.0.1", port: int = 0, pace: Pace = Pace()) -> None:
        super().__init__(world, ())
        self.models: dict[str, dict[str, Any]] = {}
        for name, told in models.items():
            self.models[name if ":" in name.rpartition("/")[2] else f"{name}:latest"] = dict(told)
        self.pace, self.port = pace, port
        self.loaded: dict[str, int] = {}
        self.pullable: set[str] = set()
        self.version, self.gpu_percent, self.most_loaded = "0.32.15", 100, 3
        self.any_origin = False  # as under OLLAMA_ORIGINS=*
        self._host = host
        self._serving: threading.Thread | None = None
        self.wake()

    @property
    def endpoint(self) -> str:
        """Where it answers."""
        return f"http://{show_host(self._host)}:{self.port}"

    def wake(self) -> None:
        """Listen, at the port that it has had before."""
        listener = self.world.listen(self._host, self.port)
        self.port = listener.port
        self.stops.clear()
        self._wake.clear()
        self._serving = threading.Thread(target=self.serve, args=(listener,), daemon=True)
        self._serving.start()

    def fall_asleep(self) -> None:
        """Answer nobody, and end what is being answered; what was loaded is gone."""
        self.stop("asleep")
        if self._serving:
            self._serving.join()
        for visitor in self._visitors.copy():
            visitor.cut()
        self.loaded.clear()

    def close(self) -> None:
        """End for good."""
        self.fall_asleep()
        self._wake.close()

    def reply(self, payload: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the messages that an answer is made of, one a token."""
        return [{"content": piece} for piece in ("PO", "NG")]

    def count(self, payload: dict[str, Any]) -> int:
        """Return how many tokens a prompt has."""
        return len(render_json([payload.get("messages"), payload.get("tools")])) // 4

    # -- what Ollama answers --

    def answer(self, path: str, payload: Any) -> NodeAnswer:
        """Return what it says to a request."""
        if path == "/api/version":
            return NodeAnswer(200, {"version": self.version})
        if path == "/api/tags":
            return NodeAnswer(200, {"models": [self._tag(name) for name in self.models]})
        if path == "/api/ps":
            return NodeAnswer(200, {"models": [self._show_loaded(name) for name in self.loaded]})
        typed = read_field(payload, "model")
        if path == "/api/pull":
            return self._pull(full_model_name(typed))
        if path not in ("/api/show", "/api/chat"):
            return NodeAnswer(404, b"404 page not found")
        for name in self.models:
            if full_model_name(name) == full_model_name(typed):
                return self._show(name) if path == "/api/show" else self._chat(name, payload)
        return NodeAnswer(404, {"error": f"model '{typed}' not found"})

    def _tag(self, name: str) -> dict[str, Any]:
        told = self.models[name]
        tag = {"name": name, "model": name, "modified_at": "2026-08-21T10:00:00Z",
               "size": told.get("size", 4_700_000_000), "digest": "0" * 64,
               "details": {"parent_model": "", "format": "gguf",
                           "family": told.get("family", "llama"), "families": None,
                           "parameter_size": told.get("parameters", "7.6B"),
                           "quantization_level": told.get("quantization", "Q4_K_M")},
               "capabilities": ["completion"]}  # the real one misses the tools here, too
        if told.get("remote"):
            tag.update(remote_host=told["remote"], remote_model=name)
        return tag

    def _show_loaded(self, name: str) -> dict[str, Any]:
        size = self.models[name].get("size", 4_700_000_000)
        return {"name": name, "model": name, "size": size, "digest": "0" * 64, "details": {},
                "expires_at": FOR_EVER, "size_vram": size * self.gpu_percent // 100,
                "context_length": self.loaded[name]}

    def _show(self, name: str) -> NodeAnswer:
        told = self.models[name]
        info = {"general.architecture": "llama",
                "llama.context_length": told.get("context", 131072)}
        return NodeAnswer(200, {
            "license": "", "details": self._tag(name)["details"], "model_info": info,
            "capabilities": told.get("capabilities", ["completion", "tools"])})

    def _chat(self, name: str, payload: dict[str, Any]) -> NodeAnswer:
        if payload.get("think") and "thinking" not in self.models[name].get("capabilities", ()):
            words = f"\"{payload['model']}\" does not support thinking"
            return NodeAnswer(400, {"error": words})
        done = {"model": payload["model"], "created_at": "2026-08-21T10:00:00Z", "done": True,
                "message": {"role": "assistant", "content": ""}}
        if payload.get("keep_alive") == 0:
            self.loaded.pop(name, None)
            return NodeAnswer(200, {**done, "done_reason": "unload"})
        self._load(name, payload)
        if not payload["messages"]:
            return NodeAnswer(200, {**done, "done_reason": "load"})

        pieces = self.reply(payload)
        lines = [{**done, "done": False, "message": {"role": "assistant", "content": "", **piece}}
                 for piece in pieces]
        last = {**done, "done_reason": "stop", "prompt_eval_count": self.count(payload),
                "eval_count": len(pieces)}
        if payload.get("stream", True):
            return NodeAnswer(200, [*lines, last])
        whole = "".join(piece.get("content", "") for piece in pieces)
        return NodeAnswer(200, {**last, "message": {"role": "assistant", "content": whole}})

    def _load(self, name: str, payload: dict[str, Any]) -> None:
        """Hold a model with the context that it is asked with; the one held longest makes room."""
        context = read_field(payload, "options", dict).get("num_ctx", 4096)
        held = self.loaded.pop(name, None)
        if held != context:
            self.world.sleep(self.pace.load_seconds)
        self.loaded[name] = min(context, self.models[name].get("context", 131072))
        while len(self.loaded) > self.most_loaded:
            del self.loaded[next(iter(self.loaded))]

    def _pull(self, name: str) -> NodeAnswer:
        lines: list[dict[str, Any]] = [{"status": "pulling manifest"}]
        if name not in self.pullable:
            return NodeAnswer(200, [*lines, {"error": "pull model manifest: file does not exist"}])
        self.models[name] = {}
        for layer, size in (("a", 1000), ("b", 3000)):
            step = {"status": f"pulling {layer}", "digest": f"sha256:{layer}", "total": size}
            lines += [step, {**step, "completed": size}]
        return NodeAnswer(200, [*lines, {"status": "verifying sha256 digest"},
                                {"status": "success"}])

    # -- how it goes over the wire --

    def _respond(self, visitor: Visitor, method: str, target: str,
                 headers: dict[str, str]) -> None:
        body = visitor.read_body(BODY_LIMIT_BYTES, BODY_SECONDS)
        if headers.get("origin", "").startswith("https://") and not self.any_origin:
            visitor.reply(403, b"")
            return
        answer = self.answer(target, parse_json(body) if body else None)
        head = "Access-Control-Allow-Origin: *\r\n" if self.any_origin else ""
        if isinstance(answer.value, list):
            self._send_lines(visitor, answer.value, head)
        elif isinstance(answer.value, bytes):
            visitor.reply(answer.status, answer.value, head=head)
        else:
            visitor.reply(answer.status, render_json(answer.value), head=head)

    def _send_lines(self, visitor: Visitor, lines: Sequence[Mapping[str, Any]], head: str) -> None:
        """Send lines as a model makes them: after it has read the prompt, one a token."""
        last = lines[-1]
        if self.pace.prompt_rate and last.get("prompt_eval_count"):
            self.world.sleep(last["prompt_eval_count"] / self.pace.prompt_rate)
        head += "Content-Type: application/x-ndjson\r\n"
        for line in lines:
            if self.stops:
                raise ClientGone()
            visitor.stream(render_json(line) + b"\n", head=head)
            head = ""
            if self.pace.answer_rate and line is not last:
                self.world.sleep(1 / self.pace.answer_rate)
        visitor.stream(b"", last=True)

    def _refuse(self, visitor: Visitor, refusal: Refusal, path: str) -> None:
        visitor.reply(refusal.http, render_json({"error": refusal.what}))

    def _hello(self) -> dict[str, Any]:
        return {}


# -- the machines of the demo, and what runs on them --

@dataclass(frozen=True)
class DemoMachine:
    """A machine that the demo simulates."""

    model: str
    told: Mapping[str, Any]
    pace: Pace


# Their names say what they are, so that every line that names one does.
DEMO_MACHINES = {
    "sim-laptop": DemoMachine("qwen3:8b", {
        "size": 5_200_000_000, "parameters": "8.2B", "family": "qwen3", "context": 40960},
        Pace(0.2, 1500.0, 45.0)),
    "sim-mini": DemoMachine("qwen3-coder:30b", {
        "size": 18_600_000_000, "parameters": "30.5B", "family": "qwen3moe", "context": 262144},
        Pace(0.3, 2000.0, 60.0)),
    "sim-gpu": DemoMachine("devstral:24b", {
        "size": 14_300_000_000, "parameters": "23.6B", "family": "llama", "context": 131072},
        Pace(0.3, 4000.0, 70.0))}
DEMO_WORDS = ("The session cookie is set before the redirect, so the next page asks for the login "
              "again and it never ends; it must be set behind it. ").split(" ")
_PLAY = _Pattern(r"\(play: ([\w, ]+)\)")


class DemoNode(SimulatedNode):
    """A simulated node whose model does what it is told: `(play: Read)` calls that tool."""

    def __init__(self, world: World, machine: DemoMachine, tokens: int) -> None:
        self.tokens = tokens  # of an answer
        super().__init__(world, {machine.model: machine.told}, pace=machine.pace)

    def reply(self, payload: dict[str, Any]) -> list[dict[str, Any]]:
        words = [DEMO_WORDS[index % len(DEMO_WORDS)] for index in range(self.tokens)]
        pieces: list[dict[str, Any]] = [{"content": f"{word} "} for word in words]
        played = _PLAY.findall(read_field(payload["messages"][-1], "content"))
        for name in played[-1].split(", ") if played else ():
            tool, _, kind = name.partition(" ")
            arguments = {"path": "login.py"}
            if kind:
                arguments = {"subagent_type": kind, "prompt": "Do it."}
            call = {"function": {"name": tool, "arguments": arguments}}
            pieces.append({"content": "", "tool_calls": [call]})
        return pieces


class DemoWorld(World):
    """The terminal as it is; a home, a port and an environment that nobody else has.

    No program is found, no question asked; what a command says goes where what it prints goes.
    """

    def __init__(self, outer: World, home: str, ollama: str) -> None:
        super().__init__()
        kept = ("TERM", "NO_COLOR", "FORCE_COLOR", "OS", "WT_SESSION", "ConEmuANSI")
        self.environ = {name: outer.environ[name] for name in kept if name in outer.environ}
        self.environ.update(HOME=home, PATH="", OLLAMA_HOST=ollama)
        self.said: list[str] = []
        self.stop: Callable[[str], object] = lambda name: None  # of the command that serves
        self.door = self.listen("127.0.0.1", 0)

    def out(self, text: str) -> None:
        self.said.append(text)
        super().out(text)

    def err(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # in a thread nobody would hear of it
            self.out(text)

    def own_names(self) -> tuple[str, tuple[str, ...]]:
        return "simulated", ()

    def confirm(self, question: str) -> bool:
        self.out(f"{question} [y/N] y\n")
        return True

    def on_stop(self, callback: Callable[[str], object]) -> None:
        self.stop = callback

    def listen(self, host: str, port: int) -> Listener:
        """Return the Listener of a port; the gateway's own was taken at the beginning."""
        if port and port == self.door.port:
            return self.door
        return super().listen(host, port)


# -- a client in Claude Code's place --

DEMO_PROMPT = "Fix the login bug"
DEMO_TOOLS = ("Read", "Grep", "Edit", "Bash")


class DemoAgent:
    """An agent of the scripted session: asks the gateway, and keeps what Claude Code would keep."""

    def __init__(self, session: DemoSession, kind: str, alias: str, *, number: int = 0,
                 call: str = "") -> None:
        self.session, self.kind, self.alias = session, kind, alias
        self.id = f"{kind}{number}" if number else ""
        self.call = call  # the tool call that started it
        self.requests: list[str] = []
        self._messages: list[dict[str, Any]] = []
        self._path = session.path(self.id)
        if self.id:
            label = {"agentType": kind, "toolUseId": call, "isBuiltIn": False}
            session.keep(session.path(self.id, ".meta.json"), label)

    def ask(self, text: str, play: str = "") -> list[str]:
        """Say something; return the ids of the calls that are answered."""
        return self._go_on([{"type": "text", "text": _with_play(text, play)}], text)

    def answer(self, calls: Sequence[str], text: str, play: str = "", *,
               agents: Sequence[DemoAgent] = ()) -> list[str]:
        """Say what came of calls; those that started agents have them as their result."""
        blocks = [{"type": "tool_result", "tool_use_id": call, "content": _with_play(text, play)}
                  for call in calls]
        for agent in agents:
            self._keep_user([{"type": "tool_result", "tool_use_id": agent.call, "content": text}],
                            toolUseResult={"status": "completed", "agentId": agent.id,
                                           "agentType": agent.kind})
        return self._go_on(blocks, "" if agents else blocks)

    def _go_on(self, blocks: list[dict[str, Any]], kept: object) -> list[str]:
        """Ask the gateway; return the ids of the calls in its answer."""
        if kept:
            self._keep_user(kept)
        self._messages.append({"role": "user", "content": blocks})
        names = ("Agent",) if not self.id else DEMO_TOOLS
        tools = [{"name": name, "description": name, "input_schema": {"type": "object"}}
                 for name in names]
        reply = self.session.post(self.id, {
            "model": self.alias, "max_tokens": 1000, "tools": tools, "messages": self._messages})

        message = parse_object(reply.body) or {}
        self.requests.append(reply.headers.get("request-id", ""))
        self._messages.append({"role": "assistant", "content": message.get("content")})
        self.session.keep(self._path, self.session.stamp({
            "type": "assistant", "isSidechain": bool(self.id), "message": message,
            "requestId": self.requests[-1], "requestedModel": self.alias}))
        return [block["id"] for block in read_field(message, "content", list)
                if read_field(block, "type") == "tool_use"]

    def _keep_user(self, content: object, **more: object) -> None:
        message = {"role": "user", "content": content}
        self.session.keep(self._path, self.session.stamp({
            "type": "user", "isSidechain": bool(self.id), "message": message, **more}))


def _with_play(text: str, play: str) -> str:
    """Return what is said to a simulated model: what it shall do stands at the end."""
    return f"{text} (play: {play})" if play else text


class DemoSession:
    """What is one session of Claude Code's: its id, its transcripts, its way to the gateway."""

    def __init__(self, world: World, fleet: Fleet, key: str, *, place: str) -> None:
        self.world, self.fleet = world, fleet
        self.id = world.token(16)
        self._key, self._place = key, place

    def path(self, agent: str, ending: str = ".jsonl") -> str:
        """Return where the transcript of an agent lies, or what lies beside it."""
        if not agent:
            return self.world.path(self._place, f"{self.id}{ending}")
        return self.world.path(self._place, self.id, "subagents", f"agent-{agent}{ending}")

    def keep(self, path: str, value: Mapping[str, Any]) -> None:
        """Add a line to a transcript."""
        self.world.make_directory(self.world.parent(path))
        self.world.append_line(path, render_json(value) + b"\n")

    def stamp(self, value: dict[str, Any]) -> dict[str, Any]:
        """Return a line as a transcript has it, with its time."""
        now = datetime.datetime.fromtimestamp(self.world.now(), datetime.timezone.utc)
        return {**value, "timestamp": f"{now:%Y-%m-%dT%H:%M:%S}.{now.microsecond // 1000:03}Z",
                "sessionId": self.id, "version": "simulated"}

    def post(self, agent: str, body: dict[str, Any]) -> Reply:
        """Ask the gateway; refuse what is no answer."""
        headers = {"Authorization": f"Bearer {self._key}", "x-claude-code-session-id": self.id}
        if agent:
            headers["x-claude-code-agent-id"] = agent
        exchange = self.world.open_exchange(
            f"{gateway_url(self.fleet.gateway)}{Messages.path}", body=render_json(body),
            headers=headers, deadline=self.world.clock() + BODY_SECONDS)
        with contextlib.closing(exchange):
            exchange.read_head()
            reply = Reply(exchange.status, exchange.headers, bytes(exchange.read_all()))
        if reply.status != 200:
            raise demo_broken(f"the gateway answered {reply.status}: "
                              f"{reply.body[:200].decode('utf-8', 'replace')}")
        return reply

    def begin(self, kind: str, *, number: int = 0, call: str = "") -> DemoAgent:
        """Return a new agent, which asks the alias that its file names."""
        name = plan_tiers(self.fleet)["main"]
        if number:
            name = self.fleet.agents[kind].model
        return DemoAgent(self, kind, self.fleet.models[name].alias, number=number, call=call)


def demo_broken(what: str) -> FleetError:
    """Return the error of a demo that did not do what it shows."""
    return FleetError("demo-broken", f"the demo did not do what it shows: {what}",
                      fix=f"report it with these lines at {HOME_URL}/issues")


def play_session(session: DemoSession, mini: SimulatedNode, tell: Callable[[str], None]) -> None:
    """Play a session: a plan, two implementers at once, a machine that falls asleep, a review."""
    tell("The main session asks for a plan; the planner reads, and reports.")
    main = session.begin("main")
    call, = main.ask(DEMO_PROMPT, "Agent planner")
    planner = session.begin("planner", number=1, call=call)
    calls = planner.ask("Plan the fix of the login bug.", "Read")
    planner.answer(calls, "login.py: 40 lines")

    tell("Two implementers begin at once; the model has one slot, so the second one waits.")
    calls = main.answer([call], "A plan of two steps.", "Agent implementer, Agent implementer",
                        agents=[planner])
    workers = [session.begin("implementer", number=number, call=call)
               for number, call in enumerate(calls, 1)]
    begun = threading.Event()
    jobs = {worker.id: lambda worker=worker: _implement(worker, begun, mini) for worker in workers}
    for _, outcome in run_together(session.world, jobs):
        if begun.is_set() and not mini.stops:
            mini.fall_asleep()
            tell("sim-mini was put to sleep in mid answer: its work goes on elsewhere.")
        if isinstance(outcome, Exception):
            raise outcome
    calls = main.answer(calls, "Both steps are done.", "Agent reviewer", agents=workers)

    tell("The reviewer reads what they did. sim-mini wakes up again.")
    reviewer = session.begin("reviewer", number=1, call=calls[0])
    calls = reviewer.ask("Review the change.", "Read, Grep")
    mini.wake()
    reviewer.answer(calls, "login.py: 41 lines")
    main.answer([reviewer.call], "It is right.", agents=[reviewer])


def _implement(worker: DemoAgent, begun: threading.Event, mini: SimulatedNode) -> None:
    """Play an implementer: it edits, runs tests for as long as its machine is awake, reports."""
    calls = worker.ask("Do a step of the plan.", "Edit")
    begun.set()
    for _ in range(20):
        if mini.stops:
            break
        calls = worker.answer(calls, "edited", "Bash")
    worker.answer(calls, "2 tests pass")


# =============================================================================
# G. Commands
# =============================================================================

# == 22. Workspace ============================================================

# Takes what was typed and a World; gives the config, the key, the generated files and Claude
# Code's settings as they lie on the disk. What is there is read here and nowhere else.

def look_of(world: World, stream: str = "stdout") -> Look:
    """Return how text may look on standard output or standard error."""
    return plan_look(world.environ, world.is_terminal(stream),
                     encoding=world.encoding_of(stream), columns=world.columns)


@dataclass(frozen=True)
class Config:
    """A fleet file that was read and is valid, and what in it will disappoint."""

    fleet: Fleet
    warnings: tuple[Finding, ...] = ()


def load_config(world: World, typed: str | None) -> Config:
    """Read the chosen config; any error refuses it, all of them at once."""
    path = find_config(world, typed)
    source = "<stdin>" if path == "-" else path
    text = decode_config(world.read_bytes(path), source)

    try:
        fleet, problems = check_fleet(Document(text, source))
    except FleetError as error:  # of its syntax: nothing more can be said of it
        fleet, problems = None, [error.finding]
    if fleet is None:
        raise FleetError("invalid-config", f"{source} is not valid", where=source,
                         findings=problems)

    unlock_keys(world, fleet)
    return Config(fleet, tuple(lint_fleet(fleet)))


def load_fleet(path: str) -> Fleet:
    """Return the Fleet of a file; for people who import this module."""
    return load_config(World(), str(path)).fleet


def decode_config(content: bytes, source: str) -> str:
    """Return the text of a config; what is not UTF-8 is refused with its line."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        what = f"line {line}: byte 0x{content[error.start]:02x} is not UTF-8 text"
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        what = "UTF-16, not UTF-8 text"
    raise FleetError("not-utf8", what, where=source, fix="save it as UTF-8")


def find_config(world: World, typed: str | None) -> str:
    """Return what was typed, else the variable, else the nearest fleet file up to the git root."""
    if typed is not None:
        return typed
    if world.environ.get(CONFIG_VARIABLE):
        return world.environ[CONFIG_VARIABLE]

    path = search_config(world, world.directory, shown="")
    if not path:
        raise FleetError("no-config", "no fleet.yaml here or above, up to the git root",
                         fix="subagent-fleet init")
    return path


def search_config(world: World, directory: str, *, shown: str) -> str:
    """Return the nearest fleet file in a directory or above it, up to the git root, or nothing.

    The path begins with what is `shown` for the directory.
    """
    while True:
        for name in CONFIG_NAMES:
            if world.kind_of(world.path(directory, name)) != "absent":
                return world.path(shown, name)

        above = world.parent(directory)
        is_root = world.kind_of(world.path(directory, ".git")) != "absent"
        if is_root or above == directory:
            return ""
        directory = above
        shown = world.path(shown, "..")


def find_output(world: World, *, out: str | None, config: str | None) -> str:
    """Return where the generated files are: what was typed, else beside the fleet file."""
    if out:
        return out
    if config or world.environ.get(CONFIG_VARIABLE):
        return "."
    try:
        return world.parent(find_config(world, config))
    except FleetError:  # there is none, and `clean` needs none
        return "."


@dataclass(frozen=True)
class Workspace:
    """The directory `out`, and in it what was generated from a fleet."""

    world: World
    out: str

    def path(self, *names: str) -> str:
        """Return a path below `out`."""
        return self.world.path(self.out, *names)

    def enter(self, path: str) -> str:
        """Return a path below `out`; what leads out of it, or is no file, is refused."""
        return self.world.enter(self.out, path)

    def read(self, path: str) -> bytes | None:
        """Return a file's bytes, None where there is none; refuse as `enter` does."""
        place = self.enter(path)
        if self.world.kind_of(place) != "file":
            return None
        return self.world.read_bytes(place)

    def kept_key(self, fleet: Fleet) -> str:
        """Return the key that the environment file keeps, or an empty string."""
        text = (self.read(ENVIRONMENT_FILE) or b"").decode("utf-8", "replace")
        variable = fleet.gateway.master_key_env

        # As it was generated, under whatever name, or as a person writes it.
        generated = r'^export (\w+)="\$\{\1:-(?P<generated>[A-Za-z0-9_-]{1,200})\}"$'
        written = rf'^(?:export )?{variable}=(["\']?)(?P<written>[\w.:/+=@%-]+)\3[ \t]*$'
        match = re.search(f"(?m){generated}|{written}", text)
        if not match:
            return ""
        return match["generated"] or match["written"]

    def find_key(self, fleet: Fleet) -> str:
        """Return the gateway's key: the environment's, else the generated one, else nothing.

        One that others may know is refused, and one that cannot be sent.
        """
        variable = fleet.gateway.master_key_env
        path = quote_shell(self.path(ENVIRONMENT_FILE))
        key = self.world.environ.get(variable)
        if key:
            return self._check_letters(key, f"${variable}", fix=f"unset {variable}")

        key = self.kept_key(fleet)
        if not key:
            return ""
        self._refuse_known_key(path)
        return self._check_letters(key, path, fix=f"rm {path}; subagent-fleet generate")

    def _check_letters(self, key: str, place: str, *, fix: str) -> str:
        """Return a key that a header can hold."""
        if re.fullmatch("[!-~]+", key):
            return key
        raise FleetError("bad-key", f"the key in {place} holds more than printable ASCII without "
                         "blanks, so it cannot be sent", fix=fix, status=EXIT_REFUSED)

    def _refuse_known_key(self, path: str) -> None:
        """Refuse the key of a file that others have read, or have put there."""
        leaks = known_by_others(self.world, self.path(ENVIRONMENT_FILE))
        reasons = {"env-readable": "others may read it", "env-tracked": "git tracks it",
                   "env-foreign": "it is somebody else's"}
        if not leaks:
            return
        fix = f"rm {path}; subagent-fleet generate"
        if "env-tracked" in leaks:
            fix = f"git rm -f --cached {path}; {fix}"
        reason = " and ".join(reasons[leak] for leak in leaks)
        raise FleetError("known-key", f"the key in {path} is not used: {reason}", fix=fix,
                         status=EXIT_REFUSED)

    def read_key(self, fleet: Fleet) -> str:
        """Return the gateway's key; without one nothing can be served or asked."""
        key = self.find_key(fleet)
        if key:
            return key

        path = self.path(ENVIRONMENT_FILE)
        what = f"no key: ${fleet.gateway.master_key_env} is not set, and {path}"
        if self.world.kind_of(path) == "absent":
            raise FleetError("no-key", f"{what} is not there", fix="subagent-fleet generate")
        raise FleetError("no-key", f"{what} holds no line that sets it",
                         fix="subagent-fleet generate --force")

    def compare(self, fleet: Fleet | None, targets: Sequence[str] = (), *,
                renews: bool = False) -> list[Change]:
        """Return the Changes that shall be made to the files here; without a fleet, all go.

        Without targets it is asked for those of the fleet and all that was ever written here.
        It may renew a key that others may know; else the key is kept.
        """
        written = parse_manifest(self.read(MANIFEST_FILE))
        if written is None:
            self.world.err(format_finding(Finding(
                "manifest-broken", "warning",
                f"{MANIFEST_FILE} cannot be read; files that differ count as yours"),
                look=look_of(self.world, "stderr")))
            written = {}

        if not targets:
            there = {target.name for target in map(target_of, written) if target}
            targets = [name for name in TARGET_NAMES
                       if not fleet or name in fleet.targets or name in there]
        wanted: dict[str, bytes] = {}
        if fleet:
            key = self.kept_key(fleet)
            if renews and known_by_others(self.world, self.path(ENVIRONMENT_FILE)):
                key = ""
            wanted = render_files(fleet, key or f"sk-{self.world.token(32)}", targets)

        changes = []
        for path in [*wanted, *(path for path in written if path not in wanted)]:
            target = target_of(path)
            if target and target.name in targets:
                content = self.read(path)
                is_ours = digest(content) in written.get(path, "")
                changes.append(Change(path, content, wanted.get(path), is_ours))
        return changes

    def write(self, changes: Sequence[Change]) -> None:
        """Make the changes; a run that is cut off leaves a manifest that knows its files."""
        before = parse_manifest(self.read(MANIFEST_FILE)) or {}
        copies = [(backup_of(change.path, change.found), change.found, 0o600)
                  for change in changes if change.action == "edited"]
        new = [change for change in changes
               if change.wanted is not None and change.action != "unchanged"]

        # 1. First copies of what is the user's, then a manifest that knows each new file by its
        # old and its new hash, then the files: whenever this ends, all that lies there is ours.
        during = dict(before)
        for change in new:
            during[change.path] = f"{before.get(change.path, '')} {digest(change.wanted)}"
        if copies or new:
            self._replace([*copies, (MANIFEST_FILE, render_manifest(during), 0o644),
                           *((change.path, change.wanted, mode_of(change.path)) for change in new)])

        # 2. What left the fleet goes, and the manifest knows each file by one hash.
        after = dict(before)
        for change in changes:
            if change.wanted is None:
                self.world.remove(self.enter(change.path))
                after.pop(change.path, None)
            else:
                after[change.path] = digest(change.wanted)
        if after != during:
            self._replace([(MANIFEST_FILE, render_manifest(after), 0o644)])

        # 3. Whoever loosened the mode of the key's file, it is closed again.
        self.world.make_private(self.enter(ENVIRONMENT_FILE))

    def keep(self, path: str, content: bytes) -> None:
        """Write a file of ours that only its owner can read."""
        self._replace([(path, content, 0o600)])

    def _replace(self, files: Sequence[tuple[str, bytes | None, int]]) -> None:
        """Replace files below `out`, all or none."""
        self.world.replace_files([(self.enter(path), content or b"", mode)
                                  for path, content, mode in files])


def backup_of(path: str, content: bytes | None) -> str:
    """Return where a file is copied to before it is replaced: each version has its own name."""
    return f"{STATE_DIRECTORY}/backup/{path}.{digest(content)[:12]}"


def mode_of(path: str) -> int:
    """Return who may read a generated file: what holds the key, only its owner."""
    target = target_of(path)
    return target.mode if target else 0o600


def read_measurements(workspace: Workspace) -> tuple[Measurement, ...]:
    """Return what `bench` measured here; a file that cannot be read, or is too large, is none."""
    try:
        content = workspace.read(BENCH_FILE)
    except FleetError:
        return ()
    if content is None or count_marks(content) > ANSWER_MARKS:
        return ()
    return parse_measurements(content)


LISTED_SESSIONS = 20
FOLLOW_SECONDS = 0.5
RECEIPTS_FILE = f"{STATE_DIRECTORY}/requests.jsonl"
RECEIPTS_PART_BYTES = 1024 * 1024  # some 3,000 requests


class ReceiptsReader:
    """Reads what a gateway files: the latest part first, then what has come since."""

    def __init__(self, workspace: Workspace) -> None:
        self._world = workspace.world
        self._path = workspace.enter(RECEIPTS_FILE)
        self._at = max(0, self._world.size_of(self._path) - RECEIPTS_PART_BYTES)
        self._begun = b""  # a line whose end is still to come

    def read(self) -> list[dict[str, Any]]:
        """Return the receipts that have come, oldest first."""
        if self._world.size_of(self._path) < self._at:  # it has turned over and is new
            self._at = 0
            self._begun = b""
        content = self._world.read_part(self._path, self._at, RECEIPTS_PART_BYTES)
        self._at += len(content)
        *lines, self._begun = (self._begun + content).split(b"\n")
        return parse_receipts(lines)


def parse_receipts(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return what the lines of a receipts file say; one that is cut or foreign is passed over."""
    receipts = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            receipt = parse_json(line)
            if isinstance(receipt, dict) and isinstance(receipt.get("time"), (int, float)):
                receipts.append(receipt)
    return receipts


_ID = _Pattern("[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # a part of a path, too


def last_session(receipts: Sequence[dict[str, Any]], *, since: float) -> str:
    """Return the id of the session that was served last since then, or an empty string."""
    for receipt in reversed(receipts):
        session = str(receipt.get("session"))
        if receipt["time"] >= since and _ID.fullmatch(session) and receipt.get("session"):
            return session
    return ""


def find_agent_type(world: World, session: str, agent: str) -> str:
    """Return what Claude Code calls a subagent of a session, where it has kept that (2.1.326)."""
    if not (_ID.fullmatch(session) and _ID.fullmatch(agent)):
        return ""
    pattern = f"projects/*/{session}/subagents/agent-{agent}.meta.json"
    for path in world.paths_below(claude_directory(world), pattern):
        with contextlib.suppress(FleetError, ValueError, KeyError, TypeError, RecursionError):
            return str(json.loads(world.read_bytes(path))["agentType"])
    return ""


# -- what the gateway and Claude Code wrote of sessions --

TRANSCRIPT_PART_BYTES = 1024 * 1024
LINE_LIMIT_BYTES = 32 * 1024 * 1024  # a longer line is no JSON that anybody wrote


class TranscriptReader:
    """Reads a transcript: what is there first, then what has come since."""

    def __init__(self, world: World, path: str, agent: str = "") -> None:
        self._world, self._path = world, path
        self._at = 0
        self._begun = b""  # a line whose end is still to come
        self.transcript = Transcript(show_path(world, path), agent)

    def read(self) -> Transcript:
        """Return what it says so far."""
        while True:
            part = self._world.read_part(self._path, self._at, TRANSCRIPT_PART_BYTES)
            self._at += len(part)
            *lines, self._begun = (self._begun + part).split(b"\n")
            for line in lines:
                self.transcript.feed(line)
            if len(self._begun) > LINE_LIMIT_BYTES:
                self._begun = b"..."
            if len(part) < TRANSCRIPT_PART_BYTES:
                self.transcript.changed = self._world.changed_at(self._path)
                return self.transcript

    def finish(self) -> Transcript:
        """Return all that it says: nobody waits for the end of its last line."""
        self.read()
        if self._begun:
            self.transcript.feed(self._begun)
            self._begun = b""
        return self.transcript


def show_path(world: World, path: str) -> str:
    """Return a path as a person knows it: from the home directory on."""
    home = world.environ.get("HOME") or world.environ.get("USERPROFILE", "")
    if home and path.startswith(world.path(home, "")):
        return world.path("~", path[len(world.path(home, "")):])
    return path


def read_receipts(workspace: Workspace, session: str = "") -> list[Receipt]:
    """Return all receipts that are kept, or those of a session, oldest first."""
    world = workspace.world
    receipts: dict[str, Receipt] = {}
    # The file before the one that it turned over to: a line is then read twice, not never.
    for name in (RECEIPTS_FILE, f"{RECEIPTS_FILE}.1"):
        path, at, begun = workspace.enter(name), 0, b""
        while True:
            part = world.read_part(path, at, RECEIPTS_PART_BYTES)
            at += len(part)
            *lines, begun = (begun + part).split(b"\n")
            wanted = [line for line in lines if session.encode() in line]
            for receipt in map(parse_event, parse_receipts(wanted)):
                if isinstance(receipt, Receipt) and session in ("", receipt.session):
                    receipts[receipt.id] = receipt
            if len(part) < RECEIPTS_PART_BYTES:
                break
    return sorted(receipts.values(), key=lambda receipt: receipt.time)


@dataclass(frozen=True)
class SessionFile:
    """A session that there is something of, as far as its files are not read yet."""

    id: str
    path: str  # of its transcript; "" where Claude Code kept none
    at: float  # when it was last at work
    requests: int


def find_sessions(workspace: Workspace, receipts: Iterable[Receipt]) -> list[SessionFile]:
    """Return the sessions of this directory and of its gateway, the latest first."""
    world = workspace.world
    projects = world.path(claude_directory(world), "projects")
    everywhere: dict[str, str] = {}
    for path in world.paths_below(projects, "*/*.jsonl"):
        everywhere[world.split(path)[1][:-len(".jsonl")]] = path
    here = {project_name(world, place) for place in (workspace.out, world.directory)}

    served: dict[str, list[float]] = {}
    for receipt in receipts:
        if _ID.fullmatch(receipt.session):
            served.setdefault(receipt.session, []).append(receipt.time)
    sessions = []
    for session in dict.fromkeys([*everywhere, *served]):
        path, times = everywhere.get(session, ""), served.get(session, [])
        name = world.split(world.parent(path))[1]
        if _ID.fullmatch(session) and (times or name in here):
            at = max([*times, world.changed_at(path) if path else 0.0])
            sessions.append(SessionFile(session, path, at, len(times)))
    return sorted(sessions, key=lambda each: -each.at)


def project_name(world: World, directory: str) -> str:
    """Return what Claude Code calls the directory of a project's sessions (2.1.326)."""
    return re.sub("[^A-Za-z0-9]", "-", world.real_path(directory))


def subagent_paths(world: World, found: SessionFile) -> dict[str, str]:
    """Return {agent id: its transcript} of a session."""
    if not found.path:
        return {}
    place = world.path(world.parent(found.path), found.id, "subagents")
    paths = {}
    for path in world.paths_below(place, "agent-*.jsonl"):
        agent = world.split(path)[1][len("agent-"):-len(".jsonl")]
        if _ID.fullmatch(agent):
            paths[agent] = path
    return paths


def read_label(world: World, path: str) -> AgentLabel:
    """Return what lies beside a subagent's transcript."""
    try:
        label = parse_object(world.read_bytes(f"{path[:-len('.jsonl')]}.meta.json"))
    except FleetError:  # Claude Code before 2.1 keeps none
        return AgentLabel()
    return AgentLabel(read_field(label, "agentType"), read_field(label, "toolUseId"),
                      read_field(label, "isBuiltIn", bool))


def read_first_prompt(world: World, found: SessionFile) -> str:
    """Return what a session began with, as far as its first part tells."""
    if not found.path:
        return ""
    transcript = Transcript(found.path)
    for line in world.read_part(found.path, 0, TRANSCRIPT_PART_BYTES).split(b"\n"):
        transcript.feed(line)
        if transcript.prompt:
            break
    return transcript.prompt


def find_agent_sources(workspace: Workspace) -> dict[str, AgentSource]:
    """Return {agent: its file} of a person's own agents and the project's, which win."""
    world = workspace.world
    places = (world.path(claude_directory(world), "agents"), workspace.path(".claude", "agents"))
    sources = {}
    for place in places:
        paths = [*world.paths_below(place, "*.md"), *world.paths_below(place, "*/*.md")]
        for path in paths[:TREE_FILES_LIMIT]:
            with contextlib.suppress(FleetError):
                content = world.read_bytes(path, limit=TREE_FILE_LIMIT_BYTES)
                agent = read_agent(content.decode("utf-8", "replace"))
                if not agent.defect:
                    sources[agent.name.lower()] = plan_source(
                        agent, show_path(world, path), content, world.changed_at(path))
    return sources


def plan_source(agent: AgentFile, path: str, content: bytes, changed: float) -> AgentSource:
    """Return what an audit asks of an agent's file."""
    before = content.partition(b"\nmodel:")[0]
    line = before.count(b"\n") + 2 if before != content else 1
    tools = agent.tools
    may_change = tools is None or any(tool in CHANGING_TOOLS for tool in tools)
    return AgentSource(path, line, agent.model, tools != (), may_change, changed)


class SessionReader:
    """Reads what there is of a session, again and again."""

    def __init__(self, workspace: Workspace, found: SessionFile, facts: TraceFacts) -> None:
        self._workspace, self._found, self._facts = workspace, found, facts
        self._readers: dict[str, TranscriptReader] = {}
        self._labels: dict[str, AgentLabel] = {}

    def read(self, *, audits: bool = False, follows: bool = False) -> SessionReport:
        """Return what is to be told of it now; who follows waits for the end of a last line."""
        world, found = self._workspace.world, self._found
        paths = {"": found.path} if found.path else {}
        paths.update(subagent_paths(world, found))
        for agent, path in paths.items():
            if agent not in self._readers:
                self._readers[agent] = TranscriptReader(world, path, agent)
            if agent and not self._labels.get(agent, AgentLabel()).kind:
                self._labels[agent] = read_label(world, path)
        transcripts = [reader.read() if follows else reader.finish()
                       for reader in self._readers.values()]

        session = trace_session(found.id, transcripts, self._labels,
                                read_receipts(self._workspace, found.id))
        facts = replace(self._facts, now=world.now())
        return report_session(name_agents(session, facts.fleet), facts, audits=audits)


def claude_directory(world: World) -> str:
    """Return where Claude Code keeps a person's settings and sessions."""
    home = world.environ.get("HOME") or world.environ.get("USERPROFILE", "")
    return world.environ.get("CLAUDE_CONFIG_DIR") or world.path(home, ".claude")


def managed_settings(world: World) -> list[str]:
    """Return where an administrator's settings for Claude Code may be, which beat all others."""
    places = ("/Library/Application Support/ClaudeCode", "/etc/claude-code",
              "C:\\Program Files\\ClaudeCode")  # two of these are nowhere
    paths = []
    for place in places:
        paths += [f"{place}/managed-settings.json",
                  *world.paths_below(place, "managed-settings.d/*.json")]
    return paths


def usual_settings(world: World) -> list[str]:
    """Return where a person's and a project's settings for Claude Code may be."""
    return [world.path(claude_directory(world), "settings.json"), ".claude/settings.json",
            ".claude/settings.local.json"]


def find_settings(world: World, paths: Iterable[str]) -> dict[str, dict[str, object]]:
    """Return {path: what it sets under `env`} of the settings files that are there."""
    settings = {}
    for path in paths:
        # else it is absent, or Claude Code ignores it as well
        with contextlib.suppress(FleetError, KeyError, TypeError, ValueError, RecursionError):
            settings[path] = dict(json.loads(world.read_bytes(path))["env"])
    return settings


def line_of(content: bytes, word: str) -> int:
    """Return the number of the line that a quoted word stands on, the first where it is none."""
    return content.partition(f'"{word}"'.encode())[0].count(b"\n") + 1


@dataclass(frozen=True)
class OwnSettings:
    """What a person hands to Claude Code as `--settings`, and the words beside it."""

    words: tuple[str, ...]
    source: str = ""  # a path
    content: bytes = b"{}"

    def read(self) -> dict[str, Any]:
        """Return the settings, or refuse what Claude Code could not read either."""
        try:
            settings = parse_json(self.content)
        except ValueError:
            settings = None
        if not isinstance(settings, dict) or not all(
                isinstance(settings.get(name, {}), dict) for name in ("env", "permissions")):
            raise FleetError("bad-settings", f"{self.source} holds no settings of Claude Code",
                             where=self.source, fix="write a JSON object, `env` and "
                             "`permissions` in it objects, too")
        return settings


def take_settings(world: World, words: Sequence[str]) -> OwnSettings:
    """Take a person's own `--settings`, a file or JSON, out of Claude Code's words."""
    kept = []
    value = None
    left = list(words)
    while left and left[0] != "--":
        word = left.pop(0)
        if word == "--settings" and left:
            value = left.pop(0)
        elif word.startswith("--settings="):
            value = word.partition("=")[2]
        else:
            kept.append(word)

    words = (*kept, *left)
    if value is None:
        return OwnSettings(words)
    if value.lstrip().startswith("{"):
        return OwnSettings(words, "--settings", value.encode("utf-8", "surrogateescape"))
    return OwnSettings(words, value, world.read_bytes(value))


def observe_files(workspace: Workspace, fleet: Fleet, facts: Facts) -> Facts:
    """Add what is so of the generated files; where they cannot be read, that is a problem."""
    world = workspace.world
    try:
        changes = workspace.compare(fleet)
        path = workspace.enter(ENVIRONMENT_FILE)
        if world.kind_of(path) != "absent" and not known_by_others(world, path):
            workspace.read_key(fleet)
    except FleetError as error:
        return replace(facts, file_problems=(error.finding,))

    return replace(facts, changes=tuple(changes), env_path=path, leaks=find_leaks(world, path))


def find_leaks(world: World, path: str) -> tuple[str, ...]:
    """Return the ids of what is wrong with the environment file: who may read it, and git."""
    leaks = []
    if world.others_may_read(path):
        leaks.append("env-readable")
    if world.belongs_to_other(path):
        leaks.append("env-foreign")

    listed = world.read_git(["ls-files", "-t", "--cached", "--others", "--exclude-standard", "--",
                             ENVIRONMENT_FILE], world.parent(path), world.clock() + 1.0)
    if listed:
        leaks.append("env-unignored" if listed.startswith("?") else "env-tracked")
    return tuple(leaks)


# -- what a person has accepted --

def trust_file(world: World) -> str:
    """Return where it is kept what this user has accepted."""
    home = world.environ.get("HOME") or world.environ.get("USERPROFILE", "")
    base = world.environ.get("XDG_STATE_HOME", "")
    if not re.match(r"/|[A-Za-z]:", base):  # a relative one does not count, by its standard
        base = world.path(home, ".local", "state")
    return world.path(base, "subagent-fleet", "trusted.json")


def read_trusted(world: World) -> dict[str, list[str]]:
    """Return {path of a fleet file: hashes of what was accepted of it}."""
    path = trust_file(world)
    trusted = {}
    # absent, or not as this program wrote it: nothing was accepted
    with contextlib.suppress(FleetError, ValueError, KeyError, TypeError, AttributeError):
        if not world.others_may_read(path) and not world.belongs_to_other(path):
            for config, hashes in parse_json(world.read_bytes(path))["trusted"].items():
                trusted[config] = [str(one) for one in hashes]
    return trusted


def write_trusted(world: World, trusted: Mapping[str, Sequence[str]]) -> None:
    """Keep what was accepted."""
    report = {"schema": "subagent-fleet/trusted/1", "trusted": trusted}
    content = json.dumps(report, indent=1).encode("utf-8") + b"\n"
    world.replace_files([(trust_file(world), content, 0o600)])


def trust_name(world: World, source: str) -> str:
    """Return under which name a fleet file is accepted: where it really lies."""
    return source if source == "<stdin>" else world.real_path(source)


def hash_of(name: str, stake: Stake) -> str:
    """Return what is kept of something that was accepted of a fleet file."""
    return digest(f"{name}\n{stake.fact}".encode("utf-8", "surrogateescape"))


def accept_stakes(world: World, source: str, stakes: Iterable[Stake]) -> None:
    """Keep that this is accepted of a fleet file, beside what was before."""
    name = trust_name(world, source)
    trusted = read_trusted(world)
    hashes = trusted.setdefault(name, [])
    new = [hash_of(name, stake) for stake in stakes]
    new = [one for one in new if one not in hashes]
    if new:
        hashes += new
        write_trusted(world, trusted)


def find_stakes(world: World, fleet: Fleet) -> list[Stake]:
    """Return what is at stake with a fleet on this machine."""
    gateway = fleet.gateway
    own_hosts = {gateway.host} if is_here(world, gateway.host) else set()
    for node in fleet.nodes.values():
        host = split_endpoint(node.endpoint).host
        if host != gateway.host and not is_private(host) and is_at_home(world, host):
            own_hosts.add(host)
    return plan_stakes(fleet, own_hosts)


def is_here(world: World, host: str) -> bool:
    """Tell whether a host is this machine, by an address or a name of its own."""
    host = plain_address(host)
    name = world.own_names()[0].lower()
    names = (name, f"{name}.local", name.partition(".")[0])
    return is_loopback(host) or host in names or world.is_own_address(host)


def is_at_home(world: World, host: str) -> bool:
    """Tell whether a host that might be anywhere is this machine, or in its Tailscale network."""
    if is_here(world, host):
        return True
    # Such names are Tailscale's to give: what it says is so. It also makes some of them public.
    if not host.endswith(".ts.net"):
        return False
    try:
        places = world.resolve(host, 0, world.clock() + CONNECT_SECONDS)
    except NodeFailure:
        return False
    return bool(places) and all(is_private(address[0]) for *_, address in places)


def unlock_keys(world: World, fleet: Fleet) -> None:
    """Let those keys go to nodes that were accepted to go there."""
    wanting = [node for node in fleet.nodes.values() if node.api_key_env]
    if not wanting:
        return
    name = trust_name(world, fleet.document.source)
    accepted = read_trusted(world).get(name, [])
    for node in wanting:
        key = world.environ.get(node.api_key_env or "")
        if key and hash_of(name, plan_key_stake(node)) in accepted:
            world.node_keys[node.endpoint, node.api_key_env or ""] = key


def find_untrusted(world: World, fleet: Fleet) -> list[Stake]:
    """Return what is at stake with a fleet and was not accepted."""
    stakes = find_stakes(world, fleet)
    if not stakes:
        return []  # as with every fleet of machines at home: nothing is read
    name = trust_name(world, fleet.document.source)
    accepted = read_trusted(world).get(name, [])
    return [stake for stake in stakes if hash_of(name, stake) not in accepted]


def known_by_others(world: World, path: str) -> tuple[str, ...]:
    """Return the ids of what lets others know the key in an environment file."""
    return tuple(leak for leak in find_leaks(world, path) if leak != "env-unignored")


# == 23. Commands =============================================================

# A command is a function of what was typed and a World; its row, above it, says how it is typed.
# `COMMANDS` holds the rows in the order of this section, which is the order of use and of help.

@dataclass(frozen=True)
class Options:
    """What was typed after a command; what the command does not take stays as it is here."""

    config: str | None = None
    out: str | None = None
    json: bool = False
    force: bool = False
    trust: bool = False
    # trust
    show: bool = False
    forget: bool = False
    timeout: float = 0.0
    check: bool = False
    verbose: bool = False
    # What follows `--`, for another program.
    passed: Sequence[str] = ()
    # How messages shall name the commands they advise.
    typing: Typing = field(default_factory=Typing)
    # init
    output: str | None = None
    node: Sequence[str] = ()
    offline: bool = False
    scan: str | None = None
    # add
    machine: str = ""
    # validate
    strict: bool = False
    # generate
    target: Sequence[str] = ()
    litellm_only: bool = False
    claude_only: bool = False
    diff: bool = False
    # env
    shell: str | None = "sh"
    show_key: bool = False
    # ui, up
    no_open: bool = False
    ui: bool = False
    # launch
    program: str = "claude"
    # discover
    write: bool = False
    # status
    watch: float = 0.0
    # doctor
    fix: bool = False
    # wake
    nodes: Sequence[str] = ()
    via: str = ""
    # warmup
    model: Sequence[str] = ()
    agent: Sequence[str] = ()
    pull: bool = False
    unload: bool = False
    # serve
    host: str = ""
    port: str = ""
    no_receipts: bool = False
    # clean
    dry_run: bool = False
    # bench
    quick: bool = False
    quality: bool = False
    # logs
    follow: bool = False
    lines: int = 20
    failed: bool = False
    # demo
    seconds: float = 0.0
    # trace
    session: str = ""
    audit: bool = False
    since: float = 0.0
    prompts: bool = False
    # completion
    names: str = ""
    # help
    command: Sequence[str] = ()


@dataclass(frozen=True)
class Flag:
    """A flag or, without dashes, a positional word; `more` is in argparse's own words."""

    name: str
    note: str
    metavar: str = ""  # without one it is on or off
    more: dict[str, Any] = field(default_factory=dict)
    short: str = ""
    # What completion offers: words, or one of NAME_KINDS, whose names the fleet file gives.
    offers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """A command: what runs, what it says of itself, what it takes, how it is typed."""

    name: str  # one word, or two (`task add`) where several share the first
    group: str
    run: Callable[[Options, World], int]
    summary: str
    flags: tuple[Flag, ...]
    examples: tuple[str, ...]
    passes: str  # what may follow `--` and goes to another program


COMMANDS: list[Command] = []
NAME_KINDS = ("models", "agents", "nodes")
START, SET_UP, LOOK, SERVE, FILES, MORE = "Start", "Set up", "Look", "Serve", "Files", "More"


def command(name: str, summary: str, *flags: Flag, group: str, examples: tuple[str, ...],
            passes: str = "") -> Callable[..., Any]:
    """Make a function a command: its row stands above it."""
    def register(run: Callable[[Options, World], int]) -> Callable[[Options, World], int]:
        COMMANDS.append(Command(name, group, run, summary, flags, examples, passes))
        return run
    return register


@dataclass(frozen=True)
class Called:
    """The command that words begin with, and the words that follow its name."""

    command: Command
    words: list[str]


def find_call(words: Sequence[str]) -> Called:
    """Return what is called; an unknown command is refused with the nearest."""
    known = {row.name: row for row in COMMANDS}
    for count in (2, 1):
        name = " ".join(words[:count])
        if name in known:
            return Called(known[name], list(words[count:]))

    name = words[0]
    seconds = second_words(name)
    if seconds:
        typed = words[1] if len(words) > 1 else ""
        hint = nearest(typed, seconds)
        raise FleetError("unknown-command", f"{name}: what? One of {', '.join(seconds)}",
                         status=EXIT_USAGE, fix=hint or f"subagent-fleet help {name}")
    behind = "; flags come after the command" if name.startswith("-") else ""
    raise FleetError("unknown-command", f"unknown command `{name}`{behind}", status=EXIT_USAGE,
                     fix=nearest(name, known) or "subagent-fleet --help")


def find_command(name: str) -> Command:
    """Return the command of that name; an unknown one is refused with the nearest."""
    return find_call(name.split() or [name]).command


def second_words(first: str) -> list[str]:
    """Return the second words of the commands that share a first one."""
    names = [row.name.split() for row in COMMANDS]
    return [name[1] for name in names if len(name) == 2 and name[0] == first]


def parse_seconds(text: str) -> float:
    """Return a number of seconds that can be waited, a day at most."""
    number = float(text) if re.fullmatch(r"\d+\.?\d*|\.\d+", text) else 0.0
    if 0 < number <= 86400:
        return number
    raise argparse.ArgumentTypeError(f"expected seconds, above 0, at most 86400, not `{text}`")


def parse_count(text: str) -> int:
    """Return a number of lines."""
    if re.fullmatch(r"[1-9]\d{0,3}", text):
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a number, 1 to 9999, not `{text}`")


def parse_age(text: str) -> float:
    """Return the seconds of a time that is written with its unit."""
    match = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if match and int(match[1]):
        return int(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
    raise argparse.ArgumentTypeError(f"expected a time such as 90s, 30m, 2h or 1d, not `{text}`")


SECONDS = {"type": parse_seconds}
REPEAT = {"action": "append", "default": []}
CONFIG = Flag("--config", "the fleet file, `-` for stdin; else the nearest fleet.yaml", "FILE")
OUT = Flag("--out", "where generated files are; else here (--config) or by fleet.yaml", "DIR")
JSON = Flag("--json", "print one JSON object")
FORCE = Flag("--force", "overwrite what is there")
TRUST = Flag("--trust", "accept what would otherwise be asked, or refused off a terminal")
SCAN = Flag("--scan", "look for machines in NET, else in this machine's own networks", "[NET]",
            {"nargs": "?", "const": "", "default": None})
TIMEOUT = Flag("--timeout", "seconds to wait", "S", {**SECONDS, "default": PROBE_TIMEOUT_SECONDS})


def open_workspace(options: Options, world: World) -> Workspace:
    """Return the directory of the generated files that the typed words mean."""
    return Workspace(world, find_output(world, out=options.out, config=options.config))


def check_names(kind: str, names: Iterable[str], known: Iterable[str], owner: str) -> None:
    """Refuse names of a command that its owner does not have."""
    for name in names:
        if name not in known:
            choices = some_of(list(known)) or "none"
            raise FleetError(f"unknown-{kind}", f"{owner}: unknown {kind} `{name}`",
                             status=EXIT_USAGE, fix=nearest(name, known)
                             or f"known {kind}s: {choices}")


def tell_findings(findings: Iterable[Finding], options: Options, world: World) -> None:
    """Show findings; one that is an error refuses the command."""
    for finding in findings:
        if finding.level == "error":
            raise FleetError(finding.slug, finding.what, fix=finding.fix, status=EXIT_REFUSED)
        shown = retype(finding, options.typing)
        world.err(format_finding(shown, look=look_of(world, "stderr")))


def retype(finding: Finding, typing: Typing) -> Finding:
    """Return a finding whose fix names commands as they were typed."""
    return replace(finding, fix=as_typed(finding.fix, typing))


def refuse_edited(paths: Sequence[str], command: str, outcome: str) -> FleetError:
    """Return the error for files that are the user's."""
    return FleetError(
        "edited", f"{some_of(paths, 5)}: not as this program wrote it; {outcome}",
        fix=f"move it away, or `subagent-fleet {command} --force` (what is there is copied to "
            f"{STATE_DIRECTORY}/backup first)", status=EXIT_REFUSED)


# -- what a person is asked before it goes out --

def ask_trust(fleet: Fleet, options: Options, world: World) -> None:
    """Have a person accept what would go where with this fleet; without a person, refuse."""
    stakes = find_untrusted(world, fleet)
    if not stakes:
        return

    source = fleet.document.source
    if not options.trust:
        is_asked = world.is_terminal("stdin") and world.is_terminal("stderr")
        if is_asked:
            world.err(format_stakes(source, [(stake, False) for stake in stakes],
                                    look_of(world, "stderr")))
        if not is_asked or not world.confirm("Do you want that?"):
            words = "; ".join(stake.what for stake in stakes)
            raise FleetError("untrusted", f"with {source}, {words}; you have not accepted that",
                             fix="`subagent-fleet trust`, or add --trust",
                             status=EXIT_REFUSED)
    accept_stakes(world, source, stakes)
    unlock_keys(world, fleet)


def accept_typed(world: World, source: str, nodes: Iterable[Node]) -> None:
    """Accept machines of a fleet file that a person has just typed."""
    accept_stakes(world, source, plan_node_stakes(nodes))


# -- the gateway, from outside --

def get_page(world: World, url: str, until: float, **headers: str) -> Reply:
    """Return the answer to a GET."""
    with contextlib.closing(world.open_exchange(url, headers=headers, deadline=until)) as exchange:
        exchange.read_head()
        return Reply(exchange.status, exchange.headers, exchange.read_all())


def who_serves(world: World, fleet: Fleet, key: str, until: float) -> str:
    """Return OUR_GATEWAY when one serves this fleet with its key, else who listens, or "".

    Whoever came first can hold the port and say any name. So the key is sent only after a proof
    that it is known there already.
    """
    is_far = not is_here(world, fleet.gateway.host)
    if is_far and any(stake.fact.startswith("gateway ") for stake in find_untrusted(world, fleet)):
        return FAR_GATEWAY
    url = gateway_url(fleet.gateway)
    try:
        if b'"subagent-fleet"' in get_page(world, url + "/", until).body:
            return _serves_as_we_do(world, fleet, key, until)
        if b"I'm alive!" in get_page(world, url + "/health/liveliness", until).body:
            return _serves_as_litellm(world, fleet, key, until)
    except NodeFailure as failure:
        if failure.reason in ("refused", "unreachable", "dns"):
            return ""
    return "another program"


def _serves_as_we_do(world: World, fleet: Fleet, key: str, until: float) -> str:
    """Return whether a gateway of ours serves this fleet, in its present form."""
    if not key or not _knows_key(world, fleet, key, until):
        return "subagent-fleet"
    page = _show_key(world, gateway_url(fleet.gateway) + "/fleet", key, until)
    if page.get("fleet") != fleet.name:
        return "subagent-fleet"
    return OUR_GATEWAY if page.get("config") == fleet_digest(fleet) else OLD_GATEWAY


def _knows_key(world: World, fleet: Fleet, key: str, until: float) -> bool:
    """Tell whether the gateway proves that it knows the key, which it is not shown."""
    nonce = world.token(32)
    url = f"{gateway_url(fleet.gateway)}{PROOF_PATH}{nonce}"
    with contextlib.closing(world.open_exchange(url, deadline=until)) as exchange:
        address, port = exchange.find_peer()
        exchange.read_head()
        page = _read_object(exchange.read_all(PROBE_LIMIT_BYTES))
    return proves_key(page.get("proof"), prove_key(key, nonce, address, port))


def _serves_as_litellm(world: World, fleet: Fleet, key: str, until: float) -> str:
    """Return whether a LiteLLM has every alias of this fleet.

    It can prove nothing. But it can be told whose program it is, and who runs one as this user
    or as root can read the file with the key anyway. To a wrong key it may say anything (401,
    or 400 without a database, 1.106.2), and so may who only poses as LiteLLM.
    """
    is_far = not is_here(world, fleet.gateway.host)  # and then a person has said it may see it
    if not is_far and not world.is_port_ours(fleet.gateway.port):
        return "LiteLLM, which another user runs"
    if not key:
        return "LiteLLM"
    page = _show_key(world, gateway_url(fleet.gateway) + "/v1/models", key, until)
    wanted = {model.alias for model in fleet.models.values()}
    try:
        aliases = {model["id"] for model in page["data"]}
    except (KeyError, TypeError):
        return "LiteLLM"
    return OUR_GATEWAY if wanted <= aliases else "LiteLLM"


def _show_key(world: World, url: str, key: str, until: float) -> dict[str, Any]:
    """Return the page that a gateway shows to who has its key; to others it is empty."""
    try:
        return _read_object(get_page(world, url, until, Authorization=f"Bearer {key}").body)
    except (NodeFailure, UnicodeEncodeError):  # no answer, or a key that no header can hold
        return {}


def _read_object(body: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object of a page, an empty one where it is something else."""
    try:
        page = parse_json(body)
    except ValueError:
        return {}
    return page if isinstance(page, dict) else {}


def find_gateway(world: World, fleet: Fleet, key: str, *, needed: bool = False) -> bool:
    """Tell whether this fleet's gateway runs; refuse somebody else, and nobody where needed."""
    holder = who_serves(world, fleet, key, world.clock() + CONNECT_SECONDS)
    finding = check_gateway(fleet, holder)
    runs = finding.slug == "gateway-up"
    if finding.level == "error":
        what = finding.what + describe_holder(world, fleet.gateway.port)
        raise FleetError(finding.slug, what, fix=name_free_port(world, fleet, finding.fix))
    if needed and not runs:
        raise FleetError(finding.slug, finding.what, fix=finding.fix)
    return runs


def describe_holder(world: World, port: int) -> str:
    """Return ` (PROGRAM, pid PID, in DIRECTORY)` of who listens on a port, where that is told."""
    holder = world.find_holder(port)
    if not holder:
        return ""
    return f" ({holder.program}, pid {holder.process_id}, in {holder.directory})"


def name_free_port(world: World, fleet: Fleet, fix: str) -> str:
    """Return a fix that says another `port:` with one that is free."""
    port = world.find_free_port(fleet.gateway.host, fleet.gateway.port)
    return fix.replace("another `port:`", f"`port: {port}`") if port else fix


def ask_gateway(world: World, fleet: Fleet, key: str) -> dict[str, dict[str, Any]]:
    """Return {node: what it has served} from a gateway of ours that serves this fleet."""
    until = world.clock() + CONNECT_SECONDS
    if who_serves(world, fleet, key, until) != OUR_GATEWAY:
        return {}
    page = _show_key(world, gateway_url(fleet.gateway) + "/fleet", key, until)
    if page.get("fleet") != fleet.name:  # nobody, or no page of ours
        return {}
    try:
        return {node["name"]: node for node in page["nodes"]}
    except (KeyError, TypeError):
        return {}


def follow_events(world: World, fleet: Fleet, key: str) -> Iterator[dict[str, Any]]:
    """Yield what this fleet's gateway tells, until it ends; NodeFailure: nobody tells anything."""
    holder = who_serves(world, fleet, key, world.clock() + CONNECT_SECONDS)
    if holder not in (OUR_GATEWAY, OLD_GATEWAY):
        raise NodeFailure("refused", "no gateway of this fleet answers")
    ask = Ask(EVENTS_PATH, _read_frame, headers={"Authorization": f"Bearer {key}"})
    for value in world.ask_lines(gateway_url(fleet.gateway), ask,
                                 stall_seconds=3 * QUIET_SECONDS):
        if value:
            yield value


def _read_frame(reply: Reply) -> dict[str, Any] | None:
    """Return the object that a line of `/events` holds, None for a line that holds none."""
    if reply.status != 200:
        raise NodeFailure("bad answer", f"it answers {reply.status} to who follows")
    if not reply.body.startswith(b"data: "):
        return None
    return parse_object(reply.body[len(b"data: "):])


def count_served(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[object, ...]]:
    """Return (node, its totals …) of what each node has served between two looks at a gateway."""
    nothing = dict.fromkeys(TOTALS, 0)
    earlier = {name: before.get(name, nothing) for name in after}
    if any(earlier[name]["requests"] > node["requests"] for name, node in after.items()):
        earlier = dict.fromkeys(after, nothing)  # another gateway took over, and began at 0

    rows = []
    for name, node in after.items():
        totals = [round(node[total] - earlier[name][total], 1) for total in TOTALS]
        rows.append((name, *totals))
    return rows


def start_gateway(world: World, fleet: Fleet, key: str, *, out: str,
                  stops: contextlib.ExitStack) -> None:
    """Start what serves the fleet, or find that it runs; `stops` will stop it."""
    runs = find_gateway(world, fleet, key)
    name = clean_line(fleet.name)
    url = gateway_url(fleet.gateway)

    if fleet.gateway.provider == "builtin":
        listener = None if runs else open_door(world, fleet, key)
        server = Server(fleet, key, world, receipts=receipts_path(world, out))
        serving = threading.Thread(target=server.run, args=(listener,), daemon=True)
        serving.start()
        stops.callback(serving.join, GRACE_SECONDS + 1)  # the last one comes first
        stops.callback(server.stop, "up")

    if runs:
        world.err(f"A gateway for {name} runs at {url}: it is used.\n")
    elif fleet.gateway.provider == "builtin":
        world.err(f"Serving {name} at {url}.\n")
    else:
        start_litellm(world, fleet, key, out=out, stops=stops)
        world.err(f"LiteLLM serves {name} at {url}.\n")


def start_litellm(world: World, fleet: Fleet, key: str, *, out: str,
                  stops: contextlib.ExitStack) -> None:
    """Start LiteLLM, and wait until it has every alias.

    Its config can name Python to import, which it finds where the config lies and where it was
    started (1.106.2). So it gets one that was just made, in a directory of its own.
    """
    program = world.which("litellm")
    if not program:
        raise FleetError("litellm-missing", "the gateway is LiteLLM and it is not on the PATH",
                         fix=f"{LITELLM_INSTALL}, or write `provider: builtin`")

    log = world.enter(out, LITELLM_LOG_FILE)
    place = stops.enter_context(PrivateDirectory())
    config = world.path(place, LITELLM_FILE)
    world.replace_files([(config, render_litellm(fleet).encode("utf-8"), 0o600)])

    words = [program, "--config", config, "--host", fleet.gateway.host,
             "--port", str(fleet.gateway.port)]
    child = world.start(words, environ=litellm_environment(world.environ, fleet, key), log=log,
                        directory=place)
    stops.callback(child.stop)

    until = world.clock() + LITELLM_START_SECONDS
    while who_serves(world, fleet, key, until) != OUR_GATEWAY:
        if child.ended() or world.clock() > until:
            raise FleetError("litellm-failed", "LiteLLM did not start", fix=f"see {log}")
        world.sleep(TICK_SECONDS)


def open_door(world: World, fleet: Fleet, key: str) -> Listener:
    """Return the port at which the fleet will be served; of a taken one, say who has it."""
    gateway = fleet.gateway
    try:
        return world.listen(gateway.host, gateway.port)
    except FleetError as error:
        if error.slug != "port-taken":
            raise
        what = error.what

    server = who_serves(world, fleet, key, world.clock() + 1.0)
    if server:
        what += f", by {server}"
    holder = describe_holder(world, gateway.port)
    fix = name_free_port(world, fleet, OTHER_PORT)
    if not holder:
        fix += f" (lsof -nP -iTCP:{gateway.port} -sTCP:LISTEN shows it)"
    raise FleetError("port-taken", what + holder, fix=fix)


def receipts_path(world: World, out: str) -> str:
    """Return where the gateway of a workspace files what each request came to."""
    world.make_directory(world.below(out, STATE_DIRECTORY))
    return world.enter(out, RECEIPTS_FILE)


# -- start --

@command("up", "do the whole job: find, generate, warm, serve, run Claude Code", CONFIG, OUT,
         TRUST,
         Flag("--node", "also take this machine; may be repeated", "NAME=URL", REPEAT),
         Flag("--ui", "show the dashboard, too"),
         group=START, examples=("up", "up --ui", "up -- -p 'say hi'"), passes="ARGS")
def cmd_up(options: Options, world: World) -> int:
    """Do the whole job. What is said goes to standard error: standard output is Claude Code's."""
    fleet = find_or_write_fleet(options, world)
    ask_trust(fleet, options, world)
    workspace = open_workspace(options, world)
    fleet = choose_port(workspace, fleet)
    write_unedited(workspace, fleet)
    key = workspace.read_key(fleet)
    check_key(fleet, key, options, world)

    signals: list[str] = []
    with contextlib.ExitStack() as stops:
        # What it refuses is told before models load.
        start_gateway(world, fleet, key, out=workspace.out, stops=stops)
        if options.ui:
            page = listen_for_page(Options(), world)
            url = open_dashboard(workspace, fleet, options, page, stops)
            world.err(f"The dashboard is at {url}\n")
        warm_for_session(fleet, options, world)

        before = ask_gateway(world, fleet, key)
        began = world.now()
        if world.which("claude"):
            status = launch_claude(workspace, fleet, options, tells_lean=True)
        else:
            status = EXIT_OK
            wait_for_signal(world, signals)
        after = ask_gateway(world, fleet, key)
        world.err(format_served(count_served(before, after), look_of(world, "stderr")))

    world.err(as_typed(list_failures(workspace, fleet, began), options.typing))
    tell_session(workspace, began, "subagent-fleet up", options)
    return EXIT_INTERRUPTED if "SIGINT" in signals else status


def find_or_write_fleet(options: Options, world: World) -> Fleet:
    """Return the fleet of the nearest file, with the machines that were typed; else write one."""
    nodes = parse_nodes(options.node, "up")
    try:
        path = find_config(world, options.config)
    except FleetError:
        path = CONFIG_NAMES[0]
        write_first_fleet(world, path, nodes, options)
        nodes = {}
    if path == "-":
        raise FleetError("usage", "up: standard input is Claude Code's, so the config must be in "
                         "a file", status=EXIT_USAGE,
                         fix="subagent-fleet up --config fleet.yaml")

    config = load_config(world, options.config)
    for node in nodes.values():
        if config.fleet.nodes.get(node.name, Node("", "")).endpoint != node.endpoint:
            addition = plan_insertion(config, node, options, world)
            replace_config(world, path, addition)
            accept_typed(world, path, [node])
            world.err(f"{clean_line(node.name)}: put into {clean_line(path)}\n")
            config = load_config(world, options.config)
    weak = lint_key(config.fleet, world.environ)
    tell_findings([*config.warnings, *weak], options, world)
    return config.fleet


def write_first_fleet(world: World, path: str, nodes: Mapping[str, Node], options: Options) -> None:
    """Write a fleet file with what this machine and the typed ones have; refuse placeholders."""
    nodes = with_this_machine(world, nodes)
    states = ask_machines(world, nodes)
    workspace = Workspace(world, world.parent(path))
    starter = plan_starter(states, read_measurements(workspace))
    if not starter.has_models:
        answers = "; ".join(line.strip() for line in format_answers(states).splitlines())
        what = f"no fleet.yaml, and no model to write one with: {answers}"
        if starter.flaw:
            what += f"; {starter.flaw}"
        raise FleetError("no-model", what, fix="start Ollama, "
                         f"`ollama pull {PLACEHOLDERS[0]}`, then `subagent-fleet up`")
    said = write_starter(world, path, nodes, starter)
    said += format_starter(starter, states, look_of(world, "stderr"))
    world.err(as_typed(said, options.typing))


def choose_port(workspace: Workspace, fleet: Fleet) -> Fleet:
    """Return a fleet that names no port with the next free one, where another has the usual."""
    world = workspace.world
    gateway = fleet.gateway
    if fleet.document.has(("project", "gateway", "port")) or not is_here(world, gateway.host):
        return fleet
    holder = who_serves(world, fleet, known_key(workspace, fleet), world.clock() + CONNECT_SECONDS)
    if holder in ("", OUR_GATEWAY, OLD_GATEWAY):
        return fleet

    free = avoid_taken_port(world, gateway)
    world.err(f"Port {gateway.port} is taken by {holder}{describe_holder(world, gateway.port)}: "
              f"this fleet gets {free.port}. Write `port: {free.port}` under project.gateway, so "
              "that it keeps it.\n")
    return replace(fleet, gateway=free)


def write_unedited(workspace: Workspace, fleet: Fleet) -> None:
    """Write what is generated, keep what a person has edited, and say what became of each."""
    changes = workspace.compare(fleet, renews=True)
    workspace.write([change for change in changes if change.action != "edited"])
    for change in changes:
        if change.action == "edited":
            workspace.world.err(f"{clean_line(change.path)}: kept, as it is yours\n")
        elif change.action != "unchanged":
            workspace.world.err(f"{clean_line(change.path)}: {change.action}\n")


def check_key(fleet: Fleet, key: str, options: Options, world: World) -> None:
    """Refuse to serve beyond this machine with a weak key, wherever that stands."""
    if not is_loopback(fleet.gateway.host):
        tell_findings(lint_key(fleet, {fleet.gateway.master_key_env: key}), options, world)


def warm_for_session(fleet: Fleet, options: Options, world: World) -> None:
    """Load every model; refuse to go on when nobody could answer the main session."""
    here = Options(typing=options.typing, config=options.config, out=options.out)
    warmths = warm_fleet(fleet, here, world, say=world.err,
                         busy_seconds=HUNG_SECONDS)
    if all(warmth.ok for warmth in warmths.values()):
        return

    silent = {warmth.node.name: NodeState(warmth.node.name, warmth.node.endpoint, warmth.reason,
                                           provider=warmth.node.provider)
              for warmth in warmths.values() if warmth.state == "not answering"}
    others = {name: node for name, node in fleet.nodes.items() if name not in silent}
    states = {**silent, **probe_nodes(world, others, PROBE_TIMEOUT_SECONDS, fleet.models)}
    routes = {name: plan_route_state(fleet, states, model)
              for name, model in fleet.models.items()}
    main = plan_tiers(fleet)["main"]
    route = routes[main]
    if all(one.state != "ready" for one in routes.values()):
        raise FleetError("nothing-ready", "no model of this fleet could be loaded",
                         fix="subagent-fleet doctor")
    if route.state not in ("ready", "cold") and not route.fallback:
        raise FleetError("nothing-ready", f"nobody can answer for {main}, the main session's "
                         f"model: {format_route_state(route)}", fix="subagent-fleet doctor")
    absent = [f"{clean_line(name)} ({format_route_state(routes[name])})"
              for name, warmth in warmths.items() if not warmth.ok]
    said = f"Going on without {', '.join(absent)}.\n"
    world.err(wrap_text(said, look_of(world, "stderr").columns, indent="  "))


def wait_for_signal(world: World, signals: list[str]) -> None:
    """Serve who comes until Ctrl-C, whose name is then in `signals`."""
    world.on_stop(signals.append)
    world.err(f"Claude Code is not on the PATH: {CLAUDE_INSTALL}\nServing until Ctrl-C.\n")
    while not signals:
        world.sleep(TICK_SECONDS)


# -- set up --

@command("init", "write fleet.yaml with the models your machines have",
         Flag("--output", "where to write, else fleet.yaml; .json writes JSON; not `-`", "FILE"),
         Flag("--node", "also ask this machine; may be repeated", "NAME=URL", REPEAT),
         SCAN, Flag("--offline", "ask nobody, write placeholders"), FORCE,
         group=SET_UP, examples=("init", "init --node mini=http://192.168.1.50:11434",
                                 "init --scan"))
def cmd_init(options: Options, world: World) -> int:
    output = options.output or CONFIG_NAMES[0]
    if output == "-":
        raise FleetError("usage", "init: it writes a file, not to standard output",
                         status=EXIT_USAGE, fix="subagent-fleet init --output fleet.yaml")
    directory, name = world.split(output)
    if Workspace(world, directory).read(name) is not None and not options.force:
        raise FleetError("exists", f"{output} is there already", status=EXIT_REFUSED,
                         fix="edit it, or `subagent-fleet init --force` (a copy is kept)")

    nodes = parse_nodes(options.node, "init")
    if not options.force:
        ask_for_second(world, output)
    scan = None
    if options.scan is not None:
        scan = look_around(options, world, "init", nodes)
    nodes = with_this_machine(world, nodes)
    states = ask_machines(world, nodes, offline=options.offline)
    if scan:
        states += [found.state for found in scan.found]
        nodes.update({found.node.name: found.node for found in scan.found})

    starter = plan_starter(states, read_measurements(Workspace(world, directory)))
    starter = fit_nodes(starter, nodes, scan)
    said = write_starter(world, output, nodes, starter, offline=options.offline)
    if scan:
        said += format_scan(scan, look_of(world))
    said += format_starter(starter, states, look_of(world))
    said += format_after_init(starter, states, look_of(world))
    world.out(as_typed(said, options.typing))
    return EXIT_OK


def look_around(options: Options, world: World, command: str, nodes: Mapping[str, Node]) -> Scan:
    """Return what a scan found beyond these nodes and this machine."""
    if options.offline:
        raise FleetError("usage", f"{command}: --offline asks nobody, --scan everybody",
                         status=EXIT_USAGE, fix=f"subagent-fleet {command} --scan")
    _, addresses = world.own_names()
    networks = plan_networks(addresses)
    if options.scan:
        networks = [parse_network(options.scan, command)]

    is_live = world.is_terminal("stderr")

    def watch(text: str) -> None:
        if is_live:  # one column short: a line that reaches the last one leaves a second behind
            world.err("\r\x1b[K" + crop(f"  Scanning: {text}", world.columns - 1))

    scan = scan_machines(world, networks, nodes, watch)
    if is_live:
        world.err("\r\x1b[K")
    known = {node.endpoint for node in nodes.values()}
    own = {"127.0.0.1", *addresses}
    found = [one for one in scan.found if one.node.endpoint not in known
             and split_endpoint(one.node.endpoint).host not in own]
    return replace(scan, found=tuple(found))


def fit_nodes(starter: Starter, nodes: Mapping[str, Node], scan: Scan | None) -> Starter:
    """Return a starter whose nodes say what they run, without those found for which is no work."""
    extras = {found.node.name for found in scan.found} if scan else set()
    busy = {model["node"] for model in starter.tree["models"].values()}
    kept = {}
    for name, values in starter.tree["nodes"].items():
        if name in extras and name not in busy:
            continue
        kept[name] = dict(values)
        if nodes[name].provider != Node.provider:
            kept[name]["provider"] = nodes[name].provider
    return replace(starter, tree={**starter.tree, "nodes": kept})


def ask_for_second(world: World, output: str) -> None:
    """Ask whether a fleet file shall hide one above, or another beside it; else refuse."""
    directory, name = world.split(output)
    if name not in CONFIG_NAMES:  # it hides none: it is only read when it is named
        return
    directory = world.real_path(directory or ".")
    path = search_config(world, directory, shown=directory)
    if not path:
        return

    path = world.real_path(path)
    what = f"{path} is the fleet of this directory already"
    is_asked = world.is_terminal("stdin") and world.is_terminal("stderr")
    if not is_asked or not world.confirm(f"{clean_line(what)}. Write {clean_line(output)}, too?"):
        raise FleetError("second-fleet", what, status=EXIT_REFUSED, fix="edit that one, or "
                         "`subagent-fleet init --force` for a second one here")


def parse_nodes(texts: Iterable[str], command: str) -> dict[str, Node]:
    """Return the Nodes of NAME=URL texts; http and the port of Ollama may be left out."""
    nodes: dict[str, Node] = {}
    for text in texts:
        name, _, url = text.partition("=")
        if not url or not obeys(name, "name"):
            refuse_node(command, text, "not of the form NAME=URL")
        try:
            endpoint = split_endpoint(full_endpoint(url)).url
        except FleetError as error:
            refuse_node(command, text, error.what)
        if name in nodes:
            refuse_node(command, text, f"a second `{name}`")
        for other in nodes.values():
            if other.endpoint == endpoint:
                refuse_node(command, text, f"the machine of `{other.name}`")
        nodes[name] = Node(name, endpoint)
    return nodes


def refuse_node(command: str, text: str, why: str) -> NoReturn:
    """Refuse what is no machine for a command."""
    flag = "" if command == "add" else "--node "
    raise FleetError("usage", f"{command}: `{text}`: {why}", status=EXIT_USAGE,
                     fix=f"subagent-fleet {command} {flag}mini=http://192.168.1.50:11434")


def with_this_machine(world: World, nodes: Mapping[str, Node]) -> dict[str, Node]:
    """Return nodes with this machine first, unless one of them is it."""
    here = own_endpoint(world)
    if any(is_same_machine(world, node.endpoint, here) for node in nodes.values()):
        return dict(nodes)
    return {"local": Node("local", here), **nodes}


def ask_machines(world: World, nodes: Mapping[str, Node], *, offline: bool = False
                 ) -> list[NodeState]:
    """Return what machines have; offline, that they were not asked."""
    if offline:
        return [NodeState(node.name, node.endpoint, "not asked", provider=node.provider)
                for node in nodes.values()]
    return list(probe_unknown(world, nodes, INIT_TIMEOUT_SECONDS).values())


def write_starter(world: World, output: str, nodes: Mapping[str, Node], starter: Starter, *,
                  offline: bool = False) -> str:
    """Write a fleet file of what was found; say what was written."""
    gateway = Gateway()
    if not offline:
        gateway = avoid_taken_port(world, gateway)
    text = render_starter(starter.tree, starter.has_models, name_project(world, output),
                          starter.notes, port=gateway.port)
    text = dress_starter(world, output, text)
    lines = replace_config(world, output, text)
    if gateway.port != Gateway.port:
        lines.append(f"Port {Gateway.port} is taken{describe_holder(world, Gateway.port)}: "
                     f"its gateway gets {gateway.port}.")
    accept_typed(world, output, nodes.values())
    return "".join(clean_line(line) + "\n" for line in lines)


def avoid_taken_port(world: World, gateway: Gateway) -> Gateway:
    """Return a gateway as it is where nobody listens at its port, else with the next free one."""
    try:
        get_page(world, gateway_url(gateway) + "/", world.clock() + 1.0)
    except NodeFailure as failure:
        if failure.reason in ("refused", "unreachable", "dns"):
            return gateway
    port = world.find_free_port(gateway.host, gateway.port)
    return replace(gateway, port=port or gateway.port)


def own_endpoint(world: World) -> str:
    """Return where Ollama answers on this machine: OLLAMA_HOST says where it listens."""
    text = world.environ.get("OLLAMA_HOST", "").strip(" \"'")
    scheme, _, rest = text.rpartition("://")
    host, _, port = rest.rpartition(":") if re.search(r":\d*$", rest) else (rest, "", "")
    if not text or scheme not in ("", "http", "https"):
        return OLLAMA_ENDPOINT
    if host in ("", "0.0.0.0", "[::]", "::"):  # everywhere is here, too
        host = "localhost"
    usual = {"": OLLAMA_PORT, "http": 80, "https": 443}[scheme]  # as Ollama reads it (0.32.15)
    try:
        return split_endpoint(f"{scheme or 'http'}://{host}:{port or usual}").url
    except FleetError:
        return OLLAMA_ENDPOINT


def is_same_machine(world: World, endpoint: str, here: str) -> bool:
    """Tell whether an endpoint is another name for the Ollama of this machine."""
    if endpoint == here:
        return True
    name, addresses = world.own_names()
    own = {"localhost", name.lower(), f"{name.lower()}.local", *addresses}
    places = []
    for url in (endpoint, here):
        place = split_endpoint(url)
        if place.host in own or is_loopback(place.host):
            place = replace(place, host="localhost")
        places.append(place)
    return places[0] == places[1]


def name_project(world: World, output: str) -> str:
    """Return the name of the directory that a fleet file is written to, if a fleet can have it."""
    _, name = world.split(world.real_path(world.parent(output)))
    return name if obeys(name, "line") else "local-dev"


def dress_starter(world: World, output: str, text: str) -> str:
    """Return a new fleet file as its name wants it: JSON, or YAML that names its schema."""
    directory, name = world.split(output)
    if name.lower().endswith(".json"):
        return json.dumps(parse_yaml(text), indent=2, ensure_ascii=False) + "\n"
    if world.kind_of(world.path(directory, "fleet.schema.json")) == "file":
        return f"# yaml-language-server: $schema=fleet.schema.json\n{text}"
    return text


def replace_config(world: World, path: str, text: str) -> list[str]:
    """Write a fleet file, keep a copy of the old one; say so in lines."""
    directory, name = world.split(path)
    beside = Workspace(world, directory)
    old = beside.read(name)
    content = text.encode("utf-8")
    if old is None:
        world.replace_files([(path, content, 0o644)])
        return [f"Created {path}"]

    if b"\r\n" in old:  # as Windows ends its lines
        content = content.replace(b"\n", b"\r\n")
    mode = 0o644 if world.others_may_read(path) else 0o600
    copy = beside.enter(backup_of(name, old))
    world.replace_files([(copy, old, 0o600), (path, content, mode)])
    return [f"Created {path}", f"The old one is kept: {copy}"]


@command("add", "put a machine and its models into fleet.yaml",
         Flag("machine", "the machine: a name, and where its Ollama answers", "NAME=URL"), CONFIG,
         Flag("--model", "this of its models; else what the fleet has already, and its largest",
              "MODEL", REPEAT),
         Flag("--dry-run", "write nothing; show what would change"),
         group=SET_UP, examples=("add mini=192.168.1.50", "add mini=mini.local --model qwen3:8b"))
def cmd_add(options: Options, world: World) -> int:
    path = find_config(world, options.config)
    if path == "-":
        raise FleetError("usage", "add: it changes a file, so the config must be in one",
                         status=EXIT_USAGE, fix="subagent-fleet add --config fleet.yaml")
    node, = parse_nodes([options.machine], "add").values()
    config = load_config(world, options.config)
    text = plan_insertion(config, node, options, world)

    change = Change(path, config.fleet.document.text.encode("utf-8"), text.encode("utf-8"),
                    ours=True)
    world.out(format_diff([change], config.fleet, look_of(world)))
    if options.dry_run:
        return EXIT_OK

    _, kept = replace_config(world, path, text)
    accept_typed(world, path, [node])
    before = {finding.what for finding in config.warnings}
    after = load_config(world, options.config).warnings
    tell_findings([finding for finding in after if finding.what not in before], options, world)
    world.out(f"\n{clean_line(path)} has {clean_line(node.name)}. {clean_line(kept)}\n")
    world.out(as_typed("Next: `subagent-fleet up`, or `subagent-fleet generate`\n",
                       options.typing))
    return EXIT_OK


def plan_insertion(config: Config, node: Node, options: Options, world: World) -> str:
    """Return the text of a fleet file with one more machine, which is asked for its models."""
    fleet = config.fleet
    known = {other.endpoint: name for name, other in fleet.nodes.items()}
    if node.name in fleet.nodes:
        raise FleetError("known-node", f"{fleet.document.source} has a node `{node.name}` already",
                         fix="choose another name, or change it there")
    if node.endpoint in known:
        raise FleetError("known-node", f"{node.endpoint} is the node `{known[node.endpoint]}` of "
                         f"{fleet.document.source} already", fix="subagent-fleet discover")

    state = probe_unknown(world, {node.name: node}, INIT_TIMEOUT_SECONDS)[node.name]
    if not state.online:
        raise FleetError("node-silent", f"node `{node.name}`: {state.why} ({node.endpoint}); "
                         "nothing was written", fix=state.mend)
    models = choose_models(fleet, state, options.model)
    added = plan_addition(fleet, state, models)
    text = insert_sections(fleet.document, added)
    check_insertion(fleet.document, text, added)
    return text


def choose_models(fleet: Fleet, state: NodeState, names: Sequence[str]) -> list[NodeModel]:
    """Return the models of a machine that shall be put in."""
    if not names:
        models = plan_added_models(fleet, state)
        if not models:
            raise FleetError("no-model", f"node `{state.name}` has no model that can answer an "
                             "agent; nothing was written",
                             fix=f"`ollama pull {PLACEHOLDERS[0]}` there")
        return models

    models = []
    for name in names:
        matches = find_models(state.models, name)
        check_names("model", () if matches else (name,), [model.name for model in state.models],
                    state.name)
        models += matches
    return models


def check_insertion(document: Document, text: str, added: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse to write a text that says anything but what was there and what was added."""
    tree: Any = document.value
    wanted = dict(tree)
    for kind, sections in added.items():
        wanted[kind] = {**wanted[kind], **sections}
    try:
        changed = Document(text, document.source)
        fleet, _ = check_fleet(changed)
        if fleet and changed.value == wanted:
            return
    except FleetError:  # of its syntax
        pass

    block = {kind: dict(sections) for kind, sections in added.items()}
    raise FleetError("cannot-add", f"{document.source} is written so that nothing can be put in; "
                     "put these lines in by hand", excerpt=dump_yaml(block),
                     fix="write them under its `nodes:` and `models:`")


@command("worker", "say how this machine becomes a node", TIMEOUT, JSON,
         group=SET_UP, examples=("worker",))
def cmd_worker(options: Options, world: World) -> int:
    name, addresses = world.own_names()
    port = split_endpoint(own_endpoint(world)).port
    nodes = {address: Node(address, f"http://{address}:{port}")
             for address in ("127.0.0.1", *filter(address_kind, addresses))}
    here, *reached = probe_nodes(world, nodes, options.timeout).values()

    program = find_ollama(world)
    system = find_system(world, in_docker=here.online and not program)
    findings = check_worker(program, here, reached)
    report = {
        "system": system, "name": name, "program": program, "ollama": here,
        "addresses": [{"address": state.name, "kind": address_kind(state.name),
                       "open": state.online} for state in reached],
        "findings": findings,
        "setup": format_setup(system, here, reached),
        "security": SECURITY_WARNING,
        "fleet": plan_worker_block(name, here, reached)}

    if options.json:
        world.out(render_report("worker", report))
    else:
        world.out(format_worker(report, look_of(world)))
    return exit_status(findings)


def exit_status(findings: Iterable[Finding]) -> int:
    """Return the exit status of a command that looks: an error is a problem."""
    return EXIT_PROBLEM if any(found.level == "error" for found in findings) else EXIT_OK


def find_ollama(world: World) -> str:
    """Return where Ollama is installed, or an empty string."""
    app = "/Applications/Ollama.app"
    program = world.which("ollama")
    if not program and world.kind_of(app) == "directory":
        return app
    return program or ""


def find_system(world: World, *, in_docker: bool) -> str:
    """Return which of WORKER_SETUPS fits: how Ollama is run on this machine."""
    if in_docker and world.which("docker"):  # it answers and is not installed
        return "docker"
    if sys.platform in ("darwin", "win32"):
        return {"darwin": "darwin", "win32": "windows"}[sys.platform]
    return "systemd" if world.which("systemctl") else "shell"


@command("generate", "write what Claude Code, LiteLLM, your shell or others read", CONFIG, OUT,
         Flag("--target", f"only these: {', '.join(TARGET_NAMES)}", "LIST", REPEAT,
              offers=TARGET_NAMES),
         Flag("--litellm-only", "only LiteLLM's config"), Flag("--claude-only", "only the agents"),
         Flag("--check", "write nothing; exit 1 when something would change"),
         Flag("--diff", "write nothing; show what would change"), FORCE, JSON, group=SET_UP,
         examples=("generate", "generate --check --diff", "generate --target claude,env"))
def cmd_generate(options: Options, world: World) -> int:
    targets = parse_targets(options)
    config = load_config(world, options.config)
    fleet = config.fleet
    targets = targets or fleet.targets
    findings = (*config.warnings, *lint_key(fleet, world.environ), *plan_losses(fleet, targets))
    tell_findings(findings, options, world)

    workspace = open_workspace(options, world)
    changes = workspace.compare(fleet, targets, renews=True)
    result = Generation(fleet, workspace.out, findings, changes)
    if options.check or options.diff:
        show_generation(result, options, world)
        return EXIT_PROBLEM if options.check and result.differs else EXIT_OK
    if result.edited and not options.force:
        refuse_generation(result, options, world)

    workspace.write(changes)
    changes = [replace(change, ours=True) for change in changes]
    result = replace(result, changes=changes, written=True)
    show_generation(result, options, world)
    if targets == fleet.targets and not options.json:
        text = format_after_generate(result, options.typing)
        world.out(wrap_text(text, look_of(world).columns, indent="    "))
    return EXIT_OK


@dataclass(frozen=True)
class Generation:
    """What `generate` would write, or has written."""

    fleet: Fleet
    out: str
    findings: tuple[Finding, ...]
    changes: list[Change]
    written: bool = False

    @property
    def listed(self) -> list[tuple[str, str]]:
        """The path of each file that is or was there, and what becomes of it."""
        return [(change.path, change.action) for change in self.changes
                if change.found or change.wanted]

    @property
    def differs(self) -> bool:
        return any(action != "unchanged" for _, action in self.listed)

    @property
    def edited(self) -> list[Change]:
        """The changes that would replace what is the user's."""
        return [change for change in self.changes if change.action == "edited"]


def show_generation(result: Generation, options: Options, world: World) -> None:
    """Print what was or would be written."""
    if options.json:
        world.out(render_report("generate", report_generation(result, options)))
    elif options.diff:
        world.out(format_diff(result.changes, result.fleet, look_of(world)))
    else:
        heading = "Would generate:\n" if options.check else "Generated:\n"
        world.out(heading + format_pairs(result.listed, look_of(world)))


def report_generation(result: Generation, options: Options) -> dict[str, Any]:
    """Return what `generate --json` says."""
    routes = [{"agent": agent, "node": model.node, "model": model.name,
               "ollama_model": model.ollama_model, "alias": model.alias}
              for agent, model in plan_routes(result.fleet).items()]
    return {"out": result.out, "written": result.written, "findings": result.findings,
            "files": [{"path": path, "action": action} for path, action in result.listed],
            "diff": format_diff(result.changes, result.fleet) if options.diff else None,
            "routes": routes}


def refuse_generation(result: Generation, options: Options, world: World) -> NoReturn:
    """Refuse to replace what is the user's, and show what would change there."""
    if not options.json:
        world.err(format_diff(result.edited, result.fleet, look_of(world, "stderr")))
    error = refuse_edited([change.path for change in result.edited], "generate",
                          "nothing was written")
    error.report = report_generation(result, options)
    raise error


def format_after_generate(result: Generation, typing: Typing) -> str:
    """Return what a person types next and, the first time, how the key stays out of git."""
    text = as_typed(format_next_steps(result.fleet, result.out), typing)
    if (ENVIRONMENT_FILE, "created") in result.listed:
        text += (f"\nKeep the key out of git: add {ENVIRONMENT_FILE} and {STATE_DIRECTORY}/ to "
                 ".gitignore.\n")
    return text


def parse_targets(options: Options) -> tuple[str, ...]:
    """Return what was chosen, if anything; --litellm-only and --claude-only are short for one."""
    if options.litellm_only and options.claude_only:
        raise FleetError("usage", "generate: --litellm-only and --claude-only exclude each other",
                         status=EXIT_USAGE, fix="subagent-fleet generate --target litellm,claude")

    words = []
    for text in options.target:
        words += [word for word in text.split(",") if word]
    if options.litellm_only:
        words.append("litellm")
    if options.claude_only:
        words.append("claude")
    check_names("target", words, TARGET_NAMES, "generate")
    return tuple(name for name in TARGET_NAMES if name in words)


@command("env", "print Claude Code's environment for your shell", CONFIG, OUT,
         Flag("--shell", "for whom", "SHELL",
              {"default": "sh", "choices": ("sh", "bash", "zsh", "fish", "json")}),
         Flag("--show-key", "show the key on a terminal, too"), TRUST,
         group=SET_UP, examples=("env", 'eval "$(subagent-fleet env)"'))
def cmd_env(options: Options, world: World) -> int:
    fleet = load_config(world, options.config).fleet
    ask_trust(fleet, options, world)
    workspace = open_workspace(options, world)
    key = workspace.read_key(fleet)
    is_shown = options.show_key or not world.is_terminal()

    if options.shell == "json":
        unset = [variable.name for variable in plan_environment(fleet) if variable.is_unset]
        shown = key if is_shown else "(--show-key shows it)"
        world.out(render_report("env", {
            "set": merge_environment({}, fleet, shown), "unset": unset}))
    else:
        # Only what the file keeps: a key of the environment stays where it is.
        kept = workspace.kept_key(fleet) if is_shown else None
        shell = "fish" if options.shell == "fish" else "sh"  # which bash and zsh understand
        world.out(render_environment(fleet, kept, shell))
    return EXIT_OK


@command("trust", "accept what a fleet file would send beyond your machines and networks", CONFIG,
         Flag("--show", "only show what that is, and what was accepted"),
         Flag("--forget", "accept nothing of it any more"), JSON,
         group=SET_UP, examples=("trust --show", "trust"))
def cmd_trust(options: Options, world: World) -> int:
    """Ask a person; who types this off a terminal has decided."""
    fleet = load_config(world, options.config).fleet
    source = fleet.document.source
    if options.forget:
        forget_stakes(world, source)

    stakes = find_stakes(world, fleet)
    untrusted = find_untrusted(world, fleet)
    is_shown = options.show or options.forget or options.json
    rows = [(stake, stake not in untrusted) for stake in stakes]
    if options.json:
        listed = [{"what": stake.what, "accepted": accepted} for stake, accepted in rows]
        world.out(render_report("trust", {"file": source, "stakes": listed}))
    else:
        world.out(format_stakes(source, rows, look_of(world)))

    if not untrusted or is_shown:
        return EXIT_OK
    if not world.confirm("Do you want that?"):
        raise FleetError("untrusted", "nothing was accepted", status=EXIT_REFUSED,
                         fix=f"change {source}")
    accept_stakes(world, source, untrusted)
    world.out("Accepted.\n")
    return EXIT_OK


def forget_stakes(world: World, source: str) -> None:
    """Keep nothing any more that was accepted of a fleet file."""
    trusted = read_trusted(world)
    if trusted.pop(trust_name(world, source), None) is not None:
        write_trusted(world, trusted)


# -- look --

@command("validate", "check the config", CONFIG, Flag("--strict", "warnings are errors"), JSON,
         group=LOOK, examples=("validate", "validate --config - < fleet.yaml"))
def cmd_validate(options: Options, world: World) -> int:
    try:
        config = load_config(world, options.config)
    except FleetError as error:
        if not options.json:
            raise
        return refuse_config(error, options, world)
    source = config.fleet.document.source
    valid = not (options.strict and config.warnings)

    if options.json:
        report = {"file": source, "valid": valid, "findings": config.warnings}
        world.out(render_report("validate", report))
        return EXIT_OK if valid else EXIT_PROBLEM

    tell_findings(config.warnings, options, world)
    if not valid:
        raise FleetError("strict", f"{count_of(config.warnings, 'warning')} and --strict",
                         fix="mend them, or leave out --strict")
    world.out(f"{clean_line(source)} is valid.\n")
    return EXIT_OK


def refuse_config(error: FleetError, options: Options, world: World) -> int:
    """Print what `validate --json` says of an invalid config; of one that cannot be read, raise."""
    report = {"file": error.where or options.config, "valid": False}
    if not error.findings:
        unread = FleetError(error.slug, error.what, where=error.where, fix=error.fix,
                            status=error.status)
        unread.report = report
        raise unread
    world.out(render_report("validate", {**report, "findings": error.findings}))
    return EXIT_PROBLEM


@command("discover", "show what every node has", CONFIG,
         Flag("--write", f"also write {STATE_DIRECTORY}/discovery.json"),
         Flag("--check", "exit 1 when a node is offline or a model missing"), SCAN, TIMEOUT,
         Flag("--verbose", "say more of what each node has", short="-v"), JSON,
         group=LOOK, examples=("discover", "discover --verbose --timeout 2", "discover --scan"))
def cmd_discover(options: Options, world: World) -> int:
    if options.scan is not None:
        return discover_machines(options, world)
    fleet = load_config(world, options.config).fleet
    states = probe_nodes(world, fleet.nodes, options.timeout, fleet.models)
    models = report_presence(fleet, states)
    report = {"fleet": fleet.name, "nodes": list(states.values()), "models": models}

    written = None
    if options.write:
        path = open_workspace(options, world).enter(f"{STATE_DIRECTORY}/discovery.json")
        content = render_report("discover", report).encode("utf-8")
        world.replace_files([(path, content, 0o644)])
        written = path.removeprefix("./")

    if options.json:
        world.out(render_report("discover", {**report, "written": written}))
    else:
        look = look_of(world)
        text = format_nodes(fleet, states, ("Node", "Status", "Models"), look)
        text += "\n" + format_presence(models, look)
        described = states
        if not options.verbose:
            described = {name: state for name, state in states.items() if not state.online}
        text += format_details(described, look, options.typing)
        if written:
            text += f"\nWrote {written}\n"
        world.out(text)

    is_whole = all(state.online for state in states.values()) \
        and all(model["state"] == "present" for model in models)
    return EXIT_PROBLEM if options.check and not is_whole else EXIT_OK


def discover_machines(options: Options, world: World) -> int:
    """Show the machines that a scan finds, in the fleet or not; without a fleet, too."""
    for name, is_typed in (("--write", options.write), ("--check", options.check)):
        if is_typed:
            raise FleetError("usage", f"discover: {name} is for the nodes of a fleet, not for "
                             "--scan", status=EXIT_USAGE, fix="subagent-fleet discover --scan")
    fleet = None
    if options.config or has_config(world):
        fleet = load_config(world, options.config).fleet
    nodes = fleet.nodes if fleet else {}
    # A machine of the fleet shall be found like any other, and said to be known.
    scan = look_around(options, world, "discover", {})
    known = {node.endpoint: name for name, node in nodes.items()}

    if options.json:
        world.out(render_report("discover", {
            "fleet": fleet.name if fleet else None, "nodes": [], "models": [], "written": None,
            "scan": report_scan(scan, known)}))
        return EXIT_OK
    look = look_of(world)
    text = format_scan(scan, look)
    if scan.found:
        text += "\n" + format_found(scan, known, look)
        text = as_typed(text, options.typing)
    if options.verbose:
        text += format_details({found.node.name: found.state for found in scan.found}, look,
                               options.typing)
    world.out(text)
    return EXIT_OK


def has_config(world: World) -> bool:
    """Tell whether there is a fleet file to be found."""
    try:
        return bool(find_config(world, None))
    except FleetError:
        return False


def report_scan(scan: Scan, known: Mapping[str, str]) -> dict[str, Any]:
    """Return what `discover --scan --json` says."""
    found = [{"node": one.state, "provider": one.node.provider,
              "known": known.get(one.node.endpoint)} for one in scan.found]
    others = [{"address": address, "why": why} for address, why in scan.others]
    return {"networks": scan.networks, "peers": [{"name": peer.name, "address": peer.address}
                                                 for peer in scan.peers],
            "addresses": scan.counts, "found": found, "others": others, "notes": scan.notes}


def report_presence(fleet: Fleet, states: dict[str, NodeState]) -> list[dict[str, str]]:
    """Return of each model whether its node has it: present, missing, or unknown."""
    words = {"node offline": "unknown", "model missing": "missing"}
    models = []
    for name, model in fleet.models.items():
        route = plan_route_state(fleet, states, model)
        fix = ""
        if route.state == "model missing":
            state = states[model.node]
            pull = f"{obtain_model(state.provider, model.ollama_model)} on {model.node}"
            correction = plan_correction(model, state)
            fix = f"{correction}, or {pull}" if correction else pull
        models.append({"name": name, "node": model.node, "ollama_model": model.ollama_model,
                       "state": words.get(route.state, "present"), "fix": fix})
    return models


@command("status", "show nodes, loaded models and routes", CONFIG, OUT,
         Flag("--watch", "again every S seconds, until Ctrl-C", "[S]",
              {**SECONDS, "nargs": "?", "const": 2.0, "default": 0.0}),
         Flag("--check", "exit 1 when a route is not ready"), TIMEOUT, JSON,
         group=LOOK, examples=("status", "status --watch", "status --check"))
def cmd_status(options: Options, world: World) -> int:
    fleet = load_config(world, options.config).fleet
    if options.watch and options.json:
        raise FleetError("usage", "status: --watch is for people, --json for programs",
                         status=EXIT_USAGE, fix="subagent-fleet status --json")

    ready = show_status(fleet, options, world)
    while options.watch:
        world.sleep(options.watch)
        ready = show_status(fleet, options, world)
    return EXIT_PROBLEM if options.check and not ready else EXIT_OK


def show_status(fleet: Fleet, options: Options, world: World) -> bool:
    """Print what is so now; tell whether every route is ready."""
    workspace = open_workspace(options, world)
    key, measured = known_key(workspace, fleet), read_measurements(workspace)
    until = world.clock() + options.timeout
    jobs = {"states": lambda: probe_nodes(world, fleet.nodes, options.timeout, fleet.models),
            "traffic": lambda: look_at_gateway(world, fleet, key, until)}
    seen = dict(run_together(world, jobs))
    states, traffic = seen["states"], seen["traffic"]
    gateway = check_gateway(fleet, traffic.holder)

    routes = {name: plan_route_state(fleet, states, model)
              for name, model in fleet.models.items()}
    ready = all(route.state == "ready" for route in routes.values())
    sentence = add_gateway(plan_next_step(fleet, states, routes), gateway)
    following = as_typed(sentence, options.typing)

    if options.json:
        world.out(render_report("status", {
            "fleet": fleet.name, "ready": ready, "next": following,
            "gateway": retype(gateway, options.typing), "work": traffic.places,
            "waiting": traffic.waiting, "nodes": list(states.values()),
            **report_status(fleet, routes, measured)}))
        return ready

    is_served = gateway.level == "ok"
    page = StatusPage(fleet, states, routes, following, world.now(),
                      places=traffic.places, waiting=traffic.waiting,
                      gateway_at=gateway_url(fleet.gateway) if is_served else "",
                      is_served=is_served, measured=measured)
    text = format_status(page, look_of(world))
    if options.watch and world.is_terminal():
        # home and clear: a redraw that does not scroll what stood there before
        text = "\x1b[H\x1b[2J" + text
    world.out(text)
    return ready


@dataclass(frozen=True)
class Traffic:
    """Who holds the gateway's port and, where that is ours, what goes on in it."""

    holder: str
    places: dict[str, SlotUse] = field(default_factory=dict)  # by model
    waiting: int = 0


def look_at_gateway(world: World, fleet: Fleet, key: str, until: float) -> Traffic:
    """Return who serves, and who is at work there; LiteLLM does not say that."""
    holder = who_serves(world, fleet, key, until)
    if holder != OUR_GATEWAY:
        return Traffic(holder)
    page = _show_key(world, gateway_url(fleet.gateway) + "/fleet", key, until)
    places = {}
    try:
        for model in page["models"]:
            places[model["name"]] = SlotUse(model["running"], model["slots"],
                                            model["rests_seconds"])
        return Traffic(holder, places, page["waiting"])
    except (KeyError, TypeError):
        return Traffic(holder)


def known_key(workspace: Workspace, fleet: Fleet) -> str:
    """Return the gateway's key where it can be read, else nothing: then who serves is unknown."""
    try:
        return workspace.find_key(fleet)
    except FleetError:
        return ""


def report_status(fleet: Fleet, routes: dict[str, RouteState],
                  measured: Sequence[Measurement]) -> dict[str, list[Any]]:
    """Return what `--json` says of each model, and again of it for each agent."""
    models = {}
    for name, model in fleet.models.items():
        known = find_measurement(measured, fleet.nodes[model.node].endpoint, model.ollama_model)
        models[name] = {"name": name, "node": model.node, "ollama_model": model.ollama_model,
                        "alias": model.alias, "context": model.context, **vars(routes[name]),
                        "measured": known}
    agents = [{"agent": agent.name, "model": agent.model, **models[agent.model]}
              for agent in fleet.agents.values()]
    return {"models": list(models.values()), "routes": agents}


# -- the page --

class Lookout:
    """Looks at a fleet for its dashboard: machines, who happens to work, what is wrong."""

    def __init__(self, workspace: Workspace, fleet: Fleet, options: Options,
                 dashboard: Dashboard) -> None:
        self._world, self._workspace = workspace.world, workspace
        self._fleet, self._options, self._dashboard = fleet, options, dashboard
        self._names = AgentNames(workspace.world, known_agents(options, workspace.world))
        self._reader = ReceiptsReader(workspace)
        self._is_followed = False
        self._findings: Sequence[Finding] = ()

    def start(self) -> None:
        """Look from now on, in threads that end with the dashboard or the process."""
        for work in (self._look, self._listen, self._examine):
            threading.Thread(target=self._repeat, args=(work,), daemon=True).start()

    def _repeat(self, work: Callable[[], float]) -> None:
        """Work, pause as long as that says, and again; a failure is no reason to stop looking."""
        while not self._dashboard.stops:
            pause = PICTURE_SECONDS
            with contextlib.suppress(FleetError):
                pause = work()
            until = self._world.clock() + pause
            while not self._dashboard.stops and self._world.clock() < until:
                self._world.sleep(TICK_SECONDS)

    def _look(self) -> float:
        """Show what is so now, while somebody looks."""
        if not self._dashboard.is_watched:
            return TICK_SECONDS
        began, world, fleet = self._world.clock(), self._world, self._fleet
        key = known_key(self._workspace, fleet)
        jobs: dict[str, Callable[[], Any]] = {
            "states": lambda: probe_nodes(world, fleet.nodes, PICTURE_SECONDS, fleet.models)}
        if not self._is_followed:
            jobs["holder"] = lambda: who_serves(world, fleet, key, began + PICTURE_SECONDS)
        seen = dict(run_together(world, jobs))
        gateway = check_gateway(fleet, seen.get("holder", OUR_GATEWAY))
        self._dashboard.show(plan_picture(Sight(
            fleet, seen["states"], gateway, world.now(), self._options.typing,
            is_followed=self._is_followed, findings=self._findings, names=self._name_askers(),
            warmup=read_warmup(self._workspace), log=self._read_log())))
        return max(PICTURE_SECONDS - (world.clock() - began), TICK_SECONDS)

    def _name_askers(self) -> list[dict[str, str]]:
        """Return who asked: the name of an agent is not on the wire, only its id."""
        names: dict[tuple[str, str], str] = {}
        for event in self._dashboard.hub.requests():
            if isinstance(event, (RequestBegun, Receipt)) and event.agent:
                name = self._names.find(event.session, event.agent, event.alias)
                names[event.session, event.agent] = name
        return [{"session": session, "agent": agent, "name": name}
                for (session, agent), name in names.items()]

    def _read_log(self) -> str:
        """Return the end of LiteLLM's log, where LiteLLM serves."""
        if self._fleet.gateway.provider != "litellm":
            return ""
        path = self._workspace.enter(LITELLM_LOG_FILE)
        begin = max(0, self._world.size_of(path) - LOG_PART_BYTES)
        return self._world.read_part(path, begin, LOG_PART_BYTES).decode("utf-8", "replace")

    def _examine(self) -> float:
        """Find what is wrong, now and then."""
        if not self._dashboard.is_watched:
            return TICK_SECONDS
        facts = observe(self._workspace, self._fleet, problems=(), seconds=PROBE_TIMEOUT_SECONDS)
        self._findings = [retype(finding, self._options.typing)
                          for _, finding in plan_doctor(self._fleet, facts)]
        return FINDINGS_SECONDS

    def _listen(self) -> float:
        """Hand on what the gateway tells; where it does not, what it has filed."""
        for receipt in self._reader.read()[-RECEIPTS_SHOWN:]:
            self._hand_on(receipt)
        key = known_key(self._workspace, self._fleet)
        with contextlib.suppress(NodeFailure):
            for told in follow_events(self._world, self._fleet, key):
                if told.get("kind") == "hello":
                    self._is_followed = True
                self._hand_on(told)
        if self._is_followed:
            self._is_followed = False
            self._dashboard.begin_anew()
        return LISTEN_AGAIN_SECONDS

    def _hand_on(self, value: Mapping[str, Any]) -> None:
        event = parse_event(value)
        if event:
            self._dashboard.hub.publish(event)


def open_dashboard(workspace: Workspace, fleet: Fleet, options: Options, listener: Listener,
                   stops: contextlib.ExitStack) -> str:
    """Serve a fleet's page until `stops` is left; return its address, which opens it."""
    dashboard = Dashboard(workspace.world)
    serving = threading.Thread(target=dashboard.run, args=(listener,), daemon=True)
    serving.start()
    Lookout(workspace, fleet, options, dashboard).start()
    stops.callback(serving.join, GRACE_SECONDS + 1)  # the last one comes first
    stops.callback(dashboard.stop, "end")

    place = f"http://{show_host(listener.host)}:{listener.port}/?token="
    if not options.no_open and workspace.world.is_terminal("stderr"):
        workspace.world.open_page(place + dashboard.ticket())
    return place + dashboard.token


def listen_for_page(options: Options, world: World) -> Listener:
    """Return the port of the page: the typed one, else the usual one or the next that is free."""
    host = options.host or "127.0.0.1"
    if not is_loopback(host):
        raise FleetError("page-far", f"ui: the page is for this machine alone, and `{host}` is "
                         "not its loopback", status=EXIT_REFUSED,
                         fix="on the machine where you sit: ssh -L 8080:127.0.0.1:8080 HOST")
    port = options.port or str(PAGE_PORT)
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise FleetError("usage", f"--port: `{port}` is not a port", status=EXIT_USAGE,
                         fix=f"write --port {PAGE_PORT}")
    try:
        return world.listen(host, int(port))
    except FleetError as error:
        if error.slug != "port-taken":
            raise
        if options.port:
            raise FleetError("port-taken", error.what, fix="subagent-fleet ui --port 0") from None
    return world.listen(host, world.find_free_port(host, PAGE_PORT))


@command("ui", "watch the fleet on a page in your browser", CONFIG, OUT,
         Flag("--port", "the page's port; 0: any", "PORT", {"default": ""}),
         Flag("--host", "another address of this machine's loopback", "HOST", {"default": ""}),
         Flag("--no-open", "only print the address"),
         group=LOOK, examples=("ui", "ui --port 8090 --no-open"))
def cmd_ui(options: Options, world: World) -> int:
    fleet = load_config(world, options.config).fleet
    workspace = open_workspace(options, world)
    listener = listen_for_page(options, world)
    signals: list[str] = []
    with contextlib.ExitStack() as stops:
        url = open_dashboard(workspace, fleet, options, listener, stops)
        world.on_stop(signals.append)
        world.out(f"{clean_line(fleet.name)} is at {url}\nCtrl-C stops.\n")
        while not signals:
            world.sleep(TICK_SECONDS)
    return EXIT_INTERRUPTED if "SIGINT" in signals else EXIT_OK


@command("doctor", "find what is wrong, and say what mends it", CONFIG, OUT,
         Flag("--fix", "mend what is safe: permissions, stale and missing files"),
         Flag("--verbose", "on a terminal, also list what is right", short="-v"), TIMEOUT, JSON,
         group=LOOK, examples=("doctor", "doctor --fix", "doctor --json"))
def cmd_doctor(options: Options, world: World) -> int:
    fleet = None
    try:
        config = load_config(world, options.config)
        fleet = config.fleet
        problems = config.warnings
    except FleetError as error:
        problems = error.findings or (error.finding,)

    workspace = open_workspace(options, world)
    facts = observe(workspace, fleet, problems=problems, seconds=options.timeout)
    mended = []
    if options.fix and fleet:
        mended = mend_files(workspace, facts)
        facts = observe_files(workspace, fleet, facts)

    findings = [(topic, retype(finding, options.typing))
                for topic, finding in plan_doctor(fleet, facts)]
    verdict = plan_verdict([finding for _, finding in findings])
    for _, finding in findings:
        if finding.slug in ("port-free", "litellm-down"):  # no error: it may be about to start
            verdict = add_gateway(verdict, finding)
    if options.json:
        listed = [{"topic": topic, **show_record(finding)} for topic, finding in findings]
        world.out(render_report("doctor", {
            "verdict": verdict, "mended": mended, "findings": listed}))
    else:
        world.out(format_doctor(findings, verdict, look_of(world), mended=mended,
                                verbose=options.verbose))
    return exit_status(finding for _, finding in findings)


def mend_files(workspace: Workspace, facts: Facts) -> list[str]:
    """Mend what nobody wrote by hand: old generated files, the mode of the key's; say each."""
    mended = []
    if "env-readable" in facts.leaks:
        mended.append(f"{facts.env_path}: only you may read it now")
    stale = [change for change in facts.changes
             if change.action in ("created", "updated", "removed")]
    mended += [f"{change.path}: {change.action}" for change in stale]
    if mended:
        workspace.write(stale)
    return mended


def observe(workspace: Workspace, fleet: Fleet | None, *, problems: Sequence[Finding],
            seconds: float) -> Facts:
    """Return the Facts of this machine and, where there is a fleet, of its nodes and files."""
    world = workspace.world
    until = world.clock() + seconds  # at which every job ends by itself
    facts = Facts(problems=tuple(problems), agents=world.read_tree(".claude/agents", ".md"),
                  litellm=find_litellm(world))
    jobs: dict[str, Callable[[], Any]] = {}

    program = world.which("claude")
    if program:
        jobs["claude"] = lambda: ask_version(world, program, until)
    if fleet:
        weak = lint_key(fleet, world.environ)
        paths = [*managed_settings(world), *usual_settings(world)]
        facts = replace(facts, settings=find_settings(world, paths), problems=(*problems, *weak))
        facts = observe_files(workspace, fleet, facts)
        key = known_key(workspace, fleet)
        jobs["states"] = lambda: probe_nodes(world, fleet.nodes, seconds, fleet.models)
        jobs["looks"] = lambda: look_at_nodes(world, fleet, until)
        jobs["holder"] = lambda: who_serves(world, fleet, key, until)
        jobs["programs"] = lambda: look_at_programs(workspace, fleet, facts, until)

    answers = {key: answer for key, answer in run_together(world, jobs) if key}
    return replace(facts, **answers)


def look_at_programs(workspace: Workspace, fleet: Fleet, facts: Facts, until: float
                     ) -> dict[str, SeenProgram]:
    """Return what is seen of each program that files were or shall be generated for, in order."""
    owners = {target.name for target in map(target_of, (
        change.path for change in facts.changes)) if target}
    jobs = {name: partial(look_at_program, workspace, fleet, harness, until)
            for name, harness in HARNESSES.items() if name in owners}
    seen = {name: program for name, program in run_together(workspace.world, jobs) if name}
    return {name: seen[name] for name in jobs}


def look_at_program(workspace: Workspace, fleet: Fleet, harness: Harness, until: float
                    ) -> SeenProgram:
    """Return the version of a program, and which models it knows; nobody is asked."""
    world = workspace.world
    program = world.which(harness.program)
    if not program:
        return SeenProgram()
    listed = None
    if harness.lists_models:
        start = harness.start(fleet, workspace.path(harness.directory()), "")
        environ = {**harness_environment(world.environ, fleet, ""), **start.environment}
        listed = world.read_program([program, *harness.lists_models], until, environ)
    version = ask_version(world, program, until)
    has_key = bool(world.environ.get(fleet.gateway.master_key_env))
    return SeenProgram(version, has_key, listed)


def find_litellm(world: World) -> str | None:
    """Return LiteLLM's version and whether litellm_init.pth lies beside it, None without it."""
    program = world.which("litellm")
    if not program:
        return None

    # It is not run: `--version` takes 10 s and calls out (1.106.2), a .pth may do harm.
    names: list[str] = []
    for place in ("lib/python*", "Lib"):
        names += world.names_near(program, f"../{place}/*-packages/litellm*")
    versions = re.findall(r"^litellm-(\d.*)\.dist-info$", "\n".join(names), re.M)
    version = versions[-1] if versions else "?"
    if "litellm_init.pth" in names:
        version += " with litellm_init.pth"
    return version


def ask_version(world: World, program: str, until: float) -> str:
    """Return the first word that a program prints of its version, or `?`."""
    words = (world.read_program([program, "--version"], until) or "").split()
    numbers = [word for word in words if re.match(r"v?\d+\.\d", word)]
    return (numbers or words)[0][:40] if words else "?"


def look_at_nodes(world: World, fleet: Fleet, until: float) -> dict[str, Exposure]:
    """Return who can reach each node beside the fleet, all asked at once."""
    jobs = {name: lambda node=node: look_at_node(world, node, until)
            for name, node in fleet.nodes.items()}
    return {name: seen for name, seen in run_together(world, jobs) if name}


def look_at_node(world: World, node: Node, until: float) -> Exposure:
    """Return who can reach a node beside the fleet."""
    foreign = "https://fleet-doctor.invalid"
    addresses: tuple[str, ...] = ()
    allowed = ""
    with contextlib.suppress(NodeFailure):  # how a node fails is in its state
        places = world.resolve(split_endpoint(node.endpoint).host, 0, until)
        addresses = tuple(sorted({address[0] for *_, address in places}))
        url = node.endpoint + backend_of(node).identify().path
        headers = get_page(world, url, until, Origin=foreign).headers
        allowed = headers.get("access-control-allow-origin", "")
    return Exposure(addresses, allowed in ("*", foreign))


@command("logs", "show the latest requests: which machine answered which agent", CONFIG, OUT,
         Flag("--follow", "go on as requests end, until Ctrl-C", short="-f"),
         Flag("--lines", "how many", "N", {"type": parse_count, "default": 20}, short="-n"),
         Flag("--failed", "only what failed, or failed on one machine before another"), JSON,
         group=LOOK, examples=("logs", "logs --follow --failed"))
def cmd_logs(options: Options, world: World) -> int:
    if options.follow and options.json:
        raise FleetError("usage", "logs: --follow is for people, --json for programs",
                         status=EXIT_USAGE, fix="subagent-fleet logs --json")
    workspace = open_workspace(options, world)
    reader = ReceiptsReader(workspace)
    names = AgentNames(world, known_agents(options, world))
    receipts = choose_receipts(reader.read(), options)[-options.lines:]
    requests = [report_receipt(receipt, names) for receipt in receipts]

    if options.json:
        world.out(render_report("logs", {"requests": requests}))
        return EXIT_OK
    if not requests:
        path = clean_line(workspace.path(RECEIPTS_FILE))
        world.err(as_typed(f"No such request in {path}; `subagent-fleet up` and `subagent-fleet "
                           "serve` keep them there.\n", options.typing))

    widths = log_widths(requests)
    world.out(format_log_head(widths, look_of(world)))
    while True:
        for request in requests:
            world.out(format_log_line(request, widths, world.now(), look_of(world)))
        if not options.follow:
            tell_node_logs(requests, options, world)
            return EXIT_OK
        world.sleep(TICK_SECONDS)
        requests = [report_receipt(receipt, names)
                    for receipt in choose_receipts(reader.read(), options)]


def tell_node_logs(requests: Sequence[dict[str, Any]], options: Options, world: World) -> None:
    """Say where a machine's own log is, of those that refused what they were asked."""
    failures = [failure for request in requests for failure in request["failures"]]
    kinds = {"api_error", *REFUSAL_KINDS.values()}
    names = {failure["node"] for failure in failures if failure["why"] in kinds}
    with contextlib.suppress(FleetError):  # without a valid fleet nobody knows what they run
        fleet = load_config(world, options.config).fleet
        for name in sorted(names & set(fleet.nodes)):
            backend = backend_of(fleet.nodes[name])
            said = f"\n{backend.title}'s own log on {name}: {backend.log}\n"
            if backend.log:
                world.err(wrap_text(said, look_of(world, "stderr").columns, indent="  "))


def choose_receipts(receipts: Sequence[dict[str, Any]], options: Options) -> list[dict[str, Any]]:
    """Return all of them, or those in which something failed."""
    return [receipt for receipt in receipts if not options.failed
            or receipt.get("outcome") != "ok" or receipt.get("tries")]


class LogLines:
    """Says of each request how it ended, and of each refusal why, as it happens."""

    def __init__(self, world: World, fleet: Fleet) -> None:
        self._world = world
        self._names = AgentNames(world, agents_by_alias(fleet))
        names = [{"name": name} for name in fleet.agents]
        models = [{"model": model.name, "node": model.node} for model in fleet.models.values()]
        self.widths = log_widths([*names, *models])

    def take(self, event: Event | Rejection) -> None:
        look, now = look_of(self._world, "stderr"), self._world.now()
        if isinstance(event, Rejection):
            words = f"{event.http}, {event.what}"
            parts = [Styled(format_clock(now, now)), Styled(" refused:", "warn"), Styled(words)]
            self._world.err(format_words(parts, look, indent=LOG_INDENT))
        elif isinstance(event, Receipt):
            receipt = {**vars(event), "tries": [vars(each) for each in event.tries]}
            request = report_receipt(receipt, self._names)
            self._world.err(format_log_line(request, self.widths, now, look, more=True))


def known_fleet(options: Options, world: World) -> Fleet | None:
    """Return the fleet, None where none can be read and none was named."""
    try:
        return load_config(world, options.config).fleet
    except FleetError:
        if options.config:
            raise
        return None  # what was asked can be told without a fleet


def known_agents(options: Options, world: World) -> dict[str, list[str]]:
    """Return {alias: the agents whose model has it}; nothing where there is no valid fleet."""
    fleet = known_fleet(options, world)
    return agents_by_alias(fleet) if fleet else {}


class AgentNames:
    """Who asked: the name of an agent is not on the wire, only its id (2.1.326)."""

    def __init__(self, world: World, agents: dict[str, list[str]]) -> None:
        self._world = world
        self._agents = agents  # by alias
        self._kept: dict[tuple[str, str], str] = {}

    def find(self, session: str, agent: str, alias: str) -> str:
        """Return a name, `NAME?` where only its alias tells it, else the id."""
        if not agent:
            return "main"
        if (session, agent) not in self._kept:
            self._kept[session, agent] = find_agent_type(self._world, session, agent)
        name = self._kept[session, agent]
        if name:
            return name
        candidates = self._agents.get(alias, [])
        return f"{candidates[0]}?" if len(candidates) == 1 else agent


def report_receipt(receipt: dict[str, Any], names: AgentNames) -> dict[str, Any]:
    """Return what is shown of a request: its receipt, who asked, and why a machine failed."""
    texts = {key: str(receipt.get(key) or "")
             for key in ("id", "session", "agent", "alias", "model", "node", "outcome", "said")}
    tries = receipt.get("tries")
    failures = [{"node": str(tried.get("node")), "why": str(tried.get("why"))}
                for tried in tries if isinstance(tried, dict)] if isinstance(tries, list) else []
    numbers = {}
    for key in ("waited", "first_byte", "total", "input_tokens", "output_tokens"):
        number = receipt.get(key)
        numbers[key] = number if isinstance(number, (int, float)) else None
    name = names.find(texts["session"], texts["agent"], texts["alias"])
    return {"time": receipt["time"], "name": name, **texts, "failures": failures, **numbers}


@command("trace", "show which machine served which agent, and whether as planned",
         Flag("session", "`last`, or how its id begins; without one they are listed", "SESSION",
              {"nargs": "?", "default": ""}), CONFIG, OUT,
         Flag("--audit", "ask five questions of every subagent; exit 1 where one is answered no"),
         Flag("--follow", "go on while it is at work, until Ctrl-C", short="-f"),
         Flag("--since", "only what was at work since: 90s, 30m, 2h, 1d", "AGE",
              {"type": parse_age, "default": 0.0}),
         Flag("--prompts", "show what each agent was asked, whole"), JSON,
         group=LOOK, examples=("trace", "trace last", "trace --audit", "trace last --follow"))
def cmd_trace(options: Options, world: World) -> int:
    if options.follow and options.json:
        raise FleetError("usage", "trace: --follow is for people, --json for programs",
                         status=EXIT_USAGE, fix="subagent-fleet trace last --json")
    workspace = open_workspace(options, world)
    facts = observe_traces(workspace, options)
    sessions = find_sessions(workspace, read_receipts(workspace))
    if options.since:
        sessions = [each for each in sessions if each.at >= world.now() - options.since]
    chosen = choose_sessions(sessions, options)
    if chosen is None:
        return list_sessions(sessions, options, world)

    readers = [SessionReader(workspace, each, facts) for each in chosen]
    if options.follow:
        return follow_session(readers[0], options, world)
    reports = [reader.read(audits=options.audit) for reader in readers]
    if options.json:
        world.out(render_report("trace", {"sessions": [
            show_session(report, prompts=options.prompts) for report in reports]}))
    else:
        world.out("\n".join(show_trace(report, options, look_of(world)) for report in reports))
    return EXIT_PROBLEM if any(report.refused for report in reports) else EXIT_OK


def show_trace(report: SessionReport, options: Options, look: Look) -> str:
    """Return a session as it was asked for."""
    text = format_trace(report, look, prompts=options.prompts)
    return text + format_audit(report, look) if options.audit else text


def choose_sessions(sessions: Sequence[SessionFile], options: Options
                    ) -> Sequence[SessionFile] | None:
    """Return the sessions that were asked for; None: none was named, so they are listed."""
    wanted = options.session
    if not wanted and not options.follow:
        if len(sessions) == 1 or (options.audit and options.since and sessions):
            return sessions
        if not options.audit and not options.prompts:
            return None
    if wanted in ("", "last"):
        matches = sessions[:1]
    else:
        matches = [each for each in sessions if each.id.startswith(wanted)]
    if len(matches) == 1:
        return matches

    if not sessions:
        raise FleetError("no-session", "neither Claude Code nor the gateway kept a session of this "
                         "directory", fix="cd to its project, or subagent-fleet up")
    ids = some_of([each.id for each in matches or sessions], 4)
    what = f"`{wanted}` begins the ids of {len(matches)} sessions" if matches else \
        f"no session's id begins with `{wanted}`"
    raise FleetError("no-session", what, fix=f"name one of {ids}")


def list_sessions(sessions: Sequence[SessionFile], options: Options, world: World) -> int:
    """Print the sessions there are, the latest first, each with the beginning of its prompt."""
    listed = sessions[:LISTED_SESSIONS]
    entries: list[dict[str, Any]] = []
    for each in listed:
        prompt = first_line(read_first_prompt(world, each))
        entries.append({"session": each.id, "prompt": crop(clean_line(prompt), 80),
                        "ended": each.at, "subagents": len(subagent_paths(world, each)),
                        "requests": each.requests})
    if options.json:
        world.out(render_report("trace", {"sessions": entries}))
        return EXIT_OK
    if not listed:
        world.err(as_typed("No session of Claude Code was found for this directory, and none in "
                           "its gateway's receipts; `subagent-fleet up` begins one.\n",
                           options.typing))
        return EXIT_OK

    ids = short_ids([each.id for each in listed])
    rows = [(ids[entry["session"]], format_moment(entry["ended"], world.now()),
             entry["subagents"] + 1, entry["requests"] or "-", entry["prompt"] or "-")
            for entry in entries]
    world.out(format_sessions(rows, look_of(world)))
    more = len(sessions) - len(listed)
    tail = f"{more:,} older ones are left out; --since says how far to go back. " if more else ""
    world.err(as_typed(f"{tail}`subagent-fleet trace last` shows the first of them.\n",
                       options.typing))
    return EXIT_OK


def short_ids(ids: Sequence[str]) -> dict[str, str]:
    """Return {id: a beginning of it that no other has}."""
    length = 8
    while len({each[:length] for each in ids}) < len(ids):
        length += 4
    return {each: each[:length] for each in ids}


def observe_traces(workspace: Workspace, options: Options) -> TraceFacts:
    """Return what sessions are compared with: the fleet file and the agents' files as they are."""
    world = workspace.world
    facts = TraceFacts(None, world.now(), files=find_agent_sources(workspace))
    fleet = known_fleet(options, world)
    if fleet is None:
        return facts
    path = find_config(world, options.config)
    changed = world.changed_at(path) if path != "-" else 0.0
    return replace(facts, fleet=fleet, fleet_path=path, fleet_changed=changed)


def follow_session(reader: SessionReader, options: Options, world: World) -> int:
    """Print a session again whenever something has changed in it, until Ctrl-C."""
    shown = ""
    while True:
        text = show_trace(reader.read(audits=options.audit, follows=True), options, look_of(world))
        if text != shown:
            # home and clear: a redraw that does not scroll what stood there before
            world.out(f"\x1b[H\x1b[2J{text}" if world.is_terminal() else f"{text}\n")
        shown = text
        world.sleep(FOLLOW_SECONDS)


# -- serve --

@command("wake", "wake machines that sleep, and wait until they answer",
         Flag("nodes", "these nodes; else all that have a `mac:`", "NODE",
              {"nargs": "*", "default": ()}, offers=("nodes",)), CONFIG,
         Flag("--via", "send there, else to the broadcast addresses of this machine's networks",
              "ADDRESS[:PORT]", {"default": ""}),
         Flag("--timeout", "seconds to wait", "S", {**SECONDS, "default": WAKE_SECONDS}), TRUST,
         JSON, group=SERVE, examples=("wake", "wake mini", "wake mini --via 192.168.1.255"))
def cmd_wake(options: Options, world: World) -> int:
    fleet = load_config(world, options.config).fleet
    check_names("node", options.nodes, fleet.nodes, fleet.name)
    ask_trust(fleet, options, world)
    nodes = choose_sleepers(fleet, options.nodes)
    via = parse_via(options.via) or [(host, WAKE_PORT) for host in world.broadcast_addresses()]

    wakings = []
    look = look_of(world)
    for waking in wake_nodes(world, nodes, options.timeout, via):
        if waking:
            wakings.append(waking)
            if not options.json:
                world.out(format_waking(waking.node, waking.state, waking.seconds, look))
    if options.json:
        world.out(render_report("wake", {"results": wakings, "via": [host for host, _ in via]}))
    is_whole = all(waking.state in ("awake", "woken") for waking in wakings)
    return EXIT_OK if is_whole else EXIT_PROBLEM


def choose_sleepers(fleet: Fleet, names: Sequence[str]) -> list[Node]:
    """Return the nodes to wake; one without a hardware address is refused."""
    chosen = [fleet.nodes[name] for name in dict.fromkeys(names)]
    chosen = chosen or [node for node in fleet.nodes.values() if node.mac]
    for node in chosen or fleet.nodes.values():
        if not node.mac:
            raise FleetError("no-mac", f"nodes.{node.name} has no `mac:`, so nobody can wake it",
                             fix=plan_mac_hint(node))
    return chosen


def parse_via(text: str) -> list[tuple[str, int]]:
    """Return where to send, from what was typed: an IPv4 address and perhaps a port."""
    if not text:
        return []
    host, _, port = text.partition(":")
    is_address = re.fullmatch(r"\d{1,3}([.]\d{1,3}){3}", host) and is_private(host)
    is_everybody = host == "255.255.255.255"
    if (is_address or is_everybody) and re.fullmatch(r"[0-9]{0,5}", port) \
            and int(port or WAKE_PORT) < 65536:
        return [(host, int(port or WAKE_PORT))]
    raise FleetError("usage", f"wake: --via: `{text}` is not an address of a private network",
                     status=EXIT_USAGE, fix="subagent-fleet wake --via 192.168.1.255")


def wake_sleepers(fleet: Fleet, names: Collection[str], world: World,
                  say: Callable[[str], None]) -> None:
    """Wake those of these nodes that have a hardware address and do not answer; say so."""
    nodes = [node for name, node in fleet.nodes.items() if node.mac and name in names]
    if not nodes or find_untrusted(world, fleet):
        return
    via = [(host, WAKE_PORT) for host in world.broadcast_addresses()]
    for waking in wake_nodes(world, nodes, WAKE_SECONDS, via):
        if waking and waking.state != "awake":
            say(format_waking(waking.node, waking.state, waking.seconds, look_of(world)))


@command("warmup", "load models before you need them", CONFIG,
         Flag("--model", "only this model; may be repeated", "MODEL", REPEAT, offers=("models",)),
         Flag("--agent", "only the model of this agent; may be repeated", "AGENT", REPEAT,
              offers=("agents",)),
         Flag("--pull", "download what a node lacks"),
         Flag("--unload", "take models out of memory"),
         Flag("--timeout", "seconds for each model; else its own `timeout`", "S",
              {**SECONDS, "default": 0.0}), JSON,
         group=SERVE, examples=("warmup", "warmup --agent implementer", "warmup --pull"))
def cmd_warmup(options: Options, world: World) -> int:
    fleet = load_config(world, options.config).fleet
    check_names("agent", options.agent, fleet.agents, fleet.name)
    check_names("model", options.model, fleet.models, fleet.name)

    if options.json:
        warmths = warm_fleet(fleet, options, world, say=lambda text: None)
        results = [report_warmth(name, warmth) for name, warmth in warmths.items()]
        world.out(render_report("warmup", {"results": results}))
    else:
        warmths = warm_fleet(fleet, options, world, say=world.out)
    return EXIT_OK if all(warmth.ok for warmth in warmths.values()) else EXIT_PROBLEM


def warm_fleet(fleet: Fleet, options: Options, world: World, *, say: Callable[[str], None],
               busy_seconds: float = WarmUp.busy_seconds) -> dict[str, Warmth]:
    """Load models as their routes will ask for them; say of each how it ended, when it does."""
    warmths = plan_warmths(fleet, options)
    groups: dict[str, dict[str, Warmth]] = {}
    for warmth in warmths.values():
        groups.setdefault(warmth.node.name, {})[warmth.model.name] = warmth

    if not options.unload:
        wake_sleepers(fleet, groups, world, say)
    say("Unloading models:\n" if options.unload else "Warming models:\n")
    rows = {name: (name, warmth.node.name, warmth.model.ollama_model)
            for name, warmth in warmths.items()}
    widths = [max(map(width_of, column)) for column in zip(*rows.values())]
    told: dict[str, str] = {}
    is_live = world.is_terminal("stderr")
    clear = "\r\x1b[K" if is_live else ""
    how = WarmUp(options.timeout or None, busy_seconds, pull=options.pull, unload=options.unload)
    by_node = {name: list(group.values()) for name, group in groups.items()}
    progress = WarmupFile(open_workspace(options, world))
    try:
        for _ in warm_nodes(world, by_node, how):
            progress.write(warmths)
            world.err(clear)
            for name, warmth in warmths.items():
                is_news = warmth.stage == "busy" or warmth.stage == "done"
                state = f"{warmth.stage} {warmth.state}"
                if is_news and told.get(name) != state:
                    told[name] = state
                    warmth.fix = as_typed(warmth.fix, options.typing)
                    before = f"  {pad_row(rows[name], widths)}"
                    say(format_warmth(warmth, before=before, look=look_of(world)))
            if is_live:
                world.err(format_progress(groups, world.clock(), world.columns))
    finally:
        progress.write(warmths, last=True)
        world.err(clear)
    return warmths


WARMUP_FILE = f"{STATE_DIRECTORY}/warmup.json"
WARMUP_SECONDS = 10.0  # what is older was left by one that was cut off, or is long over


class WarmupFile:
    """Keeps how far a warm-up is where the dashboard reads it, while there is a workspace."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace, self._world = workspace, workspace.world
        self._has_place = self._world.kind_of(workspace.path(STATE_DIRECTORY)) == "directory"
        self._write_at = 0.0

    def write(self, warmths: Mapping[str, Warmth], *, last: bool = False) -> None:
        """Write what each model's warm-up does now, at most once a second."""
        now = self._world.clock()
        if not self._has_place or (now < self._write_at and not last):
            return
        self._write_at = now + 1.0
        rows = [{"model": name, "node": warmth.node.name, "ollama_model": warmth.model.ollama_model,
                 "stage": warmth.stage, "state": warmth.state, "detail": warmth.detail,
                 "pulled_bytes": warmth.pulled, "size_bytes": warmth.size,
                 "seconds": round(warmth.seconds or now - warmth.began, 1) if warmth.began else 0}
                for name, warmth in warmths.items()]
        page = {"schema": "subagent-fleet/warmup-progress/1", "time": round(self._world.now(), 1),
                "models": rows}
        with contextlib.suppress(FleetError):  # a full disk is no reason to load no model
            place = self._workspace.enter(WARMUP_FILE)
            self._world.replace_files([(place, render_json(page) + b"\n", 0o600)])


def read_warmup(workspace: Workspace) -> list[dict[str, Any]]:
    """Return how far the warm-up is that goes on or has just ended, nothing where there is none."""
    page = parse_object(workspace.read(WARMUP_FILE) or b"") or {}
    written, rows = page.get("time"), page.get("models")
    is_new = isinstance(written, (int, float)) \
        and 0 <= workspace.world.now() - written < WARMUP_SECONDS
    if not is_new or not isinstance(rows, list):
        return []
    return [row for row in rows if isinstance(row, dict)]


def plan_warmths(fleet: Fleet, options: Options) -> dict[str, Warmth]:
    """Return {model: Warmth} of the chosen models, all where none is chosen.

    What is one Ollama model with one context on a node is loaded once: it is one Warmth.
    """
    names = {*options.model, *(fleet.agents[name].model for name in options.agent)}
    shared: dict[tuple[str, str, int], Warmth] = {}
    warmths = {}
    for name, model in fleet.models.items():
        if names and name not in names:
            continue
        load = (model.node, full_model_name(model.ollama_model), model.context)
        if load not in shared:
            shared[load] = Warmth(node=fleet.nodes[model.node], model=model)
        warmths[name] = shared[load]
    return warmths


def report_warmth(name: str, warmth: Warmth) -> dict[str, object]:
    """Return what `warmup --json` says of a model."""
    return {"model": name, "node": warmth.node.name, "ollama_model": warmth.model.ollama_model,
            "ok": warmth.ok, "state": warmth.state, "seconds": round(warmth.seconds, 1),
            "loaded": warmth.loaded, "pulled_bytes": warmth.pulled, "detail": warmth.detail,
            "fix": warmth.fix}


@command("bench", "measure what each model can: speed, tool calls, context", CONFIG, OUT,
         Flag("--model", "only this model; may be repeated", "MODEL", REPEAT, offers=("models",)),
         Flag("--quick", "no prompt that takes long to read"),
         Flag("--quality", "20 tasks of the four roles as well; runs code that a model wrote"),
         TRUST, JSON,
         group=LOOK, examples=("bench", "bench --quick --model heavy-coder", "bench --quality"))
def cmd_bench(options: Options, world: World) -> int:
    fleet = load_config(world, options.config).fleet
    check_names("model", options.model, fleet.models, fleet.name)
    ask_trust(fleet, options, world)
    cage = world.find_cage() if options.quality else ()
    if options.quality:
        ask_to_run(options, world, cage)

    bench = Bench(open_workspace(options, world), plan_courses(fleet, options, world))
    for course in bench.courses:
        course.cage = cage
    bench.run()
    measured = [course.measurement for course in bench.courses]
    if options.json:
        world.out(render_report("bench", {"fleet": fleet.name, "measurements": measured}))
    elif measured:
        world.out(format_measurements(measured, look_of(world)))
    else:
        world.out("Every model leaves the house; name one with --model to measure it.\n")
    return EXIT_PROBLEM if any(known.failure for known in measured) else EXIT_OK


def ask_to_run(options: Options, world: World, cage: Sequence[str]) -> None:
    """Say what is run of what a model writes, and have a person agree; off a terminal, refuse."""
    network = "with the network: neither unshare nor sandbox-exec works here"
    if cage:
        network = f"without a network (by {world.split(cage[0])[1]})"
    what = ("--quality runs Python that the models write, as you, on this machine: in a temporary "
            f"directory, {TASK_SECONDS} s at most, {network}")
    if options.trust:
        return
    is_asked = world.is_terminal("stdin") and world.is_terminal("stderr")
    if is_asked:
        world.err(format_words(find_commands(f"{what}."), look_of(world, "stderr")))
    if not is_asked or not world.confirm("Do you want that?"):
        raise FleetError("runs-code", f"{what}; you have not accepted that", status=EXIT_REFUSED,
                         fix="add --trust, or leave --quality out")


def plan_courses(fleet: Fleet, options: Options, world: World) -> list[Course]:
    """Return what each model is asked, once where two are one; who costs money only if named."""
    states = probe_nodes(world, fleet.nodes, PROBE_TIMEOUT_SECONDS, fleet.models)
    kept = read_measurements(open_workspace(options, world))
    seed = world.token(4)
    trials: tuple[Trial, ...] = TRIALS
    if options.quality:
        trials += plan_quality_trials()
    date = datetime.datetime.fromtimestamp(world.now(), datetime.timezone.utc)

    courses = []
    for warmth in dict.fromkeys(plan_warmths(fleet, options).values()):
        model, node, state = warmth.model, warmth.node, states[warmth.node.name]
        if model.cloud and not options.model:
            continue
        known = find_models(state.models, model.ollama_model)
        claims = (known[0].capabilities or ()) if known else ()
        subject = Subject(model, seed, claims, options.quick)
        course = Course(node, subject, trials,
                        find_measurement(kept, node.endpoint, model.ollama_model))
        course.note(date=f"{date:%Y-%m-%dT%H:%M:%SZ}",
                    versions={"subagent-fleet": __version__, node.provider: state.version})
        if not state.online:
            course.fail(state.why)
            course.is_done = True
        courses.append(course)
    return courses


SAVE_SECONDS = 2.0  # at the most are lost when the machine is


class Bench:
    """Runs courses, one after the other on a node; tells how far they are, keeps what there is."""

    def __init__(self, workspace: Workspace, courses: Sequence[Course]) -> None:
        self.courses = courses
        self._workspace, self._world = workspace, workspace.world
        self._groups: dict[str, list[Course]] = {}
        for course in courses:
            if not course.is_done:
                self._groups.setdefault(course.node.name, []).append(course)
        self._saved: list[Measurement] = []
        self._save_at = 0.0

    def run(self) -> None:
        """Run all; however it ends, what was measured is kept."""
        world = self._world
        is_live = world.is_terminal("stderr")
        clear = "\r\x1b[K" if is_live else ""
        try:
            for _ in run_together(world, self._plan_jobs()):
                self._save_now_and_then()
                if is_live:
                    world.err(clear + self._show_progress())
        except BaseException:
            for course in self.courses:
                if not course.is_done:
                    course.fail("interrupted")
            if self._save():
                world.err(f"{clear}what was measured is kept in {BENCH_FILE}\n")
            raise
        finally:
            world.err(clear)
            self._save()

    def _plan_jobs(self) -> dict[str, Callable[[], None]]:
        """Return what is done on each node."""
        def run_group(courses: Sequence[Course]) -> None:
            for course in courses:
                course.run(self._world)

        return {name: partial(run_group, group) for name, group in self._groups.items()}

    def _show_progress(self) -> str:
        left = max((sum(course.seconds_left(group[0].measurement) for course in group)
                    for group in self._groups.values()), default=0.0)
        active = [next((course for course in group if not course.is_done), None)
                  for group in self._groups.values()]
        return format_courses([course for course in active if course], left,
                              self._world.columns)

    def _save_now_and_then(self) -> None:
        if self._world.clock() >= self._save_at:
            self._save()
            self._save_at = self._world.clock() + SAVE_SECONDS

    def _save(self) -> bool:
        """Write what is new to what earlier runs measured; tell whether there was any."""
        measured = [course.measurement for course in self.courses]
        if measured == self._saved or not any(known.is_worth_keeping for known in measured):
            return False
        self._saved = measured
        merged = merge_measurements(read_measurements(self._workspace), measured)
        report = render_report("bench", {"measurements": merged})
        self._workspace.keep(BENCH_FILE, report.encode("ascii"))
        return True


@command("serve", "serve the fleet to Claude Code", CONFIG, OUT,
         Flag("--host", "listen there instead", "HOST", {"default": ""}),
         Flag("--port", "listen there instead, where `launch` does not ask; 0: any", "PORT",
              {"default": ""}),
         Flag("--no-receipts", "keep no record of requests"), TRUST,
         Flag("--verbose", "print a line for each request and each refusal", short="-v"),
         group=SERVE, examples=("serve", "serve --verbose"))
def cmd_serve(options: Options, world: World) -> int:
    fleet = load_config(world, options.config).fleet
    workspace = open_workspace(options, world)
    port = options.port or str(fleet.gateway.port)
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise FleetError("usage", f"--port: `{port}` is not a port", status=EXIT_USAGE,
                         fix="write --port 4000")
    host = options.host or fleet.gateway.host
    ask_trust(replace(fleet, gateway=Gateway()), options, world)  # it can only be served here
    fleet = replace(fleet, gateway=replace(fleet.gateway, host=host, port=int(port)))

    key = workspace.read_key(fleet)
    check_key(fleet, key, options, world)
    listener = open_door(world, fleet, key)
    receipts = "" if options.no_receipts else receipts_path(world, workspace.out)
    server = Server(fleet, key, world, receipts=receipts)
    world.on_stop(server.stop)

    address = f"{show_host(listener.host)}:{listener.port}"
    said = (f"Serving {clean_line(fleet.name)} at http://{address}: "
            f"{', '.join(server.scheduler.candidates)} on {count_working(fleet)}. "
            "Ctrl-C stops.\n")
    world.out(wrap_text(said, look_of(world).columns, indent="  "))
    if options.verbose:
        log = LogLines(world, fleet)
        server.hub.subscribe(log.take)
        world.err(format_log_head(log.widths, look_of(world, "stderr")))
    began = world.now()
    server.run(listener)
    world.out(format_served(count_served({}, server.ledger.totals), look_of(world)))
    if receipts:
        world.out(as_typed(list_failures(workspace, fleet, began), options.typing))
    return EXIT_INTERRUPTED if server.stops[0] == "SIGINT" else EXIT_OK


def count_working(fleet: Fleet) -> str:
    """Return `2 nodes`, or `2 of 3 nodes` where one has no model that is used."""
    working = {model.node for model in fleet.models.values()}
    if len(working) == len(fleet.nodes):
        return count_of(fleet.nodes, "node")
    return f"{len(working)} of {count_of(fleet.nodes, 'node')}"


def list_failures(workspace: Workspace, fleet: Fleet, began: float) -> str:
    """Return who failed since then, from the receipts; nothing where they cannot be read."""
    try:
        receipts = ReceiptsReader(workspace).read()
    except FleetError:
        return ""
    names = AgentNames(workspace.world, agents_by_alias(fleet))
    requests = [report_receipt(receipt, names) for receipt in receipts
                if receipt["time"] >= began]
    return format_failures(requests, look_of(workspace.world))


@command("launch", "run Claude Code or another program on the fleet",
         Flag("program", some_of(("claude", *HARNESSES)), "PROGRAM", offers=("claude", *HARNESSES)),
         CONFIG, OUT, TRUST, group=SERVE, examples=("launch claude", "launch claude -- -p 'say hi'",
                                       "launch codex -- exec 'say hi'"), passes="ARGS")
def cmd_launch(options: Options, world: World) -> int:
    """Run a program on the fleet; its exit code is ours."""
    check_names("program", [options.program], ("claude", *HARNESSES), "launch")
    fleet = load_config(world, options.config).fleet
    ask_trust(fleet, options, world)
    workspace = open_workspace(options, world)
    if options.program in HARNESSES:
        return launch_harness(workspace, fleet, HARNESSES[options.program], options)

    began = world.now()
    status = launch_claude(workspace, fleet, options)
    tell_session(workspace, began, "subagent-fleet launch claude", options)
    return status


def launch_harness(workspace: Workspace, fleet: Fleet, harness: Harness, options: Options) -> int:
    """Bring a program's files up to date, see that the fleet is served, run it to its end."""
    world = workspace.world
    program = world.which(harness.program)
    if not program:
        raise FleetError("program-missing", f"{harness.title} is not on the PATH",
                         fix=harness.install)
    key = workspace.read_key(fleet)
    if not options.trust:
        refuse_rivals(world, harness)
    losses = [loss for loss in plan_losses(fleet, (harness.name,)) if loss.level == "warning"]
    tell_findings([*lint_key(fleet, world.environ), *losses], options, world)

    changes = workspace.compare(fleet, (harness.name,))
    edited = [change.path for change in changes if change.action == "edited"]
    if edited:
        raise refuse_edited(edited, f"generate --target {harness.name}", "nothing was started")
    workspace.write(changes)
    find_gateway(world, fleet, key, needed=True)
    place = world.real_path(workspace.path(harness.directory()))
    start = harness.start(fleet, place, key)
    environ = {**harness_environment(world.environ, fleet, key), **start.environment}
    return world.run([program, *start.words, *options.passed], environ)


def refuse_rivals(world: World, harness: Harness) -> None:
    """Refuse to start a program where a file of the project leads it elsewhere, with the key."""
    place = world.real_path(".")
    while harness.rivals:
        for name in harness.rivals:
            if world.kind_of(world.path(place, name)) != "absent":
                raise FleetError(
                    "target-rival", f"{harness.title} reads this file of the project, which may "
                    "send prompts and the key elsewhere", where=world.path(place, name),
                    fix="read it, then add --trust", status=EXIT_REFUSED)
        if world.parent(place) == place:
            return
        place = world.parent(place)


def launch_claude(workspace: Workspace, fleet: Fleet, options: Options, *,
                  tells_lean: bool = False) -> int:
    """Say what will disturb Claude Code, see that the fleet is served, run it to its end."""
    world = workspace.world
    program = world.which("claude")
    if not program:
        raise FleetError("claude-missing", "Claude Code is not on the PATH", fix=CLAUDE_INSTALL)
    key = workspace.read_key(fleet)

    managed = find_settings(world, managed_settings(world))  # ours beat all the others
    refuse_managed(fleet, managed, options, world)
    own = take_settings(world, options.passed)
    settings = own.read()
    refuse_other_address(fleet, settings, own)
    facts = observe_files(workspace, fleet, Facts(settings=managed))
    findings = list(lint_key(fleet, world.environ))
    for _, finding in plan_doctor(fleet, facts, topics=("Claude Code", "Files")):
        if finding.level in ("warning", "error"):
            findings.append(replace(finding, level="warning"))
    tell_findings(findings, options, world)

    find_gateway(world, fleet, key, needed=True)
    environ = merge_environment(world.environ, fleet, key)
    denied = plan_denied_tools(fleet, settings, own.words)
    if denied and tells_lean:
        world.err(format_lean(denied, look_of(world, "stderr")))
    with PrivateDirectory() as place:
        path = world.path(place, "settings.json")
        planned = plan_settings(fleet, environ, settings, own.words)
        content = json.dumps(planned).encode("utf-8")
        world.replace_files([(path, content, 0o600)])  # a key in an argument is seen by all
        return world.run([program, "--settings", path, *own.words], environ)


def refuse_managed(fleet: Fleet, managed: Mapping[str, Mapping[str, object]], options: Options,
                   world: World) -> None:
    """Refuse to start Claude Code where an administrator's settings lead it elsewhere."""
    for path, environment in managed.items():
        names = [name for name in overridden_names(fleet, environment) if leads_away(name)]
        names.sort(key=lambda name: name not in ADDRESSES)
        if not names or (options.trust and names[0] not in ADDRESSES):
            continue
        fix = f"remove it from {path}"
        if names[0] not in ADDRESSES:
            fix += ", or add --trust"
        where = f"{path}:{line_of(world.read_bytes(path), names[0])}"
        raise FleetError("settings-managed", f"{names[0]} under `env` of managed settings beats "
                         "the fleet's: prompts or the key would go elsewhere", where=where,
                         fix=fix, status=EXIT_REFUSED)


def refuse_other_address(fleet: Fleet, settings: Mapping[str, Any], own: OwnSettings) -> None:
    """Refuse a person's own settings that name another gateway: what is meant is not known."""
    for name in ADDRESSES:
        url = settings.get("env", {}).get(name)
        if url is not None and url != gateway_url(fleet.gateway):
            raise FleetError("settings-elsewhere", f"{name} under `env` names another gateway "
                             "than the fleet's", where=f"{own.source}:{line_of(own.content, name)}",
                             fix=f"remove it from {own.source}, or run `claude` alone",
                             status=EXIT_REFUSED)


def tell_session(workspace: Workspace, began: float, command: str, options: Options) -> None:
    """Say how the session that has ended goes on: Claude Code's own words for it lack the fleet."""
    try:
        session = last_session(ReceiptsReader(workspace).read(), since=began)
    except FleetError:  # they cannot be read, which is no reason to fail now
        return
    if session:
        text = f"\nThis session goes on with:\n  {command} -- --resume {session}\n"
        workspace.world.err(as_typed(text, options.typing))


# -- files --

@command("clean", "remove the generated files that nobody has changed", OUT, CONFIG,
         Flag("--dry-run", "only list them"), Flag("--force", "changed ones too, after a copy"),
         group=FILES, examples=("clean --dry-run", "clean"))
def cmd_clean(options: Options, world: World) -> int:
    workspace = open_workspace(options, world)
    changes = workspace.compare(None)
    kept = []
    if not options.force:
        kept = [change.path for change in changes if change.action == "edited"]
    doomed = [change for change in changes if change.path not in kept]

    listed = [(change.path, "removed") for change in doomed if change.found is not None]
    if listed:
        heading = "Would remove:\n" if options.dry_run else "Removing:\n"
        world.out(heading + format_pairs(listed, look_of(world)))
    else:
        world.out("Nothing to remove.\n")

    if doomed and not options.dry_run and world.confirm(f"Remove {count_of(listed, 'file')}?"):
        remove_files(workspace, doomed, is_all=not kept)
    if kept:
        raise refuse_edited(kept, "clean", "kept")
    return EXIT_OK


def remove_files(workspace: Workspace, doomed: Sequence[Change], *, is_all: bool) -> None:
    """Remove files and the directories that are empty then; with the last the manifest goes."""
    workspace.write(doomed)
    if is_all:
        workspace.world.remove(workspace.enter(MANIFEST_FILE))
    directories = [".claude/agents", ".claude"]
    for harness in HARNESSES.values():
        directories += [f"{harness.directory()}/agents", harness.directory()]
    for path in (*directories, STATE_DIRECTORY):
        workspace.world.remove_empty(workspace.world.below(workspace.out, path))


# -- more --

@command("schema", "print the JSON Schema of the fleet file",
         group=MORE, examples=("schema > fleet.schema.json",))
def cmd_schema(options: Options, world: World) -> int:
    world.out(json.dumps(render_schema(), indent=2) + "\n")
    return EXIT_OK


@command("completion", "print a completion script for your shell",
         # argparse would check a default that is a text against the choices
         Flag("shell", "your shell", "SHELL", {"nargs": "?", "default": None,
                                               "choices": ("bash", "zsh", "fish")}),
         Flag("--names", "print names of the fleet instead, as the script asks for them", "KIND",
              {"choices": NAME_KINDS, "default": ""}), CONFIG,
         group=MORE, examples=('eval "$(subagent-fleet completion zsh)"',))
def cmd_completion(options: Options, world: World) -> int:
    if options.names:
        fleet = load_config(world, options.config).fleet
        world.out("".join(f"{name}\n" for name in getattr(fleet, options.names)))
    elif options.shell == "fish":
        world.out(render_fish_completion())
    elif options.shell:
        world.out(render_bash_completion(is_zsh=options.shell == "zsh"))
    else:
        raise FleetError("usage", "completion: name your shell: bash, zsh or fish",
                         status=EXIT_USAGE, fix="subagent-fleet completion --help")
    return EXIT_OK


def offered_words(flag: Flag) -> tuple[str, ...]:
    """Return the words that may follow a flag, or one of NAME_KINDS, or nothing known."""
    return flag.offers or tuple(flag.more.get("choices", ()))


def completion_words(row: Command) -> list[str]:
    """Return what may follow a command: its flags and the words it can choose from."""
    words = ["--help"]
    for flag in row.flags:
        if flag.name.startswith("-"):
            words.append(flag.name)
        else:
            words += offered_words(flag)
    if row.name == "help":
        words += first_words()
    return words


def first_words() -> list[str]:
    """Return the words that may come first, each once."""
    return list(dict.fromkeys(row.name.split()[0] for row in COMMANDS))


def render_fish_completion() -> str:
    """Return the script for fish."""
    start = "complete -c subagent-fleet"
    lines = []
    for first in first_words():
        seconds = second_words(first)
        note = ", ".join(seconds) or find_command(first).summary
        lines.append(f'{start} -n __fish_use_subcommand -f -a {first} -d "{note}"\n')
        if seconds:
            test = fish_test([first], seconds)
            lines.append(f"{start} -n '{test}' -f -a '{' '.join(seconds)}'\n")

    shared = [first for first in first_words() if second_words(first)]
    for row in COMMANDS:
        name = row.name.split()
        # A second word may be another command's name: `add`, `task add`.
        seen = f"{start} -n '{fish_test(name, shared if len(name) == 1 else [])}'"
        lines.append(f"{seen} -a '{' '.join(completion_words(row))}'\n")
        for flag in row.flags:
            words = offered_words(flag)
            if flag.name.startswith("--") and words:
                offered = " ".join(words)
                if words[0] in NAME_KINDS and len(words) == 1:
                    offered = f"(subagent-fleet completion --names {offered} 2>/dev/null)"
                lines.append(f"{seen} -l {flag.name.strip('-')} -xa '{offered}'\n")
    return "".join(lines)


def fish_test(seen: Sequence[str], unseen: Sequence[str]) -> str:
    """Return a test of fish: all of `seen` were typed, none of `unseen` was."""
    tests = [f"__fish_seen_subcommand_from {word}" for word in seen]
    if unseen:
        tests.append(f"not __fish_seen_subcommand_from {' '.join(unseen)}")
    return "; and ".join(tests)


_BASH_COMPLETION = """\
_subagent_fleet_names() {
  local program=$1 kind=$2 config= at
  for ((at = 1; at < COMP_CWORD; at++)); do
    [ "${COMP_WORDS[at]}" = --config ] && config=${COMP_WORDS[at + 1]}
  done
  "$program" completion --names "$kind" ${config:+--config "$config"} 2>/dev/null
}
_subagent_fleet() {
  local words='@COMMANDS@' command=${COMP_WORDS[1]}
  case " @SHARED@ " in
    *" $command "*) [ "$COMP_CWORD" -gt 2 ] && command="$command ${COMP_WORDS[2]}" ;;
  esac
  [ "$COMP_CWORD" -gt 1 ] && case "$3 $command" in
@FLAGS@@CASES@    *) words='' ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _subagent_fleet subagent-fleet
"""
_ZSH_START = """\
whence compdef >/dev/null || { autoload -U compinit && compinit; }
autoload -U +X bashcompinit && bashcompinit
"""


def render_bash_completion(*, is_zsh: bool) -> str:
    """Return the script for bash, which zsh understands after a start of its own."""
    shared = [first for first in first_words() if second_words(first)]
    choices = {row.name: completion_words(row) for row in COMMANDS}
    choices.update({first: second_words(first) for first in shared})
    # The longer name first: `*' add'` would take `task add`, too.
    names = sorted(choices, key=lambda name: -len(name.split()))
    cases = [f"    *' {name}') words='{' '.join(choices[name])}' ;;\n" for name in names]
    script = _BASH_COMPLETION.replace("@COMMANDS@", " ".join(first_words()))
    script = script.replace("@SHARED@", " ".join(shared))
    script = script.replace("@FLAGS@", "".join(bash_flag_cases()))
    script = script.replace("@CASES@", "".join(cases))
    return _ZSH_START + script if is_zsh else script


def bash_flag_cases() -> list[str]:
    """Return the lines for the flags that a value follows; else bash offers file names."""
    lines = []
    others = []
    for row in COMMANDS:
        for flag in row.flags:
            words = offered_words(flag)
            if not flag.name.startswith("--") or not flag.metavar:
                continue
            if len(words) == 1 and words[0] in NAME_KINDS:
                names = f'$(_subagent_fleet_names "$1" {words[0]})'
                lines.append(f"    '{flag.name} {row.name}') words={names} ;;\n")
            elif words:
                lines.append(f"    '{flag.name} {row.name}') words='{' '.join(words)}' ;;\n")
            elif "nargs" not in flag.more and f"'{flag.name} '*" not in others:
                others.append(f"'{flag.name} '*")
    return [*lines, f"    {'|'.join(others)}) words='' ;;\n"]


@command("help", "say how a command is used",
         Flag("command", "which command", "[COMMAND]", {"nargs": "*", "default": ()}),
         group=MORE, examples=("help validate",))
def cmd_help(options: Options, world: World) -> int:
    rows: Sequence[Command] = COMMANDS
    if len(options.command) == 1 and second_words(options.command[0]):
        rows = [row for row in COMMANDS if row.name.split()[0] == options.command[0]]
    elif options.command:
        called = find_call(options.command)
        if called.words:
            raise FleetError("usage", f"help: `{called.words[0]}` is more than a command's name",
                             status=EXIT_USAGE, fix=f"subagent-fleet help {called.command.name}")
        world.out(show_usage(called.command, options.typing, look_of(world)))
        return EXIT_OK

    groups: dict[str, list[tuple[str, str]]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append((row.name, row.summary))
    world.out(format_overview(options.typing, groups, look_of(world)))
    return EXIT_OK


def show_usage(row: Command, typing: Typing, look: Look) -> str:
    """Return the help of a command, its examples as they can be typed here."""
    examples = []
    for example in row.examples:
        if example.startswith(row.name):
            example = f"subagent-fleet {example}"
        examples.append(as_typed(example, typing))

    rows = [(show_flag(flag), flag.note) for flag in row.flags]
    if row.passes:
        rows.append((f"-- {row.passes}", "handed on as it is"))
    return format_usage(f"subagent-fleet {row.name}: {row.summary}", examples, rows,
                        look)


def show_flag(flag: Flag) -> str:
    """Return a flag as it is typed: `-v, --verbose`, `--shell sh|fish|json`, `[COMMAND]`."""
    value = "|".join(flag.more.get("choices", ())) or flag.metavar
    if not flag.name.startswith("-"):
        return value
    name = f"{flag.short}, {flag.name}" if flag.short else flag.name
    return f"{name} {value}".rstrip()


# == 24. Command line =========================================================

# Takes the words that were typed; finds the command, reads its flags, runs it, and prints what it
# was refused with. What is typed again in a message is named here as it was typed.

@dataclass(frozen=True)
class CommandLine:
    """A command line that was understood."""

    command: Command
    options: Options


def name_program(world: World) -> str:
    """Return what a person types to start this program, as far as that can be known."""
    usual = Typing().program
    typed = sys.argv[0]
    _, name = world.split(typed)
    if name in ("", "-", "-c", "<stdin>", usual, f"{usual}.exe"):  # piped, or installed
        return usual
    if __name__ == "__main__" and __spec__ is not None:
        return "python3 -m subagent_fleet"
    if world.which(name) == typed:  # a link on the PATH
        return quote_shell(name)
    if world.which(typed) == typed:  # it can be run as it is: a path, and executable
        return quote_shell(typed)
    return f"python3 {quote_shell(typed)}"


def plan_typing(program: str, options: Options, typed: str = "") -> Typing:
    """Return how messages shall name commands: with the places that were typed, where taken."""
    config = options.config
    if options.output:  # `init` writes what the next commands read
        config = options.output
    values = {"--config": config, "--out": options.out, "--output": options.output}

    places = {}
    for row in COMMANDS:
        takes = [flag.name for flag in row.flags]
        words = [f" {name} {clean_line(quote_shell(value))}" for name, value in values.items()
                 if name in takes and value not in (None, "", "-")]
        if row.name == typed:  # who forgets a machine writes another fleet
            for node in options.node:
                name, equals, url = node.partition("=")
                words.append(f" --node {quote_shell(name)}{equals}{quote_shell(url)}")
        places[row.name] = "".join(words)
    return Typing(program, places)


def read_call(words: Sequence[str], program: str) -> CommandLine:
    """Return the command and its options; what is wrong is said in one line."""
    called = find_call(words)
    row = called.command
    options = parse_arguments(row, called.words)
    return CommandLine(row, replace(options, typing=plan_typing(program, options, row.name)))


def parse_arguments(row: Command, words: list[str]) -> Options:
    """Return the options of a command; what is wrong is said in one line."""
    own = words
    passed: list[str] = []
    if row.passes and "--" in words:
        cut = words.index("--")
        own = words[:cut]
        passed = words[cut + 1:]

    parser = make_parser(row)
    options, unknown = parser.parse_known_args(own)
    if unknown:
        raise FleetError("usage", f"{row.name}: unknown argument `{unknown[0]}`",
                         status=EXIT_USAGE, fix=suggest_words(row, own, passed, unknown)
                         or f"subagent-fleet {row.name} --help")
    return Options(**vars(options), passed=tuple(passed))


def make_parser(row: Command) -> argparse.ArgumentParser:
    """Return an argparse parser that refuses as this program does."""
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise FleetError("usage", f"{row.name}: {message}", status=EXIT_USAGE,
                             fix=f"subagent-fleet {row.name} --help")

    parser = Parser(prog="subagent-fleet", add_help=False, allow_abbrev=False,
                    # without a width it imports shutil, and with it three packers
                    formatter_class=lambda prog: argparse.HelpFormatter(prog, width=80))
    for flag in row.flags:
        names = [flag.short, flag.name] if flag.short else [flag.name]
        if flag.metavar:
            parser.add_argument(*names, **{"metavar": flag.metavar, **flag.more})
        else:
            parser.add_argument(*names, action="store_true")
    return parser


def suggest_words(row: Command, own: list[str], passed: list[str], unknown: list[str]) -> str:
    """Return what was probably meant by words that a command does not take, or nothing."""
    flags = [flag.name for flag in row.flags if flag.name.startswith("-")]
    first = unknown[0]
    hint = nearest(first.split("=")[0], flags)
    known = [word for word in own if word not in unknown]

    looks_like_config = first.endswith((".yaml", ".yml", ".json"))
    if looks_like_config and "--config" in flags and "--config" not in own:
        better = [*known, "--config", first]
        if passed:
            better += ["--", *passed]
    elif row.passes and not hint:
        better = [*known, "--", *unknown, *passed]
    else:
        return hint
    return " ".join(("subagent-fleet", row.name, *map(quote_shell, better)))


def main(argv: Sequence[str] | None = None, world: World | None = None) -> int:
    """Run one command; return its exit status."""
    world = world or World()
    try:
        if argv is None:
            return run_words(sys.argv[1:], world, program=name_program(world))
        return run_words(list(argv), world)
    except KeyboardInterrupt:
        world.err("\ninterrupted\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        world.discard_output()  # `| head` has read enough
        return EXIT_OK
    except Exception:
        world.err(f"subagent-fleet {__version__}, Python {sys.version.split()[0]}: this is a bug; "
                  f"please report it with these lines at {HOME_URL}/issues\n"
                  + clean_text(traceback.format_exc()))
        return EXIT_PROBLEM


def name_command(words: Sequence[str]) -> Sequence[str]:
    """Return the words in front of `--help` that name a command, as far as they do."""
    first = words[:1]
    if not first or first[0].startswith("-"):
        return ()
    if words[1:2] and words[1] in second_words(first[0]):
        return words[:2]
    return first


def run_words(words: list[str], world: World, *, program: str = Typing.program) -> int:
    """Do what was typed, or say why not; return the exit status."""
    typing = plan_typing(program, Options())
    own = words[:words.index("--")] if "--" in words else words
    try:
        if words[:1] in (["-V"], ["--version"]):
            world.out(f"subagent-fleet {__version__}\n")
            return EXIT_OK
        if not words or "-h" in own or "--help" in own:
            cmd_help(Options(command=name_command(own), typing=typing), world)
            return EXIT_OK if words else EXIT_USAGE

        call = read_call(words, program)
        typing = call.options.typing
        return call.command.run(call.options, world)
    except FleetError as error:
        tell_error(error, typing, world)
        if "--json" in own:
            tell_error_as_json(error, words[0], typing, world)
        return error.status


def tell_error(error: FleetError, typing: Typing, world: World) -> None:
    """Say why a command was refused; of a config everything that is wrong with it."""
    look = look_of(world, "stderr")
    if not error.findings:
        world.err(format_finding(retype(error.finding, typing), look=look))
        return
    world.err(f"Invalid {clean_line(error.where)}:\n")
    for finding in error.findings:
        world.err(format_finding(retype(finding, typing), indent="  ", look=look))


def tell_error_as_json(error: FleetError, name: str, typing: Typing, world: World) -> None:
    """Print the same for programs, with what the command knew before it was refused."""
    findings = [retype(finding, typing) for finding in error.findings]
    world.out(render_report(name, {
        "error": retype(error.finding, typing), "findings": findings, **error.report}))


# -- demo: types command lines, so it stands where they are read --

DEMO_TOKENS = 6  # of an answer; more where there is time to watch
DEMO_SECONDS = 4.0  # that a session of such answers takes
DEMO_PAUSE_SECONDS = 1.5  # to read, on a terminal
WATCHED_SECONDS = 30.0


class Tour:
    """Types the commands of the demo one after the other, and sees that each does its work."""

    def __init__(self, world: DemoWorld, *, pause: float) -> None:
        self.world, self._pause = world, pause
        self._serving: threading.Thread | None = None
        self._statuses: list[int] = []  # what the command that serves has ended with

    def tell(self, text: str) -> None:
        """Say what comes next; on a terminal, leave time to read what stands there."""
        self.world.sleep(self._pause)
        self.world.out("\n" + format_words([Styled(text, "bold")], look_of(self.world)))

    def type(self, *words: str, status: int = EXIT_OK) -> str:
        """Type a command; return what it said."""
        self.world.sleep(self._pause)
        shown = " ".join(map(quote_shell, words))
        line = paint(f"$ subagent-fleet {shown}", "bold", look_of(self.world))
        self.world.out(f"\n{line}\n")
        begun = len(self.world.said)
        ended = run_words(list(words), self.world)
        said = "".join(self.world.said[begun:])
        if ended != status:
            raise demo_broken(f"`{words[0]}` ended with {ended}, not with {status}")
        return said

    def see(self, is_so: object, what: str) -> None:
        """Refuse to go on where something is not as it was shown."""
        if not is_so:
            raise demo_broken(what)

    def serve(self) -> None:
        """Type `serve`, which goes on beside what comes then."""
        def run() -> None:
            with contextlib.suppress(BrokenPipeError):
                self._statuses.append(run_words(["serve", "--verbose"], self.world))

        self.world.out("\n$ subagent-fleet serve --verbose &\n")
        self._serving = threading.Thread(target=run, daemon=True)
        self._serving.start()
        until = self.world.clock() + PROBE_TIMEOUT_SECONDS
        while "Serving" not in "".join(self.world.said):
            self.see(self.world.clock() < until and not self._statuses, "`serve` does not serve")
            self.world.sleep(0.01)

    def stop(self) -> None:
        """End the command that serves, as Ctrl-C does; it says what was served where."""
        if self._serving:
            self.world.stop("SIGINT")
            self._serving.join(GRACE_SECONDS)
            self._serving = None


@command("demo", "show all of it on simulated machines: nothing is installed, nothing stays",
         Flag("--seconds", f"about how long; else {WATCHED_SECONDS:.0f} on a terminal, 5 off it",
              "S", {**SECONDS, "default": 0.0}),
         group=START, examples=("demo", "demo --seconds 60"))
def cmd_demo(options: Options, world: World) -> int:
    seconds = options.seconds or (WATCHED_SECONDS if world.is_terminal() else DEMO_SECONDS)
    tokens = max(round(DEMO_TOKENS * seconds / 2 / DEMO_SECONDS), DEMO_TOKENS)
    pause = DEMO_PAUSE_SECONDS * seconds / WATCHED_SECONDS if seconds > 2 * DEMO_SECONDS else 0.0
    with contextlib.ExitStack() as ending:
        place = ending.enter_context(PrivateDirectory())
        project = world.path(place, "shop")
        # A directory of its own, up to here: no fleet file above is meant.
        world.make_directory(world.path(project, ".git"))
        ending.enter_context(world.visit(project))
        nodes = {}
        for name, machine in DEMO_MACHINES.items():
            nodes[name] = DemoNode(world, machine, tokens)
            ending.callback(nodes[name].close)
        demo = DemoWorld(world, world.path(place, "home"), nodes["sim-laptop"].endpoint)
        ending.callback(demo.door.close)
        tour = Tour(demo, pause=pause)
        ending.callback(tour.stop)
        show_demo_fleet(tour, nodes)
        show_demo_session(tour, nodes["sim-mini"])
    world.out("\nThat was all of it. `subagent-fleet up` does this with your own machines.\n")
    return EXIT_OK


def show_demo_fleet(tour: Tour, nodes: Mapping[str, SimulatedNode]) -> None:
    """Show how a fleet is set up: found, written down, checked, generated for, loaded."""
    world = tour.world
    tour.tell("Three simulated machines on this one, the real commands, and a script in Claude "
              "Code's place. All of it lies in a temporary directory; nothing leaves this machine.")
    words = [f"--node={name}={node.endpoint}" for name, node in nodes.items()]
    tour.type("init", *words)
    text = world.read_bytes(CONFIG_NAMES[0]).decode("utf-8")
    text = re.sub(r"(?m)^( +port: )\d+", rf"\g<1>{world.door.port}", text)
    world.replace_files([(CONFIG_NAMES[0], text.encode("utf-8"), 0o644)])
    world.out(f"(Its gateway gets port {world.door.port}: the usual one may be taken.)\n")

    tour.type("validate")
    fleet = load_config(world, None).fleet
    tour.see({model.node for model in fleet.models.values()} == set(nodes), "a machine idles")
    tour.type("generate")
    for agent in fleet.agents:
        tour.see(world.kind_of(f".claude/agents/{agent}.md") == "file", f"no file for {agent}")
    tour.type("warmup")
    tour.see(all(node.loaded for node in nodes.values()), "not every model was loaded")
    tour.serve()
    tour.type("status", "--check")


def show_demo_session(tour: Tour, mini: SimulatedNode) -> None:
    """Show a session at work, who served whom in it, and that nothing is left of it."""
    world = tour.world
    fleet = load_config(world, None).fleet
    workspace = Workspace(world, ".")
    place = world.path(claude_directory(world), "projects", project_name(world, "."))
    session = DemoSession(world, fleet, workspace.read_key(fleet), place=place)
    play_session(session, mini, tour.tell)

    receipts = read_receipts(workspace, session.id)
    worked = [receipt for receipt in receipts if receipt.agent.startswith("implementer")]
    tour.see(any((receipt.waited or 0) > 0.02 for receipt in worked), "no implementer waited")
    tour.see(any(tried.node == "sim-mini" for receipt in receipts for tried in receipt.tries),
             "nobody noticed that sim-mini was asleep")
    tour.see({receipt.node for receipt in worked} == {"sim-mini", "sim-gpu"},
             "the work of sim-mini did not go on elsewhere")
    tour.see(all(receipt.outcome == "ok" for receipt in receipts), "a request failed")
    tour.type("status")
    tour.type("trace", "--audit")
    tour.stop()
    tour.type("clean")
    left = [target for target in (LITELLM_FILE, ENVIRONMENT_FILE, ".claude")
            if world.kind_of(target) != "absent"]
    tour.see(not left, f"`clean` left {', '.join(left)}")


# == 25. Assets ===============================================================

# Texts that are handed out whole: never templated, joined at exact markers. Any section may use
# them.

# -- what trials are made of --

CODE_WORDS = ("KESTREL", "MARBLE", "TUNDRA", "SAFFRON", "LANTERN")
# A round of lines, each of its own tokens whatever stands before it.
FILLER = (
    "The morning train to the coast was late again, so the meeting began without the engineers.",
    "In the second drawer there are four pencils, a ruler and the receipt for the blue lamp.",
    "Nobody had opened the west gate since the storm, and the path behind it was full of leaves.",
    "The report says that the pumps ran for nine hours and that the water fell by half a metre.",
    "She counted the boxes twice, wrote the number on the wall and closed the door behind her.",
    "A cook from the harbour sold soup on the stairs, with bread when there was any left.",
    "The old map shows a bridge where today there is only a row of stones in the river.",
    "At noon the office sent a note that the lift would be repaired on the following Tuesday.")
RED_SQUARE = (  # a PNG, 64 by 64
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAAS0lEQVR42u3PQQkAAAgAsetfWiP4FgYrsKZeS0BA"
    "QEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEDgsqnc8OJg6Ln3AAAAAElFTkSuQmCC")

# The tasks of `bench --quality`: of each role five, whose answers a program can judge.

PLAN_TASKS = r"""
- name: retry-option
  ask: |
    Requests to the billing service shall be tried again three times when they time out. How often
    is to be read from the settings, so that a test can set it to 0.
  tree: [README.md, docs/billing.md, src/settings.py, src/billing/client.py, src/billing/models.py,
         src/billing/views.py, src/mail/client.py, src/users/views.py, tests/test_users.py,
         tests/test_billing_client.py]
  right: [src/settings.py, src/billing/client.py]
  fine: [tests/test_billing_client.py, docs/billing.md]
- name: rename-column
  ask: |
    The column `mail` of the table `users` is to be called `email`. The code that reads it is in the
    model and in the export; the database is changed by a new file in migrations/, of the next
    number.
  tree: [migrations/0001_users.sql, migrations/0002_orders.sql, migrations/0003_rename_mail.sql,
         src/users/model.py, src/users/password.py, src/orders/model.py, src/export/users_csv.py,
         src/export/orders_csv.py, src/web/login.py]
  right: [migrations/0003_rename_mail.sql, src/users/model.py, src/export/users_csv.py]
- name: dead-link
  ask: |
    The page "Install" of the manual links to a page that is gone. The pages are written in docs/,
    and site/ is built from them by `make docs`; nobody edits site/ by hand.
  tree: [Makefile, docs/index.md, docs/install.md, docs/usage.md, site/index.html,
         site/install.html, site/usage.html, src/main.go, src/install.go]
  right: [docs/install.md]
- name: new-command
  ask: |
    Add a command `prune` to the command line tool. Each command is a file of its own, named after
    it, and is listed in the registry. The parser makes the flags from the registry and needs no
    change.
  tree: [cli/main.ts, cli/parser.ts, cli/registry.ts, cli/commands/list.ts, cli/commands/add.ts,
         cli/commands/prune.ts, cli/output.ts, test/parser.test.ts, test/commands/prune.test.ts]
  right: [cli/registry.ts, cli/commands/prune.ts]
  fine: [test/commands/prune.test.ts]
- name: slow-image
  ask: |
    Building the container image downloads all packages again whenever any source file changes,
    because the sources are copied before the packages are installed. Mend the order.
  tree: [Dockerfile, docker-compose.yml, package.json, package-lock.json, .dockerignore,
         src/server.js, src/routes.js, scripts/deploy.sh, .github/workflows/build.yml]
  right: [Dockerfile]
  fine: [.dockerignore]
"""
PATCH_TASKS = r"""
- name: slug
  ask: |
    `slug` shall put one dash between words, however many blanks and signs stand there, and none at
    the ends: `slug("  Hello,  World! ")` is `"hello-world"`.
  files:
    text.py: |
      def slug(title):
          result = ""
          for letter in title.lower():
              if letter.isalnum():
                  result += letter
              else:
                  result += "-"
          return result
  check: |
    from text import slug
    assert slug("  Hello,  World! ") == "hello-world", slug("  Hello,  World! ")
    assert slug("one") == "one", slug("one")
    assert slug("a - b_c") == "a-b-c", slug("a - b_c")
    assert slug("?!") == "", slug("?!")
- name: duration
  ask: |
    `seconds` shall understand hours as well: `seconds("1h30m")` is 5400 and `seconds("2h")` is
    7200. What it understands today stays as it is, and what is no duration raises ValueError.
  files:
    duration.py: |
      import re


      def seconds(text):
          match = re.fullmatch(r"(?:(\d+)m)?(?:(\d+)s)?", text)
          if not match or not text:
              raise ValueError(text)
          minutes, rest = match.groups()
          return int(minutes or 0) * 60 + int(rest or 0)
  check: |
    from duration import seconds
    right = {"1h30m": 5400, "2h": 7200, "5m": 300, "5m10s": 310, "1h1s": 3601, "7s": 7}
    for text, wanted in right.items():
        assert seconds(text) == wanted, (text, seconds(text))
    for text in ("", "1x", "30m1h"):
        try:
            seconds(text)
        except ValueError:
            continue
        raise AssertionError(text + " was taken")
- name: last-page
  ask: |
    The last page is lost when it is not full: of 25 items, 10 a page, there are 3 pages. Of no
    items there is no page. Mend `pages`; `items_of` is right.
  files:
    paging.py: |
      def pages(count, size):
          return count // size


      def items_of(items, page, size):
          return items[page * size:(page + 1) * size]
  check: |
    from paging import items_of, pages
    for count, size, wanted in ((25, 10, 3), (20, 10, 2), (0, 10, 0), (1, 10, 1), (10, 1, 10)):
        assert pages(count, size) == wanted, (count, size, pages(count, size))
    assert items_of(list(range(25)), 2, 10) == [20, 21, 22, 23, 24]
- name: oldest-out
  ask: |
    When the cache is full, the entry that was used longest ago shall go, not the one that was
    added first: reading an entry counts as using it.
  files:
    cache.py: |
      class Cache:
          def __init__(self, size):
              self.size = size
              self.entries = {}

          def get(self, key):
              return self.entries.get(key)

          def put(self, key, value):
              if key not in self.entries and len(self.entries) >= self.size:
                  del self.entries[next(iter(self.entries))]
              self.entries[key] = value
  check: |
    from cache import Cache
    cache = Cache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert cache.get("b") is None, "b was used longest ago"
    assert cache.get("a") == 1 and cache.get("c") == 3
    cache.put("a", 4)
    cache.put("d", 5)
    assert cache.get("c") is None and cache.get("a") == 4 and cache.get("d") == 5
    assert cache.get("nothing") is None
- name: two-files
  ask: |
    Rename the function `calc` to `total_price` in both files, and let it take a discount in
    percent as a third argument, 0 if it is not given: a discount of 25 makes 100 a price of 75.
  files:
    prices.py: |
      def calc(price, count):
          return price * count
    bill.py: |
      from prices import calc


      def bill(lines):
          return sum(calc(price, count) for price, count in lines)
  check: |
    import bill
    import prices
    assert not hasattr(prices, "calc") and not hasattr(bill, "calc")
    assert prices.total_price(10, 3) == 30
    assert abs(prices.total_price(50, 2, 25) - 75) < 0.001
    assert bill.bill([(10, 3), (5, 2)]) == 40
"""
REVIEW_TASKS = r"""
- name: endless-search
  ask: Review this function, which finds the place of a value in a sorted list, or -1.
  code: |
    def find(values, wanted):
        low, high = 0, len(values) - 1
        while low <= high:
            middle = (low + high) // 2
            if values[middle] == wanted:
                return middle
            if values[middle] < wanted:
                low = middle
            else:
                high = middle - 1
        return -1
  bugs: [[7, 8]]
- name: query
  ask: Review this handler of a web page, which shows the orders of the user who is logged in.
  code: |
    def show_orders(request, database):
        user = request.session["user_id"]
        status = request.query.get("status", "open")
        rows = database.execute(
            "SELECT id, total FROM orders WHERE user_id = ? "
            f"AND status = '{status}' ORDER BY id", (user,))
        lines = []
        for row in rows:
            lines.append(f"{row.id}: {row.total:.2f}")
        return "\n".join(lines)
  bugs: [[3, 6]]
- name: shared-list
  ask: Review this class; each basket is to have items of its own.
  code: |
    class Basket:
        def __init__(self, owner, items=[]):
            self.owner = owner
            self.items = items

        def add(self, item, count=1):
            for _ in range(count):
                self.items.append(item)

        def total(self, prices):
            return sum(prices[item] for item in self.items)
  bugs: [[2, 4]]
- name: lost-log
  ask: |
    Review this function. It shall add a line to a log file that other calls have begun, and give
    back how many lines the file then has.
  code: |
    def log(path, text):
        line = text.replace("\n", " ") + "\n"
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(line)
        with open(path, encoding="utf-8") as stream:
            return sum(1 for _ in stream)
  bugs: [[3, 4]]
- name: nothing-wrong
  ask: |
    Review this function. It gives the words of a text that occur more than once, in the order in
    which they occur first, without regard to case.
  code: |
    def repeated_words(text):
        counts = {}
        for word in text.lower().split():
            counts[word] = counts.get(word, 0) + 1
        return [word for word, count in counts.items() if count > 1]
  bugs: []
"""
SUMMARY_TASKS = r"""
- name: failed-deploy
  ask: "Summarize this log: what failed, in which step, and what was done about it?"
  text: |
    14:02:11 deploy 4.17.2 to eu-west started by marta
    14:02:40 step 1/5 build: ok (28 s)
    14:03:02 step 2/5 push image: ok
    14:03:41 step 3/5 migrate: running 0093_add_index
    14:08:41 step 3/5 migrate: lock timeout after 300 s on table invoices
    14:08:42 step 3/5 migrate: failed
    14:08:43 rollback to 4.17.1 started
    14:09:20 rollback to 4.17.1: ok, 0 requests lost
  facts: ['4\.17\.2', invoices, 'lock|time.?out', 'roll\w* back|rollback|reverted', '4\.17\.1']
  absent: ['us-(east|west)', 'build (step )?failed']
- name: meeting
  ask: Summarize what was decided, who does what, and until when.
  text: |
    Ines: the import is too slow, six minutes for the large customers.
    Tom: most of that is the second pass over the file. I could do it in one pass, by Friday.
    Ines: please do. And the limit of 50 MB, do we raise it?
    Kofi: not before the import is faster. Let us leave it at 50 MB for now.
    Ines: agreed. Kofi, can you tell the support team?
    Kofi: yes, I write to them today.
  facts: [Tom, 'Friday', 'one pass|single pass|second pass', '50 ?MB', Kofi, 'today']
  absent: ['100 ?MB', 'Monday']
- name: test-run
  ask: How many tests ran, how many failed, which, and why?
  text: |
    collected 214 items
    tests/test_cart.py .........................
    tests/test_mail.py ....F......
    tests/test_tax.py ...........................s
    FAILED tests/test_mail.py::test_reply_to - KeyError: 'reply-to'
    mail/message.py:88: KeyError
    1 failed, 212 passed, 1 skipped in 18.40s
  facts: ['214|213', 'test_reply_to', 'KeyError', '\b(1|one)\b', '212']
  absent: ['test_cart\w* fail', 'test_tax\w* fail']
- name: release-notes
  ask: Which of these changes can break what a user has? Name each, and what must be done.
  text: |
    - The page of settings loads twice as fast.
    - `--format xml` is gone; use `--format json`.
    - New: themes, dark and light.
    - Configuration files are now read from ~/.config/tool; move yours from ~/.tool.
    - Fixed: a crash when the list was empty.
  facts: ['--format xml|xml', 'json', '~?/?\.config/tool', '~?/?\.tool\b']
  absent: ['themes? (can|may|will|could) break']
- name: numbers
  ask: |
    Summarize the table in one or two sentences: which machine is fastest, which is slowest, by how
    much?
  text: |
    machine   requests  mean seconds
    alder          412          1.9
    birch          398          7.6
    cedar          405          3.1
  facts: [alder, '1\.9', birch, '7\.6', '4 times|four times|4x|4 ?×|5\.7|fourfold']
  absent: ['cedar is the (fast|slow)est']
"""



# It is answered to the token: the page is then asked for by a page of its own address, without
# which browsers keep the cookie back from a link in another one; and no history has the token.
DOOR_PAGE = """\
<!doctype html><meta charset="utf-8"><title>subagent-fleet</title>
<script nonce="NONCE">location.replace("/")</script>
"""

# -- the dashboard --

# Its pieces, one after the other, are the page; NONCE is new in each answer.

_PAGE_STYLE = r"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>subagent-fleet</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<style nonce="NONCE">
:root {
  --bg: #f3f5f7; --panel: #fff; --ink: #16191d; --dim: #57606a; --line: #d5dbe1;
  --ok: #00694a; --warn: #8a4b00; --bad: #b3261e;
  --m0: #0072b2; --m1: #d55e00; --m2: #009e73; --m3: #cc79a7; --m4: #e69f00;
  --s1: .25rem; --s2: .5rem; --s3: 1rem; --s4: 1.5rem;
  --small: .75rem; --text: .875rem; --middle: 1rem; --large: 1.25rem;
  font-size: clamp(1rem, .75vw, 2rem);
}
@media (prefers-color-scheme: dark) { :root {
  --bg: #0d1014; --panel: #161a20; --ink: #eceff3; --dim: #9aa4af; --line: #2b323b;
  --ok: #3ddc97; --warn: #f5b84a; --bad: #ff8f85;
  --m0: #56b4e9; --m1: #ff8c42; --m2: #2cc99a; --m3: #e79ac4; --m4: #f2c14e;
} }
* { box-sizing: border-box; margin: 0; overflow-wrap: anywhere; }
body { font: var(--text)/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
body { background: var(--bg); color: var(--ink); font-variant-numeric: tabular-nums; }
ul, ol { list-style: none; padding: 0; }
h1, .rate b { font-size: var(--large); line-height: 1.25; }
h2 { font-size: var(--small); letter-spacing: .06em; text-transform: uppercase; color: var(--dim); }
h3, #sentence { font-size: var(--middle); }
code { font: .95em ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace; }
[hidden] { display: none !important; }
:focus-visible { outline: 2px solid var(--m0); outline-offset: 2px; }
.dim { color: var(--dim); } .ok { color: var(--ok); }
.warn { color: var(--warn); } .bad { color: var(--bad); }
.m0 { --c: var(--m0); } .m1 { --c: var(--m1); } .m2 { --c: var(--m2); }
.m3 { --c: var(--m3); } .m4 { --c: var(--m4); } .mx { --c: var(--dim); }
header, main { padding: var(--s3) var(--s4); }
header, .line, .legend { display: flex; flex-wrap: wrap; gap: var(--s2) var(--s3); }
header { background: var(--panel); border-bottom: 1px solid var(--line); }
header div:first-child { flex: 1 1 20rem; }
.now { text-align: right; }
main, .pair { display: grid; gap: var(--s4); grid-template-columns: minmax(0, 1fr); }
section > h2, .line { margin-bottom: var(--s2); align-items: center; }
.panel, .card { background: var(--panel); border: 1px solid var(--line); border-radius: .5rem; }
.panel, .card { padding: var(--s3); }
.scroll { overflow: auto; }
.cards, .notes { display: grid; gap: var(--s3); }
.card ul { flex: 1; }
.cards { grid-template-columns: repeat(auto-fit, minmax(min(19rem, 100%), 1fr)); }
.card { border-top: 3px solid var(--c); display: flex; flex-direction: column; gap: var(--s2); }
.card.off { border-top-style: dashed; }
.row { display: flex; gap: var(--s2); justify-content: space-between; align-items: center; }
.row > :last-child { flex: none; max-width: 70%; }
.slots { display: flex; flex-wrap: wrap; gap: 3px; justify-content: end; }
.slots i { width: .8rem; height: .8rem; border: 2px solid var(--c); border-radius: 3px; }
.slots .full, .bar i { background: var(--c); }
.bar { display: flex; flex: 1; height: .5rem; border-radius: .25rem; background: var(--line); }
.bar i { border-right: 2px solid var(--panel); border-radius: inherit; }
.bar i:nth-child(2n) { opacity: .55; }
.spark { flex: 1; height: 2rem; fill: none; stroke: var(--c); stroke-width: 1.5; }
.spark polyline { vector-effect: non-scaling-stroke; }
@media (min-width: 64rem) { .pair { grid-template-columns: 2fr 3fr; } }
.pair section { display: flex; flex-direction: column; min-width: 0; }
.pair .panel { flex: 1; }
#routes { position: relative; display: grid; gap: 8%; }
#routes { grid-template-columns: minmax(0, 4fr) minmax(0, 5fr) minmax(0, 4fr); }
#routes svg { position: absolute; inset: 0; width: 100%; height: 100%; }
#routes ul { display: flex; flex-direction: column; gap: var(--s2); justify-content: space-around; }
#routes li { position: relative; padding: var(--s1) var(--s2); font-size: var(--small); }
#routes li { border: 1px solid var(--line); border-radius: .375rem; background: var(--bg); }
th, td, #routes span, .lane span { white-space: nowrap; }
td, #routes span, .lane span { overflow: hidden; text-overflow: ellipsis; }
#routes span { display: block; }
#routes .box { border: 2px solid var(--c); }
#routes path { fill: none; stroke: var(--line); stroke-width: 1.5; }
#routes .spare { stroke: var(--dim); stroke-dasharray: 3 5; }
#routes .works { stroke: var(--c); stroke-width: 3; stroke-dasharray: 10 5; }
#routes .works { animation: flow .9s linear infinite; }
@media (prefers-reduced-motion) { #routes .works { animation: none; stroke-dasharray: none; } }
@keyframes flow { to { stroke-dashoffset: -15; } }
.lane { display: grid; grid-template-columns: var(--label) 1fr; }
.lane, .axis { --label: 8.5rem; min-width: 44rem; }
.lane span { position: sticky; left: 0; z-index: 1; background: var(--panel); }
.lane span { line-height: 1.75rem; padding-right: var(--s2); }
.track { position: relative; overflow: hidden; border-right: 1px solid var(--line); }
.track { background: linear-gradient(to right, var(--line) 1px, transparent 1px) 0 / 20%; }
.track li { position: absolute; top: .375rem; height: 1rem; min-width: 3px; }
.track button { position: absolute; inset: 0; width: 100%; border: 0; background: none; }
.track i { position: absolute; top: 0; height: 1rem; }
.wait { border: 1px dashed var(--dim); border-radius: 3px; }
.read, .write { background: var(--c); } .read { opacity: .45; }
.mark { font: bold 1rem/1 sans-serif; color: var(--bad); }
.track .mark { margin-left: -.3em; text-shadow: 0 0 3px var(--panel), 0 0 3px var(--panel); }
.axis { display: grid; grid-template-columns: repeat(5, 1fr) auto; padding-left: var(--label); }
.axis, .legend, #told, th, #log { color: var(--dim); font-size: var(--small); }
.legend li { display: flex; gap: var(--s2); align-items: center; }
.legend i:not(.dot, .mark) { width: 1.4rem; height: .7rem; }
.dot { display: inline-block; width: .6rem; height: .6rem; border-radius: 50%; }
.dot { background: var(--c, currentcolor); margin-right: var(--s1); flex: none; }
.legend, #told { min-height: 1.5em; margin-top: var(--s2); }
input { font: inherit; color: inherit; background: var(--panel); width: min(20rem, 100%); }
input { border: 1px solid var(--dim); border-radius: .375rem; padding: var(--s1) var(--s2); }
#table, #log ol { max-height: 40rem; padding-top: 0; }
table { border-collapse: collapse; width: 100%; }
th { position: sticky; top: 0; background: var(--panel); }
th, td { padding: var(--s2); text-align: left; }
td { border-top: 1px solid var(--line); max-width: 18rem; }
.number { text-align: right; }
.notes progress { width: min(16rem, 100%); accent-color: var(--m0); }
@media (max-width: 40rem) {
  header, main { padding: var(--s3); } .now { text-align: left; }
  .lane, .axis { --label: 7.75rem; } #routes li { padding: var(--s1); }
}
"""

_PAGE_BODY = r"""</style></head><body><header>
<div><h1 id="fleet">subagent-fleet</h1><p id="sentence">Looking at the machines …</p></div>
<div class="now"><p id="live" role="status"><i class="dot"></i><span>connecting</span></p>
<p id="gateway" class="dim"></p></div>
</header><main>
<section id="warmup" aria-labelledby="of-warmup" hidden>
<h2 id="of-warmup">Warm-up</h2><ul class="panel notes"></ul></section>
<section aria-labelledby="of-machines">
<h2 id="of-machines">Machines</h2><ul id="machines" class="cards"></ul></section>
<div class="pair">
<section aria-labelledby="of-routes"><h2 id="of-routes">Routes</h2>
<div class="panel" id="routes"><svg aria-hidden="true"></svg>
<ul aria-label="Agents"></ul><ul aria-label="Models"></ul><ul aria-label="Machines"></ul></div>
</section>
<section aria-labelledby="of-lanes"><h2 id="of-lanes">Last five minutes</h2>
<div class="panel">
<div id="scroll" class="scroll" tabindex="0" role="region" aria-labelledby="of-lanes">
<ul id="lanes"></ul>
<p class="axis" aria-hidden="true"><span>−5 min</span><span>−4</span><span>−3</span>
<span>−2</span><span>−1</span><span>now</span></p></div>
<ul class="legend"><li><i class="wait"></i>waits</li>
<li><i class="read mx"></i>reads the prompt</li><li><i class="write mx"></i>writes</li>
<li><i class="mark">×</i>moved on after a failure</li></ul>
<ul class="legend" id="legend" aria-label="Colours of the machines"></ul><p id="told"></p></div>
</section></div>
<section id="requests" aria-labelledby="of-requests">
<div class="line"><h2 id="of-requests">Requests</h2>
<input id="filter" type="search" placeholder="filter: agent, model, machine, outcome"
aria-label="Show only requests with these words">
<span id="count" class="dim" role="status"></span></div>
<p id="nothing" class="panel" hidden></p>
<div id="table" class="panel scroll" tabindex="0" role="region" aria-labelledby="of-requests">
<table><thead><tr id="columns"></tr></thead><tbody id="rows"></tbody></table></div>
</section>
<section id="tasks" aria-labelledby="of-tasks" hidden>
<h2 id="of-tasks">Tasks</h2><ul class="panel notes"></ul></section>
<section id="findings" aria-labelledby="of-findings" hidden>
<h2 id="of-findings">What doctor finds</h2><ul class="panel notes"></ul></section>
<section id="log" aria-labelledby="of-log" hidden><h2 id="of-log">LiteLLM's log</h2>
<ol class="panel scroll" tabindex="0" aria-labelledby="of-log"></ol></section>
</main><script nonce="NONCE">
"""

_PAGE_EVENTS = r""""use strict";
// What came from a machine, a file or a client is only ever put into textContent.
const WINDOW = 300, BIN = 5, KEPT = 600, SHOWN = 200;  // seconds; seconds; requests; rows
const requests = new Map(), rests = new Map();  // by id, the oldest first; by node and model
const lanes = new Set(), called = new Map();  // who has asked, the first first; by what name
let picture = null, lead = 0, link = "connecting", told, drawnAt = 0, timer = 0;
const $ = (id) => document.getElementById(id);
const now = () => Date.now() / 1000 + lead;
const count = (value) => Math.round(value).toLocaleString("en");
const seconds = (value) => value === null ? "-" : value.toFixed(1);
const clock = (time) => new Date(time * 1000).toTimeString().slice(0, 8);
const gigabytes = (bytes) => (bytes / 1e9).toFixed(1);
const joined = (words, between = " · ") => words.filter(Boolean).join(between);
const host = (url) => url.replace(/^http:\/\//, "");

// -- what happens --
const HAPPENS = {
  hello(event) {
    lead = event.time - Date.now() / 1000;
    rests.clear();
    for (const [id, request] of requests) if (isOpen(request)) requests.delete(id);
  },
  picture(event) { picture = event; },
  begun(event) { requests.set(event.id, begin(event, event.time)); },
  slot(event) { step(event, "read", event); },
  first(event) { step(event, "write", requests.get(event.id)?.steps.at(-1)); },
  tokens({id, time, output_tokens: tokens}) {
    Object.assign(requests.get(id) || {}, {tokens, countedAt: time});
  },
  rests(event) {
    rests.set(`${event.node}\n${event.model}`, {...event, until: event.time + event.seconds});
    requests.get(event.id)?.marks.push(event);
    step(event, "wait");
  },
  returns({node}) {
    for (const [place, rest] of rests) if (rest.node === node) rests.delete(place);
  },
  ended(event) {
    const known = requests.get(event.id), began = event.time - event.total;
    const isWhole = known && (event.first_byte === null || lastStep(known).what === "write");
    const request = isWhole ? known : begin(event, began);
    if (!isWhole) {  // nothing but its end was told
      request.marks = event.tries.map((each) => ({...each, time: began + (event.waited || 0)}));
      for (const [what, at] of [["read", event.waited], ["write", event.first_byte]])
        if (at !== null && event.node) step({time: began + at}, what, event, request);
    }
    Object.assign(request, {receipt: event, end: event.time, countedAt: event.time});
    request.tokens = event.output_tokens;
    requests.set(event.id, request);
    for (const [id, each] of requests)
      if (requests.size > KEPT && !isOpen(each)) requests.delete(id);
  },
};
function begin({id, session, agent, alias}, at) {
  lanes.add(`${session}\n${agent}`);
  if (lanes.size > KEPT) lanes.delete(lanes.values().next().value);
  return {id, session, agent, alias, begun: at, steps: [{at, what: "wait"}], marks: [], end: null,
    tokens: 0, countedAt: at, receipt: null};
}
function step({id, time}, what, {node, model} = {}, request = requests.get(id)) {
  request?.steps.push({at: time, what, node, model});
}
function follow() {
  const source = new EventSource("events");
  source.onmessage = ({data}) => {
    const event = JSON.parse(data);
    HAPPENS[event.kind]?.(event);
    drawSoon("live");
  };
  source.onerror = () => drawSoon(source.readyState === 2
    ? "ended: open the address that ui prints" : "trying again");
}

// -- what follows from it --
const lastStep = (request) => request.steps.at(-1);
const writeOf = (request) => request.steps.findLast((each) => each.what === "write");
const isOpen = (request) => !request.receipt;
const isAtWork = (request) => isOpen(request) && lastStep(request).node;
const stateOf = (request) => request.receipt ? request.receipt.outcome
  : {wait: "waiting", read: "reading", write: "writing"}[lastStep(request).what];
const laneOf = (request) => `${request.session}\n${request.agent}`;
const colourOf = (node) =>
  `m${picture?.machines.find((each) => each.name === node)?.colour ?? "x"}`;
function nameOf(lane, [session, agent] = lane.split("\n")) {
  const known = picture?.names.find((each) => each.agent === agent && each.session === session);
  return agent ? known?.name || agent : "main";
}
function speedOf({tokens, countedAt, ...request}) {
  const write = writeOf(request);
  return write && tokens ? tokens / Math.max(countedAt - write.at, .05) : 0;
}
// Tokens a second of each machine: in bins over the window, and of who writes now.
function flows() {
  const from = Math.floor(now() / BIN) * BIN - WINDOW, found = new Map();
  for (const {name} of picture.machines)
    found.set(name, {bins: Array(WINDOW / BIN).fill(0), now: 0});
  for (const request of requests.values()) {
    const speed = speedOf(request), {at, node} = writeOf(request) || {}, flow = found.get(node);
    if (!speed || !flow) continue;
    const until = Math.max(request.end ?? now(), at + .05);
    if (isOpen(request)) flow.now += speed;
    flow.bins.forEach((_, index) => {
      const begin = from + index * BIN;
      const part = Math.min(until, begin + BIN) - Math.max(at, begin);
      if (part > 0) flow.bins[index] += speed * part / BIN;
    });
  }
  return found;
}

// -- the tree --
// Make `tag.class@name`; objects are attributes, a name is in `parts` of all that are above it.
function make(what, ...children) {
  const [, tag, classes, part] = what.match(/^(\w+)((?:\.[\w-]+)*)@?(\w*)$/);
  const like = ["svg", "path", "polyline"].includes(tag) ? "svg" : "body";
  const element = document.createElementNS(document.querySelector(like).namespaceURI, tag);
  element.setAttribute("class", classes.slice(1).replaceAll(".", " "));
  element.parts = part ? {[part]: element} : {};
  for (const child of children) {
    if (typeof child === "string" || child instanceof Node) element.append(child);
    else for (const [key, value] of Object.entries(child)) element.setAttribute(key, value);
    Object.assign(element.parts, child.parts);
  }
  return element;
}
// Say words; in those of our own, `commands` are told from the words around them.
function say(element, words, hasCode = false) {
  if (element.said === words) return;
  element.said = words;
  const pieces = hasCode ? words.split("`") : [words];
  element.replaceChildren(...pieces.map((each, index) => index % 2 ? make("code", each) : each));
}
// Make the children of an element those of [key, value] rows; keep what is there.
function keep(parent, rows, create, fill = () => {}) {
  const old = parent.kept || new Map();
  let next = parent.firstChild;
  parent.kept = new Map();
  for (const [key, value] of rows) {
    const child = old.get(key) || create(value);
    old.delete(key);
    parent.kept.set(key, child);
    if (child === next) next = next.nextSibling;
    else parent.insertBefore(child, next);
    fill(child, value, child.parts);
  }
  for (const child of old.values()) child.remove();
}
const named = (rows, key = "name") => rows.map((row) => [row[key], row]);
"""

_PAGE_PARTS = r"""
// -- the parts of the page --
function drawHead() {
  const open = [...requests.values()].filter(isOpen), atWork = open.filter(isAtWork).length;
  $("live").className = link === "live" ? "ok" : "bad";
  say($("live").lastChild, link);
  if (!picture) return;
  const {fleet, sentence, ready, gateway} = picture;
  const work = `gateway ${host(gateway.url)} · ${atWork} at work, ${open.length - atWork} wait`;
  document.title = `${fleet} · subagent-fleet`;
  say($("fleet"), fleet);
  say($("sentence"), sentence, true);
  $("sentence").className = ready ? "ok" : "";
  say($("gateway"), joined([clock(now()), gateway.followed ? work : gateway.says]));
}
// What a machine runs: the fleet's models, one under two names once, then what else is loaded.
function modelsOn(machine) {
  const rows = new Map();
  const row = (name, key = name.toLowerCase().replace(/:latest$/, "")) => rows.get(key)
    || rows.set(key, {name, slots: 0, names: [], aliases: [], agents: [],
      state: "not of this fleet"}).get(key);
  for (const {runs, slots, context, state, node, name, alias} of picture.models) {
    if (node !== machine.name) continue;
    const {names, aliases, agents} = Object.assign(row(runs), {slots, context, state});
    names.push(name);
    aliases.push(alias);
    agents.push(...picture.agents.filter((each) => each.model === name).map((each) => each.name));
  }
  for (const loaded of machine.loaded) row(loaded.name).loaded = loaded;
  return [...rows];
}
const makeModel = () => make("li", make("div.row", make("b@name"), make("span.slots@slots",
  {role: "img"})), make("p.dim@what"));
const makeCard = () => make("li.card",
  make("div.row", make("h3@name"), make("span@state")), make("p.dim@what"), make("p.dim@why"),
  make("ul@models"), make("div.row", make("div.bar@bar"), make("span.dim@memory")),
  make("div.row", make("svg.spark", {viewBox: "0 0 59 20", preserveAspectRatio: "none",
    "aria-hidden": "true"}, make("polyline@line")), make("span.rate", make("b@speed"), " tok/s")));
function drawMachines() {
  const flow = flows();
  keep($("machines"), named(picture.machines), makeCard, (card, machine, parts) => {
    const rest = [...rests.values()].find((each) => each.node === machine.name);
    const left = rest ? Math.ceil(rest.until - now()) : 0;
    let [state, level, why] = ["● online", "ok", ""];
    if (!machine.online) [state, level, why] = [`○ ${machine.why}`, "bad", machine.mend];
    else if (left > 0) [state, level, why] = [`◐ resting ${left} s`, "warn",
      `${rest.why}; its work goes elsewhere`];
    else if (rest) [state, level] = ["◐ rested", "warn"];
    card.className = `card m${machine.colour}${machine.online ? "" : " off"}`;
    say(parts.name, machine.name);
    say(parts.state, state);
    parts.state.className = level;
    say(parts.what, joined([machine.runs, host(machine.endpoint),
      machine.latency === null ? "" : `${count(machine.latency)} ms`]));
    say(parts.why, why, true);
    parts.why.hidden = !why;
    keep(parts.models, modelsOn(machine), makeModel, fillModel);
    drawMemory(parts, machine);
    const {bins, now: speed} = flow.get(machine.name), most = Math.max(...bins, 1);
    const points = bins.map((each, index) => `${index},${(19 - 18 * each / most).toFixed(2)}`);
    parts.line.setAttribute("points", points.join(" "));
    say(parts.speed, count(speed));
  });
}
function fillModel(row, model, {name, slots, what}) {
  const open = [...requests.values()].filter(isOpen), {loaded} = model;
  const busy = open.filter((each) => model.names.includes(lastStep(each).model)).length;
  const queue = open.filter((each) => !isAtWork(each) && model.aliases.includes(each.alias)).length;
  const context = loaded?.context || model.context;
  say(name, model.name);
  slots.setAttribute("aria-label", `${busy} of ${model.slots} slots at work`);
  keep(slots, Array.from({length: model.slots}, (_, index) => [index, index < busy]),
    () => make("i"), (slot, isFull) => slot.classList.toggle("full", isFull));
  say(what, joined([context ? `${Math.round(context / 1024)}k` : "",
    loaded && loaded.gpu !== null ? `${loaded.gpu} % GPU` : "", loaded?.stays,
    model.state === "ready" ? "" : model.state, model.agents.join(", "),
    queue ? `${queue} wait` : ""]));
}
function drawMemory({bar, memory}, machine) {
  const used = machine.loaded.reduce((sum, each) => sum + each.bytes, 0);
  const whole = Math.max(machine.memory || 0, used, 1);
  keep(bar, named(machine.loaded), () => make("i"), (part, each) => {
    part.style.width = `${100 * each.bytes / whole}%`;
    part.title = `${each.name}: ${gigabytes(each.bytes)} GB`;
  });
  say(memory, machine.memory ? `${gigabytes(used)} of ${gigabytes(machine.memory)} GB`
    : `${gigabytes(used)} GB loaded`);
}
function drawRoutes() {
  const [svg, agents, models, machines] = $("routes").children;
  const model = Object.fromEntries(named(picture.models));
  const list = (column, rows, describe) => keep(column, named(rows),
    () => make("li", make("span@name"), make("span.dim@more")), (item, row, parts) => {
      const [name, more, title] = describe(row, item);
      say(parts.name, name);
      say(parts.more, more);
      item.title = title;
    });
  list(agents, picture.agents, (each) => [each.name, "",
    `${each.name}: ${model[each.model].runs} on ${model[each.model].node}`]);
  list(models, picture.models, (each) => [each.runs, each.alias,
    joined([`${each.alias}: ${each.runs} on ${each.node}`, ...each.fallback], ", else ")]);
  list(machines, picture.machines, (each, item) => {
    item.className = `box m${each.colour}`;
    return [each.name, each.online ? "" : each.why, each.endpoint];
  });
  drawEdges(svg, plan(model), {agents, models, machines});
}
// Every way a request can go, and the colour of the machine for which one is on it.
function plan(model) {
  const edges = new Map();
  const add = (from, to, isSpare = false, key = JSON.stringify([from, to])) => edges.get(key)
    || edges.set(key, {from, to, isSpare, works: ""}).get(key);
  for (const {name, model: wanted} of picture.agents) add(["agents", name], ["models", wanted]);
  for (const {name, node, fallback} of picture.models)
    for (const each of [node, ...fallback.map((other) => model[other].node)])
      add(["models", name], ["machines", each], each !== node);
  for (const request of [...requests.values()].filter(isAtWork)) {
    const {model: name, node} = lastStep(request), works = `works ${colourOf(node)}`;
    const asker = nameOf(laneOf(request)).replace(/\?$/, "");
    const agent = picture.agents.find((each) => each.name === asker);
    const asked = picture.models.filter((each) => each.alias === request.alias);
    const planned = asked.find((each) => each.name === agent?.model)
      || asked.find((each) => each.name === name) || asked[0];
    if (!planned) continue;
    const models = ["models", planned.name];
    if (planned.name === agent?.model) add(["agents", asker], models).works = works;
    add(models, ["machines", node], true).works = works;
  }
  return edges;
}
function drawEdges(svg, edges, columns) {
  const frame = svg.getBoundingClientRect();
  const place = ([column, name]) => columns[column].kept.get(name)?.getBoundingClientRect();
  keep(svg, [...edges], () => make("path"), (path, {from, to, isSpare, works}) => {
    const left = place(from), right = place(to);
    if (!left || !right) return;
    const x1 = left.right - frame.left, y1 = left.top + left.height / 2 - frame.top;
    const x2 = right.left - frame.left, y2 = right.top + right.height / 2 - frame.top;
    const middle = (x1 + x2) / 2;
    path.setAttribute("d", `M${x1} ${y1} C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`);
    path.setAttribute("class", `${isSpare ? "spare " : ""}${works}`);
  });
}
"""

_PAGE_LANES = r"""
// -- the time line --
function words(request) {
  const steps = request.steps.map((each, index) => {
    const took = ((request.steps[index + 1]?.at ?? request.end ?? now()) - each.at).toFixed(1);
    const verb = {wait: "waited", read: "read the prompt for", write: "wrote for"}[each.what];
    return each.node || took > 0 ? joined([`${verb} ${took} s`, each.node], " on ") : "";
  });
  return joined([called.get(laneOf(request)), clock(request.begun), request.alias, ...steps,
    ...request.marks.map((mark) => `moved on: ${mark.node} ${mark.why}`),
    request.tokens ? `${count(request.tokens)} tokens, ${count(speedOf(request))} a second` : "",
    stateOf(request)], ", ");
}
function drawLanes() {
  const to = now(), found = new Map(), used = {};
  for (const request of requests.values())
    if ((request.end ?? to) > to - WINDOW)
      found.set(laneOf(request), [...found.get(laneOf(request)) || [], request]);
  const sessions = new Set([...found.keys()].map((lane) => lane.split("\n")[0]));
  called.clear();
  for (const lane of lanes) {
    const name = nameOf(lane), [session] = lane.split("\n"), key = `${session}\n${name}`;
    used[key] = (used[key] || 0) + 1;
    called.set(lane, joined([used[key] > 1 ? `${name} #${used[key]}` : name,
      sessions.size > 1 && session.slice(0, 4)]));
  }
  const rank = (lane) => [...sessions].indexOf(lane.split("\n")[0]) * 2 + !lane.endsWith("\n");
  const shown = [...lanes].filter((lane) => found.has(lane)).sort((a, b) => rank(a) - rank(b));
  const makeLane = () => make("li.lane", make("span@label"), make("ul.track@track"));
  const makeBar = () => make("li", make("button@bar", {tabindex: "-1"}));
  keep($("lanes"), shown.map((lane) => [lane, lane]), makeLane, (row, lane, {label, track}) => {
    say(label, called.get(lane));
    label.title = called.get(lane);
    keep(track, named(found.get(lane), "id"), makeBar,
      (item, request, {bar}) => drawBar(item, bar, request, to - WINDOW));
  });
  const nothing = found.size ? "" : "Nothing was asked in the last five minutes.";
  say($("told"), told ? words(told) : nothing);
}
function drawBar(item, bar, request, from) {
  const begin = Math.max(request.begun, from), end = request.end ?? from + WINDOW;
  const whole = Math.max(end - begin, .001);
  const share = (time) => 100 * Math.min(Math.max(time - begin, 0) / whole, 1);
  item.style.left = `${100 * (begin - from) / WINDOW}%`;
  item.style.width = `${100 * whole / WINDOW}%`;
  bar.request = request;
  bar.setAttribute("aria-label", words(request));
  const steps = request.steps.map((each, name) =>
    ({...each, name, until: request.steps[name + 1]?.at ?? end}));
  const marks = request.marks.map((mark) => ({name: mark, what: "mark", at: mark.time}));
  keep(bar, named([...steps, ...marks]), () => make("i"), (part, each) => {
    part.className = `${each.what} ${colourOf(each.node)}`;
    part.style.left = `${share(each.at)}%`;
    if (each.until) part.style.width = `${share(each.until) - share(each.at)}%`;
    else say(part, "×");
  });
}
// One stop for Tab; the arrows go from bar to bar and from lane to lane.
function walk(event) {
  const bars = [...$("lanes").querySelectorAll("button")];
  const index = bars.indexOf(document.activeElement);
  const lane = document.activeElement.closest(".lane");
  const newest = (row) => [...row?.querySelectorAll("button") || []].pop();
  const next = {ArrowLeft: bars[index - 1], ArrowRight: index < 0 ? bars.at(-1) : bars[index + 1],
    ArrowUp: newest(lane?.previousElementSibling), ArrowDown: newest(lane?.nextElementSibling),
    Home: bars[0], End: bars.at(-1)}[event.key];
  if (!next) return;
  event.preventDefault();
  next.focus();
}
function tell(event) {
  told = event.target.closest("button")?.request;
  drawLanes();
}

// -- the requests --
const COLUMNS = ["Time", "Agent", "Alias", "Model", "Machine", "Waited s", "First token s", "Tok/s",
  "In", "Out", "Outcome"];
const cell = (tag, index) => `${tag}${index > 4 && index < 10 ? ".number" : ""}`;
function cells(request) {
  const {receipt, steps} = request, placed = steps.filter((each) => each.node);
  const {node = "-", model = "-"} = placed.at(-1) || {};
  const runs = picture?.models.find((each) => each.name === model)?.runs || model;
  const first = steps.find((each) => each.what === "write")?.at ?? NaN;
  return [clock(request.end ?? request.begun), called.get(laneOf(request)), request.alias, runs,
    node, seconds(receipt ? receipt.waited : (placed[0]?.at ?? now()) - request.begun),
    seconds(receipt ? receipt.first_byte : first ? first - request.begun : null),
    speedOf(request) ? count(speedOf(request)) : "-",
    receipt ? count(receipt.input_tokens) : "-", count(request.tokens),
    joined([stateOf(request), ...request.marks.map((mark) => `${mark.node}: ${mark.why}`)], ", ")];
}
function drawRequests() {
  const wanted = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const all = [...requests.values()].sort((a, b) => (b.end ?? 1e15) - (a.end ?? 1e15)
    || b.begun - a.begun).slice(0, SHOWN).map((request) => [request.id, cells(request)]);
  const shown = all.filter(([, row]) =>
    wanted.every((word) => row.join(" ").toLowerCase().includes(word)));
  keep($("rows"), shown, () => make("tr", ...COLUMNS.map((_, index) => index === 4
    ? make("td", make("i.dot@dot"), make("span@machine")) : make(cell("td", index)))),
  (row, values, {dot, machine}) => values.forEach((value, index) => {
    if (index === 4) dot.setAttribute("class", `dot ${colourOf(value)}`);
    say(index === 4 ? machine : row.children[index], value);
  }));
  say($("count"), wanted.length ? `${shown.length} of ${all.length}` : `${all.length}`);
  $("table").hidden = !all.length;
  $("nothing").hidden = all.length > 0;
  say($("nothing"), `No request yet. Type \`${picture?.hint || "subagent-fleet up"}\` in a `
    + "terminal, and ask for something.", true);
}

// -- what there is only now and then --
const NOTES = {
  warmup: (row) => [row.state === "failed" ? "bad" : "",
    `${row.model} on ${row.node}: ${row.state}, ${seconds(row.seconds)} s ${row.detail}`,
    row.size_bytes ? row.pulled_bytes / row.size_bytes : row.stage === "done" ? 1 : null],
  tasks: (row) => [row.level, joined([`${row.name}: ${row.state}`, row.what], ", ")],
  findings: (row) => [row.level === "error" ? "bad" : "warn",
    joined([row.level, row.what, row.fix], ": ")],
  log: (row) => [{error: "bad", warning: "warn"}[row.level], row.line],
};
function drawNotes() {
  for (const [id, describe] of Object.entries(NOTES)) {
    $(id).hidden = !picture[id].length;
    keep($(id).lastElementChild, picture[id].map((row, index) => [index, row]),
      () => make("li", make("p@text"), make("progress@meter")), (item, row, {text, meter}) => {
        const [level, words, share] = describe(row);
        text.className = level || "";
        say(text, words, id === "findings");
        meter.hidden = share === undefined;
        meter.setAttribute("aria-label", words);
        if (share > 0) meter.value = share;
        else meter.removeAttribute("value");
      });
  }
  keep($("legend"), named(picture.machines), (each) => make("li",
    make(`i.dot.m${each.colour}`), each.name));
}
function drawSoon(news) {  // at most four times a second, and not while nobody can see it
  if (typeof news === "string") link = news;
  if (timer || document.hidden) return;
  timer = setTimeout(() => {
    [timer, drawnAt] = [0, Date.now()];
    for (const part of [drawHead, drawLanes, drawRequests]) part();
    if (picture) for (const part of [drawMachines, drawRoutes, drawNotes]) part();
  }, Math.max(0, drawnAt + 250 - Date.now()));
}
$("columns").append(...COLUMNS.map((name, index) => make(cell("th", index), name)));
$("filter").addEventListener("input", drawRequests);
$("scroll").addEventListener("keydown", walk);
for (const kind of ["focusin", "mouseover"]) $("lanes").addEventListener(kind, tell);
document.addEventListener("visibilitychange", drawSoon);
window.addEventListener("resize", drawSoon);
new ResizeObserver(() => { $("scroll").scrollLeft = 1e6; }).observe($("scroll"));
setInterval(drawSoon, 1000);
follow();
</script></body></html>
"""

DASHBOARD_PAGE = _PAGE_STYLE + _PAGE_BODY + _PAGE_EVENTS + _PAGE_PARTS + _PAGE_LANES


if __name__ == "__main__":
    sys.exit(main())
