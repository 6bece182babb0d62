"""What `init`, `worker` and `add` propose."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.config.address import ADDRESS_KINDS, address_kind
from fleet.config.keys import keys_of
from fleet.config.names import free_name_of, full_model_name, make_name, model_slot
from fleet.config.sections import Agent, Model, Node
from fleet.plan.assignment import plan_assignment, unique_alias
from fleet.plan.candidates import rank_models
from fleet.plan.memory import NOTE_START, STARTER_MODELS
from fleet.plan.roles import LEAST_CONTEXT_TOKENS, MAIN_CONTEXT_TOKENS, MAIN_JOB, ROLES
from fleet.start.constants import CLAUDE_ENDPOINT, OLLAMA_ENDPOINT
from fleet.start.record import Record, replace
from fleet.text.phrases import join_words

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from typing import Any

    from fleet.config.node import NodeModel, NodeState
    from fleet.config.sections import Fleet
    from fleet.plan.assignment import Assignment
    from fleet.plan.measured import Measurement


# -- what `init` proposes --


def file_keys(record: Record, *shown: str) -> dict[str, Any]:
    """Return a section's keys in a fleet file: those not as usual, and those to show."""
    entry = {}
    for name, key in keys_of(type(record)).items():
        value = getattr(record, key.name)
        if value != key.default or name in shown:
            entry[name] = list(value) if isinstance(value, tuple) else value
    return entry


class Starter(Record):
    """What `init` writes."""

    tree: dict[str, dict[str, Any]]  # `nodes`, `models` and `agents` by name; `claude`
    assignment: Assignment  # without placements, the models are placeholders

    @property
    def has_models(self) -> bool:
        return bool(self.assignment.placements)

    @property
    def flaw(self) -> str:
        return self.assignment.flaw

    @property
    def notes(self) -> dict[str, str]:
        """What the file says above each model."""
        notes = {}
        for load in self.assignment.placements:
            reasons: dict[str, list[str]] = {}
            for job in load.users:
                if job in self.assignment.jobs:
                    reasons.setdefault(self.assignment.why[job], []).append(job)
            notes[load.model.name] = " ".join(
                f"{NOTE_START}{join_words(jobs) or 'no role of its own'}: {why}."
                for why, jobs in (reasons or {load.why: []}).items())
        return notes


def plan_starter(states: Sequence[NodeState], measured: Iterable[Measurement] = (),
                 memory: Mapping[str, float] | None = None,
                 known: Collection[Model] = ()) -> Starter:
    """Return the fleet for an assignment."""
    assignment = plan_assignment(states, measured, memory, known)
    nodes = _starter_nodes(states, memory or {})
    models = [load.model for load in assignment.placements]
    if not models:
        first, *_, last = (*nodes, *nodes)
        heavy, small = STARTER_MODELS.values()
        others = len(nodes) > 1
        models = [replace(heavy, node=last, fallback=(small.name,) * others),
                  replace(small, node=first, fallback=(heavy.name,) * others)]
    agents = {}
    for name, role in ROLES.items():
        model = assignment.jobs.get(name) or STARTER_MODELS[role.size].name
        agents[name] = file_keys(Agent(name, model, role.description, role.tools))
    entries = {model.name: file_keys(model, "context", "timeout", "max_parallel")
               for model in models}
    return Starter({"nodes": nodes, "models": entries, "agents": agents}, assignment)


CLAUDE_MODELS = {"claude-opus": "claude-opus-5-5", "claude-sonnet": "claude-sonnet-5-5"}


