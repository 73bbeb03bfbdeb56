"""`quire plan MODEL [flags of serve]`: the memory a model will take and what fits, from its config.json alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from quire.cli.commands.serve import add_serve_flags, options_of
from quire.cli.commands.show import config_directory
from quire.config.arch import ModelArch
from quire.config.engine import QuireConfig
from quire.config.flags.args import EMBEDDED, EngineArgs
from quire.config.flags.knobs import whole_number
from quire.config.memory.fit import (
    Change,
    Machine,
    Wish,
    changes,
    fits,
    max_concurrency,
    max_context,
    wished,
)
from quire.config.memory.plan import MemoryPlan, gib
from quire.config.memory.weights.shapes import num_active_parameters, num_parameters
from quire.errors import ConfigError, counted
from quire.messages.kv import TYPICAL_CONTEXT, KVLayout

DOES_NOT_FIT = 1
"""Exit status."""
PURPOSES = {
    "weights": "parameters as the kernels read them",
    "kv_cache": "{kept}",
    "kv_ram": "{ram} pages that left the KV cache",
    "workspace": "activations of a step of {step} tokens",
    "logits": "of {seqs} sequences",
    "logprobs": "candidates of every position of a step",
    "graphs": "{graphs} captured steps, of up to {captured} sequences",
    "requests": "{seqs} requests at their bounds and those that wait, and what is known of the KV cache",
    "grammars": "of structured outputs: vocabulary, checker, compiled grammars",
    "loading": "pages of files while weights are read",
    "process": "the interpreter, torch and its libraries",
}
"""What each part of a plan is for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this subcommand: those of `serve`, and what is wished."""
    group = parser.add_argument_group("wish", "What shall fit. When left out: one sequence as long as memory allows.")
    group.add_argument("--sequences", type=whole_number, metavar="N", help="sequences that shall run at once")
    group.add_argument(
        "--sequence-len",
        type=whole_number,
        metavar="TOKENS",
        help="prompt and output of each; as --max-model-len, or as the model says",
    )
    group.add_argument("--memory", type=whole_number, metavar="BYTES", help="plan for a machine with so much, all free")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    add_serve_flags(parser)
    parser.set_defaults(run=partial(run, parser=parser))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What there is to say."""

    args: EngineArgs
    wish: Wish
    config: QuireConfig
    """What a start decides; where the wish does not fit, what it takes if memory had no end."""
    fits: bool
    allowed: int
    max_context: int
    """Tokens of the longest sequence that fits here; 0 where nothing does."""
    max_concurrency: int
    """Sequences of the wished length that run at once here."""
    changes: Sequence[Change] = ()
    adds_seats: bool = False
    """Whether the wish takes more seats than the options say."""

    @property
    def plan(self) -> MemoryPlan:
        """Bytes by purpose."""
        return MemoryPlan(**self.config.memory_plan)

    @property
    def missing(self) -> int:
        """Bytes that the wish takes beyond what is allowed."""
        return 0 if self.fits else max(0, self.plan.held - self.allowed)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the plan; the status is 1 where the wish does not fit. Fetches config.json at most.

    Raises: ConfigError.
    """
    answer = answer_to(args, options_of(args, parser).args)
    if args.json:
        print(json.dumps(as_json(answer), indent=2))
    else:
        _print(answer)
    return 0 if answer.fits else DOES_NOT_FIT


def answer_to(namespace: argparse.Namespace, args: EngineArgs) -> Answer:
    """Plan with the options, and look for changes where the wish does not fit.

    Raises: ConfigError for what no memory makes possible.
    """
    machine = _machine(args, namespace.memory)
    wish = _wish(namespace, args, machine)
    given, args = args, wished(machine, args, wish)
    adds_seats = args.max_num_seqs != given.max_num_seqs
    try:
        config = machine.resolve(args)
    except ConfigError:
        return _refused(machine, args, wish, adds_seats)
    if not fits(config, wish):
        return _refused(machine, args, wish, adds_seats)
    return Answer(
        adds_seats=adds_seats,
        args=args,
        wish=wish,
        config=config,
        fits=True,
        allowed=machine.allowed(args),
        max_context=max_context(machine, args),
        max_concurrency=max_concurrency(config, wish.num_tokens),
    )


def _refused(machine: Machine, args: EngineArgs, wish: Wish, adds_seats: bool) -> Answer:
    config = machine.unlimited(args, wish)  # raises what is wrong beside memory
    try:
        here = machine.resolve(replace(args, max_model_len=None))
        context, concurrency = here.model_config.max_model_len, max_concurrency(here, wish.num_tokens)
    except ConfigError:
        context = concurrency = 0
    return Answer(
        adds_seats=adds_seats,
        args=args,
        wish=wish,
        config=config,
        fits=False,
        allowed=machine.allowed(args),
        max_context=context,
        max_concurrency=concurrency,
        changes=tuple(changes(machine, args, wish)),
    )


def _machine(args: EngineArgs, memory: int | None) -> Machine:
    """The model and this machine, or one with that much memory.

    Raises: ConfigError for a model that quire does not run.
    """
    from quire.engine.core_startup import read_arch
    from quire.platforms.current import current_capabilities

    here = current_capabilities(args.device)
    if memory is not None:
        if memory < 1:
            raise ConfigError(f"--memory must be at least 1 byte, got {memory}")
        here = replace(here, total_memory=memory, available_memory=memory)
    path = config_directory(args)
    return Machine(arch=read_arch(args, path), capabilities=here, path=path)


def _wish(namespace: argparse.Namespace, args: EngineArgs, machine: Machine) -> Wish:
    """What the flags ask for: a context or a number of sequences that is given is meant.

    Raises: ConfigError.
    """
    count, length = namespace.sequences, namespace.sequence_len
    for name, value, least in (("--sequences", count, 1), ("--sequence-len", length, 2)):
        if value is not None and value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
    if length is None:
        length = args.max_model_len or (_longest(machine, args) if count is None else machine.longest)
    return Wish(num_sequences=count or 1, num_tokens=length)


def _longest(machine: Machine, args: EngineArgs) -> int:
    """The context that a start chooses; the model's where none fits."""
    try:
        return max_context(machine, args)
    except ConfigError:
        return machine.longest


