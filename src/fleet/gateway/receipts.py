"""What is kept of requests: receipts, the ledger, the log."""
from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import TYPE_CHECKING

from fleet.start.errors import FleetError
from fleet.start.record import Record, replace
from fleet.text.json import render_json
from fleet.text.terminal import clean_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from fleet.config.sections import Model
    from fleet.world.world import World


class FailedTry(Record):
    """A node that was asked and failed."""

    node: str
    why: str  # a class of reasons


class Stage(Record):
    """How far a request came: it waits, its prompt is read, its answer is written."""

    at: float  # seconds since 1970
    what: str  # wait, read or write
    node: str = ""  # the node at work, or the one that failed
    route: str = ""  # the key of `models:`
    model: str = ""  # as its machine calls it
    why: str = ""  # why the node failed


class Passed(Record):
    """A candidate that was not asked, because it cannot do what the request needs."""

    route: str
    why: str  # images, context, tools or format


TOTALS = ("requests", "input_tokens", "output_tokens", "waited_seconds", "failures")


class Receipt(Record):
    """The record of one request, with nothing of its prompt or answer."""

    time: float
    id: str
    session: str
    agent_id: str  # "": the main session
    alias: str
    route: str | None  # the key of `models:` that was asked last; None: none was
    node: str | None
    context: int | None
    failures: tuple[FailedTry, ...]
    waited_seconds: float | None  # for slots; what failed tries took is not in it
    first_byte_seconds: float | None
    total_seconds: float
    input_tokens: int
    output_tokens: int
    outcome: str  # ok, left, stopped, prompt_too_long, or the kind of the error
    sent_tokens: int = 0  # the estimate of the prompt; 0: not known
    cloud: bool = False  # it left the house
    passed_over: tuple[Passed, ...] = ()
    # Each node that failed, and its words; never those of a prompt or an answer.
    said: str = ""
    cached_tokens: int = 0  # of the input tokens: what the machine still had in its cache
    read_again_tokens: int = 0  # and what had been read before, and was read again
    read_again_why: str = ""  # pushed out, or from where it moved
    waited_for: str = ""  # the agent or session whose prompt was kept warm meanwhile
    broken_calls: int = 0  # of the answer: dropped, because their arguments were not JSON
    asked_seconds: float = 0.0  # until the machine that answered was asked; 0: not known
    model: str = ""  # the one that answered, as its machine calls it; "": an older receipt
    digest: str = ""  # of that model, where the machine says it
    steps: tuple[Stage, ...] = ()  # (): an older receipt

    @property
    def queue_seconds(self) -> float:
        """How long it took until the machine that answered was asked, if known."""
        return self.asked_seconds or self.waited_seconds or 0.0

    @property
    def model_name(self) -> str:
        """The model that was asked last: as its machine calls it, else as fleet.yaml did."""
        return self.model or self.route or ""


class Rejection(Record):
    """A request that was refused before its session was known."""

    http: int
    what: str


ASIDE_SECONDS = 0.05  # what comes within this time is done together
ASIDE_LIMIT = 20_000  # receipts that wait for a disk, lines that wait for a reader

RECEIPTS_SHOWN = 200

PROGRESS_SECONDS = 1.0
SAID_LIMIT = 400  # characters of what failed nodes said


# -- rows --


def plan_row(receipt: Receipt) -> dict[str, Any]:
    """Return the log's row of a finished request."""
    if not receipt.steps:
        began = receipt.time - receipt.total_seconds
        asked = began + receipt.queue_seconds
        receipt = replace(receipt, steps=(
            Stage(began, "wait"),
            Stage(asked, "write", receipt.node or "", receipt.route or "", receipt.model)))
    return {"kind": "request", "id": receipt.id, "session": receipt.session,
            "agent_id": receipt.agent_id, "alias": receipt.alias,
            "output_tokens": receipt.output_tokens, "receipt": receipt}


def describe_place(model: Model) -> dict[str, str]:
    """Return where a request goes, as its receipt keeps it even if fleet.yaml changes."""
    return {"route": model.name, "node": model.node, "model": model.ollama_model}


class OpenReceipt:
    """The receipt of a request that is still running; each step is put into the log."""

    def __init__(self, log: Log, world: World, names: Mapping[str, Any]) -> None:
        self._log, self._world, self._began = log, world, world.clock()
        self._names = names  # its id, session, agent and alias
        self._tell_at = 0.0
        self._steps: list[Stage] = []
        self.failures: list[FailedTry] = []
        self.passed: tuple[Passed, ...] = ()  # candidates that cannot do what is needed
        self.said: list[str] = []  # what failed nodes said
        self.tokens = 0  # of the answer so far, estimated
        # The other fields of its Receipt; seconds count from the beginning.
        self.values: dict[str, Any] = {
            "route": None, "node": None, "context": None, "waited_seconds": None,
            "first_byte_seconds": None, "input_tokens": 0, "output_tokens": 0, "cloud": False}

    def mark(self, name: str) -> None:
        """Note the time of an event under its name."""
        self.values[name] = round(self._world.clock() - self._began, 3)

    def step(self, what: str, **more: str) -> None:
        """Begin a step, and put it into the log."""
        self._steps.append(Stage(round(self._world.now(), 3), what, **more))
        self._tell()

    def read(self, model: Model, waited: float) -> None:
        """Note that a model reads the prompt, and how long the request waited for its slot."""
        self.mark("asked_seconds")
        waited += self.values["waited_seconds"] or 0.0
        self.values.update(waited_seconds=round(waited, 3), first_byte_seconds=None)
        self.tokens = 0
        self.step("read", **describe_place(model))

    def fail(self, node: str, why: str) -> None:
        """Note that a node failed, and that the request waits for another."""
        self.failures.append(FailedTry(node, why))
        self.values["first_byte_seconds"] = None  # the node that answers will set it
        self.step("wait", node=node, why=why)

    def write(self, tokens: int) -> None:
        """Note more tokens of the answer; the log gets them once a second."""
        now = self._world.clock()
        if self.values["first_byte_seconds"] is None:
            self.mark("first_byte_seconds")
            reading = self._steps[-1]
            self.step("write", node=reading.node, route=reading.route, model=reading.model)
            self._tell_at = now + PROGRESS_SECONDS
        self.tokens += tokens
        if now >= self._tell_at:
            self._tell_at = now + PROGRESS_SECONDS
            self._tell(counted_at=round(self._world.now(), 3))

    def _tell(self, **more: float) -> None:
        self._log.put({"kind": "request", **self._names, "steps": tuple(self._steps),
                       "output_tokens": self.tokens, **more})

    def close(self, outcome: str, waited_for: str) -> Receipt:
        """Return the finished receipt."""
        self.mark("total_seconds")
        return Receipt(
            time=round(self._world.now(), 3), failures=tuple(self.failures),
            passed_over=self.passed, waited_for=waited_for, outcome=outcome,
            said=clean_line("; ".join(self.said))[:SAID_LIMIT], steps=tuple(self._steps),
            **self._names, **self.values)


