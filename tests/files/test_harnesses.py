"""Other programs on the fleet: the files they get, how `launch` starts them."""
import json
import os
import re
import subprocess

import pytest

import subagent_fleet as sf
from doctor_facts import make_fleet
from subagent_fleet import replace
from tools import GOLDEN, keys_near
from workspace_cases import FLEET, MANIFEST, PORT

NAMES = ("opencode", "codex", "aider", "qwen")
KEY = "sk-0123456789abcdef0123456789abcdef"
FLEETS = sorted(path.parent.name for path in GOLDEN.glob("*/fleet.yaml"))


def files_of(fleet, name):
    """{path in the program's directory: text} of what is generated for it."""
    target = next(target for target in sf.TARGETS if target.name == name)
    start = f".subagent-fleet/{name}/"
    files = target.render(fleet, KEY)
    assert files and all(path.startswith(start) for path in files)
    return {path[len(start):]: text for path, text in files.items()}


def parse_toml(text):
    return pytest.importorskip("tomllib").loads(text)


def parse_yaml(text):
    """A generated YAML file, as its own reader and, where it is there, PyYAML read it."""
    value = sf.parse_yaml(text)
    try:
        import yaml
    except ImportError:
        return value
    assert yaml.safe_load(text) == value
    return value


def agent_of(text):
    """The head and the prompt of an agent's file."""
    _, head, prompt = text.split("---\n", 2)
    return parse_yaml(head), prompt.strip("\n")


@pytest.fixture(params=FLEETS)
def golden(request):
    return sf.load_fleet(GOLDEN / request.param / "fleet.yaml")


def test_there_are_golden_fleets_and_four_programs():
    assert len(FLEETS) >= 7 and "hostile" in FLEETS
    assert tuple(sf.HARNESSES) == NAMES
    assert tuple(target.name for target in sf.TARGETS) == sf.TARGET_NAMES


# -- files, as the programs read them --

def test_opencode_reads_models_with_limits_and_agents_with_their_tools(golden):
    config = json.loads(files_of(golden, "opencode")["opencode.json"])
    provider = config["provider"]["fleet"]
    assert provider["options"] == {"baseURL": sf.gateway_url(golden.gateway) + "/v1",
                                   "apiKey": f"{{env:{golden.gateway.master_key_env}}}"}
    assert config["enabled_providers"] == ["fleet"] and config["share"] == "disabled"
    aliases = {f"fleet/{alias}" for alias in provider["models"]}
    assert {config["model"], config["small_model"]} <= aliases
    assert all(0 < model["limit"]["output"] <= model["limit"]["context"] / 2
               for model in provider["models"].values())
    for name, agent in golden.agents.items():
        seen = config["agent"][name]
        alias = golden.models[agent.model].alias
        assert (seen["mode"], seen["model"], seen["description"], seen["prompt"]) == (
            "subagent", f"fleet/{alias}", agent.description, sf.plan_prompt(agent))
        assert ("tools" in seen) == (agent.tools is not None)
        if agent.tools is not None:
            assert seen["tools"].pop("*") is False and set(seen["tools"].values()) <= {True}


def test_codex_reads_its_provider_each_window_and_a_role_an_agent(golden):
    files = files_of(golden, "codex")
    config = parse_toml(files["config.toml"])
    provider = config["model_providers"][config["model_provider"]]
    assert provider == {
        "name": golden.name, "base_url": sf.gateway_url(golden.gateway) + "/v1",
        "env_key": golden.gateway.master_key_env, "wire_api": "responses",
        "request_max_retries": 4, "stream_max_retries": 4,
        "stream_idle_timeout_ms": max(model.timeout for model in golden.models.values()) * 3000}
    assert config["analytics"] == config["feedback"] == {"enabled": False}
    models = {model["slug"]: model for model in json.loads(files["models.json"])["models"]}
    assert set(models) == {model.alias for model in golden.models.values()}
    main = models[config["model"]]
    assert config["model_context_window"] == main["context_window"]
    assert config["model_auto_compact_token_limit"] < main["context_window"] * 0.9
    for name, agent in golden.agents.items():
        role = parse_toml(files[f"agents/{name}.toml"])
        assert role == {"name": name, "description": agent.description,
                        "model": golden.models[agent.model].alias,
                        "developer_instructions": sf.plan_prompt(agent),
                        "model_context_window": models[role["model"]]["context_window"]}


