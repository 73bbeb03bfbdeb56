import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.errors import InvalidParameter
from quire.tokenizer.tokenizer import MARK_END, MARK_START, load_tokenizer
from tests.tokenizer.trained import BUILDERS, TEXTS, backend, tokenizer, write_directory

KINDS = list(BUILDERS)
PROMPTS = [*TEXTS, "", " ", "\n\n", "<s>typed</s> <|im_end|>x", "a\0b", "tail  ", "  head"]


@pytest.mark.parametrize("kind", KINDS)
def test_encode_and_decode_equal_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(write_directory(tmp_path, kind))
    ours = load_tokenizer(tmp_path)
    rng = random.Random(3)
    for text in PROMPTS:
        for add in (True, False):
            assert ours.encode(text, add_special_tokens=add) == theirs.encode(text, add_special_tokens=add)
    for _ in range(200):
        ids = [rng.randrange(ours.vocab_size) for _ in range(rng.randrange(20))]
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    assert ours.special_ids == set(theirs.all_special_ids) | {3, 4}


@pytest.mark.parametrize(
    "config",
    [
        {"add_bos_token": True, "add_eos_token": True},
        {"pad_token": "<pad>", "additional_special_tokens": ["<|extra|>", "<|im_start|>"]},
        {"extra_special_tokens": {"image_token": "<image>"}},
        {
            "eos_token": {
                "__type": "AddedToken",
                "content": "<|im_end|>",
                "lstrip": True,
                "rstrip": False,
                "normalized": False,
            }
        },
        {
            "added_tokens_decoder": {
                "2": {"content": "</s>", "special": True},
                "450": {"content": "<think>", "lstrip": False, "rstrip": True, "normalized": False, "special": False},
            }
        },
        {
            "added_tokens_decoder": {
                "4": {"content": "<|im_end|>", "lstrip": True, "rstrip": True, "normalized": False, "special": True},
            }
        },
        {"extra_special_tokens": {"image_token": "<image>"}, "additional_special_tokens": ["<|extra|>"]},
    ],
    ids=["bos flags", "new tokens", "named extras", "token object", "listed tokens", "other flags", "both extras"],
)
def test_configured_tokens_are_added_as_transformers_adds_them(config: dict[str, object], tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    write_directory(tmp_path, "byte_level", **config)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    added = {token_id: token.content for token_id, token in theirs.added_tokens_decoder.items()}
    special = {token_id for token_id, token in theirs.added_tokens_decoder.items() if token.special}
    assert ours.added_tokens == added
    assert ours.special_ids == special
    assert ours.eos_token_id == theirs.eos_token_id
    for text in ("x <|extra|> y<pad><image> <think> </s>  <|im_end|> z", "plain"):
        assert ours.encode(text) == theirs.encode(text)


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("is_sequence", [True, False])
def test_a_space_in_front_is_as_the_configuration_says(is_sequence: bool, adds: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_directory(tmp_path, "byte_level", tokenizer_class="GPT2Tokenizer", add_prefix_space=adds)
    if is_sequence:
        state = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
        state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [state["pre_tokenizer"]]}
        (tmp_path / "tokenizer.json").write_text(json.dumps(state), encoding="utf-8")
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode("the quick") == theirs.encode("the quick")
    assert ours.encode("the quick") != ours.encode(" the quick") or adds


def test_bos_is_added_only_where_the_tokenizer_says_so() -> None:
    assert tokenizer("byte_fallback").encode("the")[0] == tokenizer("byte_fallback").bos_token_id
    assert tokenizer("byte_fallback").encode("the", add_special_tokens=False)[0] != 1
    assert 1 not in tokenizer("byte_level").encode("the")


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "unigram", "wordpiece"])
def test_special_tokens_in_the_text_are_recognised_unless_they_are_not_to_be(kind: str) -> None:
    text = "the <|im_end|> fox</s>"
    assert {2, 4} <= set(tokenizer(kind).encode(text))
    as_text = tokenizer(kind).encode(text, parse_special=False, add_special_tokens=False)
    assert not {1, 2, 3, 4} & set(as_text)


def test_special_tokens_taken_as_text_still_get_bos_in_front() -> None:
    ids = tokenizer("byte_fallback").encode("the </s>", parse_special=False)
    assert ids[0] == 1
    assert tokenizer("byte_fallback").decode(ids) == "the </s>"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_without_prefix"])
def test_text_without_special_tokens_encodes_the_same_either_way(kind: str) -> None:
    for text in TEXTS:
        assert tokenizer(kind).encode(text, parse_special=False) == backend(kind).encode(text).ids


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "unigram"])
def test_marked_specials_give_the_ids_that_the_plain_text_gives(kind: str) -> None:
    plain = "<|im_start|>user\nthe fox <|im_end|>\n<|im_start|>"
    marked = plain.replace("<|im_start|>", f"{MARK_START}<|im_start|>{MARK_END}")
    marked = marked.replace("<|im_end|>", f"{MARK_START}<|im_end|>{MARK_END}")
    assert tokenizer(kind).encode_marked(marked) == backend(kind).encode(plain, add_special_tokens=False).ids


def test_a_vocabulary_with_merges_into_a_special_token_cannot_be_tricked(tmp_path: Path) -> None:
    write_directory(tmp_path, "byte_fallback")
    path = tmp_path / "tokenizer.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    state["model"]["vocab"].update({token: 900 + i for i, token in enumerate(("<", "/", ">", "</", "s>"))})
    state["model"]["merges"] = [["<", "/"], ["s", ">"], ["</", "s>"], *state["model"]["merges"]]
    path.write_text(json.dumps(state), encoding="utf-8")
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("</s>") == [1, 2]
    assert loaded.encode("</s>", parse_special=False)[-2:] == [903, 904]


