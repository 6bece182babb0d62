"""The speed and the answers of a simulated machine."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.start.record import Record

if TYPE_CHECKING:
    from typing import Any


# A fleet with nothing installed: machines that are simulated, and a client that plays a
# session of Claude Code's on them. The commands between are the real ones; `program/demo` types
# them.

FOR_EVER = "2318-12-01T10:00:00.123456789+01:00"  # as Ollama says when a model is to stay


class Pace(Record):
    """How fast a simulated machine is; 0: it takes no time."""

    load_seconds: float = 0.0
    prompt_rate: float = 0.0  # tokens a second
    answer_rate: float = 0.0


class NodeAnswer(Record):
    """What a simulated node says: one value, or lines as they come."""

    status: int
    value: Any  # a list is sent as lines, bytes as they are
