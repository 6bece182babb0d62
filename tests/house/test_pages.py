"""Every place that src/README.md and CONTRIBUTING.md name is there."""
import re

import pytest

from tools import ROOT

HOUSE = ROOT / "src" / "fleet"
PAGES = [ROOT / "src" / "README.md", ROOT / ".github" / "CONTRIBUTING.md"]
ROOMS = sorted(path.name for path in HOUSE.iterdir() if path.is_dir())
# Names of a kind of place, and what a run makes.
STANDS_FOR = re.compile(r"ROOM|NAME|[<>{}*]|^room/part")
NAMED = re.compile(r"`([\w.<>*-]+(?:/[\w.<>*-]*)+)`|\]\(([^)#:]+)\)")


def places_of(page):
    """Every path in a page, and the code spans that begin with one."""
    text = page.read_text(encoding="utf-8")
    found = {a or b for a, b in NAMED.findall(text)}
    found |= set(re.findall(r"(?<![\w./-])((?:src|tests|\.github|\.ci)/[\w./-]*\w)", text))
    return sorted(place for place in found if not STANDS_FOR.search(place))


def is_there(place, page):
    starts = [ROOT, HOUSE, page.parent, ROOT / "src", ROOT / "tests" / "rigs"]
    return any((start / (place + end)).exists() for start in starts for end in ("", ".py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_place_that_a_page_names_is_there(page):
    places = places_of(page)
    assert len(places) > 20
    assert [place for place in places if not is_there(place, page)] == []


def test_the_page_of_the_house_has_a_row_for_every_room():
    rows = re.findall(r"(?m)^\| `(\w+)/` \|", PAGES[0].read_text(encoding="utf-8"))
    contents = re.findall(r"(?m)^(\w+)/ ", (HOUSE / "CONTENTS").read_text(encoding="utf-8"))
    assert rows == [*contents, "assets"]
    assert set(contents) <= set(ROOMS)


def test_a_page_that_names_what_has_gone_fails(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("Read `plan/routes`, `steps/gone` and `tests/ROOM/test_*.py`.", encoding="utf-8")
    assert places_of(page) == ["plan/routes", "steps/gone"]
    assert [place for place in places_of(page) if not is_there(place, page)] == ["steps/gone"]
