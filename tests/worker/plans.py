"""Instructions for a step as the scheduler makes them: random but consistent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from quire.core.kv.block_manager import BlockManager
from quire.core.order.budget import StepCost
from quire.core.order.policy import FirstComeFirstServed
from quire.core.scheduler import Scheduler
from quire.messages.request import EngineCoreRequest
from quire.messages.step import ModelRunnerOutput, NewSequenceData, SchedulerOutputs
from quire.sampling_params import SamplingParams
from tests.fakes import STATE, specs_of

MAX_NUM_SEQS, MAX_MODEL_LEN = 4, 40


def requests() -> st.SearchStrategy[list[EngineCoreRequest]]:
    """Some requests with few different tokens, so that prefixes coincide."""
    one = st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=25), st.integers(1, 10), st.integers(1, 3), st.booleans()
    )
    return st.lists(one, min_size=1, max_size=6).map(
        lambda given: [
            EngineCoreRequest(
                request_id=str(index),
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(n=n, prompt_logprobs=1 if scored else None, ignore_eos=True),
                seed=index,
                max_tokens=max_tokens,
            )
            for index, (prompt, max_tokens, n, scored) in enumerate(given)
        ]
    )


class New(NamedTuple):
    """A sequence, and its request."""

    request: EngineCoreRequest
    sequence: NewSequenceData


def new_sequence(seq_id: int, token_ids: list[int], block_ids: list[int], **params: Any) -> New:
    """A sequence in one KV group that asks for up to nine tokens, greedily unless the parameters say otherwise."""
    request = EngineCoreRequest(
        request_id=str(seq_id),
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(**{"temperature": 0, **params}),
        seed=0,
        max_tokens=9,
    )
    return New(request, NewSequenceData(seq_id, request.request_id, 0, [], [(0, block_ids)]))


def introducing(*new: New) -> dict[str, Any]:
    """The fields of an instruction that let the worker know them."""
    return {"new_requests": [each.request for each in new], "new_sequences": [each.sequence for each in new]}


def scheduler(block_size: int, num_blocks: int, chunk: int, windows: Sequence[int | None] = (None,)) -> Scheduler:
    """A scheduler over a KV group for each window."""
    return Scheduler(
        BlockManager(
            num_blocks,
            specs_of(block_size, windows),
            max_chunk_tokens=chunk,
            enable_prefix_caching=True,
            state_stride=block_size if STATE in windows else 0,
        ),
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=24,
        max_model_len=MAX_MODEL_LEN,
        max_chunk_tokens=chunk,
        clock=lambda: 0.0,
        policy=FirstComeFirstServed(),
        cost=StepCost(context_per_token=1000.0),
    )


def null_result(plan: SchedulerOutputs, core: Scheduler, step: int) -> ModelRunnerOutput:
    """A token for each sequence that samples, one per branch at a fork."""
    result = ModelRunnerOutput()
    for seq_id, num_draws in zip(plan.seq_ids, plan.num_draws, strict=True):
        assert num_draws in (0, core._scheduled[seq_id].num_to_fork)
        drawn = [(step + branch) % 7 for branch in range(num_draws)]
        result.token_ids.append(drawn if num_draws == 1 else [])
        if num_draws > 1:
            result.forks[seq_id] = drawn
    return result
