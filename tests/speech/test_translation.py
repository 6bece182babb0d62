"""Translation: a Messages request to /api/chat, and its lines back to events."""
import base64
import collections
import copy
import json
import pathlib
import random
from types import SimpleNamespace

import pytest

import subagent_fleet as sf
from gateway_rig import fleet_of
from tools import grows_linearly, processor_seconds

WIRE = pathlib.Path(__file__).parents[1] / "cases" / "wire"
RECORDED = sorted(path.name for path in WIRE.glob("*.json"))
PIXELS = base64.b64encode(b"\x89PNG not really").decode()


def model(**more):
    return SimpleNamespace(**{**dict(node="mini", ollama_model="coder:7b", context=32768, max_output=4096,
                                     keep_alive=-1, thinking=False), **more})


def recorded(name):
    return json.loads((WIRE / name).read_text(encoding="utf-8"))["body"]


def talk_of(request):
    body = request if isinstance(request, bytes) else json.dumps(request).encode()
    return sf.Messages().parse(body)


def chat_of(request, chosen=None):
    """What Ollama is asked for a Messages request."""
    return sf.Ollama().chat(talk_of(request), chosen or model()).payload


def plan(*messages, chosen=None, **more):
    return chat_of({"model": "alias", "messages": list(messages), "max_tokens": 64, **more}, chosen)


class Answer:
    """A request and its answer: lines of Ollama in, events out; both writers must agree."""

    def __init__(self, request, chosen, estimate=99):
        self.talk = talk_of(request)
        self.reader = sf.Ollama().reader(self.talk, chosen, estimate)
        streamed = sf.replace(self.talk, is_stream=True)
        self.stream = sf.Messages().writes(streamed, "0")
        self.whole = sf.Messages().writes(sf.replace(self.talk, is_stream=False), "0")
        assert self.stream.is_stream and not self.whole.is_stream
        self.opening, self.message = events_in(self.stream.begin()), None

    def feed(self, line):
        written = b""
        for delta in self.reader.feed(line):
            if delta.end:
                self.message = json.loads(self.whole.end(delta.end))
                written += self.stream.end(delta.end)
            else:
                assert self.whole.write(delta) == b""
                written += self.stream.write(delta)
        return events_in(written)

    def refusal(self, status, words):
        return self.reader.refusal(status, words)


def events_in(sent):
    """The events of a stream; each is named as its data says."""
    events = []
    for block in sent.decode("ascii").split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data[len("data: "):]))
        assert (name, data[:6]) == (f"event: {events[-1]['type']}", "data: ")
    return events


def answer_to(*messages, chosen=None, estimate=99, **more):
    request = {"model": "alias", "messages": list(messages), "max_tokens": 64, **more}
    return Answer(request, chosen or model(), estimate)


def user(*content):
    return {"role": "user", "content": content_of(content)}


def assistant(*content):
    return {"role": "assistant", "content": content_of(content)}


def content_of(given):
    return given[0] if len(given) == 1 and not isinstance(given[0], dict) else list(given)


def text(words):
    return {"type": "text", "text": words}


def call(given, name="Bash", **arguments):
    return {"type": "tool_use", "id": given, "name": name, "input": arguments}


def result(given, content, **more):
    return {"type": "tool_result", "tool_use_id": given, "content": content, **more}


def said(chat):
    return [(message["role"], message["content"]) for message in chat["messages"]]


def refusal(*messages, **more):
    with pytest.raises(sf.Refusal) as caught:
        plan(*messages, **more)
    assert (caught.value.slug, caught.value.http) == ("api-error", 400)
    body = json.loads(sf.Messages().refuse(caught.value))
    assert body == {"type": "error", "error": {"type": "invalid_request_error",
                                               "message": caught.value.what}}
    return caught.value.what


# -- requests --

def test_recordings_are_there():
    assert len(RECORDED) == 4


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_request_becomes_a_chat_that_ollama_can_type(name):
    chat = chat_of(recorded(name))
    assert set(chat) == {"model", "stream", "truncate", "think", "keep_alive", "options",
                         "messages", "tools"}
    assert (chat["truncate"], chat["think"], chat["stream"]) == (False, False, True)
    assert [m["role"] for m in chat["messages"]][:2] == ["system", "user"]
    for message in chat["messages"]:
        assert isinstance(message["content"], str)
        for made in message.get("tool_calls", ()):
            assert isinstance(made["function"]["arguments"], dict)
    names = [tool["function"]["name"] for tool in chat["tools"]]
    assert "Bash" in names and "DeferredToolPlaceholder" not in names
    assert all(t["function"]["parameters"]["type"] == "object" for t in chat["tools"])


def test_recorded_system_message_reads_the_same_as_list_and_as_string():
    first, later = (chat_of(recorded(name)) for name in (
        "main-first.json", "main-after-subagent.json"))
    # The prompt cache of the node lives on this: what was said once must not move.
    assert later["messages"][:2] == first["messages"]
    assert later["messages"][1]["content"].index("# Environment") \
        < later["messages"][1]["content"].index("Dispatch the planner")


def test_options_are_those_of_the_route_and_the_request():
    chat = plan(user("hi"), max_tokens=99999, temperature=0.5, top_p=1, top_k=3,
                stop_sequences=["END"], chosen=model(context=65536, keep_alive="24h"))
    assert chat["options"] == {"num_ctx": 65536, "num_predict": 4096, "temperature": 0.5,
                               "top_p": 1, "top_k": 3}
    assert (chat["model"], chat["keep_alive"]) == ("coder:7b", "24h")
    assert plan(user("hi"), max_tokens=None)["options"] == {"num_ctx": 32768, "num_predict": 4096}


