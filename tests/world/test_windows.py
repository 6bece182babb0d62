"""What works on Windows, tried on a system from which what Windows lacks was taken."""
import http.client
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from gateway_rig import request_of, wait_until
from tools import PROGRAM, clean_environment, free_port

# From 3.12 on the library's own subprocess cannot do without what is taken away here.
pytestmark = pytest.mark.skipif(os.name != "nt" and sys.version_info >= (3, 12),
                                reason="the stand-in for Windows is for Python 3.9 to 3.11")
AS_WINDOWS = str(pathlib.Path(__file__).parents[1] / "rigs/as_windows.py")
FLEET = """\
project: {{name: shop, gateway: {{port: {port}}}}}
nodes: {{box: {{endpoint: "{endpoint}"}}}}
models: {{m: {{node: box, ollama_model: "qwen3:8b", litellm_alias: x, context: 32768}}}}
agents: {{planner: {{model: m, description: Plans.}}}}
"""


def words_of(*words):
    """The command line: on Windows the program itself, elsewhere with what Windows lacks gone."""
    before = [] if os.name == "nt" else [AS_WINDOWS]
    return [sys.executable, *before, PROGRAM, *words]


@pytest.fixture
def place(tmp_path, fake_node):
    node = fake_node({"qwen3:8b": {"capabilities": ["completion", "tools"], "context": 40960}})
    text = FLEET.format(port=free_port(), endpoint=node.endpoint)
    (tmp_path / "fleet.yaml").write_bytes(text.replace("\n", "\r\n").encode("utf-8"))
    return tmp_path


@pytest.fixture
def run(place):
    def run(*words):
        return subprocess.run(words_of(*words), cwd=str(place), capture_output=True, timeout=60,
                              env=clean_environment(HOME=place / "home", USERPROFILE=place / "home"))
    return run


@pytest.mark.slow
@pytest.mark.parametrize("words, told", [
    (["--version"], b"subagent-fleet "), (["validate"], b"valid"), (["discover"], b"qwen3:8b"),
    (["status"], b"qwen3:8b"), (["doctor", "--verbose"], b"box"), (["help"], b"validate"),
    (["schema"], b"ollama_model"), (["init", "--offline", "--output", "new.yaml"], b"new.yaml"),
    (["env", "--shell", "json"], b"ANTHROPIC_BASE_URL"),
    (["recommend"], b"planner"), (["trace"], b"No session"),
    (["skills", "list"], b"subagent-fleet-setup"), (["help", "config"], b"fleet.yaml"),
    (["worker"], b"Ollama"), (["trust", "--show"], b"nothing outside"), (["warmup"], b"qwen3:8b")])
def test_a_command_works_without_unix(run, words, told):
    run("generate")
    done = run(*words)
    text = done.stdout + done.stderr
    assert b"Traceback" not in text and b"this is a bug" not in text, text.decode()
    assert done.returncode in (0, 1), text.decode()
    assert told in text, text.decode()


@pytest.mark.parametrize("words", [["run", "--prompt", "hi"], ["task", "add", "hi"], ["tasks"]])
def test_tasks_refuse_in_one_sentence(run, words):
    done = run(*words)
    assert done.returncode in (2, 3) and done.stdout == b""
    told = done.stderr.decode().splitlines()
    assert told[0].startswith("error: tasks need ") and "WSL" in told[0] and len(told) == 2


@pytest.mark.slow
def test_generated_files_have_the_same_bytes_everywhere(run, place):
    done = run("generate")
    assert done.returncode == 0, done.stderr.decode()
    files = {path: (place / path).read_bytes()
             for path in (".claude/agents/planner.md", "litellm_config.yaml", ".env.subagent-fleet")}
    assert all(content and b"\r" not in content for content in files.values())
    again = run("generate", "--check")
    assert again.returncode == 0, again.stdout.decode()
    edited = place / ".claude/agents/planner.md"
    edited.write_bytes(b"my own\r\n")
    refused = run("generate")
    assert refused.returncode == 3 and edited.read_bytes() == b"my own\r\n"
    cleaned = run("clean", "--force")
    assert cleaned.returncode in (0, 3) and not (place / "litellm_config.yaml").exists()


@pytest.mark.slow
def test_serve_answers_and_ends(run, place):
    run("generate")
    with open(place / "log", "wb") as log:
        process = subprocess.Popen(words_of("serve", "--port", "0"), cwd=str(place), stdout=log,
                                   stderr=log, env=clean_environment(HOME=place / "home", USERPROFILE=place / "home"))
    try:
        wait_until(lambda: " at http://" in (place / "log").read_text("utf-8")
                   or process.poll() is not None, seconds=60)
        greeting = (place / "log").read_text("utf-8")
        port = int(re.search(r" at http://127\.0\.0\.1:(\d+):", greeting)[1])
        key = json.loads(run("env", "--shell", "json").stdout)["set"]["ANTHROPIC_AUTH_TOKEN"]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST", "/v1/messages", json.dumps(request_of("x")), {"x-api-key": key})
        answer = connection.getresponse()
        assert answer.status == 200 and b"PONG" in answer.read()
    finally:
        process.send_signal(signal.SIGINT if os.name != "nt" else signal.CTRL_C_EVENT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert "Served:" in (place / "log").read_text("utf-8")
