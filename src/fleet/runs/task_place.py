"""A task at work: its places are made, filled and checked."""
from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from fleet.runs.agent import (
    SETUP_SECONDS,
    find_work,
    last_line_of,
    last_snapshot,
    plan_branch,
    refuse_missing,
)
from fleet.runs.command import ShellCommand
from fleet.runs.confine import BoxPlan
from fleet.runs.folder import read_mark
from fleet.runs.git import SNAPSHOT_REFS
from fleet.runs.place import (
    clear_place,
    find_places,
    git_at,
    is_place,
    make_place,
    mark_of,
    plan_repository,
    write_mark,
    write_repository,
)
from fleet.runs.ports import claim_ports
from fleet.runs.snapshot import (
    baseline_of,
    blob_of,
    copy_files,
    find_copies,
    follow_branch,
    lend_index,
    store_tree,
    take_snapshot,
)
from fleet.runs.task_desk import TaskDesk
from fleet.start.errors import FleetError
from fleet.start.record import replace
from fleet.tasks.events import Planned, Ready
from fleet.tasks.next import dependencies_of
from fleet.tasks.state import change
from fleet.text.phrases import some_of
from fleet.text.terminal import clean_line
from fleet.world.process_list import CHECK_MARK, TASK_MARK

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from fleet.runs.command import CommandResult
    from fleet.runs.git import Git
    from fleet.tasks.events import Event
    from fleet.tasks.state import TaskState


