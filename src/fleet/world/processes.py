"""The processes of this machine, how to end them, and this program's own bytecode."""
from __future__ import annotations

import contextlib
import ctypes
import glob
import hashlib
import os
import re
import signal
import sys
from typing import TYPE_CHECKING

from fleet.start.constants import TEXT_LIMIT_BYTES
from fleet.start.errors import FleetError
from fleet.start.gate import OWN_FILE
from fleet.world.child import BYTECODE_FILES
from fleet.world.network import seal_bytecode
from fleet.world.places import SEAL_BYTES
from fleet.world.process_list import PS_ROW, Process, ProcessList, find_marks
from fleet.world.run_programs import Programs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


M_TRIM_THRESHOLD = -1  # of malloc.h, which glibc alone has


class Processes(Programs):
    """Processes of this machine: their memory and CPU, and how to end them."""

    def return_memory(self) -> None:
        """Have freed memory given back to the system at once.

        After one request of 20 MB glibc would keep 50 MB; other C libraries keep less.
        """
        with contextlib.suppress(AttributeError, ImportError, OSError):
            ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 1024 * 1024)

    def list_processes(self, since: float) -> ProcessList:
        """Return every process; a list that any thread made since then will do."""
        with self._listing:
            if self._processes.at < since:
                at = self.clock()
                read = self._read_proc if self.has_proc() else self._read_ps
                self._processes = ProcessList(at, {one.number: one for one in read()})
            return self._processes

    def _read_proc(self) -> Iterator[Process]:
        """Yield each process as Linux shows it."""
        ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
        uptime = float(self.read_part("/proc/uptime", 0, 64).split()[0])
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has ended
                with open(f"/proc/{name}/stat", "rb") as stream:
                    before, _, after = stream.read().rpartition(b")")
                fields = after.split()
                if fields[0] in b"ZX":  # a zombie
                    continue
                environ = b""
                with contextlib.suppress(OSError), \
                        open(f"/proc/{name}/environ", "rb") as stream:
                    environ = stream.read()
                used, start = int(fields[11]) + int(fields[12]), int(fields[19])
                age = max(uptime - start / ticks, 1 / ticks)
                yield Process(
                    int(name), int(fields[1]), int(fields[3]), str(start),
                    before.partition(b"(")[2].decode("utf-8", "replace"),
                    find_marks(environ.decode("utf-8", "replace")),
                    int(fields[21]) * page >> 20, round(100 * used / ticks / age, 1))

    def _read_ps(self) -> Iterator[Process]:
        """Yield each process as `ps` of macOS shows it.

        Since macOS 11 it hides the environment of the system's own programs, such as /bin/sh:
        these are found by their parent and their session. Each column needs its own `-o`: POSIX
        takes the rest of one for the header.
        """
        words = ["ps", "-axwwE"]
        for column in ("pid", "ppid", "stat", "rss", "pcpu", "lstart", "command"):
            words += ["-o", f"{column}="]
        ran = self.run_program(words, seconds=10.0)
        rows = [*re.finditer(PS_ROW, ran.text)]
        ends = [*(row.start() for row in rows[1:]), len(ran.text)]
        for row, end in zip(rows, ends):
            number, parent, state, memory, cpu, start = row.groups()
            command = ran.text[row.end():end].strip()
            if not state.startswith("Z"):
                yield Process(
                    int(number), int(parent), self.session_of(int(number)), start,
                    os.path.basename(command.partition(" ")[0]), find_marks(command),
                    int(memory) >> 10, float(cpu))

    def find_openers(self, path: str) -> set[int]:
        """Return the processes that have a file open, if the system says so."""
        if not self.has_proc():
            listed = self.read_program(["lsof", "-t", "--", path], self.clock() + 5.0)
            return {int(word) for word in (listed or "").split()}
        real = os.path.realpath(path)
        numbers = set()
        for link in glob.iglob("/proc/[0-9]*/fd/*"):
            with contextlib.suppress(OSError):  # closed since, or somebody else's
                if os.readlink(link) == real:
                    numbers.add(int(link.split("/")[2]))
        return numbers

    def session_of(self, number: int) -> int:
        """Return the session of a process: the number of the process that started it."""
        try:
            return os.getsid(number)
        except OSError:
            return 0

    def has_process(self, number: int) -> bool:
        """Tell whether a process is there, whatever its session: a container shows none of some."""
        try:
            os.kill(number, 0)
        except PermissionError:
            return True  # somebody else's
        except (OSError, OverflowError):
            return False
        return number > 0

    def find_inside(self, directory: str) -> list[int]:
        """Return the processes that work in a directory or below, if the system shows it."""
        root = os.path.join(os.path.realpath(directory), "")
        return [number for number, place in self._list_directories()
                if os.path.join(place, "").startswith(root)]

    def _list_directories(self) -> Iterator[tuple[int, str]]:
        """Yield the working directory of each process, as far as the system shows it."""
        if self.has_proc():
            for name in filter(str.isdigit, os.listdir("/proc")):
                with contextlib.suppress(OSError):  # it has ended, or is somebody else's
                    yield int(name), os.readlink(f"/proc/{name}/cwd")
            return
        listed = self.run_program(["lsof", "-w", "-d", "cwd", "-Fn"], seconds=5.0).output
        for number, words in re.findall(rb"(?m)^p(\d+)\n(?:f.*\n)?n(.*)$", listed):
            # Outside ASCII, lsof prints `\xc3` for a byte.
            path = re.sub(rb"\\x([0-9a-f]{2})", lambda byte: bytes([int(byte[1], 16)]), words)
            yield int(number), os.fsdecode(path)

    def has_proc(self) -> bool:
        """Tell whether the system shows each process as files, as Linux does."""
        return self.kind_of("/proc/self/environ") == "file"

    def end_processes(self, numbers: Iterable[int], *, at_once: bool) -> int:
        """Send SIGTERM to processes, or kill them; return how many there were."""
        count = 0
        for number in numbers:
            if number in (0, 1, os.getpid()):
                continue
            with contextlib.suppress(OSError):
                os.kill(number, signal.SIGKILL if at_once else signal.SIGTERM)
                count += 1
        return count

    def free_megabytes(self) -> int:
        """Return how much memory is free; 0 if the system does not say."""
        known = self.read_part("/proc/meminfo", 0, 4096).decode("ascii", "replace")
        match = re.search(r"MemAvailable:\s+(\d+) kB", known)
        return (int(match[1]) // 1024 if match
                else int(self.total_gigabytes() * 500))  # half of it counts

    def total_gigabytes(self) -> float:
        """Return how much memory this machine has; 0.0 if the system does not say."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
        return 0.0

    def become(self, argv: Sequence[str]) -> None:
        """Replace this process by another program (exec)."""
        os.execv(argv[0], list(argv))

    def compile_own_source(self) -> str:
        """Return this user's file that holds this program as bytecode; "" where none can be.

        Python keeps none of a script: it would compile a megabyte at each start, and hold
        what that took for as long as it runs.
        """
        import marshal
        source = self.own_source()
        if source is None:
            return ""
        place = self.user_place("cache", "bytecode")
        version = f"{sys.implementation.cache_tag}-{sys.hexversion:x}"
        name = f"{hashlib.sha256(source).hexdigest()}.{version}"
        path = self.path(place, name)
        try:
            self.make_directory(place, is_private=True)
            if self.belongs_to_other(place):
                return ""
            if not self._is_bytecode(path, name):
                code = marshal.dumps(
                    compile(source, os.path.realpath(OWN_FILE), "exec", dont_inherit=True))
                self.replace_files([(path, seal_bytecode(name, code) + code, 0o600)])
                kept = sorted(self.paths_below(place, f"*.{version}"), key=self.changed_at)
                for old in kept[:-BYTECODE_FILES]:
                    self.remove(old)
        except FleetError:  # a home that cannot be written: it starts more slowly
            return ""
        return path

    def _is_bytecode(self, path: str, name: str) -> bool:
        """Tell whether a bytecode file is complete, of that source, and private to its owner."""
        if self.kind_of(path, follow=False) != "file" or self.belongs_to_other(path) \
                or self.others_may_read(path):
            return False
        kept = self.read_bytes(path, limit=4 * TEXT_LIMIT_BYTES)
        return kept[:SEAL_BYTES] == seal_bytecode(name, kept[SEAL_BYTES:])

    def keep_bytecode(self, path: str) -> None:
        """Compile a module into the file in which Python looks for its bytecode."""
        import py_compile
        with contextlib.suppress(OSError):
            py_compile.compile(path, quiet=2)

    def own_program(self) -> list[str]:
        """Return the command that starts this program again; empty if it came through a pipe."""
        path = os.path.realpath(OWN_FILE)
        return [sys.executable, "-I", path] if os.path.isfile(path) else []

    def own_source(self) -> bytes | None:
        """Return the bytes of this file; None where it was piped."""
        if not os.path.isfile(OWN_FILE):
            return None
        with open(OWN_FILE, "rb") as stream:
            return stream.read()
