"""Configuration: flat user arguments in, one frozen object out."""
