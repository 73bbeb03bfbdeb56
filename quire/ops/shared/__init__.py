"""Ops, and parts of them, that implementations share: plain torch, over their products where these are given."""
