"""Fixtures of the live tier, and its honesty: a live test that did not run is said aloud."""

import ctypes
import fcntl
import functools
import os
import platform
import socket
import struct
import subprocess
import sys
import time

import pytest

import install
import rig

REQUIRED = bool(os.environ.get("CI")) or os.environ.get("SUBAGENT_FLEET_LIVE") == "required"
_SKIPPED = []
_RAN = []


# -- a network of our own -----------------------------------------------------------------------


def leave_the_network():
    """Move into a network that has only loopback, and on it nobody else's ports; say whether.

    Linux lets root do it. Elsewhere the trap alone watches over the way out, and an Ollama of
    this machine's own on port 11434 would be found by `init`.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    if ctypes.CDLL(None, use_errno=True).unshare(0x40000000):  # CLONE_NEWNET
        return False
    with socket.socket() as any_socket:  # SIOCSIFFLAGS: loopback is up and running
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh22x", b"lo", 0x41))
    return True


# -- what is there, and saying so ---------------------------------------------------------------


@functools.cache
def look_around():
    """Name the components that are not installed, and what is there; leave the network if all is.

    Asked by the first live test that is to run: who collects them all to run another one waits
    for nothing, and where none can run the other tests keep their network.
    """
    answers = {"engine": install.engine_version, "ollama": install.ollama_version,
               "litellm": lambda: install.package_version(install.LITELLM_PYTHON, "litellm"),
               "claude-latest": lambda: install.claude_version("latest"),
               "claude-node20": lambda: install.claude_version("node20"),
               "sdk": lambda: install.package_version(install.SDK_PYTHON, "anthropic"),
               "openai sdk": lambda: install.package_version(install.SDK_PYTHON, "openai"),
               **install.harness_versions(),
               "release": lambda: install.package_version(install.RELEASE_PYTHON,
                                                          install.BUILDER[0])}
    found = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(),
             "system": f"{platform.system()} {platform.machine()}"}
    absent = []
    for name, answer in answers.items():
        try:
            found[name] = answer()
        except (install.InstallError, OSError, ValueError, subprocess.TimeoutExpired):
            absent.append(name)
    if not any(install.MODELS.glob("*.gguf")):
        absent.append("models")
    if not absent:
        alone = leave_the_network()
        found["network"] = "loopback only" if alone else "this machine's, watched by a trap"
    return absent, found


def pytest_runtest_setup(item):
    absent, _ = look_around()
    reason = ""
    if absent:
        reason = f"not installed: {', '.join(absent)}; fix: python3 tests/live/install.py"
    elif "PYTEST_XDIST_WORKER" in os.environ:
        reason = "there is one rig, for one process; fix: python3 tests live"
    if reason and REQUIRED:
        pytest.fail(f"a live test was skipped where none may be: {reason}", pytrace=False)
    if reason:
        pytest.skip(reason)


def pytest_runtest_logreport(report):
    if report.skipped:
        _SKIPPED.append((report.nodeid, report.longrepr[2] if report.longrepr else ""))
    elif report.when == "call":
        _RAN.append(report.nodeid)


def pytest_sessionfinish(session, exitstatus):
    if REQUIRED and _SKIPPED and exitstatus == 0:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter):
    if _SKIPPED:
        terminalreporter.section("LIVE TESTS THAT DID NOT RUN", sep="!", red=True)
        for nodeid, reason in _SKIPPED:
            terminalreporter.line(f"{nodeid}: {reason}")
        if REQUIRED:
            terminalreporter.line("CI or SUBAGENT_FLEET_LIVE=required: this run FAILS for it.")
    elif _RAN:
        terminalreporter.section("works with")
        for name, version in look_around()[1].items():
            terminalreporter.line(f"{name:14} {version}")


# -- the rig ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def ground(tmp_path_factory):
    """A folder for the whole session."""
    return tmp_path_factory.mktemp("live")


@pytest.fixture(scope="session")
def trap():
    """Nothing leaves loopback: every program's way out leads here, and it must stay unused."""
    trap = rig.Trap()
    yield trap
    assert trap.wanted == [], f"something wanted to leave this machine: {trap.wanted}"


@pytest.fixture(scope="session")
def nodes(ground, trap):
    """Two real Ollama servers: `studio` with the heavy model, `mini` with the small ones."""
    pair = {
        "studio": rig.OllamaNode("studio", ground / "studio", {
            "coder-large:latest": "dispatcher", "talker:latest": "talker",
            "shared:latest": "shared", "thinker:latest": "thinker"}, trap),
        "mini": rig.OllamaNode("mini", ground / "mini", {
            "coder-small:latest": "worker", "talker:latest": "talker",
            "shared:latest": "shared", "tight:latest": "shared"}, trap),
    }
    yield pair
    for node in pair.values():
        node.stop()


@pytest.fixture
def running(nodes):
    """Both nodes, alive again if a test killed one."""
    for node in nodes.values():
        node.ensure()
    return nodes


@pytest.fixture
def claude(trap, tmp_path):
    """Run a command that ends in headless Claude Code, in a HOME nobody has lived in."""
    def run(argv, *, cwd, timeout=120, **more):
        home = tmp_path / f"home-{time.monotonic_ns()}"
        home.mkdir()
        return rig.run_session(argv, cwd=cwd, timeout=timeout,
                               env=rig.bare_environment(home, trap, **more))
    return run


@pytest.fixture(scope="session")
def builtin_agents(ground, trap):
    """What each Claude Code lists in an empty folder; nothing answers, so nothing is asked."""
    found = {}
    for which, program in install.CLAUDES.items():
        place = ground / f"empty-{which}"
        place.mkdir()
        env = rig.bare_environment(place, trap, ANTHROPIC_BASE_URL="http://127.0.0.1:9",
                                   ANTHROPIC_AUTH_TOKEN="sk-made-up", CLAUDE_CODE_MAX_RETRIES="0",
                                   CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1")
        session = rig.run_session([program, "-p", "hi", *rig.CLAUDE_FLAGS], cwd=place, env=env)
        found[which] = set(session.init["agents"])
    return found


@pytest.fixture(scope="module")
def capture():
    """A server that stands for Anthropic or for a node and keeps what it was asked."""
    capture = rig.Capture()
    yield capture
    capture.close()
