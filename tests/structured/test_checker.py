"""Grammars are checked in a process of its own: whatever one does there, an answer takes a second of computing."""

from __future__ import annotations

import math
import os
import selectors
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from quire.engine.front.input_processor import CHECKER
from quire.errors import EngineOverloaded, EngineUnavailable, InvalidParameter, RequestError
from quire.structured.checker import GrammarChecker
from quire.structured.checker_process import WALL_S, CheckerProcess, _Child, _shortened
from quire.structured.checker_protocol import CPU_S, Answer, Frames, Verdict
from quire.structured.params import StructuredOutputsParams

SLACK_S = 1.0
"""For a machine on which other tests run."""


def chain(length: int) -> str:
    rules = [f"r{index}: r{index + 1}" for index in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "a"'])


MANY = {f"property{index}": {"type": "string", "maxLength": index} for index in range(4000)}
CHOICES: Any = [{"type": "object", "properties": {f"a{j}": {"const": i}}} for i in range(8) for j in range(8)]
POISON: dict[str, tuple[dict[str, Any], str]] = {
    "endless minItems": ({"json": {"type": "array", "minItems": 10**9}}, "'#/minItems'"),
    "chained rules": ({"grammar": chain(6000)}, "too deeply"),
    "parentheses": ({"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000}, "structured_outputs.grammar"),
    "no base": ({"json": {"$ref": "#"}}, "no base"),
    "thousands of optional properties": ({"json": {"type": "object", "properties": MANY}}, "structured_outputs.json"),
    "contradiction": ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "5"),
    "product": ({"json": {"allOf": [{"anyOf": CHOICES}] * 8}}, "structured_outputs.json"),
    "100,000 values": ({"json": {"enum": list(range(100_000))}}, "limit"),
    "10,001 values": ({"json": {"enum": list(range(10_001))}}, "'#/enum'"),
    "a million values": ({"json": {"enum": list(range(1_000_000))}}, "limit"),
    "a million texts": ({"choice": [str(index) for index in range(1_000_000)]}, "1 to 4096 texts"),
    "a long regex": ({"regex": "a" * 10_000_000}, "limit"),
    "a long grammar": ({"grammar": 'start: "a"\n' * 1_000_000}, "limit"),
    "no such length": ({"json": {"type": "string", "minLength": 5, "maxLength": 2}}, "minLength (5)"),
    "no such property": ({"json": {"type": "object", "required": ["b"], "additionalProperties": False}}, "'b'"),
    "no such type": ({"json": {"type": "integer", "enum": ["a"]}}, "incompatible types"),
    "pattern too long": ({"json": {"type": "string", "pattern": "^a{5}$", "maxLength": 2}}, "Unsatisfiable"),
    "10 MB": ({"json": {"description": "x" * 10_000_000}}, "limit"),
    "deep": ({"json": '{"items":' * 5000 + "{}" + "}" * 5000}, "deeper"),
    "look-ahead": ({"regex": "(?=a)b"}, "(?= at 0 looks around"),
    "back reference": ({"regex": r"(a)\1"}, "structured_outputs.regex"),
    "nothing matches": ({"regex": r"[^\s\S]"}, "no output can satisfy it"),
    "no such rule": ({"grammar": "start: missing"}, 'unknown name: "missing"'),
    "bad EBNF": ({"grammar": "root ::= ("}, "EBNF"),
    "unknown format": ({"json": {"items": {"type": "string", "format": "color"}}}, "'#/items/format': Unknown format"),
    "overlapping oneOf": ({"json": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "'#/oneOf': oneOf needs"),
    "tag without trigger": (
        {"structural_tag": {"structures": [{"begin": "<a>", "schema": {}}], "triggers": ["<b"]}},
        "'#/structures/0'",
    ),
}


@pytest.mark.parametrize("name", POISON)
def test_poison_is_answered_soon_and_with_its_reason(checker: GrammarChecker, name: str) -> None:
    fields, part = POISON[name]
    checker.check(StructuredOutputsParams(regex="warm"))
    began_at = time.monotonic()
    with pytest.raises(RequestError) as caught:
        checker.check(StructuredOutputsParams(**fields))
    assert time.monotonic() - began_at < WALL_S + SLACK_S
    assert part in caught.value.message
    assert len(caught.value.message) < 600
    assert str(caught.value.fields["parameter"]).startswith("structured_outputs")
    assert checker.check(StructuredOutputsParams(regex="after")).text


def test_a_check_that_gets_no_processor_is_given_up_in_the_end() -> None:
    (source, sink), (pipe, written) = os.pipe(), os.pipe()
    process = CheckerProcess(source, sink, lambda: None)
    idle = os.posix_spawn("/bin/sleep", ["sleep", "60"], {})
    child = _Child(check_id=7, pid=idle, pipe=pipe, given_up_at=WALL_S, limit_s=CPU_S)
    process._children[pipe] = child
    process._selector.register(pipe, selectors.EVENT_READ)
    process._give_up(0.9 * WALL_S)
    assert pipe in process._children
    process._give_up(WALL_S)
    assert not process._children
    (body,) = Frames().feed(os.read(source, 4096))
    answer = msgspec.msgpack.decode(body, type=Answer)
    assert (answer.check_id, answer.verdict.is_final) == (7, False)
    assert "busy machine" in answer.verdict.message
    for descriptor in (source, sink, written):
        os.close(descriptor)


def test_what_a_busy_machine_did_not_check_is_not_the_request_s_fault(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = Verdict(message="it was not compiled in time", is_final=False)
    monkeypatch.setattr(checker, "verdict", lambda _: late)
    with pytest.raises(EngineOverloaded, match=r"structured_outputs\.regex: it was not compiled in time") as refused:
        checker.check(StructuredOutputsParams(regex="a"))
    assert refused.value.retry_after == 5


def test_a_check_that_its_own_timer_does_not_end_computes_no_longer_than_it_may() -> None:
    (source, sink), (pipe, written) = os.pipe(), os.pipe()
    os.set_inheritable(written, True)
    process = CheckerProcess(source, sink, lambda: None)
    busy = os.posix_spawn("/bin/sh", ["sh", "-c", "while :; do :; done"], {})
    os.close(written)
    process._children[pipe] = child = _Child(check_id=7, pid=busy, pipe=pipe, given_up_at=math.inf, limit_s=0.1)
    process._selector.register(pipe, selectors.EVENT_READ)
    while process._children:
        if process._selector.select(process._patience()):
            process._hear(child)
        process._give_up(time.monotonic())
    (body,) = Frames().feed(os.read(source, 4096))
    verdict = msgspec.msgpack.decode(body, type=Answer).verdict
    assert (verdict.is_slow, verdict.cpu_s) == (True, 0.1)
    for descriptor in (source, sink):
        os.close(descriptor)


def test_a_check_that_was_too_slow_is_not_repeated_unless_it_may_take_longer(checker: GrammarChecker) -> None:
    large = {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": i} for i in range(1500)}}
    params = StructuredOutputsParams(json=large)
    assert not checker.verdict(StructuredOutputsParams(regex="warm")).is_slow
    slow = checker.verdict(params, 0.02)
    assert (slow.is_slow, slow.cpu_s, slow.grammar) == (True, 0.02, None)
    assert "longer than 0.02 s" in slow.message
    assert checker.verdict(params, 0.02) is slow
    longer = checker.verdict(params, 0.06)
    assert longer is not slow
    assert longer.cpu_s > 0.02
    assert checker.verdict(params, 0.01) is longer


def test_equal_forms_are_checked_once(checker: GrammarChecker) -> None:
    first = checker.check(StructuredOutputsParams(json={"type": "string"}))
    assert checker.check(StructuredOutputsParams(json='{"type":"string"}')) is first


def test_many_threads_get_their_own_answers(checker: GrammarChecker) -> None:
    def ask(number: int) -> bool:
        return f"x{number}y" in checker.check(StructuredOutputsParams(regex=f"x{number}y")).text

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(40)))


def test_a_process_that_was_killed_is_replaced(checker: GrammarChecker) -> None:
    checker.check(StructuredOutputsParams(regex="before"))
    process = checker._process
    assert process is not None
    os.kill(process._process.pid, signal.SIGKILL)
    for _ in range(100):
        try:
            checker.check(StructuredOutputsParams(regex="unheard of"))
            break
        except EngineUnavailable:
            time.sleep(0.05)
    assert checker._process is not process


def test_a_closed_checker_says_so() -> None:
    checker = GrammarChecker(lambda: pytest.fail("nothing was asked"), module=CHECKER)  # type: ignore[arg-type]
    checker.close()
    checker.close()


def test_a_choice_may_hold_any_character(checker: GrammarChecker) -> None:
    texts = [f"a{character}b" for character in map(chr, [*range(1, 0x100), 0x2028, 0xFEFF, 0x10FFFF])]
    checker.check(StructuredOutputsParams(choice=texts))


def test_where_the_library_fails_the_message_has_no_trace_of_its_source() -> None:
    error = "panic: assertion failed: symbols.len() < u16::MAX\n<backtrace>\n  0: <unknown>\n  1: /home/a.rs:5"
    message = _shortened(StructuredOutputsParams(grammar="start: x"), error)
    assert message == "structured_outputs.grammar: the grammar library fails on it; make it smaller or simpler"


def test_the_message_about_a_choice_names_it(checker: GrammarChecker) -> None:
    with pytest.raises(InvalidParameter, match=r"structured_outputs\.grammar"):
        checker.check(StructuredOutputsParams(grammar="start: @"))
