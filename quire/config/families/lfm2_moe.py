"""LFM2 MoE: LFM2, with experts behind the first layers, chosen by sigmoids."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.families import lfm2
from quire.config.family_spec import experts
from quire.config.layers.experts import lfm2_experts
from quire.config.layers.recurrent import listed_short_conv


def _tied(keys: ConfigKeys) -> Mapping[str, Any]:
    """An older name, which counts first."""
    return {"tie_word_embeddings": keys.flag("tie_embedding", default=keys.flag("tie_word_embeddings", default=True))}


SPEC = replace(
    lfm2.SPEC,
    architecture="Lfm2MoeForCausalLM",
    defaults={
        **lfm2.SPEC.defaults,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
    },
    derived=_tied,
    recurrent=listed_short_conv,
    mlp=experts(lfm2_experts),
)
