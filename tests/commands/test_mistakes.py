"""What people get wrong in a fleet file: each mistake is said once, and typing its fix helps."""
import re
import subprocess
import sys

import pytest

import subagent_fleet as sf
from tools import ROOT, free_port

BASE = """\
project:
  name: local-dev
  gateway:
    provider: litellm
    host: 127.0.0.1
    port: 4000
nodes:
  mini:
    endpoint: http://192.168.1.50:11434
    memory_gb: 64
  laptop:
    endpoint: http://laptop.local:11434
models:
  heavy-coder:
    node: mini
    ollama_model: qwen3-coder:30b
    litellm_alias: claude-sonnet-local
    context: 65536
    timeout: 600
    keep_alive: 24h
    thinking: false
    max_parallel: 2
    max_output: 4096
    fallback: [small-coder]
  small-coder:
    node: laptop
    ollama_model: qwen3:8b
    litellm_alias: claude-haiku-local
agents:
  planner:
    model: small-coder
    description: Use for planning.
    tools: [Read, Grep]
  implementer:
    model: heavy-coder
    description: Use for code.
    prompt: You write code.
"""


def check(text):
    """Return every finding of a text: of its YAML the first, else its errors."""
    try:
        document = sf.Document(text, "fleet.yaml")
    except sf.FleetError as error:
        return [error.finding]
    return sf.check_fleet(document)[1]


def edited(old, new):
    assert BASE.count(old) == 1, old
    return BASE.replace(old, new)


def type_fix(text, finding):
    """Type what a finding says; None where that takes more than a look at its line."""
    line, column = (int(number) for number in finding.where.split(":")[-2:])
    lines = text.split("\n")
    row, start = lines[line - 1], column - 1
    end = start + finding.excerpt.count("^")
    fix = finding.fix
    words = re.match("(?:write|write it as|did you mean|put a space after the colon:) `(.*?)`", fix)
    if not words and re.match("(put it in quotes|quote it)", fix):
        words = re.match("(.*)", '"' + row[start:end] + '"')
    if words:
        typed = words[1]
        key = re.match("([a-z_]+): ", typed)
        if key and re.match(rf"\s*{key[1]}:", row):
            if typed != key[0].strip() and row.lstrip().startswith(key[1] + ":"):
                lines[line - 1] = row[:len(row) - len(row.lstrip())] + typed
        else:
            lines[line - 1] = row[:start] + typed.rstrip(":") + row[end:]
        return "\n".join(lines)
    if re.search("remove the line `", fix):
        return "\n".join(lines[:line - 1] + lines[line:])
    return None


def test_the_base_is_right():
    assert check(BASE) == []


