"""`env`: variables for a shell."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.agree import ask_trust
from fleet.cli.rows import CONFIG, OUT, SET_UP, TRUST, Flag, command
from fleet.cli.say import open_workspace, print_report
from fleet.files.shell import render_environment
from fleet.plan.environment import merge_environment, plan_environment
from fleet.start.constants import EXIT_OK
from fleet.workspace.config import load_config

if TYPE_CHECKING:
    from argparse import Namespace

    from fleet.world.world import World


@command("env", "print Claude Code's environment for your shell", CONFIG, OUT,
         Flag("--shell", "your shell", "SHELL",
              {"default": "sh", "choices": ("sh", "bash", "zsh", "fish", "json")}),
         Flag("--show-key", "show the key on a terminal, too"), TRUST,
         group=SET_UP, examples=("env", 'eval "$(subagent-fleet env)"'))
def cmd_env(options: Namespace, world: World) -> int:
    fleet = load_config(world, options.config).fleet
    ask_trust(fleet, options, world)
    workspace = open_workspace(options, world)
    key = workspace.read_key(fleet)
    is_shown = options.show_key or not world.is_terminal()

    if options.shell == "json":
        unset = [variable.name for variable in plan_environment(fleet) if variable.is_unset]
        shown = key if is_shown else "(--show-key shows it)"
        print_report(world, "env", {
            "set": merge_environment({}, fleet, shown), "unset": unset})
    else:
        # Only what the file keeps: a key of the environment stays where it is.
        kept = workspace.kept_key(fleet) if is_shown else None
        shell = "fish" if options.shell == "fish" else "sh"  # which bash and zsh understand
        world.write(render_environment(fleet, kept, shell))
    return EXIT_OK
