"""How an agent is started, and the running agent."""
from __future__ import annotations

import json
import re
import traceback
from typing import TYPE_CHECKING

from fleet.config.rules import CODERS
from fleet.files.harness import Start
from fleet.files.harnesses import HARNESSES
from fleet.findings.checks import CLAUDE_INSTALL
from fleet.plan.environment import merge_environment, plan_settings
from fleet.plan.roles import plan_prompt, plan_tools
from fleet.runs.folder import OUTPUT_LINE_BYTES, OUTPUT_PART_BYTES
from fleet.runs.git import SNAPSHOT_REFS
from fleet.speech.claude_stream import QUESTION_TOOL, Heard, is_unknown_session
from fleet.start.constants import HOME_URL
from fleet.start.errors import FleetError
from fleet.start.gate import LatePattern
from fleet.start.record import Record
from fleet.tasks.scope import plan_permissions
from fleet.tasks.spec import plan_alias
from fleet.text.terminal import clean_line, crop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from fleet.config.sections import Fleet
    from fleet.config.task_file import TaskSpec
    from fleet.gateway.receipts import Receipt
    from fleet.runs.confine import Confinement
    from fleet.runs.folder import Folder
    from fleet.runs.git import Git
    from fleet.tasks.spec import TaskPlan
    from fleet.tasks.state import TaskState, Workplace
    from fleet.world.child import Child
    from fleet.world.world import World


# -- how an agent is started --

END_SECONDS = 0.4  # for Claude Code to end by itself
TERM_SECONDS, STOP_SECONDS = 5.0, 1.2
KILL_SECONDS = 10.0  # until what was killed is gone: a busy machine takes its time
SETTLE_SECONDS = 5.0
STOP_GIT_SECONDS = 10.0  # for git to keep the work of a task that a person stops
TURN_SECONDS = 1.0  # within which a message sent during one turn starts the next
SETUP_SECONDS = 600
PROMPT_SECONDS = 60.0  # for the agent to read a prompt that is larger than a pipe
LOCK_SECONDS = 20.0  # for a process that a killed supervisor was just starting
GAP_SECONDS = 5.0  # a longer gap means that the machine slept: that is no working time
TOLD_CHARACTERS = 1000  # of an event
AGENTS_LIMIT_BYTES = 100 * 1024  # of one argument; the system's own limit is 128 KiB
AGENT_MEGABYTES = 400  # Claude Code takes 110 to 200 (2.1.327), and its commands some
# Runs a coder that can't talk. Its exit code goes into a file, for whichever supervisor is there
# then. The system's alarm ends this shell, and with it the whole session that it leads.
# A program in the background gets no input unless one is named. No other file descriptor is used
# here, because any of them may be the lock that shows that the agent is alive.
CODER_SCRIPT = ('"$@" <"${0%code}in" & trap "kill -KILL 0" ALRM; wait $!; '
                'echo $? >"$0.new"; mv "$0.new" "$0"')
# Commands in the background would outlive their turn. In a terminal, Claude Code would download
# plugins from its makers (2.1.327), whatever else is switched off.
TASK_VARIABLES = {"CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
                  "CLAUDE_CODE_DISABLE_OFFICIAL_MARKETPLACE_AUTOINSTALL": "1"}


class Backing(Record):
    """The services for agents, and the settings that a supervisor gets from outside."""

    fleet: Fleet | None = None
    key: str = ""
    look: Callable[[], Mapping[str, Any]] = dict  # the gateway's status
    receipts: Callable[[], Iterable[Receipt]] = tuple
    reload: Callable[[], TaskPlan | None] = lambda: None  # the task file, when it has changed
    tell: Callable[[str, str, str], object] = lambda name, word, text: None
    serve: Callable[[], object] = lambda: None  # makes sure that a gateway answers
    start_coder: Callable[[str], Start] = lambda name: Start((), {})  # on the fleet
    cloud_limit: int = 3  # tasks a day that may move up to a model outside the house
    most: int = 0  # agents at the same time; 0: as many as the fleet and the memory allow
    worktrees: str = ""
    notify: tuple[str, ...] | str | None = None
    confinement: Confinement | None = None  # if it was tried already


