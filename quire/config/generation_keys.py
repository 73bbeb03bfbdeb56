"""generation_config.json: what of it changes sampling, and what has no effect although it has one in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What changes sampling, under the name that SamplingParams has for it, too."""
OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "stop_strings": "stop"}
)
"""What does so under a name that SamplingParams has not."""
WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids"), (None, [])),
        **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids"), (None, [])),
        **dict.fromkeys(("num_beams", "num_beam_groups", "typical_p", "guidance_scale"), (None, 1)),
        **dict.fromkeys(("no_repeat_ngram_size", "min_length"), (None, 0)),
        **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "penalty_alpha"), (None, 0)),
        **dict.fromkeys(("top_h", "exponential_decay_length_penalty", "watermarking_config", "dola_layers"), (None,)),
        "sequence_bias": (None, [], {}),
    }
)
"""Keys that change which tokens transformers generates -> their values that change none."""


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """What a generation_config.json says of sampling, as fields of SamplingParams."""
    fields = {**dict(zip(SAMPLING_KEYS, SAMPLING_KEYS, strict=True)), **OTHER_NAMES}
    return {field: generation[key] for key, field in fields.items() if generation.get(key) not in (None, [])}


def over_defaults(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request over the model's defaults, of which max_tokens counts where the request has None.

    The model's min_tokens gives way to a lower max_tokens, as in transformers, and its stop to a request without text.
    """
    values = {**defaults, **given}
    if given.get("max_tokens") is None and "max_tokens" in defaults:
        values["max_tokens"] = defaults["max_tokens"]
    if "min_tokens" not in given and "min_tokens" in defaults and values.get("max_tokens") is not None:
        values["min_tokens"] = min(defaults["min_tokens"], values["max_tokens"])
    if "stop" not in given and values.get("detokenize") is False:
        values.pop("stop", None)
    return values


def without_effect(generation: Mapping[str, Any]) -> list[str]:
    """The keys that say something, and that nothing here does."""
    return [name for name, nothing in WITHOUT_EFFECT.items() if generation.get(name) not in nothing]
