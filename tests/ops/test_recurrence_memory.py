"""What a recurrent layer works with beside the activations is no more than is planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire.config.memory.activations import scratch
from quire.config.memory.activations.scratch import recurrence_bytes
from quire.ops.backends import implementation_of
from quire.ops.contracts.ops import Ops
from quire.ops.shared import recurrence
from tests.conftest import Checkpoint
from tests.models.harness import Harness, arch_of

WIDE: dict[str, dict[str, Any]] = {
    "mamba": {"expand": 8, "time_step_rank": 40},
    "mamba2": {"expand": 8, "num_heads": 16, "head_dim": 32, "state_size": 32},
    "lfm2": {"hidden_size": 256},
    "qwen3_next": {"linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "kimi_linear": {"linear_num_heads": 8, "linear_head_dim": 64},
    "minimax": {"head_dim": 128},
    "recurrent_gemma": {"hidden_size": 256},
    "zaya": {"head_dim": 64, "cca_time0": 2},
}
"""One family for each recurrence, wide enough for the padding of rows to be little."""
OPS = ("mamba", "mamba2", "short_conv", "gated_delta", "lightning_attention", "rg_lru", "convolved_qkv")


class Live(TorchDispatchMode):
    """Bytes of the tensors that are made and still there."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = function(*args, **(kwargs or {}))
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and _key(leaf) not in given | self._made.keys():
                storage = leaf.untyped_storage()
                self._made[_key(leaf)] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(num_bytes for _, num_bytes in self._made.values()))
        return out


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.mark.parametrize("counts", [(61,), (30, 1, 1, 1), (1,) * 9])
@pytest.mark.parametrize("family", WIDE)
def test_a_recurrence_works_within_what_is_planned(
    checkpoint: Checkpoint, family: str, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint(family, **WIDE[family])
    for module in (recurrence, scratch):
        monkeypatch.setattr(module, "STATES_AT_ONCE", 1)
    measured: list[int] = []

    def watched(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **beside: Any) -> Tensor:
            with Live() as live:
                out = op(*args, **beside)
            measured.append(live.most)
            return out

        return call

    reference = implementation_of("reference")
    ops = Ops("reference", {**reference, **{name: watched(reference[name]) for name in OPS}})
    harness = Harness(ops, directory, dtype=torch.bfloat16)
    harness.step([(harness.add([7] * count), count) for count in counts])
    planned = recurrence_bytes(arch_of(directory), sum(counts), len(counts), ops="reference")
    assert planned / 4 < max(measured) <= planned
