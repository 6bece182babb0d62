"""Places, directories to which no link leads, ends of files."""
from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shlex
import shutil
import stat
import threading
import time
from typing import TYPE_CHECKING

from fleet.start.constants import EXIT_REFUSED
from fleet.start.errors import FleetError
from fleet.start.gate import late_decorator

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO

    from fleet.world.world import World


TREE_FILES_LIMIT = 2000
TREE_FILE_LIMIT_BYTES = 256 * 1024
PART_BYTES = 1024 * 1024  # read at once of a growing file: some 3,000 receipts
WRITING_SECONDS = 60  # no file takes longer to write
LINE_LIMIT_BYTES = 32 * 1024 * 1024  # no program writes longer lines of JSON
# Directories for a user's files: the variable that names each, and its default.
USER_PLACES = {"state": ("XDG_STATE_HOME", ".local/state"),
               "cache": ("XDG_CACHE_HOME", ".cache"),
               "data": ("XDG_DATA_HOME", ".local/share")}
# The home of a user without one: nothing can be read or written below it.
NO_HOME = "/dev/null"
SEAL_BYTES = 32


@late_decorator(lambda: contextlib.contextmanager)
def trying(verb: str, path: str) -> Iterator[None]:
    """Turn an error of the system into a FleetError in plain words."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        slugs = {"read": "unreadable", "enter": "unreadable", "run": "cannot-run"}
        code = getattr(error, "errno", None)
        slug = slugs.get(verb, "unwritable")
        if code in (errno.ENOSPC, errno.EROFS, errno.EDQUOT):
            slug = "disk-full"
        reason = getattr(error, "strerror", None) or error
        raise FleetError(slug, f"cannot {verb} {path or repr(path)}: {reason}",
                         fix=_fix_refusal(path, code)) from None


def _fix_refusal(path: str, code: int | None) -> str:
    """Return what to type to see why the system refuses a path."""
    if path == "-":
        return "name a file instead of `-`"
    if path.startswith(NO_HOME):
        return "this user has no home directory; set HOME to a directory that is yours"
    if code == errno.ENOSPC:
        return "free some space: `df -h .` shows how much is left"
    if code == errno.EROFS:
        return "this disk is read-only: work in a directory on another one"
    while path and not os.path.lexists(path):
        path = os.path.dirname(path)
    return f"check it: `ls -la {shlex.quote(path or '.')}`"


class Place(str):
    """A path below a directory, its `root`; no link may lead out of that."""

    root: str
    inner: str  # its path below the root

    def __new__(cls, root: str, inner: str) -> Place:
        place = super().__new__(cls, os.path.join(root, inner))
        place.root = root or "."
        place.inner = inner
        return place

    @property
    def name(self) -> str:
        """The last name of the path."""
        return os.path.basename(self.inner)

    @property
    def above(self) -> str:
        """The directory of the path, relative to the root."""
        return os.path.dirname(self.inner)


def as_place(path: str) -> Place:
    """Return a path as a Place; of a plain path only the last name is checked for links."""
    if isinstance(path, Place):
        return path
    return Place(*os.path.split(path))


def in_the_way(place: str, what: str, *, fix: str = "move it away") -> FleetError:
    """Return the error for a place where something else is in the way."""
    return FleetError("in-the-way", f"{place} {what}; nothing is written there",
                      fix=f"{fix}: `ls -ld {shlex.quote(place)}`", status=EXIT_REFUSED)


def refuse_link(place: Place) -> FleetError:
    """Return the error for a link on the way to a place."""
    link = place.root
    for step in place.inner.split("/"):
        link = os.path.join(link, step)
        if os.path.islink(link):
            break
    return FleetError("in-the-way", status=EXIT_REFUSED,
                      what=f"{place} lies behind a symbolic link; nothing is written there",
                      fix="put a directory in the place of the link: "
                          f"`ls -ld {shlex.quote(link)}`")


class Directory:
    """The directory of a path, opened without following links below its root.

    It stays open, so that it cannot be exchanged between the check and its use.
    """

    def __init__(self, path: str, *, makes: bool = False, is_whole: bool = False) -> None:
        place = as_place(path)
        inner = place.inner if is_whole else place.above  # the path is the directory's own
        self.name = place.name
        self.path = os.path.join(place.root, inner)
        if not is_straight(place.root, inner):
            raise refuse_link(place)
        if makes:
            os.makedirs(self.path or ".", exist_ok=True)

    def reach(self, name: str) -> str:
        """Return the path of a name in it."""
        return os.path.join(self.path, name)

    def open(self, name: str, flags: int, mode: int = 0o600) -> int:
        """Return a descriptor of a file in it; follow no link, wait for no pipe."""
        # Opening a FIFO without O_NONBLOCK would block until somebody reads it.
        return os.open(self.reach(name), flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode)

    def open_to_append(self) -> int:
        """Return a descriptor of a regular file that only its owner can read, at its end."""
        descriptor = self.open(self.name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            # Ask the open file: the path may be another file by now.
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise OSError(errno.ENXIO, "it is a device or pipe, not a file")
            if mode & 0o077:
                os.fchmod(descriptor, 0o600)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def turn_over(self, descriptor: int) -> None:
        """Give an open file of this name the name `.1`, unless another writer just did."""
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):  # the other writer is about to make it
            if os.path.samestat(os.lstat(self.reach(self.name)), os.fstat(descriptor)):
                self.replace(self.name, f"{self.name}.1")

    def link(self, leads: str) -> None:
        """Make a symbolic link of the path."""
        os.symlink(leads, self.reach(self.name))

    def close_to_others(self) -> None:
        """Make this directory private."""
        os.chmod(self.path, 0o700)

    def rmdir(self) -> None:
        """Remove an empty directory."""
        os.rmdir(self.reach(self.name))

    def make_pipe(self) -> None:
        """Make a named pipe, replacing a file of that name."""
        with contextlib.suppress(FileNotFoundError):
            self.unlink(self.name)
        os.mkfifo(self.reach(self.name), 0o600)

    def write_new(self, name: str, content: bytes, mode: int, *, syncs: bool = False) -> str:
        """Write the new content into a file beside the old one; return its name.

        Each writer has its own new file, so two may write at once. A file that a killed writer
        left behind is removed by a later write, once it is old.
        """
        new = f".{name}.new"
        with contextlib.suppress(FileNotFoundError):
            if abs(time.time() - os.lstat(self.reach(new)).st_mtime) > WRITING_SECONDS:
                self.unlink(new)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            descriptor = self.open(new, flags, mode)
        except FileExistsError:
            new = f".{name}.{os.getpid()}-{threading.get_ident()}.new"
            descriptor = self.open(new, flags, mode)
        try:
            with open(descriptor, "wb") as stream:
                stream.write(content)
                if syncs:
                    stream.flush()
                    os.fsync(descriptor)
        except OSError:
            self.unlink(new)
            raise
        return new

    def sync(self) -> None:
        """Wait until renames in it are on the disk."""
        descriptor = os.open(self.path or ".", os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def replace(self, old: str, new: str) -> None:
        """Rename a file here, replacing one of that name."""
        os.replace(self.reach(old), self.reach(new))

    def unlink(self, name: str) -> None:
        """Remove a file, or a link itself."""
        os.unlink(self.reach(name))


def is_straight(root: str, inner: str) -> bool:
    """Tell whether a path below a root has only directories on its way."""
    try:
        real = os.path.realpath(root)
        straight = os.path.normpath(os.path.join(real, inner))
        return (os.path.realpath(straight) == straight
                and os.path.commonpath([real, straight]) == real)
    except (OSError, ValueError):
        # A link vanished while it was followed, or leads to another drive.
        return False


def open_to_read(path: str) -> IO[bytes]:
    """Open a regular file, or standard input for `-`; a pipe is refused instead of awaited."""
    if path == "-":
        return open(0, "rb", closefd=False)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.ENXIO, "it is no longer a file")
        return open(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


class Tail:
    """The complete lines of a growing file; starts again when the file was rotated to `.1`."""

    def __init__(self, world: World, path: str, *, last_bytes: int = 0) -> None:
        self._world = world
        self._path = path
        self._at = max(0, world.size_of(path) - last_bytes) if last_bytes else 0
        self.rest = b""  # the beginning of an incomplete line

    def lines(self) -> Iterator[bytes]:
        """Yield the lines that are new."""
        if self._world.size_of(self._path) < self._at:
            self._at = 0
            self.rest = b""
        while True:
            part = self._world.read_part(self._path, self._at, PART_BYTES)
            self._at += len(part)
            *lines, self.rest = (self.rest + part).split(b"\n")
            yield from lines
            if len(self.rest) > LINE_LIMIT_BYTES:
                self.rest = b"..."
            if len(part) < PART_BYTES:
                return


def lines_backwards(world: World, path: str, limit: int) -> Iterator[bytes]:
    """Yield the complete lines in the last `limit` bytes of a file, last one first."""
    end = world.size_of(path)
    least = max(0, end - limit)
    rest = b""
    while end > least:
        begin = max(least, end - PART_BYTES)
        rest, *lines = (world.read_part(path, begin, end - begin) + rest).split(b"\n")
        if len(rest) > LINE_LIMIT_BYTES:
            rest = b"..."
        yield from reversed(lines)
        end = begin
    if not least:
        yield rest


class PrivateDirectory:
    """A private temporary directory outside any project; it is removed at the end."""

    def __enter__(self) -> str:
        from tempfile import mkdtemp
        with trying("make", "a temporary directory"):
            self._path = mkdtemp(prefix="subagent-fleet-")  # 0700
        return self._path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._path, ignore_errors=True)
