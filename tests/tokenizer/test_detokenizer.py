import gc
import json
import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.tokenizer.detokenizer import Detokenizer
from quire.tokenizer.tokenizer import load_tokenizer
from tests.tokenizer.trained import BUILDERS, TEXTS, backend, tokenizer

KINDS = list(BUILDERS)
FUZZ = settings(max_examples=200, deadline=None, derandomize=True)


def full_text(kind: str, prompt: list[int], output: list[int], skip: bool) -> str:
    """What the output adds to the decoded prompt, from decoding everything at once with the tokenizers package."""
    before = backend(kind).decode(prompt, skip_special_tokens=skip)
    whole = backend(kind).decode(prompt + output, skip_special_tokens=skip)
    assert whole.startswith(before)
    return whole[len(before) :]


def stream(detokenizer: Detokenizer, ids: list[int], sizes: list[int]) -> str:
    """The increments and the rest, with the ids cut into pieces of these sizes, over and over."""
    text, position, turn = "", 0, 0
    while position < len(ids):
        size = sizes[turn % len(sizes)]
        text += detokenizer.append(ids[position : position + size])
        assert detokenizer.text == text
        position, turn = position + size, turn + 1
    text += detokenizer.finish()
    assert detokenizer.text == text
    return text


def random_ids(kind: str, rng: random.Random, count: int) -> list[int]:
    """Ids of all sorts: any token, mostly bytes, real text, and now and then an id without a token."""
    size = tokenizer(kind).vocab_size
    choices = (
        lambda: [rng.randrange(size)],
        lambda: [rng.randrange(5, min(size, 261)) for _ in range(4)],
        lambda: backend(kind).encode(rng.choice(TEXTS), add_special_tokens=False).ids[:20],
        lambda: [rng.randrange(5), size + 3],
    )
    ids: list[int] = []
    while len(ids) < count:
        ids += rng.choice(choices)()
    return ids[:count]


PROMPTS = ("", "Hello world", "the fox", "日本語のテキスト the", "<s>the", "<s>", "two  spaces  the")


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5), skip=st.booleans())
@FUZZ
def test_stream_equals_the_full_decode_of_random_ids(kind: str, seed: int, sizes: list[int], skip: bool) -> None:
    rng = random.Random(seed)
    prompt = backend(kind).encode(rng.choice(PROMPTS)).ids
    ids = random_ids(kind, rng, rng.randrange(60))
    expected = full_text(kind, prompt, ids, skip)
    assert stream(Detokenizer(tokenizer(kind), prompt, skip_special_tokens=skip), ids, sizes) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_stream_equals_the_full_decode_of_text_in_all_scripts(kind: str) -> None:
    for text in TEXTS:
        ids = backend(kind).encode(text, add_special_tokens=False).ids
        for cut in range(len(ids)):
            detokenizer = Detokenizer(tokenizer(kind), [])
            streamed = detokenizer.append(ids[:cut]) + detokenizer.append(ids[cut:]) + detokenizer.finish()
            assert streamed == full_text(kind, [], ids, True)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_without_prefix"])
