"""What is on the disk when a command has ended: what was accepted, and nothing of the key."""
import os
import sys

import pytest
from test_task_commands import Typist

from tools import PROC, keys_near

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the rig reads /proc")


@pytest.fixture
def typist(task_rig):
    return Typist(task_rig)


def test_what_was_accepted_is_on_the_disk_before_it_is_told(task_rig, run_cli, monkeypatch):
    """A machine that loses its power keeps an order; a kill cannot show that."""
    task_rig.keeps_outside = False
    synced = []
    sync = os.fsync

    def note(descriptor):
        path = os.readlink(f"{PROC}/self/fd/{getattr(descriptor, 'fileno', lambda: descriptor)()}")
        synced.append((path, os.path.isdir(path)))
        sync(descriptor)
    monkeypatch.setattr(os, "fsync", note)
    done = run_cli("task", "add", "parser:Say hi.", cwd=task_rig.repo, env=task_rig.environ)
    assert done.returncode == 0, done.stderr
    kept = {is_directory for path, is_directory in synced
            if path.startswith(f"{task_rig.repo}/.git/subagent-fleet/")}
    assert kept == {False, True}, "the order, or its name, was never sent to the disk"

    def full(descriptor):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", full)
    done = run_cli("task", "add", "other:Say ho.", cwd=task_rig.repo, env=task_rig.environ)
    assert done.returncode == 1 and "No space left" in done.stderr and "other" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("prompt, check, status", [
    ("@write x y", "test -s x", 0), ("@write x y", "false", 1)])
def test_no_file_holds_the_key_when_a_task_is_over(typist, prompt, check, status):
    """Each try has settings with the key in them, for Claude Code to read."""
    (key,) = keys_near(typist.rig.repo)
    typist.write(f"tasks: {{a: {{prompt: '{prompt}', check: '{check}', rounds: 0, tries: 1}}}}\n")
    typist.run("run", status=status)
    holders = [str(path) for path in typist.rig.place.rglob("*") if path.is_file()
               and not path.is_symlink() and key.encode() in path.read_bytes()]
    assert holders == [str(typist.rig.repo / ".env.subagent-fleet")]
