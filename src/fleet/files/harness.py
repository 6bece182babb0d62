"""A row for another program, and how its files are made from it."""
from __future__ import annotations

import json
import re
import string
from typing import TYPE_CHECKING

from fleet.config.address import gateway_url
from fleet.config.names import billions
from fleet.files.target import file_headline
from fleet.plan.environment import plan_tier_alias, plan_windows
from fleet.plan.roles import plan_prompt, plan_tools
from fleet.plan.routes import plan_routes
from fleet.start.constants import STATE_DIRECTORY
from fleet.start.record import Record
from fleet.text.yaml_dump import dump_yaml, quote_yaml

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from fleet.config.sections import Agent, Fleet


class Page(Record):
    """A template for a file: $name is a value, $models has a row for each alias."""

    text: str
    row: str = ""


class Start(Record):
    """The arguments and variables that start a program on the fleet."""

    words: tuple[str, ...]
    environment: dict[str, str]


class Harness(Record):
    """A program that runs on the fleet as Claude Code does."""

    name: str  # as `launch` and --target have it
    title: str
    program: str
    install: str
    files: dict[str, Page]
    words: str  # its arguments, as a template
    environment: dict[str, str]  # its values are templates
    agent_file: str = ""  # path of an agent's file, if each agent has one
    agent: str = ""  # a template for an agent; "": it has no agents
    # {our name of a tool: its name}; None: it cannot limit an agent's tools.
    tools: dict[str, str] | None = None
    taken_names: tuple[str, ...] = ()  # its own agents, which ours must not replace
    prefix: str = ""  # before each alias

    def directory(self) -> str:
        return f"{STATE_DIRECTORY}/{self.name}"

    def render(self, fleet: Fleet, key: str = "") -> dict[str, str]:
        """Return {path: text}, without the key, which the environment holds."""
        agents = self._render_agents(fleet)
        files = {path: self._fill(fleet, path, page, agents.values())
                 for path, page in self.files.items()}
        if self.agent_file:
            files.update((self.agent_file % name, text) for name, text in agents.items())
        return {f"{self.directory()}/{path}": text for path, text in files.items()}

    def _render_agents(self, fleet: Fleet) -> dict[str, str]:
        """Return the text of each agent that does not replace one of the program's own."""
        path = self.agent_file or next(iter(self.files))
        windows = plan_windows(fleet)
        texts = {}
        for name, model in plan_routes(fleet).items():
            if name not in self.taken_names:
                agent = fleet.agents[name]
                texts[name] = _substitute(path, self.agent, {
                    "headline": file_headline(fleet), "agent": name,
                    "description": agent.description, "alias": self.prefix + model.alias,
                    "prompt": plan_prompt(agent), "context": windows[model.alias].context,
                    "tools": self._show_tools(agent)})
        return texts

    def _show_tools(self, agent: Agent) -> str:
        """Return the entry for an agent's tools, in the program's names; "" for all tools.

        A limited tool, such as `Bash(git *)`, is left out, because the limit could not be kept.
        """
        if agent.tools is None:
            return ""
        names = self.tools or {}
        tools = [names[tool] for tool in plan_tools(agent.tools) if tool in names]
        if self.agent_file:
            return dump_yaml({"tools": list(dict.fromkeys(tools))})  # two of ours may be one
        return f',\n      "tools": {json.dumps({"*": False, **dict.fromkeys(tools, True)})}'

    def start(self, fleet: Fleet, directory: str, key: str) -> Start:
        """Return how to start it in its directory."""
        content = next(iter(self.render(fleet).values()))
        values = {"directory": directory, "key": key, "content": content,
                  "url": gateway_url(fleet.gateway), "main": plan_tier_alias(fleet, "main")}
        return Start(
            tuple(string.Template(word).substitute(values) for word in self.words.split()),
            {name: string.Template(value).substitute(values)
             for name, value in self.environment.items()})

    def _fill(self, fleet: Fleet, path: str, page: Page, agents: Iterable[str]) -> str:
        """Return the text of a file, with a row for each alias, the main session's first."""
        windows = plan_windows(fleet)
        url = gateway_url(fleet.gateway)
        main = plan_tier_alias(fleet, "main")
        longest = max(model.timeout for model in fleet.models.values()) * 1000
        values = {
            "headline": file_headline(fleet), "url": url,
            "variable": fleet.gateway.master_key_env,
            "name": fleet.name, "title": f"subagent-fleet: {fleet.name}",
            "main": self.prefix + main,
            "small": self.prefix + plan_tier_alias(fleet, "haiku"),
            "context": windows[main].context,
            "compact": windows[main].context * 8 // 10,  # the rest is for the answer
            "idle_ms": longest * 3, "whole_ms": longest * 5,  # the gateway may ask others first
            "agents": ",\n".join(agents)}

        sizes = {model.alias: billions(model.ollama_model) for model in fleet.models.values()}
        rows = []
        for alias in sorted(windows, key=lambda alias: alias != main):
            # A small model seldom writes a patch that applies.
            edits = "whole" if 0 < sizes[alias] < SMALL_BILLIONS else "diff"
            rows.append(_substitute(path, page.row, {
                **values, "alias": alias, "full": self.prefix + alias, "edits": edits,
                "context": windows[alias].context, "output": windows[alias].output}))
        values["models"] = (",\n" if path.endswith(".json") else "").join(rows)
        return _substitute(path, page.text, values)


SMALL_BILLIONS = 8
# Values that need no quotes, or have them in the template: checked addresses and names.
_RAW = ("headline", "url", "variable", "models", "agents", "tools")


def _substitute(path: str, text: str, values: Mapping[str, Any]) -> str:
    """Fill in a template; each text is quoted as the file's format needs."""
    quote = quote_yaml
    if path.endswith(".json"):
        quote = quote_json
    elif path.endswith(".toml"):
        quote = quote_toml
    words = dict(values)
    for name, value in values.items():
        if isinstance(value, str) and name not in _RAW:
            words[name] = quote(value)
    if path.endswith(".md"):  # a prompt below frontmatter is not quoted
        # qwen-code ends the agent at once if it does not know a `${NAME}`.
        words["prompt"] = re.sub(r"\$\{(\w+)\}", r"$\1", values["prompt"]).rstrip()
    return string.Template(text).substitute(words)


def quote_json(text: str) -> str:
    # opencode fills in variables and files wherever its text names one, in a prompt as well.
    return re.sub(r"\{(?=env:|file:)", r"\\u007b", json.dumps(text))


def quote_toml(text: str) -> str:
    """Return text as a basic string of TOML."""
    quoted = json.dumps(text, ensure_ascii=False)
    return quoted.replace("\x7f", "\\u007f")
