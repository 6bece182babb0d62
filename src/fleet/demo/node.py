"""A simulated Ollama."""
from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from fleet.config.address import show_host
from fleet.config.names import full_model_name
from fleet.demo.pace import FOR_EVER, NodeAnswer, Pace
from fleet.gateway.reception import Reception
from fleet.gateway.server import BODY_LIMIT_BYTES, BODY_SECONDS
from fleet.speech.backend import read_field
from fleet.text.json import parse_json, render_json
from fleet.world.wire import ClientGone

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from fleet.speech.talk import Refusal
    from fleet.world.visitor import Visitor
    from fleet.world.world import World


# The server's side of what `speech/ollama` speaks: the tests know no other.


class SimulatedNode(Reception):
    """Answers as Ollama 0.32.15 does, for models that are made up.

    `models` says of each by its name what Ollama would: size, parameters, quantization,
    family, capabilities, context. `loaded` is {name: context}; `reply` makes the pieces of a
    model's answer of what it is asked.
    """

    head = ""  # of each answer

    def __init__(self, world: World, models: Mapping[str, Mapping[str, Any]], *,
                 host: str = "127.0.0.1", port: int = 0, pace: Pace | None = None) -> None:
        super().__init__(world, ())
        self.models: dict[str, dict[str, Any]] = {}
        for name, told in models.items():
            self.models[name if ":" in name.rpartition("/")[2]
                        else f"{name}:latest"] = dict(told)
        self.pace, self.port = pace or Pace(), port
        self.loaded: dict[str, int] = {}
        self.version = "0.32.15"
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
        self._serving = threading.Thread(target=self.serve, args=(listener,), daemon=True)
        self._serving.start()

    def fall_asleep(self) -> None:
        """Stop answering, end running answers, and forget the loaded models."""
        self.stop("asleep")
        if self._serving:
            self._serving.join()
        for visitor in self._visitors.copy():
            visitor.cut()
        self.loaded.clear()

    close = fall_asleep  # for good

    def reply(self, payload: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the messages that an answer is made of, one a token."""
        return [{"content": piece} for piece in ("PO", "NG")]

    def count(self, payload: dict[str, Any]) -> int:
        """Return how many tokens a prompt has."""
        return len(render_json([payload.get("messages"), payload.get("tools")])) // 4

    # -- what Ollama answers --

    def answer(self, path: str, payload: Any) -> NodeAnswer:
        """Return its answer to a request."""
        if path == "/api/version":
            return NodeAnswer(200, {"version": self.version})
        if path == "/api/tags":
            return NodeAnswer(200, {"models": [self._tag(name) for name in self.models]})
        if path == "/api/ps":
            return NodeAnswer(200,
                              {"models": [self._show_loaded(name) for name in self.loaded]})
        typed = read_field(payload, "model")
        if path not in ("/api/show", "/api/chat"):
            return NodeAnswer(404, b"404 page not found")
        for name in self.models:
            if full_model_name(name) == full_model_name(typed):
                return self._show(name) if path == "/api/show" else self._chat(name, payload)
        return NodeAnswer(404, {"error": f"model '{typed}' not found"})

    def _tag(self, name: str) -> dict[str, Any]:
        told = self.models[name]
        return {"name": name, "model": name, "modified_at": "2026-08-21T10:00:00Z",
                "size": told.get("size", 4_700_000_000), "digest": "0" * 64,
                "details": {"parent_model": "", "format": "gguf",
                            "family": told.get("family", "llama"), "families": None,
                            "parameter_size": told.get("parameters", "7.6B"),
                            "quantization_level": told.get("quantization", "Q4_K_M")},
                "capabilities": ["completion"]}  # the real one misses the tools here, too

    def _show_loaded(self, name: str) -> dict[str, Any]:
        size = self.models[name].get("size", 4_700_000_000)
        return {"name": name, "model": name, "size": size, "digest": "0" * 64, "details": {},
                "expires_at": FOR_EVER, "size_vram": size,
                "context_length": self.loaded[name]}

    def _show(self, name: str) -> NodeAnswer:
        told = self.models[name]
        info = {"general.architecture": "llama",
                "llama.context_length": told.get("context", 131072)}
        return NodeAnswer(200, {
            "license": "", "details": self._tag(name)["details"], "model_info": info,
            "capabilities": told.get("capabilities", ["completion", "tools"])})

    def _chat(self, name: str, payload: dict[str, Any]) -> NodeAnswer:
        done = {"model": payload["model"], "created_at": "2026-08-21T10:00:00Z", "done": True,
                "message": {"role": "assistant", "content": ""}}
        self._load(name, payload)
        if not payload["messages"]:
            return NodeAnswer(200, {**done, "done_reason": "load"})

        pieces = self.reply(payload)
        lines = [{**done, "done": False,
                  "message": {"role": "assistant", "content": "", **piece}}
                 for piece in pieces]
        last = {**done, "done_reason": "stop", "prompt_eval_count": self.count(payload),
                "eval_count": len(pieces)}
        if payload.get("stream", True):
            return NodeAnswer(200, [*lines, last])
        whole = "".join(piece.get("content", "") for piece in pieces)
        return NodeAnswer(200, {**last, "message": {"role": "assistant", "content": whole}})

    def _load(self, name: str, payload: dict[str, Any]) -> None:
        """Hold a model with the context that it is asked with."""
        context = read_field(payload, "options", dict).get("num_ctx", 4096)
        held = self.loaded.pop(name, None)
        if held != context:
            self.world.sleep(self.pace.load_seconds)
        self.loaded[name] = min(context, self.models[name].get("context", 131072))

    # -- the wire --

    def _respond(self, visitor: Visitor, method: str, target: str,
                 headers: dict[str, str]) -> None:
        self._visitors[visitor] = "asking"
        body = visitor.read_body(BODY_LIMIT_BYTES, BODY_SECONDS)
        answer = self.answer(target, parse_json(body) if body else None)
        if isinstance(answer.value, list):
            self._send_lines(visitor, answer.value)
        elif isinstance(answer.value, bytes):
            visitor.reply(answer.status, answer.value, head=self.head)
        else:
            visitor.reply(answer.status, render_json(answer.value), head=self.head)

    def _send_lines(self, visitor: Visitor, lines: Sequence[Mapping[str, Any]]) -> None:
        """Send lines as a model makes them: after it has read the prompt, one a token."""
        last = lines[-1]
        if self.pace.prompt_rate and last.get("prompt_eval_count"):
            self.world.sleep(last["prompt_eval_count"] / self.pace.prompt_rate)
        head = f"{self.head}Content-Type: application/x-ndjson\r\n"
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
