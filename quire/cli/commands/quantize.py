"""`quire quantize MODEL --format int4 --out DIR`: write a quantised checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from quire.config.flags.args import EngineArgs
from quire.config.flags.knobs import whole_number
from quire.errors import ConfigError
from quire.quantize.formats import FORMATS, METHODS, target_format

HOW = """\
DIR becomes a checkpoint in the format of compressed-tensors, which quire, vLLM and transformers read. --method rtn
rounds to the nearest and reads no text; gptq and awq calibrate with a text and lose less. They, and measuring
perplexity, need pip install "quire[transformers]". A run that was interrupted continues when the same command is given
again. The output head, embeddings, norms and routers stay as they are."""
FORMAT_HELP = (
    "int4, int8: weights in groups; w8a8: int8 weights and inputs; fp8: float8 weights and inputs (default: int4)"
)
NUM_BLOCKS, SEQUENCE_LEN = 128, 512
OF_TEXT = ("calibration", "calibration_blocks", "sequence_len")
"""Flags that say which text is read, and how much of it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = f"{parser.description}\n\n{HOW}"
    parser.usage = "%(prog)s MODEL --out DIR [flags]"
    parser.add_argument("model", metavar="MODEL", help="directory, org/name, short name, or quire-tiny")
    parser.add_argument("--out", required=True, metavar="DIR", help="an empty or a new directory")
    parser.add_argument("--format", choices=[*FORMATS], default="int4", help=FORMAT_HELP)
    parser.add_argument("--method", choices=METHODS, default="gptq", help="how to round (default: gptq)")
    parser.add_argument(
        "--group-size", metavar="COLUMNS", help="columns that share a scale in int4 and int8, or channel (default: 128)"
    )
    parser.add_argument("--asymmetric", action="store_true", help="with zero points, in int4 and int8")
    parser.add_argument(
        "--smoothing",
        type=float,
        metavar="STRENGTH",
        help="move outliers of inputs into weights (SmoothQuant), for w8a8 and fp8; 0.5 is usual",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="PATTERN",
        help="layers that stay ('*.down_proj'); repeatable",
    )
    parser.add_argument("--calibration", metavar="FILE", help="a UTF-8 text (default: one that comes with quire)")
    parser.add_argument(
        "--calibration-blocks",
        type=whole_number,
        metavar="N",
        help=f"blocks of text that are read (default: {NUM_BLOCKS})",
    )
    parser.add_argument(
        "--sequence-len", type=whole_number, metavar="TOKENS", help=f"of a block (default: {SEQUENCE_LEN})"
    )
    parser.add_argument("--no-perplexity", action="store_true", help="do not measure perplexity before and after")
    parser.add_argument("--revision", metavar="REVISION", help="branch, tag or commit of a repository")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint and print what became of it.

    Raises: ConfigError.
    """
    from quire.engine.core_startup import locate, read_arch
    from quire.observability.progress import quantize_progress
    from quire.quantize.layerwise import require_transformers
    from quire.quantize.methods import Method
    from quire.quantize.run import QuantizeOptions, quantize
    from quire.quantize.texts import CALIBRATION_TEXT

    target = target_format(args.format, args.group_size, symmetric=not args.asymmetric)
    _check(args)
    method = Method(name=args.method, target=target, smoothing=args.smoothing)
    if method.is_calibrated or not args.no_perplexity:
        require_transformers("calibration, and measuring perplexity (--no-perplexity leaves it out),")
    engine_args = EngineArgs(model=args.model, revision=args.revision, model_impl="quire")
    directory, _ = locate(engine_args)
    options = QuantizeOptions(
        directory=directory,
        out=Path(args.out),
        method=method,
        ignore=args.ignore,
        calibration=Path(args.calibration) if args.calibration else CALIBRATION_TEXT,
        max_blocks=args.calibration_blocks or NUM_BLOCKS,
        sequence_len=args.sequence_len or SEQUENCE_LEN,
        measures=not args.no_perplexity,
    )
    with quantize_progress(show=True) as progress:
        report = quantize(options, read_arch(engine_args, directory), progress)
    print("\n".join(report.lines()))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises: ConfigError for flags that do not go together."""
    rounds_inputs = FORMATS[args.format].rounds_inputs
    if args.smoothing is not None and not (rounds_inputs and 0 < args.smoothing < 1):
        raise ConfigError("--smoothing takes a number between 0 and 1, with --format w8a8 or fp8")
    if args.method == "awq" and rounds_inputs:
        raise ConfigError(f"--method awq is for int4 and int8; use --method gptq --smoothing 0.5 for {args.format}")
    for name, least in (("calibration_blocks", 1), ("sequence_len", 8)):
        given = getattr(args, name)
        if given is not None and given < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {given}")
    of_text = next((name for name in OF_TEXT if getattr(args, name) is not None), None)
    if of_text is not None and args.method == "rtn" and args.smoothing is None and args.no_perplexity:
        raise ConfigError(
            f"--{of_text.replace('_', '-')} has no effect: --method rtn --no-perplexity reads no text. Leave one out."
        )
