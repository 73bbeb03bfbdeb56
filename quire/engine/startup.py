"""From `EngineArgs` to the parts of an engine in one process, with a ledger of where the time went."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from quire.config.flags.args import EngineArgs
from quire.engine.core_startup import create_config, importing_torch, load_core, locate
from quire.engine.engine_core import EngineCore
from quire.engine.front.seeds import MakeSeeds, same_seeds
from quire.engine.front.startup import FrontParts, load_front
from quire.loader.digest import digesting
from quire.observability.ledger import Ledger
from quire.utils.interrupts import interrupts_deferred


@dataclass(slots=True)
class EngineParts(FrontParts):
    """What an engine in one process is made of."""

    core: EngineCore
    ledger: Ledger


def start(
    args: EngineArgs,
    clock: Callable[[], float] = time.monotonic,
    ledger: Ledger | None = None,
    seeds: MakeSeeds = same_seeds,
) -> EngineParts:
    """Everything, loaded and ready.

    Raises: ConfigError and its kin, before weights are read where possible.
    """
    ledger = Ledger() if ledger is None else ledger
    with ledger.stage("config"):
        located = locate(args)  # before Ctrl-C is held back: this may download
        with interrupts_deferred():
            config = create_config(args, located)  # before torch is imported: what is refused here needs none
    with ExitStack() as stack:
        with importing_torch(ledger):  # overlaps with the tokenizer and the digest of the weights
            weights_digest = stack.enter_context(digesting(config))
            with ledger.stage("tokenizer"):
                front = load_front(config, clock, seeds)
        core = load_core(config, clock, ledger, weights_digest)
    return EngineParts(
        config=front.config,
        tokenizer=front.tokenizer,
        input_processor=front.input_processor,
        output_processor=front.output_processor,
        core=core,
        ledger=ledger,
    )
