"""What STYLE promises about the file and its parts."""
import ast
import functools
import pathlib
import re
import subprocess
import sys

import pytest

import subagent_fleet as sf
from tools import ROOT, SCRIPT

SOURCE = SCRIPT.read_text(encoding="utf-8")
LINES = SOURCE.splitlines()
HOUSE = ROOT / "src/fleet"
PARTS = {path.relative_to(HOUSE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
         for path in sorted(HOUSE.rglob("*.py"))}
BANNERS = [(number, match[1]) for number, line in enumerate(LINES, 1)
           for match in [re.match(r"# == (\S+\.py), from line \d+ =+$", line)] if match]
# What touches the world. Only the room of that name may name the doors.
DOORS = {"open", "print", "input", "os", "socket", "subprocess", "urllib", "shutil", "tempfile",
         "pathlib", "Path", "secrets", "signal", "select", "glob", "resource", "ssl"}
EFFECTS = DOORS | {"time", "random", "threading", "queue", "_thread"}


@functools.cache
def tree():
    """The file as Python reads it: when it is first asked for, as that takes a second."""
    return ast.parse(SOURCE)


@functools.cache
def functions():
    return [n for n in ast.walk(tree()) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


def room_of(path):
    """The room of a part."""
    return path.partition("/")[0]


def rooms():
    """{room: what CONTENTS says of it}, in its order."""
    lines = (HOUSE / "CONTENTS").read_text(encoding="utf-8").split("\n")
    heads = [line.partition("/ ") for line in lines if line and not line.startswith(" ")]
    return {room: what for room, _, what in heads}


def test_contents_match_banners():
    said = re.findall(r"^  (\w+) +(\S.*)$", sf.__doc__.partition("\nRooms\n")[2], re.M)
    assert said == list(rooms().items())
    in_order = [f"{room}/{line.strip()}" for room, text in re.findall(
        r"^(\w+)/ .*\n((?:  .*\n)+)", (HOUSE / "CONTENTS").read_text(encoding="utf-8"), re.M)
        for line in text.splitlines()]
    assert ["start/gate.py", *(path for _, path in BANNERS)] == in_order
    assert all(len(LINES[number - 1]) >= 79 for number, _ in BANNERS)


def test_opening_order():
    order = ["#!/usr/bin/env python3", "# Built from src/fleet", "# /// script",
             "# SPDX-License-Identifier: MIT", '"""Run', "from __future__ import annotations",
             "import sys", "if sys.version_info <", "class _Late:", "__version__ = "]
    places = [SOURCE.index(piece) for piece in order]
    assert places == sorted(places)
    assert 'requires-python = ">=3.9"' in SOURCE and "dependencies = []" in SOURCE


def test_imports_are_standard_library():
    found = set()
    for_checkers = [node for node in ast.walk(tree()) if isinstance(node, ast.If)
                    and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"]
    unread = {inner for node in for_checkers for part in node.body for inner in ast.walk(part)}
    for node in set(ast.walk(tree())) - unread:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    assert found - {"__future__"}
    if sys.version_info >= (3, 10):
        assert found - set(sys.stdlib_module_names) == set()
    top = {alias.name for node in tree().body if isinstance(node, ast.Import)
           for alias in node.names}
    assert top == {"sys"}


def names_read(node, scopes=()):
    """Yield (name, line) of each name that means one of the module: locals do not count."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        local = {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
        body = node.body if isinstance(node.body, list) else [node.body]
        outer = list(getattr(node, "decorator_list", [])) + node.args.defaults
        outer += [d for d in node.args.kw_defaults if d]
        for part in outer:
            yield from names_read(part, scopes)
        for part in body:
            local |= names_bound(part)
        for part in body:
            yield from names_read(part, (*scopes, local))
        return
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        local = {n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
        scopes = (*scopes, local)
    is_read = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    if is_read and not any(node.id in scope for scope in scopes):
        yield node.id, node.lineno
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):  # never evaluated
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from names_read(child, scopes)


def names_bound(node):
    """The names that a statement of a function makes local."""
    bound = set()
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.Lambda):
        return set()
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        bound.add(node.id)
    if isinstance(node, ast.ExceptHandler) and node.name:
        bound.add(node.name)
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    for child in ast.iter_child_nodes(node):
        bound |= names_bound(child)
    return bound


@functools.cache
def used(path):
    """The names that a part reads from outside of its functions, with their lines."""
    return list(names_read(PARTS[path]))


def test_names_read_knows_scopes():
    tree = ast.parse("def f(os):\n  return os, socket\n[open for open in x]\nclass A:\n  y: os = time\n")
    assert {name for name, _ in names_read(tree)} == {"socket", "x", "time"}


def test_pure_parts_name_no_effect():
    pure = [path for path in PARTS if rooms()[room_of(path)].endswith("(pure)")]
    assert len(pure) > 50
    assert [(path, name, line) for path in pure for name, line in used(path)
            if name in EFFECTS] == []


def test_only_the_world_touches_the_world():
    others = [path for path in PARTS if room_of(path) not in ("world", "start")]
    assert [(path, name, line) for path in others for name, line in used(path)
            if name in DOORS] == []
    imports = [(path, node.lineno) for path in others for node in ast.walk(PARTS[path])
               if isinstance(node, (ast.Import, ast.ImportFrom)) and node not in PARTS[path].body
               and node.col_offset and not in_block_for_checkers(path, node)
               and "urllib.parse" not in ast.unparse(node)]
    assert imports == []


def in_block_for_checkers(path, node):
    """Whether an import is one that only checkers read."""
    return any(isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
               and block.lineno < node.lineno <= block.end_lineno for block in PARTS[path].body)


def test_no_name_is_given_twice():
    """A class that another one of its name replaced would be found only when it is used."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    names = [node.name for node in tree().body if isinstance(node, kinds)]
    assert len(names) > 300
    assert {name for name in names if names.count(name) > 1} == set()


def test_what_the_world_gives_out_is_no_socket_process_or_descriptor():
    """Their methods are called in world/ only; `wait` and `close` are other objects' too."""
    inner = {"getsockname", "setsockopt", "getsockopt", "settimeout", "setblocking", "recv",
             "sendall", "shutdown", "connect", "fileno", "poll", "kill", "terminate", "pid",
             "returncode", "communicate"}
    uses = [(path, node.attr, node.lineno) for path, part in PARTS.items()
            for node in ast.walk(part) if isinstance(node, ast.Attribute) and node.attr in inner]
    assert len(uses) > 20
    assert [use for use in uses if room_of(use[0]) != "world"] == []


def test_every_write_goes_through_one_door():
    """What changes the disk is named in the class that looks at a directory first, and nowhere else."""
    changes = {"makedirs", "mkdir", "replace", "rename", "renames", "unlink", "remove", "rmdir",
               "removedirs", "chmod", "fchmod", "chown", "symlink", "link", "truncate", "ftruncate",
               "open", "write", "utime", "mkfifo", "rmtree", "move", "copy", "copytree"}
    doors = {"Directory", "PrivateDirectory", "append_line", "open_to_read",
             "discard_output", "open_standard_files", "copy_with_time", "remove_tree",
             "Pipe", "spawn", "detach"}  # a pipe, a child's ends
    inside = [(node.lineno, node.end_lineno) for node in ast.walk(tree())
              if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name in doors]
    uses = [(ast.unparse(node.func), node.lineno) for node in ast.walk(tree())
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name) and node.func.value.id in ("os", "shutil")
            and node.func.attr in changes]
    assert len(inside) == len(doors) and len(uses) > 10
    assert [use for use in uses if not any(a <= use[1] <= b for a, b in inside)] == []


def test_http_knows_no_product():
    """HTTP is transport: no words of it name a product (comments and docstrings may)."""
    parts = [PARTS[f"world/{name}.py"] for name in ("wire", "exchange", "visitor")]
    docs = {id(node.body[0].value) for part in parts for node in ast.walk(part)
            if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node)}
    words = [node.value for part in parts for node in ast.walk(part) if isinstance(node, ast.Constant)
             and isinstance(node.value, str) and id(node) not in docs]
    assert len(words) > 30
    assert [word for word in words if re.search("(?i)ollama|litellm|claude|anthropic|fleet", word)] \
        == []


def test_functions_are_short():
    sizes = sorted((node.end_lineno - node.lineno + 1, node.name) for node in functions())
    assert sizes[-1][0] <= 60, sizes[-1]
    assert sizes[len(sizes) // 2][0] <= 12
    assert sizes[int(len(sizes) * 0.9)][0] <= 35


def test_functions_take_few_parameters():
    bad = []
    for node in functions():
        named = [a.arg for a in node.args.posonlyargs + node.args.args if a.arg != "self"]
        if len(named) + len(node.args.kwonlyargs) > 5 and node.name != "__init__":
            bad.append((node.name, node.lineno))
    assert bad == []


def test_lines_are_narrow():
    assert [i + 1 for i, line in enumerate(LINES) if len(line) > 100] == []


def test_no_unfinished_marks():
    assert re.findall(r"TO" r"DO|FIX" r"ME|XX" r"X|Not" r"Implemented(?!Error)", SOURCE) == []


def test_every_slug_is_in_a_test():
    slugs = set()
    for node in ast.walk(tree()):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            place = {"FleetError": 0, "Finding": 0, "error": 0, "warn": 0}.get(name)
            if place is not None and len(node.args) > 1 \
                    and isinstance(node.args[place], ast.Constant) \
                    and isinstance(node.args[place].value, str) \
                    and re.fullmatch("[a-z0-9-]+", node.args[place].value):
                slugs.add(node.args[place].value)
    assert len(slugs) > 20
    tests = "\n".join(path.read_text(encoding="utf-8", errors="replace")
                      for path in (ROOT / "tests").rglob("*")
                      if path.suffix in (".py", ".err", ".txt", ".json")
                      and "live" not in path.parts)
    assert {slug for slug in slugs if f'"{slug}"' not in tests and f"{slug}\n" not in tests} == set()


def test_assets_name_no_other_site():
    assert re.findall(r"innerHTML", SOURCE) == []
    urls = set(re.findall(r"https?://[A-Za-z0-9.-]+[a-z](?::\d+)?", SOURCE))
    known = {"https://github.com", "https://json-schema.org", "https://fleet-doctor.invalid",
             "https://api.anthropic.com"}  # which `init --hybrid` writes
    private = {url for url in urls if re.match(r"https?://(localhost|studio\.local|mini)", url)}
    assert urls - known - private == set()


def test_importing_starts_nothing():
    program = ("import sys; before = set(sys.modules); import subagent_fleet; "
               "print(' '.join(sorted(set(sys.modules) - before)))")
    done = subprocess.run([sys.executable, "-S", "-W", "error", "-c", program], cwd=str(ROOT),
                          capture_output=True, check=True)
    assert done.stderr == b""
    loaded = set(done.stdout.decode().split())
    assert loaded == {"subagent_fleet", "__future__"}  # what lies where it is started is not run


@pytest.mark.parametrize("words", [("--version",), ("validate", "--config", "{example}")])
def test_quick_commands_load_no_network(words):
    example = str(ROOT / "fleet.example.json")
    words = [word.format(example=example) for word in words]
    program = ("import sys, subagent_fleet; status = subagent_fleet.main(sys.argv[1:]); "
               "print(status, ' '.join(sorted(sys.modules)))")
    done = subprocess.run([sys.executable, "-S", "-W", "error", "-c", program, *words],
                          cwd=str(ROOT), capture_output=True, check=True)
    status, *loaded = done.stdout.decode().splitlines()[-1].split()
    assert status == "0"
    assert not set(loaded) & {"urllib.request", "ssl", "http.client", "concurrent.futures",
                              "http.server", "socket", "subprocess"}


@pytest.mark.slow
def test_a_cut_download_runs_nothing(tmp_path):
    for share in (0.25, 0.5, 0.75, 0.99):
        cut = tmp_path / "cut.py"
        cut.write_text(SOURCE[:int(len(SOURCE) * share)], encoding="utf-8")
        done = subprocess.run([sys.executable, str(cut), "schema"], capture_output=True,
                              cwd=str(tmp_path))
        assert done.stdout == b""


def test_tracked_files_hold_no_path_of_a_machine():
    done = subprocess.run(["git", "ls-files", "-z"], cwd=str(ROOT), stdout=subprocess.PIPE)
    if done.returncode:
        pytest.skip("not a git checkout")
    names = [name for name in done.stdout.decode().split("\0") if name]
    assert "subagent_fleet.py" in names
    bad = [name for name in names if (ROOT / name).is_file() and re.search(
        rb"/(root|work|farm)/|/tmp/[a-z]+-[a-z0-9]+/", (ROOT / name).read_bytes())
        and not name.startswith(".ci/") and name != "tests/house/test_promises.py"]
    assert bad == []
    top = {pathlib.PurePosixPath(name).parts[0] for name in names}
    assert {name for name in top if not name.startswith(".")} <= {
        "subagent_fleet.py", "fleet.example.json", "README.md", "LICENSE", "pyproject.toml",
        "tests", "src"}
