"""Gates: read from objects and mappings, bounded, and refused in words that name the field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire import SamplingParams
from quire.errors import InvalidParameter
from quire.structured.gate_fields import MAX_CHARACTERS, MAX_FORCED, MAX_OPENINGS, MAX_TRIGGERS, gate_of
from quire.structured.grammar import Gate, Marker, Thinking

MARK: dict[str, Any] = {"text": "<t>"}
THINKING: dict[str, Any] = {"begin": MARK, "end": {"text": "</t>", "token_id": 5}}
WRONG: list[tuple[object, str, str]] = [
    (5, "gate", "a Gate or a mapping of its fields, got 5"),
    ({}, "gate", "needs thinking, triggers or openings"),
    (Gate(), "gate", "needs thinking, triggers or openings"),
    ({"trigers": []}, "gate.trigers", "did you mean 'triggers'"),
    (dict.fromkeys("abcdefg", 1), "gate", "7 fields"),
    ({"thinking": THINKING, "is_open": True}, "gate.is_open", "needs gate.triggers"),
    ({"thinking": THINKING, "takes_triggers": True}, "gate.takes_triggers", "needs gate.triggers"),
    ({"triggers": [MARK], "is_open": 1}, "gate.is_open", "True or False"),
    ({"openings": ["[f("] * (MAX_OPENINGS + 1)}, "gate.openings", f"the limit is {MAX_OPENINGS}"),
    ({"openings": ["[ f("]}, "gate.openings[0]", "no white space"),
    ({"openings": [5]}, "gate.openings[0]", "a string"),
    ({"thinking": {**THINKING, "before": [-1]}}, "gate.thinking.before[0]", "[0, 2147483647]"),
    ({"triggers": MARK}, "gate.triggers", "must be a list"),
    ({"triggers": [MARK] * (MAX_TRIGGERS + 1)}, "gate.triggers", f"the limit is {MAX_TRIGGERS}"),
    ({"triggers": ["<t>"]}, "gate.triggers[0]", "a Marker or a mapping"),
    ({"triggers": [MARK, {}]}, "gate.triggers[1].text", "needs the field text"),
    ({"triggers": [{"text": ""}]}, "gate.triggers[0].text", "1 to 256"),
    ({"triggers": [{"text": 5}]}, "gate.triggers[0].text", "a string"),
    ({"triggers": [{"text": "\ud800"}]}, "gate.triggers[0].text", "U+D800"),
    ({"triggers": [{"text": "a" * (MAX_CHARACTERS + 1)}]}, "gate.triggers[0].text", "got 257"),
    ({"triggers": [{**MARK, "token_id": -1}]}, "gate.triggers[0].token_id", "[0, 2147483647]"),
    ({"triggers": [{**MARK, "token_id": True}]}, "gate.triggers[0].token_id", "an integer"),
    ({"triggers": [Marker(text=5)]}, "gate.triggers[0].text", "a string"),  # type: ignore[arg-type]
    ({"thinking": {"begin": MARK}}, "gate.thinking.end", "needs the field end"),
    ({"thinking": {**THINKING, "is_open": 1}}, "gate.thinking.is_open", "True or False"),
    ({"thinking": {**THINKING, "budget": -1, "forced": [1]}}, "gate.thinking.budget", "[0, "),
    ({"thinking": {**THINKING, "budget": 1.5, "forced": [1]}}, "gate.thinking.budget", "an integer"),
    ({"thinking": {**THINKING, "budget": 5}}, "gate.thinking.forced", "needs gate.thinking.forced"),
    ({"thinking": {**THINKING, "forced": [1] * (MAX_FORCED + 1)}}, "gate.thinking.forced", f"{MAX_FORCED}"),
    ({"thinking": {**THINKING, "forced": ["a"]}}, "gate.thinking.forced[0]", "an integer"),
]


@pytest.mark.parametrize(("given", "parameter", "part"), WRONG, ids=lambda item: repr(item)[:40])
def test_wrong_fields_are_refused_by_name(given: object, parameter: str, part: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        gate_of(given)
    assert caught.value.parameter == parameter
    assert part in caught.value.message
    assert len(caught.value.message) < 300


def test_a_mapping_is_read_and_survives_json() -> None:
    fields = {"thinking": {**THINKING, "budget": 3, "forced": [5], "before": [7]}, "triggers": [MARK]}
    gate = gate_of({**fields, "is_open": True, "takes_triggers": True, "openings": ["[f("]})
    assert gate == Gate(
        thinking=Thinking(
            begin=Marker(text="<t>"), end=Marker(text="</t>", token_id=5), budget=3, forced=(5,), before=(7,)
        ),
        triggers=(Marker(text="<t>"),),
        is_open=True,
        takes_triggers=True,
        openings=("[f(",),
    )
    assert gate_of(gate) == gate
    assert gate_of(msgspec.json.decode(msgspec.json.encode(gate))) == gate
    assert (gate.token_ids, gate.num_characters) == ((5, 5, 7), 15)


def test_a_budget_may_be_named_twice_but_not_differently() -> None:
    gate = {"thinking": {**THINKING, "budget": 3, "forced": [5]}}
    assert SamplingParams(thinking_token_budget=3, gate=gate).gate == gate_of(gate)  # type: ignore[arg-type]
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
    with pytest.raises(InvalidParameter, match=r"\(4\) and gate.thinking.budget \(3\) must not differ"):
        SamplingParams(thinking_token_budget=4, gate=gate)  # type: ignore[arg-type]
