"""What other servers than Ollama answer, and what is made of it.

llama-server's answers were recorded from b10488; those of vLLM (0.28) and LM Studio (0.4) are what
their sources and documentation say, and are not recorded from a run.
"""
import json
import random
import socket
import time

import pytest
from test_translation import mutate

import subagent_fleet as sf
from gateway_rig import Node, Rig, fleet_of
from matrix_cases import PIXEL, stream_of
from node_rig import probe, recognise, warm
from subagent_fleet import replace
from tools import free_port

LLAMA = "HTTP/1.1 {} x\r\nServer: llama.cpp\r\n"
PLAIN = "HTTP/1.1 {} x\r\n"
LLAMA_PROPS = {
    "default_generation_settings": {"n_ctx": 32768}, "total_slots": 4, "model_alias": "worker",
    "modalities": {"vision": True, "video": False, "audio": False}, "build_info": "b10488-0a1b2c3",
    "chat_template_caps": {"supports_tools": True, "supports_tool_calls": True}}
LLAMA_ONE = {"models": [{"name": "worker"}], "object": "list", "data": [{
    "id": "worker", "object": "model", "owned_by": "llamacpp", "meta": {
        "n_ctx": 32768, "n_ctx_train": 262144, "n_params": 30500000000, "size": 18600000000,
        "ftype": "Q4_K - Medium"}}]}
NOT_FOUND = {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}}
VLLM = {"object": "list", "data": [{
    "id": "qwen", "object": "model", "created": 1, "owned_by": "vllm", "root": "Qwen/Qwen3-30B",
    "parent": None, "max_model_len": 65536, "permission": []}]}
STUDIO = {"models": [{
    "type": "llm", "publisher": "qwen", "key": "qwen/qwen3-30b", "display_name": "Qwen3 30B",
    "architecture": "qwen3moe", "quantization": {"name": "Q4_K_M", "bits_per_weight": 4},
    "size_bytes": 18600000000, "params_string": "30B", "loaded_instances": [],
    "max_context_length": 262144, "format": "gguf",
    "capabilities": {"vision": False, "trained_for_tool_use": True}}, {
    "type": "embedding", "publisher": "gaianet", "key": "nomic", "display_name": "Nomic",
    "quantization": {"name": "F16", "bits_per_weight": 16}, "size_bytes": 274290560,
    "params_string": None, "loaded_instances": [], "max_context_length": 2048, "format": "gguf"}]}


class Server:
    """A node that answers its pages; `pages` maps a path to (status, value) or a function."""

    def __init__(self, pages, head=PLAIN, missing=NOT_FOUND):
        self.pages, self.head, self.missing, self.asked = pages, head, missing, []
        self.node = Node(self.play, plays_all=True)
        self.endpoint = self.node.endpoint

    def play(self, node, connection):
        target, request = node.here.target, node.here.request
        self.asked.append((target, request))
        found = self.pages.get(target, (404, self.missing))
        status, value = found(request) if callable(found) else found
        body = json.dumps(value).encode()
        head = self.head.format(status) + f"Content-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)


class Keyed(Node):
    """A node that sees whether its key came."""

    key = "sk-of-the-tower"

    def _serve(self, connection):
        head = connection.recv(65536, socket.MSG_PEEK)
        self.has_key = f"Bearer {self.key}".encode() in head
        super()._serve(connection)


class Router:
    """llama-server with several models: it loads in the background."""

    def __init__(self, names, *, looks=2, broken=()):
        self.states = dict.fromkeys(names, "unloaded")
        self.looks, self.left, self.broken = looks, {}, broken
        self.server = Server({
            "/props": (200, {"role": "router", "build_info": "b10488-x", "max_instances": 4}),
            "/v1/models": self.list, "/models/load": self.load, "/models/unload": self.unload,
        }, LLAMA)
        self.endpoint = self.server.endpoint

    def list(self, _):
        for name, left in list(self.left.items()):
            self.left[name] = left - 1
            if left <= 0:
                self.states[name] = "unloaded" if name in self.broken else "loaded"
        entries = []
        for name, state in self.states.items():
            status = {"value": state, "args": []}
            if name in self.broken and self.left.get(name, 1) < 0:
                status.update(failed=True, exit_code=1)
            entries.append({"id": name, "owned_by": "llamacpp", "status": status, "architecture": {
                "input_modalities": ["text", "image"] if name == "seer" else ["text"]}})
            if state == "loaded":
                entries[-1]["meta"] = {"n_ctx": 16384, "n_ctx_train": 262144}
        return 200, {"data": entries, "object": "list"}

    def load(self, request):
        if request["model"] not in self.states:
            return 404, NOT_FOUND
        if self.states[request["model"]] != "unloaded":
            return 400, {"error": {"code": 400, "message": "model is already running"}}
        self.states[request["model"]] = "loading"
        self.left[request["model"]] = self.looks
        return 200, {"success": True}

    def unload(self, request):
        if self.states.get(request["model"]) != "loaded":
            return 400, {"error": {"code": 400, "message": "model is not running"}}
        self.states[request["model"]] = "unloaded"
        return 200, {"success": True}


