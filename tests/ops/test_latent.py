"""Attention over latents against attention with all keys and values expanded, and the bits of rows in company."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from quire.ops.backends import ops_of
from quire.ops.contracts.operands import AttentionMetadata, HeadWeights, LatentSpec, LinearWeight, RopeAndCacheSpec
from quire.ops.contracts.ops import Ops
from tests.ops.implementations import assert_close, assert_rows_alone, implementations_of, rand

SMALL = LatentSpec(num_heads=3, rope_size=6, nope_size=12, latent_size=16, value_size=7, head_size=24, norm_eps=1e-5)
DEEPSEEK = LatentSpec(num_heads=128, rope_size=64, nope_size=128, latent_size=512, value_size=128, head_size=576)
DOTS = LatentSpec(num_heads=2, rope_size=64, nope_size=192, latent_size=1024, value_size=128, head_size=1088)
NUM_ROWS = 19


@pytest.fixture(params=implementations_of("latent_qkv"))
def ops(request: pytest.FixtureRequest) -> Ops:
    return ops_of(request.param)


@dataclass
class Latents:
    """Weights as drawn, and as an implementation packs them."""

    ops: Ops
    spec: LatentSpec
    dtype: torch.dtype = torch.float32
    format: str = "dense"

    def __post_init__(self) -> None:
        spec = self.spec
        self.norm = 1 + rand(spec.latent_size, seed=1) * 0.1
        self.keys = [rand(spec.nope_size, spec.latent_size, seed=100 + h) * 0.2 for h in range(spec.num_heads)]
        self.values = [rand(spec.value_size, spec.latent_size, seed=300 + h) * 0.2 for h in range(spec.num_heads)]
        self.to_latents = HeadWeights(heads=tuple(self._packed(weight.t()) for weight in self.keys))
        self.to_values = HeadWeights(heads=tuple(self._packed(weight) for weight in self.values))

    def _packed(self, weight: Tensor) -> LinearWeight:
        if self.format != "dense":
            return self.ops.quantize_linear([weight], format=self.format)
        return self.ops.pack_linear([weight], dtype=self.dtype)

    def inputs(self, rows: int) -> tuple[Tensor, Tensor]:
        """Queries and compressed tokens."""
        spec = self.spec
        query = rand(rows, spec.num_heads * (spec.nope_size + spec.rope_size), seed=2, dtype=self.dtype)
        return query, rand(rows, spec.latent_size + spec.rope_size, seed=3, dtype=self.dtype)

    def qkv(self, query: Tensor, compressed: Tensor) -> Tensor:
        return self.ops.latent_qkv(query, compressed, self.norm, self.to_latents, self.spec)

    def parts(self, query: Tensor, compressed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Unrotated and rotated queries [T, H, ...], latents [T, C] and rotated keys [T, P], in float64."""
        spec = self.spec
        heads = query.double().view(len(query), spec.num_heads, -1)
        raw, key = compressed.double().split([spec.latent_size, spec.rope_size], dim=1)
        latent = raw / (raw.square().mean(1, keepdim=True) + spec.norm_eps).sqrt() * self.norm.double()
        return heads[..., : spec.nope_size], heads[..., spec.nope_size :], latent, key


def test_queries_keys_and_values_stand_where_attention_reads_them(ops: Ops) -> None:
    latents, spec = Latents(ops, SMALL), SMALL
    query, compressed = latents.inputs(NUM_ROWS)
    nope, rotated, latent, key = latents.parts(query, compressed)
    expected = torch.zeros(NUM_ROWS, spec.num_heads + 2, spec.head_size, dtype=torch.float64)
    first, end = spec.rope_size, spec.rope_size + spec.latent_size
    expected[:, :-2, :first] = rotated
    for head, weight in enumerate(latents.keys):
        expected[:, head, first:end] = nope[:, head] @ weight.double()
    expected[:, -2, :first] = key
    expected[:, -2:, first:end] = latent.unsqueeze(1)
    assert_close(latents.qkv(query, compressed), expected.flatten(1))


@pytest.mark.parametrize(
    ("spec", "rows"),
    [(SMALL, 37), (DEEPSEEK, 3), (DOTS, 17)],
    ids=["small", "as large as DeepSeek's", "as wide as those of dots3-note"],
)
def test_attention_is_that_over_expanded_keys_and_values(ops: Ops, spec: LatentSpec, rows: int) -> None:
    latents = Latents(ops, spec)
    query, compressed = latents.inputs(rows)
    attended = attend(ops, latents.qkv(query, compressed), spec)
    assert_close(ops.latent_values(attended, latents.to_values, spec), expanded(latents, query, compressed))


