"""The dashboard: its door, what it is told, and that it can only be looked at."""
import contextlib
import hmac
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

import fake_ollama
import subagent_fleet as sf
from gateway_rig import Rig, fleet_of, read_answer, request_of, wait_until
from subagent_fleet import replace
from tools import PROGRAM, clean_environment, free_port, limit_of

KEY = "sk-dashboard-0123456789abcdef0123456789"
PIECES = [sf.DASHBOARD_HTML, sf.DASHBOARD_STYLE, sf.EVENTS_SCRIPT, sf.PARTS_SCRIPT, sf.LANES_SCRIPT]


# -- the door --

def cookie_of(headers):
    """What a browser sends back of what it was given; no script and no other site gets at it."""
    cookie, *attributes = headers["set-cookie"].split("; ")
    assert attributes == ["HttpOnly", "SameSite=Strict", "Path=/"]
    return cookie


class Door:
    """A dashboard in this process; `ask` sends one request."""

    head, connect, raw = Rig.head, Rig.connect, Rig.raw

    def __init__(self):
        self.world = sf.World()
        self.said = []
        self.world.err = self.said.append
        listener = self.world.listen("127.0.0.1", 0)
        self.port = listener.port
        self.page = sf.Dashboard(self.world, "127.0.0.1", self.port)
        self.thread = threading.Thread(target=self.page.run, args=(listener,), daemon=True)
        self.thread.start()
        self.code = self.invite()
        self.cookie = cookie_of(self.ask(f"/?code={self.invite()}")[1])

    def invite(self):
        """The code of a new address."""
        place, _, code = self.page.invite().partition("?code=")
        assert place == f"http://127.0.0.1:{self.port}/"
        return code

    def ask(self, target="/", method="GET", **headers):
        return self.raw(self.head(method, target, **{"x_api_key": None, **headers}))

    def close(self):
        self.page.stop("test")
        self.page.stop("test")
        self.thread.join(15)
        assert not self.thread.is_alive()


@pytest.fixture
def door():
    with contextlib.closing(Door()) as made:
        yield made


def test_a_code_that_can_be_typed_becomes_a_cookie_that_opens_the_page(door):
    assert re.fullmatch("[0-9a-f]{10}", door.code)
    status, headers, body = door.ask(f"/?code={door.code.upper()}")
    assert status == 200 and b"location.replace" in body and door.code.encode() not in body
    assert cookie_of(headers) == door.cookie and door.code not in door.cookie
    status, headers, body = door.ask(Cookie=f"other=1; {door.cookie}; more=2")
    assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
    assert b'id="machines"' in body and headers["x-content-type-options"] == "nosniff"


def test_a_code_opens_the_page_once(door):
    assert door.page.is_unused(f"http://127.0.0.1/?code={door.code}")
    assert door.ask(f"/?code={door.code}")[0] == 200
    assert not door.page.is_unused(f"http://127.0.0.1/?code={door.code}")
    assert door.ask(f"/?code={door.code}")[0] == 401
    # A browser that asks for an address twice, or goes back to it, has its cookie.
    assert door.ask(f"/?code={door.code}", Cookie=door.cookie)[0] == 200


@pytest.mark.parametrize("target", ["/", "/events", "/?code=", "/?code=0000000000", "/nothing",
                                    "/?code=%00", "/events?code={code}", "/?CODE={code}", "/?{code}"])
def test_nothing_is_seen_without_a_code(door, target):
    status, headers, body = door.ask(target.format(code=door.code))
    assert status == 401 and b"subagent-fleet ui" in body and "set-cookie" not in headers
    assert b"<form>" in body and b"machines" not in body  # where it can be typed
    assert "form-action 'self'" in headers["content-security-policy"]
    assert door.ask(target.format(code="x"), Cookie="x=y")[0] == 401


def test_a_wrong_code_is_compared_in_constant_time(door, monkeypatch):
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(a) or real(a, b))
    for target, cookie in (("/?code=wrong", None), ("/", f"subagent_fleet_{door.port}=wrong"),
                           ("/", None)):
        before = len(compared)
        assert door.ask(target, Cookie=cookie)[0] == 401
        assert len(compared) > before


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Host": "evil.example:{port}"},
                                     {"Host": None}, {"Origin": "https://evil.example"}])
