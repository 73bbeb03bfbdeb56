"""From the tensors of a GGUF file to those that a checkpoint of transformers would have.

GGUF has one name for a part whatever the family; the family's spec says what transformers calls it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quire.config.arch import ModelArch
from quire.config.family_spec import MlpKind
from quire.config.gguf.architectures import Change, GgufArchitecture, architecture_of
from quire.config.gguf.config_json import CONFIGURING, gguf_config
from quire.config.gguf.files import read_gguf
from quire.config.gguf.header import GgufTensor
from quire.config.gguf.metadata import GgufKeys
from quire.config.gguf.tensor_types import PLAIN, QUANTIZED
from quire.config.layers.experts import MAX_EXPERTS
from quire.errors import CheckpointError
from quire.loader.gguf.shapes import TensorChange, change_of

_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>.+?)(?:\.(?P<kind>weight|bias))?", re.DOTALL)
KEYS_OF_LATENT, VALUES_OF_LATENT = "attn_k_b", "attn_v_b"
"""Which transformers has as one tensor."""
FLOAT_BYTES = 4
BARE = frozenset({"ssm_a", "ssm_d"})
"""Parts that are named without the kind."""
ORDER = {
    "ffn_gate": 0,
    "ffn_up": 1,
    "ffn_gate_shexp": 0,
    "ffn_up_shexp": 1,
    "attn_q": 0,
    "attn_k": 1,
    "attn_v": 2,
    KEYS_OF_LATENT: 0,
    VALUES_OF_LATENT: 1,
}
"""Of parts that some families have as one tensor."""
CHANGES: Mapping[str, Change] = {
    "ffn_gate_inp_shexp": Change.ROW,
    "exp_probs_b.bias": Change.FLAT,
    "ssm_conv1d.weight": Change.CHANNELS,
    "shortconv.conv.weight": Change.CHANNELS,
    "ssm_a": Change.DECAY,
    "ssm_d": Change.FLAT,
    "ssm_norm.weight": Change.FLAT,
}
"""Those of all architectures."""


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
    stored: tuple[GgufTensor, ...]
    """Whole tensors of the file, whose rows follow each other."""
    expert: int | None = None
    """Of a tensor for all experts, the one that this is."""
    change: TensorChange | None = None
    """What is done to the rows; None where they are as in the file."""
    constant: float | None = None
    """What all elements are, of a weight that is no tensor of the file."""
    is_latent: bool = False
    """Whether the two tensors are those for the keys and the values of latents."""


def read_gguf_tensors(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a model, by transformers' names.

    Raises: CheckpointError for a damaged file; ConfigError for an architecture that is not read.
    """
    model = read_gguf(path)
    arch = ModelArch.from_config(gguf_config(path), source=str(path))
    keys = GgufKeys(model)
    how = architecture_of(keys)
    return {**translated(model.tensors, arch, how), **{info.name: info for info in _constants(keys, arch, how)}}


def _constants(keys: GgufKeys, arch: ModelArch, how: GgufArchitecture) -> Iterator[StoredTensor]:
    """Weights that are numbers of the metadata."""
    names, path = arch.family.names, keys.model.path
    for place, shape, value in how.constants(keys):
        name = f"{names.base}.{names.layers}.{place}"
        yield StoredTensor(
            name=name, file=path, dtype="F32", shape=shape, num_bytes=FLOAT_BYTES, stored=(), constant=value
        )


def translated(tensors: Mapping[str, GgufTensor], arch: ModelArch, how: GgufArchitecture) -> dict[str, StoredTensor]:
    """All tensors of the model. Those that no family has keep GGUF's names.

    Raises: CheckpointError for tensors that should be one and do not fit each other.
    """
    names = _Names(arch, how)
    found: dict[str, list[StoredTensor]] = {}
    rows = (part for tensor in tensors.values() for part in _separate(names, tensor, arch, how))
    for tensor in sorted(rows, key=names.place_of):
        for part in _parts(names, tensor, arch, how) if tensor.name not in CONFIGURING else ():
            found.setdefault(part.name, []).append(part)
    return {name: parts[0] if len(parts) == 1 else _joined(parts) for name, parts in found.items()}


def _separate(names: _Names, tensor: GgufTensor, arch: ModelArch, how: GgufArchitecture) -> Iterator[GgufTensor]:
    """Queries, keys and values of a tensor that has them one after the other, where transformers has one for each."""
    sizes = [heads * arch.head_size for heads in (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads)]
    is_joined = ".attn_qkv." in tensor.name and "attn_qkv" not in names.of_layer
    if not is_joined or tensor.shape[0] != sum(sizes):
        yield tensor
        return
    start, row_bytes = tensor.start, tensor.num_bytes // tensor.shape[0]
    for part, size in zip(("attn_q", "attn_k", "attn_v"), sizes, strict=True):
        name, num_bytes = tensor.name.replace("attn_qkv", part), size * row_bytes
        yield replace(tensor, name=name, shape=(size, *tensor.shape[1:]), start=start, num_bytes=num_bytes)
        start += num_bytes


