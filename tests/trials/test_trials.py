"""Trials: what is asked, how it is judged, what is kept of it, `bench` as a whole."""
import json
import re
import threading

import pytest

import subagent_fleet as sf
from json_examples import compare_example

MEASURED = sf.Measurement(
    node="mini", endpoint="http://10.0.0.2:11434", model="qwen3-coder:30b",
    date="2026-11-18T14:05:02Z", tokens=65536, load_seconds=4.2, prompt_rate=812.5,
    long_prompt_rate=640.0, answer_rate=58.1, first_token_seconds=0.3,
    tools=sf.Score(5, 6, "made one call of two"), context=sf.Score(3, 3),
    failed=(sf.FailedAnswer("plan-config", "names no file", "Look around."),),
    versions={"ollama": "0.32.15", "subagent-fleet": "1.0.0"}, failure="")


def bench_file(*entries):
    """The bytes of a bench file with these entries."""
    return sf.render_report("bench", {"measurements": list(entries)}).encode()


# -- what is kept --

def test_measurement_is_read_back_as_it_was_written():
    assert sf.parse_measurements(bench_file(MEASURED)) == (MEASURED,)


def test_bench_file_of_another_schema_is_refused():
    newer = bench_file(MEASURED).replace(b"/bench/1", b"/bench/9")
    assert newer != bench_file(MEASURED)
    assert sf.parse_measurements(newer) == ()


@pytest.mark.parametrize("content", [
    None, b"", b"[]", b"{", b"nonsense", b"[" * 100_000])
def test_bench_file_that_is_none_holds_nothing(content):
    assert sf.parse_measurements(content) == ()


@pytest.mark.parametrize("entries", [
    {}, [1, None], [{"node": "a", "endpoint": 3, "model": "x"}],
    [{"node": "a\x1b[2J", "endpoint": "http://a", "model": "x"}]])
def test_entry_of_a_bench_file_that_is_none_is_passed_over(entries):
    report = json.loads(bench_file(MEASURED))
    good = report["measurements"]
    report["measurements"] = entries if isinstance(entries, dict) else entries + good
    measured = sf.parse_measurements(json.dumps(report).encode())
    assert measured == (() if isinstance(entries, dict) else (MEASURED,))


@pytest.mark.parametrize("field, value", [
    ("prompt_rate", -1), ("prompt_rate", True), ("answer_rate", "58"), ("load_seconds", 1e300),
    ("tools", {"passed": 7, "asked": 6}), ("tools", {"passed": 1}), ("tools", {"asked": 0}),
    ("context", [3, 3]), ("versions", {"x": 1}),
    ("failed", {"trial": "x"}), ("failed", [{"trial": ""}, 3]), ("tokens", "many")])
def test_field_of_the_wrong_kind_counts_as_absent(field, value):
    entry = {**json.loads(bench_file(MEASURED))["measurements"][0], field: value}
    (measurement,) = sf.parse_measurements(bench_file(entry))
    empty = getattr(sf.Measurement("a", "b", "c"), field)
    assert getattr(measurement, field) == empty
    assert measurement.node == "mini" and measurement.first_token_seconds == 0.3


def test_bench_file_is_bounded_in_everything():
    entry = json.loads(bench_file(MEASURED))["measurements"][0]
    assert len(sf.parse_measurements(bench_file(*[entry] * 20))) == 20
    small = {"node": "a", "endpoint": "http://a:1", "model": "x"}
    many = sf.parse_measurements(bench_file(*[small] * 2000))
    assert len(many) == sf.MEASUREMENTS_LIMIT


def test_latest_measurement_of_that_model_at_that_endpoint_is_found():
    later = sf.replace(MEASURED, date="2026-11-19T00:00:00Z", model="qwen3-coder:30B")
    elsewhere = sf.replace(MEASURED, endpoint="http://10.0.0.3:11434", date="2027")
    measured = (later, MEASURED, elsewhere)
    assert sf.find_measurement(measured, MEASURED.endpoint, "qwen3-coder:30b") is later
    assert sf.find_measurement(measured, "http://other:11434", "qwen3-coder:30b") is None
    assert sf.find_measurement(measured, MEASURED.endpoint, "qwen3:8b") is None


def test_bench_file_of_a_directory_is_read_and_never_followed_out(tmp_path):
    inside, outside = tmp_path / "fleet", tmp_path / "other"
    (inside / ".subagent-fleet").mkdir(parents=True)
    workspace = sf.Workspace(sf.World(), str(inside))
    assert sf.read_measurements(workspace) == ()

    outside.write_bytes(bench_file(MEASURED))
    place = inside / ".subagent-fleet" / "bench.json"
    place.symlink_to(outside)
    assert sf.read_measurements(workspace) == ()

    place.unlink()
    place.write_bytes(outside.read_bytes())
    assert sf.read_measurements(workspace) == (MEASURED,)

    place.write_bytes(b'{"measurements": [' + b"[]," * 200_000)
    assert sf.read_measurements(workspace) == ()


# -- the node's own counters --

def end_of(**last):
    """The End that Ollama's reader makes of a last line."""
    model = sf.Model("m", "n", "x", "x")
    line = {"message": {"content": ""}, "done": True, "done_reason": "stop", **last}
    return sf.Ollama().reader(sf.Talk("x", ()), model, 9).feed(json.dumps(line).encode())[-1].end


def test_times_of_the_node_are_read_from_its_last_line():
    end = end_of(load_duration=1_500_000_000, prompt_eval_count=1000,
                 prompt_eval_duration=2_000_000_000, eval_count=50, eval_duration=500_000_000)
    assert (end.load_seconds, end.prompt_seconds, end.answer_seconds) == (1.5, 2.0, 0.5)


