"""Dataset formats: one row to one Example."""
