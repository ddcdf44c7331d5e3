"""LLaMA-Factory's YAML, JSON or command line as the settings of a recipe."""
