"""The audit of each agent, in four questions, and the report of a session."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.plan.routes import plan_tiers
from fleet.start.constants import TIERS
from fleet.start.record import Record, replace
from fleet.text.phrases import count_of, first_line
from fleet.text.terminal import clean_line, crop
from fleet.traces.judge import (
    PLANNED_ORDER,
    judge_answer,
    judge_receipt,
    plan_served,
    plan_state,
)
from fleet.traces.transcript import CUT_RATIO

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from fleet.traces.judge import Judged, Served, TraceFacts
    from fleet.traces.session import AgentTrace, SessionTrace


class Verdict(Record):
    """The answer to one question about one subagent."""

    question: str
    answer: str  # yes, no or unknown
    what: str = ""
    evidence: tuple[str, ...] = ()  # FILE:LINE, or the id of a request


# Each question and what a yes means; all of them can be decided from records.
QUESTIONS = {
    "Model": "served by the model its file names",
    "Machine": "on a planned machine or a configured fallback",
    "House": "nothing left the house",
    "Context": "its context was never cut"}


def audit_agent(agent: AgentTrace, judged: Sequence[Judged], session: SessionTrace,
                facts: TraceFacts) -> Iterator[Verdict]:
    """Answer the questions about a subagent, in their order."""
    if not judged:
        for question in ("Model", "Machine", "House"):
            yield Verdict(question, "unknown", "none of its requests was recorded")
        yield _audit_context(agent, judged)
        return

    verdicts = (_audit_model(agent, session, facts), _audit_machine(agent, judged),
                _audit_house(agent, judged), _audit_context(agent, judged))
    was_answered = any(one.receipt.outcome == "ok" or one.receipt.first_byte_seconds is not None
                       for one in judged)
    for verdict in verdicts:
        if verdict.answer == "yes" and not was_answered:
            last = judged[-1].receipt
            verdict = Verdict(verdict.question, "unknown", f"nobody answered: {last.outcome}",
                              _evidence(agent, last.id))
        yield verdict


def _evidence(agent: AgentTrace, request: str) -> tuple[str, ...]:
    """Return the place of an answer in a transcript, and the request's id."""
    answer = agent.transcript.answers.get(request) if agent.transcript else None
    return (answer.place, request) if answer else (request,)


def _audit_model(agent: AgentTrace, session: SessionTrace, facts: TraceFacts) -> Verdict:
    """Was it served by the model its file names?"""
    started = (agent.call.place,) if agent.call else ()
    source = facts.files.get(agent.kind.lower())
    if not source and agent.is_built_in:
        return Verdict("Model", "yes", "built into Claude Code, it has no file")
    if not source:
        return Verdict("Model", "unknown", f"no file names an agent `{agent.kind}`", started)

    place = f"{source.path}:{source.line}"
    wanted = _resolve_model(source.model, agent, session, facts)
    if not wanted:
        what = f"what `{source.model or 'inherit'}` stood for is not known"
        return Verdict("Model", "unknown", what, (place,))
    alias, request = next((one for one in agent.asked if one[0] != wanted), ("", ""))
    if not alias:
        return Verdict("Model", "yes")

    evidence = (place, *_evidence(agent, request))
    if agent.call and agent.call.model:
        what = (f"its call named the model `{agent.call.model}`, which overrides its file: "
                f"it asked for `{alias}`, not `{wanted}`")
        return Verdict("Model", "no", what, started + evidence)
    if source.changed > agent.began:
        what = f"its file was edited since: it asked for `{alias}` and names `{wanted}` now"
        return Verdict("Model", "unknown", what, evidence)
    return Verdict("Model", "no", f"its file names `{wanted}`, but it asked for `{alias}`",
                   evidence)


def _resolve_model(model: str, agent: AgentTrace, session: SessionTrace,
                   facts: TraceFacts) -> str:
    """Return the alias that Claude Code makes of a `model:`; "" if that cannot be known."""
    name = re.sub(r"\[\w+\]$", "", model)  # opus[1m]: the same model
    if name.lower() in ("", "inherit"):
        asked = [other.asked for other in session.agents if other.id == agent.parent]
        return asked[0][0][0] if asked and asked[0] else ""

    tier = {"best": "opus"}.get(name.lower(), name.lower())
    if tier not in TIERS or tier == "main":
        return name
    return facts.fleet.models[plan_tiers(facts.fleet)[tier]].alias if facts.fleet else ""


def _audit_machine(agent: AgentTrace, judged: Sequence[Judged]) -> Verdict:
    """Did planned machines or declared fallbacks serve it?"""
    worst = min(judged, key=lambda one: PLANNED_ORDER.index(one.planned))
    receipt = worst.receipt
    if worst.planned == "yes":
        return Verdict("Machine", "yes", "" if judged[-1].is_kept else "by the file")
    if worst.planned == "fallback":
        count = sum(one.planned == "fallback" for one in judged)
        what = (f"{count_of(count, 'request')} served by a configured fallback, "
                f"`{receipt.model_name}` on `{receipt.node}` ({worst.why})")
        return Verdict("Machine", "yes", what, (receipt.id,))
    who = f"`{receipt.model_name}` on `{receipt.node}` answered `{receipt.alias}`"
    if receipt.node is None:
        who = f"`{receipt.alias}` was answered"
    return Verdict("Machine", worst.planned, f"{who}: {worst.why}",
                   _evidence(agent, receipt.id))


