"""What a fleet file may say, and what is warned of."""
import json
import re
import time

import pytest
from test_yaml import Dice

import subagent_fleet as sf
from subagent_fleet import replace
from tools import EXAMPLE, ROOT, edited


def check(text):
    """Return (fleet, findings) of a text: its errors, else its warnings."""
    fleet, findings = sf.check_fleet(sf.Document(text, "fleet.yaml"))
    return fleet, list(sf.lint_fleet(fleet)) if fleet else findings


def test_example_is_a_fleet_with_defaults():
    fleet, findings = check(EXAMPLE)
    assert findings == []
    assert fleet.gateway == sf.Gateway("litellm", "127.0.0.1", 4000, "LITELLM_MASTER_KEY")
    assert fleet.nodes["mini"] == sf.Node("mini", "http://192.168.1.50:11434", ("heavy",), None)
    assert fleet.models["small-coder"] == sf.Model(
        "small-coder", "laptop", "qwen3:8b", "claude-haiku-local", context=8192, timeout=300,
        max_parallel=1, keep_alive=-1, thinking=False, max_output=8192, fallback=(), cloud=False,
        name_key="ollama_model")
    assert fleet.agents["implementer"].tools is None and fleet.agents["implementer"].prompt is None
    assert list(fleet.agents) == ["planner", "implementer"]


def test_gateway_absent_means_this_program_on_loopback():
    text = EXAMPLE.replace(EXAMPLE[EXAMPLE.index("  gateway:"):EXAMPLE.index("nodes:")], "")
    fleet, findings = check(text)
    assert findings == []
    assert fleet.gateway == sf.Gateway("builtin", "127.0.0.1", 4000, "LITELLM_MASTER_KEY")


def test_shipped_example_has_no_findings():
    text = (ROOT / "fleet.example.json").read_text(encoding="utf-8")
    fleet, findings = check(text)
    assert findings == [] and len(fleet.nodes) == 3


