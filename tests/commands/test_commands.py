"""What each command does, most of them as black boxes."""
import argparse
import json
import os
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import time

import pytest

import subagent_fleet as sf
from json_examples import PAGE, keys_of
from tools import PROC, PROGRAM, clean_environment, free_port, keys_near, on_terminal
from workspace_cases import (
    ENV,
    FILES,
    FLEET,
    MANIFEST,
    OTHER,
    PLANNER,
    PORT,
    edit,
    marks,
    rewrite,
    rows,
    tree,
)

# -- init --

def test_init_offline_writes_a_fleet_that_validates(run_cli, tmp_path):
    done = run_cli("init", "--offline")
    assert done.returncode == 0
    assert done.stdout.startswith("Created fleet.yaml\n")
    assert done.stdout.endswith("Fill in your machines' addresses, then run:\n"
                                "  subagent-fleet discover\n  subagent-fleet generate\n")
    assert "\nNo machine was asked: the models in it are placeholders.\n" in done.stdout
    done = run_cli("validate", "--strict")
    assert (done.returncode, done.stderr) == (0, "")


def test_init_never_overwrites_without_force(run_cli, tmp_path):
    (tmp_path / "fleet.yaml").write_text("mine", encoding="utf-8")
    done = run_cli("init", "--offline")
    assert done.returncode == 3 and "--force" in done.stderr
    assert (tmp_path / "fleet.yaml").read_text(encoding="utf-8") == "mine"
    done = run_cli("init", "--offline", "--force")
    kept, = (tmp_path / ".subagent-fleet/backup").iterdir()
    assert done.returncode == 0 and kept.read_text(encoding="utf-8") == "mine"
    assert f"The old one is kept: {kept.relative_to(tmp_path)}\n" in done.stdout
    assert kept.stat().st_mode & 0o777 == 0o600
    done = run_cli("init", "--offline", "--output", "./fleet.yaml")
    assert "`subagent-fleet init --output ./fleet.yaml --offline --force` (a copy is kept)" in done.stderr


@pytest.mark.parametrize("words", [(), ("--force",)])
@pytest.mark.parametrize("kind, fix", [
    ("pipe", "move it away: `ls -ld 'a b.yaml'`"), ("directory", "move it away: `ls -ld 'a b.yaml'`"),
    ("link", "name its target: `ls -ld 'a b.yaml'`"), ("dangling", "name its target: `ls -ld 'a b.yaml'`")])
def test_init_replaces_nothing_but_a_regular_file(run_cli, tmp_path, kind, fix, words):
    place = tmp_path / "a b.yaml"
    (tmp_path / "real.yaml").write_text("mine", encoding="utf-8")
    {"pipe": lambda: os.mkfifo(str(place)), "directory": place.mkdir,
     "link": lambda: place.symlink_to("real.yaml"),
     "dangling": lambda: place.symlink_to("nowhere")}[kind]()
    before = os.lstat(str(place))[:7]  # all but the times
    done = run_cli("init", "--offline", "--output", place.name, *words)
    assert done.returncode == 3 and done.stdout == "" and done.stderr.endswith(f"  fix: {fix}\n")
    assert done.stderr.startswith("error: a b.yaml is a ") and os.lstat(str(place))[:7] == before
    assert sorted(os.listdir(str(tmp_path))) == ["a b.yaml", "real.yaml"]
    assert (tmp_path / "real.yaml").read_text(encoding="utf-8") == "mine"


def test_init_tells_what_it_found_and_what_that_lacks(tmp_path, monkeypatch, capsys, fake_node):
    nothing = fake_node({"nomic-embed-text": {"size": 300}, "qwen3:8b": {}, "qwen3:14b": {"size": 9**12},
                         "paraphrase-multilingual": {"size": 200, "family": "bert"}})
    nothing.answers["/api/show"] = 500, {"error": "broken"}
    short = fake_node({"tiny:1b": {"context": 2048}})
    embeds = fake_node({"bge-m3": {"capabilities": ["embedding"]}})
    monkeypatch.setattr(sf.World, "total_gigabytes", lambda self: 32.0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sf, "OLLAMA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    for node, lines in (
            (nothing, ["planner       qwen3:14b  n        the fastest with 7 B parameters or more",
                       "summarizer    qwen3:14b  n        the fastest",
                       "n: without `memory_gb:` a machine gets only one model. Add it, then run "
                       "`subagent-fleet recommend`."]),
            (short, ["summarizer    tiny:1b  n        the fastest",
                     "tiny:1b holds 2048 tokens; Claude Code's own prompt takes 10,000 to 18,000: "
                     "`ollama pull qwen3:8b`, then `subagent-fleet init --output o/f.yaml --node n={url} --force`"]),
            (embeds, ["No model that can be used was found: the models in it are placeholders.",
                      "For local, which has about 24 GB for models: `ollama pull qwen3-coder:30b`.",
                      "bge-m3:latest cannot chat: `ollama pull qwen3:8b`, then "
                      "`subagent-fleet init --output o/f.yaml --node n={url} --force`"])):
        (tmp_path / "o/f.yaml").unlink(missing_ok=True)
        assert sf.main(["init", "--output", "o/f.yaml", "--force", "--node", f"n={node.endpoint}"]) == 0
        said = capsys.readouterr().out.splitlines()
        if node is embeds:
            last = ["local did not answer: start Ollama.", "When a model is there, run:",
                    "  subagent-fleet init --output o/f.yaml --node n={url} --force"]
        else:
            last = ["local: not reached; `subagent-fleet discover` shows how to fix that.", "",
                    "Check the file, then start everything, or only write the files:",
                    "  subagent-fleet up",
                    "  subagent-fleet generate"]
        wanted = [line.replace("{url}", node.endpoint) for line in lines + last]
        assert said[-len(wanted):] == wanted
        assert sf.main(["validate", "--config", "o/f.yaml"]) == 0
        assert ("# Placeholders:" in (tmp_path / "o/f.yaml").read_text()) == (node is embeds)
        capsys.readouterr()


def test_init_force_replaces_no_fleet_that_works_by_one_that_does_not(tmp_path, run_cli, fake_node):
    here = fake_node({"qwen3:8b": {}})
    env = {"OLLAMA_HOST": f"127.0.0.1:{here.port}"}
    assert run_cli("init", env=env).returncode == 0
    path = tmp_path / "fleet.yaml"
    before = path.read_bytes()
    typo = f"mini=http://127.0.0.1:{free_port()}"
    done = run_cli("init", "--force", "--node", typo, env=env)
    assert done.returncode == 1 and path.read_bytes() == before
    assert "error: node `mini`: refused: nothing listens there" in done.stderr
    assert "nothing was written" in done.stderr and "fix: " in done.stderr
    empty = fake_node({})
    done = run_cli("init", "--force", env={"OLLAMA_HOST": f"127.0.0.1:{empty.port}"})
    assert done.returncode == 1 and path.read_bytes() == before
    assert "nothing was written: fleet.yaml stays\n" in done.stderr

    assert run_cli("init", "--force", "--offline", "--node", typo, env=env).returncode == 0  # as typed
    assert b"Placeholders" in path.read_bytes()
    assert run_cli("init", "--force", "--node", typo, env=env).returncode == 0  # nothing is lost
    path.write_text("broken: [", encoding="utf-8")
    assert run_cli("init", "--force", "--node", typo, env=env).returncode == 0


def test_init_of_a_file_that_is_there_names_force(run_cli, tmp_path, fake_node):
    (tmp_path / "fleet.yaml").write_text("mine", encoding="utf-8")
    done = run_cli("init", "--node", "mini=mini.local", "--node", "b=http://h:1")
    assert done.stderr.endswith("  fix: edit it, or `subagent-fleet init --node mini=mini.local "
                                "--node b=http://h:1 --force` (a copy is kept)\n")


def test_init_takes_a_free_port_and_says_whose_the_usual_is(tmp_path, monkeypatch, capsys, fake_node):
    port = free_port()
    monkeypatch.chdir(tmp_path)
    node = fake_node({"qwen3:8b": {}})
    monkeypatch.setattr(sf, "OLLAMA_ENDPOINT", node.endpoint)
    monkeypatch.setattr(sf.Gateway, "port", port)
    monkeypatch.setitem(sf.Gateway._usual, "port", port)
    monkeypatch.setattr(sf.Gateway, "__init__", sf.Record.__init__)  # made anew, with that port
    assert sf.main(["init"]) == 0 and "in use" not in capsys.readouterr().out
    with socket.create_server(("127.0.0.1", port)):
        assert sf.main(["init", "--force"]) == 0
        said = capsys.readouterr().out
        assert sf.main(["init", "--force", "--offline"]) == 0  # which asks nobody
        assert "in use" not in capsys.readouterr().out
    free, = re.findall(f"Port {port} is in use by .*: this fleet uses ([0-9]+)[.]", said)
    backups = [path.read_text() for path in (tmp_path / ".subagent-fleet" / "backup").iterdir()]
    assert any(f"    port: {free}\n" in text for text in backups) and int(free) > port


