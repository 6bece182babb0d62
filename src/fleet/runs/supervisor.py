"""The supervisor of a repository's tasks: their states, threads and orders."""
from __future__ import annotations

import contextlib
import json
import re
import threading
from typing import TYPE_CHECKING

from fleet.config.rules import UNIT_SECONDS
from fleet.runs.agent import (
    AGENT_MEGABYTES,
    SETTLE_SECONDS,
    TOLD_CHARACTERS,
    describe_error,
    shell_words,
    slug_of,
)
from fleet.runs.confine import Confinement
from fleet.runs.folder import Asleep, find_commit
from fleet.runs.git import git_of
from fleet.runs.place import git_in
from fleet.runs.snapshot import settle_branch
from fleet.runs.task import TaskWork
from fleet.start.errors import FleetError
from fleet.start.record import replace
from fleet.tasks.events import (
    AcceptOrder,
    Begun,
    BranchMerged,
    Refused,
    Removed,
    ReturnOrder,
    Revised,
    read_order,
)
from fleet.tasks.ladder import place_task, plan_rungs
from fleet.tasks.landing import climbs_to_land
from fleet.tasks.next import Limits, blockers_of, explain_wait, plan_starts
from fleet.tasks.spec import plan_alias, plan_slots
from fleet.tasks.state import (
    TERMINAL_STATES,
    TaskState,
    can_accept,
    change,
    freeze,
    thaw_task,
)
from fleet.tasks.step import add_task, step
from fleet.world.child import Launch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from fleet.config.sections import Model
    from fleet.config.task_file import TaskSpec
    from fleet.runs.agent import Backing
    from fleet.runs.folder import Folder
    from fleet.tasks.events import Event
    from fleet.tasks.step import Step
    from fleet.world.child import Child, Hold
    from fleet.world.world import World


# The process that holds the lock of a repository's run folder is its supervisor. Only it writes
# the states of tasks. It runs an agent in a worktree for each task. How it works:
#
# - Each task is a file, `tasks/NAME/state.json`, which is replaced *before* each step. So after
#   this process ends, even by kill -9, the next one enters the same function, `TaskWork.run`, at
#   the step in the file. Agents depend on files and a named pipe, never on this process.
# - One function decides what comes next, `tasks/step`: `take` gives it an event, writes the
#   state that it returns, and tells people.
# - Each running task has its own thread, which may wait: for git, for setup, for an agent.
# - Other commands write their orders as files into `inbox/`. The main thread takes each as an
#   event, and the task's thread finds in the state what to do.
# - An agent works in one worktree, and its check runs in another, which is put to a snapshot of
#   the first. So what is checked is what is kept, whatever else lies around.


def find_limits(world: World, backing: Backing, tasks: Mapping[str, TaskState],
                page: Mapping[str, Any]) -> Limits:
    """Return how many tasks may run at once; the gateway's status tells which aliases rest."""
    slots = plan_slots(backing.fleet)
    most = backing.most
    if not most:
        memory = world.free_megabytes() // AGENT_MEGABYTES
        most = max(1, min(sum(slots.values()) or 8, memory or 64))
    rests: dict[str, list[float]] = {}
    for model in page.get("models", ()):
        rests.setdefault(str(model.get("alias")), []).append(model.get("rests_seconds") or 0)
    return Limits(slots, most, {
        alias: f"no machine answers, next try in {min(seconds):.0f} s"
        for alias, seconds in rests.items() if all(seconds)},
        {name: plan_rungs(state, backing.fleet) for name, state in tasks.items()})


def base_of(task: TaskSpec, folder: Folder, where: str = "") -> str:
    """Return the commit that a task starts from; `where` is where the file names it."""
    base = "HEAD" if task.base in (None, "after") else task.base
    return find_commit(folder.world, folder.repository, base or "HEAD", where)


def find_merged(folder: Folder, tasks: Mapping[str, TaskState]) -> list[str]:
    """Return the tasks in review whose branches a person has merged into the current branch."""
    git = git_of(folder)
    reviews = [state for state in list(tasks.values())
               if state.state == "review" and state.place.kept not in ("", state.place.base)]
    # A person who has checked out a commit, or the task's own branch, is only looking at it.
    home = git.run("symbolic-ref", "--quiet", "HEAD").text if reviews else ""
    return [state.name for state in reviews
            if home not in ("", f"refs/heads/{state.place.branch}") and git.commit_of(home)
            and git.commit_of(state.place.kept) and git.is_ancestor(state.place.kept, home)]


