"""What goes on, as it happens: the records, the hub, and `GET /events`."""
import contextlib
import json
import socket
import time

import pytest

import subagent_fleet as sf
from gateway_rig import PROMPT, SPOKEN, error_of, hangs, says, sends, wait_until
from tools import not_held_up


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

    def until(self, is_it):
        """The next of which that is so."""
        while True:
            told = self.next()
            assert told is not None, f"not in {self.heard}"
            if is_it(told):
                return told

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


def sf_request():
    return {"model": "x", "max_tokens": 9, "stream": True,
            "messages": [{"role": "user", "content": PROMPT}]}


def steps_of(row):
    return [(step["what"], step["node"] or None) for step in all_steps(row)]


def all_steps(row):
    """The steps of a request; its receipt holds them once it is over."""
    return row.get("receipt", row)["steps"]


@pytest.fixture(autouse=True)
def often(limits):
    limits(events_pause=0.01)


def ended(ear):
    """The row of the next request that has ended."""
    return ear.until(lambda row: "receipt" in row)


def test_a_request_is_told_from_its_beginning_to_its_receipt(rig, listen, limits):
    limits(progress=0.2)
    served = rig(says("one ", "two ", "three ", pause=0.25))
    ear = listen(served)
    assert ear.status == 200
    assert ear.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert ear.next() == {"kind": "hello", "schema": "subagent-fleet/events/3", "fleet": "test",
                          "config": sf.fleet_digest(served.server.fleet),
                          "time": ear.heard[0]["time"]}
    headers = {"x_claude_code_session_id": "s-1", "x_claude_code_agent_id": "a-1"}
    status, _, _ = served.ask(headers=headers)
    assert status == 200
    last = ended(ear)
    (receipt,) = served.receipts()
    rows = ear.heard[1:]
    assert {row["kind"] for row in rows} == {"request"} and {row["id"] for row in rows} == {receipt["id"]}
    assert last["receipt"] == receipt
    assert (last["session"], last["agent_id"], last["alias"]) == ("s-1", "a-1", "x")
    assert steps_of(last) == [("wait", None), ("read", "n0"), ("write", "n0")]
    assert all_steps(last)[1]["route"] == "m0"
    assert last["output_tokens"] == receipt["output_tokens"] > 0
    times = [step["at"] for step in all_steps(last)]
    assert times == sorted(times) and abs(receipt["time"] - times[0] - receipt["total_seconds"]) < 0.1


def test_who_comes_late_is_told_what_runs_and_what_was(rig, listen):
    served = rig(says("hello "), hangs)
    served.server.scheduler.places["m1"].last_number = 1  # the first goes to the first node
    served.ask(headers={"x_claude_code_session_id": "another"}, system="Other.")
    (receipt,) = served.receipts()
    served.server.scheduler.places["m0"].last_number = 2
    with served.connect() as connection:
        connection.sendall(served.post(sf_request()))
        wait_until(lambda: served.nodes[1].requests)
        ear = listen(served)
        assert [ear.next()["kind"] for _ in range(3)] == ["hello", "request", "request"]
        _, was, runs = ear.heard
        assert was["receipt"] == receipt
        assert "receipt" not in runs and steps_of(runs) == [("wait", None), ("read", "n1")]


def test_a_node_that_rests_and_returns_is_told(rig, listen, limits):
    limits(rest=0.1)
    served = rig(sends(b"HTTP/1.1 500 x\r\nContent-Length: 2\r\n\r\n{}"))
    served.nodes[0].page = sends(b"")
    ear = listen(served)
    assert served.ask()[0] == 500
    rests = ear.until(lambda row: row["kind"] == "rest")
    assert (rests["node"], rests["route"], rests["why"]) == ("n0", "", "api_error")
    again = ear.until(lambda row: row["kind"] == "rest" and row["why"] == "bad answer")
    assert again["seconds"] >= 0.2 and again["id"] == rests["id"]  # it was asked, and did not answer
    late = listen(served)
    assert late.until(lambda row: row["kind"] == "rest")["seconds"]
    (last,) = [row for row in late.heard if "receipt" in row]
    assert steps_of(last) == [("wait", None), ("read", "n0"), ("wait", "n0")]
    assert all_steps(last)[2]["why"] == last["receipt"]["failures"][0]["why"] == "api_error"

    served.nodes[0].page = None
    assert ear.until(lambda row: row["kind"] == "rest" and not row["seconds"])["node"] == "n0"


