"""Experts whose gate and up projections a checkpoint stores in different formats.

Kernels read an expert's input once and multiply it with both, in one format. So these two become plain numbers; the
third projection, and other experts, stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from quire.config.arch import ModelArch
from quire.config.quantized.stored import Packing, StoredFormat

BESIDE: Mapping[str, str] = MappingProxyType({"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"})
"""Of the projections that read an expert's input, each -> the other."""
EXPERT = re.compile(r"\.(experts\.\d+|shared_(experts?|mlp))\.")


def divided_experts(arch: ModelArch) -> frozenset[str]:
    """The quantised weights of an expert that cannot stay as they are for the one beside them."""
    if not any(spec.is_gated for spec in arch.mixtures):
        return frozenset()
    kept = {format.name: _kept_as(format) for format in arch.quantized if EXPERT.search(format.name)}
    return frozenset(name for name, format in kept.items() if kept.get(_beside(name)) != format)


def _kept_as(format: StoredFormat) -> tuple[str | None, str]:
    """The kernels' format, and what tells its levels apart: the type of a GGUF file's blocks, or nf4 from fp4."""
    if not format.has_levels:
        return format.kept_as, ""
    if format.packing is Packing.GGUF:
        return format.kept_as, next(iter(format.tensors))
    return format.kept_as, format.tensors.get("quant_state", "").rpartition("_")[2]


def _beside(name: str) -> str:
    """The name of the other projection; of one that has none, its own."""
    expert, _, last = name.removesuffix(".weight").rpartition(".")
    return f"{expert}.{BESIDE[last]}.weight" if last in BESIDE else name
