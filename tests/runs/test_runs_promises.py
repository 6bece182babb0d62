"""What runs promise, seen from outside: commands typed, then git, files, processes, exit codes."""
import contextlib
import json
import os
import pathlib
import pty
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from run_kit import STUB, WORKS, Shop, shell
from tools import PROC, PROGRAM, SCRIPT, in_parts

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not sys.platform.startswith("linux"),
                                                    reason="the kit reads /proc")]
EDIT = "echo two > a.txt"
CACHES = "mkdir -p .cache __pycache__; date +%N > .cache/x; date +%N > __pycache__/y.pyc; date +%N > report.txt"


# -- what the check leaves is nobody's --

def test_three_tasks_that_do_nothing_fail_whatever_their_check_leaves(shop):
    shop.tasks({"a": {"prompt": "x"}, "b": {"prompt": "x"}, "c": {"prompt": "x", "touch": ["docs/**"]}},
               defaults={"coder": ["true"], "check": CACHES, "tries": 1})
    done = shop.run()
    assert {name: row["state"] for name, row in shop.rows().items()} == dict.fromkeys("abc", "failed"), done
    assert done.code == 1
    assert not any(shop.has_work(name) for name in "abc")
    tidied = " ".join(shop.type("task", "tidy", "--ignored").out.split())
    assert "empty branch run/a deleted" in tidied and "merged" not in tidied


def test_what_a_check_leaves_is_in_no_branch_and_breaches_no_scope(shop):
    shop.tasks({name: {"prompt": "x"} for name in "ab"},
               defaults={"coder": shell("mkdir -p docs", "echo new > docs/x"), "touch": ["docs/**"],
                         "check": f"{CACHES}; test -s docs/x", "tries": 1})
    assert shop.run().code == 0
    for name in "ab":
        assert shop.files(f"run/{name}") == {"a.txt", "docs/x"}
    shop.git("merge", "-q", "run/a", "run/b", "-m", "both")


def test_a_check_sees_nothing_of_another_tasks_check_nor_of_its_own_last_round(shop):
    shop.use_claude()
    check = "test ! -e left.txt || exit 9; touch left.txt; test -s b.txt || { echo '@write b.txt x'; exit 1; }"
    shop.tasks({"t": {"prompt": "@write a2.txt y", "model": "big", "check": check, "tries": 1}})
    done = shop.run()
    assert shop.state() == "done", done
    assert shop.receipt()["check"]["rounds"] == [1, 0]
    assert "left.txt" not in shop.files("run/t")


# -- checked is what is kept --

def test_files_that_git_was_told_not_to_look_at_are_judged_and_kept(shop):
    coder = shell("git update-index --assume-unchanged a.txt", EDIT, "echo n > n.txt")
    assert shop.work(coder=coder, check="grep -q two a.txt") == "done", shop.said
    assert shop.git("show", "run/t:a.txt") == "two"
    assert shop.files("run/t") == {"a.txt", "n.txt"}


@pytest.mark.parametrize("flag", ["--assume-unchanged", "--skip-worktree"])
def test_an_edit_out_of_scope_that_git_was_told_not_to_see_is_seen(shop, flag):
    coder = shell(f"git update-index {flag} a.txt", EDIT, "mkdir src", "echo n > src/n")
    assert shop.work(coder=coder, check="true", touch=["src/**"]) == "parked", shop.said
    assert shop.row("t")["cause"] == "scope" and not shop.has_work("t")


def test_the_branch_is_what_passed_wherever_the_agent_went(shop):
    coder = shell("echo bad > a.txt", "git commit -qam bad", "git checkout -q -b other HEAD~1",
                  "echo good > a.txt", "git commit -qam good")
    assert shop.work(coder=coder, check="grep -q good a.txt") in ("done", "parked", "failed"), shop.said
    if shop.state() == "done":
        assert shop.git("show", "run/t:a.txt") == "good"
        assert shop.git("merge-base", "--is-ancestor", shop.start, "run/t") == ""
    else:
        assert not shop.has_work("t") or shop.git("show", "run/t:a.txt") == "bad"


def test_a_detached_head_loses_nothing(shop):
    coder = shell("git checkout -q --detach", "echo good > a.txt", "git commit -qam good", "echo x > x")
    assert shop.work(coder=coder, check="grep -q good a.txt") == "done", shop.said
    assert shop.git("show", "run/t:a.txt") == "good" and "x" in shop.files("run/t")


LATER = ("(sleep 12; echo later > later.txt; git add -A; git commit -qm later; sleep 60) "
         ">/dev/null 2>&1 </dev/null &")


def test_what_is_left_behind_neither_passes_nor_counts(shop):
    left = f"setsid nohup sh -c '{LATER}'"
    shop.tasks({"counts": {"prompt": "x", "coder": shell(EDIT, left), "check": "sleep 14; grep -q two a.txt"},
                "passes": {"prompt": "x", "coder": shell(EDIT, left), "check": "sleep 14; test -e later.txt"}},
               defaults={"tries": 1})
    done = shop.run()
    states = {name: row["state"] for name, row in shop.rows().items()}
    assert states == {"counts": "done", "passes": "failed"}, done
    assert shop.files("run/counts") == {"a.txt"}
    assert not [number for number in filter(str.isdigit, os.listdir(PROC))
                if b"echo later" in shop.command_of(number)]


NESTED = {
    "a repository of its own": "git init -q inner; cd inner; echo x > x; git add .; git commit -qm x",
    "a repository without a commit": "git init -q inner; echo x > inner/x",
    "an edit in a submodule": "cd sub; echo mine > s.txt",
    "a commit in a submodule": "cd sub; echo mine > s.txt; git commit -qam mine",
    "an untracked file in a submodule": "echo mine > sub/new.txt",
}


@pytest.mark.parametrize("how", NESTED)
def test_what_cannot_be_kept_whole_parks_with_words_and_stays(shop, how):
    shop.add_submodule()
    shop.git("config", "--global", "status.showUntrackedFiles", "no")
    shop.git("config", "--global", "diff.ignoreSubmodules", "all")
    setup = ["git -c protocol.file.allow=always submodule update --init -q"]
    state = shop.work(coder=shell(EDIT, NESTED[how]), setup=setup, check="grep -q two a.txt")
    assert state == "parked", shop.said
    assert shop.row("t")["reason"]
    assert not shop.has_work("t")
    shop.type("task", "tidy")
    tree = shop.worktree("t")
    assert tree and (tree / "a.txt").read_text() == "two\n"
    found = [path for path in tree.rglob("*") if path.is_file() and ".git" not in path.parts
             and path.name in ("x", "s.txt", "new.txt")]
    assert found, "what was nowhere else has gone"


def test_a_submodule_that_nobody_touched_is_in_nobodys_way(shop):
    shop.add_submodule()
    assert shop.work(coder=shell(EDIT), check="grep -q two a.txt") == "done", shop.said
    assert shop.git("diff", "--name-only", "main", "run/t") == "a.txt"


def test_what_a_directory_that_is_ignored_holds_helps_no_check_and_is_not_removed(shop):
    shop.commit(_gitignore="build/\n")
    coder = shell(EDIT, "mkdir -p build", "echo work > build/work.txt")
    shop.tasks({"needs": {"prompt": "x", "coder": coder, "check": "test -s build/work.txt"},
                "has": {"prompt": "x", "coder": coder, "check": "grep -q two a.txt"}}, defaults={"tries": 1})
    done = shop.run()
    states = {name: row["state"] for name, row in shop.rows().items()}
    assert states == {"needs": "failed", "has": "done"}, done
    shop.type("task", "tidy")
    assert (shop.worktree("has") / "build/work.txt").read_text() == "work\n"
    assert shop.type("task", "tidy", "--ignored").code == 0
    assert shop.worktree("has") is None


def test_a_copy_that_its_agent_has_changed_is_not_removed(shop):
    shop.commit(_gitignore=".env\n")
    shop.write(".env", "SECRET=hunter2\n")
    assert shop.work(coder=shell(EDIT, "echo MORE=mine >> .env"), copy=[".env"], check="true") == "done"
    shop.type("task", "tidy")
    assert "MORE=mine" in (shop.worktree("t") / ".env").read_text()


def test_caches_by_name_keep_no_worktree(shop):
    shop.commit(_gitignore="__pycache__/\nnode_modules/\n.venv/\ntarget/\n")
    coder = shell(EDIT, *(f"mkdir -p {name}; echo x > {name}/x" for name in (
        "__pycache__", "node_modules", ".venv", "target")),
        "touch package.json Cargo.toml .venv/pyvenv.cfg")
    assert shop.work(coder=coder, check="true") == "done"
    assert shop.type("task", "tidy").code == 0
    assert shop.worktree("t") is None and shop.git("show", "run/t:a.txt") == "two"


@pytest.mark.parametrize("name", ["target", ".cache", ".next", "node_modules", "a/target"])
def test_results_in_a_directory_that_is_named_like_a_cache_are_kept(shop, name):
    shop.commit(_gitignore="target/\n.cache/\n.next/\nnode_modules/\n")
    results = shell(EDIT, f"mkdir -p {name}; echo results > {name}/x")
    assert shop.work(coder=results, check="true") == "done"
    assert "ignored file" in shop.type("task", "tidy").out
    assert (shop.worktree("t") / name / "x").read_text() == "results\n"


def test_a_sparse_checkout_is_kept_as_it_is(shop):
    shop.commit(**{"in/x.txt": "x\n", "out/y.txt": "y\n", "out/z.txt": "z\n"})
    shop.git("sparse-checkout", "set", "in")
    assert not (shop.repo / "out").exists()
    coder = shell("mkdir -p out in", "echo new > out/new.txt", "echo more >> in/x.txt")
    assert shop.work(coder=coder, check="test -s in/x.txt") == "done", shop.said
    changed = set(shop.git("diff", "--name-only", shop.start, "run/t").split())
    assert changed == {"in/x.txt", "out/new.txt"}


def test_a_worktree_that_its_agent_made_sparse_is_parked_until_it_is_whole(shop):
    shop.commit(**{"in/x.txt": "x\n", "out/y.txt": "y\n"})
    coder = shell("git sparse-checkout set in", "mkdir -p out", "echo new > out/new.txt", "echo more >> in/x.txt")
    assert shop.work(coder=coder, check="test -s in/x.txt") == "parked", shop.said
    assert "git sparse-checkout disable" in shop.type("tasks", "t").out
    assert "skipped" in shop.type("task", "tidy").out
    shop.git("sparse-checkout", "disable", cwd=shop.worktree("t"))
    (shop.worktree("t") / ".git/info/sparse-checkout").unlink()
    shop.tasks({"t": {"prompt": "x", "coder": ["true"], "check": "test -s in/x.txt", "tries": 1}})
    shop.type("task", "retry", "t")
    assert shop.run().code == 0
    changed = set(shop.git("diff", "--name-only", shop.start, "run/t").split())
    assert changed == {"in/x.txt", "out/new.txt"}


def test_what_is_tracked_though_ignored_and_how_lines_end_stays(shop):
    shop.write("kept.log", "kept\n")
    shop.git("add", "kept.log")
    shop.git("commit", "-qm", "kept")
    (shop.repo / "dos.txt").write_bytes(b"one\r\ntwo\r\n")
    shop.git("-c", "core.autocrlf=false", "add", "dos.txt")
    shop.git("commit", "-qm", "dos")
    shop.commit(_gitignore="*.log\n", _gitattributes="* text=auto\n")
    shop.program("tool", "true", shop.repo)
    shop.git("add", "tool")
    shop.git("commit", "-qm", "tool")
    assert shop.work(coder=shell(EDIT), check="true") == "done"
    assert shop.git("diff", "--name-only", "main", "run/t") == "a.txt"


def test_check_in_same_runs_where_the_agent_worked_and_the_receipt_says_so(shop):
    where = 'pwd > "$HOME/where"; grep -q two a.txt'
    shop.tasks({"t": {"prompt": "x", "coder": shell(EDIT, 'pwd > "$HOME/agent"'), "check": where,
                      "check_in": "same"},
                "u": {"prompt": "x", "coder": shell(EDIT, 'pwd > "$HOME/agent"'), "check": where,
                      "after": ["t"], "base": shop.start}})
    assert shop.run("t").code == 0
    assert (shop.home / "where").read_text() == (shop.home / "agent").read_text()
    same = json.dumps(shop.receipt("t"))
    assert shop.run().code == 0
    assert (shop.home / "where").read_text() != (shop.home / "agent").read_text()
    assert "same" in same and '"same"' not in json.dumps(shop.receipt("u"))


def test_a_check_that_passes_before_the_work_is_told_once(shop):
    shop.tasks({name: {"prompt": "x"} for name in "abc"},
               defaults={"coder": shell(EDIT), "check": "true", "tries": 1})
    done = shop.run()
    assert done.code == 0
    assert done.out.count("proves nothing") == 1, done
    assert [shop.receipt(name)["check"]["passes_on_base"] for name in "abc"] == [True] * 3


def test_what_the_check_says_before_any_work_is_asked_of_the_base_in_a_later_run_too(shop):
    shop.tasks({"t": {"prompt": "x"}}, defaults={"coder": shell(EDIT), "check": "grep -q two a.txt"})
    assert shop.run().code == 0
    assert shop.receipt("t")["check"]["passes_on_base"] is False
    shop.type("task", "say", "t", "once more")
    done = shop.run()
    assert "proves nothing" not in done.out, done
    assert shop.receipt("t", 2)["check"]["passes_on_base"] is False


# -- done only by the check --

