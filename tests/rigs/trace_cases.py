"""Recorded sessions of the real Claude Code, and the fleet and receipts that fit them."""
import contextlib
import datetime
import io
import json
import os
import pathlib
import re
import shutil

import subagent_fleet as sf
from tools import ROOT, clean_environment

CASES = ROOT / "tests" / "cases" / "traces"
RECORDED = ("sync-197", "sync-326", "bg-326")
NOW = 1795014302.0  # eight hours after they were recorded
LONG_AGO = NOW - 86400
FLEET = """\
project: {name: shop}
nodes:
  laptop: {endpoint: "http://localhost:11434"}
  mini: {endpoint: "http://192.168.1.50:11434"}
  spare: {endpoint: "http://192.168.1.51:11434"}
models:
  big: {node: mini, ollama_model: "qwen3-coder:30b", litellm_alias: main-local, context: 65536}
  small: {node: laptop, ollama_model: "qwen3:8b", litellm_alias: explorer-local, context: 32768,
          fallback: [other]}
  other: {node: mini, ollama_model: "devstral:24b", litellm_alias: other-local, context: 32768}
  third: {node: spare, ollama_model: "gemma4:12b", litellm_alias: third-local, context: 32768}
agents:
  explorer: {model: small, description: Explores., tools: [Read, Grep, Glob]}
"""
AGENT = """\
---
name: explorer
description: test agent explorer
tools: Read, Grep, Glob
model: explorer-local
---

You are a test agent.
"""


class Recorded:
    """A recorded session as it lies in a home directory, beside the project it was of."""

    FLEET = FLEET

    def __init__(self, tmp_path, name):
        self.project, self.home = tmp_path / "shop", tmp_path / "home"
        (self.project / ".claude" / "agents").mkdir(parents=True)
        self.agent_file = self.project / ".claude" / "agents" / "explorer.md"
        self.write(self.agent_file, AGENT)
        self.write(self.project / "fleet.yaml", FLEET)

        place = re.sub("[^A-Za-z0-9]", "-", os.path.realpath(self.project))
        self.sessions = self.home / ".claude" / "projects" / place
        shutil.copytree(CASES / name, self.sessions)
        for path in self.sessions.rglob("*.json*"):
            text = path.read_text(encoding="utf-8")
            self.write(path, re.sub(r"req_mock_(\d+)", lambda m: f"req_{int(m[1]):024x}", text))
        self.main, = self.sessions.glob("*.jsonl")
        self.sub, = self.sessions.rglob("agent-*.jsonl")
        self.id, self.agent = self.main.stem, self.sub.stem[len("agent-"):]

    def write(self, path, text, at=LONG_AGO):
        """Write a file as if that had been long ago."""
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        os.utime(path, (at, at))

    def lines(self, path):
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def edit(self, path, change):
        """Rewrite a transcript: `change` gets each line's value, and gives it, another or None."""
        lines = [change(line) for line in self.lines(path)]
        kept = [line for line in lines if line is not None]
        self.write(path, "".join(json.dumps(line) + "\n" for line in kept))

    def number(self, path, request):
        """The number of the line that holds a request's answer."""
        return [number for number, line in enumerate(self.lines(path), 1)
                if line.get("requestId") == request][-1]

    @property
    def requests(self):
        """The request ids of the subagent, in their order."""
        return [line["requestId"] for line in self.lines(self.sub) if line["type"] == "assistant"]

    def receipts(self):
        """What the gateway would have written for the recorded answers."""
        fleet, _ = sf.check_fleet(sf.Document(FLEET, "fleet.yaml"))
        by_alias = {model.alias: model for model in fleet.models.values()}
        written = []
        for path in (self.main, self.sub):
            for line in self.lines(path):
                if line["type"] != "assistant":
                    continue
                model = by_alias[line["message"]["model"]]
                usage = line["message"]["usage"]
                written.append({
                    "time": sf.parse_time(line["timestamp"]), "id": line["requestId"],
                    "session": self.id, "agent_id": self.agent if path == self.sub else "",
                    "alias": model.alias, "route": model.name, "node": model.node,
                    "context": model.context, "failures": [], "waited_seconds": 0.5, "first_byte_seconds": 1.5,
                    "total_seconds": 3.5, "input_tokens": usage["input_tokens"],
                    "output_tokens": usage["output_tokens"], "outcome": "ok",
                    "sent_tokens": usage["input_tokens"] + 40})
        return sorted(written, key=lambda receipt: receipt["time"])

    def file(self, receipts, name="requests.jsonl"):
        """Write receipts where the gateway keeps them; each says what its model ran."""
        fleet, _ = sf.check_fleet(sf.Document(self.FLEET, "fleet.yaml"))
        runs = {model.name: model.ollama_model for model in fleet.models.values()}
        text = "".join(json.dumps({"model": runs.get(receipt["route"], ""), **receipt}) + "\n"
                       for receipt in receipts)
        self.write(self.project / ".subagent-fleet" / name, text)

    def run(self, *words, now=NOW, columns=0, **environ):
        """Run `trace` in the project: (status, what it printed, what it said)."""
        out, err, before = io.StringIO(), io.StringIO(), os.getcwd()
        world = sf.World()
        world.now = lambda: now
        world.environ = clean_environment(HOME=str(self.home), **environ)
        if columns:
            world.is_terminal = lambda stream="stdout": True
            world.encoding_of = lambda stream: "utf-8"
            world.environ["TERM"] = "xterm"
            type(world).columns, kept = property(lambda _: columns), type(world).columns
        try:
            os.chdir(self.project)
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status = sf.main(["trace", *words], world)
        finally:
            os.chdir(before)
            if columns:
                type(world).columns = kept
        assert "Traceback" not in err.getvalue(), err.getvalue()
        return status, out.getvalue(), err.getvalue()

    def audit(self, *words, **more):
        """The exit status, and {question: verdict} of the subagent."""
        status, out, err = self.run("last", "--audit", "--json", *words, **more)
        report, = json.loads(out)["sessions"]
        agents = {agent["agent_id"]: agent for agent in report["agents"]}
        assert agents[""]["audit"] == []
        return status, {verdict["question"]: verdict for verdict in agents[self.agent]["audit"]}


