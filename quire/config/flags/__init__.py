"""What a user may turn: keywords, flags, and what is said of options of vLLM's."""