TYPED = [
    # what is right, what a person writes, the findings, the fix of the first (typed by this file)
    # -- references --
    ("    model: heavy-coder", "    model: qwen3-coder:30b", ["unknown-model"],
     "did you mean `heavy-coder`?"),
    ("    model: heavy-coder", "    model: Qwen3-Coder:30B", ["unknown-model"],
     "did you mean `heavy-coder`?"),
    ("    model: small-coder", "    model: claude-haiku-local", ["unknown-model"],
     "did you mean `small-coder`?"),
    ("    model: small-coder", "    model: haiku", ["unknown-model"],
     "known models: heavy-coder, small-coder"),
    ("    model: heavy-coder", "    model: mini", ["unknown-model"],
     "known models: heavy-coder, small-coder"),
    ("    model: heavy-coder", "    model:: heavy-coder", ["unknown-key"], "did you mean `model`?"),
    ("    model: heavy-coder", "    model: Heavy-Coder", ["unknown-model"],
     "did you mean `heavy-coder`?"),
    ("    model: heavy-coder", "    model: heavy coder", ["unknown-model"],
     "did you mean `heavy-coder`?"),
    ("    model: heavy-coder", "    model: [heavy-coder]", ["bad-value"],
     "write `model: heavy-coder`"),
    ("    model: heavy-coder", "    model: “heavy-coder”", ["unknown-model"],
     "did you mean `heavy-coder`?"),
    ("fallback: [small-coder]", "fallback: [heavy-coders]", ["unknown-model"],
     "did you mean `small-coder`?"),  # not itself
    ("  planner:\n    model: small-coder", "  small-coder:\n    model: small-coderr",
     ["unknown-model"], "did you mean `small-coder`?"),
    ("  planner:\n    model: small-coder", "  fallback:\n    model: smal-coder",
     ["unknown-model"], "did you mean `small-coder`?"),
    ("fallback: [small-coder]", "fallback: [qwen3:8b]", ["unknown-model"],
     "did you mean `small-coder`?"),
    ("node: mini", "node: 192.168.1.50", ["unknown-node"],
     "did you mean `mini`?"),
    ("node: mini", "node: http://192.168.1.50:11434", ["unknown-node"],
     "did you mean `mini`?"),
    ("node: laptop", "node: laptop.local", ["unknown-node"],
     "did you mean `laptop`?"),
    ("node: laptop", "node: Laptop", ["unknown-node"],
     "did you mean `laptop`?"),
    ("node: mini", "node: “mini”", ["unknown-node"],
     "did you mean `mini`?"),
    # -- the gateway --
    ("port: 4000", "port: 0", ["bad-value"], "write `port: 4000`, the default"),
    ("port: 4000", "port: four", ["bad-value"], "write `port: 4000`, the default"),
    ("port: 4000", 'port: "4000"', ["bad-value"], "write `port: 4000`"),
    ("port: 4000", "port: 4000/tcp", ["bad-value"], "write `port: 4000`, the default"),
    ("port: 4000", "port: [4000]", ["bad-value"], "write `port: 4000`"),
    ("port: 4000", "prot: 4000", ["unknown-key"], "did you mean `port`?"),
    ("provider: litellm", "provider: true", ["bad-value"], "write `provider: builtin`, the default"),
    ("provider: litellm", 'provider: "yes"', ["bad-value"],
     "write `provider: builtin`, the default"),
    ("provider: litellm", "provider: ollama", ["bad-value"],
     "write `provider: builtin`, the default"),
    ("provider: litellm", "provider: LiteLLM", ["bad-value"], "write `provider: litellm`"),
    ("provider: litellm", "provider: built-in", ["bad-value"], "write `provider: builtin`"),
    ("host: 127.0.0.1", "host: http://127.0.0.1:4000", ["bad-value"],
     'write `host: "127.0.0.1"`'),
    ("host: 127.0.0.1", "host: 127.0.0.1:4000", ["bad-value"], 'write `host: "127.0.0.1"`'),
    ("host: 127.0.0.1", "host: '*'", ["bad-value"], 'write `host: "127.0.0.1"`, the default'),
    ("host: 127.0.0.1", "host: 127.0.0.1,", ["bad-value"], 'write `host: "127.0.0.1"`'),
    ("port: 4000", "master_key_env: sk-1234", ["bad-value"],
     "write `master_key_env: LITELLM_MASTER_KEY`, the default"),
    ("port: 4000", "master_key_env: $MY_API_KEY", ["bad-value"],
     "write `master_key_env: LITELLM_MASTER_KEY`, the default"),
    ("port: 4000", "masterKeyEnv: LITELLM_MASTER_KEY", ["unknown-key"],
     "did you mean `master_key_env`?"),
    ("port: 4000", "master_key: LITELLM_MASTER_KEY", ["unknown-key"],
     "did you mean `master_key_env`?"),
    # -- endpoints --
    *(("http://192.168.1.50:11434", written, [slug], f"write `endpoint: http://{host}`")
      for written, slug, host in [
          ("192.168.1.50:11434", "bad-value", "192.168.1.50:11434"),
          ("192.168.1.50", "bad-value", "192.168.1.50:11434"),
          ("http:/192.168.1.50:11434", "bad-value", "192.168.1.50:11434"),
          ("http//192.168.1.50:11434", "bad-value", "192.168.1.50:11434"),
          ("htp://mini:11434", "bad-value", "mini:11434"),
          ("//mini:11434", "bad-value", "mini:11434"),
          ("ftp://mini", "bad-value", "mini:11434"),
          ("http://mini:0", "bad-endpoint", "mini:11434"),
          ("http://mini:99999", "bad-endpoint", "mini:11434"),
          ("http://mini:114344", "bad-endpoint", "mini:11434"),
          ("http://mini:port", "bad-endpoint", "mini:11434"),
          ('"http://mini:"', "bad-endpoint", "mini:11434"),
          ("http://mini:11434:11434", "bad-endpoint", "mini:11434"),
          ("http://mini:99999/base", "bad-endpoint", "mini:11434/base"),
          ("http://mini :11434", "bad-value", "mini:11434"),
          ("http:// mini:11434", "bad-value", "mini:11434"),
          ("http://me:secret@mini:11434", "bad-value", "mini:11434"),
          ("http://mini:11434?x=1", "bad-value", "mini:11434"),
          ("http://mini:11434,", "bad-endpoint", "mini:11434"),
          ("[http://mini:11434]", "bad-value", "mini:11434"),
          ("“http://mini:11434”", "bad-value", "mini:11434")]),
    ("http://192.168.1.50:11434", "https//mini", ["bad-value"],
     "write `endpoint: https://mini:443`"),
    ("http://192.168.1.50:11434", '"::1"', ["bad-value"],
     "write `endpoint: http://192.168.1.50:11434`, for example"),
    ("http://192.168.1.50:11434", "11434", ["bad-value"],
     "write `endpoint: http://192.168.1.50:11434`, for example"),
    ("endpoint: http://192.168.1.50:11434", "url: http://192.168.1.50:11434", ["unknown-key"],
     "did you mean `endpoint`?"),
    ("endpoint: http://192.168.1.50:11434", "host: http://192.168.1.50:11434", ["unknown-key"],
     "did you mean `endpoint`?"),
    ("endpoint: http://192.168.1.50:11434", "Endpoint: http://192.168.1.50:11434", ["unknown-key"],
     "did you mean `endpoint`?"),
    ("endpoint: http://192.168.1.50:11434", "endpoints: http://192.168.1.50:11434", ["unknown-key"],
     "did you mean `endpoint`?"),
    ("endpoint: http://192.168.1.50:11434", "“endpoint”: http://192.168.1.50:11434",
     ["unknown-key"], "did you mean `endpoint`?"),
    ("memory_gb: 64", "memory_gb: 64 GB", ["bad-value"], "write `memory_gb: 64`"),
    ("memory_gb: 64", "memory_gb: 65536MB", ["bad-value"], "write `memory_gb: 64`"),
    ("memory_gb: 64", "memory_gb: lots", ["bad-value"],
     "write `memory_gb: 64`, for example, or remove the line"),
    ("memory_gb: 64", "memory_gb:", ["bad-value"],
     "write `memory_gb: 64`, for example, or remove the line"),
    ("memory_gb: 64", "ram: 64", ["unknown-key"], "did you mean `memory_gb`?"),
    # -- models --
    ("context: 65536", "context: 64k", ["bad-value"], "write `context: 65536`"),
    ("context: 65536", "context: 64", ["bad-value"], "write `context: 65536`"),
    ("context: 65536", "context: 65536 tokens", ["bad-value"], "write `context: 65536`"),
    ("context: 65536", "context: -1", ["bad-value"], "write `context: 8192`, the default"),
    ("context: 65536", "context: auto", ["bad-value"], "write `context: 8192`, the default"),
    ("context: 65536", "num_ctx: 65536", ["unknown-key"], "did you mean `context`?"),
    ("context: 65536", "numCtx: 65536", ["unknown-key"], "did you mean `context`?"),
    ("context: 65536", "contextLength: 65536", ["unknown-key"], "did you mean `context`?"),
    ("context: 65536", "context-window: 65536", ["unknown-key"], "did you mean `context`?"),
    ("timeout: 600", "timeout: 10 minutes", ["bad-value"], "write `timeout: 600`"),
    ("timeout: 600", "timeout: 1.5h", ["bad-value"], "write `timeout: 5400`"),
    ("timeout: 600", "timeout: 600000", ["bad-value"],
     "write `timeout: 300`, the default"),
    ("timeout: 600", "timeout: 600000ms", ["bad-value"], "write `timeout: 600`"),
    ("timeout: 600", "timeout: none", ["bad-value"], "write `timeout: 300`, the default"),
    ("timeout: 600", "timeout: -1", ["bad-value"],
     "write `timeout: 300`, the default"),
    ("keep_alive: 24h", "keep_alive: forever", ["bad-value"],
     "write `keep_alive: -1`, the default"),
    ("keep_alive: 24h", "keep_alive: true", ["bad-value"],
     "write `keep_alive: -1`, the default"),
    ("keep_alive: 24h", "keep_alive: false", ["bad-value"],
     "write `keep_alive: -1`, the default"),
    ("keep_alive: 24h", "keep_alive: '-1'", ["bad-value"], "write `keep_alive: -1`"),
    ("keep_alive: 24h", "keep_alive: 1.5h", ["bad-value"],
     "write `keep_alive: 5400`"),
    ("keep_alive: 24h", "keep_alive: 1 day", ["bad-value"],
     "write `keep_alive: 86400`"),
    ("keep_alive: 24h", "keep_alive: a while", ["bad-value"],
     "write `keep_alive: -1`, the default"),
    ("keep_alive: 24h", "keepAlive: 24h", ["unknown-key"], "did you mean `keep_alive`?"),
    ("thinking: false", 'thinking: "yes"', ["bad-value"], "write `thinking: true`"),
    ("thinking: false", "thinking: high", ["bad-value"],
     "write `thinking: false`, the default"),
    ("thinking: false", "thinking: 0", ["bad-value"],
     "write `thinking: false`, the default"),
    ("thinking: false", 'cloud: "yes"', ["bad-value"], "write `cloud: true`"),
    ("thinking: false", "cloud: False # no", [], ""),
    ("thinking: false", "cloud: maybe", ["bad-value"], "write `cloud: false`, the default"),
    ("max_parallel: 2", "max_parallel: 0", ["bad-value"], "write `max_parallel: 1`, the default"),
    ("max_parallel: 2", "max_parallel: two", ["bad-value"],
     "write `max_parallel: 1`, the default"),
    ("max_parallel: 2", "parallel: 2", ["unknown-key"], "did you mean `max_parallel`?"),
    ("max_output: 4096", "max_output: 4k", ["bad-value"], "write `max_output: 4096`"),
    ("max_output: 4096", "max_tokens: 4096", ["unknown-key"], "did you mean `max_output`?"),
    ("fallback: [small-coder]", "fallback: small-coder", ["bad-value"],
     "write `fallback: [small-coder]`"),
    ("fallback: [small-coder]", "fallbacks: [small-coder]", ["unknown-key"],
     "did you mean `fallback`?"),
    ("fallback: [small-coder]", "fallback: {small-coder: 1}", ["bad-value"],
     "write a list, each item the name of a node or a model, or remove the line"),
    ("ollama_model: qwen3:8b", "ollama_model: “qwen3:8b”", ["bad-value"],
     "write `ollama_model: qwen3:8b`"),
    ("ollama_model: qwen3:8b", "ollama_model: ‘qwen3:8b’", ["bad-value"],
     "write `ollama_model: qwen3:8b`"),
    ("ollama_model: qwen3:8b", "ollama_model: [qwen3:8b]", ["bad-value"],
     'write `ollama_model: qwen3:8b`'),
    ("ollama_model: qwen3:8b", "model: qwen3:8b", [], ""),
    ("ollama_model: qwen3:8b", "model: [qwen3:8b]", ["bad-value"], "write `model: qwen3:8b`"),
    ("ollama_model: qwen3:8b", "model_name: qwen3:8b", ["unknown-key"],
     "did you mean `model`?"),
    ("ollama_model: qwen3:8b", "ollama-model: qwen3:8b", ["unknown-key"],
     "did you mean `model`?"),
    ("ollama_model: qwen3:8b", "name: qwen3:8b", ["unknown-key"], "did you mean `model`?"),
    ("ollama_model: qwen3:8b", "ollama_model: 3", ["bad-value"], 'write `ollama_model: "3"`'),
    ("litellm_alias: claude-haiku-local", "litellm_alias: claude haiku local", ["bad-value"],
     "write `litellm_alias: claude-haiku-local`"),
    ("litellm_alias: claude-haiku-local", "litellm_alias: claude-haiku[1m]", ["bad-value"],
     "write `litellm_alias: claude-haiku-1m`"),
    ("litellm_alias: claude-haiku-local", "litellm_alias: “claude-haiku”", ["bad-value"],
     "write `litellm_alias: claude-haiku`"),
    ("litellm_alias: claude-haiku-local", "litellm_alias: haiku", ["reserved-alias"],
     "write `claude-haiku-local`"),
    ("litellm_alias: claude-haiku-local", "alias: claude-haiku-local", [], ""),
    ("litellm_alias: claude-haiku-local", "alias: claude haiku local", ["bad-value"],
     "write `alias: claude-haiku-local`"),
    ("litellm_alias: claude-haiku-local", "model_alias: claude-haiku-local", ["unknown-key"],
     "did you mean `alias`?"),
    ("node: laptop", "machine: laptop", ["unknown-key"], "did you mean `node`?"),
    ("node: laptop", "nodes: laptop", ["unknown-key"], "did you mean `node`?"),
    # -- agents --
    ("tools: [Read, Grep]", "tools: Read, Grep", ["bad-value"], "write `tools: [Read, Grep]`"),
    ("tools: [Read, Grep]", "tools: {Read: true, Grep: true}", ["bad-value"],
     "write `tools: [Read]`, for example, or remove the line"),
    ("tools: [Read, Grep]", "tools: “Read, Grep”", ["bad-value"],
     "write `tools: [Read, Grep]`"),
    ("tools: [Read, Grep]", "tools: [“Read”, Grep]", ["bad-value"],
     "write `Read`"),
    ("tools: [Read, Grep]", "tools: [Bash (git diff)]", ["bad-value"], "write `Read`, for example"),
    ("tools: [Read, Grep]", "tools: true", ["bad-value"],
     "write `tools: [Read]`, for example, or remove the line"),
    ("tools: [Read, Grep]", "tools: false", ["bad-value"],
     "write `tools: [Read]`, for example, or remove the line"),
    ("tools: [Read, Grep]", "tools:", ["bad-value"],
     "write `tools: [Read]`, for example, or remove the line"),
    ("tools: [Read, Grep]", "tool: [Read, Grep]", ["unknown-key"], "did you mean `tools`?"),
    ("tools: [Read, Grep]", "allowed-tools: [Read, Grep]", ["unknown-key"],
     "did you mean `tools`?"),
    ("description: Use for planning.", "desc: Use for planning.", ["unknown-key"],
     "did you mean `description`?"),
    ("description: Use for planning.", "description: [Use for planning.]", ["bad-value"],
     "write `description: Use for planning.`"),
    ("description: Use for planning.", 'description: "Use\\n\\nfor planning."', ["bad-value"],
     "write `description: Use for planning.`, for example"),
    ("description: Use for planning.", "description: 42", ["bad-value"],
     'write `description: "42"`'),
    ("description: Use for planning.", "description: 4.2", ["bad-value"],
     "write `description: Use for planning.`, for example"),
    ("prompt: You write code.", "prompt: [You write code., Be brief.]", ["bad-value"],
     "write `prompt: You write code.`, for example, or remove the line"),
    ("prompt: You write code.", "system_prompt: You write code.", ["unknown-key"],
     "did you mean `prompt`?"),
    # -- names --
    ("  laptop:\n", "  laptop!:\n", ["bad-name", "unknown-node"], "write `laptop:`"),
    ("  planner:\n", "  Planner:\n", ["bad-name"], "write `planner:`"),
    ("  planner:\n", "  file planner:\n", ["bad-name"], "write `file-planner:`"),
    ("  planner:\n", "  code.planner:\n", ["bad-name"], "write `code-planner:`"),
    ("  planner:\n", "  “planner”:\n", ["bad-name"], "write `planner:`"),
    ("  planner:\n", "  1:\n", ["bad-name"],
     'write `"1":`'),
    ("  planner:\n", "  true:\n", ["bad-name"],
     'write `"true":`'),
    ("  laptop:\n", "  node:laptop:\n", ["bad-name", "unknown-node"], "write `node-laptop:`"),
    # -- sections --
    ("nodes:\n", "node:\n", ["unknown-key"], "did you mean `nodes`?"),
    ("nodes:\n", "Nodes:\n", ["unknown-key"], "did you mean `nodes`?"),
    ("models:\n", "model:\n", ["unknown-key"], "did you mean `models`?"),
    ("agents:\n", "subagents:\n", ["unknown-key"], "did you mean `agents`?"),
    ("agents:\n", "agnets:\n", ["unknown-key"], "did you mean `agents`?"),
    ("project:\n", "projects:\n", ["unknown-key"], "did you mean `project`?"),
    ("  gateway:\n", "  gatway:\n", ["unknown-key"], "did you mean `gateway`?"),
    ("name: local-dev", "title: local-dev", ["unknown-key"], "did you mean `name`?"),
    ("name: local-dev", "name: 1.0", ["bad-value"],
     "write `name: local-dev`, for example"),
    ("name: local-dev", "name: null", ["bad-value"], ""),
    ("name: local-dev", "name: “local-dev”", ["bad-value"],
     "write `name: local-dev`"),
]


