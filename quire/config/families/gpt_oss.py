"""gpt-oss: Mixtral, with windows in every other layer, learned sinks, biases on everything, and clamped gates."""

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, WeightNames, experts
from quire.config.layers.experts import ClampedGate, ExpertsSpec, Routing, Scores, num_chosen_of, num_experts_of
from quire.config.layers.layer_kinds import full_every, listed_or
from quire.config.layers.rope import unless_given

ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def biased_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec, ...]:
    """Weighed by a softmax over those that were chosen; router and experts have biases."""
    count = num_experts_of(keys, "num_local_experts", "num_experts")
    gate = ClampedGate(limit=keys.positive("swiglu_limit"), slope=keys.positive("swiglu_alpha"), offset=1.0)
    spec = ExpertsSpec(
        num_experts=count,
        size=keys.count("intermediate_size"),
        routing=Routing(num_chosen=num_chosen_of(keys, count, "num_experts_per_tok"), scores=Scores.LOGITS),
        gate=gate,
        has_bias=True,
        has_router_bias=True,
    )
    return (spec,) * num_layers


SPEC = FamilySpec(
    architecture="GptOssForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "attention_bias": True,
        "intermediate_size": 2880,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    derived=unless_given(ROPE),
    layer_kinds=listed_or(full_every(2)),
    has_sinks=True,
    mlp=experts(biased_experts),
    names=WeightNames(experts_transposed=True, experts_mixed=True),
)
