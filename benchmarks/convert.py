"""The synthetic checkpoint in the peers' own formats."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

GGUF_SCRIPT = """
import json, sys
import numpy as np, gguf
source, target = sys.argv[1:]
config = json.load(open(source + "/config.json"))
writer = gguf.GGUFWriter(target, "qwen3")
writer.add_block_count(config["num_hidden_layers"])
writer.add_context_length(config["max_position_embeddings"])
writer.add_embedding_length(config["hidden_size"])
writer.add_feed_forward_length(config["intermediate_size"])
writer.add_head_count(config["num_attention_heads"])
writer.add_head_count_kv(config["num_key_value_heads"])
writer.add_key_length(config["head_dim"])
writer.add_value_length(config["head_dim"])
writer.add_rope_freq_base(config["rope_theta"])
writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
size = config["vocab_size"]
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("qwen2")
writer.add_token_list([f"t{i}" for i in range(size)])
writer.add_token_types([gguf.TokenType.NORMAL] * size)
writer.add_token_merges(["t 0"])
writer.add_eos_token_id(config["eos_token_id"])
names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
with open(source + "/model.safetensors", "rb") as file:
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size))
data = np.memmap(source + "/model.safetensors", np.uint8, "r", 8 + size)
header.pop("__metadata__", None)
for name, entry in header.items():
    raw = data[slice(*entry["data_offsets"])]
    mapped = names.get_name(name, try_suffixes=(".weight",))
    if len(entry["shape"]) == 1:
        writer.add_tensor(mapped, (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32))
    else:
        raw_dtype = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(mapped, raw.reshape(entry["shape"][0], -1), raw_dtype=raw_dtype)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""
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


def to_openvino(python: str, checkpoint: Path, target: Path, weights: str) -> Path:
    """Export with optimum-intel, once."""
    if not (target / "openvino_model.xml").exists():
        formats = {"bf16": "fp16", "int8": "int8", "int4": "int4"}
        command = [str(Path(python).parent / "optimum-cli"), "export", "openvino", "--model", str(checkpoint)]
        options = ["--task", "text-generation-with-past", "--weight-format", formats[weights]]
        if weights == "int4":
            options += ["--group-size", "128", "--ratio", "1.0"]
        subprocess.run([*command, *options, str(target)], check=True)
    return target


def to_gguf(python: str, checkpoint: Path, target: Path, weights: str) -> Path:
    """Write GGUF with the package of that name, and quantise with llama.cpp, once."""
    plain = target.with_name("model-bf16.gguf")
    if not plain.exists():
        subprocess.run([python, "-c", GGUF_SCRIPT, str(checkpoint), str(plain)], check=True)
    if weights != "bf16" and not target.exists():
        subprocess.run([python, "-c", LLAMA_QUANTIZE, str(plain), str(target), weights], check=True)
    return target
