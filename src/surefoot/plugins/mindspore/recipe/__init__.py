"""A YAML file of MindSpore Transformers as the settings of a recipe."""
