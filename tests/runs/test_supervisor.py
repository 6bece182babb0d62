"""Section *Supervisor*: agents in worktrees, with a stub client; see DRIVER for what is killed."""
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

import subagent_fleet as sf
from task_rig import word_of
from tools import PROC, in_parts


@pytest.fixture
def rig(task_rig):
    return task_rig

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"),
                                reason="the rig reads /proc")
MANY = int(os.environ.get("SUBAGENT_FLEET_TRIALS", "0"))  # more of what is random


# -- done, and what is not --

def test_a_task_is_done_when_its_check_passes_and_its_branch_has_the_work(rig):
    rig.add("a", "@write work.txt hello", check="test -s work.txt")
    rig.work()
    assert rig.states() == {"a": "done"}
    assert rig.git("show", "run/a:work.txt") == "hello"
    assert rig.git("rev-parse", "run/a") == rig.tasks()["a"].place.kept
    assert rig.git("status", "--porcelain", cwd=rig.tree("a")) == ""
    receipt = rig.receipt("a")
    assert receipt["verdict"] == "done" and receipt["files"] == [["work.txt", 1, 0]]
    assert receipt["check"] == {"command": "test -s work.txt", "in": "own", "rounds": [0],
                                "passes_on_base": False}
    assert rig.journal("a") == ["waiting", "preparing", "starting", "running", "checking", "done"]


def test_words_of_success_with_nothing_done_are_a_failure(rig):
    rig.add("a", "say so", check="true", tries=1, rounds=1)
    rig.work()
    assert rig.states() == {"a": "failed"}
    assert rig.tasks()["a"].reason == \
        "nothing was changed (if it should only answer, write `changes: none`)"
    assert rig.said[-1][2].endswith("`changes: none`). It said: All done, tests pass!")
    assert "All done" not in json.dumps(rig.receipt("a"))
    assert "made no call that could change a file" in rig.receipt("a")["flags"]


def test_denied_writes_are_a_failure_and_the_agent_is_told_its_scope(rig):
    rig.add("a", "@edit docs/x.md", check="test -s docs/x.md", touch=("src/**", "denied.txt"),
            tries=1, rounds=0)
    rig.work()
    assert rig.states() == {"a": "failed"}
    said = (rig.tree("a") / "denied.txt").read_text()
    assert said.startswith("deny outside this task: it may touch src/**")
    assert rig.receipt("a")["denied"] == [{"tool": "Write",
                                           "path": str(rig.tree("a") / "docs/x.md")}]


def test_a_denied_command_is_named_in_the_receipt_and_the_text():
    heard = sf.Heard()
    heard.note_denial("Bash", {"command": "curl http://x\x1b[2J"})
    heard.note_denial("Write", {"file_path": "/x"})
    heard.note_denial("Odd", "no mapping")
    task = sf.TaskState("t", sf.TaskSpec("t", prompt="x"), 0)
    receipt = sf.plan_receipt(task, heard, sf.WorkDone(), "x", "result")
    assert receipt["denied"][0] == {"tool": "Bash", "path": "curl http://x\\x1b[2J"}
    assert "3 calls denied: Bash curl http://x\\x1b[2J, Write /x, Odd" in sf.describe_try(receipt)


@pytest.mark.parametrize("prompt, changes, state", [
    ("@run true", "none", "done"), ("@write x y", "none", "failed"), ("@run true", "required",
                                                                      "failed")])
def test_the_diff_must_be_as_asked(rig, prompt, changes, state):
    rig.add("a", prompt, check="true", changes=changes, tries=1, rounds=0)
    rig.work()
    assert rig.states() == {"a": state}


def test_without_a_check_a_person_looks_at_the_branch(rig):
    rig.add("a", "@write x y")
    rig.add("b", "@write z y", after=("a",))
    rig.work()
    assert rig.states() == {"a": "review", "b": "waiting"} and rig.receipt("a")["snapshot"]
    assert rig.git("show", "run/a:x") == "y"
    rig.ask("accept", "a")
    rig.work()
    assert rig.states() == {"a": "done", "b": "review"}
    assert rig.git("show", "run/b:x") == "y"  # it began with what was accepted


def test_a_branch_that_is_merged_counts_as_done(rig):
    rig.keeps_outside = False
    rig.add("a", "@write x y")
    rig.work()
    rig.git("merge", "-q", "run/a")
    rig.leave()
    rig.work()
    assert rig.states() == {"a": "done"}


def test_a_failed_check_is_told_and_mended_in_the_same_session(rig):
    rig.add("a", "@write x y", check="test -s mended || { echo '@write mended ok'; exit 7; }")
    rig.work()
    state = rig.tasks()["a"]
    assert state.state == "done" and state.attempt.checks == (7, 0) and state.attempt.round == 1
    assert rig.journal("a") == ["waiting", "preparing", "starting", "running", "checking",
                                "running", "checking", "done"]
    told = (rig.home / "sessions" / state.attempt.session).read_text()
    assert "The check of this task failed (exit 7)" in told


def test_a_check_that_never_passes_ends_after_its_rounds_and_tries(rig):
    rig.add("a", "@write x y", check=f"echo c >> {rig.place}/count; false", rounds=2, tries=1)
    rig.work()
    assert rig.states() == {"a": "failed"}
    # One look at the base, then rounds + 1 checks.
    assert (rig.place / "count").read_text().count("c") == 1 + 3
    assert rig.tasks()["a"].attempt.checks == (1, 1, 1)


@pytest.mark.slow
def test_a_try_that_failed_is_tried_again_in_a_try_of_its_own(rig, limits):
    limits(try_wait=(0,))
    rig.add("a", "@write x y", check="false", rounds=0, tries=2)
    rig.work()
    assert rig.states() == {"a": "failed"} and rig.tasks()["a"].attempt.tried == 2
    assert rig.receipt("a", 1)["verdict"] == "waiting" and rig.receipt("a", 2)["verdict"] == "failed"


def test_a_check_that_passes_on_the_base_is_told_once(rig):
    for name in "ab":
        rig.add(name, "@write x y", check="true")
    rig.work()
    notes = [event for event in rig.said if event[1] == "note"]
    assert len(notes) == 1 and "proves nothing" in notes[0][2]
    assert True in [rig.receipt(name)["check"]["passes_on_base"] for name in "ab"]


def test_what_lies_outside_the_scope_parks_and_is_kept(rig):
    rig.add("a", "@run echo x > secret.txt\n@write src/a.py y", check="true", touch=("src/**",))
    rig.work()
    state = rig.tasks()["a"]
    assert state.state == "parked" and "secret.txt" in state.reason
    assert rig.receipt("a")["outside"] == ["secret.txt"]
    assert rig.git("show", "refs/subagent-fleet/a/1:secret.txt") == "x"
    assert rig.git("rev-parse", "run/a") == rig.git("rev-parse", "main")  # nothing merged


