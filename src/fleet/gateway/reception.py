"""Any server of ours: its connections, its followers, its end."""
from __future__ import annotations

import abc
import contextlib
import threading
import traceback
from typing import TYPE_CHECKING

from fleet.config.address import plain_address, show_host
from fleet.gateway.receipts import Aside, Log, Rejection
from fleet.speech.talk import Refusal
from fleet.start.constants import HOME_URL, TICK_SECONDS
from fleet.text.json import render_json
from fleet.world.wire import BadRequest, ClientGone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from fleet.gateway.receipts import Receipt
    from fleet.world.visitor import Listener, Visitor
    from fleet.world.world import World


QUIET_SECONDS = 10.0  # a stream that waited so long gets its headers, then a ping as often

REQUEST_SECONDS = 10.0  # for the headers; also how long an idle connection is kept

CONNECTION_LIMIT = 256

EVENTS_PAUSE_SECONDS = 0.1  # they go out in batches: a burst costs one write

GRACE_SECONDS = 10.0

EVENTS_HEAD = "Content-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-store\r\n"


class Reception(abc.ABC):
    """Takes connections and their requests, follows who listens to a hub, ends them all."""

    def __init__(self, world: World, names: Iterable[str]) -> None:
        self.world, self.log = world, Log()
        self.stops: list[str] = []
        self._listener: Listener | None = None
        # By what they do: silent, asking, following or idle; the oldest first. Each is
        # entered by who accepts, changed and removed by its own thread, and by nobody else.
        self._visitors: dict[Visitor, str] = {}
        self._is_over = False  # who follows has been told the last
        # A terminal that nobody reads holds up who writes to it.
        self.said = Aside(lambda texts: world.err("".join(texts)))
        self._listeners: list[Aside] = []  # of receipts and rejections
        self._names = {name.lower() for name in names}

    @abc.abstractmethod
    def _respond(self, visitor: Visitor, method: str, target: str,
                 headers: dict[str, str]) -> None:
        """Answer one request, or raise what it is refused with.

        It is `asking` once it has passed the door: until then it gives way to others.
        """

    @abc.abstractmethod
    def _refuse(self, visitor: Visitor, refusal: Refusal, path: str) -> None:
        """Send a refusal in the words of who asked."""

    @abc.abstractmethod
    def _hello(self) -> dict[str, Any]:
        """Return what is said first to who follows."""

    def listen(self, take: Callable[[list[Any]], None]) -> None:
        """Hand each Receipt and Rejection to who may take long over it."""
        self._listeners.append(Aside(take))

    def hand_on(self, thing: Receipt | Rejection) -> None:
        """Let all who listen have something, without waiting for any."""
        for listener in self._listeners:
            listener.put(thing)

    def stop(self, name: str) -> None:
        """Take nothing new; a second time, end at once. Safe in a signal handler."""
        self.stops.append(name)
        if self._listener:
            self._listener.ring()

    def serve(self, listener: Listener) -> None:
        """Serve until `stop`, then let what is being answered end."""
        self._listener = listener
        while not self.stops:
            self._accept(listener)
        listener.close()

    def _accept(self, listener: Listener) -> None:
        """Take the next connection; if there are too many, end the oldest silent one."""
        visitor = listener.accept(1.0)
        if not visitor:
            return
        while len(self._visitors) >= CONNECTION_LIMIT and not self.stops:
            visitors = self._visitors.copy()
            spare = next((other for wanted in ("silent", "idle") for other, state
                          in visitors.items() if state == wanted), None)
            if spare:
                spare.cut()  # as often as it takes: its thread takes it off
            self.world.sleep(0.005)
        self._visitors[visitor] = "silent"
        try:
            threading.Thread(target=self._serve, args=(visitor,), daemon=True).start()
        except RuntimeError:  # the system gives no more threads now
            del self._visitors[visitor]
            visitor.close()
            self.world.sleep(TICK_SECONDS)

    def _end_visits(self) -> None:
        """Let what is being answered end."""
        until = self.world.clock() + GRACE_SECONDS
        while self._visitors and self.world.clock() < until + 0.5:
            if len(self.stops) > 1:
                until = min(until, self.world.clock())
            self._is_over = "asking" not in self._visitors.copy().values()
            for visitor, state in self._visitors.copy().items():
                is_at_work = state in ("asking", "following")
                if not is_at_work or self.world.clock() >= until:
                    visitor.cut()  # its thread leaves the node and files the receipt
            self.world.sleep(0.02)

    def _serve(self, visitor: Visitor) -> None:
        """Answer one request after the other on a connection."""
        target = ""
        try:
            while visitor.stays and not self.stops:
                request = visitor.read_request(REQUEST_SECONDS)
                if request is None:
                    break
                method, target, headers = request
                self._respond(visitor, method, target, headers)
                self._visitors[visitor] = "idle"
        except ClientGone:
            pass
        except Exception as error:
            # The body may not have been read, so the connection ends with it.
            refusal = self.refusal_of(error)
            self.hand_on(Rejection(refusal.http, refusal.what))
            visitor.stays = False
            if not visitor.is_streaming:  # else there is no place for a refusal in it
                with contextlib.suppress(ClientGone):
                    self._refuse(visitor, refusal, target.partition("?")[0])
        finally:
            visitor.part()
            del self._visitors[visitor]

    def refusal_of(self, error: Exception) -> Refusal:
        """Return what a client is told of an error; a bug is reported here, too."""
        if isinstance(error, Refusal):
            return error
        if isinstance(error, BadRequest):
            return Refusal(error.status, error.what)
        # A bug; its message may quote a prompt, its place does not.
        place = traceback.extract_tb(error.__traceback__)[-1]
        self.said.put(f"error: {type(error).__name__} in {place.name}, line {place.lineno}"
                      f"; this is a bug, please report it at {HOME_URL}/issues\n")
        return Refusal(500, "a bug in subagent-fleet")

    def _follow(self, visitor: Visitor) -> None:
        """Tell a client what is so and what changes, until it leaves or the gateway stops."""
        self._visitors[visitor] = "following"
        visitor.stays = False
        epoch, version = self.log.epoch, 0
        hello = {"kind": "hello", "schema": "subagent-fleet/events/3", **self._hello(),
                 "time": round(self.world.now(), 3)}
        frame = b"retry: 1000\ndata: %b\n\n" % render_json(hello)  # ms: a browser comes back
        visitor.stream(frame, head=EVENTS_HEAD)
        quiet_at = self.world.clock() + QUIET_SECONDS
        while epoch == self.log.epoch:
            is_last = self._is_over
            version, rows = self.log.since(version)
            if rows or self.world.clock() > quiet_at:
                said = b"".join(row.frame() for row in rows)
                visitor.stream(said or b": nothing happens\n\n")
                quiet_at = self.world.clock() + QUIET_SECONDS
            if is_last:
                break
            visitor.wait(None, EVENTS_PAUSE_SECONDS)  # a burst costs one write
        visitor.stream(b"", last=True)

    def _check_host(self, visitor: Visitor, headers: Mapping[str, str]) -> None:
        """Refuse who a web page may have sent.

        A page can make a name of its own point here, so only names of this machine count.
        """
        address, port = visitor.reached
        own = show_host(plain_address(address))
        host = headers.get("host", "").lower()
        names = {f"{name}:{port}" for name in {*self._names, own}}
        if not names & {host, f"{host}:80"} or "origin" in headers:
            raise Refusal(403, "this server answers only at its own address: "
                          f"http://{own}:{port}")
