"""The seams: a backend and a dialect that the program never heard of serve a conversation."""
import inspect
import json

import pytest

import subagent_fleet as sf
from gateway_rig import HEAD, Node, Rig, events_of, fleet_of
from node_rig import probe, warm
from subagent_fleet import replace

# -- a backend: it speaks in lines of `word rest` --

class ToyBackend(sf.Backend):
    name, title = "toy", "Toy"

    def identify(self):
        return self._ask("/hello", lambda value: sf.read_field(value, "toy"))

    def list_models(self):
        return self._ask("/shelf", lambda value: tuple(map(sf.NodeModel, value["shelf"])))

    def list_loaded(self):
        return self._ask("/memory", lambda value: tuple(
            sf.LoadedModel(name, context, None, 0, "") for name, context in value["memory"]))

    def describe(self, model_name):
        return self._ask("/about", lambda value: {"capabilities": tuple(value["can"])},
                         {"name": model_name})

    def load(self, model, *, unload=False):
        return self._ask("/load", lambda value: None, {
            "name": model.ollama_model, "context": 0 if unload else model.context})

    def pull(self, model):
        return self._ask("/fetch", lambda value: sf.PullStep(is_done=True))

    def chat(self, talk, model):
        said = []
        for turn in talk.turns:
            said += [f"{turn.role} {text}" for text in turn.texts]
            said += [f"called {call.name} {json.dumps(call.arguments)}" for call in turn.calls]
            said += [f"result {result.text}" for result in turn.results]
        tools = [tool.name for tool in talk.tools]
        return sf.Ask("/talk", sf.error_words, {"name": model.ollama_model, "said": said,
                                                "tools": tools}, {"X-Toy": "1"})

    def reader(self, talk, model, estimate):
        return ToyReader(self.name, talk, model, estimate)

    def _ask(self, path, read, payload=None):
        def extract(reply):
            if reply.status != 200:
                raise sf.NodeFailure(f"http {reply.status}", sf.error_words(reply))
            return read(sf.parse_answer(reply.body, self))
        return sf.Ask(path, extract, payload)


class ToyReader(sf.Reader):
    has_begun = True

    def feed(self, line):
        word, _, rest = line.decode().partition(" ")
        if word == "say":
            return [sf.Delta("text", json.loads(rest))]
        if word == "call":
            return [sf.Delta("call", call=sf.Call("", "Bash", json.loads(rest)))]
        if word == "end":
            reason, tokens_in, tokens_out = rest.split()
            return [sf.Delta("end", end=sf.End(reason, "", int(tokens_in), int(tokens_out)))]
        raise sf.NodeFailure("bad answer", "no toy says that")

    def refusal(self, status, words):
        return sf.PromptTooLong(9, 5) if "long" in words else sf.Refusal(500, words)


# -- a dialect: its requests are JSON, its answers lines of `word rest` --

class ToyDialect(sf.Dialect):
    path, count_path = "/toy", "/toy/count"

    def parse(self, body):
        request = sf.parse_object(body)
        if request is None:
            raise sf.Refusal(400, "no toy sends that")
        turns = []
        for word, value in request["said"]:
            if word == "call":
                calls = (sf.Call(value["id"], value["name"], value["arguments"]),)
                turns.append(sf.Turn("assistant", calls=calls))
            elif word == "result":
                turns.append(sf.Turn("user", results=(sf.Result(value["id"], value["text"]),)))
            else:
                turns.append(sf.Turn(word, texts=(value,)))
        tools = tuple(sf.Tool(name, "", {}) for name in request["tools"])
        return sf.Talk(request["to"], tuple(turns), tools=tools, is_stream=request["stream"])

    def conversation(self, headers, talk):
        return sf.Conversation(headers.get("x-toy-session", ""))

    def refuse(self, refusal):
        return b"error %b\n" % sf.render_json(refusal.what)

    def count(self, tokens):
        return b"count %d\n" % tokens


