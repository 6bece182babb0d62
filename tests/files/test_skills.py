"""What assistants are taught: pages whose every command is typed here, and where they are put."""
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

import subagent_fleet as sf
from tools import PROGRAM, ROOT, clean_environment, free_port

MASK = re.compile(r"\b[0-9a-f]{64}\b")
FLEET = """\
project: {{name: shop, gateway: {{port: {port}}}}}
nodes: {{mini: {{endpoint: "{endpoint}", mac: "02:00:00:00:00:01"}}}}
models: {{m: {{node: mini, ollama_model: "qwen3:8b", litellm_alias: x, context: 32768}}}}
agents: {{implementer: {{model: m, description: Implements.}}}}
"""
TASKS = "tasks: {survey: {prompt: Say hi., check: 'true'}}\n"
# What each command says there, by its first words: exit status, and what its output holds.
ROUTE = "implementer -> mini -> qwen3:8b"
SAYS = {
    "--version": (0, r"subagent-fleet \d"), "add": (1, "`mini`"), "bench": (0, r"qwen3:8b +mini"),
    "demo": (0, "sim-mini"), "doctor": (0, r"(?s)Machines.*\n0 of 1 model ready"),
    "discover --scan": (0, "Asked 0 addresses"), "doctor --json": (0, '"schema": "subagent-fleet/doctor/2"'),
    "generate": (0, r"litellm_config.yaml +unchanged"),
    "generate --target": (0, r"codex/config.toml +created"), "help config": (0, "master_key_env:"),
    "init": (0, r"Created fleet\.yaml"), "launch": (1, r"http://127\.0\.0\.1:\d"),
    "logs": (0, "requests.jsonl"), "recommend": (0, r"implementer +qwen3:8b"),
    "run": (1, r"(?m)^survey .*its process ended 5 times"), "run --detach": (0, "run"),
    "schema": (0, '"[$]schema"'),
    "skills install": (0, r"subagent-fleet-setup/SKILL.md +created"),
    "status": (0, ROUTE), "status --check": (1, ROUTE), "task answer": (1, "parser"),
    "task diff": (1, "parser|jwt-a"), "task land": (0, "Nothing has landed"), "task log": (0, "run/tasks/parser"),
    "task retry": (1, r"parser +waiting"), "task say": (0, r"parser .*Leave the docs alone"),
    "task stop": (0, r"parser +stopped"), "task tidy": (0, "(?i)tidy"),
    "tasks": (0, r"jwt-a +waiting"), "tasks jwt": (2, "jwt-a"), "tasks parser --json": (0, '"state": "waiting"'),
    "trace": (0, "session"), "trace --audit": (1, "session"),
    "validate": (0, "fleet.yaml is valid"), "warmup": (0, r"qwen3:8b +ok"),
    "worker": (1, "OLLAMA_HOST=0.0.0.0:9")}
# What goes on until it is ended; and what it has said by then.
LASTS = {"up": (0, r"mini"), "serve": (130, r"Serving .*http://127\.0\.0\.1:\d"),
         "ui --no-open": (130, r"http://127\.0\.0\.1:\d+/\?code="),
         "status --watch 2": (130, ROUTE), "logs -f": (130, "")}
SLOW = {"bench", "demo", "run", "worker"}  # half a second and more
STUB = "#!/bin/sh\nexit 0\n"


def commands_of(text):
    """Every command of ours in a page: lines of its shell blocks, and what stands in backticks."""
    found = []
    blocks = re.findall(r"(?s)```sh\n(.*?)```", text)
    rest = re.sub(r"(?s)```.*?```", "", text)
    lines = [re.sub(r"  +#.*", "", line) for block in blocks for line in block.splitlines()
             if "python3 -c" not in line]
    for line in lines:
        found += [part.strip() for part in re.split(r"\|\||&&", line)]
    found += [re.sub(r"\s+", " ", words) for words in re.findall(r"`([^`]+)`", rest)]
    ours = [re.match(r"(?:subagent-fleet|python3 subagent_fleet\.py) (.+)", line) for line in found]
    return [shlex.split(match[1]) for match in ours if match]


EVERY = [(name, words) for name, skill in sf.SKILLS.items()
         for words in commands_of(skill.text)]


def test_every_page_has_commands():
    assert {name for name, _ in EVERY} == set(sf.SKILLS) and len(EVERY) > 60


