"""Landing: merge finished work, check it as a whole, then move one branch."""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from fleet.runs.agent import SETUP_SECONDS, find_work
from fleet.runs.command import CommandRunner, ShellCommand
from fleet.runs.confine import BoxPlan, Confinement
from fleet.runs.folder import STATE_LIMIT_BYTES
from fleet.runs.git import Git, git_of
from fleet.runs.place import (
    WHOLE,
    find_places,
    git_at,
    is_place,
    plan_repository,
    write_repository,
)
from fleet.runs.ports import claim_ports
from fleet.runs.process_tree import ProcessTree, end_trees
from fleet.runs.snapshot import copy_files, find_copies
from fleet.start.errors import FleetError
from fleet.start.record import Record, replace
from fleet.tasks.landing import (
    MARKER,
    can_go_back,
    find_culprit,
    plan_landing,
    share_command,
    tell_conflict,
    tell_failure,
)
from fleet.tasks.next import dependencies_of
from fleet.text.json import parse_object
from fleet.text.phrases import quote_shell, some_of
from fleet.text.terminal import clean_line
from fleet.world.process_list import CHECK_MARK, TASK_ID

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from typing import Any

    from fleet.config.sections import Fleet
    from fleet.runs.command import CommandResult
    from fleet.runs.folder import Folder
    from fleet.tasks.state import TaskState
    from fleet.world.child import Hold


# Merging happens in a separate repository. It borrows the objects of the person's repository,
# writes new ones there, and has its own index, HEAD and settings. Its git directory lies beside
# its tree, so a setup or check that runs in the tree can't change what is merged. The person's
# repository gets objects and `run/landed`. At the very end, the person's branch moves in one
# step. After a kill, it is where it was or has moved completely, and the next `land` continues
# from `run/landed`.

LANDED_BRANCH = "run/landed"  # no task can be called `landed`
LANDED = "landed"
MERGE_FILES = ("MERGE_HEAD", "MERGE_MSG", "MERGE_MODE", "AUTO_MERGE", "index.lock", "HEAD.lock")


class Merged(Record):
    """A task's work, and its merge, which landing puts on the branch."""

    state: TaskState
    work: str  # the commit that was merged
    commit: str  # the merge


class Returned(Record):
    """Work that did not land: why, and what its agent needs to go on."""

    why: str
    feedback: str = ""
    base: str = ""  # the commit that its own changes are compared with
    begin: str = ""  # the commit its next round begins with: the base and the work
    files: tuple[str, ...] = ()  # with conflict markers


class Failure(Record):
    """A setup or check that fails on a commit, and the tasks whose command it is."""

    states: tuple[TaskState, ...]
    kind: str  # setup or check
    result: CommandResult


class Landed(Record):
    """The result of a landing."""

    into: str  # the person's branch
    begin: str = ""  # where it was
    tip: str = ""
    names: tuple[str, ...] = ()  # the tasks between the two
    returned: Mapping[str, Returned] = {}  # sent back to their agents
    evicted: Mapping[str, Returned] = {}  # with no rounds left
    held: Mapping[str, str] = {}
    checks: int = 0  # tasks whose check has passed on the whole
    has_moved: bool = False
    why_not: str = ""  # why the branch was not moved
    step: str = ""  # what to type then

    @property
    def is_good(self) -> bool:
        """Whether all work that could be merged has landed, and the branch could be moved."""
        return not (self.returned or self.evicted or self.why_not)


