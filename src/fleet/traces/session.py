"""The agents of a session, and which agent started which."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.config.rules import key
from fleet.plan.routes import agents_by_alias
from fleet.start.record import Record, replace
from fleet.traces.transcript import AGENTS_DEPTH_LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from fleet.config.sections import Fleet
    from fleet.gateway.receipts import Receipt
    from fleet.traces.transcript import Dispatch, SessionAnswer, Transcript


class AgentLabel(Record):
    """The metadata beside a subagent's transcript (`agent-ID.meta.json`)."""

    kind: str = key(name="agentType", default="")
    # The Dispatch that started it.
    call: str = key(name="toolUseId", default="")
    is_built_in: bool = key(name="isBuiltIn", default=False)


class AgentTrace(Record):
    """One agent of a session: the main one, whose id is "", or a subagent."""

    id: str
    kind: str  # its name; its id if the name is unknown
    parent: str  # the id of its parent
    transcript: Transcript | None
    receipts: tuple[Receipt, ...]
    call: Dispatch | None = None
    reported: str = ""  # how it ended, as its parent was told
    is_built_in: bool = False
    depth: int = 0  # how many agents are above it

    @property
    def began(self) -> float:
        """When it began, as far as known."""
        times = [receipt.time - receipt.total_seconds for receipt in self.receipts[:1]]
        if self.transcript and self.transcript.began:
            times.append(self.transcript.began)
        return min(times, default=0.0)

    @property
    def ended(self) -> float:
        """When it was last active, as far as known."""
        times = [receipt.time for receipt in self.receipts[-1:]]
        if self.transcript:
            times.append(self.transcript.ended)
        return max(times, default=0.0)

    @property
    def unclaimed(self) -> list[SessionAnswer]:
        """The answers in its transcript without a receipt."""
        known = {receipt.id for receipt in self.receipts}
        return [answer for answer in self.transcript.answers.values()
                if answer.id not in known and not answer.error] if self.transcript else []

    @property
    def asked(self) -> list[tuple[str, str]]:
        """Its known requests: (alias, request id)."""
        return [*((receipt.alias, receipt.id) for receipt in self.receipts),
                *((answer.asked, answer.id) for answer in self.unclaimed)]


class SessionTrace(Record):
    """A session: its agents, each after its parent; the first is the main one."""

    id: str
    agents: tuple[AgentTrace, ...]
    torn: tuple[str, ...] = ()  # FILE:LINE of lines in transcripts that could not be read

    @property
    def prompt(self) -> str:
        """Its first prompt."""
        main = self.agents[0].transcript
        return main.prompt if main else ""


def trace_session(session: str, transcripts: Iterable[Transcript],
                  labels: Mapping[str, AgentLabel], receipts: Iterable[Receipt],
                  fleet: Fleet | None) -> SessionTrace:
    """Join the facts of a session."""
    by_agent = {transcript.agent: transcript for transcript in transcripts}
    served: dict[str, list[Receipt]] = {"": []}
    for receipt in receipts:
        served.setdefault(receipt.agent_id, []).append(receipt)
    owners = agents_by_alias(fleet) if fleet else {}

    agents = []
    for name in dict.fromkeys([*by_agent, *served]):
        label = labels.get(name, AgentLabel())
        agent = AgentTrace(name, label.kind if name else "main", "", by_agent.get(name),
                           tuple(served.get(name, ())), is_built_in=label.is_built_in)
        for parent, transcript in by_agent.items():
            call = transcript.dispatches.get(label.call)
            if call and name not in ("", parent):
                agent = replace(agent, parent=parent, call=call,
                                reported=transcript.reports.get(name, ""))
        if not agent.kind:  # then guess from the alias: `planner?` if only the planner has it
            names = owners.get(agent.asked[0][0], ()) if agent.asked else ()
            agent = replace(agent, kind=f"{names[0]}?" if len(names) == 1 else name)
        agents.append(agent)
    torn = [place for transcript in by_agent.values() for place in transcript.torn]
    return SessionTrace(session, tuple(_in_order(agents)), tuple(torn))


def _in_order(agents: Sequence[AgentTrace]) -> Iterator[AgentTrace]:
    """Yield agents in tree order: each after its parent, siblings by time."""
    left = sorted(agents, key=lambda agent: (agent.id != "", agent.began))
    pending = [(left[0], 0)]
    while left:
        # An agent without a known parent, or in a cycle, is placed below the main one.
        agent, depth = pending.pop() if pending else (left[0], 1)
        left.remove(agent)
        yield replace(agent, depth=depth)
        below = min(depth + 1, AGENTS_DEPTH_LIMIT)
        pending += [(other, below) for other in reversed(left) if other.parent == agent.id]
