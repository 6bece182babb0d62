"""Section 9: probing, loading and pulling, against scripted Ollamas on loopback."""
import json

import pytest
import subagent_fleet as sf


def write_fleet(directory, nodes, models, agents=None):
    """Write a fleet file (JSON is read as YAML is)."""
    tree = {"project": {"name": "local-dev"},
            "nodes": {name: {"endpoint": endpoint} for name, endpoint in nodes.items()},
            "models": {name: {"litellm_alias": f"{name}-local", **told}
                       for name, told in models.items()},
            "agents": {name: {"model": model, "description": "when it is asked for"}
                       for name, model in (agents or {}).items()}}
    (directory / "fleet.json").write_text(json.dumps(tree), encoding="utf-8")


def probe(*nodes, seconds=2, show=None):
    """Probe fake nodes by endpoint; give their states in order."""
    named = [sf.Node(f"n{i}", getattr(node, "endpoint", node)) for i, node in enumerate(nodes)]
    return list(sf.probe_nodes(sf.World(), named, seconds=seconds, show=show).values())


def test_probe_online_node_tells_models_and_what_is_loaded(fake_node):
    node = fake_node({"tiny": {"capabilities": ["tools", "completion"], "context": 8192}})
    node.loaded["tiny:latest"], node.gpu_percent = 4096, 62
    state, = probe(node)
    assert (state.online, state.version) == (True, "0.32.15") and state.latency_ms >= 0
    model, = state.models
    assert vars(model) == {"name": "tiny:latest", "size": 4_700_000_000, "parameters": "7.6B",
                           "quantization": "Q4_K_M", "capabilities": ("tools", "completion"),
                           "trained_context": 8192, "remote": ""}
    loaded, = state.loaded
    assert (loaded.name, loaded.context, loaded.gpu_percent) == ("tiny:latest", 4096, 62)


def test_probe_show_names_asks_only_for_those(fake_node):
    node = fake_node({"a": {}, "b": {}})
    state, = probe(node, show={"n0": ["A"]})
    assert [payload["model"] for payload in node.asked("/api/show")] == ["A"]
    assert [model.capabilities for model in state.models] == [("completion", "tools"), None]


@pytest.mark.parametrize("path, answer, reason", [
    ("/api/version", (404, {}), "not ollama"),
    ("/api/version", (200, {"version": 3}), "not ollama"),
    ("/api/version", (200, b"<html>hello</html>"), "not ollama"),
    ("/api/version", (401, {"error": "no"}), "http 401"),
    ("/api/tags", (500, {"error": "disk full"}), "http 500"),
    ("/api/tags", (200, {"models": 3}), "bad answer"),
    ("/api/tags", (200, b'{"models": [{"name"'), "bad answer"),
])
def test_probe_wrong_answer_has_its_class(fake_node, path, answer, reason):
    node = fake_node({"tiny": {}})
    node.answers[path] = answer
    state, = probe(node)
    assert (state.reason, state.models) == (reason, ())


def test_probe_without_ps_is_still_online(fake_node):
    node = fake_node({"tiny": {}})
    node.answers["/api/ps"] = 404, {}
    state, = probe(node)
    assert state.online and state.models and state.loaded == ()


# -- the commands --

@pytest.fixture
def fleet(fake_node, tmp_path):
    """Two nodes and their fleet file: `m4` has both models, `m5` only the small one."""
    m4, m5 = fake_node({"big:32b": {"size": 19_900_000_000}, "small:7b": {}}), \
        fake_node({"small:7b": {}})
    write_fleet(tmp_path, {"m4": m4.endpoint, "m5": m5.endpoint},
                {"heavy": {"node": "m4", "ollama_model": "big:32b", "context": 32768},
                 "light": {"node": "m5", "ollama_model": "small:7b", "fallback": ["heavy"]}},
                {"planner": "light", "implementer": "heavy"})
    return m4, m5


def test_discover_prints_the_table_of_the_specification(fleet, run_cli):
    done = run_cli("discover")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "Fleet: local-dev"
    assert lines[2].split() == ["Node", "Status", "Models"] and set(lines[3]) == {"-"}
    assert lines[4].split() == ["m4", "online", "big:32b,", "small:7b"]
    assert lines[5].split() == ["m5", "online", "small:7b"]


def test_warmup_unknown_names_are_usage_errors(fleet, run_cli):
    done = run_cli("warmup", "--agent", "planer")
    assert done.returncode == 2 and "did you mean `planner`?" in done.stderr
    done = run_cli("warmup", "--model", "hevy")
    assert done.returncode == 2 and "did you mean `heavy`?" in done.stderr  # unknown-agent's twin


def test_warmup_loads_each_model_as_its_route_asks_for_it(fleet, run_cli):
    m4, m5 = fleet
    done = run_cli("warmup")
    assert done.returncode == 0, done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["Warming", "models:"]
    assert lines[1][:4] == ["heavy", "m4", "big:32b", "ok"]
    assert lines[2][:4] == ["light", "m5", "small:7b", "ok"]
    model = sf.Model("heavy", "m4", "big:32b", "heavy-local", context=32768)
    route = sf.plan_chat({"messages": [{"role": "user", "content": "hi"}]}, model)
    sent, = m4.asked("/api/chat")
    assert sent["messages"] == [] and sent["options"]["num_ctx"] == route["options"]["num_ctx"]
    assert {key: sent[key] for key in ("model", "keep_alive", "think")} \
        == {key: route[key] for key in ("model", "keep_alive", "think")}
