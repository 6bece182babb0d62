"""What is known of a task."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.config.keys import FILE_KEYS
from fleet.config.rules import REVISION, TASK_NAME, obeys
from fleet.config.task_file import TaskSpec
from fleet.speech.claude_stream import CONTINUE_PROMPT
from fleet.start.record import Record, fields, read, replace

if TYPE_CHECKING:
    from typing import Any


# A task is a TaskSpec (what a person wants) and a TaskState (where it stands). Its way:
#   waiting → running ⇄ asking → checking → done, or another of TERMINAL_STATES
# `tasks/step` has every arrow; nothing else writes the name of a state.

TERMINAL_STATES = ("done", "review", "failed", "stopped", "parked")
ACTIVE_STATES = ("running", "asking", "checking")
STATES = ("waiting", *ACTIVE_STATES, *TERMINAL_STATES)
UNREADABLE = "unreadable"  # a state that no file has
PREPARING, STARTING = "preparing", "starting"  # phases of running, before its agent works
ASLEEP = "asleep"  # phase of asking: nobody has answered, and its process was ended

# What the files of earlier versions call a state: the state and its phase now.
FORMER_STATES = {"preparing": ("running", PREPARING), "starting": ("running", STARTING),
                 "attached": ("stopped", "")}


class OldPlace(Record):
    """Where a task worked before a fresh start."""

    branch: str
    worktree: str
    git: str
    id: str


class TaskState(Record):
    """All that is known of a task: its file is replaced whole with each step."""

    name: str
    task: TaskSpec
    order: int  # of acceptance
    origin: str = "typed"  # or file
    newer: TaskSpec | None = None  # what the file says by now; a retry takes it
    state: str = "waiting"
    phase: str = ""  # of it
    at: float = 0.0  # since when
    reason: str = ""
    cause: str = ""  # the same for programs
    until: float = 0.0  # it waits until then
    orders: tuple[str, ...] = ()  # the last ones that were obeyed: none is obeyed twice
    # Where it works.
    id: str = ""  # random; the locks of its worktrees carry it, since a name proves nothing
    base: str = ""  # the commit it began with
    start: str = ""  # the commit of what was there when its agent came
    branch: str = ""
    tip: str = ""  # where the branch was when its work was last looked at
    worktree: str = ""
    git: str = ""  # the worktree's own git directory; "": not made, or tidied away
    copies: tuple[str, ...] = ()
    confined: str = ""  # the program that confines its commands, or no
    port: int = 0  # the first of ten that are its own
    prepared: bool = False  # setup has ended well
    fresh: int = 0  # how often a person has begun it anew
    old: tuple[OldPlace, ...] = ()
    # Its tries.
    tried: int = 0  # the number of the last one
    first: int = 0  # tries before it was forgotten: those of another task of its name
    open: bool = False  # that try goes on with its next process
    failures: int = 0  # tries that counted, since a person's last `retry`
    round: int = 0  # failed checks of this try
    lost: int = 0  # in a row
    stalls: int = 0  # of this try
    api_errors: int = 0  # in a row
    began: float = 0.0
    worked: float = 0.0  # seconds of this try
    ended: float = 0.0  # when its last try was over: what a person does then is not its time
    spent: float = 0.0  # seconds of the tries before this one
    # Its model.
    rung: str = ""  # of its ladder, where it works or has worked last
    climbed: tuple[str, ...] = ()  # the rungs on which it has failed
    left_at: float = 0.0  # when it last moved up to what leaves the house
    # Its process.
    session: str = ""
    spoken: bool = False  # the session exists: it is resumed
    client: int = 0  # its process: for signals, and to tell its helpers from what it started
    start_at: int = 0  # where the output of its process begins
    heard_from: int = 0  # results before are of an earlier prompt
    prompt: str = ""  # what it is told beside the task, until it has answered
    # What a person wants of it.
    says: tuple[str, ...] = ()  # not yet handed on
    told: tuple[str, ...] = ()  # handed on: who has no memory gets it each time
    question: dict[str, Any] = {}  # {"id": …, "request": …}
    answer: dict[str, Any] = {}  # not yet handed on
    stopping: bool = False  # its thread has not done so yet
    forgotten: bool = False
    # Landing.
    returned: int = 0  # how often it was sent back because it did not land
    conflicts: tuple[str, ...] = ()  # files in which it then got conflict markers
    landed: str = ""  # the branch it has landed on
    # What it came to.
    kept: str = ""  # the commit for its branch, with which a task after it begins
    diff: dict[str, Any] = {}  # files, plus, minus, commits
    checks: tuple[int, ...] = ()  # exit codes of this try
    check_seconds: float = 0.0
    passes_on_base: bool | None = None

    def _check(self) -> None:
        if self.task.name != self.name:
            raise ValueError("another task")
        for name, pattern in _STATE_PATTERNS.items():
            if not re.fullmatch(pattern, getattr(self, name), re.S):
                raise ValueError(f"no {name}")

    @property
    def is_over(self) -> bool:
        """Whether nothing happens to it any more without a person."""
        return self.state in TERMINAL_STATES

    def total_at(self, now: float) -> float:
        """Return the seconds that all its tries have taken: never less than before."""
        until = self.ended if self.ended >= self.began else self.at
        if self.open and not self.is_over:
            until = now
        return self.spent + (max(until - self.began, 0.0) if self.began else 0.0)

    @property
    def asleep(self) -> bool:
        """Whether it asks, and its process was ended."""
        return self.phase == ASLEEP

    @property
    def is_active(self) -> bool:
        """Whether something is being done for it."""
        return self.state in ACTIVE_STATES and not self.asleep

    @property
    def has_agent(self) -> bool:
        """Whether an agent may live for it."""
        return self.is_active and self.phase != PREPARING

    @property
    def is_at_work(self) -> bool:
        """Whether it takes a place; a coder that has ended takes none while it is checked."""
        return self.is_active and (self.task.talks or self.state != "checking")


# What goes to git or to a program as a word: nothing that could be an option of it.
_COMMIT = "([0-9a-f]{40,64})?"
_STATE_PATTERNS = {
    "base": _COMMIT, "start": _COMMIT, "tip": _COMMIT, "kept": _COMMIT,
    "session": "([0-9a-f-]{36})?", "id": "[0-9a-f]*",
    "branch": f"({REVISION.strip('^$')})?", "worktree": "(/.*)?", "git": "(/.*)?",
    "name": TASK_NAME,
    "state": "|".join(STATES), "phase": f"({PREPARING}|{STARTING}|{ASLEEP})?"}


def freeze(value: Any) -> Any:
    """Return a value as its file has it: of a record what is not as usual."""
    if isinstance(value, Record):
        usual = value._usual
        return {name: freeze(each) for name, each in vars(value).items()
                if each != usual[name]}
    return [freeze(each) for each in value] if isinstance(value, tuple) else value


def thaw_task(frozen: object) -> TaskSpec | None:
    """Return the task that was kept; None where it is none."""
    rules = {"name": "task name",
             **{name: one.rule for name, one in FILE_KEYS["task"].items()}}
    if not isinstance(frozen, dict) or "name" not in frozen or not all(
            name in rules and obeys(value, rules[name])
            or (name, value) == ("check", "")  # as `none` is kept
            for name, value in frozen.items()):
        return None
    words: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value
                             for name, value in frozen.items()}
    return TaskSpec(**words)


def _unpack_place(place: object) -> object:
    """Return a place as it is kept now; earlier versions wrote its parts as lines."""
    if not isinstance(place, str):
        return place
    branch, worktree, git, _, identity = [*place.split("\n"), "", "", "", ""][:5]
    return {"branch": branch, "worktree": worktree, "git": git, "id": identity}


def thaw_state(frozen: object) -> TaskState | None:
    """Return the state that a file keeps; None if it is none or says what no state can."""
    if not isinstance(frozen, dict):
        return None
    old = frozen.get("old")
    if isinstance(old, list):
        frozen = {**frozen, "old": [_unpack_place(place) for place in old]}
    former = FORMER_STATES.get(str(frozen.get("state")))
    if former:
        frozen = {**frozen, "state": former[0], "phase": former[1]}
    elif frozen.get("asleep"):
        frozen = {**frozen, "phase": ASLEEP}
    state = read(TaskState, frozen)
    if state is None:
        return None
    state = replace(state, task=thaw_task(frozen["task"]),
                    newer=thaw_task(frozen.get("newer")))
    # What did not fit has its default, and differs.
    fits = all(freeze(getattr(state, name)) == value for name, value in frozen.items()
               if name in fields(TaskState))
    return state if fits else None


def can_accept(state: TaskState) -> bool:
    """Tell whether a person can accept a task: it has work, and nothing else calls it bad."""
    return bool(state.kept) and (state.state == "review" or
                                 state.state == "parked" and state.cause == "scope")


def plan_first_words(state: TaskState) -> str:
    """Return what a task's next process is told.

    A session that is resumed knows the task; whoever else does it gets the whole
    of it each time.
    """
    if state.spoken and state.task.talks:
        return state.prompt or CONTINUE_PROMPT
    notes = [note for note in state.told if note not in state.prompt]
    if state.prompt not in ("", CONTINUE_PROMPT):
        notes.append(state.prompt)
    return "\n\n".join([state.task.prompt or "", *notes])
