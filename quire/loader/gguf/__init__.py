"""The weights of a GGUF file; `quire.config.gguf` reads its header."""
