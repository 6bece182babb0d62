"""Record, the frozen data class, and `read`, which makes records of JSON."""
from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from fleet.start.gate import dataclass_transform

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Any, ClassVar, NoReturn, TypeVar

    from fleet.config.rules import Rule
    _Record = TypeVar("_Record", bound="Record")


# Parts pass frozen Records to each other. `read` makes them of JSON from a disk or another
# program, and trusts nothing: a field that does not fit counts as absent.

REQUIRED = object()  # the default of a field that has none
_ABSENT = object()  # the value of a field that was not given
MANY = 20  # records of one kind, after which its own `__init__` is compiled


class Field:
    """One field of a record, and how files and other programs write it."""

    name: str  # of the attribute; `fields` fills in this and its annotation
    kind: str

    def __init__(self, default: Any, rule: Rule | None = None, words: str = "",
                 key: str = "", also: str = "", others: str = "") -> None:
        self.default = default  # REQUIRED, or what its absence means
        self.rule = rule  # for values that were read; None: its type is all
        self.words = words  # its purpose, if a person may write it
        self.key = key  # as a file spells it; "": as the attribute
        self.also = also  # a second spelling that is read
        self.others = others  # what people write by mistake for it, between blanks

    def __get__(self, record: object, kind: type) -> Any:
        return self.default  # so `Gateway.port` is 4000, declared with a rule or not


def _compile_start(usual: Mapping[str, Any]) -> Callable[..., None]:
    """Return an `__init__` for fields with these defaults; it refuses wrong arguments."""
    words = []
    lines = ["    _values = self.__dict__"]
    for name, default in usual.items():
        if default is not REQUIRED:
            words.append(f"{name}=_usual['{name}']")
        elif words and "=" in words[-1]:  # it follows one that has a default
            words.append(f"{name}=_absent")
            lines.append(f"    if {name} is _absent: raise TypeError('it needs {name}')")
        else:
            words.append(name)
        if type(default) is dict:
            lines.append(f"    if {name} is _usual['{name}']: {name} = {{}}")
        lines.append(f"    _values['{name}'] = {name}")
    names: dict[str, Any] = {"_usual": usual, "_absent": _ABSENT}
    exec("\n".join([f"def __init__({', '.join(['self', *words])}):", *lines]), names)
    return names["__init__"]


@dataclass_transform(frozen_default=True)
class Record:
    """Values under the names that a subclass annotates; they cannot be changed.

    To a checker they are frozen dataclasses. For those, the standard library compiles eight
    functions a class when the file is imported, which was two thirds of a start. Here a class
    is examined when its first record is made, and only a kind with many records gets an
    `__init__` of its own: compiling one takes as long as making a hundred records. A default
    of `{}` is a new one in each record. A subclass of a record has the fields of both.
    """

    kinds: ClassVar[dict[str, type[Record]]] = {}  # all kinds by name, for `read`
    _fields: ClassVar[dict[str, Field]] = {}
    _usual: ClassVar[dict[str, Any]] = {}  # the defaults, in the order of the fields
    _mappings: ClassVar[list[str]] = []  # fields with the default `{}`
    _made = 0  # how many records there were so far

    def __init_subclass__(cls) -> None:
        Record.kinds[cls.__name__] = cls
        if cls.__base__ is not Record:
            cls.__init__ = Record.__init__  # type: ignore[method-assign] # not the one above's

    def __init__(self, *values: Any, **named: Any) -> None:
        cls = type(self)
        fields(cls)
        cls._made += 1
        given = {**dict(zip(cls._usual, values)), **named}
        made = {**cls._usual, **{name: {} for name in cls._mappings}, **given}
        fits = (len(given) == len(values) + len(named) and len(made) == len(cls._usual)
                and REQUIRED not in made.values())
        if fits and cls._made < MANY:
            vars(self).update(made)
            return
        # If the arguments do not fit, this one raises a TypeError that says why.
        cls.__init__ = _compile_start(cls._usual)  # type: ignore[method-assign]
        cls.__init__(self, *values, **named)

    def _check(self) -> None:
        """Raise a ValueError if the values contradict each other; `read` calls it."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __repr__(self) -> str:
        words = (f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({', '.join(words)})"

    def __setattr__(self, name: str, value: object = None) -> NoReturn:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be changed")

    __delattr__ = __setattr__


def fields(record: type[_Record]) -> dict[str, Field]:
    """Return the fields of a kind of record, by name."""
    if "_usual" not in vars(record):
        found = dict(fields(record.__mro__[1]))
        for name, kind in record.__annotations__.items():
            if name in found and name not in vars(record) or name in Record.__annotations__:
                continue  # Python 3.9 also shows the annotations of the base class
            field = vars(record).get(name, REQUIRED)
            field = found[name] = field if isinstance(field, Field) else Field(field)
            field.name, field.kind, field.key = name, kind, field.key or name
        record._fields = found
        record._mappings = [name for name, field in found.items() if field.default == {}]
        record._usual = {name: field.default for name, field in found.items()}
    return record._fields


def replace(record: _Record, **changes: Any) -> _Record:
    """Return a copy of a record with some values changed."""
    return type(record)(**{**vars(record), **changes})


# -- JSON as records --

READ_NUMBER_LIMIT = 1e15  # more than any size, date or count that this program keeps
_READ_TYPES = {"str": (str,), "bool": (bool,), "int": (int,), "float": (int, float)}


def read(record: type[_Record], value: object) -> _Record | None:
    """Return the record that a JSON value holds, or None if it holds none.

    A field that is absent, of another type, or against its rule has its default; without a
    default there is no record. Other keys are ignored: a newer program may write them.
    There is no record if its `_check` fails.
    """
    if not isinstance(value, dict):
        return None
    words = {}
    for name, field in fields(record).items():
        each = value.get(field.key, _ABSENT)
        if field.rule:
            if each is not _ABSENT and field.rule.fits(each):
                words[name] = tuple(each) if isinstance(each, list) else each
        elif each is not _ABSENT:
            with contextlib.suppress(ValueError):
                words[name] = _read_value(field.kind, each)
    try:
        made = record(**words)
        made._check()
    except (TypeError, ValueError):  # a field is missing
        return None
    return made


def _read_value(kind: str, value: Any) -> Any:
    """Return a value of an annotated type; ValueError if it has another type.

    Items that do not fit are left out. A number is never negative.
    """
    types = _READ_TYPES.get(kind)
    if types:
        fits = type(value) in types  # to isinstance, True is an integer
        if fits and int in types:
            fits = 0 <= value <= READ_NUMBER_LIMIT  # false for NaN, too
        if not fits:
            raise ValueError(f"no {kind}")
        return value
    if kind.endswith(" | None"):
        return None if value is None else _read_value(kind[:-len(" | None")], value)
    if kind in ("object", "Any"):
        return value

    outer, _, inner = kind.partition("[")
    item = inner[:-1].removesuffix(", ...").removeprefix("str, ")
    if outer == "tuple" and isinstance(value, list):
        return tuple(kept for _, kept in _read_items(item, enumerate(value)))
    if outer == "dict" and isinstance(value, dict):
        return dict(_read_items(item, value.items()))
    made = None
    if outer not in ("tuple", "dict"):
        made = read(Record.kinds[kind], value)  # KeyError: not a kind of record
    if made is None:
        raise ValueError(f"no {outer}")
    return made


def _read_items(kind: str, items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    for place, value in items:
        try:
            yield place, _read_value(kind, value)
        except ValueError:
            continue
