"""A repository of our own, and the sittings in it."""
from __future__ import annotations

import json
import re
import threading
from typing import TYPE_CHECKING

from fleet.config.task_file import TaskSpec
from fleet.runs.agent import AGENT_MEGABYTES, last_line_of, read_tail, shell_words
from fleet.runs.folder import (
    STATE_LIMIT_BYTES,
    TAIL_BYTES,
    Folder,
    find_commit,
    find_repository,
)
from fleet.runs.git import Git, git_of
from fleet.runs.process_tree import PROCESS_LOOK_SECONDS, ProcessTree, end_trees
from fleet.runs.snapshot import join_names
from fleet.runs.supervisor import Supervisor
from fleet.start.constants import CONFIG_VARIABLE
from fleet.start.errors import FleetError
from fleet.start.record import Record, replace
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
    TEST_PATH,
    Sitting,
    Tried,
    find_failed_tests,
    find_outcome,
    parse_fixes,
    render_question,
)
from fleet.world.child import Launch, run_together
from fleet.world.places import PrivateDirectory
from fleet.world.process_list import CHECK_MARK

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from fleet.runs.agent import Backing
    from fleet.tasks.state import TaskState
    from fleet.trials.questions import Examinee, ExamPage, Fix
    from fleet.world.world import World


class Room:
    """A repository in a private directory: it holds what was put in it, and nothing else."""

    def __init__(self, world: World, place: str) -> None:
        world.make_directory(place, is_private=True)
        world.run_git(["init", "-q", "--template="], place)
        self.git = Git(world, world.path(place, ".git"), place)

    def take(self, source: Git, *commits: str) -> list[str]:
        """Take the files of commits over, not the commits; return their trees."""
        trees = [source.out("rev-parse", "--verify", "--end-of-options", f"{commit}^{{tree}}")
                 for commit in commits]
        packs = self.git.world.path(self.git.git, "objects", "pack", "pack")
        source.out("pack-objects", "-q", "--revs", packs,
                   given="\n".join([*trees, ""]).encode())
        return trees

    def begin(self, tree: str) -> None:
        """Make these files the whole history."""
        commit = self.git.make_commit(tree, (), "start")
        self.git.out("update-ref", "refs/heads/main", commit)
        self.git.out("symbolic-ref", "HEAD", "refs/heads/main")

    def lay_out(self, code: str, tests: str) -> None:
        """Lay out the files of one tree, but all that are tests from another."""
        entries = [entry for tree in (code, tests)
                   for entry in self.git.names("ls-tree", "-r", "-z", tree)
                   if bool(TEST_PATH.search(entry.partition("\t")[2])) == (tree is tests)]
        self.git.out("update-index", "-z", "--index-info", given=join_names(entries))
        self.git.out("checkout-index", "-a", "-f", "-q")


class ExamPlan(Record):
    """What an exam asks, how often, and how it is checked."""

    check: str
    origin: str  # of the check
    usual: TaskSpec  # the defaults of tasks.yaml
    questions: int
    times: int
    since: float = 0.0  # seconds ago

    @property
    def digest(self) -> str:
        return digest("\n".join([self.check, *self.usual.setup]).encode("utf-8"))[:16]


