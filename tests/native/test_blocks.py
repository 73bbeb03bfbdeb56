"""Blocks of GGUF files become the same weights and numbers natively as they do in torch, bit for bit."""

import pytest
import torch

from quire.errors import ConfigError, EngineError
from quire.ops.cpu import library

if not library.available():
    pytest.skip(str(library.unavailable_reason()), allow_module_level=True)

from quire.config.gguf.tensor_types import BY_NAME, QUANTIZED
from quire.ops import reference
from quire.ops.contracts.operands import BlockRows, BlockTable, LinearWeight
from quire.ops.cpu.products.embedding import embedding
from quire.ops.cpu.products.quantized import pack_quantized
from quire.ops.shared.blocks import unpack_blocks

HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
"""Where the numbers of float16 of a block are."""
HALF_ROWS = (slice(None, None, 2), slice(1, None, 2))


def random_blocks(name: str, rows: int, blocks: int, scale: float = 0.01) -> BlockRows:
    """Random bytes, but for scales, which are random numbers of about `scale`."""
    kind, generator = BY_NAME[name], torch.Generator().manual_seed(rows * 1000 + blocks)
    raw = torch.randint(0, 256, (rows, blocks, kind.block_bytes), dtype=torch.uint8, generator=generator)
    for place in HALVES[name]:
        halves = (torch.randn(rows, blocks, 1, generator=generator) * scale).half()
        raw[:, :, place : place + 2] = halves.view(torch.uint8)
    if name == "MXFP4":
        raw[:, :, 0] = raw[:, :, 0] % 16 + 116
    return BlockRows(type_name=name, blocks=raw.view(rows, -1))


def assert_same(found: LinearWeight, expected: LinearWeight) -> None:
    assert found.format == expected.format
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        pair = (found.tensors[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        assert torch.equal(*pair), name


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("scale", [0.01, 1e-6, 500.0])
def test_blocks_are_packed_as_what_they_hold(name: str, scale: float) -> None:
    for blocks in (1, 3, 12) if BY_NAME[name].block_size == 256 else (1, 3, 8, 9, 24):
        rows = random_blocks(name, 70, blocks, scale)
        assert_same(pack_quantized([rows]), pack_quantized([unpack_blocks(rows)]))


@pytest.mark.parametrize("name", QUANTIZED)
def test_parts_begin_anywhere_in_a_panel(name: str) -> None:
    rows = random_blocks(name, 101, 4)
    parts = [rows[:33], rows[33:40], rows[40:]]
    assert_same(pack_quantized(parts), pack_quantized([unpack_blocks(rows)]))
    assert_same(pack_quantized([*parts[:2], unpack_blocks(parts[2])]), pack_quantized([rows]))


def test_rows_may_lie_apart() -> None:
    rows = random_blocks("Q4_K", 64, 2)
    assert_same(pack_quantized([rows[::2], rows[1::2]]), pack_quantized([unpack_blocks(rows[r]) for r in HALF_ROWS]))


def test_types_of_different_formats_lie_side_by_side() -> None:
    packed = pack_quantized([random_blocks("Q4_K", 40, 1), random_blocks("Q6_K", 24, 1)])
    assert [part.format for part in packed.parts] == ["int4_g32_offsets_nested", "int6_g16_nested"]


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00])
@pytest.mark.parametrize("name", [name for name in QUANTIZED if HALVES[name]])
def test_scales_that_are_no_numbers_are_refused(name: str, bits: int) -> None:
    rows = random_blocks(name, 70, 2)
    place = HALVES[name][-1]
    rows.blocks[69, place], rows.blocks[69, place + 1] = bits & 255, bits >> 8
    # The codes that are multiplied with it are not zero.
    rows.blocks[69, [i for i in range(BY_NAME[name].block_bytes) if i not in (place, place + 1)]] = 17
    with pytest.raises(ConfigError, match="not finite"):
        pack_quantized([rows])


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_a_table_are_those_of_the_reference(name: str, dtype: torch.dtype) -> None:
    table = BlockTable(rows=random_blocks(name, 300, 3), dtype=dtype)
    ids = torch.tensor([7, 0, 299, 7, *range(60)])
    expected = reference.OPS["embedding"](ids, table)
    assert isinstance(expected, torch.Tensor)
    assert torch.equal(embedding(ids, table), expected)


@pytest.mark.parametrize("name", QUANTIZED)
def test_any_bytes_are_blocks(name: str) -> None:
    raw = torch.randint(0, 256, (64, 3 * BY_NAME[name].block_bytes), dtype=torch.uint8)
    table, ids = BlockTable(rows=BlockRows(type_name=name, blocks=raw), dtype=torch.float32), torch.arange(64)
    expected = reference.OPS["embedding"](ids, table)
    assert isinstance(expected, torch.Tensor)
    found = embedding(ids, table)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(0), expected.nan_to_num(0))


@pytest.mark.parametrize("token", [-1, 300])
def test_rows_beyond_the_table_are_refused(token: int) -> None:
    table = BlockTable(rows=random_blocks("Q6_K", 300, 1), dtype=torch.bfloat16)
    with pytest.raises(EngineError):
        embedding(torch.tensor([3, token]), table)
