"""A task file to start from: how a project is set up and checked, guessed from its files."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.start.gate import LatePattern
from fleet.start.record import Record
from fleet.text.json import parse_object
from fleet.text.phrases import join_words
from fleet.text.yaml_dump import dump_yaml

if TYPE_CHECKING:
    from collections.abc import Mapping


class ProjectGuess(Record):
    """How a project is set up and checked, and the files that say so."""

    kind: str = ""  # "": nothing was recognized
    seen: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    check: str = ""


# Kinds of projects that one file tells: {file: (kind, check)}.
PLAIN_KINDS = {
    "go.mod": ("Go", "go vet ./... && go test ./..."),
    "Cargo.toml": ("Rust", "cargo test --quiet"), "pom.xml": ("Maven", "mvn -q test"),
    "build.gradle": ("Gradle", "gradle test"), "mix.exs": ("Elixir", "mix test")}
PYTHON_FILES = ("uv.lock", "poetry.lock", "pyproject.toml", "requirements.txt", "setup.py",
                "tox.ini")
PYTHON_TEST = LatePattern(r"test.*\.py")
# The files that are read; of a directory or a test, only its existence counts.
PROJECT_FILES = (*PYTHON_FILES, "package.json", "pnpm-lock.yaml", "yarn.lock",
                 "package-lock.json", "Gemfile", *PLAIN_KINDS, "Makefile")
PROJECT_DIRECTORIES = ("tests", "test", "spec")


def guess_project(files: Mapping[str, str]) -> ProjectGuess:
    """Return the first guess that a project's files allow. A file that is not read has no text."""
    for guess in (_guess_rails, _guess_python, _guess_node, _guess_plain, _guess_make):
        found = guess(files)
        if found:
            return found
    return ProjectGuess()


def _guess_rails(files: Mapping[str, str]) -> ProjectGuess | None:
    if not re.search(r"""gem ["']rails["']""", files.get("Gemfile", "")):
        return None
    check = "bundle exec rspec" if "spec" in files else "bin/rails test"
    return ProjectGuess("Rails", ("Gemfile",), ("bundle install",), check)


def _guess_python(files: Mapping[str, str]) -> ProjectGuess | None:
    seen = tuple(name for name in files if name in PYTHON_FILES or PYTHON_TEST.fullmatch(name))
    if not seen:
        return None
    setup: tuple[str, ...] = ()
    python = "python3"
    if "uv.lock" in files:
        setup, python = ("uv sync",), "uv run python"
    elif "poetry.lock" in files:
        setup, python = ("poetry install",), "poetry run python"
    elif "requirements.txt" in files:
        setup = ("python3 -m venv .venv", ".venv/bin/pip install -q -r requirements.txt")
        python = ".venv/bin/python"
    uses_pytest = any("pytest" in files[name] for name in seen)
    return ProjectGuess("Python", seen, setup,
                        f"{python} -m {'pytest -q' if uses_pytest else 'unittest -q'}")


def _guess_node(files: Mapping[str, str]) -> ProjectGuess | None:
    if "package.json" not in files:
        return None
    program, setup, lock = "npm", "npm install", ""
    for name, own, command in (("pnpm-lock.yaml", "pnpm", "pnpm install --frozen-lockfile"),
                               ("yarn.lock", "yarn", "yarn install --frozen-lockfile"),
                               ("package-lock.json", "npm", "npm ci")):
        if name in files and not lock:
            program, setup, lock = own, command, name
    page = parse_object(files["package.json"].encode("utf-8")) or {}
    scripts = page.get("scripts")
    scripts = scripts if isinstance(scripts, dict) else {}
    check = ""
    if "no test specified" not in str(scripts.get("test", "no test specified")):
        check = f"{program} test"
    elif "build" in scripts:
        check = f"{program} run build"
    return ProjectGuess("Node", tuple(filter(None, ("package.json", lock))), (setup,), check)


def _guess_plain(files: Mapping[str, str]) -> ProjectGuess | None:
    for name, (kind, check) in PLAIN_KINDS.items():
        if name in files:
            return ProjectGuess(kind, (name,), (), check)
    return None


def _guess_make(files: Mapping[str, str]) -> ProjectGuess | None:
    if not re.search(r"(?m)^(test|check)\s*:(?!=)", files.get("Makefile", "")):
        return None
    target = "test" if re.search(r"(?m)^test\s*:(?!=)", files["Makefile"]) else "check"
    return ProjectGuess("make", ("Makefile",), (), f"make {target}")


def render_tasks(guess: ProjectGuess) -> str:
    """Return a task file with two tasks that any project can use."""
    defaults: dict[str, object] = {}
    if guess.setup:
        defaults["setup"] = list(guess.setup)
    if guess.check:
        defaults["check"] = guess.check
    tasks = {"tests": {"prompt": "Find the most important function that no test covers, and "
                                 "write a test for it."},
             "readme": {"prompt": "Read README.md beside the code, and fix what is no longer "
                                  "true."}}
    lines = ["# Each task is done by an agent in a place of its own. `subagent-fleet run --land`",
             "# merges what passes its check. All keys: `subagent-fleet help runs`."]
    if not guess.check:
        lines += ["# No check was found. Add one, and nothing counts before it passes:",
                  "# defaults: {check: make test}"]
    if defaults:
        lines.append(dump_yaml({"defaults": defaults}).rstrip("\n"))
    lines.append(dump_yaml({"tasks": tasks}).rstrip("\n"))
    return "\n".join(lines) + "\n"


def describe_guess(guess: ProjectGuess) -> str:
    """Return in a sentence what was guessed, and from what."""
    if not guess.kind:
        kinds = ("Python", "Node", "Rails", *(kind for kind, _ in PLAIN_KINDS.values()), "make")
        return f"No check was guessed: none of {join_words(kinds, 'or')} was recognized here."
    setup = f"setup `{'`, `'.join(guess.setup)}`" if guess.setup else "no setup"
    check = f"check `{guess.check}`" if guess.check else "no check: add one"
    return f"Guessed from {', '.join(guess.seen)} ({guess.kind}): {setup}, {check}."
