"""`task attach`: talk to a task's agent."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.agree import ask_trust
from fleet.cli.rows import CONFIG, OUT, TRUST, WORK, command
from fleet.config.rules import CLAUDE
from fleet.runs.agent import plan_claude, plan_task_session
from fleet.runs.git import git_of
from fleet.runs.place import git_in
from fleet.runs.snapshot import store_tree
from fleet.start.constants import EXIT_REFUSED
from fleet.start.errors import FleetError
from fleet.steps.claude_start import claude_settings
from fleet.tasks.ladder import place_task
from fleet.work.backing import end_serving, load_fleet_for_tasks, serve_for_tasks, workspace_of
from fleet.work.orders import carry_out, tell_outcomes
from fleet.work.shown import find_task
from fleet.work.typed import NAMED_TASK, open_folder, open_tasks

if TYPE_CHECKING:
    from argparse import Namespace

    from fleet.runs.folder import Folder
    from fleet.work.orders import Carried
    from fleet.world.world import World


@command("task attach", "open a task's session in this terminal; it continues when you exit",
         NAMED_TASK, CONFIG, OUT, TRUST, group=WORK, examples=("task attach parser",))
def cmd_task_attach(options: Namespace, world: World) -> int:
    folder = open_tasks(open_folder(world), trust=options.trust)
    state = find_task(folder, options.task, "task attach")
    name = state.name
    program = world.which(CLAUDE)
    if not state.task.talks or not state.spoken or not program:
        what = f"{name} has no session yet"
        if not state.task.talks:
            what = f"{name} is done by {state.task.program}, which has no session here"
        elif not program:
            what = "Claude Code is not on the PATH"
        raise FleetError("no-session", what, fix=f"subagent-fleet task log {name}")
    git = git_in(folder, state)
    fleet = load_fleet_for_tasks(options, world, folder)
    key = ""
    if fleet:
        ask_trust(fleet, options, world)
        serve_for_tasks(folder, fleet, options)
        key = workspace_of(fleet, options, world).read_key(fleet)

    # Nothing has changed until here; whoever finds this lock free ends the attachment.
    hold = world.hold(folder.place("tasks", name, "attached"))
    if hold is None:
        raise FleetError("attached", f"{name} is open in another terminal",
                         status=EXIT_REFUSED)
    try:
        state = carry_out(folder, [{"do": "attach", "task": name}], options).tasks[name]
        if state.state != "attached":
            raise FleetError("not-attached", f"{name} is {state.state}; it could not be "
                             "ended in time", fix=f"subagent-fleet task stop {name}")
        main = git_of(folder)
        before = store_tree(git, main, state, None)
        task, fleet = place_task(state, fleet)
        environ, settings = plan_task_session(task, world.environ, fleet, key)
        try:
            with claude_settings(world, settings) as shown:
                words = [program, "--resume", state.session, "--permission-mode", "manual",
                         *plan_claude(task, fleet), *shown]
                return world.run(words, environ, directory=state.worktree)
        finally:
            changed = store_tree(git, main, state, None) != before
            carried = carry_out(
                folder, [{"do": "detach", "task": name, "changed": changed}], options)
            tell_detached(folder, name, carried)
    finally:
        hold.release()
        if not folder.holder():
            end_serving(folder)


def tell_detached(folder: Folder, name: str, carried: Carried) -> None:
    """Say what becomes of a task whose session a person has left."""
    state = carried.tasks[name]
    if carried.left:
        tell_outcomes([(name, state.state, "")], folder, carried)
    elif state.is_over:
        folder.world.err(f"{name} is {state.state} again.\n")
    elif folder.holder():
        folder.world.err(f"{name} continues by itself.\n")
    else:
        tell_outcomes([], folder, carried)
