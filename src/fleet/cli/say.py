"""What commands tell while they work: live lines, findings, reports."""
from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fleet.page.sight import show_record
from fleet.start.constants import (
    EXIT_OK,
    EXIT_PROBLEM,
    EXIT_REFUSED,
    EXIT_USAGE,
    STATE_DIRECTORY,
)
from fleet.start.errors import FleetError
from fleet.text.phrases import count_of, nearest, some_of
from fleet.text.tables import format_finding, wrap_text
from fleet.workspace.config import find_output, look_of
from fleet.workspace.directory import Workspace

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Mapping, Sequence

    from fleet.files.target import Change
    from fleet.start.errors import Finding
    from fleet.world.world import World


def open_workspace(options: Namespace, world: World) -> Workspace:
    """Return the directory of the generated files that the typed words mean."""
    return Workspace(world, find_output(world, out=options.out, config=options.config))


def check_names(kind: str, names: Iterable[str], known: Iterable[str], owner: str,
                form: str = "") -> None:
    """Refuse names of a command that its owner does not have; `form` makes a new one."""
    for name in names:
        if name not in known:
            choices = some_of(list(known))
            raise FleetError(f"unknown-{kind}", f"{owner}: unknown {kind} `{name}`",
                             status=EXIT_USAGE, fix=nearest(name, known) or form.format(name)
                             or (f"known {kind}s: {choices}" if choices
                                 else f"there are no {kind}s yet"))


def tell(world: World, text: str) -> None:
    """Tell a person about progress, on stderr."""
    world.err(wrap_text(text, look_of(world, "stderr"), indent="  "))


def tell_warnings(warnings: Sequence[Finding], world: World) -> None:
    """Say how many warnings a config has: `validate` shows them, with their places."""
    if warnings:
        world.err(f"{count_of(warnings, 'warning')}: `subagent-fleet validate`\n")


def tell_findings(findings: Iterable[Finding], world: World) -> None:
    """Show findings; one that is an error refuses the command."""
    for finding in findings:
        if finding.level == "error":
            raise FleetError(finding.slug, finding.what, fix=finding.fix, status=EXIT_REFUSED)
        world.err(format_finding(finding, look=look_of(world, "stderr")))


# The version of a command's JSON, if it is not 1. In 2, `model` is what a machine runs, `route`
# the key in `models:`, `agent` a name, `agent_id` its id, and a duration ends in `_seconds`.
SCHEMA_VERSIONS = dict.fromkeys(("generate", "discover", "status", "recommend", "warmup", "logs",
                                 "doctor", "trace", "tasks"), 2)


def render_report(command: str, fields: Mapping[str, object]) -> str:
    """Return the JSON object of a command: plain ASCII, whatever a node calls its models."""
    version = SCHEMA_VERSIONS.get(command, 1)
    report = {"schema": f"subagent-fleet/{command}/{version}", **fields}
    return json.dumps(report, indent=2, default=show_record) + "\n"


def print_report(world: World, command: str, fields: Mapping[str, object]) -> None:
    """Print what `--json` says."""
    world.write(render_report(command, fields))


def paths_that(changes: Iterable[Change], *actions: str) -> list[str]:
    """Return the paths of those changes that are called so."""
    return [change.path for change in changes if change.action in actions]


def refuse_edited(paths: Sequence[str], force: str, outcome: str) -> FleetError:
    """Return the error for files that are the user's; `force` overwrites them, as typed."""
    return FleetError(
        "edited", f"{some_of(paths, 5)}: you have edited this file; {outcome}",
        fix=f"move it away, or `{force}` (what is there is copied "
            f"to {STATE_DIRECTORY}/backup first)", status=EXIT_REFUSED)


def exit_status(findings: Iterable[Finding]) -> int:
    """Return the exit status of a command that looks: an error is a problem."""
    return EXIT_PROBLEM if any(found.level == "error" for found in findings) else EXIT_OK
