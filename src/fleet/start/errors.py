"""What can go wrong: FleetError, NodeFailure, and the Finding that both tell."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.start.constants import EXIT_PROBLEM
from fleet.start.record import Record

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any


# An expected failure is a FleetError. It holds a Finding, and only `program/` prints it.


class FleetError(Exception):
    """An expected failure: what, where and what to type. Only `main` prints it."""

    def __init__(self, slug: str, what: str, *, where: str = "", fix: str = "",
                 excerpt: str = "", status: int = EXIT_PROBLEM,
                 findings: Iterable[Finding] = ()) -> None:
        super().__init__(what)
        self.finding = Finding(slug, "error", what, where, excerpt, fix)
        self.status = status
        self.findings = tuple(findings)  # an invalid config has one for each problem
        self.report: dict[str, Any] = {}  # what `--json` shows beside it

    def __getattr__(self, name: str) -> Any:
        """Return a field of its finding: `slug`, `what`, `where`, `excerpt`, `fix`."""
        return getattr(self.finding, name)


class NodeFailure(FleetError):
    """Why a node could not be used: a reason class (refused, timeout, …) and the detail."""

    def __init__(self, reason: str, detail: str, *, fix: str = "") -> None:
        super().__init__("node-failure", f"{reason}: {detail}" if detail else reason, fix=fix)
        self.reason, self.detail = reason, detail


class Finding(Record):
    """A fact about a config, a node or a file, and its fix."""

    slug: str
    level: str  # error, warning, info or ok
    what: str
    where: str = ""
    excerpt: str = ""
    fix: str = ""