def test_commits_of_the_agent_stay_as_they_are(rig):
    rig.add("a", "@write x y\n@run git add . && git -c user.name=a -c user.email=b commit -qm mine",
            check="true")
    rig.work()
    assert rig.git("log", "-1", "--format=%s", "run/a") == "mine"
    assert rig.receipt("a")["commits"] == 1


def test_an_agent_that_leaves_its_branch_is_found_on_it_again(rig):
    rig.add("a", "@run git checkout -q --detach\n@write x y\n@run git add . && git -c user.name=a "
            "-c user.email=b commit -qm mine\n@write z more", check="true")
    rig.work()
    assert rig.states() == {"a": "done"}
    assert rig.git("show", "run/a:z") == "more" and rig.git("show", "run/a:x") == "y"


def test_any_command_can_be_the_coder(rig):
    rig.add("a", "the prompt", coder=("sh", "-c", "cat > got.txt; echo worked"),
            check="grep -q prompt got.txt")
    rig.add("b", "x", coder=("sh", "-c", "echo y > z; exit 3"), check="test -s z")
    rig.add("c", "x", coder=("no-such-program",), check="true", tries=1)
    rig.work()
    assert rig.states() == {"a": "done", "b": "done", "c": "parked"}
    assert rig.receipt("b")["exit_code"] == 3
    assert "no-such-program" in rig.tasks()["c"].reason and "PATH" in rig.tasks()["c"].reason
    assert (rig.repo / ".git/subagent-fleet/run/tasks/a/1/out.jsonl").read_text() == "worked\n"


# -- order --

def test_tasks_start_after_what_they_need_and_from_its_branch(rig):
    rig.add("first", "@write one.txt 1", check="test -s one.txt")
    rig.add("second", "@write two.txt 2", check="test -s one.txt", after=("first",))
    rig.work()
    assert rig.states() == {"first": "done", "second": "done"}
    assert rig.git("show", "run/second:one.txt") == "1"
    assert rig.tasks()["second"].place.base == rig.tasks()["first"].place.kept


def test_what_needs_a_failed_task_waits_and_says_so(rig):
    rig.add("first", "nothing", check="true", tries=1, rounds=0)
    rig.add("second", "@write two.txt 2", after=("first",))
    rig.work()
    assert rig.states() == {"first": "failed", "second": "waiting"}
    sight = sf.see_tasks(rig.folder, sf.Backing())
    assert sf.plan_task_rows(sight)[1].now == "for first (failed)"


@pytest.mark.slow
def test_never_more_at_once_than_allowed_and_all_places_used(rig):
    for number in range(12):  # each takes longer than a busy machine needs to begin four
        rig.add(f"t{number}", "x", coder=("sleep", "1.5"), changes="none", check="true")
    counts = set()

    def seen(states):
        counts.add(sum(state.is_at_work for state in states.values()))
        return states and all(state.is_over for state in states.values())
    rig.work(seen, most=4, seconds=60)
    assert set(rig.states().values()) == {"done"} and max(counts) == 4


# -- setup and copies --

def test_setup_and_copies_come_first_and_are_not_the_agents_work(rig):
    rig.keeps_outside = False
    (rig.repo / ".gitignore").write_text(".env\n*.log\n")
    (rig.repo / ".worktreeinclude").write_text(".env\n")
    (rig.repo / ".env").write_text("KEY=1\n")
    (rig.repo / "x.log").write_text("no\n")
    rig.git("add", ".")
    rig.git("commit", "-qm", "ignore")
    rig.add("a", "@write src/x y", setup=("echo lock > lock.txt",), check="test -s .env",
            touch=("src/**",))
    rig.work()
    assert rig.states() == {"a": "done"}, rig.tasks()["a"].reason
    assert (rig.tree("a") / ".env").read_text() == "KEY=1\n"
    assert not (rig.tree("a") / "x.log").exists()
    assert rig.receipt("a")["outside"] == []  # lock.txt is setup's


def test_a_setup_that_fails_parks_and_starts_no_agent(rig):
    rig.add("a", "@write x y", setup=("echo first", "echo broken; exit 4"), check="true")
    rig.work()
    state = rig.tasks()["a"]
    assert state.state == "parked" and "exit 4" in state.reason and "broken" in state.reason
    assert "starting" not in rig.journal("a")


# -- questions and words --

ASK = "@ask Which database?|sqlite|postgres\n@write x y"


def test_a_question_waits_for_a_person_and_goes_on(rig):
    rig.add("a", ASK, check="true")
    rig.work(lambda states: states and states["a"].state == "asking")
    rig.work(lambda states: ("a", "asks") in [event[:2] for event in rig.said])
    rig.ask("answer", "a", answers={"Which database?": "postgres"})
    rig.work()
    assert rig.states() == {"a": "done"}
    assert json.loads((rig.tree("a") / "answers.txt").read_text()) == {
        "Which database?": "postgres"}
    assert rig.receipt("a")["questions"] == 1


def test_two_open_questions_are_asked_one_after_the_other(rig):
    rig.add("a", "@both Which one?|Which other?\n@write x y", check="true")
    rig.work(lambda states: ("a", "asks") in [event[:2] for event in rig.said])
    rig.ask("answer", "a", answers={"Which one?": "1"})
    rig.work(lambda states: len([event for event in rig.said if event[1] == "asks"]) == 2)
    rig.ask("answer", "a", answers={"Which other?": "2"})
    rig.work()
    assert rig.states() == {"a": "done"}
    assert (rig.tree("a") / "answers.txt").read_text().splitlines() == [
        '{"Which one?": "1"}', '{"Which other?": "2"}']
    assert [event[1] for event in rig.said].count("asks") == 2


def test_a_question_without_a_list_is_one_and_what_is_none_is_refused_with_words(rig):
    rig.add("a", '@request {"question": "Which?", "options": [{"label": "x"}]}\n@write x y',
            check="true")
    rig.add("b", '@request {"ask": 3}\n@write x y', check="true")
    rig.work(lambda states: ("a", "asks") in [event[:2] for event in rig.said])
    rig.ask("answer", "a", answers={"Which?": "x"})
    rig.work()
    assert rig.states() == {"a": "done", "b": "done"}
    assert '"answers": {"Which?": "x"}' in (rig.tree("a") / "answers.txt").read_text()
    assert "no question can be read" in (rig.tree("b") / "answers.txt").read_text()


@pytest.mark.slow
def test_a_question_survives_its_supervisor(rig):
    rig.add("a", ASK, check="true")
    rig.work(lambda states: states and states["a"].state == "asking")
    session = rig.tasks()["a"].attempt.session
    rig.leave()
    rig.ask("answer", "a", answers={"Which database?": "sqlite"})
    rig.work()
    assert rig.states() == {"a": "done"} and rig.tasks()["a"].attempt.session == session
    assert rig.journal("a").count("starting") == 1


