"""What a run did, for people and for quantize_report.json."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """Over the blocks of the calibration text that are held out."""

    before: float
    after: float
    """Of the weights as they are stored; inputs are not rounded for it."""
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Sizes and perplexity."""

    directory: str
    format: str
    method: str
    num_quantized: int
    """Linear layers."""
    bytes_before: int
    bytes_after: int
    perplexity: Perplexity | None
    """None where it was not asked for."""

    def as_json(self) -> dict[str, Any]:
        """Every number."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The same, to print."""
        share = self.bytes_after / self.bytes_before
        lines = [
            f"{self.directory}: {self.num_quantized} linear layers to {self.format} by {self.method}, "
            f"{self.bytes_before / 1e6:,.1f} MB -> {self.bytes_after / 1e6:,.1f} MB ({share:.0%})"
        ]
        if self.perplexity is not None:
            before, after = self.perplexity.before, self.perplexity.after
            lines.append(
                f"perplexity {before:.4f} -> {after:.4f} ({after / before - 1:+.2%}) over "
                f"{self.perplexity.num_tokens:,} tokens that were not calibrated with"
            )
        return lines
