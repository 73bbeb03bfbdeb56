"""Every bad input gets its own answer, and nobody else notices."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import httpx
import pytest

from tests.server.conftest import MODEL, Running

pytestmark = pytest.mark.usefixtures("healthy_neighbours")

CHAT, TEXT, OLLAMA = "/v1/chat/completions", "/v1/completions", "/api/generate"
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
WRITE = {"model": MODEL, "prompt": "hi", "max_tokens": 2}

Request = tuple[str, dict[str, Any]]
"""Path and body."""
Case = tuple[Request, int, str, str | None, str]
"""Request; status, code and param of its answer; how the message starts."""


def chat(**more: Any) -> Request:
    return CHAT, {**ASK, **more}


def text(**more: Any) -> Request:
    return TEXT, {**WRITE, **more}


def without(request: Request, field: str) -> Request:
    path, body = request
    return path, {name: value for name, value in body.items() if name != field}


def wrong(make: Callable[..., Request], field: str, values: Iterable[Any], code: str, start: str) -> list[Case]:
    """One case for each value of a field; @ stands for the field's name."""
    return [(make(**{field: value}), STATUS.get(code, 400), code, field, start.replace("@", field)) for value in values]


def message(place: str, contents: Iterable[dict[str, Any]], code: str, start: str) -> list[Case]:
    """One case for each conversation of a single message; @ stands for the place that is wrong."""
    at = f"messages[0]{place}"
    return [(chat(messages=[content]), 400, code, at, start.replace("@", at)) for content in contents]


def user(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content} for content in contents]


STATUS = {"model_not_found": 404}
VALUE, KIND, LACKS, CONTENT = "invalid_value", "invalid_type", "unsupported_parameter", "unsupported_content"
KINDS = "prompt must be a string, an array of strings, an array of token ids, or an array of arrays of token ids"
TOO_LONG = "This model's maximum context length is 1024 tokens"
LACKING: dict[str, Any] = {
    "guided_json": {},
    "guided_regex": "a",
    "add_special_tokens": True,
    "kv_transfer_params": {},
    "logits_processors": ["x"],
    "mm_processor_kwargs": {"a": 1},
    "modalities": ["audio"],
    "prompt_embeds": "x",
    "vllm_xargs": {"a": 1},
}
BEAMS = partial(chat, use_beam_search=True, beam_width=4)
IMAGES = ("file:///etc/passwd", "http://127.0.0.1:1/x", "data:image/png;base64,!!!")

