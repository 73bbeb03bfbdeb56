"""Tensors of a checkpoint that no model needs. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from quire.config.arch import ModelArch
from quire.config.layers.mixers import AttentionSpec

MAX_DRAFT_LAYERS = 16
DRAFTING = "layers that draft several tokens, which quire does not"
SHARED_KEYS = "keys and values of layers that read those of other layers"
IDENTITIES = "weights of experts that give what they read"
NORMS = "norms that layers without experts do not have"
IMAGE_LAYERS = "layers that attend to images, which quire does not read"
NOTHING = "weights of no features, as of a shared expert in a model that has none"
SECOND_HEAD = "a second copy of the embedding, which is the head, too"
ACTIVATION_SCALES = re.compile(
    r"\.([qkv]_scale|kv_scale|[kv]_zero_point|output_scale|(input_)?act(ivation)?_scale|"
    r"input_(scale|scale_ub|zero_point|global_scale))$"
)
IMAGES = re.compile(
    r"^(model\.)?((high_res_)?vision_(tower|model|encoder|projection)|visual(_embeddings_table)?|vqmodel|patch_merge_mlp|"
    r"((multi_modal|multimodal|vision|mm)_)?projector|(generation_)?aligner|generation_(embeddings|head)|"
    r"image_newline|connector|merger|(image|video|audio)_tower|audio_(encoder|adapter)|(vision|audio)_tokenizer|vision_embedder|"
    r"high_res_vision_(neck|proj|alpha)|embed_(vision|audio))(\.|$)"
)
DECAYS = re.compile(r"\.(slope_rate|(query|key|diagonal)_decay)$")
UNREAD: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        "scales of activations, keys and values, in whose place each token has its own": ACTIVATION_SCALES,
        "parts for images and sounds, which quire does not read": IMAGES,
        "rotary tables, which quire computes": re.compile(r"rotary_emb\.inv_freq$"),
        "masks, which quire computes": re.compile(r"\.(attn|attention)\.(masked_)?bias$"),
        "decays of attention, which quire computes": DECAYS,
        DRAFTING: re.compile(r"(^|\.)mtp[._]"),
        SECOND_HEAD: re.compile(r"lm_head\.weight$"),
    }
)
"""Tensors that some checkpoints have and no model of theirs needs, by what is said of them."""


def why_needless(name: str) -> str | None:
    """What a tensor of this name is, if no model needs it."""
    return next((reason for reason, pattern in UNREAD.items() if pattern.search(name)), None)


def draft_layers(arch: ModelArch) -> list[str]:
    """Names of the layers that a checkpoint may have behind those of the model."""
    count, names = arch.raw.get("num_nextn_predict_layers"), arch.family.names
    if not isinstance(count, int):
        return []
    return [f"{names.base}.{names.layers}.{arch.num_layers + index}" for index in range(min(count, MAX_DRAFT_LAYERS))]


def _identity_experts(arch: ModelArch) -> list[str]:
    """Names by which transformers saves products of experts that compute nothing."""
    names = arch.family.names
    return [
        f"{names.base}.{names.layers}.{layer}.mlp.experts.{index}"
        for spec in arch.mixtures
        if spec.num_identities
        for layer in range(arch.num_layers)
        for index in range(spec.num_experts, spec.num_candidates)
    ]


def _norms_of_experts(arch: ModelArch) -> list[str]:
    """Norms that only layers with experts have, by the names that they would have in the others."""
    norms, names = arch.norms.with_experts, arch.family.names
    if norms is None:
        return []
    absent = {*norms.of_mixers, *norms.of_mlp} - {*arch.norms.of_mixers, *arch.norms.of_mlp}
    dense = [index for index, layer in enumerate(arch.layers) if layer.mlp.experts is None]
    return [f"{names.base}.{names.layers}.{index}.{name}" for index in dense for name in absent]


def unread_parts(arch: ModelArch) -> dict[str, str]:
    """Names of parts that a checkpoint may have and no layer of this model reads, and what is said of them."""
    names, size = arch.family.names, len(arch.layers)
    readers = [
        index
        for index in range(size)
        if any(isinstance(mixer, AttentionSpec) and mixer.reads is not None for mixer in arch.layers[index].mixers)
    ]
    parts = (*names.qkv[1:], names.k_norm)
    shared = [f"{names.base}.{names.layers}.{index}.{names.attention}.{part}" for index in readers for part in parts]
    parts_of = {
        DRAFTING: draft_layers(arch),
        SHARED_KEYS: shared,
        IDENTITIES: _identity_experts(arch),
        NORMS: _norms_of_experts(arch),
        IMAGE_LAYERS: [f"{names.base}.{names.layers}.{number}" for number in sorted(arch.image_layers)],
    }
    return {part: reason for reason, listed in parts_of.items() for part in listed}


def is_unread(name: str, arch: ModelArch) -> bool:
    """Whether no part of this model reads a weight of this name."""
    reason = why_needless(name)
    if reason is not None and (reason != SECOND_HEAD or arch.tie_word_embeddings):
        return True
    return any(f"{part}." in name for part in unread_parts(arch))
