"""bfloat16 weights in 12 bits: the same bits as plain ones, or not at all."""

from __future__ import annotations

import pytest
import torch

from quire.config.memory.weights.formats import COMPACT_ISAS
from quire.ops.contracts.operands import LinearWeight
from quire.ops.cpu import library

pytestmark = pytest.mark.skipif(
    not library.available() or library.isa() not in COMPACT_ISAS,
    reason=f"compact weights need native kernels for one of {COMPACT_ISAS}",
)


def packed(*parts: torch.Tensor) -> LinearWeight:
    from quire.ops.cpu.products.packing import pack_linear

    return pack_linear(parts, dtype=torch.bfloat16)


def plain(*parts: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> LinearWeight:
    from quire.ops.cpu.products import packing

    with monkeypatch.context() as patch:
        patch.setattr(packing, "isa", lambda: "avx512")
        return packing.pack_linear(parts, dtype=torch.bfloat16)


def test_a_trained_weight_takes_three_quarters_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = (torch.randn(512, 1024) * 0.02).bfloat16()
    compact, whole = packed(weight), plain(weight, monkeypatch=monkeypatch)
    assert compact.tensors["packed"].nbytes < 0.76 * whole.tensors["packed"].nbytes


@pytest.mark.parametrize("sizes", [(256, 64, 40), (20, 44, 6, 2)], ids=["whole panels", "parts that meet inside"])
@pytest.mark.parametrize("rows", [1, 7, 16, 32, 33, 200])
def test_products_have_the_same_bits(rows: int, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.ops.cpu.products.gemm import gated_linear, linear

    parts = [(torch.randn(size, 416) * 0.02).bfloat16() for size in sizes]
    compact, whole = packed(*parts), plain(*parts, monkeypatch=monkeypatch)
    x = torch.randn(rows, 416).bfloat16()
    assert compact.tensors["packed"].dtype == torch.uint8
    assert torch.equal(linear(x, compact), linear(x, whole))
    assert torch.equal(gated_linear(x, compact, activation="silu"), gated_linear(x, whole, activation="silu"))
    assert torch.equal(linear(x.float(), compact), linear(x.float(), whole))


def test_rows_of_a_tied_head_are_the_rows_of_the_weight() -> None:
    from quire.ops.cpu.products.embedding import embedding

    weight = torch.randn(100, 64).bfloat16()
    weight[3, 5], weight[3, 6], weight[99, 63] = 0.0, 1e-30, 1e30
    table = packed(weight)
    assert table.tensors["packed"].dtype == torch.uint8
    assert torch.equal(embedding(torch.arange(100), table), weight)


def test_numbers_of_all_sizes_stay_plain() -> None:
    parts = [(torch.randn(64, 128) * 2.0 ** torch.randint(-40, 40, (64, 128))).bfloat16()]
    from quire.ops.cpu.products.gemm import linear

    weight = packed(*parts)
    assert weight.tensors["packed"].dtype == torch.bfloat16
    x = torch.zeros(1, parts[0].shape[1]).bfloat16()
    x[0, 3] = 1.0
    assert torch.equal(linear(x, weight)[0], torch.cat(parts)[:, 3])
