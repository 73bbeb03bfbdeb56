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
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
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

from quire.tokenizer.template_budget import (
    FILTER_ESTIMATES,
    METHOD_ESTIMATES,
    Budget,
    Estimate,
    current_budget,
    operator_size,
    size_of,
    within,
)

MAX_SOURCE_CHARACTERS = 1_000_000


class TemplateRefusal(jinja2.TemplateError):
    """The template called `raise_exception`."""


def render(template: jinja2.Template, variables: Mapping[str, object], budget: Budget) -> str:
    """The text of a template.

    Raises: BudgetExceeded and other jinja2 errors, and whatever Python errors the template provokes.
    """
    pieces: list[str] = []
    num_characters = 0
    with within(budget):
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
    with within(Budget(max_characters=MAX_SOURCE_CHARACTERS, max_seconds=math.inf)):  # constants are folded now
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
        self.filters = {name: _bounded(known[name], FILTER_ESTIMATES.get(name)) for name in _FILTERS}
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
        current_budget().spend(operator_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Call a function, macro or method from a template."""
        budget = current_budget()
        budget.check_time()
        receiver, name = _method(__obj)
        if name in METHOD_ESTIMATES:
            budget.spend(METHOD_ESTIMATES[name](receiver, *args, **kwargs))
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
    budget = current_budget()
    for value in values:
        budget.check_time()
        yield value


def _concat(*values: object) -> str:
    """The `~` operator."""
    current_budget().spend(sum(map(size_of, values)))
    return "".join(map(str, values))


def _finalize(value: object) -> object:
    """What `{{ value }}` writes; counted here, because blocks can be captured and written again."""
    current_budget().spend(size_of(value))
    return value


def _bounded(filter_: Callable[..., object], estimate: Estimate | None) -> Callable[..., object]:
    """A filter that keeps to the budget."""

    @wraps(filter_)
    def bounded(*args: object, **kwargs: object) -> object:
        budget = current_budget()
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


_FILTERS = """
    abs batch capitalize center count d default dictsort e escape first float forceescape format groupby indent int
    items join last length list lower map max min reject rejectattr replace reverse round safe select selectattr sort
    string sum title tojson trim truncate unique upper urlencode wordcount
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
