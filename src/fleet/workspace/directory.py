"""The directory of generated files, and the safety of its key."""
from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

from fleet.files.target import Change
from fleet.files.targets import (
    parse_manifest,
    plan_compared,
    render_files,
    render_manifest,
    target_of,
)
from fleet.start.constants import ENVIRONMENT_FILE, EXIT_REFUSED, MANIFEST_FILE, STATE_DIRECTORY
from fleet.start.errors import Finding, FleetError
from fleet.start.record import Record, replace
from fleet.text.json import digest
from fleet.text.phrases import quote_shell
from fleet.text.tables import format_finding
from fleet.workspace.config import look_of, search_config

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fleet.config.sections import Fleet
    from fleet.findings.checks import Facts
    from fleet.world.world import World


class Workspace(Record):
    """The directory `out` with the files generated from a fleet."""

    world: World
    out: str

    def path(self, *names: str) -> str:
        """Return a path below `out`."""
        return self.world.path(self.out, *names)

    def enter(self, path: str) -> str:
        """Return a path below `out`; refuse one that leads out of it or is not a file."""
        return self.world.enter(self.out, path)

    def read(self, path: str) -> bytes | None:
        """Return a file's bytes, None if it is absent; refuse as `enter` does."""
        place = self.enter(path)
        if self.world.kind_of(place) != "file":
            return None
        return self.world.read_bytes(place)

    def kept_key(self, fleet: Fleet) -> str:
        """Return the key that the environment file keeps, or an empty string."""
        text = (self.read(ENVIRONMENT_FILE) or b"").decode("utf-8", "replace")
        variable = fleet.gateway.master_key_env

        # As `generate` writes it, under any name, or as people write it.
        generated = r'^export (\w+)="\$\{\1:-(?P<generated>[A-Za-z0-9_-]{1,200})\}"$'
        written = rf'^(?:export )?{variable}=(["\']?)(?P<written>[\w.:/+=@%-]+)\3[ \t]*$'
        match = re.search(f"(?m){generated}|{written}", text)
        if not match:
            return ""
        return match["generated"] or match["written"]

    def find_key(self, fleet: Fleet) -> str:
        """Return the gateway's key: the environment's, else the generated one, else nothing.

        A key that others may know, or that no header can hold, is refused.
        """
        variable = fleet.gateway.master_key_env
        key = self.world.environ.get(variable)
        place, fix = f"${variable}", f"unset {variable}"
        if not key:
            place = quote_shell(self.path(ENVIRONMENT_FILE))
            fix = f"rm {place}; subagent-fleet generate"
            key = self.kept_key(fleet)
            if key:
                self._refuse_known_key(place)
        if not re.fullmatch("[!-~]*", key):  # a header cannot hold it
            raise FleetError("bad-key", f"the key in {place} holds more than printable ASCII "
                             "without blanks, so it cannot be sent", fix=fix,
                             status=EXIT_REFUSED)
        return key

    def _refuse_known_key(self, path: str) -> None:
        """Refuse the key of a file that others may have read or written."""
        leaks = find_leaks(self.world, self.path(ENVIRONMENT_FILE))
        reasons = {"env-readable": "other users can read it", "env-tracked": "git tracks it",
                   "env-foreign": "it belongs to another user"}
        if not leaks:
            return
        fix = f"rm {path}; subagent-fleet generate"
        if "env-tracked" in leaks:
            fix = f"git rm -f --cached {path}; {fix}"
        reason = " and ".join(reasons[leak] for leak in leaks)
        raise FleetError("known-key", f"the key in {path} is not used: {reason}", fix=fix,
                         status=EXIT_REFUSED)

    def read_key(self, fleet: Fleet) -> str:
        """Return the gateway's key; raise if there is none."""
        key = self.find_key(fleet)
        if key:
            return key

        path = self.path(ENVIRONMENT_FILE)
        what = f"no gateway key yet: ${fleet.gateway.master_key_env} is not set, and {path}"
        if self.world.kind_of(path) == "absent":
            raise FleetError("no-key", f"{what} does not exist",
                             fix="subagent-fleet generate")
        raise FleetError("no-key", f"{what} has no line that sets it",
                         fix="subagent-fleet generate --force")

    def compare(self, fleet: Fleet | None, targets: Sequence[str] = (), *,
                renews: bool = False) -> list[Change]:
        """Return the Changes that the files here need; without a fleet, all are removed.

        Without targets: those of the fleet, and all that was ever written here.
        With `renews` a key that others may know is replaced; else it is kept.
        """
        written = self._written()
        targets = targets or plan_compared(fleet, written)
        wanted = {}
        if fleet:
            key = self.kept_key(fleet)
            if renews and find_leaks(self.world, self.path(ENVIRONMENT_FILE)):
                key = ""
            wanted = render_files(fleet, key or f"sk-{self.world.token(32)}", targets)
        return self._plan_changes(wanted, targets, written)

    def compare_files(self, wanted: Mapping[str, bytes], target: str) -> list[Change]:
        """Return the Changes that bring these files of a target up to date."""
        changes = self._plan_changes(wanted, [target], self._written())
        return [change for change in changes if change.path in wanted]

    def _plan_changes(self, wanted: Mapping[str, bytes], targets: Sequence[str],
                      written: Mapping[str, str]) -> list[Change]:
        """Return the Changes that bring the files of some targets up to date."""
        changes = []
        for path in [*wanted, *(path for path in written if path not in wanted)]:
            target = target_of(path)
            if target and target.name in targets:
                content = self.read(path)
                is_ours = digest(content) in written.get(path, "")
                changes.append(Change(path, content, wanted.get(path), is_ours))
        return changes

    def _written(self) -> dict[str, str]:
        """Return the manifest; if it cannot be read, say so and return nothing."""
        written = parse_manifest(self.read(MANIFEST_FILE))
        if written is not None:
            return written
        self.world.err(format_finding(Finding(
            "manifest-broken", "warning",
            f"{MANIFEST_FILE} cannot be read, so files that differ count as yours"),
            look=look_of(self.world, "stderr")))
        return {}

    def write(self, changes: Sequence[Change]) -> None:
        """Make the changes; if it is cut off, the manifest still knows every file of ours."""
        before = parse_manifest(self.read(MANIFEST_FILE)) or {}
        copies = [(backup_of(change.path, change.found), change.found, 0o600)
                  for change in changes if change.action == "edited"]
        new = [change for change in changes
               if change.wanted is not None and change.action != "unchanged"]

        # 1. First copies of what is the user's, then a manifest that knows each new file
        # by its old and its new hash, then the files: whenever this ends, all that lies
        # there is ours.
        during = dict(before)
        for change in new:
            during[change.path] = f"{before.get(change.path, '')} {digest(change.wanted)}"
        if copies or new:
            self._replace([*copies, (MANIFEST_FILE, render_manifest(during), 0o644),
                           *((change.path, change.wanted, mode_of(change.path))
                             for change in new)])

        # 2. Remove files that left the fleet; then write the manifest with one hash for each.
        after = dict(before)
        for change in changes:
            if change.wanted is None:
                self.world.remove(self.enter(change.path))
                after.pop(change.path, None)
            else:
                after[change.path] = digest(change.wanted)
        if after != during:
            self._replace([(MANIFEST_FILE, render_manifest(after), 0o644)])

        # 3. Make the key's file private again, and keep git from committing it.
        place = self.enter(ENVIRONMENT_FILE)
        if self.world.others_may_read(place):
            self.world.replace_files([(place, self.world.read_bytes(place), 0o600)])
        if self.world.kind_of(place) == "file":
            with contextlib.suppress(FleetError):  # a link, or a disk that is read-only
                hide_from_git(self.world, self.world.real_path(self.out))

    def keep(self, path: str, content: bytes) -> None:
        """Write a private file of this program."""
        self._replace([(path, content, 0o600)])

    def _replace(self, files: Sequence[tuple[str, bytes | None, int]]) -> None:
        """Replace files below `out`, all or none."""
        self.world.replace_files([(self.enter(path), content or b"", mode)
                                  for path, content, mode in files])


