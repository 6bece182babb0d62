"""One suite that every backend passes with every dialect: what a client asks, a node answers."""
import json
import re
import socket
import threading

import pytest

import subagent_fleet as sf
from gateway_rig import KEY, Node, Rig, fleet_of, read_answer, wait_until
from matrix_cases import BACKENDS, CLIENTS, PIXEL, TOOL, heard_of, message_of, refusal_of, stream_of
from subagent_fleet import replace

END = ("end", "end_turn", 12, 3)
PAIRS = [(backend, dialect) for backend in BACKENDS for dialect in CLIENTS]
pytestmark = pytest.mark.parametrize("backend, dialect", PAIRS)


@pytest.fixture
def serve(tmp_path, backend):
    """Serve one alias by nodes of a kind, each of which plays a function; timeout in seconds."""
    made = []

    def start(*plays, timeout=20, **more):
        nodes = [Node(play) for play in plays]
        models = [(f"m{i}", f"n{i}", "x", {"timeout": timeout, "context": 4096, **more})
                  for i in range(len(nodes))]
        fleet = fleet_of(*models, nodes={f"n{i}": node.endpoint for i, node in enumerate(nodes)})
        for node in list(fleet.nodes.values()):
            fleet.nodes[node.name] = replace(node, provider=backend)
        served = Rig(fleet, tmp_path)
        served.nodes = nodes
        made.append(served)
        return served
    yield start
    for served in made:
        served.close()
        for node in served.nodes:
            node.close()


def test_every_backend_and_dialect_is_in_the_matrix(backend, dialect):
    assert set(BACKENDS) == set(sf.BACKENDS)
    assert {client.target for client in CLIENTS.values()} == set(sf.DIALECTS)


def plays(backend, dialect, *steps):
    def play(node, connection):
        passes = backend == "anthropic" and dialect == "messages"  # the request as it came
        if passes and not node.here.request["stream"]:
            connection.sendall(message_of(steps))
        else:
            connection.sendall(stream_of(backend, steps, dialect))
    return play


def ask(served, dialect, said=(("user", "hi"),), *, stream, **more):
    client = CLIENTS[dialect]
    request = client.request(said, stream=stream, **more)
    status, _, body = served.raw(served.post(request, target=client.target))
    return client.read(status, body, stream)


def reason_in(dialect, reason):
    reasons = CLIENTS[dialect].reasons
    return reason if reasons == {} else (reasons or {}).get(reason)


STREAMS = pytest.mark.parametrize("stream", [True, False])


@STREAMS
def test_text(serve, backend, dialect, stream):
    served = serve(plays(backend, dialect, ("text", "Two "), ("text", "wörds \U0001f600."), END))
    answer = ask(served, dialect, stream=stream)
    assert (answer.text, answer.thinking, answer.calls, answer.error) \
        == ("Two wörds \U0001f600.", "", [], "")
    assert answer.tokens == (12, 3)
    assert answer.reason in (reason_in(dialect, "end_turn"), "completed")
    assert "hi" in heard_of(served.nodes[0].requests[0])[0]
    receipt, = served.receipts()
    assert (receipt["outcome"], receipt["input_tokens"], receipt["output_tokens"]) == ("ok", 12, 3)


@STREAMS
def test_an_answer_that_says_nothing_is_an_answer(serve, backend, dialect, stream):
    served = serve(plays(backend, dialect, END))
    for _ in range(2):  # what was learned of the first does not end the second
        answer = ask(served, dialect, stream=stream)
        assert (answer.text, answer.calls, answer.error, answer.tokens) == ("", [], "", (12, 3))
    assert {receipt["outcome"] for receipt in served.receipts(2)} == {"ok"}
    assert not served.said or "bug" not in "".join(served.said)


@STREAMS
def test_thinking(serve, backend, dialect, stream):
    served = serve(plays(backend, dialect, ("thinking", "Let me "), ("thinking", "see."), ("text", "Yes."), END),
                   thinking=True)
    answer = ask(served, dialect, stream=stream)
    assert (answer.thinking, answer.text) == ("Let me see.", "Yes.")


