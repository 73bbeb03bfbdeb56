"""What users rely on: names, flags, documentation. A change here is one for everybody, so it is made on purpose."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
from typing import Any

import pytest

import quire
from quire import EngineArgs, SamplingParams, errors
from quire.config.flags.args import add_flags
from quire.errors import QuireError, from_wire

NAMES = {
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EngineArgs",
    "LLM",
    "LLMEngine",
    "Logprob",
    "ModelRegistry",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
}
FLAGS = {
    "-c",
    "-m",
    "--async-scheduling",
    "--batch-invariant",
    "--block-size",
    "--chat-template",
    "--dequantize",
    "--device",
    "--device-memory-utilization",
    "--disable-log-stats",
    "--dtype",
    "--enable-prefix-caching",
    "--enforce-eager",
    "--generation-config",
    "--gpu-memory-utilization",
    "--hf-overrides",
    "--kv-cache-dtype",
    "--kv-cache-memory-bytes",
    "--kv-disk",
    "--kv-disk-size",
    "--kv-load-min-tokens",
    "--kv-ram",
    "--load-format",
    "--log-stats-interval",
    "--long-prefill-token-threshold",
    "--max-logprobs",
    "--max-model-len",
    "--max-num-batched-tokens",
    "--max-num-seqs",
    "--memory-fraction",
    "--model",
    "--model-impl",
    "--no-async-scheduling",
    "--no-dequantize",
    "--no-disable-log-stats",
    "--no-enable-prefix-caching",
    "--no-batch-invariant",
    "--no-enforce-eager",
    "--no-skip-tokenizer-init",
    "--no-use-tqdm-on-load",
    "--num-blocks",
    "--num-gpu-blocks-override",
    "--num-threads",
    "--ops",
    "--override-generation-config",
    "--priority-ageing",
    "--quantization",
    "--revision",
    "--scheduling-policy",
    "--seed",
    "--skip-tokenizer-init",
    "--state-checkpoint-stride",
    "--structured-outputs-backend",
    "--swap-space",
    "--tokenizer",
    "--use-tqdm-on-load",
}
ERRORS: dict[str, tuple[int, str]] = {
    "CheckpointError": (500, "invalid_configuration"),
    "ConfigError": (500, "invalid_configuration"),
    "EngineDeadError": (503, "engine_unavailable"),
    "EngineError": (500, "internal_error"),
    "EngineOverloaded": (429, "engine_overloaded"),
    "EngineUnavailable": (503, "engine_unavailable"),
    "InvalidParameter": (400, "invalid_value"),
    "InvalidUnicode": (400, "invalid_unicode"),
    "MissingDependency": (500, "invalid_configuration"),
    "ModelNotFound": (500, "invalid_configuration"),
    "PromptTooLong": (400, "context_length_exceeded"),
    "QuireError": (500, "internal_error"),
    "RequestError": (400, "invalid_value"),
    "RequestQuarantined": (500, "request_quarantined"),
    "TokenizerError": (500, "invalid_configuration"),
    "UnsupportedFeature": (400, "unsupported_parameter"),
}


def test_exported_names_are_these() -> None:
    assert set(quire.__all__) == NAMES
    assert set(dir(quire)) == NAMES
    for name in NAMES:
        assert getattr(quire, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = quire.Engine


def engine_flags() -> dict[str, argparse.Action]:
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    return {flag: action for flag, action in parser._option_string_actions.items() if action.help != argparse.SUPPRESS}


def test_engine_flags_are_these() -> None:
    assert set(engine_flags()) == FLAGS


@pytest.mark.parametrize("flag", sorted(FLAGS))
def test_flag_has_help(flag: str) -> None:
    help_text = engine_flags()[flag].help
    assert help_text
    assert help_text.split(" (default")[0].endswith(".")


def classes() -> dict[str, type[QuireError]]:
    return {
        name: value for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, QuireError)
    }


def test_errors_are_these_with_these_codes() -> None:
    assert {name: (cls.status, cls.code) for name, cls in classes().items()} == ERRORS


@pytest.mark.parametrize("name", ERRORS)
def test_error_survives_the_wire(name: str) -> None:
    cls = classes()[name]
    values: dict[type, Any] = {str: "a value", int: 7}
    hints = inspect.get_annotations(cls.__init__, eval_str=True)
    fields = {key: values[hint] for key, hint in hints.items() if hint in values and key != "message"}
    error = cls("what, the numbers, what to do", **fields)
    wire = error.as_wire()
    assert all(isinstance(value, (str, int)) for value in wire[1].values())
    again = from_wire(*wire)
    assert type(again) is cls
    assert (str(again), again.fields) == (str(error), fields)
    assert {key: getattr(again, key) for key in fields} == fields
    assert type(error.within("prompt 3")) is cls
    assert str(error.within("prompt 3")) == "prompt 3: what, the numbers, what to do"


def test_error_of_an_unknown_class_becomes_one_that_says_so() -> None:
    error = from_wire("TomorrowsError", {"message": "oops"})
    assert type(error) is errors.EngineError
    assert str(error) == "TomorrowsError: oops"


def field_docs(cls: type) -> dict[str, str]:
    """Field -> the string that stands below it in the source."""
    (body,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            assert isinstance(below.value, ast.Constant)
            docs[field.target.id] = str(below.value.value)
    return docs


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
def test_sampling_parameter_is_documented(name: str) -> None:
    assert len(field_docs(SamplingParams)[name]) > 10


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(EngineArgs)])
def test_engine_option_is_documented(name: str) -> None:
    (option,) = (field for field in dataclasses.fields(EngineArgs) if field.name == name)
    assert option.metadata["help"].endswith(".")


@pytest.mark.parametrize("name", sorted(NAMES - {"__version__", "PromptType"}))
def test_public_class_is_documented(name: str) -> None:
    cls = getattr(quire, name)
    assert cls.__doc__
    for member, value in vars(cls).items():
        if inspect.isfunction(value) and not member.startswith("_"):
            assert value.__doc__, f"{name}.{member}"
