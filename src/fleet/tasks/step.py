"""What comes next in a task: the function `step` and its table of arrows."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.speech.claude_stream import (
    ATTACHED_PROMPT,
    CHANGED_PROMPT,
    CONTINUE_PROMPT,
    LOST_PROMPT,
    ask_in_words,
    questions_in,
    tell_answers,
)
from fleet.start.errors import FleetError
from fleet.start.record import Record, replace
from fleet.tasks.events import (
    AcceptOrder,
    Answered,
    AnswerOrder,
    ApiFailed,
    Asked,
    Begun,
    BranchMerged,
    Checked,
    Closed,
    DetachOrder,
    EndedAgain,
    Entered,
    Event,
    EvictOrder,
    Expired,
    ForgetOrder,
    GoneOrder,
    Interrupted,
    LandedOrder,
    Lost,
    Order,
    Planned,
    Ready,
    Refused,
    Removed,
    Resumed,
    RetryOrder,
    ReturnOrder,
    Revised,
    SayOrder,
    Slept,
    Spoke,
    Stalled,
    Started,
    Starting,
    StopOrder,
    Told,
    Trouble,
)
from fleet.tasks.ladder import tell_climbed
from fleet.tasks.spec import HOT_KEYS, find_name, is_another
from fleet.tasks.state import (
    ASLEEP,
    PREPARING,
    STARTING,
    STATES,
    TERMINAL_STATES,
    UNREADABLE,
    Attempt,
    TaskState,
    Wish,
    Workplace,
    can_accept,
    change,
    thaw_task,
)
from fleet.tasks.verdict import Ruling, after_failure, judge
from fleet.text.phrases import show_span

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any



# `step` takes the state of a task and one event: what its thread has seen, or what a person has
# ordered. It returns the new state and what to do next. The caller first writes the state down,
# then does that; the result is the next event. So a kill between any two lines of a thread loses
# nothing: the next thread continues from the state that was written.
#
# Example: `make test` fails while a person types `task stop`. The order arrives first: StopOrder
# only sets `stopping`, because the task has a thread. The thread sends Checked: the state is
# running again, and the feedback is due. Before it sends that, the thread sees `stopping`:
# Interrupted asks for a close, and Closed makes the task stopped.

LOST_LIMIT = 5
API_WAIT_SECONDS = (30, 60, 120)
API_ERRORS_LIMIT = 20
TRY_WAIT_SECONDS = (0, 10, 30, 60)
ORDERS_KEPT = 10  # the last ones that were carried out

# What the thread of a task does next, and the event that it sends then.
MAKE_PLACE = "make"  # its place, then Ready
START_AGENT = "start"  # its agent, then Started
LISTEN = "listen"  # to its agent: Spoke, Lost, Stalled, Expired, Slept
CHECK_WORK = "check"  # what it has done: Checked, ApiFailed
FEED_BACK = "feed"  # tell its agent what is wrong, then Resumed or Started
SLEEP = "sleep"  # end the process of an asking agent, then Slept
CLOSE = "close"  # end everything, keep the work, write the receipt, then Closed
END_AGAIN = "end again"  # try again to end what was still running, then EndedAgain


class Step(Record):
    """The result of an event."""

    state: TaskState
    do: str = ""  # what its thread does next; "": nothing
    tells: tuple[tuple[str, str], ...] = ()  # messages to people: a word and a text
    ruling: Ruling = Ruling("")  # with which CLOSE closes it


def step(state: TaskState, event: Event, now: float) -> Step:
    """Return the result of an event at a time of the wall clock."""
    if state.state not in STATES or isinstance(event, Order) and event.id in state.orders:
        return Step(state)
    sources, arrow = ARROWS[type(event)]
    made = arrow(state, event, now) if state.state in sources else Step(state)
    if isinstance(event, Order):
        # In one change with its result: an order that is not in the state comes again.
        orders = (*state.orders[1 - ORDERS_KEPT:], event.id)
        made = replace(made, state=replace(made.state, orders=orders))
    return _honor_wishes(made, now)


def add_task(tasks: Mapping[str, TaskState], event: Revised, now: float) -> Step:
    """Return the result of adding a task, or of changing one; refuse a name that is taken."""
    task = event.task
    old = tasks.get(task.name)
    other = find_name(task.name, tasks)
    if old is None and other:
        raise FleetError("task-taken", f"there is already a task `{other}`")
    if old is None:
        order = max((state.order for state in tasks.values()), default=-1) + 1
        return Step(TaskState(task.name, task, order, event.origin, at=now,
                              place=Workplace(base=event.base)))
    if old.state == UNREADABLE:
        raise FleetError("bad-state", old.reason)
    if is_another(old, task, event.origin):
        raise FleetError("task-taken", "another task of this name was typed before")
    return step(old, event, now)


def _honor_wishes(made: Step, now: float) -> Step:
    """Do at once what a person has wanted meanwhile, if the task has no running agent."""
    state = made.state
    if state.wish.stopping and (state.state == "waiting" or state.asleep):
        reason = "stopped while no agent was running"
        ended = now if state.attempt.open else state.attempt.ended
        state = _move(state, "stopped", now, reason=reason, stopping=False, open=False,
                      ended=ended)
        return Step(state, tells=(*made.tells, ("stopped", reason)))
    if state.asleep and state.wish.answer:
        state = _move(state, "waiting", now, prompt=tell_answers(state.wish.answer))
    elif state.asleep and state.wish.says:
        state = _move(state, "waiting", now, failures=0)
    return replace(made, state=state)


def _move(state: TaskState, to: str, now: float, **changes: Any) -> TaskState:
    """Return the state after an arrow, without what was only true of the state before."""
    usual = {"reason": "", "cause": "", "until": 0.0, "phase": "", "question": {}, "answer": {}}
    return change(state, **{**usual, **changes, "state": to, "at": now})


# -- its way --


def _begin(state: TaskState, event: Begun, now: float) -> Step:
    """Start a waiting task on a rung of its ladder."""
    return Step(_move(state, "running", now, phase=PREPARING, rung=event.rung))


def _enter(state: TaskState, event: Entered, now: float) -> Step:
    """Continue from the step that the state names."""
    if state.is_over:
        return Step(state, END_AGAIN if state.wish.stopping else "")
    if state.phase in (PREPARING, STARTING):
        # The agent has not done anything that counts: it is ended and started again.
        return Step(state, MAKE_PLACE)
    return Step(state, CHECK_WORK if state.state == "checking" else LISTEN)


def _plan(state: TaskState, event: Planned, now: float) -> Step:
    """Note where the task works; if no try is open, begin one."""
    state = change(state, phase=PREPARING, **event.place)
    if not state.attempt.open:
        state = change(state, open=True, tried=event.number, round=0, stalls=0, checks=(),
                       worked=0.0, spent=state.total_at(now), began=now)
    return Step(state)


def _make_ready(state: TaskState, event: Ready, now: float) -> Step:
    """Start the agent, now that its place is ready."""
    return Step(state, START_AGENT)


def _prepare_start(state: TaskState, event: Starting, now: float) -> Step:
    """Note the session and the prompt of the process that is about to start."""
    wish = state.wish
    words = "\n\n".join(filter(None, [state.attempt.prompt, *wish.says]))
    return Step(_move(state, "running", now, phase=STARTING, session=event.session,
                      start_at=event.size, heard_from=event.size, prompt=words,
                      told=(*wish.told, *wish.says), says=()))


def _start(state: TaskState, event: Started, now: float) -> Step:
    """Note that the agent has started, and listen to it."""
    word = "resumed" if state.attempt.spoken else "started"
    return Step(_move(state, "running", now, spoken=True, client=event.client), LISTEN,
                ((word, event.words),))


def _resume(state: TaskState, event: Resumed, now: float) -> Step:
    """Listen to the agent again."""
    return Step(state, LISTEN)


def _take_result(state: TaskState, event: Spoke, now: float) -> Step:
    """Check the work, now that the agent has answered."""
    return Step(_move(state, "checking", now, prompt=""), CHECK_WORK)


def _ask(state: TaskState, event: Asked, now: float) -> Step:
    """Ask a person, with the command that answers."""
    asked = []
    choices = False
    for question, labels in questions_in(event.request):
        numbered = [f"{number} {label}" for number, label in enumerate(labels, 1)]
        asked.append("  ".join([question, *numbered]))
        choices = choices or bool(labels)
    text = (f"{' | '.join(asked)}  `subagent-fleet task answer {state.name} "
            f"{'1' if choices else 'TEXT'}`")
    state = _move(state, "asking", now, question={"id": event.id, "request": event.request})
    return Step(state, "", (("asks", text),))


def _answer(state: TaskState, event: Answered, now: float) -> Step:
    """Let the agent continue after its question."""
    tells = (("answered", event.words),) if event.words else ()
    return Step(_move(state, "running", now), "", tells)


def _tell(state: TaskState, event: Told, now: float) -> Step:
    """Drop the messages that were delivered."""
    # More may have come since.
    return Step(change(state, says=state.wish.says[len(event.says):]), "",
                (("told", "; ".join(event.says)),))


def _sleep(state: TaskState, event: Event, now: float) -> Step:
    """Note that the process of an asking agent has ended."""
    return Step(change(state, phase=ASLEEP, prompt=""))


# -- how a process, a round or a try ends --


def _lose(state: TaskState, event: Lost, now: float) -> Step:
    """Start the agent again. This is no failure of the task, and a question stays open."""
    if state.state == "asking":
        return _sleep(state, event, now)
    attempt = state.attempt
    lost = attempt.lost + 1
    if lost >= LOST_LIMIT:
        reason = f"its process ended {lost} times without a result: {event.last}"
        return _close_with(state, Ruling("parked", reason, cause="lost", ended="lost"))
    reason = f"its process ended without a result: {event.last}"
    prompt = LOST_PROMPT if event.has_begun else attempt.prompt
    state = _move(state, "waiting", now, reason=reason, lost=lost, prompt=prompt,
                  spoken=attempt.spoken and event.is_known,
                  until=now + (2 ** attempt.lost if attempt.lost else 0))
    return Step(state, "", (("lost", f"{reason}; starting it again"),))


def _stall(state: TaskState, event: Stalled, now: float) -> Step:
    """Resume an agent that is stuck; the second time, the try has failed."""
    to = "failed" if state.attempt.stalls else "waiting"
    return _close_with(state, Ruling(to, f"stalled: {event.how}", cause="stalled",
                                     ended="stalled"))


def _expire(state: TaskState, event: Expired, now: float) -> Step:
    """End a try that has reached its deadline."""
    reason = f"deadline of {show_span(state.task.deadline)} reached"
    return _close_with(state, replace(after_failure(state, reason, "deadline"),
                                      ended="deadline"))


def _fail_api(state: TaskState, event: ApiFailed, now: float) -> Step:
    """Wait until the model answers again, or park the task."""
    if event.is_final or state.attempt.api_errors + 1 >= API_ERRORS_LIMIT:
        return _close_with(state, Ruling("parked", event.text, cause=event.cause,
                                         ended="api_error"))
    return _close_with(state, Ruling("waiting", f"the model did not answer: {event.text}",
                                     cause="api", ended="api_error"))


def _judge(state: TaskState, event: Checked, now: float) -> Step:
    """Close the try by its verdict, ask its question, or send the work back to the agent."""
    ruling = judge(state, event.work, event.code, event.output)
    if ruling.to == "asking":
        asked = Asked("prose", ask_in_words(event.work.said))
        return replace(_ask(state, asked, now), do=SLEEP)
    if ruling.to != "running":
        return _close_with(state, ruling)
    number = state.attempt.round + 1
    seconds = f" after {state.attempt.check_seconds:.1f} s" if ruling.cause == "check" else ""
    text = (f"{ruling.reason}{seconds}: sent back to the agent (round {number} of "
            f"{state.task.rounds})")
    if ruling.said:
        text += f". The check said: {ruling.said}"
    state = _move(state, "running", now, prompt=ruling.feedback, reason=ruling.reason, lost=0,
                  round=number)
    return Step(state, FEED_BACK, (("retrying", text),))


def _interrupt(state: TaskState, event: Interrupted, now: float) -> Step:
    """Close the task because a person stops it."""
    return _close_with(state, Ruling("stopped", ended="stopped"))


def _trouble(state: TaskState, event: Trouble, now: float) -> Step:
    """Park the task with the reason; if it is over, only tell it."""
    if state.is_over:
        return Step(state, "", (("note", event.reason),))
    return _close_with(state, Ruling("parked", event.reason, cause=event.cause,
                                     ended="refused"))


def _refuse(state: TaskState, event: Refused, now: float) -> Step:
    """Park the task without closing it, because even that fails."""
    state = _move(state, "parked", now, reason=event.reason, cause=event.cause, stopping=False)
    return Step(state, "", (("parked", event.reason),))


def _close_with(state: TaskState, ruling: Ruling) -> Step:
    """Return the step that closes a try with a ruling."""
    return Step(state, CLOSE, ruling=ruling)


def _close(state: TaskState, event: Closed, now: float) -> Step:
    """Put a ruling into effect, now that no process of the task runs."""
    ruling, words = event.ruling, event.words
    attempt, wish = state.attempt, state.wish
    if ruling.to == "stopped" and event.left:
        words = f"still running: {event.left}"
        ruling = Ruling("parked", words, cause="still-alive")
    state = change(state, ended=now, prompt="" if event.had_agent else attempt.prompt)
    changes: dict[str, Any] = {"reason": ruling.reason, "cause": ruling.cause}
    if wish.says and not wish.stopping and ruling.to in ("done", "review", "failed"):
        # The person said something after the agent's answer, so the task is not over yet.
        return Step(_move(state, "waiting", now, open=False, lost=0, failures=0), "",
                    (("waits", "to tell its agent what was said"),))
    if ruling.to != "waiting":
        state = _move(state, ruling.to, now, stopping=False, open=False, lost=0, **changes)
        return Step(state, "", ((ruling.to, words),))
    if ruling.climbs:  # another model has no memory of this session
        state = _move(state, "waiting", now, open=False, lost=0, failures=0, api_errors=0,
                      rung="", climbed=(*attempt.climbed, ruling.climbs), spoken=False,
                      left_at=now if ruling.leaves else attempt.left_at,
                      prompt=tell_climbed(state, ruling), **changes)
        return Step(state, "", (("moves up", f"from {ruling.climbs}: {words}"),))
    if ruling.cause == "stalled":
        changes.update(stalls=attempt.stalls + 1, prompt=CONTINUE_PROMPT)
    elif ruling.cause == "api":
        wait = API_WAIT_SECONDS[min(attempt.api_errors, len(API_WAIT_SECONDS) - 1)]
        changes.update(api_errors=attempt.api_errors + 1, until=now + wait,
                       prompt=CONTINUE_PROMPT)
    else:
        changes.update(_next_try(state, ruling, now))
    return Step(_move(state, "waiting", now, **changes), "",
                (("waits", f"for its next try: {words}"),))


def _next_try(state: TaskState, ruling: Ruling, now: float) -> dict[str, Any]:
    """Return the changes for a task whose try has failed and that has tries left."""
    wait = TRY_WAIT_SECONDS[min(state.attempt.failures, len(TRY_WAIT_SECONDS) - 1)]
    what = ruling.feedback or f"The last try failed: {ruling.reason}."
    return {"open": False, "failures": state.attempt.failures + 1, "until": now + wait,
            "prompt": f"{what}\n\nTry again."}


def _end_again(state: TaskState, event: EndedAgain, now: float) -> Step:
    """Note whether the second attempt has ended all processes."""
    to, cause = ("parked", "still-alive") if event.left else ("stopped", "")
    reason = f"still running: {event.left}" if event.left else event.reason
    return Step(_move(state, to, now, reason=reason, cause=cause, stopping=False), "",
                ((to, reason),))


# -- what a person wants --


def _say(state: TaskState, event: SayOrder, now: float) -> Step:
    """Keep a person's message; a task that is over continues because of it."""
    state = change(state, says=(*state.wish.says, event.text))
    if state.is_over:
        state = _move(state, "waiting", now, open=False, failures=0)
    return Step(state)


