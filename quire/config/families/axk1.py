"""A.X-K1: DeepSeek V3, with a norm behind experts."""

from dataclasses import replace

from quire.config.config_keys import ConfigKeys
from quire.config.families import deepseek_v3
from quire.config.family_spec import FamilySpec, Norms, experts
from quire.config.layers.experts import ExpertsSpec, deepseek_v3_experts


def _experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Published checkpoints have no bias of the choice."""
    listed = deepseek_v3_experts(keys, num_layers)
    return tuple(spec and replace(spec, may_lack_choice_bias=True) for spec in listed)


SPEC = FamilySpec(
    architecture="AXK1ForCausalLM",
    defaults={
        **deepseek_v3.SPEC.defaults,
        "max_position_embeddings": 32_768,
        "first_k_dense_replace": 1,
        "n_routed_experts": 192,
        "bos_token_id": 163_691,
        "eos_token_id": 163_691,
    },
    derived=deepseek_v3.SPEC.derived,
    latent=deepseek_v3.SPEC.latent,
    norms=Norms(with_experts=Norms(post_mlp="post_mlp_layernorm")),
    mlp=experts(_experts),
)
