"""The gateway: who may ask which node when, and what a client sees of it."""
import contextlib
import json
import math
import os
import pathlib
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

import hostile_nodes
import subagent_fleet as sf
from gateway_rig import (
    DONE,
    HEAD,
    KEY,
    PROMPT,
    SPOKEN,
    Desk,
    Node,
    Rig,
    Shaken,
    answers,
    error_of,
    events_of,
    fleet_of,
    hangs,
    line,
    read_answer,
    request_of,
    rests,
    running,
    says,
    says_and_hangs,
    sends,
    text_of,
    wait_until,
)
from matrix_cases import PIXEL
from subagent_fleet import replace
from tools import PROC, PROGRAM, clean_environment, free_port, limit_of, not_held_up

WIRE = pathlib.Path(__file__).parents[1] / "cases" / "wire"


# -- scheduling, with a clock that stands still --

def test_a_slot_is_one_of_a_models_parallel_requests():
    desk = Desk(("m", "a", "x", {"max_parallel": 2}))
    first, second, third = desk.enter(), desk.enter(), desk.enter()
    assert first.model.name == second.model.name == "m" and third.model is None
    woken = []
    third.wake = lambda: woken.append(1)
    desk.scheduler.leave(first)
    assert third.model.name == "m" and woken == [1]


def test_who_waits_waits_in_order_and_takes_the_first_free_slot_of_all():
    desk = Desk(("m", "a", "x", {}), ("n", "b", "x", {}))
    busy = {ticket.model.name: ticket for ticket in (desk.enter(), desk.enter())}
    assert set(busy) == {"m", "n"}
    third, fourth = desk.enter(), desk.enter()
    desk.scheduler.leave(busy["n"])
    assert third.model.name == "n" and fourth.model is None
    desk.scheduler.leave(busy["m"])
    assert fourth.model.name == "m"


def test_who_waits_for_another_alias_is_not_held_up():
    desk = Desk(("m", "a", "x", {}), ("n", "b", "y", {}))
    desk.enter("x")
    assert desk.enter("x").model is None and desk.enter("y").model.name == "n"


def test_who_leaves_the_line_is_passed_over():
    desk = Desk(("m", "a", "x", {}))
    first, second, third = desk.enter(), desk.enter(), desk.enter()
    desk.scheduler.leave(second)
    desk.scheduler.leave(first)
    assert (second.model, third.model.name) == (None, "m")


def test_two_entries_of_one_ollama_model_share_its_slots():
    desk = Desk(("m", "a", "x", {}), ("n", "a", "y", {"ollama_model": "Tiny:latest"}))
    assert desk.enter("x").model.name == "m" and desk.enter("y").model is None


def test_a_conversation_goes_back_to_where_its_prompt_is_cached():
    desk = Desk(("m", "a", "x", {}), ("n", "b", "x", {}))
    one, two, sub = ("1", ""), ("2", ""), ("1", "agent")
    first = desk.serve(conversation=one)
    other = desk.serve(conversation=two)
    assert {first, other} == {"m", "n"}
    for _ in range(3):
        assert desk.serve(conversation=two) == other
        assert desk.serve(conversation=one) == first
    assert desk.serve(conversation=sub) == other  # of its own; the longest idle node is free


def test_a_busier_node_loses_the_conversation():
    desk = Desk(("m", "a", "x", {"max_parallel": 3}), ("n", "b", "x", {"max_parallel": 3}))
    mine = desk.serve(conversation=("1", ""))
    others = [desk.enter(conversation=(str(number), "")) for number in range(2, 4)]
    busy = next(ticket for ticket in others if ticket.model.name == mine)
    free = next(ticket for ticket in others if ticket is not busy)
    desk.scheduler.leave(free)
    assert desk.enter(conversation=("1", "")).model.name != mine
    assert running(desk.scheduler) == {"m": 1, "n": 1}


def test_a_conversation_is_remembered_for_each_alias_it_asks():
    """A session asks two aliases in turn; each has its prompt in the cache of one node."""
    desk = Desk(*((f"{alias}{node}", node, alias, {"ollama_model": alias, "max_parallel": 2})
                  for alias in "xy" for node in "abc"), nodes="abc")
    where = {alias: desk.serve(alias, ("mine", "")) for alias in "xy"}
    for number in range(5):
        for alias in "xyx":  # what others ask makes another node the longest idle one
            desk.serve(alias, (f"other {number}", alias))
        assert {alias: desk.serve(alias, ("mine", "")) for alias in "xy"} == where


def test_a_failed_request_goes_to_the_next_candidate_and_the_node_rests():
    desk = Desk(("m", "a", "x", {}), ("n", "b", "x", {}))
    ticket = desk.enter()
    failed = ticket.model.name
    desk.scheduler.fail(ticket, "refused")
    assert ticket.model.name != failed
    desk.scheduler.leave(ticket)
    for _ in range(3):
        assert desk.serve() != failed


def test_a_rest_doubles_from_2_to_60_seconds_and_one_success_ends_it():
    desk = Desk(("m", "a", "x", {}))
    desk.serve()
    first = desk.enter()
    desk.scheduler.fail(first, "refused")
    seen = []
    while len(seen) < 8:
        seen.append(rests(desk.scheduler)["m"])
        desk.now += seen[-1] - 0.1
        assert desk.ask() == []
        desk.now += 0.2
        assert desk.ask(but="a") == ["a"]
    assert seen == [2, 4, 8, 16, 32, 60, 60, 60]
    desk.now += 61
    assert desk.ask() == ["a"] and rests(desk.scheduler) == {}
    ticket = desk.enter()
    desk.scheduler.fail(ticket, "refused")  # it answers for itself, and no request
    assert rests(desk.scheduler) == {"m": 60}
    desk.now += 61
    desk.ask()
    desk.serve()
    ticket = desk.enter()
    desk.scheduler.fail(ticket, "refused")
    assert rests(desk.scheduler) == {"m": 2}


def test_a_rest_is_over_for_all_slots_at_once():
    desk = Desk(("m", "a", "x", {"max_parallel": 4}), ("n", "b", "x", {"max_parallel": 4}))
    first = desk.enter()
    desk.scheduler.fail(first, "refused")
    desk.scheduler.leave(first)
    desk.now += 3
    desk.ask()
    assert [desk.enter(conversation=(str(n), "")).model.name for n in range(8)].count("m") == 4


def test_no_request_is_given_to_a_node_before_it_is_known_to_answer():
    desk = Desk(("m", "a", "x", {}), ("n", "b", "x", {"max_parallel": 9}))
    ticket = desk.enter()
    while ticket.model.name != "m":
        ticket = desk.enter(conversation=("again", ""))
    desk.scheduler.fail(ticket, "refused")
    desk.now += 1000
    assert desk.serve() == "n"
    assert desk.scheduler.look() == ["a"] and desk.scheduler.look() == []
    assert desk.serve() == "n"
    desk.scheduler.end_rest("a", "")
    assert desk.serve(conversation=("new", "")) == "m"


def test_when_all_rest_they_are_asked_at_once_and_who_answers_is_it():
    desk = Desk(("m", "a", "x", {"max_parallel": 2}), ("n", "b", "x", {}))
    for _ in range(2):
        ticket = desk.enter()
        desk.scheduler.fail(ticket, "refused")
        desk.scheduler.leave(ticket)
    assert set(rests(desk.scheduler)) == {"m", "n"}
    first, second = desk.enter(), desk.enter()
    assert not first.model and not first.silent
    assert sorted(desk.ask(but="b")) == ["a", "b"]
    assert (first.model.name, second.model.name) == ("m", "m")


def test_who_waits_is_let_go_when_none_of_those_that_rest_answers():
    desk = Desk(("m", "a", "x", {}), ("n", "b", "x", {}))
    for _ in range(2):
        ticket = desk.enter()
        desk.scheduler.fail(ticket, "refused")
        desk.scheduler.leave(ticket)
    woken = []
    ticket = desk.enter()
    ticket.wake = lambda: woken.append(1)
    desk.scheduler.look()
    desk.scheduler.end_rest("a", "timeout")
    assert not ticket.silent, "one may still answer"
    desk.scheduler.end_rest("b", "refused")
    assert woken == [1] and desk.scheduler.show()[1] == 0
    assert ticket.silent == {"a": "timeout", "b": "refused"}
    desk.scheduler.leave(ticket)


def test_a_model_that_nobody_else_has_is_asked_although_it_was_missing():
    desk = Desk(("m", "a", "x", {}))
    first = desk.enter()
    desk.scheduler.fail(first, "not_found_error", is_missing=True)
    desk.scheduler.leave(first)
    assert desk.enter().model.name == "m"


@pytest.mark.parametrize("seeds", [range(2000), pytest.param(range(2000, 20_000), marks=pytest.mark.slow)])
def test_whatever_happens_every_alias_is_served_again(seeds):
    """No alias is dead, nobody waits for ever, no slot and no seat is lost."""
    for seed in seeds:
        shaken = Shaken(seed)
        assert shaken.heal() == [], (seed, shaken.told)
        places, waiting = shaken.scheduler.show()
        assert (waiting, {place["running"] for place in places.values()}) == (0, {0}), seed


def test_a_node_rests_as_a_whole():
    desk = Desk(("m", "a", "x", {}), ("n", "b", "x", {}),
                ("o", "a", "y", {"ollama_model": "other", "fallback": ["n"]}))
    other = desk.enter("y")
    assert other.model.name == "o"
    desk.scheduler.fail(other, "refused")
    desk.scheduler.leave(other)
    assert desk.serve() == "n"


def test_a_missing_model_rests_alone():
    desk = Desk(("m", "a", "x", {}), ("n", "b", "x", {}),
                ("o", "a", "y", {"ollama_model": "other"}))
    ticket = desk.enter()
    while ticket.model.name != "m":
        desk.scheduler.leave(ticket)
        ticket = desk.enter(conversation=("again", ""))
    desk.scheduler.fail(ticket, "refused", is_missing=True)
    desk.scheduler.leave(ticket)
    assert desk.serve() == "n" and desk.enter("y").model.name == "o"


def test_fallbacks_answer_only_when_nobody_of_the_alias_can():
    desk = Desk(("m", "a", "x", {"fallback": ["f"]}), ("f", "b", "y", {}))
    first, second = desk.enter(), desk.enter()
    assert first.model.name == "m" and second.model is None
    desk.scheduler.fail(first, "refused")
    assert first.model.name == "f"
    desk.scheduler.leave(first)
    assert second.model.name == "f"


def test_slots_come_back_whatever_happens():
    desk = Desk(("m", "a", "x", {"max_parallel": 2, "fallback": ["f"]}), ("n", "b", "x", {}),
                ("f", "b", "y", {"ollama_model": "other"}))
    chance = __import__("random").Random(3)
    held = []
    for _ in range(4000):
        desk.now += chance.random()
        desk.ask(but="a" if chance.random() < 0.3 else "")
        if len(held) < 6 and chance.random() < 0.6:
            held.append(desk.enter(chance.choice("xy"), (str(chance.randrange(4)), "")))
        elif held:
            ticket = chance.choice(held)
            act = chance.randrange(3)
            if act == 0 and ticket.model:
                desk.scheduler.fail(ticket, "refused", is_missing=chance.random() < 0.3)
            else:
                if act == 1 and ticket.model:
                    desk.scheduler.succeed(ticket)
                desk.scheduler.leave(ticket)
                held.remove(ticket)
        places, waiting = desk.scheduler.show()
        busy = sum(place["running"] for place in places.values())
        assert busy + waiting + sum(
            bool(t.silent) or not any(t.candidates) for t in held) == len(held)
        assert all(0 <= place["running"] <= place["slots"] for place in places.values())
    for ticket in held:
        desk.scheduler.leave(ticket)
    assert set(running(desk.scheduler).values()) == {0} and desk.scheduler.show()[1] == 0
    desk.now += 100
    desk.ask()
    assert desk.serve() and desk.serve("y")  # nobody is busy for ever