PROMPTS: list[Case] = [
    *wrong(text, "prompt", ([], [[]], [""], ["a", ""], None), VALUE, "prompt must be provided and non-empty"),
    (without(text(), "prompt"), 400, VALUE, "prompt", "prompt must be provided and non-empty"),
    *wrong(text, "prompt", ([1, "a"], [1.5], {"a": 1}, 5, True, [True]), KIND, KINDS),
    *wrong(text, "prompt", ([-1], [4096], [999999], [2**33], [10**30]), VALUE, "prompt holds"),
    *wrong(text, "prompt", ([[1], [4096]],), VALUE, "prompt 1: prompt holds 4096"),
    *wrong(text, "prompt", ([5] * 1025, "x " * 99999), "context_length_exceeded", TOO_LONG),
    *wrong(text, "prompt", (["a"] * 1025,), VALUE, "The request has 1025 prompts; the limit is 1024."),
    *wrong(partial(text, max_tokens=1024), "truncate_prompt_tokens", (-1,), VALUE, "@=-1 keeps as much of the prompt"),
    *wrong(
        partial(text, max_tokens=None), "min_tokens", (1024,), VALUE, "@=1024 cannot be reached: the context leaves"
    ),
    *wrong(text, "suffix", ("end",), LACKS, "suffix is not supported"),
    *wrong(chat, "truncate_prompt_tokens", (-2, 0), VALUE, "@ must be"),
]
SAMPLING: list[Case] = [
    *wrong(chat, "temperature", (-0.1, 2.1), VALUE, "@ must be in [0, 2]"),
    *wrong(chat, "temperature", ("0.5", True, {}, []), KIND, "@ must be a number"),
    *wrong(chat, "top_k", (-2,), VALUE, "@ must be in [-1"),
    *wrong(chat, "top_k", (1.5, True), KIND, "@ must be an integer"),
    *wrong(chat, "presence_penalty", (3,), VALUE, "@ must be in [-2, 2]"),
    *wrong(chat, "frequency_penalty", (-2.1,), VALUE, "@ must be in [-2, 2]"),
    *wrong(chat, "repetition_penalty", (0, -1, 1e-300), VALUE, "@ must be in [0.001, 1000]"),
    *wrong(chat, "n", (0, -1, 129, 10**9), VALUE, "@ must be an integer between 1 and 128"),
    *wrong(chat, "n", (2.5, True, "2"), KIND, "@ must be an integer"),
    *wrong(chat, "priority", (2**31, -(2**31) - 1, 2**70), VALUE, "@ must be in [-2147483648, 2147483647]"),
    *wrong(text, "priority", (1, -1), VALUE, "@="),
    *wrong(chat, "priority", (1.5, True, "2", [1]), KIND, "@ must be an integer"),
    *wrong(chat, "best_of", (0, -1, 129, 10**9), VALUE, "@ must be an integer between 1 and 128"),
    *wrong(chat, "best_of", (2.5, True, "2"), KIND, "@ must be an integer"),
    *wrong(partial(chat, n=3), "best_of", (2,), VALUE, "@ (2) must not be less than n (3)"),
    *wrong(partial(chat, stream=True), "best_of", (2,), VALUE, "@ cannot be streamed"),
    *wrong(partial(chat, use_beam_search=True), "beam_width", (0, 1, 129), VALUE, "@ must be "),
    *wrong(partial(text, use_beam_search=True, n=1), "beam_width", (None,), VALUE, "@ must be at least 2"),
    *wrong(partial(text, use_beam_search=True), "beam_width", (19,), VALUE, "@=19 with 2 tokens that end a beam"),
    *wrong(chat, "beam_width", (4,), VALUE, "@ needs use_beam_search=True"),
    *wrong(chat, "length_penalty", (2,), VALUE, "@ needs use_beam_search=True"),
    *wrong(chat, "early_stopping", (True, "never"), VALUE, "@ needs use_beam_search=True"),
    *wrong(BEAMS, "length_penalty", (11, -10.5), VALUE, "@ must be in [-10, 10]"),
    *wrong(BEAMS, "early_stopping", ("always", 1), KIND, '@ must be true, false or "never"'),
    *wrong(BEAMS, "use_beam_search", ("yes", 1), KIND, "@ must be true or false"),
    *wrong(BEAMS, "temperature", (0.7, 1), VALUE, "@ must be 0 with use_beam_search"),
    *wrong(BEAMS, "n", (5,), VALUE, "@ (5) must not exceed beam_width (4)"),
    *wrong(BEAMS, "stop", ("a",), LACKS, "@ does not go with use_beam_search"),
    *wrong(BEAMS, "best_of", (5,), LACKS, "@ does not go with use_beam_search"),
    *wrong(BEAMS, "repetition_penalty", (1.1,), LACKS, "@ does not go with use_beam_search"),
    *wrong(partial(text, use_beam_search=True, n=2), "logprobs", (21,), VALUE, "@=21 asks for 21 candidates"),
    *wrong(partial(BEAMS, logprobs=True), "top_logprobs", (21,), VALUE, "@=21 asks for 21 candidates"),
    *wrong(partial(chat, logprobs=True), "top_logprobs", (21, 10**9, -1), VALUE, "@="),
    (chat(use_beam_search=True, n=2, stream=True), 400, VALUE, "use_beam_search", "use_beam_search cannot be streamed"),
    (text(use_beam_search=True, n=2, stream=True), 400, VALUE, "use_beam_search", "use_beam_search cannot be streamed"),
    *wrong(chat, "max_tokens", (0, -5, 10**12), VALUE, "@ must be in [1"),
    *wrong(chat, "max_tokens", (1.5,), KIND, "@ must be an integer"),
    *wrong(text, "max_tokens", (0,), VALUE, "@ must be in [1"),
    *wrong(chat, "max_completion_tokens", (0, -5, 10**12), VALUE, "@ must be in [1"),
    *wrong(partial(chat, max_completion_tokens=3), "min_tokens", (9,), VALUE, "@ (9) must not exceed max_completion_"),
    *wrong(chat, "min_tokens", (9,), VALUE, "@ (9) must not exceed max_tokens (2)"),
    *wrong(chat, "stop", ("", [""]), VALUE, "@ must not contain an empty string"),
    *wrong(chat, "stop", (list("abcde"), "x" * 1_000_000), VALUE, "@ accepts at most 4 strings of at most 256"),
    *wrong(chat, "stop", (5,), KIND, "@ must be a string or an array of strings"),
    *wrong(chat, "stop_token_ids", ([4096], [-1], [2**40]), VALUE, "@ holds"),
    *wrong(chat, "logit_bias", ({"4096": 5}, {"-1": 5}, {"one": 5}, {"": 5}), VALUE, "@"),
    *wrong(chat, "logit_bias", ({str(key): 1 for key in range(1025)},), VALUE, "@ has 1025 entries"),
    *wrong(chat, "bad_words", ([""], ["w"] * 129), VALUE, "@"),
    *wrong(chat, "allowed_token_ids", ([], [4096]), VALUE, "@"),
    *wrong(chat, "top_logprobs", (5,), VALUE, "@ requires logprobs to be true."),
    *wrong(text, "logprobs", (21, -2), VALUE, "@"),
    *wrong(text, "logprobs", (True,), KIND, "@ must be an integer"),
    *wrong(chat, "stream_options", ({"include_usage": True},), VALUE, "@ requires stream=true."),
    *wrong(partial(chat, stream=True), "prompt_logprobs", (1,), VALUE, "@ is not available"),
    *wrong(chat, "seed", (2**64, -(2**63) - 1), VALUE, "@ must be in ["),
    *wrong(chat, "seed", (1.5, "a"), KIND, "@ must be an integer"),
    *wrong(text, "max_completion_tokens", (5,), LACKS, "@ is not supported: its name in this API is max_tokens"),
    *wrong(chat, "stop_sequences", (["a"],), LACKS, "@ is not supported: its name in this API is stop"),
    *wrong(chat, "functions", ([],), LACKS, "@ is not supported: it is an old name; send tools"),
    *(case for name, value in LACKING.items() for case in wrong(chat, name, (value,), LACKS, "@ is not supported: ")),
]
CONVERSATIONS: list[Case] = [
    *wrong(chat, "messages", ([],), VALUE, "@ must contain at least 1 item."),
    *wrong(chat, "messages", (5,), KIND, "@ must be an array"),
    (
        without(chat(), "messages"),
        400,
        "missing_required_parameter",
        "messages",
        "Missing required parameter: 'messages'",
    ),
    (chat(messages=["hi"]), 400, KIND, "messages[0]", "messages[0] must be an object"),
    *message(".role", [{"role": "wizard"}, {"role": None}, {"content": "a"}], VALUE, "@ must be one of system"),
    *message(".content", user(None, 5, {}), VALUE, "@ must be a string"),
    (chat(messages=user("\ud800")), 400, "invalid_unicode", None, "The request body contains an unpaired surrogate"),
    (chat(metadata={"a": "\udc00"}), 400, "invalid_unicode", None, "The request body contains an unpaired surrogate"),
    (chat(metadata={"\ud800": 1}), 400, "invalid_unicode", None, "The request body contains an unpaired surrogate"),
    *message(".content[0]", user([{"type": "video_magic"}]), CONTENT, "Unsupported content part type 'video_magic'"),
    *message(".content[0].text", user([{"type": "text"}]), VALUE, "@ must be a string"),
    *message(
        ".content[0]", user(*([{"type": "image_url", "image_url": {"url": url}}] for url in IMAGES)), CONTENT, "Unsupp"
    ),
    *wrong(chat, "model", ("nope",), "model_not_found", f"The model `nope` does not exist. Available: {MODEL}."),
    *wrong(chat, "model", ("", None), "model_not_found", "The model `"),
    *wrong(chat, "model", (5,), KIND, "@ must be a string"),
    *wrong(chat, "model", ("m" * 1_000_000,), VALUE, "@ is refused"),
    *wrong(chat, "chat_template", ("{{ ''.__class__ }}",), VALUE, "@ in the request is disabled"),
    *wrong(chat, "chat_template_kwargs", ({"tokenize": True}, {"messages": []}), VALUE, "@ may not set: "),
    *wrong(chat, "chat_template_kwargs", ([],), KIND, "@ must be an object"),
    *wrong(partial(chat, add_generation_prompt=True), "continue_final_message", (True,), VALUE, "Cannot set both"),
    *wrong(chat, "tools", ([],), VALUE, "@ must have 1 to 128 items"),
    *wrong(chat, "tool_choice", ("required", "x", {"type": "function"}), VALUE, "@ requires tools"),
    *wrong(chat, "thinking_token_budget", (5,), LACKS, "@ is not supported here"),
    *wrong(chat, "thinking_token_budget", (-2,), VALUE, "@ must be in [-1, "),
    *wrong(text, "include_reasoning", (False,), LACKS, "@ is not supported: "),
    *wrong(text, "tools", ([{"type": "function"}],), LACKS, "@ is not supported: "),
    *wrong(text, "tool_choice", ("required",), LACKS, "@ is not supported: "),
    *wrong(chat, "cache_salt", ("", "s" * 129), VALUE, "@ must be a non-empty string of at most 128 characters."),
    *wrong(chat, "cache_salt", (5,), KIND, "@ must be a string"),
    *wrong(chat, "user", ("u" * 1_000_000,), VALUE, "@ has 1000000 characters"),
]
OTHERS: list[Case] = [
    (("/tokenize", {}), 400, "missing_required_parameter", "prompt", "Give either prompt or messages."),
    (("/detokenize", {"tokens": [4096]}), 400, VALUE, "tokens", "tokens holds 4096"),
    (("/detokenize", {}), 400, "missing_required_parameter", "tokens", "Missing required parameter: 'tokens'."),
    (("/nope", {}), 404, "not_found", None, "Unknown route POST '/nope'."),
    (
        ("/v1/completion", {}),
        404,
        "not_found",
        None,
        "Unknown route POST '/v1/completion'. Did you mean /v1/",
    ),
    (("/v1//completions", {}), 404, "not_found", None, "Unknown route"),
    (("/v1/models", {}), 405, "method_not_allowed", None, "Method Not Allowed: /v1/models takes GET, not POST."),
]


