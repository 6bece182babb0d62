"""src/build.py: the parts are the file, and an edit made in the file comes home."""
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tools import ROOT

BUILD = "src/build.py"


@pytest.fixture
def house(tmp_path):
    """A copy of the sources that may be changed."""
    place = tmp_path / "house"
    shutil.copytree(ROOT / "src", place / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "subagent_fleet.py", place)
    return place


@pytest.fixture(scope="session")
def built_rooms(tmp_path_factory):
    """The first three rooms alone: a house that is built in a tenth of the time."""
    place = tmp_path_factory.mktemp("rooms") / "house"
    fleet = place / "src/fleet"
    fleet.mkdir(parents=True)
    shutil.copy(ROOT / BUILD, place / "src")
    rooms = (ROOT / "src/fleet/CONTENTS").read_text(encoding="utf-8").split("\n\n")[:3]
    (fleet / "CONTENTS").write_text("\n\n".join(rooms) + "\n", encoding="utf-8")
    (fleet / "assets").mkdir()
    for room in rooms:
        name = room.partition("/")[0]
        shutil.copytree(ROOT / "src/fleet" / name, fleet / name,
                        ignore=shutil.ignore_patterns("__pycache__"))
    assert build(place) == (0, "")
    return place


@pytest.fixture
def rooms(built_rooms, tmp_path):
    """A copy of them that may be changed."""
    return shutil.copytree(built_rooms, tmp_path / "house")


def build(place, *words):
    """Run the builder there; return (status, what it said)."""
    done = subprocess.run([sys.executable, BUILD, *words], cwd=str(place), capture_output=True,
                          text=True)
    return done.returncode, done.stdout + done.stderr


def edit(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, (path, old)
    path.write_bytes(text.replace(old, new).encode("utf-8"))


def git(place, *words):
    done = subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@example.com", *words],
                          cwd=str(place), capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_the_file_is_the_build():
    assert build(ROOT, "--check") == (0, "")


def test_a_build_writes_nothing_where_nothing_changed(rooms):
    before = (rooms / "subagent_fleet.py").stat().st_mtime_ns
    assert build(rooms) == (0, "")
    assert (rooms / "subagent_fleet.py").stat().st_mtime_ns == before


def test_an_edited_part_is_in_the_file_after_a_build(rooms):
    edit(rooms / "src/fleet/text/phrases.py", '"""Nearest words', '"""Nearby words')
    status, said = build(rooms, "--check")
    assert status == 1 and "python3 src/build.py" in said
    assert build(rooms) == (0, "") == build(rooms, "--check")
    assert "# Nearby words" in (rooms / "subagent_fleet.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("path, line", [
    ("text/phrases.py", "import os\n"),
    ("text/phrases.py", "from fleet.world.world import World\n"),
    ("config/names.py", "from fleet.config.check import check_fleet\n"),
    ("config/names.py", "from fleet.text.yaml import _HINTS\n"),
    ("config/names.py", "from fleet.text.yaml import nothing_of_the_kind\n"),
    ("config/names.py", "from os import path\n"),
    ("config/names.py", "import os.path\n"),
    ("config/names.py", "import json as text\n"),
    ("config/names.py", "from .node import Node\n"),
    ("config/names.py", "from fleet.text.yaml import *\n"),
])
def test_an_import_that_a_part_may_not_have_is_refused_with_its_place(rooms, path, line):
    part = rooms / "src/fleet" / path
    edit(part, "from typing import TYPE_CHECKING\n", line + "from typing import TYPE_CHECKING\n")
    number = part.read_text(encoding="utf-8").split("\n").index(line.strip()) + 1
    status, said = build(rooms)
    assert status == 1 and f"src/fleet/{path}:{number}: " in said, said


@pytest.mark.parametrize("text, word", [
    ("\n\nclass FleetError:\n    pass\n", "FleetError"),
    ("\n\ndef print():\n    return 1\n", "print"),
    ("\n\njson = 1\n", "json"),
    ("\n\ndef more():\n    return __file__\n", "__file__"),
    ("\n\ndef more():\n    global TICK\n    TICK = 1\n", "global"),
    ("\n\ndef more():\n    return ipaddress.ip_address(1)\n", "import ipaddress"),
    ("\n\ndef more():\n    return render_json({})\n", "from fleet.text.json import render_json"),
    ("\n\ndef more():\n    from fleet.text.json import render_json\n    return render_json\n", "top"),
    ("\n" * 600 + "MORE = 1\n", "600 at most"),
])
def test_what_a_part_may_not_say_is_refused(rooms, text, word):
    part = rooms / "src/fleet/text/phrases.py"
    part.write_bytes(part.read_bytes() + text.encode("utf-8"))
    status, said = build(rooms)
    assert status == 1 and "src/fleet/text/phrases.py:" in said and word in said


def test_a_part_outside_of_contents_and_an_asset_nobody_uses_are_refused(rooms):
    (rooms / "src/fleet/text/other.py").write_text('"""Other."""\n', encoding="utf-8")
    (rooms / "src/fleet/assets/other.md").write_text("Other.\n", encoding="utf-8")
    status, said = build(rooms)
    assert status == 1 and "text/other.py:1: it is not in CONTENTS" in said
    assert 'assets/other.md: no part has `asset("other.md")`' in said


