"""How the program starts: what lives long does so from bytecode, and stays small."""
import contextlib
import http.client
import json
import marshal
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time

import pytest

import subagent_fleet as sf
from gateway_rig import Node, says
from tools import PROC, SCRIPT, clean_environment, free_port

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="exec as POSIX has it")]
FLEET = """\
project: {{name: shop, gateway: {{port: {port}}}}}
nodes: {{mini: {{endpoint: "http://127.0.0.1:9"}}}}
models: {{m: {{node: mini, ollama_model: "qwen3:8b", litellm_alias: x, context: 32768}}}}
agents: {{implementer: {{model: m, description: Implements.}}}}
"""


@pytest.fixture
def project(tmp_path, run_cli):
    place = tmp_path / "project"
    place.mkdir()
    (place / "fleet.yaml").write_text(FLEET.format(port=free_port()))
    (tmp_path / "home").mkdir(exist_ok=True)
    assert run_cli("generate", cwd=place).returncode == 0
    return place


def environment(project, **more):
    return clean_environment(HOME=project.parent / "home", XDG_CACHE_HOME="", **more)


@contextlib.contextmanager
def serving(project, *command, **more):
    """Start `serve`; give the process once it serves."""
    process = subprocess.Popen([*map(str, command), "serve"], cwd=str(project),
                               env=environment(project, **more), stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        said = process.stdout.readline()
        assert said.startswith(b"Serving shop at http://127.0.0.1:"), said + process.stdout.read()
        yield process
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(20) == 130 and b"Traceback" not in rest, rest
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def kept(project):
    return sorted((project.parent / "home/.cache/subagent-fleet/bytecode").glob("*"))


def resident_megabytes(process):
    text = (PROC / f"{process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1024


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_serve_is_small_however_it_was_started(project, tmp_path):
    copy = tmp_path / "it's my fleet"
    shutil.copy(SCRIPT, copy)
    copy.chmod(0o755)
    (tmp_path / "python3").symlink_to(sys.executable)
    path = f"{tmp_path}:{os.environ['PATH']}"
    for command, more in (((sys.executable, SCRIPT), {}), ((copy,), {"PATH": path}),
                          ((sys.executable, "-m", "subagent_fleet"), {"PYTHONPATH": SCRIPT.parent})):
        for _ in range(2):  # the first may have compiled it
            with serving(project, *command, **more) as process:
                time.sleep(0.3)
                megabytes = resident_megabytes(process)
        assert megabytes <= 30 or "-m" in command, (command, megabytes)
        # A module's bytecode is Python's own to keep, and the tests forbid that.


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_large_request_leaves_no_memory_behind(project):
    node = Node(says("seen"))
    text = (project / "fleet.yaml").read_text().replace("http://127.0.0.1:9", node.endpoint)
    (project / "fleet.yaml").write_text(text)
    (key_file,) = project.glob(".env*")
    key = re.search("sk-[0-9A-Za-z]+", key_file.read_text())[0]
    port = int(re.search("port: ([0-9]+)", text)[1])
    image = {"type": "base64", "media_type": "image/png", "data": "iVBO" * (5 * 1024 * 1024)}
    body = json.dumps({"model": "x", "max_tokens": 9, "messages": [
        {"role": "user", "content": [{"type": "image", "source": image}]}]})
    with serving(project, sys.executable, SCRIPT) as process:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        client.request("POST", "/v1/messages", body, {"Authorization": f"Bearer {key}"})
        answer = client.getresponse()
        assert answer.status == 200 and b"seen" in answer.read()
        time.sleep(3)
        assert resident_megabytes(process) <= 40
        client.close()
    node.close()


def test_bytecode_is_only_its_owners_and_made_once(project):
    with serving(project, sys.executable, SCRIPT):
        pass
    (code,) = kept(project)
    assert stat.S_IMODE(code.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(code.stat().st_mode) == 0o600
    before = code.stat().st_mtime_ns
    with serving(project, sys.executable, SCRIPT):
        pass
    assert kept(project) == [code] and code.stat().st_mtime_ns == before


def test_another_version_is_never_started_from_this_ones_bytecode(project, tmp_path):
    with serving(project, sys.executable, SCRIPT):
        pass
    text = SCRIPT.read_text("utf-8")
    for number in range(6):
        (tmp_path / "fleet.py").write_text(text + f"# {number}\n", "utf-8")
        with serving(project, sys.executable, tmp_path / "fleet.py"):
            pass
    assert len(kept(project)) == 4  # the versions that were used last


def test_bytecode_that_somebody_else_may_have_written_is_not_run(project, tmp_path):
    with serving(project, sys.executable, SCRIPT):
        pass
    (code,) = kept(project)
    whole = code.read_bytes()
    mine = marshal.dumps(compile(f"open({str(tmp_path / 'ran')!r}, 'w')", "x", "exec"))
    for planted, mode in ((mine, 0o600), (whole[:32] + mine, 0o600), (whole[:-9], 0o600), (whole, 0o666)):
        code.write_bytes(planted)
        code.chmod(mode)
        with serving(project, sys.executable, SCRIPT):
            pass
        assert code.read_bytes() == whole and stat.S_IMODE(code.stat().st_mode) == 0o600
    assert not (tmp_path / "ran").exists()


def test_a_home_that_cannot_be_written_is_no_matter(project):
    (project.parent / "home/.cache").write_text("a file\n")
    with serving(project, sys.executable, SCRIPT):
        pass
    assert kept(project) == []


def test_nothing_of_the_directory_is_imported(project, tmp_path):
    for name in ("marshal", "sitecustomize", "usercustomize", "threading", "subagent_fleet"):
        (project / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with serving(project, sys.executable, SCRIPT):
        pass
    assert len(kept(project)) == 1 and not (tmp_path / "ran").exists()


# -- install --

@pytest.fixture
def install(tmp_path, run_cli, monkeypatch):
    """Type `install` as somebody with an empty home, whose bytecode is where it usually is."""
    monkeypatch.setattr(sys, "pycache_prefix", None)
    (tmp_path / "home").mkdir(exist_ok=True)

    def run(*words, path="", shell=""):
        env = {"HOME": tmp_path / "home", "XDG_CACHE_HOME": "", "XDG_DATA_HOME": "", "SHELL": shell,
               "PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}
        return run_cli("install", *words, env=env)
    return run


def below(home):
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())


def test_installed_it_is_a_command_and_removed_nothing_is_left(install, tmp_path):
    home = tmp_path / "home"
    command = home / ".local/bin/subagent-fleet"
    done = install()
    assert done.returncode == 0 and f"Installed: {command} (" in done.stdout
    assert f"\n  export PATH={command.parent}:$PATH\n" in done.stdout
    copy = home / ".local/share/subagent-fleet/subagent_fleet.py"
    assert copy.read_bytes() == SCRIPT.read_bytes()
    assert len(command.read_text().splitlines()) == 2 and os.access(command, os.X_OK)
    assert list((copy.parent / "__pycache__").glob("*.pyc")), "it starts from bytecode"

    env = clean_environment(HOME=home, PATH=f"{command.parent}:{os.environ['PATH']}")
    (tmp_path / "marshal.py").write_text("open('ran', 'w')\n")
    done = subprocess.run(["subagent-fleet", "validate"], cwd=str(tmp_path), env=env,
                          capture_output=True)
    assert done.returncode == 1 and b"\n  fix: subagent-fleet init; or cd" in done.stderr
    short = subprocess.run(["flt", "nonsense"], cwd=str(tmp_path), env=env, capture_output=True)
    assert short.returncode == 2 and short.stderr.endswith(b"\n  fix: subagent-fleet --help\n")
    assert not (tmp_path / "ran").exists()

    assert install(path=str(command.parent)).stdout.count("\n") == 1  # again; now it is found
    said = install("--remove").stdout
    assert re.match(r"Removed \d files\.\nNothing is left outside of your projects\.\nClaude Code "
                    "keeps its own records of sessions", said), said
    assert below(home) == []


@pytest.mark.parametrize("shell, file", [
    ("/bin/zsh", "~/.zshrc"), ("/usr/bin/bash", "~/.bashrc"), ("/opt/fish", "~/.config/fish/config.fish"),
    ("/bin/tcsh", "your shell's start file"), ("", "your shell's start file")])
def test_install_names_the_start_file_of_the_shell(install, shell, file):
    said = install(shell=shell).stdout
    line = "fish_add_path" if shell.endswith("fish") else "export PATH="
    assert f"Type this line now, and put it into {file} for new terminals:\n  {line}" in said


def test_removed_all_is_gone_that_was_written_outside_of_projects(install, run_cli, project, tmp_path):
    """Whatever this program keeps for a user: command, copy, bytecode, skills, trust, tasks."""
    home = tmp_path / "home"
    env = {"HOME": home, "XDG_CACHE_HOME": "", "XDG_DATA_HOME": "", "XDG_STATE_HOME": ""}
    mine = home / ".claude/skills/mine/SKILL.md"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    assert install().returncode == 0
    assert run_cli("skills", "install", "--user", env=env).returncode == 0
    assert run_cli("trust", "--yes", cwd=project, env=env).returncode in (0, 2)
    for name in ("state/subagent-fleet/trusted.json", "state/subagent-fleet/repositories.json",
                 "state/subagent-fleet/repositories.json.lock", "state/subagent-fleet/exam/app-1.json"):
        (home / ".local" / name).parent.mkdir(parents=True, exist_ok=True)
        (home / ".local" / name).write_text("{}")
    (home / ".cache/subagent-fleet/bytecode").mkdir(parents=True, exist_ok=True)
    (home / f".cache/subagent-fleet/bytecode/{'0b' * 32}.cpython-311-30b07f0").write_bytes(b"x")
    assert len(below(home)) > 10

    worktree = home / ".local/state/subagent-fleet/worktrees/repo-1/task"
    worktree.mkdir(parents=True)
    repository = tmp_path / "it's mine"
    repository.mkdir()
    (worktree / ".git").mkdir()
    (worktree / ".git/subagent-fleet.task").write_text(f"0123456789abcdef\n{repository}\n")
    (worktree.parent / "lost").mkdir()
    done = install("--remove")
    assert "Kept: the command, and 2 worktrees of tasks. Type:\n" in done.stdout
    assert f"  ls -la {worktree.parent / 'lost'}   # its repository is gone" in done.stdout
    line, = re.findall("(?m)^  (cd .*) task tidy$", done.stdout)
    path = f"{home}/.local/bin:{os.environ['PATH']}"
    told = subprocess.run(["sh", "-c", f"{line.partition('&&')[0]} && pwd && subagent-fleet --version"],
                          env=clean_environment(HOME=home, PATH=path), capture_output=True)
    assert told.stdout.decode().startswith(f"{repository}\n"), "what it says to type is still there"
    kept = below(home)
    assert kept[0] == ".claude/skills/mine/SKILL.md"
    assert ".local/state/subagent-fleet/trusted.json" in kept and not any(".cache" in path for path in kept)
    shutil.rmtree(worktree.parent)
    said = install("--remove").stdout
    assert "Nothing is left" in said and "`python3 subagent_fleet.py clean`" in said
    assert below(home) == [".claude/skills/mine/SKILL.md"]
    left = sorted(str(path.relative_to(home)) for path in home.rglob("*subagent*"))
    assert left == [], left


def test_install_remove_knows_every_file_that_is_kept_for_a_user():
    source = SCRIPT.read_text(encoding="utf-8")
    named = re.findall(r'user_place\("(\w+)", "([\w.]+)"\)', source)
    assert len(named) > 4
    for kind, name in named:
        assert name in sf.USER_FILES[kind] or name in sf.USER_DIRECTORIES, name


def test_remove_takes_nothing_that_this_program_did_not_write(install, tmp_path):
    """Somebody's checkout in its place, files beside its own, links out of it."""
    home = tmp_path / "home"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    theirs = [".local/share/subagent-fleet/NOTES.md", ".local/share/subagent-fleet/tests/mine.py",
              ".local/share/subagent-fleet/__pycache__/mine.cpython-311.pyc",
              ".local/state/subagent-fleet/notes.json", ".cache/subagent-fleet/bytecode/notes.txt",
              ".cache/subagent-fleet/wheel/x"]
    assert install().returncode == 0
    for name in theirs:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("mine")
    (elsewhere / "x.json").write_text("mine")
    (home / ".local/state/subagent-fleet/exam").symlink_to(elsewhere)
    said = install("--remove").stdout
    for kind in ("share", "state"):
        assert f"Kept: {home}/.local/{kind}/subagent-fleet: this program did not write" in said
    assert below(home) == sorted(theirs) and (elsewhere / "x.json").read_text() == "mine"
    assert "Nothing is left" not in said

    (home / ".local/share").rename(home / ".local/other")
    (home / ".local/share").mkdir()
    (home / ".local/other/subagent-fleet/subagent_fleet.py").write_text("theirs")
    (home / ".local/share/subagent-fleet").symlink_to(home / ".local/other/subagent-fleet")
    assert install("--remove").returncode == 0
    assert (home / ".local/other/subagent-fleet/subagent_fleet.py").read_text() == "theirs"


@pytest.mark.parametrize("word, fix", [
    ("uninstall", "install --remove"), ("remove", "delete the entry of a machine or model from fleet.yaml")])
def test_words_for_taking_away_lead_to_what_does(run_cli, word, fix):
    done = run_cli(word, "mini")
    assert done.returncode == 2 and f"\n  fix: {fix}" in done.stderr.replace("subagent-fleet ", "")


def test_the_short_name_is_left_to_who_has_it(install, tmp_path):
    theirs = tmp_path / "home/.local/bin/flt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("a filter\n")
    assert "flt" not in install().stdout and theirs.read_text() == "a filter\n"
    install("--remove")
    assert theirs.read_text() == "a filter\n"
    elsewhere = tmp_path / "bin/flt"
    elsewhere.parent.mkdir()
    theirs.replace(elsewhere)
    elsewhere.chmod(0o755)
    assert "flt" not in install(path=str(elsewhere.parent)).stdout and not theirs.exists()
    assert "`flt` is short for it" in install().stdout and theirs.exists()
    assert "`flt` is short for it" in install(path=str(theirs.parent)).stdout  # again
    install("--remove")
    assert not theirs.exists()


def test_install_replaces_nothing_of_anybody_else(install, tmp_path):
    command = tmp_path / "home/.local/bin/subagent-fleet"
    command.parent.mkdir(parents=True)
    for make in (lambda: command.write_text("pip's\n"), lambda: command.symlink_to("elsewhere")):
        make()
        for words in ((), ("--remove",)):
            done = install(*words)
            assert done.returncode == 3 and "in-the-way" not in done.stderr, done.stderr
            assert done.stderr.endswith(f"  fix: mv {command} {command}.old\n")
        command.unlink()
    assert below(tmp_path / "home") == []


def test_installed_serve_is_small(install, project):
    assert install().returncode == 0
    command = project.parent / "home/.local/bin/subagent-fleet"
    with serving(project, command, PATH=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}") as process:
        time.sleep(0.3)
        if sys.platform.startswith("linux"):
            assert resident_megabytes(process) <= 30


# What the program imports, but for what Python itself has before, or needs for `-m`.
MODULES = {*re.findall(r'(?m)^    \w+ = _Late\("(\w+)"\)$', SCRIPT.read_text(encoding="utf-8")),
           "marshal", "tempfile"} - {"os", "stat", "abc"}
FOR_M = {"argparse", "hashlib", "json", "shlex", "shutil", "socket"}
TRAP = "open('{}', 'a').write(__name__ + ' ')\n"


@pytest.mark.parametrize("start", [
    "{python} - < subagent_fleet.py", "{python} subagent_fleet.py", "{python} -m subagent_fleet",
    "PYTHONPATH=:/nowhere {python} ../subagent_fleet.py", "PYTHONPATH=$PWD {python} ../subagent_fleet.py",
    "cd .. && {python} project/subagent_fleet.py", "{installed}", "PYTHONPATH=: {installed}"])
def test_nothing_is_imported_from_where_it_is_started(project, install, tmp_path, start):
    assert install().returncode == 0
    mark = tmp_path / "ran"
    for place in (tmp_path, project):
        shutil.copy(SCRIPT, place / "subagent_fleet.py")
    assert len(MODULES) > 25 and MODULES >= FOR_M
    for name in FOR_M if "-m" in start else MODULES:
        (project / f"{name}.py").write_text(TRAP.format(mark))
    start = start.format(python=sys.executable,
                         installed=f"{sys.executable} {tmp_path}/home/.local/bin/subagent-fleet")
    program, _, redirect = start.partition(" <")
    config = project / "fleet.yaml"
    line = f"{program} validate --config {config}" + (f" < {redirect}" if redirect else "")
    done = subprocess.run(["sh", "-c", line], cwd=str(project), env=environment(project),
                          capture_output=True)
    assert (done.returncode, done.stdout) == (0, f"{config} is valid.\n".encode()), done.stderr
    assert not mark.exists(), mark.read_text()