def backup_of(path: str, content: bytes | None) -> str:
    """Return the path of a file's backup; each version has its own name."""
    return f"{STATE_DIRECTORY}/backup/{path}.{digest(content)[:12]}"


def mode_of(path: str) -> int:
    """Return the mode of a generated file: private if it holds the key."""
    target = target_of(path)
    return target.mode if target else 0o600


def observe_files(workspace: Workspace, fleet: Fleet, facts: Facts) -> Facts:
    """Add the facts about generated files; a file that cannot be read is a problem."""
    world = workspace.world
    try:
        changes = workspace.compare(fleet)
        path = workspace.enter(ENVIRONMENT_FILE)
        leaks = find_leaks(world, path)
        if world.kind_of(path) != "absent" and not leaks:
            workspace.read_key(fleet)
    except FleetError as error:
        return replace(facts, file_problems=(error.finding,))

    return replace(facts, changes=tuple(changes), env_path=path, leaks=leaks)


def find_leaks(world: World, path: str) -> tuple[str, ...]:
    """Return the ids of problems that let others read the key in an environment file."""
    leaks = []
    if world.others_may_read(path):
        leaks.append("env-readable")
    if world.belongs_to_other(path):
        leaks.append("env-foreign")

    listed = world.run_git(["ls-files", "--", ENVIRONMENT_FILE], world.parent(path), seconds=1.0)
    if listed.code == 0 and listed.text:
        leaks.append("env-tracked")
    return tuple(leaks)


def hide_from_git(world: World, directory: str) -> None:
    """List our private files in `.git/info/exclude`, which is never committed."""
    git = search_config(world, directory, shown=directory, names=(".git",))
    if not git or world.kind_of(git, follow=False) != "directory":
        return
    place = world.enter(world.parent(git), ".git/info/exclude")
    text = world.read_bytes(place) if world.kind_of(place) == "file" else b""
    ours = [ENVIRONMENT_FILE, f"{STATE_DIRECTORY}/"]
    if world.kind_of(world.path(directory, "subagent_fleet.py")) == "file":
        ours.append("subagent_fleet.py")
    new = [name for name in ours if name.encode() not in text.split(b"\n")]
    if new:
        end = b"" if text.endswith(b"\n") or not text else b"\n"
        lines = "".join(f"{name}\n" for name in new).encode()
        world.replace_files([(place, text + end + lines, 0o644)])