@pytest.mark.parametrize("name", list(sf.SKILLS))
def test_a_page_is_one_that_assistants_read(name):
    text = sf.SKILLS[name].text
    head = sf.read_agent(text)
    assert head.name == name and text.startswith("---\n") and re.fullmatch(r"[a-z0-9-]{1,64}", name)
    assert 40 < len(sf.SKILLS[name].summary) <= 1024
    lines = text.splitlines()
    assert len(lines) <= 120
    assert max(len(line) for line in lines[4:] if "https://" not in line) <= 100
    first = text.index("```")
    assert text[:first].count("\n") < 12, "examples come first"
    assert "## Never" in text and "key" in text.split("## Never")[1]
    assert "--show-key" not in re.sub(r"(?s)## Never.*", "", text)


@pytest.mark.parametrize("words", sorted({tuple(words) for _, words in EVERY}), ids=" ".join)
def test_a_command_of_a_page_is_understood(words):
    if words[0].startswith("-"):
        assert words == ("--version",)
        return
    called = sf.find_call(words)
    sf.parse_arguments(called.command, called.words)


@pytest.fixture
def place(tmp_path, fake_node, in_lan):
    """A project in git with a fleet and a task, and the programs that are launched as stubs."""
    project, programs = tmp_path / "project", tmp_path / "programs"
    project.mkdir()
    programs.mkdir()
    node = fake_node({"qwen3:8b": {"capabilities": ["completion", "tools"], "context": 40960}})
    (project / "fleet.yaml").write_text(FLEET.format(port=free_port(), endpoint=node.endpoint))
    (project / "tasks.yaml").write_text(TASKS)
    for name in ("claude", "opencode", "ip"):  # nobody's own network is asked
        (programs / name).write_text(STUB)
        (programs / name).chmod(0o755)
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@example.com", "commit", "-q",
                    "--allow-empty", "-m", "first"], cwd=str(project), check=True)
    return project


@pytest.fixture
def environ(place):
    return {"HOME": place.parent, "XDG_STATE_HOME": place.parent / "state",
            "OLLAMA_HOST": "127.0.0.1:9",
            "PATH": f"{place.parent / 'programs'}{os.pathsep}{os.defpath}"}


@pytest.fixture
def begun(place, run_cli, environ):
    """Bring the project to where a page's command is typed."""
    def begin(words):
        if words[0] in ("init", "demo"):
            (place / "fleet.yaml").unlink()
        else:
            assert run_cli("generate", cwd=place, env=environ).returncode == 0
        if words[0] in ("task", "tasks"):
            done = run_cli("task", "add", "parser:Say hi.", "jwt-a:Say ho.", cwd=place, env=environ)
            assert done.returncode == 0
        return [word.replace("192.168.1.50", "127.0.0.1:9") for word in words]
    return begin


def sayings(lasts):
    """Every command of a page that goes on, or ends, with what it says."""
    for words in sorted({tuple(words) for _, words in EVERY}):
        typed = " ".join(words)
        row = max((start for start in (*SAYS, *LASTS) if f"{typed} ".startswith(f"{start} ")),
                  key=len, default="")
        assert row, f"`{typed}` stands in a page: what does it say?"
        if (row in LASTS) == lasts:
            wanted = LASTS[row] if lasts else SAYS[row]
            is_slow = lasts or words[0] in SLOW
            yield pytest.param(words, *wanted, id=typed, marks=[pytest.mark.slow] * is_slow)


needs_shell = pytest.mark.skipif(os.name != "posix", reason="stubs are scripts of a shell")


@needs_shell
@pytest.mark.parametrize("words, status, told", list(sayings(lasts=False)))
def test_a_command_of_a_page_says_what_the_page_promises(
        place, begun, environ, run_cli, words, status, told):
    words = begun(words)
    if words[0] == "run":  # it leaves agents behind, one of them as a process of its own
        done = subprocess.run([sys.executable, "-I", "-S", PROGRAM, *words], cwd=str(place),
                              env=clean_environment(**environ), stdin=subprocess.DEVNULL,
                              capture_output=True, timeout=60, encoding="utf-8")
    else:
        done = run_cli(*words, cwd=place, env=environ)
    said = done.stdout + done.stderr
    assert re.search(told, said) and "this is a bug" not in said, said
    assert done.returncode == status, said
    if words[0] == "init":
        assert "endpoint:" in (place / "fleet.yaml").read_text("utf-8")
    if "--detach" in words:
        assert run_cli("task", "stop", "*", cwd=place, env=environ).returncode == 0


