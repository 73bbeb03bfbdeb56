"""The calculator computes arithmetic, and nothing else, in bounded time and space."""

from __future__ import annotations

import pytest

from quire.cli.tools.arithmetic import ArithmeticMistake, evaluate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 * 7", "84"),
        (" (3 + 4) * 5 ", "35"),
        ("7 / 2", "3.5"),
        ("7 // 2", "3"),
        ("-7 % 3", "2"),
        ("2 ** 10", "1024"),
        ("2 ** -2", "0.25"),
        ("0.1 + 0.2", "0.3"),
        ("10 ** 60", "1" + "0" * 60),
        ("1 ** 999999", "1"),
        ("(-1) ** 999999", "-1"),
        ("(-1) ** 999998", "1"),
        ("2 ** 0.5", "1.41421356237"),
        ("1e300 * 1e5", "1e+305"),
        ("+-+5", "-5"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("1 / 0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("9 ** 99999999999", "too large"),
        ("10 ** 100", "too large"),
        ("1e308 * 10", "too large"),
        ("9.9 ** 9999", "too large"),
        ("(-8) ** 0.5", "no real number"),
        ("", "no arithmetic expression"),
        ("12 *", "no arithmetic expression"),
        ("(" * 100 + "1" + ")" * 90, "no arithmetic expression"),
        ("1\0", "no arithmetic expression"),
        ("1\n+ 2", "no arithmetic expression"),
        ("x = 3", "no arithmetic expression"),
        ("1" * 201, "201 characters, 200 are allowed"),
        ("9" * 100, "too large"),
        ("x + 1", "only numbers"),
        ("2 ^ 3", "only numbers"),
        ("~5", "only numbers"),
        ("True + 1", "only numbers"),
        ("1j * 1j", "only numbers"),
        ("'a' * 3", "only numbers"),
        ("[1] * 9", "only numbers"),
        ("__import__('os').getcwd()", "only numbers"),
        ("(1).real", "only numbers"),
        ("1 if 2 else 3", "only numbers"),
        ("1 < 2", "only numbers"),
    ],
)
def test_what_is_refused(expression: str, why: str) -> None:
    with pytest.raises(ArithmeticMistake, match=why.replace("(", r"\(")):
        evaluate(expression)
