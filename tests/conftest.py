"""Fixtures: the module, the command line as a black box, golden comparison."""
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "subagent_fleet.py"
sys.path.insert(0, str(ROOT))
sys.dont_write_bytecode = True
# A shell's background job ignores Ctrl-C, and so would every program that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

HOSTED_VARIABLES = ("ANTHROPIC_", "CLAUDE", "LITELLM_", "OLLAMA_", "SUBAGENT_FLEET_CONFIG", "http_",
                    "https_", "HTTP_", "HTTPS_", "ALL_PROXY", "NO_COLOR", "FORCE_COLOR",
                    "COLUMNS", "TERM")


_PORTS = iter(random.sample(range(20000, 30000), 10000))  # none is given twice


def free_port():
    """Find a port nobody has, below those that systems give to whoever calls out."""
    for port in _PORTS:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def clean_environment(**more):
    """The environment without what would steer the product."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(HOSTED_VARIABLES)}
    kept["PYTHONDONTWRITEBYTECODE"] = "1"
    kept.update({name: str(value) for name, value in more.items()})
    return kept


@pytest.fixture
def run_cli(tmp_path):
    """Run the file as a user does; gives stdout, stderr (text) and returncode."""
    def run(*words, cwd=tmp_path, env=None, input=None, python=(), timeout=30):
        command = [sys.executable, "-I", "-S", "-W", "error", *python, str(SCRIPT), *map(str, words)]
        done = subprocess.run(command, cwd=str(cwd), env=clean_environment(**(env or {})),
                              input=input, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              timeout=timeout)
        done.stdout = done.stdout.decode("utf-8", "surrogateescape")
        done.stderr = done.stderr.decode("utf-8", "surrogateescape")
        assert "Traceback" not in done.stderr, done.stderr
        if "env" not in words:  # the one command that is asked for the key
            assert [key for key in keys_near(cwd) if key in done.stdout + done.stderr] == []
        return done
    return run


def keys_near(directory):
    """The gateway keys that lie in a directory or just below it: no output may hold one."""
    found = []
    for pattern in (".env.subagent-fleet", "*/.env.subagent-fleet"):
        for path in pathlib.Path(directory).glob(pattern):
            if path.is_file():
                found += re.findall("sk-[0-9a-f]{64}", path.read_bytes().decode("latin-1"))
    return found


@pytest.fixture
def fake_node():
    """Start scriptable Ollamas on loopback; see tests/fake_ollama.py."""
    from fake_ollama import FakeNode

    started = []

    def start(models=None, **more):
        started.append(FakeNode(models, **more))
        return started[-1]
    yield start
    for node in started:
        node.close()


@pytest.fixture
def golden(request):
    """Compare a text with tests/golden/NAME; SUBAGENT_FLEET_ACCEPT=1 writes it."""
    def compare(name, text):
        path = ROOT / "tests" / "golden" / name
        if os.environ.get("SUBAGENT_FLEET_ACCEPT"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode("utf-8"))
        wanted = path.read_bytes().decode("utf-8") if path.exists() else None
        accept = f"SUBAGENT_FLEET_ACCEPT=1 python3 -m pytest {request.node.nodeid!r}"
        assert text == wanted, f"tests/golden/{name} differs; to accept it: {accept}"
    return compare
