"""Findings on machines: whether they answer, are exposed, and have enough memory."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.config.address import address_kind
from fleet.config.node import NodeState
from fleet.findings.checks import FIND_ROOM, check, locate_key, warn
from fleet.findings.config import plan_prompt_tokens
from fleet.plan.loads import describe_load, plan_loads
from fleet.plan.memory import plan_fitting_context, plan_kept_gigabytes
from fleet.plan.roles import MAIN_CONTEXT_TOKENS, SMALL_CONTEXT_TOKENS
from fleet.plan.routes import find_resident, plan_route_state
from fleet.start.errors import Finding
from fleet.text.phrases import count_of, join_words, some_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fleet.config.sections import Fleet
    from fleet.findings.checks import Facts
    from fleet.plan.loads import Load


@check("Machines", "nodes")
def check_nodes_answer(fleet: Fleet, facts: Facts) -> Iterator[Finding]:
    """Report each node: its answer, or why there is none and which models have no fallback."""
    for state in facts.states.values():
        if state.online:
            yield Finding("node-online", "ok", f"{state.name}: {state.runs} at "
                          f"{state.endpoint}, {count_of(state.models, 'model')}")
            continue

        models = [model for model in fleet.models.values() if model.node == state.name]
        alone = [model.name for model in models
                 if not plan_route_state(fleet, facts.states, model).fallback]
        what = f"{state.name}: no answer at {state.endpoint} ({state.why})"
        if alone:
            what += f"; no other machine can answer for {join_words(alone)}"
        yield Finding("node-offline", "error" if alone else "warning", what,
                      fix=state.fix_from_afar)


@check("Machines", "nodes")
def check_exposure(fleet: Fleet, facts: Facts) -> Iterator[Finding]:
    """Warn of nodes that the internet may reach."""
    for name, addresses in facts.addresses.items():
        for address in addresses:
            is_named = address in fleet.nodes[name].endpoint  # then the file has a warning
            if address_kind(address) == "public" and not is_named:
                yield public_address(name, address, "warning")


def public_address(who: str, address: str, level: str) -> Finding:
    """Return the Finding on a machine that the internet may reach."""
    return Finding("public-address", level, f"{who}: the internet may reach it at {address}",
                   fix="close its port to the internet; use a LAN, Tailscale or WireGuard "
                       "address")


@check("Machines", "nodes")
def check_room(fleet: Fleet, facts: Facts) -> Iterator[Finding]:
    """Report each model's expected and measured memory, and how many agents stay warm."""
    for state in facts.states.values():
        for load in plan_loads(fleet, state):
            if load.held is None or load.warm is None:
                continue
            what = describe_load(load, fleet.nodes[state.name].memory_gb)
            resident = find_resident(state, load.model)
            if resident and resident.size and resident.context == load.context:
                what += f" Measured: {resident.size / 1e9:.1f} GB in all."
            if load.warm >= len(load.users) or state.provider not in ("ollama", "llamacpp"):
                yield Finding("room", "ok", what)
                continue
            # In whole GiB, as its server counts, and a little more for its own records.
            wanted = len(load.users) - load.model.max_parallel + 1
            cache = 1.02 * wanted * plan_kept_gigabytes(load.held, load.context)
            gibibytes = int(cache * 1e9 / 2**30) + 1
            yield Finding("few-warm", "info", what,
                          locate_key(fleet, "models", load.model.name, "context"),
                          fix=f"if {state.name} has the memory, set `LLAMA_ARG_CACHE_RAM="
                          f"{gibibytes * 1024}` for its server, and write `cache_gb: "
                          f"{gibibytes * 2**30 / 1e9:.1f}` under nodes.{state.name}")


@check("Machines", "file")
def check_memory(fleet: Fleet, facts: Facts) -> Iterator[Finding]:
    """Warn of models larger than their machine, then of models that evict each other."""
    for name, node in fleet.nodes.items():
        state = facts.states.get(name) or NodeState(name, node.endpoint, "not asked")
        memory = node.memory_gb or float("inf")
        loads = plan_loads(fleet, state)
        for load in loads:
            if load.gigabytes > memory:
                yield _name_large_model(fleet, load)

        fitting = [load for load in loads if load.gigabytes <= memory]
        need = sum(load.gigabytes for load in fitting)
        is_spilled = any(0 < (loaded.gpu_percent or 0) < 100 for loaded in state.loaded)
        if len(fitting) > 1 and (is_spilled or need > memory):
            names = some_of([load.model.ollama_model for load in fitting], 5)
            yield warn(fleet, "memory-short", ("nodes", name, "memory_gb"),
                       what=f"{names} need about {need:.0f} GB and evict each other",
                       fix=FIND_ROOM)


def _name_large_model(fleet: Fleet, load: Load) -> Finding:
    """Return the Finding on a model that does not fit its machine, even alone."""
    model = load.model
    memory = fleet.nodes[model.node].memory_gb or 0
    key = model.name_key
    what = f"by its name, {model.ollama_model} needs"
    fix = FIND_ROOM
    if load.held:
        key = "context"
        what = f"{model.ollama_model} with a context of {model.context:,} needs"
        least = (MAIN_CONTEXT_TOKENS if plan_prompt_tokens(fleet)[model.name]
                 else SMALL_CONTEXT_TOKENS)
        context = plan_fitting_context(load.held, memory, model.max_parallel)
        if context >= least:
            fix = f"write `context: {context}`"
    return warn(fleet, "model-too-large", ("models", model.name, key),
                what=f"{what} about {load.gigabytes:.0f} GB; {model.node} has {memory:g}",
                fix=fix)
