"""llama-server itself as a node, alone and as a router; and Claude Code on a person's own login.

vLLM and LM Studio are not installable here; what they answer is in tests/speech/test_backends.py.
"""

import json
import os
import pathlib
import re
import subprocess
import time

import pytest
from test_hybrid import Cloud

import install
import rig
from test_oracle import CONVERSATIONS, shape
from tools import SCRIPT

FLEET = """
project: {{name: engines, gateway: {{port: {port}}}}}
nodes:
  one: {{endpoint: "http://127.0.0.1:{one}", provider: {provider}}}
  many: {{endpoint: "http://127.0.0.1:{many}", provider: llamacpp}}
models:
  small: {{node: one, model: worker, alias: claude-haiku-local, context: 65536, max_output: 400000}}
  tight: {{node: many, model: shared, alias: claude-tight-local, context: 16384}}
  thinker: {{node: many, model: thinker, alias: thinker, context: 16384, thinking: true}}
agents:
  planner: {{model: small, description: plans}}
  reviewer: {{model: tight, description: reviews}}
  thinker: {{model: thinker, description: thinks}}
"""


@pytest.fixture(scope="module")
def engines(ground, trap):
    """llama-server with one model, and as a router over three."""
    folder = ground / "engines"
    (folder / "models").mkdir(parents=True)
    for name in ("shared", "thinker", "pong"):
        (folder / "models" / f"{name}.gguf").symlink_to(install.MODELS / f"{name}.gguf")
    server = install.engine_folder() / "llama-server"
    ports = {"one": rig.free_port(), "many": rig.free_port()}
    words = {"one": ["-m", install.MODELS / "worker.gguf", "--alias", "worker", "-c", "65536"],
             "many": ["--models-dir", folder / "models", "-c", "16384"]}
    running = [rig.Process([server, *words[name], "--jinja", "--port", ports[name]],
                           log=folder / f"{name}.log", cwd=folder,
                           env={"PATH": os.defpath, "HOME": str(folder), **trap.environment()})
               for name in ports]
    for port in ports.values():
        rig.wait_until(lambda port=port: rig.get_json(f"http://127.0.0.1:{port}/health")[0] == 200,
                       what="llama-server")
    yield ports
    for process in running:
        process.stop()


@pytest.fixture
def project(tmp_path, trap):
    return rig.Project(tmp_path / "project", SCRIPT, trap)


@pytest.fixture
def serve(project, engines):
    """Serve both engines, the first spoken to as a kind of node."""
    running = []

    def start(provider):
        port = rig.free_port()
        project.write("fleet.yaml", FLEET.format(port=port, provider=provider, **engines))
        project.run("generate")
        running.append(rig.serve_process(project, port))
        rig.wait_for_gateway(running[-1], port)
        return rig.Gateway(f"http://127.0.0.1:{port}", running[-1], project.key())
    yield start
    for process in running:
        process.stop()


def test_add_recognises_a_llama_server_and_every_command_works(project, engines):
    project.write("fleet.yaml", FLEET.format(port=rig.free_port(), provider="llamacpp", **engines))
    nodes = {node["name"]: node for node in project.json("discover")["nodes"]}
    assert {node["provider"] for node in nodes.values()} == {"llamacpp"}
    assert [model["name"] for model in nodes["many"]["models"]] == ["pong", "shared", "thinker"]
    assert "tools" in nodes["one"]["models"][0]["capabilities"]

    warmed = {row["route"]: row for row in project.json("warmup")["results"]}
    assert {name: row["loaded"]["context"] for name, row in warmed.items()} \
        == {"small": 65536, "tight": 16384, "thinker": 16384}
    assert {model["state"] for model in project.json("status")["models"]} == {"ready"}
    assert "llama.cpp at" in project.run("doctor", "--verbose", quiet=True)
    project.json("warmup", "--unload")
    states = {model["route"]: model["state"] for model in project.json("status")["models"]}
    assert states == {"small": "ready", "tight": "cold", "thinker": "cold"}

    (project.folder / "fleet.yaml").unlink()
    project.run("init", "--node", f"tower=http://127.0.0.1:{engines['one']}")
    assert "provider: llamacpp" in project.read("fleet.yaml")


