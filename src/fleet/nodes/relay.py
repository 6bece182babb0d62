"""One request to a model, and its answer."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.nodes.probe import sign
from fleet.speech.cloud import backend_of
from fleet.speech.talk import BYTES_A_TOKEN, Refusal, Reply, weigh
from fleet.start.errors import NodeFailure
from fleet.start.record import Record
from fleet.text.json import render_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

    from fleet.config.sections import Model, Node
    from fleet.speech.answer import Delta
    from fleet.speech.backend import Reader
    from fleet.speech.talk import Ask, Talk
    from fleet.world.exchange import Exchange
    from fleet.world.world import World


# How much a node may send for an answer: far more than JSON takes around a token, so that only
# an answer that never ends is cut off.
ANSWER_BYTES = 1_000_000
ANSWER_BYTES_A_TOKEN = 1_000
ANSWER_STEPS, ANSWER_STEPS_A_TOKEN = 1_000, 2  # a token comes in one step, seldom in two
ANSWER_SECONDS_A_TOKEN = 1.0


class Learned:
    """What is known of a model, from its node and from its answers and refusals."""

    def __init__(self) -> None:
        self.ratio = BYTES_A_TOKEN
        self.takes_images = True
        self.unknown: set[str] = set()  # fields of a request that its server does not know
        self.abilities: tuple[str, ...] | None = None  # if its node says
        self.digest = ""  # of its content, if its node says


class Translation(Record):
    """A talk as the request to a model on its node."""

    node: Node
    model: Model
    talk: Talk
    ask: Ask
    body: bytes
    weight: int
    estimate: int  # of its tokens
    fields: tuple[str, ...]  # of its payload
    max_output: int  # tokens

    def send(self, world: World, headers: Mapping[str, str] | None = None,
             await_more: Callable[[Exchange], object] | None = None
             ) -> tuple[Exchange, Reader]:
        """Send the request; return its exchange, and the reader of its answer."""
        headers = {**sign(world, self.node, self.ask).headers, **(headers or {})}
        reader = backend_of(self.node).reader(self.talk, self.model, self.estimate)
        exchange = world.open_exchange(
            self.node.endpoint + self.ask.path, body=self.body, headers=headers,
            deadline=world.clock() + self.model.timeout, await_more=await_more)
        return exchange, reader


def translate(node: Node, talk: Talk, model: Model, known: Learned) -> Translation:
    """Return a talk as the request to a model, without what the model is known not to take."""
    if not known.takes_images:
        talk = talk.without_images()
    if talk.unshown and not (talk.original and backend_of(node).takes_messages):
        raise Refusal(400, talk.unshown)
    try:
        ask = backend_of(node).chat(talk, model)
        payload: Any = ask.payload
        for name in known.unknown:
            payload.pop(name, None)
        body = render_request(payload)
    except (RecursionError, ValueError):  # from 3.12 on, deeper values can be parsed than rendered
        raise Refusal(400, "body: nested too deeply") from None
    weight = weigh(body, talk)
    return Translation(node, model, talk, ask, body, weight, round(weight / known.ratio),
                       tuple(payload), max(model.max_output, payload.get("max_tokens") or 0))


def relay(exchange: Exchange, reader: Reader, translation: Translation,
          clock: Callable[[], float]) -> Iterator[list[Delta]]:
    """Yield the deltas of an answer, those that came at once together; raise if it has no end."""
    exchange.read_head()
    if exchange.status >= 400:
        reply = Reply(exchange.status, exchange.headers, exchange.read_all())
        raise reader.refuse(reply, translation.ask.extract(reply))
    if exchange.status != 200:
        raise NodeFailure("bad answer", f"it answered {exchange.status}")

    timeout, tokens = translation.model.timeout, translation.max_output
    most_bytes = ANSWER_BYTES + ANSWER_BYTES_A_TOKEN * tokens
    most_steps = ANSWER_STEPS + ANSWER_STEPS_A_TOKEN * tokens
    size = steps = 0
    until = 0.0  # when the whole answer must have come; 0: it has not begun
    for lines in exchange.batches():
        deltas = _read_lines(reader, lines)
        yield deltas
        if deltas and deltas[-1].end:
            return
        size += sum(map(len, lines))
        steps += len(deltas)
        if size > most_bytes or steps > most_steps:
            raise NodeFailure("bad answer", "it does not end")
        if reader.has_begun:  # until then the prompt is read, within the first deadline
            soon = clock() + timeout
            if not until:
                until = soon + ANSWER_SECONDS_A_TOKEN * tokens
            exchange.deadline = soon if soon < until else until

    deltas = reader.close()
    yield deltas
    if not deltas or not deltas[-1].end:
        raise NodeFailure("bad answer", "it ended before it was done")


def _read_lines(reader: Reader, lines: Sequence[bytes | bytearray]) -> list[Delta]:
    """Return the deltas of some lines of an answer, up to its end."""
    deltas: list[Delta] = []
    for line in lines:
        deltas += reader.feed(line)
        if deltas and deltas[-1].end:
            break
    return deltas
