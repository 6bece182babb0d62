"""Section *Tasks*: the file, what is kept of a task, the next step; no process, no clock, no files."""
import itertools
import json
import pathlib
import random
import time
import types

import pytest

import subagent_fleet as sf
from tools import EXAMPLE

SAMPLES = pathlib.Path(__file__).parents[1] / "cases" / "wire" / "claude-headless"
FLEET = sf.check_fleet(sf.Document(EXAMPLE, "fleet.yaml"))[0]


def read(text, fleet=None):
    return sf.check_tasks(sf.Document(text, "tasks.yaml"), fleet)


def plan_of(text, fleet=None):
    plan, problems = read(text, fleet)
    assert problems == []
    return plan


# -- the file --

@pytest.mark.parametrize("coder, line", [
    ("sh run.sh", "[sh, run.sh]"), ("[sh,-c,true]", '[sh, "-c", "true"]'),
    ("sh -c 'echo hi > x'", """[sh, "-c", "sh -c 'echo hi > x'"]"""), ("“codex”", "codex")])
def test_a_command_as_text_is_shown_as_a_list_that_does_the_same(coder, line):
    _, problems = read(f"tasks: {{a: {{prompt: x, coder: {json.dumps(coder, ensure_ascii=False)}}}}}")
    assert [problem.fix for problem in problems] == [f"write `coder: {line}`"]


def test_defaults_hold_where_a_task_does_not_say_and_only_there():
    plan = plan_of("defaults: {agent: implementer, check: make test, setup: [uv sync],\n"
                   "           deadline: 45m, tries: 3, touch: [src/**]}\n"
                   "tasks:\n"
                   "  parser: {prompt: a}\n"
                   "  docs: {prompt: b, after: [parser], check: make docs, touch: []}\n"
                   "  cheap: {prompt: c, model: claude-haiku-local, deadline: 90}\n"
                   "  look: {prompt: d, check: none}\n")
    parser, docs, cheap = (plan.tasks[name] for name in ("parser", "docs", "cheap"))
    assert not plan.tasks["look"].check  # not the default's either: it ends in review
    assert (parser.check, parser.deadline, parser.tries) == ("make test", 2700, 3)
    assert (docs.check, docs.touch, docs.after) == ("make docs", (), ("parser",))
    assert (cheap.agent, cheap.model, cheap.deadline) == (None, "claude-haiku-local", 90)
    assert parser.rounds == 3 and parser.allow == ("Bash",)
    assert plan.origins["docs"]["check"] == "tasks.yaml:5:45"
    assert plan.origins["parser"]["check"] == "tasks.yaml:1:39"


def test_twins_are_tasks_of_their_own_and_one_name_means_all():
    plan = plan_of("tasks:\n  jwt: {prompt: x, times: 3}\n  last: {prompt: y, after: [jwt]}\n")
    assert list(plan.tasks) == ["jwt-a", "jwt-b", "jwt-c", "last"]
    assert {task.group for task in plan.tasks.values()} == {"jwt", "last"}
    assert sf.expand_names(("jwt",), plan.tasks) == ("jwt-a", "jwt-b", "jwt-c")


FILE_ERRORS = [
    ("", "empty-tasks", ""),
    ("tasks:\n  a: {prompt: x, afer: [b]}\n", "unknown-key", "did you mean `after`?"),
    ("tasks:\n  a: {prompt: x, depends_on: []}\n", "unknown-key", "did you mean `after`?"),
    ("tasks:\n  a: {check: x}\n", "missing-key", "add `prompt:`"),
    ("tasks:\n  a: {prompt: x, check: }\n", "bad-value", "check: make test"),
    ("tasks:\n  a: {prompt: x, prompt_file: y}\n", "two-prompts", "remove one of them"),
    ("tasks:\n  a: {prompt: x, agent: b, model: c}\n", "two-models", "remove one of them"),
    ("tasks:\n  a: {prompt: x, after: [b]}\n  bb: {prompt: x}\n", "unknown-task", "did you mean"),
    ("tasks:\n  a: {prompt: x, base: after}\n", "bad-base", "name a branch"),
    ("tasks:\n  a: {prompt: x, after: [b]}\n  b: {prompt: x, after: [a]}\n", "task-cycle",
     "remove"),
    ("tasks:\n  a: {prompt: x, changes: maybe}\n", "bad-value", "required"),
    ("tasks:\n  a: {prompt: x, deadline: soon}\n", "bad-value", ""),
    ("tasks:\n  a: {prompt: x, touch: [../x]}\n", "bad-value", ""),
    ("tasks:\n  a: {prompt: x, touch: [/etc/x]}\n", "bad-value", ""),
    ("tasks:\n  a: {prompt: x, base: -f}\n", "bad-value", ""),
    ("tasks:\n  a: {prompt: x, coder: []}\n", "bad-value", "coder: claude"),
    ("tasks:\n  a: {prompt: x, coder: codx}\n", "bad-value", "codex"),
    ("tasks:\n  a: {prompt: x, times: 2}\n  a-b: {prompt: y}\n", "two-tasks", "another name"),
    ("tasks:\n  a: {prompt: x, branch: fix/b}\n  c: {prompt: y, branch: Fix/B}\n", "two-branches",
     "another `branch:`"),
    ("tasks:\n  a: {prompt: x, branch: run/B}\n  b: {prompt: y}\n", "two-branches", "another `branch:`"),
    ("tasks:\n  a b: {prompt: x}\n", "bad-name", "write `a-b:`"),
    ("tasks:\n  a: {prompt: x}\n  a: {prompt: y}\n", "yaml-duplicate", ""),
    ("tasks: [a]\n", "not-mapping", ""),
    ("defaults: {prompt: x}\ntasks:\n  a: {prompt: x}\n", "unknown-key", ""),
]


