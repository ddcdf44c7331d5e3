"""Open MindSpore folders in any of their forms: full, by rank, by iteration."""
