"""What all model servers have in common, and reading their answers."""
from __future__ import annotations

import abc
import re
from typing import TYPE_CHECKING

from fleet.config.node import kind_title, obtain_model
from fleet.speech.answer import Delta, End, Sieve
from fleet.speech.talk import (
    BROKEN_CALL,
    REFUSAL_KINDS,
    RETRY_STATUSES,
    Ask,
    Call,
    NoImages,
    PromptTooLong,
    Refusal,
    read_arguments,
)
from fleet.start.constants import HEADER_LIMIT_BYTES
from fleet.start.errors import NodeFailure
from fleet.start.gate import LatePattern
from fleet.start.record import Record
from fleet.text.json import count_marks, parse_json, parse_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from fleet.config.sections import Model
    from fleet.speech.talk import Reply, Talk


# The language of a node. A Backend makes Asks and reads Replies, without sockets or clocks. A
# node's answers are not trusted: a field of the wrong type counts as absent; only an answer
# without its list is a `bad answer`; and an error in an answer is a failure of the node.
#
# There are three protocols: Ollama's own API, Chat Completions for all other servers at home,
# and Messages for the cloud, which is passed on unchanged. llama-server and vLLM translate
# Messages to Chat Completions themselves, so nothing is lost by sending them those.

ANSWER_MARKS = 100_000  # values in one answer of a node; see count_marks
TOKENS_LIMIT = 10 ** 9  # a higher count of tokens or seconds is ignored
ARGUMENTS_DEPTH_LIMIT = 64
# The messages of a prompt longer than the context: Ollama 0.32.15 and llama.cpp, LM Studio,
# Anthropic, vLLM, OpenAI and OpenRouter. `n` is the number of its tokens, `most` the limit.
_TOO_LONG = tuple(map(LatePattern, (
    r"(?:\((?P<n>\d{1,9}) tokens\) )?exceeds the available context size"
    r" \((?P<most>\d{1,9}) tokens\)",
    r"input (?:length|after truncation) exceeds|longer than the context",
    r"keep the first (?P<n>\d{1,9}) tokens.{0,99}context length of only (?P<most>\d{1,9})",
    r"tokens to keep from the initial prompt is greater than the context",
    r"prompt is too long: (?P<n>\d{1,9}) tokens > (?P<most>\d{1,9})",
    r"maximum (?:context|model) length (?:is|of) (?P<most>\d{1,9})(?: tokens)?"
    r"(?:\D{1,99}(?P<n>\d{1,9}))?")))
_NO_IMAGES = LatePattern(r"does not support (?:vision|image)|image input|not a multimodal model")
_NOT_THERE = LatePattern(r"(?i)\bmodel ([`'\"])[^`'\"]{1,256}\1 (?:not found|does not exist)")
_NOT_ABLE = LatePattern(r"does not support|image input")


