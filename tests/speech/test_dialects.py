"""Chat Completions and Responses: recorded requests in, events out, and both through a gateway."""
import base64
import json
import pathlib
import threading
import time

import pytest

import subagent_fleet as sf
from gateway_rig import (
    DONE,
    HEAD,
    answers,
    fleet_of,
    hangs,
    line,
    says,
    says_and_hangs,
    sends,
    wait_until,
)
from tools import grows_linearly

HARNESSES = pathlib.Path(__file__).parents[1] / "cases" / "wire" / "harnesses"
RECORDED = sorted(path.name for path in HARNESSES.glob("*.json"))
PIXELS = base64.b64encode(b"\x89PNG not really").decode()
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
OPEN = (CHAT, RESPONSES)


def recorded(name):
    return json.loads((HARNESSES / name).read_text(encoding="utf-8"))


def parse(path, request):
    return sf.DIALECTS[path].parse(json.dumps(request).encode())


def chat(*messages, **more):
    return parse(CHAT, {"model": "x", "messages": list(messages), **more})


def respond(*items, **more):
    return parse(RESPONSES, {"model": "x", "input": list(items), **more})


def refused(path, request):
    with pytest.raises(sf.Refusal) as caught:
        parse(path, request)
    assert caught.value.http in (400, 413)
    return caught.value.what


def asked(talk, **more):
    """What Ollama is asked for a talk."""
    fleet = fleet_of(("m", "a", "x", more))
    return sf.Ollama().chat(talk, fleet.models["m"]).payload


def said(talk):
    return [(message["role"], message["content"]) for message in asked(talk)["messages"]]


# -- recorded requests --

def test_recordings_are_there():
    assert len(RECORDED) == 20 and {name.split("-")[0] for name in RECORDED} == {
        "aider", "codex", "continue", "opencode", "pi", "qwen"}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_request_becomes_a_chat_with_every_call_and_result(name):
    request = recorded(name)
    talk = parse(request["path"].split("?")[0], request["body"])
    payload = asked(talk)
    body = json.dumps(request["body"])
    assert talk.alias == request["body"]["model"] and talk.is_stream == ("stream" in request["body"])
    roles = [message["role"] for message in payload["messages"]]
    assert roles[:2] == ["system", "user"] and "system" not in roles[1:]
    calls = [call for turn in talk.turns for call in turn.calls]
    results = [result for turn in talk.turns for result in turn.results]
    assert {call.id for call in calls} == {result.call_id for result in results}
    assert len(calls) == sum(body.count(f'"type": "{kind}"') for kind in (
        "function_call", "custom_tool_call", "tool_use")) or "chat" in name
    assert [tool["function"]["parameters"]["type"] for tool in payload.get("tools", [])] \
        == ["object"] * len(talk.tools)
    assert "…" in json.dumps(payload, ensure_ascii=False) or "aider" in name or "title" in body


def test_a_recorded_history_of_codex_is_told_whole():
    talk = parse(RESPONSES, recorded("codex-0.169.0-responses-reasoning-1.json")["body"])
    loud = asked(talk, thinking=True)["messages"]
    assert [message["role"] for message in loud] == ["system", "user", "assistant", "tool"]
    assert loud[2]["thinking"] == "I think a lot"
    assert loud[2]["tool_calls"][0]["function"] == {
        "name": "exec_command", "arguments": {"cmd": "echo hi > made.txt"}}
    assert loud[3]["content"].startswith("Chunk ID: ")
    assert loud[0]["content"].count("<skills_instructions>") == 1  # the second developer message


# -- the fields that a translator must handle, one by one --

SYSTEM_AT_THE_FRONT = [
    (CHAT, [{"role": "developer", "content": "A"}, {"role": "user", "content": "hi"}], "A"),
    (CHAT, [{"role": "system", "content": "A"}, {"role": "system", "content": [
        {"type": "text", "text": "B"}]}, {"role": "user", "content": "hi"}], "A\n\nB"),
    (CHAT, [{"role": "system", "content": "A"}, {"role": "user", "content": "hi"},
            {"role": "system", "content": "B"}], "A\n\nB"),
    (RESPONSES, [{"role": "system", "content": "A"}, {"role": "user", "content": "hi"}], "A"),
    (RESPONSES, [{"type": "message", "role": "developer", "content": [
        {"type": "input_text", "text": "A"}]}, {"role": "user", "content": "hi"},
        {"role": "developer", "content": "B"}], "A\n\nB"),
]


@pytest.mark.parametrize("path, messages, system", SYSTEM_AT_THE_FRONT)
def test_system_and_developer_messages_are_joined_at_the_front(path, messages, system):
    talk = parse(path, {"model": "x", "messages": messages, "input": messages})
    assert said(talk) == [("system", system), ("user", "hi")]


def test_instructions_come_before_the_input():
    talk = respond({"role": "system", "content": "B"}, {"role": "user", "content": "hi"},
                   instructions="A")
    assert said(talk) == [("system", "A\n\nB"), ("user", "hi")]
    assert said(parse(RESPONSES, {"model": "x", "input": "hi"})) == [("user", "hi")]


