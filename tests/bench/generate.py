"""Measure `generate`: python3 tests/bench/generate.py (time and memory against fleet size)."""
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "subagent_fleet.py"
PROMISE_SECONDS, PROMISE_MB = 2.0, 80


def write_fleet(path, models):
    """Write a fleet of so many models and twice as many agents."""
    lines = ["project: {name: big}", "nodes:"]
    lines += [f"  n{i}: {{endpoint: 'http://10.0.0.{i + 1}:11434'}}" for i in range(50)]
    lines += ["models:"]
    lines += [f"  m{i}:\n    node: n{i % 50}\n    ollama_model: qwen3-coder:{i % 70 + 1}b\n"
              f"    litellm_alias: alias-{i}\n    context: 65536" for i in range(models)]
    lines += ["agents:"]
    lines += [f"  a{i}:\n    model: m{i % models}\n    tools: [Read, Grep]\n    description: Use "
              f"for task {i}, and nothing else.\n    prompt: |\n      You are agent {i}.\n"
              "      Be brief." for i in range(2 * models)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def measure(directory, *words):
    """Return (seconds, MB at the highest) of one run."""
    before = time.perf_counter()
    child = subprocess.Popen([sys.executable, str(SCRIPT), "generate", *words], cwd=directory,
                             stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        sys.exit(f"generate failed: {status}")
    return time.perf_counter() - before, usage.ru_maxrss / (1 << 20 if sys.platform == "darwin"
                                                            else 1 << 10)


def main():
    """Print a table; exit 1 when the promise for 1,000 models and 2,000 agents is not kept."""
    kept = True
    print("models  agents   first s   again s  first MB  again MB")
    for models in (125, 250, 500, 1000, 2000):
        with tempfile.TemporaryDirectory() as directory:
            write_fleet(pathlib.Path(directory) / "fleet.yaml", models)
            first, again = measure(directory), measure(directory)
        print(f"{models:6}  {2 * models:6}  {first[0]:8.2f}  {again[0]:8.2f}  {first[1]:8.1f}  "
              f"{again[1]:8.1f}")
        if models == 1000:
            kept = max(first[0], again[0]) < PROMISE_SECONDS and max(first[1], again[1]) < PROMISE_MB
    print("promise kept" if kept else "promise broken",
          f"(1000 models: < {PROMISE_SECONDS} s, < {PROMISE_MB} MB); CPU of all runs: "
          f"{resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime:.1f} s")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