@pytest.mark.parametrize("nanoseconds", [0, -5, "7", 1.5, True, 10 ** 30, None])
def test_time_that_no_request_takes_is_none(nanoseconds):
    end = end_of(load_duration=nanoseconds, eval_duration=nanoseconds)
    assert (end.load_seconds, end.prompt_seconds, end.answer_seconds) == (None, None, None)


# -- judges --

def answer(text="", calls=(), *, refusal=None, failure="", thoughts="", reason="end_turn", **more):
    """An Answer with these calls: (name, arguments)."""
    counted = more.pop("counted", 0)
    question = sf.Question(sf.Talk("x", ()), **more)
    made = tuple(sf.Call(str(number), *call) for number, call in enumerate(calls))
    return sf.Answer(question, text, thoughts, made, sf.End(reason, input_tokens=counted),
                     refusal=refusal, failure=failure)


def judge_of(topic, name):
    """The judges of a trial, as one that says the first flaw."""
    (trial,) = [trial for trial in sf.TRIALS if (trial.topic, trial.name) == (topic, name)]
    return lambda given: next(filter(None, sf.find_flaws(trial, given)), "")


DEBUG = ("set-log-level", {"service": "billing", "level": "debug"})
ERROR = ("set-log-level", {"service": "billing", "level": "error"})
INFO = ("set-log-level", {"service": "search", "level": "info"})
SETTING = ("get_setting", {"key": "retry_limit"})
OWNER = {"name": "Ada", "team": "web"}
TESTS = {"paths": ["tests/api", "tests/web"], "stop_early": True}
NO_TOOLS = sf.Refusal(400, 'node mini, model x: "x" does not support tools')


@pytest.mark.parametrize("name, given, flaw", [
    ("an enum, a name with a dash", answer(calls=[DEBUG]), ""),
    ("an enum, a name with a dash", answer(calls=[
        ("set-log-level", {"service": " Billing", "level": "DEBUG", "note": ""})]), ""),
    ("an enum, a name with a dash", answer(), "called no tool"),
    ("an enum, a name with a dash", answer("set-log-level is a good tool for that"),
     "called no tool"),
    ("an enum, a name with a dash", answer('{"name": "set-log-level", "arguments": {}}'),
     "printed the call as text"),
    ("an enum, a name with a dash", answer("<tool_call>{}</tool_call>"),
     "printed the call as text"),
    ("an enum, a name with a dash", answer('set-log-level(service="billing")'),
     "printed the call as text"),
    ("an enum, a name with a dash", answer("<function=set-log-level>"),
     "printed the call as text"),
    ("an enum, a name with a dash", answer(calls=[INFO]),
     "called `set-log-level` with a wrong `service`"),
    ("an enum, a name with a dash", answer(calls=[("set_log_level", DEBUG[1])]),
     "called `set_log_level` instead of `set-log-level`"),
    ("an enum, a name with a dash", answer(calls=[(DEBUG[0], {**DEBUG[1], "who": "me"})]),
     "called `set-log-level` with an unknown `who`"),
    ("an enum, a name with a dash", answer(calls=[DEBUG, DEBUG]), "made 2 calls, not 1"),
    ("an enum, a name with a dash", answer(refusal=NO_TOOLS),
     'refused: "x" does not support tools'),
    ("an enum, a name with a dash", answer(failure="timeout: no answer"), "timeout: no answer"),
    ("a nested object", answer(calls=[("open_ticket", {"title": "Login fails", "owner": OWNER})]),
     ""),
    ("a nested object", answer(calls=[("open_ticket", {"title": "Login fails",
                                                       "owner": "Ada, web"})]),
     "called `open_ticket` with a wrong `owner`"),
    ("an array", answer(calls=[("run_tests", TESTS)]), ""),
    ("an array", answer(calls=[("run_tests", {**TESTS, "paths": "tests/api tests/web"})]),
     "called `run_tests` with a wrong `paths`"),
    ("an array", answer(calls=[("run_tests", {**TESTS, "paths": TESTS["paths"][::-1]})]),
     "called `run_tests` with a wrong `paths`"),
    ("an array", answer(calls=[("run_tests", {**TESTS, "stop_early": "true"})]),
     "called `run_tests` with a wrong `stop_early`"),
    ("none where none fits", answer("It is 42."), ""),
    ("none where none fits", answer("It is 43."), "did not answer 42"),
    ("an enum, a name with a dash", answer("<｜tool▁calls▁begin｜>function"),
     "printed the call as text"),
    ("an enum, a name with a dash", answer("[TOOL_CALLS]set-log-level"), "printed the call as text"),
    ("an enum, a name with a dash", answer("commentary to=functions.set-log-level {}"),
     "printed the call as text"),
    ("an enum, a name with a dash", answer('{"tool": "log", "parameters": {"level": 1}}'),
     "printed the call as text"),
    ("an enum, a name with a dash", answer('<invoke name="set-log-level">'),
     "printed the call as text"),
    ("an enum, a name with a dash", answer("I'd use the <b>tool</b> \"set-log-level\" (a < b)."),
     "called no tool"),
    ("none where none fits", answer("42", [DEBUG]),
     "called `set-log-level` where no tool was needed"),
    ("none where none fits", answer("run_tests(42)"), "printed the call as text"),
    ("two calls", answer(calls=[INFO, ERROR]), ""),
    ("two calls", answer(calls=[ERROR]), "made 1 call, not 2"),
    ("two calls", answer('set-log-level(service="search")', [ERROR]), "printed the call as text"),
    ("two calls", answer(calls=[ERROR, ERROR]),
     "called `set-log-level` with a wrong `service`"),
    ("an answer after the result", answer("It is 7,391.", [SETTING]), ""),
    ("an answer after the result", answer("It is 7391."), "called no tool"),
    ("an answer after the result", answer("I do not know.", [SETTING]), "did not answer 7391"),
    ("an answer after the result", answer("It is 7391.", [SETTING] * 3), "made 3 calls, not 1"),
])
def test_tool_answers_are_judged_by_their_arguments(name, given, flaw):
    assert judge_of("tools", name)(given) == flaw


