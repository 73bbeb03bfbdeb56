"""One file per API surface, and what they share."""
