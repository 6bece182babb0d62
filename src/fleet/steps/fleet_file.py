"""Writing a fleet file, and putting a machine into one."""
from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fleet.cli.say import check_names, tell_findings
from fleet.config.address import split_endpoint
from fleet.config.names import find_models, full_model_name
from fleet.config.node import obtain_model
from fleet.config.sections import Node
from fleet.nodes.probe import probe_nodes
from fleet.plan.candidates import rank_models
from fleet.plan.memory import SMALL_PLACEHOLDER
from fleet.plan.rating import rate_model
from fleet.plan.starter import plan_added_models, plan_addition
from fleet.start.constants import INIT_TIMEOUT_SECONDS, OLLAMA_PORT
from fleet.start.errors import Finding, FleetError
from fleet.start.record import replace
from fleet.text.phrases import quote_shell, some_of
from fleet.text.yaml import parse_yaml
from fleet.workspace.config import load_config
from fleet.workspace.directory import Workspace, backup_of
from fleet.workspace.trust import find_untrusted, keep_trusted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from fleet.config.node import NodeModel, NodeState
    from fleet.config.sections import Fleet
    from fleet.workspace.config import Config
    from fleet.world.world import World


def write_fleet(world: World, output: str, text: str) -> list[str]:
    """Write a new fleet file: JSON if its name says so, else YAML that names its schema."""
    directory, name = world.split(output)
    if name.lower().endswith(".json"):
        text = json.dumps(parse_yaml(text), indent=2, ensure_ascii=False) + "\n"
    else:
        if world.kind_of(world.path(directory, "fleet.schema.json")) == "file":
            text = f"# yaml-language-server: $schema=fleet.schema.json\n{text}"
    return replace_config(world, output, text)


def replace_config(world: World, path: str, text: str) -> list[str]:
    """Write a fleet file and keep a copy of the old one; return lines that say so."""
    directory, name = world.split(path)
    beside = Workspace(world, directory)
    old = beside.read(name)
    content = text.encode("utf-8")
    if old is None:
        world.replace_files([(path, content, 0o644)])
        return [f"Created {path}"]

    if b"\r\n" in old:  # keep Windows line ends
        content = content.replace(b"\n", b"\r\n")
    mode = 0o644 if world.others_may_read(path) else 0o600
    copy = beside.enter(backup_of(name, old))
    world.replace_files([(copy, old, 0o600), (path, content, mode)])
    return [f"Updated {path}", f"The old one is kept: {copy}"]


def insert_node(world: World, config: Config, path: str, text: str) -> str:
    """Write a fleet file with another machine; return where the old one is kept."""
    is_agreed = not find_untrusted(world, config.fleet)
    _, kept = replace_config(world, path, text)
    if is_agreed:  # the person typed the new machine, so that is accepted, too
        keep_trusted(world, load_config(world, path).fleet, accepts=True)
    return kept


def plan_insertion(config: Config, node: Node, names: Sequence[str], world: World,
                   retype: Callable[[str], str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Ask a new machine for its models; return its sections for the fleet file.

    `retype` returns the command that was typed, with this machine at another address.
    """
    fleet = config.fleet
    source = fleet.document.source
    for other in fleet.nodes.values():
        if (other.name == node.name) != (other.endpoint == node.endpoint):
            fix = (f"`subagent-fleet add {other.name}={other.endpoint}` puts in its new models; "
                   "another machine needs another name")
            if other.name == node.name:
                fix = (f"if it has moved, write `endpoint: {node.endpoint}` in "
                       f"nodes.{other.name}; another machine needs another name")
            raise FleetError("known-node", f"{source} already has a node `{other.name}` at "
                             f"{other.endpoint}", fix=fix)
    known = fleet.nodes.get(node.name)
    node = known or node  # with its key
    state = probe_nodes(world, {node.name: node}, INIT_TIMEOUT_SECONDS,
                        are_known=False)[node.name]
    if not state.online:
        raise FleetError("node-silent", f"node `{node.name}`: {state.why} ({node.endpoint}); "
                         "nothing was written",
                         fix=find_usual_port(world, state, retype) or state.fix)
    models = choose_models(fleet, state, names)
    tell_findings([Finding("no-tools", "warning", f"{model.name} {rate_model(model).flaw}",
                           fix=f"{obtain_model(state.provider, SMALL_PLACEHOLDER)} on "
                               f"{node.name}")
                   for model in models if rate_model(model).flaw], world)
    added = plan_addition(fleet.models.values(), state, models)
    if known:
        del added["nodes"]
    return added


def find_usual_port(world: World, state: NodeState, retype: Callable[[str], str]) -> str:
    """Return how to type a silent machine that answers at Ollama's usual port, or nothing."""
    place = split_endpoint(state.endpoint)
    usual = replace(place, port=OLLAMA_PORT)
    if place.port == OLLAMA_PORT or state.reason != "refused":
        return ""
    node = Node(state.name, usual.url)
    if not probe_nodes(world, {state.name: node}, INIT_TIMEOUT_SECONDS)[state.name].online:
        return ""
    return f"`{retype(f'{state.name}={usual.url}')}`, the usual port, where Ollama answers"


def choose_models(fleet: Fleet, state: NodeState, names: Sequence[str]) -> list[NodeModel]:
    """Return the models of a machine to add that are not in the fleet file yet."""
    models = []
    for name in names:
        matches = find_models(state.models, name)
        check_names("model", () if matches else (name,),
                    [model.name for model in state.models], state.name)
        models += matches
    models = models or plan_added_models(fleet, state)
    if not models:
        raise FleetError("no-model", f"node `{state.name}` has no model that can answer an "
                         "agent; nothing was written",
                         fix=f"{obtain_model(state.provider, SMALL_PLACEHOLDER)} there")

    residents = {full_model_name(model.ollama_model) for model in fleet.models.values()
                 if model.node == state.name}
    new = [model for model in models if full_model_name(model.name) not in residents]
    if not new:
        fix = "`subagent-fleet recommend` plans its work"
        others = [candidate.model.name for candidate in rank_models(state)
                  if full_model_name(candidate.model.name) not in residents]
        if others:
            fix = (f"`subagent-fleet add {state.name}={state.endpoint} --model "
                   f"{quote_shell(others[0])}` puts in one more")
        raise FleetError("known-node", f"{fleet.document.source} has "
                         f"`{state.name}` already, and of its models "
                         f"{some_of([model.name for model in models])}", fix=fix)
    return new
