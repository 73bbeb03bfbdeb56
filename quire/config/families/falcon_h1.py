"""Falcon-H1: Llama, with Mamba 2 beside the attention of every layer, and a factor for each product."""

from dataclasses import replace

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, MlpSpec, Norms, Scales, WeightNames, gated
from quire.config.layers.mixers import Factors
from quire.config.layers.recurrent import every_layer, falcon_h1_layers


def _scales(keys: ConfigKeys) -> Scales:
    return Scales(
        embedding=keys.positive("embedding_multiplier"),
        logits=keys.positive("lm_head_multiplier"),
        attention=Factors(
            input=keys.positive("attention_in_multiplier"),
            inner=(1.0, keys.positive("key_multiplier"), 1.0),
            output=keys.positive("attention_out_multiplier"),
        ),
    )


def _mlps(keys: ConfigKeys, num_layers: int, size: int) -> tuple[MlpSpec, ...]:
    gate, down = keys.several_positive("mlp_multipliers", 2)
    factors = Factors(inner=(gate, 1.0), output=down)
    return tuple(replace(spec, factors=factors) for spec in gated("mlp_bias")(keys, num_layers, size))


SPEC = FamilySpec(
    architecture="FalconH1ForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": 128_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "max_position_embeddings": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_norm_before_gate": True,
        "embedding_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "attention_in_multiplier": 1.0,
        "key_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "ssm_in_multiplier": 1.0,
        "ssm_multipliers": [1.0] * 5,
        "ssm_out_multiplier": 1.0,
        "mlp_multipliers": [1.0] * 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    recurrent=falcon_h1_layers,
    attends=every_layer,
    norms=Norms(pre_mlp="pre_ff_layernorm", final="final_layernorm"),
    mlp=_mlps,
    scales=_scales,
    names=WeightNames(mlp="feed_forward"),
)
