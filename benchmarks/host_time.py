"""What a step costs beside its kernels: everything in Python, from scheduling to text.

    python -m benchmarks.host_time [--model DIR] [--num-seqs 32] [--temperature 0.8]

Every function of the native library is wrapped with a clock; the rest of a step is the host's share.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from quire import LLM, SamplingParams
from quire.ops.cpu import library


class KernelClock:
    """Seconds spent inside the native library since the last `take`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        lib = library.load()
        for name in library.SIGNATURES:
            setattr(lib, name, self._timed(getattr(lib, name)))

    def take(self) -> float:
        """Read and reset."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def _timed(self, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            start = time.perf_counter()
            result = function(*arguments)
            self.seconds += time.perf_counter() - start
            return result

        return call


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--num-seqs", type=int, default=32)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    llm = LLM(args.model, num_threads=args.threads)
    clock = KernelClock()
    params = SamplingParams(temperature=args.temperature, max_tokens=args.steps + 50, ignore_eos=True)
    for i in range(args.num_seqs):
        llm.engine.add_request(str(i), [100 + i, 7, 8, 9], params)
    host, kernels = [], []
    for _ in range(args.steps):
        clock.take()
        start = time.perf_counter()
        llm.engine.step()
        inside = clock.take()
        host.append(1000 * (time.perf_counter() - start - inside))
        kernels.append(1000 * inside)
    print(
        f"{args.num_seqs} sequences: kernels median {statistics.median(kernels):.3f} ms, "
        f"host median {statistics.median(host):.3f} ms a step"
    )


if __name__ == "__main__":
    main()
