"""The recipe: one YAML file, one frozen tree of sections. ``recipe.recipe`` contains them all."""
