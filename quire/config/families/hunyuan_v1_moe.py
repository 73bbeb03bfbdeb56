"""Hunyuan MoE (A13B): the dense Hunyuan, with a mixture of experts and a shared one in every layer."""

from quire.config.config_keys import ConfigKeys
from quire.config.families import hunyuan_v1_dense
from quire.config.family_spec import FamilySpec, HeadNorms, Norms, experts
from quire.config.layers.experts import ExpertsSpec, Routing, num_chosen_of, num_experts_of


def chosen_by_layer(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec, ...]:
    """Weights add up to one; `moe_topk` may list how many experts each layer chooses."""
    count, size = num_experts_of(keys, "num_experts", "num_local_experts"), keys.count("intermediate_size")
    listed = keys.raw.get("moe_topk")
    if isinstance(listed, list) and len(listed) != num_layers:
        keys.refuse("moe_topk", listed, f"must be a number, or list one for each of the {num_layers} layers")
    if not isinstance(listed, list):
        keys.check_alike("moe_topk", "num_experts_per_tok")
    chosen = listed if isinstance(listed, list) else [keys.find(("moe_topk", "num_experts_per_tok"))[1]] * num_layers
    routings = [Routing(num_chosen=_checked(keys, number, count), renormalized=True) for number in chosen]
    return tuple(ExpertsSpec(num_experts=count, size=size, routing=routing, shared_size=size) for routing in routings)


def _checked(keys: ConfigKeys, number: object, count: int) -> int:
    return num_chosen_of(ConfigKeys({"moe_topk": number}, keys.source), count, "moe_topk")


SPEC = FamilySpec(
    architecture="HunYuanMoEV1ForCausalLM",
    defaults={**hunyuan_v1_dense.SPEC.defaults, "intermediate_size": 11_008, "num_experts": 1, "moe_topk": 1},
    derived=hunyuan_v1_dense.derived,
    norms=Norms(heads=HeadNorms.ROTATED),
    mlp=experts(chosen_by_layer),
    names=hunyuan_v1_dense.SPEC.names,
)