FULL = {"context": 8192, "tokens": 8000, "word": "KESTREL"}
TOO_LONG = sf.PromptTooLong(8200, 8192)


@pytest.mark.parametrize("name, given, flaw", [
    ("full", answer("kestrel.", counted=8000, **FULL), ""),
    ("full", answer("kestrel", counted=7900, loaded=8192, **FULL), ""),
    ("full", answer("MARBLE", counted=8000, **FULL),
     "lost the beginning of a prompt of 8,000 tokens"),
    ("full", answer("kestrel", counted=4096, **FULL), "counted 4,096 tokens of about 8,000"),
    ("full", answer("kestrel", counted=8000, loaded=4096, **FULL),
     "is loaded with 4,096 tokens, not 8,192"),
    ("full", answer(refusal=sf.PromptTooLong(8000, 4096), **FULL),
     "holds 4,096 tokens, not 8,192"),
    ("full", answer(failure="timeout: no answer in time", **FULL), "timeout: no answer in time"),
    ("one token more", answer(refusal=TOO_LONG, **FULL), ""),
    ("one token more", answer("kestrel", counted=8000, **FULL), ""),  # it holds more than that
    ("one token more", answer("marble", counted=8000, **FULL),
     "cuts a prompt that is too long instead of refusing it"),
    ("one token more", answer("kestrel", counted=4000, **FULL),
     "cuts a prompt that is too long instead of refusing it"),
    ("one token more", answer(refusal=sf.Refusal(500, "out of memory"), **FULL),
     "too long a prompt: refused: out of memory"),
])
def test_context_answers_are_judged_by_word_and_count(name, given, flaw):
    assert judge_of("context", name)(given) == flaw


# -- prompts that fill --

def subject_of(context=8192, **more):
    return sf.Subject(sf.Model("m", "n", "x", "x", context=context), seed="s", **more)


def words_of(question):
    return sum(len(text.split()) for turn in question.talk.turns for text in turn.texts)


def test_lines_are_counted_by_what_the_node_counted():
    base, each = 40, 21.5  # tokens
    subject = subject_of(fills=((8, round(base + 8 * each)), (80, round(base + 80 * each))))
    lines = subject.count_lines(8000)
    assert lines % len(sf.FILLER) == 0
    assert 8000 - 8 * each - 1 <= base + lines * each <= 8000
    assert abs(subject.count_tokens(lines) - (base + lines * each)) <= 2


@pytest.mark.parametrize("fills", [(), ((8, 1),), ((8, 10 ** 9),), ((8, 5), (8, 5)),
                                   ((80, 10), (8, 10 ** 9)), ((8, 100), (16, 50))])
def test_counts_that_make_no_sense_make_no_endless_prompt(fills):
    subject = subject_of(context=16777216, fills=fills)
    assert len(sf.FILLER) <= subject.count_lines(16777216) <= sf.FILLER_LINES_LIMIT


def test_quick_fills_what_is_read_in_a_while():
    def tokens(**more):
        subject = subject_of(context=262144, fills=((8, 200), (80, 1640)), **more)
        return sf.CONTEXT_TRIALS[0].ask(subject).tokens
    assert tokens() > 240_000
    assert tokens(is_quick=True) < 1100
    assert 1900 < tokens(is_quick=True, prompt_rate=400.0) <= 2100
    assert tokens(is_quick=True, prompt_rate=1e6) == tokens()


def test_prompt_that_is_too_long_is_so_by_little():
    subject = subject_of(fills=((8, 200), (80, 1640)))
    question = sf.CONTEXT_TRIALS[1].ask(subject)
    assert question.tokens == 8193
    assert words_of(question) > words_of(sf.CONTEXT_TRIALS[0].ask(subject))


def test_prompt_of_the_first_token_is_the_one_before_up_to_its_last_words():
    _, prompt, again, *_ = sf.SPEED_TRIALS
    subject = subject_of(fills=((8, 400),))
    asked = prompt.ask(subject)
    repeated = again.ask(sf.replace(subject, fills=((8, 400), (asked.lines, 1111))))
    assert asked.talk.turns[:2] == repeated.talk.turns[:2] and repeated.lines == 0
    (text,), (other,) = (each.talk.turns[2].texts for each in (asked, repeated))
    assert text != other
    assert text.partition("code word?")[0] == other.partition("code word?")[0]


def test_no_prompt_begins_as_another_but_the_one_that_shall():
    subject = subject_of(context=65536)
    starts = [trial.ask(subject).talk.turns[0].texts[0]
              for trial in (*sf.SPEED_TRIALS, *sf.CONTEXT_TRIALS)
              if trial.name != "answer"]
    assert starts[1] == starts[2]  # the first token of a warm model
    assert len(set(starts)) == len(starts) - 1
    assert all("Run s-" in start for start in starts)


# -- what is kept of two runs --

def measured(**more):
    return sf.replace(MEASURED, **more)


