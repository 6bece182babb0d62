#!/usr/bin/env python3
"""Make a release: `python3 .github/release.py [--out DIR] [--tag vX.Y.Z]`, in a clean checkout.

Before it, `python3 .github/release.py --pin` writes the version and the checksum of the single file
into the plugin that is committed; commit that. Assistants fetch what it pins.

Writes the single file, a wheel, a source archive, a Homebrew formula, the release's notes and
SHA256SUMS. All of it is built twice, in two places, and must be the same bytes. Uploads nothing.
"""
from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import types

ROOT = pathlib.Path(__file__).resolve().parent.parent
HOME_URL = "https://github.com/adityak74/subagent-fleet"
BUILDER = "flit_core==3.12.0"  # pinned: another version may order a wheel's metadata differently
BUILD = """
import sys
from flit_core.buildapi import build_sdist, build_wheel
build_wheel(sys.argv[1])
build_sdist(sys.argv[1])
"""


class Refused(Exception):
    """The release cannot be made; says why and what to do."""


def read_version(source: str) -> str:
    """Return the version that the one file says."""
    match = re.search(r'^__version__ = "(\d+\.\d+\.\d+)"$', source, re.M)
    if not match:
        raise Refused("subagent_fleet.py: no line `__version__ = \"X.Y.Z\"`")
    return match[1]


def read_notes(changelog: str, version: str) -> str:
    """Return what the changelog says of a version."""
    sections = re.split(r"(?m)^## ", changelog)[1:]
    for section in sections:
        title, _, text = section.partition("\n")
        if title.split()[:1] == [version] and text.strip():
            return text.strip() + "\n"
    raise Refused(f".github/CHANGELOG.md: no section `## {version}` with words in it; write it")


def check_tag(tag: str, version: str) -> None:
    """Refuse a tag that is not this version's."""
    if tag and tag != f"v{version}":
        raise Refused(f"the tag is {tag}, the file says {version}; "
                      f"change `__version__` or tag it v{version}")


def render_formula(template: str, version: str, source: bytes) -> str:
    """Return the Homebrew formula of the single file."""
    values = {"@URL@": f"{HOME_URL}/releases/download/v{version}/subagent_fleet.py",
              "@VERSION@": version, "@SHA256@": hashlib.sha256(source).hexdigest()}
    for mark, value in values.items():
        template = template.replace(mark, value)
    if "@" in re.sub(r"@\S+\.\S+", "", template):
        raise Refused(".github/formula.rb: a mark is left that nothing fills")
    return template


def render_plugin(source: bytes) -> dict[str, bytes]:
    """Return {path: bytes} of the plugin that is committed, as the single file makes it."""
    module = types.ModuleType("released")
    module.__file__ = "subagent_fleet.py"
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    plugin: dict[str, bytes] = module.render_plugins(module.PLUGIN_TARGETS, source)
    return plugin


def pin(root: pathlib.Path) -> list[str]:
    """Write the plugin of the single file; return the paths that changed."""
    plugin = render_plugin((root / "subagent_fleet.py").read_bytes())
    stale = find_stale(root, plugin)
    for path in stale:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(plugin[path])
    return stale


def find_stale(root: pathlib.Path, plugin: dict[str, bytes]) -> list[str]:
    """Return the paths of a checkout that are not as the plugin's."""
    return [path for path, text in sorted(plugin.items())
            if not (root / path).is_file() or (root / path).read_bytes() != text]


def check_pin(root: pathlib.Path) -> None:
    """Refuse a plugin that pins another file than the one that is released."""
    stale = find_stale(root, render_plugin((root / "subagent_fleet.py").read_bytes()))
    if stale:
        raise Refused(f"{stale[0]} is of another subagent_fleet.py\n"
                      "  fix: python3 .github/release.py --pin && git commit -am 'plugins: pin it'")


def render_sums(directory: pathlib.Path) -> str:
    """Return the lines that `sha256sum -c` reads, for every file of a directory."""
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
                   for path in sorted(directory.iterdir()) if path.name != "SHA256SUMS")


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True,
                          text=True).stdout


def make_builder(place: pathlib.Path) -> str:
    """Return an interpreter that has the pinned builder: this one, or one made for it."""
    name, _, version = BUILDER.partition("==")
    try:
        if importlib.metadata.version(name) == version:
            return sys.executable
    except importlib.metadata.PackageNotFoundError:
        pass

    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python3")
    subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", BUILDER],
                   check=True)
    return str(python)


def build(python: str, out: pathlib.Path, **environment: str) -> None:
    """Build everything from what is committed, in a fresh copy of it."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = pathlib.Path(scratch) / "copy"
        subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(copy)], check=True)
        out.mkdir(parents=True)
        subprocess.run([python, "-c", BUILD, str(out)], cwd=copy, check=True,
                       env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment})

        source = (copy / "subagent_fleet.py").read_bytes()
        version = read_version(source.decode("utf-8"))
        (out / "subagent_fleet.py").write_bytes(source)
        formula = render_formula((copy / ".github/formula.rb").read_text("utf-8"), version, source)
        (out / "subagent-fleet.rb").write_bytes(formula.encode("utf-8"))
        notes = read_notes((copy / ".github/CHANGELOG.md").read_text("utf-8"), version)
        (out / "NOTES.md").write_bytes(notes.encode("utf-8"))
    (out / "SHA256SUMS").write_bytes(render_sums(out).encode("ascii"))
    for path in out.iterdir():
        path.chmod(0o644)


def release(out: pathlib.Path, tag: str) -> str:
    """Build twice, compare, put the result into `out`; return the version."""
    if git("status", "--porcelain"):
        raise Refused("the checkout has changes that are not committed; commit or stash them")
    version = read_version((ROOT / "subagent_fleet.py").read_text("utf-8"))
    check_tag(tag, version)
    check_pin(ROOT)
    if out.exists() and any(out.iterdir()):
        raise Refused(f"{out} is not empty; name another --out")

    date = git("log", "-1", "--format=%ct").strip()
    with tempfile.TemporaryDirectory() as scratch:
        place = pathlib.Path(scratch)
        python = make_builder(place / "builder")
        build(python, place / "first", SOURCE_DATE_EPOCH=date, TZ="UTC", PYTHONHASHSEED="1")
        build(python, place / "second", SOURCE_DATE_EPOCH=date, TZ="EST5EDT", PYTHONHASHSEED="2")
        sums = [(place / name / "SHA256SUMS").read_text("ascii") for name in ("first", "second")]
        if sums[0] != sums[1]:
            raise Refused("two builds differ:\n" + sums[0] + "\n" + sums[1])
        shutil.copytree(place / "first", out, dirs_exist_ok=True)
    return version


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", default="dist", help="an empty or new directory (dist)")
    parser.add_argument("--tag", default="", help="the tag that is released; must fit the version")
    parser.add_argument("--pin", action="store_true",
                        help="only write the file's checksum into the plugin, to be committed")
    typed = parser.parse_args()
    if typed.pin:
        print("\n".join(pin(ROOT)) or "the plugin is of this subagent_fleet.py")
        return 0
    out = pathlib.Path(typed.out)
    try:
        version = release(out, typed.tag)
    except Refused as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 1
    print(f"subagent-fleet {version}, built twice with the same bytes, in {out}:")
    print((out / "SHA256SUMS").read_text("ascii"), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
