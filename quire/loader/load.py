"""`load_model`: from a directory and its `ModelArch` to a model that can run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from quire.config.arch import ModelArch
from quire.errors import ConfigError
from quire.layers.context import LayerContext
from quire.loader.checkpoint import Checkpoint
from quire.loader.readers import CheckpointReader, DummyReader, HeaderReader
from quire.log import get_logger
from quire.models.interfaces import Model, ModelClass
from quire.models.registry import ModelRegistry

log = get_logger(__name__)

LOAD_FORMATS = ("auto", "safetensors", "dummy")


def load_model(
    path: Path,
    arch: ModelArch,
    *,
    dtype: torch.dtype,
    max_model_len: int,
    load_format: str = "auto",
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Build the model with its weights, converted to `dtype` slice by slice. Nothing in the directory is executed.

    `progress` hears (bytes read, bytes in all). load_format "dummy" makes weights up from `seed` and reads no file.
    Raises: ConfigError for an architecture or option that is not supported, CheckpointError listing what is wrong with
    the files.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format {load_format!r} is not known; use one of {', '.join(LOAD_FORMATS)}")
    model_class = ModelRegistry.resolve(arch.architecture, source=arch.source)
    if "auto_map" in arch.raw:
        log.warning("config.json names code of its own (auto_map); quire never runs it source=%s", arch.source)
    if load_format == "dummy":
        reader = DummyReader(seed=seed, dtype=dtype)
        ctx = LayerContext(weights=reader, weight_map=model_class.weights, dtype=dtype, max_model_len=max_model_len)
        return model_class(arch, ctx)
    return _load_checkpoint(path, arch, model_class, dtype, max_model_len, progress)


def _load_checkpoint(
    path: Path,
    arch: ModelArch,
    model_class: ModelClass,
    dtype: torch.dtype,
    max_model_len: int,
    progress: Callable[[int, int], None] | None,
) -> Model:
    weight_map, checkpoint = model_class.weights, Checkpoint(path)
    headers = HeaderReader(checkpoint, weight_map)
    model_class(arch, LayerContext(weights=headers, weight_map=weight_map, dtype=dtype, max_model_len=max_model_len))
    headers.raise_problems()
    reader = CheckpointReader(checkpoint, weight_map, num_bytes=headers.num_bytes, progress=progress)
    return model_class(
        arch, LayerContext(weights=reader, weight_map=weight_map, dtype=dtype, max_model_len=max_model_len)
    )
