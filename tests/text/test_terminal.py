"""What a person reads on a terminal: safe, aligned, and never wider than the terminal."""
import itertools
import os
import random
import re
import subprocess
import sys
import types
import unicodedata

import pytest

import subagent_fleet as sf
from subagent_fleet import replace
from tools import clean_environment, install

KEY = "sk-" + "0123456789abcdef" * 4


def fleet_of(variable="A_MASTER_KEY"):
    """A fleet of one node, one model, one agent."""
    text = f"""
project: {{name: p, gateway: {{master_key_env: {variable}}}}}
nodes: {{n: {{endpoint: "http://h:1"}}}}
models: {{m: {{node: n, ollama_model: "x:3b", litellm_alias: al}}}}
agents: {{ag: {{model: m, description: d}}}}
"""
    fleet, findings = sf.check_fleet(sf.Document(text, "fleet.yaml"))
    assert findings == []
    return fleet


def test_a_diff_shows_no_secret():
    fleet = fleet_of("MY_MASTER_KEY")
    mine = "export OPENAI_API_KEY=abc\nexport MY_MASTER_KEY='def'\nPASSWORD=ghi\nX=sk-jkl\nline\n"
    change = sf.Change(".env.subagent-fleet", mine.encode(),
                       sf.render_environment(fleet, KEY).encode(), False)
    text = sf.format_diff([change], fleet)
    assert not re.search("abc|def'|ghi|jkl|0123456789", text) and "-line\n" in text
    words = b"# the key: a token, or a secret word\n# the last password is in the key file\n"
    shown = sf.format_diff([replace(change, found=words)], fleet)
    assert "".join(f"-{line}\n" for line in words.decode().splitlines()) in shown
    for line in ("my_token=a:b", 'export "DB_PASSWD=a:b"', ': "${MY_MASTER_KEY:=a:b}"',
                 'set -gx HF_TOKEN a:b', "echo ${MY_MASTER_KEY:-a:b}", "A_SECRET= a:b sk-c:b"):
        shown = sf.format_diff([replace(change, found=line.encode())], fleet)
        assert "(hidden)" in shown and ":b" not in shown, line
    window = replace(change, found=change.wanted.replace(b"_TOKENS=", b"_TOKENS=1"))
    assert "-export CLAUDE_CODE_MAX_CONTEXT_TOKENS=1" in sf.format_diff([window], fleet)
    other = replace(change, found=change.wanted.replace(b"sk-0", b"sk-1"))
    assert "only hidden values differ" in sf.format_diff([other], fleet)
    assert sf.format_diff([replace(change, found=change.wanted)], fleet) == ""


def test_a_diff_cannot_steer_the_terminal():
    change = sf.Change(".claude/agents/a.md", b"\x1b[31m\xff\xe2\x80\xae", b"new\n", False)
    assert set(re.findall("[^\n -~\t]", sf.format_diff([change], fleet_of()))) == set()


def test_what_was_served_is_the_difference_of_two_looks():
    one = totals(5, 100, 20, 1.25, 0)
    two = totals(9, 300, 25, 3.0, 1)

    def rows(before, after):
        return [line.split() for line in sf.format_served(before, after).splitlines()[3:]]
    assert rows({"n": one}, {"n": two, "m": one}) == [
        ["n", "4", "200", "5", "1.8", "s", "1"], ["m", "5", "100", "20", "1.2", "s", "0"]]
    # one that took over began at 0
    assert rows({"n": two}, {"n": one}) == [["n", "5", "100", "20", "1.2", "s", "0"]]
    assert sf.format_served({"n": one}, {"n": one}) == "\nNo request was served.\n"
    assert "does not say" in sf.format_served({"n": one}, {})


def totals(*values):
    return dict(zip(sf.TOTALS, values))


# -- how it may look --

TERMINAL = {"TERM": "xterm-256color"}