ERRORS = [
    # old, new, slug, message, position
    ("name: local-dev", "version: local-dev", "missing-key", "project.name is missing", ""),
    ("name: local-dev", "nam: local-dev", "unknown-key", "unknown key `nam` in project", "2:3"),
    ("name: local-dev", "name: ''", "bad-value", "project.name is `\"\"`", ""),
    ("name: local-dev", "name: 5", "bad-value", "project.name is `5`", "2:9"),
    ("name: local-dev", "name: \"a\\nb\"", "bad-value", "project.name is", "2:9"),
    ("name: local-dev", "name: \"a\\eb\"", "bad-value", "project.name is", "2:9"),
    ("provider: litellm", "provider: litelm", "bad-value", "accepted: `builtin` or `litellm`", "4:15"),
    ("port: 4000", "port: 0", "bad-value", "project.gateway.port is `0`", "6:11"),
    ("port: 4000", "port: 65536", "bad-value", "project.gateway.port is `65536`", "6:11"),
    ("port: 4000", "port: true", "bad-value", "project.gateway.port is `true`", "6:11"),
    ("port: 4000", "port: 4000.0", "bad-value", "project.gateway.port is `4000.0`", "6:11"),
    ("port: 4000", "port: \"4000\"", "bad-value", "project.gateway.port is `\"4000\"`", "6:11"),
    ("port: 4000", "port:", "bad-value", "project.gateway.port is nothing", "6:5"),
    ("host: 127.0.0.1", "host: 'a b'", "bad-value", "project.gateway.host is `a b`", "5:11"),
    *(("host: 127.0.0.1", f"host: '{host}'", "bad-value", f"project.gateway.host is `{host[:60]}", "5:11")
      for host in ("127.0.0.1:4000", "a:b", ":::::", "-", "...", "_", "256.256.256.256", "1.2.3",
                   "1::2::3", "::1:", "12345::", "1:2:3:4:5:6:7", "1:2:3:4:5:6::7:8", "a..b", "-a", "a-.b", "a" * 254)),
    ("port: 4000", "master_key_env: A-B", "bad-value", "master_key_env is `A-B`", "6:21"),
    ("port: 4000", "master_key_env: 9A", "bad-value", "master_key_env is `9A`", "6:21"),
    ("http://192.168.1.50:11434", "192.168.1.50:11434", "bad-value", "nodes.mini.endpoint is", "9:15"),
    ("http://192.168.1.50:11434", "ftp://a", "bad-value", "nodes.mini.endpoint is `ftp://a`", "9:15"),
    ("http://192.168.1.50:11434", "http://u:p@h:1", "bad-value", "nodes.mini.endpoint is", "9:15"),
    ("http://192.168.1.50:11434", "http://h/?q=1", "bad-value", "nodes.mini.endpoint is", "9:15"),
    ("http://192.168.1.50:11434", "http://h/#x", "bad-value", "nodes.mini.endpoint is", "9:15"),
    ("http://192.168.1.50:11434", "http://h:0", "bad-endpoint", "`0` is not a port", "9:15"),
    ("http://192.168.1.50:11434", "http://h:99999", "bad-endpoint", "`99999` is not a port", "9:15"),
    ("http://192.168.1.50:11434", "http://h:x", "bad-endpoint", "`x` is not a port", "9:15"),
    ("http://192.168.1.50:11434", "'http://h:'", "bad-endpoint", "`` is not a port", "9:15"),
    ("http://192.168.1.50:11434", "http://:80", "bad-endpoint", "the host is missing", "9:15"),
    ("http://192.168.1.50:11434", "http://ä:1", "bad-endpoint", "`ä` is not a host name", "9:15"),
    ("http://192.168.1.50:11434", "\"http://[::g]:1\"", "bad-endpoint", "is not a host name or address", "9:15"),
    ("http://192.168.1.50:11434", "http://256.1.1.1:80", "bad-endpoint", "is not a host name or address", "9:15"),
    ("http://192.168.1.50:11434", "http://a:b:c", "bad-endpoint", "not of the form", "9:15"),
    ("tags: [heavy]", "tags: heavy", "bad-value", "nodes.mini.tags is `\"heavy\"`", "10:11"),
    ("tags: [heavy]", "memory_gb: lots", "bad-value", "nodes.mini.memory_gb is", "10:16"),
    ("  mini:\n", "  mi ni:\n", "bad-name", "nodes: `mi ni` is not", "8:3"),
    ("  mini:\n", "  17:\n", "bad-name", "nodes: `17` is not text without quotes", "8:3"),
    ("node: mini", "node: mni", "unknown-node",
     "models.heavy-coder.node references unknown node: mni", "15:11"),
    ("context: 65536", "context: 12", "bad-value", "models.heavy-coder.context is `12`", "18:14"),
    ("context: 65536", "timeout: 0", "bad-value", "models.heavy-coder.timeout is `0`", "18:14"),
    ("context: 65536", "timeout: 1.5", "bad-value", "models.heavy-coder.timeout is `1.5`", "18:14"),
    ("context: 65536", "max_parallel: 0", "bad-value", "max_parallel is `0`", "18:19"),
    ("context: 65536", "keep_alive: forever", "bad-value", "keep_alive is", "18:17"),
    ("context: 65536", "keep_alive: '300'", "bad-value", "keep_alive is", "18:17"),
    ("context: 65536", "keep_alive: 999999h", "bad-value", "keep_alive is", "18:17"),
    ("context: 65536", "thinking: 1", "bad-value", "thinking is `1`", "18:15"),
    ("context: 65536", "fallback: small-coder", "bad-value", "fallback is `\"small-coder\"`", "18:15"),
    ("context: 65536", "fallback: [smal-coder]", "unknown-model",
     "models.heavy-coder.fallback.0 references unknown model: smal-coder", "18:16"),
    ("context: 65536", "fallback: [heavy-coder]", "fallback-cycle", "is the model itself", "18:16"),
    ("context: 65536", "contex: 65536", "unknown-key", "unknown key `contex` in models.heavy-coder",
     "18:5"),
    ("claude-sonnet-local", "sonnet", "reserved-alias", "`sonnet` a meaning of its own", "17:20"),
    ("claude-sonnet-local", "Inherit", "reserved-alias", "`Inherit` a meaning of its own", "17:20"),
    ("claude-sonnet-local", "a b", "bad-value", "litellm_alias is `a b`", "17:20"),
    ("claude-sonnet-local", "a[1m]", "bad-value", "litellm_alias is `a[1m]`", "17:20"),
    ("node: mini", "node: mini\n    model: x", "two-spellings", "`model` and `ollama_model`", "17:5"),
    ("node: mini", "node: mini\n    alias: x", "two-spellings", "`alias` and `litellm_alias`", "18:5"),
    ("ollama_model: qwen3-coder:30b", "model: 7", "bad-value", "models.heavy-coder.model is `7`", "16:12"),
    ("ollama_model: qwen3-coder:30b", "model: a-cloud", "cloud-model", "heavy-coder.model is", "16:12"),
    ("litellm_alias: claude-sonnet-local", "alias: sonnet", "reserved-alias", "heavy-coder.alias is", "17:12"),
    ("tags: [heavy]", "provider: lamacpp", "bad-value", "nodes.mini.provider is `\"lamacpp\"`", "10:15"),
    ("tags: [heavy]", "api_key_env: AWS_SECRET_KEY", "bad-value", "ends in _API_KEY or", "10:18"),
    ("qwen3-coder:30b", "gpt-oss:120b-cloud", "cloud-model", "ollama.com", "16:19"),
    ("qwen3-coder:30b", "glm:cloud", "cloud-model", "ollama.com", "16:19"),
    ("qwen3-coder:30b", "\"a\\tb\"", "bad-value", "models.heavy-coder.ollama_model is", "16:19"),
    ("  planner:", "  Planner:", "bad-name", "agents: `Planner` is not", "24:3"),
    ("  planner:", "  -planner:", "bad-name", "agents: `-planner` is not", "24:3"),
    ("  planner:", "  " + "p" * 65 + ":", "bad-name", "is not", "24:3"),
    ("model: small-coder", "model: smal-coder", "unknown-model",
     "agents.planner.model references unknown model: smal-coder", "25:12"),
    ("Use for planning.", "''", "bad-value", "agents.planner.description is", "26:18"),
    ("Use for planning.", "'  '", "bad-value", "agents.planner.description is `  `", "26:18"),
    ("Use for planning.", "\"a\\n\\nb\"", "bad-value", "without blank lines", "26:18"),
    ("Use for planning.", "[a]", "bad-value", "agents.planner.description is a list", "26:18"),
    ("tools: [Read, Grep]", "tools: Read", "bad-value", "agents.planner.tools is", "27:12"),
    ("tools: [Read, Grep]", "tools: ['a b']", "bad-value", "agents.planner.tools.0 is `a b`", "27:13"),
    ("tools: [Read, Grep]", "tools: [Read, null]", "bad-value", "agents.planner.tools.1 is nothing", "27:19"),
    ("tools: [Read, Grep]", "tools: [Read, [Grep]]", "bad-value", "agents.planner.tools.1 is a list", "27:19"),
    ("tags: [heavy]", "tags: [gb, 64]", "bad-value", "nodes.mini.tags.1 is `64`", "10:16"),
    ("context: 65536", "fallback: [1, x]", "bad-value", "fallback.0 is `1`", "18:16"),
    ("context: 65536", "fallback: [1, x]", "unknown-model", "unknown model: x", "18:19"),
    ("tools: [Read, Grep]", "prompt: \"a\\0b\"", "bad-value", "agents.planner.prompt is", "27:13"),
    ("tools: [Read, Grep]", "frontmatter: {model: x}", "bad-frontmatter", "cannot hold the key `model`",
     "27:19"),
    ("tools: [Read, Grep]", "frontmatter: {'a b': x}", "bad-frontmatter", "cannot hold the key `a b`",
     "27:19"),
]


@pytest.mark.parametrize("old, new, slug, message, position", ERRORS)
def test_error_is_named_where_it_stands(old, new, slug, message, position):
    fleet, findings = check(edited((old, new)))
    assert fleet is None
    found = [f for f in findings if f.slug == slug]
    assert found, findings
    if "\\e" not in new and new.split(": ")[-1] != "''":
        assert message in found[0].what
    assert all(f.level == "error" and f.where.startswith("fleet.yaml:") for f in findings)
    if position:
        assert found[0].where == f"fleet.yaml:{position}"
        assert "^" in found[0].excerpt


