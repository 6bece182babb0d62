"""`task add`, `say`, `answer`, `stop`, `retry`, `accept`, `forget`."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.rows import CONFIG, TRUST, WORK, YES, Flag, command
from fleet.config.rules import RULES
from fleet.runs.agent import shorten
from fleet.runs.see import see_states
from fleet.speech.claude_stream import plan_answers, questions_in
from fleet.start.constants import EXIT_OK, EXIT_PROBLEM, EXIT_USAGE
from fleet.start.errors import FleetError
from fleet.start.record import replace
from fleet.tasks.rows import find_twins
from fleet.tasks.state import can_accept, freeze
from fleet.text.phrases import count_of, some_of
from fleet.text.tables import format_pairs
from fleet.work.backing import end_serving
from fleet.work.orders import carry_out, match_tasks, tell_outcomes
from fleet.work.shown import find_task, see_scene, tell_task
from fleet.work.typed import (
    MAYBE_TASK,
    NAMED_TASK,
    TASK_FILE,
    TASK_PATTERNS,
    TASK_WORDS,
    know_tasks,
    open_folder,
    open_tasks,
    order_of,
    parse_check,
    plan_typed_tasks,
    refuse_unquoted,
)
from fleet.workspace.config import look_of

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import Any

    from fleet.runs.folder import Folder
    from fleet.tasks.state import TaskState
    from fleet.work.typed import KnownTasks
    from fleet.world.world import World


@command("task add", "add a task to the queue; several as NAME:PROMPT",
         Flag("texts", "what to do; several texts as NAME:PROMPT", "PROMPT",
              {"nargs": "+", "default": []}),
         *TASK_WORDS, TASK_FILE, CONFIG, TRUST, group=WORK,
         examples=("task add 'fix the login bug' --check 'make test'",
                   "task add 'a:try it with sqlite' 'b:try it with postgres'"))
def cmd_task_add(options: Namespace, world: World) -> int:
    folder = open_tasks(open_folder(world, begins=True))
    refuse_unquoted(options.texts, (), options, "texts")
    tasks = plan_typed_tasks(options.texts, options, know_tasks(folder, options))
    is_live = bool(folder.holder())
    carried = carry_out(folder, [{**order_of(task, folder), "handed": is_live}
                                 for task in tasks], options)
    rows = [(task.name, "added", shorten(task.prompt or "")) for task in tasks]
    return tell_outcomes(rows, folder, carried)


@command("task say", "tell an agent something: now, or when it starts",
         NAMED_TASK, Flag("words", "in your words", "TEXT", {"nargs": "+", "default": []}),
         group=WORK, examples=("task say parser 'use the stdlib only'",))
def cmd_task_say(options: Namespace, world: World) -> int:
    options.patterns = [options.task]
    before = open_folder(world).read_states()[0].get(options.task)
    status = order_tasks("say", options, world,
                         lambda folder, state: {"text": " ".join(options.words)})
    if before and before.is_over:
        world.err(f"{before.name} was {before.state}; with this it starts again, from its own "
                  "last work.\n")
    folder = open_folder(world)
    if not folder.holder():
        again = see_scene(folder, {}, names=[options.task]).again
        world.err(f"It will be delivered at the next `{again}`.\n")
    return status


@command("task answer", "answer what agents ask; without words, show the questions",
         MAYBE_TASK,
         Flag("words", "a number or your words, one for each question", "ANSWER",
              {"nargs": "*", "default": []}), group=WORK,
         examples=("task answer", "task answer jwt-a 1"))
def cmd_task_answer(options: Namespace, world: World) -> int:
    folder = open_folder(world)
    name = options.task
    if not name:
        return show_questions([state for state in see_states(folder)[0].values()
                               if state.state == "asking"], world)
    state = find_task(folder, name, "task answer")
    if state.state != "asking":
        raise FleetError("no-question", f"{name} has no open question (it is {state.state})",
                         fix=f"subagent-fleet tasks {name}" if state.is_over
                         else f"subagent-fleet task say {name} TEXT")
    if not options.words:
        return show_questions([state], world)
    open_tasks(folder)
    request = state.wish.question.get("request") or {}
    answers = plan_answers(request, options.words)
    if not answers:
        asked = questions_in(request)
        what = f"{name} asks {count_of(asked, 'question')}: one word or quoted text for each"
        if len(asked) == 1:
            what = f"`{options.words[0]}` is not one of the {len(asked[0][1])} choices"
        raise FleetError("bad-answer", f"task answer: {what}", status=EXIT_USAGE,
                         fix=f"subagent-fleet task answer {name}")
    carried = carry_out(folder, [{"do": "answer", "task": name, "answers": answers}], options)
    return tell_outcomes([(name, "answered", ", ".join(answers.values()))], folder, carried)


def show_questions(states: Sequence[TaskState], world: World) -> int:
    """Print the open questions, with a number for each choice."""
    asked = {state.name: questions_in(state.wish.question.get("request") or {})
             for state in states}
    if not asked:
        world.out("No task has an open question.\n")
    look = look_of(world)
    for name, questions in asked.items():
        for question, labels in questions:
            tell_task(world, name, "asks", question)
            world.out(format_pairs([(f"  {number}", label)
                                    for number, label in enumerate(labels, 1)], look))
        word = "1" if questions[0][1] else "'your answer'"
        world.out(f"  `subagent-fleet task answer {name} {word}`\n")
    return EXIT_OK


def order_tasks(command: str, options: Namespace, world: World,
                words: Callable[[Folder, TaskState], Mapping[str, Any]] = lambda *_: {}
                ) -> int:
    """Send an order to the tasks that were named, and print the result for each.

    `words` returns the other keys of the order.
    """
    folder = open_tasks(open_folder(world))
    states = match_tasks(folder, options, f"task {command}")
    refused = {state.name: explain_refusal(command, state) for state in states}
    orders = {state.name: {"do": command, "task": state.name, **words(folder, state)}
              for state in states if not refused[state.name]}
    carried = carry_out(folder, list(orders.values()), options)
    rows = []
    status = EXIT_OK
    for state in states:
        word, text, is_good = state.state, refused[state.name], command == "stop"
        if not text:
            word, text, is_good = describe_outcome(
                orders[state.name], state, carried.tasks.get(state.name, state))
        rows.append((state.name, word, text))
        if not is_good:
            status = EXIT_PROBLEM
    return tell_outcomes(rows, folder, carried, starts=command == "retry") or status


def explain_refusal(command: str, state: TaskState) -> str:
    """Return why a task can't take an order, and what to type; "" if it can."""
    name = state.name
    if command == "say":
        return ""
    if command == "stop":
        return "already over" if state.is_over and state.cause != "still-alive" else ""
    if not state.is_over:
        step = "first: subagent-fleet task stop" if command == "forget" else \
            "see how it goes: subagent-fleet tasks"
        return f"not over yet; {step} {name}"
    if command != "accept" or can_accept(state):
        return ""
    if state.state != "parked" and (state.state == "done" or not state.place.diff.get("files")):
        return "nothing to accept"
    return "only work that waits for a review can be accepted; try again: " \
           f"subagent-fleet task retry {name}"


