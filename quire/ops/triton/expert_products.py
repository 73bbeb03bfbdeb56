"""The products of all experts of a mixture: one launch for each of them, whatever its weights are kept in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from quire.errors import ConfigError
from quire.ops.contracts.operands import LinearWeight
from quire.ops.triton.alignment import in_models
from quire.ops.triton.kernels import experts as kernels
from quire.ops.triton.kernels.arithmetic import ACTIVATION_CODES
from quire.ops.triton.kernels.quantized import FORMATS, absent_in, constants_of
from quire.ops.triton.quantized import format_named, step_sums
from quire.ops.triton.tiles import HALF, WIDENED_GATHERED, Tile, Tiles, dense_tiles, gathered_tiles, stages
from quire.ops.triton.variant import Variant, variant_of


@dataclass(frozen=True, slots=True)
class Product:
    """A product of all experts, or some of its features, whose weights have one format."""

    weight: LinearWeight
    """Of the first expert."""
    tables: dict[str, Tensor]
    """Where the tensors of each expert's weight are, by name: [X] int64, on their device."""
    biases: Tensor | None
    """[X] int64"""
    first: int
    """The feature with which it begins."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of token and choice, sorted by expert. P = T * num_chosen."""

    order: Tensor
    """[P] int64: pair of each place."""
    places: Tensor
    """[P] int64: place of each pair."""
    starts: Tensor
    """[X + 1] int64: the first place of each expert."""
    num_chosen: int


def fill(
    out: Tensor,
    x: Tensor,
    products: tuple[Product, ...],
    pairs: Pairs,
    *,
    activation: str | None,
    gated: bool = False,
    gathers: bool = False,
    scales: Tensor | None = None,
) -> None:
    """The products of all experts; of a gated one there is one part. Mutates: out [P, N], by place."""
    if products[0].weight.format != "dense" and scales is not None:
        x, gathers = _weighed(x, pairs, scales), False
    for product in products:
        columns = slice(product.first, out.shape[1] if gated else product.first + product.weight.out_features)
        given = (out[:, columns], x, product, pairs, ACTIVATION_CODES[activation])
        if product.weight.format == "dense":
            _grouped(*given, gated=gated, gathers=gathers, scales=scales if gathers else None)
        else:
            _grouped_quantized(*given, gated=gated, gathers=gathers)


