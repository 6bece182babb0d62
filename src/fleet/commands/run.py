"""`run`: run tasks."""
from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from fleet.cli.rows import CONFIG, OUT, TASK_NAMES, TRUST, WORK, Flag, command, parse_count
from fleet.cli.say import tell
from fleet.runs.see import see_states
from fleet.start.constants import EXIT_OK, EXIT_PROBLEM, EXIT_REFUSED, EXIT_USAGE
from fleet.start.errors import FleetError
from fleet.start.record import replace
from fleet.text.phrases import count_of
from fleet.text.terminal import clean_line
from fleet.work.land import Lander
from fleet.work.orders import STOP_WAIT_SECONDS, explain_no_answer
from fleet.work.run_job import RunJob, tell_trouble
from fleet.work.run_words import sum_up_run, tell_starts
from fleet.work.typed import ADD_A_TASK, TASK_FILE, TASK_WORDS, find_folders
from fleet.world.places import Tail

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Sequence

    from fleet.runs.folder import Folder
    from fleet.world.world import World


@command("run", "run tasks in parallel, each in its own worktree",
         Flag("words", "only these tasks, or new ones: NAME:PROMPT, or a quoted prompt",
              "TASK", {"nargs": "*", "default": []}, offers=TASK_NAMES), TASK_FILE,
         *TASK_WORDS,
         Flag("--max", "run at most N agents at once; also changes an active `run`", "N",
              {"type": parse_count, "default": 0, "dest": "most"}),
         Flag("--detach", "work in the background"),
         Flag("--land", "merge what is done, check it as a whole, move your branch"),
         Flag("--keep-going", "wait for more tasks when nothing is left to do"),
         Flag("--all", "in every repository with tasks", "", {"dest": "everywhere"}),
         CONFIG, OUT, TRUST, group=WORK,
         examples=("run", "run 'a:fix the login' 'b:add tests' --check 'make test'",
                   "run --max 2"), excludes=("everywhere task_file",))
def cmd_run(options: Namespace, world: World) -> int:
    """Run tasks until none can continue. Exit 1: a task has failed, or waits for a person."""
    is_new = any(" " in word.strip() or ":" in word for word in options.words)
    if options.everywhere and is_new:
        raise FleetError("usage", "run: --all takes no new tasks: each would be added to "
                         "every repository", status=EXIT_USAGE, fix="leave out --all")
    known: set[str] = set()
    folders = find_folders(options, world, known, begins=True)
    found = prepare_runs(folders, options)
    is_whole = len(found) == len(folders)  # with --all, the others go on
    if not found and is_whole:
        raise FleetError("no-tasks", "there are no tasks in any repository yet",
                         fix=ADD_A_TASK)

    jobs = take_locks(found, options, world)
    if found and not jobs:
        status = hand_over(found[0], options, world)
        if not found[0].lock:
            return status
        jobs = found[:1]
    works_behind = options.detach and (options.keep_going or any(map(has_work, jobs)))
    if works_behind and not go_on_behind(jobs, world):
        return EXIT_OK
    status = work_on(jobs, known, options, world) if jobs else EXIT_OK
    return status if is_whole else status or EXIT_PROBLEM


def take_locks(found: Sequence[RunJob], options: Namespace, world: World) -> list[RunJob]:
    """Return the repositories whose lock is free, after taking it."""
    jobs = [job for job in found if job.take_lock()]
    for job in found if options.everywhere else ():
        if not job.lock:
            world.err(f"{clean_line(job.folder.repository.main)}: skipped, `run` is already "
                      f"active there (pid {job.folder.holder()})\n")
    return jobs


def has_work(job: RunJob) -> bool:
    """Tell whether any of the tasks to run is not over."""
    return any(not state.is_over and (not job.only or name in job.only)
               for name, state in see_states(job.folder, job.orders)[0].items())


def go_on_behind(jobs: Sequence[RunJob], world: World) -> bool:
    """Continue in the background: True in the background process, False in the terminal."""
    for job in jobs:
        job.hand_in()
    log = jobs[0].folder.place("run.log")
    if world.detach(log):
        return True
    world.out(f"Working in the background. Log: {clean_line(log)}; `subagent-fleet tasks` "
              "shows the tasks, `subagent-fleet task stop '*'` ends them.\n")
    return False


