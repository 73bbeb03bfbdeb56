"""What writers say of quantised weights in a file beside config.json, where config.json itself says nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quire.config.json_file import read_json_object
from quire.errors import CheckpointError, shown

REMEDY = "Download the file again."


def with_side_file(raw: dict[str, Any], directory: Path) -> dict[str, Any]:
    """config.json with the quantization_config of the first such file, where it has none.

    Raises: CheckpointError naming the file.
    """
    if any(raw.get(key) is not None for key in ("quantization_config", "compression_config")):
        return raw
    for name, read in SIDE_FILES.items():
        found = read_json_object(directory / name, REMEDY, CheckpointError)
        if found is not None:
            return {**raw, "quantization_config": read(found, directory / name)}
    return raw


def _modelopt(found: Mapping[str, Any], file: Path) -> dict[str, Any]:
    given = found.get("quantization")
    if not isinstance(given, Mapping):
        raise CheckpointError(f"{file}: quantization is {shown(given)}; it must be an object. {REMEDY}")
    return {**given, "quant_method": "modelopt"}


def _gptq(found: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """AutoGPTQ's, before transformers had a place for it; GPTQModel's names its method."""
    return {"quant_method": "gptq", **found}


def _awq(found: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """AutoAWQ's, with its first names for bits and group_size."""
    names = {"w_bit": "bits", "q_group_size": "group_size"}
    return {"quant_method": "awq", **{names.get(key, key): value for key, value in found.items()}}


SIDE_FILES: Mapping[str, Callable[[Mapping[str, Any], Path], dict[str, Any]]] = MappingProxyType(
    {"hf_quant_config.json": _modelopt, "quantize_config.json": _gptq, "quant_config.json": _awq}
)
"""Name -> what it says, as a quantization_config."""