@pytest.mark.parametrize("content, wanted", [
    (None, ""), ("", ""), ("out", "out"), ([], ""),
    ([{"type": "text", "text": "o"}, {"type": "text", "text": "ut"}], "o\n\nut")])
def test_content_is_null_text_or_parts_also_of_a_result(content, wanted):
    call = {"id": "c", "type": "function", "function": {"name": "Bash", "arguments": "{}"}}
    talk = chat({"role": "user", "content": "hi"},
                {"role": "assistant", "content": content, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": content})
    assert said(talk) == [("user", "hi"), ("assistant", wanted), ("tool", wanted)]
    talk = respond({"role": "user", "content": "hi"},
                   {"type": "function_call", "call_id": "c", "name": "Bash", "arguments": ""},
                   {"type": "function_call_output", "call_id": "c", "output": content})
    assert said(talk)[-1] == ("tool", wanted)


@pytest.mark.parametrize("path, part", [
    (CHAT, {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXELS}"}}),
    (RESPONSES, {"type": "input_image", "image_url": f"data:image/png;base64,{PIXELS}"})])
def test_images_reach_the_model_and_urls_are_refused(path, part):
    messages = [{"role": "user", "content": [part]}]
    assert parse(path, {"model": "x", "messages": messages, "input": messages}).images() == [PIXELS]
    spoiled = json.loads(json.dumps(messages).replace("data:image/png;base64,", "https://x/"))
    assert "data: URLs" in refused(path, {"model": "x", "messages": spoiled, "input": spoiled})
    broken = json.loads(json.dumps(messages).replace(PIXELS, "a"))
    assert "not valid base64" in refused(path, {"model": "x", "messages": broken, "input": broken})


def test_an_image_that_a_tool_gave_reaches_the_model():
    output = [{"type": "input_text", "text": "seen"},
              {"type": "input_image", "image_url": f"data:image/png;base64,{PIXELS}"}]
    talk = respond({"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"},
                   {"type": "function_call_output", "call_id": "c", "output": output})
    assert asked(talk)["messages"][-1] == {
        "role": "tool", "tool_call_id": "c", "tool_name": "view_image", "content": "seen",
        "images": [PIXELS]}


@pytest.mark.parametrize("fields, wanted", [
    ({"max_tokens": 7}, 7), ({"max_completion_tokens": 7}, 7), ({"max_output_tokens": 7}, 7),
    ({"max_tokens": 99_999}, 4096), ({}, 4096)])
def test_each_name_of_the_most_tokens_counts_up_to_the_models_own(fields, wanted):
    path = RESPONSES if "max_output_tokens" in fields else CHAT
    talk = parse(path, {"model": "x", "messages": [{"role": "user", "content": "hi"}],
                        "input": "hi", **fields})
    assert asked(talk, max_output=4096)["options"]["num_predict"] == wanted


@pytest.mark.parametrize("path", OPEN)
@pytest.mark.parametrize("choice, kind, tool", [
    ("auto", "auto", ""), ("none", "none", ""), ("required", "any", ""), (None, "auto", ""),
    ({"type": "function", "name": "Read"}, "tool", "Read"),
    ({"type": "function", "function": {"name": "Read"}}, "tool", "Read")])
def test_choice_of_tools(path, choice, kind, tool):
    talk = parse(path, {"model": "x", "messages": [], "input": [], "tool_choice": choice})
    assert (talk.choice, talk.chosen_tool) == (kind, tool)
    assert not talk.one_call
    alone = parse(path, {"model": "x", "messages": [], "input": [], "parallel_tool_calls": False})
    assert alone.one_call


SCHEMA = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object",
          "properties": {"n": {"type": "integer", "minimum": -9007199254740991,
                               "maximum": 9007199254740991}},
          "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize("path, tool", [
    (CHAT, {"type": "function", "function": {
        "name": "Read", "description": "d", "strict": True, "parameters": SCHEMA}}),
    (RESPONSES, {"type": "function", "name": "Read", "description": "d", "strict": True,
                 "parameters": SCHEMA})])
def test_a_tool_is_shown_without_what_ollama_refuses(path, tool):
    talk = parse(path, {"model": "x", "messages": [{"role": "user", "content": "hi"}],
                        "input": "hi", "tools": [tool, {"type": "web_search"}, 7, {}]})
    assert asked(talk)["tools"] == [{"type": "function", "function": {
        "name": "Read", "description": "d", "parameters": {
            "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
            "additionalProperties": False}}}]


@pytest.mark.parametrize("path", OPEN)
def test_what_no_local_model_has_a_word_for_is_left_out(path):
    request = {"model": "x", "messages": [{"role": "user", "content": "hi"}], "input": "hi"}
    odd = {"reasoning": {"effort": "high"}, "reasoning_effort": "low", "include": ["x"],
           "store": False, "client_metadata": {}, "thinking": {"type": "enabled"}, "user": "me",
           "stream_options": {"include_usage": True}, "service_tier": "auto", "seed": 1,
           "n": 1, "logprobs": False, "previous_response_id": None}
    assert asked(parse(path, {**request, **odd})) == asked(parse(path, request))


@pytest.mark.parametrize("path", OPEN)
@pytest.mark.parametrize("field, value", [
    ("n", 2), ("logprobs", True), ("previous_response_id", "resp_1"), ("background", True),
    ("conversation", "conv_1")])
def test_what_would_change_the_answer_is_refused(path, field, value):
    told = refused(path, {"model": "x", "messages": [], "input": [], field: value})
    assert told == f"{field}: this gateway does not support it; leave it out"


@pytest.mark.parametrize("form, wanted", [
    ({"type": "json_object"}, "json"), ({"type": "text"}, None), (None, None),
    ({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}, SCHEMA),
    ({"type": "json_schema", "name": "n", "schema": SCHEMA}, SCHEMA)])
def test_json_is_asked_for_in_ollamas_words(form, wanted):
    talks = [chat({"role": "user", "content": "hi"}, response_format=form),
             respond({"role": "user", "content": "hi"}, text=form and {"format": form})]
    assert [asked(talk).get("format") for talk in talks] == [wanted, wanted]


def test_stop_sequences_of_chat():
    assert chat(stop="END").stops == ("END",)
    assert chat(stop=["A", "", "B"]).stops == ("A", "B")
    assert refused(CHAT, {"model": "x", "messages": [], "stop": [1]}) \
        == "stop: expected a list of texts"
    assert "at most" in refused(CHAT, {"model": "x", "messages": [], "stop": ["x"] * 99})


@pytest.mark.parametrize("path, request_, told", [
    (CHAT, {"messages": []}, "model: expected text"),
    (CHAT, {"model": "x"}, "messages: expected a list"),
    (RESPONSES, {"model": "x"}, "input: expected text or a list"),
    (CHAT, {"model": "x", "messages": [{"role": "x"}]},
     "messages.0: expected the role system, developer, user, assistant or tool"),
    (CHAT, {"model": "x", "messages": [7]},
     "messages.0: expected the role system, developer, user, assistant or tool"),
    (RESPONSES, {"model": "x", "input": [7]}, "input.0: expected an object"),
    (RESPONSES, {"model": "x", "input": [{"role": "tool"}]},
     "input.0: expected the role system, developer, user or assistant"),
    (RESPONSES, {"model": "x", "input": [{"type": "item_reference", "id": "i"}]},
     "input.0: this gateway stores no items; send the item itself"),
    (CHAT, {"model": "x", "messages": [{"role": "user", "content": 7}]},
     "messages.0: expected text or a list of content blocks"),
    (CHAT, {"model": "x", "messages": [], "max_completion_tokens": 0},
     "max_completion_tokens: must be at least 1"),
    (RESPONSES, {"model": "x", "input": [], "tool_choice": 7},
     "tool_choice: expected text or an object")])
def test_requests_that_are_none_say_where(path, request_, told):
    assert refused(path, request_) == told


@pytest.mark.slow
@pytest.mark.parametrize("path", OPEN)
def test_whatever_is_sent_is_a_talk_or_refused(path):
    """Every value of a recorded request, one after the other, becomes something odd."""
    name = "codex-0.169.0-responses-subagent-1.json" if path == RESPONSES \
        else "qwen-code-0.24.4-chat-5.json"
    body = recorded(name)["body"]
    body["tools"] = body["tools"][:5]
    places = []

    def walk(value, place):
        places.append(place)
        if isinstance(value, list):
            value = dict(enumerate(value))
        for key, inner in value.items() if isinstance(value, dict) else ():
            walk(inner, (*place, key))
    for key, value in body.items():
        walk(value, (key,))
    assert len(places) > 150

    outcomes = set()
    for place in places:
        for odd in (None, 7, "x", [], [7], {}, {"type": []}, True):
            spoiled = json.loads(json.dumps(body))
            inner = spoiled
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = odd
            try:
                asked(parse(path, spoiled))
                outcomes.add("talk")
            except sf.Refusal as refusal:
                assert refusal.http == 400 and refusal.what
                outcomes.add("refused")
    assert outcomes == {"talk", "refused"}


@pytest.mark.parametrize("path, body", [
    (CHAT, b'{"model":"x","messages":[{"role":"user","content":%s}]}'),
    (RESPONSES, b'{"model":"x","input":[{"role":"user","content":%s}]}'),
    (CHAT, b'{"model":"x","messages":[],"tools":[{"type":"function","function":{"name":"n",'
           b'"parameters":{"properties":%s}}}]}')])
@pytest.mark.parametrize("depth", [10, 900, 100_000])
def test_depth_is_refused_or_told(path, body, depth):
    dialect = sf.DIALECTS[path]
    try:
        asked(dialect.parse(body % (b'{"a":' * depth + b"1" + b"}" * depth)))
    except sf.Refusal as refusal:
        assert refusal.http == 400
    except (RecursionError, ValueError):
        pass  # which the gateway refuses: test_broken_bodies_get_400


@pytest.mark.parametrize("path", OPEN)
def test_reading_is_linear(path):
    def read(body):
        asked(sf.DIALECTS[path].parse(body))

    def history(turns):
        item = {"role": "user", "content": [{"type": "input_text", "text": "word " * 50}]}
        call = {"type": "function_call", "call_id": "c", "name": "Bash", "arguments": '{"a":1}'}
        said = [item, call] * turns if path == RESPONSES else [item] * 2 * turns
        return json.dumps({"model": "x", "messages": said, "input": said}).encode()
    assert grows_linearly(read, history(500), history(2000))


def test_arguments_that_grow_in_memory_are_kept_as_text():
    text = "[" + "1," * 300_000 + "1]"
    call = {"type": "function_call", "call_id": "c", "name": "Bash", "arguments": text}
    assert respond(call).turns[0].calls[0].arguments == {"input": text}


# -- tools of codex: within a namespace, and with one text --

SPAWN = {"type": "namespace", "name": "multi_agent_v1", "tools": [
    {"type": "function", "name": "spawn_agent", "description": "d", "parameters": SCHEMA}]}
PATCH = {"type": "custom", "name": "apply_patch", "description": "d", "format": {
    "type": "grammar", "syntax": "lark", "definition": "start: x"}}


def calls_of(path, request, *calls):
    """The items or calls of an answer in which a model makes these calls."""
    talk = parse(path, {"model": "x", "messages": [], "input": [], **request})
    writer = sf.DIALECTS[path].writes(talk, "0")
    for call in calls:
        writer.write(sf.Delta("call", call=call))
    answer = json.loads(writer.end(sf.End("tool_use")))
    return answer["output"] if path == RESPONSES else answer["choices"][0]["message"]["tool_calls"]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
def test_a_tool_of_a_namespace_takes_the_place_of_no_other(order):
    tools = [{"type": "function", "name": "T"}, {"type": "function", "name": "n__T"},
             {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "T"}]}]
    tools = [tools[index] for index in order]
    talk = respond({"role": "user", "content": "hi"}, tools=tools)
    shown = [tool["function"]["name"] for tool in asked(talk)["tools"]]
    assert len(shown) == len(set(shown)) == 3
    called = [calls_of(RESPONSES, {"tools": tools}, sf.Call("c", name, {}))[0] for name in shown]
    assert {(item["name"], item.get("namespace", "")) for item in called} \
        == {("T", ""), ("n__T", ""), ("T", "n")}


