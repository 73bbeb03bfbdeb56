"""`ModelArch`: one normalised view over every dialect of config.json.

The only place that knows how families spell things and what their configs leave out. Knows no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NoReturn, TypeGuard

from quire.errors import ConfigError, counted, shown
from quire.messages.kv import (
    DTYPE_BYTES,
    SLOT_MULTIPLES,
    FullAttentionSpec,
    KVCacheSpec,
    KVLayout,
    PageSpec,
    SlidingWindowSpec,
    kv_layout,
)
from quire.utils.lazy import nearest

MAX_LAYERS = 10_000
"""More can only be a mistake, and every layer costs memory before the first weight is read."""
MAX_COUNT = 2**31 - 1
SMALLEST, LARGEST = 1e-30, 1e30
"""Of numbers above zero: what float32 can hold, with room for products."""


class RopeType(StrEnum):
    """How rotary frequencies are stretched beyond the context the model was first trained with."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding; fields that a type does not use keep their defaults."""

    type: RopeType = RopeType.DEFAULT
    theta: float = 10_000.0
    rotary_dim: int
    """Leading elements of each head that are rotated."""
    factor: float = 1.0
    original_max_position: int
    """Context length before stretching."""
    max_position: int
    """Context length after stretching."""
    attention_factor: float | None = None
    """yarn, longrope: multiplies cosines and sines; None derives it."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArch:
    """What the rest of quire knows about a model before it reads a weight."""

    source: str
    """Where the config came from, for messages."""
    architecture: str
    """The class name in `architectures`, which the model registry looks up."""
    model_type: str
    vocab_size: int
    hidden_size: int
    embedding_size: int
    """Width of the token embeddings; differs from hidden_size only where they are projected (OPT 350m)."""
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    norm_eps: float
    activation: str
    """As transformers names it."""
    tie_word_embeddings: bool
    attention_bias: bool
    """Whether the query, key and value projections have a bias."""
    output_bias: bool
    """Whether the attention's output projection has one."""
    mlp_bias: bool
    rope: RopeConfig | None
    """None for models with learned positions."""
    sliding_window: int | None
    """Tokens a query sees at most, itself included, in the layers that have a window."""
    layer_windows: tuple[int | None, ...]
    """The window of each layer."""
    attn_soft_cap: float | None
    final_soft_cap: float | None
    query_scale: float
    """Multiplies query . key."""
    dtype: str
    """float32, bfloat16 or float16: what the checkpoint says it holds."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    raw: Mapping[str, Any] = field(repr=False)
    """The config as it was read; for family-specific keys only."""

    @classmethod
    def from_config(cls, raw: Mapping[str, Any], *, source: str) -> ModelArch:
        """Normalise a parsed config.json.

        Raises: ConfigError naming the key, its value and the remedy.
        """
        keys = _Config(raw, source)
        hidden_size = keys.count("hidden_size", "n_embd", "d_model")
        num_heads = keys.count("num_attention_heads", "n_head")
        num_kv_heads = keys.count("num_key_value_heads", default=num_heads)
        head_size = _head_size(keys, hidden_size, num_heads)
        num_layers = keys.count("num_hidden_layers", "n_layer", most=MAX_LAYERS)
        max_position = keys.count("max_position_embeddings", "n_positions", "n_ctx")
        if num_heads % num_kv_heads:
            keys.refuse(
                "num_key_value_heads", num_kv_heads, f"must divide num_attention_heads ({num_heads}) without remainder"
            )
        vocab_size = keys.count("vocab_size")
        windows = _layer_windows(keys, num_layers)
        attention_bias, output_bias, mlp_bias = _biases(keys)
        _refuse_quantization(keys)
        return cls(
            source=source,
            architecture=_architecture(keys),
            model_type=keys.model_type,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            embedding_size=keys.count("word_embed_proj_dim", default=hidden_size),
            intermediate_size=keys.count("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden_size),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            max_position_embeddings=max_position,
            norm_eps=keys.positive("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", default=1e-5),
            activation=keys.text("hidden_activation", "hidden_act", "activation_function"),
            tie_word_embeddings=keys.flag("tie_word_embeddings", default=False),
            attention_bias=attention_bias,
            output_bias=output_bias,
            mlp_bias=mlp_bias,
            rope=None if keys.model_type in LEARNED_POSITIONS else _rope(keys, head_size, max_position),
            sliding_window=next((window for window in windows if window is not None), None),
            layer_windows=windows,
            attn_soft_cap=keys.optional_positive("attn_logit_softcapping"),
            final_soft_cap=keys.optional_positive("final_logit_softcapping"),
            query_scale=_query_scale(keys, head_size),
            dtype=_dtype(keys),
            eos_token_ids=_token_ids(keys, "eos_token_id", vocab_size),
            bos_token_id=next(iter(_token_ids(keys, "bos_token_id", vocab_size)), None),
            raw=raw,
        )

    def kv_cache_specs(self, block_size: int, dtype: str, *, ops: str) -> list[KVCacheSpec]:
        """What each attention layer keeps in the KV cache, in the order of the layers, where `ops` serve."""
        page = PageSpec(
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=dtype,
            block_size=block_size,
            slot_multiple=SLOT_MULTIPLES[ops],
        )
        return [
            FullAttentionSpec(page=page) if window is None else SlidingWindowSpec(page=page, window=window)
            for window in self.layer_windows
        ]

    def kv_layout(self, block_size: int, dtype: str, *, ops: str) -> KVLayout:
        """How the layers share the pages of the KV cache."""
        return kv_layout(self.kv_cache_specs(block_size, dtype, ops=ops))

    def num_parameters(self) -> int:
        """Parameters of the model, tied ones counted once; exact for the families quire ships."""
        attention = (self.num_heads + 2 * self.num_kv_heads) * self.head_size * (self.hidden_size + self.attention_bias)
        attention += self.hidden_size * (self.num_heads * self.head_size + self.output_bias)
        embedding = self.vocab_size * self.embedding_size * (1 if self.tie_word_embeddings else 2)
        if self.model_type in LEARNED_POSITIONS:
            return embedding + _learned_position_parameters(self, attention)
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        norms = NORMS_PER_LAYER.get(self.model_type, 2) * self.hidden_size
        norms += 2 * self.head_size * (self.model_type in HEAD_NORMS)
        return embedding + self.num_layers * (attention + mlp + norms) + self.hidden_size


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "opt": "OPTForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
"""model_type -> architecture, for configs that name only the former."""

LEARNED_POSITIONS = frozenset({"opt", "gpt2"})
"""Families with a table of positions instead of rotation."""
HEAD_NORMS = frozenset({"qwen3"})
NORMS_PER_LAYER = {"gemma2": 4}

# What the class of a family assumes in transformers when config.json leaves a key out.
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mistral": {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3": {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "phi3": {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 32_000,
    },
    "gemma2": {
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    "opt": {
        "activation_function": "relu",
        "enable_bias": True,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
        "bos_token_id": 2,
        "eos_token_id": 2,
    },
    "gpt2": {
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
        "n_positions": 1024,
        "bos_token_id": 50_256,
        "eos_token_id": 50_256,
    },
}
_ABSENT = object()


class _Config:
    """Typed reads from a raw config; each key may have several spellings, the first one present counts."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.raw = raw
        self.source = source
        model_type = raw.get("model_type")
        if not isinstance(model_type, str) or not model_type:
            self.refuse("model_type", model_type, "must name the model family, such as 'llama'")
        self.model_type = model_type
        self.defaults = _FAMILY_DEFAULTS.get(model_type, {})

    def refuse(self, key: str, value: object, problem: str) -> NoReturn:
        """Raise the error for one key."""
        what = "is missing" if value is None else f"is {shown(value)}"
        raise ConfigError(f"{self.source}: {key} {what}; it {problem}. Correct the file or use another model.")

    def find(self, spellings: tuple[str, ...]) -> tuple[str, Any]:
        """(spelling, value) of the first spelling that is present and not null; a missing key has the value None."""
        for source in (self.raw, self.defaults):
            for name in spellings:
                if source.get(name) is not None:
                    return name, source[name]
        return spellings[0], None

    def count(self, *spellings: str, default: int | None = None, most: int = MAX_COUNT) -> int:
        """A whole number above zero."""
        name, value = self.find(spellings)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            self.refuse(name, value, f"must be a whole number above 0, at most {most}")
        return value

    def positive(self, *spellings: str, default: float | None = None) -> float:
        """A number above zero that float32 can hold."""
        name, value = self.find(spellings)
        value = default if value is None else value
        if not _is_number(value) or not SMALLEST <= value <= LARGEST:
            self.refuse(name, value, f"must be a number above 0, from {SMALLEST:g} to {LARGEST:g}")
        return float(value)

    def optional_positive(self, name: str) -> float | None:
        """A number above zero; None where the config says null or the family has no such key."""
        value = self.raw.get(name, self.defaults.get(name))
        if value is None:
            return None
        if not _is_number(value) or not SMALLEST <= value <= LARGEST:
            self.refuse(name, value, f"must be null or a number above 0, from {SMALLEST:g} to {LARGEST:g}")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """true or false; null counts as absent."""
        _, value = self.find((name,))
        value = default if value is None else value
        if not isinstance(value, bool):
            self.refuse(name, value, "must be true or false")
        return value

    def text(self, *spellings: str) -> str:
        """A string."""
        name, value = self.find(spellings)
        if not isinstance(value, str):
            self.refuse(name, value, "must be a string")
        return value


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _architecture(keys: _Config) -> str:
    listed = keys.raw.get("architectures")
    if listed is None:
        if keys.model_type not in ARCHITECTURES:
            keys.refuse("architectures", None, "must list the model's class, such as ['LlamaForCausalLM']")
        return ARCHITECTURES[keys.model_type]
    if not isinstance(listed, list) or len(listed) != 1 or not isinstance(listed[0], str):
        keys.refuse("architectures", listed, "must list exactly one class name")
    return listed[0]


