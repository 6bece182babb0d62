"""The observed state of a fleet, as plain values."""
from __future__ import annotations

import datetime
import re
from typing import TYPE_CHECKING

from fleet.config.node import NodeState
from fleet.findings.checks import OUR_GATEWAY, plan_next_step
from fleet.findings.gateway import check_gateway
from fleet.plan.measured import find_measurement
from fleet.plan.routes import plan_route_states
from fleet.start.errors import Finding
from fleet.start.record import Record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from fleet.config.sections import Fleet
    from fleet.plan.measured import Measurement
    from fleet.plan.routes import NextStep, RouteState


def format_expiry(expires: str, now: float) -> str:
    """Return when a model is unloaded, from the time in `/api/ps`."""
    text = re.sub(r"\.\d+", "", expires).replace("Z", "+00:00")  # Python 3.9 parses neither
    try:
        left_seconds = datetime.datetime.fromisoformat(text).timestamp() - now
    except (ValueError, OverflowError):
        return "?"

    if left_seconds < 0:
        return "leaving, or busy"
    if left_seconds < 2 * 3600:
        return f"{left_seconds / 60:.0f} min"
    if left_seconds < 366 * 86400:
        return f"{left_seconds / 3600:.0f} h"
    return "never"  # keep_alive: -1 is a date in the year 2318


def show_record(record: Any) -> dict[str, Any]:
    """Return a record for JSON; a finding without its excerpt."""
    if isinstance(record, Finding):
        return {
            "id": record.slug,
            "level": record.level,
            "what": record.what,
            "where": record.where,
            "fix": record.fix,
        }
    fields = dict(vars(record))
    if isinstance(record, NodeState):
        fields["online"] = record.online
    return fields


class NodeTotals(Record):
    """The totals of a node since its gateway started, from `/fleet`."""

    name: str
    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    waited_seconds: float = 0
    failures: int = 0


class KeptWarm(Record):
    """What a model's cache probably holds, from `/fleet`."""

    conversations: int = 0
    tokens: int = 0


class ModelSlots(Record):
    """How busy a model is, from `/fleet`."""

    route: str
    running: int
    slots: int
    rests_seconds: float = 0
    warm: KeptWarm = KeptWarm()


class FleetPage(Record):
    """The fields of `/fleet` that this program uses."""

    fleet: str
    config: str = ""
    nodes: tuple[NodeTotals, ...] = ()
    models: tuple[ModelSlots, ...] = ()
    waiting: int = 0
    left_house: dict[str, int] = {}  # requests and tokens


class GatewayView(Record):
    """What holds the gateway port and, if it is this fleet's gateway, its `/fleet`."""

    # OUR_GATEWAY if it serves this fleet with its key; else what listens there, or "".
    holder: str
    page: FleetPage | None = None


class Sight(Record):
    """The state of a fleet at one moment, for `status` and the page."""

    fleet: Fleet
    states: Mapping[str, NodeState]
    routes: Mapping[str, RouteState]  # by model
    gateway: Finding
    step: NextStep
    now: float  # seconds since 1970
    said: FleetPage  # by the fleet's gateway, if it answers
    tasks: Sequence[Mapping[str, Any]] = ()
    measured: Sequence[Measurement] = ()  # by `bench`
    findings: Sequence[Finding] = ()
    is_followed: bool = False  # the page follows the gateway's events

    @property
    def places(self) -> dict[str, ModelSlots]:
        """How busy each model is, by its key in `models:`."""
        return {model.route: model for model in self.said.models}

    def find_measured(self, node: str, ollama_model: str) -> Measurement | None:
        """Return the measurement of a model on a node, or None."""
        return find_measurement(self.measured, self.states[node].endpoint, ollama_model)


def plan_sight(fleet: Fleet, states: Mapping[str, NodeState], view: GatewayView, now: float
               ) -> Sight:
    """Return the Sight made of the answers of machines and the gateway."""
    gateway = check_gateway(fleet, view.holder)
    routes = plan_route_states(fleet, states)
    step = plan_next_step(fleet, states, routes, gateway)
    said = FleetPage(fleet.name)
    if view.page and view.holder == OUR_GATEWAY:
        said = view.page
    return Sight(fleet, states, routes, gateway, step, now, said)
