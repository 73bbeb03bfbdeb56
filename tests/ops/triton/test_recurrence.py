"""Recurrent layers in Triton: against the reference, and the bits of sequences in company.

Tolerances are those of `implementations.TOLERANCE`: sums in another order, exponentials of another library.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.ops import reference
from quire.ops.contracts.operands import ConvWeights, MambaWeights
from tests.ops import test_gated_recurrence as gated
from tests.ops import test_recurrence as plain
from tests.ops.implementations import assert_close
from tests.ops.test_recurrence import CHANNELS, RANK, STATE_SIZE, WIDTH, Run, check_cuts, metadata, numbers, pool
from tests.ops.triton.device import DEVICE

from quire.ops.triton import OPS  # isort: skip  (device decides whether Triton can be imported)

KINDS = (
    "mamba",
    "mamba with norms",
    "mamba2",
    "short_conv",
    "gated_delta",
    gated.BY_CHANNEL,
    "lightning_attention",
    "rg_lru",
)


def placed(value: Any) -> Any:
    """A copy of weights, or of what else an op is given, on the device under test."""
    if isinstance(value, Tensor):
        return value.to(DEVICE)
    if isinstance(value, tuple):
        return tuple(map(placed, value))
    if isinstance(value, dict):
        return {name: placed(each) for name, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: placed(getattr(value, field.name)) for field in fields(value)})
    return value


def run_on_device(op: str) -> Any:
    """A Triton op of tensors of the host, of which states are changed in place."""

    def run(*args: Any, **beside: Any) -> Tensor:
        *given, states, steps = args
        there = placed(states)
        out: Tensor = OPS[op](*map(placed, given), there, placed(steps), **placed(beside))  # type: ignore[assignment]
        states.copy_(there)
        return out.cpu()

    return run


def normed_mamba() -> MambaWeights:
    pack = reference.pack_linear
    return MambaWeights(
        conv=ConvWeights(weight=numbers(CHANNELS, WIDTH), bias=None),
        derive=pack([numbers(RANK + 2 * STATE_SIZE, CHANNELS)], dtype=torch.float32),
        widen=pack([numbers(CHANNELS, RANK)], dtype=torch.float32),
        time_bias=numbers(CHANNELS, seed=3) * 8,
        decay=-numbers(CHANNELS, STATE_SIZE).exp(),
        skip=numbers(CHANNELS, seed=4),
        norms=(numbers(RANK), None, numbers(STATE_SIZE, seed=2)),
        norm_eps=1e-5,
    )


def runs_of(kind: str, ops: dict[str, Any]) -> tuple[Run, int, int]:
    """The op, the columns of its input, and the numbers of a state."""
    if kind == "mamba with norms":
        weights, past = normed_mamba(), (WIDTH - 1) * CHANNELS
        return (
            lambda x, states, meta: ops["mamba"](x, weights, states, meta),
            2 * CHANNELS,
            past + CHANNELS * STATE_SIZE,
        )
    table = ops | {"pack_linear": reference.pack_linear}
    return {**plain.runs_of(table), **gated.runs_of(table)}[kind]


ON_DEVICE = {op: run_on_device(op) for op in KINDS if op in OPS}


@pytest.fixture(params=[False, True], ids=["one tile", "several tiles"])
def _tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr("quire.ops.triton.kernels.recurrence.ROWS", 4)
        monkeypatch.setattr("quire.ops.triton.recurrence.BLOCK", 8)


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("kind", KINDS)
def test_a_recurrence_is_that_of_the_reference(kind: str) -> None:
    (run, columns, size), (expected, _, _) = runs_of(kind, ON_DEVICE), runs_of(kind, dict(reference.OPS))
    steps = [metadata([5, 1, 2], [-1, -1, -1], [3, 1, 4]), metadata([1, 6], [4, 3], [0, 7])]
    states = {run: pool(size, 3), expected: pool(size, 3)}
    for number, step in enumerate(steps):
        x = numbers(int(step.query_start[-1]), columns, seed=number) * 2
        outputs = [each(x, states[each], step) for each in (run, expected)]
        assert_close(*outputs)
    found, wanted = states.values()
    assert torch.equal(found.isnan(), wanted.isnan()), "only what is named is written"
    assert_close(found.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS[2:-1])
def test_activations_of_16_bits_are_widened(kind: str, dtype: torch.dtype) -> None:
    (run, columns, size), (expected, _, _) = runs_of(kind, ON_DEVICE), runs_of(kind, dict(reference.OPS))
    step, x = metadata([4, 1], [-1, -1], [3, 1]), numbers(5, columns).to(dtype)
    actual = run(x, pool(size, 0), step)
    assert actual.dtype == dtype
    assert_close(actual, expected(x, pool(size, 0), step))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_has_the_same_bits_however_it_is_cut_and_in_any_company(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.ops.triton.kernels.recurrence.ROWS", 8)
    check_cuts(*runs_of(kind, ON_DEVICE), 40, monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_may_have_no_tokens(kind: str) -> None:
    run, columns, size = runs_of(kind, ON_DEVICE)
    states = pool(size, 0)
    states[:, 2] = 1.0
    assert run(numbers(0, columns), states, metadata([], [], [])).shape[0] == 0
    out = run(numbers(3, columns), states, metadata([0, 3], [2, -1], [5, 6]))
    assert not out.isnan().any(), "the first sequence has no token in the step"
    kept = states[:, 5].flatten()[:size] if states.shape[2] * 2 == size else states[0, 5]
    assert torch.equal(kept, torch.ones_like(kept)), "its state is that of before"


def test_states_are_allocated_where_the_engine_computes() -> None:
    states: Tensor = OPS["allocate_states"](num_blocks=6, num_bytes=80)  # type: ignore[assignment]
    assert (states.shape, states.dtype) == ((2, 6, 10), torch.float32)
