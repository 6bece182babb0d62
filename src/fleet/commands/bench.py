"""`bench`: measure what models can do."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.agree import ask_trust
from fleet.cli.live import LiveLine
from fleet.cli.rows import (
    CONFIG,
    JSON,
    LOOK,
    OUT,
    REPEAT,
    TRUST,
    Flag,
    command,
    name_of,
    type_again,
)
from fleet.cli.say import open_workspace, print_report
from fleet.commands.exam import EXAM_WORDS, hold_exam
from fleet.config.names import full_model_name
from fleet.plan.measured import BENCH_FILE
from fleet.start.constants import EXIT_OK, EXIT_PROBLEM, EXIT_USAGE
from fleet.start.errors import FleetError
from fleet.start.gate import VERSION
from fleet.steps.warming import tell_progress
from fleet.text.phrases import some_of
from fleet.trials.course import Course, today
from fleet.trials.kit import Subject
from fleet.views.measurements import find_chosen, keep_measurements, tell_measurements
from fleet.workspace.config import load_config, look_of
from fleet.world.child import run_together

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from fleet.config.sections import Fleet
    from fleet.plan.measured import Measurement
    from fleet.workspace.directory import Workspace
    from fleet.world.world import World


@command("bench", "measure what each model can do: speed, tool calls, context", CONFIG, OUT,
         Flag("--model", "only this one, of the file or of a machine", "MODEL",
              REPEAT, offers=("models",)),
         Flag("--quick", "ask fewer and shorter questions"),
         Flag("--exam", "let each model redo fixes from this repository's history"),
         *EXAM_WORDS, TRUST, JSON,
         group=LOOK, examples=("bench", "bench --quick --model heavy-coder",
                               "bench --exam --questions 20"), excludes=("exam quick",))
def cmd_bench(options: Namespace, world: World) -> int:
    fleet = load_config(world, options.config).fleet
    idle = [flag.name for flag in EXAM_WORDS if getattr(options, name_of(flag))]
    if idle and not options.exam:
        raise FleetError("usage", f"bench: {some_of(idle)}: for the exam only",
                         status=EXIT_USAGE, fix=type_again(options, exam=True))
    ask_trust(fleet, options, world)
    if options.exam:
        return hold_exam(fleet, options, world)
    courses = plan_courses(fleet, options, world)
    run_courses(open_workspace(options, world), courses)
    measured = [course.measurement for course in courses]
    if options.json:
        print_report(world, "bench", {"fleet": fleet.name, "measurements": measured})
    else:
        world.out(tell_measurements(measured, look_of(world)))
    return EXIT_PROBLEM if any(known.failure for known in measured) else EXIT_OK


def plan_courses(fleet: Fleet, options: Namespace, world: World) -> list[Course]:
    """Return a course for each model; two keys of the same model share one."""
    seed = world.token(4)
    courses: dict[tuple[str, str, int], Course] = {}
    for model, state, held in find_chosen(fleet, options, world):
        key = model.node, full_model_name(model.ollama_model), model.context
        if key in courses:
            continue
        node = fleet.nodes[model.node]
        course = Course(node, Subject(model, seed, options.quick))
        course.note(date=today(world), digest=held.digest,
                    versions={"subagent-fleet": VERSION, node.provider: state.version})
        if not state.online:
            course.give_up(state.why)
        courses[key] = course
    return list(courses.values())


def run_courses(workspace: Workspace, courses: Sequence[Course]) -> None:
    """Run courses, one at a time on each node; keep what was measured, however it ends."""
    world = workspace.world
    saved: list[Measurement] = []
    groups: dict[str, list[Course]] = {}  # by node: two at once would slow each other down
    for course in courses:
        groups.setdefault(course.node.name, []).append(course)
    jobs = {name: lambda group=group: [course.run(world) for course in group]
            for name, group in groups.items()}

    def save() -> None:
        measured = [course.measurement for course in courses]
        if measured != saved and any(known.is_worth_keeping for known in measured):
            saved[:] = measured
            keep_measurements(workspace, measured)

    try:
        with LiveLine(world) as line:
            for _ in run_together(world, jobs):
                save()
                line.show(tell_progress(courses, world.clock()))
    finally:
        cut_off = [course for course in courses if course.stage != "done"]
        for course in cut_off:
            course.give_up("interrupted")
        save()
        if cut_off and saved:
            world.err(f"what was measured is kept in {BENCH_FILE}\n")
