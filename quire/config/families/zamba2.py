"""Zamba 2: layers of Mamba 2, some of which read attention and an MLP that they share, with adapters of their own."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, Norms, Scales, WeightNames, no_mlp
from quire.config.layers.layer_kinds import LayerKind
from quire.config.layers.mixers import SharedBlock
from quire.config.layers.recurrent import zamba2_layers
from quire.config.layers.recurrent_mixers import RecurrentSpec

KINDS = {"mamba": False, "linear_attention": False, "hybrid": True}
"""Names in `layers_block_type` -> whether such a layer reads a shared block."""
DEFAULT_KINDS = (
    ["mamba"]
    + (["mamba"] * 5 + ["hybrid"]) * 7
    + ["mamba"] * 4
    + ["hybrid"]
    + ["mamba"] * 3
    + ["hybrid"]
    + ["mamba"] * 2
)


def are_hybrid(keys: ConfigKeys) -> tuple[bool, ...]:
    """Whether each layer reads a shared block. Raises: ConfigError."""
    name, listed = keys.find(("layers_block_type", "layer_types"))
    if not isinstance(listed, list) or not listed or not all(str(kind) in KINDS for kind in listed):
        keys.refuse(name, listed, f"must name the kind of each layer, one of {', '.join(KINDS)}")
    kinds = tuple(KINDS[kind] for kind in listed)
    _check_ids(keys, name, [index for index, is_hybrid in enumerate(kinds) if is_hybrid])
    return kinds


def _check_ids(keys: ConfigKeys, name: str, hybrid: list[int]) -> None:
    """Refuse a list of the layers that read a shared block which is not that of their kinds."""
    given = keys.raw.get("hybrid_layer_ids")
    if given not in (None, hybrid):
        keys.refuse("hybrid_layer_ids", given, f"must be {hybrid}, the hybrid layers of {name} in their order")


def _derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """transformers counts the kinds, whatever `num_hidden_layers` says. Attention is twice as wide as the model."""
    num_heads, width = keys.count("num_attention_heads"), 2 * keys.count("hidden_size")
    if width % num_heads:
        keys.refuse("num_attention_heads", num_heads, f"must divide twice hidden_size ({width}) without remainder")
    check_tied(keys)
    num_kv_heads = keys.count("num_key_value_heads", default=num_heads)
    if keys.flag("use_shared_attention_adapter", default=False) and num_kv_heads != num_heads:
        keys.refuse(
            "num_key_value_heads", num_kv_heads, f"must be {num_heads}: adapters are as wide as all query heads"
        )
    return {"num_hidden_layers": len(are_hybrid(keys)), "head_dim": width // num_heads}


def check_tied(keys: ConfigKeys) -> None:
    """Raises: ConfigError for a checkpoint whose layers have blocks of their own."""
    if not keys.flag("tie_word_embeddings", default=True):
        keys.refuse("tie_word_embeddings", False, "must be true: without it, transformers shares no blocks either")


def _attends(keys: ConfigKeys, recurrent: Sequence[RecurrentSpec | None]) -> tuple[bool, ...]:
    return are_hybrid(keys)


def _shared(keys: ConfigKeys, num_layers: int) -> tuple[SharedBlock | None, ...]:
    """Layers take the blocks in turn."""
    hybrid = [index for index, is_hybrid in enumerate(are_hybrid(keys)) if is_hybrid]
    num_blocks = keys.count("num_mem_blocks")
    blocks = {
        index: SharedBlock(
            name="shared_transformer",
            first=hybrid[number % num_blocks],
            is_first=number < num_blocks,
            number=number,
            intermediate_size=keys.count("intermediate_size", default=4 * keys.count("hidden_size")),
            has_bias=keys.flag("add_bias_linear", default=False),
            rank=keys.count("adapter_rank"),
            adapts_attention=keys.flag("use_shared_attention_adapter", default=False),
        )
        for number, index in enumerate(hybrid)
    }
    return tuple(blocks.get(index) for index in range(num_layers))


def _rotated(keys: ConfigKeys, kinds: tuple[LayerKind, ...]) -> tuple[bool, ...]:
    return (keys.flag("use_mem_rope", default=False),) * len(kinds)


def _scales(keys: ConfigKeys) -> Scales:
    return Scales(query=math.sqrt(keys.count("num_attention_heads") / keys.count("hidden_size")))


SPEC = FamilySpec(
    architecture="Zamba2ForCausalLM",
    model_class="quire.models.variants.zamba2:ZambaForCausalLM",
    defaults={
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-5,
        "vocab_size": 32_000,
        "hidden_size": 2560,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "layers_block_type": DEFAULT_KINDS,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
        "num_mem_blocks": 1,
        "adapter_rank": 128,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    derived=_derived,
    refused={"use_long_context": "does not stretch the rotation of this family. Set it to false."},
    recurrent=zamba2_layers,
    attends=_attends,
    shared=_shared,
    rotated=_rotated,
    norms=Norms(final="final_layernorm"),
    mlp=no_mlp,
    attention_bias=False,
    output_bias=False,
    scales=_scales,
    names=WeightNames(gate_up=("gate_up_proj",)),
)
