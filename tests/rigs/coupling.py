"""Count the tests that hold on to names of the program which a person never sees.

    python3 tests/rigs/coupling.py            a line a test file
    python3 tests/rigs/coupling.py FILE       the names, and the tests of that file that use them

Free to name are: what a user may import, the parts that are pure (text to value), and everything
in the rigs (conftest, tools, *_rig, *_cases). Not part of the tests: a number for who moves code.
"""
import ast
import collections
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parents[1]
HOUSE = HERE.parent / "src/fleet"
PUBLIC = {"main", "World", "load_fleet", "parse_yaml", "dump_yaml", "FleetError", "__version__"}  # World: `main` takes it
PURE = {line.partition("/")[0] for line in (HOUSE / "CONTENTS").read_text("utf-8").split("\n")
        if line.endswith("(pure)")}


def private_names():
    """Return {name: room} of what is defined outside of the pure rooms."""
    names = {}
    for path in sorted(HOUSE.rglob("*.py")):
        room = path.parent.name
        for node in ast.parse(path.read_text("utf-8")).body if room not in PURE else ():
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names[node.name] = room
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names.update({target.id: room for target in targets if isinstance(target, ast.Name)})
    return {name: room for name, room in names.items() if name not in PUBLIC}


def named_in(node):
    """Return what a function names: attributes of `sf`, and other names of its file."""
    own, local = set(), set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) \
                and inner.value.id == "sf":
            own.add(inner.attr)
        elif isinstance(inner, ast.Name):
            local.add(inner.id)
        elif isinstance(inner, ast.arg):  # a fixture
            local.add(inner.arg)
        elif isinstance(inner, ast.Call) and getattr(inner.func, "attr", "") == "setattr" \
                and len(inner.args) > 1 and isinstance(inner.args[1], ast.Constant):
            own.add(str(inner.args[1].value))
    return own, local


def count_file(path, private):
    """Return ({test: private names}, how many tests) of a file."""
    functions = {node.name: named_in(node) for node in ast.parse(path.read_text("utf-8")).body
                 if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    found = {}
    tests = [name for name in functions if name.startswith("test_")]
    for test in tests:
        seen, todo, names = set(), [test], set()
        while todo:
            name = todo.pop()
            if name in seen or name not in functions:
                continue
            seen.add(name)
            own, local = functions[name]
            names |= own & set(private)
            todo += local
        if names:
            found[test] = names
    return found, len(tests)


def main(words):
    private = private_names()
    if words:
        found, _ = count_file(pathlib.Path(words[0]), private)
        for test, names in found.items():
            print(f"{test}: {', '.join(sorted(names))}")
        return 0
    total = coupled = 0
    rooms_named = collections.Counter()
    for path in sorted(HERE.glob("*/test_*.py")):
        found, count = count_file(path, private)
        total += count
        coupled += len(found)
        for names in found.values():
            rooms_named.update({private[name] for name in names})
        print(f"{path.name:28} {len(found):4} of {count}")
    print(f"{coupled} of {total} test functions name what is not public outside of pure rooms")
    print(", ".join(f"{name} {count}" for name, count in rooms_named.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
