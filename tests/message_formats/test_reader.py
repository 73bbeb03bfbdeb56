"""The reader: what is read can be given back, in whatever pieces it came."""

from __future__ import annotations

import pytest

from quire.message_formats.reader import MAX_DEPTH, Malformed, Reader, Steps


def run(text: str, steps: Steps[object], reader: Reader) -> object:
    """Feed a text character by character; the result."""
    try:
        next(steps)
        for character in text:
            reader.feed(character)
            next(steps)
        reader.is_closed = True
        next(steps)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits for ever")


def test_white_space_that_leads_to_nothing_is_given_back() -> None:
    reader = Reader()

    def steps() -> Steps[object]:
        reader.keep()
        yield from reader.expect("ab")
        found = [(yield from reader.accept_after_spaces("x")), (yield from reader.after_spaces())]
        kept = reader.kept()
        return [*found, kept, (yield from reader.spaces()), (yield from reader.accept("c")), reader.kept()]

    assert run("ab \n\t c", steps(), reader) == [False, "c", "ab", " \n\t ", True, "ab \n\t c"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, "}]", {}], "b": -1.5e+3} x', '{"a": [1, "}]", {}], "b": -1.5e+3}'),
        ('"a\\"b\\\\" x', '"a\\"b\\\\"'),
        ("true}", "true"),
        (" \n12,", "12"),
        ("[" * MAX_DEPTH + "]" * MAX_DEPTH, "[" * MAX_DEPTH + "]" * MAX_DEPTH),
        ("[" * (MAX_DEPTH + 1), None),
        ("]", None),
        ("", None),
        ("{", None),
        ('"a', None),
        ('"a\\', None),
        ("[\udc80]", None),
        ("{'a': 1}", None),
    ],
)
def test_the_extent_of_a_json_value(text: str, value: str | None) -> None:
    reader, pieces = Reader(), list[str]()
    if value is None:
        with pytest.raises(Malformed):
            run(text, reader.json(pieces.append), reader)
    else:
        run(text, reader.json(pieces.append), reader)
        assert "".join(pieces) == value
