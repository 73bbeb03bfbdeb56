"""Tiny random checkpoints, made by transformers: what the models, the loader and the engine are tested against.

Each is a complete model directory: config.json, model.safetensors (or shards), generation_config.json and a byte-level
tokenizer with a chat template. The same arguments always give the same bytes.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from tests.family_configs import FAMILIES
from tests.foreign_checkpoints import FOREIGN
from tests.tiny_tokenizer import write_tokenizer


def make_checkpoint(
    family: str,
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write a random model of a family (a key of FAMILIES or FOREIGN) and a tokenizer into a directory, and return it.

    overrides change the transformers configuration. A small `max_shard_size` ("40KB") gives a sharded checkpoint.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = random_model(family, seed=seed, **overrides).to(dtype)
        model.save_pretrained(directory, max_shard_size=max_shard_size)
    write_tokenizer(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 258]}))
    return directory


def random_model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """The transformers model of a family with random weights, biases and norms included."""
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = AutoConfig.for_model(family, **{**{**FOREIGN, **FAMILIES}[family], **overrides})
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_model().from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            is_alike = isinstance(value, torch.nn.Parameter) and (value.dim() == 1 or not value.any())
            if name.endswith("tid2eid"):
                value.copy_(torch.randint(0, model.config.n_routed_experts, value.shape, generator=generator))
            elif name.endswith("balancing_biases"):  # by which transformers hardly ever lets a token skip its expert
                value.copy_(torch.randn(value.shape, generator=generator) * 0.1)
            elif is_alike or name.endswith(("_correction_bias", "expert_bias", "layer_scalar")):
                # Norms start at one, biases and some routers at zero, which would hide mistakes.
                value.add_(torch.randn(value.shape, generator=generator) * 0.1)
            if name.endswith("qk_norm.temp"):  # which begins at zero, so that all scores would be alike
                value.add_(1.0)
    return model


def parameters_in_transformers(family: str, **overrides: Any) -> int:
    """Numbers of the model that transformers makes of a configuration, biases of the choice of experts included."""
    from transformers import AutoConfig

    with torch.device("meta"):
        model = auto_model().from_config(AutoConfig.for_model(family, **overrides))
    biases = [value for name, value in model.named_buffers() if name.endswith(("_correction_bias", "balancing_biases"))]
    return sum(value.numel() for value in [*model.parameters(), *biases])


@cache
def auto_model() -> Any:
    """transformers' `AutoModelForCausalLM`, which does not list every class that continues texts."""
    import transformers as t
    from transformers.models.mllama.configuration_mllama import MllamaTextConfig

    for config, model in (
        (t.Mistral4Config, t.Mistral4ForCausalLM),
        (t.Emu3TextConfig, t.Emu3ForCausalLM),
        (MllamaTextConfig, t.MllamaForCausalLM),
    ):
        t.AutoModelForCausalLM.register(config, model, exist_ok=True)
    return t.AutoModelForCausalLM


@lru_cache(maxsize=2)
def in_transformers(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A checkpoint as transformers reads it, to compare with. The last two are kept: reading takes longer than running.

    Callers must not change it.
    """
    from transformers import AutoConfig

    # Falcon's eager attention adds ALiBi twice, once with the mask.
    attention = "sdpa" if getattr(AutoConfig.from_pretrained(directory), "alibi", False) else "eager"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        model = auto_model().from_pretrained(
            directory, dtype=dtype, attn_implementation=attention, experts_implementation="eager"
        )
    _restore_biases(model, directory)
    return model.eval()


def _restore_biases(model: Any, directory: Path) -> None:
    """transformers loads Zaya's balancing biases, and then sets the one of no expert to -1 whatever is stored."""
    from safetensors.torch import load_file

    reset = [(name, value) for name, value in model.named_buffers() if name.endswith("balancing_biases")]
    for name, value in reset:
        value.copy_(load_file(directory / "model.safetensors")[name])


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread: with models this small more of them mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
