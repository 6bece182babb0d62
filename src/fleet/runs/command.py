"""Setup and check commands: each is run in its box, with a deadline."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.runs.agent import plain_environment, read_tail, shell_words
from fleet.runs.folder import TAIL_BYTES
from fleet.runs.process_tree import end_trees
from fleet.start.record import Record
from fleet.world.child import Launch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fleet.runs.confine import BoxPlan, Confinement
    from fleet.runs.process_tree import ProcessTree
    from fleet.world.child import Child


class ShellCommand(Record):
    """A shell command that a person has written for a task."""

    text: str
    box: BoxPlan
    log: str  # its output is added to this file
    seconds: int  # its deadline
    environ: Mapping[str, str]  # its own variables, such as PORT


class CommandResult(Record):
    """The result of a command."""

    command: str
    code: int  # 124: the deadline has passed
    output: str = ""  # the end of its log
    refused: str = ""  # what it could not write because it is confined, and how to allow it


class CommandRunner:
    """Runs the commands of a task, or of a landing: for setup, and for checks.

    Every process of a command carries the mark of its tree and holds the lock of that tree, so
    even what a killed supervisor has left behind is found. All of them end with the command.
    """

    def __init__(self, confinement: Confinement, spawn: Callable[[Launch], Child],
                 pause: Callable[[float], None]) -> None:
        self._confinement = confinement
        self._spawn = spawn
        self._pause = pause  # raises an exception if the command is no longer wanted

    def run(self, command: ShellCommand, processes: ProcessTree) -> CommandResult:
        """Run a command to its end, or to its deadline."""
        world, box, log = self._confinement.world, command.box, command.log
        environ = {**plain_environment(world.environ), **command.environ, **processes.mark}
        hold = world.hold(processes.lock)
        try:
            words, environ = self._confinement.confine(
                box, shell_words(world, command.text), environ)
            child = self._spawn(Launch(words, box.tree, environ, stdout=log, stderr=log,
                                       hold=hold, seconds=command.seconds + 60))
        finally:
            if hold:
                hold.release()
        try:
            code = processes.follow(child, command.seconds, self._pause)
        finally:
            end_trees(world, [processes], 0.0)
            self._confinement.clear(box)
        if not code:
            return CommandResult(command.text, 0)
        output = read_tail(world, log, TAIL_BYTES)
        return CommandResult(command.text, code, output,
                             self._confinement.explain_refused(box, output))
