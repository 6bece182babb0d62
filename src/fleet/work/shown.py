"""Tasks as text."""
from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from fleet.cli.rows import find_command, type_command
from fleet.cli.say import check_names
from fleet.runs.git import git_of
from fleet.runs.see import see_states, see_tasks
from fleet.start.errors import FleetError
from fleet.start.record import replace
from fleet.tasks.hints import RunOptions, Scene
from fleet.tasks.rows import plan_task_rows
from fleet.tasks.state import TERMINAL_STATES, UNREADABLE, freeze
from fleet.text.phrases import quote_shell, show_span
from fleet.text.tables import format_entry, format_pairs, format_table, wrap_text
from fleet.text.terminal import MARKS, PLAIN, Cell, clean_line, crop
from fleet.text.width import width_of
from fleet.work.backing import load_fleet_if_valid, plan_backing
from fleet.work.typed import find_task_file, load_tasks, open_folder
from fleet.workspace.config import look_of

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Mapping, Sequence

    from fleet.config.sections import Fleet
    from fleet.config.task_file import TaskSpec
    from fleet.runs.folder import Folder
    from fleet.tasks.rows import TaskRow, TaskSight
    from fleet.tasks.state import TaskState
    from fleet.text.terminal import Look
    from fleet.world.world import World


def see_scene(folder: Folder, tasks: Mapping[str, TaskState], *, lands: bool = False,
              names: Sequence[str] = (), rows: Sequence[TaskRow] = ()) -> Scene:
    """Return what the hints for these tasks go by.

    `lands`: landing was asked for by more than the last `run`. The tasks that are named were
    ordered just now, so that `run` is to do them, too.
    """
    states = folder.read_states()[0]
    asked = folder.read_asked()
    words = asked.words
    if words and not any(still_counts(states[name], asked) for name in words if name in states):
        asked = RunOptions()
    elif words:
        asked = replace(asked, words=tuple(dict.fromkeys([*words, *names])))
    holder = folder.holder()
    wants_land = lands or asked.land and not holder
    return Scene(tasks, asked, type_run(folder.world, replace(asked, land=wants_land)), holder,
                 wants_land, find_unmerged(folder, states), rows)


def still_counts(state: TaskState, asked: RunOptions) -> bool:
    """Tell whether a `run` that meant a task has something left to do with it."""
    return not state.is_over or asked.land and state.state == "done" and not (
        state.place.landed or state.wish.forgotten)


def type_run(world: World, asked: RunOptions) -> str:
    """Return the `run` that continues with all that was asked; paths as seen from here."""
    here = world.real_path(world.directory) + "/"
    paths = {key: getattr(asked, key).removeprefix(here)
             for key in ("task_file", "config", "out")}
    return type_command(find_command("run"), {**vars(asked), "words": [*asked.words], **paths})


def find_unmerged(folder: Folder, states: Mapping[str, TaskState]) -> dict[str, str]:
    """Return {task: what git merges} of tasks that are done and not in what is checked out."""
    done = {state.place.branch: state.name for state in states.values()
            if state.state == "done" and state.place.kept and not state.wish.forgotten}
    if not done:
        return {}
    git = git_of(folder)
    waiting = git.run("for-each-ref", "--no-merged", "HEAD",  # which may be unborn
                      "--format=%(refname:lstrip=2)", "refs/heads").text.split("\n")
    # Of a branch and a tag with one name git would take the tag.
    return {name: f"refs/heads/{branch}" if git.commit_of(f"refs/tags/{branch}") else branch
            for branch, name in done.items() if branch in waiting}


def format_hints(lines: Iterable[str], look: Look) -> str:
    """Return hints as text; a command that is too long for its line gets a line below."""
    text = ""
    for line in lines:
        said, _, typed = line.rpartition(": ")
        if said and typed.startswith(("subagent-fleet ", "git ")) and \
                0 < look.columns < width_of(line):
            line = f"{said}:\n  {typed}"
        text += wrap_text(f"{line}\n", look)
    return text


TASK_ROLES = {"done": "ok", "running": "work", "checking": "work", "waiting": "wait",
              "asking": "ask", "review": "ask", "parked": "warn", "failed": "bad",
              "stopped": "wait"}
