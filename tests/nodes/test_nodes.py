"""Probing, loading and pulling, against scripted Ollamas on loopback."""
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import types

import pytest

import hostile_nodes
import subagent_fleet as sf
from node_rig import probe
from tools import PROC, PROGRAM, SCRIPT, clean_environment, free_port, limit_of, not_held_up

PORT = free_port()  # nobody serves there
NO_GATEWAY = f"No gateway runs at http://127.0.0.1:{PORT}"


def write_fleet(directory, nodes, models, agents=None):
    """Write a fleet file (JSON is read as YAML is)."""
    tree = {"project": {"name": "local-dev", "gateway": {"provider": "builtin", "port": PORT}},
            "nodes": {name: {"endpoint": endpoint} for name, endpoint in nodes.items()},
            "models": {name: {"litellm_alias": f"{name}-local", **told}
                       for name, told in models.items()},
            "agents": {name: {"model": model, "description": "when it is asked for"}
                       for name, model in (agents or {}).items()}}
    (directory / "fleet.json").write_text(json.dumps(tree), encoding="utf-8")


def test_probe_online_node_tells_models_and_what_is_loaded(fake_node):
    node = fake_node({"tiny": {"capabilities": ["tools", "completion"], "context": 8192}})
    node.loaded["tiny:latest"], node.gpu_percent = 4096, 62
    state = probe(node)
    assert (state.online, state.version) == (True, "0.32.15") and state.latency_seconds >= 0
    model, = state.models
    assert vars(model) == {"name": "tiny:latest", "size": 4_700_000_000, "parameters": "7.6B",
                           "quantization": "Q4_K_M", "capabilities": ("tools", "completion"),
                           "trained_context": 8192, "token_bytes": None, "window_bytes": 0,
                           "remote": "", "digest": "0" * 64}
    loaded, = state.loaded
    assert (loaded.name, loaded.context, loaded.gpu_percent) == ("tiny:latest", 4096, 62)


def test_probe_reads_what_differs_by_layer_from_the_beginning_of_a_long_answer(fake_node):
    node = fake_node({"m": {}})
    short = {"general.architecture": "gemma4", "gemma4.block_count": 6, "gemma4.context_length": 4096,
             "gemma4.attention.head_count_kv": [], "gemma4.attention.key_length": 512,
             "gemma4.attention.value_length": 512, "gemma4.attention.sliding_window": 1024,
             "gemma4.attention.sliding_window_pattern": None}
    whole = {**short, "gemma4.attention.head_count_kv": [8, 8, 8, 8, 8, 1],
             "gemma4.attention.sliding_window_pattern": [True] * 5 + [False],
             "tokenizer.ggml.tokens": ["a word"] * 400_000}

    def show(payload):
        return 200, {"capabilities": ["completion"],
                     "model_info": whole if payload.get("verbose") else short}

    node.answers["/api/show"] = show
    state = probe(node)
    model, = state.models
    assert (model.token_bytes, model.window_bytes) == (2048, (1024 + 512) * 8 * 1024 * 5 * 2)
    node.answers["/api/show"] = lambda payload: (404, {}) if payload.get("verbose") else (
        200, {"capabilities": ["completion"], "model_info": short})
    state = probe(node)
    assert (state.models[0].token_bytes, state.models[0].capabilities) == (None, ("completion",))


def test_a_machine_that_takes_its_time_for_each_answer_is_read_all_the_same(fake_node):
    node = fake_node({"m": {}})
    node.answers["/api/show"] = lambda payload: time.sleep(0.25) or (200, {
        "capabilities": ["completion"], "model_info": {
            "general.architecture": "gemma4", "gemma4.block_count": 6,
            "gemma4.context_length": 4096, "gemma4.attention.head_count_kv": [],
            "gemma4.attention.key_length": 512, "gemma4.attention.value_length": 512}})
    state = probe(node)
    assert [model.capabilities for model in state.models] == [("completion",)]


def test_probe_show_names_asks_only_for_those(fake_node):
    node = fake_node({"a": {}, "b": {}})
    state = probe(node, show=["A"])
    assert [payload["model"] for payload in node.asked("/api/show")] == ["a:latest"]
    assert [model.capabilities for model in state.models] == [("completion", "tools"), None]


@pytest.mark.parametrize("path, answer, reason", [
    ("/api/version", (404, {}), "not ollama"),
    ("/api/version", (200, {"version": 3}), "not ollama"),
    ("/api/version", (200, b"<html>hello</html>"), "not ollama"),
    ("/api/version", (401, {"error": "no"}), "http 401"),
    ("/api/tags", (500, {"error": "disk full"}), "http 500"),
    ("/api/tags", (200, {"models": 3}), "bad answer"), ("/api/tags", (200, {}), "bad answer"),
    ("/api/tags", (200, b'{"models": [{"name"'), "bad answer"),
])
def test_probe_wrong_answer_has_its_class(fake_node, path, answer, reason):
    node = fake_node({"tiny": {}})
    node.answers[path] = answer
    state = probe(node)
    assert (state.reason, state.models) == (reason, ())


@pytest.mark.parametrize("entry", [{}, {"name": ""}, {"name": 3}, "tiny", None])
def test_an_entry_without_a_name_is_absent_and_the_machine_is_well(fake_node, entry):
    node = fake_node({"tiny": {}})
    node.answers["/api/tags"] = 200, {"models": [{"name": "tiny:latest", "size": 9}, entry]}
    state = probe(node)
    assert (state.reason, [model.name for model in state.models]) == ("", ["tiny:latest"])