def test_thinking_is_the_configs_word_not_the_requests():
    asked = {"thinking": {"type": "adaptive"}}
    before = assistant({"type": "thinking", "thinking": "hm", "signature": ""}, text("yes"))
    silent = plan(user("hi"), before, user("and?"), **asked)
    assert silent["think"] is False and "thinking" not in silent["messages"][1]
    loud = plan(user("hi"), before, user("and?"), chosen=model(thinking=True))
    assert loud["think"] is True and loud["messages"][1]["thinking"] == "hm"


@pytest.mark.parametrize("system, wanted", [
    ("Be brief.", "Be brief."),
    ([text("One."), text("\nTwo."), text("Three.")], "One.\nTwo.\n\nThree."),
    ([text("x-anthropic-billing-header: cc_version=1;"), text("Be brief.")], "Be brief."),
    (None, None), ("", None), ([], None),
])
def test_system_prompt(system, wanted):
    messages = said(plan(user("hi"), system=system))
    assert messages == ([("system", wanted)] if wanted else []) + [("user", "hi")]


@pytest.mark.parametrize("turns, wanted", [
    ([user("hi"), {"role": "system", "content": "Env"}],
     [("user", "<system-reminder>\nEnv\n</system-reminder>\n\nhi")]),
    ([user("hi"), {"role": "system", "content": [text("Env")]}, user("more")],
     [("user", "<system-reminder>\nEnv\n</system-reminder>\n\nhi\n\nmore")]),
    ([{"role": "system", "content": "Env"}, user("hi")],
     [("user", "<system-reminder>\nEnv\n</system-reminder>\n\nhi")]),
    ([user("hi"), assistant("yo"), {"role": "system", "content": "Env"}, user("so?")],
     [("user", "hi"), ("assistant", "yo"),
      ("user", "<system-reminder>\nEnv\n</system-reminder>\n\nso?")]),
    ([user("hi"), assistant("yo"), {"role": "system", "content": "Env"}],
     [("user", "hi"), ("assistant", "yo"), ("user", "<system-reminder>\nEnv\n</system-reminder>")]),
    ([user("hi"), assistant(call("a")), user(result("a", "ok")),
      {"role": "system", "content": "Env"}],
     [("user", "hi"), ("assistant", ""),
      ("tool", "ok\n\n<system-reminder>\nEnv\n</system-reminder>")]),
    ([user("hi"), assistant(call("a")), user(result("a", "ok"), text("now?")),
      {"role": "system", "content": "Env"}],
     [("user", "hi"), ("assistant", ""), ("tool", "ok"),
      ("user", "<system-reminder>\nEnv\n</system-reminder>\n\nnow?")]),
])
def test_system_message_in_the_middle_goes_before_the_users_own_words(turns, wanted):
    assert said(plan(*turns)) == wanted


@pytest.mark.parametrize("turns, wanted", [
    ([user("a"), user("b")], [("user", "a\n\nb")]),
    ([user("a"), assistant(""), user("b")], [("user", "a\n\nb")]),
    ([user("a"), assistant([]), assistant("x"), assistant("y")],
     [("user", "a"), ("assistant", "x\n\ny")]),
    ([user(text("a"), text("b\n"), text("c"))], [("user", "a\n\nb\nc")]),
    ([user("a"), {"role": "assistant", "content": None}], [("user", "a")]),
    ([user("a"), user(result("lost", "42"))], [("user", "[result of an earlier call]\n42\n\na")]),
    ([user("a"), assistant(call("c1")), user("never mind")],
     [("user", "a"), ("assistant", ""), ("tool", "(no result)"), ("user", "never mind")]),
])
def test_crooked_histories_are_mended(turns, wanted):
    assert said(plan(*turns)) == wanted


def test_calls_and_results_keep_their_ids_and_names():
    chat = plan(user("go"), assistant(text("ok"), call("t1", command="ls"), call("t2", "Read")),
                user(result("t2", [text("two")]), result("t1", "one")))
    assert chat["messages"][1] == {"role": "assistant", "content": "ok", "tool_calls": [
        {"id": "t1", "function": {"name": "Bash", "arguments": {"command": "ls"}}},
        {"id": "t2", "function": {"name": "Read", "arguments": {}}}]}
    assert chat["messages"][2:] == [
        {"role": "tool", "tool_call_id": "t1", "tool_name": "Bash", "content": "one"},
        {"role": "tool", "tool_call_id": "t2", "tool_name": "Read", "content": "two"}]


def test_duplicate_and_missing_ids_become_unique_and_stay_paired():
    chat = plan(user("go"), assistant(call("x"), call("x"), call("")),
                user(result("x", "1"), result("x", "2"), result("", "3")),
                assistant(call("x")), user(result("x", "4")))
    made = [c["id"] for m in chat["messages"] for c in m.get("tool_calls", ())]
    answered = {m["tool_call_id"]: m["content"] for m in chat["messages"] if m["role"] == "tool"}
    assert len(set(made)) == 4
    assert [answered[given] for given in made] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("given, wanted", [
    (None, {}), ([1], {"input": [1]}), ("x", {"input": "x"}), ({"a": 1}, {"a": 1})])
def test_arguments_are_always_an_object(given, wanted):
    made = plan(user("go"), assistant({**call("a"), "input": given}))["messages"][1]["tool_calls"]
    assert made[0]["function"]["arguments"] == wanted


