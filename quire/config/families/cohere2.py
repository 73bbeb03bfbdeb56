"""Command R 7B and Command A: Command R, with windows on most layers; only those rotate queries and keys."""

from quire.config.config_keys import ConfigKeys
from quire.config.families.cohere import DEFAULTS, NORMS, SPELLINGS, scales
from quire.config.family_spec import FamilySpec, gated
from quire.config.layers.layer_kinds import LayerKind, full_by_pattern, listed_or


def rotated(keys: ConfigKeys, kinds: tuple[LayerKind, ...]) -> tuple[bool, ...]:
    """Layers with a window."""
    has_window = keys.optional_count("sliding_window") is not None
    return tuple(has_window and kind is LayerKind.SLIDING for kind in kinds)


SPEC = FamilySpec(
    architecture="Cohere2ForCausalLM",
    spellings=SPELLINGS,
    defaults={**DEFAULTS, "rope_theta": 10_000.0, "sliding_window": 4096, "sliding_window_pattern": 4},
    layer_kinds=listed_or(full_by_pattern),
    rotated=rotated,
    rotates_pairs=True,
    norms=NORMS,
    is_parallel=True,
    mlp=gated(),
    scales=scales,
)
