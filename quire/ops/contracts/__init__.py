"""What the ops promise, and what they are given."""
