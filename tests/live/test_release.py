"""The release as it is made and checked: twice the same bytes, and the wheel does the job."""
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import install
import rig

ROOT = Path(__file__).resolve().parents[2]


def oldest_and_newest():
    """Name the interpreters to try the wheel with."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = {}
    for path in pyenv.glob("3.*/bin/python3"):
        version = tuple(map(int, path.parent.parent.name.split(".")[:2]))
        if version >= (3, 9):
            found[version] = str(path)
    found = found or {sys.version_info[:2]: sys.executable}
    return [found[min(found)], found[max(found)]]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A clean clone of what is committed, and what the script makes of it."""
    place = tmp_path_factory.mktemp("release")
    clone = place / "clone"
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(clone)], check=True)
    subprocess.run([install.RELEASE_PYTHON, ".github/release.py", "--pin"], cwd=clone, check=True)
    subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e@x", "commit", "-qam", "pin",
                    "--allow-empty"], cwd=clone, check=True)
    done = subprocess.run([install.RELEASE_PYTHON, ".github/release.py", "--out", place / "dist"],
                          cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "built twice with the same bytes" in done.stdout
    return clone, place / "dist"


def test_the_sums_and_the_formula_are_of_the_file(made):
    clone, dist = made
    subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=dist, check=True,
                   stdout=subprocess.DEVNULL)
    source = (dist / "subagent_fleet.py").read_bytes()
    assert source == (clone / "subagent_fleet.py").read_bytes()
    formula = (dist / "subagent-fleet.rb").read_text("utf-8")
    assert re.findall('sha256 "(.*)"', formula) == [hashlib.sha256(source).hexdigest()]
    assert len(list(dist.iterdir())) == 6


@pytest.mark.parametrize("python", oldest_and_newest())
def test_the_wheel_installs_and_its_demo_passes(made, python, tmp_path, trap):
    wheel = next(made[1].glob("*.whl"))
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True)
    program = tmp_path / "venv/bin/subagent-fleet"
    subprocess.run([tmp_path / "venv/bin/python", "-m", "pip", "install", "-q", "--no-index",
                    "--no-deps", wheel], check=True)
    env = rig.bare_environment(tmp_path, trap)
    done = subprocess.run([program, "demo"], env=env, cwd=tmp_path, capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
