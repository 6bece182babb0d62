"""Responses, the only dialect of codex, and the table of all dialects."""
from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fleet.speech.backend import read_field
from fleet.speech.chat import ChatCompletions, ChatWriter, OpenDialect, read_call_item
from fleet.speech.dialect import read_content, read_tool_output, render_event
from fleet.speech.messages import Messages
from fleet.speech.talk import Parts, Refusal, Tool, join_texts
from fleet.start.record import Record
from fleet.text.json import render_json

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from fleet.speech.answer import End
    from fleet.speech.chat import OpenTools
    from fleet.speech.dialect import Block, Dialect
    from fleet.speech.talk import Talk


def _read_item(item: Any, where: str, tools: OpenTools) -> tuple[str, Parts]:
    """Return (who, what) of an item of the input; an item of unknown type is empty."""
    if not isinstance(item, dict):
        raise Refusal(400, f"{where}: expected an object")
    kind = item.get("type", "message")
    parts = Parts()
    if kind == "message":
        role = read_field(item, "role")
        if role not in ("user", "assistant", "system", "developer"):
            raise Refusal(400, f"{where}: expected the role system, developer, "
                          "user or assistant")
        read_content(item.get("content"), where, parts)
        return "system" if role == "developer" else role, parts

    if kind in ("function_call", "custom_tool_call"):
        parts["calls"].append(read_call_item(read_field(item, "call_id"), item, where, tools))
        return "assistant", parts
    if kind in ("function_call_output", "custom_tool_call_output"):
        call_id = read_field(item, "call_id")
        return "user", read_tool_output(call_id, item.get("output"), where, parts)
    if kind == "reasoning":
        blocks = read_field(item, "summary", list) or read_field(item, "content", list)
        parts["thoughts"] += filter(None, [join_texts(read_field(block, "text")
                                                      for block in blocks)])
        return "assistant", parts
    if kind == "item_reference":
        raise Refusal(400, f"{where}: this gateway stores no items; send the item itself")
    return "user", parts


class _ItemKind(Record):
    """A kind of item in a response: the names of its events and fields."""

    type: str
    id_prefix: str
    text_event: str
    field: str  # the field with its text, or its only part
    part: dict[str, Any] | None = None
    index: str = ""  # the field of an event that says which part
    part_event: str = ""


_ITEM_KINDS = {
    "text": _ItemKind("message", "msg", "response.output_text", "content",
                      {"type": "output_text", "annotations": [], "logprobs": []},
                      "content_index", "response.content_part"),
    "thinking": _ItemKind("reasoning", "rs", "response.reasoning_summary_text", "summary",
                          {"type": "summary_text"}, "summary_index",
                          "response.reasoning_summary_part"),
    "call": _ItemKind("function_call", "fc", "response.function_call_arguments", "arguments"),
    "custom": _ItemKind("custom_tool_call", "ctc", "response.custom_tool_call_input",
                        "input")}


