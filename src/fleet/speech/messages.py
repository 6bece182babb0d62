"""Messages, the dialect of Claude Code and of Anthropic's SDKs."""
from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fleet.speech.backend import read_field
from fleet.speech.dialect import (
    Dialect,
    History,
    Writer,
    read_content,
    read_sampling,
    read_stops,
    render_event,
)
from fleet.speech.talk import Parts, Refusal, Talk, Tool

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from fleet.speech.answer import Delta, End
    from fleet.speech.dialect import Block


# Parts that no local model can read (the bytes of a PDF, server tools, citations, cache marks)
# are left out instead of refused: a history that is refused once would be refused forever.


def _read_turns(messages: list[Any]) -> tuple[History, frozenset[str]]:
    """Return the history, and the names of the deferred tools that may be used."""
    history = History()
    usable: set[str] = set()
    for number, message in enumerate(messages):
        role = read_field(message, "role")
        if role not in ("user", "assistant", "system"):
            raise Refusal(400, f"messages.{number}: expected the role user, "
                          "assistant or system")

        parts = read_content(message.get("content"), f"messages.{number}")
        if role == "system":  # many templates accept it only at the very beginning
            role = "user"
            parts = Parts(reminders=parts["texts"])
        history.add(role, parts)
        usable.update(parts["found"], (call.name for call in parts["calls"]))
    return history, frozenset(usable)


def _read_tools(tools: Iterable[Any], usable: frozenset[str]) -> tuple[Tool, ...]:
    """Return the client's tools; deferred ones only after they were found or called."""
    shown: dict[str, Tool] = {}
    for tool in tools:
        name = read_field(tool, "name")
        if not name or tool.get("type") not in (None, "custom"):
            continue  # other types are tools of Anthropic's servers
        if tool.get("defer_loading") is True and name not in usable:
            continue
        description = read_field(tool, "description")
        shown.setdefault(name, Tool(name, description, tool.get("input_schema")))
    return tuple(shown.values())


class MessagesWriter(Writer):
    """Writes a Message, or passes on a cloud's."""

    call_prefix = "toolu"
    _has_begun = _passes = False
    _before = ""  # the beginning of an event that extends the open block
    _raw = b""  # a cloud's own Message, without a stream

    def write_first(self, delta: Delta) -> bytes:
        if not delta.raw:
            return super().write_first(delta)
        self._passes = True
        if not self.is_stream:
            self._raw = delta.raw
            return b""
        # The client may have had `message_start` already.
        if delta.text == "message_start" and not self._starts():
            return b""
        return b"event: %b\ndata: %b\n\n" % (delta.text.encode("ascii"), delta.raw)

    def _starts(self) -> bool:
        starts, self._has_begun = not self._has_begun, True
        return starts

    def begin(self) -> bytes:
        if not self._starts():
            return b""
        return render_event({"type": "message_start", "message": self._empty_message()})

    def _empty_message(self) -> dict[str, Any]:
        """Return the Message at its beginning; its tokens are not known yet."""
        return {"id": f"msg_{self._id}", "type": "message", "role": "assistant",
                "model": self._talk.alias, "content": [], "stop_reason": None,
                "stop_sequence": None, "usage": {
                    "input_tokens": 0, "output_tokens": 0, "cache_creation_input_tokens": 0,
                    "cache_read_input_tokens": 0}}

    def ping(self) -> bytes:
        return render_event({"type": "ping"})

    def fail(self, refusal: Refusal) -> bytes:
        return render_event(self.error(refusal))

    @classmethod
    def error(cls, refusal: Refusal) -> dict[str, Any]:
        return {"type": "error", "error": {"type": refusal.kind, "message": refusal.what}}

    def _show(self, block: Block, **filled: Any) -> dict[str, Any]:
        """Return a block at its start, or `filled` at its end."""
        if block.call:
            shown = {"type": "tool_use", "id": block.call.id, "name": block.call.name,
                     "input": {}, **filled}
        else:
            shown = {"type": block.kind, block.kind: "", **filled}
        if block.kind == "thinking":
            shown["signature"] = ""
        return shown

    def start(self, block: Block) -> bytes:
        kind, name = f"{block.kind}_delta", block.kind
        if block.call:
            kind, name = "input_json_delta", "partial_json"
        self._before = ('event: content_block_delta\n'
                        'data: {"type":"content_block_delta","index":'
                        f'{block.index},"delta":{{"type":"{kind}","{name}":')
        return render_event({"type": "content_block_start", "index": block.index,
                             "content_block": self._show(block)})

    def grow(self, block: Block, text: str) -> bytes:
        # Called for each token: a template costs a third of rendering the event.
        words = json.encoder.encode_basestring_ascii(text)
        return f"{self._before}{words}}}}}\n\n".encode("ascii")

    def stop(self, block: Block) -> bytes:
        return render_event({"type": "content_block_stop", "index": block.index})

    def ending(self, end: End) -> bytes:
        stop = render_event({"type": "message_stop"})
        if self._passes:
            return stop
        delta = {"stop_reason": end.reason, "stop_sequence": end.stop or None}
        return render_event({"type": "message_delta", "delta": delta,
                             "usage": _usage_of(end)}) + stop

    def end(self, end: End) -> bytes:
        return self._raw or super().end(end)

    def whole(self, end: End) -> dict[str, Any]:
        message = self._empty_message()
        for block in self._blocks:
            filled: dict[str, Any] = {block.kind: block.text}
            if block.call:
                filled = {"input": block.call.arguments}
            message["content"].append(self._show(block, **filled))
        message["usage"].update(_usage_of(end))
        return {**message, "stop_reason": end.reason, "stop_sequence": end.stop or None}


def _usage_of(end: End) -> dict[str, int]:
    """Return the usage of an answer; cached tokens, if any, are counted apart."""
    usage = {"input_tokens": end.input_tokens, "output_tokens": end.output_tokens}
    if end.cache_read or end.cache_written:
        usage["input_tokens"] = max(end.input_tokens - end.cache_read - end.cache_written, 0)
        usage["cache_read_input_tokens"] = end.cache_read
        usage["cache_creation_input_tokens"] = end.cache_written
    return usage


class Messages(Dialect):
    """Anthropic's Messages API."""

    path = "/v1/messages"
    count_path = "/v1/messages/count_tokens"
    fields = {
        "model": "text", "messages": "list", "tools": "list", "stop_sequences": "list",
        "tool_choice": "object", "stream": "boolean", "max_tokens": "whole", "top_k": "whole",
        "temperature": "number", "top_p": "number"}
    writes = MessagesWriter

    def _read(self, request: dict[str, Any]) -> Talk:
        history, usable_tools = _read_turns(request["messages"])
        choice = request.get("tool_choice") or {}
        kind = choice.get("type")
        return Talk(
            alias=request["model"],
            turns=history.turns(),
            # Claude Code's billing line changes every time and would defeat the prompt cache.
            system=tuple(text
                         for text in read_content(request.get("system"), "system")["texts"]
                         if not text.startswith("x-anthropic-billing-header:")),
            tools=_read_tools(request.get("tools") or (), usable_tools),
            choice=kind if kind in ("any", "tool", "none") else "auto",
            chosen_tool=str(choice.get("name") or ""),
            one_call=choice.get("disable_parallel_tool_use") is True,
            max_tokens=request.get("max_tokens"),
            sampling=read_sampling(request),
            stops=read_stops(request.get("stop_sequences"), "stop_sequences"),
            is_stream=request.get("stream") is True,
            original=request,
            unshown=history.unshown())
