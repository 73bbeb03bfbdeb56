"""Weights that are made up: the same for a name and a seed, whole or in parts."""

import torch

from quire.layers.weights import WHOLE, ShardSpec
from quire.loader.readers import DummyReader

SHAPE = (6, 5)


def reader(seed: int = 0) -> DummyReader:
    return DummyReader(seed=seed, dtype=torch.float32)


def test_a_tensor_depends_on_its_name_and_the_seed() -> None:
    first = reader().read("a", SHAPE, WHOLE)
    assert torch.equal(first, reader().read("a", SHAPE, WHOLE))
    assert not torch.equal(first, reader().read("b", SHAPE, WHOLE))
    assert not torch.equal(first, reader(seed=1).read("a", SHAPE, WHOLE))


def test_parts_are_those_of_the_whole_in_any_order() -> None:
    parts, whole = reader(), {name: reader().read(name, SHAPE, WHOLE) for name in ("a", "b")}
    for name in ("a", "b", "a"):
        for part in (2, 0, 1):
            rows = parts.read(name, SHAPE, ShardSpec(part=part, parts=3))
            assert torch.equal(rows, whole[name][2 * part : 2 * part + 2])
    assert torch.equal(parts.read("a", SHAPE, WHOLE), whole["a"])
