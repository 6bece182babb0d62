"""Which commits can be questions, and the results of an exam."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.config.rules import choice_rule, key
from fleet.plan.measured import ExamScore
from fleet.start.constants import STATE_DIRECTORY
from fleet.start.gate import LatePattern
from fleet.start.record import Record
from fleet.text.phrases import some_of
from fleet.text.terminal import clean_line, clean_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from fleet.config.sections import Model
    from fleet.tasks.state import TaskState


# The exam asks models to repeat fixes from a repository's own history and counts how many they
# can do. A question is a commit whose tests fail on its parent and pass on it, twice each. A
# model answers it as a task: the prompt is the commit's message, and the repository holds the
# parent's files and no other object. Then a second task, whose coder does nothing, runs the
# check on the model's files with the fix's tests. Example: if a model writes `exit 0` into
# tests/a_test.sh and `test:;true` into a new GNUmakefile, the check uses the fix's a_test.sh
# and no GNUmakefile.

EXAM_FILE = f"{STATE_DIRECTORY}/exam.json"
EXAM_COMMITS = 2_000  # how many of the newest are considered
FIX_LINES, FIX_FILES = 200, 10  # the most that a fix may change, without its tests
PROOF_SECONDS = 300  # a commit with a longer check is not a question
EXAM_DEADLINE_SECONDS = 1800  # of a question, unless tasks.yaml has another deadline
FAILING_TESTS = 20  # the most that a prompt names
TEST_PATH = LatePattern(
    r"(^|/)(tests?|specs?|__tests__|testdata)/|(^|/)(test_[^/]*|conftest)\.py$"
    r"|[._-](test|tests|spec)\.\w+$|[a-z]Tests?\.\w+$")
_GENERATED_PATH = LatePattern(
    r"(^|/)(dist|vendor|node_modules|third_party|generated)/|\.lock$"
    r"|-lock\.\w+$|(^|/)go\.sum$"
    r"|\.min\.\w+$|_pb2\w*\.py$|\.pb\.go$|\.snap$")
# Files that decide how tests are run: of test programs, build tools and languages.
_RUNNER_PATH = LatePattern(
    r"(?i)(^|/)(\.|__mocks__/|(minitest|rspec)[/.]|[^/]*\.(dist|egg)-info/)"
    r"|(^|/)((gnu)?makefile|justfile|taskfile|rakefile|gemfile|dockerfile|cmakelists)(\.\w+)?$"
    r"|(^|/)((package|composer|deno|tsconfig[^/]*)\.json|(pom|build|phpunit[^/]*)\.xml)$"
    r"|(^|/)((setup|noxfile|sitecustomize|usercustomize)\.py|build\.rs|mix\.exs|meson\.build"
    r"|go\.(mod|work)|gradlew|mvnw|configure)$"
    r"|\.(toml|ini|cfg|pth|mk|cmake|gradle|kts|sbt|[a-z]+proj|props|targets)$"
    r"|\.(config|conf|setup)\.\w+$")
_SCRIPT_PATH = LatePattern(r"(?i)\.((ba|z|k)?sh|bat|cmd|ps1)$")
_MODULE_PATH = LatePattern(r"(?i)\.(py[cdw]?|so)$")
_REVERT = LatePattern(r"(?im)^revert\b|^this reverts commit")
SAYS_FIX = LatePattern(r"(?i)\b(fix|bug|repair|correct|crash|regress|wrong|broken|handle)|#\d")
_TRAILER = LatePattern(r"(?im)^(signed-off|co-authored|reviewed|acked|change-id)\S*:.*\n?")
# How pytest, unittest, go, cargo, jest and TAP name a failed test.
_FAILED_TEST = LatePattern(
    r"(?m)^(?:FAILED|ERROR) (\S+)|^(?:FAIL|ERROR): (\S+ \(\S+\))|^ *--- FAIL: (\S+)"
    r"|^test (\S+) \.\.\. FAILED|^ *● (\S.{0,120}\S)$|^not ok \d+ -? ?(\S.{0,120}\S)")


# -- which commits can be questions --


class Fix(Record):
    """A commit, and why it is not a question, if the log alone shows that."""

    commit: str
    parent: str
    message: str
    tests: tuple[str, ...] = ()
    code: tuple[str, ...] = ()  # the other files that it changes
    flaw: str = ""


FIX_FORMAT = "--format=%x01%H %P%x02%B%x03"


def parse_fixes(log: str) -> Iterator[Fix]:
    """Yield the commits of `git log --raw --numstat -z` in this format."""
    pieces = re.split(r"\x01([0-9a-f]{40,64}) ([0-9a-f ]*)\x02", log)[1:]
    for commit, parents, rest in zip(pieces[::3], pieces[1::3], pieces[2::3]):
        message, _, changes = rest.rpartition("\x03")
        links = re.findall(r":(?:160000 \d+|\d+ 160000) ", changes)
        sizes = {path: int(plus) + int(minus) for plus, minus, path in re.findall(
            r"(\d+)\t(\d+)\t([^\0]+)\0", changes)}
        parent, *more = parents.split() or [""]
        flaw = "is a merge" if more else find_flaw(parent, message, sizes,
                                                   has_link=bool(links))
        tests = tuple(path for path in sizes if TEST_PATH.search(path))
        code = tuple(path for path in sizes if path not in tests)
        # A prompt may not hold control characters or text that is not UTF-8.
        words = clean_text(_TRAILER.sub("", message).strip())
        yield Fix(commit, parent, words, tests, code, flaw)


def find_flaw(parent: str, message: str, sizes: Mapping[str, int], *, has_link: bool) -> str:
    """Return why a commit with these changes is not a question; "": it may be one."""
    code = [path for path in sizes if not TEST_PATH.search(path)]
    for is_so, flaw in (
            (not parent, "has no parent"), (_REVERT.search(message), "is a revert"),
            (has_link, "changes a submodule"), (len(code) == len(sizes), "changes no test"),
            (not code, "changes tests only"),
            (any(map(_GENERATED_PATH.search, code)), "changes generated files"),
            (len(code) > FIX_FILES or sum(map(sizes.__getitem__, code)) > FIX_LINES,
             "is too large")):
        if is_so:
            return flaw
    return ""


def find_failed_tests(output: str) -> list[str]:
    """Return the names of the failed tests in the output of a check."""
    names = ("".join(groups) for groups in _FAILED_TEST.findall(output))
    return list(dict.fromkeys(clean_line(name)[:200] for name in names))[:FAILING_TESTS]


def render_question(fix: Fix, failed: Sequence[str], check: str) -> str:
    """Return the prompt of a question, which tells nothing that only the fix contains."""
    names = "\n".join(f"- {name}" for name in failed or fix.tests)
    return (f"{fix.message}\n\nThis is not done yet in this repository: do it. These tests "
            f"fail now and must pass; their newest form is not here:\n\n{names}\n\n"
            f"They are run with `{check}`. Your own changes to tests, and to what runs them, "
            "do not count, and neither do new Python modules outside of packages. Nobody can "
            "answer questions.")


# -- which files are checked --


def choose_files(work: Sequence[str], right: Sequence[str], before: Sequence[str],
                 changed: Sequence[str], commands: Sequence[str]) -> list[str]:
    """Return the files that are checked, as entries of a tree.

    `work`, `right` and `before` are the entries of the model's tree, of the fix's and of its
    parent's; `changed` are the files of code that the fix changes. Tests, and files that
    decide how tests are run, come from the fix. All other files come from the model.
    """
    old = set(map(path_of, (*right, *before)))
    packages = {path.rpartition("/")[0] for path in old if path.endswith("/__init__.py")}
    words = set(re.findall(r"[\w./@+-]+", " ".join(commands)))

    def is_fixed(entry: str) -> bool:
        """Tell whether a file comes from the fix."""
        path = path_of(entry)
        module = path.removesuffix(".py").removesuffix("/__main__")
        if not words.isdisjoint((path, f"./{path}", module, module.replace("/", "."))):
            return True  # a command names it
        if any(pattern.search(name) for name in (path, path.lower())
               for pattern in (TEST_PATH, _GENERATED_PATH, _RUNNER_PATH)):
            return True
        if _SCRIPT_PATH.search(path):
            return path not in changed
        # A new module, such as `unittest.py`, would be imported instead of the library's.
        steps = path.split("/")
        return bool(_MODULE_PATH.search(path)) and path not in old and packages.isdisjoint(
            "/".join(steps[:count]) for count in range(1, len(steps)))

    return [*(entry for entry in work if not is_fixed(entry)), *filter(is_fixed, right)]


def path_of(entry: str) -> str:
    """Return the path in an entry of `git ls-tree -r -z`."""
    return entry.partition("\t")[2]


# -- kept beside the fleet file, without text from the repository --

EXAM_OUTCOMES = {"passed": "passed", "check": "check failed", "diff": "changed nothing",
            "asked": "asked a person", "deadline": "deadline", "stalled": "got stuck",
            "context": "prompt too long"}


class Sitting(Record):
    """One model at one question."""

    commit: str
    check: str  # a digest of the commands
    repository: str  # a digest of its path
    model: str = key("line")
    outcome: str = key(choice_rule(*EXAM_OUTCOMES))
    number: int = 1  # 1: asked for the first time
    digest: str = ""  # of the model
    code: int | None = None  # the exit code of the check
    seconds: float = 0.0
    turns: int = 0
    input: int = 0  # tokens
    output: int = 0
    date: str = ""


class ExamPage(Record):
    """The content of an exam file."""

    sittings: tuple[Sitting, ...] = ()


# -- kept in the folder of tasks, for this user alone --


class Proof(Record):
    """The result of trying a commit; without a reason against it, it is a question."""

    reason: str = ""
    tests: tuple[str, ...] = ()  # the tests that fail without the fix


class ProofPage(Record):
    """The content of a file of proofs."""

    proofs: dict[str, Proof] = {}


# -- results --


class Examinee(Record):
    """A model that takes the exam, on one or more machines."""

    models: tuple[Model, ...]  # its entries in the fleet file, one for each machine
    digest: str

    @property
    def name(self) -> str:
        """Its name on the machines."""
        return self.models[0].ollama_model

    @property
    def slots(self) -> int:
        """How many questions it can answer at the same time."""
        return sum(model.max_parallel for model in self.models)


class ExamResult(Record):
    """The result of one model."""

    model: str
    digest: str
    score: ExamScore | None = None
    interval: tuple[float, float] | None = None
    each_time: int = 0  # questions that it passed every time
    seconds: float = 0.0
    input: int = 0
    output: int = 0
    failures: dict[str, int] = {}  # by outcome


def plan_result(examinee: Examinee, sittings: Sequence[Sitting]) -> ExamResult:
    """Return the result of a model from its sittings."""
    if not sittings:
        return ExamResult(examinee.name, examinee.digest)
    outcomes = [sitting.outcome for sitting in sittings]
    questions = {sitting.commit for sitting in sittings}
    failed = {sitting.commit for sitting in sittings if sitting.outcome != "passed"}
    score = ExamScore(outcomes.count("passed"), len(outcomes), len(questions),
                      sittings[0].repository)
    return ExamResult(
        examinee.name, examinee.digest, score, score.interval, len(questions - failed),
        round(sum(sitting.seconds for sitting in sittings), 1),
        sum(sitting.input for sitting in sittings),
        sum(sitting.output for sitting in sittings),
        {word: outcomes.count(word) for word in sorted({*outcomes} - {"passed"})})


def find_outcome(state: TaskState, receipt: Mapping[str, Any], examinee: Examinee) -> str:
    """Return a key of EXAM_OUTCOMES, or why the end of a task says nothing about the model."""
    others = {row["route"] for row in receipt.get("served") or ()}
    others -= {model.name for model in examinee.models}
    if others:
        return f"{some_of(sorted(others))} answered instead"
    if state.state == "review":
        return "passed"  # if its check passes, too
    if state.state == "stopped":
        return "asked"
    if state.cause == "too-large":
        return "context"
    return state.cause if state.state == "failed" else state.reason
