"""OLMo 3: OLMo 2, with windows on three layers of four; only layers without one stretch their rotation."""

from quire.config.families.olmo import DEFAULTS
from quire.config.families.olmo2 import NORMS
from quire.config.family_spec import FamilySpec, gated
from quire.config.layers.layer_kinds import full_every, listed_or

SPEC = FamilySpec(
    architecture="Olmo3ForCausalLM",
    defaults={**DEFAULTS, "rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500_000.0},
    layer_kinds=listed_or(full_every(4)),
    sliding_theta="rope_theta",
    norms=NORMS,
    mlp=gated(),
)
