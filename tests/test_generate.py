"""generate, clean, env and launch as black boxes; faults and kills in between."""
import contextlib
import errno
import io
import json
import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import sys
import time

import pytest
import subagent_fleet as sf

from conftest import SCRIPT, clean_environment, free_port, keys_near

PORT = free_port()
FLEET = """\
project:
  name: local-dev
  gateway: {port: PORT, provider: litellm}
nodes:
  big: {endpoint: "http://192.168.1.50:11434"}
  small: {endpoint: "http://192.168.1.51:11434"}
models:
  heavy: {node: big, ollama_model: "qwen3-coder:30b", litellm_alias: claude-sonnet-local,
          context: 65536, timeout: 600}
  light: {node: small, ollama_model: "qwen3:8b", litellm_alias: claude-haiku-local, context: 32768}
agents:
  planner: {model: light, description: Plans., tools: [Read, Grep, Glob]}
  implementer: {model: heavy, description: Writes.}
""".replace("PORT", str(PORT))
OTHER = FLEET.replace("context: 65536", "context: 131072").replace("Plans.", "Thinks.") \
    .replace("implementer:", "reviewer:")
FILES = ["litellm_config.yaml", ".claude/agents/planner.md", ".claude/agents/implementer.md",
         ".env.subagent-fleet"]
MANIFEST = ".subagent-fleet/manifest.json"
PLANNER, ENV = FILES[1], FILES[3]


@pytest.fixture
def fleet(tmp_path):
    """A directory with a fleet file."""
    (tmp_path / "fleet.yaml").write_text(FLEET, encoding="utf-8")
    return tmp_path


@pytest.fixture
def generated(fleet, quick):
    """A directory in which `generate` has run."""
    assert quick("generate").returncode == 0
    return fleet


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """Run a command as quick does, but in this process: starting one costs more than it does."""
    def run(*words, cwd=tmp_path, env=None):
        out, err = io.StringIO(), io.StringIO()
        with monkeypatch.context() as patch, contextlib.redirect_stdout(out), \
                contextlib.redirect_stderr(err):
            patch.chdir(cwd)
            patch.setattr(os, "environ", clean_environment(**(env or {})))
            status = sf.main([str(word) for word in words])
        done = subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())
        assert "Traceback" not in done.stderr, done.stderr
        if "env" not in words:
            assert [key for key in keys_near(cwd) if key in done.stdout + done.stderr] == []
        return done
    return run


def tree(directory):
    """Every file below a directory with its bytes; links as what they point at."""
    return {str(path.relative_to(directory)): os.readlink(path) if path.is_symlink()
            else path.read_bytes() for path in sorted(directory.rglob("*"))
            if path.is_symlink() or path.is_file()}


def marks(directory):
    """What changes when a file or a directory is touched."""
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns, path.stat().st_mode)
            for path in [directory, *directory.rglob("*")]}


def rows(text):
    """The listed paths and what became of them."""
    return [tuple(line.split()) for line in text.splitlines() if re.fullmatch(
        "  [^ ]+ +(created|updated|unchanged|removed|edited)", line)]


def rewrite(directory, text):
    (directory / "fleet.yaml").write_text(text, encoding="utf-8")


def edit(path, text="my own line\n"):
    with open(path, "a", encoding="utf-8") as stream:
        stream.write(text)


# -- what is written --

def test_generate_lists_every_file_in_order(fleet, run_cli):
    done = run_cli("generate")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("Generated:\n  litellm_config.yaml ")
    assert rows(done.stdout) == [(path, "created") for path in FILES]
    assert set(tree(fleet)) == {*FILES, MANIFEST, "fleet.yaml"}


def test_generate_says_what_to_type_next(fleet, quick):
    done = quick("generate")
    assert "  planner     -> small -> qwen3:8b -> claude-haiku-local\n" in done.stdout
    assert f"  litellm --config ./litellm_config.yaml --host 127.0.0.1 --port {PORT}\n" in done.stdout
    assert "  subagent-fleet launch claude\n" in done.stdout
    rewrite(fleet, FLEET.replace("litellm}", "builtin}"))
    done = quick("generate", "--out", "some where", "--config", "fleet.yaml")
    assert "  subagent-fleet serve --config fleet.yaml --out 'some where'\n" in done.stdout
    assert (fleet / "some where" / ENV).exists() and "to .gitignore" in done.stdout
    assert "to .gitignore" not in quick("generate").stdout


