"""Collecting the facts that `doctor` judges."""
from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

from fleet.cli.say import print_report
from fleet.config.address import split_endpoint
from fleet.findings.checks import Facts
from fleet.findings.config import lint_key
from fleet.nodes.probe import probe_nodes
from fleet.runs.folder import TASK_FILES
from fleet.start.constants import EXIT_PROBLEM
from fleet.start.errors import FleetError, NodeFailure
from fleet.start.record import replace
from fleet.steps.gateway_seen import known_key, who_serves
from fleet.steps.machines import with_own_memory
from fleet.work.typed import load_tasks
from fleet.workspace.claude import find_settings, managed_settings, usual_settings
from fleet.workspace.directory import observe_files
from fleet.workspace.records import read_measurements
from fleet.world.child import run_together

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence
    from typing import Any

    from fleet.config.sections import Fleet, Node
    from fleet.start.errors import Finding
    from fleet.workspace.directory import Workspace
    from fleet.world.world import World


def find_task_file_near(world: World, source: str) -> str:
    """Return the task file beside a fleet file, or nothing."""
    for name in TASK_FILES if source != "<stdin>" else ():
        path = world.path(world.split(source)[0], name)
        if world.kind_of(path) == "file":
            return path
    return ""


def refuse_config(error: FleetError, options: Namespace, world: World) -> int:
    """Print the JSON of an invalid config; raise if it cannot be read."""
    error.report = {"file": error.where or options.config, "valid": False}
    if not error.findings:
        raise error
    print_report(world, "validate", {**error.report, "findings": error.findings})
    return EXIT_PROBLEM


def observe(workspace: Workspace, fleet: Fleet | None, *, problems: Sequence[Finding],
            seconds: float) -> Facts:
    """Return the Facts of this machine and, if there is a fleet, of its nodes and files."""
    world = workspace.world
    until = world.clock() + seconds  # each job ends by itself then
    facts = Facts(problems=tuple(problems), has_litellm=bool(world.which("litellm")))
    jobs: dict[str, Callable[[], Any]] = {}

    program = world.which("claude")
    if program:
        jobs["claude"] = lambda: ask_version(world, program, until)
    if fleet:
        problems = (*problems, *check_task_file(world, fleet),
                    *lint_key(fleet, world.environ))
        paths = [*managed_settings(world), *usual_settings(world)]
        memory = {name: node.memory_gb for name, node in fleet.nodes.items()
                  if node.memory_gb}
        facts = replace(facts, settings=find_settings(world, paths),
                        measured=read_measurements(workspace),
                        memory=with_own_memory(world, memory), problems=problems)
        facts = observe_files(workspace, fleet, facts)
        key = known_key(workspace, fleet)
        jobs["states"] = lambda: probe_nodes(world, fleet.nodes, seconds, fleet.models)
        jobs["addresses"] = lambda: find_addresses(world, fleet, until)
        jobs["holder"] = lambda: who_serves(world, fleet, key, until)

    answers = {key: answer for key, answer in run_together(world, jobs) if key}
    return replace(facts, **answers)


def check_task_file(world: World, fleet: Fleet) -> Sequence[Finding]:
    """Return what is wrong with the task file beside the fleet file, if there is one."""
    path = find_task_file_near(world, fleet.document.source)
    try:
        if path:
            load_tasks(world, path, fleet)
    except FleetError as error:
        return error.findings or (error.finding,)
    return ()


def ask_version(world: World, program: str, until: float) -> str:
    """Return the first word of a program's version, or `?`."""
    ran = world.run_program([program, "--version"], seconds=until - world.clock())
    words = ran.text.split() if ran.code == 0 else []
    numbers = [word for word in words if re.match(r"v?\d+\.\d", word)]
    return (numbers or words)[0][:40] if words else "?"


def find_addresses(world: World, fleet: Fleet, until: float) -> dict[str, tuple[str, ...]]:
    """Return the addresses of each node's host, all asked for at once."""
    jobs = {name: lambda node=node: addresses_of(world, node, until)
            for name, node in fleet.nodes.items()}
    return {name: found for name, found in run_together(world, jobs) if name}


def addresses_of(world: World, node: Node, until: float) -> tuple[str, ...]:
    """Return the addresses of a node's host; failures are in the node's state."""
    with contextlib.suppress(NodeFailure):
        places = world.resolve(split_endpoint(node.endpoint).host, 0, until)
        return tuple(sorted({address[0] for *_, address in places}))
    return ()
