"""`env`: print variables for a shell."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.agree import ask_trust
from fleet.cli.rows import CONFIG, OUT, SET_UP, TRUST, Flag, command
from fleet.cli.say import open_workspace
from fleet.files.shell import render_environment
from fleet.start.constants import EXIT_OK
from fleet.workspace.config import load_config

if TYPE_CHECKING:
    from argparse import Namespace

    from fleet.world.world import World


@command("env", "print Claude Code's environment for your shell", CONFIG, OUT,
         Flag("--show-key", "print the key even on a terminal"), TRUST,
         group=SET_UP, examples=("env", 'eval "$(subagent-fleet env)"'))
def cmd_env(options: Namespace, world: World) -> int:
    fleet = load_config(world, options.config).fleet
    ask_trust(fleet, options, world)
    workspace = open_workspace(options, world)
    workspace.read_key(fleet)  # without one there is nothing to print
    is_shown = options.show_key or not world.is_terminal()

    # Only the key in the file: a key from the environment stays there.
    world.write(render_environment(fleet, workspace.kept_key(fleet) if is_shown else None))
    return EXIT_OK
