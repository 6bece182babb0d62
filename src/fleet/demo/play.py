"""A client in Claude Code's place."""
from __future__ import annotations

import contextlib
import datetime
import functools
from typing import TYPE_CHECKING

from fleet.config.address import gateway_url
from fleet.gateway.server import BODY_SECONDS
from fleet.plan.routes import plan_tiers
from fleet.speech.messages import Messages
from fleet.speech.talk import Reply
from fleet.start.constants import HOME_URL
from fleet.start.errors import FleetError
from fleet.text.json import parse_json, render_json
from fleet.world.child import run_together

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from fleet.config.sections import Fleet
    from fleet.demo.node import SimulatedNode
    from fleet.world.world import World


DEMO_PROMPT = "Fix the login bug"


class DemoSession:
    """A scripted session: it asks the gateway, and writes Claude Code's session files."""

    def __init__(self, world: World, fleet: Fleet, key: str, place: str) -> None:
        self.world, self.fleet = world, fleet
        self.id = world.token(16)
        self._key, self._place = key, place
        self._messages: dict[str, list[dict[str, Any]]] = {}  # by agent; "" is the main one

    def ask(self, agent: str, text: str, *tools: str) -> None:
        """Say something to an agent's model, which calls these tools."""
        kind = agent.rstrip("0123456789")
        name = self.fleet.agents[kind].model if agent else plan_tiers(self.fleet)["main"]
        alias = self.fleet.models[name].alias
        if agent and agent not in self._messages:
            self._keep(agent, ".meta.json", {"agentType": kind})

        messages = self._messages.setdefault(agent, [])
        calls = [block["id"] for message in messages[-1:] for block in message["content"]
                 if block["type"] == "tool_use"]
        blocks = [{"type": "tool_result", "tool_use_id": call, "content": text}
                  for call in calls]
        messages.append(
            {"role": "user", "content": blocks or [{"type": "text", "text": text}]})
        self._keep_line(agent, {"type": "user", "message": {"role": "user", "content": text}})
        reply = self._post(agent, {
            "model": alias, "max_tokens": 1000, "messages": messages,
            "tools": [{"name": name, "input_schema": {"type": "object"}} for name in tools]})

        message = parse_json(reply.body)
        messages.append({"role": "assistant", "content": message["content"]})
        self._keep_line(agent,
                        {"type": "assistant", "message": message, "requestedModel": alias,
                         "requestId": reply.headers.get("request-id", "")})

    def _keep_line(self, agent: str, value: dict[str, Any]) -> None:
        now = datetime.datetime.fromtimestamp(self.world.now(), datetime.timezone.utc)
        self._keep(agent, ".jsonl", {
            **value, "isSidechain": bool(agent), "sessionId": self.id,
            "timestamp": f"{now:%Y-%m-%dT%H:%M:%S}.{now.microsecond // 1000:03}Z"})

    def _keep(self, agent: str, ending: str, value: Mapping[str, Any]) -> None:
        names = (self.id, "subagents", f"agent-{agent}") if agent else (self.id,)
        path = self.world.path(self._place, *names) + ending
        self.world.make_directory(self.world.parent(path))
        self.world.append_line(path, render_json(value) + b"\n")

    def _post(self, agent: str, body: dict[str, Any]) -> Reply:
        """Ask the gateway; raise if it does not answer."""
        headers = {"Authorization": f"Bearer {self._key}",
                   "x-claude-code-session-id": self.id}
        if agent:
            headers["x-claude-code-agent-id"] = agent
        exchange = self.world.open_exchange(
            f"{gateway_url(self.fleet.gateway)}{Messages.path}", body=render_json(body),
            headers=headers, deadline=self.world.clock() + BODY_SECONDS)
        with contextlib.closing(exchange):
            exchange.read_head()
            reply = Reply(exchange.status, exchange.headers, bytes(exchange.read_all()))
        if reply.status != 200:
            raise demo_broken(f"the gateway answered {reply.status}: "
                              f"{reply.body[:200].decode('utf-8', 'replace')}")
        return reply


def demo_broken(what: str) -> FleetError:
    """Return the error for a demo whose result is wrong."""
    return FleetError("demo-broken", f"the demo did not do what it shows: {what}",
                      fix=f"report it with these lines at {HOME_URL}/issues")


# What is asked one after the other: (whose model, what is said to it,
# the tools that it calls).
DEMO_PLAN = (
    ("", DEMO_PROMPT, "Agent"), ("planner1", "Plan the fix of the login bug.", "Read"),
    ("planner1", "login.py: 40 lines"), ("", "A plan of two steps.", "Agent", "Agent"))
DEMO_REVIEW = (("", "Both steps are done.", "Agent"),
               ("reviewer1", "Review the change.", "Read"),
               ("reviewer1", "login.py: 41 lines"), ("", "It is right."))


def play_session(session: DemoSession, mini: SimulatedNode,
                 tell: Callable[[str], None]) -> None:
    """Play a session: a plan, two implementers at once, a machine put to sleep, a review."""
    tell("The main session asks the planner for a plan.")
    for step in DEMO_PLAN:
        session.ask(*step)
    tell("Two implementers start at once. Their model has one slot, so one of them waits.")
    workers = ("implementer1", "implementer2")
    jobs = {worker: functools.partial(session.ask, worker, "Do a step of the plan.", "Edit")
            for worker in workers}
    for _, outcome in run_together(session.world, jobs):
        if isinstance(outcome, Exception):
            raise outcome

    mini.fall_asleep()
    tell("sim-mini was put to sleep in the middle of the work, so another "
         "machine takes over.")
    for worker in workers:
        session.ask(worker, "edited")
    mini.wake()
    tell("sim-mini wakes up. The gateway skips it for some seconds after its failure, so "
         "sim-gpu keeps its work. The reviewer checks the change.")
    for step in DEMO_REVIEW:
        session.ask(*step)
