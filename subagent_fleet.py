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
    15. Gateway               the fleet behind one address
  G. Commands
    16. Workspace             config, key, generated files, settings: as they lie on the disk
    17. Commands              what each command does
    18. Command line          flags, help, main
"""
from __future__ import annotations

import sys

if sys.version_info < (3, 9):  # noqa: UP036 - this line is what an older Python reaches
    sys.exit("subagent-fleet needs Python 3.9 or newer; this is %s" % sys.version.split()[0])


def _end_quietly(kind, error, trace):
    """Let Ctrl-C end a start without a traceback; `main` does so from then on."""
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, error, trace)


if __name__ == "__main__":
    sys.excepthook = _end_quietly

from dataclasses import dataclass, field, replace
from types import SimpleNamespace


class _Late:
    """Stands for a module until it is first used; `--version` uses none of these."""

    def __init__(self, name):
        self.name = name

    def __getattr__(self, key):
        globals()[self.name] = module = __import__(self.name)
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
    import textwrap
    import threading
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any
else:
    (argparse, array, base64, datetime, difflib, hashlib, ipaddress, json, re, string, textwrap,
     threading) = map(_Late, (
         "argparse array base64 datetime difflib hashlib ipaddress json re string textwrap "
         "threading").split())


class _Pattern:
    """A regular expression that is compiled when it is first used."""

    def __init__(self, pattern):
        self.pattern = pattern

    def __getattr__(self, method):
        self.__dict__[method] = found = getattr(re.compile(self.pattern), method)
        return found


__version__ = "1.0.0"


# =============================================================================
# A. Foundations
# =============================================================================

# == 1. Start and constants ===================================================

EXIT_OK, EXIT_PROBLEM, EXIT_USAGE, EXIT_REFUSED, EXIT_INTERRUPTED = 0, 1, 2, 3, 130
CONFIG_NAMES = ("fleet.yaml", "fleet.yml", "fleet.json")
CONFIG_VARIABLE = "SUBAGENT_FLEET_CONFIG"
TEXT_LIMIT_BYTES = 4 * 1024 * 1024
PROBE_TIMEOUT_SECONDS = 5.0
INIT_TIMEOUT_SECONDS = 2.0
SEND_SECONDS = 60.0
CONNECT_SECONDS = 3.0  # a sleeping laptop costs this, not the whole deadline
ANSWER_LIMIT_BYTES = 8 * 1024 * 1024
PROBE_LIMIT_BYTES = 1024 * 1024  # 2,400 models; as text and values it takes five times that
FREE_ANSWER_BYTES = 256 * 1024  # larger answers are read one at a time
HEADER_LIMIT_BYTES = 64 * 1024
RECEIPTS_LIMIT_BYTES = 10 * 1024 * 1024
JSON_MARKS = 100_000  # `[`, `{`, `:` and `,` in one answer
LEAVE_SECONDS = 0.02  # for a byte to arrive before the connection closes
PROBE_GRACE_SECONDS = 0.2  # for what a node said in time to reach the main thread
PULL_STALL_SECONDS = 120.0
TICK_SECONDS = 0.2
SHOW_LIMIT = 64  # models of one node that are asked for their capabilities
STATE_DIRECTORY = ".subagent-fleet"
MANIFEST_FILE = f"{STATE_DIRECTORY}/manifest.json"
LITELLM_FILE, ENVIRONMENT_FILE = "litellm_config.yaml", ".env.subagent-fleet"
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

    def __init__(self, slug, what, *, where="", fix="", excerpt="", status=EXIT_PROBLEM,
                 findings=()):
        super().__init__(what)
        self.slug, self.what, self.where = slug, what, where
        self.fix, self.excerpt, self.status = fix, excerpt, status
        self.findings = tuple(findings)  # one error may carry every problem of a config
        self.report = {}  # what `--json` shows beside it

    @property
    def finding(self):
        return Finding(self.slug, "error", self.what, self.where, self.excerpt, self.fix)


class NodeFailure(FleetError):
    """Why a node could not be used: a reason class (refused, timeout, …) and the detail."""

    def __init__(self, reason, detail, *, fix=""):
        super().__init__("node-failure", f"{reason}: {detail}" if detail else reason, fix=fix)
        self.reason, self.detail = reason, detail


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


@dataclass(frozen=True)
class LoadedModel:
    """A model that a node holds in memory now (`/api/ps`)."""

    name: str
    context: int
    gpu_percent: int | None  # None: the node does not say
    size: int
    expires: str


REASON_FIXES = {
    "refused": "start Ollama there; `subagent-fleet worker`, typed there, says how to open it",
    "timeout": "wake the machine, and check its firewall",
    "dns": "check the name, or write the address of the machine",
    "unreachable": "join its network; on a Mac see also Privacy & Security > Local Network",
    "tls": "write http:// in its endpoint, or give it a certificate this machine trusts",
    "http 401": "remove the login in front of it: Ollama has none, and none is sent",
    "not ollama": "correct its endpoint, or stop what answers there and start Ollama (port 11434)",
    "bad answer": "check what listens there; restart Ollama"}


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

    @property
    def online(self):
        return not self.reason

    @property
    def why(self):
        return f"{self.reason}: {self.detail}".rstrip(": ")

    @property
    def mend(self):
        return REASON_FIXES.get(self.reason, REASON_FIXES["bad answer"])


def nearest(word, choices):
    """Return ``did you mean `x`?`` for the closest choice, or an empty string."""
    spelled = {str(choice).lower(): choice for choice in list(choices)[:100]}  # 3 ms
    found = difflib.get_close_matches(str(word)[:64].lower(), spelled, 1, 0.6)
    return f"did you mean `{spelled[found[0]]}`?" if found else ""


def some_of(names, limit=12):
    """Return `a, b and 3 more`."""
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(map(str, list(names)[:limit])) + more


def count_of(things, noun):
    """Return `1 warning`, `2 warnings`."""
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def show_value(value):
    """Return a value as it may stand in a message: short, in backticks."""
    words = {type(None): "nothing", dict: "a mapping", list: "a list"}
    if type(value) in words:
        return words[type(value)]
    text = str(value).lower() if isinstance(value, bool) else str(value)
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
#   escaped surrogates (\ud83d)   PyYAML makes two broken characters of a pair

DEPTH_LIMIT = 64
KEY_LIMIT = 1024  # from the start of a key to its colon: YAML's own limit

_CLASH = object()  # a word that programs read differently
_WORDS = {form: value for words, value in (
    ("null", None), ("true", True), ("false", False), (".inf +.inf", float("inf")),
    ("-.inf", float("-inf")), ("yes no on off", _CLASH),
) for word in words.split() for form in (word, word.title(), word.upper())}
_WORDS.update(dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")))
_WORDS.update({"": None, "~": None, "=": _CLASH, "<<": _CLASH})
# An integer and a float of every YAML, then what is a number or a date in 1.1 or in 1.2 only.
# Python 3.11 refuses integers of more than 4,300 digits.
_NUMBER = _Pattern(
    r"([-+]?(?:0|[1-9][0-9]{0,999})|0x[0-9a-fA-F]{1,999})"
    r"|([-+]?[0-9]+\.[0-9]*(?:[eE][-+][0-9]+)?|\.[0-9]+(?:[eE][-+][0-9]+)?)"
    r"|[-+]?0b[01_]+|[-+]?0x[0-9a-fA-F_]+|0o[0-7]+"
    r"|[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9][0-9_]*(?::[0-5]?[0-9]){1,99}(?:\.[0-9_]*)?|[-+]?[0-9][0-9_:.]{200,}"
    r"|[0-9]{4}-[0-9][0-9]?-[0-9][0-9]?(?:(?:[Tt]|[ \t]+)[0-9][0-9]?:[0-9][0-9]:[0-9][0-9]"
    r"(?:\.[0-9]*)?(?:[ \t]*(?:Z|[-+][0-9][0-9]?(?::[0-9][0-9])?))?)?")

# Surrogates, controls, and the line breaks and byte order marks that programs disagree on.
_ODD = _Pattern("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
_OUTSIDE = {"&": ("anchors (`&x`)", "repeat the value, or quote the text"),
            "*": ("aliases (`*x`)", "repeat the value, or quote the text"),
            "!": ("tags (`!x`)", "remove the tag, or quote the text"),
            "?": ("`?` keys", "write `key: value`, or quote the text"),
            "%": ("directives (`%YAML`)", "remove the line, or quote the text"),
            "<<": ("merge keys (`<<`)", "repeat the values"),
            "---": ("several documents", "keep one document per file")}
_ESCAPES = {"0": "\0", "a": "\a", "b": "\b", "t": "\t", "\t": "\t", "n": "\n", "v": "\v",
            "f": "\f", "r": "\r", "e": "\x1b", " ": " ", '"': '"', "/": "/", "\\": "\\",
            "N": "\x85", "_": "\xa0", "L": "\u2028", "P": "\u2029"}
# What ends or changes quoted text. A run of blanks is passed whole, which keeps this linear.
_BREAK = r"|[ \t]*\n[ \t\n]*|[ \t]{2,}"
_QUOTED = {"'": _Pattern("''?" + _BREAK), '"': _Pattern(
    r'"|\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|\n[ \t\n]*|[^\n])' + _BREAK)}

_SPACES = _Pattern(" *")
_LINE = _Pattern("[^\n]*")
_BLANKS = _Pattern("[ \n]*")
_MARKER = _Pattern(r"(?m)^(?:---|\.\.\.)(?=[ \t\n]|\Z)")
_DASH = _Pattern(r"-(?=[ \t\n]|\Z)")
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
_BLOCK_HEADER = _Pattern(r"[|>](?:([-+])([1-9])?|([1-9])([-+])?)?(?: *| +#[^\n]*)(?:\n|\Z)")
# Two lines of a `>` scalar that are joined: neither begins with a blank.
_FOLDED = _Pattern(r"(?m)^([^ \t\n][^\n]*)\n(\n*)(?=[^ \t\n])")
# Text that is written without quotes.
_BARE = _Pattern(r"(?a)[A-Za-z_/][\w./@%+=();-]*(?:[ :][\w./@%+=();-]+)*")


def parse_yaml(text, source="<text>"):
    """Return the plain value of a YAML or JSON text, as PyYAML's safe_load does, or refuse."""
    return Document(text, source).value


class Document:
    """A YAML or JSON text that was read: its `value`, and the position of everything in it.

    Every method that reads starts at `self.at`. Those of block style stop at the next token, its
    column in `self.column`: -1 when the document is over. `marks` holds for each container, by
    id, four offsets an entry: start and end of the key, start and end of the value.
    """

    def __init__(self, text, source):
        if not isinstance(text, str):
            raise FleetError("yaml-input", f"not text, but {type(text).__name__}", where=source)
        if len(text) > TEXT_LIMIT_BYTES:
            raise FleetError("yaml-limit", f"the text has {len(text):,} characters, more than "
                             f"{TEXT_LIMIT_BYTES:,}", where=source)
        self.text = (text[1:] if text.startswith("\ufeff") else text).replace("\r\n", "\n")
        self.source, self.marks, self.open = source, {}, []
        self.span = None  # of the value read last; None when it has no line of its own
        self.last_line, self.orders = (0, 1), {}
        odd = _ODD.search(self.text)
        if odd:
            self.fail("yaml-character", f"U+{ord(odd.group()):04X} does not belong in YAML text",
                      at=odd.start(), fix="end lines with LF or CRLF" if odd.group() == "\r" else
                      "remove it, or escape it inside double quotes")
        self.seek(0)
        self.marks[None] = array.array("I", (self.at, self.at + 1))
        marked = self.column < 0 and self.text.startswith("---", self.at)
        begun = marked or self.column >= 0
        self.at += 3 * marked
        self.value = self.read_value(-1, nests=not marked)
        if self.column >= 0:
            self.fail("yaml-indent", "this line belongs to nothing above it",
                      fix="align it with its neighbours")
        if begun and self.text.startswith("...", self.at):
            self.at += 3
            self.end_line()
        if self.at < len(self.text):
            self.fail_outside("---", self.at)

    def locate(self, path, *, key=False):
        """Return (`source:line:column`, excerpt) of a value, or of the nearest key above it."""
        node, spans = self.value, self.marks[None] * 2
        for step in path:
            if id(node) not in self.orders:
                keys = range(len(node)) if isinstance(node, list) else node
                self.orders[id(node)] = dict(zip(keys, range(len(node))))
            place = self.orders[id(node)].get(step)
            if place is None:
                key = True
                break
            spans, node = self.marks[id(node)][4 * place:4 * place + 4], node[step]
        return self.show(*spans[:2] if key else spans[2:])

    def show(self, start, end):
        """Return `source:line:column` of a span of text, and its line with the span underlined."""
        line, line_start = self.line_of(start), self.text.rfind("\n", 0, start) + 1
        line_end = _LINE.match(self.text, start).end()
        left, right = max(line_start, start - 60), min(line_end, start + 60)
        end = start + len(self.text[start:min(end, right)].rstrip())
        before = ("…" if left > line_start else "") + _visible(self.text[left:start])
        token = _visible(self.text[start:end])
        after = _visible(self.text[end:right]) + ("…" if right < line_end else "")
        caret = " " * len(before) + "^" * max(1, len(token))
        return (f"{self.source}:{line}:{start - line_start + 1}",
                f"{line:>5} | {before}{token}{after}\n{'':>5} | {caret}")

    def line_of(self, at):
        """Return the number of a line. Counting from the last one keeps many problems linear."""
        offset, line = self.last_line
        line += self.text.count("\n", offset, at) - self.text.count("\n", at, offset)
        self.last_line = at, line
        return line

    def fail(self, slug, what, *, at=None, size=1, fix=""):
        at = self.at if at is None else at
        if self.text[at:at + 1] == "\t":
            slug, what = "yaml-tab", "a tab where YAML takes only spaces"
            fix = "replace the tab by spaces"
        where, excerpt = self.show(at, at + size)
        raise FleetError(slug, what, where=where, excerpt=excerpt, fix=fix)

    def fail_outside(self, feature, at):
        named, fix = _OUTSIDE[feature]
        self.fail("yaml-unsupported", f"{named} are outside the YAML subset", at=at,
                  size=len(feature), fix=fix)

    def fail_unexpected(self, expected, *, fix=""):
        """Say why the character here cannot stand here."""
        char, (start, end) = self.text[self.at], self.span or (self.at, self.at)
        if "\n" in self.text[start:end] and not self.text[end:self.at].strip(" ") \
                and self.text[start] in "\"'":
            self.fail("yaml-syntax", f"this quoted text ends on line {self.line_of(end)}, "
                      "where more follows it", at=start, fix="close the quote on its line")
        if char in _OUTSIDE:
            self.fail_outside(char, self.at)
        if _DASH.match(self.text, self.at):
            fix = "start the list on the line below its key"
        elif char == "/":
            fix = "begin a comment with `#`"
        elif not fix and char in "@`|>":
            fix = "quote the text"
        self.fail("yaml-syntax", f"expected {expected}, found `{_visible(char)}`", fix=fix)

    def fail_colon(self, start):
        """Say why the colon here does not make a key of the text from `start`."""
        if "\n" in self.text[start:self.at]:
            self.fail("yaml-indent", f"a key inside the value of line {self.line_of(start)}",
                      fix="align it with its neighbours, or put the missing `: ` after a key "
                      "above, or begin a comment with `#`")
        if self.at - start > KEY_LIMIT:
            self.fail("yaml-limit", f"a key of over {KEY_LIMIT:,} characters", fix="shorten it")
        if self.text[start] in "[{\"'":
            self.fail_unexpected("the end of the line", fix="write `key: value`, one a line")
        rest = _LINE.match(self.text, start, start + 80).group().split(" #")[0].rstrip(" ")
        self.fail("yaml-syntax", "`: ` inside plain text", fix="quote the whole value"
                  if len(rest) > 60 else f"quote it: {quote_yaml(rest)}")

    def skip(self, at):
        """Return where the first token at or behind `at` begins."""
        at = _BLANKS.match(self.text, at).end()
        while self.text[at:at + 1] == "#":
            at = _BLANKS.match(self.text, _LINE.match(self.text, at).end()).end()
        return at

    def seek(self, at):
        """Go to the first token at or behind `at`; tell whether it is on the same line."""
        self.at = self.skip(at)
        self.column = self.at - self.text.rfind("\n", 0, self.at) - 1
        if self.at == len(self.text) or (self.column == 0 and _MARKER.match(self.text, self.at)):
            self.column = -1
        return self.column >= 0 and "\n" not in self.text[at:self.at]

    def end_line(self):
        """Pass the rest of a line that must be empty, and go to the next token."""
        if self.seek(self.at):
            if self.text[self.at] == ":" and self.span:
                self.fail_colon(self.span[0])
            self.fail_unexpected("the end of the line", fix="quote the whole value")

    def enter(self):
        self.open.append(array.array("I"))  # 16 bytes an entry; tuples take 30 times the text
        if len(self.open) > DEPTH_LIMIT:
            self.fail("yaml-limit", f"more than {DEPTH_LIMIT} levels deep")

    def mark(self, start, end):
        """Keep where the key and the value of an entry stand; the key where a value has no line."""
        self.open[-1].extend((start, end) + (self.span or (start, end)))

    def leave(self, container):
        marks, self.span = self.open.pop(), None
        if marks:
            self.marks[id(container)] = marks
        return container

    def check_new(self, mapping, key, at):
        if key in mapping:
            line = self.line_of(self.open[-1][4 * list(mapping).index(key)])
            self.fail("yaml-duplicate", f"the key `{_visible(str(key))}` is already on line {line}",
                      at=at, size=len(str(key)), fix="remove or rename one of them")

    def read_block(self, indent):
        """Read a node at `self.column`; what it belongs to is at column `indent`."""
        column, items, mapping = self.column, [], {}
        if _DASH.match(self.text, self.at):
            self.enter()
            while self.column == column and _DASH.match(self.text, self.at):
                dash = self.at
                self.at += 1
                items.append(self.read_value(column, nests=True))
                self.mark(dash, dash + 1)
            return self.leave(items)
        while self.column == column:
            start, char = self.at, self.text[self.at]
            found = _KEY.match(self.text, start, start + KEY_LIMIT + 2)
            if not found or found.end() > start + KEY_LIMIT + 1:
                if not mapping:
                    return self.read_inline(indent)
                if char not in "\"'" and not _BLOCK_START.match(self.text, start):
                    self.fail_unexpected("a key")
                self.fail("yaml-syntax", "expected `key: value`", size=_LINE.match(
                    self.text, start).end() - start, fix="put `: ` after the key, or `#` before it")
            if not mapping:
                self.enter()
            key = self.read_quoted() if char in "\"'" else self.resolve(found[1].rstrip(" "), start)
            self.check_new(mapping, key, start)
            self.at = found.end()
            mapping[key] = self.read_value(column)
            self.mark(start, found.end() - 1)
        return self.leave(mapping)

    def read_value(self, column, *, nests=False):
        """Read what follows `key:` or `---`; where it `nests`, a dash or nothing."""
        self.span = None
        if self.seek(self.at) and not nests:
            return self.read_inline(column)
        if self.column > column or (
                self.column == column and not nests and _DASH.match(self.text, self.at)):
            return self.read_block(column)
        return None

    def read_inline(self, indent):
        """Read a scalar or flow style, and the end of its line."""
        if self.text[self.at] in "|>":
            return self.read_lines(indent)
        value = self.read_token(indent, _BLOCK_START, _BLOCK_STOP)
        self.end_line()
        return value

    def read_token(self, indent, starts, stops):
        text, start = self.text, self.at
        if text[start] in "[{":
            value = self.read_flow()
        elif text[start] in "\"'":
            value = self.read_quoted()
        elif starts.match(text, start) and not (
                text[start] in "-." and _MARKER.match(text, start)):
            value = self.resolve(self.read_plain(indent, stops), start)
        else:
            self.fail_unexpected("a value")
        self.span = start, self.at
        return value

    def read_plain(self, indent, stops):
        """Return the text of a plain scalar, its lines folded."""
        text, at, parts = self.text, self.at, []
        while True:
            stop = stops.search(text, at)
            self.at = stop.start() if stop else len(text)
            parts.append(text[at:self.at].rstrip(" "))
            if text[self.at:self.at + 1] != "\n":
                break
            gap = _BLANKS.match(text, self.at).group()
            at, column = self.at + len(gap), len(gap) - gap.rfind("\n") - 1
            if (column <= indent or text[at:at + 1] in ("", "#") or stops.match(text, at)
                    or _MARKER.match(text, at)):
                break
            parts.append("\n" * (gap.count("\n") - 1) or " ")
        return "".join(parts)

    def resolve(self, text, at):
        value = _WORDS.get(text, text)
        number = value is text and text[0] in "+-.0123456789" and _NUMBER.fullmatch(text)
        if number and number[1]:
            value = int(text, 16 if "x" in text else 10)
        elif number:
            value = float(text) if number[2] and abs(float(text)) < float("inf") else _CLASH
        if value is _CLASH:
            if text == "<<":
                self.fail_outside(text, at)
            fix = f'quote it: "{text[:80]}"'
            if text != "=" and text[4:5] != "-":  # a date
                plain = {"yes": "true", "on": "true", "no": "false", "off": "false"}
                fix = f"write {plain.get(text.lower(), 'a plain decimal number')}, or {fix}"
            self.fail("yaml-ambiguous", f"YAML programs disagree about `{text[:80]}`", at=at,
                      size=len(text), fix=fix)
        return value

    def read_quoted(self):
        text, start, parts = self.text, self.at, []
        at = start + 1
        for token in _QUOTED[text[start]].finditer(text, at):
            parts.append(text[at:token.start()])
            at = token.end()
            if token.group() == text[start]:
                self.at = at
                return "".join(parts)
            parts.append(self.unquote(token.group(), token.start()))
            if text[at - 1] == "\n" and _MARKER.match(text, at):
                self.fail("yaml-syntax", f"`{text[at:at + 3]}` ends the document inside quotes",
                          at=at, size=3, fix="indent the line")
        self.fail("yaml-syntax", f"this `{text[start]}` is never closed", at=start)

    def unquote(self, token, at):
        """Return what an escape, a pair of apostrophes or a break stands for inside quotes."""
        if "\n" in token:  # one break is a space, or nothing when escaped; the others are kept
            return "\n" * (token.count("\n") - 1) or ("" if token[0] == "\\" else " ")
        if token[0] != "\\":
            return "'" if token == "''" else token
        code, fix = token[1:], "double the backslash"
        if len(code) > 1:
            number = int(code[1:], 16)
            if number < 0xD800 or 0xDFFF < number < 0x110000:
                return chr(number)
            fix = "write the character itself, or \\U and its 8 digits"
        if code not in _ESCAPES:
            self.fail("yaml-escape", f"`{_visible(token)}` is no character", at=at,
                      size=len(token), fix=fix)
        return _ESCAPES[code]

    def read_lines(self, indent):
        """Read a `|` or `>` scalar; `indent` is the column of what it belongs to."""
        text, start = self.text, self.at
        header = _BLOCK_HEADER.match(text, start)
        if not header:
            self.fail("yaml-syntax", f"`{text[start]}` takes `+`, `-` and a digit from 1 to 9, "
                      "then the line must end", fix="put the text on the lines below")
        chomping, digit, line = header[1] or header[4], header[2] or header[3], header.end()
        if digit:
            width = max(indent, 0) + int(digit)
        else:
            blank = _BLANKS.match(text, line)
            widths = [len(row) for row in blank.group().split("\n")]
            if indent < widths[-1] < max(widths):
                self.fail("yaml-indent", "a blank line above is indented deeper than this line",
                          at=blank.end(), fix="remove the spaces of the blank line")
            width = max(indent + 1, 1, *widths)
        lines = []
        while line < len(text):
            inner = _SPACES.match(text, line, line + width).end()
            end = _LINE.match(text, inner).end()
            if inner == len(text) or inner - line < width and inner < end:
                break
            lines.append(text[inner:end + 1])
            line = end + 1
        self.span = start, start + 1
        self.seek(line)
        body = "".join(lines)
        kept = body.rstrip("\n")
        breaks = {"+": len(body), "-": 0, None: 1 if kept else 0}[chomping]
        tail = body[len(kept):][:breaks]
        if text[start] == ">":
            kept = _FOLDED.sub(lambda match: match[1] + (match[2] or " "), kept)
        return kept + tail

    def peek(self, opener):
        """Go to the next token inside brackets and return its first character."""
        self.at = self.skip(self.at)
        if self.at == len(self.text):
            self.fail("yaml-syntax", f"this `{self.text[opener]}` is never closed", at=opener)
        return self.text[self.at]

    def read_flow(self):
        opener, is_list = self.at, self.text[self.at] == "["
        container, closer = ([], "]") if is_list else ({}, "}")
        self.enter()
        self.at += 1
        while self.peek(opener) != closer:
            start = self.at
            if not is_list and self.text[start] in "[{":
                self.fail_unexpected("a key")
            item = self.read_token(-1, _FLOW_START, _FLOW_STOP)
            end = self.at
            if is_list:
                container.append(item)
            else:
                self.check_new(container, item, start)
                container[item] = self.span = None
                if self.peek(opener) == ":":
                    if "\n" in self.text[start:self.at] or self.at - start > KEY_LIMIT:
                        self.fail_colon(start)
                    self.at += 1
                    if self.peek(opener) not in ",}":
                        container[item] = self.read_token(-1, _FLOW_START, _FLOW_STOP)
            self.mark(start, end)
            if self.peek(opener) == ",":
                self.at += 1
            elif self.text[self.at] != closer:
                self.fail_unexpected(f"`,` or the `{closer}` of line {self.line_of(opener)}",
                                     fix="look for a missing comma or bracket")
        self.at += 1
        return self.leave(container)


def _visible(text):
    """Escape what a terminal would obey or hide."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def quote_yaml(text):
    """Return `text` as a scalar of one line, plain where every YAML reads it as that text."""
    if (_BARE.fullmatch(text) and text.lower() not in (*_WORDS, "y", "n") and "---" not in text):
        return text
    if re.search("[\ud800-\udfff]", text):
        raise FleetError("yaml-dump", f"no file can hold the half character in {text[:60]!a}")
    # Claude Code ends an agent's frontmatter at any `---`, even a quoted one (2.1.197, 2.1.326).
    return '"' + _visible(re.sub(r'(["\\])', r"\\\1", text)).replace("---", "-\\x2d\\x2d") + '"'


def dump_yaml(value):
    """Return block style text that parse_yaml and PyYAML's safe_load read as `value`."""
    return "".join(f"{line}\n" for line in _dump_lines(value, 0))


