"""generate, clean, env and launch as black boxes."""

import pytest


FLEET = """\
project:
  name: local-dev
  gateway: {provider: litellm}
nodes:
  big: {endpoint: "http://192.168.1.50:11434"}
  small: {endpoint: "http://192.168.1.51:11434"}
models:
  heavy: {node: big, ollama_model: "qwen3-coder:30b", litellm_alias: claude-sonnet-local,
          context: 65536, timeout: 600}
  light: {node: small, ollama_model: "qwen3:8b", litellm_alias: claude-haiku-local, context: 32768}
agents:
  planner: {model: light, description: Plans., tools: [Read, Grep, Glob]}
  implementer: {model: heavy, description: Writes.}
"""
FILES = ["litellm_config.yaml", ".claude/agents/planner.md", ".claude/agents/implementer.md",
         ".env.subagent-fleet"]


@pytest.fixture
def fleet(tmp_path):
    """A directory with a fleet file."""
    (tmp_path / "fleet.yaml").write_text(FLEET, encoding="utf-8")
    return tmp_path


def tree(directory):
    """Every file below a directory with its bytes."""
    return {str(path.relative_to(directory)): path.read_bytes()
            for path in sorted(directory.rglob("*")) if path.is_file()}


def rows(text):
    """The listed paths and what became of them."""
    return [tuple(line.split()) for line in text.splitlines()
            if line.startswith("  ") and line.split()[-1] in
            ("created", "updated", "unchanged", "removed", "edited")]


def test_generate_lists_every_file_in_order(fleet, run_cli):
    done = run_cli("generate")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("Generated:\n  litellm_config.yaml ")
    assert rows(done.stdout) == [(path, "created") for path in FILES]
    assert set(tree(fleet)) == {*FILES, ".subagent-fleet/manifest.json", "fleet.yaml"}


def test_generate_unknown_target_exits_2(fleet, run_cli):
    done = run_cli("generate", "--target", "claude,litelm")
    assert done.returncode == 2 and done.stdout == "" and "did you mean `litellm`?" in done.stderr
    assert set(tree(fleet)) == {"fleet.yaml"}


def test_generate_edited_file_is_refused_whole(fleet, run_cli):
    run_cli("generate")
    with open(fleet / FILES[1], "a", encoding="utf-8") as stream:
        stream.write("my own line\n")
    (fleet / "fleet.yaml").write_text(FLEET.replace("Plans.", "Thinks."), encoding="utf-8")
    before = tree(fleet)
    done = run_cli("generate")
    assert done.returncode == 3 and done.stdout == "" and "-my own line" in done.stderr
    assert tree(fleet) == before


def test_generate_force_keeps_a_copy(fleet, run_cli):
    run_cli("generate")
    (fleet / FILES[1]).write_text("mine", encoding="utf-8")
    done = run_cli("generate", "--force")
    assert done.returncode == 0 and (FILES[1], "updated") in rows(done.stdout)
    copies = list((fleet / ".subagent-fleet/backup/.claude/agents").iterdir())
    assert [copy.read_text(encoding="utf-8") for copy in copies] == ["mine"]




def test_env_without_generate_says_what_to_type(fleet, run_cli):
    done = run_cli("env")
    assert done.returncode == 1 and "fix: subagent-fleet generate" in done.stderr
