"""Every sentence that a person may see keeps the mechanical rules of how the program speaks."""
import re

import pytest

from sentences import read_sentences

SENTENCES = read_sentences()
RULES = {
    "a word nobody says": r"\b(shall|whom|anew|thereof|whence|herewith)\b|\b[Mm]end(s|ed|ing)?\b",
    "a word twice": r"(?<![\w{}.|-])([a-z]{2,}) \1(?![\w-])",
    "a blank before a full stop": r"[a-z] [,;:](?= |$)|[a-z] [.]$",
    "a before a vowel": r"\ba (?=[aeio][a-z])(?!one\b|once\b|eu)",
    "an before a consonant": r"\ban (?=[bcdfgjkpqtvwyz][a-z])",
    "cannot, in two words": r"\bcan not\b",
    "two full stops": r"(?<!\.)\.\.(?!\.|/)",
}


@pytest.mark.parametrize("rule", RULES)
def test_no_sentence_breaks_a_rule(rule):
    # What is in backticks or after a `$` is typed, not said.
    said = {text: re.sub(r"`[^`]*`|\$ [^.]*", "`x`", text) for text in SENTENCES}
    assert len(said) > 1000
    broken = [f"{SENTENCES[text]}: {text}" for text, words in said.items()
              if re.search(RULES[rule], words)]
    assert broken == []


@pytest.mark.parametrize("rule, text", [
    ("a word nobody says", "who shall work"), ("a word twice", "of the the file"),
    ("a blank before a full stop", "it works ."), ("a before a vowel", "a agent"),
    ("an before a consonant", "an task"), ("cannot, in two words", "it can not"),
    ("two full stops", "It works..")])
def test_each_rule_finds_what_breaks_it(rule, text):
    assert re.search(RULES[rule], text)
