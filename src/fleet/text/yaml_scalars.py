"""Plain scalars of YAML, as values."""
from __future__ import annotations

from fleet.start.gate import LatePattern

YAML_CLASH = object()  # the meaning of a word that programs may read differently
YAML_WORDS: dict[str, object] = {"": None, "~": None, "=": YAML_CLASH, "<<": YAML_CLASH}
YAML_WORDS.update(dict.fromkeys((".nan", ".NaN", ".NAN"), YAML_CLASH))
for _spell in (str.lower, str.title, str.upper):
    YAML_WORDS.update({
        _spell("null"): None, _spell("true"): True, _spell("false"): False,
        _spell(".inf"): float("inf"), _spell("+.inf"): float("inf"),
        _spell("-.inf"): float("-inf")})
    YAML_WORDS.update({_spell(word): YAML_CLASH for word in ("yes", "no", "on", "off")})
# The first group is an integer of every YAML, the second a float. Then comes what is a number
# or a date in 1.1 or in 1.2 only. Python 3.11 refuses integers of more than 4,300 digits.
_NUMBER = LatePattern(
    r"([-+]?(?:0|[1-9][0-9]{0,999}))"
    r"|([-+]?[0-9]+\.[0-9]*(?:[eE][-+][0-9]+)?|\.[0-9]+(?:[eE][-+][0-9]+)?)"
    r"|[-+]?0b[01_]+|[-+]?0x[0-9a-fA-F_]+|0o[0-7]+"
    r"|[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9][0-9_]*(?::[0-5]?[0-9]){1,99}(?:\.[0-9_]*)?|[-+]?[0-9][0-9_:.]{200,}"
    r"|[0-9]{4}-[0-9][0-9]?-[0-9][0-9]?(?:(?:[Tt]|[ \t]+)[0-9][0-9]?:[0-9][0-9]:[0-9][0-9]"
    r"(?:\.[0-9]*)?(?:[ \t]*(?:Z|[-+][0-9][0-9]?(?::[0-9][0-9])?))?)?")


def resolve_scalar(text: str) -> object:
    """Return the value of plain text: text, a number, a word's value, or _CLASH."""
    if text in YAML_WORDS:
        return YAML_WORDS[text]
    if len(text) < 20 and text.isascii() and text.isdecimal() and text[0] != "0":
        return int(text)  # most numbers are: the pattern takes long to compile
    match = _NUMBER.fullmatch(text) if text[0] in "+-.0123456789" else None
    if not match:
        return text
    if match[1]:
        return int(text)
    if match[2] and abs(float(text)) < float("inf"):
        return float(text)
    return YAML_CLASH
