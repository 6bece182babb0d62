"""The processes of this machine, as the system lists them."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.start.record import Record

if TYPE_CHECKING:
    from collections.abc import Mapping


# A variable that every process started for a task, or for its check, has in its environment.
TASK_MARK, CHECK_MARK = "SUBAGENT_FLEET_TASK", "SUBAGENT_FLEET_CHECK"
TASK_ID = "FLEET_TASK_ID"  # by it, commands know their task


class Process(Record):
    """A process at one moment."""

    number: int
    parent: int
    session: int  # the process that started its session
    start: str  # when it started; with its number this is unique
    name: str
    marks: frozenset[str]  # the variables in its environment that name a task
    memory_mb: int
    cpu_percent: float


class ProcessList(Record):
    """The processes of this machine at one moment."""

    at: float  # of the clock
    processes: Mapping[int, Process]


# The first line of a process in `ps` of macOS (C locale); a command may span several lines.
PS_ROW = (r"(?m)^ *(\d+) +(\d+) +(\S+) +(\d+) +(\d+[.]\d+) +"
          r"(\w{3} \w{3} [ \d]\d [\d:]{8} \d{4}) ")


def find_marks(environ: str) -> frozenset[str]:
    """Return the variables in an environment that name a task or its check."""
    return frozenset(re.findall(
        rf"(?<![^\s\0])(?:{TASK_MARK}|{CHECK_MARK})=[^\s\0]+", environ))


LOOKERS_LIMIT = 1000  # processes that look at a lock at once
