"""Decoders of families that data alone do not describe, and parts of such decoders."""
