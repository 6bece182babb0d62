"""A client's connection, and the port at which clients arrive."""
from __future__ import annotations

import contextlib
import re
import socket
import time
from typing import TYPE_CHECKING

from fleet.start.constants import HEADER_LIMIT_BYTES, SEND_SECONDS
from fleet.start.errors import NodeFailure
from fleet.world.wire import (
    RECEIVE_BYTES,
    REQUEST_LINE,
    BadRequest,
    ClientGone,
    Wire,
    wait_ready,
)

if TYPE_CHECKING:
    from collections.abc import Callable


class Visitor(Wire):
    """A client's connection: its requests one after the other, and whether it is still there.

    A half-closed client (a FIN) counts as gone: whether it still reads cannot be known.
    """

    speech = "request"
    stays = True  # whether another request may follow on this connection
    is_streaming = False
    _speaks_1_1 = True  # else HTTP/1.0, which has no chunks
    _wants_body = True  # False for HEAD
    _length: int | None = None  # of the request's body; None: it comes in chunks

    def __init__(self, connection: socket.socket, clock: Callable[[], float]) -> None:
        super().__init__(connection, clock(), clock)
        self.reached: tuple[str, int] = connection.getsockname()[:2]  # our own address

    def read_request(self, seconds: float) -> tuple[str, str, dict[str, str]] | None:
        """Return (method, target, headers), or None if the client has nothing more to say."""
        self.deadline = self._clock() + seconds
        with contextlib.suppress(NodeFailure):  # nothing was asked yet
            if not self._buffer:
                self._fill()
        if not self._buffer:
            return None

        self.deadline = self._clock() + seconds
        try:
            head = self._take_head()
            match = REQUEST_LINE.match(head)
            if not match:
                raise BadRequest(400, "not an HTTP/1.1 request")
            self.headers = self._read_fields(head, match.end())
        except NodeFailure as failure:
            raise _refusal(failure) from None

        self._speaks_1_1 = match[3] == "1"
        self._wants_body = match[1] != "HEAD"
        options = self.headers.get("connection", "").lower().split(",")
        closes = "close" in [option.strip(" \t") for option in options]
        self.stays = self._speaks_1_1 and not closes
        self._length = self._find_length()
        return match[1], match[2], self.headers

    def _find_length(self) -> int | None:
        """Return the request body's length, None for chunks; refuse two lengths."""
        coding = self.headers.get("transfer-encoding")
        length = self.headers.get("content-length")
        if coding is not None:
            if length is not None:
                raise BadRequest(400, "request: both Content-Length and Transfer-Encoding")
            if not self._speaks_1_1:
                raise BadRequest(400, "request: HTTP/1.0 has no Transfer-Encoding")
            if coding.lower() != "chunked":
                raise BadRequest(400, "request: the only accepted Transfer-Encoding is chunked")
            return None

        if length is None:
            return 0
        if not re.fullmatch("[0-9]+", length):
            raise BadRequest(400, "request: its Content-Length is not a number")
        # 19 digits are too many anyway, and int() refuses 4,301.
        digits = length.lstrip("0")[:19] or "0"
        return int(digits)

    def read_body(self, limit: int, seconds: float,
                  hold: Callable[[int], None] = lambda more: None) -> bytearray:
        """Return the body of the request just read; refuse more than `limit` bytes.

        `hold` is called with the bytes that have come, or will; it may raise.
        """
        body = bytearray()
        if self._length == 0:
            return body
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            raise BadRequest(400, "request: its body is compressed; send it in clear")
        self._limit = limit
        self._check_size(self._length or 0)
        hold(self._length or 0)

        if self._speaks_1_1 and self.headers.get("expect", "").lower() == "100-continue":
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.deadline = self._clock() + seconds
        try:
            if self._length is not None:
                for piece in self._take(self._length):
                    body += piece
                return body
            for piece in self._take_chunks():
                hold(len(piece))
                body += piece
            return body
        except NodeFailure as failure:
            raise _refusal(failure) from None

    def refuse_body(self) -> None:
        """Refuse the request if it has a body, instead of waiting for it."""
        if self._length != 0:
            raise BadRequest(400, "request: this page takes no body")

    def reply(self, status: int, body: bytes, *, head: str = "",
              kind: str = "application/json") -> None:
        """Send a whole answer, JSON if no `kind` is named; `head` holds more header lines."""
        reason = "OK" if status == 200 else "Refused"
        if not self.stays:
            head += "Connection: close\r\n"
        lines = (f"HTTP/1.1 {status} {reason}\r\n{head}Content-Type: {kind}\r\n"
                 f"Content-Length: {len(body)}\r\n\r\n")
        answer = lines.encode("ascii")
        if self._wants_body:
            answer += body
        self.send(answer)

    def stream(self, piece: bytes, *, head: str = "", last: bool = False) -> None:
        """Send a piece of an answer of unknown length: `head` begins it, `last` ends it.

        HTTP/1.0 has no chunks: there the end of the connection ends the answer.
        """
        answer = b""
        if head:
            framing = "Transfer-Encoding: chunked\r\n" if self._speaks_1_1 else ""
            if not self.stays:
                framing += "Connection: close\r\n"
            answer = f"HTTP/1.1 200 OK\r\n{head}{framing}\r\n".encode("ascii")
        if not self._speaks_1_1:
            answer += piece
        elif piece:
            answer += b"%x\r\n%b\r\n" % (len(piece), piece)
        if last and self._speaks_1_1:
            answer += b"0\r\n\r\n"
        self.is_streaming = not last
        self.send(answer)

    def send(self, message: bytes) -> None:
        """Send bytes; a client that takes none for a minute counts as gone."""
        self.deadline = self._clock() + SEND_SECONDS
        try:
            super().send(message)
        except NodeFailure:
            raise ClientGone() from None

    def wait(self, other: Wire | None, seconds: float) -> bool:
        """Tell whether `other` is ready in time; raise ClientGone when the client goes."""
        until = self._clock() + seconds
        while True:
            watched = [other] if other else []
            # A client's next request waits here; what is more stays in its
            # socket, unseen.
            if len(self._buffer) <= HEADER_LIMIT_BYTES:
                watched.append(self)
            ready = wait_ready(watched, until - self._clock())
            if self in ready:
                piece: bytes | None = b""
                with contextlib.suppress(NodeFailure):  # a reset
                    piece = self._receive()
                if piece == b"":
                    raise ClientGone()
                self._buffer += piece or b""
            if other and other in ready:
                return True
            if self._clock() >= until:
                return False

    def part(self) -> None:
        """Close so that the last answer still arrives: with unread bytes it would be a reset."""
        with contextlib.suppress(OSError):  # it has gone, or never stops sending
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(0.25)
            for _ in range(16):
                if not self._socket.recv(RECEIVE_BYTES):
                    break
        self.close()


