"""Claude Code's settings, agents and sessions on the disk."""
from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING

from fleet.start.errors import FleetError
from fleet.start.record import Record, read
from fleet.text.json import parse_object
from fleet.text.terminal import clean_line, crop
from fleet.traces.audit import report_session
from fleet.traces.judge import AgentSource
from fleet.traces.session import AgentLabel, trace_session
from fleet.traces.transcript import Transcript
from fleet.workspace.records import SESSION_ID, read_receipts
from fleet.world.places import TREE_FILE_LIMIT_BYTES, TREE_FILES_LIMIT, Tail

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fleet.gateway.receipts import Receipt
    from fleet.traces.audit import SessionReport
    from fleet.traces.judge import TraceFacts
    from fleet.workspace.directory import Workspace
    from fleet.world.world import World


def find_agent_type(world: World, session: str, agent: str) -> str:
    """Return the name of a subagent, if Claude Code kept it (2.1.326)."""
    if SESSION_ID.fullmatch(session) and SESSION_ID.fullmatch(agent):
        pattern = f"projects/*/{session}/subagents/agent-{agent}.meta.json"
        for path in world.paths_below(claude_directory(world), pattern):
            return read_label(world, path).kind
    return ""


def find_session_words(world: World, session: str) -> str:
    """Return the first line of a session's prompt, if Claude Code kept it."""
    if SESSION_ID.fullmatch(session):
        for path in world.paths_below(claude_directory(world), f"projects/*/{session}.jsonl"):
            return crop(clean_line(read_first_prompt(world, path)), TITLE_LIMIT)
    return ""


# -- what the gateway and Claude Code wrote of sessions --

TITLE_PART_BYTES = 256 * 1024  # the beginning of a transcript, with its first prompt
TITLE_LIMIT = 60

def read_transcript(world: World, path: str, agent: str = "") -> Transcript:
    """Return all entries of a transcript, without an unfinished last line."""
    transcript = Transcript(show_path(world, path), agent)
    tail = Tail(world, path)
    for line in tail.lines():
        transcript.feed(line)
    if tail.rest:
        transcript.feed(tail.rest)
    transcript.changed = world.changed_at(path)
    return transcript


def show_path(world: World, path: str) -> str:
    """Return a path as people write it: `~/…` below the home directory."""
    home = world.home
    if path.startswith(world.path(home, "")):
        return world.path("~", path[len(world.path(home, "")):])
    return path


class SessionFile(Record):
    """A session that left a transcript or receipts; its files are not read yet."""

    id: str
    path: str  # of its transcript; "" where Claude Code kept none
    at: float  # when it was last active
    requests: int


def find_sessions(workspace: Workspace, receipts: Iterable[Receipt]) -> list[SessionFile]:
    """Return the sessions of this directory and of its gateway, the latest first."""
    world = workspace.world
    here = {project_name(world, place) for place in (workspace.out, world.directory)}
    served: dict[str, list[float]] = {}
    for receipt in receipts:
        served.setdefault(receipt.session, []).append(receipt.time)
    paths: dict[str, str] = {}
    projects = world.path(claude_directory(world), "projects")
    for path in world.paths_below(projects, "*/*.jsonl"):
        place, name = world.split(path)
        session = name[:-len(".jsonl")]
        if session in served or world.split(place)[1] in here:
            paths[session] = path

    sessions = []
    for session in filter(SESSION_ID.fullmatch, {**paths, **served}):
        times = served.get(session, [])
        path = paths.get(session, "")
        changed = world.changed_at(path) if path else 0.0
        sessions.append(SessionFile(session, path, max([*times, changed]), len(times)))
    return sorted(sessions, key=lambda found: -found.at)


def project_name(world: World, directory: str) -> str:
    """Return Claude Code's name for the directory of a project's sessions (2.1.326)."""
    return re.sub("[^A-Za-z0-9]", "-", world.real_path(directory))


def subagent_paths(world: World, found: SessionFile) -> dict[str, str]:
    """Return {agent id: its transcript} of a session."""
    if not found.path:
        return {}
    place = world.path(world.parent(found.path), found.id, "subagents")
    paths = {}
    for path in world.paths_below(place, "agent-*.jsonl"):
        agent = world.split(path)[1][len("agent-"):-len(".jsonl")]
        if SESSION_ID.fullmatch(agent):
            paths[agent] = path
    return paths


def read_label(world: World, path: str) -> AgentLabel:
    """Return the metadata beside a subagent's transcript."""
    with contextlib.suppress(FleetError):  # Claude Code before 2.1 keeps none
        return read(AgentLabel, parse_object(world.read_bytes(path))) or AgentLabel()
    return AgentLabel()


def read_first_prompt(world: World, path: str) -> str:
    """Return the beginning of a session, from the first part of its transcript."""
    transcript = Transcript(path)
    with contextlib.suppress(FleetError):
        for line in world.read_part(path, 0, TITLE_PART_BYTES).split(b"\n"):
            transcript.feed(line)
            if transcript.prompt:
                break
    return transcript.prompt


