"""Every arrow of a task, one by one, and what no history of events can do."""
import ast
import json
import random
import re

import pytest

import subagent_fleet as sf
from tools import ROOT

AT_WORK = ("running", "asking", "checking")
GIT = {"worktree": "/w", "git": "/g", "branch": "run/t", "id": "ab"}
QUESTION = {"input": {"questions": [{"question": "Which?", "options": [{"label": "x"}]}]}}
ASKING = {"state": "asking", "question": {"id": "q", "request": QUESTION}, "open": True, "tried": 1}
ANSWER = {"Which?": "x"}
DONE, BAD = sf.WorkDone(changed=("a",)), sf.WorkDone()


def task(**more):
    return sf.TaskSpec("t", prompt="x", **more)


def state_of(state="waiting", **more):
    spec = {name: more.pop(name) for name in ("check", "tries", "rounds") if name in more}
    return sf.change(sf.TaskState("t", task(**spec), 0), state=state, **more)


def flat(state):
    """All that is known, without the records that have it."""
    return {**vars(state), **vars(state.place), **vars(state.attempt), **vars(state.wish)}


def order(do, identity="1", **more):
    return sf.read_order({"do": do, **more}, identity)


def closed(to, **more):
    own = {name: more.pop(name) for name in ("left", "words", "had_agent") if name in more}
    return sf.Closed(sf.Ruling(to, **more), **own)