@pytest.mark.parametrize("environ, is_terminal, encoding, wanted", [
    # a terminal, a pipe
    (TERMINAL, True, "utf-8", (True, True, 80)),
    (TERMINAL, False, "utf-8", (False, False, 0)),
    ({}, True, "utf-8", (True, True, 80)),
    # what its reader asked for; an empty variable asks for nothing
    ({**TERMINAL, "NO_COLOR": "1"}, True, "utf-8", (False, True, 80)),
    ({**TERMINAL, "NO_COLOR": ""}, True, "utf-8", (True, True, 80)),
    ({**TERMINAL, "FORCE_COLOR": "1"}, False, "utf-8", (True, False, 0)),
    ({**TERMINAL, "FORCE_COLOR": ""}, False, "utf-8", (False, False, 0)),
    ({**TERMINAL, "FORCE_COLOR": "1", "NO_COLOR": "1"}, True, "utf-8", (False, True, 80)),
    ({**TERMINAL, "FORCE_COLOR": "1", "NO_COLOR": "1"}, False, "utf-8", (False, False, 0)),
    # what the terminal can do
    ({"TERM": "dumb"}, True, "utf-8", (False, False, 80)),
    ({"TERM": "dumb", "FORCE_COLOR": "1"}, True, "utf-8", (True, False, 80)),
    (TERMINAL, True, "ascii", (True, False, 80)),
    (TERMINAL, True, "cp1252", (True, False, 80)),
    (TERMINAL, True, "cp437", (True, False, 80)),
    (TERMINAL, True, "", (True, False, 80)),
    (TERMINAL, True, "no-such-encoding", (True, False, 80)),
])
def test_look_is_planned_from_the_stream_and_its_reader(environ, is_terminal, encoding, wanted):
    look = sf.plan_look(environ, is_terminal, encoding=encoding, columns=80)
    assert (look.colour, look.marks, look.columns) == wanted


def test_look_of_a_tiny_terminal_has_room_for_words():
    assert sf.plan_look({}, True, encoding="utf-8", columns=3).columns == 20
    assert sf.plan_look({}, True, encoding="utf-8", columns=0).columns == 20


def test_paint_and_marks_only_where_they_are_seen():
    colour, marks = sf.Look(colour=True), sf.Look(marks=True)
    assert [sf.paint("x", role, colour) for role in ("ok", "warn", "bad", "dim", "bold", "")] == [
        "\x1b[32mx\x1b[0m", "\x1b[33mx\x1b[0m", "\x1b[31mx\x1b[0m", "\x1b[2mx\x1b[0m",
        "\x1b[1mx\x1b[0m", "x"]
    assert sf.paint("", "ok", colour) == "" and sf.paint("x", "ok", sf.PLAIN) == "x"
    assert [sf.mark("so", role, marks).text for role in ("ok", "warn", "bad", "dim")] == [
        "\u2713 so", "! so", "\u2717 so", "so"]
    assert sf.mark("so", "ok", sf.PLAIN) == sf.Cell("so", "ok")


def test_machines_have_their_colours_in_the_order_of_the_file():
    nodes = [f"n{number}" for number in range(7)]
    assert list(sf.plan_machine_colours(nodes).values()) == [0, 1, 2, 3, 4, 0, 1]
    painted = {sf.paint("x", f"machine {index}", sf.Look(colour=True)) for index in range(5)}
    assert len(painted) == 5 and sf.paint("x", "machine 1", sf.PLAIN) == "x"
    assert len({page for page, _ in sf.MACHINE_COLOURS}) == 5


@pytest.mark.parametrize("text, width", [
    ("", 0), ("abc", 3), ("\u00e9", 1), ("e\u0301", 1), ("\u65e5\u672c", 4), ("\uff21", 2),
    ("\U0001f642", 2), ("a\u200bb", 2), ("\u26a0\ufe0f", 2), ("a\xadb", 3)])
def test_width_is_what_a_terminal_shows(text, width):
    assert sf.width_of(text) == width


@pytest.mark.parametrize("text, width, wanted", [
    ("abc", 3, "abc"), ("abcd", 3, "ab\u2026"), ("\u65e5\u672c", 3, "\u65e5\u2026"), ("", 1, "")])
def test_crop_fits_and_says_that_something_is_missing(text, width, wanted):
    assert sf.crop(text, width) == wanted


# -- wrapping --