@pytest.mark.parametrize("text", ["", "[]", "x", "project: 1", "null", "project: {name: a}",
                                  "project:\nnodes:\nmodels:\nagents:\n", "{}", "- a\n- b"])
def test_what_is_no_fleet_is_refused_in_words(text):
    fleet, findings = check(text)
    assert fleet is None and findings
    assert {f.slug for f in findings} <= {"not-mapping", "missing-key", "unknown-key", "empty-file"}


def test_every_problem_is_reported_in_one_run_in_file_order():
    fleet, findings = check(edited(("port: 4000", "port: 0"), ("node: mini", "node: mni"),
                                   ("model: small-coder", "model: x"),
                                   ("http://localhost:11434", "localhost")))
    assert fleet is None and len(findings) == 4
    lines = [int(f.where.split(":")[1]) for f in findings]
    assert lines == sorted(lines)


def test_the_list_of_problems_ends():
    _, findings = check("{" + ", ".join(f"k{i}: 1" for i in range(5000)) + "}")
    assert len(findings) == sf.FINDINGS_LIMIT + 1
    assert {f.slug for f in findings} == {"unknown-key", "too-many"}


def test_a_wrong_name_gets_the_nearest_known_one():
    _, findings = check(edited(("node: mini", "node: mni"), ("endpoint: http://localhost:11434",
                                                             "endpont: http://localhost:11434")))
    fixes = {f.slug: f.fix for f in findings}
    assert fixes["unknown-node"] == "did you mean `mini`?"
    assert fixes["unknown-key"] == "did you mean `endpoint`?"
    assert "known: " not in fixes["unknown-key"]


@pytest.mark.parametrize("old, new, fix", [
    ("context: 65536", "context: 64k", "write `context: 65536`"),
    ("context: 65536", "context: 64 K", "write `context: 65536`"),
    ("context: 65536", "timeout: 10m", "write `timeout: 600`"),
    ("context: 65536", "timeout: 10k", "write `timeout: 300`, the default"),
    ("context: 65536", "timeout: 500ms", "write `timeout: 300`, the default"),
    ("context: 65536", "timeout: 10min", "write `timeout: 600`"),
    ("context: 65536", "timeout: 1 day", "write `timeout: 86400`"),
    ("context: 65536", "context: 65,536", "write `context: 65536`"),
    ("context: 65536", "context: 1M", "write `context: 1048576`"),
    ("context: 65536", "context: 0", "write `context: 8192`, the default"),
    ("context: 65536", "keep_alive: 1d", "write `keep_alive: 86400`"),
    ("context: 65536", "keep_alive: 5 minutes", "write `keep_alive: 300`"),
    ("context: 65536", "keep_alive: '5 m'", "write `keep_alive: 300`"),
    ("context: 65536", "keep_alive: 30min", "write `keep_alive: 1800`"),
    ("context: 65536", "keep_alive: '300'", "write `keep_alive: 300`"),
    ("context: 65536", "keep_alive: 500ms", "write `keep_alive: -1`, the default"),
    ("context: 65536", "keep_alive: 99999999h", "write `keep_alive: -1`, the default"),
    ("context: 65536", "thinking: 'true'", "write `thinking: true`"),
    ("context: 65536", "thinking: 'False'", "write `thinking: false`"),
    ("name: local-dev", "name: 42", 'write `name: "42"`'),
    ("name: local-dev", "name: 1.10", "write `name: local-dev`, for example"),
    ("name: local-dev", "name: {a: 1, b: 2}", "write `name: local-dev`, for example"),
    ("name: local-dev", "name:", "write `name: local-dev`, for example"),
    ("name: local-dev", "name: ''", "write `name: local-dev`, for example"),
    ("qwen3-coder:30b", "7", 'write `ollama_model: "7"`'),
    ("Use for planning.", "true", "write `description: Use for planning.`, for example"),
    ("host: 127.0.0.1", "host: http://127.0.0.1/", 'write `host: "127.0.0.1"`'),
    ("host: 127.0.0.1", "host: localhost:4000", "write `host: localhost`"),
    ("host: 127.0.0.1", "host: 'http://[::1]:4000'", 'write `host: "::1"`'),
    ("port: 4000", "master_key_env: my-key", "write `master_key_env: LITELLM_MASTER_KEY`, the default"),
    ("port: 4000", "master_key_env: ${KEY}", "write `master_key_env: LITELLM_MASTER_KEY`, the default"),
    ("port: 4000", "master_key_env: PATH", "write `master_key_env: LITELLM_MASTER_KEY`, the default"),
    ("port: 4000", "master_key_env: GITHUB_TOKEN", "write `master_key_env: LITELLM_MASTER_KEY`, the default"),
    ("port: 4000", "master_key_env: sk-local-dev", "write `master_key_env: LITELLM_MASTER_KEY`, the default"),
    ("port: 4000", "master_key_env: os.environ/LITELLM_MASTER_KEY",
     "write `master_key_env: LITELLM_MASTER_KEY`, the default"),
    ("port: 4000", "master_key_env: litellm_master_key", "write `master_key_env: LITELLM_MASTER_KEY`, the default"),
    ("port: 4000", "master_key_env: ANTHROPIC_API_KEY", "write `master_key_env: LITELLM_MASTER_KEY`, the default"),
    ("tags: [heavy]", "memory_gb: 64GB", "write `memory_gb: 64`"),
    ("tags: [heavy]", "tags: heavy", "write `tags: [heavy]`"),
    ("tags: [heavy]", "tags: '[heavy, my mac]'", "write `tags: [heavy, my mac]`"),
    ("tags: [heavy]", "tags: 64", 'write `tags: ["64"]`'), ("tags: [heavy]", "tags: {a: b}",
     "write `tags: [fast]`, for example, or remove the line"),
    ("tags: [heavy]", "tags: " + "x" * 65, "write `tags: [fast]`, for example, or remove the line"),
    ("tags: [heavy]", "tags: " + "x, " * 99 + "x", "write `tags: [fast]`, for example, or remove the line"),
    ("tools: [Read, Grep]", "tools: '*'", 'write `tools: ["*"]`'),
    ("tools: [Read, Grep]", "tools: Read Grep", "write `tools: [Read, Grep]`"),
    ("tools: [Read, Grep]", "tools: Read, Bash(git *)", 'write `tools: [Read, "Bash(git *)"]`'),
    ("tools: [Read, Grep]", "tools: Bash(a, b)", 'write `tools: ["Bash(a, b)"]`'),
    ("port: 4000", "port: 4000.0", "write `port: 4000`"),
    ("port: 4000", "port: 4000 // for us", "write `port: 4000`"),
    ("port: 4000", "port: 70000", "write `port: 4000`, the default"),
    ("port: 4000", "port: 4,000", "write `port: 4000`"),
    ("port: 4000", "port:", "write `port: 4000`, the default"),
    ("provider: litellm", "provider: buildin", "write `provider: builtin`"),
    ("http://localhost:11434", "localhost:11434", "write `endpoint: http://localhost:11434`"),
    ("http://localhost:11434", "10.0.0.7", "write `endpoint: http://10.0.0.7:11434`"),
    ("http://localhost:11434", "http//mac", "write `endpoint: http://mac:11434`"),
    ("http://localhost:11434", "my mac", "write `endpoint: http://192.168.1.50:11434`, for example"),
    ("http://localhost:11434", "[11434]", "write `endpoint: http://192.168.1.50:11434`, for example"),
])
def test_a_wrong_value_gets_the_one_that_was_meant(old, new, fix):
    _, findings = check(edited((old, new)))
    assert [f.fix for f in findings] == [fix]
    if fix.startswith("write `"):
        line = next(line.strip() for line in EXAMPLE.splitlines() if old in line)
        assert check(edited((line, fix.split("`")[1])))[0] is not None


