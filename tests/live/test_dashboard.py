"""The dashboard in a real Chromium: what it shows, what it refuses, how it looks, how it lasts."""
import contextlib
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from decimal import ROUND_HALF_UP, Decimal

import pytest

import conftest
import install
import rig
import subagent_fleet as sf
from chromium import Browser, find_program
from tools import ROOT, free_port

KEY = "sk-dashboard-0123456789abcdef0123456789"
PICTURES = install.CACHE / "pictures"  # kept, to be looked at
WIDTHS, THEMES = (360, 768, 1440), ("light", "dark")
GIGABYTE = 1_000_000_000
MACHINES = {  # name: model, its bytes, memory, how fast
    "laptop": ("qwen3:8b", 9.1, 16, sf.Pace(prompt_rate=9000, answer_rate=90)),
    "mini": ("qwen3-coder:30b", 27.5, 64, sf.Pace(prompt_rate=6000, answer_rate=120)),
    "gpu": ("devstral:24b", 18.2, 24, sf.Pace(prompt_rate=3000, answer_rate=70))}
FLEET = """\
project: {{name: local-dev, gateway: {{provider: builtin, port: {port}}}}}
nodes:
{nodes}
models:
  small: {{node: laptop, ollama_model: 'qwen3:8b', litellm_alias: claude-haiku-local,
          context: 32768, max_parallel: 2}}
  coder: {{node: mini, ollama_model: 'qwen3-coder:30b', litellm_alias: claude-sonnet-local,
          context: 65536, max_parallel: 2, fallback: [reviewer]}}
  reviewer: {{node: gpu, ollama_model: 'devstral:24b', litellm_alias: claude-opus-local,
             context: 32768, fallback: [coder]}}
agents:
  planner: {{model: small, description: plans}}
  implementer: {{model: coder, description: writes}}
  reviewer: {{model: reviewer, description: reviews}}
"""
# Who asks in the session: agent id, its type, the alias it asks for.
ASKERS = (("", "", "claude-sonnet-local"), ("a1", "planner", "claude-haiku-local"),
          ("a2", "implementer", "claude-sonnet-local"),
          ("a3", "implementer", "claude-sonnet-local"), ("a4", "reviewer", "claude-opus-local"))
NAMES = {"": "main", "a1": "planner", "a2": "implementer", "a3": "implementer", "a4": "reviewer"}


class Talker(sf.SimulatedNode):
    """A simulated machine whose answers and prompts are of any length."""

    def reply(self, payload):
        return [{"content": "word "} for _ in range(random.randint(40, 260))]

    def count(self, payload):
        return random.randint(1500, 9000)


