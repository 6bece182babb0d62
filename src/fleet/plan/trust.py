"""What of a person a fleet file could send away."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.config.address import gateway_url, host_of, is_loopback, is_private
from fleet.start.record import Record

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from fleet.config.sections import Fleet, Node


class Stake(Record):
    """Something of a person's that would go where no fleet file may send it unasked."""

    fact: str  # what is accepted, to the letter
    what: str  # as a person reads it


def plan_stakes(fleet: Fleet, own_hosts: Collection[str] = ()) -> list[Stake]:
    """Return the stakes of using a fleet: what it would send where.

    `own_hosts` are those of its hosts that turned out to be this machine's, or to be at home.
    """
    gateway = fleet.gateway
    stakes = []
    if not is_loopback(gateway.host) and gateway.host not in own_hosts:
        url = gateway_url(gateway)
        stakes.append(
            Stake(f"gateway {url}", f"the gateway's key and all prompts go to {url}"))
    stakes += plan_node_stakes(fleet.nodes.values(), own_hosts)
    far = {stake.fact for stake in stakes}
    for model in fleet.models.values():
        endpoint = fleet.nodes[model.node].endpoint
        if model.cloud and f"node {endpoint}" not in far:
            stakes.append(Stake(f"cloud {model.ollama_model} {endpoint}",
                                "prompts and the files agents read go to the cloud that runs "
                                f"{model.ollama_model} for {endpoint} (node {model.node})"))
    return stakes


def plan_node_stakes(nodes: Iterable[Node], own_hosts: Collection[str] = ()) -> list[Stake]:
    """Return the stakes of asking these nodes."""
    stakes = []
    for node in nodes:
        host = host_of(node.endpoint)
        if host not in own_hosts and not is_private(host):
            stakes.append(Stake(f"node {node.endpoint}", "prompts and the files agents read go "
                                f"to {node.endpoint} (node {node.name})"))
        if node.api_key_env:
            stakes.append(Stake(f"key {node.api_key_env} {node.endpoint}", f"the key in "
                                f"{node.api_key_env} goes to {node.endpoint} (node {node.name})"))
        if node.auth:
            stakes.append(Stake(f"login {node.endpoint}", "Claude Code's own login goes to "
                                f"{node.endpoint} (node {node.name})"))
    return stakes