def test_a_tool_of_a_namespace_is_called_flat_and_given_back_within_it():
    twin = {"type": "namespace", "name": "other", "tools": [
        {"type": "function", "name": "spawn_agent"}]}
    talk = respond({"role": "user", "content": "hi"}, tools=[SPAWN, twin])
    shown = [tool["function"]["name"] for tool in asked(talk)["tools"]]
    assert shown == ["spawn_agent", "other__spawn_agent"]
    for name, namespace in zip(shown, ("multi_agent_v1", "other")):
        items = calls_of(RESPONSES, {"tools": [SPAWN, twin]}, sf.Call("c", name, {"n": 1}))
        assert items == [{"call_id": "c", "name": "spawn_agent", "status": "completed",
                          "namespace": namespace, "id": "fc_0_0", "type": "function_call",
                          "arguments": '{"n":1}'}]
        again = respond({**items[0]}, tools=[SPAWN, twin])  # as the client sends it back
        assert again.turns[0].calls == (sf.Call("c", name, {"n": 1}),)


def test_a_custom_tool_is_a_function_of_one_text_and_given_back_as_it_came():
    talk = respond({"role": "user", "content": "hi"}, tools=[PATCH])
    shown = asked(talk)["tools"][0]["function"]["parameters"]
    assert shown["required"] == ["input"]
    assert "lark grammar:\nstart: x" in shown["properties"]["input"]["description"]
    for arguments, text in (({"input": "*** Begin"}, "*** Begin"), ({"a": 1}, '{"a":1}')):
        items = calls_of(RESPONSES, {"tools": [PATCH]}, sf.Call("c", "apply_patch", arguments))
        assert items == [{"call_id": "c", "name": "apply_patch", "status": "completed",
                          "id": "ctc_0_0", "type": "custom_tool_call", "input": text}]
        assert respond({**items[0]}).turns[0].calls[0].arguments == {"input": text}
    wrapped = {"type": "custom", "custom": {"name": "apply_patch"}}
    made = calls_of(CHAT, {"tools": [wrapped]}, sf.Call("c", "apply_patch", {"input": "text"}))
    assert made == [{"id": "c", "type": "custom", "custom": {
        "name": "apply_patch", "input": "text"}}]
    assert chat({"role": "assistant", "tool_calls": made}).turns[0].calls[0] \
        == sf.Call("c", "apply_patch", {"input": "text"})


