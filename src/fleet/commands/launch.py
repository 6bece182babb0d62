"""`launch`: run another program on the fleet."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.agree import ask_trust
from fleet.cli.rows import CONFIG, OUT, SERVE, TRUST, Flag, command
from fleet.cli.say import check_names, open_workspace, refuse_edited, tell_findings
from fleet.files.harnesses import HARNESSES, OTHER_PROGRAM
from fleet.findings.config import lint_key
from fleet.plan.environment import harness_environment
from fleet.start.constants import EXIT_REFUSED
from fleet.start.errors import FleetError
from fleet.steps.claude_start import launch_claude, tell_session
from fleet.steps.gateway_seen import find_gateway
from fleet.text.phrases import quote_shell, some_of
from fleet.workspace.config import load_config

if TYPE_CHECKING:
    from argparse import Namespace

    from fleet.config.sections import Fleet
    from fleet.files.harness import Harness
    from fleet.workspace.directory import Workspace
    from fleet.world.world import World


@command("launch", "run Claude Code or another program on the fleet",
         Flag("program", some_of(("claude", *HARNESSES)), "PROGRAM",
              offers=("claude", *HARNESSES)),
         CONFIG, OUT, TRUST, group=SERVE,
         examples=("launch claude", "launch claude -- -p 'say hi'",
                   "launch codex -- exec 'say hi'"), passes="ARGS")
def cmd_launch(options: Namespace, world: World) -> int:
    """Run a program on the fleet, and exit with its code."""
    check_names("program", [options.program], ("claude", *HARNESSES), "launch",
                OTHER_PROGRAM)
    try:
        fleet = load_config(world, options.config).fleet
    except FleetError as error:
        if error.slug != "no-config" or options.program in HARNESSES:
            raise
        raise FleetError(error.slug, error.what, fix="`subagent-fleet up` makes one, serves it "
                         "and starts Claude Code") from None
    ask_trust(fleet, options, world)
    workspace = open_workspace(options, world)
    if options.program in HARNESSES:
        return launch_harness(workspace, fleet, HARNESSES[options.program], options)

    began = world.now()
    status = launch_claude(workspace, fleet, options)
    tell_session(workspace, began, options)
    return status


def launch_harness(workspace: Workspace, fleet: Fleet, harness: Harness, options: Namespace,
                   ) -> int:
    """Update a program's files, make sure that a gateway answers, run the program to its end."""
    world = workspace.world
    program = world.which(harness.program)
    if not program:
        raise FleetError("program-missing", f"{harness.title} is not on the PATH",
                         fix=harness.install)
    key = workspace.read_key(fleet)
    if not options.trust:
        refuse_tracked(workspace, harness)
    tell_findings(lint_key(fleet, world.environ), world)

    changes = workspace.compare(fleet, (harness.name,))
    edited = [change.path for change in changes if change.action == "edited"]
    if edited:
        raise refuse_edited(edited, f"subagent-fleet generate --target {harness.name} --force",
                            "nothing was started")
    workspace.write(changes)
    find_gateway(world, fleet, key, needed=True)
    place = world.real_path(workspace.path(harness.directory()))
    start = harness.start(fleet, place, key)
    environ = {**harness_environment(world.environ, fleet, key), **start.environment}
    return world.run([program, *start.words, *options.passed], environ)


def refuse_tracked(workspace: Workspace, harness: Harness) -> None:
    """Refuse to start a program with settings that git tracks: it would obey all of them."""
    world = workspace.world
    listed = world.run_git(["ls-files", "--", harness.directory()], workspace.out,
                           seconds=1.0)
    if listed.code == 0 and listed.text:
        path = workspace.path(harness.directory())
        raise FleetError("target-tracked", f"git tracks files in {path}, of which "
                         f"{harness.title} obeys whatever is there", status=EXIT_REFUSED,
                         fix=f"git rm -rf --cached {quote_shell(path)}, look at what is in "
                             "it, then add --trust")
