"""Examples to token ids and batches: codec, templates, packing, collation."""