def plan_hybrid(starter: Starter) -> Starter:
    """Return a fleet with a person's own Claude for the main session."""
    node = free_name_of("anthropic", "cloud", taken=set(starter.tree["nodes"]))
    nodes = {**starter.tree["nodes"], node: file_keys(
        Node(node, CLAUDE_ENDPOINT, provider="anthropic", auth="client"))}
    models = dict(starter.tree["models"])
    for name, model in CLAUDE_MODELS.items():
        models[name] = file_keys(Model(name, node, model, model, 200_000, timeout=600,
                                       max_parallel=8, max_output=64_000, cloud=True))
    opus, sonnet = CLAUDE_MODELS
    local = starter.tree["agents"]["summarizer"]["model"]
    tiers = {"main": opus, "opus": opus, "sonnet": sonnet, "haiku": local, "fable": opus}
    # The main session is not among what the machines do.
    jobs = {job: name for job, name in starter.assignment.jobs.items() if job != MAIN_JOB}
    return Starter({**starter.tree, "nodes": nodes, "models": models, "claude": tiers},
                   replace(starter.assignment, jobs=jobs))


def _starter_nodes(states: Sequence[NodeState], memory: Mapping[str, float]
                   ) -> dict[str, dict[str, Any]]:
    """Return the nodes to write: all but this machine where only others answered."""
    anybody = any(state.online for state in states)
    nodes = {}
    for state in states:
        is_unasked = (state.name, state.endpoint) == ("local", OLLAMA_ENDPOINT)
        if state.online or not anybody or not is_unasked:
            node = Node(state.name, state.endpoint, memory_gb=memory.get(state.name),
                        provider=state.provider)
            nodes[state.name] = file_keys(node, "tags")
    return nodes


PLACEHOLDERS_MARK = "# Placeholders: write in what `ollama list` shows.\n"


# -- what `worker` proposes --


def plan_worker_block(name: str, state: NodeState,
                      reached: Iterable[NodeState]) -> dict[str, dict[str, Any]]:
    """Return the `nodes:` and `models:` to paste of a worker, `reached` at its addresses."""
    worker = replace(state, name=make_name(name.split(".")[0], "worker"),
                     endpoint=_best_endpoint(name, state, reached))
    models = [load.held for load in plan_assignment([state]).placements if load.held]
    return plan_addition((), worker, models)


def _best_endpoint(name: str, state: NodeState, reached: Iterable[NodeState]) -> str:
    """Return the address to write: one that answers, of the kind that is preferred."""
    def preference(place: NodeState) -> tuple[bool, int, str]:
        return not place.online, ADDRESS_KINDS.index(address_kind(place.name)), place.endpoint

    places = sorted(reached, key=preference)
    return places[0].endpoint if places else state.endpoint.replace("127.0.0.1", name)


# -- what `add` proposes --


def plan_addition(known: Collection[Model], state: NodeState,
                  models: Iterable[NodeModel]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the `nodes:` and `models:` to add to the models that are known.

    What the fleet serves already shares its alias.
    """
    added: list[Model] = []
    for held in models:
        others = [*known, *added]
        name = free_name_of(make_name(re.sub(":latest$", "", held.name), "model"), state.name,
                          taken={other.name for other in others})
        context = min(held.trained_context or MAIN_CONTEXT_TOKENS, MAIN_CONTEXT_TOKENS)
        model = Model(name, state.name, held.name, unique_alias(held, state.name, others),
                      max(LEAST_CONTEXT_TOKENS, context))
        twin = next((other for other in known
                     if model_slot(other)[1] == full_model_name(held.name)), None)
        if twin:
            model = replace(model, alias=twin.alias, context=twin.context,
                            timeout=twin.timeout)
        added.append(model)
    node = Node(state.name, state.endpoint, provider=state.provider)
    return {"nodes": {state.name: file_keys(node)},
            "models": {model.name: file_keys(model, "context") for model in added}}


def plan_added_models(fleet: Fleet, state: NodeState) -> list[NodeModel]:
    """Return the models that `add` takes unasked: those of the fleet, and the strongest."""
    known = {full_model_name(model.ollama_model) for model in fleet.models.values()}
    ranked = [candidate.model for candidate in rank_models(state)]
    chosen = [model for model in ranked if full_model_name(model.name) in known]
    return chosen + [model for model in ranked[:1] if model not in chosen]
