"""A repository in which tasks are worked on by a stub client, in this process or in one to kill."""
import os
import pathlib
import subprocess
import sys
import time

import pytest

import subagent_fleet as sf
from run_kit import GIT, Repository
from tools import EXAMPLE, ROOT, clean_environment

# A supervisor of its own, for tests that kill it: it dies before or after the nth state it writes.
DRIVER = """\
import os, signal, sys, threading
import subagent_fleet as sf
from task_rig import Watched, backing
count, mode = 0, sys.argv[2] if len(sys.argv) > 2 else ""
write, lock = Watched.write_state, threading.Lock()
def counted(self, state):
    global count
    with lock:
        count += 1
        number = count
    if mode == f"before{number}":
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, state)
    if mode == f"after{number}":
        os.kill(os.getpid(), signal.SIGKILL)
Watched.write_state = counted
world = sf.World()
folder = Watched(world, sf.find_repository(world, "."))
folder.make()
hold = world.hold(folder.place("lock"))
if hold is None:
    sys.exit(3)
supervisor = sf.Supervisor(folder, hold, backing(int(sys.argv[1])))
stops = []
world.on_stop(stops.append)
while not stops and (supervisor.advance() or supervisor.is_busy or supervisor.waits_for_time):
    with supervisor.changed:
        supervisor.changed.wait(0.05)
supervisor.leave()
print(count)
"""


def word_of(state):
    """The state of a task, or the step of running before its agent works."""
    return state.phase if state.state == "running" and state.phase else state.state


class Watched(sf.Folder):
    """A folder that keeps which states its tasks went through."""

    def write_state(self, state):
        super().write_state(state)
        with open(f"{self.path}/history", "a", encoding="utf-8") as stream:
            stream.write(f"{state.name} {word_of(state)}\n")


def backing(most=8, **more):
    """What a supervisor of the stub is told: a fleet whose gateway nobody asks."""
    fleet, _ = sf.check_fleet(sf.Document(EXAMPLE.replace("node: mini", "node: mini\n    max_parallel: 64"), "fleet.yaml"))
    return sf.Backing(fleet, "sk-test", most=most, **more)


