"""A line that changes, a view that is drawn again, and waiting until something is so."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.start.constants import TICK_SECONDS
from fleet.text.terminal import clean_line, crop

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from fleet.world.world import World
    _Seen = TypeVar("_Seen")


class LiveLine:
    """A line on a terminal that shows progress; elsewhere nothing."""

    def __init__(self, world: World) -> None:
        self._world = world

    def show(self, text: str) -> None:
        """Draw the line again, cut to one: another could not be redrawn.

        One column short, because a line that reaches the last one leaves a second
        line behind.
        """
        if self._world.redraws():
            line = crop(clean_line(text), (self._world.columns or 80) - 3)
            self._world.err(f"\r\x1b[K{text and '  '}{line}")

    def clear(self) -> None:
        self.show("")

    def __enter__(self) -> LiveLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


def wait_until(world: World, look: Callable[[], _Seen], *, seconds: float = float("inf"),
               pause: float = 0.0) -> _Seen:
    """Look again and again until something is seen or the time is over; return the last look."""
    until = world.clock() + seconds
    while True:
        seen = look()
        if seen or world.clock() > until:
            return seen
        world.sleep(pause or TICK_SECONDS)


def watch(world: World, seconds: float | None, show: Callable[[str], bool], *,
          clears: bool = True) -> bool:
    """Show something, again and again if seconds are given; return what the last look says.

    It is handed what clears a terminal: a redraw that does not scroll what stood
    there before.
    """
    clear = "\x1b[H\x1b[2J" if clears and seconds and world.is_terminal() else ""
    is_well = show(clear)
    while seconds:
        world.sleep(seconds)
        is_well = show(clear)
    return is_well
