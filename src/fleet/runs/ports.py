"""Ten ports for each task."""
from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fleet.runs.folder import STATE_LIMIT_BYTES
from fleet.text.json import parse_object

if TYPE_CHECKING:
    from fleet.world.world import World


# Below the ports that systems assign by themselves.
PORTS = range(20000, 32760, 10)
PORTS_SECONDS = 5.0  # for another of our processes that is choosing its ports


def claim_ports(world: World, owner: str) -> int:
    """Return the first of ten ports that are free and belong to no other task of this user.

    The owner is the file of a task's state: the ports are taken as long as that file exists.
    """
    place = world.user_place("state", "ports.json")
    world.make_directory(world.parent(place), is_private=True)
    with world.hold_soon(world.user_place("state", "ports.lock"), PORTS_SECONDS):
        page = parse_object(world.read_part(place, 0, STATE_LIMIT_BYTES)) or {}
        owners = {int(port): other for port, other in page.items()
                  if port.isdigit() and isinstance(other, str)
                  and world.kind_of(other) == "file"}
        for port, other in owners.items():
            if other == owner:
                return port
        free = (port for port in PORTS if port not in owners
                and all(world.is_port_free(one) for one in range(port, port + 10)))
        port = next(free, None) or next(iter(owners))  # of a thousand tasks, the oldest one's
        owners.pop(port, None)
        owners[port] = owner
        world.replace_files([(place, json.dumps(owners).encode("ascii"), 0o600)])
    return port
