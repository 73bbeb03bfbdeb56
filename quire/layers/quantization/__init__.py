"""How linear weights are kept, and how quantised ones are read."""
