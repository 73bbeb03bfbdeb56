"""GPT-NeoX and Pythia: layer norms, a rotation of a quarter of each head, parallel attention and plain MLP."""

from collections.abc import Callable, Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, NormKind, Norms, WeightNames, plain

NEVER_READ = ("rope_theta", "partial_rotary_factor")
"""Llama's names of keys that this family has names of its own for. As in transformers, they do not count beside a
rotation's own parameters."""


def own_rotation(share: float) -> Callable[[ConfigKeys], Mapping[str, Any]]:
    """The keys of a rotation by the family's names, so that they count before `NEVER_READ`."""
    defaults = {"rotary_emb_base": 10_000.0, "rotary_pct": share}
    return lambda keys: {name: keys.raw.get(name, default) for name, default in defaults.items()}


SPEC = FamilySpec(
    architecture="GPTNeoXForCausalLM",
    spellings={
        "rms_norm_eps": "layer_norm_eps",
        "partial_rotary_factor": "rotary_pct",
        "rope_theta": "rotary_emb_base",
    },
    defaults={
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "partial_rotary_factor": 0.25,
        "attention_bias": True,
        "use_parallel_residual": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    derived=own_rotation(share=0.25),
    ignored=NEVER_READ,
    norms=Norms(kind=NormKind.LAYER, has_bias=True, final="final_layer_norm"),
    is_parallel="use_parallel_residual",
    mlp=plain(True),
    names=WeightNames(
        base="gpt_neox",
        embedding="embed_in",
        attention="attention",
        qkv=("query_key_value",),
        qkv_by_head=True,
        output="dense",
        up="dense_h_to_4h",
        down="dense_4h_to_h",
        head="embed_out",
    ),
)
