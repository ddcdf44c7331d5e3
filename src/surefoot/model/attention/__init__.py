"""Attention over packed rows."""
