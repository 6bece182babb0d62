"""Finding machines that nobody named."""
from __future__ import annotations

import functools
import ipaddress
from typing import TYPE_CHECKING

from fleet.config.address import PRIVATE_NETWORKS, address_kind, is_private
from fleet.config.names import free_name_of, make_name
from fleet.config.node import NodeState
from fleet.config.sections import Node
from fleet.nodes.probe import probe_unknown
from fleet.start.constants import EXIT_REFUSED, EXIT_USAGE, OLLAMA_PORT, PROBE_GRACE_SECONDS
from fleet.start.errors import FleetError
from fleet.start.record import Record, read, replace
from fleet.text.json import parse_object
from fleet.text.phrases import clean_name, count_of
from fleet.world.child import run_together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import NoReturn

    from fleet.world.world import World


# Ollama, LM Studio, llama.cpp, vLLM: as they come.
SCAN_PORTS = (OLLAMA_PORT, 1234, 8080, 8000)
SCAN_PREFIX = 22  # of the largest network that is scanned: 1,022 addresses
PEERS_LIMIT = 256
NET_EXAMPLE = "192.168.1.0/24"
# What Tailscale's peers run that serves no models.
_PEER_PHONES = ("ios", "android", "tvos")


class Peer(Record):
    """A machine that Tailscale knows."""

    name: str
    address: str  # in the tailnet
    others: tuple[str, ...] = ()  # where else it was seen, as on the LAN


def parse_network(text: str, command: str) -> str:
    """Return a network that may be scanned: private, IPv4, not too large."""
    def refuse(why: str, status: int = EXIT_USAGE) -> NoReturn:
        raise FleetError("scan-network", f"{command}: `{clean_name(text)}` {why}",
                         status=status, fix=f"subagent-fleet {command} --scan {NET_EXAMPLE}")

    try:
        network = ipaddress.IPv4Network(text if "/" in text else f"{text}/24", strict=False)
    except ValueError:
        refuse(f"is not an IPv4 network like {NET_EXAMPLE}")
    if not any(network.subnet_of(ipaddress.IPv4Network(private))
               for private in PRIVATE_NETWORKS if ":" not in private):
        refuse("is not a private network; others are never scanned", EXIT_REFUSED)
    if network.prefixlen < SCAN_PREFIX:
        refuse(f"is too large; at most a /{SCAN_PREFIX} is scanned")
    return str(network)


def plan_networks(addresses: Iterable[str]) -> list[str]:
    """Return the /24 of each private network that a machine with these addresses is in."""
    networks = []
    for address in addresses:
        # Tailscale's is no neighbourhood: it says itself who is there.
        if address_kind(address) == "LAN" and is_private(address) and ":" not in address:
            network = str(ipaddress.IPv4Network(f"{address}/24", strict=False))
            if network not in networks:
                networks.append(network)
    return networks


def plan_places(networks: Iterable[str], peers: Iterable[Peer]) -> list[tuple[str, int]]:
    """Return each (address, port) that a scan tries, Ollama's port of all addresses first."""
    addresses = [peer.address for peer in peers]
    for network in networks:
        addresses += map(str, ipaddress.IPv4Network(network).hosts())
    unique = dict.fromkeys(addresses)
    return [(address, port) for port in SCAN_PORTS for address in unique]


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
    peers = [_parse_peer(entry) for entry in list(status.Peer.values())[:PEERS_LIMIT]]
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

    networks: tuple[str, ...]
    peers: tuple[Peer, ...]
    counts: dict[str, int]  # of addresses: open, refused, silent, unreachable
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


SCAN_SECONDS = 2.8  # for all of a scan
KNOCK_SECONDS = 1.2  # of these for connections
PEERS_SECONDS = 0.8  # of these for `tailscale`
TAILSCALE_PROGRAMS = ("tailscale", "/Applications/Tailscale.app/Contents/MacOS/Tailscale")


def scan_machines(world: World, networks: Sequence[str], taken: Iterable[str],
                  watch: Callable[[str], None] = lambda text: None) -> Scan:
    """Ask every address of these networks, and Tailscale's peers, on the usual ports."""
    deadline = world.clock() + SCAN_SECONDS
    notes = []
    if not networks:
        notes.append("This machine is not in a private network; name one: "
                     f"`--scan {NET_EXAMPLE}`.")
    peers = find_peers(world, world.clock() + PEERS_SECONDS)
    if isinstance(peers, str):
        notes.append(peers)
        peers = []

    places = plan_places(networks, peers)
    outcomes = {}
    for place, outcome in world.knock(places, KNOCK_SECONDS):
        outcomes[place] = outcome
        if len(outcomes) % 64 == 0:
            watch(f"{len(outcomes):,} of {len(places):,} places asked")
    counts = _count_addresses(outcomes)
    if networks and counts["unreachable"] == sum(counts.values()):
        notes.append(f"{', '.join(networks)}: cannot be reached from here.")

    doors = [place for place in places if outcomes.get(place) == "open"]
    watch(f"{count_of(doors, 'open port')} found, asking who is there")
    found, others = _identify_doors(world, doors, peers, set(taken), deadline)
    return Scan(tuple(networks), tuple(peers), counts, found, others, tuple(notes))


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


def _count_addresses(outcomes: Mapping[tuple[str, int], str]) -> dict[str, int]:
    """Return how many addresses took a connection, refused all, were silent, led nowhere."""
    best = {}
    words = ("open", "refused", "silent", "unreachable")
    for word in reversed(words):
        best.update({address: word for (address, _), outcome in outcomes.items()
                     if outcome == word})
    return {word: list(best.values()).count(word) for word in words}


_OTHER_WORDS = {"timeout": "silent", "http 401": "wanting a key", "http 403": "wanting a key"}


def _identify_doors(world: World, doors: Sequence[tuple[str, int]], peers: Sequence[Peer],
                    taken: set[str], deadline: float
                    ) -> tuple[tuple[Found, ...], tuple[tuple[str, str], ...]]:
    """Ask who listens; return machines of our kind, and what else answers."""
    jobs = {(address, port): functools.partial(
        probe_unknown, world, Node(address, f"http://{address}:{port}"), deadline)
        for address, port in doors}
    answers = dict(run_together(world, jobs, until=deadline + PROBE_GRACE_SECONDS))
    lan = {address for address, _ in doors if address_kind(address) != "Tailscale"}
    # Seen on the LAN already.
    twice = {peer.address for peer in peers if lan & set(peer.others)}

    found, others = [], []
    for address, port in doors:
        state = answers.get((address, port)) or NodeState(address, "", "timeout")
        if not state.online:
            other = "not Ollama" if port == OLLAMA_PORT else "something else"
            others.append((f"{address}:{port}", _OTHER_WORDS.get(state.reason, other)))
        elif address not in twice:
            name = name_place(address, port, peers, taken)
            taken.add(name)
            node = Node(name, state.endpoint, provider=state.provider)
            found.append(Found(node, replace(state, name=name), state.runs))
    return tuple(found), tuple(others)
