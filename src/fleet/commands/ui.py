"""`ui`: show the dashboard."""
from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from fleet.cli.live import wait_until
from fleet.cli.rows import CONFIG, LOOK, OUT, Flag, command, parse_port
from fleet.cli.say import open_workspace
from fleet.start.constants import EXIT_INTERRUPTED, EXIT_OK
from fleet.views.lookout import listen_for_page, open_dashboard
from fleet.workspace.config import load_config

if TYPE_CHECKING:
    from argparse import Namespace

    from fleet.world.world import World


@command("ui", "show the fleet live, on a page in your browser", CONFIG, OUT,
         Flag("--port", "the page's port; 0: any", "PORT", {"type": parse_port}),
         Flag("--no-open", "only print the address"),
         group=LOOK, examples=("ui", "ui --port 8090 --no-open"))
def cmd_ui(options: Namespace, world: World) -> int:
    fleet = load_config(world, options.config).fleet
    workspace = open_workspace(options, world)
    listener = listen_for_page(world, fleet.gateway, options.port)
    signals: list[str] = []
    with contextlib.ExitStack() as stops:
        dashboard = open_dashboard(workspace, fleet, options, listener, stops)
        world.on_stop(signals.append)
        address = dashboard.invite()
        world.out(f"Dashboard: {address}\nThis link works once. Ctrl-C stops.\n")

        def look() -> list[str]:
            nonlocal address
            if not dashboard.is_unused(address):
                address = dashboard.invite()
                world.out(f"For another browser: {address}\n")
            return signals

        wait_until(world, look)
    return EXIT_INTERRUPTED if "SIGINT" in signals else EXIT_OK