class Backend(abc.ABC):
    """The language of one kind of node: what to ask, and how to read the answers.

    If a server has no such request, the method asks for its version page instead.
    """

    name = ""  # its name in `provider:` and in reasons
    log = ""  # where its own log is, in words
    loads_twice = False  # loading a loaded model starts a second instance
    loads_as_asked = False  # a chat request loads the model, with the context of its route
    version_path = list_path = "/v1/models"
    version_field = ""  # in its version page; "": it does not say
    list_field, list_key = "data", "id"  # where its model list is, and the name in an entry
    takes_formats = True  # it can be asked for JSON, or for a JSON Schema
    takes_messages = False  # it gets Messages requests unchanged
    reads: type[Reader]

    @property
    def title(self) -> str:
        """Its name for people."""
        return kind_title(self.name)

    def key_headers(self, key: str) -> dict[str, str]:
        """Return the headers that show a node the key it wants."""
        return {"Authorization": f"Bearer {key}"}

    def _ask(self, path: str, parse: Callable[[Any], Any], payload: object = None) -> Ask:
        """Return an Ask; a refusal becomes a NodeFailure, and `parse` reads the JSON."""
        def extract(reply: Reply) -> Any:
            if reply.status != 200:
                words = error_words(reply)
                if reply.status == 404 and "model" not in words.lower():
                    raise NodeFailure(f"not {self.name}", f"it does not know {path}")
                raise NodeFailure(f"http {reply.status}", words)
            return parse(parse_answer(reply.body, self))

        return Ask(path, extract, payload)

    def _entries(self, value: Any, path: str) -> list[dict[str, Any]]:
        """Return the entries of a model list that have a name; null is an empty list."""
        entries = value.get(self.list_field, "") if isinstance(value, dict) else ""
        entries = [] if entries is None else entries
        key = self.list_key
        named = []
        if isinstance(entries, list):
            named = [entry for entry in entries if read_field(entry, key)]
        if not named and entries != []:
            raise NodeFailure("bad answer", f"{path} holds no list of models")
        # Ollama's order changes with each request.
        return sorted(named, key=lambda entry: entry[key])

    def _list(self, path: str, make: Callable[[dict[str, Any]], Any]) -> Ask:
        """Ask for a list of models; `make` converts each entry."""
        return self._ask(path, lambda value: tuple(map(make, self._entries(value, path))))

    def identify(self) -> Ask:
        """Ask for its version: the fastest request that only this kind of server answers."""
        def parse(value: Any) -> str:
            if not self.version_field:
                self._entries(value, self.version_path)
                return ""
            version = read_field(value, self.version_field)
            if not version:
                raise NodeFailure(f"not {self.name}",
                                  f"{self.version_path} does not answer as {self.title} does")
            return version
        return self._ask(self.version_path, parse)

    @abc.abstractmethod
    def list_models(self) -> Ask:
        """Ask for the NodeModels on its disk."""

    @abc.abstractmethod
    def list_loaded(self) -> Ask:
        """Ask for the LoadedModels in memory; context 0 means that the server does not say."""

    def describe(self, model_name: str) -> Ask:
        """Ask for the fields of a NodeModel that the list lacks, as a dict."""
        return self._ask(self.list_path, lambda value: {})  # the list has everything

    @abc.abstractmethod
    def load(self, model: Model, *, unload: bool = False) -> Ask:
        """Ask to load a model as its route will use it, or to unload it.

        The answer `http 404` means that the model is not there and may be pulled. The extracted
        text, if any, is shown to people.
        """

    def load_with_prompt(self, model: Model) -> Ask | None:
        """Ask to load a model with a short prompt, if a server refuses an empty one; or None."""
        return None

    def pull(self, model: Model) -> Ask:
        """Ask to download a model; each line of the answer is a PullStep."""
        def extract(reply: Reply) -> Any:
            raise NodeFailure("no downloads", f"{self.title} takes no downloads from here",
                              fix=f"{obtain_model(self.name, model.ollama_model)} there")
        return Ask(self.identify().path, extract)

    def check_loading(self, model: Model) -> Ask | None:
        """Ask whether a load in the background has ended: a boolean; None: there are none.

        NodeFailure if it has failed.
        """
        return None

    @abc.abstractmethod
    def chat(self, talk: Talk, model: Model) -> Ask:
        """Ask a model to continue a talk; `extract` reads the text of a refusal."""

    def reader(self, talk: Talk, model: Model, estimate: int) -> Reader:
        """Return the Reader of the answer to `chat`; `estimate`: the tokens of the prompt."""
        return self.reads(self.name, talk, model, estimate)


class PullStep(Record):
    """One line of a download: the progress of a layer, and whether all is done."""

    layer: str = ""
    completed: int = 0
    total: int = 0
    is_done: bool = False


# -- reading a node's answers --


def read_field(value: object, key: str, kind: type[Any] = str) -> Any:
    """Return a field of an answer; the empty value if it is absent, of another type or negative."""
    field_value: Any = value.get(key) if isinstance(value, dict) else None
    if type(field_value) is not kind or (kind is int and field_value < 0):
        return kind()
    return field_value


def first_field(value: object, paths: Iterable[str], kind: type[Any] = str) -> Any:
    """Return the first non-empty field at these paths (`meta.n_ctx`)."""
    for path in paths:
        *places, name = path.split(".")
        inner = value
        for place in places:
            inner = read_field(inner, place, dict)
        found = read_field(inner, name, kind)
        if found:
            return found
    return kind()


def error_text(error: object) -> str:
    """Return a node's error message, out of the JSON that its engine wraps it in."""
    while True:
        if isinstance(error, dict):
            wrapped: dict[str, Any] | None = error
        else:
            wrapped = parse_object(str(error)[:HEADER_LIMIT_BYTES])
        if not wrapped:
            return str(error)[:500]
        error = wrapped.get("error", wrapped.get("message", "an error without words"))


