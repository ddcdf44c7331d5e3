"""Runs in object stores, and models on hubs: a run works in a local folder, which is mirrored."""