def test_who_a_foreign_page_sends_is_refused(door, headers):
    headers = {name: value and value.format(port=door.port) for name, value in headers.items()}
    assert door.ask(Cookie=door.cookie, **headers)[0] == 403


def test_the_name_of_this_machine_is_no_name_of_the_page(door):
    host = f"{socket.gethostname()}:{door.port}"
    assert door.ask(Cookie=door.cookie, Host=host)[0] == (200 if "localhost" in host else 403)
    assert door.ask(Cookie=door.cookie, Host=f"localhost:{door.port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_the_page_can_only_be_looked_at(door, method):
    for target in ("/", "/events"):
        assert door.ask(target, method, Cookie=door.cookie)[0] == 405


def test_only_what_the_page_brings_may_run(door):
    nonces = set()
    for _ in range(2):
        _, headers, body = door.ask(Cookie=door.cookie)
        policy = headers["content-security-policy"]
        (nonce,) = set(re.findall(r"nonce-([0-9a-f]{32})'", policy))
        assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
        assert re.findall(rb"<(?:script|style)[^>]*>", body) == [
            f'<style nonce="{nonce}">'.encode(), f'<script nonce="{nonce}">'.encode()]
        assert b"NONCE" not in body
        nonces.add(nonce)
    assert len(nonces) == 2


def test_neither_code_nor_cookie_is_in_a_log(door):
    secrets = (door.code, door.cookie.partition("=")[2])
    for secret in secrets:
        door.ask(f"/nothing?code={secret}", Cookie=door.cookie)
        with door.connect() as connection:
            connection.sendall(f"GET /?code={secret} HTTP/9.9\r\n\r\n".encode())
            connection.recv(1000)
        assert secret not in "".join(door.said)


# -- the page as it is written --

def test_the_page_is_small_and_by_hand():
    assert all(piece in sf.DASHBOARD_PAGE for piece in PIECES[1:]) and "@" not in re.findall(r"(?m)^@\w+$", sf.DASHBOARD_PAGE)
    assert all(piece.count("\n") <= 300 for piece in PIECES)
    assert sf.DASHBOARD_PAGE.count("\n") <= 750
    assert max(map(len, sf.DASHBOARD_PAGE.splitlines())) <= 100


def test_the_page_takes_text_as_text_and_nothing_from_elsewhere():
    page = sf.DASHBOARD_PAGE + sf.DOOR_PAGE + sf.CODE_PAGE
    ways = r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|srcdoc"
    assert re.findall(ways, page) == []
    addresses = re.findall(r"https?://[^\s\"'`;)]*", page)
    assert addresses == []
    assert re.findall(r"\b(?:src|href|action)=|@import|url\(|fetch\(|XMLHttp|sendBeacon", page) == []


def test_machines_have_the_same_colours_as_in_the_terminal():
    light = sf.DASHBOARD_STYLE[:sf.DASHBOARD_STYLE.index("@media")]
    assert re.findall(r"--m(\d): (#[0-9a-f]{6})", light) == [
        (str(index), colour) for index, (colour, _) in enumerate(sf.MACHINE_COLOURS)]


# -- what it is told --

FLEET = fleet_of(("big", "a", "x", {"max_parallel": 2, "fallback": ["small"]}),
                 ("small", "b", "y", {}), ("twin", "a", "z", {"max_parallel": 3}))
FOREVER = "2318-12-01T10:00:00Z"


def sight(**more):
    loaded = sf.LoadedModel("tiny", 32768, 80, 5_000_000_000, FOREVER)
    states = {"a": sf.NodeState("a", "http://127.0.0.1:1", version="0.32.15", latency_seconds=0.0015,
                                models=(sf.NodeModel("tiny"),), loaded=(loaded,)),
              "b": sf.NodeState("b", "http://127.0.0.1:1", reason="refused")}
    view = sf.GatewayView(more.pop("holder", ""), more.pop("page", None))
    seen = sf.plan_sight(FLEET, more.pop("states", states), view, 0.0)
    return replace(seen, **more)


def test_a_picture_says_what_is_known_of_a_fleet():
    page = sf.FleetPage("test", models=(sf.ModelSlots("big", 0, 2, warm=sf.KeptWarm(2, 9000)),))
    picture = sf.plan_picture(replace(sight(), said=page))
    assert json.loads(sf.render_json(picture)) == picture
    assert [(model["warm"], model["kept"]) for model in picture["models"]] == [
        (None, 2), (None, 0), (None, 0)]  # how many could be, and are now
    assert (picture["fleet"], picture["level"]) == ("test", "bad")
    assert picture["sentence"] == "Needs you: 1 problem. Not answering: b."  # which alone has it
    first, second = picture["machines"]
    assert (first["name"], first["online"], first["colour"]) == ("a", True, 0)
    assert first["loaded"] == [{"name": "tiny", "bytes": 5_000_000_000, "context": 32768,
                                "gpu": 80, "unloads": "never unloads"}]
    assert (second["online"], second["why"], second["colour"]) == (False, "refused", 1)
    assert second["fix"]
    models = {model["name"]: model for model in picture["models"]}
    assert [models[name]["slots"] for name in ("big", "small", "twin")] == [3, 1, 3]
    assert models["big"]["fallback"] == ["small"]
    assert [models[name]["state"] for name in ("big", "small")] == ["ready", "node offline"]
    assert [agent["name"] for agent in picture["agents"]] == ["main", "planner"]
    assert picture["findings"] == picture["tasks"] == []


LOADED = tuple(sf.LoadedModel(model.ollama_model, model.context or 65536, 100, 1, FOREVER)
               for model in FLEET.models.values())
ALL_WELL = {"states": {name: sf.NodeState(name, "http://127.0.0.1:1", version="1", loaded=LOADED,
                                          models=tuple(sf.NodeModel(each.name) for each in LOADED))
                       for name in ("a", "b")},
            "holder": sf.OUR_GATEWAY}
TASK = {"name": "docs", "state": "running", "level": "work", "now": "Edit", "fix": "", "answers": ""}
ASKS = {**TASK, "state": "asking", "level": "ask", "now": "Which one?", "answers": "a: `x 1`"}
PARKED = {**TASK, "name": "scope", "state": "parked", "level": "warn", "fix": "git diff"}
REVIEW = {**ASKS, "state": "review"}
FAILED = {**TASK, "name": "noop", "state": "failed", "level": "bad", "fix": "subagent-fleet tasks"}


def finding(level, what="it is wrong", slug="x"):
    return sf.Finding(slug, level, what, fix="npm install it")


@pytest.mark.parametrize("more, level, sentence", [
    ({}, "ok", "Ready: all models are loaded."),
    ({"tasks": [TASK], "findings": [finding("info")]}, "ok", "Ready: all models are loaded."),
    ({"findings": [finding("warning")]}, "warn", "Ready, with 1 warning."),
    ({"findings": [finding("warning"), finding("error")]}, "bad", "Needs you: 1 problem."),
    ({"tasks": [ASKS]}, "ask", "Needs you: 1 question."),
    ({"tasks": [PARKED, FAILED, ASKS]}, "bad", "Needs you: 1 question, 1 parked task, 1 failed task."),
    ({"tasks": [REVIEW, {**REVIEW, "name": "b"}, PARKED]}, "ask", "Needs you: 2 reviews, 1 parked task."),
    ({"tasks": [FAILED] * 4, "findings": [finding("error")]}, "bad", "Needs you: 4 failed tasks, 1 problem."),
    ({"holder": "python3"}, "bad", "Needs you: 1 problem.")])
def test_the_headline_is_the_worst_of_what_stands_below(more, level, sentence):
    picture = sf.plan_picture(sight(**{**ALL_WELL, **more}))
    assert (picture["level"], picture["sentence"]) == (level, sentence)
    assert bool(picture["needs"]) == sentence.startswith("Needs you")


def test_what_needs_a_person_comes_first_with_what_to_type():
    both = [finding("error", f"{name} is too old") for name in ("a", "b")]
    picture = sf.plan_picture(sight(**{**ALL_WELL, "tasks": [ASKS, PARKED, FAILED], "findings": both}))
    assert [(each["level"], each["what"], each["fix"]) for each in picture["needs"]] == [
        ("ask", "docs asks: Which one?", "a: `x 1`"),
        ("warn", "scope is parked: Edit", "`git diff`"),
        ("bad", "1 task failed: noop", "`subagent-fleet tasks`"),
        ("bad", "a is too old", "`npm install it`"), ("bad", "b is too old", "`npm install it`")]
    two = [{**FAILED, "name": name, "fix": f"`subagent-fleet task log {name}`"} for name in ("a", "b")]
    assert sf.plan_picture(sight(**{**ALL_WELL, "tasks": two}))["needs"] == [
        {"level": "bad", "what": "2 tasks failed: a, b",
         "fix": "`subagent-fleet task log a`\n`subagent-fleet task log b`"}]


def test_questions_stand_above_reviews_and_what_is_parked():
    picture = sf.plan_picture(sight(**{**ALL_WELL, "tasks": [PARKED, FAILED, REVIEW, ASKS]}))
    assert [each["what"].split()[1].strip(":") for each in picture["needs"]] == ["asks", "waits", "is", "task"]


def test_a_command_in_a_reason_can_be_copied_whole():
    absent = {**PARKED, "now": "`qwen` is not on the PATH; npm install -g @qwen-code/qwen-code"}
    (need,) = sf.plan_picture(sight(**{**ALL_WELL, "tasks": [absent]}))["needs"]
    assert need["what"] == "scope is parked: `qwen` is not on the PATH; `npm install -g @qwen-code/qwen-code`"


def test_what_an_agent_runs_is_shown_as_it_is():
    state = sf.TaskState("t", sf.TaskSpec("t", prompt="x"), 0, state="running")
    (row,) = sf.plan_task_rows(sf.TaskSight({"t": state}, {}, 100.0))
    row = replace(row, now="Bash sleep 20; echo x > x4.txt", fix="")
    assert sf.report_task(row, state)["now"] == "Bash sleep 20; echo x > x4.txt"


def test_what_to_type_for_a_task_is_said_once():
    state = sf.TaskState("t", sf.TaskSpec("t", prompt="x"), 0, state="parked", cause="setup-failed",
                         reason="setup failed (exit 7); subagent-fleet task log t setup")
    (row,) = sf.plan_task_rows(sf.TaskSight({"t": state}, {}, 100.0))
    shown = sf.report_task(row, state)
    assert (shown["now"], shown["fix"]) == ("setup failed (exit 7)", "`subagent-fleet task log t setup`")


def test_a_machine_without_another_for_its_work_is_a_need():
    down = {**ALL_WELL["states"], "b": sf.NodeState("b", "http://127.0.0.1:1", reason="refused")}
    (need,) = sf.plan_picture(sight(**{**ALL_WELL, "states": down}))["needs"]
    assert need["what"].endswith("b does not answer (refused), and no other machine runs small")
    down = {**ALL_WELL["states"], "a": sf.NodeState("a", "http://127.0.0.1:1", reason="refused")}
    (need,) = sf.plan_picture(sight(**{**ALL_WELL, "states": down}))["needs"]
    assert "runs twin" in need["what"]  # big has a fallback


def test_the_log_of_litellm_is_told_by_severity_and_holds_no_key():
    text = ("\x1b[31mERROR\x1b[0m: it broke\nINFO: fine\nWARNING: hm\n\n"
            "header Authorization: Bearer abc123 and sk-0123456789abcdef\nTraceback (most\n")
    rows = sf.parse_log(text.encode().split(b"\n"))
    assert [row["level"] for row in rows] == ["error", "info", "warning", "info", "error"]
    shown = json.dumps(rows)
    assert "abc123" not in shown and "sk-0" not in shown and "\\u001b" not in shown
    assert len(sf.parse_log([b"x"] * 1000)) == sf.LOG_LINES


@pytest.mark.parametrize("line", [
    "litellm.completion(api_key='AIzaSyD-0123456789abcdefghijk', model='x')",
    'headers: {"x-api-key": "0123456789secret"}', "token=hf_ABCDEFGHIJKLMNOP0123456789secret",
    "asked with hf_ABCDEFGHIJKLMNOPsecret", "Authorization: Basic dXNlcjpzZWNyZXQ=secret",
    "key gsk_0123456789abcdefsecret", "AKIAIOSFODNN7EXAMPLEsecret", "password: hunter2secret"])
def test_a_key_of_any_shape_is_left_out_of_a_log(line):
    shown = sf.parse_log([line.encode()])[0]["line"]
    assert "(a key)" in shown and "secret" not in shown and "0123456789" not in shown


@pytest.mark.parametrize("line", [
    "10,905 tokens read", "GET /v1/models 200", "skipped: task-1 asks", "tokens: 12", "hf is down"])
def test_what_is_no_key_stays_in_a_log(line):
    assert sf.parse_log([line.encode()])[0]["line"] == line


def frames(stream):
    """What a stream of events holds, as it comes."""
    for told in stream:
        if told.startswith(b"data: "):
            yield json.loads(told[6:])


def test_only_the_latest_picture_counts(door):
    door.page.show({"number": 1})
    with door.connect() as connection:
        connection.sendall(door.head("GET", "/events", Cookie=door.cookie))
        told = frames(connection.makefile("rb"))
        assert next(told)["kind"] == "hello"
        assert next(told) == {"kind": "picture", "id": "picture", "number": 1}
        for number in (1, 2, 3, 4):
            door.page.show({"number": number})
        assert next(told) == {"kind": "picture", "id": "picture", "number": 4}
        door.page.show({"number": 4})
        door.page.log.put({"kind": "request", "id": "req_2"})
        assert next(told)["id"] == "req_2"


def test_who_looks_comes_back_when_the_gateway_has_gone(door):
    door.page.log.put({"kind": "request", "id": "req_1"})
    with door.connect() as connection:
        connection.sendall(door.head("GET", "/events", Cookie=door.cookie))
        stream = connection.makefile("rb")
        told = frames(stream)
        assert [next(told)["kind"], next(told)["kind"]] == ["hello", "request"]
        door.page.start_over()
        assert list(told) == []  # the stream has ended
    with door.connect() as connection:
        connection.sendall(door.head("GET", "/events", Cookie=door.cookie))
        told = frames(connection.makefile("rb"))
        next(told)
        door.page.log.put({"kind": "request", "id": "req_2"})
        assert next(told)["id"] == "req_2"  # nothing is left of the first


# -- the command --

CONFIG = """\
project: {{name: local-dev, gateway: {{provider: builtin, port: {port}}}}}
nodes: {{a: {{endpoint: 'http://127.0.0.1:{node}'}}}}
models: {{m: {{node: a, ollama_model: tiny, litellm_alias: x, context: 32768}}}}
agents: {{planner: {{model: m, description: plans}}}}
"""


class Shown:
    """`ui` as its own process, and a listener at its events."""

    head, connect, post, raw = Rig.head, Rig.connect, Rig.post, Rig.raw

    def __init__(self, place, *words):
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-W", "error", PROGRAM, "ui", "--port", "0", *words],
            cwd=str(place), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=clean_environment(LITELLM_MASTER_KEY=KEY, HOME=str(place)))
        told = self.process.stdout.readline().decode()
        self.port, self.code = re.search(r":(\d+)/\?code=([0-9a-f]{10})$", told).groups()
        self.port = int(self.port)
        target = f"/?code={self.code}"
        cookie = cookie_of(self.raw(self.head("GET", target, x_api_key=None))[1])
        self.token = cookie.partition("=")[2]
        connection = self.connect()
        connection.sendall(self.head("GET", "/events", Cookie=cookie))
        self.told = frames(connection.makefile("rb"))

    def until(self, is_it):
        return next(each for each in self.told if is_it(each))

    def picture(self, is_it):
        return self.until(lambda each: each["kind"] == "picture" and is_it(each))

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        said, talk = self.process.communicate(timeout=20)
        assert re.search(rb"For another browser: http://[0-9.:]+/\?code=\w+\n$", said)
        assert self.code.encode() not in said and self.token.encode() not in said
        assert b"Traceback" not in talk and self.token.encode() not in talk, talk
        return self.process.returncode


