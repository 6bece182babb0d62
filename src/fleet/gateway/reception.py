"""What every server of this program does: connections, followers, stopping."""
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


QUIET_SECONDS = 10.0  # after this a stream gets its headers, and then a ping each time

REQUEST_SECONDS = 10.0  # for the headers; also how long an idle connection is kept

CONNECTION_LIMIT = 256

EVENTS_PAUSE_SECONDS = 0.1  # they go out in batches: a burst costs one write

GRACE_SECONDS = 10.0

EVENTS_HEAD = "Content-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-store\r\n"


class Reception(abc.ABC):
    """Accepts connections, serves their requests and followers, and ends them all."""

    def __init__(self, world: World, names: Iterable[str]) -> None:
        self.world, self.log = world, Log()
        self.stops: list[str] = []
        self._listener: Listener | None = None
        # The state of each: silent, asking, following or idle; the oldest first. The accepting
        # thread adds a visitor; only the visitor's own thread changes and removes it.
        self._visitors: dict[Visitor, str] = {}
        self._is_over = False  # followers get their last rows now
        # Writing to a terminal that is not being read can block.
        self.said = Aside(lambda texts: world.err("".join(texts)))
        self._listeners: list[Aside] = []  # of receipts and rejections
        self._names = {name.lower() for name in names}

    @abc.abstractmethod
    def _respond(self, visitor: Visitor, method: str, target: str,
                 headers: dict[str, str]) -> None:
        """Answer one request, or raise a Refusal.

        Set the visitor's state to `asking` once its key was checked. Until then it may be cut
        off in favor of others.
        """

    @abc.abstractmethod
    def _refuse(self, visitor: Visitor, refusal: Refusal, path: str) -> None:
        """Send a refusal in the client's dialect."""

    @abc.abstractmethod
    def _hello(self) -> dict[str, Any]:
        """Return the first words to a new follower."""

    def listen(self, take: Callable[[list[Any]], None]) -> None:
        """Hand each Receipt and Rejection to a function that may be slow."""
        self._listeners.append(Aside(take))

    def hand_on(self, thing: Receipt | Rejection) -> None:
        """Give something to all listeners, without waiting for them."""
        for listener in self._listeners:
            listener.put(thing)

    def stop(self, name: str) -> None:
        """Take no new requests; the second call ends at once. Safe in a signal handler."""
        self.stops.append(name)
        if self._listener:
            self._listener.ring()

    def serve(self, listener: Listener) -> None:
        """Accept connections until `stop`."""
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
                spare.cut()  # again and again, until its thread has removed it
            self.world.sleep(0.005)
        self._visitors[visitor] = "silent"
        try:
            threading.Thread(target=self._serve, args=(visitor,), daemon=True).start()
        except RuntimeError:  # the system gives no more threads now
            del self._visitors[visitor]
            visitor.close()
            self.world.sleep(TICK_SECONDS)

    def _end_visits(self) -> None:
        """Let open answers end, then cut the rest."""
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
            if not visitor.is_streaming:  # a refusal cannot be put into a stream
                with contextlib.suppress(ClientGone):
                    self._refuse(visitor, refusal, target.partition("?")[0])
        finally:
            visitor.part()
            del self._visitors[visitor]

    def refusal_of(self, error: Exception) -> Refusal:
        """Return the refusal for an error; a bug is also reported on the terminal."""
        if isinstance(error, Refusal):
            return error
        if isinstance(error, BadRequest):
            return Refusal(error.status, error.what)
        # A bug. Its message may quote a prompt, so only its place is shown.
        place = traceback.extract_tb(error.__traceback__)[-1]
        self.said.put(f"error: {type(error).__name__} in {place.name}, line {place.lineno}"
                      f"; this is a bug, please report it at {HOME_URL}/issues\n")
        return Refusal(500, "a bug in subagent-fleet")

    def _follow(self, visitor: Visitor) -> None:
        """Send a client the state and its changes, until it leaves or the gateway stops."""
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
        """Refuse a request that may come from a web page.

        A page can make a name of its own point here, so only names of this machine count.
        """
        address, port = visitor.reached
        own = show_host(plain_address(address))
        host = headers.get("host", "").lower()
        names = {f"{name}:{port}" for name in {*self._names, own}}
        if not names & {host, f"{host}:80"} or "origin" in headers:
            raise Refusal(403, "this server answers only at its own address: "
                          f"http://{own}:{port}")
