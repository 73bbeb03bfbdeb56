"""Jinja for chat templates: sandboxed, bounded, with the extras that templates of the hub expect.

A template comes with the model or from the operator and is not trusted. It sees plain data only and, beyond the sandbox
of jinja2, an allow-list of methods. Every rendering has a budget:

- wall-clock time, checked at each loop iteration, each call and each piece of output;
- characters of output, and characters of all strings made on the way (operators, filters, methods, captured blocks),
  estimated before they are made where one operation can multiply its input;
- a `range` of 100,000 items, widths and indentations of 1,000 characters, numbers of 100,000 bits.

A single filter over data that is already there is not interrupted; its time is linear in that data (sorting: n log n).
"""

from __future__ import annotations

import inspect
import json
import math
import re
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache, wraps
from typing import NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_SOURCE_CHARACTERS = 1_000_000
MAX_WIDTH = 1_000
MAX_BITS = 100_000


class TemplateRefusal(jinja2.TemplateError):
    """The template called `raise_exception`."""


class BudgetExceeded(jinja2.TemplateError):
    """A rendering took too long or grew too large."""


@dataclass(slots=True)
class Budget:
    """What one rendering may use."""

    max_characters: int
    """Of output; ten times as many may be made on the way to it."""
    max_seconds: float
    deadline: float = field(init=False)
    num_made: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.max_seconds

    def check_time(self) -> None:
        """Raises: BudgetExceeded after the deadline."""
        if time.monotonic() > self.deadline:
            raise BudgetExceeded(f"it ran longer than {self.max_seconds:g} seconds")

    def spend(self, num_characters: int) -> None:
        """Account for a string that was, or is about to be, made.

        Raises: BudgetExceeded when all of them together are too much.
        """
        self.num_made += num_characters
        if self.num_made > 10 * self.max_characters:
            raise BudgetExceeded(f"it builds more than {10 * self.max_characters} characters of text")

    def check_output(self, num_characters: int) -> None:
        """Raises: BudgetExceeded for an output that is too long."""
        if num_characters > self.max_characters:
            raise BudgetExceeded(f"its output has more than {self.max_characters} characters")


_budget: ContextVar[Budget] = ContextVar("template_budget")


@contextmanager
def _within(budget: Budget) -> Iterator[None]:
    token = _budget.set(budget)
    try:
        yield
    finally:
        _budget.reset(token)


def render(template: jinja2.Template, variables: Mapping[str, object], budget: Budget) -> str:
    """The text of a template.

    Raises: BudgetExceeded and other jinja2 errors, and whatever Python errors the template provokes.
    """
    pieces: list[str] = []
    num_characters = 0
    with _within(budget):
        for piece in template.generate(variables):
            budget.check_time()
            num_characters += len(piece)
            budget.check_output(num_characters)
            pieces.append(piece)
    return "".join(pieces)


def parse(source: str) -> nodes.Template:
    """The syntax tree of a template, as it was written.

    Raises: jinja2.TemplateSyntaxError; RecursionError for expressions that are nested too deeply.
    """
    if len(source) > MAX_SOURCE_CHARACTERS:
        raise jinja2.TemplateSyntaxError(f"it is longer than {MAX_SOURCE_CHARACTERS} characters", 1)
    return _ENVIRONMENT.parse(source)


@lru_cache(maxsize=32)
def compiled(source: str) -> jinja2.Template:
    """The template, compiled once.

    Raises: as `parse`; SyntaxError for blocks that are nested too deeply.
    """
    tree = parse(source)
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = _filtered("_each", loop.iter, [])
    for concat in list(tree.find_all(nodes.Concat)):
        concat.nodes = [_filtered("_concat", concat.nodes[0], concat.nodes[1:])]
    with _within(Budget(max_characters=MAX_SOURCE_CHARACTERS, max_seconds=math.inf)):  # constants are folded now
        return _ENVIRONMENT.from_string(tree)


