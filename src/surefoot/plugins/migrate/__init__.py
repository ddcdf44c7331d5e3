"""LLaMA-Factory's, TRL's, axolotl's and transformers' files as recipes."""
