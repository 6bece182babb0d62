"""How long `--version` and `validate` take, against their floors, side by side in one run.

Script: ÷ a bare interpreter that compiles this source and imports argparse, dataclasses, re, json.
Installed: the module with its cached bytecode, as the installed command starts it ÷ a bare
interpreter. Memory: against a bare interpreter that only compiles this source.
"""
import pathlib
import py_compile
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "subagent_fleet.py"
EXAMPLE = str(ROOT / "fleet.example.json")
COMMANDS = {"--version": ["--version"], "validate": ["validate", "--config", EXAMPLE]}
ROUNDS = 25


def once(command):
    """Seconds that one run takes."""
    started = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def side_by_side(commands):
    """The median of each command, measured in turns so that noise meets all alike."""
    times = {name: [] for name in commands}
    for _ in range(ROUNDS):
        for name, command in commands.items():
            times[name].append(once(command))
    return {name: statistics.median(found) for name, found in times.items()}


def peak_of(command):
    """Megabytes that one run takes at its largest."""
    # The peak of the process that starts it counts too, so that one is as small as can be.
    program = ("import os, resource, sys; "
               "os.waitpid(os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ), 0); "
               "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)")
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program, *command],
                          stdout=subprocess.PIPE, check=True)
    return int(done.stdout.split()[-1]) / (1048576 if sys.platform == "darwin" else 1024)


def main():
    """Measure and print."""
    print(f"Python {sys.version.split()[0]}, {ROUNDS} rounds, medians; "
          f"{len(SCRIPT.read_bytes().splitlines())} lines of source")
    python = [sys.executable, "-I", "-S"]
    with tempfile.TemporaryDirectory() as place:
        copy = pathlib.Path(place) / "subagent_fleet.py"
        copy.write_bytes(SCRIPT.read_bytes())
        py_compile.compile(str(copy), doraise=True)
        commands = {"bare": python + ["-c", "pass"]}
        for name, words in COMMANDS.items():
            floor = ("import argparse, dataclasses, re, json; "
                     f"compile(open({str(SCRIPT)!r}, encoding='utf-8').read(), 'x', 'exec')")
            run = (f"import sys; sys.path.insert(0, {place!r}); sys.argv[1:] = {words!r}; "
                   "import subagent_fleet; subagent_fleet.main_and_end()")
            commands["floor of " + name] = python + ["-c", floor]
            commands["script " + name] = python + [str(SCRIPT)] + words
            commands["installed " + name] = python + ["-c", run]
        found = side_by_side(commands)
        peaks = {name: peak_of(commands[name]) for name in (
            "bare", "floor of validate", "script validate", "installed validate")}
    for name, seconds in found.items():
        print(f"  {name:24} {seconds * 1000:7.1f} ms")
    for name, script_goal, installed_goal in (("--version", 1.25, 4.0), ("validate", 1.25, 6.0)):
        print(f"{name}: script ÷ floor {found['script ' + name] / found['floor of ' + name]:.2f} "
              f"(goal {script_goal}), installed ÷ bare "
              f"{found['installed ' + name] / found['bare']:.2f} (goal {installed_goal})")
    for name, peak in peaks.items():
        goal = {"script validate": f" (goal {peaks['floor of validate']:.1f})",
                "installed validate": " (goal 16)"}.get(name, "")
        print(f"peak memory of {name}: {peak:.1f} MB{goal}")


if __name__ == "__main__":
    main()
