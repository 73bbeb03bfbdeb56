"""How a step reaches the workers."""
