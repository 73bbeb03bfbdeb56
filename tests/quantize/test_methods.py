"""GPTQ against the plain form of its own formula, AWQ's searches, and scales that move without changing a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.quantize.awq import best_scales, best_shrink
from quire.quantize.folding import Folder
from quire.quantize.formats import target_format
from quire.quantize.gptq import DAMPING, gptq
from quire.quantize.grid import Grid, grid_of
from quire.quantize.smoothing import smoothing_scales
from quire.quantize.statistics import InputRecorder, InputStatistics
from tests.checkpoints import random_model

TARGET = target_format("int4", "32", symmetric=True)


def correlated_inputs(size: int = 96, tokens: int = 600) -> Tensor:
    draw = torch.Generator().manual_seed(7)
    mixed = torch.randn(tokens, size, generator=draw) @ torch.randn(size, size, generator=draw)
    return mixed * torch.rand(size, generator=draw).pow(3).mul(4).add(0.05)


def statistics_of(inputs: Tensor) -> InputStatistics:
    statistics = InputStatistics.empty(inputs.shape[1])
    for part in inputs.split(250):
        statistics.add(part)
    return statistics


def random_weight(rows: int = 20, size: int = 96) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(9))


def output_error(inputs: Tensor, weight: Tensor, numbers: Tensor) -> float:
    return float((inputs @ (numbers - weight).T).square().sum())


def by_the_formula(weight: Tensor, gram: Tensor, grid: Grid) -> Tensor:
    """The paper's equation 2, column by column, the inverse of what is left computed anew each time."""
    hessian = gram.double() + DAMPING * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    order = torch.argsort(gram.diagonal(), descending=True, stable=True).tolist()
    rest, values = weight.double().clone(), torch.empty_like(weight)
    for done, column in enumerate(order):
        left = order[done:]
        inverse = torch.linalg.inv(hessian[left][:, left])
        values[:, column], rounded = grid.column(column).round(rest[:, column].float())
        error = (rest[:, column] - rounded) / inverse[0, 0]
        rest[:, left] -= error[:, None] * inverse[0]
    return values


def test_gptq_is_its_formula() -> None:
    statistics = statistics_of(correlated_inputs())
    weight = random_weight()
    grid = grid_of(weight, TARGET, torch.float32)
    values = gptq(weight, statistics.gram, grid)
    expected = by_the_formula(weight, statistics.gram, grid)
    assert (values != expected).float().mean() < 0.002, "float32 decides some ties otherwise"


def test_gptq_without_correlations_rounds_to_the_nearest() -> None:
    weight = random_weight()
    grid = grid_of(weight, TARGET, torch.float32)
    assert torch.equal(gptq(weight, torch.eye(96) * 3, grid), grid.round(weight))


def test_gptq_loses_less_than_rounding() -> None:
    inputs, weight = correlated_inputs(), random_weight()
    grid = grid_of(weight, TARGET, torch.float32)
    rounded = grid.dequantize(grid.round(weight))
    corrected = grid.dequantize(gptq(weight, statistics_of(inputs).gram, grid))
    assert output_error(inputs, weight, corrected) < 0.5 * output_error(inputs, weight, rounded)


def test_gptq_keeps_weights_of_inputs_that_never_came() -> None:
    inputs = correlated_inputs()
    inputs[:, 5] = 0
    weight = random_weight()
    grid = grid_of(weight, TARGET, torch.float32)
    assert torch.equal(gptq(weight, statistics_of(inputs).gram, grid)[:, 5], grid.round(weight)[:, 5])


def test_gptq_refuses_numbers_that_are_not_finite() -> None:
    gram = statistics_of(correlated_inputs()).gram
    gram[3, 3] = torch.inf
    weight = random_weight()
    with pytest.raises(ConfigError, match="no usable Hessian"):
        gptq(weight, gram, grid_of(weight, TARGET, torch.float32))


def test_awq_scales_lose_less() -> None:
    inputs, weight = correlated_inputs(), random_weight()
    statistics = statistics_of(inputs)
    scales = best_scales([weight[:8], weight[8:]], statistics, TARGET, torch.float32)
    assert scales is not None
    grid, scaled = grid_of(weight, TARGET, torch.float32), grid_of(weight * scales, TARGET, torch.float32)
    plainly = output_error(inputs, weight, grid.dequantize(grid.round(weight)))
    assert output_error(inputs, weight, scaled.dequantize(scaled.round(weight * scales)) / scales) < 0.9 * plainly


