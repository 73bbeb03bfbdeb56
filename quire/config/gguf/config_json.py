"""What config.json and generation_config.json would say about a GGUF model."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quire.config.arch import ModelArch
from quire.config.families import ARCHITECTURES as CLASS_OF
from quire.config.families import family_of
from quire.config.family_spec import FamilySpec
from quire.config.gguf.architectures import (
    COMMON,
    GATING,
    HARMLESS,
    ONLY,
    SOFTMAX,
    GgufArchitecture,
    architecture_of,
    rotary_share,
)
from quire.config.gguf.cursor import Value
from quire.config.gguf.derived import yarn
from quire.config.gguf.end_tokens import end_token_ids
from quire.config.gguf.files import GgufModel, read_gguf
from quire.config.gguf.metadata import GgufKeys
from quire.config.gguf.tensor_types import PLAIN
from quire.config.layers.layer_kinds import LayerKind
from quire.config.layers.rope import SHARE, yarn_scale
from quire.errors import CheckpointError, shown
from quire.log import get_logger

log = get_logger(__name__)

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
ROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
ROPE_DIVISORS = "rope_freqs.weight"
CONFIGURING = frozenset({ROPE_DIVISORS, *ROPE_FACTORS})
"""Tensors that belong to the configuration."""
_FLOATS = {"F32": "float32", "F16": "float16"}
ROPE_THETA = 10_000.0
OLD_FACTOR = "rope.scale_linear"
OF_WINDOWS: Mapping[str, str] = MappingProxyType(
    {
        "rope.freq_base_swa": "rope.freq_base",
        "rope.dimension_count_swa": "rope.dimension_count",
        "attention.key_length_swa": "attention.key_length",
        "attention.value_length_swa": "attention.value_length",
    }
)
"""What layers with a window may have of their own -> the same of the others."""
MAX_VECTOR_BYTES = 1 << 16


def gguf_config(path: Path) -> dict[str, Any]:
    """config.json of the model in a file.

    Raises: CheckpointError for a damaged file; ConfigError for a model that is not read from GGUF.
    """
    return _config(GgufKeys(read_gguf(path)))


def _config(keys: GgufKeys) -> dict[str, Any]:
    model, architecture = keys.model, architecture_of(keys)
    name = CLASS_OF[architecture.model_type]
    family = family_of(name, architecture.model_type)
    head_size = _head_size(keys)
    config = {
        "architectures": [name],
        "model_type": architecture.model_type,
        **_copied(keys, architecture),
        "head_dim": head_size,
        "vocab_size": _vocab_size(keys),
        "tie_word_embeddings": HEAD not in model.tensors,
        "torch_dtype": _dtype(model),
        "bos_token_id": keys.token_id("bos"),
        "eos_token_id": end_token_ids(keys),
        **_quantization(model),
        **_biases(model, family),
        **_windows(keys),
        **({} if head_size is None else _rope(keys, head_size)),
        **architecture.fixed,
        **architecture.derived(keys),
    }
    _check_windows(keys, config)
    _check_only(keys, architecture)
    if config.get(SHARE, 1.0) != 1 and SHARE not in family.defaults:
        keys.refuse(keys.name_of("rope.dimension_count"), f"must be that of a head, {head_size}")
    return config


def gguf_generation_config(path: Path) -> dict[str, Any]:
    """generation_config.json of the model in a file: the tokens that end a text. Raises: CheckpointError."""
    return {"eos_token_id": end_token_ids(GgufKeys(read_gguf(path)))}


def _copied(keys: GgufKeys, architecture: GgufArchitecture) -> dict[str, Any]:
    """The keys that differ in their names alone. Where they are optional, llama.cpp's defaults count."""
    for required in ("block_count", "context_length", "embedding_length"):
        keys.count(required)
    if not any(keys.name_of(f"attention.layer_norm_{kind}epsilon") in keys.metadata for kind in ("rms_", "")):
        keys.refuse(keys.name_of("attention.layer_norm_rms_epsilon"), "must be a number above 0")
    found = {name: keys.of_model(key) for key, name in {**COMMON, **architecture.keys}.items()}
    config = {name: value for name, value in found.items() if value is not None}
    if config.get("intermediate_size") == 0:  # how files say that no layer has an MLP
        del config["intermediate_size"]
    heads = keys.count("attention.head_count") if _attends(keys) else None
    return {"sliding_window": None, "num_key_value_heads": heads, "rope_theta": ROPE_THETA, **config}


