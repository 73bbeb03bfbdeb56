"""Jinja for chat templates: sandboxed, bounded, with the extras that templates of the hub expect.

A template comes with the model or from the operator and is not trusted. It sees plain data only. Whatever it may do is
on a list: syntax here (`_NODES`), attributes (`_ATTRIBUTES`), filters, tests and methods with what each of them costs
(`template_rules`). Operators, comparisons, literals and captured text become filters of our own before the template is
compiled, so that everything that walks or makes a value is charged first. Nothing is computed at compile time.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import cache, lru_cache, wraps
from string import Formatter
from typing import Any, NoReturn, cast

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.meta import TrackingCodeGenerator
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from quire.tokenizer import template_rules as rules
from quire.tokenizer.special_text import with_marks
from quire.tokenizer.template_budget import Budget, current_budget, within

MAX_SOURCE_CHARACTERS = 200_000
MAX_SOURCE_NODES = 15_000
"""Of the syntax tree. Python compiles that many in some 0.2 s, in which no other thread runs."""
MAX_SOURCE_DEPTH = 100


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
    try:
        tree = _ENVIRONMENT.parse(source)
    except ValueError as error:  # a number of more digits than Python reads
        raise jinja2.TemplateSyntaxError(str(error), 1) from error
    _check_tree(tree)
    return tree


def _check_tree(tree: nodes.Template) -> None:
    level: list[nodes.Node] = [tree]
    num_nodes = depth = 0
    while level:
        depth += 1
        num_nodes += len(level)
        if depth > MAX_SOURCE_DEPTH:
            raise RecursionError(f"more than {MAX_SOURCE_DEPTH} levels")
        if num_nodes > MAX_SOURCE_NODES:
            raise jinja2.TemplateSyntaxError(f"it has more than {MAX_SOURCE_NODES} parts", level[0].lineno)
        for node in level:
            _check_node(node)
        level = [child for node in level for child in node.iter_child_nodes()]


def _check_node(node: nodes.Node) -> None:
    if not isinstance(node, _NODES):
        raise jinja2.TemplateSyntaxError(f"{type(node).__name__} is not supported in chat templates", node.lineno)
    if isinstance(node, nodes.Const) and not _is_finite(node.value):
        raise jinja2.TemplateSyntaxError("a number in it is too large", node.lineno)


def _is_finite(value: object) -> bool:
    if isinstance(value, int):
        return value.bit_length() < 4096
    return not isinstance(value, float) or math.isfinite(value)


def variables(tree: nodes.Template) -> frozenset[str]:
    """The names that a template reads and does not set, found without computing its constants as jinja2.meta does."""
    finder = TrackingCodeGenerator(_ENVIRONMENT)
    finder.optimizer = None
    finder.visit(tree)
    return frozenset(finder.undeclared_identifiers)


@lru_cache(maxsize=32)
def compiled(source: str) -> jinja2.Template:
    """The template, compiled once.

    Raises: as `parse`; SyntaxError for blocks that are nested too deeply.
    """
    return _ENVIRONMENT.from_string(_Charged().visit(parse(source)))


class _Charged(NodeTransformer):
    """Puts our filters where a template walks or makes values without calling anything."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered("_each", node.iter)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        pairs = [(nodes.Const(operand.op, lineno=node.lineno), operand.expr) for operand in node.ops]
        return _filtered("_compare", node.expr, *(part for pair in pairs for part in pair))

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered("_concat", *node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        return _filtered("_slice", node.node, *(bound or nodes.Const(None, lineno=node.lineno) for bound in bounds))

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return _filtered("_made", self.generic_visit(node))

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        is_value = node.ctx == "load" and not any(isinstance(item, nodes.Slice) for item in node.items)
        return _filtered("_made", node) if is_value else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        for pair in node.items:
            pair.key = pair.key if isinstance(pair.key, nodes.Const) else _filtered("_key", pair.key)
        return _filtered("_made", node)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = _filtered("_captured", node.filter)
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)  # so that it goes through `_finalize`


