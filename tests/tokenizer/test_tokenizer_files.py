import json
from pathlib import Path

import pytest

from quire.errors import TokenizerError
from quire.tokenizer.tokenizer import load_tokenizer
from tests.tokenizer.trained import write_directory


def edit(directory: Path, name: str, **changes: object) -> None:
    path = directory / name
    state = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**state, **changes}), encoding="utf-8")


def test_an_empty_directory_is_named_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json.*tokenizer files there: none.*Download"):
        load_tokenizer(tmp_path)


def test_a_missing_directory_is_an_error_and_not_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path / "nothing")


def test_files_in_a_format_that_is_not_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{}", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json.*save_pretrained"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_tokenizer_json_is_named_with_its_size(share: float, tmp_path: Path) -> None:
    path = write_directory(tmp_path, "byte_level") / "tokenizer.json"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(TokenizerError, match=r"tokenizer\.json \(\d+ bytes\) is damaged: .*Download"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["null", "[]", "7", "{}", '{"model": {}}', '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}', "\0"],
)
def test_a_tokenizer_json_of_another_shape_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    state = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state), encoding="utf-8")
    with pytest.raises(TokenizerError, match="empty vocabulary"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_file_that_is_not_utf8_is_named(name: str, tmp_path: Path) -> None:
    (write_directory(tmp_path, "byte_level") / name).write_bytes(b'{"a": "\xff"}')
    with pytest.raises(TokenizerError, match=rf"{name} .*is damaged: byte 7 is not valid UTF-8"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", "[1]", "holds a list, not an object"),
        ("tokenizer_config.json", "[" * 100_000, "not valid JSON"),
        ("tokenizer_config.json", '{"eos_token": 5}', "eos_token is neither"),
        ("tokenizer_config.json", '{"eos_token": {"special": true}}', "eos_token is neither"),
        ("tokenizer_config.json", '{"extra_special_tokens": 5}', "extra_special_tokens is a int"),
        ("tokenizer_config.json", '{"additional_special_tokens": [5]}', "extra_special_tokens is neither"),
        ("tokenizer_config.json", '{"added_tokens_decoder": []}', "added_tokens_decoder is a list"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "y"}}}', "not a token id"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"5": {}}}', r"added_tokens_decoder\[5\] is neither"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template is a int"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}', "without a name and a template"),
        ("special_tokens_map.json", "nope", "not valid JSON"),
        ("added_tokens.json", "[]", "holds a list"),
    ],
)
def test_a_malformed_file_is_named_with_the_problem(name: str, text: str, problem: str, tmp_path: Path) -> None:
    (write_directory(tmp_path, "byte_level") / name).write_text(text, encoding="utf-8")
    with pytest.raises(TokenizerError, match=problem) as caught:
        load_tokenizer(tmp_path)
    assert name in str(caught.value)


def test_special_tokens_map_is_read_where_the_configuration_lists_no_tokens(tmp_path: Path) -> None:
    edit(write_directory(tmp_path, "byte_level"), "special_tokens_map.json", eos_token="<|im_end|>")
    assert load_tokenizer(tmp_path).eos_token_id == 4


def test_truncation_and_padding_of_tokenizer_json_are_not_applied_to_prompts(tmp_path: Path) -> None:
    write_directory(tmp_path, "byte_level")
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    edit(tmp_path, "tokenizer.json", truncation=truncation)
    assert len(load_tokenizer(tmp_path).encode("a long enough prompt")) > 2


def test_a_chat_template_file_comes_before_the_configuration(tmp_path: Path) -> None:
    write_directory(tmp_path, "byte_level", chat_template="configured")
    assert load_tokenizer(tmp_path).chat_template == "configured"
    (tmp_path / "chat_template.jinja").write_text("from the file", encoding="utf-8")
    assert load_tokenizer(tmp_path).chat_template == "from the file"


def test_named_chat_templates_are_all_kept_and_default_is_the_default(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    loaded = load_tokenizer(write_directory(tmp_path, "byte_level", chat_template=named))
    assert loaded.chat_template == "plain"
    assert loaded.chat_templates == {"default": "plain", "tool_use": "tools"}


def test_additional_chat_template_files_are_found(tmp_path: Path) -> None:
    write_directory(tmp_path, "byte_level")
    (tmp_path / "chat_template.jinja").write_text("plain", encoding="utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("documents", encoding="utf-8")
    assert load_tokenizer(tmp_path).chat_templates == {"default": "plain", "rag": "documents"}


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(write_directory(tmp_path, "byte_level")).chat_template is None


def test_a_setting_that_has_no_effect_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_tokenizer(write_directory(tmp_path, "byte_level", split_special_tokens=True))
    assert "split_special_tokens of tokenizer_config.json has no effect" in caplog.text
