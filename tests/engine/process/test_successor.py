"""What a core must be to take over from another: the same weights, whatever happened to the files meanwhile."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quire import EngineArgs, SamplingParams
from quire.engine.async_llm_engine import AsyncLLMEngine, EngineState
from quire.engine.core_startup import EMBEDDED_MODEL
from quire.engine.process.restart_policy import RestartPolicy
from quire.engine.process.supervisor import CoreSupervisor
from quire.errors import ConfigError, EngineDeadError
from quire.sampling_params import RequestOutputKind
from tests.engine.process.cores import PATIENT, Launched, run, until_stage
from tests.engine.process.failing_start import MODULE, SCRIPT

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
PROMPT = "import os"
NUM_BEFORE = 3
"""Tokens that have come when the core is killed."""
Change = Callable[[Path], None]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the embedded model that may be changed."""
    return Path(shutil.copytree(EMBEDDED_MODEL, tmp_path / "model"))


def args_of(model: Path) -> EngineArgs:
    return EngineArgs(model=str(model), max_model_len=512, kv_cache_memory_bytes=64 << 20, use_tqdm_on_load=False)


def other_weights(model: Path) -> bytes:
    """The file with half of its numbers halved: another model, which runs as well."""
    data = bytearray((model / "model.safetensors").read_bytes())
    for place in range(len(data) // 2 | 1, len(data), 2):
        data[place] ^= 1 if data[place] & 0x7F > 2 else 0
    return bytes(data)


def replace_weights(model: Path) -> None:
    """As `cp` and `mv`, and as downloads do."""
    (model / "new").write_bytes(other_weights(model))
    (model / "new").replace(model / "model.safetensors")


def overwrite_weights_in_place(model: Path) -> None:
    data = other_weights(model)
    with (model / "model.safetensors").open("r+b") as file:
        file.write(data)


def flip_one_bit_through_a_map(model: Path) -> None:
    with (model / "model.safetensors").open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        content[len(content) // 3] ^= 1


def overwrite_and_backdate(model: Path) -> None:
    file = model / "model.safetensors"
    before = file.stat()
    overwrite_weights_in_place(model)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def touch_weights(model: Path) -> None:
    (model / "model.safetensors").touch()


def write_the_same_weights_again(model: Path) -> None:
    shutil.copyfile(model / "model.safetensors", model / "new")
    (model / "new").replace(model / "model.safetensors")


def replace_config(model: Path) -> None:
    """Running requests rely on what the first core decided; a core never reads the file again."""
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**raw, "rms_norm_eps": 0.5, "rope_theta": 77.0}))
    (model / "generation_config.json").write_text('{"eos_token_id": [5], "temperature": 0.1}')


def break_config(model: Path) -> None:
    (model / "config.json").write_text("{")


async def stream(core: Launched, tokens: list[int], in_the_middle: Callable[[], None] | None = None) -> list[int]:
    """The tokens of a stream, put into `tokens` as they come; once there are some, something happens."""
    async for output in core.engine.generate(PROMPT, LONG):
        tokens += output.outputs[0].token_ids
        if in_the_middle is not None and len(tokens) >= NUM_BEFORE:
            in_the_middle()
            in_the_middle = None
    return tokens


def then_kill(core: Launched, change: Change, model: Path) -> Callable[[], None]:
    def happen() -> None:
        change(model)
        core.kill()

    return happen


@pytest.mark.parametrize(
    "change", [replace_weights, overwrite_weights_in_place, overwrite_and_backdate, flip_one_bit_through_a_map]
)
def test_a_core_with_other_weights_does_not_take_over(model: Path, change: Change) -> None:
    async def main() -> None:
        core = Launched(CoreSupervisor(args_of(model), PATIENT), None)
        await core.engine.wait_ready()
        expected = await stream(core, [])
        given: list[int] = []
        with pytest.raises(EngineDeadError, match=r"weights have changed since the engine started.*restart the server"):
            await stream(core, given, then_kill(core, change, model))
        assert 0 < len(given) < len(expected)
        assert given == expected[: len(given)]  # not one token of another model
        assert core.engine.state is EngineState.DEAD
        assert core.supervisor.num_restarts == 1  # it is not tried again
        assert core.supervisor.core_pid is None
        with pytest.raises(EngineDeadError, match="weights have changed"):
            await stream(core, [])
        core.engine.close()

    run(main())


def test_what_leaves_the_weights_as_they_are_disturbs_nobody(model: Path) -> None:
    async def main() -> None:
        core = Launched(CoreSupervisor(args_of(model), PATIENT), None)
        await core.engine.wait_ready()
        expected, identity = await stream(core, []), core.engine.identity
        changes = (touch_weights, write_the_same_weights_again, replace_config, break_config)
        for num_restarts, change in enumerate(changes, start=1):
            assert await stream(core, [], then_kill(core, change, model)) == expected, change
            assert core.engine.num_restarts == num_restarts
            assert core.engine.identity == identity
        core.engine.close()

    run(main())


def test_running_requests_do_not_see_what_is_written_into_the_file(model: Path) -> None:
    async def main() -> None:
        core = Launched(CoreSupervisor(args_of(model), PATIENT), None)
        await core.engine.wait_ready()
        expected = await stream(core, [])
        overwrite_weights_in_place(model)
        flip_one_bit_through_a_map(model)
        assert await stream(core, []) == expected
        core.engine.close()

    run(main())


def test_weights_that_change_before_any_core_was_ready_are_those_of_the_engine(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "starts"
    script.write_text("hang weights\ngood\n")
    monkeypatch.setenv(SCRIPT, str(script))

    async def main() -> None:
        core = Launched(CoreSupervisor(args_of(model), PATIENT, MODULE), None)
        ready = asyncio.create_task(core.engine.wait_ready())
        await until_stage(core.engine, "weights")
        replace_weights(model)
        core.kill()  # no token was given yet
        await ready
        expected = await stream(core, [])
        assert await stream(core, [], then_kill(core, touch_weights, model)) == expected
        core.engine.close()

    run(main())


def test_another_tokenizer_is_refused_by_a_front_that_comes_later(model: Path) -> None:
    async def main() -> None:
        supervisor = CoreSupervisor(args_of(model), RestartPolicy())
        first, later = AsyncLLMEngine(supervisor), AsyncLLMEngine(supervisor, front=1)
        await first.wait_ready()
        config = model / "tokenizer_config.json"
        config.write_text(config.read_text().replace("{", "{ ", 1))
        with pytest.raises(ConfigError, match=r"tokenizer in .* has changed since the engine started.*restart"):
            await later.wait_ready()
        later.close()
        first.close()

    run(main())


def test_fronts_share_no_seeds_also_where_the_engine_has_one(model: Path) -> None:
    async def main() -> None:
        for seed in (None, 5):
            supervisor = CoreSupervisor(replace(args_of(model), seed=seed), RestartPolicy())
            fronts = [AsyncLLMEngine(supervisor, front=number) for number in range(3)]
            short = LONG.clone(max_tokens=1, temperature=1.0)
            seeds = [
                [output.seed async for output in front.generate(PROMPT, short)][-1]
                for front in fronts
                for _ in range(8)
            ]
            assert len(set(seeds)) == 24
            for front in fronts:
                front.close()

    run(main())
