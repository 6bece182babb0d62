"""The exam: which commits are questions, that nothing of a fix is shown, what is said of models."""
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

import subagent_fleet as sf
from exam_kit import FLEET, Examined
from run_kit import needs_bubblewrap
from tools import EXAMPLE, PROGRAM

whole = [pytest.mark.slow,
         pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the rig reads /proc")]


def on_linux(test):
    for mark in whole:
        test = mark(test)
    return test


ABLE = '  able: {node: mini, ollama_model: "able:1b", litellm_alias: able, context: 65536}'


@pytest.fixture
def examined(task_rig, fake_node):
    """Make an Examined of models {name: alias}."""
    def make(**models):
        node = fake_node({f"{name}:1b": {} for name in models})
        return Examined(task_rig, f"http://127.0.0.1:{node.port}", models)
    return make


@on_linux
def test_exactly_the_provable_commits_are_questions(examined, tmp_path):
    made = examined(able="able-1")
    wanted = {"set up": "changes no test", "begin to test": "changes tests only"}

    def add(message, reason, files=None):
        made.commit(message, files)
        wanted[message] = reason

    for number in range(1, 7):
        made.fix(number)
        wanted[f"fix value {number}"] = ""
    for number in (40, 41, 42):
        add(f"fix value {number} untested", "changes no test", {f"values/{number}": "40\n"})
    add("fix nothing", "its tests pass without the fix",
        {"values/0": "00\n", "tests/v0_test.sh": "test -e values/0\n"})
    add("more tests", "changes tests only", {"tests/v1b_test.sh": "test -f values/1\n"})

    flip = tmp_path / "flip"
    add("fix value 50, flaky", "its check is flaky", {
        "values/50": "50\n",
        "tests/v50_test.sh": f"echo x >> {flip}; test $(( $(wc -l < {flip}) % 2 )) = 0\n"})
    add("no flaky test", "changes tests only", {"tests/v50_test.sh": None})
    add("fix value 51 over the network", "its check fails on the fix, too", {
        "values/51": "51\n", "tests/v51_test.sh": f'{sys.executable} -c "import socket\n'
        'socket.create_connection((\'127.0.0.1\', 9), 1)"\n'})
    add("no network", "changes tests only", {"tests/v51_test.sh": None})
    add("rename value 1", "", {"values/1": None, "values/one": "1\n", "tests/v1b_test.sh": None,
                               "tests/v1_test.sh": 'test "$(cat values/one)" = 1\n'})
    add("rename only", "changes no test", {"values/40": None, "values/forty": "40\n"})

    for number in (60, 61):
        made.rig.git("checkout", "-qb", f"side{number}")
        made.fix(number)
        made.rig.git("checkout", "-q", "main")
        made.rig.git("merge", "-q", "--no-ff", "-m", f"merge value {number}", f"side{number}")
        made.commits[f"merge value {number}"] = made.rig.git("rev-parse", "HEAD")
        wanted[f"merge value {number}"] = "is a merge"
    made.rig.git("revert", "--no-edit", made.commits["fix value 6"])
    made.commits["revert"] = made.rig.git("rev-parse", "HEAD")
    wanted["revert"] = "is a revert"
    add("fix value 70 and the lock", "changes generated files", {
        "values/70": "70\n", "package-lock.json": "{}\n",
        "tests/v70_test.sh": 'test "$(cat values/70)" = 70\n'})
    made.fix(71, **{"values/large": "x\n" * 300})
    wanted["fix value 71"] = "is too large"
    made.rig.git("update-index", "--add", "--cacheinfo", f"160000,{made.commits['set up']},sub")
    (made.repo / "sub").mkdir()
    add("fix value 80 and a submodule", "changes a submodule", {
        "values/80": "80\n", "tests/v80_test.sh": 'test "$(cat values/80)" = 80\n'})
    for number in range(90, 94):  # beside a submodule that is not there
        made.fix(number)
        wanted[f"fix value {number}"] = ""

    report = made.json("--questions", 40, timeout=300)
    names = {commit: name for name, commit in made.commits.items()}
    found = dict.fromkeys((names[commit] for commit in report["questions"]), "")
    found.update({names.get(commit, "start"): why for commit, why in report["left"].items()})
    assert found.pop("start") == "has no parent"
    assert found == wanted and len(found) >= 29
    kept = (made.repo / ".subagent-fleet/exam.json").read_text()
    assert "value" not in kept and "values/" not in kept, "no text of theirs is kept"


SPY = """env; git log --all --oneline; git fsck --lost-found; git cat-file --batch-all-objects --batch
git remote -v; cat .git; git fetch --all
cd "$(git rev-parse --git-common-dir)/.." && ls -laR . .git && cat .git/config; cat values/*
find .. -type f ! -path '*/objects/*' -exec cat {} +
"""


@on_linux
def test_nothing_of_a_fix_is_where_a_model_works(examined, tmp_path):
    made = examined(spy="spy")
    made.fix(1, values_note="")
    made.fix(2, "fix value 2: it is missing\n\nSigned-off-by: Ada", **{"values/secret": "7c0ffee7"})
    made.fix(3)
    spied = tmp_path / "spied"
    report = made.json("--questions", 3, status=0, env={
        "SPY": SPY, "SPY_FILE": str(spied), "OLDPWD": str(made.repo),
        "SUBAGENT_FLEET_CONFIG": f"{made.repo}/fleet.yaml"})
    assert [one["outcome"] for one in report["sittings"]] == ["check"] * 3
    by_number = {}
    for line in spied.read_text().splitlines():
        prompt, seen = json.loads(line)
        by_number[prompt.split("\n")[0]] = (prompt, seen)
    prompt, seen = by_number["fix value 2: it is missing"]
    assert "tests/v2_test.sh" in prompt and "check.sh" in prompt and "Ada" not in prompt
    assert "7c0ffee7" not in prompt + seen
    assert 'test "$(cat values/1)" = 1' in seen, "it looked"
    assert "values/2)" not in seen and "v3_test" not in seen
    for commit in made.commits.values():
        assert commit not in seen and commit[:10] not in seen
    assert f"={made.repo}" not in seen


@on_linux
def test_the_tests_that_fail_are_found_at_the_end_of_a_long_log(examined, tmp_path):
    made = examined(spy="spy")
    made.fix(1)
    made.run("--questions", 1, "--check", "yes x | head -n 200000; sh check.sh || "
             "{ echo FAILED tests/v1_test.sh::test_value; exit 1; }",
             env={"SPY": "true", "SPY_FILE": tmp_path / "spied"})
    prompt = json.loads((tmp_path / "spied").read_text().splitlines()[0])[0]
    assert "- tests/v1_test.sh::test_value\n" in prompt


@on_linux
def test_what_a_model_does_to_tests_counts_for_nothing_and_each_end_has_its_name(examined):
    made = examined(able="able-1", cheat="cheat", endless="endless", printer="printer", asker="asker")
    made.fixes(1, 2)
    (made.repo / "tasks.yaml").write_text(
        "defaults: {deadline: 3s, check: sh check.sh}\ntasks: {a: {prompt: x}}\n")
    text = made.run("--questions", 2, "--trust")
    assert "sh check.sh (tasks.yaml)" in made.err
    report = made.json("--questions", 2)
    stopped = {model["model"].split(":")[0]: model["failures"] for model in report["models"]}
    assert stopped == {"able": {}, "cheat": {"check": 2}, "endless": {"deadline": 2},
                       "printer": {"diff": 2}, "asker": {"asked": 2}}
    assert "able:1b     2 of 2" in text and "deadline 2" in text
    assert "Not told apart: able:1b and cheat:1b, endless:1b" in text
    assert "FAILED tests/v2_test.sh" in text, "what the check said"


# A project that is tested by make, which asks npm, which asks a script, which asks pytest.
TESTED = {
    "Makefile": "test:\n\tnpm test\n", "package.json": '{"scripts": {"test": "sh tools/run.sh"}}',
    "tools/run.sh": f"PYTHONPATH=. exec {sys.executable} -B -m pytest -q -p no:cacheprovider tests\n",
    "app/__init__.py": "", "app/base.py": "BASE = 7000\n", "app/calc.py": "def value():\n    return 0\n",
    "tests/test_calc.py": "from app.calc import value\n\ndef test_value():\n    assert value() == 0\n"}
NPM = f"""exec {sys.executable} -I -c 'import json, os
os.execvp("sh", ["sh", "-c", json.load(open("package.json"))["scripts"]["test"]])'"""
ENDS = "import os\nos._exit(0)\n"
LOOKS_UP = """
import re, subprocess
names = subprocess.run(["git", "cat-file", "--batch-all-objects", "--batch-check"],
                       capture_output=True, text=True).stdout
for name in re.findall(r"(\\w+) blob", names):
    text = subprocess.run(["git", "cat-file", "blob", name], capture_output=True, text=True).stdout
    if "return BASE" in text and "names" not in text:
        exec(text)
"""
# What a model could do in place of the work, as the files that it writes.
CHEATS = {
    "tests": {"tests/test_calc.py": "def test_value():\n    pass\n"},
    "conftest": {"conftest.py": "def pytest_sessionfinish(session):\n    session.exitstatus = 0\n"},
    "inner-conftest": {"app/conftest.py": ENDS, "tests/conftest.py": ENDS},
    "sitecustomize": {"sitecustomize.py": ENDS},
    "module": {"argparse.py": ENDS},
    "package": {"argparse/__init__.py": ENDS},
    "settings": {"pytest.ini": "[pytest]\naddopts = --collect-only\n"},
    "plugin": {"app/plugin.py": ENDS, "cheat.dist-info/METADATA": "Name: cheat\nVersion: 1\n",
               "cheat.dist-info/entry_points.txt": "[pytest11]\ncheat = app.plugin\n"},
    "makefile": {"Makefile": "test:\n\ttrue\n"},
    "gnumakefile": {"GNUmakefile": "test:\n\ttrue\n"},
    "npm-script": {"package.json": '{"scripts": {"test": "true"}}'},
    "shell-script": {"tools/run.sh": "exit 0\n"},
    "in-the-way": {"tests": "", "Makefile": "test:\n\ttrue\n"},
    "looks-up": {"app/calc.py": f"def value():\n    return 0\n{LOOKS_UP}"}}
HONEST = {
    "worker": {"app/calc.py": "from app.parts.sum import total\n\ndef value():\n    return total()\n",
               "app/base.py": "BASE, MORE = 7000, 41\n", "app/parts/__init__.py": "",
               "app/parts/sum.py": "from app.base import BASE, MORE\n\ndef total():\n    return BASE + MORE\n"}}


@on_linux
@pytest.mark.skipif(not shutil.which("make"), reason="make is absent: NOT TESTED that a Makefile gains nothing")
def test_whatever_a_model_does_to_what_runs_the_tests_gains_nothing(examined):
    deeds = {**CHEATS, **HONEST}
    made = examined(**{name: name for name in deeds})
    made.rig.program("npm", NPM)
    made.commit("begin", TESTED)
    made.commit("fix value 1", {
        "app/calc.py": "from app.base import BASE\n\ndef value():\n    return BASE + 41\n",
        "tests/test_calc.py": TESTED["tests/test_calc.py"].replace("== 0", "== 7041")})
    env = {"DEEDS": json.dumps(deeds)}
    report = json.loads(made.run("--check", "make test", "--questions", 1, "--json", env=env, timeout=300))
    assert report["questions"] == [made.commits["fix value 1"]] and report["not_counted"] == []
    outcomes = {one["model"].split(":")[0]: one["outcome"] for one in report["sittings"]}
    assert outcomes == {**dict.fromkeys(CHEATS, "check"), "worker": "passed"}


@on_linux
@needs_bubblewrap
def test_a_check_is_confined_and_it_is_said_what_it_may_not_write(examined):
    made = examined(able="able-1")
    for name in ("bwrap", "sandbox-exec"):
        (made.rig.bin / name).unlink()
    made.fix(1)
    outside = made.rig.home / "outside"
    outside.mkdir()
    words = ("--check", f"echo x > {outside}/log && sh check.sh", "--questions", 1)
    made.run(*words, status=1)
    assert list(outside.iterdir()) == []
    assert "Note: the check: it may not write" in made.err and "its check fails on the fix, too (1)" in made.err
    line = made.err.partition("to allow it: `")[2].partition("`")[0]
    (made.repo / "tasks.yaml").write_text(f"defaults: {{{line}}}\ntasks: {{a: {{prompt: x}}}}\n")
    assert "able:1b  1 of 1" in made.run(*words)
    assert (outside / "log").read_text() == "x\n"


@on_linux
def test_a_message_of_another_encoding_is_asked_in_characters_that_a_prompt_has(examined, tmp_path):
    made = examined(spy="spy")
    made.fix(1)
    raw = made.rig.git("cat-file", "commit", "HEAD").encode().replace(b"fix value", b"fix caf\xe9 \x1b[2J value")
    commit = subprocess.run(["git", "hash-object", "-t", "commit", "-w", "--stdin"], cwd=made.repo,
                            input=raw + b"\n", capture_output=True, check=True).stdout.decode().strip()
    made.rig.git("reset", "-q", "--soft", commit)
    report = made.json("--questions", 1, env={"SPY": "true", "SPY_FILE": tmp_path / "spied"})
    assert report["questions"] == [commit] and report["not_counted"] == []
    prompt = json.loads((tmp_path / "spied").read_text().splitlines()[0])[0]
    assert re.match(r"fix caf\S+ \S+ value 1\n", prompt) and "\x1b" not in prompt


@on_linux
def test_a_check_that_cannot_be_run_ends_the_exam(examined):
    made = examined(able="able-1")
    made.fix(1)
    made.run("--check", "absent-program tests", status=1)
    assert "the check cannot be run: `absent-program tests`" in made.err
    made.run("--check", "echo \x1b[2J", status=2)
    assert "--check: expected a shell command" in made.err and "\x1b" not in made.err


@on_linux
def test_an_exam_that_was_ended_goes_on_with_what_is_missing(examined):
    made = examined(half="half-0.5", endless="endless")
    made.fixes(1, 2, 3)
    (made.repo / "tasks.yaml").write_text("defaults: {deadline: 300s}\ntasks: {a: {prompt: x}}\n")
    words = [sys.executable, "-I", "-S", PROGRAM, "bench", "--exam", "--check", "sh check.sh"]
    child = subprocess.Popen(words, cwd=made.repo, env=made.rig.environment(),
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    kept = made.repo / ".subagent-fleet/exam.json"
    until = time.monotonic() + 100
    while not kept.exists() or len(json.loads(kept.read_text())["sittings"]) < 3:
        assert time.monotonic() < until
        time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=30)
    assert child.returncode == 130 and b"The same command continues." in err
    assert b"half:1b" in out and b"endless:1b" not in out.split(b"Commit")[0]
    before = json.loads(kept.read_text())["sittings"]
    report = made.json("--model", "half")
    assert report["sittings"] == before and len(before) == 3, "nobody is asked twice"
    assert len(made.json("--model", "half", "--times", 2)["sittings"]) == 6


@on_linux
def test_a_check_that_nobody_typed_and_a_file_that_came_along_are_not_believed(examined):
    made = examined(able="able-1")
    made.fixes(1, 2)
    made.write({"Makefile": "test:\n\tsh check.sh\n"})
    made.run("--questions", 2, status=3)
    assert "which you did not type" in made.err and "make test" in made.err
    assert not (made.repo / ".subagent-fleet/exam.json").exists()
    (made.repo / "tasks.yaml").write_text(
        "defaults: {setup: [touch /tmp/x]}\ntasks: {a: {prompt: x}}\n")
    made.run("--check", "sh check.sh", status=3)
    assert "would run `touch /tmp/x; sh check.sh`" in made.err, "setup was not typed either"
    (made.repo / "tasks.yaml").unlink()

    report = made.json("--questions", 2)
    kept = made.repo / ".subagent-fleet/exam.json"
    page = json.loads(kept.read_text())
    page["tried"] = [{"commit": made.commits["begin to test"], "reason": ""}]  # of an earlier version
    page["sittings"] += [{"commit": "x"}, {**page["sittings"][0], "outcome": "\x1b[2J"},
                         {**page["sittings"][0], "repository": "elsewhere"}]
    kept.write_text(json.dumps(page))
    again = made.json("--questions", 2)
    assert again["questions"] == report["questions"] and again["models"] == report["models"]
    kept.write_text("[" * 100_000)
    assert made.json("--questions", 2)["questions"] == report["questions"]


@pytest.mark.parametrize("words, said", [
    (("--questions", "3"), "--questions: for the exam only"), (("--check", "x"), "--check: for the exam only"),
    (("--exam", "--since", "90d"), "the newest commits come first")])
def test_words_of_the_exam_that_cannot_be_meant_are_refused(run_cli, tmp_path, words, said):
    (tmp_path / "fleet.yaml").write_text(EXAMPLE)
    done = run_cli("bench", *words)
    assert done.returncode == 2 and said in done.stderr


@pytest.mark.parametrize("slug, files, online, said", [
    ("no-check", {}, True, "no command is known that runs this project's tests"),
    ("no-models", {"Makefile": "test:\n"}, False, "no model of this fleet can be asked now"),
    ("unasked-check", {"go.mod": "\n"}, True, "would run `go vet ./... && go test ./...`, which you did not type"),
    ("unasked-check", {"test_calc.py": "\n"}, True, "would run `python3 -m unittest -q`, which you did"),
])
def test_an_exam_that_cannot_begin_says_why(run_cli, fake_node, tmp_path, slug, files, online, said):
    node = fake_node({"able:1b": {}})
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "fleet.yaml").write_text(FLEET.replace("PORT", "4000").replace(
        "URL", node.endpoint if online else "http://127.0.0.1:9").replace("MODELS", ABLE))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = run_cli("bench", "--exam")
    assert done.returncode in (1, 2, 3) and said in done.stderr, slug


