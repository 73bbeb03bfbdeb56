"""Checkpoints: finding, reading and placing weights."""
