"""Tests of quire."""
