"""Callbacks of the training loop. To add one: write its file, create it in ``run``."""
