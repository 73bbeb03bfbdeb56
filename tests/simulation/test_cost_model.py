"""Cost models: what they count, what a file may hold, and how they are fitted and estimated."""

from __future__ import annotations

import json
import math
import random
from itertools import groupby
from pathlib import Path

import pytest

from quire.config.flags.args import EngineArgs
from quire.engine.core_startup import EMBEDDED_MODEL
from quire.errors import ConfigError
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.simulation.cost_model import SHORT_STEP_LOSS, SPREAD_RUN, Batches, CostModel, StepShape, read_cost, shape_of
from quire.simulation.fit import Step, fit_cost
from quire.simulation.hardware import GPUS, HERE, NAMES, cost_on, kv_bytes_per_token
from quire.simulation.machine import config_on, paced
from quire.simulation.measure import MeasuringExecutor
from quire.simulation.replica import Replica, hardware_of
from quire.worker.graph_cache import MAX_GRAPHS, MAX_KEPT_TOKENS
from tests.simulation.engines import COST


def test_a_plan_is_counted() -> None:
    plan = SchedulerOutputs(
        seq_ids=[1, 2, 3],
        num_computed_tokens=[10, 0, 100],
        num_scheduled_tokens=[1, 4, 3],
        num_draws=[1, 2, 0],
        num_batched_tokens=8,
    )
    pairs = (1 + 2 + 3 + 4) + (101 + 102 + 103)
    batches = Batches()
    counts = 8, 10 + 100 + 8, pairs, 3, 3
    assert shape_of(plan, batches) == StepShape(*counts, is_after_idle=True, is_recorded=True)
    assert shape_of(plan, batches) == StepShape(*counts)


def test_a_step_is_after_idling_when_there_was_nothing_to_do_before() -> None:
    batches, plan = Batches(), SchedulerOutputs(seq_ids=[1], num_computed_tokens=[4], num_scheduled_tokens=[1])
    found = [shape_of(plan, batches) for _ in range(2)]
    batches.idle()
    found += [shape_of(plan, batches) for _ in range(2)]
    assert [shape.is_after_idle for shape in found] == [True, False, True, False]
    assert [shape.num_alike for shape in found] == [1, 2, 1, 2], "caches are others' after a pause"


def test_steps_are_alike_until_their_sequences_are_others_or_a_prompt_comes() -> None:
    batches = Batches()

    def num_alike(*seq_ids: int, prompt: int = 1) -> int:
        counts = [prompt, *[1] * (len(seq_ids) - 1)]
        columns = {"num_computed_tokens": [5] * len(seq_ids), "num_draws": [1] * len(seq_ids)}
        plan = SchedulerOutputs(
            seq_ids=list(seq_ids), num_scheduled_tokens=counts, num_batched_tokens=sum(counts), **columns
        )
        return shape_of(plan, batches).num_alike

    assert [num_alike(1, 2), num_alike(1, 2), num_alike(1), num_alike(1), num_alike(1)] == [1, 2, 1, 2, 3]
    assert [num_alike(1, prompt=4), num_alike(1), num_alike(1), num_alike(2, 1)] == [0, 1, 2, 1]
    batches.repeat(5)
    assert num_alike(2, 1) == 6, "the first of the five was asked for"


def test_a_step_is_recorded_when_the_worker_has_no_graph_of_its_size() -> None:
    batches = Batches()

    def is_recorded(*counts: int) -> bool:
        """A step of sequences with so many new tokens; one with more than one is a prompt whose rest is to come."""
        plan = SchedulerOutputs(
            seq_ids=list(range(len(counts))),
            num_computed_tokens=[7] * len(counts),
            num_scheduled_tokens=list(counts),
            num_draws=[int(count == 1) for count in counts],
            num_batched_tokens=sum(counts),
        )
        return shape_of(plan, batches).is_recorded

    assert [is_recorded(1), is_recorded(1, 1), is_recorded(1), is_recorded(2)] == [True, True, False, True]
    assert [is_recorded(MAX_KEPT_TOKENS + 1) for _ in range(2)] == [True, True], "too large to keep"
    assert all(is_recorded(count) for count in range(3, 3 + MAX_GRAPHS))
    assert is_recorded(1), "more others came than are kept"


