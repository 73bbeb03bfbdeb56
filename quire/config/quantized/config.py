"""The quantization_config of a checkpoint: which method wrote it, and what its headers do not say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from quire.config.quantized.bitnet import read_bitnet
from quire.config.quantized.compressed_tensors import read_schemes
from quire.config.quantized.find import FINDERS, Hints
from quire.config.quantized.keys import Keys
from quire.config.quantized.kv_cache import StoredKVCache, read_kv_cache_scheme
from quire.config.quantized.stored import Headers, Packing, StoredFormat
from quire.config.quantized.torchao import read_torchao
from quire.errors import ConfigError, shown


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
    quantizes_weights: bool = True
    """Whether config.json says that there are quantised weights."""

    def find(self, name: str, headers: Headers) -> StoredFormat | None:
        """How this weight is stored; None for one that is not quantised.

        Raises: CheckpointError where its tensors do not fit each other.
        """
        found = (FINDERS[packing](name, headers, self.hints) for packing in self.packings)
        return next((format for format in found if format is not None), None)

    @property
    def rounds(self) -> bool:
        """Whether plain weights are rounded while they are read."""
        return Packing.ROUNDED in self.packings


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
    method = _method_of(given)
    reader = _METHODS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise ConfigError(
            f"{source}: the weights are quantised by {shown(method)}, as quantization_config says. quire reads "
            f"{', '.join(sorted(METHODS))}; use such a checkpoint, or the original with --quantization int8 or int4."
        )
    known = {"expert_dtype": raw["expert_dtype"]} if "expert_dtype" in raw else {}
    return reader(Keys({**known, **given}, source))


def _method_of(given: Mapping[str, Any]) -> Any:
    """quant_method in small letters. bitsandbytes wrote none before transformers 4.32, nor did ModelOpt at first."""
    method = given.get("quant_method")
    if method is None and (given.get("load_in_4bit") is True or given.get("load_in_8bit") is True):
        return "bitsandbytes"
    if method is None and "quant_algo" in given:
        return "modelopt"
    return method.lower().replace("compressed_tensors", "compressed-tensors") if isinstance(method, str) else method


def _gptq(keys: Keys) -> StoredQuantization:
    """Of two keys for the format GPTQModel writes both, AutoGPTQ and Optimum the first, if any."""
    keys.check_bits("bits", (4, 8, 3, 2))
    keys.refuse_any(("is_marlin_format",), "plain GPTQ")
    keys.refuse_any(("rotation",), "weights that are not rotated")
    keys.text("pack_dtype", ("int32",), "int32")
    version = keys.text("checkpoint_format", _GPTQ_VERSIONS, keys.text("format", _GPTQ_VERSIONS, "gptq"))
    sizes, has_whole_rows = keys.group_sizes("dynamic")
    hints = Hints(
        is_symmetric=_is_symmetric(keys, "dynamic"),
        has_order=keys.flag("desc_act", default=False),
        is_v1=_GPTQ_VERSIONS[version],
        group_sizes=sizes,
        has_whole_rows=has_whole_rows,
    )
    return StoredQuantization(method="gptq", packings=(Packing.GPTQ,), hints=hints)


_GPTQ_VERSIONS: Mapping[str, bool] = MappingProxyType({"gptq": True, "gptq_v2": False})
"""Format -> whether zero points are stored less one."""


def _is_symmetric(keys: Keys, rules: str) -> bool:
    """Whether no layer has zero points."""
    tables = (table for table in keys.table(rules).values() if isinstance(table, Mapping))
    return keys.flag("sym", default=True) and all(table.get("sym", True) is True for table in tables)


def _awq(keys: Keys) -> StoredQuantization:
    """AutoAWQ calls the layout `version`, GPTQModel `format` and `checkpoint_format`."""
    keys.check_bits("bits", (4, 8))
    for key in ("version", "format", "checkpoint_format"):
        keys.text(key, ("gemm", "GEMM"), "gemm")
    has_zero_points = keys.flag("zero_point", default=True)
    sizes, has_whole_rows = keys.group_sizes()
    hints = Hints(
        is_symmetric=not has_zero_points,
        is_asymmetric=has_zero_points,
        group_sizes=sizes,
        has_whole_rows=has_whole_rows,
    )
    return StoredQuantization(method="awq", packings=(Packing.AWQ,), hints=hints)


def _auto_round(keys: Keys) -> StoredQuantization:
    keys.check_bits("bits", (4, 8, 3, 2))
    keys.refuse_any(("rotation_config", "spinquant_config", "hadamard_config"), "weights that are not rotated")
    keys.text("fmt", _E4M3, "e4m3")
    if str(keys.given.get("data_type")).startswith(_INTEGERS_BY_POWERS):
        keys.refuse("data_type", "int, fp, mx_fp or nv_fp")
    packing = keys.text("packing_format", _AUTO_ROUND, _unsaid_packing(keys))
    size, blocks = keys.given.get("group_size"), Hints().blocks
    if isinstance(size, list):
        blocks = frozenset({keys.block(size, "group_size")})
        keys = Keys({**keys.given, "group_size": None}, keys.source)
    sizes, has_whole_rows = keys.group_sizes("extra_config")
    hints = Hints(
        is_symmetric=_is_symmetric(keys, "extra_config"),
        is_v1=packing not in _WITHOUT_ONE_LESS,
        blocks=blocks,
        group_sizes=sizes,
        has_whole_rows=has_whole_rows,
    )
    return StoredQuantization(method="auto-round", packings=_AUTO_ROUND[packing], hints=hints)


_INTEGERS_BY_POWERS = ("mx_int", "mx_uint")
"""Integers in groups that a power of two scales."""


def _unsaid_packing(keys: Keys) -> str:
    """What AutoRound before 0.5 wrote as its backend; newer ones say there what shall compute, which is no packing.

    They leave the packing of 8-bit floats unsaid where inputs stay as they are.
    """
    backend = keys.given.get("backend")
    if keys.given.get("data_type") == "fp":
        return "auto_round:fp8"
    if not isinstance(backend, str) or not backend.startswith("auto_round:"):
        return "auto_round:auto_gptq"
    if "awq" in backend:
        return "auto_round:auto_awq"
    return "auto_round:auto_gptq" if "gptq" in backend else "auto_round"


_AUTO_ROUND: Mapping[str, tuple[Packing, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("auto_round:auto_gptq", "auto_round:gptq", "auto_gptq", "auto"), (Packing.GPTQ,)),
        **dict.fromkeys(("auto_round", "auto_round:gptqmodel"), (Packing.GPTQ,)),
        **dict.fromkeys(("auto_round:auto_awq", "auto_round:awq", "auto_awq"), (Packing.AWQ,)),
        **dict.fromkeys(("auto_round:fp8", "auto_round:fp8_static"), (Packing.FLOAT8,)),
        "auto_round:llm_compressor": (Packing.FLOAT4, Packing.FLOAT8, Packing.INT8),
    }
)
_WITHOUT_ONE_LESS = ("auto_round", "auto_round:gptqmodel")
"""Packings of GPTQ's second version."""


