"""`run` with the real Claude Code: tasks in worktrees on two nodes, killed, asked, steered, attached."""

import contextlib
import json
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import time

import pytest

import rig
from tools import SCRIPT

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
  implementer: {{model: here, description: implements}}
"""
MEND = "test \"$(cat mended.txt 2>/dev/null | wc -l)\" -ge 2 || { echo '@play mend done'; exit 1; }"


class Runs:
    """A repository of a user with a fleet, whose tasks are worked on."""

    def __init__(self, project, port):
        self.project, self.port = project, port
        self.repo = project.folder
        self.state = self.repo / ".git/subagent-fleet/run"

    def git(self, *words):
        return subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words],
                              cwd=self.repo, check=True, capture_output=True).stdout.decode().strip()

    def write(self, **tasks):
        self.project.write("tasks.yaml", json.dumps({
            "defaults": {"agent": "implementer", "deadline": 300}, "tasks": tasks}))

    def start(self, *words):
        return rig.Process(self.project.argv("run", *words), log=self.repo.parent / "run.log",
                           env=self.project.environment(), cwd=self.repo)

    def entries(self):
        path = self.state / "journal.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines()]

    def states(self):
        return {task["name"]: task["state"] for task in self.project.json("tasks")["tasks"]}

    def journal(self, name):
        return [entry["to"] for entry in self.entries()
                if entry.get("task") == name and "to" in entry]

    def wait(self, name, *states, seconds=60):
        def is_there():
            journal = self.journal(name)
            return journal and journal[-1] in states
        rig.wait_until(is_there, seconds=seconds, what=f"{name} to be {states}: "
                       f"{self.journal(name)}")

    def receipt(self, name, number=1):
        return json.loads((self.state / f"tasks/{name}/{number}/receipt.json").read_text())

    def output(self, name, number=1):
        lines = (self.state / f"tasks/{name}/{number}/out.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def processes(self):
        """What carries the mark of these tasks, by the environment."""
        found = []
        mark = f"SUBAGENT_FLEET_TASK={self.entries()[0]['run']}/".encode()
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes():
                    found.append(int(path.parent.name))
        return found


@pytest.fixture(scope="module")
def runs(ground, nodes, trap):
    for node in nodes.values():
        node.ensure()
        node.create("runner:latest", "runner")
    project = rig.Project(ground / "runs", SCRIPT, trap)
    project.write("README.md", "hello\n")
    runs = Runs(project, rig.free_port())
    project.write("fleet.yaml", FLEET.format(
        port=runs.port, **{name: node.url for name, node in nodes.items()}))
    project.write(".gitignore", ".env.subagent-fleet\n.subagent-fleet/\n.claude/\nlitellm_config.yaml\n")
    runs.git("init", "-q", "-b", "main")
    runs.git("add", ".")
    runs.git("commit", "-qm", "start")
    project.run("generate")
    project.run("warmup")
    project.write("../runs-home/.claude.json", json.dumps({
        "hasCompletedOnboarding": True, "theme": "dark",
        "projects": {str(runs.repo): {"hasTrustDialogAccepted": True}}}))
    yield runs
    project.run("task", "stop", "*")
    with contextlib.suppress(OSError, ValueError):
        os.kill(int((runs.state / "serve.pid").read_text()), signal.SIGTERM)
    assert runs.processes() == []


def test_eight_tasks_on_two_nodes_as_many_at_once_as_there_are_slots(runs):
    runs.write(**{f"t{number}": {"prompt": "@play nap work done", "check": "test -s work.txt"}
                  for number in range(8)})
    said = runs.project.run("run", quiet=True)
    assert said.endswith("8 done.\n"), said
    at_work, most = set(), 0
    for entry in runs.entries():
        if entry.get("to") in ("starting", "running", "checking"):
            at_work.add(entry["task"])
        elif "to" in entry:
            at_work.discard(entry["task"])
        most = max(most, len(at_work))
    assert most == 4  # two nodes, two slots each
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
    assert runs.processes() != []
    assert "1  sqlite" in runs.project.run("task", "answer", quiet=True)
    assert re.search("ask +answered +postgres", runs.project.run("task", "answer", "ask", "2",
                                                                 quiet=True))
    runs.project.run("run", "ask", quiet=True)
    assert runs.journal("ask").count("starting") == 1 and runs.states()["ask"] == "done"
    assert runs.receipt("ask")["questions"] == 1
    told = json.dumps([event for event in runs.output("ask") if event["type"] == "user"])
    assert "postgres" in told


def test_what_is_said_steers_the_turn_that_runs(runs):
    runs.write(steer={"prompt": "@play nap work done", "rounds": 0, "tries": 1,
                      "check": "test -s mended.txt && ! test -e work.txt"})
    process = runs.start("steer")
    runs.wait("steer", "running")
    rig.wait_until(lambda: any("tool_use" in json.dumps(event) for event in runs.output("steer")
                               if event["type"] == "assistant"), what="the nap")
    runs.project.run("task", "say", "steer", "@play mend done", quiet=True)
    assert process.child.wait(60) == 0, process.text()
    assert runs.journal("steer").count("checking") == 1
    results = [event for event in runs.output("steer") if event["type"] == "result"]
    assert len(results) == 1  # one turn


def test_a_check_that_fails_twice_is_mended_twice_in_one_session(runs):
    runs.write(mend={"prompt": "@play work done", "check": MEND})
    runs.project.run("run", "mend", quiet=True)
    assert runs.journal("mend") == ["preparing", "starting", "running", "checking", "running",
                                    "checking", "running", "checking", "done"]
    receipt = runs.receipt("mend")
    assert receipt["check"]["rounds"] == [1, 1, 0]
    assert len({event["session_id"] for event in runs.output("mend")
                if "session_id" in event}) == 1


def test_a_breach_by_python_is_parked_with_the_files_and_nothing_is_merged(runs):
    before = runs.git("rev-parse", "main")
    runs.write(breach={"prompt": "@play work breach done", "check": "test -s work.txt",
                       "touch": ["work.txt", "src/**"]})
    runs.project.run("run", "breach", status=1, quiet=True)
    task = next(task for task in runs.project.json("tasks")["tasks"] if task["name"] == "breach")
    assert (task["state"], task["cause"]) == ("parked", "scope") and "secret.txt" in task["reason"]
    assert runs.receipt("breach")["outside"] == ["secret.txt"]
    assert runs.git("rev-parse", "main") == before == runs.git("rev-parse", "run/breach")
    assert (pathlib.Path(task["worktree"]) / "secret.txt").exists()


def test_success_in_words_alone_is_a_failure(runs):
    runs.write(words={"prompt": "@play done", "check": "test -s work.txt", "rounds": 1, "tries": 1})
    runs.project.run("run", "words", status=1, quiet=True)
    assert runs.states()["words"] == "failed"
    flags = " ".join(runs.receipt("words")["flags"])
    assert "ran no test command" in flags and "made no call that changes" in flags


def test_a_person_takes_the_session_and_gives_it_back(runs):
    runs.write(attach={"prompt": "@play long done", "check":
                       "test -s work.txt || { echo '@play work done'; exit 1; }"})
    process = runs.start("attach", "--keep-going")
    runs.wait("attach", "running")
    rig.wait_until(lambda: any("tool_use" in json.dumps(event) for event in runs.output("attach")
                               if event["type"] == "assistant"), what="the command")
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(runs.repo)
        os.execve(runs.project.argv()[0], runs.project.argv("task", "attach", "attach"),
                  runs.project.environment(COLUMNS="100", LINES="40"))
    shown, typed_at, deadline = b"", 0.0, time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.2)[0]:
                shown += os.read(terminal, 65536)
            if b"@play long" in shown and time.monotonic() - typed_at > 2.0:
                os.write(terminal, b"\x03")
                time.sleep(0.3)
                os.write(terminal, b"\x03")  # twice: it leaves
                typed_at = time.monotonic()
    except OSError:  # Linux says so when the last one has gone
        pass
    os.close(terminal)
    os.waitpid(child, 0)
    assert b"@play long" in shown, shown[-2000:]
    runs.wait("attach", "done")
    assert runs.journal("attach").count("attached") == 1
    assert runs.journal("attach").count("starting") == 2
    assert process.stop(signal.SIGINT) == 130


def test_sigkill_of_everything_and_run_again(runs):
    runs.write(**{f"k{number}": {"prompt": "@play nap work done", "check": "test -s work.txt"}
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
    assert said.endswith("4 done.\n"), said
    for number in range(4):
        assert runs.journal(f"k{number}").count("done") == 1
    assert runs.processes() == []


def test_then_all_of_it_is_tidied_away(runs):
    assert "would go" in runs.project.run("task", "tidy", "--dry-run", quiet=True)
    runs.project.run("task", "tidy", quiet=True)
    assert runs.git("worktree", "list").count("\n") == 0
    assert runs.git("show", "refs/subagent-fleet/breach/1:secret.txt") == "x"
