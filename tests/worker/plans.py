"""Instructions for a step as the scheduler makes them: random but consistent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from quire.core.block_manager import BlockManager
from quire.core.scheduler import Scheduler
from quire.messages.request import EngineCoreRequest
from quire.messages.step import ModelRunnerOutput, NewSequenceData, SchedulerOutputs
from quire.sampling_params import SamplingParams
from tests.fakes import specs_of

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


def new_sequence(
    seq_id: int, token_ids: list[int], block_ids: list[int], *, num_branches: int = 1, **params: Any
) -> NewSequenceData:
    """A sequence in one KV group that asks for up to nine tokens, greedily unless the parameters say otherwise."""
    return NewSequenceData(
        seq_id=seq_id,
        branch=0,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        request=EngineCoreRequest(
            request_id=str(seq_id),
            prompt_token_ids=token_ids,
            sampling_params=SamplingParams(temperature=0, **params),
            seed=0,
            max_tokens=9,
        ),
        block_ids=[(0, block_ids)],
        num_branches=num_branches,
    )


def scheduler(block_size: int, num_blocks: int, chunk: int, windows: Sequence[int | None] = (None,)) -> Scheduler:
    """A scheduler over a KV group for each window."""
    return Scheduler(
        BlockManager(num_blocks, specs_of(block_size, windows), max_chunk_tokens=chunk, enable_prefix_caching=True),
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=24,
        max_model_len=MAX_MODEL_LEN,
        max_chunk_tokens=chunk,
        clock=lambda: 0.0,
    )


def null_result(plan: SchedulerOutputs, core: Scheduler, step: int) -> ModelRunnerOutput:
    """A token for each sequence that samples, one per branch at a fork."""
    return ModelRunnerOutput(
        token_ids=[
            [(step + branch) % 7 for branch in range(core._scheduled[seq_id].num_to_fork)] if samples else []
            for seq_id, samples in zip(plan.seq_ids, plan.samples, strict=True)
        ]
    )
