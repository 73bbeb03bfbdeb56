"""Rows and block tables follow the scheduler; an instruction may be applied twice."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.messages.kv import kv_layout
from quire.messages.request import AbortRequest, EngineCoreRequest
from quire.messages.step import SchedulerOutputs
from quire.utils.math import cdiv
from quire.worker.input_batch import InputBatch
from quire.worker.input_builder import InputBuilder, StepShape
from tests.fakes import specs_of
from tests.ops.implementations import REFERENCE
from tests.worker import plans


@settings(max_examples=150, deadline=None)
@given(
    requests=plans.requests(),
    block_size=st.sampled_from([1, 3, 4, 16]),
    windows=st.sampled_from([(None,), (None, 5), (1, 5), (None, 3, 20)]),
    chunk=st.integers(2, 24),
    extra_blocks=st.integers(0, 20),
    twice=st.booleans(),
    aborted=st.dictionaries(st.integers(1, 30), st.integers(0, 5)),
    together=st.booleans(),
)
def test_rows_tables_and_arrays_are_those_of_a_naive_construction(
    requests: list[EngineCoreRequest],
    block_size: int,
    windows: tuple[int | None, ...],
    chunk: int,
    extra_blocks: int,
    twice: bool,
    aborted: dict[int, int],
    together: bool,
) -> None:
    """Requests come together or one with each step; `aborted` says which is dropped before which step."""
    max_num_blocks = cdiv(plans.MAX_MODEL_LEN, block_size)
    core = plans.scheduler(block_size, len(windows) * max_num_blocks + extra_blocks, chunk, windows)
    batch = InputBatch(plans.MAX_NUM_SEQS, max_num_blocks, len(windows))
    layout = kv_layout(specs_of(block_size, windows))
    max_num_tokens = plans.MAX_NUM_SEQS * plans.MAX_MODEL_LEN
    builder = InputBuilder(REFERENCE, [], batch, layout=layout, max_num_tokens=max_num_tokens)
    waiting = list(requests)
    for step in range(1000):
        while waiting and (together or len(requests) - len(waiting) <= step):
            core.add(waiting.pop(0))
        if step in aborted:
            core.lives.abort(AbortRequest(request_id=str(aborted[step]), branch=None if step % 2 else 0))
        if not core.lives.has_work() and not waiting:
            break
        plan = core.schedule()
        batch.apply(plan)
        if twice:
            batch.apply(copy.deepcopy(plan))
        sequences = [core._scheduled[seq_id] for seq_id in plan.seq_ids]
        assert len(batch.rows) <= plans.MAX_NUM_SEQS
        shape = builder.build(plan)
        inputs = builder.inputs(shape)

        token_ids, positions, starts, last = [], [], [0], []
        slots: list[list[int]] = [[] for _ in windows]
        for seq, computed, count in zip(sequences, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True):
            assert computed == seq.num_committed_tokens
            assert batch.rows[seq.seq_id].token_ids == seq.token_ids
            assert batch.rows[seq.seq_id].branch == seq.branch
            for position in range(computed, computed + count):
                token_ids.append(seq.token_ids[position])
                positions.append(position)
                for table, found in zip(seq.tables, slots, strict=True):
                    found.append(table.block_ids[position // block_size] * block_size + position % block_size)
            starts.append(len(token_ids))
            last.append(len(token_ids) - 1)
        context = inputs.context
        assert inputs.token_ids.tolist() == token_ids
        assert context.positions.tolist() == positions
        assert [group.slot_mapping.tolist() for group in context.groups] == slots
        everywhere = [slot for found in slots for slot in found]
        assert len(set(everywhere)) == len(everywhere), "two tokens in one slot"
        assert shape == StepShape(len(token_ids), len(sequences), sum(count > 0 for count in plan.num_draws))
        lengths = [a + b for a, b in zip(plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True)]
        assert inputs.sampled_rows.tolist() == [row for row, count in zip(last, plan.num_draws, strict=True) if count]
        for index, group in enumerate(context.groups):
            assert group.attention.query_start.tolist() == starts
            assert group.attention.seq_lens.tolist() == lengths
            for row, seq, length in zip(group.attention.block_tables, sequences, lengths, strict=True):
                table, needed = seq.tables[index], cdiv(length, block_size)
                assert row[table.num_trimmed : needed].tolist() == table.block_ids[table.num_trimmed : needed]
                assert row.min() >= 0, "kernels check that all blocks of a table exist"

        result = plans.null_result(plan, core, step)
        core.update(plan, result)
        core.lives.check()
    assert not core.lives.has_work()
    batch.apply(core.schedule())
    assert not batch.rows, "finished sequences stay behind"
    assert not batch._controls, "and so do their requests"
    assert not batch.to_score
    assert not batch._row_of
    assert sorted(batch._free_rows) == list(range(plans.MAX_NUM_SEQS))


def test_a_row_is_used_again_after_its_sequence_is_removed() -> None:
    batch = InputBatch(1, 4)
    for seq_id in range(5):
        batch.apply(
            SchedulerOutputs(
                **plans.introducing(plans.new_sequence(seq_id, [1, 2], [seq_id, 9])), removed_seq_ids=[seq_id - 1]
            )
        )
        assert list(batch.rows) == [seq_id]
        batch.arrange([seq_id])
        assert batch.block_tables.tolist() == [[[seq_id, 9, 0, 0]]]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_rows_of_the_table_follow_the_order_of_a_step_and_nobody_loses_his(data: st.DataObject) -> None:
    batch = InputBatch(6, 2)
    address = batch.block_tables.ctypes.data
    live: set[int] = set()
    for next_id in range(data.draw(st.integers(1, 12))):
        removed = data.draw(st.lists(st.sampled_from(sorted(live)), unique=True)) if live else []
        live.difference_update(removed)
        added = [next_id] if len(live) < 6 else []
        live.update(added)
        fresh = [plans.new_sequence(seq_id, [1], [seq_id + 100, seq_id + 200]) for seq_id in added]
        batch.apply(SchedulerOutputs(**plans.introducing(*fresh), removed_seq_ids=removed))
        scheduled = data.draw(st.permutations(sorted(live)))[: data.draw(st.integers(0, len(live)))]
        for seq_ids in (scheduled, sorted(live)):
            batch.arrange(seq_ids)
            assert batch.block_tables[0, : len(seq_ids)].tolist() == [
                [seq_id + 100, seq_id + 200] for seq_id in seq_ids
            ]
        assert sorted([*batch._row_of.values(), *batch._free_rows]) == list(range(6))
    assert batch.block_tables.ctypes.data == address, "graphs read the table where it was"


@pytest.mark.parametrize("count", [1, 5])
def test_tokens_of_a_row_are_its_own(count: int) -> None:
    token_ids = list(range(count))
    batch = InputBatch(1, 1)
    batch.apply(SchedulerOutputs(**plans.introducing(plans.new_sequence(0, token_ids, [0]))))
    batch.rows[0].append(99)
    assert token_ids == list(range(count)), "what the core sent belongs to the core"
