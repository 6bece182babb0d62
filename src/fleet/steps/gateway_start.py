"""Starting a gateway."""
from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from fleet.cli.live import wait_until
from fleet.cli.say import tell, tell_findings
from fleet.config.address import gateway_url, is_loopback
from fleet.files.litellm import render_litellm
from fleet.findings.checks import LITELLM_INSTALL, OUR_GATEWAY
from fleet.findings.config import lint_key
from fleet.gateway.reception import GRACE_SECONDS
from fleet.gateway.server import Server
from fleet.plan.environment import litellm_environment
from fleet.start.constants import (
    LITELLM_FILE,
    LITELLM_LOG_FILE,
    STATE_DIRECTORY,
)
from fleet.start.errors import FleetError
from fleet.steps.gateway_seen import find_gateway, name_free_port, who_serves
from fleet.text.terminal import clean_line
from fleet.workspace.records import RECEIPTS_FILE
from fleet.world.child import Launch
from fleet.world.places import Place, PrivateDirectory

if TYPE_CHECKING:
    import contextlib

    from fleet.config.sections import Fleet
    from fleet.world.child import Child
    from fleet.world.visitor import Listener
    from fleet.world.world import World


LITELLM_START_SECONDS = 90.0


def start_gateway(world: World, fleet: Fleet, key: str, *, out: str,
                  stops: contextlib.ExitStack) -> None:
    """Start the gateway unless it runs already; `stops` will stop it."""
    runs = find_gateway(world, fleet, key)
    url = gateway_url(fleet.gateway)

    if fleet.gateway.provider == "builtin":
        listener = None if runs else open_gateway_port(world, fleet, key)
        server = Server(fleet, key, world, receipts=receipts_path(world, out))
        serving = threading.Thread(target=server.run, args=(listener,), daemon=True)
        serving.start()
        server.study()
        stops.callback(serving.join, GRACE_SECONDS + 1)  # callbacks run in reverse order
        stops.callback(server.stop, "up")

    if runs:
        tell(world, f"Using the gateway of {quote_name(fleet)} that already runs at {url}.\n")
    elif fleet.gateway.provider == "builtin":
        tell(world, f"Serving {quote_name(fleet)} at {url}.\n")
    else:
        start_litellm(world, fleet, key, out=out, stops=stops)
        tell(world, f"LiteLLM serves {quote_name(fleet)} at {url}.\n")


def quote_name(fleet: Fleet) -> str:
    """Return a project's name for a sentence."""
    name = clean_line(fleet.name)
    return f'"{name}"' if " " in name else name


def start_litellm(world: World, fleet: Fleet, key: str, *, out: str,
                  stops: contextlib.ExitStack) -> None:
    """Start LiteLLM, and wait until it has every alias.

    Its config can name Python modules, which it imports from the config's directory and from the
    working directory (1.106.2). So it gets a fresh config in a directory of its own.
    """
    program = world.which("litellm")
    if not program:
        raise FleetError("litellm-missing",
                         "the gateway is LiteLLM, which is not on the PATH",
                         fix=f"{LITELLM_INSTALL}, or write `provider: builtin`")

    log = world.enter(out, LITELLM_LOG_FILE)
    place = stops.enter_context(PrivateDirectory())
    config = world.path(place, LITELLM_FILE)
    world.replace_files([(config, render_litellm(fleet).encode("utf-8"), 0o600)])

    words = [program, "--config", config, "--host", fleet.gateway.host,
             "--port", str(fleet.gateway.port)]
    child = world.start(Launch(words, place, litellm_environment(world.environ, fleet, key),
                               log, log, outlives=False))
    stops.callback(child.stop)

    if not wait_for_gateway(world, fleet, key, child, LITELLM_START_SECONDS):
        raise FleetError("litellm-failed", "LiteLLM did not start", fix=f"see {log}")


def wait_for_gateway(world: World, fleet: Fleet, key: str, child: Child, seconds: float) -> bool:
    """Wait until a gateway that was started serves the fleet; tell if it does."""
    until = world.clock() + seconds

    def serves() -> bool:
        return who_serves(world, fleet, key, until) == OUR_GATEWAY

    wait_until(world, lambda: serves() or child.exit_code() is not None, seconds=seconds)
    return serves()


def open_gateway_port(world: World, fleet: Fleet, key: str) -> Listener:
    """Return the Listener of the gateway port; if it is taken, say by what."""
    gateway = fleet.gateway
    try:
        return world.listen(gateway.host, gateway.port)
    except FleetError as error:
        if error.slug != "port-taken":
            raise
        taken = error.finding

    server = who_serves(world, fleet, key, world.clock() + 1.0)
    is_known = server not in ("", "another program")
    what = f"port {gateway.port} is in use by {server}" if is_known else taken.what
    if server == OUR_GATEWAY:
        raise FleetError("port-taken", what,
                         fix="it is already serving; type `subagent-fleet launch claude`")
    raise FleetError("port-taken", what, fix=name_free_port(world, fleet, taken.fix))


def receipts_path(world: World, out: str) -> str:
    """Return the path of the receipts of a workspace's gateway."""
    world.make_directory(Place(out, STATE_DIRECTORY))
    return world.enter(out, RECEIPTS_FILE)


def check_key(fleet: Fleet, key: str, world: World) -> None:
    """Refuse to serve other machines with a weak key, wherever it comes from."""
    if not is_loopback(fleet.gateway.host):
        tell_findings(lint_key(fleet, {fleet.gateway.master_key_env: key}), world)
