"""The recipe: one YAML file, one frozen tree of sections.

``recipe.load`` is the way in: ``yaml`` gives plain data with the position of every key,
``overrides`` have precedence over it, ``schema`` builds the sections, and rules between sections
come last. A file of another program is converted first (``recipe.convert``). Nothing but the YAML
is read: what a recipe names is resolved by ``run``, with ``recipe_data`` for its data and the batch
sizes of its ranks. ``prediction`` is a recipe without training; ``run_recipe`` is what the recipe
in a run's folder decides.
"""
