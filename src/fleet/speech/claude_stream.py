"""Claude Code's stream of JSON lines, both ways."""
from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING

from fleet.speech.backend import read_field
from fleet.start.record import Record
from fleet.text.json import digest, parse_object
from fleet.text.terminal import clean_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


EDITING_TOOLS = ("Edit", "Write", "MultiEdit", "NotebookEdit")
QUESTION_TOOL = "AskUserQuestion"


def path_in(given: object) -> str:
    """Return the path in a tool's arguments, or ""."""
    given = given if isinstance(given, dict) else {}
    return str(given.get("file_path") or given.get("notebook_path") or "")


# -- reading an agent's output --

PROMPT_TOO_LONG = "prompt_too_long"
TRANSIENT_STATUSES = (408, 409, 425, 429, 500, 502, 503, 504, 529)
LOOPS_TOLD, LOOPS_STALLED = 8, 12
SUMMARY_CHARACTERS = 60


class OpenCall(Record):
    """A tool call without a result yet."""

    tool: str
    summary: str
    since: float
    path: str = ""


DENIED_LIMIT = 200  # characters of a call that was denied


class Heard:
    """The state of an agent, from its output so far: what it did, does and asks."""

    result: dict[str, Any] | None = None
    result_at = -1  # the offset after it
    phase = "silent"  # then requesting, answering, tool, asking, settled
    since = last = 0.0  # by the listener's clock
    turn_at = -1  # the offset after the line that began its last turn
    has_background = False
    worked = 0  # calls that changed something, or may have
    tool_errors = turns = questions = context = repeats = 0
    _last_call = ""

    def __init__(self, *, heard_from: int = 0) -> None:
        self.heard_from = heard_from  # a result before this offset answers an earlier prompt
        self.calls: dict[str, OpenCall] = {}
        # A permission that it asks for, or a question to a person.
        self.requests: dict[str, dict[str, Any]] = {}
        self.tools: dict[str, int] = {}
        self.denied: list[dict[str, str]] = []
        self.written: list[str] = []
        self.subagents: dict[str, dict[str, int]] = {}

    @property
    def is_settled(self) -> bool:
        """Whether it has answered the last prompt, and nothing runs in the background."""
        return self.phase == "settled" and self.result_at >= self.heard_from \
            and not self.has_background

    @property
    def now(self) -> str:
        """What it does, in a few words."""
        if self.requests:
            return question_of(next(iter(self.requests.values())))
        if self.calls:
            call = list(self.calls.values())[-1]
            return f"{call.tool} {call.summary}".strip()
        return {"silent": "starting", "requesting": "waiting for the model",
                "answering": "writing", "settled": "has answered"}.get(self.phase, self.phase)

    def feed(self, line: bytes, end: int, now: float) -> None:
        """Read a line that ends at an offset; skip it if it is not JSON."""
        # Most lines are pieces of an answer, and only show that it is alive.
        if (line.startswith(b'{"type":"stream_event"')
                and b'"message_delta"' not in line[:200]):
            self.last = now
            if self.phase == "requesting" and b'"content_block_' in line:
                self._enter("answering", now)
            return
        event = parse_object(line)
        if event is None:
            return
        self.last = now
        reader = getattr(self, f"_read_{event.get('type')}", None)
        if reader:
            with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):
                reader(event, end, now)

    def answered(self, request: str, now: float) -> None:
        """Note that a request was answered."""
        if self.requests.pop(request, None) is not None and not self.requests:
            self._enter("tool" if self.calls else "requesting", now)

    def prompted(self, offset: int, now: float) -> None:
        """Note that a prompt was sent: only a result after this offset answers it."""
        self.heard_from = offset
        self._enter("requesting", now)

    def note_denial(self, tool: object, given: object) -> None:
        """Note a denied call: its file or its command."""
        path = path_in(given) or read_field(given, "command")
        entry = {"tool": str(tool), "path": clean_line(path)[:DENIED_LIMIT]}
        if entry not in self.denied:
            self.denied.append(entry)

    def _enter(self, phase: str, now: float) -> None:
        self.phase = phase
        self.since = now

    def _read_system(self, event: dict[str, Any], end: int, now: float) -> None:
        kind = event.get("subtype")
        if kind == "init":
            self.turn_at = end
            self._enter("requesting", now)
        elif kind == "status" and event.get("status") == "requesting" and not self.requests:
            self._enter("requesting", now)
        elif kind == "background_tasks_changed":
            self.has_background = bool(event.get("tasks"))
        elif kind in ("task_started", "task_progress") and event.get("subagent_type"):
            record = self.subagents.setdefault(
                str(event["subagent_type"]), {"runs": 0, "tool_uses": 0})
            record["runs"] += kind == "task_started"
            uses = int(event.get("usage", {}).get("tool_uses", 0))
            record["tool_uses"] = max(record["tool_uses"], uses)

    def _read_stream_event(self, event: dict[str, Any], _: int, now: float) -> None:
        # The answer's own line has the count at its beginning: 0 for a local model.
        if not event.get("parent_tool_use_id"):
            usage = event["event"]["usage"]
            count = sum(int(usage.get(word) or 0) for word in (
                "input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"))
            self.context = count or self.context

    def _read_assistant(self, event: dict[str, Any], _: int, now: float) -> None:
        message = event["message"]
        if message.get("model") == "<synthetic>":  # Claude Code's own text of an error
            return
        for block in message["content"]:
            if block.get("type") == "tool_use":
                self._begin_call(block, now)
            elif (block.get("type") == "text" and not event.get("parent_tool_use_id")
                    and not self.calls):
                self._enter("answering", now)

    def _begin_call(self, block: dict[str, Any], now: float) -> None:
        tool = str(block["name"])
        given = block.get("input") or {}
        summary = next((str(given[word]) for word in (
            "command", "file_path", "notebook_path", "pattern", "description", "url",
            "prompt")
            if given.get(word)), "")
        summary = " ".join(summary.split())[:SUMMARY_CHARACTERS]
        self.calls[str(block["id"])] = OpenCall(tool, summary, now, path_in(given))
        self.tools[tool] = self.tools.get(tool, 0) + 1
        call = digest(json.dumps([tool, given], sort_keys=True).encode("utf-8", "replace"))
        self.repeats = self.repeats + 1 if call == self._last_call else 1
        self._last_call = call
        self._enter("tool", now)

    def _read_user(self, event: dict[str, Any], _: int, now: float) -> None:
        content = event["message"]["content"]
        if not isinstance(content, list):
            return
        for block in content:
            if block.get("type") != "tool_result":
                continue
            identity = str(block.get("tool_use_id"))
            call = self.calls.pop(identity, None)
            for asked, request in list(self.requests.items()):
                if request.get("tool_use_id") == identity:  # it was answered
                    del self.requests[asked]
            if block.get("is_error"):
                self.tool_errors += 1
            elif call and call.tool in (*EDITING_TOOLS, "Bash"):
                self.worked += 1
                if call.path:
                    self.written.append(call.path)
        if not self.calls and not self.requests:
            self._enter("requesting", now)

    def _read_control_request(self, event: dict[str, Any], _: int, now: float) -> None:
        request = event["request"]
        if request.get("subtype") == "can_use_tool":
            self.requests[str(event["request_id"])] = request
            self.questions += request.get("tool_name") == QUESTION_TOOL
            self._enter("asking", now)

    def _read_control_cancel_request(self, event: dict[str, Any], _: int, now: float) -> None:
        self.answered(str(event["request_id"]), now)

    def _read_result(self, event: dict[str, Any], end: int, now: float) -> None:
        self.result = event
        self.result_at = end
        self.turns += int(event.get("num_turns") or 0)
        self.calls.clear()
        self.requests.clear()
        for denial in event.get("permission_denials") or []:
            self.note_denial(denial.get("tool_name"), denial.get("tool_input"))
        self._enter("settled", now)


