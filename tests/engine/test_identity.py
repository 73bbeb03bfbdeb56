"""Identity: every field counts but the name, and what differs is said."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from quire import EngineArgs, SamplingParams
from quire.engine.core_startup import EMBEDDED_MODEL, create_config
from quire.engine.engine_core import EngineCore
from quire.engine.identity import Identity, check_unchanged, identity_of
from quire.errors import ConfigError
from quire.messages.request import EngineCoreRequest
from tests.fakes import MemoryExecutor

IDENTITY = identity_of(create_config(EngineArgs()), "0" * 64)


def other(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return (*value, 7) if isinstance(value, tuple) else f"{value}x"


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Identity)])
def test_every_field_counts_but_the_name(name: str) -> None:
    changed = dataclasses.replace(IDENTITY, **{name: other(getattr(IDENTITY, name))})
    counts = name != "model"
    assert (changed.digest != IDENTITY.digest) == counts
    assert [line.partition(":")[0] for line in IDENTITY.differences(changed)] == [name] * counts
    if counts:
        with pytest.raises(ConfigError, match=rf"changed since the engine started \({name}: .*restart the server"):
            check_unchanged(IDENTITY, changed)
    else:
        check_unchanged(IDENTITY, changed)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"kv_cache_dtype": "int8"},
        {"max_model_len": 512},
        {"block_size": 16},
        {"ops": "reference"},
        {"skip_tokenizer_init": True},
        {"chat_template": "{{ messages }}"},
        {"hf_overrides": {"rms_norm_eps": 0.1}},
        {"override_generation_config": {"eos_token_id": 5}},
    ],
)
def test_options_that_change_tokens_change_the_identity(options: dict[str, Any]) -> None:
    assert identity_of(create_config(EngineArgs(**options)), "0" * 64).digest != IDENTITY.digest


@pytest.mark.parametrize(
    "options", [{"max_num_seqs": 3}, {"num_threads": 1}, {"enable_prefix_caching": False}, {"seed": 5}]
)
def test_options_that_do_not_leave_it_as_it_is(options: dict[str, Any]) -> None:
    assert identity_of(create_config(EngineArgs(**options)), "0" * 64).digest == IDENTITY.digest


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("tokenizer.json", True),
        ("tokenizer_config.json", True),
        ("chat_template.jinja", True),
        ("special_tokens_map.json", True),
        ("additional_chat_templates/tool_use.jinja", True),
        ("README.md", False),
    ],
)
def test_every_file_of_the_tokenizer_counts(tmp_path: Path, name: str, counts: bool) -> None:
    model = Path(shutil.copytree(EMBEDDED_MODEL, tmp_path / "model"))
    (model / name).parent.mkdir(exist_ok=True)
    with (model / name).open("a") as file:
        file.write(" ")
    changed = identity_of(create_config(EngineArgs(model=str(model))), "0" * 64)
    assert (changed.tokenizer != IDENTITY.tokenizer) == counts


def test_a_chat_template_counts_by_its_text_wherever_it_lies(tmp_path: Path) -> None:
    found = []
    for name, text in (("a", "{{ 1 }}"), ("b", "{{ 1 }}"), ("c", "{{ 2 }}")):
        (tmp_path / name).write_text(text)
        found.append(create_config(EngineArgs(chat_template=str(tmp_path / name))).model_config.tokenizer_digest)
    assert found[0] == found[1] != found[2]


def test_blocks_of_another_engine_have_other_hashes() -> None:
    def hashes(identity: Identity) -> set[bytes]:
        config = create_config(EngineArgs(num_gpu_blocks_override=8, block_size=4, max_model_len=32))
        core = EngineCore(config, MemoryExecutor(num_blocks=8, block_size=4), identity=identity)
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        core.add(
            EngineCoreRequest(
                request_id="a", prompt_token_ids=list(range(9)), sampling_params=params, seed=0, max_tokens=4
            )
        )
        while core.has_work():
            core.step()
        blocks = core.scheduler.blocks.pool.blocks
        return {block.content[0] for block in blocks if block.content is not None}

    retrained = dataclasses.replace(IDENTITY, weights="1" * 64)
    assert hashes(IDENTITY) == hashes(dataclasses.replace(IDENTITY, model="another name"))
    assert len(hashes(IDENTITY)) == len(hashes(retrained)) == 3
    assert not hashes(IDENTITY) & hashes(retrained)
