"""Waking machines that sleep."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.config.address import plan_magic_packet
from fleet.nodes.probe import answers
from fleet.start.errors import NodeFailure
from fleet.start.record import Record
from fleet.world.child import run_together

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fleet.config.sections import Node
    from fleet.world.world import World


WAKE_SECONDS = 120.0  # a Mac takes 5 to 15, a PC that was off a minute
WAKE_PORT = 9  # discard: nobody needs to listen
SLEEP_TEST_SECONDS = 2.0  # who does not answer by then may sleep
WAKE_PAUSE_SECONDS = 0.5
WAKE_AGAIN_SECONDS = 5.0  # a packet may be lost


class Waking(Record):
    """How a machine was woken."""

    node: str
    state: str  # awake: it was; stopped: nothing listens there; woken, or silent
    seconds: float = 0.0


def wake_nodes(world: World, nodes: Iterable[Node]) -> Iterator[Waking | None]:
    """Wake the nodes that sleep, all at once; yield each as it ends, None meanwhile."""
    jobs = {node.name: lambda node=node: _wake(world, node) for node in nodes}
    for _, waking in run_together(world, jobs):
        if isinstance(waking, NodeFailure):
            raise waking
        yield waking


def _wake(world: World, node: Node) -> Waking:
    """Send the packet until a node answers, or the time is over."""
    failure = answers(world, node, SLEEP_TEST_SECONDS)
    if failure is None:
        return Waking(node.name, "awake")
    if failure.reason == "refused":  # a machine that sleeps refuses nobody
        return Waking(node.name, "stopped")

    packet = plan_magic_packet(node.mac or "")
    began = world.clock()
    sent = began - WAKE_AGAIN_SECONDS
    while world.clock() < began + WAKE_SECONDS:
        if world.clock() >= sent + WAKE_AGAIN_SECONDS:
            sent = world.clock()
            _send_everywhere(world, packet)
        left = began + WAKE_SECONDS - world.clock()
        if answers(world, node, max(min(SLEEP_TEST_SECONDS, left), 0.1)) is None:
            return Waking(node.name, "woken", world.clock() - began)
        world.sleep(min(WAKE_PAUSE_SECONDS, max(left, 0)))
    return Waking(node.name, "silent", world.clock() - began)


def _send_everywhere(world: World, packet: bytes) -> None:
    """Send a packet into each network of this machine; it is enough that one takes it."""
    hosts = world.broadcast_addresses()
    failures = []
    for host in hosts:
        try:
            world.send_datagram(host, WAKE_PORT, packet)
        except NodeFailure as failure:
            failures.append(failure)
    if len(failures) == len(hosts):
        raise failures.pop()
