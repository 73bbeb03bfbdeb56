"""A mixture of experts in place of an MLP, read expert by expert as checkpoints spell it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from quire.config.arch import ModelArch
from quire.config.family_spec import MlpSpec
from quire.config.layers.experts import ExpertsSpec, Scores
from quire.errors import ConfigError
from quire.layers.activation import activation_of, ungated_activation_of
from quire.layers.context import LayerContext
from quire.layers.linear import GatedLinear, Linear
from quire.layers.quantization.schemes import DENSE, plain
from quire.layers.weights import Rows, ShardSpec, split_rows
from quire.ops.contracts.operands import ExpertWeights, LinearWeight, MixtureWeights

BLOCKS = ("mlp", "block_sparse_moe")
"""What transformers 5 calls every block, where it does not keep to the names of older checkpoints; and a block that
stands beside a shared expert."""
ROUTER_BLOCK = "moe"
"""What may stand beside the experts and have the choice's bias alone."""
ROUTERS = (
    *("gate", "router.layer", "router", "router.gate", "gate.wg", "router.proj", "router.classifier"),
    "gate.router_mlp.out_proj",
)
ROUTER_SCALE = "router.scale"
EXPERT_SCALES = "router.per_expert_scale"
SHARED = ("shared_expert", "shared_experts", "shared_mlp")
SHARED_GATE = "shared_expert_gate"
TOKEN_TABLE = "gate.tid2eid"
CHOICE_BIASES: Mapping[str, int] = MappingProxyType(
    {
        "gate.e_score_correction_bias": 1,
        "experts.e_score_correction_bias": 1,
        "gate.expert_bias": 1,
        "e_score_correction_bias": 1,
        "expert_bias": 1,
        "router.expert_bias": 1,
        "router.e_score_correction_bias": 1,
        "moe_statics.e_score_correction_bias": 2,
        "gate.moe_statics.e_score_correction_bias": 2,
        "gate.bias": 1,
        "gate.balancing_biases": 1,
    }
)
"""Name -> dimensions, the last of which has the experts."""