def _weighed(x: Tensor, pairs: Pairs, scales: Tensor) -> Tensor:
    """What each place reads, multiplied by its weight. Shapes: -> [P, M] in x's dtype."""
    read = x.index_select(0, pairs.order // pairs.num_chosen)
    return (read * scales.flatten().index_select(0, pairs.order).unsqueeze(1)).to(x.dtype)


def _grouped(
    out: Tensor,
    x: Tensor,
    product: Product,
    pairs: Pairs,
    activation: int,
    *,
    gated: bool,
    gathers: bool,
    scales: Tensor | None,
) -> None:
    """Mutates: out [P, N], by place."""
    weight, num_features = product.tables["weight"], out.shape[1]
    num_experts = len(weight)
    tile, num_tiles = _tiles(dense_tiles(x.dtype), out, num_experts)
    kernels.grouped_kernel[(num_tiles, triton.cdiv(num_features, tile.features))](
        x,
        pairs.order if gathers else None,
        scales,
        pairs.starts,
        weight,
        product.biases,
        out,
        num_experts,
        num_features,
        product.weight.in_features,
        pairs.num_chosen,
        x.stride(0),
        product.weight.tensors["weight"].stride(0),
        out.stride(0),
        ACTIVATION=activation,
        GATED=gated,
        EXPERTS=triton.next_power_of_2(num_experts),
        BLOCK_ROWS=tile.rows,
        BLOCK_FEATURES=tile.features,
        BLOCK_INPUTS=tile.inputs,
        num_warps=tile.num_warps,
        num_stages=stages(tile),
    )


def _grouped_quantized(
    out: Tensor, x: Tensor, product: Product, pairs: Pairs, activation: int, *, gated: bool, gathers: bool
) -> None:
    """Mutates: out [P, N], by place."""
    tables, stored, format = product.tables, product.weight.tensors, format_named(product.weight.format)
    num_features, num_experts, sums = out.shape[1], len(tables["codes"]), step_sums(x, format)
    tile, num_tiles = _tiles(gathered_tiles(x.dtype), out, num_experts)
    kernels.grouped_quantized_kernel[(num_tiles, triton.cdiv(num_features, tile.features))](
        x,
        sums,
        pairs.order if gathers else None,
        pairs.starts,
        tables["codes"],
        tables["scales"],
        tables.get("zero_points"),
        tables.get("offsets"),
        tables.get("levels"),
        product.biases,
        out,
        num_experts,
        num_features,
        product.weight.in_features,
        stored["codes"].shape[1],
        pairs.num_chosen,
        x.stride(0),
        0 if sums is None else sums.stride(0),
        stored["scales"].stride(0),
        out.stride(0),
        ACTIVATION=activation,
        GATED=gated,
        EXPERTS=triton.next_power_of_2(num_experts),
        BLOCK_ROWS=tile.rows,
        BLOCK_FEATURES=tile.features,
        num_warps=tile.num_warps,
        num_stages=stages(tile),
        **constants_of(format),
    )


def _tiles(tiles: Tiles, out: Tensor, num_experts: int) -> tuple[Tile, int]:
    """The tile of a product of all experts, and how many tiles of rows there are at most."""
    num_rows, num_features = out.shape
    tile = tiles.of(triton.cdiv(num_rows, num_experts), num_features)
    return tile, num_rows // tile.rows + min(num_rows, num_experts)


def stacked(weights: Sequence[LinearWeight], biases: Sequence[Tensor | None]) -> tuple[Product, ...]:
    """One product of all experts, part by part of its features."""
    products, first = list[Product](), 0
    for parts in zip(*(weight.parts or (weight,) for weight in weights), strict=True):
        _check_alike(parts)
        own_biases = [None if bias is None else bias[first:] for bias in biases]
        tables = {name: table_of_addresses([part.tensors[name] for part in parts]) for name in parts[0].tensors}
        products.append(Product(parts[0], tables, _bias_table(own_biases), first))
        first += parts[0].out_features
    return tuple(products)


def _check_alike(weights: Sequence[LinearWeight]) -> None:
    """Raises: ConfigError for weights of different formats or sizes, or with an order of inputs."""
    kinds = sorted({f"{weight.format} [{weight.out_features}, {weight.in_features}]" for weight in weights})
    if len(kinds) > 1:
        raise ConfigError(f"the GPU kernels take experts of one format; those of one layer are {', '.join(kinds)}")
    if any("order" in weight.tensors for weight in weights):
        raise ConfigError(f"the GPU kernels have no mixture of experts whose inputs are in another order ({kinds[0]})")


def _bias_table(biases: Sequence[Tensor | None]) -> Tensor | None:
    given = [bias for bias in biases if bias is not None]
    return table_of_addresses(given) if given else None


def table_of_addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Where tensors are, for kernels that choose among them. They must outlive it. Shapes: -> [n] int64."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64).to(tensors[0].device)


def _product_variants() -> list[Variant]:
    types = dict.fromkeys(("order", "starts", "weights", "biases"), "*i64") | {"x": "*bf16", "scales": "*fp32"}
    variants = []
    for absent, out, is_gated in ((("scales", "biases"), "*bf16", True), (("scales", "order"), "*fp32", False)):
        for tile in HALF.all():
            blocks = {"BLOCK_ROWS": tile.rows, "BLOCK_FEATURES": tile.features, "BLOCK_INPUTS": tile.inputs}
            constants = {
                "ACTIVATION": ACTIVATION_CODES["silu" if is_gated else None],
                "GATED": is_gated,
                "EXPERTS": 128,
            }
            kernel, fixed = kernels.grouped_kernel, constants | blocks
            variants.append(variant_of(kernel, types | {"out": out}, fixed, absent=absent, tile=tile))
    return variants


def _quantized_variants() -> list[Variant]:
    pointers = ("order", "starts", "codes", "scales", "zero_points", "offsets", "levels", "biases")
    types = dict.fromkeys(pointers, "*i64") | {"x": "*bf16", "sums": "*fp32"}
    variants = []
    for format in FORMATS[-5:]:  # their steps are those of `quantized_kernel`, which has them all
        for missing, out, is_gated in (("biases", "*bf16", True), ("order", "*fp32", False)):
            absent = (missing, *absent_in(format))
            constants = {"ACTIVATION": ACTIVATION_CODES["silu" if is_gated else None], "GATED": is_gated}
            for tile in dict.fromkeys(WIDENED_GATHERED.all()):
                blocks = {"BLOCK_ROWS": tile.rows, "BLOCK_FEATURES": tile.features, "EXPERTS": 128}
                fixed = constants | blocks | constants_of(format)
                kernel = kernels.grouped_quantized_kernel
                variants.append(variant_of(kernel, types | {"out": out}, fixed, absent=absent, tile=tile))
    return variants


VARIANTS: tuple[Variant, ...] = in_models((*_product_variants(), *_quantized_variants()))
