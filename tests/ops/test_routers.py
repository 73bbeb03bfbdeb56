"""Routing against the routers of transformers, with configurations of published models made small."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.config.config_keys import ConfigKeys
from quire.config.families import family_of
from quire.config.layers.experts import (
    ExpertsRule,
    ExpertsSpec,
    deepseek_v2_experts,
    deepseek_v3_experts,
    phimoe_experts,
)
from quire.errors import ConfigError
from quire.ops.reference.experts import route
from tests.ops.implementations import native_route

SIZE, NUM_ROWS = 48, 200
COMMON: dict[str, Any] = {
    "hidden_size": SIZE,
    "num_attention_heads": 4,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
V2: dict[str, dict[str, Any]] = {
    "greedy": {"n_routed_experts": 10, "num_experts_per_tok": 3, "topk_method": "greedy", "routed_scaling_factor": 1.0},
    "group_limited_greedy": {
        "n_routed_experts": 24,
        "num_experts_per_tok": 6,
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "topk_group": 3,
        "routed_scaling_factor": 16.0,
    },
}
V3: dict[str, dict[str, Any]] = {
    "groups": {
        "n_routed_experts": 32,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    "one group": {
        "n_routed_experts": 9,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    "not renormalized": {
        "n_routed_experts": 12,
        "num_experts_per_tok": 2,
        "n_group": 3,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 0.7,
    },
}


def specs(rule: ExpertsRule, config: dict[str, Any], num_layers: int = 3) -> tuple[ExpertsSpec | None, ...]:
    return rule(ConfigKeys({**COMMON, **config}, "config.json"), num_layers)


def by_expert(chosen: Tensor, weights: Tensor, num_experts: int) -> Tensor:
    """The weight of each expert, 0 where it was not chosen. Shapes: -> [T, X]."""
    return torch.zeros(chosen.shape[0], num_experts).scatter(1, chosen, weights)


def assert_routes_alike(router: nn.Module, spec: ExpertsSpec | None, choice_bias: Tensor | None) -> None:
    assert spec is not None
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(spec.num_experts, SIZE, generator=generator) * 0.2
    router.load_state_dict({"weight": weight}, strict=False)
    x = torch.randn(NUM_ROWS, SIZE, generator=generator)
    with torch.no_grad():
        logits, their_weights, theirs = router(x)
    expected = by_expert(theirs, their_weights, spec.num_experts)
    for chosen, weights in (
        route(logits, spec.routing, choice_bias),
        native_route(logits, spec.routing, choice_bias),
    ):
        torch.testing.assert_close(by_expert(chosen, weights, spec.num_experts), expected)


@pytest.mark.parametrize("method", V2)
def test_deepseek_v2_chooses_as_in_transformers(method: str) -> None:
    from transformers import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

    dense, spec, _ = specs(deepseek_v2_experts, V2[method])
    assert dense is None
    assert_routes_alike(DeepseekV2TopkRouter(DeepseekV2Config(**COMMON, **V2[method])), spec, None)


@pytest.mark.parametrize("case", V3)
def test_deepseek_v3_chooses_as_in_transformers(case: str) -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    router = DeepseekV3TopkRouter(DeepseekV3Config(**COMMON, **V3[case]))
    bias = torch.randn(V3[case]["n_routed_experts"], generator=torch.Generator().manual_seed(1)) * 0.3
    router.e_score_correction_bias.copy_(bias)
    assert_routes_alike(router, specs(deepseek_v3_experts, V3[case])[1], bias)


@pytest.mark.parametrize("shift", [0.0, -1.5])
def test_axk2_chooses_as_in_transformers(shift: float) -> None:
    """Where the bias makes all scores negative, experts of groups that are left out go first."""
    from transformers import AXK2Config
    from transformers.models.axk2.modeling_axk2 import AXK2TopkRouter

    config = {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 3, "norm_topk_prob": True}
    router = AXK2TopkRouter(AXK2Config(**COMMON, **config, routed_scaling_factor=2.0))
    bias = torch.randn(8, generator=torch.Generator().manual_seed(1)) * 0.3 + shift
    router.e_score_correction_bias.copy_(bias)
    mlp = family_of("AXK2ForCausalLM", "axk2").mlp
    spec = mlp(ConfigKeys({**COMMON, **config, "routed_scaling_factor": 2.0}, "config.json"), 2, 40)[1].experts
    assert_routes_alike(router, spec, bias)


@pytest.mark.parametrize("noise", [0.01, 0.2, 0.45])
def test_phimoe_chooses_as_in_transformers(noise: float) -> None:
    from transformers import PhimoeConfig
    from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter

    config = {"num_local_experts": 16, "num_experts_per_tok": 2, "router_jitter_noise": noise, "intermediate_size": 40}
    router = PhimoeTopKRouter(PhimoeConfig(hidden_size=SIZE, **config)).eval()
    assert_routes_alike(router, specs(phimoe_experts, config)[1], None)


def test_shared_experts_are_one_that_is_wider() -> None:
    _, spec, _ = specs(deepseek_v3_experts, V3["groups"])
    assert spec is not None
    assert (spec.size, spec.shared_size, spec.has_shared_gate, spec.has_choice_bias) == (40, 80, False, True)


def test_experts_are_in_the_layers_that_the_config_gives_them() -> None:
    layers = specs(deepseek_v2_experts, {**V2["greedy"], "first_k_dense_replace": 2, "moe_layer_freq": 3}, 8)
    assert [index for index, spec in enumerate(layers) if spec is not None] == [3, 6]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_group": 5}, "n_group is 5; it must divide the 32 experts into groups of 2 or more"),
        ({"n_group": 32}, "n_group is 32; it must divide the 32 experts into groups of 2 or more"),
        ({"topk_group": 9}, "topk_group is 9; it must be at most n_group (8)"),
        ({"topk_group": 1}, "topk_group is 1; it must be at most n_group (8), and so many groups of 4 must hold 8"),
        ({"topk_group": 0}, "topk_group is 0; it must be a whole number above 0"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; it must be sigmoid or noaux_tc"),
        ({"scoring_func": ["sigmoid"]}, "scoring_func is ['sigmoid']"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'; it must be noaux_tc"),
        ({"routed_scaling_factor": -1.0}, "routed_scaling_factor is -1.0; it must be a number above 0"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1; it must be a whole number, 0 or more"),
        ({"n_routed_experts": 4097}, "n_routed_experts is 4097"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        specs(deepseek_v3_experts, {**V3["groups"], **changes})
    assert words in str(caught.value)


def test_layers_that_are_listed_have_experts() -> None:
    layers = specs(deepseek_v3_experts, {**V3["groups"], "mlp_layer_types": ["sparse", "dense", "sparse"]})
    assert [spec is not None for spec in layers] == [True, False, True]


@pytest.mark.parametrize("listed", [["sparse"], "sparse", ["sparse", "dense", "moe"], ["sparse", "dense", None]])
def test_lists_of_layers_are_checked(listed: object) -> None:
    with pytest.raises(ConfigError, match=r"mlp_layer_types is .* must list dense or sparse for each of the 3 layers"):
        specs(deepseek_v3_experts, {**V3["groups"], "mlp_layer_types": listed})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; it must be greedy or group_limited_greedy"),
        ({"norm_topk_prob": True}, "norm_topk_prob is True; it must be false"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; it must be softmax"),
    ],
)
def test_what_deepseek_v2_does_not_do_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        specs(deepseek_v2_experts, {**V2["greedy"], **changes})
    assert words in str(caught.value)
