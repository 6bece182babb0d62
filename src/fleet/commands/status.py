"""`status`: show what the fleet is doing now."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.live import watch
from fleet.cli.rows import CONFIG, JSON, LOOK, OUT, SECONDS, TIMEOUT, Flag, command
from fleet.cli.say import open_workspace, print_report
from fleet.config.address import gateway_url, split_endpoint
from fleet.config.names import find_models
from fleet.gateway.receipts import TOTALS
from fleet.page.sight import ModelSlots, format_expiry, plan_sight
from fleet.plan.environment import is_cloud
from fleet.plan.loads import describe_warm, list_loads, report_load
from fleet.plan.routes import plan_routes
from fleet.start.constants import EXIT_OK, EXIT_PROBLEM
from fleet.start.record import replace
from fleet.steps.gateway_seen import plan_asking
from fleet.steps.words import format_nodes, format_route, format_route_state
from fleet.tasks.state import ACTIVE_STATES
from fleet.text.phrases import count_of, some_of
from fleet.text.tables import format_table, format_words
from fleet.text.terminal import PLAIN, Cell, clean_line, mark
from fleet.work.shown import find_task_rows
from fleet.workspace.config import load_config, look_of
from fleet.workspace.records import read_measurements
from fleet.world.child import run_together

if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

    from fleet.config.sections import Agent, Fleet
    from fleet.page.sight import Sight
    from fleet.text.terminal import Look
    from fleet.world.world import World


@command("status", "show which machines and models are ready, and who is working", CONFIG,
         OUT,
         Flag("--watch", "again every S seconds, until Ctrl-C", "[S]",
              {**SECONDS, "nargs": "?", "const": 2.0, "default": 0.0}),
         Flag("--check", "exit 1 when a route is not ready"), TIMEOUT, JSON,
         group=LOOK, examples=("status", "status --watch", "status --check"),
         excludes=("watch json", "watch check"))
def cmd_status(options: Namespace, world: World) -> int:
    fleet = load_config(world, options.config).fleet
    ready = watch(world, options.watch,
                  lambda clear: show_status(fleet, options, world, clear))
    return EXIT_PROBLEM if options.check and not ready else EXIT_OK


def format_away(sight: Sight) -> str:
    """Return which models are outside the house and what was sent there; "" without any."""
    fleet = sight.fleet
    names = [f"{model.name} ({split_endpoint(fleet.nodes[model.node].endpoint).host})"
             for model in fleet.models.values() if is_cloud(fleet, model)]
    if not names:
        return ""
    text = f"Sent outside your network: requests to {some_of(names, 5)}."
    if sight.said.left_house:
        requests, tokens_in, tokens_out = (
            sight.said.left_house.get(name, 0) for name in TOTALS[:3])
        text += (f" So far {count_of(requests, 'request')}, {tokens_in:,} tokens in, "
                 f"{tokens_out:,} out.")
    return text


def format_status(sight: Sight, look: Look = PLAIN) -> str:
    """Return each machine's models, which model answers each agent, and whether all is ready."""
    fleet = sight.fleet
    resting = {fleet.models[name].node for name, place in sight.places.items()
               if place.rests_seconds}
    text = format_nodes(fleet, sight.states, ("Node", "Status", "Endpoint", "Models"), look,
                        resting)
    offline = [state for state in sight.states.values() if not state.online]
    text += "\n" * bool(offline)
    for state in offline:
        place = Cell(f"{state.name} ({state.endpoint}):", "dim")
        text += format_words([place, state.why], look, indent="  ")
    text += _format_loaded(sight, look)

    text += "\nAgent routing:\n"
    for agent, model in plan_routes(fleet).items():
        route = f"{format_route(fleet, agent, model)}:"
        text += format_words([route, _route_cell(sight, fleet.agents[agent], look)], look,
                             indent="  ")
    for load in list_loads(fleet, sight.states):
        text += format_words([describe_warm(load)], look, indent="  ")
    text += "\n" + format_words([format_away(sight)], look, indent="  ")
    if sight.tasks:
        names = some_of([f"{task['name']} ({task['state']})" for task in sight.tasks], 4)
        text += format_words([f"Tasks: {names}.", "`subagent-fleet tasks`"], look,
                             indent="  ")
    return text + _format_verdict(sight, look)


