"""Servers that speak Chat Completions: vLLM, llama.cpp, LM Studio, OpenAI."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.config.names import full_model_name
from fleet.config.node import LoadedModel, NodeModel
from fleet.speech.backend import (
    TOKENS_LIMIT,
    Backend,
    Reader,
    error_words,
    first_field,
    parse_answer,
    read_field,
)
from fleet.speech.rendering import chat_messages, render_tools
from fleet.speech.talk import Ask, NoField, Refusal
from fleet.start.errors import NodeFailure
from fleet.text.json import render_json
from fleet.text.phrases import some_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from fleet.config.sections import Model
    from fleet.speech.answer import Delta
    from fleet.speech.talk import Reply, Talk


# A server is a row: where its version and its models are, and what it accepts. The facts about a
# model are in one of a few places, whatever the server.

OPTIONAL_FIELDS = ("metadata", "context_management", "output_config",
                   "thinking", "tool_choice", "temperature", "top_k", "top_p", "service_tier",
                   "container", "mcp_servers", "chat_template_kwargs", "stream_options",
                   "parallel_tool_calls", "response_format", "max_tokens")
_PIXELS = {"/9j/": "image/jpeg", "R0lG": "image/gif", "UklG": "image/webp"}  # else PNG

# Where a list has the facts of a model: llama-server; vLLM and others; LM Studio.
_SIZES = ("meta.size", "size_bytes")
_QUANTIZATIONS = ("meta.ftype", "quantization.name")
_TRAINED_CONTEXTS = ("meta.n_ctx_train", "max_context_length")
_CONTEXTS = ("meta.n_ctx", "max_model_len", "context_length", "context_window",
             "config.context_length")


class ChatServer(Backend):
    """Any server for Chat Completions; listed models are loaded unless a subclass knows more."""

    fixes_schemas = False  # it accepts only the schemas that llama.cpp accepts
    # It passes `enable_thinking` and old thoughts to the chat template.
    has_template = False

    def list_models(self) -> Ask:
        return self._list(self.list_path, self._model)

    def _model(self, entry: dict[str, Any]) -> NodeModel:
        """Return a listed model; for one that a router does not run, little is known."""
        count = first_field(entry, ("meta.n_params",), int)
        parameters = f"{count / 1e9:.1f}B" if count >= 5e7 else ""
        trained = first_field(entry, _TRAINED_CONTEXTS, int)
        if not trained and "status" not in entry:
            trained = _read_context(entry)
        return NodeModel(
            name=entry[self.list_key], size=first_field(entry, _SIZES, int),
            parameters=parameters or read_field(entry, "params_string"),
            quantization=first_field(entry, _QUANTIZATIONS),
            capabilities=_read_abilities(entry), trained_context=trained or None)

    def list_loaded(self) -> Ask:
        def parse(value: Any) -> tuple[LoadedModel, ...]:
            loaded = []
            for entry in self._entries(value, self.list_path):
                for instance in self._instances(entry):
                    loaded.append(LoadedModel(
                        entry[self.list_key], _read_context(instance), None,
                        first_field(entry, _SIZES, int), ""))
            return tuple(loaded)
        return self._ask(self.list_path, parse)

    def _instances(self, entry: dict[str, Any]) -> list[Any]:
        """Return the instances of a listed model; each says its context."""
        return [entry]

    def load(self, model: Model, *, unload: bool = False) -> Ask:
        said = f"stays: {self.title} keeps what it serves" if unload else ""
        return self._ask(self.list_path, lambda value: said)

    def chat(self, talk: Talk, model: Model) -> Ask:
        keeps_thoughts = model.thinking and self.has_template
        messages = _open_messages(chat_messages(talk, keeps_thoughts))
        payload = {
            "model": model.ollama_model, "messages": messages, "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": min(talk.max_tokens or model.max_output, model.max_output),
            **talk.sampling}
        if talk.tools:
            choices = {"any": "required", "tool": "required", "none": "none"}
            payload["tool_choice"] = choices.get(talk.choice, "auto")
            payload["tools"] = render_tools(talk, fixes=self.fixes_schemas)
            if talk.one_call:
                payload["parallel_tool_calls"] = False
        if self.has_template:
            payload["chat_template_kwargs"] = {"enable_thinking": model.thinking}
        if isinstance(talk.answer_format, dict):
            payload["response_format"] = {"type": "json_schema", "json_schema": {
                "name": "answer", "schema": talk.answer_format}}
        elif talk.answer_format:
            payload["response_format"] = {"type": "json_object"}
        return Ask("/v1/chat/completions", error_words, payload)


def _read_context(entry: object) -> int:
    """Return the context of a listed model, 0 if the server does not say."""
    context = first_field(entry, _CONTEXTS, int)
    return context if context < TOKENS_LIMIT else 0


def _read_abilities(entry: dict[str, Any]) -> tuple[str, ...] | None:
    """Return what a listed model can do, None if the server does not say."""
    if entry.get("type") == "embedding":
        return ("embedding",)
    if "image" in first_field(entry, ("architecture.input_modalities",), list):
        return ("completion", "tools", "thinking", "vision")
    can = read_field(entry, "capabilities", dict)
    words = {"trained_for_tool_use": "tools", "vision": "vision", "reasoning": "thinking"}
    able = [word for name, word in words.items() if can.get(name)]
    return ("completion", *able) if can else None


def _open_messages(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert chat messages to Chat Completions: images are parts, arguments are text.

    There a tool result is only text, so its images follow after all results.
    """
    shown = []
    images: list[dict[str, Any]] = []  # images not yet in a message
    for message in messages:
        role, text = message["role"], message["content"]
        if role == "assistant" and images:
            shown.append({"role": "user", "content": images})
            images = []
        for image in message.pop("images", ()):
            url = f"data:{_PIXELS.get(image[:4], 'image/png')};base64,{image}"
            images.append({"type": "image_url", "image_url": {"url": url}})
        if role == "user" and images:
            message["content"] = [*images,
                                  *([{"type": "text", "text": text}] if text else [])]
            images = []

        message.pop("tool_name", None)
        if "thinking" in message:
            message["reasoning_content"] = message.pop("thinking")
        for call in message.get("tool_calls", ()):
            function = call["function"]
            function["arguments"] = render_json(function["arguments"]).decode("ascii")
            call["type"] = "function"
        shown.append(message)
    return [*shown, {"role": "user", "content": images}] if images else shown