class Scene:
    """Three simulated machines, `serve`, `ui`, somebody who asks, and an ear at `/events`."""

    def __init__(self, place):
        self.place, self.port = place, free_port()
        self.world = sf.World()
        self.nodes = {}
        for name, (model, size, _, pace) in MACHINES.items():
            told = {model: {"size": int(size * GIGABYTE)}}
            self.nodes[name] = Talker(self.world, told, pace=pace)
        rows = [f"  {name}: {{endpoint: 'http://127.0.0.1:{node.port}', "
                f"memory_gb: {MACHINES[name][2]}}}" for name, node in self.nodes.items()]
        (place / "fleet.yaml").write_text(FLEET.format(port=self.port, nodes="\n".join(rows)))
        self.home = place / "home"
        for agent, kind, _ in ASKERS[1:]:
            meta = self.home / f".claude/projects/x/s-1/subagents/agent-{agent}.meta.json"
            meta.parent.mkdir(parents=True, exist_ok=True)
            meta.write_text(json.dumps({"agentType": kind}))
        prompt = {"type": "user", "message": {"role": "user", "content": "Fix the login bug"}}
        transcript = self.home / ".claude/projects/x/s-1.jsonl"
        transcript.write_text(json.dumps({**prompt, "sessionId": "s-1"}) + "\n")
        claude = place / "bin" / "claude"
        claude.parent.mkdir()
        claude.write_text("#!/bin/sh\necho '2.1.328 (Claude Code)'\n")
        claude.chmod(0o755)
        self.run("generate")
        self.run("warmup")
        self.heard, self.is_asking = [], False
        self.serve = self.start("serve")
        rig.wait_until(lambda: self.get("/health/liveliness")[0] == 200, what="the gateway")
        self.ui = self.start("ui", "--port", "0", "--no-open")
        told = rig.wait_until(lambda: re.search(r"http://\S+", self.ui.text()), what="its address")
        self.url = told[0]
        threading.Thread(target=self._listen, daemon=True).start()

    def environment(self):
        bare = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG")}
        # As pip installs it: with the bytecode beside it.
        bare["PATH"] = f"{self.place / 'bin'}{os.pathsep}{bare['PATH']}"
        return {**bare, "HOME": str(self.home), "LITELLM_MASTER_KEY": KEY, "PYTHONPATH": str(ROOT),
                "PYTHONPYCACHEPREFIX": str(install.CACHE / "bytecode")}

    def words(self, *words):
        program = "import sys, subagent_fleet; sys.exit(subagent_fleet.main())"
        return [sys.executable, "-S", "-c", program, *words]

    def run(self, *words):
        subprocess.run(self.words(*words), cwd=self.place, env=self.environment(), check=True,
                       capture_output=True)

    def start(self, *words):
        return rig.Process(self.words(*words), log=self.place / f"{words[0]}.log", cwd=self.place,
                           env=self.environment())

    def restart_serve(self):
        self.serve.stop()
        self.serve = self.start("serve")
        rig.wait_until(lambda: self.get("/health/liveliness")[0] == 200, what="the gateway")

    def get(self, path):
        return rig.get_json(f"http://127.0.0.1:{self.port}{path}", headers={"x-api-key": KEY})

    def _listen(self):
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                wire = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
                wire.request("GET", "/events", headers={"x-api-key": KEY})
                for told in wire.getresponse():
                    if told.startswith(b"data: "):
                        self.heard.append(json.loads(told[6:]))
            time.sleep(0.2)

    def ask(self, agent, alias):
        headers = {"x-api-key": KEY, "x-claude-code-session-id": "s-1"}
        if agent:
            headers["x-claude-code-agent-id"] = agent
        body = json.dumps({"model": alias, "max_tokens": 999, "stream": True,
                           "messages": [{"role": "user", "content": "hi"}]})
        with contextlib.suppress(OSError, http.client.HTTPException):
            wire = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            wire.request("POST", "/v1/messages", body, headers)
            wire.getresponse().read()
            wire.close()

    def talk(self):
        """Let everybody ask again and again until `hush`."""
        self.is_asking = True

        def go_on(agent, alias):
            while self.is_asking:
                self.ask(agent, alias)
                time.sleep(random.uniform(0.1, 1.5))
        self.askers = [threading.Thread(target=go_on, args=(agent, alias), daemon=True)
                       for agent, _, alias in ASKERS]
        for asker in self.askers:
            asker.start()

    def hush(self):
        self.is_asking = False
        for asker in self.askers:
            asker.join(60)

    def receipts(self):
        """What `/events` said of each request that has ended, the latest first."""
        ended = {told["id"]: told["receipt"] for told in self.heard if "receipt" in told}
        return sorted(ended.values(), key=lambda receipt: -receipt["time"])

    def close(self):
        self.is_asking = False
        for process in (self.ui, self.serve):
            process.stop()
        for node in self.nodes.values():
            node.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not find_program() or not install.AXE_SCRIPT.exists():
        reason = "no Chromium or axe-core; fix: python3 tests/live/install.py, as root on Debian"
        (pytest.fail if conftest.REQUIRED else pytest.skip)(reason)
    PICTURES.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(Browser(tmp_path_factory.mktemp("chromium"))) as made:
        yield made


