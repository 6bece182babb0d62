"""The examples of `help json`: real output, each list cut to its fullest entry.

A test that has a command's output at hand calls `compare_example`: the example in
assets/help/json.md must have exactly its keys. SUBAGENT_FLEET_ACCEPT=1 writes the example.
"""
import json
import os
import re

from tools import ROOT

PAGE = ROOT / "src" / "fleet" / "assets" / "help" / "json.md"
WIDTH = 92
TEXT_WIDTH = 48


def compare_example(name, printed):
    """Compare the example of a command with what it printed; `name` is how it is typed."""
    printed = re.sub(r'(/private)?/[\w/.-]*/pytest-of-[^/"]+/pytest-\d+(/popen-gw\d+)?/[^/"]+',
                     "/home/me", printed)
    printed = re.sub(r"-[\w-]*pytest-of-[\w-]+", "-home-me-shop", printed)
    value = cut(json.JSONDecoder().raw_decode(printed[printed.index("{"):])[0])
    page = PAGE.read_text(encoding="utf-8")
    pattern = re.compile(rf"(?s)(^\$ subagent-fleet {re.escape(name)}\n)(.*?)(?=^```$)", re.M)
    assert pattern.search(page), f"{PAGE}: no example of `{name}`"
    if os.environ.get("SUBAGENT_FLEET_ACCEPT"):
        page = pattern.sub(lambda match: match[1] + show(value) + "\n", page)
        fresh = PAGE.with_suffix(f".{os.getpid()}")
        fresh.write_text(page, encoding="utf-8")
        os.replace(fresh, PAGE)  # another worker reads it meanwhile
    shown = json.loads(pattern.search(page)[2])
    accept = "SUBAGENT_FLEET_ACCEPT=1, then python3 src/build.py"
    assert keys_of(shown) == keys_of(value), f"help json: `{name}` prints other keys; {accept}"


def cut(value):
    """Return a value with one entry of each list, and no long text."""
    if isinstance(value, dict):
        return {key: cut(one) for key, one in value.items()}
    if isinstance(value, list):
        return [cut(max(value, key=lambda one: len(json.dumps(one))))] if value else []
    if isinstance(value, str) and len(value) > TEXT_WIDTH:
        return value[:TEXT_WIDTH - 1] + "…"
    return round(value, 3) if isinstance(value, float) else value


def keys_of(value, path=""):
    """Return the path of every key."""
    if isinstance(value, list):
        return {found for one in value for found in keys_of(one, f"{path}[]")}
    if not isinstance(value, dict):
        return set()
    return {f"{path}.{key}" for key in value} | {
        found for key, one in value.items() for found in keys_of(one, f"{path}.{key}")}


def show(value, indent=0, column=0):
    """Return JSON with as much on a line as fits; it begins in that column."""
    flat = json.dumps(value, ensure_ascii=False)
    if len(flat) + max(indent, column) <= WIDTH or not isinstance(value, (dict, list)):
        return flat
    if isinstance(value, list):
        return "[" + show(value[0], indent + 1, column + 1) + "]"
    text = "{"
    for key, one in value.items():
        name = f"{json.dumps(key)}: "
        entry = name + show(one, indent + 1, indent + 1 + len(name))
        last = text.rpartition("\n")[2] if "\n" in text else " " * column + text
        first = entry.partition("\n")[0]
        if text != "{":
            text += ","
            text += " " if len(last) + len(first) + 3 <= WIDTH else "\n" + " " * (indent + 1)
        text += entry
    return text + "}"
