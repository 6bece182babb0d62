"""`up`: start everything in one step."""
from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from fleet.cli.agree import ask_trust, refuse_home
from fleet.cli.live import wait_until
from fleet.cli.rows import CONFIG_FILE, OUT, START, TRUST, Flag, command, type_again
from fleet.cli.say import open_workspace, paths_that, tell, tell_warnings
from fleet.config.names import find_models
from fleet.config.node import NodeState
from fleet.config.rules import CLAUDE
from fleet.findings.checks import CLAUDE_INSTALL
from fleet.nodes.probe import probe_nodes
from fleet.nodes.warmup import HUNG_SECONDS
from fleet.plan.memory import plan_pull, tell_pull
from fleet.plan.rating import rate_model
from fleet.plan.routes import plan_route_states, plan_tiers
from fleet.start.constants import (
    CONFIG_NAMES,
    ENVIRONMENT_FILE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    PROBE_TIMEOUT_SECONDS,
)
from fleet.start.errors import FleetError
from fleet.steps.claude_start import launch_claude, tell_session
from fleet.steps.gateway_seen import ask_gateway
from fleet.steps.gateway_start import check_key, start_gateway
from fleet.steps.machines import find_first_fleet, format_answers
from fleet.steps.warming import Teller, format_share, warm_fleet
from fleet.steps.words import format_flaw, format_route_state, write_first_fleet
from fleet.text.phrases import some_of
from fleet.text.terminal import clean_line
from fleet.views.lookout import listen_for_page, open_dashboard
from fleet.views.requests import format_served, list_failures
from fleet.work.shown import see_scene
from fleet.work.typed import open_folder
from fleet.workspace.config import find_config, load_config, look_of
from fleet.workspace.directory import Workspace

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping

    from fleet.config.sections import Fleet, Model
    from fleet.nodes.warmup import Warmth
    from fleet.world.world import World


@command("up", "do everything: find, load and serve models, run Claude Code", CONFIG_FILE,
         OUT, TRUST,
         Flag("--ui", "also open the dashboard"),
         group=START, examples=("up", "up --ui", "up -- -p 'say hi'"), passes="ARGS")
def cmd_up(options: Namespace, world: World) -> int:
    """Do everything. Messages go to standard error, because standard output is Claude Code's."""
    refuse_home(options, world)
    if options.passed and not world.which(CLAUDE):
        raise FleetError("claude-missing", "Claude Code is not on the PATH",
                         fix=CLAUDE_INSTALL)
    fleet = find_or_write_fleet(options, world)
    ask_trust(fleet, options, world)
    workspace = open_workspace(options, world)
    is_first = world.kind_of(workspace.enter(ENVIRONMENT_FILE)) == "absent"
    write_unedited(workspace, fleet)
    key = workspace.read_key(fleet)
    check_key(fleet, key, world)

    signals: list[str] = []
    with contextlib.ExitStack() as stops:
        # Refuse before models load, not after.
        start_gateway(world, fleet, key, out=workspace.out, stops=stops)
        if options.ui:
            page = listen_for_page(world, fleet.gateway)
            dashboard = open_dashboard(workspace, fleet, options, page, stops)
            world.err(f"Dashboard: {dashboard.invite()}\n")
        warm_for_session(fleet, options, world)

        before = ask_gateway(world, fleet, key)
        began = world.now()
        if world.which("claude"):
            status = launch_claude(workspace, fleet, options, tells_lean=is_first)
        else:
            status = EXIT_OK
            world.on_stop(signals.append)
            tell(world, f"Claude Code is not on the PATH: `{CLAUDE_INSTALL}`\n"
                 "Serving until Ctrl-C.\n")
            wait_until(world, lambda: signals)
        after = ask_gateway(world, fleet, key)
        world.err(format_served(before, after, look_of(world, "stderr")))

    world.err(list_failures(workspace, fleet, began, "stderr"))
    tell_session(workspace, began, options)
    tell_tasks_left(world)
    return EXIT_INTERRUPTED if "SIGINT" in signals else status


def tell_tasks_left(world: World) -> None:
    """Say which tasks of this repository continue after `up` has ended its gateway."""
    with contextlib.suppress(FleetError):  # no repository
        folder = open_folder(world)
        names = [state.name for state in folder.read_states()[0].values() if state.is_active]
        if names and folder.holder():
            world.err(f"Tasks still running: {some_of(names, 3)}. `subagent-fleet run` "
                      "(active) serves their models now.\n")
        elif names:
            again = see_scene(folder, {}).again
            world.err(f"Tasks still running, without a gateway: {some_of(names, 3)}. "
                      f"Continue: {again}\n")


def find_or_write_fleet(options: Namespace, world: World) -> Fleet:
    """Return the fleet of the nearest file; if there is none, write one."""
    try:
        path = find_config(world, options.config)
    except FleetError:
        path = CONFIG_NAMES[0]
        make_first_fleet(options, world, path)
    if path == "-":
        raise FleetError("usage", "up: standard input is Claude Code's, so the config must "
                         "be in a file", status=EXIT_USAGE,
                         fix=type_again(options, config="fleet.yaml"))

    config = load_config(world, options.config)
    tell_warnings(config.warnings, world)
    return config.fleet