@pytest.mark.parametrize("entries", [[{}], [None, 3], ["tiny"]])
def test_a_list_without_any_name_is_no_list_of_models(fake_node, entries):
    node = fake_node({"tiny": {}})
    node.answers["/api/tags"] = 200, {"models": entries}
    assert probe(node).reason == "bad answer"


def test_probe_without_ps_is_still_online(fake_node):
    node = fake_node({"tiny": {}})
    node.answers["/api/ps"] = 404, {}
    state = probe(node)
    assert state.online and state.models and state.loaded == ()


def test_together_a_bug_is_raised_and_a_failure_returned():
    def fail(error):
        raise error
    failure = sf.NodeFailure("timeout", "late")
    jobs = {"value": lambda: 7, "failure": lambda: fail(failure)}
    assert dict(sf.run_together(sf.World(), jobs)) == {"value": 7, "failure": failure}
    with pytest.raises(ZeroDivisionError):
        dict(sf.run_together(sf.World(), {"bug": lambda: 1 / 0}))


def test_together_nobody_waits_past_the_deadline_or_for_the_threads():
    world, gone = sf.World(), threading.Event()
    jobs = {i: (lambda: gone.wait(20)) if i % 2 else (lambda i=i: i) for i in range(8)}
    with not_held_up(20):
        found = dict(sf.run_together(world, jobs, until=world.clock() + 0.3))
    assert sorted(key for key in found if key is not None) == [0, 2, 4, 6]
    gone.set()


