"""Dory: hidden states of length 1, gated attention, windows in three layers of four, and layers in the middle that all
tokens pass several times."""

from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, Norms, WeightNames
from quire.config.layers.experts import whole_number
from quire.config.layers.layer_kinds import LayerKind, full_every, listed_or
from quire.config.layers.streams import SphereSpec

EPS = 1e-6
"""Added to squares of lengths."""
ROTATIONS = {
    LayerKind.SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    LayerKind.FULL: {"rope_type": "default", "rope_theta": 10_000_000.0},
}
COUNTS = ("num_hidden_layers", "n_input_layers", "n_recurrent_layers", "n_output_layers")


def _derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """Layers as tokens pass them, and epsilon for means of squares of heads in place of their sums."""
    keys = ConfigKeys({**keys.raw, **_of_pairs(keys)}, keys.source, keys.defaults)
    num_layers, num_before = keys.count("num_hidden_layers"), whole_number(keys, "n_input_layers")
    num_behind, rest = whole_number(keys, "n_output_layers"), keys.find(("n_recurrent_layers",))[1]
    num_repeated = num_layers - num_before - num_behind if rest is None else whole_number(keys, "n_recurrent_layers")
    if num_repeated < 0 or num_before + num_repeated + num_behind != num_layers:
        problem = f"must be n_input_layers + n_recurrent_layers + n_output_layers, {num_before + num_behind} or more"
        keys.refuse("num_hidden_layers", num_layers, problem)
    num_loops, mode = keys.count("n_recurrent_loops"), keys.text("recurrent_kv_cache_mode")
    if mode != "per_loop" and num_loops > 1:
        problem = "must be per_loop: otherwise what a token gives depends on the tokens that are computed with it"
        keys.refuse("recurrent_kv_cache_mode", mode, problem)
    kinds = listed_or(full_every(4))(keys, num_layers)
    middle = kinds[num_before : num_before + num_repeated] * num_loops
    passed = [*kinds[:num_before], *middle, *kinds[num_before + num_repeated :]]
    return {
        "num_hidden_layers": len(passed),
        "layer_types": [str(kind) for kind in passed],
        "n_input_layers": num_before,
        "n_recurrent_layers": num_repeated,
        "rms_norm_eps": EPS / keys.count("head_dim"),
        **({"rope_parameters": ROTATIONS} if keys.raw.get("rope_parameters") is None else {}),
    }


def _of_pairs(keys: ConfigKeys) -> Mapping[str, Any]:
    """Released configs, and those that transformers writes, count attention and MLP as two layers."""
    listed = keys.raw.get("layer_types")
    if not isinstance(listed, list) or "mlp" not in listed:
        return {}
    counts = {name: keys.find((name,))[1] for name in COUNTS}
    halves = {name: count // 2 for name, count in counts.items() if isinstance(count, int)}
    return {"layer_types": listed[::2], **halves}


def _sphere(keys: ConfigKeys) -> SphereSpec:
    size, least = keys.count("hidden_size"), keys.positive("initializer_range")
    return SphereSpec(
        num_before=whole_number(keys, "n_input_layers"),
        num_repeated=whole_number(keys, "n_recurrent_layers"),
        num_loops=keys.count("n_recurrent_loops"),
        rate=keys.positive("ngpt_alpha_init") / least,
        query=keys.count("head_dim") ** 0.5 / least,
        gate=size**0.25 / least,
        inner=size**0.5,
        logits=1.0 / least,
    )


SPEC = FamilySpec(
    architecture="DoryForCausalLM",
    model_class="quire.models.variants.dory:DoryForCausalLM",
    defaults={
        "vocab_size": 131_072,
        "hidden_size": 2560,
        "intermediate_size": 7168,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "initializer_range": 0.0177,
        "sliding_window": 1024,
        "ngpt_alpha_init": 0.05,
        "n_input_layers": 8,
        "n_output_layers": 8,
        "n_recurrent_loops": 2,
        "recurrent_kv_cache_mode": "per_loop",
    },
    derived=_derived,
    refused={"rope_scaling": "reads rotations of this family from rope_parameters alone. Move it there."},
    layer_kinds=listed_or(full_every(4)),
    sliding_theta="rope_theta",
    is_gated=True,
    norms=Norms(input=None, pre_mlp=None, final=None),
    sphere=_sphere,
    names=WeightNames(base="backbone", embedding="embeddings", gate="g_proj"),
)
