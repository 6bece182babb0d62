"""What agents and checks start is ended, however they left it; `as_mac.py` runs this as on a Mac."""
import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from run_kit import NAMESPACE, WORKS, needs_namespace
from tools import PROC, PROGRAM

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not sys.platform.startswith("linux"),
                                                   reason="the kit reads /proc")]
EDIT = "echo two > a.txt"


def shell(*commands):
    """A coder that does what a shell can, in the background as well."""
    return ["sh", "-c", "\n".join(commands)]


# A program that says its number and stays; what it is given comes before it.
STAYS = "sh -c 'echo $$ >> {file}; exec sleep 300' >/dev/null 2>&1 </dev/null"


def lives(number):
    """Whether a process runs: not one that has ended and was not asked for."""
    with contextlib.suppress(OSError):
        return (PROC / str(number) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


class Left:
    """Where programs that stay behind write their numbers."""

    def __init__(self, shop):
        self.path = shop.place / "left"

    def __str__(self):
        return str(self.path)

    def numbers(self):
        return [int(line) for line in self.path.read_text().split()] if self.path.exists() else []

    def living(self):
        return [number for number in self.numbers() if lives(number)]


@pytest.fixture
def left(shop):
    left = Left(shop)
    yield left
    for number in left.living():
        os.kill(number, signal.SIGKILL)


def stays(left, before=""):
    return f"{before} {STAYS.format(file=left)}"


# How a program is left, while what started it is still there.
WAYS = {
    "plain": "{}",
    "background": "{} &",
    "nohup": "nohup {} &",
    "setsid": "setsid {} &",
    "no environment": "env -i {} &",
    "no environment, no session": "env -i setsid {} &",
    "twice forked": "( (env -i setsid {} &) & )",
    "parent seen": "env -i setsid sh -c \"({} &) ; sleep 3\" &",
}


def left_so(way, left):
    """A command that leaves a program in a way, quoted for a shell."""
    inner = stays(left)
    if '"' in WAYS[way]:
        inner = inner.replace("$", "\\$")
    return WAYS[way].format(inner)


@pytest.mark.parametrize("way", WAYS)
def test_stop_ends_what_an_agent_started(shop, left, way):
    shop.tasks({"t": {"prompt": "x", "coder": shell(left_so(way, left), WORKS)}})
    child = shop.begin("run")
    shop.wait(left.living)
    if way == "parent seen":
        shop.wait(lambda: known(shop).issuperset(map(str, left.living())))
    stopped = shop.type("task", "stop", "t")
    assert stopped.code == 0 and "stopped" in stopped.out, stopped
    assert left.living() == []
    shop.end(child)


def file_of_known(shop):
    return next((shop.repo / ".git/subagent-fleet/run/tasks/t").glob("processes-alive-*.json"), None)


def known(shop):
    """The numbers that the supervisor remembers of the task's agent."""
    path = file_of_known(shop)
    return {*json.loads(path.read_text())} if path else set()


def put_none_lives(shop, left):
    """Put a program on the PATH that succeeds if nothing lives of what was left."""
    shop.program("none-lives", f"""for one in $(cat {left}); do
        case "$(sed 's/.*) //' {PROC}/$one/stat)" in ""|Z*) ;; *) exit 1;; esac; done""")


@pytest.mark.parametrize("way", ["background", "no environment, no session", "twice forked"])
def test_nothing_that_setup_left_runs_when_its_agent_starts(shop, left, way):
    put_none_lives(shop, left)
    setup = f"{left_so(way, left)}\nuntil [ -s {left} ]; do sleep 0.05; done"
    assert shop.work(coder=shell(f"none-lives && {EDIT}"), setup=[setup], check="grep -q two a.txt",
                     check_in="same") == "done", shop.said
    assert left.numbers() and left.living() == []


@pytest.mark.parametrize("way", [way for way in WAYS if way != "plain"])
def test_nothing_that_an_agent_left_runs_during_its_check(shop, left, way):
    put_none_lives(shop, left)
    seen = "grep -q two a.txt && none-lives"
    coder = shell(EDIT, left_so(way, left), f"until [ -s {left} ]; do sleep 0.05; done")
    assert shop.work(coder=coder, check=seen) == "done", shop.said
    assert left.numbers() and left.living() == []


@pytest.mark.parametrize("way", WAYS)
def test_a_check_that_hangs_is_ended_with_all_that_it_started(shop, left, way):
    check = f"grep -q two a.txt || exit 1; {left_so(way, left)}\nsleep 300"
    state = shop.work(coder=shell(EDIT), check=check, deadline="4s", rounds=0)
    assert state == "failed" and left.numbers(), shop.said
    assert left.living() == []


@pytest.mark.parametrize("command", [["task", "stop", "t"], ["run", "t"]])
def test_the_next_supervisor_knows_what_the_last_one_has_seen(shop, left, command):
    way = left_so("parent seen", left)
    shop.tasks({"t": {"prompt": "x", "tries": 1, "check": "grep -q two a.txt",
                      "coder": shell(EDIT, way, WORKS)}})
    child = shop.begin("run")
    shop.wait(lambda: left.living() and known(shop).issuperset(map(str, left.living())))
    child.kill()
    child.communicate()
    (number,) = left.living()
    shop.wait(lambda: (PROC / str(number) / "stat").read_text().rpartition(")")[2].split()[1]
              not in known(shop))  # its parent has gone
    shop.let_go()
    done = shop.type(*command)
    assert done.code == 0, done
    assert left.living() == []


def test_a_number_that_has_become_anothers_is_left_alone(shop):
    innocent = subprocess.Popen(["sleep", "300"], start_new_session=True)
    try:
        shop.tasks({"t": {"prompt": "x", "coder": shell(EDIT, WORKS), "check": "true", "tries": 1}})
        child = shop.begin("run")
        shop.wait(lambda: known(shop))
        child.kill()
        child.communicate()
        place = file_of_known(shop)
        place.write_text(json.dumps({**json.loads(place.read_text()), innocent.pid: "1"}))
        assert shop.type("task", "stop", "t").code == 0
        assert innocent.poll() is None
    finally:
        innocent.kill()
        innocent.wait()


@needs_namespace
def test_an_agent_that_is_out_of_sight_is_not_said_to_have_stopped(shop):
    shop.tasks({"t": {"prompt": "x", "coder": shell(EDIT, WORKS)}})
    child = shop.begin("run")
    shop.wait(lambda: shop.works("t"))
    child.kill()
    child.communicate()
    command = [*NAMESPACE, sys.executable, "-I", "-S", PROGRAM, "task", "stop", "t"]
    done = subprocess.run(command, cwd=shop.repo, env=shop.environ, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == 1 and "still running" in done.stdout, done
    assert "stopped" not in done.stdout
    assert shop.row("t")["state"] == "parked" and "still running" in shop.row("t")["reason"]

    done = subprocess.run(command, cwd=shop.repo, env=shop.environ, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == 1 and re.search("t +parked +still running", done.stdout), done
    done = shop.type("task", "stop", "t")
    assert done.code == 0 and re.search("t +stopped +[1-9]", done.out), done
    assert shop.state() == "stopped"
    assert "already over" in shop.type("task", "stop", "t").out


def test_figures_are_of_all_that_an_agent_has_started(shop, left):
    busy = f"{sys.executable} -c \"data = bytearray(60 << 20)\nwhile True: data[5] = 1\" &"
    shop.tasks({"t": {"prompt": "x", "coder": shell(busy, stays(left, "env -i") + " &", WORKS)}})
    child = shop.begin("run")
    try:
        shop.wait(left.living)
        shop.wait(lambda: shop.row("t")["cpu_percent"] > 5 and shop.row("t")["memory_mb"] > 60
                  and shop.row("t")["processes"] >= 4)
    finally:
        stopped = shop.type("task", "stop", "t")
    assert stopped.code == 0, stopped
    shop.end(child)


# -- a filter of the person's that hangs --

@pytest.mark.parametrize("where", ["worktree", "snapshot"])
def test_stop_ends_a_git_that_waits_for_a_filter(shop, left, where):
    program = shop.program("filter", f"[ -e $HOME/slow ] || exec cat; echo $$ >> {left}; exec sleep 300")
    shop.commit(_gitattributes="*.txt filter=slow\n")
    direction = "smudge" if where == "worktree" else "clean"
    shop.git("config", f"filter.slow.{direction}", str(program))
    shop.tasks({"t": {"prompt": "x", "coder": shell(EDIT, "touch $HOME/slow")}})
    if where == "worktree":
        (shop.home / "slow").touch()
    child = shop.begin("run")
    shop.wait(left.living)
    stopped = shop.type("task", "stop", "t")
    assert stopped.code == 0 and "stopped" in stopped.out, stopped
    assert left.living() == []
    done = shop.end(child)
    assert where == "worktree" or "its work is only in" in done.out + done.err, done
    assert not list((shop.repo / ".git").rglob("*.lock"))
