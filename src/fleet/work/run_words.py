"""The messages of `run`: what starts, what happens, and what to type next."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.say import tell
from fleet.config.task_file import LOGIN
from fleet.runs.see import see_tasks
from fleet.start.constants import EXIT_INTERRUPTED, EXIT_OK, EXIT_PROBLEM
from fleet.start.errors import FleetError
from fleet.start.record import replace
from fleet.tasks.events import Begun
from fleet.tasks.hints import RunOptions, plan_hints
from fleet.tasks.ladder import describe_homes, plan_ladder
from fleet.tasks.next import blockers_of, explain_wait, plan_starts
from fleet.tasks.step import step
from fleet.text.phrases import count_of, some_of
from fleet.text.width import width_of
from fleet.work.shown import format_hints, see_scene, tell_task
from fleet.work.typed import load_tasks
from fleet.workspace.config import look_of

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from fleet.config.sections import Fleet
    from fleet.runs.folder import Folder
    from fleet.tasks.spec import TaskPlan
    from fleet.tasks.state import TaskState
    from fleet.work.land import Lander
    from fleet.work.run_job import RunJob
    from fleet.world.world import World


def tell_events(folder: Folder, names: Iterable[str], options: Namespace
                ) -> Callable[[str, str, str], None]:
    """Return the function that prints events of tasks, in columns."""
    world = folder.world
    prefix = f"{world.split(folder.repository.main)[1]}/" if options.everywhere else ""
    width = max((width_of(prefix + name) for name in names), default=8)
    return lambda name, word, text: tell_task(world, prefix + name, word, text, width)


def watch_tasks(world: World, path: str, fleet: Fleet | None,
                most: int | None, options: Namespace) -> Callable[[], TaskPlan | None]:
    """Return the function that reads the task file again after a change; `most` is its `max:`.

    It leaves out a `max:` that has not changed, because one that was typed meanwhile counts
    until then. One that the run was started with counts to its end.
    """
    if path in ("", "-"):
        return lambda: None
    seen = world.changed_at(path)

    def reload() -> TaskPlan | None:
        nonlocal seen, most
        now = world.changed_at(path)
        if now in (0.0, seen):
            return None  # without the file, its last content still counts
        seen = now
        try:
            plan = load_tasks(world, path, fleet)
        except FleetError as error:
            first = (*error.findings, error.finding)[0]
            raise FleetError("invalid-config", f"{first.where or path}: {first.what}; "
                             "keeping the previous version") from None
        before = most
        most = plan.file.max
        if options.most or most == before:
            plan = replace(plan, file=replace(plan.file, max=None))
        return plan
    return reload


def tell_starts(job: RunJob) -> None:
    """Say how many tasks start now, why the others don't, and how to use other machines."""
    sight = see_tasks(job.folder, job.backing)
    tasks = {name: state for name, state in sight.tasks.items()
             if state.state != "waiting" or not job.only or name in job.only}
    starts = plan_starts(tasks, sight.limits, sight.now)
    held = [state for name, state in tasks.items() if state.state == "waiting"
            and name not in starts and not blockers_of(state, tasks)]
    if not held:
        return
    begun = {**tasks, **{name: step(tasks[name], Begun(rung), sight.now).state
                         for name, rung in starts.items()}}
    why = explain_wait(held[0], begun, sight.limits.after(starts), sight.now)
    start = "starts" if len(starts) == 1 else "start"
    wait = "waits" if len(held) == 1 else "wait"
    text = f"{count_of(starts, 'task')} {start} now; {len(held)} {wait} {why}."
    fleet = job.backing.fleet
    aliases = {rung for state in held for rung in sight.limits.rungs_of(state.name)}
    if fleet and len(aliases) == 1 and not any(state.task.agent for state in held):
        used = {model.node for model in fleet.models.values() if model.alias in aliases}
        others = [f"`--agent {name}` ({fleet.models[agent.model].node})"
                  for name, agent in fleet.agents.items()
                  if fleet.models[agent.model].node not in used]
        if others:
            text += f" To use other machines: {some_of(others, 3)}."
    tell(job.folder.world, f"{text}\n")


