"""What a person has accepted."""
from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

from fleet.config.address import is_loopback, is_private, plain_address, split_endpoint
from fleet.plan.trust import plan_key_stake, plan_stakes
from fleet.start.constants import CONNECT_SECONDS
from fleet.start.errors import FleetError, NodeFailure
from fleet.start.record import Record
from fleet.text.json import digest, read_page

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fleet.config.sections import Fleet
    from fleet.plan.trust import Stake
    from fleet.world.world import World


class TrustPage(Record):
    """What the trust file holds: hashes of what was accepted, by the path of a fleet file."""

    trusted: dict[str, tuple[str, ...]] = {}


def read_trusted(world: World) -> dict[str, tuple[str, ...]]:
    """Return {path of a fleet file: hashes of what was accepted of it}."""
    path = world.user_place("state", "trusted.json")
    page = None
    with contextlib.suppress(FleetError):  # absent, or out of reach: nothing was accepted
        if not world.others_may_read(path) and not world.belongs_to_other(path):
            page = read_page(TrustPage, world.read_bytes(path), "trusted/1")
    return page.trusted if page else {}


def trust_name(world: World, source: str) -> str:
    """Return under which name a fleet file is accepted: where it really lies."""
    return source if source == "<stdin>" else world.real_path(source)


def hash_of(name: str, stake: Stake) -> str:
    """Return what is kept of something that was accepted of a fleet file."""
    return digest(f"{name}\n{stake.fact}".encode("utf-8", "surrogateescape"))


def choose_new(world: World, source: str, stakes: Iterable[Stake]) -> list[Stake]:
    """Return what was not accepted yet of a fleet file."""
    name = trust_name(world, source)
    hashes = read_trusted(world).get(name, ())
    return [stake for stake in stakes if hash_of(name, stake) not in hashes]


def accept_stakes(world: World, source: str, stakes: Iterable[Stake]) -> None:
    """Keep that this is accepted of a fleet file, beside what was before."""
    new = choose_new(world, source, stakes)
    if new:
        name = trust_name(world, source)
        hashes = [hash_of(name, stake) for stake in new]
        keep_trusted(world, source, [*read_trusted(world).get(name, ()), *hashes])


def keep_trusted(world: World, source: str, hashes: Sequence[str]) -> None:
    """Keep what is accepted of a fleet file from now on, beside what is of the others."""
    trusted = {**read_trusted(world), trust_name(world, source): list(dict.fromkeys(hashes))}
    report = {"schema": "subagent-fleet/trusted/1",
              "trusted": {name: kept for name, kept in trusted.items() if kept}}
    content = json.dumps(report, indent=1).encode("utf-8") + b"\n"
    world.replace_files([(world.user_place("state", "trusted.json"), content, 0o600)])


def find_stakes(world: World, fleet: Fleet) -> list[Stake]:
    """Return what is at stake with a fleet on this machine."""
    gateway = fleet.gateway
    own_hosts = {gateway.host} if is_here(world, gateway.host) else set()
    for node in fleet.nodes.values():
        host = split_endpoint(node.endpoint).host
        if host != gateway.host and not is_private(host) and is_at_home(world, host):
            own_hosts.add(host)
    return plan_stakes(fleet, own_hosts)


def is_here(world: World, host: str) -> bool:
    """Tell whether a host is this machine, by an address or a name of its own."""
    host = plain_address(host)
    name = world.own_names()[0].lower()
    names = (name, f"{name}.local", name.partition(".")[0])
    return is_loopback(host) or host in names or world.is_own_address(host)


def is_at_home(world: World, host: str) -> bool:
    """Tell whether a host of unknown place is this machine, or in its Tailscale network."""
    if is_here(world, host):
        return True
    # Such names are Tailscale's to give: what it says is so. It also makes some of
    # them public.
    if not host.endswith(".ts.net"):
        return False
    try:
        places = world.resolve(host, 0, world.clock() + CONNECT_SECONDS)
    except NodeFailure:
        return False
    return bool(places) and all(is_private(address[0]) for *_, address in places)


def unlock_keys(world: World, fleet: Fleet) -> None:
    """Let those keys go to nodes that were accepted to go there."""
    for node in fleet.nodes.values():
        variable = node.api_key_env or ""
        key = world.environ.get(variable)
        if key and not choose_new(world, fleet.document.source, [plan_key_stake(node)]):
            world.node_keys[node.endpoint, variable] = key


def find_untrusted(world: World, fleet: Fleet) -> list[Stake]:
    """Return what is at stake with a fleet and was not accepted."""
    stakes = find_stakes(world, fleet)
    if not stakes:
        return []  # as with every fleet of machines at home: nothing is read
    return choose_new(world, fleet.document.source, stakes)
