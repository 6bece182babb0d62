"""Measurements and receipts on the disk."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.gateway.receipts import Receipt
from fleet.plan.measured import BENCH_FILE, parse_measurements
from fleet.speech.backend import ANSWER_MARKS
from fleet.start.constants import RECEIPTS_LIMIT_BYTES, STATE_DIRECTORY
from fleet.start.errors import FleetError
from fleet.start.gate import LatePattern
from fleet.start.record import read
from fleet.text.json import count_marks, parse_object
from fleet.world.places import PART_BYTES, Tail, lines_backwards

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fleet.plan.measured import Measurement
    from fleet.workspace.directory import Workspace


def read_measurements(workspace: Workspace) -> tuple[Measurement, ...]:
    """Return the measurements kept here; an unreadable or too large file counts as none."""
    try:
        content = workspace.read(BENCH_FILE)
    except FleetError:
        return ()
    if content is None or count_marks(content) > ANSWER_MARKS:
        return ()
    return parse_measurements(content)


LISTED_SESSIONS = 20
RECEIPTS_FILE = f"{STATE_DIRECTORY}/requests.jsonl"
# The gateway rotates before this size; a longer file is not the gateway's.
RECEIPTS_READ_BYTES = RECEIPTS_LIMIT_BYTES + PART_BYTES


class ReceiptsReader:
    """Reads a gateway's records: the latest part first, then new ones."""

    def __init__(self, workspace: Workspace) -> None:
        self._tail = Tail(workspace.world, workspace.enter(RECEIPTS_FILE),
                          last_bytes=PART_BYTES)

    def read(self) -> list[Receipt]:
        """Return the new receipts, oldest first."""
        return parse_receipts(self._tail.lines())


def latest_receipts(workspace: Workspace) -> Iterator[Receipt]:
    """Yield the kept receipts, latest first."""
    # The file, then the older one that it was rotated to.
    for name in (RECEIPTS_FILE, f"{RECEIPTS_FILE}.1"):
        for line in lines_backwards(workspace.world, workspace.enter(name), RECEIPTS_READ_BYTES):
            yield from parse_receipts([line])


# What the keys of receipts were called before: {old: new}. `model` was the route.
OLD_KEYS = {"model": "route", "runs": "model", "agent": "agent_id", "tries": "failures",
            "waited": "waited_seconds", "first_byte": "first_byte_seconds",
            "total": "total_seconds", "asked": "asked_seconds", "sent": "sent_tokens",
            "read_again": "read_again_tokens"}


def parse_receipts(lines: Iterable[bytes]) -> list[Receipt]:
    """Return the receipts in lines of a file; broken or foreign lines are skipped."""
    receipts = []
    for line in lines:
        fields = parse_object(line)
        if fields and "agent" in fields:  # an older program wrote it
            fields = {OLD_KEYS.get(key, key): value for key, value in fields.items()
                      if key != "steps"}
        receipt = read(Receipt, fields)
        if receipt:
            receipts.append(receipt)
    return receipts


SESSION_ID = LatePattern("[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # a part of a path, too


def read_receipts(workspace: Workspace, session: str = "") -> list[Receipt]:
    """Return all receipts that are kept, or those of a session, oldest first."""
    world = workspace.world
    receipts = {}
    # The newer file first: if it is rotated meanwhile, lines are read twice, but none is missed.
    for name in (RECEIPTS_FILE, f"{RECEIPTS_FILE}.1"):
        tail = Tail(world, workspace.enter(name), last_bytes=RECEIPTS_READ_BYTES)
        wanted = (line for line in tail.lines()
                  if session.encode() in line)  # the others are not parsed
        for receipt in parse_receipts(wanted):
            if session in ("", receipt.session):
                receipts[receipt.id] = receipt
    return sorted(receipts.values(), key=lambda receipt: receipt.time)
