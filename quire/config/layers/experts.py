"""Mixtures of experts: which layers of a family have one, how wide the experts are, and how tokens are routed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from quire.config.config_keys import ConfigKeys
from quire.errors import counted

MAX_EXPERTS = 4096
"""Of a layer; more can only be a mistake."""


class Scores(StrEnum):
    """What experts are chosen and weighed by: a function of the router's logits."""

    SOFTMAX = "softmax"
    """Probabilities over all experts."""
    SIGMOID = "sigmoid"
    """Of each logit by itself."""
    LOGITS = "logits"
    """The logits choose. The softmax over those of the chosen experts weighs."""
    LOGITS_SIGMOID = "logits_sigmoid"
    """The logits choose. The sigmoid of each weighs."""
    SQRT_SOFTPLUS = "sqrt_softplus"
    """sqrt(log(1 + exp(logit))), of each logit by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroups:
    """Groups of equally many experts, neighbours by index. A token's experts are of its best groups only."""

    count: int
    num_chosen: int
    num_best: int
    """A group's score is the sum of so many of its highest scores."""
    left_out: float = -math.inf
    """The score of experts in all other groups: where it is finite, they go before experts whose score is lower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How the experts of a token are chosen, and what their outputs are multiplied by."""

    num_chosen: int
    """Experts of a token: those of the highest scores, the lower index first where two are equal."""
    scores: Scores = Scores.SOFTMAX
    groups: ExpertGroups | None = None
    """None where all experts are candidates."""
    renormalized: bool = False
    """The weights of a token's experts are divided by their sum."""
    least_sum: float = 0.0
    """By no less than this."""
    added_to_sum: float = 0.0
    """Added to that sum."""
    factor: float = 1.0
    """Of the weights, in the end."""
    shared_factor: float = 1.0
    """Of the shared expert's output."""
    weighs_input: bool = False
    """The weights multiply what the chosen experts read, not what they give."""
    near: float | None = None
    """Logits choose experts one after the other. Each is weighed by the softmax over the logits that are left and no
    further from it than this share of it; see `ops.reference.experts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedGate:
    """g * sigmoid(slope * g) * (u + offset), of g = min(gate, limit) and u = min(max(up, -limit), limit)."""

    limit: float
    slope: float = 1.0
    offset: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterMlpSpec:
    """A router whose logits are a product of an MLP of a thin product of the hidden states, which `model_class`
    computes (Zaya)."""

    rank: int
    """Features of the thin product, and of the MLP."""
    reads_last: bool
    """What the layer before read is added to the thin product, times a factor of each feature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """The mixture of experts of one layer."""

    num_experts: int
    num_identities: int = 0
    """Behind the experts, so many more to choose from give what they read ("zero experts", LongCat Flash)."""
    num_skips: int = 0
    """Behind those, so many more to choose from give nothing (Zaya)."""
    size: int
    """Width of each expert between its two products."""
    routing: Routing
    is_gated: bool = True
    """Experts are gated MLPs; if not, they are down(activation(up(x)))."""
    gate: ClampedGate | None = None
    """In place of the model's activation and a product."""
    has_bias: bool = False
    """Of the products of the experts that are chosen."""
    has_common_bias: bool = False
    """One bias is added to what the experts give together. Each expert carries it: their weights add up to one."""
    has_router_bias: bool = False
    """A number for each expert is added to its logit."""
    has_choice_bias: bool = False
    """A number for each expert is added to its score where experts are chosen, not where they are weighed."""
    may_lack_choice_bias: bool = False
    """A checkpoint may leave these numbers out: they are zeros then."""
    has_router_scale: bool = False
    """What the router reads is multiplied by `router.scale` over the root of its size, and the weights of experts in
    the end by `router.per_expert_scale` (Gemma 4)."""
    router: RouterMlpSpec | None = None
    """None where the logits are a product of the hidden states."""
    has_token_table: bool = False
    """A table names the experts of each token's number, so the router only weighs them."""
    shared_size: int = 0
    """Width of an expert that every token passes; 0 for none."""
    clamps_shared: bool = True
    """`gate` is the shared expert's, too; if not, it has the model's activation and a product, and is an MLP beside."""
    has_shared_gate: bool = False
    """The shared expert's output is multiplied by the sigmoid of a product of its own."""
    has_shared_bias: bool = False

    @property
    def has_mlp_beside(self) -> bool:
        """Whether the shared expert is computed by itself."""
        return self.shared_size > 0 and not self.clamps_shared

    @property
    def widest(self) -> int:
        """Inner features of the widest expert of those that are computed together."""
        return self.size if self.has_mlp_beside else max(self.size, self.shared_size)

    @property
    def num_candidates(self) -> int:
        """What the router has a row for: experts, identities and skips."""
        return self.num_experts + self.num_identities + self.num_skips


