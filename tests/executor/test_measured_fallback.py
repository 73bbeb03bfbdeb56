"""An engine whose model transformers builds takes at most what its plan says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoints import write_family
from tests.executor.test_measured_peak import MIB

CHILD = """
import json, sys
from quire.utils.process import memory_status
import quire.llm, quire.worker.worker, quire.loader.fallback
before = memory_status()["VmRSS"]
from benchmarks.plan import measure
print(json.dumps({"before": before, **measure(sys.argv[2], json.loads(sys.argv[1]), 1)}))
"""
SHAPE: dict[str, Any] = {
    "vocab_size": 16_000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPTIONS: dict[str, Any] = {
    "model_impl": "transformers",
    "kv_cache_memory_bytes": 64 * MIB,
    "max_model_len": 1024,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 8,
    "num_threads": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "overrides", "dtype"),
    [
        ("arcee", {}, "float32"),
        ("llama", {}, "bfloat16"),
        ("phimoe", {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 1024}, "bfloat16"),
    ],
)
def test_the_peak_is_within_the_plan(tmp_path: Path, family: str, overrides: dict[str, Any], dtype: str) -> None:
    """The plan is a bound here: 78 to 81 % of it were taken when this was written."""
    directory = write_family(tmp_path, family, {**SHAPE, **overrides}, dtype)
    job = [sys.executable, "-c", CHILD, json.dumps(OPTIONS), str(directory)]
    done = subprocess.run(job, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    planned = sum(found["plan"].values()) - found["plan"]["process"]
    taken = found["peak"] - found["before"]
    assert 0.6 * planned <= taken <= planned, (found["plan"], taken)