def test_a_new_measurement_replaces_the_old_one():
    quick = measured(long_prompt_rate=None, prompt_rate=900.0, failed=(),
                     date="2026-11-20T00:00:00Z")
    assert sf.merge_measurements([MEASURED], [quick]) == (quick,)


def test_run_that_measured_nothing_takes_nothing_away():
    dead = sf.Measurement("mini", MEASURED.endpoint, "qwen3-coder:30b", tokens=65536,
                          versions=MEASURED.versions, date="2027",
                          failure="refused: connection refused")
    assert sf.merge_measurements([MEASURED], [dead]) == (MEASURED,)
    assert sf.merge_measurements([], [dead]) == ()


def test_other_context_and_other_machine_are_other_subjects():
    others = [measured(tokens=32768), measured(endpoint="http://10.0.0.9:11434", node="studio")]
    assert len(sf.merge_measurements([MEASURED], others)) == 3


# -- the command, against nodes that play a model --

BILLION = 1_000_000_000
CALLS = {"billing to debug": [DEBUG],
         "Open a ticket": [("open_ticket", {"title": "Login fails", "owner": OWNER})],
         "Run the tests": [("run_tests", TESTS)], "billing to error": [ERROR, INFO],
         "setting retry_limit": [SETTING]}
TEXTS = {"17 plus 25": "42", "retry_limit = 7391": "It is 7391.", "Done.": "It is done.", "numbers from 1": "1 " * 100,
         "bat and a ball": "5 cents", "Which colour": "red"}


class Played:
    """A model that does all it is asked; each flaw is a way in which some do not.

    It reads 1,000 words a second, writes 50 and loads in 2 s, as its counters have it.
    """

    def __init__(self, node, *flaws):
        self.node, self.flaws, self.chats = node, flaws, []
        self.is_waiting, self.goes_on = threading.Event(), threading.Event()
        node.answers["/api/chat"] = self.chat

    def chat(self, payload):
        is_first = not self.node.loaded
        if not payload["messages"]:
            return self.node._chat(sf.full_model_name(payload["model"]), payload)
        self.chats.append(payload)
        if "tools" in payload and "no tools" in self.flaws:
            return 400, {"error": '"x" does not support tools'}
        if "waits" in self.flaws and len(self.chats) == 9:
            self.is_waiting.set()
            self.goes_on.wait(30)
        if "dies" in self.flaws and len(self.chats) == 5:
            self.node.stop("dead")
            self.node.answers["/api/version"] = 500, {"error": "dying"}
            return 500, b"{"
        self.node._chat(sf.full_model_name(payload["model"]), payload)  # now it is loaded
        return self.answer(payload, is_first)

    def answer(self, payload, is_first):
        messages, context = payload["messages"], payload["options"]["num_ctx"]
        if "small" in self.flaws:
            context = 4096
        texts = [message["content"] for message in messages]
        tokens = 10 + sum(len(text.split()) for text in texts)
        if tokens >= context and "cuts" not in self.flaws:
            return 400, {"error": f"request ({tokens} tokens) exceeds the available context "
                                  f"size ({context} tokens)"}
        while tokens >= context:
            tokens -= len(texts.pop(0).split())

        calls, text = self.say(texts, payload)
        last = {"done": True, "done_reason": "stop", "prompt_eval_count": tokens,
                "eval_count": 100, "message": {"content": ""}}
        if "no counters" not in self.flaws:
            last.update(prompt_eval_duration=tokens * BILLION // 1000,
                        eval_duration=2 * BILLION, load_duration=2 * BILLION if is_first else 1)
        made = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
        thought = "hm" if payload["think"] else ""
        return 200, [{"message": {"content": text, "thinking": thought, "tool_calls": made},
                      "done": False}, last]

    def say(self, texts, payload):
        word = texts[0].partition("The code word is ")[2].rstrip(".")
        calls = next((calls for cue, calls in CALLS.items() if cue in texts[-1]), [])
        text = next((text for cue, text in TEXTS.items() if cue in texts[-1]), word)
        if "one by one" in self.flaws and "billing to error" in "".join(texts):
            done = texts.count("Done.")
            calls = [ERROR, INFO][done:done + 1]
        if "again" in self.flaws and "Done." in texts:
            calls = [DEBUG]
        if "prints" in self.flaws and calls:
            text = json.dumps({"name": calls[0][0], "arguments": calls[0][1]})
            calls = []
        return calls, text


BENCH_FLEET = """\
project: {name: benched}
nodes:
  mini: {endpoint: "%s"}
  studio: {endpoint: "%s"}
models:
  coder: {node: mini, ollama_model: "coder:30b", litellm_alias: a, context: 8192}
  small: {node: studio, ollama_model: "small:8b", litellm_alias: b, context: 8192}
agents:
  planner: {model: small, description: Plans.}
"""


@pytest.fixture
def benched(fake_node, tmp_path):
    """Write a fleet of two played models; gives them, by name."""
    def start(coder=(), small=()):
        mini, studio = fake_node({"coder:30b": {}}), fake_node({"small:8b": {}})
        text = BENCH_FLEET % (mini.endpoint, studio.endpoint)
        (tmp_path / "fleet.yaml").write_text(text, encoding="utf-8")
        return Played(mini, *coder), Played(studio, *small)
    return start


def kept(directory):
    """{model: Measurement} of the bench file of a directory."""
    content = (directory / ".subagent-fleet" / "bench.json").read_bytes()
    return {known.model: known for known in sf.parse_measurements(content)}


def results(done):
    return {known["model"]: known for known in json.loads(done.stdout)["measurements"]}