# Before, event, after, what its thread does; then what else is so of the state after it.
ARROWS = [
    (state_of(reason="old", until=9.0), sf.Begun("big"), "running", "",
     {"phase": "preparing", "at": 100.0, "reason": "", "until": 0.0, "rung": "big"}),
    (state_of("running", phase="preparing"), sf.Entered(), "running", "make", {}),
    (state_of("running", phase="starting"), sf.Entered(), "running", "make", {}),
    (state_of("running"), sf.Entered(), "running", "listen", {}),
    (state_of(**ASKING), sf.Entered(), "asking", "listen", {}),
    (state_of("checking"), sf.Entered(), "checking", "check", {}),
    (state_of("parked", cause="still-alive", stopping=True), sf.Entered(), "parked", "end again", {}),
    (state_of("parked"), sf.Entered(), "parked", "", {}),
    (state_of("running", phase="preparing", tried=1, round=2, checks=(1,), worked=5.0),
     sf.Planned(2, GIT), "running", "",
     {"tried": 2, "open": True, "round": 0, "checks": (), "worked": 0.0, "began": 100.0, **GIT}),
    (state_of("running", phase="starting", tried=1, round=2, open=True), sf.Planned(0, GIT),
     "running", "", {"tried": 1, "round": 2, "phase": "preparing"}),
    (state_of("running", phase="preparing"), sf.Ready(), "running", "start", {}),
    (state_of("running", phase="preparing", prompt="again", says=("a", "b"), told=("z",)),
     sf.Starting("s", 7), "running", "",
     {"phase": "starting", "session": "s", "start_at": 7, "heard_from": 7, "says": (),
      "prompt": "again\n\na\n\nb", "told": ("z", "a", "b")}),
    (state_of("running", phase="starting"), sf.Started(5, "who"), "running", "listen",
     {"phase": "", "spoken": True, "client": 5, "tells": [("started", "who")]}),
    (state_of("running", phase="starting", spoken=True), sf.Started(5, "who"), "running", "listen",
     {"tells": [("resumed", "who")]}),
    (state_of("running"), sf.Resumed(), "running", "listen", {}),
    (state_of("running", prompt="p"), sf.Spoke(), "checking", "check", {"prompt": ""}),
    (state_of(**ASKING), sf.Spoke(), "checking", "check", {"question": {}}),
    # a question
    (state_of("running"), sf.Asked("q", QUESTION), "asking", "",
     {"question": ASKING["question"],
      "tells": [("asks", "Which?  1 x  `subagent-fleet task answer t 1`")]}),
    (state_of("asking", question={"id": "p"}), sf.Asked("q", QUESTION), "asking", "",
     {"question": ASKING["question"]}),
    (state_of(**ASKING), order("answer", answers=ANSWER), "asking", "", {"answer": ANSWER}),
    (state_of(**ASKING, answer=ANSWER), sf.Answered("x"), "running", "",
     {"answer": {}, "question": {}, "tells": [("answered", "x")]}),
    (state_of(**ASKING), sf.Answered(), "running", "", {"tells": []}),
    (state_of(**ASKING, prompt="p"), sf.Slept(), "asking", "",
     {"phase": "asleep", "prompt": "", "question": ASKING["question"]}),
    (state_of(**ASKING, phase="asleep"), order("answer", answers=ANSWER), "waiting", "",
     {"prompt": "The answer to your question is: x", "open": True}),
    # The answer came while its process was being ended.
    (state_of(**ASKING, answer=ANSWER), sf.Slept(), "waiting", "",
     {"prompt": "The answer to your question is: x", "answer": {}}),
    (state_of(**ASKING, says=("no",)), sf.Slept(), "waiting", "", {"says": ("no",), "open": True}),
    (state_of(**ASKING, phase="asleep"), order("say", text="no"), "waiting", "",
     {"says": ("no",), "open": True}),
    (state_of(**ASKING, phase="asleep"), order("stop"), "stopped", "", {"stopping": False}),
    # losses, stalls, deadlines, the model
    (state_of("running", prompt="p"), sf.Lost(False, True, "x"), "waiting", "",
     {"lost": 1, "prompt": "p", "until": 100.0, "reason": "its process ended without a result: x",
      "tells": [("lost", "its process ended without a result: x; starting it again")]}),
    (state_of("running", prompt="p", lost=2, spoken=True), sf.Lost(True, False, "x"), "waiting", "",
     {"lost": 3, "until": 104.0, "spoken": False, "prompt": sf.LOST_PROMPT}),
    (state_of("running", lost=4), sf.Lost(True, True, "broken"), "running", "close",
     {"ruling": ("parked", "lost", "lost")}),
    (state_of("running", stopping=True), sf.Lost(True, True, "x"), "stopped", "", {"stopping": False}),
    (state_of(**ASKING), sf.Lost(True, True, "x"), "asking", "", {"phase": "asleep"}),
    (state_of("running"), sf.Stalled("silent"), "running", "close",
     {"ruling": ("waiting", "stalled", "stalled")}),
    (state_of("running", stalls=1), sf.Stalled("silent"), "running", "close",
     {"ruling": ("failed", "stalled", "stalled")}),
    (state_of("running"), sf.Expired(), "running", "close",
     {"ruling": ("waiting", "deadline", "deadline")}),
    (state_of("running", failures=1), sf.Expired(), "running", "close",
     {"ruling": ("failed", "deadline", "deadline")}),
    (state_of("checking"), sf.ApiFailed("busy", False), "checking", "close",
     {"ruling": ("waiting", "api", "api_error")}),
    (state_of("checking"), sf.ApiFailed("no such model", True), "checking", "close",
     {"ruling": ("parked", "api", "api_error")}),
    (state_of("checking"), sf.ApiFailed("split it", True, "too-large"), "checking", "close",
     {"ruling": ("parked", "too-large", "api_error")}),
    (state_of("checking", api_errors=19), sf.ApiFailed("busy", False), "checking", "close",
     {"ruling": ("parked", "api", "api_error")}),
    # the verdict
    (state_of("checking", check="c"), sf.Checked(DONE, 0, ""), "checking", "close",
     {"ruling": ("done", "", "result")}),
    (state_of("checking"), sf.Checked(DONE, None, ""), "checking", "close",
     {"ruling": ("review", "", "result")}),
    (state_of("checking", check="c", check_seconds=1.5, lost=3), sf.Checked(DONE, 1, "no"), "running", "feed",
     {"round": 1, "lost": 0, "reason": "check failed (exit 1)", "tells": [
         ("retrying", "check failed (exit 1) after 1.5 s: sent back to the agent (round 1 of 3). The check said: no")]}),
    (state_of("checking", check="c"), sf.Checked(DONE, 1, "a\nNo module named pytest \n\n"), "running",
     "feed", {"tells": [("retrying", "check failed (exit 1) after 0.0 s: sent back to the agent (round 1 of 3). "
                         "The check said: No module named pytest")]}),
    (state_of("checking", check="c", round=3), sf.Checked(DONE, 1, "no"), "checking", "close",
     {"ruling": ("waiting", "check", "result")}),
    (state_of("checking", check="c", round=3, failures=1), sf.Checked(DONE, 1, "no"), "checking", "close",
     {"ruling": ("failed", "check", "result")}),
    (state_of("checking"), sf.Checked(sf.replace(BAD, said="Which one?"), None, ""), "asking", "sleep",
     {"question": {"id": "prose", "request": sf.ask_in_words("Which one?")}}),
    # ends
    (state_of("running", stopping=True), sf.Interrupted(), "running", "close",
     {"ruling": ("stopped", "", "stopped")}),
    (state_of("running"), sf.Trouble("no room", "full"), "running", "close",
     {"ruling": ("parked", "full", "refused")}),
    (state_of("done"), sf.Trouble("a bug", "bug"), "done", "", {"tells": [("note", "a bug")]}),
    (state_of("running", phase="preparing"), sf.Refused("a bug", "bug"), "parked", "",
     {"phase": "", "reason": "a bug", "cause": "bug"}),
    (state_of("checking", open=True, prompt="p", lost=2), closed("done", had_agent=True, words="4s"),
     "done", "", {"open": False, "lost": 0, "prompt": "", "ended": 100.0, "tells": [("done", "4s")]}),
    (state_of("running", phase="preparing", prompt="p"), closed("parked", reason="r", cause="scope"),
     "parked", "", {"prompt": "p", "reason": "r", "cause": "scope"}),
    (state_of("running", stopping=True), closed("stopped", reason="1 process ended"), "stopped", "",
     {"stopping": False, "reason": "1 process ended"}),
    (state_of("running", stopping=True), closed("stopped", left="x (pid 1)"), "parked", "",
     {"cause": "still-alive", "reason": "still running: x (pid 1)"}),
    (state_of("checking", open=True), closed("waiting", cause="check", reason="r", feedback="f"),
     "waiting", "", {"open": False, "failures": 1, "until": 100.0, "prompt": "f\n\nTry again."}),
    (state_of("checking", open=True, failures=1), closed("waiting", cause="check", reason="r"),
     "waiting", "", {"failures": 2, "until": 110.0, "prompt": "The last try failed: r.\n\nTry again."}),
    (state_of("running", open=True), closed("waiting", cause="stalled"), "waiting", "",
     {"open": True, "stalls": 1, "failures": 0, "prompt": "Continue."}),
    (state_of("checking", open=True, api_errors=1), closed("waiting", cause="api"), "waiting", "",
     {"open": True, "api_errors": 2, "failures": 0, "until": 160.0}),
    (state_of("checking", open=True, failures=1, rung="small", climbed=("tiny",), spoken=True, base="b" * 40),
     closed("waiting", cause="check", reason="r", feedback="f", climbs="small", leaves=True, words="r"),
     "waiting", "", {"open": False, "failures": 0, "rung": "", "climbed": ("tiny", "small"), "spoken": False,
                     "left_at": 100.0, "tells": [("moves up", "from small: r")]}),
    # A stop that came while a failed try was closed is none of the next try alone.
    (state_of("checking", stopping=True), closed("waiting", cause="check", reason="r"), "stopped", "",
     {"stopping": False}),
    (state_of("checking", says=("more",)), closed("done"), "waiting", "", {"says": ("more",), "failures": 0}),
    (state_of("checking", says=("more",), stopping=True), closed("done"), "done", "", {"says": ("more",)}),
    (state_of("checking", says=("more",)), closed("parked", cause="scope"), "parked", "", {"says": ("more",)}),
    (state_of("parked", cause="still-alive", stopping=True), sf.EndedAgain("1 process ended", ""),
     "stopped", "", {"stopping": False, "cause": "", "reason": "1 process ended"}),
    (state_of("parked", cause="still-alive", stopping=True), sf.EndedAgain("", "x"), "parked", "",
     {"stopping": False, "cause": "still-alive", "reason": "still running: x"}),
    # a person
    (state_of(), order("say", text="a"), "waiting", "", {"says": ("a",)}),
    (state_of("running"), order("say", text="a"), "running", "", {"says": ("a",)}),
    (state_of("running", says=("a", "b")), sf.Told(("a",)), "running", "",
     {"says": ("b",), "tells": [("told", "a")]}),
    *[(state_of(over, failures=2), order("say", text="a"), "waiting", "",
       {"says": ("a",), "open": False, "failures": 0}) for over in sf.TERMINAL_STATES],
    (state_of(), order("stop"), "stopped", "",
     {"reason": "stopped while no agent was running", "tells": [("stopped", "stopped while no agent was running")]}),
    *[(state_of(live), order("stop"), live, "", {"stopping": True}) for live in AT_WORK],
    (state_of("done"), order("stop"), "done", "", {"stopping": False}),
    (state_of("parked", cause="scope"), order("stop"), "parked", "", {"stopping": False}),
    (state_of("parked", cause="still-alive"), order("stop"), "parked", "end again", {"stopping": True}),
    (state_of("failed", failures=2, lost=1, api_errors=3, reason="r", cause="check", forgotten=True,
              newer=task(check="new")),
     order("retry", say="b"), "waiting", "",
     {"failures": 0, "lost": 0, "api_errors": 0, "prompt": "The last try ended: r. Try again.",
      "says": ("b",), "forgotten": False, "task": task(check="new"), "newer": None}),
    (state_of("done", spoken=True), order("retry", spec={"name": "t", "prompt": "y"}), "waiting", "",
     {"prompt": sf.CHANGED_PROMPT.format(prompt="y"), "task": sf.TaskSpec("t", prompt="y")}),
    (state_of("failed", session="s", spoken=True, tried=2, **GIT), order("retry", fresh=True), "waiting", "",
     {"fresh": 1, "session": "", "spoken": False, "git": "", "tried": 2, "prompt": ""}),
    (state_of("review", kept="a" * 40), order("accept"), "done", "",
     {"reason": "accepted", "tells": [("done", "accepted")]}),
    (state_of("parked", cause="scope", kept="a" * 40), order("accept"), "done", "", {}),
    (state_of("parked", cause="lost", kept="a" * 40), order("accept"), "parked", "", {}),
    (state_of("review"), order("accept"), "review", "", {}),
    (state_of("review", kept="a" * 40), order("accept", reason="it has moved", cause="branch-moved"),
     "review", "", {"reason": "it has moved", "cause": "branch-moved"}),
    (state_of("review"), sf.BranchMerged(), "done", "", {"reason": "merged"}),
    (state_of("done"), order("forget"), "done", "", {"forgotten": True}),
    (state_of("running"), order("forget"), "running", "", {"forgotten": False}),
    (state_of("stopped", tried=1), order("detach"), "waiting", "",
     {"prompt": sf.ATTACHED_PROMPT, "spoken": True, "open": True}),
    (state_of("done"), order("detach"), "done", "", {}),
    (state_of("done", prepared=True, **GIT), order("gone", git="/g"), "done", "",
     {"git": "", "prepared": False}),
    (state_of("done", kept="a" * 40), order("landed", kept="a" * 40, into="main"), "done", "",
     {"landed": "main", "reason": "landed on main"}),
    (state_of("done", kept="a" * 40), order("evict", kept="a" * 40, why="conflicts"), "done", "",
     {"reason": "did not land: conflicts", "cause": "landing"}),
    (state_of("done", kept="a" * 40), order("evict", kept="c" * 40, why="x"), "done", "", {"cause": ""}),
    (state_of("done", kept="a" * 40), order("landed", kept="c" * 40, into="main"), "done", "", {"landed": ""}),
    (state_of("done", kept="a" * 40, rung="big", told=("z",), session="s", tried=2, **GIT),
     order("return", kept="a" * 40, tip="b" * 40, begin="c" * 40, why="conflicts", text="settle", files=["a"]),
     "waiting", "", {"base": "b" * 40, "start": "b" * 40, "kept": "c" * 40, "returned": 1, "rung": "big",
                     "conflicts": ("a",), "prompt": "settle", "told": ("z",), "session": "", "fresh": 1,
                     "tells": [("sent back", "conflicts")]}),
    (state_of("done", kept="a" * 40, rung="small", returned=3),
     sf.replace(order("return", kept="a" * 40, tip="b" * 40, begin="c" * 40, why="x", text="y"), climbs=True),
     "waiting", "", {"rung": "", "climbed": ("small",), "returned": 1}),
    (state_of("done", kept="a" * 40),
     order("return", kept="d" * 40, tip="b" * 40, begin="c" * 40, why="x", text="y"), "done", "", {"returned": 0}),
    (state_of(origin="file"), sf.Removed(), "stopped", "", {"forgotten": True}),
    (state_of(), sf.Removed(), "waiting", "", {}),
    (state_of(origin="file", tried=1), sf.Removed(), "waiting", "", {}),
    (state_of(), sf.Revised(task(check="z"), "file", "b" * 40), "waiting", "",
     {"task": task(check="z"), "base": "b" * 40, "newer": None}),
    (state_of("running", tried=1), sf.Revised(task(check="z", touch=("y",)), "file"), "running", "",
     {"task": task(check="z"), "newer": task(check="z", touch=("y",))}),
    (state_of("running", tried=1), sf.Revised(task(deadline=5), "file"), "running", "",
     {"task": task(deadline=5), "newer": None}),
    (state_of("done", tried=1, forgotten=True, git="/g"), sf.Revised(task(check="z"), "file"), "waiting", "",
     {"task": task(check="z"), "fresh": 1, "first": 1, "forgotten": False}),
    (state_of("done", tried=1, forgotten=True), sf.Revised(task(), "file"), "done", "", {"forgotten": True}),
    (state_of("done", tried=1, forgotten=True), sf.Revised(task(), "typed"), "waiting", "", {"forgotten": False}),
]


