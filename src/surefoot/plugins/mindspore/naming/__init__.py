"""MindSpore Transformers' names of weights, and views that turn them into Hugging Face's."""
