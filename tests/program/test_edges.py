"""What the first documents type, and what people type by mistake: each at the command line."""
import contextlib
import json
import re
import subprocess
import sys

import pytest

from fake_ollama import FakeNode
from tools import PROGRAM, ROOT, clean_environment, free_port, run_main
from workspace_cases import FLEET, rewrite


def server_file(provider, endpoint, *, gateway="litellm"):
    """A fleet of one node of a kind, with one model."""
    return f"""\
project: {{name: p, gateway: {{provider: {gateway}, port: {free_port()}}}}}
nodes: {{box: {{endpoint: "{endpoint}", provider: {provider}}}}}
models: {{m: {{node: box, model: x, alias: claude-sonnet-local, context: 32768}}}}
agents: {{a: {{model: m, description: Does.}}}}
"""


# -- addresses as they are written --

@pytest.mark.parametrize("provider, written, meant", [
    ("openai", "https://openrouter.invalid/api/v1", "https://openrouter.invalid:443/api"),
    ("llamacpp", "http://127.0.0.1:8081/v1/", "http://127.0.0.1:8081"),
    ("vllm", "http://127.0.0.1/v1", "http://127.0.0.1:8000"),
    ("lmstudio", "http://127.0.0.1", "http://127.0.0.1:1234"),
    ("llamacpp", "http://[::1]", "http://[::1]:8080"),
    ("ollama", "http://127.0.0.1/", "http://127.0.0.1:11434"),
    ("ollama", "https://127.0.0.1", "https://127.0.0.1:443"),
    ("openai", "http://127.0.0.1", "http://127.0.0.1:80"),
    ("ollama", "http://127.0.0.1:80", "http://127.0.0.1:80")])
def test_an_endpoint_gets_its_port_and_no_path_twice(tmp_path, quick, provider, written, meant):
    (tmp_path / "fleet.yaml").write_text(server_file(provider, written), encoding="utf-8")
    done = quick("validate")
    assert done.returncode == 0 and "/v1" not in done.stderr
    assert quick("generate").returncode == 0
    text = (tmp_path / "litellm_config.yaml").read_text(encoding="utf-8")
    path = "" if provider == "ollama" else "/v1"
    assert re.findall(r'api_base: "?([^"\n]*)', text) == [meant + path]


def test_v1_of_a_server_is_understood_on_the_wire(tmp_path, quick):
    node = FakeNode({})
    node.answers["/v1/models"] = (200, {"object": "list", "data": [{"id": "x"}]})
    try:
        text = server_file("openai", f"{node.endpoint}/v1", gateway="builtin")
        (tmp_path / "fleet.yaml").write_text(text, encoding="utf-8")
        done = quick("discover")
        assert re.search("box +online +x$", done.stdout, re.M), done.stdout
    finally:
        node.close()


def test_v1_of_an_ollama_is_understood_too(tmp_path, quick):
    text = server_file("ollama", "http://127.0.0.1:11434/v1")
    (tmp_path / "fleet.yaml").write_text(text, encoding="utf-8")
    assert "/v1" not in quick("validate").stderr


# -- a node without /api/ps --

def test_warmup_does_without_a_list_of_what_is_loaded(fleet, quick, fake_node):
    node = fake_node({"qwen3:8b": {}, "qwen3-coder:30b": {}})
    node.answers["/api/ps"] = (404, b"404 page not found")
    rewrite(fleet, re.sub('"http:[^"]*"', node.endpoint, FLEET))
    done = quick("warmup")
    assert done.returncode == 0 and done.stdout.count(" ok ") == 2, done.stdout
    assert len(node.asked("/api/chat")) == 2
    said = quick("status").stdout  # it can't know better, and does not send to `warmup` for ever
    assert "cold" not in said and "Next: `subagent-fleet warmup`" not in said
    assert "mini can't say what is loaded" in said or "no gateway runs" in said


def test_warmup_says_something_where_an_empty_chat_is_refused(fleet, quick, fake_node):
    node = fake_node({"qwen3:8b": {}, "qwen3-coder:30b": {}})

    def chat(payload):
        if not payload["messages"]:
            return 400, {"error": "messages required"}
        return 200, {"done": True, "message": {"role": "assistant", "content": "ok"}}

    node.answers["/api/chat"] = chat
    node.answers["/api/ps"] = (404, b"404 page not found")
    rewrite(fleet, re.sub('"http:[^"]*"', node.endpoint, FLEET))
    done = quick("warmup")
    assert done.returncode == 0 and done.stdout.count(" ok ") == 2, done.stdout
    asked = node.asked("/api/chat")
    said = [ask["messages"] for ask in asked]
    assert said.count([{"role": "user", "content": "Reply with ok."}]) == 2 and said.count([]) == 2
    assert {ask["options"]["num_ctx"] for ask in asked if ask["messages"]} == {
        ask["options"]["num_ctx"] for ask in asked if not ask["messages"]}

    node.answers["/api/chat"] = (400, {"error": "no, whatever you say"})
    done = quick("warmup")
    assert done.returncode == 1 and "no, whatever you say" in done.stdout


