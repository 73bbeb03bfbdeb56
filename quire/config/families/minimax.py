"""MiniMax-Text-01: lightning attention in most layers, Mixtral's in the others, each added to its norm's output."""

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, Join, Joins, Scales, WeightNames, experts
from quire.config.layers.experts import mixtral_experts
from quire.config.layers.gated_recurrence import lightning_layers
from quire.config.layers.layer_kinds import all_sliding


def _scales(keys: ConfigKeys) -> Scales:
    attention, recurrent, mlp = (
        Join(
            kept=keys.positive(f"{part}_alpha_factor", default=1.0),
            added=keys.positive(f"{part}_beta_factor", default=1.0),
        )
        for part in ("full_attn", "linear_attn", "mlp")
    )
    return Scales(joins=Joins(attention=attention, recurrent=recurrent, mlp=mlp))


SPEC = FamilySpec(
    architecture="MiniMaxForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
        "intermediate_size": 14_336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    recurrent=lightning_layers,
    layer_kinds=all_sliding,
    attention_bias=False,
    output_bias=False,
    mlp=experts(mixtral_experts),
    scales=_scales,
    names=WeightNames(recurrent="self_attn"),
)
