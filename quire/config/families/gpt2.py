"""GPT-2: learned positions, layer norms, biases everywhere, a plain MLP; linear weights are stored [in, out]."""

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, NormKind, Norms, Scales, WeightNames, plain

SPELLINGS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "rms_norm_eps": "layer_norm_epsilon",
}


def scales(keys: ConfigKeys) -> Scales:
    """Of queries: none, or that of all families, which may sink with the depth."""
    return Scales(
        query=None if keys.flag("scale_attn_weights", default=True) else 1.0,
        by_depth=keys.flag("scale_attn_by_inverse_layer_idx", default=False),
    )


SPEC = FamilySpec(
    architecture="GPT2LMHeadModel",
    spellings=SPELLINGS,
    defaults={
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
        "n_positions": 1024,
        "bos_token_id": 50_256,
        "eos_token_id": 50_256,
    },
    refused={"add_cross_attention": "runs GPT-2 as a decoder only. Use a generative GPT-2 checkpoint."},
    norms=Norms(kind=NormKind.LAYER, has_bias=True, input="ln_1", pre_mlp="ln_2", final="ln_f"),
    attention_bias=True,
    output_bias=True,
    mlp=plain(True),
    scales=scales,
    names=WeightNames(
        base="transformer",
        embedding="wte",
        positions="wpe",
        layers="h",
        attention="attn",
        qkv=("c_attn",),
        output="c_proj",
        up="c_fc",
        down="c_proj",
        transposed=frozenset({"c_attn", "c_proj", "c_fc"}),
    ),
)