@pytest.mark.parametrize("provider", ["llamacpp", "openai"])
def test_both_sdks_get_what_they_expect_of_a_llama_server(project, serve, provider):
    gateway = serve(provider)
    said = talk("sdk_talk.py", project, ANTHROPIC_BASE_URL=gateway.url, ANTHROPIC_API_KEY=gateway.key)
    assert said["text"] == "PONG" and said["streamed"] == "one two three four five"
    assert said["stopped"] == ["one two ", "stop_sequence", "three"] and said["cut"] == "max_tokens"
    assert said["call"] == ["Bash", {"command": "echo hi"}, "tool_use"]
    assert said["after_tool"] == "DONE" and said["stream_usage"][1] > 1
    assert said["errors"] == {"key": 401, "model": 404, "empty": 400, "long": 400}

    said = talk("openai_talk.py", project, OPENAI_BASE_URL=f"{gateway.url}/v1",
                OPENAI_API_KEY=gateway.key)
    for dialect in ("chat", "responses"):
        found = said[dialect]
        assert (found["text"], found["streamed"]) == ("PONG", "one two three four five")
        assert found["call"] == found["streamed_call"] == ["Bash", {"command": "echo hi"}]


def talk(script, project, **environ):
    done = subprocess.run(
        [str(install.SDK_PYTHON), str(pathlib.Path(__file__).with_name(script))], capture_output=True,
        encoding="utf-8", timeout=120, env=project.environment(no_proxy="127.0.0.1", **environ))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_answer_is_what_the_servers_own_messages_route_gives(serve, engines):
    """llama-server makes Chat Completions of Messages itself: so do we, and nothing is lost."""
    gateway = serve("llamacpp")
    differ = {}
    for name, request in CONVERSATIONS.items():
        thinks = request.get("model") == "thinker"
        own, alias, port = "worker", "claude-haiku-local", engines["one"]
        if thinks:
            own, alias, port = "thinker", "thinker", engines["many"]
        body = {"max_tokens": 64, **request}
        kwargs = {"chat_template_kwargs": {"enable_thinking": thinks}}
        status, direct = rig.get_json(f"http://127.0.0.1:{port}/v1/messages",
                                      body={**body, "model": own, **kwargs}, timeout=60)
        assert status == 200, (name, direct)
        status, ours = gateway.post({**body, "model": alias})
        assert status == 200, (name, ours)
        if told(direct, name) != told(ours, name):
            differ[name] = told(direct, name), told(ours, name)
    assert differ == {}


# Where ours is meant to differ: it ends the answer at a stop sequence itself, and estimates; it
# sends no empty system, keeps the blocks of a result apart, and leaves `required: []` out.
STOPS = ("stop-sequence", "stop-first", "stop-two")
OTHER_COUNTS = (*STOPS, "system-empty", "result-blocks", "tool-without-arguments")


def told(message, name):
    """What both must agree on; its own calls a stop sequence `end_turn`."""
    found = shape(message)
    usage = message["usage"]
    cached = usage.get("cache_read_input_tokens") or 0
    return {"blocks": found["blocks"], "stop": "" if name in STOPS else found["stop"],
            "in": 0 if name in OTHER_COUNTS else usage["input_tokens"] + cached}


def test_the_format_of_an_answer_is_obeyed(serve):
    gateway = serve("llamacpp")
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"],
              "additionalProperties": False}
    status, body = gateway.post({
        "model": "claude-haiku-local", "max_tokens": 64, "messages": [{"role": "user", "content": "x"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}},
        path="/v1/chat/completions")
    assert status == 200 and json.loads(body["choices"][0]["message"]["content"]) == {"a": "b"}


def test_a_router_loads_on_demand_thinks_and_takes_no_images(serve):
    gateway = serve("llamacpp")
    _, body = gateway.say("thinker")
    assert [block["type"] for block in body["content"]] == ["thinking", "text"]
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                           "data": "iVBORw0KGgo="}}
    status, body = gateway.post({"model": "claude-tight-local", "max_tokens": 9, "messages": [
        {"role": "user", "content": [picture, {"type": "text", "text": "@play pong"}]}]})
    assert status == 200 and body["content"][0]["text"] == "PONG"


# -- the main session on a login --

