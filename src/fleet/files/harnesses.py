"""The four other programs, as rows."""
from __future__ import annotations

from fleet.files.harness import Harness, Page
from fleet.files.target import Target

# Each gets one directory of ours below .subagent-fleet, and a row of HARNESSES: the text of
# its files, a row of it for each alias, and with which words and variables `launch` leads
# it there. Nothing of a person's own files is read for the fleet's sake or written, and
# what the project says does not beat it. The key comes by the environment. Facts: opencode
# 1.18.33, codex 0.169.0, aider 0.86.2, qwen-code 0.24.4.

# Without a limit opencode would never compact.
_OPENCODE = Page("""\
{
  "autoupdate": false,
  "share": "disabled",
  "enabled_providers": ["fleet"],
  "provider": {"fleet": {
    "npm": "@ai-sdk/anthropic",
    "name": $title,
    "options": {"baseURL": "$url/v1", "apiKey": "{env:$variable}"},
    "models": {
$models
    }
  }},
  "model": $main,
  "small_model": $small,
  "agent": {
$agents
  }
}
""", '      $alias: {"limit": {"context": $context, "output": $output}}')
_OPENCODE_AGENT = """\
    $agent: {"mode": "subagent",
      "description": $description,
      "model": $alias,
      "prompt": $prompt$tools}"""
_CODEX = Page("""\
${headline}model = $main
model_provider = "fleet"
model_context_window = $context
model_auto_compact_token_limit = $compact
model_catalog_json = "models.json"
web_search = "disabled"
check_for_update_on_startup = false

[analytics]
enabled = false

[feedback]
enabled = false

# Apps and plugins ask addresses of their own; goals are three tools more.
[features]
apps = false
plugins = false
goals = false

[model_providers.fleet]
name = $name
base_url = "$url/v1"
env_key = "$variable"
wire_api = "responses"
request_max_retries = 4
stream_max_retries = 4
stream_idle_timeout_ms = $idle_ms
""")
# Without this list codex takes each for a model of 272,000 tokens. With a word for
# apply_patch, a model must write a grammar that local ones do not know.
_CODEX_MODELS = Page('{"models": [\n$models\n]}\n', """\
  {"slug": $alias, "display_name": $alias, "description": "a model of the fleet",
   "supported_reasoning_levels": [], "shell_type": "shell_command", "visibility": "list",
   "supported_in_api": true, "priority": 1, "availability_nux": null, "upgrade": null,
   "support_verbosity": false, "default_verbosity": null, "apply_patch_tool_type": null,
   "truncation_policy": {"mode": "bytes", "limit": 10000},
   "context_window": $context, "max_context_window": $context,
   "experimental_supported_tools": [], "supports_reasoning_summary_parameter": false,
   "base_instructions": "You are a coding agent. You work in the directory that you were started \
in, by the tools that you have, until the task is done."}""")
_CODEX_ROLE = """\
${headline}name = $agent
description = $description
model = $alias
developer_instructions = $prompt
model_context_window = $context
"""
_AIDER = Page("""\
${headline}model: $main
weak-model: $small
openai-api-base: "$url/v1"
check-update: false
analytics: false
show-model-warnings: false
show-release-notes: false
gitignore: false
""")
_AIDER_SETTINGS = Page("${headline}$models", """\
- name: $full
  edit_format: $edits
  use_repo_map: true
  use_temperature: false
  extra_params:
    max_tokens: $output
""")
_AIDER_METADATA = Page("{\n$models\n}\n", """\
  $full: {"max_input_tokens": $context, "max_output_tokens": $output, "max_tokens": $output,
    "input_cost_per_token": 0, "output_cost_per_token": 0, "litellm_provider": "openai",
    "mode": "chat"}""")
