"""The languages of clients: Dialect, Writer, and the blocks of a message."""
from __future__ import annotations

import abc
import base64
import re
from typing import TYPE_CHECKING

from fleet.speech.backend import first_field, read_field
from fleet.speech.rendering import CallIds
from fleet.speech.talk import (
    STOP_LIMIT_CHARACTERS,
    STOPS_LIMIT,
    Call,
    Parts,
    Refusal,
    Result,
    Turn,
    join_texts,
)
from fleet.start.gate import LatePattern
from fleet.start.record import Record, replace
from fleet.text.json import count_marks, parse_object, render_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from fleet.speech.answer import Delta, End
    from fleet.speech.talk import Talk


# The language of a client. A Dialect turns a request into a Talk; its Writers turn Deltas into
# bytes.

PROMPT_MARKS = 500_000  # values in one request; see count_marks


# Pairs of headers with a client's session and agent; the first pair with a session counts:
# Claude Code, opencode's subagents, opencode, codex, pi.
CONVERSATION_HEADERS = (
    ("x-claude-code-session-id", "x-claude-code-agent-id"),
    ("x-parent-session-id", "x-session-id"),
    ("x-session-id", ""), ("session-id", "thread-id"), ("session_id", ""))


class Conversation(Record):
    """The session and agent of a request: their requests belong together."""

    session: str = ""
    agent: str = ""


class Dialect:
    """The language of a kind of client: how to read its requests and write its answers."""

    path = ""  # the path of its requests
    count_path = ""  # the path that counts the tokens of a request; "": none
    # The fields that translation reads, with their kinds in _FIELD_KINDS.
    fields: Mapping[str, str] = {}
    writes: type[Writer]

    def parse(self, body: bytes | bytearray) -> Talk:
        """Return the Talk of a request, or raise a Refusal."""
        if len(body) > PROMPT_MARKS and count_marks(body) > PROMPT_MARKS:
            raise Refusal(413, "body: far more in it than any prompt has")
        request = parse_object(body)
        if request is None:
            raise Refusal(400,
                          "body: expected a JSON object, its numbers no larger than JSON's")
        self._check_fields(request)
        try:
            return self._read(request)
        except RecursionError:
            raise Refusal(400, "body: nested too deeply") from None

    def _check_fields(self, request: dict[str, Any]) -> None:
        """Refuse a request with fields of the wrong type."""
        for name, kind in self.fields.items():
            value = request.get(name)
            if value is None and name not in REQUIRED_FIELDS:
                continue
            words, types = _FIELD_KINDS[kind]
            if not isinstance(value, types) or (kind in NUMBERS and (
                    isinstance(value, bool) or not abs(value) < 1e9)):
                raise Refusal(400, f"{name}: expected {words}")
            if name in TOKEN_FIELDS and value < 1:
                raise Refusal(400, f"{name}: must be at least 1")

    @abc.abstractmethod
    def _read(self, request: dict[str, Any]) -> Talk:
        """Return the Talk of a request; its fields have the right types."""

    def conversation(self, headers: Mapping[str, str], talk: Talk) -> Conversation:
        """Return the Conversation, from the headers (names in lower case) or the request."""
        for session_header, agent_header in CONVERSATION_HEADERS:
            session = _read_id(headers.get(session_header, ""))
            if session:
                agent = _read_id(headers.get(agent_header, ""))
                return Conversation(session, agent if agent != session else "")

        return Conversation(_read_id(talk.thread))

    def refuse(self, refusal: Refusal) -> bytes:
        """Return the whole body of an answer that refuses."""
        return render_json(self.writes.error(refusal))

    def count(self, tokens: int) -> bytes:
        """Return the whole body of an answer to how many tokens a request has."""
        return render_json({"input_tokens": tokens})


def _read_id(text: str) -> str:
    return text if text and re.fullmatch("[A-Za-z0-9_.-]{1,64}", text) else ""


# -- reading requests in any dialect --

REQUIRED_FIELDS = ("model", "messages", "input")
TOKEN_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


NUMBERS = ("whole", "number")
# The kinds of fields: the words for each, and its types.
_FIELD_KINDS: dict[str, tuple[str, Any]] = {
    "text": ("text", str), "list": ("a list", list), "object": ("an object", dict),
    "boolean": ("true or false", bool), "whole": ("a whole number", int),
    "number": ("a number", (int, float)), "text or list": ("text or a list", (str, list)),
    "text or object": ("text or an object", (str, dict))}