def test_aider_reads_its_models_and_what_they_hold(golden):
    files = files_of(golden, "aider")
    config = parse_yaml(files["aider.conf.yml"])
    metadata = json.loads(files["model.metadata.json"])
    assert {config["model"], config["weak-model"]} <= set(metadata)
    assert (config["openai-api-base"], config["analytics"], config["gitignore"]) == (
        sf.gateway_url(golden.gateway) + "/v1", False, False)
    settings = parse_yaml(files["model.settings.yml"])
    assert [entry["name"] for entry in settings] == list(metadata)
    for entry in settings:  # two that name each other as weak and editor end aider
        assert "weak_model_name" not in entry and "editor_model_name" not in entry
        limits = metadata[entry["name"]]
        assert entry["extra_params"] == {"max_tokens": limits["max_output_tokens"]}


def test_qwen_reads_its_models_and_agents(golden):
    files = files_of(golden, "qwen")
    settings = json.loads(files["settings.json"])
    models = {model["id"]: model for model in settings["modelProviders"]["anthropic"]}
    assert settings["model"]["name"] in models
    assert settings["telemetry"] == {"enabled": False}
    assert {model["envKey"] for model in models.values()} == {golden.gateway.master_key_env}
    for name, agent in golden.agents.items():
        head, prompt = agent_of(files[f"agents/{name}.md"])
        assert (head["name"], head["description"], head["model"]) == (
            name, agent.description, golden.models[agent.model].alias)
        assert ("tools" in head) == (agent.tools is not None) and prompt


def test_no_file_holds_the_key_and_each_is_its_targets(golden):
    for target in sf.TARGETS:
        if target.name in NAMES:
            for path, text in target.render(golden, KEY).items():
                assert KEY not in text and sf.target_of(path) is target
    assert sf.target_of(".subagent-fleet/codex/auth.json") is None
    assert sf.target_of(".subagent-fleet/codex/agents/../config.toml") is None


def test_an_alias_of_two_models_holds_what_the_smaller_one_holds():
    fleet = sf.load_fleet(GOLDEN / "shared-alias" / "fleet.yaml")
    by_alias = {}
    for model in fleet.models.values():
        by_alias.setdefault(model.alias, []).append(model.context)
    windows = sf.plan_windows(fleet)
    assert {alias: window.context for alias, window in windows.items()} \
        == {alias: min(contexts) for alias, contexts in by_alias.items()}


def agent_fleet(**changed):
    fleet = make_fleet()
    agents = {"planner": replace(fleet.agents["planner"], **changed)}
    return replace(fleet, agents=agents)


@pytest.mark.parametrize("prompt", ["see {env:HOME} and {file:/etc/passwd}",
                                    '"apiKey": "{env:LITELLM_MASTER_KEY}"'])
def test_opencode_puts_nothing_into_a_prompt(prompt):
    text = files_of(agent_fleet(prompt=prompt), "opencode")["opencode.json"]
    assert re.findall(r"\{(?:env|file):[^}]*\}", text) == ["{env:LITELLM_MASTER_KEY}"]
    assert json.loads(text)["agent"]["planner"]["prompt"] == prompt


def test_qwen_fills_nothing_into_a_prompt():
    text = files_of(agent_fleet(prompt="cd ${HOME}; ${ x } $y"), "qwen")["agents/planner.md"]
    assert agent_of(text)[1] == "cd $HOME; ${ x } $y"


