"""The lean start: how long the real Claude Code's first request is, and what agents still get."""

import pytest

import install
import rig
from test_serve import Served
from tools import SCRIPT

FLEET = """
project:
  name: lean
  gateway: {{provider: builtin, port: {port}}}
  claude: {{main: heavy, lean: true}}
nodes:
  studio: {{endpoint: {studio}}}
  mini: {{endpoint: {mini}}}
models:
  heavy: {{node: studio, ollama_model: coder-large, litellm_alias: claude-sonnet-local, context: 65536}}
  small: {{node: mini, ollama_model: coder-small, litellm_alias: claude-haiku-local, context: 65536}}
agents:
  planner: {{model: small, description: plans, tools: [Read, Grep]}}
  implementer: {{model: small, description: implements, tools: [Read, Edit]}}
  reviewer: {{model: small, description: reviews, tools: [Read, Bash]}}
"""
MOST_TOKENS = 6000


@pytest.fixture(scope="module")
def served(ground, nodes, trap):
    for node in nodes.values():
        node.ensure()
    project = rig.Project(ground / "lean", SCRIPT, trap)
    recorder = rig.Recorder(rig.free_port(), pretend=True)
    project.write("fleet.yaml", FLEET.format(
        port=recorder.port, **{name: node.url for name, node in nodes.items()}))
    project.run("generate")
    recorder.key = project.key()
    served = Served(project, nodes, recorder)
    project.run("warmup")
    yield served
    served.process.stop()
    recorder.close()


def requests_of(served, which, tmp_path, *words):
    """The requests of one session, the first one first."""
    before = served.recorder.mark()
    found = served.launch(which, tmp_path, *words)
    assert found.returncode == 0, found.result
    return served.recorder.since(before, "/v1/messages")


def tokens(turn):
    """About how many tokens a request is: its bytes ÷ 4, which reads a tenth too many."""
    return len(turn.raw) // 4


def tools_of(turn):
    return {tool["name"] for tool in turn.body.get("tools", ())}


@pytest.mark.parametrize("which", sorted(install.CLAUDES))
def test_the_first_request_is_a_fraction_of_what_it_was(served, tmp_path, which, record_property):
    lean = requests_of(served, which, tmp_path, "-p", "@play pong")[0]
    served.project.edit("fleet.yaml", "lean: true", "lean: false")
    try:
        full = requests_of(served, which, tmp_path, "-p", "@play pong")[0]
    finally:
        served.project.edit("fleet.yaml", "lean: false", "lean: true")
    print(f"\n{which}: {tokens(lean):,} tokens (bytes / 4) with {len(tools_of(lean))} tools, "
          f"without the lean start {tokens(full):,} with {len(tools_of(full))}")
    record_property("lean", (tokens(lean), tokens(full)))
    assert lean.body["model"] == "claude-sonnet-local"
    assert tokens(lean) <= MOST_TOKENS < tokens(full)
    assert "Bash" in tools_of(lean) & tools_of(full)


@pytest.mark.parametrize("which", sorted(install.CLAUDES))
def test_agents_get_the_tools_that_they_name(served, tmp_path, which):
    """In one session: an agent that names Skill, one that names WebFetch, one that names neither."""
    named = (("Read, Grep", "Read, Skill"), ("Read, Edit", "Read, WebFetch"))
    for old, new in named:
        served.project.edit("fleet.yaml", old, new)
    served.project.run("generate")
    try:
        turns = requests_of(served, which, tmp_path, "-p",
                            "@play agent:planner agent:implementer agent:reviewer done")
    finally:
        for old, new in named:
            served.project.edit("fleet.yaml", new, old)
        served.project.run("generate")
    got = {turn.headers["x-claude-code-agent-id"]: tools_of(turn) for turn in turns
           if turn.headers.get("x-claude-code-agent-id")}
    assert len(got) == 3
    ours = [names & {"Skill", "WebFetch", "WebSearch", "Bash"} for names in got.values()]
    assert sorted(map(sorted, ours)) == [["Bash"], ["Skill"], ["WebFetch"]]
    assert not tools_of(turns[0]) & {"WebSearch", "Workflow", "TaskCreate"}
