"""What a quantization_config of torchao says of weights: which classes its tensors have, and their groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quire.config.quantized.find import Hints
from quire.config.quantized.keys import Keys
from quire.errors import ConfigError

SCHEMES = (
    "Float8DynamicActivationFloat8WeightConfig",
    "Float8StaticActivationFloat8WeightConfig",
    "Float8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Int8DynamicActivationIntxWeightConfig",
    "Int8StaticActivationInt8WeightConfig",
    "Int8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
)
"""Whose weights are integers of a byte or 8-bit floats, row by row."""
OF_MODULES = ("FqnToConfig", "ModuleFqnToConfig")
"""What has a scheme for each of some modules."""
OF_WEIGHTS = ("mapping_type", "weight_mapping_type")
"""Keys that say whether weights have zero points."""


def read_torchao(keys: Keys) -> Hints:
    """Raises: ConfigError for schemes whose weights are laid out for one kind of kernel."""
    entries = list(_entries(keys.table("quant_type")))
    named = [str(entry["_type"]) for _, entry in entries if str(entry.get("_type")).endswith("Config")]
    unread = [name for name in named if name not in (*SCHEMES, *OF_MODULES)]
    if unread or not named:
        raise ConfigError(
            f"{keys.source}: the weights are quantised by torchao's {unread[0] if unread else 'unnamed scheme'}, as "
            f"quantization_config.quant_type says. Of torchao quire reads {', '.join(SCHEMES)}; use such a "
            "checkpoint, or the original with --quantization int8 or int4."
        )
    packings = [str(entry.get("_data")) for name, entry in entries if name == "intx_packing_format"]
    if any(packing.upper() != "UNPACKED_TO_INT8" for packing in packings):
        keys.refuse("quant_type", "an intx_packing_format of UNPACKED_TO_INT8")
    mappings = (str(entry.get("_data")) for name, entry in entries if name in OF_WEIGHTS)
    sizes = (entry.get("group_size") for _, entry in entries)
    return Hints(
        is_symmetric=all(mapping.startswith("SYMMETRIC") for mapping in mappings),
        group_sizes=frozenset(size for size in sizes if type(size) is int and size > 0),
    )


def _entries(table: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All objects within, and what they are called."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield name, value
            yield from _entries(value)
