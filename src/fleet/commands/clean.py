"""`clean`: remove generated files."""
from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from fleet.cli.agree import agree
from fleet.cli.rows import CONFIG, MORE, OUT, YES, Flag, command, type_again
from fleet.cli.say import open_workspace, paths_that, refuse_edited, tell
from fleet.config.address import gateway_url
from fleet.config.rules import TARGET_NAMES
from fleet.files.harnesses import FORMER_TARGET
from fleet.files.skills import TAUGHT
from fleet.start.constants import ENVIRONMENT_FILE, EXIT_OK, EXIT_REFUSED
from fleet.start.errors import FleetError
from fleet.steps.gateway_seen import find_gateway
from fleet.text.phrases import count_of
from fleet.workspace.changes import format_changes, remove_files
from fleet.workspace.config import load_config, look_of

if TYPE_CHECKING:
    from argparse import Namespace

    from fleet.workspace.directory import Workspace
    from fleet.world.world import World


@command("clean", "remove the generated files that you have not changed", OUT, CONFIG,
         Flag("--dry-run", "only list them"), YES,
         Flag("--force", "don't ask; remove edited files too, after copying them"),
         group=MORE, examples=("clean --dry-run", "clean", "clean --yes"))
def cmd_clean(options: Namespace, world: World) -> int:
    workspace = open_workspace(options, world)
    changes = workspace.compare(None, (
        *TARGET_NAMES, FORMER_TARGET.name, *(target.name for target in TAUGHT)))
    kept = [] if options.force else paths_that(changes, "edited")
    doomed = [change for change in changes if change.path not in kept]
    if ENVIRONMENT_FILE in [change.path for change in doomed]:
        tell_served(workspace, options)
    listed = [(change.path, "") for change in doomed if change.found is not None]
    if options.dry_run and listed:
        world.out(format_changes("Would remove:", listed, look_of(world)))
    elif not listed:
        world.out("Nothing to remove.\n")
    elif not (options.force or options.yes or options.dry_run):
        agree(world, format_changes("To remove:", listed, look_of(world, "stderr")),
              f"Remove {count_of(listed, 'file')}?", FleetError(
                  "not-removed", "nothing was removed", status=EXIT_REFUSED,
                  fix=f"`{type_again(options, yes=True)}`"))
    if doomed and not options.dry_run:
        remove_files(workspace, doomed, is_all=not kept)
        if listed:
            world.out(format_changes("Removed:", listed, look_of(world)))
    if kept:
        raise refuse_edited(kept, type_again(options, force=True, dry_run=False), "kept")
    return EXIT_OK


def tell_served(workspace: Workspace, options: Namespace) -> None:
    """Warn about a gateway that still uses the key."""
    world = workspace.world
    with contextlib.suppress(FleetError):  # no fleet, so no gateway can use its key
        fleet = load_config(world, options.config).fleet
        if find_gateway(world, fleet, workspace.read_key(fleet)):
            tell(world, f"The gateway at {gateway_url(fleet.gateway)} still uses the key that "
                 "this removes. Stop it, and start it again after `subagent-fleet generate`.\n")