def plan_agents(fleet: Fleet, first: str | None) -> str:
    """Return the fleet's agents for Claude Code's `--agents`, starting with the task's own.

    A worktree lacks the agent files that are not committed. As many agents as fit into one
    argument are returned. The task's own agent can ask a person, whatever its file says.
    """
    names = sorted(fleet.agents, key=lambda name: name != first)
    agents: dict[str, Any] = {}
    for name in names:
        agent = fleet.agents[name]
        entry: dict[str, Any] = {"description": agent.description,
                                 "prompt": plan_prompt(agent),
                                 "model": fleet.models[agent.model].alias}
        if agent.tools is not None:
            tools = plan_tools(agent.tools)
            if name == first and QUESTION_TOOL not in tools:
                tools = (*tools, QUESTION_TOOL)
            entry["tools"] = list(tools)
        longer = {**agents, name: entry}
        if len(json.dumps(longer)) > AGENTS_LIMIT_BYTES and agents:
            break
        agents = longer
    return json.dumps(agents)


def plan_claude(task: TaskSpec, fleet: Fleet | None) -> list[str]:
    """Return the words that name Claude Code's agent and model for a task."""
    words = []
    if fleet and fleet.agents:
        words += ["--agents", plan_agents(fleet, task.agent)]
    if task.agent:
        words += ["--agent", task.agent]
    model = plan_alias(task, fleet) or task.model
    return [*words, "--model", model] if model else words


# The variables that tell git who the person is, or where that is written.
GIT_PERSON = LatePattern(
    "(?!GIT_)|GIT_(AUTHOR|COMMITTER)_|GIT_CONFIG_(GLOBAL|(NO)?SYSTEM)$")


def plain_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that lead git to another repository."""
    return {name: value for name, value in environ.items() if GIT_PERSON.match(name)}


def shell_words(world: World, *words: str) -> list[str]:
    """Return the command that runs a script in the shell, with its arguments."""
    return [world.which("sh") or "/bin/sh", "-c", *words]


def plan_task_session(task: TaskSpec, environ: Mapping[str, str], fleet: Fleet | None,
                      key: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the environment and the settings of a task's Claude Code.

    Without a fleet, it uses the person's own login and model.
    """
    environ = plain_environment(environ)
    settings = plan_permissions(task)
    if fleet:
        environ = merge_environment(environ, fleet, key)
        settings.update(plan_settings(fleet, environ, settings["permissions"]))
        settings["env"].update(TASK_VARIABLES)
    return {**environ, **TASK_VARIABLES}, settings


# -- the running agent --


def feed_lines(heard: Heard, part: bytes, begin: int, now: float) -> bytes:
    """Feed each complete line of an agent's output to `heard`; return the incomplete rest."""
    *lines, rest = part.split(b"\n")
    for line in lines:
        begin += len(line) + 1
        heard.feed(line, begin, now)
    return rest


class AgentProcess:
    """The process of an agent: its output, its input, and whether it is alive."""

    def __init__(self, folder: Folder, state: TaskState, child: Child | None = None) -> None:
        self._world = folder.world
        self._output = folder.of_try(state, "out.jsonl")
        self._alive = folder.of_task(state.name, "alive")
        self._code = folder.of_try(state, "code")
        self._talks = state.task.talks
        self._child = child
        self._rest = b""
        self.end = state.attempt.start_at  # how far its output was read
        self.heard = Heard(heard_from=state.attempt.heard_from)
        self.heard.last = self.heard.since = self._world.clock()  # silent from now on
        self.pipe = self._world.open_pipe(folder.of_try(state, "in")) if self._talks else None
        self.told_loops = False
        self.told_at = -2  # how far its output was read at the last message to it

    def listen(self) -> bool:
        """Read its new output; tell whether there was any."""
        now = self._world.clock()
        begin = self.end
        if self.pipe:
            self.pipe.push()
        if self._talks:
            self._feed(self._world.read_part(self._output, begin, OUTPUT_PART_BYTES), now)
        else:  # a log of any size: only its growth counts
            self.end = self._world.size_of(self._output)
        if self.end == begin:
            return False
        self.heard.last = now
        return True

    def _feed(self, part: bytes, now: float) -> None:
        """Read a part of its output, line by line."""
        begin = self.end - len(self._rest)
        self.end += len(part)
        self._rest = feed_lines(self.heard, self._rest + part, begin, now)
        if len(self._rest) > OUTPUT_LINE_BYTES:  # the rest of this line is no event
            self._rest = b""

    def lives(self) -> bool:
        """Tell whether its process is alive."""
        if self._child:
            return self._child.exit_code() is None
        return (self._talks or self.exit_code() is None) and self._world.is_held(self._alive)

    @property
    def has_answered(self) -> bool:
        """Whether it has answered; a message sent during its last turn may start another."""
        settled_for = self._world.clock() - self.heard.since
        return self.heard.is_settled and (
            self.told_at < self.heard.turn_at or settled_for > TURN_SECONDS)

    @property
    def is_lost(self) -> bool:
        """Whether it has ended without an answer, or can't resume its session."""
        if self.heard.is_settled:
            return self.heard.turn_at < 0 and is_unknown_session(self.heard.result or {})
        return self.exit_code() is None

    def exit_code(self) -> int | None:
        """Return the exit code of a coder that can't talk; None if it runs or was killed."""
        content = self._world.read_part(self._code, 0, 16).strip()
        return int(content) if content.isdigit() else None

    def say(self, line: bytes) -> None:
        """Send it a line, as soon as it reads."""
        if self.pipe:
            self.pipe.say(line)

    def close(self) -> None:
        """Close its input."""
        if self.pipe:
            self.pipe.close()
        self.pipe = None