def test_no_increment_holds_part_of_a_character(kind: str) -> None:
    ids = backend(kind).encode("\N{WATERMELON} བོད་ཡིག \N{FAMILY}", add_special_tokens=False).ids
    detokenizer = Detokenizer(tokenizer(kind), [])
    assert not any("\ufffd" in detokenizer.append([token_id]) for token_id in ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_without_prefix"])
def test_a_character_that_is_never_finished_ends_as_replacement_like_in_the_full_decode(kind: str) -> None:
    prompt = backend(kind).encode("the").ids
    ids = backend(kind).encode("fox\N{WATERMELON}", add_special_tokens=False).ids[:-1]
    detokenizer = Detokenizer(tokenizer(kind), prompt)
    detokenizer.append(ids)
    assert detokenizer.finish().startswith("\ufffd")
    assert detokenizer.text == full_text(kind, prompt, ids, True)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_without_prefix"])
@pytest.mark.parametrize("num_left", [1, 2, 3])
def test_a_character_begun_by_the_prompt_belongs_to_the_output(kind: str, num_left: int) -> None:
    ids = backend(kind).encode("fox \N{WATERMELON}fox").ids
    end = next(i for i in range(len(ids), 0, -1) if backend(kind).decode(ids[:i]).endswith("\N{WATERMELON}"))
    prompt, output = ids[: end - num_left], ids[end - num_left :]
    finished = backend(kind).decode(prompt).rstrip("\ufffd")
    expected = backend(kind).decode(ids)[len(finished) :]
    assert stream(Detokenizer(tokenizer(kind), prompt), output, [1]) == expected
    assert "\N{WATERMELON}fox" in expected


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_finished_character_at_the_end_of_the_prompt_is_not_repeated(kind: str) -> None:
    prompt = backend(kind).encode("fox \N{GRINNING FACE}").ids
    before = backend(kind).encode("x", add_special_tokens=False).ids
    output = backend(kind).encode("x\N{WATERMELON}", add_special_tokens=False).ids[len(before) :]
    assert stream(Detokenizer(tokenizer(kind), prompt), output, [1]) == "\N{WATERMELON}"


@pytest.mark.parametrize("kind", ["byte_fallback", "unigram"])
def test_the_leading_space_of_a_word_is_kept_after_a_prompt_and_dropped_without_one(kind: str) -> None:
    ids = backend(kind).encode("hello", add_special_tokens=False).ids
    assert stream(Detokenizer(tokenizer(kind), []), ids, [1]) == "hello"
    assert stream(Detokenizer(tokenizer(kind), [1]), ids, [1]) == "hello"
    assert stream(Detokenizer(tokenizer(kind), [1, *ids]), ids, [1]) == " hello"


@pytest.mark.parametrize("kind", KINDS)
def test_skipping_special_tokens_is_decided_per_token(kind: str) -> None:
    word = backend(kind).encode("the", add_special_tokens=False).ids
    ids = [*word, 3, *word, 4, 4, *word]
    for skip in (True, False):
        detokenizer = Detokenizer(tokenizer(kind), [], skip_special_tokens=skip)
        text = stream(detokenizer, ids, [1])
        assert text == full_text(kind, [], ids, skip)
        assert ("<|im_start|>" in text) is not skip


def test_without_spaces_adjacent_special_tokens_touch() -> None:
    make = tokenizer("wordpiece")
    with_spaces = Detokenizer(make, [], skip_special_tokens=False, spaces_between_special_tokens=True)
    without = Detokenizer(make, [], skip_special_tokens=False, spaces_between_special_tokens=False)
    assert stream(with_spaces, [3, 4, 4], [1]) == "<|im_start|> <|im_end|> <|im_end|>"
    assert stream(without, [3, 4, 4], [1]) == "<|im_start|><|im_end|><|im_end|>"


@pytest.mark.parametrize("kind", ["byte_fallback", "unigram", "wordpiece", "no_decoder"])
def test_a_token_that_is_an_empty_string_counts_like_in_the_full_decode(kind: str, tmp_path: Path) -> None:
    state = json.loads(backend(kind).to_str())
    vocabulary, empty = state["model"]["vocab"], tokenizer(kind).vocab_size
    if isinstance(vocabulary, list):
        vocabulary.append(["", -20.0])
    else:
        vocabulary[""] = empty
    (tmp_path / "tokenizer.json").write_text(json.dumps(state), encoding="utf-8")
    loaded = load_tokenizer(tmp_path)
    word = backend(kind).encode("hello", add_special_tokens=False).ids
    for ids in ([empty, *word], [empty, empty, *word, empty, *word], [*word, empty, empty, *word, empty]):
        for prompt in ([], [empty], [*word, empty], [1, empty, empty]):
            expected = loaded.decode(prompt + ids)[len(loaded.decode(prompt)) :]
            assert stream(Detokenizer(loaded, prompt), ids, [1]) == expected


# Stop strings


def first_match(text: str, stop: list[str], after: int) -> tuple[int, int, str] | None:
    """(start, end, string) of the match that is complete first and, of those, the longest; ends beyond `after`."""
    found = [
        (end, end - len(string), string)
        for string in stop
        for end in range(max(after + 1, len(string)), len(text) + 1)
        if text[end - len(string) : end] == string
    ]
    if not found:
        return None
    end, start, string = min(found)
    return start, end, string


def certain_lengths(kind: str, ids: list[int]) -> list[int]:
    """Characters that are certain after each token, without stop strings."""
    detokenizer = Detokenizer(tokenizer(kind), [])
    lengths = [0]
    for token_id in ids:
        detokenizer.append([token_id])
        lengths.append(len(detokenizer.text))
    return lengths


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "unigram"])
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    include=st.booleans(),
    min_tokens=st.integers(0, 12),
)
@FUZZ
def test_stop_strings_are_found_like_in_the_whole_text(
    kind: str, seed: int, sizes: list[int], include: bool, min_tokens: int
) -> None:
    rng = random.Random(seed)
    ids = random_ids(kind, rng, 40)
    whole = full_text(kind, [], ids, True)
    starts = [rng.randrange(len(whole)) for _ in range(3)]
    stop = [whole[start : start + rng.randrange(1, 9)] for start in starts] + ["never there", "e"][: rng.randrange(3)]
    lengths = certain_lengths(kind, ids)
    match = first_match(whole, stop, lengths[min_tokens])
    detokenizer = Detokenizer(
        tokenizer(kind), [], stop=tuple(stop), include_stop_str_in_output=include, min_tokens=min_tokens
    )
    text = stream(detokenizer, ids, sizes)
    if match is None:
        assert (text, detokenizer.stop_reason) == (whole, None)
        return
    start, end, string = match
    assert detokenizer.stop_reason == string
    assert text == whole[: end if include else start]
    assert detokenizer.num_tokens_used == next((n for n, length in enumerate(lengths) if length >= end), len(ids))


