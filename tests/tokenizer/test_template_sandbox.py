import random
import time
import tracemalloc

import jinja2
import pytest

from quire.errors import InvalidParameter
from quire.tokenizer import chat, template_budget, template_rules, template_sandbox
from quire.tokenizer.chat import ChatTemplate
from quire.tokenizer.template_budget import Budget

MESSAGES = [{"role": "user", "content": "hi"}]
DOUBLE = "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}BODY{% endfor %}{{ n.x | length }}"
NEST = "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"


def render(source: str, **limits: float) -> str:
    return ChatTemplate(source, **limits).render(MESSAGES)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'].__mro__ }}",
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ lipsum.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}{{ ''.__class__.x }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ messages | map(attribute='__class__.__mro__') | list }}{{ messages.__class__.x }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages[0].pop('role') }}",
        "{{ (1).to_bytes(999999999, 'big') }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n.__init__ = 1 %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{% extends 'x' %}",
        "{{ ''.encode().__class__ }}",
        "{{ dict.__subclasses__() }}",
        "{{ (self._TemplateReference__context).environment }}",
    ],
)
def test_a_way_out_of_the_sandbox_is_closed(source: str) -> None:
    with pytest.raises(InvalidParameter):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(90) }}",
        "{% for a in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
        NEST + "{{ n.x }}",
        NEST + "{{ n.x | tojson }}",
        NEST + "{{ n.x ~ '' }}",
        NEST + "{{ [n.x] | join }}",
        NEST.replace("[n.x, n.x]", "{'a': n.x, 'b': n.x}") + "{{ n.x }}",
    ],
)
def test_a_template_that_does_not_end_is_stopped_in_time(source: str) -> None:
    start = time.thread_time()
    with pytest.raises(InvalidParameter, match="was stopped: it "):
        render(source, max_seconds=0.2)
    assert time.thread_time() - start < 2


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 999999999 }}",
        "{{ 999999999 * 'a' }}",
        "{{ [1] * 999999999 }}",
        "{{ '%999999999d' % 5 }}",
        "{{ '%*d' % (999999999, 5) }}",
        "{{ '%.999999999f' % 5.0 }}",
        "{{ '%999999999d' | format(5) }}",
        "{{ '{:>999999999}'.format(5) }}",
        "{{ '{:>{}}'.format(5, 999999999) }}",
        "{{ ('{0}' * 100000).format('a' * 100000) }}",
        "{{ ('%s' * 100000) % (('a' * 100000,) * 100000) }}",
        "{{ 'a' | center(999999999) }}",
        "{{ 'a'.ljust(999999999) }}",
        "{{ 'a'.zfill(999999999) }}",
        "{{ 'a' | indent(999999999) }}",
        "{{ ('\\n' * 1000000) | indent('x' * 1000, true) }}",
        "{{ [[1]] | tojson(indent=999999999) }}",
        "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
        "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
        "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
        "{{ (['a' * 1000000] * 100000) | join }}",
        "{{ ([''] * 1000000) | join('a' * 1000000) }}",
        "{{ ('a' * 1000000).join([''] * 1000000) }}",
        "{{ [1] | batch(999999999, 'x') | list }}",
        "{{ '%(x)999999999d' | format(x=5) }}",
        "{{ 2 ** 999999999 }}",
        DOUBLE.replace("BODY", "{% set n.x = n.x ~ n.x %}"),
        DOUBLE.replace("BODY", "{% set n.x = n.x + n.x %}"),
        DOUBLE.replace("BODY", "{% set n.x = '%s%s' % (n.x, n.x) %}"),
        DOUBLE.replace("BODY", "{% set n.x = '{0}{0}'.format(n.x) %}"),
        DOUBLE.replace("BODY", "{% set n.x = [n.x, n.x] | join %}"),
        DOUBLE.replace("BODY", "{% set t %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = t %}"),
        DOUBLE.replace("BODY", "{% set n.x = n.x.replace('a', 'aa') %}"),
        "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + DOUBLE.replace("BODY", "{% set n.x = m(n.x) %}"),
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    ],
)
def test_a_template_that_would_fill_the_memory_is_stopped_before(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidParameter, match="was stopped: it "):
            render(source, max_output_characters=100_000, max_seconds=5)
        assert tracemalloc.get_traced_memory()[1] < 40e6
    finally:
        tracemalloc.stop()


