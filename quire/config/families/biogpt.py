"""BioGPT: OPT, with scaled embeddings; its norms have an epsilon that config.json does not set."""

import math

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, NormKind, Norms, Scales, WeightNames, plain


def scales(keys: ConfigKeys) -> Scales:
    """Of embeddings, unless the config says otherwise."""
    scaled = keys.flag("scale_embedding", default=True)
    return Scales(embedding=math.sqrt(keys.count("hidden_size")) if scaled else 1.0)


SPEC = FamilySpec(
    architecture="BioGptForCausalLM",
    defaults={
        "hidden_act": "gelu",
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    derived=lambda keys: {"rms_norm_eps": 1e-5},
    norms=Norms(
        kind=NormKind.LAYER,
        has_bias=True,
        input="self_attn_layer_norm",
        pre_mlp="final_layer_norm",
        final="layer_norm",
    ),
    attention_bias=True,
    output_bias=True,
    mlp=plain(True),
    scales=scales,
    names=WeightNames(
        base="biogpt",
        positions="embed_positions",
        unused_positions=2,
        output="out_proj",
        mlp=None,
        up="fc1",
        down="fc2",
        head="output_projection",
    ),
)
