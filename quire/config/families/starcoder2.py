"""StarCoder2: Mistral, with layer norms, a plain MLP, and a bias on all projections."""

from quire.config.family_spec import FamilySpec, NormKind, Norms, WeightNames, plain
from quire.config.layers.layer_kinds import all_sliding

SPEC = FamilySpec(
    architecture="Starcoder2ForCausalLM",
    spellings={"rms_norm_eps": "norm_epsilon"},
    defaults={
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "num_key_value_heads": 2,
        "use_bias": True,
        "tie_word_embeddings": True,
        "bos_token_id": 50_256,
        "eos_token_id": 50_256,
    },
    layer_kinds=all_sliding,
    norms=Norms(kind=NormKind.LAYER, has_bias=True),
    attention_bias="use_bias",
    output_bias="use_bias",
    mlp=plain("use_bias"),
    names=WeightNames(up="c_fc", down="c_proj"),
)