def _head_size(keys: _Config, hidden_size: int, num_heads: int) -> int:
    name, given = keys.find(("head_dim",))
    if given is not None:
        return keys.count(name)
    if hidden_size % num_heads:
        keys.refuse(
            "hidden_size",
            hidden_size,
            f"must be a multiple of num_attention_heads ({num_heads}) unless head_dim says otherwise",
        )
    return hidden_size // num_heads


def _biases(keys: _Config) -> tuple[bool, bool, bool]:
    """(query/key/value, attention output, mlp)."""
    match keys.model_type:
        case "gpt2":
            return True, True, True
        case "opt":
            enabled = keys.flag("enable_bias", default=True)
            return enabled, enabled, enabled
        case "qwen2":
            return True, False, False
        case "mistral" | "phi3":
            return False, False, False
        case _:
            attention = keys.flag("attention_bias", default=False)
            return attention, attention, keys.flag("mlp_bias", default=False)


def _query_scale(keys: _Config, head_size: int) -> float:
    if keys.model_type == "gemma2":
        return 1.0 / math.sqrt(keys.positive("query_pre_attn_scalar"))
    if keys.model_type == "gpt2" and not keys.flag("scale_attn_weights", default=True):
        return 1.0
    return 1.0 / math.sqrt(head_size)


