"""From the tensors of a GGUF file to those that a checkpoint of transformers would have.

GGUF has one name for a part whatever the family; the family's spec says what transformers calls it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from quire.config.arch import ModelArch
from quire.config.family_spec import MlpKind
from quire.config.gguf.architectures import GgufArchitecture, architecture_of
from quire.config.gguf.config_json import CONFIGURING, gguf_config
from quire.config.gguf.files import read_gguf
from quire.config.gguf.header import GgufTensor
from quire.config.gguf.metadata import GgufKeys

_OF_LAYER = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>.+)\.(?P<kind>weight|bias)")
_OF_MODEL = re.compile(r"(?P<part>.+)\.(?P<kind>weight|bias)")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor by transformers' name, and where in a GGUF file it is."""

    name: str
    file: Path
    dtype: str
    """As GGUF spells it."""
    shape: tuple[int, ...]
    """Elements, quantised or not."""
    num_bytes: int
    stored: GgufTensor
    """The whole tensor of the file."""
    expert: int | None = None
    """Of a tensor for all experts, the one that this is."""
    turns: int | None = None
    """Heads whose rows take turns: see `GgufArchitecture.takes_turns`."""
    offset: float = 0.0
    """What the file adds to the weight of transformers."""


def read_gguf_tensors(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a model, by transformers' names.

    Raises: CheckpointError for a damaged file; ConfigError for an architecture that is not read.
    """
    model = read_gguf(path)
    arch = ModelArch.from_config(gguf_config(path), source=str(path))
    return translated(model.tensors, arch, architecture_of(GgufKeys(model)))


def translated(tensors: Mapping[str, GgufTensor], arch: ModelArch, how: GgufArchitecture) -> dict[str, StoredTensor]:
    """All tensors of the model. Those that no family has keep GGUF's names."""
    names = _Names(arch)
    found = (
        part
        for tensor in tensors.values()
        if tensor.name not in CONFIGURING
        for part in _parts(names, tensor, arch, how)
    )
    return {tensor.name: tensor for tensor in found}


def _parts(names: _Names, tensor: GgufTensor, arch: ModelArch, how: GgufArchitecture) -> Iterator[StoredTensor]:
    """What one tensor of the file is: one weight, or one for each expert."""
    part, name = names.of(tensor.name)
    whole = StoredTensor(
        name=name,
        file=tensor.file,
        dtype=tensor.type.name,
        shape=tensor.shape,
        num_bytes=tensor.num_bytes,
        stored=tensor,
        turns=_heads(part, arch, tensor) if how.takes_turns else None,
        offset=arch.norms.offset if part.endswith("norm") and name.endswith(".weight") else 0.0,
    )
    if part == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:
        yield replace(whole, shape=(1, *tensor.shape))
        return
    if not part.endswith("_exps") or "#" not in name:
        yield whole
        return
    count, *shape = tensor.shape
    for expert in range(count):
        yield replace(
            whole,
            name=name.replace("#", str(expert)),
            shape=tuple(shape),
            num_bytes=tensor.num_bytes // count,
            expert=expert,
        )


def _heads(part: str, arch: ModelArch, tensor: GgufTensor) -> int | None:
    """Of a part with rows that are rotated. One of another size is refused by whoever reads it."""
    heads = {"attn_q": arch.num_heads, "attn_k": arch.num_kv_heads}.get(part)
    return None if heads is None or tensor.shape[0] % (2 * heads) else heads


class _Names:
    """The names of a family."""

    def __init__(self, arch: ModelArch) -> None:
        names, norms = arch.family.names, arch.norms
        self.layers = f"{names.base}.{names.layers}"
        self.of_model = _known(
            {
                "token_embd": (names.base, names.embedding),
                "token_embd_norm": (names.base, norms.embedding),
                "output_norm": (names.base, norms.final),
                "output": ("", names.head),
            }
        )
        mlp = names.mlp or ""
        self.of_layer = _known(
            {
                "attn_norm": ("", norms.input),
                "post_attention_norm": ("", norms.post_attention or norms.pre_mlp),
                "ffn_norm": ("", norms.pre_mlp),
                "post_ffw_norm": ("", norms.post_mlp),
                "attn_output": (names.attention, names.output),
                "attn_q_norm": (names.attention, names.q_norm),
                "attn_k_norm": (names.attention, names.k_norm),
                "attn_sinks": (names.attention, names.sinks),
                **_products(names.attention, ("attn_q", "attn_k", "attn_v"), "attn_qkv", names.qkv),
                **_products(mlp, ("ffn_gate", "ffn_up"), "ffn_up", names.gate_up if _is_gated(arch) else (names.up,)),
                "ffn_down": (mlp, names.down),
                "ffn_gate_inp": (mlp, "gate"),
                "exp_probs_b": (mlp, "gate.e_score_correction"),
                "ffn_gate_exps": (mlp, "experts.#.gate_proj"),
                "ffn_up_exps": (mlp, "experts.#.up_proj"),
                "ffn_down_exps": (mlp, "experts.#.down_proj"),
                "ffn_gate_inp_shexp": (mlp, "shared_expert_gate"),
                "ffn_gate_shexp": (mlp, "shared_expert.gate_proj"),
                "ffn_up_shexp": (mlp, "shared_expert.up_proj"),
                "ffn_down_shexp": (mlp, "shared_expert.down_proj"),
            }
        )

    def of(self, stored: str) -> tuple[str, str]:
        """(GGUF's name of the part, transformers' name of the tensor); the latter with # for an expert's index."""
        in_layer = _OF_LAYER.fullmatch(stored)
        found = in_layer or _OF_MODEL.fullmatch(stored)
        known = self.of_layer if in_layer else self.of_model
        if found is None or found["part"] not in known:
            return "", stored
        part, kind = found["part"], found["kind"]
        name = f"{self.layers}.{in_layer['layer']}.{known[part]}" if in_layer else known[part]
        if part == "attn_sinks":
            return part, name
        return part, f"{name}_{kind}" if part == "exp_probs_b" else f"{name}.{kind}"


def _known(places: Mapping[str, tuple[str, str | None]]) -> dict[str, str]:
    """GGUF's part -> path, for parts that the family has."""
    return {part: f"{parent}.{name}" if parent else name for part, (parent, name) in places.items() if name}


def _products(parent: str, each: tuple[str, ...], joined: str, names: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """Layers that transformers has as one tensor, or as one for each."""
    if len(names) == 1:
        return {joined: (parent, names[0])}
    return {part: (parent, name) for part, name in zip(each, names, strict=True)}


def _is_gated(arch: ModelArch) -> bool:
    return any(layer.mlp.kind is not MlpKind.PLAIN for layer in arch.layers)
