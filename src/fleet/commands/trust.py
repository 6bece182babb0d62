"""`trust`: have a person accept what a fleet file may do."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.agree import agree, format_stakes
from fleet.cli.rows import CONFIG, SET_UP, YES, Flag, command
from fleet.start.constants import EXIT_OK, EXIT_REFUSED
from fleet.start.errors import FleetError
from fleet.workspace.config import load_config, look_of
from fleet.workspace.trust import find_stakes, find_untrusted, keep_trusted

if TYPE_CHECKING:
    from argparse import Namespace

    from fleet.world.world import World


@command("trust", "allow a fleet file to send data outside your networks", CONFIG,
         YES, Flag("--show", "only show what it would send and what you accepted"),
         Flag("--forget", "forget what you have agreed to"),
         group=SET_UP, examples=("trust --show", "trust"),
         excludes=("forget show", "forget yes", "show yes"))
def cmd_trust(options: Namespace, world: World) -> int:
    """Show what the fleet file would send outside, and have a person accept it."""
    fleet = load_config(world, options.config).fleet
    source = fleet.document.source
    if options.forget or options.yes:
        keep_trusted(world, fleet, accepts=options.yes)
    stakes = find_stakes(world, fleet)
    is_new = bool(find_untrusted(world, fleet))
    world.out(format_stakes(source, stakes, "new" if is_new else "accepted", look_of(world)))
    if is_new and not (options.show or options.forget):
        agree(world, "", "Do you want that?", FleetError(
            "untrusted", "nothing was accepted", status=EXIT_REFUSED,
            fix=f"`subagent-fleet trust --yes` accepts it; or change {source}"))
        keep_trusted(world, fleet, accepts=True)
        world.out("Accepted.\n")
    return EXIT_OK
