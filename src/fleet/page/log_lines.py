"""LiteLLM's log, as lines of the page."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.start.gate import LatePattern
from fleet.text.terminal import clean_line

if TYPE_CHECKING:
    from collections.abc import Sequence


LOG_LINES = 100

# Names of keys with their values, and the well-known beginnings of keys.
_SECRET = LatePattern(
    r"(?i:(?:api[_-]?key|token|secret|password|authorization)[\"']?\s*[=:]\s*"
    r"(?:(?:basic|bearer) )?[\"']?[^\s\"',;)]{4,})|(?i:bearer) \S+"
    r"|\b(?:sk|pk|rk|gsk|xai|hf|ghp|github_pat|AIza|AKIA|glpat)[-_]?[\w-]{8,}")
_SEVERITIES = LatePattern(r"(ERROR|CRITICAL|Traceback|Exception|Error:)|(WARN)")


def parse_log(log: Sequence[bytes]) -> list[dict[str, str]]:
    """Return the last lines of a program's log and how severe each is, without any keys."""
    lines = []
    for line in log[-LOG_LINES:]:
        shown = _SECRET.sub("(a key)", clean_line(line.decode("utf-8", "replace")))[:500]
        found = {found.lastindex for found in _SEVERITIES.finditer(shown)}
        level = "info"
        if found:
            level = "error" if 1 in found else "warning"
        if shown.strip():
            lines.append({"level": level, "line": shown})
    return lines
