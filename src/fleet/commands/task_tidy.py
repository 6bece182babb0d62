"""`task tidy`: remove worktrees that are no longer needed."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.rows import WORK, Flag, command
from fleet.runs.git import git_of
from fleet.runs.landing import remove_landing
from fleet.runs.tidy import Tidying, droppable_tip, tidy_task
from fleet.start.constants import EXIT_OK
from fleet.start.record import replace
from fleet.tasks.hints import plan_hints
from fleet.text.phrases import count_of
from fleet.text.terminal import PLAIN
from fleet.text.width import width_of
from fleet.work.orders import carry_out, match_tasks
from fleet.work.shown import format_hints, format_task_event, see_scene
from fleet.work.typed import TASK_PATTERNS, open_folder, open_tasks
from fleet.workspace.config import look_of

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from fleet.runs.folder import Folder
    from fleet.tasks.state import TaskState
    from fleet.text.terminal import Look
    from fleet.world.world import World


@command("task tidy", "remove worktrees of finished tasks, where nothing is lost",
         replace(TASK_PATTERNS, more={"nargs": "*", "default": []}),
         Flag("--dry-run", "only show what would be removed"),
         Flag("--ignored", "also delete ignored files that are new or changed"),
         group=WORK, examples=("task tidy --dry-run", "task tidy 'jwt-*'"))
def cmd_task_tidy(options: Namespace, world: World) -> int:
    folder = open_tasks(open_folder(world))
    states = match_tasks(folder, options, "task tidy")
    plans = []
    for each in [each for state in states for each in (state, *older_of(state))]:
        if each.place.git:
            plan = tidy_task(folder, each, is_dry=options.dry_run,
                             takes_ignored=options.ignored)
            plans.append(plan)
            if plan.removes and not options.dry_run:
                carry_out(folder, [{"do": "gone", "task": each.name, "git": each.place.git}],
                          options)
        elif each.place.branch and each.is_over:
            plans += tidy_branch(folder, each, is_dry=options.dry_run)
    if not options.dry_run:
        remove_landing(folder, folder.read_states()[0].values())
    text = format_tidying(plans, look_of(world), is_dry=options.dry_run)
    world.out(text or "Nothing to tidy.\n")
    scene = see_scene(folder, {state.name: state for state in states})
    world.err(format_hints(plan_hints(scene, "land"), look_of(world, "stderr")))
    return EXIT_OK


def tidy_branch(folder: Folder, state: TaskState, *, is_dry: bool) -> list[Tidying]:
    """Remove the branch of a worktree that was removed earlier, if it is merged now."""
    main, place = git_of(folder), state.place
    tip = droppable_tip(main, state)
    if tip and not is_dry:
        main.run("update-ref", "-d", f"refs/heads/{place.branch}", tip)
    return [Tidying(state.name, True, branch=place.branch, is_empty=tip == place.base)] \
        if tip else []


def older_of(state: TaskState) -> list[TaskState]:
    """Return a task as it was before each fresh start, with its old branch and worktree."""
    return [replace(state, place=replace(place, kept="")) for place in state.old]


def format_tidying(rows: Sequence[Tidying], look: Look = PLAIN, *, is_dry: bool) -> str:
    """Return a line for each worktree: removed, or skipped and why."""
    width = max((width_of(row.name) for row in rows), default=0)
    text = ""
    for row in rows:
        parts = []
        if row.files:
            parts.append(f"{count_of(row.files, 'uncommitted file')} saved as {row.saved}")
        if row.ignored:
            parts.append(f"{count_of(row.ignored, 'ignored file')}, "
                         f"{row.ignored_bytes / 1e6:,.1f} MB, deleted")
        if row.branch:
            kind = "empty" if row.is_empty else "merged"
            parts.append(f"{kind} branch {row.branch}{' deleted' if row.worktree else ''}")
        what = "; ".join(parts)
        if row.worktree:
            what = f"{row.worktree} ({what})" if what else row.worktree
        word = "would remove" if is_dry else "removed"
        if not row.removes:
            word, what = "skipped", row.why
        text += format_task_event(row.name, word, what, width, look)
    return text
