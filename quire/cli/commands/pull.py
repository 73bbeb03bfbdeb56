"""`quire pull NAME`: download a model from the Hugging Face hub."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quire.errors import ConfigError
from quire.loader.names import repository_of, short_names

HOW = """\
NAME is a repository (org/name), one of its GGUF files (org/name:Q4_K_M, in any case), or a short name (qwen3:0.6b).
Only what quire reads is fetched: configuration, tokenizer, chat template and *.safetensors, or the one GGUF model
(Q4_K_M without a tag), all of its parts. An interrupted download continues where it stopped. Files are checked by
their hashes, and damaged ones fetched again. A model that was pulled is used without a network until it is pulled
again. Environment: HF_HOME (where models are kept), HF_TOKEN (for gated models), HF_ENDPOINT (another hub),
HF_HUB_OFFLINE=1 (never use the network)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = f"{parser.description}\n\n{HOW}"
    parser.add_argument("name", metavar="NAME", nargs="?", help="org/name, org/name:TAG or a short name")
    parser.add_argument("--revision", metavar="REVISION", help="branch, tag or commit (default: the main branch)")
    parser.add_argument("--names", action="store_true", help="list the short names and what they stand for")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Download one model and print its directory.

    Raises: ConfigError.
    """
    from quire.loader.hub import checked_name, download

    if args.names:
        for name, repository in short_names().items():
            print(f"{name:<22} {repository}")
        return 0
    if args.name is None:
        raise ConfigError("name a model: quire pull qwen3:0.6b (quire pull --names lists the short names)")
    if repository_of(args.name) == args.name and Path(args.name).expanduser().is_dir():
        raise ConfigError(f"{args.name} is a directory on this machine; there is nothing to pull")
    model = checked_name(args.name)
    print(f"pulling {model}", file=sys.stderr)
    print(download(model, args.revision))
    return 0
