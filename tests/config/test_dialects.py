"""The config.json of transformers 5 and that of transformers 4 describe the same model, for every family.

transformers 4 wrote `rope_theta` and `rope_scaling`, `torch_dtype`, and no `layer_types` where a pattern gives them;
both leave out what is the class's default. That a rewritten config is still the same model, transformers says itself.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError

from quire.config.arch import ModelArch
from quire.config.families import ARCHITECTURES, family_of
from tests.config.test_arch import comparable
from tests.family_configs import FAMILIES
from tests.models.cases import CASES

ROWS: dict[str, tuple[str, dict[str, Any]]] = {**{name: (name, {}) for name in FAMILIES}, **CASES}
SIZES = {
    "model_type", "architectures", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "n_embd",
    "n_layer", "n_head", "torch_dtype", "dtype",
}  # fmt: skip
"""Keys that every config has."""
VOLATILE = {
    "transformers_version", "architectures", "dtype", "label2id",
    "partial_rotary_factor", "sliding_window_pattern", "_sliding_window_pattern",
}  # fmt: skip
"""Keys that say nothing of the model, or nothing that `rope_parameters` and `layer_types` do not say."""


@pytest.fixture(params=ROWS)
def config(request: pytest.FixtureRequest) -> Any:
    return made(request.param)


def made(row: str) -> Any:
    """A configuration of transformers, as a checkpoint has it."""
    from transformers import AutoConfig

    family, overrides = ROWS[row]
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **overrides})
    config.architectures, config.dtype = [ARCHITECTURES[family]], "bfloat16"
    return config


def arch_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    return comparable(ModelArch.from_config(raw, source="config.json"))


def saved(config: Any) -> dict[str, Any]:
    """As `save_pretrained` writes it."""
    return read(config.to_json_string())


def read(text: str) -> dict[str, Any]:
    """As transformers reads what it writes: infinity has a spelling of its own."""
    raw: dict[str, Any] = json.loads(text, object_hook=lambda found: found.get("__float__", found))
    return {key: [float(end) for end in raw[key]] if key == "time_step_limit" else raw[key] for key in raw}


def with_old_rotation(raw: dict[str, Any]) -> dict[str, Any] | None:
    """With `rope_theta` and `rope_scaling`; None for rotations that transformers 4 had no keys for."""
    family = family_of(raw["architectures"][0], raw["model_type"])
    old, rope = {key: value for key, value in raw.items() if key != "rope_parameters"}, raw.get("rope_parameters")
    if rope is None:
        return old
    if "compress" in rope:  # of layers that compress, and of the others (`test_compressed`)
        return None
    full, sliding = rope.get("full_attention", rope), rope.get("sliding_attention")
    if full is None or any(isinstance(each, Mapping) for each in full.values()):  # by kinds that rotate, or are newer
        return None
    if sliding is not None:
        if family.sliding_theta is None or sliding["rope_type"] != "default":
            return None
        if family.sliding_theta == "rope_theta" and sliding["rope_theta"] != full["rope_theta"]:
            return None
        old[family.sliding_theta] = sliding["rope_theta"]
    spelling = {key: family.spellings.get(key, key) for key in ("rope_theta", "partial_rotary_factor")}
    old |= {spelling[key]: full[key] for key in spelling if key in full}
    scaling = {key: value for key, value in full.items() if key not in (*spelling, "rope_type")}
    if full["rope_type"] != "default":
        old["rope_scaling"] = {"rope_type": full["rope_type"], **scaling}
    return old


def means(config: Any, raw: dict[str, Any]) -> bool:
    """Whether transformers takes a config.json for this configuration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found, wanted = type(config).from_dict(dict(raw)).to_dict(), config.to_dict()
        except (ZeroDivisionError, KeyError, StrictDataclassError):  # a pattern of no layers; kinds that miss or differ
            return False
    return all(found.get(key) == wanted.get(key) for key in {*found, *wanted} - VOLATILE)


def test_keys_at_their_default_may_be_left_out(config: Any) -> None:
    defaults = type(config)().to_dict()
    whole = {**saved(config), **read(config.to_json_string(use_diff=False))}
    short = {key: value for key, value in whole.items() if key in SIZES or value != defaults.get(key, ...)}
    assert means(config, whole)
    assert means(config, short)
    assert arch_of(whole) == arch_of(saved(config)) == arch_of(short)


def test_the_dialect_of_transformers_4_is_the_same_model(config: Any) -> None:
    old = old_dialect(config)
    if old is None:
        pytest.skip("transformers 4 had no keys for this rotation")
    old["torch_dtype"] = old.pop("dtype")
    assert arch_of(old) == arch_of(saved(config))
    if old.get("rope_scaling"):  # as before version 4.43; newer classes of transformers do not know it
        rest = {key: value for key, value in old["rope_scaling"].items() if key != "rope_type"}
        assert arch_of({**old, "rope_scaling": {"type": old["rope_scaling"]["rope_type"], **rest}}) == arch_of(old)


def old_dialect(config: Any) -> dict[str, Any] | None:
    """What transformers 4 would have written; None where it had no keys for it."""
    old = with_old_rotation(without_layer_types(config, saved(config)))
    if old is None or means(config, old):
        return old
    is_nested = not {"full_attention", "compress"}.isdisjoint(config.rope_parameters)
    assert is_nested or stretches_unless_told(config), "one rotation has always had keys"
    return None


def stretches_unless_told(config: Any) -> bool:
    """Whether a rotation that is not stretched has no old spelling: without `rope_scaling` the class stretches it."""
    default, own = (getattr(each, "rope_parameters", None) or {} for each in (type(config)(), config))
    return own.get("rope_type") == "default" != default.get("rope_type", "default")


@pytest.mark.parametrize(
    ("row", "is_known"),
    [("gemma3", True), ("gemma3-linear", True), ("olmo3", True), ("olmo3-yarn", False), ("llama-yarn-scales", True)],
)
def test_transformers_says_which_rotations_have_old_keys(row: str, is_known: bool) -> None:
    assert (old_dialect(made(row)) is not None) == is_known


def without_layer_types(config: Any, raw: dict[str, Any]) -> dict[str, Any]:
    """Without the list where it follows from other keys, or from a pattern."""
    rest = {key: value for key, value in raw.items() if key != "layer_types"}
    shorter = (rest | ({"sliding_window_pattern": period} if period else {}) for period in (None, *range(2, 7)))
    return next((short for short in shorter if means(config, short)), raw)


@pytest.mark.parametrize(("row", "follows"), [("cohere2", True), ("olmo3-unlisted", True), ("cohere2-listed", False)])
def test_transformers_says_whether_layer_types_follow(row: str, follows: bool) -> None:
    config = made(row)
    assert ("layer_types" not in without_layer_types(config, saved(config))) == follows
