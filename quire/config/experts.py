"""Mixtures of experts: which layers of a family have one, how wide the experts are, and how tokens are routed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from quire.config.config_keys import ConfigKeys
from quire.errors import counted

MAX_EXPERTS = 4096
"""Of a layer; more can only be a mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How the experts of a token are chosen, and what their outputs are multiplied by."""

    num_chosen: int
    """Experts of a token: those of the highest scores, the lower index first where two are equal."""
    softmax_first: bool = True
    """Scores are probabilities over all experts. Otherwise they are the router's logits, and the softmax is taken over
    those of the chosen experts."""
    renormalized: bool = False
    """The weights of a token's experts are divided by their sum."""
    least_sum: float = 0.0
    """By no less than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """The mixture of experts of one layer."""

    num_experts: int
    size: int
    """Width of each expert between its two products."""
    routing: Routing
    has_choice_bias: bool = False
    """A number for each expert is added to its score where experts are chosen, not where they are weighed."""
    shared_size: int = 0
    """Width of an expert that every token passes; 0 for none."""
    has_shared_gate: bool = False
    """The shared expert's output is multiplied by the sigmoid of a product of its own."""
    has_shared_bias: bool = False


ExpertsRule = Callable[[ConfigKeys, int], tuple[ExpertsSpec | None, ...]]
"""From a config and a number of layers to the experts of each layer; None for an MLP."""


def mixtral_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Mixtral: experts in every layer, whose weights add up to one."""
    count = _num_experts(keys, "num_local_experts", "num_experts")
    routing = Routing(num_chosen=_num_chosen(keys, count, "num_experts_per_tok"), renormalized=True)
    spec = ExpertsSpec(num_experts=count, size=keys.count("intermediate_size"), routing=routing)
    return (spec,) * num_layers


def granite_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Granite MoE: experts in every layer, weighed by a softmax over those that were chosen."""
    count = _num_experts(keys, "num_local_experts", "num_experts")
    routing = Routing(num_chosen=_num_chosen(keys, count, "num_experts_per_tok"), softmax_first=False)
    spec = ExpertsSpec(num_experts=count, size=keys.count("intermediate_size"), routing=routing)
    return (spec,) * num_layers


def granite_hybrid_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Granite 4: as Granite MoE, with a shared expert."""
    shared = keys.count("shared_intermediate_size")
    return tuple(spec and replace(spec, shared_size=shared) for spec in granite_experts(keys, num_layers))


def jamba_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Jamba: in one layer of each `expert_layer_period`; a single expert is an MLP."""
    count = _num_experts(keys, "num_experts", "num_local_experts")
    routing = Routing(num_chosen=_num_chosen(keys, count, "num_experts_per_tok"))
    spec = ExpertsSpec(num_experts=count, size=keys.count("intermediate_size"), routing=routing)
    period, offset = keys.count("expert_layer_period"), _whole(keys, "expert_layer_offset")
    return tuple(spec if count > 1 and index % period == offset else None for index in range(num_layers))


def olmoe_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """OLMoE: experts in every layer."""
    count = _num_experts(keys, "num_experts", "num_local_experts")
    spec = ExpertsSpec(num_experts=count, size=keys.count("intermediate_size"), routing=_qwen_routing(keys, count))
    return (spec,) * num_layers


def qwen3_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Qwen 3 MoE: experts in the layers that `decoder_sparse_step` and `mlp_only_layers` leave to them."""
    count = _num_experts(keys, "num_experts", "num_local_experts")
    size = keys.count("moe_intermediate_size")
    spec = ExpertsSpec(num_experts=count, size=size, routing=_qwen_routing(keys, count))
    return _in_sparse_layers(keys, spec, num_layers)


def qwen2_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Qwen 2 MoE: as Qwen 3, with a shared expert behind a gate."""
    count = _num_experts(keys, "num_experts", "num_local_experts")
    spec = ExpertsSpec(
        num_experts=count,
        size=keys.count("moe_intermediate_size"),
        routing=_qwen_routing(keys, count),
        shared_size=keys.count("shared_expert_intermediate_size"),
        has_shared_gate=True,
    )
    return _in_sparse_layers(keys, spec, num_layers)


def ernie_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """ERNIE 4.5 MoE: chosen with a bias; the first layers have an MLP; shared experts are one wider expert."""
    count = _num_experts(keys, "moe_num_experts", "num_experts")
    size, num_shared = keys.count("moe_intermediate_size"), _whole(keys, "moe_num_shared_experts")
    spec = ExpertsSpec(
        num_experts=count,
        size=size,
        routing=Routing(
            num_chosen=_num_chosen(keys, count, "moe_k", "num_experts_per_tok"),
            renormalized=True,
            least_sum=keys.positive("moe_norm_min"),
        ),
        has_choice_bias=True,
        shared_size=num_shared * size,
        has_shared_bias=keys.flag("use_bias", default=False) and num_shared > 0,
    )
    first, interval = _whole(keys, "moe_layer_start_index"), keys.count("moe_layer_interval")
    last = keys.raw.get("moe_layer_end_index", -1)
    last = num_layers - 1 if last in (None, -1) else _whole(keys, "moe_layer_end_index")
    return tuple(
        spec if first <= index <= last and (index + 1) % interval == 0 else None for index in range(num_layers)
    )


def _qwen_routing(keys: ConfigKeys, num_experts: int) -> Routing:
    return Routing(
        num_chosen=_num_chosen(keys, num_experts, "num_experts_per_tok"),
        renormalized=keys.flag("norm_topk_prob", default=False),
    )


def _in_sparse_layers(keys: ConfigKeys, spec: ExpertsSpec, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    step, listed = keys.count("decoder_sparse_step"), keys.raw.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in listed):
        keys.refuse("mlp_only_layers", listed, f"must list indices of the {counted(num_layers, 'layer')}")
    dense = set(listed)
    return tuple(None if index in dense or (index + 1) % step else spec for index in range(num_layers))


def _num_experts(keys: ConfigKeys, *spellings: str) -> int:
    """Of a layer.

    Raises: ConfigError also for keys of another kind of routing, which these families do not have.
    """
    scoring = keys.raw.get("scoring_func")
    if scoring not in (None, "softmax"):
        keys.refuse("scoring_func", scoring, "must be softmax: no other routing is built for this family")
    groups = keys.raw.get("n_group")
    if groups not in (None, 1):
        keys.refuse("n_group", groups, "must be 1: routing by groups of experts is not built for this family")
    return keys.count(*spellings, most=MAX_EXPERTS)


def _num_chosen(keys: ConfigKeys, num_experts: int, *spellings: str) -> int:
    chosen = keys.count(*spellings)
    if chosen > num_experts:
        keys.refuse(spellings[0], chosen, f"must be at most the number of experts, {num_experts}")
    return chosen


def _whole(keys: ConfigKeys, name: str) -> int:
    """A whole number, 0 or more."""
    value = keys.raw.get(name)
    value = keys.defaults.get(name) if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        keys.refuse(name, value, "must be a whole number, 0 or more")
    return value