def test_a_question_survives_its_supervisor_and_its_agent(rig):
    rig.add("a", ASK.replace("@ask", "@once ask"), check="true")
    rig.work(lambda states: states and states["a"].state == "asking")
    rig.leave()
    rig.kill_all()
    rig.ask("say", "a", text="@write x y")
    rig.work()
    assert rig.states() == {"a": "done"} and rig.journal("a").count("starting") == 2


def test_an_answer_resumes_a_session_whose_process_was_killed_while_it_asked(rig):
    rig.add("a", ASK, check="test -s x", rounds=0, tries=1)
    rig.work(lambda states: states and states["a"].state == "asking")
    rig.leave()
    rig.ask("answer", "a", answers={"Which database?": "sqlite"})
    rig.kill_all()
    until = time.monotonic() + 10
    while rig.world.is_held(rig.folder.of_task("a", "alive")):  # it is dying
        assert time.monotonic() < until
    rig.work()
    assert rig.states() == {"a": "done"} and rig.journal("a").count("starting") == 2


@pytest.mark.slow
def test_nobody_answers_so_the_slot_is_given_back_and_the_answer_still_counts(rig, limits):
    limits(ask=0.2)
    rig.add("a", ASK, check="true")
    rig.work(lambda states: states and states["a"].asleep)
    assert rig.processes() == [] and rig.states() == {"a": "asking"}
    rig.ask("answer", "a", answers={"Which database?": "x\n@write x y"})
    rig.work()
    assert rig.states() == {"a": "done"}
    told = (rig.home / "sessions" / rig.tasks()["a"].attempt.session).read_text()
    assert "The answer to your question is: x" in told


def test_what_is_said_steers_a_running_agent(rig):
    rig.add("a", "@sleep 0.3\n@write x y", check="test -s steered")
    rig.work(lambda states: states and word_of(states["a"]) == "running")
    rig.ask("say", "a", text="@write steered yes")
    rig.work()
    assert rig.states() == {"a": "done"} and rig.tasks()["a"].attempt.checks == (0,)


@pytest.mark.slow
def test_what_is_said_to_a_waiting_task_is_told_when_it_starts(rig):
    rig.add("b", "@write one 1", check="true")
    rig.add("a", "@write x y", after=("b",), check="test -s said")
    rig.ask("say", "a", text="@write said yes")
    rig.work()
    assert rig.states()["a"] == "done" and rig.tasks()["a"].attempt.checks == (0,)


@pytest.mark.slow
def test_what_is_said_to_a_task_that_is_over_resumes_it(rig):
    rig.add("a", "@write x y", check="true")
    rig.work()
    session = rig.tasks()["a"].attempt.session
    rig.ask("say", "a", text="@write more z")
    rig.work()
    state = rig.tasks()["a"]
    assert state.state == "done" and state.attempt.session == session and state.attempt.tried == 2
    assert rig.git("show", "run/a:more") == "z"


@pytest.mark.slow
def test_what_is_said_while_the_check_runs_is_done_as_well(rig):
    rig.add("a", "@write x y", check="sleep 1")
    rig.work(lambda states: "a" in states and states["a"].state == "checking")
    rig.ask("say", "a", text="@write more z")
    rig.work()
    assert rig.states() == {"a": "done"} and rig.tasks()["a"].wish.says == ()
    assert rig.git("show", "run/a:more") == "z"


# -- ends --

@pytest.mark.slow
def test_a_task_that_waits_for_what_anothers_check_says_is_stopped_at_once(rig):
    for name in ("a", "b"):
        rig.add(name, "@hang", check="sleep 4")
    rig.work(lambda states: list(map(word_of, states.values())) == ["running"] * 2)
    logs = {name: rig.folder.of_try(rig.tasks()[name], "check-base.log") for name in ("a", "b")}
    while not any(map(os.path.exists, logs.values())):
        time.sleep(0.02)
    asks = next(name for name, log in logs.items() if os.path.exists(log))
    waits = "b" if asks == "a" else "a"
    rig.ask("stop", waits)
    rig.work(lambda states: states[waits].is_over)
    assert not rig.supervisor.passes  # what the check says is not known yet
    rig.ask("stop", asks)
    rig.work()


@pytest.mark.slow
def test_stop_ends_trees_that_resist_all_at_once_and_quickly(rig):
    script = ("trap '' TERM HUP INT; setsid sh -c 'trap \"\" TERM; sleep 300' & "
              "nohup sleep 301 >/dev/null 2>&1 & (sleep 302 & ) & sleep 303")
    for number in range(8):
        rig.add(f"t{number}", f"@write x y\n@run {script}")
    rig.work(lambda states: len(states) == 8 and len(rig.processes()) >= 40)
    began = time.monotonic()
    for number in range(8):
        rig.ask("stop", f"t{number}")
    rig.work()
    assert time.monotonic() - began < 4  # 2 s on a machine that does nothing else
    assert set(rig.states().values()) == {"stopped"} and rig.processes() == []
    for number in range(8):
        reason = rig.tasks()[f"t{number}"].reason
        assert "processes ended in" in reason and f"refs/subagent-fleet/t{number}/1" in reason
        assert rig.git("show", f"refs/subagent-fleet/t{number}/1:x") == "y"


@pytest.mark.slow
def test_a_stop_names_no_work_where_nothing_was_changed(rig):
    rig.add("a", "@hang")
    rig.work(lambda states: states and word_of(states["a"]) == "running")
    rig.ask("stop", "a")
    rig.work()
    reason = rig.tasks()["a"].reason
    assert "ended in" in reason and "saved" not in reason


def test_a_task_that_was_not_running_is_stopped_and_says_so(rig):
    rig.add("a", "x", after=("nobody",))
    rig.ask("stop", "a")
    rig.work()
    assert rig.tasks()["a"].reason == "stopped while no agent was running"
    rig.ask("retry", "a")
    rig.work(lambda states: states["a"].state == "waiting")


def test_strays_of_an_agent_that_is_done_are_ended(rig):
    stays = f"{sys.executable} -c 'import time; time.sleep(300)'"
    rig.add("a", f"@write x y\n@run setsid {stays} >/dev/null 2>&1 &", check="true")
    rig.work()
    assert rig.states() == {"a": "done"} and rig.processes() == []


@pytest.mark.slow
def test_the_deadline_ends_a_try_and_counts_as_one(rig):
    rig.add("a", "@write x y\n@hang", deadline=1, tries=1, check="true")
    rig.work()
    state = rig.tasks()["a"]
    assert state.state == "failed" and "deadline" in state.reason
    assert rig.receipt("a")["ended"] == "deadline" and rig.git("show", "refs/subagent-fleet/a/1:x") == "y"


