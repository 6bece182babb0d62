"""`bench --exam`: have models redo this repository's own fixes."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.agree import agree
from fleet.cli.live import LiveLine
from fleet.cli.rows import Flag, parse_count
from fleet.cli.say import open_workspace, print_report, render_report, tell
from fleet.config.names import full_model_name
from fleet.config.rules import RULES
from fleet.config.task_file import TaskSpec
from fleet.plan.measured import Measurement, find_measurement, tell_apart
from fleet.start.constants import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PROBLEM,
    EXIT_REFUSED,
    EXIT_USAGE,
    TIERS,
)
from fleet.start.errors import FleetError
from fleet.start.record import replace
from fleet.text.json import read_page
from fleet.text.phrases import count_of, first_line, join_words, show_span, some_of
from fleet.text.tables import format_pairs, format_table, format_words, wrap_text
from fleet.text.terminal import PLAIN, clean_line
from fleet.trials.exam import Exam, ExamPlan
from fleet.trials.questions import (
    EXAM_DEADLINE_SECONDS,
    EXAM_FILE,
    EXAM_OUTCOMES,
    Examinee,
    ExamPage,
    plan_result,
)
from fleet.views.measurements import find_chosen, keep_measurements
from fleet.work.backing import end_serving, need_key, plan_backing
from fleet.work.run_job import confine_tasks
from fleet.work.typed import (
    find_task_file,
    load_tasks,
    look_at_project,
    open_folder,
    open_tasks,
    parse_check,
)
from fleet.workspace.config import look_of
from fleet.workspace.records import read_measurements

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from fleet.config.sections import Fleet
    from fleet.runs.folder import Folder
    from fleet.text.terminal import Look
    from fleet.trials.questions import ExamResult
    from fleet.workspace.directory import Workspace
    from fleet.world.world import World


EXAM_WORDS = (
    Flag("--questions", "how many fixes to ask for; default: 10", "N",
         {"type": parse_count, "default": 0}),
    Flag("--times", "ask each question N times", "N", {"type": parse_count, "default": 0}),
    Flag("--check", "command that runs the tests", "COMMAND",
         {"type": parse_check, "dest": "task_check", "default": None}))


def hold_exam(fleet: Fleet, options: Namespace, world: World) -> int:
    """Find questions, ask them, and show the scores. Exit 1: not all could be asked."""
    folder = open_tasks(open_folder(world))
    workspace = open_workspace(options, world)
    plan = plan_exam(folder, fleet, options)
    examinees = find_examinees(fleet, options, world)
    show_exam(plan, examinees, options, world)
    folder.make()
    lock = world.hold(folder.place("exam.lock"))
    if not lock:
        raise FleetError("supervised", "an exam is already running in this repository",
                         status=EXIT_REFUSED, fix="wait until it ends")

    page = read_page(ExamPage, workspace.read(EXAM_FILE), "exam/1") or ExamPage()
    confinement = confine_tasks(folder, {"exam": plan.task})
    exam = Exam(folder, plan, page.sittings, lambda sittings: workspace.keep(
        EXAM_FILE, render_report("exam", {"sittings": sittings}).encode("ascii")), confinement)
    backing = replace(plan_backing(fleet, options, folder), confinement=confinement)
    try:
        world.on_stop(exam.stops.append)
        with LiveLine(world) as line:
            exam.find(lambda text: line.show(f"proving {text}"))
        reasons = list(exam.left.values())
        left = "; ".join(f"{why} ({reasons.count(why)})" for why in dict.fromkeys(reasons))
        tell(world, f"{count_of(exam.fixes, 'question')}. Commits left out: "
             f"{left or 'none'}.\n")
        for note in exam.notes:
            tell(world, f"Note: {note}\n")
        todo = exam.plan_todo(examinees)
        if todo and not exam.stops:
            backing = replace(backing, key=need_key(workspace, fleet))
            backing.serve()
            with LiveLine(world) as line:
                exam.sit(todo, lambda one: replace(backing, fleet=leave_alone(fleet, one)),
                         line.show)
    finally:
        end_serving(folder)
        lock.release()

    results = [plan_result(one, exam.sittings_of(one)) for one in examinees]
    keep_scores(workspace, fleet, examinees, results)
    if options.json:
        print_report(world, "exam", report_exam(fleet, exam, results))
    else:
        world.out(format_exam(exam, examinees, results, look_of(world)))
    if exam.stops:
        tell(world, "Stopped. The same command continues.\n")
        return EXIT_INTERRUPTED
    is_whole = exam.fixes and not exam.plan_todo(examinees)
    return EXIT_OK if is_whole else EXIT_PROBLEM


def plan_exam(folder: Folder, fleet: Fleet, options: Namespace) -> ExamPlan:
    """Return the plan of an exam, with the typed check, the task file's, or a usual one."""
    world = folder.world
    path = find_task_file(folder, options)
    usual = load_tasks(world, path, fleet).file.defaults if path else TaskSpec("")
    deadline = usual.deadline
    if deadline == TaskSpec("").deadline:
        deadline = EXAM_DEADLINE_SECONDS
    guess = look_at_project(world, folder.repository.top)
    for check, setup, source in (
            (RULES["check"].read(options.task_check), usual.setup, "typed"),
            (usual.check, usual.setup, world.split(path)[1]),
            (guess.check, usual.setup or guess.setup, f"guessed from {some_of(guess.seen, 3)}")):
        if check:
            task = TaskSpec("exam", check=check, setup=setup, deadline=deadline,
                            stall=usual.stall, tries=1, rounds=0, allow=usual.allow,
                            sandbox=usual.sandbox, sandbox_write=usual.sandbox_write)
            return ExamPlan(task, source, options.questions or 10, options.times or 1)
    raise FleetError("no-check", "no command is known that runs this project's tests",
                     status=EXIT_USAGE, fix="add it, such as --check 'make test'")