def test_second_run_touches_nothing(generated, run_cli):
    before = marks(generated)
    done = run_cli("generate")
    assert rows(done.stdout) == [(path, "unchanged") for path in FILES]
    assert marks(generated) == before


def test_a_change_updates_what_differs_and_removes_who_left(generated, quick):
    rewrite(generated, OTHER)
    done = quick("generate")
    assert dict(rows(done.stdout)) == {
        "litellm_config.yaml": "updated", PLANNER: "updated", ".claude/agents/reviewer.md":
        "created", FILES[2]: "removed", ENV: "updated"}
    assert set(tree(generated)) == {*FILES, MANIFEST, "fleet.yaml",
                                    ".claude/agents/reviewer.md"} - {FILES[2]}
    assert dict(rows(quick("generate").stdout))[PLANNER] == "unchanged"


def test_generate_works_on_the_fleet_of_the_directory_above(generated, quick):
    below = generated / "src" / "deep"
    below.mkdir(parents=True)
    rewrite(generated, OTHER)
    assert quick("generate", cwd=below).returncode == 0
    assert list(below.iterdir()) == [] and b"Thinks." in (generated / PLANNER).read_bytes()
    assert quick("generate", "--check", cwd=below).returncode == 0


@pytest.mark.parametrize("words, written", [
    (["--target", "claude"], FILES[1:3]), (["--claude-only"], FILES[1:3]),
    (["--litellm-only", "--claude-only"], FILES[:3]),
    (["--target", "litellm,env"], [FILES[0], ENV]), (["--litellm-only"], FILES[:1]),
    (["--target", "env", "--target", "claude"], FILES[1:])])
def test_targets_are_chosen(fleet, quick, words, written):
    done = quick("generate", *words)
    assert done.returncode == 0 and [path for path, _ in rows(done.stdout)] == written
    assert set(tree(fleet)) == {*written, MANIFEST, "fleet.yaml"}


def test_a_target_leaves_the_other_files_and_what_is_known_of_them(generated, quick):
    rewrite(generated, OTHER)
    quick("generate", "--target", "litellm")
    assert b"Plans." in (generated / PLANNER).read_bytes() and (generated / FILES[2]).exists()
    assert dict(rows(quick("generate").stdout))[FILES[2]] == "removed"


@pytest.mark.parametrize("words, message", [
    (["--target", "claude,litelm"], "did you mean `litellm`?"),
    (["--target", "x"], "known targets: litellm, claude, env")])
def test_targets_that_cannot_be_exit_2(fleet, quick, words, message):
    done = quick("generate", *words)
    assert done.returncode == 2 and done.stdout == "" and message in done.stderr
    assert set(tree(fleet)) == {"fleet.yaml"}


def test_check_writes_nothing_and_tells_by_its_exit_code(fleet, quick):
    before = marks(fleet)
    done = quick("generate", "--check")
    assert done.returncode == 1 and rows(done.stdout) == [(path, "created") for path in FILES]
    assert marks(fleet) == before
    quick("generate")
    assert quick("generate", "--check").returncode == 0
    edit(fleet / PLANNER)
    done = quick("generate", "--check")
    assert done.returncode == 1 and (PLANNER, "edited") in rows(done.stdout)


def test_diff_writes_nothing_and_shows_it(generated, quick):
    rewrite(generated, OTHER)
    before = marks(generated)
    done = quick("generate", "--diff")
    assert done.returncode == 0 and "\n-description: Plans.\n+description: Thinks.\n" in done.stdout
    assert "--- .claude/agents/reviewer.md\tcreated\n" in done.stdout
    assert quick("generate", "--diff", "--check").returncode == 1
    assert json.loads(quick("generate", "--diff", "--json").stdout)["diff"] == done.stdout
    assert marks(generated) == before


def test_json_is_one_object(fleet, quick):
    done = quick("generate", "--json")
    value = json.loads(done.stdout)
    assert value["schema"] == "subagent-fleet/generate/1" and value["written"] is True
    assert [(f["path"], f["action"]) for f in value["files"]] == [(p, "created") for p in FILES]
    assert value["findings"] == [] and value["out"] == "."
    assert value["routes"][0] == {"agent": "planner", "node": "small", "model": "light",
                                  "ollama_model": "qwen3:8b", "alias": "claude-haiku-local"}
    edit(fleet / PLANNER)
    done = quick("generate", "--json")
    assert done.returncode == 3 and json.loads(done.stdout)["written"] is False
    assert json.loads(quick("generate", "--json", "--check").stdout)["written"] is False


# -- what is the user's --

