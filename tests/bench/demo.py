"""How long `demo` takes off a terminal, from a file and through standard input: 6 s at most."""
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "subagent_fleet.py"
SECONDS_GOAL = 6


def main():
    """Measure and print."""
    source = SCRIPT.read_bytes()
    for name, words, sent in (("a file", [str(SCRIPT)], b""), ("standard input", ["-"], source)):
        times = []
        for _ in range(3):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-I", "-S", *words, "demo"], input=sent, check=True,
                           stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - began)
        print(f"demo from {name}, Python {sys.version.split()[0]}: "
              f"{', '.join(f'{seconds:.1f}' for seconds in times)} s (goal {SECONDS_GOAL})")


if __name__ == "__main__":
    main()
