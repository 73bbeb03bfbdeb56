"""What a Python developer sees: signatures, short reprs, refusals of what is not built, and types."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
import textwrap
import typing
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, EngineArgs, SamplingParams
from quire.config.foreign import CALL, METHODS
from quire.config.options import EngineOptions
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


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_are_not_built_say_what_to_do(tiny_llm: LLM, name: str) -> None:
    assert not hasattr(tiny_llm, name)
    with pytest.raises(UnsupportedFeature, match=f"LLM.{name} is not built: ") as caught:
        getattr(tiny_llm, name)("text")
    assert METHODS[name] in caught.value.message
    assert isinstance(caught.value, AttributeError)


def test_a_misspelt_method_is_an_attribute_error_with_the_nearest(tiny_llm: LLM) -> None:
    with pytest.raises(AttributeError, match="did you mean 'generate'"):
        tiny_llm.genrate("text")
    assert not hasattr(tiny_llm, "anything")


@pytest.mark.parametrize("name", CALL)
def test_keywords_that_are_not_built_are_refused(tiny_llm: LLM, name: str) -> None:
    called = 0
    for method, prompt in ((LLM.generate, "text"), (LLM.chat, [{"role": "user", "content": "hi"}])):
        if name in inspect.signature(method).parameters:
            called += 1
            with pytest.raises(UnsupportedFeature, match=f"{name}=7 is not supported yet") as caught:
                method(tiny_llm, prompt, **{name: 7})  # type: ignore[operator]
            assert caught.value.parameter == name
    assert called


TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
READS_TOOLS = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ messages[0].content }}"


def test_tools_that_the_template_does_not_read_are_refused(tiny_llm: LLM) -> None:
    question = [{"role": "user", "content": "hi"}]
    with pytest.raises(UnsupportedFeature, match="the chat template of this model does not read them") as caught:
        tiny_llm.chat(question, {"max_tokens": 1}, tools=TOOLS)
    assert caught.value.parameter == "tools"
    prompt = tiny_llm.chat_prompt(question, tools=TOOLS, chat_template=READS_TOOLS)
    assert prompt.get("prompt") == "fhi"


PROJECT = """
from quire import LLM, EngineArgs, RequestOutput, SamplingParams

def answer(prompts: list[str]) -> list[str]:
    with LLM("qwen3:0.6b", max_model_len=512, dtype="bfloat16") as llm:
        params = SamplingParams(temperature=0.8, max_tokens=16, stop=["x"])
        outputs: list[RequestOutput] = llm.generate(prompts, params)
        chat = llm.chat([{"role": "user", "content": "hi"}], params)
        return [output.outputs[0].text for output in [*outputs, *chat]]

args = EngineArgs(model="x", max_num_seqs=4)
"""
MISTAKES = {
    "LLM(max_modle_len=5)": "max_modle_len",
    'LLM(max_model_len="5")': "max_model_len",
    "SamplingParams(temprature=1.0)": "temprature",
    'SamplingParams(max_tokens="5")': "max_tokens",
    "EngineArgs(blok_size=5)": "blok_size",
    'LLM().generate("a", lora_request=3)': "lora_request",
}


@pytest.mark.slow
def test_a_strict_user_project_is_checked(tmp_path: Path) -> None:
    wrong = "\n".join(MISTAKES)
    (tmp_path / "good.py").write_text(PROJECT)
    (tmp_path / "bad.py").write_text(textwrap.dedent(f"from quire import LLM, EngineArgs, SamplingParams\n{wrong}\n"))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", "cache", "good.py", "bad.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert not [line for line in lines if not line.startswith("bad.py")], done.stdout
    for number, name in enumerate(MISTAKES.values(), start=2):
        assert [line for line in lines if line.startswith(f"bad.py:{number}:") and name in line], done.stdout
