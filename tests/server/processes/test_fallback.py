"""A server whose model transformers builds: it serves, and does not claim what it cannot promise."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.conftest import Checkpoint
from tests.engine.test_parity import expected_by_transformers
from tests.server.processes.test_processes import Server

PROMPT = [5, 9, 11, 200, 31, 7]
IMPORTS = 300
"""Seconds for the start, which imports transformers beside other tests."""
FLAGS = ("--model-impl", "transformers", "--dtype", "float32", "--num-threads", "1", "--max-model-len", "128")


def completed(server: Server, prompt: list[int]) -> Any:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    reply = server.client.post("/v1/completions", json=body, headers={"x-quire-receipt": "1"})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_it_serves_and_says_that_tokens_are_not_promised(tmp_path: Path, checkpoint: Checkpoint) -> None:
    directory = checkpoint("arcee")
    with ThreadPoolExecutor(3) as pool, closing(Server(tmp_path / "log", "--model", str(directory), *FLAGS)) as server:
        server.wait_ready(IMPORTS)
        prompts = [PROMPT, [*PROMPT, 3, 4], list(range(40))]
        replies = list(pool.map(lambda prompt: completed(server, prompt), prompts))
        for prompt, reply in zip(prompts, replies, strict=True):
            produced = reply["receipt"]["requests"][0]["completions"][0]["token_ids"]
            assert produced == expected_by_transformers(directory, prompt, produced)
            assert reply["receipt"]["identity"]["row_invariant"] is False
        assert server.client.get("/v1/capabilities").json()["same_request_same_tokens"] is False
    assert "runs through transformers" in (tmp_path / "log").read_text()