def test_a_letter_that_doubles_as_special_token_stays_a_letter_in_plain_text(tmp_path: Path) -> None:
    loaded = load_tokenizer(write_directory(tmp_path, "byte_level", pad_token="!", extra_special_tokens=["<new>"]))
    exclamation = loaded.special_tokens["!"]
    assert loaded.encode("hm! </s><new>", parse_special=False).count(exclamation) == 1
    marked = f"hm!{MARK_START}<new>{MARK_END}"
    assert loaded.encode_marked(marked)[-2:] == [exclamation, loaded.special_tokens["<new>"]]


@pytest.mark.parametrize("text", ["\ud800", "fine so far \udfff!"])
def test_an_unpaired_surrogate_is_refused_by_name_and_place(text: str) -> None:
    for parse in (True, False):
        with pytest.raises(InvalidParameter, match=f"unpaired surrogate.* at character {len(text.split('!')[0]) - 1}"):
            tokenizer("byte_level").encode(text, parse_special=parse)


def test_text_that_a_vocabulary_without_unknown_token_lacks_is_the_callers_error(tmp_path: Path) -> None:
    path = write_directory(tmp_path, "unigram") / "tokenizer.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    state["model"]["unk_id"] = None
    path.write_text(json.dumps(state), encoding="utf-8")
    with pytest.raises(InvalidParameter, match=r"cannot encode the prompt: .*unknown token"):
        load_tokenizer(tmp_path).encode("\N{WATERMELON}")


@pytest.mark.parametrize("wrong", [-1, 2**32, 2**70])
def test_an_impossible_token_id_is_refused(wrong: int) -> None:
    with pytest.raises(InvalidParameter, match=f"token id {wrong} is out of vocabulary"):
        tokenizer("byte_level").decode([5, wrong])


def test_an_id_without_a_token_gives_nothing() -> None:
    beyond = tokenizer("byte_level").vocab_size + 7
    assert tokenizer("byte_level").decode([beyond]) == ""
    assert tokenizer("byte_level").token(beyond) == ""
    assert tokenizer("byte_level").token_bytes(beyond) == b""


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_without_prefix", "unigram"])
def test_token_bytes_join_to_the_text(kind: str) -> None:
    loaded = tokenizer(kind)
    for text in TEXTS:
        ids = backend(kind).encode(text, add_special_tokens=False).ids
        joined = b"".join(map(loaded.token_bytes, ids)).decode()
        assert joined.removeprefix(" ") == loaded.decode(ids, skip_special_tokens=False).removeprefix(" ")


def test_token_bytes_are_single_bytes_where_a_token_is_one() -> None:
    level, fallback = tokenizer("byte_level"), tokenizer("byte_fallback")
    assert (
        sorted(level.token_bytes(i) for i in range(level.vocab_size) if len(level.token_bytes(i)) == 1)[255] == b"\xff"
    )
    assert [fallback.token_bytes(5 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert fallback.token_bytes(2) == b"</s>"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "unigram"])
@pytest.mark.parametrize("unit", ["a", "word ", "日"])
def test_encoding_is_not_quadratic_in_the_length_of_the_text(kind: str, unit: str) -> None:
    def seconds(count: int) -> float:
        start = time.thread_time()
        tokenizer(kind).encode(unit * count)
        return time.thread_time() - start

    seconds(1000)
    assert min(seconds(80_000), seconds(80_000)) < 10 * max(seconds(20_000), 0.004)  # quadratic would be 16


def test_threads_can_share_a_tokenizer() -> None:
    loaded = tokenizer("byte_fallback")

    def work(index: int) -> bool:
        text = TEXTS[index % len(TEXTS)] + "</s>"
        plain = loaded.encode(text, parse_special=index % 2 == 0, add_special_tokens=False)
        return loaded.decode(plain, skip_special_tokens=False).endswith("</s>")

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(400)))


def test_importing_and_using_the_tokenizer_takes_neither_torch_nor_transformers(tmp_path: Path) -> None:
    write_directory(tmp_path, "byte_level")
    program = (
        "import sys; from pathlib import Path; import quire.tokenizer.chat, quire.tokenizer.detokenizer;"
        "from quire.tokenizer.tokenizer import load_tokenizer;"
        f"load_tokenizer(Path({str(tmp_path)!r})).encode('x');"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("kind", ["byte_level", "unigram"])
def test_other_threads_run_while_a_long_text_is_tokenised_or_decoded(kind: str) -> None:
    """With this switch interval, a thread keeps the interpreter until it lets go of its own accord."""
    loaded, text = tokenizer(kind), "The quick brown fox " * 20_000
    ids = loaded.encode(text)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(600)
    try:
        for work in (lambda: loaded.encode(text), lambda: loaded.decode(ids)):
            started, done = threading.Event(), threading.Event()

            def run(
                work: Callable[[], object] = work, started: threading.Event = started, done: threading.Event = done
            ) -> None:
                started.set()
                work()
                done.set()

            thread = threading.Thread(target=run)
            thread.start()
            started.wait()
            was_done = done.is_set()
            thread.join()
            assert not was_done
    finally:
        sys.setswitchinterval(interval)
