"""The flags that `run`, `chat` and `complete` share: of sampling, and of a server to ask."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.cli.client.credentials import KEY_HELP
from quire.config.flags.knobs import whole_number
from quire.config.generation_keys import over_defaults
from quire.config.json_file import read_all
from quire.errors import InvalidParameter
from quire.sampling_params import RequestOutputKind, SamplingParams

NUMBERS = {
    "temperature": "randomness; 0 always takes the most likely token",
    "top_p": "keep the most likely tokens up to this probability",
    "min_p": "drop tokens less likely than this share of the most likely one",
    "presence_penalty": "push away tokens that occurred",
    "frequency_penalty": "push away tokens by how often they occurred",
    "repetition_penalty": "divide the logits of tokens that occurred",
}

MAX_SCHEMA_BYTES = 1 << 20
"""Of a file with a JSON Schema; what may be in it has its own limit in characters."""


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Flags for single fields of SamplingParams; those not given are left to the model's defaults."""
    group = parser.add_argument_group("sampling (defaults: the model's generation_config.json)")
    for name, help_text in NUMBERS.items():
        group.add_argument("--" + name.replace("_", "-"), type=float, metavar="X", help=help_text)
    group.add_argument("--top-k", type=int, metavar="K", help="keep the K most likely tokens")
    group.add_argument("-n", "--max-tokens", type=whole_number, metavar="N", help="stop after N tokens")
    group.add_argument("--sampling-seed", type=int, metavar="SEED", help="make the sample reproducible")
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop before this text (repeatable)")
    form = group.add_mutually_exclusive_group()
    form.add_argument("--json-schema", type=Path, metavar="FILE", help="answer in JSON that follows this schema")
    form.add_argument("--regex", metavar="REGEX", help="answer with a text that this regular expression matches")
    form.add_argument("--choice", action="append", metavar="TEXT", help="answer with one of these texts (repeatable)")


def add_server_flags(parser: argparse.ArgumentParser, url: str | None = None) -> None:
    """Flags that name a server."""
    group = parser.add_argument_group("server")
    default = "" if url is None else f" (default: {url})"
    group.add_argument("--url", default=url, metavar="URL", help=f"a server with OpenAI's API{default}")
    group.add_argument("--api-key", metavar="KEY", help=KEY_HELP)


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that were given, as fields of a request.

    Raises: InvalidParameter for a file that cannot be read.
    """
    fields = {name: vars(args)[name] for name in (*NUMBERS, "top_k", "stop", "max_tokens")}
    fields["seed"] = args.sampling_seed
    fields["structured_outputs"] = _form(args)
    return {name: value for name, value in fields.items() if value is not None}


def _form(args: argparse.Namespace) -> dict[str, Any] | None:
    if args.json_schema is not None:
        try:
            with args.json_schema.open("rb") as file:
                return {"json": read_all(file, MAX_SCHEMA_BYTES).decode("utf-8")}
        except (OSError, ValueError) as error:
            raise InvalidParameter(f"--json-schema {args.json_schema}: {error}", parameter="json_schema") from None
    given = {name: vars(args)[name] for name in ("regex", "choice")}
    return next(({name: value} for name, value in given.items() if value is not None), None)


def sampling_params(
    args: argparse.Namespace, defaults: Mapping[str, Any], default_max_tokens: int | None
) -> SamplingParams:
    """The flags that were given over the model's `defaults`, streaming deltas.

    Raises: InvalidParameter.
    """
    given = {"max_tokens": default_max_tokens, **sampling_fields(args)}
    return SamplingParams(output_kind=RequestOutputKind.DELTA, **over_defaults(defaults, given))
