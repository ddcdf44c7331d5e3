"""Runs in object stores: a run works in a local folder, which is mirrored file by file."""
