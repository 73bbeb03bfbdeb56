"""Layers that keep a state of fixed size."""
