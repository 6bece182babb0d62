"""The state of a task."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.config.rules import REVISION, choice_rule, key, text_rule
from fleet.config.task_file import TaskSpec
from fleet.speech.claude_stream import CONTINUE_PROMPT
from fleet.start.record import Record, read, replace

if TYPE_CHECKING:
    from typing import Any


# A task has a TaskSpec (what a person wants) and a TaskState (how far it is). A TaskState has a
# Workplace, which a fresh start replaces, an Attempt, and a Wish. Its states:
#   waiting → running ⇄ asking → checking → done, or another of TERMINAL_STATES
# `tasks/step` has every arrow; nothing else writes the name of a state.

TERMINAL_STATES = ("done", "review", "failed", "stopped", "parked")
ACTIVE_STATES = ("running", "asking", "checking")
STATES = ("waiting", *ACTIVE_STATES, *TERMINAL_STATES)
UNREADABLE = "unreadable"  # a state that no file contains
PREPARING, STARTING = "preparing", "starting"  # phases of running, before its agent works
ASLEEP = "asleep"  # phase of asking: nobody has answered, and its process was ended

# The states that only files of earlier versions have, as a state and a phase of today.
FORMER_STATES = {"preparing": ("running", PREPARING), "starting": ("running", STARTING),
                 "attached": ("stopped", "")}


# What goes to git or to a program as a word: nothing that could be an option of it.
_COMMIT = text_rule("^([0-9a-f]{40,64})?$")
_PATH = text_rule(r"^(/[\s\S]*)?$")


class Workplace(Record):
    """Where a task works, and the results there; a fresh start gives it a new one."""

    # Random; the locks of its worktrees carry it, since a name proves nothing.
    id: str = key(text_rule("^[0-9a-f]*$"), default="")
    fresh: int = 0  # how many workplaces it had before
    base: str = key(_COMMIT, default="")  # the commit it began with
    start: str = key(_COMMIT, default="")  # the commit of what was there when its agent came
    branch: str = key(text_rule(f"^({REVISION.strip('^$')})?$"), default="")
    # Where the branch was when its work was last looked at.
    tip: str = key(_COMMIT, default="")
    worktree: str = key(_PATH, default="")
    # The worktree's own git directory; "": not made, or tidied away.
    git: str = key(_PATH, default="")
    copies: tuple[str, ...] = ()
    confined: str = ""  # the program that confines its commands, or `no`
    port: int = 0  # the first of its ten ports
    prepared: bool = False  # setup has succeeded
    passes_on_base: bool | None = None  # whether its check passes before any work
    conflicts: tuple[str, ...] = ()  # files in which it began with conflict markers
    # The commit for its branch, with which a task after it begins.
    kept: str = key(_COMMIT, default="")
    diff: dict[str, Any] = {}  # files, plus, minus, commits
    landed: str = ""  # the branch it has landed on

    @property
    def suffix(self) -> str:
        """The ending of its branch and worktree, which no task's name can have: a dot, a number."""
        return f".{self.fresh + 1}" if self.fresh else ""


class Attempt(Record):
    """A task's last try, and what its next one depends on."""

    tried: int = 0  # its number
    first: int = 0  # tries before it was forgotten: they belong to another task of this name
    open: bool = False  # it continues with its next process
    round: int = 0  # failed checks
    stalls: int = 0
    checks: tuple[int, ...] = ()  # their exit codes
    check_seconds: float = 0.0
    began: float = 0.0
    worked: float = 0.0  # seconds
    ended: float = 0.0  # a person's work after that is not counted
    spent: float = 0.0  # seconds of the tries before
    # A person's `retry` resets these.
    failures: int = 0  # tries that count as failed
    lost: int = 0  # in a row
    api_errors: int = 0  # in a row
    returned: int = 0  # how often it was sent back because it did not land
    # Its model.
    rung: str = ""  # of its ladder, where it is running or ran last
    climbed: tuple[str, ...] = ()  # the rungs on which it has failed
    left_at: float = 0.0  # when it last moved up to a model outside the house
    # Its process.
    session: str = key(text_rule("^([0-9a-f-]{36})?$"), default="")
    spoken: bool = False  # the session exists: it is resumed
    client: int = 0  # its process: for signals, and to tell its helpers from its commands
    start_at: int = 0  # where the output of its process begins
    heard_from: int = 0  # results before this belong to an earlier prompt
    prompt: str = ""  # what it is told besides the task, until it has answered


class Wish(Record):
    """What a person wants from a task, and what its agent asks."""

    says: tuple[str, ...] = ()  # not yet delivered
    told: tuple[str, ...] = ()  # delivered; an agent without a memory gets it each time
    question: dict[str, Any] = {}  # {"id": …, "request": …}
    answer: dict[str, Any] = {}  # not yet delivered
    stopping: bool = False  # its thread has not stopped it yet
    forgotten: bool = False