@pytest.mark.parametrize("path", OPEN)
def test_ids_that_a_template_counts_from_zero_are_made_unique(path):
    history = {"messages": [{"role": "assistant", "tool_calls": [
        {"id": "0", "type": "function", "function": {"name": "Bash", "arguments": "{}"}}]}],
        "input": [{"type": "function_call", "call_id": "0", "name": "Bash", "arguments": "{}"}]}
    made = calls_of(path, history, sf.Call("0", "Bash", {}), sf.Call("", "Bash", {}))
    ids = [call.get("call_id") or call["id"] for call in made]
    assert len({*ids, "0"}) == 3


# -- the events of an answer --

END = sf.End("tool_use", "", 1200, 34, cache_read=1000)
ANSWER = [sf.Delta("thinking", "I "), sf.Delta("thinking", "think"), sf.Delta("text", "On "),
          sf.Delta("text", "it\n\"\u2026\ud83d\ude00"),
          sf.Delta("call", call=sf.Call("c1", "Bash", {"cmd": "ls"})),
          sf.Delta("text", "and"), sf.Delta("call", call=sf.Call("c2", "Bash", {}))]


def written(path, deltas=ANSWER, end=END, **more):
    """The bytes of a streamed answer, and the whole answer that says the same."""
    talk = parse(path, {"model": "x", "messages": [], "input": [],
                        "stream_options": {"include_usage": True}, **more})
    stream = sf.DIALECTS[path].writes(sf.replace(talk, is_stream=True), "0")
    whole = sf.DIALECTS[path].writes(talk, "0")
    sent = stream.begin()
    for delta in deltas:
        assert whole.write(delta) == b""
        sent += stream.write(delta)
    return sent + stream.end(end), json.loads(whole.end(end))


