"""What each operation of a chat template costs: the filters, tests, methods and functions there are.

The tables are allow-lists: an operation without a rule does not exist. A rule takes the operands and charges the
current budget before the operation runs. Values count as trees (what is shared counts each time it is reached).
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from typing import TypeGuard

from markupsafe import Markup

from quire.tokenizer.template_budget import (
    MAX_BITS,
    MAX_WIDTH,
    BudgetExceeded,
    Weight,
    current_budget,
    weigh,
)

Rule = Callable[..., None]
ITEM_CHARACTERS = 64
"""What a list item with a short string of its own takes, in characters."""
MAX_PATTERN = 200
"""Characters of a date format."""


def nothing(*_: object, **__: object) -> None:
    """For operations of constant time, whatever their operands."""


def walk(*operands: object, **named: object) -> Weight:
    """Charge one visit of everything."""
    weight = weigh(*operands, *named.values())
    current_budget().operate(weight.steps)
    return weight


def read(*operands: object, **named: object) -> None:
    """For operations that visit everything once and make little."""
    walk(*operands, **named)


def write(*operands: object, **named: object) -> None:
    """For operations that make text as long as their operands."""
    current_budget().reserve(walk(*operands, **named).text)


def chew(*operands: object, **named: object) -> None:
    """For operations that work on each character, and make up to three of one."""
    text = walk(*operands, **named).text
    current_budget().operate(text // 8)
    current_budget().reserve(3 * text)


def encode(*operands: object, **named: object) -> None:
    """As `chew`, for up to twelve characters of one (`%F0%9F%98%80`)."""
    chew(*operands, **named)
    current_budget().reserve(12 * weigh(*operands).text)


def cut_words(text: object) -> None:
    """For filters that make a list of all words."""
    weight = walk(text)
    current_budget().operate(weight.text)
    current_budget().reserve(3 * weight.text)


def items(values: object, *operands: object, **named: object) -> None:
    """For operations that visit the items of a list, but not what is inside them."""
    path = walk(*operands, **named).num_characters
    current_budget().operate(_length(values) * (1 + path // 8))


def copy_items(values: object, *operands: object, **named: object) -> None:
    """As `items`, for operations that make a list."""
    items(values, *operands, **named)
    current_budget().reserve(_length(values) * (ITEM_CHARACTERS if isinstance(values, str) else 8))


def order(values: object, *operands: object, **named: object) -> None:
    """For sorting: each item is compared with log2(n) others, its attributes looked up first."""
    num_values = _length(values)
    items(values, *operands, **named)
    current_budget().operate(walk(values).steps * num_values.bit_length())
    current_budget().reserve(8 * num_values)


def distinct(values: object, *operands: object, **named: object) -> None:
    """For sets: numbers can be chosen so that all of them collide."""
    items(values, *operands, **named)
    walk(values)
    if operands or named or not (isinstance(values, list) and all(isinstance(value, str) for value in values)):
        current_budget().operate(_length(values) ** 2 // 64)


def _length(values: object) -> int:
    return len(values) if isinstance(values, _SIZED) else 1


_VIEWS = (KeysView, ValuesView, ItemsView)
_SIZED = (str, list, tuple, dict, range, *_VIEWS)


def pad(text: object, width: object = 80, *_: object, **named: object) -> None:
    """For operations that fill up to a width."""
    current_budget().reserve(walk(text).text + _width(named.get("width", width)))


def indent(text: object, width: object = 4, *operands: object, **named: object) -> None:
    """For the filter of that name."""
    if not isinstance(text, str):
        raise TypeError("indent takes text")
    chew(text)
    lines = len(text.splitlines()) + 1
    current_budget().reserve(len(text) + lines * (ITEM_CHARACTERS + _width(named.get("width", width))))


def replace(text: object, old: object, new: object, *operands: object, **named: object) -> None:
    """For method and filter of that name."""
    write(text, old, new, *operands, **named)
    whole = str(text)
    current_budget().reserve(len(whole) + whole.count(str(old)) * _escaped(new, text) * len(str(new)))


def _escaped(*values: object) -> int:
    """How many times longer a value may become beside text that is marked as HTML."""
    return 6 if any(isinstance(value, Markup) for value in values) else 1


def split(text: object, separator: object = None, *operands: object, **named: object) -> None:
    """For methods that cut text into a list."""
    walk(text, separator, *operands, **named)
    if not isinstance(text, str):
        return
    separator = named.get("sep", separator)
    parts = text.count(separator) if isinstance(separator, str) and separator else len(text) // 2
    current_budget().operate(parts)
    current_budget().reserve(len(text) + parts * ITEM_CHARACTERS)


def split_lines(text: str, *operands: object, **named: object) -> None:
    """For `splitlines`."""
    chew(text, *operands, **named)
    current_budget().operate(len(text.splitlines()))


def split_from_right(text: object, separator: object = None, *operands: object, **named: object) -> None:
    """For `rsplit`: its search is quadratic at worst."""
    split(text, separator, *operands, **named)
    search_from_right(text, named.get("sep", separator))


def search_from_right(text: object, part: object = None, *operands: object, **named: object) -> None:
    """For methods whose search takes the product of both lengths at worst."""
    write(text, part, *operands, **named)
    if isinstance(text, str) and isinstance(part, str) and len(part) > 1:
        current_budget().operate(len(text) * len(part) // 128)


def strip(text: object, characters: object = None, *_: object, **named: object) -> None:
    """For methods that look each character up in a set of characters."""
    characters = named.get("chars", characters)
    write(text, characters)
    if isinstance(text, str) and isinstance(characters, str):
        current_budget().operate(len(text) * len(characters) // 256)


def join_items(separator: object, values: object, *_: object) -> None:
    """For the method `join`."""
    weight = walk(separator, values)
    separators = len(str(separator)) * _length(values)
    text = weight.text + separators
    current_budget().reserve(text * _escaped(separator))


def join(values: object, d: object = "", attribute: object = None) -> None:
    """For the filter of that name."""
    items(values, attribute)
    write(d)
    join_items(d, values)


def to_json(value: object, ensure_ascii: object = False, indent: object = None, *_: object, **named: object) -> None:
    """For the filter of that name."""
    width = _width(indent)
    weight = walk(value)
    separators = walk(*_, **named).num_characters
    current_budget().operate(weight.num_characters // 32)
    longest = 12 if ensure_ascii else 6
    current_budget().reserve(longest * weight.num_characters + weight.num_values * (8 + separators + width * 8))


def batch(values: object, linecount: object, *operands: object, **named: object) -> None:
    """For the filter of that name."""
    copy_items(values, *operands, **named)
    current_budget().reserve(_width(linecount) * 8)


def total(values: object, attribute: object = None, start: object = 0) -> None:
    """For `sum`."""
    if not isinstance(start, (int, float)):
        raise TypeError("sum adds numbers only")
    items(values, attribute)
    walk(values)


def round_number(value: object, precision: object = 0, *_: object, **__: object) -> None:
    """For `round`: without bounds, ten is raised to the precision."""
    if not isinstance(value, (int, float)):
        raise TypeError("round takes a number")
    _width(precision)


def numbers(*values: object) -> None:
    """For tests that use `%`, which formats text."""
    if not all(isinstance(value, (int, float)) for value in values):
        raise TypeError("this test takes numbers")


def date(pattern: object) -> None:
    """For `strftime_now`."""
    if isinstance(pattern, str) and len(pattern) > MAX_PATTERN:
        raise BudgetExceeded(f"it asks for a date with a format of more than {MAX_PATTERN} characters")


def mapping(*given: object, **named: object) -> None:
    """For `dict` and `namespace`, which hash the keys of pairs."""
    current_budget().operate(len(named))
    for value in given:
        if isinstance(value, dict):
            copy_items(value)
        else:
            walk(value)
            current_budget().operate(_length(value) ** 2 // 64)


def _width(value: object) -> int:
    """Raises: BudgetExceeded for a width, precision or indentation that no text needs."""
    width = len(value) if isinstance(value, str) else abs(value) if isinstance(value, int) else 0
    if width > MAX_WIDTH:
        raise BudgetExceeded(f"it asks for a width of {min(width, 10**30)} characters, more than {MAX_WIDTH}")
    return width


# Comparisons


def _is_container(value: object) -> bool:
    return not isinstance(value, (str, int, float, type(None)))


def compare(left: object, right: object) -> None:
    """For `==`, `<` and the like: they walk both sides where both are containers."""
    if isinstance(left, str) and isinstance(right, str):
        current_budget().operate(min(len(left), len(right)) // 64)
    elif _is_container(left) and _is_container(right):
        walk(left, right)


def contain(value: object, values: object) -> None:
    """For `in`."""
    if isinstance(values, str):
        walk(value, values)
    elif isinstance(values, dict):
        walk(value)
    elif _is_container(value):
        walk(values)
        current_budget().operate(_length(values) + walk(value).steps)
    else:
        length = _length(values) if isinstance(values, (list, tuple, range)) else walk(values).num_values
        current_budget().operate(length * (1 + walk(value).steps))


def find_item(values: object, value: object, *_: object) -> None:
    """For `count` and `index` of lists."""
    contain(value, values)


# Operators and formats


def binary(operator: str, left: object, right: object) -> None:
    """Charge `left operator right`.

    Raises: BudgetExceeded; TypeError for operands that no template adds or multiplies.
    """
    if _is_number(left) and _is_number(right):
        _arithmetic(operator, left, right)
    elif operator == "%" and isinstance(left, str):
        printf(left, *(right if isinstance(right, tuple) else (right,)))
    elif operator == "*":
        sequence, count = (left, right) if isinstance(right, int) else (right, left)
        _repeat(sequence, count)
    elif operator == "+" and type(left) in _SEQUENCES and type(right) in _SEQUENCES:
        factor = _escaped(left, right)
        current_budget().operate(sum(_shallow(value) for value in (left, right)))
        current_budget().reserve(sum(map(_extent, (left, right))) * factor)
    elif isinstance(left, _VIEWS) or isinstance(right, _VIEWS):
        raise TypeError(f"unsupported operands for {operator}: {type(left).__name__} and {type(right).__name__}")


_SEQUENCES = (str, Markup, list, tuple)


def _is_number(value: object) -> TypeGuard[int | float | complex]:
    return isinstance(value, (int, float, complex))


def _shallow(value: object) -> int:
    return len(value) // 64 if isinstance(value, str) else _length(value)


def _extent(value: object) -> int:
    return len(value) if isinstance(value, str) else 8 * _length(value)


def _repeat(sequence: object, count: object) -> None:
    if isinstance(count, int) and isinstance(sequence, _SEQUENCES):
        times = max(count, 0)
        current_budget().reserve(_extent(sequence) * times)
        current_budget().operate(_shallow(sequence) * times)


def _arithmetic(operator: str, left: complex, right: complex) -> None:
    if not (isinstance(left, int) and isinstance(right, int)):
        return
    num_bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
    if num_bits > MAX_BITS:
        raise BudgetExceeded(f"it computes a number of more than {MAX_BITS} bits")
    current_budget().step(num_bits // 512)


def printf(pattern: object, *args: object, **kwargs: object) -> None:
    """For `%` and the filter `format`."""
    walk(pattern, *args, **kwargs)
    values = [*args, *kwargs.values()]
    text, size, num_fields = str(pattern), 0, 0
    largest = max((weigh(value).text for value in values), default=0)
    for field in _printf_fields(text):
        num_fields += 1
        size += largest * (10 if field[-1:] in "ra" else 1)
        size += sum(_width(int(number[:9])) for number in _NUMBER.findall(field))
        size += sum(_width(value) for value in values if isinstance(value, int)) if "*" in field else 0
    current_budget().operate(num_fields)
    current_budget().reserve((len(text) + size) * _escaped(pattern))


def field(value: object, specification: str) -> None:
    """For a field of `str.format`."""
    widths = sum(_width(int(number[:9])) for number in _NUMBER.findall(specification))
    current_budget().step(len(specification) // 64)
    current_budget().reserve(10 * walk(value).text + widths)


def cut(values: object) -> None:
    """For slices."""
    current_budget().operate(1 + _shallow(values))
    current_budget().reserve(_extent(values))


_NUMBER = re.compile(r"\d+")
_FLAGS = re.compile(r"[^a-zA-Z%]*")


def _printf_fields(pattern: str) -> Iterator[str]:
    """What follows the key of each field, up to its type, as Python reads them: keys may hold brackets in pairs."""
    position = pattern.find("%")
    while 0 <= position < len(pattern):
        position += 1
        if pattern.startswith("(", position):
            position = _end_of_key(pattern, position)
        match = _FLAGS.match(pattern, position)
        assert match is not None
        yield pattern[position : match.end() + 1]
        position = pattern.find("%", match.end() + 1)


def _end_of_key(pattern: str, position: int) -> int:
    depth = 0
    for match in re.compile(r"[()]").finditer(pattern, position):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    return len(pattern)


# The tables

FILTERS: dict[str, Rule] = {
    **dict.fromkeys(("count", "d", "default", "first", "last", "length"), nothing),
    **dict.fromkeys(("abs", "float", "int"), read),
    **dict.fromkeys(("string", "truncate"), write),
    **dict.fromkeys(("capitalize", "lower", "upper"), chew),
    **dict.fromkeys(("e", "escape", "forceescape", "urlencode"), encode),
    **dict.fromkeys(("title", "wordcount"), cut_words),
    **dict.fromkeys(("items", "map", "reject", "rejectattr", "select", "selectattr"), items),
    **dict.fromkeys(("list", "reverse"), copy_items),
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort"), order),
    "batch": batch,
    "center": pad,
    "format": printf,
    "indent": indent,
    "join": join,
    "replace": replace,
    "round": round_number,
    "safe": write,
    "sum": total,
    "tojson": to_json,
    "trim": strip,
    "unique": distinct,
}
_WRITERS = frozenset((chew, cut_words, encode, pad, replace, strip, write))


def writes_out(rule: Rule, operands: tuple[object, ...]) -> bool:
    """Whether a filter writes a list or object as text, with the escapes of Python."""
    if rule is printf:
        return True
    if rule is join:
        return isinstance(operands[0], list) and not all(isinstance(item, str) for item in operands[0])
    return rule in _WRITERS and not isinstance(operands[0], str)


_GLANCES = """
    boolean callable defined escaped false float integer iterable mapping none number sameas sequence string true
    undefined
