"""A request in nobody's dialect: turns, calls, tools, refusals."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.start.errors import FleetError
from fleet.start.record import Record, replace
from fleet.text.json import parse_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any


# What a client asks and a model answers, in nobody's dialect. A Dialect makes a Talk
# of a request and bytes of Deltas; a Backend makes an Ask of a Talk and Deltas of what
# a node says. So there are as many translations as there are dialects and backends,
# never one for each pair.


class Reply(Record):
    """A whole HTTP answer of a node."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes | bytearray


class Ask(Record):
    """One request to a node, and how its answer is read; who makes it knows the path."""

    path: str
    extract: Callable[[Reply], Any]  # raises NodeFailure where the answer is none
    payload: object = None  # sent as JSON; None: a GET
    headers: dict[str, str] = {}
    enough: int = 0  # bytes of the answer, if its beginning will do


IMAGE_WEIGHT = 4_000  # bytes of JSON that take as many tokens as an image
BYTES_A_TOKEN = 4.0  # of JSON; learned per model from its first answer on
REFUSAL_KINDS = {400: "invalid_request_error", 401: "authentication_error",
                 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
                 413: "request_too_large", 429: "rate_limit_error", 529: "overloaded_error"}
RETRY_STATUSES, RETRY_SECONDS = (429, 503, 529), 2
NO_IMAGE = "(an image was left out: this model takes none)"
BROKEN_CALL = "(A call of the tool `%s` was dropped: its arguments are not a JSON object.)"
STOPS_LIMIT = 64  # more stop sequences, or longer ones than this, no client sends
STOP_LIMIT_CHARACTERS = 1_000


class Refusal(FleetError):
    """Why a request is not answered. Each dialect says it in its own shape and words."""

    reason = ""  # what of it may be kept; "": all that it says, which is ours

    def __init__(self, http: int, what: str, *, retry_seconds: int = 0) -> None:
        super().__init__("api-error", what)
        self.http = http
        self.kind = REFUSAL_KINDS.get(http, "api_error")  # in the words of the Messages API
        # Above 0: when the client should come back. codex 0.169 asks 30 times in 25 s
        # if not told.
        self.retry_seconds = retry_seconds
        if http in RETRY_STATUSES and not retry_seconds:
            self.retry_seconds = RETRY_SECONDS


class PromptTooLong(Refusal):
    """A prompt of more tokens than the model's context holds, as its node or we counted."""

    def __init__(self, tokens: int, maximum: int) -> None:
        # Claude Code 2.1.326 compacts on exactly these words.
        super().__init__(400, f"prompt is too long: {tokens} tokens > {maximum} maximum")
        self.tokens, self.maximum = tokens, maximum


class NoImages(Refusal):
    """The model takes no images, which the request holds."""


class NoField(Refusal):
    """The server does not know a field of the request, which it can do without."""

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
    if arguments is None:  # a tool that takes none
        return {}
    return arguments if isinstance(arguments, dict) else None


class Result(Record):
    """What came of a call."""

    call_id: str
    text: str
    images: tuple[str, ...] = ()


class Turn(Record):
    """What one side said in its turn, sorted by kind. Images are base64 text."""

    role: str  # user or assistant
    reminders: tuple[str, ...] = ()  # of the client's program, not the person's own words
    texts: tuple[str, ...] = ()
    thoughts: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()
    results: tuple[Result, ...] = ()


class Parts(dict):  # type: ignore[type-arg]
    """What was said: lists by the field of a Turn that they belong to, `found` or `unshown`."""

    def __missing__(self, kind: str) -> list[Any]:
        self[kind] = []
        return self[kind]  # type: ignore[no-any-return]


class Tool(Record):
    """A tool that the model may call; its schema is as the client sent it."""

    name: str
    description: str
    schema: object
    # How the client knows it, where that is more than a name: a call of it is given back so.
    namespace: str = ""
    own_name: str = ""  # within its namespace
    is_custom: bool = False  # it takes one text, which the model gives as `input`


class Talk(Record):
    """A request: what was said so far, in turns that alternate, and how to go on."""

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
    thread: str = ""  # what the client calls the conversation, where its body says so
    came: int = 0  # when, in seconds: some answers say it
    wants_usage: bool = False  # in a last event of its own, which not every client expects
    unshown: str = ""  # why only a cloud that is asked as it came can be shown all of it
    original: Mapping[str, Any] | None = None  # the Messages request that it was read from

    def images(self) -> list[str]:
        """Return every image in it."""
        images: list[str] = []
        for turn in self.turns:
            images += turn.images
            for result in turn.results:
                images += result.images
        return images

    def without_images(self) -> Talk:
        """Return the talk with a note where images were; no cloud is asked it as it came."""
        turns = []
        for turn in self.turns:
            results = [Result(result.call_id, join_texts([result.text, NO_IMAGE]))
                       if result.images else result for result in turn.results]
            texts = (*turn.texts, NO_IMAGE) if turn.images else turn.texts
            turns.append(replace(turn, texts=texts, images=(), results=tuple(results)))
        return replace(self, turns=tuple(turns), original=None)


def join_texts(texts: Iterable[str]) -> str:
    """Join blocks of text; glued together, the last word of one runs into the next."""
    pieces: list[str] = []
    for text in filter(None, texts):
        if pieces and not pieces[-1].endswith("\n") and not text.startswith("\n"):
            pieces.append("\n\n")
        pieces.append(text)
    return "".join(pieces)


def weigh(body: bytes, talk: Talk) -> int:
    """Return the bytes of a rendered request that tell how many tokens it has."""
    images = talk.images()
    return len(body) - sum(map(len, images)) + len(images) * IMAGE_WEIGHT
