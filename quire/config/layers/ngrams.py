"""Which layers embed n-grams, and how they hash them, as config.json of Qwen4-Exp describes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice

from quire.config.config_keys import ConfigKeys
from quire.config.layers.recurrent import MAX_CONV_WIDTH
from quire.config.layers.recurrent_mixers import NGramSpec, RecurrentSpec
from quire.utils.math import round_up

NGramRule = Callable[[ConfigKeys, Sequence[RecurrentSpec | None]], Sequence[NGramSpec | None]]
"""From a config and the recurrent mixer of each layer to what it has of n-grams."""
MAX_TOKENS = 16
"""Of an n-gram."""
MAX_HEADS = 256
"""Of a layer."""
MAX_ALL_HEADS = 1024
"""Of a model. A prime has to be found for each, which takes some 2 ms for the largest."""
MAX_ROWS = 1 << 31
"""Of a head."""
MAX_IDS = 1 << 24
"""That float32, of which states are, tells apart."""
LARGEST_PRODUCT = (1 << 63) - 1
WORD = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
LAYER_STEP = 10_007


def no_ngrams(keys: ConfigKeys, recurrent: Sequence[RecurrentSpec | None]) -> Sequence[NGramSpec | None]:
    """No layer has any."""
    return (None,) * len(recurrent)


def ngram_layers(keys: ConfigKeys, recurrent: Sequence[RecurrentSpec | None]) -> Sequence[NGramSpec | None]:
    """In the layers that `ple_layer_ids` lists, from 1 on, which are recurrent; each has a table of its own."""
    listed = _listed(keys, recurrent)
    if not listed:
        return no_ngrams(keys, recurrent)
    longest, each = keys.count("ngram_size", most=MAX_TOKENS), keys.count("heads_per_ngram", most=MAX_HEADS)
    num_heads = (longest - 1) * each
    if not 0 < num_heads <= MAX_HEADS:
        keys.refuse("ngram_size", longest, f"must be 2 or more, and have {MAX_HEADS} heads at most (heads_per_ngram)")
    size = keys.count("ple_embed_dim", "hidden_size")
    if size % num_heads:
        keys.refuse("ple_embed_dim", size, f"must be a multiple of the {num_heads} heads of n-grams")
    if num_heads * len(listed) > MAX_ALL_HEADS:
        problem = f"must give at most {MAX_ALL_HEADS} heads of n-grams in all layers ({num_heads} for each)"
        keys.refuse("ple_layer_ids", listed, problem)
    rows = _primes(keys.count("ngram_vocab_size_base", most=MAX_ROWS), num_heads * len(listed))
    specs: list[NGramSpec | None] = [None] * len(recurrent)
    for place, number in enumerate(listed):
        own = rows[place * num_heads : (place + 1) * num_heads]
        specs[number - 1] = NGramSpec(
            num_streams=keys.count("hc_count"),
            stream_size=keys.count("hidden_size"),
            longest=longest,
            head_rows=own,
            num_rows=round_up(sum(own), keys.count("make_ngram_vocab_size_divisible_by")),
            head_size=size // num_heads,
            multipliers=_multipliers(keys, place, longest),
            end_id=_end_id(keys),
            conv_width=keys.count("ple_conv_kernel_size", most=MAX_CONV_WIDTH),
        )
    return specs


def _listed(keys: ConfigKeys, recurrent: Sequence[RecurrentSpec | None]) -> list[int]:
    listed, most = keys.raw.get("ple_layer_ids"), len(recurrent)
    if listed is None:
        return []
    if not isinstance(listed, list) or not all(_is_whole(number) and 0 < number <= most for number in listed):
        keys.refuse("ple_layer_ids", listed, f"must list numbers of layers, from 1 to {most}")
    if not all(recurrent[number - 1] for number in listed):
        keys.refuse("ple_layer_ids", listed, "must list layers of linear_attention alone")
    return sorted(set(listed))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _end_id(keys: ConfigKeys) -> int:
    """The first end of text, that of the language model where a whole model has others."""
    _, value = keys.find(("text_eos_token_id", "eos_token_id"))
    first = value[0] if isinstance(value, list) and value else value
    if not isinstance(first, int) or isinstance(first, bool) or not 0 <= first < keys.count("vocab_size", most=MAX_IDS):
        keys.refuse("eos_token_id", value, "must be a token id where layers embed n-grams, which end there")
    return first


def _multipliers(keys: ConfigKeys, place: int, longest: int) -> tuple[int, ...]:
    """Odd numbers that the seed gives, whose products with any token are below 2^63 (splitmix64)."""
    _, seed = keys.find(("seed",))
    if not isinstance(seed, int) or isinstance(seed, bool):
        keys.refuse("seed", seed, "must be a whole number")
    bound = max(1, LARGEST_PRODUCT // keys.count("vocab_size") // 2)
    first = seed + LAYER_STEP * place
    return tuple(2 * (_mixed(first + STEP * (index + 1)) % bound) + 1 for index in range(longest))


def _mixed(value: int) -> int:
    value = (value + STEP) & WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD
    return value ^ (value >> 31)


@lru_cache(maxsize=8)
def _primes(least: int, count: int) -> tuple[int, ...]:
    """The first so many."""
    return tuple(islice(_primes_from(least), count))


def _primes_from(least: int) -> Iterator[int]:
    number = max(least, 2)
    while True:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            yield number
        number += 1
