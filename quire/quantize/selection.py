"""Which tensors of a checkpoint are quantised, which stay, and what is refused."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from quire.config.arch import ModelArch
from quire.errors import ConfigError, counted
from quire.layers.experts import ROUTERS, SHARED_GATE
from quire.loader.safetensors_header import TensorInfo
from quire.quantize.formats import TargetFormat

WEIGHT = ".weight"
_LAYER = re.compile(r"(?P<prefix>(?:.*\.)?(?:layers|h|blocks))\.(?P<index>\d+)\.")
_STAYS = tuple(f".{name}" for name in (*ROUTERS, SHARED_GATE))
"""Endings of routers of mixtures, whose errors choose other experts."""
_EXPERTS = re.compile(r"\.experts\.(?!\d)")
"""In the names of tensors that hold several experts."""
HEAD = "lm_head"
"""What transformers calls the output head of most families, whatever it is called in the checkpoint."""
USUAL_GROUP_SIZES = (128, 64, 32, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What becomes of each tensor."""

    layers: Sequence[tuple[str, ...]]
    """The tensors of each decoder layer."""
    outside: tuple[str, ...]
    """Embeddings, the last norm, the head."""
    prefix: str
    """The decoder layers' name: model.layers."""
    modules: frozenset[str]
    """Linear layers that are quantised."""
    ignored: tuple[str, ...]
    """Linear layers that are not, and tables of embeddings."""

    def modules_of(self, layer: int) -> list[str]:
        """The linear layers of a decoder layer that are quantised, in the order of their names."""
        names = (name.removesuffix(WEIGHT) for name in self.layers[layer])
        return sorted(name for name in names if name in self.modules)


def check_model(arch: ModelArch) -> None:
    """Raises: ConfigError for a model whose layers are more than attention and MLPs."""
    if arch.stored is not None:
        raise ConfigError(
            f"{arch.source}: {arch.architecture} runs through transformers, and quire quantize only knows models that "
            "quire builds itself (quire models lists them)"
        )
    if arch.quantization is not None:
        raise ConfigError(f"{arch.source}: the weights are quantised already; give the unquantised version")
    if arch.recurrences:
        raise ConfigError(
            f"{arch.source}: {arch.architecture} has recurrent layers, which quire quantize leaves alone; "
            "--quantization int8 rounds what it can when the model is loaded"
        )
    if arch.family.names.transposed:
        raise ConfigError(
            f"{arch.source}: {arch.architecture} stores weights [in, out], which compressed-tensors has no form for; "
            "--quantization int8 rounds them when the model is loaded"
        )


def select(
    tensors: Mapping[str, TensorInfo], ignore: Sequence[str], target: TargetFormat, arch: ModelArch
) -> Selection:
    """Sort a checkpoint's tensors. `ignore`: names of modules, with * and ?, that stay as they are.

    Raises: ConfigError for what cannot be quantised, and for a pattern that matches nothing.
    """
    source = arch.source
    prefix, layers = _layers(tensors, source)
    inside = {name for layer in layers for name in layer}
    stacked = [name for name in inside if _has_all_experts(name, len(tensors[name].shape))]
    if stacked:
        raise ConfigError(
            f"{source}: {min(stacked)} holds the weights of all experts in one tensor, and compressed-tensors has one "
            "for each expert; --quantization int8 rounds them when the model is loaded"
        )
    linear = _matrices(inside, tensors)
    stays = {name for name in linear if name.endswith(_STAYS)} | _matching(linear, ignore)
    modules = frozenset(linear - stays)
    if not modules:
        raise ConfigError(f"{source}: no linear layer is left to quantise; give fewer --ignore")
    _check_groups({name: tensors[name + WEIGHT].shape for name in modules}, target, source)
    outside, head = tensors.keys() - inside, arch.family.names.head  # a tied one has no tensor
    return Selection(
        layers=layers,
        outside=tuple(sorted(outside)),
        prefix=prefix,
        modules=modules,
        ignored=tuple(sorted({HEAD, head, *_matrices(outside, tensors), *stays})),
    )


def _matrices(names: Iterable[str], tensors: Mapping[str, TensorInfo]) -> set[str]:
    """The modules whose weights are matrices."""
    return {name.removesuffix(WEIGHT) for name in names if name.endswith(WEIGHT) and len(tensors[name].shape) == 2}


def _has_all_experts(name: str, num_dimensions: int) -> bool:
    """Whether a tensor of a layer, which has no convolutions, holds the weights of several experts."""
    return num_dimensions > 2 or (num_dimensions == 2 and _EXPERTS.search(name) is not None)


def _layers(names: Iterable[str], source: str) -> tuple[str, list[tuple[str, ...]]]:
    found: dict[str, dict[int, list[str]]] = {}
    for name in sorted(names):
        match = _LAYER.match(name)
        if match is not None:
            found.setdefault(match["prefix"], {}).setdefault(int(match["index"]), []).append(name)
    if len(found) != 1 or sorted(next(iter(found.values()))) != list(range(len(next(iter(found.values()))))):
        raise ConfigError(
            f"{source}: the tensors' names show no single run of decoder layers (found: "
            f"{', '.join(sorted(found)) or 'none'}); names such as model.layers.0.mlp.up_proj.weight are needed"
        )
    prefix, layers = next(iter(found.items()))
    return prefix, [tuple(layers[index]) for index in range(len(layers))]


def _matching(names: set[str], patterns: Sequence[str]) -> set[str]:
    matching: set[str] = set()
    for pattern in patterns:
        hits = set(fnmatch.filter(names, pattern))
        if not hits:
            raise ConfigError(f"--ignore {pattern} matches no linear layer; names are such as {min(names)}")
        matching |= hits
    return matching


def _check_groups(shapes: Mapping[str, tuple[int, ...]], target: TargetFormat, source: str) -> None:
    size = target.group_size
    if size is None:
        return
    odd = sorted(name for name, (_, columns) in shapes.items() if columns % size)
    if odd:
        widths = {columns for _, columns in shapes.values()}
        fits = [str(size) for size in USUAL_GROUP_SIZES if all(columns % size == 0 for columns in widths)]
        raise ConfigError(
            f"{source}: {odd[0]} has {shapes[odd[0]][1]} inputs, no multiple of the group size {size} "
            f"({counted(len(odd), 'layer')} in all); use --group-size {' or '.join([*fits[:1], 'channel'])}"
        )
