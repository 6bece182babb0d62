"""What to type next for tasks, after any command: one table.

A `run` leaves a note of what it was asked (RunOptions), and takes it away when all of it is done.
So whoever is told to go on is told so with `--land`, `--max` and whatever else still counts:
after Ctrl-C, by `tasks` in another terminal, by `task retry` the next day. While a `run --land`
is at work, nobody is told to merge what it lands.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.start.record import Record
from fleet.tasks.next import blockers_of
from fleet.tasks.rows import find_best, suggest_task_step
from fleet.text.phrases import count_of, quote_shell

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fleet.tasks.rows import TaskRow
    from fleet.tasks.state import TaskState


class RunOptions(Record):
    """What the last `run` was asked, named as its options are."""

    words: tuple[str, ...] = ()  # the tasks that were meant; none: all
    land: bool = False
    keep_going: bool = False
    everywhere: bool = False
    most: int = 0
    task_file: str = ""
    config: str = ""
    out: str = ""


class Scene(Record):
    """What the hints go by."""

    tasks: Mapping[str, TaskState]  # those that are meant
    asked: RunOptions = RunOptions()
    again: str = "subagent-fleet run"  # what continues, with all that was asked
    holder: int = 0  # the process of the active `run`; 0: none is
    wants_land: bool = False  # the person has asked for --land
    unmerged: Mapping[str, str] = {}  # {task: what git merges}: done, not in the checkout
    rows: Sequence[TaskRow] = ()


def plan_hints(scene: Scene, *names: str) -> list[str]:
    """Return what to type next, a line each; the names are of HINTS."""
    return [line for name in names for line in HINTS[name](scene)]


def suggest_best(scene: Scene) -> list[str]:
    """Return a line for each group that names the twin to choose."""
    groups: dict[str, list[TaskRow]] = {}
    for row in scene.rows:
        groups.setdefault(row.group, []).append(row)
    lines = []
    for group, twins in groups.items():
        best = find_best(twins)
        if best:
            lines.append(f"Best of {group}: {best.name} ({best.state}, +{best.plus} "
                         f"-{best.minus}). Compare: subagent-fleet tasks {group}. Take it: "
                         f"subagent-fleet task accept {best.name}")
    return lines


def suggest_look(scene: Scene) -> list[str]:
    """Return the commands that show the first task in review and why the first one failed."""
    lines: dict[str, str] = {}
    for state in scene.tasks.values():
        word = {"review": "Look at it", "failed": "See why", "parked": "See why"}.get(
            state.state)
        if word:
            lines.setdefault(word, f"{word}: {suggest_task_step(state)}")
    return [*lines.values()]


def suggest_retry(scene: Scene) -> list[str]:
    """Return a command for each kind of task that blocks itself or others."""
    states = scene.tasks
    stuck = {name for state in states.values() if state.state == "waiting"
             for name in blockers_of(state, states)}
    lines: dict[str, str] = {}
    for state in states.values():
        word = {"review": "Accept: subagent-fleet task accept"}.get(state.state, "")
        if (state.state in ("failed", "parked")
                or state.state == "stopped" and state.name in stuck):
            word = "Try again: subagent-fleet task retry"
        if word and not state.wish.forgotten:
            lines[word] = f"{lines.get(word, word)} {state.name}"
    return sorted(lines.values())


def suggest_run(scene: Scene) -> list[str]:
    """Return what to type if no supervisor runs and tasks could continue."""
    states = scene.tasks.values()
    if scene.holder:
        return []
    if any(state.is_active for state in states):
        return ["Agents keep working, but nothing checks them or starts the next task.",
                f"Continue: {scene.again}", "End them: subagent-fleet task stop '*'"]
    if any(state.state == "waiting" and not state.wish.forgotten for state in states):
        return [f"Nothing is running. Start: {scene.again}"]
    return []


def suggest_other(scene: Scene) -> list[str]:
    """Return that another `run`, which was active before, continues."""
    if not scene.holder or not any(state.is_active for state in scene.tasks.values()):
        return []
    return [f"The `run` that was active before (pid {scene.holder}) is working on these tasks "
            "and continues. `subagent-fleet tasks` shows them."]


def suggest_land(scene: Scene) -> list[str]:
    """Return what to type for tasks that are done and not merged into the current branch."""
    asked = scene.asked
    done = [name for name in scene.tasks if name in scene.unmerged]
    lines = []
    if asked.land and scene.holder:
        ours = [name for name in done if not asked.words or name in asked.words]
        done = [name for name in done if name not in ours]
        if ours:
            lines.append(f"`run --land` (pid {scene.holder}) lands {count_of(ours, 'task')} when "
                         "nothing is left to do.")
    if not done or scene.wants_land and suggest_run(scene):  # which lands them
        return lines
    lines.append(f"Look at what is done: subagent-fleet task diff {done[0]}")
    if len(done) == 1 and not scene.wants_land:
        return [*lines, f"Merge: git merge {quote_shell(scene.unmerged[done[0]])}"]
    all_of_them = f"all {len(done)}" if done[1:] else "it"
    names = "".join(f" {name}" for name in done) if len(done) < len(scene.unmerged) else ""
    return [*lines, f"Merge {all_of_them}, checked as a whole: subagent-fleet task land{names}"]


TIDIED_LIMIT = 4  # tidied tasks in a list; with more, `tasks` suggests to forget them


def suggest_forget(scene: Scene) -> list[str]:
    """Return the command that shortens a list with many done and tidied tasks."""
    names = [name for name, state in scene.tasks.items()
             if state.state == "done" and not state.place.git and not state.wish.forgotten]
    if len(names) < TIDIED_LIMIT:
        return []
    return [f"Shorten this list: subagent-fleet task forget {' '.join(names)}"]


HINTS: dict[str, Callable[[Scene], list[str]]] = {
    "best": suggest_best, "look": suggest_look, "retry": suggest_retry, "run": suggest_run,
    "other": suggest_other, "forget": suggest_forget, "land": suggest_land}