def test_events_say_nothing_of_prompt_or_answer(rig, listen):
    served = rig(says(SPOKEN))
    ear = listen(served)
    served.ask()
    ended(ear)
    told = json.dumps(ear.heard)
    wait_until(lambda: served.said)
    assert PROMPT not in told and SPOKEN not in told


def test_events_want_the_key(rig):
    status, kind, _ = error_of(rig(hangs).get("/events", x_api_key=None))
    assert (status, kind) == (401, "authentication_error")


def test_who_does_not_read_is_waited_for_by_nobody_and_finds_the_latest(rig, listen):
    served = rig(says("x"))
    ear = listen(served)
    ear.next()
    row = {"kind": "request", "agent_id": "a" * 2000, "steps": [], "output_tokens": 0}
    with not_held_up(30):
        for number in range(20_000):  # 40 MB: more than sockets hold
            served.server.log.put({**row, "id": f"req_{number % 300}", "output_tokens": number})
        assert served.ask()[0] == 200
    assert ended(ear)["receipt"]["outcome"] == "ok"
    tokens = {told["id"]: told["output_tokens"] for told in ear.heard[1:] if told["agent_id"]}
    assert sorted(tokens.values()) == list(range(19_700, 20_000))
    assert len(ear.heard) < 10_000


def test_who_says_nothing_for_long_is_kept(rig, listen, limits):
    limits(quiet=0.05)
    served = rig(hangs)
    ear = listen(served)
    ear.next()
    comments = [ear.stream.readline() for _ in range(12)]
    assert comments.count(b": nothing happens\n") >= 2


def test_a_stop_ends_the_stream_after_the_last_receipt(rig, listen):
    served = rig(says("a ", "b ", pause=0.3))
    ear = listen(served)
    with served.connect() as connection:
        connection.sendall(served.post(sf_request()))
        ear.until(lambda row: row["kind"] == "request" and len(all_steps(row)) >= 2)
        served.server.stop("test")
        told = list(iter(ear.next, None))
    assert told[-1]["receipt"]["outcome"] == "ok" and ear.has_ended


def test_requests_that_have_ended_are_bounded_and_the_others_stay():
    log = sf.Log()
    log.put({"id": "running"})
    for number in range(1000):
        log.put({"id": f"req_{number}"})
        log.put({"id": f"req_{number}", "receipt": {}})
    version, rows = log.since(0)
    assert len(rows) == sf.RECEIPTS_SHOWN + 1 and rows[0].row["id"] == "running"
    assert log.since(version) == (version, [])
    log.put({"id": "running", "tokens": 1})
    assert [each.row for each in log.since(version)[1]] == [{"id": "running", "tokens": 1}]


def test_a_row_of_an_older_receipt_says_what_is_known():
    receipt = sf.Receipt(time=10.0, id="req_1", session="s", agent_id="a", alias="x", route="m0", node="n0",
                         context=8192, failures=(sf.FailedTry("n1", "refused"),), waited_seconds=1.0, first_byte_seconds=2.0,
                         total_seconds=5.0, input_tokens=12, output_tokens=3, outcome="ok")
    row = json.loads(sf.render_json(sf.plan_row(receipt)))
    assert steps_of(row) == [("wait", None), ("write", "n0")]
    assert [step["at"] for step in all_steps(row)] == [5.0, 6.0]
    assert sf.read(sf.Receipt, row["receipt"]).failures == receipt.failures