def _dump_lines(value, depth):
    """Yield the lines of a value that is nested in `depth` others."""
    is_mapping, containers = isinstance(value, dict), (dict, list, tuple)
    if isinstance(value, containers) and depth == DEPTH_LIMIT:
        raise FleetError("yaml-dump", f"the value is more than {DEPTH_LIMIT} levels deep")
    if not isinstance(value, containers) or not value:
        yield json.dumps(value) if isinstance(value, containers) else _dump_scalar(value)
        return
    for key, child in value.items() if is_mapping else enumerate(value):
        margin = _dump_scalar(key) + ": " if is_mapping else "- "
        if len(margin) > KEY_LIMIT + 2:
            raise FleetError("yaml-dump", f"a key has more than {KEY_LIMIT:,} characters")
        if is_mapping and isinstance(child, containers) and child:
            yield margin[:-1]
            margin = "  "
        for line in _dump_lines(child, depth + 1):
            yield margin + line
            margin = "  "


def _dump_scalar(value):
    if isinstance(value, str):
        return quote_yaml(value)
    if isinstance(value, float):
        text = float.__repr__(value).replace("inf", ".inf").replace("nan", ".nan")
        return text if "." in text else text.replace("e", ".0e")
    if value is None or (isinstance(value, int) and value.bit_length() < 3000):  # reader's limit
        return json.dumps(value)
    raise FleetError("yaml-dump", f"no YAML for a value of type {type(value).__name__}")


# =============================================================================
# B. What a fleet is (pure)
# =============================================================================

# == 4. Fleet file ============================================================

_CONTROL = r"\u0000-\u0008\u000b-\u001f\u007f-\u009f\ud800-\udfff"
_ONE_LINE = "^[^\\u000a\\u2028\\u2029" + _CONTROL + "\\u0009]{1,%d}$"
_TOOL = "^[A-Za-z_*][A-Za-z0-9_*:.-]*([(][^()\\u000a\\u0009" + _CONTROL + "]*[)])?$"
# Not what shells (zsh: every lower-case word), loaders and the generated file itself use.
_VARIABLE = ("^(?!(_|[a-z]+|PATH|HOME|USER|USERNAME|SHELL|PWD|OLDPWD|IFS|ENV|TERM|LANG|E?[UG]ID|"
             "no_proxy|PPID|RANDOM|SECONDS|LINENO|COLUMNS|LINES|PROMPT|PS[1-4]|(BASH|ZSH|PYTHON).*|"
             "(ANTHROPIC|CLAUDE|API|NO|LC|LD|DYLD|FISH|NODE|LITELLM_LOCAL)_.*)$)"
             "[A-Za-z_][A-Za-z0-9_]{0,127}$")