class ToyWriter(sf.Writer):
    def __init__(self, talk, answer_id):
        self.is_stream, self.held, self.calls = talk.is_stream, b"", 0

    def begin(self):
        return self.tell("begin")

    def write(self, delta):
        if not delta.call:
            return self.tell(delta.kind, delta.text)
        self.calls += 1
        return self.tell("call", {"id": f"c{self.calls}", "name": delta.call.name,
                                  "arguments": delta.call.arguments})

    def ping(self):
        return self.tell("ping")

    def fail(self, refusal):
        return self.tell("error", refusal.what)

    def end(self, end):
        last = self.tell("end", [end.reason, end.input_tokens, end.output_tokens])
        return last if self.is_stream else self.held

    def tell(self, word, value=""):
        line = b"%b %b\n" % (word.encode(), sf.render_json(value))
        if self.is_stream:
            return line
        self.held += line
        return b""


ToyDialect.writes = ToyWriter


# -- nodes of both kinds, on which a model lists files by calling Bash --

def toy_node(node, connection):
    pages = {"/hello": {"toy": "0.1"}, "/shelf": {"shelf": ["tiny", "other"]},
             "/memory": {"memory": [["tiny", 32768]]}, "/about": {"can": ["tools"]}, "/load": {}}
    target, request = node.here.target, node.here.request
    if target in pages:
        lines = [json.dumps(pages[target])]
    elif "result a.txt b.txt" in request["said"]:
        lines = ['say "Two "', 'say "files."', "end end_turn 30 2"]
    else:
        assert request["said"] == ["user which files?"] and request["tools"] == ["Bash"]
        lines = ['say "Let me "', 'say "look."', 'call {"command": "ls"}', "end tool_use 20 5"]
    connection.sendall(HEAD + "".join(f"{line}\n" for line in lines).encode())


def ollama_node(node, connection):
    request = node.here.request
    if request["messages"][-1]["role"] == "tool":
        assert request["messages"][-1]["content"] == "a.txt b.txt"
        parts, last = [{"content": "Two "}, {"content": "files."}], (30, 2)
    else:
        assert request["tools"][0]["function"]["name"] == "Bash"
        call = {"function": {"name": "Bash", "arguments": {"command": "ls"}}}
        parts = [{"content": "Let me "}, {"content": "look."}, {"tool_calls": [call]}]
        last = 20, 5
    lines = [{"message": part, "done": False} for part in parts]
    lines.append({"message": {}, "done": True, "prompt_eval_count": last[0], "eval_count": last[1]})
    connection.sendall(HEAD + "".join(json.dumps(line) + "\n" for line in lines).encode())


# -- clients of both kinds: each returns (text, call, reason, tokens in and out) --

def ask_as_toy(served, said, *, stream):
    request = {"to": "x", "said": said, "tools": ["Bash"], "stream": stream}
    status, _, body = served.raw(served.post(request, target="/toy"))
    assert status == 200, body
    told = [line.split(" ", 1) for line in body.decode().splitlines()]
    told = [(word, json.loads(value)) for word, value in told]
    assert (told[0][0] == "begin") is stream and told[-1][0] == "end"
    calls = [value for word, value in told if word == "call"]
    text = "".join(value for word, value in told if word == "text")
    return text, (calls or [None])[0], *told[-1][1]


def ask_as_claude(served, said, *, stream):
    messages = []
    for word, value in said:
        if word == "call":
            block = {"type": "tool_use", "id": value["id"], "name": value["name"],
                     "input": value["arguments"]}
            messages.append({"role": "assistant", "content": [block]})
        elif word == "result":
            block = {"type": "tool_result", "tool_use_id": value["id"], "content": value["text"]}
            messages.append({"role": "user", "content": [block]})
        else:
            messages.append({"role": word, "content": value})
    status, _, body = served.ask(messages=messages, tools=[{"name": "Bash"}], stream=stream)
    assert status == 200, body
    message = message_of(events_of(body)) if stream else json.loads(body)
    text = "".join(block.get("text", "") for block in message["content"])
    calls = [{"id": block["id"], "name": block["name"], "arguments": block["input"]}
             for block in message["content"] if block["type"] == "tool_use"]
    usage = message["usage"]
    return text, (calls or [None])[0], message["stop_reason"], usage["input_tokens"], \
        usage["output_tokens"]


