"""The verdict on a task's work: a ruling, a receipt and its flags."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.start.record import Record, replace
from fleet.tasks.scope import describe_scope
from fleet.text.phrases import some_of
from fleet.text.terminal import clean_line

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from fleet.config.task_file import TaskSpec
    from fleet.gateway.receipts import Receipt
    from fleet.speech.claude_stream import Heard
    from fleet.tasks.state import TaskState


FEEDBACK_LINES = 100


class WorkDone(Record):
    """The work in a worktree after an agent has answered or ended."""

    ref: str = ""  # which keeps all of it
    commit: str = ""  # for the branch
    head: str = ""
    commits: int = 0
    files: tuple[tuple[str, int, int], ...] = ()  # path, lines added, lines removed
    changed: tuple[str, ...] = ()  # by the agent, not by setup
    outside: tuple[str, ...] = ()
    said: str = ""  # the agent's last words
    exit_code: int = 0  # of a coder that only ends
    error: str = ""  # with which Claude Code ended instead of an answer

    @property
    def sums(self) -> dict[str, int]:
        """Files, and lines added and removed."""
        return {"files": len(self.files), "plus": sum(one[1] for one in self.files),
                "minus": sum(one[2] for one in self.files), "commits": self.commits}


class Ruling(Record):
    """What happens to a task next, and what its agent is told."""

    to: str
    reason: str = ""
    feedback: str = ""
    # For programs: check, diff, scope, deadline, stalled, lost, api, too-large, or another slug.
    cause: str = ""
    climbs: str = ""  # the rung on which it failed, if it moves up
    leaves: bool = False  # it leaves the house by moving up
    ended: str = "result"  # how its process ended, for the receipt
    said: str = ""  # by the check that failed, for people: its last line


def judge(state: TaskState, work: WorkDone, code: int | None, output: str) -> Ruling:
    """Return the verdict: a final state, `running` or `asking` for the agent, or `waiting`.

    `code` is the exit code of the check, None if the task has no check.
    """
    task = state.task
    problem = _find_problem(task, work, code, output)
    if problem.cause == "asks":
        return Ruling("asking")
    if problem.cause and task.talks and state.attempt.round < task.rounds:
        return replace(problem, to="running")
    if work.outside:
        return rule_out(task, work)
    if problem.cause:
        # A receipt holds no words of an agent, so the reason has none either.
        hint = ""
        if problem.cause == "diff" and not work.changed:
            hint = " (if it should only answer, write `changes: none`)"
        failure = after_failure(state, problem.reason + hint, problem.cause)
        return replace(failure, feedback=problem.feedback, said=problem.said)
    return Ruling("done" if task.check else "review")


def quote_output(output: str) -> str:
    """Return the end of a command's output, for an agent."""
    return "\n".join(output.splitlines()[-FEEDBACK_LINES:]) or "It printed nothing."


def _find_problem(task: TaskSpec, work: WorkDone, code: int | None, output: str) -> Ruling:
    """Return what is wrong with the work, and the feedback; without a cause, nothing is."""
    if task.check and code != 0:
        return Ruling("", f"check failed (exit {code})", (
            f"The check of this task failed (exit {code}): {task.check}\n\n"
            f"{quote_output(output)}\n\n"
            "Fix that. The check runs again when you end."), "check",
            said=clean_line(output.rstrip().rpartition("\n")[2].strip())[:100])
    if work.error:
        return Ruling("", f"ended with an error: {work.error}", (
            f"You were ended by an error before you had finished: {work.error}. Look at what "
            "is done already, then continue."), "coder")
    # If nothing was changed, a passing check proves nothing about a coder that has failed.
    if work.exit_code and not (task.check and work.changed):
        return Ruling("", f"{task.program} ended with exit code {work.exit_code}",
                      f"The last try ended with exit code {work.exit_code}.", "coder")
    if task.changes == "none" and work.changed:
        return Ruling("", f"changed {some_of(work.changed, 3)}, but must change nothing", (
            "This task must change nothing, but these files differ: "
            f"{some_of(work.changed, 20)}. Undo that."), "diff")
    if task.changes == "none" or work.changed:
        return Ruling("")
    if work.said.rstrip().endswith("?") and task.talks:
        return Ruling("", cause="asks")
    return Ruling("", "nothing was changed", (
        "Nothing in the worktree has changed, so nothing was done. Do the task, or say why "
        "it cannot be done."), "diff")


def rule_out(task: TaskSpec, work: WorkDone) -> Ruling:
    """Return the ruling on work outside the paths that the task may touch."""
    reason = f"scope: changed {some_of(work.outside, 5)}; {describe_scope(task)}"
    return Ruling("parked", reason, cause="scope")


def after_failure(state: TaskState, problem: str, cause: str) -> Ruling:
    """Return the ruling on a failed try: another try, if there is one left."""
    to = "waiting" if state.attempt.failures + 1 < state.task.tries else "failed"
    return Ruling(to, problem, cause=cause)


def find_flags(task: TaskSpec, heard: Heard, work: WorkDone) -> list[str]:
    """Return what is odd about an agent's actions; the verdict does not depend on it."""
    flags = []
    if heard.turns and not heard.worked and task.changes == "required":
        flags.append("made no call that could change a file")
    changed = tuple(f"/{path}" for path, _, _ in work.files)
    absent = [path for path in dict.fromkeys(heard.written)
              if not f"/{path}".endswith(changed)]
    if absent:
        flags.append(f"wrote files that are not in the diff: {some_of(absent, 3)}")
    flags += [f"subagent {name} used no tool" for name, record in heard.subagents.items()
              if record["runs"] and not record["tool_uses"]]
    return flags


def plan_receipt(state: TaskState, heard: Heard, work: WorkDone, alias: str,
                 ended: str) -> dict[str, Any]:
    """Return the receipt of a try. It holds no prompt and no answer."""
    place, attempt = state.place, state.attempt
    return {
        "schema": "subagent-fleet/receipt/1", "task": state.name, "try": attempt.tried,
        "session": attempt.session, "agent": state.task.agent or "", "alias": alias,
        "rung": attempt.rung, "climbed": list(attempt.climbed),
        "base": place.base, "head": work.head, "snapshot": work.ref, "ended": ended,
        "confined": place.confined or "no",
        **{name: getattr(heard, name) for name in (
            "turns", "tools", "tool_errors", "denied", "questions", "subagents")},
        "commits": work.commits, "files": [list(one) for one in work.files],
        "outside": list(work.outside), "stalls": attempt.stalls,
        "check": {"command": state.task.check or "", "in": state.task.check_in,
                  "rounds": list(attempt.checks), "passes_on_base": place.passes_on_base},
        "flags": find_flags(state.task, heard, work)}


def sum_served(receipts: Iterable[Receipt], session: str) -> list[dict[str, Any]]:
    """Return what each machine did for a session, from the gateway's receipts."""
    sums: dict[tuple[str, str | None], dict[str, Any]] = {}
    for receipt in receipts:
        if receipt.session == session and receipt.node:
            row = sums.setdefault((receipt.node, receipt.route), {
                "node": receipt.node, "route": receipt.route, "model": receipt.model_name,
                "requests": 0, "input_tokens": 0, "output_tokens": 0, "waited_seconds": 0.0})
            row["requests"] += 1
            row["input_tokens"] += receipt.input_tokens
            row["output_tokens"] += receipt.output_tokens
            row["waited_seconds"] = round(row["waited_seconds"] + (receipt.waited_seconds or 0), 1)
    return list(sums.values())
