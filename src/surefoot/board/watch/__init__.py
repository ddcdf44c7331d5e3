"""Runs in the terminal: the states and figures of the board, with curves of characters."""
