"""`quire bench machine`: what this machine can do with quire's kernels, and how long a step of a model should take."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from quire.cli.output import check_writable, write_json
from quire.config.flags.args import add_flags, from_namespace
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.config.engine import Capabilities, QuireConfig
    from quire.config.memory.weights.shapes import WeightShapes

PROMPT = 512
"""Tokens of the prompt whose time is estimated."""


def add_arguments(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Flags of this subcommand."""
    parser = kinds.add_parser("machine", help="bandwidth and peak of this machine, and what a step should take")
    parser.add_argument("--output-json", metavar="FILE", help="write the figures to a file")
    add_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print. Reads the model's config.json, not its weights.

    Raises: ConfigError.
    """
    from quire.config.memory.weights.shapes import weight_shapes
    from quire.engine.core_startup import create_config
    from quire.platforms.current import current_capabilities

    if args.output_json:
        check_writable("--output-json", args.output_json)
    here = current_capabilities(from_namespace(args).device)
    if here.ops != "cpu":
        raise ConfigError(f"there are no native kernels to measure: {here.ops_reason}")
    config = create_config(from_namespace(args))
    if config.quant_config.stored is not None and not config.quant_config.dequantize:
        raise ConfigError(
            f"the weights of this checkpoint are {config.quant_config.stored}, whose products are not measured. "
            "Give the original model, with --quantization int8 or int4."
        )
    shapes = weight_shapes(config.model_config.arch)
    figures = measure(here, config.device_config.num_threads)
    figures["step"] = expected(config, shapes, figures)
    _print(figures)
    if args.output_json:
        write_json(args.output_json, figures)
    return 0


def measure(here: Capabilities, num_threads: int) -> dict[str, Any]:
    """Bytes and operations a second, by format of the weights."""
    speed = importlib.import_module("quire.ops.cpu.speed")
    importlib.import_module("quire.ops.cpu.library").set_num_threads(num_threads)
    return {
        "isa": here.ops_isa,
        "num_threads": num_threads,
        "read_bandwidth": speed.read_bandwidth(),
        "products": {name: asdict(speed.products(name)) for name in speed.FORMATS},
    }


def expected(config: QuireConfig, shapes: WeightShapes, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of a step that decodes one sequence, and of a prompt, if nothing but the products took time."""
    model, method = config.model_config, config.quant_config.method
    body = sum(shape.num_active for shape in shapes.body)
    parts = [(body, method or model.dtype), (shapes.head.num_weights, "int8" if method else model.dtype)]
    products = [(count, figures["products"][name]) for count, name in parts]
    reading_s = sum(count * found["bytes_per_weight"] / found["bandwidth"] for count, found in products)
    (_, layers), _ = products
    return {
        "model": model.model,
        "weights": method or model.dtype,
        "bytes_per_token": sum(count * found["bytes_per_weight"] for count, found in products),
        "decode_s": reading_s,
        "prompt_s": max(reading_s, 2 * PROMPT * body / layers["flops"]),
    }


def _print(figures: Mapping[str, Any]) -> None:
    read = figures["read_bandwidth"]
    print(f"{figures['isa']} kernels, {figures['num_threads']} threads, {read / 1e9:.1f} GB/s read from memory")
    print(f"{'weights':<12} {'1 row, GB/s':>12} {'of read':>8} {'512 rows, Gflop/s':>18}")
    for name, products in figures["products"].items():
        bandwidth, flops = products["bandwidth"], products["flops"]
        print(f"{name:<12} {bandwidth / 1e9:>12.1f} {bandwidth / read:>8.0%} {flops / 1e9:>18.0f}")
    step = figures["step"]
    print(
        f"{step['model']}, {step['weights']}: a token reads {step['bytes_per_token'] / 1e6:,.1f} MB. With nothing but "
        f"products, one sequence would decode {1 / step['decode_s']:,.1f} tokens/s, and a prompt of {PROMPT} tokens "
        f"would take {step['prompt_s']:.3f} s."
    )