TASK_MARKS = {**MARKS, "work": "▶", "wait": "·", "ask": "?"}


def mark_task(state: str, look: Look) -> Cell:
    """Return a state with its mark; only a finished task gets a tick."""
    role = TASK_ROLES.get(state, "wait")
    colour = {"ask": "warn", "work": "bold", "wait": "dim"}.get(role, role)
    return Cell(f"{TASK_MARKS[role]} {state}" if look.marks else state, colour)


TASK_NOW_WIDTH = 44


def format_tasks(rows: Sequence[TaskRow], look: Look = PLAIN) -> str:
    """Return the table of tasks, and below it what to type for those that need a person."""
    # A narrow terminal leaves out the columns that are alike in most rows.
    text = format_table(
        ("NAME", "STATE", "TRY", "FOR", "TOTAL", "IDLE", "NOW", "CONTEXT", "DIFF", "WHERE",
         "USES"),
        [[row.name, mark_task(row.state, look), row.try_,
          show_span(row.total_seconds if row.state in TERMINAL_STATES else row.state_seconds),
          show_span(row.total_seconds or None), show_span(row.idle_seconds),
          crop(clean_line(row.now), TASK_NOW_WIDTH) or "-",
          "-" if row.context_percent is None else f"{row.context_percent}%",
          f"+{row.plus} -{row.minus}" if row.files else "-", row.runs_on or "-",
          f"{row.memory_mb} MB {row.cpu_percent:.0f}%" if row.processes else "-"]
         for row in rows],
        look=look, spare=("USES", "TOTAL", "CONTEXT", "IDLE", "WHERE", "TRY"))
    helps = [(row.name, row.fix) for row in rows if row.fix]
    return text + "\n" + format_pairs(helps, look) if helps else text


def format_task_event(name: str, word: str, text: str, width: int, look: Look = PLAIN) -> str:
    """Return an event of a task, in columns."""
    return format_entry((name, word), (max(width, 8), 10), [text], look)


def tell_task(world: World, name: str, word: str, text: str, width: int = 8) -> None:
    """Print an event or a state of a task, in columns."""
    world.out(format_task_event(name, word, text, width, look_of(world)))


def see_folder(folder: Folder, options: Namespace) -> TaskSight:
    """Return the tasks of a repository, without finished ones that left the task file."""
    fleet = load_fleet_if_valid(options, folder.world, folder)
    backing = plan_backing(fleet, options, folder)
    named = read_named_tasks(folder, options)
    known = see_states(folder)[0]
    # Tasks of the file that were never started count as waiting.
    sight = see_tasks(folder, backing, [
        {"do": "add", "spec": freeze(task), "origin": "file", "base": ""}
        for name, task in named.items() if name not in known])
    if named and not options.everywhere and not options.task:
        return replace(sight, tasks={
            name: state for name, state in sight.tasks.items()
            if name in named or state.origin != "file" or not state.is_over})
    return sight


def read_named_tasks(folder: Folder, options: Namespace) -> Mapping[str, TaskSpec]:
    """Return the tasks of the task file; none if it is missing or invalid."""
    try:
        path = find_task_file(folder, options)
        if path:
            return load_tasks(folder.world, path, None).tasks
    except FleetError as error:
        folder.world.err(f"{clean_line(error.what)}: subagent-fleet validate\n")
    return {}


def find_task_rows(world: World, fleet: Fleet | None, options: Namespace) -> list[TaskRow]:
    """Return the rows of this repository's tasks; none outside of a repository."""
    with contextlib.suppress(FleetError):
        folder = open_folder(world)
        if folder.run:
            return plan_task_rows(see_tasks(folder, plan_backing(fleet, options, folder)))
    return []


def find_task(folder: Folder, name: str, command: str) -> TaskState:
    """Return a task by its name, or refuse."""
    tasks = see_states(folder)[0]
    known = [one for one, state in tasks.items() if not state.wish.forgotten]
    check_names("task", [name], known, command)
    if tasks[name].state == UNREADABLE:
        path = folder.of_task(name, "state.json")
        raise FleetError("bad-state", f"{name}: {tasks[name].reason}",
                         fix=f"look at it: `less {quote_shell(path)}`")
    return tasks[name]
