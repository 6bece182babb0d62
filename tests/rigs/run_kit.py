"""A repository and a person who types commands in it: runs seen from outside, by git and files."""
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from tools import PROC, PROGRAM, ROOT, clean_environment, free_port

STUB = ROOT / "tests" / "rigs" / "stub_claude.py"
GIT = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a",
       "GIT_COMMITTER_EMAIL": "a@b", "GIT_CONFIG_NOSYSTEM": "1", "GIT_OPTIONAL_LOCKS": "0"}
FLEET = """\
project: {name: local-dev, gateway: {port: PORT}}
nodes: {mini: {endpoint: "http://127.0.0.1:9"}}
models: {big: {node: mini, ollama_model: "qwen3-coder:30b", litellm_alias: big-local,
               max_parallel: 4, context: 65536}}
agents: {implementer: {model: big, description: Writes., tools: [Read, Edit]}}
"""
PROBE = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-pid", "true"]


def has_bubblewrap():
    try:
        return subprocess.run(PROBE, capture_output=True).returncode == 0
    except OSError:
        return False


# `.ci/run` installs it, and asks for it: where it cannot be, that is a failure and no skip. Without
# a /proc, as on a Mac, it makes none.
IS_REQUIRED = os.environ.get("SUBAGENT_FLEET_CONFINED") == "required" and str(PROC) == "/proc"
needs_bubblewrap = pytest.mark.skipif(
    not has_bubblewrap() and not IS_REQUIRED,
    reason="bubblewrap is absent or makes no sandbox here: NOT TESTED that commands are confined")

# A namespace of processes, as a container has one: nobody outside can be seen.
NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc"]


def has_namespace():
    try:
        return subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


needs_namespace = pytest.mark.skipif(
    str(PROC) != "/proc" or not has_namespace(),
    reason="no namespace of processes can be made here: NOT TESTED as in a container")


