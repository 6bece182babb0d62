"""Claude Code's transcripts of a session."""
from __future__ import annotations

import contextlib
import datetime
import re
from typing import TYPE_CHECKING

from fleet.speech.backend import read_field
from fleet.start.record import Record, replace
from fleet.text.json import parse_object
from fleet.text.terminal import crop

if TYPE_CHECKING:
    from typing import Any


# This room joins what the gateway wrote (receipts) with what Claude Code wrote (transcripts), by
# session, agent and request id, and says which model on which machine served which agent, and
# whether that was planned. `workspace/claude` reads the files. Neither is trusted: a value of
# the wrong type counts as absent, and a broken line is skipped and reported.
#
# Facts: Claude Code 2.1.197 and 2.1.326. What an agent is called is only in its transcript
# and beside it; of an answer, `requestId` is the gateway's own header, `message.model` what
# the server called itself, `requestedModel` what was asked (326). One answer is several
# lines, one a block.

AGENTS_DEPTH_LIMIT = 6  # transcripts may claim that agents started each other in a circle
PROMPT_LIMIT = 20_000  # characters of a prompt that are kept
ERROR_LIMIT = 160
IDLE_SECONDS = 600.0  # Claude Code's tools write a line at least this often
SILENT_SECONDS = 5.0  # an agent without a transcript counts as over so long after its last receipt
# If the estimate of a prompt is so many times the node's count, it was cut. The estimate comes
# from bytes, so a smaller ratio would accuse nodes wrongly.
CUT_RATIO = 2.0
GENERATING_SECONDS = 0.05  # in less time no rate can be measured


class SessionAnswer(Record):
    """One answer in a transcript; it may have several lines."""

    id: str  # the gateway's request id; else the message's own id
    place: str  # FILE:LINE of the last of its lines
    time: float
    asked: str  # the alias; 2.1.197 keeps only what answered
    input_tokens: int
    output_tokens: int
    calls: int
    stop: str  # end_turn, tool_use, max_tokens, …; "" where the client did not keep it
    error: str = ""  # the text of an API error instead of an answer


class Dispatch(Record):
    """A call of the tool that starts a subagent."""

    place: str
    model: str  # a model in the call overrides the agent's file


class Transcript:
    """One transcript: fed line by line, it keeps only what a trace needs."""

    def __init__(self, path: str, agent: str = "") -> None:
        self.path = path  # as it is shown
        self.agent = agent  # its id; "" is the main session
        self.lines = 0
        self.torn: list[str] = []  # places of lines that are cut off or not JSON
        self.prompt = ""
        self.began = self.ended = 0.0
        self.changed = 0.0  # when its file was changed: a long-running tool writes no answer
        self.answers: dict[str, SessionAnswer] = {}
        self.dispatches: dict[str, Dispatch] = {}  # by the call's id
        self.reports: dict[str, str] = {}  # how the agents that it started ended, by id

    def feed(self, line: bytes) -> None:
        """Read the next line; tool results, most of a session, are not parsed."""
        self.lines += 1
        line = line.rstrip()
        may_matter = (b'"assistant"' in line or (not self.prompt and b'"user"' in line)
                      or (b'"toolUseResult"' in line and b'"agentId"' in line))
        if not line or (line.endswith(b"}") and not may_matter):
            return
        value = parse_object(line) if line.endswith(b"}") else None
        if value is None:
            self.torn.append(self._place)
        elif self.agent or value.get("isSidechain") is not True:
            self._take(value)

    @property
    def _place(self) -> str:
        """The place of the last line, as evidence."""
        return f"{self.path}:{self.lines}"

    def _take(self, value: dict[str, Any]) -> None:
        kind = read_field(value, "type")
        if kind not in ("user", "assistant"):
            return

        time = parse_time(read_field(value, "timestamp"))
        self.began = self.began or time
        self.ended = time or self.ended
        message = read_field(value, "message", dict)
        if kind == "assistant":
            self._take_answer(value, message, time)
            return

        if not self.prompt and value.get("isMeta") is not True:
            self.prompt = _prompt_of(message.get("content"))
        result = read_field(value, "toolUseResult", dict)
        agent = read_field(result, "agentId")
        if agent:
            self.reports[agent] = read_field(result, "status")

    def _take_answer(self, value: dict[str, Any], message: dict[str, Any],
                     time: float) -> None:
        """Keep an answer, or the next block of one."""
        words = ""
        calls = 0
        for block in read_field(message, "content", list):
            if read_field(block, "type") == "text":
                words += read_field(block, "text")
            elif read_field(block, "type") == "tool_use":
                calls += 1
                if read_field(block, "name") in ("Agent", "Task"):
                    call = read_field(block, "input", dict)
                    self.dispatches[read_field(block, "id")] = Dispatch(
                        self._place, read_field(call, "model"))

        # Tokens read from a cache are part of the prompt, too.
        usage = read_field(message, "usage", dict)
        spent = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        answer = SessionAnswer(
            id=read_field(value, "requestId") or read_field(message, "id") or self._place,
            place=self._place,
            time=time,
            asked=read_field(value, "requestedModel") or read_field(message, "model"),
            input_tokens=sum(read_field(usage, name, int) for name in spent),
            output_tokens=read_field(usage, "output_tokens", int),
            calls=calls,
            stop=read_field(message, "stop_reason"))
        earlier = self.answers.get(answer.id)
        if value.get("isApiErrorMessage") is True or message.get("model") == "<synthetic>":
            answer = replace(answer,
                             error=crop(words, ERROR_LIMIT) or "an error without words")
        elif earlier:  # the error of a retry is not a part of it
            answer = replace(
                answer, calls=earlier.calls + calls, stop=answer.stop or earlier.stop,
                output_tokens=max(earlier.output_tokens, answer.output_tokens))
        self.answers[answer.id] = answer

    @property
    def last(self) -> SessionAnswer | None:
        """The answer that came last."""
        return next(reversed(self.answers.values()), None)


def parse_time(text: str) -> float:
    """Return the seconds since 1970 of a timestamp (`2026-11-18T06:37:54.354Z`), else 0."""
    if not text.endswith("Z"):
        return 0.0
    with contextlib.suppress(ValueError, OverflowError):  # 3.9 reads no Z
        return datetime.datetime.fromisoformat(f"{text[:-1]}+00:00").timestamp()
    return 0.0


def _prompt_of(content: object) -> str:
    """Return what a person typed, from a message's content; of a command, its name."""
    text = content if isinstance(content, str) else ""
    if isinstance(content, list):
        text = "\n".join(filter(None, (read_field(block, "text") for block in content)))
    command = re.search("<command-name>(.{1,80}?)</command-name>", text)
    if command:
        return command[1]
    # What Claude Code puts around what was pasted is not what was typed (2.1.328).
    return re.sub("</?pasted_content[^>]{0,80}>", "", text[:PROMPT_LIMIT]).strip()