def _take_answer(state: TaskState, event: AnswerOrder, now: float) -> Step:
    """Keep a person's answer until it is delivered."""
    return Step(change(state, answer=event.answers))


def _stop(state: TaskState, event: StopOrder, now: float) -> Step:
    """Ask the task's thread to stop, or try again to end its processes."""
    if not state.is_over:
        return Step(change(state, stopping=True))
    if state.cause != "still-alive":
        return Step(state)
    return Step(change(state, stopping=True), END_AGAIN)


def _retry(state: TaskState, event: RetryOrder, now: float) -> Step:
    """Let a task that is over start its next try, with all its tries and rounds."""
    task = thaw_task(event.spec) or state.newer or state.task
    prompt = ""
    if event.fresh:
        state = plan_fresh(state)
    elif task.prompt != state.task.prompt and state.attempt.spoken:
        prompt = CHANGED_PROMPT.format(prompt=task.prompt)
    elif state.state != "done" and state.reason and state.cause not in ("", "lost"):
        prompt = f"The last try ended: {state.reason}. Try again."
    says = (*state.wish.says, event.say) if event.say else state.wish.says
    return Step(_move(state, "waiting", now, task=task, newer=None, open=False, failures=0,
                      lost=0, api_errors=0, returned=0, stopping=False, prompt=prompt, says=says,
                      forgotten=False))


