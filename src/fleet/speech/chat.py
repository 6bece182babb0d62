"""Chat Completions, and what it shares with Responses."""
from __future__ import annotations

import abc
import json
from typing import TYPE_CHECKING

from fleet.speech.backend import first_field, read_field
from fleet.speech.dialect import (
    PROMPT_MARKS,
    TOKEN_FIELDS,
    Dialect,
    History,
    Writer,
    block_text,
    read_content,
    read_sampling,
    read_stops,
    read_tool_output,
)
from fleet.speech.talk import Call, Parts, PromptTooLong, Refusal, Talk, Tool, read_arguments
from fleet.text.json import count_marks, render_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    from fleet.speech.answer import End
    from fleet.speech.dialect import Block


# -- what Chat Completions and Responses share --
#
# Facts of the real clients (opencode 1.18, codex 0.169, aider 0.86, qwen-code 0.24, pi 0.73,
# cn 1.5): system and developer messages may come twice and in the middle, and are joined at
# the front; a content, even a tool result's, is null, text or parts. Fields without a meaning for
# local models (reasoning effort, encrypted reasoning, stores, seeds, service tiers) are ignored;
# fields that would change the shape of the answer are refused.

# Fields that ask for something no node has, and the harmless values of each.
_UNKEPT_FIELDS: dict[str, tuple[object, ...]] = {
    "n": (None, 1), "logprobs": (None, False), "previous_response_id": (None, ""),
    "conversation": (None,), "background": (None, False)}


class OpenTools:
    """The tools of a request, each under a unique name."""

    def __init__(self, tools: Iterable[Any]) -> None:
        self._by_name: dict[str, Tool] = {}
        self._names: dict[tuple[str, str], str] = {}
        for tool in tools:
            self._add(tool, "")

    def _add(self, tool: Any, namespace: str) -> None:
        """Add a tool; tools of other types run on OpenAI's servers and are ignored."""
        kind = read_field(tool, "type")
        if kind == "namespace" and not namespace:
            for inner in read_field(tool, "tools", list):
                self._add(inner, read_field(tool, "name"))
        if kind not in ("function", "custom"):
            return
        words = tool.get(kind, tool)  # Chat Completions wraps it
        own_name = read_field(words, "name")
        if not own_name or (namespace, own_name) in self._names:
            return
        name = own_name
        if name in self._by_name:
            name = f"{namespace}__{own_name}"
        while name in self._by_name:  # another tool may have that name already
            name += "_"
        is_custom = kind == "custom"
        schema = _custom_schema(words) if is_custom else read_field(words, "parameters", dict)
        self._names[namespace, own_name] = name
        self._by_name[name] = Tool(name, read_field(words, "description"), schema, namespace,
                                   own_name, is_custom)

    def name_of(self, namespace: str, own_name: str) -> str:
        """Return the model's name of a tool, which may be gone."""
        return self._names.get((namespace, own_name), own_name) or "unknown"

    def tools(self) -> tuple[Tool, ...]:
        return tuple(self._by_name.values())


def _custom_schema(words: object) -> dict[str, Any]:
    """Return the schema of a tool that takes one text; its grammar becomes a description."""
    form = read_field(words, "format", dict)
    told = "The whole text."
    if read_field(form, "definition"):
        syntax = read_field(form, "syntax") or "a"
        told = f"The whole text, in this {syntax} grammar:\n{read_field(form, 'definition')}"
    return {"type": "object",
            "properties": {"input": {"type": "string", "description": told}},
            "required": ["input"]}


def _read_choice(choice: object, tools: OpenTools) -> tuple[str, str]:
    """Return which tools must be called (any, none, …), and the name if it is a single one."""
    if choice == "required":
        return "any", ""
    if choice == "none":
        return "none", ""
    if read_field(choice, "type") in ("function", "custom"):
        inner = read_field(choice, "function", dict) or read_field(choice, "custom", dict)
        name = read_field(inner or choice, "name")
        return "tool", tools.name_of(read_field(choice, "namespace"), name)
    return "auto", ""


