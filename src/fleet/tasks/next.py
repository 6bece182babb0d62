"""Which task starts next, what the others wait for, and which agent is stuck."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.speech.claude_stream import LOOPS_STALLED
from fleet.start.record import Record, replace
from fleet.tasks.spec import expand_names
from fleet.text.phrases import join_words, some_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleet.config.task_file import TaskSpec
    from fleet.speech.claude_stream import Heard
    from fleet.tasks.state import TaskState


class Limits(Record):
    """How many tasks may run at the same time, and on which aliases none can."""

    slots: Mapping[str, int]  # by alias; an alias without an entry has no limit
    most: int
    resting: Mapping[str, str] = {}  # by alias: why
    rungs: Mapping[str, tuple[str, ...]] = {}  # by task: where it is running, or may start

    def rungs_of(self, name: str) -> tuple[str, ...]:
        """Return the aliases on which a task may start, the best first."""
        return self.rungs.get(name, ("",))

    def alias_of(self, name: str) -> str:
        """Return the alias on which a task is running, or should start."""
        return self.rungs_of(name)[0]

    def after(self, starts: Mapping[str, str]) -> Limits:
        """Return the limits after these tasks have started on their rungs."""
        return replace(self, rungs={
            **self.rungs, **{name: (rung,) for name, rung in starts.items()}})

    def room_on(self, rung: str, busy: Mapping[str, int]) -> int:
        """Return how many more tasks can start on a rung."""
        if rung in self.resting:
            return 0
        return self.slots.get(rung, self.most) - busy.get(rung, 0)


def count_busy(states: Mapping[str, TaskState], limits: Limits) -> dict[str, int]:
    """Return how many slots are in use, by alias."""
    busy: dict[str, int] = {}
    for state in states.values():
        if state.is_at_work:
            alias = limits.alias_of(state.name)
            busy[alias] = busy.get(alias, 0) + 1
    return busy


def plan_starts(states: Mapping[str, TaskState], limits: Limits, now: float
                ) -> dict[str, str]:
    """Return {waiting task that starts now: its rung}: high priority first, then the oldest.

    Each takes the best of its rungs that has a free slot. A try that continues, such as one
    whose question was just answered, comes before new tasks. Failed tasks come last.
    """
    busy = count_busy(states, limits)
    room = limits.most - sum(busy.values())
    ready = [state for state in states.values()
             if state.state == "waiting" and state.until <= now]
    ready.sort(key=lambda state: (-state.task.priority, not state.attempt.open,
                                  state.at if state.attempt.spoken else 0.0, state.order))
    starts: dict[str, str] = {}
    for state in ready:
        if len(starts) >= room:
            break
        free = [rung for rung in limits.rungs_of(state.name) if limits.room_on(rung, busy) > 0]
        if free and not blockers_of(state, states):
            busy[free[0]] = busy.get(free[0], 0) + 1
            starts[state.name] = free[0]
    return starts


def blockers_of(state: TaskState, states: Mapping[str, TaskState]) -> list[str]:
    """Return the unfinished tasks that must be done before this one."""
    names = dependencies_of(state.task, states)
    return [name for name in names if name not in states or states[name].state != "done"]


def dependencies_of(task: TaskSpec, states: Mapping[str, TaskState]) -> tuple[str, ...]:
    """Return the tasks that `after` names; the name of a group means all its twins."""
    return expand_names(task.after, {name: state.task for name, state in states.items()})


def explain_wait(state: TaskState, states: Mapping[str, TaskState], limits: Limits,
                 now: float) -> str:
    """Return what a waiting task waits for."""
    blockers = blockers_of(state, states)
    if blockers:
        ended = {one.name: f"{one.name} ({one.state})" for one in states.values()
                 if one.is_over}
        return "for " + some_of([ended.get(name, name) for name in blockers], 3)
    if state.until > now:
        text = f"for its next try in {state.until - now:.0f} s"
        return f"{text}: {state.reason}" if state.reason else text
    rungs = limits.rungs_of(state.name)
    awake = [rung for rung in rungs if rung not in limits.resting]
    if not awake:
        return f"{rungs[0]}: {limits.resting[rungs[0]]}"
    busy = count_busy(states, limits)
    slots = sum(limits.slots.get(rung, limits.most) for rung in awake)
    if slots <= limits.most and all(limits.room_on(rung, busy) < 1 for rung in awake):
        asking = [f"; {one.name} asks: subagent-fleet task answer {one.name}"
                  for one in states.values() if one.state == "asking" and one.is_at_work
                  and limits.alias_of(one.name) in awake]
        who = join_words(awake, "or") if awake != [""] else "its coder"
        return "".join([f"for a slot of {who} ({slots} of {slots} in use)", *asking[:1]])
    if sum(busy.values()) >= limits.most:
        return f"for one of {limits.most} places"
    return "to start"


INIT_SECONDS = 60.0
HEARTBEAT_SECONDS = 90.0  # Claude Code says every 30 s that a command runs
LEAST_HEARTBEATS = 0.5  # of that time: a shorter `stall` would end commands that still run
COMMAND_SECONDS = 660.0  # its own limit for a command is 600
ASK_SECONDS, ASK_AWAITED_SECONDS = 300.0, 15.0


def find_stall(task: TaskSpec, heard: Heard, view: str, timeout: float,
               now: float) -> str:
    """Return how a running agent is stuck; "" if it isn't.

    `timeout` is the timeout of the model's machine, 0 without a machine of this fleet. `view`
    is the gateway's view of its session: waiting, working, idle or unknown.
    """
    silent, stands = now - heard.last, now - heard.since
    if heard.phase in ("asking", "settled"):
        return ""
    if not task.talks:
        return f"no output for {silent:.0f} s" if silent > task.stall else ""
    if heard.phase == "silent":
        return f"no sign of life for {stands:.0f} s" if stands > INIT_SECONDS else ""
    if heard.repeats >= LOOPS_STALLED:
        return f"the same call {heard.repeats} times in a row"
    if view == "waiting":
        return ""
    if heard.phase == "tool":
        return _find_tool_stall(task, heard, view, now)
    limit = 2 * timeout
    if view == "idle" or not timeout:
        limit = float(task.stall)
    # While the model writes, each piece of its answer is a sign of life, however long it takes.
    # Before that, pings don't count if the gateway tells what it is doing.
    is_heard = view == "unknown" or heard.phase != "requesting"
    quiet = silent if is_heard else stands
    if quiet > limit:
        return f"no answer from the model for {quiet:.0f} s"
    return ""


def _find_tool_stall(task: TaskSpec, heard: Heard, view: str, now: float) -> str:
    """Return how an agent is stuck in a tool call; "" if it isn't."""
    if view == "working" or not heard.calls:  # a subagent's request
        return ""
    call = list(heard.calls.values())[-1]
    silent = now - heard.last
    if call.tool != "Bash":
        return f"{call.tool} silent for {silent:.0f} s" if silent > task.stall else ""
    if silent > max(min(task.stall, HEARTBEAT_SECONDS), LEAST_HEARTBEATS * HEARTBEAT_SECONDS):
        return f"a command without a sign of life for {silent:.0f} s"
    if now - call.since > COMMAND_SECONDS:
        return f"a command running for {now - call.since:.0f} s"
    return ""
