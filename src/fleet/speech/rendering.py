"""A request as chat messages, tools and schemas."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fleet.speech.talk import Parts, Refusal, Result, join_texts
from fleet.start.record import replace
from fleet.text.json import KeptList, render_json

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from fleet.speech.talk import Call, Talk, Tool, Turn


# The keys of a tool's schema that Ollama and its engine accept; another one can make them refuse
# the whole request.
SCHEMA_TYPES: dict[str, Any] = {
    "type": (str, list), "description": str, "enum": list, "required": list, "anyOf": list,
    "allOf": list, "properties": dict, "$defs": dict, "$ref": str, "items": object,
    "const": object, "default": object, "format": str, "additionalProperties": bool}
SCHEMA_SYNONYMS = {"oneOf": "anyOf", "definitions": "$defs"}
TOOLS_KEPT, TOOLS_KEPT_BYTES = 8, 1024 * 1024
JSON_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")


def state_tool_choice(talk: Talk) -> Talk:
    """Return a talk with `tool_choice` as words in its last turn."""
    # Ollama ignores tool_choice: showing fewer tools and a sentence in the last turn
    # is all there is.
    wishes = {"any": "Answer by calling one of your tools.",
              "tool": f"Answer by calling the tool `{talk.chosen_tool}`."}
    wish = wishes.get(talk.choice)
    if not wish or not talk.turns:
        return talk
    *turns, last = talk.turns
    return replace(talk, turns=(*turns, replace(last, reminders=(*last.reminders, wish))))


def chat_messages(talk: Talk, thinking: bool) -> list[dict[str, Any]]:
    """Return chat messages in which every call has a unique id and one result."""
    messages = []
    ids = CallIds("call")
    calls: list[tuple[str, Call]] = []  # of the previous turn, each with its id
    for turn in talk.turns:
        if turn.role == "user":
            messages += _user_messages(turn, calls)
            calls = []
            continue
        calls = [(ids.take(call.id), call) for call in turn.calls]
        messages.append({
            "role": "assistant", "content": join_texts(turn.texts),
            "thinking": join_texts(turn.thoughts) if thinking else "",
            "tool_calls": [{"id": own_id, "function": {
                "name": call.name, "arguments": call.arguments}} for own_id, call in calls]})

    kept = [{"role": "system", "content": join_texts(talk.system)}] if talk.system else []
    said = len(kept)
    for message in messages:
        message = {name: value for name, value in message.items()
                   if value or name == "content"}
        if message["content"] or len(message) > 2:
            kept.append(message)
    if len(kept) == said:  # for Ollama that means "load the model", and it answers nothing
        raise Refusal(400, "messages: at least one message with content is required")
    return kept


class CallIds:
    """Gives each call a unique id, in linear time."""

    # Some templates number calls from zero in every answer; the client needs unique ids.
    def __init__(self, prefix: str, taken: Iterable[str] = ()) -> None:
        self._prefix, self._taken, self._count = prefix, set(taken), 0

    def take(self, wanted: str) -> str:
        own_id = wanted
        while not own_id or own_id in self._taken:
            self._count += 1
            own_id = f"{self._prefix}_{self._count}"
        self._taken.add(own_id)
        return own_id


def _user_messages(turn: Turn, calls: list[tuple[str, Call]]) -> list[dict[str, Any]]:
    """Return the results of the calls before this turn, then the user's text."""
    waiting = Parts()  # by the id of their call; the first one is last
    for result in reversed(turn.results):
        waiting[result.call_id].append(result)

    messages: list[dict[str, Any]] = []
    for own_id, call in calls:
        result = Result(call.id, "(no result)")
        results = waiting[call.id] or waiting[""]  # its own result, or one without an id
        if results:
            result = results.pop()
        messages.append({"role": "tool", "tool_call_id": own_id, "tool_name": call.name,
                         "content": result.text, "images": list(result.images)})

    # Results of calls that are gone are sent as text: none is dropped.
    words: list[str] = []
    images: list[str] = []
    for results in reversed(waiting.values()):
        for result in reversed(results):
            words.append(f"[result of an earlier call]\n{result.text}")
            images += result.images
    words += turn.texts
    images += turn.images
    reminders = [f"<system-reminder>\n{text}\n</system-reminder>" for text in turn.reminders]

    if messages and not words and not images:
        # A message after the results would look like the user's next question.
        messages[-1]["content"] = join_texts([messages[-1]["content"], *reminders])
    else:
        content = join_texts([*reminders, *words])
        messages.append({"role": "user", "content": content, "images": images})
    return messages


