"""Bytes, limits and events: what every API stands on. Knows no API."""
