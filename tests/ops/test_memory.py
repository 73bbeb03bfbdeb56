"""Memory that weights share: what lies in it stays as written, and it takes few regions of the process."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from ctypes import c_uint64
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.config.memory.weights.sizes import weight_bytes
from quire.loader.load import load_model
from quire.models.decoder import DecoderForCausalLM
from quire.ops.backends import ops_of
from quire.ops.contracts.operands import LinearWeight
from quire.ops.contracts.ops import Ops
from quire.ops.cpu import library
from quire.platforms.cores import memory_nodes
from tests.models.harness import arch_of
from tests.ops.implementations import implementations_of, rand

MIB = 1 << 20
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}.get(platform.machine(), -1)
PREFERRED = 1


@pytest.fixture(autouse=True)
def ops() -> Ops:
    if "cpu" not in implementations_of("linear"):
        pytest.skip("the native kernels are not built")
    return ops_of("cpu")


def num_regions() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_many_weights_take_few_regions() -> None:
    from quire.ops.cpu.runtime.memory import weight_zeros, weights_together

    before = num_regions()
    with weights_together():
        weights = [weight_zeros(5 * MIB + 64 * index) for index in range(100)]
    assert num_regions() - before < 50, "of their own they take two each"
    assert not any(weight.data_ptr() % 64 for weight in weights)


def policy_of(tensor: Tensor) -> str:
    """How the system places the pages of a region, as numa_maps(5) names it."""
    regions = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    starts = {int(address, 16): policy for address, policy, *_ in regions}
    return starts[max(start for start in starts if start <= tensor.data_ptr())]


@pytest.fixture
def first_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were several nodes, all of whose names are the first one's."""
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this system knows no nodes")
    monkeypatch.setattr(library, "_nodes_in_words", lambda: (c_uint64 * 1)(1))


@pytest.mark.usefixtures("first_node")
def test_memory_comes_from_all_nodes_in_turn() -> None:
    from quire.ops.cpu.runtime.memory import weight_zeros, weights_together, zeros

    with weights_together():
        found = [policy_of(tensor) for tensor in (zeros(100), zeros(5 * MIB), weight_zeros(5 * MIB))]
    assert found == ["interleave:0"] * 3


@pytest.mark.usefixtures("first_node")
def test_a_policy_that_the_process_was_started_with_stays() -> None:
    from quire.ops.cpu.runtime.memory import zeros

    system = ctypes.CDLL(None)
    assert system.syscall(SET_MEMPOLICY, PREFERRED, ctypes.byref(c_uint64(1)), 64) == 0
    try:
        assert policy_of(zeros(5 * MIB)) == "prefer:0"
    finally:
        system.syscall(SET_MEMPOLICY, 0, None, 0)


def test_memory_of_one_node_is_left_alone() -> None:
    from quire.ops.cpu.runtime.memory import zeros

    if len(memory_nodes()) > 1:
        pytest.skip("this machine has several")
    assert library._nodes_in_words() is None
    if Path("/proc/self/numa_maps").exists():
        assert policy_of(zeros(5 * MIB)) == "default"


def test_weights_do_not_touch_each_other() -> None:
    from quire.ops.cpu.runtime.memory import weight_zeros, weights_together

    with weights_together():
        weights = [weight_zeros(size) for size in (3 * MIB, 1, 100, 70 * MIB, 63 * MIB, 65, 2 * MIB)]
        assert not any(weight.any() for weight in weights)
        for index, weight in enumerate(weights):
            weight.fill_(index + 1)
    for index, weight in enumerate(weights):
        assert (weight == index + 1).all()


def test_what_was_given_back_is_zero_when_it_is_taken_again() -> None:
    from quire.ops.cpu.runtime.memory import give_back, weight_zeros, weights_together

    with weights_together():
        first, last = weight_zeros(1000), weight_zeros(3 * MIB).fill_(7)
        address = last.data_ptr()
        give_back(last)
        again = weight_zeros(2 * MIB)
    assert again.data_ptr() == address
    assert not again.any()
    assert not first.any()


def test_shared_memory_goes_back_with_the_last_weight() -> None:
    from quire.ops.cpu.runtime.memory import weight_zeros, weights_together

    with weights_together():
        weights = [weight_zeros(6 * MIB).fill_(1) for _ in range(50)]
    taken = resident()
    del weights
    assert taken - resident() > 250 * MIB


def test_a_weight_beside_others_gives_the_same_bits(ops: Ops) -> None:
    x, parts = rand(5, 60), [rand(70, 60, seed=1), rand(33, 60, seed=2)]
    expected = ops.linear(x, ops.pack_linear(parts, dtype=torch.float32))
    with ops.weights_together():
        weights = [ops.pack_linear(parts, dtype=torch.float32) for _ in range(3)]
    for weight in weights:
        assert torch.equal(ops.linear(x, weight), expected)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_the_experts_of_a_layer_share_memory(
    ops: Ops, quantization: str | None, checkpoint: Callable[..., Path]
) -> None:
    directory = checkpoint("mixtral")
    arch = arch_of(directory)
    model = load_model(
        directory,
        arch,
        ops=ops,
        dtype=torch.bfloat16,
        max_model_len=64,
        load_format="dummy",
        quantization=quantization,
    )
    assert isinstance(model, DecoderForCausalLM)
    for layer in model.layers:
        packed = [tensor for expert in layer.mlp.weights.experts for tensor in packed_of(expert.gate_up, expert.down)]  # type: ignore[attr-defined]
        begin = min(tensor.data_ptr() for tensor in packed)
        end = max(tensor.data_ptr() + tensor.nbytes for tensor in packed)
        assert end - begin < sum(tensor.nbytes for tensor in packed) + 64 * len(packed)
        assert end - begin < weight_bytes(arch, "bfloat16", quantization)


def packed_of(*weights: LinearWeight) -> list[Tensor]:
    return [weight.tensors["packed"] for weight in weights]
