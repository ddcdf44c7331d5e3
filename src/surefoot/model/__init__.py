"""A pretrained model: loading, packed attention, outputs."""
