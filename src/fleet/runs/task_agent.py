"""A task at work: its agent is started, heard, answered and ended."""
from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING

from fleet.config.rules import CODERS
from fleet.config.task_file import LOGIN
from fleet.plan.environment import harness_environment
from fleet.runs.agent import (
    CODER_SCRIPT,
    END_SECONDS,
    GAP_SECONDS,
    LOCK_SECONDS,
    PROMPT_SECONDS,
    TERM_SECONDS,
    AgentProcess,
    last_line_of,
    plain_environment,
    plan_claude,
    plan_task_session,
    shell_words,
)
from fleet.runs.confine import BoxPlan
from fleet.runs.folder import TAIL_BYTES
from fleet.runs.process_tree import PROCESS_LOOK_SECONDS
from fleet.runs.task_desk import TaskDesk
from fleet.speech.claude_stream import (
    LOOPS_PROMPT,
    LOOPS_TOLD,
    answer_to,
    is_unknown_session,
    render_answer_line,
    render_prompt_line,
    render_stream_line,
)
from fleet.start.errors import FleetError
from fleet.start.record import replace
from fleet.tasks.events import (
    Answered,
    Asked,
    Expired,
    Lost,
    Slept,
    Spoke,
    Stalled,
    Started,
    Starting,
    Told,
)
from fleet.tasks.ladder import place_task
from fleet.tasks.next import ASK_AWAITED_SECONDS, ASK_SECONDS, find_stall
from fleet.tasks.scope import decide_request
from fleet.tasks.state import plan_first_words
from fleet.text.phrases import show_span
from fleet.world.child import Launch
from fleet.world.process_list import CHECK_MARK, TASK_MARK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from fleet.config.task_file import TaskSpec
    from fleet.runs.process_tree import Ended
    from fleet.tasks.events import Event
    from fleet.tasks.state import TaskState
    from fleet.world.child import Hold


