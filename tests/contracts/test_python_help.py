"""What a Python developer sees: signatures, short reprs, refusals of what is not built, and types."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import subprocess
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLMEngine, EngineArgs, LLMEngine, SamplingParams
from quire.config.flags.foreign import ASYNC_ENGINE_METHODS, CALL, ENGINE_METHODS, METHODS
from quire.config.flags.options import EngineOptions
from quire.errors import UnsupportedFeature


def test_the_typed_options_are_those_of_engine_args() -> None:
    known = typing.get_type_hints(EngineArgs)
    expected = {
        name: known[option.name]
        for option in dataclasses.fields(EngineArgs)
        if option.name != "model"
        for name in (option.name, *option.metadata["aliases"])
    }
    assert typing.get_type_hints(EngineOptions) == expected
    assert list(EngineOptions.__annotations__) == list(expected)


@pytest.mark.parametrize("cls", [LLM, EngineArgs, SamplingParams])
def test_signatures_name_every_option_and_its_default(cls: Any) -> None:
    fields = dataclasses.fields(EngineArgs if cls is LLM else cls)
    parameters = inspect.signature(cls).parameters
    assert list(parameters) == [field.name for field in fields if field.init]
    for field in fields:
        if field.init and field.default is not dataclasses.MISSING:
            assert parameters[field.name].default == field.default


def test_the_help_of_llm_lists_every_option() -> None:
    text = inspect.getdoc(LLM) or ""
    for option in dataclasses.fields(EngineArgs):
        assert f"    {option.name}: {option.metadata['help']}" in text


def test_reprs_show_what_differs_from_the_defaults(tiny_llm: LLM) -> None:
    assert repr(SamplingParams()) == "SamplingParams()"
    params = SamplingParams(temperature=0.5, stop=["a"], max_tokens=None)
    assert repr(params) == "SamplingParams(temperature=0.5, stop=['a'], max_tokens=None)"
    assert eval(repr(params)) == params
    assert "warnings=('temperature" in repr(SamplingParams(temperature=0.001))
    assert repr(EngineArgs()) == "EngineArgs()"
    args = EngineArgs(model="x", hf_overrides={"a": 1})
    assert repr(args) == "EngineArgs(model='x', hf_overrides={'a': 1})"
    assert eval(repr(args)) == args
    assert repr(tiny_llm) == "LLM(model='quire-tiny', dtype='bfloat16', max_model_len=1024)"


@pytest.fixture(scope="module")
def async_engine() -> Iterator[AsyncLLMEngine]:
    """An engine of which no core was started."""
    with AsyncLLMEngine(NoCores()) as engine:
        yield engine


class NoCores:
    """Where no core comes from."""

    def subscribe(self, sink: Any) -> None: ...

    def close(self, flush_s: float = 0) -> None: ...


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind, table in (("LLM", METHODS), ("LLMEngine", ENGINE_METHODS), ("AsyncLLMEngine", ASYNC_ENGINE_METHODS))
        for name in table
    ],
)
def test_methods_that_are_not_built_say_what_to_do(
    tiny_llm: LLM, async_engine: AsyncLLMEngine, kind: str, name: str
) -> None:
    owner: Any = {"LLM": tiny_llm, "LLMEngine": tiny_llm.engine, "AsyncLLMEngine": async_engine}[kind]
    assert not hasattr(owner, name)
    with pytest.raises(UnsupportedFeature, match=f"^{kind}.{name} is not built: .{{8}}") as caught:
        getattr(owner, name)("text")
    assert isinstance(caught.value, AttributeError)


def test_a_misspelt_method_is_an_attribute_error_with_the_nearest(tiny_llm: LLM, async_engine: AsyncLLMEngine) -> None:
    for owner, name, right in (
        (tiny_llm, "genrate", "generate"),
        (tiny_llm.engine, "add_requests", "add_request"),
        (async_engine, "genrate", "generate"),
    ):
        with pytest.raises(AttributeError, match=f"object has no attribute '{name}'; did you mean '{right}'"):
            getattr(owner, name)
        assert not hasattr(owner, "anything")


CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "generate": (LLM.generate, ("text",)),
    "chat": (LLM.chat, ([{"role": "user", "content": "hi"}],)),
    "beam_search": (LLM.beam_search, ("text", {"beam_width": 2, "max_tokens": 2})),
    "add_request": (lambda llm, *args, **more: llm.engine.add_request(*args, **more), ("1", "text")),
}


def parameters_of(kind: str) -> set[str]:
    method = LLMEngine.add_request if kind == "add_request" else CALLS[kind][0]
    return set(inspect.signature(method).parameters)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in CALLS for name in CALL if name in parameters_of(kind)]
)
def test_keywords_that_are_not_built_are_refused(tiny_llm: LLM, kind: str, name: str) -> None:
    call, args = CALLS[kind]
    with pytest.raises(UnsupportedFeature, match=f"{name}=7 is not supported yet") as caught:
        call(tiny_llm, *args, **{name: 7})
    assert caught.value.parameter == name
    assert not tiny_llm.engine.has_unfinished_requests()


def test_keywords_that_are_not_built_are_refused_by_the_async_engine(async_engine: AsyncLLMEngine) -> None:
    names = [name for name in CALL if name in inspect.signature(AsyncLLMEngine.generate).parameters]
    assert len(names) == 4

    async def ask(name: str) -> None:
        given: dict[str, Any] = {name: 7}
        async for _ in async_engine.generate("text", **given):
            raise AssertionError("it was run")

    for name in names:
        with pytest.raises(UnsupportedFeature, match=f"{name}=7 is not supported yet"):
            asyncio.run(ask(name))


def test_every_keyword_of_the_table_is_one_of_a_call() -> None:
    asked = set(inspect.signature(AsyncLLMEngine.generate).parameters).union(*map(parameters_of, CALLS))
    assert set(CALL) <= asked


TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
READS_TOOLS = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ messages[0].content }}"


def test_tools_that_the_template_does_not_read_are_refused(tiny_llm: LLM) -> None:
    question = [{"role": "user", "content": "hi"}]
    with pytest.raises(UnsupportedFeature, match="the chat template of this model does not read them") as caught:
        tiny_llm.chat(question, {"max_tokens": 1}, tools=TOOLS, chat_template="{{ messages[0].content }}")
    assert caught.value.parameter == "tools"
    prompt = tiny_llm.chat_prompt(question, tools=TOOLS, chat_template=READS_TOOLS)
    assert prompt.get("prompt") == "fhi"


PROJECT = """
import asyncio

