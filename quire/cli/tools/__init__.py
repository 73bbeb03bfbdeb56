"""Tools that a client runs for a model."""
