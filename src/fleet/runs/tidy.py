"""Whether a worktree can go."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.runs.git import (
    SNAPSHOT_REFS,
    Git,
    drop_worktree,
    git_in,
    git_of,
    list_worktrees,
    lock_of,
)
from fleet.runs.snapshot import no_filters, read_baseline, store_tree, take_snapshot
from fleet.start.errors import FleetError
from fleet.start.record import Record
from fleet.text.phrases import count_of, some_of
from fleet.text.terminal import clean_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fleet.runs.folder import Folder
    from fleet.tasks.state import TaskState
    from fleet.world.world import World


class Tidying(Record):
    """What becomes of a task's worktree and branch."""

    name: str
    removes: bool
    why: str = ""
    worktree: str = ""
    saved: str = ""  # the ref that has what is in no commit
    files: int = 0  # in no commit
    ignored: int = 0
    ignored_bytes: int = 0
    branch: str = ""  # goes as well
    is_empty: bool = False  # that has no commit of the task


# What git has in the directory of a worktree in which it has stopped half way.
UNDER_WAY = frozenset("MERGE_HEAD CHERRY_PICK_HEAD REVERT_HEAD BISECT_LOG rebase-merge "
                      "rebase-apply sequencer".split())


class Keeps(Exception):
    """Why a worktree stays."""


def tidy_task(folder: Folder, state: TaskState, *, is_dry: bool = False,
              takes_ignored: bool = False) -> Tidying:
    """Remove a worktree if that loses nothing; no agent can be started in it meanwhile."""
    hold = folder.world.hold(folder.of_task(state.name, "alive"))
    try:
        if hold is None:
            raise Keeps("its agent is alive")
        return _tidy(folder, state, is_dry=is_dry, takes_ignored=takes_ignored)
    except (Keeps, FleetError) as error:
        why = error.what if isinstance(error, FleetError) else str(error)
        return Tidying(state.name, False, why, state.worktree)
    finally:
        if hold:
            hold.release()


def _tidy(folder: Folder, state: TaskState, *, is_dry: bool, takes_ignored: bool) -> Tidying:
    """Do it, or raise why not: whatever is unsure keeps the worktree."""
    world = folder.world
    main = git_of(folder)
    _find_tidied(folder, main, state)
    if world.kind_of(state.worktree, follow=False) == "absent":
        return _tidy_removed(folder, main, state, is_dry=is_dry)
    git = git_in(folder, state.worktree, state.git)
    _keep_untidy(world, git, state)

    known = read_baseline(folder, state)
    stored = store_tree(git, main, state.copies, known, runs_filters=not is_dry)
    if stored.nested:
        raise Keeps(f"nested repository {stored.nested[0]} exists nowhere else")
    if stored.fresh and not takes_ignored:
        raise Keeps(f"{count_of(stored.fresh, 'ignored file')} new or changed since setup: "
                    f"{clean_line(some_of(stored.fresh, 3))}; `--ignored` removes it")
    files = len(git.names("diff-tree", "-r", "--name-only", "-z", stored.head, stored.net))
    ignored = git.names("ls-files", "-z", "-oi", "--exclude-standard")
    tip = droppable_tip(main, state)
    label = f"{state.tried}.tidy"
    stamps = world.stamps_of(state.worktree, ignored)
    plan = Tidying(state.name, True, "", state.worktree,
                   f"{SNAPSHOT_REFS}/{state.name}/{label}" if files else "", files,
                   len(ignored), sum(int(stamp.split(" ")[0]) for stamp in stamps.values()),
                   state.branch if tip else "", tip == state.base)
    if is_dry:
        return plan

    # All of it in one ref: every commit that only it knows, what is staged, what lies there.
    _drop_check_worktree(folder, main, state)  # first: where that fails, nothing is half done
    pinned = _parents_to_pin(git, state)
    work, last = take_snapshot(git, main, state, label, known)
    _pin(git, main, state, [main.commit_of(work.ref), *pinned], stored.net)
    if last != stored:
        raise Keeps("something in it has just changed")
    drop_worktree(main, state.worktree)
    if tip:
        main.run("update-ref", "-d", f"refs/heads/{state.branch}", tip)
    return plan


