"""Running Claude Code on the fleet."""
from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

from fleet.cli.rows import type_again
from fleet.cli.say import tell, tell_findings
from fleet.findings.checks import CLAUDE_INSTALL, Facts
from fleet.findings.config import lint_key
from fleet.findings.doctor import plan_doctor
from fleet.findings.gateway import leads_away, overridden_names
from fleet.plan.environment import (
    ADDRESSES,
    merge_environment,
    plan_denied_tools,
    plan_settings,
)
from fleet.start.constants import EXIT_REFUSED
from fleet.start.errors import FleetError
from fleet.start.gate import late_decorator
from fleet.start.record import replace
from fleet.steps.gateway_seen import find_gateway
from fleet.text.phrases import some_of
from fleet.text.tables import format_words
from fleet.text.terminal import PLAIN, Cell
from fleet.workspace.claude import find_settings, last_session, line_of, managed_settings
from fleet.workspace.config import look_of
from fleet.workspace.directory import observe_files
from fleet.workspace.records import ReceiptsReader
from fleet.world.places import PrivateDirectory

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from fleet.config.sections import Fleet
    from fleet.text.terminal import Look
    from fleet.workspace.directory import Workspace
    from fleet.world.world import World


def format_lean(denied: Sequence[str], look: Look = PLAIN) -> str:
    """Return which of Claude Code's tools are off, and how to turn them on."""
    sentence = (f"Started with {len(denied)} rarely used tools off ({some_of(denied, 3)}) "
                "for a faster first answer. To get them back: `lean: false` under "
                "`project.claude`.")
    return format_words([Cell(sentence)], look, indent="  ")


def launch_claude(workspace: Workspace, fleet: Fleet, options: Namespace, *,
                  tells_lean: bool = False) -> int:
    """Warn of problems, check that a gateway serves the fleet, and run Claude Code."""
    world = workspace.world
    program = world.which("claude")
    if not program:
        raise FleetError("claude-missing", "Claude Code is not on the PATH",
                         fix=CLAUDE_INSTALL)
    key = workspace.read_key(fleet)

    managed = find_settings(world, managed_settings(world))  # they override ours
    refuse_managed(fleet, managed, options, world)
    words = options.passed
    own = words[:words.index("--")] if "--" in words else words
    if any(word.split("=")[0] == "--settings" for word in own):
        raise FleetError("own-settings", "a `--settings` of your own would replace the fleet's",
                         fix="put yours into .claude/settings.local.json",
                         status=EXIT_REFUSED)
    facts = observe_files(workspace, fleet, Facts(settings=managed))
    findings = list(lint_key(fleet, world.environ))
    for _, finding in plan_doctor(fleet, facts, topics=("Claude Code", "Files")):
        if finding.level in ("warning", "error"):
            findings.append(replace(finding, level="warning"))
    tell_findings(findings, world)

    find_gateway(world, fleet, key, needed=True)
    environ = merge_environment(world.environ, fleet, key)
    denied = plan_denied_tools(fleet, words)
    if denied and tells_lean:
        world.err(format_lean(denied, look_of(world, "stderr")))
    if tells_lean:
        tell(world, "Claude Code calls your models by their aliases, and may say of one "
             "`unrecognized_model`; that is harmless. `subagent-fleet trace` "
             "names the models.\n")
    planned = plan_settings(fleet, environ, {"deny": denied} if denied else {})
    with claude_settings(world, planned) as settings:
        return world.run([program, *settings, *words], environ)


@late_decorator(lambda: contextlib.contextmanager)
def claude_settings(world: World, settings: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the arguments that pass settings to Claude Code in a temporary file.

    They contain the key, and other users can read arguments.
    """
    with PrivateDirectory() as place:
        path = world.path(place, "settings.json")
        world.replace_files([(path, json.dumps(settings).encode("utf-8"), 0o600)])
        yield ["--settings", path]


def refuse_managed(fleet: Fleet, managed: Mapping[str, Mapping[str, object]],
                   options: Namespace, world: World) -> None:
    """Refuse to start Claude Code if an administrator's settings send it elsewhere."""
    for path, environment in managed.items():
        names = [name for name in overridden_names(fleet, environment) if leads_away(name)]
        names.sort(key=lambda name: name not in ADDRESSES)
        if not names or (options.trust and names[0] not in ADDRESSES):
            continue
        fix = f"remove it from {path}"
        if names[0] not in ADDRESSES:
            fix += ", or add --trust"
        where = f"{path}:{line_of(world.read_bytes(path), names[0])}"
        raise FleetError("settings-managed", f"{names[0]} under `env` of managed settings "
                         "beats the fleet's: prompts or the key would go elsewhere",
                         where=where, fix=fix, status=EXIT_REFUSED)


def tell_session(workspace: Workspace, began: float, options: Namespace) -> None:
    """Say how to continue the session: Claude Code's own hint would not use the fleet."""
    try:
        receipts = ReceiptsReader(workspace).read()
        session = last_session(receipts, workspace, since=began)
    except FleetError:  # unreadable records are no reason to fail here
        return
    if session:
        workspace.world.err(
            "\nTo continue the latest session of this directory on your fleet:\n"
            f"  {type_again(options, passed=['--resume', session])}\n"
            "Which machine did what:\n  subagent-fleet trace last\n")
