"""EXAONE 3: Llama, with weights named as GPT-2's."""

from quire.config.family_spec import FamilySpec, Norms, WeightNames

SPEC = FamilySpec(
    architecture="ExaoneForCausalLM",
    spellings={
        "rms_norm_eps": "layer_norm_epsilon",
        "num_hidden_layers": "num_layers",
        "hidden_act": "activation_function",
    },
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "rope_theta": 500_000.0,
        "eos_token_id": 361,
    },
    norms=Norms(input="ln_1", pre_mlp="ln_2", final="ln_f"),
    names=WeightNames(
        base="transformer",
        embedding="wte",
        layers="h",
        attention="attn.attention",
        output="out_proj",
        gate_up=("c_fc_0", "c_fc_1"),
        down="c_proj",
    ),
)