def test_init_names_the_project_after_its_directory(run_cli, tmp_path):
    (tmp_path / "my 'shop'").mkdir()
    run_cli("init", "--offline", cwd=tmp_path / "my 'shop'")
    assert sf.load_fleet(tmp_path / "my 'shop'" / "fleet.yaml").name == "my 'shop'"
    run_cli("init", "--offline", "--output", "42/fleet.yaml")
    assert sf.load_fleet(tmp_path / "42/fleet.yaml").name == "42"
    (tmp_path / "a\x1bb").mkdir()  # no name for a fleet
    run_cli("init", "--offline", cwd=tmp_path / "a\x1bb")
    assert sf.load_fleet(tmp_path / "a\x1bb" / "fleet.yaml").name == "local-dev"


@pytest.mark.parametrize("there, output, hides", [
    ("fleet.yaml", "sub/fleet.yaml", True), ("fleet.yml", "fleet.yaml", True),
    ("fleet.yaml", "fleet.json", True), ("fleet.yaml", "other.yaml", False),
    ("sub/fleet.yaml", "fleet.yaml", False)])
def test_init_of_a_second_fleet_is_asked_for(run_cli, tmp_path, there, output, hides):
    (tmp_path / "sub").mkdir()
    (tmp_path / there).write_text(FLEET, encoding="utf-8")
    done = run_cli("init", "--offline", "--output", output)
    assert done.returncode == (3 if hides else 0)
    if hides:  # slug "second-fleet"
        assert done.stderr == (
            f"error: {tmp_path / there} is already the fleet of this directory\n  fix: edit that "
            f"one, or `subagent-fleet init --output {output} --offline --force` for a second one here\n")
        assert not (tmp_path / output).exists()
        assert run_cli("init", "--offline", "--output", output, "--force").returncode == 0
    assert (tmp_path / there).read_text(encoding="utf-8") == FLEET


def test_init_below_a_fleet_asks_a_person(tmp_path):
    (tmp_path / "fleet.yaml").write_text(FLEET, encoding="utf-8")
    (tmp_path / "sub").mkdir()
    status, shown = on_terminal(["init", "--offline"], tmp_path / "sub", b"n\n")
    assert status == 3 and f"{tmp_path}/fleet.yaml is already the fleet of this directory. Write " \
        "fleet.yaml, too? [y/N]" in shown
    assert os.listdir(tmp_path / "sub") == []
    assert on_terminal(["init", "--offline"], tmp_path / "sub", b"y\n")[0] == 0
    assert os.listdir(tmp_path / "sub") == ["fleet.yaml"]


@pytest.mark.slow
def test_what_goes_beyond_is_asked_of_a_person(generated):
    rewrite(generated, FLEET.replace("http://192.168.1.50:11434", "https://gpu.example:443"))
    status, shown = on_terminal(["env"], generated, b"n\n", HOME=generated)
    assert status == 3 and "With fleet.yaml:" in shown and "Do you want that? [y/N]" in shown
    assert "new prompts and the files agents read go to https://gpu.example:443 (node big) " \
        in " ".join(shown.split())
    assert on_terminal(["env"], generated, b"y\n", HOME=generated)[0] == 0
    status, shown = on_terminal(["env"], generated, HOME=generated)
    assert status == 0 and "Do you" not in shown


@pytest.mark.parametrize("text, endpoint", [
    ("", "http://localhost:11434"), ("0.0.0.0", "http://localhost:11434"),
    ("0.0.0.0:12000", "http://localhost:12000"), (":12000", "http://localhost:12000"),
    ("192.168.1.7", "http://192.168.1.7:11434"), ("http://mini:12000", "http://mini:12000"),
    ("https://mini", "https://mini:443"), ("http://mini", "http://mini:80"),
    ("'[::]:12000'", "http://localhost:12000"), ("[fd00::1]:1", "http://[fd00::1]:1"),
    ("ftp://x", "http://localhost:11434"), ("a b", "http://localhost:11434")])
def test_own_endpoint_is_what_ollama_host_says(text, endpoint):
    world = sf.World()
    world.environ = {"OLLAMA_HOST": text}
    assert sf.own_endpoint(world) == endpoint


def test_init_asks_where_ollama_host_says(run_cli, tmp_path, fake_node):
    node = fake_node({"qwen3:8b": {}})
    done = run_cli("init", env={"OLLAMA_HOST": f"0.0.0.0:{node.port}"})
    assert done.returncode == 0 and f"  local (http://localhost:{node.port}): 1 model\n" in done.stdout


@pytest.mark.parametrize("given, names", [
    ("localhost", ["mini"]), ("127.0.0.1", ["mini"]), ("HERE.local", ["mini"]), ("here", ["mini"]),
    ("10.1.2.3", ["mini"]), ("10.1.2.4", ["local", "mini"]), ("here:1", ["local", "mini"])])
def test_init_knows_this_machine_by_another_name(monkeypatch, tmp_path, capsys, given, names):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OLLAMA_HOST", raising=False)
    monkeypatch.setattr(sf.World, "own_names", lambda world: ("Here", ("10.1.2.3",)))
    monkeypatch.setattr(sf.World, "is_own_address", lambda world, host: host == "10.1.2.3")
    assert sf.main(["init", "--offline", "--node", f"mini={given}"]) == 0
    assert list(sf.load_fleet("fleet.yaml").nodes) == names


def test_init_refuses_a_machine_that_is_named_twice(run_cli):
    done = run_cli("init", "--offline", "--node", "a=mini", "--node", "b=http://mini:11434")
    assert done.returncode == 2 and "error: init: `b=http://mini:11434`: the machine of `a`\n" \
        in done.stderr


def test_init_makes_parents_and_json(run_cli, tmp_path):
    done = run_cli("init", "--offline", "--output", "a/b/fleet.json", "--node", "mini=10.0.0.5")
    assert done.returncode == 0
    found = json.loads((tmp_path / "a/b/fleet.json").read_text(encoding="utf-8"))
    assert found["nodes"]["mini"]["endpoint"] == "http://10.0.0.5:11434"
    assert "  subagent-fleet generate\n" in done.stdout
    assert run_cli("validate", "--config", "a/b/fleet.json").returncode == 0


def test_init_names_the_schema_only_where_it_is(run_cli, tmp_path):
    run_cli("init", "--offline")
    assert "yaml-language-server" not in (tmp_path / "fleet.yaml").read_text(encoding="utf-8")
    (tmp_path / "fleet.schema.json").write_text(run_cli("schema").stdout, encoding="utf-8")
    run_cli("init", "--offline", "--force")
    text = (tmp_path / "fleet.yaml").read_text(encoding="utf-8")
    assert text.startswith("# yaml-language-server: $schema=fleet.schema.json\n")
    assert run_cli("validate").returncode == 0


@pytest.mark.parametrize("node", ["mini", "=http://x", "a b=http://x", "a=ftp://x", "a=http://",
                                  "a=http://x:0", "a=http://u@x", "a=", "127.0.0.1:11435", "10.0.0.5"])
def test_init_refuses_a_wrong_node(run_cli, tmp_path, node):
    done = run_cli("init", "--offline", "--node", node)
    fix = done.stderr.partition("  fix: subagent-fleet ")[2].split()
    assert done.returncode == 2 and fix[:2] == ["init", "--node"]
    typed = run_cli(*fix)  # and can be typed
    assert typed.returncode == 0, typed.stderr
    (tmp_path / "fleet.yaml").unlink()
    assert ("NAME=URL" in done.stderr) == (node[:2] != "a=" or node == "a=")
    done = run_cli("init", "--offline", "--node", "a=x", "--node", "a=y")
    assert done.returncode == 2 and done.stderr.startswith("error: init: `a=y`: a second `a`\n")
    assert os.listdir(str(tmp_path)) == []


@pytest.mark.parametrize("place", ["file/fleet.yaml", "dir", f"{PROC}/fleet.yaml"])
def test_init_says_where_it_cannot_write(run_cli, tmp_path, place):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    (tmp_path / "dir").mkdir()
    done = run_cli("init", "--offline", "--output", place)
    assert done.returncode in (1, 3) and place.split("/")[-2 if "file" in place else -1] in done.stderr
    assert stat.S_ISREG(os.stat(str(tmp_path / "file")).st_mode)
    assert not [name for name in os.listdir(str(tmp_path)) if name.startswith(".")]


# -- what is written --

def test_generate_lists_every_file_in_order(fleet, run_cli):
    done = run_cli("generate")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("Generated:\n  litellm_config.yaml ")
    assert rows(done.stdout) == [(path, "created") for path in FILES]
    assert set(tree(fleet)) == {*FILES, MANIFEST, "fleet.yaml"}


def test_generate_says_what_to_type_next(fleet, quick):
    done = quick("generate")
    assert "  planner -> small -> qwen3:8b -> claude-haiku-local\n" in done.stdout
    assert f"  litellm --config ./litellm_config.yaml --host 127.0.0.1 --port {PORT}\n" in done.stdout
    assert "  subagent-fleet launch claude\n" in done.stdout and "\n  subagent-fleet up\n" in done.stdout
    assert "is ready" not in done.stdout and "subagent-fleet serve" not in done.stdout
    rewrite(fleet, FLEET.replace("litellm}", "builtin}"))
    done = quick("generate", "--out", "some where", "--config", "fleet.yaml")
    assert "  subagent-fleet serve\n" in done.stdout
    assert (fleet / "some where" / ENV).exists()


