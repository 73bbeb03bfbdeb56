"""Small things with one duty each."""
