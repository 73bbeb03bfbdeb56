"""Aria, the text model: Llama, with a mixture of experts, and shared experts that are one wider expert."""

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, WeightNames, experts
from quire.config.layers.experts import ExpertsSpec, Routing, Scores, num_chosen_of, num_experts_of, whole_number
from quire.config.layers.recurrent import check_silu


def _experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """In every layer, weighed by a softmax over those that were chosen."""
    check_silu(keys)
    count, size = num_experts_of(keys, "moe_num_experts"), keys.count("intermediate_size")
    routing = Routing(num_chosen=num_chosen_of(keys, count, "moe_topk"), scores=Scores.LOGITS)
    shared_size = whole_number(keys, "moe_num_shared_experts") * size
    return (ExpertsSpec(num_experts=count, size=size, routing=routing, shared_size=shared_size),) * num_layers


SPEC = FamilySpec(
    architecture="AriaTextForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "intermediate_size": 4096,
        "moe_num_experts": 8,
        "moe_topk": 2,
        "moe_num_shared_experts": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    mlp=experts(_experts, "mlp_bias"),
    names=WeightNames(experts_transposed=True),
)