class Done:
    """What a command came to."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    def __repr__(self):
        return f"exit {self.code}\n{self.out}{self.err}"


class Repository:
    """A repository with one commit, the home of who works in it, and programs of theirs."""

    def __init__(self, place):
        self.place = pathlib.Path(place)
        self.repo = self.place / "repo"
        self.home = self.place / "home"
        self.bin = self.place / "bin"
        for path in (self.repo, self.home / "sessions", self.bin):
            path.mkdir(parents=True)
        self.environ = clean_environment(
            HOME=self.home, XDG_STATE_HOME=self.home / "state", STUB_HOME=self.home / "sessions",
            PATH=f"{self.bin}:{os.environ['PATH']}")
        # The stub writes beside its place, and what it wrote is looked at: test_confined.py has
        # the real ones.
        for name in ("bwrap", "sandbox-exec"):
            self.program(name, "exit 1")
        self.git("init", "-q", "-b", "main")
        (self.repo / "a.txt").write_text("one\n")
        self.git("add", ".")
        self.git("commit", "-qm", "start")
        self.start = self.git("rev-parse", "HEAD")

    def environment(self, **more):
        return {**self.environ, **{name: str(value) for name, value in more.items()}}

    def git(self, *words, cwd=None, check=True):
        done = subprocess.run(["git", *words], cwd=cwd or self.repo, capture_output=True,
                              env={**clean_environment(HOME=self.home), **GIT})
        assert not check or done.returncode == 0, (words, done.stderr.decode())
        return done.stdout.decode("utf-8", "surrogateescape").strip()

    def program(self, name, text, directory=None):
        """Put a shell script on the PATH, or anywhere."""
        path = (directory or self.bin) / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    def put_claude(self):
        """Put the stub on the PATH as Claude Code."""
        self.program("claude", f'exec "{sys.executable}" -I -S "{STUB}" "$@"')

    def write_fleet(self):
        """Write a fleet whose gateway has a port of its own."""
        (self.repo / "fleet.yaml").write_text(FLEET.replace("PORT", str(free_port())))

    def launch(self, *words, cwd=None, **more):
        """Start a command; further names are of its environment."""
        return subprocess.Popen(
            [sys.executable, "-I", "-S", PROGRAM, *map(str, words)], cwd=cwd or self.repo,
            env={**self.environ, **{name: str(value) for name, value in more.items()}},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def receipt(self, name="t", number=1):
        common = self.git("rev-parse", "--path-format=absolute", "--git-common-dir")
        return json.loads(pathlib.Path(
            common, "subagent-fleet/run/tasks", name, str(number), "receipt.json").read_text())

    @staticmethod
    def command_of(number):
        """The command line of a process; nothing if it has just ended."""
        with contextlib.suppress(OSError):
            return (PROC / f"{number}/cmdline").read_bytes()
        return b""

    def marked(self, mark):
        """The processes whose environment holds a mark."""
        found = []
        for number in map(int, filter(str.isdigit, os.listdir(PROC))):
            with contextlib.suppress(OSError):
                if mark in (PROC / f"{number}/environ").read_bytes():
                    found.append(number)
        return [number for number in found if number != os.getpid()]

    def kill_all(self):
        for number in self.processes():
            with contextlib.suppress(OSError):
                os.kill(number, signal.SIGKILL)


class Shop(Repository):
    """A repository in which a person types: each command is a process."""

    def __init__(self, place):
        super().__init__(place)
        (self.home / ".gitconfig").write_text("[user]\nname = a\nemail = a@b\n")
        self.environ["WITNESS"] = str(self.place / "witness")

    begin = Repository.launch

    # -- git --

    def write(self, path, text, cwd=None):
        target = (cwd or self.repo) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return target

    def add_submodule(self):
        """Give the repository a submodule `sub` with one file."""
        inner = self.place / "inner"
        inner.mkdir()
        self.git("init", "-q", "-b", "main", cwd=inner)
        self.write("s.txt", "sub\n", inner)
        self.git("add", ".", cwd=inner)
        self.git("commit", "-qm", "sub", cwd=inner)
        self.git("-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner), "sub")
        self.git("commit", "-qam", "sub")
        self.start = self.git("rev-parse", "HEAD")

    def commit(self, **files):
        """Commit files; `_` in a name stands for a dot at its beginning."""
        for name, text in files.items():
            self.write(re.sub("^_", ".", name), text)
        self.git("add", "-A")
        self.git("commit", "-qm", "more")
        self.start = self.git("rev-parse", "HEAD")

    def files(self, revision):
        """The paths of a commit."""
        listed = self.git("-c", "core.quotePath=false", "ls-tree", "-r", "--name-only", "-z", revision)
        return set(filter(None, listed.split("\0")))

    def tip(self, name):
        return self.git("rev-parse", "--verify", "--quiet", f"refs/heads/run/{name}", check=False)

    def has_work(self, name):
        """Say whether a branch has anything that the first commit has not."""
        tip = self.tip(name)
        return bool(tip) and bool(self.git("diff", "--name-only", self.start, tip))

    def kept(self, text):
        """The refs from which a text can be reached, whole or as a part of a file."""
        found = []
        for ref in self.git("for-each-ref", "--format=%(refname)").splitlines():
            commits = self.git("rev-list", ref).split()
            if subprocess.run(["git", "grep", "-q", "-a", "-F", "-e", text, *commits], cwd=self.repo,
                              env={**self.environ, **GIT}).returncode == 0:
                found.append(ref)
        return found

    def worktree(self, name):
        """Where a task works."""
        for above, names, _ in os.walk(self.place):  # which takes that directories come and go
            if name in names and os.path.basename(os.path.dirname(above)) == "worktrees":
                return pathlib.Path(above, name)
        return None

    # -- commands --

    def end(self, child, seconds=300):
        out, err = child.communicate(timeout=seconds)
        done = Done(child.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))
        assert "Traceback" not in done.err, done.err
        return done

    def type(self, *words, **more):
        return self.end(self.begin(*words, **more))

    def tasks(self, tasks, **more):
        """Write the task file."""
        self.write("tasks.json", json.dumps({"tasks": tasks, **more}))

    def run(self, *words, **more):
        return self.type("run", *words, **more)

    def work(self, name="t", **task):
        """Let one task be worked on; return its state."""
        task.setdefault("prompt", "x")
        task.setdefault("tries", 1)
        self.tasks({name: task})
        self.said = self.run()
        return self.state(name)

    def row(self, name):
        done = self.type("tasks", name, "--json")
        assert done.code == 0, done
        return json.loads(done.out)

    def rows(self):
        return {row["name"]: row for row in json.loads(self.type("tasks", "--json").out)["tasks"]}

    def state(self, name="t"):
        return self.row(name)["state"]

    def works(self, name="t"):
        """Whether the agent of a task has been started, and is not yet over."""
        row = self.rows().get(name, {})
        return row.get("state") == "running" and row["now"] not in ("preparing", "starting")

    def let_go(self):
        """End what WORKS does."""
        (self.home / "go").touch()

    def wait(self, condition, seconds=30.0):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not come to be"
            time.sleep(0.05)

    def use_claude(self, **changes):
        """Give the repository a fleet, and a stub for Claude Code."""
        self.put_claude()
        text = FLEET.replace("PORT", str(free_port()))
        for old, new in changes.items():
            text = text.replace(old, new)
        self.write("fleet.yaml", text)
        self.write(".gitignore", ".env.subagent-fleet\n.subagent-fleet/\n")
        self.git("add", "fleet.yaml", ".gitignore")
        self.git("commit", "-qm", "fleet")
        self.start = self.git("rev-parse", "HEAD")
        assert self.type("generate").code == 0

    @property
    def witness(self):
        """A file that says what was run and should not have been."""
        path = self.place / "witness"
        return path.read_text() if path.exists() else ""

    def processes(self):
        """The processes that tests of this place have left: they know its home."""
        return self.marked(f"HOME={self.home}\0".encode())


@pytest.fixture
def shop(tmp_path):
    """A Shop; whatever works in it is ended with the test."""
    shop = Shop(tmp_path)
    yield shop
    shop.kill_all()


WORKS = "until [ -e $HOME/go ]; do sleep 0.05; done"  # works until the test lets it go on


def shell(*commands):
    """A coder that does what a shell can."""
    return ["sh", "-c", "; ".join(commands)]