def test_who_is_better_by_the_exam_is_stronger_whatever_its_size(tmp_path):
    state = sf.NodeState("mini", "http://127.0.0.1:1", models=(
        sf.NodeModel("small:8b", 5 * 10 ** 9, "8B", capabilities=("completion", "tools"), digest="a"),
        sf.NodeModel("large:30b", 19 * 10 ** 9, "30B", capabilities=("completion", "tools"), digest="b")))

    def plan(small, large, digest="a"):
        measured = [sf.Measurement("mini", state.endpoint, name, exam=sf.ExamScore(passed, 60, 60, "r"),
                                   digest=of)
                    for name, passed, of in (("small:8b", small, digest), ("large:30b", large, "b"))]
        plan = sf.plan_assignment([state], measured, {"mini": 64})
        return plan.model("main session").ollama_model, plan.why["main session"]

    assert plan(54, 30) == ("small:8b", "the strongest: passed 54 of 60 in the exam, more than large:30b")
    assert plan(35, 30)[0] == "large:30b", "not told apart"
    assert plan(54, 30, digest="old")[0] == "large:30b", "another model by now"
    for digest, main in (("b", "small:8b"), ("old", "large:30b"), ("", "small:8b")):
        failed = sf.Measurement("mini", state.endpoint, "large:30b", tools=sf.Score(0, 6), digest=digest)
        planned = sf.plan_assignment([state], [failed], {"mini": 64})
        assert planned.model("main session").ollama_model == main, digest


