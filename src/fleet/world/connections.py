"""Connections, names and ports, as the World opens them."""
from __future__ import annotations

import contextlib
import errno
import functools
import ipaddress
import json
import re
import resource
import socket
import ssl
from typing import TYPE_CHECKING

from fleet.config.address import is_private
from fleet.speech.talk import Reply
from fleet.start.constants import OTHER_PORT, PROBE_LIMIT_BYTES, ROUTE_TARGETS, name_taken
from fleet.start.errors import FleetError, NodeFailure
from fleet.start.gate import VERSION
from fleet.world.child import run_together
from fleet.world.exchange import Exchange
from fleet.world.network import (
    keep_alive_socket,
    look_up_host,
    plan_destination,
)
from fleet.world.processes import Processes
from fleet.world.visitor import Listener
from fleet.world.wire import IdleConnections, name_connection_failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    from fleet.speech.talk import Ask
    from fleet.world.network import Destination


class Network(Processes):
    """Connections, names and ports."""

    # -- network --

    def open_exchange(self, url: str, *, body: bytes | None = None,
                      headers: Mapping[str, str] | None = None, deadline: float,
                      await_more: Callable[[Exchange], object] | None = None) -> Exchange:
        """Send a GET, or a POST of `body`; return the Exchange that reads its answer.

        No proxies are used and no redirects followed: a node is where the fleet file says.
        `await_more` replaces the Exchange's own waiting. With it, the connection may be a kept one,
        and may be kept again.
        """
        there = plan_destination(url)
        lines = {"Host": there.place, "User-Agent": f"subagent-fleet/{VERSION}"}
        if not await_more:
            lines["Connection"] = "close"
        method = "GET"
        if body is not None:
            method = "POST"
            lines.update({"Content-Type": "application/json",
                          "Content-Length": str(len(body))})
        lines.update(headers or {})
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        request = f"{method} {there.path} HTTP/1.1\r\n{head}\r\n".encode("latin-1")

        def connect() -> socket.socket:
            return self._connect(there, min(deadline, self.clock() + self.connect_seconds))

        idle = self._idle.setdefault((there.scheme, there.place), IdleConnections())
        kept = keep_alive_socket(idle) if await_more else None
        exchange = Exchange(kept or connect(), deadline, self.clock)
        if await_more:
            exchange.idle = idle
            exchange.await_more = functools.partial(await_more, exchange)
        if kept:
            exchange.again = connect
        try:
            exchange.ask(request + (body or b""))
        except BaseException:
            exchange.close()
            raise
        return exchange

    def close_idle(self) -> None:
        """Close the connections that were kept."""
        for idle in self._idle.values():
            while idle:
                idle.pop().close()

    def _open_ask(self, endpoint: str, ask: Ask, deadline: float) -> Exchange:
        """Send an Ask."""
        payload = None if ask.payload is None else json.dumps(ask.payload).encode("utf-8")
        return self.open_exchange(endpoint + ask.path, body=payload, headers=ask.headers,
                                  deadline=deadline)

    def ask(self, endpoint: str, ask: Ask, *, deadline: float) -> Any:
        """Return the value that an Ask reads from a whole answer; its body is dropped."""
        body = bytearray()
        with contextlib.closing(self._open_ask(endpoint, ask, deadline)) as exchange:
            try:
                exchange.read_head()
                for piece in exchange.pieces():
                    body += piece
                    if len(body) >= ask.enough > 0:
                        break
                    if len(body) > PROBE_LIMIT_BYTES:
                        raise NodeFailure("bad answer", "its answer is longer than "
                                          f"{PROBE_LIMIT_BYTES} bytes")
                # One at a time: values take many times the memory of their text.
                with self._parsing:
                    return ask.extract(Reply(exchange.status, exchange.headers, body))
            finally:
                body.clear()  # a traceback would keep it in memory

    def ask_lines(self, endpoint: str, ask: Ask, wait: Callable[[], object] | None = None, *,
                  stall_seconds: float) -> Iterator[Any]:
        """Yield the value that an Ask reads from each line; each line has `stall_seconds`."""
        until = self.clock() + stall_seconds
        with contextlib.closing(self._open_ask(endpoint, ask, until)) as exchange:
            exchange.await_more = wait
            exchange.read_head()
            for line in exchange.lines():
                yield ask.extract(Reply(exchange.status, exchange.headers, line))
                exchange.deadline = self.clock() + stall_seconds

    def _connect(self, there: Destination, until: float) -> socket.socket:
        """Return a socket to the endpoint; its addresses share the time that there is."""
        addresses = self._stay_home(
            there.host, self.resolve(there.host, there.port, until))
        failures = []
        for index, (family, kind, protocol, _, address) in enumerate(addresses):
            connection = None
            left = max(until - self.clock(), 0.01)
            try:
                connection = socket.socket(family, kind, protocol)
                connection.settimeout(left / (len(addresses) - index))
                connection.connect(address)
                # IPv4 or IPv6 may be dead, so the address that answered last comes first.
                addresses.insert(0, addresses.pop(index))
                self._addresses[there.host, there.port] = addresses

                # Send small pieces at once.
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if there.scheme == "https":
                    connection = self._wrap_tls(connection, there.host, until)
                return connection
            except OSError as error:
                if connection:
                    connection.close()
                failures.append(name_connection_failure(error))

        self._addresses.pop((there.host, there.port), None)  # it may have moved
        raise failures.pop()  # a name for it would keep its frame, and all in it, in a cycle

    def _stay_home(self, host: str, addresses: list[Any]) -> list[Any]:
        """Return the private addresses of a private name; refuse it if it has only public ones.

        A private name counts as one at home, so the person was never asked whether prompts may go
        there; but the network's name server decides where it leads. Machines at home may also have
        public IPv6 addresses: those are left out.
        """
        if not is_private(host):
            return addresses  # the person was asked
        near = [row for row in addresses
                if is_private(row[4][0]) or self.is_own_address(row[4][0])]
        if addresses and not near:
            raise NodeFailure("not private", f"{host} leads to {addresses[0][4][0]}, which is "
                              "a public address")
        return near

    def _wrap_tls(self, connection: socket.socket, host: str, until: float) -> ssl.SSLSocket:
        """Return the connection behind TLS, with the certificates this machine trusts."""
        with self._parsing:
            self._tls = self._tls or ssl.create_default_context()  # 7 MB: one for all
        connection.settimeout(max(until - self.clock(), 0.01))
        return self._tls.wrap_socket(connection, server_hostname=host.split("%")[0])

    def resolve(self, host: str, port: int, until: float) -> list[Any]:
        """Return the addresses of a name; a thread looks them up, as nothing can interrupt that.

        They are kept until a connection to them fails.
        """
        kept = self._addresses.get((host, port))
        if kept:
            return list(kept)
        with contextlib.suppress(NodeFailure):  # an address needs no thread
            return look_up_host(host, port, socket.AI_NUMERICHOST)

        look_up = functools.partial(look_up_host, host, port)
        kept = dict(run_together(self, {host: look_up}, until=until)).get(host, NodeFailure(
            "dns", f"{host}: its address could not be found in time"))
        if isinstance(kept, NodeFailure):
            raise kept
        self._addresses[host, port] = kept
        return list(kept)

    def broadcast_addresses(self) -> list[str]:
        """Return the IPv4 broadcast addresses of this machine's networks.

        255.255.255.255 reaches the default network; the others are taken to be a /24.
        """
        own = [address for address in self.own_names()[1]
               if ipaddress.ip_address(address).is_private]
        return [*(re.sub("[0-9]+$", "255", address) for address in own), "255.255.255.255"]

    def send_datagram(self, host: str, port: int, content: bytes) -> None:
        """Send one UDP datagram, to a broadcast address, too."""
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
                sender.sendto(content, (host, port))
        except OSError as error:
            raise NodeFailure("unreachable", f"{host}: {error.strerror or error}") from None

    def listen(self, host: str, port: int) -> Listener:
        """Return the Listener of a port; port 0 is any that is free."""
        self.allow_files(2048)
        try:
            # `localhost` may mean ::1 first, but the environment says 127.0.0.1
            host = "127.0.0.1" if host == "localhost" else host
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            # `::` accepts IPv4 as well.
            both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            listening = socket.create_server((host, port), family=family, backlog=512,
                                             dualstack_ipv6=both)
            listening.setblocking(False)
            return Listener(listening, self.clock)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise FleetError("port-taken", name_taken(port), fix=OTHER_PORT) from None
            reason, _, _ = str(error.strerror or error).partition(
                " (while ")  # the error says the address again
            raise FleetError("cannot-listen", f"cannot listen on {host}:{port}: {reason}",
                             fix="write another `host:` or `port:` under project.gateway"
                             ) from None

    def allow_files(self, count: int) -> None:
        """Let the process open so many files, if the system lets it: macOS starts at 256."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

    def own_names(self) -> tuple[str, tuple[str, ...]]:
        """Return this machine's name and IPv4 addresses it would call from. Send nothing."""
        addresses = []
        for target in ROUTE_TARGETS:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as caller, \
                    contextlib.suppress(OSError):  # no route leads there
                caller.connect((target, 9))
                address = caller.getsockname()[0]
                if address not in addresses:
                    addresses.append(address)
        return socket.gethostname(), tuple(addresses)

    def is_own_address(self, address: str) -> bool:
        """Tell whether an address is one of this machine's: no other can be bound."""
        with contextlib.suppress(NodeFailure, OSError):
            for family, kind, _, _, place in look_up_host(address, 0, socket.AI_NUMERICHOST):
                with socket.socket(family, kind) as probe:
                    probe.bind(place)
                    return True
        return False

    def is_port_free(self, port: int) -> bool:
        """Tell whether a program of this user could listen on a port."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, \
                contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            return True
        return False

    def find_free_port(self, host: str, above: int) -> int:
        """Return the next free port; 0 if a hundred are taken."""
        for port in range(above + 1, min(above + 101, 65536)):
            with contextlib.suppress(FleetError):
                self.listen(host, port).close()
                return port
        return 0