# -- JSON is equal to YAML --

def models_of(*names):
    size = {"qwen3:8b": 5_200_000_000, "qwen3-coder:30b": 18_600_000_000}
    return {name: {"size": size.get(name, 9_000_000_000), "context": 131072} for name in names}


@pytest.mark.parametrize("name", ["fleet.json", "fleet.yaml"])
def test_recommend_writes_what_add_and_init_wrote(tmp_path, quick, fake_node, name):
    (tmp_path / ".git").mkdir()
    one = fake_node(models_of("qwen3:8b"))
    two = fake_node(models_of("qwen3-coder:30b"))
    env = {"OLLAMA_HOST": one.endpoint}
    assert quick("init", "--output", name, env=env).returncode == 0
    assert quick("add", f"big={two.endpoint}").returncode == 0
    advised = quick("recommend")
    assert advised.returncode == 0 and "recommend --write" in advised.stdout
    written = quick("recommend", "--write", "--yes")
    assert written.returncode == 0, written.stderr
    assert "qwen3-coder:30b" in (tmp_path / name).read_text(encoding="utf-8")
    assert "Nothing would change" in quick("recommend").stdout

    (tmp_path / name).write_text((tmp_path / name).read_text(encoding="utf-8").replace(
        "qwen3-coder:30b", "qwen3-coder:31b"), encoding="utf-8")
    assert quick("recommend", "--write", "--yes").returncode == 0
    assert "qwen3-coder:31b" not in (tmp_path / name).read_text(encoding="utf-8")
    if name == "fleet.json":
        assert json.loads((tmp_path / name).read_text(encoding="utf-8"))


def test_recommend_prints_json_for_a_json_file(tmp_path, quick, fake_node):
    (tmp_path / ".git").mkdir()
    one, two = fake_node(models_of("qwen3:8b")), fake_node(models_of("qwen3-coder:30b"))
    assert quick("init", "--output", "fleet.json", env={"OLLAMA_HOST": one.endpoint}).returncode == 0
    assert quick("add", f"big={two.endpoint}").returncode == 0
    one.close()  # so it is put in by hand
    text = quick("recommend", "--timeout", "1").stdout
    block = json.loads(text[text.index("\n{\n"):])
    assert set(block) == {"models", "agents"}


def test_an_example_in_json_speaks_of_nothing_that_is_not_in_it(tmp_path, quick):
    done = quick("init", "--example", "laptop", "--output", "fleet.json")
    assert done.returncode == 0 and "`yours`" not in done.stdout
    assert "yours" not in (tmp_path / "fleet.json").read_text(encoding="utf-8")


# -- other people's agents --

@pytest.mark.parametrize("line", ["version: 2024-01-01", "enabled: yes", "color: on", "version: 1_0",
                                  "when: {a: off}", "when:\n  nested: off", "since: 12:30"])
def test_an_agent_of_others_is_not_called_broken(fleet, quick, line):
    place = fleet / ".claude/agents"
    place.mkdir(parents=True)
    (place / "mine.md").write_text(f"---\nname: mine\ndescription: Mine.\n{line}\n---\nHi.\n",
                                   encoding="utf-8")
    report = json.loads(quick("doctor", "--json", "--timeout", "0.1").stdout)
    assert [each for each in report["findings"] if "mine.md" in each["what"] + each["where"]
            and each["level"] != "ok"] == []


# -- flags that would not count --

@pytest.mark.parametrize("words, what", [
    ("init --example laptop --node a=127.0.0.1", "--example and --node cannot be used together"),
    ("warmup --pull --unload", "--unload and --pull cannot be used together"),
    ("bench --quick --exam", "--exam and --quick cannot be used together"),
    ("trust --show --forget", "--forget and --show cannot be used together"),
    ("trust --show --yes", "--show and --yes cannot be used together"),
    ("init --example laptop --hybrid", "--example and --hybrid cannot be used together"),
    ("init --example laptop --offline", "--example and --offline cannot be used together"),
    ("discover --scan --write", "--scan and --write cannot be used together"),
    ("status --watch 1 --json", "--watch and --json cannot be used together"),
    ("tasks --watch 1 --json", "--watch and --json cannot be used together"),
    ("logs -f --json", "--follow and --json cannot be used together"),
    ("skills install --user --out x", "--user and --out cannot be used together")])
def test_flags_that_would_be_ignored_are_refused(fleet, quick, words, what):
    done = quick(*words.split())
    assert done.returncode == 2 and f"{words.split(' -')[0].split(' one')[0]}: {what}" in done.stderr
    assert "\n  fix: " in done.stderr


# -- words of other programs and of earlier versions --

@pytest.mark.parametrize("words, fix", [
    ("generate -t aider", "`--target`"), ("ui -p 8081", "`--port`"),
    ("skills instal", "`install`")])
