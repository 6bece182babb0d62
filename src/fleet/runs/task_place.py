"""A task on its way: its worktrees."""
from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from fleet.runs.agent import (
    SETUP_SECONDS,
    find_work,
    last_line_of,
    last_snapshot,
    plain_environment,
    plan_branch,
    refuse_missing,
    shell_words,
    suffix_of,
)
from fleet.runs.git import (
    SNAPSHOT_REFS,
    add_worktree,
    drop_unused,
    drop_worktree,
    find_worktrees_place,
    git_in,
    list_worktrees,
    lock_of,
)
from fleet.runs.process_tree import PROCESS_LOOK_SECONDS
from fleet.runs.snapshot import (
    baseline_of,
    blob_of,
    find_copies,
    look_outside,
    store_tree,
    take_snapshot,
)
from fleet.runs.task_box import TaskBox
from fleet.start.errors import FleetError
from fleet.start.record import replace
from fleet.tasks.next import dependencies_of
from fleet.text.phrases import some_of
from fleet.world.child import Launch
from fleet.world.places import Place
from fleet.world.process_list import CHECK_MARK, TASK_MARK

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from fleet.tasks.state import TaskState


class TaskPlace(TaskBox):
    """A task's worktrees: made, filled, checked in."""

    # -- making ready --

    def _make_ready(self) -> None:
        """Make the worktree of a task, and do in it what comes before the agent."""
        state = self._write("preparing", **self._plan_try())
        self._world.make_directory(self._file(""))
        refuse_missing(self._folder, state)
        if isinstance(state.task.coder, str) and self._backing.fleet:
            self._backing.serve()
        if state.prepared:
            self._git()  # or it is gone, and parked
        else:
            self._make_worktree(state)
        self._prepare_check()

    def _plan_try(self) -> dict[str, Any]:
        """Return with what a try begins, or goes on."""
        state = self.state
        place = find_worktrees_place(self._folder, self._backing.worktrees)
        changes: dict[str, Any] = {
            **self._plan_own(),
            "branch": plan_branch(state),
            "id": state.id or ("" if state.git else self._world.token(8)),
            "worktree": state.worktree or self._world.path(place,
                                                           self.name + suffix_of(state))}
        depends = dependencies_of(state.task, self._supervisor.tasks)
        if not state.start and depends and state.task.base in (None, "after"):
            if len(depends) == 1:
                done = self._supervisor.tasks[depends[0]]
                changes["base"] = find_work(self._main, done) or state.base
            else:
                self._tell("note", "starts from HEAD, without the work of "
                           f"{some_of(depends, 3)}: only a single task in "
                           "`after:` is built on")
        if not state.open:
            # Snapshots of an earlier task of this name stay.
            tried = state.tried or last_snapshot(self._main, self.name)
            changes.update(open=True, tried=tried + 1, round=0, stalls=0, checks=(),
                           worked=0.0, began=self._world.now(),
                           spent=state.total_at(state.at))
        return changes

    def _make_worktree(self, state: TaskState) -> None:
        """Make the agent's worktree, fill it, note what is there before the agent comes."""
        above = self._world.parent(state.worktree)
        if f"{above}/".startswith(f"{self._folder.repository.main}/"):
            # The whole home is a repository: its status shall not list worktrees.
            self._world.make_directory(above, is_private=True)
            self._world.replace_files([(self._world.path(above, ".gitignore"), b"*\n", 0o600)])
        with self._supervisor.adding:
            self._drop_half_made(state)
            git = add_worktree(self._main, state)
        # Written at once: after a kill it tells what is ours from what is in the way.
        state = self._write(git=git, prepared=False)
        copies = self._fill(state.worktree, self._file("setup.log"), TASK_MARK)
        copied = []
        for path in copies:
            source = self._world.path(self._folder.repository.main, path)
            is_file = self._world.kind_of(source, follow=False) == "file"
            if is_file and self._world.size_of(source):  # that is empty tells nothing
                copied.append(blob_of(self._world, source, state.base))

        # Where a task was worked on already, what was made then still counts. Where nothing
        # was set up, all tasks of a base begin with the same.
        is_bare = not copies and not state.task.setup
        starts = self._supervisor.starts if is_bare else {}
        start = state.start or starts.get(state.base, "")
        ignored: Mapping[str, str] = {}
        if not start or not is_bare:
            tree = self._git()
            stored = store_tree(tree, self._main, copies, None)
            ignored = stored.ignored
            if not start:
                start = stored.head
                if stored.tree != stored.old_tree:
                    start = tree.make_commit(stored.tree, [start], f"{self.name}: as set up")
            starts[state.base] = start
        # It has a name, so that no `git gc` takes away what the verdict is compared with.
        self._main.out("update-ref", f"{SNAPSHOT_REFS}/{self.name}/start", start)
        self._folder.write({"ignored": ignored, "around": look_outside(self._main),
                            "copied": copied}, "tasks", self.name, baseline_of(state))
        self._write(start=start, prepared=True, copies=tuple(copies))

    def _drop_half_made(self, state: TaskState) -> None:
        """Remove a worktree that was never ready; what a person did in it is kept first."""
        known = list_worktrees(self._main).get(state.worktree) if self._world.kind_of(
            state.worktree, follow=False) != "absent" else None
        if not known or known.get("locked") != lock_of(state):
            return
        if state.git:
            copies = tuple(find_copies(self._folder, state.task))
            take_snapshot(self._git(), self._main, replace(state, copies=copies),
                          f"{state.tried}.remade", {})
            self._write(git="")  # kept: whatever a kill leaves of it is not asked again
        drop_unused(self._main, state, known)

    def _fill(self, tree: str, log: str, variable: str) -> list[str]:
        """Copy what git lacks into a worktree, and run the person's commands there."""
        copies = find_copies(self._folder, self.state.task)
        for path in copies:
            target = Place(tree, path)
            if self._world.kind_of(target, follow=False) == "absent":
                source = self._world.path(self._folder.repository.main, path)
                self._world.copy_file(source, target)
        for command in self.state.task.setup:
            code = self._run_command(command, tree, log, SETUP_SECONDS, variable)
            if code:
                last = last_line_of(self._world, log)
                refused = self._explain_refused(log, tree)
                raise FleetError("setup-failed", "; ".join(filter(None, [
                                 f"setup failed (exit {code}): {command}: {last}", refused])),
                                 fix=f"subagent-fleet task log {self.name} setup")
        return copies

    def _prepare_check(self) -> None:
        """Make the check's worktree while the agent works, in a thread of its own."""
        task = self.state.task
        if task.check and task.check_in == "own":
            self._preparing = threading.Thread(target=self._make_check_worktree, daemon=True)
            self._preparing.start()

    def _make_check_worktree(self) -> None:
        """Make the check's worktree, and see what the check says in it before any work.

        What goes wrong is raised where the check is needed.
        """
        state = self.state
        path, git = f"{state.worktree}.check", state.check_git
        try:
            if not git or self._world.kind_of(path) != "directory":
                with self._supervisor.adding:
                    git = add_worktree(self._main, state, for_check=True)
                self._fill(path, self._file("setup-check.log"), CHECK_MARK)
            self._remember(check_git=git)
            self._remember(passes_on_base=self._ask_base())
        except Exception as error:
            self._trouble = error

    def _ask_base(self) -> bool:
        """Tell whether the check passes before any work: then it proves nothing.

        That is asked once a `run` for each check and base; other tasks wait for the answer.
        """
        task, passes = self.state.task, self._supervisor.passes
        asked = (task.check or "", self.state.base, *task.setup)
        lock = self._supervisor.asking.setdefault(asked, threading.Lock())
        while not lock.acquire(blocking=False):
            self._pause(0.25)
        try:
            if asked not in passes:
                # An earlier supervisor may have left work.
                tree = self._put_check(self.state.start)
                passes[asked] = self._run_check(tree, "check-base.log") == 0
                with self._supervisor.changed:  # one at a time
                    is_news = passes[asked] and task.changes == "required" \
                        and self._folder.is_news(f"passes: {task.check}")
                if is_news:
                    self._tell("note", "the check already passes before any work, so passing "
                               "proves nothing")
            return passes[asked]
        finally:
            lock.release()

    def _run_check(self, tree: str, log: str) -> int:
        """Run the check in a worktree, as long as a try may work; return its exit code."""
        task = self.state.task
        return self._run_command(task.check or "", tree, self._file(log), task.deadline,
                                 CHECK_MARK)

    def _run_command(self, command: str, tree: str, log: str, seconds: int,
                     variable: str) -> int:
        """Run a shell command of the person's in a worktree; return its exit code."""
        hold = self._world.hold(self._folder.of_task(self.name, "checking")) \
            if variable == CHECK_MARK else None
        environ = {**plain_environment(self._world.environ), variable: self._mark,
                   "FLEET_TASK_ID": self.name}
        try:
            words, environ = self._confine(shell_words(self._world, command), environ, tree,
                                           "command.tmp")
            child = self._supervisor.spawn(Launch(
                words, tree, environ, stdout=log, stderr=log, hold=hold,
                seconds=seconds + 60))
        finally:
            if hold:
                hold.release()
        processes = self._trees[variable]
        processes.add(child.number)
        until = self._world.clock() + seconds
        try:
            while child.exit_code() is None:
                if self._world.clock() > until:
                    return 124
                processes.find(self._world.clock() - PROCESS_LOOK_SECONDS)
                self._pause(0.25)
            return child.exit_code() or 0
        finally:
            self._end(0.0, variable)
            self._clear_box(tree, "command.tmp")

    def _put_check(self, commit: str) -> str:
        """Put the check's worktree to a commit; return where it is."""
        try:
            self._reset_check(commit)
        except FleetError:  # an earlier check has spoiled its own place
            self._remake_check()
            self._reset_check(commit)
        return f"{self.state.worktree}.check"

    def _reset_check(self, commit: str) -> None:
        """Make the check's worktree the same as a commit."""
        state = self.state
        git = git_in(self._folder, f"{state.worktree}.check", state.check_git, self._hold)
        # Nothing of an index that a check had counts, nor what it has locked.
        for name in ("index", "index.lock", "HEAD.lock", "info/sparse-checkout"):
            self._world.remove(self._world.path(git.git, name))
        git.run("read-tree", "HEAD")  # what is there; without it no file would be removed
        git.out("-c", "core.sparseCheckout=false", "checkout", "--quiet", "--force",
                "--detach", commit)
        # What an earlier check has left goes, repositories too; ignored caches may stay.
        keep = [word for path in state.copies for word in ("-e", f"/{path}")]
        git.out("clean", "-q", "-ffd", *keep)

    def _remake_check(self) -> None:
        """Make the check's worktree anew."""
        state = self.state
        path = f"{state.worktree}.check"
        with self._supervisor.adding:
            known = list_worktrees(self._main).get(path, {})
            if known.get("locked") == lock_of(state):
                drop_worktree(self._main, path)
            git = add_worktree(self._main, state, for_check=True)
        self._fill(path, self._file("setup-check.log"), CHECK_MARK)
        self._remember(check_git=git)
