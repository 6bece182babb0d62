"""In which order work lands, and which of it breaks the whole."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.start.record import Record, replace
from fleet.tasks.ladder import is_away, plan_ladder
from fleet.tasks.next import dependencies_of
from fleet.tasks.rows import find_twins
from fleet.tasks.verdict import quote_output
from fleet.text.phrases import some_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from fleet.config.sections import Fleet
    from fleet.config.task_file import TaskSpec
    from fleet.tasks.state import TaskState


# Landing is a merge queue for one person. The tasks that are done are merged one after another,
# and the checks of all of them run on the whole. Example: a, b, c and d are merged, and the
# check fails. It passes on a+b and fails on a+b+c: c is sent back to its agent, d is merged
# behind b, and the checks run again. So what lands has always passed as it lands.

MARKER = "^(<<<<<<<|>>>>>>>) "  # which git writes into a file that both sides have changed


class LandingPlan(Record):
    """The tasks that can land, in order, and why other finished work cannot."""

    queue: tuple[TaskState, ...] = ()
    held: Mapping[str, str] = {}  # by task


def plan_landing(states: Mapping[str, TaskState], landed: Collection[str],
                 names: Collection[str] = ()) -> LandingPlan:
    """Return which tasks land, and in which order: `after`, priority, when they were done.

    `landed` are tasks whose work is already in the branch. If there are `names`, only these
    land, and the tasks they come after.
    """
    able = {name: state for name, state in states.items()
            if state.state == "done" and state.place.kept and not state.wish.forgotten
            and name not in landed and state.place.kept != state.place.base}
    held: dict[str, str] = {}
    for name, state in able.items():
        if find_twins(states, state):
            held[name] = "choose one of its twins: subagent-fleet task accept"

    queue: list[TaskState] = []
    wanted = [able[name] for name in able if not names or name in names]
    todo = sorted(wanted, key=lambda state: (-state.task.priority, state.at, state.order))

    def put(state: TaskState) -> bool:
        """Put a task behind those it comes after; tell whether it can land."""
        name = state.name
        if state in queue:
            return True
        if name in held:
            return False
        for other in dependencies_of(state.task, states):
            if other not in landed and not (other in able and put(able[other])):
                held[name] = f"{other} has not landed"
                return False
        queue.append(state)
        return True

    for state in todo:
        put(state)
    return LandingPlan(tuple(queue), {name: why for name, why in held.items()
                                      if not names or name in names})


SANDBOXES = ("off", "auto", "required")  # the strictest comes last


def share_command(tasks: Sequence[TaskSpec]) -> TaskSpec:
    """Return the task in whose sandbox, and with whose deadline, a shared command runs.

    The tree holds the work of all these tasks. So the sandbox is the strictest: no work may
    write what its own task forbids, only because another task allows it. Each task's check
    has passed in its own sandbox, so the same command needs no more than the strictest one.
    The deadline is the longest: a person who gave the command an hour in one task does not
    call it too slow after a minute.
    """
    strictest = max(tasks, key=lambda task: SANDBOXES.index(task.sandbox))
    confined = [task for task in tasks if task.sandbox != "off"]
    writable = tuple(path for path in strictest.sandbox_write
                     if all(path in task.sandbox_write for task in confined))
    return replace(strictest, sandbox_write=writable,
                   deadline=max(task.deadline for task in tasks))


def find_culprit(count: int, passes: Callable[[int], bool]) -> int:
    """Return the index of the task that breaks the whole; all before it pass together.

    The check has failed with all of them; `passes` runs it with the first N only.
    """
    good, bad = 0, count
    while bad - good > 1:
        middle = (good + bad) // 2
        if passes(middle):
            good = middle
        else:
            bad = middle
    return good


def can_go_back(state: TaskState, fleet: Fleet | None) -> bool:
    """Tell whether work that did not land gets another round, on its rung or a higher one."""
    return state.attempt.returned < state.task.rounds or climbs_to_land(state, fleet)


def climbs_to_land(state: TaskState, fleet: Fleet | None) -> bool:
    """Tell whether work without rounds left moves up its ladder; never out of the house."""
    attempt = state.attempt
    above = plan_ladder(state.task, fleet).above((*attempt.climbed, attempt.rung))
    return attempt.returned >= state.task.rounds and bool(fleet) and any(
        not is_away(rung, fleet) for rung in above)


def tell_conflict(into: str, others: Collection[str], files: Collection[str]) -> str:
    """Return the prompt for an agent whose work conflicts with what has landed."""
    have = "have" if len(others) > 1 else "has"
    return (f"Your work was done, but {some_of(sorted(others), 3) or into} {have} landed on {into} "
            "meanwhile and changed the same lines. This is a new worktree that has both. "
            f"Conflict markers are in: {some_of(sorted(files), 20)}. Settle them so that both "
            "changes hold, and leave the rest of your work as it is.")


def tell_failure(into: str, others: Collection[str], check: str, code: int, output: str) -> str:
    """Return the prompt for an agent whose work fails together with what has landed."""
    beside = f" ({some_of(sorted(others), 5)})" if others else ""
    return (f"Your work passed its check alone, but not together with what has landed on {into} "
            f"meanwhile{beside}. This is a new worktree that has both. `{check}` fails there "
            f"(exit {code}):\n\n{quote_output(output)}\n\nFix that. The check runs again "
            "when you end.")
