"""The main session on a person's own login, subagents at home: what goes where, and what never does."""
import json
import os
import re
import time

import pytest

import subagent_fleet as sf
from gateway_rig import KEY, Node, Rig, fleet_of
from matrix_cases import sse_of, stream_of
from subagent_fleet import replace
from tools import clean_environment, free_port

LOGIN = "sk-ant-oat01-of-a-person-0123456789"
HEADERS = {"x_api_key": None, "x_fleet_key": KEY, "authorization": f"Bearer {LOGIN}",
           "anthropic_beta": "claude-code-20250219,oauth-2025-04-20", "anthropic_version": "2023-06-01",
           "user_agent": "claude-cli/2.1.326 (external, sdk-cli)", "x_other": "stays"}
REQUEST = {
    "model": "big-opus", "max_tokens": 32000, "stream": True, "metadata": {"user_id": "u"},
    "thinking": {"type": "adaptive", "display": "omitted"}, "context_management": {"edits": []},
    "system": [{"type": "text", "text": "x-anthropic-billing-header: cc=1;"},
               {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
    "tools": [{"name": "Bash", "input_schema": {"type": "object"}},
              {"type": "web_search_20250305", "name": "web_search"},
              {"name": "Late", "defer_loading": True, "input_schema": {"type": "object"}}],
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "c2lnbmVk"},
            {"type": "redacted_thinking", "data": "ZGF0YQ=="},
            {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [
            {"type": "tool_reference", "tool_name": "Late"}]}]},
        {"role": "system", "content": "the date"}]}
EVENTS = [
    {"type": "message_start", "message": {"id": "msg_1", "usage": {
        "input_tokens": 12, "cache_read_input_tokens": 8000, "cache_creation_input_tokens": 500,
        "output_tokens": 1}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta",
                                                          "signature": "c2lnbmVk"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "redacted_thinking",
                                                                  "data": "ZGF0YQ=="}},
    {"type": "content_block_stop", "index": 1},
    {"type": "content_block_start", "index": 2, "content_block": {
        "type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta",
                                                          "partial_json": '{"query": "x"}'}},
    {"type": "content_block_stop", "index": 2},
    {"type": "content_block_start", "index": 3, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 3, "delta": {"type": "text_delta", "text": "Hello."}},
    {"type": "content_block_stop", "index": 3},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None},
     "usage": {"output_tokens": 30}},
    {"type": "message_stop"}]


class Cloud(Node):
    """A stand-in for api.anthropic.com that keeps every byte that comes."""

    def __init__(self, answer=None):
        super().__init__(self.speak)
        self.answer, self.heads = answer, []

    def _serve(self, connection):
        stream = connection.makefile("rb")
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += stream.readline()
        self.heads.append(head)
        headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:] if line)
        self.requests.append(json.loads(stream.read(int(headers.get("Content-Length", 0))) or "null"))
        with connection:
            self.speak(self, connection)

    def speak(self, node, connection):
        if self.answer:
            connection.sendall(self.answer)
            return
        if self.heads[-1].startswith(b"GET"):
            body = b'{"data": [{"type": "model", "id": "claude-opus-5-5"}], "has_more": false}'
            if b"x-api-key" not in self.heads[-1] and b"uthorization" not in self.heads[-1]:
                connection.sendall(refusal(401, "authentication_error", "x-api-key header is required"))
                return
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            return
        text = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in EVENTS)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                           b"Connection: close\r\n\r\n" + text.encode())

    def header(self, name, at=-1):
        """The values of a header, as they came."""
        lines = self.heads[at].split(b"\r\n")
        return [line.partition(b": ")[2].decode() for line in lines
                if line.lower().startswith(name.encode() + b":")]


def refusal(status, kind, message, more=b""):
    body = json.dumps({"type": "error", "error": {"type": kind, "message": message},
                       "request_id": "req_of_theirs"}).encode()
    return (b"HTTP/1.1 %d x\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n%b"
            % (status, more, len(body), body))


