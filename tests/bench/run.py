"""Measure `run`: ten tasks of 2 s, three at once; a fan-out of five; `tasks` of a thousand.

python3 tests/bench/run.py [TIMES]

A busy machine says little by its clock alone: beside each figure is what one call of git, or the
start of the program, has taken in the same moment.
"""
import pathlib
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent / "rigs")]

from run_kit import Shop, shell  # noqa: E402


def best_of(count, action):
    times = []
    for _ in range(count):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return min(times)


def git_seconds(shop):
    """Seconds of one call of git, now."""
    return best_of(20, lambda: subprocess.run(["git", "rev-parse", "HEAD"], cwd=shop.repo,
                                              stdout=subprocess.DEVNULL, check=True))


def report(shop, what, seconds, least, asked):
    git = git_seconds(shop)
    print(f"{what}: {seconds:.2f} s (asked {asked}); over {least} s of work: "
          f"{seconds - least:.2f} s, {(seconds - least) / git:.0f} calls of git "
          f"of {git * 1000:.1f} ms")


def ten_tasks(place):
    shop = Shop(place)
    shop.tasks({f"t{number}": {"prompt": "x", "coder": shell("sleep 2", "echo done > work.txt"),
                               "check": "test -s work.txt"} for number in range(10)}, max=3)
    began = time.perf_counter()
    done = shop.run()
    assert done.code == 0, done
    report(shop, "ten tasks of 2 s, three at once", time.perf_counter() - began, 8, 8.4)


def fan_out(place):
    shop = Shop(place)
    shop.tasks({"t": {"prompt": "x", "times": 5, "coder": shell("sleep 2", "echo done > work.txt"),
                      "check": "test -s work.txt"}})
    began = time.perf_counter()
    done = shop.run("--max", "5")
    assert done.code == 0, done
    report(shop, "fan-out of five", time.perf_counter() - began, 2, 4)


def thousand_tasks(place):
    shop = Shop(place)
    shop.tasks({"t": {"prompt": "x", "coder": shell("true"), "check": "true", "tries": 1}})
    shop.run()
    tasks = shop.repo / ".git/subagent-fleet/run/tasks"
    state = (tasks / "t/state.json").read_text()
    for number in range(1000):
        (tasks / f"t{number}").mkdir()
        (tasks / f"t{number}/state.json").write_text(state.replace('"t"', f'"t{number}"'))
    tasks = best_of(3, lambda: shop.type("tasks"))
    start = best_of(3, lambda: shop.type("--version"))
    print(f"`tasks` of a thousand: {tasks:.2f} s, the start of the program: {start:.2f} s")


def main():
    with tempfile.TemporaryDirectory() as place:
        for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
            ten_tasks(f"{place}/ten{number}")
            fan_out(f"{place}/five{number}")
        thousand_tasks(f"{place}/many")


if __name__ == "__main__":
    main()
