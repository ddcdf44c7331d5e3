"""Settings of TRL, axolotl and transformers' Trainer as those of a recipe.

What they share with LLaMA-Factory, which has transformers' training arguments, too, is converted as
its arguments are. Their own defaults are written wherever they differ.
"""
