"""Phi-1, Phi-1.5 and Phi-2: parallel attention and plain MLP behind one layer norm; biases everywhere."""

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, HeadNorms, NormKind, Norms, WeightNames, plain


def norms(keys: ConfigKeys) -> Norms:
    """Those of heads where the config says so."""
    heads = HeadNorms.LAYER if keys.flag("qk_layernorm", default=False) else HeadNorms.NONE
    return Norms(kind=NormKind.LAYER, has_bias=True, pre_mlp=None, final="final_layernorm", heads=heads)


SPEC = FamilySpec(
    architecture="PhiForCausalLM",
    spellings={"rms_norm_eps": "layer_norm_eps"},
    defaults={
        "hidden_act": "gelu_new",
        "max_position_embeddings": 2048,
        "partial_rotary_factor": 0.5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    norms=norms,
    is_parallel=True,
    attention_bias=True,
    output_bias=True,
    head_bias=True,
    mlp=plain(True),
    names=WeightNames(output="dense", q_norm="q_layernorm", k_norm="k_layernorm", up="fc1", down="fc2"),
)
