"""Findings on routes: whether each alias has what it needs."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.config.node import kind_title
from fleet.findings.checks import check, fix_for_missing, fix_for_toolless, locate_key
from fleet.findings.config import plan_prompt_tokens
from fleet.plan.measured import find_measurement
from fleet.plan.routes import find_resident, held_model
from fleet.start.errors import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fleet.config.node import NodeState
    from fleet.config.sections import Fleet, Model
    from fleet.findings.checks import Facts


@check("Routes", "nodes")
def check_routes(fleet: Fleet, facts: Facts) -> Iterator[Finding]:
    """Report each model: its node serves it as planned, or what is wrong."""
    prompts = plan_prompt_tokens(fleet)
    for model in fleet.models.values():
        users = [agent.name for agent in fleet.agents.values()
                 if agent.model == model.name and agent.tools != ()] + prompts[model.name]
        state = facts.states[model.node]
        if not state.online:
            continue  # check_nodes_answer reports it
        flaws = [*_presence_flaws(fleet, model, state),
                 *_ability_flaws(fleet, model, facts, users),
                 *_context_flaws(fleet, model, state)]
        yield from flaws
        if not flaws:
            yield Finding("route", "ok",
                          f"models.{model.name}: {model.ollama_model} on {model.node}")


def _presence_flaws(fleet: Fleet, model: Model, state: NodeState) -> Iterator[Finding]:
    """Yield findings if a model is missing, or runs at ollama.com."""
    if model.cloud:
        return
    held = held_model(model, state)
    where = locate_key(fleet, "models", model.name, model.name_key)
    if not held.name:
        what = f"models.{model.name}: {model.ollama_model} is not on {model.node}"
        yield Finding("model-missing", "error", what, where,
                      fix=fix_for_missing(fleet, model, state))
    elif held.remote:
        yield Finding("cloud-stub", "error", f"models.{model.name}: {model.ollama_model} is "
                      f"sent by `{model.node}` to {held.remote}", where,
                      fix="choose a local model, or add `cloud: true`")


def _ability_flaws(fleet: Fleet, model: Model, facts: Facts, users: Sequence[str]
                   ) -> Iterator[Finding]:
    """Yield findings for what a model has to do but cannot, or did not in `bench`."""
    state = facts.states[model.node]
    held = held_model(model, state)
    capabilities = held.capabilities
    what = f"models.{model.name}: {model.ollama_model}"
    where = locate_key(fleet, "models", model.name, model.name_key)
    known = find_measurement(facts.measured, state.endpoint, model.ollama_model)
    if users and capabilities is not None and "tools" not in capabilities:
        yield Finding("no-tools", "error",
                      f"{what} cannot call tools, which {', '.join(users)} will ask of it",
                      where, fix=fix_for_toolless(model, state, facts.memory.get(model.node)))
    elif users and known and known.instead and known.is_of(held):
        yield Finding("bench-no-tools", "warning",
                      f"models.{model.name}: in `bench` {model.ollama_model} "
                      f"{known.instead}; {', '.join(users)} will ask it to call tools", where,
                      fix="`subagent-fleet recommend` shows which model does")
    if model.thinking and capabilities is not None and "thinking" not in capabilities:
        title = kind_title(state.provider)
        yield Finding("no-thinking", "error", f"{what} cannot think; {title} refuses it",
                      locate_key(fleet, "models", model.name, "thinking"),
                      fix="write `thinking: false`")


def _context_flaws(fleet: Fleet, model: Model, state: NodeState) -> Iterator[Finding]:
    """Yield findings if a context is larger than the model was trained for or loaded with."""
    what = f"models.{model.name}: {model.ollama_model}"
    where = locate_key(fleet, "models", model.name, "context")
    trained = held_model(model, state).trained_context
    wanted = min(model.context, trained or model.context)
    if wanted < model.context:
        yield Finding("context-untrained", "warning", f"{what} was trained for {wanted}",
                      where, fix=f"write `context: {wanted}`")

    loaded = find_resident(state, model)
    if loaded and 0 < loaded.context < wanted:
        yield Finding("context-short", "warning",
                      f"{what} is loaded with context {loaded.context}, not {wanted}", where,
                      fix=f"subagent-fleet warmup --model {model.name}")