# -- what a client sees --

def test_a_message_comes_whole_or_as_a_stream(rig):
    served = rig(says("PO", "NG"))
    status, headers, body = served.ask()
    message = json.loads(body)
    assert (status, headers["content-type"]) == (200, "application/json")
    assert message["content"] == [{"type": "text", "text": "PONG"}]
    assert (message["model"], message["stop_reason"]) == ("x", "end_turn")
    assert message["usage"]["input_tokens"] == 12 and message["usage"]["output_tokens"] == 3
    status, headers, body = served.ask(stream=True)
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["request-id"].startswith("req_")
    events = events_of(body)
    assert events[0]["message"]["stop_reason"] is None
    assert events[-2]["usage"] == {"input_tokens": 12, "output_tokens": 3}
    assert text_of(body) == "PONG"


@pytest.mark.parametrize("path, key", [("/v1/chat/completions", "created"), ("/v1/responses", "created_at")])
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_says_when_it_was_asked_for(rig, path, key, stream):
    served = rig(says("x"))
    body = json.dumps({"model": "x", "input": "hi", "stream": stream,
                       "messages": [{"role": "user", "content": "hi"}]}).encode()
    answer = served.raw(served.head(target=path, Content_Length=len(body)) + body)[2].decode()
    told = {int(digits) for digits in re.findall(rf'"{key}": ?(\d+)', answer)}
    assert len(told) == 1 and abs(told.pop() - time.time()) < 60


def test_a_recorded_request_of_claude_code_is_served(rig):
    served = rig(says("ok"))
    recorded = json.loads((WIRE / "main-first.json").read_text(encoding="utf-8"))
    request = {**recorded["body"], "model": "x"}
    body = json.dumps(request).encode()
    status, _, answer = served.raw(served.head(target=recorded["path"], **{
        name.replace("-", "_"): value for name, value in recorded["headers"].items()},
        Content_Length=len(body)) + body)
    assert status == 200 and text_of(answer) == "ok"
    sent = served.nodes[0].requests[0]
    assert sent["options"]["num_ctx"] == 32768 and sent["truncate"] is False
    assert served.receipts()[0]["session"] == recorded["headers"]["x-claude-code-session-id"]


def test_other_pages(rig):
    served = rig(says("x"))
    assert json.loads(served.get("/v1/models")[2])["data"][0]["id"] == "x"
    assert json.loads(served.get("/v1/models/x")[2])["id"] == "x"
    assert json.loads(served.get("/health/liveliness", x_api_key=None)[2]) == "I'm alive!"
    assert json.loads(served.get("/", x_api_key=None)[2])["name"] == "subagent-fleet"
    with served.connect() as connection:
        connection.sendall(served.head("HEAD", "/", x_api_key=None) + served.head("GET", "/"))
        told = connection.makefile("rb").read1(65536)
        assert told.startswith(b"HTTP/1.1 200") and told.count(b"subagent-fleet") <= 1
    served.ask()
    served.receipts()
    fleet = json.loads(served.get("/fleet")[2])
    assert fleet["schema"] == "subagent-fleet/fleet/2" and fleet["waiting"] == 0
    assert fleet["nodes"][0]["requests"] == 1 and fleet["models"][0]["slots"] == 1


@pytest.mark.parametrize("method, target", [
    ("GET", "/v1/models/nope"), ("GET", "/nope"), ("POST", "/"), ("PUT", "/v1/messages"),
    ("GET", "/v1/messages"), ("POST", "/v1/messages/"), ("POST", "/v1/v1/messages")])
def test_anything_else_is_404_in_anthropics_shape(rig, method, target):
    served = rig(says("x"))
    assert error_of(served.raw(served.head(method, target)))[:2] == (404, "not_found_error")


def test_an_unknown_model_is_named_with_what_there_is(rig):
    status, kind, words = error_of(rig(says("x")).ask("claude-opus-9"))
    assert (status, kind) == (404, "not_found_error")
    assert "`claude-opus-9`" in words and "`x`" in words


def test_count_tokens_learns_from_the_last_answer(rig):
    served = rig(says("x"))
    body = json.dumps(request_of())

    def count():
        return json.loads(served.raw(served.head(
            target="/v1/messages/count_tokens", Content_Length=len(body)) + body.encode())[2])
    before = count()["input_tokens"]
    served.ask()
    assert before > 0 and count()["input_tokens"] == 12


def test_an_answer_to_images_teaches_nothing_of_bytes_and_tokens(rig):
    """A machine counts what it likes for an image: no prompt of words is judged by that."""
    served = rig(says("A dot."))
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}

    def count():
        return json.loads(served.raw(served.post(
            {"model": "x", "messages": [{"role": "user", "content": "word " * 3000}]},
            target="/v1/messages/count_tokens"))[2])["input_tokens"]
    before = count()
    for images in (1, 8):  # counted as 12 tokens
        assert served.ask(messages=[{"role": "user", "content": [image] * images}])[0] == 200
    assert count() == before
    assert [receipt["sent_tokens"] for receipt in served.receipts(2)] == [0, 0], "no cut is proved by it"


def test_one_connection_serves_many_requests_also_pipelined_and_chunked(rig):
    served = rig(says("PONG"))
    body = json.dumps(request_of()).encode()
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(body[at:at + 20]), body[at:at + 20])
                      for at in range(0, len(body), 20))
    chunked = served.head(Transfer_Encoding="chunked") + pieces + b"0\r\nTrailer: x\r\n\r\n"
    with served.connect() as connection:
        connection.sendall(served.post(request_of()) + chunked + served.post(
            request_of(stream=True)) + served.head("GET", "/"))
        stream = connection.makefile("rb")
        for _ in range(2):
            status, _, answer = read_answer(stream)
            assert status == 200 and json.loads(answer)["content"][0]["text"] == "PONG"
        assert text_of(read_answer(stream)[2]) == "PONG"
        assert b"subagent-fleet" in read_answer(stream)[2]


def test_a_client_of_http_1_0_gets_a_stream_without_chunks(rig):
    served = rig(says("PO", "NG"))
    sent = served.post(request_of(stream=True)).replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", 1)
    with served.connect() as connection:
        connection.sendall(sent)
        head, _, body = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
    assert b"chunked" not in head and b"\r\nConnection: close" in head and text_of(body) == "PONG"


def test_a_client_that_waits_for_100_continue_is_told_to_go_on(rig):
    served = rig(says("PONG"))
    with served.connect() as connection:
        body = json.dumps(request_of()).encode()
        connection.sendall(served.head(Content_Length=len(body), Expect="100-continue"))
        stream = connection.makefile("rb")
        assert stream.readline() == b"HTTP/1.1 100 Continue\r\n"
        stream.readline()
        connection.sendall(body)
        assert read_answer(stream)[0] == 200


# -- the closed door --

def test_no_request_without_the_key_reaches_a_node(rig):
    served = rig(says("x"))
    for headers in ({"x_api_key": None}, {"x_api_key": "sk-wrong"}, {"x_api_key": KEY[:-1]},
                    {"x_api_key": None, "Authorization": "Bearer sk-wrong"},
                    {"x_api_key": None, "Authorization": f"Basic {KEY}"},
                    {"x_api_key": "ü" * 40}):
        assert error_of(served.ask(headers=headers))[:2] == (401, "authentication_error")
    for target in (f"/v1/messages?key={KEY}", f"/v1/messages?x-api-key={KEY}", "/fleet",
                   "/v1/models"):
        assert error_of(served.raw(served.head(target=target, x_api_key=None)))[0] == 401
    for headers in ({"Host": "evil.example"}, {"Host": f"evil.example:{served.port}"},
                    {"Host": None}, {"Host": "127.0.0.1:1"}, {"Origin": "https://evil.example"},
                    {"Origin": "null"}):
        assert error_of(served.ask(headers=headers))[:2] == (403, "permission_error")
        assert error_of(served.get("/", **headers))[0] == 403
    assert served.nodes[0].requests == []
    for headers in ({}, {"x_api_key": None, "Authorization": f"Bearer {KEY}"},
                    {"Host": f"localhost:{served.port}"}, {"Host": f"[::1]:{served.port}"}):
        assert served.ask(headers=headers)[0] == 200


def test_refusals_take_the_same_time(rig):
    served = rig(says("x"))
    kinds = {"none": {"x_api_key": None}, "wrong": {"x_api_key": "sk-wrong"},
             "close": {"x_api_key": KEY[:-1] + "0"}, "host": {"Host": "evil.example"}}
    least = dict.fromkeys(kinds, math.inf)  # noise only adds: the least of many runs has none
    for _ in range(40):
        for name, headers in kinds.items():
            began = time.perf_counter()
            served.ask(headers=headers)
            least[name] = min(least[name], time.perf_counter() - began)
    assert max(least.values()) < min(least.values()) * 2 + 0.002


def test_only_names_and_addresses_of_this_machine_count_as_hosts(rig, monkeypatch):
    monkeypatch.setattr(sf.World, "own_names", lambda world: ("Studio", ()))
    served = rig(says("x"))
    names = ("127.0.0.1", "LOCALHOST", "[::1]", "studio", "studio.local")
    for name in names:
        assert served.get("/", Host=f"{name}:{served.port}")[0] == 200, name
    for host in (*names, "", f"studio.example:{served.port}", f"192.168.1.6:{served.port}"):
        status, _, words = error_of(served.get("/", Host=host))
        assert status == 403 and words.endswith(f" own address: http://127.0.0.1:{served.port}"), host


@pytest.mark.parametrize("reached, host, counts", [
    (("192.168.1.5", 4000), "192.168.1.5:4000", True), (("::1", 80), "[::1]", True),
    (("192.168.1.5", 4000), "192.168.1.6:4000", False), (("::1", 80), "localhost:80", True),
    (("::ffff:192.168.1.5", 4000), "192.168.1.5:4000", True), (("::1", 4000), "[::1]", False),
    (("fd00::5", 4000), "[fd00::5]:4000", True), (("fe80::5%eth0", 80), "[fe80::5]", True),
    (("10.0.0.1", 4000), "MyGate.lan:4000", True), (("10.0.0.1", 80), "mygate.lan", True),
    (("10.0.0.1", 4000), "mygate.lan", False), (("10.0.0.1", 80), "gate.lan", False)])
def test_the_address_a_client_reached_and_the_configured_host_count(reached, host, counts):
    fleet = fleet_of(("m", "a", "x", {}))
    server = sf.Server(replace(fleet, gateway=replace(fleet.gateway, host="myGate.lan")), KEY,
                       sf.World())
    with contextlib.nullcontext() if counts else pytest.raises(sf.Refusal, match=" own address: "):
        server._check_door(SimpleNamespace(reached=reached), {"host": host, "x-api-key": KEY}, "/")


# -- broken and hostile clients --

