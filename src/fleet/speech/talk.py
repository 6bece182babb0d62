"""A request, independent of any dialect: turns, calls, tools, refusals."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.start.errors import FleetError
from fleet.start.record import Record, replace
from fleet.text.json import parse_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any


# Requests and answers in a form between all dialects. A Dialect turns a request into a Talk, and
# Deltas into bytes; a Backend turns a Talk into an Ask, and a node's answer into Deltas. So each
# dialect and each backend needs one translation, not each pair of them.


class Reply(Record):
    """A whole HTTP answer of a node."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes | bytearray


class Ask(Record):
    """One request to a node: its path, its content, and how to read the answer."""

    path: str
    extract: Callable[[Reply], Any]  # raises NodeFailure if the answer is invalid
    payload: object = None  # sent as JSON; None: a GET
    headers: dict[str, str] = {}
    enough: int = 0  # read only so many bytes of the answer


IMAGE_WEIGHT = 4_000  # an image counts as so many bytes of JSON
BYTES_A_TOKEN = 4.0  # of JSON; corrected for each model after its first answer
REFUSAL_KINDS = {400: "invalid_request_error", 401: "authentication_error",
                 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
                 413: "request_too_large", 429: "rate_limit_error", 529: "overloaded_error"}
RETRY_STATUSES, RETRY_SECONDS = (429, 503, 529), 2
NO_IMAGE = "(an image was left out: this model takes none)"
BROKEN_CALL = "(A call of the tool `%s` was dropped: its arguments are not a JSON object.)"
STOPS_LIMIT = 64  # no client sends more, or longer, stop sequences
STOP_LIMIT_CHARACTERS = 1_000


class Refusal(FleetError):
    """The reason not to answer a request. Each dialect has its own form of it."""

    reason = ""  # the part that may be recorded; "": all of it, as it is our own text

    def __init__(self, http: int, what: str, *, retry_seconds: int = 0) -> None:
        super().__init__("api-error", what)
        self.http = http
        self.kind = REFUSAL_KINDS.get(http, "api_error")  # as the Messages API calls it
        # Above 0: when the client should retry. Otherwise codex 0.169 retries 30 times
        # in 25 s.
        self.retry_seconds = retry_seconds
        if http in RETRY_STATUSES and not retry_seconds:
            self.retry_seconds = RETRY_SECONDS


class PromptTooLong(Refusal):
    """A prompt longer than the model's context, by the node's count or ours."""

    def __init__(self, tokens: int, maximum: int) -> None:
        # Claude Code 2.1.326 compacts at exactly these words.
        super().__init__(400, f"prompt is too long: {tokens} tokens > {maximum} maximum")
        self.tokens, self.maximum = tokens, maximum


class NoImages(Refusal):
    """The model takes no images, which the request holds."""


class NoField(Refusal):
    """The server refuses a field of the request that is not essential."""

    def __init__(self, what: str, name: str) -> None:
        super().__init__(400, what)
        self.name = name


class Call(Record):
    """A tool call that a model made."""

    id: str
    name: str
    arguments: dict[str, Any]


def read_arguments(arguments: object) -> dict[str, Any] | None:
    """Return the arguments of a call, from an object or its text; None if they are broken."""
    if isinstance(arguments, str):
        return parse_object(arguments) if arguments.strip() else {}
    if arguments is None:  # a tool without arguments
        return {}
    return arguments if isinstance(arguments, dict) else None


class Result(Record):
    """The result of a call."""

    call_id: str
    text: str
    images: tuple[str, ...] = ()


class Turn(Record):
    """The turn of one side, sorted by kind. Images are base64 text."""

    role: str  # user or assistant
    reminders: tuple[str, ...] = ()  # written by the client program, not by the person
    texts: tuple[str, ...] = ()
    thoughts: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()
    results: tuple[Result, ...] = ()


class Parts(dict):  # type: ignore[type-arg]
    """Parts of a message: lists by field of a Turn, and `found` and `unshown`."""

    def __missing__(self, kind: str) -> list[Any]:
        self[kind] = []
        return self[kind]  # type: ignore[no-any-return]


class Tool(Record):
    """A tool that the model may call; its schema is as the client sent it."""

    name: str
    description: str
    schema: object
    # The client's own description of it, if it is more than a name; calls are returned in it.
    namespace: str = ""
    own_name: str = ""  # within its namespace
    is_custom: bool = False  # it takes one text, which the model gives as `input`


class Talk(Record):
    """A request: alternating turns so far, and how to continue."""

    alias: str
    turns: tuple[Turn, ...]
    system: tuple[str, ...] = ()
    tools: tuple[Tool, ...] = ()
    choice: str = "auto"  # any: some tool must be called; tool: this one; none
    chosen_tool: str = ""
    one_call: bool = False
    max_tokens: int | None = None
    sampling: dict[str, float] = {}  # temperature, top_p, top_k
    stops: tuple[str, ...] = ()
    answer_format: object = None  # "json", or the JSON Schema of what the answer must be
    is_stream: bool = False
    thread: str = ""  # the client's name of the conversation, if the body has it
    came: int = 0  # its time in seconds since 1970: some answers contain it
    wants_usage: bool = False  # in a separate last event, which not every client expects
    unshown: str = ""  # the parts that only a cloud can be shown
    original: Mapping[str, Any] | None = None  # the original Messages request

    def images(self) -> list[str]:
        """Return every image in it."""
        images: list[str] = []
        for turn in self.turns:
            images += turn.images
            for result in turn.results:
                images += result.images
        return images

    def without_images(self) -> Talk:
        """Return the talk with notes in place of images; it is no longer passed on unchanged."""
        turns = []
        for turn in self.turns:
            results = [Result(result.call_id, join_texts([result.text, NO_IMAGE]))
                       if result.images else result for result in turn.results]
            texts = (*turn.texts, NO_IMAGE) if turn.images else turn.texts
            turns.append(replace(turn, texts=texts, images=(), results=tuple(results)))
        return replace(self, turns=tuple(turns), original=None)


def join_texts(texts: Iterable[str]) -> str:
    """Join blocks of text with line breaks, so that words do not run together."""
    pieces: list[str] = []
    for text in filter(None, texts):
        if pieces and not pieces[-1].endswith("\n") and not text.startswith("\n"):
            pieces.append("\n\n")
        pieces.append(text)
    return "".join(pieces)


def weigh(body: bytes, talk: Talk) -> int:
    """Return the bytes of a rendered request from which its tokens are estimated."""
    images = talk.images()
    return len(body) - sum(map(len, images)) + len(images) * IMAGE_WEIGHT
