"""Bytes on a socket become messages or an error of that connection, whatever they are."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import EngineArgs, SamplingParams
from quire.config.layers.mixers import Mixer
from quire.engine.core_startup import create_config
from quire.engine.process.protocol import CONTROL, DATA, CoreConfigured, Heartbeat, StartCore, Trial, UtilityCall
from quire.messages import codec
from quire.messages.codec import Codec, FrameReader, FrameTooLong, MalformedFrame
from quire.messages.output import EngineCoreOutput, EngineCoreOutputs, Failure, FinishReason, PositionLogprobs
from quire.messages.request import AbortRequest, EngineCoreRequest, RequestProgress
from quire.messages.stats import RequestStats, StepStats
from quire.sampling_params import RequestOutputKind
from quire.structured.grammar import Gate, Grammar, Marker, Thinking

GATE = Gate(
    thinking=Thinking(begin=Marker(text="<t>", token_id=5), end=Marker(text="</t>"), budget=5, forced=(7, 8)),
    triggers=(Marker(text="\N{SNOWMAN}"),),
)
PARAMS = SamplingParams(
    n=3,
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.01,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=1.1,
    seed=-5,
    stop=["\n\n", "\N{SNOWMAN}"],
    stop_token_ids=[7],
    max_tokens=50,
    min_tokens=2,
    logprobs=5,
    prompt_logprobs=-1,
    logit_bias={3: -1.5, 70_000: 2},
    allowed_token_ids=[1, 2, 3],
    bad_words=["no"],
    output_kind=RequestOutputKind.DELTA,
    structured_outputs={"regex": "a"},  # type: ignore[arg-type]
    thinking_token_budget=5,
    gate=GATE,
)
MESSAGES = [
    EngineCoreRequest(
        request_id="a#1",
        prompt_token_ids=[0, 1, 2**31 - 1],
        sampling_params=PARAMS,
        seed=2**62,
        max_tokens=50,
        eos_token_ids=(2, 3),
        bad_words_token_ids=((1, 2), (3,)),
        allowed_tokens=b"\x0e",
        grammar=Grammar(text="start: a", gate=GATE),
        cache_salt="tenant",
        arrived_at=12.25,
        progress=RequestProgress(branches={0: [1, 2], 2: [5]}, num_prompt_logprobs=2, stats=RequestStats()),
        runs_alone=True,
    ),
    AbortRequest(request_id="a", branch=2),
    UtilityCall(call_id=3, method="reset_prefix_cache"),
    EngineCoreOutputs(
        outputs=[
            EngineCoreOutput(
                request_id="a",
                branch=1,
                new_token_ids=[5],
                new_logprobs=[PositionLogprobs([5, 6], [-0.1, -math.inf], 1)],
                new_prompt_logprobs=[PositionLogprobs([1], [-1 / 3], 9)],
                finish_reason=FinishReason.STOP,
                stop_reason=7,
                num_cached_tokens=32,
                error=Failure("why", is_request_fault=True),
                stats=RequestStats(arrived_at=1.5, num_generation_tokens=3),
            )
        ],
        stats=StepStats(num_running=1),
    ),
    Trial(request_id=None),
]


def decoded(kind: Codec, data: bytes | bytearray, piece: int = 1 << 20) -> list[Any]:
    reader = FrameReader(kind)
    return [m for start in range(0, len(data), piece) for m in reader.feed(data[start : start + piece])]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_survives_the_wire(message: object) -> None:
    (again,) = decoded(DATA, DATA.encode(message))
    assert again == message
    assert type(again) is type(message)


@pytest.mark.parametrize("options", [{}, {"max_model_len": 64, "hf_overrides": {"a": [1, None, {"b": 0.5}]}}])
def test_configuration_survives_the_wire(options: dict[str, Any]) -> None:
    args = EngineArgs(**options)
    (order,) = decoded(CONTROL, CONTROL.encode(StartCore(args=args)))
    assert order.args == args
    message = CoreConfigured(config=create_config(args))
    (again,) = decoded(CONTROL, CONTROL.encode(message))
    assert again == message
    assert isinstance(again.config.model_config.path, Path)


@pytest.mark.parametrize("family", ["gemma2", "deepseek_v2", "gemma3n_text", "gemma4_text", "olmo_hybrid"])
def test_layers_of_every_kind_survive_the_wire(family: str, checkpoint: Callable[..., Path]) -> None:
    message = CoreConfigured(config=create_config(EngineArgs(model=str(checkpoint(family)))))
    (again,) = decoded(CONTROL, CONTROL.encode(message))
    assert again == message
    mixers = zip(again.config.model_config.arch.mixers, message.config.model_config.arch.mixers, strict=True)
    assert all(type(theirs) is type(ours) for theirs, ours in mixers)


def test_the_kinds_of_mixers_are_told_apart_by_their_fields() -> None:
    names = [frozenset(field.name for field in fields(kind)) for kind in Mixer.kinds()]
    assert len(set(names)) == len(names) > 1
    for value in ({}, {"window": 1}, [], None):
        with pytest.raises(ValueError, match="no Mixer"):
            Mixer.kind_of(value)


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 64, 1000])
def test_frames_may_come_in_any_pieces(piece: int) -> None:
    data = b"".join(DATA.encode(message) for message in MESSAGES * 2)
    assert decoded(DATA, data, piece) == MESSAGES * 2


def test_a_long_frame_is_refused_before_it_has_come() -> None:
    with pytest.raises(MalformedFrame, match="limit"):
        decoded(DATA, struct.pack(">IB", codec.MAX_FRAME_BYTES + 1, 1))


def test_a_message_too_long_for_a_frame_is_refused_by_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 1000)
    DATA.encode(AbortRequest(request_id="a" * 900))
    with pytest.raises(FrameTooLong, match="AbortRequest"):
        DATA.encode(AbortRequest(request_id="a" * 1100))


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">IB", 1, 200) + b"\x80",
        struct.pack(">IB", 1, 1) + b"\x80",
        struct.pack(">IB", 3, 1) + b"abc",
        struct.pack(">IB", 0, 1),
        CONTROL.encode(Heartbeat()).replace(b"step_s", b"step_x") + b"",
        bytes(DATA.encode(MESSAGES[0])).replace(
            b"\xabtemperature\xcb?\xe6ffffff", b"\xabtemperature\xcb\x7f\xf0" + b"\0" * 6
        ),
    ],
    ids=["kind", "fields", "no msgpack", "empty", "control on data", "parameter out of range"],
)
def test_what_is_no_message_is_an_error(data: bytes) -> None:
    with pytest.raises(MalformedFrame):
        decoded(DATA, data)


@given(st.binary(max_size=200))
def test_random_bytes_are_messages_or_an_error(data: bytes) -> None:
    try:
        decoded(DATA, data)
    except MalformedFrame:
        pass


@given(st.sampled_from(MESSAGES), st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_frame_is_a_message_or_an_error(message: object, index: int, value: int) -> None:
    frame = DATA.encode(message)
    frame[index % len(frame)] = value
    try:
        decoded(DATA, bytes(frame))
    except MalformedFrame:
        pass


def test_every_error_of_a_damaged_frame_leaves_the_reader_of_others_alone() -> None:
    good, bad = FrameReader(DATA), FrameReader(DATA)
    with pytest.raises(MalformedFrame):
        list(bad.feed(struct.pack(">IB", 3, 1) + b"abc"))
    assert list(good.feed(DATA.encode(MESSAGES[1]))) == [MESSAGES[1]]
