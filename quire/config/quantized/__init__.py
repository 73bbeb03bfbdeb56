"""Checkpoints that were quantised before: what their config.json and their headers say. No torch."""