def _layer_windows(keys: _Config, num_layers: int) -> tuple[int | None, ...]:
    window = _window(keys)
    listed = keys.raw.get("layer_types")
    match keys.model_type:
        case "mistral" | "phi3":
            return (window,) * num_layers
        case "qwen2" | "qwen3" | "gemma2" if listed is not None:
            return _windows_from_types(keys, listed, window, num_layers)
        case "qwen2" | "qwen3":
            first = keys.raw.get("max_window_layers", keys.defaults["max_window_layers"])
            if not isinstance(first, int) or isinstance(first, bool) or first < 0:
                keys.refuse("max_window_layers", first, "must be a whole number, 0 or more")
            return tuple(window if index >= first else None for index in range(num_layers))
        case "gemma2":
            return tuple(window if index % 2 == 0 else None for index in range(num_layers))
        case _:
            return (None,) * num_layers


def _window(keys: _Config) -> int | None:
    if keys.model_type in ("qwen2", "qwen3") and not keys.flag("use_sliding_window", default=False):
        return None
    value = keys.raw.get("sliding_window", keys.defaults.get("sliding_window"))
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_COUNT:
        keys.refuse("sliding_window", value, f"must be null or a whole number above 0, at most {MAX_COUNT}")
    return value


def _windows_from_types(keys: _Config, listed: object, window: int | None, num_layers: int) -> tuple[int | None, ...]:
    if not isinstance(listed, list) or len(listed) != num_layers:
        keys.refuse("layer_types", listed, f"must list one type per layer, for {counted(num_layers, 'layer')}")
    known: dict[object, int | None] = {"full_attention": None, "sliding_attention": window}
    for kind in listed:
        if not isinstance(kind, str) or kind not in known:
            keys.refuse("layer_types", listed, f"may name only {' and '.join(map(str, known))}")
    return tuple(known[kind] for kind in listed)