class AgentFile(Record):
    """The simple keys of an agent's file."""

    name: str = ""
    model: str = ""
    tools: tuple[str, ...] | None = None  # None: all; (): none


def read_agent(text: str) -> AgentFile:
    """Return an agent's name, model and tools, if they are on lines of their own.

    The rest of the YAML is left to Claude Code: dates, `yes`, lists and keys of newer versions
    mean what it takes them for. Seen with 2.1.197 and 2.1.327.
    """
    match = re.match(r"\ufeff?---[ \t]*\r?\n(.*?\n?)---", text, re.DOTALL)
    head = match[1] if match else ""
    tools = _read_key(head, "tools")
    names = None
    if tools and tools != "*":
        names = tuple(re.findall(r"([A-Za-z_*][\w*-]*)(?:\([^)]*\))?", tools))
    return AgentFile(_read_key(head, "name"), _read_key(head, "model"), names)


def _read_key(head: str, key: str) -> str:
    """Return the value of a frontmatter key, with its further lines; nothing if absent."""
    match = re.search(rf"(?m)^([ \t]*)[\"']?{key}[\"']?[ \t]*:(.*(?:\n\1(?:[ \t]|-).*)*)",
                      head)
    value = match[2] if match else ""
    return re.sub(r"(?m)(^|\s)#.*$", "", value).strip(" \t\r\n\"'|>")


def find_agent_sources(workspace: Workspace) -> dict[str, AgentSource]:
    """Return {agent: its file} of the user's and the project's agents; the project's win."""
    world = workspace.world
    places = (world.path(claude_directory(world), "agents"),
              workspace.path(".claude", "agents"))
    sources = {}
    for place in places:
        paths = [*world.paths_below(place, "*.md"), *world.paths_below(place, "*/*.md")]
        for path in paths[:TREE_FILES_LIMIT]:
            with contextlib.suppress(FleetError):  # Claude Code cannot read it either
                content = world.read_bytes(path, limit=TREE_FILE_LIMIT_BYTES)
                agent = read_agent(content.decode("utf-8", "replace"))
                if agent.name:
                    before, has_model, _ = content.partition(b"\nmodel:")
                    line = before.count(b"\n") + 2 if has_model else 1
                    sources[agent.name.lower()] = AgentSource(
                        show_path(world, path), line, agent.model, agent.tools != (),
                        world.changed_at(path))
    return sources


def read_session(workspace: Workspace, found: SessionFile, facts: TraceFacts, *,
                 audits: bool) -> SessionReport:
    """Read a whole session."""
    world = workspace.world
    paths = subagent_paths(world, found)
    labels = {agent: read_label(world, f"{path[:-len('.jsonl')]}.meta.json")
              for agent, path in paths.items()}
    if found.path:
        paths = {"": found.path, **paths}
    transcripts = [read_transcript(world, path, agent) for agent, path in paths.items()]
    session = trace_session(found.id, transcripts, labels, read_receipts(workspace, found.id),
                            facts.fleet)
    return report_session(session, facts, audits=audits)


def claude_directory(world: World) -> str:
    """Return where Claude Code keeps a person's settings and sessions."""
    home = world.home
    return world.environ.get("CLAUDE_CONFIG_DIR") or world.path(home, ".claude")


def managed_settings(world: World) -> list[str]:
    """Return where an administrator's Claude Code settings may be; they override all others."""
    places = ("/Library/Application Support/ClaudeCode", "/etc/claude-code",
              "C:\\Program Files\\ClaudeCode")  # two of these do not exist on any one system
    paths = []
    for place in places:
        paths += [f"{place}/managed-settings.json",
                  *world.paths_below(place, "managed-settings.d/*.json")]
    return paths


def usual_settings(world: World) -> list[str]:
    """Return where a person's and a project's settings for Claude Code may be."""
    return [world.path(claude_directory(world), "settings.json"), ".claude/settings.json",
            ".claude/settings.local.json"]


def find_settings(world: World, paths: Iterable[str]) -> dict[str, dict[str, object]]:
    """Return {path: its `env`} of the settings files that exist."""
    settings = {}
    for path in paths:
        # else it is absent or broken, and Claude Code ignores it, too
        with contextlib.suppress(FleetError, KeyError, TypeError, ValueError, RecursionError):
            settings[path] = dict(json.loads(world.read_bytes(path))["env"])
    return settings


def line_of(content: bytes, word: str) -> int:
    """Return the line number of a quoted word; the last line's if it is absent."""
    return content.partition(f'"{word}"'.encode())[0].count(b"\n") + 1


def last_session(receipts: Sequence[Receipt], workspace: Workspace, *, since: float) -> str:
    """Return the latest session of this directory that was served since then, or nothing.

    A task's agent works in a worktree, so Claude Code keeps its session elsewhere.
    """
    world = workspace.world
    here = world.path(claude_directory(world), "projects", project_name(world, world.directory))
    for receipt in reversed(receipts):
        session = receipt.session
        if (receipt.time >= since and SESSION_ID.fullmatch(session)
                and world.kind_of(world.path(here, f"{session}.jsonl")) == "file"):
            return session
    return ""
