"""Which model on which machine could do a job, and how well."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.config.names import full_model_name
from fleet.plan.measured import latest_measurements
from fleet.plan.memory import BYTES_A_BILLION, LARGEST_MODEL_BYTES, parameters_of
from fleet.plan.rating import ABLE, rate_model
from fleet.start.gate import LatePattern
from fleet.start.record import Record, replace

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fleet.config.node import NodeModel, NodeState
    from fleet.plan.measured import ExamScore, Measurement
    from fleet.plan.rating import Rating


PLANNING_BILLIONS = 7.0  # a smaller model plans and sums up only where no other is free
CODER_FACTOR = 1.25  # a coder comes before a general model of its size
THINKER_FACTOR = 0.9  # and one that thinks comes after it: here it is asked not to

CONTEXT_STEP = 4096
CODER_NAME = LatePattern("cod(?:er|e[^a-z]|estral)|devstral")
_ACTIVE = LatePattern(r"a(\d+(?:\.\d+)?)b(?![a-z])")
_MAKER = LatePattern("(?:.*/)?([a-z]+)")
_MAKERS = {"devstral": "mistral", "codestral": "mistral", "magistral": "mistral",
           "mixtral": "mistral", "ministral": "mistral", "codellama": "llama",
           "codegemma": "gemma", "qwq": "qwen"}


class Candidate(Record):
    """A model on a node that could do something, and how well."""

    node: str
    model: NodeModel
    size: float  # billions of parameters, about
    strength: float  # its size, and a bit more for a coder
    rating: Rating
    context: int  # it was trained for, or held when it was measured; 0: not told
    rate: float = 0.0  # tokens a second that were measured
    exam: ExamScore | None = None
    beats: tuple[str, ...] = ()  # models, in the exam

    @property
    def place(self) -> tuple[str, str]:
        return self.node, full_model_name(self.model.name)

    @property
    def calls_tools(self) -> bool:
        return self.rating.score >= ABLE - 1

    @property
    def order(self) -> tuple[float, int, str, str]:
        return -self.strength, -self.model.size, self.node, self.model.name

    @property
    def slowness(self) -> float:
        """How much of it works for each token, in billions of parameters."""
        match = _ACTIVE.search(self.model.name.lower())  # of a mixture
        return float(match[1]) if match else self.size

    def holds(self, tokens: int) -> bool:
        """Tell whether it was trained for so much context; unknown counts as yes."""
        return not self.context or self.context >= tokens


def plan_candidate(node: str, model: NodeModel, measurement: Measurement | None = None
                   ) -> Candidate:
    """Return a model with its facts and measurements."""
    context = model.trained_context or 0
    calls_tools = None
    rate = 0.0
    exam = None
    if measurement and measurement.is_of(model):
        exam = measurement.exam
        rate = measurement.answer_rate or 0.0
        calls_tools = not measurement.instead if measurement.tools else None
        if measurement.context and not measurement.context.is_full:
            # What it was asked with was cut or refused, so it holds less, whatever it was
            # trained for. How much less was not measured: half is a guess.
            context = min(context or measurement.tokens, measurement.tokens) // 2
    rating = rate_model(replace(model, trained_context=context), calls_tools)
    size = plan_size(model)
    return Candidate(node, model, size, plan_strength(model, size), rating, context, rate,
                     exam)


def plan_size(model: NodeModel) -> float:
    """Return about how many billions of parameters a model has."""
    return parameters_of(model) or min(model.size, LARGEST_MODEL_BYTES) / BYTES_A_BILLION


def plan_strength(model: NodeModel, size: float) -> float:
    """Return the assumed score of a model of this size before it is measured."""
    if CODER_NAME.search(model.name.lower()):
        size *= CODER_FACTOR
    if "thinking" in (model.capabilities or ()):
        size *= THINKER_FACTOR
    return size


def plan_candidates(states: Iterable[NodeState], measured: Iterable[Measurement] = ()
                    ) -> list[Candidate]:
    """Return all that the nodes have, the strongest first."""
    latest = latest_measurements(measured)
    candidates = [plan_candidate(state.name, model,
                                 latest.get((state.endpoint, full_model_name(model.name))))
                  for state in states for model in state.models]
    return sorted(rank_by_exam(candidates), key=lambda candidate: candidate.order)


def rank_by_exam(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return models, each stronger than those it beats in an exam, whatever their sizes."""
    def least_share(candidate: Candidate) -> float:
        return candidate.exam.interval[0] if candidate.exam else 0.0

    ranked: list[Candidate] = []
    for candidate in sorted(candidates, key=least_share):  # beaten ones come first
        beaten = [other for other in ranked
                  if candidate.exam and candidate.exam.beats(other.exam)]
        best = max((other.strength for other in beaten), default=0.0)
        ranked.append(replace(candidate, strength=max(candidate.strength, best * 1.01),
                              beats=tuple(other.model.name for other in beaten)))
    return ranked


def choose_best(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the best kind: they call tools and hold the prompt. None that will not do."""
    best = max((candidate.rating.score for candidate in candidates), default=0)
    return [candidate for candidate in candidates if candidate.rating.score == best > 0]


def rank_models(state: NodeState) -> list[Candidate]:
    """Return a node's models of the best kind, the strongest first."""
    return choose_best(plan_candidates([state]))


def maker_of(model: NodeModel) -> str:
    """Return the maker of a model, from its name: two of one maker make similar mistakes."""
    match = _MAKER.match(model.name.lower())
    word = match[1] if match else model.name
    return _MAKERS.get(word, word)
