"""A task on its way: the box that its commands run in."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.runs.agent import read_tail
from fleet.runs.confine import BoxPlan, clear_box, confine_command, plan_grants
from fleet.runs.folder import OUTPUT_PART_BYTES, TAIL_BYTES
from fleet.runs.ports import claim_ports
from fleet.runs.task_desk import TaskDesk
from fleet.tasks.box import Box, find_refused, suggest_writable
from fleet.text.phrases import some_of
from fleet.text.terminal import clean_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from fleet.runs.confine import Confiner


class TaskBox(TaskDesk):
    """What confines a task's commands, and what is theirs alone: files, ports."""

    def _find_confiner(self) -> Confiner | None:
        """Return what confines the commands of this task; refuse where it must be something."""
        return self._supervisor.confinement.find_for(self.state.task)

    def _plan_own(self) -> dict[str, Any]:
        """Return what a try has of its own, as a change of its state."""
        confiner = self._find_confiner()
        return {"confined": confiner.name if confiner else "no",
                "port": claim_ports(self._world, self._folder.of_task(self.name, "state.json"))}

    def _plan_box(self, tree: str, use: str) -> BoxPlan:
        """Return what the box of a command is made of; each use has its temporary directory."""
        # Where git-lfs keeps what a file stands for, of every place.
        own = (self._world.path(self._folder.repository.common, "lfs"),)
        return BoxPlan(self.state.task, tree, f"{tree}.{use}", own)

    def _confine(self, argv: Sequence[str], environ: Mapping[str, str], tree: str,
                 use: str) -> tuple[list[str], dict[str, str]]:
        """Return how a command is run in its box, if it has one, and its environment."""
        port = self.state.place.port
        if port:
            environ = {**environ, "PORT": str(port)}
        confiner = self._find_confiner()
        if not confiner:
            return list(argv), dict(environ)
        return confine_command(self._folder, confiner, self._plan_box(tree, use), argv, environ)

    def _clear_box(self, tree: str, use: str) -> None:
        """Remove the temporary directory of a command."""
        clear_box(self._world, self._supervisor.confinement.known, self._plan_box(tree, use))

    def _find_refused(self, text: str, tree: str) -> list[str]:
        """Return the paths that a command could not write because it is confined, as it says."""
        confiner = self._supervisor.confinement.known
        if not confiner or self.state.task.sandbox == "off":
            return []
        world = self._world
        grants = plan_grants(self._folder, confiner, self._plan_box(tree, ""), world.environ)
        return find_refused(confiner.name, text, Box(tree, grants), world.home,
                            world.real_path)

    def _find_refused_agent(self) -> list[str]:
        """Return what the agent of this try could not write, by its output."""
        files = (("out.jsonl", self.state.attempt.start_at), ("err", 0))
        parts = [self._world.read_part(self._file(name), start, OUTPUT_PART_BYTES)
                 for name, start in files]
        return self._find_refused(b"\n".join(parts).decode("utf-8", "replace"),
                                  self.state.place.worktree)

    def _explain_refused(self, log: str, tree: str) -> str:
        """Return what a command of the person's may not write, and how to let it; or nothing."""
        paths = self._find_refused(read_tail(self._world, log, TAIL_BYTES), tree)
        if not paths:
            return ""
        line = suggest_writable(paths[0], self._world.home)
        return f"it may not write {clean_line(some_of(paths, 3))}; to allow it: `{line}`"
