"""`run` with the real Claude Code: tasks in worktrees on two nodes, killed, asked, steered, attached.

What is seen is seen from outside: by `tasks`, receipts, git, processes and what was said.
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

import rig
from tools import ROOT, SCRIPT

FLEET = """
project:
  name: runs
  gateway: {{provider: builtin, port: {port}}}
  claude: {{main: here, opus: here, sonnet: here, haiku: here, fable: here}}
nodes:
  studio: {{endpoint: {studio}}}
  mini: {{endpoint: {mini}}}
models:
  here: {{node: studio, ollama_model: runner, litellm_alias: claude-run-local, context: 65536, max_parallel: 2}}
  there: {{node: mini, ollama_model: runner, litellm_alias: claude-run-local, context: 65536, max_parallel: 2}}
agents:
  implementer: {{model: here, description: implements, tools: [Read, Grep, Glob, Edit, Write, Bash]}}
"""
OVER = ("done", "review", "failed", "stopped", "parked")
MEND = "test \"$(cat mended.txt 2>/dev/null | wc -l)\" -ge 2 || { echo '@play mend done'; exit 1; }"


MENDED = {"prompt": "@play work done", "check": MEND}


class Runs:
    """A repository of a user with a fleet, whose tasks are worked on."""

    def __init__(self, project, port):
        self.project, self.port, self.begun = project, port, []
        self.repo = project.folder
        self.state = self.repo / ".git/subagent-fleet/run"

    def git(self, *words):
        return subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words],
                              cwd=self.repo, check=True, capture_output=True).stdout.decode().strip()

    def write(self, **tasks):
        self.project.write("tasks.yaml", json.dumps({
            "defaults": {"agent": "implementer", "deadline": 300}, "tasks": tasks}))

    def start(self, *words, **more):
        process = rig.Process(self.project.argv("run", *words), log=self.repo.parent / "run.log",
                              env={**self.project.environment(), **more}, cwd=self.repo)
        self.begun.append(process)
        return process

    def end(self):
        """End what a test may have left at work, so that the next one stands alone."""
        for process in self.begun:
            process.stop(signal.SIGINT)
        self.begun.clear()
        if self.processes() or any(state not in OVER for state in self.states().values()):
            self.project.run("task", "stop", "*", quiet=True)

    def task(self, name):
        return self.project.json("tasks", name)

    def states(self):
        return {task["name"]: task["state"] for task in self.project.json("tasks")["tasks"]}

    def wait(self, name, *states, seconds=60):
        rig.wait_until(lambda: self.states().get(name) in states, seconds=seconds,
                       what=f"{name} to be {states}: {self.states()}")

    def receipt(self, name, number=1):
        return json.loads((self.state / f"tasks/{name}/{number}/receipt.json").read_text())

    def output(self, name, number=1):
        path = self.state / f"tasks/{name}/{number}/out.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def wait_for_call(self, name):
        """Wait until an agent is in the middle of a command."""
        rig.wait_until(lambda: any("tool_use" in json.dumps(event) for event in self.output(name)
                                   if event["type"] == "assistant"), what=f"a call of {name}")

    def sessions(self, name):
        """The sessions in which a task was worked on."""
        return {event["session_id"] for event in self.output(name) if event.get("session_id")}

    def processes(self, *, of=b""):
        """What carries the mark of a task of this user; with a word in a command of its own."""
        found = []
        confines = ("sh\n", "bwrap\n") if of else ()  # which name all that they run
        home = f"HOME={self.project.home}\0".encode()
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                content = path.read_bytes()
                if home in content and b"SUBAGENT_FLEET_TASK=" in content \
                        and of in path.with_name("cmdline").read_bytes() \
                        and path.with_name("comm").read_text() not in confines:
                    found.append(int(path.parent.name))
        return found


def make_runs(place, nodes, trap):
    """Let a user begin: a repository with one commit, a fleet, a Claude Code that was seen before."""
    for node in nodes.values():
        node.ensure()
        node.create("runner:latest", "runner")
    project = rig.Project(place, SCRIPT, trap)
    project.write("README.md", "hello\n")
    runs = Runs(project, rig.free_port())
    project.write("fleet.yaml", FLEET.format(
        port=runs.port, **{name: node.url for name, node in nodes.items()}))
    runs.git("init", "-q", "-b", "main")
    project.write(f"../{project.home.name}/.gitconfig", "[user]\nname = a\nemail = a@b\n")
    project.write(f"../{project.home.name}/.claude.json", json.dumps({
        "hasCompletedOnboarding": True, "theme": "dark",
        "projects": {str(runs.repo): {"hasTrustDialogAccepted": True}}}))
    return runs


def end_runs(runs):
    runs.end()
    with contextlib.suppress(OSError, ValueError):
        os.kill(int((runs.state / "serve.pid").read_text()), signal.SIGTERM)
    assert runs.processes() == []


@pytest.fixture(scope="module")
def shared_runs(ground, nodes, trap):
    runs = make_runs(ground / "runs", nodes, trap)
    runs.project.write(".gitignore",
                       ".env.subagent-fleet\n.subagent-fleet/\n.claude/\nlitellm_config.yaml\n")
    runs.git("add", ".")
    runs.git("commit", "-qm", "start")
    runs.project.run("generate")
    runs.project.run("warmup")
    yield runs
    end_runs(runs)


@pytest.fixture
def runs(shared_runs):
    yield shared_runs
    shared_runs.end()


def test_eight_tasks_on_two_nodes_as_many_at_once_as_there_are_slots(runs):
    runs.write(**{f"t{number}": {"prompt": "@play nap work done", "check": "test -s work.txt"}
                  for number in range(8)})
    counts, over = [], threading.Event()

    def watch():
        while not over.wait(0.1):
            counts.append(len(runs.processes(of=b"stream-json")))
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        said = runs.project.run("run", quiet=True)
    finally:
        over.set()
        watcher.join()
    assert re.search(r"\b8 done\b", said), said
    # Two nodes, two slots each. Who is told to end takes up to a second to do so.
    assert 4 in counts
    assert not any(min(counts[at:at + 10]) > 4 for at in range(len(counts) - 9)), counts
    served = {row["node"] for number in range(8) for row in runs.receipt(f"t{number}")["served"]}
    assert served == {"studio", "mini"}
    receipt = runs.receipt("t0")
    assert receipt["tools"] == {"Bash": 2} and receipt["files"] == [["work.txt", 1, 0]]
    assert sum(row["requests"] for row in receipt["served"]) >= 3
    assert runs.processes() == [] and runs.git("status", "--porcelain") == "?? tasks.yaml"
    assert runs.git("show", "run/t0:work.txt") == "work"


def test_a_question_outlives_the_supervisor_and_its_answer_goes_on(runs):
    runs.write(ask={"prompt": "@play ask work done", "check": "test -s work.txt"})
    process = runs.start("ask")
    runs.wait("ask", "asking")
    process.kill()
    agents = runs.processes(of=b"stream-json")
    assert len(agents) == 1
    shown = runs.project.run("task", "answer", quiet=True)
    assert "Which database?" in shown and re.search("1 +sqlite", shown)
    runs.project.run("task", "answer", "ask", "9", status=2, quiet=True)
    assert re.search("ask +answered +postgres", runs.project.run("task", "answer", "ask", "2",
                                                                 quiet=True))
    runs.project.run("run", "ask", quiet=True)
    assert len(runs.sessions("ask")) == 1 and runs.states()["ask"] == "done"
    assert runs.receipt("ask")["questions"] == 1
    told = json.dumps([event for event in runs.output("ask") if event["type"] == "user"])
    assert "postgres" in told
    inits = [event for event in runs.output("ask") if event.get("subtype") == "init"]
    assert inits and all("AskUserQuestion" in event["tools"] for event in inits)


def test_a_question_outlives_supervisor_and_agent(runs):
    runs.write(both={"prompt": "@play ask work done", "check": "test -s work.txt"})
    process = runs.start("both")
    runs.wait("both", "asking")
    process.kill()
    for number in runs.processes():
        with contextlib.suppress(OSError):
            os.kill(number, signal.SIGKILL)
    rig.wait_until(lambda: runs.processes() == [], what="the agent to be gone")
    runs.project.run("task", "answer", "both", "use mariadb\n@play work done", quiet=True)
    runs.project.run("run", "both", quiet=True)
    assert runs.states()["both"] == "done" and len(runs.sessions("both")) == 1


def test_what_is_said_steers_the_turn_that_runs(runs):
    runs.write(steer={"prompt": "@play nap work done", "rounds": 0, "tries": 1,
                      "check": "test -s mended.txt && ! test -e work.txt"})
    process = runs.start("steer")
    runs.wait("steer", "running")
    runs.wait_for_call("steer")
    runs.project.run("task", "say", "steer", "@play mend done", quiet=True)
    assert process.child.wait(60) == 0, process.text()
    assert len(runs.receipt("steer")["check"]["rounds"]) == 1
    results = [event for event in runs.output("steer") if event["type"] == "result"]
    assert len(results) == 1  # one turn


def test_a_check_that_fails_twice_is_mended_twice_in_one_session(runs):
    runs.write(mend=MENDED)
    said = runs.project.run("run", "mend", quiet=True)
    receipt = runs.receipt("mend")
    assert receipt["check"]["rounds"] == [1, 1, 0] and receipt["try"] == 1, said
    assert len(runs.sessions("mend")) == 1
    assert runs.git("show", "run/mend:mended.txt") == "mended\nmended"


def test_a_breach_by_python_is_parked_with_the_files_and_nothing_is_merged(runs):
    before = runs.git("rev-parse", "main")
    runs.write(breach={"prompt": "@play work breach done", "check": "test -s work.txt",
                       "touch": ["work.txt", "src/**"]})
    runs.project.run("run", "breach", status=1, quiet=True)
    task = runs.task("breach")
    assert (task["state"], task["cause"]) == ("parked", "scope") and "secret.txt" in task["reason"]
    assert runs.receipt("breach")["outside"] == ["secret.txt"]
    assert runs.git("rev-parse", "main") == before == runs.git("rev-parse", "run/breach")
    assert (pathlib.Path(task["worktree"]) / "secret.txt").exists()


def test_success_in_words_alone_is_a_failure(runs):
    runs.write(words={"prompt": "@play done", "check": "test -s work.txt", "rounds": 1, "tries": 1})
    runs.project.run("run", "words", status=1, quiet=True)
    assert runs.states()["words"] == "failed"
    flags = " ".join(runs.receipt("words")["flags"])
    assert "made no call that could change a file" in flags


def test_words_of_a_retry_arrive_in_the_session_that_goes_on(runs):
    runs.write(again={"prompt": "@play done", "check": "test -s work.txt", "rounds": 0, "tries": 1})
    runs.project.run("run", "again", status=1, quiet=True)
    runs.write(again={"prompt": "The new words.\n@play work done", "check": "test -s work.txt",
                      "rounds": 0, "tries": 1})
    runs.project.run("task", "retry", "again", quiet=True)
    runs.project.run("run", "again", quiet=True)
    assert runs.states()["again"] == "done"


def test_the_context_of_a_session_is_what_the_gateway_counted(runs):
    runs.write(window={"prompt": "@play nap nap done", "changes": "none", "check": "true"})
    process = runs.start("window")
    runs.wait("window", "running")
    seen = rig.wait_until(lambda: runs.task("window").get("context_percent"), what="its context", seconds=20)
    assert 0 < seen <= 100
    assert process.child.wait(60) == 0, process.text()


def read_terminal(argv, environment, directory, *, leave_at=b"", seconds=60):
    """Run a command in a terminal; leave by Ctrl-C twice once a text is shown. Return what was.

    Claude Code asks first whether its person trusts a directory that it has not seen: they do.
    """
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(directory)
        os.execve(argv[0], argv, environment)
    shown, typed_at, deadline = b"", 0.0, time.monotonic() + seconds
    has_agreed = False
    try:
        while time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.2)[0]:
                shown += os.read(terminal, 65536)
            elif not has_agreed and b"cancel" in shown and leave_at not in shown:
                has_agreed = True
                time.sleep(0.5)
                os.write(terminal, b"\x1b[B")  # down, to "Yes, I trust this folder"
                time.sleep(0.5)
                os.write(terminal, b"\r")
            if leave_at and leave_at in shown and time.monotonic() - typed_at > 2.0:
                os.write(terminal, b"\x03")
                time.sleep(0.3)
                os.write(terminal, b"\x03")
                typed_at = time.monotonic()
    except OSError:  # Linux says so when the last one has gone
        pass
    os.close(terminal)
    os.waitpid(child, 0)
    return shown


def test_a_person_takes_the_session_and_gives_it_back(runs):
    runs.write(attach={"prompt": "@play long done", "check":
                       "test -s work.txt || { echo '@play work done'; exit 1; }"})
    process = runs.start("attach", "--keep-going")
    runs.wait("attach", "running")
    runs.wait_for_call("attach")
    shown = read_terminal(runs.project.argv("task", "attach", "attach"),
                          runs.project.environment(COLUMNS="100", LINES="40"), runs.repo,
                          leave_at=b"@play long")
    assert b"@play long" in shown, shown[-2000:]
    runs.wait("attach", "done")
    assert len(runs.sessions("attach")) == 1
    assert process.stop(signal.SIGINT) == 130


def test_attach_that_only_looks_costs_a_done_task_nothing(runs):
    runs.write(mend=MENDED)
    assert runs.states()["mend"] == "done"
    before = runs.task("mend")["try"], runs.git("rev-parse", "run/mend")
    shown = read_terminal(runs.project.argv("task", "attach", "mend"),
                          runs.project.environment(COLUMNS="100", LINES="40"), runs.repo,
                          leave_at=b"@play mend")
    assert b"@play mend" in shown, shown[-2000:]  # the gateway was started for it
    assert runs.states()["mend"] == "done"
    assert (runs.task("mend")["try"], runs.git("rev-parse", "run/mend")) == before


def test_sigkill_of_everything_and_run_again(runs):
    runs.write(**{f"k{number}": {"prompt": "@play nap nap nap nap work done", "check": "test -s work.txt"}
                  for number in range(4)})
    process = runs.start(*[f"k{number}" for number in range(4)])
    for number in range(4):
        runs.wait(f"k{number}", "running")
    time.sleep(1)
    process.kill()
    for number in runs.processes():
        with contextlib.suppress(OSError):
            os.kill(number, signal.SIGKILL)
    rig.wait_until(lambda: runs.processes() == [], what="everything to be gone")
    # Each is resumed in its session and told to go on; the script's last step says it is done.
    for number in range(4):
        runs.project.run("task", "say", f"k{number}", "@play work done", quiet=True)
    said = runs.project.run("run", *[f"k{number}" for number in range(4)], quiet=True)
    assert re.search(r"\b4 done\b", said), said
    for number in range(4):
        assert len(runs.sessions(f"k{number}")) == 1
        assert runs.receipt(f"k{number}")["verdict"] == "done"
    assert runs.processes() == []


def test_then_all_of_it_is_tidied_away(runs):
    assert "would" in runs.project.run("task", "tidy", "--dry-run", quiet=True)
    runs.project.run("task", "tidy", quiet=True)
    assert runs.git("worktree", "list").count("\n") == 0
    assert runs.git("show", "refs/subagent-fleet/breach/1:secret.txt") == "x"


# -- README, as it is written --

README = (ROOT / "README.md").read_text(encoding="utf-8")
# What each of its prompts comes to, with a model that does what a script says.
SCRIPTS = {"parser": "wrong done right done", "guide": "docs done", "storage": "ask store done"}


def test_the_five_minutes_of_readme_in_a_repository_without_a_gitignore(ground, nodes, trap):
    runs = make_runs(ground / "readme", nodes, trap)
    python = runs.project.bin / "python3"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')  # one that has pytest
    python.chmod(0o755)
    runs.project.write("src/dates.py", "day = 0\n")
    runs.project.write("tests/test_old.py", "def test_old():\n    assert True\n")
    runs.project.write("conftest.py", "")
    runs.git("add", ".")
    runs.git("commit", "-qm", "start")
    text = re.search(r"```yaml\n(# tasks\.yaml\n.*?)```", README, re.S)[1]
    for name, script in SCRIPTS.items():
        text, count = re.subn(rf"(?m)^(  {name}:\n    prompt: )(.*)$", rf'\1"\2\\n@play {script}"', text)
        assert count == 1, f"README has no prompt of {name}"
    runs.project.write("tasks.yaml", text)
    with_caches = {"PYTHONDONTWRITEBYTECODE": ""}
    runs.project.run("validate", quiet=True)
    process = runs.start(**with_caches)  # no `generate`: it makes the key itself
    try:
        runs.wait("storage", "asking")
        assert "Which database?" in runs.project.run("task", "answer", quiet=True)
        runs.project.run("task", "answer", "storage", "1", quiet=True)
        assert process.child.wait(120) == 0, process.text()
        assert re.search(r"\b3 done\b", process.text()), process.text()
        assert runs.receipt("parser")["check"]["rounds"] == [1, 0]
        runs.git("merge", "-q", "run/guide", "run/storage", "-m", "all")
        listed = runs.git("ls-tree", "-r", "--name-only", "main").split()
        assert {"src/dates.py", "tests/test_dates.py", "docs/dates.md", "src/store.py"} <= set(listed)
        assert not [path for path in listed if "cache" in path or path.endswith(".pyc")]
        assert ".env.subagent-fleet" not in listed
        runs.project.run("task", "tidy", quiet=True)
        assert runs.git("worktree", "list").count("\n") == 0
        assert runs.git("branch", "--format=%(refname:short)") == "main"
    finally:
        end_runs(runs)


def test_three_prompts_in_one_line(ground, nodes, trap):
    runs = make_runs(ground / "line", nodes, trap)
    runs.git("add", ".")
    runs.git("commit", "-qm", "start")
    try:
        said = runs.project.run("run", "a:@play work done", "b:@play mend done", "c:@play docs done",
                                quiet=True)
        assert set(runs.states().values()) == {"review"}, said
        runs.git("merge", "-q", "run/a", "run/b", "run/c", "-m", "all")
        assert set(runs.states().values()) == {"done"}
        listed = set(runs.git("ls-tree", "-r", "--name-only", "main").split())
        assert {"work.txt", "mended.txt", "docs/dates.md"} <= listed
    finally:
        end_runs(runs)


# -- other coders, on the fleet: nodes that do what each program is asked, with its own tools --

def test_without_a_fleet_a_coder_works_on_its_own_login(ground, trap):
    project = rig.Project(ground / "own", SCRIPT, trap)
    capture = rig.Capture()
    project.write("README.md", "hello\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=project.folder,
                       check=True)
    own = {"ANTHROPIC_BASE_URL": capture.url, "ANTHROPIC_AUTH_TOKEN": "sk-the-persons-own",
           "CLAUDE_CODE_USE_BEDROCK": "", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
           "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    try:
        project.run("run", "a:Say a word", status=1, quiet=True, **own)  # it says one, and does nothing
        asked = [headers for path, headers, _ in capture.requests if path.endswith("/v1/messages")]
        assert asked
        logins = {headers.get("Authorization") or headers.get("authorization") for headers in asked}
        assert logins == {"Bearer sk-the-persons-own"}
        assert not list(project.folder.glob(".env*"))
    finally:
        capture.close()


def load_harnesses():
    """Return the live test_harnesses, which shares its name with another file of tests."""
    path = pathlib.Path(__file__).with_name("test_harnesses.py")
    spec = importlib.util.spec_from_file_location("live_harnesses", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["codex", "opencode", "aider", "qwen"])
def test_another_coder_does_a_task_on_the_fleet(tmp_path, trap, name):
    harnesses = load_harnesses()

    class InWorktree(harnesses.Bench):
        """A Bench whose program works in a worktree: its path is in what it asks."""

        def __init__(self, *words):
            super().__init__(*words)
            for scripted in (self.studio, self.mini):
                say = scripted.say

                def find(connection, request, step, is_main, scripted=scripted, say=say):
                    seen = re.search(r"(/[^\s\"'\\<>]*/two)(?=[\s\"'\\<>/])", json.dumps(request))
                    scripted.note = f"{seen[1]}/note.txt" if seen else "note.txt"
                    say(connection, request, step, is_main)
                scripted.say = find

    wanted = list(trap.wanted)
    made = InWorktree(tmp_path / name, name, trap)
    # Else aider writes a name into the config of the person's repository, which it may not.
    made.project.write(f"../{made.project.home.name}/.gitconfig", "[user]\nname = a\nemail = a@b\n")
    try:
        done = subprocess.run(
            made.project.argv("run", f"two:{harnesses.ASKED}", "--coder", name, "--check", "grep -q two note.txt"),
            cwd=made.project.folder, env=made.environment(), stdin=subprocess.DEVNULL,
            capture_output=True, timeout=180)
        said = (done.stdout + done.stderr).decode("utf-8", "replace")
        assert done.returncode == 0, said[-3000:]
        shown = subprocess.run(["git", "show", "run/two:note.txt"], cwd=made.project.folder,
                               capture_output=True, check=True).stdout
        assert shown == b"two\n" and made.note.read_text() == "one\n"
        kept = made.project.folder / ".git/subagent-fleet/run/tasks/two/1/receipt.json"
        assert json.loads(kept.read_text())["confined"] == rig.CONFINED
        receipts = made.receipts()
        assert receipts and {receipt["node"] for receipt in receipts} <= {"studio", "mini"}
        assert trap.wanted == wanted
    finally:
        made.stop()
        shutil.rmtree(made.project.home, ignore_errors=True)


def test_a_task_moves_up_two_conflict_and_one_branch_lands(ground, nodes, trap):
    runs = make_runs(ground / "ladder", nodes, trap)
    fleet = (runs.repo / "fleet.yaml").read_text().replace(
        "there: {node: mini, ollama_model: runner, litellm_alias: claude-run-local",
        "there: {node: mini, ollama_model: runner, litellm_alias: claude-small-local")
    runs.project.write("fleet.yaml", fleet)
    runs.project.write("src/dates.py", "day = 0\n")
    runs.project.write(".gitignore", ".env.subagent-fleet\n.subagent-fleet/\n.claude/\n"
                       "litellm_config.yaml\n")
    runs.git("add", ".")
    runs.git("commit", "-qm", "start")
    runs.project.run("generate")
    try:
        grep = "grep -qx 'day = [12]' src/dates.py"
        runs.write(up={**MENDED, "models": ["there", "here"], "rounds": 1},
                   wrong={"prompt": "@play wrong done", "check": grep},
                   right={"prompt": "@play right done", "check": grep})
        said = " ".join(runs.project.run("run", "--land", quiet=True).split())
        first, second = runs.receipt("up"), runs.receipt("up", 2)
        assert (first["rung"], first["check"]["rounds"]) == ("claude-small-local", [1, 1])
        assert (second["rung"], second["verdict"]) == ("claude-run-local", "done")
        assert {row["node"] for row in first["served"]} == {"mini"}
        assert {row["node"] for row in second["served"]} == {"studio"}
        assert re.search("(right conflicts with wrong|wrong conflicts with right) in src/dates.py", said), said
        assert "3 landed on main" in said and "checked as a whole." in said
        assert "0 of 1 done at home, 1 after moving up to studio." in said
        assert runs.git("show", "main:mended.txt") == "mended\nmended"
        assert runs.git("show", "main:src/dates.py") in ("day = 1", "day = 2")
        assert runs.git("status", "--porcelain") == "?? tasks.yaml"
    finally:
        end_runs(runs)
