"""Layers: where their parameters come from, and what happens to them at load."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from quire.config.arch import ModelArch
from quire.config.quantized.stored import Header
from quire.distributed.groups import ParallelContext, ParallelGroup
from quire.errors import ConfigError
from quire.layers.activation import activation_of
from quire.layers.context import LayerContext
from quire.layers.embedding import Embedding, LMHead
from quire.layers.linear import GatedLinear, Linear
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.weights import ShardSpec, WeightMap
from tests.config.test_arch import LLAMA
from tests.ops.implementations import REFERENCE, assert_close, rand


class DictReader:
    """Weights from a dict."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.released: list[str] = []

    def header(self, name: str) -> Header | None:
        tensor = self.tensors.get(name)
        return None if tensor is None else Header("F32", tuple(tensor.shape))

    def read(self, name: str, shape: tuple[int, ...], shard: ShardSpec) -> Tensor:
        assert self.tensors[name].shape == shape
        part = shard.slice_of(shape[shard.dim])
        return self.tensors[name].narrow(shard.dim, part.start, part.stop - part.start)

    def release(self, names: Sequence[str]) -> None:
        self.released.extend(names)


def context(
    tensors: dict[str, Tensor], weight_map: WeightMap | None = None, rank: int = 0, size: int = 1
) -> LayerContext:
    return LayerContext(
        ops=REFERENCE,
        weights=DictReader(tensors),
        weight_map=weight_map or WeightMap(),
        dtype=torch.float32,
        max_model_len=64,
        parallel=ParallelContext(tp=ParallelGroup(rank=rank, size=size)),
    )


def test_child_extends_the_dotted_name() -> None:
    ctx = context({})
    assert ctx.child("model").child("layers").child(3).child("q_proj").name == "model.layers.3.q_proj"


def test_fused_linear_reads_the_layers_it_stands_for() -> None:
    tensors = {f"attn.{name}_proj.weight": rand(size, 8, seed=size) for name, size in (("q", 6), ("k", 4), ("v", 2))}
    tensors |= {f"attn.{name}_proj.bias": rand(size, seed=size) for name, size in (("q", 6), ("k", 4), ("v", 2))}
    ctx = context(tensors, WeightMap(fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj")}))
    linear = Linear(ctx.child("attn").child("qkv_proj"), 8, 6, 4, 2, bias=True)
    x = rand(3, 8)
    expected = [
        x @ tensors[f"attn.{name}_proj.weight"].T + tensors[f"attn.{name}_proj.bias"] for name in ("q", "k", "v")
    ]
    assert_close(linear(x), torch.cat(expected, dim=-1))
    assert isinstance(ctx.weights, DictReader)
    assert sorted(ctx.weights.released) == sorted(tensors)


def test_transposed_linear_is_stored_the_other_way_round() -> None:
    tensors = {"c_attn.weight": rand(8, 12)}
    linear = Linear(context(tensors, WeightMap(transposed=frozenset({"c_attn"}))).child("c_attn"), 8, 4, 4, 4)
    x = rand(3, 8, seed=1)
    assert_close(linear(x), x @ tensors["c_attn.weight"])


@pytest.mark.parametrize("transposed", [False, True])
def test_ranks_hold_slices_of_the_outputs_or_the_inputs(transposed: bool) -> None:
    weight, bias, x = rand(8, 12), rand(8, seed=1), rand(3, 12, seed=2)
    stored = {"up.weight": weight.T if transposed else weight, "up.bias": bias}
    weight_map = WeightMap(transposed=frozenset({"up"}) if transposed else frozenset())
    columns = [Linear(context(stored, weight_map, rank, 2).child("up"), 12, 8, bias=True)(x) for rank in range(2)]
    assert_close(torch.cat(columns, dim=-1), x @ weight.T + bias)
    rows = [
        Linear(context(stored, weight_map, rank, 2).child("up"), 12, 8, bias=True, shard_dim=1)(
            x.chunk(2, dim=-1)[rank]
        )
        for rank in range(2)
    ]
    assert_close(rows[0] + rows[1], x @ weight.T + bias)


def test_gated_linear_multiplies_its_halves() -> None:
    tensors = {"gate_proj.weight": rand(6, 8), "up_proj.weight": rand(6, 8, seed=1)}
    ctx = context(tensors, WeightMap(fuse={"gate_up_proj": ("gate_proj", "up_proj")}))
    x = rand(3, 8, seed=2)
    gate, up = x @ tensors["gate_proj.weight"].T, x @ tensors["up_proj.weight"].T
    gated = GatedLinear(ctx.child("gate_up_proj"), 8, 6, activation="relu")
    assert_close(gated.gate(x), gate.relu() * up)


def test_norm_offset_is_added_at_load() -> None:
    norm = RMSNorm(context({"norm.weight": torch.full((8,), 0.5)}).child("norm"), 8, 1e-6, offset=1.0)
    assert torch.equal(norm.weight, torch.full((8,), 1.5))


def test_layer_norm_without_parameters_reads_nothing() -> None:
    norm, x = LayerNorm(context({}).child("norm"), 8, 1e-5, has_weight=False, has_bias=False), rand(3, 8)
    assert_close(norm(x), torch.nn.functional.layer_norm(x, (8,)))


def test_a_tied_embedding_is_kept_once_and_its_scale_leaves_the_head_alone() -> None:
    tensors = {"embed.weight": rand(10, 8)}
    ctx, x = context(tensors), rand(3, 8, seed=1)
    embedding = Embedding(ctx.child("embed"), 10, 8, scale=2.0, tied=True)
    head = LMHead(ctx.child("embed"), 10, 8, tied_to=embedding)
    assert head.weight is embedding.table
    assert torch.equal(embedding(torch.tensor([3])), tensors["embed.weight"][3:4] * 2)
    assert_close(head(x), x @ tensors["embed.weight"].T)


def test_capped_logits_do_not_depend_on_the_number_of_rows() -> None:
    head = LMHead(context({"head.weight": rand(37, 8)}).child("head"), 37, 8, soft_cap=3.0)
    hidden = rand(9, 8, seed=1)
    whole = head(hidden)
    assert_close(whole, 3 * torch.tanh((hidden @ rand(37, 8).T) / 3))
    assert torch.equal(torch.cat([head(hidden[row : row + 1]) for row in range(9)]), whole)


def test_unknown_activation_is_refused() -> None:
    arch = ModelArch.from_config({**LLAMA, "hidden_act": "gelu_tan"}, source="config.json")
    with pytest.raises(ConfigError, match=r"config.json: the activation 'gelu_tan' .* Supported: silu"):
        activation_of(arch)