@pytest.mark.parametrize("sent, status", [
    (b"\r\n", 400), (b"GET\r\n\r\n", 400), (b"GET / HTTP/9.9\r\n\r\n", 400),
    (b"\x16\x03\x01\x02\x00\x01\x00\r\n", 400), (b"GET /" + b"a" * 70000 + b"\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20000 + b"\r\n", 400),
    (b"POST /v1/messages HTTP/1.1\r\nContent-Length: -5\r\n", 400),
    (b"POST /v1/messages HTTP/1.1\r\nContent-Length: 99999999999\r\n", 413),
    (b"POST /v1/messages HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: gzip\r\n", 400),
    (b"POST /v1/messages HTTP/1.1\r\nContent-Length: 5\r\nContent-Encoding: gzip\r\n", 400),
    (b"POST /v1/messages HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\nzz\r\n", 400),
    (b"POST /v1/messages HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\nfffffff\r\n", 413),
    (b"POST /v1/messages HTTP/1.1\r\nContent-Length: 3\r\n\n{}{", 400),
    (b"POST /v1/messages HTTP/1.1\r\nContent-Length: 9\r\n\n{}", 400),
    (b"POST /v1/messages HTTP/1.1\r\nContent-Length: 99999999999\r\nContent-Length: 2\r\n\n{}", 400),
    (b"POST /v1/messages HTTP/1.1\r\nHost: other\r\n", 400),
])
def test_broken_requests_are_refused_and_the_server_goes_on(rig, sent, status):
    served = rig(says("x"))
    own = served.head().split(b"\r\n", 1)[1]
    first, _, rest = sent.partition(b"\n")
    if b"HTTP/1.1" in first and b"POST" in first:  # these pass the door
        fields, _, body = rest.partition(b"\n\n") if b"\n\n" in rest else (rest, b"", b"")
        sent = first + b"\n" + fields.rstrip(b"\r\n") + b"\r\n" + own + body
    answer = served.raw(sent, half_close=True)
    assert error_of(answer)[0] == status and answer[1]["connection"] == "close"
    assert served.ask()[0] == 200


@pytest.mark.parametrize("body", [
    b"", b"[]", b"{", b"\xff\xfe", b'{"model":"x"}', b'{"model":"x","messages":[{"role":5}]}',
    b'{"model":"x","messages":[]}', b"[" * 50000])
def test_broken_bodies_get_400(rig, body):
    served = rig(says("x"))
    assert error_of(served.raw(served.post(body)))[:2] == (400, "invalid_request_error")
    assert served.nodes[0].requests == [] and served.ask()[0] == 200


@pytest.mark.slow
def test_slow_senders_are_let_go(rig, limits):
    limits(request=0.2, body=0.2)
    served = rig(says("x"))
    assert served.raw(b"") == (0, {}, b"")
    assert error_of(served.raw(b"POST /v1/mess"))[0] == 408
    assert error_of(served.raw(served.head(Content_Length=50) + b"{"))[0] == 408
    with served.connect() as connection:  # a byte now and then does not help
        with contextlib.suppress(OSError):
            for _ in range(10):
                connection.sendall(b"a")
                time.sleep(0.03)
        assert b" 408 " in connection.recv(100)
    assert served.ask()[0] == 200


def test_300_silent_connections_leave_the_others_served(rig, limits):
    limits(request=600)  # none of them ends by itself
    served = rig(says("x"))
    held = [served.connect() for _ in range(limit_of("connections"))]
    wait_until(lambda: len(served.server._visitors) == limit_of("connections"))
    more = [served.connect() for _ in range(44)]
    for connection in more:
        connection.sendall(served.head("GET", "/"))
    assert {read_answer(connection.makefile("rb"))[0] for connection in more} == {200}
    wait_until(lambda: len(served.server._visitors) <= limit_of("connections"))  # who is cut off goes
    assert [connection.recv(1) for connection in held[:40]] == [b""] * 40  # the oldest went first
    held[-1].sendall(served.post(request_of()))
    assert read_answer(held[-1].makefile("rb"))[0] == 200
    for connection in held + more:
        connection.close()
    wait_until(lambda: not served.server._visitors)
    assert served.ask()[0] == 200


def test_a_connection_that_says_nothing_is_closed_soon(rig, limits):
    limits(request=0.05)
    served = rig(says("x"))
    with served.connect() as silent:
        assert silent.recv(1) == b""


def test_a_burst_within_the_limit_is_served_whole(rig):
    served = rig(says("x"), max_parallel=8)
    held = [served.connect() for _ in range(limit_of("connections") - 6)]
    for connection in held:
        connection.sendall(served.head("GET", "/"))
    assert {read_answer(connection.makefile("rb"))[0] for connection in held} == {200}
    for connection in held:
        connection.close()


@pytest.mark.skipif(not (PROC / "self/statm").exists(), reason="tells memory on Linux")
def test_memory_stays_small_whatever_comes(tmp_path):
    def play(node, connection):
        with contextlib.suppress(OSError):
            connection.sendall(HEAD + b'{"message":{"content":"')
            for _ in range(100):
                connection.sendall(b"x" * 1_000_000)
        node.gone.set()
    node = Node(play)
    program = Program(tmp_path, endpoint=node.endpoint)
    slow = [program.connect() for _ in range(200)]
    for number, connection in enumerate(slow):
        connection.sendall(program.head(Content_Length=60_000_000) + b"{" * number * 100)
    for stream in (True, False):
        with program.connect() as connection:
            connection.sendall(program.post(request_of(stream=stream)))
            assert error_of(read_answer(connection.makefile("rb")))[0] == 529
        assert node.gone.wait(10)
    told = (PROC / f"{program.process.pid}/status").read_text()
    assert int(re.search(r"VmHWM:\s+(\d+) kB", told)[1]) < 80_000
    for connection in slow:
        connection.close()
    program.process.send_signal(signal.SIGTERM)
    assert program.end()[0] == 0
    node.close()


def test_more_bodies_than_fit_are_told_to_come_back(rig, limits):
    limits(bodies=1500)
    served = rig(says("PONG"))
    large = served.post(request_of(system="s" * 1000))
    with served.connect() as first:
        first.sendall(large[:-1])
        wait_until(lambda: sum(served.server._held.values()) > 1000)
        status, headers, body = served.raw(large)
        assert error_of((status, headers, body)) \
            == (503, "api_error", "too many requests at once")
        assert int(headers["retry-after"]) > 0
        assert served.ask()[0] == 200  # a small one still fits
        first.sendall(large[-1:])
        assert read_answer(first.makefile("rb"))[0] == 200
    wait_until(lambda: not served.server._held)
    assert served.raw(large)[0] == 200


def test_a_body_in_chunks_takes_what_has_come_of_it(rig, limits):
    limits(bodies=1500)
    served = rig(says("PONG"))
    body = json.dumps(request_of(system="s" * 1000)).encode()
    with served.connect() as first:
        first.sendall(served.head(Transfer_Encoding="chunked") + b"%x\r\n%b\r\n" % (len(body), body))
        wait_until(lambda: sum(served.server._held.values()) > 500)
        assert served.raw(served.post(request_of(system="s" * 1000)))[0] == 503
        assert served.ask()[0] == 200
    wait_until(lambda: served.raw(served.post(request_of(system="s" * 1000)))[0] == 200)


# -- waiting and leaving --

def test_a_waiting_stream_gets_its_headers_and_pings(rig, limits):
    limits(quiet=0.1)
    served = rig(lambda node, connection: (time.sleep(0.45), says("late")(node, connection)))
    body = served.ask(stream=True)[2]
    kinds = [event["type"] for event in events_of(body)]
    assert kinds[0] == "message_start" and kinds.count("message_start") == 1
    assert 2 <= kinds.count("ping") <= 6 and text_of(body) == "late"


def test_who_waits_for_a_slot_gets_pings_and_is_served_in_order(rig, limits):
    limits(quiet=0.15)
    order, gate = [], threading.Event()

    def play(node, connection):
        order.append(node.requests[-1]["messages"][0]["content"])
        gate.wait(10)
        says("ok")(node, connection)
    served = rig(play)
    found, threads = {}, []

    def ask(name):
        found[name] = served.ask(stream=True, messages=[{"role": "user", "content": name}])

    for number in range(4):
        threads.append(threading.Thread(target=ask, args=(str(number),)))
        threads[-1].start()
        wait_until(lambda count=number + 1:
                   len(order) + served.server.scheduler.show()[1] == count)
    assert order == ["0"]
    time.sleep(0.5)
    gate.set()
    for thread in threads:
        thread.join(20)
    assert order == ["0", "1", "2", "3"]
    assert all(text_of(body) == "ok" for _, _, body in found.values())
    assert b"event: ping" in found["3"][2]
    waited = sorted(receipt["waited_seconds"] for receipt in served.receipts(4))
    assert waited[0] < waited[1] and waited[1] > 0.2  # of the 0.5 s that the gate was shut


def test_a_node_that_talks_again_rests_no_more_though_its_answer_is_long(rig):
    """As seen live: a node back from a crash sat idle while its first answer was being told."""
    gate = threading.Event()

    def play(node, connection):
        if len(node.requests) == 1:
            return  # it falls over
        connection.sendall(HEAD + line("long "))
        if len(node.requests) == 2:
            gate.wait(10)
        connection.sendall(DONE)

    served = rig(play, max_parallel=2)
    assert served.ask()[0] == 529
    first = served.connect()
    first.sendall(served.post(request_of(stream=True)))
    assert b"message_start" in first.recv(4096)
    assert rests(served.server.scheduler) == {}
    assert served.ask()[0] == 200 and not gate.is_set()
    gate.set()
    first.close()


@pytest.mark.parametrize("pause, stops, seen", [
    (0.002, [], b"\n"), (0.002, ["word 9"], b"\n"), (1.0, [], b""), (0.0, ["never"], b"")])
def test_leaving_in_mid_flow_sends_a_byte_ahead(rig, pause, stops, seen):
    """Ollama 0.32.15 must learn of it by a failed write, or it never frees the model's slot."""
    heard = []

    def listen(node, connection):
        with contextlib.suppress(OSError):
            heard.extend(iter(lambda: connection.recv(9), b""))
        node.gone.set()

    def play(node, connection):
        threading.Thread(target=listen, args=(node, connection)).start()
        with contextlib.suppress(OSError):
            connection.sendall(HEAD)
            for number in range(2000 if pause else 20):
                connection.sendall(line(f"word {number} "))
                if node.gone.wait(pause):
                    break
            connection.sendall(DONE)
            time.sleep(0.005)
            connection.sendall(b"\n")  # as the end of a chunked body follows the last line
        assert node.gone.wait(5)

    served = rig(play)
    with served.connect() as connection:
        connection.sendall(served.post(request_of(stream=True, stop_sequences=stops)))
        wait_until(lambda: b"word" in connection.recv(65536))
        if not stops:
            connection.close()
        assert served.nodes[0].gone.wait(5)
    assert b"".join(heard) == seen


@pytest.mark.parametrize("play, stream", [(hangs, True), (hangs, False), (says_and_hangs, True),
                                          (says_and_hangs, False)])
def test_a_client_that_leaves_takes_its_request_off_the_node(rig, play, stream):
    served = rig(play)
    connection = served.connect()
    connection.sendall(served.post(request_of(stream=stream)))
    wait_until(lambda: served.nodes[0].requests)
    if play is says_and_hangs and stream:
        connection.recv(10)
    connection.close()
    assert served.nodes[0].gone.wait(5)  # of the 300 s that the model has
    assert served.receipts()[0]["outcome"] == "left"
    assert set(running(served.server.scheduler).values()) == {0}


def test_a_client_that_leaves_the_line_never_reaches_the_node(rig):
    served = rig(hangs)
    first, second = served.connect(), served.connect()
    first.sendall(served.post(request_of()))
    wait_until(lambda: served.nodes[0].requests)
    second.sendall(served.post(request_of()))
    wait_until(lambda: served.server.scheduler.show()[1] == 1)
    second.close()
    wait_until(lambda: served.server.scheduler.show()[1] == 0)
    first.close()
    assert [receipt["outcome"] for receipt in served.receipts(2)] == ["left", "left"]
    assert len(served.nodes[0].requests) == 1


def test_who_waits_in_the_queue_at_a_stop_is_told_so(rig, limits):
    limits(quiet=0.2)
    gate = threading.Event()
    served = rig(lambda node, connection: (gate.wait(10), says("PONG")(node, connection)))
    scheduler = served.server.scheduler
    clients = []
    for stream in (False, False, True):
        clients.append(served.connect())
        clients[-1].sendall(served.post(request_of(stream=stream)))
        # The first has the slot before the next one comes.
        wait_until(lambda: len(clients) == scheduler.show()[1] + sum(
            place.running for place in scheduler.places.values()))
    wait_until(lambda: b"event: ping" in clients[2].recv(65536, socket.MSG_PEEK))

    served.server.stop("test")
    status, kind, words = error_of(read_answer(clients[1].makefile("rb")))
    assert (status, kind, words) == (529, "overloaded_error", "the gateway is stopping")
    events = events_of(read_answer(clients[2].makefile("rb"))[2])
    assert events[-1]["error"] == {"type": "overloaded_error", "message": "the gateway is stopping"}
    gate.set()
    assert read_answer(clients[0].makefile("rb"))[0] == 200
    assert sorted(receipt["outcome"] for receipt in served.receipts(3)) \
        == ["ok", "stopped", "stopped"]
    for client in clients:
        client.close()


# -- failing nodes --

@pytest.mark.parametrize("stream", [True, False])
def test_what_stands_behind_the_end_of_an_answer_is_not_read(rig, stream):
    served = rig(sends(HEAD + line("PONG") + DONE + line(" late") + b"garbage\n"))
    status, _, body = served.ask(stream=stream)
    assert status == 200 and b"PONG" in body and b"late" not in body
    assert served.receipts()[-1]["outcome"] == "ok"


@pytest.mark.parametrize("play, why", [
    (answers(500, "boom"), "api_error"), (answers(503, "busy"), "overloaded_error"),
    (answers(404, "model 'tiny' not found"), "not_found_error"), (sends(b""), "bad answer"),
    (sends(b"garbage\r\n\r\n"), "not ollama"), (sends(HEAD), "bad answer"),
    (sends(HEAD + b"garbage\n"), "bad answer"), (sends(HEAD + b'{"error":"boom"}\n'), "api_error"),
    (sends(HEAD + b"{" * 300_000), "bad answer"),
    (sends(HEAD + line("never ") + line("sent ") + b'{"error":"boom"}\n'), "api_error"),
    (sends(HEAD + line("never sent ") + b"garbage\n"), "bad answer"),
])
@pytest.mark.parametrize("stream", [True, False])
def test_before_any_content_another_node_answers(rig, limits, play, why, stream):
    limits(answer=100_000)
    served = rig(play, says("PONG"))
    for _ in range(2):  # one of the two begins at the failing node
        status, _, body = served.ask(stream=stream)
        assert status == 200 and "PONG" in body.decode() and b"sent" not in body
    receipts = served.receipts(2)
    assert sorted(len(r["failures"]) for r in receipts) == [0, 1]
    assert {"node": "n0", "why": why} in [tried for r in receipts for tried in r["failures"]]
    assert served.server.ledger.totals["n0"]["failures"] == 1


def test_what_a_failed_node_said_is_not_sent_while_the_next_is_busy(rig, limits):
    limits(quiet=0.1)
    gate = threading.Event()

    def fails(node, connection):
        gate.wait(10)
        connection.sendall(HEAD + line("never sent ") + b'{"error":"boom"}\n')
        node.gone.set()
    served = rig(fails, lambda node, connection: (gate.wait(10), node.gone.wait(10),
                                                  says("PONG")(node, connection)))
    with served.connect() as first, served.connect() as second:
        first.sendall(served.post(request_of(stream=True)))
        wait_until(lambda: served.nodes[0].requests)
        second.sendall(served.post(request_of(stream=True)))
        wait_until(lambda: served.nodes[1].requests)
        gate.set()
        wait_until(lambda: rests(served.server.scheduler))
        time.sleep(0.3)  # until it is pinged in line
        served.nodes[1].gone.set()
        assert [text_of(read_answer(each.makefile("rb"))[2]) for each in (first, second)] \
            == ["PONG", "PONG"]


def test_a_node_that_refuses_or_is_slow_costs_no_answer(rig):
    served = rig(hangs, says("PONG"), timeout=0.3)
    nodes = served.server.fleet.nodes
    assert [served.ask()[0] for _ in range(2)] == [200, 200]
    nodes["n0"] = replace(nodes["n0"], endpoint=f"http://127.0.0.1:{free_port()}")
    served.server.scheduler.end_rest("n0", "")
    assert served.ask(headers={"x_claude_code_session_id": "new"})[0] == 200
    assert [receipt["failures"] for receipt in served.receipts(3)] == [
        [{"node": "n0", "why": "timeout"}], [], [{"node": "n0", "why": "refused"}]]


def test_when_nobody_is_left_the_client_is_told_to_come_back(rig):
    served = rig(sends(b""))
    answer = served.ask()
    status, kind, words = error_of(answer)
    assert (status, kind) == (529, "overloaded_error") and "n0: bad answer" in words
    assert 1 <= int(answer[1]["retry-after"]) <= 2
    assert served.receipts()[0]["outcome"] == "overloaded_error"
    busy = rig(answers(404, "model 'tiny' not found"))
    assert error_of(busy.ask(stream=True)) == (
        404, "not_found_error",
        "node n0, model tiny: model 'tiny' not found; type `ollama pull tiny` there")


def test_who_is_told_to_come_back_is_told_when_a_node_has_rested(rig, monkeypatch):
    served = rig(sends(b""))
    waits = []
    clock = served.world.clock
    monkeypatch.setattr(served.server.scheduler, "_clock", lambda: clock() + 1000 * len(waits))
    for _ in range(3):  # each failed probe doubles the rest
        waits.append(int(served.ask()[1]["retry-after"]))
    assert waits == [2, 4, 8]


@pytest.mark.parametrize("words", [
    "image input is not supported - hint: you may need to provide the mmproj",
    "this model is missing data required for image input", '"tiny" does not support vision'])
def test_a_model_that_takes_no_images_is_asked_again_without_them(rig, words):
    def play(node, connection):
        asked = node.requests[-1]["messages"]
        (answers(500, words) if "images" in asked[0] else says("PONG"))(node, connection)
    served = rig(play)
    image = {"type": "image", "source": {"type": "base64", "data": "aGk="}}
    for _ in range(2):
        status, _, body = served.ask(messages=[{"role": "user", "content": [image]}])
        assert status == 200 and json.loads(body)["content"][0]["text"] == "PONG"
    assert ["images" in asked["messages"][0] for asked in served.nodes[0].requests] \
        == [True, False, False], "it is learned once"
    assert [receipt["failures"] for receipt in served.receipts(2)] == [[], []]
    assert rests(served.server.scheduler) == {}


IMAGE = {"type": "image", "source": {"type": "base64", "data": "aGk="}}
NO_IMAGES = b'{"error":"image input is not supported"}\n'


def test_nothing_is_asked_again_after_content(rig):
    def play(node, connection):
        connection.sendall(HEAD + line("begun "))
        time.sleep(0.2)  # until it is sent on
        connection.sendall(NO_IMAGES)
    served = rig(play)
    body = served.ask(messages=[{"role": "user", "content": [IMAGE]}], stream=True)[2]
    events = events_of(body)
    starts = [event["index"] for event in events if event["type"] == "content_block_start"]
    assert starts == [0] and text_of(body) == "begun "
    assert events[-1]["error"]["type"] == "invalid_request_error"
    assert len(served.nodes[0].requests) == 1


def test_what_was_held_back_before_it_is_asked_again_is_not_sent(rig):
    def play(node, connection):
        if "images" in node.here.request["messages"][0]:
            connection.sendall(HEAD + line("never sent ") + NO_IMAGES)
        else:
            says("PONG")(node, connection)
    served = rig(play)
    for stream in (True, False):
        served.server.learned["m0"].takes_images = True
        body = served.ask(messages=[{"role": "user", "content": [IMAGE]}], stream=stream)[2]
        assert b"PONG" in body and b"sent" not in body
        assert not stream or [event["type"] for event in events_of(body)].count(
            "content_block_start") == 1


def test_two_who_learn_at_once_that_a_model_takes_no_images_are_both_answered(rig):
    both = threading.Barrier(2)

    def play(node, connection):
        if "images" in node.here.request["messages"][0]:
            both.wait(10)
            answers(500, "image input is not supported")(node, connection)
        else:
            says("PONG")(node, connection)
    served = rig(play, max_parallel=2)
    statuses = []
    clients = [threading.Thread(target=lambda: statuses.append(served.ask(
        messages=[{"role": "user", "content": [IMAGE]}])[0])) for _ in range(2)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(20)
    assert statuses == [200, 200]


def call_with(arguments):
    """A line of a node that calls a tool with such arguments."""
    return b'{"message":{"tool_calls":[{"function":{"name":"Bash","arguments":{"a":%b}}}]}}\n' \
        % arguments


@pytest.mark.parametrize("sent", [
    call_with(b"NaN"), call_with(b"1e999"), call_with(b"-Infinity"),
    call_with(b"[" * 980 + b"]" * 980), call_with(b"[" * 70 + b"]" * 70),
    call_with(b"9" * 5000), line("x").replace(b"false", b"NaN")])
@pytest.mark.parametrize("stream", [True, False])
def test_what_no_program_can_hold_is_the_nodes_fault(rig, sent, stream):
    served = rig(sends(HEAD + sent + DONE), says("PONG"))
    for _ in range(2):
        status, _, body = served.ask(stream=stream)
        assert status == 200 and b"PONG" in body
    assert [tried for receipt in served.receipts(2) for tried in receipt["failures"]] \
        == [{"node": "n0", "why": "bad answer"}]
    served.nodes[1].play = sends(HEAD + sent + DONE)
    status, kind, words = error_of(served.ask())
    assert (status, kind) == (529, "overloaded_error") and "bad answer" in words


@pytest.mark.parametrize("digits, status", [(9, 200), (10, 200), (99, 200), (4300, 529)])
def test_counts_of_any_length_leave_the_page_of_the_fleet_readable(rig, digits, status):
    count = b"9" * digits
    served = rig(sends(HEAD + line("x") + DONE.replace(b"12", count).replace(b":3}", b":%b}" % count)))
    assert served.ask()[0] == status
    served.receipts()
    page = served.get("/fleet")
    total = json.loads(page[2])["nodes"][0]["input_tokens"]
    # What nobody counts so is estimated, as what is not counted at all.
    assert page[0] == 200 and (total == 10 ** 9 - 1 if digits == 9 else total < 100)


def hangs_as_a_whole(node, connection):
    """Take every connection, answer none."""
    node.gone.wait(30)


def thinks_long(node, connection):
    """Answer after some time."""
    node.gone.wait(0.4)
    says("PONG")(node, connection)


@pytest.mark.slow
@pytest.mark.parametrize("page", [sends(HEAD + b'{"version":"0.32.15"}'), answers(500, "busy"),
                                  sends(b"")])
def test_a_machine_that_hangs_is_left_and_a_slow_model_is_not(rig, limits, page):
    limits(silence=0.1, probe=0.3)
    served = rig(hangs_as_a_whole, thinks_long, timeout=300)
    served.nodes[0].page, served.nodes[1].page = hangs_as_a_whole, page
    for stream in (True, False):
        served.server.scheduler.end_rest("n0", "")
        begin_at(served.server.scheduler, "m0")
        status, _, body = served.ask(stream=stream, headers={
            "x_claude_code_session_id": str(stream)})  # 20 s are all that this client waits
        assert status == 200 and b"PONG" in body
    assert [receipt["failures"] for receipt in served.receipts(2)] \
        == [[{"node": "n0", "why": "timeout"}]] * 2
    served.nodes[0].gone.set()


def begin_at(scheduler, name):
    """Make this model the longest idle one."""
    for place in scheduler.places.values():
        place.last_number = 1
    scheduler.places[name].last_number = 0


def test_a_machine_that_hangs_is_left_although_another_had_begun(rig, limits):
    """Each node that is asked has to say something itself."""
    limits(silence=0.15, probe=0.15)
    served = rig(sends(HEAD + line("never sent ") + b"garbage\n"), hangs_as_a_whole, says("PONG"),
                 timeout=300)
    served.nodes[1].page = hangs_as_a_whole
    begin_at(served.server.scheduler, "m0")
    served.server.scheduler.places["m2"].last_number = 2
    assert served.ask()[0] == 200
    assert [tried["why"] for tried in served.receipts()[0]["failures"]] == ["bad answer", "timeout"]
    served.nodes[1].gone.set()


def test_a_node_that_cannot_be_reached_any_more_is_left(rig, limits):
    limits(silence=0.15)
    served = rig(hangs, says("PONG"), timeout=300)
    begin_at(served.server.scheduler, "m0")

    def unreachable(endpoint, ask, *, deadline):
        raise sf.NodeFailure("unreachable", "No route to host")
    served.world.ask = unreachable
    assert served.ask()[0] == 200
    assert served.receipts()[0]["failures"] == [{"node": "n0", "why": "timeout"}]


def test_what_only_the_client_can_mend_is_not_tried_elsewhere(rig):
    # Neither holds more, as far as the file says.
    words = "request (40000 tokens) exceeds the available context size (32768 tokens)"
    served = rig(answers(400, words), answers(400, words))
    for stream in (False, True):
        assert error_of(served.ask(stream=stream)) == (
            400, "invalid_request_error", "prompt is too long: 40000 tokens > 32768 maximum")
    assert len(served.nodes[0].requests) + len(served.nodes[1].requests) == 2
    assert rests(served.server.scheduler) == {}
    assert {receipt["outcome"] for receipt in served.receipts(2)} == {"prompt_too_long"}


def test_after_content_an_error_event_ends_the_stream(rig):
    def play(node, connection):
        connection.sendall(HEAD + line("begun "))
        time.sleep(0.2)  # until it is sent on
    served = rig(play, play)
    status, _, body = served.ask(stream=True)
    events = events_of(body)
    assert status == 200 and text_of(body) == "begun "
    assert events[-1]["error"]["type"] == "api_error" and "middle of the answer" in \
        events[-1]["error"]["message"]
    assert len(served.nodes[0].requests) + len(served.nodes[1].requests) == 1
    warm = [place["warm"]["conversations"] for place in served.server.scheduler.show()[0].values()]
    assert warm == [0, 0], "nobody else is believed to have read it"


def test_seconds_of_failed_attempts_are_no_wait_for_a_slot(rig):
    def dies_late(node, connection):
        node.gone.wait(0.6)
        connection.close()
    served = rig(dies_late, says("PONG"))
    assert [served.ask()[0] for _ in range(2)] == [200, 200]  # one of them begins at the first
    receipt, = (receipt for receipt in served.receipts(2) if receipt["failures"])
    assert receipt["waited_seconds"] < 0.4 < 0.6 <= receipt["asked_seconds"] <= receipt["first_byte_seconds"]


def test_a_wait_for_two_slots_is_counted_whole(rig):
    gates = [threading.Event(), threading.Event()]

    def busy(number):
        def play(node, connection):
            if len(node.requests) == 1:
                gates[number].wait(20)
                says("PONG")(node, connection)
            elif number:
                says("PONG")(node, connection)
            else:
                connection.close()
        return play
    served = rig(busy(0), busy(1))
    scheduler = served.server.scheduler
    clients = [served.connect() for _ in range(3)]
    for count, client in enumerate(clients, 1):
        client.sendall(served.post(request_of()))
        wait_until(lambda count=count: scheduler.show()[1] + sum(running(scheduler).values()) == count)
    wait_until(lambda: all(node.requests for node in served.nodes))
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 0.3)
    gates[0].set()
    assert read_answer(clients[0].makefile("rb"))[0] == 200
    wait_until(lambda: len(served.nodes[0].requests) == 2 and scheduler.show()[1] == 1)
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 0.3)
    gates[1].set()
    assert [read_answer(client.makefile("rb"))[0] for client in clients[1:]] == [200, 200]
    receipt, = (receipt for receipt in served.receipts(3) if receipt["failures"])
    assert 0.6 <= receipt["waited_seconds"] <= receipt["asked_seconds"]
    for client in clients:
        client.close()