def as_json(answer: Answer) -> dict[str, Any]:
    """Every number of the answer."""
    config, plan = answer.config, answer.plan
    cache, machine = config.cache_config, config.device_config.capabilities
    return {
        "model": config.model_config.model,
        "parameters": num_parameters(config.model_config.arch),
        "active_parameters": num_active_parameters(config.model_config.arch),
        "fits": answer.fits,
        "total_bytes": plan.total,
        **{f"{name}_bytes": size for name, size in plan.as_dict().items()},
        "allowed_bytes": answer.allowed,
        "missing_bytes": answer.missing,
        "num_blocks": cache.num_blocks,
        "block_size": cache.block_size,
        "block_bytes": plan.kv_cache // cache.num_blocks,
        "kv_cache_padding": config.kv_layout.padding,
        "kv_cache_tokens": cache.num_tokens,
        "kv_cache_sequences": cache.num_sequences,
        "num_ram_slots": cache.num_ram_slots,
        "num_disk_slots": cache.num_disk_slots,
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_context": answer.max_context,
        "max_concurrency": answer.max_concurrency,
        "wish": asdict(answer.wish),
        "changes": [{"flags": change.flags, "cost": change.cost, **change.options} for change in answer.changes],
        "choices": {name: f"{choice.value} ({choice.reason})" for name, choice in config.choices.items()},
        "machine": machine.name,
    }


def _print(answer: Answer) -> None:
    from rich.console import Console
    from rich.table import Table

    config, plan = answer.config, answer.plan
    table = Table(title=f"Memory of {config.model_config.model or EMBEDDED}", title_justify="left")
    table.add_column("part")
    table.add_column("size", justify="right")
    table.add_column("for")
    for name, size in plan.as_dict().items():
        if size:
            table.add_row(name.replace("_", " "), gib(size), _purpose(name, config))
    table.add_section()
    table.add_row("total", gib(plan.total), f"{gib(answer.allowed)} may be used")
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    for line in [*_experts(config.model_config.arch), *_pages(config.kv_layout), *_lines(answer)]:
        console.print(line, markup=False)


def _seats(answer: Answer) -> str:
    """The flag that the wish takes where a start would have fewer seats without it, for people."""
    return f" with --max-num-seqs {answer.args.max_num_seqs}" if answer.adds_seats else ""


def _purpose(name: str, config: QuireConfig) -> str:
    step, cache, sizes = config.scheduler_config, config.cache_config, config.compilation_config.graph_sizes
    kind = f"{cache.dtype}, {config.choices['kv_cache_dtype'].reason}"
    return PURPOSES[name].format(
        kept=cache.capacity if cache.num_sequences else f"keys and values of {cache.capacity} ({kind})",
        ram=f"{cache.num_ram_slots:,}",
        step=f"{step.max_num_batched_tokens:,}",
        seqs=step.max_num_seqs,
        graphs=len(sizes),
        captured=max(sizes, default=0),
    )


def _experts(arch: ModelArch) -> list[str]:
    """What a mixture of experts holds, and what of it a token meets."""
    total, active = num_parameters(arch), num_active_parameters(arch)
    if active == total:
        return []
    return [f"{total / 1e9:.3g} billion parameters, all held; {active / 1e9:.3g} billion active for each token"]


def _pages(layout: KVLayout) -> list[str]:
    """How layers whose blocks differ share pages."""
    if not layout.is_mixed:
        return []
    sizes = sorted({size for group in layout.groups for size in group.page_sizes})
    return [
        f"blocks of {counted(layout.block_size, 'token')} take {' or '.join(f'{size:,}' for size in sizes)} bytes of a "
        f"layer; {len(layout.groups)} groups of layers share pages of {layout.block_bytes:,} bytes, of which a "
        f"sequence of {TYPICAL_CONTEXT:,} tokens leaves {layout.padding:.1%} unused"
    ]


def _lines(answer: Answer) -> list[str]:
    """What the table does not say, for people."""
    wish = f"{answer.wish.num_sequences} x {answer.wish.num_tokens:,} tokens"
    count = counted(answer.max_concurrency, "such sequence")
    here = f"longest context here {answer.max_context:,} tokens; {count} at once"
    if not answer.max_context:
        here = "with these options nothing fits here"
    if answer.fits:
        return [f"{wish}: fits{_seats(answer)}", here]
    lack = f"{gib(answer.missing)} are missing" if answer.missing else "the KV cache is too small"
    lines = [f"{wish}: does not fit{_seats(answer)}, {lack}", here]
    if not answer.changes:
        lines.append(f"no option makes it fit: {gib(answer.missing)} more memory would")
    for index, change in enumerate(answer.changes):
        lines.append(f"{'use' if index == 0 else ' or'} {change.flags} ({change.cost})")
    if answer.changes and answer.missing:
        lines.append(f" or {gib(answer.missing)} more memory")
    return lines
