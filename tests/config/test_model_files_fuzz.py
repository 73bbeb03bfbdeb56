"""Junk in the files of a model directory: an error of the operator's kind, or a model that works; nothing else."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from quire import EngineArgs
from quire.config.json_file import MAX_JSON_DEPTH, parse_json
from quire.engine.core_startup import create_config
from quire.errors import CheckpointError, ConfigError
from quire.loader.checkpoint import Checkpoint
from quire.loader.safetensors_header import MAX_DIMS, MAX_HEADER_BYTES
from quire.loader.weight_files import MAX_NAME
from quire.tokenizer.tokenizer_files import read_tokenizer_files
from tests.family_configs import FAMILIES

JUNK = [
    *("1" + "0" * 400, "9" * 4300, "-1", "0", "1", "2", "3", "7", "2147483648", "9223372036854775807", "1" * 25),
    *("1e999", "-1e999", "1e-400", "1e-39", "1e39", "0.5", "NaN", "Infinity", "null", "true", "false"),
    *('"x"', '""', '"\\ud800"', '"1e5"', "[]", "[1]", "[1e999]", '["a", "b"]', "{}", '{"a": {}}', '{"rope_type": 5}'),
    *('{"rope_type": "yarn", "factor": 1e999}', '{"rope_type": "llama3", "factor": 8}', "[" * 200 + "]" * 200),
]
KEYS = (
    *("model_type", "architectures", "vocab_size", "hidden_size", "n_embd", "num_attention_heads", "n_head"),
    *("num_key_value_heads", "head_dim", "num_hidden_layers", "n_layer", "max_position_embeddings", "n_positions"),
    *("intermediate_size", "ffn_dim", "n_inner", "word_embed_proj_dim", "rms_norm_eps", "layer_norm_epsilon"),
    *("hidden_act", "activation_function", "tie_word_embeddings", "attention_bias", "mlp_bias", "enable_bias"),
    *("rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "query_pre_attn_scalar"),
    *("sliding_window_pattern", "rope_local_base_freq", "no_rope_layers", "text_config"),
    *("attn_logit_softcapping", "final_logit_softcapping", "dtype", "torch_dtype", "eos_token_id", "bos_token_id"),
    *("quantization_config", "do_layer_norm_before", "layer_norm_elementwise_affine", "scale_attn_weights"),
)
changes = st.dictionaries(st.sampled_from(KEYS), st.sampled_from(JUNK), min_size=1, max_size=3)


def with_values(text: str, values: dict[str, str]) -> str:
    """A JSON object with some values replaced by what stands in `values`, JSON or not."""
    kept = {key: json.dumps(value) for key, value in json.loads(text).items()} | values
    return "{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in kept.items()) + "}"


def complaint_of(read: Callable[[], object]) -> str:
    """What the operator is told; nothing where it works. Any other exception is a failure."""
    try:
        read()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("family", FAMILIES)
def test_junk_in_config_is_a_config_error_or_works(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, family: str
) -> None:
    directory = Path(shutil.copytree(checkpoint(family), tmp_path_factory.mktemp("junk") / "model"))
    text = (directory / "config.json").read_text()

    @seed(zlib.crc32(family.encode()))  # another junk for each: without it all families would see the same
    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(changes)
    def check(values: dict[str, str]) -> None:
        (directory / "config.json").write_text(with_values(text, values))
        assert len(complaint_of(lambda: create_config(EngineArgs(model=str(directory))))) < 1000

    check()


@pytest.mark.parametrize("key", ["architectures", "model_type"])
def test_junk_beside_the_config_of_a_language_model_is_a_config_error(
    checkpoint: Callable[..., Path], tmp_path: Path, key: str
) -> None:
    text = (checkpoint("llama") / "config.json").read_text()
    for junk in JUNK:
        for inner in ("{}", '{"model_type": []}', '{"model_type": "llama"}'):
            others = {"architectures": "null"} if key == "model_type" else {}
            values = {**others, key: junk, "text_config": inner}
            (tmp_path / "config.json").write_text(with_values(text, values))
            assert len(complaint_of(lambda: create_config(EngineArgs(model=str(tmp_path))))) < 1000


@given(st.sampled_from(["temperature", "top_p", "top_k", "max_new_tokens", "eos_token_id"]), st.sampled_from(JUNK))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_junk_in_generation_config_is_a_config_error_or_works(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, name: str, junk: str
) -> None:
    directory = tmp_path_factory.mktemp("junk")
    shutil.copy(checkpoint("llama") / "config.json", directory)
    (directory / "generation_config.json").write_text(with_values("{}", {name: junk}))
    assert len(complaint_of(lambda: create_config(EngineArgs(model=str(directory))))) < 1000


@given(
    st.sampled_from(["added_tokens_decoder", "extra_special_tokens", "bos_token", "eos_token", "x_token"])
    | st.just("chat_template"),
    st.sampled_from([*JUNK, '{"1": {"content": "a"}}', '{"' + "9" * 5000 + '": {"content": "a"}}', '{"-5": {}}']),
)
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_junk_in_tokenizer_config_is_a_config_error_or_works(
    tmp_path_factory: pytest.TempPathFactory, name: str, junk: str
) -> None:
    directory = tmp_path_factory.mktemp("junk")
    (directory / "tokenizer_config.json").write_text(with_values("{}", {name: junk}))
    assert len(complaint_of(lambda: read_tokenizer_files(directory))) < 1000


HEADERS = {
    "digits": '{"a": {"dtype": "F32", "shape": [' + "9" * 4300 + '], "data_offsets": [0, 4]}}',
    "a product of many numbers": '{"a": {"dtype": "F32", "shape": ['
    + ", ".join(["9223372036854775807"] * 100_000)
    + '], "data_offsets": [0, 4]}}',
    "dimensions": '{"a": {"dtype": "F32", "shape": ' + str([1] * (MAX_DIMS + 1)) + ', "data_offsets": [0, 4]}}',
    "nothing times everything": '{"a": {"dtype": "F32", "shape": [0, 4611686018427387904, 4611686018427387904], '
    '"data_offsets": [0, 0]}}',
    "a long name": '{"' + "n" * (MAX_NAME + 1) + '": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
    "a long dtype": '{"a": {"dtype": "' + "F" * 10**6 + '", "shape": [1], "data_offsets": [0, 4]}}',
    "a deep header": '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_hostile_header_is_a_checkpoint_error(tmp_path: Path, name: str) -> None:
    header = HEADERS[name].encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path)
    assert len(str(caught.value)) < 2000


def test_a_header_is_not_read_before_its_length_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        stream.truncate(MAX_HEADER_BYTES + 100)  # a sparse file
    with pytest.raises(CheckpointError, match=f"the limit is {MAX_HEADER_BYTES}"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("junk", JUNK)
def test_junk_in_the_index_is_a_checkpoint_error(tmp_path: Path, junk: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for text in (junk, '{"weight_map": ' + junk + "}", '{"weight_map": {"a": ' + junk + "}}"):
        index.write_text(text)
        with pytest.raises(CheckpointError):
            Checkpoint(tmp_path)


def test_integers_beyond_64_bits_are_no_json_for_us() -> None:
    assert parse_json("[9223372036854775807, -9223372036854775808]") == [2**63 - 1, -(2**63)]
    for text in ("9223372036854775808", "-" + "1" * 20, "1" * 5000):
        with pytest.raises(ValueError, match="beyond 64 bits"):
            parse_json(text)


def test_depth_is_bounded_where_values_are_walked(tmp_path: Path) -> None:
    depth = MAX_JSON_DEPTH + 1
    (tmp_path / "config.json").write_text('{"a": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(ConfigError, match="nested more than"):
        create_config(EngineArgs(model=str(tmp_path)))
