"""The exam: it finds questions in a repository and has models answer them as tasks."""
from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING

from fleet.runs.agent import AGENT_MEGABYTES, Backing, read_tail
from fleet.runs.folder import STATE_LIMIT_BYTES, TAIL_BYTES, Folder, find_repository
from fleet.runs.git import Git, git_of
from fleet.runs.snapshot import join_names
from fleet.runs.supervisor import Supervisor, base_of
from fleet.start.constants import CONFIG_VARIABLE
from fleet.start.errors import FleetError
from fleet.start.record import Record, read, replace
from fleet.tasks.state import freeze
from fleet.text.json import digest, parse_object
from fleet.text.phrases import count_of, first_line, show_span
from fleet.text.terminal import clean_line
from fleet.trials.course import today
from fleet.trials.questions import (
    EXAM_COMMITS,
    EXAM_OUTCOMES,
    FIX_FORMAT,
    PROOF_SECONDS,
    SAYS_FIX,
    Proof,
    ProofPage,
    Sitting,
    choose_files,
    find_failed_tests,
    find_outcome,
    parse_fixes,
    render_question,
)
from fleet.world.child import run_together
from fleet.world.places import PrivateDirectory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from fleet.config.task_file import TaskSpec
    from fleet.runs.confine import Confinement
    from fleet.tasks.state import TaskState
    from fleet.trials.questions import Examinee, Fix


# `times: [models]` in one folder would be shorter, but tasks of one folder can reach each
# other: a place names the objects of its repository, which hold every other question's files
# and every model's work, and its neighbors are one directory away. A later question starts
# with the fix of an earlier one. So each answer has a repository, a folder of tasks and a
# supervisor of its own; all else is done as `run` does it.


def make_room(source: Git, place: str, files: str) -> Folder:
    """Make a repository that holds nothing but one commit of these files; return its tasks."""
    world = source.world
    path = world.path(place, "repository")
    world.make_directory(path, is_private=True)
    world.run_git(["init", "-q", "--template="], path)
    git = Git(world, world.path(path, ".git"), path)
    tree = source.out("rev-parse", "--verify", "--end-of-options", f"{files}^{{tree}}")
    source.out("pack-objects", "-q", "--revs", world.path(git.git, "objects/pack/pack"),
               given=f"{tree}\n".encode())
    git.out("update-ref", "HEAD", git.make_commit(tree, (), "start"))
    return Folder(world, find_repository(world, path), is_listed=False)


