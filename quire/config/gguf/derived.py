"""Values of config.json that follow from several metadata keys of a GGUF file, or from which tensors it has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quire.config.arch import MAX_LAYERS
from quire.config.gguf.metadata import GgufKeys
from quire.errors import ConfigError

Derived = Callable[[GgufKeys], Mapping[str, Any]]
Constants = Callable[[GgufKeys], Iterator[tuple[str, tuple[int, ...], float]]]
"""From a file to (transformers' path in the layers, shape, value)."""
SIGMOID = 2
"""How `expert_gating_func` says that experts are chosen by sigmoids."""


def _num_layers(keys: GgufKeys) -> int:
    """Raises: ConfigError for more than a model has."""
    count = keys.count("block_count")
    if count > MAX_LAYERS:
        keys.refuse(keys.name_of("block_count"), f"must be at most {MAX_LAYERS}")
    return count


def nothing(keys: GgufKeys) -> Mapping[str, Any]:
    """No value."""
    return {}


def no_constants(keys: GgufKeys) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """No weight."""
    return iter(())


def gemma_queries(num_layers_of_27b: int) -> Derived:
    """Queries are scaled by the root of a head's size, in the model of 27 billion by that of a share of the width."""

    def derived(keys: GgufKeys) -> Mapping[str, Any]:
        is_27b = keys.count("block_count") == num_layers_of_27b
        width = keys.count("embedding_length") // keys.count("attention.head_count")
        return {"query_pre_attn_scalar": width if is_27b else keys.count("attention.key_length")}

    return derived


def gemma3(keys: GgufKeys) -> Mapping[str, Any]:
    """The base of layers with a window has a key in newer files."""
    given = keys.of_model("rope.freq_base_swa")
    return {**gemma_queries(62)(keys), **({} if given is None else {"rope_local_base_freq": given})}


def no_window(keys: GgufKeys) -> Mapping[str, Any]:
    """No layer has a window, whatever the file says."""
    return {"sliding_window": None}


def gpt_oss(keys: GgufKeys) -> Mapping[str, Any]:
    """No file has these: transformers and llama.cpp have them in code."""
    return {"swiglu_limit": 7.0}


def has_head_norms(name: str) -> Derived:
    """A key of config.json that says whether queries and keys have norms of their own."""
    return lambda keys: {name: keys.has("blk.0.attn_q_norm.weight")}


def alibi(keys: GgufKeys) -> Mapping[str, Any]:
    """MPT: attention has an object of its own."""
    clip = keys.of_model("attention.clamp_kqv")
    bias = keys.of_model("attention.max_alibi_bias")
    return {"attn_config": {"alibi": True, "alibi_bias_max": bias, "clip_qkv": clip or None}}


def dbrx(keys: GgufKeys) -> Mapping[str, Any]:
    """Attention and experts have objects of their own."""
    attention = {
        "kv_n_heads": keys.count("attention.head_count_kv"),
        "clip_qkv": keys.of_model("attention.clamp_kqv") or None,
        "rope_theta": keys.number("rope.freq_base"),
    }
    experts = {
        "ffn_hidden_size": keys.count("feed_forward_length"),
        "moe_num_experts": keys.count("expert_count"),
        "moe_top_k": keys.count("expert_used_count"),
    }
    return {"attn_config": attention, "ffn_config": experts}


def falcon(keys: GgufKeys) -> Mapping[str, Any]:
    """The generations: one key/value head, or several, behind one norm or two."""
    num_heads = keys.count("attention.head_count_kv")
    return {
        "multi_query": num_heads == 1,
        "num_kv_heads": num_heads,
        "new_decoder_architecture": num_heads > 1,
        "num_ln_in_parallel_attn": 2 if keys.has("blk.0.attn_norm_2.weight") else 1,
    }


def multi_query(keys: GgufKeys) -> Mapping[str, Any]:
    """Whether all queries share one key/value head."""
    return {"multi_query": keys.count("attention.head_count_kv") == 1}


def phimoe(keys: GgufKeys) -> Mapping[str, Any]:
    """Whether the head has a bias."""
    return {"lm_head_bias": keys.has("output.bias"), "sliding_window": None}


def without_draft_layers(keys: GgufKeys) -> Mapping[str, Any]:
    """Layers that draft are counted among the others."""
    num_drafting = keys.count("nextn_predict_layers") if keys.of_model("nextn_predict_layers") else 0
    return {"num_hidden_layers": keys.count("block_count") - num_drafting}


def glm4_moe(keys: GgufKeys) -> Mapping[str, Any]:
    """GLM 4.5."""
    return {**without_draft_layers(keys), **has_head_norms("use_qk_norm")(keys)}


def minicpm(keys: GgufKeys) -> Mapping[str, Any]:
    """Older files leave the factors out, which are those of the first models."""
    width = keys.count("embedding_length")
    scale, residual = keys.of_model("embedding_scale"), keys.of_model("residual_scale")
    return {
        "embedding_multiplier": 12.0 if scale is None else scale,
        "residual_multiplier": 1.4 / math.sqrt(keys.count("block_count")) if residual is None else residual,
        "logits_scaling": width / 256 if keys.of_model("logit_scale") is None else keys.number("logit_scale"),
        "attention_multiplier": math.sqrt(keys.count("attention.head_count") / width),
    }


def baichuan(keys: GgufKeys) -> Mapping[str, Any]:
    """The model of 13 billion has no rotation, which no file says."""
    if keys.count("block_count") == 40:
        raise ConfigError(f"{keys.source}: Baichuan 13B (ALiBi) is not read from GGUF. Use another model.")
    return {}


def llama4(keys: GgufKeys) -> Mapping[str, Any]:
    """No file says these: only the model with 128 experts has no norms of heads."""
    return {"use_qk_norm": keys.count("expert_count") != 128, "attention_chunk_size": 8192}


def latent(keys: GgufKeys) -> Mapping[str, Any]:
    """Sizes of latent attention. Newer files say of the cache what older ones say of heads, and of heads in keys of
    their own.
    """
    is_newer = keys.of_model("attention.key_length_mla") is not None
    ending = "_mla" if is_newer else ""
    rope = keys.count("rope.dimension_count")
    return {
        "num_key_value_heads": keys.count("attention.head_count"),
        "q_lora_rank": keys.of_model("attention.q_lora_rank") or None,
        "kv_lora_rank": keys.count("attention.kv_lora_rank"),
        "qk_nope_head_dim": keys.count(f"attention.key_length{ending}") - rope,
        "qk_rope_head_dim": rope,
        "v_head_dim": keys.of_model(f"attention.value_length{ending}"),
        "head_dim": None,
        "partial_rotary_factor": 1.0,
    }


def deepseek(keys: GgufKeys) -> Mapping[str, Any]:
    """V2 and V3."""
    groups, is_v3 = keys.of_model("expert_group_count") or 1, keys.of_model("expert_gating_func") == SIGMOID
    v2_method = "greedy" if groups == 1 else "group_limited_greedy"
    return {
        **latent(keys),
        "topk_method": None if is_v3 else v2_method,
        "n_group": groups,
        "topk_group": keys.of_model("expert_group_used_count") or 1,
        "norm_topk_prob": keys.flag_of_model("expert_weights_norm", default=False),
        **_latent_yarn(keys),
    }


def _latent_yarn(keys: GgufKeys) -> Mapping[str, Any]:
    """Yarn's factor of the products of queries and keys. Files have a tenth of it."""
    multiplier = keys.of_model("rope.scaling.yarn_log_multiplier")
    if keys.of_model("rope.scaling.type") != "yarn" or not multiplier:
        return {}
    mscale = keys.number("rope.scaling.yarn_log_multiplier") * 10.0
    return {"rope_scaling": {**yarn(keys), "mscale": mscale, "mscale_all_dim": mscale}}


def yarn(keys: GgufKeys) -> Mapping[str, Any]:
    """A rotation that is stretched by parts, as the metadata have it."""
    given = {
        "rope_type": "yarn",
        "factor": keys.number("rope.scaling.factor"),
        "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
    }
    for name in ("beta_fast", "beta_slow"):
        if keys.of_model(f"rope.scaling.yarn_{name}") is not None:
            given[name] = keys.number(f"rope.scaling.yarn_{name}")
    return given


def minicpm3(keys: GgufKeys) -> Mapping[str, Any]:
    """Values are as wide as a share of the hidden state, where the file does not say otherwise."""
    share = keys.count("embedding_length") // keys.count("attention.head_count")
    return {**latent(keys), "v_head_dim": keys.of_model("attention.value_length") or share}


def _expand(keys: GgufKeys) -> int:
    """How many times as wide as the model a state space is."""
    inner, width = keys.count("ssm.inner_size"), keys.count("embedding_length")
    if inner % width:
        keys.refuse(keys.name_of("ssm.inner_size"), f"must be a multiple of the width of {width}")
    return inner // width


def _only_states(keys: GgufKeys) -> Mapping[str, Any]:
    """Layers without attention and MLP."""
    return {
        "expand": _expand(keys),
        "use_conv_bias": keys.has("blk.0.ssm_conv1d.bias"),
        "use_bias": keys.has("blk.0.ssm_in.bias"),
    }


def mamba(keys: GgufKeys) -> Mapping[str, Any]:
    """Mamba and Falcon Mamba."""
    return {**_only_states(keys), "intermediate_size": keys.count("ssm.inner_size")}


def mamba2(keys: GgufKeys) -> Mapping[str, Any]:
    """Heads of Mamba 2 are what `time_step_rank` counts."""
    return {**_only_states(keys), "head_dim": keys.count("ssm.inner_size") // keys.count("ssm.time_step_rank")}


def _states(keys: GgufKeys) -> Mapping[str, Any]:
    """A Mamba 2 layer as hybrid models spell it."""
    state = next((i for i in range(_num_layers(keys)) if keys.has(f"blk.{i}.ssm_in.weight")), 0)
    return {
        "mamba_d_head": keys.count("ssm.inner_size") // keys.count("ssm.time_step_rank"),
        "mamba_conv_bias": keys.has(f"blk.{state}.ssm_conv1d.bias"),
        "mamba_proj_bias": keys.has(f"blk.{state}.ssm_in.bias"),
    }


def falcon_h1(keys: GgufKeys) -> Mapping[str, Any]:
    """The model's factors are in the weights."""
    return {
        **_states(keys),
        "mamba_d_ssm": keys.count("ssm.inner_size"),
        "mamba_rms_norm": keys.has("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def granite_hybrid(keys: GgufKeys) -> Mapping[str, Any]:
    """Layers have attention that have heads for keys."""
    attends = keys.by_layer("attention.head_count_kv", _num_layers(keys))
    has_experts = bool(keys.of_model("expert_count"))
    rotates = keys.flag_of_model("rope.scaling.finetuned", default=True)
    wide = "expert_shared_feed_forward_length" if has_experts else "feed_forward_length"
    return {
        **_states(keys),
        "mamba_expand": _expand(keys),
        "layer_types": ["attention" if each else "mamba" for each in attends],
        "num_local_experts": keys.of_model("expert_count") or 0,
        "shared_intermediate_size": keys.count(wide),
        "position_embedding_type": "rope" if rotates else "nope",
    }


def bamba(keys: GgufKeys) -> Mapping[str, Any]:
    """The same, with indices of the layers with attention."""
    attends = keys.by_layer("attention.head_count_kv", _num_layers(keys))
    indices = [index for index, each in enumerate(attends) if each]
    return {**_states(keys), "mamba_expand": _expand(keys), "attn_layer_indices": indices}


def nemotron_h(keys: GgufKeys) -> Mapping[str, Any]:
    """Each layer is one kind of part."""
    count = _num_layers(keys)
    attends, feeds = (keys.by_layer(key, count) for key in ("attention.head_count_kv", "feed_forward_length"))
    kinds = [_nemotron_kind(keys, index, attends[index], feeds[index]) for index in range(count)]
    state = kinds.index("linear_attention") if "linear_attention" in kinds else 0
    return {
        "layers_block_type": kinds,
        "mamba_num_heads": keys.count("ssm.time_step_rank"),
        "mamba_head_dim": keys.count("ssm.inner_size") // keys.count("ssm.time_step_rank"),
        "use_conv_bias": keys.has(f"blk.{state}.ssm_conv1d.bias"),
        "use_bias": keys.has(f"blk.{state}.ssm_in.bias"),
        "norm_topk_prob": keys.flag_of_model("expert_weights_norm", default=True),
    }


def _nemotron_kind(keys: GgufKeys, index: int, attends: bool, feeds: bool) -> str:
    if keys.has(f"blk.{index}.ffn_gate_inp.weight"):
        return "moe"
    return "full_attention" if attends else "mlp" if feeds else "linear_attention"


def linear_attention(keys: GgufKeys) -> Mapping[str, Any]:
    """Qwen3-Next: the width of value heads."""
    heads = keys.count("ssm.time_step_rank")
    return {**without_draft_layers(keys), "linear_value_head_dim": keys.count("ssm.inner_size") // heads}


def qwen35(keys: GgufKeys) -> Mapping[str, Any]:
    """Each value head has a key head, because those of the file are repeated."""
    return {**linear_attention(keys), "linear_num_key_heads": keys.count("ssm.time_step_rank")}


def ministral3(keys: GgufKeys) -> Mapping[str, Any]:
    """Queries are scaled by their position, by numbers among those of the rotation."""
    mscale = keys.of_model("rope.scaling.yarn_log_multiplier")
    given = {} if not mscale else {"mscale": mscale, "mscale_all_dim": mscale}
    own = {
        "rope_theta": keys.number("rope.freq_base"),
        "llama_4_scaling_beta": keys.number("attention.temperature_scale"),
    }
    return {"rope_parameters": {**yarn(keys), **own, **given}, "rope_scaling": None}


def apertus(keys: GgufKeys) -> Mapping[str, Any]:
    """A rotation that is not stretched, where the file has no divisors: config.json would have to say so."""
    plain = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base")}
    return {} if keys.has("rope_freqs.weight") else {"rope_parameters": plain}


def bitnet(keys: GgufKeys) -> Mapping[str, Any]:
    """Raises: ConfigError for scales beside the tensors of products, which older converters wrote."""
    if keys.has("blk.0.attn_q.scale"):
        raise ConfigError(
            f"{keys.source}: scales of products are tensors of their own (blk.0.attn_q.scale), which quire does not "
            "read. Convert the model with a newer convert_hf_to_gguf.py, or use the model with *.safetensors."
        )
    return {}


def xielu(keys: GgufKeys) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Apertus: the numbers of each layer's activation. Raises: ConfigError where some are missing."""
    count = _num_layers(keys)
    for name, shape in (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ())):
        key = f"xielu.{name}"
        given = keys.metadata.get(key)
        values = [given] * count if isinstance(given, float) else keys.numbers(key) or []
        if len(values) < count:
            keys.refuse(key, f"must have a number for each of {count} layers")
        yield from ((f"{index}.mlp.act_fn.{name}", shape, float(values[index])) for index in range(count))


def lfm2(keys: GgufKeys) -> Mapping[str, Any]:
    """Layers have attention that have heads for keys, the others a convolution."""
    attends = keys.by_layer("attention.head_count_kv", _num_layers(keys))
    return {
        "layer_types": ["full_attention" if each else "conv" for each in attends],
        "block_auto_adjust_ff_dim": False,
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in keys.model.tensors),
    }


def jamba(keys: GgufKeys) -> Mapping[str, Any]:
    """Which layers have attention, and which have experts, as periods."""
    count = _num_layers(keys)
    attends = keys.by_layer("attention.head_count_kv", count)
    experts = [keys.has(f"blk.{index}.ffn_gate_inp.weight") for index in range(count)]
    period, offset = _period(keys, attends)
    expert_period, expert_offset = _period(keys, experts)
    return {
        "mamba_expand": _expand(keys),
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in keys.model.tensors),
        "attn_layer_period": period,
        "attn_layer_offset": offset,
        "expert_layer_period": expert_period,
        "expert_layer_offset": expert_offset,
        "num_experts": keys.of_model("expert_count") or 1,
        "num_experts_per_tok": keys.of_model("expert_used_count") or 1,
    }


def _period(keys: GgufKeys, chosen: list[bool]) -> tuple[int, int]:
    """(every which layer, the first). Raises: ConfigError where the layers are not so regular."""
    places = [index for index, each in enumerate(chosen) if each]
    period = places[1] - places[0] if len(places) > 1 else len(chosen)
    offset = places[0] if places else period
    if places != list(range(offset, len(chosen), period)):
        raise ConfigError(f"{keys.source}: layers {places} are no regular sequence. Use the model with *.safetensors.")
    return period, offset