@pytest.fixture
def hybrid(tmp_path):
    """A cloud, a machine at home, and a gateway for both; `served.cloud`, `served.home`."""
    made = []

    def start(answer=None, *, home=None, **more):
        cloud = Cloud(answer)
        home = Node(home or (lambda node, connection: connection.sendall(
            b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
            b'{"message":{"content":"from home"},"done":true,"done_reason":"stop"}\n')))
        fleet = fleet_of(("big", "cloud", "big-opus", {"cloud": True, "max_output": 64000, **more}),
                         ("small", "home", "small", {}),
                         nodes={"cloud": cloud.endpoint, "home": home.endpoint})
        fleet.models["big"] = replace(fleet.models["big"], ollama_model="claude-opus-5-5")
        fleet.nodes["cloud"] = replace(fleet.nodes["cloud"], provider="anthropic", auth="client")
        served = Rig(fleet, tmp_path)
        served.cloud, served.home = cloud, home
        made.append(served)
        return served
    yield start
    for served in made:
        served.close()
        served.cloud.close()
        served.home.close()


def ask(served, request=REQUEST, **headers):
    return served.raw(served.post(request, **{**HEADERS, **headers}))


def test_the_login_and_the_request_go_on_as_they_came(hybrid):
    served = hybrid()
    status, _, body = ask(served)
    assert status == 200, body
    cloud = served.cloud
    assert cloud.header("authorization") == [f"Bearer {LOGIN}"]
    assert cloud.header("anthropic-beta") == [HEADERS["anthropic_beta"]]
    assert cloud.header("anthropic-version") == ["2023-06-01"]
    assert cloud.header("user-agent") == [HEADERS["user_agent"]]
    assert cloud.header("x-fleet-key") == cloud.header("x-api-key") == cloud.header("x-other") == []
    assert KEY.encode() not in cloud.heads[-1]
    assert cloud.requests[-1] == {**REQUEST, "model": "claude-opus-5-5"}


def test_the_answer_comes_back_as_it_came(hybrid):
    served = hybrid()
    body = ask(served)[2]
    events = sse_of(body)
    came = json.loads(json.dumps(EVENTS))
    came[0]["message"]["model"] = REQUEST["model"]  # the alias that was asked
    assert events == came
    assert b"event: content_block_start\ndata: " + json.dumps(EVENTS[4]).encode() + b"\n\n" in body


def test_an_answer_that_is_no_stream_comes_back_as_it_came(hybrid):
    message = {"id": "msg_1", "type": "message", "model": "claude-opus-5-5-20990101",
               "content": [{"type": "thinking", "thinking": "", "signature": "c2lnbmVk"},
                           {"type": "of_tomorrow", "some": [1.5, None]}],
               "stop_reason": "of_tomorrow", "usage": {
                   "input_tokens": 12, "cache_read_input_tokens": 8000, "output_tokens": 30}}
    text = json.dumps(message, indent=1).encode()
    served = hybrid(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text))
    status, _, body = ask(served, {**REQUEST, "stream": False})
    assert status == 200 and json.loads(body) == {**message, "model": REQUEST["model"]}
    receipt, = served.receipts()
    assert (receipt["input_tokens"], receipt["output_tokens"]) == (8012, 30)
    assert served.cloud.requests[-1]["stream"] is False


def test_a_client_that_was_kept_waiting_is_told_once_that_the_answer_begins(hybrid, limits):
    limits(quiet=0.1)
    served = hybrid()
    speak = served.cloud.speak

    def later(node, connection):
        time.sleep(0.3)
        speak(node, connection)
    served.cloud.speak = later
    events = sse_of(ask(served)[2])
    assert [event["type"] for event in events if event["type"] != "ping"] \
        == [event["type"] for event in EVENTS]
    assert "ping" in [event["type"] for event in events]


def test_an_answer_of_a_cloud_that_breaks_off_is_ended_with_an_error(hybrid):
    begun = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in EVENTS[:-2])
    overloaded = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}

    def speak(more):
        def play(node, connection):
            connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + begun.encode())
            time.sleep(0.2)
            connection.sendall(more)
        return play
    for more, kind in ((b"", "api_error"),
                       (b"event: error\ndata: " + json.dumps(overloaded).encode() + b"\n\n",
                        "overloaded_error")):
        served = hybrid()
        served.cloud.speak = speak(more)
        *events, last = sse_of(ask(served)[2])
        assert [event["type"] for event in events] == [event["type"] for event in EVENTS[:-2]]
        assert (last["type"], last["error"]["type"]) == ("error", kind)


