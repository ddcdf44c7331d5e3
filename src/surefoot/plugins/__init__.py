"""Plugins: formats of other programs, and products around the core, which imports none of them."""