def test_an_edited_file_refuses_everything(generated, quick):
    edit(generated / PLANNER)
    rewrite(generated, OTHER)
    before = tree(generated)
    done = quick("generate")
    assert done.returncode == 3 and done.stdout == "" and "-my own line" in done.stderr
    assert f"error: {PLANNER}: not as this program wrote it; nothing was written" in done.stderr
    assert "generate --force" in done.stderr and tree(generated) == before


def test_a_hand_written_file_is_refused(fleet, quick):
    (fleet / ".claude/agents").mkdir(parents=True)
    (fleet / PLANNER).write_text("mine", encoding="utf-8")
    assert quick("generate").returncode == 3
    assert set(tree(fleet)) == {"fleet.yaml", PLANNER}


def test_an_edited_agent_that_left_is_refused(generated, quick):
    edit(generated / FILES[2])
    rewrite(generated, OTHER)
    assert quick("generate").returncode == 3
    assert b"my own line" in (generated / FILES[2]).read_bytes()


def test_force_keeps_a_private_copy_of_each_version(generated, quick):
    copies = generated / ".subagent-fleet/backup/.claude/agents"
    for number, text in enumerate(("mine", "mine again"), 1):
        (generated / PLANNER).write_text(text, encoding="utf-8")
        done = quick("generate", "--force")
        assert done.returncode == 0 and (PLANNER, "updated") in rows(done.stdout)
        assert len(list(copies.iterdir())) == number
    assert {copy.read_text(encoding="utf-8") for copy in copies.iterdir()} == {"mine", "mine again"}
    assert {copy.stat().st_mode & 0o777 for copy in copies.iterdir()} == {0o600}


def test_a_file_that_is_as_it_should_be_is_adopted(generated, quick):
    (generated / MANIFEST).unlink()
    assert set(dict(rows(quick("generate").stdout)).values()) == {"unchanged"}
    rewrite(generated, OTHER)
    assert quick("generate").returncode == 0


def test_a_broken_manifest_is_told_and_hurts_nothing(generated, run_cli):
    (generated / MANIFEST).write_text("{", encoding="utf-8")
    rewrite(generated, OTHER)
    before = tree(generated)
    done = run_cli("generate")
    assert done.returncode == 3 and "cannot be read; files that differ count as" in done.stderr
    assert tree(generated) == before


# -- what is in the way --

def put_directory(place):
    (place / PLANNER).mkdir(parents=True)


def put_file(place):
    (place / ".claude").write_text("mine", encoding="utf-8")


def put_link(place):
    (place / ".claude/agents").mkdir(parents=True)
    (place / PLANNER).symlink_to(place.parent / "outside" / "file")


def put_dangling_link(place):
    (place / ENV).symlink_to(place / "nowhere")


def put_linked_directory(place):
    (place / ".claude").symlink_to(place.parent / "outside")


def put_linked_state(place):
    (place / ".subagent-fleet").symlink_to(place.parent / "outside")


def put_pipe(place):
    os.mkfifo(place / "litellm_config.yaml")


def put_directory_for_manifest(place):
    (place / MANIFEST).mkdir(parents=True)


def put_state_file(place):
    (place / ".subagent-fleet").write_text("mine", encoding="utf-8")


@pytest.mark.parametrize("put", [
    put_directory, put_file, put_link, put_dangling_link, put_linked_directory, put_linked_state,
    put_pipe, put_directory_for_manifest, put_state_file])
@pytest.mark.parametrize("words", [(), ("--force",)])
def test_what_is_in_the_way_is_named_once_and_left(tmp_path, quick, put, words):
    place, outside = tmp_path / "place", tmp_path / "outside"
    place.mkdir()
    outside.mkdir()
    (outside / "file").write_text("theirs", encoding="utf-8")
    rewrite(place, FLEET)
    put(place)
    before = tree(place), tree(outside)
    done = quick("generate", *words, cwd=place)
    assert done.returncode in (1, 3) and done.stdout == ""
    assert done.stderr.count("error: ") == 1 and "fix: " in done.stderr
    assert (tree(place), tree(outside)) == before


def test_a_link_inside_is_followed(fleet, quick):
    (fleet / "config").mkdir()
    (fleet / ".claude").symlink_to("config")
    assert quick("generate").returncode == 0
    assert (fleet / "config/agents/planner.md").is_file()
    assert quick("generate", "--check").returncode == 0