def find_examinees(fleet: Fleet, options: Namespace, world: World) -> list[Examinee]:
    """Return the models that can be asked now."""
    examinees: dict[tuple[str, str], Examinee] = {}
    for model, state, held in find_chosen(fleet, options, world):
        if state.online:
            key = model.alias, full_model_name(model.ollama_model)
            known = examinees.get(key, Examinee((), held.digest))
            examinees[key] = replace(known, models=(*known.models, model))
    if not examinees:
        raise FleetError("no-models", "no model of this fleet can be asked now",
                         fix="subagent-fleet status")
    return list(examinees.values())


def leave_alone(fleet: Fleet, examinee: Examinee) -> Fleet:
    """Return a fleet with only one model, so that no agent or tier uses another."""
    return replace(fleet, models={model.name: model for model in examinee.models}, agents={},
                   claude=dict.fromkeys(TIERS, examinee.models[0].name))


def show_exam(plan: ExamPlan, examinees: Sequence[Examinee], options: Namespace,
              world: World) -> None:
    """Show what will be run before it runs; a check that was not typed needs a yes."""
    sittings = plan.questions * plan.times
    *setup, check = map(clean_line, plan.commands)
    rows = [("Check", f"{check} ({plan.origin})"), *(("Setup", command) for command in setup)]
    for one in examinees:
        rows.append((one.name, f"up to {count_of(sittings, 'task')} on "
                     f"{some_of([model.node for model in one.models])}, "
                     f"{one.slots} at a time"))
    longest = max(sittings * plan.task.deadline / one.slots for one in examinees)
    look = look_of(world, "stderr")
    each, total = show_span(plan.task.deadline), show_span(longest)
    text = (wrap_text("The exam runs this repository's own commits, with your rights:\n",
                      look)
            + format_pairs(rows, look)
            + wrap_text(f"Each task may take {each}, all of them {total} at most. "
                        "Commit messages become prompts.\n", look))
    if plan.origin == "typed" and not setup or options.trust:
        world.err(text)
        return
    agree(world, text, "Run it?", FleetError(
        "unasked-check", f"the exam would run `{'; '.join([*setup, check])}`, which "
        "you did not type", fix="add --trust, or --check 'COMMAND'", status=EXIT_REFUSED))