@pytest.mark.parametrize("text, columns, wanted", [
    ("one two three", 0, "one two three"),
    ("one two three", 13, "one two three"),
    ("one two three", 8, "one two\nthree"),
    ("  one two three", 10, "  one two three"),  # what is indented is to be typed
    ("one\ntwo\n", 3, "one\ntwo\n"),
    ("abcdefghij", 4, "abcd\nefgh\nij"),
    ("a\x1b[31mb", 0, "a\\x1b[31mb"),
    ("\u65e5\u672c\u8a9e", 4, "\u65e5\u672c\n\u8a9e"),
    # a command is to be copied in one piece: on a line of its own, whatever its length
    ("Do this: `git rm a b c`", 12, "Do this:\n`git rm a b c`"),
    ("Do this: `git rm --cached abc`", 12, "Do this:\n`git rm --cached abc`"),
    ("Then `ollama pull x:3b`, once more", 20, "Then\n`ollama pull x:3b`,\nonce more"),
    ("  subagent-fleet serve --config x", 20, "  subagent-fleet serve --config x"),
    ("subagent-fleet 1.0.0 is a program", 20, "subagent-fleet 1.0.0\nis a program"),
    ("a `word or two` in backticks", 10, "a\n`word or two`\nin\nbackticks"),
])
def test_text_wraps_between_words_and_keeps_commands_whole(text, columns, wanted):
    assert sf.wrap_text(text, sf.Look(columns=columns)) == wanted


def test_a_number_keeps_its_unit():
    assert sf.wrap_text("no answer within 5 s, 100 % sure", sf.Look(columns=18)) == "no answer within\n5 s, 100 % sure"
    assert sf.wrap_text("they took 5 servers away", sf.Look(columns=12)) == "they took 5\nservers away"


def test_a_character_that_is_wider_than_the_line_ends_the_wrapping():
    assert sf.wrap_text("\u65e5\u672c", sf.Look(columns=1)) == "\u65e5\n\u672c"


def test_neighbours_of_one_role_are_painted_together():
    parts = [sf.Cell("one two", "ok"), sf.Cell("three", "ok"), sf.Cell("four")]
    assert sf.format_words(parts, sf.Look(True, columns=14), margin=" ", indent=" ") == (
        " \x1b[32mone two three\x1b[0m\n  four\n")


def test_wrapped_lines_stand_below_each_other():
    assert sf.wrap_text("one two three", sf.Look(columns=9), indent="  ") == "one two\n  three"


def test_wrapping_takes_linear_time():
    for text in ("a" * 100_000, "\u00e9" * 100_000, "\u65e5" * 100_000, "a " * 50_000, "`" * 100_000,
                 "`git " * 20_000, ": git " * 20_000, "a`" * 50_000):
        assert sf.wrap_text(text, sf.Look(columns=60))


# -- findings --

FINDING = sf.Finding("slug", "warning", "the key in ./.env is in git", "fleet.yaml:12:5",
                     "   12 |     endpont: http://studio.local:11434\n      |     ^^^^^^^",
                     "git rm --cached ./.env; rm ./.env; subagent-fleet generate")


def test_a_finding_in_a_pipe_is_plain():
    assert sf.format_finding(FINDING) == (
        "warning: fleet.yaml:12:5: the key in ./.env is in git\n"
        "   12 |     endpont: http://studio.local:11434\n"
        "      |     ^^^^^^^\n"
        "  fix: git rm --cached ./.env; rm ./.env; subagent-fleet generate\n")


def test_a_finding_on_a_narrow_terminal_keeps_its_command_and_its_caret():
    assert sf.format_finding(FINDING, look=sf.Look(columns=30)) == (
        "warning: fleet.yaml:12:5: the\n"
        "  key in ./.env is in git\n"
        "   12 |     endpont: http://s\u2026\n"
        "      |     ^^^^^^^\n"
        "  fix:\n"
        "    git rm --cached ./.env; rm ./.env; subagent-fleet generate\n")
    _, excerpt = sf.Document("x" * 50 + "endpont: y" + "z" * 99, "f").show(50, 57)
    far = replace(FINDING, excerpt=excerpt)
    shown = sf.format_finding(far, look=sf.Look(columns=72)).splitlines()
    line, caret = (row for row in shown if row[5:8] == " | ")
    assert line[caret.index("^"):][:7] == "endpont" and line.startswith("    1 | \u2026xx")
    assert all(len(row) <= 100 for row in excerpt.splitlines())


def test_a_finding_has_its_level_in_colour_and_its_place_dim():
    assert sf.format_finding(FINDING, look=sf.Look(colour=True)).splitlines()[::3] == [
        "\x1b[33mwarning:\x1b[0m \x1b[2mfleet.yaml:12:5:\x1b[0m the key in ./.env is in git",
        "  \x1b[1mfix: git rm --cached ./.env; rm ./.env; subagent-fleet generate\x1b[0m"]


