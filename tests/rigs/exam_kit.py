"""A repository with thirty commits, of which some are questions, and a client with scripted abilities."""
import json
import subprocess
import sys

from tools import PROGRAM, free_port

# It speaks Claude Code's lines. What a model can is in its alias: `able-0.9` does nine of ten.
CLIENT = """\
import hashlib, json, os, re, shutil, subprocess, sys, time
def value(flag):
    return sys.argv[sys.argv.index(flag) + 1] if flag in sys.argv else ""
session, model = value("--session-id") or value("--resume"), value("--model")
def emit(kind, **more):
    print(json.dumps({"type": kind, "session_id": session, **more}), flush=True)
for raw in sys.stdin:
    line = json.loads(raw)
    if line["type"] != "user":
        emit("control_response", response={"subtype": "success", "request_id": "e"})
        sys.exit(0)
    prompt = line["message"]["content"]
    emit("system", subtype="init", tools=["Bash"], model=model)
    number = re.search(r"value (\\d+)", prompt)[1]
    deeds = json.loads(os.environ.get("DEEDS") or "{}").get(model)
    luck = int(hashlib.sha256((model + prompt).encode()).hexdigest()[:8], 16) / 16 ** 8
    said = "done"
    if deeds:
        for path, text in deeds.items():
            shutil.rmtree(path, ignore_errors=True)  # where it is a directory
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            open(path, "w").write(text)
    elif model.startswith("endless"):
        while True:
            emit("stream_event", event={"type": "ping"})
            time.sleep(0.05)
    elif model.startswith("cheat"):
        for name in os.listdir("tests"):
            open("tests/" + name, "w").write("exit 0\\n")
        open("tests/conftest.py", "w").write("")
    elif model.startswith("printer"):
        said = '<tool_call>{"name": "Write", "arguments": {}}</tool_call>'
    elif model.startswith("asker"):
        said = "Which value do you mean?"
    elif model.startswith("spy"):
        open(os.environ["SPY_FILE"], "a").write(json.dumps([prompt, subprocess.run([
            "sh", "-c", os.environ["SPY"]], capture_output=True, text=True, errors="replace").stdout]) + "\\n")
        open("values/note", "w").write("x")
    elif luck < float(model.partition("-")[2] or 1):
        open("values/" + number, "w").write(number + "\\n")
    else:
        open("values/" + number, "w").write("wrong\\n")
    emit("result", subtype="success", is_error=False, num_turns=1, result=said,
         terminal_reason="completed", api_error_status=None, permission_denials=[])
"""
CHECK = """\
for test in tests/*_test.sh; do
  sh "$test" || { echo "FAILED $test - $(cat values/secret)"; bad=1; }
done
exit ${bad:-0}
"""
FLEET = """\
project: {name: exam, gateway: {port: PORT}}
nodes: {mini: {endpoint: "URL"}}
models:
MODELS
agents: {}
"""


class Examined:
    """A repository, a fleet of scripted models, and who types `bench --exam` there."""

    def __init__(self, rig, node_url, models):
        self.rig, self.repo = rig, rig.repo
        rig.keeps_outside = False
        client = rig.bin / "claude"
        (rig.bin / "client.py").write_text(CLIENT)
        client.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{rig.bin}/client.py" "$@"\n')
        lines = [f'  {name}: {{node: mini, ollama_model: "{name}:1b", litellm_alias: "{alias}", '
                 f"context: 65536, max_parallel: 4}}" for name, alias in models.items()]
        (self.repo / "fleet.yaml").write_text(FLEET.replace("PORT", str(free_port())).replace(
            "URL", node_url).replace("MODELS", "\n".join(lines)))
        self.commits = {}  # by name
        self.write({"check.sh": CHECK, "values/0": "0\n",
                    ".gitignore": "/fleet.yaml\n/.subagent-fleet/\n/.env*\n/tasks.yaml\n"})
        self.commit("set up")
        self.commit("begin to test", {"tests/v0_test.sh": "test -f values/0\n"})

    def write(self, files):
        for name, text in files.items():
            path = self.repo / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink() if text is None else path.write_text(text)

    def fixes(self, *numbers):
        for number in numbers:
            self.fix(number)

    def commit(self, message, files=None, name=""):
        self.write(files or {})
        self.rig.git("add", "-A")
        self.rig.git("commit", "-qm", message, "--allow-empty")
        self.commits[name or message] = self.rig.git("rev-parse", "HEAD")

    def fix(self, number, message="", **more):
        """A good one: its test fails before and passes after."""
        self.commit(message or f"fix value {number}", {
            f"values/{number}": f"{number}\n", **more,
            f"tests/v{number}_test.sh": f'test "$(cat values/{number})" = {number}\n'})

    def type(self, *words, status=0, env=None, timeout=60):
        done = subprocess.run(
            [sys.executable, "-I", "-S", PROGRAM, *map(str, words)], cwd=self.repo,
            env=self.rig.environment(**(env or {})), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=timeout)
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
        self.err = done.stderr
        return done.stdout

    def run(self, *words, **more):
        return self.type("bench", "--exam", *words, **more)

    def json(self, *words, **more):
        return json.loads(self.run("--check", "sh check.sh", "--json", *words, **more))
