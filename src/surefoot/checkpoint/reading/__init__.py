"""Read a checkpoint: verify it, find the latest valid one, load states from it."""
