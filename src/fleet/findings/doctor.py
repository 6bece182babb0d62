"""Every check, in the order of their findings."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.findings.checks import Facts
from fleet.findings.config import (
    check_claude,
    check_config,
    check_litellm,
    check_python,
    lint_agents,
    lint_gateway_host,
    lint_main_fallback,
    lint_nodes,
    lint_tokens,
    lint_twins,
    lint_unused_models,
)
from fleet.findings.files import check_files, check_secret
from fleet.findings.gateway import check_gateway_port, check_settings
from fleet.findings.nodes import (
    check_exposure,
    check_memory,
    check_nodes_answer,
    check_room,
)
from fleet.findings.routes import check_routes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fleet.config.sections import Fleet
    from fleet.start.errors import Finding


CHECKS = (
    check_python,
    check_claude,
    check_litellm,
    check_config,
    lint_gateway_host,
    lint_nodes,
    lint_twins,
    lint_tokens,
    lint_main_fallback,
    lint_unused_models,
    lint_agents,
    check_nodes_answer,
    check_exposure,
    check_room,
    check_memory,
    check_routes,
    check_gateway_port,
    check_settings,
    check_files,
    check_secret,
)


def lint_fleet(fleet: Fleet) -> Iterator[Finding]:
    """Yield a warning for each thing that is allowed and will disappoint."""
    for row in CHECKS:
        if row.needs == "file":
            yield from row.find(fleet, Facts())


def plan_doctor(fleet: Fleet | None, facts: Facts, *,
                topics: Sequence[str] = ()) -> list[tuple[str, Finding]]:
    """Return (topic, Finding) for all that the checks, or those of some topics, report."""
    findings = []
    for row in CHECKS:
        is_asked = not topics or row.topic in topics
        if is_asked and (fleet or row.needs in ("nothing", "disk")):
            findings += [(row.topic, finding) for finding in row.find(fleet, facts)]
    return findings
