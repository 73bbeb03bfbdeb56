"""Check an installed quire: it is not a checkout's, knows its version, answers with the embedded model.

python tools/check_install.py [--kernels]

With `--kernels` the native kernels must be there and run.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import quire
from quire import LLM, SamplingParams
from quire.ops.cpu import library

CHECKOUT = Path(__file__).parents[1]


def main(arguments: list[str]) -> None:
    """Print what was found. Raises: AssertionError naming what is wrong."""
    home = Path(quire.__file__).parent
    assert home.parent != CHECKOUT, f"this is the checkout's quire, not an installed one: {home}"
    assert quire.__version__ == metadata.version("quire"), (quire.__version__, metadata.version("quire"))
    problem = library.unavailable_reason()
    assert problem is None or "--kernels" not in arguments, problem
    with LLM() as llm:
        answer = llm.generate("import os", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0].outputs[0]
    assert len(answer.token_ids) == 8, answer
    print(f"quire {quire.__version__} in {home}, kernels: {problem or library.isa()}, answer: {answer.text!r}")


if __name__ == "__main__":
    main(sys.argv[1:])
