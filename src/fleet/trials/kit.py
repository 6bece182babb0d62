"""What a trial is made of: Question, Answer, Subject, Trial, filler."""
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


# Takes a model on its node, asks it what it can do, and judges each answer by a value
# that can be checked. A trial is a row: what is asked, and pure judges. Each goes the
# way of a request: Talk, Backend, Reader, Deltas. Speeds are the node's own counters,
# where it has some.

SPEED_TOKENS = 1000  # of the prompt by which models are compared
FILLER_LINES_LIMIT = 400_000  # 25 MB, whatever a node counts
# Between what a node counts and what its earlier counts let expect. Lines of filler are not
# quite equal in tokens; who cuts a prompt loses far more than that.
COUNT_TOLERANCE = 0.02
COUNT_SLACK_TOKENS = 16  # on top of it: of a short prompt that share is nothing
LEAST_LINE_TOKENS = 4.0  # a node that counts fewer a line counts wrongly
QUICK_SECONDS = 5.0  # the longest prompt may take, with --quick
ANSWER_TOKENS = 512
THINKING_TOKENS = 2048  # for who thinks before it answers


class Question(Record):
    """What a trial asks of a model, and what to expect of a prompt that is to be counted."""

    talk: Talk
    lines: int = 0  # of filler in it
    tokens: int = 0  # it should have by the node's earlier counts
    context: int = 0  # of the route
    loaded: int = 0  # the context the node says it holds; 0: it does not say
    word: str = ""  # that stands at the very beginning


class Answer(Record):
    """What a model answered to a question, and when; or why it did not."""

    question: Question
    text: str = ""
    thoughts: str = ""
    calls: tuple[Call, ...] = ()
    end: End = End("")
    first_seconds: float = 0.0  # to its first word, by our clock
    seconds: float = 0.0
    refusal: Refusal | None = None
    failure: str = ""  # of the node, which lives on

    @property
    def missing(self) -> str:
        """Why there is none, or an empty string."""
        if self.refusal:
            words = re.sub(r"^node \S+, model \S+: ", "", self.refusal.what)
            return f"refused: {words}"
        return self.failure


class Subject(Record):
    """A model under trial, and what is known of it by now."""

    model: Model
    seed: str = ""  # makes prompts new to the node, whatever it has cached
    is_quick: bool = False
    loaded: int = 0
    prompt_rate: float | None = None
    fills: tuple[tuple[int, int], ...] = ()  # (lines of filler, tokens the node counted)

    @property
    def room(self) -> int:
        """The tokens that a prompt which fills the context leaves to the answer."""
        answer = 64  # the code word, and politeness around it
        if self.model.thinking:
            answer += THINKING_TOKENS
        # A small context is not given away to the answer; a fiftieth is what
        # counts may be off.
        return min(answer, self.model.context // 4) + self.model.context // 50

    def count_lines(self, tokens: int) -> int:
        """Return how many lines of filler make a prompt of so many tokens, in full rounds."""
        base, per_line = self._count()
        rounds = int((tokens - base) / per_line) // len(FILLER)
        return min(max(rounds, 1) * len(FILLER), FILLER_LINES_LIMIT)

    def count_tokens(self, lines: int) -> int:
        """Return the tokens of a prompt with so many lines, as the node's counts suggest."""
        base, per_line = self._count()
        return round(base + per_line * lines)

    def _count(self) -> tuple[float, float]:
        """Return the tokens of a prompt without filler, and those of one line."""
        # Two counts make a line: its slope is what a line costs, wherever it begins. The
        # first and the last lie the farthest apart, so an odd token in one of them
        # matters least.
        counts = dict(self.fills or ((1, FILLER_BASE_TOKENS + FILLER_LINE_TOKENS),))
        if len(counts) == 1:
            counts = {0: FILLER_BASE_TOKENS, **counts}
        first, last = min(counts), max(counts)
        per_line = (counts[last] - counts[first]) / (last - first)
        per_line = max(per_line, LEAST_LINE_TOKENS)
        return counts[last] - per_line * last, per_line


class Trial(Record):
    """A row: what is asked of a model, what is measured at the answer, who judges it."""

    topic: str  # speed, tools or context
    name: str
    ask: Callable[[Subject], Question | None]  # None: this model is not asked
    judges: tuple[Callable[[Answer], str], ...] = ()  # "": right, else what it is instead
    speeds: tuple[str, ...] = ()  # fields of a Measurement that the answer tells
    is_quick: bool = True  # asked with --quick, too

    @property
    def title(self) -> str:
        return f"{self.topic}: {self.name}"


def ask_about(subject: Subject, *turns: Turn | str, **more: Any) -> Question:
    """Return a question of these turns; the same has the same answer, as far as models go."""
    tokens = more.pop("tokens", ANSWER_TOKENS)
    if subject.model.thinking:
        tokens += THINKING_TOKENS
    talk = Talk(subject.model.alias, tuple(
        Turn("user", texts=(turn,)) if isinstance(turn, str) else turn for turn in turns),
        max_tokens=tokens, sampling={"temperature": 0.0}, is_stream=True, **more)
    return Question(talk, context=subject.model.context, loaded=subject.loaded)


FILLER_BASE_TOKENS = 60.0  # of a prompt without filler, until the node has counted some
FILLER_LINE_TOKENS = 20.0


def fill_prompt(subject: Subject, lines: int, number: int, *, extra: int = 0,
          wish: str = "Answer with that word alone.") -> Question:
    """Return a question about a word at the very beginning, so many lines before.

    The word stands in a turn of its own: who cuts a talk drops its first turns.
    """
    word = CODE_WORDS[number % len(CODE_WORDS)]
    text = "\n".join(FILLER * (lines // len(FILLER))) + " x" * extra
    question = ask_about(subject, f"Run {subject.seed}-{number}. The code word is {word}.",
                    Turn("assistant", texts=("Noted.",)),
                    f"{text}\n\nWhat is the code word? {wish}", tokens=48)
    return replace(question, lines=lines, word=word,
                   tokens=subject.count_tokens(lines) + extra)


def ask_to_load_model(subject: Subject) -> Question:
    return fill_prompt(subject, len(FILLER), 0)


CODE_WORDS = ("KESTREL", "MARBLE", "TUNDRA", "SAFFRON", "LANTERN")
# A round of lines, each of its own tokens whatever stands before it.
FILLER = (
    "The morning train to the coast was late again, so the meeting began without the engineers.",
    "In the second drawer there are four pencils, a ruler and the receipt for the blue lamp.",
    "Nobody had opened the west gate since the storm, and the path behind it was full of leaves.",
    "The report says that the pumps ran for nine hours and that the water fell by half a metre.",
    "She counted the boxes twice, wrote the number on the wall and closed the door behind her.",
    "A cook from the harbour sold soup on the stairs, with bread when there was any left.",
    "The old map shows a bridge where today there is only a row of stones in the river.",
    "At noon the office sent a note that the lift would be repaired on the following Tuesday.")
