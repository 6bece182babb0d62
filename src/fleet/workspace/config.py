"""Finding and reading a fleet file."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.config.check import check_fleet
from fleet.findings.doctor import lint_fleet
from fleet.start.constants import CONFIG_NAMES, CONFIG_VARIABLE
from fleet.start.errors import FleetError
from fleet.start.record import Record
from fleet.text.terminal import plan_look
from fleet.text.yaml import Document
from fleet.workspace.trust import unlock_keys
from fleet.world.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from fleet.config.sections import Fleet
    from fleet.start.errors import Finding
    from fleet.text.terminal import Look


# This room reads the files that commands need: the config, the key, the generated files and
# Claude Code's settings. No other room knows where they are.


def look_of(world: World, stream: str = "stdout") -> Look:
    """Return the Look of standard output or standard error."""
    return plan_look(world.environ, world.is_terminal(stream),
                     encoding=world.encoding_of(stream), columns=world.columns)


class Config(Record):
    """A valid fleet file, with its warnings."""

    fleet: Fleet
    warnings: tuple[Finding, ...] = ()


def load_config(world: World, typed: str | None) -> Config:
    """Read the chosen config; raise all its errors at once."""
    path = find_config(world, typed)
    if typed and path != "-" and world.kind_of(path) == "absent":
        near = search_config(world, world.directory, shown="")
        if re.match("(?:.*/)?examples/", path):
            raise FleetError("unreadable", f"cannot read {path}: the examples are in this program",
                             fix="subagent-fleet init --example list")
        if near:
            raise FleetError("unreadable", f"cannot read {path}: No such file or directory",
                             fix=f"leave out `--config`: {near} is here")
    fleet = read_checked(world, path, "<stdin>" if path == "-" else path, check_fleet)
    unlock_keys(world, fleet)
    return Config(fleet, tuple(lint_fleet(fleet)))


def read_checked(world: World, path: str, source: str,
                 check: Callable[[Document], Any]) -> Any:
    """Return the checked value of a file; all errors are raised at once."""
    text = decode_config(world.read_bytes(path), source)
    try:
        value, problems = check(Document(text, source))
    except FleetError as error:  # a syntax error: nothing more can be checked
        value, problems = None, [error.finding]
    if value is None:
        raise FleetError("invalid-config", f"{source} is not valid", where=source,
                         findings=problems)
    return value


def load_fleet(path: str) -> Fleet:
    """Return the Fleet of a file; for people who import this module."""
    return load_config(World(), str(path)).fleet


def decode_config(content: bytes, source: str) -> str:
    """Return the text of a config; bytes that are not UTF-8 are refused with their line."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        what = f"line {line}: byte 0x{content[error.start]:02x} is not UTF-8 text"
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        what = "UTF-16, not UTF-8 text"
    raise FleetError("not-utf8", what, where=source, fix="save it as UTF-8")


def find_config(world: World, typed: str | None) -> str:
    """Return the typed config, else the variable's, else the nearest one up to the git root."""
    if typed is not None:
        return typed
    if world.environ.get(CONFIG_VARIABLE):
        return world.environ[CONFIG_VARIABLE]

    path = search_config(world, world.directory, shown="")
    if not path:
        raise FleetError("no-config", "no fleet.yaml in this directory or its parents (up to "
                         "the git root)",
                         fix="subagent-fleet init; or cd to the project that has one")
    return path


def search_config(world: World, directory: str, *, shown: str,
                  names: Sequence[str] = CONFIG_NAMES) -> str:
    """Return the nearest fleet file in a directory or above, up to the git root, or nothing.

    The path begins with `shown` in place of the directory. `names`: of another kind of file.
    """
    while True:
        for name in names:
            if world.kind_of(world.path(directory, name)) != "absent":
                return world.path(shown, name)

        above = world.parent(directory)
        is_root = world.kind_of(world.path(directory, ".git")) != "absent"
        if is_root or above == directory:
            return ""
        directory = above
        shown = world.path(shown, "..")


def find_output(world: World, *, out: str | None, config: str | None) -> str:
    """Return the directory of generated files: as typed, else beside the fleet file."""
    if out:
        return out
    if config or world.environ.get(CONFIG_VARIABLE):
        return "."
    try:
        return world.parent(find_config(world, config))
    except FleetError:  # there is no fleet file, and `clean` does not need one
        return "."