@pytest.mark.parametrize("text, slug, fix", FILE_ERRORS)
def test_what_is_wrong_with_a_task_file_is_said_with_its_place(text, slug, fix):
    try:
        plan, problems = read(text)
    except sf.FleetError as error:
        plan, problems = None, [error.finding]
    assert plan is None
    found = [problem for problem in problems if problem.slug == slug]
    assert found, problems
    assert found[0].where.startswith("tasks.yaml:") and fix in found[0].fix


def test_a_cycle_names_the_lines_of_both():
    _, problems = read("tasks:\n  a: {prompt: x, after: [c]}\n  b: {prompt: x, after: [a]}\n"
                       "  c: {prompt: x, after: [b]}\n")
    assert [problem.slug for problem in problems] == ["task-cycle"]
    for line in ("line 2", "line 3", "line 4"):
        assert line in problems[0].what


def test_agents_and_models_must_be_the_fleets():
    text = "tasks:\n  a: {prompt: x, agent: implementor}\n  b: {prompt: x, model: nobody}\n"
    _, problems = read(text, FLEET)
    assert [problem.slug for problem in problems] == ["unknown-agent", "unknown-model"]
    assert problems[0].fix == "did you mean `implementer`?"
    text = "defaults: {agent: nobody}\ntasks:\n  a: {prompt: x}\n  b: {prompt: x}\n"
    _, problems = read(text, FLEET)
    assert [problem.where for problem in problems] == ["tasks.yaml:1:19"]  # once
    _, problems = read("tasks:\n  a: {prompt: x, agent: whoever, coder: [codex, exec]}\n", FLEET)
    assert [problem.slug for problem in problems] == ["unknown-agent"]


def test_every_wrong_value_of_every_key_is_told_and_never_raises():
    values = [None, 7, -1, 1.5, True, "", "x" * 400, "a\tb", [], ["a"], [1], {}, {"a": 1}]
    count = 0
    for name, value in itertools.product(sf.keys_of(sf.TaskSpec), values):
        text = sf.dump_yaml({"tasks": {"a": {"prompt": "x", name: value}}})
        plan, problems = read(text)
        assert (plan is None) == bool(problems)
        count += plan is None
    assert count > 150


def test_the_alias_of_a_task_is_its_agents_its_models_or_the_main_one():
    def alias(text):
        return sf.plan_alias(plan_of(f"tasks:\n  a: {{prompt: x, {text}}}\n").tasks["a"], FLEET)
    assert alias("agent: planner") == "claude-haiku-local"
    assert alias("model: heavy-coder") == alias("model: claude-sonnet-local")
    assert alias("priority: 1") == FLEET.models[sf.plan_tiers(FLEET)["main"]].alias
    assert alias("coder: [codex]") == "" and alias("coder: codex") == alias("priority: 1")


def test_schema_of_tasks_is_made_of_the_same_records():
    schema = sf.render_tasks_schema()
    task = schema["properties"]["tasks"]["additionalProperties"]["properties"]
    assert set(task) == set(sf.keys_of(sf.TaskSpec)) and task["tries"]["default"] == 2
    assert "prompt" not in schema["properties"]["defaults"]["properties"]


def test_frozen_tasks_come_back_as_they_were():
    plan = plan_of("tasks:\n  a: {prompt: x, after: [b], check: make, deadline: 90, allow: [Read],"
                   " coder: [x, y], times: 2}\n  b: {prompt: \"ü\\n\"}\n")
    for task in plan.tasks.values():
        frozen = json.loads(json.dumps(sf.freeze(task)))
        assert sf.thaw_task(frozen) == task
    for broken in (None, [], {}, {"name": "a b"}, {"name": "a", "tries": "x"},
                   {"name": "a", "nothing": 1}, {"name": "a", "touch": ["../x"]}):
        assert sf.thaw_task(broken) is None


# -- scope --