# -- a session of four agents, as Claude Code 2.1.326 would have kept it --

class Story(Recorded):
    """Main, a planner, an implementer whose machine dies, a reviewer with a helper of its own."""

    FLEET = """\
project: {name: local-dev, claude: {main: heavy}}
nodes:
  laptop: {endpoint: "http://localhost:11434"}
  mini: {endpoint: "http://192.168.1.50:11434"}
  gpu: {endpoint: "http://192.168.1.51:11434"}
models:
  light: {node: laptop, ollama_model: "qwen3:8b", litellm_alias: haiku-local, context: 32768}
  heavy: {node: mini, ollama_model: "qwen3-coder:30b", litellm_alias: sonnet-local, context: 65536,
          fallback: [review]}
  review: {node: gpu, ollama_model: "devstral:24b", litellm_alias: opus-local, context: 65536}
agents:
  planner: {model: light, description: Plans., tools: [Read, Grep, Glob]}
  implementer: {model: heavy, description: Writes.}
  reviewer: {model: review, description: Reviews., tools: [Read, Grep, Glob, Agent]}
"""
    ALIASES = {"main": "sonnet-local", "planner": "haiku-local", "implementer": "sonnet-local",
               "reviewer": "opus-local", "explorer": "haiku-local"}
    BEGAN = NOW - 3600  # 14:05:02

    def __init__(self, tmp_path):
        self.project, self.home = tmp_path / "shop", tmp_path / "home"
        self.project.mkdir()
        self.write(self.project / "fleet.yaml", self.FLEET)
        place = re.sub("[^A-Za-z0-9]", "-", os.path.realpath(self.project))
        self.sessions = self.home / ".claude" / "projects" / place
        self.id = "3f1c2d4e-0000-4000-8000-123456789abc"
        self.main = self.sessions / f"{self.id}.jsonl"
        for name in ("planner", "implementer", "reviewer"):
            self.write(self.project / ".claude" / "agents" / f"{name}.md",
                       f"---\nname: {name}\ndescription: d\nmodel: {self.ALIASES[name]}\n---\nx\n")
        self.written, self.number_of = [], 0
        self.transcripts = {}

    def play(self):
        """Write all of it; give the story."""
        self.ask("", "Fix the login bug\n\nIt loops after a redirect.")
        self.turn("", 1, "Agent", kind="planner")
        self.ask("p1", "Plan the fix of the login loop.", kind="planner")
        for at in (4, 8, 12):
            self.turn("p1", at, "Read", tokens=(2200, 290), seconds=7)
        self.turn("p1", 16, "", tokens=(2500, 330), seconds=8)
        self.turn("", 40, "Agent", kind="implementer")
        self.ask("i1", "Implement step 1 of the plan.", kind="implementer")
        for at in range(7):
            self.turn("i1", 45 + 12 * at, "Edit", tokens=(9400, 570), waited=3.2, seconds=10)
        for at in range(2):
            self.turn("i1", 247 + 6 * at, "Bash" if not at else "", tokens=(9500, 1100), seconds=37,
                      model="review", tries=[{"node": "mini", "why": "refused"}][:1 - at])
        self.turn("", 200, "Agent", kind="reviewer")
        self.ask("r1", "Review the change.", kind="reviewer")
        self.turn("r1", 205, "Agent", kind="explorer", tokens=(6000, 200), seconds=7)
        self.ask("e1", "Where is the session cookie set?", kind="explorer")
        self.turn("e1", 214, "Grep", tokens=(2000, 120), seconds=3)
        self.turn("e1", 218, "", tokens=(2300, 90), seconds=2)
        for at in range(3):
            self.turn("r1", 220 + 8 * at, "" if at == 2 else "Read", tokens=(6000, 200), seconds=7)
        for at in range(20):
            self.turn("", 245 + at, "" if at == 19 else "Read", tokens=(19000, 390), seconds=6)
        for path, lines in self.transcripts.values():
            self.write(path, "".join(json.dumps(line) + "\n" for line in lines))
        self.file(sorted(self.written, key=lambda each: each["time"]))
        return self

    def stamp(self, at):
        return datetime.datetime.fromtimestamp(
            self.BEGAN + at, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")

    def ask(self, agent, prompt, kind="main"):
        path = self.main
        if agent:
            path = self.sessions / self.id / "subagents" / f"agent-{agent}.jsonl"
            label = {"agentType": kind, "toolUseId": f"call-{kind}", "isBuiltIn": kind == "explorer"}
            self.write(path.with_suffix(".meta.json"), json.dumps(label))
        self.kinds = {**getattr(self, "kinds", {}), agent: kind}
        at = {"": 0, "p1": 2, "i1": 41, "r1": 201, "e1": 213}[agent]
        self.transcripts[agent] = path, [{
            "type": "user", "message": {"role": "user", "content": prompt},
            "timestamp": self.stamp(at), "sessionId": self.id, "version": "2.1.326"}]

    def turn(self, agent, at, tool, *, kind="", tokens=(11000, 420), seconds=7.0, waited=0.0,
             model="", tries=()):
        """One request of an agent: its receipt, and the line of its answer."""
        self.number_of += 1
        fleet, _ = sf.check_fleet(sf.Document(self.FLEET, "fleet.yaml"))
        alias = self.ALIASES[self.kinds[agent]]
        served = fleet.models[model] if model else next(
            each for each in fleet.models.values() if each.alias == alias)
        request = f"req_{self.number_of:024x}"
        first = {"laptop": 0.6, "mini": 0.9, "gpu": 2.1}[served.node]
        self.written.append({
            "time": self.BEGAN + at + seconds, "id": request, "session": self.id, "agent_id": agent,
            "alias": alias, "route": served.name, "node": served.node, "context": served.context,
            "failures": list(tries), "waited_seconds": waited, "first_byte_seconds": waited + first,
            "total_seconds": float(seconds), "input_tokens": tokens[0], "output_tokens": tokens[1],
            "outcome": "ok", "sent_tokens": tokens[0]})
        block = {"type": "text", "text": "Done."}
        if tool:
            block = {"type": "tool_use", "id": f"call-{kind or self.number_of}", "name": tool,
                     "input": {"subagent_type": kind} if kind else {}}
        self.transcripts[agent][1].append({
            "type": "assistant", "timestamp": self.stamp(at + seconds), "requestId": request,
            "requestedModel": alias, "message": {
                "role": "assistant", "model": alias, "content": [block],
                "stop_reason": "tool_use" if tool else "end_turn",
                "usage": {"input_tokens": tokens[0], "output_tokens": tokens[1]}}})