class Landing:
    """One pass of the merge queue of a repository, by the process that holds its lock."""

    def __init__(self, folder: Folder, hold: Hold, into: str, *, worktrees: str = "",
                 fleet: Fleet | None = None, confinement: Confinement | None = None,
                 tell: Callable[[str, str, str], object] = lambda *_: None,
                 is_over: Callable[[], bool] = lambda: False) -> None:
        self._folder = folder
        self._world = folder.world
        self._hold = hold
        self._fleet = fleet
        self._is_over = is_over
        self._runner = CommandRunner(confinement or Confinement(folder), self._world.spawn,
                                     self._pause)
        self._tell = tell
        self._main = git_of(folder, hold)
        self._into = into
        self._ref = f"refs/heads/{into}"
        place = self._world.path(find_places(folder, worktrees), f".{LANDED}")
        self._merges = self._world.path(place, "merges")
        self._tree = self._world.path(place, "tree")
        objects = self._world.path(folder.repository.common, "objects")
        self._git = Git(self._world, self._world.path(self._merges, ".git"), self._tree, hold,
                        objects=objects, settings=WHOLE)
        self._mark = f"{LANDED}\n{folder.repository.main}\n"
        self._holds = ""  # the commit in the tree, if nothing was run there since
        # The results so far, by commit and tasks.
        self._failures: dict[tuple[str, ...], Failure | None] = {}
        self._states: Mapping[str, TaskState] = {}
        self._landed: list[TaskState] = []  # before this pass
        self._before: list[TaskState] = []  # of these, the ones not in the person's branch yet
        self._works: dict[str, str] = {}  # the work of each task so far, as a commit
        self._back: dict[str, Returned] = {}  # the tasks that do not land

    # -- the queue --

    def land(self, states: Mapping[str, TaskState], names: Collection[str] = ()) -> Landed:
        """Merge finished work, check the whole, and put what passes on `run/landed`."""
        begin = self._main.commit_of(self._ref)
        if not begin:
            raise FleetError("no-branch", f"there is no branch `{self._into}`",
                             fix="--into BRANCH: `git branch --list`")
        start = self._find_start(begin)
        before = self._find_landed(states, start)
        self._states = states
        plan = plan_landing(states, before, names)
        self._landed = [states[name] for name in before]
        self._before = [states[name] for name in before
                        if not self._main.is_ancestor(states[name].place.kept, begin)]
        merged: list[Merged] = []
        if plan.queue:
            self._make_place(start)
            merged = self._land_all(begin, start, plan.queue)
        tip = merged[-1].commit if merged else start
        self._keep(tip)
        names = [state.name for state in (*self._before, *(one.state for one in merged))]
        held = dict(plan.held)
        returned: dict[str, Returned] = {}
        evicted: dict[str, Returned] = {}
        for name, back in self._back.items():
            if not back.begin:
                held[name] = back.why
            elif can_go_back(states[name], self._fleet):
                returned[name] = back
            else:
                evicted[name] = back
        return Landed(self._into, begin, tip, tuple(names), returned, evicted, held,
                      sum(bool(state.task.check) for state in self._states_of(merged)))

    def _find_start(self, begin: str) -> str:
        """Return where landing begins: at the branch, or at `run/landed` if it continues it."""
        note = self._read_note()
        tip = self._main.commit_of(f"refs/heads/{LANDED_BRANCH}")
        if not tip:
            return begin
        if tip not in note.get("tips", ()):
            raise FleetError("landed-taken", f"the branch `{LANDED_BRANCH}` has commits that "
                             "`land` did not make",
                             fix=f"`git branch -m {LANDED_BRANCH} mine`")
        fits = note.get("into") == self._into and self._main.is_ancestor(begin, tip)
        return tip if fits else begin

    def _find_landed(self, states: Mapping[str, TaskState], start: str) -> list[str]:
        """Return the tasks whose work is already in the commit where landing begins."""
        return [name for name, state in states.items()
                if state.state == "done" and state.place.kept
                and self._main.commit_of(state.place.kept)
                and self._main.is_ancestor(find_work(self._main, state.place), start)]

    def _merge(self, tip: str, queue: Sequence[TaskState],
               merged: Sequence[Merged]) -> list[Merged]:
        """Merge tasks one after another, except those that conflict and those built on them."""
        merged = list(merged)
        for state in queue:
            work = find_work(self._main, state.place)
            after = dependencies_of(state.task, self._states)
            stands_on = [name for name in self._back if name in after
                         or name in self._works and self._stands_on(work, name, tip)]
            if stands_on:
                self._back[state.name] = Returned(f"{some_of(stands_on, 3)} has not landed")
                continue
            made = self._merge_one(tip, state, work, merged)
            if made:
                tip = made
                merged.append(Merged(state, work, tip))
        return merged

    def _stands_on(self, work: str, name: str, tip: str) -> bool:
        """Tell whether work contains commits of a task that does not land."""
        other = self._works[name]
        return self._main.is_ancestor(other, work) and not self._main.is_ancestor(other, tip)

    def _merge_one(self, tip: str, state: TaskState, work: str,
                   merged: Sequence[Merged]) -> str:
        """Return the merge of a task's work; "" if it does not merge cleanly."""
        git = self._git
        self._works[state.name] = work
        files = self._find_markers(state, work)
        if files:
            self._back[state.name] = Returned(
                f"{state.name} still has conflict markers in {clean_line(some_of(files, 3))}",
                tell_conflict(self._into, (), files), state.place.base, work, tuple(files))
            return ""
        self._put(tip)
        self._holds = ""
        ran = git.run("-c", "rerere.enabled=false", "merge", "--quiet", "--no-ff", "--no-edit",
                      "-m", state.title, work)
        if not ran.code:
            self._holds = git.out("rev-parse", "HEAD")
            return self._holds

        files = git.names("diff", "--name-only", "--diff-filter=U", "-z")
        if not files:
            said = clean_line((ran.talk or ran.text).split("\n")[0])
            raise FleetError("merge-failed", f"{state.name} could not be merged: {said}")
        git.out("add", "-A")
        # Both sides, with conflict markers: its agent continues from here.
        begin = git.make_commit(git.out("write-tree"), [tip, work], state.title)
        others = [one.name for one in (*self._landed, *(one.state for one in merged))
                  if {*files} & {*self._files_of(one)}
                  and not self._main.is_ancestor(one.place.kept, work)]
        beside = some_of(others, 3) or self._into
        self._back[state.name] = Returned(
            f"{state.name} conflicts with {beside} in {clean_line(some_of(files, 3))}",
            tell_conflict(self._into, others, files), tip, begin, tuple(files))
        return ""

    def _find_markers(self, state: TaskState, work: str) -> list[str]:
        """Return the files that still have the markers of an earlier conflict."""
        if not state.place.conflicts:
            return []
        listed = self._main.names("grep", "-l", "-z", "-I", "-E", "-e", MARKER, work, "--",
                                  *[f":(literal){path}" for path in state.place.conflicts], known=1)
        return [entry.split(":", 1)[-1] for entry in listed]

    def _files_of(self, state: TaskState) -> list[str]:
        """Return the files that a task has changed."""
        return self._main.names("diff-tree", "-r", "--name-only", "--no-renames", "-z",
                                "--end-of-options", state.place.base, state.place.kept)

    # -- the checks --

    def _land_all(self, begin: str, start: str, queue: Sequence[TaskState]) -> list[Merged]:
        """Return the merges that pass as a whole; each culprit is taken out, and sent back."""
        culprits: set[str] = set()
        merged = self._merge(start, queue, [])
        while merged:
            failed = self._find_failure(merged)
            if not failed:
                return merged
            place = find_culprit(len(merged), functools.partial(self._passes, merged))
            good, bad = merged[:place], merged[place]
            failed = self._find_failure(merged[:place + 1]) or failed
            self._refuse_broken(begin, bad, failed)
            result = failed.result
            base = good[-1].commit if good else start
            others = [one.name for one in self._states_of(good)]
            beside = f" together with {some_of(others, 3)}" if others else f" on {self._into}"
            self._back[bad.state.name] = Returned(
                f"{bad.state.name} fails{beside}: {result.command} (exit {result.code})",
                tell_failure(self._into, others, result.command, result.code, result.output),
                base, bad.commit)
            culprits.add(bad.state.name)
            # The tasks behind it are merged again: one that conflicted with it may fit now.
            rest = [state for state in queue[queue.index(bad.state) + 1:]
                    if state.name not in culprits]
            for state in rest:
                self._back.pop(state.name, None)
            merged = self._merge(base, rest, good)
        return merged

    def _refuse_broken(self, begin: str, bad: Merged, failed: Failure) -> None:
        """Refuse to blame a task if the person's branch fails by itself.

        A check of new work, such as `test -s docs/dates.md`, fails on the branch for a good
        reason. So the branch is at fault only if it has broken the check since the work began.
        If the work alone fails now, too, the machine is at fault.
        """
        states = [bad.state]
        if failed.states != (bad.state,):
            return  # another task has this command, too: it passes before this one is merged
        broken = self._ask(begin, states, self._into)
        if not broken:
            return
        root = self._git.out("merge-base", begin, bad.work, known=1).split("\n")[0]
        was_good = root not in ("", begin) and not self._ask(
            root, states, f"{self._into}, where {bad.state.name} began")
        if not was_good and not self._ask(bad.work, states, f"{bad.state.name} alone"):
            return
        log = self._folder.of_task(LANDED, "branch.log")
        self._world.replace_files([(log, broken.result.output.encode(), 0o600)])
        raise FleetError(
            "branch-broken", f"the {broken.kind} fails on {self._into} itself, so nothing landed: "
            f"{broken.result.command} (exit {broken.result.code})",
            fix=f"see `less {quote_shell(log)}`, fix {self._into}, "
            "then `subagent-fleet task land`")

    def _states_of(self, merged: Sequence[Merged]) -> list[TaskState]:
        """Return the tasks whose checks have to pass: what lands, and what landed before."""
        return [*self._before, *(one.state for one in merged)]

    def _passes(self, merged: Sequence[Merged], count: int) -> bool:
        """Tell whether the first `count` of the merged tasks pass together."""
        return not self._find_failure(merged[:count])

    def _find_failure(self, merged: Sequence[Merged]) -> Failure | None:
        """Return the setup or check that fails on the merge of all of these, if any."""
        names = some_of([one.state.name for one in merged], 5)
        return self._ask(merged[-1].commit, self._states_of(merged), names)

    def _ask(self, commit: str, states: Sequence[TaskState], names: str) -> Failure | None:
        """Return the first setup or check of these tasks that fails on a commit."""
        known = (commit, *(state.name for state in states))
        if known not in self._failures:
            self._failures[known] = self._run_all(commit, states, names)
        return self._failures[known]

    def _run_all(self, commit: str, states: Sequence[TaskState], names: str
                 ) -> Failure | None:
        """Run the setup and the checks of tasks on a commit; return the first that fails."""
        self._put(commit)
        self._copy(states)
        for (kind, text, name), sharing in self._commands_of(states).items():
            task = share_command([state.task for state in sharing])
            seconds = SETUP_SECONDS
            if kind == "check":
                seconds = task.deadline
                self._put(commit)
                self._tell(LANDED, "checking", f"{name or names}: {text}")
            self._show_repository(commit)
            log = self._folder.of_task(LANDED, f"{kind}.log")
            self._world.remove(log)
            self._holds = ""
            port = claim_ports(self._world, self._folder.place("run.json"))
            environ = {TASK_ID: name or sharing[0].name, "PORT": str(port)}
            command = ShellCommand(text, BoxPlan(task, self._tree), log, seconds, environ)
            result = self._runner.run(command, self._processes)
            if result.refused:
                self._tell(LANDED, "note", f"the {kind}: {result.refused}")
            if result.code:
                return Failure(tuple(sharing), kind, result)
        return None

    def _commands_of(self, states: Sequence[TaskState]
                     ) -> dict[tuple[str, str, str], list[TaskState]]:
        """Return the commands of tasks: {(setup or check, command, its only task): its tasks}.

        A command may ask for which task it runs, itself or in a file of the tree. Then it runs
        once for each task, under the task's name. Otherwise all tasks with the same command
        share one run.
        """
        asks = self._git.run("grep", "--quiet", "--fixed-strings", "-e", TASK_ID).code != 1
        commands = [("setup", command, state) for state in states
                    for command in state.task.setup]
        commands += [("check", state.task.check, state) for state in states
                     if state.task.check]
        runs: dict[tuple[str, str, str], list[TaskState]] = {}
        for kind, command, state in commands:
            is_own = asks or TASK_ID in command
            runs.setdefault((kind, command, state.name if is_own else ""), []).append(state)
        return runs

    def _copy(self, states: Sequence[TaskState]) -> None:
        """Copy the person's ignored files into the tree, as they are now."""
        paths = {path for state in states for path in find_copies(self._folder, state.task)}
        for path in paths:
            self._git.out("clean", "--quiet", "-ffdx", "--", f":(literal){path}")
        copy_files(self._folder, sorted(paths), self._tree)

    def _pause(self, seconds: float) -> None:
        """Wait a while; raise KeyboardInterrupt if the landing was stopped."""
        if self._is_over():
            raise KeyboardInterrupt
        self._world.sleep(seconds)

    # -- the place --

    def _make_place(self, start: str) -> None:
        """Make the repository for merging, and end the processes of an earlier landing."""
        world = self._world
        world.make_directory(self._folder.of_task(LANDED))
        self._processes = ProcessTree(self._folder, LANDED, CHECK_MARK)
        end_trees(world, [self._processes], 0.0)
        world.make_directory(self._tree, is_private=True)
        self._files = plan_repository(self._main)
        write_repository(world, self._merges, self._mark, self._files, start)

    def _put(self, commit: str) -> None:
        """Put the tree to a commit, whatever a check has left there."""
        if self._holds == commit:
            return
        git, world = self._git, self._world
        for name in MERGE_FILES:
            world.remove(world.path(git.git, name))
        git.out("update-ref", "--no-deref", "HEAD", commit)
        git.run("read-tree", "-u", "--reset", commit)  # removes files that are not in it
        world.remove(world.path(git.git, "index"))  # so that no file counts as unchanged
        git.out("read-tree", commit)
        git.out("checkout-index", "--quiet", "--force", "--all", "-u")
        git.out("clean", "--quiet", "-ffd")
        self._holds = commit

    def _show_repository(self, commit: str) -> None:
        """Give the tree a repository for checks that use git; nothing else reads it."""
        write_repository(self._world, self._tree, self._mark, self._files, commit)
        git = git_at(self._main, self._tree)
        git.out("read-tree", commit)
        git.run("update-index", "-q", "--refresh")

    # -- the end --

    def _read_note(self) -> dict[str, Any]:
        """Return the note of the last landing: its branch, and where `run/landed` may be."""
        path = self._folder.place("landed.json")
        return parse_object(self._world.read_part(path, 0, STATE_LIMIT_BYTES)) or {}

    def _keep(self, tip: str) -> None:
        """Move `run/landed` to what has passed. A note comes first, which proves it is ours."""
        ref = f"refs/heads/{LANDED_BRANCH}"
        old = self._main.commit_of(ref)
        if tip in (old, self._main.commit_of(self._ref)):
            return
        self._folder.write({"into": self._into, "tips": [*filter(None, (old, tip))]},
                           "landed.json")
        self._main.out("update-ref", "-m", "subagent-fleet: landed", ref, tip,
                       old or "0" * len(tip))

    def move(self, landed: Landed) -> Landed:
        """Move the person's branch to what has landed, or say why not and what to type."""
        tip, into = landed.tip, self._into
        top = self._folder.repository.top
        home = self._world.run_git(["symbolic-ref", "--quiet", "HEAD"], top).text
        elsewhere = "" if home == self._ref else f" --into {quote_shell(into)}"
        again = f"subagent-fleet task land{elsewhere}"
        by_hand = f"git merge --ff-only {LANDED_BRANCH}"

        def stay(why: str, step: str) -> Landed:
            return replace(landed, why_not=why, step=step)

        if self._main.commit_of(self._ref) == tip:
            return self._drop_landed(landed)
        if self._main.commit_of(self._ref) != landed.begin:
            return self._tell_moved(landed, again)
        if home == self._ref:
            changed = self._world.run_git(
                ["status", "--porcelain", "--untracked-files=no", "--ignore-submodules=none"],
                top)
            if changed.code or changed.text:
                words = ["diff", "--name-only", "--no-renames", "-z"]
                own = {*self._main_at(top).names(*words, "HEAD")}
                both = sorted(own & {*self._main.names(*words, landed.begin, tip)})
                step = f"commit or stash {clean_line(some_of(both, 3))}, then {again}" \
                    if both else by_hand  # git would refuse to overwrite them
                return stay("your checkout has uncommitted changes", step)
            # A branch may have a setting to squash what is merged.
            ran = self._main_at(top).run("merge", "--quiet", "--no-squash", "--ff-only", tip)
            if ran.code:
                said = clean_line(ran.talk.strip().split("\n")[0])
                return stay(f"git did not move {into}: {said}", by_hand)
        elif self._is_checked_out():
            return stay(f"{into} is checked out in another worktree", f"{by_hand} (there)")
        else:
            self._main.run("update-ref", "-m", "subagent-fleet: landed", self._ref, tip,
                           landed.begin)
        if self._main.commit_of(self._ref) != tip:
            return self._tell_moved(landed, again)
        return self._drop_landed(landed)

    def _tell_moved(self, landed: Landed, again: str) -> Landed:
        """Say that the person's branch is no longer where it was, or is gone."""
        if self._main.commit_of(self._ref):
            return replace(landed, why_not=f"{self._into} has moved meanwhile", step=again)
        return replace(landed, why_not=f"{self._into} no longer exists",
                       step="subagent-fleet task land --into BRANCH")

    def _main_at(self, top: str) -> Git:
        """Return git in the checkout where the person typed."""
        git = self._world.run_git(["rev-parse", "--absolute-git-dir"], top).text
        return Git(self._world, git, top, self._hold)

    def _is_checked_out(self) -> bool:
        """Tell whether the branch is checked out in any worktree."""
        listed = self._main.out("worktree", "list", "--porcelain").split("\n")
        return f"branch {self._ref}" in listed

    def _drop_landed(self, landed: Landed) -> Landed:
        """Remove `run/landed`, now that the person's branch has all of it."""
        ref = f"refs/heads/{LANDED_BRANCH}"
        old = self._main.commit_of(ref)
        if old and self._main.is_ancestor(old, landed.tip):
            self._main.run("update-ref", "-d", ref, old)
        return replace(landed, has_moved=True)


def remove_landing(folder: Folder, states: Iterable[TaskState]) -> None:
    """Remove the repository where branches are merged, unless a landing is using it now.

    The next landing makes it again.
    """
    world = folder.world
    places = {world.parent(state.place.worktree) for state in states if state.place.worktree}
    hold = world.hold(folder.place("landing.lock")) if places else None
    if not hold:
        return
    try:
        for above in places:
            place = world.path(above, f".{LANDED}")
            if is_place(world, world.path(place, "merges"), LANDED):
                world.remove_tree(place)
    finally:
        hold.release()
