"""Decisions: the environment, the key, what happens to each file."""
import json
import pathlib

import pytest

import subagent_fleet as sf
from doctor_facts import GOOD_MODEL, LOCAL, REACHED, paste, reached
from subagent_fleet import replace

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


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
    """{name: value} of what is planned: None where it is unset, no key."""
    return {variable.name: None if variable.is_unset else variable.value
            for variable in sf.plan_environment(fleet)}


@pytest.mark.parametrize("host, url", [
    ("127.0.0.1", "http://127.0.0.1:4000"), ("0.0.0.0", "http://127.0.0.1:4000"),
    ("localhost", "http://127.0.0.1:4000"), ("::1", "http://[::1]:4000"),
    ("::", "http://[::1]:4000"), ("fd00::5", "http://[fd00::5]:4000"),
    ("192.168.1.9", "http://192.168.1.9:4000"), ("studio.local", "http://studio.local:4000"),
])
def test_gateway_url_is_one_that_a_client_can_reach(host, url):
    assert sf.gateway_url(fleet_of(host=host).gateway) == url
    assert environment(fleet_of(host=host))["ANTHROPIC_BASE_URL"] == url


@pytest.mark.parametrize("models, chains", [
    ({}, {}), ({"heavy": {"fallback": ["light"]}}, {"big": ["small"]}),
    ({"heavy": {"fallback": ["light"]}, "light": {"litellm_alias": "big"}}, {}),
    ({"heavy": {"fallback": ["light"]}, "light": {"fallback": ["heavy"]}},
     {"big": ["small"], "small": ["big"]})])
def test_an_alias_falls_back_on_others_and_never_on_itself(models, chains):
    assert sf.plan_fallbacks(fleet_of(models)) == chains


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
    planned = sf.plan_environment(fleet_of(master_key_env="MY_MASTER_KEY"))
    assert len(planned) > 20 and len({variable.name for variable in planned}) == len(planned)
    assert all(variable.why.strip() and "\n" not in variable.why for variable in planned)
    assert [variable.name for variable in planned if variable.holds_key] == [
        "MY_MASTER_KEY", "ANTHROPIC_AUTH_TOKEN"]
    assert [variable.name for variable in planned if variable.is_added] == ["NO_PROXY", "no_proxy"]
    empty = [v for v in planned if v.holds_key or v.is_unset]
    assert len(empty) > 4 and {variable.value for variable in empty} == {""}
    assert all(variable.value for variable in planned if variable not in empty)


def test_merged_environment_adds_to_the_hosts_that_go_without_a_proxy():
    ours = environment(fleet_of())["NO_PROXY"]
    assert ours == "a,b,127.0.0.1,localhost"
    found = sf.merge_environment({"NO_PROXY": "corp.example", "no_proxy": ""}, fleet_of(), "k")
    assert (found["NO_PROXY"], found["no_proxy"]) == (f"corp.example,{ours}", ours)


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
    assert not sf.obeys(name, "variable")
    assert sf.obeys(f"MY_{name}_GATEWAY_KEY", "variable")


@pytest.mark.parametrize("name", ["ANTHROPIC_MASTER_KEY", "LD_GATEWAY_KEY", "BASH_X_MASTER_KEY",
                                  "LITELLM_LOCAL_MASTER_KEY", "GITHUB_TOKEN", "MASTER_KEY",
                                  "AWS_SECRET_ACCESS_KEY", "_GATEWAY_KEY", "A" * 118 + "_MASTER_KEY"])
def test_key_variable_is_made_for_a_gateway(name):
    assert not sf.obeys(name, "variable")
    assert sf.obeys("MY_GATEWAY_KEY", "variable") and sf.obeys("LITELLM_MASTER_KEY", "variable")


def test_every_name_the_environment_sets_is_refused_as_key_variable():
    names = [v.name for v in sf.plan_environment(fleet_of()) if v.name != "LITELLM_MASTER_KEY"]
    assert names and [n for n in names if sf.obeys(n, "variable")] == []


def test_alias_that_litellm_would_take_for_a_variable_is_refused():
    assert not sf.obeys("os.environ/HOME", "alias")
    assert sf.obeys("x/os.environ/HOME", "alias")


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