@pytest.mark.parametrize("globs, inside, outside", [
    (["src/**"], ["src/a.py", "src/b/c.py"], ["a.py", "asrc/b", "src.py", "docs/src/a"]),
    (["src/"], ["src/a.py", "src/b/c.py"], ["a.py"]),
    (["src"], ["src/a.py", "lib/src/x"], ["a.py"]),
    (["src/*.py"], ["src/a.py"], ["src/a.js", "src/b/a.py"]),
    (["*.md"], ["a.md", "docs/b.md"], ["a.mdx", "md"]),
    (["**/x.py"], ["x.py", "a/b/x.py"], ["y.py"]),
    (["a?c"], ["abc"], ["a/c", "ac"]),
    (["[ab].py"], ["a.py", "b.py"], ["c.py"]),
    (["[!ab].py"], ["c.py"], ["a.py"]),
    (["a b/**", "(x)"], ["a b/c", "(x)"], ["ab/c", "x"]),
    (["[z-a]"], ["[z-a]"], ["z"]),
])
def test_globs_match_as_git_reads_them(globs, inside, outside):
    task = sf.TaskSpec("t", touch=tuple(globs))
    assert [path for path in inside if not sf.is_in_scope(task, path)] == []
    assert [path for path in outside if sf.is_in_scope(task, path)] == []


def test_deny_beats_touch_and_nothing_said_allows_everything():
    task = sf.TaskSpec("t", touch=("src/**",), deny=("src/secret/**",))
    assert sf.is_in_scope(task, "src/a") and not sf.is_in_scope(task, "src/secret/b")
    assert sf.is_in_scope(sf.TaskSpec("t"), "anything/at/all")
    assert "src/**" in sf.describe_scope(task) and "src/secret/**" in sf.describe_scope(task)


def asks(tool, **given):
    return {"tool_name": tool, "input": given}


@pytest.mark.parametrize("request_, behavior", [
    (asks("AskUserQuestion", questions=[{"question": "Which?"}]), None),
    (asks("AskUserQuestion", question="Which?"), None),
    (asks("AskUserQuestion", questions=[]), "deny"), (asks("AskUserQuestion", ask=3), "deny"),
    (asks("Write", file_path="/w/src/a.py"), "allow"),
    (asks("Edit", file_path="src/a.py"), "allow"),
    (asks("Write", file_path="/w/docs/a.md"), "deny"),
    (asks("Write", file_path="/w/src/../docs/a.md"), "deny"),
    (asks("Write", file_path="/etc/passwd"), "deny"),
    (asks("Write", file_path="/wider/src/a.py"), "deny"),
    *[(asks("Write", file_path=path), "deny") for path in (
        "/w/.git", "/w/.git/config", "src/.GIT/config", "/w/src/.claude/settings.json",
        "src/.gitattributes", "/w/src/.gitmodules", "", "src/link/x.py")],
    (asks("NotebookEdit", notebook_path="/w/src/a.ipynb"), "allow"),
    (asks("Bash", command="curl x"), "deny"), (asks("Read", file_path="/etc/passwd"), "deny"),
    (asks("WebFetch", url="x"), "deny"), (asks("ExitPlanMode", plan="x"), "allow"),
    ({}, "deny"), ({"tool_name": "Write", "input": 3}, "deny"),
])
def test_requests_are_decided_by_the_scope_and_questions_by_a_person(request_, behavior):
    answer = sf.decide_request(sf.TaskSpec("t", touch=("src/**",), allow=()), "/w", request_,
                               lambda path: path.replace("/w/src/link", "/etc"))
    assert (answer or {}).get("behavior") == behavior
    if behavior == "deny" and request_.get("tool_name") == "Write":
        assert "src/**" in answer["message"]


def test_permission_rules_are_the_globs_and_what_is_granted():
    task = sf.TaskSpec("t", touch=("src/**",), deny=("src/x",), allow=("Bash(npm test *)",))
    settings = sf.plan_permissions(task)
    permissions = settings["permissions"]
    assert permissions["allow"] == ["Edit(src/**)", "Bash(npm test *)"]
    assert permissions["disableAutoMode"] == "disable"
    assert {"Edit(src/x)", "Edit(**/.git/**)", "Edit(**/.claude/**)"} <= set(permissions["deny"])


# -- what agents say --

def hear(name, **more):
    heard = sf.Heard(**more)
    end = 0
    for line in (SAMPLES / f"{name}.jsonl").read_bytes().splitlines():
        end += len(line) + 1
        heard.feed(line, end, float(end))
    return heard


