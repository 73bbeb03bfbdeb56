"""ModernBERT, the decoder: layer norms and windows in two layers of three, a norm of embeddings in place of the first
layer's, and a product with a norm before the head."""

from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, HeadTransform, NormKind, Norms, WeightNames, gated
from quire.config.layers.layer_kinds import LayerKind, first_full_of, listed_or


def _layer_kinds(keys: ConfigKeys, num_layers: int) -> tuple[LayerKind, ...]:
    return listed_or(first_full_of(keys.count("global_attn_every_n_layers")))(keys, num_layers)


def _derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """As many KV heads as heads, of equal parts of the hidden size."""
    heads = keys.count("num_attention_heads")
    return {"num_key_value_heads": heads, "head_dim": None, "sliding_window": _window(keys)}


def _window(keys: ConfigKeys) -> int:
    """What `sliding_window` says, which transformers writes and reads; else half of `local_attention`."""
    if keys.raw.get("sliding_window") is not None:
        return keys.count("sliding_window")
    both_sides = keys.optional_count("local_attention")
    if both_sides is None or both_sides < 2:
        keys.refuse("local_attention", both_sides, "must be 2 or more: a token sees half as many")
    return both_sides // 2


def _norms(keys: ConfigKeys) -> Norms:
    return Norms(
        kind=NormKind.LAYER,
        has_bias=keys.flag("norm_bias", default=False),
        embedding="embeddings.norm",
        input="attn_norm",
        skips_first=True,
        pre_mlp="mlp_norm",
        final="final_norm",
    )


def _head_transform(keys: ConfigKeys) -> HeadTransform:
    return HeadTransform(
        activation=keys.text("classifier_activation"), has_bias=keys.flag("classifier_bias", default=False)
    )


SPEC = FamilySpec(
    architecture="ModernBertDecoderForCausalLM",
    model_class="quire.models.variants.modernbert_decoder:ModernBertDecoderForCausalLM",
    spellings={"hidden_act": "hidden_activation", "rms_norm_eps": "norm_eps", "rope_theta": "global_rope_theta"},
    defaults={
        "vocab_size": 50_368,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "hidden_activation": "gelu",
        "classifier_activation": "gelu",
        "max_position_embeddings": 8192,
        "norm_eps": 1e-5,
        "decoder_bias": True,
        "tie_word_embeddings": True,
        "local_attention": 128,
        "sliding_window": 64,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160_000.0,
        "local_rope_theta": 10_000.0,
        "bos_token_id": 50_281,
        "eos_token_id": 50_282,
    },
    derived=_derived,
    refused={"rope_scaling": "reads rotations of this family from rope_parameters alone. Move it there."},
    layer_kinds=_layer_kinds,
    sliding_theta="local_rope_theta",
    norms=_norms,
    mlp=gated("mlp_bias"),
    head_bias="decoder_bias",
    head_transform=_head_transform,
    names=WeightNames(
        embedding="embeddings.tok_embeddings",
        attention="attn",
        output="Wo",
        gate_up=("Wi",),
        down="Wo",
        head="decoder",
    ),
)