def test_a_backup_is_not_written_through_a_link(generated, tmp_path, quick):
    outside = tmp_path.parent / (tmp_path.name + "-outside")
    outside.mkdir()
    (generated / ".subagent-fleet/backup").symlink_to(outside)
    edit(generated / PLANNER)
    before = tree(generated)
    assert quick("generate", "--force").returncode == 3
    assert tree(generated) == before and list(outside.iterdir()) == []


class FaultyOs:
    """The os module with one failing call: the disk is full, read-only or forbidden."""

    def __init__(self, call, number, code):
        self.call, self.left, self.code = call, number, code

    def __getattr__(self, name):
        found = getattr(os, name)
        if name != self.call:
            return found

        def failing(*words, **named):
            self.left -= 1
            if self.left == 0:
                raise OSError(self.code, os.strerror(self.code))
            return found(*words, **named)
        return failing


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("call, number", [
    *[("open", number) for number in range(1, 29)], ("replace", 1), ("replace", 2), ("replace", 4),
    ("makedirs", 1), ("unlink", 2)])
def test_a_disk_that_fails_leaves_whole_files_and_the_next_run_mends(
        generated, monkeypatch, capsys, call, number, code):
    monkeypatch.chdir(generated)
    for name in [n for n in os.environ if n.startswith("LITELLM_")]:
        monkeypatch.delenv(name)
    before = tree(generated)
    rewrite(generated, OTHER)
    faulty = FaultyOs(call, number, code)
    monkeypatch.setattr(sf, "os", faulty)
    status = sf.main(["generate"])
    monkeypatch.setattr(sf, "os", os)
    said, between = capsys.readouterr(), tree(generated)
    assert status == sf.EXIT_PROBLEM if faulty.left < 1 else status == sf.EXIT_OK
    if status:
        assert said.out == "" and said.err.count("error: cannot ") == 1
        assert os.strerror(code) in said.err
    assert sf.main(["generate"]) == sf.EXIT_OK
    after = tree(generated)
    assert set(between) <= set(before) | set(after)  # nothing half-written lies about
    for path in set(between) - {MANIFEST, "fleet.yaml"}:
        assert between[path] in (before.get(path), after.get(path))


def test_a_file_larger_than_the_disk_takes_leaves_everything(generated):
    rewrite(generated, OTHER)
    before = tree(generated)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "generate"], cwd=generated, env=clean_environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500)))
    assert done.returncode == 1 and done.stdout == b""
    assert b"error: cannot write ./" in done.stderr and b"Traceback" not in done.stderr
    after = tree(generated)
    assert {path: text for path, text in after.items() if path != MANIFEST} == \
        {path: text for path, text in before.items() if path != MANIFEST}


class KillingOs(FaultyOs):
    """The os module that kills its process at one of its calls."""

    def __getattr__(self, name):
        if name in ("open", "replace", "unlink", "makedirs", "mkdir"):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return getattr(os, name)


