"""From start to exit status."""
from __future__ import annotations

import re
import sys
import traceback
from typing import TYPE_CHECKING

from fleet.cli.rows import OTHER_NAMES, type_words
from fleet.program.parse import name_command, run_words, tell_error
from fleet.start.constants import EXIT_INTERRUPTED, EXIT_OK, EXIT_PROBLEM, HOME_URL
from fleet.start.errors import FleetError
from fleet.start.gate import OWN_FILE, VERSION
from fleet.text.terminal import clean_text
from fleet.world.places import SEAL_BYTES
from fleet.world.world import World

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn


LONG_LIVED = ("up", "serve", "ui", "run")
# What `python3 -c` runs then: the bytecode, under the name of the file it was compiled from.
STARTER = ("import marshal, sys; _, __cached__, __file__, *sys.argv = sys.argv\n"
           "with open(__cached__, 'rb') as stream:\n"
           f" stream.seek({SEAL_BYTES}); exec(marshal.load(stream))")


def start_from_bytecode(words: Sequence[str], world: World) -> None:
    """Restart a long-running command from bytecode: 25 MB instead of 99."""
    is_script = __name__ == "__main__" and not globals().get("__cached__")
    name = words[0] if words else ""
    if not is_script or OTHER_NAMES.get(name, name) not in LONG_LIVED:
        return
    bytecode = world.compile_own_source()
    if bytecode:
        # -I: `-c` alone would import from the working directory first.
        world.become([sys.executable, "-I", "-S", "-c", STARTER, bytecode,
                      world.real_path(OWN_FILE), *sys.argv])


def main(argv: Sequence[str] | None = None, world: World | None = None) -> int:
    """Run one command; return its exit status."""
    if argv is None:  # it runs as a program
        World.leave_directories()
        World.open_standard_files()
    world = world or World()
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        if words[:1] in (["-V"], ["--version"]):
            world.write(f"subagent-fleet {VERSION}\n")
            return EXIT_OK
        if argv is None:
            start_from_bytecode(words, world)
        return run_words(words, world)
    except FleetError as error:  # before any command runs
        tell_error(error, world)
        return error.status
    except KeyboardInterrupt:
        world.err("\ninterrupted\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        world.discard_output()  # `| head` has read enough
        name = "".join(name_command(words)[:1])
        if name not in LONG_LIVED:
            return EXIT_OK
        what = f"{name}: nothing reads its output any more, so it has ended"
        tell_error(FleetError("output", what, fix=f"{type_words(*words)} > FILE"), world)
        return EXIT_PROBLEM
    except Exception as error:
        world.err(f"subagent-fleet {VERSION}, Python {sys.version.split()[0]}: this is a "
                  f"bug{find_part(error, world)}; please report it with these lines at "
                  f"{HOME_URL}/issues\n" + clean_text(traceback.format_exc()))
        return EXIT_PROBLEM


def find_part(error: Exception, world: World) -> str:
    """Return the part of src/fleet where an error was raised: the nearest banner above it."""
    source = (world.own_source() or b"").decode("utf-8")
    lines = [frame.lineno or 0 for frame in traceback.extract_tb(error.__traceback__)
             if frame.filename.endswith(world.split(OWN_FILE)[1])]
    above = "\n".join(source.split("\n")[:lines[-1]]) if lines else ""
    parts = re.findall(r"(?m)^# == (\S+\.py), from line ", above)
    return f" in src/fleet/{parts[-1]}" if parts else ""


def main_and_end() -> NoReturn:
    """Run the command line, then end the process without taking everything down."""
    World.end(main())


if __name__ == "__main__":
    main_and_end()
elif sys.argv[:1] == ["-m"] and "subagent_fleet.cli" in getattr(sys, "orig_argv", ()):
    sys.exit("error: no module subagent_fleet.cli\n  fix: python3 -m subagent_fleet --help")