@pytest.mark.parametrize("right, written, slugs, fix", TYPED)
def test_a_mistake_is_fixed_by_typing_its_fix(right, written, slugs, fix):
    text = edited(right, written)
    findings = check(text)
    assert [finding.slug for finding in findings] == slugs
    if findings and fix:
        assert findings[0].fix == fix
        if fix.startswith(("known ", "write a list", "rename it")):  # place and what is accepted
            return
        typed = type_fix(text, findings[0])
        assert typed is not None, findings[0]
        assert len(check(typed)) < len(findings), (typed, check(typed))


def indented(start, end="\0", by=2):
    """The base with the lines from one to another indented deeper."""
    head, _, rest = BASE.partition(start)
    middle, found, tail = (start + rest).partition(end)
    return head + re.sub("(?m)^(?=.)", " " * by, middle) + found + tail


WHOLE = [
    # a file, its findings, a part of the fix of the first, the file when that is typed
    ("", ["empty-file"], "subagent-fleet init --force", BASE),
    ("# later\n\n# more\n", ["empty-file"], "subagent-fleet init --force", BASE),
    ("---\n", ["empty-file"], "subagent-fleet init --force", BASE),
    (indented("models:\n", "agents:\n"), ["missing-key", "misplaced-section"],
     "add `models:` (which model runs on which node, under which alias)",
     BASE),
    (indented("models:\n", "agents:\n", 4), ["missing-key", "unknown-key"],
     "add `models:` (which model runs on which node, under which alias)",
     BASE),
    (indented("nodes:\n", "models:\n"), ["missing-key", "unknown-key"],
     "add `nodes:` (machines that run models)", BASE),
    (indented("agents:\n"), ["missing-key", "misplaced-section"],
     "add `agents:` (Claude Code subagents and the model each one uses)", BASE),
    (indented("agents:\n", by=4), ["missing-key", "unknown-key"],
     "add `agents:` (Claude Code subagents and the model each one uses)", BASE),
    (indented("models:\n"), ["missing-key", "missing-key", "misplaced-section", "misplaced-section"],
     "add `models:` (which model runs on which node, under which alias)",
     indented("agents:\n")),
    (edited("nodes:\n  mini:\n", "nodes:\nmini:\n").replace("  laptop:\n", "laptop:\n"),
     ["not-indented"], "put more spaces before `mini:` and `laptop:` than before `nodes:`", BASE),
    (edited("  small-coder:\n", "small-coder:\n"), ["unknown-model", "unknown-key", "unknown-model"],
     "remove it", BASE),
    (edited("  implementer:\n", "implementer:\n"), ["unknown-key"],
     "known keys: project, nodes, models, agents; indent a name under one of them", BASE),
    (edited("  gateway:\n    provider: litellm\n    host: 127.0.0.1\n    port: 4000\n",
            "gateway:\n  provider: litellm\n"), ["unknown-key"],
     "move it: `gateway:` belongs to `project:`", edited("    host: 127.0.0.1\n", "")),
    (edited("    port: 4000", "  port: 4000"), ["unknown-key"],
     "move it: `port:` belongs to `gateway:` in `project:`", BASE),
    (edited("  name: local-dev\n", "  name: local-dev\n  haiku: small-coder\n"), ["unknown-key"],
     "move it: `haiku:` belongs to `claude:` in `project:`",
     edited("  name: local-dev\n", "  name: local-dev\n  claude:\n    haiku: small-coder\n")),
    (BASE + "version: 1\n", ["unknown-key"], "known keys: project, nodes, models, agents", BASE),
    (BASE + "name: x\n", ["unknown-key"],
     "move it: `name:` belongs to `project:`", BASE),
    (edited("    tools: [Read, Grep]\n", "    context: 8192\n"), ["unknown-key"],
     "`context:` belongs to a model, under `models:`", BASE),
    (edited("    timeout: 600\n", "    tools: [Read]\n"), ["unknown-key"],
     "`tools:` belongs to an agent, under `agents:`", BASE),
    (edited("    prompt: You write code.\n", "    color: blue\n"), ["unknown-key"],
     "Claude Code's others go under `frontmatter:`",
     edited("    prompt: You write code.\n", "    frontmatter:\n      color: blue\n")),
    (edited("    model: heavy-coder", "    model: 7"), ["bad-value"],
     'write `model: "7"`', BASE),
    (edited("    model: heavy-coder", "    model: “x”"), ["unknown-model"],
     "known models: heavy-coder, small-coder", BASE),
    (edited("fallback: [small-coder]", "fallback: [small-coder, 1.5]"), ["bad-value"],
     "write the name of a node or a model", BASE),
    (edited("node: mini", "node: [mini, laptop]"), ["bad-value"],
     "write the name of a node or a model", BASE),
    (edited("    prompt: You write code.\n", "    name: implementer\n"), ["unknown-key"],
     "remove it: the agent's name is the key above", BASE),
    (edited("    memory_gb: 64\n", "    name: mini\n"), ["unknown-key"],
     "remove it: the node's name is the key above", BASE),
    (edited("    memory_gb: 64\n", "    memory_gb:\u00a064\n"), ["yaml-syntax"],
     "put `: ` after the key", BASE),
    (edited("    prompt: You write code.\n", "    frontmatter: {model: opus}\n"),
     ["bad-frontmatter"], "write `model:` one level up", BASE),
    # mappings that were written as lists, or as one value
    ("project: {name: a}\nnodes:\n- name: mini\n  endpoint: http://a:1\nmodels:\n- name: m\n"
     "  node: mini\n  ollama_model: x\n  litellm_alias: y\nagents:\n- name: p\n  model: m\n"
     "  description: d\n", ["not-mapping", "not-mapping", "not-mapping"],
     "write `nodes:`, below it a name, below that its keys",
     "project: {name: a}\nnodes:\n  mini:\n    endpoint: http://a:1\nmodels:\n- name: m\n"
     "  node: mini\n  ollama_model: x\n  litellm_alias: y\nagents:\n- name: p\n  model: m\n"
     "  description: d\n"),
    (edited("  laptop:\n    endpoint: http://laptop.local:11434\n",
            "  laptop: http://laptop.local:11434\n"), ["not-mapping"],
     "write its keys on the lines below, such as `endpoint: http://laptop.local:11434`", BASE),
    (edited("  laptop:\n    endpoint: http://laptop.local:11434\n", "  laptop: laptop.local\n"),
     ["not-mapping"],
     "write its keys on the lines below, such as `endpoint: http://laptop.local:11434`", BASE),
    (edited("  laptop:\n    endpoint: http://laptop.local:11434\n", "  laptop:\n"),
     ["not-mapping"],
     "write its keys on the lines below, such as `endpoint: http://192.168.1.50:11434`", BASE),
    (edited("    endpoint: http://laptop.local:11434\n", "    endpoint:http://laptop.local:11434\n"),
     ["not-mapping"],
     "put a space after the colon: `endpoint: http://laptop.local:11434`", BASE),
    (edited("  planner:\n    model: small-coder\n    description: Use for planning.\n"
            "    tools: [Read, Grep]\n", "  planner: small-coder\n"), ["not-mapping"],
     "write its keys on the lines below, such as `model: small-coder`", BASE),
    (edited("project:\n  name: local-dev\n", "project: local-dev\nx:\n  name: local-dev\n"),
     ["not-mapping", "unknown-key"],
     "write its keys on the lines below, such as `name: local-dev`",
     BASE),
    ("project: local-dev\n" + BASE[BASE.index("nodes:"):], ["not-mapping"],
     "write its keys on the lines below, such as `name: local-dev`", BASE),
    ("project: {name: a, gateway: litellm}\n" + BASE[BASE.index("nodes:"):], ["not-mapping"],
     "write its keys on the lines below, such as `provider: litellm`", BASE),
    ("project: {name: a, claude: heavy-coder}\n" + BASE[BASE.index("nodes:"):], ["not-mapping"],
     "write its keys on the lines below, such as `main: heavy-coder`", BASE),
    ("project: {name: a}\nnodes: [mini, laptop]\n" + BASE[BASE.index("models:"):], ["not-mapping"],
     "write `nodes:`, below it a name, below that its keys", BASE),
    ("project: {name: a}\nnodes:\n" + BASE[BASE.index("models:"):], ["not-mapping"],
     "write `nodes:`, below it a name, below that its keys", BASE),
    ("project: {name: a}\n" + BASE[BASE.index("models:"):], ["missing-key"], "add `nodes:`", BASE),
    (BASE[BASE.index("nodes:"):], ["missing-key"], "add `project:`", BASE),
    (BASE[:BASE.index("agents:")], ["missing-key"], "add `agents:`", BASE),
    (edited("    node: laptop\n", ""), ["missing-key"], "add `node:` (the node it runs on)", BASE),
    (BASE.replace("laptop:\n", "laptop: {endpoint:http://a}\n").replace(
        "    endpoint: http://laptop.local:11434\n", ""), ["unknown-key", "bad-value"],
     "did you mean `endpoint`?", BASE),
    (edited("qwen3:8b", "gpt-oss:120b-cloud"), ["cloud-model"], "add `cloud: true`",
     edited("qwen3:8b", "gpt-oss:120b-cloud\n    cloud: true")),
    (edited("  small-coder:\n    node: laptop\n    ollama_model: qwen3:8b\n"
            "    litellm_alias: claude-haiku-local\n", ""),
     ["unknown-model", "unknown-model"], "remove it", None),  # no other model: not `heavy-coder`
    (edited("fallback: [small-coder]", "fallback: [heavy-coder]"), ["fallback-cycle"],
     "remove `heavy-coder` from it", edited("[small-coder]", "[]")),
    # what is no YAML
    (edited("    port: 4000", "\tport: 4000"), ["yaml-tab"], "replace the tab with spaces", BASE),
    (edited("provider: litellm", "provider: yes"), ["yaml-ambiguous"], "write true", BASE),
    (edited("    port: 4000", "    port 4000"), ["yaml-syntax"], "put `: ` after the key", BASE),
    (edited("  laptop:\n", "  mini:\n"), ["yaml-duplicate"], "remove or rename one of them", BASE),
    (edited("tools: [Read, Grep]", "tools: [Read, Grep"), ["yaml-syntax"],
     "look for a missing comma, bracket or quote", BASE),
    (edited("tools: [Read, Grep]", "tools: [Read, *]"), ["yaml-unsupported"], "repeat the value, or quote it",
     BASE),
    (edited("Use for planning.", "Use for: planning."), ["yaml-syntax"], "quote the whole text",
     BASE),
    (edited("Use for planning.", "@planner plans."), ["yaml-syntax"],
     "quote it", BASE),
    (edited("name: local-dev", 'name: "local-dev'), ["yaml-syntax"], "", BASE),
    (edited("    node: laptop", "     node: laptop"), ["yaml-indent"], "", BASE),
]


