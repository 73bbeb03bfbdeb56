"""The bytes that a model's weights take once loaded, as the ops of each kind lay them out."""

from __future__ import annotations

import math
from dataclasses import replace

from quire.config.arch import ModelArch
from quire.config.family_spec import MlpSpec
from quire.config.gguf.tensor_types import BY_NAME, TensorType
from quire.config.layers.mixers import AttentionSpec
from quire.config.layers.recurrent_mixers import Mamba2Spec
from quire.config.memory.weights import formats
from quire.config.memory.weights.linear import LinearShape
from quire.config.memory.weights.shapes import has_keys_twice, weight_shapes
from quire.config.quantized.experts import BESIDE, divided_experts
from quire.config.quantized.stored import Packing, StoredFormat
from quire.messages.kv import DTYPE_BYTES
from quire.utils.math import cdiv, round_up

UNPACKING_BYTES = 8
"""Of a number of a quantised weight, while it is taken out of its words, or rounded in torch and packed."""
PANEL = 32
"""Output features that the native kernels store together, and the depth of their bfloat16 tiles."""
INT4 = "int4_g128"
"""What weights are quantised to natively as int4."""


def packed_bytes(shape: LinearShape, format: str, *, ops: str, isa: str = "") -> int:
    """Bytes of one layer of a shape as the ops lay it out; `format` is a dtype, int4, or a name of `formats`.

    bfloat16 takes 12 bits on `COMPACT_ISAS` where it can (`csrc/cpu/products/compact.h`); a weight whose numbers
    spread too far keeps 16, which only its values tell.
    """
    panels, depth = cdiv(shape.out_features, PANEL), shape.in_features
    quantized = formats.parse(INT4 if format == "int4" else format)
    if quantized is not None and ops != "reference":
        count = quantized.num_bytes if ops == "cpu" else quantized.num_bytes_on_gpu
        return count(shape.out_features, depth)
    if ops != "cpu":
        return shape.num_weights * DTYPE_BYTES.get(format, DTYPE_BYTES["float32"])
    if format == "bfloat16" and isa in formats.COMPACT_ISAS:
        return panels * _compact_panel_bytes(depth)
    return panels * PANEL * DTYPE_BYTES[format] * (round_up(depth, PANEL) if format == "bfloat16" else depth)


def _compact_panel_bytes(depth: int) -> int:
    """Header, patches, and the steps."""
    return 64 + cdiv(depth, 256) * 16 * 4 + 4 * cdiv(depth, PANEL) * 384


def weight_bytes(
    arch: ModelArch, dtype: str, quantization: str | None = None, *, ops: str = "cpu", isa: str = ""
) -> int:
    """Bytes of all weights once loaded. Quantised, a tied table is held twice: rows in `dtype`, and the head.

    That is int8, or what the checkpoint has it in. Rows in the blocks of a GGUF file stay in them.
    """
    shapes = weight_shapes(arch)
    body = sum(
        shape.count * packed_bytes(shape, shape.dtype or quantization or dtype, ops=ops, isa=isa)
        for shape in shapes.body
    )
    head = packed_bytes(shapes.head, "int8" if quantization else dtype, ops=ops, isa=isa)
    is_shared = shapes.is_tied and quantization is None and not has_quantized_table(arch)
    table = 0 if is_shared else _table_bytes(arch, shapes.table, dtype)
    plain = divided_experts(arch) if ops != "reference" else frozenset()
    saved = sum(
        _num_kept(arch, format) * _saved_bytes(arch, format, dtype, ops=ops, isa=isa)
        for format in arch.quantized
        if keeps(arch, format) and format.name not in plain
    )
    return body + head - saved + table + shapes.tables * DTYPE_BYTES[dtype] + shapes.floats * 4


def _table_bytes(arch: ModelArch, numbers: int, dtype: str) -> int:
    blocks = (_block_type(format) for format in arch.quantized if _is_table(arch, format))
    kind = next(blocks, None)
    return numbers * DTYPE_BYTES[dtype] if kind is None else numbers // kind.block_size * kind.block_bytes


def _block_type(format: StoredFormat) -> TensorType | None:
    """Of a weight in the blocks of a GGUF file."""
    return BY_NAME[next(iter(format.tensors))] if format.packing is Packing.GGUF else None


