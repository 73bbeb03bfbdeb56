"""Gemma 3n, the text model: several hidden states of each token (AltUp), and layers that read the caches of others."""

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from quire.config.config_keys import ConfigKeys, is_number
from quire.config.families.gemma2 import both_sides
from quire.config.family_spec import FamilySpec, HeadNorms, MlpKind, MlpSpec, Scales
from quire.config.layers.layer_kinds import full_every, last_read, listed_or
from quire.config.layers.streams import LayerEmbeddingsSpec, StreamsSpec
from quire.errors import counted

SIZES = "intermediate_sizes"


def _derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """One width for all layers, or a list of them."""
    num_layers, (name, given) = keys.count("num_hidden_layers"), keys.find(("intermediate_size",))
    sizes = given if isinstance(given, list) else [given] * num_layers
    if len(sizes) != num_layers or not all(type(size) is int and size > 0 for size in sizes):
        keys.refuse(name, given, f"must be a whole number above 0, or one for each of {counted(num_layers, 'layer')}")
    return {"intermediate_size": max(sizes), SIZES: sizes}


def _cutoffs(keys: ConfigKeys, num_layers: int) -> list[float | None]:
    """In standard deviations, where the share of the gates that are zero is that of `activation_sparsity_pattern`."""
    name, shares = keys.find(("activation_sparsity_pattern",))
    if shares is None:
        num_sparse = 10 if num_layers > 10 else 0
        shares = [0.95] * num_sparse + [0.0] * (num_layers - num_sparse)
    is_list = isinstance(shares, list) and len(shares) == num_layers
    if not is_list or not all(is_number(share) and 0 <= share < 1 for share in shares):
        keys.refuse(name, shares, f"must list {num_layers} numbers from 0 to less than 1")
    return [NormalDist().inv_cdf(share) if share > 0 else None for share in shares]


def _mlps(keys: ConfigKeys, num_layers: int, size: int) -> tuple[MlpSpec, ...]:
    return tuple(
        MlpSpec(kind=MlpKind.GATED, intermediate_size=size, has_bias=False)
        if cutoff is None
        else MlpSpec(kind=MlpKind.SPARSE, intermediate_size=size, has_bias=False, cutoff=cutoff)
        for size, cutoff in zip(keys.raw[SIZES], _cutoffs(keys, num_layers), strict=True)
    )


def _streams(keys: ConfigKeys) -> StreamsSpec:
    count, (name, active) = keys.count("altup_num_inputs", most=64), keys.find(("altup_active_idx",))
    if not isinstance(active, int) or isinstance(active, bool) or not 0 <= active < count:
        keys.refuse(name, active, f"must be the index of one of {counted(count, 'stream')} (altup_num_inputs)")
    return StreamsSpec(
        count=count,
        active=active,
        scales_active=keys.flag("altup_correct_scale", default=True),
        laurel_rank=keys.count("laurel_rank"),
    )


def _layer_embeddings(keys: ConfigKeys) -> LayerEmbeddingsSpec:
    return LayerEmbeddingsSpec(
        size=keys.count("hidden_size_per_layer_input"), vocab_size=keys.count("vocab_size_per_layer_input")
    )


def _scales(keys: ConfigKeys) -> Scales:
    return Scales(embedding=math.sqrt(keys.count("hidden_size")), query=1.0)


SPEC = FamilySpec(
    architecture="Gemma3nForCausalLM",
    model_class="quire.models.variants.gemma3n:Gemma3nForCausalLM",
    spellings={"hidden_act": "hidden_activation"},
    defaults={
        "vocab_size": 262_400,
        "hidden_size": 2048,
        "intermediate_size": 16_384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
        "vocab_size_per_layer_input": 262_144,
        "hidden_size_per_layer_input": 256,
        "altup_active_idx": 0,
        "altup_num_inputs": 4,
        "num_kv_shared_layers": 15,
        "laurel_rank": 64,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    derived=_derived,
    layer_kinds=listed_or(full_every(5)),
    sliding_theta="rope_local_base_freq",
    norms=both_sides(HeadNorms.EACH, offset=0.0, of_values=True),
    reads=last_read,
    streams=_streams,
    layer_embeddings=_layer_embeddings,
    mlp=_mlps,
    scales=_scales,
)
