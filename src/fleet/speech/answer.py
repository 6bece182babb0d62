"""A model's answer, independent of any dialect: End, Delta, Sieve."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.start.record import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleet.speech.talk import Call


class End(Record):
    """How an answer ended, and what it took."""

    reason: str  # end_turn, max_tokens, stop_sequence or tool_use
    stop: str = ""  # the stop sequence that ended it
    input_tokens: int = 0
    output_tokens: int = 0
    # By the node's own clock, if it says; without cached parts of the prompt.
    load_seconds: float | None = None
    prompt_seconds: float | None = None
    answer_seconds: float | None = None
    cache_read: int = 0  # input tokens that the node had in its cache
    cache_written: int = 0  # input tokens that it adds to its cache
    broken_calls: int = 0  # dropped calls: cut off, or their arguments were not JSON


class Delta(Record):
    """One step of an answer: a piece of thinking or text, a call, or the end.

    A cloud's answer to a Messages client is `raw`: an event's JSON, with its name as the text.
    """

    kind: str  # thinking, text, call, end or raw
    text: str = ""
    call: Call | None = None
    end: End | None = None
    raw: bytes = b""


class Sieve:
    """Separates thinking from text in a model's output, and ends the text at a stop sequence.

    Text that could be the beginning of a mark is held back until more comes. A <think> section
    counts only at the very beginning.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stop = ""  # the stop sequence that ended the text
        self._stops = [stop for stop in stops if stop]
        self._phase, self._held = "start", ""

    def passes_text(self) -> bool:
        """Tell whether all further output is text: no mark is looked for any more."""
        return self._phase == "text" and not self._stops

    def skip_thinking(self) -> None:
        """Note that the model sends its thinking separately: all it prints is text."""
        self._phase = "text"

    def feed(self, text: str, *, last: bool = False) -> list[Delta]:
        """Return what can be passed on now; with `last`, hold nothing back."""
        if self.stop:
            return []
        text, self._held = self._held + text, ""
        if self._phase == "start":
            text = self._begin(text, last)

        deltas = []
        if self._phase == "think":
            thought, mark, text = self._part(text, ["</think>"], last)
            deltas.append(Delta("thinking", thought))
            self._phase = "after" if mark else "think"
        if self._phase == "after":
            text = text.lstrip()
            self._phase = "text" if text else "after"
        if self._stops and self._phase == "text":
            text, self.stop, _ = self._part(text, self._stops, last)

        deltas.append(Delta("text", text))
        return [delta for delta in deltas if delta.text]

    def _begin(self, text: str, last: bool) -> str:
        """Choose the first phase once there is enough output; return what belongs to it."""
        bare = text.lstrip()
        if bare.startswith("<think>"):
            self._phase = "think"
            return bare[len("<think>"):]

        if "<think>".startswith(bare) and not last:
            self._held = text
            return ""

        self._phase = "text"
        return text

    def _part(self, text: str, marks: list[str], last: bool) -> tuple[str, str, str]:
        """Return the text before the first mark, the mark, and the text after it."""
        places = [(text.index(mark), mark) for mark in marks if mark in text]
        if places:
            at, mark = min(places)
            return text[:at], mark, text[at + len(mark):]

        if not last:
            at = len(text) - max(_growing_tail(text, mark) for mark in marks)
            self._held = text[at:]
            text = text[:at]
        return text, "", ""


def _growing_tail(text: str, mark: str) -> int:
    """Return the length of the longest end of a text that is the beginning of the mark."""
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0 and not mark.startswith(text[at:]):
        at = text.find(mark[0], at + 1)
    return len(text) - at if at >= 0 else 0