@pytest.mark.parametrize("text, slugs, fix, typed", WHOLE)
def test_a_mistake_of_the_whole_is_said_once(text, slugs, fix, typed):
    findings = check(text)
    assert [finding.slug for finding in findings] == slugs
    assert fix in findings[0].fix
    if typed:
        assert len(check(typed)) < len(findings)


LOOKS_RIGHT = [
    # what people paste and never see: the text, the finding, its fix, the text when that is typed
    (edited("models:\n", " models:\n"), "yaml-indent", "begin its line with 0 or 2 spaces", BASE),
    (edited("agents:\n", " agents:\n"), "yaml-indent", "begin its line with 0 or 2 spaces", BASE),
    (edited("nodes:\n", " nodes:\n"), "yaml-indent", "begin its line with 0 or 2 spaces", BASE),
    (edited("  small-coder:\n    node", "   small-coder:\n    node"), "yaml-indent",
     "begin its line with 2 or 4 spaces", BASE),
    (f"```yaml\n{BASE}```\n", "yaml-syntax", "remove the line of a Markdown fence", BASE),
    (f"```\n{BASE}", "yaml-syntax", "remove the line of a Markdown fence", BASE),
    (BASE + "```\n", "yaml-syntax", "remove the line of a Markdown fence", BASE),
    (edited("    prompt: You write code.\n", "    prompt: |\n    You write code.\n"), "yaml-syntax",
     "put more spaces before it than before the key above",
     edited("    prompt: You write code.\n", "    prompt: |\n      You write code.\n")),
    (edited("    description: Use for code.", "    description: >-\n    Use for code."),
     "yaml-syntax", "put more spaces before it than before the key above",
     edited("    description: Use for code.", "    description: >-\n      Use for code.")),
    (edited("node: laptop", "node\uff1a laptop"), "yaml-syntax", "put `: ` after the key", BASE),
    (edited("    timeout: 600", "    timeout\uff1a600"), "yaml-syntax", "put `: ` after the key", BASE),
    (edited("tools: [Read, Grep]", "tools:\n      -Read\n      -Grep"), "bad-value",
     "write `tools: [Read]`, for example", BASE),
    (edited("tools: [Read, Grep]", "tools:\n      \u2013 Read\n      \u2013 Grep"), "bad-value",
     "write `tools: [Read]`, for example", BASE),
    (edited("fallback: [small-coder]", "fallback: -small-coder"), "bad-value",
     'write `fallback: ["-small-coder"]`', BASE),
    (edited("    node: laptop", "    // the laptop\n    node: laptop"), "yaml-syntax",
     "`#` before a comment",
     edited("    node: laptop", "    # the laptop\n    node: laptop")),
    (edited("    node: laptop", "    \u200bnode: laptop"), "yaml-character",
     "write a plain space or nothing instead", BASE),
    (edited("    memory_gb: 64\n", "\u00a0   memory_gb: 64\n"), "yaml-character",
     "write a plain space or nothing instead", BASE),
    (edited("    node: laptop", "<<<<<<< HEAD\n    node: laptop\n=======\n    node: mini\n>>>>>>> b"),
     "yaml-conflict", "choose a side: keep one version", BASE),
    (edited("model: small-coder", "model: &a small-coder"), "yaml-unsupported",
     "or quote it", BASE),
    (edited("name: local-dev", 'name: "local-dev'), "yaml-syntax",
     'write `"` where the text ends', edited("name: local-dev", 'name: "local-dev"')),
    (edited("Use for planning.", "'Don't plan'"), "yaml-syntax", "write `''` for an apostrophe",
     edited("Use for planning.", "'Don''t plan'")),
    (edited("    node: laptop", "     node: laptop"), "yaml-indent",
     "begin its line with 2 or 5 spaces, or line 26 with 4", BASE),
    (edited("context: 65536", "context: 65_536"), "yaml-ambiguous", "write 65536",
     BASE),
    (edited("port: 4000", "port = 4000"), "yaml-syntax", "put `: ` after the key",
     edited("port: 4000", "port: 4000")),
    (edited("context: 65536", "context: 65,536"), "bad-value", "write `context: 65536`", BASE),
]