def _compressed_tensors(keys: Keys) -> StoredQuantization:
    return StoredQuantization(
        method="compressed-tensors",
        packings=(Packing.PACKED, Packing.INT8, Packing.FLOAT8, Packing.FLOAT4),
        hints=read_schemes(keys),
        kv_cache=_kv_cache(keys),
        quantizes_weights=bool(keys.table("config_groups")),
    )


def _kv_cache(keys: Keys) -> StoredKVCache | None:
    scheme = keys.table("kv_cache_scheme")
    return read_kv_cache_scheme(scheme) if scheme else None


def _fp8(keys: Keys) -> StoredQuantization:
    keys.text("fmt", _E4M3, "e4m3")
    experts = (Packing.FLOAT4,) if keys.text("expert_dtype", ("fp8", "fp4"), "fp8") == "fp4" else ()
    return StoredQuantization(method="fp8", packings=(Packing.FLOAT8, *experts), hints=Hints(blocks=keys.blocks()))


_E4M3 = ("e4m3", "e4m3fn", "float8_e4m3", "float8_e4m3fn")
"""How it is called; MiniMax M2 has torch's name."""


def _fbgemm_fp8(keys: Keys) -> StoredQuantization:
    """A scale for each row. `activation_scale_ub` bounds the scales of activations, which stay as they are."""
    return StoredQuantization(method="fbgemm_fp8", packings=(Packing.FLOAT8,))


