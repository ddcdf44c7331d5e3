"""New decoder layers in a pretrained model (LLaMA Pro), and the proof that they change nothing."""
