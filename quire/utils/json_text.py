"""JSON texts inside requests and answers: no constants that JSON does not have, and no number beyond a float's range.

`json` reads NaN and Infinity, and takes 1e999 for infinity. Whoever writes such a value again writes no JSON.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from quire.errors import shown


class NoJsonNumber(ValueError):
    """A constant that JSON does not have, or a number that no float holds."""


def finite(text: str) -> float:
    """The number that a text spells. Raises: NoJsonNumber."""
    value = float(text)
    if math.isinf(value):
        raise NoJsonNumber(f"{shown(text)[1:-1]} is beyond the range of numbers; they must be finite")
    return value


def no_constant(name: str) -> NoReturn:
    """Raises: NoJsonNumber."""
    raise NoJsonNumber(f"{name} is not JSON; numbers must be finite")


def loads(text: str, *, strict: bool = True) -> Any:
    """The value of a JSON text. `strict`: its strings hold no line breaks as they are.

    Raises: ValueError, RecursionError.
    """
    return json.loads(text, strict=strict, parse_constant=no_constant, parse_float=finite)


def is_json(text: str) -> bool:
    """Whether a text is JSON, whatever its numbers are."""
    try:
        json.loads(text, parse_constant=no_constant, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return True


def is_beyond(value: object) -> bool:
    """Whether a value is a number that is infinite as a float, or none."""
    if isinstance(value, int) and value.bit_length() > 1023:
        try:
            float(value)
        except OverflowError:
            return True
    return isinstance(value, float) and not math.isfinite(value)
