"""The control plane: who runs, in which blocks. Knows no tensors."""
