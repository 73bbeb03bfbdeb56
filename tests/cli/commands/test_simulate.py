"""`quire simulate` and `quire bench steps`: figures, files, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from quire.cli.main import main

POISSON = ("--arrivals", "poisson", "--rate", "50", "--num-requests", "40", "--prompt-len", "60", "--output-len", "20")
Simulate = Callable[..., dict[str, Any]]


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str]) -> Simulate:
    """The JSON of `quire simulate`."""

    def call(*flags: str) -> dict[str, Any]:
        assert main(["simulate", "--json", *flags]) == 0
        figures: dict[str, Any] = json.loads(capsys.readouterr().out)
        return figures

    return call


def test_the_same_seed_gives_the_same_numbers(simulate: Simulate) -> None:
    flags = (*POISSON, "--lengths", "lognormal", "--hardware", "l4", "--replicas", "2", "--routing", "least-loaded")
    figures = simulate(*flags)
    assert simulate(*flags) == figures
    assert simulate(*flags, "--seed", "1") != figures
    assert (figures["num_requests"], figures["num_replicas"]) == (40, 2)
    for metric in ("ttft", "tpot"):
        assert 0 < figures[f"p50_{metric}_ms"] <= figures[f"p95_{metric}_ms"] <= figures[f"p99_{metric}_ms"]


def test_a_trace_is_served(simulate: Simulate, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"arrival_s": 0.2 * i, "prompt_tokens": 100, "output_tokens": 10} for i in range(5)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures = simulate("quire-tiny", "--trace", str(trace))
    assert (figures["num_requests"], figures["total_input_tokens"], figures["total_output_tokens"]) == (5, 500, 50)
    assert figures["model"] == "quire-tiny"


def test_priorities_of_a_trace_are_served_and_never_ignored(
    simulate: Simulate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Short requests behind long ones, with one seat."""
    names = {}
    for name, priority in (("with", 5), ("without", 0)):
        lines = [
            {"arrival_s": 0.0, "prompt_tokens": 20, "output_tokens": 200, "priority": priority} for _ in range(5)
        ] + [{"arrival_s": 0.001, "prompt_tokens": 20, "output_tokens": 5} for _ in range(5)]
        names[name] = tmp_path / f"{name}.jsonl"
        names[name].write_text("".join(json.dumps(line) + "\n" for line in lines))
    by_priority = ("--scheduling-policy", "priority", "--max-num-seqs", "1")
    found = {name: simulate("--trace", str(path), *by_priority) for name, path in names.items()}
    assert found["with"]["mean_ttft_ms"] < found["without"]["mean_ttft_ms"] / 1.5
    assert found["with"]["num_preemptions"] == 1
    assert main(["simulate", "--trace", str(names["with"])]) == 2
    assert "has no effect without --scheduling-policy priority" in capsys.readouterr().err


def test_prefixes_are_found_where_the_router_sends_them(simulate: Simulate) -> None:
    flags = (*POISSON, "--num-prefixes", "8", "--prefix-len", "128", "--replicas", "4", "--hardware", "h100")
    aware, blind = (simulate(*flags, "--routing", routing) for routing in ("prefix-aware", "round-robin"))
    assert aware["prefix_cache_hits"] > blind["prefix_cache_hits"] > 0


def test_memory_that_is_short_is_seen(simulate: Simulate) -> None:
    flags = ("--arrivals", "poisson", "--rate", "inf", "--num-requests", "30", "--prompt-len", "100")
    figures = simulate(
        *flags, "--output-len", "200", "--num-blocks", "40", "--hardware", "a100-40gb", "--block-size", "32"
    )
    assert figures["num_preemptions"] > 0
    assert figures["kv_usage_max"] == 1


def test_goodput_counts_what_keeps_the_limits(simulate: Simulate) -> None:
    figures = simulate(*POISSON)
    assert figures["request_goodput"] == figures["request_throughput"]
    limit = f"ttft:{figures['p50_ttft_ms']}"
    share = simulate(*POISSON, "--goodput", limit, "tpot:1e9")["request_goodput"] / figures["request_throughput"]
    assert share == pytest.approx(0.5, abs=0.03)


