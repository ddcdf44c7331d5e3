"""Optimizers of our own: the settings, the declared state and the update rule of each."""
