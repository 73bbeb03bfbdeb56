"""`quire plan`: what a model takes and what fits, as a table and as JSON, with what a start decides."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.cli.commands import plan as plan_command
from quire.cli.main import main
from quire.config.flags.args import EngineArgs
from quire.engine.core_startup import create_config
from tests.config.test_devices import GPU
from tests.config.test_resolve import resolved

PARTS = (
    "weights",
    "kv_cache",
    "kv_ram",
    "workspace",
    "logits",
    "logprobs",
    "graphs",
    "requests",
    "grammars",
    "loading",
    "process",
)
Plan = Callable[..., dict[str, Any]]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """The JSON of `quire plan`, with its exit status."""

    def call(*flags: str) -> dict[str, Any]:
        status = main(["plan", "--json", *flags])
        return {**json.loads(capsys.readouterr().out), "status": status}

    return call


def test_the_plan_is_the_one_that_a_start_makes(plan: Plan) -> None:
    found = plan("--num-blocks", "300", "--max-model-len", "512", "--max-num-seqs", "8", "--block-size", "20")
    config = create_config(EngineArgs(num_gpu_blocks_override=300, max_model_len=512, max_num_seqs=8, block_size=20))
    assert {name: found[f"{name}_bytes"] for name in PARTS} == config.memory_plan
    assert found["total_bytes"] == sum(config.memory_plan.values())
    assert (found["num_blocks"], found["kv_cache_tokens"], found["max_model_len"]) == (300, 6000, 512)
    assert (found["fits"], found["status"], found["missing_bytes"], found["changes"]) == (True, 0, 0, [])
    assert found["max_context"] == 1024
    assert found["max_concurrency"] == 8, "seats, for memory would hold 300 // 26"


def test_people_read_how_many_steps_of_a_gpu_are_captured(tmp_path: Path) -> None:
    config = resolved(tmp_path, machine=GPU, max_num_seqs=32)
    purposes = {name: plan_command._purpose(name, config) for name in config.memory_plan}
    assert purposes["graphs"] == "7 captured steps, of up to 32 sequences"


def test_a_serve_command_can_be_pasted(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max-num-seqs: 3\nport: 8123\n")
    flags = ["quire-tiny", "--host", "::1", "--port", "0", "--api-key", "k", "--max-body-size", "1MiB", "-tp", "1"]
    found = plan(*flags, "--config", str(file), "--max-engine-restarts", "2", "--seed", "5", "--log-level", "DEBUG")
    assert found["max_num_seqs"] == 3
    with pytest.raises(SystemExit) as end:
        main(["plan", "--tensor-parallel-size", "2"])
    assert end.value.code == 2
    assert main(["plan", "--api-server-count", "0"]) == 2


@pytest.mark.parametrize(
    ("flags", "change"),
    [
        (["--memory", "700MiB", "--max-num-seqs", "64", "--sequences", "64"], "gpu_memory_utilization"),
        (["--kv-cache-memory-bytes", "1MiB", "--sequence-len", "1000"], "kv_cache_memory_bytes"),
        (["--num-blocks", "10", "--sequences", "3"], "num_gpu_blocks_override"),
        (["--memory", "700MiB", "--kv-ram", "500MiB"], "kv_ram"),
        (["--memory", "450MiB"], "max_num_seqs"),
    ],
)
def test_the_first_change_makes_the_wish_fit_and_nothing_less_does(plan: Plan, flags: list[str], change: str) -> None:
    found = plan(*flags)
    assert (found["fits"], found["status"]) == (False, 1)
    cheapest = found["changes"][0]
    assert change in cheapest
    again = plan(*flags, *cheapest["flags"].split())  # of a flag given twice the last one counts
    assert (again["fits"], again["status"]) == (True, 0), cheapest


@pytest.mark.parametrize("flags", [[], ["--max-num-seqs", "4"]])
def test_a_wish_for_more_sequences_than_seats_says_what_it_takes(
    flags: list[str], plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    wish = ["--sequences", "300", "--sequence-len", "64", "--memory", "4GiB"]
    found = plan(*wish, *flags)
    assert (found["fits"], found["max_num_seqs"], found["max_concurrency"]) == (True, 300, 300)
    assert main(["plan", *wish, *flags]) == 0
    assert "300 x 64 tokens: fits with --max-num-seqs 300" in capsys.readouterr().out


def test_missing_memory_is_exactly_what_is_missing(plan: Plan) -> None:
    flags = ["--gpu-memory-utilization", "1", "--sequences", "64", "--max-model-len", "1024"]
    small = plan("--memory", "600MiB", *flags)
    assert small["missing_bytes"] > 0
    enough = (600 << 20) + small["missing_bytes"]
    block = small["block_bytes"] + (1 << 16)
    assert plan("--memory", str(enough + block), *flags)["fits"]
    assert not plan("--memory", str(enough - block), *flags)["fits"]


def test_fewer_bits_are_proposed_where_memory_is_short(plan: Plan, checkpoint: Callable[..., Path]) -> None:
    path = checkpoint("llama", vocab_size=320, max_position_embeddings=65_536)
    found = plan(
        str(path), "--memory", "500MiB", "--gpu-memory-utilization", "0.95", "--sequences", "4", "--max-num-seqs", "4"
    )
    changes = [change["flags"] for change in found["changes"]]
    assert not found["fits"]
    assert any("--dtype bfloat16" in change or "--kv-cache-dtype int8" in change for change in changes), changes
    assert any("--max-model-len" in change for change in changes)


WISHED = {"max_model_len": "--sequence-len", "max_num_seqs": "--sequences"}


@pytest.mark.parametrize("seed", range(12))
def test_every_change_that_is_proposed_makes_the_wish_fit(
    seed: int, plan: Plan, checkpoint: Callable[..., Path]
) -> None:
    """Or the smaller wish that it says. And the parts of every plan add up."""
    rng = random.Random(seed)
    model = rng.choice(
        [[], [str(checkpoint("gemma3_text"))], [str(checkpoint("mamba"))], [str(checkpoint("qwen3_moe"))]]
    )
    flags = ["--memory", f"{rng.choice([300, 500, 700, 1500])}MiB", "--sequences", str(rng.choice([1, 4, 40, 700]))]
    flags += rng.choice([[], ["--max-num-seqs", "64"], ["--max-logprobs", "-1"], ["--max-num-batched-tokens", "4096"]])
    if "mamba" not in "".join(model):
        more = [
            [],
            ["--kv-ram", "400MiB"],
            ["--block-size", "48"],
            ["--num-blocks", "9"],
            ["--kv-cache-memory-bytes", "1MiB"],
        ]
        flags += rng.choice(more)
    found = plan(*model, *flags)
    changes = found["changes"]
    assert changes == [] or not found["fits"]
    for answer in (found, *(plan(*model, *flags, *change["flags"].split()) for change in changes)):
        assert sum(answer[f"{part}_bytes"] for part in PARTS) == answer["total_bytes"]
    for change in changes:
        less = [
            word
            for name in WISHED
            if "than wished" in change["cost"] and name in change
            for word in (WISHED[name], str(change[name]))
        ]
        again = plan(*model, *flags, *change["flags"].split(), *less)
        assert (again["fits"], again["missing_bytes"]) == (True, 0), (flags, change)


def test_bits_are_said_once_for_each_kind_of_number(plan: Plan, checkpoint: Callable[..., Path]) -> None:
    path = checkpoint("llama", vocab_size=320, max_position_embeddings=65_536)
    costs = set()
    for memory in range(700, 300, -20):
        found = plan(
            str(path), "--memory", f"{memory}MiB", "--sequences", "4", "--max-num-seqs", "4", "--dtype", "bfloat16"
        )
        costs |= {change["cost"] for change in found["changes"]}
    assert any("rounded" in cost for cost in costs)
    for cost in costs:
        assert cost.count("weights are rounded") <= 1, cost
        assert cost.count("keys and values") <= 1, cost


def test_a_block_may_be_longer_than_the_context(plan: Plan) -> None:
    for block_size in ("1024", "100000", "100000000"):
        found = plan("--memory", "400MiB", "--block-size", block_size)
        assert not found["fits"]
        assert found["num_blocks"] == 1
        assert found["kv_cache_tokens"] == int(block_size)


def test_people_get_a_table_and_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--memory", "2GiB"]) == 0
    out = capsys.readouterr().out
    for words in ("Memory of quire-tiny", "weights", "kv cache", "process", "total", "1.00 GiB may be used", "fits"):
        assert words in out
    assert main(["plan", "--memory", "300MiB"]) == 1
    out = capsys.readouterr().out
    assert "does not fit" in out
    assert "more memory" in out


def test_blocks_that_differ_and_what_pages_leave_unused_are_said(
    plan: Plan, checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--memory", "2GiB", "--dtype", "bfloat16", "--block-size", "16")
    path = str(checkpoint("gemma4_text"))
    found = plan(path, *flags)
    assert (found["block_bytes"], found["kv_cache_padding"]) == (6144, 0.0)
    assert main(["plan", path, *flags]) == 0
    out = capsys.readouterr().out
    assert "blocks of 16 tokens take 3,072 or 6,144 bytes of a layer; 2 groups of layers share pages of 6,144" in out
    assert "leaves 0.0% unused" in out
    odd = plan(str(checkpoint("gemma4_text", head_dim=32)), *flags)
    assert odd["block_bytes"] == 6144
    assert 0 < odd["kv_cache_padding"] < 0.1
    assert plan(*flags[:2])["kv_cache_padding"] == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--sequences", "0"], "--sequences must be at least 1"),
        (["--sequence-len", "1"], "--sequence-len must be at least 2"),
        (["--memory", "0"], "--memory must be at least 1 byte"),
        (["--max-model-len", "5000"], "max_position_embeddings"),
        (["./nothing"], "no directory './nothing'"),
    ],
)
def test_what_no_memory_makes_possible_is_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert main(["plan", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err


def test_no_torch_and_no_weights(tmp_path: Path) -> None:
    config = json.loads(Path(__file__).parents[3].joinpath("quire/tiny/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = (
        "import sys; from quire.cli.main import main; "
        f"status = main(['plan', {str(tmp_path)!r}, '--json']); assert 'torch' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["weights_bytes"] > 10 << 20