class ChatReader(Reader):
    """Reads the `data:` lines of a Chat Completion; other lines are names and comments."""

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        self._reason = ""
        self._usage: dict[str, Any] = {}
        self._drafts: list[dict[str, Any]] = []  # calls, in the order they began
        self._growing: dict[int, dict[str, Any]] = {}  # the latest call of each index

    def feed(self, line: bytes | bytearray) -> list[Delta]:
        if line.startswith(b"data:"):
            line = line[5:].strip()
            return self.close() if line == b"[DONE]" else super().feed(line)
        # An error may come without `data:`.
        return super().feed(line) if line.startswith(b"{") else []

    def read(self, part: dict[str, Any]) -> None:
        usage = part.get("usage")
        if usage:
            counts = {name: first_field(usage, (path,), int)
                      for name, path in _CHAT_COUNTS.items()}
            self._usage.update((name, count) for name, count in counts.items() if count)
        # llama-server's own.
        for name, key in _CHAT_TIMES.items() if "timings" in part else ():
            self._usage[name] = read_field(part["timings"], key, float) / 1000
        choices = read_field(part, "choices", list)
        choice = choices[0] if choices else None
        self._reason = read_field(choice, "finish_reason") or self._reason

        delta = read_field(choice, "delta", dict)
        self.say("thinking", first_field(delta, ("reasoning_content", "reasoning")))
        self.say("text", read_field(delta, "content"))
        for number, value in enumerate(read_field(delta, "tool_calls", list)):
            self.has_begun = True
            has_index = isinstance(value, dict) and type(value.get("index")) is int
            draft = self._draft_of(value["index"] if has_index else number,
                                   read_field(value, "id"))
            function = read_field(value, "function", dict)
            draft["name"] = draft["name"] or read_field(function, "name")
            arguments = function.get("arguments")
            if isinstance(arguments, dict):
                arguments = render_json(arguments).decode("ascii")
            draft["pieces"].append(arguments if isinstance(arguments, str) else "")

    def _draft_of(self, index: int, call_id: str) -> dict[str, Any]:
        """Return the call under construction at an index; a new id starts a new call.

        Some servers send index 0, or none, for each of several calls.
        """
        draft = self._growing.get(index)
        if draft is None or (call_id and draft["id"] and call_id != draft["id"]):
            draft = self._growing[index] = {"id": call_id, "name": "", "pieces": []}
            self._drafts.append(draft)
        draft["id"] = draft["id"] or call_id
        return draft

    def close(self) -> list[Delta]:
        self._deltas = []
        if self._reason:
            is_cut = self._reason == "length"
            for draft in self._drafts:
                self.call(draft["id"], draft["name"], "".join(draft["pieces"]), is_cut=is_cut)
            self._drafts, self._growing = [], {}
            self.end("max_tokens" if is_cut else "end_turn", **self._usage)
        return self._deltas

    def refusal(self, status: int, words: str) -> Refusal:
        refusal = super().refusal(status, words)
        if type(refusal) is Refusal and refusal.http == 400:
            # A server may refuse some of them, and then works without.
            for name in OPTIONAL_FIELDS:
                if re.search(rf"(?<![\w.]){name}(?!\w)", words):
                    is_needed = name == "max_tokens" and self._provider != OpenAI.name
                    return refusal if is_needed else NoField(refusal.what, name)
        return refusal


