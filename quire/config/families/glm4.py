"""GLM-4 of 2025 (0414) and GLM-Z1, the dense text models: GLM, with norms on both sides of attention and MLP."""

from quire.config.families.glm import DEFAULTS, NAMES
from quire.config.family_spec import FamilySpec, Norms, gated

SPEC = FamilySpec(
    architecture="Glm4ForCausalLM",
    defaults=DEFAULTS,
    rotates_pairs=True,
    norms=Norms(post_attention="post_self_attn_layernorm", post_mlp="post_mlp_layernorm"),
    output_bias=False,
    mlp=gated(),
    names=NAMES,
)
