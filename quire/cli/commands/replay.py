"""`quire replay receipt.json`: give an answer again, offline, and say whether it is the same."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from quire.cli.output import reason_of, say
from quire.cli.terminal.answer import write_plain
from quire.config.flags.args import EMBEDDED, EngineArgs, add_flags, from_namespace
from quire.config.json_file import read_all
from quire.errors import ConfigError, InvalidParameter, counted
from quire.loader.names import has_short_form
from quire.log import set_default_level

if TYPE_CHECKING:
    from quire.engine.identity import Identity

MAX_RECEIPT_BYTES = 256 << 20
"""Of the file: the largest request that a server takes by default has a receipt of some 50 MiB."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    parser.add_argument("receipt", metavar="FILE", help="a receipt, or a reply that carries one; - for standard input")
    parser.add_argument("--force", action="store_true", help="run even where quire, model or machine is another one")
    parser.add_argument("--text", action="store_true", help="print the completions, too")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the start-up log")
    add_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay all requests of a receipt; 0 when all are identical.

    Raises: QuireError.
    """
    if not args.verbose:
        set_default_level("WARNING")
    from quire.engine.core_startup import create_config
    from quire.engine.identity import identity_of
    from quire.engine.receipt import Receipt, Transcript, first_difference

    receipt = Receipt.from_json(_read(args.receipt))
    engine_args = from_namespace(_completed(args, receipt.identity))
    if not args.force:  # what can be said without the weights is said before they are read
        _check(receipt.identity, identity_of(create_config(engine_args), receipt.identity.weights))
    from quire.llm import LLM

    with LLM.from_engine_args(engine_args) as llm:
        if args.force:
            for problem in receipt.identity.differences(llm.engine.identity):
                say(f"warning: {problem}")
        else:
            _check(receipt.identity, llm.engine.identity)
        if not receipt.identity.row_invariant:
            say(
                "warning: this model ran through transformers, whose rounding follows what else runs: equal tokens are "
                "not promised, and a difference proves nothing"
            )
        params = [request.params() for request in receipt.requests]
        prompts: list[Any] = [{"prompt_token_ids": request.prompt_token_ids} for request in receipt.requests]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    status = 0
    for number, (request, given, output) in enumerate(zip(receipt.requests, params, outputs, strict=True)):
        transcript = Transcript(given)
        transcript.add(output)
        difference = first_difference(request, transcript.receipt())
        num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
        if args.text:
            for completion in output.outputs:
                write_plain(f"{completion.text}\n")
        verdict = "identical" if difference is None else f"DIFFERENT at {difference}"
        print(
            f"prompt {number}: {verdict} ({counted(len(output.outputs), 'completion')}, {counted(num_tokens, 'token')})"
        )
        status |= difference is not None
    return int(status)


def _check(given: Identity, here: Identity) -> None:
    """Raises: ConfigError when equal tokens are not promised."""
    problems = given.differences(here)
    if problems:
        raise ConfigError(
            "the receipt is of another engine, so equal tokens are not promised (its value, then the one here): "
            f"{'; '.join(problems)}. {_remedy(given, problems)}"
        )


def _completed(args: argparse.Namespace, identity: Identity) -> argparse.Namespace:
    """The flags, with the receipt's values where none were given. Mutates args.

    Raises: InvalidParameter when the model must be given.
    """
    given = vars(args)
    is_local = identity.model != EMBEDDED and "/" not in identity.model and not has_short_form(identity.model)
    if is_local and "model" not in given:
        raise InvalidParameter(
            f"the receipt names the model {identity.model!r}, a directory where it was served; say where it is here: "
            "--model DIRECTORY",
            parameter="model",
        )
    recorded = {
        "model": None if identity.model == EMBEDDED else identity.model,
        "dtype": identity.dtype,
        "quantization": identity.quantization,
        "kv_cache_dtype": identity.kv_cache_dtype,
        "block_size": identity.block_size,
        "max_model_len": identity.max_model_len,
        "skip_tokenizer_init": identity.skip_tokenizer_init,
        "device": "cpu" if identity.ops in ("cpu", "reference") else "auto",
        "ops": "reference" if identity.ops == "reference" else "auto",
        "model_impl": "transformers" if identity.transformers else None,
    }
    assert recorded.keys() <= {option.name for option in dataclasses.fields(EngineArgs)}
    for name, value in recorded.items():
        if value is not None:
            given.setdefault(name, value)
    return args


def _remedy(identity: Identity, problems: list[str]) -> str:
    hints = []
    names = [problem.partition(":")[0] for problem in problems]
    if "quire" in names:
        hints.append(f"Install quire {identity.quire}.")
    if "isa" in names and identity.isa:
        hints.append(f"QUIRE_CPU_ISA={identity.isa} chooses that instruction set where the processor has it.")
    if "kernels" in names or "torch" in names:
        hints.append("Another build of the kernels, or another torch, may round otherwise.")
    if {"weights", "tokenizer", "architecture"} & set(names):
        hints.append("Give the model of the receipt with --model, and its overrides.")
    return " ".join([*hints, "--force runs it all the same."])


def _read(name: str) -> bytes:
    try:
        if name == "-":
            return read_all(sys.stdin.buffer, MAX_RECEIPT_BYTES)
        with open(name, "rb") as file:
            return read_all(file, MAX_RECEIPT_BYTES)
    except (OSError, ValueError) as error:
        raise InvalidParameter(f"{name}: {reason_of(error)}; give the file of a receipt", parameter="receipt") from None
