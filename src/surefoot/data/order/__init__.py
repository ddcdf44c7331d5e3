"""Token ids to windows: shuffles, balancing by length, the loader."""
