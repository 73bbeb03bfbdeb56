"""How outputs show themselves."""

from __future__ import annotations

from quire import CompletionOutput, RequestOutput

LONG = "word " * 1000


def output(prompt: str | None = LONG, text: str = LONG) -> RequestOutput:
    completion = CompletionOutput(index=0, text=text, token_ids=list(range(1000)), finish_reason="length")
    return RequestOutput("7", prompt, list(range(1000)), [completion], finished=True, warnings=["<cut>"])


def test_a_repr_is_short_whatever_it_holds() -> None:
    shown = repr(output())
    assert len(shown) < 500
    assert "1000 prompt tokens" in shown
    assert "finish_reason='length'" in shown


def test_a_notebook_shows_text_as_text() -> None:
    shown = output(prompt="<script>alert(1)</script>", text="<b>")._repr_html_()
    assert "<script>" not in shown
    assert "<b>" not in shown
    assert "&lt;script&gt;" in shown
    assert "&lt;cut&gt;" in shown


def test_a_prompt_of_token_ids_is_shown_by_its_length() -> None:
    assert "1000 token ids" in output(prompt=None)._repr_html_()
    assert "prompt=None" in repr(output(prompt=None))


def test_a_notebook_shows_one_completion_with_its_whole_text() -> None:
    shown = output(text="<i>first\nsecond " + LONG).outputs[0]._repr_html_()
    assert "&lt;i&gt;first\nsecond" in shown
    assert LONG in shown
    assert "1000 tokens, length" in shown
