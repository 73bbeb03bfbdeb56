"""For how many sequences steps are captured on devices that capture graphs."""

from __future__ import annotations

SMALLEST = (1, 2, 4)
STRIDE = 8
"""Between larger sizes. Seven rows more cost little: a step reads all weights whatever the number of its rows, and
products compute 16 rows at a time at least."""
LARGEST = 512
"""In larger steps the kernels take longer than their launches."""


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Ascending: 1, 2, 4, then the multiples of 8, up to as many sequences as a step may have.

    A step has graphs for all of its possible sizes up to 512 sequences, in 67 graphs at most.
    """
    most = min(max_num_seqs, LARGEST)
    sizes = (*SMALLEST, *range(STRIDE, most, STRIDE))
    return (*(size for size in sizes if size < most), most)