_QWEN = Page("""\
{
  "security": {"auth": {"selectedType": "anthropic"}},
  "model": {"name": $main},
  "general": {"disableAutoUpdate": true},
  "privacy": {"usageStatisticsEnabled": false},
  "telemetry": {"enabled": false},
  "modelProviders": {"anthropic": [
$models
  ]}
}
""", """\
    {"id": $alias, "name": $alias, "baseUrl": "$url", "envKey": "$variable",
     "generationConfig": {"contextWindowSize": $context, "timeout": $whole_ms, "maxRetries": 1,
       "samplingParams": {"max_tokens": $output}}}""")
_QWEN_AGENT = """\
---
${headline}name: $agent
description: $description
model: $alias
$tools---

$prompt
"""
HARNESS_ROWS = (
    # A project's opencode.json beats a file that is named to it, but not this variable.
    Harness("opencode", "opencode", "opencode", "npm install -g opencode-ai",
            {"opencode.json": _OPENCODE}, "",
            {"OPENCODE_CONFIG_CONTENT": "$content", "OPENCODE_DISABLE_MODELS_FETCH": "1",
             "OPENCODE_DISABLE_AUTOUPDATE": "1"},
            agent=_OPENCODE_AGENT,
            tools={"Read": "read", "Grep": "grep", "Glob": "glob", "Edit": "edit",
                   "Write": "write", "Bash": "bash", "WebFetch": "webfetch", "Agent": "task",
                   "Task": "task", "Skill": "skill"},
            taken_names=("build", "plan", "general", "explore", "title", "compaction",
                         "summary"),
            prefix="fleet/"),
    Harness("codex", "codex", "codex", "npm install -g @openai/codex",
            {"config.toml": _CODEX, "models.json": _CODEX_MODELS}, "",
            {"CODEX_HOME": "$directory"}, agent_file="agents/%s.toml", agent=_CODEX_ROLE),
    # As flags and under its own prefix, as a project's .env beats every other variable.
    Harness("aider", "aider", "aider", "pip install aider-chat",
            {"aider.conf.yml": _AIDER, "model.settings.yml": _AIDER_SETTINGS,
             "model.metadata.json": _AIDER_METADATA},
            "--config $directory/aider.conf.yml "
            "--model-settings-file $directory/model.settings.yml "
            "--model-metadata-file $directory/model.metadata.json --openai-api-base $url/v1",
            {"AIDER_OPENAI_API_KEY": "$key", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            prefix="openai/"),
    # As a system's settings they beat those of a project.
    Harness(
        "qwen", "qwen-code", "qwen", "npm install -g @qwen-code/qwen-code (Node 22)",
        {"settings.json": _QWEN}, "",
        {"QWEN_HOME": "$directory",
         "QWEN_CODE_SYSTEM_SETTINGS_PATH": "$directory/settings.json",
         "QWEN_STREAM_MAX_LIFETIME_MS": "86400000"},
        agent_file="agents/%s.md", agent=_QWEN_AGENT,
        tools={"Read": "read_file", "Grep": "grep_search", "Glob": "glob", "Edit": "edit",
               "Write": "write_file", "Bash": "run_shell_command", "WebFetch": "web_fetch",
               "Skill": "skill"}))
HARNESSES: dict[str, Harness] = {harness.name: harness for harness in HARNESS_ROWS}
# What is said of a program without a row.
FORMER_PROGRAMS = {"pi", "cn"}  # they were rows once
OTHER_PROGRAM = "any other program takes a base URL and a key: `subagent-fleet help harnesses`"
# What earlier versions wrote: `clean` and `doctor --fix` remove it.
FORMER_TARGET = Target(
    "former", r"[.]subagent-fleet/(?:pi/models[.]json|cn/config[.]yaml)", 0o644,
    lambda fleet, key: {})


def harness_target(harness: Harness) -> Target:
    """Return the row of a program's files."""
    paths = [*harness.files]
    if harness.agent_file:
        paths.append(harness.agent_file % "[a-z0-9][a-z0-9_-]{0,63}")
    pattern = f"{harness.directory()}/(?:{'|'.join(paths)})"
    return Target(harness.name, pattern.replace(".", "[.]"), 0o644, harness.render)