# The kinds of failures that may be recorded: a message itself may quote a prompt or an answer.
_FAILURES = {
    "out of memory": LatePattern(r"(?i)out of memory|more (?:system |gpu )?memory"
                              r"|failed to allocate"),
    "a tool call it cannot read": LatePattern(r"(?i)tool call"),
    "its engine stopped": LatePattern(r"(?i)runner process|terminated|exit status|segfault"),
    "it is busy": LatePattern(r"(?i)busy|overloaded|too many requests"),
    "it cannot load the model": LatePattern(r"(?i)(?:unable|failed) to load")}


def name_failure(status: int, words: str) -> str:
    """Return what may be recorded of a refusal: its status, and its kind if known."""
    kinds = [kind for kind, pattern in _FAILURES.items() if pattern.search(words)]
    return ", ".join([f"http {status}", *kinds[:1]])


def error_words(reply: Reply) -> str:
    """Return a node's own message about a refused request."""
    if 300 <= reply.status < 400:
        return f"it redirects to {reply.headers.get('location', 'elsewhere')}; not followed"
    # What Go and nginx say on a TLS port.
    if reply.status == 400 and b" HTTPS " in reply.body:
        raise NodeFailure("tls", "it speaks TLS; write https://")
    return error_text(reply.body.decode("utf-8", "replace").strip()).split("\n")[0]


def parse_answer(body: bytes | bytearray, backend: Backend) -> Any:
    """Return the JSON value of an answer; refuse one that would take much memory or time."""
    if count_marks(body) > ANSWER_MARKS:
        raise NodeFailure("bad answer", f"far more in it than any {backend.title} answers")
    try:
        return parse_json(body)
    except ValueError:
        pass  # the original exception would keep the whole text
    if re.match(rb"\s*[\[{]", body):
        raise NodeFailure("bad answer", "its JSON is broken")
    raise NodeFailure(f"not {backend.name}", "it does not answer with JSON")


def refuse_error(value: Any) -> Any:
    """Return an answer; raise if it is an error, which Ollama also sends with HTTP 200."""
    if isinstance(value, dict) and "error" in value:
        raise NodeFailure("error", error_text(value["error"]))
    return value


