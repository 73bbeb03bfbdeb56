"""Kimi Linear: Kimi Delta Attention in most layers, DeepSeek V3's without rotation in the others, and its experts."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, WeightNames, experts
from quire.config.layers.experts import check_only, deepseek_v3_experts
from quire.config.layers.gated_recurrence import LINEAR, kimi_delta
from quire.config.layers.latent import latent_attention, latent_heads
from quire.config.layers.layer_kinds import LayerKind
from quire.config.layers.recurrent import listed_layers
from quire.config.layers.recurrent_mixers import RecurrentSpec

LISTS = {"full_attn_layers": LayerKind.FULL, "kda_layers": LINEAR}
"""Numbers of layers, from 1 on, in `linear_attn_config` -> what `layer_types` calls them."""
SIZES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Keys of `linear_attn_config`, which count first -> those of the config itself."""


def _derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """What stands in an object of its own in older configs. transformers never ties the head."""
    _check(keys)
    num_layers, older = keys.count("num_hidden_layers"), _older(keys)
    changes: dict[str, Any] = {**latent_heads(keys), "tie_word_embeddings": False}
    changes.update({name: older[own] for own, name in SIZES.items() if older.get(own) is not None})
    if keys.raw.get("layer_types") is None:
        changes["layer_types"] = (
            _listed(keys, older, num_layers)
            if all(name in older for name in LISTS)
            else [LayerKind.FULL if index and index % 4 == 0 else LINEAR for index in range(num_layers)]
        )
    return changes


def _check(keys: ConfigKeys) -> None:
    """Refuse what older configs may say and transformers does not read. Raises: ConfigError."""
    check_only(keys, "moe_router_activation_func", "sigmoid")
    if not keys.flag("mla_use_nope", default=True):
        keys.refuse("mla_use_nope", False, "must be true: attention of this family does not rotate queries and keys")
    step = keys.raw.get("moe_layer_freq")
    if step not in (None, 1) and keys.raw.get("mlp_layer_types") is None:
        keys.refuse("moe_layer_freq", step, "must be 1, or mlp_layer_types must say which layers have experts")
    if not keys.flag("use_grouped_topk", default=True) and keys.count("n_group") > 1:
        keys.refuse("use_grouped_topk", False, "must be true: experts of this family are chosen by groups")


def _older(keys: ConfigKeys) -> Mapping[str, Any]:
    given = keys.raw.get("linear_attn_config")
    if given is not None and not isinstance(given, Mapping):
        keys.refuse("linear_attn_config", given, "must be null or an object")
    return given or {}


def _listed(keys: ConfigKeys, older: Mapping[str, Any], num_layers: int) -> Sequence[str]:
    """The kind of each layer. Raises: ConfigError for a layer that neither list has, or both have."""
    kinds: dict[int, str] = {}
    for name, kind in LISTS.items():
        numbers = older[name]
        if not isinstance(numbers, list) or any(
            not isinstance(number, int) or isinstance(number, bool) or number in kinds for number in numbers
        ):
            keys.refuse(f"linear_attn_config.{name}", numbers, "must list layers that the other list does not have")
        kinds |= dict.fromkeys(numbers, kind)
    if sorted(kinds) != list(range(1, num_layers + 1)):
        problem = f"must have each of the {num_layers} layers, counted from 1, in {' or '.join(LISTS)}"
        keys.refuse("linear_attn_config", {name: older[name] for name in LISTS}, problem)
    return [kinds[number] for number in range(1, num_layers + 1)]


def _recurrent(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    return listed_layers(keys, kimi_delta(keys), num_layers, (LINEAR,))


SPEC = FamilySpec(
    architecture="KimiLinearForCausalLM",
    spellings={
        "max_position_embeddings": "model_max_length",
        "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
        "n_routed_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
    },
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": 163_840,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "max_position_embeddings": 1_048_576,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
        "first_k_dense_replace": 1,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1024,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.446,
        "bos_token_id": 163_584,
        "eos_token_id": 163_586,
    },
    derived=_derived,
    recurrent=_recurrent,
    latent=latent_attention(rotates=False),
    mlp=experts(deepseek_v3_experts),
    names=WeightNames(recurrent="self_attn", resaved=(("mlp.", "block_sparse_moe."),)),
)