def keep_scores(workspace: Workspace, fleet: Fleet, examinees: Sequence[Examinee],
                results: Sequence[ExamResult]) -> None:
    """Keep the scores for `recommend` and `init`, with the other measurements of the models."""
    measured = read_measurements(workspace)
    scored = []
    for examinee, result in zip(examinees, results):
        for model in examinee.models if result.score else ():
            endpoint = fleet.nodes[model.node].endpoint
            known = find_measurement(measured, endpoint, examinee.name)
            if not known or known.digest not in ("", examinee.digest):
                known = Measurement(model.node, endpoint, examinee.name, tokens=model.context)
            scored.append(replace(known, exam=result.score, digest=examinee.digest))
    if scored:
        keep_measurements(workspace, scored)


def format_exam(exam: Exam, examinees: Sequence[Examinee], results: Sequence[ExamResult],
                look: Look = PLAIN) -> str:
    """Return the score of each model, which models really differ, and each question's result."""
    rows = []
    for result in results:
        score = result.score
        if not score:
            continue
        low, high = score.interval
        failures = [f"{EXAM_OUTCOMES[word]} {count}"
                    for word, count in result.failures.items()]
        rows.append([result.model, f"{score.passed} of {score.asked}",
                     f"{100 * low:.0f} to {100 * high:.0f}",
                     f"{result.each_time} of {score.questions}",
                     show_span(result.seconds / score.asked), f"{result.input:,}",
                     f"{result.output:,}", ", ".join(failures) or "-"])
    if not rows:
        return "No model was asked anything.\n"
    headers = ["Model", "Passed", "Likely", "Each time", "Per task", "Tokens in",
               "Tokens out", "Failures"]
    text = format_table(headers, rows, look=look, right=("Tokens in", "Tokens out"),
                        spare=("Each time",))
    text += format_words(["Likely: how many of 100 such tasks it would pass."], look)
    for name, beaten, ties in tell_apart({one.model: one.score for one in results}):
        if beaten:
            text += format_words([f"{name} is better than {join_words(beaten)}."], look)
        if ties:
            text += format_words([f"Not told apart: {name} and {join_words(ties)}. "
                                  "Ask more --questions."], look)

    text += "\n" + format_questions(exam, examinees, look)
    return text + "".join(f"Not counted: {clean_line(trouble)}\n"
                          for trouble in exam.troubles)


def format_questions(exam: Exam, examinees: Sequence[Examinee], look: Look) -> str:
    """Return the result of each question, and the check's last words for those just asked."""
    rows = []
    for fix in exam.fixes:
        row = [fix.commit[:10], clean_line(first_line(fix.message))[:60]]
        for examinee in examinees:
            words = ", ".join(EXAM_OUTCOMES[one.outcome] for one in exam.sittings_of(examinee)
                              if one.commit == fix.commit)
            said = exam.said.get((fix.commit, examinee.name))
            row.append(f"{words}: {said}" if said else words)
        rows.append(row)
    return format_table(["Commit", "Question", *(one.name for one in examinees)], rows,
                        look=look)


def report_exam(fleet: Fleet, exam: Exam, results: Sequence[ExamResult]) -> dict[str, object]:
    """Return what `bench --exam --json` prints."""
    commits = [fix.commit for fix in exam.fixes]
    apart = [{"model": name, "beats": beaten, "ties": ties}
             for name, beaten, ties in tell_apart({one.model: one.score for one in results})]
    return {"fleet": fleet.name, "check": exam.plan.task.check, "questions": commits,
            "left": exam.left, "models": results, "told_apart": apart,
            "sittings": [one for one in exam.sittings if one.commit in commits],
            "not_counted": exam.troubles}
