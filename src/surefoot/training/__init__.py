"""The training loop, and what stages, methods and callbacks owe it."""