def _accept(state: TaskState, event: AcceptOrder, now: float) -> Step:
    """Make the task done, or note why its branch could not be moved."""
    if not can_accept(state):
        return Step(state)
    if event.reason:
        return Step(replace(state, reason=event.reason, cause=event.cause))
    return Step(_move(state, "done", now, reason="accepted"), "", (("done", "accepted"),))


def _forget(state: TaskState, event: ForgetOrder, now: float) -> Step:
    """Hide the task."""
    return Step(change(state, forgotten=True))


def _detach(state: TaskState, event: DetachOrder, now: float) -> Step:
    """Let the task continue with the session that a person hands back."""
    return Step(_move(state, "waiting", now, prompt=ATTACHED_PROMPT, spoken=True, open=True))


def _leave_place(state: TaskState, event: GoneOrder, now: float) -> Step:
    """Note that a worktree was removed."""
    if event.git == state.place.git:
        return Step(change(state, prepared=False, git=""))
    # A workplace before a fresh start.
    return Step(replace(state, old=tuple(
        place for place in state.old if place.git != event.git)))


def _note_landing(state: TaskState, event: LandedOrder, now: float) -> Step:
    """Note where the work has landed."""
    if event.kept != state.place.kept:
        return Step(state)
    return Step(change(state, landed=event.into, reason=f"landed on {event.into}", cause=""))