@pytest.fixture
def place(tmp_path):
    node = fake_ollama.FakeNode({"tiny": {}})
    port = free_port()
    (tmp_path / "fleet.yaml").write_text(CONFIG.format(port=port, node=node.port))
    with contextlib.ExitStack() as ending:
        place = type("Place", (), {"path": tmp_path, "node": node, "port": port, "ending": ending})
        ending.callback(lambda: place.node.close())
        yield place


def run_server(place, **more):
    """A gateway of the place's fleet in this process."""
    fleet = sf.load_fleet(str(place.path / "fleet.yaml"))
    world = sf.World()
    server = sf.Server(fleet, KEY, world, **more)
    thread = threading.Thread(target=server.run, args=(world.listen("127.0.0.1", place.port),),
                              daemon=True)
    thread.start()

    def stop():
        server.stop("test")
        server.stop("test")
        thread.join(15)
    place.ending.callback(stop)
    return stop


def ask(place, **more):
    with socket.create_connection(("127.0.0.1", place.port), timeout=20) as connection:
        rig = type("Asked", (), {"port": place.port, "head": Rig.head, "post": Rig.post})()
        connection.sendall(rig.post(request_of("x", **more), x_api_key=KEY,
                                    x_claude_code_session_id="s-1"))
        return read_answer(connection.makefile("rb"))[0]


