"""MiniMax M3 (text): MiniMax M2 with norms of each head, clamped gates and a shared expert, whose later layers attend
to the blocks of tokens that an indexer chooses.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, HeadNorms, MlpSpec, Norms, experts
from quire.config.layers.block_indexer import indexed_blocks, sparse_keys
from quire.config.layers.experts import (
    ClampedGate,
    ExpertsSpec,
    Routing,
    Scores,
    num_chosen_of,
    num_experts_of,
    sparse_layers,
)


def published_keys(keys: ConfigKeys) -> Mapping[str, Any]:
    """As transformers reads them: gates are clamped, whatever `hidden_act` says; layers with experts are listed."""
    found = {**sparse_keys(keys), "hidden_act": "silu"}
    flags = keys.raw.get("moe_layer_freq")
    if isinstance(flags, list):
        found["moe_layer_freq"] = None
        if keys.raw.get("mlp_layer_types") is None:
            found["mlp_layer_types"] = ["sparse" if flag else "dense" for flag in flags]
    return found


def clamped_gate(keys: ConfigKeys) -> ClampedGate:
    """Of MLPs and experts alike."""
    return ClampedGate(limit=keys.positive("swiglu_limit"), slope=keys.positive("swiglu_alpha"), offset=1.0)


def scaled_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Sigmoids, chosen with a bias; their weights add up to a factor."""
    count = num_experts_of(keys, "num_local_experts", "num_experts", scoring=("sigmoid",))
    spec = ExpertsSpec(
        num_experts=count,
        size=keys.count("intermediate_size"),
        routing=Routing(
            num_chosen=num_chosen_of(keys, count, "num_experts_per_tok"),
            scores=Scores.SIGMOID,
            renormalized=True,
            factor=keys.positive("routed_scaling_factor"),
        ),
        gate=clamped_gate(keys),
        has_choice_bias=True,
        shared_size=keys.count("shared_intermediate_size"),
    )
    return tuple(spec if is_sparse else None for is_sparse in sparse_layers(keys, num_layers))


def mlps(keys: ConfigKeys, num_layers: int, size: int) -> tuple[MlpSpec, ...]:
    """Experts, or a wider MLP with the same gate."""
    gate, rule = clamped_gate(keys), experts(scaled_experts, dense_size="dense_intermediate_size")
    return tuple(mlp if mlp.experts else replace(mlp, gate=gate) for mlp in rule(keys, num_layers, size))


SPEC = FamilySpec(
    architecture="MiniMaxM3VLForCausalLM",
    defaults={
        "vocab_size": 200_064,
        "hidden_size": 6144,
        "intermediate_size": 3072,
        "dense_intermediate_size": 12_288,
        "shared_intermediate_size": 3072,
        "num_hidden_layers": 60,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 524_288,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5_000_000.0,
        "partial_rotary_factor": 1.0,
        "bos_token_id": 200_034,
        "eos_token_id": 200_020,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 2.0,
        "first_k_dense_replace": 0,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_block_size": 128,
        "index_topk_blocks": 16,
        "index_local_blocks": 1,
    },
    derived=published_keys,
    ignored=("rotary_dim",),
    blocks=indexed_blocks,
    norms=Norms(heads=HeadNorms.EACH, offset=1.0),
    mlp=mlps,
    attention_bias=False,
    output_bias=False,
)
