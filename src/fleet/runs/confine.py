"""Whether this system confines commands, and the box of each."""
from __future__ import annotations

import contextlib
import hashlib
import threading
from typing import TYPE_CHECKING

from fleet.runs.agent import shell_words
from fleet.start.constants import EXIT_REFUSED
from fleet.start.errors import FleetError
from fleet.start.record import Record
from fleet.tasks.box import (
    BWRAP,
    BWRAP_PARENT,
    CODER_STATE,
    SEATBELT,
    USUAL_CACHES,
    Box,
    Grant,
    find_mac_temporary,
    find_refused,
    find_shown,
    may_write,
    places_of,
    plan_bwrap,
    plan_seatbelt,
    suggest_writable,
)
from fleet.text.phrases import some_of
from fleet.text.terminal import clean_line
from fleet.world.places import Place, as_place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fleet.config.task_file import TaskSpec
    from fleet.runs.folder import Folder
    from fleet.world.world import World



class Confiner(Record):
    """The program of this system that confines commands."""

    name: str
    program: str

    def confine(self, world: World, box: Box, argv: Sequence[str]) -> list[str]:
        """Return how a command is run in a box."""
        if self.name == SEATBELT:
            return [*plan_seatbelt(self.program, box), *argv]
        words = plan_bwrap(self.program, box, is_root=world.is_root)
        return shell_words(world, BWRAP_PARENT, "sh", *words, *argv)


def find_confiner(world: World) -> Confiner | None:
    """Return the program of this system that could confine commands."""
    for name in (SEATBELT, BWRAP):
        program = world.which(name)
        if program:
            return Confiner(name, program)
    return None


NO_CONFINER = "bubblewrap (`bwrap`) is not installed"


def find_trouble(world: World, confiner: Confiner, path: str,
                 seconds: float = 10.0) -> str:
    """Return why a program does not confine commands here; "" if it does.

    A shell in it must be able to write one directory below the path, but not beside it.
    """
    place = as_place(path)
    try:
        for name in ("in", "tmp"):  # a link on the way to them is refused
            world.make_directory(Place(place.root, world.path(place.inner, name)))
        real = world.real_path(place)
        inside, own, beside = (world.path(real, name) for name in ("in", "tmp", "beside"))
        written = world.path(inside, "written")
        box = Box(inside, (Grant(inside, True),), own, find_shown([real]))
        script = 'echo >"$0"; echo >"$1"'
        ran = world.run_program(confiner.confine(world, box, [
            *shell_words(world, script), written, beside]), seconds=seconds)
        if world.kind_of(written) != "file":
            talk = [line for line in ran.talk.splitlines() if "/probe-" not in line]
            return f"`{confiner.name}` does not work here: " \
                   f"{talk[-1] if talk else f'exit {ran.code}'}"
        if world.kind_of(beside) != "absent":
            return f"`{confiner.name}` lets a command write everywhere"
        return ""
    finally:
        clear_directory(world, place)


def clear_directory(world: World, path: str) -> None:
    """Remove a directory of ours and everything in it."""
    with contextlib.suppress(FleetError):  # leftovers do no harm
        world.remove_tree(path)


def is_there(world: World, path: str) -> bool:
    """Tell whether a path exists and this user can reach it."""
    with contextlib.suppress(FleetError):
        return world.kind_of(path) != "absent"
    return False


def find_named(folder: Folder, path: str) -> str:
    """Return a path that a person has named, from home, the root or the main checkout."""
    world = folder.world
    if path.startswith("~/"):
        return world.path(world.home, path[2:])
    return world.path(folder.repository.main, path)


class BoxPlan(Record):
    """What the box of an agent or a command is made of."""

    task: TaskSpec
    tree: str
    use: str = "command"  # so that an agent and a command beside it share no temporary files

    @property
    def temporary(self) -> str:
        """Its own temporary directory."""
        return f"{self.tree}.{self.use}.tmp"


DEVICES = ("/dev/dri", "/dev/kfd", "/dev/kvm")  # a person's tests may need them


def plan_grants(folder: Folder, confiner: Confiner, plan: BoxPlan,
                environ: Mapping[str, str]) -> tuple[Grant, ...]:
    """Return what a command may write; make the directories that must exist for that."""
    world, home = folder.world, folder.world.home
    own_states = CODER_STATE.get(plan.task.program, ())
    named = [find_named(folder, path) for path in plan.task.sandbox_write]
    made = places_of((USUAL_CACHES[0], *own_states), home, environ)
    for path in (*(path for path, _ in made), *named):
        if not is_there(world, path):
            world.make_directory(path)
    # A program that we don't know may start any of the coders.
    states = own_states or [row for rows in CODER_STATE.values() for row in rows]

    grants: list[Grant] = []

    def grant(path: str) -> None:
        # A path below a writable directory needs no grant of its own; but a command could have
        # put a link there that leads out of it.
        above, name = world.split(path)
        path = world.path(world.real_path(above), name)
        if not may_write(grants, path) and is_there(world, path):
            grants.append(Grant(world.real_path(path), True))

    for path in (*DEVICES, *world.paths_below("/dev", "nvidia*")):
        grant(path)
    for path in find_mac_temporary(environ) if confiner.name == SEATBELT else ():
        grant(path)
    for path, settings in places_of((*USUAL_CACHES, *states), home, environ):
        grant(path)
        grants += [Grant(world.real_path(world.path(path, name)), False) for name in settings]
    # A checkout may lie in one of these, such as ~/.cache.
    repository = folder.repository
    grants += [Grant(path, False) for path in (repository.main, repository.common)
               if may_write(grants, path)]
    # git-lfs keeps the content of large files in one directory for all places.
    for path in (*named, plan.tree, world.path(repository.common, "lfs")):
        grant(path)
    return tuple(grants)


