"""Ollama's own API."""
from __future__ import annotations

import contextlib
import functools
import re
from typing import TYPE_CHECKING

from fleet.config.node import LoadedModel, NodeModel
from fleet.plan.memory import plan_cache, unread_layers
from fleet.speech.backend import (
    Backend,
    PullStep,
    Reader,
    error_words,
    read_field,
    refuse_error,
)
from fleet.speech.rendering import chat_messages, render_tools, state_tool_choice
from fleet.speech.talk import Ask
from fleet.start.constants import ENOUGH_BYTES
from fleet.start.errors import NodeFailure
from fleet.text.json import parse_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from fleet.config.sections import Model
    from fleet.speech.talk import Reply, Talk


# Facts: Ollama 0.32.15. Its /v1/messages has no num_ctx, keep_alive, think or truncate: each
# request there would reload the model or lose the beginning of its prompt.


class Ollama(Backend):
    """The Backend for Ollama's own API."""

    name = "ollama"
    loads_as_asked = True
    version_path, version_field = "/api/version", "version"
    list_field, list_key = "models", "name"
    log = ("journalctl -u ollama (Linux), ~/.ollama/logs/server.log (macOS), "
           "%LOCALAPPDATA%\\Ollama\\server.log (Windows) or docker logs ollama")

    def list_models(self) -> Ask:
        return self._list("/api/tags", self._model)

    def list_loaded(self) -> Ask:
        return self._list("/api/ps", self._loaded)

    def describe(self, model_name: str) -> Ask:
        return self._ask("/api/show", functools.partial(self._parse_show, model_name),
                         {"model": model_name})

    def load(self, model: Model, *, unload: bool = False) -> Ask:
        return self._load(model, 0 if unload else model.keep_alive, [])

    def _load(self, model: Model, keep_alive: Any, messages: list[dict[str, str]]) -> Ask:
        # With a num_ctx other than the route's, the route's first request would
        # load it again.
        return self._ask("/api/chat", self._parse_loading, {
            "model": model.ollama_model, "messages": messages, "stream": False,
            "think": model.thinking, "keep_alive": keep_alive,
            "options": {"num_ctx": model.context}})

    def pull(self, model: Model) -> Ask:
        return self._ask("/api/pull", self._parse_pull, {"model": model.ollama_model})

    def chat(self, talk: Talk, model: Model) -> Ask:
        messages = chat_messages(state_tool_choice(talk), model.thinking)
        # num_ctx must be what warm-up sent, else Ollama loads the model again.
        most = min(talk.max_tokens or model.max_output, model.max_output)
        options = {"num_ctx": model.context, "num_predict": most, **talk.sampling}
        payload = {"model": model.ollama_model, "stream": True, "truncate": False,
                   "think": model.thinking, "keep_alive": model.keep_alive,
                   "options": options, "messages": messages}
        if talk.tools and talk.choice != "none":
            payload["tools"] = render_tools(talk, fixes=True)
        if talk.answer_format:
            payload["format"] = talk.answer_format
        return Ask("/api/chat", error_words, payload)

    def _model(self, entry: dict[str, Any]) -> NodeModel:
        details = read_field(entry, "details", dict)
        # Only /api/show knows what a model can do; but these can do nothing else.
        is_embedding = "bert" in read_field(details, "family")
        return NodeModel(
            name=entry["name"],
            size=read_field(entry, "size", int),
            parameters=read_field(details, "parameter_size"),
            quantization=read_field(details, "quantization_level"),
            capabilities=("embedding",) if is_embedding else None,
            trained_context=read_field(details, "context_length", int) or None,
            remote=read_field(entry, "remote_host") or read_field(entry, "remote_model"),
            digest=read_field(entry, "digest")[:64])

    def _parse_show(self, model_name: str, value: Any) -> dict[str, object]:
        """Return what /api/show adds to a model: what it can do and what it was trained for.

        `more` is an Ask for the rest of it.
        """
        info = read_field(value, "model_info", dict)
        length_key = read_field(info, "general.architecture") + ".context_length"
        words = read_field(value, "capabilities", list)
        facts = {
            "capabilities": tuple(word for word in words if isinstance(word, str)),
            "trained_context": read_field(info, length_key, int),
            **plan_cache(info)}
        if unread_layers(info):
            # The whole answer has the words of its tokenizer, megabytes of them, behind what
            # is wanted: keys come in their alphabetical order.
            facts["more"] = Ask("/api/show", functools.partial(self._parse_layers, info),
                                {"model": model_name, "verbose": True}, enough=ENOUGH_BYTES)
        return {key: fact for key, fact in facts.items() if fact}

    def _parse_layers(self, info: Mapping[str, Any], reply: Reply) -> dict[str, object]:
        """Return the memory of a model's context, from the beginning of a verbose /api/show."""
        known = dict(info)
        for name in unread_layers(info):
            key = re.escape(name).encode()
            match = re.search(rb'"%b":\s*(\[[^][]{1,9999}\])' % key, reply.body)
            if match:
                with contextlib.suppress(ValueError):
                    known[name] = parse_json(match[1])
        return {**plan_cache(known)}

    def _loaded(self, entry: dict[str, Any]) -> LoadedModel:
        size = read_field(entry, "size", int)
        percent = None
        if size and "size_vram" in entry:
            percent = min(100, round(100 * read_field(entry, "size_vram", int) / size))
        return LoadedModel(
            name=entry["name"], context=read_field(entry, "context_length", int),
            gpu_percent=percent, size=size, expires=read_field(entry, "expires_at"))

    def load_with_prompt(self, model: Model) -> Ask:
        # A server that imitates Ollama may refuse a chat without a message.
        wish = {"role": "user", "content": "Reply with ok."}
        return self._load(model, model.keep_alive, [wish])

    def _parse_loading(self, value: Any) -> None:
        if not read_field(refuse_error(value), "done", bool):
            raise NodeFailure("bad answer", "its answer to a load is not Ollama's")

    def _parse_pull(self, value: Any) -> PullStep:
        step = refuse_error(value)
        return PullStep(
            layer=read_field(step, "digest"), completed=read_field(step, "completed", int),
            total=read_field(step, "total", int),
            is_done=read_field(step, "status") == "success")  # errors come with 200, too


class OllamaReader(Reader):
    """Reads the lines of /api/chat."""

    has_begun = True

    def read(self, part: dict[str, Any]) -> None:
        message = part.get("message")
        if type(message) is not dict:
            message = {}
        if "thinking" in message:
            self.say("thinking", read_field(message, "thinking"))
        text = message.get("content")
        if type(text) is str:
            self.say("text", text)
        if "tool_calls" in message:
            for call in read_field(message, "tool_calls", list):
                function = read_field(call, "function", dict)
                self.call(read_field(call, "id"), read_field(function, "name"),
                          function.get("arguments"))
        if part.get("done") is not True:
            return

        is_cut = part.get("done_reason") == "length" and not self._calls
        times = {name: read_field(part, f"{counter}_duration", int) / 1e9
                 for name, counter in _OLLAMA_TIMES.items()}
        self.end("max_tokens" if is_cut else "end_turn",
                 input_tokens=read_field(part, "prompt_eval_count", int),
                 output_tokens=read_field(part, "eval_count", int), **times)


Ollama.reads = OllamaReader
_OLLAMA_TIMES = {"load_seconds": "load", "prompt_seconds": "prompt_eval",
                 "answer_seconds": "eval"}