@pytest.mark.slow
def test_ui_shows_machines_gateway_and_requests_as_they_come_and_go(place):
    shown = Shown(place.path)
    place.ending.callback(shown.process.kill)
    picture = shown.picture(lambda each: True)
    assert picture["machines"][0]["online"] and not picture["gateway"]["followed"]
    assert "no gateway runs" in picture["gateway"]["says"]

    stop = run_server(place)
    shown.picture(lambda each: each["gateway"]["followed"])
    assert ask(place) == 200
    ended = shown.until(lambda each: "receipt" in each)["receipt"]
    assert (ended["node"], ended["route"], ended["outcome"]) == ("a", "m", "ok")

    # A machine goes and comes: the page knows within three seconds.
    port = place.node.port
    place.node.close()
    began = time.monotonic()
    assert shown.picture(lambda each: not each["machines"][0]["online"])["machines"][0]["why"]
    assert time.monotonic() - began < 3
    place.node = fake_ollama.FakeNode({"tiny": {}}, port=port)
    began = time.monotonic()
    shown.picture(lambda each: each["machines"][0]["online"])
    assert time.monotonic() - began < 3

    stop()
    assert list(shown.told) == []  # it is told anew when it comes back
    assert shown.end() == 0


@pytest.mark.slow
def test_a_machine_that_says_nothing_holds_up_no_receipt(place):
    dead = place.ending.enter_context(socket.create_server(("127.0.0.1", 0)))
    config = place.path / "fleet.yaml"
    endpoint = f"{{endpoint: 'http://127.0.0.1:{dead.getsockname()[1]}'}}"
    config.write_text(config.read_text().replace("nodes: {", f"nodes: {{dead: {endpoint}, "))
    run_server(place)
    shown = Shown(place.path)
    place.ending.callback(shown.process.kill)
    shown.picture(lambda each: each["gateway"]["followed"])
    silent = []  # each look is one of them, and takes two seconds
    for number in range(2, 9):
        shown.picture(lambda each: True)
        while len(silent) < number + 1:
            connection = place.ending.enter_context(dead.accept()[0])
            if b"Origin" not in connection.recv(4096):  # which only the doctor sends
                silent.append(connection)
        assert ask(place) == 200
        # On a machine that is very slow the look may end first; it does not do so again and again.
        if shown.until(lambda each: "receipt" in each or each["kind"] == "picture")["kind"] != "picture":
            break
        shown.until(lambda each: "receipt" in each)
    else:
        pytest.fail("each receipt came behind the picture")
    assert shown.end() == 0