class LogRow:
    """A row of the log; it is rendered once for all followers."""

    def __init__(self, version: int, row: dict[str, Any]) -> None:
        self.version, self.row = version, row
        self._frame = b""

    def frame(self) -> bytes:
        """Return the row as an event of `/events`."""
        self._frame = self._frame or b"data: %b\n\n" % render_json(self.row)
        return self._frame


class Log:
    """The current state: a row for each request and each rest, replaced when it changes.

    A follower asks for the rows since the version that it has seen, whether it is new, late
    or back again. So nothing is queued for any follower, and none can miss a row.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[str, LogRow] = {}  # the latest change is last
        self._ended: dict[str, None] = {}  # requests, the oldest first
        self.version = 0
        self.epoch = 0  # when it changes, followers start again

    def put(self, row: Mapping[str, Any]) -> None:
        """Add a row, or replace it."""
        name = row["id"]
        with self._lock:
            self.version += 1
            self._rows.pop(name, None)
            self._rows[name] = LogRow(self.version, {**row})
            if "receipt" in row:
                self._ended[name] = None
                if len(self._ended) > RECEIPTS_SHOWN:
                    oldest = next(iter(self._ended))
                    del self._ended[oldest], self._rows[oldest]

    def since(self, version: int) -> tuple[int, list[LogRow]]:
        """Return the current version, and the rows that changed after the given one."""
        if version == self.version:  # most of the time
            return version, []
        with self._lock:
            return self.version, [row for row in self._rows.values() if row.version > version]

    def start_over(self) -> None:
        """Forget unfinished requests: the gateway that reported them is gone."""
        with self._lock:
            self.epoch += 1
            self._rows = {name: row for name, row in self._rows.items()
                          if name in self._ended}


class Ledger:
    """The sums of what each node has served."""

    def __init__(self, nodes: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self.totals: dict[str, dict[str, Any]] = {
            name: dict.fromkeys(TOTALS, 0) for name in nodes}
        self.left_house = dict.fromkeys(TOTALS[:3], 0)

    def add(self, receipt: Receipt) -> None:
        with self._lock:
            for attempt in receipt.failures:
                self.totals[attempt.node]["failures"] += 1
            if receipt.node is None:
                return
            total = self.totals[receipt.node]
            total["waited_seconds"] = round(
                total["waited_seconds"] + (receipt.waited_seconds or 0.0), 3)
            for sums in (total, self.left_house) if receipt.cloud else (total,):
                sums["requests"] += 1
                sums["input_tokens"] += receipt.input_tokens
                sums["output_tokens"] += receipt.output_tokens


class Aside:
    """A background worker for what may wait for a disk or a reader; `put` never waits.

    Things that come together are done together. If too many are queued, new ones are dropped.
    """

    def __init__(self, work: Callable[[list[Any]], None]) -> None:
        self._work = work
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.dropped = 0

    def put(self, thing: object) -> None:
        if self._queue.qsize() >= ASIDE_LIMIT:
            self.dropped += 1
            return
        self._queue.put(thing)
        if self._thread:
            return
        # If the system has no more threads, the next call tries again.
        with self._lock, contextlib.suppress(RuntimeError):
            if not self._thread:
                thread = threading.Thread(target=self._run, daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        is_over = False
        while not is_over:
            things = [self._queue.get()]
            if things[0] is not None:
                time.sleep(ASIDE_SECONDS)
            with contextlib.suppress(queue.Empty):
                while True:
                    things.append(self._queue.get_nowait())
            is_over = None in things
            self._work([thing for thing in things if thing is not None])

    def end(self, seconds: float) -> None:
        """Let it finish what was put in, for this many seconds at most."""
        self._queue.put(None)
        if self._thread:
            self._thread.join(seconds)


def keep_receipts(world: World, path: str, tell: Callable[[str], None]
                  ) -> Callable[[list[Receipt | Rejection]], None]:
    """Return a function that appends receipts to a file; if that fails, it warns once."""
    is_broken = False

    def take(things: list[Receipt | Rejection]) -> None:
        nonlocal is_broken
        lines = [render_json(thing) + b"\n" for thing in things if isinstance(thing, Receipt)]
        try:
            if lines:
                world.append_line(path, b"".join(lines))
                is_broken = False
        except FleetError as error:
            if not is_broken:
                tell(f"warning: no receipts for now: {error.what}\n")
            is_broken = True
    return take
