"""The keys of each section, other words for them, and the JSON Schema."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.config.rules import RULES
from fleet.config.sections import Agent, FleetFile, Gateway, Model, Node, Project, Tiers
from fleet.config.task_file import TaskFile, TaskSpec
from fleet.start.record import REQUIRED, fields, replace

if TYPE_CHECKING:
    from typing import Any

    from fleet.config.sections import FileKey


def keys_of(record: Any) -> dict[str, FileKey]:
    keys = {}
    for attribute, field in fields(record).items():
        if field.note:  # a `name` has none: it is above the section
            name = field.note.name or attribute
            keys[name] = replace(field.note, name=name, attribute=attribute)
    return keys


# Each section by its kind; of those that have names, many stand under one key of the file.
SECTIONS: dict[str, Any] = {
    "": FleetFile, "project": Project, "gateway": Gateway, "claude": Tiers,
    "node": Node, "model": Model, "agent": Agent,
    "task file": TaskFile, "task": TaskSpec,
    "defaults": lambda **values: TaskSpec("", **values)}
NAME_RULES = {"node": "name", "model": "name", "agent": "agent name", "task": "task name"}
FILE_KEYS = {kind: keys_of(record) for kind, record in SECTIONS.items() if kind != "defaults"}
FILE_KEYS["defaults"] = {
    name: one for name, one in keys_of(TaskSpec).items()
    if name not in ("prompt", "prompt_file", "after")}
# What people write for the key of an attribute, coming from other programs; each only where
# that key is absent.
KEY_WORDS = {
    "nodes": "machines hosts servers workers",
    "agents": "subagents roles",
    "name": "title label",
    "provider": "engine type",
    "host": "address bind listen",
    "master_key_env": "key master_key api_key api_key_env key_env",
    "endpoint": "url uri api_base base_url host hostname address ip server ollama_host",
    "tags": "labels",
    "mac": "mac_address hardware_address ether lladdr wake_on_lan wol",
    "memory_gb": "memory ram vram ram_gb vram_gb",
    "node": "machine host server runs_on",
    "ollama_model": "model_name ollama name",
    "alias": "model_alias",
    "api_key_env": "api_key key key_env token",
    "context": "num_ctx ctx context_length context_window context_size max_context",
    "max_parallel": "parallel num_parallel concurrency",
    "thinking": "think reasoning",
    "max_output": "max_tokens num_predict output",
    "fallback": "backup",
    "model": "llm uses runs_on",
    "description": "desc when use_for about",
    "tools": "allowed_tools",
    "prompt": "system system_prompt instructions",
    # of a task file
    "after": "depends_on depends needs requires deps dependencies blocked_by",
    "check": "test verify gate",
    "touch": "scope paths files",
    "deadline": "timeout time_limit",
    "setup": "install prepare",
    "times": "count fanout copies",
    "tries": "retries attempts",
}
# Where the keys of each kind of section stand.
PLACES = {
    "": "column 1", "project": "`project:`", "gateway": "`gateway:` in `project:`",
    "claude": "`claude:` in `project:`", "node": "a node, under `nodes:`",
    "model": "a model, under `models:`", "agent": "an agent, under `agents:`"}


# -- Schema --


def render_schema() -> dict[str, Any]:
    """Return the JSON Schema of the fleet file, from the records that check it."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "subagent-fleet",
        **section_schema("")}


def section_schema(kind: str) -> dict[str, Any]:
    keys = FILE_KEYS[kind].values()
    properties = {}
    choices = []  # one of two spellings, never both
    for key in keys:
        if key.rule in NAME_RULES:
            rule = {"type": "object", "propertyNames": RULES[NAME_RULES[key.rule]].schema,
                    "additionalProperties": section_schema(key.rule),
                    "minProperties": int(key.rule != "agent")}
        elif key.rule in SECTIONS:
            rule = section_schema(key.rule)
        else:
            rule = dict(RULES[key.rule].schema)
            if key.default not in (REQUIRED, None):
                rule["default"] = key.default
        properties[key.name] = {"description": key.words, **rule}
        if key.also:
            properties[key.also] = {"description": f"the same as {key.name}", **rule}
            choices.append({"oneOf": [{"required": [key.name]}, {"required": [key.also]}]})

    schema = {"type": "object", "additionalProperties": False, "properties": properties,
              "required": [key.name for key in keys
                           if key.default is REQUIRED and not key.also]}
    if choices:
        schema["allOf"] = choices
    return schema
