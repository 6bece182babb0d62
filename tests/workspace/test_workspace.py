"""Files, key and manifest as they lie on the disk; faults and kills in between."""
import errno
import io
import os
import random
import resource
import signal
import subprocess
import sys
import time

import pytest

import subagent_fleet as sf
from tools import PROGRAM, ROOT, clean_environment, keys_near
from workspace_cases import ENV, FILES, FLEET, MANIFEST, OTHER, PLANNER, edit, rewrite, rows, tree

# -- what is the user's --

def test_an_edited_file_refuses_everything(generated, quick):
    edit(generated / PLANNER)
    rewrite(generated, OTHER)
    before = tree(generated)
    done = quick("generate")
    assert done.returncode == 3 and done.stdout == "" and "-my own line" in done.stderr
    assert f"error: {PLANNER}: you have edited this file; nothing was written" in done.stderr
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
    assert done.returncode == 3 and "cannot be read, so files that differ count as" in done.stderr
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
        [sys.executable, PROGRAM, "generate"], cwd=generated, env=clean_environment(),
        capture_output=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500)))
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


def fork_as_told():
    """For each number on standard input: fork, run generate, die at that call; print how it went.

    In a process of its own, without threads: what forks must have none.
    """
    for number in sys.stdin:
        child = os.fork()
        if child == 0:
            status = 70
            try:
                sys.stdout = sys.stderr = io.StringIO()
                sf.os = KillingOs("", int(number), 0)
                status = sf.main(["generate"])
            finally:
                os._exit(status)
        print(os.waitpid(child, 0)[1], flush=True)


@pytest.fixture
def generate_and_die(fleet):
    """Run generate in a child that dies at the given call; tell whether it died."""
    path = os.pathsep.join(str(ROOT / name) for name in ("", "tests/workspace", "tests/rigs"))
    forker = subprocess.Popen(
        [sys.executable, "-c", "import test_workspace; test_workspace.fork_as_told()"],
        cwd=fleet, env=clean_environment(PYTHONPATH=path), encoding="ascii",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(number):
        print(number, file=forker.stdin, flush=True)
        status = int(forker.stdout.readline())
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        return os.WIFSIGNALED(status)
    yield run
    forker.communicate()


@pytest.mark.slow
def test_a_hundred_kills_leave_every_file_old_or_new(fleet, quick, generate_and_die):
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
        killed += generate_and_die(chance.randrange(1, 46))
        found = {path: text for path, text in tree(fleet).items()
                 if not path.endswith((".new", "fleet.yaml", "manifest.json"))}
        for path, text in found.items():
            assert text in (wanted[FLEET].get(path), wanted[OTHER].get(path)), (seed, path)
        states.add(tuple(sorted(found.items())))
        last = chance.choice([FLEET, OTHER])  # the fleet may change before the next run fixes
        rewrite(fleet, last)
        assert quick("generate").returncode == 0, seed
        assert {path: text for path, text in tree(fleet).items()
                if path in wanted[last]} == wanted[last], seed
    assert len(states) > 2, seed


# -- the key --

def test_the_key_is_random_private_and_kept(generated, quick, tmp_path):
    assert (generated / ENV).stat().st_mode & 0o777 == 0o600
    key, = keys_near(generated)
    rewrite(generated, OTHER.replace("litellm}", "litellm, master_key_env: OTHER_GATEWAY_KEY}"))
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