@pytest.mark.parametrize("content, more, wanted", [
    ("boom", {"is_error": True}, "Error: boom"),
    ("Error: boom", {"is_error": True}, "Error: boom"),
    ("fine", {"is_error": False}, "fine"),
    ([], {}, ""), (None, {}, ""),
    ([{"type": "tool_reference", "tool_name": "Web"}], {}, "The tool `Web` can be called now."),
    ([{"type": "document", "title": "T", "source": {"type": "text", "data": "D"}}], {}, "T\n\nD"),
])
def test_tool_results(content, more, wanted):
    chat = plan(user("go"), assistant(call("a")), user(result("a", content, **more)))
    assert chat["messages"][-1]["content"] == wanted


@pytest.mark.parametrize("block, wanted", [
    ({"type": "document", "source": {"type": "text", "data": "words"}}, "words"),
    ({"type": "document", "source": {"type": "content", "content": [text("in")]}}, "in"),
    ({"type": "document", "title": "a.pdf", "source": {"type": "base64", "data": "JVBE"}},
     "a.pdf\n\n(a file of which only the bytes were sent was left out)"),
    ({"type": "search_result", "title": "T", "content": [text("found")]}, "T\n\nfound"),
    ({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, ""),
    ({"type": "redacted_thinking", "data": "xx"}, ""),
    ({"type": "never heard of"}, ""),
])
def test_other_blocks(block, wanted):
    words = f"see\n\n{wanted}" if wanted else "see"
    assert said(plan(user(text("see"), block))) == [("user", words)]


def test_images_travel_beside_the_text():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                         "data": PIXELS[:8] + "\n" + PIXELS[8:]}}
    messages = [user(text("what is it?"), image), assistant(call("a")), user(result("a", [image]))]
    chat = plan(*messages)
    talk = talk_of({"model": "x", "messages": messages})
    body = sf.render_json(chat)
    assert chat["messages"][0]["images"] == [PIXELS]
    assert chat["messages"][2]["images"] == [PIXELS]
    assert talk.images() == [PIXELS, PIXELS]
    assert sf.weigh(body, talk) == len(body) - 2 * len(PIXELS) + 2 * sf.IMAGE_WEIGHT


@pytest.mark.parametrize("messages, more, words", [
    ([], {}, "at least one message"),
    ([user("")], {}, "at least one message"),
    (["hi"], {}, "messages.0"),
    ([{"role": "developer", "content": "x"}], {}, "messages.0: expected the role"),
    ([user("hi"), user(5)], {}, "messages.1: expected text"),
    ([{"role": "user", "content": ["hi"]}], {}, "messages.0: expected text or a list"),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], {}, "`text` of a block"),
    ([user("hi")], {"max_tokens": 0}, "max_tokens: must be at least 1"),
    ([user("hi")], {"max_tokens": True}, "max_tokens: expected a whole number"),
    ([user("hi")], {"temperature": "hot"}, "temperature"),
    ([user("hi")], {"stop_sequences": [1]}, "stop_sequences"),
    ([user("hi")], {"tools": {}}, "tools"),
    ([user("hi")], {"model": None}, "model"),
    ([{"role": "user", "content": [{"type": "image", "source": {
        "type": "base64", "data": "%%%"}}]}], {}, "not valid base64"),
])
def test_what_cannot_be_fixed_is_refused(messages, more, words):
    assert words in refusal(*messages, **more)


@pytest.mark.parametrize("body", [
    b"", b"null", b"[]", b"{", b"\xff\xfe{}", b'{"model":NaN}', b"[" * 100_000, b'"x"',
    b'{"model":"a","messages":[{"role":"user","content":"x"}],"temperature":1e999}',
    b'{"model":"a","messages":[],"top_k":' + b"9" * 5000 + b"}",
])
def test_broken_bodies_are_refused(body):
    with pytest.raises(sf.Refusal) as caught:
        talk_of(body)
    assert caught.value.http == 400