class TaskAgent(TaskDesk):
    """The part of a task at work that deals with its agent."""

    _agent: AgentProcess | None = None
    _looked_at = 0.0

    def _start(self) -> Event:
        """Start an agent and send it its prompt."""
        hold = self._hold_alive()
        try:
            state = self.state
            session = state.attempt.session if state.attempt.spoken else str(uuid.uuid4())
            size = self._world.size_of(self._file("out.jsonl"))
            state = self._take(Starting(session, size)).state
            words = plan_first_words(state)
            if state.task.talks:
                self._world.make_pipe(self._file("in"))
                self._world.remove(self._file("err"))  # of the process before
            else:
                self._world.remove(self._file("code"))
                self._world.replace_files([(self._file("in"), words.encode(), 0o600)])
            child = self._supervisor.spawn(self._plan_launch(state, hold))
        finally:
            hold.release()

        agent = self._agent = AgentProcess(self._folder, state, child)
        agent.say(render_prompt_line(words))
        until = self._world.clock() + PROMPT_SECONDS
        while agent.pipe and not agent.pipe.push() and self._world.clock() < until:
            self._pause(0.01)
        processes = self._trees[TASK_MARK]
        processes.add(child.number)
        processes.find(self._world.clock())  # which notes them for the next supervisor
        return Started(child.number, self._describe(state))

    def _hold_alive(self) -> Hold:
        """Return the lock that an agent holds as long as it lives, so that a task has only one.

        A supervisor that is killed while it starts an agent leaves a process without the mark,
        which holds the lock until it has become that agent.
        """
        until = self._world.clock() + LOCK_SECONDS
        while True:
            hold = self._world.hold(self._trees[TASK_MARK].lock)
            if hold:
                return hold
            ended = self._end(0.0, TASK_MARK)
            if self._world.clock() > until:
                raise FleetError("still-alive", "an agent of an earlier try is still running: "
                                 f"{ended.left or 'it is ending'}",
                                 fix=f"end it, then subagent-fleet task retry {self.name}")
            self._pause(0.05)

    def _plan_launch(self, state: TaskState, hold: Hold) -> Launch:
        """Return how the agent of a task is started."""
        path = self._file
        task, fleet = place_task(state, self._backing.fleet)
        program = self._world.which(task.program) or task.program
        if task.talks:
            environ, settings = plan_task_session(task, self._world.environ,
                                                  fleet, self._backing.key)
            # In a file, because it holds the key: everybody can see arguments.
            self._world.replace_files(
                [(path("settings.json"), json.dumps(settings).encode("ascii"), 0o600)])
            words = [program, "-p", "--input-format", "stream-json", "--output-format",
                     "stream-json", "--verbose", "--include-partial-messages",
                     "--permission-prompt-tool", "stdio", "--permission-mode",
                     "bypassPermissions" if task.permission == "bypass" else "default",
                     "--resume" if state.attempt.spoken else "--session-id", state.attempt.session,
                     *plan_claude(task, fleet),
                     "--settings", path("settings.json")]
        else:
            more, environ = self._plan_coder(task)
            words = [program, *more]
        tree = state.place.worktree
        argv, environ = self._confinement.confine(self._agent_box, words, {
            **environ, **self._plan_environment(), **self._trees[TASK_MARK].mark,
            "FLEET_TASK_DIR": path(".")})
        if not task.talks:
            argv = shell_words(self._world, CODER_SCRIPT, path("code"), *argv)
        return Launch(argv, tree, environ, path("out.jsonl"), path("err"),
                      stdin=path("in"), hold=hold, seconds=task.deadline + 60)

    @property
    def _agent_box(self) -> BoxPlan:
        """The box of the agent."""
        return BoxPlan(self.state.task, self.state.place.worktree, "agent")

    def _plan_coder(self, task: TaskSpec) -> tuple[Sequence[str], dict[str, str]]:
        """Return the arguments and the environment of a coder that can't talk."""
        environ = plain_environment(self._world.environ)
        if not isinstance(task.coder, str):
            return task.coder[1:], environ
        if not self._backing.fleet:
            return CODERS[task.coder], environ
        start = self._backing.start_coder(task.coder)
        environ = harness_environment(environ, self._backing.fleet, self._backing.key)
        return [*start.words, *CODERS[task.coder]], {**environ, **start.environment}

    def _describe(self, state: TaskState) -> str:
        """Return one line that says who does the task, where, and how it is checked."""
        who = state.task.program
        if state.task.talks:
            who = state.task.agent or self._supervisor.alias_of(self.name) or "Claude Code"
            if state.attempt.rung == LOGIN:
                who = "your own login"
        nodes = [f"{model.node} ({model.ollama_model})"
                 for model in self._supervisor.models_of(self.name)]
        where = f", planned for {' or '.join(nodes)}" if nodes else ""  # a fallback may answer
        check = f", check: {state.task.check}" if state.task.check else ", no check"
        return f"{who}{where}, branch {state.place.branch}{check}"

    def _adopt(self) -> None:
        """Continue with an agent that an earlier supervisor started, or with its output."""
        state = self.state
        if state.state == "checking":
            self._end(0.0, CHECK_MARK)
        agent = self._agent = AgentProcess(self._folder, state)
        while agent.listen() and state.task.talks:
            pass
        if agent.lives() and state.state != "checking":
            self._tell("reattached", f"the agent has been {state.state} for "
                       f"{show_span(self._world.now() - state.at)}")
            # It may have got this prompt already; getting it twice does no harm.
            if state.attempt.prompt and agent.heard.turn_at <= state.attempt.heard_from:
                self._say(state.attempt.prompt)

    def _say(self, text: str) -> None:
        """Send a prompt to an agent that waits for one."""
        agent = self._agent
        assert agent
        agent.heard.prompted(agent.end, self._world.clock())
        agent.say(render_prompt_line(text))
        self._write(heard_from=agent.end)

    # -- listening --

    def _talk(self) -> Event:
        """Listen until the agent has answered or ended; return that as an event."""
        agent = self._agent
        assert agent
        pause = 0.01
        self._looked_at = self._world.clock()
        while True:
            self._trees[TASK_MARK].find(self._world.clock() - PROCESS_LOOK_SECONDS)
            pause = 0.01 if agent.listen() else min(pause * 1.5, 0.25)
            if agent.has_answered or not agent.lives():
                agent.listen()  # to its last words
                return self._lose(agent) if agent.is_lost else Spoke()
            if self._hear_requests(agent):
                pause = 0.01
            else:
                ending = self._look_at_clock(agent)
                if ending:
                    return ending
            self._pause(pause)

    def _lose(self, agent: AgentProcess) -> Lost:
        """Return the event for a process that ended without a result."""
        self._end(0.0, TASK_MARK)
        agent.listen()
        errors = self._world.read_part(self._file("err"), 0, TAIL_BYTES)
        is_known = b"No conversation found" not in errors \
            and not is_unknown_session(agent.heard.result or {})
        # A prompt that it had not started on is sent again.
        has_begun = self.state.task.talks and agent.heard.turn_at > self.state.attempt.heard_from
        return Lost(has_begun, is_known, self._last_line())

    def _last_line(self) -> str:
        """Return the last line of its errors, or of its output if that is a plain log."""
        logs = [self._file("err")]
        if not self.state.task.talks:
            logs.append(self._file("out.jsonl"))
        return last_line_of(self._world, *logs)

    def _hear_requests(self, agent: AgentProcess) -> bool:
        """Answer its requests, by the rules or by a person; deliver what a person said."""
        for identity, request in list(agent.heard.requests.items()):
            if self._hear_request(agent, identity, request):
                return True
        state = self.state
        if state.state == "asking":
            if agent.heard.requests:
                return False
            self._take(Answered())
        elif state.wish.says and state.task.talks:
            for text in state.wish.says:
                agent.say(render_prompt_line(text))
            agent.told_at = agent.end
            self._take(Told(state.wish.says))
        else:
            return False
        return True

    def _hear_request(self, agent: AgentProcess, identity: str,
                      request: Mapping[str, Any]) -> bool:
        """Answer one request or ask a person; tell whether anything was done."""
        state = self.state
        answer = decide_request(state.task, state.place.worktree, request, self._world.real_path)
        is_persons = answer is None
        if answer is None:
            asked = state.wish.question.get("id")
            if asked != identity and asked in agent.heard.requests:
                return False  # one question at a time
            if asked != identity:
                self._take(Asked(identity, dict(request)))
                return True
            if not state.wish.answer:
                return False
            answer = answer_to(request, state.wish.answer)
        elif answer["behavior"] == "deny":
            agent.heard.note_denial(request.get("tool_name"), request.get("input"))
        agent.say(render_answer_line(identity, answer))
        agent.heard.answered(identity, self._world.clock())
        if is_persons:
            self._take(Answered(", ".join(state.wish.answer.values())))
        return True

    def _end_agent(self, patience: float) -> Ended:
        """End an agent, gently at first, then everything that was started for its task.

        On TERM, Claude Code ends its own commands, even those that ignore the signal.
        """
        agent, state = self._agent, self.state
        count = 0
        if agent and agent.lives():
            count = 1
            agent.say(render_stream_line("control_request", request_id=self._world.token(8),
                                   request={"subtype": "end_session"}))
            until = self._world.clock() + END_SECONDS
            while state.task.talks and agent.lives() and self._world.clock() < until:
                self._supervisor.wait(0.02)
        ended = self._end(patience)
        return replace(ended, count=max(count, ended.count))

    def _sleep(self) -> Event:
        """End the process of an agent that gets no answer, which frees its slot."""
        self._end_agent(TERM_SECONDS)
        return Slept()

    def _look_at_clock(self, agent: AgentProcess) -> Event | None:
        """Return an event if the agent has to end because it takes too long or is stuck."""
        state, heard = self.state, agent.heard
        now = self._world.clock()
        gap, self._looked_at = now - self._looked_at, now
        if gap >= GAP_SECONDS:  # the machine was asleep, and so was the agent
            heard.last = heard.since = now
        elif state.state == "running":
            state = self._remember(worked=state.attempt.worked + gap)
        if state.state == "asking":
            is_awaited = self._supervisor.waits_for_time  # another task could use its slot
            patience = ASK_AWAITED_SECONDS if is_awaited else ASK_SECONDS
            return self._sleep() if self._world.now() - state.at > patience else None
        if state.attempt.worked > state.task.deadline:
            return Expired()
        if heard.repeats >= LOOPS_TOLD and not agent.told_loops:
            agent.told_loops = True
            agent.told_at = agent.end
            agent.say(render_prompt_line(LOOPS_PROMPT.format(count=heard.repeats)))
            self._tell("loops",
                       f"{heard.now}: {heard.repeats} times in a row, told the agent")
        view = "unknown"
        if now - heard.last > 10 and state.task.talks:
            view = self._supervisor.view_of(state.attempt.session)
        timeout = max((model.timeout for model in self._supervisor.models_of(self.name)),
                      default=0)
        stall = find_stall(state.task, heard, view, float(timeout), now)
        return Stalled(stall) if stall else None
