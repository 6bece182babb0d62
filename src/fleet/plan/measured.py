"""The file of measurements: speeds, exam scores, failed answers."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.config.names import full_model_name
from fleet.config.rules import key
from fleet.start.constants import STATE_DIRECTORY
from fleet.start.record import Record, replace
from fleet.text.json import read_page

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from fleet.config.node import NodeModel


# `bench` keeps what it measured in BENCH_FILE. The file may lie in anybody's directory: it
# is read as data, bounded in everything, and a measurement speaks of no machine but that
# of its endpoint.

BENCH_FILE = f"{STATE_DIRECTORY}/bench.json"
MEASUREMENTS_LIMIT = 1_000
MEASURED_TEXT_LIMIT = 4_000  # characters of an answer that is kept for reading


class Score(Record):
    """How many trials a model passed, and what it did instead in the others."""

    passed: int
    asked: int
    instead: str = ""

    def _check(self) -> None:
        if not 0 <= self.passed <= self.asked or not self.asked:
            raise ValueError("no score")

    @property
    def is_full(self) -> bool:
        return self.passed == self.asked

    @property
    def share(self) -> float:
        return self.passed / self.asked


class ExamScore(Record):
    """How a model did in the exam that is made of a repository's own fixes."""

    passed: int
    asked: int
    questions: int  # that were asked, each perhaps several times
    repository: str  # a digest of where it is

    def _check(self) -> None:
        if not 0 <= self.passed <= self.asked or not 0 < self.questions <= self.asked:
            raise ValueError("no score")

    @property
    def interval(self) -> tuple[float, float]:
        """Between which shares the true one is, with 95 % confidence (Wilson).

        A question that is asked again tells of the model's luck, not of other questions. So
        it is the questions that count.
        """
        share, count, z = self.passed / self.asked, self.questions, 1.96
        center = share + z * z / (2 * count)
        reach = z * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5
        whole = 1 + z * z / count
        return max(0.0, (center - reach) / whole), min(1.0, (center + reach) / whole)

    def beats(self, other: ExamScore | None) -> bool:
        """Tell whether it beats another in the same exam by more than luck."""
        return bool(other and self.repository == other.repository
                    and self.interval[0] > other.interval[1])


def tell_apart(scores: Mapping[str, ExamScore | None]
               ) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each model, those it beats, and those below that nothing tells apart from it."""
    asked = {name: score for name, score in scores.items() if score}
    for place, (name, score) in enumerate(asked.items()):
        beaten = [other for other in asked if score.beats(asked[other])]
        yield name, beaten, [other for other in [*asked][place + 1:] if other not in beaten
                             and not asked[other].beats(score)]


class FailedAnswer(Record):
    """An answer that did not pass its trial, kept for a person to read."""

    trial: str
    why: str
    answer: str


class Measurement(Record):
    """Measurements of a model on a machine; None: not measured or not known."""

    node: str = key("line")
    endpoint: str = key("line")
    model: str = key("line")  # as the node calls it
    date: str = ""  # of the day and hour, UTC: 2026-11-18T14:05:02Z
    tokens: int = 0  # the context it was asked with
    load_seconds: float | None = None  # 0.0: it was loaded
    prompt_rate: float | None = None  # tokens a second, of a prompt of 1,000
    long_prompt_rate: float | None = None  # of one that fills half the context
    answer_rate: float | None = None
    first_token_seconds: float | None = None  # when warm, the beginning of the prompt cached
    is_counted: bool = True  # the rates are from the node's own counters; else by the clock
    tools: Score | None = None
    context: Score | None = None
    exam: ExamScore | None = None
    digest: str = ""  # of the model, where the node says it
    failed: tuple[FailedAnswer, ...] = ()
    versions: dict[str, str] = {}  # of the node's server, of this program
    failure: str = ""  # why it is not all there: the node's own words

    @property
    def instead(self) -> str:
        """What it did instead of calling tools; nothing if it mostly did or was not asked."""
        if self.tools is None or self.tools.share > 0.5:
            return ""
        return self.tools.instead or "called no tool"

    @property
    def is_worth_keeping(self) -> bool:
        """Tell whether anything was measured."""
        return self.load_seconds is not None or self.exam is not None

    def is_of(self, model: NodeModel) -> bool:
        """Tell whether a node still has this by that name: a tag may be pulled again."""
        return not (self.digest and model.digest) or self.digest == model.digest


class BenchPage(Record):
    """What a bench file holds."""

    measurements: tuple[Measurement, ...] = ()


def parse_measurements(content: bytes | None) -> tuple[Measurement, ...]:
    """Return the measurements that a bench file holds; anything foreign is passed over."""
    page = read_page(BenchPage, content, "bench/1") or BenchPage()
    return page.measurements[:MEASUREMENTS_LIMIT]


def latest_measurements(
        measured: Iterable[Measurement]) -> dict[tuple[str, str], Measurement]:
    """Return {(endpoint, full name of the model): the latest measurement}."""
    return {(known.endpoint, full_model_name(known.model)): known
            for known in sorted(measured, key=lambda known: known.date)}


def find_measurement(measured: Iterable[Measurement], endpoint: str,
                     ollama_model: str) -> Measurement | None:
    """Return the latest measurement of a model at an endpoint."""
    return latest_measurements(measured).get((endpoint, full_model_name(ollama_model)))


def merge_measurements(kept: Iterable[Measurement],
                       new: Iterable[Measurement]) -> tuple[Measurement, ...]:
    """Return measurements in which a new one replaces the old one of its model."""
    merged: dict[tuple[str, str, int], Measurement] = {}
    for known in (*kept, *filter(lambda known: known.is_worth_keeping, new)):
        place = known.endpoint, full_model_name(known.model), known.tokens
        old = merged.get(place)
        if old and old.exam and not known.exam and old.digest == known.digest:
            known = replace(known, exam=old.exam)
        merged[place] = known
    places = sorted(merged.values(),
                    key=lambda known: (known.node, known.model, known.tokens))
    return tuple(places[:MEASUREMENTS_LIMIT])


def is_older(version: str, than: str) -> bool:
    """Tell whether a version is known (0.0.0 is none) and older."""
    numbers, limit = ([int(part) for part in re.findall(r"\d{1,6}", text)[:3]]
                      for text in (version, than))
    return any(numbers) and numbers < limit