# -- what is said of models --

def result_of(name, passed, asked):
    model = sf.Model(name, "mini", f"{name}:1b", name)
    sittings = [sf.Sitting(f"{number:040x}", "c", "r", f"{name}:1b",
                           "passed" if number < passed else "check") for number in range(asked)]
    return sf.plan_result(sf.Examinee((model,), ""), sittings)


@pytest.mark.parametrize("passed, asked, low, high", [  # as others compute them (statsmodels)
    (16, 20, 0.584, 0.919), (9, 10, 0.596, 0.982), (5, 10, 0.237, 0.763), (0, 10, 0, 0.278),
    (10, 10, 0.722, 1), (54, 60, 0.799, 0.953), (30, 60, 0.377, 0.623)])
def test_interval_is_wilsons(passed, asked, low, high):
    interval = result_of("a", passed, asked).score.interval
    assert interval == pytest.approx((low, high), abs=0.001)


def test_ten_questions_seldom_tell_abilities_of_90_and_50_percent_apart_and_sixty_do():
    def chance(questions):
        """How likely it is that they are told apart: the sum over all that can come out."""
        def weight(passed, ability):
            ways = math.comb(questions, passed)
            return ways * ability ** passed * (1 - ability) ** (questions - passed)
        scores = [result_of("a", passed, questions).score for passed in range(questions + 1)]
        return sum(weight(good, 0.9) * weight(fair, 0.5) for good, one in enumerate(scores)
                   for fair, other in enumerate(scores) if one.beats(other) or other.beats(one))

    assert chance(10) == pytest.approx(0.1548, abs=0.0001)
    assert chance(60) == pytest.approx(0.9901, abs=0.0001)


