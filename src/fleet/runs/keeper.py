"""The tasks of a repository: their states, and who is told."""
from __future__ import annotations

import contextlib
import json
import threading
from typing import TYPE_CHECKING

from fleet.config.rules import UNIT_SECONDS
from fleet.runs.agent import TOLD_CHARACTERS, shell_words
from fleet.runs.confine import Confinement
from fleet.runs.folder import Asleep
from fleet.speech.claude_stream import tell_answers
from fleet.start.errors import FleetError
from fleet.start.record import replace
from fleet.tasks.ladder import place_task
from fleet.tasks.spec import plan_alias
from fleet.tasks.state import TERMINAL_STATES
from fleet.world.child import Launch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from fleet.config.sections import Model
    from fleet.runs.agent import Backing
    from fleet.runs.folder import Folder
    from fleet.tasks.state import TaskState
    from fleet.world.child import Child, Hold


class TaskKeeper:
    """The tasks of a repository: their states, who may change them, who is told."""

    def __init__(self, folder: Folder, lock: Hold, backing: Backing,
                 only: set[str] | None = None, *, takes_new: bool = True,
                 changed: threading.Condition | None = None) -> None:
        self.folder = folder
        self.backing = backing
        self.run = folder.make()
        self.tasks, _ = folder.read_states()
        self.failures: list[Exception] = []  # of threads: a bug, or a disk that is full
        self.passes: dict[tuple[str, ...], bool] = {}  # a check, before any work
        self.asking: dict[tuple[str, ...], threading.Lock] = {}  # who just asks that
        self.starts: dict[str, str] = {}  # by base: what a worktree begins with
        self.confinement = backing.confinement or Confinement(folder)
        self.changed = changed or threading.Condition()
        self._world, self._lock = folder.world, lock
        self._only = only  # the tasks that are meant, and those handed over since; None: all
        self._takes_new = takes_new
        self._threads: dict[str, threading.Thread] = {}
        self._leaves = False
        self._looked: dict[str, float] = {}
        self._page: Mapping[str, Any] = {}
        self._is_served = True  # as far as anybody knows
        self._told: set[str] = set()  # tasks of which was said what they wait for
        self._spawning = threading.Lock()
        self._world.replace_files([(folder.place("lock.pid"), str(
            self._world.process_id).encode(), 0o600)])

    # -- what is known, and who may change it --

    def write(self, name: str, to: str = "", **changes: Any) -> TaskState:
        """Write down a change of a task, then let it be so."""
        with self.changed:
            if to:
                usual = {"reason": "", "cause": "", "until": 0.0, "asleep": False,
                         "question": {}, "answer": {}}
                changes = {**usual, **changes, "state": to, "at": self._world.now()}
            return self._keep(replace(self.tasks[name], **changes))

    def remember(self, name: str, **changes: Any) -> TaskState:
        """Change what is known of a task; its next step writes it down."""
        with self.changed:
            state = self.tasks[name] = replace(self.tasks[name], **changes)
            return state

    def _keep(self, state: TaskState) -> TaskState:
        if self._leaves:  # who comes next may already have the lock
            raise Asleep
        self.folder.write_state(state)
        self.tasks[state.name] = state
        self.changed.notify_all()
        return state

    def wait(self, seconds: float) -> None:
        """Wait a while, or until something has changed; a thread ends here when we leave."""
        with self.changed:
            self.changed.wait(seconds)
        if self._leaves:
            raise Asleep

    def spawn(self, launch: Launch) -> Child:
        """Start a program; who waits is woken when it ends."""
        def wake() -> None:
            child.wait()
            with self.changed:
                self.changed.notify_all()
        with self._spawning:
            child = self._world.spawn(launch)
        threading.Thread(target=wake, daemon=True).start()
        return child

    def leave_task(self, name: str) -> None:
        """Note that a task's thread has ended; do what a person has asked of it meanwhile."""
        with self.changed:
            self._threads.pop(name, None)
            self.changed.notify_all()
            state = self.tasks[name]
            if state.says and state.state in ("done", "review", "failed"):
                self.remember(name, wanted="go")  # said since its agent has answered
            with contextlib.suppress(Asleep):
                self._grant(name)

    def _grant(self, name: str) -> None:
        """Do what a person wants of a task that nothing is at work on."""
        state = self.tasks[name]
        if name in self._threads or state.is_active:
            return
        if state.wanted == "stop":
            self.write(name, "stopped", reason="no agent was running", wanted="")
            self.tell(name, "stopped", "no agent was running")
        elif state.wanted == "attach":
            self.write(name, "attached", before=state.state if state.is_over else "waiting",
                       reason=state.reason, cause=state.cause, wanted="")
            self.tell(name, "attached")
        elif state.asleep and state.answer:
            self.write(name, "waiting", prompt=tell_answers(state.answer))
        elif state.wanted == "go" or state.says and state.asleep:
            self.write(name, "waiting", open=state.asleep, failures=0, wanted="")

    def tell(self, name: str, word: str, text: str = "") -> None:
        """Say what has happened to a task, and tell the person's own command."""
        text = text[:TOLD_CHARACTERS]
        self.folder.tell(name, word, text)
        self.backing.tell(name, word, text)
        if self.backing.notify and word in ("asks", *TERMINAL_STATES):
            self._notify(name, word, text)

    def _notify(self, name: str, word: str, text: str) -> None:
        """Start the person's command with a line of JSON on its standard input."""
        notify, place = self.backing.notify or "", self.folder.place
        argv = shell_words(self._world, notify) if isinstance(notify, str) else list(notify)
        main = self.folder.repository.main
        event = {"schema": "subagent-fleet/notice/1", "task": name, "event": word,
                 "text": text, "repository": main, "branch": self.tasks[name].branch}
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
        """Return how many tasks may still move up to what leaves the house, today."""
        since = self._world.now() - UNIT_SECONDS["d"]
        used = sum(state.left_at > since for state in list(self.tasks.values()))
        return self.backing.cloud_limit - used

    def _look_at_gateway(self) -> Mapping[str, Any]:
        """Return what the gateway says of itself, not older than a few seconds."""
        if self.backing.fleet and self._is_due("gateway", 5.0):
            self._page = self.backing.look()
        return self._page

    def models_of(self, name: str) -> list[Model]:
        """Return the models that may serve a task."""
        fleet, alias = self.backing.fleet, self.alias_of(name)
        return [model for model in fleet.models.values() if alias and model.alias == alias] \
            if fleet else []

    def view_of(self, session: str) -> str:
        """Return what the gateway knows of a session: waiting, working, idle or unknown."""
        sessions = self._look_at_gateway().get("sessions")
        return str(sessions.get(session, "idle")) if isinstance(sessions, dict) else "unknown"