def test_second_run_touches_nothing(generated, run_cli):
    before = marks(generated)
    done = run_cli("generate")
    assert rows(done.stdout) == [(path, "unchanged") for path in FILES]
    assert marks(generated) == before


def test_a_change_updates_what_differs_and_removes_who_left(generated, quick):
    rewrite(generated, OTHER)
    done = quick("generate")
    assert dict(rows(done.stdout)) == {
        "litellm_config.yaml": "updated", PLANNER: "updated", ".claude/agents/reviewer.md":
        "created", FILES[2]: "removed", ENV: "updated"}
    assert set(tree(generated)) == {*FILES, MANIFEST, "fleet.yaml",
                                    ".claude/agents/reviewer.md"} - {FILES[2]}
    assert dict(rows(quick("generate").stdout))[PLANNER] == "unchanged"


def test_generate_works_on_the_fleet_of_the_directory_above(generated, quick):
    below = generated / "src" / "deep"
    below.mkdir(parents=True)
    rewrite(generated, OTHER)
    assert quick("generate", cwd=below).returncode == 0
    assert list(below.iterdir()) == [] and b"Thinks." in (generated / PLANNER).read_bytes()
    assert quick("generate", "--check", cwd=below).returncode == 0


@pytest.mark.parametrize("words, written", [
    (["--target", "claude"], FILES[1:3]), (["--claude-only"], FILES[1:3]),
    (["--target", "claude,litellm"], FILES[:3]),
    (["--target", "litellm,env"], [FILES[0], ENV]), (["--litellm-only"], FILES[:1]),
    (["--target", "env", "--target", "claude"], FILES[1:])])
def test_targets_are_chosen(fleet, quick, words, written):
    done = quick("generate", *words)
    assert done.returncode == 0 and [path for path, _ in rows(done.stdout)] == written
    assert set(tree(fleet)) == {*written, MANIFEST, "fleet.yaml"}


def test_a_target_leaves_the_other_files_and_what_is_known_of_them(generated, quick):
    rewrite(generated, OTHER)
    quick("generate", "--target", "litellm")
    assert b"Plans." in (generated / PLANNER).read_bytes() and (generated / FILES[2]).exists()
    assert dict(rows(quick("generate").stdout))[FILES[2]] == "removed"


@pytest.mark.parametrize("words, message", [
    (["--target", "claude,litelm"], "did you mean `litellm`?"),
    (["--target", "x"], "known targets: litellm, claude, env")])
def test_targets_that_cannot_be_exit_2(fleet, quick, words, message):
    done = quick("generate", *words)
    assert done.returncode == 2 and done.stdout == "" and message in done.stderr
    assert set(tree(fleet)) == {"fleet.yaml"}


def test_check_writes_nothing_and_tells_by_its_exit_code(fleet, quick):
    before = marks(fleet)
    done = quick("generate", "--check")
    assert done.returncode == 1 and rows(done.stdout) == [(path, "created") for path in FILES]
    assert marks(fleet) == before
    quick("generate")
    assert quick("generate", "--check").returncode == 0
    edit(fleet / PLANNER)
    done = quick("generate", "--check")
    assert done.returncode == 1 and (PLANNER, "edited") in rows(done.stdout)


def test_diff_writes_nothing_and_shows_it(generated, quick):
    rewrite(generated, OTHER)
    before = marks(generated)
    done = quick("generate", "--diff")
    assert done.returncode == 0 and "\n-description: Plans.\n+description: Thinks.\n" in done.stdout
    assert "--- .claude/agents/reviewer.md\tcreated\n" in done.stdout
    assert quick("generate", "--diff", "--check").returncode == 1
    assert json.loads(quick("generate", "--diff", "--json").stdout)["diff"] == done.stdout
    assert marks(generated) == before


def test_json_is_one_object(fleet, quick):
    done = quick("generate", "--json")
    value = json.loads(done.stdout)
    assert value["schema"] == "subagent-fleet/generate/2" and value["written"] is True
    assert [(f["path"], f["action"]) for f in value["files"]] == [(p, "created") for p in FILES]
    assert value["findings"] == [] and value["out"] == "."
    assert value["routes"][0] == {"agent": "planner", "route": "light", "node": "small",
                                  "model": "qwen3:8b", "alias": "claude-haiku-local"}
    edit(fleet / PLANNER)
    done = quick("generate", "--json")
    assert done.returncode == 3 and json.loads(done.stdout)["written"] is False
    assert json.loads(quick("generate", "--json", "--check").stdout)["written"] is False


# -- clean --

def test_clean_removes_exactly_what_was_written(generated, run_cli):
    mine = generated / ".claude/agents/mine.md"
    mine.write_text("mine", encoding="utf-8")
    (generated / "fleet.yaml").unlink()
    done = run_cli("clean", "--dry-run")
    assert done.returncode == 0 and done.stdout.startswith("Would remove:\n")
    assert sorted(done.stdout.split()[2:]) == sorted(FILES)
    assert set(tree(generated)) == {*FILES, MANIFEST, ".claude/agents/mine.md"}
    assert run_cli("clean", "--force").returncode == 0
    assert set(tree(generated)) == {".claude/agents/mine.md"}
    assert sorted(path.name for path in generated.iterdir()) == [".claude"]
    assert run_cli("clean").stdout == "Nothing to remove.\n"


def test_clean_keeps_what_was_edited(generated, quick):
    edit(generated / PLANNER)
    status, shown = on_terminal(["clean"], generated, b"y\n")
    assert status == 3 and "Remove 3 files?" in shown and PLANNER in shown.partition("error:")[2]
    assert set(tree(generated)) == {"fleet.yaml", MANIFEST, PLANNER}
    done = quick("clean", "--force")
    assert (done.returncode, done.stdout) == (0, f"Removed:\n  {PLANNER}\n")
    copy, = [path for path in tree(generated) if "backup" in path]
    assert b"my own line" in tree(generated)[copy]
    assert set(tree(generated)) == {"fleet.yaml", copy}


def test_clean_follows_no_hostile_manifest(generated, tmp_path, quick):
    victim = tmp_path.parent / (tmp_path.name + "-victim")
    victim.write_text("theirs", encoding="utf-8")
    value = {"schema": "subagent-fleet/manifest/1", "writing": {}, "files": {
        str(victim): sf.digest(b"theirs"), "../" + victim.name: sf.digest(b"theirs"),
        "fleet.yaml": sf.digest(FLEET.encode())}}
    (generated / MANIFEST).write_text(json.dumps(value), encoding="utf-8")
    assert quick("clean", "--force").stdout == "Nothing to remove.\n"
    assert victim.exists() and (generated / "fleet.yaml").exists()


def test_clean_asks_a_person(generated):
    before = tree(generated)
    for answer in (b"n\n", b"\n", b"\x04"):
        status, shown = on_terminal(["clean"], generated, answer)
        assert "Remove 4 files? [y/N]" in shown and tree(generated) == before
        assert (status, "nothing was removed" in shown) == (3, True), shown
        assert "To remove:" in shown and shown.index(PLANNER) < shown.index("[y/N]")
        assert "clean --yes" not in shown, "who said no does not want to know how"
    status, shown = on_terminal(["clean"], generated, b"y\n")
    assert status == 0 and PLANNER in shown.partition("Removed")[2]
    assert set(tree(generated)) == {"fleet.yaml"}


def test_clean_yes_asks_nobody_and_keeps_what_was_edited(generated, run_cli):
    edit(generated / PLANNER)
    done = run_cli("clean", "--yes")
    assert done.returncode == 3 and PLANNER in done.stderr and PLANNER not in done.stdout
    assert set(tree(generated)) == {"fleet.yaml", MANIFEST, PLANNER}


def test_git_leaves_out_what_is_nobodys_to_commit(fleet, run_cli):
    (fleet / "subagent_fleet.py").write_text("")
    (fleet / "sub").mkdir()
    subprocess.run(["git", "init", "-q"], cwd=str(fleet), check=True)
    for words in (["generate"], ["generate", "--out", "sub"]):
        assert run_cli(*words).returncode == 0
    said = subprocess.run(["git", "status", "--porcelain"], cwd=str(fleet), check=True,
                          stdout=subprocess.PIPE).stdout.decode()
    assert said.split() == ["??", ".claude/", "??", "fleet.yaml", "??", "litellm_config.yaml", "??", "sub/"]
    lines = (fleet / ".git/info/exclude").read_text().splitlines()
    assert lines.count(".env.subagent-fleet") == 1 and "subagent_fleet.py" in lines


# -- env --

def test_env_is_the_file(generated, run_cli):
    assert run_cli("env").stdout.encode() == (generated / ENV).read_bytes()


def test_env_with_a_key_of_the_environment_only_puts_it_in_no_script(fleet, quick):
    done = quick("env", env={"LITELLM_MASTER_KEY": 'sk-";touch${IFS}owned;"0123456789'})
    assert done.returncode == 0 and "owned" not in done.stdout
    assert 'export LITELLM_MASTER_KEY="${LITELLM_MASTER_KEY:-}"\n' in done.stdout


