"""What is known of a task."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.config.rules import REVISION, choice_rule, key, text_rule
from fleet.config.task_file import TaskSpec
from fleet.speech.claude_stream import CONTINUE_PROMPT
from fleet.start.record import Record, read, replace

if TYPE_CHECKING:
    from typing import Any


# A task is a TaskSpec (what a person wants) and a TaskState (where it stands): a Workplace, which
# a fresh start replaces, an Attempt, and a Wish. Its way:
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


# What goes to git or to a program as a word: nothing that could be an option of it.
_COMMIT = text_rule("^([0-9a-f]{40,64})?$")
_PATH = text_rule(r"^(/[\s\S]*)?$")


class Workplace(Record):
    """Where a task works, and what came of it there: a fresh start gives it another one."""

    # Random; the locks of its worktrees carry it, since a name proves nothing.
    id: str = key(text_rule("^[0-9a-f]*$"), default="")
    fresh: int = 0  # how many places it had before
    base: str = key(_COMMIT, default="")  # the commit it began with
    start: str = key(_COMMIT, default="")  # the commit of what was there when its agent came
    branch: str = key(text_rule(f"^({REVISION.strip('^$')})?$"), default="")
    # Where the branch was when its work was last looked at.
    tip: str = key(_COMMIT, default="")
    worktree: str = key(_PATH, default="")
    # The worktree's own git directory; "": not made, or tidied away.
    git: str = key(_PATH, default="")
    copies: tuple[str, ...] = ()
    confined: str = ""  # the program that confines its commands, or no
    port: int = 0  # the first of ten that are its own
    prepared: bool = False  # setup has ended well
    passes_on_base: bool | None = None  # its check, before any work
    conflicts: tuple[str, ...] = ()  # files in which it began with conflict markers
    # The commit for its branch, with which a task after it begins.
    kept: str = key(_COMMIT, default="")
    diff: dict[str, Any] = {}  # files, plus, minus, commits
    landed: str = ""  # the branch it has landed on

    @property
    def suffix(self) -> str:
        """What sets its branch and worktree apart: no task's name has a dot."""
        return f".{self.fresh + 1}" if self.fresh else ""


class Attempt(Record):
    """A task's last try, and what counts for its next one."""

    tried: int = 0  # its number
    first: int = 0  # tries before it was forgotten: those of another task of its name
    open: bool = False  # it goes on with its next process
    round: int = 0  # failed checks
    stalls: int = 0
    checks: tuple[int, ...] = ()  # their exit codes
    check_seconds: float = 0.0
    began: float = 0.0
    worked: float = 0.0  # seconds
    ended: float = 0.0  # what a person does then is not its time
    spent: float = 0.0  # seconds of the tries before
    # What a person's `retry` gives it again.
    failures: int = 0  # tries that counted
    lost: int = 0  # in a row
    api_errors: int = 0  # in a row
    returned: int = 0  # how often it was sent back because it did not land
    # Its model.
    rung: str = ""  # of its ladder, where it works or has worked last
    climbed: tuple[str, ...] = ()  # the rungs on which it has failed
    left_at: float = 0.0  # when it last moved up to what leaves the house
    # Its process.
    session: str = key(text_rule("^([0-9a-f-]{36})?$"), default="")
    spoken: bool = False  # the session exists: it is resumed
    client: int = 0  # its process: for signals, and to tell its helpers from what it started
    start_at: int = 0  # where the output of its process begins
    heard_from: int = 0  # results before are of an earlier prompt
    prompt: str = ""  # what it is told beside the task, until it has answered


class Wish(Record):
    """What a person wants of a task, and what it asks."""

    says: tuple[str, ...] = ()  # not yet handed on
    told: tuple[str, ...] = ()  # handed on: who has no memory gets it each time
    question: dict[str, Any] = {}  # {"id": …, "request": …}
    answer: dict[str, Any] = {}  # not yet handed on
    stopping: bool = False  # its thread has not done so yet
    forgotten: bool = False