def _refusal(failure: NodeFailure) -> BadRequest:
    """Turn a failure on a client's connection into the refusal of its request."""
    status = 408 if failure.reason == "timeout" else 400
    return BadRequest(status, f"request: too slow, too long or broken ({failure.detail})")


class Listener:
    """A port at which clients connect."""

    def __init__(self, listening: socket.socket, clock: Callable[[], float]) -> None:
        self._socket = listening
        self._clock = clock
        self.host: str = listening.getsockname()[0]
        self.port: int = listening.getsockname()[1]
        self._bell, self._rope = socket.socketpair()  # select sees no event of a thread
        self._rope.setblocking(False)

    def accept(self, seconds: float) -> Visitor | None:
        """Return the next client; None after `ring`, or when the time is up."""
        try:
            if self._socket not in wait_ready([self._socket, self._bell], seconds):
                return None
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return None  # it has gone already
        except OSError:
            time.sleep(0.05)  # out of descriptors: a client that leaves gives one back
            return None

        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return Visitor(connection, self._clock)
        except OSError:  # it has gone already
            connection.close()
            return None

    def ring(self) -> None:
        """Wake every `accept`; allowed in a signal handler, and after `close`."""
        with contextlib.suppress(OSError):  # full: already awake; closed: nothing waits
            self._rope.send(b"!")

    def close(self) -> None:
        """Take no more clients."""
        for each in (self._socket, self._bell, self._rope):
            each.close()
