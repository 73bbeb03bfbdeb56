"""Renamed: Llama, whose config.json and tensors call everything something else."""

from quire.config.family_spec import FamilySpec, Norms, WeightNames, gated

SPEC = FamilySpec(
    spellings={
        "hidden_size": "width",
        "num_hidden_layers": "depth",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "intermediate_size": "mlp_width",
        "max_position_embeddings": "context",
    },
    defaults={"hidden_act": "silu", "rms_norm_eps": 1e-6, "context": 2048},
    norms=Norms(input="norm_1", pre_mlp="norm_2", final="norm_out"),
    attention_bias=False,
    output_bias=False,
    mlp=gated(),
    names=WeightNames(
        base="net",
        embedding="tokens",
        layers="blocks",
        attention="attn",
        qkv=("query", "key", "value"),
        output="out",
        gate_up=("gate", "up"),
        down="down",
        head="head",
    ),
)
