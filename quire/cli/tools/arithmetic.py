"""A calculator for text that a model wrote: numbers and operators alone, with bounds on time and size."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

Number = int | float
MAX_CHARACTERS = 200
MAX_BITS = 256
"""Of an integer, about 77 digits."""


class ArithmeticMistake(ValueError):
    """An expression that has no value here; the message says why."""


def evaluate(expression: str) -> str:
    """The value of an expression such as `(3 + 4) * 5 / 2`: integers exactly, other numbers with 12 digits.

    Raises: ArithmeticMistake.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ArithmeticMistake(f"the expression has {len(expression)} characters, {MAX_CHARACTERS} are allowed")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        value = _bounded(_value(tree.body))
    except ArithmeticMistake:
        raise
    except ZeroDivisionError:
        raise ArithmeticMistake("division by zero") from None
    except OverflowError:
        raise ArithmeticMistake("the result is too large") from None
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # what the parser says is about Python
        raise ArithmeticMistake("this is no arithmetic expression") from None
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _SIGNS:
            return _SIGNS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _bounded(_OPERATORS[type(op)](_value(left), _value(right)))
    raise ArithmeticMistake("only numbers, parentheses and + - * / // % ** are allowed")


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > 2 * MAX_BITS:
        if abs(base) > 1:
            raise OverflowError
        exponent %= 2  # -1, 0 and 1 stay small; the parity of the exponent decides
        return int(base ** (exponent or 2))
    value: Number | complex = base**exponent
    if isinstance(value, complex):
        raise ArithmeticMistake("the result is no real number")
    return value


def _bounded(value: Number) -> Number:
    too_large = value.bit_length() > MAX_BITS if isinstance(value, int) else not math.isfinite(value)
    if too_large:
        raise OverflowError
    return value


_SIGNS: dict[type, Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_OPERATORS: dict[type, Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