""".split()  # noqa: SIM905  as the names below
_COMPARISONS = "== eq equalto != ne > gt greaterthan ge >= < lt lessthan <= le".split()  # noqa: SIM905
TESTS: dict[str, Rule] = {
    **dict.fromkeys(_GLANCES, nothing),
    **dict.fromkeys(_COMPARISONS, compare),
    **dict.fromkeys(("odd", "even", "divisibleby"), numbers),
    **dict.fromkeys(("lower", "upper"), chew),
    **dict.fromkeys(("filter", "test"), read),
    "in": contain,
}
_CASES = """
    capitalize casefold isalnum isalpha isdecimal isdigit islower isnumeric isspace istitle isupper lower swapcase title
    upper
""".split()  # noqa: SIM905  ninety quoted names would be a page
_SEARCHES = """
    count endswith find index partition removeprefix removesuffix startswith
""".split()  # noqa: SIM905
METHODS: dict[type, dict[str, Rule]] = {
    str: {
        **dict.fromkeys(_CASES, chew),
        **dict.fromkeys(_SEARCHES, write),
        **dict.fromkeys(("center", "ljust", "rjust", "zfill"), pad),
        **dict.fromkeys(("lstrip", "rstrip", "strip"), strip),
        **dict.fromkeys(("rfind", "rindex", "rpartition"), search_from_right),
        "format": read,
        "join": join_items,
        "replace": replace,
        "rsplit": split_from_right,
        "split": split,
        "splitlines": split_lines,
    },
    dict: {
        "copy": copy_items,
        "get": lambda _, *key: read(*key[:1]),
        **dict.fromkeys(("items", "keys", "values"), nothing),
    },
    list: {"copy": copy_items, "count": find_item, "index": find_item},
    tuple: {"count": find_item, "index": find_item},
    float: {"is_integer": nothing},
}
"""Of the first kind that fits a value; `format` charges each field as it is filled."""
LAZY = frozenset((nothing, compare, numbers))
"""Rules of operations that leave iterators as they are; elsewhere they are read into lists first."""
