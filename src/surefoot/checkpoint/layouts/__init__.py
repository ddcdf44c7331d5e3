"""Folders of weights in the formats of others, opened as sources."""
