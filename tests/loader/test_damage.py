"""Checkpoints that are damaged in one way: each is refused with the file, the tensor and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire.errors import CheckpointError
from quire.loader.headers import INDEX, MAX_PROBLEMS, raise_problems
from quire.loader.load import load_model
from tests.loader.safetensors_bytes import join, read, split, write
from tests.models.harness import arch_of
from tests.ops.implementations import REFERENCE

FILE = "model.safetensors"
QUERY = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
Damage = Callable[[Path], None]
DAMAGES: dict[str, tuple[Damage, list[str]]] = {}
SHARD_DAMAGES: dict[str, tuple[Damage, list[str]]] = {}


def damage(*expected: str) -> Callable[[Damage], Damage]:
    """A way to damage a single-file checkpoint, and what the error must contain."""

    def register(function: Damage) -> Damage:
        DAMAGES[function.__name__] = function, list(expected)
        return function

    return register


def shard_damage(*expected: str) -> Callable[[Damage], Damage]:
    """The same for a sharded one."""

    def register(function: Damage) -> Damage:
        SHARD_DAMAGES[function.__name__] = function, list(expected)
        return function

    return register


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = read(directory / FILE)
    change(tensors)
    write(directory / FILE, tensors)


def edit_header(directory: Path, change: Callable[[dict[str, dict[str, object]]], object]) -> None:
    header, data = split(directory / FILE)
    change(header)
    join(directory / FILE, header, data)


@damage(QUERY, "[64, 64]", "is missing")
def tensor_missing(directory: Path) -> None:
    edit_tensors(directory, lambda tensors: tensors.pop(QUERY))


@damage("model.layers.3.mlp.extra.weight", "[2, 2]", FILE, "not used")
def tensor_unused(directory: Path) -> None:
    edit_tensors(directory, lambda tensors: tensors.update({"model.layers.3.mlp.extra.weight": torch.zeros(2, 2)}))


@damage(QUERY, FILE, "[64, 32]", "[64, 64]", "config.json")
def tensor_mis_shaped(directory: Path) -> None:
    edit_tensors(directory, lambda tensors: tensors.update({QUERY: torch.zeros(64, 32)}))


@damage(NORM, FILE, "[64, 1]", "[64]")
def tensor_with_a_dimension_too_many(directory: Path) -> None:
    edit_tensors(directory, lambda tensors: tensors.update({NORM: torch.zeros(64, 1)}))


@damage(QUERY, FILE, "I8", "BF16", "unquantised")
def tensor_of_integers(directory: Path) -> None:
    edit_tensors(directory, lambda tensors: tensors.update({QUERY: torch.zeros(64, 64, dtype=torch.int8)}))


@damage(QUERY, FILE, "F8_E4M3")
def tensor_of_eight_bit_floats(directory: Path) -> None:
    edit_tensors(directory, lambda tensors: tensors.update({QUERY: torch.zeros(64, 64, dtype=torch.float8_e4m3fn)}))


@damage(FILE, "truncated at", "copy it again")
def file_cut_in_its_data(directory: Path) -> None:
    content = (directory / FILE).read_bytes()
    (directory / FILE).write_bytes(content[:-1000])


@damage(FILE, "truncated", "its header claims")
def file_cut_in_its_header(directory: Path) -> None:
    (directory / FILE).write_bytes((directory / FILE).read_bytes()[:100])


@damage(FILE, "truncated", "3 bytes")
def file_of_three_bytes(directory: Path) -> None:
    (directory / FILE).write_bytes(b"abc")


@damage(FILE, "truncated", "0 bytes")
def file_empty(directory: Path) -> None:
    (directory / FILE).write_bytes(b"")


@damage(FILE, "no safetensors file")
def file_of_text(directory: Path) -> None:
    (directory / FILE).write_text("<html>404 not found</html>" * 10)


@damage(FILE, "no safetensors file")
def header_of_impossible_length(directory: Path) -> None:
    (directory / FILE).write_bytes(b"\xff" * 8 + bytes(100))


@damage(FILE, "damaged header")
def header_not_json(directory: Path) -> None:
    join(directory / FILE, "{'not': json}", b"")


@damage(FILE, "damaged header")
def header_not_text(directory: Path) -> None:
    join(directory / FILE, b"\xff\xfe\x00", b"")


@damage(FILE, "damaged header", "not a JSON object")
def header_a_list(directory: Path) -> None:
    join(directory / FILE, "[1, 2]", b"")


@damage(FILE, "damaged header")
def header_nested_too_deeply(directory: Path) -> None:
    join(directory / FILE, "[" * 100_000, b"")


@damage(FILE, NORM, "twice")
def header_with_a_key_twice(directory: Path) -> None:
    header, data = split(directory / FILE)
    text = json.dumps(header)
    join(directory / FILE, f'{text[:-1]}, "{NORM}": {json.dumps(header[NORM])}}}', data)


@damage(FILE, QUERY, "dtype, shape and data_offsets")
def entry_without_shape(directory: Path) -> None:
    edit_header(directory, lambda header: header[QUERY].pop("shape"))


@damage(FILE, QUERY, "dtype, shape and data_offsets")
def entry_not_an_object(directory: Path) -> None:
    edit_header(directory, lambda header: header.update({QUERY: 7}))  # type: ignore[dict-item]


@damage(FILE, QUERY, "dtype, shape and data_offsets")
def entry_with_negative_offsets(directory: Path) -> None:
    edit_header(directory, lambda header: header[QUERY].update(data_offsets=[-5, 3]))


@damage(FILE, QUERY, "dtype, shape and data_offsets")
def entry_with_a_fraction_as_size(directory: Path) -> None:
    edit_header(directory, lambda header: header[QUERY].update(shape=[64.5, 64]))


@damage(FILE, QUERY, "unknown dtype 'F7'")
def entry_of_unknown_dtype(directory: Path) -> None:
    edit_header(directory, lambda header: header[QUERY].update(dtype="F7"))


@damage(FILE, QUERY, "takes 32768")
def entry_whose_bytes_do_not_fit_its_shape(directory: Path) -> None:
    edit_header(directory, lambda header: header[QUERY].update(shape=[128, 64]))


@damage(FILE, QUERY, "overlaps")
def entries_that_overlap(directory: Path) -> None:
    def shift(header: dict[str, dict[str, object]]) -> None:
        other = header["model.layers.0.self_attn.o_proj.weight"]["data_offsets"]
        header[QUERY]["data_offsets"] = other

    edit_header(directory, shift)


@damage(FILE, "Git LFS pointer", "git lfs pull")
def file_a_git_lfs_pointer(directory: Path) -> None:
    (directory / FILE).write_text(LFS)


@damage("no .safetensors file")
def file_absent(directory: Path) -> None:
    (directory / FILE).unlink()


@damage("pickle", "pytorch_model.bin", "save_pretrained")
def only_pickles(directory: Path) -> None:
    (directory / FILE).rename(directory / "pytorch_model.bin")


@damage("GGUF")
def only_gguf(directory: Path) -> None:
    (directory / FILE).rename(directory / "model-q4.gguf")


@damage("several .safetensors", "a.safetensors", "b.safetensors", INDEX)
def two_files_without_index(directory: Path) -> None:
    shutil.copy(directory / FILE, directory / "a.safetensors")
    (directory / FILE).rename(directory / "b.safetensors")


@damage("damaged", INDEX)
def index_not_json(directory: Path) -> None:
    (directory / FILE).unlink()
    (directory / INDEX).write_text("{")


@damage("damaged", INDEX, "weight_map")
def index_without_weight_map(directory: Path) -> None:
    (directory / FILE).unlink()
    (directory / INDEX).write_text("{}")


@damage("damaged", INDEX, "lists nothing")
def index_with_an_empty_weight_map(directory: Path) -> None:
    (directory / FILE).unlink()
    (directory / INDEX).write_text('{"weight_map": {}}')


@damage(INDEX, "Git LFS pointer")
def index_a_git_lfs_pointer(directory: Path) -> None:
    (directory / FILE).unlink()
    (directory / INDEX).write_text(LFS)


@damage(INDEX, "../secret.safetensors", "no file name")
def index_that_leaves_the_directory(directory: Path) -> None:
    (directory / FILE).unlink()
    (directory / INDEX).write_text(json.dumps({"weight_map": {QUERY: "../secret.safetensors"}}))


def edit_index(directory: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((directory / INDEX).read_text())
    change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("model-*.safetensors"))


@shard_damage(INDEX, "model-00002-of-", "not there", "download")
def shard_absent(directory: Path) -> None:
    shards(directory)[1].unlink()


@shard_damage("model-00002-of-", "truncated")
def shard_cut(directory: Path) -> None:
    shard = shards(directory)[1]
    shard.write_bytes(shard.read_bytes()[:-10])


@shard_damage("model-00003-of-", "Git LFS pointer", "git lfs pull")
def shard_a_git_lfs_pointer(directory: Path) -> None:
    shards(directory)[2].write_text(LFS)


@shard_damage("stands both in model-00001-of-", "model-00002-of-", "remove one")
def tensor_in_two_shards(directory: Path) -> None:
    first, second = shards(directory)[:2]
    name, tensor = next(iter(read(first).items()))
    write(second, {**read(second), name: tensor})


@shard_damage(INDEX, "model-00001-of-", QUERY, "but it does not")
def index_that_names_the_wrong_shard(directory: Path) -> None:
    wrong = shards(directory)[0].name
    edit_index(directory, lambda weight_map: weight_map.update({QUERY: wrong}))


@shard_damage(INDEX, "nobody.weight", "but it does not")
def index_that_names_a_tensor_nobody_has(directory: Path) -> None:
    shard = shards(directory)[0].name
    edit_index(directory, lambda weight_map: weight_map.update({"nobody.weight": shard}))


@shard_damage(INDEX, "other.safetensors", "1 tensor)")
def index_that_names_an_unknown_file(directory: Path) -> None:
    edit_index(directory, lambda weight_map: weight_map.update({QUERY: "other.safetensors"}))


@shard_damage(INDEX, QUERY, "no file name")
def index_that_holds_a_number(directory: Path) -> None:
    edit_index(directory, lambda weight_map: weight_map.update({QUERY: 3}))  # type: ignore[dict-item]


def load(directory: Path) -> object:
    return load_model(directory, arch_of(directory), ops=REFERENCE, dtype=torch.float32, max_model_len=64)


def assert_refused(directory: Path, expected: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    for part in expected:
        assert part in caught.value.message
    assert str(directory) in caught.value.message
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_file_is_refused(checkpoint: Callable[..., Path], tmp_path: Path, name: str) -> None:
    change, expected = DAMAGES[name]
    directory = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    change(directory)
    assert_refused(directory, expected)


@pytest.mark.parametrize("name", SHARD_DAMAGES)
def test_damaged_shards_are_refused(checkpoint: Callable[..., Path], tmp_path: Path, name: str) -> None:
    change, expected = SHARD_DAMAGES[name]
    directory = Path(shutil.copytree(checkpoint("llama", max_shard_size="60KB"), tmp_path / "model"))
    change(directory)
    assert_refused(directory, expected)


def test_problems_of_one_cause_are_told_once(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    edit_tensors(directory, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers" in name])
    with pytest.raises(CheckpointError, match="27 problems") as caught:
        load(directory)
    (line,) = caught.value.message.splitlines()[1:]
    assert "is missing" in line
    assert " (and 26 more like it: model.layers." in line
    (directory / "model.safetensors").write_bytes((checkpoint("llama") / "model.safetensors").read_bytes()[:-5000])
    with pytest.raises(CheckpointError, match="is truncated at") as caught:
        load(directory)
    assert caught.value.message.count("\n") == 1


def test_causes_are_listed_up_to_a_limit(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="100 problems") as caught:
        raise_problems(tmp_path, [f"{'x' * number} is odd" for number in range(1, 101)])
    assert caught.value.message.count("\n") == MAX_PROBLEMS + 1
    assert f"and {100 - MAX_PROBLEMS} more causes" in caught.value.message


def test_single_file_wins_over_an_index(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    (directory / INDEX).write_text("{")
    load(directory)