@pytest.mark.slow
def test_ui_tells_what_was_filed_where_no_gateway_runs(place):
    receipts = place.path / ".subagent-fleet" / "requests.jsonl"
    receipts.parent.mkdir()
    receipt = sf.Receipt(time=time.time(), id="req_1", session="s", agent_id="", alias="x", route="m",
                         node="a", context=1, failures=(), waited_seconds=0.0, first_byte_seconds=0.1, total_seconds=0.2,
                         input_tokens=1, output_tokens=2, outcome="ok")

    def line_of(**more):
        return sf.render_json(replace(receipt, **more))
    lines = [line_of(id=f"req_{number}") for number in range(300)]
    receipts.write_bytes(b"\n".join([b"{torn", *lines]) + b"\n")
    shown = Shown(place.path)
    place.ending.callback(shown.process.kill)
    shown.until(lambda each: each.get("id") == "req_299")
    with receipts.open("ab") as more:
        more.write(line_of(id="req_new") + b"\n")
    assert shown.until(lambda each: each.get("id") == "req_new")["kind"] == "request"
    assert shown.end() == 0


@pytest.mark.slow
def test_the_page_reads_the_fleet_file_again_when_it_changes(place):
    config = place.path / "fleet.yaml"
    text = config.read_text()
    shown = Shown(place.path)
    place.ending.callback(shown.process.kill)
    assert [each["name"] for each in shown.picture(lambda each: True)["machines"]] == ["a"]

    config.write_text(text.replace("node: a,", "node: gone,"))
    wrong = shown.picture(lambda each: any("gone" in need["what"] for need in each["needs"]))
    assert wrong["level"] == "bad" and [each["name"] for each in wrong["machines"]] == ["a"]
    config.unlink()
    shown.picture(lambda each: any("no fleet.yaml" in need["what"] for need in each["needs"]))

    more = f"nodes: {{b: {{endpoint: 'http://127.0.0.1:{free_port()}'}}, "
    config.write_text(text.replace("nodes: {", more).replace("tiny", "enormous"))
    right = shown.picture(lambda each: len(each["machines"]) == 2)
    assert [each["model"] for each in right["models"]] == ["enormous"]
    assert not any("fleet.yaml" in need["what"] for need in right["needs"])

    stop = run_server(place)
    shown.picture(lambda each: each["gateway"]["followed"])
    config.write_text(text)
    shown.picture(lambda each: len(each["machines"]) == 1)
    stop()
    assert shown.end() == 0