@pytest.mark.parametrize("before, event, after, do, more", ARROWS, ids=[
    f"{number}-{before.state}-{type(event).__name__}" for number, (before, event, *_) in enumerate(ARROWS)])
def test_each_arrow_leads_where_the_table_says(before, event, after, do, more):
    made = sf.step(before, event, 100.0)
    assert (made.state.state, made.do) == (after, do)
    for name, value in more.items():
        if name == "tells":
            assert list(made.tells) == value
        elif name == "ruling":
            assert (made.ruling.to, made.ruling.cause, made.ruling.ended) == value
        else:
            assert flat(made.state)[name] == value, name


def test_every_event_has_an_arrow_that_is_tested_and_every_state_one_that_leads_on():
    kinds = {kind for kind in vars(sf).values() if isinstance(kind, type)
             and issubclass(kind, sf.Event) and kind not in (sf.Event, sf.Order)}
    assert set(sf.ARROWS) == kinds == {type(event) for _, event, *_ in ARROWS}
    assert {type(order(do, text="", answers={}, git="", kept="", into="", tip="", begin="", why="")) for do in sf.ORDERS} == set(sf.ORDERS.values())
    assert {state for states, _ in sf.ARROWS.values() for state in states} == set(sf.STATES)


@pytest.mark.parametrize("given", [
    {"do": "say"}, {"do": "answer", "answers": "x"}, {"do": "nothing"}, {}, {"do": ["say"]}])
