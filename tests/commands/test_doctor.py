"""`doctor` and `worker`: what they gather, and the commands."""
import json
import os
import re
import socket
import subprocess
import sys
import time
import types

import pytest

import subagent_fleet as sf
from doctor_facts import GOOD_MODEL, LOCAL, OFFLINE, REACHED, on, paste
from subagent_fleet import replace
from tools import PROGRAM, clean_environment, keys_near


@pytest.fixture
def told_by_doctor(monkeypatch):
    """What `doctor` prints about a fleet and what was seen of it."""
    def tell(fleet, facts):
        told, world = [], sf.World()
        monkeypatch.setattr(sf, "load_config", lambda world, typed: sf.Config(fleet))
        monkeypatch.setattr(sf, "observe", lambda *seen, **more: facts)
        monkeypatch.setattr(world, "write", told.append)
        sf.main(["doctor"], world)
        return "".join(told)
    return tell


def test_doctor_text_groups_and_ends_with_the_verdict(told_by_doctor):
    text = told_by_doctor(*on(states={"mini": OFFLINE}))
    blocks = text.split("\n\n")
    assert [block.split("\n")[0] for block in blocks[:3]] == [
        "This machine: 3 ok", "Config: 1 ok", "Machines: 1 error"]
    fix = sf.fix_for_reason("refused", "ollama", "on mini")
    assert fix.startswith("start Ollama on mini; ") and f"\n  fix: {fix}" in blocks[2]
    assert blocks[-1] == f"Not ready: 1 error. First: {fix}\n"


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


def observed(world):
    """What `doctor` sees of this machine where there is no fleet."""
    return sf.observe(sf.Workspace(world, "."), None, problems=(), seconds=0.2)


def test_litellm_is_found_without_running_it(tmp_path):
    write_program(tmp_path / "bin", "litellm", f"touch {tmp_path}/was-run")
    assert observed(world_with(PATH=tmp_path / "bin")).has_litellm
    assert not (tmp_path / "was-run").exists()
    assert not observed(world_with(PATH=tmp_path)).has_litellm


@pytest.mark.parametrize("script,version", [
    ("echo '2.1.327 (Claude Code)'", "2.1.327"), ("exit 3", "?"), ("sleep 30", "?")])
def test_claude_code_is_asked_for_its_version_within_the_deadline(tmp_path, script, version):
    write_program(tmp_path, "claude", script)
    world, began = world_with(PATH=f"{tmp_path}:/bin:/usr/bin"), time.monotonic()
    assert observed(world).claude == version
    assert time.monotonic() - began < 10
    assert observed(world_with(PATH="/nowhere")).claude is None


def write_settings(directory, text):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "settings.json").write_text(text, encoding="utf-8")


def test_settings_are_read_where_claude_code_reads_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in ("home/.claude", ".claude", "own"):
        write_settings(tmp_path / place, json.dumps({"env": {"A": place}, "permissions": {}}))
    (tmp_path / ".claude" / "settings.local.json").write_text('{"env": {}}')
    world = world_with(HOME=str(tmp_path / "home"))
    found = sf.find_settings(world, sf.usual_settings(world))
    assert found == {str(tmp_path / "home/.claude/settings.json"): {"A": "home/.claude"},
                     ".claude/settings.json": {"A": ".claude"}, ".claude/settings.local.json": {}}
    world = world_with(HOME="home", CLAUDE_CONFIG_DIR="own")
    assert sf.find_settings(world, sf.usual_settings(world))["own/settings.json"] == {"A": "own"}


@pytest.mark.parametrize("text", ["{", "[" * 9999, "", "[]", "5", '{"a": 1}', '{"env": [1]}',
                                  '{"env": null}', "\ufeff{}", "\0"])
