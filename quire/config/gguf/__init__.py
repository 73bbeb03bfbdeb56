"""GGUF, the format of llama.cpp: a file that holds the weights, the configuration and the tokenizer of a model.

Here are its header and what it says about the model. `quire.tokenizer.gguf` builds the tokenizer, `quire.loader.gguf`
reads the weights. Knows no torch.
"""
