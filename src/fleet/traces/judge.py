"""Which machine served an agent, and whether that was planned."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.config.names import full_model_name, leaves_house
from fleet.gateway.receipts import Receipt, describe_place
from fleet.plan.environment import is_cloud
from fleet.plan.routes import plan_fallbacks
from fleet.plan.trust import plan_node_stakes
from fleet.start.record import Record, replace
from fleet.text.terminal import clean_line
from fleet.traces.transcript import GENERATING_SECONDS, IDLE_SECONDS, SILENT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from fleet.config.sections import Fleet, Model
    from fleet.traces.session import AgentTrace
    from fleet.traces.transcript import SessionAnswer


class AgentSource(Record):
    """An agent's file as it is now."""

    path: str
    line: int  # of its `model:`
    model: str  # its value; "": the session's model
    has_tools: bool
    changed: float


class TraceFacts(Record):
    """What an audit compares a session with."""

    fleet: Fleet | None
    now: float
    fleet_path: str = "fleet.yaml"
    fleet_changed: float = 0.0
    files: Mapping[str, AgentSource] = {}  # by agent


class Judged(Record):
    """One request, and whether a planned machine served it."""

    receipt: Receipt  # made from the transcript if none was kept
    planned: str  # yes, fallback, no or unknown
    why: str = ""
    beyond: str | None = ""  # why it counts as sent outside; "": it was not; None: not known
    is_kept: bool = True


class Served(Record):
    """What one model on one machine did for an agent."""

    model: str  # as its machine calls it; "": not known
    route: str  # what fleet.yaml called it, else the alias that was asked
    node: str  # "": not known
    planned: str  # yes, fallback, no, failed, left or unknown
    why: str = ""
    at: float = 0.0  # when the first of them began
    requests: int = 0
    waited_seconds: float | None = None  # in the queue, all together
    first_token_seconds: float | None = None  # the median, since the machine was asked
    answer_rate: float | None = None  # tokens a second
    input_tokens: int = 0
    output_tokens: int = 0
    read_again_tokens: int = 0  # input tokens that a machine had read before
    read_again_why: str = ""  # the reasons
    waited_for: str = ""  # agents or sessions whose prompts were kept warm meanwhile


def judge_receipt(receipt: Receipt, facts: TraceFacts) -> Judged:
    """Return whether a request went to a planned machine."""
    fleet = facts.fleet
    if receipt.node is None:
        return Judged(receipt, "yes", f"nobody answered: {receipt.outcome}")
    if fleet is None:
        return Judged(receipt, "unknown", "no valid fleet file", None)

    model = fleet.models.get(receipt.route or "")
    beyond = _tell_beyond(receipt, fleet)
    if model and model.node == receipt.node and _is_as_written(receipt, model):
        if model.alias == receipt.alias:
            after = ", ".join(f"{tried.node}: {tried.why}" for tried in receipt.failures)
            return Judged(receipt, "yes", after and f"after {after}", beyond)
        if model.alias in plan_fallbacks(fleet).get(receipt.alias, ()):
            tries = [f"{tried.node}: {tried.why}" for tried in receipt.failures]
            tries += [f"{one.route} was passed over: {one.why}"
                      for one in receipt.passed_over]
            # A machine that failed just before is skipped without a failure of its own.
            why = (clean_line(receipt.said) or ", ".join(tries)
                   or "the first choice was being skipped after a failure")
            return Judged(receipt, "fallback", why, beyond)

    # A file that was edited since proves nothing: the older one may have planned it.
    if facts.fleet_changed > receipt.time:
        return Judged(receipt, "unknown", f"{facts.fleet_path} was edited since", beyond)
    return Judged(receipt, "no", "not declared", beyond)


def _is_as_written(receipt: Receipt, model: Model) -> bool:
    """Tell whether the fleet file still names the model that answered."""
    return not receipt.model or \
        full_model_name(receipt.model) == full_model_name(model.ollama_model)


def _tell_beyond(receipt: Receipt, fleet: Fleet) -> str:
    """Return which of the machines that were asked is outside, "" if none is."""
    is_remote = receipt.cloud
    if not receipt.model:  # an older receipt: only the file can tell more
        node = fleet.nodes.get(receipt.node or "")
        model = fleet.models.get(receipt.route or "")
        is_remote |= bool(node and plan_node_stakes([node]))
        is_remote |= bool(model and (model.cloud or leaves_house(model.ollama_model)))
    if not is_remote:
        return ""
    who = f"`{receipt.model_name}` on `{receipt.node}`"
    clouds = {other.node for other in fleet.models.values() if is_cloud(fleet, other)}
    tried = [attempt.node for attempt in receipt.failures if attempt.node in clouds]
    if tried and receipt.node not in clouds:  # which took over
        who = f"`{tried[0]}`, asked before `{receipt.node}`,"
    return f"{who} is outside your machines and networks"