def test_what_left_the_house_is_in_receipts_and_status(hybrid):
    served = hybrid()
    ask(served)
    served.receipts(1)  # it is filed when the answer has gone
    ask(served, {"model": "small", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]})
    receipts = served.receipts(2)
    assert [(receipt["node"], receipt["cloud"]) for receipt in receipts] \
        == [("cloud", True), ("home", False)]
    assert receipts[0]["input_tokens"] == 8512
    shown = json.loads(served.get("/fleet")[2])
    assert shown["left_house"] == {"requests": 1, "input_tokens": 8512, "output_tokens": 30}
    fleet = served.server.fleet
    view = sf.GatewayView(sf.OUR_GATEWAY, sf.FleetPage(fleet.name, left_house=shown["left_house"]))
    states = {name: sf.NodeState(name, node.endpoint, "refused") for name, node in fleet.nodes.items()}
    assert sf.format_away(sf.plan_sight(fleet, states, view, 0)) == ("Sent outside your network: requests to big (127.0.0.1). So far "
                                    "1 request, 8,512 tokens in, 30 out.")


def test_a_machine_at_home_hears_of_no_login(hybrid):
    heard = []
    served = hybrid()
    served.home.listener.close()
    listener = Cloud(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
                     b'{"message":{"content":"x"},"done":true}\n')
    node = served.server.fleet.nodes["home"]
    served.server.fleet.nodes["home"] = replace(node, endpoint=listener.endpoint)
    ask(served, {"model": "small", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]})
    heard = b"".join(listener.heads) + json.dumps(listener.requests).encode()
    assert b"POST /api/chat" in heard and LOGIN.encode() not in heard and b"anthropic" not in heard


@pytest.mark.parametrize("status, kind", [(401, "authentication_error"), (403, "permission_error"),
                                          (429, "rate_limit_error"), (529, "overloaded_error"),
                                          (400, "invalid_request_error"), (500, "api_error")])
@pytest.mark.parametrize("stream", [True, False])
def test_what_the_cloud_refuses_comes_back_as_it_came(hybrid, status, kind, stream):
    more = (b"retry-after: 37\r\nanthropic-ratelimit-unified-status: rejected\r\n"
            b"x-should-retry: false\r\nset-cookie: theirs\r\n")
    sent = refusal(status, kind, "not now", more)
    served = hybrid(sent)
    for _ in range(2):  # and it does not rest for that
        found, headers, body = ask(served, {**REQUEST, "stream": stream})
        assert (found, body) == (status, sent.partition(b"\r\n\r\n")[2])
        assert headers["retry-after"] == "37" and headers["x-should-retry"] == "false"
        assert headers["anthropic-ratelimit-unified-status"] == "rejected"
        assert "set-cookie" not in headers
    assert served.server.scheduler.show()[0]["big"]["rests_seconds"] == 0
    assert [receipt["outcome"] for receipt in served.receipts(2)] == [kind] * 2


def test_a_fallback_answers_where_the_file_names_one_but_not_for_a_login(hybrid):
    served = hybrid(refusal(529, "overloaded_error", "Overloaded"), fallback=["small"])
    assert b"from home" in ask(served)[2]
    receipt, = served.receipts()
    assert (receipt["node"], receipt["failures"][0]["node"]) == ("home", "cloud")
    assert receipt["cloud"] is True  # who refused it has read it
    assert json.loads(served.get("/fleet")[2])["left_house"]["requests"] == 1
    served.cloud.answer = refusal(401, "authentication_error", "token expired")
    served.server.scheduler.end_rest("cloud", "")
    assert ask(served)[0] == 401


