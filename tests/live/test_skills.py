"""Skills and plugins where the real programs look: seen on the wire, and followed by a model."""
import http.server
import json
import os
import re
import subprocess
import sys
import threading

import pytest

import install
import rig
import subagent_fleet as sf
from fake_ollama import FakeNode
from tools import PROGRAM, ROOT, free_port

PROGRAMS = {name: install.CACHE / name / "node_modules/.bin" / binary for name, binary in (
    ("codex", "codex"), ("opencode", "opencode"), ("qwen", "qwen"))}
NAMES = sorted(sf.installed_skills())
FLEET = """\
project: {{name: shop, gateway: {{port: {port}}}}}
nodes: {{mini: {{endpoint: "{endpoint}"}}}}
models: {{m: {{node: mini, ollama_model: "qwen3:8b", litellm_alias: x, context: 65536}}}}
agents: {{implementer: {{model: m, description: Implements.}}}}
"""


class Refuser:
    """A server that keeps what it was asked and refuses it, so that nobody goes on."""

    def __init__(self):
        self.bodies = []
        refuser = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                length = int(self.headers.get("Content-Length") or 0)
                refuser.bodies.append(self.rfile.read(length).decode("utf-8", "replace"))
                answer = b'{"type":"error","error":{"type":"invalid_request_error","message":"no"}}'
                self.send_response(400)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST

            def log_message(self, *words):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def refuser():
    made = Refuser()
    yield made
    made.close()


def invocation(name, url, home):
    """How a program is asked for one headless answer of a server: words, and more environment."""
    program = str(PROGRAMS[name])
    if name == "codex":
        provider = (f'model_providers.fleet={{name="Fleet",base_url="{url}/v1",env_key="FLEET_KEY",'
                    'wire_api="responses",request_max_retries=0}')
        return [program, "exec", "--skip-git-repo-check", "-c", "model_provider=fleet", "-c",
                provider, "-c", "features.plugins=true", "-m", "big", "hi"], {}
    if name == "opencode":
        config = {"autoupdate": False, "share": "disabled", "enabled_providers": ["fleet"],
                  "model": "fleet/big", "provider": {"fleet": {
                      "npm": "@ai-sdk/anthropic", "options": {"baseURL": f"{url}/v1", "apiKey": "x"},
                      "models": {"big": {"limit": {"context": 65536, "output": 8192}}}}}}
        return [program, "run", "hi"], {"OPENCODE_CONFIG_CONTENT": json.dumps(config),
                                        "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    return [program, "--auth-type", "openai", "--openai-api-key", "x", "--openai-base-url",
            f"{url}/v1", "-m", "big", "-p", "hi"], {}


@pytest.fixture
def fence():
    """A trap that may be used: these programs, as their makers set them up, call home."""
    return rig.Trap()


def run_ours(words, cwd, env):
    return subprocess.run([sys.executable, PROGRAM, *words], cwd=cwd, env=env, check=True,
                          capture_output=True, text=True)


@pytest.mark.parametrize("name", sorted(PROGRAMS))
@pytest.mark.parametrize("where", [[], ["--user"]], ids=["project", "user"])
def test_a_program_lists_the_installed_skills(name, where, refuser, fence, tmp_path):
    home, project = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    project.mkdir()
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    words, more = invocation(name, refuser.url, home)
    env = rig.bare_environment(home, fence, FLEET_KEY="sk-made-up", NO_PROXY="127.0.0.1", **more)
    env["PATH"] = f"{install.NODE22_BIN}:{env['PATH']}"  # which qwen-code needs
    run_ours(["skills", "install", "--target", name, *where], project, env)

    subprocess.run(words, cwd=project, env=env, stdin=subprocess.DEVNULL, capture_output=True,
                   timeout=90)
    asked = "".join(refuser.bodies)
    assert asked, "it asked nothing"
    for skill in NAMES:
        assert skill in asked


@pytest.mark.parametrize("which", sorted(install.CLAUDES))
def test_claude_code_lists_the_installed_skills(which, refuser, trap, tmp_path):
    env = rig.bare_environment(tmp_path, trap, ANTHROPIC_BASE_URL=refuser.url,
                               ANTHROPIC_AUTH_TOKEN="sk-made-up", CLAUDE_CODE_MAX_RETRIES="0",
                               CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1")
    run_ours(["skills", "install", "--target", "claude-code"], tmp_path, env)
    session = rig.run_session([install.CLAUDES[which], "-p", "hi", *rig.CLAUDE_FLAGS],
                              cwd=tmp_path, env=env)
    assert set(NAMES) <= set(session.init.get("skills") or session.init["slash_commands"])


# -- plugins --

@pytest.fixture(params=["written", "this repository"])
def market(request, tmp_path, trap):
    """A marketplace as the command writes it, and as it lies in this repository."""
    place = tmp_path / "market"
    if request.param == "written":
        run_ours(["plugins", "install", "--out", str(place)], tmp_path,
                 rig.bare_environment(tmp_path, trap))
    else:
        subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(place)], check=True)
    return place


