"""IQuest Coder: Llama, under a name of its own."""

from dataclasses import replace

from quire.config.families import llama

SPEC = replace(
    llama.SPEC,
    architecture="IQuestCoderForCausalLM",
    defaults={
        **llama.SPEC.defaults,
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
