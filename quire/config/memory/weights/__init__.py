"""The tensors that a model is made of, and the bytes that they take."""
