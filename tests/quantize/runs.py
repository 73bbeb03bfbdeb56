"""Runs of `quantize` on small models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.config.flags.args import EngineArgs
from quire.engine.core_startup import locate, read_arch
from quire.quantize.formats import target_format
from quire.quantize.methods import Method
from quire.quantize.report import Report
from quire.quantize.run import QuantizeOptions, quantize
from quire.quantize.texts import CALIBRATION_TEXT


def run(
    model: Path | str,
    out: Path,
    *,
    format: str = "int4",
    method: str = "rtn",
    group_size: str | None = None,
    symmetric: bool = True,
    smoothing: float | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **options: Any,
) -> Report:
    """Quantise a model as the command does."""
    args = EngineArgs(model=str(model), model_impl="quire")
    directory, _ = locate(args)
    target = target_format(format, group_size, symmetric=symmetric)
    given = {
        "ignore": (),
        "calibration": CALIBRATION_TEXT,
        "max_blocks": 6,
        "sequence_len": 48,
        "measures": False,
        **options,
    }
    method_ = Method(name=method, target=target, smoothing=smoothing)
    return quantize(
        QuantizeOptions(directory=directory, out=out, method=method_, **given), read_arch(args, directory), progress
    )
