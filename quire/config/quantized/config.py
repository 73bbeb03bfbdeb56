"""The quantization_config of a checkpoint: which method wrote it, and what its headers do not say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from quire.config.json_file import read_json_object
from quire.config.quantized.find import FINDERS, Hints
from quire.config.quantized.kv_cache import StoredKVCache, read_kv_cache_scheme
from quire.config.quantized.stored import Headers, Packing, StoredFormat
from quire.errors import CheckpointError, ConfigError, shown

SIDE_FILE = "hf_quant_config.json"
MAX_GROUPS = 64
"""Entries of config_groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """How the weights of a checkpoint were quantised. Those that its headers have plainly are plain."""

    method: str
    """As quantization_config names it."""
    packings: tuple[Packing, ...]
    """What a weight may be packed as, in the order in which its tensors are looked for."""
    hints: Hints = Hints()
    kv_cache: StoredKVCache | None = None
    """What the KV cache was calibrated for, where config.json says so."""

    def find(self, name: str, headers: Headers) -> StoredFormat | None:
        """How this weight is stored; None for one that is not quantised.

        Raises: CheckpointError where its tensors do not fit each other.
        """
        found = (FINDERS[packing](name, headers, self.hints) for packing in self.packings)
        return next((format for format in found if format is not None), None)


def with_side_file(raw: dict[str, Any], directory: Path) -> dict[str, Any]:
    """config.json with what ModelOpt wrote into a file of its own, where config.json has no quantization_config.

    Raises: CheckpointError naming the file.
    """
    if raw.get("quantization_config") is not None:
        return raw
    file, remedy = directory / SIDE_FILE, "Download the file again."
    found = read_json_object(file, remedy, CheckpointError)
    if found is None:
        return raw
    given = found.get("quantization")
    if not isinstance(given, Mapping):
        raise CheckpointError(f"{file}: quantization is {shown(given)}; it must be an object. {remedy}")
    return {**raw, "quantization_config": {**given, "quant_method": "modelopt"}}


def read_quantization(raw: Mapping[str, Any], source: str) -> StoredQuantization | None:
    """What config.json says of quantised weights; None where it says nothing.

    Raises: ConfigError for a method that is not read, or one whose arithmetic is another than weights times inputs.
    """
    given = raw.get("quantization_config")
    given = raw.get("compression_config") if given is None else given
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(f"{source}: quantization_config is {shown(given)}; it must be an object. Correct the file.")
    method = given.get("quant_method")
    reader = _METHODS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise ConfigError(
            f"{source}: the weights are quantised by {shown(method)}, as quantization_config says. quire reads "
            f"{', '.join(sorted(_METHODS))}; use such a checkpoint, or the original with --quantization int8 or int4."
        )
    known = {"expert_dtype": raw["expert_dtype"]} if "expert_dtype" in raw else {}
    return reader(_Keys({**known, **given}, source))


class _Keys:
    """A quantization_config, read key by key."""

    def __init__(self, given: Mapping[str, Any], source: str) -> None:
        self.given = given
        self.source = source

    def refuse(self, key: str, wanted: str) -> NoReturn:
        value = shown(self.given.get(key))
        raise ConfigError(
            f"{self.source}: quantization_config.{key} is {value}; quire reads {wanted}. Use another checkpoint of the "
            "model, or the original with --quantization int8 or int4."
        )

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.given.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def text(self, key: str, known: Mapping[str, Any], default: str) -> str:
        value = self.given.get(key, default)
        if not isinstance(value, str) or value not in known:
            self.refuse(key, " or ".join(known))
        return value

    def check_bits(self, key: str, known: tuple[int, ...]) -> None:
        value = self.given.get(key, known[0])
        if value not in known or isinstance(value, bool):
            self.refuse(key, " or ".join(map(str, known)))


def _gptq(keys: _Keys) -> StoredQuantization:
    keys.check_bits("bits", (4, 8, 3, 2))
    version = keys.text("checkpoint_format", _GPTQ_VERSIONS, "gptq")
    hints = Hints(
        is_symmetric=keys.flag("sym", default=True),
        has_order=keys.flag("desc_act", default=False),
        is_v1=_GPTQ_VERSIONS[version],
    )
    return StoredQuantization(method="gptq", packings=(Packing.GPTQ,), hints=hints)


_GPTQ_VERSIONS: Mapping[str, bool] = MappingProxyType({"gptq": True, "gptq_v2": False})
"""Format -> whether zero points are stored less one."""


def _awq(keys: _Keys) -> StoredQuantization:
    keys.check_bits("bits", (4, 8))
    keys.text("version", dict.fromkeys(("gemm", "GEMM")), "gemm")
    return StoredQuantization(method="awq", packings=(Packing.AWQ,))


def _auto_round(keys: _Keys) -> StoredQuantization:
    keys.check_bits("bits", (4, 8, 2))
    packing = keys.text("packing_format", _AUTO_ROUND, "auto_round:auto_gptq")
    hints = Hints(is_symmetric=keys.flag("sym", default=True), is_v1=packing != "auto_round")
    return StoredQuantization(method="auto-round", packings=_AUTO_ROUND[packing], hints=hints)