def test_bench_measures_by_the_nodes_own_counters(benched, quick, tmp_path):
    benched()
    done = quick("bench", "--json")
    assert done.returncode == 0, done.stderr
    compare_example("bench --json", done.stdout)
    for known in results(done).values():
        assert (known["load_seconds"], known["prompt_rate"], known["answer_rate"]) == (2, 1000, 50)
        assert known["long_prompt_rate"] == 1000 and known["is_counted"]
        assert 0.9 < known["first_token_seconds"] < 1.2  # the words of its prompt
        assert known["tools"] == {"passed": 6, "asked": 6, "instead": ""}
        assert known["context"] == {"passed": 3, "asked": 3, "instead": ""}
        assert known["versions"] == {"ollama": "0.32.15", "subagent-fleet": sf.__version__}
        assert known["failed"] == [] and known["failure"] == ""
    assert kept(tmp_path).keys() == {"coder:30b", "small:8b"}
    assert (tmp_path / ".subagent-fleet/bench.json").stat().st_mode & 0o777 == 0o600


def test_bench_asks_as_a_route_does_and_one_after_the_other(benched, quick):
    coder, _ = benched()
    assert quick("bench").returncode == 0
    assert {chat["options"]["num_ctx"] for chat in coder.chats} == {8192}
    assert {(chat["truncate"], chat["think"], chat["keep_alive"], chat["stream"])
            for chat in coder.chats} == {(False, False, -1, True)}
    unloads = [index for index, (path, payload) in enumerate(coder.node.requests)
               if path == "/api/chat" and payload["keep_alive"] == 0]
    first = coder.node.requests.index(("/api/chat", coder.chats[0]))
    assert len(unloads) == 1 and unloads[0] < first


@pytest.mark.parametrize("flaw, topic, passed, instead", [
    ("prints", "tools", 0, "printed the call as text"),
    ("again", "tools", 1, "made 3 calls, not 1"),
    ("no tools", "tools", 0, 'refused: "x" does not support tools'),
    ("small", "context", 0, "holds 4,096 tokens, not 8,192")])
def test_bench_says_what_a_model_did_instead(benched, quick, flaw, topic, passed, instead):
    benched(coder=[flaw])
    done = quick("bench", "--quick")
    assert done.returncode == 0
    assert f"coder:30b on mini: {topic}: {instead}\n" in done.stdout
    assert "small:8b on studio" not in done.stdout
    known = results(quick("bench", "--quick", "--json"))["coder:30b"]
    assert (known[topic]["passed"], known[topic]["instead"]) == (passed, instead)
    assert known["failed"][0]["why"] == instead


def test_bench_says_who_cuts_a_prompt_and_quick_does_not_ask(benched, quick):
    coder, _ = benched(coder=["cuts"])
    known = results(quick("bench", "--json"))["coder:30b"]["context"]
    assert known == {"passed": 2, "asked": 3,
                     "instead": "cuts a prompt that is too long instead of refusing it"}
    coder.chats.clear()
    known = results(quick("bench", "--quick", "--json"))["coder:30b"]["context"]
    assert (known["passed"], known["asked"]) == (2, 2)
    longest = max(sum(len(message["content"].split()) for message in chat["messages"])
                  for chat in coder.chats)
    assert longest <= 8192


def test_a_trial_of_tools_goes_on_as_an_agent_would(benched, quick):
    coder, _ = benched(coder=["one by one"])
    known = results(quick("bench", "--json", "--model", "coder"))["coder:30b"]
    assert known["tools"] == {"passed": 6, "asked": 6, "instead": ""}
    turns = [[message["role"] for message in chat["messages"]] for chat in coder.chats
             if "billing to error" in chat["messages"][0]["content"]]
    assert turns == [["user"], ["user", "assistant", "tool"],
                     ["user", "assistant", "tool", "assistant", "tool"]]


def test_bench_by_the_clock_says_so(benched, quick):
    benched(coder=["no counters"])
    done = quick("bench", "--model", "coder")
    assert "its speeds were timed here" in done.stdout
    assert "studio" not in done.stdout


def test_bench_keeps_what_the_others_gave_where_one_dies(benched, quick, tmp_path):
    benched(coder=["dies"])
    done = quick("bench", "--json")
    assert done.returncode == 1
    known = results(done)
    assert known["small:8b"]["tools"]["passed"] == 6
    assert known["coder:30b"]["failure"] and known["coder:30b"]["prompt_rate"] == 1000
    assert known["coder:30b"]["tools"] is None
    assert kept(tmp_path)["small:8b"].context == sf.Score(3, 3)
    assert kept(tmp_path)["coder:30b"].failure == known["coder:30b"]["failure"]


def test_bench_names_a_machine_that_does_not_answer(benched, quick, tmp_path):
    coder, _ = benched()
    coder.node.close()
    done = quick("bench", "--quick")
    assert done.returncode == 1
    assert "coder:30b on mini: measuring stopped: refused" in done.stdout
    assert kept(tmp_path).keys() == {"small:8b"}


def test_bench_names_a_model_that_is_not_there(benched, quick):
    coder, _ = benched()
    coder.node.answers["/api/chat"] = 404, {"error": "model 'coder:30b' not found"}
    done = quick("bench", "--quick")
    assert done.returncode == 1
    assert "model 'coder:30b' not found; type `ollama pull coder:30b` there" in done.stdout


