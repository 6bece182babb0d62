"""From alias to machines: routes, tiers, fallbacks, and the state of each."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.config.names import billions, find_models
from fleet.config.node import NodeModel
from fleet.plan.roles import MAIN_JOB, ROLES
from fleet.start.constants import TIERS
from fleet.start.record import Record
from fleet.text.phrases import count_of, join_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from fleet.config.node import LoadedModel, NodeState
    from fleet.config.sections import Fleet, Model


def plan_routes(fleet: Fleet) -> dict[str, Model]:
    """Return {agent name: its Model}, which knows its alias and its node."""
    return {agent.name: fleet.models[agent.model] for agent in fleet.agents.values()}


def models_by_alias(fleet: Fleet) -> dict[str, list[Model]]:
    """Return {alias: the models that share it}."""
    sharing: dict[str, list[Model]] = {}
    for model in fleet.models.values():
        sharing.setdefault(model.alias, []).append(model)
    return sharing


def show_machines(model: Model, models: Iterable[Model]) -> str:
    """Return where a model's work is done: on any of the machines that share its alias."""
    nodes = list(dict.fromkeys(other.node for other in models if other.alias == model.alias))
    return model.node if len(nodes) == 1 else f"{join_words(nodes, 'or')} (shared)"


def plan_jobs(fleet: Fleet) -> dict[str, Model]:
    """Return {job: its Model}: the main session, then all agents."""
    return {MAIN_JOB: fleet.models[plan_tiers(fleet)["main"]], **plan_routes(fleet)}


def agents_by_alias(fleet: Fleet) -> dict[str, list[str]]:
    """Return {alias: the agents whose model has it}."""
    agents: dict[str, list[str]] = {}
    for agent, model in plan_routes(fleet).items():
        agents.setdefault(model.alias, []).append(agent)
    return agents


def plan_tiers(fleet: Fleet) -> dict[str, str]:
    """Return {tier: model name} for the main session and Claude Code's four tiers.

    What the file gives, else the largest model whose alias names the tier, else the model of
    the tier's role (haiku: planner, summarizer; others: implementer, reviewer), else by size.
    """
    by_size = sorted(fleet.models.values(),
                     key=lambda model: (billions(model.ollama_model), model.context))
    return {tier: fleet.claude.get(tier) or _plan_tier(fleet, tier, by_size)
            for tier in TIERS}


def _plan_tier(fleet: Fleet, tier: str, by_size: Sequence[Model]) -> str:
    """Return the model of a tier that the file does not give."""
    namesakes = [model for model in by_size
                 if tier in re.split("[^a-z]+", model.alias.lower())]
    if namesakes:
        return namesakes[-1].name

    size = "small" if tier == "haiku" else "heavy"
    for name, role in ROLES.items():
        if role.size == size and name in fleet.agents:
            return fleet.agents[name].model

    sized = by_size[0] if size == "small" else by_size[-1]
    return sized.name


def plan_fallbacks(fleet: Fleet) -> dict[str, list[str]]:
    """Return {alias: [aliases to try next]}; one alias never falls back on itself."""
    chains = {}
    for alias, models in models_by_alias(fleet).items():
        heirs = [fleet.models[name].alias for model in models for name in model.fallback]
        chain = [heir for heir in dict.fromkeys(heirs) if heir != alias]
        if chain:
            chains[alias] = chain
    return chains


class NextStep(Record):
    """What is true of a fleet now, and the one thing to do next."""

    is_ready: bool = True  # every model is
    what: str = ""  # what to do; of a ready fleet, what is still missing
    ready: str = "all models are loaded"

    def __str__(self) -> str:
        if not self.is_ready:
            return self.what
        return f"Ready, but {self.what}" if self.what else f"Ready: {self.ready}."


ALL_LOADED = NextStep()

ROUTE_STATES = ("node offline", "model missing", "cold", "ready")  # the worst first


class RouteState(Record):
    """The state of a model's route now, and its fallback while it is not ready."""

    state: str  # one of ROUTE_STATES
    loaded: LoadedModel | None = None
    fallback: str | None = None  # a model's name


def plan_route_state(fleet: Fleet, states: Mapping[str, NodeState],
                     model: Model) -> RouteState:
    """Return the RouteState of a model; ready means that no request is known to load it."""
    node = states[model.node]
    if not _can_answer(states, model):
        state = "model missing" if node.online else "node offline"
        return RouteState(state, fallback=_plan_substitute(fleet, states, model))

    resident = find_resident(node, model)
    if resident and fits_context(node.provider, resident.context, model.context):
        return RouteState("ready", resident)
    if model.cloud or not node.tells_loaded:
        return RouteState("ready")
    return RouteState("cold", resident)


def plan_route_states(fleet: Fleet, states: Mapping[str, NodeState]) -> dict[str, RouteState]:
    """Return how ready each model is on its node."""
    return {name: plan_route_state(fleet, states, model)
            for name, model in fleet.models.items()}


def find_resident(node: NodeState, model: Model) -> LoadedModel | None:
    """Return a loaded model: with its route's context, else with another, or None."""
    loaded = find_models(node.loaded, model.ollama_model)
    for resident in loaded:
        if fits_context(node.provider, resident.context, model.context):
            return resident
    return loaded[0] if loaded else None


def fits_context(provider: str, loaded: int, wanted: int) -> bool:
    """Tell whether a model loaded with one context serves a route with another."""
    if provider == "ollama":  # which loads it again for any other
        return loaded in (0, wanted)  # 0: before Ollama 0.10
    return loaded == 0 or loaded >= wanted


def _can_answer(states: Mapping[str, NodeState], model: Model) -> bool:
    """Tell whether a model's node is there and has it."""
    node = states[model.node]
    return node.online and (model.cloud or bool(find_models(node.models, model.ollama_model)))


def _plan_substitute(fleet: Fleet, states: Mapping[str, NodeState],
                     model: Model) -> str | None:
    """Return the name of the first that answers instead: a fallback, or one of its alias."""
    others = [fleet.models[name] for name in model.fallback]
    others += [twin for twin in fleet.models.values() if twin.alias == model.alias]
    for other in others:
        if other is not model and _can_answer(states, other):
            return other.name
    return None


def held_model(model: Model, state: NodeState) -> NodeModel:
    """Return a model as its node has it; where it does not, one of which nothing is known."""
    matches = find_models(state.models, model.ollama_model)
    return matches[0] if matches else NodeModel("")


def count_ready(routes: Mapping[str, RouteState]) -> str:
    """Return `1 of 2 models ready`."""
    ready = [name for name, route in routes.items() if route.state == "ready"]
    return f"{len(ready)} of {count_of(routes, 'model')} ready"
