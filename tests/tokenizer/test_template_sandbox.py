import time
import tracemalloc

import pytest

from quire.errors import InvalidParameter
from quire.tokenizer.chat import ChatTemplate

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
    start = time.monotonic()
    with pytest.raises(InvalidParameter, match="was stopped: it "):
        render(source, max_seconds=0.2)
    assert time.monotonic() - start < 2


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
    start = time.monotonic()
    assert len(ChatTemplate(source).render(messages)) > 3_000_000
    assert time.monotonic() - start < 1.5
