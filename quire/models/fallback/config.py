"""config.json as transformers' own class of its model_type reads it, in the spelling that `ModelArch` reads.

What transformers' attention interface over a paged cache cannot compute is refused here, by name, before weights are
looked at. Only classes of the installed package are used: nothing that config.json names is imported or downloaded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from quire.config.identify import names_of
from quire.config.layers.layer_kinds import LayerKind
from quire.errors import ConfigError, MissingDependency, shown

OLDEST = 5
"""Major version of transformers."""
NEVER_READ = frozenset(
    {
        "auto_map",
        "attn_implementation",
        "experts_implementation",
        "transformers_weights",
        "fusion_config",
        "kernel_config",
        "distributed_config",
        "quantization_config",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)
"""Keys of config.json that say how to run a model, not what it computes. Some of them name code of others."""
STRETCHED_BY_LENGTH = frozenset({"dynamic", "longrope"})
"""Rotations that transformers chooses by the longest sequence of a step: within the original length it does not."""


def describe(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The sizes of a model under Llama's names.

    Raises: ConfigError saying why the model cannot run; MissingDependency for a transformers that is too old.
    """
    if int(transformers.__version__.partition(".")[0]) < OLDEST:
        raise MissingDependency(
            f"quire runs other models through transformers {OLDEST} or newer, and {transformers.__version__} is "
            'installed: pip install --upgrade "quire[transformers]"'
        )
    config = read_config(raw, source)
    model_class = class_of(config, raw, source)
    _check_class(config, model_class, source)
    try:
        sizes = _sizes(config, raw)
    except Exception as error:  # of classes whose attributes raise
        _refuse(source, f"its sizes are not told ({type(error).__name__}: {' '.join(str(error).split())[:200]})")
    return {"architectures": [model_class.__name__], "model_type": raw["model_type"], **sizes}


def _sizes(config: PreTrainedConfig, raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": _max_position(config),
        "tie_word_embeddings": bool(getattr(config, "tie_word_embeddings", False)),
        "dtype": raw.get("dtype", raw.get("torch_dtype")),
        **_heads(config),
        **_windows(config),
        **_token_ids(config, raw),
    }


def read_config(raw: Mapping[str, Any], source: str) -> PreTrainedConfig:
    """What transformers makes of config.json. Raises: ConfigError."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        _refuse(source, f"transformers {transformers.__version__} has no model_type {shown(model_type)}")
    kept = {key: _number(value) for key, value in raw.items() if key not in NEVER_READ and not key.startswith("_")}
    try:
        with quiet():
            return CONFIG_MAPPING[model_type].from_dict(kept)
    except Exception as error:  # whatever a foreign class raises means the same here
        detail = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{source}: transformers refuses this config ({type(error).__name__}: {detail}). Correct the file."
        ) from error


def class_of(config: PreTrainedConfig, raw: Mapping[str, Any], source: str) -> type[PreTrainedModel]:
    """The class that transformers has for a config. Raises: ConfigError where config.json names another one."""
    named = names_of(raw)
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    classes = found if isinstance(found, tuple) else (found,)
    known = [model_class for model_class in classes if model_class is not None]
    fitting = [model_class for model_class in known if named in ([], [model_class.__name__])]
    if not fitting:
        names = ", ".join(model_class.__name__ for model_class in known)
        _refuse(
            source,
            f"{shown(', '.join(named))} is not what transformers {transformers.__version__} generates text with for "
            f"the model_type {shown(raw['model_type'])} ({f'that is {names}' if names else 'it has no such class'})",
        )
    model_class: type[PreTrainedModel] = fitting[0]
    return model_class


@contextmanager
def quiet() -> Iterator[None]:
    """Hold back transformers' bars and notes: what matters is said by quire."""
    log = logging.getLogger("transformers")
    before, had_bars = log.level, transformers.utils.logging.is_progress_bar_enabled()
    log.setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        log.setLevel(before)
        if had_bars:
            transformers.utils.logging.enable_progress_bar()


def _number(value: Any) -> Any:
    """A value of config.json, with the numbers that JSON does not have as transformers spells them."""
    if isinstance(value, list):
        return [_number(item) for item in value]
    if isinstance(value, Mapping) and value.keys() == {"__float__"}:
        return float(str(value["__float__"]))
    return value


def _check_class(config: PreTrainedConfig, model_class: type[PreTrainedModel], source: str) -> None:
    """Raises: ConfigError for what is no causal decoder over keys and values alone."""
    name = model_class.__name__
    if getattr(config, "is_encoder_decoder", False):
        _refuse(source, f"{name} is a part of an encoder and a decoder")
    if getattr(model_class, "_is_stateful", False):
        _refuse(source, f"{name} keeps a recurrent state beside keys and values")
    if not model_class.is_backend_compatible():
        _refuse(source, f"{name} does not call transformers' attention interface")
    kinds = getattr(config, "layer_types", None) or []
    other = sorted({str(kind) for kind in kinds} - {kind.value for kind in LayerKind})
    if other:
        _refuse(source, f"{name} has layers of the type {', '.join(other)}")
    if getattr(config, "num_kv_shared_layers", None):
        _refuse(source, f"layers of {name} share keys and values (num_kv_shared_layers)")


def _refuse(source: str, reason: str) -> NoReturn:
    raise ConfigError(f"{source}: {reason}, so quire cannot run it through transformers.")


def _heads(config: PreTrainedConfig) -> dict[str, int]:
    """Heads of keys and values as attention gets them. Latent ones are expanded first: one for each query head."""
    heads = config.num_attention_heads
    if hasattr(type(config), "kv_lora_rank"):  # other classes carry keys that they do not know
        size = config.qk_nope_head_dim + config.qk_rope_head_dim
        return {"num_key_value_heads": heads, "head_dim": max(size, config.v_head_dim)}
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or getattr(config, "kv_channels", None) or config.hidden_size // heads
    return {"num_key_value_heads": kv_heads, "head_dim": size}


def _windows(config: PreTrainedConfig) -> dict[str, Any]:
    """Which layers have the window, where the config says it; none otherwise, which takes memory and nothing else."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not window:
        return {"sliding_window": None}
    return {"sliding_window": window, "layer_types": list(kinds or [LayerKind.FULL] * config.num_hidden_layers)}


def _max_position(config: PreTrainedConfig) -> int | None:
    """Positions that the model was made for, and for which its rotation does not depend on the length of a step."""
    given = getattr(config, "max_position_embeddings", None)
    for rope in _ropes(config):
        if rope.get("rope_type") in STRETCHED_BY_LENGTH:
            original = rope.get("original_max_position_embeddings")
            given = original or getattr(config, "original_max_position_embeddings", None) or given
    return given


def _ropes(config: PreTrainedConfig) -> list[Mapping[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return nested or [rope]


def _token_ids(config: PreTrainedConfig, raw: Mapping[str, Any]) -> dict[str, Any]:
    """As config.json says; the class's own, if they fit the vocabulary, where it says nothing."""
    found: dict[str, Any] = {}
    for name in ("eos_token_id", "bos_token_id"):
        value = raw.get(name, getattr(config, name, None))
        listed = value if isinstance(value, list) else [value]
        fits = all(isinstance(token_id, int) and token_id < config.vocab_size for token_id in listed)
        found[name] = value if name in raw or fits else None
    return found
