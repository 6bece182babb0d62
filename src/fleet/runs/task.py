"""One task, from its worktree to its branch."""
from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from fleet.runs.agent import (
    STOP_GIT_SECONDS,
    STOP_SECONDS,
    TERM_SECONDS,
    describe_error,
    last_line_of,
    read_tail,
    refuse_missing_check,
    shorten,
    slug_of,
)
from fleet.runs.folder import TAIL_BYTES, Asleep, Wanted
from fleet.runs.git import GIT_SECONDS
from fleet.runs.snapshot import (
    look_at_work,
    read_baseline,
    read_surroundings,
    settle_branch,
    take_snapshot,
)
from fleet.runs.task_agent import TaskAgent
from fleet.runs.task_desk import LOST
from fleet.speech.claude_stream import (
    CONTINUE_PROMPT,
    LOST_PROMPT,
    PROMPT_TOO_LONG,
    Heard,
    api_error_of,
    ask_in_words,
    error_of,
    is_unknown_session,
)
from fleet.start.errors import FleetError
from fleet.start.record import replace
from fleet.tasks.ladder import plan_climb, tell_climbed
from fleet.tasks.state import API_ERRORS_LIMIT, API_WAIT_SECONDS, LOST_LIMIT, TRY_WAIT_SECONDS
from fleet.tasks.verdict import Ruling, WorkDone, judge, plan_receipt, sum_served
from fleet.text.phrases import count_of, show_span
from fleet.text.terminal import clean_line
from fleet.world.process_list import TASK_MARK

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from fleet.tasks.state import TaskState


