"""DeepSeek V2: latent attention, and a mixture of experts behind the first layers; rotates neighbours."""

from quire.config.family_spec import FamilySpec, experts
from quire.config.layers.experts import deepseek_v2_experts
from quire.config.layers.latent import latent_attention, latent_heads

DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""Of V3, too."""

SPEC = FamilySpec(
    architecture="DeepseekV2ForCausalLM",
    defaults={
        **DEFAULTS,
        "intermediate_size": 11_008,
        "max_position_embeddings": 2048,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "num_experts_per_tok": 6,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    derived=latent_heads,
    latent=latent_attention(interleaved=True),
    mlp=experts(deepseek_v2_experts, "mlp_bias"),
)
