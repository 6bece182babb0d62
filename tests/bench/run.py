"""Measure `run`: ten tasks of 2 s, three at once; a fan-out of five; `tasks` of a thousand.

python3 tests/bench/run.py [TIMES]
python3 tests/bench/run.py ladder [SECONDS]   thirty tasks on three machines, and on the strongest alone

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
from tools import free_port  # noqa: E402


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


# Who passes a check with 0.9, 0.6 and 0.3 of its turns, each of so many seconds.
LADDER_FLEET = """\
project: {name: local-dev, gateway: {port: PORT}}
nodes: {studio: {endpoint: "http://127.0.0.1:9"}, mini: {endpoint: "http://127.0.0.1:7"},
        laptop: {endpoint: "http://127.0.0.1:5"}}
models:
  strong: {node: studio, ollama_model: "qwen3-coder:30b", litellm_alias: strong-local, context: 65536}
  middle: {node: mini, ollama_model: "devstral:24b", litellm_alias: middle-local, context: 65536}
  weak: {node: laptop, ollama_model: "qwen3:8b", litellm_alias: weak-local, context: 65536}
agents: {implementer: {model: strong, description: Writes.}}
"""
LADDER_CLAUDE = """\
import json, os, random, sys, time
def value(flag):
    return sys.argv[sys.argv.index(flag) + 1] if flag in sys.argv else ""
def emit(kind, **fields):
    print(json.dumps({"type": kind, "session_id": session, **fields}), flush=True)
session, model = value("--session-id") or value("--resume"), value("--model")
ability = {"strong-local": 0.9, "middle-local": 0.6, "weak-local": 0.3}[model]
luck = random.Random(os.environ["FLEET_TASK_ID"] + model)
for line in map(json.loads, sys.stdin):
    if line["type"] == "control_request":
        emit("control_response", response={"subtype": "success", "request_id": line["request_id"]})
        break
    emit("system", subtype="init", tools=["Write"], model=model)
    time.sleep(float(os.environ["TURN_SECONDS"]))
    with open("good.txt" if luck.random() < ability else "bad.txt", "a") as stream:
        stream.write(model + "\\n")
    emit("result", subtype="success", is_error=False, num_turns=1, result="done",
         terminal_reason="completed", api_error_status=None, permission_denials=[])
"""


def thirty_tasks(place, models, seconds):
    """Seconds until thirty tasks are done by these models, and how many were."""
    shop = Shop(place)
    script = shop.write("claude.py", LADDER_CLAUDE, shop.bin)
    shop.program("claude", f'exec "{sys.executable}" -I -S "{script}" "$@"')
    shop.write("fleet.yaml", LADDER_FLEET.replace("PORT", str(free_port())))
    shop.write(".gitignore", ".env.subagent-fleet\n.subagent-fleet/\n")
    shop.git("add", "fleet.yaml", ".gitignore")
    shop.git("commit", "-qm", "fleet")
    shop.type("generate")
    shop.tasks({f"t{number}": {"prompt": "x", "models": models, "check": "test -e good.txt"}
                for number in range(30)})
    began = time.perf_counter()
    done = shop.end(shop.launch("run", TURN_SECONDS=seconds), seconds=1200)
    took = time.perf_counter() - began
    print(*done.out.splitlines()[-3:], sep="\n")
    return took, sum(row["state"] == "done" for row in shop.rows().values())


def three_machines(place, seconds):
    everywhere, done = thirty_tasks(f"{place}/ladder", ["weak", "middle", "strong"], seconds)
    alone, done_alone = thirty_tasks(f"{place}/alone", ["strong"], seconds)
    print(f"thirty tasks, turns of {seconds} s: on three machines {done} done in {everywhere:.1f} s, on the "
          f"strongest alone {done_alone} in {alone:.1f} s: {everywhere / alone:.3f} (asked 30, 0.6)")


def main():
    if sys.argv[1:2] == ["ladder"]:
        with tempfile.TemporaryDirectory() as place:
            three_machines(place, float(sys.argv[2]) if len(sys.argv) > 2 else 0.5)
        return
    with tempfile.TemporaryDirectory() as place:
        for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
            ten_tasks(f"{place}/ten{number}")
            fan_out(f"{place}/five{number}")
        thousand_tasks(f"{place}/many")


if __name__ == "__main__":
    main()