def test_fleet_digest_tells_what_is_served_from_what_is_said():
    def digest(nodes=None, **changes):
        fleet = fleet_of(**changes)
        return sf.fleet_digest(replace(fleet, nodes={
            name: replace(node, **(nodes or {})) for name, node in fleet.nodes.items()}))

    assert digest() == digest({"tags": ("heavy",)}) == digest({"memory_gb": 64})
    assert digest(agents={"other": {"model": "heavy", "description": "d"}}) == digest()
    assert digest(port=4001) == digest()
    served = [digest(), digest({"endpoint": "http://c:11434"}),
              *(digest(models={"light": change}) for change in (
                  {"context": 4096}, {"litellm_alias": "other"}, {"fallback": ["heavy"]},
                  {"timeout": 9}, {"max_parallel": 2}, {"thinking": True}, {"node": "a"}))]
    assert len(set(served)) == len(served) == 9


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
    change, = sf.Workspace(sf.World(), str(tmp_path)).compare(fleet_of(), ("litellm",))
    assert (change.found, change.action) == (b"half", "updated")


@pytest.mark.parametrize("path, target", [
    ("litellm_config.yaml", "litellm"), (".env.subagent-fleet", "env"),
    (".claude/agents/a-1_b.md", "claude"), (".claude/agents/A.md", None),
    (".claude/agents/../x.md", None), ("../litellm_config.yaml", None), ("/etc/passwd", None),
    (".claude/agents/a.md\n", None), (".claude/agents/a/b.md", None), ("", None)])
def test_only_own_paths_are_ever_removed(path, target):
    assert getattr(sf.target_of(path), "name", None) == target


@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b"null", b'{"files": {}}', b"\xff", b"[" * 100000,
    b'{"schema": "subagent-fleet/manifest/1"}', b'{"schema": "subagent-fleet/manifest/9", "files": {}}',
    b'{"schema": "subagent-fleet/manifest/1", "files": []}'])
def test_manifest_that_cannot_be_read_is_no_manifest(content):
    assert sf.parse_manifest(content) is None


def test_manifest_names_no_foreign_path():
    text = json.dumps({"schema": "subagent-fleet/manifest/1", "writing": {}, "files": {
        "/etc/passwd": "x", "../x": "y", ".claude/agents/b.md": 3, ".claude/agents/a.md": "z"}})
    assert list(sf.parse_manifest(text)) == [".claude/agents/a.md"]


# -- memory --

LLAMA = {"general.architecture": "llama", "llama.block_count": 32, "llama.embedding_length": 4096,
         "llama.attention.head_count": 32, "llama.attention.head_count_kv": 8}


@pytest.mark.parametrize("more, token_bytes", [
    ({}, 131072),  # 2 bytes, 32 layers, 8 heads, keys and values of 128
    ({"llama.attention.key_length": 64, "llama.attention.value_length": 64}, 65536),
    ({"llama.attention.sliding_window": 1024}, 131072),  # which llama.cpp passes over there
    ({"llama.full_attention_interval": 4}, 32768),
    ({"llama.attention.head_count_kv": [8, 0] * 16}, 65536),
    ({"llama.attention.head_count_kv": [8, 0] * 15}, None),
    ({"llama.attention.head_count_kv": []}, None), ({"llama.attention.head_count_kv": None}, None),
    ({"llama.attention.head_count_kv": [8, "8"] * 16}, None),
    ({"llama.attention.head_count_kv": [8, True] * 16}, None),
    ({"llama.attention.sliding_window_pattern": []}, None),
    ({"llama.attention.shared_kv_layers": 16}, 65536), ({"llama.attention.shared_kv_layers": 32}, None),
    ({"llama.attention.kv_lora_rank": 512}, 131072),  # a file of before latent attention
    ({"llama.block_count": 10**400}, None), ({"llama.block_count": 999_999}, None),
    ({"llama.block_count": -1}, None),
    ({"llama.block_count": True}, None), ({"llama.attention.head_count": 0}, None),
    ({"general.architecture": "other"}, None), ({"general.architecture": []}, None)])
def test_a_token_of_context_takes_what_the_node_tells(more, token_bytes):
    assert sf.plan_cache({**LLAMA, **more}).get("token_bytes") == token_bytes


