"""`tasks`: show tasks and their states."""
from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

from fleet.cli.live import watch
from fleet.cli.rows import CONFIG, JSON, OUT, SECONDS, WORK, Flag, command
from fleet.cli.say import print_report
from fleet.config.keys import keys_of
from fleet.config.rules import RULES
from fleet.config.task_file import TaskSpec
from fleet.start.constants import EXIT_OK
from fleet.start.errors import FleetError
from fleet.start.record import replace
from fleet.tasks.hints import Scene, plan_hints
from fleet.tasks.rows import find_best, plan_task_row, plan_task_rows
from fleet.tasks.state import TERMINAL_STATES, freeze
from fleet.text.phrases import count_of, show_span, some_of
from fleet.text.tables import format_pairs, format_table
from fleet.text.terminal import PLAIN, clean_line, crop
from fleet.work.shown import (
    find_task,
    format_hints,
    format_tasks,
    mark_task,
    see_folder,
    see_scene,
)
from fleet.work.typed import (
    ADD_A_TASK,
    MAYBE_TASK,
    TASK_FILE,
    find_folders,
    know_tasks,
    open_folder,
)
from fleet.workspace.config import load_config, look_of

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping, Sequence
    from typing import Any

    from fleet.runs.folder import Folder
    from fleet.tasks.rows import TaskRow, TaskSight
    from fleet.tasks.state import TaskState
    from fleet.text.terminal import Look
    from fleet.world.world import World


@command("tasks", "show every task: what it does, waits for or asks",
         replace(MAYBE_TASK, note="show one task in detail"),
         Flag("--watch", "again every S seconds, until Ctrl-C", "[S]",
              {**SECONDS, "nargs": "?", "const": 2.0, "default": 0.0}),
         Flag("--all", "in every repository, and those that left the task file", "",
              {"dest": "everywhere"}),
         TASK_FILE, CONFIG, OUT, JSON, group=WORK,
         examples=("tasks", "tasks --watch", "tasks parser"), excludes=("watch json",))
def cmd_tasks(options: Namespace, world: World) -> int:
    if options.config:
        load_config(world, options.config)
    folders = find_folders(options, world, set())

    def show(clear: str) -> bool:
        world.out(clear)
        if options.task:
            held = [folder for folder in folders if options.task in folder.read_states()[0]]
            folder = (held or folders or [open_folder(world)])[0]
            if held or not show_group(folder, options):
                show_task(folder, options.task, options)
        else:
            show_tasks(folders, options, world)
        return True
    watch(world, options.watch, show)
    return EXIT_OK


def show_tasks(folders: Sequence[Folder], options: Namespace, world: World) -> None:
    """Print the tasks of repositories."""
    sights = {folder: see_folder(folder, options) for folder in folders}
    if options.json:
        reports = [{"repository": folder.repository.main, "supervisor": sight.holder,
                    "unreadable_files": sight.unreadable,
                    "tasks": [report_row(row) for row in plan_task_rows(sight)]}
                   for folder, sight in sights.items()]
        print_report(world, "tasks", {"repositories": reports} if options.everywhere
                                else reports[0])
        return
    if not sights:
        world.err(f"There are no tasks in any repository yet. Start one: {ADD_A_TASK}\n")
    for folder, sight in sights.items():
        if options.everywhere:
            world.out(f"{clean_line(folder.repository.main)}\n")
        show_sight(folder, sight, world)


def report_row(row: TaskRow) -> dict[str, Any]:
    """Return what `--json` says about a task; `try` can't be a name in Python."""
    return {name.rstrip("_"): value for name, value in vars(row).items()}


def show_sight(folder: Folder, sight: TaskSight, world: World) -> None:
    """Print the tasks of a repository, and what to type next."""
    look, rows = look_of(world), plan_task_rows(sight)
    if sight.unreadable:
        world.err(f"{count_of(sight.unreadable, 'state file')} could not be read.\n")
    world.out(format_tasks(rows, look) if rows else f"No tasks. Start one: {ADD_A_TASK}\n")
    scene = see_scene(folder, sight.tasks, rows=rows)
    hints = plan_hints(scene, "best", "retry", "run", "forget", "land")
    world.err(format_hints(hints, look_of(world, "stderr")))


def show_group(folder: Folder, options: Namespace) -> bool:
    """Print the twins of a task side by side; return False if it has none."""
    world = folder.world
    sight = see_folder(folder, options)
    rows = [row for row in plan_task_rows(sight) if row.group == options.task]
    if not rows:
        return False
    tokens = {row.name: count_tokens(folder, sight.tasks[row.name]) for row in rows}
    best = find_best(rows)
    if options.json:
        print_report(world, "tasks", {
            "group": options.task, "best": best.name if best else None,
            "tasks": [{**report_row(row), "tokens": tokens[row.name]} for row in rows]})
        return True
    look = look_of(world)
    world.out(format_table(
        ("NAME", "MODEL", "STATE", "TOOK", "TOKENS", "DIFF", "WHY"),
        [[row.name, row.rung or row.alias or "-", mark_task(row.state, look),
          show_span(row.total_seconds), f"{tokens[row.name]:,}" if tokens[row.name] else "-",
          f"+{row.plus} -{row.minus}" if row.files else "-", crop(clean_line(row.reason), 40)]
         for row in rows], look=look))
    hints = plan_hints(Scene(sight.tasks, rows=rows), "best")
    world.err(format_hints(hints, look_of(world, "stderr")))
    return True


