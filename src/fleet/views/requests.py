"""Requests as rows: agent, machine, outcome."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.agree import known_fleet
from fleet.gateway.receipts import TOTALS, Rejection
from fleet.plan.routes import agents_by_alias
from fleet.start.errors import FleetError
from fleet.text.phrases import count_of, show_moment, show_span
from fleet.text.tables import (
    ENTRY_INDENT,
    format_entry,
    format_table,
    format_words,
    pad_row,
)
from fleet.text.terminal import PLAIN, Cell, clean_line, crop, mark, paint
from fleet.text.width import width_of
from fleet.work.shown import find_task_rows
from fleet.workspace.claude import find_agent_type, find_session_words
from fleet.workspace.config import look_of
from fleet.workspace.records import ReceiptsReader

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from fleet.config.sections import Fleet
    from fleet.gateway.receipts import Receipt
    from fleet.text.terminal import Look
    from fleet.workspace.directory import Workspace
    from fleet.world.world import World


def format_served(before: Mapping[str, Mapping[str, Any]],
                  after: Mapping[str, Mapping[str, Any]], look: Look = PLAIN) -> str:
    """Return a table of what each node served between two readings of the totals."""
    if not after:  # LiteLLM has no totals
        return "\nLiteLLM does not say which machine served what.\n"
    if any(before.get(name, node)["requests"] > node["requests"]
           for name, node in after.items()):
        before = {}  # the gateway was restarted, and counts from 0
    rows = []
    for name, node in after.items():
        earlier = before.get(name, {})
        requests, tokens_in, tokens_out, waited, failures = (
            round(node[total] - earlier.get(total, 0), 1) for total in TOTALS)
        if requests or failures or waited:
            rows.append((name, f"{requests:,}", f"{tokens_in:,}", f"{tokens_out:,}",
                         show_span(waited or None), failures))
    if not rows:
        return "\nNo request was served.\n"
    headers = ("Machine", "Requests", "Tokens in", "Tokens out", "Waited", "Failures")
    table = format_table(headers, rows, look=look, right=headers[1:])
    return f"\n{paint('Served:', 'bold', look)}\n{table}"


class LogTable:
    """A growing table of requests: time, agent, model, machine, seconds, outcome."""

    def __init__(self, requests: Iterable[Mapping[str, Any]], look: Look, now: float) -> None:
        self._look = look
        self._widths = {"Time": 8, "Agent": 10, "Model": 10, "Machine": 10, "Took": 7}
        for request in requests:
            for column, cell in self._cells(request, now).items():
                self._widths[column] = max(self._widths[column], width_of(clean_line(cell)))

    def _cells(self, request: Mapping[str, Any], now: float) -> dict[str, str]:
        return {"Time": show_moment(request["time"], now), "Agent": request["agent"],
                "Model": request["model"] or request["route"] or "-",
                "Machine": request["node"] or "-",
                "Took": show_span(request["total_seconds"]).rjust(7)}

    def head(self) -> str:
        """Return the header line."""
        names = pad_row(list(self._widths), list(self._widths.values()))
        line = f"{names}  Outcome"
        if 0 < self._look.columns < width_of(line):  # the outcome is on its own line then
            line = crop(names.rstrip(), self._look.columns)
        return f"{paint(line, 'bold', self._look)}\n"

    def line(self, request: Mapping[str, Any], now: float) -> str:
        """Return the row of a request."""
        role = "bad"
        if request["outcome"] == "ok":
            role = "warn" if request["failures"] else "ok"
        outcome = mark(_describe_outcome(request), role, self._look)
        return format_entry([*self._cells(request, now).values()], [*self._widths.values()],
                            [outcome], self._look)


def _describe_outcome(request: Mapping[str, Any]) -> str:
    """Return how a request ended, and the failures: in the machine's words if there are any."""
    tries = [f"{tried.node}: {tried.why}" for tried in request["failures"]]
    said = request["said"] or ", ".join(tries)
    if said:
        said = f" after {said}" if tries else f": {said}"
    return clean_line(f"{request['outcome']}{said}")


def choose_failed(receipts: Iterable[Receipt]) -> list[Receipt]:
    """Return the receipts with a failure."""
    return [receipt for receipt in receipts if receipt.outcome != "ok" or receipt.failures]