@pytest.mark.slow
def test_the_deadline_holds_without_a_supervisor(rig, monkeypatch):
    launch = sf.Launch
    monkeypatch.setattr(sf, "Launch", lambda *given, **more: launch(
        *given, **{**more, "seconds": 1 if more.get("seconds") else 0}))
    rig.add("a", "@hang")
    rig.work(lambda states: states and word_of(states["a"]) == "running")
    rig.leave()
    deadline = time.monotonic() + 10
    while rig.processes():
        assert time.monotonic() < deadline, "the system did not end it"
        time.sleep(0.05)


def test_a_lost_agent_is_started_again_and_nothing_counts_against_it(rig):
    rig.add("a", "@write one 1\n@once die\n@write two 2", check="test -s one")
    rig.work()
    state = rig.tasks()["a"]
    assert state.state == "done" and state.attempt.failures == 0 and state.attempt.tried == 1
    assert rig.journal("a").count("starting") == 2


@pytest.mark.slow
def test_a_session_that_was_never_begun_is_begun(rig):
    """The client was killed before it had read its prompt: there is nothing to resume."""
    client = (rig.bin / "claude").read_text()
    (rig.bin / "claude").write_text("#!/bin/sh\nsleep 60\n")
    rig.add("a", "@write x y", check="test -s x", rounds=0, tries=1)
    rig.work(lambda states: states and word_of(states["a"]) == "running")
    rig.leave()
    rig.kill_all()
    (rig.bin / "claude").write_text(client)
    rig.work()
    state = rig.tasks()["a"]
    assert (state.state, state.attempt.checks, state.attempt.failures) == ("done", (0,), 0)
    assert rig.journal("a").count("starting") == 3


@pytest.mark.slow
def test_an_answer_that_was_never_read_is_told_again(rig, limits):
    """Its process is killed before it begins with what it was told: nothing of that is lost."""
    limits(ask=0.2)
    rig.add("a", ASK, check="test -s x", rounds=0, tries=1)
    rig.work(lambda states: states and states["a"].asleep)
    client = (rig.bin / "claude").read_text()
    (rig.bin / "claude").write_text("#!/bin/sh\nsleep 60\n")
    rig.ask("answer", "a", answers={"Which database?": "x\n@write x y"})
    rig.work(lambda states: word_of(states["a"]) == "running" and rig.processes())
    rig.leave()
    rig.kill_all()
    (rig.bin / "claude").write_text(client)
    rig.work()
    assert rig.states() == {"a": "done"} and rig.tasks()["a"].attempt.checks == (0,)


@pytest.mark.slow
def test_five_losses_in_a_row_park(rig, limits):
    limits(lost=3)
    rig.add("a", "@die")
    client = (rig.bin / "claude").read_text()
    (rig.bin / "claude").write_text("#!/bin/sh\necho broken >&2; exit 1\n")
    rig.work(seconds=30)
    assert rig.states() == {"a": "parked"}
    assert "broken" in rig.tasks()["a"].reason
    (rig.bin / "claude").write_text(client)


@pytest.mark.slow
@pytest.mark.parametrize("prompt, limits", [
    ("@hang", {"stall": 1}), ("@run sleep 60", {"HEARTBEAT_SECONDS": 0.5}),
    ("@loop 13\n@hang", {})])
def test_what_is_stuck_is_resumed_once_and_then_failed(rig, monkeypatch, prompt, limits):
    for name, value in limits.items():
        if name.isupper():
            monkeypatch.setattr(sf, name, value)
    monkeypatch.setattr(sf, "CONTINUE_PROMPT", prompt)
    rig.add("a", f"@write x y\n{prompt}", check="true", stall=limits.get("stall", 300))
    rig.work(seconds=40, look=lambda: {"sessions": {}}) if "stall" not in limits else None
    if "stall" in limits:
        monkeypatch.setattr(sf.Supervisor, "view_of", lambda self, session: "idle")
        find = sf.find_stall
        monkeypatch.setattr(sf, "find_stall", lambda task, heard, view, timeout, now: find(
            task, heard, "idle", timeout, now))
        rig.work(seconds=40)
    state = rig.tasks()["a"]
    assert state.state == "failed" and state.reason.startswith("stalled:"), state.reason
    assert rig.receipt("a")["stalls"] == 1
    assert "got stuck once and was resumed" in sf.describe_try(rig.receipt("a"))
    assert rig.journal("a").count("starting") == 2


@pytest.mark.slow
def test_waiting_for_a_slot_is_not_being_stuck(rig, monkeypatch):
    monkeypatch.setattr(sf.Supervisor, "view_of", lambda self, session: "waiting")
    find = sf.find_stall
    monkeypatch.setattr(sf, "find_stall", lambda task, heard, view, timeout, now: find(
        task, heard, "waiting", 0.01, now + 5000 * (heard.phase != "silent")))
    rig.add("a", "@sleep 2.5\n@write x y", check="true")
    rig.work()
    assert rig.states() == {"a": "done"} and rig.journal("a").count("starting") == 1


@pytest.mark.slow
def test_errors_of_the_api_wait_or_park_and_are_no_try(rig, limits):
    limits(api_wait=(0.1,))
    rig.add("busy", "@write x y\n@once error api_error 529\n", check="true")
    rig.add("wrong", "@error api_error 404")
    rig.add("long", "@error prompt_too_long 400")
    rig.work()
    assert rig.states() == {"busy": "done", "wrong": "parked", "long": "parked"}
    assert rig.tasks()["busy"].attempt.failures == 0 and "split it" in rig.tasks()["long"].reason


@pytest.mark.parametrize("check", ["true", None])
def test_a_result_that_is_an_error_is_no_answer(rig, check):
    more = {"check": check} if check else {}
    rig.add("bad", "@write x y\n@error max_turns 0", tries=1, rounds=0, **more)
    rig.add("good", "@write x y\n@error max_turns 0", **more)  # its second answer is one
    rig.work()
    assert rig.states() == {"bad": "failed", "good": "done" if check else "review"}
    assert rig.tasks()["bad"].reason == "ended with an error: max_turns"


# -- nothing is lost, nothing is done twice --

def three_tasks(rig):
    """Three tasks whose every piece of work leaves one line in a file of its own."""
    rig.add("a", "@write work.txt a\n@sleep 0.05", check="grep -qx a work.txt")
    rig.add("b", "@ask Which?|x\n@write work.txt b", check="test -s work.txt")
    rig.add("c", "@write work.txt c", check="test -s mended || { echo '@write mended ok'; exit 1; }",
            after=("a",))


def finish(rig, most=3, seconds=60):
    """Supervise to the end, answering what is asked."""
    def answered(states):
        for name, state in states.items():
            if state.state == "asking" and not state.wish.answer:
                rig.ask("answer", name, answers={"Which?": "x"})
        return states and all(state.is_over for state in states.values())
    rig.work(answered, most=most, seconds=seconds)
    rig.leave()


