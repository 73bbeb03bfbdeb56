"""OPT: learned positions, layer norms, biases everywhere, a plain MLP. The 350m model has its norms behind the sums and
projects its embeddings, so the family has a class of its own."""

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, NormKind, Norms, WeightNames, plain


def norms(keys: ConfigKeys) -> Norms:
    """With values unless the config says otherwise; the last one only where the others stand before their parts."""
    affine = keys.flag("layer_norm_elementwise_affine", default=True)
    before = keys.flag("do_layer_norm_before", default=True)
    has_final = before and not keys.flag("_remove_final_layer_norm", default=False)
    return Norms(
        kind=NormKind.LAYER,
        has_weight=affine,
        has_bias=affine,
        input="self_attn_layer_norm",
        pre_mlp="final_layer_norm",
        final="final_layer_norm" if has_final else None,
    )


SPEC = FamilySpec(
    architecture="OPTForCausalLM",
    model_class="quire.models.variants.opt:OPTForCausalLM",
    spellings={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
    defaults={
        "activation_function": "relu",
        "enable_bias": True,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
        "bos_token_id": 2,
        "eos_token_id": 2,
    },
    norms=norms,
    attention_bias="enable_bias",
    output_bias="enable_bias",
    mlp=plain("enable_bias"),
    names=WeightNames(positions="embed_positions", unused_positions=2),
)