def generate_in_child(directory, number):
    """Run generate in a child that dies at the given call (0: never); tell whether it died."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            os.chdir(directory)
            sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")
            sf.os = KillingOs("", number, 0)
            status = sf.main(["generate"])
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def test_a_hundred_kills_leave_every_file_old_or_new(fleet, quick):
    seed = int(time.time())
    chance, killed, states, wanted = random.Random(seed), 0, set(), {}
    last = FLEET
    for text in (FLEET, OTHER, FLEET):  # the first run makes the key that the others keep
        rewrite(fleet, text)
        quick("generate")
        wanted[text] = tree(fleet)
    while killed < 100:
        last = OTHER if last == FLEET else FLEET
        rewrite(fleet, last)
        killed += generate_in_child(fleet, chance.randrange(1, 46))
        found = {path: text for path, text in tree(fleet).items()
                 if not path.endswith((".new", "fleet.yaml", "manifest.json"))}
        for path, text in found.items():
            assert text in (wanted[FLEET].get(path), wanted[OTHER].get(path)), (seed, path)
        states.add(tuple(sorted(found.items())))
        last = chance.choice([FLEET, OTHER])  # the fleet may change before the next run mends
        rewrite(fleet, last)
        assert quick("generate").returncode == 0, seed
        assert {path: text for path, text in tree(fleet).items()
                if path in wanted[last]} == wanted[last], seed
    assert len(states) > 2, seed


# -- the key --

def test_the_key_is_random_private_and_kept(generated, quick, tmp_path):
    assert (generated / ENV).stat().st_mode & 0o777 == 0o600
    key, = keys_near(generated)
    rewrite(generated, OTHER.replace("litellm}", "litellm, master_key_env: OTHER_NAME}"))
    assert quick("generate").returncode == 0 and keys_near(generated) == [key]
    edit(generated / ENV, "export MORE=1\n")
    assert quick("generate", "--force").returncode == 0 and keys_near(generated) == [key]
    quick("generate", "--out", str(tmp_path / "second"))
    assert len(set(keys_near(generated))) == 2


def test_a_loosened_environment_file_is_closed_again(generated, quick):
    (generated / ENV).chmod(0o644)
    assert quick("generate").returncode == 0
    assert (generated / ENV).stat().st_mode & 0o777 == 0o600


def test_the_key_of_the_environment_is_written_nowhere(fleet, quick):
    key = "sk-environment-0123456789"
    done = quick("generate", env={"LITELLM_MASTER_KEY": key})
    assert done.returncode == 0 and key not in done.stdout + done.stderr
    assert [path for path, text in tree(fleet).items() if key.encode() in text] == []


@pytest.mark.parametrize("key", ["sk-1234", "sk-local-dev", "", "sk-short"])
def test_a_weak_key_is_a_warning_and_beyond_this_machine_a_refusal(fleet, quick, key):
    done = quick("generate", env={"LITELLM_MASTER_KEY": key})
    assert done.returncode == 0 and "warning: the key in $LITELLM_MASTER_KEY is" in done.stderr
    rewrite(fleet, OTHER.replace("litellm}", "litellm, host: 0.0.0.0}"))
    before = tree(fleet)
    done = quick("generate", env={"LITELLM_MASTER_KEY": key})
    assert done.returncode == 3 and "error: the key in $LITELLM_MASTER_KEY is weak" in done.stderr
    assert "fix: unset LITELLM_MASTER_KEY" in done.stderr and tree(fleet) == before


# -- clean --

def test_clean_removes_exactly_what_was_written(generated, run_cli):
    mine = generated / ".claude/agents/mine.md"
    mine.write_text("mine", encoding="utf-8")
    (generated / "fleet.yaml").unlink()
    done = run_cli("clean", "--dry-run")
    assert done.returncode == 0 and done.stdout.startswith("Would remove:\n")
    assert sorted(rows(done.stdout)) == sorted((path, "removed") for path in FILES)
    assert set(tree(generated)) == {*FILES, MANIFEST, ".claude/agents/mine.md"}
    assert run_cli("clean").returncode == 0
    assert set(tree(generated)) == {".claude/agents/mine.md"}
    assert sorted(path.name for path in generated.iterdir()) == [".claude"]
    assert run_cli("clean").stdout == "Nothing to remove.\n"


def test_clean_keeps_what_was_edited(generated, quick):
    edit(generated / PLANNER)
    done = quick("clean")
    assert done.returncode == 3 and PLANNER not in done.stdout and PLANNER in done.stderr
    assert set(tree(generated)) == {"fleet.yaml", MANIFEST, PLANNER}
    done = quick("clean", "--force")
    assert done.returncode == 0 and rows(done.stdout) == [(PLANNER, "removed")]
    copy, = [path for path in tree(generated) if "backup" in path]
    assert b"my own line" in tree(generated)[copy]
    assert set(tree(generated)) == {"fleet.yaml", copy}


def test_clean_follows_no_hostile_manifest(generated, tmp_path, quick):
    victim = tmp_path.parent / (tmp_path.name + "-victim")
    victim.write_text("theirs", encoding="utf-8")
    value = {"files": {str(victim): sf.digest(b"theirs"), "../" + victim.name:
                       sf.digest(b"theirs"), "fleet.yaml": sf.digest(FLEET.encode())},
             "writing": {}}
    (generated / MANIFEST).write_text(json.dumps(value), encoding="utf-8")
    assert quick("clean", "--force").stdout == "Nothing to remove.\n"
    assert victim.exists() and (generated / "fleet.yaml").exists()


def on_terminal(words, cwd, typed=b"", **env):
    """Run with a terminal for stdin, stdout and stderr; return (exit status, what it shows)."""
    pty = pytest.importorskip("pty")
    child, master = pty.fork()
    if child == 0:
        os.chdir(cwd)
        os.execve(sys.executable, [sys.executable, "-I", "-S", str(SCRIPT), *words],
                  clean_environment(**env))
    os.write(master, typed)
    shown = b""
    try:
        while True:
            piece = os.read(master, 65536)
            if not piece:
                break
            shown += piece
    except OSError:  # Linux says so at the end
        pass
    os.close(master)
    _, status = os.waitpid(child, 0)
    return os.WEXITSTATUS(status), shown.decode("utf-8").replace("\r\n", "\n")


def test_clean_asks_a_person(generated):
    before = tree(generated)
    status, shown = on_terminal(["clean"], generated, b"n\n")
    assert status == 0 and "Remove 4 files? [y/N]" in shown and tree(generated) == before
    assert shown.index(PLANNER) < shown.index("[y/N]")
    assert on_terminal(["clean"], generated, b"y\n")[0] == 0
    assert set(tree(generated)) == {"fleet.yaml"}


# -- env --

def test_env_is_the_file(generated, run_cli):
    assert run_cli("env").stdout.encode() == (generated / ENV).read_bytes()


def test_env_json_and_fish_hold_the_same(generated, quick):
    key, = keys_near(generated)
    value = json.loads(quick("env", "--shell", "json").stdout)
    wanted = sf.merge_environment({}, sf.load_fleet(generated / "fleet.yaml"), key)
    assert value["set"] == wanted and value["schema"] == "subagent-fleet/env/1"
    assert value["unset"] == ["ANTHROPIC_API_KEY", "CLAUDE_CODE_SUBAGENT_MODEL", *(
        f"CLAUDE_CODE_USE_{cloud}" for cloud in sf.CLOUDS)]
    assert f"set -g LITELLM_MASTER_KEY '{key}'" in quick("env", "--shell", "fish").stdout
    found = quick("env", "--shell", "json", env={"LITELLM_MASTER_KEY": "sk-0123456789abcdef"})
    assert json.loads(found.stdout)["set"]["ANTHROPIC_AUTH_TOKEN"] == "sk-0123456789abcdef"


def test_env_with_a_key_of_the_environment_only_puts_it_in_no_script(fleet, quick):
    done = quick("env", env={"LITELLM_MASTER_KEY": 'sk-"; touch owned; "0123456789'})
    assert done.returncode == 0 and "owned" not in done.stdout
    assert 'export LITELLM_MASTER_KEY="${LITELLM_MASTER_KEY:-}"\n' in done.stdout


@pytest.mark.parametrize("shell", ["sh", "fish", "json"])
def test_env_shows_no_key_on_a_terminal_unless_asked(generated, shell):
    key, = keys_near(generated)
    status, shown = on_terminal(["env", "--shell", shell], generated)
    assert status == 0 and key not in shown and "LITELLM_MASTER_KEY" in shown
    status, shown = on_terminal(["env", "--shell", shell, "--show-key"], generated)
    assert status == 0 and key in shown
    status, shown = on_terminal(["env", "--shell", shell], generated,
                                LITELLM_MASTER_KEY="sk-from-outside-0123456789")
    assert status == 0 and "from-outside" not in shown


@pytest.mark.parametrize("words", [["env"], ["env", "--shell", "json"], ["launch", "claude"]])
def test_without_a_key_it_says_what_to_type(fleet, quick, words, fake_claude):
    done = quick(*words, env=fake_claude(""))
    assert done.returncode == 1 and done.stdout == "" and "fix: subagent-fleet generate\n" in \
        done.stderr
    done = quick(*words, "--out", "non ex", "--config", "fleet.yaml", env=fake_claude(""))
    assert "and non ex/.env.subagent-fleet is not there\n" in done.stderr
    assert "fix: subagent-fleet generate --config fleet.yaml --out 'non ex'\n" in done.stderr


# -- launch --

@pytest.fixture
def gateway(fake_node):
    """What answers at the fleet's port as its gateway does."""
    node = fake_node(port=PORT)
    models = {"data": [{"id": "claude-sonnet-local"}, {"id": "claude-haiku-local"}]}
    node.answers.update({"/health/liveliness": (200, "I'm alive!"), "/v1/models": (200, models)})
    return node