def read_stops(value: object, name: str) -> tuple[str, ...]:
    """Return the stop sequences."""
    stops = [value] if isinstance(value, str) else value or ()
    if (not isinstance(stops, (list, tuple))
            or not all(isinstance(stop, str) for stop in stops)):
        raise Refusal(400, f"{name}: expected a list of texts")
    if len(stops) > STOPS_LIMIT or any(len(stop) > STOP_LIMIT_CHARACTERS for stop in stops):
        raise Refusal(400, f"{name}: at most {STOPS_LIMIT}, each of at most "
                      f"{STOP_LIMIT_CHARACTERS:,} characters")
    return tuple(filter(None, stops))


def read_sampling(request: dict[str, Any]) -> dict[str, float]:
    return {name: request[name] for name in ("temperature", "top_p", "top_k")
            if request.get(name) is not None}


class History:
    """The turns of a request, merged so that user and assistant alternate."""

    def __init__(self) -> None:
        self._turns: list[tuple[str, Parts]] = []
        self.system: list[str] = []  # system text, wherever it was

    def add(self, role: str, parts: Parts) -> None:
        """Add parts to the turn of a side; without parts there is no turn."""
        if role == "system":
            self.system += parts["texts"]
        elif any(parts.values()):
            if not self._turns or self._turns[-1][0] != role:
                self._turns.append((role, Parts()))
            for kind, values in parts.items():
                self._turns[-1][1][kind] += values

    def turns(self) -> tuple[Turn, ...]:
        return tuple(Turn(role, **{kind: tuple(values) for kind, values in parts.items()
                                   if kind not in ("found", "unshown")})
                     for role, parts in self._turns)

    def unshown(self) -> str:
        """Return what a local model cannot be shown; "" if it can see everything."""
        return next((why for _, parts in self._turns for why in parts["unshown"]), "")


