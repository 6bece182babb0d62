"""What a task's commands can write, with the real bubblewrap: seen from outside."""
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading

import pytest

import subagent_fleet as sf
from run_kit import WORKS, Shop, needs_bubblewrap, shell
from tools import ROOT

EDIT = "echo two > a.txt"


@pytest.fixture
def free(shop):
    """A Shop where the system's own bubblewrap is found."""
    (shop.bin / "bwrap").unlink()
    (shop.bin / "sandbox-exec").unlink()
    return shop


def try_to_write(*paths):
    """A command that writes each path, and says in the worktree which it could."""
    return "; ".join(f"(echo x >> {path}) && echo {number} >> could.txt"
                     for number, path in enumerate(paths)) + "; true"


def could(shop, name="t"):
    done = subprocess.run(["git", "show", f"run/{name}:could.txt"], cwd=shop.repo, capture_output=True)
    return [int(line) for line in done.stdout.split()]


# -- what is written, and what is not --

@needs_bubblewrap
def test_an_agent_cannot_remove_what_is_the_persons_and_goes_on(free):
    free.commit(_gitignore="node_modules/\n")
    free.write("node_modules/x.js", "1")
    assert free.work(coder=shell(f"rm -rf {free.repo}/node_modules", EDIT), check="grep -q two a.txt") == "done"
    assert (free.repo / "node_modules/x.js").read_text() == "1"
    assert free.receipt()["confined"] == "bwrap"
    assert free.receipt()["not_writable"] == [f"{free.repo}/node_modules/x.js"]
    assert "Read-only file system" in free.type("task", "log", "t", "stderr").out
    shown = free.type("tasks", "t").out
    assert "confined  bwrap" in shown and f"could not write {free.repo}/node_modules/x.js" in shown
    assert free.row("t")["confined"] == "bwrap"
    assert "not confined" not in free.said.err


@needs_bubblewrap
def test_it_writes_its_own_place_and_what_a_coder_needs_and_nothing_else(free):
    (free.home / ".codex").mkdir()
    (free.home / ".codex/config.toml").write_text("")
    (free.place / "mine").mkdir()
    config = (free.repo / ".git/config").read_text()
    task = free.home / f"state/subagent-fleet/worktrees/repo-{'?' * 8}"
    assert free.work(
        coder=shell("cat >/dev/null", try_to_write(
            "own.txt", "$TMPDIR/q", "/tmp/q", "~/.cache/x", "~/.codex/auth.json", f"{free.place}/mine/x",
            "/dev/null", "/dev/shm/x",
            "~/.codex/config.toml", "~/.bashrc", "~/x", f"{free.repo}/.git/config", f"{free.repo}/a.txt",
            f"{task}/t.check/a.txt", "/etc/x"), "test -w /proc/sys/kernel/hostname && echo 99 >> could.txt", "git add -A", "git commit -qm work"),
        check="true", sandbox_write=[f"{free.place}/mine"]) == "done", free.said
    assert could(free) == list(range(8))
    assert (free.place / "mine/x").exists() and (free.home / ".cache/x").exists()
    assert not pathlib.Path("/tmp/q").exists()
    assert (free.repo / ".git/config").read_text() == config
    assert not list(task.parent.glob("*/*tmp*")), "a temporary directory was left"


@needs_bubblewrap
def test_setup_and_check_are_confined_and_told_what_lets_them_write(free):
    (free.home / ".tool").mkdir()
    state = free.work(coder=shell(EDIT), setup=["touch ~/.tool/lock"], check="true")
    assert state == "parked" and "sandbox_write: [~/.tool]" in free.said.out
    state = free.work("u", coder=shell(EDIT), check="touch ~/.tool/lock")
    assert state == "failed"
    assert f"it may not write {free.home}/.tool/lock; to allow it: `sandbox_write: [~/.tool]`" in free.said.out
    state = free.work("v", coder=shell(EDIT), setup=["touch ~/.tool/lock"], check="touch ~/.tool/lock",
                      sandbox_write=["~/.tool"])
    assert state == "done" and (free.home / ".tool/lock").exists()