# As the published files have it: (architecture, its keys, bytes a token, and once).
ARCHITECTURES = [
    ("qwen3moe", {"block_count": 48, "attention.head_count_kv": 4, "attention.key_length": 128,
                  "attention.value_length": 128}, 98_304, 0),  # qwen3-coder:30b
    ("gemma3", {"block_count": 62, "attention.head_count_kv": 16, "attention.key_length": 128,
                "attention.value_length": 128, "attention.sliding_window": 1024},
     81_920, 0.65),  # gemma3:27b, whose file does not say that one layer in six sees everything
    ("gemma4", {"block_count": 48, "attention.head_count_kv": [8, 8, 8, 8, 8, 1] * 8,
                "attention.sliding_window_pattern": ([True] * 5 + [False]) * 8, "attention.key_length": 512,
                "attention.value_length": 512, "attention.key_length_swa": 256,
                "attention.value_length_swa": 256, "attention.sliding_window": 1024,
                "attention.shared_kv_layers": 0}, 16_384, 0.5),  # gemma4:12b
    ("gptoss", {"block_count": 24, "attention.head_count_kv": 8, "attention.key_length": 64,
                "attention.value_length": 64, "attention.sliding_window": 128},
     24_576, 0.019),  # gpt-oss:20b
    ("qwen35", {"block_count": 64, "attention.head_count_kv": 4, "attention.key_length": 256,
                "attention.value_length": 256, "full_attention_interval": 4}, 65_536, 0),  # qwen3.5:27b
    ("qwen35", {"block_count": 64, "attention.head_count_kv": [0, 0, 0, 4] * 16,
                "attention.key_length": 256, "attention.value_length": 256}, 65_536, 0),
    ("deepseek2", {"block_count": 47, "attention.head_count_kv": 1, "attention.kv_lora_rank": 512,
                   "attention.key_length": 576, "attention.value_length": 512,
                   "attention.key_length_mla": 256, "rope.dimension_count": 64},
     54_144, 0),  # glm-4.7-flash
]


@pytest.mark.parametrize("kind, keys, token_bytes, once", ARCHITECTURES)
def test_what_a_context_takes_by_architecture(kind, keys, token_bytes, once):
    cache = sf.plan_cache({"general.architecture": kind,
                           **{f"{kind}.{key}": value for key, value in keys.items()}})
    assert cache["token_bytes"] == token_bytes
    assert round(cache.get("window_bytes", 0) / 1e9, 3 if once < 0.1 else 2) == once
    model = sf.NodeModel("x", 10**10, **cache)
    assert sf.plan_gigabytes(model, 65536) == pytest.approx(
        11 + cache.get("window_bytes", 0) / 1e9 + token_bytes * 65536 / 1e9)


@pytest.mark.parametrize("model, gigabytes", [
    (sf.NodeModel("x", 10**10, token_bytes=100_000), 14.3),  # 11 and 3.3
    (sf.NodeModel("x", 10**10, "10.0B"), 14.9),  # 0.12 MB a token and 10 B
    (sf.NodeModel("x:10b", 10**10), 14.9), (sf.NodeModel("x:10b", 10**10, "567.75M"), 11.2),
    (sf.NodeModel("x:10b", 10**10, "1.0T"), 404.2), (sf.NodeModel("x", 10**10, "?"), 11.0),
    (sf.NodeModel("x", 10**400, "9" * 4000 + "B"), 1.1 * 2**50 / 1e9),
    (sf.NodeModel(f"x:{'9' * 400}b", 0), 660_000 + 12 * 32768)])
def test_gigabytes_of_a_model_and_its_context(model, gigabytes):
    assert round(sf.plan_gigabytes(model, 32768), 1) == round(gigabytes, 1)


def test_context_that_fits_fits():
    model = sf.NodeModel("x", 10**10, token_bytes=100_000)
    context = sf.plan_fitting_context(model, 14)
    assert context == 29696 and sf.plan_gigabytes(model, context) <= 14
    assert sf.plan_gigabytes(model, context + 1024) > 14
    assert sf.plan_fitting_context(model, 10) == 0
    assert sf.plan_fitting_context(sf.NodeModel("x", 10**10), 64) == 0


# -- worker --

@pytest.mark.parametrize("address,kind", [
    ("192.168.1.50", "LAN"), ("10.1.2.3", "LAN"), ("172.20.0.4", "LAN"), ("fd00::1", "LAN"),
    ("100.101.102.103", "Tailscale"), ("100.64.0.1", "Tailscale"), ("127.0.0.1", ""),
    ("169.254.3.4", ""), ("8.8.8.8", "public"), ("100.128.0.1", "public"), ("localhost", ""),
    ("10.example.com", ""), ("192.168.1", ""), ("fe80::1", ""), ("[2606:4700::1111]", "public")])
def test_addresses_have_a_kind(address, kind):
    assert sf.address_kind(address) == kind


def plan_block(name="Mac-mini.local", state=LOCAL, reached=REACHED):
    return sf.plan_worker_block(name, state, reached)


def test_worker_block_is_a_part_of_a_valid_fleet():
    fleet = paste(plan_block())
    assert fleet.nodes["mac-mini"].endpoint == "http://192.168.1.50:11434"
    model = fleet.models["qwen3-8b"]
    assert (model.ollama_model, model.alias, model.context) == ("qwen3:8b", "qwen3-8b", 32768)