def _parts(names: _Names, tensor: GgufTensor, arch: ModelArch, how: GgufArchitecture) -> Iterator[StoredTensor]:
    """What one tensor of the file is: one weight, several, or one for each expert."""
    part, key, name = names.of(tensor.name)
    whole = StoredTensor(
        name=name,
        file=tensor.file,
        dtype=tensor.type.name,
        shape=tensor.shape,
        num_bytes=tensor.num_bytes,
        stored=(tensor,),
    )
    if part in how.splits:
        for path, change in how.splits[part].items():
            yield _changed(replace(whole, name=f"{name.removesuffix(key)}{path}.weight"), change, part, arch)
    elif part.endswith("_exps") and "#" in name and tensor.shape[0] <= MAX_EXPERTS:
        yield from _experts(whole)
    else:
        yield _changed(whole, _kind_of(part, key, how), part, arch)


def _experts(whole: StoredTensor) -> Iterator[StoredTensor]:
    """The tensors of each expert, from one of all."""
    count, *shape = whole.shape
    for expert in range(count):
        name, size = whole.name.replace("#", str(expert)), whole.num_bytes // count
        yield replace(whole, name=name, shape=tuple(shape), num_bytes=size, expert=expert)


def _kind_of(part: str, key: str, how: GgufArchitecture) -> Change | None:
    """What is done to a tensor, by the part with its kind, or by the part."""
    for changes in (how.changes, CHANGES):
        if key in changes or part in changes:
            return changes[key if key in changes else part]
    return Change.OFFSET if part.endswith("norm") and key.endswith(".weight") else None


def _changed(whole: StoredTensor, kind: Change | None, part: str, arch: ModelArch) -> StoredTensor:
    is_plain = whole.dtype in PLAIN
    change = None if kind is None else change_of(kind, whole.shape, part, arch, is_plain=is_plain)
    if change is None:
        return whole
    if change.is_arithmetic and not is_plain:
        (tensor,) = whole.stored
        raise CheckpointError(f"{whole.file.name}: {tensor.name} is {whole.dtype}, but must be {', '.join(PLAIN)}.")
    dtype = "F32" if change.is_arithmetic else whole.dtype
    return replace(whole, shape=change.shape, dtype=dtype, change=change)


def _joined(parts: Sequence[StoredTensor]) -> StoredTensor:
    """One tensor of several that follow each other. Raises: CheckpointError where they do not fit."""
    first, stored = parts[0], tuple(tensor for part in parts for tensor in part.stored)
    is_latent = _is_latent(stored)
    if not is_latent and (
        len({(part.dtype, part.shape[1:]) for part in parts}) > 1
        or any(part.change is not None or part.expert is not None for part in parts)
    ):
        names = ", ".join(f"{tensor.name} {tensor.type.name} {list(tensor.shape)}" for tensor in stored)
        raise CheckpointError(
            f"{first.file.name}: {names} are one tensor of the model, and differ in their types or sizes. Use a file "
            "in which they are of one type."
        )
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    if is_latent:
        (heads, latent, nope), (_, value, _) = (tensor.shape for tensor in stored)
        shape = (heads * (nope + value), latent)
    return replace(
        first,
        dtype="F32" if is_latent else first.dtype,
        stored=stored,
        shape=shape,
        num_bytes=sum(part.num_bytes for part in parts),
        is_latent=is_latent,
    )


def _is_latent(stored: Sequence[GgufTensor]) -> bool:
    """Whether these are products of latents for keys [H, C, U] and for values [H, W, C] that fit each other."""
    if [tensor.name.split(".")[2:3] for tensor in stored] != [[KEYS_OF_LATENT], [VALUES_OF_LATENT]]:
        return False
    keys, values = (tensor.shape for tensor in stored)
    is_read = all(tensor.type.name in (*PLAIN, *QUANTIZED) for tensor in stored)
    return is_read and len(keys) == len(values) == 3 and (keys[0], keys[1]) == (values[0], values[2])


