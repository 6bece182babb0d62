"""How fast a fleet file is read: ÷ PyYAML's pure-Python SafeLoader, and how the cost grows.

All ratios come from one run, measured in turns, as processor time: noise meets all alike.
"""
import pathlib
import statistics
import sys
import time
import tracemalloc

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
sys.dont_write_bytecode = True
import subagent_fleet as sf  # noqa: E402

ROUNDS = 5


def fleet_text(lines):
    """A fleet file of that many lines: a third nodes, a third models, a third agents."""
    made = ["project:", "  name: local-dev"]
    for section, entry in (
            ("nodes", ["  n%d:", "    endpoint: http://10.0.0.%d:1", "    tags: [a, b]"]),
            ("models", ["  m%d:", "    node: n1", "    ollama_model: qwen3:8b", "    context: 9%d"]),
            ("agents", ["  a%d:", "    model: m1", '    description: "Plans, well"', "    tools:",
                        "      - Read", "      - Edit"])):
        made.append(f"{section}:")
        end, number = len(made) + (lines - 5) // 3, 0
        while len(made) < end:
            made += [line % number if "%d" in line else line for line in entry]
            number += 1
    return "\n".join(made[:lines]) + "\n"


def once(work, text):
    started = time.process_time()
    work(text)
    return time.process_time() - started


def in_turns(works, rounds=ROUNDS):
    """The median seconds of each (name, work, text), measured in turns."""
    found = {name: [] for name, _, _ in works}
    for _ in range(rounds):
        for name, work, text in works:
            found[name].append(once(work, text))
    return {name: statistics.median(times) for name, times in found.items()}


def locate_all(text):
    document = sf.Document(text, "fleet.yaml")
    for name in document.value["models"]:
        document.locate(("models", name, "context"))


def against_pyyaml(text):
    try:
        import yaml
    except ImportError:
        print("PyYAML is not installed: nothing to compare with")
        return
    assert sf.parse_yaml(text) == yaml.load(text, yaml.SafeLoader)
    works = [("this reader", sf.parse_yaml, text),
             ("SafeLoader", lambda text: yaml.load(text, yaml.SafeLoader), text)]
    if hasattr(yaml, "CSafeLoader"):
        works.append(("CSafeLoader", lambda text: yaml.load(text, yaml.CSafeLoader), text))
    seconds = in_turns(works, 3)
    for name in list(seconds)[1:]:
        ratio = seconds[name] / seconds["this reader"]
        goal = "  (goal: at least 4)" if name == "SafeLoader" else "  (libyaml, in C)"
        print(f"20,000 lines: {name} ÷ this reader = {ratio:.1f}{goal}")


def growth():
    sizes = (2000, 20_000, 200_000)
    # The small text is read often enough to take as long as the large one.
    works = [(size, lambda text, times=sizes[-1] // size: [sf.parse_yaml(text)
                                                            for _ in range(times)],
              fleet_text(size)) for size in sizes]
    seconds = in_turns(works)
    for size in sizes[1:]:
        ratio = seconds[size] / seconds[sizes[0]]
        print(f"{size:,} lines: {ratio:.2f} × the cost of a line at 2,000  (goal: at most 1.2)")


def main():
    """Measure and print."""
    print(f"Python {sys.version.split()[0]}")
    text = fleet_text(20_000)
    against_pyyaml(text)
    growth()
    seconds = in_turns([("read", sf.parse_yaml, text), ("locate", locate_all, text)])
    print(f"20,000 lines with a problem in each model: {seconds['locate'] / seconds['read']:.1f} × "
          "the cost of reading")
    tracemalloc.start()
    value = sf.parse_yaml(text)
    kept, peak = tracemalloc.get_traced_memory()
    print(f"20,000 lines: {peak / len(text):.1f} bytes of memory per byte of text, "
          f"{kept / len(text):.1f} of it the value ({len(value)} sections)")


if __name__ == "__main__":
    main()