@pytest.fixture(scope="module")
def scene(browser, tmp_path_factory):
    with contextlib.closing(Scene(tmp_path_factory.mktemp("fleet"))) as made:
        yield made


@pytest.fixture(scope="module")
def page(browser, scene):
    opened = browser.open(scene.url)
    opened.wait("document.querySelectorAll('.card').length === 3")
    return opened


def texts(page, selector):
    return page.run(f"[...document.querySelectorAll({json.dumps(selector)})]"
                    ".map((each) => each.textContent)")


def rows(page):
    return page.run("[...document.querySelectorAll('#rows tr')].map((row) =>"
                    "[...row.children].map((cell) => cell.textContent))")


def tenths(seconds):
    """A number as a browser rounds it: of 1.25 it makes 1.3, where Python makes 1.2."""
    return str(Decimal(seconds).quantize(Decimal("0.1"), ROUND_HALF_UP))


def axe_violations(page):
    """What axe-core finds against WCAG 2 A and AA."""
    page.run(install.AXE_SCRIPT.read_text(encoding="utf-8") + "; 0")
    found = page.run("axe.run({runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa']})"
                     ".then((result) => result.violations.map((each) => [each.id,"
                     "each.nodes.slice(0, 3).map((node) => node.html + node.failureSummary)]))")
    return found


def memory_mb(process):
    told = subprocess.run(["ps", "-o", "rss=", "-p", str(process.child.pid)], check=True,
                          capture_output=True)
    return int(told.stdout) / 1024


def test_without_its_code_there_is_nothing_to_see(browser, scene):
    place = scene.url.partition("?")[0]
    for url in (place, f"{place}?code={'0' * 10}"):
        closed = browser.open(url, context=browser.context())
        assert "subagent-fleet ui" in closed.run("document.body.innerText")
        assert closed.run("document.querySelectorAll('section').length") == 0
        assert axe_violations(closed) == []
        closed.close()


def test_a_code_is_typed_where_the_short_address_leads(browser, board):
    place, _, code = board.invite().partition("?code=")
    opened = browser.open(place, context=browser.context(), width=360)
    assert opened.run("document.activeElement.name") == "code"
    opened.call("Input.insertText", text=code.upper())
    opened.run("document.querySelector('button').click(); 0")
    board.show(hostile_picture("local-dev"))
    opened.wait("document.querySelectorAll('.card').length === 1")
    assert opened.run("location.href") == place
    assert not board.is_unused(code)
    (said,) = opened.complaints()
    assert "401" in said and said.endswith(place)


def test_an_empty_page_says_what_to_type(page):
    page.wait("document.querySelector('#live').innerText === 'live'")
    assert page.run("location.href") == page.run("location.origin + '/'")  # no token in it
    assert "subagent-fleet launch claude" in page.run("document.querySelector('#nothing').innerText")
    assert texts(page, ".card h3") == list(MACHINES)
    assert page.run("document.cookie") == ""  # HttpOnly


