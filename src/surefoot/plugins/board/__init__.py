"""The board: runs, curves, checkpoints, recipes and conversations in a browser, read from files.

It owns no training and imports neither torch nor transformers: what needs them is a child process
of the command line.
"""
