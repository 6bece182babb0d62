"""Tasks for the simulated machines: a repository, and a program in Claude Code's place."""
from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from fleet.start.gate import asset
from fleet.text.phrases import quote_shell

if TYPE_CHECKING:
    from fleet.demo.machines import DemoWorld


# `run` is the real one, and so are git, the check and the landing. Only who works is a script:
# it asks its model through the gateway, as Claude Code would, and writes the answer to a file.

DEMO_CLAUDE = asset("demo/claude.txt")
DEMO_TASKS = {"login": "Fix the login", "tests": "Add tests for dates",
              "docs": "Describe the API"}
DEMO_CHECK = "sh test.sh"
DEMO_TEST = b"""\
# There are pages, and each has a text.
for page in *.md; do test -s "$page" || exit 1; done
"""
DEMO_IDENTITY = ("-c", "user.name=demo", "-c", "user.email=demo@localhost")


def prepare_tasks(world: DemoWorld, place: str) -> str:
    """Make a repository of the working directory; return why tasks cannot be shown, if so."""
    world.find_programs(place)
    if sys.platform == "win32" or not world.which("git"):
        return "git is not installed"
    script = world.path(place, "claude.py")
    # The interpreter itself: a confined command doesn't see a virtual environment in /tmp.
    python = quote_shell(world.real_path(sys.executable))
    start = f"#!/bin/sh\nexec {python} -I -S {quote_shell(script)} \"$@\"\n"
    claude = world.path(place, "claude")
    world.replace_files([
        (script, DEMO_CLAUDE.encode(), 0o600), (claude, start.encode(), 0o700),
        ("test.sh", DEMO_TEST, 0o644)])
    if world.which("claude") != claude:  # never a person's own, which would be asked in earnest
        return f"no program can be started in {place}"
    for words in (["init", "--quiet"], ["symbolic-ref", "HEAD", "refs/heads/main"],
                  ["add", "test.sh"], [*DEMO_IDENTITY, "commit", "--quiet", "-m", "start"]):
        ran = world.run_git(words, ".")
        if ran.code:
            return f"git does not work: {ran.talk.strip()}"
    return ""
