"""Write MindSpore folders: full, by rank, by iteration."""
