"""Adapters beyond one with random initial values: frozen ones beside it, factors of weights."""