def test_the_page_says_what_events_said(page, scene):
    """Half a minute of traffic: machines, routes, lanes and the table, by value."""
    page.run("window.begun = performance.now(); 0")
    scene.talk()
    seen = {"slots": set(), "routes": set(), "states": set()}
    until = time.monotonic() + 30
    while time.monotonic() < until:
        time.sleep(0.5)
        seen["slots"].add(page.run("document.querySelectorAll('.busy').length"))
        seen["routes"] |= set(page.run(
            "[...document.querySelectorAll('#routes .works')].map((each) => each.classList[1])"))
        seen["states"] |= {row[4] for row in rows(page)}
    scene.hush()
    assert max(seen["slots"]) == 3 and seen["routes"] >= {"m0", "m1", "m2"}
    assert {"reading", "writing", "ok"} <= seen["states"]

    receipts = rig.wait_until(lambda: len(scene.receipts()) >= 20 and scene.receipts(),
                              what="twenty requests")
    assert len(rows(page)) == min(len(receipts), 25)
    if len(receipts) > 25:
        page.run("document.querySelector('#more').click(); 0")
    page.wait(f"document.querySelectorAll('#rows tr').length === {min(len(receipts), 200)}")
    page.wait("!document.querySelector('#routes .works, .busy')")  # all rest
    runs = {"small": "qwen3:8b", "coder": "qwen3-coder:30b", "reviewer": "devstral:24b"}
    wanted = [[re.sub(r" #\d$", "", NAMES[receipt["agent_id"]]), runs[receipt["route"]],
               receipt["node"], receipt["outcome"], f"{tenths(receipt['waited_seconds'])} s",
               f"{tenths(receipt['first_byte_seconds'])} s", f"{receipt['input_tokens']:,}",
               f"{receipt['output_tokens']:,}"] for receipt in receipts]
    shown = [[re.sub(r" #\d$", "", row[1]), *row[2:7], *row[8:]] for row in rows(page)]
    assert shown == wanted
    assert {row[1] for row in rows(page)} == {"main", "planner", "implementer", "implementer #2",
                                              "reviewer"}

    # A lane for each agent, a bar for each request, with the words for it.
    assert texts(page, "#lanes h3") == ["Fix the login bug"]
    bars = page.run("Object.fromEntries([...document.querySelectorAll('.lane')].map((lane) =>"
                    "[lane.querySelector('span').textContent, [...lane.querySelectorAll('button')]"
                    ".map((bar) => bar.getAttribute('aria-label'))]))")
    assert {name: len(found) for name, found in bars.items()} == {
        name: [row[1] for row in rows(page)].count(name) for name in bars}
    said = " | ".join(label for found in bars.values() for label in found)
    for receipt in receipts:
        assert f"{receipt['output_tokens']:,} tokens" in said
    assert "read the prompt for" in said and "wrote for" in said and "waited" in said

    # What machines hold, as `status` says it.
    cards = texts(page, ".card")
    for card, (name, (model, size, memory, _)) in zip(cards, MACHINES.items()):
        assert name in card and model in card and f"{size:.1f} of {memory:.1f} GB" in card
        assert "100 % GPU" in card and "● online" in card


def test_the_filter_shows_only_rows_with_its_words(page):
    everything = len(rows(page))
    page.run("document.querySelector('#filter').focus()")
    page.call("Input.insertText", text="planner LAPTOP")
    page.wait("document.querySelector('#count').textContent.includes(' of ')")
    assert {(row[1], row[3]) for row in rows(page)} == {("planner", "laptop")}
    page.run("document.querySelector('#filter').value = '';"
             "document.querySelector('#filter').dispatchEvent(new Event('input')); 0")
    assert len(rows(page)) == everything


def test_a_machine_that_goes_and_comes_is_known_in_three_seconds(page, scene):
    gpu = "document.querySelectorAll('.card')[2].innerText"
    scene.nodes["gpu"].fall_asleep()
    began = time.monotonic()
    page.wait(f"{gpu}.includes('○ refused')", 5)
    assert time.monotonic() - began < 3
    scene.ask("a4", "claude-opus-local")  # and its work goes elsewhere
    page.wait("[...document.querySelectorAll('#rows tr')].some((row) =>"
              "row.innerText.includes('gpu refused'))")
    assert page.run("document.querySelectorAll('.track .mark').length") >= 1
    scene.nodes["gpu"].wake()
    began = time.monotonic()
    page.wait(f"!{gpu}.includes('refused') || {gpu}.includes('◐')", 5)
    assert time.monotonic() - began < 3