def test_done_is_said_by_the_check_alone(shop):
    shop.use_claude()
    shop.tasks({"claims": {"prompt": "@say all tests pass", "check": "true"},
                "denied": {"prompt": "@edit .git/x\n@run rm -f denied.txt", "check": "true"},
                "survey": {"prompt": "@say nothing", "changes": "none", "check": "true"},
                "wrong": {"prompt": "@write x y", "changes": "none", "check": "true"},
                "right": {"prompt": "@write x y", "check": "test -s x"}},
               defaults={"model": "big", "tries": 1, "rounds": 1})
    done = shop.run()
    assert {name: row["state"] for name, row in shop.rows().items()} == {
        "claims": "failed", "denied": "failed", "survey": "done", "wrong": "failed", "right": "done"}, done


def test_a_check_that_never_passes_is_run_rounds_and_one_times(shop):
    shop.use_claude()
    counts = "echo x >> $HOME/checks; test -e never"
    shop.tasks({"t": {"prompt": "@write x y", "model": "big", "tries": 1, "rounds": 2, "check": counts}})
    assert shop.run().code == 1 and shop.state() == "failed"
    assert shop.receipt()["check"]["rounds"] == [1, 1, 1]
    asked = len((shop.home / "checks").read_text().splitlines())
    assert asked in (3, 4)  # once more on the base


@pytest.mark.parametrize("check", ["pytset -q", "./no-such-file"])
def test_a_check_that_does_not_exist_parks(shop, check):
    shop.use_claude()
    shop.tasks({"t": {"prompt": "@write x y", "model": "big", "check": check}})
    assert shop.run().code == 1
    assert shop.state() == "parked" and re.search("12[67]", shop.row("t")["reason"]), shop.row("t")


def test_a_coder_that_does_not_exist_parks(shop):
    assert shop.work(coder=["codexx", "exec"], check="true", tries=2) == "parked"
    assert "codexx" in shop.row("t")["reason"]


# -- without a check: a person says --

def test_without_a_check_it_ends_in_review_and_a_person_accepts(shop):
    shop.tasks({name: {"prompt": "x", "coder": shell(EDIT, f"echo {name} > of-{name}.txt")} for name in "abc"})
    done = shop.run()
    assert done.code == 0, done
    assert {row["state"] for row in shop.rows().values()} == {"review"}
    assert shop.git("show", "run/a:a.txt") == "two"
    assert "+two" in shop.type("task", "diff", "a").out
    assert shop.type("task", "accept", "a").code == 0
    assert shop.state("a") == "done"
    shop.git("merge", "-q", "run/b")
    assert shop.state("b") == "done"
    assert shop.state("c") == "review"
    tidied = shop.type("task", "tidy", "c")
    assert "merged" not in tidied.out and shop.git("show", "run/c:of-c.txt") == "c"


def test_what_waits_for_a_review_goes_on_when_it_is_accepted(shop):
    shop.tasks({"first": {"prompt": "x", "coder": shell(EDIT)},
                "next": {"prompt": "x", "coder": shell("cp a.txt b.txt"), "after": ["first"],
                         "check": "grep -q two b.txt"}})
    assert shop.run().code in (0, 1)
    assert shop.state("first") == "review" and shop.state("next") == "waiting"
    assert shop.type("task", "accept", "first").code == 0
    assert shop.run().code == 0
    assert shop.state("next") == "done"


def test_a_review_is_sent_back_with_words(shop):
    coder = shell("cat > told.txt", "echo $(($(cat n 2>/dev/null || echo 0) + 1)) > n")
    shop.tasks({"t": {"prompt": "the task itself", "coder": coder}})
    assert shop.run().code == 0 and shop.state() == "review"
    assert shop.type("task", "retry", "t", "--say", "not quite: use sqlite").code == 0
    assert shop.run().code == 0
    told = shop.git("show", "run/t:told.txt")
    assert "the task itself" in told and "not quite: use sqlite" in told
    assert shop.git("show", "run/t:n") == "2"


def test_accept_of_what_is_not_in_review_is_refused(shop):
    assert shop.work(coder=["false"], check="false") == "failed"
    done = shop.type("task", "accept", "t")
    assert done.code not in (0, 130) and "nothing to accept" in done.out
    assert shop.state() == "failed"
    assert shop.type("task", "accept", "nobody").code == 2


def test_accept_of_work_that_failed_names_the_way_on(shop):
    assert shop.work(coder=shell(EDIT), check="false") == "failed"
    done = shop.type("task", "accept", "t")
    assert done.code == 1 and "nothing" not in done.out, done
    assert re.search(r"try again: \S+ task retry t$", " ".join(done.out.split())), done


# -- words: whole prompts, new words, answers --

def test_a_coder_is_told_the_task_again_and_what_happened(shop):
    coder = shell("cat > told.txt", "cat told.txt >> $HOME/all.txt", "echo ---- >> $HOME/all.txt")
    check = "echo the check says no; test $(grep -c -- ---- $HOME/all.txt) -ge 2"
    shop.tasks({"t": {"prompt": "the task itself", "coder": coder, "check": check, "tries": 3}})
    assert shop.run().code == 0
    first, second = (shop.home / "all.txt").read_text().split("----\n")[:2]
    assert first.strip() == "the task itself"
    assert "the task itself" in second and "the check says no" in second


def test_retry_takes_the_words_that_the_file_has_now(shop):
    shop.use_claude()
    shop.tasks({"t": {"prompt": "@write old.txt x", "model": "big", "check": "test -e new.txt", "tries": 1,
                      "rounds": 0}})
    assert shop.run().code == 1 and shop.state() == "failed"
    shop.tasks({"t": {"prompt": "@write new.txt x", "model": "big", "check": "test -e new.txt", "tries": 1,
                      "rounds": 0}})
    assert shop.type("task", "retry", "t").code == 0
    assert shop.run().code == 0 and shop.state() == "done"
    assert "new.txt" in shop.files("run/t")


def test_an_answer_that_is_none_of_the_choices_is_refused(shop):
    shop.use_claude()
    shop.tasks({"t": {"prompt": "@ask Which database?|sqlite|postgres", "model": "big",
                      "check": "grep -q postgres answers.txt"}})
    child = shop.begin("run")
    shop.wait(lambda: shop.rows().get("t", {}).get("state") == "asking")
    for wrong in ("9", "0", "-1"):
        assert shop.type("task", "answer", "t", wrong).code == 2
        assert shop.state() == "asking"
    assert shop.type("task", "answer", "t", "2").code == 0
    assert shop.end(child).code == 0 and shop.state() == "done"


@pytest.mark.parametrize("whom", ["supervisor", "both"])
def test_a_question_survives_everything(shop, whom):
    shop.use_claude()
    shop.tasks({"t": {"prompt": "@write x y\n@ask Which database?|sqlite|postgres", "model": "big", "tries": 1,
                      "rounds": 0, "check": "cat answers.txt $HOME/sessions/* | grep -q mariadb"}})
    child = shop.begin("run")
    shop.wait(lambda: shop.rows().get("t", {}).get("state") == "asking")
    child.kill()
    child.communicate()
    if whom == "both":
        for number in shop.processes():
            if b"stub_claude" in shop.command_of(number):
                os.kill(number, signal.SIGKILL)
    assert "Which database?" in shop.type("task", "answer").out
    answered = shop.type("task", "answer", "t", "mariadb, please")
    assert answered.code == 0
    goes_on = "\nContinue: subagent-fleet run\n"
    assert (goes_on in answered.err) == (whom == "supervisor"), answered
    done = shop.run()
    assert shop.state() == "done", done


def test_an_answer_that_ends_in_a_question_is_shown_as_one(shop):
    shop.use_claude()
    shop.tasks({"t": {"prompt": "@quiet Which database should I use?", "model": "big", "check": "true",
                      "tries": 1, "rounds": 0}})
    done = shop.run()
    assert "Which database should I use?" in done.out
    assert "Which database should I use?" in shop.type("task", "answer").out


def test_an_agent_can_ask_whatever_its_file_lists(shop):
    shop.use_claude()
    real = (shop.bin / "claude").read_text().replace("#!/bin/sh\n", "")
    shop.program("claude", f'printf "%s\\n" "$@" >> "$HOME/argv"\n{real}')
    shop.tasks({"t": {"prompt": "@write x y", "agent": "implementer", "check": "true"}})
    assert shop.run().code == 0
    words = (shop.home / "argv").read_text().splitlines()
    agents = json.loads(words[words.index("--agents") + 1])
    assert "AskUserQuestion" in agents["implementer"]["tools"]


def test_attach_that_cannot_open_changes_nothing(shop):
    shop.use_claude()
    shop.tasks({"t": {"prompt": "@write x y", "model": "big", "check": "true"}})
    assert shop.run().code == 0
    real = (shop.bin / "claude").read_text()
    (shop.bin / "claude").unlink()
    assert shop.type("task", "attach", "t", PATH="/usr/bin:/bin").code not in (0, 130)
    assert shop.state() == "done"
    (shop.bin / "claude").write_text(real)
    fleet = (shop.repo / "fleet.yaml").read_text()
    shop.write("fleet.yaml", fleet.replace("project:", "projekt:"))
    assert shop.type("task", "attach", "t").code not in (0, 130)
    shop.write("fleet.yaml", fleet)
    assert shop.state() == "done" and shop.row("t")["try"].startswith("1")


def test_a_very_long_word_is_refused_or_arrives_and_orders_go_on(shop):
    shop.tasks({"t": {"prompt": "x", "coder": shell("cat > /dev/null", "sleep 100")}})
    child = shop.begin("run")
    shop.wait(lambda: shop.works("t"))
    text = shop.place / "text"
    text.write_text("ж" * 60_000)  # what one argument can be
    for _ in range(3):
        shop.type("task", "say", "t", text.read_text())
    began = time.monotonic()
    assert shop.type("task", "stop", "t").code == 0
    assert time.monotonic() - began < 15
    assert shop.state() == "stopped"
    shop.end(child)


# -- the first command, no fleet, other coders --

def test_without_a_fleet_claude_works_on_its_own_login(shop):
    real = f'env > "$HOME/env-of-claude"\nexec "{sys.executable}" -I -S "{pathlib.Path(__file__).parents[1]}/rigs/stub_claude.py" "$@"'
    shop.program("claude", real)
    done = shop.run("fix:@write fixed.txt yes", "other:@write b.txt yes")
    assert done.code == 0, done
    assert {name: row["state"] for name, row in shop.rows().items()} == {"fix": "review", "other": "review"}
    assert "fixed.txt" in shop.files("run/fix")
    environ = (shop.home / "env-of-claude").read_text()
    assert "ANTHROPIC_BASE_URL" not in environ and "ANTHROPIC_AUTH_TOKEN" not in environ
    assert not (shop.repo / ".env.subagent-fleet").exists() and "fleet.yaml" in done.out + done.err


def test_run_makes_the_key_itself(shop):
    shop.use_claude()
    for path in shop.repo.glob(".env*"):
        path.unlink()
    shop.tasks({"t": {"prompt": "@write x y", "model": "big", "check": "test -s x"}})
    done = shop.run()
    assert done.code == 0 and shop.state() == "done", done
    assert "commit" not in done.err


def test_a_key_that_run_has_made_is_left_out_by_git(shop):
    shop.use_claude()
    (shop.repo / ".env.subagent-fleet").unlink()
    (shop.repo / ".gitignore").unlink()
    done = shop.run("t:@write x y", "--check", "test -s x")
    assert done.code == 0, done
    assert ".env.subagent-fleet" not in shop.git("status", "--porcelain")


CODERS = ["codex", "opencode", "aider", "qwen"]


@pytest.mark.parametrize("coder", CODERS)
def test_other_coders_are_a_word(shop, coder):
    shop.program(coder, f'cat > "$HOME/stdin"; printf "%s\\n" "$@" > "$HOME/argv"; {EDIT}')
    done = shop.run("fix: the login & \"quotes\"", "--coder", coder, "--check", "grep -q two a.txt",
                    OPENAI_API_KEY="k")
    assert done.code == 0, done
    told = (shop.home / "stdin").read_text() + (shop.home / "argv").read_text()
    assert "the login & \"quotes\"" in told
    assert shop.git("show", "run/fix:a.txt") == "two"


def test_words_go_to_who_works_already_and_are_followed(shop):
    shop.tasks({"slow": {"prompt": "x", "coder": shell(EDIT, WORKS), "check": "true"}},
               defaults={"coder": shell(EDIT), "check": "true"})
    child = shop.begin("run")
    shop.wait(lambda: shop.works("slow"))
    done = shop.run("quick:do it")
    assert done.code == 0 and "quick" in done.out, done
    assert shop.state("quick") == "done"
    shop.let_go()
    assert shop.end(child).code == 0 and shop.state("slow") == "done"


def test_the_task_file_is_read_again_while_run_works(shop):
    slow = {"prompt": "x", "coder": shell(EDIT, WORKS), "check": "true"}
    told = shell("cat > told.txt")
    shop.tasks({"slow": slow, "waits": {"prompt": "old words", "coder": told, "after": ["slow"], "check": "true"}})
    child = shop.begin("run")
    shop.wait(lambda: shop.works("slow"))
    time.sleep(1.1)
    shop.tasks({"slow": slow, "new": {"prompt": "y", "coder": shell(EDIT), "check": "true"},
                "waits": {"prompt": "new words", "coder": told, "after": ["slow"], "check": "true"}})
    shop.wait(lambda: "new" in shop.rows())
    shop.let_go()
    assert shop.end(child).code == 0
    assert {name: row["state"] for name, row in shop.rows().items()} == dict.fromkeys(
        ("slow", "new", "waits"), "done")
    assert shop.git("show", "run/waits:told.txt") == "new words"


def test_what_left_the_file_and_is_over_leaves_the_list_and_can_be_forgotten(shop):
    one = {"prompt": "x", "coder": shell(EDIT), "check": "true"}
    shop.tasks({"gone": one, "stays": one})
    assert shop.run().code == 0
    shop.tasks({"stays": one})
    assert set(shop.rows()) == {"stays"}
    refs = shop.git("for-each-ref", "refs/heads/run/gone", "refs/subagent-fleet/gone")
    assert shop.type("task", "forget", "gone").code == 0
    assert shop.git("for-each-ref", "refs/heads/run/gone", "refs/subagent-fleet/gone") == refs
    assert shop.type("tasks", "gone").code == 2
    assert shop.run().code == 0


