"""The recipe: one YAML file, one frozen tree of sections. ``recipe.recipe`` has all of its uses."""