def _filtered(name: str, node: nodes.Node | None, *args: nodes.Expr) -> nodes.Filter:
    made = nodes.Filter(node, name, list(args), [], None, None, lineno=1 if node is None else node.lineno)
    made.set_environment(_ENVIRONMENT)
    return made


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment in which all chat templates are compiled."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            finalize=_finalize,
        )
        known: dict[str, Callable[..., object]] = {**self.filters, "tojson": _to_json}
        self.filters = {name: _charged(known[name], rule) for name, rule in rules.FILTERS.items()}
        self.filters.update(
            _captured=_captured,
            _compare=_compare,
            _concat=_concat,
            _each=_each,
            _key=_key,
            _made=_made,
            _slice=_slice,
        )
        tests = cast("dict[str, Callable[..., object]]", self.tests)
        self.tests = {name: _charged(tests[name], rule) for name, rule in rules.TESTS.items()}
        self.globals = {
            "range": self.globals["range"],
            "dict": _make_dict,
            "namespace": _make_namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self._functions: dict[object, rules.Rule] = {
            self.globals["range"]: rules.nothing,
            _make_dict: rules.mapping,
            _make_namespace: rules.mapping,
            _raise_exception: rules.write,
            _strftime_now: rules.date,
        }

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        """Whether a template may read `obj.attr`: only the listed names."""
        allowed = _attributes(cast(Hashable, type(obj)))
        return attr in allowed if allowed is not None else not attr.startswith("_")

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look an item up; hashing a nested tuple walks it."""
        current_budget().step()
        if isinstance(argument, tuple):
            rules.read(argument)
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look an attribute up."""
        current_budget().step()
        return super().getattr(obj, attribute)

    def wrap_str_format(self, value: object) -> _Format | None:
        """The method `str.format` with each field charged as it is filled; `format_map` does not exist."""
        if isinstance(value, types.BuiltinMethodType) and value.__name__ == "format":
            return _Format(self, value.__self__) if isinstance(value.__self__, str) else None
        if isinstance(value, types.MethodType) and isinstance(value.__self__, Markup):
            return _Format(self, value.__self__) if value.__name__ == "format" else None
        return None

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Apply an operator."""
        current_budget().step()
        rules.binary(operator, left, right)
        result = _spent(super().call_binop(context, operator, left, right))
        return with_marks(result) if operator == "%" and isinstance(result, str) else result

    def call(__self, __context: Context, __obj: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Call a function, macro or method from a template."""
        current_budget().operate(1 + len(args) + len(kwargs))
        if isinstance(__obj, LoopContext) and args:  # a recursive loop: its items are counted as those of any other
            args = (_each(args[0]), *args[1:])  # type: ignore[arg-type]
        elif not isinstance(__obj, (Macro, BlockReference, jinja2.Undefined)):
            receiver, rule = __self._rule(__obj)
            args = args if rule in rules.LAZY else tuple(map(_listed, args))
            rule(*receiver, *args, **kwargs)
        return _spent(super().call(__context, __obj, *args, **kwargs))

    def _rule(self, function: object) -> tuple[tuple[object, ...], rules.Rule]:
        """(the object a method belongs to, what a call costs)."""
        if isinstance(function, types.FunctionType) and function in self._functions:
            return (), self._functions[function]
        if isinstance(function, _Format):
            return (function.text,), rules.read
        if isinstance(function, (types.BuiltinMethodType, types.MethodType)):
            receiver = function.__self__
            if isinstance(receiver, LoopContext) and function.__name__ in ("cycle", "changed"):
                return (), rules.read if function.__name__ == "changed" else rules.nothing
            methods = next((table for kind, table in rules.METHODS.items() if isinstance(receiver, kind)), {})
            if function.__name__ in methods:
                return (receiver,), methods[function.__name__]
        if callable(function):
            raise SecurityError("a template may call macros, and the functions and methods it is given")
        raise TypeError(f"{type(function).__name__} is not callable")


class _Format:
    """The method `format` of a text."""

    def __init__(self, environment: TemplateEnvironment, text: str) -> None:
        self.text = text
        kind = _EscapeFormatter if isinstance(text, Markup) else _Formatter
        self._formatter = kind(environment, escape=Markup.escape) if kind is _EscapeFormatter else kind(environment)

    def __call__(self, *args: object, **kwargs: object) -> str:
        return type(self.text)(self._formatter.vformat(self.text, args, kwargs))


class _ChargedFields(Formatter):
    """Charges what a field writes, once its width is known."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        rules.field(value, format_spec)
        text = str(_spent(super().format_field(value, format_spec)))
        return text if isinstance(value, str) else with_marks(text)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        rules.field(value, "")
        converted = super().convert_field(value, conversion)
        return with_marks(converted) if conversion in ("r", "a") else converted


class _Formatter(_ChargedFields, SandboxedFormatter):
    pass


class _EscapeFormatter(_ChargedFields, SandboxedEscapeFormatter):
    pass


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
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return with_marks(text) if ensure_ascii else text


def _each(values: Iterable[object]) -> Iterator[object]:
    """The items of a loop, each of them a step."""
    budget = current_budget()
    for value in values:
        budget.step()
        yield value


def _listed(value: object) -> object:
    """A list of what an iterator gives: what it holds is to be weighed."""
    if not isinstance(value, Iterator):
        return value
    items = []
    for item in _each(value):
        current_budget().spend(8)
        items.append(item)
    return items


def _compare(left: object, *rest: object) -> bool:
    """`a < b < c`: operators and operands in turn."""
    current_budget().step()
    for operator, right in zip(rest[::2], rest[1::2], strict=True):
        right = _listed(right) if operator in ("in", "notin") else right
        _OPERATORS[str(operator)][0](left, right)
        if not _OPERATORS[str(operator)][1](left, right):
            return False
        left = right
    return True


_OPERATORS: dict[str, tuple[rules.Rule, Callable[[Any, Any], object]]] = {
    "eq": (rules.compare, lambda left, right: left == right),
    "ne": (rules.compare, lambda left, right: left != right),
    "lt": (rules.compare, lambda left, right: left < right),
    "lteq": (rules.compare, lambda left, right: left <= right),
    "gt": (rules.compare, lambda left, right: left > right),
    "gteq": (rules.compare, lambda left, right: left >= right),
    "in": (rules.contain, lambda left, right: left in right),
    "notin": (rules.contain, lambda left, right: left not in right),
}


def _concat(*values: object) -> str:
    """The `~` operator."""
    current_budget().step()
    rules.write(*values)
    return str(_spent("".join(value if isinstance(value, str) else with_marks(str(value)) for value in values)))


def _slice(values: Any, start: int | None, stop: int | None, step: int | None) -> object:
    """`values[start:stop:step]`."""
    rules.cut(values)
    return _spent(values[start:stop:step])


def _made(values: Any) -> object:
    """A list, tuple or object that was just written down."""
    current_budget().step(1 + len(values))
    current_budget().spend(64 + 16 * len(values))
    return values


def _key(value: object) -> object:
    """The key of an object that is written down: hashing a nested tuple walks it."""
    rules.read(value)
    return value


def _captured(text: str) -> str:
    """What a block assignment caught."""
    return str(_spent(text))


@pass_context
def _finalize(context: Context, value: object) -> object:
    """What `{{ value }}` writes; counted here, because blocks can be captured and written again.

    Taking the context keeps jinja from calling it when a template is compiled.
    """
    current_budget().step()
    if isinstance(value, str):
        current_budget().spend(len(value))
        return value
    current_budget().spend(rules.walk(value).text)
    return with_marks(str(value))


def _spent(result: object) -> object:
    """Account for what an operation made."""
    if isinstance(result, str):
        current_budget().spend(len(result))
    elif isinstance(result, (list, tuple)):
        current_budget().spend(64 + 8 * len(result))
    elif isinstance(result, int):
        current_budget().spend(result.bit_length() // 8)
    return result


def _charged(operation: Callable[..., object], rule: rules.Rule) -> Callable[..., object]:
    """A filter or test that charges what it costs before it runs, and what it made after."""

    @wraps(operation)
    def charged(*args: object, **kwargs: object) -> object:
        current_budget().step()
        given, operands = _without_context(args)
        if rule not in rules.LAZY:
            operands = tuple(map(_listed, operands))
        rule(*operands, **kwargs)
        result = _spent(operation(*given, *operands, **kwargs))
        return with_marks(result) if isinstance(result, str) and rules.writes_out(rule, operands) else result

    return charged


def _without_context(args: tuple[object, ...]) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """(what jinja passes of its own, the operands)."""
    is_jinjas = bool(args) and isinstance(args[0], (jinja2.Environment, Context, nodes.EvalContext))
    return args[:is_jinjas], args[is_jinjas:]


_NODES = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.ExprStmt, nodes.Scope, nodes.Block),
    *(nodes.For, nodes.If, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.With, nodes.Assign),
    *(nodes.AssignBlock, nodes.Continue, nodes.Break, nodes.Name, nodes.NSRef, nodes.Const, nodes.Tuple),
    *(nodes.List, nodes.Dict, nodes.Pair, nodes.Keyword, nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call),
    *(nodes.Getitem, nodes.Getattr, nodes.Slice, nodes.Concat, nodes.Compare, nodes.Operand, nodes.BinExpr),
    nodes.UnaryExpr,
)
_LOOP = """
    changed cycle depth depth0 first index index0 last length nextitem previtem revindex revindex0
""".split()  # noqa: SIM905  as the names in the rules
_ATTRIBUTES: tuple[tuple[type, frozenset[str] | None], ...] = (
    *((kind, frozenset(methods)) for kind, methods in rules.METHODS.items()),
    (LoopContext, frozenset(_LOOP)),
    (Macro, frozenset(("arguments", "caller", "catch_kwargs", "catch_varargs", "name"))),
    (Namespace, None),
    (jinja2.Undefined, None),
)


@cache
def _attributes(kind: type) -> frozenset[str] | None:
    """The attributes of objects of this type that templates may read; None for all that Python gives no meaning."""
    return next((names for base, names in _ATTRIBUTES if issubclass(kind, base)), frozenset())


_ENVIRONMENT = TemplateEnvironment()