def describe_outcome(order: Mapping[str, Any], state: TaskState, now: TaskState
                     ) -> tuple[str, str, bool]:
    """Return the result of an order: a word, a text, and whether that is good."""
    command = order["do"]
    if command == "say":
        text, is_live = shorten(order["text"]), state.has_agent or state.asleep
        if is_live and not state.task.talks:
            text += (f" ({state.task.program} can't be told while it runs: "
                     "its next try gets this)")
        is_told = is_live and state.task.talks and now != state and not now.wish.says
        return "told" if is_told else "saved", text, True
    if command == "retry":
        if now.state == "waiting":
            return "waits", "for its next try", True
        return now.state, now.reason, now.at != state.at
    if command == "forget":
        if now.wish.forgotten:
            return "forgotten", "", True
        return now.state, "not over any more, so it stays", False
    if command == "stop":
        text = now.reason if now.is_over else "could not be stopped in time"
        return now.state, text, now.is_over and now.cause != "still-alive"
    text = f"branch {now.place.branch}" if now.state == "done" else now.reason
    if now.state == "done" and any(now.attempt.checks[-1:]):
        text += f"; its check had failed (exit {now.attempt.checks[-1]})"
    return now.state, text, now.state == "done"


@command("task stop", "stop the tasks' agents and their processes",
         TASK_PATTERNS, group=WORK, examples=("task stop parser", "task stop 'jwt-*'"))