ExpertsRule = Callable[[ConfigKeys, int], tuple[ExpertsSpec | None, ...]]
"""From a config and a number of layers to the experts of each layer; None for an MLP."""


def mixtral_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Mixtral: experts in every layer, whose weights add up to one."""
    count = num_experts_of(keys, "num_local_experts", "num_experts")
    routing = Routing(num_chosen=num_chosen_of(keys, count, "num_experts_per_tok"), renormalized=True)
    spec = ExpertsSpec(num_experts=count, size=keys.count("intermediate_size"), routing=routing)
    return (spec,) * num_layers


def granite_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Granite MoE: experts in every layer, weighed by a softmax over those that were chosen."""
    count = num_experts_of(keys, "num_local_experts", "num_experts")
    routing = Routing(num_chosen=num_chosen_of(keys, count, "num_experts_per_tok"), scores=Scores.LOGITS)
    spec = ExpertsSpec(num_experts=count, size=keys.count("intermediate_size"), routing=routing)
    return (spec,) * num_layers


def jetmoe_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """JetMoE: as Granite MoE, with a bias behind the experts."""
    return tuple(spec and replace(spec, has_common_bias=True) for spec in granite_experts(keys, num_layers))


def granite_shared_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Granite MoE and Granite 4, with a shared expert."""
    shared_size = whole_number(keys, "shared_intermediate_size")
    return tuple(spec and replace(spec, shared_size=shared_size) for spec in granite_experts(keys, num_layers))


def phimoe_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Phi-3.5 MoE: two experts in every layer, each weighed among those that are near it (SparseMixer, 2409.12136)."""
    count = num_experts_of(keys, "num_local_experts", "num_experts")
    chosen = num_chosen_of(keys, count, "num_experts_per_tok")
    if chosen != 2:
        keys.refuse("num_experts_per_tok", chosen, "must be 2: the routing of this family chooses two")
    _, jitter = keys.find(("router_jitter_noise",))
    near = 0.0 if jitter == 0 else 2 * keys.positive("router_jitter_noise")
    routing = Routing(num_chosen=2, scores=Scores.LOGITS, near=near)
    spec = ExpertsSpec(num_experts=count, size=keys.count("intermediate_size"), routing=routing)
    return (spec,) * num_layers


def jamba_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Jamba: in one layer of each `expert_layer_period`; a single expert is an MLP."""
    count = num_experts_of(keys, "num_experts", "num_local_experts")
    routing = Routing(num_chosen=num_chosen_of(keys, count, "num_experts_per_tok"))
    spec = ExpertsSpec(num_experts=count, size=keys.count("intermediate_size"), routing=routing)
    period, offset = keys.count("expert_layer_period"), whole_number(keys, "expert_layer_offset")
    return tuple(spec if count > 1 and index % period == offset else None for index in range(num_layers))


def olmoe_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """OLMoE: experts in every layer."""
    count = num_experts_of(keys, "num_experts", "num_local_experts")
    spec = ExpertsSpec(num_experts=count, size=keys.count("intermediate_size"), routing=_qwen_routing(keys, count))
    return (spec,) * num_layers


def qwen3_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Qwen 3 MoE: experts in the layers that `decoder_sparse_step` and `mlp_only_layers` leave to them."""
    return by_sparse_step(keys, _qwen3_spec(keys), num_layers)


