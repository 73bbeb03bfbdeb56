"""Which of a checkpoint's quantised weights are kept as they are, and whether ops have products with them."""

from __future__ import annotations

from quire.config.arch import ModelArch
from quire.config.engine import QuantConfig
from quire.config.flags.args import EngineArgs
from quire.config.quantized.experts import divided_experts
from quire.errors import ConfigError, counted
from quire.log import get_logger

log = get_logger(__name__)

ROUNDING = ("int8", "int4")
"""Methods of `--quantization` that round plain weights."""
MAX_NAMED = 3


def resolve_quantization(args: EngineArgs, arch: ModelArch, ops: str) -> QuantConfig:
    """What becomes of the weights.

    Raises: ConfigError for options that contradict the checkpoint, and for formats that the ops have no product with.
    """
    stored = None if arch.quantization is None else arch.quantization.method
    given = args.quantization
    if stored is None and args.dequantize:
        raise ConfigError("dequantize has no effect: the checkpoint's weights are not quantised. Leave it out.")
    if stored is not None and given in ROUNDING:
        raise ConfigError(
            f"quantization={given!r} rounds plain weights, and the checkpoint's are quantised already ({stored}). "
            "Leave it out, or use the original model."
        )
    if given is not None and given not in ROUNDING and given != stored:
        found = "plain" if stored is None else f"quantised by {stored}"
        raise ConfigError(f"quantization={given!r}, but the checkpoint's weights are {found}. Leave quantization out.")
    _check_rounding(arch)
    if ops == "cpu" and not args.dequantize:
        _check_formats(arch)
        _tell_experts(arch)
    return QuantConfig(method=given if given in ROUNDING else None, stored=stored, dequantize=args.dequantize)


def _check_rounding(arch: ModelArch) -> None:
    """Raises: ConfigError for families whose products are not all linear layers of transformers."""
    if arch.quantization is None or not arch.quantization.rounds:
        return
    if arch.mixtures or arch.family.names.transposed:
        what = "experts" if arch.mixtures else "weights that are stored [in, out]"
        raise ConfigError(
            f"{arch.source}: weights are to be rounded while they are read (quantization_mode is 'online'), which "
            f"quire does not do in models with {what}. Use a checkpoint whose weights are ternary already ('offline')."
        )


def _check_formats(arch: ModelArch) -> None:
    """Raises: ConfigError naming the first weights that the kernels have no product with."""
    without = [format for format in arch.quantized if format.kept_as is None]
    if without:
        names = ", ".join(format.name for format in without[:MAX_NAMED])
        more = f" and {len(without) - MAX_NAMED} more" if len(without) > MAX_NAMED else ""
        raise ConfigError(
            f"{arch.source}: the kernels have no product with {without[0]}, as {names}{more} are stored. "
            "--dequantize makes plain weights of them, which takes more memory."
        )


def _tell_experts(arch: ModelArch) -> None:
    divided = sorted(divided_experts(arch))
    if divided:
        log.warning(
            "%s of experts become plain numbers, for gate and up are stored differently, such as %s",
            counted(len(divided), "weight"),
            divided[0],
        )