def _refuse_quantization(keys: _Config) -> None:
    config = keys.raw.get("quantization_config")
    if config is None:
        return
    method = config.get("quant_method", "unknown") if isinstance(config, Mapping) else config
    raise ConfigError(
        f"{keys.source}: quantization_config asks for {shown(method)}, but quire reads only float32, bfloat16 and "
        "float16 weights so far. Use the unquantised version of this model."
    )


def _dtype(keys: _Config) -> str:
    _, value = keys.find(("dtype", "torch_dtype"))
    if value is None:
        return "float32"
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if not isinstance(name, str) or name not in DTYPE_BYTES:
        keys.refuse("torch_dtype", value, f"must be one of {', '.join(DTYPE_BYTES)}")
    return name


def _token_ids(keys: _Config, name: str, vocab_size: int) -> tuple[int, ...]:
    """One id, several or none. Family defaults that do not fit the vocabulary belong to another tokenizer."""
    value = keys.raw.get(name, _ABSENT)
    if value is _ABSENT:
        default = keys.defaults.get(name)
        return () if default is None or default >= vocab_size else (default,)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in listed:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            keys.refuse(name, value, f"must be a token id from 0 to {vocab_size - 1}, a list of them, or null")
    return tuple(listed)


_ROPE_SPELLINGS = {"su": RopeType.LONGROPE, **{kind.value: kind for kind in RopeType}}


def _rope(keys: _Config, head_size: int, max_position: int) -> RopeConfig:
    given = _rope_parameters(keys)
    rope = _Config({"model_type": "rope", **given}, f"{keys.source}: rope_parameters")
    kind = _rope_type(keys, given)
    partial = rope.positive("partial_rotary_factor", default=keys.positive("partial_rotary_factor", default=1.0))
    rotary_dim = int(head_size * partial)
    if not 0 < rotary_dim <= head_size or rotary_dim % 2:
        keys.refuse("partial_rotary_factor", partial, f"must rotate an even part of each head's {head_size} elements")
    original = _original_max_position(keys, rope, kind, max_position)
    needs_factor = kind in (RopeType.LINEAR, RopeType.DYNAMIC, RopeType.LLAMA3)
    factor = rope.positive("factor", default=None if needs_factor else max_position / original)
    if factor < 1:
        rope.refuse("factor", factor, "must be 1 or more")
    return RopeConfig(
        type=kind,
        theta=rope.positive("rope_theta", default=keys.positive("rope_theta", default=10_000.0)),
        rotary_dim=rotary_dim,
        factor=factor,
        original_max_position=original,
        max_position=max_position,
        attention_factor=rope.optional_positive("attention_factor"),
        low_freq_factor=rope.positive("low_freq_factor", default=None if kind is RopeType.LLAMA3 else 1.0),
        high_freq_factor=_high_freq_factor(rope, kind),
        beta_fast=rope.positive("beta_fast", default=32.0),
        beta_slow=rope.positive("beta_slow", default=1.0),
        mscale=rope.optional_positive("mscale"),
        mscale_all_dim=rope.optional_positive("mscale_all_dim"),
        truncate=rope.flag("truncate", default=True),
        short_factor=_factors(rope, kind, "short_factor", rotary_dim),
        long_factor=_factors(rope, kind, "long_factor", rotary_dim),
    )