def test_too_long_after_pings_is_an_error_event(rig, limits):
    limits(quiet=0.1)
    late = answers(400, "exceeds the available context size (5 tokens)")
    served = rig(lambda node, connection: (time.sleep(0.4), late(node, connection)))
    events = events_of(served.ask(stream=True)[2])
    assert [events[0]["type"], events[1]["type"]] == ["message_start", "ping"]
    assert events[-1]["error"]["type"] == "invalid_request_error"
    assert events[-1]["error"]["message"].startswith("prompt is too long: ")


def test_a_node_that_never_ends_is_cut_off(rig):
    def play(node, connection):
        connection.sendall(HEAD)
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(line("and so on ") * 100)
        node.gone.set()
    served = rig(play, max_output=256)
    status, kind, _ = error_of(served.ask())
    assert (status, kind) == (529, "overloaded_error") and served.nodes[0].gone.wait(5)


def test_a_node_that_drips_is_left_after_its_timeout(rig):
    def play(node, connection):
        with contextlib.suppress(OSError):
            for byte in slow:
                connection.sendall(bytes([byte]))
                sent.append(byte)
                time.sleep(0.1)
        node.gone.set()
    slow, sent = HEAD + line("x"), []
    served = rig(play, timeout=0.4)
    began = time.monotonic()
    assert error_of(served.ask())[0] == 529
    assert time.monotonic() - began >= 0.4 and served.nodes[0].gone.wait(5)
    assert len(sent) < len(slow)


