"""What a task file may say, and which model runs a task."""
from __future__ import annotations

import graphlib
import string
from typing import TYPE_CHECKING

from fleet.config.check import Checker, finding_order
from fleet.config.keys import section_schema
from fleet.config.task_file import LOGIN, TaskFile
from fleet.plan.routes import plan_tiers
from fleet.start.errors import FleetError
from fleet.start.record import Record, replace

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from typing import Any

    from fleet.config.sections import Fleet, Model
    from fleet.config.task_file import TaskSpec
    from fleet.start.errors import Finding
    from fleet.tasks.state import TaskState
    from fleet.text.yaml import Document


# This room decides. Given a task file, the state of each task and the output of its agent, it
# returns which task starts next, what an agent is answered, and the verdict. `runs/supervisor`
# asks here, writes the step down, and only then carries it out.


# A change of these keys applies to running tasks at once; a change of others needs a retry.
HOT_KEYS = ("deadline", "stall", "check")
MODEL_KEYS = {"agent", "model", "models"}  # a task has at most one of them


class TaskPlan(Record):
    """A task file that was read: each task with its defaults, and the keys for all tasks."""

    tasks: dict[str, TaskSpec]
    file: TaskFile
    origins: dict[str, dict[str, str]]  # by task: {key: where it is in the file}


def find_name(name: str, names: Iterable[str]) -> str:
    """Return the name that a disk which ignores case takes for this one; "" if there is none."""
    return next((other for other in names if other.lower() == name.lower()), "")


def is_another(state: TaskState, task: TaskSpec, origin: str) -> bool:
    """Tell whether a task of the file has the name of a different task that was typed before."""
    return (origin == "file" and state.origin == "typed" and not state.wish.forgotten
            and task.prompt != state.task.prompt)


def check_tasks(document: Document, fleet: Fleet | None = None, others: Collection[str] = ()
                ) -> tuple[TaskPlan | None, list[Finding]]:
    """Return (TaskPlan, []) for a valid file, or (None, every problem).

    `others` are existing tasks, which `after` may name, too.
    """
    check = Checker(document)
    last = []
    plan = None
    try:
        if document.value is None:
            check.error("empty-tasks", (), "is empty; it needs `tasks:`",
                        fix="write `tasks:`, below it a name, below that `prompt:`")
        else:
            plan = _plan_tasks(check, fleet, others)
    except FleetError as error:  # too many
        last = [error.finding]
    if check.findings:
        return None, sorted(check.findings, key=finding_order) + last
    return plan, []


def _plan_tasks(check: Checker, fleet: Fleet | None,
                others: Collection[str]) -> TaskPlan | None:
    """Return every task with its defaults; each twin is a task of its own."""
    tree = check.document.value
    file = check.section(TaskFile, (), tree)
    if check.findings:
        return None
    shared = tree.get("defaults") or {}
    plan = TaskPlan({}, file, {})
    branches: list[str] = []
    for name, task in file.tasks.items():
        own = tree["tasks"][name] or {}
        # A task that names an agent gets no default model, and the other way around.
        replaced = MODEL_KEYS if own.keys() & MODEL_KEYS else set()
        taken = shared.keys() - own.keys() - replaced
        places = {**{word: ("defaults", word) for word in taken},
                  **{word: ("tasks", name, word) for word in own}}
        where = {word: check.document.locate(place)[0] for word, place in places.items()}
        merged = replace(task, **{word: getattr(file.defaults, word) for word in taken})
        for twin in twins_of(merged):
            if twin.name in plan.tasks or (twin.name != name and twin.name in file.tasks):
                check.error("two-tasks", ("tasks", name),
                            f"`times:` makes a second `{twin.name}`",
                            fix="give one of them another name")
            other = find_name(twin.name, plan.tasks)
            if other not in ("", twin.name):
                check.error("two-tasks", ("tasks", name), f"`{twin.name}` and `{other}` differ "
                            "only in case", fix="give one of them another name")
            branch = twin.branch or f"run/{twin.name}"
            other = find_name(branch, branches)
            if other not in ("", branch) and not find_name(twin.name, plan.tasks):
                check.error("two-branches", ("tasks", name), f"the branches `{branch}` and "
                            f"`{other}` differ only in case",
                            fix="give one of them another `branch:`")
            branches.append(branch)
            plan.tasks[twin.name] = twin
            plan.origins[twin.name] = where
    for task in plan.tasks.values():
        _check_task(check, plan, task, fleet, others)
    if not check.findings:
        _check_order(check, plan)
    return plan


def twins_of(task: TaskSpec) -> list[TaskSpec]:
    """Return a task as many times as `times` says, each under its own name."""
    if task.times == 1:
        return [task]
    if isinstance(task.times, int):
        return [replace(task, name=f"{task.name}-{letter}")
                for letter in string.ascii_lowercase[:task.times]]
    return [replace(task, name=f"{task.name}-{letter}", agent=None, model=None, models=(model,))
            for letter, model in zip(string.ascii_lowercase, task.times)]


