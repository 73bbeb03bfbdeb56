"""Qwen3.5 MoE, for text: Qwen3.5, with a mixture of experts in every layer."""

from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.families.qwen3_next import DEFAULTS, EXPERTS, NAMES, NORMS
from quire.config.family_spec import FamilySpec, experts
from quire.config.layers.experts import qwen2_experts
from quire.config.layers.gated_recurrence import gated_delta_layers
from quire.config.layers.recurrent_mixers import DeltaLayout


def _in_every_layer(keys: ConfigKeys) -> Mapping[str, Any]:
    """What Qwen3-Next lets config.json choose."""
    return {"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": True}


SPEC = FamilySpec(
    architecture="Qwen3_5MoeForCausalLM",
    defaults={**DEFAULTS, **EXPERTS, "num_experts_per_tok": 8, "num_experts": 256},
    derived=_in_every_layer,
    recurrent=gated_delta_layers(DeltaLayout.BY_KIND),
    is_gated=True,
    norms=NORMS,
    mlp=experts(qwen2_experts),
    names=NAMES,
)
