"""One task at work, from its worktree to its branch."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.runs.agent import (
    STOP_GIT_SECONDS,
    STOP_SECONDS,
    TERM_SECONDS,
    describe_error,
    refuse_missing_check,
    shorten,
    slug_of,
)
from fleet.runs.folder import OUTPUT_PART_BYTES, Asleep, Wanted
from fleet.runs.git import GIT_SECONDS
from fleet.runs.snapshot import (
    look_at_work,
    read_baseline,
    read_surroundings,
    settle_branch,
    take_snapshot,
)
from fleet.runs.task_agent import TaskAgent
from fleet.runs.task_place import TaskPlace
from fleet.speech.claude_stream import PROMPT_TOO_LONG, Heard, api_error_of, error_of
from fleet.start.errors import FleetError
from fleet.start.record import replace
from fleet.tasks.events import (
    ApiFailed,
    Checked,
    Closed,
    EndedAgain,
    Entered,
    Interrupted,
    Refused,
    Resumed,
    Trouble,
)
from fleet.tasks.ladder import plan_climb
from fleet.tasks.step import (
    CHECK_WORK,
    CLOSE,
    END_AGAIN,
    FEED_BACK,
    LISTEN,
    MAKE_PLACE,
    SLEEP,
    START_AGENT,
)
from fleet.tasks.verdict import WorkDone, plan_receipt, sum_served
from fleet.text.phrases import count_of, quote_shell, show_span
from fleet.text.terminal import clean_line
from fleet.world.process_list import TASK_MARK

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from fleet.runs.command import CommandResult
    from fleet.tasks.events import Event
    from fleet.tasks.state import TaskState
    from fleet.tasks.step import Step
    from fleet.tasks.verdict import Ruling


class TaskWork(TaskPlace, TaskAgent):
    """One task in its own thread: it starts at the step in its state, and runs to its end."""

    _work: WorkDone | None = None  # the work that was checked

    def run(self) -> None:
        """Run the task until it waits, sleeps or is over; anything that goes wrong parks it."""
        try:
            self._follow()
        except Asleep:
            pass
        except (BrokenPipeError, FleetError) as error:
            # The output of the run is closed, or its disk is full: no single task is at fault.
            self._supervisor.failures.append(error)
        finally:
            self._is_closing = True
            if self._preparing:
                self._preparing.join(GIT_SECONDS)
            if self._agent:
                self._agent.close()
            if self._hold:
                self._hold.release()
            self._supervisor.leave_task(self.name)

    def _follow(self) -> None:
        """Apply an event and do what comes next, until there is nothing more to do."""
        event: Event = Entered()
        while True:
            try:
                made = self._take(event)
                if not made.do:
                    return
                event = self._carry_out(made)
            except Wanted:
                event = Interrupted()
            except (Asleep, BrokenPipeError):
                raise
            except Exception as error:
                if slug_of(error) == "disk-full":
                    self._write()  # which fails, too, if it is the run's own disk
                kind = Refused if isinstance(event, Trouble) else Trouble
                event = kind(describe_error(error), slug_of(error))

    def _carry_out(self, made: Step) -> Event:
        """Do what comes next; return the event that results."""
        if made.do == CLOSE:
            return self._close(made.ruling)
        if made.do == END_AGAIN:
            ended = self._end(STOP_SECONDS)
            return EndedAgain(f"{count_of(ended.count, 'process')} ended", ended.left)
        if not self._hold:
            self._wait_for_git()
        actions = {MAKE_PLACE: self._make_ready, START_AGENT: self._start, LISTEN: self._listen,
                   CHECK_WORK: self._judge, FEED_BACK: self._feed, SLEEP: self._sleep}
        return actions[made.do]()

    def _listen(self) -> Event:
        """Listen to the agent, after taking over one that is already there."""
        if not self._agent:
            self._take_over()
        return self._talk()

    def _take_over(self) -> None:
        """Continue where an earlier supervisor was killed."""
        self._adopt()
        self._prepare_check()

    def _feed(self) -> Event:
        """Tell the agent what is wrong; if it has ended, start a new one."""
        if self._agent and self._agent.lives():
            self._say(self.state.attempt.prompt)
            return Resumed()
        if self._agent:
            self._agent.close()
        return self._start()

    # -- the verdict --

    def _judge(self) -> Event:
        """Take a snapshot of the work, and check exactly that."""
        if not self._agent:
            self._take_over()
        state, agent = self.state, self._agent
        assert agent
        result = {}
        exit_code = 0
        if state.task.talks:
            agent.listen()
            result = agent.heard.result or {}
            kind = api_error_of(result)
            if kind:
                return self._fail_api(kind, result)
        else:
            exit_code = agent.exit_code() or 0
        if exit_code in (126, 127):
            raise FleetError("coder-missing", f"`{state.task.program}` could not be "
                             f"run (exit {exit_code}): {self._last_line()}",
                             fix=f"subagent-fleet task log {self.name} stderr")

        # Processes that the agent has left running could still write.
        ended = self._end(0.5, TASK_MARK, spares_client=state.task.talks and agent.lives())
        if ended.left:
            raise FleetError("still-alive", "its agent has answered, but what it started is "
                             f"still running: {ended.left}",
                             fix=f"end it, then subagent-fleet task retry {self.name}")
        work = replace(self._keep(state, read_baseline(self._folder, state)),
                       exit_code=exit_code, said=str(result.get("result") or ""),
                       error=error_of(result))
        self._work = work
        if not state.task.check:
            return Checked(work, None, "")
        checked = self._check(work)
        return Checked(work, checked.code, checked.output)

    def _keep(self, state: TaskState, known: Mapping[str, str] | None) -> WorkDone:
        """Keep the worktree in a ref, and compare it with the beginning of the task."""
        work, _ = take_snapshot(self._git(), self._main, state, str(state.attempt.tried), known)
        if work.commit != state.place.kept:
            self._remember(kept=work.commit, landed="")
        copied = read_surroundings(self._folder, state).get("copied") or ()
        work = look_at_work(self._main, state, work, copied)
        self._remember(diff=work.sums)
        return work

    def _fail_api(self, kind: str, result: Mapping[str, Any]) -> ApiFailed:
        """Return the event for an error of the model's server."""
        text = clean_line(str(result.get("result") or result.get("errors") or ""))[:200]
        if result.get("terminal_reason") == PROMPT_TOO_LONG:
            return ApiFailed(f"too large for the model, split it: {text}", is_final=True,
                             cause="too-large")
        # This error comes without a status, and waiting does not help.
        if "Please run /login" in text:
            text += ("; type /login in `claude`, then subagent-fleet task retry "
                     f"{self.name}; or subagent-fleet init, for models of your own")
            kind = "final"
        return ApiFailed(text, kind == "final")

    def _check(self, work: WorkDone) -> CommandResult:
        """Run the check on the work that was kept."""
        state = self.state
        tree = state.place.worktree
        if state.task.check_in == "own":
            while self._preparing and self._preparing.is_alive():
                self._pause(0.1)
            if self._trouble:
                raise self._trouble
            tree = self._put_check(work.commit)

        name = f"check-{state.attempt.round}.log"
        self._world.remove(self._file(name))
        began = self._world.clock()
        result = self._run_check(tree, name)
        self._remember(checks=(*state.attempt.checks, result.code),
                       check_seconds=round(self._world.clock() - began, 1))
        if result.refused:
            self._tell("note", f"the check: {result.refused}")
        # No agent can fix a missing program, unless the name is in a script of its own.
        if result.code in (126, 127):
            refuse_missing_check(self._world, state, tree, r"[\w.+/-]+(?=\s|$)")
        return result

    def _settle(self, work: WorkDone) -> None:
        """Move the branch to work that is good, if nobody has moved it meanwhile."""
        place = self.state.place
        branch = place.branch
        self._write(tip=work.commit)  # first: after a kill, the branch is still the task's
        if not settle_branch(self._git(), self._main, place, work.commit):
            self._write(tip=place.tip)
            tree = quote_shell(place.worktree)
            raise FleetError("branch-moved", f"the branch {branch} has commits that this "
                             "work doesn't have",
                             fix=f"git -C {tree} merge $(git rev-parse {branch}), then "
                                 f"subagent-fleet task retry {self.name}")

    # -- ends --

    def _close(self, ruling: Ruling) -> Closed:
        """Move the branch to good work, end the agent, keep the rest, write the receipt."""
        work = self._work if ruling.ended == "result" else None
        if work and ruling.to in ("done", "review"):
            self._settle(work)
        is_stop = ruling.to == "stopped"
        saved = ""
        self._is_closing = True
        began = self._world.clock()
        ended_now = self._end_agent(STOP_SECONDS if is_stop else TERM_SECONDS)
        if self._preparing:
            self._preparing.join(5.0)
        self._confinement.clear(self._agent_box)
        seconds = self._world.clock() - began
        state = self.state
        if work is None or not work.ref:
            work = self._keep_what_is_there(state)
        if is_stop:
            saved = f", work saved in {work.ref}" if work.changed else ""
            ruling = replace(ruling, reason=f"{count_of(ended_now.count, 'process')} ended in "
                             f"{seconds:.1f} s{saved}")
        elif ended_now.left:
            self._tell("note", f"still running: {ended_now.left}")

        ruling = plan_climb(state, ruling, self._backing.fleet,
                            away_left=self._supervisor.count_away_left())
        receipt = self._write_receipt(state, ruling, work)
        words = ruling.reason
        if ruling.to in ("done", "review"):
            words = self._sum_up(receipt)
        elif ruling.said:
            words += f". The check said: {ruling.said}"
        elif ruling.cause == "diff" and work.said:
            words += f". It said: {shorten(work.said)}"
        left = f"{ended_now.left}{saved}" if ended_now.left else ""
        return Closed(ruling, words, bool(self._agent), left)

    def _write_receipt(self, state: TaskState, ruling: Ruling,
                       work: WorkDone) -> dict[str, Any]:
        """Write the receipt of a try; remove its settings, which hold the key."""
        agent, now = self._agent, self._world.now()
        alias = self._supervisor.alias_of(self.name)
        served = self._backing.receipts() if alias else ()
        receipt = {**plan_receipt(state, agent.heard if agent else Heard(), work, alias,
                                  ruling.ended),
                   "served": sum_served(served, state.attempt.session), "verdict": ruling.to,
                   "reason": ruling.reason, "cause": ruling.cause,
                   "seconds": round(state.total_at(now) - state.attempt.spent, 1)}
        if agent:
            receipt["not_writable"] = self._find_refused(state)
        if agent and not state.task.talks:
            receipt["exit_code"] = agent.exit_code()
        number = state.attempt.tried
        if number:
            self._folder.write(receipt, "tasks", self.name, str(number), "receipt.json")
            self._world.remove(self._file("settings.json"))
        return receipt

    def _find_refused(self, state: TaskState) -> list[str]:
        """Return what the agent of this try could not write, by its output."""
        files = (("out.jsonl", state.attempt.start_at), ("err", 0))
        text = b"\n".join(self._world.read_part(self._file(name), start, OUTPUT_PART_BYTES)
                          for name, start in files).decode("utf-8", "replace")
        return self._confinement.find_refused(self._agent_box, text)

    def _keep_what_is_there(self, state: TaskState) -> WorkDone:
        """Keep the worktree at the end of a try, however it has ended; not before setup."""
        if not state.place.prepared or self._world.kind_of(state.place.worktree) != "directory":
            return WorkDone()
        try:
            return self._keep(state, read_baseline(self._folder, state))
        except FleetError as error:
            self._tell("note", f"its work is only in {state.place.worktree}: {error.what}")
        except Wanted:
            self._tell("note", f"its work is only in {state.place.worktree}: git took longer than "
                       f"{STOP_GIT_SECONDS:.0f} s")
        return WorkDone()

    def _sum_up(self, receipt: Mapping[str, Any]) -> str:
        """Return the result of a finished task in one line."""
        state = self.state
        sums = state.place.diff
        words = [show_span(receipt["seconds"]), count_of(sums["commits"], "commit"),
                 f"{count_of(sums['files'], 'file')} +{sums['plus']} -{sums['minus']}"]
        words.append(f"check passed ({state.attempt.check_seconds:.1f} s)" if state.task.check
                     else "no check")
        if receipt["turns"]:
            words.append(count_of(receipt["turns"], "turn"))
        words += [f"note: {flag}" for flag in receipt["flags"]]
        return ", ".join(words)
