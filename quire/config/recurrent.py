"""Which layers of a family are recurrent, and how large their states are: the rules of families."""

from __future__ import annotations

import math
from collections.abc import Callable

from quire.config.config_keys import ConfigKeys
from quire.config.mixers import Mamba2Spec, MambaSpec, RecurrentSpec, ShortConvSpec, StepNorms
from quire.errors import counted

MAX_CONV_WIDTH = 64
"""Tokens; more can only be a mistake."""

RecurrentRule = Callable[[ConfigKeys, int], tuple[RecurrentSpec | None, ...]]
"""From a config and a number of layers to the recurrent mixer of each layer; None for attention."""


def no_recurrence(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    """Every layer has attention."""
    return (None,) * num_layers


def all_mamba(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    """Mamba: no layer has attention."""
    return (_mamba(keys),) * num_layers


def all_mamba2(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    """Mamba 2: no layer has attention."""
    spec = _mamba2(
        keys,
        num_heads=keys.count("num_heads"),
        head_size=keys.count("head_dim"),
        state_size=keys.count("state_size"),
        num_groups=keys.count("n_groups"),
        conv_width=keys.count("conv_kernel", most=MAX_CONV_WIDTH),
        expand=keys.count("expand"),
        has_bias=keys.flag("use_bias", default=False),
        has_conv_bias=keys.flag("use_conv_bias", default=True),
    )
    return (spec,) * num_layers


def _mamba(keys: ConfigKeys) -> MambaSpec:
    check_silu(keys)
    hidden_size = keys.count("hidden_size")
    eps = keys.find(("mixer_rms_eps",))[1]
    return MambaSpec(
        inner_size=keys.count("expand") * hidden_size,
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


def offset_of(keys: ConfigKeys, name: str) -> int:
    """A whole number, 0 or more. Raises: ConfigError."""
    value = keys.find((name,))[1]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        keys.refuse(name, value, "must be a whole number, 0 or more")
    return value


def short_conv_layers(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    """LFM2: attention and short convolutions as `layer_types` or `full_attn_idxs` say; all attention without either."""
    bias, size = keys.flag("conv_bias", default=False), keys.count("hidden_size")
    width = keys.count("conv_L_cache", most=MAX_CONV_WIDTH)
    spec = ShortConvSpec(inner_size=size, conv_width=width, has_bias=bias, has_conv_bias=bias)
    if keys.raw.get("layer_types") is not None:
        return listed_layers(keys, spec, num_layers, ("conv",))
    listed = _indices(keys, "full_attn_idxs", num_layers)
    return tuple(None if listed is None or index in listed else spec for index in range(num_layers))


def hybrid_mamba2(keys: ConfigKeys) -> Mamba2Spec:
    """A Mamba 2 layer as hybrid models spell it."""
    num_heads, expand = keys.count("mamba_n_heads"), keys.count("mamba_expand")
    given = keys.find(("mamba_d_head",))[1]
    inner_size = expand * keys.count("hidden_size")
    return _mamba2(
        keys,
        num_heads=num_heads,
        head_size=inner_size // num_heads if given in (None, "auto") else keys.count("mamba_d_head"),
        state_size=keys.count("mamba_d_state"),
        num_groups=keys.count("mamba_n_groups"),
        conv_width=keys.count("mamba_d_conv", most=MAX_CONV_WIDTH),
        expand=expand,
        has_bias=keys.flag("mamba_proj_bias", default=False),
        has_conv_bias=keys.flag("mamba_conv_bias", default=True),
    )


def bamba_layers(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    """Bamba: attention in the layers that `attn_layer_indices` lists, Mamba 2 in the others."""
    listed = _indices(keys, "attn_layer_indices", num_layers) or frozenset()
    spec = hybrid_mamba2(keys)
    return tuple(None if index in listed else spec for index in range(num_layers))


def listed_mamba2(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    """Attention and Mamba 2 as `layer_types` lists them; all Mamba 2 where config.json has no such list."""
    return listed_layers(keys, hybrid_mamba2(keys), num_layers, ("mamba", "linear_attention"))


ATTENTION_TYPES = ("attention", "full_attention")


def listed_layers(
    keys: ConfigKeys, spec: RecurrentSpec, num_layers: int, types: tuple[str, ...]
) -> tuple[RecurrentSpec | None, ...]:
    """The kinds that `layer_types` lists, `types` being the names of `spec`; all are where config.json has no list.

    Raises: ConfigError.
    """
    name, listed = keys.find(("layer_types", "layers_block_type"))
    if listed is None:
        return (spec,) * num_layers
    known = (*types, *ATTENTION_TYPES)
    if not isinstance(listed, list) or len(listed) != num_layers or not all(kind in known for kind in listed):
        problem = f"must list one of {', '.join(known)} per layer, for {counted(num_layers, 'layer')}"
        keys.refuse(name, listed, problem)
    return tuple(None if kind in ATTENTION_TYPES else spec for kind in listed)


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
    expand: int,
    has_bias: bool,
    has_conv_bias: bool,
) -> Mamba2Spec:
    check_silu(keys)
    _check_time_steps(keys)
    inner_size = expand * keys.count("hidden_size")
    if num_heads * head_size != inner_size:
        problem = f"must give heads ({num_heads} of size {head_size}) that are {inner_size} channels wide together"
        keys.refuse("expand", expand, problem)
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


def check_silu(keys: ConfigKeys) -> None:
    """Raises: ConfigError for an activation that recurrent layers do not compute."""
    name = keys.text("hidden_act")
    if name not in ("silu", "swish"):
        keys.refuse("hidden_act", name, "must be silu: recurrent layers compute no other activation")


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