@pytest.mark.slow
def test_what_has_answered_keeps_its_name_when_the_fleet_file_changes(place, run_cli):
    config, kept = place.path / "fleet.yaml", place.path / ".subagent-fleet/requests.jsonl"
    kept.parent.mkdir()
    stop = run_server(place, receipts=str(kept))
    assert ask(place) == 200
    stop()
    config.write_text(config.read_text().replace("tiny", "enormous"))

    shown = Shown(place.path)
    place.ending.callback(shown.process.kill)
    row = shown.until(lambda each: "receipt" in each)
    assert [step["model"] for step in row["receipt"]["steps"]] == ["", "tiny", "tiny"]
    assert shown.end() == 0
    for words in (("logs",), ("trace", "last"), ("logs", "--json"), ("trace", "last", "--json")):
        done = run_cli(*words, env=clean_environment(HOME=str(place.path)))
        assert "tiny" in done.stdout and "enormous" not in done.stdout, done.stdout + done.stderr


def test_ui_takes_the_next_port_unless_one_was_typed(place, run_cli, monkeypatch):
    port = free_port()
    monkeypatch.setattr(sf, "PAGE_PORT", port)
    world = sf.World()
    first, second = (sf.listen_for_page(world, FLEET.gateway) for _ in range(2))
    assert first.port == port and second.port > port
    done = run_cli("ui", "--no-open", "--port", port)
    assert done.returncode == 1 and "subagent-fleet ui --port 0" in done.stderr
    for listener in (first, second):
        listener.close()
    taken = run_cli("ui", "--no-open", "--port", place.port)
    assert taken.returncode == 2 and f"{place.port} is the gateway's port" in taken.stderr
    assert run_cli("ui", "--port", "x").returncode == 2