def check(reply: httpx.Response, status: int, code: str, param: str | None, start: str) -> None:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert len(reply.content) < 8192
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert (error["code"], error["param"]) == (code, param)
    assert error["message"].startswith(start), error["message"]
    assert not any(word in error["message"] for word in ("429", "Traceback", "0x", ".py", "/work", "/home", "pydantic"))


@pytest.mark.parametrize(("request_", "status", "code", "param", "start"), PROMPTS + SAMPLING + CONVERSATIONS + OTHERS)
def test_bad_input_is_answered(
    server: Running, request_: Request, status: int, code: str, param: str | None, start: str
) -> None:
    path, body = request_
    reply = server.client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    check(reply, status, code, param, start)


@pytest.mark.parametrize(
    ("path", "more", "start"),
    [
        ("/v1/messages", {"max_tokens": 2, "stop_sequences": [""]}, "stop_sequences must not contain an empty string"),
        ("/v1/messages", {"max_tokens": 2, "stop_sequences": ["a"] * 5}, "stop_sequences accepts at most 4 strings"),
        ("/v1/messages", {"max_tokens": 2, "n": 2}, "n is not supported: /v1/completions and /v1/chat/completions"),
        ("/v1/responses", {"max_output_tokens": 0}, "max_output_tokens must be in [1"),
        (
            "/v1/responses",
            {"max_output_tokens": 3, "min_tokens": 9},
            "min_tokens (9) must not exceed max_output_tokens",
        ),
        ("/v1/responses", {"max_tokens": 5}, "max_tokens is not supported: its name in this API is max_output_tokens"),
        ("/api/chat", {"max_tokens": 5}, "max_tokens is not supported: its name in this API is options.num_predict"),
    ],
)
def test_fields_have_the_names_of_the_api_that_was_asked(
    server: Running, path: str, more: dict[str, Any], start: str
) -> None:
    said = {"input": "hi"} if path == "/v1/responses" else {"messages": ASK["messages"]}
    reply = server.post(path, model=MODEL, **said, **more)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error if isinstance(error, str) else error["message"]).startswith(start)