class TaskState(Record):
    """The whole state of a task. Each step replaces its file as a whole."""

    name: str = key("task name")
    task: TaskSpec = key()
    order: int = key()  # of acceptance
    origin: str = "typed"  # or `file`
    newer: TaskSpec | None = None  # the task as the file has it now; a retry takes it
    state: str = key(choice_rule(*STATES), default="waiting")
    phase: str = key(choice_rule("", PREPARING, STARTING, ASLEEP), default="")  # of the state
    at: float = 0.0  # since when
    reason: str = ""
    cause: str = ""  # the reason, for programs
    until: float = 0.0  # it waits until then
    orders: tuple[str, ...] = ()  # the last ones that were carried out, each only once
    place: Workplace = Workplace()
    old: tuple[Workplace, ...] = ()  # its workplaces before each fresh start
    attempt: Attempt = Attempt()
    wish: Wish = Wish()

    def _check(self) -> None:
        """Refuse another task's name, and values that could not be words of a command."""
        if self.task.name != self.name:
            raise ValueError("another task")

    @property
    def title(self) -> str:
        """Its name and the first line of its prompt: the message of its commits."""
        first = (self.task.prompt or "").strip().split("\n")[0]
        return f"{self.name}: {' '.join(first.split())[:100]}"

    @property
    def is_over(self) -> bool:
        """Whether only a person can change it now."""
        return self.state in TERMINAL_STATES

    def total_at(self, now: float) -> float:
        """Return the seconds that all its tries have taken, which never become fewer."""
        attempt = self.attempt
        until = attempt.ended if attempt.ended >= attempt.began else self.at
        if attempt.open and not self.is_over:
            until = now
        if not attempt.began:
            return attempt.spent
        # The clock may have been set back meanwhile, but this long its agent has worked.
        return attempt.spent + max(until - attempt.began, attempt.worked)

    @property
    def asleep(self) -> bool:
        """Whether it asks, and its process was ended meanwhile."""
        return self.phase == ASLEEP

    @property
    def is_active(self) -> bool:
        """Whether it is being worked on."""
        return self.state in ACTIVE_STATES and not self.asleep

    @property
    def has_agent(self) -> bool:
        """Whether it may have a running agent."""
        return self.is_active and self.phase != PREPARING

    @property
    def is_at_work(self) -> bool:
        """Whether it takes a slot; during a check, a coder that has ended takes none."""
        return self.is_active and (self.task.talks or self.state != "checking")


# The records of a state. Its file has their keys at the top level: other programs and other
# versions of this one read it. So each name is in only one of these records.
PARTS = ("place", "attempt", "wish")


def change(known: TaskState, **changes: Any) -> TaskState:
    """Return a state with new values, each in the record that has its name."""
    for part in PARTS:
        record = getattr(known, part)
        own = {name: changes.pop(name) for name in vars(record) if name in changes}
        if own:
            changes[part] = replace(record, **own)
    return replace(known, **changes)


def freeze(value: Any) -> Any:
    """Return a value for a file: of a record, only the values that are not the default."""
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
    """Return the content of a file that an earlier version wrote, as this version writes it."""
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
    """Return an old workplace of a file: once it was text, later it had no number."""
    if isinstance(place, str):
        branch, worktree, git, _, identity = [*place.split("\n"), "", "", "", ""][:5]
        place = {"branch": branch, "worktree": worktree, "git": git, "id": identity}
    if not isinstance(place, dict):
        return place
    renewed = {name: value for name, value in place.items() if value != ""}
    return {"fresh": number, **renewed} if number else renewed


def thaw_state(frozen: object) -> TaskState | None:
    """Return the state of a file; None if it contains none, or one that cannot be."""
    if not isinstance(frozen, dict):
        return None
    frozen = _renew(frozen)
    state = read(TaskState, {**frozen, **dict.fromkeys(PARTS, frozen)})
    if state is None:
        return None
    # A value that did not fit was replaced by its default, so it differs.
    fits = all(freeze(value) == frozen[name]
               for record in (state, state.place, state.attempt, state.wish)
               for name, value in vars(record).items() if name in frozen)
    return state if fits else None


def can_accept(state: TaskState) -> bool:
    """Tell whether a person can accept a task: it has work that passed, or left its scope."""
    return bool(state.place.kept) and (state.state == "review" or
                                 state.state == "parked" and state.cause == "scope")


def plan_first_words(state: TaskState) -> str:
    """Return the first prompt for a task's next process.

    A resumed session knows the task; any other process gets the whole task each time.
    """
    prompt = state.attempt.prompt
    if state.attempt.spoken and state.task.talks:
        return prompt or CONTINUE_PROMPT
    notes = [note for note in state.wish.told if note not in prompt]
    if prompt not in ("", CONTINUE_PROMPT):
        notes.append(prompt)
    return "\n\n".join([state.task.prompt or "", *notes])