from quire import LLM, AsyncLLMEngine, CompletionOutput, EngineArgs, LLMEngine, RequestOutput, SamplingParams
from quire import TokensPrompt
from quire.errors import EngineOverloaded, RequestError
from quire.server.app import create_app
from quire.server.settings import ServerSettings

def answer(prompts: list[str]) -> list[str]:
    with LLM("qwen3:0.6b", max_model_len=512, dtype="bfloat16") as llm:
        params = SamplingParams(temperature=0.8, max_tokens=16, stop=["x"])
        outputs: list[RequestOutput] = llm.generate(prompts, params)
        chat = llm.chat([{"role": "user", "content": "hi"}], params)
        return [output.outputs[0].text for output in [*outputs, *chat]]

args = EngineArgs(model="x", max_num_seqs=4)

def steps(engine: LLMEngine) -> list[int]:
    engine.add_request("1", TokensPrompt(prompt_token_ids=[1, 2]), SamplingParams(max_tokens=4))
    counts: list[int] = []
    while engine.has_unfinished_requests():
        counts += [len(output.prompt_token_ids) for output in engine.step()]
    return counts

async def stream(engine: AsyncLLMEngine) -> str:
    text = ""
    try:
        async for output in engine.generate("hi", SamplingParams(max_tokens=4), request_id="1"):
            first: CompletionOutput = output.outputs[0]
            reason: str | None = first.finish_reason
            cached: int = output.num_cached_tokens
            print(reason, cached, first.logprobs, output.metrics)
            text = first.text
    except (RequestError, EngineOverloaded) as error:
        print(error.status, error.code, error.message)
    return text

def serve() -> None:
    with AsyncLLMEngine.launch(args) as engine:
        app = create_app(engine, ServerSettings(port=0, api_key=("key",), max_concurrent_requests=4))
        print(app.title, engine.state, asyncio.run(stream(engine)))
"""
IMPORTS = """\
from quire import LLM, AsyncLLMEngine, EngineArgs, SamplingParams
from quire.server.settings import ServerSettings"""
MISTAKES = {
    "LLM(max_modle_len=5)": "max_modle_len",
    'LLM(max_model_len="5")': "max_model_len",
    "SamplingParams(temprature=1.0)": "temprature",
    'SamplingParams(max_tokens="5")': "max_tokens",
    "EngineArgs(blok_size=5)": "blok_size",
    'LLM().generate("a", lora_request=3)': "lora_request",
    'LLM().embed("a")': '"embed"',
    'LLM().generate("a")[0].text': '"text"',
    'LLM().engine.add_request(1, "a")': '"int"',
    "ServerSettings(prot=1)": "prot",
    'AsyncLLMEngine.launch(EngineArgs()).generate("a", priority="x")': "priority",
}


@pytest.mark.slow
def test_a_strict_user_project_is_checked(tmp_path: Path) -> None:
    wrong = "\n".join(MISTAKES)
    (tmp_path / "good.py").write_text(PROJECT)
    (tmp_path / "bad.py").write_text(textwrap.dedent(f"{IMPORTS}\n{wrong}\n"))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", "cache", "good.py", "bad.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert not [line for line in lines if not line.startswith("bad.py")], done.stdout
    for number, name in enumerate(MISTAKES.values(), start=3):
        assert [line for line in lines if line.startswith(f"bad.py:{number}:") and name in line], done.stdout