def block_text(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise Refusal(400, f"{where}: `{name}` of a block must be text")
    return value


# -- blocks of messages --


def read_content(content: object, where: str, parts: Parts | None = None) -> Parts:
    """Return the parts of a content that a local model can be shown."""
    if parts is None:
        parts = Parts()
    blocks = ([{"type": "text", "text": content}] if isinstance(content, str)
              else content or [])
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise Refusal(400, f"{where}: expected text or a list of content blocks")
    for block in blocks:
        kind = block.get("type")
        read_block = _BLOCK_READERS.get(kind) if isinstance(kind, str) else None
        if read_block:
            read_block(block, where, parts)
    return parts


def _read_text(block: dict[str, Any], where: str, parts: Parts) -> None:
    kind = block["type"]
    text = block_text(block, kind if kind in ("refusal", "thinking") else "text", where)
    if text:
        parts["thoughts" if kind == "thinking" else "texts"].append(text)


def _read_image(block: dict[str, Any], where: str, parts: Parts) -> None:
    source = read_field(block, "source", dict)
    if source.get("type") != "base64":
        parts["unshown"].append(f"{where}: a local model can only be shown base64 "
                                "images, not URLs")
        return
    _read_pixels(block_text(source, "data", where), where, parts)


def _read_image_url(block: dict[str, Any], where: str, parts: Parts) -> None:
    url = read_field(block, "image_url") or first_field(block, ("image_url.url",))
    match = _DATA_URL.match(url)
    if not match:
        raise Refusal(400, f"{where}: a local model can only be shown images as data: URLs "
                      "with base64")
    _read_pixels(url[match.end():], where, parts)


def _read_pixels(text: str, where: str, parts: Parts) -> None:
    try:  # one invalid character would make a node refuse the whole request
        pixels = base64.b64decode("".join(text.split()), validate=True)
    except ValueError:
        raise Refusal(400, f"{where}: the image is not valid base64") from None
    if pixels:
        parts["images"].append(base64.b64encode(pixels).decode("ascii"))


def _read_document(block: dict[str, Any], where: str, parts: Parts) -> None:
    inside = block.get("content")
    if block["type"] == "document":
        source = read_field(block, "source", dict)
        inside = source.get("data" if source.get("type") == "text" else "content")
    title = block_text(block, "title", where)
    if title:
        parts["texts"].append(title)
    before = sum(map(len, parts.values()))
    read_content(inside, where, parts)
    if sum(map(len, parts.values())) == before:
        _read_file(block, where, parts)


def _read_file(block: dict[str, Any], where: str, parts: Parts) -> None:
    parts["texts"].append("(a file of which only the bytes were sent was left out)")


def _read_tool_reference(block: dict[str, Any], where: str, parts: Parts) -> None:
    name = block_text(block, "tool_name", where)
    if name:
        parts["found"].append(name)
    parts["texts"].append(f"The tool `{name}` can be called now.")


def _read_tool_use(block: dict[str, Any], where: str, parts: Parts) -> None:
    arguments = block.get("input") or {}
    if not isinstance(arguments, dict):  # Ollama answers 400 to anything else
        arguments = {"input": arguments}
    name = block_text(block, "name", where) or "unknown"
    parts["calls"].append(Call(block_text(block, "id", where), name, arguments))


def _read_tool_result(block: dict[str, Any], where: str, parts: Parts) -> None:
    call_id = block_text(block, "tool_use_id", where)
    read_tool_output(call_id, block.get("content"), where, parts,
                 failed=block.get("is_error") is True)


def read_tool_output(call_id: str, content: object, where: str, parts: Parts, *,
                 failed: bool = False) -> Parts:
    """Add the result of a call, even an empty one."""
    inside = read_content(content, where)
    text = join_texts(inside["texts"])
    if failed and not text.startswith(("Error", "<tool_use_error>")):
        text = f"Error: {text}"
    parts["results"].append(Result(call_id, text, tuple(inside["images"])))
    parts["found"] += inside["found"]
    parts["unshown"] += inside["unshown"]
    return parts


_BLOCK_READERS: dict[str, Callable[[dict[str, Any], str, Parts], None]] = {
    "text": _read_text, "input_text": _read_text, "output_text": _read_text,
    "refusal": _read_text, "thinking": _read_text, "image": _read_image,
    "image_url": _read_image_url, "input_image": _read_image_url, "document": _read_document,
    "search_result": _read_document, "file": _read_file, "input_file": _read_file,
    "input_audio": _read_file, "tool_reference": _read_tool_reference,
    "tool_use": _read_tool_use, "tool_result": _read_tool_result}


class Block(Record):
    """One block of an answer: text, thinking or a call."""

    kind: str  # text, thinking or call
    index: int
    pieces: list[str]
    call: Call | None  # with the id that the client will refer to

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Writer:
    """Writes one answer in blocks: at once, or as a stream.

    If it `is_stream`, each method returns the bytes to send now: a dialect defines how a stream
    begins, waits, fails and ends, and how each block starts, grows and stops.
    """

    call_prefix = "call"
    # The number of the last event, in dialects that number them; another Writer may continue it.
    number = 0

    def __init__(self, talk: Talk, answer_id: str) -> None:
        self.is_stream, self._talk, self._id = talk.is_stream, talk, answer_id
        taken = (call.id for turn in talk.turns for call in turn.calls)
        self._ids = CallIds(f"{self.call_prefix}_{answer_id}", taken)
        self._tools = {tool.name: tool for tool in talk.tools}
        self._blocks: list[Block] = []
        self._open: Block | None = None  # the open block

    def write(self, delta: Delta) -> bytes:
        """Return the bytes for a Delta that is not the end."""
        block = self._open
        if block and block.kind == delta.kind:  # once a token
            block.pieces.append(delta.text)
            return self.grow(block, delta.text) if self.is_stream else b""
        return self.write_first(delta)

    def write_first(self, delta: Delta) -> bytes:
        """Open a new block for this Delta; return the bytes."""
        said = self._close()
        call = delta.call and replace(delta.call, id=self._ids.take(delta.call.id))
        text = self.input_text(call) if call else delta.text
        block = self._open = Block(delta.kind, len(self._blocks), [text], call)
        self._blocks.append(block)
        if self.is_stream:
            said += self.start(block) + self.grow(block, text)
        return said + self._close() if call else said

    def _close(self) -> bytes:
        block, self._open = self._open, None
        return self.stop(block) if block and self.is_stream else b""

    def end(self, end: End) -> bytes:
        """Return the bytes that end a stream, or the whole body."""
        closing = self._close()
        return closing + self.ending(end) if self.is_stream else render_json(self.whole(end))

    def input_text(self, call: Call) -> str:
        """Return the arguments of a call as text."""
        return render_json(call.arguments).decode("ascii")

    def begin(self) -> bytes:
        """Return the bytes that open the stream.

        They may be sent long before the first Delta, even if Deltas already wait to be sent.
        """
        return b""

    def ping(self) -> bytes:
        """Return the bytes that keep a client waiting."""
        return b""

    def start(self, block: Block) -> bytes:
        return b""

    def grow(self, block: Block, text: str) -> bytes:
        """Return the bytes that extend a block; a call is sent at once."""
        return b""

    def stop(self, block: Block) -> bytes:
        return b""

    def ending(self, end: End) -> bytes:
        return b""

    def fail(self, refusal: Refusal) -> bytes:
        """Return the bytes that end a stream with an error."""
        return b""

    def whole(self, end: End) -> dict[str, Any]:
        """Return the whole answer."""
        return {}

    @classmethod
    def error(cls, refusal: Refusal) -> dict[str, Any]:
        """Return the whole body of an answer that refuses."""
        return {}


def render_event(event: dict[str, Any]) -> bytes:
    """Return an event for a stream with named events."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode("ascii"), render_json(event))


_DATA_URL = LatePattern(r"data:[^,]{0,200};base64,")
