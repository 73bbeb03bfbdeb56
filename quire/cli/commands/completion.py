"""`quire completion SHELL`: a script that completes commands and flags, made from the parsers themselves."""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "fish")
HOW = """\
Put it where the shell looks for it:
  bash   quire completion bash > ~/.local/share/bash-completion/completions/quire
  zsh    quire completion zsh > "${fpath[1]}/_quire"
  fish   quire completion fish > ~/.config/fish/completions/quire.fish"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = HOW
    parser.add_argument("shell", choices=SHELLS, help="the shell it is for")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    from quire.cli.parser import create_parser

    print(shtab.complete(create_parser(), args.shell))
    return 0
