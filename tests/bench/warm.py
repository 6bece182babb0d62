"""What the warm queue brings: the product's own scheduler on a simulated fleet.

python3 tests/bench/warm.py [--first SEED] [--seeds COUNT] [--untold] [--endless]
"""
import argparse
import math
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/rigs")]

from warm_rig import Agent, Machine, Run, busy_workload, play  # noqa: E402


def compare(seeds, *, tells=True, rounds=2, show=3):
    """Print what the warm queue takes of what first come first served takes."""
    rows = []
    for seed in seeds:
        pairs = []
        for number in range(rounds):
            old = play(busy_workload(seed), seed=number, warm=False)
            new = play(busy_workload(seed), seed=number, tells=tells)
            pairs.append((old, new))
        ratios = [sum(getattr(new, key) for _, new in pairs)
                  / sum(getattr(old, key) for old, _ in pairs)
                  for key in ("seconds", "mean", "read")]
        waits = [max(pair[which].longest for pair in pairs) for which in (0, 1)]
        rows.append((*ratios, *waits, seed))
    means = [math.exp(statistics.fmean(math.log(row[index]) for row in rows)) for index in range(3)]
    worst = sorted(rows, reverse=True)
    print(f"{len(rows)} workloads: time x{means[0]:.3f}, mean end x{means[1]:.3f}, "
          f"tokens read x{means[2]:.3f}; worst x{worst[0][0]:.2f} (seed {worst[0][-1]}), "
          f"slower by 10 %: {sum(row[0] > 1.1 for row in rows)}; "
          f"longest wait {max(r[4] for r in rows):.0f} s (first come: {max(r[3] for r in rows):.0f} s)")
    for row in worst[:show]:
        print(f"  seed {row[-1]}: time x{row[0]:.2f}, mean x{row[1]:.2f}, tokens x{row[2]:.2f}, "
              f"longest wait {row[3]:.0f} -> {row[4]:.0f} s: {busy_workload(row[-1])[0]}, "
              f"{[(a['tokens'], a['grows'], a['turns']) for a in busy_workload(row[-1])[1]]}")


ENDLESS = {
    "8 agents, 2 machines": ([(1, 0, 400, 40)] * 2, [12_000 + 3_000 * i for i in range(8)]),
    "8 agents, 2 slots and a cache": ([(2, 60_000, 400, 40), (1, 0, 400, 40)],
                                      [12_000 + 3_000 * i for i in range(8)]),
    "1 giant, 6 small": ([(1, 0, 400, 40)], [60_000] + [3_000] * 6),
    "1 giant, 6 small, 2 machines": ([(1, 0, 400, 40), (1, 60_000, 400, 40)],
                                     [60_000] + [3_000] * 6),
    "4 agents that fit": ([(1, 4_000_000, 400, 40)] * 2, [12_000 + 3_000 * i for i in range(4)]),
}


def endless(hours=4.0, seeds=2):
    """Print how long anybody waits where agents never end."""
    for name, (machines, prompts) in ENDLESS.items():
        for what, more in (("", {}), ("leavers", {"leaves": 0.05}), ("faults", {"fails": 0.02})):
            said = []
            for warm in (False, True):
                outs = []
                for seed in range(seeds):
                    agents = [Agent(f"a{i}", tokens, grows=300 if tokens < 5000 else 1_200,
                                    thinks=(0.3, 10.0), start=i * 0.1,
                                    endless_at=tokens + 40_000 if tokens >= 10_000 else tokens + 2_000)
                              for i, tokens in enumerate(prompts)]
                    outs.append(Run([Machine(*each) for each in machines], agents, seed=seed,
                                    warm=warm, **more).run(hours * 3600))
                said.append((max(out.longest for out in outs), sum(out.answers for out in outs),
                             sum(out.read for out in outs) / 1e6))
            (w0, a0, r0), (w1, a1, r1) = said
            print(f"{name:32} {what:8} longest wait {w0:4.0f} -> {w1:4.0f} s, answers {a0} -> {a1}, "
                  f"read {r0:.1f} -> {r1:.1f} M")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--untold", action="store_true")
    parser.add_argument("--endless", action="store_true")
    options = parser.parse_args()
    if options.endless:
        endless()
    else:
        compare(range(options.first, options.first + options.seeds), tells=not options.untold)
