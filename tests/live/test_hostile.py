"""The golden hostile fleet, read by LiteLLM itself and by Claude Code's own loader."""

import json
import os
import re
import subprocess

import pytest

import install
import rig
from tools import ROOT, SCRIPT

FLEET = ROOT / "tests/golden/hostile/fleet.yaml"
GONE = {"MultiEdit": "Edit", "LS": None, "TodoWrite": None}  # what Claude Code no longer has
NAMES = ("1", "null", "1e3", "rtl_-")


def read_independently(text):
    """Read YAML with the PyYAML that LiteLLM uses."""
    probe = "import json, sys, yaml; json.dump(yaml.safe_load(sys.stdin), sys.stdout)"
    done = subprocess.run([str(install.LITELLM_PYTHON), "-c", probe], input=text, check=True,
                          capture_output=True, encoding="utf-8", timeout=60)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def hostile(ground, trap, capture):
    """The fleet, generated; its nodes' addresses lead to one server that keeps what it hears."""
    project = rig.Project(ground / "hostile", SCRIPT, trap)
    text = FLEET.read_text(encoding="utf-8")
    here = capture.url
    text, count = re.subn(r'endpoint: "[^"]*?(/p%20a/th|)/?"', rf'endpoint: "{here}\1"', text)
    assert count == 3
    project.write("fleet.yaml", text)
    project.run("generate")
    project.run("trust", "--yes")  # one of its models is said to run in a cloud
    project.fleet = read_independently(text)
    assert set(project.fleet["agents"]) == set(NAMES)
    return project


def test_litellm_validates_the_config(hostile):
    done = subprocess.run(
        [str(install.LITELLM_BIN), "--config", "litellm_config.yaml", "--validate_config"],
        cwd=hostile.folder, capture_output=True, timeout=120, encoding="utf-8",
        env=hostile.environment(X_1="sk-made-up-0123456789", LITELLM_LOCAL_MODEL_COST_MAP="True",
                                no_proxy="localhost"))
    assert done.returncode == 0, done.stderr[-1500:]
    assert f"config OK ({len(hostile.fleet['models'])} models)" in done.stdout + done.stderr


def test_litellm_asks_every_node_for_the_model_of_the_alias(hostile, capture):
    port = rig.free_port()
    process = rig.litellm_process(hostile.folder, port, hostile.environment())
    rig.wait_for_gateway(process, port)
    gateway = rig.Gateway(f"http://127.0.0.1:{port}", process, hostile.key())
    models = hostile.fleet["models"].values()
    listed = rig.get_json(gateway.url + "/v1/models",
                          headers={"Authorization": f"Bearer {gateway.key}"})[1]["data"]
    assert {each["id"] for each in listed} == {model["litellm_alias"] for model in models}
    for model in models:
        before = len(capture.requests)
        status, body = gateway.say(model["litellm_alias"])
        # LiteLLM 1.106.2 puts the model's name into an answer's header, and fails on an emoji there
        wanted = 500 if "🙂" in model["ollama_model"] else 200
        assert status == wanted, f"{model['litellm_alias']}: {body}"
        ((path, _, asked),) = capture.requests[before:]
        endpoint = hostile.fleet["nodes"][model["node"]]["endpoint"]
        assert capture.url + path == endpoint + "/api/chat"
        assert asked["model"] == model["ollama_model"]
        assert asked["options"]["num_ctx"] == model.get("context", 8192)
    gateway.stop()


@pytest.fixture(scope="module")
def asked(hostile, capture, ground, trap):
    """Run one headless session; give its init event and the request that went out."""
    kept = {}

    def ask(which, agent=None):
        if (which, agent) not in kept:
            home = ground / f"hostile-home-{which}-{agent}"
            home.mkdir()
            env = rig.bare_environment(
                home, trap, ANTHROPIC_BASE_URL=capture.url, ANTHROPIC_AUTH_TOKEN="sk-made-up",
                ANTHROPIC_MODEL="main-local", CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1")
            words = ["--agent", agent] if agent else []
            before = len(capture.requests)
            session = rig.run_session([install.CLAUDES[which], "-p", "hi", *words,
                                       *rig.CLAUDE_FLAGS], cwd=hostile.folder, env=env)
            bodies = [body for path, _, body in capture.requests[before:]
                      if path == "/v1/messages"]
            assert len(bodies) == 1, session.stderr
            kept[which, agent] = session.init, bodies[0]
        return kept[which, agent]
    return ask


@pytest.mark.parametrize("which", sorted(install.CLAUDES))
def test_claude_code_lists_the_same_names_and_descriptions(asked, hostile, builtin_agents, which):
    init, body = asked(which)
    assert set(init["agents"]) - builtin_agents[which] == set(NAMES)
    texts = [message["content"] if isinstance(message["content"], str) else
             "".join(block.get("text", "") for block in message["content"])
             for message in body["messages"]]
    lines = "\n".join(texts).split("\n")
    for name, agent in hostile.fleet["agents"].items():
        description = " ".join(agent["description"].split())  # it becomes one line
        assert [line for line in lines if line.startswith(f"- {name}: {description} (Tools: ")], \
            f"{name} is not listed as {description!r}"


@pytest.mark.parametrize("which", sorted(install.CLAUDES))
@pytest.mark.parametrize("name", NAMES)
def test_claude_code_gives_an_agent_its_model_tools_and_prompt(asked, hostile, which, name):
    agent = hostile.fleet["agents"][name]
    body = asked(which, name)[1]
    assert body["model"] == hostile.fleet["models"][agent["model"]]["litellm_alias"]
    tools = {tool["name"] for tool in body.get("tools", ())} - {"DeferredToolPlaceholder"}
    if "tools" in agent:
        wanted = [GONE.get(tool.split("(")[0], tool.split("(")[0]) for tool in agent["tools"]]
        assert tools == {tool for tool in wanted if tool and not tool.startswith("mcp__")}
    else:
        everything = {tool["name"] for tool in asked(which)[1]["tools"]}
        assert tools == everything - {"DeferredToolPlaceholder"}
    if "prompt" in agent:
        assert body["system"][-1]["text"].startswith(agent["prompt"].strip())


def test_the_environment_file_is_sourced_by_every_shell(hostile):
    line = '. ./.env.subagent-fleet && printf %s "$ANTHROPIC_BASE_URL $ANTHROPIC_MODEL"'
    said = {}
    for shell in install.SHELLS:
        done = subprocess.run([shell, "-c", line], cwd=hostile.folder, capture_output=True,
                              encoding="utf-8", timeout=30,
                              env={"PATH": os.defpath, "HOME": str(hostile.home)})
        assert (done.returncode, done.stderr) == (0, ""), shell
        said[shell] = done.stdout
    assert len(set(said.values())) == 1, said
    address, model = said["sh"].split(" ")
    assert address == "http://[::1]:65535"
    assert model in {each["litellm_alias"] for each in hostile.fleet["models"].values()}
