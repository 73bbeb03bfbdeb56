"""The tensors that a model of a family is made of, from its `ModelArch` alone, and the bytes they take once loaded.

Says of numbers what `quire.models` builds: a test compares the two for every family, dtype and quantisation.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from quire.config.arch import ModelArch
from quire.config.experts import ExpertsSpec
from quire.messages.kv import DTYPE_BYTES
from quire.utils.math import cdiv, round_up

PANEL = 32
"""Output features that the native kernels store together, and the depth of their bfloat16 tiles."""
INT4_GROUP = 128
"""Input features that share a scale of an int4 weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """Linear layers of one shape."""

    parts: tuple[int, ...]
    """Output features of each of the checkpoint's tensors that the layer computes at once."""
    in_features: int
    count: int = 1
    """How many layers of the model have this shape."""
    active: int | None = None
    """How many of them a token passes; None for all."""
    dtype: str | None = None
    """What the layer is kept in, whatever the dtype and the quantisation of the model."""

    @property
    def out_features(self) -> int:
        """Of all parts."""
        return sum(self.parts)

    @property
    def num_weights(self) -> int:
        """Numbers of one layer."""
        return self.out_features * self.in_features

    @property
    def num_active(self) -> int:
        """Numbers of all layers that a token passes."""
        return self.num_weights * (self.count if self.active is None else self.active)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightShapes:
    """All parameters of a model."""

    body: tuple[LinearShape, ...]
    head: LinearShape
    """Also the embedding where the two are tied."""
    table: int
    """Numbers of the table of token embeddings."""
    positions: int
    """Numbers of the table of positions."""
    floats: int
    """Norms and biases, which are kept in float32."""
    is_tied: bool
    is_transposed: bool
    """The checkpoint stores the weights of the body [in, out]."""


def weight_shapes(arch: ModelArch) -> WeightShapes:
    """The parameters of a model; those of an unknown family as if it were a relative of Llama."""
    learned = arch.family.has_learned_positions
    floats, body = _learned_positions(arch) if learned else _decoder(arch)
    positions = arch.max_position_embeddings + 2 * (arch.model_type == "opt")
    return WeightShapes(
        body=body,
        head=LinearShape(parts=(arch.vocab_size,), in_features=arch.embedding_size),
        table=arch.vocab_size * arch.embedding_size,
        positions=positions * arch.hidden_size if learned else 0,
        floats=floats,
        is_tied=arch.tie_word_embeddings,
        is_transposed=arch.model_type == "gpt2",
    )


def num_parameters(arch: ModelArch) -> int:
    """Parameters of a model, tied ones counted once; exact for the families quire ships."""
    shapes = weight_shapes(arch)
    head = 0 if shapes.is_tied else shapes.head.num_weights
    linears = sum(shape.count * shape.num_weights for shape in shapes.body)
    ones = 0 if _has_norm_weights(arch) else _num_layer_norms(arch) * arch.hidden_size  # made while loading
    return linears + head + shapes.table + shapes.positions + shapes.floats - ones


def num_active_parameters(arch: ModelArch) -> int:
    """Parameters that one token meets: all of them, but for the experts that it is not sent to."""
    body = weight_shapes(arch).body
    return num_parameters(arch) - sum(shape.count * shape.num_weights - shape.num_active for shape in body)


def _decoder(arch: ModelArch) -> tuple[int, tuple[LinearShape, ...]]:
    """(floats, linear layers) of the families with gated MLPs."""
    size, ffn, qkv = arch.hidden_size, arch.intermediate_size, _qkv(arch)
    num_mlps = sum(layer.experts is None for layer in arch.layers)
    biases = arch.attention_bias * qkv.out_features + arch.output_bias * size
    norms = (4 if arch.family.has_post_norms else 2) * size + 2 * arch.head_size * arch.family.has_head_norms
    floats = arch.num_layers * (biases + norms) + size + num_mlps * arch.mlp_bias * (2 * ffn + size)
    shapes = [qkv, _output(arch)]
    if num_mlps:
        shapes += _gated_mlp(size, ffn, num_mlps, num_mlps)
    for experts, count in Counter(layer.experts for layer in arch.layers if layer.experts is not None).items():
        floats += count * _expert_floats(arch, experts)
        shapes += _mixture(arch, experts, count)
    return floats, tuple(shapes)


def _gated_mlp(size: int, ffn: int, count: int, active: int) -> list[LinearShape]:
    return [
        LinearShape(parts=(ffn, ffn), in_features=size, count=count, active=active),
        LinearShape(parts=(size,), in_features=ffn, count=count, active=active),
    ]


def _mixture(arch: ModelArch, experts: ExpertsSpec, count: int) -> list[LinearShape]:
    """Linear layers of mixtures of experts in so many layers."""
    size, chosen = arch.hidden_size, experts.routing.num_chosen
    router = (experts.num_experts, 1) if experts.has_shared_gate else (experts.num_experts,)
    shapes = [LinearShape(parts=router, in_features=size, count=count, dtype="float32")]
    shapes += _gated_mlp(size, experts.size, count * experts.num_experts, count * chosen)
    return shapes + (_gated_mlp(size, experts.shared_size, count, count) if experts.shared_size else [])


def _expert_floats(arch: ModelArch, experts: ExpertsSpec) -> int:
    bias = experts.has_shared_bias * (2 * experts.shared_size + arch.hidden_size)
    return bias + experts.has_choice_bias * experts.num_experts