def _format_verdict(sight: Sight, look: Look) -> str:
    """Return the sentence that says whether the fleet is ready, and what to type if not."""
    states = [sight.routes[name].state for name in sight.fleet.models]
    ready = states.count("ready")
    verdict = Cell(f"{ready} of {count_of(states, 'model')} ready.", "warn")
    is_served = sight.gateway.level == "ok"
    step = sight.step
    following = clean_line(str(step))
    if ready == len(states) and is_served:
        verdict, following = Cell("ready.", "ok"), ""
    elif step.is_ready and step.what:  # its gateway is missing
        verdict, following = Cell("ready,", "warn"), f"but {clean_line(step.what)}"

    traffic = ""
    if is_served:
        working = sum(place.running for place in sight.said.models)
        does = "idle"
        if working or sight.said.waiting:
            does = f"{working} working, {sight.said.waiting} waiting"
        traffic = f"Gateway at {gateway_url(sight.fleet.gateway)}: {does}."
    return format_words([Cell(f"{sight.fleet.name}:", "bold"), verdict, Cell(traffic),
                         following],
                        look, indent="  ")


def _format_loaded(sight: Sight, look: Look) -> str:
    """Return a table of the models in memory; a column without any values is left out."""
    headers = ("Machine", "Loaded", "Context", "On GPU", "Slots", "tok/s", "Unloads")
    rows = []
    for state in sight.states.values():
        for loaded in state.loaded:
            context = f"{loaded.context:,}" if loaded.context else "-"
            share = "-" if loaded.gpu_percent is None else f"{loaded.gpu_percent} %"
            slots = [f"{place.running} / {place.slots}"
                     for name, place in sight.places.items()
                     if sight.fleet.models[name].node == state.name
                     and find_models([loaded], sight.fleet.models[name].ollama_model)]
            known = sight.find_measured(state.name, loaded.name)
            rate = f"{known.answer_rate:,.1f}" if known and known.answer_rate else "-"
            rows.append((state.name, loaded.name, context, share, (slots or ["-"])[-1], rate,
                         format_expiry(loaded.expires, sight.now)))
    columns = [column for column in zip(headers, *rows) if set(column[1:]) != {"-"}]
    if not rows:
        return ""
    headers, *rows = zip(*columns)
    return "\n" + format_table(headers, rows, look=look,
                               right=("Context", "On GPU", "Slots", "tok/s"),
                               spare=("Unloads", "tok/s", "On GPU"))


def _route_cell(sight: Sight, agent: Agent, look: Look) -> Cell:
    """Return whether an agent's model is ready, and which model answers instead."""
    fleet = sight.fleet
    model = fleet.models[agent.model]
    route = sight.routes[model.name]
    place = sight.places.get(model.name, ModelSlots(model.name, 0, 0))
    words = format_route_state(fleet, route)
    role = "ok"
    if route.state == "cold" or route.fallback:
        role = "warn"
    elif route.state != "ready":
        role = "bad"
    elif place.rests_seconds:
        words, role = "skipped after a failure", "warn"
    elif place.running:
        words += f", {place.running} working"

    known = sight.find_measured(model.node, model.ollama_model)
    if agent.tools != () and known and known.instead:
        words += f"; in `bench` it {known.instead}"
        role = "warn" if role == "ok" else role
    return mark(words, role, look)


def show_status(fleet: Fleet, options: Namespace, world: World, clear: str = "") -> bool:
    """Print the status; tell whether every route is ready."""
    workspace = open_workspace(options, world)
    seen = dict(run_together(world, plan_asking(workspace, fleet, options.timeout)))
    tasks = [{"name": row.name, "state": row.state}
             for row in find_task_rows(world, fleet, options)
             if row.state in ("waiting", *ACTIVE_STATES)]
    sight = replace(plan_sight(fleet, seen["states"], seen["view"], world.now()),
                    tasks=tasks, measured=read_measurements(workspace))
    ready = all(route.state == "ready" for route in sight.routes.values())
    if options.json:
        print_report(world, "status", {
            "fleet": fleet.name, "ready": ready,
            "next": str(sight.step),
            "gateway": sight.gateway, "work": sight.places,
            "waiting": sight.said.waiting, "left_house": sight.said.left_house,
            "tasks": tasks, "nodes": list(sight.states.values()),
            "loads": [report_load(load) for load in list_loads(fleet, sight.states)],
            **report_status(sight)})
    else:
        world.out(clear + format_status(sight, look_of(world)))
    return ready


def report_status(sight: Sight) -> dict[str, list[Any]]:
    """Return what `--json` says about each model, and about the model of each agent."""
    fleet = sight.fleet
    models = {}
    for name, model in fleet.models.items():
        models[name] = {"route": name, "node": model.node, "model": model.ollama_model,
                        "alias": model.alias, "context": model.context,
                        "cloud": is_cloud(fleet, model), **vars(sight.routes[name]),
                        "measured": sight.find_measured(model.node, model.ollama_model)}
    agents = [{"agent": agent.name, **models[agent.model]}
              for agent in fleet.agents.values()]
    return {"models": list(models.values()), "routes": agents}
