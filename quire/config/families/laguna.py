"""Laguna: Qwen3 MoE, with gated attention, windows in some layers, and query heads that differ between these and the
others."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, HeadNorms, Norms, WeightNames, experts
from quire.config.layers.experts import laguna_experts
from quire.config.layers.layer_kinds import Heads, LayerKind, all_full, listed_or
from quire.errors import counted

layer_kinds = listed_or(all_full)
ROTATIONS = {
    "full_attention": {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


def _derived(keys: ConfigKeys) -> Mapping[str, Any]:
    name, gating = keys.find(("gating",))
    if gating not in (True, "per-head", "per-element"):
        keys.refuse(name, gating, "must be true, per-head or per-element")
    cap = keys.raw.get("moe_router_logit_softcapping")
    if cap not in (None, 0, 0.0):
        keys.refuse("moe_router_logit_softcapping", cap, "must be 0: routing by capped logits is not built")
    rotations = {"rope_parameters": ROTATIONS} if keys.raw.get("rope_parameters") is None else {}
    return {"gates_by_head": gating != "per-element", **rotations}


def _heads(keys: ConfigKeys, given: Heads) -> Mapping[LayerKind, Heads]:
    """As `num_attention_heads_per_layer` lists them, as many in all layers of a kind."""
    name, num_layers = "num_attention_heads_per_layer", keys.count("num_hidden_layers")
    listed, kinds = keys.raw.get(name), layer_kinds(keys, num_layers)
    if listed is None:
        return dict.fromkeys(LayerKind, given)
    if not isinstance(listed, list) or len(listed) != num_layers or not all(type(n) is int and n > 0 for n in listed):
        keys.refuse(name, listed, f"must list numbers of heads for {counted(num_layers, 'layer')}")
    found = {kind: {count for count, own in zip(listed, kinds, strict=True) if own is kind} for kind in LayerKind}
    for kind, counts in found.items():
        if len(counts) > 1 or any(count % given.num_kv_heads for count in counts):
            problem = f"must be the same in all layers of {kind}, and a multiple of {given.num_kv_heads} KV heads"
            keys.refuse(name, listed, problem)
    return {kind: replace(given, num_heads=min(counts, default=given.num_heads)) for kind, counts in found.items()}


SPEC = FamilySpec(
    architecture="LagunaForCausalLM",
    defaults={
        "vocab_size": 100_352,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 40,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "head_dim": 128,
        "partial_rotary_factor": 1.0,
        "sliding_window": 512,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "gating": True,
    },
    derived=_derived,
    refused={"moe_apply_router_weight_on_input": "weighs what experts give. Use another checkpoint."},
    layer_kinds=layer_kinds,
    heads=_heads,
    sliding_theta="rope_theta",
    is_gated=True,
    gates_heads="gates_by_head",
    gate_activation="softplus",
    norms=Norms(heads=HeadNorms.EACH),
    mlp=experts(laguna_experts),
    names=WeightNames(gate="g_proj"),
)
