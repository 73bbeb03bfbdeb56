"""Attention to what an indexer chooses: tokens, or blocks of them."""