def question_of(request: Mapping[str, Any]) -> str:
    """Return a request's question to a person, in one line."""
    questions = questions_in(request)
    if questions:
        return questions[0][0]
    return f"{request.get('tool_name')} {request.get('description') or ''}".strip()


def _read_questions(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the questions of a request; a model may ask a single one without a list."""
    asked = request["input"]
    questions: list[dict[str, Any]] = asked.get("questions", [asked])
    return questions


def questions_in(request: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return (question, labels to choose from) of a request."""
    found = []
    with contextlib.suppress(KeyError, TypeError, AttributeError):
        for one in _read_questions(request):
            labels = [str(option["label"]) for option in one.get("options") or []]
            found.append((" ".join(str(one["question"]).split()), labels))
    return found


def ask_in_words(text: str) -> dict[str, Any]:
    """Return an answer that ended with a question, in the form of a request."""
    line = text.strip().splitlines()[-1].strip()
    return {"input": {"questions": [{"question": line[-400:], "options": []}]}}


def plan_answers(request: Mapping[str, Any], words: Sequence[str]) -> dict[str, str]:
    """Return {question: answer} of typed words, each a number or text; {} if they do not fit.

    A single question takes all words as its answer, several take one word each. A number must
    be one of the choices.
    """
    questions = questions_in(request)
    typed = [" ".join(words)] if len(questions) == 1 else list(words)
    if len(typed) != len(questions):
        return {}
    answers = {}
    for (_, labels), question, word in zip(questions, _read_questions(request), typed):
        if labels and re.fullmatch(r"[+-]?\d+", word):
            if not 1 <= int(word) <= len(labels):
                return {}
            word = labels[int(word) - 1]
        answers[str(question["question"])] = word
    return answers


def api_error_of(result: Mapping[str, Any] | None) -> str:
    """Return the kind of API error in a result: "", `transient` or `final`."""
    if not result or not result.get("is_error"):
        return ""
    if result.get("terminal_reason") == PROMPT_TOO_LONG:
        return "final"
    if result.get("terminal_reason") != "api_error":
        return ""
    status = result.get("api_error_status")
    return "transient" if status is None or status in TRANSIENT_STATUSES else "final"


def error_of(result: Mapping[str, Any]) -> str:
    """Return the error in a result; "" if it is an answer."""
    if not result.get("is_error"):
        return ""
    errors = result.get("errors")
    if not (errors and isinstance(errors, list)):
        errors = [result.get("terminal_reason") or result.get("subtype")]
    return clean_line("; ".join(map(str, errors)))[:200]


def is_unknown_session(result: Mapping[str, Any]) -> bool:
    """Tell whether a result means that there is no session to resume (2.1.327)."""
    return result.get("subtype") == "error_during_execution" and not result.get("num_turns")


# -- messages to an agent --


def render_stream_line(kind: str, **parts: object) -> bytes:
    return json.dumps({"type": kind, **parts}).encode("ascii") + b"\n"


def render_prompt_line(text: str) -> bytes:
    """Return a prompt as a line for Claude Code's standard input (2.1.327)."""
    return render_stream_line("user", message={"role": "user", "content": text})


def render_answer_line(request: str, answer: Mapping[str, Any]) -> bytes:
    """Return the answer to a request of Claude Code."""
    return render_stream_line("control_response", response={
        "subtype": "success", "request_id": request, "response": answer})


def answer_to(request: Mapping[str, Any], answers: Mapping[str, str]) -> dict[str, Any]:
    """Return a person's answers in the form that Claude Code expects."""
    given = request.get("input")
    return {"behavior": "allow",
            "updatedInput": {**(given if isinstance(given, dict) else {}),
                             "answers": answers}}


def tell_answers(answers: Mapping[str, str]) -> str:
    """Return answers as a prompt, for a session that ended while it asked."""
    if len(answers) == 1:
        return f"The answer to your question is: {next(iter(answers.values()))}"
    lines = [f"- {question} {answer}" for question, answer in answers.items()]
    return "\n".join(["The answers to your questions are:", *lines])


CONTINUE_PROMPT = "Continue."
LOST_PROMPT = ("Your process was ended from outside before you had finished. "
               "Look at what is done already, then continue.")
ATTACHED_PROMPT = ("A person has worked in this session and in this worktree. Look at what "
                   "has changed, then continue.")
LOOPS_PROMPT = ("You have made the same call {count} times in a row. "
                "Do something else, or end.")
CHANGED_PROMPT = "The task has changed. This is the whole task now:\n\n{prompt}"
