"""Errors and records: what a Record keeps, and how one is made of JSON."""
import copy
import pickle

import pytest

import subagent_fleet as sf
from subagent_fleet import replace

MODEL = sf.NodeModel("qwen3:8b", 5, capabilities=("tools",))


def test_a_record_has_what_it_was_given_and_its_defaults():
    assert (MODEL.name, MODEL.size, MODEL.parameters) == ("qwen3:8b", 5, "")
    assert list(vars(MODEL)) == list(sf.fields(sf.NodeModel))
    assert repr(sf.FailedTry("mini", "refused")) == "FailedTry(node='mini', why='refused')"


@pytest.mark.parametrize("words, named", [((), {}), (("a", "b", "c"), {}), (("a",), {"who": "b"}),
                                          (("a", "b"), {"who": "c"}), (("a", "b"), {"node": "c"}),
                                          (("a", "b"), {"why": "b"})])
def test_a_record_of_other_fields_is_a_mistake(words, named):
    with pytest.raises(TypeError):
        sf.FailedTry(*words, **named)


def test_a_record_stays_as_it_is():
    for change in (lambda: setattr(MODEL, "size", 6), lambda: delattr(MODEL, "size"),
                   lambda: setattr(MODEL, "more", 6)):
        with pytest.raises(AttributeError):
            change()
    assert replace(MODEL, size=6).size == 6 and MODEL.size == 5
    with pytest.raises(TypeError):
        replace(MODEL, sizes=6)


def test_records_are_equal_by_kind_and_values():
    twin = sf.NodeModel("qwen3:8b", 5, capabilities=("tools",))
    assert twin == MODEL and hash(MODEL) == hash(twin) and len({MODEL, twin}) == 1
    assert replace(MODEL, size=6) != MODEL and sf.FailedTry("a", "b") != sf.Passed("a", "b")
    assert copy.deepcopy(MODEL) == pickle.loads(pickle.dumps(MODEL)) == MODEL


def test_an_empty_mapping_is_a_new_one_in_each_record():
    ask = sf.Ask("/", str)
    ask.headers["x"] = "y"
    assert sf.Ask("/", str).headers == {} and sf.Ask("/", str, headers=ask.headers).headers is ask.headers


def test_the_first_record_of_a_kind_and_the_hundredth_are_alike():
    class Pair(sf.Record):
        left: str
        right: str = "r"
        more: dict = {}
    pairs = [Pair("a", more={"b": number}) for number in range(100)]
    assert [list(vars(pair).items()) for pair in pairs] == [
        [("left", "a"), ("right", "r"), ("more", {"b": number})] for number in range(100)]
    assert Pair.__init__ is not sf.Record.__init__, "many were made: it has one of its own"

    class Triple(Pair):
        last: int = 3
    assert vars(Triple("a")) == {"left": "a", "right": "r", "more": {}, "last": 3}
    for wrong in ((), ("a", "b", {}, 4, 5)):
        with pytest.raises(TypeError):
            Triple(*wrong)


def test_a_key_has_its_default_in_the_class():
    class Spelt(sf.Record):
        kind: "str" = sf.key(name="kindOf", default="usual")
    assert Spelt.kind == "usual" and Spelt().kind == "usual" and Spelt("x").kind == "x"
    assert sf.read(Spelt, {"kindOf": "y"}).kind == "y" and Spelt.kind == "usual"


def test_a_value_that_was_read_obeys_the_rule_of_its_key():
    class Bounded(sf.Record):
        port: "int" = sf.key("port")
        tags: "tuple[str, ...]" = sf.key("tags", default=())
        more: "int" = sf.key("priority", default=0)
    assert sf.read(Bounded, {"port": 1, "tags": ["a"], "more": -3}) == Bounded(1, ("a",), -3)
    assert sf.read(Bounded, {"port": 1, "tags": ["a\n"], "more": "x"}) == Bounded(1)
    assert sf.read(Bounded, {"port": 70000}) is None and sf.read(Bounded, {"port": None}) is None


def test_a_record_of_a_record_has_the_fields_of_both():
    class Retry(sf.FailedTry):
        after: float = 1.5
        who: str  # behind a default, and without one
        why: str = "timeout"
    assert list(sf.fields(Retry)) == ["node", "why", "after", "who"]
    assert vars(Retry("mini", who="a")) == {"node": "mini", "why": "timeout", "after": 1.5, "who": "a"}
    assert vars(sf.FailedTry("mini", "x")) == {"node": "mini", "why": "x"}, "the class above is as it was"
    with pytest.raises(TypeError):
        Retry("mini")

    class Same(sf.FailedTry):
        """Nothing more."""
    assert Same("a", "b").why == "b" and Same("a", "b") != sf.FailedTry("a", "b")


@pytest.mark.parametrize("kind", ["Sequence[str]", "list[str]", "Decimal", "set"])
def test_an_annotation_that_read_does_not_know_is_a_mistake(kind):
    class Odd(sf.Record):
        __annotations__ = {"name": "str", "more": kind}
        more = ()
    assert sf.read(Odd, {"name": "a"}) == Odd("a")
    with pytest.raises(LookupError):
        sf.read(Odd, {"name": "a", "more": ["x"]})


def test_a_record_of_no_field_has_none():
    class Empty(sf.Record):
        """Nothing."""

    class One(Empty):
        name: str = ""
    assert vars(Empty()) == {} and vars(One("a")) == {"name": "a"}