@pytest.mark.parametrize("old, items, fixes", [
    ("tags: [heavy]", "[gb, 64, true]", ['write `"64"`', "write `fast`, for example"]),
    ("tags: [heavy]", "['']", ["write `fast`, for example"]),
    ("context: 65536", "[[small-coder], 1.5]",
     ["write `small-coder`", "write the name of a node or a model"]),
    ("tools: [Read, Grep]", "[Read, Bash(git diff, git log)]",
     ["write `Read`, for example"] * 2),
    ("tools: [Read, Grep]", "['Bash (git diff)']", ["write `Read`, for example"]),
])
def test_each_wrong_item_of_a_list_gets_its_own_fix(old, items, fixes):
    key = old.split(":")[0].replace("context", "fallback")
    _, findings = check(edited((old, f"{key}: {items}")))
    assert [f.fix for f in findings] == fixes
    assert all(re.search(rf"[.]{key}[.][0-2] is ", f.what) for f in findings)


def test_a_tag_of_a_name_is_no_missing_space():
    assert sf.nearest("qwen3:8b", ["qwen3"]) == "did you mean `qwen3`?"


def test_what_is_under_a_wrong_name_is_checked_and_referred_to():
    _, findings = check(edited(("  planner:", "  Planner:\n    colour: red"),
                               ("  mini:\n", "  17:\n"), ("node: mini", "node: '17'"),
                               ("endpoint: http://192", "endpont: http://192")))
    assert [f.slug for f in findings] == ["bad-name", "unknown-key", "bad-name", "unknown-key"]
    assert "in nodes.17" in findings[1].what and "in agents.Planner" in findings[3].what


def test_a_wrong_name_without_a_section_is_one_problem():
    _, findings = check(edited(("  planner:", "  maxTurns: 3\n  planner:")))
    assert [f.slug for f in findings] == ["bad-name"]


def test_many_wrong_names_in_a_large_file_cost_little(monkeypatch):
    compared = []
    monkeypatch.setattr(sf.difflib, "get_close_matches",
                        lambda word, choices, *_: compared.append(len(choices)))
    nodes = "".join(f"  machine-{i}: {{endpoint: http://h{i}}}\n" for i in range(1000))
    models = "".join(f"  m{i}: {{node: zzz{i}, ollama_model: a, litellm_alias: a}}\n"
                     for i in range(50))
    _, findings = check("project: {name: a}\nnodes:\n" + nodes + "models:\n" + models
                        + "agents: {}\n")
    assert len(findings) == 50 == len(compared) and max(compared) <= 100
    assert findings[0].fix.endswith("machine-11 and 988 more") and "machine-12" not in findings[0].fix


@pytest.mark.parametrize("count, text", [
    (1, "0"), (3, "0, 1, 2"), (4, "0, 1, 2 and 1 more"), (5003, "0, 1, 2 and 5,000 more")])
def test_long_lists_end(count, text):
    assert sf.some_of(range(count), 3) == text


@pytest.mark.parametrize("old, new, fix", [
    ("node: mini", "host: qwen3:8b\n    node: mini",
     "remove it: `node:` is already there"),
    ("ollama_model: qwen3-coder:30b", "model_name: qwen3:8b", "did you mean `model`?"),
    ("litellm_alias: claude-sonnet-local", "model_alias: a", "did you mean `alias`?"),
    ("context: 65536", "context: 65536\n    contxt: 3", "remove it: `context:` is already there"),
    ("context: 65536", "num_ctx: 65536", "did you mean `context`?"),
    ("context: 65536", "max_tokens: 65536", "did you mean `max_output`?"),
    ("endpoint: http://localhost:11434", "url: http://x", "did you mean `endpoint`?"),
    ("endpoint: http://localhost:11434", "'endpoint:http://x': ", "did you mean `endpoint`?"),
    ("endpoint: http://localhost:11434", "endpoint:http://x",
     "put a space after the colon: `endpoint: http://x`"),
    ("claude-haiku-local\nagents:", "a\n  more:\nagents:",
     "write its keys on the lines below, such as `model: qwen3:8b`"),
])
def test_a_wrong_key_gets_the_one_that_is_absent(old, new, fix):
    _, findings = check(edited((old, new)))
    assert [f.fix for f in findings if f.slug != "missing-key" and f.fix.startswith(fix)]