def test_awq_clips_where_a_group_has_an_outlier_that_hardly_matters() -> None:
    inputs, weight = correlated_inputs(), random_weight()
    inputs[:, 40] *= 1e-3
    weight[:, 40] = 6
    gram = statistics_of(inputs).gram
    shrink = best_shrink(weight, gram, TARGET, torch.float32)
    assert (shrink[:, 1] < 1).all(), "the group of column 40"
    clipped, whole = (grid_of(weight, TARGET, torch.float32, part) for part in (shrink, 1.0))
    errors = [output_error(inputs, weight, grid.dequantize(grid.round(weight))) for grid in (clipped, whole)]
    assert errors[0] < errors[1]


def test_smoothing_makes_inputs_and_weights_alike() -> None:
    inputs, weight = correlated_inputs(), random_weight()
    inputs[:, 11] *= 100
    statistics = statistics_of(inputs)
    scales = smoothing_scales([weight], statistics, 0.5)
    spread = lambda of: float(of.max() / of.median())  # noqa: E731
    assert spread(statistics.divided_by(scales).abs_max) < 0.2 * spread(statistics.abs_max)
    torch.testing.assert_close(
        statistics.divided_by(scales).gram, statistics_of(inputs / scales).gram, rtol=1e-3, atol=1e-3
    )


class Layer:
    """A decoder layer of a random model, its inputs, and the groups of linear layers that were found in it."""

    def __init__(self, family: str, **overrides: Any) -> None:
        model = random_model(family, **overrides)
        self.layer = model.model.layers[1]
        arguments: dict[str, Any] = {}
        hook = self.layer.register_forward_pre_hook(
            lambda _, args, kwargs: arguments.update(x=args[0], **kwargs), with_kwargs=True
        )
        with torch.no_grad():
            model(torch.arange(3, 40)[None], use_cache=False)
        hook.remove()
        self.hidden = arguments.pop("x")
        self.arguments = arguments
        recorder = InputRecorder(self.layer)
        with recorder.recording():
            self.run()
            recorder.end_run()
            self.run()
        self.groups = recorder.groups
        self.folder = Folder(self.layer, self.run, torch.float32)

    def run(self) -> Tensor:
        with torch.no_grad():
            output = self.layer(self.hidden, **self.arguments)
        return output[0] if isinstance(output, tuple) else output


def scales_for(group: Any) -> Tensor:
    size = group.statistics.abs_sum.shape[0]
    return torch.rand(size, generator=torch.Generator().manual_seed(size)) * 3 + 0.2


def test_who_reads_the_same_is_found() -> None:
    layer = Layer("llama")
    found = [(group.producer, [name.rpartition(".")[2] for name in group.modules]) for group in layer.groups]
    assert found == [
        ("input_layernorm", ["q_proj", "k_proj", "v_proj"]),
        (None, ["o_proj"]),
        ("post_attention_layernorm", ["gate_proj", "up_proj"]),
        (None, ["down_proj"]),
    ]
    assert [group.statistics.num_tokens for group in layer.groups] == [74] * 4


@pytest.mark.parametrize(
    ("family", "overrides", "folds"),
    [
        (
            "llama",
            {},
            [True, False, True, True],
        ),  # several heads read a value: o_proj's inputs are not v_proj's outputs
        ("llama", {"num_key_value_heads": 4}, [True, True, True, True]),
        ("qwen2", {}, [True, False, True, True]),
        ("gemma2", {}, [True, False, True, True]),  # norms multiply by 1 + weight
        ("olmo2", {}, [False, False, False, True]),  # no norms before the layers
        ("phi", {}, [True]),  # a norm with a bias that attention and MLP read; a plain MLP
    ],
)
def test_scales_move_without_changing_what_a_layer_computes(
    family: str, overrides: dict[str, Any], folds: list[bool]
) -> None:
    layer = Layer(family, **overrides)
    expected = layer.run()
    folded = [layer.folder.fold(group, scales_for(group)) for group in layer.groups]
    assert folded[: len(folds)] == folds
    torch.testing.assert_close(layer.run(), expected, rtol=1e-3, atol=1e-3)
    recorder = InputRecorder(layer.layer)
    with recorder.recording():
        layer.run()
    for group, again in zip(layer.groups, recorder.groups, strict=True):
        torch.testing.assert_close(group.statistics.gram, again.statistics.gram * 2, rtol=1e-2, atol=1e-2)


def test_a_move_that_would_change_the_layer_is_undone() -> None:
    layer = Layer("llama")
    group = layer.groups[0]
    group.modules.remove("self_attn.v_proj")  # which then would read inputs of another size
    before = {name: value.clone() for name, value in layer.layer.state_dict().items()}
    assert not layer.folder.fold(group, scales_for(group))
    assert not layer.folder.changed
    for name, value in layer.layer.state_dict().items():
        assert torch.equal(value, before[name]), name