# The latest rendered tools: a client sends the same ones every time, and comparing takes a tenth
# of the time. The list is replaced, never changed, so any thread may read it.
_RENDERED_TOOLS: dict[bool, list[tuple[tuple[Tool, ...], KeptList]]] = {}  # by `fixes`


def render_tools(talk: Talk, *, fixes: bool) -> KeptList:
    """Return tools as chat servers have them; `fixes`: with schemas as llama.cpp takes them.

    A tool that must be called is shown alone: not every server accepts its name as a choice.
    """
    tools = talk.tools
    if talk.choice == "tool":
        tools = tuple(tool for tool in tools if tool.name == talk.chosen_tool)
    kept = _RENDERED_TOOLS.get(fixes, [])
    for known, rendered in kept:
        if known == tools:
            return rendered

    rendered = KeptList()
    for tool in tools:
        schema: dict[str, Any] = tool.schema if isinstance(tool.schema, dict) else {}
        parameters = {"properties": {}, **schema, "type": "object"}
        if fixes:
            # A single tool whose schema is not an object makes Ollama refuse the
            # whole request.
            root = {SCHEMA_SYNONYMS.get(word, word): value for word, value in schema.items()}
            root["type"] = "object"
            parameters = {"properties": {}, **_fix_schema(root, root)}
        rendered.append({"type": "function", "function": {
            "name": tool.name, "description": tool.description, "parameters": parameters}})
    rendered.json = render_json(rendered)
    if len(rendered.json) <= TOOLS_KEPT_BYTES:
        _RENDERED_TOOLS[fixes] = [(tools, rendered), *kept[:TOOLS_KEPT - 1]]
    return rendered


def _fix_schema(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without anything that could make a server refuse the request."""
    words = {}
    # One function: with a second one, only half as many levels could be followed.
    if not isinstance(schema, dict):
        schema = {}
    for name, value in schema.items():
        word = SCHEMA_SYNONYMS.get(name, name)
        if not isinstance(value, SCHEMA_TYPES.get(word, ())):
            continue
        if word == "type":
            value = _known_types(value)
        elif word == "required":
            value = [key for key in value if isinstance(key, str)]
        elif word == "$ref":
            value = _known_reference(value, root)
        elif word == "items":
            value = _fix_schema(value, root)
        elif word in ("anyOf", "allOf"):
            value = [_fix_schema(part, root) for part in value]
        elif word in ("properties", "$defs"):
            # The engine would follow a property named `$ref`.
            value = {key: _fix_schema(part, root) for key, part in value.items()
                     if key != "$ref"}
        words[word] = value

    words = {word: value for word, value in words.items() if value not in ([], "")}
    return words or {"description": "anything"}  # an empty one would mean an object


def _known_types(types: str | list[Any]) -> str | list[str]:
    names = [types] if isinstance(types, str) else types
    known = [name for name in names if name in JSON_TYPES]
    return known[0] if len(known) == 1 else known


def _known_reference(reference: str, root: dict[str, Any]) -> str:
    """Return a reference to an existing definition, else ""."""
    reference = reference.replace("#/definitions/", "#/$defs/")
    match = re.fullmatch(r"#/(\$defs|properties)/([^/]+)", reference)
    if not match:
        return ""
    place = root.get(match[1])
    return reference if isinstance(place, dict) and match[2] in place else ""