class TaskPlace(TaskDesk):
    """The part of a task at work that deals with its agent's place and its check's place."""

    _taken: Mapping[str, bytes] = {}  # the files of a place's `.git`, once they were read
    _trouble: Exception | None = None  # of the thread that prepares the check's place

    # -- making ready --

    def _make_ready(self) -> Event:
        """Make the worktree of a task, and everything else that the agent needs."""
        self._end(0.0)
        state = self._take(self._plan_try()).state
        self._world.make_directory(self._file(""))
        refuse_missing(self._folder, state)
        if isinstance(state.task.coder, str) and self._backing.fleet:
            self._backing.serve()
        if state.place.prepared:
            self._take_additions(self._git())  # which parks the task if the worktree is gone
        else:
            self._make_worktree(state)
        self._prepare_check()
        return Ready()

    def _plan_try(self) -> Planned:
        """Return where a try begins or continues."""
        state = self.state
        now = state.place
        above = find_places(self._folder, self._backing.worktrees)
        confiner = self._confinement.find_for(state.task)
        chosen: dict[str, Any] = {
            "confined": confiner.name if confiner else "no",
            "port": claim_ports(self._world, self._folder.of_task(self.name, "state.json")),
            "branch": plan_branch(state),
            "id": now.id or ("" if now.git else self._world.token(8)),
            "worktree": now.worktree or self._world.path(above, self.name + now.suffix)}
        depends = dependencies_of(state.task, self._supervisor.tasks)
        if not now.start and depends and state.task.base in (None, "after"):
            if len(depends) == 1:
                done = self._supervisor.tasks[depends[0]]
                chosen["base"] = find_work(self._main, done.place) or now.base
            else:
                self._tell("note", "starts from HEAD, without the work of "
                           f"{some_of(depends, 3)}: only a single task in "
                           "`after:` is built on")
        number = 0
        if not state.attempt.open:
            # Its number is new, because the snapshots of an earlier task of this name stay.
            number = 1 + (state.attempt.tried or last_snapshot(self._main, self.name))
        return Planned(number, chosen)

    def _make_worktree(self, state: TaskState) -> None:
        """Make the agent's place, fill it, and note what is in it before the agent starts."""
        place = state.place
        above = self._world.parent(place.worktree)
        if f"{above}/".startswith(f"{self._folder.repository.main}/"):
            # The repository contains the places, such as a whole home: its status skips them.
            self._world.make_directory(above, is_private=True)
            self._world.replace_files([(self._world.path(above, ".gitignore"), b"*\n", 0o600)])
        self._drop_half_made(state)
        begin = self._take_branch(state)
        make_place(self._main, place.worktree, mark_of(self._folder, place), self._files,
                   f"{place.branch} {begin}")
        # Written at once: from now on, somebody may work in it.
        place = self._write(git=self._world.path(place.worktree, ".git"), prepared=False).place
        copies = self._fill(place.worktree, self._file("setup.log"), TASK_MARK)
        copied = []
        for path in copies:
            source = self._world.path(self._folder.repository.main, path)
            is_file = self._world.kind_of(source, follow=False) == "file"
            if is_file and self._world.size_of(source):  # an empty file gives nothing away
                copied.append(blob_of(self._world, source, place.base))

        # A task that was worked on before keeps its first start. Without copies and setup, all
        # tasks with the same base start the same, so the trees are stored once.
        is_bare = not copies and not state.task.setup
        starts = self._supervisor.starts if is_bare else {}
        start = place.start or starts.get(place.base, "")
        ignored: Mapping[str, str] = {}
        if not start or not is_bare:
            stored = store_tree(self._git(), self._main, replace(place, copies=tuple(copies)),
                                None)
            ignored = stored.ignored
            if not start:
                start = stored.head
                if stored.tree != stored.old_tree:
                    start = self._main.make_commit(stored.tree, [start],
                                                   f"{self.name}: as set up")
            starts[place.base] = start
        # A ref, so that `git gc` keeps what the work is compared with.
        self._main.out("update-ref", f"{SNAPSHOT_REFS}/{self.name}/start", start)
        self._folder.write({"ignored": ignored, "copied": copied}, "tasks", self.name,
                           baseline_of(place))
        self._write(start=start, prepared=True, copies=tuple(copies))

    @property
    def _files(self) -> Mapping[str, bytes]:
        """The files for the `.git` of each place of this task, read once."""
        if not self._taken:
            self._taken = plan_repository(self._main)
        return self._taken

    def _take_branch(self, state: TaskState) -> str:
        """Make the task's branch, or make sure that it is ours; return where a place begins.

        It is ours if the task left it there, or if it contains all of the task's work. Any
        other branch is a person's, even without a commit of its own.
        """
        place = state.place
        ref = f"refs/heads/{place.branch}"
        begin = place.base
        if place.kept and self._main.commit_of(place.kept):
            begin = place.kept  # its own work, once there is any
        tip = self._main.commit_of(ref)
        if place.tip and tip and self._main.is_ancestor(begin, tip):
            return tip  # with commits that a person has added
        if tip and tip != place.tip:
            raise FleetError(
                "branch-taken", f"the branch `{place.branch}` already exists",
                fix=f"write another `branch:`, or `git branch -m {place.branch} old`")
        if not tip:
            self._write(tip=begin)  # first: after a kill, the branch is still the task's
            made = self._main.run("update-ref", ref, begin, "0" * len(begin))
            if made.code:
                self._write(tip="")
                said = clean_line(made.talk.split("\n")[0])
                raise FleetError("worktree-failed", f"its branch could not be made: {said}")
        return begin

    def _take_additions(self, git: Git) -> None:
        """Bring commits that a person has added to the branch into the agent's place.

        Only if the place has no other changes: otherwise, a person has to merge.
        """
        place = self.state.place
        tip = self._main.commit_of(f"refs/heads/{place.branch}")
        if tip in ("", place.tip) or not self._main.is_ancestor(place.tip, tip):
            return
        stored = store_tree(git, self._main, place, None)
        if (stored.head, stored.tree) != (place.tip, stored.old_tree):
            return
        with lend_index(git) as own:
            own.out("read-tree", stored.head)
            own.out("read-tree", "--reset", "-u", tip)
        follow_branch(git, f"refs/heads/{place.branch}", tip)
        self._write(tip=tip)

    def _drop_half_made(self, state: TaskState) -> None:
        """Remove a place that was never ready, after keeping what a person did in it."""
        place = state.place
        if place.git and self._world.kind_of(place.worktree, follow=False) != "absent":
            copies = tuple(find_copies(self._folder, state.task))
            take_snapshot(self._git(), self._main, change(state, copies=copies),
                          f"{state.attempt.tried}.remade", {})
            self._write(git="")  # it is kept now: after a kill, the rest is simply removed
        clear_place(self._world, place.worktree, place.id)

    def _fill(self, tree: str, log: str, variable: str) -> list[str]:
        """Copy the person's ignored files into a worktree, and run the setup there."""
        copies = find_copies(self._folder, self.state.task)
        copy_files(self._folder, copies, tree)
        for command in self.state.task.setup:
            result = self._run_command(command, tree, log, SETUP_SECONDS, variable)
            if result.code:
                last = last_line_of(self._world, log)
                raise FleetError("setup-failed", "; ".join(filter(None, [
                                 f"setup failed (exit {result.code}): {command}: {last}",
                                 result.refused])),
                                 fix=f"subagent-fleet task log {self.name} setup")
        return copies

    def _prepare_check(self) -> None:
        """Start a thread that makes the check's place while the agent works."""
        task = self.state.task
        if task.check and task.check_in == "own":
            self._preparing = threading.Thread(target=self._prepare_place, daemon=True)
            self._preparing.start()

    def _prepare_place(self) -> None:
        """Make the check's place, and run the check in it before any work.

        An error is raised later, when the check is needed.
        """
        try:
            if not self._commit_of_check():
                self._make_check_place()
            self._remember(passes_on_base=self._ask_base())
        except Exception as error:
            self._trouble = error

    def _make_check_place(self) -> None:
        """Make a new place for the check, and set it up."""
        place = self.state.place
        path = f"{place.worktree}.check"
        clear_place(self._world, path, place.id)
        make_place(self._main, path, mark_of(self._folder, place), self._files,
                   f" {place.start}")
        self._fill(path, self._file("setup-check.log"), CHECK_MARK)
        write_mark(self._world, path, mark_of(self._folder, place, place.start))

    def _commit_of_check(self) -> str:
        """Return the commit in the check's place; "" if there is no such place."""
        place = self.state.place
        path = f"{place.worktree}.check"
        if not is_place(self._world, path, place.id):
            return ""
        return read_mark(self._world, self._world.path(path, ".git"))[2]

    def _ask_base(self) -> bool:
        """Tell whether the check passes before any work, because then it proves nothing.

        It runs once for each check and base in a `run`; other tasks wait for the result.
        """
        task, passes = self.state.task, self._supervisor.passes
        asked = (task.check or "", self.state.place.base, *task.setup)
        lock = self._supervisor.asking.setdefault(asked, threading.Lock())
        while not lock.acquire(blocking=False):
            self._pause(0.25)
        try:
            if asked not in passes:
                # An earlier supervisor may have left work in it.
                tree = self._put_check(self.state.place.start)
                passes[asked] = self._run_check(tree, "check-base.log").code == 0
                if passes[asked] and task.changes == "required" \
                        and self._folder.is_news(f"passes: {task.check}"):
                    self._tell("note", "the check already passes before any work, so passing "
                               "proves nothing")
            return passes[asked]
        finally:
            lock.release()

    def _run_check(self, tree: str, log: str) -> CommandResult:
        """Run the check in a place, for as long as a try may work."""
        task = self.state.task
        commit = self._commit_of_check()
        try:
            return self._run_command(task.check or "", tree, self._file(log), task.deadline,
                                     CHECK_MARK)
        finally:
            if tree != self.state.place.worktree:  # a check may remove even the mark
                write_mark(self._world, tree, mark_of(self._folder, self.state.place, commit))

    def _run_command(self, text: str, tree: str, log: str, seconds: int,
                     variable: str) -> CommandResult:
        """Run a command of this task in one of its places."""
        command = ShellCommand(text, BoxPlan(self.state.task, tree), log, seconds,
                          self._plan_environment())
        return self._runner.run(command, self._trees[variable])

    def _put_check(self, commit: str) -> str:
        """Put the check's place to a commit; return its path."""
        try:
            self._reset_check(commit)
        except FleetError:  # an earlier check has damaged its own place
            self._make_check_place()
            self._reset_check(commit)
        return f"{self.state.place.worktree}.check"

    def _reset_check(self, commit: str) -> None:
        """Reset the check's place to a commit."""
        place = self.state.place
        path = f"{place.worktree}.check"
        before = self._commit_of_check()
        if not before:
            raise FleetError("worktree-gone", f"the check's worktree is gone: {path}")
        # A new `.git`: an earlier check may have left an index, locks, settings or refs.
        write_repository(self._world, path, mark_of(self._folder, place), self._files,
                         f" {commit}")
        git = git_at(self._main, path)
        git.out("read-tree", before)  # without it, no file would be removed
        git.out("read-tree", "--reset", "-u", commit)
        # Remove what an earlier check has left, repositories too; ignored caches may stay.
        keep = [word for copy in place.copies for word in ("-e", f"/{copy}")]
        git.out("clean", "-q", "-ffd", *keep)
        write_mark(self._world, path, mark_of(self._folder, place, commit))