class Exam:
    """Finds questions in a repository and has models sit them."""

    def __init__(self, folder: Folder, plan: ExamPlan, page: ExamPage,
                 keep: Callable[[ExamPage], object]) -> None:
        self.plan = plan
        self.page = page
        self.fixes: list[Fix] = []  # the questions
        self.left: dict[str, str] = {}  # commit: why it is none
        self.troubles: list[str] = []  # of sittings that do not count
        # The check's last line, by commit and model.
        self.said: dict[tuple[str, str], str] = {}
        self.stops: list[str] = []
        self._folder = folder
        self._keep = keep
        # What would lead an agent or a check to the person's checkout.
        world = folder.world
        world.environ = {name: value for name, value in world.environ.items()
                         if not re.match(f"(OLD)?PWD$|GIT_|{CONFIG_VARIABLE}$", name)}
        self._world = world
        self._main = git_of(folder)
        self.repository = digest(folder.repository.main.encode("utf-8", "replace"))[:16]
        # The names of failing tests are a person's own text: they are kept where
        # only they read.
        self._names_place = world.user_place("state", "exam", f"{self.repository}.json")
        self._names = (parse_object(world.read_part(self._names_place, 0, STATE_LIMIT_BYTES))
                       or {})
        self._lock = threading.Lock()

    # -- questions --

    def find(self, tell: Callable[[str], object]) -> None:
        """Find as many questions as are wanted, those first that call themselves a fix."""
        words = ["log", "--first-parent", f"-{EXAM_COMMITS}", "--raw", "--numstat",
                 "--no-renames", "-z", FIX_FORMAT]
        if self.plan.since:
            words.append(f"--since={int(self._world.now() - self.plan.since)}")
        fixes = list(parse_fixes(self._main.out(*words, "HEAD", "--")))
        known = {one.commit: one.reason for one in self.page.tried
                 if one.check == self.plan.digest}
        self.left = {fix.commit: fix.flaw for fix in fixes if fix.flaw}
        for fix in sorted(fixes, key=lambda fix: not SAYS_FIX.search(fix.message)):
            if len(self.fixes) == self.plan.questions or self.stops:
                return
            if fix.flaw:
                continue
            reason = known.get(fix.commit)
            # A file that came with a directory can only take a question away.
            if reason is None or not reason and self._key_of(fix) not in self._names:
                tell(f"{fix.commit[:10]}: {clean_line(fix.message[:60])}")
                reason = self._prove(fix)
                if self.stops:
                    return
                self._note(
                    tried=(*self.page.tried, Tried(fix.commit, self.plan.digest, reason)))
            if reason:
                self.left[fix.commit] = reason
            else:
                self.fixes.append(fix)

    def _key_of(self, fix: Fix) -> str:
        return digest(f"{fix.commit} {self.plan.digest}".encode("ascii"))[:16]

    def _note(self, **known: Any) -> None:
        """Keep what has become known; the latest is what counts."""
        self.page = replace(self.page, **known)
        self._keep(self.page)

    def _prove(self, fix: Fix) -> str:
        """Return why a commit is no question; "": tests fail without it and pass with it."""
        for code, wanted, words in ((fix.commit, True, "its check fails on the fix, too"),
                                    (fix.parent, False, "its tests pass without the fix")):
            codes, output = self._check(self._main, code, fix, 2)
            if 124 in codes:
                return f"its check takes longer than {show_span(PROOF_SECONDS)}"
            passes = [code == 0 for code in codes]
            if passes[0] != passes[-1]:
                return "its check is flaky"
            if passes[0] != wanted:
                return words
        self._names[self._key_of(fix)] = find_failed_tests(output)
        content = json.dumps(self._names).encode("ascii")
        self._world.make_directory(self._world.parent(self._names_place), is_private=True)
        self._world.replace_files([(self._names_place, content, 0o600)])
        return ""

    def _check(self, source: Git, code: str, fix: Fix, times: int) -> tuple[list[int], str]:
        """Run the check on the code of a commit with the tests of a fix; say what it said."""
        with PrivateDirectory() as place:
            room = Room(self._world, self._world.path(place, "repository"))
            trees = [*room.take(source, code), *room.take(self._main, fix.commit)]
            room.lay_out(*trees)
            log = self._world.path(place, "log")
            for command in self.plan.usual.setup:
                if self._run(command, room.git.tree, log):
                    return [1], last_line_of(self._world, log)
            self._world.remove(log)
            codes: list[int] = []
            while len(codes) < times and not self.stops:
                codes.append(self._run(self.plan.check, room.git.tree, log))
            return codes, read_tail(self._world, log, TAIL_BYTES)

    def _run(self, command: str, tree: str, log: str) -> int:
        """Run a shell command, and end all that it leaves; 124: it took too long."""
        world = self._world
        mark = f"exam/{world.token(8)}"
        with self._lock:
            child = world.spawn(Launch(shell_words(world, command), tree,
                                       {**world.environ, CHECK_MARK: mark}, log, log))
        processes = ProcessTree(world, f"{CHECK_MARK}={mark}")
        processes.add(child.number)
        until = world.clock() + PROOF_SECONDS
        while child.exit_code() is None and world.clock() < until and not self.stops:
            processes.find(world.clock() - PROCESS_LOOK_SECONDS)
            world.sleep(0.02)
        code = child.exit_code()
        end_trees(world, [processes], 0.0)
        return 124 if code is None else code

    # -- sittings --

    def sit(self, todo: Sequence[tuple[Examinee, Fix, int]],
            back: Callable[[Examinee], Backing], tell: Callable[[str], object]) -> None:
        """Ask all of it, as much at a time as the models have slots and the memory allows."""
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
        """Return how a model did at these questions so far."""
        commits = {fix.commit for fix in self.fixes}
        exam = self.plan.digest, self.repository, examinee.name, examinee.digest
        return [one for one in self.page.sittings
                if one.commit in commits and one.number <= self.plan.times
                and (one.check, one.repository, one.model, one.digest) == exam]

    def plan_todo(self, examinees: Sequence[Examinee]) -> list[tuple[Examinee, Fix, int]]:
        """Return what is left to ask: each question of each model before any is repeated."""
        done = {(one.model, one.commit, one.number)
                for examinee in examinees for one in self.sittings_of(examinee)}
        return [(examinee, fix, number) for number in range(1, self.plan.times + 1)
                for fix in self.fixes for examinee in examinees
                if (examinee.name, fix.commit, number) not in done]

    def _sit(self, examinee: Examinee, backing: Backing, fix: Fix, number: int) -> None:
        """Have a model do a question, judge what it did, and keep what came of it."""
        world, usual = self._world, self.plan.usual
        failed = self._names.get(self._key_of(fix)) or ()
        task = TaskSpec("question", render_question(fix, failed, self.plan.check),
                        model=examinee.models[0].alias, tries=1, rounds=0, setup=usual.setup,
                        deadline=usual.deadline, stall=usual.stall, allow=usual.allow)
        receipt: Mapping[str, Any] = {}
        code = None
        began = world.clock()
        try:
            with PrivateDirectory() as place:
                room = Room(world, world.path(place, "repository"))
                room.begin(*room.take(self._main, fix.parent))
                folder = Folder(world, find_repository(world, room.git.tree), is_listed=False)
                state = self._work(folder, backing, task)
                seconds = round(world.clock() - began, 1)
                path = folder.of_try(state, "receipt.json")
                receipt = parse_object(world.read_part(path, 0, STATE_LIMIT_BYTES)) or {}
                outcome = find_outcome(state, receipt, examinee)
                if outcome == "passed":
                    codes, output = self._check(room.git, state.place.kept, fix, 1)
                    code = next(iter(codes), 1)
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
            examinee.digest, code, seconds, receipt.get("turns") or 0,
            sum(int(row["input_tokens"]) for row in served),
            sum(int(row["output_tokens"]) for row in served), today(world))
        with self._lock:
            self._note(sittings=(*self.page.sittings, sitting))

    def _work(self, folder: Folder, backing: Backing, task: TaskSpec) -> TaskState:
        """Supervise the only task of a repository until it is over."""
        folder.make()
        lock = folder.world.hold(folder.place("lock"))
        assert lock  # nobody else knows this place
        supervisor = Supervisor(folder, lock, replace(backing, worktrees="../work"))
        supervisor.accept(freeze(task), find_commit(folder.world, folder.repository, "HEAD"))
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
