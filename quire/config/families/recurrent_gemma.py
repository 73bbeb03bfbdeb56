"""RecurrentGemma: RG-LRUs in most layers, attention with a window in the others."""

import math
import struct
from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, Norms, Scales, WeightNames, gated
from quire.config.layers.gated_recurrence import rg_lru_layers
from quire.config.layers.layer_kinds import all_sliding


def _sizes(keys: ConfigKeys) -> Mapping[str, Any]:
    """`intermediate_size` counts the gate's features, too."""
    return {"intermediate_size": keys.count("intermediate_size") // 2}


def _scales(keys: ConfigKeys) -> Scales:
    """The factor of embeddings is a bfloat16 number, whatever the dtype of the model."""
    return Scales(embedding=_to_bfloat16(math.sqrt(keys.count("hidden_size"))))


def _to_bfloat16(value: float) -> float:
    """The nearest, the even one of two: half of its last bit is added, and what stands below is cut off."""
    bits: int = struct.unpack("I", struct.pack("f", value))[0]
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & ~0xFFFF
    nearest: float = struct.unpack("f", struct.pack("I", rounded))[0]
    return nearest


SPEC = FamilySpec(
    architecture="RecurrentGemmaForCausalLM",
    spellings={
        "hidden_act": "hidden_activation",
        "sliding_window": "attention_window_size",
        "final_logit_softcapping": "logits_soft_cap",
    },
    defaults={
        "hidden_act": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,  # of its training; config.json says nothing
        "partial_rotary_factor": 0.5,
        "attention_window_size": 2048,
        "logits_soft_cap": 30.0,
        "conv1d_width": 4,
        "block_types": ("recurrent", "recurrent", "attention"),
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    derived=_sizes,
    recurrent=rg_lru_layers,
    layer_kinds=all_sliding,
    norms=Norms(offset=1.0, input="temporal_pre_norm", pre_mlp="channel_pre_norm", final="final_norm"),
    mlp=gated(True),
    output_bias=True,
    scales=_scales,
    names=WeightNames(attention="temporal_block", recurrent="temporal_block", mlp="mlp_block"),
)
