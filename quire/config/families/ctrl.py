"""CTRL: XGLM, with waves that reach less far, a bias of the logits, and names of its own."""

import math

from quire.config.family_spec import FamilySpec, NormKind, Norms, Scales, WaveSpec, WeightNames, plain
from quire.config.layers.layer_kinds import none_rotated

SPEC = FamilySpec(
    architecture="CTRLLMHeadModel",
    spellings={
        "hidden_size": "n_embd",
        "intermediate_size": "dff",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    defaults={
        "vocab_size": 246_534,
        "n_positions": 256,
        "n_embd": 1280,
        "dff": 8192,
        "n_layer": 48,
        "n_head": 16,
        "layer_norm_epsilon": 1e-6,
        "hidden_act": "relu",
        "tie_word_embeddings": True,
    },
    derived=lambda keys: {"hidden_act": "relu"},
    rotated=none_rotated,
    waves=WaveSpec(),
    norms=Norms(
        kind=NormKind.LAYER,
        has_bias=True,
        input="layernorm1",
        pre_mlp="layernorm2",
        final="layernorm",
        inner_eps=1e-6,
    ),
    attention_bias=True,
    output_bias=True,
    head_bias=True,
    mlp=plain(True),
    scales=lambda keys: Scales(embedding=math.sqrt(keys.count("hidden_size"))),
    names=WeightNames(
        base="transformer",
        embedding="w",
        layers="h",
        attention="multi_head_attention",
        qkv=("Wq", "Wk", "Wv"),
        output="dense",
        mlp="ffn",
        up="0",
        down="2",
    ),
)