def test_a_stop_string_across_tokens_is_cut_and_nothing_of_it_was_emitted() -> None:
    ids = backend("byte_level").encode("yes\n\nUser: no").ids
    detokenizer = Detokenizer(tokenizer("byte_level"), [], stop=("\n\nUser:",))
    emitted = [detokenizer.append([token_id]) for token_id in ids]
    assert "".join(emitted) == "yes"
    assert (detokenizer.stop_reason, detokenizer.finish()) == ("\n\nUser:", "")


def test_only_what_can_become_a_stop_string_is_held_back() -> None:
    rng = random.Random(5)
    stop = ("aba", "abab!", "ba\n")
    for _ in range(300):
        text = "".join(rng.choice("ab\n") for _ in range(12))
        ids = backend("byte_level").encode(text).ids
        detokenizer = Detokenizer(tokenizer("byte_level"), [], stop=stop)
        for count, token_id in enumerate(ids, 1):
            detokenizer.append([token_id])
            if detokenizer.stop_reason is not None:
                break
            seen = backend("byte_level").decode(ids[:count])
            held = max(n for n in range(5) if n == 0 or any(s[:n] == seen[-n:] and len(s) > n for s in stop))
            assert detokenizer.text == seen[: len(seen) - held]


def test_what_was_held_back_comes_with_finish() -> None:
    detokenizer = Detokenizer(tokenizer("byte_level"), [], stop=("</answer>",))
    assert detokenizer.append(backend("byte_level").encode("42</ans").ids) == "42"
    assert detokenizer.finish() == "</ans"
    assert detokenizer.stop_reason is None


def test_of_two_stop_strings_the_one_complete_first_wins_whatever_the_order() -> None:
    ids = backend("byte_level").encode("xabcdx").ids
    for stop in (("abcd", "bc"), ("bc", "abcd")):
        detokenizer = Detokenizer(tokenizer("byte_level"), [], stop=stop)
        assert (detokenizer.append(ids), detokenizer.stop_reason) == ("xa", "bc")


def test_of_two_stop_strings_complete_together_the_longest_wins() -> None:
    ids = backend("byte_level").encode("xabcx").ids
    for stop in (("abc", "bc"), ("bc", "abc")):
        detokenizer = Detokenizer(tokenizer("byte_level"), [], stop=stop)
        assert (detokenizer.append(ids), detokenizer.stop_reason) == ("x", "abc")


def test_tokens_after_the_stop_string_are_not_counted() -> None:
    ids = backend("byte_level").encode("a.b.c.d").ids
    detokenizer = Detokenizer(tokenizer("byte_level"), [], stop=(".",))
    detokenizer.append(ids)
    assert detokenizer.append(ids) == ""
    assert (detokenizer.text, detokenizer.num_tokens_used) == ("a", 2)


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens() -> None:
    ids = backend("byte_level").encode("a.b.c").ids
    detokenizer = Detokenizer(tokenizer("byte_level"), [], stop=(".",), min_tokens=2)
    assert detokenizer.append(ids) == "a.b"
    assert detokenizer.num_tokens_used == 4


def test_a_stop_string_in_a_run_of_byte_tokens_is_found_when_the_run_ends() -> None:
    ids = backend("byte_fallback").encode("x\N{WATERMELON}", add_special_tokens=False).ids
    detokenizer = Detokenizer(tokenizer("byte_fallback"), [], stop=("\N{WATERMELON}",))
    assert detokenizer.append(ids) + detokenizer.finish() == "x"
    assert (detokenizer.stop_reason, detokenizer.num_tokens_used) == ("\N{WATERMELON}", len(ids))


# Cost


def seconds_per_token(kind: str, ids: list[int], **options: object) -> float:
    detokenizer = Detokenizer(tokenizer(kind), [], **options)  # type: ignore[arg-type]
    gc.disable()  # a collection looks at all that other tests keep
    start = time.thread_time()
    for token_id in ids:
        detokenizer.append((token_id,))
    end = time.thread_time()
    gc.enable()
    return (end - start) / len(ids)


@pytest.mark.parametrize(("kind", "limit_us"), [("byte_level", 25), ("byte_fallback", 150), ("unigram", 150)])
def test_the_cost_of_a_token_does_not_grow_with_the_text(kind: str, limit_us: float) -> None:
    ids = backend(kind).encode(TEXTS[0] * 60, add_special_tokens=False).ids
    stop = ("a" * 200 + "b", "\n\nUser:", "###")
    seconds_per_token(kind, ids, stop=stop)
    short = seconds_per_token(kind, ids[:1000], stop=stop)
    long = seconds_per_token(kind, ids * 4, stop=stop)
    assert long < 4 * short
    assert long * 1e6 < limit_us


def test_a_stop_string_of_repeated_letters_costs_no_more_per_token() -> None:
    ids = backend("byte_level").encode("a").ids * 5000
    assert seconds_per_token("byte_level", ids, stop=("a" * 255 + "b", "a" * 200 + "c")) * 1e6 < 100