@pytest.mark.parametrize("pause, limits_of", [(0.0, {}), (0.05, {"answer_token": 0.001})])
def test_a_node_that_says_word_after_word_is_cut_off(rig, limits, pause, limits_of):
    """Its timeout begins anew with each word, and the bytes of small words take hours."""
    limits(**limits_of)

    def play(node, connection):
        connection.sendall(HEAD)
        with contextlib.suppress(OSError):
            while not node.gone.wait(pause):
                connection.sendall(line("w"))
        node.gone.set()
    served = rig(play, max_output=256, timeout=0.4)
    events = events_of(served.ask(stream=True)[2])
    assert events[-1]["type"] == "error" and served.nodes[0].gone.wait(5)
    assert set(running(served.server.scheduler).values()) == {0}


class Deaf:
    """A node that takes connections and reads no request but those for its version, while it `lives`."""

    def __init__(self):
        self.lives, self.posts, self.gone = True, 0, threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=300)
        self.endpoint = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection = self.listener.accept()[0]
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with contextlib.suppress(OSError), connection:
            if connection.recv(3, socket.MSG_PEEK) != b"GET":
                self.posts += 1
                self.gone.wait(30)
            elif self.lives:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 21\r\n\r\n"
                                   b'{"version":"0.32.15"}')
            else:
                self.gone.wait(30)

    def close(self):
        self.gone.set()
        self.listener.close()


HUGE = [{"role": "user", "content": "word " * 3_000_000}]


@pytest.fixture
def deaf(tmp_path):
    node, other = Deaf(), Node(says("PONG"))
    fleet = fleet_of(("m", "n0", "x", {"fallback": ["o"]}), ("o", "n1", "y", {}),
                     nodes={"n0": node.endpoint, "n1": other.endpoint})
    models = {name: replace(model, context=10 ** 8) for name, model in fleet.models.items()}
    served = Rig(replace(fleet, models=models), tmp_path)
    served.node = node
    yield served
    node.close()
    served.close()
    other.close()


def test_a_prompt_that_its_node_does_not_take_keeps_its_client_with_pings_until_it_leaves(deaf, limits):
    limits(quiet=0.05)
    with deaf.connect() as connection:
        connection.sendall(deaf.post(request_of(stream=True, messages=HUGE)))
        seen = b""
        while seen.count(b"event: ping") < 3:
            seen += connection.recv(65536)
        assert deaf.node.posts == 1
    assert deaf.receipts()[0]["outcome"] == "left"
    wait_until(lambda: set(running(deaf.server.scheduler).values()) == {0})


def test_a_machine_that_hangs_while_it_takes_a_prompt_is_left(deaf, limits):
    limits(silence=0.1, probe=0.15)
    deaf.node.lives = False
    status, _, body = deaf.ask(stream=True, messages=HUGE)
    assert status == 200 and text_of(body) == "PONG"
    assert [tried["why"] for tried in deaf.receipts()[0]["failures"]] == ["timeout"]


def kept_answer(words):
    body = line(words) + DONE
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


@pytest.mark.parametrize("is_late", [True, False])
def test_a_node_that_says_more_than_it_was_asked_gets_a_connection_for_each_request(rig, is_late):
    second = threading.Event()

    def play(node, connection):
        words = node.here.request["messages"][-1]["content"]
        more = kept_answer(f"stale {words}")
        connection.sendall(kept_answer(words) + (b"" if is_late else more))
        if is_late and len(node.requests) == 1:
            second.wait(5)
            connection.sendall(more)
            second.clear()
    served = rig(play)
    served.nodes[0].keeps = True

    def say(words):
        return served.ask(messages=[{"role": "user", "content": words}], stream=True)[2]
    assert text_of(say("one")) == "one"
    if is_late:
        idle, = served.world._idle.values()
        wait_until(lambda: idle)
        second.set()
        wait_until(lambda: not second.is_set() and select.select(idle, [], [], 0)[0])
    for words in ("two", "three", "four"):
        assert text_of(say(words)) == words
    assert served.nodes[0].connections == 4 and not sum(map(len, served.world._idle.values()))


@pytest.mark.parametrize("again", [0.0, 5.0])
def test_a_prompt_is_sent_again_only_where_its_connection_had_been_closed(rig, limits, again):
    """Who reads a prompt and dies of it later must not be given it twice."""
    limits(again=again)

    def play(node, connection):
        if len(node.requests) == 2:  # on the connection that was kept
            connection.close()
            return
        connection.sendall(kept_answer("PONG"))
    served = rig(play)
    served.nodes[0].keeps = True
    assert served.ask()[0] == 200
    wait_until(lambda: any(served.world._idle.values()))
    status = served.ask()[0]
    assert (status, len(served.nodes[0].requests)) == ((200, 3) if again else (529, 2))


@pytest.mark.parametrize("target", ["/", "/health/liveliness", f"/prove/{'0' * 64}", "/v1/models", "/fleet"])
def test_pages_take_no_body_and_wait_for_none(rig, target):
    served = rig(says("PONG"))
    for field in ({"Content_Length": 5}, {"Transfer_Encoding": "chunked"}):
        status, _, body = served.raw(served.head("GET", target, **field))  # and no body comes
        assert status == 400 and b"takes no body" in body
    assert served.get(target, Content_Length=0)[0] == 200


# -- receipts, logs, errors --

def test_who_comes_with_another_key_is_told_of_once(rig):
    """`clean` takes the key of a gateway that runs, and the next `generate` makes another."""
    served = rig(says("PONG"))
    for key in (None, "another", "another"):
        assert error_of(served.ask(headers={"x_api_key": key}))[0] == 401
    wait_until(lambda: served.said)
    served.close()
    assert "".join(served.said).count("another key than this gateway's") == 1


