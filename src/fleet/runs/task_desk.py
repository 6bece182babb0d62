"""A task at work: its state, its files, its git and its processes."""
from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from fleet.runs.agent import STOP_GIT_SECONDS
from fleet.runs.command import CommandRunner
from fleet.runs.folder import Wanted
from fleet.runs.git import git_of
from fleet.runs.place import git_in
from fleet.runs.process_tree import ProcessTree, end_trees, find_helpers
from fleet.world.process_list import CHECK_MARK, TASK_ID, TASK_MARK

if TYPE_CHECKING:
    from typing import Any

    from fleet.runs.git import Git
    from fleet.runs.process_tree import Ended
    from fleet.runs.supervisor import Supervisor
    from fleet.tasks.events import Event
    from fleet.tasks.state import TaskState
    from fleet.tasks.step import Step
    from fleet.world.child import Hold


class TaskDesk:
    """What every part of a task at work needs: its state, its files, git, its processes."""

    def __init__(self, supervisor: Supervisor, name: str) -> None:
        self._supervisor = supervisor
        self._folder = supervisor.folder
        self._world = supervisor.folder.world
        self._backing = supervisor.backing
        self._confinement = supervisor.confinement
        self._runner = CommandRunner(supervisor.confinement, supervisor.spawn, self._pause)
        self._main = git_of(self._folder)
        self._hold: Hold | None = None  # the lock that each git of this task holds
        self._trees = {variable: ProcessTree(self._folder, name, variable)
                       for variable in (TASK_MARK, CHECK_MARK)}
        self._preparing: threading.Thread | None = None  # makes the check's place
        self._is_closing = False
        self._stopping_since = 0.0  # when a git was first seen running while closing
        self.name = name

    @property
    def state(self) -> TaskState:
        """The state of the task now."""
        return self._supervisor.tasks[self.name]

    def _take(self, event: Event) -> Step:
        """Apply an event; return the new state and what to do next."""
        return self._supervisor.take(self.name, event)

    def _write(self, **changes: Any) -> TaskState:
        """Change the state, first in its file."""
        return self._supervisor.write(self.name, **changes)

    def _remember(self, **changes: Any) -> TaskState:
        """Change the state in memory only, for facts that could be found out again."""
        return self._supervisor.remember(self.name, **changes)

    def _tell(self, word: str, text: str = "") -> None:
        """Log and print an event of this task."""
        self._supervisor.tell(self.name, word, text)

    def _file(self, name: str) -> str:
        """Return a file of the current try."""
        return self._folder.of_try(self.state, name)

    def _wait_for_git(self) -> None:
        """Wait until no git of an earlier supervisor runs for this task; it is not killed."""
        self._world.make_directory(self._folder.of_task(self.name))
        while not self._hold:
            self._hold = self._world.hold(self._folder.of_task(self.name, "git"))
            if not self._hold:
                self._pause(0.05)
        self._hold.is_over = self._ends_git
        self._main = git_of(self._folder, self._hold)

    def _ends_git(self) -> bool:
        """Tell whether a git of this task must end, because one of the person's filters may hang.

        When a task is stopped, git has some seconds to keep the work.
        """
        if threading.current_thread() is self._preparing:
            return self._is_closing or self.state.wish.stopping
        if not self._is_closing:
            return self.state.wish.stopping
        if not self.state.wish.stopping:
            return False
        self._stopping_since = self._stopping_since or self._world.clock()
        return self._world.clock() - self._stopping_since > STOP_GIT_SECONDS

    def _pause(self, seconds: float) -> None:
        """Wait a while, or until something happens; raise Wanted if a person stops the task."""
        if self.state.wish.stopping or self._is_closing:
            raise Wanted
        self._supervisor.wait(seconds)

    def _git(self) -> Git:
        """Return git in the agent's worktree, after making sure that it is still ours."""
        return git_in(self._folder, self.state, self._hold)

    # -- its processes --

    def _plan_environment(self) -> dict[str, str]:
        """Return the variables that all processes of this task have."""
        port = self.state.place.port
        return {TASK_ID: self.name, **({"PORT": str(port)} if port else {})}

    def _end(self, patience: float, variable: str = "", *,
             spares_client: bool = False) -> Ended:
        """End the processes of the task's agent, of its commands, or of both.

        An idle client may be spared, with its helpers: its children in its session.
        """
        trees = [tree for name, tree in self._trees.items() if variable in ("", name)]
        spared: set[int] = set()
        if spares_client:
            processes = self._trees[TASK_MARK].find(self._world.clock())
            spared = find_helpers(processes, self.state.attempt.client)
        return end_trees(self._world, trees, patience, spared)