ChatServer.reads = ChatReader
_CHAT_TIMES = {"prompt_seconds": "prompt_ms", "answer_seconds": "predicted_ms"}
_CHAT_COUNTS = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens",
                "cache_read": "prompt_tokens_details.cached_tokens"}


class OpenAI(ChatServer):
    """MLX's servers, LocalAI, TabbyAPI, OpenRouter, llama.cpp before b7188."""

    name = "openai"


class VLLM(ChatServer):
    """vLLM: one model. Facts: its source (0.28); at least 0.11.1.

    Tools want --enable-auto-tool-choice and a --tool-call-parser.
    """

    name = "vllm"
    version_path, version_field = "/version", "version"
    has_template = True


class LlamaCpp(ChatServer):
    """llama-server: one model that is always loaded, or a router that loads on demand.

    Facts: b10488, with one model and as a router (`--models-dir`); at least b7188.
    """

    name = "llamacpp"
    fixes_schemas = has_template = True

    def identify(self) -> Ask:
        def extract(reply: Reply) -> str:
            if "llama.cpp" not in reply.headers.get("server", ""):
                raise NodeFailure(f"not {self.name}", "its answer is not llama-server's")
            if reply.status != 200:
                raise NodeFailure(f"http {reply.status}", error_words(reply))
            build = read_field(parse_answer(reply.body, self), "build_info")
            number = build.partition("-")[0]
            return "" if number == "b0" else number  # b0: a build without a number
        return Ask("/props", extract)

    def _instances(self, entry: dict[str, Any]) -> list[Any]:
        return [entry] if _load_state(entry) in ("loaded", "sleeping") else []

    def describe(self, model_name: str) -> Ask:
        def parse(value: Any) -> dict[str, object]:
            abilities = read_field(value, "chat_template_caps", dict)
            if not abilities:  # a router cannot say this about its models
                return {}
            words = ["completion", "thinking"]  # it never refuses `think`
            if abilities.get("supports_tools") is True:
                words.append("tools")
            if first_field(value, ("modalities.vision",), bool):
                words.append("vision")
            return {"capabilities": tuple(words)}
        return self._ask("/props", parse)

    def load(self, model: Model, *, unload: bool = False) -> Ask:
        def extract(reply: Reply) -> str:
            said = error_words(reply)
            if reply.status == 404 and unload:
                return "stays: llama-server keeps its one model"
            # A server with one model has no such path; other answers do not forbid
            # loading.
            if reply.status in (200, 404) or "running" in said:
                return ""
            raise NodeFailure(f"http {reply.status}", said)
        verb = "unload" if unload else "load"
        return Ask(f"/models/{verb}", extract, {"model": model.ollama_model})

    def check_loading(self, model: Model) -> Ask | None:
        def parse(value: Any) -> bool:
            entries = self._entries(value, self.list_path)
            for entry in entries:
                if full_model_name(entry["id"]) != full_model_name(model.ollama_model):
                    continue
                if first_field(entry, ("status.failed",), bool):
                    code = first_field(entry, ("status.exit_code",), int)
                    raise NodeFailure("error",
                                      f"llama-server could not load it (exit code {code})")
                return _load_state(entry) == "loaded"
            known = some_of([f"`{entry['id']}`" for entry in entries], 5)
            raise NodeFailure("http 404",
                              f"it has no model `{model.ollama_model}`; it has {known}")
        return self._ask(self.list_path, parse)


def _load_state(entry: dict[str, Any]) -> str:
    """Return whether a listed model is loaded; the only model of a server always is."""
    return first_field(entry, ("status.value",)) or "loaded"


class LMStudio(ChatServer):
    """LM Studio: each load chooses its context.

    Facts: its documentation of the v1 REST API (0.4.1 and later); it was not run here.
    """

    name = "lmstudio"
    loads_twice = True
    version_path = list_path = "/api/v1/models"
    list_field, list_key = "models", "key"

    def _instances(self, entry: dict[str, Any]) -> list[Any]:
        return [*read_field(entry, "loaded_instances", list)]

    def load(self, model: Model, *, unload: bool = False) -> Ask:
        if unload:
            return self._ask("/api/v1/models/unload", lambda value: "",
                             {"instance_id": model.ollama_model})
        return self._ask("/api/v1/models/load", lambda value: "", {
            "model": model.ollama_model, "context_length": model.context})
