"""generation_config.json: what of it changes sampling, and what has no effect although it has one in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What changes sampling; `max_new_tokens` is taken as max_tokens."""
WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "stop_strings"), (None, [])),
        **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids"), (None, [])),
        **dict.fromkeys(("num_beams", "num_beam_groups", "typical_p", "guidance_scale"), (None, 1)),
        **dict.fromkeys(("no_repeat_ngram_size", "min_length", "min_new_tokens"), (None, 0)),
        **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "penalty_alpha"), (None, 0)),
        **dict.fromkeys(("top_h", "exponential_decay_length_penalty", "watermarking_config", "dola_layers"), (None,)),
        "sequence_bias": (None, [], {}),
    }
)
"""Keys that change which tokens transformers generates -> their values that change none."""


def without_effect(generation: Mapping[str, Any]) -> list[str]:
    """The keys that say something, and that nothing here does."""
    return [name for name, nothing in WITHOUT_EFFECT.items() if generation.get(name) not in nothing]