def cmd_task_stop(options: Namespace, world: World) -> int:
    folder = open_tasks(open_folder(world))
    for name in drop_says(folder, [state.name for state in match_tasks(
            folder, options, "task stop") if state.is_over]):
        world.err(f"{name} was to start again with what you said; now it does not.\n")
    status = order_tasks("stop", options, world)
    if not folder.holder() and end_serving(folder):
        world.err("Stopped the gateway that was started for them.\n")
    return status


def drop_says(folder: Folder, names: Collection[str]) -> list[str]:
    """Take back what was said to tasks that are over, before any `run` has heard it."""
    dropped = []
    lock = folder.world.hold(folder.place("lock")) if names and folder.run else None
    if lock:  # else a `run` is active, and takes each order at once
        for identity, order in folder.read_orders():
            if order.get("do") == "say" and order.get("task") in names:
                folder.world.remove(folder.place("inbox", identity))
                dropped.append(str(order["task"]))
        lock.release()
    return [*dict.fromkeys(dropped)]


@command("task retry", "try finished tasks again, as the task file describes them now",
         TASK_PATTERNS, Flag("--say", "also tell the agent this", "TEXT", {"default": ""}),
         Flag("--fresh", "start over with a new worktree, branch and session"),
         Flag("--check", "another check, for tasks that are not in the task file", "COMMAND",
              {"type": parse_check, "default": None}), TASK_FILE,
         group=WORK, examples=("task retry parser", "task retry parser --say 'keep it short'",
                               "task retry 'jwt-*' --fresh"))
def cmd_task_retry(options: Namespace, world: World) -> int:
    known: list[KnownTasks] = []  # read only once, because standard input can't be read again

    def words(folder: Folder, state: TaskState) -> dict[str, Any]:
        spec = None
        if state.origin == "file":
            if not known:
                known.append(know_tasks(folder, options, needs_fleet=False))
            spec = known[0].plan.tasks.get(state.name)
        if options.check is not None:
            if spec:
                raise FleetError(
                    "usage", f"task retry: --check: {state.name} is in the task file",
                    fix=f"write `check:` below `{state.task.group}:` in {known[0].path}, then "
                        f"`subagent-fleet task retry {state.name}`", status=EXIT_USAGE)
            spec = replace(state.newer or state.task, check=RULES["check"].read(options.check))
        return {"fresh": options.fresh, "say": options.say, "spec": freeze(spec)}
    return order_tasks("retry", options, world, words)


@command("task accept", "mark tasks as done and commit their changes",
         TASK_PATTERNS, replace(YES, note="also drop the other twins"), group=WORK,
         examples=("task accept parser", "task accept jwt-b --yes"))
def cmd_task_accept(options: Namespace, world: World) -> int:
    folder = open_tasks(open_folder(world))
    chosen = match_tasks(folder, options, "task accept")
    states = see_states(folder)[0]
    names = [state.name for state in chosen]
    twins = {twin.name: twin for state in chosen for twin in find_twins(states, state)
             if twin.name not in names}
    settled = [state for state in chosen if state.state == "done" and find_twins(states, state)]
    options.patterns = [name for name in names if name not in {one.name for one in settled}]
    status = order_tasks("accept", options, world) if options.patterns else EXIT_OK
    for state in settled:
        tell_task(world, state.name, "done", f"branch {state.place.branch}")
    if twins and status == EXIT_OK and (options.yes or world.confirm(
            f"Drop {some_of([*twins], 5)}? Their branches and refs stay.")):
        options.patterns = [*twins]
        if any(not twin.is_over for twin in twins.values()):
            order_tasks("stop", options, world)
        status = order_tasks("forget", options, world)
    return status


@command("task forget", "drop finished tasks from every list; keep their branches",
         TASK_PATTERNS, group=WORK, examples=("task forget 'jwt-*'",))
def cmd_task_forget(options: Namespace, world: World) -> int:
    return order_tasks("forget", options, world)