def test_settings_that_set_nothing_are_passed_over(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    write_settings(tmp_path / ".claude", text)
    paths = sf.usual_settings(world_with(HOME="home"))
    assert sf.find_settings(world_with(HOME="home"), paths) == {}


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
    assert doctor.ask() == {}
    subprocess.run([*git, "add", "-f", ".env.subagent-fleet"], check=True)
    assert doctor.ask() == {"env-tracked": "error"}


@pytest.mark.parametrize("pages,wanted", [
    ({"/": {"name": "subagent-fleet"}}, "subagent-fleet"),
    ({"/health/liveliness": "I'm alive!"}, "another program"), ({}, "another program")])
def test_who_holds_the_gateways_port_is_asked(fake_node, pages, wanted):
    node = fake_node()
    node.answers = {path: (200, pages[path]) if path in pages else (401, {"error": "no"})
                    for path in ("/", "/health/liveliness")}
    gateway = sf.Gateway("builtin", "0.0.0.0", node.port, "KEY")
    world = world_with(PATH=os.environ["PATH"])  # a Mac asks its lsof
    fleet = types.SimpleNamespace(name="", gateway=gateway, models={})
    assert sf.who_serves(world, fleet, "a-key", world.clock() + 20) == wanted


def test_free_port_is_nobodys():
    world = world_with(PATH="/nowhere")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: refused
        gateway = sf.Gateway("builtin", "127.0.0.1", taken.getsockname()[1], "KEY")
        fleet = types.SimpleNamespace(gateway=gateway, models={})
        assert sf.who_serves(world, fleet, "a-key", world.clock() + 20) == ""


def test_the_addresses_of_a_nodes_host_are_found(fake_node):
    world = sf.World()
    there = sf.Node("n", fake_node().endpoint)
    assert sf.addresses_of(world, there, world.clock() + 20) == ("127.0.0.1",)
    gone = sf.Node("n", "http://name.invalid:11434")
    assert sf.addresses_of(world, gone, world.clock() + 3) == ()


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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place.fleet = {
        "project": {"name": "t", "gateway": {"provider": "builtin", "port": port}},
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
        assert answer["schema"] == "subagent-fleet/doctor/2"
        assert all(set(f) == {"topic", "id", "level", "what", "where", "fix"}
                   for f in answer["findings"])
        place.answer, place.status = answer, done.returncode
        return {f["id"]: f["level"] for f in answer["findings"]
                if f["level"] != "ok" and f["id"] != "port-free"}

    write()
    place.write, place.run, place.ask = write, run, ask
    assert run_here("generate", env=place.env).returncode == 0
    return place


@pytest.mark.parametrize("command", ["doctor", "status"])
def test_a_gateway_that_hangs_is_not_called_another_program(doctor, run_cli, command):
    port = doctor.fleet["project"]["gateway"]["port"]
    doctor.node.loaded = {"qwen3:8b": 32768}
    with socket.create_server(("127.0.0.1", port)):  # takes connections, says nothing
        done = run_cli(command, "--timeout", "0.3", env=doctor.env)
    said = done.stdout + done.stderr
    assert f"othing answers in time at http://127.0.0.1:{port}" in said
    assert "subagent-fleet serve" in said and "something else" not in said


def test_doctor_on_a_machine_in_order_is_ready_and_changes_nothing(doctor, run_cli):
    done = run_cli("doctor", env=doctor.env)
    assert (done.returncode, done.stderr) == (0, "")
    port = doctor.fleet["project"]["gateway"]["port"]
    verdict = f"0 of 1 model ready. No gateway runs at http://127.0.0.1:{port}. Next: `subagent-fleet warmup`"
    assert done.stdout.splitlines()[-1] == verdict
    assert run_cli("status", env=doctor.env).stdout.endswith(f"\nt: {verdict}\n")  # the same
    doctor.node.loaded = {"qwen3:8b": 32768}
    assert run_cli("doctor", env=doctor.env).stdout.splitlines()[-1] == (
        f"Ready, but no gateway runs at http://127.0.0.1:{port}: `subagent-fleet serve` in another "
        "terminal, or `subagent-fleet up`.")
    assert doctor.ask() == {} and doctor.status == 0
    assert doctor.answer["fixed"] == []
    assert {path for path, _ in doctor.node.requests} == {
        "/api/version", "/api/tags", "/api/ps", "/api/show"}


def test_doctor_and_init_name_the_same_model_to_pull(doctor, run_here, monkeypatch):
    monkeypatch.setattr(sf.World, "total_gigabytes", lambda world: 21.4)  # a Mac of 20 GB
    doctor.fleet["nodes"]["local"] = doctor.fleet["nodes"].pop("mini")
    doctor.fleet["models"]["small"].update(node="local", ollama_model="gemma3:12b")
    doctor.node.models = {"gemma3:12b": {"capabilities": ["completion"], "context": 40960}}
    doctor.write()
    assert doctor.ask()["no-tools"] == "error"
    finding, = [finding for finding in doctor.answer["findings"] if finding["id"] == "no-tools"]
    env = {**doctor.env, "OLLAMA_HOST": f"127.0.0.1:{doctor.node.port}"}
    said = run_here("init", "--output", "other.yaml", env=env).stdout
    pull, = set(re.findall("`(ollama pull [^`]+)`", said))
    assert pull == "ollama pull gpt-oss:20b"
    assert finding["fix"] == ("`ollama pull gpt-oss:20b` on local, and write "
                              '`ollama_model: gpt-oss:20b` in models.small')
    doctor.node.models["gpt-oss:20b"] = {"capabilities": ["completion", "tools"]}
    doctor.ask()
    finding, = [finding for finding in doctor.answer["findings"] if finding["id"] == "no-tools"]
    assert finding["fix"] == 'write `ollama_model: gpt-oss:20b` in models.small'  # which is there


def test_doctor_without_a_config_checks_the_machine(run_here, tmp_path):
    done = run_here("doctor", env={"HOME": tmp_path, "PATH": "/nowhere"})
    assert done.returncode == 1
    assert "Claude Code is not on the PATH" in done.stdout
    assert done.stdout.splitlines()[-1] == \
        "Not ready: 1 error, 1 warning. First: subagent-fleet init; or cd to the project that has one"


def test_doctor_with_an_invalid_config_shows_the_line(doctor):
    doctor.fleet["models"]["small"]["timeot"] = 1
    doctor.write()
    done = doctor.run()
    assert done.returncode == 1 and "^^^" in done.stdout
    assert "fleet.json:1:250: did you mean `timeout`?" in done.stdout.splitlines()[-1]
    assert doctor.ask() == {"unknown-key": "error"}


def test_doctor_sees_nodes_routes_and_settings_as_they_are(doctor):
    doctor.node.models["qwen3:8b"].update(capabilities=["completion"], context=16384)
    doctor.node.loaded = {"qwen3:8b": 4096}
    local = doctor.path / ".claude" / "settings.local.json"
    local.write_text('{"env": {"ANTHROPIC_BASE_URL": "http://127.0.0.1:1"}}', encoding="utf-8")
    assert doctor.ask() == {
        "no-tools": "error", "context-untrained": "warning", "context-short": "warning",
        "settings-override": "error"}
    assert doctor.status == 1


def test_doctor_weighs_models_with_their_context_as_the_node_tells(doctor, run_here):
    known = {"general.architecture": "llama", "llama.context_length": 40960, "llama.block_count": 32,
             "llama.embedding_length": 4096, "llama.attention.head_count": 32,
             "llama.attention.head_count_kv": 8}
    doctor.node.models["qwen3:8b"]["size"] = 5 * 10**9
    doctor.node.answers["/api/show"] = (200, {"model_info": known, "capabilities": ["completion", "tools"]})
    doctor.fleet["nodes"]["mini"]["cache_gb"] = 64
    doctor.fleet["nodes"]["mini"]["memory_gb"] = 10  # 5.5 GB and 32768 times 128 KiB: 9.8
    doctor.write()
    assert doctor.ask() == {}
    status = json.loads(run_here("status", "--json", env=doctor.env).stdout)
    assert status["nodes"][0]["models"][0]["token_bytes"] == 131072
    doctor.fleet["nodes"]["mini"]["memory_gb"] = 9
    doctor.write()
    assert doctor.ask() == {"model-too-large": "warning"}
    finding, = [f for f in doctor.answer["findings"] if f["id"] == "model-too-large"]
    assert finding["fix"] == sf.FIND_ROOM  # the main one keeps 32768
    doctor.fleet["models"]["small"]["context"] = 40960
    doctor.fleet["nodes"]["mini"]["memory_gb"] = 10
    doctor.write()
    assert run_here("generate", env=doctor.env).returncode == 0
    assert doctor.ask() == {"model-too-large": "warning"}
    finding, = [f for f in doctor.answer["findings"] if f["id"] == "model-too-large"]
    assert finding["fix"] == 'write `context: 33792`'
    doctor.fleet["models"]["small"]["context"] = 33792
    doctor.write()
    assert run_here("generate", env=doctor.env).returncode == 0
    assert doctor.ask() == {}


def test_doctor_fix_does_what_is_safe_and_says_each(doctor):
    environment, agent = doctor.path / ".env.subagent-fleet", doctor.path / ".claude/agents"
    environment.chmod(0o644)
    doctor.fleet["models"]["small"]["context"] = 40000
    doctor.write()
    before = environment.read_bytes()
    key = sf.Workspace(sf.World(), str(doctor.path)).kept_key(sf.load_fleet(doctor.path / "fleet.json"))
    assert doctor.ask() == {"env-readable": "error", "files-updated": "warning"}
    assert environment.stat().st_mode & 0o777 == 0o644 and environment.read_bytes() == before
    assert doctor.ask("--fix") == {} and doctor.status == 0
    assert environment.stat().st_mode & 0o777 == 0o600
    assert b"40000" in environment.read_bytes() != before
    assert len(doctor.answer["fixed"]) == 3  # its permissions, its text, litellm_config.yaml
    (agent / "planner.md").write_text("mine")
    doctor.fleet["models"]["small"]["context"] = 32768
    doctor.write()
    done = doctor.run("--fix")
    assert done.stdout.startswith("fixed: ") and done.returncode == 0
    assert (agent / "planner.md").read_text() == "mine"
    assert "planner.md: changed by hand" in done.stdout
    assert "fixed" not in doctor.run("--fix").stdout
    assert len(key) > 40 and key not in done.stdout + json.dumps(doctor.answer)


@pytest.mark.parametrize("name", ["fleet.json", "fleet.yaml"])
def test_doctor_fixes_one_agent_edited_and_one_missing_as_it_says(doctor, run_here, name):
    (doctor.path / "fleet.json").unlink()
    write = json.dumps if name == "fleet.json" else sf.dump_yaml
    (doctor.path / name).write_text(write(doctor.fleet), encoding="utf-8")
    assert run_here("generate", env=doctor.env).returncode == 0  # which names its source
    doctor.fleet["agents"] = {"planner": dict(AGENT["planner"]),
                              "reviewer": {"model": "small", "description": "Review."}}
    (doctor.path / name).write_text(write(doctor.fleet), encoding="utf-8")
    planner = doctor.path / ".claude/agents/planner.md"
    mine = planner.read_text("utf-8").partition("\n---\n")[0] + "\n---\n\nPlan: \"well\".\n\n\tTab.\n"
    planner.write_text(mine, encoding="utf-8")
    assert doctor.ask() == {"files-created": "warning", "files-edited": "info"}
    assert run_here("generate", env=doctor.env).returncode == 3  # what was advised before

    fixes = {finding["id"]: finding["fix"] for finding in doctor.answer["findings"]}
    assert fixes["files-created"] == "subagent-fleet doctor --fix"
    assert doctor.ask("--fix") == {"files-edited": "info"}
    assert doctor.answer["fixed"] == [".claude/agents/reviewer.md: created"]
    assert planner.read_text("utf-8") == mine and fixes["files-edited"] == "subagent-fleet generate --diff"
    doctor.fleet["agents"]["planner"]["prompt"] = mine.partition("\n---\n\n")[2]
    (doctor.path / name).write_text(write(doctor.fleet), encoding="utf-8")
    done = run_here("generate", env=doctor.env)
    assert done.returncode == 0 and planner.read_text("utf-8") == mine
    assert doctor.ask() == {}


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


@pytest.mark.slow
def test_doctor_ends_in_time_whatever_hangs(doctor):
    with socket.socket() as silent:  # a gateway's port and a node that take and never answer
        silent.bind(("127.0.0.1", doctor.fleet["project"]["gateway"]["port"]))
        silent.listen(16)
        doctor.fleet["nodes"]["mini"]["endpoint"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        doctor.write()
        for name in ("claude", "git", "lsof", "ss"):
            write_program(doctor.path / "venv" / "bin", name, "sleep 60")
        began = time.monotonic()
        found = doctor.ask("--timeout", "1")
    assert time.monotonic() - began < 6  # what hangs would take 60; a busy machine is no failure
    assert found["node-offline"] == "error"


def test_doctor_knows_its_own_gateway(doctor):
    serving = subprocess.Popen([sys.executable, PROGRAM, "serve"], cwd=str(doctor.path),
                               stdout=subprocess.PIPE, env=clean_environment(**doctor.env))
    try:
        assert b"Serving" in serving.stdout.readline()
        doctor.node.loaded = {"qwen3:8b": 32768}
        assert doctor.ask() == {} and doctor.answer["verdict"] == "Ready: everything is in order."
        assert "gateway-up" in [finding["id"] for finding in doctor.answer["findings"]]
        doctor.env["LITELLM_MASTER_KEY"] = "sk-of-another-fleet-9"
        assert doctor.ask() == {"gateway-other": "error"}
    finally:
        serving.kill()
        serving.communicate()


@pytest.mark.parametrize("provider", ["builtin", "litellm"])
def test_a_litellm_serves_where_the_fleet_file_says_so(doctor, fake_node, provider):
    node = fake_node(port=doctor.fleet["project"]["gateway"]["port"])
    node.answers["/health/liveliness"] = 200, "I'm alive!"
    doctor.fleet["project"]["gateway"]["provider"] = provider
    doctor.write()
    found = doctor.ask()
    assert ("port-taken" in found) == (provider == "builtin")
    assert not any(b"uthorization" in bytes(str(heard), "utf-8") for heard in node.requests)


def test_doctor_port_that_is_taken_is_an_error(doctor, fake_node):
    doctor.fleet["project"]["gateway"]["port"] = fake_node().port
    doctor.write()
    assert doctor.ask()["port-taken"] == "error"


# -- worker --

@pytest.fixture
def worker(monkeypatch):
    """Type `worker` in a world; give what it lays out."""
    def tell(world):
        told = []
        monkeypatch.setattr(sf, "format_worker", lambda report, look: told.append(report) or "")
        sf.main(["worker", "--timeout", "1"], world)
        return told[0]
    return tell


@pytest.mark.parametrize("platform,programs,online,system", [
    ("darwin", ("ollama",), True, "darwin"), ("darwin", (), False, "darwin"),
    ("linux", ("systemctl", "ollama"), True, "systemd"), ("linux", ("systemctl",), False, "systemd"),
    ("linux", ("ollama",), True, "shell"), ("freebsd14", (), False, "shell"),
    ("linux", ("systemctl", "docker"), True, "docker")])
def test_system_decides_the_setup(monkeypatch, worker, platform, programs, online, system):
    world = sf.World()
    monkeypatch.setattr(world, "which", lambda name: name if name in programs else None)
    monkeypatch.setattr(sf.sys, "platform", platform)
    monkeypatch.setattr(sf, "probe_nodes", lambda _, nodes, __: {
        key: sf.NodeState(node.name, node.endpoint, "" if online else "refused", provider=node.provider)
        for key, node in nodes.items()})
    monkeypatch.setattr(sf, "format_setup", lambda system, *_: system)
    assert worker(world)["setup"] == system


@pytest.mark.parametrize("system", sorted(sf.WORKER_SETUPS))
def test_setup_names_every_setting_and_how_to_start(system):
    state = replace(LOCAL, endpoint="http://127.0.0.1:12000")
    text = sf.format_setup(system, replace(state, models=(GOOD_MODEL, replace(GOOD_MODEL, name="qwen3:4b"))), REACHED)
    for name, value in sf.WORKER_SETTINGS.items():
        assert name in text and value.format(port=12000, models=2) in text
    assert {"darwin": "Expose Ollama to the network", "systemd": "systemctl edit ollama",
            "shell": "ollama serve",
            "docker": "-p 192.168.1.50:12000:12000 ollama/ollama"}[system] in text
    assert all(len(line) <= 100 for line in text.splitlines()) and "{" not in text


def test_setup_on_a_mac_says_that_launchctl_is_lost():
    assert "lost when the Mac restarts" in sf.format_setup("darwin", LOCAL, REACHED)


def test_worker_sees_itself_only_when_it_listens_beyond_loopback(worker, fake_node, in_lan):
    closed, opened = fake_node({"qwen3:8b": {}}), fake_node({"qwen3:8b": {}}, host="0.0.0.0")

    def ask(node):
        answer = worker(world_with(PATH="/nowhere", OLLAMA_HOST=f"0.0.0.0:{node.port}"))
        assert answer["ollama"].online and answer["ollama"].version == "0.32.15"
        return answer

    paste(ask(closed)["fleet"])
    assert [found.slug for found in ask(closed)["findings"]] == ["closed-node"]
    answer = ask(opened)
    assert [one["address"] for one in answer["addresses"] if one["open"]] == [in_lan]
    assert "closed-node" not in [found.slug for found in answer["findings"]]
    assert paste(answer["fleet"]).nodes.popitem()[1].endpoint == f"http://{in_lan}:{opened.port}"


def test_worker_text_ends_with_what_to_paste(run_cli, fake_node, in_lan):
    node = fake_node({"qwen3:8b": {}})
    done = run_cli("worker", env={"OLLAMA_HOST": f"127.0.0.1:{node.port}"})
    assert (done.returncode, done.stderr) == (0, "")
    block = done.stdout[done.stdout.index("\nnodes:"):]
    paste(sf.parse_yaml(block))
    assert "\nOn the machine that has the fleet, type `subagent-fleet add vm=" in done.stdout
    assert "public internet" in done.stdout
    assert "0.32.15 runs here with qwen3:8b\n" in done.stdout


def test_worker_without_ollama_says_where_to_get_it(run_here, in_lan):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        env = {"OLLAMA_HOST": f"127.0.0.1:{taken.getsockname()[1]}", "PATH": "/nowhere"}
        done = run_here("worker", env=env)
    assert done.returncode == 1
    assert "install it from ollama.com/download" in done.stdout or sys.platform == "darwin"


def test_worker_tells_only_the_addresses_that_others_can_use(fake_node, monkeypatch, worker):
    world = world_with(PATH="/nowhere", OLLAMA_HOST=f"http://0.0.0.0:{fake_node().port}")
    monkeypatch.setattr(world, "own_names", lambda: ("here", (
        "192.0.2.7", "127.0.0.1", "169.254.1.1", "100.101.102.103")))
    ask = sf.probe_nodes
    monkeypatch.setattr(sf, "look_for_servers", lambda *words: [])
    monkeypatch.setattr(sf, "probe_nodes", lambda world, nodes, seconds: ask(world, {
        name: replace(node, endpoint="http://127.0.0.1:9") if index else node
        for index, (name, node) in enumerate(nodes.items())}, seconds))
    told = worker(world)
    assert [one["address"] for one in told["addresses"]] == ["192.0.2.7", "100.101.102.103"]
    assert told["ollama"].online


def test_own_addresses_are_addresses_of_this_machine():
    for address in sf.World().own_names()[1]:
        with socket.socket() as listener:
            listener.bind((address, 0))