@pytest.mark.parametrize("old, new, fix", [
    ("    tools: [", "  tools: [", "indent `tools:` deeper, under its agent"),
    ("    description: Use for code", "  description: Use for code",
     "indent `description:` deeper, under its agent"),
    ("    context: 65536", "  context: 65536", "indent `context:` deeper, under its model"),
    ("    tags: [", "  tags: [", "indent `tags:` deeper, under its node"),
])
def test_a_key_among_the_names_is_told_where_it_belongs(old, new, fix):
    _, findings = check(edited((old, new)))
    assert fix in [f.fix for f in findings]


def test_an_agent_may_be_called_as_a_key_is():
    assert check(edited(("  planner:", "  tools:")))[1] == []


def test_models_may_fall_back_on_each_other_but_not_on_themselves():
    chain = "".join(f"  m{i}: {{node: mini, ollama_model: a, litellm_alias: a{i}, context: 65536, "
                    f"fallback: [m{(i + 1) % 5}]}}\n" for i in range(5))
    fleet, findings = check(EXAMPLE.replace("models:\n", "models:\n" + chain))
    assert {f.slug for f in findings} == {"unused-model"} \
        and sf.plan_fallbacks(fleet)["a4"] == ["a0"]
    _, findings = check(EXAMPLE.replace("models:\n", "models:\n" + chain.replace(
        "[m0]", "[m0, m4]").replace("[m3]", "[m2]")))
    assert [f.what for f in findings] == [
        "models.m2.fallback.0 is the model itself",
        "models.m4.fallback.1 is the model itself"]


@pytest.mark.slow
def test_long_fallback_chains_are_no_cycle():
    count = 3000
    chain = "".join(
        f"  m{i}: {{node: mini, ollama_model: a, litellm_alias: a{i}, context: 65536, "
        f"fallback: [{'heavy-coder' if i == count - 1 else f'm{i + 1}'}]}}\n"
        for i in range(count))
    fleet, findings = check(EXAMPLE.replace("models:\n", "models:\n" + chain))
    assert fleet is not None and {f.slug for f in findings} == {"unused-model"}
    assert len(findings) == count


WARNINGS = [
    ("host: 127.0.0.1", "host: 0.0.0.0", "exposed-gateway", "5:11"),
    ("http://192.168.1.50:11434", "http://8.8.8.8:11434", "public-endpoint", "9:15"),
    ("tags: [heavy]", "memory_gb: 0.5", "model-too-large", "16:19"),
    ("tags: [heavy]", "memory_gb: 20", None, ""),
    ("http://192.168.1.50:11434", "http://100.100.1.2:11434", None, ""),
    ("http://192.168.1.50:11434", "https://8.8.8.8:11434", None, ""),
    ("claude-haiku-local", "claude-sonnet-local", "alias-collision", "22:20"),
    ("context: 65536", "context: 16384", "small-context", "18:14"),
    ("context: 65536", "context: 4096", "small-context", "18:14"),
    ("tools: [Read, Grep]", "tools: [Read, MultiEdit]", "tool-gone", "27:19"),
    ("tools: [Read, Grep]", "tools: [LS]", "tool-gone", "27:13"),
    ("tools: [Read, Grep]", "tools: [read]", "tool-unknown", "27:13"),
    ("tools: [Read, Grep]", "tools: [Raed]", "tool-unknown", "27:13"),
    ("tools: [Read, Grep]", "tools: [LSP, Task, WebFetch, NotebookEdit]", None, ""),
    ("host: 127.0.0.1", "host: 127.evil.com", "exposed-gateway", "5:11"),
    ("host: 127.0.0.1", "host: '::'", "exposed-gateway", "5:11"),
    *(("host: 127.0.0.1", f"host: '{host}'", None, "")
      for host in ("127.0.0.2", "Localhost", "::1", "localhost.")),
    ("tools: [Read, Grep]", "tools: [Grep, 'Bsah(git *)']", "tool-unknown", "27:19"),
    ("tools: [Read, Grep]", "tools: [mcp__github__search, 'Bash(git *)', '*']", None, ""),
    ("tools: [Read, Grep]", "tools: [mcp__read, Gardener]", None, ""),
    *(("tools: [Read, Grep]", f"frontmatter: {{{key}: 3}}", None, "")
      for key in ("maxTurns", "mcpServers", "hooks", "initialPrompt")),
    ("qwen3-coder:30b", "qwen2.5-coder:32b", "prints-tool-calls", "29:12"),
    ("qwen3:8b", "qwen2.5-coder:7b", None, ""),  # its only agent cannot edit
]


@pytest.mark.parametrize("old, new, slug, position", WARNINGS)
def test_warning_never_stops(old, new, slug, position):
    fleet, findings = check(edited((old, new)))
    assert fleet is not None
    assert [f.slug for f in findings] == ([slug] if slug else [])
    if slug:
        assert findings[0].level == "warning" and findings[0].fix
        assert findings[0].where == f"fleet.yaml:{position}"


def test_a_host_is_this_machine_however_it_is_written():
    assert check(edited(("host: 127.0.0.1", "host: LocalHost")))[0].gateway.host == "localhost"
    assert all(sf.LOOPBACK.fullmatch(host) for host in ("LOCALHOST", "127.1.2.3", "::1"))
    assert not any(sf.LOOPBACK.fullmatch(host) for host in ("127.a.b.c", "::", "0.0.0.0"))


def test_two_contexts_of_one_model_on_one_node_warn():
    _, findings = check(edited(("node: laptop", "node: mini"), ("qwen3:8b", "Qwen3-Coder:30b")))
    assert [f.slug for f in findings] == ["unused-node", "context-thrash"]
    assert "8192, but 65536 in models.heavy-coder" in findings[1].what


def test_models_that_exceed_the_stated_memory_warn():
    _, findings = check(edited(("node: laptop", "node: mini"), ("tags: [heavy]", "memory_gb: 20")))
    assert [f.slug for f in findings] == ["unused-node", "memory-short"]
    assert "about 25 GB" in findings[1].what