def test_a_step_costs_the_sum_of_its_terms() -> None:
    terms = {"fixed_s": 1, "token_s": 10, "context_token_s": 100, "pair_s": 1000, "sequence_s": 1e4, "draw_s": 1e5}
    cost = CostModel(**terms, prompt_s=1e6, new_batch_s=1e7, idle_s=1e8, record_s=1e9, free_tokens=2)
    assert cost.step_s(StepShape(5, 6, 7, 8, 9)) == 1 + 30 + 600 + 7000 + 80_000 + 900_000 + 1_000_000
    assert cost.step_s(StepShape(5, 6, 0, 8, 9)) == 1 + 30 + 600 + 80_000 + 900_000
    assert cost.step_s(StepShape(1, 0, 0, 0, 0)) == 1
    assert cost.step_s(StepShape(1, 0, 0, 0, 0, num_alike=1)) == 1 + 10_000_000
    assert cost.step_s(StepShape(1, 0, 0, 0, 0, num_alike=4)) == 1 + 2_500_000
    assert cost.step_s(StepShape(1, 0, 0, 0, 0, is_after_idle=True)) == 1 + 100_000_000
    assert cost.step_s(StepShape(1, 0, 0, 0, 0, is_recorded=True)) == 1 + 1_000_000_000


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    file.write_text(json.dumps({"cost": COST.as_dict(), "steps": 5}))
    assert read_cost(str(file)) == COST
    file.write_text(json.dumps({"fixed_s": 1, "token_s": 0}))
    assert read_cost(str(file)) == CostModel(fixed_s=1, token_s=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("[]", "must hold a JSON object"),
        ("{}", "fixed_s is missing"),
        ('{"cost": 3}', "cost must be an object"),
        ('{"fixed_s": 1}', "token_s is missing"),
        ('{"fixed_s": 1, "tokn_s": 1}', "unknown term 'tokn_s'; did you mean 'token_s'"),
        ('{"fixed_s": -1, "token_s": 1}', "fixed_s must be from 0"),
        ('{"fixed_s": NaN, "token_s": 1}', "fixed_s must be from 0"),
        ('{"fixed_s": 1e7, "token_s": 1}', "fixed_s must be from 0"),
        ('{"fixed_s": true, "token_s": 1}', "fixed_s must be a number"),
        ('{"fixed_s": "1", "token_s": 1}', "fixed_s must be a number"),
        ('{"fixed_s": 1, "token_s": 1, "source": 5}', "source must be a text"),
        ('{"fixed_s": 0, "token_s": 0}', "fixed_s must be above 0"),
        ('{"fixed_s": 1, "token_s": 1, "spread": 2}', "spread must be a list of at most 8192"),
        (json.dumps({"fixed_s": 1, "token_s": 1, "spread": [1] * 8193}), "spread must be a list of at most 8192"),
        ('{"fixed_s": 1, "token_s": 1, "spread": [1, 0]}', "values of spread must be above 0"),
        ('{"fixed_s": 1, "token_s": 1, "prompt_spread": [0]}', "values of prompt_spread must be above 0"),
        ('{"fixed_s": 1, "token_s": 1, "spread": [-1]}', "values of spread must be above 0"),
        ('{"fixed_s": 1, "token_s": 1, "spread": [Infinity]}', "values of spread must be above 0"),
        ('{"fixed_s": 1, "token_s": 1, "spread": [1e9]}', "values of spread must be above 0"),
        ('{"fixed_s": 1, "token_s": 1, "spread": [true]}', "values of spread must be above 0"),
        ('{"fixed_s": 1, "token_s": 1, "spread": ["1"]}', "values of spread must be above 0"),
    ],
)
def test_what_is_no_cost_model_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_cost(str(file))
    assert message in str(error.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        read_cost(str(tmp_path / "nothing"))


def test_steps_of_one_shape_differ_as_the_spread_says_and_alike_in_every_run() -> None:
    cost = CostModel(fixed_s=1.0, token_s=0.0, spread=(0.5, 1.0, 2.0, 4.0, 3.0))
    factors = [cost.factor(step, has_prompt=False) for step in range(20_000)]
    for value in cost.spread:
        assert factors.count(value) == pytest.approx(4000, rel=0.05)
    assert [cost.factor(step, has_prompt=False) for step in range(100)] == factors[:100]
    assert cost.factor(7, has_prompt=True) == 1.0


def test_slow_times_last_as_long_as_they_did() -> None:
    cost = CostModel(fixed_s=1.0, token_s=0.0, spread=(1.0,) * 900 + (3.0,) * 100)
    factors = [cost.factor(step, has_prompt=False) for step in range(100_000)]
    assert factors.count(3.0) == pytest.approx(10_000, rel=0.2)
    lengths = [len(list(same)) for value, same in groupby(factors) if value == 3.0]
    assert sum(lengths) / len(lengths) > SPREAD_RUN / 4
    assert len(set(lengths)) > 10, "runs begin at any place"


def shapes(count: int) -> list[StepShape]:
    """Steps of many kinds."""
    rng = random.Random(0)
    found = []
    for _ in range(count):
        num_seqs, chunk = rng.choice([1, 2, 8, 32, 64]), rng.choice([1, 1, 1, 16, 64, 300])
        before = rng.choice([0, 100, 1000, 5000])
        pairs = num_seqs * (chunk * before + chunk * (chunk + 1) // 2) if chunk > 1 else 0
        draws = rng.choice([0, num_seqs])
        num_alike = rng.randint(1, 5) if chunk == 1 else 0
        kinds = num_alike, rng.random() < 0.2, rng.random() < 0.5
        found.append(StepShape(num_seqs * chunk, num_seqs * (before + chunk), pairs, num_seqs, draws, *kinds))
    return found


def test_a_fit_finds_the_terms_that_made_the_steps() -> None:
    terms = {"fixed_s": 2e-3, "token_s": 5e-5, "context_token_s": 1e-7, "pair_s": 3e-9, "draw_s": 4e-5}
    terms |= {"prompt_s": 1e-3, "new_batch_s": 2e-3, "idle_s": 3e-3, "record_s": 2e-3}
    truth = CostModel(**terms, free_tokens=16)
    rng = random.Random(1)
    steps = [Step(shape, truth.step_s(shape) * rng.uniform(0.98, 1.02)) for shape in shapes(600)]
    steps[::50] = [Step(step.shape, 9 * step.seconds) for step in steps[::50]]
    fit = fit_cost(steps, "test")
    assert fit.cost.free_tokens == 16
    assert fit.num_outliers >= 12
    assert fit.median_error < 0.02
    for term in terms:
        assert getattr(fit.cost, term) == pytest.approx(getattr(truth, term), rel=0.1), term
    assert fit.cost.sequence_s < 1e-5
    expected = [9.0 if index % 50 == 0 else 1.0 for index in range(len(steps))]
    has_prompt = [step.shape.num_pairs > 0 for step in steps]
    for spread, of_prompts in ((fit.cost.spread, False), (fit.cost.prompt_spread, True)):
        values = [value for value, prompt in zip(expected, has_prompt, strict=True) if prompt == of_prompts]
        assert spread == pytest.approx(values, rel=0.1), "in their order, with those that are left out of the fit"


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 steps were measured"):
        fit_cost([Step(shape, 1.0) for shape in shapes(3)], "test")


class NullExecutor:
    """Does nothing."""

    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        return ModelRunnerOutput()

    def determine_num_available_blocks(self) -> int:
        return 7

    def close(self) -> None:
        """Nothing."""


def test_a_step_lasts_until_the_next_one_begins() -> None:
    moments = iter([0.0, 1.0, 3.0, 10.0, 14.0])
    executor = MeasuringExecutor(NullExecutor(), clock=lambda: next(moments))
    for count in (1, 2, 3):
        executor.execute(SchedulerOutputs(seq_ids=[0] * count))
    executor.pause()
    for count in (4, 5):
        executor.execute(SchedulerOutputs(seq_ids=[0] * count))
    assert [(step.shape.num_sequences, step.seconds) for step in executor.steps] == [(1, 1.0), (2, 2.0), (4, 4.0)]


def test_a_step_after_idling_begins_with_the_arrival_of_a_request() -> None:
    moments = iter([0.0, 1.0, 5.0, 5.5, 7.0])
    executor = MeasuringExecutor(NullExecutor(), clock=lambda: next(moments))
    plan = SchedulerOutputs(seq_ids=[0])
    executor.execute(plan)
    executor.execute(plan)
    executor.arrive()
    executor.execute(plan)
    executor.execute(plan)
    assert [(step.shape.is_after_idle, step.seconds) for step in executor.steps] == [(True, 1.0), (True, 2.0)]


@pytest.mark.parametrize("name", NAMES)
def test_a_device_gives_a_roofline(name: str) -> None:
    config, device = config_on(name, EngineArgs(), EMBEDDED_MODEL)
    cost = cost_on(device, config)
    assert cost.fixed_s > device.overhead_s > 0
    assert cost.token_s * cost.free_tokens == pytest.approx(cost.fixed_s - device.overhead_s)
    assert cost.context_token_s >= kv_bytes_per_token(config) / device.bandwidth
    if name in GPUS:
        assert config.device_config.capabilities.total_memory == device.memory


@pytest.mark.parametrize(("fixed_s", "free_tokens"), [(0.004, 0.0), (0.004, 3.0), (0.004, 35.0), (0.004, 40.0)])
def test_a_short_step_computes_its_tokens_nearly_as_fast_as_an_endless_one(fixed_s: float, free_tokens: float) -> None:
    cost = CostModel(fixed_s=fixed_s, token_s=1e-4, free_tokens=free_tokens)
    work = cost.short_step_work
    taken_s = cost.fixed_s + max(0.0, work - free_tokens) * cost.token_s
    assert taken_s == pytest.approx((1 + SHORT_STEP_LOSS) * work * cost.token_s)
    assert CostModel(fixed_s=1.0, token_s=0.0).short_step_work == math.inf


@pytest.mark.parametrize("name", NAMES)
def test_a_device_has_short_steps_of_its_own(name: str) -> None:
    config, device = config_on(name, EngineArgs(max_num_batched_tokens=700), EMBEDDED_MODEL)
    cost = cost_on(device, config)
    paces = paced(config, cost, name)
    if name == HERE:
        assert paces is config, "as the engine here has them"
    else:
        assert paces.scheduler_config.short_step_work == min(700, cost.short_step_work)
        replica = Replica(hardware_of(paces, cost))
        assert replica.scheduler.cost.short_step_work == paces.scheduler_config.short_step_work