class Studio:
    """LM Studio: each load is an instance of its own."""

    def __init__(self):
        self.models = json.loads(json.dumps(STUDIO))
        self.server = Server({
            "/api/v1/models": lambda _: (200, self.models), "/api/v1/models/load": self.load,
            "/api/v1/models/unload": self.unload})
        self.endpoint = self.server.endpoint

    def load(self, request):
        for model in self.models["models"]:
            if model["key"] == request["model"]:
                count = len(model["loaded_instances"])
                own_id = model["key"] + (f":{count + 1}" if count else "")
                model["loaded_instances"].append({"id": own_id, "config": {
                    "context_length": request["context_length"], "parallel": 4}})
                return 200, {"type": "llm", "instance_id": own_id, "status": "loaded",
                             "load_time_seconds": 9.1}
        return 404, {"error": {"message": "Model not found", "type": "model_not_found"}}

    def unload(self, request):
        for model in self.models["models"]:
            model["loaded_instances"] = [each for each in model["loaded_instances"]
                                         if each["id"] != request["instance_id"]]
        return 200, {"instance_id": request["instance_id"]}

    def instances(self):
        return [each for model in self.models["models"] for each in model["loaded_instances"]]


# -- who answers, and what it has --

def test_llama_server_with_one_model_is_read():
    server = Server({"/props": (200, LLAMA_PROPS), "/v1/models": (200, LLAMA_ONE)}, LLAMA)
    state = probe(server.endpoint, "llamacpp")
    assert (state.reason, state.runs) == ("", "llama.cpp b10488")
    assert state.models == (sf.NodeModel(
        "worker", 18600000000, "30.5B", "Q4_K - Medium",
        ("completion", "thinking", "tools", "vision"), 262144),)
    assert [(one.name, one.context) for one in state.loaded] == [("worker", 32768)]


def test_llama_server_as_a_router_is_read():
    router = Router(["worker", "seer"])
    router.states["worker"] = "loaded"
    state = probe(router.endpoint, "llamacpp")
    assert [(one.name, one.capabilities) for one in state.models] \
        == [("seer", ("completion", "tools", "thinking", "vision")), ("worker", None)]
    assert [(one.name, one.context) for one in state.loaded] == [("worker", 16384)]


def test_vllm_is_read():
    server = Server({"/version": (200, {"version": "0.28.0"}), "/v1/models": (200, VLLM)})
    state = probe(server.endpoint, "vllm")
    assert (state.reason, state.runs) == ("", "vLLM 0.28.0")
    assert [(one.name, one.trained_context) for one in state.models] == [("qwen", 65536)]
    assert [(one.name, one.context) for one in state.loaded] == [("qwen", 65536)]


def test_lm_studio_is_read():
    studio = Studio()
    studio.load({"model": "qwen/qwen3-30b", "context_length": 65536})
    state = probe(studio.endpoint, "lmstudio")
    assert (state.reason, state.runs) == ("", "LM Studio")
    assert [(one.name, one.parameters, one.capabilities) for one in state.models] \
        == [("nomic", "", ("embedding",)), ("qwen/qwen3-30b", "30B", ("completion", "tools"))]
    assert [(one.name, one.context) for one in state.loaded] == [("qwen/qwen3-30b", 65536)]


def test_a_chat_completions_server_is_read():
    listed = {"object": "list", "data": [{"id": "a/b", "context_length": 131072}, {"id": "c"}]}
    state = probe(Server({"/v1/models": (200, listed)}).endpoint, "openai")
    assert [(one.name, one.trained_context) for one in state.models] == [("a/b", 131072), ("c", None)]
    assert [(one.name, one.context) for one in state.loaded] == [("a/b", 131072), ("c", 0)]


KINDS = {
    "llamacpp": lambda: Server({"/props": (200, LLAMA_PROPS), "/v1/models": (200, LLAMA_ONE)}, LLAMA),
    "lmstudio": lambda: Server({"/api/v1/models": (200, STUDIO), "/v1/models": (
        200, {"object": "list", "data": [{"id": "qwen/qwen3-30b"}]})}),
    "vllm": lambda: Server({"/version": (200, {"version": "0.28.0"}), "/v1/models": (200, VLLM)}),
    "openai": lambda: Server({"/v1/models": (200, {"object": "list", "data": [{"id": "m"}]})}),
    "ollama": lambda: Server({"/api/version": (200, {"version": "0.32.15"}), "/api/tags": (
        200, {"models": []}), "/api/ps": (200, {"models": []}), "/v1/models": (
        200, {"object": "list", "data": []})})}


