"""DBRX: MPT with rotations, heads that share keys, and a mixture of experts in every layer."""

from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.families import mpt
from quire.config.family_spec import FamilySpec, NormKind, Norms, WeightNames, experts
from quire.config.layers.experts import ExpertsSpec, Routing, num_chosen_of, num_experts_of

FFN_DEFAULTS = {"ffn_hidden_size": 3584, "moe_num_experts": 4, "moe_top_k": 1, "moe_normalize_expert_weights": 1.0}
SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings")


def part(keys: ConfigKeys, name: str, defaults: Mapping[str, Any]) -> ConfigKeys:
    """An object of the config with keys of its own."""
    given = keys.raw.get(name)
    if given is not None and not isinstance(given, Mapping):
        keys.refuse(name, given, "must be null or an object")
    return ConfigKeys(given or {}, f"{keys.source}: {name}", defaults)


def derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """What is among the keys of attention, and of the experts.

    Published configs have the base of the rotation among the former, where transformers does not look for it. The base
    of `rope_parameters`, which transformers writes, counts first.
    """
    attention = part(keys, "attn_config", {"kv_n_heads": 1, "clip_qkv": None, "rope_theta": 10_000.0})
    ffn = part(keys, "ffn_config", FFN_DEFAULTS)
    activation = part(ffn, "ffn_act_fn", {"name": "silu"})
    return {
        "num_key_value_heads": attention.count("kv_n_heads"),
        "clip_qkv": attention.optional_positive("clip_qkv"),
        "rope_theta": keys.positive("rope_theta", default=attention.positive("rope_theta")),
        "intermediate_size": ffn.count("ffn_hidden_size"),
        "hidden_act": activation.text("name"),
        "head_dim": None,
    }


def normalized_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec, ...]:
    """Weights add up to one, or are those of a softmax over all experts."""
    ffn = part(keys, "ffn_config", FFN_DEFAULTS)
    _, order = ffn.given("moe_normalize_expert_weights")
    if order not in (None, 1):
        ffn.refuse("moe_normalize_expert_weights", order, "must be 1 or null")
    count = num_experts_of(ffn, "moe_num_experts")
    routing = Routing(num_chosen=num_chosen_of(ffn, count, "moe_top_k"), renormalized=order == 1)
    spec = ExpertsSpec(num_experts=count, size=ffn.count("ffn_hidden_size"), routing=routing)
    return (spec,) * num_layers


SPEC = FamilySpec(
    architecture="DbrxForCausalLM",
    spellings={name: mpt.SPEC.spellings[name] for name in SIZES},
    defaults={"hidden_act": "silu", "rms_norm_eps": 1e-5, "max_seq_len": 2048, "clip_qkv": None},
    derived=derived,
    norms=Norms(kind=NormKind.LAYER, input="norm_attn_norm.norm_1", pre_mlp="norm_attn_norm.norm_2", final="norm_f"),
    attention_bias=False,
    output_bias=False,
    mlp=experts(normalized_experts),
    names=WeightNames(
        base="transformer",
        embedding="wte",
        layers="blocks",
        attention="norm_attn_norm.attn",
        qkv=("Wqkv",),
        output="out_proj",
        mlp="ffn",
        experts_transposed=True,
    ),
)