class Supervisor:
    """Works on the tasks of one repository as long as it holds the lock."""

    def __init__(self, folder: Folder, lock: Hold, backing: Backing,
                 only: set[str] | None = None, *, takes_new: bool = True,
                 changed: threading.Condition | None = None) -> None:
        self.folder = folder
        self.backing = backing
        self.run = folder.make()
        self.tasks, _ = folder.read_states()
        self.failures: list[Exception] = []  # of threads: a bug, or a disk that is full
        self.passes: dict[tuple[str, ...], bool] = {}  # whether a check passes before any work
        self.asking: dict[tuple[str, ...], threading.Lock] = {}  # held while a thread finds out
        self.starts: dict[str, str] = {}  # by base: the commit of a fresh worktree
        self.confinement = backing.confinement or Confinement(folder)
        self.changed = changed or threading.Condition()
        self._world, self._lock = folder.world, lock
        self._only = only  # the tasks to run, and those handed over since; None: all
        self._takes_new = takes_new
        self._threads: dict[str, threading.Thread] = {}
        self._leaves = False
        self._looked: dict[str, float] = {}
        self._page: Mapping[str, Any] = {}
        self._is_served = True  # as far as we know
        self._told: set[str] = set()  # tasks whose reason to wait was told
        self._spawning = threading.Lock()
        self._world.replace_files([(folder.place("lock.pid"), str(
            self._world.process_id).encode(), 0o600)])
        for name, state in self.tasks.items():
            if state.is_active or state.wish.stopping:  # even if not in `only`: nobody else can
                self._begin(name)

    @property
    def meant(self) -> set[str]:
        """The tasks that are meant, and those handed over since; none: all."""
        return self._only or set()

    def leave(self) -> None:
        """Release the lock; agents continue, and so does a git that takes long."""
        with self.changed:
            self._leaves = True
            self.changed.notify_all()
        until = self._world.clock() + SETTLE_SECONDS
        for thread in list(self._threads.values()):
            thread.join(max(0.0, until - self._world.clock()))
        self._lock.release()

    # -- what is known, and who may change it --

    def take(self, name: str, event: Event) -> Step:
        """Apply an event: write the new state, then tell people; return what to do next."""
        with self.changed:
            before = self.tasks[name]
            made = step(before, event, self._world.now())
            try:
                if made.state != before:
                    self._keep(made.state)
            except FleetError:
                if not isinstance(event, Refused):
                    raise
                self.tasks[name] = made.state  # perhaps because its file can't be written
        for word, text in made.tells:
            self.tell(name, word, text)
        return made

    def write(self, name: str, **changes: Any) -> TaskState:
        """Change the state of a task, first in its file."""
        with self.changed:
            return self._keep(change(self.tasks[name], **changes))

    def remember(self, name: str, **changes: Any) -> TaskState:
        """Change the state of a task in memory; its next step writes it down."""
        with self.changed:
            state = self.tasks[name] = change(self.tasks[name], **changes)
            return state

    def _keep(self, state: TaskState) -> TaskState:
        """Write a state to its file, then make it the current one."""
        if self._leaves:  # the next supervisor may already have the lock
            raise Asleep
        self.folder.write_state(state)
        self.tasks[state.name] = state
        self.changed.notify_all()
        return state

    def wait(self, seconds: float) -> None:
        """Wait a while, or until something changes; threads end here when the supervisor leaves."""
        with self.changed:
            self.changed.wait(seconds)
        if self._leaves:
            raise Asleep

    def spawn(self, launch: Launch) -> Child:
        """Start a program; waiting threads are woken when it ends."""
        def wake() -> None:
            child.wait()
            with self.changed:
                self.changed.notify_all()
        with self._spawning:
            child = self._world.spawn(launch)
        threading.Thread(target=wake, daemon=True).start()
        return child

    def leave_task(self, name: str) -> None:
        """Note that a task's thread has ended; a person's order may need another one."""
        with self.changed:
            self._threads.pop(name, None)
            self.changed.notify_all()
            if self.tasks[name].is_over and self.tasks[name].wish.stopping:
                self._begin(name)

    # -- one look at everything --

    def advance(self) -> bool:
        """Do what can be done now, and start threads for the rest; tell if anything was done."""
        if self.failures:
            raise self.failures[0]
        did = self._take_orders()
        self._reload()
        self._keep_serving()
        if self._takes_new and self._is_due("merged", 5.0):
            for name in find_merged(self.folder, self.tasks):
                self.take(name, BranchMerged())
        return self._start_ready() or did

    def _keep_serving(self) -> None:
        """Start a gateway if the one that agents use is gone, such as one that `up` started."""
        needs = any(state.is_active and isinstance(state.task.coder, str)
                    for state in list(self.tasks.values()))
        if not (self.backing.fleet and needs and self._is_due("served", 0.5)):
            return
        page = self.backing.look()
        if page:
            self._page = page
            self._is_served = True
            return
        try:
            self.backing.serve()
            self._is_served = True
        except FleetError as error:
            if self._is_served:
                self.tell("", "not served", describe_error(error))
            self._is_served = False

    @property
    def is_busy(self) -> bool:
        """Whether any task has a thread."""
        with self.changed:  # a thread that ends may be writing that its task waits again
            return bool(self._threads)

    @property
    def waits_for_time(self) -> bool:
        """Whether a task waits for a time, for a machine that rests, or for a person."""
        return self._takes_new and any(map(self._is_expected, list(self.tasks.values())))

    def _is_expected(self, state: TaskState) -> bool:
        """Tell whether a task will start without another order."""
        if state.state in ("stopped", "waiting") and self._is_attached(state):
            return True  # even if it was just handed back: its terminal is still closing
        return state.state == "waiting" and self._may_begin(state.name) \
            and not blockers_of(state, self.tasks)

    def _is_attached(self, state: TaskState) -> bool:
        """Tell whether a person has the session of a task open, and will hand it back."""
        return state.attempt.spoken and self.folder.is_attached(state.name)

    def _may_begin(self, name: str) -> bool:
        """Tell whether a task is one of those to run, and neither a thread nor a person has it."""
        return ((self._only is None or name in self._only) and name not in self._threads
                and not self._is_attached(self.tasks[name]))

    def _begin(self, name: str) -> None:
        """Start the thread of a task that has none."""
        if name in self._threads or self._leaves:
            return
        work = TaskWork(self, name)
        thread = threading.Thread(target=work.run, name=name, daemon=True)
        self._threads[name] = thread
        thread.start()

    def _start_ready(self) -> bool:
        """Start the tasks that can start, and say once what each of the others waits for."""
        states = {name: state for name, state in self.tasks.items()
                  if state.state != "waiting" or self._may_begin(name)}
        waiting = [state for state in states.values() if state.state == "waiting"]
        if not self._takes_new or not waiting:
            return False
        limits = find_limits(self._world, self.backing, self.tasks, self._look_at_gateway())
        now = self._world.now()
        starts = plan_starts(states, limits, now)
        for name, rung in starts.items():
            self._told.discard(name)
            self.take(name, Begun(rung))
            self._begin(name)
        for state in waiting[:20]:
            name = state.name
            if name not in {*starts, *self._told} and state.until <= now:
                self._told.add(name)
                self.tell(name, "waits", explain_wait(state, self.tasks, limits.after(starts), now))
        return bool(starts)

    # -- what other commands ask for --

    def _take_orders(self) -> bool:
        """Apply the orders that have come in; tell whether there were any."""
        did = False
        for identity, order in self.folder.read_orders():
            did = True
            name, do = str(order.get("task")), order.get("do")
            most = order.get("most")
            if do == "limit" and isinstance(most, int) and most > 0:
                self.backing = replace(self.backing, most=most)
            elif self._only is not None and (do != "add" or order.get("handed")):
                self._only.add(name)
            try:
                if do == "add":
                    self.accept(order.get("spec"), str(order.get("base", "")),
                                str(order.get("origin", "typed")))
                elif name in self.tasks:
                    self._obey(name, identity, order)
            except Asleep:
                raise
            except Exception as error:  # it must not block the other orders
                if slug_of(error) in ("disk-full", "unwritable"):
                    raise  # the order is carried out when it can be written down
                self.tell(name, "not read", describe_error(error))
            self._world.remove(self.folder.place("inbox", identity))
        return did

    def _obey(self, name: str, identity: str, order: Mapping[str, Any]) -> None:
        """Carry out an order for one task."""
        event = read_order(order, identity)
        if event is None:
            return
        state = self.tasks[name]
        if isinstance(event, AcceptOrder) and can_accept(state):
            event = replace(event, **self._put_branch(state))
        if isinstance(event, ReturnOrder):
            event = replace(event, climbs=climbs_to_land(state, self.backing.fleet))
        if self.take(name, event).do:
            self._begin(name)

    def _put_branch(self, state: TaskState) -> dict[str, str]:
        """Move the branch of a task to its work; return why that is not possible, if so."""
        git = None
        with contextlib.suppress(FleetError):
            git = git_in(self.folder, state)
        try:
            is_there = settle_branch(git, git_of(self.folder), state.place, state.place.kept)
        except FleetError as error:
            return {"reason": describe_error(error), "cause": error.slug}
        if is_there:
            return {}
        return {"reason": f"the branch {state.place.branch} has moved meanwhile",
                "cause": "branch-moved"}

    def accept(self, spec: object, base: str, origin: str = "typed") -> None:
        """Accept a task, or a newer form of one."""
        task = thaw_task(spec)
        if task is None or not re.fullmatch("[0-9a-f]{40,64}", base):
            return
        with self.changed:
            try:
                made = add_task(self.tasks, Revised(task, origin, base), self._world.now())
            except FleetError as error:
                self.tell(task.name, "not read", error.what)
                return
            if made.state != self.tasks.get(task.name):
                self._keep(made.state)
        for word, text in made.tells:
            self.tell(task.name, word, text)

    def _reload(self) -> None:
        """Apply the changes of the task file; an invalid file is reported once."""
        try:
            plan = self.backing.reload()
        except FleetError as error:
            self.tell("", "not read", error.what)
            return
        if plan is None:
            return
        self.backing = replace(self.backing, most=plan.file.max or self.backing.most,
                               cloud_limit=plan.file.cloud_limit)
        for name, task in plan.tasks.items():
            if self._only is not None and name not in self.tasks:
                continue  # it is not one of those to run
            try:
                self.accept(freeze(task), base_of(task, self.folder), "file")
            except FleetError as error:
                self.tell(name, "not read", error.what)
        for name, state in list(self.tasks.items()):
            if state.origin == "file" and name not in plan.tasks:
                self.take(name, Removed())

    def tell(self, name: str, word: str, text: str = "") -> None:
        """Log and print an event of a task, and run the person's own `notify` command."""
        text = text[:TOLD_CHARACTERS]
        self.folder.tell(name, word, text)
        self.backing.tell(name, word, text)
        if self.backing.notify and word in ("asks", *TERMINAL_STATES):
            self._notify(name, word, text)

    def _notify(self, name: str, word: str, text: str) -> None:
        """Start the person's `notify` command, with a line of JSON on its standard input."""
        notify, place = self.backing.notify or "", self.folder.place
        argv = shell_words(self._world, notify) if isinstance(notify, str) else list(notify)
        main = self.folder.repository.main
        event = {"schema": "subagent-fleet/notice/1", "task": name, "event": word,
                 "text": text, "repository": main, "branch": self.tasks[name].place.branch}
        path, log = place("tasks", name, f"notice-{word}.json"), place("notify.log")
        try:
            self._world.replace_files(
                [(path, json.dumps(event).encode("ascii") + b"\n", 0o600)])
            self.spawn(Launch(argv, main, self._world.git_environment(), stdin=path,
                              stdout=log, stderr=log, seconds=60))
        except FleetError as error:
            self.backing.tell(name, "notify", error.what)

    def _is_due(self, what: str, seconds: float) -> bool:
        """Tell whether it is time to look at something again."""
        now = self._world.clock()
        if now - self._looked.get(what, -1e9) < seconds:
            return False
        self._looked[what] = now
        return True

    def alias_of(self, name: str) -> str:
        """Return the alias that a task's requests ask for."""
        return plan_alias(*place_task(self.tasks[name], self.backing.fleet))

    def count_away_left(self) -> int:
        """Return how many tasks may still move up to a model outside the house today."""
        since = self._world.now() - UNIT_SECONDS["d"]
        used = sum(state.attempt.left_at > since for state in list(self.tasks.values()))
        return self.backing.cloud_limit - used

    def _look_at_gateway(self) -> Mapping[str, Any]:
        """Return the gateway's status, at most a few seconds old."""
        if self.backing.fleet and self._is_due("gateway", 5.0):
            self._page = self.backing.look()
        return self._page

    def models_of(self, name: str) -> list[Model]:
        """Return the models that may serve a task."""
        fleet, alias = self.backing.fleet, self.alias_of(name)
        return [model for model in fleet.models.values() if alias and model.alias == alias] \
            if fleet else []

    def view_of(self, session: str) -> str:
        """Return the gateway's view of a session: waiting, working, idle or unknown."""
        sessions = self._look_at_gateway().get("sessions")
        return str(sessions.get(session, "idle")) if isinstance(sessions, dict) else "unknown"