def test_an_order_that_says_nothing_is_none(given):
    assert sf.read_order(given, "1") is None


def some_event(rng, state):
    """Anything that can happen, whether it fits or not."""
    number = str(rng.randrange(10 ** 9))
    ruling = sf.Ruling(rng.choice(("done", "review", "failed", "parked", "waiting", "stopped")),
                       "r", "f", rng.choice(("check", "api", "stalled", "scope", "")))
    work = rng.choice((DONE, BAD, sf.replace(DONE, outside=("x",)), sf.replace(BAD, said="Which?")))
    return rng.choice((
        sf.Begun(), sf.Entered(), sf.Planned(state.attempt.tried + 1, GIT), sf.Ready(), sf.Starting("s", 1),
        sf.Started(1, ""), sf.Resumed(), sf.Spoke(), sf.Asked(number, QUESTION), sf.Answered("x"),
        sf.Told(state.wish.says[:1]), sf.Slept(), sf.Lost(rng.random() < 0.5, rng.random() < 0.5, ""),
        sf.Stalled("x"), sf.Expired(), sf.Checked(work, rng.choice((None, 0, 1)), "out"),
        sf.ApiFailed("x", rng.random() < 0.2), sf.Interrupted(), sf.Trouble("x", "y"),
        sf.Refused("x", "y"), sf.Closed(ruling, "", rng.random() < 0.5, rng.choice(("", "p"))),
        sf.EndedAgain("x", rng.choice(("", "p"))), sf.BranchMerged(), sf.Removed(),
        sf.Revised(task(check=rng.choice("ab")), rng.choice(("file", "typed"))),
        order("say", number, text=number), order("answer", number, answers=ANSWER),
        order("stop", number), order("retry", number, fresh=rng.random() < 0.2, say=number),
        order("accept", number), order("forget", number), order("detach", number),
        order("gone", number, git="/g"), order("landed", number, kept=state.place.kept, into="main"),
        order("return", number, kept=state.place.kept, tip="", begin="", why="x", text=number)))


