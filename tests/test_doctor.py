"""Section 5's doctor checks and section 11's `doctor` and `worker`."""
import json
import socket
import subprocess
import sys
import types

import pytest

import subagent_fleet as sf
from agent_cases import AGENTS
from tools import SCRIPT, clean_environment, free_port, keys_near, not_held_up


class Placed:
    """A document that can only say where a key stands."""

    source = "fleet.yaml"

    def locate(self, path, *, key=False):
        return "fleet.yaml:" + ".".join(map(str, path)), ""


def make_fleet(models=None, *, nodes=("mini",), gateway=None, tools=("Read",), memory_gb=None):
    """A fleet with one agent on the first model."""
    models = models or [sf.Model("small", "mini", "qwen3:8b", "qwen3-8b", 32768)]
    gateway = gateway or sf.Gateway("builtin", "127.0.0.1", 4000, "LITELLM_MASTER_KEY")
    agents = {"planner": sf.Agent("planner", models[0].name, "Use it.", tools)}
    return sf.Fleet("test", gateway, {}, {
        name: sf.Node(name, f"http://{name}:11434", (), memory_gb) for name in nodes},
        {model.name: model for model in models}, agents, Placed())


GOOD_MODEL = sf.NodeModel("qwen3:8b", 5 * 10**9, "8.2B", "Q4_K_M", ("completion", "tools"), 40960)
GOOD_STATE = sf.NodeState("mini", "http://mini:11434", version="0.32.15", models=(GOOD_MODEL,))
def changes(action, *paths):
    """What `generate` would do to each path."""
    found, wanted, ours = {"unchanged": (b"a", b"a", True), "created": (None, b"a", True),
                           "updated": (b"a", b"b", True), "removed": (b"a", None, True),
                           "edited": (b"a", b"b", False)}[action]
    return tuple(sf.Change(path, found, wanted, ours) for path in paths)


GOOD_FACTS = sf.Facts(
    states={"mini": GOOD_STATE}, looks={"mini": (("192.168.1.50",), False)},
    litellm="1.106.2", claude="2.1.327", holder=sf.OUR_GATEWAY,
    agents={"a.md": "---\nname: planner\ndescription: Use it.\ntools: Read\n---\n\nPlan.\n"},
    settings={"s.json": {"EDITOR": "vi"}},
    changes=changes("unchanged", "litellm_config.yaml"), env_path=".env.subagent-fleet")


def facts_with(**changed):
    return GOOD_FACTS.replace(**changed)


def state_with(**changed):
    return {"mini": GOOD_STATE.replace(**changed)}


def model_with(**changed):
    """Facts whose node holds the model with something about it changed."""
    return facts_with(states=state_with(models=(GOOD_MODEL.replace(**changed),)))


def found(fleet, facts):
    """{slug: level} of what doctor has to say, ok lines left out."""
    return {f.slug: f.level for _, f in sf.plan_doctor(fleet, facts) if f.level != "ok"}


def the(slug, fleet, facts):
    """The one finding of that slug."""
    (finding,) = [f for _, f in sf.plan_doctor(fleet, facts) if f.slug == slug]
    return finding


def test_everything_in_order_is_quiet_and_ready():
    findings = [f for _, f in sf.plan_doctor(make_fleet(), GOOD_FACTS)]
    assert {f.level for f in findings} == {"ok"}
    assert [f.slug for f in findings] == ["python", "claude", "litellm", "config", "node-online",
                                          "route", "gateway-up", "files-unchanged"]
    assert sf.plan_verdict(findings) == "Ready: everything is in order."


OFFLINE = sf.NodeState("mini", "http://mini:11434", "refused", "connection refused")
LITELLM = make_fleet(gateway=sf.Gateway("litellm", "127.0.0.1", 4000, "KEY"))
EXPOSED = make_fleet(gateway=sf.Gateway("builtin", "0.0.0.0", 4000, "KEY"))


def on(fleet=None, **changed):
    return fleet or make_fleet(), facts_with(**changed)


def model_fleet(**changed):
    return make_fleet([sf.Model(**{"name": "small", "node": "mini", "ollama_model": "qwen3:8b",
                                   "alias": "qwen3-8b", "context": 32768, **changed})])


def loaded(context, gpu=100):
    return (sf.LoadedModel("qwen3:8b", context, gpu, 6 * 10**9, ""),)


LINT = sf.Finding("small-context", "warning", "models.small.context is 4096")
TWO = [sf.Model("small", "mini", "qwen3:8b", "a", 32768),
       sf.Model("large", "mini", "qwen3-coder:30b", "b", 32768)]
TWO_HELD = (GOOD_MODEL, GOOD_MODEL.replace(name="qwen3-coder:30b", size=19 * 10**9))