@pytest.mark.slow
def test_env_shows_no_key_on_a_terminal_unless_asked(generated):
    key, = keys_near(generated)
    status, shown = on_terminal(["env"], generated)
    assert status == 0 and key not in shown and "LITELLM_MASTER_KEY" in shown
    status, shown = on_terminal(["env", "--show-key"], generated)
    assert status == 0 and key in shown
    status, shown = on_terminal(["env"], generated,
                                LITELLM_MASTER_KEY="sk-from-outside-0123456789")
    assert status == 0 and "from-outside" not in shown


@pytest.mark.parametrize("words", [["env"], ["launch", "claude"]])
def test_without_a_key_it_says_what_to_type(fleet, quick, words, fake_claude):
    done = quick(*words, env=fake_claude(""))
    assert done.returncode == 1 and done.stdout == "" and "fix: subagent-fleet generate\n" in \
        done.stderr
    done = quick(*words, "--out", "non ex", "--config", "fleet.yaml", env=fake_claude(""))
    assert "and non ex/.env.subagent-fleet does not exist\n" in done.stderr


# -- launch --

@pytest.fixture
def gateway(fake_node):
    """What answers at the fleet's port as its gateway does."""
    node = fake_node(port=PORT)
    models = {"data": [{"id": "claude-sonnet-local"}, {"id": "claude-haiku-local"}]}
    node.answers.update({"/health/liveliness": (200, "I'm alive!"), "/v1/models": (200, models)})
    return node


@pytest.fixture
def fake_claude(tmp_path, gateway):
    """Put a `claude` on the PATH that runs some shell lines; gives the environment."""
    def make(lines):
        place = tmp_path / "programs"
        place.mkdir(exist_ok=True)
        (place / "claude").write_text("#!/bin/sh\n" + lines, encoding="utf-8")
        (place / "claude").chmod(0o755)
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        return {"PATH": f"{place}:/usr/bin:/bin", "HOME": str(home)}
    return make


def test_clean_says_who_serves_with_the_key_that_goes(generated, quick, gateway):
    told = (f"The gateway at http://127.0.0.1:{PORT} still uses the key that this removes. Stop it, and start "
            "it again after `subagent-fleet generate`.\n")
    assert quick("clean", "--dry-run").stderr == told
    gateway.close()
    assert quick("clean", "--force").stderr == ""


def test_launch_gives_the_environment_and_returns_the_exit_code(generated, run_cli, fake_claude):
    environ = fake_claude('env -0 > seen.env; printf "%s\\0" "$@" > seen.args\n'
                          'cp "$2" seen.settings; ls -ln "$2" > seen.mode; exit 7\n')
    environ.update(ANTHROPIC_API_KEY="old", CLAUDE_CODE_SUBAGENT_MODEL="old", KEPT="yes")
    done = run_cli("launch", "claude", "--", "-p", "a b", "--", "$(id)", env=environ)
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
    seen = dict(line.split("=", 1) for line in (generated / "seen.env").read_text().split("\0")
                if line)
    key, = keys_near(generated)
    wanted = sf.merge_environment({}, sf.load_fleet(generated / "fleet.yaml"), key)
    assert {name: seen[name] for name in wanted} == wanted and seen["KEPT"] == "yes"
    assert "ANTHROPIC_API_KEY" not in seen and "CLAUDE_CODE_SUBAGENT_MODEL" not in seen
    words = (generated / "seen.args").read_text().split("\0")[:-1]
    assert words[0] == "--settings" and words[2:] == ["-p", "a b", "--", "$(id)"]
    assert not any(key in word for word in words) and not os.path.exists(words[1])
    assert (generated / "seen.mode").read_text().startswith("-rw------- ")
    settings = json.loads((generated / "seen.settings").read_text())
    assert settings["permissions"] == {"disableAutoMode": "disable", "deny": sf.SPARE_TOOLS}
    assert settings["env"] == {**{name: value for name, value in wanted.items()
                                  if name != "LITELLM_MASTER_KEY"},
                               **dict.fromkeys(settings["env"].keys() - wanted.keys(), "")}
    assert settings["env"]["ANTHROPIC_AUTH_TOKEN"] == key
    assert settings["env"]["CLAUDE_CODE_USE_BEDROCK"] == settings["env"]["ANTHROPIC_API_KEY"] == ""


@pytest.mark.parametrize("words, status", [
    (["--settings", "x.json"], 3), (["-c", "--settings={}"], 3), (["-p", "--", "--settings"], 0)])
def test_launch_refuses_settings_in_place_of_the_fleets(generated, quick, fake_claude, words, status):
    done = quick("launch", "claude", "--", *words, env=fake_claude("touch ran\n"))
    assert done.returncode == status and (generated / "ran").exists() == (status == 0)
    if status:  # slug "own-settings"
        assert "fix: put yours into .claude/settings.local.json" in done.stderr


@pytest.mark.parametrize("name, words, status", [
    ("ANTHROPIC_BASE_URL", [], 3), ("ANTHROPIC_BASE_URL", ["--trust"], 3),
    ("CLAUDE_CODE_USE_BEDROCK", [], 3), ("CLAUDE_CODE_USE_BEDROCK", ["--trust"], 0),
    ("ANTHROPIC_AUTH_TOKEN", [], 3), ("ANTHROPIC_MODEL", [], 0)])
def test_launch_refuses_managed_settings_that_beat_the_fleet(
        generated, quick, fake_claude, monkeypatch, name, words, status):
    managed = generated / "managed.json"
    managed.write_text(json.dumps({"env": {"A": "b", name: "other"}}, indent=1))
    monkeypatch.setattr(sf, "managed_settings", lambda world: [str(managed)])
    done = quick("launch", "claude", *words, env=fake_claude("touch ran\n"))
    assert done.returncode == status and (generated / "ran").exists() == (status == 0)
    if status:  # slug "settings-managed"
        assert f"error: {managed}:4: {name} under `env` of managed settings beats" in done.stderr
        assert ("or add --trust" in done.stderr) == (name != "ANTHROPIC_BASE_URL")
    else:
        assert f"warning: {managed} sets {name} under `env`" in done.stderr


def test_launch_asks_for_the_gateway_first(generated, quick, gateway, fake_claude):
    environ, url = fake_claude("touch ran\n"), f"http://127.0.0.1:{PORT}"
    del gateway.answers["/health/liveliness"]
    done = quick("launch", "claude", env=environ)
    assert done.returncode == 1 and re.fullmatch(
        f"error: port {PORT} is in use by something else \\(`lsof -i :{PORT}` shows what\\); LiteLLM would "
        "take another port\n  fix: write `port: [0-9]+` under project.gateway, or stop it\n", done.stderr)
    gateway.close()
    done = quick("launch", "claude", env=environ)
    assert done.returncode == 1 and done.stderr == (
        f"error: no gateway runs at {url}\n  fix: `subagent-fleet up` starts LiteLLM; "
        "`subagent-fleet generate` says how to start it in another terminal\n")
    assert not (generated / "ran").exists()


def test_launch_without_claude_says_how_to_install_it(generated, quick):
    done = quick("launch", "claude", env={"PATH": "/nowhere"})
    assert done.returncode == 1 and "Claude Code is not on the PATH" in done.stderr
    assert "fix: npm install -g @anthropic-ai/claude-code@latest" in done.stderr


def test_launch_of_what_cannot_run_is_an_error(generated, run_cli, fake_claude):
    environ = fake_claude("")
    (generated / "programs/claude").write_text("#!/nowhere/sh\n", encoding="utf-8")
    done = run_cli("launch", "claude", env=environ)
    assert done.returncode == 1 and "error: cannot run " in done.stderr  # slug "cannot-run"


def test_launch_names_stale_files_and_goes_on(generated, run_cli, fake_claude):
    rewrite(generated, OTHER)
    done = run_cli("launch", "claude", env=fake_claude("exit 0\n"))
    assert done.returncode == 0 and "fix: subagent-fleet generate" in done.stderr
    assert f"warning: litellm_config.yaml, {PLANNER}, {ENV}" in done.stderr
    assert ": out of date\n" in done.stderr
    assert "warning: .claude/agents/reviewer.md: not generated yet\n" in done.stderr


def test_launch_beats_the_settings_that_lie_there(generated, quick, fake_claude):
    environ = fake_claude('cp "$2" seen\n')
    (generated / ".claude/settings.local.json").write_text(json.dumps(
        {"env": {"ANTHROPIC_BASE_URL": "https://elsewhere.example", "EDITOR": "vi"}}),
        encoding="utf-8")
    (generated / "home/.claude").mkdir()
    (generated / "home/.claude/settings.json").write_text(json.dumps(
        {"env": {"CLAUDE_CODE_SUBAGENT_MODEL": "opus", "NO_DOCS": "True"}}), encoding="utf-8")
    done = quick("launch", "claude", env=environ)
    assert (done.returncode, done.stderr) == (0, "")
    environment = json.loads((generated / "seen").read_text())["env"]
    assert environment["ANTHROPIC_BASE_URL"] == f"http://127.0.0.1:{PORT}"
    assert environment["CLAUDE_CODE_SUBAGENT_MODEL"] == ""  # which unsets it