def test_interrupted_bench_keeps_what_it_has(benched, quick, tmp_path, monkeypatch):
    coder, _ = benched(coder=["waits"])
    def interrupt(line, text):
        if coder.is_waiting.is_set() and "small " not in text:
            raise KeyboardInterrupt
    monkeypatch.setattr(sf.LiveLine, "show", interrupt)
    done = quick("bench")
    coder.goes_on.set()
    assert done.returncode == 130
    assert "what was measured is kept in .subagent-fleet/bench.json" in done.stderr
    known = kept(tmp_path)
    assert known["coder:30b"].prompt_rate == 1000 and known["coder:30b"].tools.asked == 1
    assert known["coder:30b"].failure == "interrupted"
    assert known["small:8b"].context == sf.Score(3, 3) and known["small:8b"].failure == ""


def test_bench_measures_one_model_of_two_names_once(benched, quick, tmp_path):
    coder, _ = benched()
    path = tmp_path / "fleet.yaml"
    text = path.read_text(encoding="utf-8")
    again = "  again: {node: mini, ollama_model: coder:30b, litellm_alias: c, context: 8192}\n"
    path.write_text(text.replace("models:\n", "models:\n" + again), encoding="utf-8")
    assert len(json.loads(quick("bench", "--quick", "--json").stdout)["measurements"]) == 2
    firsts = [chat for chat in coder.chats if "tools" in chat and len(chat["messages"]) == 1]
    assert len(firsts) == 3 and len(coder.chats) == 10, "quick asks ten questions"


def test_bench_asks_what_leaves_the_house_only_by_name(fake_node, quick, tmp_path):
    node = fake_node({"big:cloud": {}})
    Played(node)
    (tmp_path / "fleet.yaml").write_text(f"""\
project: {{name: x}}
nodes: {{mini: {{endpoint: "{node.endpoint}"}}}}
models: {{big: {{node: mini, ollama_model: "big:cloud", litellm_alias: a, cloud: true}}}}
agents: {{planner: {{model: big, description: d}}}}
""", encoding="utf-8")
    done = quick("bench", "--quick", "--trust")
    assert done.returncode == 0 and "name it with `--model`" in done.stdout
    assert node.asked("/api/chat") == []
    quick("bench", "--quick", "--model", "big", "--trust")
    assert node.asked("/api/chat") != []


def test_bench_sends_nothing_beyond_home_unasked(quick, tmp_path):
    (tmp_path / "fleet.yaml").write_text("""\
project: {name: x}
nodes: {far: {endpoint: "http://203.0.113.9:11434"}}
models: {m: {node: far, ollama_model: "x:8b", litellm_alias: a}}
agents: {planner: {model: m, description: d}}
""", encoding="utf-8")
    done = quick("bench")
    assert done.returncode == 3 and "you have not agreed to that" in done.stderr


@pytest.mark.parametrize("word", ["spare:3b", "SPARE:3b"])
def test_bench_measures_what_a_machine_has_beside_the_file(benched, quick, tmp_path, word):
    coder, _ = benched()
    coder.node.models["spare:3b"] = {}
    coder.node.models["far:cloud"] = {}
    assert list(results(quick("bench", "--quick", "--json", "--model", word))) == ["spare:3b"]
    assert kept(tmp_path)["spare:3b"].node == "mini"
    assert set(results(quick("bench", "--quick", "--json"))) == {"coder:30b", "small:8b"}
    assert set(results(quick("bench", "--quick", "--json", "--model", "coder:30b"))) == {"coder:30b"}
    done = quick("bench", "--model", "far:cloud")  # it would leave the house
    assert done.returncode == 2 and "unknown model `far:cloud`" in done.stderr
    done = quick("bench", "--exam", "--model", "spare:3b")  # which needs a route
    assert done.returncode == 2 and "unknown model" in done.stderr or "repository" in done.stderr


def test_bench_of_an_unknown_model_is_refused(benched, quick):
    benched()
    done = quick("bench", "--model", "codr")
    assert done.returncode == 2 and "did you mean `coder`?" in done.stderr


# -- the table --

TABLED = (MEASURED, sf.replace(
    MEASURED, node="laptop", model="qwen2.5-coder:7b", answer_rate=29.0, long_prompt_rate=None,
    tools=sf.Score(0, 6, sf.PRINTED_CALL), context=sf.Score(2, 3, "counted 4,096 of 8,000"),
    failure="refused: \x1b[2Jconnection refused"))


@pytest.mark.parametrize("columns", [60, 80, 100, 160])
def test_bench_table_fits_a_terminal(golden, columns):
    text = sf.format_measurements(TABLED, sf.Look(marks=True, columns=columns))
    assert all(sf.width_of(line) <= columns for line in text.splitlines())
    golden(f"bench/{columns}.txt", text)


def test_bench_table_in_a_pipe_is_plain():
    text = sf.format_measurements(TABLED)
    assert "█" not in text and "✓" not in text and "\x1b" not in text
    assert "printed the call as text" in text


def test_bench_of_machines_that_are_off_shows_no_empty_table():
    off = sf.Measurement(MEASURED.node, MEASURED.endpoint, MEASURED.model, failure="refused")
    text = sf.tell_measurements([off], sf.PLAIN)
    assert text.startswith("Nothing was measured:\n") and "refused" in text and "tok/s" not in text


@pytest.mark.parametrize("columns", [60, 20, 0])
def test_a_line_that_is_drawn_again_is_one(columns, capsys, monkeypatch):
    world = sf.World()
    monkeypatch.setattr(sf.World, "redraws", lambda self: True)
    monkeypatch.setattr(sf.World, "columns", property(lambda self: columns))
    with sf.LiveLine(world) as line:
        line.show("mini: \x1b[2J" + "x" * 99)
    shown, = capsys.readouterr().err.split("\r\x1b[K")[1:-1]
    assert "\x1b" not in shown and len(shown) == (columns or 80) - 1


