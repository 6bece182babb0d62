"""What goes on, as it happens: the records, the hub, and `GET /events`."""
import contextlib
import json
import select
import socket
import time
from dataclasses import fields, replace

import pytest

import subagent_fleet as sf
from gateway_rig import DONE, HEAD, PROMPT, SPOKEN, error_of, hangs, line, says, sends, wait_until
from tools import not_held_up

RECEIPT = sf.Receipt(time=1.5, id="req_1", session="s", agent="a", alias="x", model="m0", node="n0",
                     context=8192, tries=(sf.Try("n1", "refused"),), waited=0.1, first_byte=0.2,
                     total=0.5, input_tokens=12, output_tokens=3, outcome="ok")
EVENTS = (sf.RequestBegun(1.0, "req_1", "s", "a", "x"), sf.SlotGot(1.1, "req_1", "m0", "n0"),
          sf.FirstToken(1.2, "req_1"), sf.TokensSoFar(1.3, "req_1", 7),
          sf.NodeRests(1.4, "req_1", "n0", "", 2.0, "refused"),
          sf.NodeReturns(1.45, "req_1", "n0"), RECEIPT)


class Ear:
    """A client of `/events` that reads along; `heard` are the objects it was told."""

    def __init__(self, rig):
        self.connection = rig.connect()
        self.connection.sendall(rig.head("GET", "/events"))
        self.stream = self.connection.makefile("rb")
        self.status = int(self.stream.readline().split()[1])
        self.headers = dict(text.decode().strip().lower().split(": ", 1)
                            for text in iter(self.stream.readline, b"\r\n"))
        self.heard, self.has_ended = [], False

    def next(self):
        """The next frame, None at the end of the stream."""
        until = time.monotonic() + 30
        while True:
            told = self.stream.readline()
            assert time.monotonic() < until, "nothing happens any more"
            if told in (b"", b"0\r\n"):
                self.has_ended = told == b"0\r\n"
                return None
            if told.startswith(b"data: "):
                self.heard.append(json.loads(told[6:]))
                return self.heard[-1]

    def until(self, kind):
        """What is told up to the first of a kind, that included."""
        begun = len(self.heard)
        while True:
            told = self.next()
            assert told is not None, f"no `{kind}` in {self.heard[begun:]}"
            if told["kind"] == kind:
                return self.heard[begun:]

    def close(self):
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.stream.close()
        self.connection.close()


@pytest.fixture
def listen():
    with contextlib.ExitStack() as ending:
        yield lambda rig: ending.enter_context(contextlib.closing(Ear(rig)))


def kinds(told):
    return [each["kind"] for each in told]


def test_a_request_is_told_from_its_beginning_to_its_receipt(rig, listen, monkeypatch):
    monkeypatch.setattr(sf, "PROGRESS_SECONDS", 0.2)
    monkeypatch.setattr(sf, "EVENTS_PAUSE_SECONDS", 0.0)
    served = rig(says("one ", "two ", "three ", pause=0.25))
    ear = listen(served)
    assert ear.status == 200
    assert ear.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert ear.next() == {"kind": "hello", "schema": "subagent-fleet/events/1", "fleet": "test",
                          "config": sf.fleet_digest(served.server.fleet),
                          "time": ear.heard[0]["time"]}
    headers = {"x_claude_code_session_id": "s-1", "x_claude_code_agent_id": "a-1"}
    status, _, _ = served.ask(headers=headers)
    assert status == 200
    told = ear.until("ended")
    assert kinds(told) == ["begun", "slot", "first", "tokens", "tokens", "ended"]
    begun, slot, first, *counts, ended = told
    (receipt,) = served.receipts()
    assert ended == {"kind": "ended", **receipt}
    assert {each["id"] for each in told} == {receipt["id"]}
    assert (begun["alias"], slot["model"], slot["node"]) == ("x", "m0", "n0")
    assert [each["output_tokens"] for each in counts] == [2, 3]
    assert begun["time"] <= slot["time"] <= first["time"] <= counts[0]["time"] <= ended["time"]
    assert abs(ended["time"] - begun["time"] - receipt["total"]) < 0.1


