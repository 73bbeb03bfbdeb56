"""The processes of `quire serve` that answer HTTP, and what passes between them."""
