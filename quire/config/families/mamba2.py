"""Mamba 2: recurrent layers alone, without attention and MLPs."""

from quire.config.family_spec import FamilySpec, Norms, WeightNames, no_mlp
from quire.config.layers.recurrent import all_mamba2

SPEC = FamilySpec(
    architecture="Mamba2ForCausalLM",
    spellings={"rms_norm_eps": "layer_norm_epsilon"},
    defaults={
        "hidden_act": "silu",
        "vocab_size": 32_768,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "expand": 2,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 32_768,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    recurrent=all_mamba2,
    mlp=no_mlp,
    norms=Norms(input="norm", pre_mlp=None, final="norm_f"),
    names=WeightNames(base="backbone", embedding="embeddings", recurrent="mixer"),
)
