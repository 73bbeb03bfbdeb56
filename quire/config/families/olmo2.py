"""OLMo 2: Llama, with its norms behind attention and MLP, and one norm over all heads of queries, and of keys."""

from quire.config.families.olmo import DEFAULTS
from quire.config.family_spec import FamilySpec, HeadNorms, Norms, gated

NORMS = Norms(
    input=None,
    post_attention="post_attention_layernorm",
    pre_mlp=None,
    post_mlp="post_feedforward_layernorm",
    heads=HeadNorms.WHOLE,
)

SPEC = FamilySpec(
    architecture="Olmo2ForCausalLM", defaults={**DEFAULTS, "rms_norm_eps": 1e-5}, norms=NORMS, mlp=gated()
)