class _Names:
    """The names of a family."""

    def __init__(self, arch: ModelArch, how: GgufArchitecture) -> None:
        names, norms = arch.family.names, arch.norms
        self.layers = f"{names.base}.{names.layers}"
        outside: Mapping[str, tuple[str, str | None]] = {
            "token_embd": (names.base, names.embedding),
            "position_embd": (names.base, names.positions),
            "token_embd_norm": (names.base, norms.embedding),
            "output_norm": (names.base, norms.final),
            "output": ("", names.head),
        }
        self.of_model = {**_known(outside), **{part: f"{names.base}.{name}" for part, name in how.outside.items()}}
        self.of_layer = {**_layer_names(arch), **how.parts}
        self.splits = how.splits

    def of(self, stored: str) -> tuple[str, str, str]:
        """(GGUF's name of the part, the same with its kind, transformers' name of the tensor).

        The last has # for an expert's index.
        """
        found = _NAME.fullmatch(stored)
        if found is None:
            return "", "", stored
        part = found["part"]
        kind = found["kind"] or ("" if part in BARE else "weight")  # which some writers leave out
        key = f"{part}.{kind}" if kind else part
        known = self.of_model if found["layer"] is None else self.of_layer
        if key in known:
            name = known[key]
        elif part in known:
            name = f"{known[part]}.{kind}"
        elif part.startswith("nextn.") or part in self.splits:
            name = key
        else:
            return "", "", stored
        return part, key, name if found["layer"] is None else f"{self.layers}.{found['layer']}.{name}"

    def place_of(self, tensor: GgufTensor) -> int:
        """Where a tensor stands among those that are one in transformers."""
        return ORDER.get(self.of(tensor.name)[0], 0)


def _layer_names(arch: ModelArch) -> dict[str, str]:
    """GGUF's part (with its kind, where that says where it stands) -> transformers' path in the layer."""
    names, norms = arch.family.names, arch.norms
    attention, state, mlp = names.attention, names.recurrent, names.mlp or ""
    return _known(
        {
            "attn_norm": ("", norms.input),
            "post_attention_norm": ("", norms.post_attention or norms.pre_mlp),
            "ffn_norm": ("", norms.pre_mlp),
            "post_ffw_norm": ("", norms.post_mlp),
            "attn_output": (attention, names.output),
            "attn_q_norm": (attention, names.q_norm),
            "attn_k_norm": (attention, names.k_norm),
            "attn_sub_norm": (attention, norms.attended),
            "attn_sinks.weight": (attention, names.sinks),
            "attn_gate": (attention, names.gate),
            **_products(attention, ("attn_q", "attn_k", "attn_v"), "attn_qkv", names.qkv),
            "attn_q_a": (attention, "q_a_proj"),
            "attn_q_a_norm": (attention, "q_a_layernorm"),
            "attn_q_b": (attention, "q_b_proj"),
            "attn_kv_a_mqa": (attention, "kv_a_proj_with_mqa"),
            "attn_kv_a_norm": (attention, "kv_a_layernorm"),
            **dict.fromkeys(("attn_kv_b", KEYS_OF_LATENT, VALUES_OF_LATENT), (attention, "kv_b_proj")),
            **_products(mlp, ("ffn_gate", "ffn_up"), "ffn_up", names.gate_up if _is_gated(arch) else (names.up,)),
            "ffn_down": (mlp, names.down),
            "ffn_sub_norm": (mlp, norms.gated),
            "ffn_gate_inp": (mlp, "gate"),
            "exp_probs_b.bias": (mlp, "gate.e_score_correction_bias"),
            "ffn_gate_exps": (mlp, "experts.#.gate_proj"),
            "ffn_up_exps": (mlp, "experts.#.up_proj"),
            "ffn_down_exps": (mlp, "experts.#.down_proj"),
            "ffn_gate_inp_shexp": (mlp, "shared_expert_gate"),
            "ffn_gate_shexp": (mlp, f"shared_expert.{names.gate_up[0]}"),
            "ffn_up_shexp": (mlp, f"shared_expert.{names.gate_up[-1]}"),
            "ffn_down_shexp": (mlp, f"shared_expert.{names.down}"),
            "ssm_in": (state, "in_proj"),
            "ssm_conv1d": (state, "conv1d"),
            "ssm_x": (state, "x_proj"),
            "ssm_dt.bias": (state, "dt_bias"),
            "ssm_a": (state, "A_log"),
            "ssm_d": (state, "D"),
            "ssm_norm": (state, "norm"),
            "ssm_out": (state, "out_proj"),
            "shortconv.conv": (state, "conv"),
            "shortconv.in_proj": (state, "in_proj"),
            "shortconv.out_proj": (state, "out_proj"),
        }
    )


def _known(places: Mapping[str, tuple[str, str | None]]) -> dict[str, str]:
    """GGUF's part -> path, for parts that the family has."""
    return {part: f"{parent}.{name}" if parent else name for part, (parent, name) in places.items() if name}


def _products(parent: str, each: tuple[str, ...], joined: str, names: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """Layers that transformers has as one tensor, or as one for each."""
    if len(names) == 1:
        return dict.fromkeys((joined, *each), (parent, names[0]))
    return {part: (parent, name) for part, name in zip(each, names, strict=True)}


def _is_gated(arch: ModelArch) -> bool:
    return any(layer.mlp.kind is not MlpKind.PLAIN for layer in arch.layers)