def test_probe_null_for_no_models_is_an_empty_store(fake_node):
    node = fake_node({})
    node.answers["/api/tags"] = node.answers["/api/ps"] = 200, {"models": None}
    state = probe(node)
    assert state.online and (state.models, state.loaded) == ((), ())


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


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Run a command in this process (a process of its own costs most of a test's time)."""
    def run(*words):
        monkeypatch.chdir(tmp_path)
        capsys.readouterr()
        status = sf.main(list(words))
        stdout, stderr = capsys.readouterr()
        return types.SimpleNamespace(returncode=status, stdout=stdout, stderr=stderr)
    return run


def nodes_of(command, *words):
    """Run a command with --json; return its nodes by name, and the whole object."""
    done = command(*words, "--json")
    assert done.stderr == ""
    found = json.loads(done.stdout)
    return {node["name"]: node for node in found["nodes"]}, found


# -- discover --

def test_discover_prints_the_table_of_the_specification(fleet, command):
    done = command("discover")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "Fleet: local-dev"
    assert lines[2].split() == ["Node", "Status", "Models"] and set(lines[3]) == {"-"}
    assert lines[4].split() == ["m4", "online", "big:32b,", "small:7b"]
    assert lines[5].split() == ["m5", "online", "small:7b"]


def test_discover_marks_missing_models_with_what_to_type(fleet, command):
    m4, m5 = fleet
    del m4.models["big:32b"]
    m5.close()
    done = command("discover")
    assert done.returncode == 0
    assert re.search(r"^heavy +m4 +big:32b +missing: `ollama pull big:32b` on m4, or `subagent-fleet warmup --pull`$", done.stdout,
                     re.M)
    assert re.search(r"^light +m5 +small:7b +unknown$", done.stdout, re.M)
    assert re.search(r"^m5 +offline +\(refused\)$", done.stdout, re.M)
    assert done.stdout.endswith(
        f"\nm5 ({m5.endpoint}): refused: nothing listens there; is Ollama running?\n  fix: {sf.fix_for_reason('refused', 'ollama')}\n")


def test_discover_says_of_every_broken_node_what_mends_it(fleet, command):
    for node in fleet:
        node.close()
    said = command("discover").stdout
    assert said.count(": refused: ") == said.count("  fix: ") == 2


def test_discover_verbose_says_why_and_what_there_is(fleet, command):
    fleet[1].close()
    done = command("discover", "-v")
    assert "refused: nothing listens there" in done.stdout and "  fix: start Ollama" in done.stdout
    assert "big:32b: 19.9 GB, 7.6B, Q4_K_M, trained for 131072, completion, tools" in done.stdout


def test_discover_json_tells_everything_and_write_keeps_it(fleet, command, tmp_path):
    done = command("discover", "--json", "--write")
    found = json.loads(done.stdout)
    assert found["schema"] == "subagent-fleet/discover/2" and found["fleet"] == "local-dev"
    assert [(m["route"], m["state"]) for m in found["models"]] \
        == [("heavy", "present"), ("light", "present")]
    path = tmp_path / ".subagent-fleet" / "discovery.json"
    assert pathlib.Path(tmp_path, found.pop("written")).samefile(path)
    assert json.loads(path.read_text(encoding="utf-8")) == found
    assert os.listdir(path.parent) == ["discovery.json"]


def test_discover_write_says_where(fleet, command):
    assert command("discover", "--write").stdout.endswith(
        "\nWrote .subagent-fleet/discovery.json\n")


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", "1e9", "86401", ""])
def test_timeout_that_is_no_time_is_a_usage_error(fleet, command, text):
    done = command("discover", "--timeout", text)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith(
        "error: discover: --timeout: expected seconds, above 0, at most 86400, "
        f"not `{text}`\n")


# -- status --

def routes_of(done):
    """The routing lines of a status."""
    return done.stdout.split("Agent routing:\n")[1].split("\n\n")[0].splitlines()


def test_status_prints_nodes_and_routes_of_the_specification(fleet, command):
    m4, m5 = fleet
    m4.loaded["big:32b"], m4.gpu_percent = 32768, 62
    done = command("status")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "Fleet: local-dev"
    assert lines[2].split() == ["Node", "Status", "Endpoint", "Models"] and set(lines[3]) == {"-"}
    assert lines[4].split() == ["m4", "online", m4.endpoint, "big:32b,", "small:7b"]
    assert re.search(r"^m4 +big:32b +32,768 +62 % +never$", done.stdout, re.M)
    assert routes_of(done) == ["planner -> m5 -> small:7b -> light-local: cold",
                               "implementer -> m4 -> big:32b -> heavy-local: ready"]
    assert lines[-1].partition("ready. ")[2] == f"{NO_GATEWAY}. Next: `subagent-fleet warmup`"


def test_status_ready_when_all_is_loaded(fleet, command):
    m4, m5 = fleet
    m4.loaded["big:32b"], m5.loaded["small:7b"] = 32768, 8192
    done = command("status", "--check")
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == (
        f"local-dev: ready, but {NO_GATEWAY.replace('No', 'no')}: `subagent-fleet serve` in another terminal, or "
        "`subagent-fleet up`.")


def test_status_context_other_than_the_route_asks_for_is_cold(fleet, command):
    fleet[0].loaded["big:32b"] = 4096
    done = command("status", "--check")
    assert done.returncode == 1
    assert routes_of(done)[1].endswith("heavy-local: cold (loaded with context 4096)")


def test_status_offline_node_names_the_fallback(fleet, command):
    fleet[0].loaded["big:32b"] = 32768
    fleet[1].close()
    done = command("status")
    assert routes_of(done)[0].endswith("light-local: node offline \u2192 fallback big:32b on m4")
    assert done.stdout.splitlines()[-1] == \
        f"local-dev: 1 of 2 models ready. {NO_GATEWAY}. Next: m5 ({fleet[1].endpoint}) is offline, refused: " \
        f"{sf.fix_for_reason('refused', 'ollama')}."


@pytest.mark.parametrize("words", [b"404 page not found", b"", {"detail": "Not Found"}])
def test_a_404_that_speaks_of_no_model_is_no_ollama_to_every_command(fleet, command, words):
    fleet[1].answers = dict.fromkeys(
        ("/api/version", "/api/tags", "/api/ps", "/api/chat"), (404, words))
    fix, url = sf.fix_for_reason('not ollama', 'ollama'), fleet[1].endpoint
    assert f"m5 ({url}): not ollama: it does not know /api/version\n  fix: {fix}\n" \
        in command("discover", "-v").stdout
    assert f"failed: it does not know /api/version\n    fix: {fix}\n" \
        in command("warmup", "--model", "light").stdout
    fleet[0].loaded["big:32b"] = 32768
    assert command("status").stdout.splitlines()[-1] \
        == f"local-dev: 1 of 2 models ready. {NO_GATEWAY}. Next: m5 ({url}) is offline, not ollama: {fix}."


def test_status_missing_model_says_what_to_pull(fleet, command):
    del fleet[0].models["big:32b"]
    done = command("status")
    assert routes_of(done)[1].endswith("heavy-local: model missing")
    assert done.stdout.splitlines()[-1].startswith(f"local-dev: 0 of 2 models ready. {NO_GATEWAY}. Next: `ollama pull big:32b` on m4")


def test_status_json_holds_nodes_models_and_routes(fleet, command):
    fleet[0].loaded["big:32b"] = 4096
    nodes, found = nodes_of(command, "status")
    assert found["schema"] == "subagent-fleet/status/2" and found["ready"] is False
    assert found["next"] == f"{NO_GATEWAY}. Next: `subagent-fleet warmup`"
    assert (found["gateway"]["id"], found["gateway"]["level"]) == ("port-free", "info")
    heavy = found["models"][0]
    assert (heavy["route"], heavy["state"], heavy["context"], heavy["loaded"]["context"]) \
        == ("heavy", "cold", 32768, 4096)
    assert [(route["agent"], route["state"]) for route in found["routes"]] \
        == [("planner", "cold"), ("implementer", "cold")]


def test_status_watch_and_json_exclude_each_other(fleet, command):
    done = command("status", "--watch", "--json")
    assert done.returncode == 2 and "--watch and --json cannot be used together" in done.stderr


def route_state(fleet, **states):
    """The state of the model `heavy` when the nodes are as told."""
    known = {name: sf.NodeState(name, "http://x:1", *state) for name, state in states.items()}
    return sf.format_route_state(fleet, sf.plan_route_state(fleet, known, fleet.models["heavy"]))


@pytest.mark.parametrize("m4, m5, told", [
    ("off", "on", "node offline \u2192 fallback small:7b on m5"),
    ("on", "off", "model missing"),
    ("off", "off", "node offline"),
    ("Big:32B", "on", "cold"),
    ("library/big:32b", "on", "cold"),
])
def test_route_state_names_only_a_fallback_that_answers(m4, m5, told):
    def state(word, models):
        names = models if word == "on" else (word,)
        return ("refused",) if word == "off" else \
            ("", "", "", 1, tuple(sf.NodeModel(name) for name in names))
    models = [sf.Model("heavy", "m4", "big:32b", "h", fallback=("light",)),
              sf.Model("light", "m5", "small:7b", "l")]
    fleet = types.SimpleNamespace(models={model.name: model for model in models})
    assert route_state(fleet, m4=state(m4, ()), m5=state(m5, ("small:7b",))) == told


def test_route_state_shared_alias_answers_and_cloud_needs_no_memory():
    models = [sf.Model("heavy", "m4", "big:32b", "same"), sf.Model("twin", "m5", "big:32b", "same")]
    fleet = types.SimpleNamespace(models={model.name: model for model in models})
    have = "", "", "", 1, (sf.NodeModel("big:32b"),)
    assert route_state(fleet, m4=("timeout",), m5=have) == "node offline \u2192 fallback big:32b on m5"
    fleet.models["heavy"] = sf.Model("heavy", "m4", "x:cloud", "same", cloud=True)
    assert route_state(fleet, m4=have, m5=have) == "ready"
    assert route_state(fleet, m4=("timeout",), m5=("timeout",)) == "node offline"


@pytest.mark.parametrize("expires, told", [
    ("2318-12-01T10:00:00.123456789+01:00", "never"), ("2026-11-18T12:04:00Z", "4 min"),
    ("2026-11-18T17:04:00.5+01:00", "4 h"), ("2026-11-18T11:00:00Z", "leaving, or busy"),
    ("", "?"), ("tomorrow", "?"), ("2026-99-99T99:99:99Z", "?"),
    ("0001-01-01T00:00:00+14:00", "leaving, or busy"),
])
def test_expiry_is_told_in_words(expires, told):
    assert sf.format_expiry(expires, 1795003200.0) == told  # 2026-11-18T12:00:00Z


# -- warmup --

def test_warmup_unknown_names_are_usage_errors(fleet, command):
    done = command("warmup", "--agent", "planer")
    assert done.returncode == 2 and "did you mean `planner`?" in done.stderr
    done = command("warmup", "--model", "hevy")
    assert done.returncode == 2 and "did you mean `heavy`?" in done.stderr
    for kind, slug in (("agent", "unknown-agent"), ("model", "unknown-model")):
        with pytest.raises(sf.FleetError) as caught:
            sf.check_names(kind, ["x", "?"], {"x": 1}, "f")
        assert (caught.value.slug, caught.value.status) == (slug, 2)


def test_warmup_loads_each_model_as_its_route_asks_for_it(fleet, command):
    m4, m5 = fleet
    done = command("warmup")
    assert done.returncode == 0, done.stdout
    first, *lines = sorted(line.split() for line in done.stdout.splitlines())
    assert first == ["Warming", "models:"]  # who is ready first is said first
    assert [line[:4] for line in lines] == [["heavy", "m4", "big:32b", "ok"],
                                            ["light", "m5", "small:7b", "ok"]]
    model = sf.Model("heavy", "m4", "big:32b", "heavy-local", context=32768)
    talk = sf.Talk("heavy-local", (sf.Turn("user", texts=("hi",)),))
    route = sf.Ollama().chat(talk, model).payload
    sent, = m4.asked("/api/chat")
    assert sent["messages"] == [] and sent["options"]["num_ctx"] == route["options"]["num_ctx"]
    assert {key: sent[key] for key in ("model", "keep_alive", "think")} \
        == {key: route[key] for key in ("model", "keep_alive", "think")}


def test_warmup_shows_context_and_share_of_the_gpu(fleet, command):
    fleet[0].gpu_percent, fleet[1].gpu_percent = 62, 0
    done = command("warmup")
    assert re.search(r"^  heavy  m4  big:32b   ok [(]context 32768, 62 % on GPU, [0-9.]+ s[)]$",
                     done.stdout, re.M), done.stdout
    assert "ok (context 8192, on CPU, " in done.stdout


@pytest.mark.parametrize("term, draws", [("xterm", True), ("dumb", False)])
def test_warmup_draws_over_its_progress_where_that_can_be(fleet, quick, monkeypatch, term, draws):
    monkeypatch.setattr(sf.World, "is_terminal", lambda self, stream="stdout": stream == "stderr")
    talk = quick("warmup", env={"TERM": term}).stderr
    assert ("\x1b[K" in talk) == draws and (talk == "") == (not draws)


def test_warmup_chosen_models_only(fleet, command):
    m4, m5 = fleet
    assert command("warmup", "--agent", "planner").returncode == 0
    assert list(m5.loaded) == ["small:7b"] and not m4.loaded
    assert command("warmup", "--model", "heavy", "--agent", "planner").returncode == 0
    assert list(m4.loaded) == ["big:32b"]


def test_warmup_same_model_and_context_is_loaded_once(fake_node, command, tmp_path):
    node = fake_node({"tiny": {}})
    write_fleet(tmp_path, {"n": node.endpoint},
                {name: {"node": "n", "ollama_model": spelt} for name, spelt in
                 (("a", "tiny"), ("b", "tiny:latest"), ("c", "library/tiny"))})
    done = command("warmup")
    assert len(node.asked("/api/chat")) == 1 and done.stdout.count("  ok (") == 3


def test_warmup_other_context_takes_the_place_of_the_first(fake_node, command, tmp_path):
    node = fake_node({"tiny": {}})
    write_fleet(tmp_path, {"n": node.endpoint},
                {name: {"node": "n", "ollama_model": "tiny", "context": context} for name, context in
                 (("a", 8192), ("b", 16384))})
    done = command("warmup")
    assert [sent["options"]["num_ctx"] for sent in node.asked("/api/chat")] == [8192, 16384]
    assert "a  n  tiny  failed: loaded with context 16384, not 8192" in done.stdout
    assert "b  n  tiny  ok" in done.stdout


def test_warmup_name_that_ps_lists_twice_is_seen_with_its_context(fleet, command):
    twice = [{"name": "small:7b", "context_length": context, "size": 1, "size_vram": 1}
             for context in (4096, 8192)]  # one still leaving, 0.32.15
    fleet[1].answers["/api/ps"] = 200, {"models": twice}
    assert command("warmup", "--model", "light").returncode == 0
    assert "light-local: ready" in command("status").stdout


@pytest.mark.parametrize("piece, told", [
    (b'{"status":"pulling a","digest":"a","total":9,"completed":1}\n', "the download ended"),
    (b" ", "the download made no progress for 0.4 s"),
])
def test_warmup_pull_may_take_long_while_it_goes_on(command, tmp_path, limits, piece, told):
    def behave(connection, path):
        if path == "/api/version":
            connection.sendall(hostile_nodes.whole(b'{"version":"0.32.15"}'))
            return
        if path != "/api/pull":
            connection.sendall(hostile_nodes.whole(b'{"error":"no model"}', b"HTTP/1.1 404 No\r\n"))
            return
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(4):
            time.sleep(0.15)
            connection.sendall(piece)
    limits(pull_stall=0.4)
    write_fleet(tmp_path, {"n": f"http://127.0.0.1:{hostile_nodes.listen(behave)}"},
                {"a": {"node": "n", "ollama_model": "tiny"}})
    done = command("warmup", "--pull")
    assert done.returncode == 1 and f"failed: {told}" in done.stdout


@pytest.mark.parametrize("answer, told", [
    ((404, {"error": "model 'small:7b' not found"}),
     "model 'small:7b' not found\n    fix: `ollama pull small:7b` on m5, or `subagent-fleet warmup --pull`"),
    ((500, {"error": "model requires more system memory (9.3 GiB) than is available (2.1 GiB)"}),
     "model requires more system memory (9.3 GiB) than is available (2.1 GiB)"),
    ((400, {"error": "\"small:7b\" does not support chat"}), '"small:7b" does not support chat'),
    ((200, {"error": "llama runner process has terminated: exit status 2"}),
     "llama runner process has terminated: exit status 2"),
    ((200, {"hello": "world"}), "its answer to a load is not Ollama's"),
    ((200, b"<html>"), "it does not answer with JSON"),
    ((200, {"done": True}), "Ollama loaded it, but /api/ps shows only an empty list"),
])
def test_warmup_failure_is_told_in_ollamas_words(fleet, command, answer, told):
    fleet[1].answers["/api/chat"] = answer
    done = command("warmup", "--model", "light")
    assert done.returncode == 1 and f"small:7b  failed: {told}" in done.stdout


def test_warmup_context_that_was_clamped_is_a_failure(fleet, command):
    fleet[0].models["big:32b"]["context"] = 16384
    done = command("warmup", "--model", "heavy")
    assert done.returncode == 1
    assert "failed: loaded with context 16384, not 32768" in done.stdout
    assert "fix: write `context: 16384` in models.heavy" in done.stdout


def test_warmup_model_pushed_out_by_the_next_is_told(fake_node, command, tmp_path):
    node = fake_node({"a:1b": {}, "b:1b": {}})
    node.most_loaded = 1
    write_fleet(tmp_path, {"n": node.endpoint},
                {"a": {"node": "n", "ollama_model": "a:1b"},
                 "b": {"node": "n", "ollama_model": "b:1b"}})
    done = command("warmup")
    assert done.returncode == 1
    assert "a:1b  failed: Ollama loaded it, but /api/ps shows only b:1b\n" in done.stdout
    assert "b  n  b:1b  ok" in done.stdout


def test_warmup_node_that_never_answers_fails_in_time(fake_node, command, tmp_path):
    node = fake_node({"a:1b": {}})
    silent = hostile_nodes.listen(hostile_nodes.silence)
    write_fleet(tmp_path, {"n": node.endpoint, "s": f"http://127.0.0.1:{silent}"},
                {"a": {"node": "n", "ollama_model": "a:1b"},
                 "b": {"node": "s", "ollama_model": "a:1b"}})
    done = command("warmup", "--timeout", "0.3")
    assert done.returncode == 1
    assert "a:1b  ok" in done.stdout
    assert "b  s  a:1b  not answering: no answer within 0.3 s\n" in done.stdout


def test_a_model_that_was_mistyped_is_named_before_a_download(fleet, command):
    fleet[1].models["small:8b"] = fleet[1].models.pop("small:7b")
    fix = ("write `ollama_model: small:8b` in models.light, which m5 has, or `ollama pull small:7b` "
           "on m5, or `subagent-fleet warmup --pull`\n")
    assert f"    fix: {fix}" in command("warmup", "--model", "light").stdout
    assert f"small:7b  missing: {fix}" in command("discover").stdout


def loads_slowly(node, *, seconds=20, looks=0, held=(), silent=False):
    """Make a node take its time to load: what it holds meanwhile, whether it answers at all.

    It is ready after so many seconds, or so many looks at it later than who is busy is told.
    """
    ready = threading.Event()
    asked = threading.Event()
    busy_at = []

    def chat(payload):
        asked.set()
        busy_at[:] = [time.monotonic() + limit_of("busy")]
        ready.wait(seconds)
        ready.set()
        del node.answers["/api/chat"]
        return node.answer("/api/chat", payload)

    def hold(payload):
        if asked.is_set() and not ready.is_set():
            if silent:
                ready.wait(30)
            elif time.monotonic() > busy_at[0]:
                busy_at.append(0)
            if len(busy_at) > looks > 0:
                ready.set()
            names = [{"name": name, "size": 1, "size_vram": 1, "context_length": context}
                     for name, context in held]
            return 200, {"models": names}
        node.answers.pop("/api/ps", None)
        return node.answer("/api/ps", payload)
    node.answers.update({"/api/chat": chat, "/api/ps": hold})
    return ready


@pytest.fixture
def hurried(limits):
    limits(load_look=0.02, busy=0.1)


def test_warmup_row_comes_as_it_happens_and_names_who_is_busy(fleet, command, hurried):
    loads_slowly(fleet[0], looks=9, held=[("other:8b", 4096)])
    done = command("warmup")
    lines = [re.sub(r", [0-9.]+ s[)]", ")", line) for line in done.stdout.splitlines()]
    assert (done.returncode, lines) == (0, [
        "Warming models:", "  light  m5  small:7b  ok (context 8192, 100 % on GPU)",
        "  heavy  m4  big:32b   busy: other:8b seems to be in use there; waiting",
        "  heavy  m4  big:32b   ok (context 32768, 100 % on GPU)"])


@pytest.mark.parametrize("held, is_busy", [
    ((), False),  # not yet listed
    ((("big:32b", 32768),), False), ((("big:32b", 0), ("other:8b", 1)), False),
    ((("big:32b", 4096),), True),  # which must leave first
])
def test_warmup_that_loads_is_not_busy(fleet, command, hurried, held, is_busy):
    loads_slowly(fleet[0], looks=9, held=held)
    done = command("warmup", "--model", "heavy")
    assert done.returncode == 0 and ("busy" in done.stdout) == is_busy, done.stdout


def test_warmup_of_a_busy_machine_ends_with_its_own_word(fleet, command, hurried):
    ready = loads_slowly(fleet[0], held=[("other:8b", 4096)])
    done = command("warmup", "--json", "--timeout", "0.8")
    ready.set()
    heavy, light = json.loads(done.stdout)["results"]
    assert (heavy["state"], heavy["detail"]) == ("busy", "other:8b seems to be in use there")
    assert light["state"] == "ok" and heavy["fix"]


def test_warmup_machine_that_hangs_while_it_loads_is_left(fleet, command, hurried, limits):
    limits(probe=0.3, hung=0.2)
    ready = loads_slowly(fleet[0], silent=True)
    with not_held_up(20):
        done = command("warmup")
    ready.set()
    assert done.returncode == 1 and "light  m5  small:7b  ok" in done.stdout
    assert re.search("heavy  m4  big:32b   not answering: it took the request, but has not "
                     "answered for \\d s\n", done.stdout)


def test_warmup_asks_before_it_loads(fleet, command, limits):
    limits(probe=0.3)
    answers = threading.Event()
    fleet[0].answers["/api/version"] = lambda payload: answers.wait(20) and (200, {})
    with not_held_up(20):
        done = command("warmup")
    answers.set()
    assert "heavy  m4  big:32b   not answering: no answer within 0.3 s\n" in done.stdout
    assert not fleet[0].asked("/api/chat")


def test_warmup_cloud_model_has_nothing_to_load(fake_node, command, tmp_path):
    node = fake_node({"big:cloud": {"remote": "https://ollama.com:443"}})
    write_fleet(tmp_path, {"n": node.endpoint},
                {"a": {"node": "n", "ollama_model": "big:cloud", "cloud": True}})
    done = command("warmup")
    assert done.returncode == 0 and "ok (0.0 s, runs at ollama.com" in done.stdout
    assert not node.asked("/api/chat")
    assert command("status").stdout.splitlines()[-1].startswith("local-dev: ready, but no gateway runs at ")
    assert "at https://ollama.com:443" in command("discover", "-v").stdout


def test_warmup_unload_takes_models_out_of_memory(fleet, command):
    m4, m5 = fleet
    m4.loaded["big:32b"], m5.loaded["small:7b"] = 32768, 8192
    assert command("warmup", "--unload", "--model", "heavy").returncode == 0 and m5.loaded
    del m4.models["big:32b"]  # what is not there need not leave
    done = command("warmup", "--unload")
    assert done.returncode == 0 and done.stdout.startswith("Unloading models:\n")
    assert not m4.loaded and not m5.loaded
    assert all(sent["keep_alive"] == 0 for sent in m4.asked("/api/chat"))


def test_warmup_pull_downloads_what_is_missing_and_loads_it(fleet, command):
    m5 = fleet[1]
    del m5.models["small:7b"]
    m5.pullable.add("small:7b")
    done = command("warmup", "--pull", "--json")
    heavy, light = json.loads(done.stdout)["results"]
    assert done.returncode == 0 and (heavy["ok"], heavy["pulled_bytes"]) == (True, 0)
    assert (light["ok"], light["pulled_bytes"], light["loaded"]["context"]) == (True, 4000, 8192)
    assert not fleet[0].asked("/api/pull")


@pytest.mark.parametrize("lines, told", [
    (None, "pull model manifest: file does not exist"),
    ([{"status": "pulling manifest"}], "the download ended without `success`"),
    ([{"status": "success", "total": 5, "digest": []}, 3], "the download ended without `success`"),
    ([{"error": "The model you are attempting to pull requires a newer version of Ollama."}],
     "requires a newer version of Ollama"),
])
def test_warmup_pull_that_fails_is_told_in_ollamas_words(fleet, command, lines, told):
    m5 = fleet[1]
    del m5.models["small:7b"]
    if lines:
        m5.answers["/api/pull"] = 200, lines
    done = command("warmup", "--pull", "--model", "light")
    assert done.returncode == 1 and told in done.stdout


def test_warmup_takes_a_model_as_its_machine_calls_it(fleet, command):
    found = json.loads(command("warmup", "--model", "small:7b", "--json").stdout)
    assert [row["route"] for row in found["results"]] == ["light"]
    refused = command("warmup", "--model", "small:9b")
    assert refused.returncode == 2 and "did you mean `small:7b`?" in refused.stderr


def test_warmup_json_holds_every_outcome(fleet, command):
    fleet[1].close()
    done = command("warmup", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (1, "")
    assert found["schema"] == "subagent-fleet/warmup/2"
    heavy, light = found["results"]
    assert heavy["ok"] and heavy["loaded"]["context"] == 32768 and heavy["seconds"] >= 0
    assert not light["ok"] and light["loaded"] is None and light["detail"] and light["fix"]


# -- what must hold however nodes behave: a process of its own, measured --

MEASURED = f"""
import os, resource, runpy, sys
os._exit = sys.exit  # else nothing is measured
report, sys.argv = sys.argv[1], sys.argv[2:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    try:  # ru_maxrss counts the parent's memory before exec
        peak = [int(line.split()[1]) for line in open("{PROC}/self/status") if "VmHWM" in line][0]
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    open(report, "w").write(str(peak))
"""


def measure(directory, *words, environment=None):
    """Run the file as a user does; give (process, seconds, peak memory in MB)."""
    report = directory / "peak"
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", MEASURED, str(report), str(SCRIPT), *words],
        cwd=str(directory), env=clean_environment(**(environment or {})), timeout=60,
        capture_output=True)
    return done, time.monotonic() - began, int(report.read_text()) / 1024


def measure_in_time(directory, *words, timeout, **more):
    """Run with a --timeout; give (process, whether it kept it, peak MB, MB above `--version`).

    Kept: it ended well before a second deadline would have passed, the time the file takes to
    start aside. Three tries, as others may slow it; who is held up by a node is so each time.
    """
    for _ in range(3):
        _, start, idle = measure(directory, "--version")
        done, took, peak = measure(directory, *words, "--timeout", str(timeout), **more)
        if took - start < 1.6 * timeout:
            return done, True, peak, peak - idle
    return done, False, peak, peak - idle


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """All hostile nodes and an honest one in one fleet, and what one run of discover made of it."""
    from fake_ollama import FakeNode

    directory = tmp_path_factory.mktemp("hostile")
    wanted, held = hostile_nodes.start_hostile_nodes(directory)
    honest = FakeNode({f"model-{i}:1b": {} for i in range(300)})
    wanted["honest"] = honest.endpoint, list(honest.models)
    write_fleet(directory, {name: endpoint for name, (endpoint, _) in wanted.items()},
                {"m": {"node": "honest", "ollama_model": "model-7:1b"}}, {"a": "m"})
    done, in_time, _, grown = measure_in_time(directory, "discover", "--json", timeout=2)
    yield types.SimpleNamespace(directory=directory, wanted=wanted, done=done, grown=grown,
                                in_time=in_time)
    honest.close()
    assert held


@pytest.mark.slow
def test_hostile_nodes_each_have_the_right_class_or_names(hostile):
    assert hostile.done.returncode == 0 and hostile.done.stderr == b""
    found = json.loads(hostile.done.stdout)
    wrong = {}
    for node in found["nodes"]:
        wanted = hostile.wanted[node["name"]][1]
        names = sorted(model["name"] for model in node["models"])
        told = node["reason"] in wanted and not node["online"] if isinstance(wanted, set) \
            else node["online"] and names == sorted(wanted)
        if not told:
            wrong[node["name"]] = node["reason"] or names[:3]
    assert len(found["nodes"]) > 40 and wrong == {}


@pytest.mark.slow
def test_hostile_nodes_hold_nobody_up(hostile):
    assert hostile.in_time


@pytest.mark.slow
def test_hostile_nodes_take_little_memory(hostile):
    assert hostile.grown < 24  # beyond a `--version`: to compile the file takes Python 27 to 30 MB


@pytest.mark.slow
def test_hostile_nodes_leave_every_json_readable(hostile):
    (hostile.directory / "warm").mkdir()
    write_fleet(hostile.directory / "warm",
                {name: endpoint for name, (endpoint, _) in hostile.wanted.items()},
                {name: {"node": name, "ollama_model": "\u202e\u00e9[/x]"} for name in hostile.wanted},
                {"a": "silent"})
    running = [start(hostile.directory / "warm", *words, "--json", "--timeout", "1")
               for words in (("status",), ("warmup", "--pull"), ("warmup", "--unload"))]
    found = [process.communicate(timeout=20) for process in running]
    assert all(stderr == b"" for _, stderr in found)
    status, pulled, unloaded = (json.loads(stdout) for stdout, _ in found)
    assert len(status["models"]) == len(pulled["results"]) == len(hostile.wanted)
    assert not any(result["ok"] for result in pulled["results"])
    assert all(result["ok"] == (result["detail"] == "not there") for result in unloaded["results"])


def test_hostile_names_reach_the_terminal_as_escapes(command, tmp_path):
    port = hostile_nodes.listen(hostile_nodes.BEHAVIOURS["names"][0])
    write_fleet(tmp_path, {"n": f"http://127.0.0.1:{port}"},
                {"m": {"node": "n", "ollama_model": "a:1b"}})
    for words in (("discover", "-v"), ("status",)):
        done = command(*words)
        assert done.returncode == 0 and done.stderr == ""
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069"
                             "\ud800-\udfff]", done.stdout)
        assert "\\x1b[2J" in done.stdout and "two\\nlines:1b" in done.stdout
        assert "\\u202egnp" in done.stdout and "[/x]:1b" in done.stdout


