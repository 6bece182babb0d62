"""Decisions: the environment, the key, what happens to each file."""
import json
import pathlib

import pytest

import subagent_fleet as sf

GOLDEN = pathlib.Path(__file__).parent / "golden"


def fleet_of(models=None, agents=None, **gateway):
    """A small fleet; `models` and `agents` replace keys of its parts by name."""
    tree = {"project": {"name": "x", "gateway": gateway},
            "nodes": {"a": {"endpoint": "http://a:11434"}, "b": {"endpoint": "http://b:11434"}},
            "models": {"heavy": {"node": "a", "ollama_model": "x:30b", "litellm_alias": "big",
                                 "context": 131072, "timeout": 600},
                       "light": {"node": "b", "ollama_model": "x:3b", "litellm_alias": "small"}},
            "agents": {"planner": {"model": "light", "description": "d"}}}
    for name, changes in (models or {}).items():
        tree["models"][name].update(changes)
    tree["agents"].update(agents or {})
    fleet, findings = sf.check_fleet(sf.Document(json.dumps(tree), "fleet.json"))
    assert fleet, findings
    return fleet


def environment(fleet):
    return {name: value for name, value, _ in sf.plan_environment(fleet)}


@pytest.mark.parametrize("host, url", [
    ("127.0.0.1", "http://127.0.0.1:4000"), ("0.0.0.0", "http://127.0.0.1:4000"),
    ("localhost", "http://127.0.0.1:4000"), ("::1", "http://[::1]:4000"),
    ("::", "http://[::1]:4000"), ("fd00::5", "http://[fd00::5]:4000"),
    ("192.168.1.9", "http://192.168.1.9:4000"), ("studio.local", "http://studio.local:4000"),
])
def test_gateway_url_is_one_that_a_client_can_reach(host, url):
    assert sf.gateway_url(fleet_of(host=host).gateway) == url
    assert environment(fleet_of(host=host))["ANTHROPIC_BASE_URL"] == url


def test_environment_names_a_model_for_every_tier():
    found = environment(fleet_of())
    assert {name: found[name] for name in found if name.endswith("_MODEL")} == {
        "CLAUDE_CODE_SUBAGENT_MODEL": None, "ANTHROPIC_MODEL": "big",
        "ANTHROPIC_DEFAULT_OPUS_MODEL": "big", "ANTHROPIC_DEFAULT_SONNET_MODEL": "big",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "small", "ANTHROPIC_DEFAULT_FABLE_MODEL": "big"}


