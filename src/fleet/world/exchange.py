"""One request to a server, and its answer."""
from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

from fleet.start.constants import ANSWER_LIMIT_BYTES, IDLE_LIMIT, LEAVE_SECONDS
from fleet.start.errors import NodeFailure
from fleet.world.wire import AGAIN_SECONDS, STATUS_LINE, Wire, wait_ready

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from fleet.world.wire import IdleConnections


class Exchange(Wire):
    """One request to a node, and its answer as it arrives.

    For a kept connection, `again` opens a fresh one: the server may close an idle connection
    at the moment at which it is used.
    """

    status = 0  # until `read_head`
    again: Callable[[], socket.socket] | None = None
    idle: IdleConnections | None = None  # called with the connection after a whole answer
    _request = b""
    _asked = 0.0  # when `await_more` ended
    _left: Iterator[bytes] = iter(())  # of the body, whose lines are read

    def ask(self, request: bytes) -> None:
        """Send a request."""
        self._request, self._asked = request, self._clock()
        try:
            self.send(request)
        except NodeFailure as failure:
            self._ask_again(failure)

    def _ask_again(self, failure: NodeFailure) -> None:
        """Ask on a fresh connection if a kept one ended before its first byte.

        One that was closed while idle shows that at once. One that ends later may have read the
        request and crashed on it, so that is a failure.
        """
        again, self.again = self.again, None
        is_late = self._clock() - self._asked > AGAIN_SECONDS
        if not again or self._buffer or is_late or failure.reason == "timeout":
            raise failure
        self.close()
        self._socket = again()
        self._socket.setblocking(False)
        self.send(self._request)

    def find_peer(self) -> tuple[str, int]:
        """Return the address and the port at the other end."""
        try:
            address, port = self._socket.getpeername()[:2]
        except (OSError, ValueError):  # a reset came
            raise NodeFailure("bad answer", "it closed the connection") from None
        return address, port

    def read_head(self) -> None:
        """Wait for the answer's status line and headers; sets `status` and `headers`."""
        for _ in range(8):  # a few below 200 may come before the real one
            try:
                head = self._take_head(self._check_start)
            except NodeFailure as failure:
                self._ask_again(failure)
                continue
            match = STATUS_LINE.match(head)
            if not match:
                break
            headers = self._read_fields(head, match.end())
            if match[2] >= "200":
                self.status, self.headers = int(match[2]), headers
                options = headers.get("connection", "").lower()
                if match[1] == "0" or "close" in options:
                    self.idle = None
                return
        raise NodeFailure("not http", "it does not speak HTTP/1.1")

    def _check_start(self) -> None:
        start = bytes(self._buffer[:5])
        if start.startswith(b"\x15\x03"):  # a TLS alert
            raise NodeFailure("tls", "it speaks TLS; write https://")
        if not b"HTTP/".startswith(start):
            raise NodeFailure("not http", "it does not speak HTTP/1.1")

    def pieces(self) -> Iterator[bytes]:
        """Yield the body as it arrives; raise if it ends early."""
        if not self.status:
            self.read_head()  # not read yet
        coding = self.headers.get("transfer-encoding", "identity").lower()
        length = self.headers.get("content-length")
        is_length = length is None or re.fullmatch("[0-9]{1,18}", length)
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            raise NodeFailure("bad answer", "it sent a compressed answer without being asked")

        if coding == "chunked":
            yield from self._take_chunks()
        elif coding != "identity" or not is_length:
            raise NodeFailure("bad answer", "its answer does not say how long it is")
        elif self.status in (204, 304):
            return
        else:
            yield from self._take(None if length is None else int(length))

    def read_all(self, limit: int = ANSWER_LIMIT_BYTES) -> bytearray:
        """Return the whole body; more than `limit` bytes are a failure."""
        body = bytearray()
        for piece in self.pieces():
            body += piece
            if len(body) > limit:
                raise NodeFailure("bad answer", f"its answer is longer than {limit} bytes")
        return body

    def lines(self) -> Iterator[bytes | bytearray]:
        """Yield the lines of the body as they come, without their ends; skip empty ones."""
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[list[bytearray]]:
        """Yield the lines of the body, those that came at once together."""
        rest = bytearray()
        self._left = self.pieces()
        for piece in self._left:
            rest += piece
            if b"\n" in piece:
                *whole, rest = rest.split(b"\n")
                yield [line for line in whole if line]
            if len(rest) > ANSWER_LIMIT_BYTES:
                raise NodeFailure("bad answer", "a line of its answer does not end")
        if rest:
            yield [rest]

    def keep(self) -> None:
        """Keep the connection for another request if the answer ends here; else close it.

        The end of a body may arrive after its last line.
        """
        self.await_more = None
        self.deadline = self._clock() + LEAVE_SECONDS
        with contextlib.suppress(NodeFailure):
            is_over = any(next(self._left, None) is None for _ in range(8))
            if not self.headers.keys() & {"transfer-encoding", "content-length"}:
                is_over = False
            if self._buffer and is_over and self.idle is not None:
                self.idle.can_be_kept = False
            if (is_over and self.idle is not None and self.idle.can_be_kept
                    and len(self.idle) < IDLE_LIMIT):
                self.idle.append(self._socket)
                return
        self.close()

    def leave(self) -> None:
        """Close in the middle of an answer at a moment that is safe for the node.

        Ollama 0.32.15 (its issue 17131) never frees a model's slot if it sees the client go while a
        token waits to be sent. One extra byte sent to it keeps it from looking; it then learns of
        the end by a write that fails, which is safe. If nothing arrives, no token waits.
        """
        if self.fileno() < 0:  # opening a fresh connection failed
            return
        self.await_more = None
        self.deadline = self._clock() + 2 * LEAVE_SECONDS
        with contextlib.suppress(NodeFailure):
            if wait_ready([self], LEAVE_SECONDS):
                self.send(b"\n")
                while self._fill():
                    self._buffer.clear()
        self.close()
