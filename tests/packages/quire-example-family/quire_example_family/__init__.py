"""Families of models that quire finds by the entry points of this package."""