def test_launch_with_a_weak_key_beyond_this_machine_is_refused(generated, quick, fake_claude):
    rewrite(generated, FLEET.replace("litellm}", "litellm, host: 0.0.0.0}"))
    environ = dict(fake_claude("touch ran\n"), LITELLM_MASTER_KEY="sk-1234")
    done = quick("launch", "claude", env=environ)
    assert done.returncode == 3 and not (generated / "ran").exists()


def write_receipts(place, *receipts):
    """Write what a gateway files; a time is in seconds from now."""
    (place / ".subagent-fleet").mkdir(exist_ok=True)
    lines = [json.dumps({**receipt, "time": time.time() + receipt.get("time", 0)})
             if isinstance(receipt, dict) else receipt for receipt in receipts]
    (place / ".subagent-fleet/requests.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def keep_session(place, session, project=None):
    """Keep a session as Claude Code does that works in `project`; return where it looks."""
    name = re.sub("[^A-Za-z0-9]", "-", os.path.realpath(project or place))
    path = place / f"config/projects/{name}/{session}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}\n", encoding="utf-8")
    return {"CLAUDE_CONFIG_DIR": str(place / "config")}


def test_launch_ends_with_how_the_session_goes_on(generated, quick, fake_claude):
    resume = "To continue the latest session of this directory on your fleet:\n  subagent-fleet launch claude -- --resume 5b1c-a\n"
    environ = fake_claude("exit 0\n")
    write_receipts(generated, {**ONE, "session": "old", "time": -60})
    environ.update(keep_session(generated, "old"), **keep_session(generated, "5b1c-a"))
    keep_session(generated, "7a5c-task", generated / "worktrees/parser")
    assert "To continue" not in quick("launch", "claude", env=environ).stderr
    write_receipts(generated, {**ONE, "session": "5b1c-a", "time": 60}, {**ONE, "session": "7a5c-task", "time": 63},
                   {**ONE, "session": "ses_opencode", "time": 64},
                   {**ONE, "session": "", "time": 61}, {**ONE, "session": "$(id)", "time": 62}, '{"time": "x"}', "[]", '{"cut')
    assert resume in quick("launch", "claude", env=environ).stderr


def test_what_goes_to_stderr_looks_as_stderr_may(fleet, monkeypatch):
    world = sf.World()
    world.is_terminal = lambda stream="stdout": stream == "stdout"
    world.environ = clean_environment(TERM="xterm", FORCE_COLOR="")
    write_receipts(fleet, TWO)
    workspace = sf.Workspace(world, str(fleet))
    own = sf.load_fleet(str(fleet / "fleet.yaml"))
    assert "\x1b[" in sf.list_failures(workspace, own, 0.0, "stdout")
    assert "\x1b[" not in sf.list_failures(workspace, own, 0.0, "stderr")


# -- add --

COMMENTED = """\
# the whole fleet
project: {name: p, gateway: {port: PORT, provider: builtin}}
nodes:
    big:   # under the desk
        endpoint: ENDPOINT
        # tags: []
  # small: {endpoint: http://192.168.1.51:11434}

# what runs where
models:
  heavy:
    node: big
    ollama_model: qwen3:8b
    litellm_alias: claude-sonnet-local
    context: 32768
    timeout: 600

agents:
  planner: {model: heavy, description: Plans.}
"""


@pytest.fixture
def two(tmp_path, fake_node):
    """A commented fleet of one machine, and another machine."""
    (tmp_path / ".git").mkdir()
    node = fake_node({"qwen3:8b": {"size": 5}, "tiny:latest": {"size": 1}, "big:32b": {"size": 9},
                      "nomic-embed-text": {"capabilities": ["embedding"]}})
    text = COMMENTED.replace("ENDPOINT", "http://127.0.0.1:1").replace("PORT", str(PORT))
    (tmp_path / "fleet.yaml").write_text(text, encoding="utf-8")
    return node


def test_add_puts_a_machine_in_and_leaves_the_rest(two, quick, tmp_path):
    before = (tmp_path / "fleet.yaml").read_text()
    done = quick("add", f"mini=127.0.0.1:{two.port}", "--dry-run")
    assert done.returncode == 0 and (tmp_path / "fleet.yaml").read_text() == before
    shown = quick("add", f"mini=127.0.0.1:{two.port}/v1")  # as other programs want it
    assert shown.returncode == 0
    assert shown.stdout.startswith(done.stdout.replace("Would add mini to", "Added mini to"))
    assert shown.stdout.startswith("Added mini to fleet.yaml:\n\nnodes:\n  mini:\n")
    assert shown.stdout.endswith("\nNext: `subagent-fleet recommend --write` plans the fleet with it, "
                                 "then `subagent-fleet up`\n")
    after = (tmp_path / "fleet.yaml").read_text()
    assert after == before.replace("""        # tags: []
""", f"""        # tags: []
    mini:
      endpoint: http://127.0.0.1:{two.port}
""").replace("""    timeout: 600
""", """    timeout: 600
  qwen3-8b:
    node: mini
    model: qwen3:8b
    alias: claude-sonnet-local
    context: 32768
    timeout: 600
  big-32b:
    node: mini
    model: big:32b
    alias: big-32b
    context: 32768
""")
    assert shown.stderr == ""  # that nothing asks them yet is what `recommend` is about
    kept, = (tmp_path / ".subagent-fleet/backup").iterdir()
    assert kept.read_text() == before and f"The old one is kept: {kept.relative_to(tmp_path)}" \
        in shown.stdout


@pytest.mark.parametrize("name", ["fleet.yaml", "fleet.json"])
def test_add_takes_the_models_that_are_named(two, quick, tmp_path, name):
    text = (tmp_path / "fleet.yaml").read_text()
    (tmp_path / "fleet.yaml").unlink()
    if name == "fleet.json":
        text = json.dumps(sf.parse_yaml(text), indent=4)
    (tmp_path / name).write_bytes(text.replace("\n", "\r\n").encode("utf-8"))
    (tmp_path / name).chmod(0o600)
    done = quick("add", f"mini=127.0.0.1:{two.port}", "--model", "tiny", "--model", "BIG:32b")
    assert done.returncode == 0, done.stderr
    fleet = sf.load_fleet(tmp_path / name)
    assert [(m.node, m.ollama_model) for m in fleet.models.values()] == [
        ("big", "qwen3:8b"), ("mini", "tiny:latest"), ("mini", "big:32b")]
    content = (tmp_path / name).read_bytes()
    assert content.count(b"\n") == content.count(b"\r\n") > 10
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert quick("validate").returncode == 0


def test_add_puts_the_models_of_an_idle_machine_in(two, quick, tmp_path):
    path = tmp_path / "fleet.yaml"
    before = path.read_text().replace(
        "nodes:\n",
        f"nodes:\n    mini:  # bought in May\n        endpoint: http://127.0.0.1:{two.port}\n", 1)
    path.write_text(before)
    typed = ("add", f"mini=127.0.0.1:{two.port}")
    done = quick(*typed)
    assert done.returncode == 0, done.stderr
    after = path.read_text()
    fleet = sf.load_fleet(path)
    assert [model.node for model in fleet.models.values()].count("mini") > 0
    assert list(fleet.nodes) == ["mini", "big"] and "mini:  # bought in May\n" in after
    assert [line for line in before.splitlines() if line not in after.splitlines()] == []
    done = quick(*typed)
    assert done.returncode == 1
    assert "has `mini` already, and of its models big:32b, qwen3:8b\n" in done.stderr
    one_more = re.search("fix: `subagent-fleet (add .*)` puts in one more", done.stderr)[1]
    assert quick(*one_more.split()).returncode == 0
    done = quick(*one_more.split())
    assert done.returncode == 1
    assert "fix: `subagent-fleet recommend` plans its work" in done.stderr


def test_add_shares_no_name_with_what_is_there(two, quick, tmp_path):
    path = tmp_path / "fleet.yaml"
    path.write_text(path.read_text().replace("heavy", "qwen3-8b").replace(
        "claude-sonnet-local", "big-32b"))
    assert quick("add", f"mini=127.0.0.1:{two.port}").returncode == 0
    fleet = sf.load_fleet(path)
    assert {name: model.alias for name, model in fleet.models.items()} == {
        "qwen3-8b": "big-32b", "qwen3-8b-mini": "big-32b", "big-32b": "big-32b-mini"}


@pytest.mark.parametrize("change, words, status, slug, told", [
    (("", ""), ["big=127.0.0.1:PORT"], 1, "known-node",
     "` in nodes.big; another machine needs another name"),
    (("", ""), ["x=127.0.0.1:1"], 1, "known-node",
     "fix: `subagent-fleet add big=http://127.0.0.1:1` puts in its new models; another machine"),
    (("", ""), ["x=127.0.0.1:2"], 1, "node-silent", "refused: nothing listens there"),
    (("", ""), ["x=127.0.0.1:PORT", "--model", "tiney"], 2, "unknown-model", "known models: big:32b, "),
    (("", ""), ["x y=127.0.0.1:PORT"], 2, "usage", "add: `x y=127.0.0.1:PORT`: not of the form"),
    (("", ""), [], 2, "usage", "add: it needs NAME=URL"),
    (("", ""), ["x=10.0.0.7:99999"], 2, "usage", "fix: subagent-fleet add x=10.0.0.7\n"),
    (("project:", "{project:"), ["x=127.0.0.1:PORT"], 1, "invalid-config", "Invalid fleet.yaml"),
    (("", ""), ["x=127.0.0.1:PORT", "--config", "-"], 2, "usage", "add: it changes a file")])
