"""A whole exam: the real Claude Code on two real nodes, one model that can and one that only talks."""

import json
import os
import subprocess

import rig
from tools import SCRIPT

FLEET = """
project:
  name: examined
  gateway: {{provider: builtin, port: {port}}}
nodes:
  studio: {{endpoint: {studio}}}
  mini: {{endpoint: {mini}}}
models:
  doer: {{node: studio, ollama_model: runner, litellm_alias: claude-doer-local, context: 65536, max_parallel: 2}}
  talker: {{node: mini, ollama_model: able, litellm_alias: claude-talker-local, context: 65536, max_parallel: 2}}
agents:
  implementer: {{model: doer, description: implements, tools: [Read, Edit, Bash]}}
"""
CHECK = 'for test in tests/*_test.sh; do sh "$test" || { echo "FAILED $test"; exit 1; }; done\n'


def make_repository(project):
    """Three fixes: each adds a line, and a test that wants one line more."""
    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words],
                       cwd=project.folder, check=True, capture_output=True)

    (project.folder / "tests").mkdir()
    project.write(".gitignore", ".env.subagent-fleet\n.subagent-fleet/\nfleet.yaml\n")
    project.write("check.sh", CHECK)
    project.write("README.md", "hello\n")
    project.write("work.txt", "")
    git("init", "-q", "-b", "main")
    git("add", ".")
    git("commit", "-qm", "start")
    for number in (1, 2, 3):
        project.write("work.txt", "work\n" * number)
        project.write("tests/lines_test.sh", f'test "$(wc -l < work.txt)" -ge {number}\n')
        git("add", ".")
        git("commit", "-qm", f"fix: line {number} is missing\n\n@play work done")


def test_two_models_sit_a_whole_exam(running, ground, trap):
    running["studio"].create("runner:latest", "runner")
    running["mini"].create("able:latest", "able")
    project = rig.Project(ground / "exam", SCRIPT, trap)
    project.write("fleet.yaml", FLEET.format(
        port=rig.free_port(), **{name: node.url for name, node in running.items()}))
    make_repository(project)
    marks = {name: node.recorder.mark() for name, node in running.items()}
    report = project.json("bench", "--exam", "--check", "sh check.sh", "--questions", "5")

    assert len(report["questions"]) == 3 and report["not_counted"] == []
    models = {model["model"]: model for model in report["models"]}
    assert models["runner"]["score"]["passed"] == models["runner"]["score"]["asked"] == 3
    assert models["able"]["score"]["passed"] == 0 and models["able"]["failures"] == {"diff": 3}
    assert all(len(model["digest"]) == 64 for model in models.values())
    assert all(model["input"] > 3_000 and model["output"] > 0 for model in models.values())
    assert report["told_apart"][0]["ties"] == ["able"], "three questions cannot"
    for name, node in running.items():  # what went over the wire: the message, never the diff
        asked = [chat.raw.decode() for chat in node.recorder.since(marks[name], "/api/chat")]
        assert len([body for body in asked if "is missing" in body]) >= 3
        for secret in ("wc -l <", f"{project.folder}/", f'{project.folder}"'):
            found = [body[max(body.index(secret) - 80, 0):][:200] for body in asked if secret in body]
            assert found == []

    kept = json.loads((project.folder / ".subagent-fleet/exam.json").read_text())
    assert "missing" not in json.dumps(kept) and len(kept["sittings"]) == 6
    again = project.json("bench", "--exam", "--check", "sh check.sh", "--questions", "5")
    assert again["sittings"] == report["sittings"], "nobody is asked twice"
    said = project.run("bench", "--exam", "--check", "sh check.sh", "--questions", "5")
    assert "3 of 3" in said and "Not told apart: runner and able" in said
    pid = project.folder / ".git/subagent-fleet/run/serve.pid"
    if pid.exists():
        rig.wait_until(lambda: not os.path.exists(f"/proc/{pid.read_text()}"),
                       what="the gateway to be gone")