@needs_bubblewrap
def test_a_check_that_several_share_is_confined_as_the_strictest_wants(free):
    free.write(".tool/lock", "", free.home)
    free.write(".mine/lock", "", free.home)
    check = "echo x > ~/.tool/lock; echo x > ~/.mine/lock; true"
    tasks = {"a": {"sandbox": "off"}, "b": {"sandbox_write": ["~/.tool", "~/.mine"]},
             "c": {"sandbox_write": ["~/.mine"]}}
    free.tasks({name: {"prompt": "x", "coder": shell(f"echo {name} > {name}.txt"), "check": check, **task}
                for name, task in tasks.items()}, max=1)
    assert free.run().code == 0
    for name in (".tool", ".mine"):
        (free.home / name / "lock").write_text("")
    assert free.type("task", "land", "a", "b").code == 0
    assert (free.home / ".tool/lock").read_text() == "x\n"
    (free.home / ".tool/lock").write_text("")
    free.git("reset", "-q", "--hard", free.start)
    done = free.type("task", "land")
    assert done.code == 0 and "3 landed on main" in done.out, done
    assert not (free.home / ".tool/lock").read_text() and (free.home / ".mine/lock").read_text()


@needs_bubblewrap
def test_a_check_that_may_not_write_on_the_whole_is_told_what_lets_it(free):
    (free.home / ".tool").mkdir()
    check = "case $SUBAGENT_FLEET_CHECK in */landed) touch ~/.tool/lock;; esac"
    assert free.work(coder=shell(EDIT), check=check) == "done"
    done = free.type("task", "land")
    assert done.code == 1 and "to allow it: `sandbox_write: [~/.tool]`" in " ".join(done.out.split()), done


@needs_bubblewrap
@pytest.mark.slow
def test_one_task_writes_in_no_other_ones_place(free):
    place = free.home / "state/subagent-fleet/worktrees"
    free.tasks({"a": {"prompt": "x", "coder": shell(EDIT, WORKS)},
                "b": {"prompt": "x", "coder": shell(EDIT, f"until [ -e {place}/*/a/a.txt ]; do sleep 0.1; done",
                                                   f"echo evil > $(ls {place}/*/a/a.txt)", "touch $HOME/go; true")}},
               defaults={"tries": 1})
    child = free.begin("run")
    free.wait(lambda: free.rows()["b"]["state"] == "review")
    assert free.worktree("a").joinpath("a.txt").read_text() == "two\n"
    free.let_go()
    free.end(child)


@needs_bubblewrap
@pytest.mark.slow
def test_a_checkout_in_a_cache_is_still_the_persons(tmp_path):
    shop = Shop(tmp_path / "home/.cache/work")
    shop.environ["HOME"] = str(tmp_path / "home")
    (shop.home / ".gitconfig").rename(tmp_path / "home/.gitconfig")
    for name in ("bwrap", "sandbox-exec"):
        (shop.bin / name).unlink()
    assert shop.work(coder=shell("cat >/dev/null", try_to_write(
        "own.txt", f"{tmp_path}/home/.cache/x", f"{shop.repo}/a.txt", f"{shop.repo}/.git/config"))) == "review"
    shop.type("task", "accept", "t")
    assert could(shop) == [0, 1]
    assert (shop.repo / "a.txt").read_text() == "one\n"


@needs_bubblewrap
@pytest.mark.slow
def test_a_link_that_a_task_leaves_in_a_cache_leads_the_next_one_nowhere(free):
    free.environ["UV_CACHE_DIR"] = str(free.home / ".cache/uv")
    (free.home / ".ssh").mkdir()
    assert free.work(coder=shell("cat >/dev/null", EDIT, "ln -s ~/.ssh ~/.cache/uv"), check="true") == "done"
    assert (free.home / ".cache/uv").is_symlink()
    assert free.work("u", coder=shell("cat >/dev/null", EDIT, "echo x > ~/.ssh/rc; true"), check="true") == "done"
    assert list((free.home / ".ssh").iterdir()) == []


@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root could mount")
def test_root_mounts_no_way_out(free):
    assert free.work(coder=shell("cat >/dev/null", "mount -o remount,rw / && echo 0 >> could.txt",
                                 "unshare -Urm mount -o remount,rw / && echo 1 >> could.txt",
                                 "chown 12 a.txt && echo 2 >> could.txt")) == "review"
    free.type("task", "accept", "t")
    assert could(free) == [2]


@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0 or not os.path.exists("/usr/bin/python3"),
                    reason="only root becomes another user")
