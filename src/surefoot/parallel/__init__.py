"""Ranks, sharding, and how a window is run forward and backward."""
