"""North Micro Vision (text): Command R, whose kinds of layers have rotations of their own, or none."""

from collections.abc import Mapping

from quire.config.config_keys import ConfigKeys
from quire.config.families.cohere import NORMS, SPELLINGS, scales
from quire.config.family_spec import FamilySpec, gated
from quire.config.layers.layer_kinds import LayerKind, all_full, listed_or


def _rotated(keys: ConfigKeys, kinds: tuple[LayerKind, ...]) -> tuple[bool, ...]:
    """Layers of a kind that has a rotation; all where a config gives none."""
    given = keys.raw.get("rope_parameters")
    if given in (None, {}):
        return (True,) * len(kinds)
    if not isinstance(given, Mapping) or not {*kinds} <= {*given}:
        keys.refuse("rope_parameters", given, f"must have an object or null for {' and '.join(sorted({*kinds}))}")
    return tuple(given[kind] is not None for kind in kinds)


SPEC = FamilySpec(
    architecture="CohereCompassForCausalLM",
    spellings=SPELLINGS,
    defaults={
        "hidden_act": "silu",
        "vocab_size": 256_000,
        "hidden_size": 8192,
        "intermediate_size": 22_528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "max_position_embeddings": 8192,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": 4096,
        "logit_scale": 1.0,
        "tie_word_embeddings": True,
        "bos_token_id": 5,
        "eos_token_id": 255_001,
    },
    refused={"rope_scaling": "reads the rotations of this family from rope_parameters. Correct the file."},
    layer_kinds=listed_or(all_full),
    rotated=_rotated,
    sliding_theta="rope_local_base_freq",
    norms=NORMS,
    is_parallel=True,
    mlp=gated(),
    scales=scales,
)
