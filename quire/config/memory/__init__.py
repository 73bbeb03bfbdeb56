"""How many bytes a model takes, and what fits: from its configuration alone, before anything is loaded."""