@pytest.mark.parametrize("endpoint, normal", [
    ("http://h", "http://h:11434"), ("https://h", "https://h:443"), ("HTTP://H:1", "http://h:1"),
    ("http://h:11434/", "http://h:11434"), ("http://h:1/ollama/", "http://h:1/ollama"),
    ("http://[::1]:11434", "http://[::1]:11434"),
    ("http://[fe80::1%en0]:1", "http://[fe80::1%en0]:1"), ("http://mini.local:1", "http://mini.local:1"),
    ("http://my_host:1", "http://my_host:1"), ("http://h.:1", "http://h.:1"),
])
def test_endpoint_is_normalised(endpoint, normal):
    fleet, findings = check(edited(("http://192.168.1.50:11434", f'"{endpoint}"')))
    assert {finding.slug for finding in findings} <= {"same-machine"}  # `laptop` is localhost
    assert fleet.nodes["mini"].endpoint == normal


@pytest.mark.parametrize("written, seconds", [
    ("-1", -1), ("0", 0), ("300", 300), ("24h", 86400), ("1h30m", 5400), ("-1m", -1), ("90s", 90)])
def test_keep_alive_becomes_seconds(written, seconds):
    fleet, _ = check(edited(("context: 65536", f"context: 65536\n    keep_alive: {written}")))
    assert fleet.models["heavy-coder"].keep_alive == seconds


def test_cloud_model_is_allowed_when_said():
    fleet, findings = check(edited(("qwen3-coder:30b", "gpt-oss:120b-cloud\n    cloud: true")))
    assert fleet.models["heavy-coder"].cloud and findings == []


def test_description_of_several_lines_is_folded():
    fleet, _ = check(edited(("Use for planning.", '"Use for\\n  planning,\\u2028files."')))
    assert fleet.agents["planner"].description == "Use for planning, files."


def test_the_fleet_is_frozen():
    fleet, _ = check(EXAMPLE)
    with pytest.raises(AttributeError):
        fleet.name = "x"


def test_routes_tiers_and_fallbacks():
    fleet, _ = check(edited(("context: 65536", "context: 65536\n    fallback: [small-coder]")))
    routes = [(agent, model.node, model.ollama_model, model.alias)
              for agent, model in sf.plan_routes(fleet).items()]
    assert routes == [("planner", "laptop", "qwen3:8b", "claude-haiku-local"),
                      ("implementer", "mini", "qwen3-coder:30b", "claude-sonnet-local")]
    assert sf.plan_tiers(fleet) == {"main": "heavy-coder", "opus": "heavy-coder",
                                    "sonnet": "heavy-coder", "haiku": "small-coder",
                                    "fable": "heavy-coder"}
    assert sf.plan_fallbacks(fleet) == {"claude-sonnet-local": ["claude-haiku-local"]}


@pytest.mark.parametrize("change, tier, model", [
    (("  gateway:", "  claude: {opus: small-coder}\n  gateway:"), "opus", "small-coder"),
    (("claude-haiku-local", "my-opus"), "opus", "small-coder"),       # an alias that names it
    (("claude-haiku-local", "opusculum"), "opus", "heavy-coder"),     # but only as a whole word
    (("claude-haiku-local", "x"), "haiku", "small-coder"),            # the planner's
    (("claude-sonnet-local", "y"), "sonnet", "heavy-coder"),          # the implementer's
])
def test_tier_rule(change, tier, model):
    fleet, _ = check(edited(change))
    assert sf.plan_tiers(fleet)[tier] == model


def test_tiers_without_names_or_roles_go_by_size():
    text = edited(("claude-haiku-local", "a"), ("claude-sonnet-local", "b"))
    fleet, _ = check(text[:text.index("agents:")] + "agents: {}\n")
    assert sf.plan_tiers(fleet)["haiku"] == "small-coder"
    assert sf.plan_tiers(fleet)["main"] == "heavy-coder"


@pytest.mark.parametrize("name, size", [
    ("qwen3-coder:30b", 30), ("qwen2.5-coder:0.5b", 0.5), ("mixtral:8x7b", 56), ("llama3", 0),
    ("qwen3:30b-a3b", 30), ("phi-4b-mini", 4)])
def test_billions_in_a_name(name, size):
    assert sf.billions(name) == size


@pytest.mark.parametrize("one, other, same", [
    ("x", "x:latest", True), ("X:Latest", "x", True), ("library/x", "x", True),
    ("registry.ollama.ai/library/x:7b", "x:7b", True), ("x:7b", "x", False), ("a/x", "x", False),
    ("host:5000/x", "host:5000/x:latest", True)])
def test_model_names_compare_as_ollama_does(one, other, same):
    found = [sf.NodeModel(one)]
    assert sf.find_models(found, other) == (found if same else [])


def test_schema_is_the_table_that_checks():
    schema = sf.render_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    model = schema["properties"]["models"]["additionalProperties"]
    assert model["required"] == ["node"]
    assert model["allOf"] == [
        {"oneOf": [{"required": ["model"]}, {"required": ["ollama_model"]}]},
        {"oneOf": [{"required": ["alias"]}, {"required": ["litellm_alias"]}]}]
    assert model["properties"]["context"]["default"] == 8192
    assert model["additionalProperties"] is False
    assert schema["required"] == ["project", "nodes", "models", "agents"]
    json.dumps(schema)


def test_schema_agrees_with_the_checks_on_every_example():
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(sf.render_schema())
    assert list(validator.iter_errors(sf.parse_yaml(EXAMPLE))) == []
    seen = 0
    for old, new, slug, _, _ in ERRORS:
        if slug in ("bad-value", "unknown-key", "missing-key", "bad-name") and new not in (
                "  17:\n", "port: 4000.0"):  # to JSON these are "17" and a whole number
            assert list(validator.iter_errors(sf.parse_yaml(edited((old, new))))), new
            seen += 1
    assert seen > 30


