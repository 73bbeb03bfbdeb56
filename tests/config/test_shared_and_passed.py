"""What Zamba, Beam, Doge, Dory and the ModernBERT decoder derive from their configs, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.arch import ModelArch
from quire.config.families import ARCHITECTURES
from quire.config.layers.layer_kinds import LayerKind
from quire.config.layers.mixers import AttentionSpec, PowerScale
from quire.errors import ConfigError
from tests.family_configs import FAMILIES


def arch_of(family: str, **changes: Any) -> ModelArch:
    raw = {**FAMILIES[family], **changes, "model_type": family, "architectures": [ARCHITECTURES[family]]}
    return ModelArch.from_config(raw, source="config.json")


def test_a_pass_through_a_layer_counts_as_one() -> None:
    arch = arch_of("dory", layer_types=["full_attention", "sliding_attention", "full_attention", "sliding_attention"])
    assert arch.sphere is not None
    assert [arch.sphere.layer_of(index) for index in range(arch.num_layers)] == [0, 1, 2, 1, 2, 1, 2, 3]
    windows = [mixer.window for mixer in arch.plain_attentions]
    assert windows == [None, 24, None, 24, None, 24, None, 24]
    assert arch.with_weights.num_layers == 4


def test_dory_counts_pairs_where_its_list_has_mlps() -> None:
    paired = {"layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"] * 2}
    paired |= {"num_hidden_layers": 8, "n_input_layers": 2, "n_recurrent_layers": 4, "n_output_layers": 2}
    assert arch_of("dory", **paired).layers == arch_of("dory").layers


def test_beam_scales_queries_that_do_not_rotate() -> None:
    scale = PowerScale(beta=0.1, period=2048, first=1, only_unrotated=True)
    for mixer, kind in zip(arch_of("beam").plain_attentions, FAMILIES["beam"]["layer_types"], strict=True):
        rotates = kind == LayerKind.SLIDING
        assert (mixer.rope is not None) == rotates
        assert mixer.position_scale == (None if rotates else scale)
    assert scale.at(0) == pytest.approx((1 + 1 / 2048) ** 0.1)
    assert scale.at(4095) == pytest.approx(3**0.1)


def test_zamba_shares_one_block_without_adapters() -> None:
    shared = [mixer.shared for mixer in arch_of("zamba").mixers if isinstance(mixer, AttentionSpec)]
    assert [(block.first, block.is_first, block.rank) for block in shared if block] == [
        (1, True, 0),
        (1, False, 0),
    ]


def test_contexts_of_doge_end_where_tokens_would_be_masked() -> None:
    assert arch_of("doge", keep_window_size=255).max_position_embeddings == 255
    assert arch_of("doge", keep_window_size=4096).max_position_embeddings == 256


def test_a_window_of_the_modernbert_decoder_is_half_of_what_sees_both_sides_unless_it_is_named() -> None:
    def windows(**changes: Any) -> list[int | None]:
        return [mixer.window for mixer in arch_of("modernbert-decoder", **changes).plain_attentions]

    assert windows() == windows(sliding_window=None) == [None, 24, 24, None]
    assert windows(sliding_window=9) == [None, 9, 9, None]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "untied blocks": ("zamba", {"tie_word_embeddings": False}, "tie_word_embeddings"),
    "attention of another width": ("zamba", {"attention_hidden_size": 64}, "attention_hidden_size"),
    "parts of channels": ("zamba", {"n_mamba_heads": 3}, "n_mamba_heads"),
    "a scan's activation": ("zamba", {"hidden_mamba_act": "gelu"}, "hidden_mamba_act"),
    "a kind without a rotation": ("beam", {"rope_parameters": {"full_attention": None}}, "rope_parameters"),
    "groups of one expert": ("beam", {"n_group": 8, "topk_group": 4}, "n_group"),
    "tokens that are masked": (
        "doge",
        {"keep_window_size": 255, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        "keep_window_size",
    ),
    "experts of later tokens": ("doge", {"is_moe": True}, "is_moe"),
    "a cache of the last loop": ("dory", {"recurrent_kv_cache_mode": "last_loop"}, "recurrent_kv_cache_mode"),
    "sections of other layers": ("dory", {"n_output_layers": 2}, "num_hidden_layers"),
    "no window": ("modernbert-decoder", {"local_attention": None}, "local_attention"),
    "a window of nothing": ("modernbert-decoder", {"local_attention": 1}, "local_attention"),
    "a window that is none": ("modernbert-decoder", {"sliding_window": -1}, "sliding_window"),
    "a rotation of both kinds": (
        "modernbert-decoder",
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "rope_scaling",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused_by_its_key(name: str) -> None:
    family, changes, key = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        arch_of(family, **changes)
    assert key in caught.value.message
