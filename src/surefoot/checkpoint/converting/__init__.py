"""Checkpoints from file to file: another layout, another mesh, weights only."""
