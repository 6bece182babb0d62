"""Jobs side by side, child processes, locks, pipes."""
from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

from fleet.start.constants import TICK_SECONDS
from fleet.start.errors import NodeFailure
from fleet.start.record import Record

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

    from fleet.world.terminal import Surroundings


# A directory can pretend to be a repository, and its settings can name programs that git runs:
# to watch files, to fetch missing objects (a lazy fetch, seen with 2.39.5), or as hooks. Git
# before 2.38 does not know safe.bareRepository, and before 2.44 not GIT_NO_LAZY_FETCH. With
# GIT_ALLOW_PROTOCOL no version reaches another repository, not even one on the disk.
GIT_SETTINGS = ("core.fsmonitor=false", "core.hooksPath=/dev/null",
                "safe.bareRepository=explicit", "submodule.recurse=false",
                "log.showSignature=false")
GIT_ENVIRONMENT = {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1",
                   "GIT_NO_REPLACE_OBJECTS": "1", "GIT_OPTIONAL_LOCKS": "0",
                   "GIT_TERMINAL_PROMPT": "0"}

BYTECODE_FILES = 4  # kept for each Python: several versions of this program may be in use


def run_together(world: Surroundings, jobs: Mapping[Any, Callable[[], Any]], *,
                 until: float = float("inf"),
                 threads: int = 512) -> Iterator[tuple[Any, Any]]:
    """Yield (key, value or NodeFailure) as each job ends; (None, None) after a tick without one.

    After `until` its threads are not awaited: they end with the process, which `main` ends.
    """
    from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
    executor = ThreadPoolExecutor(min(len(jobs), threads) or 1)
    keys = {executor.submit(job): key for key, job in jobs.items()}
    try:
        while keys and world.clock() < until:
            pause = min(TICK_SECONDS, max(0, until - world.clock()))
            ended = wait(keys, pause, FIRST_COMPLETED).done
            if not ended:
                yield None, None
            for future in ended:
                key, error = keys.pop(future), future.exception()
                if isinstance(error, NodeFailure):
                    error.with_traceback(None)  # its frames keep all that was read in memory
                elif error:
                    raise error  # a bug must not look like a dead node
                yield key, error or future.result()
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


class Child:
    """A program that runs in the background."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.number = process.pid  # for ending it after this program has ended

    def wait(self) -> None:
        """Wait until it has ended."""
        self._process.wait()

    def exit_code(self) -> int | None:
        """Return its exit code as a shell has it; None while it runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def stop(self) -> None:
        """Kill it at once: a softer end would save nothing."""
        self._process.kill()
        self._process.wait()


def lock_file(descriptor: int, how: int) -> bool:
    """Take the lock of an open file; False if another process holds it exclusively."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Hold:
    """A file lock: every process with its descriptor holds it, until the last of them ends.

    A child that inherits it holds it alone once this one is released. The lock alone tells
    whether a process lives: a process number could have been reused.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        # Whether a program that holds it with us should end: nothing waits for it any longer.
        self.is_over: Callable[[], bool] = lambda: False

    def fileno(self) -> int:
        """Return the descriptor, for a child to inherit."""
        return self._descriptor

    def release(self) -> None:
        """Close this process's descriptor."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class Pipe:
    """The writing end of a named pipe; writing never waits for the reader."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._left = b""

    def say(self, line: bytes) -> None:
        """Add a line; the rest that does not fit is kept for `push`."""
        self._left += line
        self.push()

    def push(self) -> bool:
        """Write the rest, as far as it fits; tell whether all is written."""
        while self._left:
            try:
                self._left = self._left[os.write(self._descriptor, self._left):]
            except BlockingIOError:
                return False
        return True

    def close(self) -> None:
        """Close it: the reader sees the end."""
        os.close(self._descriptor)


class Launch(Record):
    """How to start a program in the background; its input and output are files."""

    argv: Sequence[str]
    directory: str
    environ: Mapping[str, str]
    stdout: str
    stderr: str
    stdin: str = ""  # a named pipe or a file; "": nothing
    hold: Hold | None = None  # a lock that it holds as long as it lives
    seconds: int = 0  # the system ends it after these; 0: never
    outlives: bool = True  # its own session, so a closed terminal does not end it


class Ran(Record):
    """What a program that has ended printed."""

    code: int
    output: bytes
    talk: str

    @property
    def text(self) -> str:
        """Its output without the last line's end."""
        return self.output.decode("utf-8", "surrogateescape").rstrip("\n")