def _evict(state: TaskState, event: EvictOrder, now: float) -> Step:
    """Note why the work did not land."""
    if event.kept != state.place.kept:
        return Step(state)
    return Step(replace(state, reason=f"did not land: {event.why}", cause="landing"))


def _return(state: TaskState, event: ReturnOrder, now: float) -> Step:
    """Continue in a new worktree, which begins with the work and with what has landed.

    The new base tells the task's own changes from those that have landed.
    """
    if event.kept != state.place.kept:
        return Step(state)
    attempt = state.attempt
    rung, climbed, returned = attempt.rung, attempt.climbed, attempt.returned + 1
    if event.climbs:
        rung, climbed, returned = "", (*climbed, rung), 1
    fresh = _move(plan_fresh(state), "waiting", now, base=event.tip, start=event.tip,
                  kept=event.begin, conflicts=event.files, told=state.wish.told, rung=rung,
                  climbed=climbed, returned=returned, reason=event.why, prompt=event.text)
    return Step(fresh, "", (("sent back", event.why),))


def _merge(state: TaskState, event: BranchMerged, now: float) -> Step:
    """Make the task done: a person has merged its branch."""
    return Step(_move(state, "done", now, reason="merged"), "",
                (("done", "its branch is merged"),))


def _remove(state: TaskState, event: Removed, now: float) -> Step:
    """Drop a task that left the task file before its first try."""
    if state.origin != "file" or state.attempt.tried:
        return Step(state)
    return Step(_move(state, "stopped", now, reason="removed from the task file",
                      forgotten=True), "", (("removed", "it is no longer in the task file"),))


