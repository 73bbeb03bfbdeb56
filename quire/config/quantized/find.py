"""Whether the tensors of a checkpoint hold a weight quantised, and how: from their headers, by each packing's names.

Bits and groups follow from shapes, so layers that were quantised otherwise than the rest need no rules. Formats:
GPTQ and AWQ as AutoGPTQ, GPTQModel and AutoAWQ write them; the documents of compressed-tensors; those of FP8 as
DeepSeek-V3, vLLM and ModelOpt write it; gpt-oss's MXFP4; ModelOpt's NVFP4; bitsandbytes' state dictionaries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

from quire.config.gguf.tensor_types import QUANTIZED
from quire.config.quantized.bitsandbytes import STATE, STORAGE, read_state
from quire.config.quantized.stored import Header, Headers, Packing, StoredFormat, refuse
from quire.errors import CheckpointError
from quire.utils.math import cdiv

WORD_BITS = 32
"""Of the integers that GPTQ, AWQ and compressed-tensors pack values into."""
FLOAT8 = "F8_E4M3"
FLOATS = ("F32", "BF16", "F16")
TERNARY_ROWS = 4
"""Whose ternary numbers share a byte."""
SCALES = ("weight_scale", "weight_scale_inv", "scale")
"""Roles of the scales of weights that stand as they are; the first that is there counts."""
DTYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("qweight", "qzeros", "g_idx", "weight_g_idx"), ("I32",)),
        **dict.fromkeys(("scales", "SCB", "quant_map", "nested_absmax", "nested_quant_map"), ("F16", "BF16", "F32")),
        **dict.fromkeys(("weight_scale", "weight_scale_inv"), ("F16", "BF16", "F32", "U8", "F8_E8M0", FLOAT8)),
        "scale": ("F32", "U8", "F8_E8M0"),
        **dict.fromkeys(("weight_global_scale", "weight_scale_2"), ("F16", "BF16", "F32")),
        "absmax": ("U8", "F16", "BF16", "F32"),
        "weight_zero_point": ("I32", "I8"),
        "weight_packed": ("I32", "U8"),
        **dict.fromkeys(("blocks", "quant_state"), ("U8",)),
        "weight": ("I8", "U8", FLOAT8),
    }
)
"""What the tensor in a role may be; `scales` of MXFP4 are bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What config.json says and headers do not."""

    is_symmetric: bool = False
    """No layer has zero points but such as stand for none."""
    is_asymmetric: bool = False
    """Every layer that has integers has zero points."""
    has_order: bool = False
    """GPTQ's desc_act."""
    is_v1: bool = True
    group_sizes: frozenset[int] = frozenset()
    """Columns that share a scale, of whichever layers. Where none fits, the power of two that does is taken."""
    has_whole_rows: bool = True
    """There may be layers whose rows have one scale."""
    blocks: frozenset[tuple[int, int]] = frozenset({(128, 128)})
    """Rows and columns that share a scale of blocks, of whichever layers."""
    schemes: tuple[tuple[int, int | None], ...] = ()
    """(bits, group size or None for a whole row) of what compressed-tensors packs."""
    not_rounded: tuple[str, ...] = ()
    """Modules whose numbers stay as they are where those of linear layers become ternary."""


Find = Callable[[str, Headers, Hints], StoredFormat | None]


