"""Nemotron-H: each layer is Mamba 2, attention without rotation, an MLP of squared ReLUs, or experts that are such."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, MlpKind, MlpSpec, Norms, WeightNames, mixture
from quire.config.layers.experts import nemotron_h_experts
from quire.config.layers.layer_kinds import none_rotated
from quire.config.layers.recurrent import nemotron_mamba2
from quire.config.layers.recurrent_mixers import RecurrentSpec

PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letters of `hybrid_override_pattern`, which older configs have -> what `layers_block_type` lists."""
OLDER = {"mamba": "linear_attention", "attention": "full_attention"}


def _kinds(keys: ConfigKeys) -> tuple[str, ...]:
    """What each layer is. Raises: ConfigError."""
    name, listed = keys.find(("layers_block_type", "layer_types", "hybrid_override_pattern"))
    known = PATTERN if isinstance(listed, str) else {**{kind: kind for kind in PATTERN.values()}, **OLDER}
    if not isinstance(listed, (str, list)) or not listed or not all(kind in known for kind in map(str, listed)):
        keys.refuse(name, listed, f"must name the kind of each layer, one of {', '.join(known)}")
    return tuple(known[kind] for kind in listed)


def _derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """transformers counts the kinds, whatever `num_hidden_layers` says, and never ties the head."""
    head_size = keys.count("head_dim", "attention_head_dim")
    return {"num_hidden_layers": len(_kinds(keys)), "head_dim": head_size, "tie_word_embeddings": False}


def _states(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    spec = nemotron_mamba2(keys)
    return tuple(spec if kind == "linear_attention" else None for kind in _kinds(keys))


def _attends(keys: ConfigKeys, recurrent: Sequence[RecurrentSpec | None]) -> tuple[bool, ...]:
    return tuple(kind == "full_attention" for kind in _kinds(keys))


def _mlps(keys: ConfigKeys, num_layers: int, size: int) -> tuple[MlpSpec, ...]:
    kinds, has_bias = _kinds(keys), keys.flag("mlp_bias", default=False)
    nothing = MlpSpec(kind=MlpKind.NONE, intermediate_size=0, has_bias=False)
    specs = {"mlp": MlpSpec(kind=MlpKind.PLAIN, intermediate_size=size, has_bias=has_bias)}
    if "moe" in kinds:
        specs["moe"] = mixture(nemotron_h_experts(keys), has_bias)
    return tuple(specs.get(kind, nothing) for kind in kinds)


SPEC = FamilySpec(
    architecture="NemotronHForCausalLM",
    spellings={"rms_norm_eps": "layer_norm_epsilon", "hidden_act": "mlp_hidden_act"},
    defaults={
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": 1e-5,
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 21_504,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    derived=_derived,
    refused={
        "attention_bias": "builds the attention of this family without biases. Use another model.",
        "sliding_window": "builds the attention of this family without a window. Use another model.",
        "moe_latent_size": "builds the experts of this family as wide as the model. Use another model.",
    },
    recurrent=_states,
    attends=_attends,
    rotated=none_rotated,
    norms=Norms(input="norm", pre_mlp="norm", final="norm_f"),
    mlp=_mlps,
    attention_bias=False,
    output_bias=False,
    names=WeightNames(base="backbone", embedding="embeddings", attention="mixer", recurrent="mixer", mlp="mixer"),
)