def check_all_is_well(rig):
    """Each task is done exactly once; no process, no lock, no lost worktree is left."""
    assert set(rig.states().values()) == {"done"}, f"{rig.tasks()} {rig.said[-9:]}"
    for name in rig.tasks():
        assert rig.journal(name).count("done") == 1
        assert rig.git("rev-parse", f"run/{name}") == rig.tasks()[name].place.kept
    assert rig.processes() == []
    assert rig.folder.holder() == 0
    places = {path.name for path in rig.tree("a").parent.iterdir()}
    assert places == {name + end for name in rig.tasks() for end in ("", ".check")}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_kill_9_before_and_after_every_state_that_is_written_loses_nothing(tmp_path, part):
    """Every fault point: killed before and after each file that is replaced, then taken up."""
    from task_rig import Rig
    whole = Rig(tmp_path / "whole")
    three_tasks(whole)
    finish(whole)
    count = (whole.repo / ".git/subagent-fleet/run/history").read_text().count("\n")
    assert count >= 18
    hit = 0
    # An answer may be ordered twice before it is seen: not each run writes as often as this one.
    points = [f"{word}{number}" for number in range(1, count - 2) for word in ("before", "after")]
    points = points[part::4]  # processors share them
    for point in points:
        rig = Rig(tmp_path / point)
        three_tasks(rig)
        driver = rig.drive(point)
        deadline = time.monotonic() + 20
        while driver.poll() is None and time.monotonic() < deadline:
            if rig.states().get("b") == "asking" and not rig.tasks()["b"].wish.answer:
                rig.ask("answer", "b", answers={"Which?": "x"})
            time.sleep(0.02)
        hit += driver.poll() == -signal.SIGKILL
        driver.kill()
        driver.communicate()
        finish(rig)
        check_all_is_well(rig)
    assert hit >= 0.9 * len(points), f"{hit} of {len(points)}"


@pytest.mark.slow
@pytest.mark.parametrize("git", ["has moved it", "has moved it and told the place"])
def test_a_supervisor_that_is_killed_as_its_branch_moves_is_taken_up_later(tmp_path, monkeypatch, git):
    """Work that is kept again, seconds later, is the commit that the branch has already."""
    from task_rig import Rig
    rig = Rig(tmp_path)
    rig.add("t", "@write work.txt x", check="test -s work.txt")

    settle, follow = sf.settle_branch, sf.follow_branch
    if git == "has moved it":
        monkeypatch.setattr(sf, "follow_branch", lambda *words: None)

    def settle_then_die(*words):
        settle(*words)
        raise sf.Asleep

    monkeypatch.setattr(sf, "settle_branch", settle_then_die)
    rig.work(lambda states: states and not rig.supervisor.is_busy and "t" in rig.states()
             and rig.states()["t"] == "checking")
    rig.leave()
    moved = rig.git("rev-parse", "run/t")
    monkeypatch.setattr(sf, "settle_branch", settle)
    monkeypatch.setattr(sf, "follow_branch", follow)
    made = sf.Git.make_commit
    monkeypatch.setattr(sf.Git, "make_commit", lambda self, *words: time.sleep(1.1) or made(self, *words))
    rig.work(lambda states: states["t"].is_over)
    assert rig.states() == {"t": "done"}, f"{rig.tasks()} {rig.said[-9:]}"
    assert rig.git("rev-parse", "run/t") == rig.tasks()["t"].place.kept == moved
    assert rig.git("rev-list", "--count", "main..run/t") == "1"


@pytest.mark.slow
@pytest.mark.parametrize("seeds", in_parts(MANY or 4, 25), ids=str)
def test_random_kills_of_supervisors_and_agents_lose_nothing(tmp_path, seeds):
    """Trials with seeds; SUBAGENT_FLEET_TRIALS=100 is the whole promise: 500 kills and more."""
    from task_rig import Rig
    kills = 0
    for seed in seeds:
        rng = random.Random(seed)
        rig = Rig(tmp_path / str(seed))
        three_tasks(rig)
        for _ in range(rng.randrange(4, 9)):
            driver = rig.drive(most=2)
            time.sleep(rng.uniform(0.05, 0.6))
            if rig.states().get("b") == "asking" and rng.random() < 0.5:
                rig.ask("answer", "b", answers={"Which?": "x"})
                time.sleep(rng.uniform(0, 0.1))
            driver.kill()
            driver.communicate()
            kills += 1
            for number in rig.processes():
                if rng.random() < 0.4:
                    with_suppress(os.kill, number, signal.SIGKILL)
                    kills += 1
            if all(state.is_over for state in rig.tasks().values()) and rig.tasks():
                break
        finish(rig)
        check_all_is_well(rig)
    assert kills >= (5 if len(seeds) == 25 else 4) * len(seeds)


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["update-ref refs/heads/run/a", "read-tree --reset",
                                  "update-ref refs/subagent-fleet/a/start"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_while_a_place_is_made_leaves_nothing_in_the_way(rig, dies, when):
    real = shutil.which("git")
    first = f'{real} "$@"' if when == "after" else "true"
    rig.program("git", f"""\
case "$*" in
*'{dies}'*) [ -e "$HOME/died" ] || {{ touch "$HOME/died"; {first}; kill -9 $PPID; exit 1; }} ;;
esac
exec {real} "$@"
""")
    rig.add("a", "@write x y", check="true", check_in="same")
    assert [rig.drive().wait(30) for _ in range(2)] == [-signal.SIGKILL, 0]
    assert rig.states() == {"a": "done"}, rig.tasks()["a"].reason


def with_suppress(function, *given):
    with contextlib.suppress(OSError):
        function(*given)


@pytest.mark.slow
def test_one_supervisor_and_the_others_are_told(rig):
    rig.add("a", "@sleep 9\n@write x y", check="true")
    drivers = [rig.drive() for _ in range(8)]
    codes = sorted(driver.wait(30) for driver in drivers)
    for driver in drivers:
        driver.communicate()
    assert codes == [0] + [3] * 7
    assert rig.states() == {"a": "done"} and rig.journal("a").count("starting") == 1


@pytest.mark.slow
def test_a_lock_that_a_killed_one_leaves_for_a_moment_parks_nothing(rig):
    rig.add("a", "@write x y", check="true")
    rig.work()
    hold = rig.world.hold(rig.folder.of_task("a", "alive"))
    threading.Timer(0.3, hold.release).start()
    rig.ask("retry", "a")
    rig.work()
    assert rig.states() == {"a": "done"} and rig.tasks()["a"].attempt.tried == 2


def test_two_tries_are_never_alive_together(rig, monkeypatch):
    rig.add("a", "@hang")
    rig.work(lambda states: states and word_of(states["a"]) == "running"
             and (rig.home / "sessions" / states["a"].attempt.session).exists())
    rig.leave()
    # As if its file had lost what it knew: the agent lives, and the task waits.
    go = rig.place / "go"
    prompt = f"@run until [ -e '{go}' ]; do sleep 0.05; done\n@write x y"
    rig.folder.write_state(sf.change(rig.tasks()["a"], state="waiting", prompt=prompt))
    rig.work(lambda states: word_of(states["a"]) == "running")
    assert len({(PROC / f"{number}/stat").read_text().split()[5]
                for number in rig.processes()}) == 1  # one session of processes: one agent
    go.touch()
    rig.work()
    rig.leave()
    monkeypatch.setattr(sf, "LOCK_SECONDS", 0.2)
    monkeypatch.setattr(sf, "KILL_SECONDS", 0.5)
    hold = rig.world.hold(rig.folder.of_task("a", "alive"))  # it cannot be ended
    rig.ask("retry", "a")
    rig.work()
    hold.release()
    assert rig.states() == {"a": "parked"} and rig.tasks()["a"].cause == "still-alive"


@pytest.mark.slow
def test_a_disk_that_is_full_is_one_sentence_and_the_agent_goes_on(rig, monkeypatch):
    rig.add("a", "@sleep 0.3\n@write x y", check="true")
    rig.work(lambda states: states and word_of(states["a"]) == "running")

    def full(*words, **more):
        raise OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(sf.Directory, "write_new", full)
        with pytest.raises(sf.FleetError) as caught:
            rig.work()
    assert "No space left" in caught.value.what
    rig.leave()
    rig.work()
    assert rig.states() == {"a": "done"}


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"state": "done"}', bytes(range(256))])
def test_a_state_that_cannot_be_read_is_counted_and_the_others_go_on(rig, damage):
    for name in "ab":
        rig.add(name, "@write x y", check="true")
    rig.work()
    rig.leave()
    (rig.repo / ".git/subagent-fleet/run/tasks/a/state.json").write_bytes(damage)
    rig.ask("retry", "b")
    rig.work()
    assert rig.folder.read_states()[1] == 1
    assert rig.states() == {"a": "unreadable", "b": "done"}