def test_every_key_has_a_rule_or_a_section_and_a_default_that_obeys_it():
    seen = 0
    sections = [sf.FleetFile, sf.TaskFile]
    for section in sections:
        keys = sf.keys_of(section)
        assert keys and list(keys) == [key.key for key in keys.values()]
        for key in keys.values():
            if not key.rule:
                sections.append(sf.section_of(key))
            elif key.default not in (sf.REQUIRED, None):
                default = list(key.default) if isinstance(key.default, tuple) else key.default
                assert key.rule.fits(default), key.key
            seen += 1
    assert seen > 60 and tuple(sf.keys_of(sf.Tiers)) == (*sf.TIERS, "lean")
    assert {*sections} == {*sf.PLACES, sf.TaskFile, sf.TaskSpec, sf.TaskDefaults}


def test_a_word_of_other_programs_means_one_key_of_its_section():
    for section in (*sf.PLACES, sf.TaskFile, sf.TaskSpec):
        words = [word for key in sf.keys_of(section).values() for word in f"{key.also} {key.others}".split()]
        assert len(words) == len({*words}) and not {*words} & {*sf.keys_of(section)}, section
    for name, rule in sf.RULES.items():
        if name not in ("reference", "references"):  # what there is to refer to is not known
            assert sf.obeys(rule.example, name), name


@pytest.mark.parametrize("url, parts", [
    ("HTTP://Mini", ("http", "mini", 80, "")), ("https://mini/v1/", ("https", "mini", 443, "")),
    ("http://[::1]:11434", ("http", "::1", 11434, "")), ("http://a.b:1/", ("http", "a.b", 1, ""))])
def test_an_endpoint_is_taken_apart_and_put_together(url, parts):
    endpoint = sf.split_endpoint(url)
    assert (endpoint.scheme, endpoint.host, endpoint.port, endpoint.path) == parts
    assert sf.split_endpoint(endpoint.url) == endpoint


def test_patterns_mean_the_same_in_javascript():
    for rule in sf.RULES.values():
        for part in (rule.schema, rule.schema.get("items", {})):
            if "pattern" in part:
                assert part["pattern"][0] == "^" and part["pattern"][-1] == "$"
                assert not re.search(r"\\x|\(\?(?!!)|\\Z|\\A", part["pattern"])


def test_load_fleet_gives_the_fleet_or_one_error(tmp_path):
    path = tmp_path / "fleet.yaml"
    path.write_text(EXAMPLE, encoding="utf-8")
    assert sf.load_fleet(str(path)).name == "local-dev"
    path.write_text(edited(("node: mini", "node: mni")), encoding="utf-8")
    with pytest.raises(sf.FleetError) as caught:
        sf.load_fleet(str(path))
    assert caught.value.slug == "invalid-config" and len(caught.value.findings) == 1


