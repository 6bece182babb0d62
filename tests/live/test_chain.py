"""The whole chain with the real programs, asserted on the wire.

init -> validate -> generate -> LiteLLM with the file as it is -> warmup -> Claude Code through
`launch` and through the sourced file -> a node dies -> clean. The tests run in this order and
share one project; what was typed and said becomes `session.txt`.
"""

import os
import pathlib
import re

import pytest

import install
import rig
from tools import SCRIPT

ACCEPT = "SUBAGENT_FLEET_ACCEPT"
SESSION = pathlib.Path(__file__).with_name("session.txt")
OWN_AGENT = "---\nname: mine\ndescription: my own agent\nmodel: haiku\n---\n\nMine.\n"
KEY_NAME = "STUDIO_GATEWAY_KEY"  # not LiteLLM's own variable: that one it reads by itself


class Chain:
    """One user's project on two nodes, with a gateway between."""

    def __init__(self, project, nodes, gateway_recorder):
        self.project, self.nodes, self.recorder = project, nodes, gateway_recorder
        self.gateway = None

    def start_gateway(self):
        line = (f"litellm --config litellm_config.yaml --host 127.0.0.1 "
                f"--port {self.recorder.port}")
        self.project.note("$ . ./.env.subagent-fleet", f"$ {line} &")
        self.process = rig.litellm_process(self.project.folder, self.recorder.upstream_port,
                                           self.project.environment())
        rig.wait_for_gateway(self.process, self.recorder.upstream_port)
        self.gateway = rig.Gateway(self.recorder.url, self.process, self.project.key())

    def routes(self):
        return self.project.json("status")["routes"]


@pytest.fixture(scope="module")
def chain(ground, nodes, trap):
    project = rig.Project(ground / "chain", SCRIPT, trap)
    recorder = rig.Recorder(rig.free_port())
    project.swaps = {nodes["studio"].recorder.port: "11501", nodes["mini"].recorder.port: "11502",
                     recorder.port: "14000"}
    chain = Chain(project, nodes, recorder)
    for node in nodes.values():
        node.ensure()
        node.unload()
    yield chain
    if chain.gateway:
        chain.gateway.stop()
    recorder.close()


@pytest.fixture
def session(chain):
    """Run Claude Code in the project: through `launch`, or with the sourced file."""
    def run(which, how, *words):
        project = chain.project
        project.use_claude(which)
        home = project.folder.with_name(f"home-{which}-{how}")
        home.mkdir()
        project.home = home
        if how == "launch":
            argv = project.argv("launch", "claude", "--", "-p", *words, *rig.CLAUDE_FLAGS)
            shown = "$ subagent-fleet launch claude -- -p " + " ".join(words)
        else:
            argv = ["sh", "-c", '. ./.env.subagent-fleet; exec claude "$@"', "sh", "-p", *words,
                    *rig.CLAUDE_FLAGS]
            shown = "$ . ./.env.subagent-fleet; claude -p " + " ".join(words)
        found = rig.run_session(argv, cwd=project.folder,
                                env=project.environment())
        label = {"latest": "Claude Code, latest", "node20": "Claude Code 2.1.197"}[which]
        project.note(f"{shown}   # {label}", found.result["result"])
        return found
    return run


# All models of these nodes are tiny and alike, so who does what is a person's choice.
MODELS = """\
  heavy-coder:
    node: studio
    ollama_model: coder-large:latest
    litellm_alias: claude-sonnet-local
    timeout: 600
    context: 65536
  small-coder:
    node: mini
    ollama_model: coder-small:latest
    litellm_alias: claude-haiku-local
    fallback: [heavy-coder]
    context: 32768
"""


def test_init_finds_both_nodes_and_their_models(chain):
    project = chain.project
    rig.wait_until(lambda: not rig.get_json("http://127.0.0.1:11434/", timeout=2)[0], seconds=60,
                   what="port 11434 to be free: `init` would find this machine's own Ollama")
    pairs = [("--node", f"{name}={node.url}") for name, node in chain.nodes.items()]
    project.run("init", *pairs[0], *pairs[1])
    text = project.read("fleet.yaml")
    assert all(node.url in text for node in chain.nodes.values())
    assert len(set(re.findall("(?m)^    node: (.+?) *(?:#|$)", text))) == 2  # both work
    assert "localhost:11434" not in text  # nobody answers there


def test_validate_accepts_what_init_wrote_and_a_user_completed(chain):
    project = chain.project
    project.edit("fleet.yaml", "port: 4000", f"port: {chain.recorder.port}")
    project.edit("fleet.yaml", "LITELLM_MASTER_KEY", KEY_NAME)
    project.edit("fleet.yaml", "provider: builtin", "provider: litellm")
    head, _, tail = project.read("fleet.yaml").partition("\nmodels:\n")
    agents = re.sub("model: [a-z-]+", "model: heavy-coder", tail[tail.index("agents:\n"):])
    for name in ("planner", "summarizer"):
        agents = re.sub(rf"({name}:\n +model: )heavy", r"\1small", agents)
    project.write("fleet.yaml", f"{head}\nmodels:\n{MODELS}{agents}")
    project.note("(edited: gateway port, provider and key variable, which model does what)")
    project.run("validate")


def test_generate_writes_the_files_and_leaves_the_users_agent(chain):
    project = chain.project
    project.write(".claude/agents/mine.md", OWN_AGENT)
    project.run("generate")
    assert project.read(".claude/agents/mine.md") == OWN_AGENT
    assert oct(os.stat(project.folder / ".env.subagent-fleet").st_mode & 0o777) == "0o600"
    project.run("generate", "--check")