def test_a_user_without_privileges_is_confined_too():
    place = pathlib.Path(tempfile.mkdtemp(dir="/var/tmp", prefix="subagent-fleet-"))
    try:
        shop = Shop(place / "shop")
        for name in ("bwrap", "sandbox-exec"):
            (shop.bin / name).unlink()
        shutil.copy(ROOT / "subagent_fleet.py", place / "program.py")
        shop.tasks({"t": {"prompt": "x", "coder": shell("cat >/dev/null", try_to_write(
            "own.txt", f"{shop.repo}/a.txt")), "tries": 1, "check": "true"}})
        place.chmod(0o755)
        subprocess.run(["chown", "-R", "65534:65534", str(place)], check=True)
        done = subprocess.run(
            ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3",
             str(place / "program.py"), "run"], cwd=shop.repo, env=shop.environ, capture_output=True, text=True)
        if "No permissions to create a new namespace" in done.stderr:
            pytest.skip("this kernel gives users no namespaces")
        assert done.returncode == 0, done.stdout + done.stderr
        subprocess.run(["chown", "-R", "0:0", str(place)], check=True)
        assert could(shop) == [0] and shop.receipt()["confined"] == "bwrap"
        assert (shop.repo / "a.txt").read_text() == "one\n"
    finally:
        shutil.rmtree(place)


@needs_bubblewrap
def test_an_agent_reaches_this_machines_gateway(free):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        port = server.getsockname()[1]
        heard = []

        def listen():
            with server.accept()[0] as caller:
                heard.append(caller.recv(10))
        listening = threading.Thread(target=listen)
        listening.start()
        call = f"import socket; socket.create_connection(('127.0.0.1', {port})).sendall(b'hello')"
        free.work(coder=[sys.executable, "-c", call], changes="none")
        listening.join()
    assert heard == [b"hello"]


# -- how it ends, and how it goes on --

def has_begun(shop):
    """Whether an agent has edited its file."""
    files = shop.home.glob("state/subagent-fleet/worktrees/*/t/a.txt")
    return any(path.read_text() == "two\n" for path in files)


def sleepers(shop, seconds):
    return [number for number in shop.processes()
            if f"sleep\0{seconds}".encode() in pathlib.Path(f"/proc/{number}/cmdline").read_bytes()]


@needs_bubblewrap
def test_what_is_left_in_a_session_of_its_own_is_gone_with_the_agent(free):
    assert free.work(coder=shell(EDIT, "env -i HOME=$HOME setsid sleep 3001 & sleep 0.2"), check="true") == "done"
    assert sleepers(free, 3001) == []


@needs_bubblewrap
@pytest.mark.slow
def test_an_agent_outlives_its_supervisor_and_is_taken_up_by_the_next(free):
    free.use_claude()
    free.tasks({"t": {"prompt": f"@run {EDIT}\n@run {WORKS}\n@run (sleep 3002 >/dev/null 2>&1 &) ; echo x >> {free.repo}/a.txt",
                      "check": "grep -q two a.txt"}},
               defaults={"agent": "implementer", "tries": 1, "rounds": 0,
                         "sandbox_write": [str(free.home / "sessions")]})
    child = free.begin("run")
    free.wait(lambda: has_begun(free) and free.rows()["t"]["state"] == "running")
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    client = free.row("t")["processes"]
    assert client >= 4  # the shell, bubblewrap twice, the stub
    child = free.begin("run")
    free.wait(lambda: "reattached" in free.type("task", "log").out)
    free.let_go()
    done = free.end(child)
    assert free.state("t") == "done", done
    assert free.receipt()["confined"] == "bwrap" and free.row("t")["processes"] == 0
    assert (free.repo / "a.txt").read_text() == "one\n"
    assert free.processes() == []


@needs_bubblewrap
@pytest.mark.slow
def test_an_idle_client_is_spared_and_what_it_left_is_not(free):
    free.use_claude()
    beats = "sh -c 'while :; do echo >> ~/sessions/beats; sleep 0.1; done'"
    check = "cp ~/sessions/beats beats; sleep 0.5; cmp ~/sessions/beats beats || exit 9; grep -q two a.txt"
    free.tasks({"t": {"prompt": f"@run ({beats} & setsid {beats} &) >/dev/null 2>&1; sleep 0.3\n@write b.txt x",
                      "check": check}},
               defaults={"agent": "implementer", "tries": 1, "rounds": 1,
                         "sandbox_write": [str(free.home / "sessions")]})
    child = free.begin("run")
    done = free.end(child)
    assert free.state("t") == "failed", done
    receipt = free.receipt()
    assert receipt["check"]["rounds"] == [1, 1]
    inits = [line for line in (free.repo / ".git/subagent-fleet/run/tasks/t/1/out.jsonl").read_text().splitlines()
             if '"init"' in line]
    assert len(inits) == 2 and receipt["turns"] == 2, "the client was not spared"
    assert len({json.loads(line)["session_id"] for line in inits}) == 1
    events = free.type("task", "log").out
    assert events.count("started") == 1 and "resumed" not in events