@STREAMS
def test_thinking_that_is_printed_is_told_from_text(serve, backend, dialect, stream):
    if backend == "anthropic":
        pytest.skip("what it prints is its own")
    served = serve(plays(backend, dialect, ("text", "<thi"), ("text", "nk>Hm.</think>Yes."), END))
    answer = ask(served, dialect, stream=stream)
    assert (answer.thinking, answer.text) == ("Hm.", "Yes.")


@STREAMS
def test_calls_in_the_middle_of_text_and_their_results(serve, backend, dialect, stream):
    first = ("call", "Bash", {"command": "ls"})
    second = ("call", "Bash", {"command": "pwd", "n": [1, {"ü": None}]})
    served = serve(plays(backend, dialect, ("text", "Look: "), first, second, ("end", "tool_use", 9, 4)))
    answer = ask(served, dialect, stream=stream, tools=[TOOL])
    assert answer.text == "Look: " and answer.reason in (reason_in(dialect, "tool_use"), "completed")
    assert [call[:2] for call in answer.calls] == [first[1:], second[1:]]
    ids = [call[2] for call in answer.calls]
    assert all(ids) and len(set(ids)) == 2
    assert heard_of(served.nodes[0].requests[0])[1] == ["Bash"]

    said = [("user", "hi"), *(("call", own_id, *call[1:]) for own_id, call in zip(ids, (first, second))),
            *(("result", own_id, f"result of {own_id}") for own_id in ids)]
    served.nodes[0].play = plays(backend, dialect, ("text", "Done."), END)
    assert ask(served, dialect, said, stream=stream, tools=[TOOL]).text == "Done."
    texts, _, _ = heard_of(served.nodes[0].requests[1])
    assert [f"result of {own_id}" in texts for own_id in ids] == [True, True]


def sends_text(backend, dialect):
    """Whether the arguments of a call go from this node to this client as text that we read."""
    return backend != "ollama" and not (backend == "anthropic" and dialect == "messages")


@STREAMS
def test_a_call_that_the_token_limit_cut_is_no_call(serve, backend, dialect, stream):
    if not sends_text(backend, dialect):
        pytest.skip("it sends whole calls, or its answer goes back as it came")
    served = serve(lambda node, connection: None)
    text = json.dumps({"command": "ls", "n": [1, {"ü": None}]})
    for at in range(len(text) + 1):
        served.nodes[0].play = plays(backend, dialect, ("text", "Look: "), ("call", "Bash", {"command": "pwd"}),
                                     ("call", "Bash", text[:at]), ("end", "max_tokens", 9, 4))
        answer = ask(served, dialect, stream=stream, tools=[TOOL])
        made = [call[1] for call in answer.calls]
        assert made == [{"command": "pwd"}, json.loads(text)][:2 if at == len(text) else 1], text[:at]
        assert answer.text == "Look: " and not answer.error
        assert answer.reason in (reason_in(dialect, "max_tokens"), "completed", "incomplete")
    counts = [receipt["broken_calls"] for receipt in served.receipts(len(text) + 1)]
    assert sorted(counts) == [0, *[1] * len(text)]


@STREAMS
@pytest.mark.parametrize("text", ['{"command": "ls",}', '{"command": "ls"', '["ls"]', "ls", "null", '{"a":1}{"b":2}'])
def test_a_call_with_broken_arguments_is_told_as_text(serve, backend, dialect, stream, text):
    if not sends_text(backend, dialect):
        pytest.skip("it sends whole calls, or its answer goes back as it came")
    broken, whole = ("call", "Bash", text), ("call", "Bash", {"command": "pwd"})
    for calls, reason in (([broken], "end_turn"), ([whole, broken], "tool_use"), ([broken, whole], "tool_use")):
        served = serve(plays(backend, dialect, ("text", "Look."), *calls, ("end", "tool_use", 9, 4)))
        answer = ask(served, dialect, stream=stream, tools=[TOOL])
        assert [call[1] for call in answer.calls] == [{"command": "pwd"}] * (len(calls) - 1)
        assert answer.text.startswith("Look.") and text in answer.text and "`Bash`" in answer.text
        assert answer.reason in (reason_in(dialect, reason), "completed") and not answer.error
        assert served.receipts()[0]["broken_calls"] == 1