class Rig(Repository):
    """A repository, its supervisor, and what is seen of both from outside."""

    def __init__(self, place):
        super().__init__(place)
        self.environ["PYTHONPATH"] = f"{ROOT}:{ROOT}/tests/rigs"
        self.put_claude()
        self.world = sf.World()
        self.world.environ = dict(self.environ)
        self.said = []
        self.supervisor = None

    @property
    def folder(self):
        return Watched(self.world, sf.find_repository(self.world, str(self.repo)))

    def add(self, name, prompt="", **more):
        """Put a task into the inbox, as `task add` does."""
        task = sf.TaskSpec(name, prompt=prompt, **more)
        self.folder.ask(sf.order_of(task, self.folder))

    def ask(self, do, name, **more):
        return self.folder.ask({"do": do, "task": name, **more})

    def begin(self, only=None, **more):
        """Become the supervisor."""
        folder = self.folder
        folder.make()
        until = time.monotonic() + 20
        lock = None
        while not lock and time.monotonic() < until:
            # A killed one's child that has not become its program yet holds it for a moment.
            lock = self.world.hold(folder.place("lock")) or time.sleep(0.01)
        assert lock, "somebody supervises already"
        more.setdefault("tell", lambda *event: self.said.append(event))
        self.supervisor = sf.Supervisor(folder, lock, backing(**more), only)
        return self.supervisor

    def leave(self):
        if self.supervisor:
            self.supervisor.leave()
        self.supervisor = None

    def work(self, until=None, *, seconds=20.0, **more):
        """Supervise until nothing can go on, or something is true of the states."""
        supervisor = self.supervisor or self.begin(**more)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            did = supervisor.advance()
            if until and until(dict(supervisor.tasks)):
                return supervisor.tasks
            if not until and not did and not supervisor.is_busy and not supervisor.waits_for_time:
                return supervisor.tasks
            with supervisor.changed:
                supervisor.changed.wait(0.02)
        raise AssertionError(f"not in {seconds} s: {self.states()}, {self.said[-8:]}")

    def drive(self, *words, most=8):
        """Start a supervisor of its own."""
        return subprocess.Popen([sys.executable, "-c", DRIVER, str(most), *words],
                                cwd=str(self.repo), env=self.environ,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def tasks(self):
        return self.folder.read_states()[0]

    def states(self):
        return {name: word_of(state) for name, state in self.tasks().items()}

    def journal(self, name):
        """The states that a task went through, in each once as long as it stays there."""
        path = self.repo / ".git/subagent-fleet/run/history"
        states = []
        for line in path.read_text().splitlines():
            task, state = line.split()
            if task == name and states[-1:] != [state]:
                states.append(state)
        last = self.states()[name]  # a kill between the state and its line here is no fault
        return states if states[-1:] == [last] else [*states, last]

    def tree(self, name):
        place = self.home / "state/subagent-fleet/worktrees"
        return place / f"{self.repo.name}-{self.folder.run[:8]}" / name

    def processes(self):
        """The processes that carry a mark of this repository's run."""
        run = self.folder.run
        return self.marked(f"={run}/".encode()) if run else []

    def outside(self):
        """All that is the person's: files, index, refs, hooks, settings, stash, status."""
        files = {str(path.relative_to(self.repo)): path.read_bytes()
                 for path in sorted(self.repo.rglob("*")) if path.is_file()
                 and not {".git", ".subagent-fleet"} & set(path.relative_to(self.repo).parts)}
        git = self.repo / ".git"
        for name in ("index", "config", "HEAD", "packed-refs"):
            if (git / name).exists():
                files[f".git/{name}"] = (git / name).read_bytes()
        files.update({f".git/hooks/{path.name}": path.read_bytes()
                      for path in (git / "hooks").glob("*") if path.is_file()})
        refs = [line for line in self.git("for-each-ref").splitlines()
                if "refs/heads/run/" not in line and "refs/subagent-fleet/" not in line]
        return files, refs, self.git("status", "--porcelain")


EMPTY = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"  # what `git add -N` notes: nothing


class Place:
    """A repository with the place of a task that is over, and somebody who has worked in it."""

    def __init__(self, place):
        self.repo = pathlib.Path(place) / "repo"
        self.repo.mkdir(parents=True)
        self.world = sf.World()
        self.world.environ = {**clean_environment(HOME=place), **GIT}
        self.git("init", "-q", "-b", "main", cwd=self.repo)
        (self.repo / "a.txt").write_text("one\n")
        (self.repo / "b.txt").write_text("two\n")
        (self.repo / ".gitignore").write_text("*.log\nbuild/\n")
        self.git("add", ".", cwd=self.repo)
        self.git("commit", "-qm", "start", cwd=self.repo)
        self.tree = pathlib.Path(place) / "trees/t"
        self.folder = sf.Folder(self.world, sf.find_repository(self.world, str(self.repo)))
        self.folder.make()
        self.main = sf.git_of(self.folder)
        base = self.git("rev-parse", "main", cwd=self.repo)
        self.state = sf.change(
            sf.TaskState("t", sf.TaskSpec("t", prompt="x"), 0), state="done", base=base,
            branch="run/t", worktree=str(self.tree), tried=1, tip=base,
            git=str(self.tree / ".git"), id="0123456789abcdef")
        self.git("branch", "run/t", cwd=self.repo)
        sf.make_place(self.main, str(self.tree), sf.mark_of(self.folder, self.state.place),
                      sf.plan_repository(self.main), f"run/t {base}")
        (self.tree / "before.log").write_text("setup made it\n")
        self.world.make_directory(self.folder.of_try(self.state, ""))
        known = self.world.stamps_of(str(self.tree), ["before.log"])
        self.folder.write({"ignored": known}, "tasks", "t", "baseline.json")

    def git(self, *words, cwd=None, check=True):
        done = subprocess.run(["git", *words], cwd=str(cwd or self.tree), capture_output=True,
                              env={**self.world.environ, "GIT_EDITOR": "true"})
        assert not check or done.returncode == 0, (words, done.stderr.decode())
        return done.stdout.decode("utf-8", "surrogateescape").strip()

    def tidy(self, **more):
        return sf.tidy_task(self.folder, self.state, **more)

    def inside(self):
        """git in the place, as the supervisor has it."""
        return sf.git_in(self.folder, self.state)

    def keep(self, known=None):
        """Take a snapshot, as at the end of a try."""
        known = sf.read_baseline(self.folder, self.state) if known is None else known
        work, _ = sf.take_snapshot(self.inside(), self.main, self.state, "1", known)
        return sf.look_at_work(self.main, self.state, work)

    def settle(self):
        """Make what is there the branch, as a task that is done."""
        work = self.keep()
        assert sf.settle_branch(self.inside(), self.main, self.state.place, work.commit)

    def objects(self):
        """What a person could lose: each file's content, each commit."""
        blobs, commits = set(), set()
        drop = {"before.log"}
        paths = []
        for path in self.tree.rglob("*"):
            inner = path.relative_to(self.tree)
            parents = {str(inner)} | {str(parent) for parent in inner.parents}
            if parents & drop or ".git" in inner.parts or path.is_symlink():
                continue
            if path.is_file() and os.access(path, os.R_OK):
                paths.append(str(path))
        for path in paths:
            blobs.add(self.git("hash-object", "--no-filters", path))
        commits.update(self.git("rev-list", "--all", "--reflog", check=False).split())
        commits.update(self.git("rev-list", "HEAD", check=False).split())
        commits.update(self.git("rev-list", "--all", cwd=self.repo).split())
        return {one for one in blobs | commits if len(one) == 40} - {EMPTY}

    def reachable(self):
        return {line.split()[0] for line in self.git(
            "rev-list", "--objects", "--all", cwd=self.repo).splitlines()}


@pytest.fixture
def task_rig(tmp_path):
    """A Rig whose processes are ended, and in which nothing of the person's may have changed."""
    rig = Rig(tmp_path)
    before = rig.outside()
    rig.keeps_outside = True
    yield rig
    rig.leave()
    left = rig.processes()
    rig.kill_all()
    if rig.keeps_outside:
        assert rig.outside() == before
    assert left == [], "processes were left behind"
