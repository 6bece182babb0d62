"""What a person is told to type next: the same command again keeps all that was asked."""
import re
import shlex

import pytest

import subagent_fleet as sf
from tools import free_port

EXAMPLES = [(row, example.split("subagent-fleet ")[-1]) for row in sf.COMMANDS for example in row.examples]
TYPED = [
    "run a b --land --max 2 --keep-going --file x/tasks.yaml --config 'my fleet.yaml'",
    "run 'a:do it' b:c --touch 'src/**' --touch x --setup 'npm ci' --priority -5 --no-setup",
    "task retry a --say=-v", "status --watch", "status --watch 7.5", "logs -n 3 -f", "init --example",
    "generate --target claude,env --litellm-only", "launch codex --out a -- exec 'say hi' --config x",
    "init --node a=1.2.3.4 --node b=http://h:1 --hybrid --force", "up --ui", "bench --exam --times 3"]


def read(words):
    options = sf.read_call(words).options
    return {key: value for key, value in vars(options).items() if value is not None}


@pytest.mark.parametrize("line", [
    *(re.split(r" [|<>] |\)\"?$", example)[0] for _, example in EXAMPLES), *TYPED])
def test_a_command_is_typed_again_as_it_was(line):
    options = sf.read_call(shlex.split(line)).options
    again = sf.type_again(options)
    assert again.startswith("subagent-fleet ")
    assert read(shlex.split(again)[1:]) == read(shlex.split(line))


@pytest.mark.parametrize("words, changes, again", [
    ("init --hybrid", {"force": True}, "subagent-fleet init --hybrid --force"),
    ("up --ui -- -p hi", {"passed": ["--resume", "5b1c"]}, "subagent-fleet up --ui -- --resume 5b1c"),
    ("run fix it --model m", {"words": ["fix it"]}, "subagent-fleet run 'fix it' --model m"),
    ("task stop jwt", {"patterns": ["*"]}, "subagent-fleet task stop '*'")])
def test_a_command_is_typed_again_with_a_change(words, changes, again):
    assert sf.type_again(sf.read_call(words.split()).options, **changes) == again


def test_init_beside_a_fleet_keeps_what_was_asked(run_cli, tmp_path):
    env = {"OLLAMA_HOST": f"127.0.0.1:{free_port()}"}
    assert run_cli("init", "--offline").returncode == 0
    done = run_cli("init", "--hybrid", "--offline")
    assert done.returncode == 3 and "`subagent-fleet init --offline --hybrid --force`" in done.stderr
    (tmp_path / "sub").mkdir()
    done = run_cli("init", "--hybrid", cwd=tmp_path / "sub")
    assert "`subagent-fleet init --hybrid --force` for a second one here" in done.stderr
    done = run_cli("init", "--hybrid", "--force", env=env)  # no model was found
    assert done.stdout.endswith("run:\n  subagent-fleet init --hybrid --force\n")


def test_force_keeps_what_was_chosen(run_cli, tmp_path):
    run_cli("init", "--offline")
    assert run_cli("generate", "--target", "claude").returncode == 0
    edited = tmp_path / ".claude/agents/planner.md"
    edited.write_text("mine")
    done = run_cli("generate", "--target", "claude")
    assert done.returncode == 3 and "`subagent-fleet generate --target claude --force`" in done.stderr


# -- a flag that takes one value --


@pytest.mark.parametrize("words, flag, both", [
    ("run --model A --model=B x:y", "--model", "`A` and `B`"),
    ("run --max 2 --max 2", "--max", "`2` and `2`"),
    ("status --watch --watch 4", "--watch", "`2` and `4`"),
    ("logs -n 3 --lines 4", "--lines", "`3` and `4`"),
    ("validate --config a --config b", "--config", "`a` and `b`"),
    ("task diff a --stat --stat --changes none --changes none", "", "")])
def test_a_second_value_is_refused(run_cli, words, flag, both):
    done = run_cli(*words.split())
    assert done.returncode == 2
    assert not flag or done.stderr == (
        f"error: {words.split(' -')[0]}: {flag} takes one value, and {both} were typed\n"
        f"  fix: leave out one {flag}\n")


def test_every_flag_of_one_value_refuses_a_second():
    values = {"--agent": "a", "--timeout": "5", "--watch": "5", "--seconds": "5", "--changes": "none",
              "--sandbox": "off", "--since": "1h"}
    for row in sf.COMMANDS:
        for flag in row.flags:
            if not flag.name.startswith("-") or not flag.metavar or flag.more.get("action"):
                continue
            value = values.get(flag.name, "1")
            words = [flag.name, value, *["x"] * 2, flag.name, value]
            with pytest.raises(sf.FleetError, match="takes one value"):
                sf.parse_arguments(row, words)
