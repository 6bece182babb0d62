"""Section *Demo*: the whole thing on simulated machines, and that it tells when it is not so."""
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

import subagent_fleet as sf
from tools import PROC, SCRIPT, clean_environment

COMMANDS = ["init", "validate", "generate", "warmup", "serve", "status", "run", "trace"]


@pytest.fixture
def places(tmp_path):
    """What `demo` could leave something in: {its environment}."""
    made = {}
    for name in ("HOME", "TMPDIR", "XDG_STATE_HOME", "cwd"):
        made[name] = tmp_path / name
        made[name].mkdir()
    return made


def left_in(places):
    return [str(path) for place in places.values() for path in place.rglob("*")]


def start(places, *python, words=("demo",), **env):
    """A demo as a process of its own."""
    environ = clean_environment(**{name: str(path) for name, path in places.items()
                                   if name != "cwd"}, **env)
    return subprocess.Popen([sys.executable, "-I", "-S", "-W", "error", *python, *words],
                            cwd=str(places["cwd"]), env=environ, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def end(process, sent=None):
    out, err = process.communicate(sent, timeout=60)
    return process.returncode, out.decode("utf-8"), err.decode("utf-8")


def typed(out):
    """The commands that it shows, in their order."""
    return [line.split()[2] for line in out.splitlines() if line.startswith("$ subagent-fleet ")]


@pytest.mark.slow
def test_demo_shows_everything_and_leaves_nothing(places):
    status, out, err = end(start(places, str(SCRIPT)))
    assert (status, err) == (0, ""), out
    assert typed(out) == COMMANDS
    for said in ("fleet.yaml is valid.", ": ready. Gateway at http", "put to sleep", "skips it for",
                 "fallback: ", "nothing left the house", "Served:", "3 of 3 done at home."):
        assert said in out, said
    assert re.search(r"^landed +checking .*sh test.sh$", out, re.M)
    assert re.search(r"^3 landed on main \(\w+\.\.\w+\), checked as a whole\.$", out, re.M)
    tail = out[out.index("$ subagent-fleet trace"):]
    assert re.search(r"^main [^$]*\n +planner .*\n +implementer [^$]*\n +reviewer ", tail, re.M)
    assert "Served:" not in tail and out.rindex("$ subagent-fleet") < out.rindex("reviewer")
    assert left_in(places) == []
    assert "`subagent-fleet up` does this with your own machines." in out


@pytest.mark.slow
def test_every_line_that_names_a_simulated_machine_says_so(places):
    _, out, _ = end(start(places, str(SCRIPT)))
    lines = [line for line in out.splitlines() if "laptop" in line or "mini" in line or "gpu" in line]
    assert len(lines) > 20
    for name in ("laptop", "mini", "gpu"):
        assert all(line.count(name) == line.count(f"sim-{name}") for line in lines)


@pytest.mark.slow
def test_demo_without_git_says_that_it_shows_no_tasks(places, tmp_path):
    status, out, err = end(start(places, str(SCRIPT), PATH=str(tmp_path)))
    assert (status, err) == (0, ""), out
    assert "(Tasks are not shown: git is not installed.)" in out
    assert typed(out) == [word for word in COMMANDS if word != "run"] and left_in(places) == []


@pytest.mark.slow
def test_demo_runs_from_standard_input(places):
    status, out, err = end(start(places, "-"), SCRIPT.read_bytes())
    assert (status, err, typed(out)) == (0, "", COMMANDS) and left_in(places) == []


# Other tests want the usual ports: they are taken from this process alone.
WITHOUT_PORTS = f"""
import errno, runpy, sys
def hook(event, words):
    if event == "socket.bind" and words[1][1] in (4000, 4001, 8080, 11434):
        raise OSError(errno.EADDRINUSE, "Address already in use")
sys.addaudithook(hook)
sys.argv = ["demo", "demo"]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_demo_needs_no_port_no_proxy_and_no_peace(places, tmp_path):
    """Two at once, the usual ports taken, a proxy that must not be asked."""
    others = {name: tmp_path / "other" / name for name in places}
    for place in others.values():
        place.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        url = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        more = dict.fromkeys(("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"), url)
        running = [start(each, "-c", WITHOUT_PORTS, words=(), **more) for each in (places, others)]
        assert [end(process)[0] for process in running] == [0, 0]
        proxy.settimeout(0.05)
        with pytest.raises(OSError):
            proxy.accept()
    assert left_in(places) == left_in(others) == []


@pytest.mark.slow
def test_demo_asks_nobody_beyond_loopback(places):
    """Every address that the process connects to, or looks up."""
    program = f"""
import os, runpy, sys
asked = []
os._exit = sys.exit  # else nothing is printed behind it
def hook(event, words):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto", "subprocess.Popen"):
        asked.append(words[1][0] if event == "socket.connect" else words[0])
sys.addaudithook(hook)
sys.argv = ["demo", "demo"]
try:
    runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
finally:
    print("ASKED", *sorted(set(map(str, asked))))
"""
    status, out, _ = end(start(places, "-c", program, words=()))
    asked = out.splitlines()[-1].split()[1:]
    programs = {asking.rpartition("/")[2] for asking in asked if asking.startswith("/")}
    assert status == 0 and {"git", "sh"} <= programs <= {"git", "sh", "claude", "ps", "bwrap"}
    assert [asking for asking in asked if not asking.startswith("/")] == ["127.0.0.1"]


@pytest.mark.slow
def test_demo_on_the_dashboard_goes_on_and_is_told_there(places):
    process = start(places, "-u", str(SCRIPT), words=("demo", "--ui", "--seconds", "12"),
                    PATH="")  # without git, so without tasks
    for line in process.stdout:
        url = re.search(rb"Dashboard: http://([0-9.:]+)(/\?code=\w+)", line)
        if url:
            break
    connection = http.client.HTTPConnection(url[1].decode(), timeout=10)
    connection.request("GET", url[2].decode())
    answer = connection.getresponse()
    cookie = answer.getheader("Set-Cookie").partition(";")[0]
    assert answer.status == 200 and answer.read()
    connection.request("GET", "/events", headers={"Cookie": cookie})
    events, told = connection.getresponse(), set()
    while not {"request", "receipt", "rest"} <= told:
        line = events.readline()
        assert line, told
        if line.startswith(b"data: "):
            row = json.loads(line[6:])
            told.update({row["kind"], *row} & {"request", "receipt", "rest"})
    connection.close()
    status, out, err = end(process)
    assert (status, err) == (0, ""), out
    assert out.count("asks the planner for a plan") >= 2 and left_in(places) == []


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals are posix's")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_demo_leaves_nothing_when_it_is_interrupted(places, number):
    process = start(places, "-u", str(SCRIPT))
    for line in process.stdout:
        if line.startswith(b"Serving"):
            break
    process.send_signal(number)
    status, _, err = end(process)
    assert (status, err.strip()) == (130, "interrupted") and left_in(places) == []


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals are posix's")
def test_demo_leaves_no_agent_when_it_is_interrupted(places):
    process = start(places, "-u", str(SCRIPT), words=("demo", "--seconds", "60"))
    for line in process.stdout:
        if re.match(rb"\w+ +started ", line):
            break
    process.send_signal(signal.SIGINT)
    status, _, err = end(process)
    assert (status, err.strip()) == (130, "interrupted") and left_in(places) == []
    agents = []
    for path in PROC.glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"HOME={places['TMPDIR']}".encode() in path.read_bytes():
                agents.append(path)
    assert not agents


@pytest.mark.slow
def test_demo_ends_quietly_when_nobody_reads_on(places):
    process = start(places, "-u", str(SCRIPT))
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 0 and left_in(places) == []


def returns(status):
    return lambda *words, **more: status


BREAKS = {  # on purpose: what is damaged, and which step notices
    "generate": (lambda patch: patch.setattr(sf.Workspace, "write", returns(None)), "no file for"),
    "warmup": (lambda patch: patch.setattr(sf.SimulatedNode, "_load", returns(None)), "warmup"),
    "serve": (lambda patch: patch.setattr(sf, "check_key", lambda *_: sf.find_command("x")),
              "does not serve"),
    "answers": (lambda patch: patch.setattr(sf.DemoNode, "reply", lambda *_: 1 / 0),
                "the gateway answered 5"),
    "land": (lambda patch: patch.setattr(sf.Lander, "look", lambda self, is_last: False),
             "the tasks did not land"),
    "page": (lambda patch: patch.setattr(sf, "DEMO_CLAUDE", sf.DEMO_CLAUDE.replace("page.strip()", "''")),
               "what login wrote is not there"),
    "slots": (lambda patch: patch.setattr(sf.ModelPlace, "is_free", returns(True)),
              "no implementer waited"),
    "audit": (lambda patch: patch.setattr(sf, "_tell_beyond", returns("it is far away")), "`trace` ended with 1"),
    "clean": (lambda patch: patch.setattr(sf, "remove_files", returns(None)), "`clean` left")}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (
    name in ("land", "page", "slots", "audit", "clean"))) for name in BREAKS])  # these play the whole of it
def test_demo_that_does_not_do_what_it_shows_says_so(quick, monkeypatch, name, tmp_path):
    damage, words = BREAKS[name]
    damage(monkeypatch)
    programs = os.environ["PATH"] if name in ("land", "page") else ""  # others show no tasks
    done = quick("demo", env={"TMPDIR": str(tmp_path), "HOME": str(tmp_path), "PATH": programs})
    assert done.returncode == 1
    assert "error: the demo did not do what it shows: " in done.stderr and words in done.stderr


@pytest.mark.slow
def test_demo_never_starts_the_persons_own_claude(quick, monkeypatch, tmp_path):
    """Where what it writes cannot be started: a /tmp without leave to execute."""
    claude = tmp_path / "claude"
    claude.write_text(f"#!/bin/sh\ntouch {tmp_path}/witness\n")
    claude.chmod(0o755)
    monkeypatch.setattr(sf.DemoWorld, "find_programs", lambda self, place: self.environ.update(
        PATH=f"{tmp_path}:{os.environ['PATH']}"))
    done = quick("demo", env={"TMPDIR": str(tmp_path), "HOME": str(tmp_path)})
    assert done.returncode == 0 and "(Tasks are not shown: no program can be started in " in done.stdout
    assert not (tmp_path / "witness").exists()


def test_the_break_of_a_demo_has_an_id():
    assert sf.demo_broken("x").slug == "demo-broken"


# -- the simulated node --

def test_a_node_that_sleeps_answers_nobody_and_wakes_at_its_port():
    world = sf.World()
    node = sf.SimulatedNode(world, {"a:1b": {}})
    port, version = node.port, sf.Ask("/api/version", lambda reply: bytes(reply.body))
    assert b"0.32.15" in world.ask(node.endpoint, version, deadline=world.clock() + 5)
    node.loaded["a:1b"] = 1
    node.fall_asleep()
    with pytest.raises(sf.NodeFailure, match="refused"):
        world.ask(node.endpoint, version, deadline=world.clock() + 5)
    node.wake()
    assert (node.port, node.loaded) == (port, {})
    assert world.ask(node.endpoint, version, deadline=world.clock() + 5)
    node.close()


def test_a_node_has_the_pace_it_was_given():
    slept = []
    world = sf.World()
    world.sleep = slept.append
    node = sf.SimulatedNode(world, {"a:1b": {}}, pace=sf.Pace(3.0, 100.0, 20.0))
    payload = {"model": "a:1b", "messages": [{"role": "user", "content": "x" * 4000}]}
    ask = sf.Ask("/api/chat", lambda reply: bytes(reply.body), payload)
    body = world.ask(node.endpoint, ask, deadline=world.clock() + 5)
    node.close()
    assert body.count(b"\n") == 3 and slept[0] == 3.0
    assert 9 < slept[1] < 12 and slept[2:4] == [0.05, 0.05]


def test_sleep_ends_what_is_being_answered():
    world = sf.World()
    node = sf.SimulatedNode(world, {"a:1b": {}}, pace=sf.Pace(0.0, 0.0, 0.5))
    payload = {"model": "a:1b", "messages": [{"role": "user", "content": "x"}]}
    ask = sf.Ask("/api/chat", lambda reply: bytes(reply.body), payload)
    ended = []

    def call():
        try:
            ended.append(world.ask(node.endpoint, ask, deadline=world.clock() + 30))
        except sf.NodeFailure as failure:
            ended.append(failure.reason)
    caller = threading.Thread(target=call)
    caller.start()
    while "asking" not in node._visitors.copy().values():
        time.sleep(0.01)
    time.sleep(0.1)
    node.fall_asleep()
    caller.join(1.5)
    assert ended == ["bad answer"]
    node.close()