def log_requests(world: World, fleet: Fleet) -> Callable[[list[Receipt | Rejection]], None]:
    """Print a log's header; return the function that prints requests and refusals."""
    look, now = look_of(world, "stderr"), world.now()
    names = AgentNames(world, agents_by_alias(fleet))
    known = [("", model.ollama_model, model.node) for model in fleet.models.values()]
    known += [(agent, "-", "") for agent in fleet.agents]
    table = LogTable([{"time": now, "total_seconds": 0.0, "agent": name, "model": model,
                       "node": node} for name, model, node in known], look, now)
    world.err(table.head())

    def take(things: list[Receipt | Rejection]) -> None:
        for thing in things:
            now = world.now()
            if isinstance(thing, Rejection):
                parts = [Cell(show_moment(now, now)), Cell(" refused:", "warn"),
                         Cell(f"{thing.http}, {thing.what}")]
                world.err(format_words(parts, look, indent=ENTRY_INDENT))
            else:
                world.err(table.line(report_receipt(thing, names), now))
    return take


def known_agents(options: Namespace, world: World) -> dict[str, list[str]]:
    """Return {alias: the agents whose model has it}; nothing if there is no valid fleet."""
    fleet = known_fleet(options, world)
    return agents_by_alias(fleet) if fleet else {}


class AgentNames:
    """The names of agents: requests contain only their ids (2.1.326)."""

    def __init__(self, world: World, agents: dict[str, list[str]]) -> None:
        self.world = world
        self._agents = agents  # by alias
        self._kept: dict[tuple[str, str], str] = {}

    def find(self, session: str, agent: str, alias: str) -> str:
        """Return an agent's name; `NAME?` if it is guessed from the alias; else the id."""
        if not agent:
            return "main"
        name = self._kept.get((session, agent)) or find_agent_type(self.world, session, agent)
        if name:  # else Claude Code may write it later
            self._kept[session, agent] = name
            return name
        namesakes = self._agents.get(alias, [])
        if len(namesakes) == 1:
            return f"{namesakes[0]}?"
        return agent

    def title(self, session: str) -> str:
        """Return the first words of a session's prompt, if Claude Code kept it."""
        if not self._kept.get((session, "title")):
            self._kept[session, "title"] = find_session_words(self.world, session)
        return self._kept[session, "title"]


def report_receipt(receipt: Receipt, names: AgentNames) -> dict[str, Any]:
    """Return a request for display: its receipt, and its agent's name."""
    return {**vars(receipt), "route": receipt.route or "", "node": receipt.node or "",
            "agent": names.find(receipt.session, receipt.agent_id, receipt.alias)}


def name_task_sessions(options: Namespace, world: World) -> dict[str, str]:
    """Return {session: task name} of the tasks that have begun."""
    return {row.session: row.name for row in find_task_rows(world, None, options)
            if row.session}


def report_requests(receipts: Sequence[Receipt], names: AgentNames, options: Namespace
                    ) -> list[dict[str, Any]]:
    """Return requests for display; the main agent of a task has the task's name."""
    tasks = {}
    if receipts:
        tasks = name_task_sessions(options, names.world)
    requests = []
    for receipt in receipts:
        request = {**report_receipt(receipt, names), "task": tasks.get(receipt.session, "")}
        if request["task"] and not receipt.agent_id and not options.json:
            request["agent"] = request["task"]
        requests.append(request)
    return requests


FAILURES_SHOWN = 5


def list_failures(workspace: Workspace, fleet: Fleet, began: float, stream: str) -> str:
    """Return a table of the latest requests since then that failed or fell back."""
    try:
        receipts = choose_failed(ReceiptsReader(workspace).read())
    except FleetError:  # unreadable records are no reason to fail here
        return ""
    # A client that left, or a stopped gateway, is not a failure.
    failed = [receipt for receipt in receipts if receipt.time >= began
              and (receipt.failures or receipt.outcome not in ("left", "stopped"))]
    if not failed:
        return ""
    look, now = look_of(workspace.world, stream), workspace.world.now()
    names = AgentNames(workspace.world, agents_by_alias(fleet))
    requests = [report_receipt(receipt, names) for receipt in failed[-FAILURES_SHOWN:]]
    table = LogTable(requests, look, now)
    head = f"{count_of(failed, 'request')} failed or fell back to another machine"
    if len(failed) > FAILURES_SHOWN:
        head += f", the last {FAILURES_SHOWN}"
    lines = "".join(table.line(request, now) for request in requests)
    return (f"\n{paint(f'{head}:', 'bold', look)}\n{table.head()}{lines}"
            "Why: `subagent-fleet logs --failed`\n")
