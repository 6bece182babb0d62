"""What changes in files, as text; removing files; our own source."""
from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from fleet.start.constants import ENVIRONMENT_FILE, EXIT_USAGE, MANIFEST_FILE
from fleet.start.errors import FleetError
from fleet.text.tables import format_pairs
from fleet.text.terminal import PLAIN, Cell, clean_text, paint
from fleet.world.places import Place

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fleet.config.sections import Fleet
    from fleet.files.target import Change
    from fleet.text.terminal import Look
    from fleet.workspace.directory import Workspace
    from fleet.world.world import World


def format_diff(changes: Iterable[Change], fleet: Fleet, look: Look = PLAIN) -> str:
    """Return what would change as a unified diff; keys are never shown."""
    # Only the environment file holds our secrets, and a person's text in it may hold
    # more. A blank parts a name from its value in fish alone; in a comment it parts words.
    names = rf"KEY|TOKEN|SECRET|PASS(?:W(?:OR)?D)?|\b{fleet.gateway.master_key_env}"
    secret = re.compile(rf"((?:{names})(?::?=|:-)).+|(\bset\b.*(?:{names}) ).+|sk-\S+",
                        re.IGNORECASE)
    text = ""
    for change in changes:
        if change.found == change.wanted:
            continue

        before = (change.found or b"").decode("utf-8", "backslashreplace")
        after = (change.wanted or b"").decode("utf-8", "backslashreplace")
        if change.path == ENVIRONMENT_FILE:
            before, after = (secret.sub(r"\1\2(hidden)", text) for text in (before, after))

        shown = list(difflib.unified_diff(
            before.splitlines(), after.splitlines(),
            fromfile=change.path, tofile=change.path,
            fromfiledate=change.action, tofiledate="generated",
            lineterm=""))
        shown = shown or [f"--- {change.path}: only hidden values differ"]
        for number, line in enumerate(shown):
            role = "bold"  # the two lines that name the file
            if number > 1:
                role = {"@": "dim", "+": "ok", "-": "bad"}.get(line[:1], "")
            text += paint(clean_text(line), role, look) + "\n"
    return text


def list_changes(changes: Iterable[Change], *, is_written: bool) -> list[tuple[str, str]]:
    """Return the path of each file and the action for it."""
    return [(change.path,
             "updated" if is_written and change.action == "edited" else change.action)
            for change in changes if change.found or change.wanted]


_ACTION_ROLES = {"created": "ok", "updated": "ok", "unchanged": "dim", "removed": "warn",
                 "edited": "warn"}


def format_changes(heading: str, listed: Sequence[tuple[str, str]],
                   look: Look = PLAIN) -> str:
    """Return files and the action for each, below a heading."""
    rows = [(path, Cell(action, _ACTION_ROLES.get(action, ""))) for path, action in listed]
    return f"{paint(heading, 'bold', look)}\n{format_pairs(rows, look)}"


def remove_files(workspace: Workspace, doomed: Sequence[Change], *, is_all: bool) -> None:
    """Remove files and the directories left empty; with the last file, the manifest too."""
    workspace.write(doomed)
    if is_all:
        workspace.world.remove(workspace.enter(MANIFEST_FILE))
    left = {MANIFEST_FILE, *(change.path for change in doomed)}
    directories = {path.rsplit("/", depth)[0] for path in left
                   for depth in range(1, path.count("/") + 1)}
    for path in sorted(directories, key=lambda path: (-path.count("/"), path)):
        workspace.world.remove_empty(Place(workspace.out, path))


def read_own_source(world: World, name: str) -> bytes:
    """Return this program's own source; it is unknown if the program was piped."""
    source = world.own_source()
    if source is None:
        raise FleetError("no-source", f"{name}: this program was piped, so its own "
                         "file is not known", status=EXIT_USAGE,
                         fix="save it as subagent_fleet.py, and run that")
    return source


# The files that this program writes for a user, by kind of directory: only these are removed.
USER_FILES = {
    "cache": ("bytecode/" + "[0-9a-f]" * 64 + ".*",),
    "data": ("subagent_fleet.py", "__pycache__/subagent_fleet.*.pyc"),
    "state": ("trusted.json", "repositories.json", "repositories.json.lock", "exam/*.json",
              "ports.json", "ports.lock")}
USER_DIRECTORIES = ("bytecode", "__pycache__", "exam", "worktrees/*", "worktrees", "")
