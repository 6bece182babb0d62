"""What the World knows of itself, and its terminal."""
from __future__ import annotations

import _thread
import contextlib
import os
import shutil
import signal
import sys
import time
from typing import TYPE_CHECKING

from fleet.start.constants import CONNECT_SECONDS
from fleet.start.errors import FleetError
from fleet.start.gate import OWN_FILE
from fleet.text.terminal import guard_terminal
from fleet.world.process_list import ProcessList

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping
    from typing import Any, NoReturn

    from fleet.world.wire import IdleConnections


class Surroundings:
    """The environment, the clock, signals, and values that are looked up once."""

    def __init__(self) -> None:
        self.environ = dict(os.environ)
        self.clock = time.monotonic
        self.now = time.time
        self.sleep = time.sleep
        self.connect_seconds = CONNECT_SECONDS
        # The key of each (endpoint, variable) to which it may be sent.
        self.node_keys: dict[tuple[str, str], str] = {}
        self._parsing = _thread.allocate_lock()  # held while an answer is parsed
        self._listing = _thread.allocate_lock()  # held while processes are listed
        self._processes = ProcessList(-1.0, {})
        self._tls: ssl.SSLContext | None = None
        # Connections that wait for their next request, by scheme and place.
        self._idle: dict[tuple[str, str], IdleConnections] = {}
        # The addresses of names: a name service may be slow.
        self._addresses: dict[tuple[str, int], list[Any]] = {}
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # for characters that a C locale lacks
                stream.reconfigure(errors="backslashreplace")

    @staticmethod
    def end(status: int) -> NoReturn:
        """End this process without cleaning up what the system frees by itself: saves 4 ms."""
        for stream in (sys.stdout, sys.stderr):
            try:  # noqa: SIM105 - loading contextlib would take a tenth of `--version`
                stream.flush()
            except (OSError, ValueError, AttributeError):
                pass
        os._exit(status)

    @property
    def process_id(self) -> int:
        """The number of this process."""
        return os.getpid()

    @property
    def is_root(self) -> bool:
        """Whether this is the user that may do everything."""
        return os.geteuid() == 0

    # -- this machine --

    def token(self, size: int) -> str:
        """Return so many random bytes, in hexadecimal."""
        return os.urandom(size).hex()

    # -- signals: only the main thread may take them --

    def on_stop(self, callback: Callable[[str], object]) -> None:
        """Call `stop` with the name of the signal at Ctrl-C, SIGTERM, or a terminal's end."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # started by `nohup`
            signal.signal(number, lambda number, _: callback(signal.Signals(number).name))

    def _take_signals(self, handlers: Mapping[signal.Signals, Callable[..., object]]
                      ) -> contextlib.ExitStack:
        """Handle these signals until the returned stack is left."""
        restoring = contextlib.ExitStack()
        for number, handler in handlers.items():
            restoring.callback(signal.signal, number, signal.signal(number, handler))
        return restoring


class Terminal(Surroundings):
    """Output to a terminal or a pipe, and questions to a person."""

    # -- terminal --

    def out(self, text: str) -> None:
        """Write to stdout."""
        self.write(guard_terminal(text))

    def write(self, text: str) -> None:
        """Write data unchanged; a full disk is an error, a reader that has gone is not."""
        try:
            if sys.stdout is not None:  # None: closed before the start
                sys.stdout.write(text)
                sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            self.discard_output()
            raise FleetError("output", f"cannot write the output: {error.strerror}") from None

    def err(self, text: str) -> None:
        """Write errors, hints and progress to stderr; where it cannot be written, go on without."""
        try:
            if sys.stderr is not None:
                sys.stderr.write(guard_terminal(text))
                sys.stderr.flush()
        except BrokenPipeError:
            raise
        except OSError:  # a full disk: what is worked on matters more
            pass

    def is_terminal(self, stream: str = "stdout") -> bool:
        """Tell whether a person reads this stream."""
        found = getattr(sys, stream)
        return found is not None and not found.closed and found.isatty()

    def redraws(self) -> bool:
        """Tell whether stderr is a terminal on which a line can be redrawn."""
        return self.is_terminal("stderr") and self.environ.get("TERM") != "dumb"

    @property
    def columns(self) -> int:
        """Width of the terminal; 80 if it does not say."""
        return shutil.get_terminal_size().columns or 80

    def encoding_of(self, stream: str) -> str:
        """Return how a stream writes text, as far as it says."""
        return getattr(getattr(sys, stream), "encoding", None) or ""

    @staticmethod
    def leave_directories() -> None:
        """Import nothing more from the working directory or this file's: they may be a stranger's.

        Python puts one of them first, and nothing but the standard library is ever imported.
        """
        places = {os.path.realpath(os.path.dirname(OWN_FILE))}
        try:  # noqa: SIM105 - contextlib itself would come from there
            places.add(os.getcwd())
        except OSError:  # it is gone
            pass
        places.discard(os.path.dirname(os.__file__))  # somebody works in Python's own
        sys.path[:] = [path for path in sys.path
                       if path and os.path.realpath(path) not in places]

    @staticmethod
    def open_standard_files() -> None:
        """Open the null device in place of stdin, stdout and stderr, where they are closed.

        Otherwise the next file, such as a lock, would get one of their numbers, and `detach` and
        each child that gets files of its own in their place would close it. Reading stdin still
        fails.
        """
        number = os.open(os.devnull, os.O_WRONLY)
        while number <= 2:
            os.set_inheritable(number, True)
            number = os.open(os.devnull, os.O_WRONLY)
        os.close(number)

    def discard_output(self) -> None:
        """Drop all further output, because its reader has gone."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def can_ask(self) -> bool:
        """Tell whether a person at this terminal can answer a question."""
        return self.is_terminal("stdin") and self.is_terminal("stderr")

    def confirm(self, question: str, text: str = "") -> bool:
        """Show a text and a question; True if a person answers yes, False without a person."""
        if not self.can_ask():
            return False
        self.err(f"{text}{question} [y/N] ")
        return sys.stdin.readline().strip().lower() in ("y", "yes")
