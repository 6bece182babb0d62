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
    """A place was free for a task that waited, on a rung of its ladder."""

    rung: str = ""


class Entered(Event):
    """A thread looks after the task now: the first one, or one after a kill."""


class Planned(Event):
    """It is known where the task works; where no try is open, its next one begins."""

    number: int  # of that try
    place: dict[str, Any]  # branch, id, worktree, base


class Ready(Event):
    """Its place is made and set up."""


class Starting(Event):
    """Its agent is about to be started, behind so many bytes of output."""

    session: str
    size: int


class Started(Event):
    """Its agent was started."""

    client: int
    words: str  # who it is, for people


class Resumed(Event):
    """Its agent was told what is wrong, and goes on."""


class Spoke(Event):
    """Its agent has answered, or has ended as one that only ends does."""


class Asked(Event):
    """Its agent asks a person."""

    id: str
    request: dict[str, Any]


class Answered(Event):
    """What its agent has asked was answered, or is asked no more."""

    words: str = ""  # of the person's answer


class Told(Event):
    """Its agent was told what a person has said since."""

    says: tuple[str, ...]


class Slept(Event):
    """The process of an agent that asks was ended, since nobody answered in time."""


class Lost(Event):
    """Its process has ended without a result."""

    has_begun: bool  # with what it was told
    is_known: bool  # its session can be resumed
    last: str  # line on its standard error


class Stalled(Event):
    """Its agent is stuck."""

    how: str


class Expired(Event):
    """Its try has worked for as long as it may."""


class Checked(Event):
    """Its work was kept and checked; `code` is None where it has no check."""

    work: WorkDone
    code: int | None
    output: str


class ApiFailed(Event):
    """The model was not reached, or has refused."""

    text: str
    is_final: bool
    cause: str = "api"


class Interrupted(Event):
    """Its thread has seen that a person stops it."""


class Trouble(Event):
    """Anything that went wrong in its thread: a refusal of ours, a bug, git, the disk."""

    reason: str
    cause: str


class Refused(Trouble):
    """Even its closing went wrong."""


class Closed(Event):
    """All of it was ended and kept as well as can be, after a ruling."""

    ruling: Ruling
    words: str = ""  # for people
    had_agent: bool = False
    left: str = ""  # what still runs


class EndedAgain(Event):
    """It was tried again to end what still ran."""

    reason: str
    left: str


class BranchMerged(Event):
    """Its branch is in the branch that its person is on."""


class Removed(Event):
    """It is no longer in the task file."""


class Revised(Event):
    """Its task was written anew, in the file or as typed words."""

    task: TaskSpec
    origin: str
    base: str = ""


class Order(Event):
    """What a person wants of it; `id` is the order's own, so that none is obeyed twice."""

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
    spec: dict[str, Any] = {}  # as the task file has it now


class AcceptOrder(Order):
    """`task accept`: its branch was put to its work, or `reason` says why it was not."""

    reason: str = ""
    cause: str = ""


class ForgetOrder(Order):
    """`task forget`."""


class DetachOrder(Order):
    """`task attach` is over: the person leaves the session to the task again."""


class GoneOrder(Order):
    """`task tidy` has removed its worktree."""

    git: str


class LandedOrder(Order):
    """`task land`: its work has landed on a branch."""

    kept: str  # the work that is meant
    into: str


class EvictOrder(Order):
    """`task land`: its work stays out of what has landed."""

    kept: str
    why: str


class ReturnOrder(Order):
    """`task land`: its work did not land, and its agent goes on, on top of what did."""

    kept: str
    tip: str  # what had landed before it was merged
    begin: str  # that and the work, merged as far as git could
    why: str
    text: str  # for its agent
    files: tuple[str, ...] = ()  # with conflict markers
    climbs: bool = False  # it has no round left on its rung


# What other commands write into the inbox, by its `do`. `add` and `limit` are of no one task.
ORDERS: Mapping[str, type[Order]] = {
    "say": SayOrder, "answer": AnswerOrder, "stop": StopOrder, "retry": RetryOrder,
    "accept": AcceptOrder, "forget": ForgetOrder, "detach": DetachOrder, "gone": GoneOrder,
    "landed": LandedOrder, "return": ReturnOrder, "evict": EvictOrder}


def read_order(order: Mapping[str, Any], identity: str) -> Order | None:
    """Return what the file of an order says; None where it says nothing of a task."""
    kind = ORDERS.get(str(order.get("do")))
    return read(kind, {**order, "id": identity}) if kind else None