def test_receipts_say_what_happened(rig):
    served = rig(says("PONG"), says("PONG"))
    served.ask(headers={"x_claude_code_session_id": "s-1", "x_claude_code_agent_id": "a1"})
    served.ask(headers={"x_claude_code_session_id": f"{PROMPT} in a header"}, system="Other.")
    first, second = served.receipts(2)
    assert set(first) == {"time", "id", "session", "agent_id", "alias", "route", "node", "context",
                          "failures", "waited_seconds", "first_byte_seconds", "total_seconds", "input_tokens",
                          "output_tokens", "outcome", "sent_tokens", "cloud", "passed_over", "said",
                          "cached_tokens", "read_again_tokens", "read_again_why", "waited_for", "steps",
                          "broken_calls", "asked_seconds", "model", "digest"}
    assert (first["session"], first["agent_id"], first["alias"]) == ("s-1", "a1", "x")
    assert (first["outcome"], first["input_tokens"], first["context"]) == ("ok", 12, 32768)
    assert 0 <= first["waited_seconds"] <= first["first_byte_seconds"] <= first["total_seconds"] < 10
    assert second["session"] == "" and {first["node"], second["node"]} == {"n0", "n1"}
    body = json.dumps(served.nodes[0].requests[0], separators=(",", ":"))
    assert first["sent_tokens"] == round(len(body) / sf.BYTES_A_TOKEN) > 40
    wait_until(lambda: len(served.said) == 3)
    assert served.said[0].split() == ["Time", "Agent", "Model", "Machine", "Took", "Outcome"]
    assert re.search(r"(?m)^..:..:..  planner[?] +tiny +n\d +(-|0\.\d s)  ok$",
                     "".join(served.said)), served.said
    if os.name == "posix":
        assert stat.S_IMODE(served.receipts_path.stat().st_mode) == 0o600


@pytest.mark.parametrize("status, words, kept", [
    (500, "model requires more system memory (9.3 GiB) than is available", ", out of memory"),
    (500, f"error parsing tool call: raw='{SPOKEN}', err=invalid", ", a tool call it cannot read"),
    (500, "llama runner process has terminated: exit status 2", ", its engine stopped"),
    (503, "server busy, please try again", ", it is busy"),
    (500, f"unable to load {SPOKEN}", ", it cannot load the model"),
    (500, SPOKEN, ""), (400, SPOKEN, ""), (500, "", "")])
def test_receipts_keep_why_a_node_failed_and_none_of_its_words(rig, status, words, kept):
    served = rig(answers(status, words))
    assert error_of(served.ask())[0] != 200
    receipt, = served.receipts()
    assert receipt["said"] == f"n0: http {status}{kept}" and SPOKEN not in json.dumps(receipt)


def test_receipts_keep_why_a_request_was_refused(rig):
    served = rig(answers(400, "request (40000 tokens) exceeds the available context size (32768 tokens)"))
    served.ask()
    assert re.fullmatch(r"n\d: prompt is too long: \d+ tokens > 32768 maximum",
                        served.receipts()[0]["said"])


def test_each_refusal_is_one_line_of_the_log(rig):
    served = rig(says("x"))
    for headers in ({"x_api_key": None}, {"Host": "evil.example"},
                    {"Host": "evil.example\x1b[2J"}):
        served.ask(headers=headers)
    for alias in ("claude-opus-9[1m]", PROMPT, "\x1b[2J"):
        served.ask(alias)
    served.ask(max_tokens=0)
    served.raw(b"\x1b\r\n\r\n")
    wait_until(lambda: len(served.said) == 9)
    assert [re.sub(r"^\d\d:\d\d:\d\d  ", "", told) for told in served.said[1:]] == [
        "refused: 401, the key is missing or wrong; send it as `Authorization: Bearer KEY` or "
        "`x-api-key: KEY`\n",
        "refused: 403, this server answers only at its own address: "
        f"http://127.0.0.1:{served.port}\n",
        "refused: 400, request: too slow, too long or broken (a line of its headers is not "
        "`Name: value`)\n",
        "refused: 404, model: this fleet has no `claude-opus-9[1m]`; it has `x`\n",
        "refused: 404, model: this fleet has no `…`; it has `x`\n",
        "refused: 404, model: this fleet has no `…`; it has `x`\n",
        "refused: 400, max_tokens: must be at least 1\n", "refused: 400, not an HTTP/1.1 request\n"]


def test_receipts_turn_over(rig, limits):
    limits(receipts=300)
    served = rig(says("x"))
    for _ in range(3):
        served.ask()
        served.receipts()
        time.sleep(0.1)  # or one write takes all
    wait_until(lambda: (served.receipts_path.parent / "requests.jsonl.1").exists())
    assert served.receipts_path.stat().st_size < 1000


def test_receipts_that_cannot_be_written_stop_nothing(rig):
    served = rig(says("x"))
    served.receipts_path.mkdir()
    assert [served.ask()[0] for _ in range(2)] == [200, 200]
    wait_until(lambda: any("no receipts for now" in told for told in served.said))
    assert served.receipts_path.is_dir()


@pytest.mark.skipif(os.name != "posix", reason="a pipe in the place of a file")
@pytest.mark.parametrize("put", [os.mkdir, os.mkfifo])
def test_receipts_go_on_when_they_can_be_written_again(rig, put):
    served = rig(says("x"))
    path = served.receipts_path
    put(path)
    began = time.monotonic()
    assert [served.ask()[0] for _ in range(3)] == [200] * 3 and time.monotonic() - began < 5
    wait_until(lambda: sum("  ok\n" in told for told in served.said) == 3)  # each is filed
    wait_until(lambda: any("no receipts for now" in told for told in served.said))
    assert sum("no receipts for now" in told for told in served.said) == 1
    path.rmdir() if path.is_dir() else path.unlink()
    served.ask()
    assert len(served.receipts()) == 1


def test_nothing_of_prompt_answer_or_key_is_kept_or_told(rig, monkeypatch):
    spoken = line(SPOKEN)
    served = rig(sends(HEAD + spoken), answers(500, f"cannot parse {SPOKEN}"), says(SPOKEN))
    for stream in (True, False, True, False):
        served.ask(stream=stream)
        served.ask(headers={"x_api_key": KEY + "x"})
    wrong = {"role": "user", "content": [{"type": "image", "source": {"data": PROMPT}}]}
    served.ask(messages=[wrong])
    served.ask(PROMPT)
    monkeypatch.setattr(sf.Ollama, "chat", lambda self, talk, model: {}[str(talk)])
    assert error_of(served.ask())[:2] == (500, "api_error")
    wait_until(lambda: any("KeyError" in told for told in served.said))
    kept = served.receipts_path.read_text() + "".join(served.said)
    assert len(kept) > 500
    for secret in (PROMPT, SPOKEN, KEY, "secret"):
        assert secret not in kept


# -- the whole program --

CONFIG = """\
project: {{name: shop, gateway: {{provider: builtin, port: 4000}}}}
nodes: {{a: {{endpoint: "{endpoint}"}}}}
models: {{m: {{node: a, ollama_model: tiny, litellm_alias: x, context: 32768}}}}
agents: {{planner: {{model: m, description: d}}}}
"""


STARTED = []


def started(command, **more):
    """Start a process that does not outlive its test, even a failed one."""
    STARTED.append(subprocess.Popen(command, **more))
    return STARTED[-1]


@pytest.fixture(autouse=True)
def nothing_outlives_its_test():
    yield
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            process.kill()
            process.wait()


