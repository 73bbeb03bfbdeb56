"""The form that an API asks an output to have, as `structured_outputs` says it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidParameter, RequestError, UnsupportedFeature, shown
from quire.server.http.errors import ApiError, invalid

FORMATS = ("text", "json_object", "json_schema", "structural_tag")
"""Types of `response_format`."""


@dataclass(frozen=True, slots=True)
class Form:
    """What a request asks for, and where it does."""

    fields: Mapping[str, Any]
    """Of `StructuredOutputsParams`."""
    place: str
    """The field of the request, for errors."""

    @contextmanager
    def named(self) -> Iterator[None]:
        """Errors about `structured_outputs` name the field that the client has sent."""
        try:
            yield
        except (InvalidParameter, UnsupportedFeature) as error:
            if not error.parameter.startswith("structured_outputs"):
                raise
            raise _renamed(error, error.parameter, self.place) from None


def _renamed(error: RequestError, parameter: str, place: str) -> RequestError | ApiError:
    if place == "structured_outputs":
        return error
    message = error.message.replace(parameter, place, 1)
    return ApiError(error.status, error.code, message, param=place)


def form_of(
    structured_outputs: Mapping[str, Any] | None, response_format: Mapping[str, Any] | None = None
) -> Form | None:
    """The form that vLLM's field or OpenAI's asks for.

    Raises: ApiError.
    """
    form = None if response_format is None else openai_form(response_format, "response_format")
    if structured_outputs is None:
        return form
    if form is not None:
        raise invalid(
            "response_format", "response_format and structured_outputs both say what the output is; send one."
        )
    return Form(structured_outputs, "structured_outputs")


def openai_form(given: Mapping[str, Any], place: str, *, is_flat: bool = False) -> Form | None:
    """OpenAI's `response_format`; `is_flat`: that of responses, whose schema stands beside its type.

    Raises: ApiError.
    """
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object" and given.get("schema") is not None:  # as llama.cpp and other servers take it
        return _json_schema(given, place)
    if kind == "json_object":
        return Form({"json_object": True}, place)
    if kind == "json_schema":
        return _json_schema(
            given if is_flat else given.get("json_schema"), place if is_flat else f"{place}.json_schema"
        )
    if kind == "structural_tag" and not is_flat:
        return Form({"structural_tag": dict(given)}, place)
    known = [name for name in FORMATS if not (is_flat and name == "structural_tag")]
    raise invalid(f"{place}.type", f"{place}.type must be one of {', '.join(known)}; got {shown(kind)}.")


def _json_schema(given: Any, place: str) -> Form:
    schema = given.get("schema") if isinstance(given, Mapping) else None
    if not isinstance(schema, (dict, bool)):
        raise invalid(f"{place}.schema", f"{place}.schema must be a JSON Schema; got {shown(schema)}.")
    return Form({"json": schema}, f"{place}.schema")


def anthropic_form(given: Any, place: str) -> Form | None:
    """Anthropic's output format: `{"type": "json_schema", "schema": ...}`.

    Raises: ApiError.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping) or given.get("type") != "json_schema":
        raise invalid(place, f"{place} must be an object of type json_schema; got {shown(given)}.")
    return _json_schema(given, place)


def ollama_form(given: Any) -> Form | None:
    """Ollama's `format`: the word json, or a schema.

    Raises: ApiError.
    """
    if given is None or given == "":
        return None
    if given == "json":
        return Form({"json_object": True}, "format")
    if isinstance(given, dict):
        return Form({"json": given}, "format")
    raise invalid("format", f'format must be "json" or a JSON Schema; got {shown(given)}.')