def test_a_finding_in_a_list_is_indented_and_names_no_level():
    assert sf.format_finding(replace(FINDING, excerpt="", fix=""), indent="  ") == (
        "  the key in ./.env is in git\n    at fleet.yaml:12:5\n")


TOPIC = [sf.Finding("a", "ok", "first"), sf.Finding("b", "ok", "second"),
         sf.Finding("c", "error", "third", fix="fix it"), sf.Finding("d", "info", "fourth")]


def test_a_topic_in_a_pipe_is_what_a_terminal_shows():
    assert sf.format_topic("Nodes", TOPIC, sf.PLAIN) == (
        "Nodes: 1 error, 1 note, 2 ok\nerror: third\n  fix: fix it\ninfo: fourth\n")


def test_a_topic_on_a_terminal_counts_what_is_right():
    look = sf.Look(marks=True, columns=60)
    assert sf.format_topic("Nodes", TOPIC, look) == (
        "\u2717 Nodes: 1 error, 1 note, 2 ok\nerror: third\n  \u2192 fix it\ninfo: fourth\n")
    assert sf.format_topic("Nodes", TOPIC[:2], look) == "\u2713 Nodes: 2 ok\n"
    assert sf.format_topic("Nodes", TOPIC[:2], look, verbose=True) == (
        "\u2713 Nodes: 2 ok\nok: first\nok: second\n")
    warnings = [replace(TOPIC[0], level="warning")] * 2
    assert sf.format_topic("Nodes", warnings, look).startswith("! Nodes: 2 warnings\n")
    both = [TOPIC[2], *warnings]
    assert sf.format_topic("Nodes", both, look).startswith("\u2717 Nodes: 1 error, 2 warnings\n")


# -- tables --

HEADERS, ROWS = ("Name", "Size", "Models"), [("mini", "1,024", "a:1b, b:2b, c:3b"), ("m5", "7", "-")]


def test_a_table_in_a_pipe_is_never_wrapped():
    assert sf.format_table(HEADERS, ROWS, right=("Size",)) == (
        "Name   Size  Models\n"
        "mini  1,024  a:1b, b:2b, c:3b\n"
        "m5        7  -\n")
    assert sf.format_table(HEADERS, []) == "Name  Size  Models\n"


def test_a_table_on_a_terminal_is_the_same_where_it_fits():
    wide = sf.format_table(HEADERS, ROWS, look=sf.Look(columns=72), right=("Size",))
    assert wide == sf.format_table(HEADERS, ROWS, right=("Size",))


def test_a_table_wraps_the_columns_that_can():
    rows = [("a name of words", "x", "some longer text that has to wrap")]
    assert sf.format_table(HEADERS, rows, look=sf.Look(columns=45)) == (
        "Name             Size  Models\n"
        "a name of words  x     some longer text that\n"
        "                       has to wrap\n")
    assert sf.format_table(HEADERS, rows, look=sf.Look(columns=28)) == (
        "Name        Size  Models\n"
        "a name of   x     some\n"
        "words             longer\n"
        "                  text that\n"
        "                  has to\n"
        "                  wrap\n")


def test_a_table_leaves_out_its_spares_before_it_cuts_a_word():
    rows = [("a-name-that-is-long", "1", "some text that has to wrap"), ("b", "3", "-")]
    assert sf.format_table(HEADERS, rows, look=sf.Look(columns=44), spare=("Size",)) == (
        "Name                 Models\n"
        "a-name-that-is-long  some text that has to\n"
        "                     wrap\n"
        "b                    -\n")
    assert sf.format_table(HEADERS, rows, look=sf.Look(columns=24)).splitlines()[1:3] == [
        "a-name-tha  1     some", "t-is-long         text"]


def test_a_table_measures_what_is_seen():
    look = sf.Look(colour=True, marks=True, columns=60)
    rows = [("\u65e5\u672c", sf.mark("up", "ok", look), "x"), ("m5", "-", "y")]
    assert sf.format_table(HEADERS, rows, look=look) == (
        "\x1b[1mName\x1b[0m  \x1b[1mSize\x1b[0m  \x1b[1mModels\x1b[0m\n"
        "\u65e5\u672c  \x1b[32m\u2713 up\x1b[0m  x\n"
        "m5    -     y\n")


