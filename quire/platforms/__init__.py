"""What the machine offers."""