@pytest.mark.parametrize("kind", KINDS)
def test_who_answers_is_recognised(kind):
    assert {*KINDS, "anthropic"} == set(sf.BACKENDS)  # which is told by its name
    found, state = recognise(KINDS[kind]().endpoint)
    assert (found.provider, state.provider, state.reason) == (kind, kind, "")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_one_kind_is_not_taken_for_another(kind, other):
    state = probe(KINDS[kind]().endpoint, other)
    if kind == other or other == "openai":  # whose list all of them have
        assert state.reason in ("", "not openai") and (kind != other or not state.reason)
    else:
        assert state.reason == f"not {other}" and kind_named(state.fix, other)


def kind_named(fix, kind):
    return f"start {sf.NODE_KINDS[kind].title} there" in fix


@pytest.mark.parametrize("kind", sf.NODE_KINDS)
def test_where_nothing_listens_only_a_program_is_named_as_one(kind):
    state = probe(f"http://127.0.0.1:{free_port()}", kind)
    title = sf.NODE_KINDS[kind].title
    if kind in ("openai", "anthropic"):
        assert title not in state.detail + state.fix and "worker" not in state.fix
        assert "is its server running?" in state.detail and "correct its endpoint" in state.fix
    else:
        assert f"is {title} running?" in state.detail and "worker" in state.fix


def test_a_size_that_is_not_told_is_not_said():
    state = probe(KINDS["vllm"]().endpoint, "vllm")
    assert "0.0 GB" not in sf._describe_model(state.models[0])
    starter = sf.plan_starter([state])
    assert starter.assignment.placements and "0.0 GB" not in "".join(starter.assignment.why.values())


def test_a_server_that_wants_a_key_says_so():
    refused = {"error": {"code": 401, "message": "Invalid API Key", "type": "authentication_error"}}
    server = Server({"/health": (200, {"status": "ok"})}, LLAMA, refused)
    server.pages = dict.fromkeys(("/props", "/v1/models", "/api/version", "/version",
                                  "/api/v1/models"), (401, refused))
    assert recognise(server.endpoint)[0].provider == "llamacpp"
    state = probe(server.endpoint, "llamacpp")
    assert state.reason == "http 401" and "api_key_env" in state.fix


def test_a_server_that_loads_its_model_is_waited_for():
    loading = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
    state = probe(Server({"/props": (503, loading)}, LLAMA).endpoint, "llamacpp")
    assert state.why == "http 503: Loading model" and "wait" in state.fix


@pytest.mark.parametrize("provider", [name for name in sf.BACKENDS if name != "ollama"])
@pytest.mark.parametrize("answer", [
    b"", b"[]", b"null", b'{"data": 1}', b'{"data": [{"id": 1}]}', b'{"models": {}}', b"<html>", b"{",
    b'{"data": null, "models": null}', b'{"version": 5}', b"[" * 9000, b'{"data":[' + b"{}," * 60000 + b"{}]}",
    b'{"data":[{"id":"m","meta":5,"status":[],"architecture":7}]}'])
def test_an_answer_that_is_none_is_the_nodes_fault(provider, answer):
    head = b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Length: %d\r\n\r\n" % len(answer)
    node = Node(lambda node, connection: connection.sendall(head + answer), plays_all=True)
    state = probe(node.endpoint, provider)
    assert not state.reason or state.reason in (f"not {provider}", "bad answer"), state
    node.close()


# -- loading --

def test_a_router_loads_and_is_waited_for():
    router = Router(["worker"])
    warmth = warm(router.endpoint, "llamacpp", "worker")
    assert (warmth.ok, warmth.detail, warmth.loaded.context) == (True, "", 16384)
    assert router.states == {"worker": "loaded"}
    assert warm(router.endpoint, "llamacpp", "worker").ok  # already running
    assert warm(router.endpoint, "llamacpp", "worker", unload=True).ok
    assert router.states == {"worker": "unloaded"}
    assert warm(router.endpoint, "llamacpp", "worker", unload=True).ok  # not running


def test_a_router_that_cannot_load_says_why():
    warmth = warm(Router(["worker"], broken=("worker",)).endpoint, "llamacpp", "worker")
    assert not warmth.ok and "could not load it (exit code 1)" in warmth.detail


def test_a_router_without_the_model_says_what_it_has():
    warmth = warm(Router(["worker"]).endpoint, "llamacpp", "nope")
    assert not warmth.ok and "it has no model `nope`; it has `worker`" in warmth.detail
    assert "--alias nope" in warmth.fix and "pull" not in warmth.fix


def test_a_wish_to_download_is_answered_by_how_a_model_comes_there():
    warmth = warm(Router(["worker"]).endpoint, "llamacpp", "nope", pull=True)
    assert not warmth.ok and "takes no downloads from here" in warmth.detail
    assert warmth.fix == "start llama-server with `--alias nope` there"