@pytest.mark.slow
def test_an_order_that_was_obeyed_is_not_obeyed_again(rig):
    """Killed after the state was written and before the order was removed: it comes again."""
    rig.add("a", "@sleep 1\n@write x y", check="true")
    rig.work(lambda states: states and word_of(states["a"]) == "running")
    name = rig.ask("say", "a", text="@write said one")
    order = rig.repo / ".git/subagent-fleet/run/inbox" / name
    content = order.read_bytes()
    rig.work(lambda states: not order.exists())
    order.write_bytes(content)
    rig.work()
    assert rig.states() == {"a": "done"}
    assert rig.git("show", "run/a:said") == "one"


@pytest.mark.slow
def test_what_was_said_of_a_task_that_ends_is_done_however_slow_the_disk_is(rig, monkeypatch):
    rig.add("a", "x", coder=("sh", "-c", "sleep 1; echo x >> y"), check="true")
    rig.work(lambda states: states and word_of(states["a"]) == "running")
    write = rig.supervisor.folder.write_state
    monkeypatch.setattr(rig.supervisor.folder, "write_state", lambda state: (
        time.sleep(0.5 if state.state == "waiting" else 0), write(state)))
    advance = rig.supervisor.advance
    monkeypatch.setattr(rig.supervisor, "advance", lambda: (advance(), time.sleep(0.3))[0])
    rig.ask("say", "a", text="more")
    rig.work()
    assert rig.states() == {"a": "done"} and rig.journal("a").count("starting") == 2


@pytest.mark.slow
def test_a_person_has_the_session_and_gives_it_back(rig):
    rig.add("a", "@write x y\n@once hang", check="test -s x")
    rig.work(lambda states: states and word_of(states["a"]) == "running"
             and (rig.tree("a") / ".once").exists())
    terminal = rig.world.hold(rig.folder.of_task("a", "attached"))
    rig.ask("stop", "a")
    rig.work(lambda states: states["a"].state == "stopped")
    assert rig.processes() == []
    rig.ask("detach", "a")
    rig.work(lambda states: states["a"].state == "waiting")
    rig.supervisor.advance()
    assert rig.states() == {"a": "waiting"}  # while the terminal is open
    assert rig.supervisor.waits_for_time, "the run would end before the terminal has closed"
    assert sf.plan_task_rows(sf.see_tasks(rig.folder, sf.Backing()))[0].now == "open in a terminal"
    terminal.release()
    rig.work()
    assert rig.states() == {"a": "done"} and rig.tasks()["a"].attempt.tried == 1
    assert "A person has worked" in (rig.home / "sessions" / rig.tasks()["a"].attempt.session).read_text()


def test_a_fresh_retry_has_another_worktree_branch_and_session(rig):
    rig.add("a", "@write x y", check="false", tries=1, rounds=0)
    rig.work()
    first = rig.tasks()["a"]
    rig.ask("retry", "a", fresh=True)
    rig.work()
    second = rig.tasks()["a"]
    assert second.state == "failed" and second.attempt.session != first.attempt.session
    assert (second.place.branch, second.place.worktree) == ("run/a.2", f"{first.place.worktree}.2")
    assert second.old == (first.place,)


# -- repositories that are odd: one sentence, nothing half done --

def refuses(rig, slug, *words, cwd=None):
    with pytest.raises(sf.FleetError) as caught:
        where = cwd or rig.repo
        repository = sf.find_repository(rig.world, str(where))
        sf.find_commit(rig.world, repository, "HEAD")
    assert caught.value.slug == slug and caught.value.fix
    for word in words:
        assert word in caught.value.what


def test_no_repository_no_commit_and_bare_are_refused(rig, tmp_path):
    (tmp_path / "plain").mkdir()
    refuses(rig, "no-repository", "not a git repository", cwd=tmp_path / "plain")
    (tmp_path / "empty").mkdir()
    rig.git("init", "-q", cwd=tmp_path / "empty")
    refuses(rig, "no-commit", "no commits", cwd=tmp_path / "empty")
    rig.git("init", "-q", "--bare", str(tmp_path / "bare.git"))
    refuses(rig, "bare-repository", "bare", cwd=tmp_path / "bare.git")
    rig.world.environ = {**rig.world.environ, "PATH": str(tmp_path / "nowhere")}
    refuses(rig, "no-git", "git")
    rig.world.environ = dict(rig.environ)
    rig.world.run_git = lambda *words, **more: sf.Ran(128, b"", "fatal: detected dubious ownership")
    refuses(rig, "foreign-repository", "somebody else")
    del rig.world.run_git
    with pytest.raises(sf.FleetError) as caught:
        sf.find_commit(rig.world, rig.folder.repository, "nowhere")
    assert caught.value.slug == "bad-base"


