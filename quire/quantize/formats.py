"""The formats that `quire quantize` writes. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFormat:
    """How weights are stored, in the terms of compressed-tensors."""

    name: str
    layout: str
    """pack-quantized, int-quantized or float-quantized."""
    bits: int
    is_float: bool = False
    """float8_e4m3fn instead of whole numbers."""
    group_size: int | None = None
    """Columns that share a scale; None where a row has one scale."""
    symmetric: bool = True
    """Without zero points."""
    rounds_inputs: bool = False
    """Whether inputs are rounded, too: to as many bits, with a scale for each token."""

    @property
    def is_packed(self) -> bool:
        """Whether several values stand in one int32."""
        return self.layout == "pack-quantized"

    @property
    def limits(self) -> tuple[float, float]:
        """The smallest and the largest value."""
        if self.is_float:
            return -448.0, 448.0
        half = 1 << self.bits - 1
        return (1.0 - half if self.rounds_inputs else -half), half - 1.0

    @property
    def num_steps(self) -> float:
        """The largest weight of a symmetric group in steps of its scale."""
        _, most = self.limits
        return most if self.is_float or self.rounds_inputs else most + 0.5

    def quantization_config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """What config.json says of the checkpoint. `ignore`: linear layers that are not quantised."""
        kind = "float" if self.is_float else "int"
        weights = {
            "num_bits": self.bits,
            "type": kind,
            "strategy": "channel" if self.group_size is None else "group",
            "group_size": self.group_size,
            "symmetric": self.symmetric,
            "dynamic": False,
        }
        inputs = {"num_bits": self.bits, "type": kind, "strategy": "token", "symmetric": True, "dynamic": True}
        return {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": self.layout,
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": inputs if self.rounds_inputs else None,
                    "output_activations": None,
                    "format": self.layout,
                }
            },
            "ignore": list(ignore),
            "kv_cache_scheme": None,
        }


FORMATS: Mapping[str, TargetFormat] = MappingProxyType(
    {
        "int4": TargetFormat(name="int4", layout="pack-quantized", bits=4, group_size=128),
        "int8": TargetFormat(name="int8", layout="pack-quantized", bits=8, group_size=128),
        "w8a8": TargetFormat(name="w8a8", layout="int-quantized", bits=8, rounds_inputs=True),
        "fp8": TargetFormat(name="fp8", layout="float-quantized", bits=8, is_float=True, rounds_inputs=True),
    }
)
METHODS = ("rtn", "gptq", "awq")
PER_ROW = "channel"
"""The group size that stands for one scale a row."""


def target_format(name: str, group_size: str | None, *, symmetric: bool) -> TargetFormat:
    """The format with the user's group size: a number, "channel", or None for the format's own.

    Raises: ConfigError.
    """
    target = FORMATS[name]
    if not target.is_packed:
        if not symmetric or group_size not in (None, PER_ROW):
            raise ConfigError(
                f"--format {name} has one scale for each row and no zero points; leave out --group-size and "
                "--asymmetric, or use --format int8 or int4"
            )
        return target
    return replace(target, group_size=_group_size(group_size, target), symmetric=symmetric)


def _group_size(given: str | None, target: TargetFormat) -> int | None:
    if given is None:
        return target.group_size
    if given == PER_ROW:
        return None
    if not given.isdecimal() or int(given) < 8 or int(given) % 8:
        raise ConfigError(f"--group-size must be {PER_ROW} or a multiple of 8 (32, 64 and 128 are usual), got {given}")
    return int(given)