def _learned_positions(arch: ModelArch) -> tuple[int, tuple[LinearShape, ...]]:
    """(floats, linear layers) of OPT and GPT-2."""
    size, ffn, qkv = arch.hidden_size, arch.intermediate_size, _qkv(arch)
    biases = arch.attention_bias * qkv.out_features + arch.output_bias * size + arch.mlp_bias * (ffn + size)
    norm = (2 if _has_norm_weights(arch) else 1) * size
    up = LinearShape(parts=(ffn,), in_features=size, count=arch.num_layers)
    down = LinearShape(parts=(size,), in_features=ffn, count=arch.num_layers)
    body = [qkv, _output(arch), up, down]
    if arch.embedding_size != size:
        body.append(LinearShape(parts=(size,), in_features=arch.embedding_size))
        body.append(LinearShape(parts=(arch.embedding_size,), in_features=size))
    return arch.num_layers * biases + _num_layer_norms(arch) * norm, tuple(body)


def _has_norm_weights(arch: ModelArch) -> bool:
    return bool(arch.raw.get("layer_norm_elementwise_affine", True))


def _num_layer_norms(arch: ModelArch) -> int:
    """Of OPT and GPT-2."""
    has_final = arch.raw.get("do_layer_norm_before", True) and not arch.raw.get("_remove_final_layer_norm", False)
    return 2 * arch.num_layers + bool(has_final)


def _qkv(arch: ModelArch) -> LinearShape:
    query, key = arch.num_heads * arch.head_size, arch.num_kv_heads * arch.head_size
    return LinearShape(parts=(query, key, key), in_features=arch.hidden_size, count=arch.num_layers)


def _output(arch: ModelArch) -> LinearShape:
    heads = arch.num_heads * arch.head_size
    return LinearShape(parts=(arch.hidden_size,), in_features=heads, count=arch.num_layers)


def context_per_token(arch: ModelArch) -> float:
    """Tokens of context whose attention, in all layers, takes as many operations as all linear layers of one token.

    Of a longer context than their window, layers that have one read only that: see `window_shares`.
    """
    linear = sum(shape.num_active for shape in weight_shapes(arch).body)
    return linear / (2 * arch.num_heads * arch.head_size * arch.num_layers)


def window_shares(arch: ModelArch) -> tuple[tuple[int, float], ...]:
    """(window, share of the layers that have it): they read no more of the context than that."""
    windows = Counter(layer.window for layer in arch.layers if layer.window is not None)
    return tuple((window, count / arch.num_layers) for window, count in sorted(windows.items()))


def packed_bytes(shape: LinearShape, format: str, *, ops: str, isa: str = "") -> int:
    """Bytes of one layer of a shape as the ops lay it out; `format` is a dtype, int8 or int4.

    bfloat16 for AMX tiles takes 12 bits where it can (`csrc/cpu/compact.h`); a weight whose numbers spread too far
    keeps 16, which only its values tell.
    """
    if ops != "cpu":
        return shape.num_weights * DTYPE_BYTES[format]
    panels, depth = cdiv(shape.out_features, PANEL), shape.in_features
    if format == "int8":
        return panels * PANEL * (round_up(depth, 64) + 4)
    if format == "int4":
        return panels * PANEL * (round_up(depth, 64) // 2 + 2 * cdiv(depth, INT4_GROUP))
    if format == "bfloat16" and isa == "amx" and all(part % PANEL == 0 for part in shape.parts[:-1]):
        return panels * _compact_panel_bytes(depth)
    return panels * PANEL * DTYPE_BYTES[format] * (round_up(depth, PANEL) if format == "bfloat16" else depth)


def _compact_panel_bytes(depth: int) -> int:
    """Header, patches, and four streams of steps."""
    return 64 + cdiv(depth, 256) * 16 * 4 + 4 * cdiv(depth, PANEL) * 384


def weight_bytes(
    arch: ModelArch, dtype: str, quantization: str | None = None, *, ops: str = "cpu", isa: str = ""
) -> int:
    """Bytes of all weights once loaded. Quantised, a tied table is held twice: rows in `dtype`, the head in int8."""
    shapes = weight_shapes(arch)
    body = sum(
        shape.count * packed_bytes(shape, shape.dtype or quantization or dtype, ops=ops, isa=isa)
        for shape in shapes.body
    )
    head = packed_bytes(shapes.head, "int8" if quantization else dtype, ops=ops, isa=isa)
    table = 0 if shapes.is_tied and quantization is None else shapes.table
    return body + head + (table + shapes.positions) * DTYPE_BYTES[dtype] + shapes.floats * 4


def loading_bytes(arch: ModelArch, dtype: str, quantization: str | None = None, *, ops: str, isa: str = "") -> int:
    """Bytes that reading the weights takes beyond `weight_bytes` at the worst moment: pages of the file being packed.

    The head is read last where it is a tensor of its own; while the body is read, the head's bytes are not there yet.
    """
    shapes, stored = weight_shapes(arch), DTYPE_BYTES[arch.dtype]
    largest = max(shape.num_weights for shape in shapes.body) * stored
    if shapes.is_transposed:  # widened, then laid out row by row
        largest += 8 * max(math.prod((max(shape.parts), shape.in_features)) for shape in shapes.body)
    if shapes.is_tied:
        return largest
    head = packed_bytes(shapes.head, "int8" if quantization else dtype, ops=ops, isa=isa)
    return max(largest - head, shapes.head.num_weights * stored)
