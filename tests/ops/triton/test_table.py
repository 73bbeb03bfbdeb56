"""The ops in Triton as an engine is given them; `tests/ops/test_backends.py` compares them with the contracts."""

from __future__ import annotations

import torch

from tests.ops.triton.device import DEVICE, randoms

from quire.ops import triton as ops  # isort: skip  (device decides whether Triton can be imported)


def test_ops_are_bound_to_a_device_and_a_library() -> None:
    bound = ops.dense_ops(torch.device("meta"), library_rows=3)
    assert bound["pack_linear"]([torch.ones(2, 4)], dtype=torch.float32).tensors["weight"].is_meta
    assert bound.keys() <= ops.OPS.keys()
    packed = ops.dense_ops(DEVICE)["pack_linear"]([torch.ones(2, 4)], dtype=torch.float32)
    x = randoms(3, 4)
    assert torch.allclose(bound["linear"](x, packed), ops.OPS["linear"](x, packed), atol=1e-5)