def _revise(state: TaskState, event: Revised, now: float) -> Step:
    """Take the new form of a task: all of it before the first try, later only HOT_KEYS.

    A forgotten task starts over if it has changed in the file, or if it is typed again.
    """
    task = event.task
    if task == (state.newer or state.task) and not (state.wish.forgotten
                                                    and event.origin == "typed"):
        return Step(state)
    base = event.base or state.place.base
    if state.wish.forgotten:
        return Step(_move(plan_fresh(state), "waiting", now, task=task, newer=None,
                          origin=event.origin, first=state.attempt.tried, spent=0.0, base=base))
    if state.state == "waiting" and not state.place.start:
        return Step(change(state, task=task, newer=None, base=base))
    hot = replace(state.task, **{name: getattr(task, name) for name in HOT_KEYS})
    state = replace(state, task=hot, newer=task if task != hot else None)
    if not state.newer:
        return Step(state)
    return Step(state, "", (("note", "tasks.yaml changed. Only deadline, stall and check apply "
                             f"now; `subagent-fleet task retry {state.name}` takes the rest"),))


def plan_fresh(state: TaskState) -> TaskState:
    """Return a task that starts over with a new worktree, branch and session."""
    place, attempt = state.place, state.attempt
    return replace(state, place=Workplace(base=place.base, fresh=place.fresh + 1),
                   old=(*state.old, place) if place.git else state.old,
                   attempt=Attempt(attempt.tried, attempt.first, spent=state.total_at(state.at)),
                   wish=Wish())