def test_pairs_wrap_at_the_right_or_stand_below():
    rows = [("--flag", "what it is for, in words"), ("-v", "more")]
    assert sf.format_pairs(rows) == "  --flag  what it is for, in words\n  -v      more\n"
    assert sf.format_pairs(rows, sf.Look(columns=30)) == (
        "  --flag  what it is for, in\n          words\n  -v      more\n")
    assert sf.format_pairs(rows, sf.Look(columns=24)) == (
        "  --flag  what it is\n          for, in words\n  -v      more\n")


# -- status --

FLEET = """
project: {name: local-dev}
nodes:
  laptop: {endpoint: "http://localhost:11434"}
  mini: {endpoint: "http://192.168.1.50:11434"}
  gpu: {endpoint: "http://192.168.1.51:11434"}
models:
  small: {node: laptop, ollama_model: "qwen3:8b", litellm_alias: haiku-local, context: 32768}
  heavy: {node: mini, ollama_model: "qwen3-coder:30b", litellm_alias: sonnet-local}
  other: {node: gpu, ollama_model: "devstral:24b", litellm_alias: opus-local, fallback: [heavy]}
agents:
  planner: {model: small, description: d}
  implementer: {model: heavy, description: d}
  reviewer: {model: other, description: d}
"""
NOW = 1795003200.0  # 2026-11-18T12:00:00Z


def page_of(**names):
    """What is seen of three machines: one ready, one cold, one offline."""
    text = FLEET
    for name, other in names.items():
        text = text.replace(name, other)
    fleet, findings = sf.check_fleet(sf.Document(text, "fleet.yaml"))
    assert findings == []
    small, heavy, _ = fleet.models.values()
    loaded = (sf.LoadedModel(small.ollama_model, 32768, 100, 1, "2318-01-01T00:00:00Z"),
              sf.LoadedModel("nomic:1b", 0, None, 1, "2026-11-18T12:04:00Z"))
    laptop, mini, gpu = fleet.nodes
    states = {
        laptop: sf.NodeState(laptop, "http://localhost:11434", version="0.32.15", latency_seconds=0.0031,
                             models=(sf.NodeModel(small.ollama_model, 5 * 10**9, "8B", "Q4"),),
                             loaded=loaded),
        mini: sf.NodeState(mini, "http://192.168.1.50:11434", version="0.32.15", latency_seconds=0.002,
                           models=(sf.NodeModel(heavy.ollama_model, 18 * 10**9),)),
        gpu: sf.NodeState(gpu, "http://192.168.1.51:11434", "refused", "nothing listens there")}
    return sf.plan_sight(fleet, states, sf.GatewayView(""), NOW)


def served(page, *models, waiting=0):
    """The same with a gateway, which says this of its models."""
    said = sf.FleetPage(page.fleet.name, models=tuple(sf.ModelSlots(*each) for each in models), waiting=waiting)
    return replace(page, gateway=sf.check_gateway(page.fleet, sf.OUR_GATEWAY), said=said)


def test_status_is_what_the_specification_shows():
    wanted = """\
Fleet: local-dev

Node    Status   Endpoint                   Models
-----------------------------------------------------------
laptop  online   http://localhost:11434     qwen3:8b
mini    online   http://192.168.1.50:11434  qwen3-coder:30b
gpu     offline  http://192.168.1.51:11434  (refused)

gpu (http://192.168.1.51:11434): refused: nothing listens there

Machine  Loaded    Context  On GPU  Unloads
laptop   qwen3:8b   32,768   100 %  never
laptop   nomic:1b        -       -  4 min

Agent routing:
planner -> laptop -> qwen3:8b -> haiku-local: ready
implementer -> mini -> qwen3-coder:30b -> sonnet-local: cold
reviewer -> gpu -> devstral:24b -> opus-local: node offline \u2192 fallback qwen3-coder:30b on mini

local-dev: 1 of 3 models ready. No gateway runs at http://127.0.0.1:4000. Next: `subagent-fleet warmup`
"""
    assert sf.format_status(page_of()) == wanted
    assert sf.format_status(page_of(), sf.Look(columns=100)).replace("Next:\n  `", "Next: `") == wanted
    marked = sf.format_status(page_of(), sf.Look(marks=True, columns=80))
    assert re.sub("[\u2713!\u2717] ", "", marked).split() == wanted.replace(
        "-----------", "-------------", 1).split()