def test_formatting_of_large_numbers_and_long_text_is_no_offence() -> None:
    assert render("{{ '**%d** on 20240726' % 123456789 }}") == "**123456789** on 20240726"
    assert render("{{ '%s: %5.1f' | format('x' * 2000, 2) }}") == "x" * 2000 + ":   2.0"
    assert render("{{ '20240726 {} {:,} {:>4}'.format(5, 123456789, 1) }}") == "20240726 5 123,456,789    1"


def test_output_beyond_the_limit_is_refused() -> None:
    assert render("{{ 'x' * 50 }}", max_output_characters=50) == "x" * 50
    with pytest.raises(InvalidParameter, match="its output has more than 50 characters"):
        render("{{ 'x' * 51 }}", max_output_characters=50)


@pytest.mark.parametrize(
    "source",
    [
        "{{ range(10**9) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].nothing.at.all }}",
        "{% for x in 5 %}{% endfor %}",
        "{{ 'x' + 5 }}",
        "{{ messages[0].content.nothing() }}",
        "{{ [1, 'a'] | sort }}",
        "{{ 10.0 ** 400 }}",
        "{{ undefined_function() }}",
        "{{ undefined | tojson }}",
        "{{ [[1]] | sum(start=[]) }}",
        "{{ 'é' | int(base=99) }}{{ 'x'.index('y') }}",
    ],
)
def test_what_goes_wrong_inside_a_template_is_the_callers_error(source: str) -> None:
    with pytest.raises(InvalidParameter, match="the chat template failed on this conversation: "):
        render(source)


def test_one_rendering_does_not_use_up_the_budget_of_the_next() -> None:
    template = ChatTemplate("{{ 'x' * 90 }}", max_output_characters=100)
    assert {template.render(MESSAGES) for _ in range(50)} == {"x" * 90}


def test_a_long_conversation_is_rendered_well_within_its_budget() -> None:
    source = "{% for m in messages %}{{ '<' ~ m.role ~ '>' + m['content'] | trim + '\n' }}{% endfor %}"
    messages = [{"role": "user", "content": "word " * 400}] * 2000
    start = time.thread_time()
    assert len(ChatTemplate(source, max_seconds=60).render(messages)) > 3_000_000
    assert time.thread_time() - start < 1.5


# Every operation that walks its operands

SHARED = """{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}\
{% set n.y = [n.y, n.y] %}{% endfor %}"""
TUPLES = SHARED.replace("[n.x, n.x]", "(n.x, n.x)").replace("[n.y, n.y]", "(n.y, n.y)")
WALKS = """
n.x == n.y; n.x != n.y; n.x < n.y; n.x >= n.y; n.x == n.y == n.x; n.x in [n.y]; n.x not in (n.y, 1);
[n.x] is in [[n.y]]; n.x is eq(n.y); n.x is lessthan(n.y); n.x is lower; n.x is upper; [n.x, n.y] | sort;
[n.x, n.y] | unique | list; [n.x, n.y] | groupby(0); [n.x, n.y] | min; [n.x, n.y] | max;
{'a': n.x, 'b': n.y} | dictsort(by='value'); n.x | tojson; n.x ~ ''; n.x | string; '%s' | format(n.x); '%s' % n.x;
'%r' % [n.x]; '{}'.format(n.x); '{!r}'.format(n.x); '{a}'.format(a=n.x); [n.x].index(n.y); [n.x].count(n.y);
(n.x,).index(n.y); [n.x] | select('eq', n.y) | list; [n.x] | reject('in', [n.y]) | list;
[[n.x]] | selectattr(0, 'ne', n.y) | list; n; [n] | string; namespace(a=n.x) | string; raise_exception(n.x);
n.x | wordcount; n.x | urlencode; n.x | title; n.x | upper; [n.x] | join; ['', n.x] | join(n.x); ''.join([n.x]);
n.x | trim; n.x | truncate; n.x | int; n.x | float; n.x | replace('a', 'b'); 'a' | replace(n.x, 'b'); n.x | e;
n.x | forceescape; n.x | safe; n.x | center; 'a' | default(n.x) ~ n.x; [n.x] | map('string') | list; [n.x] | sum;
{'a': n.x}.items() == {'a': n.y}.items(); n.x in {'a': n.y}.values(); {'a': n.x} == {'a': n.y};
'a'.startswith(n.x); 'a'.strip(n.x); 'a'.count(n.x); 'a'.replace('a', n.x); [n.x | abs]
"""
HASHES = """
{n.x: 1}; {}[n.x]; {}.get(n.x); dict([(n.x, 1)]); n.x in {}; [n.x] | unique | list; n.x is filter; n.x is test;
messages[n.x]; n.x in {}.keys(); namespace([(n.x, 1)])
"""
LOOPS = "{% for i in [1, 2] %}{{ loop.changed([n.x]) }}{{ loop.changed([n.y]) }}{% endfor %}"
BLOCKS = [
    SHARED + LOOPS,
    SHARED + "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(n.x) }}",
    SHARED + "{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}{{ n.x }}{% endcall %}",
    SHARED + "{% filter upper %}{{ n.x }}{% endfilter %}",
    SHARED + "{% set t %}{{ n.x }}{% endset %}",
    SHARED + "{% with a = n.x == n.y %}{% endwith %}",
    SHARED + "{% if n.x == n.y %}{% endif %}",
    SHARED + "{% for i in n.x if i == n.y[0] %}{% endfor %}",
    SHARED + "{{ 'a' if n.x == n.y else 'b' }}",
    SHARED + "{% block b %}{{ n.x }}{% endblock %}",
    "{% set n = namespace() %}{% set n.a = n %}{{ n }}",
]


