"""Measure `run`: ten tasks of 2 s, three at once; a step with a thousand tasks; `tasks` of them.

python3 tests/bench/run.py
"""
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent)]

import subagent_fleet as sf  # noqa: E402
from task_rig import Rig  # noqa: E402


def ten_tasks(place):
    """Seconds for ten tasks of 2 s with three at the same time; eight is the least there can be."""
    rig = Rig(place)
    for number in range(10):
        rig.add(f"t{number}", "work", coder=("sh", "-c", "sleep 2; echo done > work.txt"),
                check="test -s work.txt")
    began = time.perf_counter()
    rig.work(most=3, seconds=60)
    seconds = time.perf_counter() - began
    assert set(rig.states().values()) == {"done"}, rig.states()
    return seconds


def thousand_tasks(place):
    """Milliseconds of a step of the supervisor, and seconds of `tasks`, with a thousand tasks."""
    rig = Rig(place)
    folder = rig.folder
    folder.make()
    spec = {"name": "", "prompt": "what shall be done, in a sentence or two", "check": "make test"}
    base = rig.git("rev-parse", "HEAD")
    journal = folder.world.open_journal(folder.place("journal.jsonl"))
    lines = [{"run": "0" * 32}]
    for number in range(1000):
        lines.append({"add": {**spec, "name": f"t{number}"}, "sha": "x", "base": base, "at": 1.0})
        if number % 2:
            for state in ("preparing", "starting", "running", "checking", "done"):
                lines.append({"task": f"t{number}", "to": state, "tried": 1, "at": 2.0})
    lines.append({"task": "t0", "to": "asking", "asleep": True, "at": 3.0})
    journal.add("".join(json.dumps(line) + "\n" for line in lines).encode())
    supervisor = rig.begin(most=1)
    supervisor.takes_new = True
    supervisor.limits = lambda: sf.Limits({}, 0)  # full: nothing starts, all is looked at
    steps = []
    for _ in range(200):
        supervisor._is_dirty = True
        began = time.perf_counter()
        supervisor.step()
        steps.append(time.perf_counter() - began)
    rig.leave()

    environment = rig.environment()
    code = "import subagent_fleet, sys; sys.exit(subagent_fleet.main(['tasks']))"
    environment["PYTHONDONTWRITEBYTECODE"] = ""
    times = {}
    for name, words in (("tasks", code), ("start alone", "import subagent_fleet, sys; "
                                          "sys.exit(subagent_fleet.main(['--version']))")):
        best = 9.0
        for _ in range(5):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", words], cwd=str(rig.repo), env=environment,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
            best = min(best, time.perf_counter() - began)
        times[name] = best
    return sorted(steps)[len(steps) // 2], max(steps), times


def main():
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack():
        os.environ.setdefault("LANG", "C.UTF-8")
        middle, worst, times = thousand_tasks(f"{place}/many")
        print(f"1,000 tasks: a step takes {middle * 1000:.2f} ms (the longest {worst * 1000:.2f} ms)")
        print(f"1,000 tasks: `tasks` takes {times['tasks']:.3f} s, of which starting is "
              f"{times['start alone']:.3f} s")
        for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
            seconds = ten_tasks(f"{place}/ten{number}")
            print(f"10 tasks of 2 s, 3 at once: {seconds:.2f} s (8.00 is the limit)")


if __name__ == "__main__":
    main()
