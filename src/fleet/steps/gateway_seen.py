"""A running gateway: which one it is, and what it says."""
from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from fleet.config.address import gateway_url
from fleet.files.target import fleet_digest
from fleet.findings.checks import (
    FAR_GATEWAY,
    OLD_GATEWAY,
    OUR_GATEWAY,
    SILENT_GATEWAY,
)
from fleet.findings.gateway import check_gateway
from fleet.gateway.keys import prove_key, proves_key
from fleet.gateway.reception import QUIET_SECONDS
from fleet.gateway.server import EVENTS_PATH, PROOF_PATH
from fleet.nodes.probe import probe_nodes
from fleet.page.sight import FleetPage, GatewayView
from fleet.speech.talk import Ask, Reply
from fleet.start.constants import CONNECT_SECONDS, PROBE_LIMIT_BYTES
from fleet.start.errors import FleetError, NodeFailure
from fleet.start.record import read, replace
from fleet.text.json import parse_object
from fleet.workspace.trust import find_untrusted, is_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from fleet.config.sections import Fleet, Gateway
    from fleet.workspace.directory import Workspace
    from fleet.world.world import World


def get_page(world: World, url: str, until: float, **headers: str) -> Reply:
    """Return the answer to a GET."""
    with contextlib.closing(world.open_exchange(url, headers=headers,
                                                deadline=until)) as exchange:
        exchange.read_head()
        return Reply(exchange.status, exchange.headers, exchange.read_all())


def who_serves(world: World, fleet: Fleet, key: str, until: float) -> str:
    """Return what listens on a fleet's gateway port."""
    return see_gateway(world, fleet, key, until).holder


def see_gateway(world: World, fleet: Fleet, key: str, until: float) -> GatewayView:
    """Return what serves a fleet, and its `/fleet` if it is our gateway.

    Any program can take the port and claim any name. So the key is sent only after a proof that
    the other side has it already.
    """
    is_far = not is_here(world, fleet.gateway.host)
    if is_far and any(stake.fact.startswith("gateway ")
                      for stake in find_untrusted(world, fleet)):
        return GatewayView(FAR_GATEWAY)
    url = gateway_url(fleet.gateway)
    try:
        if b'"subagent-fleet"' in get_page(world, url + "/", until).body:
            page = None
            if key and _knows_key(world, fleet, key, until):
                page = read(FleetPage, get_page_with_key(world, url + "/fleet", key, until))
            if not page or page.fleet != fleet.name:
                return GatewayView("subagent-fleet")
            is_new = page.config == fleet_digest(fleet)
            return GatewayView(OUR_GATEWAY if is_new else OLD_GATEWAY, page)
        # LiteLLM cannot prove anything, so it gets no key: the file says that it serves.
        if (fleet.gateway.provider == "litellm"
                and b"I'm alive!" in get_page(world, url + "/health/liveliness", until).body):
            return GatewayView(OUR_GATEWAY)
    except NodeFailure as failure:
        if failure.reason in ("refused", "unreachable", "dns"):
            return GatewayView("")
        if failure.reason == "timeout":  # a busy or hung gateway: nothing else is known
            return GatewayView(SILENT_GATEWAY)
    return GatewayView("another program")


def _knows_key(world: World, fleet: Fleet, key: str, until: float) -> bool:
    """Tell whether the gateway proves, without being sent the key, that it has it."""
    nonce = world.token(32)
    url = f"{gateway_url(fleet.gateway)}{PROOF_PATH}{nonce}"
    with contextlib.closing(world.open_exchange(url, deadline=until)) as exchange:
        address, port = exchange.find_peer()
        exchange.read_head()
        page = parse_object(exchange.read_all(PROBE_LIMIT_BYTES)) or {}
    return proves_key(page.get("proof"), prove_key(key, nonce, address, port))


def get_page_with_key(world: World, url: str, key: str, until: float) -> dict[str, Any]:
    """Return the page that a gateway shows with the key; empty if it does not answer."""
    try:
        body = get_page(world, url, until, Authorization=f"Bearer {key}").body
    except (NodeFailure, UnicodeEncodeError):  # no answer, or a key that no header can hold
        return {}
    return parse_object(body) or {}


def find_gateway(world: World, fleet: Fleet, key: str, *, needed: bool = False) -> bool:
    """Tell whether this fleet's gateway runs; refuse another one, or none if one is needed."""
    holder = who_serves(world, fleet, key, world.clock() + CONNECT_SECONDS)
    finding = check_gateway(fleet, holder)
    runs = finding.slug == "gateway-up"
    if finding.level == "error":
        raise FleetError(finding.slug, finding.what,
                         fix=name_free_port(world, fleet, finding.fix))
    if needed and not runs:
        raise FleetError(finding.slug, finding.what, fix=finding.fix)
    return runs


def name_free_port(world: World, fleet: Fleet, fix: str) -> str:
    """Return a fix with a free port."""
    port = world.find_free_port(fleet.gateway.host, fleet.gateway.port)
    return fix.replace("another `port:`", f"`port: {port}`") if port else fix


def ask_gateway(world: World, fleet: Fleet, key: str) -> dict[str, dict[str, Any]]:
    """Return {node: its totals} from this fleet's gateway."""
    view = see_gateway(world, fleet, key, world.clock() + CONNECT_SECONDS)
    if not view.page or view.holder != OUR_GATEWAY:
        return {}
    return {node.name: vars(node) for node in view.page.nodes}


def follow_events(world: World, fleet: Fleet, key: str, wait: Callable[[], object]
                  ) -> Iterator[dict[str, Any]]:
    """Yield the events of this fleet's gateway until it ends; NodeFailure if nothing answers.

    `wait` is called between events, and must return soon.
    """
    holder = who_serves(world, fleet, key, world.clock() + CONNECT_SECONDS)
    if holder not in (OUR_GATEWAY, OLD_GATEWAY):
        raise NodeFailure("refused", "no gateway of this fleet answers")
    ask = Ask(EVENTS_PATH, _read_frame, headers={"Authorization": f"Bearer {key}"})
    for value in world.ask_lines(gateway_url(fleet.gateway), ask, wait,
                                 stall_seconds=3 * QUIET_SECONDS):
        if value:
            yield value


def _read_frame(reply: Reply) -> dict[str, Any] | None:
    """Return the object in a line of `/events`, or None."""
    if reply.status != 200:
        raise NodeFailure("bad answer", f"it answers {reply.status} instead of its events")
    if not reply.body.startswith(b"data: "):
        return None
    return parse_object(reply.body[len(b"data: "):])


def avoid_taken_port(world: World, gateway: Gateway) -> Gateway:
    """Return a gateway unchanged if its port is free, else with the next free port."""
    try:
        get_page(world, gateway_url(gateway) + "/", world.clock() + 1.0)
    except NodeFailure as failure:
        if failure.reason in ("refused", "unreachable", "dns"):
            return gateway
    port = world.find_free_port(gateway.host, gateway.port)
    return replace(gateway, port=port or gateway.port)


def plan_asking(workspace: Workspace, fleet: Fleet, seconds: float
                ) -> dict[str, Callable[[], Any]]:
    """Return the jobs that ask all machines, and the gateway."""
    world, key = workspace.world, known_key(workspace, fleet)
    until = world.clock() + seconds
    return {"states": lambda: probe_nodes(world, fleet.nodes, seconds, fleet.models),
            "view": lambda: see_gateway(world, fleet, key, until)}


def known_key(workspace: Workspace, fleet: Fleet) -> str:
    """Return the gateway's key if it can be read, else ""."""
    try:
        return workspace.find_key(fleet)
    except FleetError:
        return ""
