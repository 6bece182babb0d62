"""`install`: put the command on the PATH."""
from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from fleet.cli.rows import MORE, Flag, command
from fleet.cli.say import paths_that
from fleet.files.skills import TAUGHT
from fleet.runs.folder import read_mark
from fleet.start.constants import EXIT_OK, EXIT_REFUSED
from fleet.start.errors import FleetError
from fleet.start.gate import VERSION
from fleet.text.phrases import count_of, quote_shell
from fleet.text.terminal import clean_line
from fleet.workspace.changes import USER_DIRECTORIES, USER_FILES, read_own_source, remove_files
from fleet.workspace.directory import Workspace

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from fleet.world.world import World


# The second line of the command that `install` writes. It imports: Python caches the bytecode.
LAUNCHER = """\
#!/usr/bin/env python3
import sys; sys.path[0] = {}; import subagent_fleet; subagent_fleet.main_and_end()
"""


SHORT_NAME = "flt"  # the same command, unless another program has this name


# The file that each shell reads in new terminals.
START_FILES = {"zsh": "~/.zshrc", "bash": "~/.bashrc", "fish": "~/.config/fish/config.fish"}


@command("install", "install the command subagent-fleet for this user",
         Flag("--remove", "remove it, and all that this program wrote outside "
              "of your projects"),
         group=MORE, examples=("install", "install --remove"))
def cmd_install(options: Namespace, world: World) -> int:
    place = world.user_place("data")
    command = world.path(world.home, ".local", "bin", "subagent-fleet")
    launcher = LAUNCHER.format(repr(place)).encode("utf-8")
    kind = world.kind_of(command, follow=False)
    if kind != "absent" and (kind != "file" or world.read_bytes(command) != launcher):
        raise FleetError("in-the-way",
                         f"{command} already exists, and `install` did not write it",
                         status=EXIT_REFUSED, fix=f"mv {quote_shell(command)} "
                                                  f"{quote_shell(command + '.old')}")
    commands = [command]
    short = world.path(world.parent(command), SHORT_NAME)
    kind = world.kind_of(short, follow=False)
    if kind == "file" and world.read_bytes(short) == launcher:
        commands.append(short)
    if options.remove:
        return remove_install(world, commands)

    source = read_own_source(world, "install")
    copy = world.path(place, "subagent_fleet.py")
    if kind == "absent" and not world.which(SHORT_NAME):  # otherwise another program has it
        commands.append(short)
    world.replace_files([(copy, source, 0o644),
                         *((path, launcher, 0o755) for path in commands)])
    world.keep_bytecode(copy)
    shorter = f"; `{SHORT_NAME}` is short for it" if short in commands else ""
    world.out(f"Installed: {command} ({VERSION}){shorter}\n")
    if world.which("subagent-fleet") != command:
        _, shell = world.split(world.environ.get("SHELL", ""))
        name = START_FILES.get(shell, "your shell's start file")
        place = quote_shell(world.parent(command))
        line = f"fish_add_path {place}" if shell == "fish" else f"export PATH={place}:$PATH"
        world.out("Your shell does not find it yet. Type this line now, and put it into "
                  f"{name} for new terminals:\n  {line}\n")
    return EXIT_OK


def remove_install(world: World, commands: Sequence[str]) -> int:
    """Remove everything that this program wrote outside of projects, except worktrees of tasks."""
    home = Workspace(world, world.home)
    taught = home.compare(None, tuple(target.name for target in TAUGHT))
    mine = [change for change in taught if change.action != "edited"]
    worktrees = world.paths_below(world.user_place("state", "worktrees"), "*/*")
    count = sum(1 for change in mine if change.found)
    if mine:
        remove_files(home, mine, is_all=len(mine) == len(taught))

    kinds = ["cache"]
    if not worktrees:  # otherwise the command stays, too, because `task tidy` must still be typed
        kinds += ["data", "state"]
        for command in commands:
            count += world.kind_of(command, follow=False) == "file"
            world.remove(command)
    count += sum(remove_user_files(world, kind) for kind in kinds)
    world.out(f"Removed {count_of(count, 'file')}.\n")

    kept = [f"{path}: you have edited it" for path in paths_that(taught, "edited")]
    for place in map(world.user_place, kinds):
        if world.kind_of(place, follow=False) != "absent":
            kept.append(f"{place}: this program did not write what is in it")
    for line in kept:
        world.out(f"Kept: {clean_line(line)}.\n")
    if worktrees:
        world.out(format_held(world, worktrees))
    elif not kept:
        world.out("Nothing is left outside of your projects.\n")
    world.out("Claude Code keeps its own records of sessions in its `projects` directory.\n"
              "In a project: `python3 subagent_fleet.py clean` removes what was "
              "generated there.\n")
    return EXIT_OK


def remove_user_files(world: World, kind: str) -> int:
    """Remove this program's files from a directory of the user; return how many there were."""
    place = world.user_place(kind)
    count = 0
    for pattern in USER_FILES[kind]:
        for path in world.paths_below(place, pattern):
            with contextlib.suppress(FleetError):  # a link or directory: not of this program
                world.remove(world.enter(world.parent(place), world.path(
                    "subagent-fleet", path[len(place) + 1:])))
                count += 1
    for pattern in USER_DIRECTORIES:
        for path in world.paths_below(place, pattern):
            world.remove_empty(path.rstrip("/"))
    return count


def format_held(world: World, worktrees: Sequence[str]) -> str:
    """Return the repositories that still have worktrees of tasks, and what to type there."""
    lines = []
    for worktree in worktrees:
        _, repository, _ = read_mark(world, world.path(worktree, ".git"))
        line = f"cd {quote_shell(repository)} && subagent-fleet task tidy"
        if not repository or world.kind_of(repository) != "directory":
            line = f"ls -la {quote_shell(worktree)}   # its repository is gone; delete it"
        lines.append(f"  {clean_line(line)}\n")
    return (f"Kept: the command, and {count_of(worktrees, 'worktree')} of tasks. Type:\n"
            + "".join(dict.fromkeys(lines))
            + "Then `subagent-fleet install --remove` again.\n")