@pytest.mark.parametrize("name, is_settled, tools, api", [
    ("stdin-steer", True, {"Bash": 2}, ""), ("stdin-stdio", True, {"Write": 1,
                                                                    "AskUserQuestion": 1}, ""),
    ("default-denied", True, None, ""), ("err-400", True, {}, "final"),
    ("err-401", True, {}, "final"), ("err-404", True, {}, "final"),
    ("err-429", True, {}, "transient"), ("err-500", True, {}, "transient"),
    ("err-529", True, {}, "transient"), ("err-toolong", True, {}, "final"),
    ("live-sub", True, {"Agent": 1, "Bash": 1}, ""), ("stdin-unans", None, None, None),
    ("max-turns", True, None, ""), ("stdin-interrupt", None, None, ""),
])
def test_recorded_sessions_are_understood(name, is_settled, tools, api):
    heard = hear(name)
    if is_settled is not None:
        assert heard.is_settled is is_settled and heard.turns >= (0 if api else 1)
    if tools is not None:
        assert heard.tools == tools
    if api is not None:
        assert sf.api_error_of(heard.result) == api


def test_a_result_of_an_earlier_prompt_settles_nothing():
    heard = hear("stdin-steer")
    assert heard.is_settled
    again = hear("stdin-steer", heard_from=heard.result_at + 1)
    assert not again.is_settled and again.result == heard.result


def test_a_question_is_open_until_its_result_comes():
    lines = (SAMPLES / "stdin-stdio.jsonl").read_bytes().splitlines()
    heard = sf.Heard()
    seen = []
    for line in lines:
        heard.feed(line, 0, 1.0)
        seen.append([request["tool_name"] for request in heard.requests.values()])
    assert ["AskUserQuestion"] in seen and ["Write"] in seen and seen[-1] == []
    assert heard.questions == 1 and not heard.requests


def heard_of(*events):
    heard = sf.Heard()
    for number, event in enumerate(events, 1):
        heard.feed(json.dumps(event).encode(), number, float(number))
    return heard


def called(tool, fails=False, **given):
    """A call of a tool, and how it ended."""
    yield {"type": "assistant", "message": {"model": "m", "content": [
        {"type": "tool_use", "id": "c1", "name": tool, "input": given}]}}
    yield {"type": "user", "message": {"content": [
        {"type": "tool_result", "tool_use_id": "c1", "content": "ok", "is_error": fails}]}}


def test_what_an_agent_wrote_was_denied_and_let_others_do_is_known():
    denials = [{"tool_name": "Write", "tool_input": {"file_path": "/x/a"}}] * 2
    heard = heard_of(
        *called("Write", file_path="/x/b"), *called("Read", file_path="/x/c"),
        *called("Edit", fails=True, file_path="/x/d"),
        {"type": "system", "subtype": "task_started", "subagent_type": "explorer"},
        *({"type": "system", "subtype": "task_progress", "subagent_type": "explorer",
           "usage": {"tool_uses": uses}} for uses in (3, 2)),
        {"type": "result", "result": "first", "permission_denials": denials},
        {"type": "result", "result": "then", "permission_denials": denials})
    assert (heard.written, heard.worked, heard.tool_errors) == (["/x/b"], 1, 1)
    assert heard.denied == [{"tool": "Write", "path": "/x/a"}]
    assert heard.subagents == {"explorer": {"runs": 1, "tool_uses": 3}}


def test_who_asks_is_asking_until_the_last_of_its_questions_is_answered():
    def asks(number):
        return {"type": "control_request", "request_id": number, "request": {
            "subtype": "can_use_tool", "tool_name": "Bash", "tool_use_id": f"c{number}"}}
    heard = heard_of(asks("1"), asks("2"), {"type": "system", "subtype": "status", "status": "requesting"})
    assert (heard.phase, heard.questions) == ("asking", 0)
    heard.answered("1", 9.0)
    assert heard.phase == "asking"
    heard.answered("2", 9.0)
    assert heard.phase == "requesting"


def test_any_bytes_as_output_never_raise():
    rng = random.Random(7)
    lines = [line for path in sorted(SAMPLES.glob("*.jsonl"))
             for line in path.read_bytes().splitlines()]
    assert len(lines) > 90
    for _ in range(3000):
        line = bytearray(rng.choice(lines))
        for _ in range(rng.randrange(4)):
            line[rng.randrange(len(line))] = rng.randrange(256)
        heard = sf.Heard()
        heard.feed(bytes(line[:rng.randrange(len(line) + 1)]), 0, 1.0)
        heard.feed(bytes(line), 0, 2.0)
        assert isinstance(heard.now, str)


QUESTION = asks("AskUserQuestion", questions=[
    {"question": "Which?", "options": [{"label": "sqlite"}, {"label": "postgres"}]}])
TWO = asks("AskUserQuestion", questions=[{"question": "A?", "options": [{"label": "x"}]},
                                         {"question": "B?"}])