def programs() -> list[str]:
    walks = [SHARED + "{{ " + walk.strip() + " }}" for walk in WALKS.split(";")]
    return walks + [TUPLES + "{{ " + walk.strip() + " }}" for walk in HASHES.split(";")] + BLOCKS


@pytest.mark.parametrize("source", programs())
def test_an_operation_on_shared_nested_values_is_refused_before_it_runs(source: str) -> None:
    with pytest.raises(InvalidParameter, match=r"was stopped: it (has an operation|uses a value|asks)"):
        render(source, max_seconds=60)


@pytest.mark.parametrize(
    "source",
    [
        "{{ '%999999999d' is odd }}",
        "{{ '%*d' is divisibleby((999999999, 5)) }}",
        "{{ 5 | round(-999999999) }}",
        "{{ 5 | round(999999999, 'ceil') }}",
        "{{ 'aaaa' | round(9, 'floor') }}",
        "{{ '{1:>{0[a]}}'.format({'a': 999999999}, 5) }}",
        "{{ '%(a(b)c)999999999d' % {'a(b)c': 1} }}",
        "{{ range(0, 99999 * (2**61 - 1), 2**61 - 1) | unique | list }}",
        "{{ dict(range(0, 99999 * (2**61 - 1), 2**61 - 1) | batch(2)) }}",
        "{{ ('a' * 900000).strip('b' * 100000 + 'a') }}",
        "{{ ('a' * 900000) | trim('b' * 100000 + 'a') }}",
        "{{ ('a' * 900000).rfind('b' + 'a' * 90000) }}",
        "{{ ('a' * 900000).rsplit('b' + 'a' * 90000) }}",
        "{{ ('a ' * 450000).split() | length }}",
        "{{ ('a ' * 450000) | wordcount }}",
        "{{ ('a\n' * 450000) | indent }}",
        "{{ ('a' * 900000) | list }}",
        "{{ (['a' * 90000] * 9000) | join }}",
        "{{ ''.join(['a' * 90000] * 9000) }}",
        "{{ [[1, 2]] * 300000 == [[1, 2]] * 300000 }}",
        "{{ (messages * 100) | map(attribute='a.' * 100000) | list }}",
        "{{ (messages * 100) | sort(attribute='role,' * 10000) }}",
        "{{ ([0] * 30000) | sort | length }}",
        "{% for i in range(99999) %}{% set t %}" + "y" * 9999 + "{% endset %}{% endfor %}",
        "{% set t %}{% for i in range(99999) %}" + "y" * 9999 + "{% endfor %}{% endset %}",
        "{% macro m() %}" + "y" * 9999 + "{% endmacro %}{% for i in range(99999) %}{% set t = m() %}{% endfor %}",
        "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = [n.x, {}, [1, 2, 3]] %}{% endfor %}",
        "{{ ('f' * 100000) | int(base=16) * 3 }}",
    ],
)
def test_an_operation_whose_cost_is_not_its_size_is_refused_before_it_runs(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidParameter, match=r"was stopped: it |takes a number|takes numbers"):
            render(source, max_output_characters=100_000, max_seconds=60)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "source",
    [
        "{{ [3, 1] | sort }}",
        "{{ ['a', 'b'] | join }}",
        "{{ 'a' ~ 'b' }}",
        "{{ [1] == [1] }}",
        "{{ 'a' * 2 }}",
        "{{ 'x' | upper }}",
        "{{ {'a': 1}.a }}",
        "{% if [1] | length %}{% endif %}",
    ],
)
def test_nothing_is_computed_when_a_template_is_compiled(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling charges no budget because there is none: any filter, operator or look-up would ask for it."""

    def asked() -> Budget:
        raise AssertionError("an operation ran")

    monkeypatch.setattr(template_sandbox, "current_budget", asked)
    monkeypatch.setattr(template_rules, "current_budget", asked)
    template = ChatTemplate(source + " ")  # not in the cache
    assert template.names == frozenset()


def test_what_is_not_on_the_lists_does_not_exist() -> None:
    for syntax in ("{% include 'x' %}", "{% import 'x' as y %}", "{% extends 'x' %}", "{% from 'x' import y %}"):
        with pytest.raises(InvalidParameter, match="is not supported in chat templates"):
            ChatTemplate(syntax)
    with pytest.raises(InvalidParameter, match="is not supported in chat templates"):
        ChatTemplate("{% autoescape [2, 1] | sort %}{% endautoescape %}")
    for name in ("pprint", "xmlattr", "attr", "random", "slice", "striptags", "urlize", "wordwrap", "filesizeformat"):
        with pytest.raises(InvalidParameter, match="No filter named"):
            ChatTemplate("{{ x | " + name + " }}")
    for call in ("cycler(1)", "lipsum()", "joiner()", "range.count(1)", "{}.items().isdisjoint([])", "messages.sort()"):
        with pytest.raises(InvalidParameter, match="failed on this conversation"):
            render("{{ " + call + " }}")


def test_every_operation_there_is_has_a_rule() -> None:
    environment = template_sandbox.TemplateEnvironment()
    ours = {name for name in environment.filters if name.startswith("_")}
    assert environment.filters.keys() - ours == template_rules.FILTERS.keys()
    assert environment.tests.keys() == template_rules.TESTS.keys()
    assert environment.intercepted_binops == environment.binop_table.keys()


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("x" * 200_001, "longer than 200000 characters"),
        ("{{ [" + "a," * 15_000 + "] }}", "more than 15000 parts"),
        ("{{ " + "+".join("a" * 3_000) + " }}", "nested too deeply"),
        ("{{ " + "[" * 150 + "]" * 150 + " }}", "nested too deeply"),
        ("{{ 1e999 }}", "too large"),
        ("{{ 0x" + "f" * 2_000 + " }}", "too large"),
        ("{{ " + "9" * 5_000 + " }}", "digits"),
    ],
)
def test_a_source_that_is_too_large_is_refused(source: str, problem: str) -> None:
    with pytest.raises(InvalidParameter, match="cannot be compiled: .*" + problem):
        ChatTemplate(source)


def test_iterators_stay_what_they_are() -> None:
    """As jinja has it: they are always true, have no length, and are read once."""
    assert render("{% set x = [] | map('upper') %}{{ 'yes' if x else 'no' }}") == "yes"
    assert render(
        "{% set x = ['a'] | map('upper') %}{{ x is iterable }}{{ x is sequence }}{{ x | list }}{{ x | list }}"
    ) == ("TrueFalse['A'][]")
    assert render("{{ 1 < 2 < 3 }}{{ 1 < 3 < 2 }}{{ 'a' in ['a'] | map('lower') }}{{ 'b' not in 'abc' }}") == (
        "TrueFalseTrueFalse"
    )
    assert render(
        "{% for a, b in {'x': 1} | dictsort %}{{ a }}{{ b }}{% endfor %}{{ (1, 2)[::-1] }}{{ 'abc'[1:] }}"
    ) == ("x1(2, 1)bc")


# Random programs

ATOMS = [
    "1",
    "0",
    "'ab'",
    "'%s'",
    "''",
    "none",
    "n.x",
    "n.y",
    "n.x",
    "n.y",
    "messages",
    "messages[0]",
    "i",
    "true",
    "2.5",
]
BINARY = ["+", "*", "%", "~", "-", "/", "//", "**", "==", "!=", "<", ">=", "in", "not in", "and", "or"]
ARGUMENTS = {"map": "'string'", "select": "'eq', {}", "reject": "'in', {}", "selectattr": "0, 'eq', {}", "batch": "3"}


def expression(rng: random.Random, depth: int = 3) -> str:
    if depth == 0 or rng.random() < 0.1:
        return rng.choice(ATOMS)
    inner = expression(rng, depth - 1)
    kind = rng.randrange(8)
    if kind == 0:
        return f"[{inner}, {expression(rng, depth - 1)}]"
    if kind == 1:
        return f"({inner}, {expression(rng, depth - 1)})"
    if kind == 2:
        return f"{{'a': {inner}, {expression(rng, depth - 1)}: 2}}"
    if kind == 3:
        return f"({inner} {rng.choice(BINARY)} {expression(rng, depth - 1)})"
    if kind == 4:
        name = rng.choice(list(template_rules.TESTS))
        return f"({inner} is {name}({expression(rng, depth - 1)}))" if name.isalpha() else f"({inner} is defined)"
    if kind == 5:
        methods = rng.choice(list(template_rules.METHODS.values()))
        arguments = rng.choice(["", inner, f"{inner}, {expression(rng, depth - 1)}"])
        return f"{inner}.{rng.choice(list(methods))}({arguments})"
    if kind == 6:
        return f"{inner}[{rng.choice(['0', '-1', '1:', '::2', ':5', expression(rng, depth - 1)])}]"
    name = rng.choice(list(template_rules.FILTERS))
    arguments = ARGUMENTS.get(name, rng.choice(["", expression(rng, depth - 1)])).replace("{}", inner)
    return f"({inner} | {name}({arguments}))"


GROWTH = [
    "{% set n.T = [n.T, n.T] %}",
    "{% set n.T = (n.T, n.T) %}",
    "{% set n.T = {'a': n.T, 'b': n.T} %}",
    "{% set n.T = [n.T] + [n.T, 'abc'] %}",
    "{% set n.T %}{{ n.T }}{{ n.T }}{% endset %}",
    "{% set n.T = n.T ~ n.T %}",
    "{% set n.T = m(n.T) %}",
    "{% for j in n.T %}{% set n.T = [n.T, j] %}{% endfor %}",
]


def program(rng: random.Random) -> str:
    """Values that double a number of times, and an operation on them."""
    growth = "".join(rng.choice(GROWTH).replace("T", target) for target in "xy" if rng.random() < 0.8)
    rounds = "{% for i in range(" + str(rng.choice((1, 3, 8, 20, 60))) + ") %}" + growth + "{% endfor %}{% set i = 1 %}"
    start = "{% macro m(a) %}{{ a }}{{ a }}{% endmacro %}{% set n = namespace(x=[1], y=('a', [])) %}"
    return start + rounds + "{{ " + expression(rng, rng.choice((1, 1, 2, 3))) + " }}"


def test_random_programs_end_with_a_result_or_a_refusal_within_their_budget() -> None:
    rng = random.Random(12)
    ends = {"result": 0, "stopped": 0, "failed": 0}
    for _ in range(600):
        source = program(rng)
        try:
            template = template_sandbox.compiled.__wrapped__(source)
        except jinja2.TemplateSyntaxError:
            continue
        budget = Budget(max_characters=20_000, max_seconds=600, max_steps=5_000)
        tracemalloc.start()
        try:
            template_sandbox.render(template, {"messages": MESSAGES}, budget)
            ends["result"] += 1
        except template_budget.BudgetExceeded:
            ends["stopped"] += 1
        except chat.FAILURES:
            ends["failed"] += 1
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 20e6, source
        assert budget.num_steps <= 5_000 + template_budget.MAX_OPERATION, source
        assert budget.num_made <= 200_000, source
    assert min(ends.values()) > 60, ends
