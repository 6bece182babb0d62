"""The record of what a person has accepted."""
from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

from fleet.config.address import is_loopback, is_private, plain_address, split_endpoint
from fleet.plan.trust import plan_stakes
from fleet.start.constants import CONNECT_SECONDS
from fleet.start.errors import FleetError, NodeFailure
from fleet.start.record import Record
from fleet.text.json import digest, read_page

if TYPE_CHECKING:
    from fleet.config.sections import Fleet
    from fleet.plan.trust import Stake
    from fleet.world.world import World


class TrustPage(Record):
    """The trust file: a hash of accepted stakes, by the path of a fleet file."""

    trusted: dict[str, str] = {}


def read_trusted(world: World) -> dict[str, str]:
    """Return {path of a fleet file: the hash of its accepted stakes}."""
    path = world.user_place("state", "trusted.json")
    page = None
    with contextlib.suppress(FleetError):  # absent, or out of reach: nothing was accepted
        if not world.others_may_read(path) and not world.belongs_to_other(path):
            page = read_page(TrustPage, world.read_bytes(path), "trusted/2")
    return page.trusted if page else {}


def name_trust(world: World, fleet: Fleet) -> tuple[str, str]:
    """Return the real path of a fleet file, and the hash of its stakes."""
    source = fleet.document.source
    name = source if source == "<stdin>" else world.real_path(source)
    facts = sorted(stake.fact for stake in plan_stakes(fleet))
    return name, digest("\n".join([name, *facts]).encode("utf-8", "surrogateescape"))


def is_trusted(world: World, fleet: Fleet) -> bool:
    """Tell whether a person has accepted exactly the stakes of a fleet file."""
    name, accepted = name_trust(world, fleet)
    return read_trusted(world).get(name) == accepted


def keep_trusted(world: World, fleet: Fleet, *, accepts: bool) -> None:
    """Record that the stakes of a fleet file are accepted, or no longer are."""
    name, accepted = name_trust(world, fleet)
    trusted = {**read_trusted(world), name: accepted}
    if not accepts or not plan_stakes(fleet):
        del trusted[name]
    if trusted != read_trusted(world):
        report = {"schema": "subagent-fleet/trusted/2", "trusted": trusted}
        content = json.dumps(report, indent=1).encode("utf-8") + b"\n"
        world.replace_files([(world.user_place("state", "trusted.json"), content, 0o600)])


def find_stakes(world: World, fleet: Fleet) -> list[Stake]:
    """Return the stakes of a fleet on this machine."""
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
    """Tell whether a host is this machine, or in its Tailscale network."""
    if is_here(world, host):
        return True
    # Tailscale itself gives out such names, so its list is the truth. It also makes some of
    # them public.
    if not host.endswith(".ts.net"):
        return False
    try:
        places = world.resolve(host, 0, world.clock() + CONNECT_SECONDS)
    except NodeFailure:
        return False
    return bool(places) and all(is_private(address[0]) for *_, address in places)


def unlock_keys(world: World, fleet: Fleet) -> None:
    """Allow the keys of nodes to be sent where the person accepted that."""
    nodes = [node for node in fleet.nodes.values() if node.api_key_env]
    if nodes and is_trusted(world, fleet):
        for node in nodes:
            variable = node.api_key_env or ""
            if world.environ.get(variable):
                world.node_keys[node.endpoint, variable] = world.environ[variable]


def find_untrusted(world: World, fleet: Fleet) -> list[Stake]:
    """Return the stakes of a fleet, if they were not accepted."""
    if not plan_stakes(fleet) or is_trusted(world, fleet):
        return []  # every fleet of machines at home: nothing to look up
    return find_stakes(world, fleet)
