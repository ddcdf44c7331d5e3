"""From dataset files to micro-batches."""