@pytest.mark.parametrize("request_, words, answers", [
    (QUESTION, ["1"], {"Which?": "sqlite"}), (QUESTION, ["2"], {"Which?": "postgres"}),
    (QUESTION, ["3"], {}), (QUESTION, ["0"], {}), (QUESTION, ["none", "of", "them"],
                                         {"Which?": "none of them"}),
    (TWO, ["1", "yes"], {"A?": "x", "B?": "yes"}), (TWO, ["1"], {}), ({}, ["1"], {}),
    ({"input": {"questions": 3}}, ["1"], {})])
def test_answers_are_numbers_or_words(request_, words, answers):
    assert sf.plan_answers(request_, words) == answers


# -- what is kept of a task --

def state_of(**more):
    task = sf.TaskSpec("a", prompt="x", check="make", after=("b",))
    return sf.change(sf.TaskState("a", task, 3), **more)


def test_states_come_back_as_they_were():
    for state in (state_of(), state_of(
            state="asking", newer=sf.TaskSpec("a", prompt="y"), says=("hallo ü",), checks=(7, 0),
            question={"id": "r", "request": {"x": [1]}}, passes_on_base=True, worked=1.5,
            branch="feat/login", base="a" * 40, worktree="/w/\n x", orders=("1.2-ab.json",),
            session="0" * 36)):
        assert sf.thaw_state(json.loads(json.dumps(sf.freeze(state), default=list))) == state


@pytest.mark.parametrize("damage", [
    {"base": "--output=x"}, {"kept": "HEAD"}, {"branch": "-f"},
    {"session": "--help"}, {"worktree": "relative"}, {"state": "nowhere"}, {"name": "b"},
    {"tried": "1"}, {"says": "x"}, {"says": [{}]}, {"task": 3}, {"order": None}, {"git": "x/y"}])
def test_what_no_state_can_say_is_none(damage):
    frozen = {**sf.freeze(state_of()), **damage}
    assert sf.thaw_state(json.loads(json.dumps(frozen, default=list))) is None