def _rope_parameters(keys: _Config) -> Mapping[str, Any]:
    """The parameters as transformers 5 (`rope_parameters`) or 4 (`rope_scaling`, `rope_theta`) spells them."""
    name, given = keys.find(("rope_parameters", "rope_scaling"))
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        keys.refuse(name, given, "must be null or an object with a rope_type")
    if any(isinstance(value, Mapping) for value in given.values()):
        keys.refuse(name, given, "must be one object for all layers; separate ones per layer type are not supported")
    return given


def _rope_type(keys: _Config, given: Mapping[str, Any]) -> RopeType:
    value = given.get("rope_type", given.get("type", "default"))
    if keys.model_type == "phi3" and value == "yarn":  # early Phi-3 configs said yarn and meant longrope
        return RopeType.LONGROPE
    if not isinstance(value, str) or value not in _ROPE_SPELLINGS:
        known = [kind.value for kind in RopeType]
        hint = nearest(value, known) if isinstance(value, str) else ""
        keys.refuse("rope_type", value, f"must be one of {', '.join(known)}{hint}")
    return _ROPE_SPELLINGS[value]


def _original_max_position(keys: _Config, rope: _Config, kind: RopeType, max_position: int) -> int:
    """transformers lets the top-level key win over the one among the rope parameters; Phi-3 assumes 4096."""
    if kind in (RopeType.DEFAULT, RopeType.LINEAR, RopeType.DYNAMIC):
        return max_position
    name = "original_max_position_embeddings"
    if keys.raw.get(name) is not None:
        return keys.count(name)
    return rope.count(name, default=4096 if keys.model_type == "phi3" else max_position)


def _high_freq_factor(rope: _Config, kind: RopeType) -> float:
    if kind is not RopeType.LLAMA3:
        return 4.0
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if high <= low:
        rope.refuse("high_freq_factor", high, f"must exceed low_freq_factor ({low:g})")
    return high


def _factors(rope: _Config, kind: RopeType, name: str, rotary_dim: int) -> tuple[float, ...]:
    if kind is not RopeType.LONGROPE:
        return ()
    value = rope.raw.get(name)
    valid = isinstance(value, list) and all(_is_number(item) and SMALLEST <= item <= LARGEST for item in value)
    if value is None or not valid or len(value) != rotary_dim // 2:
        rope.refuse(name, value, f"must list {rotary_dim // 2} numbers above 0, one per rotated pair")
    return tuple(float(item) for item in value)


def _learned_position_parameters(arch: ModelArch, attention: int) -> int:
    """Everything but the token embeddings of OPT and GPT-2."""
    mlp = 2 * arch.hidden_size * arch.intermediate_size + arch.mlp_bias * (arch.hidden_size + arch.intermediate_size)
    positions = (arch.max_position_embeddings + 2 * (arch.model_type == "opt")) * arch.hidden_size
    affine = arch.raw.get("layer_norm_elementwise_affine", True)
    final = arch.raw.get("do_layer_norm_before", True) and not arch.raw.get("_remove_final_layer_norm", False)
    norm = 2 * arch.hidden_size if affine else 0
    projections = 2 * arch.embedding_size * arch.hidden_size if arch.embedding_size != arch.hidden_size else 0
    return positions + projections + arch.num_layers * (attention + mlp + 2 * norm) + (norm if final else 0)