def _pin(git: Git, main: Git, state: TaskState, parents: Iterable[str], tree: str) -> None:
    """Keep what would die with a worktree in the ref of its tidying."""
    pin = git.make_commit(tree, parents, f"{state.name}: tidied")
    main.out("update-ref", f"{SNAPSHOT_REFS}/{state.name}/{state.tried}.tidy", pin)


def _tidy_removed(folder: Folder, main: Git, state: TaskState, *, is_dry: bool) -> Tidying:
    """Clear away what is left of a worktree that a person has removed by hand.

    Its git directory is still there, and may know commits that nothing else does.
    """
    if not is_dry:
        _drop_check_worktree(folder, main, state)
        if state.worktree in list_worktrees(main):
            git = Git(folder.world, state.git, state.git)  # no file is looked at
            _pin(git, main, state, _parents_to_pin(git, state), "HEAD^{tree}")
            drop_worktree(main, state.worktree)
    return Tidying(state.name, True, "", state.worktree)


def _drop_check_worktree(folder: Folder, main: Git, state: TaskState) -> None:
    """Remove the check's worktree; nothing in it is anybody's work."""
    path = f"{state.worktree}.check"
    known = list_worktrees(main).get(path, {})
    if state.check_git and known.get("locked") == lock_of(state):
        if folder.world.kind_of(path, follow=False) != "absent":
            git_in(folder, path, state.check_git)
        drop_worktree(main, path)


def _find_tidied(folder: Folder, main: Git, state: TaskState) -> None:
    """Keep what is no worktree of a task that is over, as this program left it."""
    if not state.git:
        raise Keeps("has no worktree")
    if not state.is_over:
        raise Keeps(f"is {state.state}; first: subagent-fleet task stop {state.name}")
    known = list_worktrees(main).get(state.worktree)
    places = (state.worktree, state.git)  # without both of them there is nothing left of it
    if not known and any(folder.world.kind_of(one, follow=False) != "absent"
                         for one in places):
        raise Keeps("its worktree was moved, or is another repository's")
    if known and known.get("locked") != lock_of(state):
        raise Keeps("its lock is not this program's")


def _keep_untidy(world: World, git: Git, state: TaskState) -> None:
    """Keep a worktree in which something is at work or under way."""
    inside = world.find_inside(state.worktree)
    if inside:
        raise Keeps(f"process {inside[0]} works in it")
    under_way = UNDER_WAY.intersection(world.names_in(git.git))
    if under_way:
        raise Keeps(f"something is under way in it ({min(under_way)})")
    own = git.out("for-each-ref", "--count=1", "--format=%(refname)", "refs/worktree",
                  "refs/bisect", "refs/rewritten")
    if own:
        raise Keeps(f"has a ref of its own: {own}")


def _parents_to_pin(git: Git, state: TaskState) -> list[str]:
    """Return what else dies with a worktree: its staged files, and the log of its HEAD."""
    parents = []
    if git.run("diff-index", "--cached", "--quiet", "HEAD").code:
        tree = git.run(*no_filters(git), "write-tree")
        if tree.code:
            raise Keeps("its index has conflicts")
        parents.append(git.make_commit(tree.text, ["HEAD"], f"{state.name}: staged"))
    logged = git.out("log", "-g", "--format=%H", "HEAD").split("\n")
    parents += [git.commit_of("ORIG_HEAD"), *logged]
    return list(dict.fromkeys(filter(None, parents)))


def droppable_tip(main: Git, state: TaskState) -> str:
    """Return where a branch is if it is merged; else "".

    It is where what a person has checked out, the branch that the task began from, or what
    one of them follows has all of it. Any other branch that has it may be a copy, or the
    agent's own.
    """
    ref = f"refs/heads/{state.branch}"
    tip = main.commit_of(ref)
    if not tip or state.kept and not main.is_ancestor(state.kept, tip):
        return ""  # what was kept for it is in no branch: it is not merged
    begun = [name for name in ("HEAD", state.task.base) if name and name != "after"]
    named = {main.run("rev-parse", "--symbolic-full-name", f"{name}{which}").text
             for name in begun for which in ("", "@{upstream}")}
    homes = [name for name in named - {ref} if "/run/" not in name
             and name.startswith(("refs/heads/", "refs/remotes/"))]
    return tip if homes and main.out("for-each-ref", "--contains", tip, *homes) else ""
