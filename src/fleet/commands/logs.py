"""`logs`: show requests, one on each line."""
from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from fleet.cli.live import watch
from fleet.cli.rows import CONFIG, JSON, LOOK, OUT, Flag, command, parse_count
from fleet.cli.say import open_workspace, print_report, tell
from fleet.speech.cloud import backend_of
from fleet.speech.talk import REFUSAL_KINDS
from fleet.start.constants import EXIT_OK, TICK_SECONDS
from fleet.start.errors import FleetError
from fleet.text.phrases import count_of
from fleet.text.terminal import clean_line
from fleet.views.requests import (
    AgentNames,
    LogTable,
    choose_failed,
    known_agents,
    report_requests,
)
from fleet.workspace.config import load_config, look_of
from fleet.workspace.records import (
    RECEIPTS_FILE,
    RECEIPTS_READ_BYTES,
    latest_receipts,
    parse_receipts,
)
from fleet.world.places import Tail

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Sequence

    from fleet.gateway.receipts import Receipt
    from fleet.workspace.directory import Workspace
    from fleet.world.world import World


@command("logs", "show the latest requests, and why some failed", CONFIG, OUT,
         Flag("--follow", "keep showing requests as they end, until Ctrl-C", short="-f"),
         Flag("--lines", "how many", "N", {"type": parse_count, "default": 20}, short="-n"),
         Flag("--failed", "only requests that failed or fell back"),
         Flag("--session", "only requests of the session whose id begins with this", "ID",
              {"default": ""}), JSON,
         group=LOOK, examples=("logs", "logs --follow --failed", "logs --session 5b1c"),
         excludes=("follow json",))
def cmd_logs(options: Namespace, world: World) -> int:
    workspace = open_workspace(options, world)
    coming = Tail(world, workspace.enter(RECEIPTS_FILE), last_bytes=1)  # from now on
    names = AgentNames(world, known_agents(options, world))
    receipts, count = find_latest(workspace, options)
    requests = report_requests(receipts, names, options)

    if options.json:
        print_report(world, "logs", {"requests": requests})
        return EXIT_OK
    if len(requests) < options.lines:
        tell_all_read(workspace, receipts, count)

    look = look_of(world)
    table = LogTable(requests, look, world.now())
    if requests or options.follow:
        world.out(table.head())
    def show_new(_: str) -> bool:
        nonlocal requests
        for request in requests:
            world.out(table.line(request, world.now()))
        if options.follow:  # for the next look
            came = choose_wanted(parse_receipts(coming.lines()), options)
            requests = report_requests(came, names, options)
        return True

    watch(world, TICK_SECONDS if options.follow else None, show_new, clears=False)
    if look.columns and not options.failed and choose_failed(receipts):
        tell(world, "\nWhy some failed: `subagent-fleet logs --failed`\n")
    tell_node_logs(receipts, options, world)
    return EXIT_OK


def find_latest(workspace: Workspace, options: Namespace) -> tuple[list[Receipt], int]:
    """Return the latest receipts that match, and how many were read."""
    count = 0
    found: list[Receipt] = []
    for receipt in latest_receipts(workspace):
        count += 1
        found += choose_wanted([receipt], options)
        if len(found) == options.lines:
            break
    return found[::-1], count


def choose_wanted(receipts: Iterable[Receipt], options: Namespace) -> list[Receipt]:
    """Return the receipts of a session or of all; only the failed ones if `--failed` says so."""
    wanted = [receipt for receipt in receipts if receipt.session.startswith(options.session)]
    return choose_failed(wanted) if options.failed else wanted


def tell_all_read(workspace: Workspace, receipts: Sequence[Receipt], count: int) -> None:
    """Say that no receipt matched, how many were read, and what was not read."""
    world = workspace.world
    path = clean_line(workspace.path(RECEIPTS_FILE))
    if not count:
        tell(world, "No requests yet. `subagent-fleet up` and `subagent-fleet serve` record "
             f"them in {path}.\n")
    elif not receipts:
        tell(world, f"None of {count_of(count, 'request')} in {path} is such a one.\n")
    unread = world.size_of(workspace.enter(RECEIPTS_FILE)) - RECEIPTS_READ_BYTES
    if unread > 0:
        tell(world, f"The first {unread / 1e6:.1f} MB of {path} were not read.\n")


def tell_node_logs(receipts: Iterable[Receipt], options: Namespace, world: World) -> None:
    """Say where the logs of the machines are that refused a request."""
    kinds = {"api_error", *REFUSAL_KINDS.values()}
    names = {tried.node for receipt in receipts for tried in receipt.failures
             if tried.why in kinds}
    with contextlib.suppress(FleetError):  # without a valid fleet it is not known what they run
        fleet = load_config(world, options.config).fleet
        for name in sorted(names & set(fleet.nodes)):
            backend = backend_of(fleet.nodes[name])
            if backend.log:
                tell(world, f"\n{backend.title}'s own log on {name}: {backend.log}\n")