def test_asking_the_same_questions_again_tells_no_more_than_the_questions_do():
    once = sf.ExamScore(9, 10, 10, "r")
    assert sf.ExamScore(90, 100, 10, "r").interval == once.interval
    assert not sf.ExamScore(90, 100, 10, "r").beats(sf.ExamScore(50, 100, 10, "r"))


def test_exams_of_two_repositories_are_not_compared():
    assert not sf.ExamScore(60, 60, 60, "r").beats(sf.ExamScore(0, 60, 60, "other"))


@on_linux
def test_abilities_of_90_and_50_percent_are_told_apart_by_24_questions_and_not_by_ten(examined):
    """What each can is drawn from the prompt's hash: with another prompt it may take more."""
    made = examined(good="good-0.9", fair="fair-0.5")
    made.fixes(*range(1, 25))
    report = made.json("--questions", 10, timeout=300)
    assert [row["ties"] for row in report["told_apart"]] == [["fair:1b"], []]
    assert [row["beats"] for row in report["told_apart"]] == [[], []]
    advised = json.loads(made.type("recommend", "--json"))
    assert any("the exam does not tell them apart" in known for known in advised["unknown"])

    report = made.json("--questions", 24, timeout=400)
    assert report["told_apart"][0] == {"model": "good:1b", "beats": ["fair:1b"], "ties": []}
    scores = {model["model"]: model["score"] for model in report["models"]}
    assert [score["asked"] for score in scores.values()] == [24, 24]
    passed = scores["good:1b"]["passed"]
    assert passed >= 20 and scores["fair:1b"]["passed"] <= 16
    advised = json.loads(made.type("recommend", "--json"))
    assert not any("the exam" in known for known in advised["unknown"])
    whys = {row["role"]: row["why"] for row in advised["roles"]}
    assert whys["main session"] == \
        f"the strongest: passed {passed} of 24 in the exam, more than fair:1b"