def test_a_dirty_tree_is_told(shop):
    shop.write("a.txt", "my own\n")
    shop.write("new.txt", "mine\n")
    shop.tasks({"t": {"prompt": "x", "coder": shell("echo z > z"), "check": "true"}})
    shop.git("add", "tasks.json")
    done = shop.run()
    assert "Agents start from the last commit, without 2 changed files: a.txt, new.txt." in done.err
    assert (shop.repo / "a.txt").read_text() == "my own\n"


def test_worktrees_lie_outside_of_the_checkout(shop):
    before = sorted(path.name for path in shop.repo.iterdir())
    shop.commit(_gitignore="tasks.json\n")
    shop.tasks({"t": {"prompt": "x", "coder": shell(EDIT, "pwd > $HOME/where"), "check": "true"}})
    assert shop.run().code == 0
    where = pathlib.Path((shop.home / "where").read_text().strip())
    assert shop.repo not in where.parents and shop.home / "state" in where.parents
    assert shop.git("status", "--porcelain") == ""
    assert sorted(path.name for path in shop.repo.iterdir()) == sorted([*before, ".gitignore", "tasks.json"])


def test_worktrees_lie_where_the_file_says(shop):
    shop.tasks({"t": {"prompt": "x", "coder": shell(EDIT, "pwd > $HOME/where"), "check": "true"}},
               worktrees=str(shop.place / "elsewhere"))
    assert shop.run().code == 0
    where = pathlib.Path((shop.home / "where").read_text().strip())
    assert shop.place / "elsewhere" in where.parents


def test_logs_are_by_name_and_the_supervisors_own_without(shop):
    shop.tasks({"t": {"prompt": "x", "coder": shell("echo coder-says", EDIT), "setup": ["echo setup-says"],
                      "check": "echo check-says; exit 1", "tries": 1}})
    shop.run()
    assert "setup-says" in shop.type("task", "log", "t", "setup").out
    assert "check-says" in shop.type("task", "log", "t", "check").out
    assert "coder-says" in shop.type("task", "log", "t").out
    own = shop.type("task", "log")
    assert own.code == 0 and re.search(r"\bt\b.*failed", own.out), own


# The clipboard, the title, an empty screen; eight bits wide, from right to left, over itself.
STEERS = r"printf '\033]52;c;eA==\007\033]0;title\007\033[2J\302\2335m\342\200\256\rspoken'"


def on_a_terminal(shop, *words):
    """What a command writes on a terminal."""
    child, master = pty.fork()
    if child == 0:
        os.chdir(shop.repo)
        os.execve(sys.executable, [sys.executable, "-I", "-S", PROGRAM, *words],
                  {**shop.environ, "TERM": "xterm", "NO_COLOR": "1"})
    said = b""
    with contextlib.suppress(OSError):
        for part in iter(lambda: os.read(master, 65536), b""):
            said += part
    os.close(master)
    os.waitpid(child, 0)
    return said.decode("utf-8", "replace").replace("\r\n", "\n")


@pytest.mark.parametrize("kind", [None, "setup", "check", "stderr", "raw"])
def test_no_log_of_a_task_steers_the_terminal(shop, kind):
    shop.work(coder=shell(STEERS, f"{STEERS} >&2", EDIT), setup=[STEERS],
              check=f"{STEERS}; exit 1")
    said = on_a_terminal(shop, "task", "log", "t", *filter(None, [kind]))
    assert "spoken" in said, said
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", said), ascii(said)


# -- nothing of another's --

def test_a_copy_of_a_repository_takes_nothing_of_the_original_over(shop):
    shop.tasks({"t": {"prompt": "x", "coder": shell("echo x >> $HOME/count", EDIT, "touch $HOME/began", "sleep 8"),
                      "check": "grep -q two a.txt"}})
    child = shop.begin("run")
    shop.wait(lambda: (shop.home / "began").exists())
    tree = shop.worktree("t")
    copied = shop.place / "copied"
    subprocess.run(["cp", "-a", str(shop.repo), str(copied)], check=True)
    (copied / "tasks.json").write_text(json.dumps({"tasks": {"t": {
        "prompt": "x", "coder": shell("echo three > a.txt"), "check": "true"}}}))
    there = shop.begin("run", "--trust", cwd=copied)
    refused = shop.end(there)
    assert refused.code == 3 and f"rm -r {copied}" in refused.err, refused
    assert (tree / "a.txt").read_text() == "two\n"
    assert shop.end(child).code == 0 and shop.state() == "done"
    assert shop.git("show", "run/t:a.txt") == "two"
    assert (shop.home / "count").read_text() == "x\n", "its agent was ended and begun again"


# -- one thread waits for nobody --

def test_a_pipe_that_an_agent_leaves_parks_it_and_holds_nobody_up(shop):
    shop.tasks({"pipe": {"prompt": "x", "coder": shell(EDIT, "mkfifo .gitignore"), "check": "true"},
                "good": {"prompt": "x", "coder": shell("sleep 1", EDIT), "check": "true"},
                "other": {"prompt": "x", "coder": shell(EDIT, "mkfifo deep-pipe"), "check": "true"},
                "socket": {"prompt": "x", "check": "true", "coder": shell(
                    EDIT, f'{sys.executable} -c "import socket; socket.socket(socket.AF_UNIX).bind(\'s\')"')}},
               defaults={"tries": 1})
    child = shop.begin("run")
    shop.wait(lambda: shop.rows().get("good", {}).get("state") == "done", 30)
    assert shop.end(child, 60).code == 1
    states = {name: row["state"] for name, row in shop.rows().items()}
    assert states == {"pipe": "parked", "good": "done", "other": "parked", "socket": "parked"}


def test_many_files_of_one_task_hold_no_order_for_another_up(shop):
    count = int(os.environ.get("SUBAGENT_FLEET_FILES", "30000"))
    make = f"import os; [open(str(n), 'w').write(str(n)) for n in range({count})]"
    shop.tasks({"many": {"prompt": "x", "check": "true", "coder": shell(
                    f'{sys.executable} -I -S -c "{make}"', "touch $HOME/made")},
                "other": {"prompt": "x", "coder": shell("sleep 100")}}, defaults={"tries": 1})
    child = shop.begin("run")
    shop.wait(lambda: (shop.home / "made").exists(), 240)
    time.sleep(0.5)
    began = time.monotonic()
    assert shop.type("task", "stop", "other").code == 0
    assert time.monotonic() - began < 6, "it waited for another task's git"
    shop.end(child, 300)
    assert shop.state("many") == "done"


@pytest.mark.parametrize("who", ["a command", "claude"])
def test_a_line_without_an_end_takes_no_memory(shop, who):
    size = int(os.environ.get("SUBAGENT_FLEET_OUTPUT", "150000000"))
    long = f"head -c {size} /dev/zero | tr '\\0' x"
    task = {"prompt": "x", "coder": shell(EDIT, long, "sleep 2")}
    if who == "claude":
        shop.use_claude()
        task = {"prompt": f"@run {EDIT}; {long}\n@sleep 2", "model": "big"}
    shop.tasks({"t": {**task, "check": "grep -q two a.txt"}})
    child = shop.begin("run")
    peak = 0
    while child.poll() is None:
        with contextlib.suppress(OSError):
            found = re.search(r"VmHWM:\s+(\d+)", (PROC / f"{child.pid}/status").read_text())
            peak = max(peak, int(found[1]) if found else 0)
        time.sleep(0.05)
    assert shop.end(child).code == 0
    assert 10_000 < peak < 180_000, f"{peak} kB"


# A clock that jumps by two hours, as after a night's sleep, once a file is there.
JUMPING = """\
import os, sys, time
real = time.time
flag, seconds = sys.argv[1], float(sys.argv[2])
time.time = lambda: real() + (seconds if os.path.exists(flag) else 0)
del sys.argv[:3]
main = sys.modules["__main__"].__dict__
main.update(__file__={program!r}, __cached__="as it is")  # it does not start itself anew
with open({program!r}, encoding="utf-8") as stream:
    exec(compile(stream.read(), {program!r}, "exec"), main)
"""


@pytest.mark.parametrize("seconds", [7200, -7200])
def test_a_deadline_is_working_time_whatever_the_wall_clock_does(shop, seconds):
    shop.tasks({"t": {"prompt": "x", "coder": shell("touch $HOME/jump", "sleep 4", EDIT),
                      "check": "grep -q two a.txt", "deadline": "10m", "stall": "5m", "tries": 1}})
    child = subprocess.Popen(
        [sys.executable, "-c", JUMPING.format(program=str(SCRIPT)), str(shop.home / "jump"), str(seconds),
         "subagent-fleet", "run"],
        cwd=shop.repo, env=shop.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE)
    done = shop.end(child)
    assert done.code == 0 and shop.state() == "done", done
    # Set back, the clock tells nothing: what its agent has worked is known.
    assert shop.receipt()["seconds"] > 3


def test_names_out_of_scope_write_nothing_on_a_terminal(shop):
    name = "evil\x1b]0;owned\x07\nnew"
    coder = [sys.executable, "-c", f"open({name!r}, 'w').write('x'); open('a.txt', 'w').write('two')"]
    assert shop.work(coder=coder, check="true", touch=["a.txt"]) == "parked"
    for words in (("tasks", "t"), ("tasks",), ("task", "log", "t")):
        said = on_a_terminal(shop, *words)
        assert said and "owned" in said or words != ("tasks", "t")
        assert "\x1b]" not in said and "\x07" not in said, words


# -- many at once --

def test_stop_ends_every_tree_within_two_seconds(shop):
    stubborn = ["trap '' TERM HUP INT; sleep 300", "setsid sh -c 'sleep 300' & sleep 300",
                "nohup sh -c 'sleep 300' >/dev/null 2>&1 & sleep 300",
                "(setsid sh -c '(trap \"\" TERM; sleep 300) &' &) ; sleep 300"]
    shop.tasks({f"t{number}": {"prompt": "x", "coder": shell("touch $HOME/up$FLEET_TASK_ID",
                                                             stubborn[number % 4])}
                for number in range(8)}, max=8)
    child = shop.begin("run")
    shop.wait(lambda: len(list(shop.home.glob("up*"))) == 8, 60)
    time.sleep(0.5)
    began = time.monotonic()
    done = shop.type("task", "stop", "*")
    seconds = time.monotonic() - began
    assert done.code == 0 and len(re.findall("stopped", done.out)) == 8, done
    times = [float(number) for number in re.findall(r"in (\d+\.\d) s", done.out)]
    assert len(times) == 8 and max(times) <= 2.0, done
    shop.end(child)
    assert not shop.processes(), seconds


@pytest.mark.parametrize("is_watched", [True, False])
def test_a_fleet_that_is_not_valid_keeps_nobody_from_looking_and_stopping(shop, is_watched):
    shop.tasks({"t": {"prompt": "x", "coder": shell(EDIT, WORKS), "check": "true"}})
    child = shop.begin("run")
    shop.wait(lambda: shop.works("t"))
    shop.write("fleet.yaml", "nodes: {mini: {endpoint: nowhere}}\n")
    if not is_watched:
        child.kill()
        child.communicate()
    looked = shop.type("tasks")
    assert looked.code == 0 and re.search("t +running", looked.out), looked
    assert re.match(r".*fleet\.yaml is not valid: \S+ validate\n", looked.err), looked
    done = shop.type("task", "stop", "t")
    assert done.code == 0 and re.search("t +stopped", done.out), done
    if is_watched:
        shop.end(child)
    retried = shop.type("task", "retry", "t")
    assert retried.code == 0 and re.search("t +waits", retried.out), retried
    assert shop.run().code == 1


def test_slots_are_all_used_and_never_exceeded(shop):
    count, most = 9, 3
    log = 'date +"in %s%N" >> $HOME/log; sleep 3; date +"out %s%N" >> $HOME/log'
    shop.tasks({f"t{number}": {"prompt": "x", "coder": shell(EDIT, log), "check": "true"}
                for number in range(count)}, max=most)
    assert shop.run().code == 0
    now = peak = 0
    lines = sorted((shop.home / "log").read_text().splitlines(), key=lambda line: int(line.split()[1]))
    for line in lines:
        now += 1 if line.startswith("in") else -1
        peak = max(peak, now)
    assert len(lines) == 2 * count and peak == most


def test_of_eight_that_run_at_once_each_task_is_done_once(shop):
    coder = shell('mkdir "$HOME/lock-$FLEET_TASK_ID" || echo double >> "$WITNESS"', EDIT, "sleep 1",
                  'rmdir "$HOME/lock-$FLEET_TASK_ID"', 'echo x >> "$HOME/count-$FLEET_TASK_ID"')
    shop.tasks({name: {"prompt": "x", "coder": coder, "check": "grep -q two a.txt"} for name in "abc"})
    children = [shop.begin("run") for _ in range(8)]
    ends = [shop.end(child) for child in children]
    codes = [done.code for done in ends]
    assert set(codes) <= {0, 3} and 0 in codes, "\n".join(map(str, [*ends, shop.rows()]))
    assert shop.witness == "" and {row["state"] for row in shop.rows().values()} == {"done"}
    assert all((shop.home / f"count-{name}").read_text() == "x\n" for name in "abc")