def test_without_a_login_nothing_goes_out(hybrid):
    served = hybrid()
    for headers in ({"authorization": None}, {"authorization": f"Bearer {KEY}"},
                    {"authorization": None, "x_api_key": KEY, "x_fleet_key": None}):
        status, _, body = ask(served, **headers)
        assert status == 401 and b"your own login, and none came" in body
    assert served.cloud.heads == []
    assert {(one["cloud"], one["said"]) for one in served.receipts(3)} == {(False, "cloud: no login came")}
    assert json.loads(served.get("/fleet")[2])["left_house"]["requests"] == 0


def test_a_login_is_no_key(hybrid):
    served = hybrid()
    for headers in ({"x_fleet_key": None}, {"x_fleet_key": LOGIN}, {"x_fleet_key": "sk-wrong"}):
        assert ask(served, **headers)[0] == 401
    assert served.cloud.heads == []


def test_a_persons_api_key_is_a_login_too(hybrid):
    served = hybrid()
    assert ask(served, authorization=None, x_api_key="sk-ant-api-of-a-person")[0] == 200
    assert served.cloud.header("x-api-key") == ["sk-ant-api-of-a-person"]
    assert served.cloud.header("authorization") == []


@pytest.mark.parametrize("answer", [
    None, refusal(401, "authentication_error", "bad"), refusal(529, "overloaded_error", "x"), b"",
    b"HTTP/1.1 200 OK\r\n\r\ndata: {broken\n"])
def test_the_login_is_kept_nowhere(hybrid, tmp_path, answer, monkeypatch):
    served = hybrid(answer)
    ask(served)
    ask(served, {**REQUEST, "stream": False})
    kept = served.receipts(2) and served.receipts_path.read_text()
    kept += "".join(served.said) + json.dumps(served.server.show()) + repr(vars(served.server))
    kept += served.get("/fleet")[2].decode()
    assert LOGIN not in kept and KEY not in served.receipts_path.read_text()
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not [text for text in files if LOGIN.encode() in text]


def test_an_own_key_goes_as_x_api_key(hybrid):
    served = hybrid()
    node = served.server.fleet.nodes["cloud"]
    served.server.fleet.nodes["cloud"] = replace(node, auth=None, api_key_env="MY_API_KEY")
    served.world.node_keys[node.endpoint, "MY_API_KEY"] = "sk-ant-api-key"
    assert ask(served)[0] == 200
    assert served.cloud.header("x-api-key") == ["sk-ant-api-key"]
    assert served.cloud.header("authorization") == []  # the client's own stays here


def test_other_clients_reach_the_cloud_in_plain_blocks(hybrid):
    served = hybrid(stream_of("anthropic", [("text", "Hello."), ("end", "end_turn", 9, 2)], "chat"))
    request = {"model": "big-opus", "messages": [{"role": "system", "content": "Be kind."},
                                             {"role": "user", "content": "hi"}]}
    status, _, body = served.raw(served.post(request, target="/v1/chat/completions", **HEADERS))
    assert status == 200 and json.loads(body)["choices"][0]["message"]["content"] == "Hello."
    assert served.cloud.heads[-1].startswith(b"POST /v1/chat/completions ")
    assert served.cloud.requests[-1]["messages"] == request["messages"]
    assert served.cloud.header("authorization") == [f"Bearer {LOGIN}"]


def test_a_format_that_the_cloud_would_ignore_is_refused(hybrid):
    served = hybrid()
    request = {"model": "big-opus", "messages": [{"role": "user", "content": "hi"}],
               "response_format": {"type": "json_object"}}
    status, _, body = served.raw(served.post(request, target="/v1/chat/completions", **HEADERS))
    assert status == 400 and b"response_format" in body and served.cloud.heads == []


# -- the fleet file --

FILE = """\
project: {name: shop, gateway: {port: PORT}, claude: {main: big}}
nodes:
  cloud: {endpoint: "URL", provider: anthropic, auth: client}
  home: {endpoint: "http://127.0.0.1:9"}
models:
  big: {node: cloud, model: claude-opus-5-5, alias: claude-opus-5-5, context: 200000, max_output: 64000,
        cloud: true}
  small: {node: home, model: "qwen3:8b", alias: qwen, context: 32768}
agents: {planner: {model: small, description: Plans.}}
"""


