"""Grammars in Lark's form and in EBNF: an output is a text of the grammar, whoever reads that."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from quire.errors import InvalidParameter
from quire.structured.backend import mask_words
from quire.structured.llguidance_backend import LLGuidance, LLGuidanceMatcher
from quire.structured.llguidance_source import grammar_of
from quire.structured.params import StructuredOutputsParams
from tests.structured.conftest import VOCABULARY

BACKEND = LLGuidance(VOCABULARY)
MEMBERS = [*"ab09&-~^[]\\/\"'{}|.$# ", "\n", "\t", "\x1f", "é", "\u2028", "😀"]
TEXTS = ["", "a", "b", "ab", '"', "\\", "/", "\n", "\t", "é", "😀", "::=", "# a", "//", "[", "'", "&&"]


@dataclass
class Part:
    """A part of a grammar: what it is, and of what."""

    kind: str
    value: Any

    def ends(self, text: str, at: int) -> set[int]:
        """Where texts of this part that begin at a place end."""
        match self.kind:
            case "text":
                return {at + len(self.value)} if text.startswith(self.value, at) else set()
            case "class":
                is_negated, ranges = self.value
                character = text[at : at + 1]
                is_in = any(first <= character <= last for first, last in ranges)
                return {at + 1} if character and is_in is not is_negated else set()
            case "either":
                return set().union(*(one.ends(text, at) for one in self.value))
            case "sequence":
                places = {at}
                for one in self.value:
                    places = set().union(*(one.ends(text, place) for place in places))
                return places
        part, least, most = self.value
        places, found = {at}, {at} if least == 0 else set()
        for count in range(1, most + 1):
            places = set().union(*(part.ends(text, place) for place in places))
            found |= places if count >= least else set()
        return found


def draw(chance: random.Random, depth: int = 0) -> Part:
    kind = chance.choice(["text", "class", "either", "sequence", "repeated"][: 5 if depth < 3 else 2])
    match kind:
        case "text":
            return Part(kind, chance.choice(TEXTS))
        case "class":
            pairs = [sorted(chance.choices(MEMBERS, k=2)) for _ in range(chance.randint(1, 3))]
            ranges = [(first, last if chance.random() < 0.4 else first) for first, last in pairs]
            return Part(kind, (chance.random() < 0.4, ranges))
        case "repeated":
            least = chance.randint(0, 2)
            return Part(kind, (draw(chance, depth + 1), least, least + chance.randint(1, 2)))
    return Part(kind, [draw(chance, depth + 1) for _ in range(chance.randint(1, 3))])


class Writer:
    """A grammar in one of the forms, each character spelled in one of its ways."""

    def __init__(self, chance: random.Random, *, is_ebnf: bool) -> None:
        self._chance = chance
        self._is_ebnf = is_ebnf
        self._rules: list[str] = []

    def grammar(self, part: Part) -> str:
        is_name = "root ::=" if self._is_ebnf else "start:"
        start = self.written(part)
        return "\n".join([f"{is_name} {start}", *self._rules])

    def written(self, part: Part) -> str:
        match part.kind:
            case "text":
                found = f'"{"".join(map(self._in_text, part.value))}"'
            case "class":
                is_negated, ranges = part.value
                found = f"[{'^' if is_negated else ''}{''.join(map(self._range, ranges))}]"
                found = found if self._is_ebnf else f"/{found}/"
            case "either":
                found = f"({' | '.join(map(self.written, part.value))})"
            case "sequence":
                found = f"({' '.join(map(self.written, part.value))})"
            case _:
                inner, least, most = part.value
                found = f"({self.written(inner)})" + (f"{{{least},{most}}}" if self._is_ebnf else f"~{least}..{most}")
        return self._named(found) if self._chance.random() < 0.2 else found

    def _named(self, expression: str) -> str:
        name = f"rule{len(self._rules)}"
        self._rules.append(f"{name} {'::=' if self._is_ebnf else ':'} {expression}")
        return name

    def _range(self, ends: tuple[str, str]) -> str:
        first, last = ends
        return self._member(first) + (f"-{self._member(last)}" if last != first else "")

    def _member(self, character: str) -> str:
        """In a class: as it is where that is a member."""
        special = '\\]-^[\n"' if self._is_ebnf else "\\]-^/\n["
        if character not in special and self._chance.random() < 0.8:
            return character
        return self._escape(character, short='\\]["n' if self._is_ebnf else "\\]^/-n")

    def _in_text(self, character: str) -> str:
        plain = character not in '\\"\n\t' and self._chance.random() < 0.8
        return character if plain else self._escape(character, short='\\"nt')

    def _escape(self, character: str, short: str) -> str:
        name = {"\n": "n", "\t": "t"}.get(character, character)
        if name in short and self._chance.random() < 0.7:
            return f"\\{name}"
        code = ord(character)
        if code < 0x100:
            return f"\\x{code:02x}"
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}" if self._is_ebnf else character


def compiled(grammar: str) -> LLGuidanceMatcher:
    return BACKEND.compile(grammar_of(StructuredOutputsParams(grammar=grammar)))


def output_of(start: LLGuidanceMatcher, chance: random.Random) -> str | None:
    """Some output; None for one that does not end within some tokens."""
    matcher, output = start.clone(), b""
    for _ in range(40):
        masks = np.zeros((1, mask_words(len(VOCABULARY.tokens))), np.int32)
        BACKEND.fill_masks([(matcher, 0)], masks)
        assert not matcher.error
        allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8)[0], bitorder="little")).tolist()
        if 0 in allowed and (len(allowed) == 1 or chance.random() < 0.3):
            return output.decode()
        token_id = chance.choice([one for one in allowed if one])
        matcher.advance(token_id)
        output += VOCABULARY.tokens[token_id]
    return None


def takes(start: LLGuidanceMatcher, text: str) -> bool:
    matcher = start.clone().matcher
    token_ids = [VOCABULARY.tokens.index(bytes([byte]), 1) for byte in text.encode()]
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize("is_ebnf", [True, False], ids=["EBNF", "Lark"])
def test_an_output_is_a_text_of_the_grammar(is_ebnf: bool) -> None:
    chance, num_outputs = random.Random(1), 0
    for _ in range(150):
        part = draw(chance)
        grammar = Writer(chance, is_ebnf=is_ebnf).grammar(part)
        start = compiled(grammar)
        assert not start.error, (grammar, start.error)
        for _ in range(4):
            output = output_of(start, chance)
            assert output is None or len(output) in part.ends(output, 0), (grammar, output)
            num_outputs += output is not None
    assert num_outputs > 300


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        ("root ::= [^a&&b]", "c", "a&b"),
        ("root ::= [+--]", "+,-", "."),
        ("root ::= [a-b-c]", "ab-c", "d"),
        ("root ::= .", "a\n😀", ()),
        (r'root ::= "\u00e9" | "\[" | "\x0a"', "é[\n", "u"),
        (r"root ::= [\U0001F600-\U0001F64F]", "😀", "a"),
        ('root ::= ("a"+)? ("b"{2}){2}', ["bbbb", "aabbbb"], ["bb"]),
        ('start: "::="', ["::="], ["::"]),
        ("start: /[^a&&b]/", "c", "a&b"),
        ("start: /x{ 1}/", ["x{ 1}"], "x"),
        (r"start: /\w/", "aé1_", "\u0301"),
        (r"start: /\w\\/ /b/", ["a\\b"], ["a/b"]),
        ('start: A\nA: "a" /[&&]/i // /a++/', ["a&"], ["a"]),
        ('start: x "c"\nx[suffix="b"]: /[a-z]*/', ["abc"], ["ac"]),
        (r'start: %json {"pattern": "^[^a&&b]$", "type": "string"} "."', ['"c".'], ['"a".', '"c"']),
        ('start: %json {"type": "string", "format": "date"}', ['"2024-02-29"'], ['"2023-02-29"']),
    ],
)
def test_what_stands_in_a_grammar_means_what_it_means_elsewhere(
    grammar: str, texts: Sequence[str], others: Sequence[str]
) -> None:
    start = compiled(grammar)
    assert not start.error
    for text in texts:
        assert takes(start, text), text
    for text in others:
        assert not takes(start, text), text


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ("start: /a++/", "'/a++/': + at 2 follows another quantifier, which is not supported"),
        ("start: /a b/x", "'/a b/': sets the flag x, which is not supported"),
        ('%llguidance {"no_forcing": false}\nstart: "a"', "'%llguidance': is not supported"),
        ("start: x\nx[temperature=0.5]: /a*/", "'temperature': has no effect here"),
        ('start: x\nx[lazy, capture="y"]: /a*/', "'capture': has no effect here"),
        ('start: x "b"\nx[stop=""]: /a*/', "'stop': must not be empty"),
        ('start: "a" %json {"not": {}}', "'#/not': not is not supported"),
        ('start: %json {"x-guidance": {"lenient": true}}', "'#/x-guidance': x-guidance is not supported"),
        ('start: %json {"minimum": 1e999}', "'#/minimum': inf is beyond the range"),
        ('start: %json {"a"', "the schema: it is not JSON"),
        (r"root ::= [\ud800]", r"\ud800 is no character"),
        ("root ::= (", "it is no EBNF"),
    ],
)
def test_what_would_mean_nothing_there_is_refused(grammar: str, why: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        compiled(grammar)
    assert caught.value.message.startswith(f"structured_outputs.grammar: {why}")
    assert caught.value.parameter == "structured_outputs.grammar"


def tags(triggers: list[Any], *begins: str) -> dict[str, Any]:
    structures = [{"begin": begin, "schema": {"const": index}, "end": "."} for index, begin in enumerate(begins)]
    return {"triggers": triggers, "structures": structures}


@pytest.mark.parametrize("triggers", [["<"], ["<", "<f"], ["<f", "<"], ["<f", "<g"]])
def test_any_structure_may_follow_whichever_of_its_triggers_is_complete_first(triggers: list[str]) -> None:
    form = StructuredOutputsParams(structural_tag=tags(triggers, "<f>", "<g>"))
    start = BACKEND.compile(grammar_of(form))
    for text in ("", "a", "a<f>0.b", "<g>1.<f>0.", "é<g>1."):
        assert takes(start, text), text
    for text in ("a<f", "<f>1.", "<f>0", "<g>1.<g", "<f>0.<g>0."):
        assert not takes(start, text), text


@pytest.mark.parametrize(
    ("triggers", "why"),
    [
        (["<", "["], "'#/triggers/1': no structure begins with '['"),
        (["<", 5], "'#/triggers/1': it must be a string, not empty; got 5"),
        (["", "<"], "'#/triggers/0': it must be a string, not empty; got ''"),
        (["<fg"], "'#/structures/0': begin and end must be strings, and begin must start with a trigger"),
    ],
)
def test_a_trigger_that_begins_nothing_is_refused(triggers: list[Any], why: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        grammar_of(StructuredOutputsParams(structural_tag=tags(triggers, "<f>")))
    assert caught.value.message == f"structured_outputs.structural_tag: {why}"