@pytest.fixture
def fake_claude(tmp_path, gateway):
    """Put a `claude` on the PATH that runs some shell lines; gives the environment."""
    def make(lines):
        place = tmp_path / "programs"
        place.mkdir(exist_ok=True)
        (place / "claude").write_text("#!/bin/sh\n" + lines, encoding="utf-8")
        (place / "claude").chmod(0o755)
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        return {"PATH": f"{place}:/usr/bin:/bin", "HOME": str(home)}
    return make


def test_launch_gives_the_environment_and_returns_the_exit_code(generated, run_cli, fake_claude):
    environ = fake_claude('env -0 > seen.env; printf "%s\\0" "$@" > seen.args; exit 7\n')
    environ.update(ANTHROPIC_API_KEY="old", CLAUDE_CODE_SUBAGENT_MODEL="old", KEPT="yes")
    done = run_cli("launch", "claude", "--", "-p", "a b", "--", "$(id)", env=environ)
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
    seen = dict(line.split("=", 1) for line in (generated / "seen.env").read_text().split("\0")
                if line)
    key, = keys_near(generated)
    wanted = sf.merge_environment({}, sf.load_fleet(generated / "fleet.yaml"), key)
    assert {name: seen[name] for name in wanted} == wanted and seen["KEPT"] == "yes"
    assert "ANTHROPIC_API_KEY" not in seen and "CLAUDE_CODE_SUBAGENT_MODEL" not in seen
    words = (generated / "seen.args").read_text().split("\0")[:-1]
    assert words[0] == "--settings" and words[2:] == ["-p", "a b", "--", "$(id)"]
    assert json.loads(words[1]) == {"permissions": {"disableAutoMode": "disable"}}