def chunks_of(sent):
    """The chunks of a stream of Chat Completions; it ends with [DONE]."""
    blocks = sent.decode("ascii").split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block[len("data: "):]) for block in blocks[:-2]
            if not block.startswith(":")]


def events_of(sent):
    """The events of a stream of Responses, each named as its data says."""
    events = []
    for block in sent.decode("ascii").split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data[len("data: "):]))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_chunks_of_a_completion_are_those_that_clients_need():
    sent, whole = written(CHAT)
    chunks = chunks_of(sent)
    assert {(chunk["id"], chunk["object"], chunk["model"]) for chunk in chunks} == {
        ("chatcmpl-0", "chat.completion.chunk", "x")}
    assert chunks[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert "".join(delta.get("content", "") for delta in deltas) == "On it\n\"…😀and"
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "I think"
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call.pop("index") for call in calls] == [0, 1]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] \
        == [None] * (len(chunks) - 2) + ["tool_calls"]
    usage = {"prompt_tokens": 1200, "completion_tokens": 34, "total_tokens": 1234,
             "prompt_tokens_details": {"cached_tokens": 1000}}
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], usage)
    assert whole["choices"] == [{"index": 0, "finish_reason": "tool_calls", "logprobs": None,
                                 "message": {"role": "assistant", "content": "On it\n\"…😀and",
                                             "reasoning_content": "I think",
                                             "tool_calls": calls}}]
    assert (whole["usage"], whole["object"]) == (usage, "chat.completion")
    assert calls[0] == {"id": "c1", "type": "function", "function": {
        "name": "Bash", "arguments": '{"cmd":"ls"}'}}


@pytest.mark.parametrize("reason, wanted", [
    ("end_turn", "stop"), ("stop_sequence", "stop"), ("max_tokens", "length"),
    ("tool_use", "tool_calls")])
def test_every_end_has_a_finish_reason(reason, wanted):
    sent, whole = written(CHAT, [sf.Delta("text", "hi")], sf.End(reason))
    assert chunks_of(sent)[-2]["choices"][0]["finish_reason"] == wanted
    assert whole["choices"][0]["finish_reason"] == wanted


def test_events_of_a_response_are_those_that_clients_need():
    sent, whole = written(RESPONSES)
    events = events_of(sent)
    kinds = [event["type"].replace("response.", "") for event in events]
    text = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done",
            "content_part.done", "output_item.done"]
    thought = [f"reasoning_summary_{word}" for word in (
        "part.added", "text.delta", "text.delta", "text.done", "part.done")]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
            "output_item.done"]
    assert kinds == ["created", "in_progress", text[0], *thought, text[-1],
                     *text[:3], *text[2:], *call, *text, *call, "completed"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))

    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    response = events[-1]["response"]
    assert response == whole and response["output"] == done
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call", "message",
                                               "function_call"]
    assert len({item["id"] for item in done}) == 5
    assert done[0]["summary"] == [{"type": "summary_text", "text": "I think"}]
    assert done[1]["content"] == [{"type": "output_text", "annotations": [], "logprobs": [],
                                   "text": "On it\n\"…😀"}]
    for event in events:  # each part of an item says which one it belongs to
        if "item_id" in event:
            assert event["item_id"] == done[event["output_index"]]["id"]
    assert (response["status"], response["usage"]["input_tokens"],
            response["usage"]["output_tokens"], response["usage"]["total_tokens"]) == (
        "completed", 1200, 34, 1234)
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": 1000}


