"""The YAML subset: values to text."""
from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from fleet.start.errors import FleetError
from fleet.text.phrases import show_value
from fleet.text.yaml import BARE_WORD, DEPTH_LIMIT, KEY_LIMIT, visible
from fleet.text.yaml_scalars import YAML_WORDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


def quote_yaml(text: str) -> str:
    """Return `text` as a scalar on one line, unquoted if every YAML reader sees the same text."""
    is_word = text.lower() in (*YAML_WORDS, "y", "n")
    if BARE_WORD.fullmatch(text) and not is_word and "---" not in text:
        return text
    if re.search("[\ud800-\udfff]", text):
        raise FleetError("yaml-dump",
                         f"a lone surrogate, which no file can hold: {text[:60]!a}")
    escaped = visible(re.sub(r'(["\\])', r"\\\1", text))
    # Claude Code ends an agent's frontmatter at any `---`, even a quoted one (2.1.197,
    # 2.1.326).
    return '"' + escaped.replace("---", "-\\x2d\\x2d") + '"'


def dump_yaml(value: object) -> str:
    """Return block style text that parse_yaml and PyYAML's safe_load read as `value`."""
    return "".join(f"{line}\n" for line in _dump_lines(value, 0))


def _dump_lines(value: Any, depth: int) -> Iterator[str]:
    """Yield the lines of a value at a nesting `depth`."""
    if not isinstance(value, (dict, list, tuple)):
        yield _dump_scalar(value)
        return
    if depth == DEPTH_LIMIT:
        raise FleetError("yaml-dump", f"the value is more than {DEPTH_LIMIT} levels deep")
    if not value:
        yield "{}" if isinstance(value, dict) else "[]"
    elif isinstance(value, dict):
        for key, child in value.items():
            label = _dump_scalar(key) + ":"
            if len(label) > KEY_LIMIT + 1:
                raise FleetError("yaml-dump", f"a key has more than {KEY_LIMIT:,} characters")
            lines = _dump_lines(child, depth + 1)
            if isinstance(child, (dict, list, tuple)) and child:
                yield label
                yield from (f"  {line}" for line in lines)
            else:
                yield f"{label} {next(lines)}"
    else:
        for child in value:
            margin = "- "
            for line in _dump_lines(child, depth + 1):
                yield margin + line
                margin = "  "


def _dump_scalar(value: object) -> str:
    if isinstance(value, str):
        return quote_yaml(value)
    if isinstance(value, float) and value == value:
        text = float.__repr__(value).replace("inf", ".inf")
        return text if "." in text else text.replace("e", ".0e")
    is_short = isinstance(value, int) and value.bit_length() < 3000  # the reader's limit
    if value is None or is_short:
        return json.dumps(value)
    kind = type(value).__name__
    raise FleetError("yaml-dump", f"YAML cannot hold {show_value(value)}, a {kind}")
