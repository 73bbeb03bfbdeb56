"""The configurations of tiny checkpoints of models that transformers runs, families of quire or not."""

from __future__ import annotations

from typing import Any

from tests.expert_checkpoints import SIZES

_FOREIGN: dict[str, Any] = {**SIZES, "bos_token_id": 1, "pad_token_id": 0}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
FOREIGN: dict[str, dict[str, Any]] = {
    "arcee": _FOREIGN,
    "nemotron": _FOREIGN,
    "persimmon": {key: value for key, value in _FOREIGN.items() if key != "num_key_value_heads"},
    "vaultgemma": {**_FOREIGN, "head_dim": 24, "sliding_window": 24, "query_pre_attn_scalar": 20},
    "cwm": {**_FOREIGN, "head_dim": 32, "sliding_window": 24},
    "dots1": {**_FOREIGN, **_LATENT, "num_key_value_heads": 2, "n_group": 1, "topk_group": 1, "head_dim": 16},
    "phimoe": {**_FOREIGN, "num_local_experts": 5, "num_experts_per_tok": 2},
    "minimax_m2": {**_FOREIGN, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2},
    "deepseek_v3": {**_FOREIGN, **_LATENT, "n_group": 2, "topk_group": 1},
}
"""The configuration of a small model of each, like `tests.family_configs.FAMILIES`."""
