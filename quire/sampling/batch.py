"""`SamplingBatch`: the parameters of a set of rows as tensors.

Built once when the set of rows changes and used for every step until it changes again: only the rows' tokens grow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.ops.contracts.ops import Ops
from quire.sampling.grammar_masks import GrammarMasks
from quire.sampling.processors import processors_for
from quire.sampling.random import UniformStreams
from quire.sampling.row import SamplingRow

__all__ = ["SamplingBatch", "SamplingRow"]


class SamplingBatch:
    """The rows sampled together, with what does not change from step to step."""

    def __init__(self, rows: Sequence[SamplingRow], vocab_size: int, ops: Ops) -> None:
        self.rows = list(rows)
        params = [row.request.sampling_params for row in self.rows]
        random = [index for index, p in enumerate(params) if not p.is_greedy]
        self.all_greedy = not random
        """Every row takes its most likely token."""
        self.all_random = len(random) == len(self.rows)
        """Every row draws."""
        self.random_rows = random
        """Rows that draw."""
        self.random_indices = torch.tensor(random, dtype=torch.int64)
        """The same, [D]."""
        self.temperature = torch.tensor([params[i].temperature for i in random], dtype=torch.float32, device=ops.device)
        """Of the random rows, as are the next four."""
        self.top_k = torch.tensor([params[i].top_k for i in random], dtype=torch.int64, device=ops.device)
        self.top_p = torch.tensor([params[i].top_p for i in random], dtype=torch.float32, device=ops.device)
        self.min_p = torch.tensor([params[i].min_p for i in random], dtype=torch.float32, device=ops.device)
        self.uniforms = UniformStreams(
            [self.rows[i].request.seed for i in random], [self.rows[i].branch for i in random]
        )
        self.processors = processors_for(self.rows, vocab_size, ops)
        """What changes logits, in order."""
        has_grammar = any(row.matcher is not None for row in self.rows)
        self.grammar_masks = GrammarMasks(self.rows, vocab_size, ops) if has_grammar else None
        """What grammars allow, after the processors; None where no row has one."""
        self.needs_penalties = any(row.needs_penalties for row in self.rows)
        counts = [row.request.num_logprobs for row in self.rows]
        self.logprobs_rows = [index for index, count in enumerate(counts) if count is not None]
        """Rows that report log-probabilities."""
        self.logprobs_counts = [vocab_size if count == -1 else count for count in counts if count is not None]
        """How many candidates each of these rows reports."""
        self.max_logprobs = max(self.logprobs_counts, default=None)
        """The most candidates a row reports, or None when no row reports any."""
        self.only_ops = (self.all_greedy or self.all_random) and not self.processors and not self.logprobs_rows
        """The logits go from op to op; torch itself does nothing with them."""
        self.only_largest = not (random or self.processors or has_grammar or self.logprobs_rows)
        """The largest logit of each row and its token are all that is needed of the logits."""
        reports_all = any(count >= vocab_size for count in self.logprobs_counts)
        self.leaves_tokens = not self.processors and self.grammar_masks is None and not reports_all
        """Nothing but the next step needs the tokens that are drawn: the host can look at them later, and at the
        candidates beside them, but for those of the whole vocabulary, whose copies would take as much as the logits."""
