"""From `EngineArgs` to a core that can step. Knows no tokenizer: a core process has none."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from quire import envs
from quire.config.arch import ModelArch
from quire.config.engine import QuireConfig
from quire.config.flags.args import EMBEDDED, EngineArgs
from quire.config.gguf.config_json import gguf_config, report_unknown
from quire.config.gguf.files import is_gguf
from quire.config.json_file import read_json_object
from quire.config.memory.plan import gib
from quire.config.quantized.side_file import with_side_file
from quire.config.resolve import resolve
from quire.engine.engine_core import EngineCore
from quire.engine.identity import Identity, check_unchanged, identity_of
from quire.errors import CheckpointError, ConfigError, counted
from quire.executor.base import create_executor
from quire.loader.hub import resolve_model
from quire.loader.model_impl import read_model_arch
from quire.log import get_logger
from quire.observability.ledger import Ledger
from quire.observability.progress import load_progress
from quire.platforms.current import current_capabilities
from quire.tokenizer.digest import tokenizer_digest
from quire.utils.garbage import none_collected
from quire.utils.interrupts import interrupts_deferred
from quire.utils.lazy import nearest

log = get_logger(__name__)

EMBEDDED_MODEL = Path(__file__).parents[1] / "tiny"


def locate(args: EngineArgs) -> tuple[Path, Path]:
    """The directories of model and tokenizer. Downloads what only the hub has, which may take long.

    Raises: ConfigError.
    """
    path = _model_directory(args)
    return path, path if args.tokenizer is None else resolve_model(args.tokenizer, args.revision, with_weights=False)


def create_config(args: EngineArgs, located: tuple[Path, Path] | None = None) -> QuireConfig:
    """Find the model and decide everything about the engine; loads no weights and imports no torch.

    Raises: ConfigError.
    """
    path, tokenizer_path = locate(args) if located is None else located
    return resolve(
        args,
        read_arch(args, path),
        current_capabilities(args.device),
        path=path,
        tokenizer_path=tokenizer_path,
        tokenizer_digest="" if args.skip_tokenizer_init else tokenizer_digest(tokenizer_path, args.chat_template),
    )


def read_arch(args: EngineArgs, path: Path) -> ModelArch:
    """The model in a directory, as its config.json and the user's overrides describe it.

    Raises: ConfigError and its kin.
    """
    _check_format(args, path)
    raw = _overridden(_read_config(path), args.hf_overrides)
    arch = read_model_arch(raw, path, args.model_impl)
    if arch.stored is not None:
        _check_stored(args, arch)
    return arch


def _check_format(args: EngineArgs, path: Path) -> None:
    """Refuse options that name another format than the model has. Raises: ConfigError."""
    if is_gguf(path) and args.model_impl == "transformers":
        raise ConfigError("model_impl='transformers' does not read GGUF files. Leave it out, or use *.safetensors.")
    if args.load_format in ("safetensors", "gguf") and is_gguf(path) != (args.load_format == "gguf"):
        found = "a GGUF file" if is_gguf(path) else "no GGUF file"
        raise ConfigError(f"load_format={args.load_format!r}, but {path} is {found}. Leave load_format out.")


def _check_stored(args: EngineArgs, arch: ModelArch) -> None:
    """Refuse what a model that transformers builds cannot have. Raises: ConfigError."""
    for name, value, instead in (
        ("quantization", args.quantization, "weights stay as they are; --dtype bfloat16 halves those in float32"),
        ("load_format", args.load_format if args.load_format == "dummy" else None, "its weights are read from files"),
    ):
        if value is not None:
            raise ConfigError(
                f"{name}={value!r} is for models that quire builds itself, and {arch.architecture} runs through "
                f"transformers: {instead}. Leave {name} out."
            )


def _model_directory(args: EngineArgs) -> Path:
    """Where the model is; a directory that has the embedded model's name is meant before that."""
    if args.model is not None and (args.model != EMBEDDED or Path(args.model).is_dir()):
        return resolve_model(args.model, args.revision)
    if args.revision is not None and args.tokenizer is None:
        raise ConfigError(f"revision={args.revision!r} has no effect on the embedded model; leave it out")
    return EMBEDDED_MODEL


