"""What tests share: places, ports, time, environments, keys, golden files, a fleet file."""
import atexit
import contextlib
import gc
import getpass
import hashlib
import itertools
import marshal
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings

import pytest

import subagent_fleet as sf

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "subagent_fleet.py"
GOLDEN = ROOT / "tests" / "golden"
PROC = pathlib.Path(os.environ.get("SUBAGENT_FLEET_PROC") or "/proc")  # elsewhere: see as_mac.py

HOSTED_VARIABLES = ("ANTHROPIC_", "CLAUDE", "LITELLM_", "OLLAMA_", "SUBAGENT_FLEET_CONFIG", "http_",
                    "https_", "HTTP_", "HTTPS_", "ALL_PROXY", "NO_COLOR", "FORCE_COLOR",
                    "COLUMNS", "TERM", "PYTHONPYCACHEPREFIX")


# -- the program --

# Compiling the file takes longer than most of its commands: it is done once for all runs.
_LAUNCHER = """\
import marshal, sys
{rename}__cached__ = {code!r}  # it has been started from bytecode
with open(__cached__, "rb") as stream:
    code = marshal.load(stream)
exec(code, sys.modules["__main__"].__dict__)
"""


def compiled():
    """The compiled file, kept beside other temporary files under the hash of its path and text."""
    source = SCRIPT.read_bytes()
    name = f"{hashlib.sha256(os.fsencode(SCRIPT) + source).hexdigest()[:16]}.{sys.implementation.cache_tag}"
    place = pathlib.Path(tempfile.gettempdir()) / f"subagent-fleet-tests-{getpass.getuser()}"
    place.mkdir(mode=0o700, exist_ok=True)
    path = place / name
    if not path.exists():
        code = compile(source, str(SCRIPT), "exec")
        begun = place / f"{name}.{os.getpid()}"
        begun.write_bytes(marshal.dumps(code))
        begun.replace(path)
    return path


def launcher(path, typed=""):
    """Write a program that runs the compiled file; messages name it as `typed`, else by its path."""
    rename = f"sys.argv[0] = {typed!r}\n" if typed else ""
    path.write_text(_LAUNCHER.format(rename=rename, code=str(compiled())), encoding="utf-8")
    path.chmod(0o755)
    return path


def program_path():
    """The file as `python3 PATH` runs it, without compiling it again."""
    path = compiled().with_suffix(f".{os.getpid()}.py")
    atexit.register(path.unlink)
    return str(launcher(path, str(SCRIPT)))


PROGRAM = program_path()


def install(directory):
    """Give the program the name it has where it is installed, which messages then use."""
    program = directory.parent / f"{directory.name}-bin" / "subagent-fleet"
    if not program.exists():
        program.parent.mkdir()
        launcher(program)
    return program


def on_terminal(words, cwd, typed=b"", program=None, **env):
    """Run with a terminal for stdin, stdout and stderr; return (exit status, what it shows)."""
    pty = pytest.importorskip("pty")
    child, master = pty.fork()
    if child == 0:
        os.chdir(cwd)
        argv = [program, *words] if program else [sys.executable, "-I", "-S", PROGRAM, *words]
        os.execve(argv[0], argv, clean_environment(**env))
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


# -- the program in this process --

class TookTooLong(BaseException):
    """A command that was run in this process did not end; not an Exception, which `main` reports."""


