"""Regular expressions: those that are accepted match what Python's `re` matches, the others are refused by name."""

from __future__ import annotations

import json
import random
import re
import unicodedata

import pytest

from quire.errors import InvalidParameter
from quire.structured.llguidance_backend import LLGuidance, LLGuidanceMatcher
from quire.structured.llguidance_source import grammar_of
from quire.structured.params import StructuredOutputsParams
from quire.structured.regex import translated
from tests.structured.conftest import VOCABULARY

ATOMS = [
    *("a", "b", "1", " ", "é", "/", '"', "\n", "~", "{", "}", "a{", "{ 1}", "{1, 2}", "{,x}", "]", "^", "$", "."),
    *(r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"\.", r"\{", r"\x41", r"\u00e9", r"\\", r"\~", r"\A", r"\b", r"\1"),
    *(
        r"\<",
        r"[\>]",
        "[ab]",
        "[^ab]",
        "[a-c]",
        r"[\w-]",
        r"[^\s]",
        r"[^\w]",
        r"[\W\d]",
        "[a&&b]",
        "[a--b]",
        "[a~~b]",
        "[[:alpha:]]",
    ),
    *(
        "[a[b]",
        "[]a]",
        "[^]a]",
        "[a-]",
        "[-a]",
        "[+--]",
        "[a^]",
        "[&&a]",
        r"[\]-a]",
        r"[\b]",
        r"[\x41-\x43]",
        "[a-b-c]",
    ),
    *("(?i:k)", "(?s:.)", "(?x: a b )", "(?=a)", "(?!a)", "(?<=a)", "(?>a)", "(?P<n>a)"),
]
COUNTS = [
    "*",
    "+",
    "?",
    "{2}",
    "{1,2}",
    "{2,}",
    "{,2}",
    "{0}",
    "*?",
    "{1,2}?",
    "*+",
    "++",
    "?+",
    "{1,2}+",
    "**",
    "{ 1}",
]
TEXTS = [
    *(
        "",
        "a",
        "b",
        "ab",
        "aa",
        "aab",
        "1",
        "A",
        "k",
        "K",
        "\u212a",
        "é",
        "/",
        '"',
        "~",
        "~~",
        "&",
        "&&",
        "-",
        "--",
        "+",
        "<",
        ">",
    ),
    *(" ", "\n", "\t", "\x1c", "\x1f", "\x08", "\xa0", "\u0301", "\u203f", "_", "٣", "ª", "{", "}", "{ 1}", "a{ 1}"),
    *("{1, 2}", "a{1, 2}", "{,x}", "[", "]", ":", "a]", "b]", "l]", ":]", "^", "$", ".", "\\", "x", " a b ", "\n\n"),
]


def draw(chance: random.Random, depth: int = 0) -> str:
    """A pattern."""
    match chance.randrange(6 if depth < 3 else 3):
        case 3:
            found = f"({draw(chance, depth + 1)})"
        case 4:
            found = f"(?:{draw(chance, depth + 1)}|{draw(chance, depth + 1)})"
        case 5:
            found = draw(chance, depth + 1) + draw(chance, depth + 1)
        case _:
            found = chance.choice(ATOMS)
    return found + chance.choice(COUNTS) if chance.random() < 0.3 else found


def compiled(pattern: str) -> LLGuidanceMatcher | None:
    """None: it is refused."""
    try:
        matcher = LLGuidance(VOCABULARY).compile(grammar_of(StructuredOutputsParams(regex=pattern)))
    except InvalidParameter:
        return None
    return None if matcher.error else matcher


def takes(start: LLGuidanceMatcher, text: str) -> bool:
    matcher = start.clone().matcher
    token_ids = [VOCABULARY.tokens.index(bytes([byte]), 1) for byte in text.encode()]
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_what_is_accepted_matches_what_python_matches() -> None:
    chance, num_accepted = random.Random(1), 0
    for _ in range(400):
        pattern = draw(chance)
        try:
            expected = re.compile(pattern)
        except re.error:
            continue
        start = compiled(pattern)
        num_accepted += start is not None
        for text in TEXTS if start is not None else ():
            assert takes(start, text) == bool(expected.fullmatch(text)), (pattern, text)
    assert num_accepted > 200


@pytest.mark.parametrize(
    ("pattern", "part"),
    [
        ("a++", "+ at 2 follows another quantifier"),
        ("a{2}{3}", "{3} at 4 follows another quantifier"),
        ("a(?=b)", "(?= at 1 looks around"),
        ("(?<!b)", "(?<! at 0 looks around"),
        (r"(a)\1", r"\1 at 3 is a back reference"),
        ("(?P<n>a)(?P=n)", "(?P= at 8 is a back reference"),
        (r"a\b", r"\b at 1 is a boundary of words"),
        ("(?>a)", "(?> at 0 is an atomic group"),
        ("(a)(?(1)b)", "(?( at 3 is a condition"),
        ("a\\", "\\ at 1 escapes nothing"),
        ("(?ix)a b", "(?ix at 0 sets the flag x"),
    ],
)
@pytest.mark.parametrize("kind", ["regex", "pattern", "patternProperties"])
def test_what_has_no_grammar_is_refused_with_its_place(kind: str, pattern: str, part: str) -> None:
    schema = {"pattern": pattern} if kind == "pattern" else {"patternProperties": {pattern: {}}}
    given = {"regex": pattern} if kind == "regex" else {"json": schema}
    with pytest.raises(InvalidParameter) as caught:
        grammar_of(StructuredOutputsParams(**given))  # type: ignore[arg-type]
    assert f"{part}, which is not supported" in caught.value.message
    assert caught.value.message.startswith(f"structured_outputs.{next(iter(given))}: ")
    assert (f"'#/{kind}" in caught.value.message) is (kind != "regex")


def test_classes_are_those_of_python() -> None:
    characters = [chr(code) for code in range(0x800) if unicodedata.category(chr(code)) != "Cn"]
    for name in r"\w", r"\W", r"\s", r"\S", r"[^\w]", r"[\s]":
        start = compiled(name)
        assert start is not None
        for character in characters:
            assert takes(start, character) == bool(re.fullmatch(name, character)), (name, character)


def test_patterns_of_schemas_mean_the_same() -> None:
    for pattern, yes, no in (("^[a&&b]$", "&", "c"), ("^x{ 1}$", "x{ 1}", "x"), (r"^\S$", "a", "\u0085")):
        params = StructuredOutputsParams(json={"type": "string", "pattern": pattern})
        start = LLGuidance(VOCABULARY).compile(grammar_of(params))
        assert takes(start, json.dumps(yes, ensure_ascii=False))
        assert not takes(start, json.dumps(no, ensure_ascii=False))


@pytest.mark.parametrize(
    ("first", "second"), [(r"^\w$", r"^[\p{L}\p{N}_]$"), ("^[&]$", r"^[\&]$"), ("^a{,2}$", "^a{0,2}$")]
)
def test_two_patterns_that_mean_the_same_are_not_taken_for_one(first: str, second: str) -> None:
    schema = {"patternProperties": {first: {"type": "string"}, second: {"type": "integer"}}}
    with pytest.raises(InvalidParameter, match="it means the same as") as caught:
        grammar_of(StructuredOutputsParams(json=schema))
    assert "'#/patternProperties/" in caught.value.message


@pytest.mark.parametrize("pattern", ["[", "[^", "[a-", "(", "(?", r"[\\", "[]", "[a\\", "a)"])
def test_what_is_no_pattern_is_left_to_the_library(pattern: str) -> None:
    assert translated(pattern, ValueError)
    assert compiled(pattern) is None