_AUTO_ROUND: Mapping[str, tuple[Packing, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("auto_round:auto_gptq", "auto_round:gptq", "auto_gptq", "auto_round"), (Packing.GPTQ,)),
        **dict.fromkeys(("auto_round:auto_awq", "auto_round:awq", "auto_awq"), (Packing.AWQ,)),
        "auto_round:fp8_static": (Packing.FLOAT8,),
        "auto_round:llm_compressor": (Packing.FLOAT4, Packing.FLOAT8, Packing.INT8),
    }
)


def _compressed_tensors(keys: _Keys) -> StoredQuantization:
    if keys.given.get("transform_config"):
        keys.refuse("transform_config", "weights that are not rotated")
    sparsity = keys.given.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") in (None, "dense")):
        keys.refuse("sparsity_config", "weights that are not sparse")
    groups = keys.given.get("config_groups")
    kv_cache = keys.given.get("kv_cache_scheme")
    if not isinstance(groups, Mapping) or not (0 if kv_cache else 1) <= len(groups) <= MAX_GROUPS:
        keys.refuse("config_groups", f"an object of 1 to {MAX_GROUPS} groups")
    if kv_cache is not None and not isinstance(kv_cache, Mapping):
        keys.refuse("kv_cache_scheme", "an object")
    schemes = [scheme for group in groups.values() if (scheme := _weights_of(keys, group)) is not None]
    packings = (Packing.PACKED, Packing.INT8, Packing.FLOAT8, Packing.FLOAT4)
    return StoredQuantization(
        method="compressed-tensors",
        packings=packings,
        hints=Hints(schemes=tuple(dict.fromkeys(schemes))),
        kv_cache=read_kv_cache_scheme(kv_cache) if kv_cache else None,
    )


def _weights_of(keys: _Keys, group: Any) -> tuple[int, int | None] | None:
    """(bits, group size) of the integers of a group of layers; None for floats, whose headers say all."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        keys.refuse("config_groups", "groups that quantise weights")
    bits, size = weights.get("num_bits"), weights.get("group_size")
    if weights.get("type", "int") == "float" and bits in (4, 8):
        return None
    if weights.get("type", "int") != "int" or bits not in (4, 8) or isinstance(bits, bool):
        keys.refuse("config_groups", "weights of 4 and 8 bits")
    has_groups = isinstance(size, int) and size > 0
    return bits, size if has_groups else None


def _fp8(keys: _Keys) -> StoredQuantization:
    keys.text("fmt", dict.fromkeys(("e4m3",)), "e4m3")
    block = keys.given.get("weight_block_size")
    if block is not None and block != [128, 128]:
        keys.refuse("weight_block_size", "[128, 128]")
    experts = keys.text("expert_dtype", dict.fromkeys(("fp8", "fp4")), "fp8")
    return StoredQuantization(method="fp8", packings=(Packing.FLOAT8, *([Packing.FLOAT4] if experts == "fp4" else [])))


def _modelopt(keys: _Keys) -> StoredQuantization:
    """Newer files have a kv_cache_scheme as compressed-tensors has, older ones a name. Without an algorithm only the KV
    cache was calibrated, if anything was."""
    algorithm = keys.given.get("quant_algo")
    if algorithm is not None and (not isinstance(algorithm, str) or algorithm.upper() not in _MODELOPT):
        keys.refuse("quant_algo", ", ".join(_MODELOPT))
    scheme, name = keys.given.get("kv_cache_scheme"), keys.given.get("kv_cache_quant_algo")
    if scheme is None and name is not None:
        scheme = {"type": "float", "num_bits": 8, "dynamic": False} if name == "FP8" else {"kv_cache_quant_algo": name}
    if scheme is not None and not isinstance(scheme, Mapping):
        keys.refuse("kv_cache_scheme", "an object")
    return StoredQuantization(
        method="modelopt",
        packings=(Packing.FLOAT4, Packing.FLOAT8),
        kv_cache=read_kv_cache_scheme(scheme) if scheme else None,
    )


_MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "MIXED_PRECISION")


def _mxfp4(keys: _Keys) -> StoredQuantization:
    return StoredQuantization(method="mxfp4", packings=(Packing.MXFP4,))


def _bitsandbytes(keys: _Keys) -> StoredQuantization:
    return StoredQuantization(method="bitsandbytes", packings=(Packing.BNB_4BIT,))


def _gguf(keys: _Keys) -> StoredQuantization:
    return StoredQuantization(method="gguf", packings=(Packing.GGUF,))


_METHODS: Mapping[str, Callable[[_Keys], StoredQuantization]] = MappingProxyType(
    {
        "gptq": _gptq,
        "awq": _awq,
        "auto-round": _auto_round,
        "intel/auto-round": _auto_round,
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
        "mxfp4": _mxfp4,
        "modelopt": _modelopt,
        "bitsandbytes": _bitsandbytes,
        "gguf": _gguf,
    }
)
METHODS = tuple(name for name in _METHODS if "/" not in name)
"""By the name that people give."""
