"""Headers of GGUF files: what is read, and what is refused by name, number and remedy."""

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from quire.config.gguf import cursor
from quire.config.gguf.cursor import as_written
from quire.config.gguf.files import gguf_files, gguf_in, read_gguf
from quire.config.gguf.header import GgufProblem, read_gguf_header, read_gguf_start
from quire.errors import CheckpointError, ConfigError


def text(content: str) -> bytes:
    return struct.pack("<Q", len(content.encode())) + content.encode()


def tensor(name: str = "a", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    """A tensor info. Shapes: the dimension of neighbours first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf_bytes(
    *,
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: int = 4096,
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
) -> bytes:
    """A file made by hand, with so many bytes of data."""
    counts = (len(tensors) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys)
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


ALIGNMENT = "general.alignment"
DAMAGE: dict[str, tuple[bytes, list[str]]] = {
    "empty": (b"", ["no GGUF file"]),
    "another format": (b"\x08\0\0\0\0\0\0\0{}", ["no GGUF file", "copy it again"]),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", ["Git LFS pointer", "git lfs pull"]),
    "magic alone": (b"GGUF", ["truncated", "4 bytes"]),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), ["big-endian"]),
    "version 1": (gguf_bytes(version=1), ["version 1", "2 and 3"]),
    "version 9": (gguf_bytes(version=9), ["version 9"]),
    "many tensors": (gguf_bytes(num_tensors=2**63), ["number of tensors is 9223372036854775808", "the limit is"]),
    "more tensors than bytes": (gguf_bytes(num_tensors=1000), ["no room for"]),
    "many keys": (gguf_bytes(num_keys=2**64 - 1), ["number of metadata keys is 18446744073709551615"]),
    "a long key": (gguf_bytes(keys=(struct.pack("<Q", 2**62),)), ["4611686018427387904 bytes", "the limit is"]),
    "a text beyond the file": (
        gguf_bytes(keys=(key("k", 8, struct.pack("<Q", 10**6)),)),
        ["k at byte", "takes 1000000 bytes", "but the file ends at byte"],
    ),
    "no UTF-8": (gguf_bytes(keys=(key("k", 8, struct.pack("<Q", 2) + b"\xff\xfe"),)), ["not valid UTF-8"]),
    "a key twice": (gguf_bytes(keys=(key("k", 0, b"1"),) * 2), ["key k is there twice"]),
    "unknown type": (gguf_bytes(keys=(key("k", 99, bytes(8)),)), ["k has the type 99"]),
    "a flag of 2": (gguf_bytes(keys=(key("k", 7, b"\x02"),)), ["neither 0 nor 1"]),
    "a long list": (
        gguf_bytes(keys=(key("k", 9, struct.pack("<IQ", 4, 2**40)),)),
        ["number of elements of k is 1099511627776", "the limit is"],
    ),
    "a list beyond the file": (
        gguf_bytes(keys=(key("k", 9, struct.pack("<IQ", 12, 10**6)),)),
        ["number of elements of k is 1000000", "no room for"],
    ),
    "lists in lists": (gguf_bytes(keys=(key("k", 9, struct.pack("<IQ", 9, 1) * 9),)), ["more than 4 deep"]),
    "a gap": (
        gguf_bytes(tensors=(tensor(), tensor("b", offset=64)), data=80),
        ["b begins 48 bytes behind a", "multiples of 32"],
    ),
    "nothing at the start": (
        gguf_bytes(tensors=(tensor(offset=32),), data=48),
        ["a begins 32 bytes behind the header"],
    ),
    "bytes behind the last tensor": (gguf_bytes(tensors=(tensor(),), data=64), ["48 bytes follow a", "alignment"]),
    "alignment of 3": (gguf_bytes(keys=(key(ALIGNMENT, 4, struct.pack("<I", 3)),)), ["no power of two"]),
    "alignment of 0": (gguf_bytes(keys=(key(ALIGNMENT, 4, bytes(4)),)), ["up to 4096"]),
    "alignment of a text": (gguf_bytes(keys=(key(ALIGNMENT, 8, text("32")),)), ["up to 4096"]),
    "huge alignment": (gguf_bytes(keys=(key(ALIGNMENT, 4, struct.pack("<I", 2**31)),)), ["up to 4096"]),
    "no dimension": (gguf_bytes(tensors=(tensor(shape=()),)), ["0 dimensions"]),
    "five dimensions": (gguf_bytes(tensors=(tensor(shape=(1,) * 5),)), ["5 dimensions", "1 to 4"]),
    "a dimension of 0": (gguf_bytes(tensors=(tensor(shape=(4, 0)),)), ["a has the shape [0, 4]"]),
    "a product of 2^64": (gguf_bytes(tensors=(tensor(shape=(2**32, 2**32)),)), ["a has the shape", "elements"]),
    "a tensor of no type": (gguf_bytes(tensors=(tensor(kind=77),)), ["a has the type 77"]),
    "a type that was removed": (gguf_bytes(tensors=(tensor(kind=4),)), ["a has the type 4"]),
    "rows that blocks do not divide": (
        gguf_bytes(tensors=(tensor(shape=(33, 2), kind=8),)),
        ["a has rows of 33 elements", "Q8_0 has blocks of 32"],
    ),
    "an odd offset": (gguf_bytes(tensors=(tensor(offset=3),)), ["offset 3", "multiple of 32"]),
    "an offset beyond the file": (gguf_bytes(tensors=(tensor(offset=2**60),)), ["ends at byte", "truncated at"]),
    "more data than the file has": (
        gguf_bytes(tensors=(tensor(shape=(1024, 1024)),)),
        ["a ends at byte", "truncated at"],
    ),
    "a tensor twice": (gguf_bytes(tensors=(tensor(), tensor(offset=32))), ["lists a twice"]),
    "an overlap": (gguf_bytes(tensors=(tensor(shape=(64,)), tensor("b", offset=32))), ["b overlaps a"]),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_refused_with_its_numbers(name: str, tmp_path: Path) -> None:
    data, expected = DAMAGE[name]
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        read_gguf(tmp_path / "m.gguf")
    message = str(caught.value)
    assert "m.gguf" in message
    assert len(message) < 1000
    for part in expected:
        assert part in message


def test_what_is_in_order_is_read(tmp_path: Path) -> None:
    values = {"a.number": -7, "a.float": 0.1, "a.flag": True, "a.text": "h\u00e9"}
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_int32("a.number", -7)
    writer.add_float32("a.float", 0.1)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "h\u00e9")
    writer.add_array("a.texts", ["x", "yz"])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_tensor("t.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    write(writer)
    model = read_gguf(tmp_path / "m.gguf")
    assert {name: model.metadata[name] for name in values} == values
    assert model.metadata["a.texts"] == ["x", "yz"]
    assert list(model.metadata["a.numbers"]) == [1, 2, 3]  # type: ignore[arg-type]
    found = model.tensors["t.weight"]
    assert (found.type.name, found.shape, found.num_bytes) == ("F32", (3, 4), 48)
    assert (tmp_path / "m.gguf").read_bytes()[found.start :][:48] == np.arange(12, dtype=np.float32).tobytes()


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_file_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf_bytes(keys=(key("k", 0, b"\x01"),)))
    assert read_gguf(file).metadata["k"] == 1
    assert read_gguf(file) is read_gguf(file)
    (tmp_path / "new").write_bytes(gguf_bytes(keys=(key("k", 0, b"\x02"),)))
    (tmp_path / "new").rename(file)
    assert read_gguf(file).metadata["k"] == 2


def test_lists_together_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursor, "MAX_VALUES", 10)
    keys = tuple(key(name, 9, struct.pack("<IQ", 0, 6) + bytes(6)) for name in "ab")
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(keys=keys))
    with pytest.raises(CheckpointError, match="elements of b is 6, the limit is 4"):
        read_gguf(tmp_path / "m.gguf")


def test_a_header_is_read_to_its_limit_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursor, "MAX_HEADER_BYTES", 100)
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(keys=(key("k", 8, text("x" * 200)),)))
    with pytest.raises(CheckpointError, match="headers of more than 100 bytes are not read"):
        read_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize("number", [0.1, 1e-06, 1.5625e-07, 1_000_000.0, 3.4028234663852886e38, 1e-45, 0.0, -2.5])
def test_a_float32_is_the_decimal_that_was_written(number: float) -> None:
    stored = struct.unpack("<f", struct.pack("<f", number))[0]
    assert struct.pack("<f", as_written(stored)) == struct.pack("<f", stored)
    if number not in (3.4028234663852886e38, 1e-45):
        assert as_written(stored) == number


def split(directory: Path, change: Callable[[list[Path]], None] = lambda files: None) -> Path:
    """Three files of one model."""
    writer = gguf.GGUFWriter(directory / "m.gguf", "llama", split_max_tensors=2)
    for index in range(5):
        writer.add_tensor(f"t{index}", np.full((4,), index, np.float32))
    write(writer)
    files = sorted(directory.glob("m-*.gguf"))
    change(files)
    return files[0]


def test_the_files_of_a_split_model_are_one_model(tmp_path: Path) -> None:
    first = split(tmp_path)
    model = read_gguf(first)
    assert [file.name for file in gguf_files(first)] == [f"m-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    assert sorted(model.tensors) == [f"t{index}" for index in range(5)]
    assert len({tensor.file for tensor in model.tensors.values()}) == 3
    assert read_gguf(gguf_files(first)[2]).path == first
    assert gguf_in(tmp_path) == first


def swap(files: list[Path]) -> None:
    second, third = files[1].read_bytes(), files[2].read_bytes()
    files[1].write_bytes(third)
    files[2].write_bytes(second)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda files: files[1].unlink(), r"1 file missing: m-00002-of-00003\.gguf"),
        (swap, r"m-00002-of-00003\.gguf says that it is part 2, counted from 0, not 1"),
        (lambda files: files[2].write_bytes(files[1].read_bytes()), "t2 stands both in|says that it is part 1"),
        (lambda files: files[1].write_bytes(b"GGUF"), r"m-00002-of-00003\.gguf is truncated"),
    ],
    ids=["one missing", "two swapped", "one twice", "one damaged"],
)
def test_a_split_model_that_is_not_whole_is_refused(
    change: Callable[[list[Path]], None], expected: str, tmp_path: Path
) -> None:
    first = split(tmp_path, change)
    with pytest.raises(CheckpointError, match=expected):
        read_gguf(first)


def test_one_part_under_another_name_is_refused(tmp_path: Path) -> None:
    alone = split(tmp_path).rename(tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match="one of 3 files, but its name says 1"):
        read_gguf(alone)


def test_a_directory_with_several_models_names_them(tmp_path: Path) -> None:
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf", "mmproj-a.gguf"):
        (tmp_path / name).write_bytes(gguf_bytes())
    with pytest.raises(ConfigError, match=r"2 GGUF models \(a-Q4_0\.gguf, a-Q8_0\.gguf\)\. Give the file of one"):
        gguf_in(tmp_path)
    (tmp_path / "a-Q4_0.gguf").unlink()
    assert gguf_in(tmp_path) == tmp_path / "a-Q8_0.gguf"


def test_a_header_is_read_from_the_first_bytes_of_a_file(tmp_path: Path) -> None:
    """As it is fetched from the hub: with fewer bytes than it has there is no answer yet, and never a wrong one."""
    keys = (key("a", 9, struct.pack("<IQ", 8, 2) + text("x") + text("y")),)
    data = gguf_bytes(keys=keys, tensors=(tensor(),), data=16)
    file = tmp_path / "m.gguf"
    file.write_bytes(data)
    whole = read_gguf_header(file)
    for size in range(8, len(data)):
        start = read_gguf_start(file, data[:size], len(data))
        assert start == (None if size < whole.num_bytes else whole)
    with pytest.raises(GgufProblem, match="has a damaged header"):
        read_gguf_start(file, data[:60], 60)