def test_a_load_that_takes_too_long_is_given_up():
    warmth = warm(Router(["worker"], looks=1000).endpoint, "llamacpp", "worker", timeout=1)
    assert not warmth.ok and warmth.detail == "not loaded within 1 s"


def test_a_smaller_context_than_the_route_wants_is_said():
    warmth = warm(Router(["worker"]).endpoint, "llamacpp", "worker", context=65536)
    assert warmth.detail == "loaded with context 16384, not 65536"
    assert warmth.fix == "write `context: 16384` in models.m"


def test_lm_studio_loads_with_the_context_of_the_route_and_only_once():
    studio = Studio()
    for _ in range(2):
        assert warm(studio.endpoint, "lmstudio", "qwen/qwen3-30b", context=65536).ok
    assert [one["config"]["context_length"] for one in studio.instances()] == [65536]
    assert warm(studio.endpoint, "lmstudio", "qwen/qwen3-30b", context=131072).ok
    assert [one["config"]["context_length"] for one in studio.instances()] == [131072]
    assert warm(studio.endpoint, "lmstudio", "qwen/qwen3-30b", unload=True).ok
    assert studio.instances() == []


@pytest.mark.parametrize("provider, model", [("vllm", "qwen"), ("openai", "m"), ("llamacpp", "worker")])
def test_what_is_always_loaded_needs_no_loading(provider, model):
    endpoint = KINDS[provider]().endpoint
    assert warm(endpoint, provider, model).ok
    assert "stays" in warm(endpoint, provider, model, unload=True).detail


@pytest.mark.parametrize("provider", [name for name in KINDS if name != "ollama"])
def test_what_takes_no_downloads_says_how_a_model_comes_there(provider):
    server = KINDS[provider]()
    ask = sf.BACKENDS[provider].pull(sf.Model("m", "n", "some:7b", "x"))
    with pytest.raises(sf.NodeFailure, match="takes no downloads from here") as caught:
        sf.World().ask(server.endpoint, ask, deadline=time.monotonic() + 2)
    assert "some:7b" in caught.value.fix


# -- what is asked of them --

def talk_of(**request):
    return sf.Messages().parse(json.dumps({
        "model": "x", "messages": [{"role": "user", "content": "hi"}], **request}).encode())


MODEL = sf.Model("m", "n", "worker", "x", context=32768)
LOCAL = ("llamacpp", "lmstudio", "vllm")


@pytest.mark.parametrize("provider", LOCAL)
def test_a_local_server_is_asked_for_all_that_a_messages_client_wants(provider):
    talk = talk_of(max_tokens=64000, temperature=0.5, metadata={"user_id": "u"}, top_k=5,
                   stop_sequences=["S"], thinking={"type": "adaptive"},
                   system=[{"type": "text", "text": "x-anthropic-billing-header: cc=1;"},
                           {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
                   messages=[{"role": "user", "content": "hi"},
                             {"role": "system", "content": "the environment"}],
                   tools=[{"name": "Bash", "description": "d", "input_schema": {"properties": {}}},
                          {"name": "Late", "defer_loading": True, "input_schema": {"type": "object"}}],
                   tool_choice={"type": "any", "disable_parallel_tool_use": True})
    sent = sf.BACKENDS[provider].chat(talk, MODEL).payload
    told = sent.pop("chat_template_kwargs", {})
    assert told == ({} if provider == "lmstudio" else {"enable_thinking": False})
    assert sent == {
        "model": "worker", "stream": True, "stream_options": {"include_usage": True},
        "max_tokens": 8192, "temperature": 0.5, "top_k": 5,
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content":
                     "<system-reminder>\nthe environment\n</system-reminder>\n\nhi"}],
        "tools": [{"type": "function", "function": {
            "name": "Bash", "description": "d", "parameters": {"properties": {}, "type": "object"}}}],
        "tool_choice": "required", "parallel_tool_calls": False}


@pytest.mark.parametrize("provider", LOCAL)
@pytest.mark.parametrize("thinking", [True, False])
def test_thinking_is_asked_for_where_the_model_may_think(provider, thinking):
    talk = talk_of(thinking={"type": "adaptive"}, messages=[
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"},
                                          {"type": "text", "text": "yes"}]},
        {"role": "user", "content": "and?"}])
    sent = sf.BACKENDS[provider].chat(talk, replace(MODEL, thinking=thinking)).payload
    has_template = provider != "lmstudio"
    assert sent.get("chat_template_kwargs") == ({"enable_thinking": thinking} if has_template else None)
    assert sent["messages"][1].get("reasoning_content") == ("hm" if thinking and has_template else None)


