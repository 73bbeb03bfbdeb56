"""HY V4: GLM-5 with sinks and gates of attention, and several hidden states of each token, which are not mixed."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.families.deepseek_v32 import DEFAULTS
from quire.config.family_spec import FamilySpec, WeightNames, experts
from quire.config.layers.experts import ClampedGate, ExpertsSpec, deepseek_v3_experts
from quire.config.layers.latent import FULL, SHARED, indexed_attention, indexed_heads, shared_choices
from quire.config.layers.mixers import LatentAttentionSpec
from quire.config.layers.streams import apart_streams

PARTS = ("enable_ihc", "gated_mla", "learnable_sink", "use_dsa", "use_mla")
"""Keys of published configs for what all models of the family have."""
attention = indexed_attention(interleaved_index=False, interleaved=False)


def _derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """Without lists, the first layer alone has no experts, and an indexer serves four layers, but the first its own."""
    _check_parts(keys)
    num_layers = keys.count("num_hidden_layers")
    lists = {
        "indexer_types": [FULL if index % 4 == 1 or not index else SHARED for index in range(num_layers)],
        "mlp_layer_types": ["sparse" if index else "dense" for index in range(num_layers)],
    }
    heads = {"num_key_value_heads": keys.count("num_attention_heads")}  # published configs have another number
    found = {name: default if keys.raw.get(name) is None else keys.raw[name] for name, default in lists.items()}
    whole = ConfigKeys({**keys.raw, **heads}, keys.source, keys.defaults, keys.spellings)
    return {**found, **indexed_heads(whole)}


def _check_parts(keys: ConfigKeys) -> None:
    for name in PARTS:
        if keys.raw.get(name) is False:
            keys.refuse(name, False, "must be true: all layers of this family have it")
    gating = keys.raw.get("gating_type")
    if gating not in (None, "elementwise"):
        keys.refuse("gating_type", gating, "must be elementwise: gates of this family are those of features")


def _latent(keys: ConfigKeys, max_position: int, aliases: Mapping[str, str]) -> LatentAttentionSpec:
    spec = attention(keys, max_position, aliases)
    assert spec.indexer is not None
    indexer = replace(spec.indexer, rotates_last=True, norm_eps=keys.positive("rms_norm_eps"))
    return replace(spec, indexer=indexer, has_sinks=True, num_gates=spec.num_heads * spec.value_size)


def _experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    gate = ClampedGate(limit=keys.positive("swiglu_limit"))
    specs = deepseek_v3_experts(keys, num_layers)
    return tuple(spec and replace(spec, gate=gate, clamps_shared=False) for spec in specs)


SPEC = FamilySpec(
    architecture="HYV4ForCausalLM",
    model_class="quire.models.variants.hyper_connections:HyperForCausalLM",
    defaults={
        **DEFAULTS,
        "vocab_size": 120_832,
        "hidden_size": 2816,
        "intermediate_size": 6912,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.827,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 16,
        "hc_mult": 4,
        "hc_magnitude": 2.0,
        "hc_eps": 1e-6,
        "swiglu_limit": 10.0,
        "bos_token_id": 120_000,
        "eos_token_id": 120_025,
    },
    derived=_derived,
    refused={"mlp_bias": "has no biases in this family. Set it to false."},
    latent=_latent,
    latent_layers=shared_choices,
    hyper=apart_streams,
    mlp=experts(_experts),
    names=WeightNames(
        gate="linear_gate",
        sinks="learnable_sink_param",
        hyper=("hc_attn_layer.hc_pre.hc_", "hc_mlp_layer.hc_pre.hc_", "hc_head.hc_head_"),
        resaved=(
            ("hc_attn_layer.hc_pre.", "hc_pre.hc_attn_layer."),
            ("hc_mlp_layer.hc_pre.", "hc_pre.hc_mlp_layer."),
            ("hc_head.", "hc_pre.hc_head."),
            ("gate_proj.", "linear_gate."),
        ),
    ),
)
