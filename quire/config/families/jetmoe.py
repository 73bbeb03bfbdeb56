"""JetMoE: Llama, whose MLPs are mixtures of experts, and whose query heads are those of the experts of each token."""

from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, Norms, WeightNames, experts
from quire.config.layers.experts import jetmoe_experts, num_chosen_of, num_experts_of
from quire.config.layers.mixers import AttentionExperts


def _heads(keys: ConfigKeys) -> Mapping[str, Any]:
    """Each expert has one query head for each KV head."""
    return {"num_attention_heads": keys.count("num_key_value_heads") * keys.count("num_experts_per_tok")}


def _attention_experts(keys: ConfigKeys) -> AttentionExperts:
    """As many as the MLP has."""
    count = num_experts_of(keys, "num_local_experts")
    return AttentionExperts(num_experts=count, num_chosen=num_chosen_of(keys, count, "num_experts_per_tok"))


SPEC = FamilySpec(
    architecture="JetMoeForCausalLM",
    spellings={"hidden_act": "activation_function", "head_dim": "kv_channels"},
    defaults={
        "activation_function": "silu",
        "kv_channels": 128,
        "rms_norm_eps": 1e-6,
        "vocab_size": 32_000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 12,
        "num_key_value_heads": 16,
        "max_position_embeddings": 4096,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    derived=_heads,
    attention_experts=_attention_experts,
    norms=Norms(inner_eps=1e-6),
    mlp=experts(jetmoe_experts),
    attention_bias=False,
    output_bias=False,
    names=WeightNames(attention="self_attention"),
)
