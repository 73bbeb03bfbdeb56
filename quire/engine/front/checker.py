"""`python -m quire.engine.front.checker`: the process that checks grammars, in bursts where the kernels are there."""

from quire.ops.cpu.library import compute_in_bursts
from quire.structured.checker_process import serve

if __name__ == "__main__":
    serve(compute_in_bursts)