def keeps(arch: ModelArch, format: StoredFormat) -> bool:
    """Whether a quantised weight stays quantised: not a table that is no head, nor one whose transpose is needed, nor
    those around values that are filled up with zeros."""
    names, last = arch.family.names, _last(format)
    if _is_table(arch, format):
        return arch.tie_word_embeddings
    if _has_narrow_values(arch) and last in (*names.qkv, names.output):
        return False
    return last not in (names.embedding.rpartition(".")[2], "kv_b_proj")


def _last(format: StoredFormat) -> str:
    """The layer's own name."""
    return format.name.removesuffix(".weight").rpartition(".")[2]


def _num_kept(arch: ModelArch, format: StoredFormat) -> int:
    """How often a weight is loaded: products to keys twice where values are keys."""
    block, _, last = format.name.removesuffix(".weight").rpartition(".")
    if last not in arch.family.names.qkv[1:2] or not any(map(has_keys_twice, arch.mixers)):
        return 1
    index = int(next(part for part in reversed(block.split(".")) if part.isdigit()))
    return 1 + has_keys_twice(arch.mixers[index])


def has_quantized_table(arch: ModelArch) -> bool:
    """Whether the table of token embeddings is quantised in the checkpoint."""
    return any(_is_table(arch, format) for format in arch.quantized)


def _is_table(arch: ModelArch, format: StoredFormat) -> bool:
    return format.name.endswith(f"{arch.family.names.embedding}.weight")


def _saved_bytes(arch: ModelArch, format: StoredFormat, dtype: str, *, ops: str, isa: str) -> int:
    """What a quantised weight takes less than a plain one, at the least; reference ops keep it in float32."""
    kept = "float32" if ops == "reference" else format.kept_as or dtype
    *stacked, rows, columns = format.shape
    shape, count = LinearShape(parts=(rows,), in_features=columns), math.prod(stacked)
    order = 4 * shape.in_features if format.has_order and ops != "reference" else 0
    plain = packed_bytes(shape, dtype, ops=ops, isa=isa)
    names = arch.family.names
    if _last(format) in (*names.qkv, *names.gate_up, *BESIDE):  # beside its neighbours it fills up no panel by itself
        plain = packed_bytes(replace(shape, parts=(PANEL,)), dtype, ops=ops, isa=isa) * sum(shape.parts) // PANEL
    return count * (plain - packed_bytes(shape, kept, ops=ops, isa=isa) - order)


def loading_bytes(arch: ModelArch, dtype: str, quantization: str | None = None, *, ops: str, isa: str = "") -> int:
    """Bytes that reading the weights takes beyond `weight_bytes` at the worst moment: pages of the file being packed.

    The head is read last where it is a tensor of its own; while the body is read, the head's bytes are not there yet.
    """
    shapes, stored = weight_shapes(arch), DTYPE_BYTES[arch.dtype]
    multiplied = 4 * (_has_factors(arch) or _has_narrow_values(arch) or arch.sphere is not None)  # in float32
    rounded = UNPACKING_BYTES * (quantization is not None and ops != "cpu")  # natively they are while they are packed
    largest = max(shape.num_weights for shape in shapes.body) * (stored + multiplied + rounded)
    takes_apart = ops != "cpu" or _has_factors(arch)  # other blocks go straight to panels
    unpacked = [format for format in arch.quantized if takes_apart or _block_type(format) is None]
    largest += max((UNPACKING_BYTES * math.prod(format.shape[-2:]) for format in unpacked), default=0)
    if shapes.is_transposed:  # widened, then laid out row by row
        largest += 8 * max(math.prod((max(shape.parts), shape.in_features)) for shape in shapes.body)
    if shapes.is_tied:
        return max(largest, shapes.head.num_weights * rounded)
    head = packed_bytes(shapes.head, "int8" if quantization else dtype, ops=ops, isa=isa)
    return max(largest - head, shapes.head.num_weights * (stored + rounded))


def _has_factors(arch: ModelArch) -> bool:
    """Whether weights carry factors of their products."""
    parts = (*arch.plain_attentions, *(layer.mlp for layer in arch.layers), *arch.recurrences)
    carriers = (AttentionSpec, Mamba2Spec, MlpSpec)
    return any(isinstance(part, carriers) and not part.factors.are_ones for part in parts)


def _has_narrow_values(arch: ModelArch) -> bool:
    return any(mixer.cached.num_unused for mixer in arch.plain_attentions)
