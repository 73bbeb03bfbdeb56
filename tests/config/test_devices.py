"""What follows from the device: its ops, and what is planned in its memory and what in the host's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import Capabilities, Choice, QuireConfig
from quire.config.graph_sizes import graph_sizes
from quire.config.memory.plan import BYTES_OF_LAUNCH, LAUNCHES_OF_LAYER, SPLITS_BYTES
from quire.engine.identity import identity_of
from quire.errors import ConfigError
from tests.config.test_resolve import ARCH, GIB, MACHINE, resolved

GPU = replace(
    MACHINE,
    name="NVIDIA H200",
    device_type="cuda",
    total_memory=10 * GIB,
    available_memory=9 * GIB,
    host_memory=64 * GIB,
    host_available_memory=60 * GIB,
    block_size=16,
    ops="triton",
    ops_reason="Triton kernels for sm_90",
    ops_isa="sm_90",
    default_memory_fraction=0.8,
)
HOST = ("kv_ram", "requests", "grammars", "process")


def on_gpu(tmp_path: Path, machine: Capabilities = GPU, **options: Any) -> QuireConfig:
    return resolved(tmp_path, machine=machine, max_num_seqs=4096, max_num_batched_tokens=4096, **options)


def test_the_cache_fills_the_devices_memory_and_takes_nothing_of_it_for_the_host(tmp_path: Path) -> None:
    small = replace(GPU, total_memory=GIB // 2, available_memory=GIB // 2)
    config = on_gpu(tmp_path, small)
    on_device = sum(size for name, size in config.memory_plan.items() if name not in (*HOST, "loading"))
    allowed = int(0.8 * small.total_memory)
    assert allowed - config.kv_layout.block_bytes < on_device <= allowed
    with pytest.raises(ConfigError, match="no memory is left"):  # where the host's parts come out of it, too
        on_gpu(tmp_path, replace(small, host_memory=0, host_available_memory=0))


def test_pages_beside_the_cache_are_the_hosts(tmp_path: Path) -> None:
    without, beside = (on_gpu(tmp_path, kv_ram=size) for size in (None, 20 * GIB))
    assert beside.memory_plan["kv_ram"] > 19 * GIB
    assert beside.cache_config.num_blocks == without.cache_config.num_blocks


def test_more_than_the_host_has_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"of the host's memory .*more than the 64.00 GiB.*kv_ram"):
        on_gpu(tmp_path, kv_ram=64 * GIB)


def test_more_than_the_device_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"more than the 10.00 GiB there are"):
        on_gpu(tmp_path, kv_cache_memory_bytes=10 * GIB)
    with pytest.raises(ConfigError, match="no memory is left for the KV cache"):
        on_gpu(tmp_path, replace(GPU, available_memory=1 << 20))


def test_defaults_are_the_devices(tmp_path: Path) -> None:
    busy = replace(GPU, default_max_num_seqs=512, default_max_num_batched_tokens=8192)
    config = resolved(tmp_path, machine=busy)
    assert config.scheduler_config.max_num_seqs == 512
    assert config.scheduler_config.max_num_batched_tokens == 8192
    assert config.choices["max_num_seqs"].reason == "default on NVIDIA H200"
    assert config.device_config.torch_device == "cuda"


def test_torch_calls_amds_gpus_cuda(tmp_path: Path) -> None:
    config = on_gpu(tmp_path, replace(GPU, device_type="rocm"))
    assert (config.device_config.device_type, config.device_config.torch_device) == ("rocm", "cuda")


@pytest.mark.parametrize("ops", ["cpu", "reference"])
@pytest.mark.parametrize("device", ["cuda", "rocm"])
def test_a_gpu_has_its_own_ops(tmp_path: Path, device: str, ops: str) -> None:
    with pytest.raises(ConfigError, match=rf"ops='{ops}' compute on CPUs, and device='{device}'"):
        on_gpu(tmp_path, replace(GPU, device_type=device), ops=ops)


def test_the_gpus_ops_run_on_cpus_only_interpreted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="ops='triton' compute on GPUs"):
        resolved(tmp_path, ops="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolved(tmp_path, ops="triton").device_config.ops == "triton"


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (4096, (1, 2, 4, *range(8, 513, 8))),
    ],
)
def test_steps_of_a_gpu_are_captured_for_a_few_numbers_of_sequences(most: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(most) == sizes


@pytest.mark.parametrize("device", ["cuda", "rocm"])
def test_graphs_are_planned_with_where_they_are_captured(tmp_path: Path, device: str) -> None:
    machine = replace(GPU, device_type=device)
    captured, eager = (resolved(tmp_path, machine=machine, max_num_seqs=32, enforce_eager=e) for e in (False, True))
    assert captured.compilation_config.graph_sizes == (1, 2, 4, 8, 16, 24, 32)
    assert captured.choices["enforce_eager"] == Choice(
        False, "steps that compute one token of each sequence are captured"
    )
    logits_and_outputs = 32 * ARCH.vocab_size * 4 * 2
    launches = 7 * ARCH.num_layers * LAUNCHES_OF_LAYER * BYTES_OF_LAUNCH
    assert captured.memory_plan["graphs"] > SPLITS_BYTES + logits_and_outputs + launches
    assert eager.compilation_config.graph_sizes == ()
    assert eager.memory_plan["graphs"] == 0
    assert eager.choices["enforce_eager"].reason == "given"


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_cpu_captures_nothing_whatever_it_is_told(tmp_path: Path, enforce_eager: bool) -> None:
    config = resolved(tmp_path, enforce_eager=enforce_eager)
    assert config.compilation_config.graph_sizes == ()
    assert config.memory_plan["graphs"] == 0


def test_attention_has_no_more_scratch_than_is_planned_for_graphs() -> None:
    attention = pytest.importorskip("quire.ops.triton.attention", reason="triton is not installed")
    assert attention.SCRATCH_BYTES <= SPLITS_BYTES


def test_weights_that_are_rounded_take_less(tmp_path: Path) -> None:
    plain, int8, int4 = (on_gpu(tmp_path, quantization=method) for method in (None, "int8", "int4"))
    weights = [config.memory_plan["weights"] for config in (plain, int8, int4)]
    assert weights == sorted(weights, reverse=True)


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_the_reference_ops_round_nothing(tmp_path: Path, method: str) -> None:
    with pytest.raises(ConfigError, match=r"needs the native kernels, and .* Install a C\+\+ compiler"):
        resolved(tmp_path, ops="reference", quantization=method)


def test_the_promise_of_a_gpu_can_be_given_up_and_says_so(tmp_path: Path) -> None:
    kept, given_up = (on_gpu(tmp_path, batch_invariant=kept) for kept in (True, False))
    assert (kept.row_invariant, given_up.row_invariant) == (True, False)
    assert identity_of(kept, "").differences(identity_of(given_up, "")) == ["row_invariant: True, not False"]
    with pytest.raises(ConfigError, match="batch_invariant=False is for GPUs"):
        resolved(tmp_path, batch_invariant=False)
