"""`completion`: for a shell."""
from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from fleet.cli.rows import (
    EXAMPLE_NAMES,
    MORE,
    NAME_KINDS,
    TASK_NAMES,
    Flag,
    command,
    find_call,
    first_words,
    second_words,
)
from fleet.commands.init import EXAMPLES, TASKS_EXAMPLE
from fleet.program.pages import TOPICS
from fleet.runs.see import see_states
from fleet.start.constants import EXIT_OK, EXIT_USAGE
from fleet.start.errors import FleetError
from fleet.start.gate import asset
from fleet.work.typed import open_folder
from fleet.workspace.config import load_config

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from fleet.world.world import World


BASH_COMPLETION = asset("completion.bash")
ZSH_COMPLETION = asset("completion.zsh")
FISH_COMPLETION = asset("completion.fish")
COMPLETIONS = {"bash": BASH_COMPLETION, "zsh": ZSH_COMPLETION, "fish": FISH_COMPLETION}


@command("completion", "print a completion script for your shell",
         # argparse would check a default that is a text against the choices
         Flag("shell", "your shell", "SHELL", {"nargs": "?", "default": None,
                                               "choices": tuple(COMPLETIONS)}),
         group=MORE, examples=('eval "$(subagent-fleet completion zsh)"',), passes="WORDS",
         passes_note="print what may follow these words, as your shell asks")
def cmd_completion(options: Namespace, world: World) -> int:
    """Print the script or, when the script asks, what may follow the typed words."""
    if options.passed:
        *before, begun = options.passed
        world.write("".join(f"{word}\n" for word in follow_words(before, world)
                            if word.startswith(begun)))
    elif options.shell:
        world.write(COMPLETIONS[options.shell])
    else:
        _, shell = world.split(world.environ.get("SHELL", ""))
        line = f'eval "$(subagent-fleet completion {shell if shell == "bash" else "zsh"})"'
        if shell == "fish":
            line = "subagent-fleet completion fish | source"
        raise FleetError("usage", "completion: name your shell: bash, zsh or fish",
                         status=EXIT_USAGE, fix=line)
    return EXIT_OK


def follow_words(before: Sequence[str], world: World) -> list[str]:
    """Return what may follow words: commands, a flag's values, or more flags."""
    if not before:
        return first_words()
    if len(before) == 1 and second_words(before[0]):
        return second_words(before[0])

    row = find_call(before).command
    if row.passes and "--" in before:
        return []  # another program knows what may follow
    words = ["--help", *(flag.name for flag in row.flags if flag.name.startswith("-"))]
    for flag in row.flags:
        if before[-1] in (flag.name, flag.short) and flag.metavar and (
                flag.offers or "nargs" not in flag.more):
            return offered_words(flag, before, world)
        if not flag.name.startswith("-"):
            words += offered_words(flag, before, world)
    if row.name == "help":
        words += [*first_words(), *TOPICS]
    return words


def offered_words(flag: Flag, before: Sequence[str], world: World) -> list[str]:
    """Return the words a flag can be given, the names of a fleet's parts from its file."""
    offers = flag.offers or flag.more.get("choices", ())
    if offers == TASK_NAMES:
        with contextlib.suppress(FleetError):  # outside of a repository
            tasks = see_states(open_folder(world))[0]
            return [name for name, state in tasks.items() if not state.wish.forgotten]
        return []
    if offers == EXAMPLE_NAMES:
        return [*EXAMPLES, TASKS_EXAMPLE]
    if offers and offers[0] in NAME_KINDS:
        config = dict(zip(before, before[1:])).get("--config")
        return list(getattr(load_config(world, config).fleet, offers[0]))
    return list(offers)
