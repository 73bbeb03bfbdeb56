"""`GgufKeys`: typed reads of a model's metadata; an error names the file, the key and its value."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from typing import NoReturn

from quire.config.gguf.cursor import Value
from quire.config.gguf.files import GgufModel
from quire.errors import ConfigError, shown


class LookedUp(Mapping[str, Value]):
    """Metadata that remember which of their keys somebody has asked for."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = values
        self._asked: set[str] = set()

    def __getitem__(self, key: str) -> Value:
        self._asked.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def unread(self) -> Mapping[str, Value]:
        """What nobody has asked for."""
        return {key: value for key, value in self._values.items() if key not in self._asked}


class GgufKeys:
    """The metadata of a model; most keys begin with the name of its architecture."""

    def __init__(self, model: GgufModel) -> None:
        """Raises: ConfigError for a model that does not name its architecture."""
        self.model = model
        self.source = str(model.path)
        self.metadata = LookedUp(model.metadata)
        self.architecture = self.text("general.architecture")

    def refuse(self, key: str, problem: str) -> NoReturn:
        """Raise the error for one key."""
        value = self.metadata.get(key)
        what = "is missing" if value is None else f"is {shown(_plain(value))}"
        raise ConfigError(
            f"{self.source}: the metadata key {key} {what}; it {problem}. Use another file of this model."
        )

    def text(self, key: str) -> str:
        """A text that must be there."""
        value = self.metadata.get(key)
        if not isinstance(value, str) or not value:
            self.refuse(key, "must be a text")
        return value

    def optional_text(self, key: str) -> str | None:
        """A text, if it is there."""
        return None if key not in self.metadata else self.text(key)

    def texts(self, key: str) -> list[str]:
        """A list of texts that must be there."""
        value = self.metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            self.refuse(key, "must be a list of texts")
        return [text for text in value if isinstance(text, str)]

    def numbers(self, key: str) -> list[int] | list[float] | None:
        """A list of numbers, if it is there."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, array):
            self.refuse(key, "must be a list of numbers")
        return value.tolist()

    def flag(self, key: str, *, default: bool) -> bool:
        """A flag."""
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "must be a flag")
        return value

    def token_id(self, name: str) -> int | None:
        """The id of a token that has a role, if there is one."""
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.metadata.get(key)
        if value is None or value in (-1, 2**32 - 1):  # how writers say that there is none
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            self.refuse(key, "must be a token id")
        return value

    def name_of(self, key: str) -> str:
        """A key of the architecture as the file has it."""
        return f"{self.architecture}.{key}"

    @property
    def unread(self) -> Mapping[str, Value]:
        """The keys of the architecture that nobody has asked for, without its name."""
        prefix = self.name_of("")
        unread = self.metadata.unread.items()
        return {key.removeprefix(prefix): value for key, value in unread if key.startswith(prefix)}

    def of_model(self, key: str) -> int | float | str | bool | None:
        """A value of the architecture, if it is there: one for the model, or one that is the same in all layers.

        Layers that do not have what the key is about have 0. Raises: ConfigError where layers differ.
        """
        value = self.metadata.get(self.name_of(key))
        if not isinstance(value, (array, list)):
            return value
        found = {str(each): each for each in value if isinstance(each, (int, float, str, bool))}
        given = [each for each in found.values() if each] or list(found.values())
        if len(given) != 1:
            self.refuse(self.name_of(key), "must be the same for all layers: models whose layers differ are not read")
        return given[0]

    def by_layer(self, key: str, num_layers: int) -> list[bool]:
        """Whether each layer has what a key is about: whether its value is not 0. One value is that of all layers."""
        value = self.metadata.get(self.name_of(key))
        if not isinstance(value, (array, list)):
            return [bool(value)] * num_layers
        if len(value) < num_layers:
            self.refuse(self.name_of(key), f"must have a value for each of {num_layers} layers")
        return [bool(each) for each in value[:num_layers]]

    def flag_of_model(self, key: str, *, default: bool) -> bool:
        """A flag of the architecture."""
        return self.flag(self.name_of(key), default=default)

    def has(self, tensor: str) -> bool:
        """Whether the model has a tensor of this name."""
        return tensor in self.model.tensors

    def count(self, key: str) -> int:
        """A whole number of the architecture that must be there."""
        value = self.of_model(key)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            self.refuse(self.name_of(key), "must be a whole number above 0")
        return value

    def number(self, key: str) -> float:
        """A number of the architecture above 0 that must be there."""
        value = self.of_model(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            self.refuse(self.name_of(key), "must be a number above 0")
        return float(value)


def _plain(value: Value) -> object:
    return value[:20].tolist() if isinstance(value, array) else value
