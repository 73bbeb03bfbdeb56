"""What is decided between tokenizer and model when an engine starts."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.engine.core_startup import importing_torch
from quire.errors import ConfigError, InvalidParameter
from quire.observability.ledger import Ledger
from tests.conftest import Checkpoint
from tests.expert_checkpoints import VOCAB_SIZE


def copied(checkpoint: Checkpoint, directory: Path) -> Path:
    return Path(shutil.copytree(checkpoint("llama"), directory / "model"))


def test_a_padding_token_without_an_embedding_is_refused_only_in_prompts(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = copied(checkpoint, tmp_path)
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pad_token": "[PAD]"}))
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"word {i}": i for i in range(len(vocab), VOCAB_SIZE)}  # the next id is the first without a row
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": VOCAB_SIZE, "content": "[PAD]"})
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    with LLM(str(directory)) as llm:
        params = SamplingParams(max_tokens=2)
        assert llm.generate("a", params)[0].finished
        with pytest.raises(InvalidParameter, match=f"holds {VOCAB_SIZE}"):
            llm.generate("a[PAD]b", params)


def test_the_tokenizers_own_end_of_sequence_has_no_stop_reason(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory = copied(checkpoint, tmp_path)
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [258, 256]}))
    with LLM(str(directory)) as llm:
        for token_id, stop_reason in ((256, None), (258, 258)):
            params = SamplingParams(max_tokens=5, logit_bias={token_id: 100}, temperature=0)
            completion = llm.generate("a", params)[0].outputs[0]
            assert (completion.finish_reason, completion.stop_reason) == ("stop", stop_reason)


def test_an_override_that_another_key_would_hide_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="rope_parameters"):
        LLM(str(checkpoint("llama")), hf_overrides={"rope_theta": 5000.0})


def test_an_override_of_a_key_that_is_not_there_is_said(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(str(checkpoint("llama")), hf_overrides={"max_position_embedings": 64}):
        assert "did you mean 'max_position_embeddings'" in caplog.text


@pytest.mark.parametrize("argv", [["serve", "--port", "0"], ["run", "hi"]], ids=" ".join)
def test_what_the_config_refuses_is_refused_before_torch_is_imported(argv: list[str]) -> None:
    """In every process: torch takes seconds, and a supervisor may try again."""
    command = [sys.executable, "-m", "quire.cli.main", *argv, "--max-model-len", "9000"]
    env = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert "exceeds the 1024 positions" in done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "quire.engine.core_startup" in imported
    assert "torch" not in imported


def test_nothing_is_collected_while_torch_is_imported() -> None:
    assert gc.isenabled()
    with importing_torch(Ledger()):
        assert not gc.isenabled()
    assert gc.isenabled()