def test_status_with_a_gateway_counts_its_slots():
    page = served(page_of(), ("small", 1, 2), ("heavy", 0, 1, 4.0), ("other", 0, 1), waiting=2)
    text = sf.format_status(page, sf.Look(columns=100))
    assert "\nlocal-dev: 1 of 3 models ready. Gateway at http://127.0.0.1:4000: 1 working, 2 waiting." in text
    assert re.search(r"Slots +Unloads$", text, re.M) and re.search(r" 100 %  1 / 2  never$", text, re.M)
    assert re.search(r"^mini +skipped ", text, re.M)
    assert "haiku-local: ready, 1 working\n" in text


def test_status_marks_by_what_is_left_of_a_route():
    page, look = page_of(), sf.Look(marks=True, columns=100)
    for route, shown in [
            (sf.RouteState("ready"), "\u2713 ready"), (sf.RouteState("cold"), "! cold"),
            (sf.RouteState("model missing"), "\u2717 model missing"),
            (sf.RouteState("node offline"), "\u2717 node offline"),
            (sf.RouteState("node offline", fallback="small"), "! node offline \u2192 fallback qwen3:8b on laptop")]:
        text = sf.format_status(replace(page, routes={**page.routes, "heavy": route}), look)
        assert re.search(f"^implementer -> .*: {re.escape(shown)}$", text, re.M), shown


def test_slots_are_those_of_the_model_on_that_machine():
    page = page_of(**{'"qwen3-coder:30b"': '"qwen3:8b"'})
    text = sf.format_status(served(page, ("small", 1, 2), ("heavy", 3, 4)), sf.Look(columns=100))
    assert re.search("^laptop .* 1 / 2 ", text, re.M) and "3 / 4" not in text


def test_status_of_a_ready_fleet_says_so_and_no_more():
    page = page_of()
    ready = {name: sf.RouteState("ready") for name in page.routes}
    text = sf.format_status(replace(served(page), routes=ready, step=sf.NextStep(ready="x")), sf.Look(columns=80))
    assert text.endswith("\n\nlocal-dev: ready. Gateway at http://127.0.0.1:4000: idle.\n")


def test_status_of_a_fleet_without_its_gateway_says_so_once():
    page = page_of()
    ready = {name: sf.RouteState("ready") for name in page.routes}
    text = sf.format_status(replace(page, routes=ready,
                                    step=sf.NextStep(what="no gateway runs: `subagent-fleet up`.")),
                            sf.Look(colour=True, columns=80))
    assert text.endswith("\n\n\x1b[1mlocal-dev:\x1b[0m \x1b[33mready,\x1b[0m but no gateway runs: "
                         "`subagent-fleet up`.\n")


# -- what was served, what would change --

def test_what_was_served_is_read_by_people():
    after = {"mini": totals(12, 1234567, 89, 1.5, 0), "m5": totals(1, 2, 3, 0, 0)}
    assert sf.format_served({}, after) == sf.format_served({}, after, sf.Look(columns=80))
    assert sf.format_served({}, after).splitlines()[-2:] == [
        "mini           12  1,234,567          89   1.5 s         0",
        "m5              1          2           3       -         0"]


def test_a_diff_is_painted_and_can_be_applied():
    change = sf.Change("a.md", b"same\n  old y z\n-- rule\n", b"same\nnew\n", True)
    text = sf.format_diff([change], fleet_of(), sf.Look(True, True, 60))
    assert text == ("\x1b[1m--- a.md\tupdated\x1b[0m\n\x1b[1m+++ a.md\tgenerated\x1b[0m\n"
                    "\x1b[2m@@ -1,3 +1,2 @@\x1b[0m\n same\n"
                    "\x1b[31m-  old y z\x1b[0m\n\x1b[31m--- rule\x1b[0m\n\x1b[32m+new\x1b[0m\n")
    wide = replace(change, found=b"x" * 90)
    assert f"\n-{'x' * 90}\n" in sf.format_diff([wide], fleet_of(), sf.Look(columns=60))


# -- every width --

def shown_width(line):
    """The columns of a line on a terminal, escapes not counted."""
    line = re.sub("\x1b\\[[0-9;]*m", "", line)
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in line
               if unicodedata.category(char) not in ("Mn", "Me", "Cf"))


NAMES = ["a", "mini", "x" * 30, "x" * 170, "two words", "w " * 60, "\u65e5\u672c\u8a9e" * 9, "e\u0301" * 40,
         "\x1b[31mred", "a\nb\tc", "\u202edlrow", "\U0001f642" * 20, "a`b`c d", "-" * 90, "./a/b" * 20]