@pytest.mark.parametrize("broken, word", [
    ("[core]\nrepositoryFormatVersion = 1\n[extensions]\nfromTomorrow = true\n", "fromtomorrow"),
    ("[core\n", "bad config line")])
def test_what_git_cannot_read_is_told_in_its_words_and_never_made_anew(rig, tmp_path, broken, word):
    rig.git("init", "-q", cwd=tmp_path)
    (tmp_path / ".git" / "config").write_text(broken)
    refuses(rig, "git-failed", word, cwd=tmp_path)


def test_a_git_that_fails_at_the_commit_is_not_a_repository_without_one(rig):
    ask = rig.world.run_git
    rig.world.run_git = lambda words, directory: sf.Ran(129, b"", "error: unknown option") \
        if "--verify" in words else ask(words, directory)
    refuses(rig, "git-failed", "unknown option")


def test_branches_and_directories_in_the_way_park_and_stay(rig):
    rig.keeps_outside = False
    rig.git("branch", "taken")
    rig.git("commit", "-q", "--allow-empty", "-m", "on")
    rig.git("branch", "run/b", "HEAD~1")
    rig.folder.make()
    rig.tree("c").mkdir(parents=True)
    (rig.tree("c") / "mine.txt").write_text("mine\n")
    rig.add("a", "@write x y", branch="taken/a")
    rig.add("b", "@write x y")
    rig.add("c", "@write x y")
    rig.work()
    tasks = rig.tasks()
    assert set(rig.states().values()) == {"parked"}
    assert "could not be made" in tasks["a"].reason and "already exists" in tasks["b"].reason
    assert "already exists" in tasks["c"].reason
    assert (rig.tree("c") / "mine.txt").read_text() == "mine\n"
    assert rig.git("rev-parse", "run/b") == rig.git("rev-parse", "HEAD~1")


def test_a_directory_that_a_killed_git_has_left_is_in_nobodys_way(rig):
    rig.add("a", "@write x y", check="true")
    for path in (rig.tree("a"), f"{rig.tree('a')}.check"):
        os.makedirs(path)
    rig.work()
    assert rig.states() == {"a": "done"}, rig.said


@pytest.mark.parametrize("mark", ["", "fedcba9876543210\n", None])
def test_a_repository_that_does_not_carry_this_tasks_id_is_never_removed(rig, mark):
    rig.folder.make()
    rig.git("clone", "-q", str(rig.repo), str(rig.tree("a")))
    if mark is not None:
        (rig.tree("a") / ".git/subagent-fleet.task").write_text(mark)
    (rig.tree("a") / "mine.txt").write_text("mine")
    rig.add("a", "@write x y", check="true")
    rig.work()
    assert rig.states() == {"a": "parked"} and rig.tasks()["a"].cause == "in-the-way"
    assert (rig.tree("a") / "mine.txt").read_text() == "mine"


def test_a_place_that_has_gone_parks(rig):
    rig.add("b", "@once die\n@hang", check="true")
    rig.work(lambda states: states and word_of(states["b"]) == "running")
    rig.leave()
    rig.kill_all()
    shutil.rmtree(rig.tree("b"))
    rig.work()
    assert rig.states()["b"] == "parked" and rig.tasks()["b"].cause == "worktree-gone"
    rig.ask("retry", "b", fresh=True)
    rig.work(lambda states: word_of(states["b"]) == "running")
    rig.ask("stop", "b")
    rig.work()


def test_a_worktree_of_the_version_before_is_named_with_the_line_to_type(rig):
    rig.keeps_outside = False  # as that version has left it
    rig.add("a", "@write x y", check="true", check_in="same")
    rig.work()
    rig.leave()
    tree = rig.tree("a")
    shutil.rmtree(tree)
    rig.git("worktree", "add", "-q", "--lock", "--reason", "subagent-fleet task a", str(tree), "run/a")
    state = rig.tasks()["a"]
    rig.folder.write_state(sf.change(state, id="", git=str(rig.repo / ".git/worktrees/a")))
    rig.ask("retry", "a")
    rig.work()
    state = rig.tasks()["a"]
    assert (state.state, state.cause) == ("parked", "linked-worktree") and tree.is_dir()
    typed = state.reason.split("; ", 1)[1].rsplit("; ", 1)[0]
    subprocess.run(["sh", "-ec", typed], cwd=rig.repo, check=True, env={**os.environ, **rig.environ})
    assert not tree.exists()
    rig.ask("retry", "a", fresh=True)
    rig.work()
    assert rig.states() == {"a": "done"}


@pytest.mark.parametrize("odd", ["shallow", "detached", "merging", "quotes", "hooks", "nested",
                                 "submodule", "linked"])
