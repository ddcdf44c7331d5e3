"""The thread that generates, and the models in it."""
