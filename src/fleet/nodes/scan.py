"""Finding machines that nobody named."""
from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

from fleet.config.address import address_kind, is_private
from fleet.config.names import free_name_of, make_name
from fleet.config.node import NodeState
from fleet.config.sections import Node
from fleet.nodes.probe import ODD_REASONS, probe_unknown
from fleet.start.constants import OLLAMA_PORT, PROBE_GRACE_SECONDS
from fleet.start.record import Record, read, replace
from fleet.text.json import parse_object
from fleet.world.child import run_together

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from fleet.world.world import World


# Ollama, LM Studio, llama.cpp, vLLM: as they come.
SCAN_PORTS = (OLLAMA_PORT, 1234, 8080, 8000)
SCAN_SECONDS = 2.8  # for all of a scan
LISTS_SECONDS = 0.8  # of these for who is there to be asked
ADDRESSES_LIMIT = 128
# What lists the machines that this one has lately spoken with, on Linux and on macOS.
NEIGHBOR_PROGRAMS = (("ip", "-4", "neigh"), ("arp", "-an"))
TAILSCALE_PROGRAMS = ("tailscale", "/Applications/Tailscale.app/Contents/MacOS/Tailscale")
# What Tailscale's peers run that serves no models.
_PEER_PHONES = ("ios", "android", "tvos")


class Peer(Record):
    """A machine that Tailscale knows."""

    name: str
    address: str  # in the tailnet
    others: tuple[str, ...] = ()  # where else it was seen, as on the LAN


class TailscalePeer(Record):
    """A machine, in the words of `tailscale status --json`."""

    Online: bool = False
    Expired: bool = False  # its key has run out
    ShareeNode: bool = False  # of somebody we share with
    Location: object = None  # of an exit node somewhere
    OS: str = ""
    TailscaleIPs: tuple[str, ...] = ()
    Addrs: tuple[str, ...] = ()
    CurAddr: str = ""
    DNSName: str = ""
    HostName: str = ""


class TailscaleStatus(Record):
    """What `tailscale status --json` tells; without peers, `Peer` is null."""

    BackendState: str = ""
    Peer: dict[str, TailscalePeer] = {}


def parse_peers(text: str) -> list[Peer] | None:
    """Return the machines that could serve models; None: Tailscale is not running.

    Phones, machines of others and those that are off are left out.
    """
    status = read(TailscaleStatus, parse_object(text) or {})
    if status is None or status.BackendState != "Running":
        return None
    peers = [_parse_peer(entry) for entry in list(status.Peer.values())[:ADDRESSES_LIMIT]]
    return sorted(filter(None, peers), key=lambda peer: (peer.name, peer.address))


def _parse_peer(entry: TailscalePeer) -> Peer | None:
    """Return a machine that could serve models, by its address in the tailnet."""
    inside = [address for address in entry.TailscaleIPs
              if address_kind(address) == "Tailscale"]
    is_foreign = entry.Expired or entry.ShareeNode or entry.Location
    if not inside or not entry.Online or is_foreign or entry.OS.lower() in _PEER_PHONES:
        return None
    others = [place.rpartition(":")[0] for place in (*entry.Addrs, entry.CurAddr)]
    name = (entry.DNSName or entry.HostName or inside[0]).partition(".")[0]
    return Peer(make_name(name, "peer"), inside[0], tuple(filter(None, others)))


class Found(Record):
    """A machine that a scan found, and what it said."""

    node: Node
    state: NodeState
    runs: str  # in words


class Scan(Record):
    """What a scan came to."""

    addresses: tuple[str, ...]  # that were asked
    peers: tuple[Peer, ...]
    found: tuple[Found, ...]
    # (address:port, why) of what answers and is something else.
    others: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]  # what could not be looked at


def name_place(address: str, port: int, peers: Iterable[Peer], taken: set[str]) -> str:
    """Return a name for a machine that was found: Tailscale's, else by its address."""
    name = "lan-" + address.rpartition(".")[2]
    for peer in peers:
        if address == peer.address or address in peer.others:
            name = peer.name
    return free_name_of(name, str(port), taken=taken)


def scan_machines(world: World) -> Scan:
    """Ask the machines that this one has lately spoken with, and Tailscale's, on the usual ports.

    Nobody else: it knocks at no address that nobody named.
    """
    deadline = world.clock() + SCAN_SECONDS
    peers = find_peers(world, world.clock() + LISTS_SECONDS)
    notes: tuple[str, ...] = ()
    if isinstance(peers, str):
        notes = (peers,)
        peers = []
    neighbors = find_neighbors(world, world.clock() + LISTS_SECONDS)
    addresses = [*dict.fromkeys([*neighbors, *(peer.address for peer in peers)])]
    addresses = addresses[:ADDRESSES_LIMIT]

    jobs = {(address, port): functools.partial(
        probe_unknown, world, Node(address, f"http://{address}:{port}"), deadline)
        for port in SCAN_PORTS for address in addresses}
    world.allow_files(len(jobs) + 256)
    answers = dict(run_together(world, jobs, until=deadline + PROBE_GRACE_SECONDS))
    states = {place: answers[place] for place in jobs if place in answers}
    found, others = _sort_answers(states, peers)
    return Scan(tuple(addresses), tuple(peers), found, others, notes)


def find_neighbors(world: World, until: float) -> list[str]:
    """Return the private addresses of machines that this one has lately spoken with."""
    for words in NEIGHBOR_PROGRAMS:
        text = world.read_program(words, until)
        if text is not None:
            found = re.findall(r"(?m)^(?:\S+ \()?([0-9.]{7,15})\b.*\b(?:[0-9a-f]{1,2}:){5}", text)
            return [*filter(is_private, found)]
    return []


def find_peers(world: World, until: float) -> list[Peer] | str:
    """Return the machines that Tailscale knows, or why there are none to know."""
    program = next(filter(world.which, TAILSCALE_PROGRAMS), None)
    if not program:
        return "Tailscale is not installed here, so its machines were left out."
    text = world.read_program([program, "status", "--json"], until)
    peers = parse_peers(text or "")
    if peers is None:
        return "Tailscale is not running here, so its machines were left out."
    return peers


_OTHER_WORDS = {"http 401": "asking for a key", "http 403": "asking for a key"}


def _sort_answers(states: Mapping[tuple[str, int], NodeState], peers: Sequence[Peer]
                  ) -> tuple[tuple[Found, ...], tuple[tuple[str, str], ...]]:
    """Return machines of our kind, and what else answers."""
    lan = {address for (address, _), state in states.items()
           if state.online and address_kind(address) != "Tailscale"}
    # Seen on the LAN already.
    twice = {peer.address for peer in peers if lan & set(peer.others)}
    taken: set[str] = set()
    found, others = [], []
    for (address, port), state in states.items():
        if state.online and address not in twice:
            name = name_place(address, port, peers, taken)
            taken.add(name)
            node = Node(name, state.endpoint, provider=state.provider)
            found.append(Found(node, replace(state, name=name), state.runs))
        elif state.reason.startswith(ODD_REASONS):
            other = "not Ollama" if port == OLLAMA_PORT else "something else"
            others.append((f"{address}:{port}", _OTHER_WORDS.get(state.reason, other)))
    return tuple(found), tuple(others)