def check(text):
    return sf.check_fleet(sf.Document(text, "fleet.yaml"))


def fleet_at(url="https://api.anthropic.com", port=4000):
    fleet, findings = check(FILE.replace("URL", url).replace("PORT", str(port)))
    assert fleet, findings
    return fleet


@pytest.mark.parametrize("old, new, slug, words", [
    (", auth: client", ", auth: client, api_key_env: MY_API_KEY", "bad-auth", "two ways to log in"),
    ("provider: anthropic, auth", "provider: vllm, auth", "bad-auth", "only for `provider: anthropic`"),
    ("{port: PORT}", "{provider: litellm}", "bad-auth", "needs this program's own gateway"),
    ("URL", "http://192.168.1.9", "bad-auth", "unencrypted"),
    (",\n        cloud: true", "", "cloud-model", "leaves your network"),
    ("auth: client", "auth: me", "bad-value", "accepted: `client`")])
def test_where_a_login_may_not_go_is_an_error(old, new, slug, words):
    text = FILE.replace(old, new).replace("URL", "https://api.anthropic.com").replace("PORT", "4000")
    _, findings = check(text)
    assert [finding.slug for finding in findings] == [slug] and words in findings[0].what


def test_a_login_is_asked_for_even_at_home():
    fleet = fleet_at("https://192.168.1.9")
    assert [stake.what for stake in sf.plan_stakes(fleet)] == [
        "Claude Code's own login goes to https://192.168.1.9:443 (node cloud)",
        "prompts and the files agents read go to the cloud that runs claude-opus-5-5 for "
        "https://192.168.1.9:443 (node cloud)"]


def test_claude_code_keeps_its_login_and_shows_the_key_beside_it():
    fleet = fleet_at()
    names = {variable.name for variable in sf.plan_environment(fleet)}
    assert not names & {"ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_API_KEY", "CLAUDE_CODE_ATTRIBUTION_HEADER"}
    environ = {"ANTHROPIC_AUTH_TOKEN": "mine", "ANTHROPIC_CUSTOM_HEADERS": "x-mine: 1"}
    merged = sf.merge_environment(environ, fleet, KEY)
    assert merged["ANTHROPIC_AUTH_TOKEN"] == "mine"
    assert merged["ANTHROPIC_CUSTOM_HEADERS"] == f"x-mine: 1\nx-fleet-key: {KEY}"
    assert sf.merge_environment(merged, fleet, KEY) == merged, "the key stands there once"
    older = {**environ, "ANTHROPIC_CUSTOM_HEADERS": "X-Fleet-Key: old\nx-mine: 1\n"}
    assert sf.merge_environment(older, fleet, KEY) == merged
    settings = sf.plan_settings(fleet, merged, {})
    assert settings["env"]["ANTHROPIC_CUSTOM_HEADERS"].endswith(KEY)
    assert "ANTHROPIC_AUTH_TOKEN" not in settings["env"]
    text = sf.render_environment(fleet, KEY)
    assert 'export ANTHROPIC_CUSTOM_HEADERS="x-fleet-key: $LITELLM_MASTER_KEY"' in text
    assert "AUTH_TOKEN" not in text


def test_the_key_is_not_left_where_the_login_belongs():
    """A shell that sourced the file of another fleet has the key as its token."""
    merged = sf.merge_environment({"ANTHROPIC_AUTH_TOKEN": KEY}, fleet_at(), KEY)
    assert "ANTHROPIC_AUTH_TOKEN" not in merged


def test_status_and_doctor_say_what_leaves_the_house(tmp_path, run_cli):
    cloud = Cloud()
    text = FILE.replace("URL", cloud.endpoint).replace("PORT", str(free_port()))
    (tmp_path / "fleet.yaml").write_text(text)
    status = run_cli("status")
    assert "Sent outside your network: requests to big (127.0.0.1)." in status.stdout
    models = json.loads(run_cli("status", "--json").stdout)["models"]
    assert {model["route"]: (model["state"], model["cloud"]) for model in models} \
        == {"big": ("ready", True), "small": ("node offline", False)}
    warmed = run_cli("warmup", "--model", "big")
    assert "runs at 127.0.0.1, nothing to load" in warmed.stdout and warmed.returncode == 0
    assert "cloud: Anthropic at" in run_cli("doctor", "--verbose").stdout
    assert run_cli("generate").returncode == 0
    asked = run_cli("env")
    assert asked.returncode == 3 and "Claude Code's own login goes to" in asked.stderr
    assert all(b"uthorization" not in head for head in cloud.heads)