def test_everything_is_reached_by_keyboard(page):
    page.run("document.activeElement.blur()")
    stops = []
    for _ in range(12):
        page.press("Tab", 9)
        stops.append(page.run("document.activeElement.id || document.activeElement.innerText"))
    wanted = ["Fit", "30 min", "scroll", "filter"]
    assert [stop for stop in stops if stop in wanted][:4] == wanted, stops
    page.run("document.querySelector('#scroll').focus()")
    page.press("ArrowRight", 39)
    latest = page.run("document.activeElement.getAttribute('aria-label')")
    page.press("ArrowLeft", 37)
    assert page.run("document.activeElement.getAttribute('aria-label')") != latest
    page.wait("document.querySelector('#told').textContent === "
              "document.activeElement.getAttribute('aria-label')")
    page.press("ArrowUp", 38)
    page.run("document.activeElement.blur()")


def test_it_comes_back_after_the_gateway(page, scene):
    before = len(rows(page))
    scene.restart_serve()
    page.wait("document.querySelector('#live').innerText === 'live'")
    page.wait("/idle|working/.test(document.querySelector('#gateway').innerText)")
    scene.ask("a1", "claude-haiku-local")
    page.wait(f"document.querySelectorAll('#rows tr').length === {min(before + 1, 200)}")


def test_it_looks_well_and_leaves_nobody_out(page, scene):
    """Pictures of both themes, wide and narrow, while there is work; axe-core finds nothing."""
    scene.talk()
    try:
        page.wait("document.querySelectorAll('#routes .works').length >= 3")
        for theme in THEMES:
            for width in WIDTHS:
                page.look(width=width, theme=theme)
                page.wait("document.documentElement.scrollWidth <= innerWidth")
                time.sleep(0.6)
                page.shot(PICTURES / f"dashboard-{theme}-{width}.png")
                assert axe_violations(page) == [], (theme, width)
        for width in (320, 3840):
            page.look(width=width)
            page.wait("document.documentElement.scrollWidth <= innerWidth")
            time.sleep(1.5)
            page.shot(PICTURES / f"dashboard-light-{width}.png")

        page.look(width=1440)
        moves = "getComputedStyle(document.querySelector('#routes .works')).animationName"
        page.wait("document.querySelector('#routes .works')")
        assert page.wait(moves) == "flow"
        page.look(width=1440, motion="reduce")
        page.wait(f"document.querySelector('#routes .works') && {moves} === 'none'")
        page.look(width=1440)
    finally:
        scene.hush()


def test_it_said_nothing_wrong_and_asked_nobody_else(page, scene):
    assert page.complaints() == []
    origin = page.run("location.origin")
    assert {url.split("?")[0] for url in page.asked_for()} == {f"{origin}/", f"{origin}/events"}
    code = scene.url.partition("=")[2]
    for log in scene.place.glob("*.log"):
        text = log.read_text(errors="replace")
        assert log.name == "ui.log" or code not in text, log
    assert code not in scene.ui.talk.read_text(errors="replace")


HOSTILE = {"markup": "<img src=x onerror=alert(1)><script>alert(2)</script>", "long": "n" * 10_000,
           "rtl": "\u202eevil \u05e9\u05dc\u05d5\u05dd", "escape": "\x1b[2J\x1b]0;x\x07", "json": '"]}{[',
           "proto": "__proto__", "blank": " ", "newline": "two\nlines", "emoji": "\U0001f600" * 50}


def hostile_picture(name):
    """A picture in which every text is somebody else's."""
    machine = {"name": name, "endpoint": name, "colour": 0, "server": name, "online": False,
               "why": name, "fix": name, "latency_seconds": None, "memory": None,
               "loaded": [{"name": name, "bytes": 1, "context": 1, "gpu": None, "unloads": name}]}
    model = {"name": name, "node": name, "model": name, "alias": name, "context": 1, "slots": 1,
             "fallback": [name], "state": name, "instead": None, "warm": 2, "kept": 1}
    note = {"level": "warn", "what": name, "fix": name}
    task = {"name": name, "state": name, "mark": name, "level": "work", "agent": name,
            "where": name, "session": name, "now": name, "seconds": 1.0, "diff": name,
            "over": False, "fix": name, "answers": name}
    return {"fleet": name, "level": "bad", "sentence": name, "hint": name, "needs": [note],
            "gateway": {"url": name, "says": name, "provider": "litellm", "followed": False},
            "machines": [machine], "models": [model], "agents": [{"name": name, "route": name}],
            "findings": [note],
            "warmup": [{"route": name, "model": name, "node": name, "state": name, "stage": "loading",
                        "detail": name, "seconds": 1, "size_bytes": 0, "pulled_bytes": 0}],
            "tasks": [task, {**task, "name": f"{name}2", "over": True}],
            "names": [{"session": name, "agent_id": name, "agent": name}],
            "sessions": [{"session": name, "title": name}],
            "log": [{"level": "error", "line": name}]}