PERSONS = (sf.Order, sf.BranchMerged, sf.Revised)


@pytest.mark.parametrize("seed", range(16))
def test_no_history_leaves_an_end_without_a_person_loses_a_word_or_obeys_twice(seed):
    rng = random.Random(seed)
    state = state_of(check=rng.choice((None, "c")), origin=rng.choice(("file", "typed")))
    spoken = []
    moves = 0
    for now in range(200, 700):
        event = some_event(rng, state)
        before = state
        made = sf.step(state, event, float(now))
        state = made.state
        moves += state != before
        assert state.state in sf.STATES and (state.phase == "" or state.is_active or state.asleep)
        assert made.do in ("", "make", "start", "listen", "check", "feed", "sleep", "close", "end again")
        assert bool(made.ruling.to) == (made.do == "close")
        if made.do not in ("", "end again"):
            assert state.is_active or state.state == "waiting", (event, state.state)
        # Only a person leads out of an end; what was asked to end again may come to one.
        if before.is_over and state.state != before.state:
            assert isinstance(event, (*PERSONS, sf.EndedAgain)), event
        # A stop is never forgotten where something goes on.
        if before.wish.stopping and not state.wish.stopping:
            assert state.is_over or isinstance(event, sf.RetryOrder) or state.place.fresh > before.place.fresh
        # Who waits or is asleep does not still have to be stopped, or told.
        assert not (state.wish.stopping and (state.state == "waiting" or state.asleep))
        assert not (state.asleep and (state.wish.says or state.wish.answer))
        # What a person says is waiting, or was handed on; a fresh start begins without.
        if isinstance(event, (sf.SayOrder, sf.RetryOrder)) and event.id in state.orders \
                and event.id not in before.orders and (isinstance(event, sf.SayOrder) or before.is_over):
            spoken.append(event.id)
        if state.place.fresh > before.place.fresh:
            spoken = [one for one in spoken if one in state.wish.says]
        if isinstance(event, sf.Told):
            spoken = [one for one in spoken if one not in event.says or one in state.wish.says]
        assert [one for one in spoken if one not in (*state.wish.says, *state.wish.told)] == []
        # Twice is once; a file brings back what was written.
        if isinstance(event, sf.Order):
            assert sf.step(state, event, float(now)) == sf.Step(state)
        assert sf.thaw_state(json.loads(json.dumps(sf.freeze(sf.change(state, session="")), default=list))) \
            == sf.change(state, session="")
        assert state.attempt.failures <= state.task.tries or isinstance(event, sf.Closed) or moves
    assert moves > 100


