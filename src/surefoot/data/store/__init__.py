"""Token ids on disk: the cache, and datasets read in place."""