@pytest.mark.parametrize("seed", range(int(os.environ.get("SUBAGENT_FLEET_SEEDS", "5"))))
def test_random_kills_lose_nothing_and_double_nothing(shop, seed):
    rng = random.Random(seed)
    lock = 'exec 9>"$HOME/lock-$FLEET_TASK_ID"; flock -n 9 || echo double >> "$WITNESS"'
    coder = shell(lock, "sleep 0.3", "echo more >> b.txt", EDIT, "sleep 0.3")
    names = ["a", "b", "c", "d"]
    shop.tasks({name: {"prompt": "x", "coder": coder, "check": "grep -q two a.txt", "setup": ["sleep 0.1"],
                       "after": ["a"] if name == "d" else []} for name in names})
    for _ in range(rng.randrange(3, 7)):
        child = shop.begin("run")
        time.sleep(rng.uniform(0.2, 2.5))
        if rng.random() < 0.4:
            victims = [number for number in shop.processes() if number != child.pid]
            for number in rng.sample(victims, min(len(victims), 2)):
                with contextlib.suppress(OSError):
                    os.kill(number, signal.SIGKILL)
        child.kill()
        child.communicate()
    done = shop.run()
    if done.code == 1:  # lost too often: parked, which a person takes up
        shop.type("task", "retry", "*")
        done = shop.run()
    assert {row["state"] for row in shop.rows().values()} == {"done"}, done
    assert shop.witness == ""
    for name in names:
        assert shop.git("show", f"run/{name}:a.txt") == "two"
    assert [number for number in shop.processes() if b"sleep" in shop.command_of(number)] == []


# -- what lies around --

def test_bash_that_leaves_its_scope_is_found_afterwards(shop):
    coder = shell("mkdir -p src docs", "echo x > src/x", "python3 -c \"open('docs/y', 'w').write('y')\"")
    assert shop.work(coder=coder, check="true", touch=["src/**"]) == "parked"
    row = shop.row("t")
    assert row["cause"] == "scope" and "docs/y" in row["reason"] and not shop.has_work("t")
    assert (shop.worktree("t") / "docs/y").exists()
    assert shop.receipt()["outside"] == ["docs/y"]


def test_receipts_hold_no_prompt_and_no_answer_and_are_the_persons_alone(shop):
    shop.use_claude()
    shop.tasks({"t": {"prompt": "topsecretprompt\n@write x y\n@quiet topsecretanswer", "model": "big",
                      "check": "true"}})
    shop.run()
    common = pathlib.Path(shop.git("rev-parse", "--path-format=absolute", "--git-common-dir"))
    path = common / "subagent-fleet/run/tasks/t/1/receipt.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert "topsecret" not in path.read_text()
    assert (common / "subagent-fleet/run").stat().st_mode & 0o777 == 0o700
    assert not list((common / "subagent-fleet").rglob("settings.json")), "it holds the key"


HISTORIES = ["git commit -q --allow-empty -m e$R", "echo $R > f$R; git add f$R", "echo $R >> a.txt",
             "git commit -qam c$R", "git stash -q -u", "git checkout -q -b side$R", "rm -f a.txt",
             "git checkout -q --detach", "git reset -q --soft HEAD~1", "git reset -q HEAD",
             "echo $R > u$R.txt", "git add -A; echo more$R >> u$R.txt", "git commit -q --amend -m amended$R",
             "mkdir -p d$R; echo $R > d$R/x", "ln -s a.txt link$R", "chmod +x a.txt", "echo $R > i$R.log",
             "git tag t$R", "git update-index --assume-unchanged a.txt", "git rm -q --cached a.txt"]


def objects(shop, tree):
    """What a person could lose of a place: each file, each commit of its refs and their logs."""
    found = set()
    ignored = shop.git("ls-files", "-oi", "--exclude-standard", "-z", cwd=tree).split("\0")
    for path in tree.rglob("*"):
        inner = str(path.relative_to(tree))
        if path.is_file() and not path.is_symlink() and not inner.startswith(".git/") and inner not in ignored:
            found.add(shop.git("hash-object", "--no-filters", str(path), cwd=tree))
    found.update(shop.git("rev-list", "--all", "--reflog", "HEAD", cwd=tree).split())
    return found