def test_add_refuses_and_writes_nothing(two, quick, tmp_path, change, words, status, slug, told):
    path = tmp_path / "fleet.yaml"
    path.write_text(path.read_text().replace(*change))
    before = tree(tmp_path)
    words = [word.replace("PORT", str(two.port)) for word in words]
    done = quick("add", *words)
    assert done.returncode == status and tree(tmp_path) == before and slug
    assert told.replace("PORT", str(two.port)) in done.stderr


@pytest.mark.parametrize("models", [{}, {"embed": {"capabilities": ["embedding"]}}])
def test_add_of_a_machine_without_models_is_refused(two, quick, fake_node, models):
    done = quick("add", f"mini=127.0.0.1:{fake_node(models).port}")
    assert done.returncode == 1 and "has no model that can answer an agent" in done.stderr


@pytest.mark.parametrize("nodes, models", [
    ("nodes:\n  a: {endpoint: 'http://h:1'}", "models:\n  m: {node: a, ollama_model: x, litellm_alias: y}"),
    ("nodes:\n a:\n    endpoint: http://h:1\n    tags:\n    - >-\n      x", "models:\n  m:\n    node: a\n"
     "    ollama_model: x\n    litellm_alias: y\n    fallback: [\n  ]"),
    ("nodes:\n  a:\n    endpoint: http://h:1\n# at the margin\n    memory_gb: 4", "models:\n  m:\n"
     "    node: a\n    ollama_model: x\n    # c\n    litellm_alias: y"),
    ("nodes:\n  a: {endpoint: 'http://h:1',\n    tags: []}", "models:\n  m:\n    node: a\n"
     "    ollama_model: x\n    litellm_alias: y"),
    ("nodes:\n  a:\n    endpoint: http://h:1\n    tags: [\"x\n  y\"]", "models:\n  m: {node: a, "
     "ollama_model: x, litellm_alias: y}"),
    ("nodes: {a: {endpoint: 'http://h:1'}}", "models:\n  m: {node: a, ollama_model: x, litellm_alias: y}")])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
@pytest.mark.parametrize("end", ["\n", "", "\n\n# end\n"])
def test_what_is_added_changes_no_line_of_a_person(nodes, models, order, end):
    parts = [nodes, models, "agents: {w: {model: m, description: works}}"]
    text = "project: {name: p}\n" + "\n".join(parts[index] for index in order) + end
    document = sf.Document(text, "fleet.yaml")
    wanted = {kind: dict(sections) for kind, sections in document.value.items()}
    wanted["nodes"]["b"] = {"endpoint": "http://h:2"}
    wanted["models"]["n"] = {"node": "b", "ollama_model": "z", "litellm_alias": "z"}
    changed = sf.rewrite_fleet(document, wanted)
    assert sf.parse_yaml(changed) == wanted
    kept = iter(changed.split("\n"))
    assert all(line in kept for line in text.split("\n") if "nodes: {" not in line)  # in order


LAIDOUT = {"blocks": """\
nodes:  # mine
  a:
    endpoint: http://h:1   # the desk
    tags: []
  # between
  b:
    endpoint: http://h:2
models:
  # For planner: the fastest,
  #   it was said.
  # mine is the best
  m:  # big
    node: a
    ollama_model: x
    litellm_alias: x
    context: 65536   # enough
    # timeout: 300
    fallback:
    - n
  # about n
  n:
    node: b
    model: y
    alias: y
    fallback: [m]
agents:
  w:
    model: m  # the worker
    description: >
      Works
      # hard
    prompt: |
      Work.

      # not a comment
""", "braces": """\
nodes: {
  a: {endpoint: "http://h:1", tags: [],},  # the desk
  b: {
    endpoint: "http://h:2"
  }
}
models:
  m: {node: a, ollama_model: x, litellm_alias: x, context: 65536, fallback: [n]}
  n: {
    node: b, model: y,  # y!
    alias: y,
    fallback: [m],
}
agents:
  w: {model: m, description: works}
"""}
LAIDOUT["json"] = sf.json.dumps(sf.parse_yaml(LAIDOUT["blocks"]), indent=1) + "\n"
LAIDOUT["one line"] = sf.json.dumps(sf.parse_yaml(LAIDOUT["braces"]))


@pytest.mark.parametrize("layout", LAIDOUT)
@pytest.mark.parametrize("change", [
    {"m": {"context": 32768}}, {"m": {"fallback": ["n", "o"]}, "o": {"node": "b", "model": "o", "alias": "o"}},
    {"n": None, "m": {"fallback": None}}, {"m": {"litellm_alias": "a:b/c"}}, {"n": {"timeout": 7}},
    {"m": {"fallback": None, "context": None}}, {"n": {"fallback": None}},
    {"n": None, "m": {"fallback": None}, "o": {"node": "b", "model": "o", "alias": "o"}}])
def test_a_file_is_rewritten_where_its_values_differ_and_nowhere_else(layout, change):
    text = "project: {name: p}\n" + LAIDOUT[layout]
    if layout in ("json", "one line"):
        text = LAIDOUT[layout].replace("{", '{"project": {"name": "p"},', 1)
    document = sf.Document(text, "fleet.yaml")
    models = {name: dict(entry) for name, entry in document.value["models"].items()}
    for name, values in change.items():
        models.setdefault(name, {}).update(values or {})
        models[name] = {key: value for key, value in models[name].items() if value is not None}
        if values is None:
            del models[name]
    wanted = {**document.value, "models": models}
    changed = sf.rewrite_fleet(document, wanted)
    assert sf.parse_yaml(changed) == wanted
    if layout == "json":
        assert sf.json.loads(changed) == wanted
    comments = [line.strip() for line in text.splitlines() if line.strip().startswith("#")]
    going = ["# For planner: the fastest,", "#   it was said.", "# timeout: 300"] * (not change.get("m", {})) if layout == "blocks" else []
    assert [line for line in comments if line not in changed and line not in going] == []


def test_what_would_not_be_a_fleet_is_not_written():
    document = sf.Document("project: {name: p}\n" + LAIDOUT["blocks"], "fleet.yaml")
    with pytest.raises(sf.FleetError) as caught:
        sf.rewrite_fleet(document, {**document.value, "agents": {"w": {"model": "gone", "description": "d"}}})
    assert caught.value.slug == "cannot-write"
    assert "agents:\n  w:\n    model: gone\n" in caught.value.finding.excerpt


def test_a_note_of_ours_is_renewed_and_a_persons_comment_stays():
    document = sf.Document("project: {name: p}\n" + LAIDOUT["blocks"], "fleet.yaml")
    notes = {"m": "For nobody: it is there.", "n": "For planner: the fastest."}
    changed = sf.rewrite_fleet(document, document.value, notes)
    assert "models:\n  # For nobody: it is there.\n  # mine is the best\n  m:  # big\n" in changed
    assert "    - n\n  # about n\n  n:\n" in changed  # what was not ours is not noted
    wanted = {**document.value, "models": {"n": {**document.value["models"]["n"], "fallback": []}},
              "agents": {"w": {**document.value["agents"]["w"], "model": "n"}}}
    changed = sf.rewrite_fleet(document, wanted)
    assert "models:\n  # mine is the best\n  # about n\n  n:\n" in changed and "# not a comment\n" in changed


# -- logs --

ONE = {"time": 0, "id": "req_1", "session": "s-1", "agent_id": "", "alias": "claude-sonnet-local",
       "route": "heavy", "node": "big", "context": 32768, "failures": [], "waited_seconds": 0.5, "first_byte_seconds": 1, "total_seconds": 61.25,
       "input_tokens": 900, "output_tokens": 7, "outcome": "ok"}
TWO = {**ONE, "time": 1, "agent_id": "a1", "failures": [{"node": "big", "why": "refused"}], "node": "small",
       "route": "light", "total_seconds": 2}
THREE = {**ONE, "time": 2, "agent_id": "a2", "route": None, "node": None, "outcome": "overloaded_error",
         "failures": [{"node": "big", "why": "timeout"}, {"node": "small", "why": "refused"}],
         "first_byte_seconds": None}


def lines_of(done):
    """The lines of a log without the clock."""
    assert done.returncode == 0
    return [re.sub(r"^(....-..-.. )?\d\d:\d\d:\d\d +", "", line) for line in done.stdout.splitlines()]


def write_meta(place, session, agent, text):
    """Write what Claude Code keeps of a subagent."""
    path = place / f"config/projects/-a-b/{session}/subagents/agent-{agent}.meta.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return {"CLAUDE_CONFIG_DIR": str(place / "config")}