class TaskState(Record):
    """All that is known of a task: its file is replaced whole with each step."""

    name: str = key("task name")
    task: TaskSpec = key()
    order: int = key()  # of acceptance
    origin: str = "typed"  # or file
    newer: TaskSpec | None = None  # what the file says by now; a retry takes it
    state: str = key(choice_rule(*STATES), default="waiting")
    phase: str = key(choice_rule("", PREPARING, STARTING, ASLEEP), default="")  # of the state
    at: float = 0.0  # since when
    reason: str = ""
    cause: str = ""  # the same for programs
    until: float = 0.0  # it waits until then
    orders: tuple[str, ...] = ()  # the last ones that were obeyed: none is obeyed twice
    place: Workplace = Workplace()
    old: tuple[Workplace, ...] = ()  # its places before each fresh start
    attempt: Attempt = Attempt()
    wish: Wish = Wish()

    def _check(self) -> None:
        if self.task.name != self.name:
            raise ValueError("another task")

    @property
    def is_over(self) -> bool:
        """Whether nothing happens to it any more without a person."""
        return self.state in TERMINAL_STATES

    def total_at(self, now: float) -> float:
        """Return the seconds that all its tries have taken: never less than before."""
        attempt = self.attempt
        until = attempt.ended if attempt.ended >= attempt.began else self.at
        if attempt.open and not self.is_over:
            until = now
        return attempt.spent + (max(until - attempt.began, 0.0) if attempt.began else 0.0)

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


# The records of a state. Its file has their keys beside its own, as it always had: programs
# read it, and other versions of this one. Each name is therefore in one of them alone.
PARTS = ("place", "attempt", "wish")


def change(known: TaskState, **changes: Any) -> TaskState:
    """Return a state with other values, each in the record that has the name."""
    for part in PARTS:
        record = getattr(known, part)
        own = {name: changes.pop(name) for name in vars(record) if name in changes}
        if own:
            changes[part] = replace(record, **own)
    return replace(known, **changes)


def freeze(value: Any) -> Any:
    """Return a value as its file has it: of a record what is not as usual."""
    if isinstance(value, Record):
        frozen = {name: freeze(each) for name, each in vars(value).items()
                  if each != value._usual[name]}
        for part in PARTS if isinstance(value, TaskState) else ():
            frozen.update(frozen.pop(part, {}))
        return frozen
    return [freeze(each) for each in value] if isinstance(value, tuple) else value


def thaw_task(frozen: object) -> TaskSpec | None:
    """Return the task that was kept, or None if there is none or it says what none can."""
    task = read(TaskSpec, frozen)
    return task if freeze(task) == frozen else None  # what did not fit is not there


def _renew(frozen: dict[str, Any]) -> dict[str, Any]:
    """Return what a file says, as it is said now: what earlier versions wrote differently."""
    renewed = {**frozen}
    if isinstance(frozen.get("old"), list):
        renewed["old"] = [_renew_place(*each) for each in enumerate(frozen["old"])]
    for word in ("task", "newer"):
        task = frozen.get(word)
        if isinstance(task, dict) and task.get("check") == "":  # as `none` was kept
            renewed[word] = {name: value for name, value in task.items() if name != "check"}
    former = FORMER_STATES.get(str(frozen.get("state")))
    if former:
        renewed["state"], renewed["phase"] = former
    elif frozen.get("asleep"):
        renewed["phase"] = ASLEEP
    return renewed


def _renew_place(number: int, place: object) -> object:
    """Return a place of before a fresh start: once it was lines, later it had no number."""
    if isinstance(place, str):
        branch, worktree, git, _, identity = [*place.split("\n"), "", "", "", ""][:5]
        place = {"branch": branch, "worktree": worktree, "git": git, "id": identity}
    if not isinstance(place, dict):
        return place
    renewed = {name: value for name, value in place.items() if value != ""}
    return {"fresh": number, **renewed} if number else renewed


def thaw_state(frozen: object) -> TaskState | None:
    """Return the state that a file keeps; None if it is none or says what no state can."""
    if not isinstance(frozen, dict):
        return None
    frozen = _renew(frozen)
    state = read(TaskState, {**frozen, **dict.fromkeys(PARTS, frozen)})
    if state is None:
        return None
    # What did not fit has its default, and differs.
    fits = all(freeze(value) == frozen[name]
               for record in (state, state.place, state.attempt, state.wish)
               for name, value in vars(record).items() if name in frozen)
    return state if fits else None


def can_accept(state: TaskState) -> bool:
    """Tell whether a person can accept a task: it has work, and nothing else calls it bad."""
    return bool(state.place.kept) and (state.state == "review" or
                                 state.state == "parked" and state.cause == "scope")


def plan_first_words(state: TaskState) -> str:
    """Return what a task's next process is told.

    A session that is resumed knows the task; whoever else does it gets the whole
    of it each time.
    """
    prompt = state.attempt.prompt
    if state.attempt.spoken and state.task.talks:
        return prompt or CONTINUE_PROMPT
    notes = [note for note in state.wish.told if note not in prompt]
    if prompt not in ("", CONTINUE_PROMPT):
        notes.append(prompt)
    return "\n\n".join([state.task.prompt or "", *notes])
