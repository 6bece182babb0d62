"""JSON from and to other programs, with bounds; the digest of a text."""
from __future__ import annotations

import functools
import hashlib
import json
from typing import TYPE_CHECKING

from fleet.start.gate import late_decorator
from fleet.start.record import read

if TYPE_CHECKING:
    from typing import Any, TypeVar

    from fleet.start.record import Record
    _Record = TypeVar("_Record", bound="Record")


NUMBER_LIMIT_DIGITS = 100  # int() of millions of digits takes minutes (Python before 3.10.7)


def parse_json(text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text from outside; raise ValueError if it is invalid.

    NaN, infinities and endless numbers are invalid, too: other programs would not accept them.
    """
    try:
        if not isinstance(text, str):
            text = text.decode("utf-8")
        try:
            value, end = _DECODER.scan_once(text, 0)
        except StopIteration:  # it begins with blanks, or is invalid
            return _DECODER.decode(text)
        return value if end == len(text) else _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


class _LateDecoder:
    """A JSONDecoder, made at its first use; it is called once for each token of an answer."""

    def __getattr__(self, name: str) -> Any:
        decoder: Any = json.JSONDecoder(parse_int=_bounded_int, parse_float=_finite_float,
                                        parse_constant=_finite_float)
        self.__dict__.update(decode=decoder.decode, scan_once=decoder.scan_once)
        return self.__dict__[name]


_DECODER = _LateDecoder()


def _bounded_int(digits: str) -> int:
    if len(digits) > NUMBER_LIMIT_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _finite_float(digits: str) -> float:
    number = float(digits)
    if number - number:  # NaN of NaN and infinities
        raise ValueError(f"a number that no program can hold: {digits[:20]}")
    return number


def parse_object(text: str | bytes | bytearray) -> dict[str, Any] | None:
    """Return the JSON object in a text, or None."""
    try:
        value = parse_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def read_page(record: type[_Record], content: bytes | bytearray | None,
              schema: str) -> _Record | None:
    """Return the record in a JSON text that has this schema (`bench/1`), or None."""
    page = parse_object(content or b"")
    if not page or page.get("schema") != f"subagent-fleet/{schema}":
        return None
    return read(record, page)


def count_marks(body: bytes | bytearray) -> int:
    """Return an upper bound of the values in a JSON text; 8 MiB of `[],` take 180 MB."""
    return sum(map(body.count, (b"[", b"{", b":", b",")))


def render_json(value: object) -> bytes:
    """Return compact ASCII JSON, where lone surrogates survive, or raise a ValueError."""
    try:
        return _json_encoder().encode(value).encode("ascii")
    except RecursionError:
        raise ValueError("nested too deeply") from None


class KeptList(list):  # type: ignore[type-arg]
    """A list that is in many requests, with its JSON."""

    json = b""


def render_request(request: dict[str, Any]) -> bytes:
    """Return an object as `render_json` does; a KeptList in it is not rendered again."""
    return b"{%b}" % b",".join(
        b"%b:%b" % (render_json(name),
                    value.json if isinstance(value, KeptList) else render_json(value))
        for name, value in request.items())


@late_decorator(lambda: functools.lru_cache(1))
def _json_encoder() -> json.JSONEncoder:
    return json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False,
                            default=vars)  # of Records


def digest(content: bytes | None) -> str:
    """Return the SHA-256 of a file's bytes."""
    return hashlib.sha256(content or b"").hexdigest()
