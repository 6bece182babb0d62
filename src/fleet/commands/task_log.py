"""`task log`: show what a task's agent has said and done."""
from __future__ import annotations

import contextlib
import datetime
from typing import TYPE_CHECKING

from fleet.cli.live import watch
from fleet.cli.rows import WORK, Flag, command, parse_count
from fleet.speech.backend import read_field
from fleet.speech.claude_stream import question_of, questions_in
from fleet.start.constants import EXIT_OK, EXIT_USAGE, TICK_SECONDS
from fleet.start.errors import FleetError
from fleet.tasks.state import change
from fleet.text.json import parse_object
from fleet.text.phrases import count_of
from fleet.text.terminal import clean_line
from fleet.work.shown import find_task, format_task_event
from fleet.work.typed import MAYBE_TASK, open_folder
from fleet.world.places import Tail

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping
    from typing import Any

    from fleet.runs.folder import Folder
    from fleet.tasks.state import TaskState
    from fleet.world.world import World


LOG_FILES = {"setup": "setup.log", "check": "check-0.log", "stderr": "err",
             "landing": "landing.log", "raw": "out.jsonl"}


@command(
    "task log", "show what an agent said and did, or the run's own log",
    MAYBE_TASK,
    Flag("kinds", "other kinds of log: setup, check, stderr, landing, raw", "KIND",
         {"nargs": "?", "choices": [*LOG_FILES], "default": None}),
    Flag("--try", "which try; default: the last", "N",
         {"type": parse_count, "default": 0, "dest": "number"}),
    Flag("--lines", "how many", "N", {"type": parse_count, "default": 40}, short="-n"),
    Flag("--follow", "keep showing new output until Ctrl-C", short="-f"),
    group=WORK, examples=("task log", "task log parser", "task log parser check --try 1"))
def cmd_task_log(options: Namespace, world: World) -> int:
    folder = open_folder(world)
    path, show = folder.place("events.jsonl"), format_run_event
    if options.task:
        state = find_task(folder, options.task, "task log")
        if options.number:
            attempt = state.attempt
            if attempt.first + options.number > attempt.tried:
                raise FleetError("no-try", f"task log: {state.name} was tried "
                                 f"{count_of(attempt.tried - attempt.first, 'time')}",
                                 status=EXIT_USAGE, fix=f"subagent-fleet tasks {state.name}")
            state = change(state, tried=attempt.first + options.number, checks=(), reason="")
        path = find_log(folder, state, options.kinds or "raw")
        show = (format_plain_line if options.kinds or not state.task.talks
                else format_agent_line)
    if not world.size_of(path):
        hint = explain_log(folder, state, options.kinds or "raw") if options.task else ""
        world.err(f"{clean_line(path)} is empty.{hint}\n")
    log = Tail(world, path)
    most = options.lines

    def show_new(_: str) -> bool:
        nonlocal most
        came = [*log.lines()]
        if log.rest and not options.follow:
            came.append(log.rest)
        lines = [clean_line(text) for line in came for text in show(line)]
        world.out("".join(f"{line}\n" for line in lines[-most:]))
        most = 0
        return True

    watch(world, TICK_SECONDS if options.follow else None, show_new, clears=False)
    return EXIT_OK


def find_log(folder: Folder, state: TaskState, kind: str) -> str:
    """Return the last log of one kind of a try."""
    name = LOG_FILES[kind]
    later = folder.world.paths_below(folder.of_try(state, ""), name.replace("0", "[0-9]*"))
    return max([folder.of_try(state, name), *later], key=lambda path: (len(path), path))


def explain_log(folder: Folder, state: TaskState, kind: str) -> str:
    """Return why a log is empty, and which other log is not."""
    text = ""
    if kind == "check" and state.attempt.checks:
        text = (f" `{clean_line(state.task.check or '')}` printed nothing (exit "
                f"{state.attempt.checks[-1]}).")
    elif state.reason:
        text = f" {state.name} is {state.state}: {clean_line(state.reason)}."
    others = [name for name in LOG_FILES
              if folder.world.size_of(find_log(folder, state, name))]
    if others:
        text += f" See also: subagent-fleet task log {state.name} {others[0]}"
    return text


def format_plain_line(line: bytes) -> list[str]:
    """Return a line of the log of any program."""
    return [line.decode("utf-8", "replace")]


def format_run_event(line: bytes) -> list[str]:
    """Return the lines for one event of the run's own log."""
    event = parse_object(line)
    if not event:
        return []
    when = "?"
    with contextlib.suppress(TypeError, ValueError, OverflowError, OSError):
        moment = datetime.datetime.fromtimestamp(event.get("at", 0))
        when = f"{moment:%m-%d %H:%M:%S}"
    name, word, text = (str(event.get(word, "")) for word in ("task", "event", "text"))
    shown = format_task_event(name, word, text, 8).rstrip().split("\n")
    return [f"{when:14}  {shown[0]}", *shown[1:]]


def format_agent_line(line: bytes) -> list[str]:
    """Return the lines for an event of an agent; none if it is of no interest."""
    event = parse_object(line) or {}
    kind = event.get("type")
    known = {
        "result": f"result     {event.get('subtype')}: "
                  f"{event.get('result') or event.get('errors')}",
        "init": f"begins     session {event.get('session_id')}, model {event.get('model')}",
        "api_retry": f"retry      {describe_api_retry(event)}",
        "permission_denied": f"denied     {event.get('tool_name')}: {event.get('message')}"}
    lines = [known.get(str(event.get("subtype") if kind == "system" else kind), "")]
    if kind == "control_request":
        lines = [f"asks       {question_of(read_field(event, 'request', dict))}"]
    if kind in ("assistant", "user"):
        content = read_field(read_field(event, "message", dict), "content", list)
        lines = [_format_block(block) for block in content if kind == "assistant"
                 or read_field(block, "type") == "tool_result"]
    return [" ".join(line.split("\n")) for line in lines if line]


def describe_api_retry(event: Mapping[str, Any]) -> str:
    """Return why Claude Code retries; it does not know if the server is gone (2.1.327)."""
    words = [str(event[word]) for word in ("error_status", "error")
             if event.get(word) not in (None, "unknown")]
    return " ".join(words) or "no answer from the server"


def _format_block(block: object) -> str:
    """Return one line for a block of a message of an agent or a tool."""
    kind = read_field(block, "type")
    if not isinstance(block, dict) or kind not in ("text", "tool_use", "tool_result"):
        return ""
    if kind == "text":
        return f"says       {read_field(block, 'text')}"
    if kind == "tool_use":
        words = ([question for question, _ in questions_in(block)]
                 or [str(one) for one in read_field(block, "input", dict).values()])
        return f"{read_field(block, 'name'):10} {' '.join(words)[:400]}"
    said = block.get("content") or ""
    if isinstance(said, list):
        said = " ".join(str(part.get("text", "")) for part in said if isinstance(part, dict))
    return f"{'error' if block.get('is_error') else 'result':10} {str(said)[:200]}"