def test_no_browser_is_opened_where_nobody_sits(monkeypatch):
    world = sf.World()
    ran = []
    monkeypatch.setattr(subprocess, "Popen", lambda words, **_: ran.append(words))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(world, "which", lambda name: f"/bin/{name}")
    world.environ = {}
    assert not world.open_page("http://127.0.0.1:1/")
    world.environ = {"DISPLAY": ":0", "SSH_CONNECTION": "x"}
    assert not world.open_page("http://127.0.0.1:1/")
    world.environ = {"DISPLAY": ":0"}
    assert world.open_page("http://127.0.0.1:1/")
    assert ran == [["/bin/xdg-open", "http://127.0.0.1:1/"]]


@pytest.mark.slow
def test_ui_shows_the_tasks_of_its_repository(place, run_cli):
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "start"]):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *words],
                       cwd=place.path, check=True)
    shown = Shown(place.path)
    place.ending.callback(shown.process.kill)
    assert shown.picture(lambda each: True)["tasks"] == []
    assert run_cli("task", "add", "fix it", "--name", "parser").returncode == 0
    (row,) = shown.picture(lambda each: each["tasks"])["tasks"]
    assert (row["name"], row["state"], row["level"]) == ("parser", "waiting", "wait")
    assert row["over"] is False and row["now"] == "for `run`"
    assert shown.end() == 0