@pytest.mark.parametrize("seeds", in_parts(int(os.environ.get("SUBAGENT_FLEET_HISTORIES", "48")) // 4, 50), ids=str)
def test_tidy_loses_nothing_of_random_histories(shop, seeds):
    shop.commit(_gitignore="*.log\n")
    tasks = {}
    for seed in seeds:
        rng = random.Random(seed)
        steps = [f"R={rng.randrange(10**6)}; {step}" for step in rng.choices(HISTORIES, k=rng.randrange(3, 10))]
        tasks[f"h{seed}"] = {"prompt": "x", "coder": shell(*(f"{{ {step}; }} 2>/dev/null" for step in steps), "true"),
                             "check": rng.choice(["true", "false"]), "tries": 1}
    shop.tasks(tasks)
    shop.end(shop.begin("run"), 600)  # fifty of them, and others want the processors, too
    trees = {name: shop.worktree(name) for name in tasks}
    lost_if_gone = {name: objects(shop, tree) for name, tree in trees.items() if tree}
    before = set(shop.git("rev-list", "--all").split())
    shop.type("task", "tidy")
    reachable = {line.split()[0] for line in shop.git("rev-list", "--objects", "--all").splitlines()}
    assert before <= reachable
    removed = [name for name, tree in trees.items() if tree and not tree.exists()]
    assert removed, "nothing was tidied at all"
    for name in removed:
        assert lost_if_gone[name] - reachable == set(), (name, tasks[name]["coder"])


def test_a_dry_run_of_tidy_removes_nothing(shop):
    assert shop.work(coder=shell(EDIT), check="true") == "done"
    before = shop.git("for-each-ref")
    assert "t" in shop.type("task", "tidy", "--dry-run").out
    assert shop.git("for-each-ref") == before
    assert shop.worktree("t").is_dir() and shop.worktree("t.check").is_dir()


def test_a_state_file_is_old_or_new_and_never_torn(shop):
    """What lies in .git after a run: one file of state a task, readable at any moment."""
    shop.tasks({name: {"prompt": "x", "coder": shell(EDIT, "sleep 0.2"), "check": "true"} for name in "ab"})
    child = shop.begin("run")
    run = shop.repo / ".git/subagent-fleet/run/tasks"
    read = 0
    while child.poll() is None:
        for path in run.glob("*/state.json"):
            with contextlib.suppress(FileNotFoundError):
                json.loads(path.read_text())
                read += 1
        time.sleep(0.01)
    assert shop.end(child).code == 0 and read > 10
    assert not (shop.repo / ".git/subagent-fleet/run/journal.jsonl").exists()


def test_no_gateway_is_left_behind(shop):
    shop.use_claude()
    shop.tasks({"t": {"prompt": "@write x y", "model": "big", "check": "true"}})
    assert shop.run().code == 0
    shop.wait(lambda: not shop.processes(), 10)


def test_a_run_that_ends_with_an_error_before_any_task_begins_starts_no_gateway(shop):
    shop.use_claude()
    (shop.repo / ".git/subagent-fleet/run").mkdir(parents=True)
    (shop.repo / ".git/subagent-fleet/run/tasks").write_text("in the way")
    done = shop.run("t:@write x y")
    assert done.code == 1 and "Serving" not in done.err and "error: cannot" in done.err, done
    assert not shop.processes()


def test_the_deadline_holds_without_a_supervisor(shop):
    hang = "touch $HOME/$FLEET_TASK_ID && exec sleep 300"
    shop.tasks({"t": {"prompt": "x", "coder": shell(hang)},
                "u": {"prompt": "x", "coder": shell(EDIT), "check": f"grep -q two a.txt && {hang}"}},
               defaults={"deadline": "15s"})
    child = shop.begin("run")
    shop.wait(lambda: (shop.home / "t").exists() and (shop.home / "u").exists())
    child.kill()
    child.communicate()
    assert len(shop.processes()) >= 2
    shop.wait(lambda: not shop.processes(), 90)


# -- a person's own git --

SETTINGS = {
    "core.ignoreStat": "true", "core.checkStat": "minimal", "core.trustctime": "false", "core.fileMode": "false",
    "core.autocrlf": "true", "core.safecrlf": "true", "core.quotePath": "true", "core.abbrev": "4",
    "core.splitIndex": "true", "core.untrackedCache": "true", "index.version": "4", "feature.manyFiles": "true",
    "core.attributesFile": "HOME/attributes", "core.excludesFile": "HOME/excludes", "core.pager": "false",
    "core.hooksPath": "HOME/hooks", "core.sparseCheckout": "true", "core.worktree": "HOME", "core.logAllRefUpdates": "false",
    "color.ui": "always", "diff.external": "HOME/witness.sh", "diff.noprefix": "true", "diff.renames": "copies",
    "diff.ignoreSubmodules": "all", "diff.orderFile": "HOME/none", "diff.mnemonicPrefix": "true",
    "diff.relative": "true", "status.showUntrackedFiles": "no", "status.relativePaths": "false",
    "status.short": "true", "commit.gpgSign": "true", "log.showSignature": "true", "format.pretty": "oneline",
    "worktree.guessRemote": "true", "checkout.defaultRemote": "x", "i18n.commitEncoding": "latin1",
    "user.useConfigOnly": "true", "gc.auto": "1", "blame.ignoreRevsFile": "none", "core.editor": "false",
}


@pytest.mark.parametrize("name", SETTINGS)
def test_no_setting_of_a_persons_git_changes_a_verdict(shop, name):
    shop.program("witness.sh", 'echo ran >> "$WITNESS"', shop.home)
    (shop.home / "hooks").mkdir()
    for hook in ("post-checkout", "pre-commit", "reference-transaction", "post-index-change"):
        shop.program(hook, 'echo ran >> "$WITNESS"; exit 1', shop.home / "hooks")
    (shop.home / "attributes").write_text("*.txt diff=none -text\n")
    (shop.home / "excludes").write_text("*.own\n")
    value = SETTINGS[name].replace("HOME", str(shop.home))
    shop.git("config", "--global", name, value)
    secret = "echo own > x.own; echo kept > kept.txt"
    shop.tasks({"edit": {"prompt": "x", "coder": shell(EDIT, secret, "sleep 1.1"), "check": "grep -q two a.txt"},
                "none": {"prompt": "x", "coder": ["true"], "check": "true"},
                "out": {"prompt": "x", "coder": shell("mkdir docs", "echo x > docs/x"), "check": "true",
                        "touch": ["src/**"]},
                "quiet": {"prompt": "x", "coder": ["true"], "check": "true", "changes": "none"}},
               defaults={"tries": 1})
    done = shop.run()
    states = {name: row["state"] for name, row in shop.rows().items()}
    assert states == {"edit": "done", "none": "failed", "out": "parked", "quiet": "done"}, done
    with contextlib.ExitStack() as stack:
        stack.callback(shop.git, "config", "--global", "--unset", name)
        diff = shop.type("task", "diff", "edit").out
    assert shop.git("show", "run/edit:a.txt") == "two" and "two" in diff
    left = {"x.own"} if name == "core.excludesFile" else set()
    assert shop.files("run/edit") == {"a.txt", "kept.txt", "x.own"} - left
    assert shop.type("task", "tidy").code == 0
    assert shop.witness == ""


def test_the_work_of_a_person_in_the_checkout_is_never_touched(shop):
    shop.commit(_gitignore="*.log\n")
    shop.write("a.txt", "mine, not staged\n")
    shop.write("staged.txt", "mine, staged\n")
    shop.git("add", "staged.txt")
    shop.write("new.txt", "mine, untracked\n")
    shop.write("x.log", "mine, ignored\n")
    shop.git("stash", "store", "-m", "mine", shop.git("stash", "create"))
    one = {"prompt": "x", "check": "grep -q two a.txt", "tries": 1}
    shop.tasks({"good": {**one, "coder": shell(EDIT)}, "bad": {**one, "coder": ["true"]},
                "parked": {**one, "coder": ["true"], "setup": ["false"]},
                "stash": {**one, "coder": shell("echo x > x", "git stash -q -u", EDIT)}})

    def seen():
        files = {path.name: path.read_bytes() for path in shop.repo.iterdir() if path.is_file()}
        return files, (shop.repo / ".git/index").read_bytes(), (shop.repo / ".git/HEAD").read_bytes(), \
            shop.git("rev-parse", "main"), shop.git("diff", "--cached")
    before = seen()
    shop.run()
    shop.type("task", "retry", "*")
    shop.run()
    shop.type("task", "tidy")
    assert seen() == before
    assert "mine" in shop.git("stash", "list")


def test_files_in_a_submodule_that_was_never_checked_out_park_and_stay(shop):
    shop.add_submodule()
    assert shop.work(coder=shell(EDIT, "echo mine > sub/s.txt"), check="grep -q two a.txt") == "parked"
    assert shop.row("t")["cause"] == "nested-repository" and "sub" in shop.row("t")["reason"]
    shop.type("task", "tidy")
    assert (shop.worktree("t") / "sub/s.txt").read_text() == "mine\n"


def test_a_review_whose_commits_a_person_has_removed_is_in_nobodys_way(shop):
    shop.tasks({"t": {"prompt": "x", "coder": shell(EDIT)}})
    assert shop.run().code == 0 and shop.state() == "review"
    shop.type("task", "tidy")
    for ref in shop.git("for-each-ref", "--format=%(refname)", "refs/subagent-fleet", "refs/heads/run").split():
        shop.git("update-ref", "-d", ref)
    shop.git("reflog", "expire", "--expire=all", "--all")
    shop.git("gc", "-q", "--prune=now")
    assert shop.state() == "review"
    shop.type("task", "accept", "t")
    assert shop.state() != "done"
    assert shop.type("task", "forget", "t").code == 0
    assert shop.rows() == {}


def test_a_task_cannot_come_after_itself(shop):
    done = shop.run("a:one", "b:two", "--after", "b")
    assert done.code == 2 and "--after: unknown task `b`" in done.err, done
    assert shop.rows() == {}


def test_a_coder_without_a_program_parks_without_a_check_too(shop):
    assert shop.work(coder=["sh", "-c", "no-such-coder"]) == "parked"
    assert "no-such-coder" in shop.row("t")["reason"]


# -- odd things that agents do to git, and odd places --

ODD = ["git checkout -q --detach; git branch -q -D run/t", "git update-ref -d refs/heads/run/t",
       "touch $(git rev-parse --git-dir)/index.lock", "git checkout -q --orphan new",
       "git branch -q -m run/t mine", "echo junk > $(git rev-parse --git-dir)/index",
       "git pack-refs --all", "ln -s /etc out; ln -s nowhere dangling", "git symbolic-ref HEAD refs/heads/main"]


@pytest.mark.parametrize("how", ODD)
def test_what_an_agent_does_to_git_is_survived_or_parked_with_words(shop, how):
    state = shop.work(coder=shell(EDIT, how), check="grep -q two a.txt")
    assert state in ("done", "parked"), shop.said
    if state == "done":
        assert shop.git("show", "run/t:a.txt") == "two"
    else:
        assert shop.row("t")["reason"]
    shop.type("task", "tidy")
    tree = shop.worktree("t")
    assert tree and (tree / "a.txt").read_text() == "two\n" or shop.kept("two")
    assert shop.git("rev-parse", "main") == shop.start


def test_a_worktree_that_was_spoiled_is_begun_anew_with_fresh(shop):
    spoil = "test -e $HOME/once || { touch $HOME/once; rm -rf .git; }"
    assert shop.work(coder=shell(spoil, EDIT), check="grep -q two a.txt") == "parked"
    assert shop.type("task", "retry", "--fresh", "t").code == 0
    done = shop.run()
    assert done.code == 0 and shop.state() == "done", done


def test_a_place_may_have_any_name(tmp_path):
    shop = Shop(tmp_path / "it's a \"sp ace\" ü $(x)")
    shop.write(".env", "SECRET=hunter2\n")
    shop.write(".gitignore", ".env\n")
    state = shop.work(coder=shell(EDIT, "echo x > 'né w'"), copy=[".env"], setup=["true"],
                      check="test -s .env && grep -q two a.txt")
    assert state == "done", shop.said
    assert shop.files("run/t") == {"a.txt", "né w"}
    assert shop.type("task", "diff", "t").code == 0 and shop.type("task", "tidy").code == 0
    assert shop.worktree("t") is None


@pytest.mark.parametrize("home", ["relative", ""])
def test_a_state_home_that_is_no_path_does_not_count(shop, home):
    shop.environ["XDG_STATE_HOME"] = home
    assert shop.work(coder=shell(EDIT), check="true") == "done", shop.said
    assert not (shop.repo / "relative").exists()
    assert shop.home / ".local/state" in shop.worktree("t").parents


def test_a_coder_that_says_nothing_is_taken_up_again(shop):
    shop.tasks({"t": {"prompt": "x", "coder": shell("echo x >> began", WORKS), "check": "true"}})
    child = shop.begin("run")
    shop.wait(lambda: shop.works("t"))
    child.kill()
    child.communicate()
    again = shop.begin("run")
    shop.wait(lambda: json.loads(shop.type("tasks", "--json").out)["supervisor"])
    shop.let_go()
    assert shop.end(again).code == 0
    assert shop.git("show", "run/t:began") == "x", "it was started twice"


def test_who_follows_goes_on_when_the_supervisor_has_gone(shop):
    shop.tasks({"slow": {"prompt": "x", "coder": shell(EDIT, WORKS), "check": "true"}}, max=1,
               defaults={"coder": shell(EDIT), "check": "true"})
    child = shop.begin("run")
    shop.wait(lambda: shop.works("slow"))
    follower = shop.begin("run", "quick:do it")
    shop.wait(lambda: "quick" in shop.rows())
    child.kill()
    child.communicate()
    shop.let_go()
    done = shop.end(follower, 30)
    assert done.code == 0, done
    assert (shop.state("quick"), shop.state("slow")) == ("done", "done"), f"{done} {shop.rows()}"


def test_a_worktree_that_a_person_has_removed_names_the_way_on(shop):
    assert shop.work(coder=shell(EDIT), check="true") == "done"
    shutil.rmtree(shop.worktree("t"))
    assert shop.type("task", "retry", "t").code == 0
    assert shop.run().code == 1 and shop.row("t")["cause"] == "worktree-gone"
    assert "task retry t --fresh" in shop.row("t")["reason"]
    assert shop.type("task", "retry", "t", "--fresh").code == 0
    assert shop.run().code == 0 and shop.state() == "done"


def test_run_all_names_what_is_wrong_in_a_repository_and_goes_on(shop):
    assert shop.work(coder=shell(EDIT), check="true") == "done"
    other = Shop(shop.place / "other")
    other.environ.update(HOME=shop.environ["HOME"], XDG_STATE_HOME=shop.environ["XDG_STATE_HOME"])
    other.tasks({"u": {"prompt": "x", "coder": shell(EDIT), "check": "true"}})
    assert other.run().code == 0
    shop.tasks({"bad": {}})
    other.tasks({"more": {"prompt": "x", "coder": shell(EDIT), "check": "true"}})
    done = shop.run("--all")
    assert done.code == 1 and f"{shop.repo}: " in done.err and "bad.prompt is missing" in done.err, done
    assert other.state("more") == "done"


def test_attach_leaves_no_gateway_behind(shop):
    shop.use_claude()
    shop.tasks({"t": {"prompt": "@write x y", "model": "big"}})
    assert shop.run().code == 0
    done = shop.type("task", "attach", "t")
    assert "Serving" in done.err and shop.state() == "review", done
    shop.wait(lambda: not shop.processes(), 10)


@pytest.mark.parametrize("second", [("run", "b:do it"), ("run", "--detach", "b:do it"),
                                    ("task", "add", "b:do it")])
def test_what_is_handed_to_a_run_of_other_tasks_is_done(shop, second):
    shop.tasks({"other": {"prompt": "x"}}, max=1,
               defaults={"coder": shell(EDIT, WORKS), "check": "true"})
    child = shop.begin("run", "a:do it")
    shop.wait(lambda: shop.works("a"))
    handing = shop.begin(*second)
    shop.wait(lambda: "b" in shop.rows())
    shop.let_go()
    handed, first = shop.end(handing), shop.end(child)
    assert handed.code == 0, handed
    assert first.code == 0 and "2 done." in first.out, first
    assert (shop.state("a"), shop.state("b")) == ("done", "done"), (first, handed)


def test_a_task_that_was_added_before_is_not_a_selections(shop):
    shop.tasks({"other": {"prompt": "x"}}, defaults={"coder": shell(EDIT), "check": "true"})
    assert shop.type("task", "add", "early:do it").code == 0
    assert shop.run("a:do it").code == 0
    assert (shop.state("a"), shop.state("early")) == ("done", "waiting")


def test_a_forgotten_task_that_is_typed_again_is_done_anew(shop):
    shop.tasks({"other": {"prompt": "x"}}, defaults={"coder": shell(EDIT), "check": "true"})
    assert shop.run("a:do it").code == 0 and shop.type("task", "forget", "a").code == 0
    done = shop.run("a:do it")
    assert done.code == 0 and "1 done." in done.out, done
    assert shop.state("a") == "done" and shop.row("a")["branch"] != "run/a", done
    assert shop.type("task", "forget", "a").code == 0
    assert shop.type("task", "add", "a:do it").code == 0
    assert shop.state("a") == "waiting"


def test_a_forgotten_task_of_the_file_comes_back_when_it_is_retried(shop):
    shop.tasks({"t": {"prompt": "x", "coder": shell("exit 3"), "tries": 1}})
    assert shop.run().code == 1 and shop.type("task", "forget", "t").code == 0
    idle = shop.run()
    assert idle.out == "No tasks. Forgotten: t. To try one again: subagent-fleet task retry t\n", idle
    nothing = shop.type("task", "retry", "*")  # its name was not typed
    assert nothing.code == 0 and nothing.err == "There are no tasks.\n"
    assert shop.type("task", "retry", "t").code == 0 and shop.state("t") == "waiting"
    assert shop.run().code == 1 and shop.row("t")["state"] == "failed"


def test_a_stop_waits_for_no_task_that_was_told_something_before(shop):
    assert shop.work("a", coder=shell(EDIT), check="true") == "done"
    assert shop.type("task", "say", "a", "more").code == 0
    assert shop.type("task", "add", "c:three", "--coder", "[cat]").code == 0
    began = time.monotonic()
    assert shop.type("task", "stop", "c").code == 0 and shop.state("c") == "stopped"
    assert time.monotonic() - began < 20  # a second; it waited for `a`, which nobody stops, 30 s
    assert shop.state("a") == "waiting"


def test_land_says_why_a_task_that_is_named_does_not(shop):
    shop.tasks({"looks": {"prompt": "x", "coder": shell(EDIT)}, "fails": {
        "prompt": "x", "coder": shell("exit 3"), "check": "true", "tries": 1}, "good": {
            "prompt": "x", "coder": shell("echo x > new.txt"), "check": "true"}})
    assert shop.run().code == 1
    said = " ".join(shop.type("task", "land", "looks", "fails", "good").out.split())
    assert "1 landed on main" in said and "looks is in review: subagent-fleet task accept looks" in said
    assert "fails is not done: it is failed." in said and "good has" not in said
    again = shop.type("task", "land", "good")
    assert again.out == "Nothing has landed.\ngood has landed on main before.\n", again


def test_a_group_is_known_before_its_twins_exist(shop):
    shop.tasks({"t": {"prompt": "x", "times": 2}, "other": {"prompt": "x"}}, defaults={"coder": shell(EDIT)})
    done = shop.type("task", "land", "t")
    assert done.code == 1 and "no tasks to land" in done.err and "fix: subagent-fleet run\n" in done.err, done
    done = shop.type("task", "add", "t:do it")
    assert done.code == 2 and "there is already a task `t`" in done.err, done
    assert shop.type("task", "add", "last:do it", "--after", "t", "--coder", "[cat]").code == 0
    assert shop.run("t").code == 0
    rows = {name: row["state"] for name, row in shop.rows().items()}
    assert rows == {"t-a": "review", "t-b": "review", "other": "waiting", "last": "waiting"}
    assert shop.row("last")["now"].startswith("for t-a (review), t-b (review)")
    done = shop.type("task", "land", "t", "other")
    assert re.findall(r"(\S+) (?:is in review|is not done: it is waiting)", done.out) == ["t-a", "t-b", "other"], done


def test_words_that_do_not_do_name_those_that_do(shop):
    shop.tasks({"other": {"prompt": "x"}}, defaults={"coder": shell(EDIT)})
    done = shop.run("login")
    assert done.code == 2 and "run 'login:what to do'" in done.err, done
    assert shop.type("task", "add", "a:do it", "--check", "pytset -q").code == 0
    done = shop.type("task", "forget", "a")
    assert done.code == 1 and "task stop a" in " ".join(done.out.split()), done
    done = shop.run("a")
    assert done.code == 1 and "change `check:`" not in done.out, done
    assert "task retry a --check COMMAND" in " ".join(done.out.split()), done
    (shop.repo / "tasks.json").rename(shop.place / "tasks.json")
    done = shop.run("a", "--check", "grep two a.txt")
    assert done.code == 2 and "fix: subagent-fleet task retry a --check 'grep two a.txt'" in done.err, done
    (shop.place / "tasks.json").rename(shop.repo / "tasks.json")
    done = shop.type("task", "retry", "a", "--check", "grep two a.txt")
    assert done.code == 0 and shop.run().code == 0, done
    assert shop.state("a") == "done" and shop.row("a")["reason"] == ""
    done = shop.type("task", "retry", "a", "--check", "")
    assert done.code == 2 and "expected a shell command, or `none`" in done.err, done
    shop.type("task", "retry", "a", "--check", "none")
    assert shop.run().code == 0 and shop.state("a") == "review"
    assert shop.run("other").code == 0
    done = shop.type("task", "retry", "other", "--check", "true")
    assert done.code == 2 and "write `check:` below `other:` in" in done.err, done


def test_a_claude_that_is_not_logged_in_parks_and_names_the_way_on(shop):
    said = json.dumps({"type": "result", "subtype": "success", "is_error": True, "num_turns": 1,
                       "result": "Not logged in · Please run /login",
                       "api_error_status": None, "terminal_reason": "api_error"})
    shop.program("claude", f"read line; echo '{said}'; read line")
    done = shop.end(shop.begin("run", "a:do it"), 25)
    assert done.code == 1 and shop.state("a") == "parked", done
    assert "type /login in `claude`" in shop.row("a")["reason"], done


def test_a_task_that_waits_for_a_question_says_which(shop):
    shop.use_claude(**{"max_parallel: 4": "max_parallel: 1"})
    shop.tasks({"db": {"prompt": "@ask Which?|one|two", "model": "big"},
                "fix": {"prompt": "@write x y", "model": "big"}})
    child = shop.begin("run")
    shop.wait(lambda: shop.rows().get("db", {}).get("state") == "asking")
    child.send_signal(signal.SIGINT)
    assert "nothing checks them" in shop.end(child).out
    assert "nothing checks them" in shop.type("tasks").err
    child = shop.begin("run", "fix")
    shop.wait(lambda: json.loads(shop.type("tasks", "--json").out)["supervisor"])
    time.sleep(1)
    child.send_signal(signal.SIGINT)
    done = shop.end(child)
    assert "task answer db" in " ".join(done.out.split()), done
    assert shop.type("task", "stop", "*").code == 0


# -- small things that a person meets --

def test_what_is_left_of_a_worktree_that_was_removed_by_hand_is_tidied(shop):
    assert shop.work(coder=shell(EDIT), check="true") == "done"
    shutil.rmtree(shop.worktree("t"))
    done = shop.type("task", "tidy", "--dry-run")
    assert re.search("t +would remove", done.out) and shop.worktree("t.check").is_dir(), done
    done = shop.type("task", "tidy")
    assert re.search("t +removed", done.out), done
    assert not shop.worktree("t.check") and shop.git("show", "run/t:a.txt") == "two"
    assert shop.type("task", "tidy").out == "Nothing to tidy.\n"


def test_no_way_to_merge_is_named_of_a_task_that_was_forgotten(shop):
    assert shop.work(coder=shell(EDIT), check="true") == "done"
    assert shop.type("task", "forget", "t").code == 0
    done = shop.type("task", "tidy")
    assert re.search("t +removed", done.out) and done.err == "" and shop.has_work("t"), done


def test_worktrees_of_before_a_fresh_start_are_tidied_once(shop):
    assert shop.work(coder=shell(EDIT), check="true") == "done"
    assert shop.type("task", "retry", "t", "--fresh").code == 0 and shop.run().code == 0
    done = shop.type("task", "tidy")
    assert len(re.findall("t +removed", done.out)) == 2, done
    assert shop.type("task", "tidy").out == "Nothing to tidy.\n"
    assert not any(shop.worktree(name) for name in ("t", "t.check", "t.2", "t.2.check"))


def test_a_checks_worktree_that_cannot_go_is_told_and_stays(shop):
    assert shop.work(coder=shell(EDIT), check="true") == "done"
    check = shop.worktree("t.check")
    check.rename(check.with_name("moved"))
    shop.git("clone", "-q", str(shop.repo), str(check))
    done = shop.type("task", "tidy")
    assert re.search("t +skipped", done.out) and "t.check is not what was made" in " ".join(done.out.split()), done
    assert shop.worktree("t").is_dir() and check.is_dir()


def test_a_task_with_check_none_has_no_check_and_is_not_lost(shop):
    coder = shell("echo two > b.txt")
    tasks = {"one": {"prompt": "x", "coder": coder},
             "two": {"prompt": "x", "coder": coder, "check": "none"}}
    shop.tasks(tasks, defaults={"check": "false", "tries": 1})
    assert shop.type("task", "add", "three:x", "--check", "none").code == 0
    assert "three" in shop.rows()
    shop.run("one", "two")
    assert (shop.state("one"), shop.state("two"), shop.state("three")) == ("failed", "review", "waiting")
    tasks["one"]["check"] = "none"
    shop.tasks(tasks, defaults={"check": "false", "tries": 1})
    shop.type("task", "retry", "one")
    shop.run("one")
    assert shop.state("one") == "review"


def test_max_that_was_typed_holds_when_the_file_is_edited(shop):
    tasks = {name: {"prompt": "x", "coder": shell(
        'exec 9>"$HOME/lock"; flock -n 9 || echo double >> "$WITNESS"; touch "$HOME/began"; sleep 1')}
        for name in "abc"}
    shop.tasks(tasks, max=3)
    child = shop.begin("run", "--max", 1)
    shop.wait((shop.home / "began").exists)
    shop.tasks(tasks, max=2)
    shop.end(child)
    assert shop.witness == "" and len(shop.rows()) == 3


def test_tidy_of_a_task_that_waits_names_the_way_on(shop):
    shop.tasks({"t": {"prompt": "x", "coder": shell(EDIT), "check": "false", "tries": 3}})
    child = shop.begin("run")
    row = {"state": "waiting", "try": "2/3"}  # its third begins 10 s later
    shop.wait(lambda: row.items() <= shop.rows().get("t", {}).items())
    child.send_signal(signal.SIGINT)
    shop.end(child)
    done = shop.type("task", "tidy")
    assert "task stop t" in " ".join(done.out.split()), done


def test_time_that_a_person_takes_is_not_the_tasks(shop):
    assert shop.work(coder=shell(EDIT)) == "review"
    before = shop.row("t")["total_seconds"]
    time.sleep(1.5)
    assert shop.type("task", "accept", "t").code == 0
    assert shop.row("t")["total_seconds"] == pytest.approx(before, abs=0.1)
    for words in ((), ("--fresh",)):
        assert shop.type("task", "retry", "t", *words).code == 0
        assert shop.row("t")["total_seconds"] == pytest.approx(before, abs=0.1)
        assert shop.run().code == 0
        again = shop.row("t")["total_seconds"]
        assert before < again, words
        before = again


def test_accept_says_that_the_check_had_failed(shop):
    assert shop.work(coder=shell(EDIT), check="exit 3", touch=["docs/**"]) == "parked"
    done = shop.type("task", "accept", "t")
    assert done.code == 0 and "its check had failed (exit 3)" in done.out, done


def test_what_a_person_knows_is_not_told_again(shop):
    shop.program("claude", "exit 1")
    for number in range(2):
        shop.tasks({"t": {"prompt": f"x{number}", "coder": shell(EDIT), "check": "true"},
                    "u": {"prompt": "x", "after": ["t"]}})
        done = shop.run("t")
        assert done.code == 0, done
        assert ("proves nothing" in done.out, "No fleet.yaml" in done.err) == (not number, not number), done
        assert shop.type("task", "retry", "t", "--fresh").code == 0


@pytest.mark.parametrize("words, what", [
    (("a:x", "a:y"), "two of these tasks are named `a`"),
    (("ü:text",), "`ü` cannot be the name of a task"),
    ((f"{'n' * 61}:do it",), "cannot be the name of a task"),
    (("b:",), "no prompt after `b:`")])
def test_odd_names_are_one_clear_message(shop, words, what):
    for command in (("run",), ("task", "add")):
        done = shop.type(*command, *words)
        assert done.code == 2 and what in done.err and done.err.count("error:") == 1, done


def test_a_retry_of_a_task_that_a_run_was_not_asked_for_starts_there(shop):
    shop.tasks({"a": {"prompt": "x", "check": "false", "tries": 1},
                "b": {"prompt": "x", "coder": shell(EDIT, WORKS), "check": "true"}},
               defaults={"coder": shell(EDIT)})
    assert shop.run("a").code == 1
    child = shop.begin("run", "b")
    shop.wait(lambda: shop.works("b"))
    assert shop.type("task", "retry", "a").code == 0
    shop.let_go()
    done = shop.end(child)
    assert "1 failed, 1 done" in done.out and shop.row("a")["try"] == "2/2", done.out
    assert shop.receipt("a", 2)["verdict"] == "failed"


def test_run_all_says_what_it_leaves_out(shop):
    assert shop.work(coder=shell(EDIT), check="true") == "done"
    other = Shop(shop.place / "other")
    other.environ.update(HOME=shop.environ["HOME"], XDG_STATE_HOME=shop.environ["XDG_STATE_HOME"])
    assert other.work(coder=shell(EDIT), check="true") == "done"
    shutil.rmtree(other.repo)
    done = shop.run("--all")
    assert f"{other.repo}: skipped, it is no longer a git repository" in done.err, done
    shop.tasks({"slow": {"prompt": "x", "coder": shell(EDIT, WORKS), "check": "true"}})
    third = Shop(shop.place / "third")
    third.environ.update(HOME=shop.environ["HOME"], XDG_STATE_HOME=shop.environ["XDG_STATE_HOME"])
    assert third.work(coder=shell(EDIT), check="true") == "done"
    child = shop.begin("run")
    shop.wait(lambda: shop.works("slow"))
    done = third.run("--all")
    assert f"{shop.repo}: skipped, `run` is already active there" in done.err, done
    shop.let_go()
    shop.end(child)


def test_a_question_gives_its_place_to_one_that_waits(shop):
    shop.use_claude(**{"max_parallel: 4": "max_parallel: 1"})
    shop.tasks({"db": {"prompt": "@ask Which?|one|two\n@write x y", "model": "big"},
                "fix": {"prompt": "@write x y", "model": "big", "check": "test -s x"}})
    child = shop.begin("run")
    shop.wait(lambda: shop.rows().get("fix", {}).get("state") == "done", 40)
    assert shop.state("db") == "asking"
    shop.end(child)
    assert shop.type("task", "answer", "db", "1").code == 0
    done = shop.run()
    assert done.code == 0 and shop.state("db") == "review", done


def test_the_commit_that_keeps_the_work_is_counted(shop):
    shop.tasks({"t": {"prompt": "x", "coder": shell(EDIT), "check": "true"}})
    done = shop.run()
    assert "1 commit," in done.out and shop.receipt()["commits"] == 1, done


WORKED_ON = {"t": {"prompt": "x", "tries": 1, "coder": shell(EDIT), "check": "true"},
             "t-2": {"prompt": "x", "tries": 1, "coder": shell(EDIT), "check": "false", "rounds": 0}}


def test_a_fresh_start_takes_no_other_tasks_worktree(shop):
    shop.tasks(WORKED_ON)
    shop.run()
    mine = shop.worktree("t-2") / "by_hand"
    mine.write_text("hours")
    assert shop.type("task", "retry", "t", "--fresh").code == 0
    shop.run()
    assert mine.read_text() == "hours"
    assert shop.row("t")["branch"] == "run/t.2" and shop.row("t-2")["branch"] == "run/t-2"


def test_a_new_task_takes_no_fresh_starts_worktree(shop):
    shop.tasks({"t": WORKED_ON["t"]})
    shop.run()
    assert shop.type("task", "retry", "t", "--fresh").code == 0
    shop.run()
    made = {name: shop.worktree(name).stat().st_ino for name in ("t", "t.2")}
    shop.tasks(WORKED_ON)
    shop.run()
    assert {name: shop.worktree(name).stat().st_ino for name in made} == made
    assert shop.worktree("t-2") and shop.state("t") == "done"


@pytest.mark.parametrize("has_commit", [True, False])
def test_a_persons_branch_of_a_tasks_name_is_not_taken(shop, has_commit):
    shop.git("branch", "run/t")
    if has_commit:
        shop.commit(b_txt="two")
    tip = shop.tip("t")
    assert shop.work(coder=shell(EDIT), check="true") == "parked"
    assert "`run/t` already exists" in shop.said.out and shop.tip("t") == tip
    shop.type("task", "tidy", "--all")
    assert shop.tip("t") == tip


def test_names_of_which_only_the_letters_case_differs_are_one(shop):
    done = shop.run("--coder", "codex", "A:x", "a:y")
    assert done.code and "two of these tasks are named `A`" in done.err and not shop.rows(), done
    shop.tasks({"t": {"prompt": "x", "coder": shell(EDIT), "check": "true"}})
    assert shop.run().code == 0
    done = shop.run("--coder", "codex", "T:x")
    assert done.code and "already a task `t`" in done.err and set(shop.rows()) == {"t"}, done
    shop.tasks({"u": {"prompt": "x"}, "U": {"prompt": "y"}})
    assert "differ only in case" in shop.run().err


def test_snapshots_of_an_earlier_task_of_this_name_stay(shop):
    assert shop.work(coder=shell(EDIT), check="true") == "done"
    old = shop.git("rev-parse", "refs/subagent-fleet/t/1")
    for name in ("t", "t.check"):
        shutil.rmtree(shop.worktree(name))
    shop.git("branch", "-D", "run/t")
    shutil.rmtree(shop.repo / ".git/subagent-fleet/run/tasks/t")
    assert shop.work(coder=shell("echo three > a.txt"), check="true") == "done"
    assert shop.git("rev-parse", "refs/subagent-fleet/t/1") == old
    assert shop.git("show", "refs/subagent-fleet/t/2:a.txt") == "three"


def test_what_comes_after_begins_with_what_a_person_has_added(shop):
    shop.tasks({"t": WORKED_ON["t"], "later": {"prompt": "x", "after": ["t"], "check": "true",
                                               "coder": shell("cp by_hand.txt took.txt")}})
    shop.run("t")
    shop.git("checkout", "-q", "run/t")
    shop.write("by_hand.txt", "mended")
    shop.git("add", "by_hand.txt")
    shop.git("commit", "-qm", "by hand")
    shop.git("checkout", "-q", "main")
    shop.run()
    assert shop.git("show", "run/later:took.txt") == "mended"


def test_a_task_that_is_over_goes_on_from_its_own_work_after_its_tidying(shop):
    lasts = shell("echo x >> work.txt")
    assert shop.work(coder=lasts, check="test -s work.txt") == "done"
    shop.git("merge", "-q", "run/t")
    assert "removed" in shop.type("task", "tidy").out and not shop.tip("t")
    assert shop.type("task", "say", "t", "once more").code == 0
    assert shop.run().code == 0
    assert shop.git("show", "run/t:work.txt") == "x\nx"


def test_failed_work_that_was_tidied_is_what_a_retry_begins_with(shop):
    assert shop.work(coder=shell("echo x >> work.txt"), check="grep -c x work.txt | grep -q 2",
                     rounds=0) == "failed"
    assert "removed" in shop.type("task", "tidy").out
    assert shop.type("task", "retry", "t").code == 0
    assert shop.run().code == 0
    assert shop.git("show", "run/t:work.txt") == "x\nx"


@pytest.mark.parametrize("content", ["{", "", '{"schema": "subagent-fleet/task/9"}', "newer"])
def test_a_state_that_cannot_be_read_is_a_task_that_is_left_alone(shop, content):
    shop.tasks(WORKED_ON)
    shop.run()
    place = shop.repo / ".git/subagent-fleet/run/tasks/t-2/state.json"
    if content == "newer":
        content = place.read_text().replace('"failed"', '"superseded"')
    place.write_text(content)
    mine = shop.worktree("t-2") / "by_hand"
    mine.write_text("hours")
    kept = shop.git("rev-parse", "refs/subagent-fleet/t-2/1")

    done = shop.run()
    assert done.code == 1 and "cannot be read" in done.out + done.err, done
    assert shop.rows()["t-2"]["state"] == "unreadable" and shop.rows()["t"]["state"] == "done"
    done = shop.type("tasks")
    assert "1 state file could not be read." in done.err and "unreadable" in done.out
    assert shop.run("--coder", "codex", "t-2:other work").code != 0
    for words in (("retry", "t-2"), ("retry", "t-2", "--fresh"), ("say", "t-2", "go"),
                  ("forget", "t-2"), ("tidy", "--all")):
        shop.type("task", *words)
    shop.run()
    assert place.read_text() == content and mine.read_text() == "hours"
    assert shop.git("rev-parse", "refs/subagent-fleet/t-2/1") == kept


# -- copies are in no history --

IN = "git add -f .env; git commit -qm w; git rm -q --cached .env; git commit -qm o"
LEAKS = {
    "merged side": f"git checkout -qb s; {IN}; git checkout -q run/t; echo m > m; git add m;"
                   "git commit -qm m; git merge -q --no-ff -m x s",
    "renamed": "cp .env conf.txt; git add conf.txt; git commit -qm w",
    "renamed, not committed": "cp .env conf.txt",
    "renamed and removed": "cp .env conf.txt; git add conf.txt; git commit -qm w; git rm -q conf.txt;"
                           "git commit -qm o; echo m > m",
    "changed": "echo more >> .env; git add -f .env; git commit -qm w",
    "side of a side": f"git checkout -qb s; git checkout -qb r; {IN}; git checkout -q s;"
                      "git merge -q --no-ff -m y r; git checkout -q run/t; git merge -q --no-ff -m x s"}


@pytest.mark.parametrize("how", LEAKS)
def test_a_copy_is_found_whatever_the_history_looks_like(shop, how):
    shop.commit(_gitignore=".env\n")
    shop.write(".env", "secret\n")
    assert shop.work(coder=shell(EDIT, LEAKS[how]), copy=[".env"], check="true") == "parked"
    assert "content of a file that was copied" in shop.said.out


def test_a_copy_on_a_branch_that_its_agent_has_left_stays_in_its_place(shop):
    shop.commit(_gitignore=".env\n")
    shop.write(".env", "secret\n")
    left = f"{IN}; git checkout -q -b clean HEAD~2; echo m > m"
    assert shop.work(coder=shell(EDIT, left), copy=[".env"], check="true") == "done"
    done = shop.type("task", "tidy")
    assert "a commit in it has .env" in " ".join(done.out.split()) and shop.worktree("t"), done
    assert not shop.kept("secret") and not shop.git("log", "--all", "--format=%H", "--", ".env")
    # A fresh start knows nothing of copies yet; the place before it does.
    assert shop.type("task", "retry", "t", "--fresh").code == shop.type("task", "stop", "t").code == 0
    done = shop.type("task", "tidy")
    assert "a commit in it has .env" in " ".join(done.out.split()) and shop.worktree("t"), done
    assert not shop.kept("secret") and not shop.git("log", "--all", "--format=%H", "--", ".env")


def test_an_empty_copy_and_a_link_are_no_secret(shop):
    shop.commit(_gitignore=".env\nlocal\n")
    shop.write(".env", "")
    (shop.repo / "local").symlink_to("a.txt")
    coder = shell(EDIT, "touch empty.py", "cp -P local other")
    assert shop.work(coder=coder, copy=[".env", "local"], check="true") == "done"


def test_links_are_copied_as_links(shop):
    shop.commit(_gitignore="node_modules/\n")
    shop.write("node_modules/pkg/cli.js", "cli\n")
    (shop.repo / "node_modules/.bin").mkdir()
    for name, leads in (("tool", "../pkg/cli.js"), ("gone", "../nothing"), ("all", "../pkg")):
        (shop.repo / "node_modules/.bin" / name).symlink_to(leads)
    shop.tasks({"u": {"prompt": "x", "copy": ["node_modules/**"], "check": "test -L node_modules/.bin/all",
                      "coder": shell("test -f node_modules/.bin/tool && " + EDIT)},
                "good": {"prompt": "x", "coder": shell(EDIT), "check": "true"}})
    assert shop.run().code == 0, shop.row("u")["reason"]
    links = {path.name: os.readlink(path) for path in (shop.worktree("u") / "node_modules/.bin").iterdir()}
    assert links == {"tool": "../pkg/cli.js", "gone": "../nothing", "all": "../pkg"}


# -- one task's trouble is one task's --

@pytest.mark.parametrize("words", [
    ("say", "t", "caf\udce9"), ("retry", "t", "--say", "caf\udce9"), ("add", "u:caf\udce9"),
    ("answer", "t", "caf\udce9")])
def test_words_that_are_not_utf8_are_refused(shop, words):
    assert shop.work(coder=shell(EDIT), check="true") == "done"
    done = shop.type("task", *words)
    assert done.code != 0 and re.search("UTF-8|surrogate|no open question", done.err), done
    assert shop.run().code == 0 and not list((shop.repo / ".git/subagent-fleet/run/inbox").iterdir())


def test_words_that_were_kept_and_cannot_be_written_park_one_task(shop):
    """As an older version took them."""
    shop.tasks({"t": {"prompt": "x", "coder": shell(EDIT), "check": "true", "tries": 1},
                "u": {"prompt": "x", "coder": shell(EDIT), "check": "true", "tries": 1}})
    assert shop.run("t").code == 0
    place = shop.repo / ".git/subagent-fleet/run/tasks/t/state.json"
    state = json.loads(place.read_text())
    place.write_text(json.dumps({**state, "state": "waiting", "says": ["caf\udce9"]}))
    assert shop.run().code == 1
    assert {name: row["state"] for name, row in shop.rows().items()} == {"t": "parked", "u": "done"}
    assert "bug" in shop.row("t")["reason"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_a_copy_that_cannot_be_read_parks_one_task(shop):
    shop.commit(_gitignore=".env\n")
    shop.write(".env", "secret").chmod(0)
    shop.tasks({"t": {"prompt": "x", "copy": [".env"], "coder": shell(EDIT), "check": "true"},
                "u": {"prompt": "x", "coder": shell(EDIT), "check": "true"}})
    shop.run()
    assert {name: row["state"] for name, row in shop.rows().items()} == {"t": "parked", "u": "done"}


def test_a_file_in_the_way_of_one_tasks_files_parks_that_task(shop):
    shop.tasks({"t": {"prompt": "x", "coder": shell(EDIT), "check": "true"},
                "u": {"prompt": "x", "coder": shell(EDIT), "check": "true"}})
    assert shop.type("task", "add").code or True
    (shop.repo / ".git/subagent-fleet/run/tasks/t").mkdir(parents=True)
    (shop.repo / ".git/subagent-fleet/run/tasks/t/1").write_text("in the way")
    shop.run()
    assert {name: row["state"] for name, row in shop.rows().items()} == {"t": "parked", "u": "done"}


# -- what is checked is what is kept, whatever git was told --

BAD_BUT = {
    "replaced": "echo bad > code; git replace $(echo bad | git hash-object -w --stdin)"
                " $(echo good | git hash-object -w --stdin)"}


@pytest.mark.parametrize("how", BAD_BUT)
def test_what_git_is_told_to_show_instead_does_not_pass(shop, how):
    assert shop.work(coder=shell(BAD_BUT[how]), check="grep -q good code", rounds=0) == "failed"


def test_what_a_check_has_hidden_from_its_index_does_not_pass(shop):
    """In the first try the check is made to hide a file of its own place from git."""
    shop.commit(code="bad\n")
    hides = "echo good > code; git update-index --skip-worktree code; exit 1"
    coder = shell("if test -e test.sh; then echo true > test.sh; else echo '" + hides + "' > test.sh; fi",
                  "echo more >> a.txt")
    assert shop.work(coder=coder, check="sh test.sh && grep -q good code", tries=2) == "failed"


def test_a_repository_that_a_check_makes_is_gone_before_the_next(shop):
    assert shop.work(coder=shell(EDIT), check="test ! -e scratch && git init -q scratch") == "done"


@pytest.mark.parametrize("spoils", ["rm -rf .git", "rm -rf .git *", "rm -rf .git; ln -s $HOME .git",
                                    "chmod -R a-w .git", "git config core.bare true", "touch $(git rev-parse --git-dir)/index.lock",
                                    "touch $(git rev-parse --git-dir)/HEAD.lock",
                                    "echo x > $(git rev-parse --git-dir)/index"])
def test_a_check_that_spoils_its_place_is_run_in_a_new_one(shop, spoils):
    coder = shell("echo x >> a.txt")
    check = f"grep -c x a.txt | grep -q 2 && exit; {spoils}; exit 1"
    assert shop.work(coder=coder, check=check, tries=2) == "done", shop.row("t")["reason"]


def test_a_file_that_is_gone_and_ignored_is_gone_for_the_check(shop):
    shop.commit(code="x\n")
    coder = shell("git rm -q --cached code; rm code; echo code > .gitignore")
    assert shop.work(coder=coder, check="test ! -e code") == "done"


# -- git's no --

@pytest.mark.parametrize("how", ["detached", "on its branch"])
def test_who_only_looks_has_not_merged(shop, how):
    shop.tasks({"t": {"prompt": "x", "coder": shell(EDIT)},
                "later": {"prompt": "x", "after": ["t"], "coder": shell("echo x > new.txt")}})
    shop.run()
    assert shop.state("t") == "review"
    if how == "detached":
        shop.git("checkout", "-q", "--detach", "run/t")
    else:
        shop.git("symbolic-ref", "HEAD", "refs/heads/run/t")
    shop.run()
    assert shop.state("t") == "review" and shop.state("later") == "waiting"
    shop.git("checkout", "-q", "-f", "main")
    shop.git("merge", "-q", "run/t")
    shop.run()
    assert shop.state("t") == "done" and shop.state("later") == "review"


def test_a_lock_that_was_left_is_named_and_nothing_has_moved(shop):
    coder = shell(EDIT, f"touch {shop.repo}/.git/refs/heads/run/t.lock")
    assert shop.work(coder=coder, check="true") == "parked"
    row = shop.row("t")
    assert "t.lock" in row["reason"] and "moved since" not in row["reason"], row
    assert row["cause"] == "branch-locked"


def test_a_repository_of_sha256_has_its_branch_made_anew(shop, tmp_path):
    if subprocess.run(["git", "init", "-q", "--object-format=sha256", str(tmp_path / "x")],
                      capture_output=True).returncode:
        pytest.skip("this git has no SHA-256")
    shutil.rmtree(shop.repo / ".git")
    shop.git("init", "-q", "-b", "main", "--object-format=sha256")
    shop.commit(b_txt="x")
    coder = shell(EDIT, "git checkout -q --detach", "git branch -D run/t")
    assert shop.work(coder=coder, check="true") == "done", shop.said
    assert shop.git("show", "run/t:a.txt") == "two"


def test_a_submodule_that_git_would_follow_is_in_nobodys_way(shop):
    shop.add_submodule()
    shop.git("config", "--global", "submodule.recurse", "true")
    shop.tasks({"t": {"prompt": "x", "coder": shell(EDIT), "check": "true"},
                "u": {"prompt": "x", "coder": shell(EDIT), "check": "true",
                      "setup": ["git -c protocol.file.allow=always submodule update -q --init"]}})
    assert shop.run().code == 0


def test_a_file_behind_a_link_of_the_main_checkout_is_kept(shop):
    (shop.place / "elsewhere").mkdir()
    (shop.repo / "data").symlink_to(shop.place / "elsewhere")
    assert shop.work(coder=shell("mkdir data; echo new > data/new.txt"), check="true") == "done"
    assert shop.git("show", "run/t:data/new.txt") == "new"


def test_advice_names_the_branch_where_a_tag_is_called_the_same(shop):
    shop.git("tag", "run/t")
    assert shop.work(coder=shell(EDIT), check="true") == "done"
    assert "git merge refs/heads/run/t" in shop.said.out + shop.said.err


def test_who_a_person_is_to_git_reaches_agents_and_checks(shop):
    (shop.home / ".gitconfig").unlink()
    shop.write("config", "[user]\nname = from config\n", shop.place)
    shop.tasks({"t": {"prompt": "x", "check": "git var GIT_COMMITTER_IDENT",
                      "coder": shell(EDIT, "git add .", "git commit -qm mine")}})
    done = shop.run(GIT_CONFIG_GLOBAL=shop.place / "config", GIT_AUTHOR_EMAIL="me@here",
                    GIT_COMMITTER_EMAIL="me@here", GIT_DIR="/nowhere")
    assert done.code == 0, done
    assert shop.git("log", "-1", "--format=%an %ae", "run/t") == "from config me@here"


def test_a_repository_whose_path_has_a_line_break_is_one_sentence(tmp_path):
    place = tmp_path / "a\nb"
    place.mkdir()
    shop = Shop(place)
    done = shop.run("t:x")
    assert done.code and "line break" in done.err, done
    assert '"odd-path"' in shop.type("tasks", "--json").out


def test_worktrees_in_a_home_that_is_a_repository_are_not_in_its_status(shop):
    for path in (shop.repo / ".git", shop.repo / "a.txt"):
        path.rename(shop.home / path.name)
    shop.repo = shop.home
    shop.commit(_gitignore="state/subagent-fleet/*.json\nstate/subagent-fleet/*.lock\nsessions/\n")
    assert shop.work(coder=shell(EDIT), check="true") == "done" and shop.worktree("t")
    assert "worktrees" not in shop.git("status", "--porcelain", "-uall")


# -- what serves agents, and who looks after them --

def port_of(shop):
    return int(re.search(r"port: (\d+)", (shop.repo / "fleet.yaml").read_text())[1])


def answers(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def test_run_serves_when_the_gateway_that_it_used_ends(shop, fake_node):
    node = fake_node({"qwen3-coder:30b": {}})
    shop.use_claude(**{"http://127.0.0.1:9": node.endpoint})
    shop.program("claude", f"""case "$*" in
*stream-json*) exec "{sys.executable}" -I -S "{STUB}" "$@" ;;
*) touch "$HOME/came"; until [ -e "$HOME/leave" ]; do sleep 0.05; done ;;
esac""")
    up = shop.begin("up", "--trust")
    shop.wait(lambda: (shop.home / "came").exists())
    run = shop.begin("run", "k:@ask Which?|red|blue\n@write x y", "--check", "true", "--model", "big")
    shop.wait(lambda: shop.rows().get("k", {}).get("state") == "asking")
    (shop.home / "leave").touch()
    done = shop.end(up)
    assert "Tasks still running: k." in done.err, done
    shop.wait(lambda: answers(port_of(shop)), 10)
    shop.type("task", "answer", "k", "1")
    assert shop.end(run).code == 0 and shop.state("k") == "done"
    shop.wait(lambda: not answers(port_of(shop)), 10)


def test_run_says_once_that_it_cannot_serve(shop):
    shop.use_claude()
    serve = shop.begin("serve", "--trust")
    shop.wait(lambda: answers(port_of(shop)))
    run = shop.begin("run", "k:@ask Which?|red|blue\n@write x y", "--check", "true", "--model", "big")
    shop.wait(lambda: shop.rows().get("k", {}).get("state") == "asking")
    serve.terminate()
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        def takes():
            with contextlib.suppress(OSError):
                taken.bind(("127.0.0.1", port_of(shop)))
                taken.listen()
                return True
        shop.wait(takes)
        shop.end(serve)
        shop.wait(lambda: "not served" in shop.type("task", "log").out)
        shop.type("task", "answer", "k", "1")
        done = shop.end(run)
    assert done.code == 0 and done.out.count("not served") == 1, done


@pytest.mark.parametrize("has_fleet", [True, False])
def test_a_client_that_is_stopped_is_seen_in_a_first_run(shop, has_fleet):
    shop.put_claude()
    if has_fleet:
        shop.write_fleet()
    shop.tasks({"t": {"prompt": "@once hang\n@write x.txt 1", "check": "true", "stall": "3s", "tries": 1}})
    run = shop.begin("run", "--trust")
    place = shop.repo / ".git/subagent-fleet/run/tasks/t/state.json"
    shop.wait(lambda: place.exists() and "waiting for the model" in shop.type("tasks").out)
    os.kill(json.loads(place.read_text())["client"], signal.SIGSTOP)
    shop.wait(lambda: "stalled" in shop.type("task", "log").out, 40)
    assert shop.end(run).code == 0 and shop.state() == "done"


def test_a_name_that_was_typed_is_not_another_task_of_the_file(shop):
    shop.tasks({"docs": {"prompt": "typed", "coder": shell(EDIT), "check": "true"}})
    tasks = (shop.repo / "tasks.json").read_text()
    (shop.repo / "tasks.json").unlink()
    shop.put_claude()
    assert shop.run("docs:@write x y", "--check", "true").code == 0
    tip = shop.tip("docs")
    (shop.repo / "tasks.json").write_text(tasks.replace('"docs"', '"other"')[:-2]
                                          + ", " + tasks[11:])
    done = shop.run()
    assert done.code == 3 and "typed before (done)" in done.err and not shop.tip("other"), done
    assert shop.type("task", "forget", "docs").code == 0
    assert shop.run().code == 0 and shop.rows()["docs"]["branch"] == "run/docs.2"
    assert shop.tip("docs") == tip


def test_who_says_something_to_a_task_that_is_over_is_told_so(shop):
    assert shop.work(coder=shell(EDIT), check="true") == "done"
    assert "t was done; with this it starts again" in shop.type("task", "say", "t", "more").err
    assert "starts again" not in shop.type("task", "say", "t", "and more").err or shop.state() == "done"


def test_a_task_goes_on_when_its_person_leaves_it(shop):
    shop.use_claude()
    shop.program("claude", f"""case "$*" in
*stream-json*) exec "{sys.executable}" -I -S "{STUB}" "$@" ;;
*) touch "$HOME/came"; until [ -e "$HOME/leave" ]; do sleep 0.05; done ;;
esac""")
    run = shop.begin("run", "k:@once hang\n@write x y", "--check", "true", "--model", "big")
    shop.wait(lambda: shop.works("k"))
    attach = shop.begin("task", "attach", "k")
    shop.wait(lambda: (shop.home / "came").exists())
    (shop.home / "leave").touch()
    done = shop.end(attach)
    assert "continues by itself" in done.err and "Nothing is running" not in done.err, done
    assert shop.end(run).code == 0 and shop.state("k") == "done"


# -- what it costs: a busy machine's clock says little, so calls and processors are counted --

def test_a_task_costs_few_calls_of_git(shop):
    shop.program("git", f'echo x >> "$HOME/calls"; exec {shutil.which("git")} "$@"')
    shop.tasks({"t": {"prompt": "x", "times": 5, "coder": shell(EDIT), "check": "grep -q two a.txt"}})
    assert shop.run("--max", "5").code == 0
    calls = (shop.home / "calls").read_text().count("x")
    assert calls / 5 < 40, f"{calls} calls of git for 5 tasks"


def test_five_at_once_and_the_table_cost_little(shop):
    def processor_seconds(*words):
        before = os.times()
        done = shop.type(*words)
        assert done.code == 0, done
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    start = min(processor_seconds("--version") for _ in range(3))
    shop.tasks({"t": {"prompt": "x", "times": 5, "coder": shell(EDIT, "sleep 1"), "check": "true"}})
    assert processor_seconds("run", "--max", "5") < 20 * start + 2  # 4 s are promised
    assert min(processor_seconds("tasks") for _ in range(3)) < 3 * start  # 0.3 s are promised


# -- what newcomers stumbled over --

def test_of_two_tasks_with_one_branch_and_one_with_a_persons_only_one_works(shop):
    shop.git("branch", "keep")
    shop.commit(b_txt="two")
    shop.tasks({name: {"prompt": "x", "coder": shell(EDIT), "branch": branch, "check": "true"}
                for name, branch in (("k", "keep"), ("m", "main2"), ("o", "main2"))})
    shop.run()
    states = {name: row["state"] for name, row in shop.rows().items()}
    assert states["k"] == "parked" and {states["m"], states["o"]} == {"done", "parked"}


def test_the_exit_code_of_a_command_is_said_of_its_try(shop):
    shop.work(coder=shell(EDIT, "exit 3"), check="true")
    assert "ended by result, exit code 3, check exit 0" in " ".join(shop.type("tasks", "t").out.split())


def test_what_a_failed_setup_leaves_can_be_tidied(shop):
    shop.commit(_gitignore="*.log\n.env\n")
    shop.write(".env", "secret\n")
    task = {"setup": ["echo x > made.log", "exit 7"], "copy": [".env"]}
    assert shop.work(coder=shell(EDIT), **task) == "parked"
    assert shop.type("task", "retry", "t", "--fresh").code == 0
    shop.run()
    assert shop.worktree("t") and shop.worktree("t.2") and not shop.kept("secret")
    tidied = shop.type("task", "tidy")
    assert re.findall("^t +(removed)", tidied.out, re.M) == ["removed"] * 2, tidied
    assert shop.worktree("t") is None and shop.worktree("t.2") is None and not shop.kept("secret")


def test_a_log_that_is_empty_says_why_and_which_is_not(shop):
    shop.git("branch", "keep")
    shop.commit(b_txt="two")
    shop.tasks({"bad": {"prompt": "x", "coder": shell("echo lost >&2"), "check": "test -s x.txt", "tries": 1},
                "k": {"prompt": "x", "coder": shell(EDIT), "branch": "keep"},
                "st": {"prompt": "x", "coder": shell(EDIT), "setup": ["exit 7"]}})
    said = shop.run().out
    assert "See why: " in said and "task log k" not in shop.type("tasks").out
    assert "`test -s x.txt` printed nothing (exit 1)." in shop.type("task", "log", "bad", "check").err
    assert "task log bad stderr" in shop.type("task", "log", "bad").err
    assert "k is parked: the branch `keep` already exists" in shop.type("task", "log", "k").err
    assert "setup failed (exit 7)" in shop.type("task", "log", "st", "setup").err


def test_what_was_said_is_in_each_later_prompt_of_a_command(shop):
    shop.tasks({"t": {"prompt": "Do it.", "tries": 2, "check": "exit 1",
                      "coder": shell("cat >> $HOME/prompts; echo ===== >> $HOME/prompts", "date +%N > a.txt")}})
    assert shop.run().code == 1
    shop.type("task", "retry", "t", "--say", "please write x")
    assert shop.run().code == 1
    prompts = (shop.home / "prompts").read_text().split("=====\n")[:-1]
    assert ["please write x" in prompt for prompt in prompts] == [False, False, True, True]
    assert "\n\n\n" not in prompts[1] and "It printed nothing." in prompts[1]
    assert shop.type("tasks", "t").out.count("try ") == 4
    for number, words in ((1, "Do it."), (4, "")):
        assert shop.type("task", "log", "t", "--try", number).code == 0, words


@pytest.mark.parametrize("is_active", [True, False])
def test_who_is_told_something_while_a_command_works_learns_when_it_is_read(shop, is_active):
    shop.tasks({"t": {"prompt": "Do it.", "check": "true", "coder": shell(
        "cat >> $HOME/prompts", "date +%N > a.txt", "touch $HOME/begun", WORKS)}})
    running = shop.begin("run")
    shop.wait(lambda: (shop.home / "begun").exists() and shop.works())
    if not is_active:
        running.send_signal(signal.SIGINT)
        shop.end(running)
    said = shop.type("task", "say", "t", "hurry")
    assert re.search(r"t +saved +hurry \(sh can't be told while it runs: its next try gets this\)",
                     said.out), said
    shop.let_go()
    assert (shop.end(running) if is_active else shop.run()).code == 0
    assert shop.row("t")["try"] == "2/3" and "hurry" in (shop.home / "prompts").read_text()


def test_after_two_tasks_it_is_said_that_their_work_is_not_there(shop):
    task = {"prompt": "x", "coder": shell(EDIT), "check": "true"}
    shop.tasks({"a1": task, "a2": task, "one": {**task, "after": ["a1"]},
                "join": {**task, "after": ["a1", "a2"]}})
    said = " ".join(shop.run().out.split())
    assert said.count("only a single task in `after:` is built on") == 1
    assert "join note starts from HEAD, without the work of a1, a2" in said


def test_a_base_that_is_none_is_named_with_its_line(shop):
    shop.write("tasks.yaml", "tasks:\n  a: {prompt: x}\n  b:\n    prompt: x\n    base: nosuch\n")
    assert "tasks.yaml:5:" in shop.run().err


def test_a_command_is_typed_as_the_list_that_a_file_has(shop):
    assert shop.run("q:two", "--coder", "[sh, -c, 'echo two > a.txt']", "--check", "true").code == 0
    refused = shop.run("r:two", "--coder", "sh -c true")
    assert refused.code == 2 and "coder: [sh, \"-c\", \"true\"]" in refused.err, refused


def test_what_stopped_before_it_changed_anything_has_no_work_saved(shop):
    shop.tasks({name: {"prompt": "x", "coder": shell(*more, f"touch $HOME/{name}", WORKS)}
                for name, more in (("idle", []), ("busy", [EDIT]))})
    running = shop.begin("run")
    shop.wait(lambda: (shop.home / "idle").exists() and (shop.home / "busy").exists())
    said = shop.type("task", "stop", "*").out
    shop.end(running)
    assert re.search(r"idle +stopped +.* ended in \S+ s\n", said), said
    assert "work saved in refs/subagent-fleet/busy/1" in " ".join(said.split())


def test_a_run_with_nothing_to_do_says_so(shop):
    shop.work(coder=shell(EDIT), check="true")
    assert "\n1 done.\n" in shop.said.out
    assert shop.run().out.startswith("Nothing to do: 1 done.\n")
    assert shop.run("t").out.startswith("1 done.\n")


def test_of_a_worktree_that_cannot_be_read_no_diff_is_shown_but_why(shop):
    shop.work(coder=shell("echo d > d.txt", "rm -rf .git"), check="true")
    shown = shop.type("task", "diff", "t")
    assert shown.code == 1 and "t has no work to show (it is parked: " in shown.err, shown
    assert "nothing" not in shop.type("task", "accept", "t").out


def test_a_forgotten_task_is_in_no_advice(shop):
    shop.work(coder=shell(EDIT), check="true")
    shop.type("task", "forget", "*")
    assert shop.type("task", "tidy").err == ""


def test_run_whose_reader_has_gone_says_so_and_is_no_success(shop):
    go = shop.place / "go"
    wait = f"while test ! -e {go}; do sleep 0.1; done"
    shop.tasks({"a": {"prompt": "x"}, "b": {"prompt": "x"}}, defaults={"coder": shell(wait), "check": "true"})
    child = shop.begin("run")
    assert child.stdout.readline()
    child.stdout.close()
    go.write_text("")  # what is said from now on has no reader
    told = child.stderr.read().decode()
    assert child.wait(60) == 1, told
    assert "output any more" in told and "Traceback" not in told
    child.stderr.close()
    assert shop.run().code == 1  # they changed nothing; and it works again


def test_what_a_coder_printed_last_says_why_it_ended(shop):
    assert shop.work(coder=shell("echo no key given", "exit 127")) == "parked"
    assert shop.row("t")["reason"].startswith("`sh` could not be run (exit 127): no key given;"), shop.row("t")
    shop.tasks({"u": {"prompt": "x", "coder": shell("echo no key given", "exit 1"), "tries": 1}})
    assert shop.run("u").code == 1
    assert shop.row("u")["fix"] == "subagent-fleet task log u"
    assert shop.type("task", "log", "u").out == "no key given\n"


def test_tasks_says_how_to_merge_what_is_done(shop):
    shop.work(coder=shell(EDIT), check="true")
    assert "Merge: git merge run/t\n" in shop.type("tasks").err
    shop.git("merge", "-q", "run/t")
    assert "Merge" not in shop.type("tasks").err