def test_load_fleet_of_no_path_asks_no_environment(tmp_path, monkeypatch):
    path = tmp_path / "fleet.yaml"
    path.write_text(EXAMPLE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(sf.CONFIG_VARIABLE, str(path))
    with pytest.raises(sf.FleetError) as caught:
        sf.load_fleet("")
    assert caught.value.slug == "unreadable"


def state(name, *models, reason=""):
    """A node as `init` sees it."""
    return sf.NodeState(name, f"http://{name}:11434", reason, models=models)


def starter(states):
    """What `init` proposes: its tree, whether models were found, what the best one lacks."""
    plan = sf.plan_starter(states)
    return plan.tree, plan.has_models, plan.flaw


def model(name, size, capabilities=("completion", "tools"), context=131072, remote=""):
    return sf.NodeModel(name, size, capabilities=capabilities, trained_context=context,
                        remote=remote)


def test_starter_is_what_was_assigned_and_says_why():
    states = [state("a", model("s:8b", 8)), state("b", model("l:30b", 30))]
    tree, found, flaw = starter(states)
    notes = sf.plan_starter(states).notes
    text = sf.render_starter(tree, found, notes=notes)
    fleet, findings = check(text)
    assert found and findings == [] and flaw == "" and "laceholder" not in text
    assert "  # For main session and implementer: the strongest: 30 B. For reviewer: no other" in text
    assert "  # For planner: the fastest with 7 B parameters or more. For summarizer: the fastest" in text
    read = sf.parse_yaml(text)
    assert {key: read[key] for key in tree} == tree
    rows = [(m.name, m.node, m.ollama_model, m.alias, m.context, m.timeout, m.fallback)
            for m in fleet.models.values()]
    assert rows == [
        ("heavy-coder", "b", "l:30b", "claude-sonnet-local", 65536, 600, ("small-coder",)),
        ("small-coder", "a", "s:8b", "claude-haiku-local", 32768, 300, ("heavy-coder",))]
    assert {name: agent.model for name, agent in fleet.agents.items()} == {
        "planner": "small-coder", "implementer": "heavy-coder", "reviewer": "heavy-coder",
        "summarizer": "small-coder"}


@pytest.mark.parametrize("note", ["a\nb: c", "x " * 200, "\x1b[2J", "# {a: [b", "\u2028d", "y" * 300])
def test_a_note_in_a_starter_is_only_a_comment(note):
    tree, found, _ = starter([state("a", model("x:8b", 3))])
    text = sf.render_starter(tree, found, notes={"heavy-coder": note})
    assert sf.parse_yaml(text) == sf.parse_yaml(sf.render_starter(tree, found))


def test_starter_without_anybody_has_placeholders():
    tree, found, flaw = starter([state("local", reason="refused"),
                                         state("mini", reason="timeout")])
    assert (found, flaw) == (False, "") and list(tree["nodes"]) == ["local", "mini"]
    fleet, findings = check(sf.render_starter(tree, found))
    assert re.search("^# Placeholders: .*`ollama list`.*\nmodels:$", fleet.document.text, re.M)
    assert findings == [] and set(fleet.agents) == {"planner", "implementer", "reviewer",
                                                    "summarizer"}


def test_starter_leaves_out_only_who_was_not_named():
    local = replace(state("local", reason="refused"), endpoint=sf.OLLAMA_ENDPOINT)
    here, asleep = state("b", model("x:3b", 3)), state("mini", reason="timeout")
    assert list(sf.plan_starter([local, here, asleep]).tree["nodes"]) == ["b", "mini"]
    assert list(sf.plan_starter([local, asleep]).tree["nodes"]) == ["local", "mini"]
    assert list(sf.plan_starter([replace(local, reason=""), asleep]).tree["nodes"]) == ["local", "mini"]


def test_starter_survives_hostile_model_names():
    for name in ("a: b", "x # y", "- z", "'q'", '"q"', "{a}", "yes", "1:30", "é:1b", "a\\b"):
        tree, found, _ = starter([state("a", model(name, 3))])
        read = sf.parse_yaml(sf.render_starter(tree, found))
        assert {key: read[key] for key in tree} == tree


@pytest.mark.parametrize("told, kept, flaw, warned", [
    (model("x:1b", 1, context=100), 256, "x:1b holds 100 tokens; Claude Code's own", "small-context"),
    (model("x:1b", 1, context=8192), 8192, "x:1b holds 8192 tokens; Claude", "small-context"),
    (model("x:1b", 1, ("completion",)), 65536, "x:1b cannot call tools", None),
    (model("qwen2.5-coder:7b", 7), 65536, "qwen2.5-coder:7b prints tool", "prints-tool-calls"),
    (model("qwen2.5-coder:7b", 7, None, None), 65536, "qwen2.5-coder:7b prints", "prints-tool-calls"),
    (model("x:1b", 1, None, None), 65536, "", None),
])
def test_starter_is_valid_and_says_what_its_model_lacks(told, kept, flaw, warned):
    tree, found, said = starter([state("a", told)])
    fleet, findings = check(sf.render_starter(tree, found))
    assert found and fleet.models["heavy-coder"].context == kept
    assert said.startswith(flaw) and bool(said) == bool(flaw)
    assert {finding.slug for finding in findings} == {warned} - {None}


@pytest.mark.parametrize("told, why", [
    (model("nomic-embed-text", 1, ("embedding",)), "cannot chat"),
    (model("all-minilm:33m", 1, None), "cannot chat"), (model("a\nb", 1), "cannot chat"),
    (model("gpt-oss:120b-cloud", 1), "does not run there"),
    (model("mine", 1, remote="https://ollama.com:443"), "does not run there")])
def test_starter_says_why_no_model_will_do(told, why):
    tree, found, flaw = starter([state("a", told), state("b", told)])
    assert not found and flaw == f"{told.name} {why}"
    assert [m["model"] for m in tree["models"].values()] == ["qwen3-coder:30b", "qwen3:8b"]


def test_starter_shows_every_key_and_each_default_may_be_uncommented():
    tree, found, _ = starter([state("a", model("x:3b", 3))])
    text = sf.render_starter(tree, found)
    for kind in (sf.Gateway, sf.Node, sf.Model, sf.Agent):
        for key in sf.keys_of(kind):
            assert re.search(rf"^ +(# )?{key}:", text, re.M), key
    assert len(text.splitlines()) <= 70 and max(map(len, text.splitlines())) <= 100
    more, count = re.subn("(?m)^( +)# (?=[a-z_]+: *[^# ])", r"\1", text)
    fleet, findings = check(more)
    assert count >= 8 and [f.what for f in findings] == ["nodes.mini: no model runs on it"]
    assert fleet.claude == {"haiku": "heavy-coder"}


# -- files that nobody wrote --

KEYS = [key for section in sf.PLACES for key in sf.keys_of(section)]
MISTYPED = [
    "null", "true", "7", "-1", "1.5", '""', "[]", "{}", "[a, b]", "{a: 1}", r'"\e[31m"', "x" * 300,
    r'"a\nb"', "\u201cx\u201d", "http://x", "qwen3:8b", "*", "&a", "!x", "|", ">", "- ", "\t", "\xa0",
    "mini", "heavy-coder", "model", "alias", "nodes", "agents", "host", "65,536", "24h", "anthropic",
    "cloud: true", "frontmatter: {color: [1]}", '"---"', "0x10", "2001-01-01"]


def mistyped(dice, text):
    """The text with up to four lines changed, moved, doubled or lost."""
    for _ in range(1 + dice.roll(4)):
        lines = text.split("\n")
        line, kind, word = dice.roll(len(lines)), dice.roll(8), dice.pick(MISTYPED)
        head, colon, rest = lines[line].partition(":")
        margin = " " * (len(head) - len(head.lstrip()))
        if kind == 0:
            lines[line] = " " * dice.roll(7) + lines[line].lstrip()
        elif kind == 1:
            del lines[line]
        elif kind == 2:
            lines.insert(dice.roll(len(lines) + 1), lines[line])
        elif kind == 3:
            lines[line] = margin + word + colon + rest
        elif kind == 4:
            lines.insert(line, f"{margin}{dice.pick(KEYS)}: {word}")
        elif kind == 5:
            at = dice.roll(len(lines[line]) + 1)
            lines[line] = lines[line][:at] + word + lines[line][at:]
        else:
            lines[line] = f"{head}: {word}"
        text = "\n".join(lines)
    return text


def test_mistyped_fleets_are_refused_in_words_or_written_for_every_program():
    valid = wrong = 0
    for number in range(1500):
        text = mistyped(Dice(number), EXAMPLE)
        try:
            fleet, findings = check(text)
        except sf.FleetError as error:
            fleet, findings = None, [error.finding]
        assert fleet or findings
        for finding in findings:
            assert finding.what and finding.where.startswith("fleet.yaml:")
            assert not set(sf.format_finding(finding)) & set("\x1b\x07\x9b\r\0")
        if fleet:
            valid += 1
            files = sf.render_files(fleet, "k" * 40, sf.TARGET_NAMES)
            sf.parse_yaml(files["litellm_config.yaml"].decode())
            assert len(files) > 5
        wrong += not fleet
    assert valid > 30 and wrong > 1000


def test_a_description_of_blanks_costs_linear_time():
    began = time.monotonic()
    fleet, _ = check(edited(("Use for planning.", f'"a{" " * 200_000}b"')))
    assert fleet.agents["planner"].description == f'a{" " * 200_000}b'
    assert time.monotonic() - began < 5  # it was a minute
