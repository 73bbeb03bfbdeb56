"""Attention, the rotation of heads and the caches that they read."""
