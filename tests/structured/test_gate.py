"""Gated matchers against a naive model of them: a function of the whole output, with languages of a few words."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest

from quire.structured.backend import mask_words, open_backend
from quire.structured.gate import GatedBackend, GatedMatcher
from quire.structured.grammar import Gate, Grammar, Marker, Thinking, Vocabulary

SPECIAL = [b"<end>", b"<T>", b"</T>", b"<call>", b"<other>"]
SINGLE = [bytes([byte]) for byte in b"<>/tabc \n"]
LONGER = [b"<t", b"t>", b"</t", b"</t>", b"/t>a", b">b", b"> ", b">\n", b">\nab", b"<a>", b"<a>ab", b"a>abc<a>"]
LONGER += [b"a>b", b"ab", b"abc", b"bc<a", b"<t></t>c", b"</t>ab", b"</t>z", b"z", b"<a>z", b"bb", b"<<a>", b"abcab"]
LONGER += [b"c<a>bb<a>", b"caabc", b"caabca", b"<tabc", b" \n<t", b""]
TOKENS = [*SPECIAL, *SINGLE, *LONGER]
LONE = TOKENS.index(b"z")
"""The only token that says z: made special below, so that no token says just this byte."""
END = 0
VOCABULARY = Vocabulary(tokens=TOKENS, special_ids=frozenset([*range(len(SPECIAL)), LONE]), eos_token_ids=(END,))
WORDS = [("abc",), ("ab", "abc"), ("bb", "a b"), ("a",), ("cab", "\nab"), ("<a>b", "a>bb"), ("caab", "abab"), ()]


def special(name: bytes) -> Marker:
    return Marker(text=name.decode(), token_id=SPECIAL.index(name))


def text(value: str) -> Marker:
    return Marker(text=value)


BEGINS, ENDS = [special(b"<T>"), text("<t>")], [special(b"</T>"), text("</t>"), text("tt"), text("t")]
TRIGGERS = [
    (),
    (special(b"<call>"),),
    (text("<a>"),),
    (text("<a>"), text("a>")),
    (special(b"<call>"), text("bc")),
    (text("ca"),),
    (text("<t"), text("bc")),
    (text("<other>b"), text("aba")),
]


OPENINGS = [(), (), ("ab",), ("ab", "bb"), ("a",), ("cab", "abc"), ("<a>",)]
BEFORE = [(), (), (SPECIAL.index(b"<call>"),), (TOKENS.index(b"ab"), SPECIAL.index(b"<other>"))]


@dataclass
class Naive:
    """What may follow an output. Everything is worked out from its beginning."""

    gate: Gate
    words: tuple[str, ...]
    output: list[int]
    opened: str = ""

    def allowed(self) -> set[int] | None:
        """None where everything is."""
        thinking, first = self.gate.thinking, 0
        said, more = b"", set[int]()
        if thinking is not None:
            begun = (0, b"") if thinking.is_open else self._begin(thinking)
            if begun is not None:
                ended = self._think(thinking, *begun)
                if not isinstance(ended, tuple):
                    return ended
                first, said = ended
            elif (
                not self.output or (self.gate.is_open and not spelled(self.output).strip())
            ) and thinking.begin.token_id is not None:
                more = {thinking.begin.token_id}
        if self.gate.triggers or self.gate.openings:
            following = self._after_triggers(first, said)
            return following if following is None or self.opened != "first" else following | more
        if not self.words:
            return None
        part = (said if self._continues(said) else b"") + spelled(self.output[first:])
        return self._following(part) | more

    def _begin(self, thinking: Thinking) -> tuple[int, bytes] | None:
        is_first_only = bool(self.words) and not (self.gate.triggers or self.gate.openings)
        marker = thinking.begin
        for count in range(1, len(self.output) + 1):
            said = spelled(self.output[:count]).lstrip()
            if marker.token_id is not None:
                if self.output[count - 1] == marker.token_id:
                    return count, b""
                may_begin = not said
            else:
                if said.startswith(marker.text.encode()) and not is_first_only:
                    return count, said[len(marker.text) :]
                may_begin = marker.text.encode().startswith(said)
            if is_first_only or not may_begin:
                return None
        return None

    def _think(self, thinking: Thinking, first: int, said: bytes) -> tuple[int, bytes] | set[int] | None:
        """Where the answer begins; or what may follow in the thinking."""
        end = thinking.end
        for last in range(first, len(self.output) + 1):
            whole = said + spelled(self.output[first:last])
            if last > first and self.output[last - 1] in thinking.before:
                return last - 1, b""
            if end.token_id is None and end.text.encode() in whole:
                return last, whole.split(end.text.encode(), 1)[1]
            if end.token_id is not None and last > first and self.output[last - 1] == end.token_id:
                return last, b""
            if thinking.budget is not None and last - first >= thinking.budget:
                num_forced = len(self.output) - last
                if num_forced < len(thinking.forced):
                    return {thinking.forced[num_forced]}
                return last + len(thinking.forced), b""
        if self.gate.triggers or self.gate.openings or not self.words:
            return None
        before = said + spelled(self.output[first:])
        wrong = {one for one in thinking.before if not self._following(b"") & {one}}
        for token_id, token in enumerate(TOKENS if end.token_id is None else ()):
            _, found, rest = (before + token).partition(end.text.encode())
            if found and rest.strip() and not self._continues(rest):
                wrong.add(token_id)
        return set(range(len(TOKENS))) - wrong if wrong else None

    def _after_triggers(self, first: int, said: bytes) -> set[int] | None:
        self.opened = ""
        is_open = self.gate.is_open and not first and (self.gate.thinking is None or not self.gate.thinking.is_open)
        begun: bytes | None = b"" if self.gate.openings and not is_open else None
        part, free = (b"", b"") if is_open else (None, b"")
        for token_id in [None, *self.output[first:]]:
            data = said if token_id is None else TOKENS[token_id]
            if part is not None:
                part += data
                if token_id is not None and self._is_complete(part) and self.gate.repeats:
                    part, free, is_open = None, b"", False
                continue
            if token_id is not None and any(marker.token_id == token_id for marker in self.gate.triggers):
                part, begun = b"", None
                continue
            if begun is not None and token_id not in VOCABULARY.special_ids:
                begun += data
                plain = plainly(begun)
                if any(plain.startswith(one.encode()) for one in self.gate.openings):
                    rest, begun = begun.lstrip(), None
                    done = self._done(rest)
                    if done is not None and self.gate.repeats:
                        free, data = b"", rest[done:]
                    elif done is not None or self._continues(rest):
                        part = rest[:done]
                        continue
                elif not any(one.encode().startswith(plain) for one in self.gate.openings):
                    begun = None
            part, free = self._free(free, data)
            begun = begun if part is None else None
        if part is not None:
            self.opened = "first" if is_open else ""
            return self._following(part)
        wrong = set() if begun is None else self._wrong(begun)
        return set(range(len(TOKENS))) - wrong if wrong else None

    def _wrong(self, begun: bytes) -> set[int]:
        texts = [one.encode() for one in self.gate.openings]
        found = set()
        for token_id, token in enumerate(TOKENS):
            whole = begun + token
            if token_id in VOCABULARY.special_ids or not any(plainly(whole).startswith(one) for one in texts):
                continue
            if self._done(whole.lstrip()) is None and not self._continues(whole.lstrip()):
                found.add(token_id)
        return found

    def _done(self, rest: bytes) -> int | None:
        done = next((n for n in range(1, len(rest) + 1) if self._is_complete(rest[:n])), None)
        return done if done is not None and self._can_be_said(rest[:done]) else None

    def _free(self, before: bytes, data: bytes) -> tuple[bytes | None, bytes]:
        """What the grammar has had, None where it does not count; and the free bytes before."""
        whole, seen = before + data, len(before)
        texts = [marker.text.encode() for marker in self.gate.triggers if marker.token_id is None]
        for end in range(seen + 1, len(whole) + 1):
            ended = [one for one in texts if whole[:end].endswith(one)]
            if ended:
                rest = (max(ended, key=len) if self.gate.takes_triggers else b"") + whole[end:]
                done = next((n for n in range(1, len(rest) + 1) if self._is_complete(rest[:n])), None)
                if done is not None and self._can_be_said(rest[:done]):
                    return self._free(b"", rest[done:]) if self.gate.repeats else (rest[:done], b"")
                if self._continues(rest):
                    return rest, b""
        return None, whole

    def _can_be_said(self, part: bytes) -> bool:
        return all(bytes([byte]) in SINGLE for byte in part)

    def _continues(self, part: bytes) -> bool:
        return self._can_be_said(part) and any(
            word.encode().startswith(part) for word in self.words or (part.decode(),)
        )

    def _is_complete(self, part: bytes) -> bool:
        longer = any(word.encode().startswith(part) and word.encode() != part for word in self.words)
        return part.decode() in self.words and not longer

    def _following(self, part: bytes) -> set[int]:
        words = [word.encode() for word in self.words]
        said = {
            token_id
            for token_id, token in enumerate(TOKENS)
            if token and token_id not in VOCABULARY.special_ids and any(w.startswith(part + token) for w in words)
        }
        return said | ({END} if part in words else set())


def plainly(data: bytes) -> bytes:
    return data.lstrip()[:1] + data.lstrip()[1:].lstrip()


def spelled(token_ids: list[int]) -> bytes:
    return b"".join(TOKENS[token_id] for token_id in token_ids)


@pytest.fixture(scope="module")
def backend() -> GatedBackend:
    return GatedBackend(open_backend("llguidance", VOCABULARY), VOCABULARY)


def matcher_of(backend: GatedBackend, gate: Gate, words: tuple[str, ...]) -> GatedMatcher:
    alternatives = " | ".join('"' + word.replace("\n", "\\n") + '"' for word in words)
    text = f'%llguidance {{"no_forcing": true}}\nstart: {alternatives}' if words else ""
    return backend.gated(gate, backend.compile(Grammar(text=text)))


def allowed_by(backend: GatedBackend, matcher: GatedMatcher) -> set[int] | None:
    if matcher.is_free:
        return None
    masks = np.full((2, mask_words(len(TOKENS))), 0x5A5A5A5A, np.int32)
    backend.fill_masks([(matcher, 1)], masks)
    bits = np.unpackbits(masks[1].view(np.uint8), bitorder="little", count=len(TOKENS))
    return set(np.flatnonzero(bits).tolist())


def random_gate(rng: random.Random, words: tuple[str, ...]) -> Gate:
    thinking = Thinking(
        begin=rng.choice(BEGINS),
        end=rng.choice(ENDS),
        is_open=rng.random() < 0.4,
        budget=rng.choice([None, 0, 1, 3, 6]),
        forced=tuple(rng.choices(range(len(TOKENS)), k=rng.randint(1, 3))),
        before=rng.choice(BEFORE),
    )
    triggers = rng.choice(TRIGGERS) if words else ()
    return Gate(
        thinking=thinking if rng.random() < 0.8 else None,
        triggers=triggers,
        repeats=rng.random() < 0.8,
        is_open=bool(triggers) and rng.random() < 0.2,
        takes_triggers=bool(triggers) and all(marker.token_id is None for marker in triggers) and rng.random() < 0.4,
        openings=rng.choice(OPENINGS) if words else (),
    )


def next_token(rng: random.Random, allowed: set[int] | None, output: list[int]) -> int:
    """Not the end, where something else is possible; white space first, and what looks like a marker, more often."""
    blank = [TOKENS.index(token) for token in (b" ", b"\n", b" \n<t")]
    if not spelled(output).strip() and rng.random() < 0.3 and (allowed is None or allowed.issuperset(blank)):
        return rng.choice(blank)
    choices = sorted((set(range(len(TOKENS))) if allowed is None else allowed) - {END}) or [END]
    marks = [token_id for token_id in choices if set(TOKENS[token_id]) & set(b"<>")]
    return rng.choice(marks if marks and rng.random() < 0.4 else choices)


@pytest.mark.parametrize("seed", range(40))
def test_a_gate_is_its_naive_model_however_the_tokens_are_split(backend: GatedBackend, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        words = rng.choice(WORDS)
        gate = random_gate(rng, words)
        matcher, naive = matcher_of(backend, gate, words), Naive(gate, words, [])
        for _ in range(rng.randint(1, 40)):
            allowed = naive.allowed()
            place = (gate, words, [TOKENS[token_id] for token_id in naive.output])
            assert allowed_by(backend, matcher) == allowed, place
            assert not matcher.error, place
            token_id = next_token(rng, allowed, naive.output)
            if token_id == END:
                break
            naive.output.append(token_id)
            if rng.random() < 0.1:  # a sequence that was preempted, or taken over by another core
                matcher = matcher_of(backend, gate, words)
                for known in naive.output[:-1]:
                    matcher.advance(known)
            elif rng.random() < 0.3:
                matcher = matcher.clone()
            matcher.advance(token_id)


def test_the_random_outputs_reach_every_part(backend: GatedBackend) -> None:
    rng, found = random.Random(0), set[str]()
    for _ in range(400):
        words = rng.choice(WORDS)
        gate = random_gate(rng, words)
        naive, parts = Naive(gate, words, []), list[str]()
        for _ in range(40):
            allowed = naive.allowed()
            if allowed is None:
                parts.append("free")
            elif gate.thinking is not None and allowed <= set(gate.thinking.forced):
                parts.append("forced")
            else:
                parts.append("exits" if len(allowed) > len(TOKENS) // 2 else "counts")
            naive.output.append(next_token(rng, allowed, naive.output))
        found |= {f"{one} {other}" for one, other in pairwise(parts) if one != other}
    for step in ("free counts", "counts free", "free forced", "forced free", "forced counts", "exits counts"):
        assert step in found


def test_a_clone_goes_its_own_way(backend: GatedBackend) -> None:
    matcher = matcher_of(backend, Gate(triggers=(text("<a>"),)), ("abc",))
    matcher.advance(TOKENS.index(b"<a>"))
    other = matcher.clone()
    matcher.advance(TOKENS.index(b"ab"))
    assert allowed_by(backend, matcher) == {TOKENS.index(b"c")}
    assert TOKENS.index(b"abc") in (allowed_by(backend, other) or ())


def test_a_trigger_may_come_again_when_its_part_has_ended(backend: GatedBackend) -> None:
    matcher = matcher_of(backend, Gate(triggers=(text("<a>"),)), ("abc",))
    for token in (b"<a>ab", b"c", b"t", b"a>abc<a>"):
        assert not matcher.error
        matcher.advance(TOKENS.index(token))
    assert allowed_by(backend, matcher) == {TOKENS.index(token) for token in (b"a", b"ab", b"abc")}
    inside = matcher_of(backend, Gate(triggers=(text("a>"),)), ("abc",))
    inside.advance(TOKENS.index(b"a>abc<a>"))
    assert allowed_by(backend, inside) == {TOKENS.index(token) for token in (b"a", b"ab", b"abc")}


def test_what_the_grammar_has_taken_begins_no_trigger(backend: GatedBackend) -> None:
    matcher = matcher_of(backend, Gate(triggers=(text("ca"),)), ("abc",))
    for token in (b"caabc", b"a"):
        matcher.advance(TOKENS.index(token))
        assert matcher.is_free


def test_a_grammar_that_cannot_be_followed_says_so_where_it_counts(backend: GatedBackend) -> None:
    broken = backend.compile(Grammar(text="start: nothing"))
    assert broken.error
    gate = Gate(triggers=(text("<a>"),))
    matcher = backend.gated(gate, broken)
    assert not matcher.error
    matcher.advance(TOKENS.index(b"<a>ab"))
    assert matcher.error == broken.error
    assert backend.gated(replace(gate, triggers=()), broken).error == broken.error