@pytest.mark.parametrize(
    ("content", "code", "start"),
    [
        (
            b'{"n":1,}',
            "invalid_json",
            "Could not parse JSON: Expecting property name enclosed in double quotes at byte 7",
        ),
        (b"{'a':1}", "invalid_json", "Could not parse JSON: "),
        (b'{"prompt": "a', "invalid_json", "Could not parse JSON: "),
        (b'{"prompt": "\xff"}', "invalid_json", "Request body is not valid UTF-8"),
        (b"[" * 100_000, "invalid_json", "JSON is nested too deeply (limit 64)."),
        (b'{"a":' + b"[" * 65 + b"]" * 65 + b"}", "invalid_json", "JSON is nested too deeply (limit 64)."),
        (b'{"n": 1, "n": 3}', "invalid_json", "Duplicate key 'n'."),
        (b'{"temperature": NaN, "prompt": "a"}', "invalid_json", "NaN is not JSON"),
        (b'{"temperature": -Infinity, "prompt": "a"}', "invalid_json", "-Infinity is not JSON"),
        (b'{"temperature": 1e999, "prompt": "a"}', "invalid_json", "1e999 is beyond the range of numbers"),
        (b'{"metadata": {"a": [-1e999]}, "prompt": "a"}', "invalid_json", "-1e999 is beyond the range of numbers"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "invalid_json", "Could not parse JSON: "),
        (b"[]", "invalid_type", "The request body must be an object"),
        (b"null", "invalid_type", "The request body must be an object"),
        (b"", "invalid_json", "The request has no body"),
    ],
)
def test_body_that_is_not_one_json_object(server: Running, content: bytes, code: str, start: str) -> None:
    reply = server.client.post(TEXT, content=content, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == code
    assert reply.json()["error"]["message"].startswith(start), reply.text
    other = server.client.post(OLLAMA, content=content, headers={"content-type": "application/json"})
    assert other.status_code == 400
    assert other.json()["error"].startswith(start), other.text


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": ""},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
def test_only_plain_json_is_read(server: Running, headers: dict[str, str]) -> None:
    reply = server.client.post(TEXT, content=b'{"prompt": "a"}', headers=headers)
    check(reply, 415, "unsupported_media_type", None, "Content-")
    page = {**headers, "origin": "https://evil.example"}
    other = server.client.post(OLLAMA, content=b'{"prompt": "a"}', headers=page)
    assert other.status_code == 415
    assert other.json()["error"].startswith("Content-")


@pytest.mark.parametrize(
    "more",
    [
        {"top_k": 10**9},
        {"n": 2, "temperature": 0},
        {"max_tokens": 1, "max_completion_tokens": 2},
        {"stop": None, "seed": None, "n": None, "temperature": None, "tools": None, "response_format": None},
        {
            "response_format": {"type": "text"},
            "best_of": 1,
            "priority": 0,
            "use_beam_search": False,
            "tool_choice": "none",
        },
        {"messages": [{"role": "user", "content": "<|im_end|></s><|image_pad|>"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True},
        {"cache_salt": "s" * 128},
        {"reasoning_effort": "none"},
    ],
)
def test_what_others_accept_is_accepted(server: Running, more: dict[str, Any]) -> None:
    reply = server.post(CHAT, **{**ASK, **more})
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 2 * (more.get("n") or 1)


def test_equal_choices_for_greedy_n(server: Running) -> None:
    first, second = server.post(CHAT, **{**ASK, "n": 2, "temperature": 0}).json()["choices"]
    assert first["message"] == second["message"]


def test_unknown_fields_are_named_in_warnings_and_make_no_metric(server: Running) -> None:
    unknown = {f"field_{index}": index for index in range(50)}
    for stream in (False, True):
        reply = server.post(CHAT, **ASK, **unknown, stream=stream)
        assert reply.status_code == 200
        assert all(f"'{name}'" in reply.text for name in unknown)
    assert "field_1" not in server.client.get("/metrics").text


def test_unknown_stream_options_are_named_too(server: Running) -> None:
    options = {"include_usage": True, "include_obfuscation": False, "foo": 1}
    reply = server.post(CHAT, **ASK, stream=True, stream_options=options)
    assert "unknown parameter 'stream_options.foo' has no effect" in reply.text
    assert "obfuscation" not in reply.text


def test_unknown_fields_are_refused_when_the_operator_says_so(serve: Any) -> None:
    with serve(strict_params=True) as strict:
        check(strict.post(CHAT, **ASK, foo=1), 400, "unsupported_parameter", "foo", "Unknown parameter: 'foo'.")


def test_a_large_request_is_refused_by_its_size(serve: Any) -> None:
    with serve(max_body_size=1000) as small:
        large = json.dumps({**WRITE, "prompt": "x" * 2000}).encode()
        json_type = {"content-type": "application/json"}
        for content in (large, iter([large[:900], large[900:]])):
            reply = small.client.post(TEXT, content=content, headers=json_type)
            check(reply, 413, "content_too_large", None, "The request body has")
            assert reply.headers["connection"] == "close"


def test_a_client_cannot_choose_what_requests_are_called_inside(server: Running) -> None:
    replies = [
        server.client.post(TEXT, json=WRITE, headers={"x-request-id": given})
        for given in ("same", "same", "x" * 10_000, "a\tb c/../../d")
    ]
    assert [reply.headers["x-request-id"] for reply in replies] == ["same", "same", "x" * 64, "abc....d"]
    assert len({reply.json()["id"] for reply in replies}) == 4
