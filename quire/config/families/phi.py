"""Phi-1, Phi-1.5 and Phi-2: parallel attention and plain MLP behind one layer norm; biases everywhere."""

from quire.config.family_spec import FamilySpec, NormKind, Norms, WeightNames, plain

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
    refused={"qk_layernorm": "has no layer norms of heads. Use a Phi without them."},
    norms=Norms(kind=NormKind.LAYER, has_bias=True, pre_mlp=None, final="final_layernorm"),
    is_parallel=True,
    attention_bias=True,
    output_bias=True,
    head_bias=True,
    mlp=plain(True),
    names=WeightNames(output="dense", up="fc1", down="fc2"),
)
