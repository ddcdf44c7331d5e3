"""Sweeps: trials of a recipe with other values of some settings, each an ordinary run."""