def run_main(words, *, cwd, env=None, input=None, timeout=30):
    """Run a command as a process would, but in this one: 1 ms instead of 140.

    It has its own environment, working directory, standard input and output, down to the
    descriptors, which a program that it starts inherits; all of it is put back, as are the
    signals' handlers. Returns what subprocess.run returns.
    """
    words = [str(word) for word in words]
    this = os.getpid()
    with contextlib.ExitStack() as restoring:
        files = [restoring.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        files[0].write(input or b"")
        files[0].seek(0)
        _lend_streams(files, restoring)
        _lend_place(cwd, {} if env is None else env, restoring)
        _lend_signals(timeout, restoring)
        restoring.enter_context(warnings.catch_warnings())
        warnings.simplefilter("error")
        status = sf.main(words)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        if os.getpid() != this:  # it went into the background, and has ended there
            os._exit(status)
        told = []
        for file in files[1:]:
            file.seek(0)
            told.append(file.read())
    return subprocess.CompletedProcess(words, status, *told)


def _lend_streams(files, restoring):
    """Put files in the place of the standard streams and their descriptors."""
    modes = (("stdin", "r", "strict"), ("stdout", "w", "strict"), ("stderr", "w", "backslashreplace"))
    for number, (file, (name, mode, errors)) in enumerate(zip(files, modes)):
        kept = os.dup(number)
        restoring.callback(os.close, kept)
        restoring.callback(os.dup2, kept, number)
        os.dup2(file.fileno(), number)
        stream = open(number, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        for place in (name, f"__{name}__"):  # the second is asked for the terminal's width
            restoring.callback(setattr, sys, place, getattr(sys, place))
            setattr(sys, place, stream)


def _lend_place(cwd, env, restoring):
    """Go to a directory with an environment of its own."""
    restoring.callback(os.chdir, os.getcwd())
    os.chdir(cwd)
    restoring.callback(_set_environment, dict(os.environ))
    _set_environment(clean_environment(**env))


def _set_environment(values):
    os.environ.clear()
    os.environ.update(values)


def _lend_signals(timeout, restoring):
    """Let the command take signals, and end it after so many seconds."""
    def end(*_):
        raise TookTooLong(f"it took longer than {timeout} s")
    assert threading.current_thread() is threading.main_thread(), "a thread cannot take signals"
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM"):
        if hasattr(signal, name):
            number = getattr(signal, name)
            restoring.callback(signal.signal, number, signal.getsignal(number))
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, end)
        restoring.callback(signal.setitimer, signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_REAL, timeout)


# -- ports --

_PORTS = itertools.cycle(random.sample(range(20000, 30000), 10000))
_CLAIMS = []


def free_port():
    """Find a port nobody has, below those that systems give to whoever calls out.

    It is this process's until it ends: the UDP port of the same number, which nobody else wants,
    is the claim that every other test process sees. Five digits: a recorder can swap it in a
    Host header.
    """
    for port in itertools.islice(_PORTS, 10000):
        claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            claim.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            continue
        if is_silent(port):
            _CLAIMS.append(claim)
            return port
        claim.close()
    raise AssertionError("no port between 20000 and 30000 is free")


def is_silent(port):
    """Say whether nothing listens on a port of loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


# -- what is random --

def in_parts(count, size):
    """Seeds 0 to count in parts: each is a test, so that processors share them."""
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


# -- time --

@contextlib.contextmanager
def not_held_up(seconds):
    """Fail where the block waits for what would hold it up for that many seconds.

    No claim about speed: half of the hold is far above what a busy machine adds.
    """
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds / 2, f"it was held up for {seconds} s"


def grows_linearly(work, small, large):
    """Say whether four times as much takes work() the processor time of linear growth.

    Linear is 4 times, quadratic 16: 8 is in between. Under 0.2 s nothing is told from noise,
    and what is quadratic is so in each of three tries.
    """
    return any(processor_seconds(work, large) < 8 * processor_seconds(work, small) + 0.2
               for _ in range(3))


def processor_seconds(work, value):
    """The processor time of work(value): what else the machine or a thread does is not in it.

    Neither is the collector's, which walks all that the tests before have left.
    """
    gc.disable()
    try:
        began = time.thread_time()
        work(value)
        return time.thread_time() - began
    finally:
        gc.enable()


# -- what the program waits for, and how much it takes: by words, as tests say them --

LIMITS = {
    "quiet": "QUIET_SECONDS", "silence": "SILENCE_SECONDS", "probe": "PROBE_TIMEOUT_SECONDS",
    "request": "REQUEST_SECONDS", "body": "BODY_SECONDS",
    "grace": "GRACE_SECONDS", "rest": "REST_SECONDS", "longest_rest": "REST_LIMIT_SECONDS",
    "events_pause": "EVENTS_PAUSE_SECONDS", "progress": "PROGRESS_SECONDS",
    "load_look": "LOAD_LOOK_SECONDS", "busy": "BUSY_SECONDS", "hung": "HUNG_SECONDS",
    "pull_stall": "PULL_STALL_SECONDS", "sleep_test": "SLEEP_TEST_SECONDS",
    "wake": "WAKE_SECONDS", "wake_pause": "WAKE_PAUSE_SECONDS", "wake_again": "WAKE_AGAIN_SECONDS",
    "try_wait": "TRY_WAIT_SECONDS", "ask": "ASK_SECONDS", "api_wait": "API_WAIT_SECONDS",
    "init": "INIT_TIMEOUT_SECONDS", "connections": "CONNECTION_LIMIT", "idle": "IDLE_LIMIT",
    "bodies": "BODIES_LIMIT_BYTES", "answer": "ANSWER_LIMIT_BYTES",
    "receipts": "RECEIPTS_LIMIT_BYTES", "aside": "ASIDE_LIMIT", "lost": "LOST_LIMIT",
    "part": "PART_BYTES", "receipts_read": "RECEIPTS_READ_BYTES",
    "again": "AGAIN_SECONDS", "answer_token": "ANSWER_SECONDS_A_TOKEN",
    "warmths": "SHOWN_WARMTHS_LIMIT", "measurements": "MEASUREMENTS_LIMIT"}


def limit_of(word):
    """How long the program waits for something, or how much of it it takes."""
    return getattr(sf, LIMITS[word])


# -- environments and keys --

def clean_environment(**more):
    """The environment without what would steer the product."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(HOSTED_VARIABLES)}
    kept["PYTHONDONTWRITEBYTECODE"] = "1"
    kept.update({name: str(value) for name, value in more.items()})
    return kept


def keys_near(directory):
    """The gateway keys that lie in a directory or just below it: no output may hold one."""
    keys = []
    for pattern in (".env.subagent-fleet", "*/.env.subagent-fleet"):
        for path in pathlib.Path(directory).glob(pattern):
            if path.is_file():
                keys += re.findall("sk-[0-9a-f]{64}", path.read_bytes().decode("latin-1"))
    return keys


# -- golden files --

def golden_text(name):
    """What tests/golden/NAME holds; None where there is no such file."""
    path = GOLDEN / name
    return path.read_bytes().decode("utf-8") if path.exists() else None


def accept_golden(name, text):
    """Write tests/golden/NAME where SUBAGENT_FLEET_ACCEPT asks for it, and never else."""
    if os.environ.get("SUBAGENT_FLEET_ACCEPT"):
        path = GOLDEN / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8"))


# -- a fleet file to change --

EXAMPLE = """\
project:
  name: local-dev
  gateway:
    provider: litellm
    host: 127.0.0.1
    port: 4000
nodes:
  mini:
    endpoint: http://192.168.1.50:11434
    tags: [heavy]
  laptop:
    endpoint: http://localhost:11434
models:
  heavy-coder:
    node: mini
    ollama_model: qwen3-coder:30b
    litellm_alias: claude-sonnet-local
    context: 65536
  small-coder:
    node: laptop
    ollama_model: qwen3:8b
    litellm_alias: claude-haiku-local
agents:
  planner:
    model: small-coder
    description: Use for planning.
    tools: [Read, Grep]
  implementer:
    model: heavy-coder
    description: Use for code.
"""


def edited(*changes):
    """The example with replacements, each of which must apply."""
    text = EXAMPLE
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text
