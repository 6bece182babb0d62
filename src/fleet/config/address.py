"""Endpoints, kinds of addresses, private or public, waking by address."""
from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

from fleet.start.constants import OLLAMA_PORT
from fleet.start.errors import FleetError
from fleet.start.gate import LatePattern
from fleet.start.record import Record

if TYPE_CHECKING:
    from fleet.config.sections import Gateway


_OCTET = "(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"  # a number of an IPv4 address
_LABEL = "[A-Za-z0-9_]+"  # a part of a host name
# An IPv4 address, or labels that are more than digits: those alone are a broken address.
HOST_NAME = f"({_OCTET}([.]{_OCTET}){{3}}|(?!.{{254}}|[0-9._]+$){_LABEL}((-+|[.]){_LABEL})*[.]?)"
_HEX = "[0-9A-Fa-f]{1,4}"  # a group of an IPv6 address
IPV6_ADDRESS = f"(({_HEX}:){{7}}{_HEX}|(?!([^:]*:){{8}})({_HEX}(:{_HEX})*)?::({_HEX}(:{_HEX})*)?)"
HOST = f"({HOST_NAME}|{IPV6_ADDRESS})"  # one pattern for all, which is compiled once

LOOPBACK = LatePattern(r"(?i)localhost[.]?|127([.][0-9]{1,3}){3}|::1")


# -- endpoints --


class Endpoint(Record):
    """Where something answers, taken apart: a URL in normal form."""

    scheme: str  # http or https
    host: str  # in lower case, IPv6 without its brackets
    port: int
    path: str  # without its last slash, and without `/v1`, which many paste: paths have it

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


def split_endpoint(endpoint: str, usual_port: int = 80) -> Endpoint:
    """Take an endpoint apart, or raise a FleetError that says what is wrong with it.

    The usual port is that of http; https has its own.
    """
    host_pattern = r"\[[^\]/]*\]|[^/:\[\]]*"
    match = re.fullmatch(rf"(?i)(https?)://({host_pattern})(?::([^/:]*))?(/\S*)?", endpoint)
    if not match:
        raise _bad_endpoint("not of the form scheme://host:port")
    scheme, host, port, path = match.groups()

    if not host:
        raise _bad_endpoint("the host is missing")
    pattern = rf"\[{IPV6_ADDRESS}(%.+)?\]" if host.startswith("[") else HOST
    if not re.fullmatch(pattern, host):
        raise _bad_endpoint(f"`{host}` is not a host name or address")

    scheme = scheme.lower()
    if port is None:
        port = "443" if scheme == "https" else str(usual_port)
    if not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise _bad_endpoint(f"`{port}` is not a port (1 to 65535)")
    path = re.sub("(/v1)?/*$", "", path or "")
    return Endpoint(scheme, host.strip("[]").lower(), int(port), path)


def _bad_endpoint(what: str) -> FleetError:
    return FleetError("bad-endpoint", what, fix="write it as `http://192.168.1.50:11434`")


def full_endpoint(address: str) -> Endpoint:
    """Take an address apart that may lack http and Ollama's port."""
    return split_endpoint(address if "://" in address else f"http://{address}", OLLAMA_PORT)


# -- addresses --

# What a person would rather be reached at; an address of no kind is this machine's own.
ADDRESS_KINDS = ("LAN", "Tailscale", "public", "")


def address_kind(host: str) -> str:
    """Return the kind of an address, one of ADDRESS_KINDS."""
    # Loading ipaddress takes as long as reading a fleet file, so the usual hosts go without.
    if re.fullmatch(r"(?:10\.\d{1,3}|192\.168)(?:\.\d{1,3}){2}", host):
        return "LAN"
    if re.fullmatch("[A-Za-z_][^:]*|127[0-9.]*", host):
        return ""

    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return ""
    if address.is_loopback or address.is_link_local:
        return ""
    if address.is_global:
        return "public"
    # Tailscale's 100.64/10 is neither private nor global.
    return "LAN" if address.is_private else "Tailscale"


def show_host(host: str) -> str:
    """Return a host as it is written in an address."""
    return f"[{host}]" if ":" in host else host


def plain_address(host: str) -> str:
    """Return a host ready to compare: IPv4 within IPv6 becomes IPv4, zones are dropped."""
    host = host.strip("[]").partition("%")[0].lower()
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        return host
    return str(address.ipv4_mapped or address)


def is_loopback(host: str) -> bool:
    """Tell whether a host is this machine to itself, however that is spelled."""
    return bool(LOOPBACK.fullmatch(plain_address(host)))


PRIVATE_NETWORKS = ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16",
                    "169.254.0.0/16", "100.64.0.0/10", "::1/128", "fc00::/7", "fe80::/10")
# A name of one word, or one that no public name server may know.
_PRIVATE_NAME = LatePattern(r"[^.]+|.+[.](local|lan|home|internal|home[.]arpa|localdomain)[.]?")


def is_private(host: str) -> bool:
    """Tell whether a host can only be at home: in private networks, including Tailscale's."""
    host = plain_address(host)
    if is_loopback(host):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        # What looks like a number is one to the system: 0x08080808 is 8.8.8.8.
        last = host.rstrip(".").rpartition(".")[2]
        is_number = re.fullmatch("0x[0-9a-f]*|[0-9]+", last)
        return bool(_PRIVATE_NAME.fullmatch(host)) and not is_number
    return any(address in ipaddress.ip_network(network) for network in PRIVATE_NETWORKS)


# -- the gateway --


def gateway_url(gateway: Gateway) -> str:
    """Return the address at which a program on this machine reaches the gateway."""
    reached = {"0.0.0.0": "127.0.0.1", "localhost": "127.0.0.1", "::": "::1"}
    return f"http://{show_host(reached.get(gateway.host, gateway.host))}:{gateway.port}"


def host_of(endpoint: str) -> str:
    """Return the host of a checked endpoint, an IPv6 address without its brackets."""
    return split_endpoint(endpoint).host


def is_gateway_address(gateway: Gateway, endpoint: str) -> bool:
    """Tell whether an endpoint is where the gateway listens, as seen from this machine."""
    host = host_of(endpoint)
    if host != gateway.host:
        listens_here = gateway.host in ("0.0.0.0", "::") or is_loopback(gateway.host)
        if not (listens_here and is_loopback(host)):
            return False
    return split_endpoint(endpoint).port == gateway.port


# -- machines that sleep --

def plan_magic_packet(mac: str) -> bytes:
    """Return the 102 bytes on which a network card starts its machine."""
    return b"\xff" * 6 + bytes.fromhex(mac.replace(":", "")) * 16
