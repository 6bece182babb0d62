"""The keys of each section, where they belong, and the JSON Schema."""
from __future__ import annotations

from typing import TYPE_CHECKING

from fleet.config.sections import Agent, FleetFile, Gateway, Model, Node, Project, Tiers
from fleet.start.record import REQUIRED, Record, fields

if TYPE_CHECKING:
    from typing import Any

    from fleet.config.rules import Rule
    from fleet.start.record import Field


# Where the keys of each kind of section belong.
PLACES: dict[type[Record], str] = {
    FleetFile: "column 1", Project: "`project:`", Gateway: "`gateway:` in `project:`",
    Tiers: "`claude:` in `project:`", Node: "a node, under `nodes:`",
    Model: "a model, under `models:`", Agent: "an agent, under `agents:`"}


def keys_of(section: type[Record]) -> dict[str, Field]:
    """Return what a person may write in a section, by the keys of the file."""
    return {field.key: field for field in fields(section).values() if field.words}


def section_of(key: Field) -> type[Record]:
    """Return the record of a key without a rule: of its section, or of each one below it."""
    return Record.kinds[key.kind.removeprefix("dict[str, ").rstrip("]")]


def name_rule(section: type[Record]) -> Rule | None:
    """Return the rule of a section's name if that is the key above it; else there is none."""
    name = fields(section).get("name")
    return name.rule if name and not name.words else None


# -- Schema --


def render_schema() -> dict[str, Any]:
    """Return the JSON Schema of the fleet file, from the records that check it."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "subagent-fleet",
        **section_schema(FleetFile)}


def section_schema(section: type[Record]) -> dict[str, Any]:
    """Return the JSON Schema of a section, made of its keys."""
    keys = keys_of(section).values()
    properties = {}
    choices = []  # one of two spellings, never both
    for key in keys:
        schema: dict[str, Any]
        if key.rule:
            schema = dict(key.rule.schema)
            if key.default not in (REQUIRED, None):
                schema["default"] = key.default
        else:
            below = section_of(key)
            schema = section_schema(below)
            names = name_rule(below)
            if names:
                schema = {"type": "object", "propertyNames": names.schema,
                          "additionalProperties": schema,
                          "minProperties": int(below is not Agent)}
        properties[key.key] = {"description": key.words, **schema}
        if key.also:
            properties[key.also] = {"description": f"the same as {key.key}", **schema}
            choices.append({"oneOf": [{"required": [key.key]}, {"required": [key.also]}]})

    schema = {"type": "object", "additionalProperties": False, "properties": properties,
              "required": [key.key for key in keys
                           if key.default is REQUIRED and not key.also]}
    if choices:
        schema["allOf"] = choices
    return schema