def attend(ops: Ops, qkv: Tensor, spec: LatentSpec) -> Tensor:
    """One sequence, in blocks of 16 tokens; nothing is rotated. Shapes: qkv [T, (H + 2) * D] -> [T, H * D]."""
    rows = len(qkv)
    cache = ops.allocate_kv_cache(
        num_blocks=4, block_size=16, num_kv_heads=1, head_size=spec.head_size, dtype=torch.float32
    ).fill_(float("nan"))
    fixed = RopeAndCacheSpec(
        num_heads=spec.num_heads, num_kv_heads=1, head_size=spec.head_size, rotary_dim=spec.rope_size
    )
    query = ops.rope_and_cache(qkv, torch.arange(rows), None, None, None, cache, torch.arange(rows), fixed)
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, rows], dtype=torch.int32),
        seq_lens=torch.tensor([rows], dtype=torch.int32),
        block_tables=torch.arange(4, dtype=torch.int32).unsqueeze(0),
        block_size=16,
    )
    return ops.paged_attention(query, cache, metadata, scale=0.3)


def expanded(latents: Latents, query: Tensor, compressed: Tensor) -> Tensor:
    """Keys and values of every head, and attention head by head, in float64."""
    nope, rotated, latent, key = latents.parts(query, compressed)
    heads = []
    for head, (to_key, to_value) in enumerate(zip(latents.keys, latents.values, strict=True)):
        scores = nope[:, head] @ (latent @ to_key.double().t()).t() + rotated[:, head] @ key.t()
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        heads.append((scores * 0.3).masked_fill(hidden, -torch.inf).softmax(1) @ (latent @ to_value.double().t()))
    return torch.cat(heads, dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ["dense", "int8", "int4_g32"])
def test_a_row_does_not_depend_on_its_neighbours(format: str, dtype: torch.dtype, ops: Ops) -> None:
    if format != "dense" and ops.name == "reference":
        pytest.skip("the reference has no quantised weights")
    latents = Latents(ops, SMALL, dtype=dtype, format=format)
    query, compressed = latents.inputs(NUM_ROWS)
    attended = rand(NUM_ROWS, SMALL.num_heads * SMALL.head_size, seed=4, dtype=dtype)
    assert_rows_alone(lambda rows: latents.qkv(query[rows], compressed[rows]), NUM_ROWS)
    assert_rows_alone(lambda rows: ops.latent_values(attended[rows], latents.to_values, SMALL), NUM_ROWS)


@pytest.mark.parametrize("format", ["int8", "int4_g32"])
def test_rounded_weights_are_close(format: str, ops: Ops) -> None:
    if ops.name == "reference":
        pytest.skip("the reference has no quantised weights")
    query, compressed = Latents(ops, SMALL).inputs(NUM_ROWS)
    exact = Latents(ops, SMALL).qkv(query, compressed)
    rounded = Latents(ops, SMALL, format=format).qkv(query, compressed)
    assert 0 < (rounded - exact).norm() < {"int8": 0.02, "int4_g32": 0.2}[format] * exact.norm()


@pytest.mark.parametrize(("num_rows", "dtype"), [(1, torch.float32), (4, torch.float32), (64, torch.bfloat16)])
def test_a_replay_computes_anew(ops: Ops, num_rows: int, dtype: torch.dtype) -> None:
    """Of 64 rows in bfloat16, native ops pass each other tiles, which these do not read."""
    latents, spec = Latents(ops, SMALL, dtype=dtype), SMALL
    size = spec.num_heads * spec.value_size
    buffer, norm = torch.zeros(num_rows, size, dtype=dtype), 1 + rand(size, seed=5)
    query, compressed = latents.inputs(num_rows)
    project, compress, attended = (
        ops.pack_linear([rand(width, size, seed=6 + index) * 0.2], dtype=dtype)
        for index, width in enumerate((query.shape[1], compressed.shape[1], spec.num_heads * spec.head_size))
    )

    def run() -> tuple[Tensor, ...]:
        hidden = ops.rms_norm(buffer, norm, 1e-6)
        qkv = latents.qkv(ops.linear(hidden, project), ops.linear(hidden, compress))
        values = ops.latent_values(ops.linear(hidden, attended), latents.to_values, spec)
        return qkv, ops.rms_norm(values, norm, 1e-6, residual=buffer)

    graph = ops.make_graphs().record(run)
    for seed in range(3):
        buffer.copy_(rand(num_rows, size, seed=seed))
        assert all(map(torch.equal, graph.replay(), run()))