@pytest.mark.parametrize("former, word, phase", [
    ({"state": "preparing"}, "running", "preparing"), ({"state": "starting"}, "running", "starting"),
    ({"state": "running"}, "running", ""), ({"state": "attached", "before": "done"}, "stopped", ""),
    ({"state": "asking", "asleep": True}, "asking", "asleep"), ({"state": "done", "wanted": "go"}, "done", "")])
def test_what_earlier_versions_wrote_is_read(former, word, phase):
    frozen = {**sf.freeze(state_of()), **former}
    state = sf.thaw_state(json.loads(json.dumps(frozen, default=list)))
    assert (state.state, state.phase) == (word, phase)


FLAT = {
    "name": "t", "task": {"name": "t", "prompt": "x"}, "order": 1, "state": "asking", "phase": "asleep",
    "at": 1.5, "reason": "r", "cause": "c", "orders": ["7"], "id": "ab", "base": "a" * 40, "start": "a" * 40,
    "branch": "run/t.2", "tip": "b" * 40, "worktree": "/w", "git": "/w/.git", "copies": [".env"],
    "confined": "no", "port": 9, "prepared": True, "fresh": 1, "tried": 3, "first": 1, "open": True,
    "failures": 1, "round": 2, "lost": 1, "stalls": 1, "api_errors": 1, "began": 1.0, "worked": 2.0,
    "ended": 3.0, "spent": 4.0, "rung": "x", "climbed": ["y"], "left_at": 5.0, "session": "0" * 36,
    "spoken": True, "client": 5, "start_at": 6, "heard_from": 7, "prompt": "p", "says": ["s"],
    "told": ["t"], "question": {"id": "q", "request": {}}, "answer": {"a": "b"}, "stopping": True,
    "forgotten": True, "returned": 1, "conflicts": ["c"], "landed": "main", "kept": "c" * 40,
    "diff": {"files": 1}, "checks": [1], "check_seconds": 1.0, "passes_on_base": False,
    "old": [{"id": "cd", "branch": "run/t", "worktree": "/v", "git": "/v/.git"}]}