@pytest.mark.slow
def test_two_hundred_nodes_half_of_them_black_holes(fake_node, tmp_path):
    port, held = hostile_nodes.black_hole()
    silent = hostile_nodes.listen(hostile_nodes.silence)
    honest = fake_node({f"m{i}:1b": {} for i in range(20)})
    endpoints = [f"http://127.0.0.1:{port}"] * 50 + [f"http://127.0.0.1:{silent}"] * 50 \
        + [honest.endpoint] * 100
    write_fleet(tmp_path, {f"n{i}": endpoint for i, endpoint in enumerate(endpoints)},
                {f"m{i}": {"node": f"n{i}", "ollama_model": "m1:1b"} for i in range(200)})
    dead = dict.fromkeys(("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:1")
    done, in_time, _, grown = measure_in_time(tmp_path, "discover", "--json", timeout=2,
                                              environment=dead)
    nodes = json.loads(done.stdout)["nodes"]
    assert [node["reason"] for node in nodes] == ["timeout"] * 100 + [""] * 100
    assert [node["name"] for node in nodes[100:] if not any(
        model["capabilities"] for model in node["models"])] == []
    assert in_time and grown < 32 and held  # beyond a `--version`, as above


def start(directory, *words, **more):
    """Start the file as a user does."""
    return subprocess.Popen([sys.executable, "-I", "-S", PROGRAM, *words], cwd=str(directory),
                            env=clean_environment(), stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, **more)


@pytest.mark.parametrize("words, after", [
    (("discover", "--write"), 0.0), (("discover", "--write"), 0.3),
    (("status", "--watch", "0.1"), 0.05), (("status", "--watch", "0.1"), 0.3),
    (("warmup", "--pull"), 0.0), (("warmup", "--pull"), 0.05)])
def test_interrupt_ends_at_once_with_one_line(fake_node, tmp_path, words, after):
    node = fake_node({"a:1b": {}})
    node.delay = 0.1
    silent = hostile_nodes.listen(hostile_nodes.silence)
    write_fleet(tmp_path, {"n": node.endpoint, "s": f"http://127.0.0.1:{silent}",
                           "d": "http://no-such-host.local:1"},
                {"a": {"node": "n", "ollama_model": "a:1b"},
                 "b": {"node": "s", "ollama_model": "a:1b"}}, {"x": "a"})
    process = start(tmp_path, *words, "--timeout", "60")
    while not node.requests and process.poll() is None:
        time.sleep(0.01)
    time.sleep(after)  # the moment is what is varied
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)  # who waits for the silent node takes 60
    assert (process.returncode, stderr.strip()) == (130, b"interrupted")
    assert not (tmp_path / ".subagent-fleet").exists()


