"""Tasks as rows: for `tasks`, the dashboard and `trace`."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.speech.claude_stream import Heard, question_of
from fleet.start.record import Record
from fleet.tasks.next import Limits, blockers_of, explain_wait
from fleet.tasks.state import TERMINAL_STATES, UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fleet.gateway.receipts import Receipt
    from fleet.tasks.state import TaskState


class TaskRow(Record):
    """A task as people and programs see it."""

    name: str
    group: str
    state: str
    try_: str  # such as 1/2; `try` in JSON
    state_seconds: float  # since it has this state
    total_seconds: float  # of all its tries
    idle_seconds: float | None  # since its agent was last heard
    now: str
    context_percent: int | None
    files: int
    plus: int
    minus: int
    runs_on: str  # the machine or the alias; several if the task has moved up
    rung: str
    climbed: tuple[str, ...]
    memory_mb: int
    cpu_percent: float
    processes: int
    fix: str
    session: str
    branch: str
    worktree: str
    agent: str
    alias: str
    reason: str
    cause: str
    confined: str  # bwrap, sandbox-exec, no; "" before its first try
    port: int  # the first of its ten ports; 0 before its first try


class TaskSight(Record):
    """What is seen of the tasks of a repository at one moment."""

    tasks: Mapping[str, TaskState]
    heard: Mapping[str, Heard]  # what running agents have said
    now: float
    limits: Limits = Limits({}, 1)
    windows: Mapping[str, int] = {}  # tokens, by alias
    served: Mapping[str, Receipt] = {}  # by session: the last
    loads: Mapping[str, Sequence[tuple[int, float]]] = {}
    unreadable: int = 0
    attached: frozenset[str] = frozenset()  # tasks whose sessions are open in terminals
    holder: int = 1  # the process that supervises them; 0: none


def plan_task_rows(sight: TaskSight) -> list[TaskRow]:
    """Return a row for each task, in the order of the file; twins by verdict, then by size."""
    shown = [state for state in sight.tasks.values() if not state.wish.forgotten]
    firsts = {state.task.group: state.order for state in reversed(shown)}
    ranks = {"done": 0, "review": 1}
    return sorted((plan_task_row(state, sight) for state in shown), key=lambda row: (
        firsts[row.group], ranks.get(row.state, 2), row.plus + row.minus))


def find_twins(states: Mapping[str, TaskState], state: TaskState) -> list[TaskState]:
    """Return the other tasks of the same group that could still be chosen."""
    return [other for other in states.values() if other.task.group == state.task.group
            and other.task.times != 1 and other.name != state.name and not other.wish.forgotten]


def find_best(rows: Sequence[TaskRow]) -> TaskRow | None:
    """Return the twin to choose if all have ended: the smallest that is done."""
    if any(row.state not in TERMINAL_STATES for row in rows):
        return None
    good = [row for row in rows if row.state == "done"]
    good = good or [row for row in rows if row.state == "review"]
    return min(good, key=lambda row: row.plus + row.minus) if len(rows) > 1 and good else None


def plan_task_row(state: TaskState, sight: TaskSight) -> TaskRow:
    """Return the row of one task."""
    place, attempt = state.place, state.attempt
    heard = sight.heard.get(state.name, Heard())
    alias = sight.limits.alias_of(state.name)
    served = sight.served.get(attempt.session)
    where = ""
    if state.is_active:
        where = served.node if served and served.node else alias
    if attempt.climbed:
        where = " → ".join([*attempt.climbed, where or attempt.rung or alias])
    context = None
    window = sight.windows.get(alias)
    tokens = served.input_tokens if served else heard.context
    if window and tokens and not state.is_over:
        context = min(round(100 * tokens / window), 999)

    loads = sight.loads.get(state.name, ())
    memory, cpu = map(sum, zip((0, 0.0), *loads))
    files, plus, minus = (int(place.diff.get(word, 0)) for word in ("files", "plus", "minus"))
    # A person's retry gives it all its tries again.
    tried = attempt.tried - attempt.first
    tries = tried + state.task.tries - attempt.failures
    if attempt.open or attempt.tried and state.is_over:
        tries -= 1
    return TaskRow(
        state.name, state.task.group, state.state, f"{tried}/{tries}",
        sight.now - state.at, state.total_at(sight.now) if attempt.tried else 0.0,
        sight.now - heard.last if heard.last else None, _describe_task(state, heard, sight),
        context, files, plus, minus, where, attempt.rung, attempt.climbed,
        int(memory), round(cpu, 1), len(loads), suggest_task_step(state), attempt.session,
        place.branch, place.worktree if place.git else "", state.task.agent or "", alias,
        state.reason, state.cause, place.confined, place.port)


def _describe_task(state: TaskState, heard: Heard, sight: TaskSight) -> str:
    """Return what a task is doing, waiting for or asking, or how it ended."""
    if state.name in sight.attached:
        return "open in a terminal"
    if state.state == "waiting":
        if not blockers_of(state, sight.tasks) and not sight.holder:
            return "for `run`"
        return explain_wait(state, sight.tasks, sight.limits, sight.now)
    if state.state == "asking":
        return question_of(state.wish.question.get("request", {}))
    if state.phase:
        return state.phase
    if state.state == "running":
        return heard.now if state.task.talks else state.task.program
    if state.state == "checking":
        return state.task.check or "looking at the diff"
    return state.reason


# The log that says why a task was parked, by its cause. For other causes nothing was started.
LOGGED = {"check": " check", "setup-failed": " setup", "lost": " stderr", "coder": " stderr",
          "api": "", "too-large": ""}


def suggest_task_step(state: TaskState) -> str:
    """Return the command that helps with a task, or nothing."""
    name = state.name
    if state.state == "asking":
        return f"subagent-fleet task answer {name}"
    if state.state == "review" or state.cause == "scope":
        return f"subagent-fleet task diff {name}"
    if state.cause == "landing":
        return f"subagent-fleet task log {name} landing"
    if state.state == "failed" or state.state == "parked" and state.cause in LOGGED:
        kind = LOGGED.get(state.cause, "")
        if kind == " stderr" and not state.task.talks:
            kind = ""  # its output; `task log` says if there are only errors
        return f"subagent-fleet task log {name}{kind}"
    return f"subagent-fleet tasks {name}" if state.state in ("parked", UNREADABLE) else ""