@dataclass(frozen=True, slots=True)
class _Single:
    """A tensor for each projection of each expert: names with the expert's index for #."""

    gate: str | None
    """None for experts without a gate."""
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class _Stacked:
    """All experts in one tensor: [X, 2F, M] of gate and up, [X, M, F]; as `WeightNames` says, transposed or mixed."""

    gate_up: str
    down: str


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of all experts in one tensor, [X * F, M] each, the last transposed."""

    gate: str
    up: str
    down: str


_Spelling = _Single | _Stacked | _Rows
SPELLINGS: tuple[_Spelling, ...] = (
    _Single("experts.#.gate_proj.weight", "experts.#.up_proj.weight", "experts.#.down_proj.weight"),
    _Single("experts.#.w1.weight", "experts.#.w3.weight", "experts.#.w2.weight"),
    _Stacked("experts.gate_up_proj", "experts.down_proj"),
    _Stacked("input_linear.weight", "output_linear.weight"),
    _Stacked("experts.fc1.weight", "experts.fc2.weight"),
    _Rows("experts.mlp.w1", "experts.mlp.v1", "experts.mlp.w2"),
)
"""The one that the checkpoint has is read; the first is asked for where it has none."""
UNGATED: tuple[_Spelling, ...] = (
    _Single(None, "experts.#.up_proj.weight", "experts.#.down_proj.weight"),
    _Stacked("experts.up_proj", "experts.down_proj"),
)
"""Of experts without a gate."""


class MixtureOfExperts:
    """Each token passes the experts that the router chooses for it, and the shared one where there is one."""

    def __init__(self, arch: ModelArch, mlp: MlpSpec, ctx: LayerContext) -> None:
        spec = mlp.experts
        assert spec is not None
        if ctx.parallel.tp.size > 1:
            raise ConfigError(f"{arch.source}: experts cannot be split between processes yet. Use one process.")
        if spec.num_identities and ctx.ops.name == "triton":
            raise ConfigError(
                f"{arch.source}: experts that give what they read (zero_expert_num) are what the triton ops do not "
                "have yet; give device='cpu'"
            )
        if spec.num_skips and ctx.ops.name == "triton":
            raise ConfigError(
                f"{arch.source}: tokens without an expert are what the triton ops do not have yet; give device='cpu'"
            )
        if (spec.has_token_table or spec.routing.scores is Scores.SQRT_SOFTPLUS) and ctx.ops.name == "triton":
            raise ConfigError(
                f"{arch.source}: the triton ops do not have experts chosen by token id, or scores of sqrt(softplus), "
                "yet; give device='cpu'"
            )
        groups = spec.routing.groups
        if groups is not None and math.isfinite(groups.left_out) and ctx.ops.name == "triton":
            raise ConfigError(
                f"{arch.source}: the triton ops do not have groups of experts (n_group) whose others have a score yet; "
                "give device='cpu'"
            )
        blocks = [ctx, *map(ctx.beside, BLOCKS)]
        ctx = next((block for block in blocks if _router_name(block)), ctx)
        known = SPELLINGS if spec.is_gated else UNGATED
        spelling = next((s for s in known if any(map(ctx.has, _tensors(s)))), known[0])
        self.ops = ctx.ops
        self.routing = spec.routing
        gated = activation_of if spec.is_gated else ungated_activation_of
        self.activation = spec.gate or gated(arch)
        with ctx.ops.weights_together():
            experts = tuple(_expert(arch, spec, ctx, spelling, index) for index in range(spec.num_experts))
        if spec.has_common_bias:
            bias = ctx.tensor("bias", (arch.hidden_size,), dtype=torch.float32)
            experts = tuple(replace(expert, down_bias=bias) for expert in experts)
        self.beside = _SharedMlp(arch, spec, ctx) if spec.has_mlp_beside else None
        self.table = _token_table(arch, spec, ctx) if spec.has_token_table else None
        self.weights = MixtureWeights(
            router=_router(arch, spec, ctx),
            router_bias=_router_bias(spec, ctx) if spec.has_router_bias else None,
            experts=experts,
            choice_bias=_choice_bias(spec, ctx) if spec.has_choice_bias else None,
            scales=ctx.tensor(EXPERT_SCALES, (spec.num_experts,), dtype=torch.float32)
            if spec.has_router_scale
            else None,
            shared=_shared(arch, spec, ctx) if spec.shared_size and not spec.has_mlp_beside else None,
            num_identities=spec.num_identities,
            num_skips=spec.num_skips,
        )

    def __call__(
        self,
        hidden: Tensor,
        *,
        residual: Tensor | None = None,
        routed: Tensor | None = None,
        token_ids: Tensor | None = None,
    ) -> Tensor:
        """`routed` is what the router reads, where that is something else, of any width; `token_ids` [T], where a table
        names the experts. Shapes: the others [T, E] -> [T, E].
        """
        given = None
        if self.table is not None:
            assert token_ids is not None
            given = self.ops.embedding(token_ids, self.table)
        if self.beside is not None:
            residual = self.beside(hidden, residual)
        return self.ops.mixture_of_experts(
            hidden,
            self.weights,
            self.routing,
            activation=self.activation,
            residual=residual,
            routed=routed,
            given=given,
        )


def _tensors(spelling: _Spelling) -> list[str]:
    """The tensors that tell the spelling, one of which a damaged checkpoint may lack."""
    if isinstance(spelling, _Stacked):
        return [spelling.gate_up, spelling.down]
    return [name.replace("#", "0") for name in (spelling.gate, spelling.up, spelling.down) if name is not None]


def _router_name(ctx: LayerContext) -> str | None:
    """The router's in a block; None where the checkpoint has none there."""
    return next((name for name in ROUTERS if ctx.has(f"{name}.weight")), None)


def _router(arch: ModelArch, spec: ExpertsSpec, ctx: LayerContext) -> LinearWeight:
    """In float32 whatever the model's dtype: a rounding error that chooses another expert is no small one."""
    size = arch.hidden_size if spec.router is None else spec.router.rank
    names, shapes = [f"{_router_name(ctx) or ROUTERS[0]}.weight"], [(spec.num_candidates, size)]
    if spec.has_shared_gate:
        names.append(f"{SHARED_GATE}.weight")
        shapes.append((1, size))
    exact = replace(ctx, scheme=DENSE, dtype=torch.float32)
    rows = [ctx.read(*named) for named in zip(names, shapes, strict=True)]
    return exact.packed(names, _scaled_router(arch, ctx, rows) if spec.has_router_scale else rows)


