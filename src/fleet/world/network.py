"""Destinations of connections."""
from __future__ import annotations

import functools
import hashlib
import re
import socket
from typing import TYPE_CHECKING

from fleet.start.errors import NodeFailure
from fleet.start.gate import late_decorator
from fleet.start.record import Record

if TYPE_CHECKING:
    from typing import Any

    from fleet.world.wire import IdleConnections


class Destination(Record):
    """The destination of a request, from its address."""

    scheme: str
    host: str
    port: int
    place: str  # host and port, as the header `Host` has them
    path: str


@late_decorator(lambda: functools.lru_cache(256))
def plan_destination(url: str) -> Destination:
    from urllib.parse import quote, urlsplit
    parts = urlsplit(url)
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=")
    if parts.query:
        path += "?" + quote(parts.query, safe="/%:@!$&'()*+,;=?")
    return Destination(
        parts.scheme, parts.hostname or "",
        parts.port or (443 if parts.scheme == "https" else 80),
        re.sub(r"%[^]]*", "", parts.netloc),  # an IPv6 zone means nothing there
        path)


def keep_alive_socket(idle: IdleConnections) -> socket.socket | None:
    """Return a kept connection that is still open; one with unexpected bytes is dropped."""
    while True:
        try:
            connection = idle.pop()
        except IndexError:
            return None
        try:
            if connection.recv(1):
                idle.can_be_kept = False
        except OSError as error:
            is_quiet = type(error).__name__ in ("BlockingIOError", "SSLWantReadError")
            if is_quiet and idle.can_be_kept:
                return connection
        connection.close()


def look_up_host(host: str, port: int, flags: int = 0) -> list[Any]:
    """Return the addresses of a name as the system has them."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise NodeFailure("dns", f"{host}: {reason}") from None


def seal_bytecode(name: str, code: bytes) -> bytes:
    """Return the head of a bytecode file: a digest of the code and of its name."""
    return hashlib.sha256(name.encode() + b"\n" + code).digest()
