"""Sarvam MLA (Sarvam 105B): DeepSeek V3, routing over all experts at once, with some names of its own."""

from dataclasses import replace

from quire.config.families.deepseek_v3 import SPEC as DEEPSEEK_V3

SPEC = replace(
    DEEPSEEK_V3,
    architecture="SarvamMLAForCausalLM",
    spellings={"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
    defaults={
        **{key: value for key, value in DEEPSEEK_V3.defaults.items() if key != "q_lora_rank"},
        "vocab_size": 262_144,
        "hidden_size": 4096,
        "intermediate_size": 16_384,
        "num_hidden_layers": 32,
        "num_attention_heads": 64,
        "first_k_dense_replace": 1,
        "n_routed_experts": 128,
        "n_group": 1,
        "topk_group": 1,
    },
    aliases={"deepseek_yarn": "yarn"},
)
