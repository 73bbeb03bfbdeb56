"""Who comes next, and how much of a step each one has."""
