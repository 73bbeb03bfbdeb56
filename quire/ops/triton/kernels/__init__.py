"""The kernels, which modules of the same names in `quire.ops.triton` launch."""
