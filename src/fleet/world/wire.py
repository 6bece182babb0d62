"""Bytes on a connection, and HTTP/1.1 heads and bodies in them."""
from __future__ import annotations

import contextlib
import errno
import re
import select
import socket
from typing import TYPE_CHECKING

from fleet.start.constants import HEADER_LIMIT_BYTES
from fleet.start.errors import FleetError, NodeFailure
from fleet.start.gate import LatePattern

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any


# Connections and HTTP/1.1 on them, from both sides: an Exchange asks a node, a Visitor is a
# client that asks us. No wait is longer than its deadline. It is transport and knows no
# product: what a node does wrong is a NodeFailure, what a client does wrong a BadRequest,
# both in words of HTTP. It may use sockets and the clock; `connections` alone opens any.
#
# It reads as strictly as RFC 9112 lets a server be. Where two readers of the same bytes
# could see two requests (both lengths, two codings, odd blanks, folded or broken fields),
# it sees none.

STATUS_LINE = LatePattern(r"HTTP/1\.([01]) +([1-5][0-9][0-9])(?: [^\r\n]*)?\r\n")
REQUEST_LINE = LatePattern(r"([A-Z]{1,16}) ([!-~]{1,4096}) HTTP/1\.([01])\r\n")
_FIELD_LINE = LatePattern(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t\x20-\x7e\x80-\xff]*)\r\n")
# The size of a chunk; but for the first, the end of the chunk before it comes with it.
_CHUNK_SIZE = LatePattern(rb"0*([0-9A-Fa-f]{1,8})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_NEXT_CHUNK_SIZE = LatePattern(rb"\r\n" + _CHUNK_SIZE.pattern)
SINGLE_FIELDS = ("host", "content-length", "transfer-encoding")
RECEIVE_BYTES = 64 * 1024  # received at once
AGAIN_SECONDS = 0.5  # a connection that was closed while idle shows its end so soon


class BadRequest(FleetError):
    """What a client sent cannot be served; `status` is the HTTP status of the refusal."""

    def __init__(self, status: int, what: str) -> None:
        super().__init__("bad-request", what, status=status)


class ClientGone(BaseException):
    """The client has closed its connection: no failure, but nobody waits for the answer."""


def name_connection_failure(error: Exception) -> NodeFailure:
    """Return the NodeFailure for a failed call on a socket."""
    if isinstance(error, socket.timeout):
        return NodeFailure("timeout", "no answer in time")
    if isinstance(error, ConnectionRefusedError):
        return NodeFailure("refused", "nothing listens there")

    words = getattr(error, "strerror", None) or str(error)
    if type(error).__name__.startswith("SSL"):  # ssl is not imported to name it
        words = (getattr(error, "verify_message", "")
                 or getattr(error, "reason", None) or words)
        if re.search("WRONG_VERSION|HTTP_REQUEST|RECORD_LAYER", words):
            words = "it does not speak TLS; write http://"
        return NodeFailure("tls", words)

    far = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
    if getattr(error, "errno", 0) in far:
        return NodeFailure("unreachable", words)
    return NodeFailure("bad answer", words)


class Wire:
    """One connection: bytes come and go, and no wait is longer than `deadline`.

    The deadline may be moved; `cut`, from any thread, aborts a wait. Each call first tries, and
    waits only if it would block: most of the time there are bytes. http.client has no deadline
    for the whole: one header byte a second would block it for ever.
    """

    speech = "answer"  # what the other side sends
    # Waits until the socket is ready; may raise.
    await_more: Callable[[], object] | None = None
    is_sending = False  # it waits to send, else to receive
    _limit = float("inf")  # of a request's body

    def __init__(self, connection: socket.socket, deadline: float,
                 clock: Callable[[], float]) -> None:
        self.deadline = deadline
        self.headers: dict[str, str] = {}  # names in lower case
        connection.setblocking(False)
        self._socket = connection
        self._clock = clock
        self._buffer = bytearray()

    def fileno(self) -> int:
        """Return the descriptor for `wait_ready`, which does not see bytes in our buffer."""
        return self._socket.fileno()

    def cut(self) -> None:
        """Abort the connection; another thread that reads it sees its end."""
        with contextlib.suppress(OSError):  # not connected any more
            # The base class's shutdown wakes a reader in another thread, with TLS too.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and give its descriptor back."""
        self._socket.close()

    def send(self, message: bytes) -> None:
        """Send all of these bytes."""
        left = memoryview(message)
        while left:
            try:
                left = left[self._socket.send(left):]
            except (OSError, ValueError) as error:
                self._await(error)

    def _await(self, error: Exception) -> None:
        """Wait until the socket is ready; raise any other error."""
        # TLS says what it waits for; ValueError: TLS on a socket that was just closed.
        name = type(error).__name__
        if name not in ("BlockingIOError", "SSLWantReadError", "SSLWantWriteError"):
            raise name_connection_failure(error) from None
        if self._clock() >= self.deadline:
            raise NodeFailure("timeout", "no answer in time")
        self.is_sending = name != "SSLWantReadError"
        try:
            if self.await_more:
                self.await_more()
            else:
                wait_ready([self], self.deadline - self._clock())
        finally:
            self.is_sending = False

    def _fill(self) -> bool:
        """Read more into the buffer; False when the other side has closed."""
        while self._clock() < self.deadline:
            piece = self._receive()
            if piece is not None:
                self._buffer += piece
                return bool(piece)
            if self.await_more:
                self.await_more()
            elif not wait_ready([self], self.deadline - self._clock()):
                break
        raise NodeFailure("timeout", "no answer in time")

    def _receive(self) -> bytes | None:
        """Return the bytes received, or None if there are none yet."""
        try:
            return self._socket.recv(RECEIVE_BYTES)
        except (OSError, ValueError) as error:
            if type(error).__name__ not in ("BlockingIOError", "SSLWantReadError"):
                raise name_connection_failure(error) from None
            return None

    def _take_head(self, check: Callable[[], object] = lambda: None) -> str:
        """Return the next head, without the empty line after it.

        `check` looks at its beginning: another protocol might never send that line.
        """
        looked = 0
        while True:
            end = self._buffer.find(b"\r\n\r\n", looked)
            looked = max(len(self._buffer) - 3, 0)
            if (looked if end < 0 else end) > HEADER_LIMIT_BYTES:
                raise NodeFailure("bad answer", "its headers do not end")
            if end >= 0:
                head = self._buffer[:end + 2].decode("latin-1")
                del self._buffer[:end + 4]
                return head
            check()
            if not self._fill():
                raise NodeFailure("bad answer",
                                  f"it closed the connection in the middle of the {self.speech}")

    def _read_fields(self, head: str, at: int) -> dict[str, str]:
        """Return the header fields from a place on, names in lower case."""
        fields: dict[str, str] = {}
        while at < len(head):
            match = _FIELD_LINE.match(head, at)
            if not match:
                raise NodeFailure("bad answer", "a line of its headers is not `Name: value`")
            at = match.end()
            # str.strip() would take more than RFC 9112 calls a blank: `\x0bchunked`,
            # `chunked\xa0`.
            name, value = match[1].lower(), match[2].strip(" \t")
            if name in fields:
                if name in SINGLE_FIELDS:
                    raise NodeFailure("bad answer", f"more than one `{name}` in its headers")
                value = f"{fields[name]}, {value}"
            fields[name] = value
        return fields

    def _take_chunks(self) -> Iterator[bytes]:
        """Yield the content of a body's chunks, as much as has arrived; skip its trailers.

        A model's answer has a chunk for each word; one at a time, they cost twice as much.
        """
        pattern, buffer = _CHUNK_SIZE, self._buffer
        total = 0
        left = 0  # missing of a chunk
        while True:
            pieces: list[bytearray] = []
            at = 0
            is_last = False
            while at < len(buffer) and not is_last:
                if not left:
                    match = pattern.match(buffer, at)
                    if not match:
                        if not pieces:  # else earlier bytes come first
                            self._check_chunk(b"" if pattern is _CHUNK_SIZE else b"\r\n")
                        break
                    pattern = _NEXT_CHUNK_SIZE
                    at = match.end()
                    left = int(match[1], 16)
                    is_last = not left
                    total += left
                    if total > self._limit:
                        self._check_size(total)
                piece = buffer[at:at + left]
                pieces.append(piece)
                at += len(piece)
                left -= len(piece)

            match = None  # a view would keep the buffer from shrinking
            del buffer[:at]
            if pieces:
                yield b"".join(pieces)
            if is_last:
                self._skip_trailers()
                return
            if not (pieces and buffer) and not self._fill():
                early = f"{left} bytes early" if left else f"in the middle of the {self.speech}"
                raise NodeFailure("bad answer", f"it closed the connection {early}")

    def _check_chunk(self, ending: bytes) -> None:
        """Raise if the bytes after a chunk cannot be the next chunk's size."""
        rest = self._buffer[:HEADER_LIMIT_BYTES]
        if not ending.startswith(rest[:len(ending)]):
            raise NodeFailure("bad answer", "a chunk is longer than it said")
        if b"\n" in rest[len(ending):] or len(rest) == HEADER_LIMIT_BYTES:
            raise NodeFailure("bad answer", "its chunks have no readable size")

    def _check_size(self, size: int) -> None:
        if size > self._limit:
            raise BadRequest(413, f"body: longer than {self._limit} bytes")

    def _skip_trailers(self) -> None:
        """Skip the trailers; otherwise the next message would begin with them."""
        while len(self._buffer) < 2 and self._fill():
            pass
        if self._buffer.startswith(b"\r\n"):
            del self._buffer[:2]
        else:
            self._read_fields(self._take_head(), 0)

    def _take(self, count: int | None) -> Iterator[bytes]:
        """Yield `count` bytes as they come; None: all, until the other side closes."""
        while count != 0:
            if not self._buffer and not self._fill():
                if count is None:
                    return
                raise NodeFailure("bad answer",
                                  f"it closed the connection {count} bytes early")
            piece = bytes(self._buffer[:count])
            del self._buffer[:count]
            if count is not None:
                count -= len(piece)
            yield piece


class IdleConnections(list):  # type: ignore[type-arg]
    """The connections to a node that are kept for its next request."""

    # False once unrequested bytes arrived: a stray answer would be taken for the answer to the
    # next request, which may be another client's.
    can_be_kept = True


def wait_ready(things: Sequence[Any], seconds: float) -> list[Any]:
    """Return those `things` (with a `fileno`) that are ready in time: to read, or to send if
    they have `is_sending`."""
    seconds = max(seconds, 0)
    closed = [thing for thing in things if thing.fileno() < 0]
    if closed:  # by another thread, a moment ago: the next read finds its end
        return closed

    poll = select.poll()  # select.select fails on descriptors above 1023
    for thing in things:
        is_sending = getattr(thing, "is_sending", False)
        poll.register(thing, select.POLLOUT if is_sending else select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
    return [thing for thing in things if thing.fileno() in ready]
