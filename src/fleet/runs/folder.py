"""A repository, and the folder with the files of its tasks."""
from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING

from fleet.config.rules import TASK_NAME
from fleet.config.task_file import TaskSpec
from fleet.start.constants import ENVIRONMENT_FILE, EXIT_USAGE, STATE_DIRECTORY
from fleet.start.errors import FleetError
from fleet.start.record import Record, replace
from fleet.tasks.hints import RunOptions
from fleet.tasks.state import UNREADABLE, TaskState, freeze, thaw_state
from fleet.text.json import parse_object, read_page
from fleet.text.phrases import quote_shell
from fleet.text.terminal import clean_line
from fleet.world.places import Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from fleet.world.child import Ran
    from fleet.world.world import World


RUN_DIRECTORY = "subagent-fleet/run"  # below the git directory that all worktrees share
PLACE_MARK = "subagent-fleet.task"  # in the `.git` of a task's place: its id, its repository
TASK_FILES = ("tasks.yaml", "tasks.yml", "tasks.json")
OUTPUT_PART_BYTES = 4 * 1024 * 1024
OUTPUT_LINE_BYTES = 1024 * 1024  # a longer line of an agent's output is dropped
STATE_LIMIT_BYTES = 16 * 1024 * 1024
ORDER_LIMIT_BYTES = 1024 * 1024
TAIL_BYTES = 256 * 1024
ASKED_FILE = "asked.json"
ASKED_SCHEMA = "asked/1"


class Repository(Record):
    """A git repository, and the checkout of it where a command was typed."""

    top: str  # of the checkout
    common: str  # the git directory of all its worktrees
    main: str  # the main checkout


def find_repository(world: World, directory: str, *, begins: bool = False) -> Repository:
    """Return the repository of a directory, or refuse it in one sentence.

    Only a command that `begins` work is told how to make a repository; for others, the person
    is in the wrong directory. In a task's place, it is the repository that the task belongs to.
    """
    repository = _see_repository(world, directory, begins=begins)
    return _find_owner(world, repository) or repository


def _see_repository(world: World, directory: str, *, begins: bool = False) -> Repository:
    """Return the repository that git sees from a directory."""
    seen = world.run_git(["rev-parse", "--show-toplevel", "--git-dir", "--git-common-dir"],
                         directory)
    if seen.code == 127:
        raise FleetError("no-git", "git is not on the PATH", fix="install git")
    if seen.code:
        slug, what = ("no-repository",
                      "is not a git repository, and every task needs a git worktree")
        fix = "cd to the repository whose tasks you mean"
        if begins:
            fix = suggest_commit(world, world.real_path(directory), ".gitignore",
                                 "git init && ")
        if re.search("safe.bareRepository|must be run in a work tree", seen.talk):
            slug, what = "bare-repository", "is a bare repository: agents need a checkout"
            fix = "git clone it, and run this in the clone"
        elif "dubious ownership" in seen.talk:
            slug, what = ("foreign-repository",
                          "belongs to somebody else, so git does not read it")
            fix = "clone it, and run this in the clone"
        elif "not a git repository (or any" not in seen.talk:
            raise _git_refusal(seen, directory)
        raise FleetError(slug, f"{directory} {what}", fix=fix)

    lines = seen.text.split("\n")
    if len(lines) != 3:
        raise FleetError("odd-path", "the path of this repository contains a line break",
                         fix="rename the directory, or clone it into another one")
    top, git, common = (world.real_path(world.path(directory, line)) for line in lines)
    main = top
    if git != common:
        listed = world.run_git(["worktree", "list", "--porcelain"], directory)
        main = listed.text.split("\n")[0].removeprefix("worktree ") or top
    return Repository(top, common, main)


def _git_refusal(ran: Ran, directory: str) -> FleetError:
    """Return git's own words for why it reads no repository: broken settings, a moved one."""
    said = clean_line(" ".join(ran.talk.split())) or f"exit {ran.code}"
    return FleetError("git-failed", f"git cannot read the repository of {directory}: {said}",
                      fix="git status")


def _find_owner(world: World, place: Repository) -> Repository | None:
    """Return the repository whose task works in a place, if that task names the place, too."""
    identity, main, _ = read_mark(world, place.common)
    if identity:
        with contextlib.suppress(FleetError):
            owner = replace(_see_repository(world, main), top=place.top)
            if any((state.place.id, state.place.worktree) == (identity, place.top)
                   for state in Folder(world, owner).read_states()[0].values()):
                return owner
    return None


def read_mark(world: World, git: str) -> list[str]:
    """Return the id of a place's task, its repository's checkout, and a commit; "" for none."""
    path = world.path(git, PLACE_MARK)
    is_there = world.kind_of(path, follow=False) == "file"
    content = world.read_part(path, 0, 8192) if is_there else b""
    return [*content.decode("utf-8", "surrogateescape").split("\n"), "", "", ""][:3]