class Program:
    """`serve` as its own process."""

    def __init__(self, tmp_path, *words, endpoint="http://127.0.0.1:1", port=0, host="127.0.0.1", **env):
        text = CONFIG.format(endpoint=endpoint).replace("port: 4000", f"port: {port or free_port()}, host: {host}")
        (tmp_path / "fleet.yaml").write_text(text)
        self.process = started(
            [sys.executable, "-I", "-S", "-W", "error", PROGRAM, "serve", *words],
            cwd=str(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=clean_environment(**{"LITELLM_MASTER_KEY": KEY, **env}))
        self.greeting = self.process.stdout.readline().decode()
        found = re.search(r"http://[^:]+:(\d+)", self.greeting)
        self.port = int(found[1]) if found else 0

    head, post, connect = Rig.head, Rig.post, Rig.connect

    def end(self, seconds=15):
        """(exit code, stderr) once it has ended."""
        _, told = self.process.communicate(timeout=seconds)
        assert b"Traceback" not in told, told
        return self.process.returncode, told.decode()


def waiting(program):
    """How many requests wait in line."""
    with program.connect() as connection:
        connection.sendall(program.head("GET", "/fleet"))
        return json.loads(read_answer(connection.makefile("rb"))[2])["waiting"]


def test_serve_says_where_and_answers_until_it_is_told_to_stop(tmp_path):
    node = Node(says("PO", "NG", pause=0.2))
    program = Program(tmp_path, "-v", endpoint=node.endpoint)
    assert program.greeting == f"Serving shop at http://127.0.0.1:{program.port}: x on 1 machine. " \
                               "Ctrl-C stops.\n"
    with program.connect() as connection:
        connection.sendall(program.post(request_of(stream=True)))
        wait_until(lambda: node.requests)
        program.process.send_signal(signal.SIGTERM)
        assert text_of(read_answer(connection.makefile("rb"))[2]) == "PONG"
    stdout, told = program.process.communicate(timeout=15)
    assert program.process.returncode == 0 and re.search(rb"  main +tiny +a +0\.\d s  ok\n", told)
    assert re.search(rb"(?m)^Served:\nMachine +Requests .*\na +1 +12 +3 ", stdout)
    receipt = json.loads((tmp_path / ".subagent-fleet" / "requests.jsonl").read_text())
    assert receipt["outcome"] == "ok"
    with pytest.raises(OSError):
        program.connect()


@pytest.mark.parametrize("words", [(), ("-v",)])
def test_a_second_signal_ends_at_once_and_tells_what_it_cut_off(tmp_path, words):
    node = Node(hangs)
    program = Program(tmp_path, *words, endpoint=node.endpoint)
    with program.connect() as connection, program.connect() as second:
        connection.sendall(program.post(request_of()))
        wait_until(lambda: node.requests)
        second.sendall(program.post(request_of()))
        wait_until(lambda: waiting(program) == 1)
        program.process.send_signal(signal.SIGINT)
        time.sleep(0.15)
        assert program.process.poll() is None
        program.process.send_signal(signal.SIGINT)
        status, told = program.end(limit_of("grace") / 2)  # which one signal gives the answers
        assert status == 130 and node.gone.wait(5)
    assert len(re.findall(r" \d+\.\d s  stopped", told)) == (2 if words == ("-v",) else 0)
    kept = (tmp_path / ".subagent-fleet" / "requests.jsonl").read_text().splitlines()
    assert [json.loads(receipt)["outcome"] for receipt in kept] == ["stopped", "stopped"]


def test_a_taken_port_is_said(tmp_path):
    other = Node(sends(b"SSH-2.0-other\r\n"))
    status, told = Program(tmp_path, port=other.port).end()
    other.close()
    assert status == 1 and f"port {other.port} is in use by something else (`lsof -i :{other.port}` shows" in told
    free, = re.findall(r"fix: write `port: (\d+)` under project.gateway, or stop it\n", told)
    assert other.port < int(free) <= other.port + 100 and answers_nobody(int(free))


def test_a_port_that_another_of_us_has_is_said(tmp_path):
    first = Program(tmp_path)
    status, told = Program(tmp_path, port=first.port).end()
    first.process.terminate()
    assert first.end()[0] == 0
    assert status == 1 and "is in use by this fleet's gateway" in told
    assert "  fix: it is already serving; type `" in told and " launch claude`\n" in told


@pytest.mark.parametrize("more, status, told", [
    ({"host": "0.0.0.0", "LITELLM_MASTER_KEY": "sk-1234"}, 3, "is weak: it has"),
    ({"host": "no.such.host.invalid"}, 3, "you have not agreed"),
    ({"LITELLM_MASTER_KEY": ""}, 1, "no gateway key yet")])
def test_serve_refuses(tmp_path, more, status, told):
    code, said = Program(tmp_path, **more).end()
    assert code == status and told in said and "fix:" in said


# -- up --

CLAUDE = """\
#!{python} -S
import json, os, re, sys, urllib.request
kept = os.path.join(os.environ["HOME"], ".claude/projects", re.sub("[^A-Za-z0-9]", "-", os.path.realpath(".")))
os.makedirs(kept, exist_ok=True)
open(os.path.join(kept, "a-session.jsonl"), "w").close()
request = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", json.dumps({{
    "model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 9,
    "messages": [{{"role": "user", "content": "hi"}}]}}).encode(),
    {{"Authorization": "Bearer " + os.environ["ANTHROPIC_AUTH_TOKEN"],
      "x-claude-code-session-id": "a-session"}})
print(json.load(urllib.request.urlopen(request))["content"][0]["text"], *sys.argv[3:])
print(*sorted(name for name in os.environ if name.startswith("CLAUDE_CODE_USE_")), end="")
sys.exit(7)
"""


@pytest.fixture
def project(tmp_path, fake_node, run_cli):
    """A folder with a fleet of one fake node and a fake Claude Code; gives run(*words)."""
    node = fake_node({"tiny": {}})
    place, binaries, port = tmp_path / "project", tmp_path / "bin", free_port()
    place.mkdir()
    binaries.mkdir()
    (place / "fleet.yaml").write_text(CONFIG.format(endpoint=node.endpoint)
                                      .replace("port: 4000", f"port: {port}"))
    claude = binaries / "claude"
    claude.write_text(CLAUDE.format(python=sys.executable))
    claude.chmod(0o755)

    def run(*words, input=None, **env):
        return run_cli(*words, cwd=place, input=input, env={
            "PATH": f"{binaries}:{os.defpath}", "HOME": tmp_path, **env})
    run.place, run.port, run.node, run.claude = place, port, node, claude
    return run


def test_up_does_the_whole_job(project):
    done = project("up", "--", "-p", "hi there")
    assert (done.returncode, done.stdout) == (7, "PONG -p hi there\n")
    assert "\nLoaded: tiny on a.\n" in done.stderr
    assert done.stderr.endswith(
        "\nTo continue the latest session of this directory on your fleet:\n  subagent-fleet up -- --resume a-session\n"
        "Which machine did what:\n  subagent-fleet trace last\n")
    assert re.search(r"^a +1 +7 +2 +- +0$", done.stderr, re.M)
    assert (project.place / ".claude" / "agents" / "planner.md").exists()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", project.port), timeout=1)
    options = {json.dumps(asked["options"]["num_ctx"]) for asked in project.node.asked("/api/chat")}
    assert options == {"32768"}


def test_up_warns_of_a_weak_key_once(project):
    assert project("up", LITELLM_MASTER_KEY="sk-1234").stderr.count("is weak: ") == 1


def test_up_ends_with_the_requests_that_failed_or_fell_back(project):
    (project.place / ".subagent-fleet").mkdir()
    known = {"id": "r", "session": "", "agent": "", "alias": "l", "model": "m", "node": "a",
             "context": 9, "failures": [{"node": "mini", "why": "refused"}], "waited_seconds": 0.5,
             "first_byte_seconds": 1, "total_seconds": 2, "input_tokens": 9, "output_tokens": 7, "outcome": "ok"}
    soon = time.time() + 60
    (project.place / ".subagent-fleet" / "requests.jsonl").write_text("".join(
        json.dumps({**known, **each}) + "\n" for each in (
            {"time": soon - 120}, {"time": soon}, {"time": soon, "outcome": "left", "failures": []},
            {"time": soon, "outcome": "overloaded_error", "route": None, "node": None})))
    said = project("up").stderr
    head, *lines = said[said.index("2 requests failed"):].splitlines()
    assert head == "2 requests failed or fell back to another machine:"
    assert lines[0].split() == ["Time", "Agent", "Model", "Machine", "Took", "Outcome"]
    assert [line.split(" s  ")[1] for line in lines[1:3]] == [
        "ok after mini: refused", "overloaded_error after mini: refused"]
    assert lines[3] == "Why: `subagent-fleet logs --failed`"


def test_git_is_told_what_is_ours(project):
    subprocess.run(["git", "init", "-q"], cwd=str(project.place), check=True)
    exclude = project.place / ".git/info/exclude"
    exclude.write_text("*.pyc")  # without an end of its line
    for _ in range(2):
        assert project("up").returncode == 7
        assert exclude.read_text() == "*.pyc\n.env.subagent-fleet\n.subagent-fleet/\n"


def test_a_link_in_the_place_of_what_tells_git_ends_no_start(project):
    subprocess.run(["git", "init", "-q"], cwd=str(project.place), check=True)
    (project.place / "elsewhere").write_text("mine")
    exclude = project.place / ".git/info/exclude"
    exclude.unlink()
    exclude.symlink_to(project.place / "elsewhere")
    assert project("up").returncode == 7
    assert (project.place / "elsewhere").read_text() == "mine"


def test_up_says_in_a_few_lines_what_it_did(project):
    first, second = project("up").stderr, project("up").stderr
    assert first.startswith("Wrote: litellm_config.yaml, .claude/agents/planner.md, "
                            ".env.subagent-fleet.\nServing shop at http://127.0.0.1:")
    did = first[:first.index("Started with")].splitlines()
    assert len(did) == 3 and did[2] == "Loaded: tiny on a."
    assert "Wrote" not in second and "tools off" not in second
    harmless = "`unrecognized_model`; that is harmless. `subagent-fleet trace` names the models."
    assert harmless in first and harmless not in second


def test_up_says_at_each_start_what_the_main_model_lacks(project):
    project.node.models["tiny:latest"]["capabilities"] = ["completion"]
    for _ in range(2):
        assert "\ntiny:latest cannot call tools: `ollama pull " in project("up").stderr


def test_fix_of_a_weak_key_mends_it_wherever_it_stands(project):
    config, environment = project.place / "fleet.yaml", project.place / ".env.subagent-fleet"
    config.write_text(config.read_text().replace("builtin", "builtin, host: 0.0.0.0"))
    environment.write_text("export LITELLM_MASTER_KEY=mine\n")
    environment.chmod(0o600)
    said = project("serve").stderr
    assert "is weak" in said
    typed, = re.findall("fix: (unset .*)", said)
    python = f"{sys.executable} {PROGRAM}"
    subprocess.run(["sh", "-c", typed.replace("subagent-fleet generate", f"{python} generate")],
                   cwd=str(project.place), check=True, stdout=subprocess.DEVNULL)
    assert len(re.findall("sk-[0-9a-f]{64}", environment.read_text())) == 1


def test_up_goes_past_proxies_and_clouds(project):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, not listening: what goes there fails
        proxy = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        done = project("up", http_proxy=proxy, HTTP_PROXY=proxy, no_proxy="example.com",
                       CLAUDE_CODE_USE_BEDROCK="1", CLAUDE_CODE_USE_VERTEX="1")
    assert (done.returncode, done.stdout) == (7, "PONG\n")


@pytest.mark.slow
def test_up_refuses_before_it_loads_models(project):
    with socket.create_server(("127.0.0.1", project.port)):
        done = project("up")
    assert done.returncode == 1 and "error: nothing answers in time at" in done.stderr
    assert not project.node.asked("/api/chat")


def test_up_refuses_when_nobody_answers_for_the_main_session(project):
    config = project.place / "fleet.yaml"
    text = config.read_text().replace("agents:", "  far: {node: gone, ollama_model: big:70b, "
                                      "litellm_alias: y, context: 32768}\nagents:")
    text = text.replace("nodes: {", f"nodes: {{gone: {{endpoint: 'http://127.0.0.1:{free_port()}'}}, ")
    text = text.replace("models: {m:", "models:\n  m:").replace("context: 32768}}", "context: 32768}")
    config.write_text(text.replace("project: {name: shop", "project: {claude: {main: far}, name: shop"))
    assert project("validate").returncode == 0, project("validate").stderr
    done = project("up")
    assert done.returncode == 1 and done.stdout == ""
    assert "error: no machine can serve far, the main session's model: node offline\n" in done.stderr
    config.write_text(config.read_text().replace("alias: y", "alias: y, fallback: [m]"))
    assert project("up").returncode == 7


@pytest.mark.slow
def test_up_goes_on_without_a_machine_that_never_answers(project):
    hole = hostile_nodes.listen(hostile_nodes.silence)
    config = project.place / "fleet.yaml"
    text = config.read_text().replace("agents:", "  far: {node: gone, ollama_model: big:70b, "
                                      "litellm_alias: y, context: 32768, fallback: [m]}\nagents:")
    text = text.replace("nodes: {", f"nodes: {{gone: {{endpoint: 'http://127.0.0.1:{hole}'}}, ")
    text = text.replace("models: {m:", "models:\n  m:").replace("context: 32768}}", "context: 32768}")
    config.write_text(text.replace("project: {name: shop", "project: {claude: {main: m}, name: shop"))
    with not_held_up(40):
        done = project("up")
    assert done.returncode == 7, done.stderr
    ready, silent = done.stderr.index("m    a     tiny"), done.stderr.index("not answering: no answer")
    assert ready < silent < done.stderr.index(
        "\nContinuing without far (node offline \u2192 fallback tiny on a).\n")


def test_a_gateway_that_serves_an_older_config_is_not_used(project):
    project("generate")
    process = started([sys.executable, "-I", "-S", PROGRAM, "serve"], cwd=str(project.place),
                      env=clean_environment(), stdout=subprocess.PIPE)
    process.stdout.readline()
    config = project.place / "fleet.yaml"
    config.write_text(config.read_text().replace("32768", "40000"))
    for words in ["up"], ["launch", "claude"], ["doctor"]:
        done = project(*words)
        assert done.returncode == 1 and not project.node.asked("/api/chat")
        assert "is still running the old fleet.yaml" in done.stdout + done.stderr
        assert "fix: in its terminal, quit Claude Code or stop" in done.stdout + done.stderr
        assert "kill" not in done.stdout + done.stderr  # it would end an open Claude Code
    process.terminate()
    assert process.wait(10) == 0
    process.stdout.close()


def test_status_says_who_works_at_the_gateway(project):
    assert json.loads(project("status", "--json").stdout)["work"] == {}
    project("generate")
    process = started([sys.executable, "-I", "-S", PROGRAM, "serve"], cwd=str(project.place),
                      env=clean_environment(), stdout=subprocess.PIPE)
    process.stdout.readline()
    ended = threading.Event()
    project.node.answers["/api/chat"] = lambda payload: ended.wait(20) and (500, {"error": "late"})
    key, = re.findall("sk-[0-9a-f]{64}", (project.place / ".env.subagent-fleet").read_text())
    body = json.dumps({"model": "x", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]})
    clients = [socket.create_connection(("127.0.0.1", project.port)) for _ in range(2)]
    for client in clients:
        client.sendall(f"POST /v1/messages HTTP/1.1\r\nHost: 127.0.0.1:{project.port}\r\nx-api-key: {key}"
                       f"\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    wait_until(lambda: json.loads(project("status", "--json").stdout)["waiting"] == 1)
    said = json.loads(project("status", "--json").stdout)
    work = said["work"]["m"]
    assert (work["route"], work["running"], work["slots"], work["rests_seconds"]) == ("m", 1, 1, 0)
    assert work["warm"]["conversations"] == 1
    ended.set()
    for client in clients:
        client.close()
    process.terminate()
    assert process.wait(10) == 0
    process.stdout.close()


@pytest.mark.slow
def test_second_up_serves_on_when_the_first_ends(project):
    def start(seconds):
        return started(
            [sys.executable, "-I", "-S", PROGRAM, "up", "--", str(seconds)],
            cwd=str(project.place), stderr=subprocess.PIPE, stdout=subprocess.PIPE,
            env=clean_environment(PATH=f"{project.claude.parent}:{os.defpath}", HOME=project.place / "home"))

    project.claude.write_text(
        f"#!/bin/sh\neval sleep '$3'\n: > done$3\nexec '{sys.executable}' -S talk\n")
    (project.place / "talk").write_text(CLAUDE.format(python=sys.executable))
    first = start(1)
    wait_until(lambda: not answers_nobody(project.port))
    second = start(4)
    _, said = first.communicate(timeout=15)
    assert first.returncode == 7 and not (project.place / "done4").exists()
    told, said = second.communicate(timeout=15)
    assert (second.returncode, told) == (7, b"PONG\n") and b"that already runs" in said
    assert re.search(rb"(?m)^a +1 +7 +2 ", said)


def test_up_keeps_what_a_person_has_edited(project):
    project("generate")
    agent = project.place / ".claude" / "agents" / "planner.md"
    edited = agent.read_text() + "And be kind.\n"
    agent.write_text(edited)
    done = project("up")
    assert done.returncode == 7 and agent.read_text() == edited
    assert "Kept, as you have edited it: .claude/agents/planner.md." in done.stderr


def test_up_uses_the_gateway_that_runs_already(project):
    project("generate")
    process = started([sys.executable, "-I", "-S", PROGRAM, "serve"], cwd=str(project.place),
                      env=clean_environment(), stdout=subprocess.PIPE)
    process.stdout.readline()
    done = project("up")
    assert done.returncode == 7 and "that already runs" in done.stderr
    assert re.search(r"^a +1 +7 +2 ", done.stderr, re.M)
    assert process.poll() is None
    process.terminate()
    assert process.wait(10) == 0
    process.stdout.close()


def test_up_without_claude_code_serves_until_it_is_stopped(project):
    project.claude.unlink()
    process = started(
        [sys.executable, "-I", "-S", PROGRAM, "up"], cwd=str(project.place),
        env=clean_environment(PATH=os.defpath, HOME=project.place / "home"), stderr=subprocess.PIPE)
    said = b""
    while b"until Ctrl-C" not in said:
        piece = process.stderr.readline()
        assert piece, said
        said += piece
    assert b"npm install -g @anthropic-ai/claude-code" in said
    with socket.create_connection(("127.0.0.1", project.port)):
        pass
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=15)
    assert process.returncode == 130 and b"No request was served." in rest and b"Traceback" not in rest


