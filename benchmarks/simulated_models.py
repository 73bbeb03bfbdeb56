"""Models of simulations, by their config.json: nothing of them is downloaded."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from quire.config.engine import QuireConfig
from quire.config.flags.args import EngineArgs
from quire.simulation.cost_model import CostModel
from quire.simulation.hardware import cost_on
from quire.simulation.machine import config_on, paced

OPT_13B = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "torch_dtype": "float16", "vocab_size": 50272,
    "hidden_size": 5120, "ffn_dim": 20480, "num_hidden_layers": 40, "num_attention_heads": 40,
    "max_position_embeddings": 2048, "word_embed_proj_dim": 5120, "do_layer_norm_before": True,
    "activation_function": "relu", "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "bos_token_id": 128000, "eos_token_id": 128001, "tie_word_embeddings": False,
}  # fmt: skip


def engine_on(hardware: str, model: dict[str, Any], **options: Any) -> tuple[QuireConfig, CostModel]:
    """An engine for a model on a device of the table, and the times of its steps."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(model))
        config, device = config_on(hardware, EngineArgs(**options), Path(directory))
        cost = cost_on(device, config)
        return paced(config, cost, hardware), cost
