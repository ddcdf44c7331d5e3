"""Runs in an object store: local copies of their small files, which the board reads as others."""