def _audit_house(agent: AgentTrace, judged: Sequence[Judged]) -> Verdict:
    """Did nothing leave the house?"""
    left = ([one for one in judged if one.beyond]
            or [one for one in judged if one.beyond is None])
    if not left:
        return Verdict("House", "yes")
    return Verdict("House", "no" if left[0].beyond else "unknown",
                   left[0].beyond or left[0].why, _evidence(agent, left[0].receipt.id))


def _audit_context(agent: AgentTrace, judged: Sequence[Judged]) -> Verdict:
    """Was its context never cut, and none of its prompts refused?"""
    for one in judged:
        receipt = one.receipt
        what = ""
        if receipt.outcome == "prompt_too_long":
            what = (f"a prompt was refused: longer than the {receipt.context or 0:,} tokens "
                    f"of `{receipt.model_name}`")
        elif receipt.outcome == "ok" and receipt.sent_tokens > CUT_RATIO * receipt.input_tokens > 0:
            what = (f"`{receipt.node}` counted {receipt.input_tokens:,} tokens of a prompt "
                    f"of about {receipt.sent_tokens:,}")
        if what:
            return Verdict("Context", "no", what, _evidence(agent, receipt.id))

    for answer in agent.transcript.answers.values() if agent.transcript else ():
        if "prompt is too long" in answer.error.lower():
            return Verdict("Context", "no", "a prompt was refused as too long",
                           (answer.place,))
    lost = [one.receipt.id for one in judged if not one.is_kept]
    if lost:
        return Verdict("Context", "unknown", "no receipt says how long its prompts were",
                       _evidence(agent, lost[0]))
    if not any(one.receipt.sent_tokens for one in judged):
        return Verdict("Context", "unknown", "its receipts do not say what was sent")
    return Verdict("Context", "yes")


# -- the report of a session --


class AgentReport(Record):
    """The report of one agent."""

    agent: AgentTrace
    state: str
    judged: tuple[Judged, ...]
    served: tuple[Served, ...]
    verdicts: tuple[Verdict, ...] = ()
    notes: tuple[str, ...] = ()  # facts without a verdict


class SessionReport(Record):
    """The report of a session."""

    session: SessionTrace
    facts: TraceFacts
    agents: tuple[AgentReport, ...]

    @property
    def began(self) -> float:
        """When the first agent began."""
        times = [report.agent.began for report in self.agents]
        return min(filter(None, times), default=0.0)

    @property
    def ended(self) -> float:
        """When the last agent was last active."""
        return max(report.agent.ended for report in self.agents)


def report_session(session: SessionTrace, facts: TraceFacts, *,
                   audits: bool) -> SessionReport:
    """Return the report of a session, with the audit of its subagents."""
    agents = []
    for agent in session.agents:
        judged = [judge_receipt(receipt, facts) for receipt in agent.receipts]
        judged += [judge_answer(answer, facts) for answer in agent.unclaimed]
        report = AgentReport(agent, plan_state(agent, facts.now), tuple(judged),
                             tuple(plan_served(judged)))
        if audits and agent.id:
            report = replace(report,
                             verdicts=tuple(audit_agent(agent, judged, session, facts)),
                             notes=tuple(_note_end(agent, report.state, facts)))
        agents.append(report)
    return SessionReport(session, facts, tuple(agents))


def _note_end(agent: AgentTrace, state: str, facts: TraceFacts) -> Iterator[str]:
    """Yield facts about how an agent ended; only a person can judge them."""
    transcript = agent.transcript
    last = transcript.last if transcript else None
    source = facts.files.get(agent.kind.lower())
    if not transcript or not last:
        return
    if last.error:
        yield f"did not finish: {last.error}"
    elif state == "cut off":
        yield "did not finish: its transcript stops in the middle"
    elif last.stop == "max_tokens":
        yield "its last answer was cut at the length limit"
    elif state == "done" and (source is None or source.has_tools) \
            and not any(answer.calls for answer in transcript.answers.values()):
        yield "finished without using any tool"


def show_session(report: SessionReport) -> dict[str, Any]:
    """Return the JSON of a session; of its prompt only the first line."""
    session = report.session
    agents = []
    for told in report.agents:
        agent = told.agent
        transcript = agent.transcript
        agents.append({
            "agent_id": agent.id, "agent": agent.kind,
            "parent": agent.parent if agent.id else None,
            "state": told.state, "began": agent.began, "ended": agent.ended,
            "transcript": transcript.path if transcript else None,
            "served": list(told.served), "audit": list(told.verdicts),
            "notes": list(told.notes)})
    return {
        "session": session.id,
        "prompt": crop(clean_line(first_line(session.prompt)), 80),
        "began": report.began,
        "ended": report.ended,
        "torn": list(session.torn),
        "agents": agents}