@pytest.mark.parametrize("words", [("discover",), ("discover", "--json"), ("status",),
                                   ("status", "--watch", "0.05"), ("warmup",)])
def test_reader_that_leaves_is_no_error(fake_node, tmp_path, words):
    names = [f"{'long-name-' * 11}{i}:1b" for i in range(600)]  # more than a pipe holds
    node = fake_node({name: {} for name in names})
    write_fleet(tmp_path, {"n": node.endpoint}, {"a": {"node": "n", "ollama_model": names[0]}})
    process = start(tmp_path, *words)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(10) == 0
    process.stderr.close()


def on_terminal(directory, *words, stop=None, seconds=20):
    """Run on a terminal of 80 columns; return (all it showed, exit status)."""
    pty = pytest.importorskip("pty")
    master, slave = pty.openpty()
    process = subprocess.Popen([sys.executable, "-I", "-S", PROGRAM, *words],
                               cwd=str(directory), env=clean_environment(COLUMNS=80),
                               stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    shown = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # what Linux says when the last writer has gone
            break
        if not piece:
            break
        shown += piece
        if stop and stop(shown):
            process.send_signal(signal.SIGINT)
            stop = None
    timer.cancel()
    os.close(master)
    return shown.decode("utf-8"), process.wait()


@pytest.mark.slow
def test_warmup_progress_is_only_on_a_terminal_and_leaves_it_clean(fleet, tmp_path):
    m5 = fleet[1]
    del m5.models["small:7b"]
    m5.pullable.add("small:7b")
    for node in fleet:
        node.delay = 0.3
    shown, status = on_terminal(tmp_path, "warmup", "--pull")
    assert status == 0 and "heavy loading" in shown and "light pulling" in shown
    last = re.split(r"\r\x1b\[K", shown)
    assert last[-1] == "" and max(len(line) for line in last) < 200
    visible = re.sub(r"[^\r\n]*\r\x1b\[K", "", shown).replace("\r\n", "\n")
    assert visible.startswith("\x1b[1mWarming models:\x1b[0m\n") and visible.count("\u2713 ok\x1b[0m (") == 2


def test_status_watch_redraws_a_terminal_until_interrupted(fleet, tmp_path):
    shown, status = on_terminal(tmp_path, "status", "--watch", "0.05",
                                stop=lambda text: text.count(b"\x1b[H\x1b[2J") == 3)
    assert status == 130 and shown.count("local-dev:") >= 3
    assert shown.rstrip().endswith("interrupted")


def test_status_watch_in_a_pipe_repeats_without_control_characters(fleet, tmp_path):
    process = start(tmp_path, "status", "--watch", "0.05")
    lines = [process.stdout.readline() for _ in range(40)]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert lines.count(b"Fleet: local-dev\n") >= 2 and not any(b"\x1b" in line for line in lines)


def test_tables_fit_the_terminal_and_wrap(fake_node, tmp_path):
    node = fake_node({f"some-model-name-{i}:1b": {} for i in range(30)})
    write_fleet(tmp_path, {"n": node.endpoint},
                {"a": {"node": "n", "ollama_model": "some-model-name-3:1b"}}, {"x": "a"})
    shown, _ = on_terminal(tmp_path, "discover")
    lines = shown.replace("\r", "").splitlines()
    assert max(map(len, lines)) <= 80
    assert all(f"some-model-name-{i}:1b" in shown for i in range(30))
