"""How long it takes to decide who does what where: 200 machines with 50 models each.

Processor time, the best of five. The models are alike on all machines, then all different.
"""
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
sys.dont_write_bytecode = True
import subagent_fleet as sf  # noqa: E402

MAKERS = ("qwen", "llama", "gemma", "granite", "phi")


def large_fleet(*, alike):
    """Two hundred machines, as they would have answered."""
    states = []
    for number in range(200):
        models = tuple(
            sf.NodeModel(f"{MAKERS[other % 5]}{0 if alike else number}-{other}:{other % 40 + 1}b",
                         (other % 40 + 1) * 6 * 10**8, capabilities=("completion", "tools"),
                         trained_context=131072)
            for other in range(50))
        states.append(sf.NodeState(f"m{number:03}", f"http://m{number}:11434", models=models))
    return states


def best_milliseconds(states):
    """The shortest of five runs."""
    times = []
    for _ in range(5):
        began = time.process_time()
        sf.plan_assignment(states)
        times.append(time.process_time() - began)
    return min(times) * 1000


for words, alike in (("alike", True), ("different", False)):
    took = best_milliseconds(large_fleet(alike=alike))
    print(f"200 machines, 50 models each, {words}: {took:.1f} ms")
