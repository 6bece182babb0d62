"""What can happen to a task: what its thread sees, and what a person orders."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.start.record import Record, read

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from fleet.config.task_file import TaskSpec
    from fleet.tasks.verdict import Ruling, WorkDone


# `tasks/step` has a row for each. An order arrives as a file of the inbox, whose keys are the
# fields of its record.


class Event(Record):
    """What has happened to a task."""


class Begun(Event):
    """A slot was free for a waiting task, on a rung of its ladder."""

    rung: str = ""


class Entered(Event):
    """A thread has taken the task: its first one, or a new one after a kill."""


class Planned(Event):
    """The task's place is planned; if no try is open, its next one begins."""

    number: int  # of that try
    place: dict[str, Any]  # branch, id, worktree, base


class Ready(Event):
    """Its place was made and set up."""


class Starting(Event):
    """Its agent is about to start; the output file already has `size` bytes."""

    session: str
    size: int


class Started(Event):
    """Its agent was started."""

    client: int
    words: str  # who it is, for people


class Resumed(Event):
    """Its agent was told what is wrong, and continues."""


class Spoke(Event):
    """Its agent has answered; a coder that can't talk has ended."""


class Asked(Event):
    """Its agent asks a person."""

    id: str
    request: dict[str, Any]


class Answered(Event):
    """Its agent's question was answered, or is no longer asked."""

    words: str = ""  # of the person's answer


class Told(Event):
    """Its agent was told what a person has said meanwhile."""

    says: tuple[str, ...]


class Slept(Event):
    """The process of an asking agent was ended, because nobody answered in time."""


class Lost(Event):
    """Its process has ended without a result."""

    has_begun: bool  # with what it was told
    is_known: bool  # its session can be resumed
    last: str  # the last line on its standard error


class Stalled(Event):
    """Its agent is stuck."""

    how: str


class Expired(Event):
    """Its try has reached the deadline."""


class Checked(Event):
    """Its work was kept and checked; `code` is None if it has no check."""

    work: WorkDone
    code: int | None
    output: str


class ApiFailed(Event):
    """The model could not be reached, or refused the request."""

    text: str
    is_final: bool
    cause: str = "api"


class Interrupted(Event):
    """Its thread has noticed that a person stops the task."""


class Trouble(Event):
    """Something went wrong in its thread: one of our own refusals, a bug, git, the disk."""

    reason: str
    cause: str


class Refused(Trouble):
    """Closing the task went wrong, too."""


class Closed(Event):
    """After a ruling, its processes were ended and its work was kept, as far as possible."""

    ruling: Ruling
    words: str = ""  # for people
    had_agent: bool = False
    left: str = ""  # what still runs


class EndedAgain(Event):
    """Another attempt was made to end what was still running."""

    reason: str
    left: str


class BranchMerged(Event):
    """Its branch was merged into the branch that the person is on."""


class Removed(Event):
    """It is no longer in the task file."""


class Revised(Event):
    """Its task was changed in the task file, or typed again."""

    task: TaskSpec
    origin: str
    base: str = ""


class Order(Event):
    """A person's order. Each has its own `id`, so that none is carried out twice."""

    id: str


class SayOrder(Order):
    """`task say`."""

    text: str


class AnswerOrder(Order):
    """`task answer`."""

    answers: dict[str, str]


class StopOrder(Order):
    """`task stop`."""


class RetryOrder(Order):
    """`task retry`."""

    fresh: bool = False
    say: str = ""
    spec: dict[str, Any] = {}  # as the task file or the command line has it now


class AcceptOrder(Order):
    """`task accept`: its branch was moved to its work, or `reason` says why not."""

    reason: str = ""
    cause: str = ""


class ForgetOrder(Order):
    """`task forget`."""


class DetachOrder(Order):
    """`task attach` is over: the person has handed the session back to the task."""


class GoneOrder(Order):
    """`task tidy` has removed its worktree."""

    git: str


class LandedOrder(Order):
    """`task land`: its work has landed on a branch."""

    kept: str  # the work that landed
    into: str


class EvictOrder(Order):
    """`task land`: its work did not land, and its agent gets no further round."""

    kept: str
    why: str


class ReturnOrder(Order):
    """`task land`: its work did not land, and its agent continues on top of what did."""

    kept: str
    tip: str  # what had landed before it was merged
    begin: str  # that and the work, merged as far as git could
    why: str
    text: str  # for its agent
    files: tuple[str, ...] = ()  # with conflict markers
    climbs: bool = False  # it has no round left on its rung


# The orders that other commands write into the inbox, by their `do`. `add` and `limit` are not
# about a task that exists.
ORDERS: Mapping[str, type[Order]] = {
    "say": SayOrder, "answer": AnswerOrder, "stop": StopOrder, "retry": RetryOrder,
    "accept": AcceptOrder, "forget": ForgetOrder, "detach": DetachOrder, "gone": GoneOrder,
    "landed": LandedOrder, "return": ReturnOrder, "evict": EvictOrder}


def read_order(order: Mapping[str, Any], identity: str) -> Order | None:
    """Return the order that a file contains; None if it is not about a task that exists."""
    kind = ORDERS.get(str(order.get("do")))
    return read(kind, {**order, "id": identity}) if kind else None