@pytest.mark.parametrize("tools, opencode, qwen", [
    (("Read", "Grep", "Glob"), ["read", "grep", "glob"], ["read_file", "grep_search", "glob"]),
    (("Edit", "Write", "Bash"), ["edit", "write", "bash"],
     ["edit", "write_file", "run_shell_command"]),
    (("MultiEdit", "Edit"), ["edit"], ["edit"]),
    (("Bash(git *)", "mcp__x__y", "Read"), ["read"], ["read_file"]), ((), [], [])])
def test_an_agent_keeps_its_tools_under_their_names_and_gets_no_more(tools, opencode, qwen):
    fleet = agent_fleet(tools=tools)
    seen = json.loads(files_of(fleet, "opencode")["opencode.json"])["agent"]["planner"]["tools"]
    assert seen == {"*": False, **dict.fromkeys(opencode, True)}
    assert agent_of(files_of(fleet, "qwen")["agents/planner.md"])[0]["tools"] == qwen


@pytest.mark.parametrize("text", ["a\"b\\c", "line\nline", "tab\t\x07bell\x7f", "é🙂", ""])
def test_toml_gives_back_what_was_quoted(text):
    assert parse_toml(f"x = {sf.quote_toml(text)}") == {"x": text}


# -- generate, clean --

def paths_of(folder, name):
    place = folder / ".subagent-fleet" / name
    return sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())


def test_generate_writes_a_target_where_it_is_named_and_keeps_it_up(generated, quick):
    assert paths_of(generated, "codex") == []
    done = quick("generate", "--target", "codex,qwen")
    assert done.returncode == 0 and "subagent-fleet launch qwen" in done.stdout
    assert paths_of(generated, "codex") == [
        "agents/implementer.toml", "agents/planner.toml", "config.toml", "models.json"]
    (generated / "fleet.yaml").write_text(
        FLEET.replace("implementer:", "reviewer:"), encoding="utf-8")
    assert quick("generate").returncode == 0  # of the usual targets only
    assert "agents/implementer.toml" in paths_of(generated, "codex")
    assert quick("doctor", "--fix").returncode in (0, 1)  # of all that was ever written
    assert paths_of(generated, "codex") == [
        "agents/planner.toml", "agents/reviewer.toml", "config.toml", "models.json"]


def test_targets_of_the_fleet_file_are_written_each_time_and_the_key_always(fleet, quick):
    (fleet / "fleet.yaml").write_text(
        FLEET.replace("  name: local-dev\n", "  name: local-dev\n  targets: [qwen, claude]\n"),
        encoding="utf-8")
    done = quick("generate")
    assert done.returncode == 0 and ".subagent-fleet/qwen/settings.json" in done.stdout
    assert (fleet / ".env.subagent-fleet").exists() and (fleet / ".claude/agents").exists()
    assert not (fleet / "litellm_config.yaml").exists()
    assert quick("generate", "--check").returncode == 0
    assert "Next: " in done.stdout


@pytest.mark.parametrize("words, told", [
    (("generate", "--target", "codx"), "unknown target `codx`\n  fix: did you mean `codex`?"),
    (("generate", "--target", "pi"), "unknown target `pi`\n  fix: any other program takes a base URL"),
    (("launch", "cn"), "unknown program `cn`\n  fix: any other program takes a base URL"),
    (("launch", "codx"), "unknown program `codx`\n  fix: did you mean `codex`?"),
    (("launch",), "launch: it needs PROGRAM")])
def test_a_name_that_is_none_is_refused_with_the_nearest(fleet, quick, words, told):
    done = quick(*words)
    assert done.returncode == 2 and told in done.stderr


def test_an_unknown_target_in_the_file_is_refused(fleet, quick):
    (fleet / "fleet.yaml").write_text(
        FLEET.replace("  name: local-dev\n", "  name: local-dev\n  targets: [codx]\n"),
        encoding="utf-8")
    done = quick("validate")
    assert done.returncode == 1 and "codx" in done.stderr and "`opencode`" in done.stderr


