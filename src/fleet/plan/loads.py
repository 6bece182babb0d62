"""Which models a machine will hold, and how to say that."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.config.names import model_slot
from fleet.config.node import NodeModel
from fleet.plan.memory import plan_gigabytes, plan_prompt_cache, plan_warm
from fleet.plan.routes import held_model, plan_jobs
from fleet.start.record import Record
from fleet.text.phrases import count_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from fleet.config.node import NodeState
    from fleet.config.sections import Fleet, Model


class Load(Record):
    """A model as it will be in memory on its node, and the agents that share it."""

    model: Model  # of those that use it, the one that takes the most
    held: NodeModel | None  # as the node has it; None: the node did not say
    users: tuple[str, ...] = ()  # the main session and agents
    cache_gb: float = 0.0
    why: str = ""  # of one that is only planned

    @property
    def context(self) -> int:
        if self.held is None:  # by its name alone: a guess of both would cry wolf
            return 0
        return min(self.model.context, self.held.trained_context or self.model.context)

    @property
    def gigabytes(self) -> float:
        held = self.held or NodeModel(self.model.ollama_model)
        return plan_gigabytes(held, self.context, self.model.max_parallel)

    @property
    def warm(self) -> int | None:
        """How many conversations as long as its context stay warm; None: not known."""
        if self.held is None:
            return None
        return plan_warm(self.held, self.context, self.model.max_parallel, self.cache_gb)


def plan_loads(fleet: Fleet, state: NodeState) -> list[Load]:
    """Return what a node will hold, each model once, without missing models."""
    jobs = plan_jobs(fleet)
    cache_gb = plan_prompt_cache(state, fleet.nodes[state.name].cache_gb)
    loads: dict[str, Load] = {}
    for model in fleet.models.values():
        if model.node != state.name or model.cloud:
            continue
        held = held_model(model, state) if state.online else None
        if held and (held.remote or not held.name):
            continue
        place = model_slot(model)
        users = tuple(job for job, used in jobs.items() if model_slot(used) == place)
        load = Load(model, held, users, cache_gb)
        loads[place[1]] = max(load, loads.get(place[1], load),
                              key=lambda load: load.gigabytes)
    return list(loads.values())


def list_loads(fleet: Fleet, states: Mapping[str, NodeState]) -> list[Load]:
    """Return what all nodes that answer will hold."""
    return [load for state in states.values() if state.online
            for load in plan_loads(fleet, state)]


def report_load(load: Load) -> dict[str, Any]:
    """Return a load as JSON has it."""
    return {"node": load.model.node, "model": load.model.ollama_model,
            "context": load.context, "gigabytes": round(load.gigabytes, 2),
            "agents": load.users, "warm": load.warm}


def describe_load(load: Load, memory: float | None = None) -> str:
    """Return the memory counted for a model, and how many agents it keeps warm."""
    model = load.model
    held = load.held or NodeModel(model.ollama_model)
    weights = plan_gigabytes(held, 0, 0)
    text = (f"{model.node}: {model.ollama_model} takes {weights:.1f} GB, and "
            f"{load.gigabytes - weights:.1f} GB for {load.context:,} tokens")
    if not held.token_bytes:
        text += " (a guess)"
    if memory:
        text += f", of {memory:g} GB"
    return f"{text}. {describe_warm(load)}".rstrip()


def describe_warm(load: Load) -> str:
    """Return how many agents a model keeps warm, and how many there are; "" if unknown."""
    if load.warm is None or not load.users:
        return ""
    agents = count_of(range(load.warm), "agent")
    return (f"{load.model.node} keeps {agents} of {load.context:,} tokens warm; "
            f"{len(load.users)} configured.")
