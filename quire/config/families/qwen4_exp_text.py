"""Qwen4-Exp, for text: Qwen3.5 MoE, whose attention is to blocks that an indexer chooses, with several hidden states of
each token, and embeddings of n-grams.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.families.qwen3_next import DEFAULTS, EXPERTS, NAMES
from quire.config.family_spec import FamilySpec, HeadNorms, Norms, experts
from quire.config.layers.experts import qwen2_experts
from quire.config.layers.gated_recurrence import gated_delta_layers
from quire.config.layers.mean_indexer import mean_indexers
from quire.config.layers.ngrams import ngram_layers
from quire.config.layers.recurrent_mixers import DeltaLayout, GatedDeltaSpec, RecurrentSpec
from quire.config.layers.streams import gated_streams

delta_layers = gated_delta_layers(DeltaLayout.BY_KIND, attention=("full_attention", "indexed_attention"))


def _in_every_layer(keys: ConfigKeys) -> Mapping[str, Any]:
    """What Qwen3-Next lets config.json choose."""
    return {"decoder_sparse_step": 1, "mlp_only_layers": None}


def _recurrent(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    _, gate = keys.find(("output_gate_type", "hidden_act"))
    if gate not in ("silu", "sigmoid"):
        keys.refuse("output_gate_type", gate, "must be silu or sigmoid")
    specs = delta_layers(keys, num_layers)
    return tuple(replace(spec, gate_activation=gate) if isinstance(spec, GatedDeltaSpec) else None for spec in specs)


SPEC = FamilySpec(
    architecture="Qwen4ExpForCausalLM",
    model_class="quire.models.variants.gated_streams:GatedStreamsForCausalLM",
    defaults={
        **DEFAULTS,
        **EXPERTS,
        "partial_rotary_factor": 1.0,
        "vocab_size": 248_320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "hc_count": 4,
        "hc_lowrank": 320,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": 20_000_000,
        "make_ngram_vocab_size_divisible_by": 128,
        "seed": 1234,
    },
    derived=_in_every_layer,
    recurrent=_recurrent,
    is_gated=True,
    means=mean_indexers,
    ngrams=ngram_layers,
    gated_streams=gated_streams,
    norms=Norms(offset=1.0, heads=HeadNorms.EACH, input=None, pre_mlp=None, final=None),
    mlp=experts(qwen2_experts),
    names=NAMES,
)
