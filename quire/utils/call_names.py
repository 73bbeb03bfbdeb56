"""Methods that refuse keywords they do not have with an error of quire's, before Python raises its TypeError."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from quire.errors import InvalidParameter, shown
from quire.utils.lazy import nearest

P = ParamSpec("P")
R = TypeVar("R")


def checked_call(name: str, hint_of: Callable[[str], str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate the method of that name. `hint_of` says where a keyword that it does not have belongs, or nothing.

    The method raises: InvalidParameter that names the first unknown keyword, or the first argument that is missing.
    """

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(method)
        own = list(signature.parameters)[1:]

        @functools.wraps(method)
        def call(*args: P.args, **given: P.kwargs) -> R:
            _check_names(name, own, given, hint_of)
            try:
                signature.bind(*args, **given)
            except TypeError as error:
                raise InvalidParameter(f"{name}(): {error}; it takes {', '.join(own)}", parameter=name) from None
            return method(*args, **given)

        return call

    return decorate


def _check_names(name: str, own: list[str], given: Mapping[str, object], hint_of: Callable[[str], str]) -> None:
    for keyword in given:
        if keyword not in own:
            hint = hint_of(keyword)
            hint = f"; {hint}" if hint else nearest(keyword, own)
            raise InvalidParameter(f"{name}() has no argument {shown(keyword)}{hint}", parameter=keyword)
