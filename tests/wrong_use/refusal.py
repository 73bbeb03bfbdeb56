"""What a refusal is: one class, one paragraph, the words that a user needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quire.errors import InvalidParameter, QuireError, UnsupportedFeature

MAX_LENGTH = 900


@contextmanager
def refused(cls: type[QuireError], *parts: str, parameter: str | None = None) -> Iterator[None]:
    """The block raises exactly `cls`, in one paragraph that contains `parts`; `parameter` names the field."""
    with pytest.raises(QuireError) as caught:
        yield
    error = caught.value
    assert type(error) is cls, repr(error)
    assert str(error) == error.message
    for part in parts:
        assert part in error.message
    assert "\n\n" not in error.message
    assert all(len(line) < MAX_LENGTH for line in error.message.splitlines())  # a checkpoint lists its problems
    assert "Traceback" not in error.message
    if parameter is not None:
        assert isinstance(error, (InvalidParameter, UnsupportedFeature))
        assert error.parameter == parameter
