"""With tiers or without, from the cache, from memory, from a file of an earlier engine: the same bits."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, EngineArgs, SamplingParams
from quire.core.kv.tiers import KVTiers
from quire.errors import ConfigError
from quire.messages.stats import StepStats
from quire.worker.kv_file import NAME
from quire.worker.kv_store import digest_of
from tests.conftest import Checkpoint
from tests.engine.test_parity import available_ops, bits
from tests.engine.test_windows import MAX_MODEL_LEN, MODELS, prompts, smallest_pool

MIB = 1 << 20
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True, logprobs=2)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": MAX_MODEL_LEN,
    "block_size": 16,
    "long_prefill_token_threshold": 40,
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "int8 keys and values": ("llama", {}, {"kv_cache_dtype": "int8"}),
    "fp8 keys and values": ("llama", {}, {"kv_cache_dtype": "fp8"}),
    "bfloat16": ("qwen3", {}, {"dtype": "bfloat16"}),
    "8 bits of heads that differ": ("gemma4_text", {}, {"kv_cache_dtype": "int8"}),
    **{name: (family, overrides, {}) for name, (family, overrides) in MODELS.items()},
}


def tiers_of(llm: LLM) -> KVTiers:
    tiers = llm.engine.parts.core.scheduler.blocks.tiers  # type: ignore[attr-defined]
    assert isinstance(tiers, KVTiers)
    return tiers


def stats_of(llm: LLM) -> StepStats:
    stats = llm.engine.last_stats
    assert stats is not None
    return stats


def options_of(directory: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Of an engine whose pool holds little more than its longest sequence."""
    options = {**OPTIONS, **changes}
    return {**options, "num_gpu_blocks_override": smallest_pool(directory, options) + 3}