def mellum_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Mellum 2: as Qwen 3, in the layers that `mlp_layer_types` lists."""
    return behind_dense_layers(keys, _qwen3_spec(keys), num_layers)


def qwen2_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Qwen 2 MoE: as Qwen 3, with a shared expert behind a gate."""
    count = num_experts_of(keys, "num_experts", "num_local_experts")
    spec = ExpertsSpec(
        num_experts=count,
        size=keys.count("moe_intermediate_size"),
        routing=_qwen_routing(keys, count),
        shared_size=keys.count("shared_expert_intermediate_size"),
        has_shared_gate=True,
    )
    return by_sparse_step(keys, spec, num_layers)


def ernie_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """ERNIE 4.5 MoE: chosen with a bias; the first layers have an MLP; shared experts are one wider expert."""
    count = num_experts_of(keys, "moe_num_experts", "num_experts")
    size, num_shared = keys.count("moe_intermediate_size"), whole_number(keys, "moe_num_shared_experts")
    spec = ExpertsSpec(
        num_experts=count,
        size=size,
        routing=Routing(
            num_chosen=num_chosen_of(keys, count, "moe_k", "num_experts_per_tok"),
            renormalized=True,
            least_sum=keys.positive("moe_norm_min"),
        ),
        has_choice_bias=True,
        shared_size=num_shared * size,
    )
    first, interval = whole_number(keys, "moe_layer_start_index"), keys.count("moe_layer_interval")
    last = keys.raw.get("moe_layer_end_index", -1)
    last = num_layers - 1 if last in (None, -1) else whole_number(keys, "moe_layer_end_index")
    return tuple(
        spec if first <= index <= last and (index + 1) % interval == 0 else None for index in range(num_layers)
    )


def lfm2_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """LFM2 MoE: sigmoids, chosen with a bias, in all layers behind the first `num_dense_layers`."""
    count = num_experts_of(keys, "num_experts", "num_local_experts", scoring=("sigmoid",))
    routing = Routing(
        num_chosen=num_chosen_of(keys, count, "num_experts_per_tok"),
        scores=Scores.SIGMOID,
        renormalized=keys.flag("norm_topk_prob", default=True),
        added_to_sum=1e-6,
        factor=keys.positive("routed_scaling_factor"),
    )
    has_bias = keys.flag("use_expert_bias", default=True)
    size, first = keys.count("moe_intermediate_size"), whole_number(keys, "num_dense_layers")
    spec = ExpertsSpec(num_experts=count, size=size, routing=routing, has_choice_bias=has_bias)
    return tuple(spec if index >= first else None for index in range(num_layers))


def afmoe_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """AFMoE: sigmoids, chosen with a bias; shared experts are one wider expert; in all layers behind the first."""
    count, size = num_experts_of(keys, "num_experts", "num_local_experts"), keys.count("moe_intermediate_size")
    routing = Routing(
        num_chosen=num_chosen_of(keys, count, "num_experts_per_tok"),
        scores=Scores.SIGMOID,
        renormalized=True,
        least_sum=1e-20,
        factor=keys.positive("route_scale"),
    )
    spec = ExpertsSpec(
        num_experts=count,
        size=size,
        routing=routing,
        has_choice_bias=True,
        shared_size=whole_number(keys, "num_shared_experts") * size,
    )
    first = whole_number(keys, "num_dense_layers")
    return tuple(spec if index >= first else None for index in range(num_layers))


