"""World, the only door to disk, programs, network, clock and terminal."""
from __future__ import annotations

from fleet.world.connections import Network


class World(Network):
    """The disk, the network, the environment, the clock and the terminal."""
