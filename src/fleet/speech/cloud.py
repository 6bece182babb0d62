"""Anthropic's API as a machine of the fleet, and the table of all backends."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.speech.answer import Delta
from fleet.speech.backend import Reader, error_words, first_field, parse_answer, read_field
from fleet.speech.chat_servers import VLLM, ChatReader, ChatServer, LlamaCpp, LMStudio, OpenAI
from fleet.speech.ollama import Ollama
from fleet.speech.talk import Ask, NoImages, PromptTooLong, Refusal
from fleet.start.errors import NodeFailure
from fleet.start.gate import LatePattern
from fleet.text.json import render_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from fleet.config.sections import Model, Node
    from fleet.speech.backend import Backend
    from fleet.speech.talk import Reply, Talk


# A Messages request goes there unchanged, and the answer comes back unchanged: signed thinking,
# cache marks and blocks of its own servers would be useless if changed, and new fields pass
# through. Other dialects are translated to Chat Completions.


class HandedBack(Refusal):
    """A refusal by a cloud, which goes back to the client unchanged."""

    def __init__(self, reply: Reply, words: str) -> None:
        seconds = reply.headers.get("retry-after", "")
        retry_seconds = int(seconds) if re.fullmatch("[0-9]{1,5}", seconds) else 0
        super().__init__(reply.status, words, retry_seconds=retry_seconds)
        self.reply = reply
        # After 401 the client renews its login; no fallback can do that.
        self.is_final = reply.status in (400, 401, 403, 404, 413)


HANDED_BACK = LatePattern("retry-after(-ms)?|x-should-retry|anthropic-ratelimit-[a-z0-9-]{1,64}")


class Anthropic(ChatServer):
    """api.anthropic.com, or another Messages endpoint outside the house."""

    name = "anthropic"
    takes_formats = False  # it ignores them silently
    takes_messages = True

    def key_headers(self, key: str) -> dict[str, str]:
        return {"x-api-key": key}

    def _instances(self, entry: dict[str, Any]) -> list[Any]:
        return []  # there is nothing to load

    def _ask(self, path: str, parse: Callable[[Any], Any], payload: object = None) -> Ask:
        """Ask for the models; an answer that asks for a login counts, too."""
        def extract(reply: Reply) -> Any:
            value = parse_answer(reply.body, self)
            words = error_words(reply)
            if (reply.status == 401 and "invalid" not in words
                    and read_field(value, "error", dict)):
                return parse({"data": []})
            if reply.status != 200:
                raise NodeFailure(f"http {reply.status}", words)
            return parse(value)
        return Ask(path, extract, headers={"anthropic-version": "2023-06-01"})

    def chat(self, talk: Talk, model: Model) -> Ask:
        if talk.original is None:
            return super().chat(talk, model)
        payload = {"max_tokens": model.max_output, **talk.original, "model": model.ollama_model}
        return Ask("/v1/messages", error_words, payload, {"anthropic-version": "2023-06-01"})

    def reader(self, talk: Talk, model: Model, estimate: int) -> Reader:
        reads = CloudReader if talk.original else CloudChatReader
        return reads(self.name, talk, model, estimate)


class CloudChatReader(ChatReader):
    """Reads a cloud's answer; refusals go back to the client."""

    def refuse(self, reply: Reply, words: str) -> Refusal:
        refusal = self.refusal(reply.status, words)
        if isinstance(refusal, (PromptTooLong, NoImages)):  # these exist in each dialect
            return refusal
        return HandedBack(reply, words or f"it answered {reply.status}")


class CloudReader(CloudChatReader):
    """Passes on the answer of /v1/messages; reads only how it ended and its counts."""

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        self._came = b""  # the JSON of this line
        # Sent with the first content: until then another machine may take over.
        self._beginning: list[Delta] = []
        self._pieces: list[bytes] = []  # of an answer without a stream

    def feed(self, line: bytes | bytearray) -> list[Delta]:
        if self._talk.is_stream:
            self._came = bytes(line[5:]).strip()
            return super().feed(line)
        self.has_begun = True
        self._pieces.append(bytes(line))
        return []

    def read(self, part: dict[str, Any]) -> None:
        kind = read_field(part, "type") if self._talk.is_stream else "message"
        message = read_field(part, "message", dict) or part
        self._usage.update(read_field(message, "usage", dict))
        self._reason = first_field(part, ("delta.stop_reason", "stop_reason")) or self._reason
        if not re.fullmatch("[a-z_.]{1,64}", kind):
            raise NodeFailure("bad answer", "it sent an event without a name")
        if kind == "message":
            came = {**part, "model": self._talk.alias}
            self._deltas.append(Delta("raw", kind, raw=render_json(came)))
        if kind in ("message", "message_stop"):
            self._end()
        elif kind == "message_start":
            came = {**part, "message": {**message, "model": self._talk.alias}}
            self._beginning = [Delta("raw", kind, raw=render_json(came))]
        elif kind != "ping":  # the gateway sends its own
            self.has_begun = True
            self._deltas += [*self._beginning, Delta("raw", kind, raw=self._came)]
            self._beginning = []

    def close(self) -> list[Delta]:
        self._deltas = []
        if not self._talk.is_stream:
            return Reader.feed(self, b"\n".join(self._pieces))
        if self._reason:
            self._end()
        return self._deltas

    def _end(self) -> None:
        names = ("input", "output", "cache_read_input", "cache_creation_input")
        fresh, out, read, written = (read_field(self._usage, f"{name}_tokens", int)
                                     for name in names)
        self.end(self._reason or "end_turn", input_tokens=fresh + read + written,
                 output_tokens=out, cache_read=read, cache_written=written)


BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (
    Ollama(), LlamaCpp(), LMStudio(), VLLM(), OpenAI(), Anthropic())}


def backend_of(node: Node) -> Backend:
    """Return the Backend of a node."""
    return BACKENDS[node.provider]