def deepseek_v2_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """DeepSeek V2: chosen of all experts (`greedy`), or of groups that their best expert ranks, and scaled."""
    check_only(keys, "topk_method", "greedy", "group_limited_greedy")
    has_groups = keys.text("topk_method") == "group_limited_greedy"
    if keys.flag("norm_topk_prob", default=False):
        keys.refuse("norm_topk_prob", True, "must be false: the weights of this family's experts are only scaled")
    count = num_experts_of(keys, "n_routed_experts", "num_experts", has_groups=True)
    chosen = num_chosen_of(keys, count, "num_experts_per_tok")
    routing = Routing(
        num_chosen=chosen,
        groups=_groups(keys, count, chosen, num_best=1) if has_groups else None,
        factor=keys.positive("routed_scaling_factor"),
    )
    return behind_dense_layers(keys, _deepseek_spec(keys, count, routing), num_layers)


def deepseek_v3_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """DeepSeek V3 (`noaux_tc`): sigmoids, chosen with a bias of groups that their two best rank, and scaled."""
    check_only(keys, "topk_method", "noaux_tc")
    names = ("n_routed_experts", "num_local_experts")
    count = num_experts_of(keys, *names, scoring=("sigmoid", "noaux_tc"), has_groups=True)
    chosen = num_chosen_of(keys, count, "num_experts_per_tok")
    routing = Routing(
        num_chosen=chosen,
        scores=Scores.SIGMOID,
        groups=_groups(keys, count, chosen, num_best=2),
        renormalized=keys.flag("norm_topk_prob", default=False),
        least_sum=1e-20,
        factor=keys.positive("routed_scaling_factor"),
    )
    return behind_dense_layers(keys, _deepseek_spec(keys, count, routing, has_choice_bias=True), num_layers)


def hy_v3_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Hunyuan 3: as DeepSeek V3. Without shared experts, one is as wide as the MLP of the first layers."""
    size = keys.count("intermediate_size")
    return tuple(
        spec if spec is None or spec.shared_size else replace(spec, shared_size=size)
        for spec in deepseek_v3_experts(keys, num_layers)
    )


def mistral4_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Mistral 4: as DeepSeek V3, of probabilities and without a bias."""
    count = num_experts_of(keys, "n_routed_experts", "num_local_experts", has_groups=True)
    chosen = num_chosen_of(keys, count, "num_experts_per_tok")
    routing = Routing(
        num_chosen=chosen,
        groups=_groups(keys, count, chosen, num_best=2),
        renormalized=keys.flag("norm_topk_prob", default=False),
        least_sum=1e-20,
        factor=keys.positive("routed_scaling_factor"),
    )
    return behind_dense_layers(keys, _deepseek_spec(keys, count, routing), num_layers)


def nemotron_h_experts(keys: ConfigKeys) -> ExpertsSpec:
    """Nemotron-H: routed as DeepSeek V3, to experts without a gate, the shared one of a width of its own."""
    count = num_experts_of(keys, "n_routed_experts", "num_local_experts", scoring=("sigmoid",), has_groups=True)
    chosen = num_chosen_of(keys, count, "num_experts_per_tok")
    routing = Routing(
        num_chosen=chosen,
        scores=Scores.SIGMOID,
        groups=_groups(keys, count, chosen, num_best=2),
        renormalized=keys.flag("norm_topk_prob", default=True),
        least_sum=1e-20,
        factor=keys.positive("routed_scaling_factor"),
    )
    return ExpertsSpec(
        num_experts=count,
        size=keys.count("moe_intermediate_size"),
        routing=routing,
        is_gated=False,
        has_choice_bias=True,
        shared_size=keys.count("moe_shared_expert_intermediate_size"),
    )


