"""What a quantization_config of compressed-tensors says of weights, beside what their headers say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.quantized.find import Hints
from quire.config.quantized.keys import Keys

MAX_GROUPS = 64
"""Entries of config_groups."""
FORMATS = (
    "dense",
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)
BITS = {"int": range(1, 9), "float": (4, 8)}
"""By type."""


def read_schemes(keys: Keys) -> Hints:
    """The schemes of all layers; which layer has which follows from its tensors.

    Raises: ConfigError for weights that are sparse or rotated, and for layouts, types and bits that are not read.
    """
    keys.refuse_any(("transform_config",), "weights that are not rotated")
    sparsity = keys.given.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") in (None, "dense")):
        keys.refuse("sparsity_config", "weights that are not sparse")
    keys.text("format", FORMATS, "dense")
    groups = keys.given.get("config_groups")
    least = 0 if keys.given.get("kv_cache_scheme") else 1
    if not isinstance(groups, Mapping) or not least <= len(groups) <= MAX_GROUPS:
        keys.refuse("config_groups", f"an object of 1 to {MAX_GROUPS} groups")
    for group in groups.values():
        if isinstance(group, Mapping) and group.get("format") not in (None, *FORMATS):
            keys.refuse("config_groups", f"groups whose format is {', '.join(FORMATS)}")
    weights = [_weights_of(keys, group) for group in groups.values()]
    blocks = {keys.block(shape, "config_groups") for each in weights if (shape := each.get("block_structure"))}
    sizes = [_size_of(keys, each) for each in weights]
    schemes = [(each["num_bits"], size) for each, size in zip(weights, sizes, strict=True) if _type_of(each) == "int"]
    symmetric = [each.get("symmetric", True) is True for each in weights]
    return Hints(
        is_symmetric=all(symmetric),
        is_asymmetric=bool(symmetric) and not any(symmetric),
        group_sizes=frozenset(size for size in sizes if size),
        has_whole_rows=None in sizes or not sizes,
        blocks=frozenset(blocks) or Hints().blocks,
        schemes=tuple(dict.fromkeys(schemes)),
    )


def _weights_of(keys: Keys, group: Any) -> Mapping[str, Any]:
    """How a group of layers has its weights."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        keys.refuse("config_groups", "groups that quantise weights")
    bits = weights.get("num_bits")
    if type(bits) is not int or bits not in BITS.get(_type_of(weights), ()):
        keys.refuse("config_groups", "integers of 1 to 8 bits, and floats of 4 and 8")
    return weights


def _type_of(weights: Mapping[str, Any]) -> str:
    return str(weights.get("type", "int"))


def _size_of(keys: Keys, weights: Mapping[str, Any]) -> int | None:
    """Columns that share a scale; None where rows have one, or blocks of several rows."""
    block = weights.get("block_structure")
    rows, columns = keys.block(block, "config_groups") if block else (None, None)
    size = columns if rows == 1 else weights.get("group_size")
    if size is not None and type(size) is not int:
        keys.refuse("config_groups", "groups whose group_size is a whole number")
    return size if size is not None and size > 0 else None