def hostile_outputs(rng, look):
    """Yield (function, text) of everything that is formatted, with names that hurt."""
    def pick():
        return rng.choice(NAMES)

    finding = sf.Finding("s", rng.choice(["error", "warning", "info", "ok"]), pick() + " " + pick(),
                         pick(), f"   12 | {pick()}\n      | {' ' * rng.randrange(90)}^^^")
    yield "finding", sf.format_finding(finding, look=look)
    yield "finding", sf.format_finding(finding, indent="  ", look=look)
    yield "topic", sf.format_topic("Nodes", [finding] * 3, look, verbose=True)
    rows = [[sf.Cell(pick(), rng.choice(["ok", "bad", ""])), pick(), rng.randrange(10**6), pick()]
            for _ in range(3)]
    yield "table", sf.format_table(("Name", "A longer header", "Size", "Last"), rows, look=look,
                                   right=("Size",))
    yield "pairs", sf.format_pairs([(sf.clean_line(pick()), sf.clean_line(pick()))] * 2, look)
    yield "wrap", sf.wrap_text(f"{pick()} {pick()}\n{pick()}", look, indent="  ")
    yield "served", sf.format_served({}, {pick(): totals(10**6, 10**9, 10**9, 1.5, 0) for _ in range(2)}, look)
    models = tuple(sf.NodeModel(pick(), 10**9, pick(), pick(), (pick(),), 10**5, pick()) for _ in "abc")
    states = {name: sf.NodeState(name, "http://h:11434", *more) for name, *more in (
        (pick(), "", "", "0.32.15", 3.1, models, (sf.LoadedModel(pick(), 4096, 50, 1, "?"),)),
        (pick() + "2", pick(), pick()))}
    fleet = page_of().fleet
    yield "nodes", sf.format_nodes(replace(fleet, name=pick()), states,
                                   ("Node", "Status", "Endpoint", "Models"), look)
    yield "details", sf.format_details(states, look)
    yield "presence", sf.format_presence([{"route": pick(), "node": pick(), "model": pick(),
                                           "state": rng.choice(["present", "missing"]), "fix": pick()}] * 2,
                                         look)
    warmth = types.SimpleNamespace(ok=rng.random() < 0.5, detail=pick(), fix="", seconds=3.0,
                                   loaded=sf.LoadedModel("x", 4096, 50, 1, ""), size=10**10,
                                   stage=rng.choice(["pulling", "busy"]), state="failed", wait=pick(),
                                   rivals=(pick(),), pulled=10**9, began=0.0,
                                   model=types.SimpleNamespace(name=pick()))
    yield "warmth", sf.format_warmth(warmth, (pick(), pick()), (9, 9), look)
    page = page_of(**{"qwen3:8b": rng.choice(["m" * 120, "two words", "\u65e5" * 50]),
                      "planner": "p" * rng.randrange(1, 64), "laptop": "l" * rng.randrange(1, 64)})
    yield "status", sf.format_status(replace(served(page, ("small", 1, 2)), step=sf.NextStep(False, pick())), look)
    report = {"ollama": list(states.values())[0], "addresses": [{"address": pick(), "kind": pick(),
              "open": True}] * 2, "findings": [finding], "setup": "", "fleet": {},
              "servers": []}
    yield "worker", sf.format_worker(report, look)
    did = sf.Served(pick(), pick(), rng.choice(["laptop", pick()]), rng.choice([
        "yes", "fallback", "no", "left", "unknown"]), pick(), 1.0, 2, 0.5, 70.0, 12.0, 999999, 7)
    transcript = sf.Transcript(pick())
    transcript.prompt, transcript.torn = pick() + "\n" + pick(), [3]
    agents = [sf.AgentTrace("a" * depth, pick(), "", transcript, (), depth=depth)
              for depth in (0, 1, 2, 1)]
    verdict = sf.Verdict("Model", rng.choice(["yes", "no", "unknown"]), pick(), (pick(), "req_1"))
    traced = sf.SessionReport(
        sf.SessionTrace(pick(), tuple(agents), (pick(),)), sf.TraceFacts(fleet_of(), 0.0),
        tuple(sf.AgentReport(agent, rng.choice(["done", "at work"]), (),
                             (did,) * rng.randrange(3), (verdict,) * 5) for agent in agents))
    yield "trace", sf.format_trace(traced, look)
    yield "audit", sf.format_audit(traced, look)
    yield "sessions", sf.format_sessions([(pick(), pick(), 2, 3, pick())], look)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 100, 160])
