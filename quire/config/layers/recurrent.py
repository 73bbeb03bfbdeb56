"""Which layers of a family are recurrent, and how large their states are: the rules of families."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from quire.config.config_keys import ConfigKeys
from quire.config.layers.mixers import Factors
from quire.config.layers.recurrent_mixers import (
    GateNorm,
    Mamba2Spec,
    MambaSpec,
    RecurrentSpec,
    ShortConvSpec,
    StepNorms,
)
from quire.errors import counted

MAX_CONV_WIDTH = 64
"""Tokens; more can only be a mistake."""

RecurrentRule = Callable[[ConfigKeys, int], tuple[RecurrentSpec | None, ...]]
"""From a config and a number of layers to the recurrent mixer of each layer; None where it keeps no state."""
AttentionRule = Callable[[ConfigKeys, Sequence[RecurrentSpec | None]], tuple[bool, ...]]
"""From a config and the recurrent mixer of each layer to whether it has attention."""


def without_state(keys: ConfigKeys, recurrent: Sequence[RecurrentSpec | None]) -> tuple[bool, ...]:
    """Layers have attention that keep no state."""
    return tuple(spec is None for spec in recurrent)


def every_layer(keys: ConfigKeys, recurrent: Sequence[RecurrentSpec | None]) -> tuple[bool, ...]:
    """All layers have attention, beside a state where they keep one."""
    return (True,) * len(recurrent)


def no_recurrence(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    """Every layer has attention."""
    return (None,) * num_layers


def all_mamba(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    """Mamba: no layer has attention."""
    return (_mamba(keys),) * num_layers


def all_mamba2(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    """Mamba 2: no layer has attention."""
    num_heads, head_size = keys.count("num_heads"), keys.count("head_dim")
    _check_heads(keys, "expand", num_heads, head_size)
    spec = _mamba2(
        keys,
        num_heads=num_heads,
        head_size=head_size,
        state_size=keys.count("state_size"),
        num_groups=keys.count("n_groups"),
        conv_width=keys.count("conv_kernel", most=MAX_CONV_WIDTH),
        has_bias=keys.flag("use_bias", default=False),
        has_conv_bias=keys.flag("use_conv_bias", default=True),
    )
    return (spec,) * num_layers


def _mamba(keys: ConfigKeys) -> MambaSpec:
    """As wide as `intermediate_size` says, which transformers writes and reads; `expand` may say another width."""
    check_silu(keys)
    hidden_size = keys.count("hidden_size")
    eps = keys.find(("mixer_rms_eps",))[1]
    return MambaSpec(
        inner_size=keys.count("intermediate_size", default=keys.count("expand") * hidden_size),
        state_size=keys.count("state_size"),
        conv_width=keys.count("conv_kernel", most=MAX_CONV_WIDTH),
        time_rank=_time_rank(keys, "time_step_rank", hidden_size),
        has_bias=keys.flag("use_bias", default=False),
        has_conv_bias=keys.flag("use_conv_bias", default=True),
        norms=StepNorms.NONE if eps is None else StepNorms.PLAIN,
        norm_eps=0.0 if eps is None else keys.positive("mixer_rms_eps"),
    )


def _time_rank(keys: ConfigKeys, name: str, hidden_size: int) -> int:
    given = keys.find((name,))[1]
    return math.ceil(hidden_size / 16) if given in (None, "auto") else keys.count(name)


def jamba_layers(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    """Jamba: attention in one layer of each `attn_layer_period`, Mamba with norms in the others."""
    check_silu(keys)
    hidden_size = keys.count("hidden_size")
    spec = MambaSpec(
        inner_size=keys.count("mamba_expand") * hidden_size,
        state_size=keys.count("mamba_d_state"),
        conv_width=keys.count("mamba_d_conv", most=MAX_CONV_WIDTH),
        time_rank=_time_rank(keys, "mamba_dt_rank", hidden_size),
        has_bias=keys.flag("mamba_proj_bias", default=False),
        has_conv_bias=keys.flag("mamba_conv_bias", default=True),
        norms=StepNorms.WEIGHTED,
        norm_eps=keys.positive("rms_norm_eps", default=1e-5),
    )
    period, offset = keys.count("attn_layer_period"), offset_of(keys, "attn_layer_offset")
    return tuple(None if index % period == offset else spec for index in range(num_layers))


def zamba_layers(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    """Zamba: Mamba in every layer, whose heads derive their time steps and vectors each by itself."""
    check_silu(keys, "hidden_mamba_act")
    hidden_size, num_heads = keys.count("hidden_size"), keys.count("n_mamba_heads")
    inner_size = keys.count("mamba_expand") * hidden_size
    if inner_size % num_heads:
        keys.refuse("n_mamba_heads", num_heads, f"must divide the {inner_size} channels without remainder")
    spec = MambaSpec(
        num_parts=num_heads,
        inner_size=inner_size // num_heads,
        state_size=keys.count("mamba_d_state"),
        conv_width=keys.count("mamba_d_conv", most=MAX_CONV_WIDTH),
        time_rank=_time_rank(keys, "mamba_dt_rank", hidden_size),
        has_bias=keys.flag("mamba_proj_bias", default=False),
        has_conv_bias=keys.flag("mamba_conv_bias", default=True),
    )
    return (spec,) * num_layers


def offset_of(keys: ConfigKeys, name: str) -> int:
    """A whole number, 0 or more. Raises: ConfigError."""
    value = keys.find((name,))[1]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        keys.refuse(name, value, "must be a whole number, 0 or more")
    return value


def short_conv_layers(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    """LFM2: attention and short convolutions as `layer_types` or `full_attn_idxs` say; all attention without either."""
    if keys.raw.get("layer_types") is not None:
        return listed_short_conv(keys, num_layers)
    listed, spec = _indices(keys, "full_attn_idxs", num_layers), short_conv(keys)
    return tuple(None if listed is None or index in listed else spec for index in range(num_layers))


def listed_short_conv(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    """LFM2 MoE: attention and short convolutions as `layer_types` lists them."""
    if keys.raw.get("layer_types") is None:
        keys.refuse("layer_types", None, f"must list conv or full_attention for {counted(num_layers, 'layer')}")
    return listed_layers(keys, short_conv(keys), num_layers, ("conv",))


def short_conv(keys: ConfigKeys) -> ShortConvSpec:
    """A layer of LFM2. Raises: ConfigError."""
    bias, size = keys.flag("conv_bias", default=False), keys.count("hidden_size")
    width = keys.count("conv_L_cache", most=MAX_CONV_WIDTH)
    return ShortConvSpec(inner_size=size, conv_width=width, has_bias=bias, has_conv_bias=bias)


def hybrid_mamba2(keys: ConfigKeys) -> Mamba2Spec:
    """A Mamba 2 layer as hybrid models spell it."""
    num_heads, expand = keys.count("mamba_n_heads"), keys.count("mamba_expand")
    given = keys.find(("mamba_d_head",))[1]
    inner_size = expand * keys.count("hidden_size")
    head_size = inner_size // num_heads if given in (None, "auto") else keys.count("mamba_d_head")
    _check_heads(keys, "mamba_expand", num_heads, head_size)
    return _mamba2(
        keys,
        num_heads=num_heads,
        head_size=head_size,
        state_size=keys.count("mamba_d_state"),
        num_groups=keys.count("mamba_n_groups"),
        conv_width=keys.count("mamba_d_conv", most=MAX_CONV_WIDTH),
        has_bias=keys.flag("mamba_proj_bias", default=False),
        has_conv_bias=keys.flag("mamba_conv_bias", default=True),
    )


def nemotron_mamba2(keys: ConfigKeys) -> Mamba2Spec:
    """A Mamba 2 layer of Nemotron-H, whose heads may be of any width together."""
    check_silu(keys, "mamba_hidden_act")
    return _mamba2(
        keys,
        num_heads=keys.count("mamba_num_heads"),
        head_size=keys.count("mamba_head_dim"),
        state_size=keys.count("ssm_state_size"),
        num_groups=keys.count("n_groups", "mamba_n_groups"),
        conv_width=keys.count("conv_kernel", "mamba_d_conv", most=MAX_CONV_WIDTH),
        has_bias=keys.flag("use_bias", default=False),
        has_conv_bias=keys.flag("use_conv_bias", default=True),
    )


def zamba2_layers(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    """Zamba 2: Mamba 2 in every layer, whose norms have an epsilon that config.json does not set."""
    num_heads, inner_size = keys.count("n_mamba_heads"), keys.count("mamba_expand") * keys.count("hidden_size")
    if inner_size % num_heads:
        keys.refuse("n_mamba_heads", num_heads, f"must divide the {inner_size} channels without remainder")
    if not keys.flag("use_conv_bias", default=True):
        keys.refuse("use_conv_bias", False, "must be true: the convolutions of this family have a bias")
    spec = _mamba2(
        keys,
        num_heads=num_heads,
        head_size=inner_size // num_heads,
        state_size=keys.count("mamba_d_state"),
        num_groups=keys.count("mamba_ngroups"),
        conv_width=keys.count("mamba_d_conv", most=MAX_CONV_WIDTH),
        has_bias=keys.flag("add_bias_linear", default=False),
        has_conv_bias=True,
    )
    return (replace(spec, norm_eps=1e-5),) * num_layers


def falcon_h1_layers(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    """Falcon-H1: Mamba 2 in every layer, as wide as `mamba_d_ssm` says, with a factor for each part of its products."""
    check_silu(keys)
    num_heads = keys.count("mamba_n_heads")
    inner_size = keys.optional_count("mamba_d_ssm") or keys.count("mamba_expand") * keys.count("hidden_size")
    given = keys.find(("mamba_d_head",))[1]
    head_size = inner_size // num_heads if given in (None, "auto") else keys.count("mamba_d_head")
    if num_heads * head_size != inner_size:
        problem = f"must be the width of its {counted(num_heads, 'head')}, each of {head_size} channels"
        keys.refuse("mamba_d_ssm", inner_size, problem)
    has_bias = keys.flag("mamba_proj_bias", default=False)
    if keys.flag("projectors_bias", default=False) != has_bias:
        problem = "must be what mamba_proj_bias is: both projections of a Mamba 2 layer have a bias, or neither"
        keys.refuse("projectors_bias", not has_bias, problem)
    spec = _mamba2(
        keys,
        num_heads=num_heads,
        head_size=head_size,
        state_size=keys.count("mamba_d_state"),
        num_groups=keys.count("mamba_n_groups"),
        conv_width=keys.count("mamba_d_conv", most=MAX_CONV_WIDTH),
        has_bias=has_bias,
        has_conv_bias=keys.flag("mamba_conv_bias", default=True),
    )
    norm = GateNorm.BEFORE if keys.flag("mamba_norm_before_gate", default=True) else GateNorm.BEHIND
    factors = Factors(
        input=keys.positive("ssm_in_multiplier"),
        inner=keys.several_positive("ssm_multipliers", 5),
        output=keys.positive("ssm_out_multiplier"),
    )
    has_norm = keys.flag("mamba_rms_norm", default=False)
    return (replace(spec, norm=norm if has_norm else GateNorm.NONE, factors=factors),) * num_layers


def bamba_layers(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    """Bamba: attention in the layers that `attn_layer_indices` lists, Mamba 2 in the others."""
    listed = _indices(keys, "attn_layer_indices", num_layers) or frozenset()
    spec = hybrid_mamba2(keys)
    return tuple(None if index in listed else spec for index in range(num_layers))


def listed_mamba2(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    """Attention and Mamba 2 as `layer_types` lists them; all Mamba 2 where config.json has no such list."""
    return listed_layers(keys, hybrid_mamba2(keys), num_layers, ("mamba", "linear_attention"))


ATTENTION_TYPES = ("attention", "full_attention")
WINDOW_TYPES = (*ATTENTION_TYPES, "sliding_attention")
"""Of families some of whose layers have a window."""


def listed_layers(
    keys: ConfigKeys,
    spec: RecurrentSpec,
    num_layers: int,
    types: tuple[str, ...],
    attention: tuple[str, ...] = ATTENTION_TYPES,
) -> tuple[RecurrentSpec | None, ...]:
    """The kinds that `layer_types` lists, `types` being the names of `spec`; all are where config.json has no list.

    Raises: ConfigError.
    """
    name, listed = keys.find(("layer_types", "layers_block_type"))
    if listed is None:
        return (spec,) * num_layers
    known = (*types, *attention)
    if not isinstance(listed, list) or len(listed) != num_layers or not all(kind in known for kind in listed):
        problem = f"must list one of {', '.join(known)} per layer, for {counted(num_layers, 'layer')}"
        keys.refuse(name, listed, problem)
    return tuple(spec if kind in types else None for kind in listed)


def _indices(keys: ConfigKeys, name: str, num_layers: int) -> frozenset[int] | None:
    """The layers that a key lists; None where config.json has no such list."""
    listed = keys.raw.get(name)
    if listed is None:
        return None
    if not isinstance(listed, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in listed):
        keys.refuse(name, listed, f"must list indices of the {counted(num_layers, 'layer')}")
    return frozenset(listed)


def _mamba2(
    keys: ConfigKeys,
    *,
    num_heads: int,
    head_size: int,
    state_size: int,
    num_groups: int,
    conv_width: int,
    has_bias: bool,
    has_conv_bias: bool,
) -> Mamba2Spec:
    _check_time_steps(keys)
    if num_heads % num_groups:
        keys.refuse("n_groups", num_groups, f"must divide the {counted(num_heads, 'head')} without remainder")
    return Mamba2Spec(
        num_heads=num_heads,
        head_size=head_size,
        state_size=state_size,
        num_groups=num_groups,
        conv_width=conv_width,
        has_bias=has_bias,
        has_conv_bias=has_conv_bias,
        norm_eps=keys.positive("rms_norm_eps", default=1e-5),
    )


def _check_heads(keys: ConfigKeys, expand: str, num_heads: int, head_size: int) -> None:
    """Heads of Mamba 2 whose width is a multiple of the model's, which a key gives, and whose activation is its."""
    check_silu(keys)
    inner_size = keys.count(expand) * keys.count("hidden_size")
    if num_heads * head_size != inner_size:
        problem = f"must give heads ({num_heads} of size {head_size}) that are {inner_size} channels wide together"
        keys.refuse(expand, keys.count(expand), problem)


def check_silu(keys: ConfigKeys, name: str = "hidden_act") -> None:
    """Raises: ConfigError for an activation that recurrent layers do not compute."""
    value = keys.text(name)
    if value not in ("silu", "swish"):
        keys.refuse(name, value, "must be silu: recurrent layers compute no other activation")


def _check_time_steps(keys: ConfigKeys) -> None:
    """Bounds of time steps are applied by some of the known implementations in prompts alone; here nowhere."""
    limits = keys.raw.get("time_step_limit")
    if limits is None:
        return
    ends = (
        [end.get("__float__") if isinstance(end, dict) else end for end in limits] if isinstance(limits, list) else []
    )
    if len(ends) != 2 or ends[0] != 0 or str(ends[1]).lower() not in ("inf", "infinity"):
        keys.refuse("time_step_limit", limits, "must be 0 to infinity: time steps are not bounded otherwise")
