"""`quire trace`: the last steps of a running server as a file that ui.perfetto.dev opens."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from quire.cli.sampling_flags import add_server_flags
from quire.config.flags.knobs import whole_number
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.cli.client.http_client import HttpClient, Reply

FILE = "quire-trace.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    add_server_flags(parser, url="http://127.0.0.1:8000")
    parser.add_argument("--steps", type=whole_number, metavar="N", help="only the last N steps")
    parser.add_argument(
        "-o",
        "--output",
        default=FILE,
        metavar="FILE",
        help=f"where to write it (default: {FILE}); - is standard output",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fetch the trace and write it.

    Raises: ConfigError when the server cannot be asked or refuses.
    """
    import asyncio

    from quire.cli.client.credentials import authorization
    from quire.cli.client.http_client import HttpClient

    path = "/v1/trace" if args.steps is None else f"/v1/trace?steps={args.steps}"
    url = str(args.url).rstrip("/").removesuffix("/v1")
    reply = asyncio.run(_fetched(HttpClient(url, headers=authorization(url, args.api_key)), path))
    if reply.status != 200:
        raise ConfigError(f"{url}{path} answered {reply.error}")
    if args.output == "-":
        sys.stdout.buffer.write(reply.body)
        return 0
    _write(args.output, bytes(reply.body))
    print(f"{args.output}: open it in ui.perfetto.dev", file=sys.stderr)
    return 0


async def _fetched(client: HttpClient, path: str) -> Reply:
    try:
        async with client:
            return await client.get(path)
    except ConnectionError as error:
        raise ConfigError(f"{error}; is a server running there? `quire serve` starts one") from None


def _write(path: str, data: bytes) -> None:
    """Write a file that only this user can read, if it is a new one."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}") from None
