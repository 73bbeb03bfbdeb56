"""How configs of Qwen4-Exp are read, what the cache keeps, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.config.arch import ModelArch
from quire.config.layers.mixers import MeanIndexerSpec
from quire.config.layers.recurrent_mixers import GatedDeltaSpec, NGramSpec
from quire.config.memory.weights.shapes import num_parameters, query_sizes, weight_shapes, window_shares
from quire.errors import ConfigError
from quire.messages.kv import FullAttentionSpec, SlidingWindowSpec, StateSpec
from tests.checkpoints import parameters_in_transformers

INDEXER: dict[str, Any] = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 32,
}
SMALL: dict[str, Any] = {**INDEXER, "num_hidden_layers": 4, "num_experts": 16}
WITH_NGRAMS: dict[str, Any] = {**SMALL, "eos_token_id": 7, "ple_layer_ids": [3, 1], "ngram_vocab_size_base": 1000}


def arch_of(**changes: Any) -> ModelArch:
    return ModelArch.from_config({"model_type": "qwen4_exp_text", **changes}, source="config.json")


def ngrams_of(arch: ModelArch) -> list[NGramSpec]:
    return [mixer for mixer in arch.mixers if isinstance(mixer, NGramSpec)]


def test_what_a_config_leaves_out_is_as_in_transformers() -> None:
    arch = arch_of(**INDEXER)
    assert [isinstance(layer.mixers[0], GatedDeltaSpec) for layer in arch.layers] == [True, True, True, False] * 10
    assert len(arch.attentions) == 10
    spec = MeanIndexerSpec(num_heads=16, head_size=256, rate=32, num_selected=64)
    assert {mixer.means for mixer in arch.plain_attentions} == {spec}
    assert {mixer.rope.rotary_dim for mixer in arch.plain_attentions if mixer.rope} == {256}
    assert arch.gated_streams is not None
    assert (arch.gated_streams.count, arch.gated_streams.rank) == (4, 320)
    assert num_parameters(arch_of(**SMALL)) == parameters_in_transformers("qwen4_exp_text", **SMALL)


def test_ngrams_are_hashed_as_in_transformers() -> None:
    from transformers import AutoConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

    changes = {**WITH_NGRAMS, "ngram_size": 4, "heads_per_ngram": 2, "ple_embed_dim": 48, "seed": -5}
    config, found = AutoConfig.for_model("qwen4_exp_text", **changes), ngrams_of(arch_of(**changes))
    assert len(found) == 2
    for place, spec in enumerate(found):
        theirs = Qwen4ExpTextNGramEmbedding(config, 48, layer_idx=0, ple_layer_index=place)
        assert spec.head_rows == tuple(theirs.head_vocab_sizes)
        assert spec.multipliers == tuple(theirs.layer_multipliers.tolist())
        assert (spec.num_rows, spec.head_size) == tuple(theirs.ngram_embedding.weight.shape)
        assert (spec.end_id, spec.longest, spec.num_past) == (7, 4, 12)


def test_tables_of_ngrams_are_counted() -> None:
    arch = arch_of(**WITH_NGRAMS)
    assert num_parameters(arch) == parameters_in_transformers("qwen4_exp_text", **WITH_NGRAMS)
    assert weight_shapes(arch).tables == sum(spec.num_rows * 128 for spec in ngrams_of(arch))
    published = arch_of(**{**WITH_NGRAMS, "ngram_vocab_size_base": 20_000_000})
    assert all(320e6 < spec.num_rows < 321e6 for spec in ngrams_of(published))


def test_both_names_of_layers_with_attention_mean_one() -> None:
    from transformers import AutoConfig

    published = {**SMALL, "layer_types": ["linear_attention", "full_attention"] * 2}
    written = json.loads(AutoConfig.for_model("qwen4_exp_text", **published).to_json_string(use_diff=False))
    assert written["layer_types"][1] == "indexed_attention"
    assert arch_of(**published).layers == ModelArch.from_config(written, source="config.json").layers
    assert len(arch_of(**SMALL, full_attention_interval=2).attentions) == 2


def test_an_end_of_text_of_the_language_model_counts_before_that_of_the_whole() -> None:
    text = {"model_type": "qwen4_exp_text", **WITH_NGRAMS}
    whole = {"architectures": ["Qwen4ExpForConditionalGeneration"], "text_config": text, "eos_token_id": [9, 7]}
    arch = ModelArch.from_config(whole, source="config.json")
    assert arch.eos_token_ids == (9, 7)
    assert {spec.end_id for spec in ngrams_of(arch)} == {7}
    del text["eos_token_id"]
    assert {spec.end_id for spec in ngrams_of(ModelArch.from_config(whole, source="config.json"))} == {9}


def test_the_cache_keeps_means_in_pages_that_states_share() -> None:
    arch = arch_of(**{**INDEXER, "ple_layer_ids": [1], "eos_token_id": 7})
    layout = arch.kv_layout(16, "bfloat16", ops="cpu")
    assert layout.block_size % 32 == 0
    kinds = [type(group.spec) for group in layout.groups]
    assert kinds == [FullAttentionSpec, SlidingWindowSpec, *[StateSpec] * 4]
    assert [len(group.layers) for group in layout.groups] == [20, 10, 10, 10, 10, 1]
    assert layout.num_parts == 10, "each has keys and values of a layer beside its means, or a state"
    assert layout.padding < 0.1
    for group in layout.groups:
        taken = [(place.part, place.first_byte) for place in (layout.place_of_layer[layer] for layer in group.layers)]
        assert len({*taken}) == len(taken), "no two layers of a group lie in one place"
        halves = zip(taken, (size // 2 for size in group.page_sizes), strict=True)
        assert all(first + size <= layout.block_bytes // 20 for (_, first), size in halves)


def test_attention_reads_the_chosen_and_the_indexer_every_mean() -> None:
    arch, attention, scores = arch_of(**SMALL), 16 * 256, 16 * 256 // 64
    assert query_sizes(arch) == [attention, scores]
    assert window_shares(arch) == ((2048 + 31, pytest.approx(attention / (attention + scores))),)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no indexer": ({"indexer_n_heads": None}, "indexer_n_heads is missing"),
    "several keys": ({"indexer_kv_heads": 2}, "indexer_kv_heads is 2.*must be 1"),
    "keys smaller than what rotates": ({"indexer_head_dim": 128}, r"indexer_head_dim is 128.*\(256\)"),
    "parts of blocks": ({"indexer_budget": 2050}, r"indexer_budget is 2050.*indexer_compress_ratio \(32\)"),
    "another gate": ({"output_gate_type": "tanh"}, "output_gate_type is 'tanh'"),
    "another activation": ({"hidden_act": "gelu", "output_gate_type": "silu"}, "hidden_act is 'gelu'"),
    "one stream": ({"hc_count": 1}, "hc_count is 1"),
    "no rank": ({"hc_lowrank": 0}, "hc_lowrank is 0"),
    "another kind of layer": ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    "ngrams beside attention": ({"ple_layer_ids": [4]}, "ple_layer_ids.*linear_attention"),
    "ngrams behind the last layer": ({"ple_layer_ids": [5]}, "ple_layer_ids.*from 1 to 4"),
    "ngrams of one token": ({"ngram_size": 1}, "ngram_size is 1"),
    "no end of text": ({"eos_token_id": None}, ": eos_token_id is missing"),
    "heads of no equal size": ({"ple_embed_dim": 100}, "ple_embed_dim is 100.*16 heads"),
    "no seed": ({"seed": 1.5}, "seed is 1.5"),
    "tables beyond reason": (
        {
            "num_hidden_layers": 5,
            "layer_types": ["linear_attention"] * 5,
            "ple_layer_ids": [1, 2, 3, 4, 5],
            "ngram_size": 9,
            "heads_per_ngram": 32,
            "ple_embed_dim": 256,
        },
        r"ple_layer_ids is \[1, 2, 3, 4, 5\].*at most 1024 heads.*256 for each",
    ),
    "rows beyond reason": ({"ngram_vocab_size_base": 1 << 40}, "ngram_vocab_size_base"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    changes, words = WRONG[name]
    with pytest.raises(ConfigError, match=words):
        arch_of(**{**WITH_NGRAMS, **changes})


def test_a_cache_of_8_bits_is_refused() -> None:
    with pytest.raises(ConfigError, match="a KV cache of int8 has no room for the keys of indexers"):
        arch_of(**SMALL).kv_layout(16, "int8", ops="cpu")
