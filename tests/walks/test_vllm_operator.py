"""Somebody who runs vLLM: serve with its flags, clients and metrics, a batch, a benchmark, a crash, a clean end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import openai
import pytest

from tests.server.processes.test_processes import Server, wait_for

KEY, NAME = "a-key", "tiny"
QUESTION: Any = [{"role": "user", "content": "What is a KV cache?"}]
FLAGS = [
    *("--served-model-name", NAME, "--api-key", KEY, "--max-num-seqs", "8"),
    *("--max-num-batched-tokens", "512", "--dtype", "bfloat16", "-tp", "1", "--enable-prefix-caching"),
    *("--enable-chunked-prefill", "--enforce-eager", "--disable-log-requests", "--swap-space", "0", "--seed", "0"),
]
WRONG = {
    "--tensor-parallel-size 2": "--tensor-parallel-size 2 is not supported yet: only 1 is; quire runs on one device",
    "--max-modle-len 512": "--max-modle-len is no flag; did you mean '--max-model-len'?",
    "--trust-remote-code": "quire never runs code from a model repository",
    "--enable-lora": "there are no adapters; merge them into the checkpoint",
    "--max-model-len 9000": "max_model_len=9000 exceeds the 1024 positions the model was made for",
    "--quantization hqq": "hqq is not supported",
}


def quire(*argv: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire.cli.main", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd)


def test_a_vllm_operator(tmp_path: Path) -> None:
    read_what_is_wrong()
    with server_with_vllms_flags(tmp_path) as server:
        ask_with_the_openai_client(server)
        look_at_health_and_metrics(server)
        run_the_benchmark(server)
        crash_the_core(server)
        end_it_while_it_answers(server)
    answer_a_batch(tmp_path)


def read_what_is_wrong() -> None:
    """Flags that are wrong, or not built: one line, status 2, nothing started."""
    with ThreadPoolExecutor(2) as pool:
        for text, done in zip(WRONG, pool.map(lambda text: quire("serve", *text.split()), WRONG), strict=True):
            assert done.returncode == 2, (text, done.stderr)
            assert WRONG[text] in done.stderr
            assert "Traceback" not in done.stderr


@contextmanager
def server_with_vllms_flags(directory: Path) -> Iterator[Server]:
    """`vllm serve ...` as it stands in a unit file, with `quire` for `vllm`."""
    server = Server(directory / "log", *FLAGS)
    try:
        server.wait_ready()
        server.client.headers["Authorization"] = f"Bearer {KEY}"
        log = server.log.read_text()
        assert "serving on http://127.0.0.1:" in log
        assert "memory plan" in log
        yield server
    finally:
        server.close()


def ask_with_the_openai_client(server: Server) -> None:
    """Models, a chat, a stream, a wrong key, a wrong model."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [NAME]
        reply = client.chat.completions.create(model=NAME, messages=QUESTION, max_tokens=8, temperature=0)
        assert reply.choices[0].message.content == "The KV cache stores the keys and"
        body = {"model": NAME, "prompt": "import os", "max_tokens": 8, "extra_body": {"top_k": 1, "min_p": 0.1}}
        pieces = [chunk.choices[0].text for chunk in client.completions.create(**body, stream=True)]  # type: ignore[call-overload]
        assert len(pieces) > 1
        with pytest.raises(openai.NotFoundError, match=r"The model `gpt-4` does not exist. Available: tiny."):
            client.chat.completions.create(model="gpt-4", messages=QUESTION)
        with pytest.raises(openai.NotFoundError, match="/v1/embeddings is not built"):
            client.embeddings.create(model=NAME, input="x")
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="other", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def look_at_health_and_metrics(server: Server) -> None:
    """The routes that probes and dashboards ask."""
    assert [server.status(path) for path in ("/health", "/ready", "/ping", "/load", "/version")] == [200] * 5
    metrics = server.client.get("/metrics").text
    for name in ("vllm:num_requests_running", "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count"):
        assert f"{name}{{" in metrics, name
    assert f'model_name="{NAME}"' in metrics


def run_the_benchmark(server: Server) -> None:
    """`vllm bench serve` with its flags."""
    shape = ("--dataset-name", "random", "--random-input-len", "16", "--random-output-len", "8", "--num-prompts", "8")
    env_key = {"OPENAI_API_KEY": KEY}
    done = subprocess.run(
        [sys.executable, "-m", "quire.cli.main", "bench", "serve", "--base-url", server.url, "--model", NAME, *shape],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **env_key},
    )
    assert done.returncode == 0, done.stderr
    assert "8 requests in " in done.stdout
    assert "0 failed" in done.stdout


def crash_the_core(server: Server) -> None:
    """kill -9 of the engine in the middle of a stream: a pause, and the same tokens."""
    expected = server.complete("import os", 900, seed=1)
    started, pid = Event(), server.core_pid
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(server.complete, "import os", 900, started, seed=1)
        assert started.wait(60)
        os.kill(pid, signal.SIGKILL)
        assert stream.result(60) == expected
    wait_for(lambda: "restart 1 in " in server.log.read_text())
    wait_for(lambda: server.status("/ready") == 200)


def end_it_while_it_answers(server: Server) -> None:
    """SIGTERM: the stream that runs ends as it would have, new ones are refused, the status is 0."""
    pid = server.core_pid
    with ThreadPoolExecutor(1) as pool:
        os.kill(pid, signal.SIGSTOP)  # so that the request surely runs when the signal comes
        stream = pool.submit(server.complete, "import os", 400, seed=1)
        wait_for(lambda: server.client.get("/v1/stats").json()["num_requests"] == 1)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "draining 1 request and " in server.log.read_text())
        os.kill(pid, signal.SIGCONT)
        assert stream.result(60)[3] == "length"
    assert server.process.wait(60) == 0
    server.assert_gone()


def answer_a_batch(directory: Path) -> None:
    """`vllm run-batch`: each line is answered, a wrong one says why, the status says that one failed."""
    bodies = [{"messages": QUESTION, "max_tokens": 8, "temperature": 0}, {"messages": QUESTION, "temperature": 9}]
    path = "/v1/chat/completions"
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": path, "body": {"model": "quire-tiny", **body}})
        for number, body in enumerate(bodies)
    ]
    (directory / "in.jsonl").write_text("\n".join(lines))
    done = quire("run-batch", "-i", "in.jsonl", "-o", "out.jsonl", cwd=directory)
    assert done.returncode == 1
    assert "1 succeeded, 1 failed" in done.stderr
    replies = [json.loads(line) for line in (directory / "out.jsonl").read_text().splitlines()]
    good, bad = sorted(replies, key=lambda reply: str(reply["custom_id"]))  # they stand in the order of their ends
    assert good["response"]["body"]["choices"][0]["message"]["content"] == "The KV cache stores the keys and"
    assert "temperature must be in [0, 2], got 9" in json.dumps(bad)