def cohere2_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Command A MoE: weighed by the softmax over those that were chosen, or by sigmoids; added to the shared expert's
    output, or averaged with it.
    """
    check_only(keys, "expert_selection_fn", "softmax", "sigmoid")
    check_only(keys, "shared_expert_combination_strategy", "sum", "average")
    count, size = num_experts_of(keys, "num_experts", "num_local_experts"), keys.count("intermediate_size")
    num_shared, is_sigmoid = whole_number(keys, "num_shared_experts"), keys.text("expert_selection_fn") == "sigmoid"
    is_average = num_shared > 0 and keys.text("shared_expert_combination_strategy") == "average"
    routing = Routing(
        num_chosen=num_chosen_of(keys, count, "num_experts_per_tok"),
        scores=Scores.SIGMOID if is_sigmoid else Scores.LOGITS,
        renormalized=is_sigmoid and keys.flag("norm_topk_prob", default=False),
        factor=0.5 if is_average else 1.0,
        shared_factor=0.5 if is_average else 1.0,
    )
    spec = ExpertsSpec(num_experts=count, size=size, routing=routing, shared_size=num_shared * size)
    return behind_dense_layers(keys, spec, num_layers)


def laguna_experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Laguna: sigmoids, chosen with a bias and scaled, beside a shared expert, behind the first layer."""
    count = num_experts_of(keys, "num_experts", scoring=("sigmoid",))
    routing = Routing(
        num_chosen=num_chosen_of(keys, count, "num_experts_per_tok"),
        scores=Scores.SIGMOID,
        renormalized=True,
        factor=keys.positive("moe_routed_scaling_factor"),
    )
    size, shared_size = keys.count("moe_intermediate_size"), keys.count("shared_expert_intermediate_size")
    spec = ExpertsSpec(num_experts=count, size=size, routing=routing, has_choice_bias=True, shared_size=shared_size)
    return behind_dense_layers(keys, spec, num_layers)


def gemma4_experts(keys: ConfigKeys) -> ExpertsSpec | None:
    """Gemma 4: beside the MLP of every layer, where `enable_moe_block` says so; weights of experts add up to one."""
    if not keys.flag("enable_moe_block", default=False):
        return None
    count = num_experts_of(keys, "num_experts")
    routing = Routing(num_chosen=num_chosen_of(keys, count, "top_k_experts"), renormalized=True)
    size = keys.count("moe_intermediate_size")
    return ExpertsSpec(num_experts=count, size=size, routing=routing, has_router_scale=True)


def longcat_experts(keys: ConfigKeys) -> ExpertsSpec:
    """LongCat Flash: chosen by a softmax and a bias, with experts that give what they read among them."""
    check_only(keys, "zero_expert_type", "identity")
    if keys.flag("norm_topk_prob", default=False):
        keys.refuse("norm_topk_prob", True, "must be false: the weights of this family's experts are only scaled")
    count, num_identities = num_experts_of(keys, "n_routed_experts"), whole_number(keys, "zero_expert_num")
    routing = Routing(
        num_chosen=num_chosen_of(keys, count + num_identities, "moe_topk", "num_experts_per_tok"),
        factor=keys.positive("routed_scaling_factor"),
    )
    return ExpertsSpec(
        num_experts=count,
        num_identities=num_identities,
        size=keys.count("expert_ffn_hidden_size", "moe_intermediate_size"),
        routing=routing,
        has_choice_bias=True,
    )


def _deepseek_spec(
    keys: ConfigKeys, num_experts: int, routing: Routing, *, has_choice_bias: bool = False
) -> ExpertsSpec:
    """Shared experts are one that is wider."""
    size, num_shared = keys.count("moe_intermediate_size"), whole_number(keys, "n_shared_experts")
    return ExpertsSpec(
        num_experts=num_experts,
        size=size,
        routing=routing,
        has_choice_bias=has_choice_bias,
        shared_size=num_shared * size,
    )