def _scaled_router(arch: ModelArch, ctx: LayerContext, rows: list[Rows]) -> list[Rows]:
    """The weight carries what multiplies its input."""
    scale = ctx.read_plain(ROUTER_SCALE, (arch.hidden_size,))
    if scale.is_meta:
        return rows
    factors = scale.float() * arch.hidden_size**-0.5
    scaled: list[Rows] = [plain(part).float() * factors for part in rows]
    ctx.release([ROUTER_SCALE])
    return scaled


def _router_bias(spec: ExpertsSpec, ctx: LayerContext) -> Tensor:
    """Shapes: -> [X] float32."""
    name = f"{_router_name(ctx) or ROUTERS[0]}.bias"
    return ctx.tensor(name, (spec.num_experts,), dtype=torch.float32)


def _expert(arch: ModelArch, spec: ExpertsSpec, ctx: LayerContext, spelling: _Spelling, index: int) -> ExpertWeights:
    size, inner, count = arch.hidden_size, spec.size, spec.num_experts
    if isinstance(spelling, _Stacked):
        return _stacked_expert(arch, spec, ctx, spelling, ShardSpec(part=index, parts=count))
    first, down = [name for name in (spelling.gate, spelling.up) if name], spelling.down.replace("#", str(index))
    first = [name.replace("#", str(index)) for name in first]
    if isinstance(spelling, _Single):
        last = ctx.read(down, (size, inner))
        gate_up = [ctx.read(name, (inner, size)) for name in first]
    else:
        shape, one = (count * inner, size), ShardSpec(part=index, parts=count)
        last = ctx.read_plain(down, shape, one).t()
        gate_up = [ctx.read(name, shape, one) for name in first]
    return ExpertWeights(
        gate_up=_together(ctx, first, gate_up),
        down=ctx.packed([down], [last]),
        gate_up_bias=_single_bias(ctx, first, inner) if spec.has_bias else None,
        down_bias=_single_bias(ctx, [down], size) if spec.has_bias else None,
    )


def _together(ctx: LayerContext, names: list[str], parts: Sequence[Rows]) -> LinearWeight:
    """The products that an expert reads its input with, in one format: as numbers where they are stored differently."""
    weight = ctx.packed(names, parts)
    return weight if weight.format != "mixed" else replace(ctx, scheme=DENSE).packed(names, parts)


def _single_bias(ctx: LayerContext, weights: list[str], size: int) -> Tensor:
    """Those of products that have a tensor each, one behind the other. Shapes: -> [len(weights) * size] float32."""
    names = [f"{weight.removesuffix('weight')}bias" for weight in weights]
    parts = [ctx.tensor(name, (size,), dtype=torch.float32) for name in names]
    return parts[0] if parts[0].is_meta else torch.cat(parts)


def _stacked_expert(
    arch: ModelArch, spec: ExpertsSpec, ctx: LayerContext, spelling: _Stacked, one: ShardSpec
) -> ExpertWeights:
    """With biases named after the weights, if the experts have any. Identities have first products there, too."""
    names, size, inner = arch.family.names, arch.hidden_size, spec.size
    wide, narrow = ((1 + spec.is_gated) * inner, size), (size, inner)
    first = replace(one, parts=spec.num_experts + spec.num_identities)
    both = _of_stack(ctx, spelling.gate_up, wide, first, transposed=names.experts_transposed)
    last = _of_stack(ctx, spelling.down, narrow, one, transposed=names.experts_transposed)
    halves = (both[::2], both[1::2]) if names.experts_mixed else split_rows(both, [inner] * (1 + spec.is_gated))
    return ExpertWeights(
        gate_up=_together(ctx, [spelling.gate_up], halves),
        down=ctx.packed([spelling.down], [last]),
        gate_up_bias=_stacked_bias(ctx, spelling.gate_up, wide[0], one, names.experts_mixed) if spec.has_bias else None,
        down_bias=_stacked_bias(ctx, spelling.down, size, one) if spec.has_bias else None,
    )