@pytest.mark.parametrize("text, slug, fix, typed", LOOKS_RIGHT)
def test_what_looks_right_is_said_once_with_what_fixes_it(text, slug, fix, typed):
    findings = check(text)
    assert [finding.slug for finding in findings] == [slug] * bool(slug)
    assert not slug or fix in findings[0].fix
    assert check(typed) == []


def test_nine_of_ten_mistakes_name_what_to_type():
    texts = [edited(right, written) for right, written, *_ in TYPED]
    texts += [text for text, *_ in WHOLE + LOOKS_RIGHT]
    fixes = [findings[0].fix for findings in map(check, texts) if findings]
    typed = [fix for fix in fixes if re.search(
        "(write|add|remove|indent|did you mean|such as|put a space after the colon:) `"
        "|(quote|move|remove) it(:|$)|remove the line|begin its line with|init --force|quotes|the default", fix)]
    assert len(fixes) > 200 and len(typed) >= 0.9 * len(fixes)


def test_the_tables_are_long():
    assert len(TYPED) + len(WHOLE) + len(LOOKS_RIGHT) > 97 + 60
    assert len(TYPED) > 100 and len(WHOLE) > 40


def test_what_is_no_mistake_passes():
    for old, new in [("  laptop:\n    endpoint:", "  models:\n    endpoint:"),
                     ("description: Use for planning.", "description: “Use for planning.”"),
                     ("prompt: You write code.", "prompt: “You write code.”")]:
        text = edited(old, new)
        if "models:\n    endpoint" in new:
            text = text.replace("node: laptop", "node: models")
        assert check(text) == []