def test_bench_sends_the_key_that_a_node_wants(benched, quick, tmp_path):
    coder, _ = benched()
    path = tmp_path / "fleet.yaml"
    text = path.read_text(encoding="utf-8").replace(
        f'{{endpoint: "{coder.node.endpoint}"}}',
        f'{{endpoint: "{coder.node.endpoint}", api_key_env: MINI_API_KEY}}')
    path.write_text(text, encoding="utf-8")
    state = {"HOME": tmp_path / "home", "XDG_STATE_HOME": tmp_path / "state"}

    refused = quick("bench", "--quick", env={**state, "MINI_API_KEY": "sk-made-up"})
    assert refused.returncode == 3 and coder.chats == []
    done = quick("bench", "--quick", "--trust", env={**state, "MINI_API_KEY": "sk-made-up"})
    assert done.returncode == 0 and len(coder.chats) > 9
    assert coder.node.keys.count("Bearer sk-made-up") >= len(coder.chats)
    assert "sk-made-up" not in done.stdout + done.stderr


# -- what others read of it --

def test_status_shows_what_was_measured(benched, quick, tmp_path):
    benched(coder=["prints"])
    before = json.loads(quick("status", "--json").stdout)["models"]
    assert [model["measured"] for model in before] == [None, None]
    quick("bench", "--quick")
    models = json.loads(quick("status", "--json").stdout)["models"]
    assert [model["measured"]["tools"]["passed"] for model in models] == [0, 3]
    assert models[0]["measured"]["prompt_rate"] == 1000


@pytest.mark.slow
def test_status_page_tells_speed_and_who_prints_calls():
    from test_terminal import page_of
    page = page_of()
    endpoint = page.states["laptop"].endpoint
    known = measured(node="laptop", endpoint=endpoint, model="qwen3:8b",
                     tools=sf.Score(1, 6, "printed the call as text"))
    text = sf.format_status(sf.replace(page, measured=(known,)), sf.Look(columns=140))
    assert re.search(r"On GPU +tok/s +Unloads", text)
    assert re.search(r"qwen3:8b +32,768 +100 % +58.1  never", text)
    assert re.search(r"nomic:1b +- +- +-  4 min", text)
    assert re.search(r"planner -> .*: ready; in `bench` it printed the call as text", text)
    fine = sf.replace(known, tools=sf.Score(4, 6, "x"))
    assert "in `bench`" not in sf.format_status(sf.replace(page, measured=(fine,)),
                                                sf.Look(columns=140))
    elsewhere = sf.replace(known, endpoint="http://10.9.9.9:11434")
    assert "tok/s" not in sf.format_status(sf.replace(page, measured=(elsewhere,)),
                                           sf.Look(columns=140))


# -- servers of other kinds --

class Served:
    """A server of another kind with a model that does all it is asked."""

    flaws = ()

    def __init__(self, provider):
        from test_backends import LLAMA, LLAMA_ONE, LLAMA_PROPS, PLAIN, VLLM, Server, Studio
        self.provider, self.asked, self.studio = provider, [], None
        pages, head = {"/version": (200, {"version": "0.28.0"}), "/v1/models": (200, VLLM)}, PLAIN
        self.model, self.limit = "qwen", 65536
        if provider == "llamacpp":
            pages, head = {"/props": (200, LLAMA_PROPS), "/v1/models": (200, LLAMA_ONE)}, LLAMA
            self.model, self.limit = "worker", 32768
        server = Server(pages, head)
        if provider == "lmstudio":
            self.studio = Studio()
            server, self.model = self.studio.server, "qwen/qwen3-30b"
        self.plain, self.node = server.play, server.node
        self.node.play = self.play
        self.endpoint = server.endpoint

    def play(self, node, connection):
        from matrix_cases import refusal_of, stream_of
        request = node.here.request
        if not node.here.target.endswith(("/messages", "/completions")):
            self.plain(node, connection)
            return

        self.asked.append(request)
        if self.studio:
            self.limit = self.studio.instances()[0]["config"]["context_length"]
        texts = [self.text_of(message) for message in request["messages"]]
        tokens = 10 + sum(len(text.split()) for text in texts)
        if tokens > self.limit:
            connection.sendall(refusal_of(
                self.provider, 400, f"request ({tokens} tokens) exceeds the available context "
                                    f"size ({self.limit} tokens)"))
            return
        calls, text = Played.say(self, texts, request)
        steps = [("call", *call) for call in calls] or [("text", text or "hm")]
        reason = "tool_use" if calls else "end_turn"
        connection.sendall(stream_of(self.provider, [*steps, ("end", reason, tokens, 20)]))

    def text_of(self, message):
        """All text of a message, whatever it is wrapped in."""
        content = message["content"]
        if isinstance(content, str):
            return content
        return " ".join(str(block.get("text") or block.get("content") or "") for block in content)


@pytest.mark.parametrize("provider, context", [
    ("llamacpp", 16384), ("lmstudio", 16384), ("vllm", 65536), ("openai", 16384)])