def test_environment_is_settled_by_the_main_model_and_the_slowest():
    found = environment(fleet_of({"light": {"timeout": 1000}}))
    assert found["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "131072"
    assert found["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "8192"
    assert found["CLAUDE_STREAM_IDLE_TIMEOUT_MS"] == "3000000"
    assert found["API_TIMEOUT_MS"] == "5000000"
    small = environment(fleet_of({"heavy": {"context": 4096}, "light": {"context": 256}}))
    assert small["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "2048"


def test_environment_timeouts_fit_a_javascript_timer():
    found = environment(fleet_of({"heavy": {"timeout": 86400}}))
    assert int(found["API_TIMEOUT_MS"]) < 2 ** 31


@pytest.mark.parametrize("context, lean", [(65536, True), (65537, False)])
def test_environment_asks_for_the_short_prompt_in_a_small_window(context, lean):
    found = environment(fleet_of({"heavy": {"context": context}}))
    assert ("CLAUDE_CODE_SIMPLE_SYSTEM_PROMPT" in found) is lean


@pytest.mark.parametrize("node, alone", [("a", True), ("b", False)])
def test_environment_keeps_agents_in_turn_where_there_is_one_machine(node, alone):
    found = environment(fleet_of({"light": {"node": node}}))
    assert ("CLAUDE_CODE_DISABLE_BACKGROUND_TASKS" in found) is alone


def test_environment_says_what_each_line_is_for_and_holds_no_key():
    planned = sf.plan_environment(fleet_of(master_key_env="MY_KEY"))
    assert len(planned) > 20 and len({name for name, _, _ in planned}) == len(planned)
    assert all(why.strip() and "\n" not in why for _, _, why in planned)
    assert [name for name, value, _ in planned if value is sf.KEY] == [
        "MY_KEY", "ANTHROPIC_AUTH_TOKEN"]


def test_merged_environment_sets_and_unsets():
    given = {"HOME": "/h", "ANTHROPIC_API_KEY": "other", "ANTHROPIC_MODEL": "other",
             "CLAUDE_CODE_SUBAGENT_MODEL": "other"}
    found = sf.merge_environment(given, fleet_of(), "sk-key")
    assert found["HOME"] == "/h" and found["ANTHROPIC_MODEL"] == "big"
    assert found["ANTHROPIC_AUTH_TOKEN"] == found["LITELLM_MASTER_KEY"] == "sk-key"
    assert "ANTHROPIC_API_KEY" not in found and "CLAUDE_CODE_SUBAGENT_MODEL" not in found
    assert None not in found.values()


@pytest.mark.parametrize("name", [
    "PATH", "HOME", "IFS", "UID", "_", "path", "status", "ANTHROPIC_AUTH_TOKEN", "LD_PRELOAD",
    "BASH_ENV", "ZSH_NAME", "PYTHONPATH", "NODE_OPTIONS", "NO_DOCS", "DYLD_LIBRARY_PATH",
    "LITELLM_LOCAL_MODEL_COST_MAP"])
def test_key_variable_that_belongs_to_something_else_is_refused(name):
    rule = sf.RULES["variable"][0]
    assert not sf._fits(name, rule)
    assert sf._fits("MY_" + name, rule)


def test_every_name_the_environment_sets_is_refused_as_key_variable():
    names = [name for name, value, _ in sf.plan_environment(fleet_of()) if value is not sf.KEY]
    assert names and [n for n in names if sf._fits(n, sf.RULES["variable"][0])] == []


def test_alias_that_litellm_would_take_for_a_variable_is_refused():
    assert not sf._fits("os.environ/HOME", sf.RULES["alias"][0])
    assert sf._fits("x/os.environ/HOME", sf.RULES["alias"][0])


@pytest.mark.parametrize("key, weak", [
    ("", True), ("sk-1234", True), ("sk-local-dev", True), ("sk-0123456789ab", True),
    ("a" * 40, True), ("sk-0123456789abc", False), ("sk-" + "0123456789abcdef" * 4, False)])
def test_weak_key(key, weak):
    assert bool(list(sf.lint_key(fleet_of(), {"LITELLM_MASTER_KEY": key}))) is weak


@pytest.mark.parametrize("host, environ, level", [
    ("127.0.0.1", {}, None), ("127.0.0.1", {"LITELLM_MASTER_KEY": "sk-local-dev"}, "warning"),
    ("127.0.0.1", {"LITELLM_MASTER_KEY": ""}, "warning"),
    ("0.0.0.0", {"LITELLM_MASTER_KEY": "sk-local-dev"}, "error"),
    ("0.0.0.0", {"LITELLM_MASTER_KEY": "sk-0123456789abc"}, None)])
def test_weak_key_of_the_environment_is_told(host, environ, level):
    found = list(sf.lint_key(fleet_of(host=host), environ))
    assert [finding.level for finding in found] == ([level] if level else [])
    assert all(finding.slug == "weak-key" and finding.fix for finding in found)


@pytest.mark.parametrize("found, wanted, last, action", [
    (None, b"new", None, "created"), (None, b"new", b"old", "created"),
    (b"new", b"new", None, "unchanged"), (b"old", b"new", b"old", "updated"),
    (b"mine", b"new", b"old", "edited"), (b"mine", b"new", None, "edited"),
    (b"old", None, b"old", "removed"), (b"mine", None, b"old", "edited"),
    (None, None, b"old", "unchanged"), (b"", b"new", None, "edited")])
def test_what_happens_to_a_file(found, wanted, last, action):
    ours = last is not None and sf.digest(found) == sf.digest(last)
    assert sf.Change("x", found, wanted, ours).action == action


def test_a_run_that_was_cut_off_is_known_by_both_hashes(tmp_path):
    (tmp_path / sf.STATE_DIRECTORY).mkdir()
    (tmp_path / sf.MANIFEST_FILE).write_bytes(sf.render_manifest(
        {"litellm_config.yaml": "old " + sf.digest(b"half")}))
    (tmp_path / "litellm_config.yaml").write_bytes(b"half")
    change, = sf.compare_output(sf.World(), str(tmp_path), fleet_of(), ("litellm",))
    assert (change.found, change.action) == (b"half", "updated")


@pytest.mark.parametrize("path, target", [
    ("litellm_config.yaml", "litellm"), (".env.subagent-fleet", "env"),
    (".claude/agents/a-1_b.md", "claude"), (".claude/agents/A.md", None),
    (".claude/agents/../x.md", None), ("../litellm_config.yaml", None), ("/etc/passwd", None),
    (".claude/agents/a.md\n", None), (".claude/agents/a/b.md", None), ("", None)])
def test_only_own_paths_are_ever_removed(path, target):
    assert sf.target_of(path) == target


@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b"null", b'{"files": []}', b'{"files": {".env.subagent-fleet": 3}}', b"\xff",
    b'{"schema": 1}', b"[" * 100000])
def test_manifest_that_cannot_be_read_is_no_manifest(content):
    assert sf.parse_manifest(content) is None


def test_manifest_names_no_foreign_path():
    text = json.dumps({"files": {"/etc/passwd": "x", "../x": "y", ".claude/agents/a.md": "z"},
                       "writing": {}})
    assert list(sf.parse_manifest(text)) == [".claude/agents/a.md"]