@needs_shell
@pytest.mark.parametrize("words, status, told", list(sayings(lasts=True)))
def test_a_command_of_a_page_goes_on_until_it_is_ended(place, begun, environ, words, status, told):
    words = begun(words)
    with open(place.parent / "said", "wb+") as log:
        process = subprocess.Popen([sys.executable, "-I", "-S", PROGRAM, *words], cwd=str(place),
                                   stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                   env=clean_environment(**environ), start_new_session=True)

        def said():
            return (place.parent / "said").read_text("utf-8")
        until = time.monotonic() + 30
        while not re.search(told, said()) or words[0] == "logs" and time.monotonic() < until - 29:
            assert time.monotonic() < until and process.poll() is None, said()
            time.sleep(0.02)
        if words[0] != "up":  # which ends with the program it has started
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == status, said()
    assert "Traceback" not in said() and "this is a bug" not in said()


# -- where they are put --

@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CLAUDE_CONFIG_DIR", raising=False)
    (tmp_path / "home").mkdir()

    def run(*words):
        status = sf.main(list(words))
        captured = capsys.readouterr()
        return status, captured.out, captured.err
    return run


def files_below(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*")
                  if path.is_file() and ".subagent-fleet" not in path.parts)


def test_all_skills_are_installed_for_every_program(run, tmp_path):
    assert run("skills", "install")[0] == 0
    names = ("operations", "runs", "setup")
    assert files_below(tmp_path) == [f".{place}/skills/subagent-fleet-{name}/SKILL.md"
                                     for place in ("agents", "claude") for name in names]
    for path in files_below(tmp_path):
        assert (tmp_path / path).read_text("utf-8") == sf.SKILLS[path.split("/")[2]].text


@pytest.mark.parametrize("words, paths", [
    (["--target", "claude-code", "--skill", "subagent-fleet-setup"],
     [".claude/skills/subagent-fleet-setup/SKILL.md"]),
    (["--target", "codex,qwen", "--skill", "runs"],
     [".agents/skills/subagent-fleet-runs/SKILL.md"]),
    (["--user", "--target", "qwen", "--skill", "subagent-fleet-runs"],
     ["home/.agents/skills/subagent-fleet-runs/SKILL.md"])])
def test_only_what_was_named_is_installed(run, tmp_path, words, paths):
    assert run("skills", "install", *words)[0] == 0
    assert files_below(tmp_path) == paths


@pytest.mark.parametrize("words, status, told", [
    (["skills", "install", "--target", "emacs"], 2, "unknown target `emacs`"),
    (["skills", "install", "--skill", "subagent-fleet-setpu"], 2, "subagent-fleet-setup"),
    (["skills", "install", "--skill", "subagent-fleet-bootstrap"], 2, "part of the plugin alone"),
    (["skills", "install", "--user", "--out", "x"], 2, "cannot be used together"),
    (["skills"], 2, "list, install"), (["skills", "lst"], 2, "did you mean `list`?"),
    (["plugins", "install", "--target", "opencode"], 2, "unknown target `opencode`")])
def test_what_is_typed_wrong_is_said(run, tmp_path, words, status, told):
    done = run(*words)
    assert done[0] == status and told in done[2]
    assert files_below(tmp_path) == []


def test_a_home_that_claude_code_does_not_use_is_said(run, monkeypatch, tmp_path):
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(tmp_path / "elsewhere"))
    done = run("skills", "install", "--user")
    assert done[0] == 3 and "CLAUDE_CONFIG_DIR" in done[2]


def test_what_a_person_changed_is_kept_unless_forced(run, tmp_path):
    run("skills", "install")
    mine = tmp_path / ".claude/skills/subagent-fleet-setup/SKILL.md"
    mine.write_text("mine\n")
    status, _, told = run("skills", "install")
    assert status == 3 and "--force" in told and mine.read_text() == "mine\n"
    listed = run("skills", "list")[1]
    assert re.search(r"\.claude/skills/subagent-fleet-setup/SKILL\.md +differs", listed)
    assert re.search(r"\.claude/skills/subagent-fleet-runs/SKILL\.md +installed", listed)

    assert run("skills", "install", "--force")[0] == 0
    assert mine.read_text("utf-8") == sf.SKILLS["subagent-fleet-setup"].text
    copies = list((tmp_path / ".subagent-fleet/backup").rglob("SKILL.md.*"))
    assert [copy.read_text() for copy in copies] == ["mine\n"]


def test_an_older_page_of_ours_is_updated_unasked(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sf.SKILLS, "subagent-fleet-setup",
                        sf.Skill("subagent-fleet-setup", "Older.", "older\n"))
    run("skills", "install")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert sf.main(["skills", "install"]) == 0
    page = tmp_path / ".agents/skills/subagent-fleet-setup/SKILL.md"
    assert page.read_text("utf-8") == sf.SKILLS["subagent-fleet-setup"].text


