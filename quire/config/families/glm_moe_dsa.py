"""GLM-5: DeepSeek V3.2 without groups of experts, whose indexer rotates neighbours, too."""

from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.families.deepseek_v32 import DEFAULTS
from quire.config.family_spec import FamilySpec, experts
from quire.config.layers.experts import deepseek_v3_experts
from quire.config.layers.latent import indexed_attention, indexed_heads

SHARED = "must say that each layer has an indexer: quire does not let layers share the choice of another one yet"


def _derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """Heads, of a model all of whose layers have indexers. The first key that is there counts, as in transformers."""
    names = {"indexer_types": "full", "index_topk_pattern": "F"}
    given = next((name for name in names if keys.raw.get(name) is not None), None)
    if given is not None:
        kinds = keys.raw[given]
        if not isinstance(kinds, (list, str)) or {*map(str, kinds)} - {names[given], "full"}:
            keys.refuse(given, kinds, SHARED)
    elif keys.raw.get("index_topk_freq") not in (None, 0, 1):
        keys.refuse("index_topk_freq", keys.raw["index_topk_freq"], SHARED)
    return indexed_heads(keys)


SPEC = FamilySpec(
    architecture="GlmMoeDsaForCausalLM",
    defaults={
        **DEFAULTS,
        "intermediate_size": 12_288,
        "max_position_embeddings": 202_752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 32,
    },
    derived=_derived,
    latent=indexed_attention(interleaved_index=True),
    mlp=experts(deepseek_v3_experts),
)