def message_of(events):
    """What Anthropic's SDK makes of a stream."""
    message = events[0]["message"]
    for event in events:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            else:
                block["input"] = json.loads(delta["partial_json"])
        elif event["type"] == "message_delta":
            message.update(event["delta"])
            message["usage"].update(event["usage"])
    return message


# -- the proof --

CLIENTS = {"toy": ask_as_toy, "claude": ask_as_claude}
NODES = {"toy": toy_node, "ollama": ollama_node}


@pytest.fixture
def toys(monkeypatch):
    monkeypatch.setitem(sf.BACKENDS, "toy", ToyBackend())
    monkeypatch.setitem(sf.DIALECTS, "toy", ToyDialect())


@pytest.fixture
def serve(tmp_path, toys):
    """Start a gateway for nodes of these kinds, all of one alias."""
    started = []

    def start(*kinds, plays=NODES):
        nodes = [Node(plays[kind]) for kind in kinds]
        fleet = fleet_of(*((f"m{i}", f"n{i}", "x", {}) for i in range(len(nodes))),
                         nodes={f"n{i}": node.endpoint for i, node in enumerate(nodes)})
        for node, kind in zip(list(fleet.nodes.values()), kinds):
            fleet.nodes[node.name] = replace(node, provider=kind)
        served = Rig(fleet, tmp_path)
        served.nodes = nodes
        started.append(served)
        return served
    yield start
    for served in started:
        served.close()
        for node in served.nodes:
            node.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("client", CLIENTS)
def test_every_client_talks_to_every_node_with_a_tool_call(serve, client, node, stream):
    served, ask = serve(node), CLIENTS[client]
    said = [("user", "which files?")]
    text, call, *end = ask(served, said, stream=stream)
    assert (text, end) == ("Let me look.", ["tool_use", 20, 5])
    assert (call["name"], call["arguments"]) == ("Bash", {"command": "ls"}) and call["id"]

    said += [("call", call), ("result", {"id": call["id"], "text": "a.txt b.txt"})]
    text, call, *end = ask(served, said, stream=stream)
    assert (text, call, end) == ("Two files.", None, ["end_turn", 30, 2])
    assert [receipt["outcome"] for receipt in served.receipts(2)] == ["ok", "ok"]
    assert len(served.nodes[0].requests) == 2


def dies(node, connection):
    connection.sendall(HEAD + b'say "never sent"\nnonsense\n')


def refuses(node, connection):
    connection.sendall(b"HTTP/1.1 400 x\r\nContent-Length: 8\r\n\r\ntoo long")


@pytest.mark.parametrize("client", CLIENTS)
def test_a_node_of_another_kind_goes_on_where_one_fails(serve, client):
    served = serve("toy", "ollama", plays={**NODES, "toy": dies})
    for _ in range(2):
        text, call, *_ = CLIENTS[client](served, [("user", "which files?")], stream=True)
        assert (text, call["arguments"]) == ("Let me look.", {"command": "ls"})
    tries = [tried for receipt in served.receipts(2) for tried in receipt["failures"]]
    assert tries == [{"node": "n0", "why": "bad answer"}]


def test_a_client_hears_of_refusals_in_its_own_words(serve):
    served = serve("toy", plays={"toy": refuses})
    request = {"to": "x", "said": [("user", "hi")], "tools": [], "stream": True}

    def answer_to(sent, **headers):
        status, _, body = served.raw(served.post(sent, target="/toy", **headers))
        return status, body
    assert answer_to(request) == (400, b'error "prompt is too long: 9 tokens > 5 maximum"\n')
    assert answer_to(b"{") == (400, b'error "no toy sends that"\n')
    assert answer_to({**request, "to": "y"}) \
        == (404, b'error "model: this fleet has no `y`; it has `x`"\n')
    status, body = answer_to(request, x_api_key=None)
    assert status == 401 and body.startswith(b'error "the key is missing')