def suggest_after_stop(job: RunJob) -> list[str]:
    """Return what to type after a run was stopped, with all that it was asked."""
    tasks = job.folder.read_states()[0]
    words = job.folder.read_asked().words
    scene = see_scene(job.folder, {
        name: state for name, state in tasks.items()
        if not words or name in words or state.is_active}, lands=job.asked.land)
    return plan_hints(scene, "other", "run", "land")


def suggest_next(job: RunJob, tasks: Mapping[str, TaskState], *, is_alone: bool) -> list[str]:
    """Return what to type after a run; of several, nothing that is typed in a directory."""
    scene = see_scene(job.folder, tasks, lands=job.asked.land)
    return plan_hints(scene, "look", "retry", *(["land"] if is_alone else []))


def tell_homes(job: RunJob, tasks: Mapping[str, TaskState]) -> str:
    """Return where tasks with a ladder were done, by their receipts; "" without any."""
    fleet = job.backing.fleet
    meant = [state for state in tasks.values()
             if state.attempt.tried and len(plan_ladder(state.task, fleet).rungs) > 1]
    if not fleet or not meant:
        return ""
    done = []
    for state in meant:
        if state.state == "done":
            receipt = job.folder.read_receipt(state)
            rung = str(receipt.get("rung") or "")
            served = max(receipt.get("served") or [{}],
                         key=lambda row: int(row.get("requests") or 0))
            node = str(served.get("node") or rung)
            done.append((bool(receipt.get("climbed")), rung if rung == LOGIN else node))
    return describe_homes(done, len(meant))


def tell_none(jobs: Sequence[RunJob]) -> str:
    """Return why there is nothing to run: the tasks of the file may be forgotten."""
    forgotten = [name for job in jobs for name, state in job.folder.read_states()[0].items()
                 if state.wish.forgotten and state.origin == "file"]
    if not forgotten:
        return "No tasks."
    return (f"No tasks. Forgotten: {some_of(forgotten, 3)}. To try one again: "
            f"subagent-fleet task retry {forgotten[0]}")


def sum_up_run(jobs: Sequence[RunJob], stops: Sequence[str], world: World,
               landers: Sequence[Lander] = ()) -> int:
    """Print the results of the tasks, and what to type next; return the exit status."""
    meant = [job.find_meant() for job in jobs]
    shown = [state for tasks, _ in meant for state in tasks.values()]
    words = ["in review" if state.state == "review" else state.state for state in shown]
    counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    idle = "Nothing to do: " if shown and all(is_idle for _, is_idle in meant) else ""
    advice = [line for job, (tasks, _) in zip(jobs, meant) for line in (
        suggest_after_stop(job) if stops
        else suggest_next(job, tasks, is_alone=len(jobs) == 1))]
    homes = [tell_homes(job, tasks) for job, (tasks, _) in zip(jobs, meant)]
    ends = [lander.sum_up() for lander in landers]
    first = f"{'' if stops else idle}{counts}." if counts else tell_none(jobs)
    lines = [first, *filter(None, homes),
             *(line for lines, _ in ends for line in lines), *dict.fromkeys(advice)]
    world.out(format_hints(lines, look_of(world)))
    if stops:
        return EXIT_INTERRUPTED if stops[0] == "SIGINT" else EXIT_PROBLEM
    has_landed = all(landed for _, landed in ends)
    good = [has_landed and all(state.state in ("done", "review") for state in tasks.values())
            for tasks, _ in meant]
    for job, is_good in zip(jobs, good):
        if is_good and job.lock:
            job.folder.note_asked(RunOptions())
    return EXIT_OK if all(good) else EXIT_PROBLEM
