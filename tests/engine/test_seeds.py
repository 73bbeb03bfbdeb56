"""Seeds of requests that bring none: the same offline, run after run; new ones in a server, in every front."""

from __future__ import annotations

import itertools

import pytest

from quire import LLM, EngineArgs
from quire.config.engine import ModelConfig
from quire.engine.core_startup import create_config
from quire.engine.front.seeds import new_seeds, same_seeds, seeds_of_front
from quire.engine.front.startup import load_front

NUM = 100


def model(**options: int) -> ModelConfig:
    return create_config(EngineArgs(**options)).model_config


def taken(seeds: object) -> list[int]:
    return list(itertools.islice(seeds, NUM))  # type: ignore[call-overload]


def test_offline_seeds_are_the_same_in_every_run_and_follow_the_engines() -> None:
    assert taken(same_seeds(model())) == taken(same_seeds(model())) == taken(same_seeds(model(seed=0)))
    assert not set(taken(same_seeds(model(seed=1)))) & set(taken(same_seeds(model())))
    assert next(same_seeds(model())) == 1576848291327681832  # as it always was


def test_offline_engines_draw_the_same_seeds(tiny_llm: LLM) -> None:
    processor = load_front(create_config(EngineArgs())).input_processor
    seeds = [processor.process(str(i), "a").core.seed for i in range(NUM)]
    assert seeds == taken(same_seeds(tiny_llm.engine.config.model_config))


def test_no_two_fronts_of_a_server_share_a_seed() -> None:
    fronts = [taken(seeds_of_front(front)(model())) for front in (0, 1, 2, 0)]  # and a server that is started again
    assert len(set(itertools.chain(*fronts))) == 4 * NUM
    assert all(0 <= seed < 2**63 for front in fronts for seed in front)


@pytest.mark.parametrize("seed", [0, 7])
def test_a_seed_that_is_given_is_honoured_and_yet_each_front_has_its_own(seed: int) -> None:
    given = model(seed=seed)
    assert taken(new_seeds(given)) == taken(same_seeds(given))
    fronts = [taken(seeds_of_front(front)(given)) for front in range(4)]
    assert len(set(itertools.chain(*fronts))) == 4 * NUM
    assert fronts[2] == taken(seeds_of_front(2)(given))