def test_litellm_starts_with_the_file_as_it_is_and_is_closed(chain):
    chain.start_gateway()
    marks = {name: node.recorder.mark() for name, node in chain.nodes.items()}
    for key, word in (("", "no key"), ("sk-wrong-0123456789abcdef", "a wrong key")):
        status, _ = chain.gateway.say("claude-haiku-local", key=key)
        assert status in (400, 401, 500), f"with {word}: {status}"
        chain.project.note(f"(a request with {word}: refused)")
    assert not any(node.chats(marks[name]) for name, node in chain.nodes.items())
    status, body = chain.gateway.say("claude-haiku-local")
    assert (status, body["content"][0]["text"]) == (200, "PONG")
    assert len(chain.nodes["mini"].chats(marks["mini"])) == 1


def test_warmup_loads_what_the_route_asks_for_and_no_request_reloads(chain):
    for node in chain.nodes.values():
        node.unload()
    chain.project.run("warmup")
    wanted = {model["node"]: (model["model"], model["context"])
              for model in chain.project.json("status")["models"]}
    loads = {name: node.loads() for name, node in chain.nodes.items()}
    for name, node in chain.nodes.items():
        assert node.loaded() == dict([wanted[name]])
    marks = {name: node.recorder.mark() for name, node in chain.nodes.items()}
    for alias in ("claude-sonnet-local", "claude-haiku-local"):
        assert chain.gateway.say(alias, thinking={"type": "adaptive"})[0] == 200
    for name, node in chain.nodes.items():
        (chat,) = node.chats(marks[name])
        assert chat.body["model"] == wanted[name][0].replace(":latest", "") \
            or chat.body["model"] == wanted[name][0]
        assert chat.body["options"]["num_ctx"] == wanted[name][1]
        assert (chat.body["think"], chat.body["truncate"], chat.body["keep_alive"]) \
            == (False, False, -1)
        assert node.loads() == loads[name], "the first request reloaded the model"


@pytest.mark.parametrize("which, how", [("latest", "launch"), ("node20", "launch"),
                                        ("latest", "sourced"), ("node20", "sourced")])
def test_claude_code_lists_and_dispatches_on_the_alias_and_node_status_printed(
        chain, session, builtin_agents, which, how):
    chain.project.run("status") if (which, how) == ("latest", "launch") else None
    routes = {route["agent"]: route for route in chain.routes()}
    marks = {name: node.recorder.mark() for name, node in chain.nodes.items()}
    before = chain.recorder.mark()
    found = session(which, how, "go")
    assert found.returncode == 0 and found.result["result"] == "DONE"
    assert set(found.init["agents"]) - builtin_agents[which] == set(routes) | {"mine"}
    assert sorted(found.dispatched.values()) == ["planner", "reviewer"]
    turns = chain.recorder.since(before, "/v1/messages")
    chats = {name: node.chats(marks[name]) for name, node in chain.nodes.items()}
    heard = rig.hear(found, turns, chats, routes)
    chain.project.note("(heard on the wire)", *heard)
    hear_trace(chain.project.json("trace", "last", "--audit"), found)


def hear_trace(report, found):
    """Assert that `trace` says of LiteLLM's requests what it knows, and that it knows no more."""
    agents = {agent["agent_id"]: agent for agent in report["sessions"][0]["agents"]}
    assert set(agents) == {"", *found.dispatched}
    for name, agent in agents.items():
        # Where an alias has one machine and no fallback, the file says which; else nothing does.
        assert all((row["node"], row["planned"]) == ("", "unknown") or row["why"] == "by the file"
                   for row in agent["served"])
        said = {verdict["question"]: verdict["answer"] for verdict in agent["audit"]}
        known = "yes" if agent["served"][0]["node"] else "unknown"
        assert not name or said == {"Model": "yes", "Machine": known, "House": known,
                                    "Context": "unknown"}


def test_a_dead_node_is_answered_by_the_fallback(chain):
    chain.nodes["mini"].kill()
    mark = chain.nodes["studio"].recorder.mark()
    status, body = chain.gateway.say("claude-haiku-local")
    assert (status, body["content"][0]["text"]) == (200, "PONG")
    assert [chat.body["model"].split(":")[0] for chat in chain.nodes["studio"].chats(mark)] \
        == ["coder-large"]
    chain.project.note("(the machine `mini` loses power; a request to claude-haiku-local: "
                       "answered by studio)")
    chain.project.run("status")
    chain.nodes["mini"].ensure()


def test_clean_leaves_the_users_agent(chain):
    project = chain.project
    project.run("clean", "--force")
    left = [path.name for path in (project.folder / ".claude/agents").iterdir()]
    assert left == ["mine.md"]
    assert project.read(".claude/agents/mine.md") == OWN_AGENT
    assert not (project.folder / "litellm_config.yaml").exists()
    assert not (project.folder / ".env.subagent-fleet").exists()


def test_the_session_is_the_committed_one_and_shows_no_key(chain):
    text = chain.project.transcript()
    (install.CACHE / "session.txt").write_text(text, encoding="utf-8")
    assert "sk-" not in text and str(chain.project.folder.parent) not in text
    if os.environ.get(ACCEPT):
        SESSION.write_text(text, encoding="utf-8")
    accept = f"{ACCEPT}=1 python3 -m pytest tests/live/test_chain.py"
    assert text == SESSION.read_text(encoding="utf-8"), f"session.txt differs; accept: {accept}"
