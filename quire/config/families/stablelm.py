"""StableLM: Llama, with layer norms and a rotation of a quarter of each head; attention and MLP may be parallel."""

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, HeadNorms, NormKind, Norms, WeightNames, gated


def norms(keys: ConfigKeys) -> Norms:
    """One for both where attention and MLP are parallel; those of heads where the config says so."""
    parallel = keys.flag("use_parallel_residual", default=False)
    heads = HeadNorms.LAYER_OWN if keys.flag("qk_layernorm", default=False) else HeadNorms.NONE
    pre_mlp = None if parallel else "post_attention_layernorm"
    return Norms(kind=NormKind.LAYER, has_bias=True, pre_mlp=pre_mlp, heads=heads)


SPEC = FamilySpec(
    architecture="StableLmForCausalLM",
    spellings={"rms_norm_eps": "layer_norm_eps"},
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "num_key_value_heads": 32,
        "partial_rotary_factor": 0.25,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    norms=norms,
    is_parallel="use_parallel_residual",
    attention_bias="use_qkv_bias",
    output_bias=False,
    mlp=gated(),
    names=WeightNames(q_norm="q_layernorm", k_norm="k_layernorm"),
)
