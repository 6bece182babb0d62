"""The parts of a trial: Question, Answer, Subject, Trial, filler text."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.speech.answer import End
from fleet.speech.talk import Talk, Turn
from fleet.start.record import Record, replace

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from fleet.config.sections import Model
    from fleet.speech.talk import Call, Refusal


# A trial asks a model on its node one question and judges the answer by a value that can be
# checked. It is a row: the question, and pure functions that judge. It goes the same way as
# a request: Talk, Backend, Reader, Deltas. Speeds come from the node's own counters, if it
# has any.

SPEED_TOKENS = 1000  # length of the prompt that compares models
FILLER_LINES_LIMIT = 400_000  # 25 MB, however few tokens a node counts
# How far a node's count may be from the count that its earlier ones predict. Lines of filler
# differ a little in tokens; a node that cuts a prompt loses far more than that.
COUNT_TOLERANCE = 0.02
COUNT_SLACK_TOKENS = 16  # added to it, because that share of a short prompt is nothing
LEAST_LINE_TOKENS = 4.0  # a node that counts fewer per line is wrong
QUICK_SECONDS = 5.0  # limit for reading the longest prompt, with --quick
ANSWER_TOKENS = 512
THINKING_TOKENS = 2048  # more, for a model that thinks before it answers


class Question(Record):
    """A question for a model, and what is known of its prompt."""

    talk: Talk
    lines: int = 0  # of filler
    tokens: int = 0  # expected, from the node's earlier counts
    context: int = 0  # of the route
    loaded: int = 0  # the context that the node reports; 0: it reports none
    word: str = ""  # the code word at the very beginning


class Answer(Record):
    """A model's answer to a question and its times, or why there is none."""

    question: Question
    text: str = ""
    thoughts: str = ""
    calls: tuple[Call, ...] = ()
    end: End = End("")
    first_seconds: float = 0.0  # until its first word, by our clock
    seconds: float = 0.0
    refusal: Refusal | None = None
    failure: str = ""  # of a node that still answers

    @property
    def missing(self) -> str:
        """The reason why there is no answer, or an empty string."""
        if self.refusal:
            words = re.sub(r"^node \S+, model \S+: ", "", self.refusal.what)
            return f"refused: {words}"
        return self.failure


class Subject(Record):
    """A model under trial, and what has been learned about it so far."""

    model: Model
    seed: str = ""  # makes each prompt new to the node, so that none is cached
    is_quick: bool = False
    loaded: int = 0
    prompt_rate: float | None = None
    fills: tuple[tuple[int, int], ...] = ()  # (lines of filler, tokens that the node counted)

    @property
    def room(self) -> int:
        """The tokens of a full context that are left for the answer."""
        answer = 64  # the code word in a polite sentence
        if self.model.thinking:
            answer += THINKING_TOKENS
        # The answer gets a quarter of a small context at most. Counts may be off by a
        # fiftieth.
        return min(answer, self.model.context // 4) + self.model.context // 50

    def count_lines(self, tokens: int) -> int:
        """Return the lines of filler for a prompt of this many tokens, in full rounds."""
        base, per_line = self._count()
        rounds = int((tokens - base) / per_line) // len(FILLER)
        return min(max(rounds, 1) * len(FILLER), FILLER_LINES_LIMIT)

    def count_tokens(self, lines: int) -> int:
        """Return the expected tokens of a prompt with this many lines of filler."""
        base, per_line = self._count()
        return round(base + per_line * lines)

    def _count(self) -> tuple[float, float]:
        """Return the tokens of a prompt without filler, and the tokens of one line."""
        # The slope between two counts is what one line costs. The shortest and the longest
        # prompt are the farthest apart, so an odd token in one of them matters least.
        counts = dict(self.fills or ((1, FILLER_BASE_TOKENS + FILLER_LINE_TOKENS),))
        if len(counts) == 1:
            counts = {0: FILLER_BASE_TOKENS, **counts}
        first, last = min(counts), max(counts)
        per_line = (counts[last] - counts[first]) / (last - first)
        per_line = max(per_line, LEAST_LINE_TOKENS)
        return counts[last] - per_line * last, per_line


class Trial(Record):
    """A row: the question, what is measured in its answer, and the functions that judge it."""

    topic: str  # speed, tools or context
    name: str
    ask: Callable[[Subject], Question | None]  # None: skip this model
    judges: tuple[Callable[[Answer], str], ...] = ()  # each returns a flaw; "": none
    speeds: tuple[str, ...] = ()  # fields of a Measurement that the answer gives
    is_quick: bool = True  # also asked with --quick

    @property
    def title(self) -> str:
        """The topic and the name, for progress lines and failed answers."""
        return f"{self.topic}: {self.name}"


def ask_about(subject: Subject, *turns: Turn | str, **more: Any) -> Question:
    """Return a question with these turns, at temperature 0 so that answers repeat."""
    tokens = more.pop("tokens", ANSWER_TOKENS)
    if subject.model.thinking:
        tokens += THINKING_TOKENS
    talk = Talk(subject.model.alias, tuple(
        Turn("user", texts=(turn,)) if isinstance(turn, str) else turn for turn in turns),
        max_tokens=tokens, sampling={"temperature": 0.0}, is_stream=True, **more)
    return Question(talk, context=subject.model.context, loaded=subject.loaded)


FILLER_BASE_TOKENS = 60.0  # of a prompt without filler, until the node has counted one
FILLER_LINE_TOKENS = 20.0


def fill_prompt(subject: Subject, lines: int, number: int, *, extra: int = 0,
          wish: str = "Answer with that word alone.") -> Question:
    """Return a question about a code word, with this many lines of filler after the word.

    The word is in a turn of its own, because a server that cuts a talk drops its first turns.
    """
    word = CODE_WORDS[number % len(CODE_WORDS)]
    text = "\n".join(FILLER * (lines // len(FILLER))) + " x" * extra
    question = ask_about(subject, f"Run {subject.seed}-{number}. The code word is {word}.",
                    Turn("assistant", texts=("Noted.",)),
                    f"{text}\n\nWhat is the code word? {wish}", tokens=48)
    return replace(question, lines=lines, word=word,
                   tokens=subject.count_tokens(lines) + extra)


def ask_to_load_model(subject: Subject) -> Question:
    """Return the first question, which makes the node load the model."""
    return fill_prompt(subject, len(FILLER), 0)


CODE_WORDS = ("KESTREL", "MARBLE", "TUNDRA", "SAFFRON", "LANTERN")
# One round of filler. No line changes the tokens of the next.
FILLER = (
    "The morning train to the coast was late again, so the meeting began without the engineers.",
    "In the second drawer there are four pencils, a ruler and the receipt for the blue lamp.",
    "Nobody had opened the west gate since the storm, and the path behind it was full of leaves.",
    "The report says that the pumps ran for nine hours and that the water fell by half a metre.",
    "She counted the boxes twice, wrote the number on the wall and closed the door behind her.",
    "A cook from the harbour sold soup on the stairs, with bread when there was any left.",
    "The old map shows a bridge where today there is only a row of stones in the river.",
    "At noon the office sent a note that the lift would be repaired on the following Tuesday.")