def suggest_commit(world: World, top: str, ignore: str, first: str = "") -> str:
    """Return the command for a first commit of a directory; never of a whole home or machine."""
    if top in ("/", world.real_path(world.home)):
        return "go into your project's directory (`cd PROJECT`), and run this there"
    return f"{write_ignored(ignore)} && {first}git add -A && git commit -m start"


def write_ignored(path: str) -> str:
    """Return the command that adds private files to a `.gitignore`."""
    # Bare names, because `./` or `../` before them would ignore nothing. The line break comes
    # first, because the file may not end with one.
    return f"printf '\\n{ENVIRONMENT_FILE}\\n{STATE_DIRECTORY}/\\n' >> {path}"


def find_commit(world: World, repository: Repository, revision: str, where: str = "") -> str:
    """Return the commit that a revision names, or refuse."""
    seen = world.run_git(["rev-parse", "--quiet", "--verify", "--end-of-options",
                          f"{revision}^{{commit}}"], repository.top)
    if seen.code == 0:
        return seen.text
    if revision == "HEAD":
        if seen.code != 1:  # 1: there is no such commit
            raise _git_refusal(seen, repository.top)
        ignore = ".gitignore"
        if world.real_path(world.directory) != repository.top:  # the key may lie above
            ignore = quote_shell(world.path(repository.top, ignore))
        raise FleetError("no-commit", "the repository has no commits yet; make one first",
                         fix=suggest_commit(world, repository.top, ignore))
    raise FleetError("bad-base", f"`{revision}` is not a commit of this repository",
                     where=where, fix="name a branch, tag or commit: `git log --oneline`")