def count_tokens(folder: Folder, state: TaskState) -> int:
    """Return the tokens that a task has read and written in all its tries."""
    receipts = [folder.read_receipt(state, number)
                for number in range(state.attempt.first + 1, state.attempt.tried + 1)]
    # `input` and `output` are the names in receipts of earlier versions.
    words = ("input_tokens", "output_tokens", "input", "output")
    return sum(int(row.get(word) or 0) for receipt in receipts
               for row in receipt.get("served") or [] for word in words)


def show_task(folder: Folder, name: str, options: Namespace) -> None:
    """Print one task in detail."""
    world = folder.world
    sight = see_folder(folder, options)
    if name not in sight.tasks or sight.tasks[name].wish.forgotten:
        find_task(folder, name, "tasks")  # which refuses
    state = sight.tasks[name]
    row = plan_task_row(state, sight)
    keys = list_keys(folder, state, options)
    tries = [receipt for receipt in (
        folder.read_receipt(state, number)
        for number in range(state.attempt.first + 1, state.attempt.tried + 1)) if receipt]
    if options.json:
        print_report(world, "tasks", {**report_row(row), "tries": tries, "keys": [
            {"key": word, "value": value if isinstance(value, str) else json.dumps(value),
             "origin": origin} for word, value, origin in keys]})
        return
    world.out(format_task_details(row, keys, tries, look_of(world)))
    if state.newer:
        world.out("The task file has changed: `subagent-fleet task retry "
                  f"{name}` takes it.\n")


def list_keys(folder: Folder, state: TaskState,
              options: Namespace) -> list[tuple[str, Any, str]]:
    """Return (key, value, where it comes from) for each key of a task."""
    origins = dict.fromkeys(freeze(state.task), "when it was added")
    with contextlib.suppress(FleetError):
        origins.update(know_tasks(folder, options, needs_fleet=False).plan.origins.get(
            state.name, {}))
    keys = [(word, getattr(state.task, word), origins.get(word, "default"))
            for word in keys_of(TaskSpec) if word != "prompt_file"]
    return [each for each in keys if each[1] not in (None, ())]


def format_task_details(row: TaskRow, keys: Sequence[tuple[str, Any, str]],
                        tries: Sequence[Mapping[str, Any]], look: Look = PLAIN) -> str:
    """Return one task in detail: its state, its keys and their origins, its tries."""
    lines = [(name.replace("_", " "), clean_line(str(getattr(row, name)))) for name in (
        "state", "reason", "now", "agent", "alias", "runs_on", "branch", "worktree", "session",
        "confined", "port", "fix") if getattr(row, name)]
    since, total = show_span(row.state_seconds), show_span(row.total_seconds)
    if row.state in TERMINAL_STATES:
        lines.insert(1, ("took", f"{total}; ended {since} ago"))
    else:
        lines.insert(1, ("for", f"{since}, {total} in all"))
    if row.processes:
        lines.append(("uses", f"{count_of(row.processes, 'process')}, {row.memory_mb} MB, "
                      f"{row.cpu_percent:.0f}% CPU"))
    text = format_pairs(lines, look) + "\nKeys:\n"
    text += format_pairs([(word, f"{clean_line(show_key(word, value))}  ({origin})")
                          for word, value, origin in keys], look)
    if tries:
        text += "\nTries:\n" + format_pairs([
            (f"try {number}", clean_line(describe_try(receipt)))
            for number, receipt in enumerate(tries, 1)], look)
    return text


def describe_try(receipt: Mapping[str, Any]) -> str:
    """Return the result of a try in one line."""
    words = [f"{receipt.get('verdict')}: {receipt.get('reason')}".removesuffix(": "),
             f"ended by {receipt.get('ended')}"]
    if receipt.get("rung"):
        words.append(f"on {receipt['rung']}")
    code, rounds = receipt.get("exit_code"), (receipt.get("check") or {}).get("rounds")
    if code is not None:
        words.append(f"exit code {code}")
    else:
        words.append(count_of(int(receipt.get("turns") or 0), "turn"))
    if rounds:
        words.append(f"check exit {', '.join(map(str, rounds))}")
    words += [f"{count_of(int(served.get('requests') or 0), 'request')} on "
              f"{served.get('node')}" for served in receipt.get("served") or []]
    if receipt.get("stalls"):
        words.append("got stuck once and was resumed")
    refused = receipt.get("not_writable") or []
    if refused:
        words.append(f"could not write {some_of(refused, 3)}")
    denied = [f"{call.get('tool')} {call.get('path')}" for call in receipt.get("denied") or []]
    if denied:
        words.append(f"{count_of(denied, 'call')} denied: {some_of(denied, 4)}")
    return ", ".join([*words, *(f"note: {flag}" for flag in receipt.get("flags") or [])])


def show_key(word: str, value: object) -> str:
    """Return the value of a task's key for people."""
    if isinstance(value, int) and keys_of(TaskSpec)[word].rule is RULES["span"]:
        return show_span(value)
    return ", ".join(value) if isinstance(value, tuple) else str(value)
