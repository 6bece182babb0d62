"""Other programs, as the World finds and runs them."""
from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from fleet.start.gate import late_decorator
from fleet.world.child import (
    GIT_ENVIRONMENT,
    GIT_SETTINGS,
    Child,
    Hold,
    Pipe,
    Ran,
    lock_file,
)
from fleet.world.files import Disk
from fleet.world.places import Directory, trying
from fleet.world.process_list import LOOKERS_LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import IO

    from fleet.world.child import Launch


class Programs(Disk):
    """Other programs: find them, run them, lock them out, start them in the background."""

    # -- programs --

    def which(self, name: str) -> str | None:
        """Return the path of a program on the PATH, or of a path if it is a program.

        Relative entries of the PATH are skipped: the working directory may be a stranger's.
        """
        places = self.environ.get("PATH", os.defpath).split(os.pathsep)
        program = shutil.which(name, path=os.pathsep.join(filter(os.path.isabs, places)))
        if program and not os.path.dirname(name) and not os.path.isabs(program):
            return None
        return program

    def run_program(self, words: Sequence[str], *, environ: Mapping[str, str] | None = None,
                    seconds: float = 60.0, given: bytes = b"",
                    hold: Hold | None = None) -> Ran:
        """Run a program and return what it says; 127: it is not there, 124: it took too long.

        It runs in the C locale, because this program reads its output. It may share a lock with
        us, so that our successor can wait for its end; when the lock is over, it is ended with
        all that it started.
        """
        program = self.which(words[0])
        if not program:
            return Ran(127, b"", f"{words[0]} is not on the PATH")
        argv = [program, *words[1:]]
        environ = {**(environ or self.environ), "LC_ALL": "C"}
        try:
            if hold:
                return self._run_under(hold, argv, environ, given, seconds)
            done = subprocess.run(argv, env=environ, input=given, timeout=max(0.1, seconds),
                                  capture_output=True)
        except subprocess.TimeoutExpired:
            return Ran(124, b"", f"{words[0]} took longer than {seconds:.0f} s")
        except (OSError, ValueError) as error:
            return Ran(126, b"", str(error))
        return Ran(done.returncode, done.stdout,
                   done.stderr.decode("utf-8", "replace").strip())

    def _run_under(self, hold: Hold, argv: Sequence[str], environ: Mapping[str, str],
                   given: bytes, seconds: float) -> Ran:
        """Run a program under a lock; end it and its children when the lock is over."""
        until = self.clock() + seconds
        # Its own session, so that its group has all that git started, such as a filter.
        with subprocess.Popen(argv, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, pass_fds=[hold.fileno()],
                              start_new_session=True) as process:
            left: bytes | None = given
            while True:
                try:
                    output, talk = process.communicate(left, timeout=0.1)
                    return Ran(process.returncode, output,
                               talk.decode("utf-8", "replace").strip())
                except subprocess.TimeoutExpired:
                    left = None  # it is being written
                    if hold.is_over() or self.clock() > until:
                        self._end_group(process)
                        raise

    def _end_group(self, process: subprocess.Popen[bytes]) -> None:
        """End a program's process group, with TERM first: git then removes its locks."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(OSError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)

    def read_program(self, words: Sequence[str], until: float) -> str | None:
        """Return what a program prints; None when it is absent, fails or takes too long."""
        ran = self.run_program(words, seconds=until - self.clock())
        return ran.output.decode("utf-8", "replace") if ran.code == 0 else None

    def run_git(self, words: Sequence[str], directory: str, *, seconds: float = 60.0) -> Ran:
        """Run git in a directory that may be a stranger's; run nothing that it names."""
        return self.run_program(["git", *self.git_words(directory), *words],
                                environ=self.git_environment(), seconds=seconds)

    def run(self, argv: Sequence[str], environ: Mapping[str, str], *,
            directory: str | None = None) -> int:
        """Run a program on this terminal to its end; return its exit code as a shell does."""
        child: subprocess.Popen[bytes] | None = None
        came: list[int] = []

        def hand_on(number: int, _: object) -> None:
            came.append(number)  # the signal may come before the child exists
            if child:
                child.terminate()

        # Functions, not SIG_IGN, which the child would inherit. Ctrl-C reaches it anyway. A
        # terminal that closes (SIGHUP) must not leave behind what is removed at the end.
        handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: hand_on,
                    signal.SIGHUP: hand_on}
        with self._take_signals(handlers):
            with trying("run", argv[0]):
                child = subprocess.Popen(argv, env=environ, cwd=directory)
            if came:
                child.terminate()
            code = child.wait()
        return code if code >= 0 else 128 - code

    def start(self, launch: Launch) -> Child:
        """Start a program in the background; from now on, SIGTERM ends us as Ctrl-C does."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        came = []

        def note(number: int, _: object) -> None:
            came.append(number)  # raised in the middle of Popen it would lose the child

        with self._take_signals({signal.SIGINT: note, signal.SIGTERM: note}):
            child = self.spawn(launch)
        if came:
            child.stop()
            raise KeyboardInterrupt
        return child

    def _open_log(self, path: str) -> IO[bytes]:
        """Return a file that a child's output is added to; only its owner can read it."""
        with trying("write", path):
            directory = Directory(path, makes=True)
            return open(directory.open_to_append(), "ab", buffering=0)

    def open_page(self, url: str) -> bool:
        """Open a page in the browser; False if there is no screen."""
        has_screen = sys.platform == "darwin" or any(
            self.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
        if not has_screen or self.environ.get("SSH_CONNECTION"):
            return False

        # webbrowser would start a browser for terminals where there is no other.
        program = self.which("open" if sys.platform == "darwin" else "xdg-open")
        if program:
            subprocess.Popen([program, url], stdin=subprocess.DEVNULL,
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                             start_new_session=True)
        return bool(program)

    # -- programs that outlive this one, and what is known of them --

    def hold(self, path: str) -> Hold | None:
        """Return the lock of a file, None where somebody else holds it."""
        with trying("lock", path):
            directory = Directory(path)
            descriptor = directory.open(directory.name, os.O_RDWR | os.O_CREAT)
            hold = Hold(descriptor)
            for _ in range(LOOKERS_LIMIT):
                if lock_file(descriptor, fcntl.LOCK_EX):
                    return hold
                # `is_held` takes the lock for a moment, too: try again.
                if not lock_file(descriptor, fcntl.LOCK_SH):
                    break
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                self.sleep(0.001)
            hold.release()
        return None

    def is_held(self, path: str) -> bool:
        """Tell whether another process holds the lock of a file."""
        if self.kind_of(path) != "file":
            return False
        with trying("lock", path):
            directory = Directory(path)
            looking = Hold(directory.open(directory.name, os.O_RDWR))
            try:
                return not lock_file(looking.fileno(), fcntl.LOCK_SH)
            finally:
                looking.release()

    @late_decorator(lambda: contextlib.contextmanager)
    def hold_soon(self, path: str, seconds: float) -> Iterator[None]:
        """Hold the lock of a file for a `with` block; after so many seconds go on without it."""
        until = self.clock() + seconds
        hold = self.hold(path)
        while hold is None and self.clock() < until:
            self.sleep(0.05)
            hold = self.hold(path)
        try:
            yield
        finally:
            if hold:
                hold.release()

    def make_pipe(self, path: str) -> None:
        """Make a named pipe, replacing a file of that name."""
        with trying("make", path):
            Directory(path).make_pipe()

    def open_pipe(self, path: str) -> Pipe:
        """Return a named pipe to write to; it stays open when its reader ends."""
        with trying("write", path):
            directory = Directory(path)
            # Opened for both, it opens at once, and keeps what is written if the reader ends.
            return Pipe(directory.open(directory.name, os.O_RDWR))

    def spawn(self, launch: Launch) -> Child:
        """Start a program in the background."""
        flags = os.O_RDWR if self.kind_of(launch.stdin) != "file" else os.O_RDONLY
        with trying("run", launch.argv[0]), contextlib.ExitStack() as closing:
            stdin = os.open(launch.stdin or os.devnull, flags)
            closing.callback(os.close, stdin)
            stdout = closing.enter_context(self._open_log(launch.stdout))
            stderr = closing.enter_context(self._open_log(launch.stderr))

            inherited = [launch.hold.fileno()] if launch.hold else []
            # The kernel's own alarm survives the exec, so the deadline holds without us. It is
            # looked up before the fork: the child of a threaded program must load nothing.
            prepare = functools.partial(signal.alarm, launch.seconds) if launch.seconds else None
            return Child(subprocess.Popen(
                launch.argv, cwd=launch.directory,
                env=launch.environ, stdin=stdin, stdout=stdout,
                stderr=stderr, pass_fds=inherited, start_new_session=launch.outlives,
                preexec_fn=prepare))

    def detach(self, log: str) -> bool:
        """Fork into the background, output in a file; True in the child, False in the parent."""
        with trying("write", log):
            stream = self._open_log(log)
        if os.fork():
            stream.close()
            return False
        os.setsid()
        if os.fork():
            os._exit(0)
        for number in (1, 2):
            os.dup2(stream.fileno(), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        return True

    def git_words(self, directory: str) -> list[str]:
        """Return git's first words; with them git runs no program that a repository names."""
        words = ["-C", directory]
        for setting in (*GIT_SETTINGS, "gc.auto=0", "commit.gpgSign=false",
                        "core.quotePath=false"):
            words += ["-c", setting]
        return words

    def git_environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment without variables that point git at another repository."""
        kept = {name: value for name, value in self.environ.items()
                if not name.startswith("GIT_")}
        return {**kept, **GIT_ENVIRONMENT, "LC_ALL": "C", **(more or {})}