def test_a_body_of_nothing_but_marks_is_refused_before_it_is_read():
    lists = b"[]," * (sf.PROMPT_MARKS // 2)
    for extra, http in ((b"[" + b"," * 99, 413), (b"x" * 999, 400)):
        with pytest.raises(sf.Refusal) as caught:
            talk_of(lists + extra)
        assert caught.value.http == http


@pytest.mark.slow
def test_infinity_deep_inside_and_endless_nesting_are_refused():
    body = b'{"model":"a","messages":[{"role":"assistant","content":[{"type":"tool_use","id":"x",' \
           b'"name":"y","input":{"n":1e999}}]}]}'
    with pytest.raises(sf.Refusal):
        chat_of(body)


def test_lone_surrogates_survive():
    chat = plan({"role": "user", "content": "\ud83d"})
    assert b"\\ud83d" in sf.render_json(chat)


@pytest.mark.parametrize("body", [
    b'{"model":"a","messages":[{"role":"assistant","content":[{"type":"tool_use","id":"x",'
    b'"name":"y","input":{"a":%b}}]}]}', b'{"model":"a","messages":[{"role":"user","content":"x"}],'
    b'"tools":[{"name":"b","input_schema":{"items":%b}}]}'])
@pytest.mark.parametrize("opening, closing", [(b"[", b"]"), (b'{"items":', b"}"),
                                              (b'{"anyOf":[', b"]}")])
def test_nesting_of_any_depth_is_asked_or_refused(body, opening, closing):
    """From Python 3.12 on, far more levels can be parsed than be followed or rendered."""
    server = sf.Server(fleet_of(("m", "a", "x", {})), "sk-test", sf.World())
    chosen = server.fleet.models["m"]
    for depth in (10, 450, 490, 900, 970, 980, 985, 990, 1000, 3000, 5000, 9000):
        try:
            talk = talk_of(body % (opening * depth + b"{}" + closing * depth))
            assert server.translate(talk, chosen).body
            asked = depth
        except sf.Refusal as error:
            assert error.http == 400 and error.what.startswith("body: ")
    assert asked >= 450


def test_no_endless_number_is_ever_made(monkeypatch):
    """int() of 2,000,000 digits takes 74 s on a Python before 3.10.7, such as macOS's own."""
    made = []

    class Watched(int):
        def __new__(cls, digits):
            made.append(len(digits))
            return int(digits)
    endless = b"9" * 2_000_000
    body = b'{"max_tokens":12,"model":"a","messages":[],"n":%b}' % endless
    sent = b'{"eval_count":12,"message":{"content":"x"},"prompt_eval_count":%b}' % endless
    reader = answer_to(user("hi")).reader
    monkeypatch.setattr(sf, "int", Watched, raising=False)
    with pytest.raises(sf.Refusal):
        talk_of(body)
    with pytest.raises(sf.NodeFailure):
        reader.feed(sent)
    with pytest.raises(sf.NodeFailure, match="its JSON is broken"):
        sf.parse_answer(sent, sf.Ollama())
    assert made == [2, 2, 2], "one number of two digits each"


def crowd(count, *, own_ids):
    """A request with so many calls and their results."""
    ids = [f"id{number if own_ids else ''}" for number in range(count)]
    return json.dumps({"model": "a", "messages": [
        user("go"), assistant(*(call(own_id) for own_id in ids)),
        user(*(result(own_id, "r") for own_id in ids))]}).encode()


@pytest.mark.slow
@pytest.mark.parametrize("large, own_ids", [(5_000, False), (20_000, True)])
def test_many_calls_take_no_more_than_their_number(large, own_ids):
    bodies = {count: crowd(count, own_ids=own_ids) for count in (large // 4, large)}
    assert grows_linearly(lambda count: chat_of(bodies[count]), large // 4, large)
    messages = chat_of(bodies[large])["messages"]
    made = [entry["id"] for entry in messages[1]["tool_calls"]]
    assert len(set(made)) == large
    assert [message["tool_call_id"] for message in messages[2:]] == made


@pytest.mark.slow
def test_many_calls_of_one_answer_take_no_more_than_their_number():
    def answer(count):
        _, events = answer_of(line(calls=[made_call()] * count, done=True))
        assert len({event["content_block"]["id"] for event in events
                    if event["type"] == "content_block_start"}) == count
    assert grows_linearly(answer, 1_500, 6_000)


@pytest.mark.slow
def test_documents_in_documents_take_no_more_than_their_size():
    words = [text("a")] * 40_000

    def body(depth):
        inside = words
        for _ in range(depth):
            inside = [{"type": "document", "source": {"type": "content", "content": inside}}]
        return json.dumps({"model": "a", "messages": [user(*inside)]}).encode()
    bodies = {depth: body(depth) for depth in (1, 300)}
    least, deep = (min(processor_seconds(talk_of, bodies[depth]) for _ in range(4))
                   for depth in (1, 300))
    assert deep < 2.5 * least, "it does not depend on how deep they stand"


def test_endless_stop_sequences_are_refused():
    most = ["s" * sf.STOP_LIMIT_CHARACTERS] * sf.STOPS_LIMIT
    assert plan(user("hi"), stop_sequences=most)
    for stops in (["s" * 1_000_000], [*most, "x"], ["s" * (sf.STOP_LIMIT_CHARACTERS + 1)]):
        assert "at most 64, each of at most 1,000 characters" in refusal(
            user("hi"), stop_sequences=stops)


def test_many_stop_sequences_take_no_more_than_the_text():
    stops = ["s" * (sf.STOP_LIMIT_CHARACTERS - number) + "t" for number in range(1, 65)]

    def answer(count):
        reader = answer_to(user("hi"), stop_sequences=stops).reader
        told = [delta.text for _ in range(count) for delta in reader.feed(line("s" * 10))]
        held = sf.STOP_LIMIT_CHARACTERS - 1
        assert len("".join(told)) == count * 10 - held
    assert grows_linearly(answer, 150, 600)


# -- tools --

def tools_of(*tools, messages=(), **more):
    chat = plan(user("hi"), *messages, tools=list(tools), **more)
    return {t["function"]["name"]: t["function"]["parameters"] for t in chat.get("tools", ())}


OBJECT = {"type": "object", "properties": {}}
TEXT, ANY = {"type": "string"}, {"description": "anything"}


@pytest.mark.parametrize("schema, wanted", [
    (None, OBJECT), ({}, OBJECT), ("x", OBJECT), ({"type": ["object", "null"]}, OBJECT),
    ({"type": "string"}, OBJECT), ({"properties": None}, OBJECT),
    ({"properties": {"a": True, "b": {"type": 5, "description": 5, "enum": "x"}}},
     {"type": "object", "properties": {"a": ANY, "b": ANY}}),
    ({"required": ["a", 5], "properties": {"a": {"type": ["string", 5]}}},
     {"type": "object", "required": ["a"], "properties": {"a": TEXT}}),
    ({"required": "a", "properties": {"a": {"anyOf": [TEXT, None]}}},
     {"type": "object", "properties": {"a": {"anyOf": [TEXT, ANY]}}}),
])
def test_one_bad_schema_does_not_fail_the_request(schema, wanted):
    shown = tools_of({"name": "bad", "input_schema": schema}, {"name": "good"}, {"name": ""}, 5)
    assert shown == {"bad": wanted, "good": OBJECT}


@pytest.mark.parametrize("part, wanted", [
    ({"type": "date"}, ANY), ({"type": ["date", "null"]}, {"type": "null"}), ({"type": []}, ANY),
    ({"type": ["string", "null"]}, {"type": ["string", "null"]}),
    ({**TEXT, "pattern": "a+"}, TEXT), ({**TEXT, "minLength": 5, "maxLength": 1}, TEXT),
    ({"oneOf": [True, TEXT]}, {"anyOf": [ANY, TEXT]}), ({"anyOf": []}, ANY),
    ({"const": "x", "format": 5}, {"const": "x"}), ({"items": {"items": False}}, {"items": {
        "items": ANY}}),
    ({"properties": {"y": True}, "required": [5]}, {"properties": {"y": ANY}}),
    ({"properties": {"$ref": TEXT, "y": TEXT}}, {"properties": {"y": TEXT}}),
    ({"type": "object", "additionalProperties": {"type": "date"}}, {"type": "object"}),
    ({"$ref": "#/$defs/d"}, {"$ref": "#/$defs/d"}), ({"$ref": "#/properties/x"},) * 2,
    ({"$ref": "#/definitions/d"}, {"$ref": "#/$defs/d"}), ({"$ref": "#/$defs/lost"}, ANY),
    ({"$ref": "other.json"}, ANY), ({"$ref": 5}, ANY), (True, ANY), ("string", ANY), ([TEXT], ANY),
])
@pytest.mark.parametrize("definitions", ["$defs", "definitions"])
def test_a_schema_is_fixed_wherever_it_stands(part, wanted, definitions):
    """What Ollama 0.32.15 or its engine answers 400 to; tests/live asks the real one."""
    array = {"type": "array", "items": part}
    shown = tools_of({"name": "a", "input_schema": {
        definitions: {"d": TEXT, "e": part}, "properties": {"x": array, "y": {"anyOf": [array]}}}})
    fixed = {"type": "array", "items": wanted}
    assert shown["a"] == {"type": "object", "$defs": {"d": TEXT, "e": wanted}, "properties": {
        "x": fixed, "y": {"anyOf": [fixed]}}}


def test_server_tools_stay_out_and_deferred_ones_until_found_or_called():
    tools = [{"name": "web_search", "type": "web_search_20250305"}, {"name": "a", "type": "custom"},
             {"name": "late", "defer_loading": True}, {"name": "later", "defer_loading": True},
             {"name": "never", "defer_loading": True}]
    assert list(tools_of(*tools)) == ["a"]
    found = [assistant(call("s", "ToolSearch")),
             user(result("s", [{"type": "tool_reference", "tool_name": "late"}])),
             assistant(call("l", "later")), user(result("l", "ok"))]
    assert list(tools_of(*tools, messages=found)) == ["a", "late", "later"]


def test_tool_choice_is_honoured_as_far_as_it_goes():
    tools = [{"name": "a"}, {"name": "b"}]
    assert tools_of(*tools, tool_choice={"type": "none"}) == {}
    assert list(tools_of(*tools, tool_choice={"type": "any"})) == ["a", "b"]
    assert list(tools_of(*tools, tool_choice={"type": "tool", "name": "b"})) == ["b"]
    chat = plan(user("hi"), tools=tools, tool_choice={"type": "tool", "name": "b"})
    assert "calling the tool `b`" in chat["messages"][0]["content"]
    assert chat["messages"][0]["content"].endswith("\n\nhi")


# -- answers --

def line(content="", *, thinking=None, calls=(), done=False, **more):
    message = {"role": "assistant", "content": content}
    message.update({"thinking": thinking} if thinking else {})
    message.update({"tool_calls": list(calls)} if calls else {})
    last = {"done_reason": "stop", "prompt_eval_count": 11, "eval_count": 7} if done else {}
    return json.dumps({"message": message, "done": done, **last, **more}).encode()


def made_call(name="Bash", given="call_1", **arguments):
    return {"id": given, "function": {"index": 0, "name": name, "arguments": arguments}}


def answer_of(*lines, before=(), **more):
    answer = answer_to(user("hi"), *before, **more)
    events = answer.opening + [event for item in lines for event in answer.feed(item)]
    check_grammar(events)
    assert fold(events) == answer.message
    return answer.message, events


BEGINS = {"text": {"type": "text", "text": ""}, "tool_use": {"type": "tool_use", "input": {}},
          "thinking": {"type": "thinking", "thinking": "", "signature": ""}}
GROWS = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
REASONS = ("end_turn", "max_tokens", "stop_sequence", "tool_use")


def check_grammar(events, *, ended=True):
    """Blocks open, grow and close one after the other; the stream ends once, or was broken off."""
    first, *blocks = events
    assert first["type"] == "message_start" and first["message"]["content"] == []
    if ended:
        *blocks, last, stop = blocks
        assert (last["type"], stop) == ("message_delta", {"type": "message_stop"})
        assert set(last) == {"type", "delta", "usage"}
        reason, at = last["delta"]["stop_reason"], last["delta"]["stop_sequence"]
        assert reason in REASONS and (at is not None) is (reason == "stop_sequence")
        assert set(last["usage"]) == {"input_tokens", "output_tokens"}
        assert all(type(count) is int and 0 <= count < 10 ** 9
                   for count in last["usage"].values())

    opened, index = "", -1
    for event in blocks:
        if event["type"] == "content_block_start":
            assert not opened and event["index"] == index + 1
            block = event["content_block"]
            opened, index, pieces = block["type"], event["index"], []
            names = {key: block.pop(key) for key in ("id", "name") if opened == "tool_use"}
            assert block == BEGINS[opened] and all(names.values())
            block.update(names)
        elif event["type"] == "content_block_delta":
            key = GROWS[opened]
            kind = "input_json" if opened == "tool_use" else opened
            assert event["index"] == index and set(event["delta"]) == {"type", key}
            assert event["delta"]["type"] == f"{kind}_delta" and event["delta"][key]
            pieces.append(event["delta"][key])
        else:
            assert (event["type"], event["index"]) == ("content_block_stop", index)
            assert opened and pieces
            assert opened != "tool_use" or type(json.loads("".join(pieces))) is dict
            opened = ""
    assert not (ended and opened)


def fold(events):
    """Put a Message together as Anthropic's SDK does."""
    message = copy.deepcopy(events[0]["message"])
    for event in copy.deepcopy(events):
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
            grown = ""
        elif event["type"] == "content_block_delta":
            grown += [v for k, v in event["delta"].items() if k != "type"][0]
        elif event["type"] == "content_block_stop":
            block = message["content"][event["index"]]
            if block["type"] == "tool_use":
                block["input"] = json.loads(grown)
            else:
                block[block["type"]] = grown
        elif event["type"] == "message_delta":
            message.update(event["delta"])
            message["usage"].update(event["usage"])
    return message


def blocks_of(*lines, **more):
    message, _ = answer_of(*lines, line(done=True), **more)
    return [(block["type"], block.get("text", block.get("thinking", block.get("input"))))
            for block in message["content"]]


def test_text_thinking_and_calls_keep_their_order():
    calls = [made_call(command="ls"), made_call("Read", "c2")]
    assert blocks_of(line(thinking="let "), line(thinking="me"), line("Now"), line(" so"),
                     line(calls=calls), line("done?")) == [
        ("thinking", "let me"), ("text", "Now so"), ("tool_use", {"command": "ls"}),
        ("tool_use", {}), ("text", "done?")]


def test_usage_and_stop_reason_arrive_at_the_end():
    message, events = answer_of(line("PONG"), line(done=True))
    assert message["stop_reason"] == "end_turn" and message["model"] == "alias"
    assert (message["usage"]["input_tokens"], message["usage"]["output_tokens"]) == (11, 7)
    assert events[-2]["usage"] == {"input_tokens": 11, "output_tokens": 7}


@pytest.mark.parametrize("reason, calls, wanted", [
    ("stop", (), "end_turn"), ("length", (), "max_tokens"), ("stop", [made_call()], "tool_use"),
    ("length", [made_call()], "tool_use"), ("load", (), "end_turn"),
    (None, (), "end_turn"), (5, (), "end_turn")])
def test_stop_reasons(reason, calls, wanted):
    message, _ = answer_of(line(calls=calls, done=True, done_reason=reason))
    assert message["stop_reason"] == wanted


@pytest.mark.parametrize("stops, words, text, stopped", [
    (["three"], "one two three four", "one two ", "three"),
    (["four", "three"], "one two three four", "one two ", "three"),
    (["</b>", "<b>"], "a < b </b", "a < b </b", None),
    (["ab", "abc"], "xabc", "x", "ab"), (["", "z"], "abc", "abc", None),
    (["think"], "<think>I think</think>so think", "so ", "think"),
    (["a"], "a", "", "a"),
])
def test_stop_sequences_end_the_text_wherever_the_chunks_end(stops, words, text, stopped):
    for size in (1, 2, 3, 100):
        answer = answer_to(user("hi"), stop_sequences=stops)
        events = list(answer.opening)
        for item in [line(words[at:at + size]) for at in range(0, len(words), size)] \
                + [line(done=True)]:
            if answer.message is None:
                events += answer.feed(item)
        check_grammar(events)
        message = fold(events)
        assert message == answer.message
        assert "".join(b["text"] for b in message["content"] if b["type"] == "text") == text
        reason = "stop_sequence" if stopped else "end_turn"
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, stopped)
        assert message["usage"]["input_tokens"] == (99 if stopped else 11)


@pytest.mark.parametrize("words, wanted", [
    ("<think>a b</think>\n\nYes", [("thinking", "a b"), ("text", "Yes")]),
    ("\n <think>\n\n</think>\n\nYes", [("text", "Yes")]),
    ("<think>never closed </thin", [("thinking", "never closed </thin")]),
    ("<thinking> is a tag", [("text", "<thinking> is a tag")]),
    ("Say <think>x</think>", [("text", "Say <think>x</think>")]),
    ("  \n  indented", [("text", "  \n  indented")]),
    ("<think>a</thought></think>b</think>c", [("thinking", "a</thought>"), ("text", "b</think>c")]),
    ("<thi", [("text", "<thi")]), ("   ", [("text", "   ")]),
    ("<think>only</think>", [("thinking", "only")]),
])
def test_printed_think_tags_become_blocks_wherever_the_chunks_end(words, wanted):
    for size in (1, 2, 3, 5, 7, 100):
        pieces = [line(words[at:at + size]) for at in range(0, len(words), size)]
        assert blocks_of(*pieces) == wanted, size


def test_call_ids_that_are_missing_or_used_before_are_replaced():
    before = [assistant(call("call_1")), user(result("call_1", "x"))]
    message, _ = answer_of(line(calls=[made_call(), made_call(given="new"), made_call(given="new"),
                                       made_call(given=None)], done=True), before=before)
    given = [block["id"] for block in message["content"]]
    assert given[1] == "new" and len(set(given)) == 4 and "call_1" not in given


def test_calls_beyond_one_are_dropped_where_the_client_wants_one():
    calls = [made_call(), made_call(given="b")]
    message, _ = answer_of(line(calls=calls, done=True),
                           tool_choice={"disable_parallel_tool_use": True})
    assert len(message["content"]) == 1


@pytest.mark.parametrize("arguments, wanted", [
    ('{"a":1}', ("tool_use", {"a": 1})), ("nonsense", ("text", "nonsense")), (None, ("tool_use", {})),
    ([1], ("text", "[1]"))])
def test_arguments_that_are_not_an_object_are_no_call(arguments, wanted):
    made = {"id": "c", "function": {"name": "x", "arguments": arguments}}
    (kind, told), = blocks_of(line(calls=[made, 5, {"function": 5}]))
    assert (kind, told.split("\n")[-1] if kind == "text" else told) == wanted


@pytest.mark.parametrize("sent", [
    b"", b"garbage", b"[]", b"NaN", b'{"error":"boom"}', b'{"error":{"x":1}}', b"\xff",
    b"{" * 9999])
def test_garbage_of_a_node_is_one_clean_error(sent):
    with pytest.raises((sf.Refusal, sf.NodeFailure)) as caught:
        answer_of(sent)
    if isinstance(caught.value, sf.Refusal):
        assert (caught.value.http, caught.value.kind) == (500, "api_error")
    else:
        assert caught.value.reason == "bad answer"


@pytest.mark.parametrize("sent", [
    {}, {"message": None}, {"message": {"content": 5, "thinking": [], "tool_calls": None}},
    {"message": {"content": None, "tool_calls": [None]}}, {"done": "yes"}])
def test_odd_lines_say_nothing(sent):
    assert blocks_of(json.dumps(sent).encode()) == []


@pytest.mark.parametrize("status, words, http, kind, told", [
    (400, "request (302 tokens) exceeds the available context size (256 tokens), try increasing it",
     400, "invalid_request_error", "prompt is too long: 302 tokens > 256 maximum"),
    (500, "exceeds the available context size (32768 tokens)", 400, "invalid_request_error",
     "prompt is too long: 50000 tokens > 32768 maximum"),
    (400, "the input length exceeds the context length", 400, "invalid_request_error",
     "prompt is too long: 50000 tokens > 4096 maximum"),
    (400, '"x" does not support tools', 400, "invalid_request_error",
     'node mini, model coder:7b: "x" does not support tools'),
    (500, "image input is not supported - hint", 400, "invalid_request_error",
     "node mini, model coder:7b: image input is not supported - hint"),
    (404, "model 'x' not found", 404, "not_found_error",
     "node mini, model coder:7b: model 'x' not found; type `ollama pull coder:7b` there"),
    (503, "server busy", 529, "overloaded_error", "node mini, model coder:7b: server busy"),
    (500, "", 500, "api_error",
     "node mini, model coder:7b: it answered 500; Ollama's log there says more"),
    (302, "odd", 500, "api_error", "node mini, model coder:7b: odd; Ollama's log there says more"),
])
def test_what_a_node_says_becomes_what_the_client_acts_on(status, words, http, kind, told):
    answer = answer_to(user("hi"), chosen=model(context=4096), estimate=50000)
    error = answer.refusal(status, words)
    assert (error.http, error.kind, error.what) == (http, kind, told)


def test_the_words_of_an_engine_are_taken_out_of_their_json():
    wrapped = json.dumps({"error": {"code": 400, "message": "no room", "type": "x"}})
    for error in ("no room", {"message": "no room"}, wrapped, json.dumps({"error": wrapped})):
        assert sf.error_text(error) == "no room"
    assert sf.error_text({}) == "{}" and sf.error_text('{"x": 1}') == "an error without words"
    assert sf.error_text(5) == "5" and len(sf.error_text("x" * 9999)) == 500
    with pytest.raises(sf.Refusal, match="node mini, model coder:7b: no room; "):
        answer_of(json.dumps({"error": wrapped}).encode())


def test_a_model_that_takes_no_images_is_told_where_they_were():
    image = {"type": "image", "source": {"type": "base64", "data": PIXELS}}
    request = {"model": "x", "messages": [user(text("see"), image), assistant(call("a")),
                                          user(result("a", [image, image])), assistant("so"),
                                          user("on")]}
    seeing = talk_of(request)
    blind = seeing.without_images()
    assert len(seeing.images()) == 3 and not blind.images()
    chat = sf.Ollama().chat(blind, model()).payload
    assert b"images" not in sf.render_json(chat)
    note = "(an image was left out: this model takes none)"
    assert [content for _, content in said(chat)] \
        == [f"see\n\n{note}", "", note, "so", "on"]


# -- whatever arrives --

MUTATED_REQUESTS, MUTATED_LINES = 20_000, 50_000

ODD = (None, True, 0, -1, 1.5, 1e308, "", "x", "\ud800", [], [[]], {}, {"type": "text"}, [None],
       {"type": "tool_use", "id": []}, {"type": ["text"]}, "a" * 5000, [{"type": "tool_result"}])


def spots(value, found):
    for key in (value if isinstance(value, dict) else range(len(value))):
        found.append((value, key))
        if isinstance(value[key], (dict, list)) and value[key]:
            spots(value[key], found)
    return found


def mutate(chance, value):
    for _ in range(chance.choice((1, 1, 2, 5))):
        place, key = chance.choice(spots(value, []))
        act = chance.randrange(4)
        if act == 0:
            del place[key]
        elif act == 1 and isinstance(place, list):
            place.insert(key, copy.deepcopy(place[key]))
        elif act == 2 and isinstance(place, dict):
            place[chance.choice(("type", "content", "id", "name", "role"))] = place[key]
        else:
            place[key] = copy.deepcopy(chance.choice(ODD))
    return value


def small_recordings():
    """The recorded requests without their bulk, and one of every kind of block, as JSON."""
    found = [shortened(recorded(name)) for name in RECORDED]
    for request in found:
        del request["tools"][2:]
    image = {"type": "image", "source": {"type": "base64", "data": PIXELS}}
    found.append({"model": "a", "max_tokens": 9, "system": [text("s")], "temperature": 1,
                  "tool_choice": {"type": "tool", "name": "b"}, "stop_sequences": ["x"],
                  "tools": [{"name": "b", "defer_loading": True, "input_schema": {
                      "type": "object", "properties": {"a": {"anyOf": [{"type": "string"}]}},
                      "required": ["a"]}}],
                  "messages": [user(text("a"), image, {"type": "document", "source": {
                      "type": "content", "content": [text("d")]}}),
                      assistant({"type": "thinking", "thinking": "t"}, call("1", "b", a="x")),
                      user(result("1", [text("r"), image, {
                          "type": "tool_reference", "tool_name": "b"}], is_error=True)),
                      {"role": "system", "content": [text("z")]}]})
    return [json.dumps(request) for request in found]


def shortened(value):
    """A JSON value whose texts are short: what is mutated is their shape."""
    if isinstance(value, dict):
        return {key: shortened(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shortened(inner) for inner in value]
    return value[:20] if isinstance(value, str) else value


@pytest.mark.slow
def test_mutated_requests_are_translated_or_refused_cleanly():
    chance, seeds, refused = random.Random(7), small_recordings(), 0
    chosen = model(thinking=True)
    for number in range(MUTATED_REQUESTS):
        body = json.dumps(mutate(chance, json.loads(seeds[number % len(seeds)]))).encode()
        if number % 10 == 0:
            body = spoil(chance, body)
        try:
            chat = chat_of(body, chosen)
            assert json.loads(sf.render_json(chat))["messages"]
        except sf.Refusal as error:
            refused += 1
            assert error.http == 400 and len(error.what) < 200, error.what
    assert 0.1 < refused / MUTATED_REQUESTS < 0.9


def spoil(chance, sent):
    """Change a byte, cut the end off, or put a piece in twice."""
    sent = bytearray(sent)
    at = chance.randrange(len(sent))
    act = chance.randrange(3)
    if act == 0:
        sent[at] = chance.randrange(256)
    elif act == 1:
        del sent[at:]
    else:
        sent[at:at] = sent[chance.randrange(len(sent)):][:30]
    return bytes(sent)


STOPS = ["xt", "<b>", "stop here", "\u00fc\u4e2d"]
WORDS = ("t", "x", "<thi", "nk>", "<think>", "</think>", " ", "\n", "stop ", "here", "<b", ">", "<b>xt",
         "\u00fc", "\u4e2d", "\ud83d", "some words", "")


def odd_answer(chance):
    """The lines of an answer such as no model gives."""
    parts = []
    for _ in range(chance.randrange(1, 14)):
        message = {}
        if chance.random() < 0.7:
            message["content"] = "".join(chance.choices(WORDS, k=chance.randrange(1, 4)))
        if chance.random() < 0.25:
            message["thinking"] = chance.choice(WORDS)
        if chance.random() < 0.15:
            message["tool_calls"] = [made_call(chance.choice("ab"), chance.choice("12"), a=1)
                                     for _ in range(chance.randrange(1, 3))]
        parts.append({"message": message, "done": False})
    reason = chance.choice(("stop", "length", "load", 5))
    parts.append({"message": {}, "done": True, "done_reason": reason, "prompt_eval_count": 5,
                  "eval_count": chance.choice((0, 7, 10 ** 9, 10 ** 90, -1, None))})
    if chance.random() < 0.4:
        parts = mutate(chance, parts)
    lines = [json.dumps(part).encode() for part in parts]
    if lines and chance.random() < 0.05:
        at = chance.randrange(len(lines))
        lines[at] = spoil(chance, lines[at])
    return lines


@pytest.mark.slow
def test_mutated_answers_are_a_stream_that_reads_as_the_whole_or_fail_cleanly():
    chance = random.Random(7)
    fed = failed = 0
    reasons = collections.Counter()
    while fed < MUTATED_LINES:
        answer = answer_to(user("hi"), assistant(call("1")), user(result("1", "x")),
                           stop_sequences=chance.sample(STOPS, chance.randrange(3)))
        events = list(answer.opening)
        try:
            for sent in odd_answer(chance):
                fed += 1
                events += answer.feed(sent)
                if answer.message:
                    break
        except sf.Refusal as error:
            assert error.http in (400, 500) and error.kind
            failed += 1
        except sf.NodeFailure as failure:
            assert failure.reason == "bad answer"
            failed += 1

        check_grammar(events, ended=answer.message is not None)
        if answer.message:
            reasons[answer.message["stop_reason"]] += 1
            assert fold(events) == answer.message
            check_message(answer.message, answer.talk.stops)
    assert min(reasons[reason] for reason in REASONS) > 100 and failed > 100


def check_message(message, stops):
    """No stop sequence stands in a text, no call has an id that was used, none is blank."""
    for block in message["content"]:
        assert block["type"] != "text" or not [stop for stop in stops if stop in block["text"]]
        assert block["type"] != "thinking" or block["thinking"].strip()
    ids = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
    assert len(set(ids)) == len(ids) and "1" not in ids


def test_the_tools_of_a_request_are_rendered_once_and_as_all_json_is():
    first, second = (chat_of(recorded("main-first.json")) for _ in range(2))
    tools = first["tools"]
    assert second["tools"] is tools and sf.render_json(tools) == tools.json
    assert sf.render_request(second) == sf.render_json(second)
    tools.json = b"[]"
    assert json.loads(sf.render_request(second))["tools"] == []
    tools.json = sf.render_json(tools)
