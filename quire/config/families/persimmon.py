"""Persimmon: layer norms, also of query and key heads, half of each head rotated, squared ReLUs, biases everywhere."""

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, HeadNorms, NormKind, Norms, WeightNames, plain


def norms(keys: ConfigKeys) -> Norms:
    """Those of heads unless the config says otherwise."""
    heads = HeadNorms.LAYER if keys.flag("qk_layernorm", default=True) else HeadNorms.NONE
    return Norms(kind=NormKind.LAYER, has_bias=True, final="final_layernorm", heads=heads)


SPEC = FamilySpec(
    architecture="PersimmonForCausalLM",
    spellings={"rms_norm_eps": "layer_norm_eps"},
    defaults={
        "hidden_act": "relu2",
        "max_position_embeddings": 16_384,
        "partial_rotary_factor": 0.5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    norms=norms,
    attention_bias=True,
    output_bias=True,
    mlp=plain(True),
    names=WeightNames(
        qkv=("query_key_value",),
        qkv_by_head=True,
        output="dense",
        q_norm="q_layernorm",
        k_norm="k_layernorm",
        up="dense_h_to_4h",
        down="dense_4h_to_h",
    ),
)