def test_an_answer_cut_at_its_length_is_completed_and_says_so_inside():
    sent, whole = written(RESPONSES, [sf.Delta("text", "hi")], sf.End("max_tokens", "", 5, 4))
    last = events_of(sent)[-1]
    assert last["type"] == "response.completed" and b"response.incomplete" not in sent
    assert last["response"] == whole and whole["usage"]["total_tokens"] == 9
    assert (whole["status"], whole["incomplete_details"]) == (
        "incomplete", {"reason": "max_output_tokens"})


def test_an_answer_of_nothing_still_ends():
    assert chunks_of(written(CHAT, [], sf.End("end_turn"))[0])[-2]["choices"][0]["delta"] == {}
    assert written(CHAT, [], sf.End("end_turn"))[1]["choices"][0]["message"]["content"] is None
    events = events_of(written(RESPONSES, [], sf.End("end_turn"))[0])
    assert [event["type"] for event in events] == [
        "response.created", "response.in_progress", "response.completed"]


# -- errors, in the words on which clients act --

@pytest.mark.parametrize("path, field", [(CHAT, "messages"), (RESPONSES, "input")])
def test_too_long_is_said_in_words_that_every_client_knows(path, field):
    error = json.loads(sf.DIALECTS[path].refuse(sf.PromptTooLong(70_000, 65_536)))["error"]
    assert error == {
        "message": "This model's maximum context length is 65536 tokens. However, your messages "
                   "resulted in 70000 tokens (prompt is too long: 70000 tokens > 65536 maximum).",
        "type": "invalid_request_error", "param": field, "code": "context_length_exceeded"}
    assert "rate limit" not in error["message"] and "too many requests" not in error["message"]


@pytest.mark.parametrize("path", OPEN)
@pytest.mark.parametrize("status, kind, code", [
    (400, "invalid_request_error", None), (401, "authentication_error", "invalid_api_key"),
    (404, "not_found_error", "not_found"), (529, "overloaded_error", None),
    (500, "api_error", None)])
def test_every_other_error_has_openais_shape(path, status, kind, code):
    refusal = sf.Refusal(status, "words")
    body = {"error": {"message": "words", "type": kind, "param": None, "code": code}}
    dialect = sf.DIALECTS[path]
    assert json.loads(dialect.refuse(refusal)) == body


def test_a_stream_that_fails_ends_in_an_error_and_never_as_if_it_were_done():
    chat_, responses = (sf.DIALECTS[path].writes(parse(path, {
        "model": "x", "messages": [], "input": [], "stream": True}), "0") for path in OPEN)
    sent = chat_.fail(sf.Refusal(500, "words"))
    assert json.loads(sent[len(b"data: "):])["error"]["message"] == "words"
    assert b"finish_reason" not in sent and b"[DONE]" not in sent
    error, failed = events_of(responses.fail(sf.Refusal(500, "words")))
    assert (error["type"], error["code"], error["error"]["code"]) == (
        "error", "server_error", "server_error")
    assert (failed["type"], failed["response"]["status"], failed["response"]["error"]) == (
        "response.failed", "failed", {"code": "server_error", "message": "words"})
    *_, failed = events_of(responses.fail(sf.PromptTooLong(9, 5)))
    assert failed["response"]["error"]["code"] == "context_length_exceeded"
    *_, failed = events_of(responses.fail(sf.Refusal(529, "words", retry_seconds=7)))
    assert failed["response"]["error"] == {
        "code": "rate_limit_exceeded", "message": "words. Please try again in 7s."}


def test_keep_alive_is_a_comment_for_chat_and_an_event_for_responses():
    chat_, responses = (sf.DIALECTS[path].writes(parse(path, {
        "model": "x", "messages": [], "input": [], "stream": True}), "0") for path in OPEN)
    assert chat_.ping() == b": ping\n\n"
    opening, *more = events_of(responses.begin() + responses.ping())
    assert opening["type"] == "response.created"
    assert [event["type"] for event in more] == ["response.in_progress"] * 2


# -- whose request it is --

@pytest.mark.parametrize("headers, thread, session, agent", [
    ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}, "", "s", "a"),
    ({"x-session-id": "ses_1"}, "", "ses_1", ""),
    ({"x-session-id": "ses_2", "x-parent-session-id": "ses_1"}, "", "ses_1", "ses_2"),
    ({"session-id": "r", "thread-id": "r"}, "r", "r", ""),
    ({"session-id": "r", "thread-id": "t"}, "r", "r", "t"),
    ({"session_id": "p"}, "p", "p", ""),
    ({}, "key", "key", ""),
    ({"x-session-id": "no name\x00"}, "key", "key", "")])
def test_a_conversation_is_told_by_what_the_client_sends(headers, thread, session, agent):
    talk = respond({"role": "user", "content": "hi"}, prompt_cache_key=thread)
    assert sf.Responses().conversation(headers, talk) == sf.Conversation(session, agent)


