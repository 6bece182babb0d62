"""The processes that an agent or a command has started, however it left them."""
from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

from fleet.runs.agent import KILL_SECONDS
from fleet.runs.folder import STATE_LIMIT_BYTES
from fleet.start.record import Record
from fleet.tasks.box import BWRAP
from fleet.text.json import parse_object
from fleet.text.phrases import some_of
from fleet.text.terminal import clean_line
from fleet.world.process_list import CHECK_MARK, TASK_MARK, ProcessList

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from fleet.runs.folder import Folder
    from fleet.world.child import Child
    from fleet.world.process_list import Process
    from fleet.world.world import World


PROCESS_LOOK_SECONDS = 1.0  # between two looks at what an agent starts


class Ended(Record):
    """The result of ending processes."""

    count: int
    left: str = ""  # the processes that still run, for people


class ProcessTree:
    """All processes of a task's agent, or of its commands, including those left in the background.

    A process belongs to the tree if it has the mark in its environment, a known session, a known
    parent, or the lock that all of them inherit. A process that was seen once stays known by its
    number and start time. Example: an agent starts a shell (known by its parent), which starts
    `env -i setsid server` and ends. The server has no mark, no parent and its own session, but
    it was seen while the shell was there. A file keeps what is known for the next supervisor.
    """

    def __init__(self, folder: Folder, name: str, variable: str, *, keeps: bool = True) -> None:
        run, world = folder.run, folder.world
        kind = {TASK_MARK: "alive", CHECK_MARK: "checking"}[variable]
        # The run's id is in the file's name: a copy of the repository has another's file, too.
        path = folder.of_task(name, f"processes-{kind}-{run}.json")
        self.mark = {variable: f"{run}/{name}"}  # in the environment of each process
        self.lock = folder.of_task(name, kind)
        self._mark = f"{variable}={run}/{name}"
        self._world = world
        self._path = path if keeps else ""
        self._lock = threading.Lock()
        page = parse_object(world.read_part(path, 0, STATE_LIMIT_BYTES)) or {}
        self._known = {int(number): str(start) for number, start in page.items()
                       if number.isdigit()}
        self._sessions: dict[int, float] = {}  # and since when
        self._found = ProcessList(-1.0, {})

    def add(self, number: int) -> None:
        """Note a program that was just started in its own session."""
        with self._lock:
            self._sessions[number] = self._world.clock()

    def find(self, since: float) -> dict[int, Process]:
        """Return the processes of this tree, as seen at a time of the clock or later."""
        seen = self._world.list_processes(since)
        own = self._world.process_id
        with self._lock:
            if seen.at <= self._found.at:
                return dict(self._found.processes)
            tree = {number for number, process in seen.processes.items()
                    if self._mark in process.marks
                    or self._known.get(number) == process.start}
            tree.discard(own)
            count = -1
            while count < len(tree):
                count = len(tree)
                self._sessions.update(dict.fromkeys(
                    (number for number in tree - self._sessions.keys()
                     if seen.processes[number].session == number), seen.at))
                tree.update(number for number, process in seen.processes.items()
                            if (process.parent in tree or process.session in self._sessions)
                            and number != own)
            # The number of a session that has ended may soon belong to another.
            for number in [number for number, at in self._sessions.items() if at < seen.at]:
                if all(seen.processes[one].session != number for one in tree):
                    del self._sessions[number]
            known = {number: seen.processes[number].start for number in tree}
            if self._path and known.keys() - self._known.keys():
                self._world.replace_files(
                    [(self._path, json.dumps(known).encode("ascii"), 0o600)])
            self._known = known
            self._found = ProcessList(
                seen.at, {number: seen.processes[number] for number in tree})
            return dict(self._found.processes)

    def follow(self, child: Child, seconds: float, pause: Callable[[float], None]) -> int:
        """Wait for a program that was just started; return its exit code, 124 if it is too slow.

        `pause` waits a while, and raises an exception if the program is no longer wanted.
        """
        self.add(child.number)
        until = self._world.clock() + seconds
        step = 0.01
        while child.exit_code() is None:
            if self._world.clock() > until:
                return 124
            self.find(self._world.clock() - PROCESS_LOOK_SECONDS)
            pause(step)
            step = min(step * 1.5, 0.25)
        return child.exit_code() or 0

    def holds_lock(self) -> bool:
        """Tell whether any process holds the lock of this tree."""
        return self._world.is_held(self.lock)

    def find_last(self) -> dict[int, Process]:
        """Return what runs now, including processes that are known only by the lock."""
        world = self._world
        tree = self.find(world.clock())
        if tree or not self.holds_lock():
            return tree
        # A program that only asks whether the lock is held opens its file for a moment.
        openers = world.find_openers(self.lock)
        world.sleep(0.02)
        openers &= world.find_openers(self.lock)
        processes = world.list_processes(world.clock()).processes
        return {number: processes[number] for number in openers & processes.keys()
                if world.process_id not in (number, processes[number].parent)}


def end_trees(world: World, trees: Sequence[ProcessTree], patience: float,
              spared: Collection[int] = ()) -> Ended:
    """End the processes of these trees: TERM, some patience, then KILL until none is left."""
    ended: set[int] = set()
    until = world.clock() + patience
    while True:
        left: dict[int, Process] = {}
        for tree in trees:
            left.update(tree.find(world.clock()) if spared else tree.find_last())
        left = {number: process for number, process in left.items() if number not in spared}
        is_held = not spared and any(tree.holds_lock() for tree in trees)
        now = world.clock()
        if not left and not is_held:
            return Ended(len(ended))
        if now > until + KILL_SECONDS:
            names = [f"{clean_line(process.name)} (pid {number})"
                     for number, process in sorted(left.items())]
            return Ended(len(ended.difference(left)),
                         some_of(names, 3) or "a process that this system does not show")
        is_late = now >= until
        # Not bubblewrap: the command in it would die with it at once, without a TERM of its own.
        asked = {number for number, process in left.items() if process.name != BWRAP}
        world.end_processes(left if is_late else asked - ended, at_once=is_late)
        ended.update(asked)
        world.sleep(0.02)


def find_helpers(processes: Mapping[int, Process], client: int) -> set[int]:
    """Return a client and its helpers: its children in its session.

    The first child of bubblewrap is the client. Later ones are orphans that bubblewrap got.
    """
    inside = {number for number, process in processes.items() if process.name == BWRAP}
    first: dict[int, int] = {}
    for number in sorted(processes, key=lambda one: (processes[one].start.zfill(20), one)):
        first.setdefault(processes[number].parent, number)
    helpers = {client}
    for _ in processes:
        helpers.update(
            number for number, process in processes.items()
            if process.parent in helpers and process.session == client
            and (process.parent not in inside or first[process.parent] == number))
    return helpers
