"""Models and checkpoints on a hub: what is uploaded, its card, and the upload itself."""
