"""How many bytes the activations of a step take."""