@pytest.mark.parametrize("changed,endpoint", [
    ({"reached": reached("192.168.1.50", reason="refused") + reached("100.101.102.103")},
     "http://100.101.102.103:11434"),
    ({"reached": reached("100.101.102.103", "192.168.1.50", reason="refused")},
     "http://192.168.1.50:11434"),
    ({"reached": reached("8.8.8.8", "100.101.102.103")}, "http://100.101.102.103:11434"),
    ({"reached": (), "state": replace(LOCAL, endpoint="http://127.0.0.1:12000")},
     "http://Mac-mini.local:12000")])
def test_worker_block_prefers_an_address_that_answers_then_the_lan(changed, endpoint):
    block = plan_block(**changed)
    assert block["nodes"]["mac-mini"]["endpoint"] == endpoint


@pytest.mark.parametrize("name, kept", [
    ("opus", 1), ("Opus:latest", 1), ("hf.co/User/Repo-GGUF:Q4_K_M", 1), ("a/b:c", 1), ("a-b:c", 1),
    ("a.b\x1b[31m", 0), ("\u202eevil", 0), ("x" * 200, 1), ("é", 1), ("\n", 0), ("", 0),
    ("q:cloud", 0), ("'\"#{}", 1), ("-", 1), ("y: z", 1)])
def test_worker_block_survives_hostile_names(name, kept):
    models = (sf.NodeModel(name, 1, capabilities=("completion", "tools"), trained_context=50000),
              replace(GOOD_MODEL, name="tiny:1b", parameters="1B", size=0))
    state = replace(LOCAL, models=models[:2 - kept])
    fleet = paste(plan_block("\x1b[2J Bad name:" + "n" * 90, state))
    assert [model.ollama_model for model in fleet.models.values()] == ([name] if kept else ["tiny:1b"])


def test_worker_block_prefers_models_that_call_tools():
    models = (GOOD_MODEL, sf.NodeModel("phi:1b", 1, capabilities=("completion",)),
              sf.NodeModel("embed", 1, capabilities=("embedding",)),
              sf.NodeModel("stub", 1, capabilities=("completion", "tools"), remote="ollama.com"))
    assert list(plan_block(state=replace(LOCAL, models=models))["models"]) == ["qwen3-8b"]
    assert list(plan_block(state=replace(LOCAL, models=models[1:]))["models"]) == ["phi-1b"]


# -- the lean start --

def denied(fleet, words=()):
    """The tools that a session starts without."""
    return list(sf.plan_denied_tools(fleet, words))


def claude_fleet(**claude):
    """The small fleet, with keys of `project.claude`."""
    tree = fleet_of().document.value
    tree["project"]["claude"] = claude
    return sf.check_fleet(sf.Document(json.dumps(tree), "fleet.json"))[0]


@pytest.mark.parametrize("context, claude, is_lean", [
    (131072, {}, True), (131073, {}, False), (262144, {"lean": True}, True),
    (32768, {"lean": False}, False)])
def test_a_session_starts_lean_where_the_window_is_small_or_the_file_says_so(context, claude, is_lean):
    fleet = replace(fleet_of({"heavy": {"context": context}}), lean=claude.get("lean"))
    assert denied(fleet) == (sf.SPARE_TOOLS if is_lean else [])
    settings = sf.plan_settings(fleet, {}, {})
    assert (settings["env"].get("CLAUDE_CODE_SIMPLE_SYSTEM_PROMPT") == "1") == is_lean \
        or context <= sf.LEAN_CONTEXT_TOKENS
    assert claude_fleet(**claude).lean == claude.get("lean")


@pytest.mark.parametrize("agent, kept", [
    ({"tools": ["Skill", "Read"]}, {"Skill"}), ({"tools": ["WebFetch(domain:example.com)"]}, {"WebFetch"}),
    ({"frontmatter": {"skills": ["pdf"]}}, {"Skill"}), ({}, set()), ({"tools": []}, set())])
def test_the_tools_that_an_agent_names_stay(agent, kept):
    fleet = fleet_of(agents={"planner": {"model": "light", "description": "d", **agent}})
    assert set(sf.SPARE_TOOLS) - set(denied(fleet)) == kept


@pytest.mark.parametrize("words, kept", [
    (("--allowedTools", "Skill", "Bash(git Monitor:*)", "-p", "say"), {"Skill", "Monitor"}),
    (("--tools=Read,WebFetch",), {"WebFetch"}), (("-p", "Skill"), set())])
def test_the_tools_that_a_person_names_stay(words, kept):
    assert set(sf.SPARE_TOOLS) - set(denied(fleet_of(), words)) == kept


def test_what_is_off_and_how_it_comes_back_is_one_sentence():
    assert sf.format_lean(sf.plan_denied_tools(fleet_of(), ())) == (
        "Started with 22 rarely used tools off (Workflow, ScheduleWakeup, ListAgents and 19 more) "
        "for a faster first answer. To get them back: `lean: false` under `project.claude`.\n")
