"""Numbers for people: console lines and metrics."""