class ExamPlan(Record):
    """What an exam asks, how often, and how answers are checked."""

    task: TaskSpec  # what all its tasks share, including the check
    origin: str  # where the check comes from
    questions: int
    times: int

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands that run on each question."""
        return (*self.task.setup, self.task.check or "")

    @property
    def digest(self) -> str:
        """Identify the commands: results of others do not count."""
        return digest("\n".join(self.commands).encode("utf-8"))[:16]


class Exam:
    """Finds questions in a repository and has models answer them, as tasks."""

    def __init__(self, folder: Folder, plan: ExamPlan, sittings: Sequence[Sitting],
                 keep: Callable[[Sequence[Sitting]], object], confinement: Confinement) -> None:
        self.plan = plan
        self.sittings = list(sittings)
        self.fixes: list[Fix] = []  # the questions
        self.left: dict[str, str] = {}  # {commit: why it is not a question}
        self.troubles: list[str] = []  # why sittings do not count
        self.notes: dict[str, None] = {}  # about checks, such as what they may not write
        # {(commit, model): the last line of the check}
        self.said: dict[tuple[str, str], str] = {}
        self.stops: list[str] = []
        self._keep = keep
        # Remove what would lead an agent or a check to the person's checkout.
        world = folder.world
        world.environ = {name: value for name, value in world.environ.items()
                         if not re.match(f"(OLD)?PWD$|GIT_|{CONFIG_VARIABLE}$", name)}
        self._world = world
        self._main = git_of(folder)
        self._checks = Backing(tell=self._hear_check, confinement=confinement)
        self.repository = digest(folder.repository.main.encode("utf-8", "replace"))[:16]
        # The names of failing tests are the person's own text, so they stay in the folder of
        # tasks. A copied or unpacked folder has another name for this file.
        self._folder = folder
        self._proofs_name = f"exam-{folder.run}.json"
        kept = parse_object(world.read_part(folder.place(self._proofs_name), 0,
                                            STATE_LIMIT_BYTES))
        self._proofs = (read(ProofPage, {"proofs": kept}) or ProofPage()).proofs
        self._lock = threading.Lock()

    # -- questions --

    def find(self, tell: Callable[[str], object]) -> None:
        """Find as many questions as wanted; try commits that say \"fix\" first."""
        words = ["log", "--first-parent", f"-{EXAM_COMMITS}", "--raw", "--numstat",
                 "--no-renames", "-z", FIX_FORMAT]
        fixes = list(parse_fixes(self._main.out(*words, "HEAD", "--")))
        self.left = {fix.commit: fix.flaw for fix in fixes if fix.flaw}
        for fix in sorted(fixes, key=lambda fix: not SAYS_FIX.search(fix.message)):
            if len(self.fixes) == self.plan.questions or self.stops:
                return
            if fix.flaw:
                continue
            key = self._key_of(fix)
            if key not in self._proofs:
                tell(f"{fix.commit[:10]}: {clean_line(fix.message[:60])}")
                proof = self._prove(fix)
                if self.stops:
                    return
                self._proofs[key] = proof
                self._folder.write({known: vars(each) for known, each in
                                    self._proofs.items()}, self._proofs_name)
            reason = self._proofs[key].reason
            if reason:
                self.left[fix.commit] = reason
            else:
                self.fixes.append(fix)

    def _key_of(self, fix: Fix) -> str:
        """Identify a proof: by its commit, its commands and what they may write."""
        task = self.plan.task
        words = (fix.commit, self.plan.digest, task.sandbox, *task.sandbox_write)
        return digest("\n".join(words).encode("utf-8"))[:16]

    def _prove(self, fix: Fix) -> Proof:
        """Prove that a commit is a question: its tests fail without it and pass with it."""
        for code, wanted, words in ((fix.commit, True, "its check fails on the fix, too"),
                                    (fix.parent, False, "its tests pass without the fix")):
            state, output = self._check(code, fix, "own")
            checks = state.attempt.checks
            if self.stops:
                break
            if 124 in checks:
                return Proof(f"its check takes longer than {show_span(PROOF_SECONDS)}")
            passes = checks == (0,)
            if checks and passes != state.place.passes_on_base:
                return Proof("its check is flaky")
            if passes != wanted:
                return Proof(words)
        return Proof(tests=tuple(find_failed_tests(output)))

    def _check(self, code: str, fix: Fix, check_in: str, objects: str = ""
               ) -> tuple[TaskState, str]:
        """Run the check on the code of one commit, with the tests of a fix.

        This is a task whose coder does nothing, in a new repository that no agent has seen.
        The repository holds only the test files of the fix, so the code cannot look the fix
        up. With `own` the check runs twice, before and after the coder. Return how the task
        ended, and the output of the last check.
        """
        world, main, plan = self._world, self._main, self.plan
        task = replace(plan.task, name="check", prompt="check", coder=("true",),
                       check_in=check_in, changes="none", deadline=PROOF_SECONDS)
        with PrivateDirectory() as place:
            if not objects:
                objects = world.path(place, "objects")
                world.make_directory(objects)
            both = Git(world, main.git, main.tree, index=world.path(place, "index"),
                       objects=objects, beside=world.path(main.git, "objects"))
            work, right, before = (both.names("ls-tree", "-r", "-z", commit)
                                   for commit in (code, fix.commit, fix.parent))
            # If a path is a file in one and a directory in the other, the last one counts.
            both.out("update-index", "-z", "--replace", "--index-info", given=join_names(
                choose_files(work, right, before, fix.code, plan.commands)))
            folder = make_room(both, place, both.out("write-tree"))
            state = self._have_done(folder, task, self._checks)
            if state.cause == "check-missing":
                raise FleetError("check-missing", f"the check cannot be run: `{task.check}`",
                                 fix="install its program, or type another --check")
            if not (state.attempt.checks or self.stops or state.cause == "setup-failed"):
                raise FleetError(state.cause, state.reason)
            log = folder.of_try(state, "check-0.log")
            return state, read_tail(world, log, TAIL_BYTES)

    def _hear_check(self, name: str, word: str, text: str) -> None:
        """Keep the notes about a check for the person."""
        if word == "note":
            self.notes[text] = None

    # -- sittings --

    def sit(self, todo: Sequence[tuple[Examinee, Fix, int]],
            back: Callable[[Examinee], Backing], tell: Callable[[str], object]) -> None:
        """Ask all questions, as many at a time as model slots and memory allow."""
        most = threading.Semaphore(max(1, self._world.free_megabytes() // AGENT_MEGABYTES))
        slots = {one.name: threading.Semaphore(one.slots) for one, _, _ in todo}

        def sit(examinee: Examinee, fix: Fix, number: int) -> None:
            with slots[examinee.name], most:
                if not self.stops:
                    self._sit(examinee, back(examinee), fix, number)

        jobs = {place: lambda one=one: sit(*one) for place, one in enumerate(todo)}
        count = 0
        for place, _ in run_together(self._world, jobs):
            count += place is not None
            tell(f"{count} of {count_of(todo, 'task')} done")

    def sittings_of(self, examinee: Examinee) -> list[Sitting]:
        """Return the results of a model on these questions so far."""
        commits = {fix.commit for fix in self.fixes}
        exam = self.plan.digest, self.repository, examinee.name, examinee.digest
        return [one for one in self.sittings
                if one.commit in commits and one.number <= self.plan.times
                and (one.check, one.repository, one.model, one.digest) == exam]

    def plan_todo(self, examinees: Sequence[Examinee]) -> list[tuple[Examinee, Fix, int]]:
        """Return what is left to ask; nothing is repeated before everything was asked once."""
        done = {(one.model, one.commit, one.number)
                for examinee in examinees for one in self.sittings_of(examinee)}
        return [(examinee, fix, number) for number in range(1, self.plan.times + 1)
                for fix in self.fixes for examinee in examinees
                if (examinee.name, fix.commit, number) not in done]

    def _sit(self, examinee: Examinee, backing: Backing, fix: Fix, number: int) -> None:
        """Have a model answer a question, check its work, and keep the result."""
        task = self.plan.task
        prompt = render_question(fix, self._proofs[self._key_of(fix)].tests, task.check or "")
        task = replace(task, name="question", prompt=prompt, check=None,
                       model=examinee.models[0].alias)
        receipt: dict[str, Any] = {}
        code = None
        try:
            with PrivateDirectory() as place:
                folder = make_room(self._main, place, fix.parent)
                state = self._have_done(folder, task, backing)
                receipt = folder.read_receipt(state)
                outcome = find_outcome(state, receipt, examinee)
                if outcome == "passed":
                    state, output = self._check(
                        state.place.kept, fix, "same", f"{folder.repository.common}/objects")
                    code = next(iter(state.attempt.checks), 1)
                    if code:
                        outcome = "check"
                        line = first_line("\n".join(reversed(output.splitlines())))
                        self.said[fix.commit, examinee.name] = clean_line(line)[:160]
        except FleetError as error:
            outcome = error.what
        if self.stops:
            return
        if outcome not in EXAM_OUTCOMES:
            self.troubles.append(f"{examinee.name}, {fix.commit[:10]}: {outcome}")
            return
        served = receipt.get("served") or []
        sitting = Sitting(
            fix.commit, self.plan.digest, self.repository, examinee.name, outcome, number,
            examinee.digest, code, receipt.get("seconds") or 0.0, receipt.get("turns") or 0,
            sum(int(row["input_tokens"]) for row in served),
            sum(int(row["output_tokens"]) for row in served), today(self._world))
        with self._lock:
            self.sittings.append(sitting)
            self._keep(self.sittings)

    def _have_done(self, folder: Folder, task: TaskSpec, backing: Backing) -> TaskState:
        """Supervise one task until it ends, as `run` does; a task that asks is stopped."""
        folder.make()
        lock = folder.world.hold(folder.place("lock"))
        assert lock  # no other process knows this directory
        supervisor = Supervisor(folder, lock, replace(backing, worktrees="../work"))
        supervisor.accept(freeze(task), base_of(task, folder))
        is_stopped = False
        try:
            while not supervisor.tasks[task.name].is_over:
                did = supervisor.advance()
                if ((self.stops or supervisor.tasks[task.name].state == "asking")
                        and not is_stopped):
                    is_stopped = True
                    folder.ask({"do": "stop", "task": task.name})
                with supervisor.changed:
                    supervisor.changed.wait(0.01 if did else 0.25)
        finally:
            supervisor.leave()
        return supervisor.tasks[task.name]