def find_gptq(name: str, headers: Headers, hints: Hints) -> StoredFormat | None:
    """qweight [M * bits / 32, N], qzeros [M / G, N * bits / 32], scales [M / G, N], g_idx [M]."""
    tensors = _tensors(name, ("qweight", "scales", "qzeros", "g_idx"), headers)
    if "qweight" not in tensors:
        return None
    words, scales, zeros = (_header(name, tensors, role, headers, 2) for role in ("qweight", "scales", "qzeros"))
    rows, groups = scales.shape[1], scales.shape[0]
    bits = _bits(name, zeros.shape[1], rows, known=(2, 3, 4, 8))
    columns = words.shape[0] * WORD_BITS // bits
    if words.shape != (columns * bits // WORD_BITS, rows) or zeros.shape[0] != groups:
        raise _odd(name, tensors, headers)
    _check_optional(name, tensors, "g_idx", headers, (columns,))
    return StoredFormat(
        name=name,
        packing=Packing.GPTQ,
        tensors=tensors,
        shape=(rows, columns),
        bits=bits,
        group_size=_group_size(name, columns, groups, hints),
        has_zero_points=not hints.is_symmetric,
        has_order="g_idx" in tensors and hints.has_order,
        is_v1=hints.is_v1,
    )


def find_awq(name: str, headers: Headers, hints: Hints) -> StoredFormat | None:
    """qweight [M, N * bits / 32], qzeros [M / G, N * bits / 32], scales [M / G, N]."""
    tensors = _tensors(name, ("qweight", "scales", "qzeros"), headers)
    if "qweight" not in tensors:
        return None
    _check_zero_points(name, "qzeros" in tensors, hints)
    words, scales = (_header(name, tensors, role, headers, 2) for role in ("qweight", "scales"))
    rows, groups = scales.shape[1], scales.shape[0]
    bits = _bits(name, words.shape[1], rows)
    _check_optional(name, tensors, "qzeros", headers, (groups, words.shape[1]))
    return StoredFormat(
        name=name,
        packing=Packing.AWQ,
        tensors=tensors,
        shape=(rows, words.shape[0]),
        bits=bits,
        group_size=_group_size(name, words.shape[0], groups, hints),
        has_zero_points="qzeros" in tensors and not hints.is_symmetric,
    )


def find_packed(name: str, headers: Headers, hints: Hints) -> StoredFormat | None:
    """weight_packed [N, M * bits / 32] I32, weight_scale [N, M / G], of blocks [N / B, M / C], or one for all,
    weight_zero_point [N * bits / 32, M / G] I32, or I8 like the scales."""
    roles = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    tensors = _tensors(name, roles, headers)
    packed = headers(tensors.get("weight_packed", ""))
    if packed is None or packed.dtype != "I32":
        return None
    words, scales = _header(name, tensors, "weight_packed", headers, 2), _header(name, tensors, "weight_scale", headers)
    rows, groups = words.shape[0], 1 if prod(scales.shape) == 1 else scales.shape[-1]
    has_blocks = len(scales.shape) == 2 and prod(scales.shape) > 1 and scales.shape[0] != rows
    if not has_blocks and scales.shape not in ((), (1,), (1, 1), (rows, groups)):
        raise _odd(name, tensors, headers)
    shape = headers(tensors.get("weight_shape", ""))
    known = None if shape is None or shape.read is None else shape.read()[-1]
    bits, group_size, columns = _packed_bits(name, words.shape[1], None if has_blocks else groups, hints, known)
    block_rows = 1
    if has_blocks:
        block_rows, group_size = _block_size(name, (rows, columns), (scales.shape[0], groups), hints)
    zeros = headers(tensors.get("weight_zero_point", ""))
    _check_zero_points(name, zeros is not None, hints)
    fits = {"I32": (cdiv(rows * bits, WORD_BITS), groups), "I8": scales.shape}
    if zeros is not None and zeros.shape != fits.get(zeros.dtype):
        raise _odd(name, tensors, headers)
    _check_optional(name, tensors, "weight_g_idx", headers, (columns,))
    return StoredFormat(
        name=name,
        packing=Packing.PACKED,
        tensors=tensors,
        shape=(rows, columns),
        bits=bits,
        group_size=group_size or columns,
        block_rows=block_rows,
        has_zero_points=zeros is not None and not hints.is_symmetric,
        has_order="weight_g_idx" in tensors,
    )


def _packed_bits(
    name: str, words: int, groups: int | None, hints: Hints, known: int | None
) -> tuple[int, int | None, int]:
    """The bits and the group that the config knows and that the shapes fit, and how many columns that makes.

    groups: None where scales are of blocks. known: the columns that weight_shape says, which count where several
    schemes fit, and where values cross words.
    """
    crosses = any(WORD_BITS % bits for bits, _ in hints.schemes)
    fitting = _fitting(words, groups, hints, known if crosses else None)
    if len(fitting) != 1 and known is not None:
        fitting = _fitting(words, groups, hints, known)
    if known is not None and any(_leaves_bits(words, bits, known) for bits, _ in hints.schemes):
        raise CheckpointError(
            f"{name} is packed as compressed-tensors did before 0.20, which left bits of each word empty where values "
            "do not fill it. Write the checkpoint again with 0.20 or later, or use one of 4 or 8 bits."
        )
    if len(fitting) == 1:
        return fitting[0]
    which, what = "none" if not fitting else "several", "blocks" if groups is None else f"{groups} groups"
    raise refuse(name, f"has {what} of scales, which fits {which} of the schemes that config.json lists")


def _fitting(words: int, groups: int | None, hints: Hints, columns: int | None) -> list[tuple[int, int | None, int]]:
    """(bits, group size, columns) of the schemes in which rows of so many words have so many groups."""
    found = {}
    for bits, size in hints.schemes:
        count = words * WORD_BITS // bits if columns is None else columns
        fits = size is None if groups is None else groups == (1 if size is None else cdiv(count, size))
        if fits and cdiv(count * bits, WORD_BITS) == words:
            found[bits, count if size is None else min(size, count)] = bits, size, count
    return list(found.values())


def _leaves_bits(words: int, bits: int, columns: int) -> bool:
    """Whether so many words may have columns of which none crosses from one word into the next."""
    return WORD_BITS % bits != 0 and words > 1 and words == cdiv(columns, WORD_BITS // bits)


def find_int8(name: str, headers: Headers, hints: Hints) -> StoredFormat | None:
    """weight [N, M] I8, weight_scale [N, 1], [1] or [N, M / G]."""
    tensors = _tensors(name, ("weight", "weight_scale", "weight_zero_point"), headers)
    weight = headers(tensors.get("weight", ""))
    if weight is None or weight.dtype != "I8" or "weight_scale" not in tensors:
        return None
    _check_zero_points(name, "weight_zero_point" in tensors, hints)
    has_zero_points = "weight_zero_point" in tensors and not hints.is_symmetric
    return _by_scales(name, Packing.INT8, tensors, headers, hints, has_zero_points=has_zero_points)


def find_float8(name: str, headers: Headers, hints: Hints) -> StoredFormat | None:
    """weight [N, M] F8_E4M3; weight_scale, weight_scale_inv or scale (DeepSeek V4) of [], [1], [N], [N, 1], [N, M / G],
    and of blocks [N / B, M / C] or [N / B, 1, M / C, 1].
    """
    tensors = _tensors(name, ("weight", *SCALES), headers)
    weight = headers(tensors.get("weight", ""))
    if weight is None or weight.dtype != FLOAT8:
        return None
    return _by_scales(name, Packing.FLOAT8, tensors, headers, hints, is_float8=True)


def find_torchao(name: str, headers: Headers, hints: Hints) -> StoredFormat | None:
    """_weight_qdata [N, M] I8 or F8_E4M3, _weight_scale and _weight_zero_point: the same under other names."""
    layer = name.removesuffix("weight")
    stored = {f"{layer}weight": f"{layer}_weight_qdata"}
    stored |= {f"{layer}{role}": f"{layer}_{role}" for role in ("weight_scale", "weight_zero_point")}

    def renamed(asked: str) -> Header | None:
        return headers(stored[asked]) if asked in stored else None

    found = find_int8(name, renamed, hints) or find_float8(name, renamed, hints)
    if found is None:
        return None
    return replace(found, packing=Packing.TORCHAO, tensors={role: stored[at] for role, at in found.tensors.items()})


def _by_scales(
    name: str,
    packing: Packing,
    tensors: Mapping[str, str],
    headers: Headers,
    hints: Hints,
    *,
    has_zero_points: bool = False,
    is_float8: bool = False,
) -> StoredFormat:
    """A weight that stands as it is beside its scales."""
    rows, columns = _header(name, tensors, "weight", headers, 2).shape
    role = next((role for role in SCALES if role in tensors), None)
    if role is None:
        raise refuse(name, "has no weight_scale beside it")
    scales = _header(name, tensors, role, headers).shape
    scales = scales[::2] if len(scales) == 4 and scales[1::2] == (1, 1) else scales
    zeros = headers(tensors.get("weight_zero_point", ""))
    if zeros is not None and (zeros.dtype, zeros.shape) != ("I8", scales):
        raise _odd(name, tensors, headers)
    block_rows, group_size = 1, columns
    if prod(scales) == 1 or scales in ((rows,), (rows, 1)):
        _check_whole(name, columns, hints)
    if prod(scales) != 1 and scales not in ((rows,), (rows, 1)):
        if len(scales) != 2:
            raise _odd(name, tensors, headers)
        if scales[0] == rows:
            group_size = _group_size(name, columns, scales[1], hints)
        else:
            block_rows, group_size = _block_size(name, (rows, columns), (scales[0], scales[1]), hints)
    return StoredFormat(
        name=name,
        packing=packing,
        tensors=tensors,
        shape=(rows, columns),
        bits=8,
        group_size=group_size,
        block_rows=block_rows,
        has_zero_points=has_zero_points,
        is_float8=is_float8,
    )


def find_mxfp4(name: str, headers: Headers, hints: Hints) -> StoredFormat | None:
    """Of experts in one tensor: name_blocks [X, N, M / 32, 16] U8, name_scales [X, N, M / 32] U8."""
    tensors = {role: f"{name}_{role}" for role in ("blocks", "scales") if headers(f"{name}_{role}") is not None}
    if "blocks" not in tensors:
        return None
    blocks, scales = (
        _header(name, tensors, "blocks", headers),
        _header(name, tensors, "scales", headers, dtypes=("U8",)),
    )
    if len(blocks.shape) != 4 or blocks.shape[3] != 16 or scales.shape != blocks.shape[:3]:
        raise _odd(name, tensors, headers)
    count, rows, groups, _ = blocks.shape
    return StoredFormat(
        name=name,
        packing=Packing.MXFP4,
        tensors=tensors,
        shape=(count, rows, groups * 32),
        bits=4,
        group_size=32,
        has_levels=True,
    )


def find_float4(name: str, headers: Headers, hints: Hints) -> StoredFormat | None:
    """Codes [N, M / 2] U8, weight_scale [N, M / 16] F8_E4M3 or [N, M / 32] U8, and perhaps one scale for all.

    compressed-tensors: weight_packed, and weight_global_scale, by which it divides. ModelOpt: weight, and
    weight_scale_2, by which it multiplies. DeepSeek V4: weight I8, and scale [N, M / 32].
    """
    roles = ("weight_packed", "weight", "weight_scale", "weight_global_scale", "weight_scale_2", "scale")
    tensors = _tensors(name, roles, headers)
    codes = "weight_packed" if "weight_packed" in tensors else "weight"
    packed = headers(tensors.get(codes, ""))
    by_scale = "scale" in tensors and "weight_scale" not in tensors
    if packed is None or packed.dtype != ("I8" if by_scale else "U8"):
        return None
    role = "scale" if by_scale else "weight_scale"
    bytes_, scales = (_header(name, tensors, each, headers, 2) for each in (codes, role))
    rows, columns = bytes_.shape[0], bytes_.shape[1] * 2
    group_size = 16 if scales.dtype == FLOAT8 else 32
    known = ("U8", "F8_E8M0") if by_scale else (FLOAT8, "U8")
    if scales.dtype not in known or scales.shape != (rows, cdiv(columns, group_size)):
        raise _odd(name, tensors, headers)
    if scales.dtype == FLOAT8 and not tensors.keys() & {"weight_global_scale", "weight_scale_2"}:
        raise refuse(name, "has no scale for all of it (weight_global_scale or weight_scale_2)")
    for role in ("weight_global_scale", "weight_scale_2"):
        if role in tensors and prod(_header(name, tensors, role, headers).shape) != 1:
            raise _odd(name, tensors, headers)
    return StoredFormat(
        name=name,
        packing=Packing.FLOAT4,
        tensors=tensors,
        shape=(rows, columns),
        bits=4,
        group_size=group_size,
        has_levels=True,
    )


def find_bitsandbytes(name: str, headers: Headers, hints: Hints) -> StoredFormat | None:
    """4 bits: weight [N * M / 2, 1] U8 with .absmax, .quant_map, .quant_state...; 8 bits: weight [N, M] I8, SCB [N]."""
    layer = name.removesuffix("weight")
    states = (f"{name}{STATE}{kind}" for kind in ("nf4", "fp4"))
    state = next((state for state in states if headers(state) is not None), None)
    if state is not None:
        return _bnb_4bit(name, state, headers, hints)
    weight, scales = headers(name), headers(f"{layer}SCB")
    if weight is None or weight.dtype != "I8" or scales is None:
        return None
    if len(weight.shape) != 2 or scales.shape != weight.shape[:1]:
        raise refuse(name, f"has shape {list(weight.shape)} and scales {list(scales.shape)}")
    tensors = {"weight": name, "SCB": f"{layer}SCB"}
    layout = headers(f"{layer}weight_format")
    if layout is not None and prod(layout.shape) != 1:
        raise refuse(name, f"has a weight_format of shape {list(layout.shape)}, not one number")
    if layout is not None:
        tensors["weight_format"] = f"{layer}weight_format"
    return StoredFormat(
        name=name, packing=Packing.BNB_8BIT, tensors=tensors, shape=weight.shape, bits=8, group_size=weight.shape[1]
    )


def _bnb_4bit(name: str, state: str, headers: Headers, hints: Hints) -> StoredFormat:
    roles = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
    tensors = {"weight": name, "quant_state": state}
    tensors |= {role: f"{name}.{role}" for role in roles if headers(f"{name}.{role}") is not None}
    for role in ("absmax", "quant_map", *(role for role in roles[2:] if role in tensors)):
        _header(name, tensors, role, headers)
    weight = _header(name, tensors, "weight", headers, dtypes=tuple(STORAGE))
    header = _header(name, tensors, "quant_state", headers, 1)
    if header.read is None:
        raise refuse(name, f"has a quant_state of {prod(header.shape)} bytes")
    kept = read_state(name, bytes(header.read()))
    count = 2 * STORAGE[weight.dtype] * prod(weight.shape)
    if prod(kept.shape) != count:
        raise refuse(name, f"has a quant_state for the shape {list(kept.shape)} and {count} codes")
    if ("nested_absmax" in tensors) != ("nested_quant_map" in tensors):
        raise refuse(name, "has nested scales, of which nested_absmax or nested_quant_map is missing")
    return StoredFormat(
        name=name,
        packing=Packing.BNB_4BIT,
        tensors=tensors,
        shape=kept.shape,
        bits=4,
        group_size=kept.group_size,
        has_levels=True,
    )


def find_gguf(name: str, headers: Headers, hints: Hints) -> StoredFormat | None:
    """Rows [N, M] in blocks of a type, which is the role of the tensor."""
    header = headers(name)
    if header is None or header.dtype not in QUANTIZED:
        return None
    if len(header.shape) != 2:
        raise refuse(name, f"has shape {list(header.shape)}, and {header.dtype} is for matrices")
    kind = QUANTIZED[header.dtype]
    return StoredFormat(
        name=name,
        packing=Packing.GGUF,
        tensors={header.dtype: name},
        shape=header.shape,
        bits=kind.bits,
        group_size=kind.group_size,
        has_offsets=kind.has_offsets,
        has_levels=kind.has_levels,
        has_nested_scales=kind.has_nested_scales,
    )


def find_bitlinear(name: str, headers: Headers, hints: Hints) -> StoredFormat | None:
    """weight [N / 4, M] U8, whose bytes have the first quarter of the rows in their lowest bits, and so on.

    weight_scale of one number, by which BitLinear divides.
    """
    return _ternary(name, Packing.BITLINEAR, headers, ("U8",))


def find_autobitlinear(name: str, headers: Headers, hints: Hints) -> StoredFormat | None:
    """The same, or weight [N, M] of numbers that are -1, 0, and 1; AutoBitLinear multiplies by weight_scale."""
    found = _ternary(name, Packing.AUTOBITLINEAR, headers, ("U8", *FLOATS))
    if found is not None and headers(f"{name.removesuffix('weight')}bias") is not None:
        problem = "has a bias, which AutoBitLinear multiplies by weight_scale, and quire does not"
        raise CheckpointError(f"{name} {problem}; use a checkpoint without, or one of linear_class 'bitlinear'")
    return found


def _ternary(name: str, packing: Packing, headers: Headers, dtypes: Sequence[str]) -> StoredFormat | None:
    tensors = _tensors(name, ("weight", "weight_scale"), headers)
    weight = headers(tensors.get("weight", ""))
    if weight is None or (weight.dtype != "U8" and "weight_scale" not in tensors):
        return None
    rows, columns = _header(name, tensors, "weight", headers, 2, dtypes).shape
    if prod(_header(name, tensors, "weight_scale", headers, dtypes=FLOATS).shape) != 1:
        raise _odd(name, tensors, headers)
    rows *= TERNARY_ROWS if weight.dtype == "U8" else 1
    return _whole_ternary(name, packing, tensors, (rows, columns))


def find_rounded(name: str, headers: Headers, hints: Hints) -> StoredFormat | None:
    """weight [N, M] of any numbers, which become ternary: the linear layers of decoder layers but for those named."""
    weight = headers(name)
    if weight is None or len(weight.shape) != 2 or not _LAYER_WEIGHT.search(name) or is_named(name, hints.not_rounded):
        return None
    _header(name, {"weight": name}, "weight", headers, dtypes=FLOATS)
    return _whole_ternary(name, Packing.ROUNDED, {"weight": name}, (weight.shape[0], weight.shape[1]))


def is_named(name: str, modules: Iterable[str]) -> bool:
    """Whether a weight is in one of these modules, as transformers reads modules_to_not_convert: from the start of its
    name up to a dot, or at its end."""
    module = name.removesuffix(".weight")
    return any(f"{module}.".startswith(f"{each}.") or module.endswith(each) for each in modules)


def _whole_ternary(name: str, packing: Packing, tensors: Mapping[str, str], shape: tuple[int, int]) -> StoredFormat:
    return StoredFormat(
        name=name, packing=packing, tensors=tensors, shape=shape, bits=2, group_size=shape[1], is_ternary=True
    )


FINDERS: Mapping[Packing, Find] = MappingProxyType(
    {
        Packing.GPTQ: find_gptq,
        Packing.AWQ: find_awq,
        Packing.PACKED: find_packed,
        Packing.INT8: find_int8,
        Packing.FLOAT8: find_float8,
        Packing.TORCHAO: find_torchao,
        Packing.MXFP4: find_mxfp4,
        Packing.FLOAT4: find_float4,
        Packing.BITLINEAR: find_bitlinear,
        Packing.AUTOBITLINEAR: find_autobitlinear,
        Packing.ROUNDED: find_rounded,
        Packing.BNB_4BIT: find_bitsandbytes,
        Packing.GGUF: find_gguf,
    }
)

_MARKS = (".qweight", ".weight_packed", ".weight_scale", "._weight_qdata")
"""Endings of tensors that only quantised weights have."""
_BYTES = ("I8", "U8", FLOAT8)
_LAYER_WEIGHT = re.compile(r"\.\d+\..*\.weight$")
"""Names of weights in one of several layers."""


def weights_in(headers: Iterable[tuple[str, Header]], *, rounds: bool = False) -> Iterator[str]:
    """What the weights are called that these tensors may hold quantised; some of them twice.

    rounds: plain weights are rounded while they are read.
    """
    for name, header in headers:
        if STATE in name:
            yield name.partition(STATE)[0]
        elif name.endswith("_blocks"):
            yield name.removesuffix("_blocks")
        elif name.endswith(_MARKS):
            yield f"{name.rpartition('.')[0]}.weight"
        elif name.endswith(".weight") and (rounds or header.dtype in _BYTES or header.dtype in QUANTIZED):
            yield name


def _tensors(name: str, roles: Sequence[str], headers: Headers) -> dict[str, str]:
    """Those of a layer's tensors that there are."""
    layer = name.removesuffix("weight")
    return {role: f"{layer}{role}" for role in roles if headers(f"{layer}{role}") is not None}


def _header(
    name: str,
    tensors: Mapping[str, str],
    role: str,
    headers: Headers,
    dimensions: int | None = None,
    dtypes: Sequence[str] = (),
) -> Header:
    """Raises: CheckpointError where it is missing, or has other dimensions or another dtype."""
    header = headers(tensors.get(role, ""))
    if header is None:
        raise refuse(name, f"is quantised, but {role} is missing")
    if header.dtype not in (dtypes or DTYPES[role]) or 0 in header.shape or dimensions not in (None, len(header.shape)):
        raise refuse(name, f"has {role} {header.dtype} of shape {list(header.shape)}")
    return header


def _check_optional(name: str, tensors: Mapping[str, str], role: str, headers: Headers, shape: tuple[int, ...]) -> None:
    """Raises: CheckpointError where a tensor that need not be there has another shape."""
    if role in tensors and _header(name, tensors, role, headers).shape != shape:
        raise _odd(name, tensors, headers)


def _bits(name: str, words: int, values: int, known: Sequence[int] = (2, 4, 8)) -> int:
    """Of each of so many values that so many words hold. Raises: CheckpointError for a size that is not read."""
    bits, rest = divmod(words * WORD_BITS, values)
    if rest or bits not in known:
        raise refuse(name, f"packs {values} values into {words} words of 32 bits; {known} bits are read")
    return bits


def _group_size(name: str, columns: int, groups: int, hints: Hints) -> int:
    """Columns that share a scale. The last group may have fewer."""
    if groups == 1:
        _check_whole(name, columns, hints)
        return columns
    powers = {1 << (cdiv(columns, groups) - 1).bit_length()}
    for sizes in (hints.group_sizes, powers):
        fitting = sorted((size,) for size in sizes if cdiv(columns, size) == groups)
        if fitting:
            return _only(name, fitting, f"{groups} groups of scales for {columns} input features")[0]
    raise refuse(name, f"has {groups} groups of scales for {columns} input features")


def _check_whole(name: str, columns: int, hints: Hints) -> None:
    """Raises: CheckpointError for rows with one scale where config.json has smaller groups only."""
    if not hints.has_whole_rows and max(hints.group_sizes, default=columns) < columns:
        sizes = _listed(sorted((size,) for size in hints.group_sizes))
        raise refuse(name, f"has one scale for {columns} input features, and config.json has groups of {sizes}")


def _block_size(name: str, shape: tuple[int, int], scales: tuple[int, int], hints: Hints) -> tuple[int, int]:
    """Rows and columns that share a scale. The last blocks may have fewer. A block may be larger than the weight."""
    fitting = {
        tuple(size if count > 1 else whole for size, count, whole in zip(block, scales, shape, strict=True))
        for block in hints.blocks
        if tuple(cdiv(whole, size) for whole, size in zip(shape, block, strict=True)) == scales
    }
    problem = f"{list(scales)} scales of blocks for a shape of {list(shape)}"
    if not fitting:
        raise refuse(name, f"has {problem}, and config.json has blocks of {_listed(sorted(hints.blocks))}")
    rows, columns = _only(name, sorted(fitting), problem)
    return rows, columns


def _only(name: str, fitting: Sequence[tuple[int, ...]], problem: str) -> tuple[int, ...]:
    """Raises: CheckpointError where several sizes that config.json has fit."""
    if len(fitting) > 1:
        raise refuse(name, f"has {problem}, which {_listed(fitting)} fit alike, all of which config.json has")
    return fitting[0]


def _listed(sizes: Iterable[tuple[int, ...]]) -> str:
    return ", ".join(" x ".join(map(str, size)) for size in sizes)


def _check_zero_points(name: str, are_there: bool, hints: Hints) -> None:
    if hints.is_asymmetric and not are_there:
        raise refuse(name, "has no zero points, which all layers have as config.json says")


def _odd(name: str, tensors: Mapping[str, str], headers: Headers) -> Exception:
    shapes = {role: list(header.shape) for role, stored in tensors.items() if (header := headers(stored)) is not None}
    return refuse(name, "has tensors that do not fit each other: " + ", ".join(f"{k} {v}" for k, v in shapes.items()))