def test_generate_leaves_skills_and_clean_takes_them(run, tmp_path):
    run("init", "--offline")
    run("skills", "install")
    before = [path for path in files_below(tmp_path) if "skills" in path]
    run("generate")
    assert [path for path in files_below(tmp_path) if "skills" in path] == before
    assert run("clean", "--force")[0] == 0
    assert files_below(tmp_path) == ["fleet.yaml"]
    assert not (tmp_path / ".claude").exists() and not (tmp_path / ".agents").exists()


def test_the_list_says_where_each_is_installed(run):
    status, told, _ = run("skills", "list")
    assert status == 0 and re.search(r"^  .claude/skills/.* +absent$", told, re.M)
    for name in sf.installed_skills():
        assert name in told
    assert "absent" in told.splitlines()[1] and "skills install`" in told


# -- the marketplace --

@pytest.mark.parametrize("target, manifests", [
    ("claude-code", [".agents/plugins/subagent-fleet/.claude-plugin/plugin.json",
                     ".claude-plugin/marketplace.json"]),
    ("codex", [".agents/plugins/marketplace.json",
               ".agents/plugins/subagent-fleet/.codex-plugin/plugin.json"])])
def test_a_marketplace_is_written_for_one_program(run, tmp_path, target, manifests):
    assert run("plugins", "install", "--target", target, "--out", "m")[0] == 0
    paths = files_below(tmp_path / "m")
    assert [path for path in paths if path.endswith(".json")] == manifests
    assert len([path for path in paths if path.endswith("SKILL.md")]) == len(sf.SKILLS)
    for path in manifests:
        told = json.loads((tmp_path / "m" / path).read_text("utf-8"))
        assert told["name"] == "subagent-fleet"
        assert told.get("version", sf.__version__) == sf.__version__


def test_the_first_skill_fetches_this_version_and_knows_its_checksum(run, tmp_path):
    run("plugins", "install", "--out", "m")
    text = (tmp_path / "m" / sf.PLUGIN_PLACE / "skills/subagent-fleet-bootstrap/SKILL.md").read_text("utf-8")
    source = (ROOT / "subagent_fleet.py").read_bytes()
    assert MASK.findall(text) == [hashlib.sha256(source).hexdigest()]
    assert f"$releases/download/v{sf.__version__}/subagent_fleet.py" in text and "@" not in text.replace("@" + sf.__version__, "")


def test_its_check_accepts_this_file_and_no_other(run, tmp_path):
    run("plugins", "install", "--out", "m")
    text = (tmp_path / "m" / sf.PLUGIN_PLACE / "skills/subagent-fleet-bootstrap/SKILL.md").read_text("utf-8")
    line = re.search("(?ms)^python3 -c .*?\n```", text)[0][:-4]
    line = line.replace("python3", shlex.quote(sys.executable))
    right = (ROOT / "subagent_fleet.py").read_bytes()
    for content, told in (right, b"checksum right\n"), (right + b" ", b""), (b"other\n", b""):
        (tmp_path / "subagent_fleet.py").write_bytes(content)
        done = subprocess.run(["sh", "-c", line], cwd=str(tmp_path), capture_output=True)
        assert done.stdout == told


def test_without_its_file_there_is_no_checksum(run, monkeypatch, tmp_path):
    monkeypatch.setattr(sf.World, "own_source", lambda world: None)
    with pytest.raises(sf.FleetError) as caught:
        sf.cmd_plugins_install.run(sf.read_call(["plugins", "install", "--out", "m"]).options, sf.World())
    assert caught.value.finding.slug == "no-source" and not (tmp_path / "m").exists()


@pytest.mark.slow
def test_a_piped_program_knows_no_checksum(tmp_path):
    source = (ROOT / "subagent_fleet.py").read_bytes()
    done = subprocess.run([sys.executable, "-", "plugins", "install", "--out", "m"], input=source,
                          cwd=str(tmp_path), capture_output=True, env=clean_environment())
    assert done.returncode == 2 and b"piped" in done.stderr and not (tmp_path / "m").exists()


def test_this_repository_is_such_a_marketplace(run, tmp_path):
    """But for the checksum, which is the released file's: `.github/release.py` compares that."""
    run("plugins", "install", "--out", "m")
    for path in files_below(tmp_path / "m"):
        here = ROOT / path
        fix = "python3 subagent_fleet.py plugins install --out . --force"
        assert here.exists(), f"{path} is missing; {fix}"
        kept, wanted = here.read_text("utf-8"), (tmp_path / "m" / path).read_text("utf-8")
        assert MASK.sub("", kept) == MASK.sub("", wanted), f"{path} is older than the file; {fix}"