def _attends(keys: GgufKeys) -> bool:
    """Whether any layer has attention."""
    return keys.of_model("attention.head_count") != 0


def _head_size(keys: GgufKeys) -> int | None:
    """Of keys, which values share where they are kept by head; None for models without attention."""
    if not _attends(keys):
        return None
    width, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    if keys.of_model("attention.key_length") is None and width % heads:
        keys.refuse(keys.name_of("attention.head_count"), f"must divide the width of {width}")
    size = width // heads if keys.of_model("attention.key_length") is None else keys.count("attention.key_length")
    is_latent = keys.of_model("attention.kv_lora_rank") is not None
    if not is_latent and keys.of_model("attention.value_length") not in (None, size):
        keys.refuse(keys.name_of("attention.value_length"), f"must be that of keys, {size}")
    return size


def _vocab_size(keys: GgufKeys) -> int:
    """Rows of the embedding. A tokenizer may have fewer tokens."""
    table = keys.model.tensors.get(EMBEDDING)
    if table is None or len(table.shape) != 2:
        keys.refuse("general.architecture", f"must be that of a file with a table of embeddings, {EMBEDDING}")
    return table.shape[0]


def _dtype(model: GgufModel) -> str:
    """What weights that are not quantised are kept in: the type of all matrices, or else bfloat16."""
    types = {tensor.type.name for tensor in model.tensors.values() if len(tensor.shape) > 1}
    return _FLOATS.get(next(iter(types)), "bfloat16") if len(types) == 1 else "bfloat16"


def _quantization(model: GgufModel) -> dict[str, Any]:
    """That weights are quantised, if any is; each tensor says how."""
    is_quantized = any(tensor.type.name not in PLAIN for tensor in model.tensors.values())
    return {"quantization_config": {"quant_method": "gguf"}} if is_quantized else {}


def _biases(model: GgufModel, family: FamilySpec) -> dict[str, bool]:
    """The family's flags, from the tensors that are there."""
    first = {name.removeprefix("blk.0.") for name in model.tensors if name.startswith("blk.0.")}
    attention = bool({"attn_q.bias", "attn_qkv.bias"} & first)
    flags = {"mlp_bias": "ffn_up.bias" in first}
    if isinstance(family.output_bias, str):
        flags[family.output_bias] = "attn_output.bias" in first
    if isinstance(family.attention_bias, str):
        flags[family.attention_bias] = attention
    return flags


def _windows(keys: GgufKeys) -> dict[str, Any]:
    """Which layers have a window, where the file says so: a flag for each layer, or the step of those without."""
    pattern = keys.metadata.get(keys.name_of("attention.sliding_window_pattern"))
    if isinstance(pattern, list):
        return {"layer_types": [LayerKind.SLIDING if has_window else LayerKind.FULL for has_window in pattern]}
    return {} if pattern is None else {"sliding_window_pattern": pattern}


def _check_windows(keys: GgufKeys, config: Mapping[str, Any]) -> None:
    """Raises: ConfigError where layers with a window have other sizes or rotations than the others, unless these are
    read.
    """
    for own, common in OF_WINDOWS.items():
        given, others = keys.of_model(own), keys.of_model(common)
        if others is None:
            others = config["rope_theta"] if common == "rope.freq_base" else config["head_dim"]
        is_read = own == "rope.freq_base_swa" and "rope_local_base_freq" in config
        if given is not None and given != others and not is_read:
            keys.refuse(keys.name_of(own), f"must be that of the other layers, {others}")


def _check_only(keys: GgufKeys, architecture: GgufArchitecture) -> None:
    """Raises: ConfigError for a value of which nothing else than the one of all other files is computed."""
    gating = GATING.get(architecture.model_type, SOFTMAX)
    for name, values in {**ONLY, "expert_gating_func": (gating, 0)}.items():
        if keys.of_model(name) not in (None, *values):
            keys.refuse(keys.name_of(name), f"must be {values[0]}: nothing else is computed for this architecture")