class Reader:
    """Reads one answer of a model, line by line.

    It separates thinking from text, finds the stop sequence, collects calls and counts. A
    server's own `read` calls `say`, `call` and `end`. No server says which stop sequence ended
    an answer, so this looks for them. Tokens that the server does not count are estimated.
    """

    has_begun = False  # the model has begun; before that, only its server has answered

    def __init__(self, provider: str, talk: Talk, model: Model, estimate: int) -> None:
        self._provider, self._talk, self._model = provider, talk, model
        self._estimate, self._calls, self._lines = estimate, 0, 0
        self._broken_calls = 0
        self._sieve = Sieve(talk.stops)
        self._kind = ""  # of the previous Delta
        self._deltas: list[Delta] = []  # of this line

    def feed(self, line: bytes | bytearray) -> list[Delta]:
        """Return the Deltas of a line; raise NodeFailure or Refusal if it is not an answer.

        The last Delta of an answer is its end; an answer without it is a failure.
        """
        try:
            part = parse_json(line)
        except ValueError:
            part = None
        if type(part) is not dict:
            raise NodeFailure("bad answer", "it sent something that is not an answer")
        error = part.get("error")
        if error:  # an error may come with HTTP 200
            status = (read_field(part, "status", int)
                      or first_field(error, ("code", "status"), int)
                      or ERROR_STATUSES.get(read_field(error, "type"), 500))
            raise self.refusal(status, error_text(error))
        self._deltas = []
        self.read(part)
        if self._sieve.stop and not (self._deltas and self._deltas[-1].end):
            self.end("stop_sequence")
        return self._deltas

    @abc.abstractmethod
    def read(self, part: dict[str, Any]) -> None:
        """Read one JSON object of the answer."""

    def close(self) -> list[Delta]:
        """Return the Deltas at the end of the connection, if no line was the end."""
        return []

    def say(self, kind: str, text: str) -> None:
        """Add thinking or text; thinking inside the text is separated."""
        if not text:
            return
        self.has_begun = True
        self._lines += 1
        if kind == "text":
            if self._kind == "text" and self._sieve.passes_text():  # nearly always
                self._deltas.append(Delta("text", text))
            else:
                self._tell(self._sieve.feed(text))
        else:
            self._sieve.skip_thinking()
            self._tell([Delta(kind, text)])

    def _tell(self, deltas: Iterable[Delta]) -> None:
        """Add Deltas, but no blank thinking at the beginning."""
        for delta in deltas:
            if delta.kind != self._kind:
                if delta.kind == "thinking" and not delta.text.strip():
                    continue
                self._kind = delta.kind
            self._deltas.append(delta)

    def call(self, call_id: str, name: str, arguments: object, *,
             is_cut: bool = False) -> None:
        """Add a call; its arguments are an object, or text that may be cut off.

        A client runs every call, so arguments are never guessed. A call with broken arguments
        becomes text, and one that the token limit cut is dropped: otherwise Bash
        `{"command": "ls` would run as Bash `{}`.
        """
        if not name or self._sieve.stop or (self._talk.one_call and self._calls):
            return
        values = read_arguments(arguments)
        if is_cut and not values:
            values = None  # no arguments arrived
        if values is None:
            self._broken_calls += 1
            if not is_cut:
                self._tell(self._sieve.feed("", last=True))
                self._tell([Delta("text", f"{BROKEN_CALL % name}\n{arguments}")])
            return
        if is_deeper(values, ARGUMENTS_DEPTH_LIMIT):
            raise NodeFailure("bad answer", "the arguments of a call are nested too deeply")
        self._calls += 1
        self._tell(self._sieve.feed("", last=True))
        self._kind = "call"
        self._deltas.append(Delta("call", call=Call(call_id, name, values)))

    def end(self, reason: str, **counts: Any) -> None:
        """Add held-back text and the end; `counts` are fields of the End."""
        self._tell(self._sieve.feed("", last=True))
        if self._sieve.stop:
            reason = "stop_sequence"
        elif self._calls and reason == "end_turn":
            reason = "tool_use"
        told = {name: count for name, count in counts.items() if 0 < count < TOKENS_LIMIT}
        told.setdefault("input_tokens", self._estimate)
        told.setdefault("output_tokens", self._lines + self._calls)
        told["broken_calls"] = self._broken_calls
        self._deltas.append(Delta("end", end=End(reason, self._sieve.stop, **told)))

    def refuse(self, reply: Reply, words: str) -> Refusal:
        """Return the Refusal for the client; `words` is what the Ask extracted."""
        return self.refusal(reply.status, words)

    def refusal(self, status: int, words: str) -> Refusal:
        """Return the Refusal for a client, in the words that clients react to."""
        model = self._model
        for pattern in _TOO_LONG:
            match = pattern.search(words)
            if match:
                counts = match.groupdict()
                maximum = int(counts.get("most") or model.context)
                tokens = int(counts.get("n") or self._estimate)
                return PromptTooLong(max(tokens, maximum + 1), maximum)

        what = (f"node {model.node}, model {model.ollama_model}: "
                f"{words or f'it answered {status}'}")
        if _NO_IMAGES.search(words):
            refusal: Refusal = NoImages(400, what)
        elif status == 404 or _NOT_THERE.search(words):
            obtain = obtain_model(self._provider, model.ollama_model)
            if obtain.startswith("`"):
                obtain = f"type {obtain}"
            refusal = Refusal(404, f"{what}; {obtain} there")
        elif status in (400, 422) or _NOT_ABLE.search(words):
            refusal = Refusal(400, what)
        elif status in RETRY_STATUSES:
            refusal = Refusal(529, what)
        else:
            refusal = Refusal(500,
                              f"{what}; {kind_title(self._provider)}'s log there says more")
        refusal.reason = name_failure(status, words)
        return refusal


def is_deeper(value: object, limit: int) -> bool:
    """Tell whether a JSON value is nested deeper than the limit."""
    level = [value]
    for _ in range(limit + 1):
        if not level:
            return False
        inner = [child for child in level if isinstance(child, (dict, list))]
        level = [item for child in inner
                 for item in (child.values() if isinstance(child, dict) else child)]
    return bool(level)


ERROR_STATUSES = {kind: status for status, kind in REFUSAL_KINDS.items()}
