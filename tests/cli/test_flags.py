"""Command lines that are wrong: exit status 2, one paragraph on standard error, no traceback."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.cli.parser import create_parser
from quire.config.flags.args import EngineArgs
from quire.config.flags.foreign import ENGINE, SERVER, Foreign
from quire.config.flags.knobs import whole_number
from quire.engine.core_startup import create_config
from quire.errors import ConfigError

Run = Callable[..., tuple[int, str, str]]

COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    # the command itself
    "unknown command": (["sevre"], ["invalid command: 'sevre'; did you mean 'serve'?", "run, chat"]),
    "flags before the command": (["--model", "x", "run"], ["invalid command: 'x'"]),
    "bench of an unknown kind": (["bench", "speed"], ["invalid command: 'speed'", "latency", "throughput"]),
    # unknown flags
    "misspelt flag": (["run", "--temprature", "1", "hi"], ["--temprature is no flag", "did you mean '--temperature'?"]),
    "misspelt flag with =": (["run", "--max-modle-len=5", "hi"], ["--max-modle-len is no flag", "'--max-model-len'"]),
    "underscores": (["env", "--block_size", "5"], ["--block_size is no flag", "'--block-size'"]),
    "abbreviated flag": (["run", "--temp", "1", "hi"], ["--temp is no flag", "quire run --help"]),
    "misspelt flag of bench": (["bench", "latency", "--batchsize", "2"], ["--batchsize is no flag", "'--batch-size'"]),
    "flag of another command": (["env", "--temperature", "1"], ["--temperature is no flag"]),
    "short flag": (["run", "-x", "hi"], ["-x is no flag"]),
    "flag not built yet": (
        ["run", "--tensor-parallel-size", "2", "hi"],
        ["--tensor-parallel-size 2 is not supported yet", "only 1 is", "--num-threads"],
    ),
    "flag not built, by its short name": (["run", "-tp", "4", "hi"], ["-tp 4 is not supported yet", "only 1 is"]),
    "switch not built": (["serve", "--enable-lora"], ["--enable-lora is not supported yet", "merge them"]),
    "switch that says no": (["serve", "--no-enable-chunked-prefill"], ["always computed in chunks"]),
    "server flag not built": (
        ["serve", "--tool-server", "demo"],
        ["--tool-server demo is not"],
    ),
    "flag not built, misspelt": (["serve", "--tool-call-paser", "hermes"], ["--tool-call-paser is no flag"]),
    "flag never built": (
        ["env", "--trust-remote-code"],
        ["--trust-remote-code is not supported:", "quire never runs code from a model repository"],
    ),
    "help of no command": (["help", "rnu"], ["invalid choice: 'rnu'; did you mean 'run'?"]),
    "two words, of which the first is no model": (["run", "one", "two"], ["no directory 'one'"]),
    "three words": (["run", "one", "two", "three"], ["got 3 words", "quotation marks"]),
    "three words among flags": (["run", "one", "--stats", "two", "three"], ["got 3 words"]),
    "two models": (["run", "one", "two", "-m", "three"], ["the model is given twice: 'one' and --model 'three'"]),
    "a path that is none": (["run", "./nothing", "hi"], ["no directory './nothing'"]),
    "a model and no prompt": (["run", "./nothing"], ["'./nothing' was taken for the model", "no prompt"]),
    "a size that is none": (
        ["run", "qwen3:7b", "hi"],
        ["no short name 'qwen3:7b'; did you mean 'qwen3:", "qwen3:0.6b"],
    ),
    "-n where nothing is generated": (
        ["serve", "-n", "3"],
        ["-n 3 is not supported yet: only 1 is", "vLLM's --nnodes", "--max-tokens"],
    ),
    "-c where no model is loaded": (["complete", "-c", "512"], ["-c is no flag; use --max-model-len"]),
    "a short flag of llama.cpp": (["run", "-ngl", "99"], ["-ngl is no flag; leave it out"]),
    "a short flag that others begin with": (["run", "-p", "hi"], ["-p is no flag; write the prompt without a flag"]),
    # values
    "no value": (["run", "hi", "--temperature"], ["--temperature", "expected one argument"]),
    "temperature text": (["run", "hi", "--temperature", "hot"], ["--temperature", "'hot'"]),
    "temperature NaN": (["run", "hi", "--temperature", "nan"], ["temperature must be a finite number", "nan"]),
    "temperature 3": (["run", "hi", "--temperature", "3"], ["temperature must be in [0, 2], got 3"]),
    "top-k fraction": (["run", "hi", "--top-k", "1.5"], ["--top-k", "'1.5'"]),
    "top-p 0": (["run", "hi", "--top-p", "0"], ["top_p must be in (0, 1]"]),
    "max-tokens 0": (["run", "hi", "--max-tokens", "0"], ["max_tokens must be in [1, "]),
    "max-tokens fraction": (["run", "hi", "--max-tokens", "0.5k2"], ["--max-tokens", "not a number such as"]),
    "max-tokens not whole": (["run", "hi", "--max-tokens", "1.2345k"], ["--max-tokens", "not a whole number"]),
    "seed huge": (["run", "hi", "--sampling-seed", str(2**63)], ["seed must be in ["]),
    "stop empty": (["run", "hi", "--stop", ""], ["stop must not contain an empty string"]),
    "max-model-len 1": (["run", "hi", "--max-model-len", "1"], ["option max_model_len must be at least 2, got 1"]),
    "max-model-len infinite": (["run", "hi", "--max-model-len", "inf"], ["--max-model-len", "not a whole number"]),
    "max-model-len beyond": (["run", "hi", "--max-model-len", "1M"], ["max_model_len=1048576", "hf_overrides"]),
    "dtype": (["run", "hi", "--dtype", "int4"], ["--dtype", "invalid choice: 'int4'", "bfloat16"]),
    "share": (["env", "--gpu-memory-utilization", "90"], ["gpu_memory_utilization must be in (0, 1], got 90"]),
    "overrides no JSON": (["env", "--hf-overrides", "{a: 1}"], ["--hf-overrides", "not JSON"]),
    "overrides a list": (["env", "--hf-overrides", "[1]"], ["--hf-overrides", "must be a JSON object"]),
    "overrides nested deeply": (["env", "--hf-overrides", "[" * 50_000], ["--hf-overrides", "not JSON"]),
    "bool with a value": (["env", "--enable-prefix-caching=no"], ["--enable-prefix-caching", "ignored explicit"]),
    "contradiction": (
        ["env", "--num-blocks", "5", "--kv-cache-memory-bytes", "1G"],
        ["kv_cache_memory_bytes and num_gpu_blocks_override contradict"],
    ),
    "threads": (["env", "--num-threads", "100k"], ["num_threads must be at most 512"]),
    # models and prompts
    "no model there": (["run", "hi", "--model", "./nothing"], ["no directory './nothing'"]),
    "no model given": (["run", "hi", "--model", ""], ["option model is an empty string"]),
    "no template there": (["chat", "-q", "hi", "--chat-template", "/no/template"], ["chat_template '/no/template'"]),
    "empty prompt": (["run", ""], ["the prompt is empty"]),
    "prompt too long": (["run", "word " * 5000], ["maximum context length is"]),
    "prompt of half a pair": (["run", "a\udcff"], ["prompt contains an unpaired surrogate"]),
    # bench
    "batch of none": (["bench", "latency", "--batch-size", "0"], ["--batch-size must be at least 1, got 0"]),
    "less than no warm-up": (["bench", "latency", "--num-iters-warmup", "-1"], ["--num-iters-warmup", "-1"]),
    "no prompts": (["bench", "throughput", "--num-prompts", "0"], ["--num-prompts must be at least 1"]),
    "longer than the context": (["bench", "latency", "--input-len", "100k"], ["--input-len 100000", "exceed"]),
    "a file nobody can write": (
        ["bench", "latency", "--output-json", "/no/such/directory/x.json"],
        ["--output-json /no/such/directory/x.json cannot be written"],
    ),
}


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """(exit status, standard output, standard error) of a command line."""

    def call(argv: list[str], stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        try:
            status = main(argv)
        except SystemExit as end:
            status = int(end.code or 0)
        out, err = capfd.readouterr()
        return status, out, err

    return call


@pytest.mark.parametrize("name", COMMANDS)
def test_wrong_command_line_exits_with_2_and_one_paragraph(run: Run, name: str) -> None:
    argv, parts = COMMANDS[name]
    status, out, err = run(argv)
    assert status == 2
    assert out == ""
    for part in parts:
        assert part in err
    assert err.startswith("quire")
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_standard_input_that_is_no_text_is_refused(run: Run) -> None:
    for argv in (["run"], ["chat"]):
        status, _, err = run(argv, stdin=b"abc\xff\n")
        assert status == 2
        assert "standard input is not valid utf-8 at byte 3" in err


def test_standard_input_that_is_empty_is_an_empty_prompt(run: Run) -> None:
    status, out, err = run(["run"])
    assert (status, out) == (2, "")
    assert "the prompt is empty" in err


def test_chat_goes_on_after_a_question_it_refuses(run: Run) -> None:
    questions = f"{'word ' * 5000}\nhi\n"
    status, out, err = run(["chat", "--max-tokens", "2"], stdin=questions.encode())
    assert status == 0
    assert "maximum context length is" in err
    assert out.strip()


def test_quick_question_that_is_refused_exits_with_1(run: Run) -> None:
    status, out, err = run(["chat", "-q", "word " * 5000])
    assert (status, out) == (1, "")
    assert "maximum context length is" in err


def test_wrong_environment_variable_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quire.cli.main", "run", "hi"],
        env={**os.environ, "QUIRE_LOG_LEVEL": "loud"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "quire: environment variable QUIRE_LOG_LEVEL is 'loud'; it must be one of DEBUG, INFO, WARNING, ERROR\n"
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [("4096", 4096), ("4k", 4000), ("4K", 4096), ("2GiB", 2**31), ("1.5G", 3 * 2**29), ("-1", -1)],
)
def test_whole_numbers_have_units(text: str, number: int) -> None:
    assert whole_number(text) == number


def test_whole_numbers_keep_every_digit() -> None:
    assert whole_number(str(2**62 + 1)) == 2**62 + 1


def test_flags_that_say_what_quire_does_anyway_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    line = "-tp 1 -pp 1 --enable-chunked-prefill --no-trust-remote-code --runner auto"
    server = "--enable-prompt-tokens-details --disable-uvicorn-access-log --stream-interval 1 --max-num-queued-reqs 9"
    args = create_parser("serve").parse_args(["serve", *line.split(), *server.split(), "-q", "int8", "some/model"])
    given = {name: value for name, value in vars(args).items() if name not in ("command", "run", "config")}
    assert given == {"model_tag": "some/model", "max_queued_requests": 9, "quantization": "int8"}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("name", "option"), [*ENGINE.items(), *SERVER.items()], ids=lambda value: str(value)[:40])
def test_what_is_not_varied_is_refused_in_one_sentence(
    name: str, option: Foreign, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = "--" + name.replace("_", "-")
    if option.is_switch and option.takes(True):
        flag = flag.replace("--", "--no-", 1)
    if option.is_switch and option.takes(True) and option.takes(False):
        create_parser("serve").parse_args(["serve", flag])
        return
    with pytest.raises(SystemExit) as exit:
        create_parser("serve").parse_args(["serve", flag, *([] if option.is_switch else ["nonsense"])])
    assert exit.value.code == 2
    message = capsys.readouterr().err
    assert option.why in message
    assert flag in message


def test_the_embedded_model_has_a_name_and_a_directory_of_that_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named = create_config(EngineArgs(model="quire-tiny"))
    assert named.model_config == create_config(EngineArgs()).model_config
    with pytest.raises(ConfigError, match="revision='main' has no effect on the embedded model"):
        create_config(EngineArgs(model="quire-tiny", revision="main"))
    (tmp_path / "quire-tiny").mkdir()
    with pytest.raises(ConfigError, match=r"quire-tiny has no config\.json"):
        create_config(EngineArgs(model="quire-tiny"))