def _modelopt(keys: Keys) -> StoredQuantization:
    """Newer files have a kv_cache_scheme as compressed-tensors has, older ones a name, some within an object of their
    own. Without an algorithm only the KV cache was calibrated, if anything was."""
    keys = Keys({**keys.given, **keys.table("quantization")}, keys.source)
    algorithm = keys.given.get("quant_algo")
    if algorithm is not None and (not isinstance(algorithm, str) or algorithm.upper() not in _MODELOPT):
        keys.refuse("quant_algo", ", ".join(_MODELOPT))
    return StoredQuantization(
        method="modelopt",
        packings=(Packing.FLOAT4, Packing.FLOAT8),
        kv_cache=_named_cache(keys),
        quantizes_weights=algorithm is not None,
    )


def _named_cache(keys: Keys) -> StoredKVCache | None:
    scheme, name = keys.given.get("kv_cache_scheme"), keys.given.get("kv_cache_quant_algo")
    name = scheme if isinstance(scheme, str) else name if scheme is None else None
    if isinstance(name, str) and name.upper() == "FP8":
        return read_kv_cache_scheme({"type": "float", "num_bits": 8, "dynamic": False})
    return _kv_cache(keys) if name is None else read_kv_cache_scheme({"type": name})


_MODELOPT = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "MXFP8",
    "NVFP4",
    "W4A16_NVFP4",
    "W4A8_NVFP4_FP8",
    "W4A8_MXFP4_FP8",
    "MXFP4",
    "MIXED_PRECISION",
)
"""What the weights are. ModelOpt's name says, too, what inputs may be rounded to, which they are not here."""


def _torchao(keys: Keys) -> StoredQuantization:
    return StoredQuantization(method="torchao", packings=(Packing.TORCHAO,), hints=read_torchao(keys))


def _mxfp4(keys: Keys) -> StoredQuantization:
    return StoredQuantization(method="mxfp4", packings=(Packing.MXFP4,))


def _bitsandbytes(keys: Keys) -> StoredQuantization:
    return StoredQuantization(method="bitsandbytes", packings=(Packing.BNB_4BIT,))


def _bitnet(keys: Keys) -> StoredQuantization:
    packing, hints = read_bitnet(keys)
    return StoredQuantization(method="bitnet", packings=(packing,), hints=hints)


def _gguf(keys: Keys) -> StoredQuantization:
    return StoredQuantization(method="gguf", packings=(Packing.GGUF,))


_METHODS: Mapping[str, Callable[[Keys], StoredQuantization]] = MappingProxyType(
    {
        "gptq": _gptq,
        "awq": _awq,
        "auto-round": _auto_round,
        "intel/auto-round": _auto_round,
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
        "fbgemm_fp8": _fbgemm_fp8,
        "mxfp4": _mxfp4,
        "modelopt": _modelopt,
        "torchao": _torchao,
        "bitsandbytes": _bitsandbytes,
        "bitnet": _bitnet,
        "gguf": _gguf,
    }
)
METHODS = tuple(name for name in _METHODS if "/" not in name)
"""By the name that people give."""
