"""`quire run`: a model with a chat template answers, a base model continues, and flags choose one of the two."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.cli.terminal.answer import MAX_CHARACTERS, read_text
from quire.errors import InvalidParameter
from tests.conftest import Checkpoint
from tests.contracts.test_imports import HEAVY, modules_after

QUESTION = "What is a KV cache?"
GREEDY = ["--temperature", "0", "-n", "8"]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def params(tiny_llm: LLM) -> SamplingParams:
    """What GREEDY makes of the model's own defaults."""
    return tiny_llm.get_default_sampling_params().clone(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def base(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model without a chat template."""
    directory = tmp_path_factory.mktemp("base") / "model"
    shutil.copytree(checkpoint("llama"), directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    return str(directory)


@pytest.mark.parametrize("flags", [[], ["--chat"]])
def test_a_model_with_a_chat_template_answers(
    tiny_llm: LLM, params: SamplingParams, capsys: Captured, flags: list[str]
) -> None:
    (output,) = tiny_llm.chat([{"role": "user", "content": QUESTION}], params, use_tqdm=False)
    assert main(["run", QUESTION, *flags, *GREEDY]) == 0
    out, err = capsys.readouterr()
    assert out == f"{output.outputs[0].text}\n"
    assert "answering as in a chat (--raw continues the text)" in err


def test_raw_continues_the_text(tiny_llm: LLM, params: SamplingParams, capsys: Captured) -> None:
    (output,) = tiny_llm.generate("import os", params, use_tqdm=False)
    assert main(["run", "--raw", "import os", *GREEDY]) == 0
    out, err = capsys.readouterr()
    assert out == f"import os{output.outputs[0].text}\n"
    assert "continuing the text" in err


def test_a_system_prompt_comes_before_the_question(tiny_llm: LLM, params: SamplingParams, capsys: Captured) -> None:
    system = {"role": "system", "content": "Say only yes."}
    (output,) = tiny_llm.chat([system, {"role": "user", "content": QUESTION}], params, use_tqdm=False)
    (without,) = tiny_llm.chat([{"role": "user", "content": QUESTION}], params, use_tqdm=False)
    assert len(output.prompt_token_ids) > len(without.prompt_token_ids)
    assert main(["run", QUESTION, "--system-prompt", "Say only yes.", *GREEDY, "--stats"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{output.outputs[0].text}\n"
    assert f"{len(output.prompt_token_ids)} prompt tokens, " in err


def test_a_base_model_continues_the_text(base: str, capsys: Captured) -> None:
    assert main(["run", base, "import os", *GREEDY]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("import os")
    assert err == f"model: {base}; continuing the text\n"


def test_a_base_model_takes_a_template_that_is_given(base: str, tmp_path: Path, capsys: Captured) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    assert main(["run", base, "import os", "--chat-template", str(template), *GREEDY]) == 0
    assert "answering as in a chat" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--chat"], "This model has no chat template"),
        (["--system-prompt", "Be brief."], "--system-prompt needs a chat"),
        (["--raw", "--system-prompt", ""], "--system-prompt needs a chat"),
    ],
)
def test_what_needs_a_chat_template_says_so(base: str, capsys: Captured, flags: list[str], message: str) -> None:
    assert main(["run", base, "hi", *flags]) == 2
    out, err = capsys.readouterr()
    assert (out, message in err) == ("", True)


@pytest.mark.parametrize("prompt", ["", " \n"])
def test_an_empty_prompt_is_refused(prompt: str, capsys: Captured) -> None:
    assert main(["run", "quire-tiny", prompt]) == 2
    out, err = capsys.readouterr()
    assert (out, "the prompt is empty" in err) == ("", True)


@pytest.mark.parametrize("argv", [["run", " "], ["run", "hi", "--raw", "--system-prompt", "Be brief."]])
def test_what_no_model_could_answer_is_refused_before_one_is_loaded(argv: list[str]) -> None:
    assert modules_after(f"import quire.cli.main as m\nassert m.main({argv}) == 2").isdisjoint(HEAVY)


def test_input_without_an_end_is_refused() -> None:
    with pytest.raises(InvalidParameter, match=f"standard input has more than {MAX_CHARACTERS} characters"):
        read_text(lambda count: "x" * count)


def test_both_ways_at_once_are_refused(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--raw", "--chat", "hi"])
    assert "not allowed with argument" in capsys.readouterr().err