def test_a_reference_to_anything_is_shown_short_and_clean():
    for written in ('"\\e[31m"', "x" * 5000, '"a\\nb"'):
        finding, = check(edited("    model: heavy-coder", f"    model: {written}"))
        assert finding.slug == "unknown-model" and len(finding.what) < 140
        assert "\x1b" not in sf.format_finding(finding)


def test_an_empty_file_is_made_anew_under_its_own_name():
    for source, more in (("fleet.yaml", ""), ("fleet.json", " --output fleet.json"), ("<stdin>", ""),
                         ("../a b.yaml", "")):
        _, (finding,) = sf.check_fleet(sf.Document("", source))
        assert finding.fix == "subagent-fleet init --force" + more


def test_what_stands_elsewhere_is_pointed_at_where_it_stands():
    text = "project: {name: a}\nnodes:\n mini:\n  endpoint: http://mini:0\nagents: {}\n" \
        "modles:\n  m: {node: mini, ollama_model: x, litellm_alias: y, context: 1}\n"
    assert [finding.where for finding in check(text)] == [
        "fleet.yaml:4:13", "fleet.yaml:6:1", "fleet.yaml:7:63"]


def test_curly_quotes_hide_nothing_else():
    text = edited("ollama_model: qwen3:8b", "ollama_model: “qwen3:8b”").replace(
        "    model: small-coder", "    model: “qwen3:8b”").replace(
        "http://laptop.local:11434", "“laptop.local:11434”").replace(
        "node: laptop", "node: laptop.local")
    assert [finding.fix for finding in check(text)] == [
        "write `endpoint: http://laptop.local:11434`",
        "did you mean `laptop`?", "write `ollama_model: qwen3:8b`",
        "known models: heavy-coder, small-coder"]


