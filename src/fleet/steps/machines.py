"""Machines as typed, this machine, the first fleet file."""
from __future__ import annotations

import contextlib
import re
import sys
from typing import TYPE_CHECKING

from fleet.config.address import full_endpoint, show_host, split_endpoint
from fleet.config.names import free_name_of, model_slot
from fleet.config.node import NODE_KINDS, NodeState
from fleet.config.rules import obeys
from fleet.config.sections import Gateway, Node
from fleet.files.starter import render_starter
from fleet.nodes.probe import probe_nodes
from fleet.plan.memory import USABLE_SHARE
from fleet.plan.starter import PLACEHOLDERS_MARK, plan_starter
from fleet.start.constants import EXIT_USAGE, INIT_TIMEOUT_SECONDS, OLLAMA_ENDPOINT
from fleet.start.errors import FleetError
from fleet.start.record import Record, replace
from fleet.steps.fleet_file import find_usual_port, write_fleet
from fleet.steps.gateway_seen import avoid_taken_port
from fleet.text.phrases import count_of
from fleet.text.terminal import clean_line
from fleet.workspace.config import load_config
from fleet.workspace.directory import Workspace
from fleet.workspace.records import read_measurements
from fleet.workspace.trust import is_here, keep_trusted

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from fleet.config.address import Endpoint
    from fleet.plan.measured import Measurement
    from fleet.plan.starter import Starter
    from fleet.world.world import World


def format_answers(states: Sequence[NodeState]) -> str:
    """Return a line for each machine that was asked for its models."""
    text = ""
    for state in states:
        answer = state.reason or count_of(state.models, "model")
        text += f"  {clean_line(f'{state.name} ({state.endpoint}): {answer}')}\n"
    return text


def parse_nodes(texts: Sequence[str], options: Namespace, retype: Callable[[int, str], str]
                ) -> dict[str, Node]:
    """Return the Nodes of NAME=URL texts; http and the port of Ollama may be left out.

    `retype` returns the command that was typed, with another text in one's place, or none.
    """
    nodes: dict[str, Node] = {}
    for place, text in enumerate(texts):
        name, _, url = text.partition("=")
        endpoint = why = ""
        try:
            endpoint = full_endpoint(url).url
        except FleetError as error:
            why = error.what
        if not url or not obeys(name, "name"):
            why = "not of the form NAME=URL"
        elif name in nodes:
            why = f"a second `{name}`"
        for other in nodes.values():
            if other.endpoint == endpoint and not why:
                why = f"the machine of `{other.name}`"
        if why:
            better = "" if why.startswith("the machine of") else suggest_node(text, nodes)
            raise FleetError("usage", f"{options.row.name}: `{text}`: {why}",
                             status=EXIT_USAGE, fix=retype(place, better))
        nodes[name] = Node(name, endpoint)
    return nodes


def refuse_worse(world: World, output: str, starter: Starter, silent: Sequence[NodeState],
                 retype: Callable[[str], str]) -> None:
    """Refuse to replace a working fleet by one with placeholders or without a machine.

    `retype` returns the command that was typed, with a machine at another address.
    """
    try:
        fleet = load_config(world, output).fleet
    except FleetError:
        return  # nothing there works
    if PLACEHOLDERS_MARK in fleet.document.text:
        return
    for state in silent:
        raise FleetError("node-silent", f"node `{state.name}`: {state.why} ({state.endpoint}); "
                         "nothing was written",
                         fix=find_usual_port(world, state, retype) or state.fix)
    if not starter.has_models:
        raise FleetError("no-model", "no machine that was asked has a model that can do the "
                         f"work; nothing was written: {output} stays",
                         fix="subagent-fleet status")


class FirstFleet(Record):
    """What the machines of a new fleet answered, and the fleet that was planned of them."""

    states: Sequence[NodeState]
    starter: Starter
    memory: Mapping[str, float]  # GB for models, where that is known


def find_first_fleet(world: World, typed: Mapping[str, Node], output: str, *,
                     offline: bool = False) -> FirstFleet:
    """Ask this machine and those that were typed for their models, and plan a fleet."""
    nodes = with_this_machine(world, typed)
    states = [NodeState(node.name, node.endpoint, "not asked") for node in nodes.values()]
    if not offline:
        states = ask_machines(world, nodes)
    measured = read_measurements(Workspace(world, world.parent(output)))
    return FirstFleet(states, plan_first_fleet(world, states, measured),
                      with_own_memory(world, {}))


def plan_first_fleet(world: World, states: Sequence[NodeState], measured: Sequence[Measurement]
                     ) -> Starter:
    """Plan the first fleet from the models that were found, with this machine's free memory."""
    unknown = plan_starter(states, measured, {})
    own = int(with_own_memory(world, {})["local"])
    if not own:
        return unknown
    known = plan_starter(states, measured, {"local": own})
    if known.has_models and sys.platform == "darwin":
        return known
    # Elsewhere a graphics card may have more than the machine: no model is left out for it.
    placed = {model_slot(load.model) for load in known.assignment.placements}
    wanted = {model_slot(load.model) for load in unknown.assignment.placements}
    return unknown if wanted - placed else known