def test_a_client_is_never_told_by_its_user_agent():
    request = recorded("qwen-code-0.24.4-messages-2.json")
    headers = {key.lower(): value for key, value in request["headers"].items()}
    assert headers["user-agent"].startswith("claude-cli/")  # it poses as Claude Code
    talk = parse("/v1/messages", request["body"])
    assert sf.Messages().conversation(headers, talk) == sf.Messages().conversation({}, talk)


@pytest.mark.parametrize("name, session, agent", [
    ("codex-0.169.0-responses-subagent-1.json", "01a1f06e-e9be-7e30-9926-cd5cd999844e", ""),
    ("codex-0.169.0-responses-subagent-2.json", "01a1f06e-e9be-7e30-9926-cd5cd999844e",
     "01a1f06e-ea24-7780-b4a1-d8667ea12cf9"),
    ("pi-0.73.1-responses-2.json", "01a1f091-9a94-75e5-a732-8da3b216c07a", "")])
def test_recorded_clients_name_their_conversation(name, session, agent):
    request = recorded(name)
    headers = {key.lower(): value for key, value in request["headers"].items()}
    talk = parse(request["path"], request["body"])
    assert sf.Responses().conversation(headers, talk) == sf.Conversation(session, agent)


def test_opencodes_subagent_belongs_to_its_parents_session():
    request = recorded("opencode-1.18.33-messages-subagent-3.json")
    talk = parse("/v1/messages", request["body"])
    conversation = sf.Messages().conversation(request["headers"], talk)
    assert conversation.session.startswith("ses_") and conversation.agent.startswith("ses_")


# -- through a gateway --

BODY = {"model": "x", "messages": [{"role": "user", "content": "hi"}], "input": "hi"}


def post(served, path, *, headers=None, **more):
    return served.raw(served.post({**BODY, **more}, target=path, **(headers or {})))


CALL = json.dumps({"message": {"content": "", "tool_calls": [
    {"function": {"name": "spawn_agent", "arguments": {"n": 1}}}]}}).encode() + b"\n"


@pytest.mark.parametrize("path", OPEN)
def test_a_whole_answer_and_a_stream_say_the_same(rig, path):
    served = rig(says("PO", "NG"))
    status, headers, body = post(served, path)
    assert status == 200 and headers["content-type"] == "application/json"
    whole = json.loads(body)
    status, headers, body = post(served, path, stream=True, stream_options={"include_usage": True})
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    if path == CHAT:
        assert whole["choices"][0]["message"]["content"] == "PONG"
        assert chunks_of(body)[-1]["usage"] == whole["usage"] == {
            "prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 0}}
    else:
        assert whole["output"][0]["content"][0]["text"] == "PONG"
        events = events_of(body)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["response"]["output"] for event in events[:2]] == [[], []]
        assert events[-1]["response"]["usage"] == whole["usage"]
        assert whole["usage"]["total_tokens"] == 15
    assert [receipt["outcome"] for receipt in served.receipts(2)] == ["ok", "ok"]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": 1}, "all"])
def test_a_client_that_reads_choices_of_each_chunk_gets_no_chunk_without(rig, options):
    """As OpenAI: a last chunk with the usage and no choices is for who asks for it."""
    served = rig(says("PO", "NG"))
    chunks = chunks_of(post(served, CHAT, stream=True, stream_options=options)[2])
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "PONG"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_codex_gets_its_namespace_back_through_a_gateway(rig):
    served = rig(sends(HEAD + CALL + DONE))
    _, _, body = post(served, RESPONSES, stream=True, tools=[SPAWN])
    done = [event["item"] for event in events_of(body)
            if event["type"] == "response.output_item.done"]
    assert [(item["name"], item["namespace"]) for item in done] == [
        ("spawn_agent", "multi_agent_v1")]
    assert served.nodes[0].requests[-1]["tools"][0]["function"]["name"] == "spawn_agent"


@pytest.mark.parametrize("path", OPEN)
@pytest.mark.parametrize("stream", [False, True])
def test_a_node_that_fails_before_content_is_left_for_another(rig, path, stream):
    served = rig(sends(b""), says("PONG"))
    status, _, body = post(served, path, stream=stream)
    assert status == 200 and b"NG" in body
    assert served.receipts()[0]["failures"] == [{"node": "n0", "why": "bad answer"}]


@pytest.mark.parametrize("path", OPEN)
def test_a_node_that_dies_in_mid_answer_ends_the_stream_with_an_error(rig, path):
    def dies(node, connection):
        connection.sendall(HEAD + line("begun "))
        time.sleep(0.2)  # until then the client has had it
    _, _, body = post(rig(dies), path, stream=True)
    assert b"in the middle of the answer" in body
    assert b"response.completed" not in body and b'"finish_reason":"' not in body