def test_bench_measures_servers_of_other_kinds(quick, tmp_path, provider, context):
    served = Served(provider)
    (tmp_path / "fleet.yaml").write_text(f"""\
project: {{name: x}}
nodes: {{mini: {{endpoint: "{served.endpoint}", provider: {provider}}}}}
models: {{m: {{node: mini, model: "{served.model}", alias: a, context: {context}}}}}
agents: {{planner: {{model: m, description: d}}}}
""", encoding="utf-8")
    done = quick("bench", "--json")
    (known,) = json.loads(done.stdout)["measurements"]
    assert (done.returncode, known["failure"]) == (0, "")
    assert known["tools"] == {"passed": 6, "asked": 6, "instead": ""}
    assert known["context"] == {"passed": 3, "asked": 3, "instead": ""}
    assert known["prompt_rate"] > 0 and known["long_prompt_rate"] > 0
    assert not known["is_counted"]
    if served.studio:  # loaded once, as its route will find it
        assert [each["config"]["context_length"] for each in served.studio.instances()] == [context]
        assert known["load_seconds"] >= 0
    else:
        assert known["load_seconds"] == 0


@pytest.mark.parametrize("is_stubborn", [False, True])
def test_field_that_a_server_does_not_take_is_left_out(is_stubborn):
    from matrix_cases import refusal_of
    served = Served("openai")

    def play(node, connection):
        if is_stubborn or "temperature" in node.here.request:
            connection.sendall(refusal_of("openai", 400, "Unsupported parameter: temperature"))
        else:
            served.play(node, connection)
    served.node.play = play
    subject = sf.Subject(sf.Model("m", "n", "qwen", "x"))
    given = sf.ask_model(sf.World(), sf.Node("n", served.endpoint, provider="openai"),
                         subject.model, sf.TOOL_TRIALS[0].ask(subject))
    if is_stubborn:
        assert given.missing.startswith("refused: Unsupported parameter: temperature")
    else:
        assert given.missing == "" and [call.name for call in given.calls] == ["set-log-level"]


# -- nodes that mean it badly --

END = {"done": True, "done_reason": "stop", "message": {"content": ""}}
HOSTILE = {
    "counts without end": [{**END, "prompt_eval_count": 10 ** 30, "eval_count": 10 ** 30,
                            "eval_duration": 10 ** 40}],
    "counts of nothing": [{**END, "prompt_eval_count": 0, "eval_count": 0, "eval_duration": 0}],
    "one token a prompt": [{**END, "prompt_eval_count": 1, "prompt_eval_duration": 1}],
    "a billion tokens": [{**END, "prompt_eval_count": 999_999_999, "eval_duration": 1,
                          "prompt_eval_duration": 1, "eval_count": 999_999_999}],
    "no end": [{"message": {"content": "x"}, "done": False}],
    "an error": [{"error": "out of \x1b[2Jmemory"}],
    "no object": [[1, 2], END],
    "calls of everything": [{"message": {"tool_calls": [
        {"function": {"name": "x" * 5000, "arguments": {"a" * 5000: "b" * 5000}}}] * 500}}, END],
    "escapes": [{"message": {"content": "\x1b]0;owned\x07 \u202e"}}, END],
    "a long word": [{"message": {"content": "x" * 2_000_000}}, END]}


@pytest.mark.slow
@pytest.mark.parametrize("lines", HOSTILE.values(), ids=HOSTILE)
def test_bench_of_a_node_that_means_it_badly_ends_and_stays_small(benched, quick, tmp_path, lines):
    coder, _ = benched()

    def chat(payload):
        if not payload["messages"]:
            return 200, {**END, "done_reason": "load"}
        return 200, lines
    coder.node.answers["/api/chat"] = chat
    done = quick("bench", "--model", "coder")
    assert done.returncode in (0, 1)
    assert "\x1b" not in done.stdout and "\x07" not in done.stdout and "\u202e" not in done.stdout
    assert all(len(payload_of(request)) < 60_000_000 for request in coder.node.requests)
    path = tmp_path / ".subagent-fleet" / "bench.json"
    assert not path.exists() or path.stat().st_size < 200_000
    assert done.stdout.count("coder:30b") >= 1


def payload_of(request):
    return json.dumps(request[1])


def test_bench_of_a_node_that_is_silent_gives_up_in_time(benched, quick, tmp_path):
    coder, _ = benched(coder=["waits"])
    path = tmp_path / "fleet.yaml"
    text = path.read_text(encoding="utf-8").replace("alias: a,", "alias: a, timeout: 1,")
    path.write_text(text, encoding="utf-8")
    done = quick("bench", "--json", "--quick")
    coder.goes_on.set()
    known = results(done)["coder:30b"]  # one trial was not answered; the machine lives on
    assert known["tools"]["passed"] == 2 and "timeout" in known["tools"]["instead"]
    assert known["context"]["passed"] == 2 and known["failure"] == ""


def test_progress_is_shown_on_a_terminal_and_taken_away(benched, quick, monkeypatch):
    coder, _ = benched(coder=["waits"])
    show = sf.LiveLine.show

    def go_on(line, text):
        show(line, text)
        if "coder tools" in text:
            coder.goes_on.set()
    monkeypatch.setattr(sf.LiveLine, "show", go_on)
    monkeypatch.setattr(sf.World, "is_terminal", lambda _, stream="stdout": stream == "stderr")
    done = quick("bench", "--quick")
    assert "\r\x1b[K  coder tools: " in done.stderr
    assert done.stderr.endswith("\r\x1b[K") and "tools: " not in done.stdout


def test_bench_leads_to_recommend_which_decides_by_it(benched, quick):
    benched(coder=["prints"])
    done = quick("bench", "--quick")
    assert done.stdout.endswith("\nNext: `subagent-fleet recommend`\n")
    report = json.loads(quick("recommend", "--json").stdout)
    planned = {row["role"]: row["planned"]["model"] for row in report["roles"] if row["planned"]}
    assert "coder:30b" not in planned.values(), planned
