"""Questions to a person before anything is sent out."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.cli.rows import type_again
from fleet.start.constants import EXIT_REFUSED
from fleet.start.errors import FleetError
from fleet.text.tables import format_pairs, wrap_text
from fleet.text.terminal import PLAIN, clean_line
from fleet.workspace.config import find_config, load_config, look_of
from fleet.workspace.trust import find_untrusted, keep_trusted, unlock_keys

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from fleet.config.sections import Fleet
    from fleet.plan.trust import Stake
    from fleet.text.terminal import Look
    from fleet.world.world import World


def agree(world: World, text: str, question: str, refusal: FleetError) -> None:
    """Ask a person; refuse without a yes."""
    if world.confirm(question, text):
        return
    if world.can_ask():  # the answer was no, so nobody wants to know how to do it
        raise FleetError(refusal.slug, refusal.what, status=refusal.status)
    raise refusal


def format_stakes(source: str, stakes: Sequence[Stake], word: str,
                  look: Look = PLAIN) -> str:
    """Return what goes where with a fleet file, and a word on that: accepted, or new."""
    name = clean_line(source)
    if not stakes:
        said = f"{name} sends nothing outside your machines and private networks.\n"
        return wrap_text(said, look)
    rows = [(word, clean_line(stake.what)) for stake in stakes]
    return f"With {name}:\n{format_pairs(rows, look)}"


def ask_trust(fleet: Fleet, options: Namespace, world: World) -> None:
    """Have a person accept what would go where with this fleet; without a person, refuse."""
    stakes = find_untrusted(world, fleet)
    if not stakes:
        return

    source = fleet.document.source
    if not options.trust:
        words = "; ".join(stake.what for stake in stakes)
        text = format_stakes(source, stakes, "new", look_of(world, "stderr"))
        agree(world, text, "Do you want that?", FleetError(
            "untrusted", f"{source}: {words}; you have not agreed to that",
            fix="`subagent-fleet trust`, or add --trust", status=EXIT_REFUSED))
    keep_trusted(world, fleet, accepts=True)
    unlock_keys(world, fleet)


def refuse_home(options: Namespace, world: World) -> None:
    """Refuse to write into a home unasked: those agents would be in every project."""
    if options.out or options.config:
        return
    if world.real_path("") == world.real_path(world.home):
        raise FleetError("in-home", f"{options.row.name}: this is your home directory; agents "
                                    "here would apply to every project", status=EXIT_REFUSED,
                         fix="go into a project's directory; or "
                             f"`{type_again(options, out='.')}`")


def has_config(world: World) -> bool:
    """Tell whether there is a fleet file to be found."""
    try:
        return bool(find_config(world, None))
    except FleetError:
        return False


def known_fleet(options: Namespace, world: World) -> Fleet | None:
    """Return the fleet, None where none can be read and none was named."""
    try:
        return load_config(world, options.config).fleet
    except FleetError:
        if options.config:
            raise
        return None  # the answer needs no fleet
