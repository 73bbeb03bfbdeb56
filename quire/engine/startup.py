"""From `EngineArgs` to the parts of an engine in one process, with a ledger of where the time went."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.config.args import EngineArgs
from quire.engine.core_startup import create_config, importing_torch, load_core, locate
from quire.engine.engine_core import EngineCore
from quire.engine.front_startup import FrontParts, load_front
from quire.observability.ledger import Ledger


@dataclass(slots=True)
class EngineParts(FrontParts):
    """What an engine in one process is made of."""

    core: EngineCore
    ledger: Ledger


def start(args: EngineArgs, clock: Callable[[], float] = time.monotonic, ledger: Ledger | None = None) -> EngineParts:
    """Everything, loaded and ready.

    Raises: ConfigError and its kin, before weights are read where possible.
    """
    ledger = Ledger() if ledger is None else ledger
    with ledger.stage("config"):
        located = locate(args)  # before the imports: they hold back Ctrl-C, and this may download
    with importing_torch(ledger):  # overlaps with the small files
        with ledger.stage("config"):
            config = create_config(args, located)
        with ledger.stage("tokenizer"):
            front = load_front(config, clock)
    return EngineParts(
        config=config,
        tokenizer=front.tokenizer,
        input_processor=front.input_processor,
        output_processor=front.output_processor,
        core=load_core(config, clock, ledger),
        ledger=ledger,
    )
