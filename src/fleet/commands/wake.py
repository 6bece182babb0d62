"""`wake`: wake machines."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.agree import ask_trust
from fleet.cli.rows import CONFIG, JSON, SECONDS, SERVE, TRUST, Flag, command
from fleet.cli.say import check_names, print_report
from fleet.config.address import WAKE_SECONDS, plan_mac_hint
from fleet.nodes.probe import answers
from fleet.nodes.wake import SLEEP_TEST_SECONDS
from fleet.start.constants import EXIT_OK, EXIT_PROBLEM
from fleet.start.errors import FleetError
from fleet.steps.warming import format_waking, parse_via, wake_all
from fleet.workspace.config import load_config, look_of
from fleet.world.child import run_together

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from fleet.config.sections import Fleet, Node
    from fleet.nodes.wake import Waking
    from fleet.world.world import World


@command("wake", "wake sleeping machines, and wait until they answer",
         Flag("nodes", "only these nodes; default: all with a `mac:`", "NODE",
              {"nargs": "*", "default": ()}, offers=("nodes",)), CONFIG,
         Flag("--via", "where to send; default: the broadcast addresses of this machine",
              "ADDRESS[:PORT]", {"default": ""}),
         Flag("--timeout", "seconds to wait", "S", {**SECONDS, "default": WAKE_SECONDS}),
         TRUST, JSON, group=SERVE,
         examples=("wake", "wake mini", "wake mini --via 192.168.1.255"))
def cmd_wake(options: Namespace, world: World) -> int:
    fleet = load_config(world, options.config).fleet
    check_names("node", options.nodes, fleet.nodes, fleet.name)
    ask_trust(fleet, options, world)
    nodes = choose_sleepers(world, fleet, options.nodes)
    via = parse_via(world, options.via)

    def say(waking: Waking) -> None:
        if not options.json:
            world.out(format_waking(waking.node, waking.state, waking.seconds,
                                    look_of(world)))

    wakings = wake_all(world, nodes, options.timeout, via, say)
    if options.json:
        print_report(world, "wake", {"results": wakings, "via": [host for host, _ in via]})
    is_whole = all(waking.state in ("awake", "woken") for waking in wakings)
    return EXIT_OK if is_whole else EXIT_PROBLEM


def choose_sleepers(world: World, fleet: Fleet, names: Sequence[str]) -> list[Node]:
    """Return the nodes to wake; one that is off and has no hardware address is refused."""
    chosen = [fleet.nodes[name] for name in dict.fromkeys(names)]
    chosen = (chosen or [node for node in fleet.nodes.values() if node.mac]
              or list(fleet.nodes.values()))
    jobs = {node.name: lambda node=node: answers(world, node, SLEEP_TEST_SECONDS)
            for node in chosen if not node.mac}
    asked = dict(run_together(world, jobs))
    for node in chosen:
        failure = asked.get(node.name)
        if failure and failure.reason != "refused":  # a machine that sleeps refuses nobody
            raise FleetError("no-mac",
                             f"nodes.{node.name} has no `mac:`, so it can't be woken",
                             fix=plan_mac_hint(node))
    return chosen
