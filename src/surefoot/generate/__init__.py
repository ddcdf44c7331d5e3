"""Sampling answers."""