def test_many_wrong_references_are_answered():
    models = "".join(f"  m{i}: {{node: n, ollama_model: 'x:{i}', litellm_alias: a{i}}}\n"
                     for i in range(1000))
    agents = "".join(f"  a{i}: {{model: 'x:{i}', description: d}}\n" for i in range(90))
    findings = check("project: {name: a}\nnodes: {n: {endpoint: http://n:1}}\nmodels:\n" + models
                     + "agents:\n" + agents)
    assert [finding.slug for finding in findings] == ["unknown-model"] * 90
    assert findings[7].fix == "did you mean `m7`?"


# -- right, one step off --

@pytest.mark.parametrize("words, what, fix", [
    ("launch claude", "no fleet.yaml", "`subagent-fleet up` makes one, serves it and starts Claude Code"),
    ("launch opencode", "no fleet.yaml", "subagent-fleet init; or cd to the project that has one"),
    ("completion", "name your shell", 'eval "$(subagent-fleet completion zsh)"'),
    ("add mini 192.168.1.50", "unknown argument `192.168.1.50`", "subagent-fleet add mini=192.168.1.50"),
    ("warmup qwen3:8b", "unknown argument `qwen3:8b`", "subagent-fleet warmup --model qwen3:8b"),
    ("logs --since 1h", "unknown argument `--since`", "subagent-fleet logs -n 100"),
    ("up --dry-run", "unknown argument `--dry-run`", "subagent-fleet generate --diff"),
    ("status --follow", "unknown argument `--follow`", "did you mean `--watch`?"),
    ("tasks --follow", "unknown argument `--follow`", "did you mean `--watch`?"),
    ("validate --config examples/litellm-proxy/fleet.yaml", "the examples are in this program",
     "subagent-fleet init --example list"),
    ("validate --config examples.yaml", "No such file", "check it: `ls -la .`"),
    ("skills install --skill subagent-fleet-bootstrap", "part of the plugin alone",  # "unknown-skill"
     "subagent-fleet plugins install"),
    ("skills install --skill subagent-fleet-bootstrp", "unknown skill", "known skills: ")])
