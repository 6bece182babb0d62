"""Fixtures: the command line as a black box, golden comparison; frames name their part."""
import functools
import importlib.util
import signal
import subprocess
import sys

import pytest

import subagent_fleet as sf
from fake_ollama import FakeNode
from tools import (
    LIMITS,
    ROOT,
    SCRIPT,
    accept_golden,
    clean_environment,
    golden_text,
    install,
    keys_near,
    run_main,
)

pytest_plugins = ("gateway_rig", "workspace_cases", "run_kit", "task_rig", "front_rig")
sys.dont_write_bytecode = not sys.pycache_prefix  # nothing is left in the checkout
# What the gateway waits before it files, and any command before it looks again, is for disks and
# for people: most of what the tests would wait for.
sf.ASIDE_SECONDS, sf.TICK_SECONDS = 0.001, 0.02
# A shell's background job ignores Ctrl-C, and so would every program that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@functools.cache
def house():
    """src/build.py as a module, and the lines that it builds."""
    spec = importlib.util.spec_from_file_location("build", ROOT / "src/build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    return build, build.build(build.read_house())


def pytest_sessionstart(session):
    """Test nothing where the file is not the build."""
    if hasattr(session.config, "workerinput"):
        return
    done = subprocess.run([sys.executable, str(ROOT / "src/build.py"), "--check"],
                          capture_output=True, text=True)
    if done.returncode:
        pytest.exit(done.stderr.strip(), returncode=4)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Name, beside each frame of the built file, its part and the line there."""
    outcome = yield
    trace = getattr(outcome.get_result().longrepr, "reprtraceback", None)
    for entry in getattr(trace, "reprentries", ()):
        place = getattr(entry, "reprfileloc", None)
        if place and str(place.path).endswith(SCRIPT.name):
            build, built = house()
            place.message += f" ({build.where(built, [str(place.lineno)])[0]})"


def checked(done, cwd):
    """The result as text, in which no traceback stands and no key."""
    done.stdout = done.stdout.decode("utf-8", "surrogateescape")
    done.stderr = done.stderr.decode("utf-8", "surrogateescape")
    assert "Traceback" not in done.stderr, done.stderr
    if "env" not in done.args:  # the one command that is asked for the key
        assert [key for key in keys_near(cwd) if key in done.stdout + done.stderr] == []
    return done


@pytest.fixture
def run_cli(tmp_path):
    """Run a command in this process; gives stdout, stderr (text) and returncode."""
    def run(*words, cwd=tmp_path, **more):
        return checked(run_main(words, cwd=cwd, **more), cwd)
    return run


@pytest.fixture
def run_process(tmp_path):
    """Run the file as a user does, installed, where a process is the point: it costs 140 ms."""
    def run(*words, cwd=tmp_path, env=None, input=None, timeout=30):
        command = [sys.executable, "-I", "-S", "-W", "error", str(install(tmp_path)),
                   *map(str, words)]
        done = subprocess.run(command, cwd=str(cwd), env=clean_environment(**(env or {})),
                              input=input, stdin=subprocess.DEVNULL if input is None else None,
                              capture_output=True, timeout=timeout)
        return checked(done, cwd)
    return run


@pytest.fixture
def limits(monkeypatch):
    """Change what the program waits for and takes, by the words of tools.LIMITS: limits(quiet=0.1)."""
    def change(**values):
        for word, value in values.items():
            monkeypatch.setattr(sf, LIMITS[word], value)
    return change


@pytest.fixture
def fake_node():
    """Start scriptable Ollamas on loopback; see tests/rigs/fake_ollama.py."""
    started = []

    def start(models=None, **more):
        started.append(FakeNode(models, **more))
        return started[-1]
    yield start
    for node in started:
        node.close()


@pytest.fixture(autouse=True)
def memory_of_nobody(monkeypatch):
    """What is advised for this machine's memory is the same on every machine."""
    monkeypatch.setattr(sf.World, "total_gigabytes", lambda world: 0.0)


@pytest.fixture
def in_lan(monkeypatch):
    """The address in the LAN of the machine on which `worker` is typed.

    It is a second one of loopback: what listens everywhere answers there, and no test asks
    anybody's network.
    """
    own, kind_of = "127.0.0.9", sf.address_kind
    monkeypatch.setattr(sf, "address_kind", lambda host: "LAN" if host == own else kind_of(host))
    monkeypatch.setattr(sf.World, "own_names", lambda world: ("vm.local", (own,)))
    return own


@pytest.fixture
def golden(request):
    """Compare a text with tests/golden/NAME; SUBAGENT_FLEET_ACCEPT=1 writes it."""
    def compare(name, text):
        accept_golden(name, text)
        wanted = golden_text(name)
        accept = f"SUBAGENT_FLEET_ACCEPT=1 python3 -m pytest {request.node.nodeid!r}"
        assert text == wanted, f"tests/golden/{name} differs; to accept it: {accept}"
    return compare
