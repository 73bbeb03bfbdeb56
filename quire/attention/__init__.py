"""Attention: what a step tells the layers, and the backends that plan it."""
