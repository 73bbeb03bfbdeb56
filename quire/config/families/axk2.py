"""A.X-K2: DeepSeek V3.2, with gates behind norms and attention, and groups of experts that may be left out."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.families.deepseek_v32 import DEFAULTS
from quire.config.family_spec import FamilySpec, Norms, experts
from quire.config.layers.experts import ExpertsSpec, deepseek_v3_experts
from quire.config.layers.latent import indexed_attention, indexed_heads
from quire.config.layers.mixers import LatentAttentionSpec

attention = indexed_attention(interleaved_index=False)


def _derived(keys: ConfigKeys) -> Mapping[str, Any]:
    groups = {name: keys.raw.get(name) for name in ("n_group", "topk_group")}
    if (groups["n_group"] is None) != (groups["topk_group"] is None):
        keys.refuse("topk_group", groups["topk_group"], f"must be null where n_group ({groups['n_group']}) is, only")
    return indexed_heads(keys)


def _latent(keys: ConfigKeys, max_position: int, aliases: Mapping[str, str]) -> LatentAttentionSpec:
    spec = attention(keys, max_position, aliases)
    return replace(spec, num_gates=spec.num_heads * spec.value_size, gates_with_queries=True)


def _norms(keys: ConfigKeys) -> Norms:
    """Gates behind the norm before attention, and before experts."""
    rank = keys.count("gated_norm_rank")
    norms = Norms(gate_rank=rank, with_gate=("input_layernorm",))
    return replace(norms, with_experts=replace(norms, with_gate=("input_layernorm", "post_attention_layernorm")))


def _experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Experts of other groups have the score 0 for the choice, which a negative one of the best groups is below."""

    def of_layer(spec: ExpertsSpec) -> ExpertsSpec:
        groups = spec.routing.groups
        return replace(spec, routing=replace(spec.routing, groups=groups and replace(groups, left_out=0.0)))

    return tuple(spec and of_layer(spec) for spec in deepseek_v3_experts(keys, num_layers))


SPEC = FamilySpec(
    architecture="AXK2ForCausalLM",
    defaults={
        **DEFAULTS,
        "vocab_size": 163_840,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "n_routed_experts": 128,
        "q_lora_rank": 384,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "n_group": 1,
        "topk_group": 1,
        "max_position_embeddings": 131_072,
        "first_k_dense_replace": 1,
        "index_n_heads": 16,
        "gated_norm_rank": 16,
        "bos_token_id": 163_691,
        "eos_token_id": 163_691,
    },
    derived=_derived,
    latent=_latent,
    norms=_norms,
    mlp=experts(_experts),
)
