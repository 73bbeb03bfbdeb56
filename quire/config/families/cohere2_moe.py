"""Command A MoE: Command R 7B, with a mixture of experts behind the first layers, and layer norms or RMS norms."""

from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.families import cohere2
from quire.config.families.cohere import NORMS, SPELLINGS, scales
from quire.config.family_spec import FamilySpec, NormKind, Norms, experts
from quire.config.layers.experts import cohere2_experts, sparse_layers, whole_number
from quire.config.layers.layer_kinds import LayerKind, full_every, listed_or

OF_DENSE = "prefix_dense_sliding_window_pattern"
"""Of so many of the first layers, those without experts, the last one is full, over and over."""


def by_patterns(keys: ConfigKeys, num_layers: int) -> tuple[LayerKind, ...]:
    """One pattern for the first layers, which have no experts, another one for the others."""
    num_dense = min(whole_number(keys, "first_k_dense_replace"), num_layers)
    first = full_every(keys.count(OF_DENSE))(keys, num_dense)
    return first + full_every(keys.count("sliding_window_pattern"))(keys, num_layers - num_dense)


def rotated(keys: ConfigKeys, kinds: tuple[LayerKind, ...]) -> tuple[bool, ...]:
    """Layers with a window, and those without experts if all of them are full by their pattern."""
    all_full = keys.count(OF_DENSE) == 1
    return tuple(
        rotates or (all_full and not is_sparse)
        for rotates, is_sparse in zip(cohere2.rotated(keys, kinds), sparse_layers(keys, len(kinds)), strict=True)
    )


def norms(keys: ConfigKeys) -> Norms:
    """RMS norms if the config has an epsilon for them."""
    return NORMS if keys.raw.get("rms_norm_eps") is None else Norms(kind=NormKind.RMS, pre_mlp=None)


def epsilon(keys: ConfigKeys) -> Mapping[str, Any]:
    """That of RMS norms counts first."""
    given = keys.raw.get("rms_norm_eps")
    return {} if given is None else {"layer_norm_eps": given}


SPEC = FamilySpec(
    architecture="Cohere2MoeForCausalLM",
    spellings=SPELLINGS,
    defaults={
        **cohere2.SPEC.defaults,
        "head_dim": 128,
        "intermediate_size": 22_528,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_shared_experts": 0,
        "shared_expert_combination_strategy": "average",
        "expert_selection_fn": "softmax",
        "norm_topk_prob": True,
        "first_k_dense_replace": 0,
        OF_DENSE: 1,
    },
    derived=epsilon,
    refused={"rope_scaling": "reads the rotation of this family from rope_parameters alone. Put it there."},
    layer_kinds=listed_or(by_patterns),
    rotated=rotated,
    rotates_pairs=True,
    norms=norms,
    is_parallel=True,
    mlp=experts(cohere2_experts, dense_size="prefix_dense_intermediate_size"),
    scales=scales,
)
