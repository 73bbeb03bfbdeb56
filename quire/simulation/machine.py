"""The configuration of an engine on a device that may not be here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quire.config.engine import QuireConfig
from quire.config.flags.args import EngineArgs
from quire.config.memory.fit import Machine
from quire.engine.core_startup import read_arch
from quire.platforms.current import current_capabilities
from quire.simulation.cost_model import CostModel
from quire.simulation.hardware import HERE, Device, capabilities_of, hardware_named


def config_on(hardware: str, args: EngineArgs, path: Path) -> tuple[QuireConfig, Device]:
    """What a start would decide on a device of the table, all of its memory being free, for a model's directory.

    Only config.json is read. Raises: ConfigError.
    """
    here = current_capabilities(args.device)
    here = replace(here, available_memory=here.total_memory)
    machine = Machine(arch=read_arch(args, path), capabilities=capabilities_of(hardware, here), path=path)
    return machine.resolve(args), hardware_named(hardware, here)


def paced(config: QuireConfig, cost: CostModel, hardware: str) -> QuireConfig:
    """The configuration, with steps beside long prompts as short as they should be on a device.

    On this machine they are as the engine has them.
    """
    if hardware == HERE:
        return config
    limits = config.scheduler_config
    work = min(cost.short_step_work, limits.max_num_batched_tokens)
    return replace(config, scheduler_config=replace(limits, short_step_work=work))
