"""GPT-Neo: GPT-2, with windows on every other layer, unscaled queries, and a bias only on attention's output."""

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, NormKind, Norms, Scales, WeightNames, plain
from quire.config.layers.layer_kinds import LayerKind

KINDS = {"global": LayerKind.FULL, "local": LayerKind.SLIDING}
PROBLEM = 'must be pairs such as [["global", "local"], 12], whose kinds come to one for each layer'


def layer_kinds(keys: ConfigKeys, num_layers: int) -> tuple[LayerKind, ...]:
    """As `attention_layers` lists them, which transformers writes and reads, or else `attention_types`."""
    listed = keys.raw.get("attention_layers")
    if listed is None:
        return _of_pairs(keys, num_layers)
    if not isinstance(listed, list) or len(listed) != num_layers or not _are_kinds(listed):
        keys.refuse("attention_layers", listed, f"must name {' or '.join(KINDS)} for each of {num_layers} layers")
    return tuple(KINDS[name] for name in listed)


def _of_pairs(keys: ConfigKeys, num_layers: int) -> tuple[LayerKind, ...]:
    """Kinds, and how often they come."""
    given = keys.raw.get("attention_types")
    pairs = [[["global", "local"], num_layers // 2]] if given is None else given
    if not isinstance(pairs, list) or not all(map(_is_pair, pairs)):
        keys.refuse("attention_types", given, PROBLEM)
    if sum(len(names) * count for names, count in pairs) != num_layers:
        keys.refuse("attention_types", given, PROBLEM)
    return tuple(KINDS[name] for names, count in pairs for name in names * count)


def _is_pair(pair: object) -> bool:
    if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], list):
        return False
    names, count = pair
    return _are_kinds(names) and isinstance(count, int) and not isinstance(count, bool) and count >= 0


def _are_kinds(names: list[object]) -> bool:
    return all(isinstance(name, str) and name in KINDS for name in names)


SPEC = FamilySpec(
    architecture="GPTNeoForCausalLM",
    spellings={
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "hidden_act": "activation_function",
        "rms_norm_eps": "layer_norm_epsilon",
        "sliding_window": "window_size",
    },
    defaults={
        "activation_function": "gelu_new",
        "max_position_embeddings": 2048,
        "window_size": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 50_256,
        "eos_token_id": 50_256,
    },
    layer_kinds=layer_kinds,
    norms=Norms(kind=NormKind.LAYER, has_bias=True, input="ln_1", pre_mlp="ln_2", final="ln_f"),
    attention_bias=False,
    output_bias=True,
    mlp=plain(True),
    scales=lambda keys: Scales(query=1.0),
    names=WeightNames(
        base="transformer",
        embedding="wte",
        positions="wpe",
        layers="h",
        attention="attn.attention",
        output="out_proj",
        up="c_fc",
        down="c_proj",
    ),
)
