"""The ways of tuning weights."""
