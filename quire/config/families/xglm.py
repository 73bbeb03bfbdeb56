"""XGLM: OPT, with scaled embeddings, and sines and cosines of each position in place of a table."""

from dataclasses import replace

from quire.config.families import biogpt
from quire.config.family_spec import FamilySpec, WaveSpec, plain
from quire.config.layers.layer_kinds import none_rotated

SPEC = FamilySpec(
    architecture="XGLMForCausalLM",
    spellings={
        "hidden_size": "d_model",
        "intermediate_size": "ffn_dim",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "attention_heads",
        "hidden_act": "activation_function",
    },
    defaults={
        "hidden_act": "gelu",
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
        "intermediate_size": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    derived=lambda keys: {"rms_norm_eps": 1e-5},
    refused={"add_cross_attention": "has no attention over an encoder. Use a model that was trained without one."},
    rotated=none_rotated,
    waves=WaveSpec(first=2, has_slowest=True, skips_padding=True),
    norms=biogpt.SPEC.norms,
    attention_bias=True,
    output_bias=True,
    mlp=plain(True),
    scales=biogpt.scales,
    names=replace(biogpt.SPEC.names, base="model", positions=None, unused_positions=0, head="lm_head"),
)
