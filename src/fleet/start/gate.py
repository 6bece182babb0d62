#!/usr/bin/env python3
# /// script
# requires-python = ">=3.9"
# dependencies = []
# ///
# SPDX-License-Identifier: MIT
"""Run Claude Code-style subagents across your local model fleet.

One fleet.yaml says which role runs on which model on which machine; this file finds what the
machines have, writes what LiteLLM and Claude Code read, warms the models, serves the fleet and
says truthfully whether it will work. Everything it does to the world is in world/.

A part uses only what stands above it; the rooms that are called pure touch nothing but their
arguments. Each begins with `# == room/part.py`; it is edited there, in src/fleet of the project.

Rooms
@rooms
"""
from __future__ import annotations

import sys

if sys.version_info < (3, 9):  # noqa: UP036 - this is what an older Python reaches
    # Python 2 and 3.5 read no f-string, and show the line that they cannot read: this one.
    sys.exit(f"subagent-fleet needs Python 3.9 or newer; this is {sys.version.split()[0]}")
if sys.platform == "win32":
    sys.exit("subagent-fleet runs on macOS and Linux; on Windows, use WSL")


def _end_quietly(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """End without a traceback on Ctrl-C during the start; later `main` does this."""
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, error, trace)


if __name__ == "__main__":
    sys.excepthook = _end_quietly


class _Late:
    """A stand-in that loads its module at first use; `--version` uses none of these."""

    def __init__(self, module_name: str) -> None:
        self.module_name = module_name

    def __getattr__(self, key: str) -> Any:
        module = __import__(self.module_name)
        globals()[self.module_name] = module
        return getattr(module, key)


TYPE_CHECKING = False
if TYPE_CHECKING:  # what checkers and editors read
    import re
    from collections.abc import Callable
    from typing import Any, TypeVar

    # Checkers know it; Python 3.9's `typing` does not.
    from typing_extensions import dataclass_transform

    _Plain = TypeVar("_Plain")  # a function
    _Decorated = TypeVar("_Decorated")

    def asset(path: str) -> str:
        """Return a text of src/fleet/assets; src/build.py replaces the call with the text."""
else:
    def dataclass_transform(**rules: bool) -> Callable[[Any], Any]:
        return lambda kind: kind


def late_decorator(decorator: Callable[[], Callable[[_Plain], _Decorated]],
          ) -> Callable[[_Plain], _Decorated]:
    """Decorate a function at its first call, with a decorator from a late module."""
    def decorate(function: _Plain) -> Any:
        decorated: list[Any] = []

        def call(*words: Any, **named: Any) -> Any:
            if not decorated:
                decorated.append(decorator()(function))
            return decorated[0](*words, **named)
        return call
    return decorate


class LatePattern:
    """A regular expression that is compiled when it is first used."""

    def __init__(self, pattern: str | bytes) -> None:
        self.pattern: Any = pattern

    def __getattr__(self, name: str) -> Any:
        method = getattr(re.compile(self.pattern), name)
        self.__dict__[name] = method  # the next access finds it here
        return method


__version__ = "1.0.0"
VERSION = __version__
OWN_FILE = __file__  # "<stdin>" if the program came through a pipe