def _filtered(name: str, node: nodes.Node, args: list[nodes.Expr]) -> nodes.Filter:
    made = nodes.Filter(node, name, args, [], None, None, lineno=node.lineno)
    made.set_environment(_ENVIRONMENT)
    return made


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment in which all chat templates are compiled."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            finalize=_finalize,
        )
        known = {**self.filters, "tojson": _to_json}
        self.filters = {name: _bounded(known[name], _FILTER_ESTIMATES.get(name)) for name in _FILTERS}
        self.filters.update(_each=_each, _concat=_concat)
        self.globals = {
            "range": self.globals["range"],
            "dict": _make_dict,
            "namespace": _make_namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        """Whether a template may read `obj.attr`: of plain data only the listed methods."""
        allowed = next((names for kind, names in _METHODS if isinstance(obj, kind)), None)
        return (allowed is None or attr in allowed) and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Apply an operator whose result may be much larger than its operands."""
        _budget.get().spend(_binop_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Call a function, macro or method from a template."""
        budget = _budget.get()
        budget.check_time()
        receiver, name = _method(__obj)
        if name in _METHOD_ESTIMATES:
            budget.spend(_METHOD_ESTIMATES[name](receiver, *args, **kwargs))
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str):
            budget.spend(len(result))
        return result


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; here it is only its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """A scope with the block's statements."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _TemplateNamespace(Namespace):
    """jinja2's namespace without names that Python gives a meaning."""

    def __setitem__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}: it begins with an underscore")
        super().__setitem__(name, value)


def _make_namespace(*args: Mapping[str, object], **kwargs: object) -> Namespace:
    namespace = _TemplateNamespace()
    for name, value in dict(*args, **kwargs).items():
        namespace[name] = value
    return namespace


def _make_dict(*args: Mapping[str, object], **kwargs: object) -> dict[str, object]:
    return dict(*args, **kwargs)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: jinja2's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _each(values: Iterable[object]) -> Iterator[object]:
    """The items of a loop, with a look at the clock before each."""
    budget = _budget.get()
    for value in values:
        budget.check_time()
        yield value


def _concat(*values: object) -> str:
    """The `~` operator."""
    _budget.get().spend(sum(map(_size, values)))
    return "".join(map(str, values))


def _finalize(value: object) -> object:
    """What `{{ value }}` writes; counted here, because blocks can be captured and written again."""
    _budget.get().spend(_size(value))
    return value


def _bounded(filter_: Callable[..., object], estimate: Estimate | None) -> Callable[..., object]:
    """A filter that keeps to the budget."""

    @wraps(filter_)
    def bounded(*args: object, **kwargs: object) -> object:
        budget = _budget.get()
        budget.check_time()
        if estimate is not None:
            budget.spend(estimate(*_without_context(args), **kwargs))
        result = filter_(*args, **kwargs)
        if isinstance(result, str):
            budget.spend(len(result))
        return result

    return bounded


def _without_context(args: tuple[object, ...]) -> tuple[object, ...]:
    return args[1:] if isinstance(args[0], (jinja2.Environment, Context, nodes.EvalContext)) else args


def _method(function: object) -> tuple[object, str]:
    """(object, name) of a method of a string; (None, "") for any other function."""
    if isinstance(function, (types.FunctionType, types.BuiltinMethodType)):
        target = inspect.unwrap(function)  # the sandbox wraps str.format
        if isinstance(target, types.BuiltinMethodType) and isinstance(target.__self__, str):
            return target.__self__, target.__name__
    return None, ""


def _size(value: object) -> int:
    """Characters that `value` has as text, about; more than the budget when it is too much to count."""
    if isinstance(value, str):
        return len(value)
    budget = _budget.get()
    limit = 10 * budget.max_characters
    total, stack = 0, [value]
    while stack and total <= limit:
        item = stack.pop()
        if total % 4096 < 8:
            budget.check_time()
        total += len(item) if isinstance(item, str) else 8
        if isinstance(item, Mapping):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
        elif isinstance(item, int):
            total += item.bit_length() // 3
    return total


def _binop_size(operator: str, left: object, right: object) -> int:
    """Characters (or eighths of list items) that `left operator right` makes, at most.

    Raises: BudgetExceeded for numbers of too many bits.
    """
    if operator == "%":
        return _printf_size(left, right) if isinstance(left, str) else 0
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(operator, left, right)
        return 0
    if operator == "*":
        sequence, count = (left, right) if isinstance(right, int) else (right, left)
        return _length(sequence) * max(count, 0) if isinstance(count, int) else 0
    return _length(left) + _length(right)