def test_any_json_as_state_never_raises():
    rng = random.Random(3)
    content = bytearray(json.dumps(sf.freeze(state_of(says=("x",))), default=list).encode())
    for _ in range(3000):
        damaged = bytearray(content)
        for _ in range(rng.randrange(1, 6)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(32, 127)
        sf.thaw_state(sf.parse_object(bytes(damaged)))


@pytest.mark.parametrize("state, words", [
    (state_of(), "x"), (state_of(prompt="Again."), "x\n\nAgain."),
    (state_of(spoken=True), "Continue."), (state_of(spoken=True, prompt="a"), "a"),
    (state_of(prompt="Continue."), "x"),
    (sf.replace(state_of(spoken=True, prompt="It failed."), task=sf.TaskSpec(
        "a", prompt="x", coder="codex")), "x\n\nIt failed.")])
def test_who_does_not_know_the_task_is_told_all_of_it(state, words):
    assert sf.plan_first_words(state) == words


# -- what starts, and what waits --

def states_of(*specs):
    """States by words: ("a", "done"), ("b", "waiting", dict(after=("a",)))."""
    states = {}
    for name, state, *more in specs:
        fields = dict(more[0]) if more else {}
        own = {key: fields.pop(key) for key in list(fields) if key in sf.keys_of(sf.TaskSpec)}
        task = sf.TaskSpec(name, prompt="x", **own)
        states[name] = sf.change(sf.TaskState(name, task, len(states)), state=state, **fields)
    return states


def starts(states, aliases=None, slots=None, most=99, now=100.0, **more):
    rungs = {name: (alias,) for name, alias in (aliases or {}).items()}
    return [*sf.plan_starts(states, sf.Limits(slots or {}, most, rungs=rungs, **more), now)]


def test_what_starts_is_ready_has_a_slot_and_comes_first():
    states = states_of(("a", "done"), ("b", "waiting", {"after": ("a",)}),
                       ("c", "waiting", {"after": ("b",)}), ("d", "waiting", {"priority": 5}),
                       ("e", "waiting", {"until": 200.0}), ("f", "running"), ("g", "waiting"))
    assert starts(states) == ["d", "b", "g"]
    assert starts(states, most=2) == ["d"]
    aliases = dict.fromkeys(states, "big")
    assert starts(states, aliases, {"big": 3}) == ["d", "b"]
    assert starts(states, aliases, {"big": 1}) == []
    assert starts(states, aliases, {"big": 9}, resting={"big": "rests"}) == []
    assert starts(states, {**aliases, "g": "small"}, {"big": 1, "small": 1}) == ["g"]


def test_what_asks_and_sleeps_has_no_slot():
    states = states_of(("a", "asking", {"phase": "asleep"}), ("b", "waiting"))
    assert starts(states, most=1) == ["b"]


def test_what_was_tried_longest_ago_comes_first_among_equals():
    states = states_of(("a", "waiting", {"spoken": True, "at": 90.0}),
                       ("b", "waiting", {"spoken": True, "at": 50.0}), ("c", "waiting"))
    assert starts(states) == ["c", "b", "a"]


def test_a_try_that_goes_on_comes_before_what_is_new():
    answered = {"spoken": True, "open": True, "at": 90.0}
    states = states_of(("new", "waiting"), ("answered", "waiting", answered),
                       ("high", "waiting", {"priority": 1}))
    assert starts(states) == ["high", "answered", "new"]


@pytest.mark.parametrize("state, words", [
    (("b", "waiting", {"after": ("a",)}), "for a"),
    (("b", "waiting", {"after": ("bad",)}), "for bad (failed)"),
    (("b", "waiting", {"until": 130.0, "reason": "the model cannot be asked"}),
     "for its next try in 30 s: the model cannot be asked"),
    (("b", "waiting"), "for a slot of big (2 of 2 in use)")])
def test_why_a_task_waits_is_said(state, words):
    states = states_of(("a", "running"), ("a2", "checking"), ("bad", "failed"), state)
    limits = sf.Limits({"big": 2}, 5, rungs=dict.fromkeys(states, ("big",)))
    assert sf.explain_wait(states["b"], states, limits, 100.0) == words


def test_nothing_is_said_to_be_in_use_that_is_not():
    states = states_of(("b", "waiting"))
    limits = sf.Limits({"big": 9}, 9, rungs={"b": ("big",)})
    assert sf.explain_wait(states["b"], states, limits, 1.0) == "to start"
    busy = states_of(("a", "running"), ("b", "waiting"))
    assert sf.explain_wait(busy["b"], busy, sf.Limits({}, 1), 1.0) == \
        "for a slot of its coder (1 of 1 in use)"


def test_slots_are_never_exceeded_and_never_idle_whatever_happens():
    rng = random.Random(11)
    for _ in range(300):
        names = [f"t{number}" for number in range(rng.randrange(1, 30))]
        states = {}
        for number, name in enumerate(names):
            after = tuple(rng.sample(names[:number], min(number, rng.randrange(3))))
            states[name] = sf.TaskState(name, sf.TaskSpec(name, after=after,
                                                      priority=rng.randrange(3)), number)
        aliases = {name: rng.choice("xyz") for name in names}
        slots = {alias: rng.randrange(1, 5) for alias in "xy"}
        most = rng.randrange(1, 9)
        for _ in range(400):
            begun = starts(states, aliases, slots, most)
            for name in begun:
                assert all(states[other].state == "done" for other in states[name].task.after)
                states[name] = sf.replace(states[name], state="running")
            running = [name for name in names if states[name].state == "running"]
            assert len(running) <= most
            for alias, limit in slots.items():
                assert sum(aliases[name] == alias for name in running) <= limit
            assert starts(states, aliases, slots, most) == []  # all free places are taken
            if not running:
                break
            over = rng.choice(running)
            states[over] = sf.replace(states[over], state="done")
        assert all(state.state == "done" for state in states.values())


def test_a_thousand_waiting_tasks_are_planned_quickly():
    states = states_of(*[(f"t{number}", "waiting", {"after": (f"t{number - 1}",)} if number % 3
                          else {}) for number in range(1000)])
    aliases = dict.fromkeys(states, "big")
    best = 9.0
    for _ in range(5):
        began = time.perf_counter()
        assert len(starts(states, aliases, {"big": 8})) == 8
        best = min(best, time.perf_counter() - began)
    assert best < 0.05  # measured: 2 ms; `tests/bench/run.py` says the number


# -- stuck --

def stuck(phase, *, silent=0.0, stands=None, view="unknown", timeout=300.0, task=None, **more):
    heard = sf.Heard()
    heard.phase, heard.last = phase, 1000.0 - silent
    heard.since = 1000.0 - (silent if stands is None else stands)
    for name, value in more.items():
        setattr(heard, name, value)
    return sf.find_stall(task or sf.TaskSpec("t"), heard, view, timeout, 1000.0)


def bash(since):
    return {"c": sf.OpenCall("Bash", "make", 1000.0 - since)}


@pytest.mark.parametrize("given, is_stuck", [
    (dict(phase="silent", stands=61), True), (dict(phase="silent", stands=59), False),
    (dict(phase="requesting", silent=601), True), (dict(phase="requesting", silent=599), False),
    (dict(phase="requesting", silent=9999, view="waiting"), False),
    (dict(phase="answering", silent=9999, view="waiting"), False),
    (dict(phase="requesting", silent=301, view="idle"), True),
    (dict(phase="requesting", silent=5, stands=601, view="working"), True),
    (dict(phase="requesting", silent=5, stands=599, view="working"), False),
    (dict(phase="answering", silent=12, stands=711, view="working"), False),  # a long answer
    (dict(phase="answering", silent=601, view="working"), True),
    (dict(phase="requesting", silent=5, stands=9999), False),  # foreign gateway: pings are life
    (dict(phase="tool", silent=91, calls=bash(91)), True),
    (dict(phase="tool", silent=89, calls=bash(300)), False),
    (dict(phase="tool", silent=61, calls=bash(61), task=sf.TaskSpec("t", stall=60)), True),
    (dict(phase="tool", silent=59, calls=bash(59), task=sf.TaskSpec("t", stall=60)), False),
    (dict(phase="tool", silent=44, calls=bash(44), task=sf.TaskSpec("t", stall=4)), False),
    (dict(phase="tool", silent=46, calls=bash(46), task=sf.TaskSpec("t", stall=4)), True),
    (dict(phase="tool", silent=10, calls=bash(661)), True),
    (dict(phase="tool", silent=250, calls={"c": sf.OpenCall("WebFetch", "", 0.0)}), False),
    (dict(phase="tool", silent=301, calls={"c": sf.OpenCall("WebFetch", "", 0.0)}), True),
    (dict(phase="tool", silent=9999, calls={"c": sf.OpenCall("Agent", "", 0.0)}, view="working"),
     False),
    (dict(phase="asking", silent=99999), False), (dict(phase="settled", silent=99999), False),
    (dict(phase="tool", repeats=12, calls=bash(1)), True),
    (dict(phase="tool", repeats=11, calls=bash(1)), False),
    (dict(phase="requesting", silent=301, task=sf.TaskSpec("t", coder=("x",))), True),
    (dict(phase="requesting", silent=299, task=sf.TaskSpec("t", coder=("x",))), False),
])
def test_each_way_of_getting_stuck_is_seen_and_nothing_else(given, is_stuck):
    assert bool(stuck(**given)) is is_stuck


# -- the verdict --

def ruling(code=0, *, changed=("a.py",), outside=(), round_=0, failures=0, exit_code=0, said="",
           **task):
    state = sf.TaskState("t", sf.TaskSpec("t", **{"check": "make", **task}), 0,
                         attempt=sf.Attempt(round=round_, failures=failures))
    work = sf.WorkDone(changed=tuple(changed), outside=tuple(outside), exit_code=exit_code,
                       said=said)
    return sf.judge(state, work, code if state.task.check else None, "line\n" * 300)


@pytest.mark.parametrize("given, to, reason", [
    (dict(), "done", ""), (dict(check=None), "review", ""),
    (dict(code=1), "running", "check failed (exit 1)"),
    (dict(code=1, round_=3), "waiting", "check failed (exit 1)"),
    (dict(code=1, round_=3, failures=1), "failed", "check failed (exit 1)"),
    (dict(code=1, rounds=0, tries=1), "failed", "check"),
    (dict(changed=()), "running", "nothing was changed"),
    (dict(changed=(), round_=3, failures=1), "failed", "nothing was changed"),
    (dict(changed=(), changes="none"), "done", ""),
    (dict(changes="none", round_=3, failures=1), "failed", "must change nothing"),
    (dict(outside=("x",)), "parked", "scope"),
    (dict(outside=("x",), code=1), "running", "check"),
    (dict(outside=("x",), code=1, round_=3), "parked", "scope"),
    (dict(check=None, changed=(), round_=3, failures=1), "failed", "nothing"),
    (dict(code=1, coder=("x",)), "waiting", "check"),
    (dict(check=None, coder=("x",), exit_code=2), "waiting", "exit code 2"),
    (dict(coder=("x",), exit_code=2), "done", ""),
    (dict(coder=("x",), exit_code=2, changed=()), "waiting", "exit code 2"),
    (dict(coder=("x",), exit_code=2, changed=(), changes="none"), "waiting", "exit code 2"),
    (dict(changed=(), said="Done so far.\nWhich database?"), "asking", ""),
    (dict(changed=(), changes="none", said="Is that all?"), "done", ""),
    (dict(said="Which database?"), "done", ""),
    (dict(code=1, coder=("x",), tries=1), "failed", "check"),
])
def test_success_is_what_the_check_the_scope_and_the_diff_say(given, to, reason):
    found = ruling(**given)
    assert found.to == to and reason in found.reason
    assert bool(found.feedback) >= (to == "running")


def test_a_check_is_told_with_its_last_hundred_lines():
    feedback = ruling(code=2).feedback
    assert "exit 2" in feedback and 100 <= feedback.count("line") <= 101


@pytest.mark.parametrize("turns, worked, written, changes, flag", [
    (1, 0, [], "required", "made no call that could change"), (1, 0, [], "none", None), (0, 0, [], "required", None),
    (1, 1, ["/w/src/b.py"], "required", "not in the diff"), (1, 1, ["/w/a.py"], "required", None)])
def test_flags_are_made_of_deeds(turns, worked, written, changes, flag):
    heard = sf.Heard()
    heard.turns, heard.worked, heard.written = turns, worked, written
    flags = sf.find_flags(sf.TaskSpec("t", changes=changes), heard, sf.WorkDone(files=(("a.py", 1, 0),)))
    assert [flag in one for one in flags] == [True] if flag else flags == []


def test_a_subagent_that_used_no_tool_is_flagged():
    heard = sf.Heard()
    heard.subagents = {"scout": {"runs": 1, "tool_uses": 0}, "other": {"runs": 1, "tool_uses": 2}}
    assert sf.find_flags(sf.TaskSpec("t"), heard, sf.WorkDone()) == ["subagent scout used no tool"]


def test_a_receipt_holds_no_words_of_the_prompt_or_the_answer():
    heard = hear("stdin-stdio")
    state = sf.TaskState("t", sf.TaskSpec("t", prompt="SECRET PROMPT", check="make"), 0,
                         attempt=sf.Attempt(1))
    text = json.dumps(sf.plan_receipt(state, heard, sf.WorkDone(said="SECRET ANSWER"), "alias", "result"))
    assert "SECRET" not in text and '"questions": 1' in text


def test_what_served_a_session_is_summed_by_machine():
    first = sf.Receipt(
        time=1.0, id="r", session="s", agent_id="", alias="x", route="m", node="mini", context=None,
        failures=(), waited_seconds=1.5, first_byte_seconds=None, total_seconds=0.0, input_tokens=10, output_tokens=2,
        outcome="ok")
    receipts = [first, sf.replace(first, input_tokens=5, output_tokens=0, waited_seconds=None),
                sf.replace(first, session="other"), sf.replace(first, node=None)]
    assert sf.sum_served(receipts, "s") == [
        {"node": "mini", "route": "m", "model": "m", "requests": 2, "input_tokens": 15,
         "output_tokens": 2, "waited_seconds": 1.5}]


# -- processes and rows --

def test_rows_are_in_the_order_of_the_file_and_twins_by_verdict_and_size():
    states = {}
    for number, name in enumerate(["z", "jwt-a", "jwt-b", "jwt-c", "a", "old"]):
        task = sf.TaskSpec(name, prompt="x", times=3 if "jwt" in name else 1)
        states[name] = sf.TaskState(name, task, number,
                                    wish=sf.Wish(forgotten=name == "old"))
    states["jwt-a"] = sf.replace(states["jwt-a"], state="failed", cause="check")
    for name, plus in (("jwt-b", 50), ("jwt-c", 5)):
        states[name] = sf.change(states[name], state="done", diff={"files": 1, "plus": plus})
    rows = sf.plan_task_rows(sf.TaskSight(states, {}, 100.0))
    assert [row.name for row in rows] == ["z", "jwt-c", "jwt-b", "jwt-a", "a"]
    assert rows[3].fix == "subagent-fleet task log jwt-a check"


def test_a_row_says_where_it_works_how_often_it_was_tried_and_what_has_gone():
    task = sf.TaskSpec("t", prompt="x", tries=3)
    state = sf.change(sf.TaskState("t", task, 0), state="running", tried=2, failures=1, session="s",
                      at=50.0, open=True, began=60.0, spent=5.0, worktree="/w", git="/g")
    served = {"s": types.SimpleNamespace(node="mini", input_tokens=0)}
    row, = sf.plan_task_rows(sf.TaskSight({"t": state}, {}, 100.0, served=served))
    assert (row.runs_on, row.try_, row.total_seconds, row.worktree) == ("mini", "2/3", 45.0, "/w")
    waits = sf.change(state, state="waiting", tried=0, open=False, failures=0, session="")
    row, = sf.plan_task_rows(sf.TaskSight({"t": waits}, {}, 100.0, served=served))
    assert (row.runs_on, row.try_, row.total_seconds) == ("", "0/3", 0.0)
    gone = sf.change(state, state="done", ended=70.0, git="")
    row, = sf.plan_task_rows(sf.TaskSight({"t": gone}, {}, 100.0))
    assert (row.worktree, row.total_seconds) == ("", 15.0)


def test_what_to_type_is_said_of_what_waits_for_a_person():
    states = {name: sf.TaskState(name, sf.TaskSpec(name, prompt="x", after=after), number, state=state)
              for number, (name, state, after) in enumerate([
                  ("good", "done", ()), ("seen", "review", ()), ("bad", "failed", ()),
                  ("held", "stopped", ()), ("left", "stopped", ()), ("next", "waiting", ("held",))])}
    assert sf.plan_hints(sf.Scene(states), "look", "retry") == [
        "Look at it: subagent-fleet task diff seen", "See why: subagent-fleet task log bad",
        "Accept: subagent-fleet task accept seen", "Try again: subagent-fleet task retry bad held"]
    assert sf.plan_hints(sf.Scene({"good": states["good"]}), *sf.HINTS) == []
