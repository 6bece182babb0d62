"""`serve`: run the gateway."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.agree import ask_trust
from fleet.cli.rows import CONFIG, OUT, SERVE, TRUST, Flag, command
from fleet.cli.say import open_workspace, tell
from fleet.config.address import show_host
from fleet.gateway.server import Server
from fleet.start.constants import EXIT_INTERRUPTED, EXIT_OK
from fleet.steps.gateway_start import check_key, open_gateway_port, quote_name, receipts_path
from fleet.text.phrases import count_of
from fleet.text.tables import wrap_text
from fleet.views.requests import format_served, list_failures, log_requests
from fleet.workspace.config import load_config, look_of

if TYPE_CHECKING:
    from argparse import Namespace

    from fleet.world.world import World


@command("serve", "serve the fleet to Claude Code", CONFIG, OUT,
         TRUST,
         Flag("--verbose", "print a line for each request and each refusal", short="-v"),
         group=SERVE, examples=("serve", "serve --verbose"))
def cmd_serve(options: Namespace, world: World) -> int:
    fleet = load_config(world, options.config).fleet
    workspace = open_workspace(options, world)
    ask_trust(fleet, options, world)
    key = workspace.read_key(fleet)
    check_key(fleet, key, world)
    listener = open_gateway_port(world, fleet, key)
    server = Server(fleet, key, world, receipts=receipts_path(world, workspace.out))
    world.on_stop(server.stop)

    address = f"{show_host(listener.host)}:{listener.port}"
    said = (f"Serving {quote_name(fleet)} at http://{address}: "
            f"{', '.join(server.scheduler.candidates)} on "
            f"{count_of(fleet.nodes, 'machine')}. Ctrl-C stops.\n")
    world.out(wrap_text(said, look_of(world), indent="  "))
    if fleet.gateway.provider == "litellm":
        tell(world, "This is the built-in gateway. Your file says `provider: litellm`; "
             "`subagent-fleet up` starts LiteLLM.\n")
    if options.verbose:
        server.listen(log_requests(world, fleet))
    began = world.now()
    server.study()
    server.run(listener)
    world.out(format_served({}, server.ledger.totals, look_of(world)))
    world.out(list_failures(workspace, fleet, began, "stdout"))
    return EXIT_INTERRUPTED if server.stops[0] == "SIGINT" else EXIT_OK
