"""Token ids to windows: shuffles, length balancing, the loader."""
