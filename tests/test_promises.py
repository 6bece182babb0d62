"""What STYLE promises about the file itself."""
import ast
import pathlib
import re
import subprocess
import sys

import pytest

import subagent_fleet as sf
from tools import ROOT, SCRIPT

SOURCE = SCRIPT.read_text(encoding="utf-8")
TREE = ast.parse(SOURCE)
LINES = SOURCE.splitlines()
FUNCTIONS = [n for n in ast.walk(TREE) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
BANNERS = [(i + 1, m[1], m[2]) for i, line in enumerate(LINES)
           for m in [re.match(r"# == (\d+b?)\. (.+?) =+$", line)] if m]
EFFECTS = {"open", "print", "os", "time", "random", "socket", "urllib", "subprocess", "Path",
           "input", "shutil", "tempfile", "pathlib", "secrets", "signal", "threading", "select"}


def section_of(line):
    """The number of the section that holds a line."""
    return ([number for start, number, _ in BANNERS if start <= line] or ["0"])[-1]


def test_contents_match_banners():
    contents = re.findall(r"^ +(\d+b?)\. (\S.*?)  +\S", sf.__doc__, re.M)
    assert contents and contents == [(number, title) for _, number, title in BANNERS]
    assert all(len(LINES[start - 1]) == 79 for start, _, _ in BANNERS)


def test_opening_order():
    order = ["#!/usr/bin/env python3", "# /// script", "# SPDX-License-Identifier: MIT", '"""Run',
             "from __future__ import annotations", "import sys", "if sys.version_info <",
             "class _Late:", "__version__ = "]
    places = [SOURCE.index(piece) for piece in order]
    assert places == sorted(places)
    assert 'requires-python = ">=3.9"' in SOURCE and "dependencies = []" in SOURCE


def test_imports_are_standard_library():
    found = set()
    for node in ast.walk(TREE):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    assert found - {"__future__"}
    if sys.version_info >= (3, 10):
        assert found - set(sys.stdlib_module_names) == set()
    top = {alias.name for node in TREE.body if isinstance(node, ast.Import)
           for alias in node.names}
    assert top == {"sys"}


def test_pure_sections_name_no_effect():
    bad = [(node.id, node.lineno) for node in ast.walk(TREE)
           if isinstance(node, ast.Name) and node.id in EFFECTS
           and section_of(node.lineno) in ("1", "2", "3", "4", "5", "6", "7", "7b")]
    bad += [(alias.name, node.lineno) for node in ast.walk(TREE)
            if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names
            if alias.name.split(".")[0] in EFFECTS
            and section_of(node.lineno) in ("1", "2", "3", "4", "5", "6", "7", "7b")]
    assert bad == []


def test_only_the_world_touches_the_world():
    doors = {"open", "os", "socket", "subprocess", "urllib", "input", "print", "shutil",
             "tempfile", "pathlib", "secrets", "signal", "select"}
    bad = [(node.id, node.lineno) for node in ast.walk(TREE) if isinstance(node, ast.Name)
           and node.id in doors and section_of(node.lineno) not in ("8",)]
    assert bad == []


def test_sections_use_only_what_stands_above():
    order = [number for _, number, _ in BANNERS]
    home = {}
    for node in TREE.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            home[node.name] = section_of(node.lineno)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        home[name.id] = section_of(node.lineno)
    assert len(home) > 50
    bad = {(node.id, section_of(node.lineno)) for node in ast.walk(TREE)
           if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in home
           and home[node.id] != "0" and section_of(node.lineno) != "0"
           and order.index(home[node.id]) > order.index(section_of(node.lineno))}
    # The commands' help and completion are about the command table, and the last lines call main.
    assert {found for found in bad if found[1] not in ("11", "12")} - {("main", "13")} == set()


def test_functions_are_short():
    sizes = sorted((node.end_lineno - node.lineno + 1, node.name) for node in FUNCTIONS)
    assert sizes[-1][0] <= 60, sizes[-1]
    assert sizes[len(sizes) // 2][0] <= 12
    assert sizes[int(len(sizes) * 0.9)][0] <= 35


def test_functions_take_few_parameters():
    bad = []
    for node in FUNCTIONS:
        named = [a.arg for a in node.args.posonlyargs + node.args.args if a.arg != "self"]
        if len(named) + len(node.args.kwonlyargs) > 5 and node.name != "__init__":
            bad.append((node.name, node.lineno))
    assert bad == []


def test_lines_are_narrow():
    assert [i + 1 for i, line in enumerate(LINES) if len(line) > 100] == []


def test_no_unfinished_marks():
    assert re.findall(r"TO" r"DO|FIX" r"ME|XX" r"X|Not" r"Implemented", SOURCE) == []


def test_every_slug_is_in_a_test():
    slugs = set()
    for node in ast.walk(TREE):
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
    known = {"https://github.com", "https://json-schema.org", "https://fleet-doctor.invalid"}
    private = {url for url in urls if re.match(r"https?://(localhost|studio\.local|mini)", url)}
    assert urls - known - private == set()


def test_importing_starts_nothing():
    program = ("import sys; before = set(sys.modules); import subagent_fleet; "
               "print(' '.join(sorted(set(sys.modules) - before)))")
    done = subprocess.run([sys.executable, "-S", "-W", "error", "-c", program], cwd=str(ROOT),
                          capture_output=True, check=True)
    assert done.stderr == b""
    loaded = set(done.stdout.decode().split())
    assert "subagent_fleet" in loaded
    assert not loaded & {"urllib.request", "ssl", "http.client", "concurrent.futures", "socket",
                         "http.server", "subprocess", "threading", "argparse", "json", "asyncio",
                         "dataclasses", "re"}  # a compiled pattern at top level would load it


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
        and not name.startswith(".ci/") and name != "tests/test_promises.py"]
    assert bad == []
    top = {pathlib.PurePosixPath(name).parts[0] for name in names}
    assert {name for name in top if not name.startswith(".")} <= {
        "subagent_fleet.py", "fleet.example.json", "README.md", "LICENSE", "pyproject.toml",
        "tests"}
