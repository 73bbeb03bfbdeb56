"""A device reads of each step what was written for it, however late it comes, at addresses that stay."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.attention.context import GroupContext
from quire.messages.kv import kv_layout
from quire.messages.request import EngineCoreRequest
from quire.messages.step import SchedulerOutputs
from quire.sampling_params import SamplingParams
from quire.worker.device_link import Link
from quire.worker.input_batch import InputBatch
from quire.worker.input_builder import InputBuilder, StepInputs, StepShape
from tests.fakes import STATE, specs_of
from tests.ops.implementations import REFERENCE
from tests.worker import plans
from tests.worker.links import CopyLink, LateDevice

BLOCK_SIZE, CHUNK = 4, 7
NUM_ENTRIES = plans.MAX_MODEL_LEN // BLOCK_SIZE
Named = dict[str, Tensor]


def steps(windows: tuple[int | None, ...], seed: int) -> Iterator[SchedulerOutputs]:
    """Instructions of a scheduler over requests of random lengths."""
    rng = random.Random(seed)
    core = plans.scheduler(BLOCK_SIZE, 8 * len(windows) * NUM_ENTRIES, CHUNK, windows)
    for index in range(7):
        core.add(
            EngineCoreRequest(
                request_id=str(index),
                prompt_token_ids=[rng.randrange(9) for _ in range(rng.randint(1, 20))],
                sampling_params=SamplingParams(ignore_eos=True),
                seed=index,
                max_tokens=rng.randint(1, 9),
            )
        )
    step = 0
    while core.lives.has_work():
        plan = core.schedule()
        yield plan
        core.update(plan, plans.null_result(plan, core, step))
        step += 1


def make_builder(
    windows: tuple[int | None, ...], link: Link | None, *, graph_sizes: tuple[int, ...] = ()
) -> tuple[InputBatch, InputBuilder]:
    layout = kv_layout(specs_of(BLOCK_SIZE, windows))
    batch = InputBatch(plans.MAX_NUM_SEQS, NUM_ENTRIES, len(windows))
    return batch, InputBuilder(
        REFERENCE, [], batch, layout=layout, max_num_tokens=24, link=link, graph_sizes=graph_sizes
    )


def tensors_of(inputs: StepInputs) -> Named:
    """Every tensor of a step, by name."""
    found = {"token_ids": inputs.token_ids, "sampled_rows": inputs.sampled_rows, "positions": inputs.context.positions}
    for index, group in enumerate(inputs.context.groups):
        found |= {f"{name}_{index}": tensor for name, tensor in of_group(group).items()}
    return found


def of_group(group: GroupContext) -> Named:
    attention = group.attention
    found = {"slots": group.slot_mapping, "start": attention.query_start, "lens": attention.seq_lens}
    found["tables"] = attention.block_tables
    if group.state is not None:
        found |= {"state_start": group.state.query_start, "reads": group.state.reads, "writes": group.state.writes}
    return found


def run_late(windows: tuple[int | None, ...], seed: int, device: LateDevice) -> tuple[list[Named], list[Named]]:
    """What a builder of the host gave for each step, and what a device read that came to it late."""
    (batch, builder), (late_batch, late_builder) = make_builder(windows, None), make_builder(windows, device)
    expected, read = list[Named](), list[Named]()

    def look(inputs: StepInputs) -> None:
        read.append({name: tensor.clone() for name, tensor in tensors_of(inputs).items()})

    for plan in steps(windows, seed):
        late_batch.apply(copy.deepcopy(plan))
        batch.apply(plan)
        shape = builder.build(plan)
        expected.append({name: tensor.clone() for name, tensor in tensors_of(builder.inputs(shape)).items()})
        assert late_builder.build(plan) == shape
        device.give(partial(look, late_builder.inputs(shape)))
    device.finish()
    return expected, read


def same(one: Named, other: Named) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("windows", [(None,), (None, 5), (STATE,), (None, STATE)])
@pytest.mark.parametrize("seed", range(3))
def test_a_device_that_comes_late_reads_what_was_written_for_the_step(windows: Any, seed: int) -> None:
    expected, read = run_late(windows, seed, LateDevice())
    assert len(read) == len(expected) > 5
    assert all(map(same, expected, read))


def test_a_host_that_does_not_wait_is_caught() -> None:
    expected, read = run_late((None,), 0, LateDevice(waits=False))
    assert not all(map(same, expected, read))


def test_steps_are_read_where_the_first_one_was_and_each_is_sent_by_one_copy() -> None:
    link = CopyLink()
    batch, builder = make_builder((None, 5), link)
    addresses: dict[str, set[int]] = {}
    num_steps = 0
    for plan in steps((None, 5), 1):
        batch.apply(plan)
        for name, tensor in tensors_of(builder.inputs(builder.build(plan))).items():
            addresses.setdefault(name, set()).add(tensor.data_ptr())
        num_steps += 1
    assert all(len(found) == 1 for found in addresses.values()), addresses
    assert len(link.num_bytes_sent) == num_steps
    assert len(set(link.num_bytes_sent)) > 1, "rows of block tables that no sequence has are not sent"


def test_arrays_of_each_group_begin_where_kernels_load_whole_vectors() -> None:
    batch, builder = make_builder((None, 5, None), CopyLink())
    plan = next(steps((None, 5, None), 1))
    batch.apply(plan)
    found = tensors_of(builder.inputs(builder.build(plan)))
    assert not [name for name, tensor in found.items() if "tables" not in name and tensor.data_ptr() % 16]


@pytest.mark.parametrize(
    ("shape", "padded"),
    [((1, 1, 1), 1), ((3, 3, 3), 4), ((4, 4, 4), 4), ((5, 5, 5), 5), ((3, 3, 2), 3), ((4, 3, 3), 3), ((0, 0, 0), 0)],
)
def test_steps_with_a_token_of_each_sequence_are_padded(shape: tuple[int, int, int], padded: int) -> None:
    given, found = StepShape(*shape), StepShape(*shape).padded((1, 2, 4))
    assert found.num_seqs == padded
    assert found == given or found == StepShape(padded, padded, padded)
    assert given.padded(()) == given


@pytest.mark.parametrize("windows", [(None,), (None, STATE)])
@pytest.mark.parametrize("link", [None, CopyLink()], ids=["host's memory", "memory of its own"])
def test_rows_of_nobody_stand_behind_those_of_sequences(windows: Any, link: Link | None) -> None:
    batch, builder = make_builder(windows, link, graph_sizes=(4,))
    plain_batch, plain = make_builder(windows, None)
    num_padded = 0
    for plan in steps(windows, 2):
        plain_batch.apply(copy.deepcopy(plan))
        batch.apply(plan)
        shape = plain.build(plan)
        assert builder.build(plan) == shape
        assert same(tensors_of(builder.inputs(shape)), tensors_of(plain.inputs(shape)))
        padded = shape.padded((4,))
        if padded == shape:
            continue
        num_padded += 1
        first, inputs = shape.num_seqs, builder.inputs(padded)
        assert inputs.sampled_rows[first:].tolist() == list(range(first, 4))
        for group in inputs.context.groups:
            assert group.slot_mapping[first:].eq(-1).all()
            assert group.attention.seq_lens[first:].eq(0).all()
            assert group.attention.query_start.tolist() == [0, 1, 2, 3, 4]
            assert group.attention.block_tables.ge(0).all()
            if group.state is not None:
                assert group.state.reads[first:].eq(-1).all()
                assert group.state.writes[first:].eq(-1).all()
    assert num_padded > 3