# -- the table --

Arrow = tuple[tuple[str, ...], "Callable[[TaskState, Any, float], Step]"]
_AT_WORK = ("running", "asking", "checking")
_NOT_OVER = ("waiting", *_AT_WORK)

# For each event, the states in which it has a meaning, and the function that returns its result.
# Only a person leads out of a terminal state: by an order, a merge, or a change of the file.
ARROWS: Mapping[type[Event], Arrow] = {
    Begun: (("waiting",), _begin),
    Entered: (("parked", *_AT_WORK), _enter),
    Planned: (("running",), _plan),
    Ready: (("running",), _make_ready),
    Starting: (("running",), _prepare_start),
    Started: (("running",), _start),
    Resumed: (("running",), _resume),
    Spoke: (("running", "asking"), _take_result),
    Asked: (("running", "asking"), _ask),
    Answered: (("asking",), _answer),
    Told: (("running",), _tell),
    Slept: (("asking",), _sleep),
    Lost: (("running", "asking"), _lose),
    Stalled: (("running",), _stall),
    Expired: (("running",), _expire),
    Checked: (("checking",), _judge),
    ApiFailed: (("checking",), _fail_api),
    Interrupted: (_AT_WORK, _interrupt),
    Trouble: (STATES, _trouble),
    Refused: (_NOT_OVER, _refuse),
    Closed: (_NOT_OVER, _close),
    EndedAgain: (("parked",), _end_again),
    BranchMerged: (("review",), _merge),
    Removed: (("waiting",), _remove),
    Revised: (STATES, _revise),
    SayOrder: (STATES, _say),
    AnswerOrder: (("asking",), _take_answer),
    StopOrder: (STATES, _stop),
    RetryOrder: (TERMINAL_STATES, _retry),
    AcceptOrder: (("review", "parked"), _accept),
    ForgetOrder: (TERMINAL_STATES, _forget),
    DetachOrder: (("stopped",), _detach),
    GoneOrder: (STATES, _leave_place),
    LandedOrder: (("done",), _note_landing),
    EvictOrder: (("done",), _evict),
    ReturnOrder: (("done",), _return)}