def _check_bits(operator: str, left: int, right: int) -> None:
    num_bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
    if num_bits > MAX_BITS:
        raise BudgetExceeded(f"it computes a number of more than {MAX_BITS} bits")


def _length(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    return 8 * len(value) if isinstance(value, (list, tuple)) else 0


_NUMBER = re.compile(r"\d+")
_WIDTH_FROM_ARGUMENT = re.compile(r"\*|:[^{}]*\{")


def _printf_size(pattern: str, values: object) -> int:
    return _format_size(pattern, *(values if isinstance(values, tuple) else (values,)))


def _format_size(pattern: object, *args: object, **kwargs: object) -> int:
    """Characters that a format string makes of its arguments, at most."""
    text = str(pattern)
    values = [*args, *kwargs.values()]
    num_fields = text.count("%") + text.count("{")
    widths = sum(_width(int(number[:9])) for number in _NUMBER.findall(text))
    if _WIDTH_FROM_ARGUMENT.search(text):
        widths += num_fields * sum(_width(value) for value in values if isinstance(value, int))
    return len(text) + widths + num_fields * max(map(_size, values), default=0)


def _width(value: object) -> int:
    """Raises: BudgetExceeded for a width, precision or indentation that no text needs."""
    width = len(value) if isinstance(value, str) else abs(value) if isinstance(value, int) else 0
    if width > MAX_WIDTH:
        raise BudgetExceeded(f"it asks for a width of {width} characters, more than {MAX_WIDTH}")
    return width


def _padded_size(text: object, width: object = 80, *_: object, **named: object) -> int:
    return _size(text) + _width(named.get("width", width))


def _replace_size(text: object, old: object, new: object, *_: object, **__: object) -> int:
    whole = str(text)
    return len(whole) + whole.count(str(old)) * len(str(new))


def _join_size(separator: object, items: object) -> int:
    values = items if isinstance(items, (list, tuple)) else ()
    return _size(items) + len(str(separator)) * len(values)


def _join_filter_size(items: object, d: object = "", *_: object, **named: object) -> int:
    return _join_size(named.get("d", d), items)


def _indent_size(text: object, width: object = 4, *_: object, **named: object) -> int:
    whole = str(text)
    return len(whole) + (whole.count("\n") + 1) * _width(named.get("width", width))


def _json_size(value: object, ensure_ascii: object = False, indent: object = None, *_: object, **named: object) -> int:
    return _size(value) * (2 + _width(named.get("indent", indent)))


def _text_size(value: object) -> int:
    return _size(value)


def _sum_size(value: object, attribute: object = None, start: object = 0, **_: object) -> int:
    if not isinstance(start, (int, float)):
        raise TypeError("sum adds numbers only")
    return 0


Estimate = Callable[..., int]
_METHOD_ESTIMATES: dict[str, Estimate] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded_size),
    "format": _format_size,
    "join": _join_size,
    "replace": _replace_size,
}
_FILTER_ESTIMATES: dict[str, Estimate] = {
    "center": _padded_size,
    "format": _format_size,
    "indent": _indent_size,
    "join": _join_filter_size,
    "replace": _replace_size,
    "string": _text_size,
    "sum": _sum_size,
    "tojson": _json_size,
}
_FILTERS = """
    abs batch capitalize center count d default dictsort e escape first float forceescape format groupby indent int
    items join last length list lower map max min reject rejectattr replace reverse round safe select selectattr sort
    string striptags sum title tojson trim truncate unique upper urlencode wordcount
""".split()  # noqa: SIM905  ninety quoted names would be a page
_STRING_METHODS = """
    capitalize casefold center count endswith find format index isalnum isalpha isdecimal isdigit islower isnumeric
    isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex rjust
    rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill
""".split()  # noqa: SIM905  ninety quoted names would be a page
_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (str, frozenset(_STRING_METHODS)),
    (dict, frozenset(("copy", "get", "items", "keys", "values"))),
    (list, frozenset(("copy", "count", "index"))),
    (tuple, frozenset(("count", "index"))),
    (int, frozenset()),
    (float, frozenset(("is_integer",))),
    (bytes, frozenset()),
)
_ENVIRONMENT = TemplateEnvironment()
