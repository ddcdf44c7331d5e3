"""How a window is run forward and backward."""
