"""Which models may do a task, and which comes next after one has failed."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.config.address import host_of, is_private
from fleet.config.names import billions, lacks_tools, leaves_house
from fleet.config.task_file import LOGIN
from fleet.plan.roles import MAIN_CONTEXT_TOKENS
from fleet.start.record import Record, replace
from fleet.tasks.spec import models_by_name, plan_alias
from fleet.tasks.verdict import Ruling

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fleet.config.sections import Fleet
    from fleet.config.task_file import TaskSpec
    from fleet.tasks.state import TaskState


# A rung is the alias of a model, or LOGIN: the coder's own login. A ladder lists the rungs of
# a task, the first to fail first. Example: `models: [small, heavy, login]`. `small` is busy, so
# the task starts on `heavy`; its check fails there, so it moves up to `login`, in the same
# worktree with the same changes. It never *starts* on a model outside the house because the
# others are busy: only a failure leads there.


class Ladder(Record):
    """The rungs of a task, from the first that may fail to the last."""

    rungs: tuple[str, ...] = ("",)
    is_written: bool = True  # in the task file; if not, the strongest free model is taken first

    def above(self, failed: Iterable[str]) -> tuple[str, ...]:
        """Return the rungs above all of those that have failed."""
        places = [self.rungs.index(rung) for rung in failed if rung in self.rungs]
        return self.rungs[max(places, default=-1) + 1:]


def plan_ladder(task: TaskSpec, fleet: Fleet | None) -> Ladder:
    """Return the rungs of a task.

    If the task names no model and has a check, every model at home that calls tools takes part.
    Without a check, only the main tier does: nothing would tell a weak answer from a good one.
    """
    if not isinstance(task.coder, str):
        return Ladder()
    if task.models and task.talks:
        known = models_by_name(fleet) if fleet else {}
        rungs = [known[name].alias if name in known else name for name in task.models]
        return Ladder(tuple(dict.fromkeys(rungs)))
    main = plan_alias(task, fleet)
    if not (fleet and task.talks and task.check) or task.agent or task.model:
        return Ladder((main,))

    able = [model for model in fleet.models.values()
            if model.context >= MAIN_CONTEXT_TOKENS and not lacks_tools(model.ollama_model)
            and not is_away(model.alias, fleet)]
    # The model that a person chose for the main tier counts as the strongest, whatever its size.
    able.sort(key=lambda model: (model.alias == main, billions(model.ollama_model),
                                 model.context))
    return Ladder(tuple(dict.fromkeys(model.alias for model in able)) or (main,), False)


def is_away(rung: str, fleet: Fleet | None) -> bool:
    """Tell whether a rung sends work out of the house."""
    if fleet is None or rung == LOGIN:
        return True
    return any(model.cloud or leaves_house(model.ollama_model)
               or not is_private(host_of(fleet.nodes[model.node].endpoint))
               for model in fleet.models.values() if model.alias == rung)


def plan_rungs(state: TaskState, fleet: Fleet | None) -> tuple[str, ...]:
    """Return the rungs on which a task may start now, the best first."""
    attempt = state.attempt
    ladder = plan_ladder(state.task, fleet)
    if attempt.rung in ladder.rungs and (state.is_active or attempt.open or attempt.spoken):
        return (attempt.rung,)
    rungs = ladder.above(attempt.climbed) or ladder.rungs[-1:]
    at_home = [rung for rung in rungs if not is_away(rung, fleet)]
    if not at_home:
        return rungs[:1]
    return tuple(at_home if ladder.is_written else at_home[::-1])


def place_task(state: TaskState, fleet: Fleet | None) -> tuple[TaskSpec, Fleet | None]:
    """Return a task with the model of its rung, and the fleet that serves it there."""
    rung = state.attempt.rung
    if rung == LOGIN:
        return replace(state.task, model=None), None
    if rung and not state.task.agent:
        return replace(state.task, model=rung), fleet
    return state.task, fleet


# Failures that another model may avoid. No model helps against the others, such as a missing
# program.
CLIMBING_CAUSES = ("check", "diff", "coder", "deadline", "stalled", "too-large")


def plan_climb(state: TaskState, ruling: Ruling, fleet: Fleet | None, *,
               away_left: int) -> Ruling:
    """Return the ruling on a failed try: the task moves up its ladder if it can.

    `away_left` is how many tasks may still leave the house today.
    """
    is_final = ruling.to in ("failed", "parked") or ruling.cause != "stalled"
    if ruling.cause not in CLIMBING_CAUSES or not is_final:
        return ruling
    attempt = state.attempt
    failed = attempt.rung or plan_rungs(state, fleet)[0]
    rungs = plan_ladder(state.task, fleet).above((*attempt.climbed, failed))
    if not rungs:
        return ruling
    leaves = not is_away(failed, fleet) and all(is_away(rung, fleet) for rung in rungs)
    if leaves and away_left < 1:
        return replace(ruling, reason=f"{ruling.reason}; `cloud_limit` keeps it off "
                       f"{rungs[0]} today")
    return replace(ruling, to="waiting", climbs=failed, leaves=leaves)


CLIMBED_PROMPT = (
    "Another model has worked on this task in this worktree, and has not finished it. Its "
    "changes are in the files; `git diff {base}` shows them. Keep what is good and finish the "
    "task.\n\n{words}")


def tell_climbed(state: TaskState, ruling: Ruling) -> str:
    """Return what the next model is told about the work of the model before."""
    words = ruling.feedback or f"It ended: {ruling.reason}."
    return CLIMBED_PROMPT.format(base=state.place.base[:12], words=words)


def describe_homes(done: Iterable[tuple[bool, str]], total: int) -> str:
    """Return where tasks were done: at home, after moving up, by a person's login.

    `done` has an entry for each finished task: whether it moved up, and the rung it ended on.
    """
    places: dict[str, int] = {}
    stayed = by_login = 0
    for has_moved, where in done:
        if where == LOGIN:
            by_login += 1
        elif has_moved:
            places[where] = places.get(where, 0) + 1
        else:
            stayed += 1
    words = [f"{stayed} of {total} done at home"]
    words += [f"{count} after moving up to {where}" for where, count in places.items()]
    if by_login:
        words.append(f"{by_login} by your login")
    return ", ".join(words) + "."