@pytest.mark.parametrize("given", [["--settings", "x.json"], ["--settings=x.json"]])
def test_launch_leaves_your_own_settings(generated, run_cli, fake_claude, given):
    done = run_cli("launch", "claude", "--", *given, env=fake_claude('echo "$@"\n'))
    assert done.stdout == " ".join(given) + "\n"


def test_launch_asks_for_the_gateway_first(generated, quick, gateway, fake_claude):
    environ, url = fake_claude("touch ran\n"), f"http://127.0.0.1:{PORT}"
    (generated / "x.yaml").write_text(FLEET, encoding="utf-8")
    gateway.answers["/v1/models"] = 401, {"error": "the key is wrong"}
    gateway.answers["/health/liveliness"] = 200, "I'm alive!"
    done = quick("launch", "claude", env=environ)
    assert done.returncode == 1 and done.stderr == (
        f"error: another fleet's gateway (LiteLLM) answers at {url}, or this one's, which has an "
        "older key or lacks aliases\n  fix: stop it, or write another `port:` under project.gateway\n")
    del gateway.answers["/health/liveliness"]
    assert f"error: another program answers at {url}; LiteLLM would take another port\n  fix: stop" \
        in quick("launch", "claude", env=environ).stderr
    gateway.close()
    done = quick("launch", "claude", "--config", "x.yaml", env=environ)
    assert done.returncode == 1 and done.stderr == (
        f"error: no gateway runs at {url}\n  fix: `subagent-fleet serve --config x.yaml` in another "
        "terminal, or `subagent-fleet up --config x.yaml`\n")
    assert not (generated / "ran").exists()


def test_launch_without_claude_says_how_to_install_it(generated, quick):
    done = quick("launch", "claude", env={"PATH": "/nowhere"})
    assert done.returncode == 1 and "Claude Code is not on the PATH" in done.stderr
    assert "fix: npm install -g @anthropic-ai/claude-code@latest" in done.stderr


def test_launch_of_what_cannot_run_is_an_error(generated, run_cli, fake_claude):
    environ = fake_claude("")
    (generated / "programs/claude").write_text("#!/nowhere/sh\n", encoding="utf-8")
    done = run_cli("launch", "claude", env=environ)
    assert done.returncode == 1 and "error: cannot run " in done.stderr  # slug "cannot-run"


def test_launch_names_stale_files_and_goes_on(generated, run_cli, fake_claude):
    rewrite(generated, OTHER)
    done = run_cli("launch", "claude", env=fake_claude("exit 0\n"))
    assert done.returncode == 0 and "fix: subagent-fleet generate" in done.stderr
    assert f"warning: litellm_config.yaml, {PLANNER}, {ENV}" in done.stderr
    assert ": behind the config\n" in done.stderr
    assert "warning: .claude/agents/reviewer.md: not generated yet\n" in done.stderr
    done = run_cli("launch", "claude", "--config", "fleet.yaml", env=fake_claude("exit 0\n"))
    assert "  fix: subagent-fleet generate --config fleet.yaml\n" in done.stderr


def test_status_names_the_config_that_was_typed(fleet, quick, fake_node):
    node = fake_node({"qwen3:8b": {}, "qwen3-coder:30b": {}})
    rewrite(fleet, re.sub('"http:[^"]*"', node.endpoint, FLEET))
    done = quick("status", "--config", "fleet.yaml")
    assert "\nNext: `subagent-fleet warmup --config fleet.yaml`\n" in done.stdout


