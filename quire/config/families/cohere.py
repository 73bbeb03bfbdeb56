"""Command R: parallel attention and MLP behind one layer norm without bias; rotates neighbours, scales logits."""

from dataclasses import replace

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, HeadNorms, NormKind, Norms, Scales, gated

SPELLINGS = {"rms_norm_eps": "layer_norm_eps"}
DEFAULTS = {
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "bos_token_id": 5,
    "eos_token_id": 255_001,
}
NORMS = Norms(kind=NormKind.LAYER, pre_mlp=None)


def scales(keys: ConfigKeys) -> Scales:
    """Of logits."""
    return Scales(logits=keys.positive("logit_scale"))


def norms(keys: ConfigKeys) -> Norms:
    """Those of heads where the config says so (Command R+)."""
    return replace(NORMS, heads=HeadNorms.LAYER_OWN) if keys.flag("use_qk_norm", default=False) else NORMS


SPEC = FamilySpec(
    architecture="CohereForCausalLM",
    spellings=SPELLINGS,
    defaults=DEFAULTS,
    rotates_pairs=True,
    norms=norms,
    is_parallel=True,
    mlp=gated(),
    scales=scales,
)