def prepare_runs(folders: Iterable[Folder], options: Namespace) -> list[RunJob]:
    """Return the repositories to work in; with `--all`, say why others can't be used."""
    jobs = []
    for folder in folders:
        try:
            jobs.append(RunJob(folder, options))
        except FleetError as error:
            if not options.everywhere:
                raise
            tell_trouble(folder, error)
    return jobs


def refuse_second(folder: Folder, options: Namespace) -> FleetError:
    """Return why a `run` that has nothing to hand over does not start beside another one."""
    fix = f"add work: {ADD_A_TASK}"
    if options.land and not folder.read_asked().land:
        fix = "when the tasks are done: subagent-fleet task land"
    return FleetError("supervised", f"`run` is already active here (pid {folder.holder()})",
                      status=EXIT_REFUSED, fix=fix)


def hand_over(job: RunJob, options: Namespace, world: World) -> int:
    """Hand typed tasks to the running supervisor, and follow them until they end.

    If that supervisor ends before it has taken them, this job takes the lock, so that its
    tasks are not lost.
    """
    folder = job.folder
    if not job.typed and (job.only or not options.most):
        raise refuse_second(folder, options)
    events = Tail(world, folder.place("events.jsonl"), last_bytes=1)  # what comes from now on
    asked = job.hand_in(handed=True) if job.typed else set()
    if options.most:
        asked.add(folder.ask({"do": "limit", "most": options.most}))
    tell(world, f"`run` is already active here (pid {folder.holder()}): it does this, too.\n")
    active = folder.read_asked()
    if options.land and (not active.land or active.words):
        names = "".join(f" {name}" for name in sorted(job.typed))
        tell(world, "It does not land them. When they are done: "
             f"subagent-fleet task land{names}\n")
    stops: list[str] = []
    world.on_stop(stops.append)
    until = world.clock() + STOP_WAIT_SECONDS
    while not stops:
        is_taken = not asked & {identity for identity, _ in folder.read_orders()}
        states = folder.read_states()[0]
        job.relay(events)
        if is_taken and options.most:
            world.out(f"At most {count_of(options.most, 'agent')} at once from now on.\n")
            folder.note_asked(replace(folder.read_asked(), most=options.most))
            options.most = 0
        if is_taken and (options.detach or not job.typed):
            return EXIT_OK
        if is_taken and all(states[name].is_over for name in job.typed):
            break
        if not folder.holder() and job.take_lock():
            tell(world, "The other `run` has ended. This one continues.\n")
            return EXIT_OK
        if not is_taken and world.clock() > until:
            raise FleetError("not-taken", explain_no_answer(folder),
                             fix="see its terminal, and continue it there: `fg`")
        world.sleep(0.1)
    return sum_up_run([job], stops, world)


def work_on(jobs: list[RunJob], known: set[str], options: Namespace, world: World) -> int:
    """Let the supervisors work to the end or until a signal, then print the summary."""
    stops: list[str] = []
    world.on_stop(stops.append)
    changed = threading.Condition()
    looked_at = world.clock()
    landers = [Lander(job, "", stops) for job in jobs if options.land]
    try:
        for job in jobs:
            job.begin(changed)
            tell_starts(job)
        while not stops:
            did = False
            for job in list(jobs):
                did = step_job(job, jobs) or did
            if options.everywhere and world.clock() - looked_at > 2.0:
                looked_at = world.clock()
                later = find_folders(options, world, known)
                for job in filter(RunJob.take_lock, prepare_runs(later, options)):
                    job.begin(changed)
                    jobs.append(job)
            is_idle = not did and not any(
                job.supervisor.is_busy or job.supervisor.waits_for_time for job in jobs)
            lands = [lander.look(is_last=is_idle) for lander in landers]
            if is_idle and not any(lands) and not options.keep_going:
                break
            with changed:
                changed.wait(0.01 if did else 0.25)
    finally:
        for lander in landers:
            lander.leave()
        for job in jobs:
            job.leave()
    return sum_up_run(jobs, stops, world, landers)


def step_job(job: RunJob, jobs: list[RunJob]) -> bool:
    """Do what can be done in a repository; after an error, give it up if there are others."""
    try:
        return bool(job.supervisor.advance())
    except FleetError as error:
        if len(jobs) == 1:
            raise
        jobs.remove(job)
        job.leave()
        tell_trouble(job.folder, error)
        return False
