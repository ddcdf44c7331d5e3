"""Resume runs of Hugging Face's Trainer, and convert runs for it; weights of DCP and DeepSpeed.

The Trainer stores its training state in pickles. Only ``pickles`` opens them, as tensors and plain
values, and only with the user's consent.
"""
