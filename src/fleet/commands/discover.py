"""`discover`: show what the machines have."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.agree import has_config
from fleet.cli.rows import CONFIG, JSON, LOOK, TIMEOUT, Flag, command
from fleet.cli.say import open_workspace, print_report, render_report
from fleet.findings.checks import fix_for_missing
from fleet.nodes.probe import probe_nodes
from fleet.nodes.scan import scan_machines
from fleet.page.sight import show_record
from fleet.plan.routes import plan_route_state
from fleet.start.constants import EXIT_OK, STATE_DIRECTORY
from fleet.steps.words import format_nodes
from fleet.text.phrases import count_of, some_of
from fleet.text.tables import format_fix, format_table, format_words
from fleet.text.terminal import PLAIN, Cell, mark
from fleet.workspace.config import load_config, look_of

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Mapping
    from typing import Any

    from fleet.config.node import NodeModel, NodeState
    from fleet.config.sections import Fleet
    from fleet.nodes.scan import Scan
    from fleet.text.terminal import Look
    from fleet.world.world import World


_PRESENCE_ROLES = {"present": "ok", "missing": "bad", "unknown": "warn"}


def format_presence(models: Iterable[Mapping[str, str]], look: Look = PLAIN) -> str:
    """Return a table of a fleet's models: present, unknown, or missing and how to fix it."""
    rows = []
    for model in models:
        state = model["state"]
        words = f"missing: {model['fix']}" if state == "missing" else state
        rows.append((model["route"], model["node"], model["model"],
                     mark(words, _PRESENCE_ROLES[state], look)))
    return format_table(("Route", "Machine", "Model", "Found"), rows, look=look)


def format_details(states: Mapping[str, NodeState], look: Look = PLAIN) -> str:
    """Return what each node tells about itself and its models, or why it didn't answer."""
    text = ""
    for state in states.values():
        says = state.why
        if state.online:
            says = f"{state.runs}, {1000 * (state.latency_seconds or 0):.1f} ms"
        heading = Cell(f"{state.name} ({state.endpoint}):", "bold")
        text += "\n" + format_words([heading, Cell(says)], look, indent="  ")

        if not state.online:
            text += format_fix(state.fix, look)
        for model in state.models:
            parts = [Cell(f"{model.name}:"), Cell(_describe_model(model))]
            text += format_words(parts, look, margin="  ", indent="  ")
    return text


def _describe_model(model: NodeModel) -> str:
    """Return what is known about a model: its size, its context, its capabilities."""
    size = f"{model.size / 1e9:.1f} GB" if model.size else "size unknown"
    trained = f"trained for {model.trained_context}" if model.trained_context else ""
    parts = [size, model.parameters, model.quantization, trained, *(model.capabilities or ()),
             f"at {model.remote}" if model.remote else ""]
    return ", ".join(filter(None, parts))


@command("discover", "show which models every machine has", CONFIG,
         Flag("--write", f"also write {STATE_DIRECTORY}/discovery.json"),
         Flag("--scan", "find machines that this one knows, on its network or by Tailscale"),
         TIMEOUT,
         Flag("--verbose", "show details of each machine and model", short="-v"), JSON,
         group=LOOK, examples=("discover", "discover --verbose --timeout 2",
                               "discover --scan"),
         excludes=("scan write",))
def cmd_discover(options: Namespace, world: World) -> int:
    if options.scan:
        return discover_machines(options, world)
    fleet = load_config(world, options.config).fleet
    states = probe_nodes(world, fleet.nodes, options.timeout, fleet.models)
    models = report_presence(fleet, states)
    report = {"fleet": fleet.name, "nodes": list(states.values()), "models": models}

    written = None
    if options.write:
        path = open_workspace(options, world).enter(f"{STATE_DIRECTORY}/discovery.json")
        content = render_report("discover", report).encode("utf-8")
        world.replace_files([(path, content, 0o644)])
        written = path.removeprefix("./")

    if options.json:
        print_report(world, "discover", {**report, "written": written})
    else:
        look = look_of(world)
        text = format_nodes(fleet, states, ("Node", "Status", "Models"), look)
        text += "\n" + format_presence(models, look)
        text += format_details({name: state for name, state in states.items()
                                if options.verbose or not state.online}, look)
        if written:
            text += f"\nWrote {written}\n"
        world.out(text)
    return EXIT_OK


