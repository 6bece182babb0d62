"""Change one condition, constant or statement of a part at a time; say what no test sees.

    python3 tests/rigs/mutate.py gateway/queue tests/gateway --count 30
    python3 tests/rigs/mutate.py world/places tests/world --seed 2 --then-all --kept FILE

The named test files run first, the rest of the fast suite only with --then-all. What was asked
already is kept (--kept) under the text of the mutant and not asked again. All happens in a copy;
a mutant that takes five times as long as the tests without it counts as seen. Not part of the
tests: it takes as long as so many runs of them.
"""
import argparse
import ast
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
COPIED = ("subagent_fleet.py", "src", "tests", "pyproject.toml", "fleet.example.json", "README.md",
          "LICENSE", ".github", ".agents", ".claude-plugin")
OPPOSITE = {ast.Eq: "!=", ast.NotEq: "==", ast.Lt: ">=", ast.GtE: "<", ast.Gt: "<=", ast.LtE: ">",
            ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}


class Source:
    """A text with its places as `ast` counts them: lines, and bytes in a line."""

    def __init__(self, text):
        self.content = text.encode("utf-8")
        self.starts = [0]
        for line in self.content.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def place(self, line, column):
        return self.starts[line - 1] + column

    def span(self, node):
        return self.place(node.lineno, node.col_offset), \
            self.place(node.end_lineno, node.end_col_offset)

    def text(self, node):
        start, end = self.span(node)
        return self.content[start:end].decode("utf-8")

    def replaced(self, node, new):
        start, end = self.span(node)
        return (self.content[:start] + new.encode("utf-8") + self.content[end:]).decode("utf-8")


def lines_of(text, part):
    """Return the first and the last line of a part in the built file."""
    heads = [(number, match) for number, line in enumerate(text.splitlines(), 1)
             for match in [re.match(r"# == (\S+)\.py, from line \d+ =+$", line)] if match]
    heads.append((text.count("\n") + 1, None))
    for (first, match), (after, _) in zip(heads, heads[1:]):
        if match[1] == part.removesuffix(".py"):
            return first, after - 1
    raise SystemExit(f"no part is called {part}; there are "
                     + ", ".join(match[1] for _, match in heads[:-1]))


def mutations(source, node):
    """Yield (what, new text) for a node: one change each."""
    text = source.text
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        new = OPPOSITE[type(node.ops[0])]
        yield "compare", f"({text(node.left)} {new} {text(node.comparators[0])})"
    elif isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield "join", "(" + word.join(f"({text(value)})" for value in node.values) + ")"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", f"bool({text(node.operand)})"
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
        if not isinstance(node.test, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
            yield "test", f"(not ({text(node.test)}))"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", repr(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield "constant", repr(node.value + 1 if node.value < 10 else node.value * 10)
    elif can_be_left_out(node):
        yield "statement", "pass"


def can_be_left_out(node):
    """Tell whether a statement does something that a program goes on without."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], (ast.Attribute, ast.Subscript))
    return isinstance(node, (ast.AugAssign, ast.Raise, ast.Continue, ast.Break))


def find_mutants(text, first, last):
    """Return the source and [(line, what, node, new)] of all changes in those lines."""
    source = Source(text)
    mutants = []
    hidden = set()  # what a change says nothing about: annotations, f-strings, docstrings
    for node in ast.walk(ast.parse(text)):
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            hidden.update(map(id, ast.walk(part) if part else ()))
        if isinstance(node, ast.JoinedStr):
            hidden.update(map(id, ast.walk(node)))
        if id(node) in hidden or not first <= getattr(node, "lineno", 0) <= last:
            continue
        for what, new in mutations(source, node):
            mutants.append((node.lineno, what, node.test if what == "test" else node, new))
    return source, mutants


def choose(source, mutants, count, seed):
    """Return [(line, what, old, new, whole text)] of some that are programs."""
    chosen = []
    for line, what, node, new in random.Random(seed).sample(mutants, len(mutants)):
        if len(chosen) == count:
            break
        mutant = source.replaced(node, new)
        try:
            ast.parse(mutant)
        except (SyntaxError, ValueError):
            continue
        chosen.append((line, what, " ".join(source.text(node).split()), new, mutant))
    return chosen


def run_tests(place, words, seconds):
    """Run tests in the copy; return "" where all pass, else what failed first."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m",
               "not slow", *words]
    environ = dict(os.environ, PYTHONDONTWRITEBYTECODE="1", TMPDIR=str(place.parent))
    process = subprocess.Popen(command, cwd=str(place), env=environ, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "it takes too long"
    if process.returncode == 0:
        return ""
    found = re.search(r"(?m)^(?:FAILED|ERROR) (\S+)", output.decode("utf-8", "replace"))
    return found[1] if found else f"exit {process.returncode}"


def main(words):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part")
    parser.add_argument("tests", nargs="*", default=["tests"])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--then-all", action="store_true")
    parser.add_argument("--kept", default="")
    parser.add_argument("--list", action="store_true", help="show the mutants, run nothing")
    given = parser.parse_args(words)

    text = (ROOT / "subagent_fleet.py").read_text(encoding="utf-8")
    source, mutants = find_mutants(text, *lines_of(text, given.part))
    chosen = choose(source, mutants, given.count, given.seed)
    print(f"{given.part}: {len(mutants)} mutants, {len(chosen)} of them are asked", flush=True)
    if given.list:
        for line, what, old, new, _ in sorted(chosen):
            print(f"{line:6} {what:9} {old[:70]}  ->  {new[:70]}")
        return 0

    kept = pathlib.Path(given.kept) if given.kept else None
    known = {}
    if kept and kept.exists():
        rows = map(json.loads, kept.read_text(encoding="utf-8").splitlines())
        known = {row["id"]: row["seen"] for row in rows}
    with tempfile.TemporaryDirectory(prefix="mutate-") as directory:
        place = pathlib.Path(directory) / "copy"
        place.mkdir()
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, place / name,
                                ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, place / name)
        began = time.monotonic()
        failed = run_tests(place, given.tests, 1800)
        if failed:
            raise SystemExit(f"the tests fail without a change: {failed}")
        limit = 5 * (time.monotonic() - began) + 20

        survivors = []
        for number, (line, what, old, new, mutant) in enumerate(chosen, 1):
            key = hashlib.sha256(mutant.encode("utf-8")).hexdigest()[:16]
            if key not in known:
                (place / "subagent_fleet.py").write_text(mutant, encoding="utf-8")
                seen = run_tests(place, given.tests, limit)
                if not seen and given.then_all:
                    seen = run_tests(place, ["tests", "--ignore=tests/live"], limit * 10)
                known[key] = seen
                if kept:
                    with open(kept, "a", encoding="utf-8") as stream:
                        stream.write(json.dumps({"id": key, "part": given.part, "line": line,
                                                 "what": what, "old": old, "new": new,
                                                 "seen": seen}) + "\n")
            if not known[key]:
                survivors.append(line)
            print(f"{number:3} {known[key] or 'SURVIVES':60} {line:6} {what:9} "
                  f"{old[:60]}  ->  {new[:60]}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} are seen")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