def test_logs_name_agent_model_machine_and_reason(fleet, quick):
    write_receipts(fleet, ONE, TWO, THREE)
    env = write_meta(fleet, "s-1", "a2", '{"agentType": "explorer"}')
    assert lines_of(quick("logs", env=env)) == [
        "Time      Agent         Model       Machine     Took     Outcome",
        "main          heavy       big           1m01s  ok",
        "implementer?  light       small           2 s  ok after big: refused",
        "explorer      -           -             1m01s  overloaded_error after big: timeout, "
        "small: refused"]
    assert lines_of(quick("logs", "-n", "2", "--failed", env=env))[1].startswith("implementer?")
    assert len(lines_of(quick("logs", "--failed", env=env))) == 3
    assert len(lines_of(quick("logs", "-n", "1", env=env))) == 2


def test_logs_say_the_words_of_who_failed_and_where_its_log_is(fleet, quick):
    tries = [{"node": "big", "why": "api_error"}]
    write_receipts(fleet, {**TWO, "failures": tries, "said": "big: out of memory"},
                   {**ONE, "outcome": "prompt_too_long", "said": "big: prompt is too long"})
    done = quick("logs")
    assert [line.split("  ")[-1] for line in lines_of(done)[1:]] == [
        "ok after big: out of memory", "prompt_too_long: big: prompt is too long"]
    assert done.stderr.startswith("\nOllama's own log on big: journalctl -u ollama (Linux), ")
    write_receipts(fleet, TWO)
    assert quick("logs").stderr == ""


@pytest.mark.parametrize("columns, wanted", [
    (0, "00:00:00  planner     small       laptop          2 s  ok after mini: refused\n"),
    (60, "00:00:00  planner     small       laptop          2 s\n"
         "          ok after mini: refused\n"),
    (40, "00:00:00  planner     small       lapto…\n"
         "          ok after mini: refused\n")])
def test_a_line_of_the_log_fits(columns, wanted):
    request = {"time": 0, "agent": "planner", "model": "small", "node": "laptop", "total_seconds": 2,
               "outcome": "ok", "failures": [sf.FailedTry("mini", "refused")], "said": ""}
    line = sf.LogTable([request], sf.Look(columns=columns), 0).line(request, 0)
    assert re.sub(r"^\d\d:\d\d:\d\d", "00:00:00", line) == wanted


def test_logs_of_a_session_are_its_own(fleet, quick):
    write_receipts(fleet, ONE, {**TWO, "session": "5b1c-a"}, {**THREE, "session": "5b1c-a"})
    assert len(lines_of(quick("logs", "--session", "5b1c"))) == 3
    failed = json.loads(quick("logs", "--session", "s-", "--json").stdout)["requests"]
    assert [one["session"] for one in failed] == ["s-1"]
    assert "is such a one" in quick("logs", "--session", "zz").stderr


def test_logs_json_is_one_object(fleet, quick):
    write_receipts(fleet, ONE, THREE)
    found = json.loads(quick("logs", "--json").stdout)
    assert found["schema"] == "subagent-fleet/logs/2"
    first, second = found["requests"]
    assert first == {**ONE, "time": first["time"], "agent": "main", "model": "", "route": "heavy",
                     "digest": "", "failures": [], "said": "",
                     "cached_tokens": 0, "read_again_tokens": 0, "read_again_why": "", "waited_for": "", "steps": [],
                     "broken_calls": 0, "asked_seconds": 0.0,
                     "sent_tokens": 0, "cloud": False, "passed_over": [], "task": ""}
    write_receipts(fleet, {**ONE, "model": "big:30b"})
    named, = json.loads(quick("logs", "--json").stdout)["requests"]
    assert (named["model"], named["route"]) == ("big:30b", "heavy")
    assert second["failures"] == THREE["failures"] and second["node"] == second["route"] == ""
    assert quick("logs", "--json", "--follow").returncode == 2


# What one thing was called beside its name: a second name for it is a mistake.
SECOND_NAMES = {"ollama_model", "runs", "mended", "attempt", "latency_ms", "waited", "first_byte",
                "first_token", "rate", "read_again", "sent", "total", "idle", "machine", "model_name"}


def test_json_has_one_name_for_one_thing():
    examples = re.findall(r"(?sm)^\$ subagent-fleet [^\n]+\n(\{.*?)^```$",
                          PAGE.read_text(encoding="utf-8"))
    keys = {path.rpartition(".")[2] for example in examples for path in keys_of(json.loads(example))}
    assert len(examples) > 8 and len(keys) > 100
    assert not keys & SECOND_NAMES
    assert {"node", "model", "route", "alias", "agent", "agent_id"} <= keys


def test_logs_read_what_an_older_program_wrote(fleet, quick):
    write_receipts(fleet, {
        "time": 5, "id": "req_1", "session": "s-1", "agent": "a1", "alias": "x", "model": "heavy",
        "node": "big", "context": 9, "tries": [{"node": "small", "why": "refused"}], "waited": 0.5,
        "first_byte": 1, "total": 2, "asked": 0.7, "input_tokens": 8, "output_tokens": 7,
        "outcome": "ok", "sent": 10, "read_again": 3, "runs": "big:30b",
        "steps": [{"at": 4, "what": "wait"}]})
    found, = json.loads(quick("logs", "--json").stdout)["requests"]
    assert (found["route"], found["model"], found["agent_id"]) == ("heavy", "big:30b", "a1")
    assert found["failures"] == [{"node": "small", "why": "refused"}]
    assert [found[f"{name}_seconds"] for name in ("waited", "first_byte", "total", "asked")] == [
        0.5, 1, 2, 0.7]
    assert (found["sent_tokens"], found["read_again_tokens"], found["steps"]) == (10, 3, [])


def test_logs_without_fleet_or_name_show_the_id(tmp_path, quick):
    (tmp_path / ".git").mkdir()
    write_receipts(tmp_path, TWO)
    for text in ("{", "[]", '{"agentType": 1', "[" * 100_000):
        env = write_meta(tmp_path, "s-1", "a1", text)
        assert lines_of(quick("logs", env=env))[1].split()[:2] == ["a1", "light"]


@pytest.mark.parametrize("session, agent", [("..", "a1"), ("s-1", "*"), ("s-1", "[a]1"), ("*", "a1")])
def test_logs_take_a_name_from_no_other_file(tmp_path, quick, session, agent):
    (tmp_path / ".git").mkdir()
    write_receipts(tmp_path, {**ONE, "session": session, "agent": agent})
    env = write_meta(tmp_path, "s-1", "a1", '{"agentType": "stolen"}')
    below = tmp_path / "config/projects/subagents/agent-a1.meta.json"
    below.parent.mkdir()
    below.write_text('{"agentType": "stolen"}')
    assert lines_of(quick("logs", env=env))[1].split()[0] == agent


@pytest.mark.parametrize("receipt", [
    "{}", "[]", "nonsense", '{"time": "x"}', '{"time": 1e999}', '{"time": NaN}', '{"time": -1e18}',
    '{"time": 5, "failures": 3, "total_seconds": NaN, "agent_id": {}, "session": ["../.."]}', "[" * 100_000,
    '{"time": 5, "failures": [1, {"node": {}}], "agent_id": "../../x", "session": ".."}',
    '{"time": 5, "total_seconds": 1%s}' % ("0" * 400), '{"time": 1%s}' % ("0" * 400),
    '{"time": 5, "agent": "\\u001b[2J", "model": "\\u202e", "outcome": "\\n\\u001b]0;x"}'])
def test_logs_survive_any_receipt(tmp_path, quick, receipt):
    (tmp_path / ".git").mkdir()
    write_receipts(tmp_path, receipt, ONE)
    done = quick("logs")
    assert lines_of(done)[-1].startswith("main ") and "\x1b" not in done.stdout
    found = json.loads(quick("logs", "--json").stdout, parse_constant=pytest.fail)
    assert len(found["requests"]) in (1, 2)


def test_logs_without_any_say_who_keeps_them(fleet, quick):
    done = quick("logs", "--out", "x")
    assert done.returncode == 0 and done.stderr == (
        "No requests yet. `subagent-fleet up` and `subagent-fleet serve` record them "
        "in x/.subagent-fleet/requests.jsonl.\n")


def test_logs_without_a_failure_say_so(fleet, quick):
    write_receipts(fleet, ONE, ONE)
    done = quick("logs", "--failed")
    assert done.returncode == 0 and done.stderr == \
        "None of 2 requests in ./.subagent-fleet/requests.jsonl is such a one.\n"


def test_logs_read_as_far_back_as_they_are_asked(fleet, quick, limits):
    limits(part=1000)  # three receipts
    failed = {**TWO, "id": "req_old", "time": -90}
    write_receipts(fleet, *[{**ONE, "id": f"req_{number}", "time": -80} for number in range(40)])
    kept = fleet / ".subagent-fleet/requests.jsonl"
    kept.rename(f"{kept}.1")  # the gateway has turned it over
    write_receipts(fleet, failed, *[{**ONE, "id": f"req_{number}"} for number in range(40, 80)])
    found = [one["id"] for one in json.loads(quick("logs", "-n", "60", "--json").stdout)["requests"]]
    assert found == [*(f"req_{number}" for number in range(21, 40)), "req_old",
                     *(f"req_{number}" for number in range(40, 80))]
    assert len(lines_of(quick("logs", "-n", "90"))) == 82 and quick("logs", "-n", "90").stderr == ""
    last = lines_of(quick("logs", "--failed"))[1:]
    assert len(last) == 1 and last[0].startswith("implementer?")
    limits(part=1)
    assert len(lines_of(quick("logs", "-n", "90"))) == 82