LOGIN = "sk-ant-oat01-made-up-for-this-test"
HYBRID = """
project: {{name: hybrid, gateway: {{port: {port}}}, claude: {{main: opus, haiku: small}}}}
nodes:
  cloud: {{endpoint: "{cloud}", provider: anthropic, auth: client}}
  one: {{endpoint: "http://127.0.0.1:{one}", provider: llamacpp}}
models:
  opus: {{node: cloud, model: claude-opus-5-5, alias: claude-opus-5-5, context: 200000, max_output: 64000,
         cloud: true}}
  small: {{node: one, model: worker, alias: claude-haiku-local, context: 65536}}
agents:
  planner: {{model: small, description: plans, tools: [Bash]}}
"""


class Dispatcher(Cloud):
    """A cloud whose model calls the agent `planner`, then says DONE."""

    def speak(self, node, connection):
        if not self.heads[-1].startswith(b"POST /v1/messages"):
            return super().speak(node, connection)
        said = json.dumps(self.requests[-1]["messages"])
        block = {"type": "text", "text": ""}
        delta, reason = {"type": "text_delta", "text": "DONE"}, "end_turn"
        if "tool_result" not in said:
            block = {"type": "tool_use", "id": "toolu_1", "name": "Agent", "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps({
                "description": "ask planner", "prompt": "@play bash done", "subagent_type": "planner"})}
            reason = "tool_use"
        events = [{"type": "message_start", "message": {
            "id": "msg_1", "type": "message", "role": "assistant", "content": [],
            "model": "claude-opus-5-5", "usage": {"input_tokens": 9, "output_tokens": 1}}},
            {"type": "content_block_start", "index": 0, "content_block": block},
            {"type": "content_block_delta", "index": 0, "delta": delta},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None},
             "usage": {"output_tokens": 5}}, {"type": "message_stop"}]
        text = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                           b"Connection: close\r\n\r\n" + text.encode())
        return None


def test_claude_code_stays_on_its_login_and_its_agent_runs_at_home(project, engines, trap):
    cloud = Dispatcher()
    project.write("fleet.yaml", HYBRID.format(port=rig.free_port(), cloud=cloud.endpoint, **engines))
    claude = project.home / ".claude"
    claude.mkdir()
    (claude / ".credentials.json").write_text(json.dumps({"claudeAiOauth": {
        "accessToken": LOGIN, "refreshToken": "sk-ant-ort01-x", "expiresAt": int(time.time() + 9e6) * 1000,
        "scopes": ["user:inference", "user:profile"], "subscriptionType": "max"}}))
    project.run("trust", "--yes")
    argv = project.argv("up", "--", "-p", "dispatch", *rig.CLAUDE_FLAGS)
    done = subprocess.run(argv, cwd=project.folder, stdin=subprocess.DEVNULL, capture_output=True,
                          timeout=180, env=project.environment(
                              CLAUDE_CODE_DISABLE_BACKGROUND_TASKS="1"))
    said = (done.stdout + done.stderr).decode("utf-8", "replace")
    assert done.returncode == 0 and "DONE" in said, said
    # With a login it asks Anthropic about the account, past any base URL (2.1.327).
    trap.wanted[:] = [each for each in trap.wanted if "CONNECT api.anthropic.com:443" not in each]

    posts = [at for at, head in enumerate(cloud.heads) if head.startswith(b"POST /v1/messages")]
    assert len(posts) >= 2
    for at in posts:
        assert cloud.header("authorization", at) == [f"Bearer {LOGIN}"]
        assert "oauth-" in cloud.header("anthropic-beta", at)[0]
        assert cloud.requests[at]["model"] == "claude-opus-5-5"
    key = re.search(r"sk-[A-Za-z0-9_-]{20,}", project.read(".env.subagent-fleet"))[0]
    assert all(key.encode() not in head and b"x-fleet-key" not in head for head in cloud.heads)

    receipts = [json.loads(line) for line in
                project.read(".subagent-fleet/requests.jsonl").splitlines()]
    assert {(receipt["node"], receipt["cloud"]) for receipt in receipts} \
        == {("cloud", True), ("one", False)}
    at_home = [receipt for receipt in receipts if receipt["node"] == "one"]
    assert at_home and all(receipt["agent_id"] for receipt in at_home)
    kept = [path for path in project.folder.rglob("*") if path.is_file()]
    assert kept and not [path for path in kept if LOGIN.encode() in path.read_bytes()]
    assert LOGIN not in said and key not in said
