"""What a person is told to type next: the same command again keeps all that was asked."""
import re
import shlex
import signal

import pytest

import subagent_fleet as sf
from run_kit import WORKS, shell
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


# -- what a `run` was asked --

# A person is at work in `a` until the test lets them go on; `b` waits for a slot, or is done.
WORKING = {"a": {"prompt": "x", "coder": shell("echo a > a.txt", WORKS)},
           "b": {"prompt": "x", "coder": shell("echo b > b.txt"), "check": "true"}}


def interrupt(shop, child):
    child.send_signal(signal.SIGINT)
    done = shop.end(child)
    assert done.code == 130, done
    return done


@pytest.mark.slow
def test_what_a_run_was_asked_is_in_every_hint_until_all_of_it_is_done(shop):
    shop.tasks(WORKING, max=1)
    again = "subagent-fleet run --max 1 --land --keep-going"
    child = shop.begin("run", "--land", "--keep-going", "--max", "1")
    shop.wait(lambda: shop.works("a"))
    said = interrupt(shop, child).out
    assert said.endswith("nothing checks them or starts the next task.\n"
                         f"Continue: {again}\nEnd them: subagent-fleet task stop '*'\n"), said
    assert f"\nContinue: {again}\n" in shop.type("tasks").err
    assert f"next `{again}`" in shop.type("task", "say", "b", "more").err
    shop.type("task", "stop", "*")
    assert shop.type("task", "retry", "a", "b").err == f"Nothing is running. Start: {again}\n"
    shop.let_go()
    assert shop.run("--land").code == 0  # which asks for less
    assert "subagent-fleet run\n" in shop.type("task", "add", "later").err  # and is over
    assert shop.files("main") == {"a.txt", "b.txt"}


@pytest.mark.slow
def test_a_landing_run_tells_nobody_to_merge_what_it_lands(shop):
    shop.tasks(WORKING, max=2)
    child = shop.begin("run", "--land")
    shop.wait(lambda: shop.works("a") and shop.rows()["b"]["state"] == "done")
    said = shop.type("tasks").err
    assert re.fullmatch(r"`run --land` \(pid \d+\) lands 1 task when nothing is left to do\.\n", said), said
    said = interrupt(shop, child).out
    assert "Merge" not in said and "Continue: subagent-fleet run --land\n" in said, said
    shop.type("task", "stop", "a")
    said = shop.type("tasks").err
    assert said.endswith("Look at what is done: subagent-fleet task diff b\n"
                         "Merge it, checked as a whole: subagent-fleet task land\n"), said


@pytest.mark.slow
def test_a_run_of_some_tasks_continues_with_those(shop):
    shop.tasks({**WORKING, "c": {"prompt": "x", "coder": shell("true")}}, max=1)
    child = shop.begin("run", "a", "b", "--file", "tasks.json")
    shop.wait(lambda: shop.works("a"))
    shop.type("run", "d:later", "--coder", "[sh, -c, 'true']", "--detach")  # handed over
    said = interrupt(shop, child).out
    assert "\nContinue: subagent-fleet run a b d --file tasks.json\n" in said, said
    (shop.repo / "sub").mkdir()
    assert f"run a b d --file {shop.repo}/tasks.json\n" in shop.type("tasks", cwd=shop.repo / "sub").err
    shop.type("task", "stop", "*")
    assert "Start: subagent-fleet run\n" in shop.type("task", "add", "more").err  # those are over


@pytest.mark.slow
def test_who_hands_over_a_run_that_lands_is_told_how(shop):
    shop.tasks(WORKING, max=2)
    child = shop.begin("run")
    shop.wait(lambda: shop.works("a"))
    done = shop.run("--land")
    assert done.code == 3 and done.err.endswith(
        "  fix: when the tasks are done: subagent-fleet task land\n"), done
    done = shop.run("c:x", "--coder", "[sh, -c, 'echo c > c.txt']", "--check", "true", "--land", "--max", "3")
    assert "It does not land them. When they are done: subagent-fleet task land c\n" in done.err, done
    assert done.out.endswith("Look at what is done: subagent-fleet task diff c\n"
                             "Merge it, checked as a whole: subagent-fleet task land c\n"), done
    said = interrupt(shop, child).out
    assert "Continue: subagent-fleet run --max 3\n" in said, said


