"""The official Ollama client, unmodified, over a real socket; and what Open WebUI and other clients send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest

from tests.server.conftest import MODEL, TIMEOUT, Running, Serve, stand_in, wait_for

QUESTION: Any = [{"role": "user", "content": "What is a KV cache?"}]
GREEDY = {"temperature": 0, "num_predict": 8}
LONG = {"temperature": 0, "repeat_penalty": 1, "num_predict": 900}
"""With the prompt "import os", which then has no end."""
ANSWER = "The KV cache stores the keys and"
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url, timeout=TIMEOUT) as made:
        yield made


def chat(client: ollama.Client, **more: Any) -> Any:
    return client.chat(**{"model": MODEL, "messages": QUESTION, "options": GREEDY, **more})


def generate(client: ollama.Client, **more: Any) -> Any:
    return client.generate(**{"model": MODEL, "prompt": "What is a KV cache?", "options": GREEDY, **more})


@pytest.mark.parametrize("ask", [chat, generate])
def test_a_reply_has_every_field_clients_read(client: ollama.Client, ask: Any) -> None:
    reply = ask(client)
    assert (reply.message.content if ask is chat else reply.response) == ANSWER
    assert (reply.model, reply.done, reply.done_reason) == (MODEL, True, "length")
    assert reply.eval_count == 8
    assert reply.prompt_eval_count > 8
    assert reply.load_duration == 0
    parts = reply.prompt_eval_duration + reply.eval_duration
    assert 0 < reply.eval_duration < parts <= reply.total_duration
    assert reply.created_at.endswith("Z")


@pytest.mark.parametrize("ask", [chat, generate])
def test_a_stream_is_the_whole_reply(client: ollama.Client, ask: Any) -> None:
    *pieces, last = list(ask(client, stream=True))
    texts = [piece.message.content if ask is chat else piece.response for piece in pieces]
    assert "".join(texts) == ANSWER
    assert all(texts)
    assert not any(piece.done for piece in pieces)
    assert (last.done, last.done_reason, last.eval_count) == (True, "length", 8)
    assert all(getattr(piece, name) is None for piece in pieces for name in DURATIONS)
    assert all(getattr(last, name) is not None for name in DURATIONS)


def test_the_asynchronous_client(server: Running) -> None:
    async def ask() -> tuple[str, str]:
        client = ollama.AsyncClient(host=server.url, timeout=TIMEOUT)
        whole = await client.chat(MODEL, QUESTION, options=GREEDY)
        pieces = [piece async for piece in await client.chat(MODEL, QUESTION, options=GREEDY, stream=True)]
        await client.close()
        return whole.message.content or "", "".join(piece.message.content or "" for piece in pieces)

    assert asyncio.run(ask()) == (ANSWER, ANSWER)


SAMPLED = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 7}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.25}


@pytest.mark.parametrize("options", [{}, SAMPLED, PENALTIES, {"repeat_penalty": 1.3}, {"stop": ["keys", "cache"]}])
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_those_of_the_other_apis(
    server: Running, client: ollama.Client, options: dict[str, Any], stream: bool
) -> None:
    given = {"seed": 3, **options}
    same = {"repetition_penalty" if name == "repeat_penalty" else name: value for name, value in given.items()}

    def text(reply: Any, field: str) -> str:
        parts = list(reply) if stream else [reply]
        return "".join(part.message.content if field == "message" else part[field] for part in parts)

    limited = {**given, "num_predict": 24}
    body = {"messages": QUESTION, "max_tokens": 24, **same}
    wanted = server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]
    assert text(chat(client, options=limited, stream=stream), "message") == wanted
    assert text(generate(client, options=limited, stream=stream), "response") == wanted
    plain = {"prompt": "import os", "max_tokens": 24, **same}
    wanted = server.post("/v1/completions", **plain).json()["choices"][0]["text"]
    raw = generate(client, prompt="import os", raw=True, options=limited, stream=stream)
    assert text(raw, "response") == wanted


@pytest.mark.parametrize("num_predict", [None, -1, -2])
def test_without_a_limit_the_answer_ends_by_itself(client: ollama.Client, num_predict: int | None) -> None:
    reply = chat(client, options={"temperature": 0} | ({} if num_predict is None else {"num_predict": num_predict}))
    assert reply.done_reason == "stop"
    assert reply.message.content.startswith(ANSWER)


def test_a_system_prompt_is_the_first_message(client: ollama.Client) -> None:
    system = {"role": "system", "content": "Be brief."}
    both = generate(client, system="Be brief."), chat(client, messages=[system, *QUESTION])
    assert both[0].prompt_eval_count == both[1].prompt_eval_count
    assert both[0].response == both[1].message.content


def test_a_last_message_of_the_assistant_is_continued(client: ollama.Client) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "The KV cache"}]
    reply = chat(client, messages=begun, options={**GREEDY, "num_predict": 5})
    assert "The KV cache" + reply.message.content == ANSWER


def test_a_message_without_content_is_an_empty_one(server: Running, client: ollama.Client) -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}, *QUESTION]
    tokens = server.post("/tokenize", messages=said).json()["count"]
    assert chat(client, messages=said).prompt_eval_count == tokens  # the client leaves the empty content out


def test_messages_of_tools_are_text_of_the_conversation(server: Running, client: ollama.Client) -> None:
    call = {"name": "f", "arguments": {"a": 1}}
    asked = {"role": "assistant", "tool_calls": [{"function": call}]}
    wanted = [*QUESTION, {**asked, "content": ""}, {"role": "tool", "name": "f", "content": "5"}]
    sent = [*QUESTION, asked, {"role": "tool", "tool_name": "f", "content": "5"}]
    tokens = server.post("/tokenize", messages=wanted).json()["count"]
    assert chat(client, messages=sent).prompt_eval_count == tokens


def test_logprobs_are_those_of_chat_completions(server: Running, client: ollama.Client) -> None:
    body = {"messages": QUESTION, "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    wanted = server.post("/v1/chat/completions", **body).json()["choices"][0]["logprobs"]["content"]
    whole = chat(client, logprobs=True, top_logprobs=2).logprobs
    streamed = [
        entry for part in chat(client, logprobs=True, top_logprobs=2, stream=True) for entry in part.logprobs or ()
    ]
    for found in (whole, streamed):
        assert [(entry.token, entry.logprob) for entry in found] == [(one["token"], one["logprob"]) for one in wanted]
        assert [len(entry.top_logprobs) for entry in found] == [2] * 8


@pytest.mark.parametrize("name", [MODEL, f"{MODEL}:latest"])
def test_a_model_is_found_with_its_tag_and_without(client: ollama.Client, name: str) -> None:
    assert chat(client, model=name).model == name
    assert client.show(name).modelfile == f"FROM {name}\n"


def test_the_names_that_are_listed_can_be_asked(serve: Any) -> None:
    with serve(served_model_name=("org/model", "org/model:7b", "a:latest")) as named:
        client = ollama.Client(host=named.url, timeout=TIMEOUT)
        listed = [model.model or "" for model in client.list().models]
        assert listed == ["org/model:latest", "org/model:7b", "a:latest"]
        assert [chat(client, model=name).model for name in listed] == listed
        assert chat(client, model="org/model").model == "org/model"
        for unknown in ("org/model:8b", "a", "org/model:latest:latest"):
            with pytest.raises(ollama.ResponseError, match="does not exist"):
                chat(client, model=unknown)
        client.close()


def test_the_model_is_described(server: Running, client: ollama.Client) -> None:
    (listed,), (loaded,) = client.list().models, client.ps().models
    assert listed.model == loaded.model == f"{MODEL}:latest"
    assert listed.digest == loaded.digest
    assert len(listed.digest or "") == 64
    assert listed.size is not None
    assert 10 << 20 < listed.size < 20 << 20
    limit = server.engine.config.model_config.max_model_len
    assert loaded.context_length == limit
    assert loaded.expires_at is not None
    shown = client.show(MODEL)
    assert shown.details is not None
    assert shown.details.parameter_size == "7.0M"
    assert shown.details.quantization_level == "BF16"
    assert shown.modelinfo is not None
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == limit
    assert shown.capabilities == ["completion", "tools"]
    assert shown.parameters is not None
    assert "temperature 0.7" in shown.parameters.splitlines()
    assert "messages" in (shown.template or "")


@pytest.mark.parametrize("ask", [chat, generate])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_asks_nothing_finds_the_model_loaded(client: ollama.Client, ask: Any, stream: bool) -> None:
    nothing = {"messages": []} if ask is chat else {"prompt": ""}
    reply = ask(client, **nothing, stream=stream)
    (last,) = list(reply) if stream else [reply]
    assert (last.done, last.done_reason, last.eval_count) == (True, "load", None)


IMAGE = "iVBORw0KGgo="
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (chat, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name must be"),
    (chat, {"messages": [{"role": "user", "content": "a", "images": [IMAGE]}]}, "messages[0].images is not supported"),
    (chat, {"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role "),
    (generate, {"images": [IMAGE]}, "images is not supported: this model takes text only"),
    (generate, {"suffix": "b"}, "suffix is not supported: "),
    (generate, {"template": "{{ .Prompt }}"}, "template in the request is disabled"),
    (generate, {"context": [1, 2]}, "context is not supported: send the conversation to /api/chat"),
    (generate, {"raw": True, "system": "a"}, "raw sends the prompt as it is"),
]
for _ask in (chat, generate):
    REFUSED += [
        (_ask, {"format": {"not": {}}}, "format: '#/not': not is not supported"),
        (_ask, {"think": True}, "think: this model's thinking cannot be told"),
        (_ask, {"think": "high"}, "think: this model's thinking cannot be told"),
        (_ask, {"keep_alive": "soon"}, "keep_alive must be a duration such as 5m or 300"),
        (_ask, {"top_logprobs": 2}, "top_logprobs requires logprobs"),
        (_ask, {"logprobs": True, "top_logprobs": 21}, "top_logprobs must be between 0 and 20, got 21"),
        (_ask, {"options": {"num_ctx": 4096}}, "num_ctx must be in [1, 1024], the context of this server; got 4096"),
        (_ask, {"options": {"num_ctx": 0}}, "num_ctx must be in [1, 1024]"),
        (_ask, {"options": {"num_predict": 0}}, "num_predict must be in [1, "),
        (_ask, {"options": {"num_predict": -3}}, "num_predict must be in [1, "),
        (_ask, {"options": {"temperature": 3}}, "temperature must be in [0, 2], got 3"),
        (_ask, {"options": {"temperature": "hot"}}, "options.temperature must be a number; got 'hot'"),
        (_ask, {"options": {"repeat_penalty": 0}}, "repeat_penalty must be in [0.001, 1000], got 0"),
        (_ask, {"options": {"mirostat": 2}}, "mirostat is not supported: "),
        (_ask, {"options": {"typical_p": 0.5}}, "typical_p is not supported: "),
        (_ask, {"options": {"tfs_z": 0.5}}, "tfs_z is not supported: "),
        (_ask, {"options": {"repeat_last_n": 64}}, "repeat_last_n is not supported: "),
        (_ask, {"options": {"stop": ["a"] * 5}}, "stop accepts at most 4 strings"),
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("ask", "more", "start"), REFUSED)
def test_what_cannot_be_honoured_is_refused(
    client: ollama.Client, ask: Any, more: dict[str, Any], start: str, stream: bool
) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        list(ask(client, **more, stream=stream))
    assert caught.value.error.startswith(start)
    assert caught.value.status_code == 400


def test_an_unknown_model_is_not_found(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="The model `nope` does not exist") as caught:
        chat(client, model="nope")
    assert caught.value.status_code == 404


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda client: client.embed(MODEL, "a"), "/api/embed is not supported. Embeddings"),
        (lambda client: client.embeddings(MODEL, "a"), "/api/embeddings is not supported. Embeddings"),
        (lambda client: client.pull("a"), "/api/pull is not supported. This server has one model"),
        (lambda client: list(client.pull("a", stream=True)), "/api/pull is not supported. This server has one model"),
        (lambda client: client.push("a"), "/api/push is not supported. This server has one model"),
        (lambda client: client.create("a", from_="b"), "/api/create is not supported. This server has one model"),
        (lambda client: client.copy("a", "b"), "/api/copy is not supported. This server has one model"),
        (lambda client: client.delete("a"), "/api/delete is not supported. This server has one model"),
        (lambda client: client.create_blob(__file__), "/api/blobs is not supported. This server has one model"),
    ],
)
def test_what_is_not_built_says_so(client: ollama.Client, call: Any, words: str) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        call(client)
    assert caught.value.error.startswith(words)
    assert caught.value.status_code == 400


NEUTRAL = {
    "format": "",
    "think": False,
    "keep_alive": -1,
    "tools": [],
    "options": {**GREEDY, "mirostat": 0, "typical_p": 1.0, "tfs_z": 1, "repeat_last_n": -1, "num_ctx": 1024},
}


def test_values_that_ask_for_what_happens_anyway_are_no_mistake(server: Running) -> None:
    reply = server.post("/api/chat", messages=QUESTION, stream=False, **NEUTRAL).json()
    assert reply["message"]["content"] == ANSWER
    assert "warnings" not in reply


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("more", "warning"),
    [
        ({"options": {**GREEDY, "num_gpu": 1}}, "unknown parameter 'options.num_gpu' has no effect"),
        (
            {"options": {**GREEDY, "num_ctx": 512}},
            "num_ctx=512 has no effect: the context of this server has 1024 tokens",
        ),
        ({"truncate": True}, "unknown parameter 'truncate' has no effect"),
        ({"keep_alive": "1h30m"}, "keep_alive has no effect: the model stays loaded as long as the server runs"),
        ({"keep_alive": 0}, "keep_alive has no effect: the model stays loaded as long as the server runs"),
    ],
)
def test_what_has_no_effect_is_said_once(server: Running, more: dict[str, Any], warning: str, stream: bool) -> None:
    for path, ask in (("/api/chat", {"messages": QUESTION}), ("/api/generate", {"prompt": "a"})):
        reply = server.post(path, **{**ask, "options": GREEDY, **more, "stream": stream})
        parts = [json.loads(part) for part in reply.text.splitlines()]
        assert [part["warnings"] for part in parts if "warnings" in part] == [[warning]]
    assert server.post("/api/generate", prompt="", keep_alive=0).json()["done_reason"] == "load"


def test_unknown_options_are_refused_where_the_operator_is_strict(serve: Any) -> None:
    with serve(strict_params=True) as strict:
        reply = strict.post("/api/chat", messages=QUESTION, options={**GREEDY, "num_gpu": 1})
        assert reply.status_code == 400
        assert reply.json() == {"error": "Unknown parameter: 'num_gpu'."}


def test_a_template_is_taken_from_a_request_where_the_operator_trusts_it(serve: Any) -> None:
    with serve(trust_request_chat_template=True) as trusting:
        ask = {"prompt": "hi", "template": "<{{ messages[0].content }}>", "options": GREEDY, "stream": False}
        count = trusting.post("/tokenize", prompt="<hi>").json()["count"]
        assert trusting.post("/api/generate", **ask).json()["prompt_eval_count"] == count


def test_an_api_key_is_sent_as_a_bearer_token(serve: Any) -> None:
    with serve(api_key=("a-key",)) as guarded:
        with_key = ollama.Client(host=guarded.url, headers={"Authorization": "Bearer a-key"}, timeout=TIMEOUT)
        assert chat(with_key).message.content == ANSWER
        without = ollama.Client(host=guarded.url, timeout=TIMEOUT)
        for call in (without.list, without.ps, lambda: chat(without), lambda: without.pull("a")):
            with pytest.raises(ollama.ResponseError, match="No API key given"):
                call()
        assert guarded.client.head("/").status_code == 200
        with_key.close()
        without.close()


def test_the_console_stays_at_the_root(server: Running) -> None:
    assert server.client.head("/").status_code == 200
    assert server.client.get("/").headers["content-type"].startswith("text/html")


def test_a_stream_that_stands_still_stays_readable(serve: Any) -> None:
    with serve(sse_keep_alive_interval=1) as chatty, stand_in(chatty) as held:
        body = {"messages": QUESTION, "options": GREEDY}
        with chatty.client.stream("POST", "/api/chat", json=body) as reply:
            assert reply.headers["content-type"] == "application/x-ndjson"
            pieces = reply.iter_raw()
            assert next(pieces) == b" "
            held.may_go.set()
            lines = b"".join([b" ", *pieces]).decode().splitlines()
        parts = [json.loads(text) for text in lines]
    assert "".join(part["message"]["content"] for part in parts) == ANSWER
    assert parts[-1]["done"] is True


def test_clients_raise_what_a_stream_says(server: Running, client: ollama.Client) -> None:
    with stand_in(server) as executor:
        executor.may_go.set()
        pieces = generate(client, prompt="import os", raw=True, stream=True, options=LONG)
        next(pieces)
        executor.error = RuntimeError("out of order")
        with pytest.raises(ollama.ResponseError, match="The request failed while it ran"):
            list(pieces)
    server.wait_idle()


def test_a_session_as_ollamas_command_line_has_it(server: Running) -> None:
    """What `ollama run` sends, empty fields included."""
    with httpx.Client(base_url=server.url, timeout=TIMEOUT) as http:
        assert http.head("/").status_code == 200
        show = {"model": MODEL, "system": "", "template": "", "verbose": False, "options": None, "name": MODEL}
        assert http.post("/api/show", json=show).json()["details"]["family"]
        empty = {"suffix": "", "system": "", "template": "", "options": None, "format": "", "images": None}
        load = http.post("/api/generate", json={"model": MODEL, "prompt": "", **empty})
        assert load.json()["done_reason"] == "load"
        ask = {"model": MODEL, "prompt": "What is a KV cache?", **empty, "options": GREEDY, "raw": False}
        parts = [json.loads(text) for text in http.post("/api/generate", json=ask).text.splitlines()]
        assert "".join(part["response"] for part in parts) == ANSWER
        assert not any("warnings" in part for part in parts)


def test_a_session_as_open_webui_has_it(serve: Any) -> None:
    headers = {"Content-Type": "application/json"}
    with (
        serve(sse_keep_alive_interval=1) as server,  # which tells that a reader has left while no token comes
        httpx.Client(base_url=server.url, headers=headers, timeout=TIMEOUT) as http,
    ):
        version = http.get("/api/version").json()["version"]
        assert tuple(map(int, version.split("."))) >= (0, 6, 4)
        (model,) = http.get("/api/tags").json()["models"]
        assert http.get("/api/ps").json()["models"][0]["model"] == model["model"]
        assert http.post("/api/show", json={"name": model["model"]}).json()["model_info"]
        body = {"model": model["model"], "messages": QUESTION, "stream": True, "options": {}, "keep_alive": "5m"}
        with http.stream("POST", "/api/chat", json=body) as reply:
            parts = [json.loads(text) for text in reply.iter_lines()]
        assert "".join(part["message"]["content"] for part in parts).startswith("The KV cache")
        title = {**body, "stream": False, "options": {"num_predict": 8}}
        assert http.post("/api/chat", json=title).json()["done"] is True
        aborted = {"model": model["model"], "prompt": "import os", "raw": True, "options": LONG}
        with stand_in(server) as executor:
            executor.may_go.set()
            with http.stream("POST", "/api/generate", json=aborted) as reply:
                assert json.loads(next(reply.iter_lines()))["done"] is False
                executor.may_go.clear()
                assert server.engine.num_unfinished == 1
            wait_for(lambda: server.engine.num_unfinished == 0)
        server.wait_idle()
        unload = http.post("/api/generate", json={"model": model["model"], "prompt": "", "keep_alive": 0})
        assert unload.status_code == 200


CALL = {"name": "f", "parameters": {"city": "Oslo", "days": [1, 2]}}
FORMAT = {"const": CALL}
"""What makes the model write that call, as Llama 3 does: whether it takes it for an answer or for a call."""
ARGUMENTS = {"city": {"type": "string"}, "days": {"type": "array"}}


@pytest.mark.parametrize("stream", [False, True])
def test_calls_come_whole_and_their_results_go_back(serve: Serve, stream: bool) -> None:
    with serve(tool_call_parser="llama3_json") as running, ollama.Client(host=running.url, timeout=TIMEOUT) as client:
        schema = {"type": "object", "properties": ARGUMENTS, "required": list(ARGUMENTS)}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        given: dict[str, Any] = {"options": {"num_predict": 200, "seed": 1}, "tools": [tool], "format": FORMAT}
        reply = chat(client, **given, stream=stream)
        parts = list(reply) if stream else [reply]
        calls = [call for part in parts for call in part.message.tool_calls or ()]
        assert [(call.function.name, list(call.function.arguments)) for call in calls] == [("f", list(ARGUMENTS))]
        assert "".join(part.message.content or "" for part in parts) == ""
        history = [*QUESTION, {"role": "assistant", "tool_calls": [calls[0].model_dump()]}]
        history += [{"role": "tool", "tool_name": "f", "content": "Rain."}]
        assert chat(client, messages=history, tools=[TOOL]).done


MOVED = {"to": "north west", "by": 7}
FIXED = {"type": "object", "properties": {name: {"enum": [value]} for name, value in MOVED.items()}}
MOVE = {"type": "function", "function": {"name": "move", "parameters": {**FIXED, "required": list(MOVED)}}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "is_whole"),
    [({}, True), ({"stop": ["</tool_call>"]}, True), ({"stop": [" west"]}, False), ({"num_predict": 40}, False)],
)
def test_a_call_that_is_cut_is_left_out(server: Running, options: dict[str, Any], is_whole: bool, stream: bool) -> None:
    """Clients run every call they find."""
    question = [{"role": "user", "content": "What is 12 times 7?"}]
    options = {"temperature": 0, "num_predict": 200, **options}
    reply = server.post("/api/chat", model=MODEL, messages=question, tools=[MOVE], options=options, stream=stream)
    parts = [json.loads(part) for part in reply.text.splitlines()]
    calls = [call["function"] for part in parts for call in part["message"].get("tool_calls", ())]
    warnings = [warning for part in parts for warning in part.get("warnings", ())]
    assert calls == ([{"name": "move", "arguments": MOVED}] if is_whole else [])
    assert ["the call of move is left out" in warning for warning in warnings] == ([] if is_whole else [True])
    assert parts[-1]["done_reason"] == ("length" if options["num_predict"] < 200 else "stop")


@pytest.mark.parametrize("think", [None, True, False])
def test_thinking_is_told_from_the_answer(serve: Serve, think: bool | None) -> None:
    with serve(reasoning_parser="deepseek_r1") as running, ollama.Client(host=running.url, timeout=TIMEOUT) as client:
        for ask in (chat, generate):
            whole = ask(client, think=think)
            parts = list(ask(client, think=think, stream=True))
            found = [part.message if ask is chat else part for part in (whole, *parts)]
            thoughts = ["".join(one.thinking or "" for one in some) for some in (found[:1], found[1:])]
            assert thoughts == ["" if think is False else ANSWER] * 2
            texts = [one.content if ask is chat else one.response for one in found]
            assert "".join(texts) == ""


BODY = json.dumps({"model": MODEL, "messages": QUESTION, "options": GREEDY, "stream": False})
PATHS = {
    "/api/chat": BODY,
    "/api/generate": json.dumps({"prompt": "hi", "options": GREEDY, "stream": False}),
    "/api/show": json.dumps({"model": MODEL}),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "kind", [None, "", "text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "nonsense"]
)
def test_bodies_may_have_any_type(server: Running, path: str, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    reply = server.client.post(path, content=PATHS[path].encode(), headers=headers)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "page",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "none", "origin": "http://127.0.0.1"},
    ],
)
def test_bodies_of_web_pages_may_not(server: Running, path: str, page: dict[str, str]) -> None:
    """A form, or a script that asks for no permission, can send these types to any address."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        reply = server.client.post(path, content=PATHS[path].encode(), headers={**page, "content-type": kind})
        assert reply.status_code == 415, kind
        assert "Content-Type must be application/json" in reply.json()["error"]
    asked = {"content-type": "application/json", **page}  # which a browser sends only where it may
    assert server.client.post(path, content=PATHS[path].encode(), headers=asked).status_code == 200


def test_bodies_of_any_type_are_utf_8(server: Running) -> None:
    kind = {"content-type": "text/plain; charset=latin-1"}
    assert server.client.post("/api/chat", content=BODY.encode(), headers=kind).status_code == 415