def test_a_state_that_an_earlier_version_wrote_is_read_and_written_as_it_was():
    """The records of a state are no keys of its file."""
    state = sf.thaw_state(FLAT)
    assert set(flat(state)) - {"newer", "origin", "until", "place", "attempt", "wish"} == set(FLAT)
    assert state.place.branch == "run/t.2" and state.attempt.round == 2 and state.wish.says == ("s",)
    assert json.loads(json.dumps(sf.freeze(state), default=list)) == FLAT
    parts = [vars(part) for part in (state, state.place, state.attempt, state.wish)]
    assert sum(map(len, parts)) == len(set().union(*parts)), "a name is in two records"
    newer = sf.step(sf.replace(state, state="done", phase=""), order("retry", fresh=True), 9.0).state
    assert newer.old == (sf.Workplace("cd", branch="run/t", worktree="/v", git="/v/.git"), state.place)
    assert newer.place == sf.Workplace(fresh=2, base="a" * 40)
    assert sf.thaw_state(json.loads(json.dumps(sf.freeze(newer), default=list))) == newer


def test_a_task_without_a_check_that_an_earlier_version_wrote_is_read():
    frozen = {**FLAT, "task": {**FLAT["task"], "check": ""}, "newer": {**FLAT["task"], "check": ""}}
    state = sf.thaw_state(frozen)
    assert state.task == state.newer == sf.TaskSpec("t", "x") and state.place.branch == "run/t.2"


@pytest.mark.parametrize("damage", [
    {"task": {"name": "t", "touch": ["../x"]}}, {"newer": {"name": "t", "tries": 99}}, {"tip": "HEAD"},
    {"session": "-x"}, {"state": "odd"}, {"phase": "odd"}, {"worktree": "w"}, {"id": "x"}])
def test_a_state_with_a_value_that_no_rule_allows_is_none(damage):
    assert sf.thaw_state({**FLAT, **damage}) is None


@pytest.mark.parametrize("damage", [
    {"branch": "-f"}, {"base": "HEAD"}, {"fresh": "1"}, {"copies": "x"}, {"git": "x/y"}])
def test_a_place_before_a_fresh_start_that_no_state_can_have_is_none(damage):
    assert sf.thaw_state({**FLAT, "old": [{**FLAT["old"][0], **damage}]}) is None


def test_a_place_that_an_earlier_version_packed_into_lines_is_read():
    packed = {**sf.freeze(state_of()), "old": ["run/a\n/w\n/g\n/c\nab", "run/b\n/v\n/h\n"]}
    state = sf.thaw_state(packed)
    assert state.old == (sf.Workplace("ab", branch="run/a", worktree="/w", git="/g"),
                         sf.Workplace("", 1, branch="run/b", worktree="/v", git="/h"))
    assert sf.thaw_state(json.loads(json.dumps(sf.freeze(state)))) == state


def test_nothing_else_writes_the_name_of_a_state():
    named = []
    for path in sorted((ROOT / "src/fleet").rglob("*.py")):
        if path.name in ("step.py", "state.py") and path.parent.name == "tasks":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg in ("state", "phase") \
                    and isinstance(node.value, ast.Constant) and node.value.value in sf.STATES:
                named.append(f"{path.name}:{node.value.lineno}")
    assert named == []
    assert re.search(r'"state": to\b', (ROOT / "src/fleet/tasks/step.py").read_text(encoding="utf-8"))