def test_launch_hands_claude_the_key_and_leaves_the_login(tmp_path, run_cli):
    """A `claude` that writes down how it was started, against the real gateway of `up`."""
    cloud = Cloud()
    home = tmp_path / "home"
    home.mkdir()
    text = FILE.replace("URL", cloud.endpoint).replace("PORT", str(free_port()))
    (tmp_path / "fleet.yaml").write_text(text)
    programs = tmp_path / "bin"
    programs.mkdir()
    claude = programs / "claude"
    claude.write_text(
        "#!/bin/sh\nif [ \"$1\" = --version ]; then echo '2.1.327 (Claude Code)'; exit; fi\n"
        f"cat \"$2\" > '{tmp_path}/seen.json'\nenv > '{tmp_path}/seen.env'\n")
    claude.chmod(0o755)
    environ = clean_environment()
    done = run_cli("up", "--trust", env={
        "HOME": str(home), "PATH": f"{programs}{os.pathsep}{environ.get('PATH', '')}"})
    assert (tmp_path / "seen.json").exists(), done
    settings = json.loads((tmp_path / "seen.json").read_text())
    header = settings["env"]["ANTHROPIC_CUSTOM_HEADERS"]
    assert header.startswith("x-fleet-key: sk-") and "ANTHROPIC_AUTH_TOKEN" not in settings["env"]
    seen = (tmp_path / "seen.env").read_text()
    assert header in seen and "ANTHROPIC_AUTH_TOKEN" not in seen
    assert "ANTHROPIC_MODEL=claude-opus-5-5" in seen


# -- what `init` writes --

@pytest.mark.parametrize("name", sf.EXAMPLES)
def test_every_example_is_valid_and_strict(tmp_path, quick, name):
    made = quick("init", "--example", name)
    assert made.returncode == 0 and sf.EXAMPLES[name][0] in made.stdout
    text = (tmp_path / "fleet.yaml").read_text()
    assert text.startswith(sf.EXAMPLES[name][1]) and "yours" in text
    checked = quick("validate", "--strict")
    assert checked.returncode == 0, checked
    assert quick("generate").returncode == 0
    assert quick("init", "--example", name).returncode == 3  # it is there already
    assert quick("init", "--example", name, "--output", "other.json").returncode == 0
    assert sf.load_fleet(str(tmp_path / "other.json")).name == name


def test_examples_are_listed_and_a_wrong_name_is_corrected(quick, tmp_path):
    listed = quick("init", "--example", "list").stdout
    assert [line.split()[0] for line in listed.splitlines()] == [*sf.EXAMPLES, sf.TASKS_EXAMPLE]
    assert quick("init", "--example").stdout == listed
    assert list(sf.EXAMPLES) == ["laptop", "three-machines", "hybrid"]
    wrong = quick("init", "--example", "three-machine")
    assert wrong.returncode == 2 and "did you mean `three-machines`?" in wrong.stderr
    assert not (tmp_path / "fleet.yaml").exists()


@pytest.mark.parametrize("name, leads_to", [
    ("ollama-laptop-only", "laptop"), ("claude-agents", "laptop"),
    ("multi-node-cluster", "three-machines"), ("litellm-proxy", "three-machines")])
def test_the_examples_of_the_first_versions_lead_to_todays(quick, tmp_path, name, leads_to):
    made = quick("init", "--example", name)
    assert made.returncode == 0 and f"{leads_to}: {sf.EXAMPLES[leads_to][0]}." in made.stdout
    assert sf.load_fleet(str(tmp_path / "fleet.yaml")).name == leads_to


