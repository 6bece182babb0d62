"""Removing a task's places and branch, where nothing is lost."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.runs.git import SNAPSHOT_REFS, Git, git_of
from fleet.runs.place import (
    bring_home,
    find_commits,
    git_in,
    git_with,
    is_place,
    remove_place,
)
from fleet.runs.snapshot import find_leak, read_baseline, read_surroundings, store_tree
from fleet.start.errors import FleetError
from fleet.start.record import Record
from fleet.text.phrases import count_of, some_of
from fleet.text.terminal import clean_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fleet.runs.folder import Folder
    from fleet.tasks.state import TaskState, Workplace
    from fleet.world.world import World


class Tidying(Record):
    """What happens to a task's place and branch."""

    name: str
    removes: bool
    why: str = ""
    worktree: str = ""
    saved: str = ""  # the ref that keeps the uncommitted files
    files: int = 0  # uncommitted
    ignored: int = 0
    ignored_bytes: int = 0
    branch: str = ""  # which is removed, too
    is_empty: bool = False  # it has no commit of the task


# The files in a git directory that show that a merge or rebase is under way.
UNDER_WAY = frozenset("MERGE_HEAD CHERRY_PICK_HEAD REVERT_HEAD BISECT_LOG rebase-merge "
                      "rebase-apply sequencer".split())


class Keeps(Exception):
    """The place is kept; the message says why."""


def tidy_task(folder: Folder, state: TaskState, *, is_dry: bool = False,
              takes_ignored: bool = False) -> Tidying:
    """Remove a place if nothing is lost; no agent can start in it meanwhile."""
    hold = folder.world.hold(folder.of_task(state.name, "alive"))
    try:
        if hold is None:
            raise Keeps("its agent is still running")
        return _tidy(folder, state, is_dry=is_dry, takes_ignored=takes_ignored)
    except (Keeps, FleetError) as error:
        why = error.what if isinstance(error, FleetError) else str(error)
        return Tidying(state.name, False, why, state.place.worktree)
    finally:
        if hold:
            hold.release()


def _tidy(folder: Folder, state: TaskState, *, is_dry: bool, takes_ignored: bool) -> Tidying:
    """Remove a place, or raise Keeps. Any doubt keeps the place."""
    world, place = folder.world, state.place
    if not place.git:
        raise Keeps("has no worktree")
    if not state.is_over:
        raise Keeps(f"is {state.state}; first: subagent-fleet task stop {state.name}")
    if world.kind_of(place.worktree, follow=False) != "absent":
        return _tidy_place(folder, state, is_dry=is_dry, takes_ignored=takes_ignored)
    if not is_dry:  # a person has removed it
        _remove_places(world, place)
    return Tidying(state.name, True, "", place.worktree)


def _tidy_place(folder: Folder, state: TaskState, *, is_dry: bool,
                takes_ignored: bool) -> Tidying:
    """Remove a place after everything in it is in a ref."""
    world, place = folder.world, state.place
    main = git_of(folder)
    git = git_in(folder, state)
    _keep_untidy(world, place)
    known = read_baseline(folder, state)
    stored = store_tree(git, main, place, known, runs_filters=not is_dry)
    if stored.nested:
        raise Keeps(f"nested repository {stored.nested[0]} exists nowhere else")
    if stored.fresh and not takes_ignored:
        raise Keeps(f"{count_of(stored.fresh, 'ignored file')} new or changed since setup: "
                    f"{clean_line(some_of(stored.fresh, 3))}; `--ignored` removes it")
    own = find_commits(main, git.tree)
    _keep_secret(folder, state, git_with(main, git.tree), own)

    ref = f"{SNAPSHOT_REFS}/{state.name}/{state.attempt.tried}"
    is_kept = not own and stored.net == main.run("rev-parse", "--quiet", "--verify",
                                                 f"{ref}^{{tree}}").text
    if not is_kept:
        ref += f".tidy{place.suffix}"
    files = len(main.names("diff-tree", "-r", "--name-only", "-z", stored.head, stored.net))
    tip = droppable_tip(main, state)
    stamps = world.stamps_of(place.worktree, stored.listed)
    plan = Tidying(state.name, True, "", place.worktree, ref if files else "", files,
                   len(stored.listed),
                   sum(int(stamp.split(" ")[0]) for stamp in stamps.values()),
                   place.branch if tip else "", tip == place.base)
    if is_dry:
        return plan

    if not is_kept:  # one ref for its files, and for every commit that is nowhere else
        bring_home(main, git.tree, own)
        older = main.commit_of(ref)
        pin = main.make_commit(stored.net, filter(None, [stored.head, *own, older]),
                               f"{state.name}: tidied")
        main.out("update-ref", ref, pin, older or "0" * len(pin))
    if store_tree(git, main, place, known) != stored:
        raise Keeps("something in it has just changed")
    _remove_places(world, place)
    if tip:
        main.run("update-ref", "-d", f"refs/heads/{place.branch}", tip)
    return plan


def _keep_secret(folder: Folder, state: TaskState, both: Git, own: Iterable[str]) -> None:
    """Keep a place with a commit that contains a copied file: no ref may contain it."""
    copied = read_surroundings(folder, state).get("copied") or ()
    for commit in own:
        leaked = find_leak(both, state.place, commit, copied)
        if leaked:
            raise Keeps(f"a commit in it has {clean_line(leaked)}, a copy of a file that is "
                        "ignored")


def _remove_places(world: World, place: Workplace) -> None:
    """Remove the places of a task; nobody's work is in the check's place."""
    for path in (f"{place.worktree}.check", place.worktree):
        if is_place(world, path, place.id):
            remove_place(world, path)


def _keep_untidy(world: World, place: Workplace) -> None:
    """Keep a place with a process or a merge in it, or with a foreign directory beside it."""
    inside = world.find_inside(place.worktree)
    if inside:
        raise Keeps(f"process {inside[0]} works in it")
    under_way = UNDER_WAY.intersection(world.names_in(place.git))
    if under_way:
        raise Keeps(f"something is under way in it ({min(under_way)})")
    check = f"{place.worktree}.check"
    if world.kind_of(check, follow=False) != "absent" \
            and not is_place(world, check, place.id):
        raise Keeps(f"{check} is not what was made for its check")


def droppable_tip(main: Git, state: TaskState) -> str:
    """Return the tip of a task's branch if the branch is merged; otherwise "".

    It is merged if the current branch contains it, or the branch that the task began from, or
    an upstream of one of them. Any other branch with it may be a copy, or the agent's own.
    """
    place = state.place
    ref = f"refs/heads/{place.branch}"
    tip, _, stands = main.out("for-each-ref", "--format=%(objectname) %(worktreepath)",
                              ref).partition(" ")
    if not tip or stands or place.kept and not main.is_ancestor(place.kept, tip):
        return ""  # it is checked out, or does not have the task's work
    begun = [name for name in ("HEAD", state.task.base) if name and name != "after"]
    named = {main.run("rev-parse", "--symbolic-full-name", f"{name}{which}").text
             for name in begun for which in ("", "@{upstream}")}
    homes = [name for name in named - {ref} if "/run/" not in name
             and name.startswith(("refs/heads/", "refs/remotes/"))]
    return tip if homes and main.out("for-each-ref", "--contains", tip, *homes) else ""