def test_a_hint_is_never_broken_where_it_is_typed():
    lines = ["Nothing checks them or starts the next task.", "Continue: subagent-fleet run a b --land --max 2",
             "End them: subagent-fleet task stop '*'", "Merge: git merge run/a"]
    assert sf.format_hints(lines, sf.Look(columns=40)).splitlines() == [
        "Nothing checks them or starts the next", "task.", "Continue:",
        "  subagent-fleet run a b --land --max 2", *lines[2:]]
    assert sf.format_hints(lines, sf.PLAIN).splitlines() == lines


def test_strangers_words_are_not_shown_as_what_was_asked(shop):
    shop.type("task", "add", "a:x")
    note = shop.repo / ".git/subagent-fleet/run/asked.json"
    note.write_text('{"schema": "subagent-fleet/asked/1", "land": true, "config": "/evil", "most": "x"}')
    assert shop.type("tasks").err == "Nothing is running. Start: subagent-fleet run --land --config /evil\n"
    (shop.home / "state/subagent-fleet/repositories.json").unlink()
    assert shop.type("tasks").err == "Nothing is running. Start: subagent-fleet run\n"


# -- tasks.yaml as people first write it --

@pytest.mark.parametrize("text, what, where, fix", [
    ("tasks:\n  1: {prompt: x}\n", "tasks: `1` is not text without quotes, and a name is text", "2:3",
     'write `"1":`'),
    ("tasks:\n  true: {prompt: x}\n", "tasks: `true` is not text without quotes, and a name is text",
     "2:3", 'write `"true":`'),
    ("tasks:\n  1: {prompt: x}\n  true: {prompt: x}\n",
     "the keys `1` and `true` are the same without quotes", "3:3", 'write `"true":`'),
    ("tasks:\n  a:\n  prompt: x\n  check: 'true'\n  b: {prompt: y}\n",
     "tasks.a is empty: `prompt:` and `check:` are beside it, not inside it", "3:3",
     "put more spaces before `prompt:` and `check:` than before `a:`"),
    ("tasks:\na:\n  prompt: x\nmax: 2\n", "tasks is empty: `a:` is beside it, not inside it", "2:1",
     "put more spaces before `a:` than before `tasks:`"),
    ("tasks:\n  a:\n    prompt: |\n    do this\n", "the text below `|` or `>` is not indented", "4:5",
     "put more spaces before it than before the key above"),
    ("max_parallel: 3\ntasks:\n  a: {prompt: x}\n", "unknown key `max_parallel` in the file", "1:1",
     "did you mean `max`?")])
def test_a_task_file_gets_one_message_with_its_line(run_cli, tmp_path, text, what, where, fix):
    (tmp_path / "tasks.yaml").write_text(text)
    done = run_cli("validate")
    assert done.returncode == 1
    assert done.stderr.count("    fix: ") == 1 and f"\n    fix: {fix}\n" in done.stderr, done.stderr
    assert f"\n  {what}\n    at tasks.yaml:{where}\n" in done.stderr, done.stderr


def test_a_machine_under_two_names_is_warned_of(run_cli, tmp_path):
    (tmp_path / "fleet.yaml").write_text(
        "project: {name: x}\nnodes:\n  a: {endpoint: 'http://127.0.0.1:9'}\n"
        "  b: {endpoint: 'http://localhost:9'}\nmodels:\n"
        "  m: {node: a, model: 'qwen3:8b', alias: m-local, context: 65536, fallback: [n]}\n"
        "  n: {node: b, model: 'qwen3:8b', alias: n-local, context: 65536}\n"
        "agents:\n  c: {model: m, description: Does., tools: [Read]}\n")
    done = run_cli("validate")
    assert done.returncode == 0
    assert ("fleet.yaml:4:17: nodes.b.endpoint: http://localhost:9 is also `a`: its memory and slots "
            "count twice\n") in done.stderr, done.stderr


def test_what_was_said_to_a_task_that_is_over_can_be_taken_back(shop):
    shop.work("t", coder=shell("echo y > y.txt"), check="true")
    assert "starts again" in shop.type("task", "say", "t", "and more").err
    done = shop.type("task", "stop", "t")
    assert done.err == "t was to start again with what you said; now it does not.\n", done
    assert shop.run().out.startswith("Nothing to do: 1 done.\n") and shop.state() == "done"
    assert shop.type("task", "stop", "t").err == ""