class TaskWork(TaskAgent):
    """One task on its way, in a thread of its own: from where its state says, to its end."""

    # -- the way --

    def run(self) -> None:
        """Run the task until it waits, sleeps or is over; whatever goes wrong parks it."""
        try:
            try:
                self._go()
            except Wanted:
                self._give_up()
        except Asleep:
            pass
        except BrokenPipeError as error:  # nobody reads what the run says: no task's trouble
            self._supervisor.failures.append(error)
        except Exception as error:
            with contextlib.suppress(Asleep):
                self._park(error)
        finally:
            self._is_closing = True
            if self._preparing:
                self._preparing.join(GIT_SECONDS)
            if self._agent:
                self._agent.close()
            if self._hold:
                self._hold.release()
            self._supervisor.leave_task(self.name)

    def _park(self, error: Exception) -> None:
        """Park the task; a full disk, where nothing can be written down, ends the run."""
        ruling = Ruling("parked", describe_error(error), cause=slug_of(error))
        try:
            if ruling.cause == "disk-full":
                self._write()
            self._close(ruling, "refused")
        except FleetError as worse:
            if worse.slug == "disk-full":
                self._supervisor.failures.append(worse)
            else:
                self._park_at_once(worse)
        except Exception as worse:
            self._park_at_once(worse)

    def _park_at_once(self, error: Exception) -> None:
        """Park a task that cannot even be closed; its state's file may be refused, too."""
        changes = {"reason": describe_error(error), "cause": slug_of(error), "wanted": ""}
        try:
            self._write("parked", **changes)
        except FleetError:
            self._remember(state="parked", **changes)
        self._tell("parked", changes["reason"])

    def _go(self) -> None:
        """Do what comes next for the task; enter a state that an earlier supervisor left."""
        if self.state.is_over:
            return self._stop_again()
        self._wait_for_git()
        if self.state.state in ("preparing", "starting"):
            # Nothing was asked of an agent yet that counts: it is ended, and started again.
            self._end(0.0)
            self._make_ready()
            if self.state.recheck:
                self._write("checking", recheck=False)
            else:
                self._start()
        else:
            self._adopt()

        while True:
            if self.state.state != "checking":
                ending = self._talk()
                if ending == LOST:
                    return self._lose()
                if ending:
                    return self._close(ending, ending.cause)
                self._write("checking", prompt="")
            ruling, work = self._judge()
            if ruling.to not in ("asking", "running"):
                break
            self._go_on(ruling, work)
        if ruling.to in ("done", "review"):
            self._settle(work)
        is_refused = ruling.cause in ("api", "too-large")
        self._close(ruling, "api_error" if is_refused else "result", work)

    # -- ends --

    def _lose(self) -> None:
        """Take up a task whose process ended without a result; that is not its failure."""
        state, agent = self.state, self._agent
        assert agent
        self._end(0.0, TASK_MARK)
        agent.listen()
        lost = state.lost + 1
        if state.state == "asking":
            self._write(asleep=True, prompt="")
        elif lost >= LOST_LIMIT:
            last = last_line_of(self._world, self._file("err"))
            self._close(
                Ruling("parked", f"its process ended {lost} times without a result: {last}",
                       cause="lost"), "lost")
        else:
            errors = self._world.read_part(self._file("err"), 0, TAIL_BYTES)
            is_known = b"No conversation found" not in errors \
                and not is_unknown_session(agent.heard.result or {})
            # What it had not even begun with is told again.
            has_begun = state.task.talks and agent.heard.turn_at > state.heard_from
            self._write("waiting", reason="its process ended", lost=lost,
                        spoken=state.spoken and is_known,
                        prompt=LOST_PROMPT if has_begun else state.prompt,
                        until=self._world.now() + (2 ** state.lost if state.lost else 0))
            self._tell("lost", "its process ended without a result; starting it again")

    def _judge(self) -> tuple[Ruling, WorkDone]:
        """Keep what there is in a snapshot, check exactly that, and say what it is worth."""
        state, agent = self.state, self._agent
        result = {}
        exit_code = 0
        if agent and state.task.talks:
            agent.listen()
            result = agent.heard.result or {}
            kind = api_error_of(result)
            if kind:
                return self._judge_api_error(kind, result), WorkDone()
        elif agent:
            exit_code = agent.exit_code() or 0
        if exit_code in (126, 127):
            last = last_line_of(self._world, self._file("err"))
            raise FleetError("coder-missing", f"`{state.task.program}` could not be "
                             f"run (exit {exit_code}): {last}",
                             fix=f"subagent-fleet task log {self.name} stderr")

        # What the agent has left running could still write.
        ended = self._end(0.5, TASK_MARK, spares_client=bool(
            agent and state.task.talks and agent.lives()))
        if ended.left:
            raise FleetError("still-alive", "its agent has answered, but what it started is "
                             f"still running: {ended.left}",
                             fix=f"end it, then subagent-fleet task retry {self.name}")
        work = replace(self._keep(state, read_baseline(self._folder, state)),
                       exit_code=exit_code, said=str(result.get("result") or ""),
                       error=error_of(result))
        code, output = self._check(work) if state.task.check else (None, "")
        return judge(self.state, work, code, output), work

    def _keep(self, state: TaskState, known: Mapping[str, str] | None) -> WorkDone:
        """Keep the worktree in a ref, and look at what was done in it."""
        work, _ = take_snapshot(self._git(), self._main, state, str(state.tried), known)
        self._remember(kept=work.commit)
        copied = read_surroundings(self._folder, state).get("copied") or ()
        work = look_at_work(self._main, state, work, copied)
        self._remember(diff=work.sums)
        return work

    def _judge_api_error(self, kind: str, result: Mapping[str, Any]) -> Ruling:
        text = clean_line(str(result.get("result") or result.get("errors") or ""))[:200]
        if result.get("terminal_reason") == PROMPT_TOO_LONG:
            return Ruling("parked", f"too large for the model, split it: {text}",
                          cause="too-large")
        # It says no status of this, and waiting does not help.
        if "Please run /login" in text:
            text += ("; type /login in `claude`, then subagent-fleet task retry "
                     f"{self.name}; or subagent-fleet init, for models of your own")
            kind = "final"
        if kind == "transient" and self.state.api_errors + 1 < API_ERRORS_LIMIT:
            return Ruling("waiting", f"the model did not answer: {text}", cause="api")
        return Ruling("parked", text, cause="api")

    def _check(self, work: WorkDone) -> tuple[int, str]:
        """Run the check on what was kept; return its exit code and its last words."""
        state = self.state
        tree = state.worktree
        if state.task.check_in == "own":
            while self._preparing and self._preparing.is_alive():
                self._pause(0.1)
            if self._trouble:
                raise self._trouble
            tree = self._put_check(work.commit)

        name = f"check-{state.round}.log"
        log = self._file(name)
        self._world.remove(log)
        began = self._world.clock()
        code = self._run_check(tree, name)
        self._remember(checks=(*state.checks, code),
                       check_seconds=round(self._world.clock() - began, 1))
        refused = self._explain_refused(log, tree) if code else ""
        if refused:
            self._tell("note", f"the check: {refused}")
        # No agent helps against that, unless it is in a script of theirs.
        if code in (126, 127):
            refuse_missing_check(self._world, state, tree, r"[\w.+/-]+(?=\s|$)")
        return code, read_tail(self._world, log, TAIL_BYTES)

    def _go_on(self, ruling: Ruling, work: WorkDone) -> None:
        """Ask a person what the agent asks in prose, or tell the agent what is wrong."""
        state = self.state
        if ruling.to == "asking":
            self._ask_person("prose", ask_in_words(work.said))
            self._fall_asleep()
        seconds = f" after {state.check_seconds:.1f} s" if ruling.cause == "check" else ""
        self._tell("retrying", f"{ruling.reason}{seconds}: sent back to the agent (round "
                   f"{state.round + 1} of {state.task.rounds})")
        self._write("running", prompt=ruling.feedback, reason=ruling.reason, lost=0,
                    round=state.round + 1)
        if self._agent and self._agent.lives():
            return self._say(ruling.feedback)
        if self._agent:
            self._agent.close()
        self._start()

    def _settle(self, work: WorkDone) -> None:
        """Make good work the tip of its branch, if nobody has moved that meanwhile."""
        branch = self.state.branch
        if not settle_branch(self._git(), self._main, self.state, work.commit):
            raise FleetError("branch-moved",
                             f"the branch {branch} has moved since it was checked",
                             fix=f"subagent-fleet task retry {self.name}")
        self._remember(tip=work.commit)

    def _give_up(self) -> None:
        """End a task because a person wants that, or wants its session."""
        if self.state.wanted != "attach":
            return self._close(Ruling("stopped"), "stopped")
        self._end_agent(STOP_SECONDS)
        self._write("waiting", prompt="")  # whose person gets it now

    def _stop_again(self) -> None:
        """Try again to end what could not be ended; its work is kept, and its receipt."""
        ended = self._end(STOP_SECONDS)
        to, cause, reason = "stopped", "", f"{count_of(ended.count, 'process')} ended"
        if ended.left:
            to, cause, reason = "parked", "still-alive", f"still running: {ended.left}"
        self._write(to, reason=reason, cause=cause, wanted="")
        self._tell(to, reason)

    def _close(self, ruling: Ruling, ended: str, work: WorkDone | None = None) -> None:
        """End an agent, keep its work, write its receipt, and let the ruling be so."""
        is_stop = ruling.to == "stopped"
        self._is_closing = True
        began = self._world.clock()
        ended_now = self._end_agent(STOP_SECONDS if is_stop else TERM_SECONDS)
        if self._preparing:
            self._preparing.join(5.0)
        self._clear_box(self.state.worktree, "tmp")
        seconds = self._world.clock() - began
        state = self.state
        if work is None or not work.ref:
            work = self._keep_what_is_there(state)
        if is_stop:
            saved = f", work saved in {work.ref}" if work.changed else ""
            ruling = replace(ruling, reason=f"{count_of(ended_now.count, 'process')} ended in "
                             f"{seconds:.1f} s{saved}")
            if ended_now.left:
                ruling = Ruling("parked", f"still running: {ended_now.left}{saved}",
                                cause="still-alive")
        elif ended_now.left:
            self._tell("note", f"still running: {ended_now.left}")

        ruling = plan_climb(state, ruling, self._backing.fleet,
                            away_left=self._supervisor.count_away_left())
        receipt = self._write_receipt(state, ruling, ended, work)
        self._write(ruling.to, **self._after(state, ruling, ended), reason=ruling.reason,
                    cause=ruling.cause)
        self._tell_end(ruling, receipt, work)

    def _tell_end(self, ruling: Ruling, receipt: Mapping[str, Any], work: WorkDone) -> None:
        """Say what a try has come to."""
        word, text = ruling.to, ruling.reason
        if ruling.climbs:
            word, text = "moves up", f"from {ruling.climbs}: {text}"
        elif word == "waiting":
            word, text = "waits", f"for its next try: {text}"
        elif word in ("done", "review"):
            text = self._sum_up(receipt)
        elif ruling.cause == "diff" and work.said:
            text += f". It said: {shorten(work.said)}"
        self._tell(word, text)

    def _write_receipt(self, state: TaskState, ruling: Ruling, ended: str,
                       work: WorkDone) -> dict[str, Any]:
        """Write down what a try came to, beside what it left; remove what holds the key."""
        agent, now = self._agent, self._world.now()
        alias = self._supervisor.alias_of(self.name)
        served = self._backing.receipts() if alias else ()
        receipt = {**plan_receipt(state, agent.heard if agent else Heard(), work, alias,
                                  ended),
                   "served": sum_served(served, state.session), "verdict": ruling.to,
                   "reason": ruling.reason, "cause": ruling.cause,
                   "seconds": round(now - (state.began or now), 1)}
        if agent:
            receipt["not_writable"] = self._find_refused_agent()
        if agent and not state.task.talks:
            receipt["exit_code"] = agent.exit_code()
        if state.tried:
            self._folder.write(receipt, "tasks", self.name, str(state.tried), "receipt.json")
            self._world.remove(self._file("settings.json"))
        return receipt

    def _keep_what_is_there(self, state: TaskState) -> WorkDone:
        """Keep a worktree at the end of a try, however that has ended; before setup, nothing."""
        if not state.prepared or self._world.kind_of(state.worktree) != "directory":
            return WorkDone()
        try:
            return self._keep(state, read_baseline(self._folder, state))
        except FleetError as error:
            self._tell("note", f"its work is only in {state.worktree}: {error.what}")
        except Wanted:
            self._tell("note", f"its work is only in {state.worktree}: git took longer than "
                       f"{STOP_GIT_SECONDS:.0f} s")
        return WorkDone()

    def _after(self, state: TaskState, ruling: Ruling, ended: str) -> dict[str, Any]:
        """Return what changes beside the state when a try, or a part of one, is over."""
        now = self._world.now()
        usual = {"wanted": "", "ended": now, "prompt": "" if self._agent else state.prompt}
        if ruling.to != "waiting":
            return {**usual, "open": False, "lost": 0}
        usual["wanted"] = self.state.wanted  # asked since: `stop` means the next try, too
        if ruling.climbs:  # another model has no memory of this session
            return {**usual, "open": False, "lost": 0, "failures": 0, "api_errors": 0,
                    "rung": "", "climbed": (*state.climbed, ruling.climbs), "spoken": False,
                    "left_at": now if ruling.leaves else state.left_at,
                    "prompt": tell_climbed(state, ruling)}
        if ended == "stalled":
            return {**usual, "stalls": state.stalls + 1, "prompt": CONTINUE_PROMPT}
        if ruling.cause == "api":
            wait = API_WAIT_SECONDS[min(state.api_errors, len(API_WAIT_SECONDS) - 1)]
            return {**usual, "api_errors": state.api_errors + 1, "until": now + wait,
                    "prompt": CONTINUE_PROMPT}
        wait = TRY_WAIT_SECONDS[min(state.failures, len(TRY_WAIT_SECONDS) - 1)]
        what = ruling.feedback or f"The last try failed: {ruling.reason}."
        return {**usual, "open": False, "failures": state.failures + 1, "until": now + wait,
                "prompt": f"{what}\n\nTry again."}

    def _sum_up(self, receipt: Mapping[str, Any]) -> str:
        """Return in one line what a task that is done has come to."""
        state = self.state
        sums = state.diff
        words = [show_span(receipt["seconds"]), count_of(sums["commits"], "commit"),
                 f"{count_of(sums['files'], 'file')} +{sums['plus']} -{sums['minus']}"]
        words.append(f"check passed ({state.check_seconds:.1f} s)" if state.task.check
                     else "no check")
        if receipt["turns"]:
            words.append(count_of(receipt["turns"], "turn"))
        words += [f"note: {flag}" for flag in receipt["flags"]]
        return ", ".join(words)