@STREAMS
@pytest.mark.parametrize("text", ["", " ", "{}"])
def test_a_call_without_arguments_is_a_call(serve, backend, dialect, stream, text):
    if not sends_text(backend, dialect):
        text = {}
    served = serve(plays(backend, dialect, ("call", "Bash", text), ("end", "tool_use", 9, 4)))
    answer = ask(served, dialect, stream=stream, tools=[TOOL])
    assert [call[:2] for call in answer.calls] == [("Bash", {})] and not answer.text


def cut_everywhere(serve, backend, dialect, stream, step):
    """Cut a node's answer with two calls; no call is told but as the node meant it."""
    meant = [{"command": "ls"}, {"command": "pwd"}]
    steps = [("text", "a"), *(("call", "Bash", call) for call in meant), ("end", "tool_use", 9, 4)]
    if backend == "anthropic" and dialect == "messages" and not stream:
        whole = message_of(steps)
    else:
        whole = stream_of(backend, steps, dialect)
    served = serve(lambda node, connection: None)
    for at in range(whole.index(b"\r\n\r\n"), len(whole), step):
        served.nodes[0].play = lambda node, connection, at=at: connection.sendall(whole[:at])
        client = CLIENTS[dialect]
        request = client.request([("user", "hi")], stream=stream, tools=[TOOL])
        status, _, body = served.raw(served.post(request, target=client.target))
        if backend == "anthropic" and dialect == "messages" and b"error" in body:
            continue  # what had come of a call has gone back as it came, and then the error
        answer = client.read(status, body, stream)
        assert [call[1] for call in answer.calls] in (meant, meant[:1], []), at
        assert answer.error or len(answer.calls) == 2, at


@STREAMS
def test_an_answer_that_is_cut_holds_no_call_that_was_not_meant(serve, backend, dialect, stream):
    cut_everywhere(serve, backend, dialect, stream, 31)


@pytest.mark.slow
@STREAMS
def test_an_answer_that_is_cut_at_any_byte_holds_no_call_that_was_not_meant(serve, backend, dialect, stream):
    cut_everywhere(serve, backend, dialect, stream, 1)


@STREAMS
@pytest.mark.parametrize("indexes", [(0, 0), (None, None), (1, 0), (0, None), (None, 0)])
@pytest.mark.parametrize("together", [True, False])
def test_parallel_calls_are_told_apart_by_their_ids(serve, backend, dialect, stream, indexes, together):
    if not sends_text(backend, dialect):
        pytest.skip("it sends whole calls, or its answer goes back as it came")
    calls = []
    for name, index in zip("ab", indexes):
        function = {"name": "Bash", "arguments": json.dumps({"command": name})}
        calls.append({"id": f"c{name}", "function": function, **({} if index is None else {"index": index})})
    chunks = [{"delta": {"tool_calls": part}} for part in ([calls] if together else [[each] for each in calls])]
    body = "".join(f"data: {json.dumps({'choices': [chunk]})}\n\n"
                   for chunk in [*chunks, {"delta": {}, "finish_reason": "tool_calls"}])
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    served = serve(lambda node, connection: connection.sendall(head + body.encode() + b"data: [DONE]\n\n"))
    answer = ask(served, dialect, stream=stream, tools=[TOOL])
    assert answer.calls == [("Bash", {"command": "a"}, "ca"), ("Bash", {"command": "b"}, "cb")]
    assert not answer.text


def test_images_are_shown(serve, backend, dialect):
    served = serve(plays(backend, dialect, ("text", "A dot."), END))
    said = [("user", "what is it?"), ("image", PIXEL)]
    assert ask(served, dialect, said, stream=False).text == "A dot."
    assert heard_of(served.nodes[0].requests[0])[2] == 1


def test_images_that_a_model_does_not_take_are_left_out(serve, backend, dialect):
    def blind(node, connection):
        if heard_of(node.here.request)[2]:
            connection.sendall(refusal_of(backend, 500, "image input is not supported"))
        else:
            # A cloud's request that came with images is translated to leave them out.
            asked = "chat" if backend == "anthropic" else dialect
            plays(backend, asked, ("text", "I see none."), END)(node, connection)
    served = serve(blind)
    said = [("user", "what is it?"), ("image", PIXEL)]
    assert ask(served, dialect, said, stream=True).text == "I see none."
    assert ask(served, dialect, said, stream=True).text == "I see none."
    assert [heard_of(request)[2] for request in served.nodes[0].requests] == [1, 0, 0]


