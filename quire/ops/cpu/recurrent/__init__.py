"""Layers that keep a state: convolutions, Mamba, the delta rule and its kin."""