@pytest.mark.parametrize("provider", [*LOCAL, "openai"])
def test_the_one_tool_that_must_be_called_is(provider):
    talk = talk_of(tools=[{"name": name, "input_schema": {}} for name in ("Bash", "Read")],
                   tool_choice={"type": "tool", "name": "Read"})
    sent = sf.BACKENDS[provider].chat(talk, MODEL).payload
    names = [tool["function"]["name"] for tool in sent["tools"]]
    assert (sent["tool_choice"], names) == ("required", ["Read"])  # not all take a name there


@pytest.mark.parametrize("provider", ["ollama", *LOCAL, "openai"])
def test_the_format_of_an_answer_reaches_every_server(provider):
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}

    def sent(form):
        talk = sf.ChatCompletions().parse(json.dumps({
            "model": "x", "messages": [{"role": "user", "content": "hi"}],
            "response_format": form}).encode())
        return sf.BACKENDS[provider].chat(talk, MODEL).payload
    whole = sent({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}})
    free = sent({"type": "json_object"})
    if provider == "ollama":
        assert (whole["format"], free["format"]) == (schema, "json")
    else:
        assert whole["response_format"]["json_schema"]["schema"] == schema
        assert free["response_format"] == {"type": "json_object"}


def test_images_of_results_stand_behind_all_results():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    calls = [{"type": "tool_use", "id": own_id, "name": "Read", "input": {}} for own_id in "ab"]
    results = [{"type": "tool_result", "tool_use_id": own_id, "content": [image]} for own_id in "ab"]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": calls},
                {"role": "user", "content": results}, {"role": "assistant", "content": "two dots"},
                {"role": "user", "content": "thanks"}]
    sent = sf.BACKENDS["llamacpp"].chat(talk_of(messages=messages), MODEL).payload["messages"]
    assert [message["role"] for message in sent] \
        == ["user", "assistant", "tool", "tool", "user", "assistant", "user"]
    assert [part["type"] for part in sent[4]["content"]] == ["image_url", "image_url"]


def test_tools_that_were_asked_before_are_not_made_anew():
    def tools_of(**words):
        tools = [{"name": "Bash", "input_schema": {"properties": {"a": {"type": "string", **words}}}}]
        return sf.BACKENDS["llamacpp"].chat(talk_of(tools=tools), MODEL).payload["tools"]
    assert tools_of() is tools_of() and tools_of(description="d") != tools_of()
    for number in range(20):
        tools_of(description=str(number))
    assert tools_of() == tools_of()


def test_chat_completions_are_asked_in_their_own_shape():
    talk = talk_of(
        max_tokens=50, system="Be kind.", tools=[{"name": "Bash", "input_schema": {"type": "object"}}],
        tool_choice={"type": "tool", "name": "Bash"}, stop_sequences=["S"],
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}, {
            "type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Bash",
                                               "input": {"command": "ls"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [
                {"type": "text", "text": "ok"}, {"type": "image", "source": {
                    "type": "base64", "media_type": "image/png", "data": PIXEL}}]}]}])
    sent = sf.BACKENDS["openai"].chat(talk, MODEL).payload
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    assert sent["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [url, {"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "", "tool_calls": [{
            "id": "t", "type": "function", "function": {"name": "Bash",
                                                        "arguments": '{"command":"ls"}'}}]},
        {"role": "tool", "content": "ok", "tool_call_id": "t"},
        {"role": "user", "content": [url]}]
    assert sent["tool_choice"] == "required"
    assert sent["stream_options"] == {"include_usage": True} and sent["max_tokens"] == 50
    assert "stop" not in sent  # which it was no server tells


# -- fields that a server does not know --

@pytest.mark.parametrize("provider, words, field", [
    ("llamacpp", "parallel_tool_calls: Extra inputs are not permitted", "parallel_tool_calls"),
    ("vllm", "1 validation error: {'type': 'extra_forbidden', 'loc': ('body', 'stream_options')}",
     "stream_options"),
    ("openai", "Unknown parameter: 'top_k'.", "top_k"),
    ("openai", "Unsupported parameter: 'max_tokens' is not supported with this model.", "max_tokens")])