def _overridden(raw: dict[str, object], overrides: dict[str, object]) -> dict[str, object]:
    """config.json with the user's values; what would have no effect is refused, what may be a slip is said."""
    lost = sorted({"rope_scaling", "rope_theta"} & overrides.keys())
    if lost and "rope_parameters" in raw and "rope_parameters" not in overrides:
        raise ConfigError(
            f"hf_overrides gives {' and '.join(lost)}, but config.json has rope_parameters, which holds both. "
            "Override rope_parameters."
        )
    for key in overrides.keys() - raw.keys():
        log.warning("hf_overrides: config.json has no %r%s", key, nearest(key, list(raw)))
    return {**raw, **overrides}


def _read_config(path: Path) -> dict[str, object]:
    if is_gguf(path):
        report_unknown(path)
        return gguf_config(path)
    raw = read_json_object(path / "config.json", "Download the file again.", CheckpointError)
    if raw is None:
        raise CheckpointError(
            f"{path} has no config.json, so it is no model directory. Give a directory with config.json, "
            "tokenizer.json and *.safetensors."
        )
    return with_side_file(raw, path)


@contextmanager
def importing_torch(ledger: Ledger) -> Iterator[None]:
    """Import the worker and torch while the block runs. A KeyboardInterrupt waits for the imports."""
    with interrupts_deferred(), none_collected(), ThreadPoolExecutor(1) as background:
        torch_import = background.submit(importlib.import_module, "torch")
        yield
        with ledger.stage("imports"):
            torch_import.result()
            importlib.import_module("quire.worker.worker")


def load_core(
    config: QuireConfig,
    clock: Callable[[], float],
    ledger: Ledger,
    weights_digest: Callable[[], str],
    successor_of: Identity | None = None,
) -> EngineCore:
    """Model and KV cache, ready to step; `weights_digest` is from `digesting`.

    Raises: CheckpointError and its kin; ConfigError when it does not compute what the core did that it succeeds.
    """
    for warning in envs.unknown():
        log.warning("%s", warning)
    if successor_of is not None:  # what can be said without the weights is said before they are read
        check_unchanged(
            successor_of,
            identity_of(config, successor_of.weights, current_capabilities(config.device_config.device_type)),
        )
    with load_progress(config.load_config.show_progress) as draw:

        def progress(num_read: int, num_bytes: int) -> None:
            ledger.progress = num_read
            if draw is not None:
                draw(num_read, num_bytes)

        executor = create_executor(config, ledger, progress)
    executor.determine_num_available_blocks()
    with ledger.stage("digest"):
        identity = identity_of(config, weights_digest(), current_capabilities(config.device_config.device_type))
    if successor_of is not None:
        check_unchanged(successor_of, identity)
    _report(config, ledger)
    return EngineCore(config, executor, clock, identity)


def _report(config: QuireConfig, ledger: Ledger) -> None:
    model, cache, device = config.model_config, config.cache_config, config.device_config
    log.info(
        "model %s %s max_model_len=%d on %s with %s ops, %s",
        model.model,
        model.dtype,
        model.max_model_len,
        device.device_type,
        device.ops,
        counted(device.num_threads, "thread"),
    )
    log.info(
        "memory plan %s; kv cache %s in %s%s",
        ", ".join(f"{name} {gib(size)}" for name, size in config.memory_plan.items()),
        cache.capacity,
        counted(cache.num_blocks, "block"),
        "" if cache.num_sequences else f", {cache.dtype} ({config.choices['kv_cache_dtype'].reason})",
    )
    if device.ops == "reference":
        log.warning("reference ops: %s", config.choices["ops"].reason)
    if not device.batch_invariant:
        log.warning("batch_invariant is off: tokens may change with what else runs (row_invariant: false)")
    log.info("ready in %s", ledger.line())
