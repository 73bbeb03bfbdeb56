"""Conversations in a terminal: questions read, answers shown."""
