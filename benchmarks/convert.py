"""The synthetic checkpoint in the peers' own formats."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

LLAMA_QUANTIZE = """
import sys, llama_cpp
source, target, kind = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = {"int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "int4": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}[kind]
assert llama_cpp.llama_model_quantize(source.encode(), target.encode(), params) == 0
"""


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer, for peers that do not start without one."""
    from tests.checkpoints import write_tokenizer as write

    write(directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": 40960}))


def to_openvino(python: str, checkpoint: Path, work: Path, weights: str) -> Path:
    """Export with optimum-intel, once."""
    target = work / f"openvino-{weights}"
    if not (target / "openvino_model.xml").exists():
        formats = {"bf16": "fp16", "int8": "int8", "int4": "int4"}
        command = [str(Path(python).parent / "optimum-cli"), "export", "openvino", "--model", str(checkpoint)]
        options = ["--task", "text-generation-with-past", "--weight-format", formats[weights]]
        if weights == "int4":
            options += ["--group-size", "128", "--ratio", "1.0"]
        subprocess.run([*command, *options, str(target)], check=True)
    return target


def to_gguf(python: str, checkpoint: Path, work: Path, weights: str) -> Path:
    """Write GGUF with the package of that name, and quantise with llama.cpp, once."""
    plain, target = work / "model-bf16.gguf", work / f"model-{weights}.gguf"
    if not plain.exists():
        script = Path(__file__).with_name("write_gguf.py")
        partial = plain.with_suffix(".partial")
        subprocess.run([python, str(script), str(checkpoint), str(partial)], check=True)
        partial.rename(plain)
    if weights != "bf16" and not target.exists():
        subprocess.run([python, "-c", LLAMA_QUANTIZE, str(plain), str(target), weights], check=True)
    return target
