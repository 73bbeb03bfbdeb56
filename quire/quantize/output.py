"""The directory that a run writes: a file for each decoder layer, so that a run that was killed can go on."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from quire.config.json_file import read_json_object
from quire.errors import ConfigError, shown
from quire.loader.hub import CONFIG_FILES
from quire.loader.weight_files import INDEX
from quire.quantize.tensor_file import UNFINISHED, read_tensors, write_tensors, written_whole

RECIPE = "quantize_recipe.json"
"""What the run does; there until it is finished."""
REPORT = "quantize_report.json"
COPIED = (*CONFIG_FILES, "LICENSE*", "NOTICE*")
SPARE = 1.05


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Make a directory, and keep other runs out of it meanwhile.

    Raises: ConfigError where one is in it, or where it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError as error:
        raise _unusable(directory, error) from None
    try:
        _lock(descriptor, directory)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another run writes to --out {directory}; wait for it, or give another directory") from None


def _unusable(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--out {directory} cannot be used: {error.strerror}")


class OutputDirectory:
    """A checkpoint that comes to be, file by file. File 0 holds what is outside of layers, file i + 1 layer i."""

    def __init__(self, directory: Path, recipe: Mapping[str, Any], num_files: int, num_bytes: int) -> None:
        """Begin, or go on where a run of the same recipe stopped. `num_bytes` is what will be written in all.

        Raises: ConfigError when the directory holds anything else, or the disk is too small.
        """
        self.path = directory
        self._num_files = num_files
        try:
            self._begin(dict(recipe))
            self._check_space(num_bytes)
        except OSError as error:
            raise _unusable(directory, error) from None

    @property
    def num_finished(self) -> int:
        """Leading files that are there."""
        return next((index for index in range(self._num_files) if not self._file(index).exists()), self._num_files)

    @property
    def files(self) -> list[Path]:
        """All files of weights."""
        return [self._file(index) for index in range(self._num_files)]

    def write(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Write a file, whole or not at all."""
        write_tensors(self._file(index), tensors)

    def read(self, index: int) -> dict[str, Tensor]:
        """The tensors of a file that was written before."""
        return read_tensors(self._file(index))

    def finish(self, source: Path, config: Mapping[str, Any], names: Sequence[Sequence[str]], num_bytes: int) -> None:
        """Write what makes the files a checkpoint. `names` are those of each file's tensors."""
        for pattern in COPIED:
            for file in sorted(source.glob(pattern)):
                if file.is_file() and file.name not in ("config.json", INDEX, REPORT):
                    shutil.copyfile(file, self.path / file.name)
        weight_map = {name: self._file(index).name for index, inside in enumerate(names) for name in inside}
        index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        self.write_json(INDEX, index)
        self.write_json("config.json", config)
        (self.path / RECIPE).unlink()

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file, whole or not at all."""
        with written_whole(self.path / name) as unfinished:
            unfinished.write_text(json.dumps(content, indent=2) + "\n")

    def _file(self, index: int) -> Path:
        return self.path / f"model-{index + 1:05}-of-{self._num_files:05}.safetensors"

    def _begin(self, recipe: dict[str, Any]) -> None:
        present = sorted({file.name for file in self.path.iterdir()} - {f"{RECIPE}{UNFINISHED}"})
        if not present:
            self.write_json(RECIPE, recipe)
            return
        if RECIPE not in present:
            what = "holds a finished checkpoint" if "config.json" in present else f"is not empty ({present[0]})"
            raise ConfigError(f"--out {self.path} {what}; give an empty or a new directory")
        before = read_json_object(self.path / RECIPE, "Give another directory.", ConfigError) or {}
        for key in sorted(before.keys() | recipe.keys()):
            if before.get(key) != recipe.get(key):
                raise ConfigError(
                    f"--out {self.path} holds an unfinished run with {key} {shown(before.get(key))}, and this one has "
                    f"{shown(recipe.get(key))}; repeat that command to go on, or give another directory"
                )

    def _check_space(self, num_bytes: int) -> None:
        written = sum(file.stat().st_size for file in self.path.iterdir())
        needed, free = int(num_bytes * SPARE) - written, shutil.disk_usage(self.path).free
        if needed > free:
            raise ConfigError(
                f"--out {self.path} has {free / 1e9:.2f} GB free, and {needed / 1e9:.2f} GB are still to be written; "
                "free some, or give a directory on another disk"
            )
