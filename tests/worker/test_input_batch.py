"""Rows and block tables follow the scheduler; an instruction may be applied twice."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.messages.request import EngineCoreRequest
from quire.utils.math import cdiv
from quire.worker.input_batch import InputBatch
from quire.worker.input_builder import InputBuilder
from tests.worker import plans


def learn(batch: InputBatch, seq_ids: list[int], drawn: list[list[int]]) -> None:
    """What the model runner does with the tokens of a step."""
    for seq_id, token_ids in zip(seq_ids, drawn, strict=True):
        if token_ids:
            batch.to_fork.pop(seq_id, None)
            batch.rows[seq_id].append(token_ids[0])


@settings(max_examples=80, deadline=None)
@given(
    requests=plans.requests(),
    block_size=st.sampled_from([1, 3, 4, 16]),
    chunk=st.integers(2, 24),
    extra_blocks=st.integers(0, 20),
    twice=st.booleans(),
)
def test_rows_tables_and_arrays_are_those_of_a_naive_construction(
    requests: list[EngineCoreRequest], block_size: int, chunk: int, extra_blocks: int, twice: bool
) -> None:
    core = plans.scheduler(block_size, cdiv(plans.MAX_MODEL_LEN, block_size) + extra_blocks, chunk)
    max_num_blocks = cdiv(plans.MAX_MODEL_LEN, block_size)
    batch = InputBatch(plans.MAX_NUM_SEQS, max_num_blocks)
    builder = InputBuilder(
        [],
        block_size=block_size,
        max_num_tokens=plans.MAX_NUM_SEQS * plans.MAX_MODEL_LEN,
        max_num_seqs=plans.MAX_NUM_SEQS,
        max_num_blocks=max_num_blocks,
    )
    for request in requests:
        core.add(request)
    for step in range(1000):
        if not core.has_work():
            break
        plan = core.schedule()
        batch.apply(plan)
        if twice:
            batch.apply(copy.deepcopy(plan))
        sequences = [core._scheduled[seq_id] for seq_id in plan.seq_ids]
        assert len(batch.rows) <= plans.MAX_NUM_SEQS
        inputs = builder.build(plan, batch)

        token_ids, positions, slots, starts, last = [], [], [], [0], []
        for seq, computed, count in zip(sequences, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True):
            assert computed == seq.num_computed_tokens
            assert batch.rows[seq.seq_id].token_ids == seq.token_ids
            assert batch.rows[seq.seq_id].branch == seq.branch
            assert batch.to_fork.get(seq.seq_id, 1) == seq.num_to_fork
            for position in range(computed, computed + count):
                token_ids.append(seq.token_ids[position])
                positions.append(position)
                slots.append(seq.block_ids[position // block_size] * block_size + position % block_size)
            starts.append(len(token_ids))
            last.append(len(token_ids) - 1)
        context, attention = inputs.context, inputs.context.attention
        assert inputs.token_ids.tolist() == token_ids
        assert context.positions.tolist() == positions
        assert context.slot_mapping.tolist() == slots
        assert len(set(slots)) == len(slots), "two tokens in one slot"
        assert inputs.last_rows == last
        assert attention.query_start.tolist() == starts
        lengths = [a + b for a, b in zip(plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True)]
        assert attention.seq_lens.tolist() == lengths
        assert inputs.sampled_rows.tolist() == [row for row, samples in zip(last, plan.samples, strict=True) if samples]
        for table, seq, length in zip(attention.block_tables, sequences, lengths, strict=True):
            needed = cdiv(length, block_size)
            assert table[:needed].tolist() == seq.block_ids[:needed]

        result = plans.null_result(plan, core, step)
        learn(batch, plan.seq_ids, result.token_ids)
        core.update(plan, result)
        core.check()
    assert not core.has_work()
    batch.apply(core.schedule())
    assert not batch.rows, "finished sequences stay behind"
    assert not batch.to_fork
    assert not batch._slot_of
    assert sorted(batch._free_slots) == list(range(plans.MAX_NUM_SEQS))


def test_a_row_is_used_again_after_its_sequence_is_removed() -> None:
    from quire.messages.step import NewSequenceData, SchedulerOutputs
    from quire.sampling_params import SamplingParams

    request = EngineCoreRequest(
        request_id="a", prompt_token_ids=[1, 2], sampling_params=SamplingParams(), seed=0, max_tokens=3
    )
    batch = InputBatch(1, 4)
    for seq_id in range(5):
        new = NewSequenceData(
            seq_id=seq_id,
            branch=0,
            token_ids=[1, 2],
            num_prompt_tokens=2,
            request=request,
            block_ids=[seq_id, 9],
            num_branches=1,
        )
        batch.apply(SchedulerOutputs(new_sequences=[new], removed_seq_ids=[seq_id - 1]))
        assert list(batch.rows) == [seq_id]
        assert batch.block_table([seq_id], 2).tolist() == [[seq_id, 9]]


def test_a_table_given_out_does_not_change_with_the_batch() -> None:
    batch = InputBatch(2, 4)
    batch._slot_of = {1: 0, 2: 1}
    table = batch.block_table([2, 1], 4)
    batch._table[:] = 7
    assert np.array_equal(table, np.zeros((2, 4)))


@pytest.mark.parametrize("count", [1, 5])
def test_tokens_of_a_row_are_its_own(count: int) -> None:
    from quire.messages.step import NewSequenceData, SchedulerOutputs
    from quire.sampling_params import SamplingParams

    request = EngineCoreRequest(
        request_id="a", prompt_token_ids=[1], sampling_params=SamplingParams(), seed=0, max_tokens=3
    )
    token_ids = list(range(count))
    new = NewSequenceData(
        seq_id=0, branch=0, token_ids=token_ids, num_prompt_tokens=1, request=request, block_ids=[0], num_branches=1
    )
    batch = InputBatch(1, 1)
    batch.apply(SchedulerOutputs(new_sequences=[new]))
    batch.rows[0].append(99)
    assert token_ids == list(range(count)), "what the core sent belongs to the core"
