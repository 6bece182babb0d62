"""What `recommend` proposes: the file beside what `init` would write now."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.config.address import host_of, is_private
from fleet.config.names import full_model_name, model_slot
from fleet.config.sections import Model
from fleet.plan.candidates import rank_models
from fleet.plan.measured import latest_measurements, tell_apart
from fleet.plan.rating import rate_model
from fleet.plan.roles import MAIN_CONTEXT_TOKENS
from fleet.plan.routes import plan_jobs
from fleet.plan.starter import plan_starter
from fleet.start.record import Record, replace
from fleet.text.phrases import join_words, quote_shell, some_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from fleet.config.node import NodeState
    from fleet.config.sections import Fleet
    from fleet.plan.assignment import Assignment
    from fleet.plan.measured import Measurement
    from fleet.plan.starter import Starter


class Advice(Record):
    """A job, or a model without one: as the file has it, and as it is planned."""

    job: str  # empty: of a model without one
    now: Model | None
    planned: Model | None
    why: str
    settings: str = ""  # what else would change of a model that stays

    @property
    def is_move(self) -> bool:
        if self.now is None or self.planned is None:
            return True
        return model_slot(self.now) != model_slot(self.planned)

    @property
    def is_change(self) -> bool:
        return self.is_move or bool(self.settings)


class Recommendation(Record):
    """The configured assignment beside the planned one."""

    fleet: Fleet
    silent: tuple[NodeState, ...]  # did not answer: planned without them
    advices: tuple[Advice, ...]
    starter: Starter  # the fleet as it would be
    measured: tuple[Measurement, ...]  # of the models in question
    unknown: tuple[str, ...]  # what is not known, and what tells it

    @property
    def changes(self) -> list[Advice]:
        return [advice for advice in self.advices if advice.is_change]


def plan_recommendation(fleet: Fleet, states: Mapping[str, NodeState],
                        measured: Sequence[Measurement]) -> Recommendation:
    """Return the file beside what `init` would write now, with the evidence."""
    memory = {name: node.memory_gb for name, node in fleet.nodes.items() if node.memory_gb}
    homes = [_keep_home(fleet, state) for state in states.values()]
    starter = plan_starter(homes, measured, memory, fleet.models.values())
    plan = starter.assignment
    silent = tuple(state for state in states.values() if not state.online)
    advices = (*_advise_jobs(fleet, plan), *_advise_others(fleet, plan, silent))

    latest = latest_measurements(measured)
    planned = {model_slot(load.model) for load in plan.placements}
    places = {model_slot(advice.now) for advice in advices if advice.now}
    unmeasured = []
    found = []
    for node, name in sorted(places | planned):
        known = latest.get((fleet.nodes[node].endpoint, name))
        if known:
            found.append(known)
        elif (node, name) in planned:  # what goes needs no measuring
            unmeasured.append((node, name))
    unknown = (*_plan_unknown(fleet, states, unmeasured), *_plan_ties(found))
    return Recommendation(fleet, silent, advices, starter, tuple(found), unknown)


def _keep_home(fleet: Fleet, state: NodeState) -> NodeState:
    """Return a node's models, without cloud models that the file does not name."""
    node = fleet.nodes[state.name]
    is_far = node.provider == "anthropic" or not is_private(host_of(node.endpoint))
    clouds = {model_slot(model): model.cloud for model in fleet.models.values()}
    return replace(state, models=tuple(
        model for model in state.models
        if not clouds.get((state.name, full_model_name(model.name)), is_far)))


def plan_unlisted(fleet: Fleet, state: NodeState) -> list[Model]:
    """Return a machine's own chat models that the file does not name."""
    own = set(map(model_slot, fleet.models.values()))
    models = [Model(held.name, state.name, held.name, held.name,
                    min(held.trained_context or MAIN_CONTEXT_TOKENS, MAIN_CONTEXT_TOKENS))
              for held in _keep_home(fleet, state).models if rate_model(held).score]
    return [model for model in models if model_slot(model) not in own]