def with_own_memory(world: World, memory: Mapping[str, float]) -> dict[str, float]:
    """Return the memory for models of each machine, with the free memory of this one."""
    return {"local": world.total_gigabytes() * USABLE_SHARE, **memory}


def suggest_node(text: str, taken: Iterable[str]) -> str:
    """Return NAME=URL as close as possible to the typed text."""
    name, equals, url = text.partition("=")
    if not equals and re.search("[.:]", text):
        name, url = "", text
    for address in (url, re.sub(r":\d+$", "", url), "http://192.168.1.50:11434"):
        with contextlib.suppress(FleetError):
            full_endpoint(address)
            url = address
            break
    name = re.sub(r"[^\w.-]+", "-", name).strip("-")
    if not obeys(name, "name"):
        name = "mini"
    return f"{free_name_of(name, '2', taken=set(taken))}={url}"


def with_this_machine(world: World, nodes: Mapping[str, Node]) -> dict[str, Node]:
    """Return nodes with this machine first, unless it is among them under another name."""
    def name_place(endpoint: str) -> Endpoint:
        place = split_endpoint(endpoint)
        return replace(place, host="localhost") if is_here(world, place.host) else place

    here = own_endpoint(world)
    if any(name_place(node.endpoint) == name_place(here) for node in nodes.values()):
        return dict(nodes)
    return {"local": Node("local", here), **nodes}


def ask_machines(world: World, nodes: Mapping[str, Node]) -> list[NodeState]:
    """Ask machines for their models; on this one also look for servers other than Ollama."""
    states = probe_nodes(world, nodes, INIT_TIMEOUT_SECONDS, are_known=False)
    here = states.get("local")
    if here and here.reason == "refused" and not world.environ.get("OLLAMA_HOST"):
        for server in look_for_servers(world, (), INIT_TIMEOUT_SECONDS)[:1]:
            states["local"] = replace(server[0], name="local")
    return list(states.values())


def write_starter(world: World, output: str, starter: Starter, *,
                  offline: bool = False) -> str:
    """Write the planned fleet file; return lines that say so."""
    gateway = Gateway()
    if not offline:
        gateway = avoid_taken_port(world, gateway)
    _, name = world.split(world.real_path(world.parent(output)))
    text = render_starter(starter.tree, starter.has_models,
                          name if obeys(name, "line") else "local-dev",
                          starter.notes, port=gateway.port)
    lines = write_fleet(world, output, text)
    if gateway.port != Gateway.port:
        lines.append(f"Port {Gateway.port} is in use by something else "
                     f"(`lsof -i :{Gateway.port}` shows what): this fleet uses {gateway.port}.")
    keep_trusted(world, load_config(world, output).fleet, accepts=True)
    return "".join(clean_line(line) + "\n" for line in lines)


def own_endpoint(world: World) -> str:
    """Return Ollama's address on this machine, from OLLAMA_HOST."""
    text = world.environ.get("OLLAMA_HOST", "").strip(" \"'")
    # 0.0.0.0 includes this machine. Without a port, http:// means 80, else 11434 (0.32.15).
    text = re.sub(r"^(https?://)?(0\.0\.0\.0|\[::\]|::)?(?=:\d*$|$)", r"\1localhost", text)
    if text.startswith("http://") and not re.search(r":\d+$", text):
        text += ":80"
    try:
        return full_endpoint(text).url if text != "localhost" else OLLAMA_ENDPOINT
    except FleetError:
        return OLLAMA_ENDPOINT


# How to open each other kind of server to the LAN.
SERVER_SETUPS = {
    "llamacpp": "start llama-server with `--host 0.0.0.0`, and with `--api-key KEY` where "
                "others are in the network",
    "lmstudio": "in LM Studio, Developer: Server Settings, Serve on Local Network",
    "vllm": "start vLLM with `--host 0.0.0.0 --api-key KEY`"}


def look_for_servers(world: World, addresses: Sequence[str], seconds: float
                     ) -> list[list[NodeState]]:
    """Return other servers on this machine, each with the addresses at which it is open."""
    places = ("127.0.0.1", *addresses)
    nodes = {f"{kind} {address}": Node(
        address, f"http://{show_host(address)}:{NODE_KINDS[kind].port}", provider=kind)
        for kind in SERVER_SETUPS for address in places}
    states = probe_nodes(world, nodes, seconds)
    servers = []
    for kind in SERVER_SETUPS:
        here, *others = (states[f"{kind} {address}"] for address in places)
        if here.online:
            servers.append([here, *(state for state in others if state.online)])
    return servers