def test_a_broken_part_is_told_with_its_line(rooms):
    part = rooms / "src/fleet/text/phrases.py"
    part.write_bytes(part.read_bytes() + b"\n\ndef broken(:\n")
    status, said = build(rooms)
    assert status == 1 and re.search(r"src/fleet/text/phrases\.py:\d+: ", said)
    assert "Traceback" not in said


@pytest.mark.parametrize("name, text", [("text/phrases.py", "def count_of("),
                                        ("gateway/queue.py", "class Scheduler"),
                                        ("start/gate.py", "class _Late:"),
                                        ("assets/help/runs.md", "run"), ("program/main.py", "def main(")])
def test_where_names_the_part_and_its_line(name, text):
    source = (ROOT / "src/fleet" / name).read_text(encoding="utf-8").split("\n")
    number = next(n for n, line in enumerate(source, 1) if text in line)
    built = (ROOT / "subagent_fleet.py").read_text(encoding="utf-8").split("\n")
    line = source[number - 1]
    place = next(n for n, each in enumerate(built, 1) if each == line or each.endswith('"""' + line))
    assert build(ROOT, "where", str(place)) == (0, f"src/fleet/{name}:{number}\n")


@pytest.mark.parametrize("words", [["where", "0"], ["where", "x"], ["where", "9999999"]])
def test_where_refuses_what_is_no_line(words):
    status, said = build(ROOT, *words)
    assert status == 1 and "is no line" in said


def test_a_word_that_it_does_not_know_shows_how_it_is_used():
    status, said = build(ROOT, "make")
    assert status == 2 and "src/build.py take" in said


@pytest.mark.parametrize("name, old, new", [
    ("text/phrases.py", "def count_of(", "# How many.\ndef count_of("),
    ("start/gate.py", "class _Late:", "# Late.\nclass _Late:"),
    ("program/main.py", "def main(", "# The whole.\ndef main("),
    ("assets/page/events.js", '"use strict";', '"use strict"; // here'),
])
def test_take_brings_an_edit_of_the_file_into_its_part(name, old, new, request):
    is_early = name.partition("/")[0] in ("start", "text")
    house = request.getfixturevalue("rooms" if is_early else "house")
    edit(house / "subagent_fleet.py", old, new)
    status, said = build(house, "take")
    assert status == 0 and f"src/fleet/{name}" in said, said
    assert new in (house / "src/fleet" / name).read_text(encoding="utf-8")
    assert build(house, "--check") == (0, "")


def test_take_brings_several_edits_and_lines_that_went(house):
    file = house / "subagent_fleet.py"
    edit(file, "def count_of(", "# One.\n# Two.\ndef count_of(")
    edit(file, "# Nearest words", "# Nearby words")
    lines = file.read_text(encoding="utf-8").split("\n")
    gone = next(n for n, line in enumerate(lines) if line.startswith("class Scheduler")) + 1
    taken = lines.pop(gone)
    file.write_bytes("\n".join(lines).encode("utf-8"))
    status, _ = build(house, "take")
    assert status == 0 and build(house, "--check") == (0, "")
    assert taken not in (house / "src/fleet/gateway/queue.py").read_text(encoding="utf-8").split("\n")[:60] \
        or taken.strip() == ""
    assert '"""Nearby words' in (house / "src/fleet/text/phrases.py").read_text(encoding="utf-8")


def test_take_refuses_an_edit_of_what_the_builder_makes(house):
    before = {path: path.read_bytes() for path in (house / "src").rglob("*") if path.is_file()}
    edit(house / "subagent_fleet.py", "    import argparse\n", "    import argparse as words\n")
    status, said = build(house, "take")
    assert status == 1 and "is made by src/build.py" in said
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.slow
def test_two_branches_merge_by_plain_git_and_the_merged_file_is_the_build(house):
    assert git(house, "init", "-q", "-b", "main")[0] == 0
    git(house, "add", "-A")
    git(house, "commit", "-qm", "start")
    for branch, path, old in (("one", "text/phrases.py", "def count_of("),
                              ("two", "gateway/queue.py", "class Scheduler")):
        git(house, "checkout", "-q", "-b", branch, "main")
        edit(house / "src/fleet" / path, old, f"# {branch}\n{old}")
        assert build(house) == (0, "")
        git(house, "commit", "-qam", branch)
    assert git(house, "merge", "-q", "--no-edit", "one")[0] == 0
    assert build(house, "--check") == (0, "")
    text = (house / "subagent_fleet.py").read_text(encoding="utf-8")
    assert "# one\n" in text and "# two\n" in text


def test_every_python_builds_the_same_bytes(house):
    pythons = sorted(pathlib.Path.home().glob(".pyenv/versions/3.*/bin/python3"))
    for python in pythons:
        if subprocess.call([str(python), "-c", "import sys; sys.exit(sys.version_info < (3, 9))"]):
            continue
        done = subprocess.run([str(python), BUILD, "--check"], cwd=str(house), capture_output=True)
        assert done.returncode == 0, (python, done.stderr)


def test_the_parts_have_sizes_that_fit_a_sitting():
    sizes = sorted(path.read_bytes().count(b"\n") for path in (ROOT / "src/fleet").rglob("*.py"))
    assert len(sizes) > 100
    assert sizes[len(sizes) // 2] <= 220 and sizes[len(sizes) * 9 // 10] <= 400 and sizes[-1] <= 600
