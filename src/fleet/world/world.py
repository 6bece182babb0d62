"""World, the only door to disk, programs, network, clock and terminal."""
from __future__ import annotations

from fleet.world.connections import Network

# The only door: terminal, disk, programs, signals, network and this machine's names. It returns
# text, bytes and objects of this room, never a socket, a process or a descriptor. An error of
# the system becomes a FleetError in plain words.


class World(Network):
    """The disk, the network, the environment, the clock and the terminal."""