def read_call_item(call_id: str, words: dict[str, Any], where: str, tools: OpenTools) -> Call:
    """Return a call of an earlier answer; a tool that takes one text has it as `input`."""
    name = tools.name_of(read_field(words, "namespace"), block_text(words, "name", where))
    if "input" in words:
        return Call(call_id, name, {"input": block_text(words, "input", where)})
    text = block_text(words, "arguments", where)
    sent = text.encode("utf-8", "surrogatepass")
    is_bounded = len(sent) < PROMPT_MARKS or count_marks(sent) < PROMPT_MARKS
    arguments = read_arguments(text) if is_bounded else None
    if arguments is None:  # Ollama answers 400 to anything but an object
        arguments = {"input": text}
    return Call(call_id, name, arguments)


def _read_format(form: object) -> object:
    """Return the required form of the answer: "json", a schema, or None."""
    kind = read_field(form, "type")
    if kind == "json_object":
        return "json"
    if kind == "json_schema":
        return (read_field(read_field(form, "json_schema", dict) or form, "schema", dict)
                or "json")
    return None


class OpenDialect(Dialect):
    """The parts of requests that Chat Completions and Responses share."""

    def _read(self, request: dict[str, Any]) -> Talk:
        for name, harmless in _UNKEPT_FIELDS.items():
            if request.get(name) not in harmless:
                raise Refusal(400, f"{name}: this gateway does not support it; leave it out")
        tools = OpenTools(request.get("tools") or ())
        choice, chosen_tool = _read_choice(request.get("tool_choice"), tools)
        history = History()
        for role, parts in self._said(request, tools):
            history.add(role, parts)
        limits = [request[name] for name in TOKEN_FIELDS
                  if name in self.fields and request.get(name) is not None]
        form = (request.get("response_format")
                or read_field(request.get("text"), "format", dict))
        return Talk(
            alias=request["model"],
            turns=history.turns(),
            system=tuple(history.system),
            tools=tools.tools(),
            choice=choice,
            chosen_tool=chosen_tool,
            one_call=request.get("parallel_tool_calls") is False,
            max_tokens=min(limits, default=None),
            sampling=read_sampling(request),
            stops=read_stops(request.get("stop"), "stop"),
            answer_format=_read_format(form),
            is_stream=request.get("stream") is True,
            thread=read_field(request, "prompt_cache_key"),
            wants_usage=first_field(request, ("stream_options.include_usage",), bool))

    @abc.abstractmethod
    def _said(self, request: dict[str, Any],
              tools: OpenTools) -> Iterator[tuple[str, Parts]]:
        """Yield (who, what) of each message."""


# -- Chat Completions: the rest of the world --


def _read_message(message: Any, where: str, tools: OpenTools) -> tuple[str, Parts]:
    """Return (who, what) of a message."""
    role = read_field(message, "role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise Refusal(400, f"{where}: expected the role system, developer, user, "
                      "assistant or tool")
    content = message.get("content")
    if role == "tool":
        call_id = block_text(message, "tool_call_id", where)
        return "user", read_tool_output(call_id, content, where, Parts())

    parts = read_content(content, where)
    if role == "assistant":
        thought = first_field(message, ("reasoning_content", "reasoning"))
        if thought:
            parts["thoughts"].append(thought)
        for call in read_field(message, "tool_calls", list):
            words = read_field(call, "custom", dict) or read_field(call, "function", dict)
            parts["calls"].append(read_call_item(read_field(call, "id"), words, where, tools))
    return "system" if role == "developer" else role, parts


def _chat_usage(end: End) -> dict[str, Any]:
    return {"prompt_tokens": end.input_tokens, "completion_tokens": end.output_tokens,
            "total_tokens": end.input_tokens + end.output_tokens,
            "prompt_tokens_details": {"cached_tokens": end.cache_read}}


_CHAT_REASONS = {"max_tokens": "length", "tool_use": "tool_calls"}  # any other is `stop`
_CHAT_FIELDS = {"text": "content", "thinking": "reasoning_content"}