def test_odd_repositories_are_worked_in_as_they_are(rig, tmp_path, odd):
    repo = rig.repo
    rig.keeps_outside = False
    if odd == "shallow":
        rig.git("commit", "-q", "--allow-empty", "-m", "two")
        rig.git("clone", "-q", "--depth", "1", f"file://{repo}", str(tmp_path / "shallow"))
        repo = tmp_path / "shallow"
    elif odd == "detached":
        rig.git("checkout", "-q", "--detach")
    elif odd == "merging":
        rig.git("checkout", "-q", "-b", "other")
        (repo / "a.txt").write_text("two\n")
        rig.git("commit", "-qam", "two")
        rig.git("checkout", "-q", "main")
        (repo / "a.txt").write_text("three\n")
        rig.git("commit", "-qam", "three")
        rig.git("merge", "other", check=False)
    elif odd == "quotes":
        repo = tmp_path / "it's \"a\" repo"
        rig.git("clone", "-q", str(rig.repo), str(repo))
    elif odd == "hooks":
        hooks = tmp_path / "hooks"
        hooks.mkdir()
        for name in ("post-checkout", "pre-commit", "reference-transaction"):
            (hooks / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\nexit 1\n")
            (hooks / name).chmod(0o755)
        rig.git("config", "core.hooksPath", str(hooks))
    elif odd == "nested":
        rig.git("init", "-q", str(repo / "inner"))
    elif odd == "submodule":
        rig.git("-c", "protocol.file.allow=always", "submodule", "add", "-q", str(rig.repo), "sub")
        rig.git("commit", "-qm", "sub")
    elif odd == "linked":
        rig.git("worktree", "add", "-q", "-b", "side", str(tmp_path / "side"))
        repo = tmp_path / "side"
    rig.repo = repo
    before = rig.git("status", "--porcelain")
    rig.add("a", "@write x y", check="test -s x")
    rig.work()
    assert rig.states() == {"a": "done"}, rig.tasks()["a"].reason
    assert rig.git("show", "run/a:x") == "y"
    assert rig.git("status", "--porcelain") == before
    assert not (tmp_path / "ran").exists()
    rig.leave()


def test_a_missing_filter_is_one_sentence(rig):
    rig.keeps_outside = False
    (rig.repo / ".gitattributes").write_text("*.bin filter=lfs\n")
    (rig.repo / "a.bin").write_text("x")
    rig.git("add", ".")
    rig.git("commit", "-qm", "lfs")
    rig.git("config", "filter.lfs.smudge", "no-such-program smudge")
    rig.git("config", "filter.lfs.required", "true")
    rig.add("a", "@write x y")
    rig.work()
    state = rig.tasks()["a"]
    assert state.state == "parked" and "could not be made" in state.reason
    assert "starting" not in rig.journal("a") and not rig.tree("a").exists()


# -- what cannot be kept, or cannot be run, parks with its cause --

COMMIT = "git add -A && git -c user.name=a -c user.email=b commit -qm c"
PARKED = {
    "odd-file": ("mkfifo x", {}),
    "nested-repository": ("git init -q inner; echo x > inner/x", {}),
    "copy-committed": (f"echo x > y; git add -f .env; {COMMIT}", {"copy": (".env",)}),
    "worktree-changed": ("rm -r .git", {}),
    "coder-missing": ("exit 127", {}),
    "check-missing": ("echo x > y", {"check": "no-such-program -q"}),
    "branch-moved": ("echo x > y; cd {repo}; git update-ref refs/heads/run/a $(git -c user.name=a "
                     "-c user.email=b commit-tree -p HEAD -m x HEAD^{tree})", {}),
    "odd-objects": (f"echo x > y; {COMMIT}; rm -f .git/objects/$(git rev-parse HEAD:y | sed 's,..,&/,')", {}),
    "no-baseline": ("echo x > y; rm -f {repo}/.git/subagent-fleet/run/tasks/a/baseline.json", {}),
    "no-head": ("echo x > y; git symbolic-ref HEAD refs/heads/nowhere", {}),
}


@pytest.mark.parametrize("cause", PARKED)
def test_what_cannot_be_kept_or_run_parks_with_its_cause_and_loses_nothing(rig, cause):
    rig.keeps_outside = False
    (rig.repo / ".gitignore").write_text(".env\n")
    (rig.repo / ".env").write_text("KEY=1\n")
    rig.git("add", ".gitignore")
    rig.git("commit", "-qm", "ignore")
    script, more = PARKED[cause]
    rig.add("a", "x", coder=("sh", "-c", script.replace("{repo}", str(rig.repo))),
            **{"check": "true", **more})
    rig.work()
    state = rig.tasks()["a"]
    assert (state.state, state.cause) == ("parked", cause), state.reason
    assert not rig.git("log", "--all", "--format=%H", "--", ".env") or cause == "copy-committed"
    if rig.tree("a").exists() and cause not in ("coder-missing", "check-missing"):
        assert not sf.tidy_task(rig.folder, state).removes or cause in (
            "branch-moved", "copy-committed"), cause


# -- the ladder --

SMALL, HEAVY = "claude-haiku-local", "claude-sonnet-local"
LADDER = {"models": ("small-coder", "heavy-coder"), "check": "test -s done.txt", "rounds": 1}


def ladder_receipts(rig, name="t"):
    return [rig.receipt(name, number) for number in range(1, rig.tasks()[name].attempt.tried + 1)]


def test_a_task_moves_up_when_its_check_fails_with_its_rounds_over(task_rig):
    task_rig.add("t", f"@write seen.txt by\n@on {HEAVY} write done.txt ok", **LADDER)
    task_rig.work()
    state = task_rig.tasks()["t"]
    assert (state.state, state.attempt.rung, state.attempt.climbed) == ("done", HEAVY, (SMALL,))
    first, second = ladder_receipts(task_rig)
    assert (first["rung"], first["check"]["rounds"], first["verdict"]) == (SMALL, [1, 1], "waiting")
    assert (second["rung"], second["climbed"], second["verdict"]) == (HEAVY, [SMALL], "done")
    # The same place: what the first has left is there; and the second is told what was wrong.
    seen = task_rig.git("show", "run/t:seen.txt").splitlines()
    assert len(seen) > 1
    sessions = [path.read_text() for path in (task_rig.home / "sessions").iterdir()
                if path.suffix == ""]
    told = [text for text in sessions if "Another model has worked on this task" in text]
    assert len(told) == 1 and "The check of this task failed (exit 1)" in told[0]
    assert told[0].startswith("@write seen.txt by")  # a new session gets the whole task
    assert ("t", "moves up", f"from {SMALL}: check failed (exit 1)") in task_rig.said


@pytest.mark.slow
def test_a_task_moves_up_that_is_too_large_or_gets_stuck_twice(task_rig, monkeypatch):
    find = sf.find_stall
    monkeypatch.setattr(sf, "find_stall", lambda task, heard, view, timeout, now: find(
        task, heard, "idle", timeout, now))
    task_rig.add("large", f"@on {SMALL} error prompt_too_long 400\n@write done.txt ok", **LADDER)
    task_rig.work()
    monkeypatch.setattr(sf, "CONTINUE_PROMPT", f"@on {SMALL} hang")
    task_rig.add("stuck", f"@on {SMALL} hang\n@write done.txt ok", stall=1, **LADDER)
    task_rig.work()
    assert task_rig.states() == {"large": "done", "stuck": "done"}
    assert ladder_receipts(task_rig, "large")[0]["cause"] == "too-large"
    assert ladder_receipts(task_rig, "stuck")[0]["cause"] == "stalled"


def test_the_coders_own_login_gets_nothing_of_the_fleet(task_rig):
    task_rig.add("t", "@run env >env.txt\n@write done.txt ok", **{**LADDER, "models": ("login",)})
    task_rig.work()
    assert task_rig.states() == {"t": "done"}
    assert "ANTHROPIC" not in task_rig.git("show", "run/t:env.txt")
    task_rig.add("u", "@run env >env.txt\n@write done.txt ok", **LADDER)
    task_rig.work()
    assert "ANTHROPIC_BASE_URL" in task_rig.git("show", "run/u:env.txt")  # it would be seen


def test_so_many_tasks_a_day_leave_the_house_and_no_more(task_rig):
    for name in ("a", "b", "c"):
        task_rig.add(name, "@on claude-haiku-local write x x",
                     **{**LADDER, "models": ("small-coder", "login"), "tries": 1, "rounds": 0})
    task_rig.work(cloud_limit=2)
    states = task_rig.tasks()
    assert sum(state.attempt.rung == "login" for state in states.values()) == 2
    [kept] = [state for state in states.values() if state.attempt.rung != "login"]
    assert (kept.state, kept.reason) == (
        "failed", "check failed (exit 1); `cloud_limit` keeps it off login today")