class ResponsesWriter(ChatWriter):
    """Writes a response.

    Clients react to `output_item.done` and `response.completed`. At `response.incomplete` codex
    drops the turn, so an answer cut at its length is completed, and says so inside. Comments do
    not keep codex waiting, `response.in_progress` does.
    """

    field_name = "input"

    def __init__(self, talk: Talk, answer_id: str) -> None:
        super().__init__(talk, answer_id)
        self.number = 1  # `begin` has 0 and 1
        self._place = ""  # the position of the open item, as rendered fields of an event

    def _numbered(self, kind: str, **more: Any) -> bytes:
        self.number += 1
        return render_event({"type": kind, "sequence_number": self.number, **more})

    def _response(self, **more: Any) -> dict[str, Any]:
        return {"id": f"resp_{self._id}", "object": "response", "created_at": self._talk.came,
                "status": "in_progress",
                "model": self._talk.alias, "output": [], "error": None,
                "incomplete_details": None, "instructions": None, "metadata": {}, "tools": [],
                "tool_choice": "auto", "parallel_tool_calls": not self._talk.one_call,
                "usage": None, **more}

    def begin(self) -> bytes:
        return b"".join(
            render_event({"type": kind, "sequence_number": number,
                          "response": self._response()})
            for number, kind in enumerate(("response.created", "response.in_progress")))

    def ping(self) -> bytes:
        return self._numbered("response.in_progress", response=self._response())

    def _kind(self, block: Block) -> _ItemKind:
        is_custom = block.call is not None and self.is_custom(block.call)
        return _ITEM_KINDS["custom" if is_custom else block.kind]

    def _item(self, block: Block, status: str = "completed") -> dict[str, Any]:
        kind, text = self._kind(block), block.text
        item = {"id": f"{kind.id_prefix}_{self._id}_{block.index}",
                                "type": kind.type}
        if block.kind != "thinking":
            item["status"] = status
        if block.call:
            tool = self._tools.get(block.call.name) or Tool(block.call.name, "", {})
            item.update(call_id=block.call.id, name=tool.own_name or tool.name)
            if tool.namespace:
                item["namespace"] = tool.namespace
            return {**item, kind.field: text}
        if block.kind == "text":
            item["role"] = "assistant"
        parts = [{**(kind.part or {}), "text": text}]
        return {**item, kind.field: [] if status == "in_progress" else parts}

    def _place_of(self, block: Block) -> dict[str, Any]:
        kind = self._kind(block)
        place = {"item_id": f"{kind.id_prefix}_{self._id}_{block.index}",
                                 "output_index": block.index}
        return {**place, kind.index: 0} if kind.part else place

    def start(self, block: Block) -> bytes:
        self._place = render_json(self._place_of(block))[1:-1].decode("ascii")
        said = self._numbered("response.output_item.added", output_index=block.index,
                              item=self._item(block, "in_progress"))
        return said + self._part(block, "added", "")

    def _part(self, block: Block, step: str, text: str) -> bytes:
        """Return the event that an item's only part was added or is done."""
        kind = self._kind(block)
        if not kind.part:
            return b""
        return self._numbered(f"{kind.part_event}.{step}", **self._place_of(block),
                              part={**kind.part, "text": text})

    def grow(self, block: Block, text: str) -> bytes:
        # Called for each token: a template costs a third of rendering the event.
        self.number += 1
        name = f"{self._kind(block).text_event}.delta"
        words = json.encoder.encode_basestring_ascii(text)
        return (f'event: {name}\ndata: {{"type":"{name}","sequence_number":{self.number},'
                f'{self._place},"delta":{words}}}\n\n').encode("ascii")

    def stop(self, block: Block) -> bytes:
        kind = self._kind(block)
        text = {kind.field if block.call else "text": block.text}
        said = self._numbered(f"{kind.text_event}.done", **self._place_of(block), **text)
        return said + self._part(block, "done", block.text) + self._numbered(
            "response.output_item.done", output_index=block.index, item=self._item(block))

    def fail(self, refusal: Refusal) -> bytes:
        """Return both final events: the AI SDK reacts to the first, codex to the second."""
        error = self.error(refusal)["error"]
        error["code"] = error["code"] or "server_error"
        # Only this code and these words make codex retry.
        if refusal.retry_seconds:
            error["code"] = "rate_limit_exceeded"
            error["message"] += f". Please try again in {refusal.retry_seconds}s."
        told = {"code": error["code"], "message": error["message"]}
        response = self._response(status="failed", error=told, output=self._output())
        return (self._numbered("error", **told, param=error["param"], error=error)
                + self._numbered("response.failed", response=response))

    def _output(self) -> list[dict[str, Any]]:
        return [self._item(block) for block in self._blocks if block is not self._open]

    def ending(self, end: End) -> bytes:
        return self._numbered("response.completed", response=self.whole(end))

    def whole(self, end: End) -> dict[str, Any]:
        usage = {"input_tokens": end.input_tokens,
                 "input_tokens_details": {"cached_tokens": end.cache_read},
                 "output_tokens": end.output_tokens,
                 "output_tokens_details": {"reasoning_tokens": 0},
                 "total_tokens": end.input_tokens + end.output_tokens}
        how: dict[str, Any] = {"status": "completed"}
        if end.reason == "max_tokens":
            how = {"status": "incomplete",
                   "incomplete_details": {"reason": "max_output_tokens"}}
        return self._response(**how, usage=usage, output=self._output())


class Responses(OpenDialect):
    """OpenAI's Responses API, without the parts that need a server with storage."""

    path = "/v1/responses"
    fields = {
        "model": "text", "input": "text or list", "instructions": "text", "tools": "list",
        "tool_choice": "text or object", "stream": "boolean", "max_output_tokens": "whole",
        "temperature": "number", "top_p": "number", "top_k": "whole", "text": "object",
        "parallel_tool_calls": "boolean"}
    writes = ResponsesWriter

    def _said(self, request: dict[str, Any],
              tools: OpenTools) -> Iterator[tuple[str, Parts]]:
        yield "system", read_content(request.get("instructions"), "instructions")
        items = request["input"]
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        for number, item in enumerate(items):
            yield _read_item(item, f"input.{number}", tools)


DIALECTS: dict[str, Dialect] = {dialect.path: dialect for dialect in (
    Messages(), ChatCompletions(), Responses())}


def dialect_of(path: str) -> Dialect | None:
    """Return the Dialect at a path, or None."""
    for dialect in DIALECTS.values():
        if path and path in (dialect.path, dialect.count_path):
            return dialect
    return None