def find_temporary(world: World, confiner: Confiner, plan: BoxPlan) -> str:
    """Return the temporary directory of a command; bubblewrap shows it as /tmp."""
    if confiner.name != SEATBELT:
        return plan.temporary
    # Short, because the path of a socket may have only 104 characters.
    name = hashlib.sha256(plan.temporary.encode("utf-8")).hexdigest()[:8]
    return world.path(world.environ.get("TMPDIR") or "/tmp", f"sf-{name}")


class Confinement:
    """Whether commands are confined on this machine: tried once, then known."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.world = folder.world
        self._lock = threading.Lock()
        self._is_known = False
        self._confiner: Confiner | None = None
        self._reason = ""

    def find(self) -> Confiner | None:
        """Return the program that confines commands, after it was tried once."""
        with self._lock:
            if not self._is_known:
                world = self.world
                self._confiner = find_confiner(world)
                self._reason = NO_CONFINER
                if self._confiner:
                    place = self._folder.place(f"probe-{world.token(4)}")
                    self._reason = find_trouble(world, self._confiner, place)
                self._is_known = True
            return None if self._reason else self._confiner

    @property
    def known(self) -> Confiner | None:
        """The program that confines commands, if it was tried already; this tries nothing."""
        return self._confiner if self._is_known and not self._reason else None

    @property
    def reason(self) -> str:
        """Why commands are not confined; "" if they are."""
        self.find()
        return self._reason

    def find_for(self, task: TaskSpec) -> Confiner | None:
        """Return the program that confines a task's commands; refuse if it needs one."""
        confiner = self.find() if task.sandbox != "off" else None
        if not confiner and task.sandbox == "required":
            raise self.demand(task.name)
        return confiner

    def demand(self, names: str) -> FleetError:
        """Return the error for tasks that must be confined and can't be."""
        return FleetError("not-confined", f"{names}: `sandbox: required`, but commands are not "
                          f"confined on this machine: {self.reason}", status=EXIT_REFUSED,
                          fix="install bubblewrap, or write `sandbox: auto`"
                          if self.reason == NO_CONFINER else "write `sandbox: auto`")

    def confine(self, plan: BoxPlan, argv: Sequence[str], environ: Mapping[str, str]
                ) -> tuple[list[str], dict[str, str]]:
        """Return the command that runs another in its box, if it has one, and its environment."""
        confiner = self.find_for(plan.task)
        if not confiner:
            return list(argv), dict(environ)
        world, repository = self.world, self._folder.repository
        temporary = find_temporary(world, confiner, plan)
        environ = {**environ, "TMPDIR": temporary if confiner.name == SEATBELT else "/tmp"}
        grants = plan_grants(self._folder, confiner, plan, environ)
        world.make_directory(temporary, is_private=True)
        # What a command sees must not depend on the directory in which a person typed.
        told = [value for name, value in environ.items() if name not in ("PWD", "OLDPWD")]
        shown = find_shown([*told, *argv, world.home, plan.tree, repository.main,
                            repository.common])
        box = Box(world.real_path(plan.tree), grants, world.real_path(temporary), shown)
        return confiner.confine(world, box, argv), environ

    def clear(self, plan: BoxPlan) -> None:
        """Remove the temporary directory of a command that has ended."""
        world, confiner = self.world, self.known
        path = find_temporary(world, confiner, plan) if confiner else ""
        if path and world.kind_of(path, follow=False) == "directory":
            clear_directory(world, path)

    def find_refused(self, plan: BoxPlan, text: str) -> list[str]:
        """Return the paths that a command could not write because of its box, by its output."""
        world, confiner = self.world, self.known
        if not confiner or plan.task.sandbox == "off":
            return []
        grants = plan_grants(self._folder, confiner, plan, world.environ)
        return find_refused(confiner.name, text, Box(plan.tree, grants), world.home,
                            world.real_path)

    def explain_refused(self, plan: BoxPlan, text: str) -> str:
        """Return what a command could not write, by its output, and how to allow it; or ""."""
        paths = self.find_refused(plan, text)
        if not paths:
            return ""
        line = suggest_writable(paths[0], self.world.home)
        return f"it may not write {clean_line(some_of(paths, 3))}; to allow it: `{line}`"
