"""Kolibri: EXAONE 4's attention between the norms of GLM-4, with a mixture of experts in every layer."""

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, HeadNorms, Norms, experts
from quire.config.layers.experts import ExpertsSpec, Routing, Scores, num_chosen_of, num_experts_of
from quire.config.layers.layer_kinds import full_every, listed_or, sliding_rotated


def biased_choice(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec, ...]:
    """Logits and a bias choose, sigmoids weigh; with a shared expert of a width of its own."""
    count = num_experts_of(keys, "num_experts", "num_local_experts")
    routing = Routing(
        num_chosen=num_chosen_of(keys, count, "num_experts_per_tok"),
        scores=Scores.LOGITS_SIGMOID,
        renormalized=keys.flag("norm_topk_prob", default=False),
    )
    spec = ExpertsSpec(
        num_experts=count,
        size=keys.count("moe_intermediate_size"),
        routing=routing,
        has_choice_bias=True,
        shared_size=keys.count("shared_expert_intermediate_size"),
    )
    return (spec,) * num_layers


SPEC = FamilySpec(
    architecture="Kolibri1ForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262_144,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "sliding_window": 513,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 384,
        "num_experts_per_tok": 6,
        "norm_topk_prob": False,
    },
    layer_kinds=listed_or(full_every(5)),
    rotated=sliding_rotated,
    norms=Norms(
        heads=HeadNorms.EACH,
        post_attention="post_attn_norm",
        post_mlp="post_ffn_norm",
    ),
    attention_bias=False,
    output_bias=False,
    mlp=experts(biased_choice),
)