@pytest.mark.parametrize("ops", available_ops())
@pytest.mark.parametrize("case", CASES)
def test_tiers_change_no_bit(case: str, ops: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    family, overrides, changes = CASES[case]
    directory, given = str(checkpoint(family, **overrides)), prompts()[:: 1 if ops == "cpu" else 3]
    options = options_of(directory, {**changes, "ops": ops})
    with LLM(directory, **options) as llm:
        expected = bits(llm.generate(given, PARAMS))
    kept: dict[str, Any] = {"kv_load_min_tokens": 1}
    ram, disk = {"kv_ram": MIB // 8}, {"kv_disk": tmp_path / "a", "kv_disk_size": 4 * MIB}
    places = ({**ram, **disk}, {"kv_ram": 4 * MIB}, {**disk, "kv_disk": tmp_path / "b"})
    for tiers in places[: None if ops == "cpu" else 1]:
        with LLM(directory, **options, **kept, **tiers) as llm:
            assert bits(llm.generate(given, PARAMS)) == expected
            assert bits(llm.generate(given, PARAMS)) == expected, "what was evicted comes back"
            stats = stats_of(llm)
            assert stats.num_preemptions > 0 or ops != "cpu", "the reference runs few of the prompts"
            assert stats.num_tier_loads > 0
            assert stats.num_tier_saves > 0
            assert stats.tier_hit_tokens > 0
            assert stats.num_tier_failures == 0
            assert 0 < stats.num_tier_pages <= stats.num_tier_slots
            llm.engine.parts.core.lives.check()  # type: ignore[attr-defined]


def test_a_second_turn_computes_only_what_is_new(checkpoint: Checkpoint) -> None:
    directory = str(checkpoint("llama"))
    options = {**options_of(directory, {}), "kv_load_min_tokens": 1}
    turns = [[token] * 100 for token in range(1, 9)]
    params = PARAMS.clone(max_tokens=1)
    computed = {}
    for kv_ram in (0, 8 * MIB):
        if not kv_ram:
            del options["kv_load_min_tokens"]
        with LLM(directory, **options, kv_ram=kv_ram) as llm:
            llm.generate(turns, params)
            before = stats_of(llm).num_computed_tokens
            outputs = llm.generate([[*turn, 9] for turn in turns], params)
            computed[kv_ram] = stats_of(llm).num_computed_tokens - before
        options["kv_load_min_tokens"] = 1
    assert computed[0] >= 8 * 101 - 2 * 96, "the pool keeps one or two of the eight"
    assert computed[8 * MIB] == 8 * (101 - 96)
    assert [output.num_cached_tokens for output in outputs] == [96] * 8


def test_a_restart_finds_what_was_used_last(checkpoint: Checkpoint, tmp_path: Path, caplog: Any) -> None:
    """The file has room for less than was cached, and is full of pages of before."""
    options: dict[str, Any] = {**OPTIONS, "kv_disk": str(tmp_path / "kv"), "kv_disk_size": MIB // 4}
    directory, params = str(checkpoint("llama")), PARAMS.clone(max_tokens=4)
    old, new = [[[token] * 100] for token in range(1, 17)], [[token] * 100 for token in (20, 21)]
    with LLM(directory, **options, kv_load_min_tokens=1) as llm:
        room = tiers_of(llm).num_slots
        assert 2 * 6 <= room < 16 * 6, "100 tokens have six full blocks"
        for prompt in old:
            llm.generate(prompt, params)
    with caplog.at_level(logging.INFO), LLM(directory, **options, kv_load_min_tokens=1) as llm:
        assert tiers_of(llm).num_pages == room
        expected = llm.generate(new, params)
    assert "wrote 12 cached KV pages to the --kv-disk file" in caplog.text
    with LLM(directory, **options, kv_load_min_tokens=1) as llm:
        again = llm.generate(new, params)
        assert bits(again) == bits(expected)
        assert [output.num_cached_tokens for output in again] == [96, 96]
        assert stats_of(llm).num_tier_failures == 0


def test_a_flush_keeps_to_its_time(checkpoint: Checkpoint, tmp_path: Path, caplog: Any) -> None:
    options: dict[str, Any] = {**OPTIONS, "kv_disk": str(tmp_path / "kv"), "kv_disk_size": 8 * MIB}
    directory, pages = str(checkpoint("llama")), []
    for flush_s in (0.0, 60.0):
        with caplog.at_level(logging.INFO), LLM(directory, **options, kv_load_min_tokens=1) as llm:
            pages.append(tiers_of(llm).num_pages)
            llm.generate([[5] * 100], PARAMS)
            llm.engine.parts.core.close(flush_s)
    assert pages == [0, 0]
    assert "wrote 0 cached KV pages" in caplog.text
    assert "left out for want of time" in caplog.text
    with LLM(directory, **options, kv_load_min_tokens=1) as llm:
        assert tiers_of(llm).num_pages == 7, "100 + 20 tokens less the last one have seven full blocks"


KILLED = """
import os, signal, sys
from quire import LLM, SamplingParams
from quire.worker import kv_file
directory, kv, num_pages = sys.argv[1], sys.argv[2], int(sys.argv[3])
commit = kv_file.FilePages.commit
def commit_some(self, slot, content, digest):
    global num_pages
    num_pages -= 1
    if num_pages < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    commit(self, slot, content, digest)
kv_file.FilePages.commit = commit_some
llm = LLM(directory, dtype="float32", max_model_len=%d, block_size=16, kv_disk=kv, kv_disk_size=8 << 20,
          kv_load_min_tokens=1)
llm.generate([[5] * 100], SamplingParams(max_tokens=1))
llm.close()
"""


@pytest.mark.parametrize("num_pages", [0, 1, 4])
def test_killed_while_it_writes(num_pages: int, checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory, kv = str(checkpoint("llama")), str(tmp_path / "kv")
    script = [sys.executable, "-c", KILLED % MAX_MODEL_LEN, directory, kv, str(num_pages)]
    assert subprocess.run(script, check=False).returncode == -signal.SIGKILL
    prompts, params = [[5] * 100], PARAMS.clone(max_tokens=8)
    options = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "block_size": 16}
    with LLM(directory, **options) as llm:
        expected = llm.generate(prompts, params)
    with LLM(directory, **options, kv_disk=kv, kv_disk_size=8 * MIB, kv_load_min_tokens=1) as llm:
        assert tiers_of(llm).num_pages == num_pages
        again = llm.generate(prompts, params)
        assert bits(again) == bits(expected)
        assert stats_of(llm).num_tier_failures == 0


def test_a_restart_finds_what_it_can_verify(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory, given = str(checkpoint("llama")), prompts()
    options: dict[str, Any] = {**OPTIONS, "kv_disk": str(tmp_path / "kv"), "kv_disk_size": 8 * MIB}
    with LLM(directory, **options, kv_load_min_tokens=1, kv_ram=MIB) as llm:
        expected = llm.generate(given, PARAMS)
    with LLM(directory, **options, kv_load_min_tokens=1) as llm:
        assert tiers_of(llm).num_pages > 0
        again = llm.generate(given, PARAMS)
        assert bits(again) == bits(expected)
        assert again[3].num_cached_tokens == 144, "150 tokens"
    raw = bytearray((tmp_path / "kv" / NAME).read_bytes())
    for place in range(4096 + 4096 + 10, len(raw), 4096):  # a byte in each page, and in each header
        raw[place] ^= 1
    (tmp_path / "kv" / NAME).write_bytes(raw)
    with LLM(directory, **options, kv_load_min_tokens=1) as llm:
        assert bits(llm.generate(given, PARAMS)) == bits(expected)
        assert stats_of(llm).tier_hit_tokens == 0 or stats_of(llm).num_tier_failures > 0
    with LLM(directory, **{**options, "max_model_len": 150}, kv_load_min_tokens=1) as llm:
        assert tiers_of(llm).num_pages == 0, "another engine: with another identity"


def test_a_page_that_changed_in_memory_is_computed_again(checkpoint: Checkpoint) -> None:
    directory, given = str(checkpoint("llama")), prompts()
    options = {**options_of(directory, {}), "kv_load_min_tokens": 1, "kv_ram": 8 * MIB}
    with LLM(directory, **options) as llm:
        expected = bits(llm.generate(given, PARAMS))
        store = llm.engine.parts.core.executor.worker.cache.store  # type: ignore[attr-defined]
        for slot, _ in store.found()[::2]:
            tier, index = store._at(slot)
            tier.read(index)[11] ^= 4
        assert bits(llm.generate(given, PARAMS)) == expected
        assert stats_of(llm).num_tier_failures > 0
        assert bits(llm.generate(given, PARAMS)) == expected


def test_a_wrong_page_with_a_right_digest_would_change_the_answer(checkpoint: Checkpoint) -> None:
    """That the test above can fail."""
    directory, given = str(checkpoint("llama")), prompts()
    options = {**options_of(directory, {}), "kv_load_min_tokens": 1, "kv_ram": 8 * MIB}
    with LLM(directory, **options) as llm:
        expected = bits(llm.generate(given, PARAMS))
        store = llm.engine.parts.core.executor.worker.cache.store  # type: ignore[attr-defined]
        for slot, content in store.found():
            tier, index = store._at(slot)
            tier.read(index)[:] = 63
            tier.commit(index, content, digest_of(tier.read(index)))
        assert bits(llm.generate(given, PARAMS)) != expected


def test_resetting_the_cache_empties_the_tiers(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory, given = str(checkpoint("llama")), prompts()
    options = {**options_of(directory, {}), "kv_load_min_tokens": 1, "kv_disk": tmp_path / "kv", "kv_disk_size": MIB}
    with LLM(directory, **options) as llm:
        llm.generate(given, PARAMS)
        assert tiers_of(llm).num_pages > 0
        llm.reset_prefix_cache()
        assert tiers_of(llm).num_pages == 0
    with LLM(directory, **options) as llm:
        assert tiers_of(llm).num_pages == 0, "in the file, too"


def test_what_to_load_is_measured_at_the_start_and_said(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "quire"), LLM(str(checkpoint("llama")), **OPTIONS, kv_ram=MIB) as llm:
        tiers = llm.engine.parts.core.scheduler.blocks.tiers  # type: ignore[attr-defined]
        line = next(record.getMessage() for record in caplog.records if "us a token" in record.getMessage())
        assert (f"prefixes of {tiers.min_load_tokens} tokens" in line) if tiers else "not used" in line
        assert bits(llm.generate([[1, 2, 3]], PARAMS))


@pytest.mark.parametrize("max_model_len", [2, 20, 96])
def test_tiers_serve_an_engine_with_a_short_context(max_model_len: int, checkpoint: Checkpoint) -> None:
    with LLM(str(checkpoint("llama")), kv_ram=MIB, max_model_len=max_model_len, block_size=16) as llm:
        assert tiers_of(llm).num_slots


def test_swap_space_is_kv_ram_in_gib_and_both_are_planned(checkpoint: Checkpoint) -> None:
    directory = str(checkpoint("llama"))
    plans = {}
    for name, tiers in {"none": {}, "swap": {"swap_space": 0.25}, "ram": {"kv_ram": 256 * MIB}}.items():
        with LLM(directory, **OPTIONS, num_gpu_blocks_override=64, **tiers) as llm:
            plans[name] = dict(llm.engine.parts.config.memory_plan)
            cache = llm.engine.parts.config.cache_config
            assert cache.num_ram_slots * llm.engine.parts.config.kv_layout.block_bytes == plans[name]["kv_ram"]
    assert plans["swap"] == plans["ram"]
    assert 255 * MIB < plans["ram"]["kv_ram"] <= 256 * MIB, "whole pages"
    assert plans["none"]["kv_ram"] == 0
    assert plans["ram"]["requests"] > plans["none"]["requests"], "what is kept of each page"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "both names": ({"kv_ram": MIB, "swap_space": 1.0}, "kv_ram and swap_space contradict"),
    "negative": ({"kv_ram": -1}, "kv_ram must be at least 0"),
    "not a number": ({"swap_space": float("nan")}, "swap_space must be at least 0"),
    "too many": ({"swap_space": 1e30}, "swap_space must be at most"),
    "words": ({"kv_ram": "2GiB"}, "kv_ram must be int"),
    "less than a page": ({"kv_ram": 100}, "no room for a single KV block"),
    "more than there is": ({"kv_ram": 1 << 50, "num_gpu_blocks_override": 64}, "would take .*kv_ram"),
    "no cache": ({"kv_ram": MIB, "enable_prefix_caching": False}, "prefix caching is off"),
    "size alone": ({"kv_disk_size": MIB}, "no effect without kv_disk"),
    "threshold alone": ({"kv_load_min_tokens": 3}, "no effect without kv_ram or kv_disk"),
    "small file": ({"kv_disk": "x", "kv_disk_size": 4096}, "kv_disk_size of 4096 bytes has no room"),
    "empty name": ({"kv_disk": ""}, "empty string"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_refused(case: str, checkpoint: Checkpoint) -> None:
    options, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        LLM(str(checkpoint("llama")), **{**OPTIONS, **options})


def test_a_directory_in_use_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    options: dict[str, Any] = {**OPTIONS, "kv_disk": tmp_path / "kv", "kv_disk_size": MIB}
    with LLM(str(checkpoint("llama")), **options), pytest.raises(ConfigError, match="used by another engine"):
        LLM(str(checkpoint("llama")), **options)
    assert EngineArgs(kv_disk=tmp_path).kv_disk == str(tmp_path)