@pytest.mark.parametrize("which", sorted(install.CLAUDES))
def test_claude_code_installs_the_plugin_offline(which, market, refuser, trap, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    program = str(install.CLAUDES[which])
    env = rig.bare_environment(home, trap, ANTHROPIC_BASE_URL=refuser.url,
                               ANTHROPIC_AUTH_TOKEN="sk-made-up", CLAUDE_CODE_MAX_RETRIES="0",
                               CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1")

    def run(*words):
        done = subprocess.run([program, "plugin", *words], cwd=home, env=env, text=True,
                              capture_output=True, stdin=subprocess.DEVNULL, timeout=90)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("validate", str(market), "--strict")
    run("validate", str(market / sf.PLUGIN_PLACE), "--strict")
    run("marketplace", "add", str(market))
    run("install", "subagent-fleet@subagent-fleet")
    assert "subagent-fleet@subagent-fleet" in run("list", "--json")
    session = rig.run_session([program, "-p", "hi", *rig.CLAUDE_FLAGS], cwd=home, env=env)
    listed = set(session.init.get("skills") or session.init["slash_commands"])
    assert {f"subagent-fleet:{name}" for name in sf.SKILLS} <= listed
    assert all(f"subagent-fleet:{name}" in "".join(refuser.bodies) for name in sf.SKILLS)


def test_codex_installs_the_plugin_offline(market, refuser, fence, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    words, more = invocation("codex", refuser.url, home)
    env = rig.bare_environment(home, fence, FLEET_KEY="sk-made-up", NO_PROXY="127.0.0.1", **more)
    program = str(PROGRAMS["codex"])

    def run(*words):
        done = subprocess.run([program, "plugin", *words], cwd=home, env=env, text=True,
                              capture_output=True, stdin=subprocess.DEVNULL, timeout=90)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("marketplace", "add", str(market))
    run("add", "subagent-fleet@subagent-fleet")
    assert re.search("subagent-fleet@subagent-fleet +installed, enabled", run("list"))
    subprocess.run(words, cwd=home, env=env, stdin=subprocess.DEVNULL, capture_output=True,
                   timeout=90)
    asked = "".join(refuser.bodies)
    assert asked and all(name in asked for name in sf.SKILLS)


# -- a model that does what the page says --

def follow_the_page(payload):
    """Answer as a model that reads the page, then types the command that the page names."""
    texts = json.dumps(payload["messages"])
    if sum(message["role"] == "tool" for message in payload["messages"]) > 4:
        return say(f"It goes round in circles: {texts[-2000:]}")
    tools = {tool["function"]["name"] for tool in payload.get("tools", ())}
    last = payload["messages"][-1]
    if "fleet.yaml is valid" in texts:
        return say("The fleet file is valid.")
    match = re.search(r"subagent-fleet validate --strict", texts)
    if match and "# Set up a fleet" in texts:
        return call("Bash", {"command": match[0], "description": "Check the file"})
    if "Skill" in tools and last["role"] == "user":
        return call("Skill", {"skill": "subagent-fleet-setup"})
    return say("I do not know.")


def say(text):
    return done_after({"content": text})


def call(name, arguments):
    return done_after({"content": "", "tool_calls": [
        {"id": "call_1", "function": {"index": 0, "name": name, "arguments": arguments}}]})


def done_after(words):
    head = {"model": "qwen3:8b", "created_at": "2026-01-01T00:00:00Z"}
    lines = [{**head, "message": {"role": "assistant", **words}, "done": False},
             {**head, "message": {"role": "assistant", "content": ""}, "done": True,
              "done_reason": "stop", "prompt_eval_count": 7, "eval_count": 3}]
    return 200, lines


def test_a_model_is_led_by_the_setup_skill(trap, tmp_path):
    node = FakeNode({"qwen3:8b": {"capabilities": ["completion", "tools"], "context": 65536}})
    node.answers["/api/chat"] = follow_the_page
    port = free_port()
    project = tmp_path / "project"
    project.mkdir()
    (project / "fleet.yaml").write_text(FLEET.format(port=port, endpoint=node.endpoint))
    program = tmp_path / "bin/subagent-fleet"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {PROGRAM} "$@"\n')
    program.chmod(0o755)
    env = rig.bare_environment(tmp_path, trap)
    env["PATH"] = f"{program.parent}{os.pathsep}{env['PATH']}"
    for words in (["generate"], ["skills", "install"]):
        run_ours(words, project, env)
    script = f"{run_ours(['env'], project, env).stdout}env -0"
    said = subprocess.run(["sh", "-c", script], env=env, check=True, text=True, stdout=subprocess.PIPE).stdout
    settings = dict(line.split("=", 1) for line in said.split("\0") if line)
    gateway = rig.Process([sys.executable, PROGRAM, "serve"], log=tmp_path / "serve.log", env=env,
                          cwd=project)
    try:
        rig.wait_for_gateway(gateway, port)
        words = [install.CLAUDES["latest"], "-p", "Is my fleet file right?", "--allowedTools",
                 "Bash,Skill", *rig.CLAUDE_FLAGS]
        session = rig.run_session(words, cwd=project, env=settings)
    finally:
        gateway.stop()
        node.close()
    assert session.result["result"] == "The fleet file is valid."
