"""Which layers of a family have linear attention or an RG-LRU, and how large their states are."""

from __future__ import annotations

from dataclasses import replace

from quire.config.config_keys import LARGEST, SMALLEST, ConfigKeys, is_number
from quire.config.layers.recurrent import ATTENTION_TYPES, MAX_CONV_WIDTH, RecurrentRule, check_silu, listed_layers
from quire.config.layers.recurrent_mixers import DeltaLayout, GatedDeltaSpec, LightningSpec, RecurrentSpec, RgLruSpec

LINEAR = "linear_attention"
"""What `layer_types` calls a recurrent layer."""
LIGHTNING_EPS = 1e-6
"""Of the norm of lightning attention, whatever the model's others have."""


def gated_delta_layers(layout: DeltaLayout, attention: tuple[str, ...] = ATTENTION_TYPES) -> RecurrentRule:
    """Qwen3-Next: the gated delta rule in the layers that `layer_types` lists, or in all but every
    `full_attention_interval`-th. `attention` names the others there.
    """

    def layers(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
        spec = gated_delta(keys, layout)
        if keys.raw.get("layer_types") is not None:
            return listed_layers(keys, spec, num_layers, (LINEAR,), attention)
        interval = keys.count("full_attention_interval", default=4)
        return tuple(spec if number % interval else None for number in range(1, num_layers + 1))

    return layers


def gated_delta(keys: ConfigKeys, layout: DeltaLayout) -> GatedDeltaSpec:
    """A layer of the gated delta rule. Raises: ConfigError."""
    check_silu(keys)
    num_keys, num_values = keys.count("linear_num_key_heads"), keys.count("linear_num_value_heads")
    if num_values % num_keys:
        keys.refuse("linear_num_value_heads", num_values, f"must be a multiple of linear_num_key_heads ({num_keys})")
    return GatedDeltaSpec(
        num_key_heads=num_keys,
        num_value_heads=num_values,
        key_size=keys.count("linear_key_head_dim"),
        value_size=keys.count("linear_value_head_dim"),
        conv_width=keys.count("linear_conv_kernel_dim", most=MAX_CONV_WIDTH),
        layout=layout,
        norm_eps=keys.positive("rms_norm_eps"),
    )


def kimi_delta(keys: ConfigKeys) -> GatedDeltaSpec:
    """A layer of Kimi Delta Attention, whose heads have keys of their own, as wide as values. Raises: ConfigError."""
    check_silu(keys)
    num_heads, size = keys.count("linear_num_heads"), keys.count("linear_head_dim")
    return GatedDeltaSpec(
        num_key_heads=num_heads,
        num_value_heads=num_heads,
        key_size=size,
        value_size=size,
        conv_width=keys.count("linear_conv_kernel_dim", most=MAX_CONV_WIDTH),
        layout=DeltaLayout.LOW_RANK,
        norm_eps=keys.positive("rms_norm_eps"),
        by_channel=True,
        gate_activation="sigmoid",
        rank=size,
    )


def ling_delta(keys: ConfigKeys) -> GatedDeltaSpec:
    """Kimi's layer, with one product to gates and one to time steps, and channels that keep a part of their state by a
    sigmoid unless `kda_safe_gate` is false. Raises: ConfigError.
    """
    return replace(kimi_delta(keys), layout=DeltaLayout.CHANNELS, rank=None, bound=_bound(keys))


def _bound(keys: ConfigKeys) -> float | None:
    if not keys.flag("kda_safe_gate", default=True):
        return None
    _, bound = keys.find(("kda_lower_bound",))
    if not is_number(bound) or not -LARGEST <= bound <= -SMALLEST:
        keys.refuse("kda_lower_bound", bound, "must be a number below 0, or kda_safe_gate false")
    return float(bound)


def lightning_layers(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    """MiniMax: lightning attention in the layers that `layer_types` lists, or in every other from the second on."""
    check_silu(keys)
    num_heads, hidden_size = keys.count("num_attention_heads"), keys.count("hidden_size")
    size = keys.count("head_dim", default=hidden_size // num_heads)

    def spec(index: int) -> LightningSpec:
        rates = _rates(num_heads, index, num_layers)
        return LightningSpec(num_heads=num_heads, head_size=size, rates=rates, norm_eps=LIGHTNING_EPS)

    if keys.raw.get("layer_types") is None:
        return tuple(spec(index) if index % 2 else None for index in range(num_layers))
    listed = listed_layers(keys, spec(0), num_layers, (LINEAR,))
    return tuple(kind and spec(index) for index, kind in enumerate(listed))


def _rates(num_heads: int, index: int, num_layers: int) -> tuple[float, ...]:
    """Each head's is a power of the same base, as the slopes of ALiBi are; those of later layers are smaller."""
    base, factor = 2.0 ** (-8.0 / num_heads), 1.0 - index / (num_layers - 1 + 1e-5) + 1e-5
    return tuple(base ** (head + 1) * factor for head in range(num_heads))


def rg_lru_layers(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    """RecurrentGemma: the kinds that `block_types` lists, over and over."""
    _, kinds = keys.find(("block_types",))
    known = ("recurrent", "attention")
    if not isinstance(kinds, (list, tuple)) or not kinds or not all(kind in known for kind in kinds):
        keys.refuse("block_types", kinds, f"must list one or more of {' and '.join(known)}")
    width, num_blocks = keys.count("lru_width", "hidden_size"), keys.count("num_attention_heads")
    if width % num_blocks:
        keys.refuse("lru_width", width, f"must be a multiple of num_attention_heads ({num_blocks})")
    spec = RgLruSpec(width=width, num_blocks=num_blocks, conv_width=keys.count("conv1d_width", most=MAX_CONV_WIDTH))
    return tuple(spec if kinds[index % len(kinds)] == "recurrent" else None for index in range(num_layers))