def behind_dense_layers(keys: ConfigKeys, spec: ExpertsSpec, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """The same experts in each of the `sparse_layers`."""
    return tuple(spec if is_sparse else None for is_sparse in sparse_layers(keys, num_layers))


def sparse_layers(keys: ConfigKeys, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts: as `mlp_layer_types` lists. Without it, every `moe_layer_freq`-th has, but not
    the first `first_k_dense_replace`.
    """
    listed = keys.raw.get("mlp_layer_types")
    if listed is not None:
        return tuple(kind == "sparse" for kind in _layer_types(keys, listed, num_layers))
    first, step = whole_number(keys, "first_k_dense_replace"), keys.count("moe_layer_freq", default=1)
    return tuple(index >= first and index % step == 0 for index in range(num_layers))


def _layer_types(keys: ConfigKeys, listed: object, num_layers: int) -> list[object]:
    valid = isinstance(listed, list) and all(kind in ("dense", "sparse") for kind in listed)
    if not isinstance(listed, list) or not valid or len(listed) != num_layers:
        problem = f"must list dense or sparse for each of the {counted(num_layers, 'layer')}"
        keys.refuse("mlp_layer_types", listed, problem)
    return listed


def _groups(keys: ConfigKeys, num_experts: int, num_chosen: int, *, num_best: int) -> ExpertGroups | None:
    """None for a single group, which chooses nothing."""
    count, chosen_groups = keys.count("n_group"), keys.count("topk_group")
    size = num_experts // count
    if num_experts % count or (count > 1 and size < num_best):
        problem = f"must divide the {num_experts} experts into groups of {num_best} or more"
        keys.refuse("n_group", count, problem)
    if not num_chosen <= chosen_groups * size <= num_experts:
        problem = f"must be at most n_group ({count}), and so many groups of {size} must hold {num_chosen} experts"
        keys.refuse("topk_group", chosen_groups, problem)
    return None if count == 1 else ExpertGroups(count=count, num_chosen=chosen_groups, num_best=num_best)


def _qwen3_spec(keys: ConfigKeys) -> ExpertsSpec:
    count = num_experts_of(keys, "num_experts", "num_local_experts")
    return ExpertsSpec(num_experts=count, size=keys.count("moe_intermediate_size"), routing=_qwen_routing(keys, count))


def _qwen_routing(keys: ConfigKeys, num_experts: int) -> Routing:
    return Routing(
        num_chosen=num_chosen_of(keys, num_experts, "num_experts_per_tok"),
        renormalized=keys.flag("norm_topk_prob", default=False),
    )


def by_sparse_step(keys: ConfigKeys, spec: ExpertsSpec, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """The same experts in each layer that `decoder_sparse_step` and `mlp_only_layers` leave to them."""
    step, listed = keys.count("decoder_sparse_step"), keys.raw.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in listed):
        keys.refuse("mlp_only_layers", listed, f"must list indices of the {counted(num_layers, 'layer')}")
    dense = set(listed)
    return tuple(None if index in dense or (index + 1) % step else spec for index in range(num_layers))


def num_experts_of(
    keys: ConfigKeys, *spellings: str, scoring: tuple[str, ...] = ("softmax",), has_groups: bool = False
) -> int:
    """Of a layer.

    Raises: ConfigError also for keys of another kind of routing, which the family does not have.
    """
    check_only(keys, "scoring_func", *scoring)
    keys.check_alike(*spellings)
    groups = keys.raw.get("n_group")
    if not has_groups and groups not in (None, 1):
        keys.refuse("n_group", groups, "must be 1: routing by groups of experts is not built for this family")
    return keys.count(*spellings, most=MAX_EXPERTS)


def check_only(keys: ConfigKeys, name: str, *known: str) -> None:
    """Refuse other values of a key than those known. Raises: ConfigError."""
    value = keys.raw.get(name)
    if value is not None and value not in known:
        keys.refuse(name, value, f"must be {' or '.join(known)}: no other routing is built for this family")


def num_chosen_of(keys: ConfigKeys, num_experts: int, *spellings: str) -> int:
    """Experts of a token. Raises: ConfigError for more than there are."""
    keys.check_alike(*spellings)
    chosen = keys.count(*spellings)
    if chosen > num_experts:
        keys.refuse(spellings[0], chosen, f"must be at most the number of experts, {num_experts}")
    return chosen


def whole_number(keys: ConfigKeys, name: str) -> int:
    """A whole number, 0 or more."""
    name, value = keys.find((name,))
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        keys.refuse(name, value, "must be a whole number, 0 or more")
    return value
