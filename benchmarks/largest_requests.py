"""The largest requests that an engine accepts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from quire.config.engine import QuireConfig
from quire.engine.front.input_processor import InputProcessor
from quire.sampling_params import BOUNDS, MAX_BAD_WORD_TOKENS


@dataclass(slots=True)
class Bounds:
    """Draws requests at the bounds of an engine."""

    config: QuireConfig
    processor: InputProcessor
    rng: random.Random
    prompts: list[list[int]] = field(default_factory=list)
    """The last ones, to come again."""

    def draw(self) -> tuple[list[int], dict[str, Any]]:
        """A prompt, and fields of its sampling parameters."""
        rng, room = self.rng, self.config.model_config.max_model_len
        seats = self.config.scheduler_config.max_num_seqs
        kind = rng.choice([self.lists, self.branches, self.ranked, self.beams, self.longest_prompt, self.again])
        length = rng.choice([1, room // 8, room // 2, room - room // 8])
        return kind(length, room, seats)

    def fill(self) -> tuple[list[int], dict[str, Any]]:
        """A prompt that no other begins like, long and soon computed, to fill the KV cache."""
        room = self.config.model_config.max_model_len
        return self._prompt(room - room // 8), {"max_tokens": room // 16, "ignore_eos": True, "temperature": 0.0}

    def lists(self, length: int, room: int, seats: int) -> tuple[list[int], dict[str, Any]]:
        """Every list at its bound."""
        return self._prompt(length), self._drawn() | self._at_bounds(self._output(room - length))

    def branches(self, length: int, room: int, seats: int) -> tuple[list[int], dict[str, Any]]:
        """The largest n."""
        fields = self._drawn() | self._at_bounds(self._output(room - length))
        return self._prompt(length), fields | {"n": self.rng.choice([seats, seats // 2 or 1])}

    def ranked(self, length: int, room: int, seats: int) -> tuple[list[int], dict[str, Any]]:
        """The largest best_of."""
        fields = self._drawn() | self._at_bounds(self._output(room - length))
        return self._prompt(length), fields | {"best_of": seats, "n": self.rng.randint(1, seats)}

    def beams(self, length: int, room: int, seats: int) -> tuple[list[int], dict[str, Any]]:
        """The widest beams with as many tokens that end one as candidates are left."""
        limit = min(self.config.model_config.max_logprobs, self.config.model_config.arch.vocab_size)
        width = max(2, min(seats, limit))
        fields = {"use_beam_search": True, "n": width, "temperature": 0.0, "early_stopping": "never"}
        stop = self.rng.sample(range(100, 1200), min(limit - width, BOUNDS["stop_token_ids"].items or 0))
        return self._prompt(length), fields | {
            "stop_token_ids": stop or None,
            "ignore_eos": True,
            "max_tokens": self._output(room - length),
        }

    def longest_prompt(self, length: int, room: int, seats: int) -> tuple[list[int], dict[str, Any]]:
        """The whole context but for a token, every position scored."""
        fields = self._drawn() | self._at_bounds(1)
        return self._prompt(room - 1), fields | {"prompt_logprobs": fields["logprobs"]}

    def again(self, length: int, room: int, seats: int) -> tuple[list[int], dict[str, Any]]:
        """A prompt that came before, read from the cache, and the longest output."""
        prompt = self.rng.choice(self.prompts or [self._prompt(length)])
        fields = self._drawn() | self._at_bounds(self._output(room - len(prompt)))
        return prompt, fields | {"prompt_logprobs": None}

    def _prompt(self, length: int) -> list[int]:
        vocab_size = self.config.model_config.arch.vocab_size
        prompt = [self.rng.randrange(vocab_size) for _ in range(length)]
        self.prompts = [*self.prompts[-7:], prompt]
        return prompt

    def _output(self, room: int) -> int:
        """Tokens: few or many, so that some requests end by themselves."""
        return max(1, min(room, self.rng.choice([1, 16, 32, 64, 64, 64, room])))

    def _drawn(self) -> dict[str, Any]:
        """How tokens are drawn."""
        rng = self.rng
        return {
            "temperature": rng.choice([0.0, 0.7, 1.5]),
            "top_p": rng.choice([1.0, 0.9]),
            "top_k": rng.choice([0, 50, 5000]),
            "min_p": rng.choice([0.0, 0.05]),
            "presence_penalty": rng.uniform(-2, 2),
            "frequency_penalty": rng.uniform(-2, 2),
            "repetition_penalty": rng.uniform(0.8, 1.3),
            "seed": rng.randrange(2**62),
            "skip_reading_prefix_cache": None,
        }

    def _at_bounds(self, max_tokens: int) -> dict[str, Any]:
        """Lists as long as they may be; nothing ends the output before its length."""
        rng, model = self.rng, self.config.model_config
        vocab_size = model.arch.vocab_size
        logprobs = -1 if model.max_logprobs >= vocab_size else model.max_logprobs
        ids = rng.sample(range(vocab_size), BOUNDS["stop_token_ids"].items or 0)
        return {
            "logprobs": logprobs,
            "prompt_logprobs": rng.choice([logprobs, None]),
            "stop_token_ids": ids,
            "logit_bias": {token_id: rng.uniform(-5, 5) for token_id in ids},
            "allowed_token_ids": list(range(min(vocab_size, BOUNDS["allowed_token_ids"].items or 0))),
            "bad_words": self._bad_words(),
            "max_tokens": max_tokens,
            "min_tokens": max_tokens,
            "ignore_eos": True,
        }

    def _bad_words(self) -> list[str]:
        """Words until one more would be too many tokens."""
        words: list[str] = []
        num_tokens, tokenizer = 0, self.processor.tokenizer
        assert tokenizer is not None
        while len(words) < (BOUNDS["bad_words"].items or 0):
            word = "".join(self.rng.choices("abcdefghijklmnopqrstuvwxyz", k=16))
            both = (tokenizer.encode(text, add_special_tokens=False) for text in (word, " " + word))
            num_tokens += sum(map(len, both))
            if num_tokens > MAX_BAD_WORD_TOKENS:
                break
            words.append(word)
        return words