def test_stop_sequences(serve, backend, dialect):
    if dialect == "responses":
        pytest.skip("Responses has none")
    served = serve(plays(backend, dialect, ("text", "one two "), ("stop", "END", 12, 3)))
    answer = ask(served, dialect, stream=True, stops=["END"])
    assert answer.text == "one two " and answer.reason == reason_in(dialect, "stop_sequence")


@STREAMS
def test_most_tokens(serve, backend, dialect, stream):
    served = serve(plays(backend, dialect, ("text", "cut"), ("end", "max_tokens", 12, 50)), max_output=4000)
    answer = ask(served, dialect, stream=stream, most=5000)
    assert answer.text == "cut" and answer.tokens == (12, 50)
    assert answer.reason in (reason_in(dialect, "max_tokens"), "completed", "incomplete")
    request = served.nodes[0].requests[0]
    passes = backend == "anthropic" and dialect == "messages"  # the request as it came
    assert request.get("max_tokens", request.get("options", {}).get("num_predict")) == (5000 if passes else 4000)


def test_an_image_by_url_is_refused_unless_the_request_goes_on_as_it_came(serve, backend, dialect):
    if dialect != "messages":
        pytest.skip("only Messages go on as they came")
    image = {"type": "image", "source": {"type": "url", "url": "https://example.org/x.png"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
    for block in (image, result):
        served = serve(plays(backend, dialect, ("text", "A dot."), END))
        request = {"model": "x", "max_tokens": 9, "stream": True,
                   "messages": [{"role": "user", "content": [{"type": "text", "text": "see:"}, block]}]}
        status, _, body = served.raw(served.post(request))
        if backend == "anthropic":
            assert served.nodes[0].requests[0]["messages"] == request["messages"] and b"A dot." in body
        else:
            assert status == 400 and b"not URLs" in body and not served.nodes[0].requests


@STREAMS
@pytest.mark.parametrize("words", [
    "request (5000 tokens) exceeds the available context size (4096 tokens), try increasing it",
    "This model's maximum context length is 4096 tokens. However, your request has 5000 input tokens."])
def test_a_prompt_that_is_too_long_is_refused_in_the_clients_words(serve, backend, dialect, stream,
                                                                   words):
    served = serve(lambda node, connection: connection.sendall(refusal_of(backend, 400, words)))
    answer = ask(served, dialect, stream=stream)
    assert "5000" in answer.error and "4096" in answer.error
    if dialect == "messages":
        assert (answer.status, answer.error) \
            == (400, "prompt is too long: 5000 tokens > 4096 maximum")
    assert served.receipts()[0]["outcome"] == "prompt_too_long"


@STREAMS
def test_another_node_goes_on_where_one_fails_before_content(serve, backend, dialect, stream):
    steps = [("text", "never sent"), END]
    cut = stream_of(backend, steps, dialect).partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    ways = [refusal_of(backend, 500, "broken"), refusal_of(backend, 503, "busy"), cut, b"", b"SSH-2.0\r\n"]
    for way in ways:
        served = serve(lambda node, connection, way=way: connection.sendall(way),
                       plays(backend, dialect, ("text", "from the other"), END))
        answers = [ask(served, dialect, stream=stream) for _ in range(2)]
        assert [answer.text for answer in answers] == ["from the other"] * 2, way


def test_an_error_in_the_middle_of_an_answer_is_said(serve, backend, dialect):
    whole = stream_of(backend, [("text", "begun"), ("text", " more"), END], dialect)
    at = whole.index(b" more") - 40

    def dies(node, connection):
        connection.sendall(whole[:at])
    answer = ask(serve(dies), dialect, stream=True)
    assert answer.text in ("begun", "") and "node n0" in answer.error


def test_a_client_that_leaves_takes_its_request_off_the_node(serve, backend, dialect):
    begun = stream_of(backend, [("text", "begun"), END], dialect)
    begun = begun[:begun.index(b"\n", begun.index(b"begun")) + 1]

    def hangs(node, connection):
        connection.sendall(begun)
        while connection.recv(100):
            pass
        node.gone.set()
    served = serve(hangs)
    client = CLIENTS[dialect]
    request = client.request([("user", "hi")], stream=True)
    with served.connect() as connection:
        connection.sendall(served.post(request, target=client.target))
        connection.recv(100)
    assert served.nodes[0].gone.wait(5)
    assert served.receipts()[0]["outcome"] == "left"


def test_a_slow_first_token_is_waited_for_with_pings(serve, backend, dialect, limits):
    limits(quiet=0.02)
    pinged = threading.Event()

    def slow(node, connection):
        assert pinged.wait(20)
        plays(backend, dialect, ("text", "at last"), END)(node, connection)
    served = serve(slow)
    client = CLIENTS[dialect]
    with served.connect() as connection:
        connection.sendall(served.post(client.request([("user", "hi")], stream=True), target=client.target))
        # A ping says its name twice, and so does the beginning of Responses; Chat's are comments.
        wait_until(lambda: len(re.findall(rb"ping|in_progress|\n: ",
                                          connection.recv(65536, socket.MSG_PEEK))) >= 8)
        pinged.set()
        status, _, body = read_answer(connection.makefile("rb"))
    answer = client.read(status, body, True)
    assert answer.text == "at last" and answer.pings >= 2


def test_an_answer_that_comes_byte_by_byte_is_the_same(serve, backend, dialect):
    whole = stream_of(backend, [("thinking", "ü"), ("text", "é\U0001f600"),
                                ("call", "Bash", {"command": "ö"}), ("end", "tool_use", 5, 6)], dialect)

    def drips(node, connection):
        for at in range(0, len(whole), 7):
            connection.sendall(whole[at:at + 7])
    answer = ask(serve(drips, thinking=True), dialect, stream=True, tools=[TOOL])
    assert (answer.thinking, answer.text, answer.calls[0][:2], answer.tokens) \
        == ("ü", "é\U0001f600", ("Bash", {"command": "ö"}), (5, 6))


def test_nothing_of_a_conversation_or_a_key_is_kept(serve, backend, dialect, tmp_path):
    served = serve(plays(backend, dialect, ("text", "the secret answer"), END))
    served.world.environ["NODE_API_KEY"] = "sk-node-0123456789"
    node = served.server.fleet.nodes["n0"]
    served.server.fleet.nodes["n0"] = replace(node, api_key_env="NODE_API_KEY")
    answer = ask(served, dialect, [("user", "the secret prompt")], stream=True)
    assert "not trusted" in answer.error and not served.nodes[0].requests

    served.world.node_keys[node.endpoint, "NODE_API_KEY"] = "sk-node-0123456789"
    wait_until(lambda: ask(served, dialect, [("user", "the secret prompt")],
                           stream=True).text == "the secret answer")
    served.receipts(1)  # it is filed when the answer has gone
    kept = served.receipts_path.read_text() + "".join(served.said) + json.dumps(served.server.show())
    assert not [word for word in ("secret", "sk-node", KEY) if word in kept]


def test_a_node_that_answers_nothing_any_more_is_left(serve, backend, dialect, limits):
    limits(silence=0.1, probe=0.15)
    head = stream_of(backend, [END], dialect).partition(b"\r\n\r\n")[0] + b"\r\n\r\n"

    def hung(node, connection):
        connection.sendall(head + (b": alive\n" if backend != "ollama" else b""))
        node.gone.wait(3)
    served = serve(hung, plays(backend, dialect, ("text", "from the other"), END))
    served.nodes[0].page = lambda node, connection: node.gone.wait(3)
    answers = [ask(served, dialect, stream=True).text for _ in range(2)]
    served.nodes[0].gone.set()
    assert answers == ["from the other"] * 2
    tries = [tried for receipt in served.receipts(2) for tried in receipt["failures"]]
    assert [tried["why"] for tried in tries] == ["timeout"]


def test_garbage_in_an_answer_is_the_nodes_fault(serve, backend, dialect):
    good = stream_of(backend, [("text", "x"), END], dialect)
    head = good.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    for garbage in (b"data: {broken\n", b'data: [1]\n', b"{\n", b"data: " + b"[" * 5000 + b"\n"):
        garbage = garbage if backend != "ollama" else garbage.replace(b"data: ", b"")
        served = serve(lambda node, connection, garbage=garbage: connection.sendall(head + garbage))
        answer = ask(served, dialect, stream=True)
        assert "bad answer" in answer.error or "ended before" in answer.error or answer.error, garbage
        assert isinstance(served.connect(), socket.socket)
