"""Skills and plugins that teach an assistant."""
from __future__ import annotations

import hashlib
import string
from typing import TYPE_CHECKING

from fleet.files.harness import quote_json
from fleet.files.target import Target
from fleet.start.constants import HOME_URL
from fleet.start.gate import VERSION, asset
from fleet.start.record import Record

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


# Where each program looks for skills, in a project as in a home (seen with Claude Code
# 2.1.327, codex 0.169.0, opencode 1.18.33, qwen-code 0.24.4). Those of opencode that lie
# in both are listed once.
PLUGIN_SUMMARY = ("Coding agents on the models of your own machines: set up, "
                  "look after, run tasks.")
SKILL_PLACES = {"claude-code": ".claude/skills", "codex": ".agents/skills",
                "opencode": ".agents/skills", "qwen": ".agents/skills"}
PLUGIN_TARGETS = ("claude-code", "codex")  # see MARKETPLACES
PLUGIN_PLACE = ".agents/plugins/subagent-fleet"  # hidden: both marketplaces point there
BOOTSTRAP_SKILL = "subagent-fleet-bootstrap"
SKILLS_TARGET = Target(
    "skills", r"\.(claude|agents)/skills/subagent-fleet-[a-z]{1,20}/SKILL\.md", 0o644,
    lambda fleet, key: {})
PLUGINS_TARGET = Target(
    "plugins", r"\.claude-plugin/marketplace\.json|\.agents/plugins/marketplace\.json"
    r"|\.agents/plugins/subagent-fleet/(README\.md|\.(claude|codex)-plugin/plugin\.json"
    r"|skills/subagent-fleet-[a-z]{1,20}/SKILL\.md)", 0o644,
    lambda fleet, key: {})
TAUGHT = (SKILLS_TARGET, PLUGINS_TARGET)


class Skill(Record):
    """A page that teaches an assistant: when to use it, what to type, what never to do."""

    name: str
    summary: str  # on which an assistant decides to read the page
    page: str

    @property
    def text(self) -> str:
        """The file, as every program reads it."""
        return f"---\nname: {self.name}\ndescription: {self.summary}\n---\n{self.page}"


def installed_skills() -> dict[str, Skill]:
    """Return the skills that are put beside a project: not the one that fetches this file."""
    return {name: skill for name, skill in SKILLS.items() if name != BOOTSTRAP_SKILL}


def render_skills(targets: Iterable[str], names: Iterable[str]) -> dict[str, bytes]:
    """Return {path: bytes} of skills, where these programs look."""
    texts = {name: SKILLS[name].text.encode("utf-8") for name in names}
    files = {}
    for place in dict.fromkeys(SKILL_PLACES[target] for target in targets):
        for name, text in texts.items():
            files[f"{place}/{name}/SKILL.md"] = text
    return files


def render_plugins(targets: Collection[str], source: bytes) -> dict[str, bytes]:
    """Return {path: bytes} of a marketplace with one plugin; `source` is this file's text.

    The plugin's first skill fetches this version, and knows its checksum.
    """
    texts = {name: skill.text for name, skill in SKILLS.items()}
    bootstrap = texts[BOOTSTRAP_SKILL].replace("@VERSION@", VERSION)
    texts[BOOTSTRAP_SKILL] = bootstrap.replace("@SHA256@", hashlib.sha256(source).hexdigest())
    files = {f"skills/{name}/SKILL.md": text for name, text in texts.items()}
    files["README.md"] = PLUGIN_README

    words = {"version": VERSION, "home": HOME_URL, "place": f"./{PLUGIN_PLACE}",
             "summary": quote_json(PLUGIN_SUMMARY)}
    bundle = {}
    for target in targets:
        program = target.partition("-")[0]  # claude, of claude-code
        files[f".{program}-plugin/plugin.json"] = string.Template(_PLUGIN).substitute(words)
        path, text = MARKETPLACES[target]
        bundle[path] = string.Template(text).substitute(words)
    bundle.update((f"{PLUGIN_PLACE}/{path}", text) for path, text in files.items())
    return {path: text.encode("utf-8") for path, text in bundle.items()}


_PLUGIN = """\
{
  "name": "subagent-fleet",
  "version": "$version",
  "description": $summary,
  "author": {
    "name": "subagent-fleet",
    "url": "$home"
  },
  "homepage": "$home",
  "license": "MIT"
}
"""
MARKETPLACES = {
    "claude-code": (".claude-plugin/marketplace.json", """\
{
  "name": "subagent-fleet",
  "description": $summary,
  "owner": {
    "name": "subagent-fleet"
  },
  "plugins": [
    {
      "name": "subagent-fleet",
      "description": $summary,
      "source": "$place"
    }
  ]
}
"""),
    "codex": (".agents/plugins/marketplace.json", """\
{
  "name": "subagent-fleet",
  "interface": {
    "displayName": "subagent-fleet"
  },
  "plugins": [
    {
      "name": "subagent-fleet",
      "description": $summary,
      "source": {
        "source": "local",
        "path": "$place"
      },
      "policy": {
        "installation": "AVAILABLE",
        "authentication": "ON_INSTALL"
      },
      "category": "Productivity"
    }
  ]
}
""")}

SETUP_PAGE = asset("skills/setup.md")
OPERATIONS_PAGE = asset("skills/operations.md")
RUNS_PAGE = asset("skills/runs.md")
BOOTSTRAP_PAGE = asset("skills/bootstrap.md")
PLUGIN_README = asset("skills/plugin.md")

SKILLS = {skill.name: skill for skill in (
    Skill(
        "subagent-fleet-setup",
        "Use when the person wants Claude Code or other coding agents to run on models of "
        "their own machines (Ollama, llama.cpp, LM Studio, vLLM), wants to add a machine "
        "or a model to such a fleet, or asks for a fleet.yaml. From nothing to a working "
        "fleet.",
        SETUP_PAGE),
    Skill(
        "subagent-fleet-operations",
        "Use when a fleet of the person's own machines (a fleet.yaml, subagent-fleet) is "
        "slow, fails, waits, or answers strangely, or when they ask which machine or "
        "model served an agent, whether something left the house, or how fast their "
        "models are.",
        OPERATIONS_PAGE),
    Skill(
        "subagent-fleet-runs",
        "Use when the person wants several coding tasks worked on in parallel or "
        "unattended on their own machines with subagent-fleet, mentions tasks.yaml, or "
        "asks about a running, asking, parked or failed task.",
        RUNS_PAGE),
    Skill(
        "subagent-fleet-bootstrap",
        "Use when the person wants subagent-fleet (coding agents on their own machines) "
        "and its command is not installed yet. Fetches the one file, checks it, and "
        "installs the skills that know the rest.",
        BOOTSTRAP_PAGE))}
