"""Runs in object stores: a local folder does the work, and is mirrored file by file."""