# -- what is refused before any work --


def plan_branch(state: TaskState) -> str:
    """Return the branch that a task has, or will get with its next worktree."""
    place = state.place
    return place.branch or (state.task.branch or f"run/{state.name}") + place.suffix


def find_work(main: Git, place: Workplace) -> str:
    """Return the work of a task: the tip of its branch, with commits that a person has added."""
    tip = main.commit_of(f"refs/heads/{place.branch}") if place.kept else ""
    return tip if tip and main.is_ancestor(place.kept, tip) else place.kept


def last_snapshot(main: Git, name: str) -> int:
    """Return the number of the last try under a task's name that has a snapshot."""
    refs = main.out("for-each-ref", "--format=%(refname:lstrip=3)", f"{SNAPSHOT_REFS}/{name}/")
    return max(map(int, re.findall(r"^\d+", refs, re.M)), default=0)


def refuse_missing(folder: Folder, state: TaskState) -> None:
    """Refuse a coder or a check whose program is missing: no agent can fix that."""
    task = state.task
    if not folder.world.which(task.program):
        if task.talks:
            raise FleetError("claude-missing", "Claude Code is not on the PATH",
                             fix=CLAUDE_INSTALL)
        fix = f"subagent-fleet task retry {state.name}"
        if task.coder in CODERS:
            fix = HARNESSES[task.program].install
        raise FleetError("coder-missing", f"`{task.program}` is not on the PATH", fix=fix)
    refuse_missing_check(folder.world, state, folder.repository.main,
                         r"[\w+-][\w.+-]*(?=\s|$)")


def refuse_missing_check(world: World, state: TaskState, directory: str,
                         pattern: str) -> None:
    """Refuse a check whose first word looks like a program but can't be run in a directory."""
    word = re.match(pattern, state.task.check or "")
    if not word or "/" not in word[0] and world.which(word[0]):
        return
    if world.run_program(["sh", "-c", 'cd "$1" && command -v -- "$2"', "sh", directory,
                          word[0]]).code:
        fix = f"install it, or change `check:`, then subagent-fleet task retry {state.name}"
        if state.origin == "typed":
            fix = (f"install it, then subagent-fleet task retry {state.name}; or name "
                   f"another: subagent-fleet task retry {state.name} --check COMMAND")
        raise FleetError("check-missing", f"the check cannot be run (exit 127): `{word[0]}` "
                         "is missing", fix=fix)


def slug_of(error: Exception) -> str:
    """Return the cause of an error, for programs."""
    return error.slug if isinstance(error, FleetError) else "bug"


def describe_error(error: Exception) -> str:
    """Return one line that says what went wrong with a task, and what to type."""
    if isinstance(error, FleetError):
        return f"{error.what}; {error.fix}" if error.fix else error.what
    place = traceback.extract_tb(error.__traceback__)[-1]
    return (f"{type(error).__name__} in {place.name}, line {place.lineno}; this is a bug, "
            f"please report it at {HOME_URL}/issues")


# -- the ends of texts --


def shorten(text: str) -> str:
    """Return the beginning of a text as one line."""
    return crop(" ".join(text.split()), 71)


def read_tail(world: World, log: str, most: int) -> str:
    """Return the end of a log."""
    begin = max(0, world.size_of(log) - most)
    return world.read_part(log, begin, most).decode("utf-8", "replace")


def last_line_of(world: World, *logs: str) -> str:
    """Return the last line of the first log that has one, without control characters."""
    for log in logs:
        lines = [line for line in read_tail(world, log, 2000).splitlines() if line.strip()]
        if lines:
            return clean_line(lines[-1])[:200]
    return "it printed nothing"
