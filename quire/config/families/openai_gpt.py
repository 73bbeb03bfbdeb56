"""GPT, the first: GPT-2, with norms behind the sums that attention and MLP are added to."""

from dataclasses import replace

from quire.config.families.gpt2 import SPEC as GPT2
from quire.config.family_spec import NormKind, Norms, Scales

SPEC = replace(
    GPT2,
    architecture="OpenAIGPTLMHeadModel",
    model_class="quire.models.variants.openai_gpt:OpenAIGPTForCausalLM",
    spellings={
        **{key: name for key, name in GPT2.spellings.items() if key != "intermediate_size"},
        "hidden_act": "afn",
    },
    defaults={
        "vocab_size": 40_478,
        "n_positions": 512,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "afn": "gelu",
        "tie_word_embeddings": True,
    },
    derived=lambda keys: {"intermediate_size": 4 * keys.count("hidden_size")},
    aliases={"gelu": "gelu_new"},
    refused={},
    norms=Norms(kind=NormKind.LAYER, has_bias=True, input="ln_1", pre_mlp="ln_2", final=None),
    scales=lambda keys: Scales(),
    names=replace(GPT2.names, embedding="tokens_embed", positions="positions_embed"),
)
