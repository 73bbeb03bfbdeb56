"""Models that quire does not have, built by transformers and run over quire's KV cache."""
