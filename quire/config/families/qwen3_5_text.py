"""Qwen3.5, for text: Qwen3-Next, with gated MLPs in place of experts."""

from quire.config.families.qwen3_next import DEFAULTS, NAMES, NORMS
from quire.config.family_spec import FamilySpec, gated
from quire.config.layers.gated_recurrence import gated_delta_layers
from quire.config.layers.recurrent_mixers import DeltaLayout

SPEC = FamilySpec(
    architecture="Qwen3_5ForCausalLM",
    defaults={**DEFAULTS, "num_key_value_heads": 4, "intermediate_size": 12_288},
    recurrent=gated_delta_layers(DeltaLayout.BY_KIND),
    is_gated=True,
    norms=NORMS,
    mlp=gated(False),
    names=NAMES,
)