_NAME = {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"}
_OCTET, _HEX, _WORD = "(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])", "[0-9A-Fa-f]{1,4}", "[A-Za-z0-9_]+"
_HOST = f"({_OCTET}([.]{_OCTET}){{3}}|(?!.{{254}}|[0-9._]+$){_WORD}((-+|[.]){_WORD})*[.]?)"
_IPV6 = f"(({_HEX}:){{7}}{_HEX}|(?!([^:]*:){{8}})({_HEX}(:{_HEX})*)?::({_HEX}(:{_HEX})*)?)"
RULES = {
    "name": (_NAME, "text of letters, digits, `.`, `_` and `-`, at most 64"),
    "agent name": ({"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]{0,63}$"},
                   "lower case letters, digits, `-` and `_`, at most 64, a letter or digit first"),
    "line": ({"type": "string", "pattern": _ONE_LINE % 256}, "text, 1 to 256 printable characters"),
    "text": ({"type": "string", "pattern": f"^[^{_CONTROL}]*$"}, "text without control characters"),
    "paragraph": ({"type": "string", "pattern": f"^(?!\\s*$|[\\s\\S]*\\n\\s*\\n)[^{_CONTROL}]*$"},
                  "one paragraph that says when to use the agent, without blank lines"),
    "endpoint": ({"type": "string", "pattern": "^[Hh][Tt][Tt][Pp][Ss]?://[^\\s@?#]+$"},
                 "an address such as `http://192.168.1.50:11434`"),
    "host": ({"type": "string", "pattern": f"^({_HOST}|{_IPV6})$"}, "an address or host name"),
    "variable": ({"type": "string", "pattern": _VARIABLE}, "letters, digits and `_`, not in use"),
    # LiteLLM reads `os.environ/NAME` as that variable's value, wherever it stands.
    "alias": ({"type": "string", "pattern": "^(?!os[.]environ/)[A-Za-z0-9._:/@-]{1,128}$"},
              "text of letters, digits and `. _ : / @ -`, at most 128"),
    "port": ({"type": "integer", "minimum": 1, "maximum": 65535}, "a whole number, 1 to 65535"),
    "provider": ({"enum": ["builtin", "litellm"]}, "`builtin` or `litellm`"),
    "tokens": ({"type": "integer", "minimum": 256, "maximum": 16777216}, "256 to 16777216 tokens"),
    "seconds": ({"type": "integer", "minimum": 1, "maximum": 86400}, "whole seconds, 1 to 86400"),
    "parallel": ({"type": "integer", "minimum": 1, "maximum": 64}, "a whole number, 1 to 64"),
    "gigabytes": ({"type": "number", "minimum": 0.5, "maximum": 65536}, "a number of GB"),
    "keep alive": ({"anyOf": [{"type": "integer", "minimum": -1, "maximum": 31536000},
                              {"type": "string", "pattern": "^-?([0-9]{1,4}h|[0-9]{1,6}[ms])+$"}]},
                   "seconds, a duration such as `24h`, or -1 for ever"),
    "boolean": ({"type": "boolean"}, "`true` or `false`"),
    "tag": ({"type": "string", "pattern": _ONE_LINE % 64}, "text, 1 to 64 printable characters"),
    "tool": ({"type": "string", "pattern": _TOOL}, "a name such as `Read` or `\"Bash(git *)\"`"),
    "frontmatter": ({"type": "object"}, "keys and values")}
RULES.update({f"{item}s": ({"type": "array", "items": RULES[item][0]}, f"a list, each item {words}")
              for item, (_, words) in list(RULES.items()) if item in ("tag", "name", "tool")})
REQUIRED = object()
FIELDS = {  # section: key: its rule or its own section, its default, what it is for
    "": {"project": ("project", REQUIRED, "the fleet's name, its gateway, Claude Code's tiers"),
         "nodes": ("node", REQUIRED, "machines that run Ollama"),
         "models": ("model", REQUIRED, "which model runs on which node, under which alias"),
         "agents": ("agent", REQUIRED, "Claude Code subagents and the model each one uses")},
    "project": {"name": ("line", REQUIRED, "shown in tables"),
                "gateway": ("gateway", {}, "where Claude Code finds the fleet"),
                "claude": ("claude", {}, "which model answers for each of Claude Code's tiers")},
    "gateway": {"provider": ("provider", "litellm", "who serves: this program or LiteLLM"),
                "host": ("host", "127.0.0.1", "address the gateway listens on"),
                "port": ("port", 4000, "port the gateway listens on"),
                "master_key_env": ("variable", "LITELLM_MASTER_KEY", "variable with the key")},
    "claude": {tier: ("name", None, "model of the main session" if tier == "main" else
                      f"model behind `{tier}`") for tier in TIERS},
    "node": {"endpoint": ("endpoint", REQUIRED, "where its Ollama answers"),
             "tags": ("tags", (), "your own words for it"),
             "memory_gb": ("gigabytes", None, "memory for models; lets `validate` warn")},
    "model": {"node": ("name", REQUIRED, "the node it runs on"),
              "ollama_model": ("line", REQUIRED, "its name in `ollama list`"),
              "litellm_alias": ("alias", REQUIRED, "the name Claude Code asks for"),
              "context": ("tokens", 8192, "context window in tokens"),
              "timeout": ("seconds", 300, "seconds to wait for its first token"),
              "max_parallel": ("parallel", 1, "requests at the same time"),
              "keep_alive": ("keep alive", -1, "how long it stays loaded"),
              "thinking": ("boolean", False, "let a model that can think do so"),
              "max_output": ("tokens", 8192, "longest answer in tokens"),
              "fallback": ("names", (), "models that answer when this one cannot"),
              "cloud": ("boolean", False, "allow a name that Ollama sends to ollama.com")},
    "agent": {"model": ("name", REQUIRED, "the one of `models` that it uses"),
              "description": ("paragraph", REQUIRED, "when Claude Code calls it; one paragraph"),
              "tools": ("tools", None, "tools it may use; absent: all, []: none"),
              "prompt": ("text", None, "its system prompt; absent: the role's default"),
              "frontmatter": ("frontmatter", {}, "further keys for Claude Code, such as maxTurns")}}
UNITS = {"tokens": {"k": 1024, "m": 1024 * 1024}, "gigabytes": {"g": 1},  # which people write
         "seconds": {"s": 1, "m": 60, "h": 3600, "d": 86400}}
KEY_WORDS = {"alias": "litellm_alias", "url": "endpoint", "api_base": "endpoint",  # these too
             "model": "ollama_model", "num_ctx": "context", "max_tokens": "max_output"}
KEY_RULES = {"node": "name", "model": "name", "agent": "agent name"}
# Claude Code resolves these words itself, so an alias must not be one (2.1.326).
CLAUDE_WORDS = ("sonnet", "opus", "haiku", "fable", "best", "inherit", "default", "opusplan")
FINDINGS_LIMIT = 100  # a file with more of them is no fleet file


def split_endpoint(endpoint):
    """Return (scheme, host, port, path) of an endpoint, or a sentence that says what is wrong."""
    match = re.fullmatch(r"(?i)(https?)://(\[[^\]/]*\]|[^/:\[\]]*)(?::([^/:]*))?(/\S*)?", endpoint)
    if not match:
        return "not of the form scheme://host:port"
    scheme, host, port, path = match.groups()
    scheme = scheme.lower()
    if not re.fullmatch(rf"{_HOST}|\[{_IPV6}(%.+)?\]", host):
        return f"`{host}` is not a host name or address" if host else "the host is missing"
    if port is not None and not (re.fullmatch(r"[0-9]{1,5}", port) and 1 <= int(port) <= 65535):
        return f"`{port}` is not a port (1 to 65535)"
    number = int(port) if port else {"http": 80, "https": 443}[scheme]
    return scheme, host.lower(), number, (path or "").rstrip("/")


def full_endpoint(address):
    """Return an address with http and Ollama's port where it lacks them."""
    url = address if "://" in address else f"http://{address}"
    lacks_port = re.fullmatch(r"http://(\[[^\]/]*\]|[^/:\[\]]+)/?", url)
    return f"{url.rstrip('/')}:{OLLAMA_PORT}" if lacks_port else url


def _normal_endpoint(endpoint):
    parts = split_endpoint(endpoint)
    if isinstance(parts, str):
        raise FleetError("bad-endpoint", parts, fix="write it as `http://192.168.1.50:11434`")
    return "{}://{}:{}{}".format(*parts)


def _normal_keep_alive(duration):
    """Return it as seconds: numbers stay, `1h30m` is added up, negative is for ever."""
    if isinstance(duration, int):
        return duration
    parts = re.findall("([0-9]+)([hms])", duration)
    total = sum(int(number) * UNITS["seconds"][unit] for number, unit in parts)
    return -1 if duration.startswith("-") else total


# What a key's value becomes once it fits its rule; an endpoint says there what no rule can.
NORMAL = {"endpoint": _normal_endpoint, "keep_alive": _normal_keep_alive, "host": str.lower,
          "description": lambda text: re.sub(r"\s*[\n\u2028\u2029]\s*", " ", text.strip())}


@dataclass(frozen=True)
class Gateway:
    """Where Claude Code finds the fleet, and who serves it there."""

    provider: str = "litellm"
    host: str = "127.0.0.1"
    port: int = 4000
    master_key_env: str = "LITELLM_MASTER_KEY"


@dataclass(frozen=True)
class Node:
    """A machine that runs models."""

    name: str
    endpoint: str
    tags: tuple[str, ...] = ()
    memory_gb: float | None = None


@dataclass(frozen=True)
class Model:
    """A model on a node, under the alias that Claude Code asks for."""

    name: str
    node: str
    ollama_model: str
    alias: str
    context: int = 8192
    timeout: int = 300
    max_parallel: int = 1
    keep_alive: int = -1
    thinking: bool = False
    max_output: int = 8192
    fallback: tuple[str, ...] = ()
    cloud: bool = False


@dataclass(frozen=True)
class Agent:
    """A subagent of Claude Code and the model it uses."""

    name: str
    model: str
    description: str
    tools: tuple[str, ...] | None = None
    prompt: str | None = None
    frontmatter: dict[str, object] = field(default_factory=dict)


RECORDS = {"gateway": Gateway, "node": Node, "model": Model, "agent": Agent}


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


def put_space(text, keys):
    """Return what mends a key and a value without a blank between them, or an empty string."""
    key, _, value = str(text).partition(":")
    return f"put a space after the colon: `{key}: {value}`" if key in keys else ""


def _fits(value, rule):
    """Tell whether a value obeys a JSON Schema fragment of RULES."""
    if "anyOf" in rule:
        return any(_fits(value, part) for part in rule["anyOf"])
    if "enum" in rule:
        return value in rule["enum"]
    kinds = {"string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
             "array": (list,), "object": (dict,)}
    if type(value) not in kinds[rule["type"]]:
        return False
    if "pattern" in rule:
        return re.fullmatch(rule["pattern"].strip("^$"), value) is not None
    if "minimum" in rule:
        return rule["minimum"] <= value <= rule["maximum"]
    return "items" not in rule or all(_fits(item, rule["items"]) for item in value)


def suggest_value(key, spec, value):
    """Return what to write instead of a value that its rule refuses, or an empty string."""
    (rule, default, note), fragment = spec, RULES[spec[0]][0]
    text = value if isinstance(value, str) else json.dumps(value)
    if value in (None, ""):
        return "write a value" + (f" ({note})" if default is REQUIRED else
                                  f", or remove the line `{key}:`")
    if rule == "tool" and text.count("(") != text.count(")"):
        return "quote the whole tool, up to its `)`"  # a comma cut it in two
    meant = [text] if isinstance(value, int) else difflib.get_close_matches(
        text[:64].lower(), fragment.get("enum", ()))
    if rule in ("endpoint", "host"):
        url = split_endpoint(full_endpoint(re.sub("(?i)^(https?):?/+", r"\1://", text)))
        meant = [] if isinstance(url, str) else ["{}://{}:{}{}".format(*url), url[1].strip("[]")]
    elif rule == "variable":
        meant = [re.sub("[^A-Za-z0-9_]", "_", text.strip("${}[]\"")).upper()]
    elif "items" in fragment and isinstance(value, (str, int)):
        meant = [[word.strip() for word in words] for words in (
            text.strip("[] ").split(","), [text], text.split())]
    elif not {"pattern", "enum"} & fragment.keys():
        meant = _other_spellings(text.lower(), {"": 1, **UNITS.get(rule, {})})
    best = next((one for one in meant if len(text) < 200 and _fits(one, fragment)), None)
    shown = f"[{', '.join(map(quote_yaml, best))}]" if type(best) is list else _dump_scalar(best)
    name = "" if isinstance(key, int) else f"{key}: "
    return "" if best is None else f"write `{name}{shown}`"


def _other_spellings(text, units):
    """Return the word, number and duration that a text may mean."""
    found = re.fullmatch(r"(\d{1,3}(?:,\d{3})+|\d{1,12})(?:\.0)? ?([a-z]?)(?:ec(?:ond)?s?"
                         r"|in(?:ute)?s?|(?:ou)?rs?|ays?|i?b)?(?: *//.*)?", text)
    number, unit = (int(found[1].replace(",", "")), found[2]) if found else (0, "?")
    return [_WORDS.get(text), number * units.get(unit, 0) or None,
            f"{number * 24}h" if unit == "d" else f"{number}{unit}"]


class _Checker(SimpleNamespace):
    """Collects the `findings` about one `document` while its sections are read."""

    def error(self, slug, path, what, *, fix="", key=False):
        """Report what is wrong with a value; `what` goes on after its path, unless with a key."""
        if len(self.findings) == FINDINGS_LIMIT:
            raise FleetError("too-many", "and more; mend these first")
        dotted = ".".join(map(str, path)) or "the file"
        what = what if key else f"{dotted} {what}"
        place = self.document.locate(path, key=key)
        self.findings.append(Finding(slug, "error", what, *place, fix))

    def section(self, kind, path, value):
        """Check a mapping of known keys; return its Record, or a dict where it has none."""
        fields = FIELDS[kind]
        known, found = "known keys: " + ", ".join(fields), dict.fromkeys(fields)
        if kind in KEY_RULES and path[-1] in fields:  # it may be a name, but then it holds keys
            known = f"indent `{path[-1]}:` deeper, under its {kind}"
        if not isinstance(value, dict):
            self.error("not-mapping", path, f"must hold keys, not {show_value(value)}",
                       fix=put_space(value, fields) or known)
        else:
            for key in value:
                if key not in fields:
                    self.error("unknown-key", path + (key,), f"unknown key {show_value(key)} in "
                               f"{'.'.join(map(str, path)) or 'the file'}", key=True,
                               fix=put_space(key, fields) or nearest(
                                   KEY_WORDS.get(key, key), sorted(fields.keys() - value)) or known)
            found = {key: self.value(spec, path + (key,), value) for key, spec in fields.items()}
        if kind not in RECORDS:
            return found
        return RECORDS[kind](*path[-1:] if kind in KEY_RULES else (), *found.values())

    def value(self, spec, path, parent):
        """Check one key of a section; return its value in normal form, or None when wrong."""
        key, (rule, default, note) = path[-1], spec
        value = parent.get(key, default)
        if value is REQUIRED:
            return self.error("missing-key", path, "is missing", fix=f"add `{key}:` ({note})")
        if rule in FIELDS:
            return (self.named if rule in KEY_RULES else self.section)(rule, path, value)
        if key not in parent:
            return value
        if isinstance(value, list) and "items" in RULES[rule][0]:
            item, items = (rule[:-1], REQUIRED, note), dict(enumerate(value))
            return tuple(self.value(item, path + (index,), items) for index in items)
        (fragment, words), shown = RULES[rule], show_value(value)
        if isinstance(value, str) and fragment.get("type") != "string":
            shown = f'`"{value[:60]}"`'
        try:
            if _fits(value, fragment):
                return NORMAL[key](value) if key in NORMAL else value
        except FleetError as error:
            return self.error(error.slug, path, f"is {shown}: {error.what}", fix=error.fix)
        return self.error("bad-value", path, f"is {shown}; accepted: {words}",
                          fix=suggest_value(key, spec, value))

    def named(self, kind, path, value):
        """Check a mapping of names to sections; return {name: checked section}."""
        checked, (fragment, words) = {}, RULES[KEY_RULES[kind]]
        if not isinstance(value, dict) or not (value or kind == "agent"):
            self.error("not-mapping", path, f"must hold {kind}s by name, not "
                       f"{'an empty mapping' if value == {} else show_value(value)}",
                       fix=f"write `{path[0]}:`, below it a name, below that its keys")
            value = {}
        for name, part in value.items():
            if not _fits(name, fragment):
                self.error("bad-name", path + (name,), f"{path[0]}: {show_value(name)} is not "
                           f"a name for one; accepted: {words}", key=True,
                           fix="quote it" if not isinstance(name, str) else "rename it")
            if isinstance(part, dict) or _fits(name, fragment):
                checked[name] = self.section(kind, path + (name,), part)
        return checked

    def reference(self, path, name, known, kind):
        """Report a name that no section of that kind has."""
        if name is not None and name not in known and name not in map(str, known):
            self.error(f"unknown-{kind}", path, f"references unknown {kind}: {name}",
                       fix=nearest(name, known) or f"known {kind}s: {some_of(known) or 'none'}")


def check_fleet(document):
    """Return (Fleet, []) for a file that has been read, or (None, everything that is wrong)."""
    check, last = _Checker(document=document, findings=[]), []
    try:
        tree = check.section("", (), document.value)
        project, nodes, models, agents = (tree[key] or {} for key in FIELDS[""])
        claude = {tier: name for tier, name in (project.get("claude") or {}).items() if name}
        for tier, name in claude.items():
            check.reference(("project", "claude", tier), name, models, "model")
        for name, agent in agents.items():
            check.reference(("agents", name, "model"), agent.model, models, "model")
            for key in agent.frontmatter or {}:
                is_own = key in ("name", "description", "model", "tools")
                if is_own or not re.fullmatch("[A-Za-z][A-Za-z0-9_-]{0,63}", str(key)):
                    check.error("bad-frontmatter", ("agents", name, "frontmatter", key),
                                f"agents.{name}.frontmatter cannot hold the key {show_value(key)}",
                                key=True, fix=f"write `{key}:` one level up" if is_own else
                                "rename it")
        for name, model in models.items():
            at, alias = ("models", name), model.alias or ""
            check.reference(at + ("node",), model.node, nodes, "node")
            for index, other in enumerate(model.fallback or ()):
                check.reference(at + ("fallback", index), other, models, "model")
            if alias.lower() in CLAUDE_WORDS:
                check.error("reserved-alias", at + ("litellm_alias",), f"is `{alias}`: Claude Code "
                            f"reads `{alias}` as a word of its own",
                            fix=f"write `claude-{alias.lower()}-local`")
            if leaves_house(model.ollama_model or "") and not model.cloud:
                check.error("cloud-model", at + ("ollama_model",), f"is `{model.ollama_model}`: "
                            "Ollama sends this to ollama.com; it does not run on your machine",
                            fix="choose a local model, or add `cloud: true`")
        _check_cycles(check, models)
    except FleetError as error:  # too many
        last = [error.finding]
    if check.findings:
        return None, sorted(check.findings, key=lambda finding: [
            int(part) for part in finding.where.split(":")[-2:]]) + last
    return Fleet(project["name"], project["gateway"], claude, nodes, models, agents, document), []


def leaves_house(ollama_model):
    """Tell whether Ollama sends requests for this name to ollama.com."""
    return ollama_model.lower().endswith((":cloud", "-cloud"))


def _check_cycles(check, models):
    """Report each cycle of fallbacks once, at the entry that closes it."""
    rest = {name: enumerate(model.fallback or ()) for name, model in models.items()}
    for start in models:
        trail = {start: None}  # in this order, each the fallback of the one before
        while trail:
            name = next(reversed(trail))
            index, following = next(rest[name], (0, None))
            if following is None:
                trail.popitem()
            elif following in trail:
                names = [*trail, following]
                check.error("fallback-cycle", ("models", name, "fallback", index),
                            "forms a cycle: " + " → ".join(names[names.index(following):]),
                            fix=f"remove `{following}` from it")
            elif following in models:
                trail[following] = None


def _full_model_name(name):
    """Return a name as Ollama compares it: tag, library and registry have defaults."""
    name = name.lower().removeprefix("registry.ollama.ai/").removeprefix("library/")
    return name if ":" in name.rsplit("/", 1)[-1] else name + ":latest"


def render_schema(kind=""):
    """Return the JSON Schema of the fleet file, or of a section, from the tables that check it."""
    properties = {}
    for key, (rule, default, note) in FIELDS[kind].items():
        found = render_schema(rule) if rule in FIELDS else dict(RULES[rule][0])
        if rule in KEY_RULES:
            found = {"type": "object", "propertyNames": RULES[KEY_RULES[rule]][0],
                     "additionalProperties": found, "minProperties": int(rule != "agent")}
        elif rule not in FIELDS and default not in (REQUIRED, None):
            found["default"] = default
        properties[key] = {"description": note, **found}
    head = {} if kind else {"$schema": "https://json-schema.org/draft/2020-12/schema",
                            "title": "subagent-fleet"}
    required = [key for key, (_, default, _) in FIELDS[kind].items() if default is REQUIRED]
    return {**head, "type": "object", "additionalProperties": False, "properties": properties,
            "required": required}


# == 5. Planning ==============================================================

MAIN_CONTEXT_TOKENS = 32768  # Claude Code's own prompt is 10-18k tokens, before any work
SMALL_CONTEXT_TOKENS = 8192
LEAN_CONTEXT_TOKENS = 65536  # up to here Claude Code is asked for its shorter prompt
ROLES = {  # what an agent of this name is: size of its model, when to use it, tools, prompt
    "planner": ("small", "Use for planning, file discovery and task decomposition.",
                "Read Grep Glob", "You are a fast local planning agent.\nDo not edit files.\n\n"
                "Return a concise response with:\n- plan\n- relevant files\n- risks\n"
                "- next recommended agent\n"),
    "implementer": ("heavy", "Use for implementation, bug fixes, refactors and patch creation.",
                    "Read Grep Glob Edit Write Bash", "You are a senior implementation agent.\n"
                    "Make minimal, correct changes. Prefer small patches.\n"
                    "Run relevant checks when possible.\nExplain what changed and why.\n"),
    "reviewer": ("heavy", "Use after implementation to review diffs, tests and regressions.",
                 "Read Grep Glob Bash", "You are a strict code reviewer.\nFocus on correctness, "
                 "regressions, missing tests, security issues,\nover-engineering, and "
                 "maintainability.\nReview the diff and test output.\n"
                 "Return only actionable issues.\n"),
    "summarizer": ("small", "Use to summarize files, logs and long outputs.", "Read",
                   "You are a fast summarizing agent.\nDo not edit files.\nRead what you are "
                   "pointed at and return its essence:\nfacts, names, numbers and open "
                   "questions. Invent nothing.\n")}
OTHER_PROMPT = "You are a local subagent with one task at a time.\nDo exactly what you are " \
               "asked, with the tools you have.\nReturn a short report: what you found, what " \
               "you changed, what is left.\n"
LOOPBACK = _Pattern(r"(?i)localhost[.]?|127([.][0-9]{1,3}){3}|::1")
EDIT_TOOLS = {"Edit", "Write", "NotebookEdit"}
GONE_TOOLS = {"MultiEdit": "Edit", "LS": "", "TodoWrite": "", "NotebookRead": ""}
KNOWN_TOOLS = """
    Agent AskUserQuestion Bash BashOutput CronCreate CronDelete CronList Edit EnterPlanMode
    EnterWorktree ExitPlanMode ExitWorktree Glob Grep KillShell LSP ListAgents ListMcpResourcesTool
    Monitor NotebookEdit PowerShell PushNotification Read ReadMcpResourceTool ReportFindings
    ScheduleWakeup SendMessage Skill Task TaskCreate TaskGet TaskList TaskOutput TaskStop
    TaskUpdate ToolSearch WebFetch WebSearch Workflow Write
""".split()
KNOWN_FRONTMATTER = ("color", "maxTurns", "effort", "permissionMode", "disallowedTools", "skills",
                     "memory", "isolation", "background", "omitClaudeMd", "mcpServers", "hooks",
                     "initialPrompt", "autoCompactWindow", "observer", "observerMessage",
                     "observeSubagents", "experimental")
KEY = object()  # stands for the gateway's key in a plan, so that a plan can be shown
CLOUDS = ("BEDROCK", "VERTEX", "FOUNDRY", "MANTLE", "ANTHROPIC_AWS", "ANTHROPIC_GOOGLE_CLOUD")
EXEMPT = ("NO_PROXY", "no_proxy")  # to what they hold already, ours is added


def plan_routes(fleet):
    """Return {agent name: its Model}, which knows its alias and its node."""
    return {agent.name: fleet.models[agent.model] for agent in fleet.agents.values()}


def billions(ollama_model):
    """Return the parameters in billions that a model's name tells, else 0."""
    found = re.findall(r"(?:(\d+)x)?(\d+(?:\.\d+)?)b(?![a-z])", ollama_model.lower())
    return max((int(times or 1) * float(size) for times, size in found), default=0)


def plan_tiers(fleet):
    """Return {tier: model name} for the main session and Claude Code's four tiers.

    What the file gives, else the largest model whose alias names the tier, else the model of
    the tier's role (haiku: planner, summarizer; others: implementer, reviewer), else by size.
    """
    by_size = sorted(fleet.models.values(), key=lambda m: (billions(m.ollama_model), m.context))
    tiers = {}
    for tier in TIERS:
        named = [m.name for m in by_size if tier in re.split("[^a-z]+", m.alias.lower())]
        size, sized = ("small", by_size[0]) if tier == "haiku" else ("heavy", by_size[-1])
        used = [fleet.agents[role].model for role, (fitting, *_) in ROLES.items()
                if fitting == size and role in fleet.agents]
        tiers[tier] = fleet.claude.get(tier) or (named[-1:] or used or [sized.name])[0]
    return tiers


def plan_fallbacks(fleet):
    """Return {alias: [aliases to try next]}; one alias never falls back on itself."""
    chains = {}
    for model in fleet.models.values():
        chain = chains.setdefault(model.alias, {})  # a set that keeps its order
        chain.update((fleet.models[name].alias, True) for name in model.fallback)
        chain.pop(model.alias, None)
    return {alias: list(chain) for alias, chain in chains.items() if chain}


def find_models(found, ollama_model):
    """Return the NodeModels or LoadedModels of that name."""
    full_name = _full_model_name(ollama_model)
    return [one for one in found if _full_model_name(one.name) == full_name]


@dataclass(frozen=True)
class RouteState:
    """What is true of a model's route now, and who answers instead while it is not ready."""

    state: str  # ready, cold, model missing, node offline
    loaded: LoadedModel | None = None
    fallback: str | None = None  # a model's name

    def __str__(self):
        other = self.loaded and self.state == "cold"
        return (self.state + (f" (loaded with context {self.loaded.context})" if other else "")
                + (f" \u2192 fallback {self.fallback}" if self.fallback else ""))


def plan_route_state(fleet, states, model):
    """Return the RouteState of a model; what counts as ready is that no request will load it."""
    def is_there(one):
        node = states[one.node]
        return node.online and (one.cloud or find_models(node.models, one.ollama_model))

    node = states[model.node]
    if not is_there(model):
        others = [fleet.models[name] for name in model.fallback]
        others += [one for one in fleet.models.values() if one.alias == model.alias]
        instead = next((one.name for one in others if one is not model and is_there(one)), None)
        return RouteState("model missing" if node.online else "node offline", fallback=instead)
    loaded = find_models(node.loaded, model.ollama_model)
    fitting = [one for one in loaded if one.context in (0, model.context)]  # 0: before Ollama 0.10
    return RouteState("ready" if fitting or model.cloud else "cold", (fitting + loaded + [None])[0])


def plan_next_step(fleet, states, routes):
    """Return the sentence a person wants: ready, or the one next thing to type."""
    steps = {  # the worst first
        "node offline": "{node.name} ({node.endpoint}) is offline, {node.reason}: {node.mend}.",
        "model missing": "`ollama pull {model.ollama_model}` on {node.name}, or from here "
                         "`subagent-fleet warmup --pull`.",
        "cold": "`subagent-fleet warmup`"}
    order = list(steps)
    waiting = [(bool(route.fallback), order.index(route.state), fleet.models[name])
               for name, route in routes.items() if route.state in order]
    if not waiting:
        return "Ready: every model is loaded as its route wants it."
    _, step, model = min(waiting, key=lambda found: found[:2])
    return "Next: " + steps[order[step]].format(model=model, node=states[model.node])


def plan_tools(tools):
    """Return the tools that Claude Code still has, in order, gone ones replaced, none twice."""
    found = [GONE_TOOLS.get(tool.split("(")[0], tool) for tool in tools]
    return tuple(dict.fromkeys(tool for tool in found if tool))


def show_host(host):
    """Return a host as it stands in an address."""
    return f"[{host}]" if ":" in host else host


def gateway_url(gateway):
    """Return the address at which a program on this machine reaches the gateway."""
    reached = {"0.0.0.0": "127.0.0.1", "localhost": "127.0.0.1", "::": "::1"}
    return f"http://{show_host(reached.get(gateway.host, gateway.host))}:{gateway.port}"


def address_kind(host):
    """Return what an address is good for: public, LAN, Tailscale; "" for none, or this machine."""
    # loading ipaddress takes as long as reading a fleet file
    usual = re.fullmatch(r"((?:10\.\d{1,3}|192\.168)(?:\.\d{1,3}){2})|[A-Za-z_][^:]*", host)
    if usual:
        return "LAN" if usual[1] else ""
    try:
        found = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return ""
    if found.is_loopback or found.is_link_local:
        return ""
    # Tailscale's 100.64/10 is neither private nor global
    return "public" if found.is_global else "LAN" if found.is_private else "Tailscale"


def plan_environment(fleet):
    """Return (variable, value, what for) in order; KEY is the key's place, None is unset."""
    tiers = plan_tiers(fleet)
    session = fleet.models[tiers["main"]]
    patience = max(model.timeout for model in fleet.models.values()) * 1000
    urls = [node.endpoint for node in fleet.nodes.values()]
    urls += [gateway_url(fleet.gateway), OLLAMA_ENDPOINT]  # which LiteLLM asks, too (1.106.2)
    hosts = dict.fromkeys(split_endpoint(url)[1].strip("[]") for url in urls)
    planned = [
        (fleet.gateway.master_key_env, KEY, "the gateway's key; one that is set already is kept"),
        ("ANTHROPIC_BASE_URL", gateway_url(fleet.gateway), "the gateway, which stands for Claude"),
        ("ANTHROPIC_AUTH_TOKEN", KEY, "how Claude Code shows the key"),
        ("ANTHROPIC_API_KEY", None, "would be shown as well"),
        ("CLAUDE_CODE_SUBAGENT_MODEL", None, "would beat the model of every agent"),
        *((f"CLAUDE_CODE_USE_{cloud}", None, "would ask a cloud instead") for cloud in CLOUDS),
        *((name, ",".join(hosts), "no proxy sees the key and the prompts") for name in EXEMPT),
        ("ANTHROPIC_MODEL", session.alias, "the main session"),
        *((f"ANTHROPIC_DEFAULT_{tier.upper()}_MODEL", fleet.models[tiers[tier]].alias,
           f"what `{tier}` means") for tier in TIERS[1:]),
        ("CLAUDE_CODE_MAX_CONTEXT_TOKENS", str(session.context),
         "the main model's window; Claude Code would take it for 1,000,000"),
        ("CLAUDE_CODE_MAX_OUTPUT_TOKENS", str(min(session.max_output, session.context // 2)),
         "longest answer; Claude Code keeps this much of the window free for it"),
        ("CLAUDE_CODE_ATTRIBUTION_HEADER", "0", "else nothing of a prompt is found in the cache"),
        ("CLAUDE_CODE_TOTAL_TOKENS_REMINDER", "off", "the same"),
        ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1", "no calls but to the gateway"),
        # A request waits for its turn, then for a first token, then for the next candidate's.
        ("API_FORCE_IDLE_TIMEOUT", "0", "a local model may need minutes for its first token"),
        ("CLAUDE_STREAM_IDLE_TIMEOUT_MS", str(patience * 3), "thrice the slowest timeout"),
        ("API_TIMEOUT_MS", str(patience * 5), "five times, for a whole answer")]
    if session.context <= LEAN_CONTEXT_TOKENS:
        planned.append(("CLAUDE_CODE_SIMPLE_SYSTEM_PROMPT", "1", "a shorter prompt, small window"))
    if len({model.node for model in fleet.models.values()}) == 1:
        planned.append(("CLAUDE_CODE_DISABLE_BACKGROUND_TASKS", "1",
                        "one machine: an agent and its caller would compete for it"))
    planned.append(("LITELLM_LOCAL_MODEL_COST_MAP", "True", "LiteLLM asks nobody at its start"))
    return planned + [(name, "True", "LiteLLM shows no pages without a key")
                      for name in ("NO_DOCS", "NO_REDOC", "NO_OPENAPI")]


def merge_environment(environ, fleet, key):
    """Return an environment with the fleet's variables set, and those unset that disturb."""
    planned = {name: key if value is KEY else value for name, value, _ in plan_environment(fleet)}
    for name in EXEMPT:
        planned[name] = ",".join(filter(None, (environ.get(name), planned[name])))
    return {name: value for name, value in {**environ, **planned}.items() if value is not None}


def digest(content):
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
    def action(self):
        """One word: created, updated, removed, unchanged, or edited, which is the user's."""
        if self.found == self.wanted:
            return "unchanged"
        if self.found is None:
            return "created"
        return "edited" if not self.ours else "removed" if self.wanted is None else "updated"


def fleet_digest(fleet):
    """Return what tells two configs apart whose models are not served alike."""
    return digest(repr([*fleet.nodes.values(), *fleet.models.values()]).encode("utf-8"))[:16]


PLACEHOLDERS = ("qwen3:8b", "qwen3-coder:30b")
STARTER_MODELS = (  # size, alias, context (2.1.326 compacts 32768 before its first turn), timeout
    ("heavy", "claude-sonnet-local", 65536, 600),
    ("small", "claude-haiku-local", MAIN_CONTEXT_TOKENS, 300))


def plan_starter(states):
    """Return what `init` writes, whether its models were found, and what the best one lacks."""
    unasked, anybody = ("local", OLLAMA_ENDPOINT), any(state.online for state in states)
    nodes = {state.name: {"endpoint": state.endpoint, "tags": []} for state in states
             if state.online or not anybody or (state.name, state.endpoint) != unasked}
    found = best_models(states)
    chosen = found or [(node, NodeModel(name)) for node, name in
                       zip((list(nodes)[0], list(nodes)[-1]), PLACEHOLDERS)]
    models = {f"{size}-coder": {
        "node": node, "ollama_model": model.name, "litellm_alias": alias, "timeout": timeout,
        "context": max(256, min(model.trained_context or context, context)), "max_parallel": 1}
        for (size, alias, context, timeout), (node, model)
        in zip(STARTER_MODELS, chosen[-1:] + chosen[:-1])}
    agents = {name: {"model": f"{size}-coder" if len(models) > 1 else "heavy-coder",
                     "description": text, "tools": tools.split()}
              for name, (size, text, tools, _) in ROLES.items()}
    seen = found[-1:] or [(state.name, model) for state in states for model in state.models]
    flaws = [f"{model.name} {rate_model(model)[1]}" for _, model in seen if rate_model(model)[1]]
    return {"nodes": nodes, "models": models, "agents": agents}, bool(found), "".join(flaws[:1])


def best_models(states):
    """Return [(node name, model)] by size, of the best kind: calls tools, then holds the prompt."""
    ranks = {}
    for state in states:
        for model in state.models:
            ranks.setdefault(rate_model(model)[0], []).append((state.name, model))
    return sorted(ranks[max(ranks)] if any(ranks) else (), key=lambda found: found[1].size)


def rate_model(model):
    """Return how well a model serves Claude Code, 0 for not at all, and what it lacks."""
    name, able = model.name.lower(), model.capabilities
    context, prints = model.trained_context or MAIN_CONTEXT_TOKENS, "qwen2.5-coder" in name
    if model.remote or leaves_house(name):
        return 0, "does not run there"
    if not _fits(model.name, RULES["line"][0]) or (
            re.search("embed|minilm|bge-", name) if able is None else "completion" not in able):
        return 0, "cannot chat"
    calls, fits = "tools" in (able or ()) and not prints, context >= MAIN_CONTEXT_TOKENS
    return 1 + 2 * calls + fits, "prints tool calls as text" if prints else \
        "cannot call tools" if able and not calls else \
        "" if fits else f"holds {context} tokens; Claude Code's own prompt takes 10,000 to 18,000"


def plan_worker_block(name, state, reached):
    """Return the `nodes:` and `models:` to paste: a worker's `state`, `reached` at each address."""
    # The names of the kinds sort as they should be preferred.
    places = [(not one.online, address_kind(one.name), one.endpoint) for one in reached]
    *_, endpoint = min(places, default=(state.endpoint.replace("127.0.0.1", name),))
    node, models = _slug(name.split(".")[0], "worker"), {}
    for number, (_, model) in enumerate(best_models([state])):
        name = _slug(re.sub(":latest$", "", model.name), "model")
        name = f"{name[:56]}-{number}" if name in models else name
        models[name] = {
            "node": node, "ollama_model": model.name,
            "litellm_alias": name + "-local" * (name in CLAUDE_WORDS),
            "context": max(256, min(model.trained_context or 1 << 30, MAIN_CONTEXT_TOKENS))}
    return {"nodes": {node: {"endpoint": endpoint}}, "models": models}


def _slug(text, otherwise):
    """Return text as a name that a fleet file accepts."""
    return re.sub("[^A-Za-z0-9._]+", "-", text).strip("-._")[:64].lower() or otherwise


# == 6. Findings ==============================================================

LITELLM_INSTALL = "uv tool install --python 3.12 'litellm[proxy]==1.106.2' (or pipx install …)"
CLAUDE_INSTALL = "npm install -g @anthropic-ai/claude-code@latest"
OLLAMA_HOLES = (  # mended in; what an older one does, worst first (golang/vulndb, its history)
    ("0.1.34", "error", "lets whoever reaches it run code on it (CVE-2024-37032)"),
    ("0.17.1", "error", "lets whoever reaches it read its memory (CVE-2026-7482)"),
    ("0.31.2", "warning", "takes harmful model files without checking them"))
OUR_GATEWAY, OLD_GATEWAY = "this fleet's gateway", "a gateway with an older config"


def lint_fleet(fleet):
    """Yield a warning for each thing that is allowed and will disappoint."""
    def warn(slug, path, what, fix, *, key=False):
        what = ".".join(step for step in path if isinstance(step, str)) + f": {what}"
        return Finding(slug, "warning", what, *fleet.document.locate(path, key=key), fix)

    host = fleet.gateway.host
    if not LOOPBACK.fullmatch(host):
        yield warn("exposed-gateway", ("project", "gateway", "host"),
                   f"`{host}` offers your models to the network; only the key protects them",
                   "write `host: 127.0.0.1`, or keep it on a private network with a strong key")
    for name, node in fleet.nodes.items():
        scheme, host, _, _ = split_endpoint(node.endpoint)
        if scheme == "http" and address_kind(host) == "public":
            yield warn("public-endpoint", ("nodes", name, "endpoint"),
                       f"{host} is a public address and http sends every prompt in clear",
                       "use a LAN, Tailscale or WireGuard address, or https")
        here = {m.ollama_model for m in fleet.models.values() if m.node == name}
        need = sum(billions(model) * 0.6 + 1 for model in here if billions(model))
        if node.memory_gb and len(here) > 1 and need > node.memory_gb:
            yield warn("memory-short", ("nodes", name, "memory_gb"),
                       f"by their names, its models need about {need:.0f} GB and evict each other",
                       "move one to another node, or choose a smaller one")
    yield from _lint_models(fleet, warn)
    yield from _lint_agents(fleet, warn)


def _lint_models(fleet, warn):
    aliases, contexts, tiers = {}, {}, plan_tiers(fleet)
    if "haiku" not in fleet.claude:  # one that was only planned never sees the main prompt
        del tiers["haiku"]
    for name, model in fleet.models.items():
        full_name = _full_model_name(model.ollama_model)
        first = aliases.setdefault(model.alias, model)
        if _full_model_name(first.ollama_model) != full_name:
            yield warn("alias-collision", ("models", name, "litellm_alias"),
                       f"`{model.alias}` is also the alias of {first.name}, a different model: "
                       f"{first.ollama_model}, {model.ollama_model}", "give each its own alias")
        twin = contexts.setdefault((model.node, full_name), model)
        if twin.context != model.context:
            yield warn("context-thrash", ("models", name, "context"), f"{model.context}, but "
                       f"{twin.context} in models.{twin.name}, the same model: each switch "
                       "reloads it", f"write `{max(twin.context, model.context)}` for both")
        serves = ", ".join(tier for tier in tiers if tiers[tier] == name)
        least, why = SMALL_CONTEXT_TOKENS, "a subagent's first request alone takes 2,000 tokens"
        if serves:
            least = MAIN_CONTEXT_TOKENS
            why = f"it serves {serves}, and Claude Code's own prompt takes 10,000 to 18,000 tokens"
        if model.context < least:
            yield warn("small-context", ("models", name, "context"), f"{model.context}; {why}",
                       f"write `context: {least}` or more")


def _lint_agents(fleet, warn):
    for name, agent in fleet.agents.items():
        for index, tool in enumerate(agent.tools or ()):
            at, bare = ("agents", name, "tools", index), tool.split("(")[0]
            if bare in GONE_TOOLS:
                yield warn("tool-gone", at, f"Claude Code dropped `{bare}`; generate mends it",
                           f"write `{GONE_TOOLS[bare]}`" if GONE_TOOLS[bare] else "remove it")
            elif bare not in KNOWN_TOOLS and "__" not in bare and (
                    bare[0].islower() or nearest(bare, KNOWN_TOOLS)):
                yield warn("tool-unknown", at, f"Claude Code is not known to have `{bare}`",
                           nearest(bare, KNOWN_TOOLS) or f"known: {some_of(KNOWN_TOOLS)}")
        for key in agent.frontmatter:
            if key not in KNOWN_FRONTMATTER:
                yield warn("unknown-frontmatter", ("agents", name, "frontmatter", key),
                           "Claude Code is not known to read it", nearest(key, KNOWN_FRONTMATTER)
                           or f"known: {some_of(KNOWN_FRONTMATTER)}", key=True)
        model = fleet.models[agent.model].ollama_model
        edits = agent.tools is None or EDIT_TOOLS & set(plan_tools(agent.tools))
        if edits and "qwen2.5-coder" in model.lower():
            yield warn("prints-tool-calls", ("agents", name, "model"), "it may edit, but "
                       f"{model} is known to print tool calls as text instead of making them",
                       "choose a model that calls tools, such as qwen3-coder:30b")


def lint_key(fleet, environ):
    """Yield a finding when the environment holds a weak key, which beats the one generated."""
    variable, host = fleet.gateway.master_key_env, fleet.gateway.host
    key, exposed = environ.get(variable), not LOOPBACK.fullmatch(host)
    if key is not None and (len(key) < 16 or len(set(key)) < 8):  # sk-local-dev and the like
        why = "it has fewer than 16 characters" if len(key) < 16 else "it is easy to guess"
        why += ", and the gateway listens beyond this machine" * exposed
        yield Finding("weak-key", "error" if exposed else "warning",
                      f"the key in ${variable} is weak: {why}", fix=f"unset {variable}; "
                      f"rm -f {ENVIRONMENT_FILE}; subagent-fleet generate")


DOCTOR_TEXTS = {  # id: level, what is so, what mends it
    "python": ("ok", "Python {version}", ""),
    "claude": ("ok", "Claude Code {version}", ""),
    "claude-missing": ("warning", "Claude Code is not on the PATH", CLAUDE_INSTALL),
    "claude-old": ("warning", "Claude Code {version} (npm's choice on Node below 22) takes every "
                   "`claude-…` alias for a window of 200,000 tokens", CLAUDE_INSTALL),
    "litellm": ("ok", "LiteLLM {version}", ""),
    "litellm-missing": ("error", "LiteLLM (Python 3.10+) is not on the PATH", LITELLM_INSTALL),
    "litellm-poisoned": ("error", "LiteLLM {version} steals credentials (OSV MAL-2026-2144)",
                         "remove it, change every secret of this machine, " + LITELLM_INSTALL),
    "litellm-old": ("error", "LiteLLM {version} without its key is an open proxy", LITELLM_INSTALL),
    "config": ("ok", "{source} is valid", ""),
    "node-online": ("ok", "{state.name}: Ollama {state.version} at {state.endpoint}, {count}", ""),
    "node-offline": ("error", "node `{state.name}`: {state.why} ({state.endpoint}){alone}",
                     "{state.mend}"),
    "ollama-old": ("error", "{who}: Ollama {version} {hole}", "update it: ollama.com/download"),
    "open-origin": ("warning", "{who} answers every web page that a browser near it opens",
                    "remove OLLAMA_ORIGINS on `{name}`, then restart Ollama"),
    "public-address": ("warning", "{who}: the internet may reach it at {address}",
                       "close its port to the internet; use a LAN, Tailscale or WireGuard address"),
    "evicts": ("warning", "{who}: {models} take {need:.0f} GB and context, and evict each other",
               "move one to another node, or choose a smaller one"),
    "route": ("ok", "{model} on {node}", ""),
    "cloud-stub": ("error", "{model} is sent by `{node}` to {remote}",
                   "choose a local model, or add `cloud: true`"),
    "model-missing": ("error", "{model} is not on `{node}`",
                      "subagent-fleet warmup --pull --model {name}"),
    "no-tools": ("error", "{model} cannot call tools, which {users} will ask of it",
                 "choose a model that can, such as qwen3-coder:30b"),
    "no-thinking": ("error", "{model} cannot think; Ollama refuses it", "write `thinking: false`"),
    "context-untrained": ("warning", "{model} was made for {wanted}", "write `context: {wanted}`"),
    "context-short": ("warning", "{model} is loaded with context {context}, not {wanted}",
                      "subagent-fleet warmup --model {name}"),
    "port-free": ("info", "no gateway runs at {at}",
                  "`subagent-fleet serve` in another terminal, or `subagent-fleet up`"),
    "gateway-up": ("ok", "{holder} answers at {at}", ""),
    "gateway-other": ("error", "another fleet's gateway ({holder}) answers at {at}, or this "
                      "one's, which has an older key or lacks aliases", OTHER_PORT),
    "gateway-old": ("error", "the gateway at {at} serves this fleet as it was before a change",
                    "stop it and start it anew"),
    "port-taken": ("error", "another program answers at {at}{also}", OTHER_PORT),
    "settings-override": ("warning", "{path} sets {names} under `env`, which beats the fleet's "
                          "environment", "remove them from {path}"),
    "agent-unloadable": ("warning", "{path}: {defect}; newer Claude Code will not run it",
                         "begin with `---`, `name:`, `description:`, `tools: Read, Grep`, `---`"),
    "files-unchanged": ("ok", "{count} up to date", ""),
    "files-created": ("warning", "{paths}: not generated yet", "subagent-fleet generate"),
    "files-updated": ("warning", "{paths}: behind the config", "subagent-fleet doctor --fix"),
    "files-removed": ("warning", "{paths}: of agents that are gone", "subagent-fleet doctor --fix"),
    "files-edited": ("info", "{paths}: changed by hand; kept", "subagent-fleet generate --diff"),
    "env-readable": ("error", "others may read the key in {path}", "subagent-fleet doctor --fix"),
    "env-tracked": ("error", "the key in {path} is in git",
                    "git rm --cached {path}; rm {path}; subagent-fleet generate"),
    "env-unignored": ("warning", "git would take the key in {path}",  # `./` or `../` ignore nothing
                      "printf '\\n{file}\\n' >> {ignore}"),
    "ollama-absent": ("error", "Ollama is not installed", "install it from ollama.com/download"),
    "ollama-stopped": ("error", "Ollama is at {program}, but: {state.reason} ({state.endpoint})",
                       "start its app or its service, or: ollama serve"),
    "no-model": ("warning", "no model here can answer an agent", "ollama pull " + PLACEHOLDERS[0]),
    "closed-node": ("warning", "Ollama answers this machine only", "open it as shown below")}


def _say(slug, level="", where="", **words):
    """Return the Finding of DOCTOR_TEXTS with its words filled in; what is right has no place."""
    usual, what, fix = DOCTOR_TEXTS[slug]
    return Finding(slug, level or usual, what.format(**words), where if fix else "",
                   fix=fix.format(**words))


@dataclass(frozen=True)
class Facts:
    """What doctor saw, gathered once: its checks look at nothing else."""

    # The config's own findings.
    problems: tuple[Finding, ...] = ()
    # By node: what it answered; its host's addresses, and whether it answers any page.
    states: dict[str, NodeState] = field(default_factory=dict)
    looks: dict[str, tuple[tuple[str, ...], bool]] = field(default_factory=dict)
    # Who holds the gateway's port; see check_gateway.
    holder: str = ""
    # The versions of the programs, None where they were not found; LiteLLM's also tells whether
    # a litellm_init.pth lies beside it.
    claude: str | None = None
    litellm: str | None = None
    # By path: what that settings file puts into the environment.
    settings: dict[str, dict[str, object]] = field(default_factory=dict)
    # By path: the text of an agent, None where it cannot be read.
    agents: dict[str, str | None] = field(default_factory=dict)
    # What `generate` would do, or why that is not known.
    changes: tuple[Change, ...] = ()
    file_problems: tuple[Finding, ...] = ()
    # The environment file, and the ids of what is wrong with it.
    env_path: str = ""
    leaks: tuple[str, ...] = ()


def quote_shell(text):
    """Return text as one word of every shell; of fish only if it holds no quote or backslash."""
    is_bare = re.fullmatch("(?a)[\\w./:-]+", text)
    return text if is_bare else "'" + text.replace("'", "'\\''") + "'"


def plan_verdict(findings):
    """Return the one sentence a person wants, and what to type first."""
    counted = {level: [f for f in findings if f.level == level] for level in ("error", "warning")}
    told = ", ".join(count_of(found, noun) for noun, found in counted.items() if found)
    if not counted["error"]:
        return f"Ready, with {told}." if told else "Ready: everything is in order."
    fixes = [(f"{f.where}: " if f.where else "") + f.fix for f in counted["error"] if f.fix]
    return f"Not ready: {told}." + "".join(f" Begin with: {fix}" for fix in fixes[:1])


def is_older(version, than):
    """Tell whether a version is known (0.0.0 is none) and older."""
    numbers = [[int(part) for part in re.findall(r"\d{1,6}", text)[:3]] for text in (version, than)]
    return any(numbers[0]) and numbers[0] < numbers[1]


def _doctor_nodes(fleet, facts):
    for name, state in facts.states.items():
        who, wanted = f"node `{name}`", [m for m in fleet.models.values() if m.node == name]
        if state.online:
            yield _say("node-online", state=state, count=count_of(state.models, "model"))
        else:  # an error where nobody else can answer for one of its models
            alone = ", ".join(model.name for model in wanted
                              if not plan_route_state(fleet, facts.states, model).fallback)
            yield _say("node-offline", "" if alone else "warning", state=state,
                       alone=f"; nobody else answers for {alone}" if alone else "")
        yield from _ollama_findings(state, who)
        addresses, any_page = facts.looks.get(name, ((), False))
        if any_page:
            yield _say("open-origin", who=who, name=name)
        for address in addresses:
            # One that the config itself names is a warning of the config.
            if address_kind(address) == "public" and address not in state.endpoint:
                yield _say("public-address", who=who, address=address)
        names = {_full_model_name(model.ollama_model) for model in wanted}
        held = [one for one in state.models if _full_model_name(one.name) in names]
        need = sum(one.size for one in held) / 1e9
        full = any(0 < (one.gpu_percent or 0) < 100 for one in state.loaded)
        said = any(found.slug == "memory-short" for found in facts.problems)
        if len(held) > 1 and not said and (full or need > (fleet.nodes[name].memory_gb or need)):
            yield _say("evicts", "", fleet.document.locate(("nodes", name))[0], who=who,
                       models=", ".join(one.name for one in held), need=need)


def _ollama_findings(state, who):
    return [_say("ollama-old", level, who=who, version=state.version,
                 hole=f"{hole}; mended in {mended}")
            for mended, level, hole in OLLAMA_HOLES if is_older(state.version, mended)][:1]


def _doctor_routes(fleet, facts):
    tiers = plan_tiers(fleet)
    for name, model in fleet.models.items():
        state = facts.states[model.node]
        route = plan_route_state(fleet, facts.states, model)
        held, *_ = find_models(state.models, model.ollama_model) or [NodeModel("")]
        users = [agent.name for agent in fleet.agents.values()
                 if agent.model == name and agent.tools != ()]
        users += [tier for tier, used in tiers.items() if used == name]
        can = ("tools", "thinking") if held.capabilities is None else held.capabilities
        wanted = min(model.context, held.trained_context or model.context)
        context = route.loaded.context if route.loaded else 0
        found = [(slug, key) for slug, key, is_so in (
            ("cloud-stub", "ollama_model", held.remote and not model.cloud),
            ("model-missing", "ollama_model", route.state == "model missing"),
            ("no-tools", "ollama_model", users and "tools" not in can),
            ("no-thinking", "thinking", model.thinking and "thinking" not in can),
            ("context-untrained", "context", wanted < model.context),
            ("context-short", "context", 0 < context < wanted)) if is_so]
        for slug, key in found or [("route", "name")] * state.online:
            yield _say(slug, "", fleet.document.locate(("models", name, key))[0], name=name,
                       model=f"models.{name}: {model.ollama_model}", node=model.node,
                       remote=held.remote, users=", ".join(users), wanted=wanted, context=context)


def _doctor_claude(fleet, facts):
    planned = {name: value for name, value, _ in plan_environment(fleet)} if fleet else {}
    for path, given in facts.settings.items():
        names = [name for name, text in given.items() if str(text) != planned.get(name, str(text))]
        if names:
            told = ", ".join(names)
            leaves = re.search("ANTHROPIC_(BASE_URL|AUTH|API_)|CLAUDE_CODE_USE", told)
            yield _say("settings-override", "error" if leaves else "", path=path, names=told)
    for path, text in facts.agents.items():
        _, defect = read_agent(text) if text is not None else ("", "it cannot be read")
        if defect:
            yield _say("agent-unloadable", path=path, defect=defect)


def read_agent(text):
    """Return (name, why Claude Code will not use the agent, or "").

    As 2.1.197 and 2.1.327 list them: YAML whose `name` and `description` are texts, odd values
    are texts too, and of two equal keys one goes. With none of its tools known it is refused.
    """
    found = re.match(r"\ufeff?---[ \t]*\r?\n(.*?\n?)---", text, re.DOTALL)
    if not found:
        return "", "its frontmatter is not closed" if text.startswith("---") else \
            "something stands before the first `---`" if "\n---" in text else \
            "it has no frontmatter"
    quoted = re.sub(r"(?m)^([A-Za-z_-]+:[ \t]+)(?=.*(?:[{}\[\]*&#!|>%@`]|: ))([^\s\"'|>].*)$",
                    lambda line: line[1] + quote_yaml(line[2]), found[1])
    once = {line.partition(":")[0]: line for line in quoted.splitlines()}
    values = {}
    for head in (found[1], quoted, "\n".join(once.values())):
        try:
            values = values or dict(parse_yaml(head))
        except (FleetError, TypeError, ValueError):
            pass  # no mapping: what cannot be read is a finding, not an error
    name, description, tools = map(values.get, ("name", "description", "tools"))
    tools = re.findall(r"([A-Za-z_*][\w*-]*)(?:\([^)]*\))?", str(tools or ""))
    if not values:
        return "", "its frontmatter is not YAML"
    if not isinstance(name, str) or not re.fullmatch("[^:-][^:]*", name):
        return "", f"its name is {show_value(name)}" if name else "it has no name"
    if not isinstance(description, str) or not description.strip():
        return name, "its description is no text"
    if tools and not any(tool in KNOWN_TOOLS or tool.startswith(("*", "mcp__")) for tool in tools):
        return name, f"none of its tools is known here ({', '.join(tools)})"
    return name, ""


def _doctor_files(facts):
    yield from facts.file_problems
    found = {}
    for change in facts.changes:
        found.setdefault(change.action, []).append(change.path)
    for action, paths in found.items():
        yield _say(f"files-{action}", paths=some_of(paths, 5),
                   count=count_of(paths, "generated file"))
    ignore = facts.env_path.replace(ENVIRONMENT_FILE, ".gitignore")
    for slug in facts.leaks:
        yield _say(slug, path=quote_shell(facts.env_path), file=ENVIRONMENT_FILE,
                   ignore=quote_shell(ignore))


def check_gateway(fleet, holder):
    """Return the Finding on who holds the gateway's port: OUR_GATEWAY, a name, or nobody."""
    gateway, place = fleet.gateway, fleet.document.locate(("project", "gateway", "port"))[0]
    slug = {"": "port-free", OUR_GATEWAY: "gateway-up", OLD_GATEWAY: "gateway-old",
            "another program": "port-taken"}.get(holder, "gateway-other")
    return _say(slug, "", place, holder=holder, at=gateway_url(gateway), also="; LiteLLM would "
                "take another port" if gateway.provider == "litellm" else "")


def plan_doctor(fleet, facts):
    """Return (topic, Finding) for everything the checks have to say, in their order."""
    claude, litellm = facts.claude, facts.litellm
    machine = [_say("python", version=sys.version.split()[0]),
               _say("claude-missing" if not claude else
                    "claude-old" if is_older(claude, "2.1.198") else "claude", version=claude)]
    needed = fleet and fleet.gateway.provider == "litellm"
    if litellm or needed:
        slug = "litellm-missing" if not litellm else \
            "litellm-poisoned" if re.match(r"1\.82\.[78]$|.*litellm_init\.pth", litellm) else \
            "litellm-old" if is_older(litellm, "1.104.0") else "litellm"
        level = "warning" if slug == "litellm-old" and not needed else ""
        machine.append(_say(slug, level, version=litellm))
    valid = [_say("config", source=fleet.document.source)] if fleet else []
    topics = {"This machine": machine, "Config": [*valid, *facts.problems]}
    if fleet:
        topics["Nodes"] = _doctor_nodes(fleet, facts)
        topics["Routes"] = _doctor_routes(fleet, facts)
        topics["Gateway"] = [check_gateway(fleet, facts.holder)]
    topics["Claude Code"] = _doctor_claude(fleet, facts)
    topics["Files"] = _doctor_files(facts)
    return [(topic, finding) for topic, findings in topics.items() for finding in findings]


def check_worker(program, state, reached):
    """Return what keeps this machine from being a node, and what mends it."""
    if not state.online:
        slug = "ollama-stopped" if program else "ollama-absent"
        return [_say(slug, state=state, program=program)]
    places = {address_kind(one.name): one.name for one in reached if one.online}
    found = [_say(slug, level, who="this machine", address=places.get("public"))
             for slug, level, is_so in (("no-model", "", not best_models([state])),
                                        ("closed-node", "", not places),
                                        ("public-address", "error", "public" in places)) if is_so]
    return [*_ollama_findings(state, "this machine"), *found]


# =============================================================================
# C. Words (pure)
# =============================================================================

# == 7. Generated files =======================================================

_STARTER = """\
# Which role runs on which model on which machine. After a change:
# `subagent-fleet validate`, then `subagent-fleet generate`.

project:
  name: local-dev
  gateway:
    provider: builtin       # builtin: this program serves the fleet; litellm: LiteLLM does
    host: 127.0.0.1         # only this machine; 0.0.0.0 offers your models to the whole network
    port: 4000
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


def render_starter(tree, found):
    """Return a fleet.yaml that teaches by its comments; they tell if its models were not found."""
    blocks = {"mark": "" if found else "# Placeholders: write in what `ollama list` shows.\n"}
    for kind, parts in tree.items():
        lines = []
        for number, (name, values) in enumerate(parts.items()):
            lines.append(f"  {quote_yaml(name)}:")
            for key, (_, default, note) in FIELDS[kind[:-1]].items():
                value, mark = values.get(key, default), "" if key in values else "# "
                shown = f"[{', '.join(value)}]" if isinstance(value, list) else \
                    "" if value is None else next(_dump_lines(value, 0))
                line = f"    {mark}{key}: {shown}".rstrip()
                if number == 0 and (kind != "agents" or len(line) < 44):
                    line = f"{line:44} # {note}"
                lines += [line] if number == 0 or not mark else []
        blocks[kind] = "\n".join(lines) + "\n"
    return string.Template(_STARTER).substitute(blocks)


TARGETS = ("litellm", "claude", "env")
_HEADLINE = "# Generated by subagent-fleet from the fleet file: change that, then\n" \
          "# `subagent-fleet generate`.\n"


def target_of(path):
    """Return whose a generated path is; None for all that is never removed, manifest or not."""
    found = re.fullmatch(r"(?P<litellm>litellm_config\.yaml)|(?P<env>\.env\.subagent-fleet)|"
                         r"(?P<claude>\.claude/agents/[a-z0-9][a-z0-9_-]{0,63}\.md)", path)
    return found.lastgroup if found else None


def render_files(fleet, key):
    """Return {path: bytes} of everything that is generated."""
    files = {LITELLM_FILE: render_litellm(fleet)}
    files.update((f".claude/agents/{name}.md", render_agent(fleet.agents[name], model.alias))
                 for name, model in plan_routes(fleet).items())
    files[ENVIRONMENT_FILE] = render_environment(fleet, key)
    return {path: text.encode("utf-8") for path, text in files.items()}


def render_litellm(fleet):
    """Return the config of the LiteLLM proxy (facts seen with 1.106.2 and 1.109.1)."""
    fallbacks, groups, entries = plan_fallbacks(fleet), {}, {}
    for model in fleet.models.values():
        groups.setdefault(model.alias, []).append(model)
    router = {"routing_strategy": "simple-shuffle", "enable_weighted_failover": True,
              "num_retries": 0, "allowed_fails": 0, "cooldown_time": 30}
    if any(len({model.context for model in group}) > 1 for group in groups.values()):
        router["enable_pre_call_checks"] = True
    if fallbacks:
        router["fallbacks"] = [{alias: chain} for alias, chain in fallbacks.items()]
    for model in fleet.models.values():
        name = f"{model.node}--{model.name}"
        while name in entries:  # node `a` and model `b--c`, node `a--b` and model `c`
            name += "+"
        params = {"model": f"ollama_chat/{model.ollama_model}",
                  "api_base": fleet.nodes[model.node].endpoint, "num_ctx": model.context,
                  "keep_alive": model.keep_alive, "timeout": model.timeout,
                  "extra_body": {"truncate": False}}  # else Ollama cuts the prompt in silence
        if not model.thinking:
            params["think"] = False  # Claude Code always asks for it; most models answer 400
        if len(groups[model.alias]) > 1 or model.alias in fallbacks:
            params["max_parallel_requests"] = model.max_parallel  # beyond it 429: no queue
        entries[name] = {"model_name": model.alias, "litellm_params": params, "model_info": {
            "id": name, "litellm_provider": "ollama_chat", "mode": "chat",
            "max_input_tokens": model.context, "supports_function_calling": True}}
    sections = (
        ("model_list", list(entries.values()), "Entries with one model_name share its requests."),
        ("litellm_settings", {"drop_params": True}, "What Ollama does not know is left out."),
        ("general_settings", {"master_key": f"os.environ/{fleet.gateway.master_key_env}"},
         "Anywhere else the key is ignored and the proxy is open."),
        ("router_settings", router, "A node that fails is passed over at once."))
    return _HEADLINE + "".join(f"\n# {why}\n" + dump_yaml({name: value})
                             for name, value, why in sections)


def render_agent(agent, alias):
    """Return a Claude Code agent; `---` must be its first bytes, or it is ignored in silence."""
    values = {"name": agent.name, "description": agent.description, "model": alias}
    if agent.tools is not None:
        values["tools"] = ", ".join(plan_tools(agent.tools))
    lines = []
    for key, text in values.items():  # plain where it is words and commas
        bare = all(quote_yaml(part) == part for part in text.split(", "))
        lines.append(f"{key}: {'[]' if not text else text if bare else quote_yaml(text)}")
    lines += [dump_yaml({key: value}).rstrip("\n") for key, value in agent.frontmatter.items()]
    *_, usual = ROLES.get(agent.name, (OTHER_PROMPT,))
    prompt = agent.prompt if (agent.prompt or "").strip() else usual
    return f"---\n{_HEADLINE}" + "\n".join(lines) + f"\n---\n\n{prompt.rstrip()}\n"


def render_environment(fleet, key, shell="sh"):
    """Return the environment as a script; a key of None is not shown."""
    set_to, unset, add, set_key = {  # the last: if there is none; kept_key reads it back
        "sh": ("export {}={}", "unset {}", 'export {0}="${{{0}:+${0},}}"{1}',
               'export {0}="${{{0}:-{1}}}"'),
        "fish": ("set -gx {} {}", "set -e {}", 'set -gx {0} (string join , ${0} {1})',
                 'test -n "${0}"; or set -g {0} \'{1}\'\nset -gx {0} "${0}"')}[shell]
    variable = fleet.gateway.master_key_env
    lines, said = [f"{_HEADLINE}# Holds the gateway's key: keep it out of git.\n"], ""
    for name, value, why in plan_environment(fleet):
        if name == variable:
            line = f"# {name} is not shown on a terminal; --show-key shows it" \
                if key is None else set_key.format(name, key)
        elif value is None:
            line = unset.format(name)
        else:
            line = (add if name in EXEMPT else set_to).format(
                name, f'"${variable}"' if value is KEY else quote_shell(value))
        lines += [line] if why == said else [f"# {why}", line]
        said = why
    return "\n".join(lines) + "\n"


def render_manifest(known):
    """Return the manifest: the hash of each written file; two while a run may yet be cut off."""
    value = {"schema": "subagent-fleet/manifest/1", "files": known}
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode("utf-8")


def parse_manifest(content):
    """Return {path: hashes}; none where no manifest is, None when it cannot be read."""
    if content is None:
        return {}
    try:
        return {path: hashes.strip() for path, hashes in json.loads(content)["files"].items()
                if target_of(path)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


# == 8. Terminal text =========================================================

def clean_text(text):
    """Return text with everything that could steer a terminal shown as an escape."""
    # Controls, bidirectional marks and line separators: text from a node or a file could use them
    # to rewrite the terminal or to look like something else.
    unsafe = ("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e"
              "\u2066-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]")
    return re.sub(unsafe, lambda found: ascii(found[0])[1:-1], text)


def clean_line(text):
    """Return clean text on one line."""
    return clean_text(text).replace("\n", "\\n").replace("\t", " ")


def format_finding(finding, *, indent=""):
    """Return a finding as lines: what, where, the line with a caret, what to type."""
    lines = [finding.what, finding.where and f"  at {finding.where}"] if indent else [
        ": ".join(filter(None, (finding.level, finding.where, finding.what)))]
    lines += [*finding.excerpt.splitlines(), finding.fix and f"  fix: {finding.fix}"]
    return "".join(f"{indent}{clean_line(line)}\n" for line in lines if line)


def format_table(headers, rows, *, columns=0):
    """Return an aligned table; with `columns` the last column wraps to fit, nothing is cut."""
    rows = [[clean_line(str(cell)) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(headers)] + rows) for i in range(len(headers))]
    left = sum(widths[:-1]) + 2 * (len(headers) - 1)
    room = min(max(columns - left, 16), widths[-1]) if columns else widths[-1]
    lines = ["  ".join(h.ljust(w) for h, w in zip(headers, widths)).rstrip(), "-" * (left + room)]
    for row in rows:
        start = "".join(cell.ljust(width + 2) for cell, width in zip(row[:-1], widths))
        for piece in textwrap.wrap(row[-1], room, break_on_hyphens=False) or [""]:
            lines.append((start + piece).rstrip())
            start = " " * left
    return "\n".join(lines) + "\n"


def format_route(agent, model):
    """Return a route in one line: agent, node, model, alias."""
    return clean_line(f"{agent} -> {model.node} -> {model.ollama_model} -> {model.alias}")


def format_pairs(rows):
    """Return one line a pair, in two columns."""
    width = max((len(left) for left, _ in rows), default=0)
    return "".join(f"  {left.ljust(width)}  {right}\n" for left, right in rows)


def format_diff(changes, fleet):
    """Return what would change as a unified diff; keys are never shown."""
    names = rf"KEY|TOKEN|SECRET|PASS(?:W(?:OR)?D)?|\b{fleet.gateway.master_key_env}"
    secret = re.compile(rf"((?:{names})(?: |:?=|:-)).+|sk-\S+", re.IGNORECASE)
    pieces = []
    for change in (change for change in changes if change.found != change.wanted):
        texts = [(content or b"").decode("utf-8", "backslashreplace")
                 for content in (change.found, change.wanted)]
        if change.path == ENVIRONMENT_FILE:
            texts = [secret.sub(lambda at: (at[1] or "") + "(hidden)", text) for text in texts]
        lines = list(difflib.unified_diff(*map(str.splitlines, texts), change.path, change.path,
                                          change.action, "generated", lineterm=""))
        pieces += lines or [f"--- {change.path}: only hidden values differ"]
    return clean_text("".join(line + "\n" for line in pieces))


def format_start(fleet, out):
    """Return what a person types next."""
    here = out if out.startswith(("/", ".")) else f"./{out}"
    place = [quote_shell(f"{here}/{name}") for name in (ENVIRONMENT_FILE, LITELLM_FILE)]
    gateway = fleet.gateway
    serve = "subagent-fleet serve" if gateway.provider == "builtin" else \
        f". {place[0]}\n  litellm --config {place[1]} --host {gateway.host} --port {gateway.port}"
    width = max(map(len, fleet.agents), default=0)
    routes = [f"  {format_route(name.ljust(width), model)}\n"
              for name, model in plan_routes(fleet).items()]
    return (f"\nYour fleet is ready.\n{''.join(routes)}\n"
            f"Start the gateway:\n  {serve}\n\nStart Claude Code, in another terminal:\n"
            f"  subagent-fleet launch claude\n(or: . {place[0]}; claude)\n")


WORKER_SETTINGS = {
    "OLLAMA_HOST": "0.0.0.0:{port}", "OLLAMA_CONTEXT_LENGTH": str(MAIN_CONTEXT_TOKENS),
    "OLLAMA_KEEP_ALIVE": "-1", "OLLAMA_NUM_PARALLEL": "1", "OLLAMA_NO_CLOUD": "1",
    "OLLAMA_MAX_LOADED_MODELS": "{models}"}
WORKER_SETUPS = {  # what to do, one setting, what ends it
    "darwin": ("In the Ollama app: Settings > Expose Ollama to the network. Or in Terminal on the "
               "Mac itself,\nlost at every restart of the Mac:\n\n",
               '  launchctl setenv {name} "{value}"\n', "  killall Ollama; open -a Ollama\n"),
    "systemd": ("Type `sudo systemctl edit ollama` and put this where it says so:\n\n  [Service]\n",
                '  Environment="{name}={value}"\n', "\nThen: sudo systemctl restart ollama\n"),
    "windows": ("In a Command Prompt; then quit Ollama in the tray and start it anew:\n\n",
                '  setx {name} "{value}"\n', ""),
    "docker": ("Stop the container that runs; add `--gpus=all` where there is one:\n\n"
               "  docker run -d --name ollama --restart unless-stopped -v ollama:/ollama \\\n"
               "    -e OLLAMA_MODELS=/ollama/models \\\n", "    -e {name}={value} \\\n",
               "    -p {address}:{port}:{port} ollama/ollama\n"),
    "shell": ("Stop Ollama, and start it so:\n\n", "  {name}={value} \\\n", "  ollama serve\n")}
SECURITY_WARNING = """\
Ollama has no login: whoever reaches it can use, change and delete its models.
Do not expose Ollama or LiteLLM to the public internet. Use LAN, firewall, Tailscale, or WireGuard.
"""


def format_setup(system, state, reached):
    """Return what to type on this system to open its Ollama to the fleet."""
    before, line, after = WORKER_SETUPS[system]
    words = {"port": split_endpoint(state.endpoint)[2], "models": len(best_models([state])) or 1,
             "address": reached[0].name if reached else "0.0.0.0"}
    return before + "".join(line.format(name=name, value=value.format(**words))
                            for name, value in WORKER_SETTINGS.items()) + after.format(**words)


def format_worker(report, columns):
    """Return everything `worker` has to say, the part to paste last."""
    state, text = report["ollama"], ""
    if state.online:
        names = ", ".join(model.name for model in state.models) or "no model"
        text = clean_line(f"Ollama {state.version} runs here with {names}") + "\n\n"
    text += format_table(("Address", "Kind", "Ollama answers there"), [
        (one["address"], one["kind"], "yes" if one["open"] else "no")
        for one in report["addresses"]], columns=columns) + "\n"
    for finding in report["findings"]:
        text += format_finding(finding) + "\n"
    block = dump_yaml({key: value for key, value in report["fleet"].items() if value})
    return text + (f"The settings of a good node, open to the fleet:\n\n{report['setup']}\n"
                   f"{SECURITY_WARNING}\nOn the machine that has the fleet, put these lines under "
                   f"the `nodes:` and `models:` of its fleet.yaml:\n\n{block}")


def format_nodes(fleet, states, headers, columns):
    """Return the name of a fleet and a table of its nodes: models, or why there are none."""
    cells = [{"Node": state.name, "Status": "online" if state.online else "offline",
              "Endpoint": state.endpoint, "Models": ", ".join(model.name for model in state.models)
              or f"({state.reason or 'none'})"} for state in states.values()]
    rows = [[of_node[header] for header in headers] for of_node in cells]
    return f"Fleet: {clean_line(fleet.name)}\n\n" + format_table(headers, rows, columns=columns)


def format_details(states):
    """Return what each node said of itself and its models, or why it said nothing."""
    lines = []
    for state in states.values():
        told = [f"Ollama {state.version}, {state.latency_ms} ms"] if state.online else \
            [state.why, f"  fix: {state.mend}"]
        lines += ["", f"{state.name} ({state.endpoint}): {told[0]}", *told[1:]]
        for model in state.models:
            parts = [f"{model.size / 1e9:.1f} GB", model.parameters, model.quantization,
                     model.trained_context and f"trained for {model.trained_context}",
                     *(model.capabilities or ()), model.remote and f"at {model.remote}"]
            lines.append(f"  {model.name}: " + ", ".join(filter(None, parts)))
    return "".join(clean_line(line) + "\n" for line in lines)


def format_share(loaded):
    """Return which part of a loaded model is on the GPU."""
    percent = loaded.gpu_percent
    return "" if percent is None else f"{percent} % on GPU" if percent else "on CPU"


def format_expiry(expires, now):
    """Return when a model leaves memory, from what `/api/ps` says."""
    text = re.sub(r"\.\d+", "", expires).replace("Z", "+00:00")  # 3.9 reads neither
    try:
        left = datetime.datetime.fromisoformat(text).timestamp() - now
    except (ValueError, OverflowError):
        return "?"
    # keep_alive: -1 is a date in the year 2318
    return "leaving, or busy" if left < 0 else f"{left / 60:.0f} min" if left < 7200 else \
        f"{left / 3600:.0f} h" if left < 366 * 86400 else "stays"


def format_warmth(warmth):
    """Return how it ended; a failure in the node's words and what to type."""
    if not warmth.ok:
        fix = f"    fix: {clean_line(warmth.fix)}\n" if warmth.fix else ""
        return f"  failed: {clean_line(warmth.detail)}\n{fix}"
    loaded = warmth.loaded
    more = [f"context {loaded.context or '?'}", format_share(loaded)] if loaded else []
    more += [f"{warmth.seconds:.1f} s", clean_line(warmth.detail)]
    return f"  ok  ({', '.join(filter(None, more))})\n"


def format_progress(groups, now, columns):
    """Return one line about what is going on, for a terminal."""
    parts = []
    for warmth in (warmth for group in groups.values() for warmth in group.values()):
        if warmth.stage not in ("waiting", "done"):
            amount = f"{100 * warmth.pulled // warmth.size} % of {warmth.size / 1e9:.1f} GB, " \
                if warmth.stage == "pulling" and warmth.size else ""
            parts.append(f"{warmth.model.name} {warmth.stage} {amount}{now - warmth.began:.0f} s")
    return clean_line("  " + " | ".join(parts))[:(columns or 80) - 1]


def format_served(before, after, columns):
    """Return what each node has served in between."""
    if not after:  # LiteLLM has no such page
        return "\nThe gateway does not tell which node served what.\n"
    headers = ("Node", "Requests", "Tokens in", "Tokens out", "Seconds waited", "Failures")
    zeros = dict.fromkeys(TOTALS, 0)
    pairs = {name: (before.get(name, zeros), node) for name, node in after.items()}
    if any(old["requests"] > new["requests"] for old, new in pairs.values()):
        pairs = {name: (zeros, new) for name, (_, new) in pairs.items()}  # of one that took over
    rows = [(name, *(round(new[total] - old[total], 1) for total in TOTALS))
            for name, (old, new) in pairs.items()]
    return "\nServed:\n" + format_table(headers, rows, columns=columns)


def show_record(record):
    """Return a record as JSON has it: a finding without the drawn excerpt."""
    if isinstance(record, Finding):
        return {"id": record.slug, "level": record.level, "what": record.what,
                "where": record.where, "fix": record.fix}
    online = {"online": record.online} if isinstance(record, NodeState) else {}
    return {**vars(record), **online}


def render_report(command, fields):
    """Return the JSON object of a command: plain ASCII, whatever a node calls its models."""
    return json.dumps({"schema": f"subagent-fleet/{command}/1", **fields}, indent=2,
                      default=show_record) + "\n"


# =============================================================================
# D. Speech (pure)
# =============================================================================

# == 9. Talk ==================================================================

API_ERROR_KINDS = {400: "invalid_request_error", 401: "authentication_error",
                   403: "permission_error", 404: "not_found_error", 408: "timeout_error",
                   413: "request_too_large", 529: "overloaded_error"}
REQUEST_FIELDS = {  # what is expected: its types, the fields
    "text": ((str,), "model"), "a list": ((list,), "messages tools stop_sequences"),
    "an object": ((dict,), "tool_choice"), "true or false": ((bool,), "stream"),
    "a whole number": ((int,), "max_tokens top_k"), "a number": ((int, float), "temperature top_p")}
# What Ollama or its engine takes of a tool's schema; one other word can fail the whole request.
SCHEMA_TYPES = {"type": (str, list), "description": str, "enum": list, "required": list,
                "anyOf": list, "allOf": list, "properties": dict, "$defs": dict, "$ref": str,
                "items": object, "const": object, "default": object, "format": str,
                "additionalProperties": bool}
JSON_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
PROMPT_MARKS = 500_000  # `[`, `{`, `:` and `,` in one request; 60 MB of `[],` become 1.5 GB
TURN_PARTS = ("reminder", "text", "thinking", "image", "call", "result", "found")
IMAGE_WEIGHT = 4_000  # bytes of JSON that take as many tokens as an image
BYTES_A_TOKEN = 4.0  # of JSON; learned per model from its first answer on
_TOO_LONG = (r"(?:\((\d+) tokens\) )?exceeds the available context size \((\d+) tokens\)"
             r"|input (length|after truncation) exceeds|longer than the context")
_NO_IMAGES = r"does not support (?:vision|image)|image input"
_NOT_ABLE = "does not support|image input"
NO_IMAGE = "(an image was left out: this model takes none)"


class ApiError(FleetError):
    """A refusal that reaches the client in the Messages API's own shape."""

    def __init__(self, http, what):
        super().__init__("api-error", what)
        self.http, self.kind = http, API_ERROR_KINDS.get(http, "api_error")
        # Both a body and an event of a stream.
        self.event = {"type": "error", "error": {"type": self.kind, "message": what}}


def _parse_object(text):
    """Return the JSON object in a text, or None."""
    try:
        found = json.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def error_text(error):
    """Return a node's own words, out of the JSON that its engine wraps them in."""
    while True:
        inner = error if isinstance(error, dict) else _parse_object(str(error)[:HEADER_LIMIT_BYTES])
        if not inner:
            return str(error)[:500]
        error = inner.get("error", inner.get("message", "an error without words"))


def render_json(value):
    """Return compact ASCII JSON, in which lone surrogates survive and infinity does not."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (ValueError, RecursionError):
        raise ApiError(400, "body: a number or a nesting that JSON cannot carry") from None


# == 10. Backends =============================================================

def _error_words(reply: Reply) -> str:
    """Return what a node says about a request it refused, in its own words."""
    if 300 <= reply.status < 400:
        return f"it redirects to {reply.headers.get('location', 'elsewhere')}; not followed"
    if reply.status == 400 and b" HTTPS " in reply.body:  # what Go and nginx say on a TLS port
        raise NodeFailure("tls", "it speaks TLS; write https://")
    return error_text(reply.body.decode("utf-8", "replace").strip()).split("\n")[0]


def read_json(reply: Reply, path: str) -> Any:
    """Return the JSON value of a node's answer from a path; a refusal is a failure."""
    if reply.status != 200:
        words = _error_words(reply)
        if reply.status == 404 and "model" not in words.lower():
            raise NodeFailure("not ollama", f"it does not know {path}")
        raise NodeFailure(f"http {reply.status}", words)
    return parse_answer(reply.body)


def parse_answer(body: bytes | bytearray) -> Any:
    """Return the JSON value of an answer; refuse what would grow in memory or take long."""
    # 8 MiB of `[[],[],…` become 180 MB of lists.
    if sum(map(body.count, (b"[", b"{", b":", b","))) > JSON_MARKS:
        raise NodeFailure("bad answer", "far more in it than any Ollama answers")
    try:
        # NaN and Infinity are no integers; one of a million digits takes minutes on Python 3.9.
        return json.loads(body.decode("utf-8"), parse_constant=int,
                          parse_int=lambda digits: int(digits) if len(digits) < 20 else 0)
    except (ValueError, RecursionError):
        pass  # they hold the whole text
    if re.match(rb"\s*[\[{]", body):
        raise NodeFailure("bad answer", "its JSON is broken")
    raise NodeFailure("not ollama", "it does not answer with JSON")


def plan_chat(request, model):
    """Return the `/api/chat` request that says what a Messages request says."""
    choice = request.get("tool_choice") or {}
    # Ollama ignores tool_choice: showing fewer tools and a word in the last turn is all there is.
    wishes = {"any": "Answer by calling one of your tools.",
              "tool": f"Answer by calling the tool `{choice.get('name')}`."}
    wish = {"role": "system", "content": wishes.get(str(choice.get("type")))}
    try:
        turns = _read_turns([*request["messages"], wish])
        messages, tools = _render_turns(turns, model.thinking), _render_tools(request, turns)
        system = [value for name, value in _read_parts(request.get("system"), "system")
                  # Claude Code's billing line always differs and would spoil the prompt cache.
                  if name == "text" and not value.startswith("x-anthropic-billing-header:")]
    except RecursionError:
        raise ApiError(400, "body: nested too deeply") from None
    if not messages:  # which Ollama would take for "load the model" and answer nothing
        raise ApiError(400, "messages: at least one message with content is required")
    if system:
        messages.insert(0, {"role": "system", "content": _join(system)})
    # num_ctx must be what warm-up sent, else Ollama loads the model again.
    options = {"num_ctx": model.context,
               "num_predict": min(request.get("max_tokens") or model.max_output, model.max_output)}
    options.update((name, request[name]) for name in ("temperature", "top_p", "top_k")
                   if request.get(name) is not None)
    return {"model": model.ollama_model, "stream": True, "truncate": False,
            "think": model.thinking, "keep_alive": model.keep_alive, "options": options,
            "messages": messages, **({"tools": tools} if tools else {})}


def _read_turns(messages):
    """Return turns in strict alternation: {role, and a list for each kind of part}."""
    turns = []
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            raise ApiError(400, f"messages.{number}: expected the role user, assistant or system")
        parts = _read_parts(message.get("content"), f"messages.{number}")
        if role == "system":  # which many templates take only at the very beginning
            role, parts = "user", [("reminder", value) for name, value in parts if name == "text"]
        if parts and (not turns or turns[-1]["role"] != role):
            turns.append({"role": role, **{name: [] for name in TURN_PARTS}})
        for name, value in parts:
            turns[-1][name].append(value)
    return turns


def _read_parts(content, where):
    """Return (kind, value) for all of a content that a local model can be shown."""
    content = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise ApiError(400, f"{where}: expected text or a list of content blocks")
    parts = []
    for block in content:
        kind = block.get("type")
        if kind in ("text", "thinking"):
            parts.append((kind, _text(block, kind, where)))
        elif kind == "image":
            parts.append((kind, _read_image(block, where)))
        elif kind in ("document", "search_result"):
            source = block.get("source") if kind == "document" else block
            source = source if isinstance(source, dict) else {}
            inside = source.get("data" if source.get("type") == "text" else "content")
            parts += [("text", _text(block, "title", where)), *(_read_parts(inside, where) or [
                ("text", "(a document of which only the bytes were sent was left out)")])]
        elif kind == "tool_reference":
            name = _text(block, "tool_name", where)
            parts += [("found", name), ("text", f"The tool `{name}` can be called now.")]
        elif kind == "tool_use":
            given = block.get("input") or {}
            # Ollama answers 400 to arguments that are not an object.
            given = given if isinstance(given, dict) else {"input": given}
            parts.append(("call", {"id": _text(block, "id", where), "input": given,
                                   "name": _text(block, "name", where) or "unknown"}))
        elif kind == "tool_result":
            inside = _read_parts(block.get("content"), where)
            text = _join([value for name, value in inside if name == "text"])
            if block.get("is_error") is True and not text.startswith(("Error", "<tool_use_error>")):
                text = f"Error: {text}"
            parts.append(("result", {"id": _text(block, "tool_use_id", where), "text": text,
                                     "images": [value for name, value in inside
                                                if name == "image"]}))
            parts += [part for part in inside if part[0] == "found"]
    return [(name, value) for name, value in parts if value]


def _text(block, name, where):
    value = block.get(name)
    if value is not None and not isinstance(value, str):
        raise ApiError(400, f"{where}: `{name}` of a block must be text")
    return value or ""


def _read_image(block, where):
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") != "base64":
        raise ApiError(400, f"{where}: a local model can only be shown base64 images, not URLs")
    try:  # one character that Ollama cannot decode costs the whole request
        pixels = base64.b64decode("".join(_text(source, "data", where).split()), validate=True)
    except ValueError:
        raise ApiError(400, f"{where}: the image is not valid base64") from None
    return base64.b64encode(pixels).decode("ascii")


def _join(texts):
    # Blocks are separate to the client; glued together, the last word of one runs into the next.
    joined = ""
    for text in texts:
        glued = joined and not joined.endswith("\n") and not text.startswith("\n")
        joined += f"\n\n{text}" if glued else text
    return joined


def _render_turns(turns, thinking):
    """Return chat messages in which every call has an id of its own and one result."""
    messages, calls, taken = [], [], set()
    for turn in turns:
        if turn["role"] == "assistant":
            calls = turn["call"]
            for call in calls:
                call["unique"] = call["id"] or f"call_{len(taken)}"
                while call["unique"] in taken:
                    call["unique"] += "_"
                taken.add(call["unique"])
            messages.append({
                "role": "assistant", "content": _join(turn["text"]),
                "thinking": _join(turn["thinking"]) if thinking else "",
                "tool_calls": [{"id": call["unique"], "function": {
                    "name": call["name"], "arguments": call["input"]}} for call in calls]})
            continue
        results = []
        for call in calls:  # its own result, or one without an id
            fitting = [r for wanted in (call["id"], "") for r in turn["result"]
                       if r["id"] == wanted] or [{"text": "(no result)", "images": []}]
            turn["result"] = [r for r in turn["result"] if r is not fitting[0]]
            results.append({"role": "tool", "tool_call_id": call["unique"],
                            "tool_name": call["name"], "content": fitting[0]["text"],
                            "images": fitting[0]["images"]})
        calls, orphans = [], turn["result"]  # those that no call was waiting for
        reminders = [f"<system-reminder>\n{text}\n</system-reminder>" for text in turn["reminder"]]
        words = [f"[result of an earlier call]\n{o['text']}" for o in orphans] + turn["text"]
        images = [image for o in orphans for image in o["images"]] + turn["image"]
        messages += results
        if results and not words and not images:
            # A message after the results would read as the user's next question.
            results[-1]["content"] = _join([results[-1]["content"], *reminders])
        else:
            messages.append({"role": "user", "content": _join(reminders + words), "images": images})
    messages = [{name: value for name, value in message.items() if value or name == "content"}
                for message in messages]
    return [message for message in messages if message["content"] or len(message) > 2]


def _render_tools(request, turns):
    """Return the client's tools; deferred ones once they were found or called."""
    choice, tools = request.get("tool_choice") or {}, {}
    wanted = {name for turn in turns for name in turn["found"]}
    wanted |= {call["name"] for turn in turns for call in turn["call"]}
    for tool in request.get("tools") or ():
        name = tool.get("name") if isinstance(tool, dict) else None
        # Any other type is a tool that Anthropic's servers run or describe.
        if not isinstance(name, str) or not name or tool.get("type") not in (None, "custom") \
                or (tool.get("defer_loading") is True and name not in wanted) \
                or choice.get("type") == "none" \
                or (choice.get("type") == "tool" and name != choice.get("name")):
            continue
        description = tool.get("description")
        tools.setdefault(name, {"type": "function", "function": {
            "name": name, "description": description if isinstance(description, str) else "",
            "parameters": {"properties": {}, **_mend_schema(tool.get("input_schema"))}}})
    return list(tools.values())


def _mend_schema(schema, root=None):
    """Return what is left of a schema when nothing in it can fail the request."""
    kept = {{"oneOf": "anyOf", "definitions": "$defs"}.get(key, key): value
            for key, value in (schema if isinstance(schema, dict) else {}).items()}
    if root is None:  # one tool that is not called an object and Ollama refuses the whole request
        root = kept = {**kept, "type": "object"}
    kept = {key: _mend_schema(value, root) if key == "items" else value
            for key, value in kept.items() if isinstance(value, SCHEMA_TYPES.get(key, ()))}
    types = kept.pop("type", [])
    types = [word for word in ([types] if isinstance(types, str) else types) if word in JSON_TYPES]
    kept["type"] = types[0] if len(types) == 1 else types
    kept["required"] = [word for word in kept.get("required", ()) if isinstance(word, str)]
    for key in kept.keys() & {"anyOf", "allOf"}:
        kept[key] = [_mend_schema(part, root) for part in kept[key]]
    for key in kept.keys() & {"properties", "$defs"}:
        kept[key] = {name: _mend_schema(part, root) for name, part in kept[key].items()
                     if name != "$ref"}  # which the engine would follow
    found = re.fullmatch(r"#/(\$defs|properties)/([^/]+)",
                         kept.pop("$ref", "").replace("#/definitions/", "#/$defs/"))
    if found and isinstance(root.get(found[1]), dict) and found[2] in root[found[1]]:
        kept["$ref"] = found[0]
    kept = {key: value for key, value in kept.items() if value not in ([], "")}
    return kept or {"description": "anything"}  # an empty one would be an object


class Answer:
    """What a model is asked, and its answer: lines of the node in, events and a Message out."""

    def __init__(self, message_id, request, model, ratio, *, blind=False):
        chat = plan_chat(request, model)
        for message in chat["messages"]:
            if blind and message.pop("images", ()):
                message["content"] = _join([message["content"], NO_IMAGE])
        images = [image for message in chat["messages"] for image in message.get("images", ())]
        self.model, self.body, self.has_images = model, render_json(chat), bool(images)
        self.weight = len(self.body) - sum(map(len, images)) + len(images) * IMAGE_WEIGHT
        self.estimate = round(self.weight / ratio)  # of its tokens
        usage = dict.fromkeys(("input_tokens", "output_tokens", "cache_creation_input_tokens",
                               "cache_read_input_tokens"), 0)
        self.message = {"id": message_id, "type": "message", "role": "assistant",
                        "model": request["model"], "content": [], "stop_reason": None,
                        "stop_sequence": None, "usage": usage}
        self._taken = {call["id"] for m in chat["messages"] for call in m.get("tool_calls", ())}
        self._one_call = (request.get("tool_choice") or {}).get("disable_parallel_tool_use") is True
        self._stops = [stop for stop in request.get("stop_sequences") or () if stop]
        self._stopped, self._lines, self._calls = "", 0, 0
        self._open, self._pieces = None, []  # the kind of the block that grows, and its text
        self._phase, self._held = "start", ""  # of a model that prints <think>

    def feed(self, line):
        """Return the events that one line of the node stands for."""
        part = _parse_object(line)
        if part is None:
            raise ApiError(500, "the node sent something that is not an answer")
        if "error" in part:
            status = part["status"] if type(part.get("status")) is int else 500
            raise self.refusal(status, error_text(part["error"]))
        self._lines += 1
        message = part.get("message") if isinstance(part.get("message"), dict) else {}
        thinking, text, calls = map(message.get, ("thinking", "content", "tool_calls"))
        events = []
        if isinstance(thinking, str) and thinking:
            self._phase = "text"
            events += self._grow("thinking", thinking)
        if isinstance(text, str) and text:
            events += self._grow_text(text)
        if self._stopped:
            return events + self._finish({"prompt_eval_count": self.estimate,
                                          "eval_count": self._lines})
        for call in calls if isinstance(calls, list) else ():
            events += self._add_call(call)
        return events + self._finish(part) if part.get("done") is True else events

    def refusal(self, status, words):
        """Return what the client is told when the node refuses, in the words it acts on."""
        model, too_long = self.model, re.search(_TOO_LONG, words)
        if too_long:  # Claude Code 2.1.326 compacts on exactly these words
            maximum = int(too_long[2] or model.context)
            tokens = max(int(too_long[1] or self.estimate), maximum + 1)
            return ApiError(400, f"prompt is too long: {tokens} tokens > {maximum} maximum")
        status = 400 if re.search(_NOT_ABLE, words) else status
        http = {400: 400, 404: 404, 503: 529}.get(status, 500)
        fix = {404: f"; type `ollama pull {model.ollama_model}` there",
               500: "; Ollama's log there says more"}.get(http, "")
        return ApiError(http, f"node {model.node}, model {model.ollama_model}: "
                        f"{words or f'it answered {status}'}{fix}")

    def _grow_text(self, text, *, last=False):
        """Tell thinking from text; a <think> section counts only at the very beginning."""
        text, self._held, events = self._held + text, "", []
        if self._phase == "start":
            bare = text.lstrip()
            if bare.startswith("<think>"):
                self._phase, text = "think", bare[7:]
            elif "<think>".startswith(bare) and not last:
                self._held = text
                return []
            else:
                self._phase = "text"
        if self._phase == "think":
            thought, end, text = self._split(text, ["</think>"], last)
            events = self._grow("thinking", thought)
            self._phase = "after" if end else "think"
        if self._phase == "after":
            text = text.lstrip()
            self._phase = "text" if text else "after"
        if self._stops:  # Ollama would end there too, but not say that it did
            text, self._stopped, _ = self._split(text, self._stops, last)
        return events + self._grow("text", text)

    def _split(self, text, marks, last):
        """Part a text at its first mark; an end that may grow to one is held until more comes."""
        at, mark = min(((text.index(mark), mark) for mark in marks if mark in text),
                       default=(len(text), ""))
        if not mark and not last:
            at -= max((count for mark in marks for count in range(1, len(mark))
                       if text.endswith(mark[:count])), default=0)
            self._held += text[at:]
            return text[:at], "", ""
        return text[:at], mark, text[at + len(mark):]

    def _grow(self, kind, piece):
        """Return the events by which the block of a kind grows; blank thinking opens none."""
        if not piece or (kind == "thinking" and self._open != kind and not piece.strip()):
            return []
        events = []
        if self._open != kind:
            block = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            events = self._end()
            self.message["content"].append(dict(block))
            events.append(self._event("start", content_block=block))
            self._open = kind
        self._pieces.append(piece)
        return events + [self._event("delta", delta={"type": f"{kind}_delta", kind: piece})]

    def _event(self, name, **more):
        return {"type": f"content_block_{name}", "index": len(self.message["content"]) - 1, **more}

    def _end(self):
        if not self._open:
            return []
        self.message["content"][-1][self._open] = "".join(self._pieces)
        self._open, self._pieces = None, []
        return [self._event("stop")]

    def _add_call(self, call):
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or (self._one_call and self._calls):
            return []
        self._calls += 1
        given, wanted = call.get("id"), function.get("arguments")
        if not isinstance(given, str) or not given or given in self._taken:
            # Some templates number their calls from zero in every answer; the client joins by id.
            given = f"toolu_{self.message['id'][4:]}_{self._calls}"
        self._taken.add(given)
        if not isinstance(wanted, dict):
            wanted = isinstance(wanted, str) and _parse_object(wanted) or {}
        events = self._grow_text("", last=True) + self._end()
        block = {"type": "tool_use", "id": given, "name": name, "input": wanted}
        self.message["content"].append(block)
        return events + [
            self._event("start", content_block={**block, "input": {}}),
            self._event("delta", delta={"type": "input_json_delta",
                                        "partial_json": render_json(wanted).decode("ascii")}),
            self._event("stop")]

    def _finish(self, part):
        events = ([] if self._stopped else self._grow_text("", last=True)) + self._end()
        reason = "max_tokens" if part.get("done_reason") == "length" else "end_turn"
        reason = "stop_sequence" if self._stopped else "tool_use" if self._calls else reason
        delta = {"stop_reason": reason, "stop_sequence": self._stopped or None}
        counts = map(part.get, ("prompt_eval_count", "eval_count"))
        usage = {name: count if type(count) is int and count > 0 else 0
                 for name, count in zip(("input_tokens", "output_tokens"), counts)}
        self.message.update(delta, usage={**self.message["usage"], **usage})
        return events + [{"type": "message_delta", "delta": delta, "usage": usage},
                         {"type": "message_stop"}]


# == 11. Dialects =============================================================

def render_event(event):
    """Return an event as it goes down the stream."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode("ascii"), render_json(event))


def parse_messages_request(body):
    """Return a Messages request whose fields have the types that translation relies on."""
    if len(body) > PROMPT_MARKS < sum(map(body.count, (b"[", b"{", b":", b","))):
        raise ApiError(413, "body: far more in it than any prompt has")
    request = _parse_object(body)
    if request is None:
        raise ApiError(400, "body: expected a JSON object")
    for words, (types, names) in REQUEST_FIELDS.items():
        for name in names.split():
            value = request.get(name)
            if value is None and name not in ("model", "messages"):
                continue
            if type(value) not in types or ("number" in words and not abs(value) < 1e9):
                raise ApiError(400, f"{name}: expected {words}")
            if name == "max_tokens" and value < 1:
                raise ApiError(400, "max_tokens: must be at least 1")
    if not all(isinstance(text, str) for text in request.get("stop_sequences") or ()):
        raise ApiError(400, "stop_sequences: expected a list of texts")
    return request


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
    import glob
    import hmac
    import os
    import queue
    import resource
    import select
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
    (_thread, contextlib, errno, glob, hmac, os, queue, resource, select, shlex, shutil, signal,
     socket, ssl, stat, subprocess, time, traceback) = map(_Late, (
         "_thread contextlib errno glob hmac os queue resource select shlex shutil signal "
         "socket ssl stat subprocess time traceback").split())

_STATUS_LINE = _Pattern(r"HTTP/1\.[01] +([1-5][0-9][0-9])( .*)?")
_REQUEST_LINE = _Pattern(r"([A-Z]{1,16}) ([!-~]{1,4096}) HTTP/1\.([01])")
_FIELD_LINE = _Pattern(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t\x20-\x7e\x80-\xff]*)")
_CHUNK_LINE = _Pattern(r"0*([0-9A-Fa-f]{1,8})[ \t]*(;[\t\x20-\x7e\x80-\xff]*)?")
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
            size = self._read_chunk_size()
            while size:
                yield from self._take_chunk(size)
                size = self._read_chunk_size()
        elif coding != "identity" or not is_length:
            raise NodeFailure("bad answer", "nothing tells how long its answer is")
        elif self.status in (204, 304):
            return
        elif length is None:
            yield from self._take_rest()
        else:
            yield from self._take(int(length))

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

    def read_request(self, seconds: float) -> tuple[str, str, dict[str, str]] | None:
        """Return (method, target, headers), or None when the client has nothing more to say."""
        self.deadline = self._clock() + seconds
        with contextlib.suppress(NodeFailure):  # nothing was asked yet
            if not self._buffer:
                self._fill()
        if not self._buffer:
            return None

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

    def reply(self, status: int, body: bytes, *, head: str = "") -> None:
        """Send a whole JSON answer; `head` holds further header lines."""
        reason = "OK" if status == 200 else "Refused"
        if not self.stays:
            head += "Connection: close\r\n"
        lines = (f"HTTP/1.1 {status} {reason}\r\n{head}Content-Type: application/json\r\n"
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
    real = os.path.realpath(root)
    try:
        return os.path.commonpath([real, os.path.realpath(path)]) == real
    except ValueError:  # another drive
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


class World:
    """The disk, the network, the environment, the clock and the terminal."""

    def __init__(self) -> None:
        self.environ = dict(os.environ)
        self.clock: Callable[[], float] = time.monotonic
        self.now: Callable[[], float] = time.time
        self.sleep: Callable[[float], None] = time.sleep
        self.connect_seconds = CONNECT_SECONDS
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
        """Width to wrap tables at; 0 in a pipe, where nothing is wrapped."""
        if not self.is_terminal():
            return 0
        return shutil.get_terminal_size().columns or 80

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

    def path(self, *parts: str) -> str:
        """Return the parts as one path."""
        return os.path.join(*parts)

    def split(self, path: str) -> tuple[str, str]:
        """Return the directory and the name of a path."""
        return os.path.split(path)

    def parent(self, path: str) -> str:
        """Return the directory of a path."""
        return os.path.dirname(path) or "."

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
        """Return where a program lies on the PATH."""
        return shutil.which(name, path=self.environ.get("PATH"))

    def read_program(self, words: Sequence[str], until: float) -> str | None:
        """Return what a program prints; None when it is absent, fails or takes too long."""
        return self._read_program(words, self.environ, until)

    def read_git(self, words: Sequence[str], directory: str, until: float) -> str | None:
        """Return what git prints in a directory that may be anybody's: nothing it names is run."""
        # The machine's own settings stay in force (no GIT_CONFIG_NOSYSTEM): they are its owner's.
        argv = ["git", "-C", directory]
        for setting in GIT_SETTINGS:
            argv += ["-c", setting]
        return self._read_program([*argv, *words], {**self.environ, **GIT_ENVIRONMENT}, until)

    def _read_program(self, words: Sequence[str], environ: Mapping[str, str],
                      until: float) -> str | None:
        seconds = max(0.1, until - self.clock())
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            done = subprocess.run(words, check=True, timeout=seconds, env=environ,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.DEVNULL)
            return done.stdout.decode("utf-8", "replace")
        return None

    def run(self, argv: Sequence[str], environ: Mapping[str, str]) -> int:
        """Run a program on this terminal to its end; return its exit code as a shell has it."""
        children: list[subprocess.Popen[bytes]] = []
        requests_to_end = []

        def hand_on(*_: object) -> None:
            requests_to_end.append(True)  # it may come before there is a child
            for started in children:
                started.terminate()

        # Functions, not SIG_IGN, which the child would inherit. Ctrl-C reaches it anyway.
        with self._take_signals({signal.SIGINT: lambda *_: None, signal.SIGTERM: hand_on}):
            with Trying("run", argv[0], slug="cannot-run"):
                child = subprocess.Popen(argv, env=environ)
            children.append(child)
            if requests_to_end:
                child.terminate()
            code = child.wait()
        return code if code >= 0 else 128 - code

    def start(self, argv: Sequence[str], *, environ: Mapping[str, str], log: str) -> Child:
        """Start a program in the background, its output in a file."""
        self._end_by_interrupt()
        came: list[int] = []

        def note(number: int, _: object) -> None:
            came.append(number)  # raised in the middle of Popen it would lose the child

        with self._take_signals({signal.SIGINT: note, signal.SIGTERM: note}), \
                self._open_log(log) as stream, Trying("run", argv[0], slug="cannot-run"):
            child = Child(subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL,
                                           stdout=stream, stderr=stream))
        if came:
            child.stop()
            raise KeyboardInterrupt
        return child

    def _open_log(self, path: str) -> IO[bytes]:
        """Return a file that a child's output is added to; only its owner can read it."""
        place = _as_place(path)
        with Trying("write", place), Directory(place, place.above, makes=True) as directory:
            return open(directory.open_to_append(place.name), "ab", buffering=0)

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

def in_ollamas_words(failure: NodeFailure) -> NodeFailure:
    """Return a failure of the transport as what it means to who looks for Ollama there."""
    if failure.reason == "refused":
        return NodeFailure("refused", f"{failure.detail}; is Ollama running?", fix=failure.fix)
    if failure.reason == "not http":
        return NodeFailure("not ollama", failure.detail, fix=failure.fix)
    return failure


def _json_ask(endpoint: str, path: str, extract: Callable[[Any], Any],
              payload: object = None) -> Ask:
    """Return an Ask whose answer is JSON."""
    return Ask(path, lambda reply: extract(read_json(reply, endpoint + path)), payload)


def probe_nodes(world, nodes, seconds, models=()):
    """Return {name: NodeState}: every node asked at once, no answer awaited past `seconds`.

    The capabilities of the fleet's `models` are asked for; without any, those of all there are.
    """
    deadline = world.clock() + seconds
    wanted = {_full_model_name(models[name].ollama_model) for name in models}
    world.allow_files(4 * len(nodes) + 256)
    jobs = {name: lambda node=node: _probe_node(world, node, deadline=deadline, wanted=wanted)
            for name, node in nodes.items()}
    found = dict(run_together(world, jobs, until=deadline + PROBE_GRACE_SECONDS))
    late = f"no answer within {seconds:g} s"
    return {name: found.get(name) or NodeState(name, node.endpoint, "timeout", late)
            for name, node in nodes.items()}


def _probe_node(world, node, *, deadline, wanted):
    """Return the NodeState of one node: who it is, what it has, then the rest at once."""
    def ask(path, extract, payload=None):
        return world.ask(node.endpoint, _json_ask(node.endpoint, path, extract, payload),
                         deadline=deadline)

    began = world.clock()
    try:
        version = ask("/api/version", lambda value: _get(value, "version"))
        if not version:
            raise NodeFailure("not ollama", "/api/version does not answer as Ollama does")
        latency = round((world.clock() - began) * 1000, 1)
        models = ask("/api/tags", _parse_tags)
    except NodeFailure as failure:
        told = in_ollamas_words(failure)
        return NodeState(node.name, node.endpoint, told.reason, told.detail)
    names = [model.name for model in models if not wanted or _full_model_name(model.name) in wanted]
    # only /api/show knows for sure what a model can do
    jobs = {"": lambda: ask("/api/ps", _parse_loaded)}
    jobs.update({name: lambda name=name: ask("/api/show", _parse_show, {"model": name})
                 for name in names[:SHOW_LIMIT]})
    answers = run_together(world, jobs, until=deadline + PROBE_GRACE_SECONDS, threads=8)
    found = {key: value for key, value in answers if not isinstance(value, NodeFailure)}
    return NodeState(node.name, node.endpoint, "", "", version, latency,
                     tuple(replace(model, **found.get(model.name, {})) for model in models),
                     found.get("", ()))


def _get(value, key, kind=str):
    """Return a field of an answer; what is absent or of another type is empty, and 0 not below."""
    found = value.get(key) if isinstance(value, dict) else None
    return found if type(found) is kind and (kind is not int or found > 0) else kind()


def _entries(value, path):
    """Return the entries of a `models` list, each with its name; null is an empty list."""
    found = value.get("models", "") if isinstance(value, dict) else ""
    found = [] if found is None else found
    if not isinstance(found, list) or not all(_get(entry, "name") for entry in found):
        raise NodeFailure("bad answer", f"{path} holds no list of models")
    return sorted(found, key=lambda entry: entry["name"])  # Ollama's own order changes by ask


def _parse_tags(value):
    details = [(entry, _get(entry, "details", dict)) for entry in _entries(value, "/api/tags")]
    return tuple(NodeModel(
        entry["name"], _get(entry, "size", int), _get(told, "parameter_size"),
        _get(told, "quantization_level"), ("embedding",) if "bert" in _get(told, "family") else
        None, _get(told, "context_length", int) or None,
        _get(entry, "remote_host") or _get(entry, "remote_model")) for entry, told in details)


def _parse_show(value):
    """Return what /api/show adds to a model: what it can do and what it was trained for."""
    known = _get(value, "model_info", dict)
    length = _get(known, "general.architecture") + ".context_length"
    found = {"capabilities": tuple(word for word in _get(value, "capabilities", list)
                                   if isinstance(word, str)),
             "trained_context": _get(known, length, int)}
    return {key: told for key, told in found.items() if told}


def _parse_loaded(value):
    loaded = []
    for entry in _entries(value, "/api/ps"):
        size, share = _get(entry, "size", int), _get(entry, "size_vram", int)
        percent = min(100, round(100 * share / size)) if size and "size_vram" in entry else None
        loaded.append(LoadedModel(entry["name"], _get(entry, "context_length", int), percent, size,
                                  _get(entry, "expires_at")))
    return tuple(loaded)


class Warmth(SimpleNamespace):
    """One `model` on one `node`: what is done with it now, and how that ended."""

    stage = "waiting"  # loading, unloading, pulling, done
    began = seconds = 0.0
    pulled = size = 0  # bytes of a download
    ok, detail, fix, loaded = True, "", "", None


def warm_nodes(world, groups, options):
    """Run the Warmths of each node, nodes in parallel; yield as `run_together` does."""
    def warm(group):
        for step in (_load, _see_loaded):  # only at the end it shows what is in memory together
            for warmth in (warmth for warmth in group.values() if warmth.ok):
                warmth.began = world.clock()
                try:
                    step(warmth, world, options)
                except NodeFailure as error:
                    failure = in_ollamas_words(error)
                    warmth.ok, warmth.detail = False, failure.detail or failure.reason
                    warmth.fix = failure.fix or REASON_FIXES.get(failure.reason, "")
                warmth.stage = "done"
                warmth.seconds += world.clock() - warmth.began

    return run_together(world, {name: lambda group=group: warm(group)
                                for name, group in groups.items()})


def _load(warmth, world, options):
    """Load or unload a model by an empty chat; where that is refused, with three words."""
    model, seconds = warmth.model, options.timeout or warmth.model.timeout
    if model.cloud:
        warmth.detail = "runs at ollama.com, nothing to load"
        return
    # With another num_ctx than the route's, the route's first request would load it again.
    payload = {"model": model.ollama_model, "messages": [], "stream": False,
               "think": model.thinking, "keep_alive": 0 if options.unload else model.keep_alive,
               "options": {"num_ctx": model.context}}
    may_pull = options.pull
    while True:
        warmth.stage = "unloading" if options.unload else "loading"
        try:
            endpoint = warmth.node.endpoint
            said = world.ask(endpoint, _json_ask(endpoint, "/api/chat", _check_error, payload),
                             deadline=world.clock() + seconds)
            if not _get(said, "done", bool):
                raise NodeFailure("bad answer", "its answer to a load is not Ollama's")
            return
        except NodeFailure as failure:
            is_missing = failure.reason == "http 404"
            if is_missing and options.unload:
                warmth.detail = "not there"
                return
            if is_missing and may_pull:
                may_pull = False
                _pull(warmth, world)
            elif failure.reason == "http 400" and not payload["messages"]:
                payload["messages"].append({"role": "user", "content": "Reply with ok."})
                payload["options"]["num_predict"] = 16
            else:
                if is_missing:
                    failure.fix = f"`ollama pull {model.ollama_model}` on {warmth.node.name}, or " \
                                  "`subagent-fleet warmup --pull`"
                if failure.reason == "timeout":
                    failure.detail = f"not {warmth.stage[:-3]}ed within {seconds:g} s"
                    failure.fix = "look at Ollama's log there, or give it longer: --timeout 900"
                raise


def _pull(warmth, world):
    """Have the node download the model: only `success` counts, errors come under 200 too."""
    warmth.stage, layers, said = "pulling", {}, {}
    body = json.dumps({"model": warmth.model.ollama_model}).encode()
    with contextlib.closing(world.open_exchange(
            warmth.node.endpoint + "/api/pull", body=body,
            deadline=world.clock() + PULL_STALL_SECONDS)) as exchange:
        exchange.read_head()
        for line in exchange.lines():
            exchange.deadline = world.clock() + PULL_STALL_SECONDS
            said = _check_error(parse_answer(line))
            if _get(said, "total", int):
                layers[_get(said, "digest")] = _get(said, "completed", int), said["total"]
                warmth.pulled, warmth.size = map(sum, zip(*layers.values()))
    if _get(said, "status") != "success":
        raise NodeFailure("bad answer", "the download ended without `success`")


def _see_loaded(warmth, world, options):
    """Hold what the node says is loaded against what was wanted."""
    model, wanted = warmth.model, warmth.model.context
    if model.cloud or options.unload or model.keep_alive == 0:
        return
    endpoint = warmth.node.endpoint
    loaded = world.ask(endpoint, _json_ask(endpoint, "/api/ps", _parse_loaded),
                       deadline=world.clock() + PROBE_TIMEOUT_SECONDS)
    found = find_models(loaded, model.ollama_model)
    warmth.loaded = min(found, key=lambda one: one.context != wanted, default=None)
    if not found:
        raise NodeFailure("not loaded", "Ollama loaded it, but /api/ps shows only "
                          + (some_of([one.name for one in loaded], 5) or "an empty list"),
                          fix="move it to another node, or write a smaller `context:`")
    context = warmth.loaded.context
    if context not in (0, wanted):
        raise NodeFailure("context", f"loaded with context {context}, not {wanted}",
                          fix=f"write `context: {context}` in models.{model.name}")


def _check_error(value):
    """Return an answer; refuse an error, which Ollama also sends under HTTP 200."""
    if isinstance(value, dict) and "error" in value:
        raise NodeFailure("error", error_text(value["error"]))
    return value


# == 15. Gateway ==============================================================

QUIET_SECONDS = 10.0  # a stream that waited so long gets its headers, then a ping as often
REST_SECONDS, REST_LIMIT_SECONDS = 2.0, 60.0
REQUEST_SECONDS = 10.0  # for the headers; also how long an idle connection is kept
BODY_SECONDS = 120.0
BODY_LIMIT_BYTES = 64 * 1024 * 1024
CONNECTION_LIMIT = 256
CONVERSATION_LIMIT = 4096
GRACE_SECONDS = 10.0
LITELLM_START_SECONDS = 90.0
TOTALS = ("requests", "input_tokens", "output_tokens", "waited_seconds", "failures")


class Scheduler:
    """Who may ask which node when: slots, one line, rests. Pure but for a lock and a clock."""

    # A node, or one model on it, rests after a failure; one request, the probe, may end it.
    def __init__(self, fleet, clock):
        self._lock, self._clock = threading.RLock(), clock
        models, chains = list(fleet.models.values()), plan_fallbacks(fleet)
        self.tiers = {first.alias: [[model for model in models if model.alias == alias]
                                    for alias in (first.alias, *chains.get(first.alias, ()))]
                      for first in models}
        self.places, shared = {}, {}  # by model; two that are one Ollama model on a node share it
        for model in models:
            place = self.places[model.name] = shared.setdefault(
                (model.node, _full_model_name(model.ollama_model)),
                SimpleNamespace(node=model.node, slots=1, running=0, used=0,
                                rest=SimpleNamespace(until=0, probe=None)))
            place.slots = max(place.slots, model.max_parallel)
        self._busy = dict.fromkeys(fleet.nodes, 0)
        self._line, self._last, self._number = {}, {}, 0

    def enter(self, alias, conversation):
        """Return a place in the line for an alias and, once it has a `model`, on its node."""
        with self._lock:
            self._number += 1
            ticket = self._line[self._number] = SimpleNamespace(
                number=self._number, conversation=conversation, model=None, wake=lambda: None,
                tiers=self.tiers[alias])  # who can still be asked
            self.serve_line()
        return ticket

    def leave(self, ticket):
        """Give up the wait or the slot; nothing is said about the node."""
        with self._lock:
            self._line.pop(ticket.number, None)
            self._release(ticket)
            self.serve_line()

    def succeed(self, ticket):
        """Note that the node answered: its rest ends and the conversation will prefer it."""
        with self._lock:
            ended = self.places[ticket.model.name].rest  # which the node's other models may share
            ended.until, ended.probe = 0, None
            self._last[ticket.conversation] = ticket.model.name
            if len(self._last) > CONVERSATION_LIMIT:
                del self._last[next(iter(self._last))]
            self.serve_line()

    def fail(self, ticket, *, is_missing=False):
        """Let the node, or only the model that it lacks, rest; line up for another."""
        with self._lock:
            failed = self.places[ticket.model.name]
            seconds = REST_SECONDS if failed.rest.probe is not ticket else \
                min(failed.rest.seconds * 2, REST_LIMIT_SECONDS)
            rest = SimpleNamespace(until=self._clock() + seconds, seconds=seconds, probe=None)
            for place in [failed] if is_missing else self.places.values():
                if place.node == failed.node:
                    place.rest = rest
            ticket.tiers = [[model for model in tier if model is not ticket.model]
                            for tier in ticket.tiers]
            self._release(ticket)
            if any(ticket.tiers):
                self._line[ticket.number] = ticket
            self.serve_line()

    def show(self):
        """Return what is true of each model's place, and how many wait."""
        with self._lock:
            now = self._clock()
            return {name: {"running": place.running, "slots": place.slots,
                           "rests_seconds": round(max(place.rest.until - now, 0), 1)}
                    for name, place in self.places.items()}, len(self._line)

    def _release(self, ticket):
        if ticket.model:
            place = self.places[ticket.model.name]
            place.running -= 1
            self._busy[place.node] -= 1
            if place.rest.probe is ticket:
                place.rest.probe = None
            ticket.model = None

    def serve_line(self):
        """Give what is free to who waits, in order; a rest may have ended by itself."""
        with self._lock:
            for number, ticket in sorted(self._line.items()):
                ticket.model = self._choose(ticket)
                if ticket.model:
                    del self._line[number]
                    place = self.places[ticket.model.name]
                    place.running, place.used = place.running + 1, number
                    self._busy[place.node] += 1
                    if place.rest.until:
                        place.rest.probe = ticket
                    ticket.wake()

    def _choose(self, ticket):
        """Return the model to ask, None to wait."""
        now, rest, asleep = self._clock(), self._rest_of, []
        for tier in ticket.tiers:
            awake = [model for model in tier if rest(model).until <= now and not rest(model).probe]
            if awake:
                knows = self._last.get(ticket.conversation)
                # The least busy node, then the one that knows the prompt, then the longest idle.
                return min(filter(self._has_room, awake), default=None, key=lambda model: (
                    self._busy[model.node], model.name != knows, self.places[model.name].used))
            asleep += tier
        # Everyone rests: to try is better than to refuse, one request at a time.
        free = [model for model in asleep if self._has_room(model) and not rest(model).probe]
        return min(free, default=None, key=lambda model: rest(model).until)

    def _rest_of(self, model):
        return self.places[model.name].rest

    def _has_room(self, model):
        return self.places[model.name].running < self.places[model.name].slots


class Service:
    """One Messages request, from its body to the last byte of its answer."""

    def __init__(self, server, visitor, request, conversation):
        self._server, self._world, self._visitor = server, server.world, visitor
        self._request, self._conversation = request, conversation
        self._is_stream = request.get("stream") is True
        self._id, self._began = self._world.token(12), self._world.clock()
        self._id_header = f"request-id: req_{self._id}\r\n"
        self._ping_at = self._began + (QUIET_SECONDS if self._is_stream else float("inf"))
        self._has_headers, self._has_content = False, False
        self._model, self._tries, self._outcome = None, [], "error"
        self._seconds = dict.fromkeys(("waited", "first_byte", "total"))

    def run(self):
        """Answer the request; the receipt is written however it ends."""
        scheduler, alias = self._server.scheduler, self._request["model"]
        self._prepare(scheduler.tiers[alias][0][0])  # refused before it waits
        ticket = scheduler.enter(alias, self._conversation)
        try:
            while not self._attempt(ticket):
                pass
            if self._is_stream:
                self._flush(last=True)
            else:
                self._visitor.reply(200, render_json(self._answer.message), head=self._id_header)
            self._outcome = "ok"
        except ClientGone:
            self._outcome = "stopped" if self._server.stops else "left"
            raise
        except ApiError as error:
            self._outcome = error.kind
            if self._has_headers:  # there is no HTTP status left to give
                self._out += render_event(error.event)
                self._flush(last=True)
            else:
                self._visitor.reply(error.http, render_json(error.event), head=self._id_header)
        finally:
            scheduler.leave(ticket)
            self._mark("total")
            model, usage = self._model, self._answer.message["usage"]
            session, agent = self._conversation
            self._server.file_receipt({  # no prompt, no answer, no words of a node
                "time": round(self._world.now(), 3), "id": f"req_{self._id}", "session": session,
                "agent": agent, "alias": alias, "model": model and model.name,
                "node": model and model.node, "context": model and model.context,
                "tries": self._tries, **self._seconds, "input_tokens": usage["input_tokens"],
                "output_tokens": usage["output_tokens"], "outcome": self._outcome})

    def _prepare(self, model):
        self._out, server = bytearray(), self._server
        self._answer = Answer(f"msg_{self._id}", self._request, model, server.ratios[model.name],
                              blind=model.name in server.blind)
        # Tokens are known only at the end.
        self._opening = render_event({"type": "message_start", "message": self._answer.message})

    def _mark(self, name):
        if self._seconds[name] is None:
            self._seconds[name] = round(self._world.clock() - self._began, 3)

    def _attempt(self, ticket):
        """Wait in line, ask the next model; False when another should be asked."""
        while not ticket.model:
            with contextlib.closing(Signal()) as granted:
                ticket.wake = granted.set  # and only then, whether it came before
                if not ticket.model and not self._wait(granted, self._world.clock() + REST_SECONDS):
                    self._server.scheduler.serve_line()
        self._mark("waited")
        self._model = ticket.model
        try:
            self._ask(ticket)
            return True
        except ApiError as error:
            if self._answer.has_images and re.search(_NO_IMAGES, error.what):
                self._server.blind.add(self._model.name)
                self._prepare(self._model)
                return False  # it is asked again, without them
            if error.http == 400:
                raise
            why, problem = error.kind, error
        except NodeFailure as failure:
            why, node = in_ollamas_words(failure).reason, self._model.node
            problem = ApiError(500, f"node {node}: {why}, in mid answer") \
                if self._has_content else ApiError(529, f"node {node}: {why}; no other is left")
        self._tries.append({"node": self._model.node, "why": why})
        self._server.scheduler.fail(ticket, is_missing=problem.http == 404)
        if self._has_content or not any(ticket.tiers):
            raise problem
        self._prepare(self._model)  # in line, nothing of what failed is sent
        return False

    def _ask(self, ticket):
        """Send the request to the model's node and its answer to the client."""
        model, world, size = ticket.model, self._world, 0
        if model is not self._answer.model:
            self._prepare(model)
        answer = self._answer
        url = self._server.fleet.nodes[model.node].endpoint + "/api/chat"
        exchange = world.open_exchange(url, body=answer.body,
                                       deadline=world.clock() + model.timeout)
        try:
            exchange.before_read = lambda: self._wait(exchange, exchange.deadline)
            exchange.read_head()
            if exchange.status != 200:
                said = Reply(exchange.status, exchange.headers, exchange.read_all())
                raise answer.refusal(exchange.status, _error_words(said))
            for line in exchange.lines():
                self._mark("first_byte")
                events = answer.feed(line)
                if events and self._is_stream:
                    self._out += b"".join(map(render_event, events))
                    if len(self._out) > HEADER_LIMIT_BYTES:
                        self._flush()
                if not size:  # it talks: its rest ends now, the last word may be minutes away
                    self._server.scheduler.succeed(ticket)
                size += len(line)
                if size > 1_000_000 + 1_000 * model.max_output:
                    raise NodeFailure("bad answer", "it does not end")
                if answer.message["stop_reason"]:
                    if not answer.message["stop_sequence"]:
                        exchange.close()  # the node has said all
                    tokens = answer.message["usage"]["input_tokens"]
                    # Who counts only uncached tokens teaches nothing.
                    if tokens and 0.5 <= answer.weight / tokens <= 16:
                        self._server.ratios[model.name] = answer.weight / tokens
                    return
                exchange.deadline = world.clock() + model.timeout
            raise NodeFailure("bad answer", "it ended before it was done")
        finally:
            exchange.leave()

    def _flush(self, *, last=False):
        """Send what has gathered; the first time with the headers and the opening event."""
        chunk, self._out, head = bytes(self._out), bytearray(), ""
        self._has_content = bool(self._answer.message["content"])
        if not self._has_headers:
            self._has_headers = True
            head = ("Content-Type: text/event-stream; charset=utf-8\r\n"
                    f"Cache-Control: no-cache\r\n{self._id_header}")
            chunk = self._opening + chunk
        self._visitor.stream(chunk, head=head, last=last)
        self._ping_at = self._world.clock() + QUIET_SECONDS

    def _wait(self, readable, until):
        """Wait while the client stays; pings keep it from giving up."""
        if self._out:
            self._flush()
        while not self._visitor.wait(readable, min(until, self._ping_at) - self._world.clock()):
            if self._world.clock() >= until:
                return False
            self._out += render_event({"type": "ping"})
            self._flush()
        return True


class Server:
    """The gateway: connections, the closed door, routes, receipts."""

    def __init__(self, fleet, key, world, *, receipts=""):
        self.fleet, self.world, self._key = fleet, world, key.encode("utf-8")
        self.scheduler = Scheduler(fleet, world.clock)
        self._receipts, self._warned, self.log = receipts, False, lambda line: None
        self._lock, self._wake, self.stops = threading.Lock(), Signal(), []
        self._visitors, name = {}, world.own_names()[0]  # visitor: is it being answered?
        # A web page can make a name of its own point here, so only names of this machine count.
        self._names = {own.lower() for own in (show_host(fleet.gateway.host), "localhost",
                                               "127.0.0.1", "[::1]", name, f"{name}.local")}
        self.ratios, self.blind = dict.fromkeys(fleet.models, BYTES_A_TOKEN), set()  # learned
        self.totals = {name: dict.fromkeys(TOTALS, 0) for name in fleet.nodes}
        models = [{"type": "model", "id": alias, "display_name": alias,
                   "created_at": "1970-01-01T00:00:00Z"} for alias in self.scheduler.tiers]
        self._pages = {"/": {"name": "subagent-fleet", "version": __version__},
                       "/health/liveliness": "I'm alive!",
                       "/v1/models": {"data": models, "has_more": False,
                                      "first_id": models[0]["id"], "last_id": models[-1]["id"]},
                       **{f"/v1/models/{model['id']}": model for model in models}}

    def stop(self, name):
        """Take nothing new; a second time, end at once. Safe in a signal handler."""
        self.stops.append(name)
        self._wake.set()

    def run(self, listener):
        """Serve until `stop`, then let what is being answered end; None waits for the port."""
        while not listener and not self.stops:  # it is another `up`'s, which may end before this
            self.world.sleep(TICK_SECONDS)
            with contextlib.suppress(FleetError):
                listener = self.world.listen(self.fleet.gateway.host, self.fleet.gateway.port)
        while not self.stops:
            if len(self._visitors) >= CONNECTION_LIMIT:
                self.world.sleep(TICK_SECONDS)  # who comes now waits to be accepted
            elif visitor := listener.accept(self._wake, 1.0):
                self._visitors[visitor] = False
                threading.Thread(target=self._serve, args=(visitor,), daemon=True).start()
        if listener:
            listener.close()
        until = self.world.clock() + GRACE_SECONDS
        while self._visitors and self.world.clock() < until + 0.5:
            until = min(until, self.world.clock()) if len(self.stops) > 1 else until
            for visitor, is_answered in list(self._visitors.items()):
                if not is_answered or self.world.clock() >= until:
                    visitor.cut()  # its thread leaves the node and files the receipt
            self.world.sleep(0.02)
        self._wake.close()

    def _serve(self, visitor):
        """Answer one request after the other on a connection."""
        problem = None
        try:
            try:
                while visitor.stays and not self.stops \
                        and (asked := visitor.read_request(REQUEST_SECONDS)):
                    self._visitors[visitor] = True
                    self._respond(visitor, *asked)
                    self._visitors[visitor] = False
            except ApiError as error:
                problem = error
            except BadRequest as error:
                problem = ApiError(error.status, error.what)
            except Exception as error:  # a bug; its message may quote a prompt, its place does not
                place = traceback.extract_tb(error.__traceback__)[-1]
                self.world.err(f"error: {type(error).__name__} in {place.name}, line {place.lineno}"
                               f"; this is a bug, please report it at {HOME_URL}/issues\n")
                problem = ApiError(500, "a bug in the gateway")
            if problem:  # the body may not have been read, so the connection ends with it
                self.log(f"refused: {problem.http}, {clean_line(problem.what)}\n")
                visitor.stays = False
                visitor.reply(problem.http, render_json(problem.event))
        except ClientGone:
            pass
        finally:
            visitor.part()
            del self._visitors[visitor]

    def _respond(self, visitor, method, target, headers):
        """Answer one request, or raise what it is refused with."""
        from urllib.parse import unquote
        path = target.partition("?")[0]
        self._check_door(visitor.reached, headers, path)
        if method == "POST" and path in ("/v1/messages", "/v1/messages/count_tokens"):
            request = parse_messages_request(visitor.read_body(BODY_LIMIT_BYTES, BODY_SECONDS))
            if request["model"] not in self.scheduler.tiers:
                told = re.sub(r"(?s).*[^\w.:/@[\]-].*", "…", request["model"][:128])  # it is logged
                raise ApiError(404, f"model: this fleet has no `{told}`; it has "
                               + ", ".join(f"`{alias}`" for alias in self.scheduler.tiers))
            if path == "/v1/messages":
                given = (headers.get(f"x-claude-code-{of}-id", "") for of in ("session", "agent"))
                conversation = tuple(one if re.fullmatch("[A-Za-z0-9_.-]{1,64}", one) else ""
                                     for one in given)
                Service(self, visitor, request, conversation).run()
                return
            model = self.scheduler.tiers[request["model"]][0][0]
            page = {"input_tokens": Answer("", request, model, self.ratios[model.name]).estimate}
        else:
            page = self.show() if path == "/fleet" else self._pages.get(unquote(path))
            if page is None or method not in ("GET", "HEAD"):
                raise ApiError(404, "there is nothing at this path")
            visitor.read_body(HEADER_LIMIT_BYTES, REQUEST_SECONDS)
        visitor.reply(200, render_json(page))

    def _check_door(self, reached, headers, path):
        """Refuse who has no key, and who a web page may have sent; both take the same time."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        fits = [hmac.compare_digest(key.encode("latin-1"), self._key) for key in given]
        # IPv4 on a socket of both families, and an IPv6 zone, are not part of an address.
        address, port = re.sub(r"^::ffff:(?=.*\.)|%.*", "", reached[0]), reached[1]
        host, own = headers.get("host", "").lower(), {*self._names, show_host(address)}
        if not {f"{name}:{port}" for name in own} & {host, f"{host}:80"} or "origin" in headers:
            raise ApiError(403, "only programs that name this gateway's own address are served: "
                           f"http://{show_host(address)}:{port}")
        if not any(fits) and path not in ("/", "/health/liveliness"):
            raise ApiError(401, "the key is missing or wrong; send it as `Authorization: Bearer "
                           "KEY` or `x-api-key: KEY`")

    def show(self):
        """Return nodes, slots, the line and totals as plain values."""
        places, waiting = self.scheduler.show()
        models = [{"name": model.name, "node": model.node, "alias": model.alias,
                   "ollama_model": model.ollama_model, "context": model.context,
                   **places[model.name]} for model in self.fleet.models.values()]
        nodes = [{"name": node.name, "endpoint": node.endpoint, **self.totals[node.name]}
                 for node in self.fleet.nodes.values()]
        return {"schema": "subagent-fleet/fleet/1", "fleet": self.fleet.name, "waiting": waiting,
                "config": fleet_digest(self.fleet), "nodes": nodes, "models": models}

    def file_receipt(self, receipt):
        """Count, log and keep what a request came to."""
        with self._lock:
            for tried in receipt["tries"]:
                self.totals[tried["node"]]["failures"] += 1
            if receipt["node"]:
                total = self.totals[receipt["node"]]
                counts = {**receipt, "requests": 1, "waited_seconds": receipt["waited"]}
                for name in set(TOTALS) - {"failures"}:
                    total[name] = round(total[name] + counts[name], 3)
            try:
                if self._receipts:
                    self.world.append_line(self._receipts, render_json(receipt) + b"\n")
                self._warned = False
            except FleetError as error:  # the next one is tried anew: a full disk may be emptied
                if not self._warned:
                    self.world.err("warning: no receipts from here on, until this is mended: "
                                   f"{error.what}\n")
                self._warned = True
        where = f"{receipt['model']}@{receipt['node']}" if receipt["node"] else "nowhere"
        tries = "".join(f", {tried['node']}: {tried['why']}" for tried in receipt["tries"])
        self.log(f"{receipt['agent'] or 'main'} {receipt['alias']} -> {where} "
                 f"{receipt['outcome']} in {receipt['total']:.2f} s (waited "
                 f"{receipt['waited'] or 0:.2f}, first byte {receipt['first_byte'] or 0:.2f}), "
                 f"{receipt['input_tokens']} tokens in, {receipt['output_tokens']} out{tries}\n")


# =============================================================================
# G. Commands
# =============================================================================

# == 16. Workspace ============================================================

def load_config(options, world):
    """Return (Fleet, warnings) of the chosen config; any error refuses it, all of them at once."""
    path = find_config(options, world)
    source, found = "<stdin>" if path == "-" else path, world.read_bytes(path)
    try:
        fleet, findings = check_fleet(Document(found.decode("utf-8"), source))
    except UnicodeDecodeError as error:
        line = found.count(b"\n", 0, error.start) + 1
        what = "UTF-16, not UTF-8 text" if found[:2] in (b"\xff\xfe", b"\xfe\xff") else \
            f"line {line}: byte 0x{found[error.start]:02x} is not UTF-8 text"
        raise FleetError("not-utf8", what, where=source, fix="save it as UTF-8") from None
    except FleetError as error:
        fleet, findings = None, [error.finding]
    if fleet is None:
        raise FleetError("invalid-config", f"{source} is not valid", where=source,
                         findings=findings)
    return fleet, list(lint_fleet(fleet))


def load_fleet(path):
    """Return the Fleet of a file; for people who import this module."""
    return load_config(SimpleNamespace(config=str(path)), World())[0]


def find_config(options, world):
    """Return --config, else the variable, else the nearest fleet file up to the git root."""
    given = world.environ.get(CONFIG_VARIABLE) or None if options.config is None else options.config
    if given is not None:
        return given
    directory, shown = world.directory, ""
    while True:
        for name in CONFIG_NAMES:
            if world.kind_of(world.path(directory, name)) != "absent":
                return world.path(shown, name)
        above = world.parent(directory)
        if above == directory or world.kind_of(world.path(directory, ".git")) != "absent":
            raise FleetError("no-config", "no fleet.yaml here or above, up to the git root",
                             fix="subagent-fleet init")
        directory, shown = above, world.path(shown, "..")


def find_output(options, world):
    """Return where the generated files are: --out, else beside the fleet file that was found."""
    out = getattr(options, "out", None)
    if not (out or options.config or world.environ.get(CONFIG_VARIABLE)):
        with contextlib.suppress(FleetError):
            return world.parent(find_config(options, world))
    return out or "."


def read_file(world, out, path):
    """Return a file's bytes, None if it is absent; what is no file inside `out` is refused."""
    place = world.enter(out, path)
    return world.read_bytes(place) if world.kind_of(place) == "file" else None


def kept_key(world, fleet, out):
    """Return the key that the environment file keeps, or an empty string."""
    text = (read_file(world, out, ENVIRONMENT_FILE) or b"").decode("utf-8", "replace")
    found = re.search(  # as it was generated, or as a person writes it
        r'(?m)^export (\w+)="\$\{\1:-([A-Za-z0-9_-]{1,200})\}"$|'
        rf'^(?:export )?{fleet.gateway.master_key_env}=(["\']?)([\w.:/+=@%-]+)\3[ \t]*$', text)
    return found[2] or found[4] if found else ""


def read_key(world, fleet, out):
    """Return the gateway's key: the environment's, else the generated one."""
    key = world.environ.get(fleet.gateway.master_key_env) or kept_key(world, fleet, out)
    if not key:
        path = world.path(out, ENVIRONMENT_FILE)
        is_there = world.kind_of(path) != "absent"
        raise FleetError("no-key", f"no key: ${fleet.gateway.master_key_env} is not set, and {path}"
                         f" {'holds no line that sets it' if is_there else 'is not there'}",
                         fix="subagent-fleet generate" + " --force" * is_there)
    return key


def compare_output(world, out, fleet, targets=TARGETS):
    """Return the Changes that shall be made to the files there; without a fleet, all go."""
    known = parse_manifest(read_file(world, out, MANIFEST_FILE))
    if known is None:
        world.err(format_finding(Finding("manifest-broken", "warning", f"{MANIFEST_FILE} cannot be "
                                         "read; files that differ count as yours")))
        known = {}
    wanted = render_files(fleet, kept_key(world, fleet, out) or f"sk-{world.token(32)}") \
        if fleet else {}
    found = {path: read_file(world, out, path) for path in (*wanted, *known)
             if target_of(path) in targets}
    return [Change(path, content, wanted.get(path), digest(content) in known.get(path, ""))
            for path, content in found.items()]


def write_changes(world, out, changes):
    """Make the changes; a run that is cut off leaves a manifest that knows its files."""
    known = parse_manifest(read_file(world, out, MANIFEST_FILE)) or {}
    new = [c for c in changes if c.action != "unchanged" and c.wanted is not None]
    noted = {**known, **{c.path: f"{known.get(c.path, '')} {digest(c.wanted)}" for c in new}}
    files = [(f"{STATE_DIRECTORY}/backup/{c.path}.{digest(c.found)[:12]}", c.found, 0o600)
             for c in changes if c.action == "edited"]
    files.append((MANIFEST_FILE, render_manifest(noted), 0o644))
    files += [(c.path, c.wanted, 0o600 if c.path == ENVIRONMENT_FILE else 0o644) for c in new]
    if len(files) > 1:
        world.replace_files([(world.enter(out, path), *rest) for path, *rest in files])
    written = {**known, **{c.path: digest(c.wanted) for c in changes}}
    for gone in (c.path for c in changes if c.wanted is None):
        world.remove(world.enter(out, gone))
        del written[gone]
    if written != noted:
        world.replace_files([(world.enter(out, MANIFEST_FILE), render_manifest(written), 0o644)])
    world.make_private(world.enter(out, ENVIRONMENT_FILE))


def find_settings(world):
    """Return {path: what it sets under `env`} of the settings files Claude Code reads here."""
    home = world.environ.get("HOME") or world.environ.get("USERPROFILE", "")
    user = world.environ.get("CLAUDE_CONFIG_DIR") or world.path(home, ".claude")
    managed = ("/Library/Application Support/ClaudeCode", "/etc/claude-code",
               "C:\\Program Files\\ClaudeCode")  # two of these are nowhere
    found = {}
    for path in (*(f"{place}/managed-settings.json" for place in managed),
                 world.path(user, "settings.json"), ".claude/settings.json",
                 ".claude/settings.local.json"):
        # else it is absent, or Claude Code ignores it as well
        with contextlib.suppress(FleetError, KeyError, TypeError, ValueError, RecursionError):
            found[path] = dict(json.loads(world.read_bytes(path))["env"])
    return found


def observe_files(world, fleet, out):
    """Return the Facts about the generated files; where they cannot be read, that is a problem."""
    try:
        changes = compare_output(world, out, fleet)
        path = world.enter(out, ENVIRONMENT_FILE)
        if world.kind_of(path) != "absent":
            read_key(world, fleet, out)
    except FleetError as error:
        return {"file_problems": (error.finding,)}
    printed = world.read_git(["ls-files", "-t", "--cached", "--others", "--exclude-standard", "--",
                              ENVIRONMENT_FILE], world.parent(path), world.clock() + 1.0)
    leaks = ["env-readable"] * world.others_may_read(path)
    leaks += ["env-unignored" if printed[0] == "?" else "env-tracked"] if printed else []
    return {"changes": changes, "env_path": path, "leaks": leaks}


# == 17. Commands =============================================================

@dataclass(frozen=True)
class Flag:
    """A flag or, without dashes, a positional word; `more` is in argparse's own words."""

    name: str
    note: str
    metavar: str = ""  # without one it is on or off
    more: dict = field(default_factory=dict)
    short: str = ""


@dataclass(frozen=True)
class Command:
    """A command: what runs, what it says of itself, what it takes, how it is typed."""

    name: str
    run: object
    summary: str
    flags: tuple
    examples: tuple = ()
    passes: str = ""  # what may follow `--` and goes to another program


def seconds_above_zero(text):
    """Return a number of seconds that can be waited, a day at most."""
    number = float(text) if re.fullmatch(r"\d+\.?\d*|\.\d+", text) else 0
    if not 0 < number <= 86400:
        raise argparse.ArgumentTypeError(f"expected seconds, above 0, at most 86400, not `{text}`")
    return number


CONFIG = Flag("--config", "the fleet file, `-` for stdin; else the nearest fleet.yaml", "FILE")
JSON = Flag("--json", "print one JSON object")
OUT = Flag("--out", "where generated files are; else here (--config) or beside fleet.yaml", "DIR")
FORCE = Flag("--force", "overwrite what is there")
SECONDS, REPEAT = {"type": seconds_above_zero}, {"action": "append", "default": []}
TIMEOUT = Flag("--timeout", "seconds to wait", "S", {**SECONDS, "default": PROBE_TIMEOUT_SECONDS})


def check_names(kind, names, known, owner):
    """Refuse names of a command that its owner does not have."""
    for name in names:
        if name not in known:
            raise FleetError(f"unknown-{kind}", f"{owner}: unknown {kind} `{name}`",
                             status=EXIT_USAGE, fix=nearest(name, known)
                             or f"known {kind}s: {some_of(known) or 'none'}")


def tell_findings(world, findings):
    """Show findings; one that is an error refuses the command."""
    for finding in findings:
        if finding.level == "error":
            raise FleetError(finding.slug, finding.what, fix=finding.fix, status=EXIT_REFUSED)
        world.err(format_finding(finding))


def refusal(paths, command, done):
    """Return the error for files that are the user's."""
    return FleetError("edited", f"{some_of(paths, 5)}: not as this program wrote it; {done}",
                      fix=f"move it away, or `subagent-fleet {command} --force` (what is there is "
                      f"copied to {STATE_DIRECTORY}/backup first)", status=EXIT_REFUSED)


def cmd_up(options, world):
    """Do the whole job: find, generate, warm, serve, run Claude Code, say what was served."""
    world.out = world.err  # standard output is Claude Code's
    try:
        path = find_config(options, world)
    except FleetError:
        path = CONFIG_NAMES[0]
        world.err(write_starter(world, path, {}, placeholders=False))
    if path == "-":
        raise FleetError("usage", "up: reads the config more than once, so it must be in a file",
                         status=EXIT_USAGE, fix="subagent-fleet up --config fleet.yaml")
    fleet, findings = load_config(options, world)
    tell_findings(world, [*findings, *lint_key(fleet, world.environ)])
    out, typed = find_output(options, world), [f"--config={options.config}"] * bool(options.config)
    changes = compare_output(world, out, fleet)
    write_changes(world, out, [change for change in changes if change.action != "edited"])
    words = {"edited": "kept, as it is yours"}
    world.err("".join(f"{clean_line(change.path)}: {words.get(change.action, change.action)}\n"
                      for change in changes if change.action != "unchanged"))
    names, status = [], EXIT_OK
    with contextlib.ExitStack() as stops:
        start_gateway(fleet, world, out, stops)  # what it refuses is told before models load
        if run_words(["warmup", *typed], world):
            states = probe_nodes(world, fleet.nodes, PROBE_TIMEOUT_SECONDS, fleet.models)
            routes = {name: plan_route_state(fleet, states, model)
                      for name, model in fleet.models.items()}
            main, what = plan_tiers(fleet)["main"], ""
            if all(route.state != "ready" for route in routes.values()):
                what = "no model of this fleet could be loaded"
            elif routes[main].state not in ("ready", "cold") and not routes[main].fallback:
                what = f"nobody can answer for {main}, the main session's model: {routes[main]}"
            if what:
                raise FleetError("nothing-ready", what, fix="subagent-fleet doctor")
            world.err("Going on with what is ready.\n")
        typed += [f"--out={options.out}"] * bool(options.out)
        before = ask_gateway(fleet, world, out)
        if world.which("claude"):
            status = run_words(["launch", "claude", *typed, "--", *options.passed], world)
        else:
            world.on_stop(names.append)
            world.err(f"Claude Code is not on the PATH: {CLAUDE_INSTALL}\nServing until Ctrl-C.\n")
            while not names:
                world.sleep(TICK_SECONDS)
        world.err(format_served(before, ask_gateway(fleet, world, out), world.columns))
    return EXIT_INTERRUPTED if "SIGINT" in names else status


def start_gateway(fleet, world, out, stops):
    """Start what serves the fleet, or find that it runs; `stops`, an ExitStack, will stop it."""
    gateway, name, url = fleet.gateway, clean_line(fleet.name), gateway_url(fleet.gateway)
    runs = find_gateway(world, fleet, out)
    if gateway.provider == "builtin":
        server, listener = open_gateway(fleet, world, out, listens=not runs)
        serving = threading.Thread(target=server.run, args=(listener,), daemon=True)
        serving.start()
        stops.callback(serving.join, GRACE_SECONDS + 1)  # the last one comes first
        stops.callback(server.stop, "up")
    if runs or gateway.provider == "builtin":
        world.err(f"A gateway for {name} runs at {url}: it is used.\n" if runs else
                  f"Serving {name} at {url}.\n")
        return
    program, log = world.which("litellm"), world.enter(out, f"{STATE_DIRECTORY}/litellm.log")
    if not program:
        raise FleetError("litellm-missing", "the gateway is LiteLLM and it is not on the PATH",
                         fix=f"{LITELLM_INSTALL}, or write `provider: builtin`")
    environ = merge_environment(world.environ, fleet, read_key(world, fleet, out))
    child = world.start([program, "--config", world.path(out, LITELLM_FILE), "--host", gateway.host,
                         "--port", str(gateway.port)], environ=environ, log=log)
    stops.callback(child.stop)
    until = world.clock() + LITELLM_START_SECONDS
    while who_serves(world, fleet, out, until) != OUR_GATEWAY:
        if child.ended() or world.clock() > until:
            raise FleetError("litellm-failed", "LiteLLM did not start", fix=f"see {log}")
        world.sleep(TICK_SECONDS)
    world.err(f"LiteLLM serves {name} at {url}.\n")


def find_gateway(world, fleet, out, *, needed=False):
    """Tell whether this fleet's gateway runs; refuse somebody else, and nobody where needed."""
    found = check_gateway(fleet, who_serves(world, fleet, out, world.clock() + CONNECT_SECONDS))
    if found.level == "error" or needed and found.slug != "gateway-up":
        raise FleetError(found.slug, found.what, fix=found.fix)
    return found.slug == "gateway-up"


def ask_gateway(fleet, world, out):
    """Return {node: what it has served} from a gateway of ours that serves this fleet."""
    headers, until = {"x-api-key": read_key(world, fleet, out)}, world.clock() + CONNECT_SECONDS
    with contextlib.suppress(NodeFailure, KeyError, TypeError):  # nobody, or no page of ours
        page = parse_answer(look(world, gateway_url(fleet.gateway) + "/fleet", until, **headers)[1])
        if page["fleet"] == fleet.name:
            return {node["name"]: node for node in page["nodes"]}
    return {}


def look(world, url, until, **headers):
    """Return (headers, body) of a GET."""
    with contextlib.closing(world.open_exchange(url, headers=headers, deadline=until)) as exchange:
        exchange.read_head()
        return exchange.headers, exchange.read_all()


def who_serves(world, fleet, out, until):
    """Return OUR_GATEWAY when one serves this fleet with its key, else who listens, or ""."""
    url, name, path = gateway_url(fleet.gateway), "subagent-fleet", "/fleet"
    try:
        if b'"subagent-fleet"' not in look(world, url + "/", until)[1]:
            name, path = "LiteLLM", "/v1/models"
            if b"I'm alive!" not in look(world, url + "/health/liveliness", until)[1]:
                return "another program"  # which is not shown the key
    except NodeFailure as failure:
        return "" if failure.reason in ("refused", "unreachable", "dns") else "another program"
    # no key, or it is not of this fleet
    with contextlib.suppress(FleetError, KeyError, TypeError, ValueError):
        headers = {"Authorization": f"Bearer {read_key(world, fleet, out)}"}
        page = parse_answer(look(world, url + path, until, **headers)[1])
        if name == "LiteLLM":
            aliases = {model.alias for model in fleet.models.values()}
            return OUR_GATEWAY if aliases <= {model["id"] for model in page["data"]} else name
        if page["fleet"] == fleet.name:
            return OUR_GATEWAY if page["config"] == fleet_digest(fleet) else OLD_GATEWAY
    return name


def open_gateway(fleet, world, out, *, receipts=True, listens=True):
    """Return a Server and the Listener it will serve; refuse an open door and a taken one."""
    gateway, key, listener = fleet.gateway, read_key(world, fleet, out), None
    if not LOOPBACK.fullmatch(gateway.host):
        tell_findings(world, lint_key(fleet, {gateway.master_key_env: key}))
    try:
        if listens:
            listener = world.listen(gateway.host, gateway.port)
    except FleetError as error:
        if error.slug == "port-taken":
            holder = who_serves(world, fleet, out, world.clock() + 1.0)
            error.what += f", by {holder}" if holder else ""
        raise
    path = world.enter(out, f"{STATE_DIRECTORY}/requests.jsonl") if receipts else ""
    if path:
        world.make_directory(world.below(out, STATE_DIRECTORY))
    return Server(fleet, key, world, receipts=path), listener


def cmd_init(options, world):
    output, nodes = options.output or CONFIG_NAMES[0], {}
    if output == "-":
        raise FleetError("usage", "init: it writes a file, not to standard output",
                         status=EXIT_USAGE, fix="subagent-fleet init --output fleet.yaml")
    if read_file(world, *world.split(output)) is not None and not options.force:
        raise FleetError("exists", f"{output} is there already", status=EXIT_REFUSED,
                         fix="edit it, or `subagent-fleet init --force` (a copy is kept)")
    for text in options.node:  # NAME=URL; http and the port of Ollama may be left out
        name, _, url = text.partition("=")
        parts = split_endpoint(full_endpoint(url))
        wrong = "not of the form NAME=URL" if not url or not _fits(name, RULES["name"][0]) else \
            parts if isinstance(parts, str) else f"a second `{name}`" if name in nodes else ""
        if wrong:
            raise FleetError("usage", f"init: `{text}`: {wrong}", status=EXIT_USAGE,
                             fix="subagent-fleet init --node mini=http://192.168.1.50:11434")
        nodes[name] = Node(name, _normal_endpoint(full_endpoint(url)))
    text = write_starter(world, output, nodes, offline=options.offline) + "Edit it with your " \
        "Ollama node endpoints, then run:\n  subagent-fleet discover\n  subagent-fleet generate\n"
    options.config = options.output
    world.out(clean_text(keep_places(text, options)))
    return EXIT_OK


def write_starter(world, output, nodes, *, offline=False, placeholders=True):
    """Write a fleet file with the models that this machine and these nodes have; tell them."""
    nodes = {"local": Node("local", OLLAMA_ENDPOINT), **nodes}
    states = [NodeState(name, node.endpoint, "not asked") for name, node in nodes.items()] \
        if offline else [*probe_nodes(world, nodes, INIT_TIMEOUT_SECONDS).values()]
    tree, found, flaw = plan_starter(states)
    told = [f"{state.name} ({state.endpoint}): "
            + (state.reason or count_of(state.models, "model")) for state in states]
    if not found and not placeholders:
        raise FleetError("no-model", "no fleet.yaml, and no model to write one with: "
                         + "; ".join(filter(None, (*told, flaw))), fix="start Ollama, "
                         f"`ollama pull {PLACEHOLDERS[0]}`, then `subagent-fleet up`")
    text, (place, name) = render_starter(tree, found), world.split(output)
    if output.lower().endswith(".json"):
        text = json.dumps(parse_yaml(text), indent=2, ensure_ascii=False) + "\n"
    elif world.kind_of(world.path(place, "fleet.schema.json")) == "file":
        text = f"# yaml-language-server: $schema=fleet.schema.json\n{text}"
    files, lines = [(output, text.encode("utf-8"), 0o644)], [f"Created {output}"]
    old = read_file(world, place, name)
    if old is not None:
        kept = world.enter(place, f"{STATE_DIRECTORY}/backup/{name}.{digest(old)[:12]}")
        files.insert(0, (kept, old, 0o600))
        lines.append(f"The old one is kept: {kept}")
    world.replace_files(files)
    lines += [f"  {line}" for line in told]
    lines.append(", ".join(f"{name} is {model['ollama_model']} on {model['node']}"
                           for name, model in tree["models"].items()) + "." if found else
                 f"{'Nobody was asked' if offline else 'No model that can be used was found'}: "
                 "the models in it are placeholders.")
    lines.append(flaw and f"{flaw}: `ollama pull {PLACEHOLDERS[0]}`, `subagent-fleet init --force`")
    return "".join(clean_line(line) + "\n" for line in lines if line)


def cmd_validate(options, world):
    try:
        fleet, findings = load_config(options, world)
        source = fleet.document.source
    except FleetError as error:
        if not options.json or not error.findings:
            error.report = {"file": error.where or options.config, "valid": False}
            raise
        source, findings = error.where, error.findings
    valid = not any(options.strict or finding.level == "error" for finding in findings)
    if options.json:
        world.out(render_report("validate", {"file": source, "valid": valid, "findings": findings}))
    else:
        tell_findings(world, findings)
        if not valid:
            raise FleetError("strict", f"{count_of(findings, 'warning')} and --strict",
                             fix="mend them, or leave out --strict")
        world.out(f"{clean_line(source)} is valid.\n")
    return EXIT_OK if valid else EXIT_PROBLEM


def parse_targets(options):
    """Return the chosen targets; --litellm-only and --claude-only are short for one."""
    words = [word for text in options.target for word in text.split(",") if word]
    words += [name for name in ("litellm", "claude") if getattr(options, f"{name}_only")]
    check_names("target", words, TARGETS, "generate")
    return tuple(name for name in TARGETS if name in words) or TARGETS


def cmd_generate(options, world):
    targets = parse_targets(options)
    fleet, findings = load_config(options, world)
    findings = [*findings, *lint_key(fleet, world.environ)]
    tell_findings(world, findings)
    out = find_output(options, world)
    changes = compare_output(world, out, fleet, targets)
    edited = [change for change in changes if change.action == "edited"]
    looks = options.check or options.diff
    written = not looks and (options.force or not edited)
    if written:
        write_changes(world, out, changes)
        changes = [replace(change, ours=True) for change in changes]
    listed = [(c.path, c.action) for c in changes if c.found or c.wanted]
    report = {"out": out, "written": written, "findings": findings,
              "files": [{"path": path, "action": action} for path, action in listed],
              "diff": format_diff(changes, fleet) if options.diff else None,
              "routes": [{"agent": agent, "node": model.node, "model": model.name,
                          "ollama_model": model.ollama_model, "alias": model.alias}
                         for agent, model in plan_routes(fleet).items()]}
    if not looks and not written:
        world.err("" if options.json else format_diff(edited, fleet))
        error = refusal([change.path for change in edited], "generate", "nothing was written")
        error.report = report
        raise error
    if options.json:
        world.out(render_report("generate", report))
    elif options.diff:
        world.out(format_diff(changes, fleet))
    else:
        world.out(("Would generate:\n" if options.check else "Generated:\n") + format_pairs(listed))
        if not looks and targets == TARGETS:
            world.out(clean_text(keep_places(format_start(fleet, out), options)))
            if (ENVIRONMENT_FILE, "created") in listed:
                world.out(f"\nKeep the key out of git: add {ENVIRONMENT_FILE} and "
                          f"{STATE_DIRECTORY}/ to .gitignore.\n")
    differs = any(action != "unchanged" for _, action in listed)
    return EXIT_PROBLEM if options.check and differs else EXIT_OK


def cmd_launch(options, world):
    """Run Claude Code on the fleet; its exit code is ours."""
    fleet, _ = load_config(options, world)
    program = world.which("claude")
    if not program:
        raise FleetError("claude-missing", "Claude Code is not on the PATH", fix=CLAUDE_INSTALL)
    out = find_output(options, world)
    key = read_key(world, fleet, out)
    facts = Facts(settings=find_settings(world), **observe_files(world, fleet, out))
    seen = [*_doctor_files(facts), *_doctor_claude(fleet, facts)]
    tell_findings(world, [*lint_key(fleet, world.environ), *(
        replace(found, level="warning", fix=keep_places(found.fix, options)) for found in seen
        if found.level in ("warning", "error"))])
    find_gateway(world, fleet, out, needed=True)
    words = options.passed
    if not any(word.split("=")[0] == "--settings" for word in words):
        # Auto mode asks a server of Anthropic before every action, which no gateway has (2.1.326).
        words = ["--settings", '{"permissions":{"disableAutoMode":"disable"}}', *words]
    return world.run([program, *words], merge_environment(world.environ, fleet, key))


def cmd_env(options, world):
    fleet, _ = load_config(options, world)
    out = find_output(options, world)
    key = read_key(world, fleet, out)
    shown = options.show_key or not world.is_terminal()
    report = {"set": merge_environment({}, fleet, key if shown else "(--show-key shows it)"),
              "unset": [name for name, value, _ in plan_environment(fleet) if value is None]}
    kept = kept_key(world, fleet, out) if shown else None  # the environment's stays where it is
    world.out(render_report("env", report) if options.shell == "json" else
              render_environment(fleet, kept, options.shell))
    return EXIT_OK


def cmd_clean(options, world):
    out = find_output(options, world)
    changes = compare_output(world, out, None)
    kept = [c.path for c in changes if c.action == "edited" and not options.force]
    doomed = [c for c in changes if c.path not in kept]
    shown = [(c.path, "removed") for c in doomed if c.found is not None]
    heading = "Would remove:\n" if options.dry_run else "Removing:\n"
    world.out(heading + format_pairs(shown) if shown else "Nothing to remove.\n")
    if doomed and not options.dry_run and world.confirm(f"Remove {count_of(shown, 'file')}?"):
        write_changes(world, out, doomed)
        if not kept:
            world.remove(world.enter(out, MANIFEST_FILE))
        for path in (".claude/agents", ".claude", STATE_DIRECTORY):
            world.remove_empty(world.below(out, path))
    if kept:
        raise refusal(kept, "clean", "kept")
    return EXIT_OK


def cmd_discover(options, world):
    fleet, _ = load_config(options, world)
    states = probe_nodes(world, fleet.nodes, options.timeout, fleet.models)
    words = {"node offline": "unknown", "model missing": "missing"}
    models = [{"name": name, "node": model.node, "ollama_model": model.ollama_model,
               "state": words.get(plan_route_state(fleet, states, model).state, "present")}
              for name, model in fleet.models.items()]
    report = {"fleet": fleet.name, "nodes": [*states.values()], "models": models}
    written = None
    if options.write:
        path = world.enter(find_output(options, world), f"{STATE_DIRECTORY}/discovery.json")
        world.replace_files([(path, render_report("discover", report).encode("utf-8"), 0o644)])
        written = path.removeprefix("./")
    hint = "missing: `ollama pull {ollama_model}` on {node}"
    rows = [(model["name"], model["node"], model["ollama_model"], hint.format(**model)
             if model["state"] == "missing" else model["state"]) for model in models]
    headers = ("Model", "Node", "Ollama model", "Found")
    world.out(render_report("discover", {**report, "written": written}) if options.json else
              format_nodes(fleet, states, ("Node", "Status", "Models"), world.columns) + "\n"
              + format_table(headers, rows, columns=world.columns)
              + (format_details(states) if options.verbose else "")
              + (f"\nWrote {written}\n" if written else ""))
    whole = all(model["state"] == "present" for model in models) \
        and all(state.online for state in states.values())
    return EXIT_PROBLEM if options.check and not whole else EXIT_OK


def cmd_warmup(options, world):
    """Load models as their routes will ask for them, and see that they are loaded."""
    fleet, _ = load_config(options, world)
    check_names("agent", options.agent, fleet.agents, fleet.name)
    check_names("model", options.model, fleet.models, fleet.name)
    names = options.model + [fleet.agents[name].model for name in options.agent]
    groups = {}  # what is one Ollama model with one context on a node is loaded once
    warmths = {name: groups.setdefault(model.node, {}).setdefault(
        (_full_model_name(model.ollama_model), model.context),
        Warmth(node=fleet.nodes[model.node], model=model))
        for name, model in fleet.models.items() if name in names or not names}
    rows = {name: (name, one.node.name, one.model.ollama_model) for name, one in warmths.items()}
    widths = [max(map(len, column)) for column in zip(*rows.values())]
    if not options.json:
        world.out("Unloading models:\n" if options.unload else "Warming models:\n")
    ended, waiting = set(), [] if options.json else list(warmths)
    clear = "\r\x1b[K" if world.is_terminal("stderr") else ""
    try:
        for node, _ in warm_nodes(world, groups, options):
            ended.add(node)
            world.err(clear)
            while waiting and warmths[waiting[0]].node.name in ended:
                name = waiting.pop(0)
                cells = map(str.ljust, rows[name], widths)
                world.out("  " + clean_line("  ".join(cells)) + format_warmth(warmths[name]))
            if clear:
                world.err(format_progress(groups, world.clock(), world.columns))
    finally:
        world.err(clear)
    if options.json:
        world.out(render_report("warmup", {"results": [
            {"model": name, "node": warmth.node.name, "ollama_model": warmth.model.ollama_model,
             "ok": warmth.ok, "seconds": round(warmth.seconds, 1),
             "loaded": warmth.loaded, "pulled_bytes": warmth.pulled, "detail": warmth.detail,
             "fix": warmth.fix} for name, warmth in warmths.items()]}))
    return EXIT_OK if all(warmth.ok for warmth in warmths.values()) else EXIT_PROBLEM


def cmd_status(options, world):
    fleet, _ = load_config(options, world)
    if options.watch and options.json:
        raise FleetError("usage", "status: --watch is for people, --json for programs",
                         status=EXIT_USAGE, fix="subagent-fleet status --json")
    while True:
        states = probe_nodes(world, fleet.nodes, options.timeout, fleet.models)
        routes = {model.name: plan_route_state(fleet, states, model)
                  for model in fleet.models.values()}
        following = keep_places(plan_next_step(fleet, states, routes), options)
        ready = all(route.state == "ready" for route in routes.values())
        models = {name: {"name": name, "node": model.node, "ollama_model": model.ollama_model,
                         "alias": model.alias, "context": model.context, **vars(routes[name])}
                  for name, model in fleet.models.items()}
        report = {"fleet": fleet.name, "ready": ready, "next": following,
                  "nodes": [*states.values()], "models": [*models.values()],
                  "routes": [{"agent": agent.name, "model": agent.model, **models[agent.model]}
                             for agent in fleet.agents.values()]}
        # home and clear: a redraw that does not scroll what stood there before
        text = "\x1b[H\x1b[2J" if options.watch and world.is_terminal() else ""
        text += format_nodes(fleet, states, ("Node", "Status", "Endpoint", "Models"), world.columns)
        rows = [(state.name, one.name, one.context or "?", format_share(one),
                 format_expiry(one.expires, world.now()))
                for state in states.values() for one in state.loaded]
        if rows:
            headers = ("Node", "Loaded", "Context", "Where", "Until")
            text += "\n" + format_table(headers, rows, columns=world.columns)
        lines = [f"{format_route(agent, model)}: {clean_line(str(routes[model.name]))}\n"
                 for agent, model in plan_routes(fleet).items()]
        world.out(render_report("status", report) if options.json else
                  f"{text}\nAgent routing:\n{''.join(lines)}\n{clean_line(following)}\n")
        if not options.watch:
            return EXIT_PROBLEM if options.check and not ready else EXIT_OK
        world.sleep(options.watch)


def cmd_serve(options, world):
    fleet, _ = load_config(options, world)
    gateway, out = fleet.gateway, find_output(options, world)
    port = options.port or str(gateway.port)
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise FleetError("usage", f"--port: `{port}` is not a port", status=EXIT_USAGE,
                         fix="write --port 4000")
    gateway = replace(gateway, host=options.host or gateway.host, port=int(port))
    server, listener = open_gateway(replace(fleet, gateway=gateway), world, out,
                                    receipts=not options.no_receipts)
    server.log = world.err if options.verbose else server.log
    world.on_stop(server.stop)
    address = f"{show_host(listener.host)}:{listener.port}"
    world.out(f"Serving {clean_line(fleet.name)} at http://{address}: "
              f"{', '.join(server.scheduler.tiers)} on {count_of(fleet.nodes, 'node')}. "
              "Ctrl-C stops.\n")
    server.run(listener)
    return EXIT_INTERRUPTED if server.stops[0] == "SIGINT" else EXIT_OK


def cmd_schema(options, world):
    world.out(json.dumps(render_schema(), indent=2) + "\n")
    return EXIT_OK


def cmd_completion(options, world):
    words = {c.name: " ".join(["--help", *(f.name for f in c.flags if f.name.startswith("-"))]
                              + [choice for f in c.flags for choice in f.more.get("choices", ())])
             for c in COMMANDS}
    words["help"] = names = " ".join(words)
    if options.shell == "fish":
        lines = [f"complete -c subagent-fleet -n __fish_use_subcommand -f -a {c.name} "
                 f'-d "{c.summary}"' for c in COMMANDS]
        lines += [f"complete -c subagent-fleet -n '__fish_seen_subcommand_from {name}' "
                  f"-a '{found}'" for name, found in words.items() if found]
        world.out("\n".join(lines) + "\n")
        return EXIT_OK
    cases = "".join(f"    *' {name}') words='{found}' ;;\n" for name, found in words.items())
    start = "whence compdef >/dev/null || { autoload -U compinit && compinit; }\n" \
            "autoload -U +X bashcompinit && bashcompinit\n" if options.shell == "zsh" else ""
    world.out(f"{start}_subagent_fleet() {{\n  local words='{names}'\n"
              '  [ "$COMP_CWORD" -gt 1 ] && case "$3 ${COMP_WORDS[1]}" in\n'
              "    --config*|--out*) words='' ;;\n" + cases + "    *) words='' ;;\n  esac\n"
              '  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))\n}\n'
              "complete -o default -F _subagent_fleet subagent-fleet\n")
    return EXIT_OK


def observe(world, fleet, problems, options):
    """Return the Facts of this machine and, where there is a fleet, of its nodes and files."""
    until = world.clock() + options.timeout  # at which every job ends by itself
    seen = {"problems": problems, "agents": world.read_tree(".claude/agents", ".md")}
    claude, litellm, jobs = world.which("claude"), world.which("litellm"), {}
    if litellm:  # not run: `--version` takes 10 s and calls out (1.106.2), a .pth may do harm
        names = [name for place in ("lib/python*", "Lib")
                 for name in world.names_near(litellm, f"../{place}/*-packages/litellm*")]
        versions = re.findall(r"^litellm-(\d.*)\.dist-info$", "\n".join(names), re.M)
        seen["litellm"] = (versions or ["?"])[-1] \
            + " with litellm_init.pth" * ("litellm_init.pth" in names)
    if claude:  # its version, or `?`
        words = [claude, "--version"]
        jobs["claude"] = lambda: f"{world.read_program(words, until) or ''} ?".split()[0][:40]
    if fleet:
        out = find_output(options, world)
        seen.update(observe_files(world, fleet, out), settings=find_settings(world),
                    problems=[*problems, *lint_key(fleet, world.environ)])
        looks = {name: lambda node=node: look_at_node(world, node, until)
                 for name, node in fleet.nodes.items()}
        jobs.update(states=lambda: probe_nodes(world, fleet.nodes, options.timeout, fleet.models),
                    looks=lambda: dict(run_together(world, looks)),
                    holder=lambda: who_serves(world, fleet, out, until))
    return Facts(**seen, **{key: told for key, told in run_together(world, jobs) if key})


def look_at_node(world, node, until):
    """Return (every address of a node's host, whether it answers a foreign web page)."""
    addresses, allowed, foreign = (), "", "https://fleet-doctor.invalid"
    with contextlib.suppress(NodeFailure):  # how a node fails is in its state
        found = world.resolve(split_endpoint(node.endpoint)[1].strip("[]"), 0, until)
        addresses = tuple(sorted({address[0] for *_, address in found}))
        headers = look(world, node.endpoint + "/api/version", until, Origin=foreign)[0]
        allowed = headers.get("access-control-allow-origin", "")
    return addresses, allowed in ("*", foreign)


def cmd_doctor(options, world):
    mended = []
    try:
        fleet, problems = load_config(options, world)
    except FleetError as error:
        fleet, problems = None, error.findings or (error.finding,)
    facts = observe(world, fleet, problems, options)
    if options.fix and fleet:  # nothing that a person wrote is touched
        stale = [change for change in facts.changes if change.action in ("updated", "removed")]
        mended = [f"{facts.env_path}: only you may read it now"] * ("env-readable" in facts.leaks)
        mended += [f"{change.path}: {change.action}" for change in stale]
        if mended:
            out = find_output(options, world)
            write_changes(world, out, stale)
            facts = replace(facts, **observe_files(world, fleet, out))
    pairs = [(topic, replace(found, fix=keep_places(found.fix, options)))
             for topic, found in plan_doctor(fleet, facts)]
    findings = [finding for _, finding in pairs]
    verdict = plan_verdict(findings)
    report = {"verdict": verdict, "mended": mended,
              "findings": [{"topic": topic, **show_record(found)} for topic, found in pairs]}
    told = {"": "".join(f"mended: {clean_line(text)}\n" for text in mended)} if mended else {}
    for topic, found in pairs:
        told[topic] = told.get(topic, f"{topic}\n") + format_finding(found)
    world.out(render_report("doctor", report) if options.json else
              "\n".join([*told.values(), f"{clean_line(verdict)}\n"]))
    return EXIT_PROBLEM if any(found.level == "error" for found in findings) else EXIT_OK


def cmd_worker(options, world):
    found = re.search(r":([1-9]\d{0,4})/?$", world.environ.get("OLLAMA_HOST", ""))
    port = min(int(found[1]), 65535) if found else OLLAMA_PORT
    name, addresses = world.own_names()
    nodes = {address: Node(address, f"http://{address}:{port}")
             for address in ("127.0.0.1", *filter(address_kind, addresses))}
    here, *reached = probe_nodes(world, nodes, options.timeout).values()
    app = "/Applications/Ollama.app"
    program = world.which("ollama") or (app if world.kind_of(app) == "directory" else "")
    system = "docker" if here.online and not program and world.which("docker") else {
        "darwin": "darwin", "win32": "windows"}.get(
        sys.platform, "systemd" if world.which("systemctl") else "shell")
    findings = check_worker(program, here, reached)
    report = {"system": system, "name": name, "program": program, "ollama": here,
              "addresses": [{"address": one.name, "kind": address_kind(one.name),
                             "open": one.online} for one in reached],
              "findings": findings, "setup": format_setup(system, here, reached),
              "security": SECURITY_WARNING, "fleet": plan_worker_block(name, here, reached)}
    world.out(render_report("worker", report) if options.json else
              format_worker(report, world.columns))
    return EXIT_PROBLEM if any(found.level == "error" for found in findings) else EXIT_OK


def cmd_help(options, world):
    if not options.command:
        head = f"subagent-fleet {__version__}: run Claude Code-style subagents across your local " \
               "model fleet.\n\nStart:\n  subagent-fleet up\n\nCommands:\n"
        tail = "\nsubagent-fleet COMMAND --help says more. Exit codes: 0 done, 1 a problem was " \
               "found,\n2 usage, 3 refused (--force overrides), 130 interrupted.\n"
        world.out(head + format_pairs([(c.name, c.summary) for c in COMMANDS]) + tail)
        return EXIT_OK
    command, rows = find_command(options.command), []
    for flag in command.flags:
        value = "|".join(flag.more.get("choices", ())) or flag.metavar
        name = f"{flag.short}, {flag.name}" if flag.short else flag.name
        rows.append((f"{name} {value}".rstrip() if name.startswith("-") else value, flag.note))
    if command.passes:
        rows.append(("-- " + command.passes, "handed on as it is"))
    examples = [f"  subagent-fleet {text}\n" if text.startswith(command.name) else f"  {text}\n"
                for text in command.examples]
    world.out(f"subagent-fleet {command.name}: {command.summary}.\n\nExamples:\n"
              + "".join(examples) + ("\nOptions:\n" + format_pairs(rows) if rows else ""))
    return EXIT_OK


# == 18. Command line =========================================================

COMMANDS = (
    Command("init", cmd_init, "write fleet.yaml with the models your machines have", (
        Flag("--output", "where to write, else fleet.yaml; .json writes JSON; not `-`", "FILE"),
        Flag("--node", "also ask this machine; may be repeated", "NAME=URL", REPEAT),
        Flag("--offline", "ask nobody, write placeholders"), FORCE),
        ("init", "init --node mini=http://192.168.1.50:11434")),
    Command("validate", cmd_validate, "check the config", (
        CONFIG, Flag("--strict", "warnings are errors"), JSON),
        ("validate", "validate --config - < fleet.yaml")),
    Command("generate", cmd_generate, "write what LiteLLM, Claude Code and your shell read", (
        CONFIG, OUT, Flag("--target", "only these: litellm, claude, env", "LIST", REPEAT),
        Flag("--litellm-only", "only LiteLLM's config"), Flag("--claude-only", "only the agents"),
        Flag("--check", "write nothing; exit 1 when something would change"),
        Flag("--diff", "write nothing; show what would change"), FORCE, JSON),
        ("generate", "generate --check --diff", "generate --target claude,env")),
    Command("launch", cmd_launch, "run Claude Code on the fleet", (
        Flag("program", "the program", "claude", {"choices": ("claude",)}), CONFIG, OUT),
        ("launch claude", "launch claude -- -p 'say hi'"), "ARGS"),
    Command("env", cmd_env, "print Claude Code's environment for your shell", (
        CONFIG, OUT,
        Flag("--shell", "for whom", "SHELL", {"default": "sh", "choices": ("sh", "fish", "json")}),
        Flag("--show-key", "show the key on a terminal, too")),
        ("env", 'eval "$(subagent-fleet env)"')),
    Command("clean", cmd_clean, "remove the generated files that nobody has changed", (
        OUT, CONFIG, Flag("--dry-run", "only list them"),
        Flag("--force", "changed ones too, after a copy")), ("clean --dry-run", "clean")),
    Command("discover", cmd_discover, "show what every node has", (
        CONFIG, Flag("--write", f"also write {STATE_DIRECTORY}/discovery.json"),
        Flag("--check", "exit 1 when a node is offline or a model missing"), TIMEOUT,
        Flag("--verbose", "say more, and why a node is offline", short="-v"), JSON),
        ("discover", "discover --verbose --timeout 2")),
    Command("warmup", cmd_warmup, "load models before you need them", (
        CONFIG, Flag("--model", "only this model; may be repeated", "MODEL", REPEAT),
        Flag("--agent", "only the model of this agent; may be repeated", "AGENT", REPEAT),
        Flag("--pull", "download what a node lacks"), Flag("--unload", "take models out of memory"),
        Flag("--timeout", "seconds for each model; else its own `timeout`", "S", SECONDS), JSON),
        ("warmup", "warmup --agent implementer", "warmup --pull")),
    Command("status", cmd_status, "show nodes, loaded models and routes", (
        CONFIG, Flag("--watch", "again every S seconds, until Ctrl-C", "[S]",
                     {**SECONDS, "nargs": "?", "const": 2.0}),
        Flag("--check", "exit 1 when a route is not ready"), TIMEOUT, JSON),
        ("status", "status --watch", "status --check")),
    Command("serve", cmd_serve, "serve the fleet to Claude Code", (
        CONFIG, OUT, Flag("--host", "listen there instead", "HOST"),
        Flag("--port", "listen there instead, where `launch` does not ask; 0: any", "PORT"),
        Flag("--no-receipts", "keep no record of requests"),
        Flag("--verbose", "print a line for each request and each refusal", short="-v")),
        ("serve", "serve --verbose")),
    Command("up", cmd_up, "do the whole job: find, generate, warm, serve, run Claude Code",
            (CONFIG, OUT), ("up", "up -- -p 'say hi'"), "ARGS"),
    Command("schema", cmd_schema, "print the JSON Schema of the fleet file", (),
            ("schema > fleet.schema.json",)),
    Command("completion", cmd_completion, "print a completion script for your shell", (
        Flag("shell", "your shell", "SHELL", {"choices": ("bash", "zsh", "fish")}),),
        ('eval "$(subagent-fleet completion zsh)"',)),
    Command("doctor", cmd_doctor, "find what is wrong, and say what mends it", (
        CONFIG, OUT, Flag("--fix", "mend what is safe: permissions, stale generated files"),
        TIMEOUT, JSON), ("doctor", "doctor --fix", "doctor --json")),
    Command("worker", cmd_worker, "say how this machine becomes a node", (TIMEOUT, JSON),
            ("worker",)),
    Command("help", cmd_help, "say how a command is used",
            (Flag("command", "which command", "[COMMAND]", {"nargs": "?"}),), ("help validate",)))


def find_command(name):
    """Return the command of that name; an unknown one is refused with the nearest."""
    known = {command.name: command for command in COMMANDS}
    if name not in known:
        behind = "; flags come after the command" if name.startswith("-") else ""
        raise FleetError("unknown-command", f"unknown command `{name}`{behind}", status=EXIT_USAGE,
                         fix=nearest(name, known) or "subagent-fleet --help")
    return known[name]


def parse_arguments(command, words):
    """Return the options of a command; what is wrong is said in one line."""
    class Parser(argparse.ArgumentParser):
        def error(self, message, fix=""):
            raise FleetError("usage", f"{command.name}: {message}", status=EXIT_USAGE,
                             fix=fix or f"subagent-fleet {command.name} --help")

    cut = words.index("--") if command.passes and "--" in words else len(words)
    parser = Parser(prog="subagent-fleet", add_help=False, allow_abbrev=False,
                    # without a width it imports shutil, and with it three packers
                    formatter_class=lambda prog: argparse.HelpFormatter(prog, width=80))
    for flag in command.flags:
        more = {"metavar": flag.metavar, **flag.more} if flag.metavar else {"action": "store_true"}
        parser.add_argument(*filter(None, (flag.short, flag.name)), **more)
    options, unknown = parser.parse_known_args(words[:cut])
    if unknown:
        known = [flag.name for flag in command.flags if flag.name.startswith("-")]
        hint = nearest(unknown[0].split("=")[0], known)
        own = [word for word in words[:cut] if word not in unknown]
        better = [*own, "--config", unknown[0], *words[cut:]] if "--config" in known \
            and "--config" not in words and unknown[0].endswith((".yaml", ".yml", ".json")) else \
            [*own, "--", *unknown, *words[cut + 1:]] if command.passes and not hint else []
        if better:
            hint = " ".join(map(quote_shell, ("subagent-fleet", command.name, *better)))
        parser.error(f"unknown argument `{unknown[0]}`", hint)
    options.passed = words[cut + 1:]
    return options


def main(argv=None, world=None):
    """Run one command; return its exit status."""
    world = world or World()
    try:
        return run_words(list(sys.argv[1:] if argv is None else argv), world)
    except FleetError as error:
        told = "".join(format_finding(finding, indent="  ") for finding in error.findings)
        world.err(f"Invalid {clean_line(error.where)}:\n{told}" if told else
                  format_finding(error.finding))
        return error.status
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


def run_words(words, world):
    """Choose the command, read its flags, run it."""
    if words[:1] in (["-V"], ["--version"]):
        world.out(f"subagent-fleet {__version__}\n")
        return EXIT_OK
    own = words[:words.index("--")] if "--" in words else words
    if not words or "-h" in own or "--help" in own:
        named = [word for word in own[:1] if not word.startswith("-")]
        cmd_help(SimpleNamespace(command="".join(named)), world)
        return EXIT_OK if words else EXIT_USAGE
    command, options = find_command(words[0]), None
    try:
        options = parse_arguments(command, words[1:])
        return command.run(options, world)
    except FleetError as error:
        error.fix = keep_places(error.fix, options)
        if "--json" in own:
            world.out(render_report(command.name, {
                "error": error.finding, "findings": error.findings, **error.report}))
        raise


def keep_places(text, options):
    """Return text whose commands name the files and the directory that were typed."""
    def name_them(found):
        takes = {flag.name for command in COMMANDS if command.name == found[1]
                 for flag in command.flags}
        return found[0] + "".join(f" {flag} {quote_shell(value)}" for flag, value in typed
                                  if flag in takes and value not in (None, "", "-"))

    typed = [(f"--{name}", getattr(options, name, "")) for name in ("config", "out", "output")]
    return re.sub(r"(?<![\w./-])subagent-fleet ([a-z]+)( claude)?\b(?! --(?:config|out)| claude)",
                  name_them, text)


if __name__ == "__main__":
    sys.exit(main())