def test_a_likely_mistake_is_led_to_what_was_meant(run_cli, words, what, fix):
    done = run_cli(*words.split(), env={"SHELL": "/bin/zsh"})
    assert done.returncode and what in done.stderr
    assert f"fix: {fix}" in done.stderr or "did you mean" in done.stderr and fix.startswith("known")


def test_a_wrong_port_is_led_to_the_usual_one(run_cli, fake_node, monkeypatch, tmp_path):
    here, other = fake_node({"qwen3:8b": {}}), fake_node({"qwen3:8b": {}})
    env = {"OLLAMA_HOST": f"127.0.0.1:{here.port}"}
    assert run_cli("init", env=env).returncode == 0
    monkeypatch.setattr(sf, "OLLAMA_PORT", other.port)
    shut = free_port()
    done = run_cli("add", f"mini=127.0.0.1:{shut}")
    fix = f"mini=http://127.0.0.1:{other.port}"
    assert done.returncode == 1 and fix in done.stderr and "nothing was written" in done.stderr
    assert done.stderr.endswith("`, the usual port, where Ollama answers\n")
    done = run_cli("init", "--force", "--node", f"mini=127.0.0.1:{shut}", env=env)
    assert done.returncode == 1 and fix in done.stderr
    other.close()
    done = run_cli("add", f"mini=127.0.0.1:{shut}")
    assert done.returncode == 1 and "usual port" not in done.stderr


def test_a_machine_that_is_the_gateway_is_not_called_this_one(run_cli, tmp_path):
    text = ("project: {name: x, gateway: {port: 4321}}\nnodes: {NAME: {endpoint: 'http://127.0.0.1:4321'}}\n"
            "models: {m: {node: NAME, model: 'qwen3:8b', alias: a, context: 32768}}\n"
            "agents: {planner: {model: m, description: d, tools: []}}\n")
    for name, fix in (("mini", "fix: write `endpoint: http://192.168.1.50:11434`, with the address of mini\n"),
                      ("local", "fix: write `endpoint: http://localhost:11434`\n")):
        (tmp_path / "fleet.yaml").write_text(text.replace("NAME", name), encoding="utf-8")
        assert fix in run_cli("validate").stderr


def test_a_model_of_another_server_is_not_pulled_from_ollama(run_cli, tmp_path):
    (tmp_path / "fleet.yaml").write_text("""\
project: {name: x}
nodes: {box: {endpoint: "http://127.0.0.1:8000", provider: vllm}}
models: {m: {node: box, model: "qwen2.5-coder:32b", alias: a, context: 32768}}
agents: {implementer: {model: m, description: d}}
""", encoding="utf-8")
    said = run_cli("validate").stderr
    assert "print tool calls as text" in said and "ollama pull" not in said
    assert "start vLLM with `--served-model-name" in said


def test_a_key_of_another_name_is_told_why(run_cli, tmp_path):
    (tmp_path / "fleet.yaml").write_text("project: {name: x, gateway: {master_key_env: FLEET_KEY}}\n")
    assert "so that no other secret is ever sent as the gateway's key" in run_cli("validate").stderr


def test_a_module_of_the_old_package_is_led_to_this_one(tmp_path):
    if sys.version_info < (3, 10):
        pytest.skip("Python does not tell what was typed")
    done = subprocess.run([sys.executable, "-m", "subagent_fleet.cli", "--help"], cwd=str(ROOT),
                          capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1 and done.stderr.endswith("  fix: python3 -m subagent_fleet --help\n")


def test_worker_prints_no_head_of_an_empty_table(run_cli, monkeypatch):
    monkeypatch.setattr(sf.World, "own_names", lambda world: ("vm", []))
    said = run_cli("worker", "--timeout", "1").stdout
    assert "No address of this machine is in a network" in said and "Kind" not in said