def _check_task(check: Checker, plan: TaskPlan, task: TaskSpec, fleet: Fleet | None,
                others: Collection[str]) -> None:
    """Report how the values of a task contradict each other; once for all its twins."""
    path = ("tasks", task.group)
    for is_wrong, slug, word, what, fix in (
            (not (task.prompt or task.prompt_file), "missing-key", "prompt", "is missing",
             "add `prompt:` (what to do) or `prompt_file:`"),
            (task.prompt and task.prompt_file, "two-prompts", "prompt_file",
             "is there beside `prompt:`; keep one of them", "remove one of them"),
            (task.agent and task.model, "two-models", "model",
             "is there beside `agent:`, which has a model", "remove one of them"),
            (task.models and (task.agent or task.model), "two-models", "models",
             "is there beside another model", "remove one of them"),
            (task.models and not task.talks, "bad-models", "models",
             "is for Claude Code alone, not for another `coder:`", "remove it"),
            (task.times == (), "bad-value", "times", "is an empty list", "write `times: 2`"),
            (task.coder == (), "bad-value", "coder", "is an empty list",
             "write `coder: claude`"),
            (task.base == "after" and len(task.after) != 1, "bad-base", "base",
             "is `after`, which needs exactly one task in `after:`",
             "name a branch or a commit")):
        if is_wrong:
            check.error(slug, (*path, word), what, fix=fix)

    known = dict.fromkeys([*plan.tasks, *(one.group for one in plan.tasks.values()), *others])
    for place, other in enumerate(task.after):
        check.reference((*path, "after", place), other, known, "task")
    if fleet:
        own = check.document.value["tasks"][task.group] or {}
        models = models_by_name(fleet)
        rungs = dict.fromkeys((*models, LOGIN))

        def refer(word: str, names: Iterable[str], records: Mapping[str, Any],
                  kind: str) -> None:
            # Where the file has it: below the task, or below `defaults`.
            place = (*(path if word in own else ("defaults",)), word)
            for number, name in enumerate(names):
                where = place if word == kind else (*place, number)
                check.reference(where, name, records, kind)

        refer("agent", filter(None, [task.agent]), fleet.agents, "agent")
        refer("model", filter(None, [task.model]), models, "model")
        if isinstance(task.times, tuple):
            refer("times", task.times, rungs, "model")
        else:
            refer("models", task.models, rungs, "model")


def _check_order(check: Checker, plan: TaskPlan) -> None:
    """Report a cycle of `after`, with the lines of the tasks in it."""
    edges = {name: expand_names(task.after, plan.tasks) for name, task in plan.tasks.items()}
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        groups = [plan.tasks[name].group for name in reversed(error.args[1])]
        lines = []
        for group in dict.fromkeys(groups):
            where, _ = check.document.locate(("tasks", group, "after"))
            lines.append(f"line {where.split(':')[-2]}")
        check.error("task-cycle", ("tasks", groups[-2], "after"),
                    f"forms a cycle: {' → '.join(groups)} ({', '.join(lines)})",
                    fix=f"remove `{groups[-1]}` from it")


def expand_names(names: Iterable[str], tasks: Mapping[str, TaskSpec]) -> tuple[str, ...]:
    """Return task names, with the name of each group replaced by those of its twins."""
    return tuple(one for name in names for one in (
        [name] if name in tasks
        else [twin.name for twin in tasks.values() if twin.group == name] or [name]))


def render_tasks_schema() -> dict[str, Any]:
    """Return the JSON Schema of a task file, made from the records that check it."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "subagent-fleet tasks", **section_schema(TaskFile)}


# -- which model runs a task --


def models_by_name(fleet: Fleet) -> dict[str, Model]:
    """Return the models that a task can name, by name and by alias."""
    aliases = {model.alias: model for model in fleet.models.values()}
    return {**fleet.models, **aliases}


def plan_alias(task: TaskSpec, fleet: Fleet | None) -> str:
    """Return the alias that a task's requests ask for; "" if they don't go to the fleet."""
    if fleet is None or not isinstance(task.coder, str):
        return ""
    if task.talks and task.agent in fleet.agents:
        return fleet.models[fleet.agents[task.agent].model].alias
    if task.talks and task.model:
        model = models_by_name(fleet).get(task.model)
        return model.alias if model else task.model
    return fleet.models[plan_tiers(fleet)["main"]].alias


def plan_slots(fleet: Fleet | None) -> dict[str, int]:
    """Return how many tasks each alias can serve at the same time."""
    slots: dict[str, int] = {}
    for model in (fleet.models.values() if fleet else ()):
        slots[model.alias] = slots.get(model.alias, 0) + model.max_parallel
    return slots
