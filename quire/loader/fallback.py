"""Models that quire does not have, built by the classes of transformers, from safetensors files that quire reads.

transformers opens no file here: it is given the tensors that were digested, and gives their names back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from quire.config.arch import ModelArch
from quire.config.memory.weights.stored import THROUGH_TRANSFORMERS, StoredWeights
from quire.errors import CheckpointError, ConfigError
from quire.loader.checkpoint import Checkpoint
from quire.loader.headers import raise_problems
from quire.loader.mapped_file import DTYPES
from quire.loader.unread import why_needless
from quire.log import get_logger
from quire.models.fallback.attention import NAME, register
from quire.models.fallback.config import class_of, describe, quiet, read_config
from quire.models.fallback.model import TransformersModel
from quire.models.fallback.trial import try_model
from quire.ops.contracts.ops import Ops

log = get_logger(__name__)


def read_stored_arch(raw: Mapping[str, Any], directory: Path) -> ModelArch:
    """The `ModelArch` of a model that transformers builds, from config.json and the headers of the weights.

    Raises: ConfigError saying why it cannot run; CheckpointError for files that are missing or damaged.
    """
    source = str(directory / "config.json")
    arch = ModelArch.from_config(describe(raw, source), source=source, family=THROUGH_TRANSFORMERS)
    stored = _stored_weights(Checkpoint(directory), arch.vocab_size)
    return replace(arch, raw=dict(raw), stored=stored)


def load_stored_model(
    directory: Path,
    arch: ModelArch,
    *,
    ops: Ops,
    dtype: torch.dtype,
    max_model_len: int,
    num_threads: int,
    progress: Callable[[int, int], None] | None = None,
) -> TransformersModel:
    """Build the model, read its weights, and try it on a few tokens.

    Raises: CheckpointError for weights that are missing, mis-shaped or of another model; ConfigError for a model that
    does not work over a paged cache.
    """
    checkpoint = Checkpoint(directory)
    causal = _built(arch, checkpoint, dtype)
    num_bytes = sum(info.num_bytes for info in checkpoint.tensors.values())
    if progress is not None:
        progress(num_bytes, num_bytes)
    if causal.base_model is causal:
        raise ConfigError(
            f"{arch.source}: {arch.architecture} has no body apart from its head, so quire cannot run it."
        )
    model = TransformersModel(causal, ops, vocab_size=arch.vocab_size, num_threads=num_threads)
    with torch.inference_mode():
        try_model(model, arch, dtype, max_model_len=max_model_len)
    return model


def _stored_weights(checkpoint: Checkpoint, vocab_size: int) -> StoredWeights:
    sizes = [info.shape for info in checkpoint.tensors.values()]
    matrices = [shape[-2:] for shape in sizes if len(shape) > 1 and vocab_size not in shape]
    return StoredWeights(
        transformers=transformers.__version__,
        num_parameters=sum(math.prod(shape) for shape in sizes),
        num_linear=max(1, sum(math.prod(shape) for shape in sizes if len(shape) > 1 and vocab_size not in shape)),
        largest=max(map(math.prod, sizes), default=1),
        largest_joined=_largest_joined(checkpoint),
        widest=max((max(matrix) for matrix in matrices), default=1),
        num_experts=_num_experts(checkpoint),
    )


_EXPERT = re.compile(r"\.experts\.\d+\.")


def _joined(checkpoint: Checkpoint) -> dict[str, list[int]]:
    """Tensors that differ in the number of an expert alone, which transformers joins to one: numbers of each."""
    joined: dict[str, list[int]] = {}
    for name, info in checkpoint.tensors.items():
        if _EXPERT.search(name):
            joined.setdefault(_EXPERT.sub(".experts.", name), []).append(math.prod(info.shape))
    return joined


def _largest_joined(checkpoint: Checkpoint) -> int:
    """Two are joined again where they are computed at once, gate and up."""
    return 2 * max(map(sum, _joined(checkpoint).values()), default=0)


def _num_experts(checkpoint: Checkpoint) -> int:
    stacked = (info.shape[0] for info in checkpoint.tensors.values() if len(info.shape) == 3)
    return max((1, *stacked, *map(len, _joined(checkpoint).values())))


def _built(arch: ModelArch, checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """The model with weights in memory of its own."""
    register()
    config = read_config(arch.raw, arch.source)
    model_class = class_of(config, arch.raw, arch.source)
    tensors = {name: _Stored(checkpoint, name) for name, info in checkpoint.tensors.items() if info.dtype in DTYPES}
    try:
        with quiet():
            model, info = model_class.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=dtype,
                attn_implementation=NAME,
                experts_implementation="eager",
                output_loading_info=True,
            )
    except Exception as error:  # whatever foreign code raises means the same here
        detail = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"The checkpoint in {checkpoint.directory} cannot be loaded by transformers ({type(error).__name__}: "
            f"{detail}). Weights or config.json belong to another model."
        ) from error
    _check_names(checkpoint, info)
    built: PreTrainedModel = model.requires_grad_(False).eval()
    return built


class _Stored:
    """A tensor of the files, as transformers takes it from safetensors: read when it is indexed, in any thread.

    What it gives is a copy, so that nothing done to the file later changes an answer, and the file's pages are let go.
    """

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint = checkpoint
        self._name = name

    def __getitem__(self, index: EllipsisType) -> Tensor:
        value = self._checkpoint.view(self._name)[index].clone()
        self._checkpoint.drop([self._name])
        return value


def _check_names(checkpoint: Checkpoint, info: Mapping[str, Any]) -> None:
    """Raises: CheckpointError for tensors that the model lacks, or does not use."""
    missing = [
        f"{name} is missing; weights or config.json belong to another model" for name in sorted(info["missing_keys"])
    ]
    unread = [
        f"{name} is not used by this model; the file belongs to another"
        for name in sorted(info["unexpected_keys"])
        if not why_needless(name)
    ]
    raise_problems(checkpoint.directory, missing + unread)