@needs_bubblewrap
@pytest.mark.slow
def test_who_is_stopped_has_its_time_to_end(free):
    free.tasks({"t": {"prompt": "x", "coder": shell(
        "trap 'sleep 0.3; echo saved > saved.txt; exit 0' TERM", EDIT, "sleep 3004 & wait")}})
    child = free.begin("run")
    free.wait(lambda: has_begun(free))
    assert free.type("task", "stop", "t").code == 0
    free.end(child)
    assert (free.worktree("t") / "saved.txt").read_text() == "saved\n"
    assert free.processes() == []


@needs_bubblewrap
@pytest.mark.slow
def test_the_systems_own_alarm_ends_all_of_it(free):
    world = sf.World()
    world.environ = dict(free.environ)
    confiner = sf.find_confiner(world)
    own = free.place / "own"
    own.mkdir()
    box = sf.Box(str(free.repo), (sf.Grant(str(free.repo), True),), str(own), sf.find_shown([str(free.place)]))
    words = confiner.confine(world, box, ["sh", "-c", "setsid sleep 3005 & sleep 3005"])
    log = str(free.place / "log")
    child = world.spawn(sf.Launch(words, str(free.repo), world.environ, log, log, seconds=1))
    free.wait(lambda: sleepers(free, 3005), 10)
    free.wait(lambda: child.exit_code() is not None, 10)
    free.wait(lambda: not free.processes(), 10)


# -- a system that does not confine --

