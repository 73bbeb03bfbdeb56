"""An engine core in a process of its own: how it is started, watched, spoken to and replaced."""