def _of_stack(ctx: LayerContext, name: str, shape: tuple[int, int], one: ShardSpec, *, transposed: bool) -> Rows:
    """One expert's rows. Those that are quantised are never transposed."""
    if transposed and not ctx.is_quantized(name):
        return ctx.read_plain(name, (one.parts, *shape[::-1]), one).view(*shape[::-1]).t()
    rows = ctx.read(name, (one.parts, *shape), one)
    return rows.view(*shape) if isinstance(rows, Tensor) else rows


def _stacked_bias(ctx: LayerContext, weight: str, size: int, one: ShardSpec, is_mixed: bool = False) -> Tensor:
    """That of one expert. Shapes: -> [size] float32."""
    stored = ctx.read_plain(f"{weight}_bias", (one.parts, size), one)
    if stored.is_meta:
        return stored
    bias = stored.view(size).to(ctx.ops.device, torch.float32, copy=True)
    ctx.release([f"{weight}_bias"])
    return torch.cat([bias[::2], bias[1::2]]) if is_mixed else bias


def _token_table(arch: ModelArch, spec: ExpertsSpec, ctx: LayerContext) -> Tensor:
    """The experts of each token's number. Shapes: -> [V, num_chosen] int32.

    Raises: ConfigError for an expert that there is not.
    """
    table = ctx.integers(TOKEN_TABLE, (arch.vocab_size, spec.routing.num_chosen))
    if not table.is_meta and not 0 <= table.min().item() <= table.max().item() < spec.num_experts:
        raise ConfigError(
            f"{arch.source}: {ctx.name}.{TOKEN_TABLE} names experts from {table.min().item()} to {table.max().item()}, "
            f"but there are {spec.num_experts}, from 0 on. Download the checkpoint again."
        )
    return table


def _choice_bias(spec: ExpertsSpec, ctx: LayerContext) -> Tensor:
    """Shapes: -> [experts and identities] float32."""
    places = [(block, name) for block in (ctx, ctx.beside(ROUTER_BLOCK)) for name in CHOICE_BIASES]
    found = next(((block, name) for block, name in places if block.has(name)), None)
    if found is None and spec.may_lack_choice_bias:
        return torch.zeros(spec.num_candidates, device=ctx.ops.device)
    block, name = found or places[0]
    shape = (1,) * (CHOICE_BIASES[name] - 1) + (spec.num_candidates,)
    return block.tensor(name, shape, dtype=torch.float32).view(spec.num_candidates)


class _SharedMlp:
    """A shared expert by itself: down(activation(gate(x)) * up(x))."""

    def __init__(self, arch: ModelArch, spec: ExpertsSpec, ctx: LayerContext) -> None:
        size, inner, place, bias = arch.hidden_size, spec.shared_size, _shared_place(arch, ctx), spec.has_shared_bias
        self.gate_up = GatedLinear(place.child("gate_up_proj"), size, inner, activation=activation_of(arch), bias=bias)
        self.down = Linear(place.child(arch.family.names.down), inner, size, bias=bias)

    def __call__(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        """Shapes: hidden, residual [T, E] -> [T, E]."""
        return self.down(self.gate_up.gate(hidden), residual=residual)


def _shared_place(arch: ModelArch, ctx: LayerContext) -> LayerContext:
    """Where the checkpoint has the shared expert."""
    names = arch.family.names
    parts = [f"{name}.weight" for name in (*names.gate_up, names.up, names.down)]
    places = [ctx.child(name) for name in SHARED] + [ctx.beside(name) for name in SHARED]
    return next((place for place in places if any(map(place.has, parts))), places[0])


def _shared(arch: ModelArch, spec: ExpertsSpec, ctx: LayerContext) -> ExpertWeights:
    size, down_name, shared = spec.shared_size, arch.family.names.down, _shared_place(arch, ctx)
    has_bias = spec.has_shared_bias
    child = shared.child("gate_up_proj" if spec.is_gated else arch.family.names.up)
    sizes = [size] * (1 + spec.is_gated)
    gate_up = Linear(child, arch.hidden_size, *sizes, bias=has_bias)
    if gate_up.weight.format == "mixed":
        gate_up = Linear(replace(child, scheme=DENSE), arch.hidden_size, *sizes, bias=has_bias)
    down = Linear(shared.child(down_name), size, arch.hidden_size, bias=has_bias, shard_dim=1)
    return ExpertWeights(gate_up=gate_up.weight, down=down.weight, gate_up_bias=gate_up.bias, down_bias=down.bias)
