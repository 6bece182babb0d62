"""Orders for tasks, and waiting until they are carried out."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.say import check_names
from fleet.runs.see import see_states
from fleet.runs.supervisor import Supervisor
from fleet.start.constants import EXIT_OK, EXIT_PROBLEM
from fleet.start.record import Record
from fleet.tasks.hints import plan_hints
from fleet.tasks.scope import glob_pattern
from fleet.text.width import width_of
from fleet.work.backing import load_fleet_for_tasks, load_fleet_if_valid, plan_backing
from fleet.work.shown import format_hints, see_scene, tell_task
from fleet.workspace.config import look_of

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping, Sequence
    from typing import Any

    from fleet.runs.folder import Folder
    from fleet.tasks.state import TaskState


STOP_WAIT_SECONDS = 30.0


def match_tasks(folder: Folder, options: Namespace, command: str) -> list[TaskState]:
    """Return the tasks whose names match the patterns; refuse a pattern that matches none.

    A forgotten task can be tidied, and comes back when it is retried by its exact name.
    """
    tasks = {name: state for name, state in see_states(folder)[0].items()
             if not state.wish.forgotten or command == "task tidy"
             or (command == "task retry" and name in options.patterns)}
    if not options.patterns:
        return list(tasks.values())
    matched = set()
    for pattern in options.patterns:
        names = [name for name, state in tasks.items()
                 if glob_pattern(pattern).fullmatch(name) or state.task.group == pattern]
        if pattern == "*" and not tasks:
            folder.world.err("There are no tasks.\n")
        else:
            check_names("task", () if names else [pattern], tasks, command)
        matched.update(names)
    return [state for name, state in tasks.items() if name in matched]


class Carried(Record):
    """The result of orders."""

    tasks: Mapping[str, TaskState]  # as they are now
    left: frozenset[str] = frozenset()  # tasks whose orders were not taken in time
    wait: str = ""  # the message about those


def carry_out(folder: Folder, orders: Sequence[Mapping[str, Any]], options: Namespace
              ) -> Carried:
    """Hand orders of one kind to the supervisor, and wait until they are carried out.

    If none is running, this command carries them out itself, except those that an agent must
    hear: they wait for the next supervisor.
    """
    world = folder.world
    before = folder.read_states()[0]
    asked = {folder.ask(order): str(order["task"]) for order in orders}
    kind = str(orders[0]["do"]) if orders else "add"
    if kind in ("add", "say") and not folder.holder():
        return Carried(before)
    # The other orders start or continue no agent, so they need no fleet.
    load = load_fleet_for_tasks if kind in ("add", "say", "answer") \
        else load_fleet_if_valid
    names = {*asked.values()}
    until = world.clock() + STOP_WAIT_SECONDS
    supervisor = None
    left: set[str] = set()
    try:
        while world.clock() < until:
            if supervisor:
                supervisor.advance()
            left = {asked[identity] for identity, _ in folder.read_orders()
                    if identity in asked}
            tasks = folder.read_states()[0]
            if not left and all(is_carried_out(kind, before.get(name), tasks[name])
                                for name in names & {*tasks}):
                break
            lock = None if supervisor else world.hold(folder.place("lock"))
            if lock:
                backing = plan_backing(load(options, world, folder), options, folder)
                supervisor = Supervisor(folder, lock, backing, {*names}, takes_new=False)
            else:
                world.sleep(0.02)
    finally:
        if supervisor:
            supervisor.leave()
    wait = explain_no_answer(folder) if left else ""
    return Carried(folder.read_states()[0], frozenset(left), wait)


def explain_no_answer(folder: Folder) -> str:
    """Return the message for an order that the active `run` has not taken."""
    return (f"`run` (pid {folder.holder()}) did not respond in {STOP_WAIT_SECONDS:.0f} s; "
            "it does this when it continues")


def is_carried_out(kind: str, before: TaskState | None, state: TaskState) -> bool:
    """Tell whether an order that was taken has had its effect."""
    if kind == "say":
        return not (state.wish.says and state.state == "running" and state.task.talks)
    if kind == "stop":
        return state.is_over and not state.wish.stopping
    if kind == "answer":  # its next question may come at once
        return state.state != "asking" or before is not None and \
            state.wish.question != before.wish.question
    return True


def tell_outcomes(rows: Sequence[tuple[str, str, str]], folder: Folder, carried: Carried, *,
                  starts: bool = True) -> int:
    """Print the result for each task, and the command that starts work if none is running.

    Return the exit status: an order that was not taken is a problem.
    """
    width = max((width_of(name) for name, _, _ in rows), default=8)
    for name, word, text in rows:
        if name in carried.left:
            word = "not taken"
            text = carried.wait
        tell_task(folder.world, name, word, text, width)
    scene = see_scene(folder, see_states(folder)[0], names=[name for name, _, _ in rows])
    hints = plan_hints(scene, "run") if starts else []
    folder.world.err(format_hints(hints, look_of(folder.world, "stderr")))
    return EXIT_PROBLEM if carried.left else EXIT_OK