# -- the warm-up, as the dashboard reads it --

def warmup_page(place):
    workspace = sf.Workspace(sf.World(), str(place))
    return sf.read_warmup(workspace)


def test_a_warm_up_leaves_its_progress_where_there_is_a_workspace(place, run_cli):
    assert run_cli("warmup").returncode == 0
    assert not (place.path / ".subagent-fleet").exists()
    (place.path / ".subagent-fleet").mkdir()
    assert run_cli("warmup").returncode == 0
    (row,) = warmup_page(place.path)
    assert (row["route"], row["node"], row["stage"], row["state"]) == ("m", "a", "done", "ok")


@pytest.mark.slow
def test_a_warm_up_is_shown_while_it_goes_on(place):
    (place.path / ".subagent-fleet").mkdir()
    place.node.delay = 0.6
    child = subprocess.Popen([sys.executable, PROGRAM, "warmup"], cwd=str(place.path),
                             stdout=subprocess.DEVNULL, env=clean_environment())
    place.ending.callback(child.kill)
    wait_until(lambda: [row["stage"] for row in warmup_page(place.path)] == ["loading"])
    assert child.wait(30) == 0
    assert [row["stage"] for row in warmup_page(place.path)] == ["done"]


WARM_ROW = {"route": "m", "node": "a", "model": "qwen3:8b", "stage": "loading",
            "state": "loading", "detail": "", "pulled_bytes": 0, "size_bytes": 0, "seconds": 1.5}


def warmup_file(place, *rows, **changes):
    """Write what a warm-up leaves of these models."""
    path = place / ".subagent-fleet" / "warmup.json"
    path.parent.mkdir(exist_ok=True)
    page = {"schema": "subagent-fleet/warmup-progress/2", "time": time.time(), "models": rows}
    path.write_text(json.dumps({**page, **changes}))


@pytest.mark.parametrize("changes", [
    {"time": 1}, {"time": "x"}, {"time": 99999999999}, {"models": {}}, {"schema": "other/1"}])
def test_a_warm_up_that_was_cut_off_is_not_shown_for_ever(tmp_path, changes):
    warmup_file(tmp_path, WARM_ROW)
    assert warmup_page(tmp_path) == [WARM_ROW]
    warmup_file(tmp_path, WARM_ROW, **changes)
    assert warmup_page(tmp_path) == []
    (tmp_path / ".subagent-fleet" / "warmup.json").write_text("{")
    assert warmup_page(tmp_path) == []


def test_a_warm_up_that_somebody_else_wrote_is_shown_only_as_far_as_it_is_one(tmp_path):
    odd = [{**WARM_ROW, name: value} for name in WARM_ROW for value in (None, ["x"])]
    warmup_file(tmp_path, *odd, 7, *[WARM_ROW] * 300)
    assert warmup_page(tmp_path) == [WARM_ROW] * limit_of("warmths")


def test_dashboard_pictures_of_readme_are_there():
    readme = (pathlib.Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    for name in re.findall(r"\(?(\.github/[\w-]+\.png)", readme):
        assert (pathlib.Path(__file__).parents[2] / name).stat().st_size > 10_000, name