def test_a_field_that_is_refused_once_is_not_sent_again(tmp_path, provider, words, field):
    def play(node, connection):
        if field in node.here.request:
            body = json.dumps({"error": {"message": words, "type": "invalid_request_error"}}).encode()
            connection.sendall(b"HTTP/1.1 400 x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        else:
            connection.sendall(stream_of(provider, [("text", "ok"), ("end", "end_turn", 1, 1)]))
    node = Node(play, plays_all=True)
    fleet = fleet_of(("m", "n", "x", {}), nodes={"n": node.endpoint})
    fleet.nodes["n"] = replace(fleet.nodes["n"], provider=provider)
    served = Rig(fleet, tmp_path)
    for _ in range(2):
        status, _, body = served.ask(top_k=5, tools=[{"name": "Bash"}], tool_choice={
            "type": "auto", "disable_parallel_tool_use": True})
        assert status == 200, body
    assert [field in request for request in node.requests] == [True, False, False]
    assert served.receipts(2)[0]["failures"] == []
    served.close()
    node.close()


@pytest.mark.parametrize("words", ["temperature is too hot", "max_tokens must be smaller"])
def test_a_refusal_that_names_no_field_to_leave_out_is_passed_on(tmp_path, words):
    body = json.dumps({"error": {"message": words}}).encode()
    node = Node(lambda node, connection: connection.sendall(
        b"HTTP/1.1 400 x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)))
    fleet = fleet_of(("m", "n", "x", {}), nodes={"n": node.endpoint})
    fleet.nodes["n"] = replace(fleet.nodes["n"], provider="vllm")
    served = Rig(fleet, tmp_path)
    status, _, said = served.ask()
    assert status == 400 and words.encode() in said and len(node.requests) == 1
    assert served.server.learned["m"].unknown == set()
    served.close()
    node.close()


# -- what they answer --

def read_all(reader, lines):
    deltas = []
    for line in lines:
        deltas += reader.feed(line.encode())
    return deltas


def test_a_chat_server_that_counts_nothing_is_estimated():
    reader = sf.BACKENDS["openai"].reader(talk_of(), MODEL, 99)
    deltas = read_all(reader, ['data: {"choices":[{"delta":{"content":"a"}}]}',
                               'data: {"choices":[{"delta":{"content":"b"},"finish_reason":"stop"}]}'])
    deltas += reader.close()  # it closes without [DONE]
    assert (deltas[-1].end.input_tokens, deltas[-1].end.output_tokens) == (99, 2)


def chat_lines(chance):
    """The chunks of an answer such as no server gives."""
    parts = []
    for _ in range(chance.randrange(6, 9)):
        call = {"index": chance.randrange(2), "id": "c", "type": "function",
                "function": {"name": "Bash", "arguments": chance.choice(('{"a":', "1}", {"a": 1}))}}
        delta = chance.choice(({"content": "words"}, {"reasoning_content": "hm"}, {"tool_calls": [call]}))
        parts.append({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    parts.append({"choices": [{"index": 0, "delta": {}, "finish_reason": chance.choice(("stop", "length"))}],
                  "usage": {"prompt_tokens": 5, "completion_tokens": 7,
                            "prompt_tokens_details": {"cached_tokens": 2}},
                  "timings": {"prompt_ms": 12.5, "predicted_ms": 1e30}})
    return [b"data: " + json.dumps(part).encode() for part in mutate(chance, parts)] + [b"data: [DONE]"]


@pytest.mark.parametrize("provider", ["openai", "llamacpp", "anthropic"])
def test_mutated_chunks_are_an_answer_or_fail_cleanly(provider):
    chance = random.Random(11)
    talk = talk_of(stream=True)
    ended = failed = 0
    for _ in range(400):
        with_original = provider == "anthropic" and chance.random() < 0.5
        reader = sf.BACKENDS[provider].reader(
            talk if with_original else replace(talk, original=None), MODEL, 5)
        try:
            deltas = [delta for line in chat_lines(chance) for delta in reader.feed(line)] + reader.close()
            ended += any(delta.end for delta in deltas)
        except (sf.Refusal, sf.NodeFailure):
            failed += 1
    assert ended > 50 and failed > 20


def test_llama_servers_own_clock_is_read():
    """Recorded from b10488: its last chunk has timings, in milliseconds."""
    last = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}, "timings": {
        "cache_n": 0, "prompt_n": 9, "prompt_ms": 250.5, "predicted_n": 2, "predicted_ms": 40.25}}
    lines = ['data: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}',
             "data: " + json.dumps(last), "data: [DONE]"]
    end = read_all(sf.BACKENDS["llamacpp"].reader(talk_of(), MODEL, 99), lines)[-1].end
    assert (end.prompt_seconds, end.answer_seconds, end.input_tokens) == (0.2505, 0.04025, 9)
    for odd in ({"prompt_ms": -1.0}, {"prompt_ms": "x"}, {"prompt_ms": 1e300}, [], None):
        lines[1] = "data: " + json.dumps({**last, "timings": odd})
        end = read_all(sf.BACKENDS["llamacpp"].reader(talk_of(), MODEL, 99), lines)[-1].end
        assert (end.prompt_seconds, end.input_tokens) == (None, 9)


@pytest.mark.parametrize("provider", ["ollama", "openai", "llamacpp"])
def test_an_answer_that_ends_at_a_stop_sequence_counts_the_tokens_up_to_it(provider):
    reader = sf.BACKENDS[provider].reader(talk_of(stop_sequences=["three"]), MODEL, 99)
    deltas = []
    for words in ("one ", "two ", "three", "never"):
        line = json.dumps({"message": {"content": words}, "done": False})
        if provider != "ollama":
            line = "data: " + json.dumps({"choices": [{"delta": {"content": words}}]})
        deltas = deltas or [delta for delta in read_all(reader, [line]) if delta.end]
    end, = [delta.end for delta in deltas]
    assert (end.reason, end.stop, end.input_tokens, end.output_tokens) \
        == ("stop_sequence", "three", 99, 3)


@pytest.mark.parametrize("words, tokens, maximum", [
    ("request (150014 tokens) exceeds the available context size (32768 tokens), try", 150014, 32768),
    ("prompt is too long: 208310 tokens > 200000 maximum", 208310, 200000),
    ("This model's maximum context length is 8192 tokens. However, you requested 9000 tokens", 9000, 8192),
    ("This endpoint's maximum context length is 131072 tokens. However, you requested about 140000 "
     "tokens", 140000, 131072),
    ("Trying to keep the first 11429 tokens when context the overflows. However, the model is loaded "
     "with context length of only 4096 tokens", 11429, 4096),
    ("The number of tokens to keep from the initial prompt is greater than the context length", 40000,
     32768)])
def test_every_servers_words_for_too_long_are_known(words, tokens, maximum):
    refusal = sf.BACKENDS["vllm"].reader(talk_of(), MODEL, 40000).refusal(400, words)
    assert (refusal.tokens, refusal.maximum) == (tokens, maximum)


@pytest.mark.parametrize("status, words, http", [
    (400, "model 'nope' not found", 404), (404, "The model `x` does not exist.", 404),
    (400, "the model `x:y` does not exist or you do not have access to it", 404),
    (500, "CUDA error: file /x/y does not exist", 500), (500, "the model file /m does not exist", 500),
    (400, "tool `x` does not exist", 400),
    (400, "roles must alternate", 400), (422, "bad", 400), (429, "slow down", 529), (503, "busy", 529),
    (500, "The model produced output that does not match the expected peg-native format", 500)])
def test_refusals_are_said_in_kinds_that_clients_act_on(status, words, http):
    refusal = sf.BACKENDS["llamacpp"].reader(talk_of(), MODEL, 10).refusal(status, words)
    assert refusal.http == http and words in refusal.what


# -- every command, with every kind --

@pytest.mark.parametrize("kind, model", [
    ("llamacpp", "worker"), ("lmstudio", "qwen/qwen3-30b"), ("vllm", "qwen"), ("openai", "m")])
def test_every_command_works_with_every_kind(tmp_path, quick, kind, model):
    server = Studio() if kind == "lmstudio" else KINDS[kind]()
    (tmp_path / "fleet.yaml").write_text(f"""\
project: {{name: shop, gateway: {{port: {free_port()}}}}}
nodes:
  first: {{endpoint: "{KINDS['ollama']().endpoint}"}}
models:
  m: {{node: first, model: tiny, alias: x, context: 32768}}
agents: {{planner: {{model: m, description: Plans.}}}}
""")
    added = quick("add", f"tower={server.endpoint}", "--model", model)
    assert added.returncode == 0, added
    fleet = sf.load_fleet(str(tmp_path / "fleet.yaml"))
    assert fleet.nodes["tower"].provider == kind
    name, = [one.name for one in fleet.models.values() if one.node == "tower"]
    text = (tmp_path / "fleet.yaml").read_text().replace("model: m,", f"model: {name},")
    (tmp_path / "fleet.yaml").write_text(text)

    title = sf.NODE_KINDS[kind].title
    assert quick("validate").returncode == 0
    assert f"tower ({server.endpoint}): {title}" in quick("discover", "--verbose").stdout
    warmed = quick("warmup", "--model", name)
    assert warmed.returncode == 0 and "ok" in warmed.stdout, warmed
    status = json.loads(quick("status", "--json").stdout)
    assert [(one["route"], one["state"]) for one in status["models"] if one["node"] == "tower"] \
        == [(name, "ready")]
    assert {one["name"]: one["provider"] for one in status["nodes"]}["tower"] == kind
    doctor = quick("doctor", "--verbose").stdout
    assert f"tower: {title}" in doctor and "OLLAMA" not in doctor
    assert quick("generate").returncode == 0
    written = sf.parse_yaml((tmp_path / "litellm_config.yaml").read_text())
    deployment = [one for one in written["model_list"] if one["model_info"]["id"].startswith("tower")][0]
    prefix = {"llamacpp": "openai", "lmstudio": "lm_studio", "vllm": "hosted_vllm", "openai": "openai"}
    assert deployment["litellm_params"]["model"] == f"{prefix[kind]}/{model}"
    assert deployment["litellm_params"]["api_base"] == f"{server.endpoint}/v1"
    assert "num_ctx" not in deployment["litellm_params"]
    # LiteLLM would ask `openai/…` for /v1/responses, which MLX's servers and TabbyAPI do not have.
    assert written["litellm_settings"].get("use_chat_completions_url_for_anthropic_messages", False) \
        == (prefix[kind] == "openai")


def test_add_puts_in_the_models_of_a_machine_that_wants_its_key(tmp_path, quick, monkeypatch):
    def play(node, connection):
        status, value = 401, {"error": {"message": "Invalid API Key"}}
        if node.here.target == "/v1/models" and node.has_key:
            status, value = 200, {"object": "list", "data": [{"id": "m"}]}
        body = json.dumps(value).encode()
        connection.sendall(b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
    server = Keyed(play, plays_all=True)
    monkeypatch.setenv("TOWER_API_KEY", Keyed.key)
    (tmp_path / "fleet.yaml").write_text(f"""\
project: {{name: shop}}
nodes:
  first: {{endpoint: "{KINDS['ollama']().endpoint}"}}
  tower:
    endpoint: {server.endpoint}
    provider: openai
    api_key_env: TOWER_API_KEY
models:
  m: {{node: first, model: tiny, alias: x, context: 32768}}
agents: {{planner: {{model: m, description: Plans.}}}}
""")
    assert quick("trust", "--yes").returncode == 0
    added = quick("add", f"tower={server.endpoint}", "--model", "m")  # as `validate` says
    assert added.returncode == 0, added
    fleet = sf.load_fleet(str(tmp_path / "fleet.yaml"))
    assert [one.ollama_model for one in fleet.models.values() if one.node == "tower"] == ["m"]
    assert fleet.nodes["tower"].api_key_env == "TOWER_API_KEY"
    server.close()


def test_init_writes_what_answers(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(sf, "own_endpoint", lambda world: "http://127.0.0.1:9")
    server = KINDS["llamacpp"]()
    made = quick("init", "--node", f"tower={server.endpoint}")
    assert made.returncode == 0, made
    fleet = sf.load_fleet(str(tmp_path / "fleet.yaml"))
    assert fleet.nodes["tower"].provider == "llamacpp"
    assert {one.ollama_model for one in fleet.models.values()} == {"worker"}


@pytest.mark.parametrize("kind, model", [
    ("llamacpp", "worker"), ("lmstudio", "qwen/qwen3-30b"), ("vllm", "qwen")])
def test_init_finds_what_runs_here_in_place_of_ollama(tmp_path, quick, monkeypatch, kind, model):
    server = KINDS[kind]()
    port = int(server.endpoint.rpartition(":")[2])
    for name, known in sf.NODE_KINDS.items():
        monkeypatch.setitem(sf.NODE_KINDS, name, replace(known, port=port if name == kind else free_port()))
    monkeypatch.setattr(sf, "own_endpoint", lambda world: f"http://127.0.0.1:{free_port()}")
    made = quick("init", env={"OLLAMA_HOST": ""})
    assert made.returncode == 0, made
    fleet = sf.load_fleet(str(tmp_path / "fleet.yaml"))
    assert (fleet.nodes["local"].provider, fleet.nodes["local"].endpoint) == (kind, server.endpoint)
    assert {one.ollama_model for one in fleet.models.values()} == {model}


def test_litellm_gets_keys_by_the_name_of_their_variable():
    fleet = fleet_of(("m", "n", "x", {}), nodes={"n": "http://127.0.0.1:1"})
    fleet.nodes["n"] = replace(fleet.nodes["n"], provider="vllm", api_key_env="TOWER_API_KEY")
    params = sf.parse_yaml(sf.render_litellm(fleet))["model_list"][0]["litellm_params"]
    assert params["api_key"] == "os.environ/TOWER_API_KEY"


@pytest.mark.slow
@pytest.mark.parametrize("kind, words", [("llamacpp", "--host 0.0.0.0"), ("lmstudio", "Serve on Local"),
                                         ("vllm", "--api-key KEY")])
def test_worker_says_what_else_runs_here_and_how_it_is_opened(quick, in_lan, monkeypatch, kind,
                                                              words):
    server = KINDS[kind]()
    port = int(server.endpoint.rpartition(":")[2])
    for name, known in sf.NODE_KINDS.items():
        monkeypatch.setitem(sf.NODE_KINDS, name, replace(known, port=port if name == kind else free_port()))
    monkeypatch.setattr(sf, "own_endpoint", lambda world: "http://127.0.0.1:9")
    said = quick("worker", "--timeout", "1")
    title = sf.NODE_KINDS[kind].title
    assert said.returncode == 0 and f"{title}" in said.stdout and "runs here" in said.stdout, said
    assert words in said.stdout and "Ollama is not installed" not in said.stdout
    assert f"\n    provider: {kind}\n" in said.stdout
