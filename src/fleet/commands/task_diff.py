"""`task diff`: show what a task has changed."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.rows import WORK, Flag, command
from fleet.runs.git import git_of
from fleet.runs.place import git_in
from fleet.runs.snapshot import store_tree
from fleet.start.constants import EXIT_OK
from fleet.start.errors import FleetError
from fleet.tasks.state import ACTIVE_STATES
from fleet.text.terminal import clean_line, clean_text
from fleet.work.shown import find_task
from fleet.work.typed import NAMED_TASK, open_folder, open_tasks

if TYPE_CHECKING:
    from argparse import Namespace

    from fleet.world.world import World


@command("task diff", "show what a task has changed, untracked files included", NAMED_TASK,
         Flag("--stat", "only which files, and how much"), group=WORK,
         examples=("task diff parser", "task diff parser --stat"))
def cmd_task_diff(options: Namespace, world: World) -> int:
    folder = open_tasks(open_folder(world))
    state = find_task(folder, options.task, "task diff")
    place = state.place
    after = place.kept
    if state.state in ACTIVE_STATES and place.git:
        after = store_tree(git_in(folder, state), git_of(folder), place, None,
                           runs_filters=False).tree
    if not after:
        why = f": {state.reason}" if state.is_over else ""
        raise FleetError("no-diff",
                         f"{state.name} has no work to show (it is {state.state}{why})",
                         fix=f"subagent-fleet tasks {state.name}")
    words = ["diff", "--no-ext-diff", "--no-textconv", "-O/dev/null"]
    if options.stat:
        words.append("--stat")
    text = git_of(folder).out(*words, "--end-of-options", place.base, after)
    if text:
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace") + "\n"
        world.write(clean_text(text) if world.is_terminal() else text)
    else:
        world.err(f"{clean_line(state.name)} has changed nothing (it is {state.state}).\n")
    return EXIT_OK
