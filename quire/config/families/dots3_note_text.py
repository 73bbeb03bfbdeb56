"""dots3-note (text): GLM-5 with gates of heads, most of whose layers have a window, and heads of other sizes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.families.deepseek_v32 import DEFAULTS
from quire.config.family_spec import FamilySpec, WeightNames, experts
from quire.config.layers.by_layer import BY_LAYER, by_layer
from quire.config.layers.experts import ExpertsSpec, deepseek_v3_experts, whole_number
from quire.config.layers.latent import INDEXED, indexed_heads, indexer_of, latent_attention, latent_heads
from quire.config.layers.layer_kinds import LayerKind
from quire.config.layers.mixers import LatentAttentionSpec
from quire.errors import counted

SIZES = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}
"""What layers with a window have of their own, and what it is where no key says so; `swa_` begins those keys."""
OWN = (*SIZES, "qk_rope_head_dim")
attention = latent_attention(interleaved=True)


def _derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """The sizes of both kinds of layers, from what each layer has or from the keys of published configs."""
    num_layers = keys.count("num_hidden_layers")
    kinds = _kinds(keys, num_layers)
    full, sliding = _sizes(keys, kinds)
    found: dict[str, Any] = {
        **full,
        **{f"swa_{name}": value for name, value in sliding.items()},
        "layer_types": kinds,
        "mlp_layer_types": _mlp_types(keys, num_layers),
        "rope_parameters": _unwindowed_rotation(keys, kinds),
        "swa_rope_parameters": _rotation(keys, LayerKind.SLIDING, kinds),
        "rope_scaling": None,
    }
    whole = ConfigKeys({**keys.raw, **found}, keys.source, keys.defaults, keys.spellings)
    return {**found, **(indexed_heads if INDEXED in kinds else latent_heads)(whole)}


def _kinds(keys: ConfigKeys, num_layers: int) -> list[str]:
    """Older configs call layers with an indexer full ones."""
    is_written = keys.raw.get(BY_LAYER) is not None
    has_indexers = keys.raw.get("use_dsa", None if is_written else True)
    meant = {LayerKind.FULL: INDEXED} if has_indexers else {INDEXED: LayerKind.FULL}
    listed = keys.raw.get("layer_types")
    if listed is None:
        has_window = keys.flag("use_sliding_window", default=True)
        is_sliding = [has_window and index >= 2 and index % 4 != 1 for index in range(num_layers)]
        listed = [str(LayerKind.SLIDING) if sliding else INDEXED for sliding in is_sliding]
    known = (INDEXED, *LayerKind)
    if not isinstance(listed, list) or len(listed) != num_layers or not all(kind in known for kind in listed):
        problem = f"must name one of {', '.join(known)} for each of {counted(num_layers, 'layer')}"
        keys.refuse("layer_types", listed, problem)
    return listed if has_indexers is None else [str(meant.get(kind, kind)) for kind in listed]


def _mlp_types(keys: ConfigKeys, num_layers: int) -> Any:
    """Published configs may list whether each layer behind the first ones has experts."""
    listed, steps = keys.raw.get("mlp_layer_types"), keys.raw.get("moe_layer_freq")
    if listed is not None or not isinstance(steps, list):
        return listed
    if len(steps) != num_layers:
        problem = f"must be a number, or have one for each of {counted(num_layers, 'layer')}"
        keys.refuse("moe_layer_freq", steps, problem)
    first = whole_number(keys, "first_k_dense_replace")
    return ["sparse" if index >= first and step else "dense" for index, step in enumerate(steps)]


def _sizes(keys: ConfigKeys, kinds: Sequence[str]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Of the layers without a window, and of those with one."""
    written, common = by_layer(keys, len(kinds)), {name: keys.given(name)[1] for name in OWN}
    if written is None:
        swa = ConfigKeys(keys.raw, keys.source, {f"swa_{name}": size for name, size in SIZES.items()})
        sliding = {name: swa.count(f"swa_{name}") for name in SIZES}
        rest = sliding["head_dim"] - sliding["qk_nope_head_dim"]
        return common, {**sliding, "qk_rope_head_dim": swa.count("swa_qk_rope_head_dim", default=rest)}
    found: dict[bool, Mapping[str, Any]] = {True: common, False: common}
    seen: set[bool] = set()
    for index, kind in enumerate(kinds):
        own, is_sliding = written.get(index, {}), kind == LayerKind.SLIDING
        unknown = sorted(set(own) - set(OWN))
        if unknown:
            keys.refuse(f"{BY_LAYER}.{index}", unknown, f"may have {', '.join(OWN)} alone")
        sizes = {**common, **own}
        if is_sliding in seen and found[is_sliding] != sizes:
            keys.refuse(f"{BY_LAYER}.{index}", dict(own), f"must be as in the other layers of {kind}")
        found[is_sliding] = sizes
        seen.add(is_sliding)
    return found[False], found[True]


