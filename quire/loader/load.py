"""`load_model`: from a directory and its `ModelArch` to a model that can run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from quire.config.arch import ModelArch
from quire.config.quantized.kv_cache import PAIRS, takes_scales
from quire.errors import ConfigError
from quire.layers.context import LayerContext
from quire.layers.quantization.schemes import DENSE, SCHEMES
from quire.layers.weights import WeightMap
from quire.loader.checkpoint import TensorSource, open_checkpoint
from quire.loader.headers import raise_problems
from quire.loader.mapped_file import DTYPES
from quire.loader.readers import CheckpointReader, DummyReader, HeaderReader
from quire.loader.unread import SECOND_HEAD, unread_parts, why_needless
from quire.log import get_logger
from quire.models.interfaces import Model, ModelClass
from quire.models.registry import ModelRegistry
from quire.ops.contracts.ops import Ops

log = get_logger(__name__)

SAMPLED_ROWS = 16
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


def load_model(
    path: Path,
    arch: ModelArch,
    *,
    ops: Ops,
    dtype: torch.dtype,
    max_model_len: int,
    load_format: str = "auto",
    seed: int = 0,
    quantization: str | None = None,
    dequantize: bool = False,
    kv_cache_dtype: str = "auto",
    num_threads: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Build the model with its weights, converted to `dtype` slice by slice. Nothing in the directory is executed.

    `progress` hears (bytes read, bytes in all). `quantization` names a scheme of `layers.quantization.schemes`, and
    `dequantize` asks for plain weights of a checkpoint that has them quantised. Scales of keys and values are read if
    `kv_cache_dtype` is the type that they are for. load_format "dummy" makes weights up from `seed` and reads no file.
    `num_threads` are torch's, for a model that transformers builds.
    Raises: ConfigError for an architecture or option that is not supported, CheckpointError listing what is wrong with
    the files.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format {load_format!r} is not known; use one of {', '.join(LOAD_FORMATS)}")
    if arch.stored is not None:
        if ops.device != "cpu":
            raise ConfigError(
                f"{arch.source}: {arch.architecture} runs through transformers, which quire does on CPUs only. "
                "Give device='cpu'."
            )
        from quire.loader.fallback import load_stored_model  # imports transformers

        return load_stored_model(
            path, arch, ops=ops, dtype=dtype, max_model_len=max_model_len, num_threads=num_threads, progress=progress
        )
    model_class = ModelRegistry.resolve(arch.architecture, source=arch.source, family=arch.family)
    if "auto_map" in arch.raw:
        log.warning("config.json names code of its own (auto_map); quire never runs it source=%s", arch.source)
    context = partial(
        LayerContext,
        ops=ops,
        weight_map=WeightMap.of(arch.family.names),
        dtype=dtype,
        max_model_len=max_model_len,
        quantization=arch.quantization,
        scheme=DENSE if dequantize else SCHEMES[quantization],
        has_kv_scales=takes_scales(arch.quantization.kv_cache if arch.quantization else None, kv_cache_dtype),
    )
    if load_format == "dummy" and arch.quantization is not None:
        raise ConfigError(
            f"{arch.source}: load_format='dummy' makes plain weights up, and this model's are quantised "
            f"({arch.quantization.method}). Remove quantization_config, or leave load_format out."
        )
    if load_format == "dummy":
        return model_class(arch, context(weights=DummyReader(seed=seed, dtype=dtype)))
    return _load_checkpoint(path, arch, model_class, context, progress)


def _load_checkpoint(
    path: Path,
    arch: ModelArch,
    model_class: ModelClass,
    context: partial[LayerContext],
    progress: Callable[[int, int], None] | None,
) -> Model:
    """Build the model against the headers first, then with its weights."""
    checkpoint, weight_map = open_checkpoint(path), WeightMap.of(arch.family.names)
    headers = HeaderReader(checkpoint, weight_map, unread=unread_parts(arch))
    model_class(arch, context(weights=headers))
    headers.raise_problems()
    _tell_scales(arch, context, headers)
    _check_second_head(arch, checkpoint, headers)
    reader = CheckpointReader(checkpoint, weight_map, num_bytes=headers.num_bytes, progress=progress)
    return model_class(arch, context(weights=reader))


def _check_second_head(arch: ModelArch, checkpoint: TensorSource, headers: HeaderReader) -> None:
    """Warn of a head that is not read and has other numbers than the embedding, which config.json makes the head.

    Raises: CheckpointError for one of another size.
    """
    names = arch.family.names
    embedding = checkpoint.tensors.get(headers.names(f"{names.base}.{names.embedding}.weight"))
    if not arch.tie_word_embeddings or embedding is None:
        return
    heads = [
        head
        for name, head in checkpoint.tensors.items()
        if name not in headers.used and why_needless(name) == SECOND_HEAD and head.dtype in DTYPES
    ]
    raise_problems(
        checkpoint.directory,
        [
            f"{head.file.name}: {head.name} has shape {list(head.shape)}, but the embedding, which is the head as "
            f"tie_word_embeddings is true, has {list(embedding.shape)}; one of the two belongs to another model"
            for head in heads
            if head.shape != embedding.shape
        ],
    )
    rows = torch.linspace(0, embedding.shape[0] - 1, SAMPLED_ROWS).long()
    for head in heads:
        values, others = (checkpoint.view(tensor.name)[rows] for tensor in (embedding, head))
        if not (torch.equal(values.to(others.dtype), others) or torch.equal(values, others.to(values.dtype))):
            log.warning(
                "%s has other numbers than the embedding, which is the head instead as tie_word_embeddings is true; "
                "if the head was trained by itself, set tie_word_embeddings to false in config.json",
                head.name,
            )


def _tell_scales(arch: ModelArch, context: partial[LayerContext], headers: HeaderReader) -> None:
    """Log how a KV cache of 8 bits is scaled, where the checkpoint has, or should have, scales for it."""
    if not context.keywords["has_kv_scales"]:
        return
    keys = tuple(f".{key}" for key, _ in PAIRS)
    count, layers = sum(name.endswith(keys) for name in headers.used), len(arch.attentions)
    if count:
        log.info("keys and values are scaled as the checkpoint says layers=%d of=%d", count, layers)
    elif arch.quantization is not None and arch.quantization.kv_cache is not None:
        log.warning("kv_cache_scheme promises scales that the checkpoint lacks; each token's key and value has its own")
