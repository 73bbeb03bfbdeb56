"""A case from a seed. Everything is drawn from one generator, in one order: equal seeds give equal cases.

To try a new feature, add a field to `cases` and draw it here.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from tools.fuzz_invariance.cases import MAX_MODEL_LEN, WHOSE, Case, EngineChoice, Event, Kind, RequestChoice
from tools.fuzz_invariance.engines import ATTENTION_FREE, CHOSEN_BLOCKS, COMPRESSED, MEANS, MODELS, RECURRENT

NUM_TOKEN_IDS = 300
LAST_STEP = 40
"""Requests arrive, and things happen, before it."""
MAX_PROMPT = 70
SHARE_RECURRENT = 0.4
"""Of the models that have recurrent layers: a step of theirs takes longer."""
SHARE_COMPRESSED = 0.06
"""Of the cases with compressed attention. Drawn apart from all else, as `STEPS_IN_FLIGHT` are."""
SHARE_CHOSEN_BLOCKS = 0.04
"""Likewise, of those in which an indexer chooses blocks of tokens."""
SHARE_MEANS = 0.04
"""Likewise, of those in which one chooses them by their means."""
SHARE_BOUND = 0.25
"""Of the requests whose output follows a form."""
FORMS: list[dict[str, Any]] = [
    {"choice": ["a", " a the", "in the", " s", "the on"]},
    {"regex": "[a-e]{2,6}( the| a)?[0-9]*"},
    {"regex": "(.|\n){3,9}"},
    {"json_object": True, "disable_any_whitespace": True},
    {"json": {"type": "array", "items": {"enum": ["the", "in", 1, None]}, "minItems": 1, "maxItems": 4}},
    {
        "json": {
            "type": "object",
            "properties": {"a": {"type": "boolean"}, "the": {"type": "string", "maxLength": 4}},
            "required": ["a"],
            "additionalProperties": False,
        },
        "disable_any_whitespace": True,
    },
    {"grammar": 'start: word (" " word)*\nword: /[a-z]{1,3}/ | "<" start ">"'},
    {"grammar": 'root ::= item ("," item){0,4}\nitem ::= "he" | "re" | [0-9]'},
    {
        "structural_tag": {
            "structures": [{"begin": "t", "schema": {"type": "boolean"}, "end": "."}],
            "triggers": ["t"],
        }
    },
]
"""Of outputs. Short ones, so that some end within the tokens that a request may have."""
STEPS_IN_FLIGHT = (1, 2, 2, 3)
"""Drawn apart from all else, so that cases are what they were before there could be several."""
SHARE_DRAWN_AHEAD = 0.4
"""Of the cases with steps in flight: no request asks for what the host needs a token for before the next step."""
NEED_NO_TOKENS = frozenset(
    ("max_tokens", "temperature", "seed", "n", "top_k", "top_p", "min_p", "stop", "stop_token_ids", "ignore_eos")
)
"""Parameters with which tokens can stay on a device."""
NUM_TEXTS = 3
"""Prompts begin with parts of so many texts, so that prefixes coincide."""


def draw_case(seed: int) -> Case:
    """The case of a seed."""
    rng = random.Random(seed)
    engine = replace(_engine(rng), max_steps_in_flight=random.Random(f"steps {seed}").choice(STEPS_IN_FLIGHT))
    if random.Random(f"compressed {seed}").random() < SHARE_COMPRESSED:
        engine = replace(engine, model=COMPRESSED, kv_cache_dtype="auto")
    elif (apart := random.Random(f"blocks {seed}")).random() < SHARE_CHOSEN_BLOCKS:
        size = apart.choice([4, 8, 16])
        engine = replace(engine, model=CHOSEN_BLOCKS, kv_cache_dtype="auto", block_size=size)
    elif (apart := random.Random(f"means {seed}")).random() < SHARE_MEANS:
        engine = replace(engine, model=MEANS, kv_cache_dtype="auto", block_size=apart.choice([4, 8, 16]))
    texts = [_tokens(rng, MAX_PROMPT) for _ in range(NUM_TEXTS)]
    tenants = [""] if rng.random() < 0.6 else ["a", "b", "c"][: rng.randint(2, 3)]
    requests: list[RequestChoice] = []
    for _ in range(rng.randint(2, 6)):
        requests.append(_request(rng, engine, texts, tenants, requests))
    if engine.max_steps_in_flight > 1 and random.Random(f"ahead {seed}").random() < SHARE_DRAWN_AHEAD:
        requests = [_drawn_ahead(request) for request in requests]
    num_events = rng.choice([0, 0, 1, 2, 4])
    events = sorted((_event(rng, len(requests)) for _ in range(num_events)), key=lambda event: event.at)
    return Case(seed=seed, engine=engine, requests=tuple(requests), events=tuple(events))


def _engine(rng: random.Random) -> EngineChoice:
    max_num_seqs = rng.randint(1, 8)
    enable_prefix_caching = rng.random() < 0.8
    ops = "cpu" if rng.random() < 0.96 else "reference"
    model = _model(rng)
    return EngineChoice(
        model=model,
        dtype=rng.choice(["float32", "float32", "bfloat16", "float16"]),
        kv_cache_dtype=rng.choice(["auto"] if model in ATTENTION_FREE else ["auto", "auto", "int8", "fp8"]),
        ops=ops,
        block_size=rng.choice([4, 4, 8, 16] if model in RECURRENT else [4, 8, 12, 16, 16, 32]),
        blocks_per_state=rng.choice([1, 1, 2]),
        num_threads=2 if ops == "cpu" and rng.random() < 0.1 else 1,
        num_spare_blocks=rng.choice([0, 1, 2, 3, 5, 8, 13, 100]),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_seqs, rng.choice([8, 16, 40, 256])),
        long_prefill_token_threshold=rng.choice([0, 0, 3, 7, 16, 33]),
        enable_prefix_caching=enable_prefix_caching,
        num_ram_pages=rng.choice([0, 0, 1, 4, 40]) if enable_prefix_caching else 0,
        policy=rng.choice(["fcfs", "priority"]),
        priority_ageing_s=rng.choice([0.0, 0.02, 0.2]),
        grammar_steps=rng.choice([0, 0, 1, 4]),
    )


def _model(rng: random.Random) -> str:
    is_recurrent = rng.random() < SHARE_RECURRENT
    others = [name for name in MODELS if name not in (COMPRESSED, CHOSEN_BLOCKS, MEANS)]
    return rng.choice([name for name in others if (name in RECURRENT) == is_recurrent])


def _request(
    rng: random.Random, engine: EngineChoice, texts: list[list[int]], tenants: list[str], earlier: list[RequestChoice]
) -> RequestChoice:
    follows = rng.randrange(len(earlier)) if earlier and rng.random() < 0.15 else None
    token_ids = _tokens(rng, rng.randint(1, 8)) if follows is not None else _prompt(rng, texts, earlier)
    return RequestChoice(
        token_ids=tuple(token_ids),
        params=_params(rng, engine),
        arrives_at=0 if rng.random() < 0.4 else rng.randrange(LAST_STEP),
        follows=follows,
        cache_salt=rng.choice([None, None, None, "salt"]),
        tenant=rng.choice(tenants),
        priority=rng.randint(-2, 2),
    )


def _prompt(rng: random.Random, texts: list[list[int]], earlier: list[RequestChoice]) -> list[int]:
    """An earlier prompt again, or the beginning of a text, perhaps with another text's head and a tail of its own."""
    if earlier and rng.random() < 0.2:
        return list(rng.choice(earlier).token_ids)
    text = list(rng.choice(texts))
    if rng.random() < 0.4:
        head = rng.choice([4, 8, 16, 32])
        text[:head] = rng.choice(texts)[:head]
    tail = _tokens(rng, rng.randint(0, 8))
    return [*text[: rng.randint(1, MAX_PROMPT - len(tail))], *tail]