def _rope(keys: GgufKeys, head_size: int) -> dict[str, Any]:
    """How queries and keys are rotated."""
    config: dict[str, Any] = {}
    if keys.of_model("rope.dimension_count"):
        config[SHARE] = rotary_share(head_size, keys.count("rope.dimension_count"))
    scaling = _divided(keys.model) or _long(keys) or _scaled(keys)
    if scaling:
        config["rope_scaling"] = scaling
    return config


def _divided(model: GgufModel) -> Mapping[str, Any] | None:
    """Each pair's frequency has a divisor: Llama 3 files bring them computed."""
    divisors = _vector(model, ROPE_DIVISORS)
    if divisors is None or all(number == 1.0 for number in divisors):
        return None
    return {"rope_type": "longrope", "attention_factor": 1.0, "short_factor": divisors, "long_factor": divisors}


def _long(keys: GgufKeys) -> Mapping[str, Any] | None:
    """Phi-3 and MiniCPM: two lists of divisors, for short and for long contexts. llama.cpp's defaults count."""
    short, long = (_vector(keys.model, name) for name in ROPE_FACTORS)
    if short is None or long is None:
        return None
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": keys.of_model("rope.scaling.original_context_length")
        or keys.count("context_length"),
        "attention_factor": keys.of_model("rope.scaling.attn_factor") or 1.0,
    }


def _scaled(keys: GgufKeys) -> Mapping[str, Any] | None:
    """Stretched by one factor. It has another name in older files, and without a type it is a linear one."""
    kind = keys.of_model("rope.scaling.type")
    name = next((name for name in ("rope.scaling.factor", OLD_FACTOR) if keys.of_model(name)), None)
    if kind in ("none", "longrope") or (kind is None and name is None):
        return None
    factor = keys.number(name or "rope.scaling.factor")
    if kind in (None, "linear"):
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        keys.refuse(keys.name_of("rope.scaling.type"), "must be none, linear, yarn or longrope")
    return {**yarn(keys), **dict(_yarn_factors(keys, factor))}


def _yarn_factors(keys: GgufKeys, factor: float) -> Iterator[tuple[str, Any]]:
    if keys.architecture == "gpt-oss":
        yield "truncate", False
    if keys.of_model("rope.scaling.attn_factor") is not None:
        yield "attention_factor", keys.number("rope.scaling.attn_factor") * yarn_scale(factor, 1.0)


def _vector(model: GgufModel, name: str) -> list[float] | None:
    """The numbers of a small float32 tensor, if it is there. Raises: CheckpointError for one of another kind."""
    tensor = model.tensors.get(name)
    if tensor is None:
        return None
    if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.num_bytes > MAX_VECTOR_BYTES:
        raise CheckpointError(
            f"{model.path}: {name} is {tensor.type.name} of shape {list(tensor.shape)}, not a list of at most "
            f"{MAX_VECTOR_BYTES // 4:,} F32 numbers. Use another file of this model."
        )
    numbers = array("f")
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        numbers.frombytes(stream.read(tensor.num_bytes))
    return numbers.tolist()


def report_unknown(path: Path) -> None:
    """Log which keys of the model have no effect. Raises: CheckpointError and its kin."""
    keys = GgufKeys(read_gguf(path))
    config = _config(keys)
    unread = [name for name, value in keys.unread.items() if name not in HARMLESS and not _says_nothing(name, value)]
    if config["sliding_window"] and not _has_windows(config, str(path)):
        unread.append("attention.sliding_window")
    if unread:
        log.warning("%s: metadata keys without effect: %s", keys.source, ", ".join(map(shown, sorted(unread))))


def _says_nothing(name: str, value: Value) -> bool:
    return value == 0 or (value == 1 and name.endswith("scale"))


def _has_windows(config: Mapping[str, Any], source: str) -> bool:
    return any(mixer.window for mixer in ModelArch.from_config(config, source=source).plain_attentions)