def test_clean_removes_them_and_leaves_what_the_program_wrote(generated, quick):
    quick("generate", "--target", ",".join(NAMES))
    (generated / ".subagent-fleet/codex/auth.json").write_text("{}", encoding="utf-8")
    assert quick("clean", "--force").returncode == 0
    left = [str(path.relative_to(generated)) for path in generated.rglob("*") if path.is_file()]
    assert sorted(left) == [".subagent-fleet/codex/auth.json", "fleet.yaml"]
    assert not (generated / ".subagent-fleet/opencode").exists()


@pytest.mark.parametrize("words", [("clean", "--yes"), ("doctor", "--fix")])
def test_what_an_earlier_version_wrote_for_pi_is_removed_if_unchanged(generated, quick, words):
    manifest = generated / MANIFEST
    told = json.loads(manifest.read_text(encoding="utf-8"))
    for path, text in (("pi/models.json", "{}\n"), ("cn/config.yaml", "name: x\n")):
        file = generated / ".subagent-fleet" / path
        file.parent.mkdir()
        file.write_text(text, encoding="utf-8")
        told["files"][f".subagent-fleet/{path}"] = sf.digest(text.encode())
    manifest.write_text(json.dumps(told), encoding="utf-8")
    (generated / ".subagent-fleet/cn/config.yaml").write_text("mine: 1\n", encoding="utf-8")
    quick(*words)
    assert not (generated / ".subagent-fleet/pi/models.json").exists()
    assert (generated / ".subagent-fleet/cn/config.yaml").exists()


# -- launch --

@pytest.fixture
def fake_program(tmp_path, fake_node):
    """Put a program on the PATH that keeps what it was started with; gives the environment."""
    node = fake_node(port=PORT)
    models = {"data": [{"id": "claude-sonnet-local"}, {"id": "claude-haiku-local"}]}
    node.answers.update({"/health/liveliness": (200, "I'm alive!"), "/v1/models": (200, models)})

    def make(name):
        place, home = tmp_path / "programs", tmp_path / "home"
        for folder in (place, home):
            folder.mkdir(exist_ok=True)
        program = place / sf.HARNESSES[name].program
        program.write_text('#!/bin/sh\nenv -0 > seen.env; printf "%s\\0" "$@" > seen.args; exit 7\n',
                           encoding="utf-8")
        program.chmod(0o755)
        return {"PATH": f"{place}:/usr/bin:/bin", "HOME": str(home)}
    return make


def started(folder):
    """With which words and environment the program was started."""
    words = (folder / "seen.args").read_text(encoding="utf-8").split("\0")[:-1]
    pairs = (folder / "seen.env").read_text(encoding="utf-8").split("\0")
    return words, dict(pair.split("=", 1) for pair in pairs if pair)


@pytest.mark.parametrize("name, words, environment", [
    ("opencode", [], {"OPENCODE_DISABLE_MODELS_FETCH": "1"}),
    ("codex", [], {"CODEX_HOME": "HERE"}),
    ("aider", ["--config", "HERE/aider.conf.yml", "--model-settings-file",
               "HERE/model.settings.yml", "--model-metadata-file", "HERE/model.metadata.json",
               "--openai-api-base", f"http://127.0.0.1:{PORT}/v1"],
     {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}),
    ("qwen", [], {"QWEN_HOME": "HERE", "QWEN_CODE_SYSTEM_SETTINGS_PATH": "HERE/settings.json"})])
def test_launch_writes_the_files_and_starts_the_program_on_them(
        generated, quick, fake_program, run_cli, name, words, environment):
    environ = {**fake_program(name), "KEPT": "yes", "NO_PROXY": "theirs"}
    done = run_cli("launch", name, "--", "a b", "--", "$(id)", env=environ)
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
    here = str(generated / ".subagent-fleet" / name)
    seen_words, seen = started(generated)
    assert seen_words == [word.replace("HERE", here) for word in words] + ["a b", "--", "$(id)"]
    key, = keys_near(generated)
    assert not any(key in word for word in seen_words)
    wanted = {"LITELLM_MASTER_KEY": key, "KEPT": "yes", **environment}
    assert {word: seen[word] for word in wanted} == {
        word: value.replace("HERE", here) for word, value in wanted.items()}
    assert seen["NO_PROXY"].startswith("theirs,") and "127.0.0.1" in seen["no_proxy"]
    assert all(os.path.exists(os.path.join(here, path)) for path in sf.HARNESSES[name].files)
    if name == "opencode":
        text = (generated / ".subagent-fleet/opencode/opencode.json").read_text(encoding="utf-8")
        assert seen["OPENCODE_CONFIG_CONTENT"] == text and key not in text
    if name == "aider":
        assert seen["AIDER_OPENAI_API_KEY"] == key