def test_who_comes_late_is_told_what_runs_and_what_was(rig, listen):
    served = rig(says("hello "), hangs)
    served.server.scheduler.places["m1"].rest = sf.Rest(1e12)  # the first goes to the first node
    served.ask()
    (receipt,) = served.receipts()
    served.server.scheduler.places["m0"].rest = sf.Rest(2e12)
    with served.connect() as connection:
        connection.sendall(served.post(sf_request()))
        wait_until(lambda: served.nodes[1].requests)
        told = listen(served).until("slot")
        assert kinds(told) == ["hello", "ended", "begun", "slot"]
        assert told[1] == {"kind": "ended", **receipt}
        assert told[3]["node"] == "n1" and told[3]["id"] != receipt["id"]


def sf_request():
    return {"model": "x", "max_tokens": 9, "stream": True,
            "messages": [{"role": "user", "content": PROMPT}]}


def test_a_node_that_rests_and_returns_is_told(rig, listen, monkeypatch):
    monkeypatch.setattr(sf, "REST_SECONDS", 0.0)
    plays = [sends(b"HTTP/1.1 500 x\r\nContent-Length: 2\r\n\r\n{}"), says("again ")]
    served = rig(lambda node, connection: plays.pop(0)(node, connection))
    ear = listen(served)
    assert served.ask()[0] == 500
    told = ear.until("ended")
    (rests,) = [each for each in told if each["kind"] == "rests"]
    assert (rests["node"], rests["model"], rests["seconds"]) == ("n0", "", 0.0)
    assert rests["why"] == told[-1]["tries"][0]["why"] == "api_error"
    late = listen(served)
    assert "rests" in kinds(late.until("rests"))

    assert served.ask()[0] == 200
    told = ear.until("ended")
    assert [each["node"] for each in told if each["kind"] == "returns"] == ["n0"]
    assert [each for each in served.server.hub.board.events()
            if isinstance(each, sf.NodeRests)] == []


def test_events_say_nothing_of_prompt_or_answer(rig, listen):
    served = rig(says(SPOKEN))
    ear = listen(served)
    served.ask()
    told = json.dumps(ear.until("ended"))
    assert PROMPT not in told and SPOKEN not in told and served.said != []


def test_events_want_the_key(rig):
    status, kind, _ = error_of(rig(hangs).get("/events", x_api_key=None))
    assert (status, kind) == (401, "authentication_error")


def test_so_many_follow_and_no_more(rig, listen, monkeypatch):
    monkeypatch.setattr(sf, "FOLLOWER_LIMIT", 2)
    served = rig(hangs)
    first, _ = listen(served), listen(served)
    third = listen(served)
    assert (third.status, third.headers["retry-after"]) == (503, "5")
    first.close()
    wait_until(lambda: len(served.server._followers) < 2)
    assert listen(served).next()["kind"] == "hello"


def test_who_does_not_read_is_dropped_and_nobody_waits(rig, listen, monkeypatch):
    monkeypatch.setattr(sf, "EVENTS_BEHIND_LIMIT", 500)
    monkeypatch.setattr(sf, "EVENTS_PAUSE_SECONDS", 0.0)
    served = rig(hangs)
    ear = listen(served)
    ear.until("hello")
    hub = served.server.hub
    (follower,) = served.server._followers
    (visitor,) = served.server._visitors

    def is_stuck():
        return not select.select([], [visitor], [], 0)[1]

    began = sf.RequestBegun(1.0, "req_x", "s" * 500, "a" * 500, "x")
    with not_held_up(30):
        for number in range(40_000):  # 40 MB: more than sockets hold
            hub.publish(replace(began, id=f"req_{number}"))
            # Or it would be too far behind before the sockets are full.
            wait_until(lambda: follower._queue.qsize() < 400 or is_stuck())
    assert follower.is_late  # and its thread still waits for the client to take something
    assert follower._queue.qsize() <= 501
    ear.close()
    wait_until(lambda: not served.server._followers)
    assert len(hub._listeners) == 3  # ledger, receipts, what the rig says


def test_who_fell_behind_finds_the_end_of_the_stream(rig, listen, monkeypatch):
    monkeypatch.setattr(sf, "EVENTS_BEHIND_LIMIT", 2)
    served = rig(hangs)
    ear = listen(served)
    ear.until("hello")
    for number in range(9):
        served.server.hub.publish(sf.FirstToken(1.0, f"req_{number}"))
    told = [each["id"] for each in iter(ear.next, None)]
    assert told == ["req_0", "req_1", "req_2"] and ear.has_ended


