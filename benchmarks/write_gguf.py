"""Write a checkpoint as GGUF, run under a Python that has the package gguf: `write_gguf.py CHECKPOINT TARGET`.

Weights stay bf16; vectors, routers and convolutions become float32, the type that llama.cpp computes them in.
Supports the families of `METADATA`, in checkpoints of one safetensors file. Imports nothing of quire.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

Config = dict[str, Any]
FLOAT32 = ("mlp.gate.weight", "conv1d.weight")
"""Matrices that are stored as float32."""


def attention(config: Config) -> Config:
    """GGUF's keys of a decoder with attention."""
    return {
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "rope.freq_base": float(config.get("rope_theta") or config["rope_parameters"]["rope_theta"]),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    }


def experts(config: Config) -> Config:
    """GGUF's keys of Qwen3 MoE."""
    return attention(config) | {
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
    }


def latent(config: Config) -> Config:
    """GGUF's keys of DeepSeek V2. Its cache holds one head: the latent, and the rotated part of keys behind it."""
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    return attention(config) | {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": config["q_lora_rank"],
        "rope.dimension_count": rotated,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": config["norm_topk_prob"],
    }


def recurrent(config: Config) -> Config:
    """GGUF's keys of Mamba 2."""
    return {
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.inner_size": config["hidden_size"] * config["expand"],
        "ssm.state_size": config["state_size"],
        "ssm.time_step_rank": config["num_heads"],
        "ssm.group_count": config["n_groups"],
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
    }


METADATA: dict[str, tuple[str, Callable[[Config], Config]]] = {
    "qwen3": ("qwen3", attention),
    "qwen3_moe": ("qwen3moe", experts),
    "deepseek_v2": ("deepseek2", latent),
    "mamba2": ("mamba2", recurrent),
}
"""model_type -> its architecture there, and its keys."""


def stored_tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """(name, the bits of its bf16 numbers) of a safetensors file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, np.uint8, "r", 8 + size)
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
            yield name, data[slice(*entry["data_offsets"])].view(np.uint16).reshape(entry["shape"])


def widened(bits: Any) -> Any:
    """float32 of the same values."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def stacked(tensors: Iterator[tuple[str, Any]], count: int) -> Iterator[tuple[str, Any]]:
    """One tensor [E, ...] for the matrices of `count` experts."""
    waiting: dict[str, dict[int, Any]] = {}
    for name, bits in tensors:
        found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name)
        if found is None:
            yield name, bits
            continue
        whole = f"{found[1]}.{found[3]}"
        group = waiting.setdefault(whole, {})
        group[int(found[2])] = bits
        if len(group) == count:
            yield whole, np.stack([group[i] for i in range(count)])
            del waiting[whole]
    assert not waiting, f"experts are missing: {sorted(waiting)}"


def converted(name: str, bits: Any, config: Config) -> Iterator[tuple[str, Any]]:
    """A tensor as llama.cpp wants it: uint16 arrays are bits of bf16, others float32."""
    if name.endswith("kv_b_proj.weight"):  # [H (K + V), rank] -> keys [H, rank, K], values [H, V, rank]
        heads = bits.reshape(config["num_attention_heads"], -1, bits.shape[-1])
        key, value = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
        yield name.replace("kv_b_proj", "k_b_proj"), np.ascontiguousarray(key.transpose(0, 2, 1))
        yield name.replace("kv_b_proj", "v_b_proj"), np.ascontiguousarray(value)
    elif name.endswith("mixer.A_log"):
        yield name, -np.exp(widened(bits)).reshape(-1, 1)
    elif name.endswith("mixer.D"):
        yield name, widened(bits).reshape(-1, 1)
    elif name.endswith("mixer.dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias"), widened(bits)
    elif name.endswith("mixer.norm.weight"):
        yield name, widened(bits).reshape(config["n_groups"], -1)
    elif name.endswith("conv1d.weight"):
        yield name, widened(bits).squeeze(1)
    else:
        yield name, widened(bits) if bits.ndim == 1 or name.endswith(FLOAT32) else bits


def add_metadata(writer: Any, arch: str, config: Config, keys: Config) -> None:
    """The family's keys, and a vocabulary without text: token i is `ti`, but for the parts of the one merge."""
    import gguf

    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config.get("max_position_embeddings", 1 << 20),
        "embedding_length": config["hidden_size"],
    } | keys
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(f"{arch}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{arch}.{key}", value)
    size = config["vocab_size"]
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["t", "0", "t0", *(f"t{i}" for i in range(3, size))])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(config["eos_token_id"])


def add_tensors(writer: Any, arch: str, config: Config, path: Path) -> None:
    """Every tensor of the checkpoint under GGUF's name."""
    import gguf

    known = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[arch], config["num_hidden_layers"])
    num_experts = config.get("num_experts") or config.get("n_routed_experts") or 0
    for stored, bits in stacked(stored_tensors(path), num_experts):
        for name, array in converted(stored, bits, config):
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert target is not None, f"GGUF has no name for {name}"
            if array.dtype == np.uint16:
                raw_dtype = gguf.GGMLQuantizationType.BF16
                writer.add_tensor(target, np.ascontiguousarray(array).view(np.uint8), raw_dtype=raw_dtype)
            else:
                writer.add_tensor(target, array)


def main() -> None:
    """Write the file."""
    import gguf

    source, target = Path(sys.argv[1]), sys.argv[2]
    config = json.loads((source / "config.json").read_text())
    arch, keys = METADATA[config["model_type"]]
    writer = gguf.GGUFWriter(target, arch)
    add_metadata(writer, arch, config, keys(config))
    add_tensors(writer, arch, config, source / "model.safetensors")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
