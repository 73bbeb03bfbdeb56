"""A Python developer in a notebook: from the first import to an answer that can be proved."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.walks.notebook import opened

pytest.importorskip("ipykernel", reason="no notebook: pip install ipykernel")


@pytest.mark.filterwarnings("ignore")  # Jupyter's own
def test_a_python_developer_in_a_notebook(tmp_path: Path) -> None:
    with opened(tmp_path) as notebook:
        # What is there, and how is it called?
        cell = notebook.run("from quire import LLM, SamplingParams\nLLM?")
        assert "LLM(\n    model: 'str | None' = None," in cell.help
        assert "max_model_len: Longest context in tokens; as the model says when left out." in cell.help

        # The first model: one line says what it is.
        cell = notebook.run("llm = LLM()\nllm")
        assert cell.error == ""
        assert cell.text == "LLM(model='quire-tiny', dtype='bfloat16', max_model_len=1024)"
        assert notebook.complete("llm.gene") == ["generate"]

        # The first prompts: a line of progress, and a table instead of a wall of ids.
        cell = notebook.run(
            "params = SamplingParams(temperature=0, max_tokens=8)\n"
            "outputs = llm.generate(['import os', 'def read_lines(path):'], params)\n"
            "outputs[0]"
        )
        assert "processed prompts: 2/2, in " in cell.stderr
        assert cell.html.startswith("<table>")
        assert "import os" in cell.html
        assert "8 tokens, length" in cell.html
        assert cell.text.startswith("RequestOutput(request_id='0', prompt='import os', ")
        assert notebook.run("params").text == "SamplingParams(temperature=0.0, max_tokens=8)"

        # A question.
        cell = notebook.run(
            "answer = llm.chat([{'role': 'user', 'content': 'What is a KV cache?'}], params, use_tqdm=False)\n"
            "print(answer[0].outputs[0].text)"
        )
        assert cell.stdout == "The KV cache stores the keys and\n"
        assert cell.stderr == ""

        # Mistakes: the last line says what is wrong and what to do.
        assert "did you mean 'temperature'" in notebook.run("SamplingParams(temprature=0.5)").error
        assert "temperature must be in [0, 2], got 3" in notebook.run("SamplingParams(temperature=3)").error
        assert "did you mean 'generate'" in notebook.run("llm.genrate('x')").error
        cell = notebook.run("llm.embed('x')")
        assert cell.error == (
            "NotBuilt: LLM.embed is not built: quire generates text; embeddings, scores and classes are not built yet."
        )
        cell = notebook.run("llm.generate('word ' * 5000)")
        assert "This model's maximum context length is 1024 tokens" in cell.error

        # An answer longer than the context: shorter, and said once.
        cell = notebook.run("long = llm.generate(['a', 'a'], SamplingParams(max_tokens=5000, stop=['\\n']))")
        assert (cell.error, cell.stderr.count("the answer can have 1023 tokens, not 5000")) == ("", 1)

        # The stop button: the notebook goes on, nothing is left in the engine. IPython shows the line on standard error
        # when it comes in the middle of its own work.
        cell = notebook.run(
            "import threading\n"
            "threading.Timer(0.3, print, ['go'], {'flush': True}).start()\n"
            "llm.generate(['x'] * 256, SamplingParams(max_tokens=900, ignore_eos=True), use_tqdm=False)",
            interrupt_at="go",
        )
        assert "KeyboardInterrupt" in cell.error + cell.stderr
        assert notebook.run("llm.engine.has_unfinished_requests()").text == "False"

        # A second engine beside the first: the same request, the same tokens.
        cell = notebook.run(
            "other = LLM(max_model_len=256)\n"
            "again = other.generate(['import os', 'def read_lines(path):'], params, use_tqdm=False)\n"
            "print([a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(outputs, again)])\n"
            "other.close()\n"
            "print(llm.generate('import os', params, use_tqdm=False)[0].outputs[0].text == outputs[0].outputs[0].text)"
        )
        assert (cell.error, cell.stdout) == ("", "[True, True]\nTrue\n")
        closed = notebook.run("other.generate('import os', params)").error
        assert closed == "EngineDeadError: the engine was closed; make another one"

        # Tokens as they come, with await in a cell.
        cell = notebook.run(
            "from quire import AsyncLLMEngine, EngineArgs\n"
            "engine = AsyncLLMEngine.from_engine_args(EngineArgs())\n"
            "lengths = [len(o.outputs[0].token_ids) async for o in engine.generate('import os', params)]\n"
            "engine.close()\n"
            "print(lengths[-1], lengths == sorted(lengths))"
        )
        assert (cell.error, cell.stdout) == ("", "8 True\n")
        assert "AsyncLLMEngine.encode is not built" in notebook.run("engine.encode('x')").error

        # The proof: a receipt, replayed by another process.
        cell = notebook.run(
            "from pathlib import Path\n"
            "warm = SamplingParams(temperature=1, max_tokens=12)\n"
            "said = llm.generate('import os', warm, use_tqdm=False)\n"
            "_ = Path('receipt.json').write_text(llm.receipt(said, warm).to_json())"
        )
        assert cell.error == ""
        cell = notebook.run(f"!{sys.executable} -m quire replay receipt.json")
        assert "prompt 0: identical (1 completion, 12 tokens)" in cell.stdout
