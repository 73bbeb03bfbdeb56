"""Both ways of reading JSON agree with each other and with the standard library; the long way is taken in pieces."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.http import strict_json
from quire.server.http.errors import ApiError
from quire.server.http.strict_json import MAX_DEPTH, MAX_KEY, MAX_KEYS, MAX_STRING, PIECE, SMALL, read_json
from quire.utils.work_pool import WorkPool

LIMIT = 1 << 18
PADDING = b" \n\t\r" * (SMALL // 4 + 1)
"""Makes a text a large one."""
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TEXTS, inner, max_size=6),
    max_leaves=30,
)


def large(text: bytes) -> Any:
    """What the reader of large texts makes of a text."""
    return read_json(text + PADDING, LIMIT)[0]


def outcome(text: bytes) -> Any:
    """The value, or that there is none."""
    try:
        return read_json(text, LIMIT)[0]
    except ApiError:
        return ApiError


@given(value=VALUES, ascii_only=st.booleans(), indent=st.sampled_from([None, 0, 3]))
def test_a_large_text_says_what_it_says(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    assert large(text) == value
    assert read_json(text, LIMIT)[0] == value


@settings(max_examples=300)
@given(
    value=VALUES,
    place=st.floats(0, 1),
    junk=st.sampled_from(
        [b"", b",", b"]", b"}", b"[", b'"', b"\\", b":", b"\xff", b"\x00", b"1", b"e", b"NaN", b"\\ud800", b"-", b" "]
    ),
    cut=st.integers(0, 2),
)
def test_both_readers_refuse_the_same(value: Any, place: float, junk: bytes, cut: int) -> None:
    text = json.dumps(value).encode()
    at = int(place * len(text))
    broken = text[:at] + junk + text[at + cut :]
    assert outcome(broken + PADDING) == outcome(broken), broken


@pytest.mark.parametrize(
    ("text", "start"),
    [
        (b'{"a": 1, "a": 2}', "Duplicate key 'a'."),
        (b"[NaN]", "NaN is not JSON"),
        (b"[1, -Infinity]", "-Infinity is not JSON"),
        (b'{"a": 1e999}', "1e999 is beyond the range"),
        (b"[1, 1e999, 2]", "1e999 is beyond the range"),
        (b"[" + b"1" * 5000 + b"]", "Could not parse JSON: Exceeds the limit"),
        (b'["\\ud800"]', "The request body contains an unpaired surrogate at byte 2"),
        (b'["\\udc00\\ud800"]', "The request body contains an unpaired surrogate at byte 2"),
        (b'{"\\ud800": 1}', "The request body contains an unpaired surrogate at byte 2"),
        (b'["a\xff"]', "Request body is not valid UTF-8 (byte 3)."),
        (b'["\xed\xa0\x80"]', "Request body is not valid UTF-8 (byte 2)."),
        (b'["a\nb"]', "Could not parse JSON: Invalid control character"),
        (b'["\\x"]', "Could not parse JSON: Invalid \\escape"),
        (b"[1] 2", "Could not parse JSON: Extra data at byte 4."),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "JSON is nested too deeply"),
        (b'{"' + b"k" * (MAX_KEY + 1) + b'": 1}', f"A key has {MAX_KEY + 1} characters"),
        (json.dumps(dict.fromkeys(map(str, range(MAX_KEYS + 1)))).encode(), "An object has more than"),
    ],
)
def test_what_is_refused_is_said(text: bytes, start: str) -> None:
    for data in (text, text + PADDING):
        with pytest.raises(ApiError) as refused:
            read_json(data, LIMIT)
        assert refused.value.message.startswith(start)


def test_pairs_of_surrogates_and_long_strings_survive_the_pieces() -> None:
    for unit in ("\U0001f600", "a", "\n", "\u20ac", "\\", '"'):
        text = "x" + unit * (PIECE // 2)
        for ascii_only in (True, False):
            assert large(json.dumps([text], ensure_ascii=ascii_only).encode()) == [text]


def test_values_are_counted_while_they_are_read() -> None:
    for text in (b"[1" + b",1" * 999 + b"]", b"[" + b'"a",' * 1000 + b"1]", b"[" + b"{}," * 250 + b"1]"):
        with pytest.raises(ApiError) as refused:
            read_json(text + PADDING, 1000)
        assert refused.value.status_code == 413
        assert read_json(text + PADDING, 1010)[1] <= 1010
    with pytest.raises(ApiError) as refused:
        large(b'["' + b"a" * (MAX_STRING + PIECE) + b'"]')
    assert refused.value.status_code == 413


LARGE: dict[str, bytes] = {
    "lists": b"[" + b"[1]," * 50_000 + b"1]",
    "objects in lists": b"[" + b"[{}]," * 30_000 + b"1]",
    "objects": b"[" + b'{"a":1},' * 40_000 + b"1]",
    "keys": b"[" + b",".join(b"{%s}" % b",".join(b'"%d":0' % key for key in range(4000)) for _ in range(40)) + b"]",
    "numbers": b"[" + b"123456," * 250_000 + b"1]",
    "strings": b"[" + b'"ab",' * 250_000 + b"1]",
    "quotes": b'["' + b'\\"' * 2_000_000 + b'"]',
    "escapes": b'["' + b"\\u00e9" * 600_000 + b'"]',
    "pairs": b'["' + b"\\ud83d\\ude00" * 300_000 + b'"]',
    "one string": b'["' + b"a" * 4_000_000 + b'"]',
    "one wide string": b'["' + b"a" * 4_000_000 + "\U0001f600".encode() + b'"]',
    "broken at the end": b'["' + b"a" * 4_000_000 + b'\xff"]',
    "spaces": b"[" + b" " * 15_000_000 + b"1]",
    "digits": b"[" + b"1" * 15_000_000 + b"]",
    "words": b"[" + b"a" * 15_000_000 + b"]",
    "commas": b"[" + b"," * 15_000_000 + b"]",
    "deep": b"[" * 15_000_000,
    "backslashes": b'["' + b"\\" * 4_000_000 + b'"]',
}


@pytest.mark.parametrize("kind", LARGE)
def test_no_piece_that_is_handed_to_c_is_long(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def loads(text: str, **given: Any) -> Any:
        lengths.append(len(text))
        return original(text, **given)

    original = json.loads
    monkeypatch.setattr(strict_json.json, "loads", loads)
    outcome(LARGE[kind])
    assert max(lengths, default=0) <= PIECE + 2


@pytest.mark.parametrize("kind", ["lists", "objects", "keys", "quotes", "numbers"])
def test_the_event_loop_runs_while_a_large_text_is_read(kind: str) -> None:
    async def main() -> None:
        pool = WorkPool()
        work = asyncio.create_task(pool.run(outcome, LARGE[kind]))
        turns = 0
        while not work.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns > 10
        pool.close()

    asyncio.run(main())