@pytest.mark.parametrize("colour", [False, True])
def test_no_line_is_wider_than_the_terminal(columns, colour):
    rng, seen = random.Random(columns), set()
    for _ in range(60):
        for name, text in hostile_outputs(rng, sf.Look(colour, True, columns)):
            seen.add(name)
            for line in text.split("\n"):
                assert shown_width(line) <= columns, (name, line)
            painted = re.sub("\x1b\\[[0-9;]+m", "", text)
            assert "\x1b" not in painted and (colour or painted == text), name
    assert len(seen) == 15


def test_plain_text_has_no_escape_and_no_mark():
    rng = random.Random(7)
    for _ in range(60):
        for name, text in hostile_outputs(rng, sf.PLAIN):
            assert not re.search("[\x1b\u2713\u2717]", text), name


def test_colour_changes_nothing_but_colour():
    one, two = random.Random(3), random.Random(3)
    for _ in range(20):
        pairs = itertools.zip_longest(hostile_outputs(one, sf.Look(True, True, 80)),
                                      hostile_outputs(two, sf.Look(False, True, 80)))
        for (name, painted), (_, text) in pairs:
            assert re.sub("\x1b\\[[0-9;]+m", "", painted) == text, name


# -- the commands, on a real terminal --

def on_terminal(directory, *words, columns, **env):
    """What a command shows on a terminal of so many columns."""
    pty = pytest.importorskip("pty")
    master, slave = pty.openpty()
    command = [sys.executable, "-I", "-S", "-W", "error", str(install(directory)), *words]
    process = subprocess.Popen(command, cwd=str(directory), stdin=slave, stdout=slave, stderr=slave,
                               env=clean_environment(COLUMNS=columns, **env))
    os.close(slave)
    shown = b""
    try:
        while True:
            piece = os.read(master, 65536)
            if not piece:
                break
            shown += piece
    except OSError:  # what Linux says when the last writer has gone
        pass
    os.close(master)
    process.wait(20)
    return shown.decode("utf-8").replace("\r\n", "\n")


COMMANDS = [("validate",), ("generate", "--check"), ("generate",), ("doctor",), ("doctor", "-v"),
            ("discover", "-v"), ("status",), ("worker",), ("help",), ("generate", "--help"),
            ("status", "--nope"), ("clean", "--dry-run"), ("validate", "--strict")]


@pytest.mark.slow
def test_commands_fit_the_terminal(tmp_path):
    columns = 60
    text = FLEET.replace("http://localhost:11434", "http://127.0.0.1:1")
    text = re.sub(r"http://192[0-9.]+:11434", "http://127.0.0.1:1", text)
    (tmp_path / "fleet.yaml").write_text(text, encoding="utf-8")
    for words in COMMANDS:
        shown = on_terminal(tmp_path, *words, columns=columns, TERM="xterm")
        assert shown, words
        for line in shown.split("\n"):
            copied = re.match(r" +(uv tool|docker|-e|-p|litellm --config|Environment)", line)
            assert copied or shown_width(line) <= columns, (words, line)


@pytest.mark.slow
def test_commands_obey_the_reader(tmp_path):
    (tmp_path / "fleet.yaml").write_text(FLEET.replace("node: gpu", "node: gpx"), encoding="utf-8")
    for env, colour in [({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False),
                        ({"TERM": "dumb"}, False), ({"TERM": "dumb", "FORCE_COLOR": "1"}, True)]:
        shown = on_terminal(tmp_path, "validate", columns=80, **env)
        assert ("\x1b[2m" in shown) == colour and "gpx" in shown, env


def test_forced_colour_reaches_a_pipe_but_no_json(run_cli, tmp_path):
    (tmp_path / "fleet.yaml").write_text(FLEET, encoding="utf-8")
    env = {"FORCE_COLOR": "1"}
    painted, plain = run_cli("doctor", env=env), run_cli("doctor")
    assert re.sub("\x1b\\[[0-9]+m", "", painted.stdout) == plain.stdout != painted.stdout
    assert "\x1b" not in run_cli("doctor", "--json", env=env).stdout + plain.stdout
