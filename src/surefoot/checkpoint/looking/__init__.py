"""What a checkpoint contains, for people and tools."""