def judge_answer(answer: SessionAnswer, facts: TraceFacts) -> Judged:
    """Judge an answer without a receipt by its id: our ids have their own form."""
    fleet = facts.fleet
    receipt = Receipt(
        time=answer.time, id=answer.id, session="", agent_id="", alias=answer.asked, route=None,
        node=None, context=None, failures=(), waited_seconds=None, first_byte_seconds=None,
        total_seconds=0.0,
        input_tokens=answer.input_tokens, output_tokens=answer.output_tokens, outcome="ok")
    unknown = Judged(receipt, "unknown", "no record says which machine answered", None,
                     is_kept=False)
    if re.fullmatch("req_[0-9a-f]{24}", answer.id):
        return replace(unknown, why="its record is gone")
    if fleet is None:  # then it is unknown, too, whether LiteLLM serves
        return unknown

    # LiteLLM passes on no id of this form, so another server answered.
    is_litellm = fleet.gateway.provider == "litellm"
    models = [model for model in fleet.models.values() if model.alias == answer.asked]
    if answer.id.startswith("req_") and not (is_litellm and models):
        beyond = f"`{answer.asked}` was answered, but not by this gateway"
        return Judged(receipt, "no", "not by this gateway", beyond, is_kept=False)
    if not is_litellm:
        return unknown
    if facts.fleet_changed > answer.time:
        return replace(unknown, why=f"{facts.fleet_path} was edited since")
    if len(models) != 1 or plan_fallbacks(fleet).get(answer.asked):
        return replace(unknown, why="LiteLLM does not say which machine answered")
    only = replace(receipt, **describe_place(models[0]))
    return replace(judge_receipt(only, facts), why="by the file", is_kept=False)


PLANNED_ORDER = ("no", "unknown", "fallback", "yes")  # the worst first


def plan_served(judged: Sequence[Judged]) -> list[Served]:
    """Return which models on which machines served an agent, in the order they began."""
    groups: dict[tuple[str, ...], list[Judged]] = {}
    for one in judged:
        receipt = one.receipt
        origin = "" if receipt.node else one.why
        place = receipt.model, receipt.route or receipt.alias, receipt.node or "", origin
        groups.setdefault(place, []).append(one)
    return [_sum_up(group) for group in groups.values()]


def _sum_up(group: Sequence[Judged]) -> Served:
    """Return the work of a model on a machine, from its requests."""
    first = group[0].receipt
    planned, why = _sum_up_plan(group)
    receipts = [one.receipt for one in group]
    waits = [receipt.waited_seconds for receipt in receipts
             if receipt.waited_seconds is not None]
    firsts = sorted(max(receipt.first_byte_seconds - receipt.queue_seconds, 0)
                    for receipt in receipts if receipt.first_byte_seconds is not None)
    sums = {}
    for key in ("input_tokens", "output_tokens", "read_again_tokens"):
        sums[key] = sum(getattr(receipt, key) for receipt in receipts)
    for key in ("read_again_why", "waited_for"):
        sums[key] = ", ".join(sorted({getattr(receipt, key) for receipt in receipts} - {""}))
    return Served(
        first.model, first.route or first.alias, first.node or "", planned, why,
        first.time - first.total_seconds, len(receipts),
        waited_seconds=sum(waits) if waits else None,
        # Not the mean: an answer that waited for its model to load would hide all the others.
        first_token_seconds=firsts[len(firsts) // 2] if firsts else None,
        answer_rate=_answer_rate(receipts), **sums)


def _sum_up_plan(group: Sequence[Judged]) -> tuple[str, str]:
    """Return the worst verdict on requests to one place, and why."""
    worst = min(group, key=lambda one: PLANNED_ORDER.index(one.planned))
    planned, why = worst.planned, worst.why
    # A client that left, or a stopped gateway, is not a failure.
    failed = [one.receipt.outcome for one in group
              if one.receipt.outcome not in ("ok", "left", "stopped")]
    if planned == "yes" and failed:
        planned, why = "failed", why or f"{len(failed)} of {len(group)}: {failed[0]}"
    if any(one.beyond for one in group):
        planned, why = "left", why or "left the house"
    return planned, why


def _answer_rate(receipts: Iterable[Receipt]) -> float | None:
    """Return tokens a second while answers were written; None if that took no measurable time."""
    tokens = seconds = 0.0
    for receipt in receipts:
        span = receipt.total_seconds - (receipt.first_byte_seconds or receipt.total_seconds)
        if span > GENERATING_SECONDS:
            tokens += receipt.output_tokens
            seconds += span
    return tokens / seconds if tokens else None


def plan_state(agent: AgentTrace, now: float) -> str:
    """Return an agent's state: done, failed, cut off or at work; "" if unknown."""
    transcript = agent.transcript
    if not transcript:
        return "at work" if now - agent.ended < SILENT_SECONDS else ""

    last, reported = transcript.last, agent.reported
    if last and last.error:
        return "failed"
    if last and (last.stop in ("end_turn", "stop_sequence")
                 or (reported == "completed" and not last.stop and not last.calls)):
        return "done"
    # `async_launched` is reported at the start, and says nothing about the end.
    is_over = reported not in ("", "async_launched")
    is_silent = now - max(agent.ended, transcript.changed) > IDLE_SECONDS
    return "cut off" if is_over or is_silent else "at work"