def test_people_get_a_table_and_a_chart(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    assert main(["simulate", *POISSON, "--goodput", "ttft:100", "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    assert "40 requests in" in out
    assert re.search(r"preemptions +0\n", out)
    assert "within ttft 100 ms" in out
    assert re.search(r"  ttft( +\d+\.\d\d){4}\n", out)
    root = ElementTree.fromstring(plot.read_text())
    assert len(root.findall(".//{http://www.w3.org/2000/svg}path[@class='line0']")) == 3, "two panels and the legend"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give the requests: either --trace FILE, or --arrivals"),
        (["--trace", "x", "--arrivals", "poisson"], "give the requests: either"),
        (["--trace", "nothing.jsonl"], "--trace nothing.jsonl cannot be read"),
        (["--trace", "x", "--rate", "5"], "--rate has no effect with --trace"),
        (["--trace", "x", "--lengths", "fixed"], "--lengths has no effect with --trace"),
        (["--arrivals", "poisson"], "--arrivals poisson needs --rate"),
        (["--arrivals", "poisson", "--rate", "0"], "--rate must be above 0"),
        (["--arrivals", "poisson", "--rate", "nan"], "--rate must be above 0"),
        (["--arrivals", "poisson", "--rate", "1", "--burstiness", "2"], "use --arrivals bursty"),
        (["--arrivals", "bursty", "--rate", "1", "--burstiness", "nan"], "--burstiness must be from"),
        (["--arrivals", "poisson", "--rate", "1", "--sigma", "2"], "--sigma has no effect without --lengths lognormal"),
        (["--arrivals", "poisson", "--rate", "1", "--lengths", "lognormal", "--sigma", "11"], "--sigma must be from"),
        (["--arrivals", "poisson", "--rate", "1", "--num-requests", "0"], "--num-requests must be from 1"),
        (["--arrivals", "poisson", "--rate", "1", "--num-requests", "1G"], "--num-requests must be from 1"),
        (["--arrivals", "poisson", "--rate", "1", "--prompt-len", "0"], "--prompt-len must be from 1"),
        (["--arrivals", "poisson", "--rate", "1", "--prompt-len", "897"], "make 1025 tokens"),
        (["--arrivals", "poisson", "--rate", "1", "--num-prefixes", "2"], "belong together"),
        (["--arrivals", "poisson", "--rate", "1", "--n", "300"], "300 branches, more than --max-num-seqs"),
        (
            ["--arrivals", "poisson", "--rate", "1", "--num-prefixes", "2", "--prefix-len", "2000"],
            "make 2640 tokens, and the context has 1024",
        ),
        ([*POISSON, "--replicas", "0"], "--replicas must be from 1"),
        ([*POISSON, "--cost", "nothing.json"], "--cost nothing.json: there is no such file"),
        ([*POISSON, "--goodput", "itl:5"], "--goodput takes METRIC:MS"),
        ([*POISSON, "--goodput", "ttft"], "--goodput takes METRIC:MS"),
        ([*POISSON, "--goodput", "ttft:1", "ttft:2"], "--goodput has two limits of ttft"),
        ([*POISSON, "--plot", "/nowhere/plot.svg"], "--plot /nowhere/plot.svg cannot be written"),
        ([*POISSON, "--kv-ram", "64MiB"], "no tiers below the KV cache"),
        (["/nowhere", *POISSON], "no directory '/nowhere'"),
    ],
)
def test_wrong_use_is_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [["--routing", "random"], ["--hardware", "b9000"], ["--tokenizer", "x"], ["--arrivals", "even"]]
)
def test_unknown_words_and_flags_without_effect_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["simulate", *POISSON, *flags])
    assert end.value.code == 2


def test_measured_steps_become_a_cost_model(
    simulate: Simulate, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "cost.json"
    flags = ["--num-rounds", "1", "--max-batch-size", "4", "--output-json", str(file)]
    assert main(["bench", "steps", *flags]) == 0
    assert "error of a step: median" in capsys.readouterr().out
    measured = json.loads(file.read_text())
    assert measured["steps"] >= 50
    figures = simulate(*POISSON, "--cost", str(file))
    assert figures["cost"] == measured["cost"]
    assert figures["cost"]["source"].startswith("measured: quire-tiny")


@pytest.mark.parametrize("flags", [["--num-rounds", "0"], ["--max-batch-size", "0"]])
def test_wrong_sizes_of_a_measurement_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "steps", *flags]) == 2
    assert f"{flags[0]} must be from 1" in capsys.readouterr().err
