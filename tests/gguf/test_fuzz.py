"""Mutated files: each is read, or refused as the file's fault, within a second, in bounded memory, whatever its bytes.

10,000 of each kind ran once with `pytest -m slow tests/gguf/test_fuzz.py`; the gate runs a few hundred.
"""

from __future__ import annotations

import random
import resource
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.config.gguf.config_json import gguf_config, gguf_generation_config, report_unknown
from quire.config.gguf.files import read_gguf
from quire.config.gguf.tensor_types import QUANTIZED
from quire.errors import ConfigError
from quire.loader.checkpoint import TensorSource, open_checkpoint
from quire.loader.mapped_file import STORED_DTYPES
from quire.loader.model_impl import read_model_arch
from quire.ops.contracts.operands import BlockRows
from quire.ops.shared.blocks import unpack_blocks
from quire.tokenizer.tokenizer import load_tokenizer
from tests.checkpoints import make_checkpoint
from tests.gguf.files import GgufFile
from tests.gguf.mutations import mutated

MOST_S = 1.0
"""Of computing."""
MOST_BYTES = 256 << 20
"""That the process may grow by."""
MOST_CHARACTERS = 20_000
"""Of a message."""
GATE, ALL = range(300), range(300, 10_000)


def touch(source: TensorSource) -> None:
    """Read every byte of every tensor that can be read."""
    for name, info in source.tensors.items():
        if info.dtype in QUANTIZED and len(info.shape) == 2:
            unpack_blocks(BlockRows(type_name=info.dtype, blocks=source.view(name)))
        elif info.dtype in STORED_DTYPES:
            source.view(name).to("cpu", copy=True)
        source.drop([name])


def use_gguf(file: Path) -> None:
    read_model_arch(gguf_config(file), file)
    gguf_generation_config(file)
    report_unknown(file)
    load_tokenizer(file).encode("hello world")
    touch(open_checkpoint(file))


def use_safetensors(file: Path) -> None:
    touch(open_checkpoint(file.parent))


def check(data: bytes, header_bytes: int, file: Path, use: Callable[[Path], None], seeds: range) -> Counter[str]:
    """How the files of the seeds ended."""
    ends: Counter[str] = Counter()
    longest = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in seeds:
        file.unlink(missing_ok=True)
        file.write_bytes(mutated(data, header_bytes, random.Random(seed)))
        started = time.process_time()
        try:
            use(file)
            ends["read"] += 1
        except ConfigError as error:
            ends[type(error).__name__] += 1
            longest = max(longest, len(str(error)))
        assert time.process_time() - started < MOST_S, seed
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < MOST_BYTES
    assert longest < MOST_CHARACTERS
    return ends


FAMILIES = ("llama", "deepseek_v3", "falcon", "jamba", "qwen3_5_text")
"""Whose files are read in ways of their own."""


def fuzz_gguf(directory: Path, seeds: range) -> Counter[str]:
    ends: Counter[str] = Counter()
    for index, family in enumerate(FAMILIES):
        source = make_checkpoint(family, directory / family)
        file = GgufFile(source, kind="Q8_0").write(directory / "m.gguf")
        some = seeds[index :: len(FAMILIES)]
        ends += check(file.read_bytes(), read_gguf(file).headers[0].num_bytes, file, use_gguf, some)
    return ends


def fuzz_safetensors(directory: Path, seeds: range) -> Counter[str]:
    file = make_checkpoint("llama", directory, num_hidden_layers=2) / "model.safetensors"
    data = file.read_bytes()
    return check(data, 8 + int.from_bytes(data[:8], "little"), file, use_safetensors, seeds)


KINDS = {"gguf": fuzz_gguf, "safetensors": fuzz_safetensors}


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_files_end_with_an_error_or_are_read(kind: str, tmp_path: Path) -> None:
    ends = KINDS[kind](tmp_path, GATE)
    assert ends["read"] > 5  # not every byte matters
    assert ends["CheckpointError"] > len(GATE) / 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_mutated_files_end_with_an_error_or_are_read(kind: str, tmp_path: Path) -> None:
    ends = KINDS[kind](tmp_path, ALL)
    print(kind, dict(ends))  # for the record
    assert sum(ends.values()) == len(ALL)
