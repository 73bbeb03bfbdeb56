"""The tokenizer that a GGUF file has in its metadata, as a `tokenizer.json`."""