def test_an_earlier_name_gets_todays(tmp_path, quick, words, fix):
    done = quick(*words.split())
    assert done.returncode == 2 and re.search(f"fix: .*{re.escape(fix)}[?]?$", done.stderr, re.M)


@pytest.mark.parametrize("name", ["multi-node-cluster", "ollama-laptop-only", "litellm-proxy"])
def test_an_earlier_example_is_written(tmp_path, quick, name):
    assert quick("init", "--example", name).returncode == 0
    assert quick("validate").returncode == 0


def test_wake_on_lan_is_called_mac(fleet, quick):
    rewrite(fleet, FLEET.replace('51:11434"}', '51:11434", wake_on_lan: "aa:bb:cc:dd:ee:ff"}'))
    assert "did you mean `mac`" in quick("validate").stderr


# -- a task file alone --

def test_validate_takes_a_task_file_alone(tmp_path, quick):
    (tmp_path / ".git").mkdir()
    (tmp_path / "tasks.yaml").write_text(
        "tasks: {one: {prompt: hi, coder: [cat], changes: none}}\n", encoding="utf-8")
    done = quick("validate")
    assert (done.returncode, done.stdout) == (0, "tasks.yaml is valid.\n"), done.stderr
    (tmp_path / "tasks.yaml").write_text("tasks: {one: {promt: hi}}\n", encoding="utf-8")
    assert quick("validate").returncode == 1
    (tmp_path / "tasks.yaml").unlink()
    assert "no fleet.yaml" in quick("validate").stderr


# -- what is said and done off a terminal --

def test_clean_off_a_terminal_removes_nothing_unforced(generated, quick):
    assert "Would remove:\n" in quick("clean", "--dry-run").stdout
    assert " removed" not in quick("clean", "--dry-run").stdout
    done = quick("clean")
    assert done.returncode == 3  # slug "not-removed"
    assert done.stderr.endswith("  fix: `subagent-fleet clean --yes`\n")
    assert (generated / ".env.subagent-fleet").exists()
    done = quick("clean", "--force")
    assert done.returncode == 0 and "Removed:\n" in done.stdout
    assert not (generated / ".env.subagent-fleet").exists()


def test_words_for_claude_code_without_it_end_at_once(fleet, quick):
    done = quick("up", "--", "-p", "hi", env={"PATH": str(fleet)})
    assert done.returncode == 1 and "npm install" in done.stderr
    assert sorted(path.name for path in fleet.iterdir()) == ["fleet.yaml"]


def test_a_target_of_another_program_says_how_it_is_started(fleet, quick):
    done = quick("generate", "--target", "aider")
    assert done.returncode == 0 and "  subagent-fleet launch aider\n" in done.stdout


@pytest.mark.parametrize("flag", ["--claude-only", "--litellm-only"])
def test_a_part_of_the_files_says_what_is_typed_next(fleet, quick, flag):
    done = quick("generate", flag)
    assert done.returncode == 0 and done.stdout.endswith("\nNext:\n  subagent-fleet up\n")


def test_pip_knows_the_extra_that_was_documented():
    assert 'dev = ["pytest"]' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


# -- LiteLLM --

def test_serve_says_which_engine_starts(tmp_path):
    text = server_file("ollama", "http://127.0.0.1:9", gateway="litellm")
    (tmp_path / "fleet.yaml").write_text(text, encoding="utf-8")
    assert run_main(("generate",), cwd=tmp_path).returncode == 0
    with ended(subprocess.Popen([sys.executable, PROGRAM, "serve"], cwd=tmp_path, text=True,
                                env=clean_environment(), stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE)) as child:
        assert "Serving p at " in child.stdout.readline()
        assert "built-in gateway" in child.stderr.readline()


@contextlib.contextmanager
def ended(child):
    """A program that is ended after its test."""
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def test_status_names_the_cure_of_a_missing_model_before_warmup(quick, tmp_path, fake_node):
    one, two = fake_node({"qwen3:8b": {}}), fake_node({"devstral:24b": {}})
    (tmp_path / "fleet.yaml").write_text(f"""\
project: {{name: x, gateway: {{port: {free_port()}}}}}
nodes: {{mini: {{endpoint: "{one.endpoint}"}}, gpu: {{endpoint: "{two.endpoint}"}}}}
models:
  small: {{node: mini, model: "qwen3:9b", alias: a, context: 32768, fallback: [big]}}
  big: {{node: gpu, model: "devstral:24b", alias: b, context: 65536}}
agents: {{planner: {{model: small, description: d}}, implementer: {{model: big, description: d}}}}
""", encoding="utf-8")
    said = " ".join(quick("status").stdout.split())
    assert "Next: write `model: qwen3:8b` in models.small, which mini has" in said
    assert "Next: `subagent-fleet warmup`" not in said


def test_windows_is_sent_to_wsl(tmp_path):
    code = f"import sys; sys.platform = 'win32'; exec(open({str(PROGRAM)!r}, encoding='utf-8').read())"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True,
                          cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "subagent-fleet runs on macOS and Linux; on Windows, use WSL\n")
