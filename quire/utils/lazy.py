"""Dotted-path tables: names that are resolved when they are used, with an error that names the extra to install."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator, Mapping

from quire.errors import ConfigError, MissingDependency


def nearest(name: str, known: Mapping[str, object] | list[str]) -> str:
    """A hint such as `; did you mean 'x'?`, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


class LazyTable(Mapping[str, str]):
    """name -> "module:attribute", imported by `load`."""

    def __init__(self, kind: str, entries: dict[str, str], extras: dict[str, str] | None = None) -> None:
        self.kind = kind
        self.entries = entries
        self.extras = extras or {}

    def __getitem__(self, name: str) -> str:
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, name: str, path: str) -> None:
        """Register `path` ("module:attribute") under a name.

        Raises: ConfigError when the path is not of that form.
        """
        module, _, attribute = path.partition(":")
        if not module or not attribute:
            raise ConfigError(f"{self.kind} {name!r}: {path!r} is not of the form 'package.module:Name'")
        self.entries[name] = path

    def load(self, name: str) -> object:
        """Import and return what stands under `name`.

        Raises: ConfigError for an unknown name, MissingDependency when its package is not installed.
        """
        if name not in self.entries:
            raise ConfigError(
                f"unknown {self.kind} {name!r}{nearest(name, self) or '.'} Known: {', '.join(sorted(self))}"
            )
        module, _, attribute = self.entries[name].partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            extra = self.extras.get(name)
            if extra is None:
                raise
            raise MissingDependency(
                f'{self.kind} {name!r} needs the package {error.name!r}: pip install "{extra}"'
            ) from error
