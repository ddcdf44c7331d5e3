"""``metrics.jsonl`` in memory: read once and followed, thinned for curves, or an excerpt of it."""