@pytest.mark.parametrize("output", ["fleet.yaml", "fleet.json"])
def test_init_hybrid_writes_the_login_beside_the_machines(quick, tmp_path, fake_node, output):
    node = fake_node({"qwen3-coder:30b": {"size": 18 * 10**9}, "qwen3:8b": {"size": 5 * 10**9}})
    home = tmp_path / "home"
    home.mkdir()
    env = {"HOME": str(home), "OLLAMA_HOST": f"127.0.0.1:{node.port}"}
    made = quick("init", "--hybrid", "--output", output, env=env)
    assert made.returncode == 0, made
    accepted = made.stdout.partition("With `--hybrid` you accepted:\n")[2]
    assert accepted.startswith("  prompts and the files agents read go to https://api.anthropic.com")
    assert "\n  Claude Code's own login goes to https://api.anthropic.com" in accepted
    assert "\nTo take it back: subagent-fleet trust " in accepted and " --forget\n" in accepted
    main, = [line for line in made.stdout.splitlines() if line.startswith("main session")]
    assert re.split("  +", main) == [
        "main session", "claude-opus-5-5", "anthropic",
        "your Claude login; its prompts leave the house"]
    assert "main session" not in (tmp_path / output).read_text()  # of no machine's model
    fleet = sf.load_fleet(str(tmp_path / output))
    cloud = fleet.nodes["anthropic"]
    assert (cloud.endpoint, cloud.provider, cloud.auth) \
        == ("https://api.anthropic.com:443", "anthropic", "client")
    tiers = sf.plan_tiers(fleet)
    assert fleet.models[tiers["main"]].alias == "claude-opus-5-5"
    assert fleet.models[tiers["sonnet"]].alias == "claude-sonnet-5-5"
    assert fleet.models[tiers["haiku"]].node == "local"
    assert {fleet.models[agent.model].node for agent in fleet.agents.values()} == {"local"}
    assert quick("validate", env=env).returncode == 0
    assert quick("generate", env=env).returncode == 0
    said = quick("env", env=env)  # what `init` wrote here is accepted
    assert said.returncode == 0 and "ANTHROPIC_CUSTOM_HEADERS" in said.stdout


def test_a_cloud_that_is_not_reached_is_no_machine_to_name():
    for reason in ("dns", "unreachable", "timeout"):
        state = sf.NodeState("anthropic", sf.CLAUDE_ENDPOINT, reason, provider="anthropic")
        assert state.fix == "check this machine's connection to the internet"


@pytest.mark.parametrize("status", [400, 401, 404, 413, 429, 500, 529])
@pytest.mark.parametrize("shape", ["json", "text", "event"])
def test_what_a_cloud_says_is_for_its_client_and_kept_nowhere(hybrid, status, shape):
    words = f"bad key {LOGIN} for the prompt: hi there, secret"
    answer = refusal(status, "made_up_error", words)
    if shape == "text":
        answer = b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%b" % (status, len(words), words.encode())
    elif shape == "event":
        told = json.dumps({"type": "error", "error": {"type": "api_error", "message": words}})
        answer = (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nevent: error\ndata: %b\n\n"
                  % told.encode())
    served = hybrid(answer)
    assert ask(served)[0] != 200
    kept = json.dumps(served.receipts()) + "".join(served.said)
    assert "cloud: " in kept
    for secret in (LOGIN, "secret", "prompt:", "bad key", "made_up"):
        assert secret not in kept, kept


def test_limits_of_a_client_are_the_clouds_to_judge(hybrid):
    """Cut, they would be less than the thinking that the client asks for, which Anthropic refuses."""
    served = hybrid(max_output=8192)
    thinking = {"type": "enabled", "budget_tokens": 31_999}
    assert ask(served, {**REQUEST, "thinking": thinking})[0] == 200
    sent = served.cloud.requests[-1]
    assert (sent["max_tokens"], sent["thinking"]) == (32_000, thinking)
    assert ask(served, {name: value for name, value in REQUEST.items() if name != "max_tokens"})[0] == 200
    assert served.cloud.requests[-1]["max_tokens"] == 8192
