"""The commands that show runs: `board`, `watch` and `runs`."""
