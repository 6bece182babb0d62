"""`task attach`: talk to a task's agent."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.agree import ask_trust
from fleet.cli.rows import CONFIG, OUT, TRUST, WORK, command
from fleet.config.rules import CLAUDE
from fleet.runs.agent import plan_claude, plan_task_session
from fleet.runs.place import git_in
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
    from fleet.tasks.state import TaskState
    from fleet.world.world import World


@command("task attach", "open a task's session here; it continues when you exit",
         NAMED_TASK, CONFIG, OUT, TRUST, group=WORK, examples=("task attach parser",))
def cmd_task_attach(options: Namespace, world: World) -> int:
    folder = open_tasks(open_folder(world))
    state = find_task(folder, options.task, "task attach")
    name = state.name
    program = world.which(CLAUDE)
    if not state.task.talks or not state.attempt.spoken or not program:
        what = f"{name} has no session yet"
        if not state.task.talks:
            what = f"{name} is done by {state.task.program}, which has no session here"
        elif not program:
            what = "Claude Code is not on the PATH"
        raise FleetError("no-session", what, fix=f"subagent-fleet task log {name}")
    git_in(folder, state)
    fleet = load_fleet_for_tasks(options, world, folder)
    key = ""
    if fleet:
        ask_trust(fleet, options, world)
        serve_for_tasks(folder, fleet, options)
        key = workspace_of(fleet, options, world).read_key(fleet)

    # Nothing has changed so far. While this lock is held, the task does not start.
    hold = world.hold(folder.of_task(name, "attached"))
    if hold is None:
        raise FleetError("attached", f"{name} is open in another terminal",
                         status=EXIT_REFUSED)
    begun = state
    try:
        if not begun.is_over:
            state = carry_out(folder, [{"do": "stop", "task": name}], options).tasks[name]
        if not state.is_over or state.cause == "still-alive":
            raise FleetError("not-attached", f"{name} is {state.state}; its agent could not be "
                             "ended in time", fix=f"subagent-fleet task stop {name}")
        task, fleet = place_task(state, fleet)
        environ, settings = plan_task_session(task, world.environ, fleet, key)
        try:
            with claude_settings(world, settings) as shown:
                words = [program, "--resume", state.attempt.session, "--permission-mode", "manual",
                         *plan_claude(task, fleet), *shown]
                return world.run(words, environ, directory=state.place.worktree)
        finally:
            leave_session(folder, begun, options)
    finally:
        hold.release()
        if not folder.holder():
            end_serving(folder)


def leave_session(folder: Folder, begun: TaskState, options: Namespace) -> None:
    """Hand the session back to the task that was stopped for it, and say what happens next."""
    name = begun.name
    if begun.is_over:
        folder.world.err(f"{name} is {begun.state}, as before. To let its agent continue: "
                         f"subagent-fleet task retry {name}\n")
        return
    carried = carry_out(folder, [{"do": "detach", "task": name}], options)
    if carried.left or not folder.holder():
        tell_outcomes([(name, carried.tasks[name].state, "")], folder, carried)
    else:
        folder.world.err(f"{name} continues by itself.\n")