class Folder:
    """The files in which the tasks of a repository are kept."""

    def __init__(self, world: World, repository: Repository, *,
                 is_listed: bool = True) -> None:
        self.world = world
        self.repository = repository
        self.path = world.path(repository.common, RUN_DIRECTORY)
        self._is_listed = is_listed  # in the list of repositories where this user has tasks

    def place(self, *names: str) -> str:
        """Return a path in the folder; no link on the way to it is followed."""
        return Place(self.repository.common, self.world.path(RUN_DIRECTORY, *names))

    def of_task(self, name: str, *names: str) -> str:
        """Return a file of a task."""
        return self.place("tasks", name, *names)

    def of_try(self, state: TaskState, name: str, number: int | None = None) -> str:
        """Return a file of a try."""
        return self.of_task(state.name, str(number or state.attempt.tried), name)

    def is_attached(self, name: str) -> bool:
        """Tell whether a person has the session of a task open in a terminal."""
        return self.world.is_held(self.of_task(name, "attached"))

    @property
    def run(self) -> str:
        """The id of these tasks, which the marks of their processes contain; "" without tasks."""
        run = self._read("run.json").get("run")
        return run if isinstance(run, str) and re.fullmatch("[0-9a-f]{32}", run) else ""

    def _read(self, *names: str) -> dict[str, Any]:
        """Return the object in a JSON file; empty if there is none."""
        content = self.world.read_part(self.place(*names), 0, STATE_LIMIT_BYTES)
        return parse_object(content) or {}

    def write(self, report: Mapping[str, Any], *names: str) -> None:
        """Replace a file as a whole: after a crash, it is either the old one or the new one."""
        content = json.dumps(report, indent=1, default=list).encode("ascii") + b"\n"
        self.world.replace_files([(self.place(*names), content, 0o600)], syncs=True)

    def make(self, *, renews: bool = False) -> str:
        """Make the folder, which only its owner can enter; return the id of its tasks.

        The id is also kept for this user: a folder that came with a copy or an archive is
        not ours.
        """
        self.world.make_directory(self.place("inbox"), is_private=True)
        self.world.make_directory(self.place(), is_private=True)
        run = self.run
        if not run or renews:
            with self.world.hold_soon(self.place("made"), 10.0):
                run = "" if renews else self.run  # somebody else may have been faster
                if not run:
                    run = self.world.token(16)
                    self.write({"schema": "subagent-fleet/run/1", "run": run}, "run.json")
        if self._is_listed and read_repositories(self.world).get(self.repository.main) != run:
            keep_repository(self.world, self.repository.main, run)
        return run

    def read_states(self) -> tuple[dict[str, TaskState], int]:
        """Return the state of every task, and how many could not be read.

        An unreadable state, such as that of a newer version, is a task, too: its name is taken.
        """
        paths = self.world.paths_below(self.path, "tasks/*/state.json")
        names = [self.world.split(self.world.parent(path))[1] for path in paths]
        found = [(name, thaw_state(self._read("tasks", name, "state.json")))
                 for name in names]
        states = [state for name, state in found if state and state.name == name]
        states.sort(key=lambda state: (state.order, state.name))
        tasks = {state.name: state for state in states}
        for name in names:
            if name not in tasks and re.fullmatch(TASK_NAME, name):
                path = self.of_task(name, "state.json")
                tasks[name] = TaskState(name, TaskSpec(name), len(tasks), state=UNREADABLE,
                                        reason=f"its state cannot be read: {clean_line(path)}")
        return tasks, len(names) - len(states)

    def write_state(self, state: TaskState) -> None:
        """Keep the state of a task."""
        self.write({"schema": "subagent-fleet/task/2", **freeze(state)}, "tasks", state.name,
                   "state.json")

    def read_receipt(self, state: TaskState, number: int | None = None) -> dict[str, Any]:
        """Return the receipt of a try, by default the last one; empty if there is none."""
        return self._read("tasks", state.name, str(number or state.attempt.tried), "receipt.json")

    def read_orders(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (file, order) for each order of other commands, the oldest first."""
        for name in self.world.names_in(self.place("inbox")):
            if re.fullmatch(r"\d+[.]\d+-[0-9a-f]+[.]json", name):
                yield name, self._read("inbox", name)

    def ask(self, order: Mapping[str, Any]) -> str:
        """Write an order for the supervisor of now, or of next time; return its name."""
        self.make()
        try:
            if order.get("do") != "gone":  # which names a path
                json.dumps(order, ensure_ascii=False, default=list).encode("utf-8")
        except UnicodeEncodeError:
            raise FleetError("not-utf8", "what you typed is not UTF-8 text", status=EXIT_USAGE,
                             fix="use a UTF-8 terminal: `locale` shows what this one is"
                             ) from None
        if len(json.dumps(order)) > ORDER_LIMIT_BYTES:
            raise FleetError("too-large", "that is more than 1 MiB of text",
                             fix="write it into a file in the repository, and name the file")
        name = f"{self.world.now():017.6f}-{self.world.token(4)}.json"
        self.write(order, "inbox", name)
        return name

    def note_asked(self, asked: RunOptions) -> None:
        """Keep what a `run` was asked, until all of it is done; an empty note is taken away."""
        if asked == RunOptions():
            self.world.remove(self.place(ASKED_FILE))
            return
        self.write({"schema": f"subagent-fleet/{ASKED_SCHEMA}", **freeze(asked)}, ASKED_FILE)

    def read_asked(self) -> RunOptions:
        """Return what the last `run` was asked that still counts; of strangers' tasks nothing."""
        run = self.run
        if not run or read_repositories(self.world).get(self.repository.main) != run:
            return RunOptions()
        content = self.world.read_part(self.place(ASKED_FILE), 0, STATE_LIMIT_BYTES)
        return read_page(RunOptions, content, ASKED_SCHEMA) or RunOptions()

    def tell(self, name: str, word: str, text: str) -> None:
        """Add an event to the supervisor's own log."""
        event = {"at": round(self.world.now(), 3), "task": name, "event": word, "text": text}
        self.world.append_line(self.place("events.jsonl"),
                               json.dumps(event).encode("ascii") + b"\n")

    def is_news(self, what: str) -> bool:
        """Tell whether a message is new in this repository, and note that it was shown."""
        self.world.make_directory(self.place(), is_private=True)  # it may be the first `run`
        with self.world.hold_soon(self.place("told"), 10.0):  # by another `run`, too
            told = self._read("told.json")
            if what not in told:
                self.write({**told, what: True}, "told.json")
            return what not in told

    def holder(self) -> int:
        """Return the process that supervises, or 0."""
        if not self.world.is_held(self.place("lock")):
            return 0
        content = self.world.read_part(self.place("lock.pid"), 0, 64)
        return int(content) if content.isdigit() else 1


REPOSITORIES_SCHEMA = "repositories/2"


def known_repositories(world: World) -> str:
    """Return the file of the repositories in which this user has tasks."""
    return world.user_place("state", "repositories.json")


class RepositoryList(Record):
    """The repositories in which a user has ever added tasks, and the id of the tasks in each."""

    repositories: dict[str, str]


def read_repositories(world: World) -> dict[str, str]:
    """Return {repository: id of its tasks} of this user."""
    with contextlib.suppress(FleetError):  # none was added yet
        page = read_page(RepositoryList, world.read_bytes(known_repositories(world)),
                         REPOSITORIES_SCHEMA)
        return page.repositories if page else {}
    return {}


def keep_repository(world: World, path: str, run: str) -> None:
    """Note that the tasks in a repository are this user's."""
    place = known_repositories(world)
    world.make_directory(world.parent(place))
    with world.hold_soon(f"{place}.lock", 10.0):
        report = {"schema": f"subagent-fleet/{REPOSITORIES_SCHEMA}",
                  "repositories": {**read_repositories(world), path: run}}
        content = json.dumps(report, indent=1).encode("ascii") + b"\n"
        world.replace_files([(place, content, 0o600)])


class Wanted(Exception):
    """A person wants something different from what a task's thread is doing."""


class Asleep(Exception):
    """A task's thread ends here; the task continues from its state."""
