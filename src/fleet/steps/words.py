"""Proposals, assignments, routes and machines, as text."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.config.names import find_models
from fleet.plan.candidates import rank_models
from fleet.plan.memory import plan_pull, tell_pull
from fleet.plan.roles import MAIN_JOB
from fleet.plan.routes import plan_routes, show_machines
from fleet.start.record import replace
from fleet.steps.machines import format_answers, write_starter
from fleet.text.phrases import join_words, some_of
from fleet.text.tables import format_table, format_words, wrap_text
from fleet.text.terminal import PLAIN, Cell, clean_line, mark, paint
from fleet.text.width import width_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from fleet.config.node import NodeState
    from fleet.config.sections import Fleet, Model
    from fleet.plan.routes import RouteState
    from fleet.plan.starter import Starter
    from fleet.steps.machines import FirstFleet
    from fleet.text.terminal import Look
    from fleet.world.world import World


def write_first_fleet(world: World, output: str, first: FirstFleet, look: Look, *,
                      offline: bool = False) -> str:
    """Write the fleet file that was planned; return where it is, and who does what and why."""
    written = write_starter(world, output, first.starter, offline=offline)
    return wrap_text(written, look) + format_starter(first.starter, first.states, look,
                                                     first.memory)


def format_starter(starter: Starter, states: Sequence[NodeState], look: Look = PLAIN,
                   memory: Mapping[str, float] | None = None) -> str:
    """Return the answers of machines, and who does what where and why."""
    memory = memory or {}
    text = format_answers(states)
    if starter.has_models:
        text += f"\n{format_assignment(starter, look)}"
        without_work: Iterable[str] = starter.assignment.idle
        known = starter.tree["nodes"]
        narrow = [state.name for state in states if len(rank_models(state)) > 1
                  if state.online and "memory_gb" not in known.get(state.name, {})]
        if narrow:
            hint = (f"{join_words(narrow)}: without `memory_gb:` a machine gets only one model. "
                    "Add it, then run `subagent-fleet recommend`.")
            text += format_words([hint], look)
    else:
        asked = [state for state in states if state.reason != "not asked"]
        who = "No model that can be used was found" if asked else "No machine was asked"
        text += f"{who}: the models in it are placeholders.\n"
        without_work = [state.name for state in asked if not rank_models(state)]

    for name in without_work:
        if memory.get(name):
            who = f"For {clean_line(name)}, which has about {memory[name]:.0f} GB for models:"
            text += format_words([who, f"{tell_pull(memory[name])}."], look)
    return text


def format_flaw(flaw: str, states: Collection[NodeState], following: str, look: Look,
                memory: Mapping[str, float]) -> str:
    """Return the flaw of the main session's model, and what to type for a better one."""
    if not flaw:
        return ""
    room = max((memory.get(state.name, 0.0) for state in states if state.online), default=0.0)
    pull = plan_pull(room)
    fix = f"{tell_pull(room)}."
    if pull:
        fix = f"`ollama pull {pull}`, then"
        if any(find_models(state.models, pull) for state in states):
            fix = "pull a model that calls tools (ollama.com/search?c=tools), then"
        following = f"`{following}`"
    return format_words([f"{flaw}:", fix, following if pull else ""], look)


def format_assignment(starter: Starter, look: Look = PLAIN) -> str:
    """Return a table of who does what where and why, then the fallbacks and idle machines."""
    assignment = starter.assignment
    models = {load.model.name: load.model for load in assignment.placements}
    rows = []
    if "claude" in starter.tree:  # no machine of the fleet does it
        main = starter.tree["models"][starter.tree["claude"]["main"]]
        rows.append((MAIN_JOB, main["model"], main["node"],
                     "your Claude login; its prompts leave the house"))
    for job in assignment.jobs:
        model = assignment.model(job)
        rows.append((job, model.ollama_model, show_machines(model, models.values()),
                     assignment.why[job]))
    heirs = []
    for load in assignment.placements:
        model = load.model
        if model.name not in assignment.jobs.values():
            rows.append(("-", model.ollama_model, model.node, load.why))
        if model.fallback:
            others = some_of([models[name].node for name in model.fallback], 3)
            heirs.append(f"{model.node} → {others}")

    sentences = [*assignment.counted,
                 *(f"{node} idles: {why}." for node, why in assignment.idle.items())]
    if heirs:
        sentences.insert(0, "If a machine doesn't answer, another takes over: "
                         f"{'; '.join(heirs)}.")
    text = format_table(("Role", "Model", "Machine", "Why"), rows, look=look)
    return text + "".join(format_words([Cell(clean_line(sentence))], look)
                          for sentence in sentences)


def format_route_state(fleet: Fleet, route: RouteState) -> str:
    """Return the state of a route, and which model on which machine answers meanwhile."""
    text = route.state
    if route.loaded and route.state == "cold":
        text += f" (loaded with context {route.loaded.context})"
    if route.fallback:
        fallback = fleet.models[route.fallback]
        text += f" \u2192 fallback {fallback.ollama_model} on {fallback.node}"
    return text


def format_route(fleet: Fleet, agent: str, model: Model) -> str:
    """Return a route in one line: agent, node, model, alias."""
    machines = show_machines(model, fleet.models.values())
    return clean_line(f"{agent} -> {machines} -> {model.ollama_model} -> {model.alias}")


def format_routes(fleet: Fleet, look: Look = PLAIN) -> str:
    """Return each agent's route."""
    lines = [format_words([format_route(fleet, agent, model)], look, margin="  ", indent="  ")
             for agent, model in plan_routes(fleet).items()]
    return paint("Agent routing:", "bold", look) + "\n" + "".join(lines)


def format_nodes(fleet: Fleet, states: Mapping[str, NodeState], headers: Sequence[str],
                 look: Look = PLAIN, resting: Collection[str] = ()) -> str:
    """Return the name of a fleet and a table of its nodes with their models or failures."""
    rows = []
    for state in states.values():
        word, role = ("online", "ok") if state.online else ("offline", "bad")
        if state.online and state.name in resting:
            word, role = "skipped", "warn"
        names = ", ".join(model.name for model in state.models)
        cells = {"Node": state.name, "Status": mark(word, role, look),
                 "Endpoint": state.endpoint, "Models": names or f"({state.reason or 'none'})"}
        rows.append([cells[header] for header in headers])

    title = format_words(["Fleet:", Cell(fleet.name, "bold")], look)
    unpainted = format_table(headers, rows, look=replace(look, colour=False),
                             spare=("Endpoint",))
    ruler = "-" * max(map(width_of, unpainted.splitlines()))
    head, _, body = format_table(headers, rows, look=look,
                                 spare=("Endpoint",)).partition("\n")
    return f"{title}\n{head}\n{ruler}\n{body}"
