"""The synthetic checkpoint in the forms that engines run, each written once.

A writer takes the checkpoint and the directory of all forms, and gives the file or directory to load. Programs of
another engine run under that engine's Python, which an environment variable names (QUIRE_PEER_LLAMACPP, ...).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

Write = Callable[[Path, Path], Path]

LLAMA_QUANTIZE = """
import sys, llama_cpp
source, target, kind = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = getattr(llama_cpp, "LLAMA_FTYPE_MOSTLY_" + kind)
assert llama_cpp.llama_model_quantize(source.encode(), target.encode(), params) == 0
"""


def python_of(engine: str) -> str:
    """The Python of the engine's environment."""
    variable = f"QUIRE_PEER_{engine.upper()}"
    place = os.environ.get(variable)
    if place is None:
        raise SystemExit(f"{variable} is not set; it names the Python of {engine}, which writes this form of weights.")
    return place


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer, for peers that do not start without one."""
    from tests.tiny_tokenizer import write_tokenizer as write

    write(directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": 40960}))


def as_it_is(checkpoint: Path, work: Path) -> Path:
    """For engines that read the checkpoint itself."""
    return checkpoint


def openvino(weights: str) -> Write:
    """An export by optimum-intel. weights: a `--weight-format` of its command."""

    def write(checkpoint: Path, work: Path) -> Path:
        target = work / f"openvino-{weights}"
        if not (target / "openvino_model.xml").exists():
            command = [str(Path(python_of("openvino")).parent / "optimum-cli"), "export", "openvino"]
            options = ["--model", str(checkpoint), "--task", "text-generation-with-past", "--weight-format", weights]
            if weights == "int4":
                options += ["--group-size", "128", "--ratio", "1.0"]
            subprocess.run([*command, *options, str(target)], check=True)
        return target

    return write


def plain_gguf(checkpoint: Path, work: Path) -> Path:
    """GGUF in bf16, with the package of that name."""
    target = work / "model-bf16.gguf"
    if not target.exists():
        script, partial = Path(__file__).with_name("write_gguf.py"), target.with_suffix(".partial")
        subprocess.run([python_of("llamacpp"), str(script), str(checkpoint), str(partial)], check=True)
        partial.rename(target)
    return target


def gguf(kind: str) -> Write:
    """GGUF by llama.cpp's quantiser. kind: the name of a mixture of types there, such as Q4_K_M."""

    def write(checkpoint: Path, work: Path) -> Path:
        target = work / f"model-{kind}.gguf"
        if not target.exists():
            plain, partial = plain_gguf(checkpoint, work), target.with_suffix(".partial")
            subprocess.run([python_of("llamacpp"), "-c", LLAMA_QUANTIZE, str(plain), str(partial), kind], check=True)
            partial.rename(target)
        return target

    return write


def safetensors(method: str, group_size: int = 128) -> Write:
    """Linear layers of the decoder rounded to 4 bits, in the form that a `quant_method` has. method: gptq or awq."""

    def write(checkpoint: Path, work: Path) -> Path:
        from benchmarks.checkpoints import quantize

        target = work / f"checkpoint-{method}"
        if not (target / "config.json").exists():
            quantize(checkpoint, target, method, group_size)
            write_tokenizer(target)
        return target

    return write


def num_bytes(model: Path) -> int:
    """Of a form's weights on disk."""
    files = [model] if model.is_file() else [*model.glob("*.safetensors"), *model.glob("openvino_model.bin")]
    return sum(file.stat().st_size for file in files)