def answers_nobody(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def is_gone(number):
    """Say whether a process has ended; whoever adopted it may not have looked yet."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    stat = PROC / f"{number}/stat"
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.skipif(os.name != "posix", reason="a script stands in for LiteLLM")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_up_ended_while_litellm_starts_leaves_nothing_running(project, sent):
    config = project.place / "fleet.yaml"
    config.write_text(config.read_text().replace("builtin", "litellm"))
    litellm = project.claude.with_name("litellm")
    litellm.write_text(f"#!/bin/sh\necho $$ > '{project.place}/pid'\nexec sleep 60\n")
    litellm.chmod(0o755)
    process = started(
        [sys.executable, "-I", "-S", PROGRAM, "up"], cwd=str(project.place),
        env=clean_environment(PATH=f"{litellm.parent}:{os.defpath}", HOME=project.place / "home"),
        stderr=subprocess.PIPE)
    wait_until(lambda: (project.place / "pid").exists() and (project.place / "pid").read_text())
    process.send_signal(sent)  # to it alone: on a terminal LiteLLM would get its own
    _, said = process.communicate(timeout=15)
    assert process.returncode == 130 and said.endswith(b"interrupted\n")
    wait_until(lambda: is_gone(int((project.place / "pid").read_text())))


@pytest.mark.skipif(os.name != "posix", reason="a script stands in for LiteLLM")
def test_up_starts_litellm_or_says_how_to_install_it(project):
    config = project.place / "fleet.yaml"
    config.write_text(config.read_text().replace("builtin", "litellm"))
    done = project("up")
    assert done.returncode == 1 and "litellm-missing" not in done.stderr
    assert "uv tool install" in done.stderr and "provider: builtin" in done.stderr
    litellm = project.claude.with_name("litellm")
    litellm.write_text("#!/bin/sh\nexit 3\n")
    litellm.chmod(0o755)
    assert "LiteLLM did not start" in project("up").stderr
    litellm.write_text(f"#!{sys.executable} -S\n" + r"""
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.say('{"data": [{"id": "x"}]}' if "models" in self.path else '"I\'m alive!"')
    def do_POST(self): self.say('{"content": [{"text": "FROM LITELLM"}]}')
    def say(self, text):
        self.send_response(200); self.end_headers(); self.wfile.write(text.encode())
http.server.HTTPServer((sys.argv[4], int(sys.argv[6])), Handler).serve_forever()
""")
    done = project("up")
    assert (done.returncode, done.stdout) == (7, "FROM LITELLM\n")
    running = started([litellm, "", "", "", "127.0.0.1", "", str(project.port)])
    wait_until(lambda: not answers_nobody(project.port))
    assert "that already runs" in project("up").stderr and running.poll() is None
    running.kill()
    running.wait()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", project.port), timeout=1)


LITELLM_ALIKE = r"""
import http.server, json, os, sys
seen = {"words": sys.argv, "environ": dict(os.environ), "directory": os.getcwd(),
        "config": open(sys.argv[2]).read(), "path": sys.path}
json.dump(seen, open("@SEEN@", "w"))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.say('{"data": [{"id": "x"}]}' if "models" in self.path else '"I\'m alive!"')
    def do_POST(self): self.say('{"content": [{"text": "FROM LITELLM"}]}')
    def say(self, text):
        self.send_response(200); self.end_headers(); self.wfile.write(text.encode())
http.server.HTTPServer((sys.argv[4], int(sys.argv[6])), Handler).serve_forever()
"""


@pytest.mark.skipif(os.name != "posix", reason="a script stands in for LiteLLM")
def test_up_gives_litellm_nothing_of_the_project(project, tmp_path):
    config = project.place / "fleet.yaml"
    config.write_text(config.read_text().replace("builtin", "litellm"))
    litellm = project.claude.with_name("litellm")
    litellm.write_text(f"#!{sys.executable} -S\n" + LITELLM_ALIKE.replace("@SEEN@", str(tmp_path / "seen")))
    litellm.chmod(0o755)
    evil = "litellm_settings:\n  callbacks: evil.handler\n"
    (project.place / "litellm_config.yaml").write_text(evil)
    (project.place / "sitecustomize.py").write_text("open('ran', 'w')\n")
    done = project("up", PYTHONPATH=str(project.place), PYTHONSTARTUP="x", LITELLM_CONFIG="x",
                   WORKER_CONFIG="x", LITELLM_MASTER_KEY="sk-0123456789abcdef", KEPT="yes")
    assert (done.returncode, done.stdout) == (7, "FROM LITELLM\n")
    seen = json.loads((tmp_path / "seen").read_text())
    assert "callbacks" not in seen["config"] and "ollama_chat/tiny" in seen["config"]
    assert seen["words"][2] == os.path.join(seen["directory"], "litellm_config.yaml")
    assert not os.path.exists(seen["directory"]) and str(project.place) not in seen["path"]
    assert {name for name in seen["environ"] if name.startswith(("PYTHON", "LITELLM", "WORKER"))} \
        == {"LITELLM_MASTER_KEY", "LITELLM_MODE", "LITELLM_LOCAL_MODEL_COST_MAP"}
    assert seen["environ"]["KEPT"] == "yes" and seen["environ"]["LITELLM_MODE"] == "PRODUCTION"
    assert (project.place / "litellm_config.yaml").read_text() == evil
    assert not list(project.place.rglob("ran"))


def test_up_writes_a_fleet_file_where_there_is_none(tmp_path, monkeypatch, capsys, fake_node):
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sf, "OLLAMA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("SUBAGENT_FLEET_CONFIG", raising=False)
    monkeypatch.setattr(sf, "_STARTER", sf._STARTER.replace("4000", str(free_port())))
    assert sf.main(["up"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: no fleet.yaml, and no model to write one "
                                                  "with: local (http://127.0.0.1:")
    assert "): refused\n  fix: start Ollama, `ollama pull qwen3:8b`, then" in said.err
    assert not (tmp_path / "fleet.yaml").exists()
    node = fake_node({"nomic-embed-text": {"capabilities": ["embedding"]}})
    monkeypatch.setattr(sf, "OLLAMA_ENDPOINT", node.endpoint)
    assert sf.main(["up"]) == 1
    told = capsys.readouterr().err
    assert "): 1 model; nomic-embed-text:latest cannot chat\n  fix: `ollama pull " in told
    os.symlink("elsewhere.yaml", "fleet.yaml")
    node.models["tiny:latest"] = {}
    assert sf.main(["up"]) == 3 and os.listdir(str(tmp_path)) == [".git", "fleet.yaml"]
    assert capsys.readouterr().err.startswith("error: fleet.yaml is a symlink; nothing is written")
    os.unlink("fleet.yaml")
    node.answers["/api/chat"] = 500, {"error": "out of memory"}
    monkeypatch.setattr(sf, "OLLAMA_ENDPOINT", node.endpoint)
    assert sf.main(["up"]) == 1
    said = capsys.readouterr()
    # Whoever is at the usual port on this machine is named.
    assert re.match(r"Created fleet\.yaml\n(Port \d+ is taken .*\n)?  local \(http://127\.", said.err) and "Edit it" not in said.err
    assert "no model of this fleet could be loaded" in said.err
    assert (tmp_path / "fleet.yaml").exists()


@pytest.mark.slow
def test_what_ends_a_gateway_of_another_fleet_can_be_typed(project, tmp_path_factory):
    project("generate")
    other = tmp_path_factory.mktemp("other")
    (other / "fleet.yaml").write_text((project.place / "fleet.yaml").read_text(), encoding="utf-8")
    subprocess.run([sys.executable, "-I", "-S", PROGRAM, "generate"], cwd=str(other), check=True,
                   env=clean_environment(), capture_output=True)
    process = started([sys.executable, "-I", "-S", PROGRAM, "serve"], cwd=str(other),
                      env=clean_environment(), stdout=subprocess.PIPE)
    process.stdout.readline()
    for command in ("up", "serve"):
        done = project(command)
        assert done.returncode == 1 and re.search(
            r"  fix: write `port: \d+` under project.gateway, or stop it\n", done.stderr), done.stderr
    process.terminate()
    assert process.wait(10) == 0
    process.stdout.close()


def test_up_refuses_a_port_that_is_not_its_fleets(project, fake_node):
    fake_node(port=project.port)
    done = project("up")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"error: port {project.port} is in use by something else (`lsof -i :{project.port}` shows what)\n" in \
        done.stderr
    assert re.search(r"  fix: write `port: \d+` under project.gateway, or stop it\n", done.stderr)


@pytest.mark.parametrize("words, env", [
    (("--config", "-"), {}), ((), {"SUBAGENT_FLEET_CONFIG": "-"})])
def test_up_wants_its_config_in_a_file(project, words, env):
    done = project("up", *words, input=(project.place / "fleet.yaml").read_bytes(), **env)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: up: standard input is Claude Code's, so the config must be in a file\n"
        "  fix: subagent-fleet up --config fleet.yaml\n")
    assert project.node.asked("/api/chat") == []


SLUGS = ("no-model", "nothing-ready", "litellm-missing", "litellm-failed", "cannot-listen", "no-key",
         "port-taken", "weak-key", "usage")