# (case, fleet and facts, everything that must be found)
CASES = [
    ("lint", on(problems=(LINT,)), {"small-context": "warning"}),
    ("offline", on(states={"mini": OFFLINE}), {"node-offline": "error"}),
    ("version 0.17.0", on(states=state_with(version="0.17.0")), {"ollama-old": "error"}),
    ("version 0.17.0-rc0", on(states=state_with(version="0.17.0-rc0")), {"ollama-old": "error"}),
    ("version 0.17.1", on(states=state_with(version="0.17.1")), {"ollama-old": "warning"}),
    ("version 0.31.1", on(states=state_with(version="0.31.1")), {"ollama-old": "warning"}),
    ("version 0.31.2", on(states=state_with(version="0.31.2")), {}),
    ("version 0.33.0-rc2", on(states=state_with(version="0.33.0-rc2")), {}),
    ("version 0.0.0", on(states=state_with(version="0.0.0")), {}),
    ("version empty", on(states=state_with(version="")), {}),
    ("origin", on(looks={"mini": ((), True)}), {"open-origin": "warning"}),
    ("public", on(looks={"mini": (("192.168.1.50", "8.8.8.8"), False)}),
     {"public-address": "warning"}),
    ("public v6", on(looks={"mini": (("2606:4700::1111",), False)}), {"public-address": "warning"}),
    ("tailscale", on(looks={"mini": (("100.101.102.103", "fd7a:115c:a1e0::1"), False)}), {}),
    ("cloud stub", (make_fleet(), model_with(remote="https://ollama.com:443")),
     {"cloud-stub": "error"}),
    ("cloud stub allowed", (model_fleet(cloud=True), model_with(remote="https://ollama.com:443")),
     {}),
    ("cloud allowed, but local", (model_fleet(cloud=True), GOOD_FACTS), {}),
    ("cloud allowed", (model_fleet(ollama_model="qwen3:8b-cloud", cloud=True), GOOD_FACTS), {}),
    ("missing", on(states=state_with(models=())), {"model-missing": "error"}),
    ("other case and tag", (model_fleet(ollama_model="library/QWEN3:8b"), GOOD_FACTS), {}),
    ("no tools", (make_fleet(), model_with(capabilities=("completion",))), {"no-tools": "error"}),
    ("tools unknown", (make_fleet(), model_with(capabilities=None)), {}),
    ("thinking", (model_fleet(thinking=True), GOOD_FACTS), {"no-thinking": "error"}),
    ("thinking offered", (model_fleet(thinking=True),
                          model_with(capabilities=("tools", "thinking"))), {}),
    ("untrained", (model_fleet(context=65536), GOOD_FACTS), {"context-untrained": "warning"}),
    ("trained as asked", (model_fleet(context=40960), GOOD_FACTS), {}),
    ("loaded short", on(states=state_with(loaded=loaded(4096))), {"context-short": "warning"}),
    ("loaded right", on(states=state_with(loaded=loaded(32768))), {}),
    ("loaded, no context told", on(states=state_with(loaded=loaded(0))), {}),
    ("loaded as trained", (model_fleet(context=65536),
                           facts_with(states=state_with(loaded=loaded(40960)))),
     {"context-untrained": "warning"}),
    ("evicts by size", (make_fleet(TWO, memory_gb=16), facts_with(
        states=state_with(models=TWO_HELD))), {"evicts": "warning"}),
    ("evicts by sight", (make_fleet(TWO), facts_with(
        states=state_with(models=TWO_HELD, loaded=loaded(32768, 62)))), {"evicts": "warning"}),
    ("evicts, said by lint", (make_fleet(TWO, memory_gb=16), facts_with(
        states=state_with(models=TWO_HELD), problems=(
            sf.Finding("memory-short", "warning", "nodes.mini: its models need"),))),
     {"memory-short": "warning"}),
    ("fits", (make_fleet(TWO, memory_gb=64), facts_with(states=state_with(models=TWO_HELD))), {}),
    ("fits on the GPU", (make_fleet(TWO), facts_with(
        states=state_with(models=TWO_HELD, loaded=loaded(32768, 100)))), {}),
    ("one alone that spills", (make_fleet(memory_gb=1), facts_with(
        states=state_with(loaded=loaded(32768, 62)))), {}),
    ("on the CPU", (make_fleet(TWO), facts_with(
        states=state_with(models=TWO_HELD, loaded=loaded(32768, 0)))), {}),
    ("port taken", on(holder="another program"), {"port-taken": "error"}),
    ("port free", on(holder=""), {"port-free": "info"}),
    ("port another fleet's", on(holder="subagent-fleet"), {"gateway-other": "error"}),
    ("port of an older fleet", on(holder=sf.OLD_GATEWAY), {"gateway-old": "error"}),
    ("port another LiteLLM's", on(LITELLM, holder="LiteLLM"), {"gateway-other": "error"}),
    ("no LiteLLM, unneeded", on(litellm=None), {}),
    ("no LiteLLM, needed", on(LITELLM, litellm=None), {"litellm-missing": "error"}),
    ("LiteLLM 1.82.7", on(litellm="1.82.7"), {"litellm-poisoned": "error"}),
    ("LiteLLM 1.82.8", on(litellm="1.82.8"), {"litellm-poisoned": "error"}),
    ("LiteLLM pth", on(litellm="1.106.2 with litellm_init.pth"), {"litellm-poisoned": "error"}),
    ("LiteLLM 1.82.6", on(litellm="1.82.6"), {"litellm-old": "warning"}),
    ("LiteLLM 1.103.5, needed", on(LITELLM, litellm="1.103.5"),
     {"litellm-old": "error"}),
    ("LiteLLM 1.104.0", on(LITELLM, litellm="1.104.0"), {}),
    ("LiteLLM of no version", on(LITELLM, litellm="?"), {}),
    ("no Claude Code", on(claude=None), {"claude-missing": "warning"}),
    ("Claude Code 2.1.197", on(claude="2.1.197"),
     {"claude-old": "warning"}),
    ("Claude Code 2.1.198", on(claude="2.1.198"), {}),
    ("settings elsewhere", on(settings={"s": {"ANTHROPIC_BASE_URL": "http://x"}}),
     {"settings-override": "error"}),
    ("settings the same", on(settings={"s": {
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:4000", "EDITOR": "vi"}}), {}),
    ("settings with a token", on(settings={"s": {"ANTHROPIC_AUTH_TOKEN": "k"}}),
     {"settings-override": "error"}),
    ("settings with a cloud", on(settings={"s": {"CLAUDE_CODE_USE_BEDROCK": "1"}}),
     {"settings-override": "error"}),
    ("settings with a subagent model", on(settings={"s": {
        "CLAUDE_CODE_SUBAGENT_MODEL": "x"}}), {"settings-override": "warning"}),
    ("agent unloadable", on(agents={"a.md": "no frontmatter"}),
     {"agent-unloadable": "warning"}),
    ("agent unreadable", on(agents={"a.md": None}), {"agent-unloadable": "warning"}),
    ("files missing", on(changes=changes("created", "a")), {"files-created": "warning"}),
    ("files stale", on(changes=changes("updated", "a")), {"files-updated": "warning"}),
    ("files removed", on(changes=changes("removed", "a")), {"files-removed": "warning"}),
    ("files edited", on(changes=changes("edited", "a")), {"files-edited": "info"}),
    ("env readable", on(leaks=["env-readable"]), {"env-readable": "error"}),
    ("env tracked", on(leaks=["env-tracked"]), {"env-tracked": "error"}),
    ("env not ignored", on(leaks=["env-unignored"]), {"env-unignored": "warning"}),
]


@pytest.mark.parametrize("case,observed,wanted", CASES, ids=[case[0] for case in CASES])
def test_doctor_finds_exactly_and_says_what_to_type(case, observed, wanted):
    assert found(*observed) == wanted
    findings = [f for _, f in sf.plan_doctor(*observed) if f.level in ("error", "warning")]
    assert all(f.fix for f in findings if f != LINT and f.slug != "memory-short")


def test_every_reason_has_its_own_fix():
    fixes = {reason: the("node-offline", make_fleet(), facts_with(
        states={"mini": sf.NodeState("mini", "http://mini:11434", reason)})).fix
        for reason in sf.REASON_FIXES}
    assert {"refused", "timeout", "dns", "unreachable", "tls", "http 401", "not ollama",
            "bad answer"} <= set(fixes)
    assert len(set(fixes.values())) == len(fixes)
    assert "Local Network" in fixes["unreachable"]


def test_offline_node_with_a_living_substitute_is_a_warning():
    models = [sf.Model("small", "mini", "qwen3:8b", "a", 32768, fallback=("other",)),
              sf.Model("other", "big", "qwen3:8b", "b", 32768)]
    states = {"mini": OFFLINE, "big": GOOD_STATE.replace(name="big")}
    facts = facts_with(states=states)
    assert found(make_fleet(models, nodes=("mini", "big")), facts) == {"node-offline": "warning"}
    shared = [models[0].replace(fallback=(), alias="b"), models[1]]
    assert found(make_fleet(shared, nodes=("mini", "big")), facts) == {"node-offline": "warning"}
    alone = [models[0].replace(fallback=()), models[1]]
    fleet = make_fleet(alone, nodes=("mini", "big"))
    assert found(fleet, facts) == {"node-offline": "error"}
    assert "nobody else answers for small" in the("node-offline", fleet, facts).what
    dead = facts_with(states=dict(states, big=OFFLINE.replace(name="big")))
    assert found(make_fleet(models, nodes=("mini", "big")), dead) == {"node-offline": "error"}


def test_agent_without_tools_needs_no_tools_but_the_main_session_does():
    models = [sf.Model("small", "mini", "gemma:2b", "a", 32768),
              sf.Model("large", "mini", "qwen3:8b", "b", 32768)]
    held = (GOOD_MODEL, sf.NodeModel("gemma:2b", 1, capabilities=("completion",)))
    fleet = make_fleet(models, tools=()).replace(claude=dict.fromkeys(sf.TIERS, "large"))
    facts = facts_with(states=state_with(models=held))
    assert found(fleet, facts) == {}
    fleet = fleet.replace(agents={"a": sf.Agent("a", "large", "Use it.", ("Read",))})
    assert found(fleet, facts) == {}
    fleet = fleet.replace(claude=dict.fromkeys(sf.TIERS, "small"))
    assert "main, opus" in the("no-tools", fleet, facts).what


def test_findings_about_a_model_point_at_its_line():
    fleet = model_fleet(context=65536)
    assert the("context-untrained", fleet, GOOD_FACTS).where == "fleet.yaml:models.small.context"


def test_findings_say_what_was_seen():
    offline = facts_with(states={"mini": OFFLINE.replace(detail="nobody there")})
    assert "refused: nobody there (http://mini:11434)" in the(
        "node-offline", make_fleet(), offline).what
    offline = facts_with(states={"mini": OFFLINE.replace(detail="")})
    assert "`mini`: refused (http://mini:11434)" in the("node-offline", make_fleet(), offline).what


def test_settings_values_are_never_shown():
    facts = facts_with(settings={"s": {"ANTHROPIC_AUTH_TOKEN": "sk-secret"}})
    assert "sk-secret" not in str(sf.plan_doctor(make_fleet(), facts))


def test_public_address_that_the_config_names_is_not_said_twice():
    states = state_with(endpoint="https://8.8.8.8:11434")
    facts = facts_with(states=states, looks={"mini": (("8.8.8.8",), False)})
    assert found(make_fleet(), facts) == {}


def test_port_taken_names_who_and_what_litellm_would_do():
    facts = facts_with(holder="another program")
    assert the("port-taken", make_fleet(), facts).what == \
        "another program answers at http://127.0.0.1:4000"
    assert "LiteLLM would take another port" in the("port-taken", LITELLM, facts).what


def test_many_files_are_named_briefly():
    facts = facts_with(changes=changes("updated", *(f"{n}.md" for n in range(40))))
    assert the("files-updated", make_fleet(), facts).what.count(".md") == 5
    assert "and 35 more" in the("files-updated", make_fleet(), facts).what


def test_without_a_fleet_the_machine_is_still_checked():
    error = sf.Finding("no-config", "error", "no fleet.yaml", fix="subagent-fleet init")
    facts = sf.Facts(problems=(error,), agents={"a.md": ""})
    assert found(None, facts) == {"no-config": "error", "claude-missing": "warning",
                                  "agent-unloadable": "warning"}


@pytest.mark.parametrize("text,defect", AGENTS)
def test_agents_that_claude_code_leaves_out_are_named(text, defect):
    name, said = sf.read_agent(text)
    assert said == defect
    assert name or defect


@pytest.mark.parametrize("version,than,older", [
    ("0.17.0", "0.17.1", True), ("0.17.1", "0.17.1", False), ("0.9.0", "0.17.1", True),
    ("0.17.0-rc3", "0.17.1", True), ("0.33.0-rc2", "0.32.14", False), ("0.0.0", "0.17.1", False),
    ("", "0.17.1", False), ("nonsense", "0.17.1", False), ("1.103.5rc1", "1.104.0", True),
    ("1.104.0.post1", "1.104.0", False), ("2.1.197 (Claude Code)", "2.1.198", True),
    ("v0.17.0", "0.17.1", True), ("9" * 5000 + ".1.1", "0.17.1", False)])
def test_versions_compare(version, than, older):
    assert sf.is_older(version, than) is older


@pytest.mark.parametrize("levels,verdict", [
    ("ok info", "Ready: everything is in order."),
    ("ok warning", "Ready, with 1 warning."),
    ("error warning warning", "Not ready: 1 error, 2 warnings. Begin with: mend error"),
    ("error error", "Not ready: 2 errors. Begin with: mend error")])
def test_verdict(levels, verdict):
    findings = [sf.Finding("x", level, "what", fix=f"mend {level}") for level in levels.split()]
    assert sf.plan_verdict(findings) == verdict


def test_verdict_says_where():
    findings = [sf.Finding("x", "error", "no fix"), sf.Finding("x", "error", "y", "f:1:2", fix="mend")]
    assert sf.plan_verdict(findings) == "Not ready: 2 errors. Begin with: f:1:2: mend"
    assert sf.plan_verdict(findings[:1]) == "Not ready: 1 error."


@pytest.fixture
def told_by_doctor(monkeypatch):
    """What `doctor` prints about a fleet and what was seen of it."""
    def tell(fleet, facts):
        told, world = [], sf.World()
        monkeypatch.setattr(sf, "load_config", lambda options, world: (fleet, []))
        monkeypatch.setattr(sf, "observe", lambda *seen: facts)
        monkeypatch.setattr(world, "out", told.append)
        sf.cmd_doctor(types.SimpleNamespace(fix=False, json=False), world)
        return "".join(told)
    return tell


def test_doctor_text_groups_and_ends_with_the_verdict(told_by_doctor):
    text = told_by_doctor(*on(states={"mini": OFFLINE}))
    blocks = text.split("\n\n")
    assert [block.split("\n")[0] for block in blocks[:3]] == ["This machine", "Config", "Nodes"]
    assert "\nok: Python 3." in blocks[0] and f"\n  fix: {sf.REASON_FIXES['refused']}" in blocks[2]
    assert blocks[-1] == f"Not ready: 1 error. Begin with: {sf.REASON_FIXES['refused']}\n"


def test_doctor_text_shows_what_a_node_said_without_its_controls(told_by_doctor):
    state = sf.NodeState("mini", "http://mini:11434", "bad answer", "\x1b[2J\nevil\u202e")
    text = told_by_doctor(*on(states={"mini": state}))
    assert "\x1b" not in text and "\u202e" not in text and "\nevil" not in text


# -- gathering --

def write_program(directory, name, script):
    """Put a program on the PATH of a test."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_text("#!/bin/sh\n" + script + "\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def world_with(**environ):
    """A World with another environment."""
    world = sf.World()
    world.environ = clean_environment(**environ)
    return world


@pytest.mark.parametrize("packages,version,poisoned", [
    ("lib/python3.12/site-packages", "1.106.2", False),
    ("lib/python3/dist-packages", "1.82.8", True), ("Lib/site-packages", "1.103.5", False),
    ("lib/python3.12/elsewhere", "?", False)])
def test_litellm_is_known_from_disk_without_running_it(tmp_path, packages, version, poisoned):
    place = tmp_path / "venv" / packages
    for name in ("litellm", f"litellm-{version}.dist-info", "litellm_enterprise-2.0.0"
                 ".dist-info", "litellm_init.pth" if poisoned else "other.pth"):
        (place / name).mkdir(parents=True)
    program = write_program(tmp_path / "venv" / "bin", "litellm", f"touch {tmp_path}/was-run")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "litellm").symlink_to(program)  # as uv and pipx do
    options = types.SimpleNamespace(timeout=0.2)
    found = sf.observe(world_with(PATH=tmp_path / "bin"), None, (), options).litellm
    assert found == version + " with litellm_init.pth" * poisoned
    assert not (tmp_path / "was-run").exists()
    assert sf.observe(world_with(PATH=tmp_path), None, (), options).litellm is None


@pytest.mark.parametrize("script,version", [
    ("echo '2.1.327 (Claude Code)'", "2.1.327"), ("exit 3", "?"),
    ("sleep 30; echo '2.1.327 (Claude Code)'", "?")])  # who waits for it knows the version
def test_claude_code_is_asked_for_its_version_within_the_deadline(tmp_path, script, version):
    write_program(tmp_path, "claude", script)
    world = world_with(PATH=f"{tmp_path}:/bin:/usr/bin")
    options = types.SimpleNamespace(timeout=0.2)
    assert sf.observe(world, None, (), options).claude == version
    assert sf.observe(world_with(PATH="/nowhere"), None, (), options).claude is None


def write_settings(directory, text):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "settings.json").write_text(text, encoding="utf-8")


def test_settings_are_read_where_claude_code_reads_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in ("home/.claude", ".claude", "own"):
        write_settings(tmp_path / place, json.dumps({"env": {"A": place}, "permissions": {}}))
    (tmp_path / ".claude" / "settings.local.json").write_text('{"env": {}}')
    world = world_with(HOME="home")
    found = {path: env for path, env in sf.find_settings(world).items() if path[0] != "/"}
    assert found == {"home/.claude/settings.json": {"A": "home/.claude"},
                     ".claude/settings.json": {"A": ".claude"}, ".claude/settings.local.json": {}}
    world = world_with(HOME="home", CLAUDE_CONFIG_DIR="own")
    assert sf.find_settings(world)["own/settings.json"] == {"A": "own"}


@pytest.mark.parametrize("text", ["{", "[" * 9999, "", "[]", "5", '{"a": 1}', '{"env": [1]}',
                                  '{"env": null}', "\ufeff{}", "\0"])
def test_settings_that_set_nothing_are_passed_over(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    write_settings(tmp_path / ".claude", text)
    assert ".claude/settings.json" not in sf.find_settings(world_with(HOME="home"))


def test_agents_are_read_from_folders_below_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    below = tmp_path / ".claude" / "agents" / "team"
    below.mkdir(parents=True)
    (below / "a.md").write_bytes(b"\xff")
    (below / "notes.txt").write_text("x")
    (below / "gone.md").symlink_to("nowhere")
    found = sf.World().read_tree(".claude/agents", ".md")
    assert found == {".claude/agents/team/a.md": "\ufffd", ".claude/agents/team/gone.md": None}


def test_environment_file_without_a_key_is_found(doctor):
    environment = doctor.path / ".env.subagent-fleet"
    environment.write_text("")
    environment.chmod(0o600)
    assert doctor.ask() == {"no-key": "error"}
    environment.write_text("export LITELLM_MASTER_KEY=mine\n")
    assert doctor.ask() == {"files-edited": "info"}


def test_git_says_whether_it_has_the_secret(doctor):
    git = ["git", "-C", str(doctor.path)]
    subprocess.run([*git, "init", "-q"], check=True)
    (doctor.path / ".gitignore").write_text("*.pyc")  # editors leave out the last line's end
    below = doctor.path / "below it"
    below.mkdir()
    assert doctor.ask() == {"env-unignored": "warning"}
    for place, wanted in ((doctor.path, "./.env.sub"), (below, "../.env.sub")):
        facts = sf.Facts(env_path=wanted + "agent-fleet", leaks=["env-unignored"])
        fix, = [finding.fix for finding in sf._doctor_files(facts)]
        (doctor.path / ".gitignore").write_text("*.pyc")
        subprocess.run(fix, shell=True, cwd=place, check=True)
        assert doctor.ask() == {}
        ignored = subprocess.run([*git, "check-ignore", "a.pyc"], capture_output=True)
        assert ignored.stdout == b"a.pyc\n"
    assert doctor.ask() == {}
    subprocess.run([*git, "add", "-f", ".env.subagent-fleet"], check=True)
    assert doctor.ask() == {"env-tracked": "error"}


@pytest.mark.parametrize("pages,wanted", [
    ({"/": {"name": "subagent-fleet"}}, "subagent-fleet"),
    ({"/health/liveliness": "I'm alive!"}, "LiteLLM"), ({}, "another program")])
def test_who_holds_the_gateways_port_is_asked(fake_node, pages, wanted):
    node = fake_node()
    node.answers = {path: (200, pages[path]) if path in pages else (401, {"error": "no"})
                    for path in ("/", "/health/liveliness")}
    gateway = sf.Gateway("builtin", "0.0.0.0", node.port, "KEY")
    world = world_with(PATH="/nowhere")
    fleet = types.SimpleNamespace(gateway=gateway, models={})
    assert sf.who_serves(world, fleet, "/nowhere", world.clock() + 3) == wanted


def test_free_port_is_nobodys():
    world = world_with(PATH="/nowhere")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: refused
        gateway = sf.Gateway("builtin", "127.0.0.1", taken.getsockname()[1], "KEY")
        fleet = types.SimpleNamespace(gateway=gateway, models={})
        assert sf.who_serves(world, fleet, "/nowhere", world.clock() + 3) == ""


def test_node_that_answers_any_web_page_is_seen(fake_node):
    node, world = fake_node(), sf.World()
    there = sf.Node("n", node.endpoint)
    assert sf.look_at_node(world, there, world.clock() + 3) == (("127.0.0.1",), False)
    node.any_origin = True
    assert sf.look_at_node(world, there, world.clock() + 3) == (("127.0.0.1",), True)
    gone = sf.Node("n", "http://name.invalid:11434")
    assert sf.look_at_node(world, gone, world.clock() + 3) == ((), False)


# -- the command --

@pytest.fixture
def run_here(tmp_path, capsys, monkeypatch):
    """Run a command in this process; as run_cli otherwise."""
    def run(*words, env):
        monkeypatch.chdir(tmp_path)
        code = sf.main(list(words), world_with(**env))
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert [key for key in keys_near(tmp_path) if key in out + err] == []
        return types.SimpleNamespace(returncode=code, stdout=out, stderr=err)
    return run


AGENT = {"planner": {"model": "small", "description": "Plan.", "tools": ["Read"]}}


@pytest.fixture
def doctor(tmp_path, fake_node, run_here):
    """A machine on which everything is in order, and `run` to ask the doctor there."""
    place = types.SimpleNamespace(path=tmp_path, node=fake_node({"qwen3:8b": {"context": 40960}}))
    programs = tmp_path / "venv" / "bin"
    write_program(programs, "claude", "echo '2.1.327 (Claude Code)'")
    write_program(programs, "litellm", "exit 1")
    (tmp_path / "venv/lib/python3.12/site-packages/litellm-1.106.2.dist-info").mkdir(parents=True)
    place.fleet = {
        "project": {"name": "t", "gateway": {"provider": "builtin", "port": free_port()}},
        "nodes": {"mini": {"endpoint": place.node.endpoint}},
        "models": {"small": {"node": "mini", "ollama_model": "qwen3:8b",
                             "litellm_alias": "qwen3-8b", "context": 32768}}, "agents": AGENT}
    place.env = {"HOME": tmp_path / "home", "PATH": f"{programs}:/usr/bin:/bin"}

    def write():
        (tmp_path / "fleet.json").write_text(json.dumps(place.fleet), encoding="utf-8")

    def run(*words):
        return run_here("doctor", *words, env=place.env)

    def ask(*words):
        done = run("--json", *words)
        answer = json.loads(done.stdout)
        assert answer["schema"] == "subagent-fleet/doctor/1"
        assert all(set(f) == {"topic", "id", "level", "what", "where", "fix"}
                   for f in answer["findings"])
        place.answer, place.status = answer, done.returncode
        return {f["id"]: f["level"] for f in answer["findings"]
                if f["level"] != "ok" and f["id"] != "port-free"}

    write()
    place.write, place.run, place.ask = write, run, ask
    assert run_here("generate", env=place.env).returncode == 0
    return place


def test_doctor_on_a_machine_in_order_is_ready_and_changes_nothing(doctor, run_cli):
    done = run_cli("doctor", env=doctor.env)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "Ready: everything is in order."
    assert doctor.ask() == {} and doctor.status == 0
    assert doctor.answer["mended"] == []
    assert {path for path, _ in doctor.node.requests} == {
        "/api/version", "/api/tags", "/api/ps", "/api/show"}


def test_doctor_without_a_config_checks_the_machine(run_here, tmp_path):
    done = run_here("doctor", env={"HOME": tmp_path, "PATH": "/nowhere"})
    assert done.returncode == 1
    assert "Claude Code is not on the PATH" in done.stdout
    assert done.stdout.splitlines()[-1] == \
        "Not ready: 1 error, 1 warning. Begin with: subagent-fleet init"


def test_doctor_with_an_invalid_config_shows_the_line(doctor):
    doctor.fleet["models"]["small"]["timeot"] = 1
    doctor.write()
    done = doctor.run()
    assert done.returncode == 1 and "^^^" in done.stdout
    assert "fleet.json:1:250: did you mean `timeout`?" in done.stdout.splitlines()[-1]
    assert doctor.ask() == {"unknown-key": "error"}


def test_doctor_sees_nodes_routes_and_settings_as_they_are(doctor):
    doctor.node.models["qwen3:8b"].update(capabilities=["completion"], context=16384)
    doctor.node.loaded, doctor.node.version = {"qwen3:8b": 4096}, "0.16.0"
    doctor.node.any_origin = True
    local = doctor.path / ".claude" / "settings.local.json"
    local.write_text('{"env": {"ANTHROPIC_BASE_URL": "http://127.0.0.1:1"}}', encoding="utf-8")
    (doctor.path / ".claude" / "agents" / "mine.md").write_text("<!-- x -->\n---\nname: x\n---\n")
    assert doctor.ask() == {
        "no-tools": "error", "context-untrained": "warning", "context-short": "warning",
        "ollama-old": "error", "open-origin": "warning", "settings-override": "error",
        "agent-unloadable": "warning"}
    assert doctor.status == 1


def test_doctor_fix_does_what_is_safe_and_says_each(doctor):
    environment, agent = doctor.path / ".env.subagent-fleet", doctor.path / ".claude/agents"
    environment.chmod(0o644)
    doctor.fleet["models"]["small"]["context"] = 40000
    doctor.write()
    before = environment.read_bytes()
    key = sf.kept_key(sf.World(), sf.load_fleet(doctor.path / "fleet.json"), str(doctor.path))
    assert doctor.ask() == {"env-readable": "error", "files-updated": "warning"}
    assert environment.stat().st_mode & 0o777 == 0o644 and environment.read_bytes() == before
    assert doctor.ask("--fix") == {} and doctor.status == 0
    assert environment.stat().st_mode & 0o777 == 0o600
    assert b"40000" in environment.read_bytes() != before
    assert len(doctor.answer["mended"]) == 3  # its permissions, its text, litellm_config.yaml
    (agent / "planner.md").write_text("mine")
    doctor.fleet["models"]["small"]["context"] = 32768
    doctor.write()
    done = doctor.run("--fix")
    assert done.stdout.startswith("mended: ") and done.returncode == 0
    assert (agent / "planner.md").read_text() == "mine"
    assert "planner.md: changed by hand" in done.stdout
    assert "mended" not in doctor.run("--fix").stdout
    assert len(key) > 40 and key not in done.stdout + json.dumps(doctor.answer)


def test_doctor_reports_what_stands_in_the_way_of_its_files(doctor):
    (doctor.path / ".env.subagent-fleet").unlink()
    (doctor.path / ".env.subagent-fleet").mkdir()
    assert doctor.ask() == {"in-the-way": "error"} and doctor.ask("--fix") == {
        "in-the-way": "error"}


def test_doctor_weak_key_in_the_environment_is_found(doctor):
    doctor.env["LITELLM_MASTER_KEY"] = "sk-1234"
    assert doctor.ask() == {"weak-key": "warning"}


def test_doctor_survives_any_model_name(doctor):
    names = ["\x1b[2J", "\u202eevil", "a\nb", "[/x]", "\ud800", "x" * 5000]
    doctor.node.models = {name: {} for name in names}
    doctor.node.loaded = dict.fromkeys(names, 4096)
    assert doctor.ask() == {"model-missing": "error"}
    assert not {"\x1b", "\u202e"} & set(doctor.run().stdout)


def test_doctor_ends_in_time_whatever_hangs(doctor):
    with socket.socket() as silent:  # a gateway's port and a node that take and never answer
        silent.bind(("127.0.0.1", doctor.fleet["project"]["gateway"]["port"]))
        silent.listen(16)
        port = silent.getsockname()[1]
        doctor.fleet["nodes"]["mini"]["endpoint"] = f"http://127.0.0.1:{port}"
        doctor.write()
        for name in ("claude", "git", "lsof", "ss"):
            write_program(doctor.path / "venv" / "bin", name, "sleep 60")
        with not_held_up(60):
            found = doctor.ask("--timeout", "1")
    assert found["node-offline"] == "error"


def test_doctor_knows_its_own_gateway(doctor):
    serving = subprocess.Popen([sys.executable, str(SCRIPT), "serve"], cwd=str(doctor.path),
                               stdout=subprocess.PIPE, env=clean_environment(**doctor.env))
    try:
        assert b"Serving" in serving.stdout.readline()
        assert doctor.ask() == {}
        assert "gateway-up" in [finding["id"] for finding in doctor.answer["findings"]]
        doctor.env["LITELLM_MASTER_KEY"] = "sk-of-another-fleet-9"
        assert doctor.ask() == {"gateway-other": "error"}
    finally:
        serving.kill()
        serving.communicate()


@pytest.mark.parametrize("answer", [
    {"data": [{"id": "qwen3-8b"}, {"id": "more"}]}, {"data": [{"id": "other"}]}, {"data": [{}]},
    {"data": [{"id": []}]}, {"data": 1}, ["data"], {}, b"qwen3-8b", b"\xff"])
def test_gateway_is_ours_when_it_has_every_alias(doctor, fake_node, answer):
    node = fake_node(port=doctor.fleet["project"]["gateway"]["port"])
    node.answers.update({"/v1/models": (200, answer), "/health/liveliness": (200, "I'm alive!")})
    ours = isinstance(answer, dict) and len(answer.get("data") or ()) == 2 if answer != {"data": 1} \
        else False
    assert doctor.ask() == ({} if ours else {"gateway-other": "error"})


def test_doctor_names_the_places_that_were_typed(doctor):
    (doctor.path / "my fleet.json").write_text(json.dumps(doctor.fleet), encoding="utf-8")
    done = doctor.run("--config", "my fleet.json", "--out", "nonex")
    assert "  fix: subagent-fleet generate --config 'my fleet.json' --out nonex\n" in done.stdout
    assert "`subagent-fleet serve --config 'my fleet.json' --out nonex` in another" in done.stdout


def test_doctor_port_that_is_taken_is_an_error(doctor, fake_node):
    doctor.fleet["project"]["gateway"]["port"] = fake_node().port
    doctor.write()
    assert doctor.ask()["port-taken"] == "error"


# -- worker --

def told_by_worker(world, monkeypatch):
    """What `worker --json` says in this world."""
    told = []
    monkeypatch.setattr(world, "out", told.append)
    sf.cmd_worker(types.SimpleNamespace(timeout=1, json=True), world)
    return json.loads(told[0])


@pytest.mark.parametrize("platform,programs,online,system", [
    ("darwin", ("ollama",), True, "darwin"), ("darwin", (), False, "darwin"),
    ("linux", ("systemctl", "ollama"), True, "systemd"), ("linux", ("systemctl",), False, "systemd"),
    ("linux", ("ollama",), True, "shell"), ("freebsd14", (), False, "shell"),
    ("win32", ("ollama",), False, "windows"), ("linux", ("systemctl", "docker"), True, "docker")])
def test_system_decides_the_setup(monkeypatch, platform, programs, online, system):
    world = sf.World()
    monkeypatch.setattr(world, "which", lambda name: name if name in programs else None)
    monkeypatch.setattr(sf.sys, "platform", platform)
    monkeypatch.setattr(sf, "probe_nodes", lambda _, nodes, __: {
        node.name: sf.NodeState(node.name, node.endpoint, "" if online else "refused")
        for node in nodes.values()})
    assert told_by_worker(world, monkeypatch)["system"] == system


@pytest.mark.parametrize("address,kind", [
    ("192.168.1.50", "LAN"), ("10.1.2.3", "LAN"), ("172.20.0.4", "LAN"), ("fd00::1", "LAN"),
    ("100.101.102.103", "Tailscale"), ("100.64.0.1", "Tailscale"), ("127.0.0.1", ""),
    ("169.254.3.4", ""), ("8.8.8.8", "public"), ("100.128.0.1", "public"), ("localhost", ""),
    ("10.example.com", ""), ("192.168.1", ""), ("fe80::1", ""), ("[2606:4700::1111]", "public")])
def test_addresses_have_a_kind(address, kind):
    assert sf.address_kind(address) == kind


LOCAL = sf.NodeState("127.0.0.1", "http://127.0.0.1:11434", version="0.32.15", models=(GOOD_MODEL,))


def reached(*addresses, reason=""):
    return tuple(sf.NodeState(address, f"http://{address}:11434", reason) for address in addresses)


REACHED = reached("192.168.1.50", "100.101.102.103")


def check_worker(program="/bin/ollama", state=LOCAL, reached=REACHED):
    return sf.check_worker(program, state, reached)


def plan_block(name="Mac-mini.local", state=LOCAL, reached=REACHED):
    return sf.plan_worker_block(name, state, reached)


@pytest.mark.parametrize("system", sorted(sf.WORKER_SETUPS))
def test_setup_names_every_setting_and_how_to_start(system):
    state = LOCAL.replace(endpoint="http://127.0.0.1:12000")
    text = sf.format_setup(system, state.replace(
        models=(GOOD_MODEL, GOOD_MODEL.replace(name="qwen3:4b"))), REACHED)
    for name, value in sf.WORKER_SETTINGS.items():
        assert name in text and value.format(port=12000, models=2) in text
    assert {"darwin": "Expose Ollama to the network", "systemd": "systemctl edit ollama",
            "windows": 'setx OLLAMA_HOST "0.0.0.0:12000"', "shell": "ollama serve",
            "docker": "-p 192.168.1.50:12000:12000 ollama/ollama"}[system] in text
    assert all(len(line) <= 100 for line in text.splitlines()) and "{" not in text


def test_setup_on_a_mac_says_that_launchctl_is_lost():
    assert "lost at every restart" in sf.format_setup("darwin", LOCAL, REACHED)


WORKER_CASES = [
    ({}, {}),
    ({"program": "", "state": OFFLINE}, {"ollama-absent": "error"}),
    ({"state": OFFLINE}, {"ollama-stopped": "error"}),
    ({"program": ""}, {}),
    ({"reached": reached("192.168.1.50", reason="refused")}, {"closed-node": "warning"}),
    ({"reached": ()}, {"closed-node": "warning"}),
    ({"state": LOCAL.replace(models=())}, {"no-model": "warning"}),
    ({"state": LOCAL.replace(models=(GOOD_MODEL.replace(capabilities=("embedding",)),))},
     {"no-model": "warning"}),
    ({"state": LOCAL.replace(version="0.16.0")}, {"ollama-old": "error"}),
    ({"reached": reached("8.8.8.8")}, {"public-address": "error"}),
    ({"reached": reached("8.8.8.8", reason="timeout")}, {"closed-node": "warning"})]


@pytest.mark.parametrize("changed,wanted", WORKER_CASES)
def test_worker_finds_exactly(changed, wanted):
    assert {f.slug: f.level for f in check_worker(**changed)} == wanted
    assert all(f.fix for f in check_worker(**changed))


def fleet_of(block):
    """Check a worker's block inside a fleet, as it would be pasted."""
    tree = {"project": {"name": "test"}, **block, "agents": {}}
    fleet, findings = sf.check_fleet(sf.Document(sf.dump_yaml(tree), "fleet.yaml"))
    assert fleet, findings
    return fleet


def test_worker_block_is_a_part_of_a_valid_fleet():
    fleet = fleet_of(plan_block())
    assert fleet.nodes["mac-mini"].endpoint == "http://192.168.1.50:11434"
    model = fleet.models["qwen3-8b"]
    assert (model.ollama_model, model.alias, model.context) == ("qwen3:8b", "qwen3-8b", 32768)


@pytest.mark.parametrize("changed,endpoint", [
    ({"reached": reached("192.168.1.50", reason="refused") + reached("100.101.102.103")},
     "http://100.101.102.103:11434"),
    ({"reached": reached("100.101.102.103", "192.168.1.50", reason="refused")},
     "http://192.168.1.50:11434"),
    ({"reached": reached("8.8.8.8", "100.101.102.103")}, "http://100.101.102.103:11434"),
    ({"reached": (), "state": LOCAL.replace(endpoint="http://127.0.0.1:12000")},
     "http://Mac-mini.local:12000")])
def test_worker_block_prefers_an_address_that_answers_then_the_lan(changed, endpoint):
    block = plan_block(**changed)
    assert block["nodes"]["mac-mini"]["endpoint"] == endpoint


def test_worker_block_survives_hostile_names():
    names = ("opus", "Opus:latest", "hf.co/User/Repo-GGUF:Q4_K_M", "a/b:c", "a-b:c", "a.b\x1b[31m",
             "\u202eevil", "x" * 200, "x" * 201, "é", "\n", "", "q:cloud", "'\"#{}", "-", "y: z")
    models = tuple(sf.NodeModel(name, 1, capabilities=("completion", "tools"),
                                trained_context=n * 50000) for n, name in enumerate(names))
    fleet = fleet_of(plan_block("\x1b[2J Bad name:" + "n" * 90, LOCAL.replace(models=models)))
    kept = {model.ollama_model for model in fleet.models.values()}
    assert {"opus", "a/b:c", "a-b:c", "é", "y: z"} <= kept
    assert not kept & {"q:cloud", "", "\n", "a.b\x1b[31m"}


def test_worker_block_prefers_models_that_call_tools():
    models = (GOOD_MODEL, sf.NodeModel("phi:1b", 1, capabilities=("completion",)),
              sf.NodeModel("embed", 1, capabilities=("embedding",)),
              sf.NodeModel("stub", 1, capabilities=("completion", "tools"), remote="ollama.com"))
    assert list(plan_block(state=LOCAL.replace(models=models))["models"]) == ["qwen3-8b"]
    assert list(plan_block(state=LOCAL.replace(models=models[1:]))["models"]) == ["phi-1b"]


def test_worker_sees_itself_only_when_it_listens_beyond_loopback(run_here, fake_node):
    closed, opened = fake_node({"qwen3:8b": {}}), fake_node({"qwen3:8b": {}}, host="0.0.0.0")
    _, own = sf.World().own_names()

    def ask(node):
        done = run_here("worker", "--json", env={"OLLAMA_HOST": f"0.0.0.0:{node.port}"})
        answer = json.loads(done.stdout)
        assert answer["schema"] == "subagent-fleet/worker/1" and done.returncode == 0
        assert answer["ollama"]["online"] and answer["ollama"]["version"] == "0.32.15"
        return answer

    fleet_of(ask(closed)["fleet"])
    if not own:
        pytest.skip("this machine has no address but loopback")
    assert [f["id"] for f in ask(closed)["findings"]] == ["closed-node"]
    answer = ask(opened)
    assert [one["address"] for one in answer["addresses"] if one["open"]] == list(own)
    assert "closed-node" not in [f["id"] for f in answer["findings"]]
    assert fleet_of(answer["fleet"]).nodes.popitem()[1].endpoint == f"http://{own[0]}:{opened.port}"


def test_worker_text_ends_with_what_to_paste(run_cli, fake_node):
    node = fake_node({"qwen3:8b": {}})
    done = run_cli("worker", env={"OLLAMA_HOST": f"127.0.0.1:{node.port}"})
    assert (done.returncode, done.stderr) == (0, "")
    block = done.stdout[done.stdout.index("\nnodes:"):]
    fleet_of(sf.parse_yaml(block))
    assert "\nOn the machine that has the fleet, put these lines under the `nodes:`" in done.stdout
    assert "public internet" in done.stdout
    assert "0.32.15 runs here with qwen3:8b\n" in done.stdout


def test_worker_without_ollama_says_where_to_get_it(run_here):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        env = {"OLLAMA_HOST": f"127.0.0.1:{taken.getsockname()[1]}", "PATH": "/nowhere"}
        done = run_here("worker", env=env)
    assert done.returncode == 1
    assert "install it from ollama.com/download" in done.stdout or sys.platform == "darwin"


def test_worker_tells_only_the_addresses_that_others_can_use(fake_node, monkeypatch):
    world = world_with(PATH="/nowhere", OLLAMA_HOST=f"http://0.0.0.0:{fake_node().port}")
    monkeypatch.setattr(world, "own_names", lambda: ("here", (
        "192.0.2.7", "127.0.0.1", "169.254.1.1", "100.101.102.103")))
    monkeypatch.setattr(world, "connect_seconds", 0.2)
    worker = told_by_worker(world, monkeypatch)
    assert [one["address"] for one in worker["addresses"]] == ["192.0.2.7", "100.101.102.103"]
    assert worker["ollama"]["online"] and worker["program"] == "" or sys.platform == "darwin"


def test_own_addresses_are_addresses_of_this_machine():
    for address in sf.World().own_names()[1]:
        with socket.socket() as listener:
            listener.bind((address, 0))


def test_every_text_is_said_somewhere():
    said = {f.slug for _, observed, _ in CASES for _, f in sf.plan_doctor(*observed)}
    said |= {f.slug for changed, _ in WORKER_CASES for f in check_worker(**changed)}
    assert set(sf.DOCTOR_TEXTS) - said == set()
    assert all("{" not in f.what + f.fix for _, observed, _ in CASES
               for _, f in sf.plan_doctor(*observed))
