"""`task land`: merge finished work, check it as a whole, move the branch."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.rows import TASK_NAMES, WORK, Flag, command
from fleet.cli.say import check_names
from fleet.runs.landing import Landing
from fleet.start.constants import EXIT_OK, EXIT_PROBLEM
from fleet.start.errors import FleetError
from fleet.tasks.hints import plan_hints
from fleet.tasks.spec import expand_names
from fleet.work.backing import load_fleet_if_valid
from fleet.work.land import describe_landing, find_target, land, take_turn
from fleet.work.orders import carry_out
from fleet.work.shown import format_hints, see_scene, tell_task
from fleet.work.typed import ADD_A_TASK, TASK_FILE, know_tasks, open_folder, open_tasks
from fleet.workspace.config import look_of

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping, Sequence
    from typing import Any

    from fleet.tasks.state import TaskState
    from fleet.world.world import World


INTO = Flag("--into", "the branch that moves; default: the one you are on", "BRANCH",
            {"default": ""})


@command("task land", "merge finished tasks, check them as a whole, move your branch",
         Flag("tasks", "only these; default: every task that is done", "TASK",
              {"nargs": "*", "default": []}, offers=TASK_NAMES),
         INTO, TASK_FILE, group=WORK, examples=("task land", "task land parser --into main"))
def cmd_task_land(options: Namespace, world: World) -> int:
    folder = open_tasks(open_folder(world))
    known = know_tasks(folder, options, needs_fleet=False)
    if not known.states:
        raise FleetError("no-tasks", "there are no tasks to land",
                         fix="subagent-fleet run" if known.names else ADD_A_TASK)
    check_names("task", options.tasks, known.names, "task land")
    names = expand_names(options.tasks, known.tasks)
    into = find_target(folder, options.into)
    stops: list[str] = []
    world.on_stop(stops.append)

    def is_over() -> bool:
        return bool(stops)

    def order(orders: Sequence[Mapping[str, Any]]) -> None:
        for kind in ("landed", "return", "evict"):
            kinds = [one for one in orders if one["do"] == kind]
            if kinds:
                carry_out(folder, kinds, options)

    states = folder.read_states()[0]
    hold = take_turn(folder, is_over, lambda: world.err(
        "Another `land` is active in this repository: waiting for it.\n"))
    try:
        landing = Landing(folder, hold, into, fleet=load_fleet_if_valid(options, world, folder),
                          worktrees=known.plan.file.worktrees or "",
                          tell=lambda *event: tell_task(world, *event), is_over=is_over)
        landed = land(landing, folder, names, moves=True, order=order)
    finally:
        hold.release()
    reviews = [name for name, state in states.items()
               if state.state == "review" and not state.wish.forgotten]
    idle = [name for name in names or reviews if name not in landed.names]
    lines = describe_landing(landed) + explain_idle(idle, states)
    if landed.returned:
        scene = see_scene(folder, folder.read_states()[0], lands=True, names=[*landed.returned])
        lines += plan_hints(scene, "run")
    world.out(format_hints(lines, look_of(world)))
    return EXIT_OK if landed.is_good else EXIT_PROBLEM


def explain_idle(names: Sequence[str], states: Mapping[str, TaskState]) -> list[str]:
    """Return why tasks had nothing to land, by their states before this landing."""
    lines = []
    for name in names:
        state = states.get(name)
        word = state.state if state else "waiting"  # new in the task file
        if word == "review":
            lines.append(f"{name} is in review: subagent-fleet task accept {name}")
        elif word != "done":
            lines.append(f"{name} is not done: it is {word}.")
        elif state and state.place.landed:
            lines.append(f"{name} has landed on {state.place.landed} before.")
    return lines