@pytest.mark.parametrize("path", OPEN)
def test_too_long_stops_or_compacts_in_the_clients_words(rig, path):
    words = "the request (70000 tokens) exceeds the available context size (32768 tokens)"
    served = rig(answers(400, words))
    for stream in (False, True):
        status, headers, body = post(served, path, stream=stream)
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert "prompt is too long: 70000 tokens > 32768 maximum" in error["message"]
        assert "retry-after" not in headers


@pytest.mark.parametrize("path", OPEN)
def test_nobody_left_says_when_to_come_back(rig, path):
    served = rig(sends(b""))
    status, headers, body = post(served, path, stream=True)
    assert (status, headers["retry-after"]) == (529, "2")
    assert json.loads(body)["error"]["type"] == "overloaded_error"


def heard_after_pings(served, path, ping, seen):
    """All that a client hears whose node waits until it has heard three pings."""
    with served.connect() as connection:
        connection.sendall(served.post({**BODY, "stream": True}, target=path))
        heard = b""
        while not heard.endswith(b"0\r\n\r\n"):
            heard += connection.recv(65536)
            if heard.count(ping) >= 3:
                seen.set()
    return heard


PINGS = [(CHAT, b": ping\n\n"), (RESPONSES, b"event: response.in_progress\n")]


@pytest.mark.parametrize("path, ping", PINGS)
def test_who_waits_is_kept_in_its_own_dialect(rig, monkeypatch, path, ping):
    monkeypatch.setattr(sf, "QUIET_SECONDS", 0.05)
    seen = threading.Event()
    served = rig(lambda node, connection: (seen.wait(20), says("PONG")(node, connection)))
    heard = heard_after_pings(served, path, ping, seen)
    assert heard.startswith(b"HTTP/1.1 200") and b"PONG" in heard
    if path == RESPONSES:
        assert b"\n: " not in heard  # comments do not count for codex


@pytest.mark.parametrize("path, ping", PINGS)
def test_after_pings_a_refusal_is_an_event(rig, monkeypatch, path, ping):
    monkeypatch.setattr(sf, "QUIET_SECONDS", 0.05)
    seen = threading.Event()
    served = rig(lambda node, connection: seen.wait(20))
    heard = heard_after_pings(served, path, ping, seen)
    assert heard.startswith(b"HTTP/1.1 200") and b"no other is left" in heard
    assert (b"Please try again in 2s." in heard) == (path == RESPONSES)


@pytest.mark.parametrize("path", OPEN)
def test_a_client_that_leaves_takes_its_request_off_the_node(rig, path):
    served = rig(says_and_hangs)
    with served.connect() as connection:
        connection.sendall(served.post({**BODY, "stream": True}, target=path))
        wait_until(lambda: b"begun" in connection.recv(65536))
    assert served.nodes[0].gone.wait(5)
    assert served.receipts()[0]["outcome"] == "left"


@pytest.mark.parametrize("path", OPEN)
def test_the_door_is_closed_in_the_clients_own_shape(rig, path):
    served = rig(hangs)
    status, _, body = post(served, path, headers={"x_api_key": "wrong"})
    assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
    status, _, body = post(served, path, model="none")
    assert (status, json.loads(body)["error"]["code"]) == (404, "not_found")
    assert "it has `x`" in json.loads(body)["error"]["message"]
    assert served.nodes[0].requests == []


def test_models_are_listed_in_both_shapes_at_once(rig):
    served = rig(hangs)
    status, _, body = served.get("/v1/models")
    listed = json.loads(body)
    assert (status, listed["object"], listed["has_more"]) == (200, "list", False)
    model = listed["data"][0]
    assert model == {"type": "model", "id": "x", "display_name": "x", "object": "model",
                     "created_at": "1970-01-01T00:00:00Z", "created": 0,
                     "owned_by": "subagent-fleet"}
    assert json.loads(served.get("/v1/models/x")[2]) == model
    assert served.get("/v1/models/y")[0] == 404


def test_a_client_without_a_name_finds_its_prompt_again(rig):
    served = rig(says("PONG"), says("PONG"))
    for question in ("first", "second", "first", "second", "first"):
        post(served, CHAT, messages=[{"role": "user", "content": question}])
        wait_until(lambda: not any(model["running"] for model in json.loads(
            served.get("/fleet")[2])["models"]))  # a slot is given back a moment after its answer
    nodes = [receipt["node"] for receipt in served.receipts(5)]
    assert nodes[0] == nodes[2] == nodes[4] != nodes[1] == nodes[3]
    assert "opening" not in served.receipts()[0]


def test_receipts_name_session_and_agent_of_codex(rig):
    served = rig(says("PONG"))
    request = recorded("codex-0.169.0-responses-subagent-2.json")
    names = {key.replace("-", "_"): request["headers"][key] for key in ("session-id", "thread-id")}
    served.raw(served.post({**request["body"], "model": "x"}, target=RESPONSES, **names))
    receipt = served.receipts()[0]
    assert (receipt["session"], receipt["agent_id"]) == (
        request["headers"]["session-id"], request["headers"]["thread-id"])