@pytest.fixture
def board():
    """A dashboard in this process, shown what a test wants."""
    world = sf.World()
    listener = world.listen("127.0.0.1", 0)
    made = sf.Dashboard(world, "127.0.0.1", listener.port)
    thread = threading.Thread(target=made.run, args=(listener,), daemon=True)
    thread.start()
    yield made
    made.stop("test")
    made.stop("test")
    thread.join(15)


def test_hostile_names_are_text_and_break_nothing(browser, board):
    opened = browser.open(board.invite(), context=browser.context(), width=360)
    for kind, name in HOSTILE.items():
        board.show(hostile_picture(name))
        ident = f"req_{kind}"
        board.log.put({"kind": "rest", "id": f"rest {name}", "node": name, "route": name,
                       "time": time.time(), "seconds": 2.0, "why": name})
        board.log.put(sf.plan_row(sf.Receipt(
            time.time(), ident, name, name, name, name, name, 1, (sf.FailedTry(name, name),), 0.1, 0.2,
            0.5, 1, 2, name)))
        shown = f"document.querySelector('.card h3')?.textContent === {json.dumps(name)}"
        opened.wait(shown)
        opened.wait(f"document.querySelector('#fleet').textContent === {json.dumps(name)}")
        opened.wait("[...document.querySelectorAll('#rows td')].some((cell) =>"
                    f"cell.textContent.includes({json.dumps(name)}))")
        assert opened.run("document.documentElement.scrollWidth <= innerWidth"), kind
    assert opened.run("document.querySelectorAll('img, #machines script, iframe').length") == 0
    assert opened.complaints() == []
    opened.shot(PICTURES / "dashboard-hostile.png")


def test_routes_stay_small_and_in_sight_beside_a_long_time_line(browser, board):
    opened = browser.open(board.invite(), context=browser.context())
    plain = hostile_picture("gpu")
    names = ("planner", "implementer", "reviewer")
    board.show({**plain, "agents": [{"name": name, "route": "gpu"} for name in names],
                "models": [{**plain["models"][0], "model": "qwen3-coder:30b"}],
                "tasks": [{**plain["tasks"][0], "agent": "implementer", "diff": "+31 −4",
                           "now": "Bash python3 -m pytest -q tests/test_parser.py"}]})
    for number in range(40):
        board.log.put(sf.plan_row(sf.Receipt(
            time.time(), f"req_{number}", f"s{number}", "", "gpu", "gpu", "gpu", 1, (), 0.1, 0.2,
            0.5, 1, 2, "ok")))
    opened.wait("document.querySelectorAll('.lane').length === 40")
    card = "document.querySelector('#routes').parentElement.getBoundingClientRect()"
    assert opened.run(f"{card}.height") <= 400
    opened.run("document.querySelectorAll('.lane')[20].scrollIntoView(); 0")
    opened.wait(f"{card}.top >= 0 && {card}.bottom <= innerHeight")

    opened.look(width=360)  # no name is broken
    opened.wait("Math.max(...[...document.querySelectorAll('#routes li')]"
                ".map((each) => each.offsetHeight)) < 32")
    opened.look(width=768)  # what a task does has room
    opened.wait("document.querySelector('#tasks td.whole').offsetWidth >= 224")
    opened.close()