FAKES = {"broken": "echo no namespaces here >&2; exit 1",
         "confines nothing": 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"'}
WHY = {"broken": "`bwrap` does not work here: no namespaces here",
       "confines nothing": "`bwrap` lets a command write everywhere"}


@pytest.mark.parametrize("how", FAKES)
def test_what_does_not_confine_is_not_believed(shop, how):
    (shop.bin / "sandbox-exec").unlink()
    shop.program("bwrap", FAKES[how])
    shop.tasks({"t": {"prompt": "x", "coder": shell(EDIT), "sandbox": "required"}})
    done = shop.run()
    assert done.code == 3 and f"t: `sandbox: required`, but commands are not confined on this machine: {WHY[how]}" \
        in " ".join(done.err.split())
    assert "fix: write `sandbox: auto`" in done.err and "install" not in done.err  # it is there
    assert not list(shop.home.glob("state/subagent-fleet/worktrees/*/t"))
    assert shop.work(coder=shell(EDIT), check="true") == "done"
    assert f"Commands are not confined on this machine: {WHY[how]}." in " ".join(shop.said.err.split())
    assert shop.receipt()["confined"] == "no" and "confined  no" in shop.type("tasks", "t").out
    assert shop.work("u", coder=shell(EDIT), check="true") == "done"
    assert "not confined" not in shop.said.err, "said twice"
    assert not list((shop.repo / ".git/subagent-fleet/run").glob("probe*"))


def test_a_task_that_must_be_confined_and_came_later_is_parked(shop):
    child = shop.begin("run", "--keep-going")
    shop.wait(lambda: (shop.repo / ".git/subagent-fleet/run/lock.pid").exists())
    shop.type("task", "add", "t:x", "--coder", "[cat]", "--sandbox", "required")
    shop.wait(lambda: shop.state() == "parked")
    assert shop.row("t")["cause"] == "not-confined" and not list(shop.home.glob("state/subagent-fleet/worktrees/*/t"))
    child.send_signal(signal.SIGINT)
    shop.end(child)


def test_a_machine_without_bubblewrap_says_what_to_install(shop):
    for name in ("bwrap", "sandbox-exec"):
        (shop.bin / name).unlink()
    for place in os.environ["PATH"].split(":"):
        for program in pathlib.Path(place).glob("*"):
            if program.name not in ("bwrap", "sandbox-exec") and not (shop.bin / program.name).exists():
                (shop.bin / program.name).symlink_to(program)
    shop.environ["PATH"] = str(shop.bin)
    assert shop.work(coder=shell(EDIT), check="true") == "done"
    assert "bubblewrap (`bwrap`) is not installed" in " ".join(shop.said.err.split())


def test_off_is_off(free):
    mine = free.place / "mine.txt"
    assert free.work(coder=shell(EDIT, f"echo x > {mine}"), check="true", sandbox="off") == "done"
    assert mine.exists() and free.receipt()["confined"] == "no" and "confined on" not in free.said.err


# -- a Mac --

@needs_bubblewrap
def test_sandbox_exec_confines_by_its_profile(free):
    """As far as Linux can: the profile is obeyed by a stand-in."""
    free.program("sandbox-exec", f'exec "{sys.executable}" -I -S "{ROOT}/tests/rigs/sandbox_exec.py" "$@"')
    temporary = free.place / "T"
    temporary.mkdir()
    (free.home / ".cache").mkdir()
    free.environ["TMPDIR"] = str(temporary)
    (free.place / "x.txt").write_text("")
    state = free.work(coder=shell("cat >/dev/null", "echo $TMPDIR >> where.txt", try_to_write(
        "own.txt", "$TMPDIR/x", "~/.cache/x", f"{free.repo}/a.txt", f"{free.place}/x.txt"), EDIT), check="true")
    assert state == "done", free.said
    assert could(free) == [0, 1, 2]
    assert free.receipt()["confined"] == "sandbox-exec"
    assert free.git("show", "run/t:where.txt").startswith(f"{temporary}/sf-")
    assert list(temporary.iterdir()) == []


@pytest.mark.skipif(sys.platform != "darwin", reason="the real sandbox-exec is a Mac's")
def test_a_real_mac_confines(free):
    state = free.work(coder=shell("cat >/dev/null", try_to_write("own.txt", "$TMPDIR/x", f"{free.repo}/a.txt"),
                                  EDIT), check="true")
    assert state == "done", free.said
    assert free.receipt()["confined"] == "sandbox-exec"
    assert could(free)[:1] == [0] and (free.repo / "a.txt").read_text() == "one\n"


# -- ports --

def test_each_task_has_ten_ports_of_its_own_for_setup_agent_and_check(shop):
    say = "echo $PORT >> ports.txt"
    task = {"prompt": "x", "coder": shell(EDIT, say, "test -e $HOME/go"), "setup": [say], "tries": 1,
            "check": "test $(sort -u ports.txt | wc -l) = 1 && test $PORT = $(head -1 ports.txt) && test -e $HOME/go"}
    shop.tasks({"a": task, "b": task})
    with socket.create_server(("127.0.0.1", 20003)) if sf.World().is_port_free(20003) else socket.socket():
        shop.run()
    ports = [shop.row(name)["port"] for name in ("a", "b")]
    assert len(set(ports)) == 2 and all(port % 10 == 0 and 20010 <= port < 32768 for port in ports)
    shop.let_go()
    shop.type("task", "retry", "*")
    shop.run()
    assert [shop.row(name)["port"] for name in ("a", "b")] == ports
    assert [shop.row(name)["state"] for name in ("a", "b")] == ["done", "done"], shop.type("task", "log", "a", "check")
    other = shop.place / "other"
    subprocess.run(["git", "clone", "-q", str(shop.repo), str(other)], check=True, env=shop.environ)
    shop.repo = other
    shop.tasks({"a": {"prompt": "x", "coder": shell(EDIT)}})
    shop.run()
    assert shop.row("a")["port"] not in (0, *ports)


def test_a_task_file_says_what_is_writable(shop):
    shop.tasks({"t": {"prompt": "x", "sandbox": "on", "sandbox_write": ["/", "~", "../x", "~/.gradle"]}})
    done = shop.type("validate")
    said = " ".join((done.out + done.err).split())
    assert done.code == 1 and "accepted: `auto` or `required` or `off`" in said
    assert said.count("a path from `/`, from `~/`, or from the checkout") == 3, said


def test_typed_tasks_are_confined_as_they_are_told(shop):
    shop.type("run", "t:x", "--coder", "[cat]", "--sandbox", "off", "--sandbox-write", "~/.gradle")
    keys = {row["key"]: row["value"] for row in shop.row("t")["keys"]}
    assert keys["sandbox"] == "off" and "~/.gradle" in keys["sandbox_write"]