def _params(rng: random.Random, engine: EngineChoice) -> dict[str, Any]:
    max_tokens = rng.randint(1, 14)
    if engine.max_num_seqs > 1 and rng.random() < 0.12:
        return _beams(rng, engine, max_tokens)
    params: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": rng.choice([0.0, 0.7, 1.0, 1.5]),
        "seed": rng.randrange(4),
        "logprobs": rng.choice([None, 0, 1, 3]),
        "n": min(engine.max_num_seqs, rng.choice([1, 1, 1, 2, 3, 5])),
    }
    for name, value in _seldom(rng, max_tokens).items():
        if rng.random() < 0.15:
            params[name] = value
    if rng.random() < 0.1:
        params["best_of"] = rng.randint(params["n"], max(params["n"], min(engine.max_num_seqs, 5)))
    form = rng.choice(FORMS)
    if rng.random() < SHARE_BOUND:
        params.pop("ignore_eos", None)  # refused beside a form, which says where the output ends
        params["structured_outputs"] = form
    return params


def _drawn_ahead(request: RequestChoice) -> RequestChoice:
    return replace(request, params={name: request.params[name] for name in request.params if name in NEED_NO_TOKENS})


def _beams(rng: random.Random, engine: EngineChoice, max_tokens: int) -> dict[str, Any]:
    width = rng.randint(2, min(engine.max_num_seqs, 5))
    return {
        "use_beam_search": True,
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "beam_width": width,
        "n": rng.randint(1, width),
        "length_penalty": rng.choice([0.0, 1.0, 2.0]),
        "early_stopping": rng.choice([True, False, "never"]),
        "stop_token_ids": rng.choice([None, rng.sample(range(NUM_TOKEN_IDS), 5)]),
        "logprobs": (None, 0, 3)[width % 3],
    }


def _seldom(rng: random.Random, max_tokens: int) -> dict[str, Any]:
    """What few requests ask for, each by itself; drawn whether it is used or not."""
    return {
        "prompt_logprobs": rng.choice([0, 2]),
        "skip_reading_prefix_cache": True,
        "top_k": rng.randint(1, 40),
        "top_p": rng.uniform(0.3, 0.99),
        "min_p": rng.uniform(0.01, 0.3),
        "repetition_penalty": rng.uniform(0.7, 1.6),
        "presence_penalty": rng.uniform(-1, 1),
        "frequency_penalty": rng.uniform(-1, 1),
        "min_tokens": rng.randint(1, max_tokens),
        "stop_token_ids": rng.sample(range(NUM_TOKEN_IDS), 40),
        "stop": rng.sample("abcdefghijklmnopqrstuvwxyz 0123456789", 8),
        "bad_words": ["the", "a", rng.choice(["in", "he s", "on the"])],
        "allowed_token_ids": rng.sample(range(NUM_TOKEN_IDS), rng.randint(5, 200)),
        "logit_bias": {rng.randrange(NUM_TOKEN_IDS): rng.uniform(-5, 5) for _ in range(5)},
        "ignore_eos": True,
    }


def _event(rng: random.Random, num_requests: int) -> Event:
    kind = rng.choice(list(Kind))
    request = rng.randrange(num_requests)
    return Event(at=rng.randrange(1, LAST_STEP), kind=kind, request=request if kind in WHOSE else 0)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(NUM_TOKEN_IDS) for _ in range(count)]


assert MAX_PROMPT < MAX_MODEL_LEN
