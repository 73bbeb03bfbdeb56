"""Random checkpoints of real shapes, written straight as safetensors: no hub and no transformers needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}
QWEN3_MOE: dict[str, object] = {
    **QWEN3_06B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_experts": 16,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "eos_token_id": 31999,
    "bos_token_id": 31998,
}
"""Qwen3-30B-A3B with an eighth of its experts and a twelfth of its layers: 0.51 billion parameters."""
DEEPSEEK_V2: dict[str, object] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 31999,
    "bos_token_id": 31998,
}
"""DeepSeek-V2-Lite with a quarter of its experts, 4 of its 27 layers, and the compressed queries of its large sibling:
0.74 billion parameters. llama.cpp tells models without compressed queries by their 27 layers."""
MAMBA2: dict[str, object] = {
    "vocab_size": 50288,
    "hidden_size": 1024,
    "num_hidden_layers": 48,
    "num_heads": 32,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 1,
    "expand": 2,
    "conv_kernel": 4,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
"""Mamba2-370m."""


def write_checkpoint(directory: Path, config: dict[str, object] = QWEN3_06B, seed: int = 0) -> Path:
    """A Qwen3 model with random bf16 weights in `directory`."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)

    def size(name: str) -> int:
        return int(str(config[name]))

    hidden, ffn, head = size("hidden_size"), size("intermediate_size"), size("head_dim")
    heads, kv_heads = size("num_attention_heads"), size("num_key_value_heads")
    tensors = {"model.embed_tokens.weight": matrix(size("vocab_size"), hidden)}
    for i in range(size("num_hidden_layers")):
        name = f"model.layers.{i}."
        tensors |= {
            f"{name}self_attn.q_proj.weight": matrix(heads * head, hidden),
            f"{name}self_attn.k_proj.weight": matrix(kv_heads * head, hidden),
            f"{name}self_attn.v_proj.weight": matrix(kv_heads * head, hidden),
            f"{name}self_attn.o_proj.weight": matrix(hidden, heads * head),
            f"{name}self_attn.q_norm.weight": torch.ones(head, dtype=torch.bfloat16),
            f"{name}self_attn.k_norm.weight": torch.ones(head, dtype=torch.bfloat16),
            f"{name}input_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            f"{name}post_attention_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        }
        mlps = {f"{name}mlp.": ffn}
        if "num_experts" in config:
            mlps = {f"{name}mlp.experts.{e}.": size("moe_intermediate_size") for e in range(size("num_experts"))}
            tensors[f"{name}mlp.gate.weight"] = matrix(size("num_experts"), hidden)
        for mlp, width in mlps.items():
            tensors |= {
                f"{mlp}gate_proj.weight": matrix(width, hidden),
                f"{mlp}up_proj.weight": matrix(width, hidden),
                f"{mlp}down_proj.weight": matrix(hidden, width),
            }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(size("vocab_size"), hidden)
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(directory / "model.safetensors"))
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return directory


def quantize(checkpoint: Path, target: Path, method: str, group_size: int) -> None:
    """Round the linear layers of a checkpoint to 4 bits and write it as `gptq` or `awq`; the rest stays as it is."""
    from tests.quantized_checkpoints import awq, gptq

    common = {"quant_method": method, "bits": 4, "group_size": group_size}
    if method == "gptq":
        write = partial(gptq, bits=4, group_size=group_size, symmetric=True)
        settings = common | {"sym": True, "desc_act": False, "checkpoint_format": "gptq"}
    else:
        write = partial(awq, group_size=group_size)
        settings = common | {"zero_point": True, "version": "gemm"}
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            written = write(tensor).tensors
            stored |= {f"{name.removesuffix('weight')}{part}": value.contiguous() for part, value in written.items()}
        else:
            stored[name] = tensor
    target.mkdir(parents=True, exist_ok=True)
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text()) | {"quantization_config": settings}
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def write_family(directory: Path, family: str, config: dict[str, Any], dtype: str) -> Path:
    """A model of any family that transformers knows, with weights that repeat one random pattern: quick to write."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.for_model(family, **config, torch_dtype=dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    settings.architectures = [type(model).__name__]
    pattern = (torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)) * 0.02).to(getattr(torch, dtype))
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and settings.tie_word_embeddings:
            continue
        count = tensor.numel()
        tensors[name] = pattern.repeat(count // len(pattern) + 1)[:count].view(tensor.shape).clone()
    save_file(tensors, str(directory / "model.safetensors"))
    settings.save_pretrained(directory)
    return directory


def write_with_unit_norms(directory: Path, family: str, config: dict[str, Any]) -> Path:
    """A model of any family that transformers knows, in bf16: normal weights, norms of one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config), dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if weight.dim() > 1 or name.endswith("bias"):
            weight.data.normal_(0, 0.02, generator=generator)
        elif "norm" in name:
            weight.data.fill_(1)
    model.bfloat16().save_pretrained(directory)  # routers, too, which newer versions keep in float32
    return directory


SHAPES: dict[str, Callable[[Path], Path]] = {
    "qwen3-0.6b": partial(write_checkpoint, config=QWEN3_06B),
    "qwen3-moe": partial(write_checkpoint, config=QWEN3_MOE),
    "deepseek-v2": partial(write_with_unit_norms, family="deepseek_v2", config=DEEPSEEK_V2),
    "mamba2": partial(write_with_unit_norms, family="mamba2", config=MAMBA2),
}
"""Shapes of benchmarks.peers -> what writes such a checkpoint to a directory."""
