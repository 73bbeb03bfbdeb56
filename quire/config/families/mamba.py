"""Mamba: recurrent layers alone, without attention and MLPs."""

from quire.config.family_spec import FamilySpec, Norms, WeightNames, no_mlp
from quire.config.layers.recurrent import all_mamba

SPEC = FamilySpec(
    architecture="MambaForCausalLM",
    spellings={"rms_norm_eps": "layer_norm_epsilon"},
    defaults={
        "hidden_act": "silu",
        "vocab_size": 50_280,
        "hidden_size": 768,
        "num_hidden_layers": 32,
        "state_size": 16,
        "conv_kernel": 4,
        "expand": 2,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32_768,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    recurrent=all_mamba,
    mlp=no_mlp,
    norms=Norms(input="norm", pre_mlp=None, final="norm_f"),
    names=WeightNames(base="backbone", embedding="embeddings", recurrent="mixer"),
)