def waits(node, connection):
    node.gone.wait(0.35)
    toy_node(node, connection)


def test_a_client_counts_tokens_and_is_pinged_in_its_own_words(serve, limits):
    limits(quiet=0.1)
    served = serve("toy", plays={"toy": waits})
    request = {"to": "x", "said": [("user", "which files?")], "tools": ["Bash"], "stream": True}
    assert served.raw(served.post(request, target="/toy/count"))[2].startswith(b"count ")
    lines = served.raw(served.post(request, target="/toy"))[2].splitlines()
    assert lines[:2] == [b'begin ""', b'ping ""'] and lines.count(b'begin ""') == 1


def test_the_writer_says_whether_the_answer_is_a_stream(serve, monkeypatch, limits):
    """A client that never asks for a stream, and always gets one, is a dialect, too."""
    monkeypatch.setattr(ToyDialect, "writes", staticmethod(
        lambda talk, answer_id: ToyWriter(sf.replace(talk, is_stream=True), answer_id)))
    limits(quiet=0.2)
    served = serve("toy", plays={"toy": waits})
    said = [("user", "which files?")]
    request = {"to": "x", "said": said, "tools": ["Bash"], "stream": False}
    _, headers, body = served.raw(served.post(request, target="/toy"))
    assert headers["transfer-encoding"] == "chunked"
    assert [line.split()[0] for line in body.splitlines()] \
        == [b"begin", b"ping", b"text", b"text", b"call", b"end"]


def test_conversations_of_any_dialect_are_remembered(serve):
    served = serve("toy", "toy")
    request = {"to": "x", "said": [("user", "which files?")], "tools": ["Bash"], "stream": False}
    for number, session in enumerate("abab"):
        served.raw(served.post(request, target="/toy", x_toy_session=session))
        # It is filed, and the slot is free, after the answer: the next one could overtake it.
        receipts = served.receipts(number + 1)
    assert [receipt["session"] for receipt in receipts] == ["a", "b", "a", "b"]
    nodes = [receipt["node"] for receipt in receipts]
    assert nodes[:2] == nodes[2:] and nodes[0] != nodes[1]


# -- what else is asked of a node --

@pytest.fixture
def toy(toys):
    node = Node(toy_node, plays_all=True)
    fleet = fleet_of(("m", "a", "x", {}), nodes={"a": node.endpoint})
    yield replace(fleet.nodes["a"], provider="toy"), fleet.models["m"], node
    node.close()


def test_a_probe_reads_what_another_backend_says(toy):
    node, model, _ = toy
    state = probe(node, "toy", show=[model.ollama_model])
    assert (state.reason, state.version) == ("", "0.1")
    assert [(model.name, model.capabilities) for model in state.models] \
        == [("tiny", ("tools",)), ("other", None)]
    assert [(loaded.name, loaded.context) for loaded in state.loaded] == [("tiny", 32768)]


def test_a_warm_up_loads_through_another_backend(toy):
    node, model, fake = toy
    warmth = warm(node.endpoint, "toy", model.ollama_model, context=model.context)
    assert (warmth.ok, warmth.detail, warmth.loaded.context) == (True, "", 32768)
    assert {"name": "tiny", "context": 32768} in fake.requests


def test_another_backend_gives_its_name_to_what_is_not_it(toys):
    node = Node(lambda node, connection: connection.sendall(HEAD + b"<html>"), plays_all=True)
    state = probe(node, "toy")
    assert state.reason == "not toy"
    node.close()


@pytest.mark.parametrize("parts", [(ToyBackend, ToyReader), (ToyDialect, ToyWriter)])
def test_a_toy_is_short(parts):
    """A backend, or a dialect, is a small thing to write."""
    assert sum(len(inspect.getsource(part).splitlines()) for part in parts) <= 60
