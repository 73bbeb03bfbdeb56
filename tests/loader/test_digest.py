"""The digest of weights: what the module says it is, of every byte, and of the bytes that were read."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quire import EngineArgs
from quire.engine.core_startup import create_config
from quire.errors import CheckpointError
from quire.loader.digest import LEAF_BYTES, WeightsDigest, digesting
from tests.loader.safetensors_bytes import split

MakeCheckpoint = Callable[..., Path]
MEBIBYTE = 1 << 20


def digest_of(directory: Path, num_threads: int = 2) -> str:
    with WeightsDigest(directory, num_threads) as digest:
        return digest.result()


def expected(*files: Path) -> str:
    """The documented tree hash, with plain hashlib."""
    lines = ""
    for file in sorted(files):
        data = file.read_bytes()
        root = hashlib.sha256(len(data).to_bytes(8, "little"))
        for start in range(0, len(data), 16 * MEBIBYTE):
            root.update(hashlib.sha256(data[start : start + 16 * MEBIBYTE]).digest())
        lines += f"{root.hexdigest()}  {file.name}\n"
    return hashlib.sha256(lines.encode()).hexdigest()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A directory with a file of two leaves and a bit."""
    (tmp_path / "model.safetensors").write_bytes(random.Random(1).randbytes(2 * LEAF_BYTES + 12345))
    return tmp_path


@pytest.mark.parametrize("size", [0, 1, LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 1])
def test_the_digest_is_the_documented_tree_hash(tmp_path: Path, size: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(random.Random(size).randbytes(size))
    assert digest_of(tmp_path) == expected(tmp_path / "model.safetensors")


@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_the_number_of_threads_does_not_matter(weights: Path, num_threads: int) -> None:
    assert digest_of(weights, num_threads) == expected(weights / "model.safetensors")


def test_shards_are_digested_each_and_other_files_are_not(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(checkpoint("llama", max_shard_size="60KB"), tmp_path / "model"))
    shards = list(directory.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert digest_of(directory) == expected(*shards)
    (directory / "consolidated.safetensors").write_bytes(b"the same weights again, which nobody reads")
    assert digest_of(directory) == expected(*shards)


def test_one_bit_of_any_tensor_changes_the_digest(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    file = directory / "model.safetensors"
    header, data = split(file)
    before = file.read_bytes()
    offsets = [place for name, entry in header.items() if name != "__metadata__" for place in entry["data_offsets"]]
    digests = {digest_of(directory)}
    places = sorted({min(offset, len(data) - 1) for offset in offsets})
    for place in places:
        changed = bytearray(before)
        changed[len(before) - len(data) + place] ^= 1 << place % 8
        file.write_bytes(changed)
        digests.add(digest_of(directory))
    assert len(digests) == 1 + len(places)


def rewrite(file: Path) -> None:
    file.write_bytes(bytes(reversed(file.read_bytes())))


def replace_file(file: Path) -> None:
    other = file.with_name("new")
    other.write_bytes(bytes(reversed(file.read_bytes())))
    other.replace(file)


def truncate(file: Path) -> None:
    os.truncate(file, LEAF_BYTES)


def flip_a_bit_through_a_map(file: Path) -> None:
    import mmap

    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as content:
        content[LEAF_BYTES + 7] ^= 4


@pytest.mark.parametrize("change", [rewrite, replace_file, truncate, Path.unlink, flip_a_bit_through_a_map])
def test_weights_that_change_while_they_are_read_are_refused(weights: Path, change: Callable[[Path], None]) -> None:
    file = weights / "model.safetensors"
    with WeightsDigest(weights, 1) as digest:
        digest._finish(digest._readings)
        change(file)
        with pytest.raises(CheckpointError, match=r"changed while they were read|cannot be read"):
            digest.result()


def test_shards_that_give_way_to_a_single_file_are_noticed(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(checkpoint("llama", max_shard_size="60KB"), tmp_path / "model"))
    with WeightsDigest(directory, 1) as digest:
        shutil.copy(checkpoint("llama", seed=7) / "model.safetensors", directory)
        with pytest.raises(CheckpointError, match="changed while they were read"):
            digest.result()


def touch(file: Path) -> None:
    os.utime(file)


def write_the_same(file: Path) -> None:
    other = file.with_name("new")
    shutil.copyfile(file, other)
    other.replace(file)


def link(file: Path) -> None:
    os.link(file, file.with_name("backup"))


@pytest.mark.parametrize("change", [touch, write_the_same, link])
def test_what_leaves_the_bytes_as_they_are_is_no_change(weights: Path, change: Callable[[Path], None]) -> None:
    with WeightsDigest(weights, 2) as digest:
        change(weights / "model.safetensors")
        assert digest.result() == expected(weights / "model.safetensors")


def test_a_pipe_in_place_of_a_shard_is_not_waited_for(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(checkpoint("llama", max_shard_size="60KB"), tmp_path / "model"))
    (directory / "model.safetensors.index.json").unlink()
    (directory / "model-00001-of-00009.safetensors").unlink(missing_ok=True)
    os.mkfifo(directory / "model-00001-of-00009.safetensors")
    with WeightsDigest(directory, 1) as digest, pytest.raises(CheckpointError, match="no regular file"):
        digest.result()


def test_nothing_is_kept_open(weights: Path) -> None:
    with WeightsDigest(weights, 2) as digest:
        digest.result()
    digest.close()
    assert str(weights) not in Path("/proc/self/maps").read_text()
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if str(fd.resolve()).startswith(str(weights))]


def test_dummy_weights_are_their_seed(tmp_path: Path) -> None:
    config = create_config(EngineArgs(load_format="dummy"))
    seeds = (3, 3, 4)
    found = []
    for seed in seeds:
        model = replace(config.model_config, seed=seed, path=tmp_path)
        with digesting(replace(config, model_config=model)) as result:
            found.append(result())
    assert found[0] == found[1] != found[2]
