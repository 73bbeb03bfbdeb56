"""What the configurations of several families in `family_configs` have in common."""

from __future__ import annotations

from tests.expert_checkpoints import SIZES as COMMON
from tests.expert_checkpoints import VOCAB_SIZE

GPT2 = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.15,
    "bos_token_id": 256,
    "eos_token_id": 256,
}
OPT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "init_std": 0.15,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "pad_token_id": 1,
}
MAMBA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "state_size": 8,
    "conv_kernel": 4,
    "expand": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}
HYBRID = {
    **COMMON,
    "num_hidden_layers": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}

LATENT = {
    **COMMON,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
DEEPSEEK = {
    **LATENT,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
}
DEEPSEEK_SPARSE = {key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"}
INDEXER = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 12}
"""So many heads that hardly any score is zero: transformers breaks ties as they come."""

DELTA = {
    **COMMON,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    # Outputs of heads are small in a random model; smaller roots would make 1e-3 of float32 errors on either side.
    "rms_norm_eps": 1e-4,
}
DELTA_EXPERTS = {
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 72,
    "num_experts": 6,
    "num_experts_per_tok": 3,
}
