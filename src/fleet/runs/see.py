"""What a command can see of tasks without the lock."""
from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from fleet.runs.agent import feed_lines
from fleet.runs.folder import TAIL_BYTES
from fleet.runs.process_tree import PROCESS_LOOK_SECONDS, ProcessTree
from fleet.runs.supervisor import find_limits, find_merged
from fleet.speech.claude_stream import Heard
from fleet.start.errors import FleetError
from fleet.tasks.events import BranchMerged, Revised
from fleet.tasks.rows import TaskSight
from fleet.tasks.state import thaw_task
from fleet.tasks.step import add_task, step
from fleet.world.process_list import TASK_MARK

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from fleet.runs.agent import Backing
    from fleet.runs.folder import Folder
    from fleet.tasks.state import TaskState


def see_states(folder: Folder, more: Iterable[Mapping[str, Any]] = ()
               ) -> tuple[dict[str, TaskState], int]:
    """Return every task as it is now, and how many state files could not be read.

    Orders that wait in the inbox count as carried out, and so do the orders in `more`.
    """
    now = folder.world.now()
    tasks, unreadable = folder.read_states()
    for order in [*(order for _, order in folder.read_orders()), *more]:
        task = thaw_task(order.get("spec")) if order.get("do") == "add" else None
        if task:
            revised = Revised(task, str(order.get("origin")), str(order.get("base")))
            with contextlib.suppress(FleetError):  # which the supervisor refuses, too
                tasks[task.name] = add_task(tasks, revised, now).state
    for name in find_merged(folder, tasks):
        tasks[name] = step(tasks[name], BranchMerged(), now).state
    return tasks, unreadable


def see_tasks(folder: Folder, backing: Backing, more: Iterable[Mapping[str, Any]] = ()
              ) -> TaskSight:
    """Return the tasks of a repository, with what their agents say and which memory they use."""
    fleet = backing.fleet
    tasks, unreadable = see_states(folder, more)
    live = [state for state in tasks.values() if state.has_agent]
    # The session's own requests, not those of a subagent.
    served = {one.session: one for one in backing.receipts()
              if one.session and not one.agent_id} \
        if live else {}
    limits = find_limits(folder.world, backing, tasks, {})
    attached = frozenset(name for name, state in tasks.items()
                         if state.attempt.spoken and folder.is_attached(name))
    windows = {model.alias: model.context for model in fleet.models.values()} if fleet else {}
    return TaskSight(
        tasks, {state.name: listen_to_tail(folder, state) for state in live},
        folder.world.now(), limits, windows, served, measure_agents(folder, live), unreadable,
        attached, folder.holder())


def measure_agents(folder: Folder,
                   live: Sequence[TaskState]) -> dict[str, list[tuple[int, float]]]:
    """Return what each process of a task uses: megabytes, and percent of a processor."""
    measured = {}
    for state in live:
        processes = ProcessTree(folder, state.name, TASK_MARK, keeps=False).find(
            folder.world.clock() - PROCESS_LOOK_SECONDS)
        measured[state.name] = [(process.memory_mb, process.cpu_percent)
                                for process in processes.values()]
    return measured


def listen_to_tail(folder: Folder, state: TaskState) -> Heard:
    """Return what an agent has said lately: enough to know what it is doing now."""
    path = folder.of_try(state, "out.jsonl")
    size = folder.world.size_of(path)
    start = max(state.attempt.start_at, size - TAIL_BYTES)
    at = folder.world.changed_at(path)
    heard = Heard(heard_from=state.attempt.heard_from)
    feed_lines(heard, folder.world.read_part(path, start, TAIL_BYTES), start, at)
    heard.last = at
    return heard
