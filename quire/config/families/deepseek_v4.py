"""DeepSeek V4: attention over the last tokens and entries for earlier ones, and several hidden states of each token."""

from quire.config.family_spec import FamilySpec, Norms, WeightNames, experts
from quire.config.layers.compressed import (
    compressed_attention,
    compressed_heads,
    token_or_router_experts,
)
from quire.config.layers.streams import mixed_streams

BIASES = "has no biases in this family. Set it to false."

SPEC = FamilySpec(
    architecture="DeepseekV4ForCausalLM",
    model_class="quire.models.variants.hyper_connections:HyperForCausalLM",
    spellings={"intermediate_size": "moe_intermediate_size"},
    defaults={
        "vocab_size": 129_280,
        "hidden_size": 4096,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "head_dim": 512,
        "q_lora_rank": 1024,
        "partial_rotary_factor": 64 / 512,
        "num_experts_per_tok": 6,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "max_position_embeddings": 1_048_576,
        "rope_theta": 10_000.0,
        "compress_rope_theta": 160_000.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "num_hash_layers": 3,
        "swiglu_limit": 10.0,
        "sliding_window": 128,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    derived=compressed_heads,
    refused={"attention_bias": BIASES, "mlp_bias": BIASES},
    compressed=compressed_attention,
    hyper=mixed_streams,
    norms=Norms(input="attn_norm", pre_mlp="ffn_norm"),
    mlp=experts(token_or_router_experts),
    attention_bias=False,
    output_bias=False,
    names=WeightNames(
        embedding="embed",
        resaved=(("embed.", "embed_tokens."), ("hc_head_", "hc_head.hc_")),
        attention="attn",
        sinks="attn_sink",
        mlp="ffn",
        gate_up=("w1", "w3"),
        down="w2",
        head="head",
    ),
)
