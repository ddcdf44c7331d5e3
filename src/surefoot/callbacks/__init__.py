"""Watchers of the loop."""