def make_first_fleet(options: Namespace, world: World, path: str) -> None:
    """Write a fleet file from what this machine has; refuse placeholders."""
    first = find_first_fleet(world, {}, path)
    if not first.starter.has_models:
        answers = [line.strip() for line in format_answers(first.states).splitlines()]
        what = "; ".join(filter(None, (*answers, first.starter.flaw)))
        start = "" if any(state.online for state in first.states) else "start Ollama, "
        room = first.memory["local"]
        fix = f"{start}{tell_pull(room)}, then `{type_again(options)}`"
        if not plan_pull(room):
            what += f"; this machine has about {room:.0f} GB for models: {tell_pull(room)}"
            fix = "with a larger machine: `subagent-fleet init --node mini=192.168.1.50`"
        raise FleetError("no-model", f"no fleet.yaml, and no model to write one with: {what}",
                         fix=fix)
    world.err(write_first_fleet(world, path, first, look_of(world, "stderr")) + "\n")


def write_unedited(workspace: Workspace, fleet: Fleet) -> None:
    """Write the generated files except those that a person has edited, and say so."""
    changes = workspace.compare(fleet, renews=True)
    workspace.write([change for change in changes if change.action != "edited"])
    for word, actions in (("Wrote", ("created", "updated")), ("Removed", ("removed",)),
                          ("Kept, as you have edited it", ("edited",))):
        paths = paths_that(changes, *actions)
        agents = [path for path in paths if path.startswith(".claude/agents/")]
        if len(agents) > 1:
            rest = [path for path in paths if path not in agents]
            paths = [f"{len(agents)} agents in .claude/agents/", *rest]
        if paths:
            tell(workspace.world, clean_line(f"{word}: {some_of(paths)}.") + "\n")


JOINED_MODELS = 4  # this many models that load without trouble get one line together


def warm_for_session(fleet: Fleet, options: Namespace, world: World) -> None:
    """Load every model; refuse to continue if none could answer the main session."""
    lines: list[str] = []
    warmths = warm_fleet(fleet, options, world, busy_seconds=HUNG_SECONDS,
                         teller=Teller(lines.append, look_of(world, "stderr")))
    absent = [name for name, warmth in warmths.items() if not warmth.ok]
    if absent or len(warmths) > JOINED_MODELS:
        world.err("".join(lines))
    else:
        loads = dict.fromkeys(map(format_load, warmths.values()))
        tell(world, f"Loaded: {', '.join(loads)}.\n")

    states = see_warmed(fleet, warmths, world)
    main = fleet.models[plan_tiers(fleet)["main"]]
    tell_weakness(fleet, main, states, world)
    if not absent:
        return
    routes = plan_route_states(fleet, states)
    route = routes[main.name]
    if all(other.state != "ready" for other in routes.values()):
        raise FleetError("nothing-ready", "no model of this fleet could be loaded",
                         fix="subagent-fleet doctor")
    if route.state not in ("ready", "cold") and not route.fallback:
        raise FleetError("nothing-ready", f"no machine can serve {main.name}, the main "
                         f"session's model: {format_route_state(fleet, route)}",
                         fix="subagent-fleet doctor")
    without = [f"{clean_line(name)} ({format_route_state(fleet, routes[name])})" for name in absent]
    tell(world, f"Continuing without {', '.join(without)}.\n")


def format_load(warmth: Warmth) -> str:
    """Return which model was loaded where, and whether some of it is not on the GPU."""
    text = clean_line(f"{warmth.model.ollama_model} on {warmth.node.name}")
    if warmth.loaded and warmth.loaded.gpu_percent not in (None, 100):
        text += f" ({format_share(warmth.loaded)})"
    return text


def see_warmed(fleet: Fleet, warmths: Mapping[str, Warmth], world: World
               ) -> dict[str, NodeState]:
    """Return the states of a fleet's machines.

    A machine that has just not answered is not asked again: that would take as long again.
    """
    states = {}
    for warmth in warmths.values():
        if warmth.state == "not answering":
            node = warmth.node
            states[node.name] = NodeState(node.name, node.endpoint, warmth.reason,
                                          provider=node.provider)
    others = {name: node for name, node in fleet.nodes.items() if name not in states}
    return {**states, **probe_nodes(world, others, PROBE_TIMEOUT_SECONDS, fleet.models)}


def tell_weakness(fleet: Fleet, main: Model, states: Mapping[str, NodeState], world: World
                  ) -> None:
    """Say at each start what the main session's model lacks, because nothing else shows it."""
    state = states[main.node]
    memory = {main.node: fleet.nodes[main.node].memory_gb or 0.0}
    for model in find_models(state.models, main.ollama_model):
        flaw = rate_model(model).flaw
        if flaw and not main.cloud:
            world.err(format_flaw(f"{model.name} {flaw}",
                                  [state], "subagent-fleet init --force",
                                  look_of(world, "stderr"), memory))
