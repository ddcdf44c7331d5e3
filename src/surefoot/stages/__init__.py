"""The training objectives."""
