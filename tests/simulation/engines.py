"""Small engines for simulations."""

from __future__ import annotations

from typing import Any

from quire.config.engine import QuireConfig
from quire.config.flags.args import EngineArgs
from quire.engine.core_startup import EMBEDDED_MODEL
from quire.simulation.cost_model import CostModel
from quire.simulation.machine import config_on
from quire.simulation.trace import TraceRequest

COST = CostModel(
    fixed_s=0.004,
    token_s=1e-4,
    context_token_s=3e-7,
    pair_s=1e-8,
    sequence_s=1e-5,
    draw_s=2e-5,
    new_batch_s=7e-4,
    idle_s=9e-4,
    record_s=6e-4,
    free_tokens=3,
)


def engine_config(**options: Any) -> QuireConfig:
    """The embedded model on a device of the table."""
    given = {"block_size": 16, "max_num_seqs": 16, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 400}
    return config_on("h100", EngineArgs(**{**given, **options}), EMBEDDED_MODEL)[0]


def request(arrival_s: float, prompt: int = 20, output: int = 10, **given: Any) -> TraceRequest:
    """One of a trace."""
    return TraceRequest(arrival_s=arrival_s, prompt_tokens=prompt, output_tokens=output, **given)