def format_scan(scan: Scan, look: Look = PLAIN) -> str:
    """Return which addresses were asked, and which were skipped."""
    sentences: list[Cell | str] = [
        Cell(f"Asked {count_of(scan.addresses, 'address')} that this machine has "
             "lately spoken with, or that Tailscale names.")]
    if scan.peers:
        sentences.append(Cell(f"Tailscale: {some_of([peer.name for peer in scan.peers])}."))
    sentences += scan.notes
    skipped: dict[str, list[str]] = {}
    for address, why in scan.others:
        skipped.setdefault(why, []).append(address)
    if skipped:
        groups = [f"as {why} {some_of(places, 4)}" for why, places in skipped.items()]
        sentences.append(Cell(f"Skipped {'; '.join(groups)}."))
    if not scan.found:
        sentences.append("No machine was found. Name one: `subagent-fleet add mini=ADDRESS`")
    return "".join(format_words([sentence], look) for sentence in sentences)


def format_found(scan: Scan, known: Mapping[str, str], look: Look = PLAIN) -> str:
    """Return a table of the machines that a scan found, and how to add each to the fleet."""
    rows = []
    for one in scan.found:
        name = known.get(one.node.endpoint, "")
        step = mark(f"is {name}", "ok", look)
        if not name:
            step = Cell(f"`subagent-fleet add {one.node.name}={one.node.endpoint}`")
        rows.append((one.node.name, one.runs, len(one.state.models), step))
    return format_table(("Machine", "Runs", "Models", "In the fleet"), rows, look=look)


def discover_machines(options: Namespace, world: World) -> int:
    """Show the machines that a scan finds, even without a fleet."""
    fleet_name = None
    known = {}
    if options.config or has_config(world):
        fleet = load_config(world, options.config).fleet
        fleet_name = fleet.name
        known = {node.endpoint: name for name, node in fleet.nodes.items()}
    scan = scan_machines(world)

    if options.json:
        print_report(world, "discover", {
            "fleet": fleet_name, "nodes": [], "models": [], "written": None,
            "scan": report_scan(scan, known)})
        return EXIT_OK

    look = look_of(world)
    text = format_scan(scan, look)
    if scan.found:
        text += "\n" + format_found(scan, known, look)
    if options.verbose:
        text += format_details({found.node.name: found.state for found in scan.found}, look)
    world.out(text)
    return EXIT_OK


def report_scan(scan: Scan, known: Mapping[str, str]) -> dict[str, Any]:
    """Return what `discover --scan --json` says."""
    found = [{**show_record(one.state), "known": known.get(one.node.endpoint)}
             for one in scan.found]
    others = [{"address": address, "why": why} for address, why in scan.others]
    peers = [{"name": peer.name, "address": peer.address} for peer in scan.peers]
    return {"addresses": scan.addresses, "peers": peers, "found": found, "others": others,
            "notes": scan.notes}


def report_presence(fleet: Fleet, states: dict[str, NodeState]) -> list[dict[str, str]]:
    """Return for each model whether its node has it: present, missing or unknown."""
    words = {"node offline": "unknown", "model missing": "missing"}
    models = []
    for name, model in fleet.models.items():
        route = plan_route_state(fleet, states, model)
        fix = ""
        if route.state == "model missing":
            fix = fix_for_missing(fleet, model, states[model.node])
        models.append({"route": name, "node": model.node, "model": model.ollama_model,
                       "state": words.get(route.state, "present"), "fix": fix})
    return models
