"""What a request takes while it waits in the core is measured, bounded, and in the memory plan."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import msgspec
import pytest

from quire.config.flags.args import EngineArgs
from quire.config.memory.plan import WAITING_BYTES
from quire.engine.async_llm_engine import AsyncLLMEngine
from quire.engine.core_startup import create_config
from quire.engine.request_memory import RequestMemory, bytes_of
from quire.engine.startup import start
from quire.errors import EngineOverloaded
from quire.messages.request import EngineCoreRequest
from quire.sampling.controls import Controls
from quire.sampling_params import SamplingParams
from quire.structured.grammar import Gate, Grammar, Marker
from tests.conftest import Checkpoint
from tests.fakes import FakeCore


def request_of(request_id: str = "r", *, num_tokens: int = 1, tenant: str = "", **fields: Any) -> EngineCoreRequest:
    words, allowed, grammar = (
        fields.pop(name, given) for name, given in (("words", ()), ("allowed", None), ("grammar", None))
    )
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1000 + token for token in range(num_tokens)],
        sampling_params=SamplingParams(**fields),
        seed=1,
        max_tokens=16,
        tenant=tenant,
        bad_words_token_ids=words,
        allowed_tokens=allowed,
        grammar=grammar,
    )


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "long prompt": {"num_tokens": 50_000},
    "stop tokens": {"stop_token_ids": list(range(1000, 2024))},
    "biases": {"logit_bias": {1000 + token: 0.5 + token for token in range(1024)}},
    "words": {"words": tuple(tuple(1000 + 16 * word + place for place in range(16)) for word in range(128))},
    "short words": {"words": tuple((1000 + word,) for word in range(2048))},
    "allowed tokens": {"allowed": bytes(20_000)},
    "gate": {
        "grammar": Grammar(
            text="a" * 1000,
            gate=Gate(triggers=tuple(Marker(text=200 * chr(0x1F600 + i), token_id=1000 + i) for i in range(64))),
        )
    },
    "branches": {"n": 64, "num_tokens": 1000},
}


@pytest.mark.parametrize("case", CASES)
def test_a_request_takes_no_more_than_is_counted(case: str) -> None:
    frame = msgspec.msgpack.encode(request_of(min_tokens=1, **CASES[case]))
    core = FakeCore(max_num_seqs=64)
    core.scheduler.add(request_of("first"))  # what is made once for all
    Controls(msgspec.msgpack.decode(frame, type=EngineCoreRequest))
    tracemalloc.start()
    request = msgspec.msgpack.decode(frame, type=EngineCoreRequest)  # as it comes to a core: with lists of its own
    core.scheduler.add(request)
    controls = Controls(request)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    taken += 0 if request.allowed_tokens is None else controls.excluded(8 * len(request.allowed_tokens)).nbytes
    assert taken <= bytes_of(request)
    assert case in ("plain", "branches") or bytes_of(request) <= 2 * taken + 8192, "the count is not far off"


def test_a_tenant_leaves_room_for_another_and_all_keep_the_limit() -> None:
    size = bytes_of(request_of(num_tokens=1000))
    memory = RequestMemory(4 * size + 1000)

    def take(request_id: str, tenant: str) -> None:
        memory.take(request_of(request_id, num_tokens=1000, tenant=tenant))

    take("a", "greedy")
    take("b", "greedy")
    with pytest.raises(EngineOverloaded, match=r"KiB are planned for all \(--max-num-seqs"):
        take("c", "greedy")
    take("d", "modest")
    with pytest.raises(EngineOverloaded):
        take("e", "modest")
    take("f", "third")
    with pytest.raises(EngineOverloaded):
        take("g", "fourth")
    assert memory.num_bytes <= 4 * size + 1000
    for request_id in "aab":
        memory.give_back(request_id)
    take("g", "fourth")
    for request_id in "dfg":
        memory.give_back(request_id)
    assert memory.num_bytes == 0


def test_requests_that_belong_together_are_checked_before_the_first_is_taken() -> None:
    size = bytes_of(request_of(num_tokens=1000))
    memory = RequestMemory(8 * size)
    memory.check("key", num_requests=3, num_tokens=3000)
    with pytest.raises(EngineOverloaded):
        memory.check("key", num_requests=6, num_tokens=6000)
    memory.check("key", num_requests=1, num_tokens=50_000)
    assert memory.num_bytes == 0


def test_a_request_that_is_alone_may_be_larger_than_the_limit() -> None:
    memory = RequestMemory(1000)
    memory.take(request_of("large", num_tokens=5000))
    with pytest.raises(EngineOverloaded):
        memory.take(request_of("small", tenant="other"))
    memory.give_back("large")
    memory.take(request_of("small", tenant="other"))


def test_the_plan_counts_what_requests_may_take() -> None:
    few, many = (create_config(EngineArgs(max_num_seqs=seats, kv_cache_memory_bytes=64 << 20)) for seats in (1, 200))
    assert few.scheduler_config.max_request_bytes >= WAITING_BYTES
    for config in (few, many):
        assert config.memory_plan["requests"] >= config.scheduler_config.max_request_bytes
    more = many.scheduler_config.max_request_bytes - few.scheduler_config.max_request_bytes
    assert more == many.memory_plan["requests"] - few.memory_plan["requests"] > 0


def test_an_engine_refuses_what_is_not_planned_until_others_end(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    def small(limit: int) -> RequestMemory:
        limits.append(limit)
        return RequestMemory(25_000)

    monkeypatch.setattr("quire.engine.async_llm_engine.RequestMemory", small)
    parts = start(EngineArgs(model=str(checkpoint("llama")), max_model_len=64, dtype="float32"))
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0)

    async def main() -> None:
        with AsyncLLMEngine(parts) as engine:
            first = engine.generate([3, 1, 4], params)
            await anext(first)
            with pytest.raises(EngineOverloaded, match="of the engine's memory"):
                async for _ in engine.generate([5] * 30, params.clone(n=8)):
                    pass
            async for _ in first:
                pass
            outputs = [output async for output in engine.generate([5] * 30, params.clone(n=8))]
            assert outputs[-1].finished

    asyncio.run(asyncio.wait_for(main(), 60))
    assert limits[-1] == parts.config.scheduler_config.max_request_bytes
