"""Watchers of the loop. To add one: write its file, build it in ``run``."""