def test_launch_names_settings_that_beat_the_environment(generated, quick, fake_claude):
    environ = fake_claude("exit 0\n")
    (generated / ".claude/settings.local.json").write_text(json.dumps(
        {"env": {"ANTHROPIC_BASE_URL": "https://elsewhere.example", "EDITOR": "vi"}}),
        encoding="utf-8")
    (generated / "home/.claude").mkdir()
    (generated / "home/.claude/settings.json").write_text(json.dumps(
        {"env": {"CLAUDE_CODE_SUBAGENT_MODEL": "opus", "NO_DOCS": "True"}}), encoding="utf-8")
    done = quick("launch", "claude", env=environ)
    assert done.returncode == 0 and done.stderr.count("warning: ") == 2
    assert "settings.local.json sets ANTHROPIC_BASE_URL under" in done.stderr
    assert "home/.claude/settings.json sets CLAUDE_CODE_SUBAGENT_MODEL under" in done.stderr
    assert "elsewhere" not in done.stderr


def test_launch_with_a_weak_key_beyond_this_machine_is_refused(generated, quick, fake_claude):
    rewrite(generated, FLEET.replace("litellm}", "litellm, host: 0.0.0.0}"))
    environ = dict(fake_claude("touch ran\n"), LITELLM_MASTER_KEY="sk-1234")
    done = quick("launch", "claude", env=environ)
    assert done.returncode == 3 and not (generated / "ran").exists()


def start_launch(generated, environ):
    """Start launch in a group of its own; return it once the fake Claude is up."""
    child = subprocess.Popen([sys.executable, str(SCRIPT), "launch", "claude"], cwd=generated,
                             env=clean_environment(**environ), stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, start_new_session=True)
    assert child.stdout.readline() == b"up\n"
    return child


def test_ctrl_c_belongs_to_the_child(generated, fake_claude):
    child = start_launch(generated, fake_claude(
        'trap "echo asked" INT; echo up; while [ ! -e stop ]; do sleep 0.02; done; exit 9\n'))
    for _ in range(3):
        os.killpg(child.pid, signal.SIGINT)
        assert child.stdout.readline() == b"asked\n"
    (generated / "stop").touch()
    out, err = child.communicate(timeout=10)
    assert (child.returncode, out, err) == (9, b"", b"")


@pytest.mark.parametrize("name, status", [("KILL", 137), ("TERM", 143)])
def test_a_child_that_was_killed_gives_the_shells_exit_code(generated, quick, fake_claude, name,
                                                            status):
    assert quick("launch", "claude", env=fake_claude(f"kill -{name} $$\n")).returncode == status


def test_terminating_launch_terminates_the_child(generated, fake_claude):
    child = start_launch(generated, fake_claude(
        'trap "exit 5" TERM; echo up; while :; do sleep 0.02; done\n'))
    os.kill(child.pid, signal.SIGTERM)
    child.communicate(timeout=10)
    assert child.returncode == 5


def slug_of(call, *words):
    with pytest.raises(sf.FleetError) as caught:
        call(*words)
    assert caught.value.fix
    return caught.value.slug, caught.value.status


def test_refusals_by_their_slugs(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {"PATH": "/nowhere", "HOME": str(tmp_path)})
    world, out = sf.World(), str(tmp_path)
    rewrite(tmp_path, FLEET)
    fleet = sf.load_fleet(tmp_path / "fleet.yaml")
    options = sf.parse_arguments(sf.find_command("generate"), ["--target", "x"])
    assert slug_of(sf.parse_targets, options) == ("unknown-target", 2)
    assert slug_of(sf.read_key, world, fleet, out) == ("no-key", 1)
    assert slug_of(world.enter, out, "..") == ("in-the-way", 3)
    assert slug_of(world.run, ["/nowhere/claude"], {}) == ("cannot-run", 1)
    assert sf.refusal(["a"], "clean", "kept").slug == "edited"
    options = sf.parse_arguments(sf.find_command("launch"), ["claude", "--out", out, "--config",
                                                             out + "/fleet.yaml"])
    assert slug_of(sf.cmd_launch, options, world) == ("claude-missing", 1)
    monkeypatch.setattr(sf, "parse_manifest", lambda content: None)
    (tmp_path / ".subagent-fleet").mkdir()
    (tmp_path / MANIFEST).touch()
    told = []
    monkeypatch.setattr(sf, "format_finding", lambda finding: told.append(finding.slug) or "")
    assert sf.compare_output(world, out, None) == [] and told == ["manifest-broken"]