def _unwindowed_rotation(keys: ConfigKeys, kinds: Sequence[str]) -> Mapping[str, Any]:
    """Of layers that see everything, and of those with an indexer."""
    found = [_rotation(keys, kind, kinds) for kind in (LayerKind.FULL, INDEXED) if kind in kinds]
    if len(found) > 1 and found[0] != found[1]:
        given = keys.raw.get("rope_parameters")
        keys.refuse("rope_parameters", given, f"must be the same for {LayerKind.FULL} and {INDEXED}")
    return found[0] if found else {}


def _rotation(keys: ConfigKeys, kind: str, kinds: Sequence[str]) -> Mapping[str, Any]:
    """How layers of a kind rotate, whatever share of their heads that is."""
    given, scaling = keys.raw.get("rope_parameters"), keys.raw.get("rope_scaling")
    if given is not None and scaling is not None:
        keys.refuse("rope_scaling", scaling, "must be null beside rope_parameters")
    given = given or scaling
    theta = "swa_rope_theta" if given is None and kind == LayerKind.SLIDING else "rope_theta"
    if given is None:
        given = {}
    elif isinstance(given, Mapping) and any(name in kinds for name in given):
        given = given.get(kind, {} if kind not in kinds else None)
    if not isinstance(given, Mapping):
        problem = f"must be an object, or have one for each of {', '.join(sorted({*kinds}))}"
        keys.refuse("rope_parameters", given, problem)
    return {"rope_theta": keys.positive(theta), **given, "partial_rotary_factor": 1.0}


def _latent(keys: ConfigKeys, max_position: int, aliases: Mapping[str, str]) -> LatentAttentionSpec:
    """Latents and low-rank queries are multiplied by the root of how much narrower they are than the model."""
    spec, size = attention(keys, max_position, aliases), keys.count("hidden_size")
    if spec.query_rank is None:
        keys.refuse("q_lora_rank", None, "must be a number: queries of this family are of low rank")
    return replace(
        spec,
        norm_eps=keys.positive("rms_norm_eps"),
        query_norm_scale=math.sqrt(size / spec.query_rank),
        latent_norm_scale=math.sqrt(size / spec.latent_size),
        query_scale=1.0 / math.sqrt(spec.nope_size + spec.rope_size),
        has_key_norm=True,
        num_gates=spec.num_heads,
    )


def _latent_layers(keys: ConfigKeys, full: LatentAttentionSpec, num_layers: int) -> Sequence[LatentAttentionSpec]:
    kinds, max_position = keys.raw["layer_types"], keys.count("max_position_embeddings")
    found = {str(LayerKind.FULL): full}
    if INDEXED in kinds:
        found[INDEXED] = replace(full, indexer=indexer_of(keys, max_position, interleaved=True))
    if LayerKind.SLIDING in kinds:
        found[str(LayerKind.SLIDING)] = _sliding(keys, max_position)
    return [found[kind] for kind in kinds]


def _sliding(keys: ConfigKeys, max_position: int) -> LatentAttentionSpec:
    own = {name: keys.raw[f"swa_{name}"] for name in (*OWN, "rope_parameters")}
    swa = ConfigKeys({**keys.raw, **own}, keys.source, keys.defaults)
    latent_heads(swa)  # refuses KV heads that are others
    spec, size = _latent(swa, max_position, {}), swa.count("head_dim")
    if size != spec.nope_size + spec.rope_size:
        keys.refuse("swa_head_dim", size, "must be the sum of swa_qk_nope_head_dim and swa_qk_rope_head_dim")
    return replace(spec, window=keys.count("sliding_window", "sliding_window_size"))


def _experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    """Shared experts have a width of their own."""
    shared_size = keys.count("n_shared_experts") * keys.count("shared_experts_intermediate_size")
    return tuple(spec and replace(spec, shared_size=shared_size) for spec in deepseek_v3_experts(keys, num_layers))


SPEC = FamilySpec(
    architecture="Dots3NoteForCausalLM",
    spellings={"shared_experts_intermediate_size": "moe_shared_expert_intermediate_size"},
    defaults={
        **DEFAULTS,
        "vocab_size": 152_064,
        "hidden_size": 5120,
        "intermediate_size": 13_824,
        "num_hidden_layers": 46,
        "num_attention_heads": 128,
        "q_lora_rank": 1024,
        "head_dim": 256,
        "sliding_window_size": 512,
        "moe_intermediate_size": 1536,
        "shared_experts_intermediate_size": 1536,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 524_288,
        "rms_norm_eps": 1e-5,
        "rope_theta": 80_000_000.0,
        "swa_rope_theta": 50_000.0,
        BY_LAYER: None,
        "bos_token_id": 151_643,
        "eos_token_id": 151_668,
    },
    derived=_derived,
    latent=_latent,
    latent_layers=_latent_layers,
    mlp=experts(_experts),
    names=WeightNames(gate="g_proj"),
)