def _advise_jobs(fleet: Fleet, plan: Assignment) -> Iterator[Advice]:
    """Yield the present and the planned model of each job."""
    jobs = plan_jobs(fleet)
    for job in plan.jobs:
        now = jobs.get(job)
        if now is None or now.cloud:
            continue  # a cloud is the person's own decision: it is neither judged nor moved
        planned = plan.model(job)
        advice = Advice(job, now, planned, plan.why[job],
                        _list_settings(fleet, plan, now, planned))
        flaw = plan.flaws.get(model_slot(now))
        if advice.is_move and flaw and flaw != plan.flaws[model_slot(planned)]:
            advice = replace(advice, why=f"{now.ollama_model} {flaw}")
        yield advice


def _advise_others(fleet: Fleet, plan: Assignment, silent: Collection[NodeState]
                   ) -> Iterator[Advice]:
    """Yield the models without a job that come, then those that go."""
    offline = {state.name for state in silent}
    own = {model_slot(model): model for model in fleet.models.values()
           if not model.cloud}
    placed = [model_slot(load.model) for load in plan.placements]
    for place, load in zip(placed, plan.placements):
        if not load.users and place not in own:
            yield Advice("", None, load.model, load.why)
    for place, model in own.items():
        if placed and place not in placed:
            flaw = plan.flaws.get(place, "was not found there")
            if model.node in offline:
                flaw = f"{model.node} does not answer"
            elif flaw == plan.flaws[placed[0]]:  # the strongest has it, too
                flaw = ""
            yield Advice("", model, None, flaw or "no role needs it")


def _list_settings(fleet: Fleet, plan: Assignment, now: Model, planned: Model) -> str:
    """Return the changes to a model that stays: its context, its fallbacks."""
    nodes = {load.model.name: load.model.node for load in plan.placements}
    heirs = sorted({nodes[name] for name in planned.fallback})
    old = {fleet.models[name].node for name in now.fallback if not fleet.models[name].cloud}
    words = []
    if now.context != planned.context:
        words.append(f"a context of {planned.context:,}")
    if old != set(heirs):
        words.append(f"a fallback on {join_words(heirs)}" if heirs else "no fallback")
    return join_words(words)


def _plan_unknown(fleet: Fleet, states: Mapping[str, NodeState],
                  unmeasured: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield what a recommendation does not know, and how to find out."""
    narrow = []
    for name, state in states.items():
        if not state.online:
            yield f"{name} does not answer ({state.reason}): planned without it."
        elif not fleet.nodes[name].memory_gb and len(rank_models(state)) > 1:
            narrow.append(name)
    if narrow:
        yield (f"The memory of {join_words(narrow)}. Without `memory_gb:` each machine gets "
               "only one model. Add it, then run `subagent-fleet recommend`.")
    if unmeasured:
        own = set(map(model_slot, fleet.models.values()))
        flags = ""
        if not own.issuperset(unmeasured):  # unasked it measures what the file has
            names = dict.fromkeys(name for _, name in unmeasured)
            flags = "".join(f" --model {quote_shell(name)}" for name in names)
        shown = some_of([f"{name} on {node}" for node, name in unmeasured], 3)
        yield f"Never measured: {shown}. Run `subagent-fleet bench{flags}`."


def _plan_ties(measured: Iterable[Measurement]) -> Iterator[str]:
    """Yield which models did the exam and are neither better nor worse by it than another."""
    scores = {known.model: known.exam for known in measured if known.exam}
    tied: dict[str, None] = {}
    for name, _, ties in tell_apart(scores):
        if ties:
            tied.update(dict.fromkeys((name, *ties)))
    if tied:
        yield (f"Which of {join_words([*tied])} is better: the exam does not tell them apart. "
               "Run `subagent-fleet bench --exam` with more `--questions`.")