def test_a_request_that_nobody_took_has_a_mark_and_only_what_is_typed_can_be_copied(browser, board):
    opened = browser.open(board.invite(), context=browser.context())
    shown = hostile_picture("n")
    board.show({**shown, "needs": [{"level": "bad", "what": "no", "fix": "`port: 4001` or `git status`"}]})
    board.log.put(sf.plan_row(sf.Receipt(
        time.time(), "req_1", "s", "", "x", None, None, None, (), 0.0, None, 0.01, 0, 0, "overloaded_error")))
    opened.wait("document.querySelectorAll('.track .mark').length === 1")
    assert opened.run("document.querySelector('#needs p').textContent").endswith("port: 4001 or git status")
    assert opened.run("[...document.querySelectorAll('#needs .copy')].map((each) => each.textContent)") == ["git status"]


def eight_hours(put):
    """Publish what five agents do in eight hours: 14,000 requests, some of which move on."""
    receipt = sf.Receipt(0.0, "", "s", "", "claude-sonnet-local", "coder", "mini", 65536, (), 0.1, 1.0,
                         9.0, 8000, 400, "ok")
    now = time.time()
    for number in range(14_000):
        at = now - 8 * 3600 + number * 2.05
        ident, agent = f"req_{number}", f"agent-{number // 40}-{number % 5}"
        tries = (sf.FailedTry("mini", "refused"),) if number % 50 == 0 else ()
        row = sf.plan_row(sf.replace(receipt, time=at, id=ident, agent_id=agent, failures=tries))
        for tokens in range(4):
            put({name: value for name, value in {**row, "output_tokens": 50 * tokens}.items()
                 if name != "receipt"})
        if tries:
            for seconds in (2.0, 0.0):
                put({"kind": "rest", "id": "rest mini ", "node": "mini", "route": "", "time": at,
                     "seconds": seconds, "why": "refused"})
        put(row)
        if number % 20 == 0:
            time.sleep(0.02)


def test_eight_hours_leave_the_page_and_ui_small(browser, tmp_path):
    """Through everything: the gateway's hub, `/events`, `ui`, the page."""
    scene = Scene.__new__(Scene)
    scene.place, scene.home, scene.port = tmp_path, tmp_path, free_port()
    rows = "\n".join(f"  {name}: {{endpoint: 'http://127.0.0.1:1'}}" for name in MACHINES)
    (tmp_path / "fleet.yaml").write_text(FLEET.format(port=scene.port, nodes=rows))
    world = sf.World()
    server = sf.Server(sf.load_fleet(str(tmp_path / "fleet.yaml")), KEY, world)
    listener = world.listen("127.0.0.1", scene.port)
    thread = threading.Thread(target=server.run, args=(listener,), daemon=True)
    thread.start()
    ui = scene.start("ui", "--port", "0", "--no-open")
    try:
        url = rig.wait_until(lambda: re.search(r"http://\S+", ui.text()), what="its address")[0]
        opened = browser.open(url, context=browser.context())
        opened.wait("/idle|working/.test(document.querySelector('#gateway').textContent)")
        eight_hours(server.log.put)
        opened.run("document.querySelector('#more').click(); 0")
        opened.wait("document.querySelectorAll('#rows tr').length === 200", 60)
        time.sleep(1)
        page_mb, ui_mb = opened.memory_mb(), memory_mb(ui)
        print(f"after eight hours: page {page_mb:.1f} MB, ui {ui_mb:.1f} MB")
        assert opened.complaints() == []
        assert page_mb < 80 and ui_mb < 40
    finally:
        ui.send(signal.SIGTERM)
        server.stop("test")
        server.stop("test")
        thread.join(15)
        ui.stop()


def test_who_asks_picture_for_help_gets_no_picture():
    program = ROOT / "tests/live/picture.py"
    done = subprocess.run([sys.executable, str(program), "--help"], capture_output=True, timeout=20)
    assert done.returncode == 0 and done.stdout.startswith(b"usage: picture.py"), done.stderr