def test_who_says_nothing_for_long_is_kept(rig, listen, monkeypatch):
    monkeypatch.setattr(sf, "QUIET_SECONDS", 0.05)
    served = rig(hangs)
    ear = listen(served)
    ear.until("hello")
    comments = [ear.stream.readline() for _ in range(12)]
    assert comments.count(b": nothing happens\n") >= 2


def test_a_stop_ends_the_stream_after_the_last_receipt(rig, listen):
    served = rig(says("a ", "b ", pause=0.3))
    ear = listen(served)
    with served.connect() as connection:
        connection.sendall(served.post(sf_request()))
        ear.until("slot")
        served.server.stop("test")
        told = list(iter(ear.next, None))
    assert told[-1]["kind"] == "ended" and told[-1]["outcome"] == "ok" and ear.has_ended


def test_what_came_and_went_between_two_looks_is_told_by_its_end():
    follower = sf.Follower()
    with contextlib.closing(follower.signal):
        running = sf.RequestBegun(1.0, "req_2", "s", "", "x")
        for event in (*EVENTS[:2], running, *EVENTS[2:]):
            follower.take(event)
        follower.take(sf.Rejection(401, "no key"))
        told = [json.loads(text[6:]) for text in follower.drain().decode().splitlines() if text]
        assert follower.drain() == b""
    assert kinds(told) == ["begun", "rests", "returns", "ended"]
    assert told[0]["id"] == "req_2"


def test_every_event_is_read_back_as_it_was():
    assert {type(event) for event in EVENTS} == set(sf.EVENT_KINDS.values())
    for event in EVENTS:
        frame = sf.render_frame(event)
        value = sf.parse_json(frame[len(b"data: "):])
        assert sf.parse_event(value) == event
        assert sf.parse_event({**value, "of a newer gateway": [1]}) == event
        for name in value:
            assert sf.parse_event({**value, name: {"odd": 1}}) is None
        cut = {name: part for name, part in value.items() if name not in ("kind", "id")}
        assert sf.parse_event(cut) is None
    assert sf.parse_event({"kind": "hello"}) is None


def test_every_field_of_an_event_has_a_type_that_is_checked():
    loose = [(kind.__name__, row.name) for kind in sf.EVENT_KINDS.values() for row in fields(kind)
             if str(row.type) not in sf.FIELD_TYPES and not str(row.type).startswith("tuple[")]
    assert loose == []


def test_a_line_of_a_receipts_file_is_an_event():
    assert sf.parse_event(sf.parse_json(sf.render_record(RECEIPT))) == RECEIPT


def test_the_board_is_bounded_and_knows_what_is_so():
    board = sf.Board()
    for number in range(1000):
        board.take(replace(EVENTS[0], id=f"req_{number}"))
        board.take(replace(RECEIPT, id=f"req_{number}"))
    assert len(board.events()) == sf.RECEIPTS_SHOWN
    for count in range(50):
        board.take(sf.TokensSoFar(2.0, "req_x", count))
    assert board.events()[sf.RECEIPTS_SHOWN:] == [sf.TokensSoFar(2.0, "req_x", 49)]


def test_a_failure_is_part_of_what_a_late_listener_hears_of_a_request(rig, listen, monkeypatch):
    monkeypatch.setattr(sf, "REST_SECONDS", 30.0)

    def breaks(node, connection):
        connection.sendall(b"HTTP/1.1 500 x\r\nContent-Length: 2\r\n\r\n{}")

    def talks(node, connection):
        connection.sendall(HEAD + line("a "))
        node.gone.wait(5)
        connection.sendall(DONE)

    served = rig(breaks, talks)
    with served.connect() as connection:
        connection.sendall(served.post(sf_request()))
        wait_until(lambda: served.nodes[1].requests)
        told = listen(served).until("first")
        served.nodes[1].gone.set()
    assert kinds(told) == ["hello", "begun", "slot", "rests", "slot", "first"]
    assert [each["node"] for each in told if "node" in each] == ["n0", "n0", "n1"]
