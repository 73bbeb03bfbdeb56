"""Parallel groups and what they exchange."""
