"""A fleet, what is generated from it, and how its tests run commands and look at files."""
import os
import re

import pytest

from tools import free_port

PORT = free_port()
FLEET = """\
project:
  name: local-dev
  gateway: {port: PORT, provider: litellm}
nodes:
  big: {endpoint: "http://192.168.1.50:11434"}
  small: {endpoint: "http://192.168.1.51:11434"}
models:
  heavy: {node: big, ollama_model: "qwen3-coder:30b", litellm_alias: claude-sonnet-local,
          context: 65536, timeout: 600, fallback: [light]}
  light: {node: small, ollama_model: "qwen3:8b", litellm_alias: claude-haiku-local, context: 32768}
agents:
  planner: {model: light, description: Plans., tools: [Read, Grep, Glob]}
  implementer: {model: heavy, description: Writes.}
""".replace("PORT", str(PORT))
OTHER = FLEET.replace("context: 65536", "context: 131072").replace("Plans.", "Thinks.") \
    .replace("implementer:", "reviewer:")
FILES = ["litellm_config.yaml", ".claude/agents/planner.md", ".claude/agents/implementer.md",
         ".env.subagent-fleet"]
MANIFEST = ".subagent-fleet/manifest.json"
PLANNER, ENV = FILES[1], FILES[3]


@pytest.fixture
def fleet(tmp_path):
    """A directory with a fleet file."""
    (tmp_path / "fleet.yaml").write_text(FLEET, encoding="utf-8")
    return tmp_path


@pytest.fixture
def generated(fleet, run_cli):
    """A directory in which `generate` has run."""
    assert run_cli("generate").returncode == 0
    return fleet


@pytest.fixture
def quick(run_cli):
    """The same as `run_cli`, by the name that many tests know it."""
    return run_cli


def tree(directory):
    """Every file below a directory with its bytes; links as what they point at."""
    return {str(path.relative_to(directory)): os.readlink(path) if path.is_symlink()
            else path.read_bytes() for path in sorted(directory.rglob("*"))
            if path.is_symlink() or path.is_file()}


def marks(directory):
    """What changes when a file or a directory is touched."""
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns, path.stat().st_mode)
            for path in [directory, *directory.rglob("*")]}


def rows(text):
    """The listed paths and what became of them."""
    return [tuple(line.split()) for line in text.splitlines() if re.fullmatch(
        "  [^ ]+ +(created|updated|unchanged|removed|edited)", line)]


def rewrite(directory, text):
    (directory / "fleet.yaml").write_text(text, encoding="utf-8")


def edit(path, text="my own line\n"):
    with open(path, "a", encoding="utf-8") as stream:
        stream.write(text)
