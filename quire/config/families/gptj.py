"""GPT-J: parallel attention and plain MLP behind one layer norm; rotates neighbours in a part of each head."""

from quire.config.families.gpt2 import SPELLINGS
from quire.config.family_spec import FamilySpec, NormKind, Norms, WeightNames, plain

SPEC = FamilySpec(
    architecture="GPTJForCausalLM",
    spellings=SPELLINGS,
    defaults={
        "activation_function": "gelu_new",
        "n_positions": 2048,
        "rotary_dim": 64,
        "bos_token_id": 50_256,
        "eos_token_id": 50_256,
    },
    rotates_pairs=True,
    norms=Norms(kind=NormKind.LAYER, has_bias=True, input="ln_1", pre_mlp=None, final="ln_f"),
    is_parallel=True,
    attention_bias=False,
    output_bias=False,
    head_bias=True,
    mlp=plain(True),
    names=WeightNames(
        base="transformer",
        embedding="wte",
        layers="h",
        attention="attn",
        output="out_proj",
        up="fc_in",
        down="fc_out",
    ),
)
