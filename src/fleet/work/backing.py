"""The services for the agents of tasks: the fleet, its key and its gateway."""
from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from fleet.config.address import gateway_url
from fleet.files.harnesses import HARNESSES
from fleet.runs.agent import Backing
from fleet.start.constants import CONFIG_VARIABLE
from fleet.start.errors import FleetError
from fleet.steps.gateway_seen import find_gateway, get_page_with_key, known_key
from fleet.steps.gateway_start import quote_name, wait_for_gateway
from fleet.text.terminal import clean_line
from fleet.workspace.config import load_config, search_config
from fleet.workspace.directory import Workspace
from fleet.workspace.records import ReceiptsReader
from fleet.world.child import Launch

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping
    from typing import Any

    from fleet.config.sections import Fleet
    from fleet.files.harness import Start
    from fleet.gateway.receipts import Receipt
    from fleet.runs.folder import Folder
    from fleet.world.world import World


def load_fleet_for_tasks(options: Namespace, world: World, folder: Folder) -> Fleet | None:
    """Return the fleet near a repository; None if there is none and none was typed."""
    if options.config or world.environ.get(CONFIG_VARIABLE):
        return load_config(world, options.config).fleet
    here = [] if options.everywhere else [world.directory]
    for directory in (*here, folder.repository.main):
        path = search_config(world, directory, shown=directory)
        if path:
            return load_config(world, path).fleet
    return None


def load_fleet_if_valid(options: Namespace, world: World, folder: Folder, *,
                        tells: bool = True) -> Fleet | None:
    """Return the fleet, or None if its file is invalid, for commands that start no agent."""
    try:
        return load_fleet_for_tasks(options, world, folder)
    except FleetError as error:
        if error.slug != "invalid-config":
            raise
        if tells:
            world.err(f"{clean_line(error.what)}: subagent-fleet validate\n")
        return None


def workspace_of(fleet: Fleet, options: Namespace, world: World) -> Workspace:
    """Return the directory with the generated files of the fleet that serves tasks."""
    return Workspace(world, options.out or world.parent(fleet.document.source))


def need_key(workspace: Workspace, fleet: Fleet) -> str:
    """Return the gateway's key; if there is none yet, make it, as `generate` does."""
    if not workspace.find_key(fleet):
        workspace.write(workspace.compare(fleet, ("env",)))
    return workspace.read_key(fleet)


def plan_backing(fleet: Fleet | None, options: Namespace, folder: Folder) -> Backing:
    """Return the services as far as they are known, without asking a person for anything."""
    if fleet is None:
        return Backing()
    world = folder.world
    workspace = workspace_of(fleet, options, world)
    key = known_key(workspace, fleet)

    def look() -> Mapping[str, Any]:
        with contextlib.suppress(FleetError):  # `run` itself may have made the key by now
            return get_page_with_key(world, gateway_url(fleet.gateway) + "/fleet",
                             known_key(workspace, fleet), world.clock() + 1.0)
        return {}

    def receipts() -> list[Receipt]:
        with contextlib.suppress(FleetError):
            return ReceiptsReader(workspace).read()
        return []

    def start_coder(name: str) -> Start:
        harness = HARNESSES[name]
        workspace.write([change for change in workspace.compare(fleet, (name,))
                         if change.action != "edited"])
        place = world.real_path(workspace.path(harness.directory()))
        return harness.start(fleet, place, workspace.read_key(fleet))

    return Backing(fleet, key, look, receipts, start_coder=start_coder,
                   serve=lambda: serve_for_tasks(folder, fleet, options))


GATEWAY_START_SECONDS = 15.0


def is_served(world: World, fleet: Fleet, key: str) -> bool:
    """Tell whether the fleet's gateway runs; refuse if none does and none can be started."""
    can_start = fleet.gateway.provider == "builtin" and world.own_program()
    return find_gateway(world, fleet, key, needed=not can_start)


def serve_for_tasks(folder: Folder, fleet: Fleet, options: Namespace) -> None:
    """Make sure that a gateway serves the fleet; one that is started here lives for the agents.

    It is a separate process: agents continue without their supervisor, and still need it.
    """
    world = folder.world
    workspace = workspace_of(fleet, options, world)
    key = need_key(workspace, fleet)
    folder.make()
    if is_served(world, fleet, key):
        return
    with world.hold_soon(folder.place("serve.lock"), GATEWAY_START_SECONDS):
        if find_gateway(world, fleet, key):
            return
        log = folder.place("serve.log")
        hold = world.hold(folder.place("serve.alive"))
        source = world.real_path(fleet.document.source)
        argv = [*world.own_program(), "serve", "--config", source,
                "--out", world.real_path(workspace.out)]
        child = world.spawn(Launch(argv, folder.repository.main, world.environ, log, log,
                                   hold=hold))
        if hold:
            hold.release()
        world.replace_files([(folder.place("serve.pid"), str(child.number).encode(), 0o600)])
        if not wait_for_gateway(world, fleet, key, child, GATEWAY_START_SECONDS):
            raise FleetError("gateway-failed", "the gateway did not start", fix=f"see {log}")
        world.err(f"Serving {quote_name(fleet)} at {gateway_url(fleet.gateway)} while agents "
                  "work.\n")


def end_serving(folder: Folder) -> bool:
    """End the gateway that was started for agents, if there are none left; tell if it ran."""
    world = folder.world
    pid = world.read_part(folder.place("serve.pid"), 0, 32)
    if any(state.is_active or state.attempt.spoken and folder.is_attached(name)
           for name, state in folder.read_states()[0].items()):
        return False
    if not pid.isdigit() or not world.is_held(folder.place("serve.alive")):
        return False
    world.end_processes([int(pid)], at_once=False)
    return True
