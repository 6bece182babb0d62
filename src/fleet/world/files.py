"""The disk, as the World reads and writes it."""
from __future__ import annotations

import contextlib
import glob
import os
import pwd
import shutil
import signal
import stat
from typing import TYPE_CHECKING

from fleet.start.constants import RECEIPTS_LIMIT_BYTES, TEXT_LIMIT_BYTES
from fleet.start.errors import FleetError
from fleet.start.gate import late_decorator
from fleet.world.places import (
    NO_HOME,
    USER_PLACES,
    Directory,
    Place,
    as_place,
    in_the_way,
    is_straight,
    open_to_read,
    refuse_link,
    trying,
)
from fleet.world.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class Disk(Terminal):
    """Paths, reading and writing."""

    # -- disk: paths --

    @property
    def directory(self) -> str:
        """The working directory."""
        try:
            return os.getcwd()
        except OSError:
            raise FleetError("no-directory", "the working directory no longer exists",
                             fix="cd to one that does") from None

    @late_decorator(lambda: contextlib.contextmanager)
    def visit(self, directory: str) -> Iterator[None]:
        """Change to a directory for a `with` block; SIGTERM ends the block as Ctrl-C does."""
        before = self.directory
        with trying("enter", directory):
            os.chdir(directory)
        with self._take_signals({signal.SIGTERM: signal.default_int_handler}):
            try:
                yield
            finally:
                os.chdir(before)

    def path(self, *parts: str) -> str:
        """Return the parts as one path."""
        return os.path.join(*parts)

    @property
    def home(self) -> str:
        """The person's home; NO_HOME if neither the environment nor the system knows one.

        It is never relative: the working directory may be a stranger's.
        """
        if self.environ.get("HOME", "").startswith("/"):
            return self.environ["HOME"]
        with contextlib.suppress(KeyError):  # no such user, as in some containers
            home = pwd.getpwuid(os.getuid()).pw_dir
            if home.startswith("/"):
                return home
        return NO_HOME

    def user_place(self, kind: str, *names: str) -> str:
        """Return a path in this program's state, cache or data directory of the user."""
        variable, usual = USER_PLACES[kind]
        base = self.environ.get(variable, "")
        # The XDG standard says to ignore a relative path.
        if not base.startswith("/"):
            base = self.path(self.home, usual)
        return self.path(base, "subagent-fleet", *names)

    def split(self, path: str) -> tuple[str, str]:
        """Return the directory and the name of a path."""
        return os.path.split(path)

    def parent(self, path: str) -> str:
        """Return the directory of a path."""
        return os.path.dirname(path) or "."

    def real_path(self, path: str) -> str:
        """Return the absolute path without links."""
        if not os.path.isabs(path):
            path = os.path.join(self.directory, path)
        return os.path.realpath(path)

    def kind_of(self, path: str, *, follow: bool = True) -> str:
        """Return file, directory, symlink, device or pipe, or absent."""
        look = os.stat if follow else os.lstat
        with trying("read", path):
            try:
                mode = look(path).st_mode
            except (FileNotFoundError, NotADirectoryError):
                return "absent"
        kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}
        return kinds.get(stat.S_IFMT(mode), "device or pipe")

    def others_may_read(self, path: str) -> bool:
        """Tell whether a file is there that not only its owner can read."""
        try:
            mode = os.stat(path).st_mode
        except (OSError, ValueError):  # it has just gone
            return False
        return stat.S_ISREG(mode) and bool(mode & 0o077)

    def belongs_to_other(self, path: str) -> bool:
        """Tell whether a file is there that is another user's."""
        try:
            return os.stat(path).st_uid != os.getuid()
        except (OSError, ValueError):  # it has just gone
            return False

    def enter(self, root: str, path: str) -> Place:
        """Return root/path as a Place; refuse links that lead out, and odd paths."""
        place = Place(root, path)
        kind = self.kind_of(place, follow=False)
        if not is_straight(root, place.above):
            raise refuse_link(place)
        if kind == "symlink":
            raise in_the_way(place, "is a symlink", fix="name its target")
        if kind not in ("file", "absent"):
            raise in_the_way(place, f"is a {kind}")
        return place

    # -- disk: reading --

    def read_bytes(self, path: str, *, limit: int = TEXT_LIMIT_BYTES) -> bytes:
        """Read a regular file, or standard input for `-`; refuse more than the limit."""
        kind = "file" if path == "-" else self.kind_of(path)
        if kind not in ("file", "absent"):
            raise FleetError("not-file", f"{path} is a {kind}, not a file",
                             fix="name a file, or `-` for standard input")
        with trying("read", path), open_to_read(path) as stream:
            content = stream.read(limit + 1)
        if len(content) > limit:
            raise FleetError("too-large", fix="name the right file",
                             what=f"{path} is larger than {limit // 1048576} MiB")
        return content

    def size_of(self, path: str) -> int:
        """Return the size of a regular file in bytes; 0 where there is none."""
        if self.kind_of(path) != "file":
            return 0
        with trying("read", path), contextlib.suppress(FileNotFoundError):  # it has just gone
            return os.path.getsize(path)
        return 0

    def changed_at(self, path: str) -> float:
        """Return when a file was last changed, in seconds since 1970; 0 if there is none."""
        try:
            return os.stat(path).st_mtime
        except (OSError, ValueError):
            return 0.0

    def read_part(self, path: str, start: int, limit: int) -> bytes:
        """Return up to `limit` bytes of a regular file from an offset; else nothing."""
        if self.kind_of(path) != "file":
            return b""
        # It may just have gone: whoever carries out an order removes its file.
        with trying("read", path), contextlib.suppress(FileNotFoundError), \
                open(path, "rb") as stream:
            stream.seek(start)
            return stream.read(limit)
        return b""

    def paths_below(self, directory: str, pattern: str) -> list[str]:
        """Return the paths in a directory that match a pattern."""
        return sorted(glob.glob(self.path(glob.escape(directory), pattern), recursive=True))

    # -- disk: writing --

    def make_directory(self, path: str, *, is_private: bool = False) -> None:
        """Make a directory and its parents; if `is_private`, only its owner can enter."""
        with trying("make", path):
            directory = Directory(path, makes=True, is_whole=True)
            if is_private:
                directory.close_to_others()

    def replace_files(self, files: Sequence[tuple[str, bytes, int]], *,
                      syncs: bool = False) -> None:
        """Replace (path, bytes, mode) files in order; at any moment each is the old or the new one.

        With `syncs` even after a power cut.
        """
        staged = []
        known: dict[tuple[str, str], Directory] = {}  # by root and path: 200 agents share one
        try:
            # Write all of them beside their targets first, so that a full disk changes nothing.
            for path, content, mode in files:
                place = as_place(path)
                key = (place.root, place.above)
                with trying("write", place):
                    if key not in known:
                        known[key] = Directory(place, makes=True)
                    new = known[key].write_new(place.name, content, mode, syncs=syncs)
                    staged.append((known[key], new, place))

            for directory, new, place in staged:
                with trying("write", place):
                    directory.replace(new, place.name)
                    if syncs:
                        directory.sync()
        except FleetError:
            for directory, new, _ in staged:
                with contextlib.suppress(OSError):
                    directory.unlink(new)
            raise

    def append_line(self, path: str, line: bytes) -> None:
        """Add a line to a file only its owner can read; past the limit it turns over to `.1`.

        If the disk is full, no part of the line stays.
        """
        with trying("write", path):
            directory = Directory(path)
            descriptor = directory.open_to_append()
            if os.fstat(descriptor).st_size > RECEIPTS_LIMIT_BYTES:
                directory.turn_over(descriptor)
                os.close(descriptor)
                descriptor = directory.open_to_append()
            size = os.fstat(descriptor).st_size
            written = 0
            try:
                while written < len(line):
                    written += os.write(descriptor, line[written:])
            except OSError:
                # Unless another process has appended since.
                if os.fstat(descriptor).st_size == size + written:
                    os.ftruncate(descriptor, size)
                raise
            finally:
                os.close(descriptor)

    def remove(self, path: str) -> None:
        """Remove a file, where there is one."""
        with trying("remove", path), contextlib.suppress(FileNotFoundError):
            directory = Directory(path)
            directory.unlink(directory.name)

    def remove_tree(self, path: str) -> None:
        """Remove a file, or a directory with its contents; follow no link."""
        if self.kind_of(path, follow=False) != "directory":
            self.remove(path)
            return
        with trying("remove", path):
            for place, directories, _ in os.walk(path):
                for name in directories:  # a read-only directory, as Go makes them
                    below = os.path.join(place, name)
                    if not os.path.islink(below):
                        os.chmod(below, 0o700)
            os.chmod(path, 0o700)
            shutil.rmtree(path)

    def remove_empty(self, path: str) -> None:
        """Remove a directory if it is empty."""
        # not empty, not there, or behind a link
        with contextlib.suppress(OSError, FleetError):
            Directory(path).rmdir()

    def names_in(self, directory: str) -> list[str]:
        """Return the names in a directory; none where it is absent."""
        try:
            return sorted(os.listdir(directory))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def find_odd(self, directory: str) -> tuple[list[str], list[str]]:
        """Return repositories, devices and pipes below a directory."""
        nested = []
        odd = []
        for place, directories, names in os.walk(directory):
            if place != directory and ".git" in (*directories, *names):
                nested.append(place)
            if ".git" in directories:
                directories.remove(".git")
            for name in names:
                mode = os.lstat(os.path.join(place, name)).st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                    odd.append(os.path.join(place, name))
        return nested, odd

    def files_below(self, directory: str) -> list[str]:
        """Return the regular files below a directory, to which no link leads."""
        return sorted(os.path.join(place, name) for place, _, names in os.walk(directory)
                      for name in names
                      if stat.S_ISREG(os.lstat(os.path.join(place, name)).st_mode))

    def stamps_of(self, directory: str, names: Iterable[str]) -> dict[str, str]:
        """Return {name: size and time of change} of files in a directory."""
        stamps = {}
        for name in names:
            with contextlib.suppress(OSError):
                state = os.lstat(os.path.join(directory, name))
                stamps[name] = f"{state.st_size} {state.st_mtime_ns}"
        return stamps

    def first_files(self, directory: str, names: Sequence[str], count: int, size: int
                    ) -> list[str]:
        """Return the first of these files, up to a count and up to a total size."""
        first = []
        for name in names[:count]:
            with contextlib.suppress(OSError):
                size -= os.lstat(os.path.join(directory, name)).st_size
                if size < 0:
                    break
                first.append(name)
        return first

    def copy_file(self, source: str, target: str) -> None:
        """Copy a file with its mode, or a link as a link; never write outside the target's root."""
        if os.path.islink(source):
            with trying("copy", source):
                Directory(target, makes=True).link(os.readlink(source))
            return
        with trying("copy", source), open_to_read(source) as stream:
            directory = Directory(target, makes=True)
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            descriptor = directory.open(directory.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL,
                                        mode & 0o777)
            with open(descriptor, "wb") as copy:
                shutil.copyfileobj(stream, copy)
