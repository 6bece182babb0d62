"""The picture of a fleet that the page draws."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.config.address import gateway_url
from fleet.gateway.queue import plan_model_places
from fleet.page.needs import page_line, plan_headline, plan_needs, say_where
from fleet.page.sight import format_expiry
from fleet.plan.loads import list_loads
from fleet.plan.routes import plan_tiers
from fleet.text.terminal import plan_machine_colours

if TYPE_CHECKING:
    from typing import Any

    from fleet.config.sections import Node
    from fleet.page.sight import Sight


def plan_picture(sight: Sight) -> dict[str, Any]:
    """Return the state of a fleet for the page; events are sent apart from it."""
    fleet = sight.fleet
    routes, busy = sight.routes, sight.places
    needs = [page_line(*need) for need in plan_needs(sight)]
    level, sentence = plan_headline(sight, needs)
    places = plan_model_places(fleet)
    warm = {load.model.name: load.warm for load in list_loads(fleet, sight.states)}
    models = []
    for name, model in fleet.models.items():
        models.append({"name": name, "node": model.node, "model": model.ollama_model,
                       "alias": model.alias, "context": model.context,
                       "slots": places[name].slots, "fallback": list(model.fallback),
                       "warm": warm.get(name),
                       "kept": busy[name].warm.conversations if name in busy else 0,
                       "state": routes[name].state, "instead": routes[name].fallback})

    agents = [{"name": "main", "route": plan_tiers(fleet)["main"]}]
    agents += [{"name": agent.name, "route": agent.model} for agent in fleet.agents.values()]
    return {
        "fleet": fleet.name,
        "level": level,
        "sentence": sentence,
        "needs": needs,
        "hint": "subagent-fleet launch claude",
        "gateway": {"url": gateway_url(fleet.gateway), "says": sight.gateway.what,
                    "provider": fleet.gateway.provider, "followed": sight.is_followed},
        "machines": [_picture_machine(sight, node) for node in fleet.nodes.values()],
        "models": models,
        "agents": agents,
        "findings": [page_line("warn", say_where(finding), finding.fix)
                     for finding in sight.findings if finding.level == "warning"],
        "tasks": list(sight.tasks),
    }


def _picture_machine(sight: Sight, node: Node) -> dict[str, Any]:
    """Return the content of a machine's card."""
    state = sight.states[node.name]
    loaded = []
    for model in state.loaded:
        expiry = format_expiry(model.expires, sight.now)
        words = {"never": "never unloads", "?": ""}
        unloads = words.get(expiry, f"unloads in {expiry}" if expiry[0].isdigit() else expiry)
        loaded.append({"name": model.name, "bytes": model.size, "context": model.context,
                       "gpu": model.gpu_percent, "unloads": unloads})
    return {"name": node.name, "endpoint": node.endpoint,
            "colour": plan_machine_colours(sight.fleet.nodes)[node.name],
            "server": state.runs,
            "online": state.online, "why": state.reason,
            "fix": state.fix if state.reason else "",
            "latency_seconds": state.latency_seconds, "loaded": loaded,
            "memory": node.memory_gb * 1e9 if node.memory_gb else None}