def test_launch_brings_files_up_to_date_and_refuses_those_that_are_yours(
        generated, quick, fake_program):
    environ = fake_program("codex")
    assert quick("launch", "codex", env=environ).returncode == 7
    config = generated / ".subagent-fleet/codex/config.toml"
    (generated / "fleet.yaml").write_text(FLEET.replace("context: 65536", "context: 131072"),
                                          encoding="utf-8")
    assert quick("launch", "codex", env=environ).returncode == 7
    assert "model_context_window = 131072\n" in config.read_text(encoding="utf-8")
    (generated / "seen.args").unlink()

    config.write_text('model = "mine"\n', encoding="utf-8")
    done = quick("launch", "codex", env=environ)
    assert done.returncode == 3 and "nothing was started" in done.stderr
    assert "subagent-fleet generate --target codex --force" in done.stderr
    assert config.read_text(encoding="utf-8") == 'model = "mine"\n'
    assert not (generated / "seen.args").exists()


def test_launch_refuses_a_directory_that_came_with_a_checkout(generated, quick, fake_program):
    environ = fake_program("codex")
    home = generated / ".subagent-fleet/codex"
    home.mkdir(parents=True)
    (home / "hooks.json").write_text("{}", encoding="utf-8")
    git = ["git", "-C", str(generated)]
    subprocess.run([*git, "init", "-q"], check=True)
    assert quick("launch", "codex", env=environ).returncode == 7  # not tracked: of your own
    subprocess.run([*git, "add", "-f", str(home / "hooks.json")], check=True)
    done = quick("launch", "codex", env=environ)
    assert done.returncode == 3 and "git tracks files in " in done.stderr  # target-tracked
    assert "git rm -rf --cached" in done.stderr
    assert quick("launch", "codex", "--trust", env=environ).returncode == 7


def test_files_are_not_written_through_a_link(generated, quick, fake_program, tmp_path):
    environ = fake_program("codex")
    (generated / ".subagent-fleet/codex").symlink_to(tmp_path.parent)
    assert quick("launch", "codex", env=environ).returncode == 3
    assert quick("generate", "--target", "codex").returncode == 3
    assert not (tmp_path.parent / "config.toml").exists()


def test_launch_says_what_is_missing(generated, quick, fake_program):
    environ = {**fake_program("opencode"), "PATH": "/usr/bin:/bin"}
    done = quick("launch", "opencode", env=environ)
    assert done.returncode == 1 and done.stderr == (  # program-missing
        "error: opencode is not on the PATH\n  fix: npm install -g opencode-ai\n")


def test_launch_asks_for_the_gateway_first(generated, quick, fake_node, tmp_path, fake_program):
    environ = fake_program("codex")
    text = (generated / "fleet.yaml").read_text(encoding="utf-8")
    (generated / "fleet.yaml").write_text(re.sub(r"port: \d+", "port: 1", text), encoding="utf-8")
    done = quick("launch", "codex", env=environ)
    assert done.returncode == 1 and "no gateway runs at http://127.0.0.1:1" in done.stderr
    assert not (generated / "seen.args").exists()


def test_what_was_written_is_in_the_manifest(generated, quick):
    quick("generate", "--target", "qwen")
    files = json.loads((generated / MANIFEST).read_text(encoding="utf-8"))["files"]
    assert ".subagent-fleet/qwen/settings.json" in files