class ChatWriter(Writer):
    """Writes a completion.

    Without a `finish_reason` opencode repeats its request forever, so only `end` writes the
    last event.
    """

    field_name = "messages"  # that an error is about

    def __init__(self, talk: Talk, answer_id: str) -> None:
        super().__init__(talk, answer_id)
        self._head = {"id": f"chatcmpl-{answer_id}", "object": "chat.completion.chunk",
                      "created": talk.came, "model": talk.alias}
        self._before = render_json(self._head)[:-1].decode("ascii")
        self._count = 0  # of calls

    def _event(self, **fields: Any) -> bytes:
        return b"data: %b\n\n" % render_json({**self._head, **fields})

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> bytes:
        return self._event(choices=[{"index": 0, "delta": delta, "finish_reason": reason}])

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def ping(self) -> bytes:
        return b": ping\n\n"

    def fail(self, refusal: Refusal) -> bytes:
        return b"data: %b\n\n" % render_json(self.error(refusal))

    @classmethod
    def error(cls, refusal: Refusal) -> dict[str, Any]:
        """Return an error in the words that clients react to.

        If a prompt is too long, this code and these words make opencode, pi and qwen-code compact,
        codex stop with a message, and aider show its help.
        """
        codes = {401: "invalid_api_key", 404: "not_found"}
        error = {"message": refusal.what, "type": refusal.kind, "param": None,
                 "code": codes.get(refusal.http)}
        if isinstance(refusal, PromptTooLong):
            words = (f"This model's maximum context length is {refusal.maximum} tokens. "
                     f"However, your messages resulted in {refusal.tokens} tokens "
                     f"({refusal.what}).")
            error.update(message=words, param=cls.field_name, code="context_length_exceeded")
        return {"error": error}

    def is_custom(self, call: Call) -> bool:
        """Tell whether a called tool takes one text."""
        return call.name in self._tools and self._tools[call.name].is_custom

    def input_text(self, call: Call) -> str:
        text = call.arguments.get("input")
        if self.is_custom(call) and isinstance(text, str):
            return text
        return super().input_text(call)

    def _show_call(self, block: Block) -> dict[str, Any]:
        assert block.call
        kind, name = "function", "arguments"
        if self.is_custom(block.call):
            kind, name = "custom", "input"
        return {"id": block.call.id, "type": kind,
                kind: {"name": block.call.name, name: block.text}}

    def grow(self, block: Block, text: str) -> bytes:
        if block.call:
            self._count += 1
            call = {"index": self._count - 1, **self._show_call(block)}
            return self._chunk({"tool_calls": [call]})
        # Called for each token: a template costs a third of rendering the event.
        words = json.encoder.encode_basestring_ascii(text)
        return (f'data: {self._before},"choices":[{{"index":0,"delta":'
                f'{{"{_CHAT_FIELDS[block.kind]}":{words}}},"finish_reason":null}}]}}\n\n'
                ).encode("ascii")

    def ending(self, end: End) -> bytes:
        last = self._chunk({}, _CHAT_REASONS.get(end.reason, "stop"))
        if self._talk.wants_usage:
            last += self._event(choices=[], usage=_chat_usage(end))
        return last + b"data: [DONE]\n\n"

    def whole(self, end: End) -> dict[str, Any]:
        said = {kind: "".join(block.text for block in self._blocks if block.kind == kind)
                for kind in _CHAT_FIELDS}
        message: dict[str, Any] = {"role": "assistant", "content": said["text"] or None}
        if said["thinking"]:
            message["reasoning_content"] = said["thinking"]
        calls = [self._show_call(block) for block in self._blocks if block.call]
        if calls:
            message["tool_calls"] = calls
        choice = {"index": 0, "message": message, "logprobs": None,
                  "finish_reason": _CHAT_REASONS.get(end.reason, "stop")}
        return {**self._head, "object": "chat.completion", "choices": [choice],
                "usage": _chat_usage(end)}


class ChatCompletions(OpenDialect):
    """OpenAI's Chat Completions API."""

    path = "/v1/chat/completions"
    fields = {
        "model": "text", "messages": "list", "tools": "list", "tool_choice": "text or object",
        "stream": "boolean", "max_tokens": "whole", "max_completion_tokens": "whole",
        "temperature": "number", "top_p": "number", "top_k": "whole", "stop": "text or list",
        "response_format": "object", "parallel_tool_calls": "boolean"}
    writes = ChatWriter

    def _said(self, request: dict[str, Any],
              tools: OpenTools) -> Iterator[tuple[str, Parts]]:
        for number, message in enumerate(request["messages"]):
            yield _read_message(message, f"messages.{number}", tools)