def test_logs_say_what_they_did_not_read(fleet, quick, limits):
    limits(receipts_read=4000)
    write_receipts(fleet, TWO, *[ONE] * 40)
    said = quick("logs", "--failed").stderr
    assert re.fullmatch(r"None of 1\d requests in \./\.subagent-fleet/requests\.jsonl is such a one\.\n"
                        r"The first 0\.\d MB of \./\.subagent-fleet/requests\.jsonl were not read\.\n", said)
    assert quick("logs", "-n", "3").stderr == ""


@pytest.mark.parametrize("words", [("-n", "0"), ("-n", "x"), ("-n", "10000")])
def test_logs_want_a_number_of_lines(fleet, quick, words):
    assert quick("logs", *words).returncode == 2


def test_logs_follow_a_file_that_grows_and_turns_over(fleet):
    write_receipts(fleet, ONE)
    path = fleet / ".subagent-fleet/requests.jsonl"
    child = subprocess.Popen([sys.executable, PROGRAM, "logs", "-f"], cwd=fleet,
                             env=clean_environment(), stdout=subprocess.PIPE)

    def next_line():
        assert select.select([child.stdout], [], [], 20)[0], "nothing came"
        return child.stdout.readline()

    try:
        assert b"Time " in next_line()
        assert b" main " in child.stdout.readline()  # it may have come with the first
        line = json.dumps({**ONE, "agent": "second-one", "alias": "?"}) + "\n"
        edit(path, line[:40])
        time.sleep(0.3)
        edit(path, line[40:])
        assert b" second-one " in next_line()
        path.rename(f"{path}.1")
        path.write_text(json.dumps({**ONE, "agent": "third", "alias": "?"}) + "\n")
        assert b" third " in next_line()
        child.send_signal(signal.SIGINT)
        assert child.wait(10) == 130
    finally:
        child.kill()
        child.communicate()


def test_status_is_ready_only_with_its_gateway(generated, quick, fake_node, gateway):
    node = fake_node({"qwen3:8b": {}, "qwen3-coder:30b": {}})
    rewrite(generated, re.sub('"http:[^"]*"', node.endpoint, FLEET))
    node.loaded.update({"qwen3:8b": 32768, "qwen3-coder:30b": 65536})
    assert re.search(r"\n\S+: ready. Gateway at http://\S+: idle.\n$", quick("status").stdout)
    assert json.loads(quick("status", "--json").stdout)["gateway"]["id"] == "gateway-up"
    gateway.close()
    assert quick("status").stdout.endswith(
        f": ready, but no gateway runs at http://127.0.0.1:{PORT}: `subagent-fleet up` starts "
        "LiteLLM; `subagent-fleet generate` says how to start it in another terminal.\n")
    del node.models["qwen3:8b"]
    assert quick("status").stdout.partition(" ready. ")[2].startswith(f"No gateway runs at http://127.0.0.1:{PORT}. Next:")


def start_launch(generated, environ):
    """Start launch in a group of its own; return it once the fake Claude is up."""
    child = subprocess.Popen([sys.executable, PROGRAM, "launch", "claude"], cwd=generated,
                             env=clean_environment(**environ), stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, start_new_session=True)
    assert child.stdout.readline() == b"up\n"
    return child


def test_ctrl_c_belongs_to_the_child(generated, fake_claude):
    child = start_launch(generated, fake_claude(
        'trap "echo asked" INT; echo up; while [ ! -e stop ]; do sleep 0.02; done; exit 9\n'))
    for _ in range(3):
        os.killpg(child.pid, signal.SIGINT)
        assert child.stdout.readline() == b"asked\n"
    (generated / "stop").touch()
    out, err = child.communicate(timeout=10)
    assert (child.returncode, out, err) == (9, b"", b"")


@pytest.mark.parametrize("name, status", [("KILL", 137), ("TERM", 143)])
def test_a_child_that_was_killed_gives_the_shells_exit_code(generated, quick, fake_claude, name,
                                                            status):
    assert quick("launch", "claude", env=fake_claude(f"kill -{name} $$\n")).returncode == status


def test_terminating_launch_terminates_the_child(generated, fake_claude):
    child = start_launch(generated, fake_claude(
        'trap "exit 5" TERM; echo up; while :; do sleep 0.02; done\n'))
    os.kill(child.pid, signal.SIGTERM)
    child.communicate(timeout=10)
    assert child.returncode == 5


def slug_of(call, *words):
    with pytest.raises(sf.FleetError) as caught:
        call(*words)
    assert caught.value.fix
    return caught.value.slug, caught.value.status


def test_refusals_by_their_slugs(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {"PATH": "/nowhere", "HOME": str(tmp_path)})
    world, out = sf.World(), str(tmp_path)
    workspace = sf.Workspace(world, out)
    rewrite(tmp_path, FLEET)
    fleet = sf.load_fleet(tmp_path / "fleet.yaml")
    options = argparse.Namespace(target=["x"])
    assert slug_of(sf.parse_targets, options) == ("unknown-target", 2)
    assert slug_of(workspace.read_key, fleet) == ("no-key", 1)
    assert slug_of(world.enter, out, "..") == ("in-the-way", 3)
    assert slug_of(world.run, ["/nowhere/claude"], {}) == ("cannot-run", 1)
    assert sf.refuse_edited(["a"], "clean --force", "kept").slug == "edited"
    options = sf.parse_arguments(sf.find_command("launch"), ["claude", "--out", out, "--config",
                                                             out + "/fleet.yaml"])
    assert slug_of(sf.cmd_launch.run, options, world) == ("claude-missing", 1)
    monkeypatch.setattr(sf, "parse_manifest", lambda content: None)
    (tmp_path / ".subagent-fleet").mkdir()
    (tmp_path / MANIFEST).touch()
    told = []
    monkeypatch.setattr(sf, "format_finding", lambda finding, **_: told.append(finding.slug) or "")
    assert workspace.compare(None) == [] and told == ["manifest-broken"]


@pytest.mark.parametrize("words", [["up"], ["generate"]])
def test_a_home_directory_is_no_project(run_cli, generated, words):
    before = sorted(generated.rglob("*"))
    done = run_cli(*words, cwd=generated, env={"HOME": generated})
    assert done.returncode == 3 and "this is your home directory" in done.stderr
    assert done.stderr.endswith(f"  fix: go into a project's directory; or `subagent-fleet {words[0]} --out .`\n")
    assert sorted(generated.rglob("*")) == before
    said = run_cli("generate", "--json", cwd=generated, env={"HOME": generated})
    assert json.loads(said.stdout)["error"]["id"] == "in-home"
    assert run_cli("generate", "--out", ".", cwd=generated, env={"HOME": generated}).returncode == 0
    assert run_cli("generate", "--force", cwd=generated, env={"HOME": generated}).returncode == 0


def test_what_must_not_be_left_out_is_named(run_cli):
    for name in ("task say", "task add"):
        done = run_cli(*name.split())
        assert done.returncode == 2 and f"{name}: it needs " in done.stderr


def test_lists_and_headings_of_a_page_stand_apart(run_cli):
    page = run_cli("help", "machines").stdout
    assert re.findall(r"^(\d)\. ", page, re.M) == list("12345")
    assert "\n\nHow many agents stay warm\n\n" in page and not page.startswith("\n")


@pytest.mark.parametrize("words, told", [
    (["task", "log", "a", "3"], "task log: KIND: `3`; accepted: setup, check, stderr, landing, raw"),
    (["env", "--config"], "env: --config: expected a value"),
    (["validate", "--json=3"], "validate: --json: it takes no value, not '3'")])
def test_words_that_a_command_does_not_take_are_refused_plainly(run_cli, words, told):
    done = run_cli(*words)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {told}\n"), done.stderr


@pytest.mark.parametrize("topic", ["json", "gateway", ""])
def test_help_in_a_pipe_is_as_wide_as_a_page(run_cli, topic):
    said = run_cli("help", *topic.split()).stdout
    assert max(map(len, said.splitlines())) <= 103  # a word is never cut


def test_a_flag_of_init_is_not_handed_to_claude_code(run_cli):
    assert run_cli("up", "--offline").stderr.endswith("\n  fix: subagent-fleet init --offline\n")
    assert run_cli("up", "--resume").stderr.endswith("\n  fix: subagent-fleet up -- --resume\n")


@pytest.mark.parametrize("topic", ["config", "runs"])
def test_the_backticks_of_a_page_come_in_pairs(run_cli, topic):
    odd = [line for line in run_cli("help", topic).stdout.splitlines() if line.count("`") % 2]
    assert odd == []
    if topic == "config":
        assert "model behind `opus`\n" in run_cli("help", topic).stdout
