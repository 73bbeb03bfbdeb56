"""The layers models are made of."""
